//! Every decision of Stanchion. No I/O, no clock, no threads (a test holds that): state machines that get
//! an event and the time and return actions. The same code runs in the agent, in the runner, in orphaned
//! agents and in the simulator.
//!
//! - `agent::Agent`: what one agent does. Gathers collectives up the tree, stores records, asks for
//!   digests, parity, rebuilds and flushes as [`api::Task`]s.
//! - [`controller::Controller`]: who decides on restarts. Runs in the runner; in an orphaned agent when
//!   the runner is gone.
//! - [`fold`]: verified, once-only application of contributions to a stripe.

pub mod agent;
pub mod api;
pub mod bugs;
pub mod controller;
pub mod fold;
pub mod pace;
pub mod pool;
pub mod retention;
pub mod stripe;
pub mod tree;
