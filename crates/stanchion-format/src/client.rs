//! What a rank and its agent say on the local socket. One request at a time, each with one answer.
//!
//! Kinds of frames: [`KIND_REQUEST`] rank to agent, [`KIND_ANSWER`] agent to rank. A rank first says
//! [`Request::Hello`]; the agent compares the socket's peer credentials with its own uid (FM-C2).

use crate::changed::Changed;
use crate::ids::{DatasetNo, ExtentId, Key, Level, RankId, SlotId};
use crate::manifest::FileDecl;
use serde::{Deserialize, Serialize};

/// Frame kind of a [`Request`].
pub const KIND_REQUEST: u16 = 1;
/// Frame kind of an [`Answer`].
pub const KIND_ANSWER: u16 = 2;

/// The dataset can restart the application (`SCR_FLAG_CHECKPOINT`).
pub const FLAG_CHECKPOINT: u32 = 1;
/// The dataset must reach the prefix (`SCR_FLAG_OUTPUT`).
pub const FLAG_OUTPUT: u32 = 2;

/// A setting as an application gives it, by its name in [`crate::config`]; an empty value unsets it.
pub type SettingPair = (String, String);

/// What all ranks must ask alike, in the same order. The collectives of the API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Shall a checkpoint be taken now? Answer: `Flag`.
    NeedCheckpoint,
    /// A new dataset. Empty name: made from its number. Answer: `Began`.
    Begin {
        /// The dataset's name.
        name: String,
        /// `FLAG_…`
        flags: u32,
    },
    /// The dataset that was begun is written. Answer: `Ok`, or `Failed` if it was dropped.
    Complete,
    /// The dataset that was begun is what the ranks' memory is now; children of theirs copy it behind them. Answer:
    /// `Ok` when all ranks have asked, `Failed` if it was dropped. It is committed when all children have copied.
    Snapshot,
    /// Is there a dataset to restart from? Answer: `Restart`.
    HaveRestart,
    /// The restart begins. Answer: `Restart` with the dataset.
    StartRestart,
    /// The restart ended. Answer: `Ok`; `Failed` with `Rejected` if any rank said invalid: then
    /// `HaveRestart` tells the next older dataset.
    CompleteRestart,
    /// Shall the application end? Answer: `Flag`.
    ShouldExit,
    /// The application has loaded the dataset of this name by its own means, or wants to restart from it.
    Current {
        /// The dataset's name.
        name: String,
    },
    /// Forget the dataset of this name; files in the prefix stay.
    Drop {
        /// The dataset's name.
        name: String,
    },
    /// Forget the dataset of this name and delete its files.
    Delete {
        /// The dataset's name.
        name: String,
    },
    /// Nothing but that all ranks are there.
    Barrier,
    /// The rank has no more to say. Answer: `Ok`.
    Finalize,
}

impl Ask {
    /// The word for messages.
    pub fn verb(&self) -> &'static str {
        match self {
            Ask::NeedCheckpoint => "need_checkpoint",
            Ask::Begin { .. } => "start",
            Ask::Complete => "complete",
            Ask::Snapshot => "checkpoint",
            Ask::HaveRestart => "have_restart",
            Ask::StartRestart => "start_restart",
            Ask::CompleteRestart => "complete_restart",
            Ask::ShouldExit => "should_exit",
            Ask::Current { .. } => "current",
            Ask::Drop { .. } => "drop",
            Ask::Delete { .. } => "delete",
            Ask::Barrier => "barrier",
            Ask::Finalize => "finalize",
        }
    }
}

/// Where a part of a file that lies in shared memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartFrom {
    /// The rank has written it into an extent that is lent to it.
    Extent {
        /// Which.
        id: ExtentId,
        /// Where in it, bytes.
        offset: u64,
    },
    /// It was in an extent that the rank handed over before it completed.
    Filled {
        /// Which of those.
        number: u64,
        /// Where in it, bytes.
        offset: u64,
    },
}

/// A part of a file that lies in shared memory; parts follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its source.
    pub from: PartFrom,
    /// Its length, bytes; not 0.
    pub bytes: u64,
}

