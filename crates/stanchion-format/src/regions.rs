//! A rank's regions of memory as one file of a dataset.
//!
//! ```text
//! 0      header, 32 bytes: magic "STNREGN1", version, count of regions, checksum of header and table
//! 32     table: for each region, by ascending id: id, offset, bytes (24 bytes)
//! ...    zeros up to the next multiple of 4096
//! D      the regions' bytes in the table's order, each at a multiple of 4096, zeros between them
//! ```
//! Little endian. Offsets follow from the sizes: a table that says otherwise is refused, so that a size is
//! the only thing to believe, and the file's length bounds it. The bytes themselves are covered by the
//! dataset's chunk checksums.

use crate::checksum::{Crc, crc64};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of such a file.
pub const MAGIC: [u8; 8] = *b"STNREGN1";
/// Version of the layout.
pub const VERSION: u32 = 1;
/// Size of the header without its table, bytes.
pub const HEADER_BYTES: usize = 32;
/// Regions that one rank may protect.
pub const REGIONS_MAX: usize = 65_536;
/// Every region begins at a multiple of it: a page, for what maps or tracks pages.
pub const ALIGN: u64 = 4096;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    count: U32,
    crc: U64,
    reserved: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct Row {
    id: U64,
    offset: U64,
    bytes: U64,
}

/// One region in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionAt {
    /// The caller's number for it.
    pub id: u64,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many there are.
    pub bytes: u64,
}

/// Why bytes are no table of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionsError {
    /// Not such a file.
    #[error("these bytes are no file of regions")]
    Magic,
    /// Of another version.
    #[error("the file of regions has layout {0}, this program knows {VERSION}")]
    Version(u32),
    /// More regions than allowed.
    #[error("{0} regions; a rank may have {REGIONS_MAX}")]
    TooMany(u64),
    /// Header and table do not fit their checksum, or the table makes no sense.
    #[error("the table of regions is damaged")]
    Damaged,
    /// The file ends before its last region does.
    #[error("the file of regions has {have} bytes, its table speaks of {want}")]
    Short {
        /// By the table.
        want: u64,
        /// Of the file.
        have: u64,
    },
    /// Together larger than a file can be.
    #[error("the regions are larger than a file can be")]
    TooLarge,
}

/// Where regions of these ids and sizes are in the file, in the order of their ids, and the file's length. Ids must
/// ascend.
pub fn layout(regions: &[(u64, u64)]) -> Result<(Vec<RegionAt>, u64), RegionsError> {
    if regions.len() > REGIONS_MAX {
        return Err(RegionsError::TooMany(regions.len() as u64));
    }
    if !regions.windows(2).all(|w| w[0].0 < w[1].0) {
        return Err(RegionsError::Damaged);
    }
    let mut end = (HEADER_BYTES + regions.len() * size_of::<Row>()) as u64;
    let mut out = Vec::with_capacity(regions.len());
    for (id, bytes) in regions {
        let offset = end.checked_next_multiple_of(ALIGN).ok_or(RegionsError::TooLarge)?;
        end = offset.checked_add(*bytes).ok_or(RegionsError::TooLarge)?;
        out.push(RegionAt { id: *id, offset, bytes: *bytes });
    }
    if end > i64::MAX as u64 {
        return Err(RegionsError::TooLarge);
    }
    Ok((out, end))
}

/// Header and table.
pub fn encode(regions: &[RegionAt]) -> Vec<u8> {
    let mut header = Header {
        magic: MAGIC,
        version: VERSION.into(),
        count: (regions.len() as u32).into(),
        crc: 0.into(),
        reserved: 0.into(),
    };
    let mut out = header.as_bytes().to_vec();
    for r in regions {
        let row = Row { id: r.id.into(), offset: r.offset.into(), bytes: r.bytes.into() };
        out.extend_from_slice(row.as_bytes());
    }
    header.crc = crc64(&out).0.into();
    out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    out
}

