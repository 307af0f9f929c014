//! Memory: extents that an agent and its ranks share.

pub mod copy;
mod kernel;
pub mod maps;
pub mod track;
