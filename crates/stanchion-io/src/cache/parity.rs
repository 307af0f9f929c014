//! The parity that a slot keeps for its redundancy set.

use std::path::PathBuf;

use stanchion_format::checksum::{Crc, crc64};
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::peer::{Cause, Trouble};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::chunks::{OpenPiece, Summed};
use super::{Cache, slot_dir};
use crate::fs::{self, How};
use crate::trouble::cause;

/// What a place of the parity file holds. All zeros: nothing yet.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct Sum {
    index: U64,
    len: U32,
    reserved: U32,
    crc: U64,
    own_crc: U64,
}

const SUM_BYTES: usize = size_of::<Sum>();

impl Sum {
    fn new(index: u64, len: u32, crc: Crc) -> Sum {
        let mut sum = Sum {
            index: index.into(),
            len: len.into(),
            reserved: 0.into(),
            crc: crc.0.into(),
            own_crc: 0.into(),
        };
        sum.own_crc = crc64(&sum.as_bytes()[..SUM_BYTES - 8]).0.into();
        sum
    }

    fn holds(&self, index: u64) -> bool {
        let own = crc64(&self.as_bytes()[..SUM_BYTES - 8]);
        self.index.get() == index && own == Crc(self.own_crc.get())
    }
}

/// Where the parity of a place lies, and where its sum.
fn offsets(index: u64, chunk_bytes: u32) -> Option<(u64, u64)> {
    let data = index.checked_mul(chunk_bytes.into())?;
    // The kernel's offsets are signed.
    let end = data.checked_add(chunk_bytes.into()).filter(|e| *e <= i64::MAX as u64)?;
    debug_assert!(end > data || chunk_bytes == 0);
    Some((data, index.checked_mul(SUM_BYTES as u64)?))
}

fn files(key: Key, slot: SlotId) -> (PathBuf, PathBuf) {
    let dir = slot_dir(key, slot);
    (dir.join("parity"), dir.join("parity.sums"))
}

fn trouble(slot: SlotId) -> impl Fn(Cause) -> Trouble {
    move |cause| Trouble::new(cause).slot(slot).file("parity")
}

impl Cache {
    /// Reads a place of the parity file: at most `len_max` bytes, verified against what was written.
    pub fn read_parity(
        &self,
        key: Key,
        slot: SlotId,
        index: u64,
        chunk_bytes: u32,
        len_max: u32,
        buf: &mut Vec<u8>,
    ) -> Result<Crc, Trouble> {
        let trouble = trouble(slot);
        let open = self.open_parity(key, slot, index, chunk_bytes, len_max)?;
        buf.resize(open.len as usize, 0);
        let have = fs::read_full(&*open.file, buf, open.offset).map_err(|e| trouble(cause(e)))?;
        let crc = crc64(buf);
        if have < open.len as usize || crc != open.crc {
            return Err(trouble(Cause::Damaged));
        }
        Ok(crc)
    }

    /// A place of the parity file, to be read in pieces; at most `len_max` bytes.
    pub fn open_parity(
        &self,
        key: Key,
        slot: SlotId,
        index: u64,
        chunk_bytes: u32,
        len_max: u32,
    ) -> Result<OpenPiece, Trouble> {
        let trouble = trouble(slot);
        let (offset, sum_at) =
            offsets(index, chunk_bytes).ok_or_else(|| trouble(Cause::Missing))?;
        let (data, sums) = files(key, slot);
        let mut sum = Sum::new(0, 0, Crc(0));
        let mut read_sum = || {
            let file = self.fs.open(&sums, How::Read)?;
            fs::read_full(&*file, sum.as_mut_bytes(), sum_at)
        };
        let have = read_sum().map_err(|e| trouble(cause(e)))?;
        if have == 0 || have == SUM_BYTES && sum.as_bytes().iter().all(|b| *b == 0) {
            return Err(trouble(Cause::Missing));
        }
        let len = sum.len.get();
        if have < SUM_BYTES || !sum.holds(index) || len > len_max.min(chunk_bytes) {
            return Err(trouble(Cause::Damaged));
        }
        let file = self.fs.open(&data, How::Read).map_err(|e| trouble(cause(e)))?;
        let (crc, steady) = (Crc(sum.crc.get()), self.fs.is_memory());
        Ok(OpenPiece { file, offset, len, crc, steady })
    }

    /// Writes a place of the parity file: at most one chunk.
    pub fn write_parity<'a>(
        &self,
        key: Key,
        slot: SlotId,
        index: u64,
        chunk_bytes: u32,
        what: impl Into<Summed<'a>>,
    ) -> Result<(), Trouble> {
        let Summed { bytes, crc } = what.into();
        let trouble = trouble(slot);
        let malformed = || trouble(Cause::Malformed);
        let (at, sum_at) = offsets(index, chunk_bytes).ok_or_else(malformed)?;
        let len = u32::try_from(bytes.len()).ok().filter(|l| *l <= chunk_bytes);
        let len = len.ok_or_else(malformed)?;
        let before = self.usage().admit_parity(key, slot, index, len);
        let before = before.map_err(|_| trouble(Cause::NoSpace))?;
        let written = self.put_parity(key, slot, (at, bytes), (sum_at, Sum::new(index, len, crc)));
        if written.is_err() {
            // Given back; shrinking always succeeds.
            let _ = self.usage().admit_parity(key, slot, index, before);
        }
        written.map_err(|e| trouble(cause(e)))
    }

    fn put_parity(
        &self,
        key: Key,
        slot: SlotId,
        (at, bytes): (u64, &[u8]),
        (sum_at, sum): (u64, Sum),
    ) -> fs::Result<()> {
        fs::make_dirs(&*self.fs, &slot_dir(key, slot), 0o700)?;
        let (data, sums) = files(key, slot);
        let data = self.fs.open(&data, How::Create(0o600))?;
        fs::write_all(&*data, bytes, at)?;
        let sums = self.fs.open(&sums, How::Create(0o600))?;
        fs::write_all(&*sums, sum.as_bytes(), sum_at)
    }
}
