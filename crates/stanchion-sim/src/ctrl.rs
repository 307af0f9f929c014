//! Controllers' processes: the runner, and leaders of orphans.

use crate::agents::JOB;
use crate::fault::Moment;
use crate::world::{CtrlId, CtrlProc, Event, Peer, RUNNER_PLACE, World};
use stanchion_core::api::{ControllerAction, ControllerEvent, Outcome};
use stanchion_core::controller::{Controller, ControllerConfig, Purpose};
use stanchion_format::config::Settings;
use stanchion_format::ids::{AgentId, Epoch};
use stanchion_format::peer::{AgentAddr, Msg};
use std::collections::{BTreeMap, BTreeSet};

/// Agents of one run have numbers from run * this on, or the next power of ten that has room.
const RUN_STRIDE: u32 = 100;
/// Times that a controller that is done says "leave" until it ends its process.
const LEAVE_TRIES: u32 = 8;

/// What an agent wants to lead with.
#[derive(Clone, Debug)]
pub struct LeadWish {
    /// Whom.
    pub agents: Vec<AgentAddr>,
    /// Slots of the job.
    pub nodes: u32,
    /// The job's settings.
    pub settings: Settings,
}

impl World {
    /// Starts the runner and its agents.
    pub(crate) fn begin_run(&mut self) {
        self.next_run_queued = false;
        let epoch = match self.prefix.take_epoch(self.now) {
            Ok(epoch) => epoch,
            Err(_) => {
                // A runner without a prefix does not start; its user tries again.
                self.next_run_queued = true;
                return self.push(1_000_000, Event::NextRun);
            }
        };
        for record in self.prefix.flush_complete(self.now, epoch) {
            self.note(|| format!("the flush of {} is completed", record.info.key));
            self.judge_flush_completed(&record);
        }
        self.judge_persistent();
        self.run += 1;
        let (nodes, spares) = (self.sc.nodes, self.sc.spares);
        self.note(|| format!("run begins: epoch {epoch}, {nodes} nodes, {spares} spares"));
        self.judge_run_begins();
        let cfg = ControllerConfig {
            job: JOB,
            epoch,
            nodes,
            agents: nodes + spares,
            settings: self.sc.settings.clone(),
            purpose: Purpose::Run,
            from_scratch: false,
            groups: self.groups(),
            bugs: self.sc.bugs,
        };
        let c = self.start_ctrl(cfg, None, RUNNER_PLACE);
        let mut stride = RUN_STRIDE;
        while stride < nodes + spares {
            stride *= 10;
        }
        for i in 0..nodes + spares {
            let id = AgentId(self.run * stride + i);
            self.start_agent(id, i);
            let delay = 1_000 + self.rng.below(100_000);
            self.push(delay, Event::Up(c, id));
        }
    }

    /// The failure groups of the agents of this run.
    fn groups(&self) -> BTreeMap<AgentId, u32> {
        let id = |i: u32| AgentId(self.run * RUN_STRIDE + i);
        (0..).zip(&self.sc.groups).map(|(i, group)| (id(i), *group)).collect()
    }

    fn start_ctrl(&mut self, cfg: ControllerConfig, host: Option<AgentId>, place: u32) -> CtrlId {
        let c = self.ctrls.len() as CtrlId;
        let epoch = cfg.epoch;
        let proc = CtrlProc {
            ctrl: Controller::new(cfg, self.clock()),
            epoch,
            host,
            place,
            alive: true,
            frozen: 0,
            done: false,
            linked: BTreeSet::new(),
            app: None,
        };
        self.ctrls.insert(c, proc);
        let first = self.rng.below(100_000);
        self.push(first, Event::Tick(Peer::Ctrl(c)));
        c
    }

