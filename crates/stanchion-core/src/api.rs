//! Events in, actions out: the whole contact of core with the world.

use std::sync::Arc;

use stanchion_format::checksum::Crc;
use stanchion_format::client::{Answer, Filled, MemoryFile, Request};
use stanchion_format::config::Settings;
use stanchion_format::data::Piece;
use stanchion_format::holding::Holding;
use stanchion_format::ids::{
    AgentId, Epoch, ExtentId, Key, PeerId, RankId, SlotId, StripeId, TaskId,
};
use stanchion_format::index::{IndexRecord, Layout};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::{AgentAddr, DatasetInfo, Msg, Severity, Times, Trouble};

/// Milliseconds since any fixed moment; never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Millis(pub u64);

impl Millis {
    /// `ms` later.
    pub fn after(self, ms: u64) -> Millis {
        Millis(self.0.saturating_add(ms))
    }

    /// Time since `earlier`, 0 if that is later.
    pub fn since(self, earlier: Millis) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The time as core is told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Now {
    /// For deadlines.
    pub mono: Millis,
    /// For halting before an allocation ends: seconds since 1970.
    pub unix_s: u64,
}

/// A rank's connection to its agent; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// What happens to an agent.
#[derive(Clone, Debug)]
pub enum AgentEvent {
    /// A message from a peer whose link is authenticated.
    Message {
        /// Who.
        from: PeerId,
        /// What.
        msg: Msg,
    },
    /// The link to a peer broke (connection reset, refused, closed): evidence of death (FM-F2).
    LinkDown(PeerId),
    /// A rank's request.
    RankRequest {
        /// On which connection.
        conn: ConnId,
        /// What.
        request: Request,
    },
    /// A rank's connection closed.
    RankGone {
        /// Which.
        conn: ConnId,
        /// Its process has ended too: nobody maps what it had.
        exited: bool,
    },
    /// Extents that were asked for by `Grow` are there, or could not be had.
    Grown {
        /// Which.
        ids: Vec<ExtentId>,
        /// They are there and warm.
        there: bool,
    },
    /// Extents were given back, as `Retire` asked.
    Retired(Vec<ExtentId>),
    /// No file of any dataset has these extents any more, and nobody reads them.
    Released(Vec<ExtentId>),
    /// A task ended.
    TaskDone {
        /// Which.
        task: TaskId,
        /// How.
        result: TaskResult,
    },
    /// Time passed: at least every 100 ms, and when [`crate::agent::Agent::deadline`] comes.
    Tick,
}

/// What core wants done by the agent.
#[derive(Clone, Debug)]
pub enum AgentAction {
    /// Send, opening a link if there is none; a failure comes back as `LinkDown`.
    Send {
        /// To whom.
        to: PeerId,
        /// What.
        msg: Box<Msg>,
    },
    /// Who is who from now on; addresses for `Send` and for chunk requests.
    Addresses(Arc<[AgentAddr]>),
    /// Answer a rank's outstanding request.
    Answer {
        /// On which connection.
        conn: ConnId,
        /// What.
        answer: Box<Answer>,
    },
    /// Do something that takes time, on another thread; ends with `TaskDone`.
    Run {
        /// Its name.
        task: TaskId,
        /// What.
        work: Work,
        /// Nobody waits for it until then; from then on the next checkpoint may.
        due: Option<Millis>,
    },
    /// Tasks under way are void: stop them soon, send no `TaskDone` for them.
    CancelAll,
    /// This manifest vouches for the slot's files from now on: chunk requests are served by it.
    Publish(Arc<Manifest>),
    /// Make these extents of the pool (name, bytes) and touch every page; ends with `Grown` for each.
    Grow(Vec<(ExtentId, u64)>),
    /// Give these extents back to the system; ends with `Retired`.
    Retire(Vec<ExtentId>),
    /// These files of a rank are in the pool: from now on its extents are theirs. Before any task that reads them.
    /// What does not fit is noticed by the `Stat` that follows.
    Keep {
        /// The dataset.
        key: Key,
        /// The rank's slot.
        slot: SlotId,
        /// The rank.
        rank: RankId,
        /// Its files, with their sizes.
        files: Vec<(MemoryFile, u64)>,
    },
    /// These extents of a rank are full, and of this dataset: they may be stored. Each has a number, which parts of files
    /// in `Keep` refer to; with the next `Keep` of this rank for the dataset those numbers are void. Before any wish to
    /// have memory back.
    Take {
        /// The dataset.
        key: Key,
        /// The rank's slot.
        slot: SlotId,
        /// The rank.
        rank: RankId,
        /// Which.
        filled: Vec<Filled>,
    },
    /// Ranks want so many bytes: what is stored gives its memory back (`Released`), at once or when it is stored.
    Reclaim(u64),
    /// What the dataset has in memory nobody will read soon: when it is stored it gives its memory back.
    Settled(Key),
    /// Answer a rank's outstanding request with the parts of a file in the pool.
    OpenMemory {
        /// On which connection.
        conn: ConnId,
        /// The dataset.
        key: Key,
        /// The rank's slot.
        slot: SlotId,
        /// The rank.
        rank: RankId,
        /// The file.
        path: String,
        /// From here on.
        from: u64,
    },
    /// End the processes of these connections (SIGKILL by pidfd) and close them; all ranks if empty.
    EndRanks(Vec<ConnId>),
    /// Forget these datasets and remove their files from the cache, behind everything else.
    Evict(Vec<Key>),
    /// Say something to the log (and, by way of the controller, to the user).
    Log(Severity, String),
    /// An orphan decides: run a controller in this process with this task (FM-V3).
    Lead {
        /// Whom it leads.
        agents: Vec<AgentAddr>,
        /// Slots of the job: more or fewer than there are agents.
        nodes: u32,
        /// The job's settings, which the agent's own need not be.
        settings: Settings,
    },
    /// Remove everything and end this process.
    Exit,
}

/// A source of a chunk: where it is and what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSource {
    /// The slot whose piece it is.
    pub slot: SlotId,
    /// The agent that hosts it.
    pub agent: AgentId,
    /// Which piece.
    pub piece: Piece,
    /// Its length, bytes.
    pub len: u32,
    /// Its checksum; `None` for parity, which is verified by what it yields (FM-S8).
    pub crc: Option<Crc>,
    /// What it is multiplied with in the sum, in GF(2^8).
    pub factor: u8,
}

