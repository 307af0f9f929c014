//! Clock, queue and processes of one history.

use crate::app::{App, RankEvent};
use crate::fault::{Moment, What, When};
use crate::judge::Judge;
use crate::memory::Memory;
use crate::prefix::Prefix;
use crate::rng::{Rng, mix};
use crate::scenario::Scenario;
use crate::store::Store;
use crate::work::Running;
use stanchion_core::agent::Agent;
use stanchion_core::api::{AgentEvent, ConnId, ControllerEvent, Millis, Now};
use stanchion_core::controller::Controller;
use stanchion_format::client::Request;
use stanchion_format::ids::{AgentId, Epoch, ExtentId, TaskId};
use stanchion_format::peer::Msg;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A controller process; numbers grow over the whole history.
pub type CtrlId = u32;
/// The place of a runner that is on no node.
pub const RUNNER_PLACE: u32 = u32::MAX;
/// After this much virtual time everything must have ended, microseconds.
pub const END_US: u64 = 900_000_000;

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// An agent.
    Agent(AgentId),
    /// A controller.
    Ctrl(CtrlId),
}

/// What the queue holds.
#[derive(Debug)]
pub enum Event {
    /// 100 ms passed for a process.
    Tick(Peer),
    /// A message arrives.
    Msg {
        /// Sender.
        from: Peer,
        /// Receiver.
        to: Peer,
        /// Content.
        msg: Box<Msg>,
    },
    /// A process learns that a connection is gone.
    Link {
        /// Who learns it.
        at: Peer,
        /// The other end.
        gone: Peer,
    },
    /// An agent's connection to a controller stands.
    Up(CtrlId, AgentId),
    /// A rank's request arrives.
    Request(AgentId, ConnId, Box<Request>),
    /// A rank's connection closed.
    ConnGone(AgentId, ConnId),
    /// A child's connection closed, which is the child's end.
    ChildGone(AgentId, ConnId),
    /// Something happened to an agent's shared memory.
    Memory(AgentId, Box<AgentEvent>),
    /// An extent is stored; with the token of what was in it.
    Stored(AgentId, ExtentId, u64),
    /// A task's next step; false: a cancelled task that is not quick enough to stop.
    Task(AgentId, TaskId, bool),
    /// A child copies a piece, or ends.
    Child(ConnId),
    /// Something happens to a rank.
    Rank(usize, usize, RankEvent),
    /// The launcher of an application kills what is left.
    LauncherKills(usize),
    /// A node dies, of several in a row.
    NodeDies(AgentId),
    /// The prefix's index was read.
    Index(CtrlId),
    /// An event for a controller.
    Ctrl(CtrlId, Box<ControllerEvent>),
    /// A fault strikes.
    Fault(usize),
    /// An orphan tries to take an epoch.
    TakeEpoch(AgentId, u32),
    /// A controller that has said its outcome ends its process.
    CtrlEnds(CtrlId, u32),
    /// The next run over the same prefix begins.
    NextRun,
}

struct Queued {
    at: u64,
    tie: u64,
    n: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, o: &Queued) -> bool {
        self.n == o.n
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, o: &Queued) -> Option<std::cmp::Ordering> {
        Some(self.cmp(o))
    }
}
impl Ord for Queued {
    fn cmp(&self, o: &Queued) -> std::cmp::Ordering {
        (self.at, self.tie, self.n).cmp(&(o.at, o.tie, o.n))
    }
}

/// An agent's process.
pub struct AgentProc {
    /// Its mind.
    pub agent: Agent,
    /// Its node.
    pub place: u32,
    /// It runs.
    pub alive: bool,
    /// It is stopped until then.
    pub frozen: u64,
    /// Its cache.
    pub store: Store,
    /// Its shared memory.
    pub memory: Memory,
    /// Its tasks.
    pub tasks: BTreeMap<TaskId, Running>,
    /// Tasks that were cancelled but take one more step.
    pub ghosts: BTreeMap<TaskId, Running>,
    /// Controllers it is connected to, in order; the last is the one.
    pub ctrls: Vec<CtrlId>,
    /// Whom it spoke with.
    pub peers: BTreeSet<AgentId>,
    /// What it leads with.
    pub lead: Option<crate::ctrl::LeadWish>,
}

/// A controller's process.
pub struct CtrlProc {
    /// Its mind.
    pub ctrl: Controller,
    /// Its right.
    pub epoch: Epoch,
    /// The agent in whose process it runs; none: a runner.
    pub host: Option<AgentId>,
    /// Where.
    pub place: u32,
    /// It runs.
    pub alive: bool,
    /// It is stopped until then.
    pub frozen: u64,
    /// It has said how it ended.
    pub done: bool,
    /// Connected agents.
    pub linked: BTreeSet<AgentId>,
    /// The application it launched last.
    pub app: Option<usize>,
}

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When, microseconds.
    pub at: u64,
    /// Which line of docs/failure-model.md.
    pub rule: &'static str,
    /// What happened.
    pub text: String,
}

