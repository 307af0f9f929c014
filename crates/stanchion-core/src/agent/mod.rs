//! What one agent decides.
//!
//! - [`coll`]: questions that are gathered up the tree and answered down it.
//! - [`records`]: facts that every agent stores before any agent acts on them.
//! - [`ranks`]: what ranks ask, and what they are told.
//! - [`root`]: what only the root of the tree decides.
//! - [`protect`]: digests, manifests, parity, behind the application.
//! - [`flush`]: the way to the prefix.
//! - [`restore`]: making a slot whole, from caches or the prefix.
//! - [`lend`]: the memory that ranks share with this agent.
//! - [`pressure`]: what goes when that is full.
//! - [`fill`]: datasets that are copied behind the application.
//! - [`remember`]: what is written down for who comes when all agents are gone.
//! - [`orphan`]: what happens without a controller.

mod coll;
mod fill;
mod flush;
mod hand;
mod lend;
mod orphan;
mod pressure;
mod protect;
mod ranks;
mod records;
mod remember;
mod restore;
mod root;

use crate::api::{AgentAction, AgentEvent, ConnId, Millis, Now, TaskResult, Work};
use crate::bugs::{Bug, Bugs};
use crate::pace::Pace;
use crate::pool::Pool;
use crate::tree::Tree;
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::config::Settings;
use stanchion_format::ids::{
    AgentId, Epoch, Incarnation, JobId, Key, Level, PeerId, SlotId, StripeId, TaskId,
};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::{
    Cause, CollId, DatasetHolding, DatasetInfo, Holdings, Msg, Plan, Report, Severity, SlotHolding,
    Times, Trouble,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How long an unanswered message waits until it is sent again, milliseconds.
pub const RESEND_MS: u64 = 500;
/// Tasks of one kind that run at once for one slot: enough to overlap transfer and computing.
pub const TASK_WINDOW: usize = 2;
/// Tries of an encode or rebuild whose source could not be had, until it counts as failed.
pub const SOURCE_TRIES_MAX: u32 = 20;
/// Pause between such tries, milliseconds.
pub const SOURCE_RETRY_MS: u64 = 250;
/// Datasets that may wait for their protection at once; a further `begin` waits.
pub const UNPROTECTED_MAX: usize = 2;

/// What an agent knows from its start.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Its identity, never used twice in a run.
    pub id: AgentId,
    /// The job.
    pub job: JobId,
    /// Absolute path of its cache; only to tell ranks where to write.
    pub cache: String,
    /// Absolute path of the prefix; only to tell ranks.
    pub prefix: String,
    /// Settings until a plan brings the job's.
    pub settings: Settings,
    /// Shared memory for datasets, bytes.
    pub pool_bytes_max: u64,
    /// What datasets have in the pool goes to a device, and its memory comes back then.
    pub stores: bool,
    /// Deliberate bugs.
    pub bugs: Bugs,
}

/// How far this agent is in its incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No plan, or a survey ended it: nothing of the old incarnation goes on.
    Idle,
    /// The plan is stored.
    Installed,
    /// Slots are being made whole.
    Restoring,
    /// They are (or cannot be; the controller knows).
    Restored,
    /// Ranks are welcome.
    Open,
}

/// The installed plan and what follows from it.
#[derive(Debug)]
struct View {
    plan: Arc<Plan>,
    tree: Tree,
    my_slots: Vec<SlotId>,
    settings: Settings,
}

/// One slot's part of a dataset, on this agent.
#[derive(Debug, Default)]
struct SlotPart {
    /// What ranks declared at complete; the digest reads these.
    declared: Option<Vec<FileDecl>>,
    /// All data is here (as far as is known before verification).
    data: bool,
    /// The slot's own manifest is in `Dataset::manifests` and vouches for the data.
    digesting: bool,
    /// Stripes whose parity this slot has stored.
    parity: BTreeSet<StripeId>,
    /// Encodes under way or to be tried again: stripe → (tries, not before).
    encoding: BTreeMap<StripeId, (u32, Millis, bool)>,
    /// All parity that this slot must keep is stored.
    parity_done: bool,
    /// Set members that have acknowledged this slot's manifest.
    manifest_acks: BTreeSet<AgentId>,
    /// When the manifest was last sent.
    manifest_sent: Option<Millis>,
    /// What of it was written beside its files.
    remembered: remember::Remembered,
    /// A flush task of this slot is under way or done: (attempt, phase, done).
    flush: Option<(u32, flush::Step, bool)>,
}