/// A file of a dataset whose bytes are in the agent's pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFile {
    /// Its path below the prefix; one of [`Own::files`] has it too.
    pub path: String,
    /// What of it is another file's. `None`: nothing.
    pub base: Option<Base>,
    /// Its bytes; with a base those of its own, one after another.
    pub parts: Vec<Part>,
}

/// The file that another one has its unchanged bytes of: this rank's, as long, in a dataset that this agent still has
/// in its pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// The dataset.
    pub key: Key,
    /// Its path below the prefix.
    pub path: String,
    /// What is not its.
    pub changed: Changed,
}

/// An extent that is full before its dataset is complete: the rank writes there no more until it is lent to it anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filled {
    /// Which.
    pub id: ExtentId,
    /// What its bytes are called from now on, since the extent may be lent again: no two of a rank's dataset are alike.
    pub number: u64,
}

/// An extent that a rank may map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// Its name.
    pub id: ExtentId,
    /// Its size, bytes.
    pub bytes: u64,
    /// The rank has not been given its descriptor yet: one comes with the answer, in the order of the list.
    pub fresh: bool,
}

/// A part of a file in the pool, to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryAt {
    /// Its length, bytes.
    pub bytes: u64,
    /// Which of the descriptors.
    pub fd: u32,
    /// Where in it, bytes.
    pub offset: u64,
}

/// What one rank adds to a collective; what is said of `Complete` holds for `Snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Own {
    /// `Complete`, `CompleteRestart`: does this rank stand for its part?
    pub valid: bool,
    /// `Complete`: the files it wrote, with their sizes.
    pub files: Vec<FileDecl>,
    /// `Complete`: time between the answer to `Begin` and this call, microseconds.
    pub write_us: u64,
    /// `Complete`: time this rank was blocked inside the library since `Begin` was called, microseconds.
    pub blocked_us: u64,
    /// `Complete`: those of `files` that are in the pool.
    pub memory: Vec<MemoryFile>,
    /// `Complete`: time spent waiting for room in the pool, microseconds.
    pub pool_us: u64,
    /// `Complete`: time spent copying, microseconds.
    pub copy_us: u64,
    /// `Snapshot`: the child that was attached last copies what is in `memory`; otherwise all of it is there.
    pub child: bool,
    /// Settings changed since the last call (`SCR_Config`).
    pub settings: Vec<SettingPair>,
}

/// Rank to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// First on every connection. Answered with `Welcome` when all `size` ranks of the job have come.
    Hello {
        /// This rank.
        rank: RankId,
        /// Ranks of the job (or of the subset that uses Stanchion).
        size: u32,
        /// Process id as the rank sees it; the agent trusts the socket's credentials instead.
        pid: u32,
        /// Settings from `SCR_Config` before `SCR_Init`.
        settings: Vec<SettingPair>,
    },
    /// A collective.
    Collective {
        /// What all ranks ask alike.
        ask: Ask,
        /// What this rank adds.
        own: Own,
    },
    /// Answered with `Ok` when dataset `no` has reached `level` or one that survives as much (FM-L6).
    Wait {
        /// Which dataset.
        no: DatasetNo,
        /// Which level.
        level: Level,
        /// Longest wait, milliseconds.
        timeout_ms: u64,
    },
    /// What a warning of the library should say to the user; the library prints nothing. Answered `Ok`.
    Warn {
        /// The text.
        text: String,
    },
    /// The rank's datasets will have `bytes` bytes in the pool: memory for them and for as many as are kept is
    /// made warm before they come. Answered with `Lent` when it is, or after a while with what is; what it lists is
    /// to be mapped, not to be written to.
    Reserve {
        /// Of one dataset of this rank.
        bytes: u64,
    },
    /// Room in the pool for the dataset that is being written, until `Complete`. Answered with `Lent`: at least one
    /// extent, perhaps fewer than were asked for; none if the pool is too small for such datasets: then the rank
    /// writes a file. Answered with `Failed` (`Space`) where the pool has none and policy says not to wait, or when the
    /// wait was in vain.
    Lend {
        /// How much is still needed.
        bytes: u64,
        /// What is full by now. Only for an agent that stores it (`Welcome`).
        filled: Vec<Filled>,
        /// An earlier answer did not lead to a mapping, for want of descriptors or room: every extent is to come with
        /// its descriptor again.
        anew: bool,
    },
    /// A file of the dataset that is being read, if its bytes are in the pool. Answered with `Memory`.
    OpenMemory {
        /// Its path below the prefix.
        path: String,
        /// Offset of the first byte that is wanted.
        from: u64,
    },
    /// The value of a setting now. Answered with `Setting`.
    GetSetting {
        /// Its name.
        name: String,
    },
    /// First on a further connection of a rank's process, in place of `Hello`: a child of that process, or a thread of it,
    /// will copy what the rank then declares by `Snapshot`. Answered `Ok`. The agent hangs up its direction when that is
    /// to stop. A child holds this connection alone, and its end of it is its end; a thread ends the connection when it
    /// writes no more.
    Attach {
        /// Whose child or thread.
        rank: RankId,
        /// It is a thread.
        thread: bool,
    },
    /// On an attached connection: all is copied. Answered `Ok`, which the child need not wait for.
    Copied,
}

