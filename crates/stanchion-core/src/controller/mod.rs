//! Who decides on restarts. Runs in the runner; in an orphaned agent when the runner is gone.
//!
//! The life of a decision: *survey* (what do survivors hold; old work stops), *plan* (see [`choose`]),
//! *install* (all agents store the plan), *restore* (all make their slots whole), *open* (ranks are let
//! in), then the application is launched. A loss at any step starts again with a survey.

mod choose;
mod decide;
#[cfg(test)]
mod tests;
mod watch;

use crate::api::{ControllerAction, ControllerEvent, GiveUp, Millis, Notice, Now, Outcome};
use crate::bugs::{Bug, Bugs};
use stanchion_format::client::FLAG_CHECKPOINT;
use stanchion_format::config::Settings;
use stanchion_format::ids::{AgentId, Epoch, Incarnation, JobId, Key, Level, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::peer::{
    AgentAddr, Cause, DatasetInfo, Holdings, Msg, Plan, Report, Severity, Trouble,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The setting by which the runner passes `stanchion halt --after-checkpoints` on.
const HALT_AFTER_CHECKPOINTS: &str = "halt.after_checkpoints";

/// How long an unanswered message waits until it is sent again, milliseconds.
const RESEND_MS: u64 = 500;
/// Pause between pings, milliseconds.
const PING_MS: u64 = 1000;
/// Decisions in a row that end without the application running.
const DECISIONS_MAX: u32 = 64;
/// How long the prefix may take to be read, milliseconds.
const INDEX_TIMEOUT_MS: u64 = 60_000;
/// Datasets that status and memory keep.
const DATASETS_KEPT: usize = 256;

/// What a controller is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Run the application to its end.
    Run,
    /// Orphans: flush the newest dataset and leave.
    WindDown,
}

/// What a controller knows from its start.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// The job.
    pub job: JobId,
    /// Its right to decide, taken exclusively in the prefix.
    pub epoch: Epoch,
    /// Slots.
    pub nodes: u32,
    /// Agents that will come: nodes and spares (Run), or those left (WindDown).
    pub agents: u32,
    /// The job's settings.
    pub settings: Settings,
    /// Nodes that fail together, by the number of their group; others fail alone.
    pub groups: BTreeMap<AgentId, u32>,
    /// What for.
    pub purpose: Purpose,
    /// Start from nothing even if there is something.
    pub from_scratch: bool,
    /// Deliberate bugs.
    pub bugs: Bugs,
}

/// What `stanchion status` shows.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// A word for what goes on.
    pub phase: &'static str,
    /// Which agent each slot is on, and whether it lives.
    pub slots: Vec<(SlotId, AgentId, bool)>,
    /// Idle agents.
    pub spares: Vec<AgentId>,
    /// Datasets and the levels they have now.
    pub datasets: Vec<(DatasetInfo, Vec<Level>)>,
    /// The newest committed dataset.
    pub current: Option<Key>,
    /// Launches of the application so far.
    pub runs: u64,
    /// Lost agents so far.
    pub lost: u64,
    /// Ranks of the application, once known.
    pub ranks: Option<u32>,
    /// The incarnation.
    pub inc: Incarnation,
    /// While slots are made whole: bytes rebuilt so far, of so many that are known to be lost or damaged.
    pub rebuild: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Agents are coming up.
    Starting,
    /// The application is being ended.
    Stopping,
    /// Agents tell what they hold, the prefix is read.
    Surveying,
    /// All store the plan.
    Installing,
    /// All make their slots whole.
    Restoring,
    /// All let ranks in.
    Opening,
    /// The application runs.
    Running,
    /// The root flushes what policy says.
    Finishing,
    Done,
}

/// One agent.
#[derive(Debug)]
struct Known {
    addr: AgentAddr,
    heard: Millis,
    /// Asked others about it: (when, who has answered that it is silent, who was asked).
    probe: Option<(Millis, BTreeSet<AgentId>, usize)>,
}

