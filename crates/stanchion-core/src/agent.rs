//! What one agent decides.

use crate::api::{AgentAction, AgentEvent, Millis, Now};
use stanchion_format::ids::{AgentId, JobId};

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
}

/// An agent's mind.
#[derive(Debug)]
pub struct Agent {
    #[expect(dead_code, reason = "the skeleton lands before the decisions")]
    config: AgentConfig,
}

impl Agent {
    /// A new agent, of no incarnation yet.
    pub fn new(config: AgentConfig, _now: Now) -> Agent {
        Agent { config }
    }

    /// Takes an event, gives what is to be done, in order.
    pub fn step(&mut self, _now: Now, _event: AgentEvent) -> Vec<AgentAction> {
        Vec::new()
    }

    /// When a `Tick` is wanted at the latest.
    pub fn deadline(&self) -> Option<Millis> {
        None
    }
}