/// A dataset as this agent knows it.
#[derive(Debug)]
struct Dataset {
    info: DatasetInfo,
    certified: bool,
    /// Its commit was announced: it is `cached` for all to see.
    cached: bool,
    levels: BTreeSet<Level>,
    /// Level records stored, announced or not.
    levels_stored: BTreeSet<Level>,
    /// It may have been protected in an incarnation before this one, and the job been told so.
    promised: bool,
    protect_failed: bool,
    /// Protection began at this moment.
    protect_since: Option<Millis>,
    /// My own part of the Protect question is answered.
    protect_voted: bool,
    slots: BTreeMap<SlotId, SlotPart>,
    manifests: BTreeMap<SlotId, Arc<Manifest>>,
    times: Times,
    /// Why this agent cannot stand for its part (directories could not be made).
    trouble: Option<Trouble>,
    flush: flush::FlushState,
    /// The prefix is to get it (an output, or a checkpoint whose turn it is) and it stays until it has, or until
    /// its flush has failed or was given up (FM-S17). The same on all agents: records alone change it.
    flush_wanted: bool,
}

impl Dataset {
    fn new(info: DatasetInfo) -> Dataset {
        Dataset {
            flush_wanted: info.flags & FLAG_OUTPUT != 0,
            info,
            certified: false,
            cached: false,
            levels: BTreeSet::new(),
            levels_stored: BTreeSet::new(),
            promised: false,
            protect_failed: false,
            protect_since: None,
            protect_voted: false,
            slots: BTreeMap::new(),
            manifests: BTreeMap::new(),
            times: Times::default(),
            trouble: None,
            flush: flush::FlushState::default(),
        }
    }

    /// Is its parity still being made?
    fn protecting(&self) -> bool {
        self.protect_since.is_some()
            && !self.protect_failed
            && !self.levels.contains(&Level::Protected)
    }

    fn is_checkpoint(&self) -> bool {
        self.info.flags & FLAG_CHECKPOINT != 0
    }

    fn is_output(&self) -> bool {
        self.info.flags & FLAG_OUTPUT != 0
    }

    /// Must it stay for the way to the prefix?
    fn waits_for_flush(&self) -> bool {
        self.flush_wanted && !self.levels.contains(&Level::Persistent)
    }

    /// The number of chunks of each member, from the manifests; `None` while one is missing.
    fn counts(&self, slot: SlotId) -> Option<BTreeMap<SlotId, u64>> {
        let members = self.info.sets.members(slot);
        members
            .into_iter()
            .map(|m| self.manifests.get(&m).map(|manifest| (m, manifest.chunk_count())))
            .collect()
    }
}

/// What a running task is for.
#[derive(Clone, Debug)]
enum TaskFor {
    MakeDirs(Key),
    Stat(Key, SlotId, u64),
    FillStat(Key, SlotId),
    Digest(Key, SlotId),
    Encode(Key, SlotId, StripeId),
    Restore(Key, SlotId),
    Rebuild(Key, SlotId, u64),
    Flush(Key, SlotId, u32, flush::Step),
    Intend(Key, u32),
    Index(Key, u32),
    Forget(CollId, Option<Key>),
    Nothing,
}

/// An agent's mind.
#[derive(Debug)]
pub struct Agent {
    cfg: AgentConfig,
    now: Now,
    out: Vec<AgentAction>,
    epoch: Epoch,
    /// The last survey that was answered.
    surveyed: (Epoch, u32),
    phase: Phase,
    view: Option<View>,
    ranks: ranks::Ranks,
    colls: BTreeMap<CollId, coll::Coll>,
    records: records::Records,
    datasets: BTreeMap<Key, Dataset>,
    newest_committed: Option<Key>,
    tasks: BTreeMap<TaskId, TaskFor>,
    next_task: u64,
    restore: restore::Restore,
    root: Option<root::Root>,
    orphan: orphan::Orphan,
    leaving: bool,
    /// Ranks ended by a loss in another incarnation must not be answered.
    probes: BTreeMap<AgentId, Millis>,
    pool: Pool,
    /// Ranks that asked for room in vain since their last complete.
    lend_failed: BTreeSet<ConnId>,
    pressure: pressure::Pressure,
    pace: Pace,
    /// What ranks handed over of the datasets that they write.
    handed: BTreeMap<ConnId, hand::Handed>,
    fill: fill::Fill,
    /// When the pool was last looked through for what is not needed.
    pool_shrunk: Millis,
    /// What was written down so often.
    remembered_no: u64,
    /// Of which line what was found in the cache is.
    adopted: remember::Adopted,
}

