//! What agents and the controller say to each other. See docs/protocol.md.
//!
//! Everything here may arrive late, twice, in another order or not at all (FM-F6): receivers are
//! idempotent, senders repeat until answered. What belongs to another incarnation is ignored (FM-S1).

use crate::checksum::Crc;
use crate::client::{Ask, Code, SettingPair};
use crate::ids::{
    AgentId, Ancestry, DatasetNo, Epoch, Incarnation, Key, Level, PeerId, RankId, SlotId,
};
use crate::layout::Sets;
use crate::manifest::Manifest;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Frame kind of an [`Envelope`].
pub const KIND_PEER: u16 = 8;

/// What went wrong, precisely enough for the message that a user needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// What.
    pub cause: Cause,
    /// On which slot.
    pub slot: Option<SlotId>,
    /// On which agent.
    pub agent: Option<AgentId>,
    /// Whose.
    pub rank: Option<RankId>,
    /// Which file (path below the prefix).
    pub file: Option<String>,
}

impl Trouble {
    /// Trouble with nobody to name yet.
    pub fn new(cause: Cause) -> Trouble {
        Trouble { cause, slot: None, agent: None, rank: None, file: None }
    }

    /// The same, on `slot`.
    pub fn slot(mut self, slot: SlotId) -> Trouble {
        self.slot = Some(slot);
        self
    }

    /// The same, on `agent`.
    pub fn agent(mut self, agent: AgentId) -> Trouble {
        self.agent = Some(agent);
        self
    }

    /// The same, of `rank`.
    pub fn rank(mut self, rank: RankId) -> Trouble {
        self.rank = Some(rank);
        self
    }

    /// The same, in `file`.
    pub fn file(mut self, file: impl Into<String>) -> Trouble {
        self.file = Some(file.into());
        self
    }
}

/// The kinds of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A rank said that its part is not valid.
    SaidInvalid,
    /// A declared file is not there.
    Missing,
    /// A file has another size than declared or recorded.
    Size {
        /// What it should be, bytes.
        want: u64,
        /// What it is, bytes.
        have: u64,
    },
    /// Bytes do not match their checksum.
    Damaged,
    /// No space left on the device, or the cache's limit is reached.
    NoSpace,
    /// A system call failed with this errno.
    Os(i32),
    /// Another agent did not answer.
    Unreachable,
    /// A deadline passed.
    Timeout,
    /// Two ranks declared one path.
    SamePath,
    /// Ranks did not ask the same.
    Disagree,
    /// More was lost than the scheme makes good.
    BeyondScheme,
    /// There is no usable dataset of that name.
    NoDataset,
    /// The ranks of the job are not those of the dataset.
    Ranks {
        /// Of the dataset.
        want: u32,
        /// Of the job.
        have: u32,
    },
    /// A name is not allowed.
    Name,
    /// A setting is unknown, malformed, or cannot be changed now.
    Setting,
    /// The job is winding down.
    Closing,
    /// Not now: another call is wanted first.
    State,
    /// The index in the prefix was decided on by a higher epoch.
    Fenced,
    /// A file or message of ours does not parse.
    Malformed,
    /// The application dropped it.
    Dropped,
    /// What copied a rank's memory, a process or a thread, ended before it had.
    ChildDied,
}

/// What a dataset is; the content of its certificate (FM-S2).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetInfo {
    /// Its key.
    pub key: Key,
    /// Its name.
    pub name: String,
    /// `FLAG_…` of [`crate::client`].
    pub flags: u32,
    /// Ranks that wrote it.
    pub ranks: u32,
    /// How its redundancy is laid out.
    pub sets: Sets,
    /// Size of its chunks, bytes.
    pub chunk_bytes: u32,
    /// Bytes of all files; 0 until complete.
    pub bytes: u64,
    /// Number of files; 0 until complete.
    pub files: u64,
    /// Which ranks wrote on which slot; ordered by first rank.
    pub placement: Arc<[RankRange]>,
}

