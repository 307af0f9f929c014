//! The agent's contact with files. Blocking functions, called from the agent's bulk threads.
//!
//! [`cache`] is the directory on the node where ranks put their files and agents their parity;
//! [`prefix`] is the persistent directory with the application's own files and the index that
//! vouches for them; [`store`] keeps chunks in segment files. All reach the system through [`fs::Fs`], so that
//! tests can take it away.

pub mod cache;
pub mod fs;
pub mod prefix;
pub mod store;
pub mod trouble;
