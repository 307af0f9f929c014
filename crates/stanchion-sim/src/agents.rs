//! Agents' processes: events into core, actions out of it.

use crate::app::RankEvent;
use crate::fault::Moment;
use crate::world::{AgentProc, CtrlId, Event, Peer, World};
use stanchion_core::agent::{Agent, AgentConfig};
use stanchion_core::api::{AgentAction, AgentEvent, ConnId};
use stanchion_format::ids::{AgentId, JobId, Key, PeerId};
use stanchion_format::peer::{Cause, Msg, Trouble};
use std::collections::{BTreeMap, BTreeSet};

/// The job of every history.
pub const JOB: JobId = JobId(7);
/// Looks at a lease that is kept, half a second apart, until an orphan leaves.
const LEASE_TRIES: u32 = 24;
/// What ranks are told of caches.
pub const CACHE: &str = "/cache";

impl World {
    /// Starts an agent on a node.
    pub(crate) fn start_agent(&mut self, id: AgentId, place: u32) {
        let cfg = AgentConfig {
            id,
            job: JOB,
            cache: CACHE.into(),
            prefix: "/prefix".into(),
            settings: self.sc.settings.clone(),
            pool_bytes_max: self.sc.pool_bytes_max,
            stores: self.sc.stores,
            bugs: self.sc.bugs,
        };
        let proc = AgentProc {
            agent: Agent::new(cfg, self.clock()),
            place,
            alive: true,
            frozen: 0,
            store: Default::default(),
            memory: Default::default(),
            tasks: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            ctrls: Vec::new(),
            peers: BTreeSet::new(),
            lead: None,
        };
        self.agents.insert(id, proc);
        let first = self.rng.below(100_000);
        self.push(first, Event::Tick(Peer::Agent(id)));
    }

    /// Gives an event to an agent and does what it says.
    pub(crate) fn agent_event(&mut self, id: AgentId, via: Option<CtrlId>, event: AgentEvent) {
        let now = self.clock();
        let Some(place) = self.agents.get(&id).filter(|p| p.alive).map(|p| p.place) else { return };
        let paid = match &event {
            AgentEvent::Message { msg, .. } => self.cost_enter(place, Some(msg), false),
            event => self.cost_enter(place, None, matches!(event, AgentEvent::RankRequest { .. })),
        };
        let Some(proc) = self.agents.get_mut(&id) else { return };
        let agent = &mut proc.agent;
        let stepped = crate::in_core(|| agent.step(now, event));
        self.cost_stepped(paid.as_ref());
        let Some(actions) = stepped else {
            return self.violate("FM-V5", format!("agent {id} panicked: {}", crate::last_panic()));
        };
        let leaves = actions.iter().any(|a| matches!(a, AgentAction::Exit));
        if let Some(c) = via.filter(|_| leaves) {
            let epoch = self.ctrls[&c].epoch;
            self.judge_epoch(id, epoch);
        }
        for action in actions {
            if self.violation.is_some() {
                return;
            }
            self.judge_agent_action(id, &action, leaves);
            self.agent_action(id, via, action);
        }
        self.cost_leave(paid);
    }

    fn agent_action(&mut self, id: AgentId, via: Option<CtrlId>, action: AgentAction) {
        match action {
            AgentAction::Send { to: PeerId::Agent(to), msg } => {
                self.send(Peer::Agent(id), Peer::Agent(to), *msg);
            }
            AgentAction::Send { to: PeerId::Controller, msg } => {
                let current = self.agents[&id].ctrls.last().copied();
                if let Some(c) = via.or(current) {
                    self.send(Peer::Agent(id), Peer::Ctrl(c), *msg);
                }
            }
            AgentAction::Addresses(_) => {}
            AgentAction::Answer { conn, answer } => {
                if self.children.contains_key(&conn) {
                    self.child_answered(conn, *answer);
                } else if let Some((app, rank)) = self.conns.get(&conn).copied() {
                    let chance = 10 + self.rng.below(300);
                    let delay = self.cost_handed(id).unwrap_or(chance);
                    self.push(delay, Event::Rank(app, rank, RankEvent::Answer(answer)));
                }
            }
            AgentAction::Run { task, work, .. } => self.start_task(id, task, work),
            AgentAction::CancelAll => self.cancel_tasks(id),
            AgentAction::Publish(manifest) => {
                if let Some(p) = self.agents.get_mut(&id) {
                    p.store.published.insert((manifest.key, manifest.slot), manifest);
                }
            }
            AgentAction::Grow(extents) => self.grow(id, extents),
            AgentAction::Retire(ids) => self.retire(id, ids),
            AgentAction::Keep { key, slot, rank, files } => self.keep(id, (key, slot, rank), files),
            AgentAction::Take { key, slot, rank, filled } => {
                self.take_filled(id, (key, slot, rank), &filled);
            }
            AgentAction::Reclaim(bytes) => self.reclaim(id, bytes),
            AgentAction::Settled(key) => self.settled(id, key),
            // Ranks read what they restart from as if it were files.
            AgentAction::OpenMemory { .. } => {}
            AgentAction::EndRanks(conns) => self.end_ranks(id, &conns),
            AgentAction::Evict(keys) => self.evict(id, &keys),
            AgentAction::Log(severity, text) => {
                self.note(|| format!("a{} {severity:?}: {text}", id.0));
            }
            AgentAction::Lead { agents, nodes, settings } => {
                self.moment(Moment::Lead);
                if let Some(p) = self.agents.get_mut(&id) {
                    p.lead = Some(crate::ctrl::LeadWish { agents, nodes, settings });
                }
                self.push(1_000, Event::TakeEpoch(id, 0));
            }
            AgentAction::Exit => self.agent_exits(id),
        }
    }