/// Why the job is being ended.
#[derive(Clone, Debug)]
enum Ending {
    Success,
    Interrupted,
    NoSpare { have: u32 },
    AppFailed { code: i32, reason: GiveUp },
    WindDown,
}

/// A controller's mind.
#[derive(Debug)]
pub struct Controller {
    cfg: ControllerConfig,
    now: Now,
    lived: watch::Lived,
    out: Vec<ControllerAction>,
    phase: Phase,
    since: Millis,
    agents: BTreeMap<AgentId, Known>,
    /// Those that went before they were up, or while the others came.
    gone: BTreeSet<AgentId>,
    slots: Vec<AgentId>,
    round: u32,
    decisions: u32,
    holdings: BTreeMap<AgentId, Holdings>,
    index: Option<Vec<IndexRecord>>,
    prefix_trouble: Option<Trouble>,
    plan: Option<Arc<Plan>>,
    answered: BTreeSet<AgentId>,
    sent: Millis,
    pinged: Millis,
    excluded: BTreeSet<(Key, bool)>,
    /// What ranks did not want.
    rejected: BTreeSet<Key>,
    named: Option<String>,
    keep_ranks: bool,
    app_running: bool,
    ending: Option<Ending>,
    /// The last flush found damage, and all was restored for it once more.
    mended: bool,
    runs: u64,
    lost: u64,
    fruitless: u64,
    progress: bool,
    node_lost: bool,
    halted: bool,
    loss_at: Millis,
    restore_at: Millis,
    newest_committed: Option<Key>,
    datasets: BTreeMap<Key, (DatasetInfo, BTreeSet<Level>)>,
    ranks: Option<u32>,
    /// What all ranks were refused for; until the next launch.
    bad_restart: Option<Trouble>,
    /// Reads of the prefix's index that are under way, and when the last one began.
    index_reads: u32,
    index_at: Millis,
    /// The application ended by itself, with a failure, and was not launched again yet.
    app_failed: bool,
    reports_seen: u64,
    halt_settings: Vec<(String, String)>,
    restored: RestoredSum,
}

#[derive(Debug, Default)]
struct RestoredSum {
    rebuilt: u64,
    fetched: u64,
    repaired: Vec<String>,
    failed: Option<(AgentId, Key, Trouble)>,
    /// How far each agent is: bytes rebuilt, and to be rebuilt.
    far: BTreeMap<AgentId, (u64, u64)>,
    /// When that was last told, and how many were rebuilt then.
    told: Option<(Millis, u64)>,
}

impl RestoredSum {
    fn progress(&self) -> (u64, u64) {
        self.far.values().fold((0, 0), |sum, far| (sum.0 + far.0, sum.1 + far.1))
    }
}

impl Controller {
    /// A new controller; it waits for its agents.
    pub fn new(cfg: ControllerConfig, now: Now) -> Controller {
        let named = Some(cfg.settings.text("current").to_owned()).filter(|n| !n.is_empty());
        Controller {
            cfg,
            now,
            lived: watch::Lived::new(now.mono),
            out: Vec::new(),
            phase: Phase::Starting,
            since: now.mono,
            agents: BTreeMap::new(),
            gone: BTreeSet::new(),
            slots: Vec::new(),
            round: 0,
            decisions: 0,
            holdings: BTreeMap::new(),
            index: None,
            prefix_trouble: None,
            plan: None,
            answered: BTreeSet::new(),
            sent: now.mono,
            pinged: now.mono,
            excluded: BTreeSet::new(),
            rejected: BTreeSet::new(),
            named,
            keep_ranks: false,
            app_running: false,
            ending: None,
            mended: false,
            runs: 0,
            lost: 0,
            fruitless: 0,
            progress: false,
            node_lost: false,
            halted: false,
            loss_at: now.mono,
            restore_at: now.mono,
            newest_committed: None,
            datasets: BTreeMap::new(),
            ranks: None,
            bad_restart: None,
            app_failed: false,
            index_reads: 0,
            index_at: Millis(0),
            reports_seen: 0,
            halt_settings: Vec::new(),
            restored: RestoredSum::default(),
        }
    }

