//! Without a controller: end the ranks, wait a little for a new one, then elect who flushes (FM-V3).

use super::{Agent, Phase};
use crate::api::{AgentAction, Millis};
use stanchion_format::ids::{AgentId, PeerId};
use stanchion_format::peer::{Msg, Severity};
use std::collections::{BTreeMap, BTreeSet};

/// Pause between looks at who lives, milliseconds.
const ELECTION_MS: u64 = 500;
/// Looks without an answer after which a lower agent counts as dead.
const SILENT_LOOKS_MAX: u32 = 6;

/// What this agent knows of its controller.
#[derive(Debug)]
pub(super) struct Orphan {
    last_heard: Millis,
    /// Since when there is none.
    since: Option<Millis>,
    next_look: Millis,
    looks: BTreeMap<AgentId, u32>,
    dead: BTreeSet<AgentId>,
    leading: Option<Millis>,
}

impl Orphan {
    pub(super) fn new(now: Millis) -> Orphan {
        Orphan {
            last_heard: now,
            since: None,
            next_look: now,
            looks: BTreeMap::new(),
            dead: BTreeSet::new(),
            leading: None,
        }
    }

    pub(super) fn orphaned(&self) -> bool {
        self.since.is_some()
    }

    /// A controller spoke: whoever it is, epochs tell whether it may.
    pub(super) fn heard(&mut self, now: Millis) {
        self.last_heard = now;
        self.since = None;
        self.leading = None;
        self.looks.clear();
        self.dead.clear();
    }

    pub(super) fn lost(&mut self, now: Millis) {
        self.since.get_or_insert(now);
    }

    pub(super) fn heard_from(&mut self, agent: AgentId, _now: Millis) {
        self.looks.remove(&agent);
        self.dead.remove(&agent);
    }

    pub(super) fn link_down(&mut self, agent: AgentId) {
        if self.since.is_some() {
            self.dead.insert(agent);
        }
    }
}

impl Agent {
    pub(super) fn tick_orphan(&mut self) {
        let now = self.now.mono;
        let silence = self.settings().number("silence_timeout_ms");
        if self.orphan.since.is_none() {
            if now.since(self.orphan.last_heard) <= 2 * silence {
                return;
            }
            self.orphan.lost(now);
        }
        let Some(since) = self.orphan.since else { return };
        if self.view.is_none() {
            // Nothing was ever decided: there is nothing to save.
            self.leave();
            return;
        }
        if self.ranks_present() {
            self.log(Severity::Error, "the runner is gone: ending the ranks of this node".into());
            self.end_ranks();
        }
        let grace = self.settings().number("orphan_grace_ms");
        let patience = grace
            + self.settings().number("restore_timeout_ms")
            + self.settings().number("flush_timeout_ms");
        if now.since(since) > patience {
            self.log(Severity::Error, "no agent could flush in time: leaving".into());
            self.leave();
            return;
        }
        if now.since(since) >= grace && now >= self.orphan.next_look {
            self.orphan.next_look = now.after(ELECTION_MS);
            self.elect();
        }
    }

    /// The living agent of the lowest number leads.
    fn elect(&mut self) {
        let now = self.now.mono;
        let me = self.cfg.id;
        let Some(view) = &self.view else { return };
        let agents = view.plan.agents.to_vec();
        let (nodes, settings) = (view.plan.slots.len() as u32, view.settings.clone());
        let mut lower_lives = false;
        for agent in agents.iter().map(|a| a.id).filter(|a| *a < me) {
            let looks = self.orphan.looks.entry(agent).or_insert(0);
            *looks += 1;
            let silent = *looks > SILENT_LOOKS_MAX;
            if !silent && !self.orphan.dead.contains(&agent) {
                lower_lives = true;
            }
            self.send(PeerId::Agent(agent), Msg::Ping(now.0));
        }
        if lower_lives || self.orphan.leading.is_some() {
            return;
        }
        self.orphan.leading = Some(now);
        self.log(Severity::Warn, "no runner: this agent leads the wind-down".into());
        self.out.push(AgentAction::Lead { agents, nodes, settings });
    }

    pub(super) fn ranks_present(&self) -> bool {
        self.phase == Phase::Open && self.ranks.any()
    }
}
