//! Time: what is sent again, who is silent, what takes too long (FM-V1, FM-F5a).

use super::{Controller, INDEX_TIMEOUT_MS, PING_MS, Phase, RESEND_MS};
use crate::api::{ControllerAction, Millis, Outcome};
use stanchion_format::ids::AgentId;
use stanchion_format::peer::{Cause, Msg, Trouble};
use std::collections::BTreeSet;

/// Observers that are asked about a silent agent.
const OBSERVERS: usize = 2;

/// A process hears of the time ten times a second: after such a pause it was stopped, milliseconds.
const PAUSE_MS: u64 = 2_000;

/// Time as this process has lived it. While it was stopped, it could hear nobody: that is no silence of theirs, and
/// no deadline of anything has come nearer.
#[derive(Debug)]
pub(super) struct Lived {
    heard: Millis,
    slept: u64,
}

impl Lived {
    pub(super) fn new(now: Millis) -> Lived {
        Lived { heard: now, slept: 0 }
    }

    /// The time without what was slept until `now`.
    pub(super) fn until(&mut self, now: Millis) -> Millis {
        let pause = now.since(self.heard);
        if pause > PAUSE_MS {
            self.slept += pause;
        }
        self.heard = now;
        Millis(now.0.saturating_sub(self.slept))
    }
}

impl Controller {
    pub(super) fn on_tick(&mut self) {
        let now = self.now.mono;
        if now.since(self.pinged) >= PING_MS {
            self.pinged = now;
            let agents: Vec<AgentId> = self.agents.keys().copied().collect();
            for agent in agents {
                self.send(agent, Msg::Ping(now.0));
            }
        }
        if now.since(self.sent) >= RESEND_MS {
            self.send_round();
        }
        self.watch_silence();
        self.watch_deadlines();
    }

    fn watch_silence(&mut self) {
        let now = self.now.mono;
        let limit = self.cfg.settings.number("silence_timeout_ms");
        let all: Vec<AgentId> = self.agents.keys().copied().collect();
        let mut dead = Vec::new();
        let mut ask: Vec<(AgentId, AgentId)> = Vec::new();
        for (id, known) in &mut self.agents {
            if now.since(known.heard) <= limit {
                continue;
            }
            match &known.probe {
                None => {
                    let observers: Vec<AgentId> =
                        all.iter().filter(|a| *a != id).take(OBSERVERS).copied().collect();
                    ask.extend(observers.iter().map(|o| (*o, *id)));
                    known.probe = Some((now, BTreeSet::new(), observers.len()));
                }
                // No second observer, or none answers: it is not only we who do not hear it.
                Some((since, silent_to, asked)) => {
                    if silent_to.len() >= *asked || now.since(*since) > limit {
                        dead.push(*id);
                    }
                }
            }
        }
        for (observer, about) in ask {
            self.send(observer, Msg::Probe(about));
        }
        for agent in dead {
            self.out.push(ControllerAction::Fence(agent));
            self.on_agent_down(agent, true);
        }
    }

    pub(super) fn on_probed(&mut self, from: AgentId, about: AgentId, alive: bool) {
        let now = self.now.mono;
        let Some(known) = self.agents.get_mut(&about) else { return };
        if alive {
            known.heard = now;
            known.probe = None;
        } else if let Some((_, silent_to, _)) = &mut known.probe {
            silent_to.insert(from);
        }
    }

    fn watch_deadlines(&mut self) {
        let elapsed = self.now.mono.since(self.since);
        let settings = &self.cfg.settings;
        match self.phase {
            Phase::Starting if elapsed > settings.number("start_timeout_ms") => {
                if self.enough_up() {
                    self.all_up();
                } else {
                    self.exit(Outcome::AgentsFailed(Trouble::new(Cause::Timeout)));
                }
            }
            Phase::Surveying
                if self.index.is_none()
                    && self.now.mono.since(self.index_at) > INDEX_TIMEOUT_MS =>
            {
                self.index_timed_out();
            }
            Phase::Restoring if elapsed > settings.number("restore_timeout_ms") => {
                self.restore_failed();
            }
            Phase::Finishing if elapsed > 3 * settings.number("flush_timeout_ms") => {
                self.finished(None, Some(Trouble::new(Cause::Timeout)));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_slept_is_no_time() {
        let mut lived = Lived::new(Millis(5_000));
        assert_eq!(lived.until(Millis(5_100)), Millis(5_100));
        assert_eq!(lived.until(Millis(7_000)), Millis(7_000), "busy, not stopped");
        assert_eq!(lived.until(Millis(47_000)), Millis(7_000));
        assert_eq!(lived.until(Millis(47_100)), Millis(7_100));
        assert_eq!(lived.until(Millis(57_100)), Millis(7_100));
    }
}