impl Agent {
    /// A new agent, of no incarnation yet.
    pub fn new(cfg: AgentConfig, now: Now) -> Agent {
        let pool =
            Pool::new(cfg.settings.number("chunk_bytes"), cfg.pool_bytes_max).storing(cfg.stores);
        Agent {
            cfg,
            now,
            out: Vec::new(),
            epoch: Epoch(0),
            surveyed: (Epoch(0), 0),
            phase: Phase::Idle,
            view: None,
            ranks: ranks::Ranks::default(),
            colls: BTreeMap::new(),
            records: records::Records::default(),
            datasets: BTreeMap::new(),
            newest_committed: None,
            tasks: BTreeMap::new(),
            next_task: 1,
            restore: restore::Restore::default(),
            root: None,
            orphan: orphan::Orphan::new(now.mono),
            leaving: false,
            probes: BTreeMap::new(),
            pool,
            lend_failed: BTreeSet::new(),
            pressure: pressure::Pressure::default(),
            pace: Pace::default(),
            handed: BTreeMap::new(),
            fill: fill::Fill::default(),
            pool_shrunk: now.mono,
            remembered_no: 0,
            adopted: remember::Adopted::default(),
        }
    }

    /// Takes an event, gives what is to be done, in order.
    pub fn step(&mut self, now: Now, event: AgentEvent) -> Vec<AgentAction> {
        self.now = now;
        if self.leaving {
            return Vec::new();
        }
        match event {
            AgentEvent::Message { from, msg } => self.on_message(from, msg),
            AgentEvent::LinkDown(peer) => self.on_link_down(peer),
            AgentEvent::RankRequest { conn, request } => self.on_rank_request(conn, request),
            AgentEvent::RankGone { conn, exited } => {
                self.on_rank_gone(conn);
                self.memory_gone(conn, exited);
            }
            AgentEvent::Grown { ids, there } => self.lend_grown(&ids, there),
            AgentEvent::Retired(ids) => self.lend_retired(&ids),
            AgentEvent::Released(ids) => self.lend_released(&ids),
            AgentEvent::TaskDone { task, result } => self.on_task_done(task, result),
            AgentEvent::Tick => self.on_tick(),
        }
        std::mem::take(&mut self.out)
    }

    /// When a `Tick` is wanted at the latest; the tick of 100 ms serves all deadlines here.
    pub fn deadline(&self) -> Option<Millis> {
        None
    }

    /// The incarnation whose plan is installed.
    pub fn incarnation(&self) -> Incarnation {
        self.view.as_ref().map_or_else(Incarnation::default, |v| v.plan.inc)
    }

    fn bug(&self, bug: Bug) -> bool {
        self.cfg.bugs.on(bug)
    }

    fn send(&mut self, to: PeerId, msg: Msg) {
        self.out.push(AgentAction::Send { to, msg: Box::new(msg) });
    }

    fn send_agent(&mut self, to: AgentId, msg: Msg) {
        self.send(PeerId::Agent(to), msg);
    }

    fn log(&mut self, severity: Severity, text: String) {
        self.out.push(AgentAction::Log(severity, text));
    }

    fn run(&mut self, purpose: TaskFor, work: Work) {
        let task = TaskId(self.next_task);
        self.next_task += 1;
        let due = self.due(&purpose);
        self.tasks.insert(task, purpose);
        self.out.push(AgentAction::Run { task, work, due });
    }

    /// When work on a dataset's redundancy is late.
    fn due(&self, purpose: &TaskFor) -> Option<Millis> {
        let (TaskFor::Digest(key, _) | TaskFor::Encode(key, ..)) = purpose else { return None };
        let since = self.datasets.get(key)?.protect_since?;
        Some(since.after(self.pace.patience()?))
    }

    fn settings(&self) -> &Settings {
        self.view.as_ref().map_or(&self.cfg.settings, |v| &v.settings)
    }

