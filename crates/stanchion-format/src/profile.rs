//! How one process wrote its files: the record that `libstanchion_profile.so` keeps of it.
//!
//! One file for each process, of fixed size, mapped shared: what is counted is in the file at once, also
//! when the process is killed in the next moment. Every number is a u64 in the machine's order, little
//! endian on all that Stanchion runs on, and only ever stored whole; they are not a consistent picture of
//! one moment while the process runs. Nothing seals it: it outlives a process, not a crash of the machine.

use std::io::Read;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// First bytes of such a file.
pub const MAGIC: u64 = u64::from_le_bytes(*b"STNPROF1");
/// Version of the layout.
pub const VERSION: u64 = 1;
/// Where records are made. Without it the library does nothing.
pub const DIR_VARIABLE: &str = "STANCHION_PROFILE_DIR";
/// Milliseconds without a write after which a new burst begins.
pub const GAP_VARIABLE: &str = "STANCHION_PROFILE_GAP_MS";
/// Where the library is, if not beside the command.
pub const LIBRARY_VARIABLE: &str = "STANCHION_PROFILE_LIB";
/// How the names of records end.
pub const SUFFIX: &str = ".prof";
/// The library's file name.
pub const LIBRARY: &str = "libstanchion_profile.so";
/// The gap if nobody says another, milliseconds.
pub const GAP_MS: u64 = 1000;

/// Classes of sizes; class i has the writes of more than `CLASS_ENDS[i - 1]` and at most `CLASS_ENDS[i]`
/// bytes, the last one all that are larger. The classes of the paper on write aggregation.
pub const CLASSES: usize = 11;
/// Largest size of each class but the last, bytes.
pub const CLASS_ENDS: [u64; CLASSES - 1] =
    [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20];
/// Bursts that are told apart; what comes later is added to the last one.
pub const BURSTS: usize = 512;
/// Files that are told apart, and row 0 for all others.
pub const FILES: usize = 512;
/// Longest path, bytes; of a longer one the end is kept.
pub const PATH_BYTES: usize = 232;
/// Longest name of a host or program, bytes.
pub const NAME_BYTES: usize = 128;
/// No rank.
pub const NO_RANK: u64 = u64::MAX;
/// Of the word `Head::clock` so many bits are the time in microseconds, those above it the burst.
pub const CLOCK_BITS: u32 = 54;

/// The class of a write of so many bytes.
pub fn class_of(bytes: u64) -> usize {
    CLASS_ENDS.iter().position(|end| bytes <= *end).unwrap_or(CLASSES - 1)
}

/// Who asked for a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    /// The program called write, pwrite, writev or pwritev: one system call.
    System = 0,
    /// The program called fwrite, fputs or fprintf: the C library gathers these before it makes a system call.
    Stdio = 1,
}

/// What is known of the process itself.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Copy, Debug)]
#[repr(C)]
pub struct Head {
    /// [`MAGIC`], written when the rest of the head stands.
    pub magic: u64,
    /// [`VERSION`].
    pub version: u64,
    /// Size of the file.
    pub bytes: u64,
    /// The process.
    pub pid: u64,
    /// Its parent when the record began.
    pub ppid: u64,
    /// The rank, as the launcher's environment has it, or [`NO_RANK`].
    pub rank: u64,
    /// Number of ranks, or 0.
    pub ranks: u64,
    /// Nanoseconds without a write after which a new burst begins.
    pub gap_ns: u64,
    /// When the record began: CLOCK_MONOTONIC, as all times below.
    pub began_ns: u64,
    /// The same moment since 1970.
    pub began_unix_ns: u64,
    /// The present burst (from 1; 0: nothing written yet) above [`CLOCK_BITS`] bits of microseconds since
    /// `began_ns`: the end of the last write.
    pub clock: u64,
    /// Writes that failed.
    pub failed: u64,
    /// Writes to descriptors of a number beyond what is followed.
    pub untracked: u64,
    /// Writable shared mappings of files.
    pub maps: u64,
    /// Their bytes.
    pub map_bytes: u64,
    /// Files renamed.
    pub renames: u64,
    /// Name of the host, up to the first zero.
    pub host: [u8; NAME_BYTES],
    /// The executable, up to the first zero.
    pub program: [u8; NAME_BYTES],
}

/// Writes of one class.
#[derive(
    FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Copy, Debug, Default, PartialEq, Eq,
)]
#[repr(C)]
pub struct Cell {
    /// How many.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Nanoseconds in them.
    pub ns: u64,
}