    /// Takes an event, gives what is to be done, in order.
    pub fn step(&mut self, now: Now, event: ControllerEvent) -> Vec<ControllerAction> {
        self.now = Now { mono: self.lived.until(now.mono), ..now };
        if self.phase == Phase::Done {
            return Vec::new();
        }
        match event {
            ControllerEvent::AgentUp(addr) => self.on_agent_up(addr),
            ControllerEvent::AgentDown(agent) => self.on_agent_down(agent, false),
            ControllerEvent::Message { from, msg } => self.on_message(from, msg),
            ControllerEvent::Index(records) => self.on_index(records),
            ControllerEvent::IndexFailed(trouble) => self.on_index_failed(trouble),
            ControllerEvent::AppExited { success, code } => self.on_app_exited(success, code),
            ControllerEvent::AppStopped => {
                self.app_running = false;
                if self.phase == Phase::Stopping {
                    self.survey(true);
                }
            }
            ControllerEvent::Interrupt => self.on_interrupt(),
            ControllerEvent::Settings(pairs) => self.on_settings(pairs),
            ControllerEvent::Tick => self.on_tick(),
        }
        std::mem::take(&mut self.out)
    }

    /// For `stanchion status`.
    pub fn status(&self) -> Status {
        Status {
            phase: match self.phase {
                Phase::Starting => "starting",
                Phase::Stopping => "stopping the application",
                Phase::Surveying => "surveying",
                Phase::Installing | Phase::Restoring | Phase::Opening => "restoring",
                Phase::Running => "running",
                Phase::Finishing => "flushing",
                Phase::Done => "leaving",
            },
            slots: (0..)
                .zip(&self.slots)
                .map(|(s, a)| (SlotId(s), *a, self.agents.contains_key(a)))
                .collect(),
            spares: self.idle().collect(),
            datasets: self
                .datasets
                .values()
                .map(|(info, levels)| (info.clone(), levels.iter().copied().collect()))
                .collect(),
            current: self.newest_committed,
            runs: self.runs,
            lost: self.lost,
            ranks: self.ranks,
            inc: self.plan.as_ref().map(|p| p.inc).unwrap_or_default(),
            rebuild: Some(self.restored.progress()).filter(|_| self.phase == Phase::Restoring),
        }
    }

    /// Living agents that host no slot, in order.
    fn idle(&self) -> impl Iterator<Item = AgentId> {
        let hosts: BTreeSet<AgentId> = self.slots.iter().copied().collect();
        self.agents.keys().copied().filter(move |a| !hosts.contains(a))
    }

    fn bug(&self, bug: Bug) -> bool {
        self.cfg.bugs.on(bug)
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.since = self.now.mono;
        self.answered.clear();
    }

    fn send(&mut self, to: AgentId, msg: Msg) {
        self.out.push(ControllerAction::Send { to, msg: Box::new(msg) });
    }

    fn say(&mut self, severity: Severity, notice: Notice) {
        self.out.push(ControllerAction::Say(severity, notice));
    }

    fn on_agent_up(&mut self, addr: AgentAddr) {
        let heard = self.now.mono;
        self.gone.remove(&addr.id);
        self.agents.insert(addr.id, Known { addr, heard, probe: None });
        let winding_down = self.cfg.purpose == Purpose::WindDown;
        match self.phase {
            Phase::Starting if self.agents.len() >= self.agents_expected() => self.all_up(),
            Phase::Starting | Phase::Surveying | Phase::Done => {}
            // It may hold a newer dataset than those who came in time: ask before that is discarded.
            _ if winding_down => self.survey(true),
            _ => {}
        }
    }