    fn my_slots(&self) -> Vec<SlotId> {
        self.view.as_ref().map_or_else(Vec::new, |v| v.my_slots.clone())
    }

    fn host_of(&self, slot: SlotId) -> Option<AgentId> {
        self.view.as_ref().and_then(|v| v.plan.slots.get(slot.0 as usize)).copied()
    }

    fn is_root(&self) -> bool {
        self.view.as_ref().is_some_and(|v| v.tree.is_root())
    }

    /// Is a message of incarnation `inc` for me, now?
    fn current(&self, inc: Incarnation) -> bool {
        let Some(view) = &self.view else { return false };
        if self.phase == Phase::Idle {
            return false;
        }
        inc == view.plan.inc || (self.bug(Bug::AcceptOldIncarnation) && inc < view.plan.inc)
    }

    fn on_message(&mut self, from: PeerId, msg: Msg) {
        match from {
            PeerId::Controller => self.on_controller_message(msg),
            PeerId::Agent(agent) => self.on_agent_message(agent, msg),
        }
    }

    fn on_controller_message(&mut self, msg: Msg) {
        self.orphan.heard(self.now.mono);
        let controller = PeerId::Controller;
        match msg {
            Msg::Ping(n) => self.send(controller, Msg::Pong(n)),
            Msg::Survey { epoch, round, end_ranks } => self.on_survey(epoch, round, end_ranks),
            Msg::Install(plan) => self.on_install(plan),
            Msg::Restore(inc) if self.current(inc) => self.on_restore(),
            Msg::Open(inc) if self.current(inc) => self.on_open(),
            Msg::Finish { inc, flush } if self.current(inc) => self.on_finish(flush),
            Msg::Settings(inc, pairs) if self.current(inc) => self.on_halt_settings(pairs),
            Msg::ReportAck(inc, n) if self.current(inc) => {
                if let Some(root) = &mut self.root {
                    root.reports.retain(|r| r.0 > n);
                }
            }
            Msg::Shutdown(epoch) => self.on_shutdown(epoch),
            Msg::Probe(agent) => {
                self.probes.insert(agent, self.now.mono);
                self.send_agent(agent, Msg::Ping(self.now.mono.0));
            }
            _ => {}
        }
    }

    fn on_agent_message(&mut self, from: AgentId, msg: Msg) {
        self.orphan.heard_from(from, self.now.mono);
        match msg {
            Msg::Ping(n) => self.send_agent(from, Msg::Pong(n)),
            Msg::Pong(_) if self.probes.remove(&from).is_some() => {
                self.send(PeerId::Controller, Msg::Probed(from, true));
            }
            Msg::Up(inc, id, contrib) if self.current(inc) => self.on_up(from, id, *contrib),
            Msg::Down(inc, id, verdict) if self.current(inc) => self.on_down(from, id, verdict),
            Msg::Record(inc, n, record) if self.current(inc) => self.on_record(from, n, record),
            Msg::Stored(inc, n) if self.current(inc) => self.on_stored(from, n),
            Msg::Announce(inc, n) if self.current(inc) => self.on_announce(from, n),
            Msg::Manifest(inc, manifest) if self.current(inc) => self.on_manifest(from, *manifest),
            Msg::ManifestStored(inc, key, slot) if self.current(inc) => {
                self.on_manifest_stored(from, key, slot);
            }
            Msg::PoolFull(inc, seen) if self.current(inc) => self.make_room(seen),
            Msg::ManifestWanted(inc, key) if self.current(inc) => {
                self.on_manifest_wanted(from, key);
            }
            _ => {}
        }
    }

    fn on_link_down(&mut self, peer: PeerId) {
        match peer {
            PeerId::Controller => self.orphan.lost(self.now.mono),
            PeerId::Agent(agent) => {
                self.orphan.link_down(agent);
                if self.probes.remove(&agent).is_some() {
                    self.send(PeerId::Controller, Msg::Probed(agent, false));
                }
            }
        }
    }

