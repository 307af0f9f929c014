//! Memory: extents that an agent and its ranks share.

pub mod copy;
pub mod cow;
pub mod forked;
mod kernel;
pub mod maps;
pub mod track;
