//! Bytes that cross a process or outlive one.
//!
//! Everything that Stanchion puts on a socket or into a file has its type here, with its limits
//! (FM-C3). Control messages are [`frame`]s with a zerocopy header and a postcard body; what people
//! read ([`index`]) is JSON. Nothing here does I/O beyond `Read`/`Write` of a frame.

pub mod changed;
pub mod checksum;
pub mod client;
pub mod config;
pub mod container;
pub mod data;
pub mod frame;
pub mod holding;
pub mod ids;
pub mod index;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod name;
pub mod peer;
pub mod place;
pub mod profile;
pub mod regions;
pub mod scr_line;
pub mod segment;
