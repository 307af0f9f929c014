//! A container: what one slot has of a dataset, in one file that is written from front to back and never changed.
//!
//! ```text
//! block 0        Head: what it is
//! then           the slot's files in the order of its manifest, each from the next whole block on, padded with zeros
//! then           the manifest, postcard, padded with zeros
//! last block     Tail: what it is, where the manifest lies, its checksum
//! ```
//!
//! Where a file lies follows from the manifest. Who has the manifest can read any chunk; who has only the container reads
//! its last block first.

use crate::checksum::{Crc, crc64};
use crate::ids::{DatasetNo, Epoch, Incarnation, JobId, Key, SlotId};
use crate::limits;
use crate::manifest::Manifest;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Files and blocks of ours begin at multiples of it, bytes; what direct I/O asks for.
pub const BLOCK: usize = 4096;
/// Version of the format; another one is refused.
pub const VERSION: u32 = 1;

const HEAD: [u8; 8] = *b"STNCONH1";
const TAIL: [u8; 8] = *b"STNCONT1";

/// Which container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The job.
    pub job: JobId,
    /// The dataset.
    pub key: Key,
    /// Whose part of it.
    pub slot: SlotId,
    /// Which attempt to flush it wrote this.
    pub attempt: u32,
}

/// The last block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// What the container is.
    pub identity: Identity,
    /// Where the manifest begins; a multiple of [`BLOCK`].
    pub table_at: u64,
    /// Its length, at most [`limits::INDEX_FILE_BYTES_MAX`].
    pub table_bytes: u64,
    table_crc: Crc,
}

/// Why bytes are no part of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    /// Something else, or cut off.
    #[error("no container")]
    Foreign,
    /// Of another version.
    #[error("a container of version {0}, not {VERSION}")]
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

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    attempt: U32,
    job: U64,
    no: U64,
    epoch: U64,
    count: U32,
    slot: U32,
    table_at: U64,
    table_bytes: U64,
    table_crc: U64,
    own_crc: U64,
}

const RAW_BYTES: usize = size_of::<Raw>();
const _: () = assert!(RAW_BYTES == 80);

impl Raw {
    fn new(magic: [u8; 8], of: Identity) -> Raw {
        Raw {
            magic,
            version: VERSION.into(),
            attempt: of.attempt.into(),
            job: of.job.0.into(),
            no: of.key.no.0.into(),
            epoch: of.key.inc.epoch.0.into(),
            count: of.key.inc.count.into(),
            slot: of.slot.0.into(),
            table_at: 0.into(),
            table_bytes: 0.into(),
            table_crc: 0.into(),
            own_crc: 0.into(),
        }
    }

    fn block(mut self) -> Vec<u8> {
        self.own_crc = crc64(&self.as_bytes()[..RAW_BYTES - 8]).0.into();
        let mut block = self.as_bytes().to_vec();
        block.resize(BLOCK, 0);
        block
    }

    fn parse(magic: [u8; 8], block: &[u8]) -> Result<Raw, ContainerError> {
        let (raw, rest) = Raw::read_from_prefix(block).map_err(|_| ContainerError::Foreign)?;
        if block.len() != BLOCK || raw.magic != magic {
            return Err(ContainerError::Foreign);
        }
        if raw.version.get() != VERSION {
            return Err(ContainerError::Version(raw.version.get()));
        }
        let right = crc64(&block[..RAW_BYTES - 8]) == Crc(raw.own_crc.get());
        if right && rest.iter().all(|b| *b == 0) { Ok(raw) } else { Err(ContainerError::Damaged) }
    }

    fn identity(&self) -> Identity {
        let inc = Incarnation { epoch: Epoch(self.epoch.get()), count: self.count.get() };
        Identity {
            job: JobId(self.job.get()),
            key: Key { no: DatasetNo(self.no.get()), inc },
            slot: SlotId(self.slot.get()),
            attempt: self.attempt.get(),
        }
    }
}

/// `bytes` up to the next multiple of [`BLOCK`]; `None` beyond what 64 bits hold.
pub fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK as u64)
}

/// Where each of the manifest's files begins, and behind them where the manifest does. `None` if sizes are beyond what 64
/// bits hold.
pub fn places(manifest: &Manifest) -> Option<Vec<u64>> {
    let mut at = BLOCK as u64;
    let mut places = Vec::with_capacity(manifest.files.len() + 1);
    for file in &manifest.files {
        places.push(at);
        at = at.checked_add(padded(file.bytes)?)?;
    }
    places.push(at);
    Some(places)
}

/// The first block.
pub fn head(identity: Identity) -> Vec<u8> {
    Raw::new(HEAD, identity).block()
}

/// Reads the first block.
pub fn parse_head(block: &[u8]) -> Result<Identity, ContainerError> {
    let raw = Raw::parse(HEAD, block)?;
    let empty = raw.table_at.get() == 0 && raw.table_bytes.get() == 0 && raw.table_crc.get() == 0;
    if empty { Ok(raw.identity()) } else { Err(ContainerError::Unsound) }
}

/// What comes behind the files: the manifest and the last block. `TooLong` if nobody would read it.
pub fn tail(identity: Identity, manifest: &Manifest) -> Result<Vec<u8>, ContainerError> {
    let right = manifest.key == identity.key && manifest.slot == identity.slot;
    let at = places(manifest).and_then(|p| p.last().copied()).filter(|_| right);
    let table_at = at.ok_or(ContainerError::Unsound)?;
    let mut bytes = postcard::to_stdvec(manifest).map_err(|_| ContainerError::Unsound)?;
    if bytes.len() as u64 > limits::INDEX_FILE_BYTES_MAX {
        return Err(ContainerError::TooLong);
    }
    let mut raw = Raw::new(TAIL, identity);
    raw.table_at = table_at.into();
    raw.table_bytes = (bytes.len() as u64).into();
    raw.table_crc = crc64(&bytes).0.into();
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    bytes.extend(raw.block());
    Ok(bytes)
}