/// `count` ranks from `first` on, on `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RankRange {
    /// The first rank.
    pub first: RankId,
    /// How many.
    pub count: u32,
    /// Where.
    pub slot: SlotId,
}

/// What one agent has of one dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetHolding {
    /// What the agent knows of it.
    pub info: DatasetInfo,
    /// Does it hold the certificate?
    pub certified: bool,
    /// Levels whose record it holds.
    pub levels: Vec<Level>,
    /// What it has for each slot.
    pub slots: Vec<SlotHolding>,
}

/// What an agent has of one slot's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotHolding {
    /// Which slot.
    pub slot: SlotId,
    /// All files, as far as is known before they are verified.
    pub data: bool,
    /// All parity that this slot keeps for its set, and the manifests of all members.
    pub parity: bool,
}

/// An agent's answer to a survey.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holdings {
    /// The survey's epoch.
    pub epoch: Epoch,
    /// The survey's number within the epoch.
    pub round: u32,
    /// The incarnation it is in.
    pub inc: Incarnation,
    /// That incarnation's ancestry.
    pub ancestry: Ancestry,
    /// What it has. Dropped datasets are not listed.
    pub datasets: Vec<DatasetHolding>,
    /// The newest dataset ever committed as far as it knows.
    pub newest_committed: Option<Key>,
}

/// Where the restart dataset comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// From agents' caches; slots that have lost it rebuild.
    Cache,
    /// From the prefix.
    Prefix,
}

/// A dataset that goes on into the next incarnation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Its certificate.
    pub info: DatasetInfo,
    /// Is it persistent?
    pub persistent: bool,
    /// Slots whose data no agent has, where there is one: the others make it again.
    pub no_data: Vec<SlotId>,
    /// Slots whose parity is not whole, where there is a slot without data.
    pub no_parity: Vec<SlotId>,
}

/// An agent and where it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentAddr {
    /// Who.
    pub id: AgentId,
    /// `host:port` of its TCP listener.
    pub addr: String,
}

/// A restart decision, whole (FM-S3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The new incarnation.
    pub inc: Incarnation,
    /// Whose datasets it may use.
    pub ancestry: Ancestry,
    /// Which agent each slot is on. An agent may host several when the job winds down.
    pub slots: Vec<AgentId>,
    /// All living agents, spares included, and their addresses.
    pub agents: Arc<[AgentAddr]>,
    /// Children of a node of the tree.
    pub fanout: u32,
    /// Datasets that go on. Others are discarded.
    pub ledger: Vec<LedgerEntry>,
    /// The dataset to restart from, which is in the ledger.
    pub restart: Option<(Key, Source)>,
    /// Datasets of the ledger that must be made whole from caches: the one to restart from, if it comes
    /// from there, and outputs that are not persistent yet.
    pub restore: Vec<Key>,
    /// Number of the next dataset.
    pub next_no: DatasetNo,
    /// The job's settings that differ from the defaults.
    pub settings: Vec<SettingPair>,
    /// The ranks live on: a rank rejected a restart (otherwise agents end what ranks they know).
    pub keep_ranks: bool,
    /// The failure group of each slot's node; empty: each fails alone.
    pub groups: Vec<u32>,
    /// Ranks are welcome. False when orphans wind the job down.
    pub ranks_welcome: bool,
}

/// Names a question that is gathered up the tree. Answers are kept and replayed (FM-S13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CollId {
    /// All ranks are there.
    Init,
    /// The n-th collective of the ranks in this incarnation.
    Seq(u64),
    /// Has every agent its part of the redundancy of this dataset?
    Protect(Key),
    /// Has every agent written its part to the prefix under temporary names?
    FlushPrepare(Key, u32),
    /// Has every agent renamed it?
    FlushPublish(Key, u32),
    /// Have the children of all ranks copied this dataset?
    Filled(Key),
}