    /// An orphan leads.
    pub(crate) fn start_leader(&mut self, id: AgentId, epoch: Epoch, wish: LeadWish) {
        let place = self.agents[&id].place;
        self.note(|| format!("a{} leads with epoch {epoch}", id.0));
        let cfg = ControllerConfig {
            job: JOB,
            epoch,
            nodes: wish.nodes,
            agents: wish.agents.len() as u32,
            settings: wish.settings,
            purpose: Purpose::WindDown,
            from_scratch: false,
            groups: self.groups(),
            bugs: self.sc.bugs,
        };
        let c = self.start_ctrl(cfg, Some(id), place);
        for agent in wish.agents {
            let delay = 100 + self.rng.below(20_000);
            self.push(delay, Event::Up(c, agent.id));
        }
    }

    /// The link between a controller and an agent stands, if the agent is there.
    pub(crate) fn ctrl_link_up(&mut self, c: CtrlId, id: AgentId) {
        let here = self.ctrls[&c].place;
        let Some(there) = self.place(Peer::Agent(id)) else { return };
        if self.cut(here, there) {
            return self.push(500_000, Event::Up(c, id));
        }
        if let Some(p) = self.ctrls.get_mut(&c) {
            p.linked.insert(id);
        }
        if let Some(p) = self.agents.get_mut(&id) {
            p.ctrls.push(c);
        }
        self.ctrl_event(c, ControllerEvent::AgentUp(AgentAddr { id, addr: format!("a{id}") }));
    }

    /// A controller's link to an agent is gone.
    pub(crate) fn ctrl_lost_agent(&mut self, c: CtrlId, id: AgentId) {
        let Some(p) = self.ctrls.get_mut(&c) else { return };
        if p.linked.remove(&id) {
            let declared = !p.done;
            if declared {
                self.judge_loss(id);
            }
            self.refuse(Peer::Agent(id), Peer::Ctrl(c));
            self.ctrl_event(c, ControllerEvent::AgentDown(id));
        }
    }

    /// Gives an event to a controller and does what it says.
    pub(crate) fn ctrl_event(&mut self, c: CtrlId, event: ControllerEvent) {
        let now = self.clock();
        let Some(proc) = self.ctrls.get_mut(&c).filter(|p| p.alive && !p.done) else { return };
        let ctrl = &mut proc.ctrl;
        let stepped = crate::in_core(|| ctrl.step(now, event));
        let Some(actions) = stepped else {
            let what = crate::last_panic();
            return self.violate("FM-V5", format!("controller {c} panicked: {what}"));
        };
        for action in actions {
            if self.violation.is_some() {
                return;
            }
            self.judge_ctrl_action(c, &action);
            self.ctrl_action(c, action);
        }
    }

    fn ctrl_action(&mut self, c: CtrlId, action: ControllerAction) {
        match action {
            ControllerAction::Send { to, msg } => {
                match &*msg {
                    Msg::Survey { .. } => self.moment(Moment::Survey),
                    Msg::Install(_) => self.moment(Moment::Install),
                    Msg::Open(_) => self.moment(Moment::Open),
                    Msg::Finish { .. } => self.moment(Moment::Finish),
                    _ => {}
                }
                if self.ctrls[&c].linked.contains(&to) {
                    self.send(Peer::Ctrl(c), Peer::Agent(to), *msg);
                }
            }
            ControllerAction::ReadIndex => {
                let delay = 500 + self.rng.below(20_000);
                self.push(delay, Event::Index(c));
            }
            ControllerAction::StopApp => self.stop_app(c),
            ControllerAction::LaunchApp { slots, run } => {
                self.moment(Moment::Launch);
                self.launch(c, &slots, run);
            }
            ControllerAction::Fence(agent) => self.fence(c, agent),
            ControllerAction::Say(severity, notice) => {
                self.note(|| format!("c{c} says {severity:?}: {notice:?}"));
            }
            ControllerAction::Exit(outcome) => self.outcome(c, outcome),
        }
    }

    /// The index was read, or not.
    pub(crate) fn index_read(&mut self, c: CtrlId) {
        let event = match self.prefix.read_index(self.now) {
            Ok(records) => ControllerEvent::Index(records),
            Err(trouble) => {
                self.judge.index_failed = true;
                ControllerEvent::IndexFailed(trouble)
            }
        };
        self.ctrl_event(c, event);
    }

