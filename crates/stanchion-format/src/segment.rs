//! Segment files of an agent's store: how chunks lie in them. See docs/format.md, "Segments".
//!
//! A segment is written from front to back, then its file is taken for a new life. Every block of ours in
//! it names the store, the life and its own place, so that what an earlier life left is never taken for
//! something of this one (FM-T3).

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::{Crc, crc64};
use crate::ids::{DatasetNo, Epoch, Incarnation, Key, RankId, SlotId};
use crate::limits;

/// Everything in a segment begins at a multiple of this, which direct I/O asks for.
pub const BLOCK: usize = 4096;
/// Bytes of a block's own head.
const HEAD_BYTES: usize = size_of::<RawHead>();
/// Bytes of an entry in a table.
pub const ENTRY_BYTES: usize = size_of::<RawEntry>();
/// Chunks of one group: what the table in its block can name.
pub const GROUP_ENTRIES_MAX: usize = (BLOCK - HEAD_BYTES) / ENTRY_BYTES;
/// Smallest segment, bytes.
pub const SEGMENT_BYTES_MIN: u64 = 64 << 10;
/// Largest segment, bytes.
pub const SEGMENT_BYTES_MAX: u64 = 16 << 30;
/// Entries of a segment: each has a block at least.
pub const ENTRIES_MAX: u64 = SEGMENT_BYTES_MAX / BLOCK as u64;

const VERSION: u32 = 1;

/// What a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Of which dataset.
    pub key: Key,
    /// Of which slot.
    pub slot: SlotId,
    /// Whose.
    pub rank: RankId,
    /// Of which of the rank's files or regions.
    pub file: u32,
    /// Where in that.
    pub offset: u64,
}

/// A chunk in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub tag: Tag,
    /// Where in the segment; a multiple of [`BLOCK`].
    pub at: u64,
    /// Its length; not 0.
    pub len: u32,
    /// Its checksum.
    pub crc: Crc,
}

impl Entry {
    /// Where the next chunk may begin.
    pub fn end(&self) -> u64 {
        self.at + padded(u64::from(self.len))
    }
}

/// Which life of which file: no two are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Life {
    /// A random number of the store that wrote it.
    pub store: u64,
    /// The segment's number, which is in its name.
    pub segment: u32,
    /// Grows with each life of any segment of the directory.
    pub life: u64,
}

/// The last block of a sealed segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Where the table of all its chunks begins.
    pub at: u64,
    /// How many there are.
    pub entries: u32,
    /// The table's checksum.
    pub crc: Crc,
}

/// First letters of the blocks.
const HEADER: u64 = u64::from_le_bytes(*b"STNSEGH1");
const GROUP: u64 = u64::from_le_bytes(*b"STNSEGG1");
const TRAILER: u64 = u64::from_le_bytes(*b"STNSEGT1");

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHead {
    magic: U64,
    version: U32,
    segment: U32,
    store: U64,
    life: U64,
    at: U64,
    entries: U32,
    reserved: U32,
    table_crc: U64,
    own_crc: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawEntry {
    no: U64,
    epoch: U64,
    count: U32,
    slot: U32,
    rank: U32,
    file: U32,
    offset: U64,
    at: U64,
    len: U32,
    reserved: U32,
    crc: U64,
}

const _: () = assert!(HEAD_BYTES == 64 && ENTRY_BYTES == 64 && GROUP_ENTRIES_MAX == 63);

/// `bytes` up to the next multiple of [`BLOCK`].
pub fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK as u64)
}

/// What the table of a segment with so many chunks takes.
pub fn table_bytes(entries: u64) -> u64 {
    padded(entries * ENTRY_BYTES as u64)
}

impl RawHead {
    fn new(magic: u64, life: Life, at: u64, entries: u32, table_crc: Crc) -> RawHead {
        let mut head = RawHead {
            magic: magic.into(),
            version: VERSION.into(),
            segment: life.segment.into(),
            store: life.store.into(),
            life: life.life.into(),
            at: at.into(),
            entries: entries.into(),
            reserved: 0.into(),
            table_crc: table_crc.0.into(),
            own_crc: 0.into(),
        };
        head.own_crc = crc64(&head.as_bytes()[..HEAD_BYTES - 8]).0.into();
        head
    }