/// Work that touches files or moves data.
#[derive(Clone, Debug)]
pub enum Work {
    /// Create the ranks' directories of a new dataset.
    MakeDirs {
        /// The dataset.
        key: Key,
        /// The slot.
        slot: SlotId,
        /// The slot's ranks.
        ranks: Vec<RankId>,
    },
    /// Compare declared sizes with the files: the vote's "holds every byte" (FM-S2). No reading.
    Stat {
        /// The dataset.
        key: Key,
        /// The slot.
        slot: SlotId,
        /// What ranks declared.
        files: Vec<FileDecl>,
    },
    /// Read all files once and checksum every chunk. Ends with `Digested`.
    Digest {
        /// The dataset.
        key: Key,
        /// The slot.
        slot: SlotId,
        /// Size of chunks, bytes.
        chunk_bytes: u32,
        /// What ranks declared.
        files: Vec<FileDecl>,
    },
    /// Fetch the sources, add them up, store the sum as parity.
    Encode {
        /// The dataset.
        key: Key,
        /// The holder's slot, on this agent.
        slot: SlotId,
        /// The stripe.
        stripe: StripeId,
        /// Its place in the parity file.
        index: u64,
        /// Length of the parity, bytes: that of the longest source.
        len: u32,
        /// Size of a place in the parity file, bytes.
        chunk_bytes: u32,
        /// What to add up.
        sources: Vec<ChunkSource>,
    },
    /// Verify a slot's files against its manifest; make files of the right size where they are missing or
    /// have another. Ends with `Verified`, which lists the chunks that are wrong.
    Verify(Arc<Manifest>),
    /// Fetch the sources, add them up, verify, and write the sum as this chunk.
    Rebuild {
        /// Whose chunk, on this agent; knows the checksum.
        manifest: Arc<Manifest>,
        /// Which chunk.
        chunk: u64,
        /// What to add up: parity and the other members' chunks of the stripe.
        sources: Vec<ChunkSource>,
    },
    /// Read the files of these ranks from the prefix into the cache, verifying. Ends with `Fetched`.
    Fetch {
        /// The dataset.
        info: Box<DatasetInfo>,
        /// The slot to fill, on this agent.
        slot: SlotId,
        /// The ranks that will run on it.
        ranks: Vec<(RankId, u32)>,
    },
    /// Write a slot's files into the prefix where nobody looks for them yet, durably: under temporary names, with the
    /// slot's manifest, or in a container.
    FlushPrepare {
        /// What to write; every chunk is verified as it is read (FM-F9).
        manifest: Arc<Manifest>,
        /// As what.
        layout: Layout,
        /// Number of the attempt.
        attempt: u32,
    },
    /// Withdraw records that vouch for files which will be replaced (FM-S10), rename, fsync directories. Containers stay
    /// where they are.
    FlushPublish {
        /// The same.
        manifest: Arc<Manifest>,
        /// The same.
        layout: Layout,
        /// The same.
        attempt: u32,
    },
    /// Remove temporary names.
    FlushAbort {
        /// The dataset.
        key: Key,
        /// The attempt.
        attempt: u32,
    },
    /// Say durably in the prefix what an attempt is going to vouch for: all have prepared, nobody publishes
    /// yet. Whoever finds it later completes the flush (FM-L3).
    FlushIntend {
        /// What it will be.
        record: Box<IndexRecord>,
        /// The attempt.
        attempt: u32,
    },
    /// Delete checkpoints in the prefix that are not kept ([`crate::retention`]).
    Prune {
        /// The dataset that has just become persistent: the newest that may count.
        key: Key,
        /// What stays.
        keep: crate::retention::Keep,
    },
    /// Make the record appear by link(), after checking that no higher epoch was taken (FM-S9, FM-S11).
    WriteIndex(Box<IndexRecord>),
    /// Withdraw a dataset's record, so that nobody restarts from it, and remove its files from the prefix if
    /// that is wanted. Fails with `NoDataset` where no record is of that name.
    Forget {
        /// The dataset; `None`: the newest record of this name.
        key: Option<Key>,
        /// Its name.
        name: String,
        /// Remove its files too.
        delete: bool,
    },
    /// Write this beside the slot's files, for who finds them when all agents are gone (FM-A1). Nobody waits for it, and
    /// how it ends concerns nobody.
    Remember(Box<Holding>),
}