impl Tail {
    /// Reads the last block of a container of `bytes` bytes.
    pub fn parse(block: &[u8], bytes: u64) -> Result<Tail, ContainerError> {
        let raw = Raw::parse(TAIL, block)?;
        let (table_at, table_bytes) = (raw.table_at.get(), raw.table_bytes.get());
        if table_bytes > limits::INDEX_FILE_BYTES_MAX {
            return Err(ContainerError::TooLong);
        }
        let end = padded(table_bytes).and_then(|b| table_at.checked_add(b));
        let whole = end.and_then(|end| end.checked_add(BLOCK as u64));
        if table_at % BLOCK as u64 != 0 || whole != Some(bytes) {
            // Something was cut off in front of it, or put there.
            return Err(ContainerError::Unsound);
        }
        let table_crc = Crc(raw.table_crc.get());
        Ok(Tail { identity: raw.identity(), table_at, table_bytes, table_crc })
    }

    /// Reads the manifest from the [`Tail::table_bytes`] bytes at [`Tail::table_at`].
    pub fn manifest(&self, bytes: &[u8]) -> Result<Manifest, ContainerError> {
        if bytes.len() as u64 != self.table_bytes || crc64(bytes) != self.table_crc {
            return Err(ContainerError::Damaged);
        }
        let (manifest, rest): (Manifest, _) =
            postcard::take_from_bytes(bytes).map_err(|_| ContainerError::Unsound)?;
        let sound = rest.is_empty()
            && manifest.check().is_ok()
            && manifest.key == self.identity.key
            && manifest.slot == self.identity.slot
            && places(&manifest).and_then(|p| p.last().copied()) == Some(self.table_at);
        if sound { Ok(manifest) } else { Err(ContainerError::Unsound) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RankId;
    use crate::manifest::{FileEntry, pieces};

    fn identity() -> Identity {
        let inc = Incarnation { epoch: Epoch(3), count: 2 };
        let key = Key { no: DatasetNo(7), inc };
        Identity { job: JobId(9), key, slot: SlotId(1), attempt: 5 }
    }

    fn manifest(sizes: &[u64]) -> Manifest {
        let files = (0..).zip(sizes).map(|(rank, bytes)| FileEntry {
            rank: RankId(rank),
            path: "f".into(),
            bytes: *bytes,
            mode: 0o600,
            chunks: pieces(*bytes, 4096).map(|(at, _)| Crc(at)).collect(),
        });
        let Identity { key, slot, .. } = identity();
        Manifest { key, slot, chunk_bytes: 4096, files: files.collect() }
    }

    /// A container without its files' bytes.
    fn hollow(m: &Manifest) -> Vec<u8> {
        let mut bytes = head(identity());
        bytes.resize(*places(m).unwrap().last().unwrap() as usize, 0);
        bytes.extend(tail(identity(), m).unwrap());
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Manifest, ContainerError> {
        let at = bytes.len().checked_sub(BLOCK).ok_or(ContainerError::Foreign)?;
        let tail = Tail::parse(&bytes[at..], bytes.len() as u64)?;
        let from = tail.table_at as usize;
        tail.manifest(&bytes[from..from + tail.table_bytes as usize])
    }

    #[test]
    fn what_was_written_is_read() {
        for sizes in [&[][..], &[0], &[1, 0, 4096, 4097, 12_345]] {
            let m = manifest(sizes);
            let bytes = hollow(&m);
            assert_eq!(bytes.len() % BLOCK, 0);
            assert_eq!(parse_head(&bytes[..BLOCK]), Ok(identity()));
            assert_eq!(read(&bytes), Ok(m));
        }
        assert_eq!(
            places(&manifest(&[1, 0, 4096, 4097])).unwrap(),
            [4096, 8192, 8192, 12_288, 20_480]
        );
    }

    #[test]
    fn no_block_of_ours_can_be_bent_or_cut() {
        // FM-F9, FM-F11
        let bytes = hollow(&manifest(&[1, 5000]));
        let table = *places(&manifest(&[1, 5000])).unwrap().last().unwrap() as usize;
        for at in (0..BLOCK).chain(table..bytes.len()) {
            let mut bent = bytes.clone();
            bent[at] ^= 4;
            let padding = (table..bytes.len() - BLOCK).contains(&at)
                && at
                    >= table
                        + Tail::parse(&bytes[bytes.len() - BLOCK..], bytes.len() as u64)
                            .unwrap()
                            .table_bytes as usize;
            let wrong =
                if at < BLOCK { parse_head(&bent[..BLOCK]).is_err() } else { read(&bent).is_err() };
            // Zeros behind the manifest say nothing.
            assert!(wrong || padding, "byte {at}");
        }
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err());
        }
        let mut grown = bytes.clone();
        grown.splice(table..table, [0; BLOCK]);
        assert_eq!(read(&grown), Err(ContainerError::Unsound));
    }

    #[test]
    fn sizes_that_no_file_has_are_refused() {
        let mut m = manifest(&[1, 2]);
        for file in &mut m.files {
            file.bytes = u64::MAX / 2 + 10;
        }
        assert_eq!(places(&m), None);
        assert_eq!(tail(identity(), &m), Err(ContainerError::Unsound));
        let other = Identity { slot: SlotId(2), ..identity() };
        assert_eq!(tail(other, &manifest(&[1])), Err(ContainerError::Unsound));
    }
}