/// Writes with no pause as long as the gap between them.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Copy, Debug)]
#[repr(C)]
pub struct Burst {
    /// When its first write began.
    pub begin_ns: u64,
    /// When its last write, fsync or close ended.
    pub end_ns: u64,
    /// Writes.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Nanoseconds in them, summed over threads.
    pub ns: u64,
    /// Nanoseconds in fsync, fflush and close.
    pub sync_ns: u64,
}

/// One file; row 0 stands for all that have no row.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Copy, Debug)]
#[repr(C)]
pub struct FileRow {
    /// Of its path; 0: the row is free.
    pub hash: u64,
    /// Times it was opened for writing.
    pub opens: u64,
    /// Writes.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Nanoseconds in them.
    pub ns: u64,
    /// Calls of fsync and fdatasync.
    pub syncs: u64,
    /// Nanoseconds in these.
    pub sync_ns: u64,
    /// Nanoseconds in fflush, close and fclose.
    pub close_ns: u64,
    /// Writes that did not begin where the one before on the same descriptor ended.
    pub jumps: u64,
    /// When the first write began; 0: none.
    pub first_ns: u64,
    /// When the last write ended.
    pub last_ns: u64,
    /// Its path, up to the first zero.
    pub path: [u8; PATH_BYTES],
}

/// A process.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Clone, Debug)]
#[repr(C)]
pub struct Record {
    /// Who it is.
    pub head: Head,
    /// By [`Kind`] and class.
    pub classes: [[Cell; CLASSES]; 2],
    /// Its bursts; number n is at n - 1.
    pub bursts: [Burst; BURSTS],
    /// Its files.
    pub files: [FileRow; FILES],
}

/// Size of a record.
pub const RECORD_BYTES: usize = size_of::<Record>();

/// Why a file is no record.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// It cannot be read, or is too short.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// Not such a file, or its process had only begun it.
    #[error("is not a record of a process, or not finished")]
    Magic,
    /// Of another version or size.
    #[error("has version {0}, this program knows {VERSION}")]
    Version(u64),
    /// There is no memory for it.
    #[error("is too large for the memory left")]
    Memory,
}

impl Record {
    /// Reads one.
    pub fn read(from: &mut impl Read) -> Result<Box<Record>, ProfileError> {
        let mut record = Record::new_box_zeroed().map_err(|_| ProfileError::Memory)?;
        from.read_exact(record.as_mut_bytes())?;
        if record.head.magic != MAGIC {
            return Err(ProfileError::Magic);
        }
        if record.head.version != VERSION || record.head.bytes != RECORD_BYTES as u64 {
            return Err(ProfileError::Version(record.head.version));
        }
        Ok(record)
    }
}

/// A text in a field: up to the first zero, what is no UTF-8 replaced.
pub fn text(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_into_the_papers_classes() {
        for (bytes, class) in [
            (0, 0),
            (64, 0),
            (65, 1),
            (4096, 3),
            (4097, 4),
            (1 << 20, 8),
            (4 << 20, 9),
            ((4 << 20) + 1, 10),
            (u64::MAX, 10),
        ] {
            assert_eq!(class_of(bytes), class, "{bytes}");
        }
    }

    #[test]
    fn the_layout_is_that_of_the_documentation() {
        assert_eq!(std::mem::offset_of!(Record, classes), 384);
        assert_eq!(std::mem::offset_of!(Record, bursts), 912);
        assert_eq!(std::mem::offset_of!(Record, files), 25_488);
        assert_eq!(size_of::<FileRow>(), 320);
        assert_eq!(RECORD_BYTES, 189_328);
        const { assert!(BURSTS < 1 << (64 - CLOCK_BITS)) };
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let mut good = Record::new_box_zeroed().expect("memory");
        good.head.magic = MAGIC;
        good.head.version = VERSION;
        good.head.bytes = RECORD_BYTES as u64;
        good.head.host[..3].copy_from_slice(b"n\xff0");
        let bytes = good.as_bytes().to_vec();
        let read = Record::read(&mut &bytes[..]).expect("a record");
        assert_eq!(text(&read.head.host), "n\u{fffd}0");
        assert!(matches!(Record::read(&mut &bytes[..1000]), Err(ProfileError::Io(_))));
        for (at, name) in [(0, "finished"), (8, "version"), (16, "version")] {
            let mut bent = bytes.clone();
            bent[at] ^= 64;
            let error = Record::read(&mut &bent[..]).expect_err("refused").to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