    /// An agent is silent: its process is ended if that can be done, its link is closed anyway.
    fn fence(&mut self, c: CtrlId, id: AgentId) {
        self.note(|| format!("c{c} fences a{}", id.0));
        self.judge_loss(id);
        if let Some(p) = self.ctrls.get_mut(&c) {
            p.linked.remove(&id);
        }
        let reachable = match (self.place(Peer::Ctrl(c)), self.place(Peer::Agent(id))) {
            (Some(a), Some(b)) => !self.cut(a, b),
            _ => false,
        };
        if self.ctrls[&c].host.is_none() && self.sc.fence && reachable {
            self.kill_agent(id);
        } else {
            self.refuse(Peer::Agent(id), Peer::Ctrl(c));
        }
    }

    fn outcome(&mut self, c: CtrlId, outcome: Outcome) {
        self.note(|| format!("c{c} ends: {outcome:?}"));
        self.judge_outcome(c, &outcome);
        if let Some(p) = self.ctrls.get_mut(&c) {
            p.done = true;
        }
        if self.ctrls[&c].epoch.0 == self.prefix.epoch {
            self.prefix.lease = None;
        }
        if let Some(app) = self.ctrls[&c].app {
            self.stop_ranks(app);
        }
        self.push(300_000, Event::CtrlEnds(c, 0));
    }

    /// A controller that is done waits until its agents have left, and says it again.
    pub(crate) fn ctrl_ends(&mut self, c: CtrlId, tries: u32) {
        let left: Vec<AgentId> = self.ctrls[&c]
            .linked
            .iter()
            .filter(|a| self.agents.get(a).is_some_and(|p| p.alive))
            .copied()
            .collect();
        let host = self.ctrls[&c].host;
        if left.iter().any(|a| Some(*a) != host) && tries < LEAVE_TRIES {
            left.iter().filter(|a| Some(**a) != host).for_each(|a| self.shut_down(c, *a));
            return self.push(500_000, Event::CtrlEnds(c, tries + 1));
        }
        if host.is_none() && self.sc.fence {
            left.iter().for_each(|a| self.kill_agent(*a));
        }
        match host {
            // Its own agent last: the process ends with it.
            Some(a) if tries < 2 * LEAVE_TRIES => {
                self.shut_down(c, a);
                self.push(500_000, Event::CtrlEnds(c, tries + 1));
            }
            _ => {
                self.ctrl_gone(c);
                self.maybe_next_run();
            }
        }
    }

    /// A controller says in the prefix that it is there.
    pub(crate) fn keep_lease(&mut self, c: CtrlId) {
        let p = &self.ctrls[&c];
        if !p.done && p.epoch.0 == self.prefix.epoch && self.prefix.check(self.now).is_ok() {
            self.prefix.lease = Some(self.now);
        }
    }

    /// A controller's process ends.
    pub(crate) fn ctrl_gone(&mut self, c: CtrlId) {
        let Some(p) = self.ctrls.get_mut(&c).filter(|p| p.alive) else { return };
        p.alive = false;
        self.reset_links_of(Peer::Ctrl(c));
    }

    /// The runner is killed.
    pub(crate) fn kill_runner(&mut self) {
        let runner: Vec<CtrlId> = self
            .ctrls
            .iter()
            .filter(|(_, p)| p.alive && p.host.is_none())
            .map(|(c, _)| *c)
            .collect();
        for c in runner {
            self.note(|| format!("c{c} (the runner) is killed"));
            self.judge.runner_killed = true;
            let app = self.ctrls[&c].app;
            self.ctrl_gone(c);
            if let Some(app) = app {
                self.apps[app].ctrl_lives = false;
                if self.sc.launcher_dies {
                    self.stop_ranks(app);
                }
            }
        }
        self.maybe_next_run();
    }

    /// When nothing is left of a run that did not reach its end, its user starts another one.
    pub(crate) fn maybe_next_run(&mut self) {
        if self.anything_left() || self.next_run_queued {
            return;
        }
        self.judge_run_over();
        if self.run < self.sc.runs && !self.judge.finished {
            self.next_run_queued = true;
            self.push(500_000, Event::NextRun);
        }
    }
}