/// How work ended.
#[derive(Clone, Debug)]
pub enum TaskResult {
    /// Done, nothing to tell but the time it took.
    Done(Times),
    /// `Digest`: what the files are.
    Digested(Box<Manifest>, Times),
    /// `Verify`: chunks that are missing or damaged.
    Verified {
        /// Their numbers.
        bad: Vec<u64>,
        /// Files they are in.
        bad_files: Vec<String>,
    },
    /// `Fetch`: the files are there and verified. The manifest is the new slot's.
    Fetched(Box<Manifest>),
    /// It failed. `source`: index into `sources` of the chunk that was missing or wrong.
    Failed {
        /// Why.
        trouble: Trouble,
        /// Which source.
        source: Option<usize>,
    },
}

/// What happens to a controller.
#[derive(Clone, Debug)]
pub enum ControllerEvent {
    /// An agent is there (the link stands).
    AgentUp(AgentAddr),
    /// An agent is dead: its link broke or its process is gone.
    AgentDown(AgentId),
    /// A message from an agent.
    Message {
        /// Who.
        from: AgentId,
        /// What.
        msg: Msg,
    },
    /// The prefix's records were read, in answer to `ReadIndex`. What does not parse is left out and
    /// logged by the reader.
    Index(Vec<IndexRecord>),
    /// The prefix cannot be read.
    IndexFailed(Trouble),
    /// The application's launcher ended.
    AppExited {
        /// Exit status 0.
        success: bool,
        /// For messages: its code, or 128 + signal.
        code: i32,
    },
    /// In answer to `StopApp`: nothing of the application is left.
    AppStopped,
    /// The user asks for the end: SIGINT, SIGTERM, or `stanchion halt --immediately`.
    Interrupt,
    /// Halt conditions changed; sent to the root as settings.
    Settings(Vec<(String, String)>),
    /// Time passed, at least every 100 ms.
    Tick,
}

