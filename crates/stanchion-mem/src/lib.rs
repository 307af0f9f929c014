//! Memory: extents that an agent and its ranks share, and descriptors that carry them over the local socket.
//!
//! An extent is an anonymous file of fixed size (memfd, sealed against resizing) that holds data and nothing
//! else: there is no header, no lock and no counter in shared memory, so nobody can be kept waiting or misled by
//! what another process writes there. Who may write to which extent is said over the socket (docs/protocol.md),
//! and the agent takes an extent back only when its rank is gone (DESIGN.md, section 7, rule 7).
//!
//! Memory that another process may change at any moment is never a `&[u8]` here: it is copied, as raw bytes, into
//! memory of our own before anybody looks at it.

pub mod copy;
pub mod cow;
pub mod extent;
pub mod fds;
pub mod forked;
mod kernel;
pub mod maps;
pub mod track;

pub use extent::{Extent, Mapping, MemError};
