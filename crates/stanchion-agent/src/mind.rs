//! What decides, as the daemon and the lead see it: core's state machines, or a script in tests.

use std::time::{Instant, SystemTime};

use stanchion_core::agent::Agent;
use stanchion_core::api::{
    AgentAction, AgentEvent, ControllerAction, ControllerEvent, Millis, Now,
};
use stanchion_core::controller::{Controller, Status};

/// Decides for an agent.
pub trait AgentMind {
    /// Takes an event, gives what is to be done, in order.
    fn step(&mut self, now: Now, event: AgentEvent) -> Vec<AgentAction>;
    /// When a `Tick` is wanted at the latest.
    fn deadline(&self) -> Option<Millis>;
}

impl AgentMind for Agent {
    fn step(&mut self, now: Now, event: AgentEvent) -> Vec<AgentAction> {
        Agent::step(self, now, event)
    }

    fn deadline(&self) -> Option<Millis> {
        Agent::deadline(self)
    }
}

/// Decides on restarts.
pub trait ControllerMind {
    /// Takes an event, gives what is to be done, in order.
    fn step(&mut self, now: Now, event: ControllerEvent) -> Vec<ControllerAction>;
    /// How things are.
    fn status(&self) -> Status;
}

impl ControllerMind for Controller {
    fn step(&mut self, now: Now, event: ControllerEvent) -> Vec<ControllerAction> {
        Controller::step(self, now, event)
    }

    fn status(&self) -> Status {
        Controller::status(self)
    }
}

/// The time as core is told it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub fn new() -> Clock {
        Clock(Instant::now())
    }

    pub fn now(self) -> Now {
        let mono = Millis(self.0.elapsed().as_millis().try_into().unwrap_or(u64::MAX));
        Now { mono, unix_s: unix_s() }
    }

    /// When that is.
    pub fn instant(self, at: Millis) -> Instant {
        // A deadline beyond what the clock can say is none.
        let at = std::time::Duration::from_millis(at.0.min(u64::from(u32::MAX)));
        self.0 + at
    }
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
