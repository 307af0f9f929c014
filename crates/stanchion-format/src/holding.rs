//! What an agent writes beside a slot's files for who finds them when all agents are gone: the certificate of their
//! dataset, the manifests that vouch for them and for the others of their set, and of which line they are (FM-A).
//!
//! A header that says how long the body is and what its checksum, then a postcard body. Nothing of it is believed that
//! contradicts itself.

use crate::checksum::{Crc, crc64};
use crate::ids::{Ancestry, Incarnation, JobId, SlotId};
use crate::manifest::Manifest;
use crate::peer::DatasetInfo;
use crate::{frame, limits, name};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Its name in a slot's directory.
pub const NAME: &str = "holding";
/// Its name while it is written.
pub const NEW_NAME: &str = "holding.new";
/// First bytes.
pub const MAGIC: [u8; 8] = *b"STNHOLD1";
/// Version of the format; another one is refused.
pub const VERSION: u32 = 1;
/// Size of the header, bytes.
pub const HEADER_BYTES: usize = 40;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    reserved: U32,
    body_bytes: U64,
    body_crc: U64,
    header_crc: U64,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// What an agent has of one slot of a dataset, and what it knows of the slot's set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// Grows with each one that an agent writes.
    pub no: u64,
    /// The job.
    pub job: JobId,
    /// The incarnation it was written in.
    pub inc: Incarnation,
    /// That incarnation's ancestry.
    pub ancestry: Ancestry,
    /// The dataset's certificate.
    pub info: DatasetInfo,
    /// Which slot.
    pub slot: SlotId,
    /// The slot's files are here. Not so if any of them was in memory alone: that is gone with the agent.
    pub data: bool,
    /// All parity that the slot keeps for its set is here.
    pub parity: bool,
    /// What vouches for the slot's files and, as far as the agent knew, for those of its set; ordered by slot.
    pub manifests: Vec<Arc<Manifest>>,
}

/// Why bytes are no holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldingError {
    /// Something else, or cut off.
    #[error("no record of what a slot holds")]
    Foreign,
    /// Of another version.
    #[error("a record of version {0}, not {VERSION}")]
    Version(u32),
    /// A checksum does not fit.
    #[error("damaged")]
    Damaged,
    /// Longer than any may be.
    #[error("too long")]
    TooLong,
    /// It contradicts itself.
    #[error("it contradicts itself")]
    Unsound,
}

impl Holding {
    /// The bytes of the file; `TooLong` if nobody would read them.
    pub fn encode(&self) -> Result<Vec<u8>, HoldingError> {
        let body = postcard::to_stdvec(self).map_err(|_| HoldingError::Unsound)?;
        if (HEADER_BYTES + body.len()) as u64 > limits::HOLDING_BYTES_MAX {
            return Err(HoldingError::TooLong);
        }
        let mut header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            reserved: 0.into(),
            body_bytes: (body.len() as u64).into(),
            body_crc: crc64(&body).0.into(),
            header_crc: 0.into(),
        };
        header.header_crc = crc64(&header.as_bytes()[..HEADER_BYTES - 8]).0.into();
        Ok([header.as_bytes(), &body].concat())
    }

    /// Reads a file's bytes; whole, verified and sound, or not at all.
    pub fn parse(bytes: &[u8]) -> Result<Holding, HoldingError> {
        if bytes.len() as u64 > limits::HOLDING_BYTES_MAX {
            return Err(HoldingError::TooLong);
        }
        let (header, body) = Header::read_from_prefix(bytes).map_err(|_| HoldingError::Foreign)?;
        if header.magic != MAGIC {
            return Err(HoldingError::Foreign);
        }
        if header.version.get() != VERSION {
            return Err(HoldingError::Version(header.version.get()));
        }
        let good = crc64(&bytes[..HEADER_BYTES - 8]) == Crc(header.header_crc.get())
            && header.reserved.get() == 0
            && header.body_bytes.get() == body.len() as u64
            && crc64(body) == Crc(header.body_crc.get());
        if !good {
            return Err(HoldingError::Damaged);
        }
        let holding: Holding = frame::decode(body).map_err(|_| HoldingError::Unsound)?;
        if holding.sound() { Ok(holding) } else { Err(HoldingError::Unsound) }
    }

    /// Everything that who goes by it relies on.
    fn sound(&self) -> bool {
        let sets = &self.info.sets;
        let chunk_bytes = limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX;
        let plain = sets.slots <= limits::SLOTS_MAX
            && self.slot.0 < sets.slots
            && (1..=limits::RANKS_MAX).contains(&self.info.ranks)
            && chunk_bytes.contains(&self.info.chunk_bytes)
            && name::check_dataset(&self.info.name).is_ok()
            && self.ancestry.0.len() <= limits::ANCESTRY_ENTRIES_MAX
            && self.ancestry.admits(self.inc, self.info.key);
        if !plain {
            return false;
        }
        let members = sets.members(self.slot);
        let ours =
            |m: &Manifest| m.key == self.info.key && members.contains(&m.slot) && m.check().is_ok();
        let has = |slot| self.manifests.iter().any(|m| m.slot == slot);
        self.manifests.windows(2).all(|w| w[0].slot < w[1].slot)
            && self.manifests.iter().all(|m| ours(m))
            && has(self.slot)
            && (!self.parity || members.iter().all(|m| has(*m)))
    }
}
