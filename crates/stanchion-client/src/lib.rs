//! What an application talks to: a thin client of its node's agent.
//!
//! One [`Client`] is one rank's connection. Calls are synchronous; there are no threads but the one that copies behind
//! [`Client::checkpoint_cow`] where that is by userfaultfd, nothing is printed, nothing is global. Every wait has a deadline (FM-V1); after one has passed, or the agent is
//! gone, the client is dead and says so at each call. The C interface of `include/stanchion.h` is
//! [`capi`]; SCR's is the crate `stanchion-scr`.

mod alloc;
mod behind;
pub mod capi;
mod client;
mod environment;
mod error;
mod identity;
mod increment;
mod pool;
mod regions;
mod route;
mod snapshot;
mod source;
mod stream;
mod wire;

pub use client::streams::{Mode, StreamId};
pub use client::{Begun, Client, Offer, Options};
pub use environment::Environment;
pub use error::{Error, Words};
pub use identity::{Identity, IdentityError};
pub use increment::Stored;
pub use regions::{Region, RegionMut};
pub use snapshot::CopiedBy;
pub use stanchion_format::client::{Code, FLAG_CHECKPOINT, FLAG_OUTPUT};
pub use stanchion_format::ids::{DatasetNo, Level};