    /// A survey ends what the old incarnation was doing; what is stored stays.
    fn on_survey(&mut self, epoch: Epoch, round: u32, end_ranks: bool) {
        if epoch < self.epoch && !self.bug(Bug::ObeyFenced) {
            self.send(PeerId::Controller, Msg::Fenced(self.epoch));
            return;
        }
        // A late or repeated one must not end what was installed since (FM-F6).
        let answered = (epoch, round) == self.surveyed && self.phase != Phase::Idle;
        if (epoch, round) < self.surveyed && !self.bug(Bug::ObeyFenced) || answered {
            return;
        }
        self.surveyed = (epoch, round);
        self.epoch = self.epoch.max(epoch);
        self.stop_work();
        self.phase = Phase::Idle;
        if end_ranks {
            self.end_ranks();
        }
        // What the ranks were told must be known before it is decided whether they are launched again (FM-S15).
        self.send_reports();
        let holdings = self.holdings(epoch, round);
        self.send(PeerId::Controller, Msg::Holdings(Box::new(holdings)));
    }

    fn stop_work(&mut self) {
        if !self.tasks.is_empty() {
            self.tasks.clear();
            self.out.push(AgentAction::CancelAll);
        }
        for dataset in self.datasets.values_mut() {
            dataset.flush = flush::FlushState::default();
            // The next incarnation's root queues the outputs again, and nothing else.
            dataset.flush_wanted = dataset.is_output();
            dataset.protect_since = None;
            dataset.protect_voted = false;
            for part in dataset.slots.values_mut() {
                part.digesting = false;
                part.encoding.clear();
                part.flush = None;
                part.manifest_acks.clear();
                part.manifest_sent = None;
            }
        }
        self.restore = restore::Restore::default();
        self.fill.stop();
    }

    fn holdings(&self, epoch: Epoch, round: u32) -> Holdings {
        let datasets = self
            .datasets
            .values()
            .map(|d| DatasetHolding {
                info: d.info.clone(),
                certified: d.certified,
                levels: d.levels_stored.iter().copied().collect(),
                slots: d
                    .slots
                    .iter()
                    .map(|(slot, part)| SlotHolding {
                        slot: *slot,
                        data: part.data,
                        parity: part.parity_done,
                    })
                    .collect(),
            })
            .collect();
        let line = match &self.view {
            Some(view) => (view.plan.inc, &view.plan.ancestry),
            None => (self.adopted.inc, &self.adopted.ancestry),
        };
        Holdings {
            epoch,
            round,
            inc: line.0,
            ancestry: line.1.clone(),
            datasets,
            newest_committed: self.newest_committed,
        }
    }

    fn on_install(&mut self, plan: Arc<Plan>) {
        let inc = plan.inc;
        if inc.epoch < self.epoch && !self.bug(Bug::ObeyFenced) {
            self.send(PeerId::Controller, Msg::Fenced(self.epoch));
            return;
        }
        self.epoch = self.epoch.max(inc.epoch);
        let ended = (inc.epoch, inc.count) < self.surveyed && !self.bug(Bug::ObeyFenced);
        let idle = self.phase == Phase::Idle;
        if ended || inc < self.incarnation() || (inc == self.incarnation() && idle) {
            // A survey ended it, or came before it did: the next decision makes a new one (FM-F6).
            return;
        }
        if inc > self.incarnation() {
            self.install(plan);
        }
        self.send(PeerId::Controller, Msg::Installed(inc));
    }

    fn install(&mut self, plan: Arc<Plan>) {
        self.stop_work();
        self.colls.clear();
        self.records = records::Records::default();
        self.pressure = pressure::Pressure::default();
        self.pace.interrupted();
        if !plan.keep_ranks {
            self.end_ranks();
        }
        let me = self.cfg.id;
        let tree = Tree::new(&plan.slots, plan.fanout, me);
        let my_slots: Vec<SlotId> =
            (0..).zip(&plan.slots).filter(|(_, a)| **a == me).map(|(s, _)| SlotId(s)).collect();
        let settings = Settings::from_pairs(&plan.settings).unwrap_or_else(|_| {
            // The controller checked them; a plan that does not parse is not ours.
            self.cfg.settings.clone()
        });
        self.out.push(AgentAction::Addresses(plan.agents.clone()));
        let keep: BTreeSet<Key> = plan.ledger.iter().map(|e| e.info.key).collect();
        let evict: Vec<Key> = self.datasets.keys().filter(|k| !keep.contains(k)).copied().collect();
        self.datasets.retain(|k, _| keep.contains(k));
        if !evict.is_empty() {
            self.out.push(AgentAction::Evict(evict));
        }
        for entry in &plan.ledger {
            let known = self.datasets.contains_key(&entry.info.key);
            let dataset = self
                .datasets
                .entry(entry.info.key)
                .or_insert_with(|| Dataset::new(entry.info.clone()));
            // What is announced was stored by every agent before: who has been there knows (FM-S18).
            dataset.promised |= !known || dataset.levels_stored.contains(&Level::Protected);
            dataset.info = entry.info.clone();
            dataset.certified = true;
            dataset.cached = true;
            dataset.protect_failed = false;
            // FM-L5: what a loss degrades is reported anew once it is restored.
            dataset.levels = BTreeSet::from([Level::Cached]);
            if entry.persistent {
                dataset.levels.insert(Level::Persistent);
            }
            dataset.levels_stored = dataset.levels.clone();
        }
        self.remember_anew();
        self.ranks.new_incarnation();
        self.root = tree.is_root().then(|| root::Root::new(&plan, self.now, self.root.take()));
        self.view = Some(View { plan, tree, my_slots, settings });
        self.phase = Phase::Installed;
    }

