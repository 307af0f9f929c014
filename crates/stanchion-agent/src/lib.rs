//! The daemon of a node: executes what `stanchion_core` decides.
//!
//! - [`daemon`]: one agent process. Events of the world go to core, its actions to the world, all on one
//!   control thread that never touches a file.
//! - [`link`]: authenticated links between agents and the controller.
//! - [`ranks`]: the local socket of the node's ranks.
//! - [`bulk`]: threads for files, parity and chunks of other agents.
//! - [`lead`]: drives core's controller, in the runner or in an orphaned agent.
//! - [`orphans`]: what an agent does before it may lead the others.
//! - [`mind`]: core as seen from here.
//! - [`store`]: whether what lies in memory goes to the cache's disk.

pub mod bulk;
pub mod daemon;
pub mod lead;
pub mod link;
pub mod mind;
pub mod orphans;
mod pool;
pub mod ranks;
pub mod secret;
pub mod store;