/// What a subtree adds to a question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Contrib {
    /// Ranks that speak here.
    pub ranks: u32,
    /// What the lowest of them asks.
    pub ask: Option<Ask>,
    /// Who that is.
    pub ask_rank: RankId,
    /// Two ranks that do not ask the same.
    pub disagree: Option<(RankId, RankId)>,
    /// The first reason against.
    pub trouble: Option<Trouble>,
    /// Bytes.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// Where time went.
    pub times: Times,
    /// Settings of the lowest rank that sent any.
    pub settings: Vec<SettingPair>,
    /// Which ranks run where (Init, Complete).
    pub ranges: Vec<RankRange>,
    /// `Init`: the number of ranks that they all claim; 0: none yet.
    pub size: u32,
    /// `FlushPublish`: the checksum of each slot's manifest, for the index record.
    pub slots: Vec<(SlotId, Crc)>,
}

/// Where a dataset's time went, microseconds; the longest over ranks or agents, where it does not say otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Times {
    /// The application wrote its files.
    pub write_us: u64,
    /// Ranks were blocked from start to complete.
    pub blocked_us: u64,
    /// Of that, copying regions into the pool. With copy-on-write not of that: how long the slowest child lived, as
    /// its agent saw it.
    pub copy_us: u64,
    /// Of that, waiting for room in the pool.
    pub pool_us: u64,
    /// From the first vote to the decision everywhere.
    pub coordinate_us: u64,
    /// Agents read and checksummed.
    pub digest_us: u64,
    /// Agents fetched chunks of others.
    pub transfer_us: u64,
    /// Agents computed and stored parity.
    pub encode_us: u64,
    /// Agents wrote to the prefix.
    pub storage_us: u64,
    /// Copying, of all ranks together.
    pub copy_sum_us: u64,
    /// Waiting for room in the pool, of all ranks together.
    pub pool_sum_us: u64,
}

impl Times {
    /// The longer of each: what is known of one dataset at two moments.
    pub fn max(self, o: Times) -> Times {
        Times {
            write_us: self.write_us.max(o.write_us),
            blocked_us: self.blocked_us.max(o.blocked_us),
            copy_us: self.copy_us.max(o.copy_us),
            pool_us: self.pool_us.max(o.pool_us),
            coordinate_us: self.coordinate_us.max(o.coordinate_us),
            digest_us: self.digest_us.max(o.digest_us),
            transfer_us: self.transfer_us.max(o.transfer_us),
            encode_us: self.encode_us.max(o.encode_us),
            storage_us: self.storage_us.max(o.storage_us),
            copy_sum_us: self.copy_sum_us.max(o.copy_sum_us),
            pool_sum_us: self.pool_sum_us.max(o.pool_sum_us),
        }
    }

    /// Of two parts of the job that have no rank in common.
    pub fn with(self, o: Times) -> Times {
        Times {
            copy_sum_us: self.copy_sum_us.saturating_add(o.copy_sum_us),
            pool_sum_us: self.pool_sum_us.saturating_add(o.pool_sum_us),
            ..self.max(o)
        }
    }
}

/// The root's answer to a question that needs no record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Yes.
    Ok,
    /// Yes or no.
    Flag(bool),
    /// A dataset begins.
    Begun(Box<DatasetInfo>),
    /// It failed.
    Failed(Code, Trouble),
    /// What the record of this number says, once it is announced.
    Record(u64),
}

/// A fact that every agent stores before any agent acts on it (FM-L4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// The dataset's certificate: committed, hence `cached`.
    Commit(Box<DatasetInfo>),
    /// The dataset is dropped.
    Drop(Key, Trouble),
    /// It has reached this level.
    Level(Key, Level),
    /// Its protection failed; it stays `cached`.
    ProtectFailed(Key, Trouble),
    /// Write it to the prefix under temporary names (attempt).
    FlushStart(Key, u32),
    /// Rename it into place.
    FlushPublish(Key, u32),
    /// The flush failed; remove the temporary names.
    FlushAbort(Key, u32, Trouble),
    /// Forget the dataset in the caches: a pool is full (FM-S18).
    Evict(Key),
    /// Forget the dataset; the prefix has done so already.
    Forget(Key),
    /// Settings that changed.
    Settings(Vec<SettingPair>),
}