    fn evict(&mut self, id: AgentId, keys: &[Key]) {
        self.note(|| format!("a{} evicts {keys:?}", id.0));
        self.forget_memory(id, |place| keys.contains(&place.0));
        let Some(p) = self.agents.get_mut(&id) else { return };
        p.store.evict(keys);
        // Their tasks find nothing to read any more; core has forgotten them.
        p.tasks.retain(|_, t| !keys.contains(&t.key()));
        p.ghosts.retain(|_, t| !keys.contains(&t.key()));
    }

    /// An agent leaves by itself.
    fn agent_exits(&mut self, id: AgentId) {
        self.note(|| format!("a{} leaves", id.0));
        self.agent_gone(id);
    }

    /// An agent's process ends, for whatever reason, and with it a controller that it hosts.
    pub(crate) fn agent_gone(&mut self, id: AgentId) {
        let Some(p) = self.agents.get_mut(&id).filter(|p| p.alive) else { return };
        p.alive = false;
        p.store = Default::default();
        p.tasks.clear();
        p.ghosts.clear();
        let hosted: Vec<CtrlId> = self
            .ctrls
            .iter()
            .filter(|(_, c)| c.alive && c.host == Some(id))
            .map(|(c, _)| *c)
            .collect();
        for c in hosted {
            self.ctrl_gone(c);
        }
        self.reset_links_of(Peer::Agent(id));
        for (app, rank) in self.ranks_on(id) {
            self.push(100, Event::Rank(app, rank, RankEvent::Closed));
        }
        self.maybe_next_run();
    }

    /// Ends the processes behind connections; all of the agent's if none is named.
    fn end_ranks(&mut self, id: AgentId, conns: &[ConnId]) {
        let named = |c| conns.is_empty() || conns.contains(&c);
        let mut dying = self.ranks_on(id);
        dying.retain(|(app, rank)| self.apps[*app].ranks[*rank].conn.is_some_and(named));
        for (app, rank) in dying {
            self.kill_rank(app, rank, 137);
        }
        for conn in self.children_of(id) {
            if conns.is_empty() || conns.contains(&conn) {
                self.child_told_to_end(conn);
            }
        }
    }

    /// An agent is killed by a fault or by its runner.
    pub(crate) fn kill_agent(&mut self, id: AgentId) {
        if !self.agents.get(&id).is_some_and(|p| p.alive) {
            return;
        }
        self.note(|| format!("a{} is killed", id.0));
        self.judge_loss(id);
        self.agent_gone(id);
    }

    /// Tries to become the controller of orphans.
    pub(crate) fn take_epoch(&mut self, id: AgentId, tries: u32) {
        if self.agents.get(&id).is_some_and(|p| !p.ctrls.is_empty()) {
            return self.push(500_000, Event::TakeEpoch(id, tries));
        }
        let Some(wish) = self.agents.get_mut(&id).and_then(|p| p.lead.take()) else { return };
        if self.prefix.leased(self.now) {
            if tries > LEASE_TRIES {
                // The runner lives and does not want this agent any more.
                return self.agent_exits(id);
            }
            if let Some(p) = self.agents.get_mut(&id) {
                p.lead = Some(wish);
            }
            return self.push(500_000, Event::TakeEpoch(id, tries + 1));
        }
        match self.prefix.take_epoch(self.now) {
            Ok(epoch) => self.start_leader(id, epoch, wish),
            Err(Trouble { cause: Cause::Os(_), .. }) => {
                // As the daemon does: again until the agent itself gives up.
                if let Some(p) = self.agents.get_mut(&id) {
                    p.lead = Some(wish);
                }
                self.push(500_000, Event::TakeEpoch(id, tries));
            }
            Err(_) => {}
        }
    }

    /// Tells an agent to leave on behalf of a runner that waits for it.
    pub(crate) fn shut_down(&mut self, from: CtrlId, id: AgentId) {
        let epoch = self.ctrls[&from].epoch;
        self.send(Peer::Ctrl(from), Peer::Agent(id), Msg::Shutdown(epoch));
    }
}