/// One history.
pub struct World {
    /// Its conditions.
    pub sc: Scenario,
    /// Chance.
    pub rng: Rng,
    /// The time, microseconds.
    pub now: u64,
    queue: BinaryHeap<Reverse<Queued>>,
    pushed: u64,
    /// Handled events.
    pub events: u64,
    /// A number that depends on every event.
    pub hash: u64,
    /// Agents of all runs.
    pub agents: BTreeMap<AgentId, AgentProc>,
    /// Controllers of all runs.
    pub ctrls: BTreeMap<CtrlId, CtrlProc>,
    /// Applications of all launches.
    pub apps: Vec<App>,
    /// Ranks by connection.
    pub conns: BTreeMap<ConnId, (usize, usize)>,
    /// Children by their connections.
    pub children: BTreeMap<ConnId, crate::child::Child>,
    /// Connections so far.
    pub connections: u64,
    /// The prefix.
    pub prefix: Prefix,
    /// Who knows what was promised.
    pub judge: Judge,
    /// Partitions: places that are cut off, and until when.
    pub cuts: Vec<(u64, u64)>,
    /// Loss, repetition and lateness of messages, of a thousand.
    pub net: (u32, u32, u32),
    pub(crate) order: BTreeMap<(Peer, Peer), u64>,
    moments: BTreeMap<Moment, u32>,
    pub(crate) run: u32,
    pub(crate) next_run_queued: bool,
    /// Connections whose processes live on, with what they have mapped.
    pub lingering: BTreeSet<ConnId>,
    /// What ranks will do wrong next.
    pub armed: Vec<What>,
    /// The broken rule, if any.
    pub violation: Option<Violation>,
    /// Lines of the history, if wanted.
    pub trace: Option<Vec<String>>,
    /// Prices of messages, if time is not chance.
    pub(crate) costs: Option<Box<crate::cost::Costs>>,
}

impl World {
    /// A world before its first event.
    pub fn new(sc: Scenario, trace: bool) -> World {
        let mut w = World {
            rng: Rng::new(sc.seed, 3),
            sc,
            now: 0,
            queue: BinaryHeap::new(),
            pushed: 0,
            events: 0,
            hash: 0,
            agents: BTreeMap::new(),
            ctrls: BTreeMap::new(),
            apps: Vec::new(),
            conns: BTreeMap::new(),
            children: BTreeMap::new(),
            connections: 0,
            prefix: Prefix::default(),
            judge: Judge::default(),
            cuts: Vec::new(),
            net: (0, 0, 0),
            order: BTreeMap::new(),
            moments: BTreeMap::new(),
            run: 0,
            next_run_queued: false,
            lingering: BTreeSet::new(),
            armed: Vec::new(),
            violation: None,
            trace: trace.then(Vec::new),
            costs: None,
        };
        for (i, fault) in w.sc.faults.clone().into_iter().enumerate() {
            match fault.when {
                When::Always => w.strike(i),
                When::At(ms) => w.push(ms * 1000, Event::Fault(i)),
                When::Moment(..) => {}
            }
        }
        w.begin_run();
        w
    }

    /// Runs the history to its end or to a broken rule.
    pub fn run(&mut self) {
        self.run_while(|_| true);
        if self.violation.is_none() {
            self.judge_end();
        }
    }

    /// Runs it as long as there is anything to do, no rule is broken, and it is wanted.
    pub fn run_while(&mut self, wanted: impl Fn(&World) -> bool) {
        while self.violation.is_none() && wanted(self) {
            let Some(Reverse(next)) = self.queue.pop() else { break };
            self.now = next.at;
            if self.now > END_US {
                let left = self.who_is_left();
                self.violate(
                    "FM-V1",
                    format!("after {} s there are still {left}", END_US / 1_000_000),
                );
                break;
            }
            self.events += 1;
            self.hash = mix(self.hash ^ next.at ^ next.n.rotate_left(32));
            self.handle(next.event);
        }
    }

    /// Queues an event in `delay` microseconds.
    pub fn push(&mut self, delay: u64, event: Event) {
        let tie = self.rng.bits();
        self.push_at(self.now + delay, tie, event);
    }

    pub(crate) fn push_at(&mut self, at: u64, tie: u64, event: Event) {
        self.pushed += 1;
        self.queue.push(Reverse(Queued { at, tie, n: self.pushed, event }));
    }

    /// The time as core is told it.
    pub fn clock(&self) -> Now {
        Now { mono: Millis(self.now / 1000), unix_s: 1_700_000_000 + self.now / 1_000_000 }
    }