/// What the root tells the controller; the runner's messages and status are made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// All ranks are there.
    RanksReady {
        /// How many.
        ranks: u32,
    },
    /// A dataset was begun.
    Began(Box<DatasetInfo>),
    /// It was committed.
    Committed(Box<DatasetInfo>, Times),
    /// It was dropped.
    Dropped(Key, Trouble),
    /// It reached a level.
    Level(Key, Level, Times),
    /// It will not be protected.
    ProtectFailed(Key, Trouble),
    /// It was not flushed.
    FlushFailed(Key, Trouble),
    /// It went from the caches since a pool is full.
    Evicted {
        /// Which.
        key: Key,
        /// Its redundancy was complete.
        protected: bool,
    },
    /// It was forgotten on the application's wish.
    Forgotten(Key),
    /// Ranks did restart from it.
    RestartDone(Key),
    /// All ranks called finalize.
    Finalized,
    /// The application was told to end.
    ExitAdvised,
    /// Ranks ran into a deadline or disagreed; the collective failed.
    CollectiveFailed(Trouble),
    /// A halt condition holds, a checkpoint is written, and `halt_enabled` says not to wait for the application.
    HaltDue,
}

/// How a notice should look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Severity {
    /// For those who asked for details.
    Debug,
    /// Normal progress.
    Info,
    /// Something is worse than it should be.
    Warn,
    /// Something is lost.
    Error,
}

/// How an agent's restoring ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restored {
    /// Every byte of its slots is there and verified.
    Ok {
        /// Bytes that it verified.
        verified_bytes: u64,
        /// Bytes rebuilt from other nodes.
        rebuilt_bytes: u64,
        /// Bytes fetched from the prefix.
        fetched_bytes: u64,
        /// Files in which damage was found and repaired.
        repaired_files: Vec<String>,
    },
    /// This dataset cannot be made whole.
    Failed(Key, Trouble),
}