    /// Could the job start with those who are there?
    fn enough_up(&self) -> bool {
        match self.cfg.purpose {
            Purpose::Run => self.agents.len() >= self.cfg.nodes as usize,
            Purpose::WindDown => !self.agents.is_empty(),
        }
    }

    fn all_up(&mut self) {
        if self.cfg.purpose == Purpose::Run {
            let nodes = self.cfg.nodes as usize;
            self.slots = self.agents.keys().take(nodes).copied().collect();
            let spares = self.agents.len().saturating_sub(nodes) as u32;
            self.say(Severity::Info, Notice::Started { nodes: self.cfg.nodes, spares });
        } else {
            self.ending = Some(Ending::WindDown);
        }
        self.loss_at = self.now.mono;
        self.survey(true);
    }

    fn on_agent_down(&mut self, agent: AgentId, silent: bool) {
        if self.agents.remove(&agent).is_none() {
            // It went before it was up: the start does not wait for it (FM-V3).
            if self.phase == Phase::Starting && self.gone.insert(agent) {
                self.start_without(agent);
            }
            return;
        }
        self.holdings.remove(&agent);
        self.lost += 1;
        let slots: Vec<SlotId> =
            (0..).zip(&self.slots).filter(|(_, a)| **a == agent).map(|(s, _)| SlotId(s)).collect();
        let hosts = !slots.is_empty();
        self.say(Severity::Warn, Notice::NodeLost { slots, agent, silent });
        if self.agents.is_empty() {
            self.lost_all();
            return;
        }
        if self.phase == Phase::Starting {
            self.gone.insert(agent);
            self.start_without(agent);
            return;
        }
        if !hosts {
            if self.phase == Phase::Surveying {
                self.plan_if_known();
            }
            self.proceed_without(agent);
            return;
        }
        self.node_lost = true;
        self.fruitless = 0;
        match self.phase {
            Phase::Running => {
                self.loss_at = self.now.mono;
                self.stop_app();
            }
            Phase::Starting | Phase::Stopping => {}
            // Until it was fenced it may have brought something into the prefix (FM-L2).
            Phase::Surveying => self.read_index(),
            // What was decided counted on it: decide again.
            _ => self.decide_again(),
        }
    }

    /// One that the start waited for is gone: are all others there, or can there never be enough?
    fn start_without(&mut self, agent: AgentId) {
        let possible = self.agents_expected();
        if self.cfg.purpose == Purpose::Run && possible < self.cfg.nodes as usize {
            self.exit(Outcome::AgentsFailed(Trouble::new(Cause::Unreachable).agent(agent)));
        } else if self.agents.len() >= possible && self.enough_up() {
            self.all_up();
        }
    }

    /// Agents that may still come, and those that are there.
    fn agents_expected(&self) -> usize {
        (self.cfg.agents as usize).saturating_sub(self.gone.len())
    }

    /// An idle agent went: nobody waits for its answers any more.
    fn proceed_without(&mut self, agent: AgentId) {
        self.answered.remove(&agent);
        self.check_answers();
    }

    /// Nobody is left. What the prefix has decides on how that is called.
    fn lost_all(&mut self) {
        if self.app_running {
            self.out.push(ControllerAction::StopApp);
        }
        if self.phase == Phase::Starting {
            self.exit(Outcome::AgentsFailed(Trouble::new(Cause::Unreachable)));
        } else {
            self.survey(true);
        }
    }

    fn stop_app(&mut self) {
        if self.app_running {
            self.enter(Phase::Stopping);
            self.out.push(ControllerAction::StopApp);
        } else {
            self.survey(true);
        }
    }

    fn decide_again(&mut self) {
        if self.keep_ranks && self.app_running {
            // The ranks' own nodes are at stake: they cannot live on.
            self.keep_ranks = false;
            self.stop_app();
        } else {
            self.survey(true);
        }
    }