    /// Writes a line of the history.
    pub fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>10.3} {}", self.now as f64 / 1000.0, text()));
        }
    }

    /// A rule is broken: the history ends here.
    pub fn violate(&mut self, rule: &'static str, text: String) {
        self.note(|| format!("VIOLATION {rule}: {text}"));
        if self.violation.is_none() {
            self.violation = Some(Violation { at: self.now, rule, text });
        }
    }

    /// A step at which faults may strike was reached.
    pub fn moment(&mut self, moment: Moment) {
        let seen = self.moments.entry(moment).or_default();
        *seen += 1;
        let seen = *seen;
        let due: Vec<(usize, u64)> = (0..)
            .zip(&self.sc.faults)
            .filter_map(|(i, f)| match f.when {
                When::Moment(m, nth, delay) if m == moment && nth == seen => Some((i, delay)),
                _ => None,
            })
            .collect();
        for (i, delay) in due {
            self.push(delay, Event::Fault(i));
        }
    }

    /// The place of a process; none if it is gone.
    pub fn place(&self, peer: Peer) -> Option<u32> {
        match peer {
            Peer::Agent(a) => self.agents.get(&a).filter(|p| p.alive).map(|p| p.place),
            Peer::Ctrl(c) => self.ctrls.get(&c).filter(|p| p.alive).map(|p| p.place),
        }
    }

    fn frozen(&self, peer: Peer) -> u64 {
        match peer {
            Peer::Agent(a) => self.agents.get(&a).map_or(0, |p| p.frozen),
            Peer::Ctrl(c) => self.ctrls.get(&c).map_or(0, |p| match p.host {
                Some(a) => self.agents.get(&a).map_or(0, |p| p.frozen),
                None => p.frozen,
            }),
        }
    }

    fn target(event: &Event) -> Option<Peer> {
        match event {
            Event::Tick(p) | Event::Msg { to: p, .. } | Event::Link { at: p, .. } => Some(*p),
            Event::Up(c, _) | Event::Index(c) | Event::Ctrl(c, _) => Some(Peer::Ctrl(*c)),
            Event::CtrlEnds(c, _) => Some(Peer::Ctrl(*c)),
            Event::Request(a, ..)
            | Event::ConnGone(a, _)
            | Event::ChildGone(a, _)
            | Event::Memory(a, _)
            | Event::Stored(a, ..)
            | Event::Task(a, ..)
            | Event::TakeEpoch(a, _) => Some(Peer::Agent(*a)),
            _ => None,
        }
    }

    fn handle(&mut self, event: Event) {
        if let Some(peer) = World::target(&event) {
            if self.place(peer).is_none() {
                return self.undeliverable(event);
            }
            let until = self.frozen(peer);
            if until > self.now {
                return self.push_at(until, 0, event);
            }
        }
        match event {
            Event::Tick(peer) => {
                self.push(100_000, Event::Tick(peer));
                match peer {
                    Peer::Agent(a) => self.agent_event(a, None, AgentEvent::Tick),
                    Peer::Ctrl(c) => {
                        self.keep_lease(c);
                        self.ctrl_event(c, ControllerEvent::Tick);
                    }
                }
            }
            Event::Msg { from, to, msg } => self.deliver(from, to, *msg),
            Event::Link { at, gone } => self.link_gone(at, gone),
            Event::Up(c, a) => self.ctrl_link_up(c, a),
            Event::Request(a, conn, request) => {
                self.cost_asked(&request, self.conns.get(&conn).copied());
                let event = AgentEvent::RankRequest { conn, request: *request };
                self.agent_event(a, None, event);
            }
            Event::ConnGone(a, conn) => self.conn_gone(a, conn),
            Event::ChildGone(a, conn) => {
                let gone = AgentEvent::RankGone { conn, exited: true };
                self.agent_event(a, None, gone);
            }
            Event::Memory(a, event) => self.agent_event(a, None, *event),
            Event::Stored(a, extent, token) => self.stored(a, extent, token),
            Event::Task(a, task, wanted) => self.task_step(a, task, wanted),
            Event::Child(conn) => self.child_goes_on(conn),
            Event::Rank(app, rank, event) => self.rank_event(app, rank, event),
            Event::LauncherKills(app) => self.launcher_kills(app),
            Event::Index(c) => self.index_read(c),
            Event::Ctrl(c, event) => self.ctrl_event(c, *event),
            Event::Fault(i) => self.strike(i),
            Event::NodeDies(a) => self.strike_agents(&[a]),
            Event::TakeEpoch(a, tries) => self.take_epoch(a, tries),
            Event::CtrlEnds(c, tries) => self.ctrl_ends(c, tries),
            Event::NextRun => self.begin_run(),
        }
    }

    /// What came for a process that is gone.
    fn undeliverable(&mut self, event: Event) {
        match event {
            Event::Msg { from, to, .. } => self.refuse(from, to),
            Event::Request(_, conn, _) => {
                if let Some((app, rank)) = self.conns.get(&conn).copied() {
                    self.push(200, Event::Rank(app, rank, RankEvent::Closed));
                }
            }
            _ => {}
        }
    }

    fn who_is_left(&self) -> String {
        let agents: Vec<String> =
            self.agents.iter().filter(|(_, p)| p.alive).map(|(a, _)| format!("{a:?}")).collect();
        let ctrls: Vec<String> = self
            .ctrls
            .iter()
            .filter(|(_, p)| p.alive)
            .map(|(c, p)| format!("controller {c} ({})", p.ctrl.status().phase))
            .collect();
        format!("{} and {}", agents.join(" "), ctrls.join(" "))
    }

    /// Is anything of the product still there?
    pub fn anything_left(&self) -> bool {
        self.agents.values().any(|p| p.alive) || self.ctrls.values().any(|p| p.alive)
    }
}
