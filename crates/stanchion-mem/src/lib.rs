//! Memory: extents that an agent and its ranks share.

