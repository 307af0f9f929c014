//! The data connection between agents: chunks, asked for by who needs them.
//!
//! Pull, not push: the holder of a stripe asks its members for their chunks, a rebuilder asks whoever
//! has them. Flow control, repetition and idempotence come with asking (see ARCHITECTURE.md, Decisions).
//! A request frame is answered by one frame of kind [`KIND_CHUNK`] whose body is a postcard
//! [`ChunkAnswer`]; if it says `Bytes`, that many raw bytes follow behind the frame, covered by `crc`.

use crate::checksum::Crc;
use crate::ids::{Key, SlotId};
use serde::{Deserialize, Serialize};

/// Frame kind of a [`ChunkRequest`].
pub const KIND_CHUNK_REQUEST: u16 = 16;
/// Frame kind of a [`ChunkAnswer`].
pub const KIND_CHUNK: u16 = 17;

/// Which of a slot's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Piece {
    /// The slot's chunk of this number.
    Data(u64),
    /// The parity at this place of the slot's parity file.
    Parity(u64),
}

/// Asks for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkRequest {
    /// Of which dataset.
    pub key: Key,
    /// Of which slot.
    pub slot: SlotId,
    /// Which chunk.
    pub piece: Piece,
}

/// Answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChunkAnswer {
    /// So many raw bytes follow, with this checksum.
    Bytes {
        /// Length, bytes; at most `CHUNK_BYTES_MAX`.
        len: u32,
        /// Of parity the checksum of the bytes that follow; of data what it must be.
        crc: Crc,
    },
    /// This agent does not have it.
    Missing,
    /// Reading it failed with this errno.
    Failed(i32),
}
