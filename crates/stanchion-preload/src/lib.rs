//! `libstanchion_profile.so`: counts how a program writes its files.
//!
//! Loaded by LD_PRELOAD into every process of a job, it stands before the C library's functions that open,
//! write, sync and close, calls the real ones and counts into the process's own record
//! ([`stanchion_format::profile`]) in the directory that `STANCHION_PROFILE_DIR` names. It lives inside of
//! anybody's program, hence:
//!
//! - No memory is allocated, no lock taken, nothing printed, no thread made; what is counted are atomics in
//!   the mapped record. Signal handlers may write files.
//! - Its own system calls are made directly (rustix), never through the functions that it replaces, and
//!   leave errno alone.
//! - Nothing panics: no arithmetic that can overflow, no index that can miss.
//! - Nothing with a destructor is alive around a real call: a thread may be cancelled in it, a signal
//!   handler may jump out of it.
//! - A child of fork counts into a record of its own; until it writes, it has none.
//! - What goes wrong with the record (no directory, no space) turns counting off and nothing else.

mod count;
mod fds;
pub mod ffi;
// In the tests' executable they have other names, so that it stays its own program.
pub mod hooks;
mod record;
pub mod stdio;