/// The dataset that ranks restart from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartInfo {
    /// Its key.
    pub key: Key,
    /// Its name.
    pub name: String,
    /// `FLAG_…`
    pub flags: u32,
    /// Directory that holds this rank's files; a file's place is `dir` + `/` + its path.
    pub dir: String,
    /// This rank's files.
    pub files: Vec<FileDecl>,
}

/// Agent to rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// All ranks are there.
    Welcome {
        /// The slot that the rank belongs to.
        slot: SlotId,
        /// The prefix: absolute.
        prefix: String,
        /// All settings that differ from their defaults, for `SCR_Config` queries.
        settings: Vec<SettingPair>,
        /// What is in the pool goes to a device: extents that are full are to be handed over with `Lend`.
        stores: bool,
        /// How long the library should wait for an answer before it gives up, milliseconds.
        answer_timeout_ms: u64,
    },
    /// Done.
    Ok,
    /// Yes or no, the same on all ranks.
    Flag(bool),
    /// A dataset was begun.
    Began {
        /// Its key.
        key: Key,
        /// Its name (made up if none was given).
        name: String,
        /// Directory for this rank's files: created, absolute. A file's place is `dir` + `/` + its path.
        dir: String,
    },
    /// The dataset to restart from, if any.
    Restart(Option<RestartInfo>),
    /// Extents of the pool; a descriptor for each fresh one comes with the frame.
    Lent(Vec<Lent>),
    /// The parts of a file from the offset that was asked for, perhaps not all; the descriptors they name come with
    /// the frame. Empty: the file's bytes are not in the pool, it is to be opened by its place.
    Memory(Vec<MemoryAt>),
    /// The value of a setting; `None` where it has none.
    Setting(Option<String>),
    /// It failed. The dataset, if one was meant, is not at any level that was not reported before.
    Failed {
        /// For programs.
        code: Code,
        /// For people: dataset, rank, node, file, cause, and what to do.
        text: String,
    },
}

/// Why a call failed; the numbers are the C API's (`STN_ERR_…`, negated).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(i32)]
pub enum Code {
    /// An argument is not allowed.
    Invalid = 1,
    /// The call does not fit the state (complete without begin).
    State = 2,
    /// The deadline passed.
    Timeout = 3,
    /// The agent cannot be reached or is gone.
    Agent = 4,
    /// Ranks disagree.
    Mismatch = 5,
    /// The dataset was dropped: a rank said invalid, or bytes were missing.
    Dropped = 6,
    /// A rank rejected the restart; an older dataset may be there.
    Rejected = 7,
    /// There is no such dataset, file or setting.
    NotFound = 8,
    /// Another number of ranks than the dataset has.
    Ranks = 9,
    /// The level cannot be reached (encode or flush failed).
    Level = 10,
    /// No space left.
    Space = 11,
    /// Input or output failed.
    Io = 12,
    /// The job winds down and takes no new datasets.
    Closing = 13,
    /// The protocol was violated.
    Protocol = 14,
    /// A bug in Stanchion, caught at the boundary.
    Internal = 15,
}