/// What a controller wants done.
#[derive(Clone, Debug)]
pub enum ControllerAction {
    /// Send to an agent.
    Send {
        /// To whom.
        to: AgentId,
        /// What.
        msg: Box<Msg>,
    },
    /// Read the prefix's index; ends with `Index` or `IndexFailed`.
    ReadIndex,
    /// End the application and its launcher; ends with `AppStopped`.
    StopApp,
    /// Start the application. Slot `i` is on `slots[i]`.
    LaunchApp {
        /// The placement.
        slots: Vec<AgentId>,
        /// How many launches there were before.
        run: u64,
    },
    /// An agent does not answer: end its process if that is in our power. `AgentDown` follows in any case.
    Fence(AgentId),
    /// Something the user should see.
    Say(Severity, Notice),
    /// It is over. Agents have been told to leave.
    Exit(Outcome),
}

/// What the controller says; the runner puts it into words and JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A fact from the root.
    Report(stanchion_format::peer::Report),
    /// Agents are up; the index was read.
    Started {
        /// Slots.
        nodes: u32,
        /// Spares.
        spares: u32,
    },
    /// An agent and its node are lost.
    NodeLost {
        /// Its slots; empty for a spare.
        slots: Vec<SlotId>,
        /// The agent.
        agent: AgentId,
        /// It was found by silence, not by its death.
        silent: bool,
    },
    /// The application ended without success.
    AppLost {
        /// Its code.
        code: i32,
    },
    /// A spare takes a slot over.
    SpareUsed {
        /// The slot.
        slot: SlotId,
        /// The spare.
        agent: AgentId,
    },
    /// A newer dataset cannot be used.
    Skipped {
        /// Which.
        key: Key,
        /// Its name.
        name: String,
        /// Why not.
        trouble: Trouble,
    },
    /// What the job goes on from.
    RestartChosen {
        /// The dataset; `None`: from the start.
        dataset: Option<(Key, String)>,
        /// From the prefix, not from caches.
        from_prefix: bool,
        /// Slots whose data is rebuilt from redundancy.
        rebuild: Vec<SlotId>,
    },
    /// Lost and damaged bytes are being made again; told every few seconds.
    Rebuilding {
        /// So many are.
        done_bytes: u64,
        /// Of so many that are known so far.
        bad_bytes: u64,
    },
    /// Every byte is in place.
    RestoreDone {
        /// Milliseconds since the loss was seen (or since the start).
        since_loss_ms: u64,
        /// Milliseconds for the restore itself.
        restore_ms: u64,
        /// Bytes rebuilt.
        rebuilt_bytes: u64,
        /// Bytes fetched from the prefix.
        fetched_bytes: u64,
        /// Damaged files repaired.
        repaired_files: Vec<String>,
    },
    /// The application is launched.
    Launching {
        /// Launches before.
        run: u64,
    },
    /// An agent's words.
    Agent {
        /// Who.
        agent: AgentId,
        /// What.
        text: String,
    },
    /// The prefix cannot be read; the job goes on without it.
    PrefixTrouble(Trouble),
    /// Winding down: the newest checkpoint is being flushed.
    FinalFlush,
    /// The final flush ended.
    FinalFlushDone {
        /// What is persistent.
        persistent: Option<Key>,
        /// What went wrong.
        trouble: Option<Trouble>,
    },
}

/// How a run ended. The exit codes are the runner's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The application ended with success.
    Success {
        /// What went wrong with the final flush, if anything.
        flush_trouble: Option<Trouble>,
    },
    /// It was halted, as asked.
    Halted,
    /// The user interrupted.
    Interrupted,
    /// The application failed too often; its last code.
    AppFailed {
        /// Its code.
        code: i32,
        /// Why no further try is made.
        reason: GiveUp,
    },
    /// A committed dataset existed and none can be recovered (FM-S14).
    Unrecoverable {
        /// The newest that was lost.
        key: Key,
    },
    /// No spare is left for a lost node.
    NoSpare {
        /// Living agents.
        have: u32,
        /// Wanted.
        want: u32,
        /// What is persistent for the next run.
        persistent: Option<Key>,
    },
    /// Agents did not come up or did not answer.
    AgentsFailed(Trouble),
    /// The dataset that was asked for by name, or its number of ranks, does not fit.
    BadRestart(Trouble),
    /// A higher epoch decides now.
    Fenced(Epoch),
    /// Orphans: flushed and left.
    WoundDown {
        /// What is persistent.
        persistent: Option<Key>,
        /// What went wrong.
        trouble: Option<Trouble>,
    },
}

/// Why no further launch is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// `runs_max` is reached.
    Runs,
    /// `retries_max` launches failed without progress.
    NoProgress,
    /// Only one run was asked for.
    NotWanted,
}