    fn read(magic: u64, block: &[u8]) -> Option<RawHead> {
        let (head, _) = RawHead::read_from_prefix(block).ok()?;
        let own = crc64(&head.as_bytes()[..HEAD_BYTES - 8]);
        let fits = head.magic.get() == magic
            && head.version.get() == VERSION
            && head.reserved.get() == 0
            && own == Crc(head.own_crc.get());
        fits.then_some(head)
    }

    fn life(&self) -> Life {
        Life { store: self.store.get(), segment: self.segment.get(), life: self.life.get() }
    }
}

impl RawEntry {
    fn new(entry: &Entry) -> RawEntry {
        let tag = &entry.tag;
        RawEntry {
            no: tag.key.no.0.into(),
            epoch: tag.key.inc.epoch.0.into(),
            count: tag.key.inc.count.into(),
            slot: tag.slot.0.into(),
            rank: tag.rank.0.into(),
            file: tag.file.into(),
            offset: tag.offset.into(),
            at: entry.at.into(),
            len: entry.len.into(),
            reserved: 0.into(),
            crc: entry.crc.0.into(),
        }
    }

    /// `bytes`: of the segment.
    fn entry(&self, bytes: u64) -> Option<Entry> {
        let inc = Incarnation { epoch: Epoch(self.epoch.get()), count: self.count.get() };
        let tag = Tag {
            key: Key { no: DatasetNo(self.no.get()), inc },
            slot: SlotId(self.slot.get()),
            rank: RankId(self.rank.get()),
            file: self.file.get(),
            offset: self.offset.get(),
        };
        let (at, len) = (self.at.get(), self.len.get());
        let fits = (1..=limits::CHUNK_BYTES_MAX).contains(&len)
            && at.is_multiple_of(BLOCK as u64)
            && at >= 2 * BLOCK as u64
            && at < bytes
            && padded(len.into()) <= bytes - at
            && self.reserved.get() == 0;
        fits.then_some(Entry { tag, at, len, crc: Crc(self.crc.get()) })
    }
}

/// Fills the first block of a segment of `bytes`.
pub fn put_header(block: &mut [u8; BLOCK], life: Life, bytes: u64) {
    block.fill(0);
    let head = RawHead::new(HEADER, life, bytes, 0, Crc(0));
    block[..HEAD_BYTES].copy_from_slice(head.as_bytes());
}

/// Reads the first block of a segment: whose it is, and its size.
pub fn header(block: &[u8]) -> Option<(Life, u64)> {
    let head = RawHead::read(HEADER, block)?;
    let bytes = head.at.get();
    let fits = (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes)
        && bytes.is_multiple_of(BLOCK as u64);
    fits.then_some((head.life(), bytes))
}

/// Fills the block at `at` that stands before a group of chunks.
///
/// # Panics
/// With more than [`GROUP_ENTRIES_MAX`] of them.
pub fn put_group(block: &mut [u8; BLOCK], life: Life, at: u64, entries: &[Entry]) {
    assert!(entries.len() <= GROUP_ENTRIES_MAX, "{} chunks in a group", entries.len());
    block.fill(0);
    let table = &mut block[HEAD_BYTES..HEAD_BYTES + entries.len() * ENTRY_BYTES];
    put_entries(table, entries);
    let head = RawHead::new(GROUP, life, at, entries.len() as u32, crc64(table));
    block[..HEAD_BYTES].copy_from_slice(head.as_bytes());
}

/// Reads the block at `at` of a segment of `bytes`: the chunks that follow it, one behind the other.
/// `None` if it is not such a block, or of another life.
pub fn group(block: &[u8], life: Life, at: u64, bytes: u64) -> Option<Vec<Entry>> {
    let head = RawHead::read(GROUP, block)?;
    let count = head.entries.get() as usize;
    if head.life() != life || head.at.get() != at || count == 0 || count > GROUP_ENTRIES_MAX {
        return None;
    }
    let table = block.get(HEAD_BYTES..HEAD_BYTES + count * ENTRY_BYTES)?;
    let entries = entries(table, Crc(head.table_crc.get()), bytes)?;
    let mut next = at.checked_add(BLOCK as u64)?;
    for entry in &entries {
        if entry.at != next {
            return None;
        }
        next = entry.end();
    }
    Some(entries)
}