/// Bytes of header and table, by the header alone.
pub fn table_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, RegionsError> {
    let header = Header::read_from_bytes(header).map_err(|_| RegionsError::Magic)?;
    if header.magic != MAGIC {
        return Err(RegionsError::Magic);
    }
    if header.version.get() != VERSION {
        return Err(RegionsError::Version(header.version.get()));
    }
    let count = header.count.get() as usize;
    if count > REGIONS_MAX {
        return Err(RegionsError::TooMany(count as u64));
    }
    Ok(HEADER_BYTES + count * size_of::<Row>())
}

/// Reads header and table, [`table_bytes`] of them, of a file of `file_bytes`.
pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Vec<RegionAt>, RegionsError> {
    let (head, rows) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(RegionsError::Magic)?;
    if table_bytes(head)? != bytes.len() {
        return Err(RegionsError::Damaged);
    }
    let mut header = Header::read_from_bytes(head).map_err(|_| RegionsError::Magic)?;
    let crc = Crc(header.crc.get());
    header.crc = 0.into();
    let mut covered = header.as_bytes().to_vec();
    covered.extend_from_slice(rows);
    if crc64(&covered) != crc || header.reserved.get() != 0 {
        return Err(RegionsError::Damaged);
    }
    let mut found = Vec::with_capacity(header.count.get() as usize);
    for row in rows.chunks_exact(size_of::<Row>()) {
        let row = Row::read_from_bytes(row).map_err(|_| RegionsError::Damaged)?;
        let (id, offset, bytes) = (row.id.get(), row.offset.get(), row.bytes.get());
        found.push(RegionAt { id, offset, bytes });
    }
    let sizes: Vec<(u64, u64)> = found.iter().map(|r| (r.id, r.bytes)).collect();
    let (placed, want) = layout(&sizes)?;
    if placed != found {
        return Err(RegionsError::Damaged);
    }
    if want > file_bytes {
        return Err(RegionsError::Short { want, have: file_bytes });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_laid_out_is_read_again() {
        for sizes in [vec![], vec![(0, 0)], vec![(3, 1), (7, 4096), (u64::MAX, 4097)]] {
            let (placed, end) = layout(&sizes).unwrap();
            assert!(placed.iter().all(|r| r.offset % ALIGN == 0));
            let bytes = encode(&placed);
            assert_eq!(table_bytes(bytes.first_chunk().unwrap()), Ok(bytes.len()));
            assert_eq!(parse(&bytes, end), Ok(placed));
            if end > 0 && !sizes.is_empty() {
                let short = RegionsError::Short { want: end, have: end - 1 };
                assert_eq!(parse(&bytes, end - 1), Err(short));
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(layout(&[(2, 1), (2, 1)]), Err(RegionsError::Damaged));
        assert_eq!(layout(&[(1, u64::MAX - 5000)]), Err(RegionsError::TooLarge));
        assert_eq!(layout(&[(1, u64::MAX), (2, 1)]), Err(RegionsError::TooLarge));
        let many: Vec<(u64, u64)> = (0..=REGIONS_MAX as u64).map(|id| (id, 1)).collect();
        assert_eq!(layout(&many), Err(RegionsError::TooMany(many.len() as u64)));
        let good = encode(&layout(&[(1, 10), (2, 20)]).unwrap().0);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(parse(&bad, u64::MAX).is_err(), "byte {at}");
        }
        assert!(parse(&good[..good.len() - 1], u64::MAX).is_err());
        assert!(parse(b"short", u64::MAX).is_err());
        let mut other = good.clone();
        other[8] = 9;
        assert_eq!(parse(&other, u64::MAX), Err(RegionsError::Version(9)));
        // Offsets of its own, with the right checksum.
        let moved = [RegionAt { id: 1, offset: 8192, bytes: 10 }];
        assert_eq!(parse(&encode(&moved), u64::MAX), Err(RegionsError::Damaged));
    }
}