    fn on_message(&mut self, from: AgentId, msg: Msg) {
        if let Some(known) = self.agents.get_mut(&from) {
            known.heard = self.now.mono;
            known.probe = None;
        } else {
            // It was declared lost; it is not of this job any more (FM-F2a).
            return;
        }
        match msg {
            Msg::Holdings(h) => self.on_holdings(from, *h),
            Msg::Installed(inc) => self.on_answer(from, Phase::Installing, inc),
            Msg::Restored(inc, restored) => self.on_restored(from, inc, restored),
            Msg::Restoring(inc, done, bad) => self.on_restoring(from, inc, (done, bad)),
            Msg::Opened(inc) => self.on_answer(from, Phase::Opening, inc),
            Msg::Rejected(inc, key, trouble) => self.on_rejected(inc, key, trouble),
            Msg::RestartFrom(inc, name) => self.on_restart_from(inc, name),
            Msg::Finished(inc, persistent, trouble) => self.on_finished(inc, persistent, trouble),
            Msg::Report(inc, n, report) => self.on_report(from, inc, n, report),
            Msg::Probed(agent, alive) => self.on_probed(from, agent, alive),
            Msg::Notice(severity, text) => {
                self.say(severity, Notice::Agent { agent: from, text });
            }
            Msg::Fenced(epoch) if epoch > self.cfg.epoch => {
                if self.app_running {
                    self.out.push(ControllerAction::StopApp);
                }
                self.out.push(ControllerAction::Exit(Outcome::Fenced(epoch)));
                self.phase = Phase::Done;
            }
            _ => {}
        }
    }

    fn current(&self, inc: Incarnation) -> bool {
        self.plan.as_ref().is_some_and(|p| p.inc == inc)
    }

    fn on_app_exited(&mut self, success: bool, code: i32) {
        self.app_running = false;
        match self.phase {
            Phase::Running => {}
            // It ended by itself while it was being stopped, or while a restart was decided anew.
            Phase::Stopping => {
                if success {
                    self.ending.get_or_insert(Ending::Success);
                }
                self.survey(true);
                return;
            }
            _ => {
                // Plans that let the ranks live on are void.
                let counted_on_it = std::mem::replace(&mut self.keep_ranks, false);
                if success {
                    self.ending.get_or_insert(Ending::Success);
                }
                if counted_on_it {
                    self.survey(true);
                }
                return;
            }
        }
        self.loss_at = self.now.mono;
        if success {
            self.ending.get_or_insert(Ending::Success);
            self.finish();
            return;
        }
        self.app_failed = true;
        if let Some(trouble) = self.refused() {
            self.exit(Outcome::BadRestart(trouble));
            return;
        }
        self.say(Severity::Warn, Notice::AppLost { code });
        self.fruitless = if self.progress || self.node_lost { 0 } else { self.fruitless + 1 };
        let runs_max = self.cfg.settings.number("runs_max");
        let reason = if runs_max == 1 {
            Some(GiveUp::NotWanted)
        } else if runs_max > 0 && self.runs >= runs_max {
            Some(GiveUp::Runs)
        } else if self.fruitless >= self.cfg.settings.number("retries_max") {
            Some(GiveUp::NoProgress)
        } else {
            None
        };
        if let Some(reason) = reason {
            self.ending = Some(Ending::AppFailed { code, reason });
            self.finish();
        } else if self.halted {
            self.ending = Some(Ending::Success);
            self.finish();
        } else {
            self.survey(true);
        }
    }

    /// Why the application failed, if it was refused what it asked for: to launch it again would change nothing. That it
    /// ended and why come by two ways, the processes and the root's reports, and either may be the faster (FM-S15).
    fn refused(&mut self) -> Option<Trouble> {
        self.bad_restart.take_if(|_| self.app_failed)
    }

    fn on_interrupt(&mut self) {
        self.ending = Some(Ending::Interrupted);
        match self.phase {
            Phase::Running => {
                self.loss_at = self.now.mono;
                self.stop_app();
            }
            Phase::Starting => self.exit(Outcome::Interrupted),
            _ => {}
        }
    }