/// The messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Msg {
    // Anyone to anyone.
    /// Are you there?
    Ping(u64),
    /// Yes.
    Pong(u64),

    // Controller to agents.
    /// What do you hold? Stops what is under way in older incarnations.
    Survey {
        /// Refused if lower than the highest seen.
        epoch: Epoch,
        /// Number of the survey within the epoch.
        round: u32,
        /// End the ranks you know.
        end_ranks: bool,
    },
    /// The decision.
    Install(Arc<Plan>),
    /// All have installed it: restore your slots.
    Restore(Incarnation),
    /// All have restored: let ranks in.
    Open(Incarnation),
    /// Flush the newest checkpoint (and unflushed outputs) if `flush`; then say `Finished`. To the root.
    Finish {
        /// In which incarnation.
        inc: Incarnation,
        /// Whether the newest checkpoint must reach the prefix.
        flush: bool,
    },
    /// End the ranks you know, remove what you have, and leave.
    Shutdown(Epoch),
    /// Changed settings (halt conditions), to the root.
    Settings(Incarnation, Vec<SettingPair>),
    /// Can you reach this agent?
    Probe(AgentId),

    // Agents to controller.
    /// Answers `Survey`.
    Holdings(Box<Holdings>),
    /// Answers `Install`: stored.
    Installed(Incarnation),
    /// Answers `Restore`.
    Restored(Incarnation, Restored),
    /// Answers `Restore` until there is an answer: bytes that were rebuilt so far, of so many that are to be.
    Restoring(Incarnation, u64, u64),
    /// Answers `Open`: ranks are let in.
    Opened(Incarnation),
    /// A rank rejected the restart dataset (FM-S3): decide again.
    Rejected(Incarnation, Key, Trouble),
    /// The application asked to restart from the dataset of this name: decide again.
    RestartFrom(Incarnation, String),
    /// Answers `Finish`: what of it is persistent; the trouble if flushing failed.
    Finished(Incarnation, Option<Key>, Option<Trouble>),
    /// What happens, with a number that grows; repeated until acknowledged.
    Report(Incarnation, u64, Report),
    /// Answers `Report`.
    ReportAck(Incarnation, u64),
    /// Answers `Probe`.
    Probed(AgentId, bool),
    /// For the user's eyes.
    Notice(Severity, String),
    /// Your epoch is lower than this one: somebody else decides now.
    Fenced(Epoch),

    // Agent to agent.
    /// A subtree's part of a question.
    Up(Incarnation, CollId, Box<Contrib>),
    /// The answer.
    Down(Incarnation, CollId, Verdict),
    /// A fact to store; numbers grow from 1 in each incarnation.
    Record(Incarnation, u64, Record),
    /// My subtree has stored all facts up to this number.
    Stored(Incarnation, u64),
    /// All agents have stored all facts up to this number.
    Announce(Incarnation, u64),
    /// What I have of a dataset, for the members of my set.
    Manifest(Incarnation, Box<Manifest>),
    /// Answers it.
    ManifestStored(Incarnation, Key, SlotId),
    /// Send me all manifests of this dataset that you have.
    ManifestWanted(Incarnation, Key),
    /// To the root: my ranks wait for room in the pool, and I have acted on all facts up to this number.
    PoolFull(Incarnation, u64),
}

/// A message and who it is from; the link vouches for `from`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// The sender.
    pub from: PeerId,
    /// The message.
    pub msg: Msg,
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Cause::SaidInvalid => write!(f, "it said that its part is not valid"),
            Cause::Missing => write!(f, "the file is missing"),
            Cause::Size { want, have } => {
                write!(f, "the file has {have} bytes instead of {want}")
            }
            Cause::Damaged => write!(f, "bytes do not match their checksum"),
            Cause::NoSpace => write!(f, "no space is left"),
            Cause::Os(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Cause::Unreachable => write!(f, "it cannot be reached"),
            Cause::Timeout => write!(f, "the deadline passed"),
            Cause::SamePath => write!(f, "two ranks wrote a file of this path"),
            Cause::Disagree => write!(f, "the ranks did not ask the same"),
            Cause::BeyondScheme => write!(f, "more nodes were lost than the scheme makes good"),
            Cause::NoDataset => write!(f, "there is no usable dataset of that name"),
            Cause::Ranks { want, have } => write!(
                f,
                "the dataset was written by {want} ranks and this job has {have}; \
                 files of single ranks restart only on the same number"
            ),
            Cause::Name => write!(f, "the name is not allowed"),
            Cause::Setting => write!(f, "the setting is not known or cannot be changed now"),
            Cause::Closing => write!(f, "the job is winding down"),
            Cause::State => write!(f, "the call does not fit what went before"),
            Cause::Fenced => write!(f, "a newer runner has taken over"),
            Cause::Malformed => write!(f, "it does not parse"),
            Cause::Dropped => write!(f, "the application dropped it"),
            Cause::ChildDied => {
                write!(f, "what copied its memory ended before it had copied all")
            }
        }
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(slot) = self.slot {
            write!(f, "node {slot}: ")?;
        } else if let Some(agent) = self.agent {
            write!(f, "agent {agent}: ")?;
        }
        if let Some(rank) = self.rank {
            write!(f, "rank {rank}: ")?;
        }
        if let Some(file) = &self.file {
            write!(f, "{}: ", file.escape_debug())?;
        }
        write!(f, "{}", self.cause)
    }
}