/// Fills the last block of a sealed segment, whose table is `table`.
pub fn put_trailer(block: &mut [u8; BLOCK], life: Life, trailer: Trailer) {
    block.fill(0);
    let Trailer { at, entries, crc } = trailer;
    let head = RawHead::new(TRAILER, life, at, entries, crc);
    block[..HEAD_BYTES].copy_from_slice(head.as_bytes());
}

/// Reads the last block of a segment of `bytes`; `None` if this life was not sealed.
pub fn trailer(block: &[u8], life: Life, bytes: u64) -> Option<Trailer> {
    let head = RawHead::read(TRAILER, block)?;
    let entries = head.entries.get();
    let at = bytes.checked_sub(BLOCK as u64)?.checked_sub(table_bytes(entries.into()))?;
    let fits = head.life() == life && head.at.get() == at && at >= BLOCK as u64;
    fits.then_some(Trailer { at, entries, crc: Crc(head.table_crc.get()) })
}

/// Writes `entries` into a table, which has room for them; what is left of it becomes 0.
pub fn put_entries(table: &mut [u8], entries: &[Entry]) {
    let used = entries.len() * ENTRY_BYTES;
    for (place, entry) in table[..used].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
        place.copy_from_slice(RawEntry::new(entry).as_bytes());
    }
    table[used..].fill(0);
}

/// Reads a table without what may follow it. `None` if the checksum or anything in it does not fit a segment
/// of `bytes`.
pub fn entries(table: &[u8], crc: Crc, bytes: u64) -> Option<Vec<Entry>> {
    if !table.len().is_multiple_of(ENTRY_BYTES) || crc64(table) != crc {
        return None;
    }
    table
        .chunks_exact(ENTRY_BYTES)
        .map(|raw| RawEntry::read_from_bytes(raw).ok()?.entry(bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Life = Life { store: 5, segment: 7, life: 9 };
    const BYTES: u64 = 1 << 20;

    fn chunks(at: u64, lens: &[u32]) -> Vec<Entry> {
        let mut at = at;
        let place = |len: &u32| {
            let inc = Incarnation { epoch: Epoch(3), count: 2 };
            let key = Key { no: DatasetNo(12), inc };
            let offset = at * 3;
            let tag = Tag { key, slot: SlotId(4), rank: RankId(17), file: 1, offset };
            let entry = Entry { tag, at, len: *len, crc: Crc(at ^ 99) };
            at = entry.end();
            entry
        };
        lens.iter().map(place).collect()
    }

    #[test]
    fn blocks_come_back_as_they_were() {
        let mut block = [1; BLOCK];
        put_header(&mut block, LIFE, BYTES);
        assert_eq!(header(&block), Some((LIFE, BYTES)));
        let entries = chunks(12_288, &[1, 4096, 5000]);
        put_group(&mut block, LIFE, 8192, &entries);
        assert_eq!(group(&block, LIFE, 8192, BYTES), Some(entries));
        let at = BYTES - 2 * BLOCK as u64;
        let sealed = Trailer { at, entries: 3, crc: Crc(8) };
        put_trailer(&mut block, LIFE, sealed);
        assert_eq!(trailer(&block, LIFE, BYTES), Some(sealed));
    }

    #[test]
    fn a_block_counts_in_its_life_and_place_only() {
        // FM-T3
        let mut block = [0; BLOCK];
        let entries = chunks(12_288, &[4096]);
        put_group(&mut block, LIFE, 8192, &entries);
        for other in
            [Life { store: 6, ..LIFE }, Life { segment: 8, ..LIFE }, Life { life: 10, ..LIFE }]
        {
            assert_eq!(group(&block, other, 8192, BYTES), None);
        }
        assert_eq!(group(&block, LIFE, 4096, BYTES), None);
        assert_eq!(group(&block, LIFE, 8192, 12_288), None, "beyond the end");
        assert_eq!(header(&block), None);
        assert_eq!(trailer(&block, LIFE, BYTES), None);
    }

    #[test]
    fn no_flipped_bit_passes() {
        let mut block = [0; BLOCK];
        let entries = chunks(12_288, &[4096, 77]);
        put_group(&mut block, LIFE, 8192, &entries);
        for bit in 0..(HEAD_BYTES + 2 * ENTRY_BYTES) * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(group(&block, LIFE, 8192, BYTES), None, "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(group(&block, LIFE, 8192, BYTES).is_some());
    }
}