    /// The application is ended as if it had ended itself.
    fn on_halt_due(&mut self) {
        self.halted = true;
        if self.phase == Phase::Running && self.ending.is_none() {
            self.ending = Some(Ending::Success);
            self.stop_app();
        }
    }

    /// The root counts for this incarnation; the next one's starts with what is left.
    fn count_for_halt(&mut self) {
        for (name, value) in &mut self.halt_settings {
            if name == HALT_AFTER_CHECKPOINTS
                && let Ok(left) = value.parse::<u64>()
            {
                *value = left.saturating_sub(1).to_string();
            }
        }
    }

    fn on_settings(&mut self, pairs: Vec<(String, String)>) {
        for (name, value) in &pairs {
            self.halt_settings.retain(|(n, _)| n != name);
            self.halt_settings.push((name.clone(), value.clone()));
        }
        if self.phase == Phase::Running {
            self.send_settings();
        }
    }

    fn send_settings(&mut self) {
        let Some(plan) = &self.plan else { return };
        let (inc, root) = (plan.inc, plan.slots[0]);
        let pairs = self.halt_settings.clone();
        if !pairs.is_empty() {
            self.send(root, Msg::Settings(inc, pairs));
        }
    }

    fn on_report(&mut self, from: AgentId, inc: Incarnation, n: u64, report: Report) {
        if !self.current(inc) {
            return;
        }
        // An acknowledgement covers all up to it: one that came before its predecessors comes again.
        let next = n == self.reports_seen + 1;
        if next {
            self.reports_seen = n;
        }
        self.send(from, Msg::ReportAck(inc, self.reports_seen));
        if !next {
            return;
        }
        self.note(&report);
        let severity = match &report {
            Report::Dropped(..) | Report::ProtectFailed(..) | Report::FlushFailed(..) => {
                Severity::Warn
            }
            Report::Evicted { protected: false, .. } => Severity::Warn,
            Report::CollectiveFailed(_) => Severity::Error,
            Report::Began(_) | Report::Finalized | Report::RanksReady { .. } => Severity::Debug,
            _ => Severity::Info,
        };
        self.say(severity, Notice::Report(report));
    }

    fn note(&mut self, report: &Report) {
        match report {
            Report::RanksReady { ranks } => self.ranks = Some(*ranks),
            Report::Committed(info, _) => {
                self.newest_committed = self.newest_committed.max(Some(info.key));
                self.progress = true;
                if info.flags & FLAG_CHECKPOINT != 0 {
                    self.count_for_halt();
                }
                // What was asked for by name was for the start only.
                self.named = None;
                self.datasets.insert(info.key, ((**info).clone(), BTreeSet::from([Level::Cached])));
                while self.datasets.len() > DATASETS_KEPT {
                    self.datasets.pop_first();
                }
            }
            Report::Level(key, level, _) => {
                if let Some((_, levels)) = self.datasets.get_mut(key) {
                    levels.insert(*level);
                }
            }
            Report::Forgotten(key) | Report::Evicted { key, protected: false } => {
                self.datasets.remove(key);
            }
            Report::ExitAdvised => self.halted = true,
            Report::HaltDue => self.on_halt_due(),
            Report::CollectiveFailed(trouble)
                if matches!(trouble.cause, Cause::Ranks { .. } | Cause::Setting) =>
            {
                self.bad_restart = Some(trouble.clone());
            }
            _ => {}
        }
    }

    fn exit(&mut self, outcome: Outcome) {
        let epoch = self.cfg.epoch;
        let agents: Vec<AgentId> = self.agents.keys().copied().collect();
        for agent in agents {
            self.send(agent, Msg::Shutdown(epoch));
        }
        self.out.push(ControllerAction::Exit(outcome));
        self.phase = Phase::Done;
    }
}