    fn on_shutdown(&mut self, epoch: Epoch) {
        if epoch < self.epoch && !self.bug(Bug::ObeyFenced) {
            self.send(PeerId::Controller, Msg::Fenced(self.epoch));
            return;
        }
        self.leave();
    }

    fn leave(&mut self) {
        self.end_ranks();
        self.out.push(AgentAction::CancelAll);
        self.out.push(AgentAction::Evict(self.datasets.keys().copied().collect()));
        self.out.push(AgentAction::Exit);
        self.leaving = true;
    }

    fn on_task_done(&mut self, task: TaskId, result: TaskResult) {
        // Results of cancelled tasks are void: their incarnation is over.
        let Some(purpose) = self.tasks.remove(&task) else { return };
        match purpose {
            TaskFor::MakeDirs(key) => self.on_dirs_made(key, result),
            TaskFor::Stat(key, slot, seq) => self.on_stat_done(key, slot, seq, result),
            TaskFor::FillStat(key, slot) => self.on_fill_stat(key, slot, result),
            TaskFor::Digest(key, slot) => self.on_digested(key, slot, result),
            TaskFor::Encode(key, slot, stripe) => self.on_encoded(key, slot, stripe, result),
            TaskFor::Restore(key, slot) => self.on_restore_task(key, slot, result),
            TaskFor::Rebuild(key, slot, chunk) => self.on_rebuilt(key, slot, chunk, result),
            TaskFor::Flush(key, slot, attempt, step) => {
                self.on_flush_task(key, slot, attempt, step, result);
            }
            TaskFor::Intend(key, attempt) => self.on_intended(key, attempt, result),
            TaskFor::Index(key, attempt) => self.on_index_written(key, attempt, result),
            TaskFor::Forget(id, key) => self.on_forgotten(id, key, result),
            TaskFor::Nothing => {}
        }
    }

    fn on_tick(&mut self) {
        self.tick_orphan();
        if self.leaving {
            return;
        }
        self.tick_probes();
        if self.phase != Phase::Idle {
            self.tick_colls();
            self.tick_records();
            self.tick_protect();
            self.tick_remember();
            self.tick_restore();
            self.tick_root();
        }
        self.tick_waits();
        self.tick_lend();
        self.tick_pressure();
    }

    fn tick_probes(&mut self) {
        let limit = self.settings().number("silence_timeout_ms") / 3;
        let late: Vec<AgentId> = self
            .probes
            .iter()
            .filter(|(_, since)| self.now.mono.since(**since) > limit)
            .map(|(a, _)| *a)
            .collect();
        for agent in late {
            self.probes.remove(&agent);
            self.send(PeerId::Controller, Msg::Probed(agent, false));
        }
    }

    fn report(&mut self, report: Report) {
        let inc = self.incarnation();
        let now = self.now.mono;
        if let Some(n) = self.root.as_mut().and_then(|root| root.report(report.clone(), now)) {
            self.send(PeerId::Controller, Msg::Report(inc, n, report));
        }
    }

    /// What a failed task means.
    fn trouble_of(result: TaskResult) -> Trouble {
        match result {
            TaskResult::Failed { trouble, .. } => trouble,
            // A task that answers another question than it was asked is a bug of the daemon.
            _ => Trouble::new(Cause::Malformed),
        }
    }
}
