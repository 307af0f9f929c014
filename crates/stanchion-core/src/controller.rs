//! Who decides on restarts.

use crate::api::{ControllerAction, ControllerEvent, Now};
use stanchion_format::config::Settings;
use stanchion_format::ids::{AgentId, Epoch, JobId, Key, Level, RankId, SlotId};
use stanchion_format::peer::DatasetInfo;

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
    /// What for.
    pub purpose: Purpose,
}

/// What `stanchion status` shows.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// A word for what goes on: starting, surveying, restoring, running, flushing, leaving.
    pub phase: &'static str,
    /// Which agent each slot is on, and whether it lives.
    pub slots: Vec<(SlotId, AgentId, bool)>,
    /// Idle agents.
    pub spares: Vec<AgentId>,
    /// Datasets and the levels they have now.
    pub datasets: Vec<(DatasetInfo, Vec<Level>)>,
    /// What a restart would use now, as far as the controller knows.
    pub current: Option<Key>,
    /// Launches of the application so far.
    pub runs: u64,
    /// Lost agents so far.
    pub lost: u64,
    /// Ranks of the application, once known.
    pub ranks: Option<RankId>,
}

/// A controller's mind.
#[derive(Debug)]
pub struct Controller {
    #[expect(dead_code, reason = "the skeleton lands before the decisions")]
    config: ControllerConfig,
}

impl Controller {
    /// A new controller; it waits for its agents.
    pub fn new(config: ControllerConfig, _now: Now) -> Controller {
        Controller { config }
    }

    /// Takes an event, gives what is to be done, in order.
    pub fn step(&mut self, _now: Now, _event: ControllerEvent) -> Vec<ControllerAction> {
        Vec::new()
    }

    /// For `stanchion status`.
    pub fn status(&self) -> Status {
        Status::default()
    }
}
