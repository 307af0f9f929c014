//! The daemon of a node: executes what `stanchion_core` decides.
//!
//! - [`link`]: authenticated links between agents and the controller.

pub mod link;
pub mod ranks;
pub mod secret;
