//! Which descriptor is which file: found out when it is opened, or when it is first written to.
//!
//! Nothing has to be known of a descriptor before: what another library opened, dup'ed or received is
//! looked at when it is first used. What counts is that none is kept beyond its close.

use crate::record::{self, Rec, field};
use core::ffi::CStr;
use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use rustix::fd::BorrowedFd;
use rustix::fs::{CWD, FileType, OFlags, SeekFrom};
use stanchion_format::profile::{FILES, PATH_BYTES};

/// Descriptors of higher numbers are not followed.
pub const FDS: usize = 65_536;
/// Of longer paths only so much is looked at: this may be a signal handler with a small stack.
const KERNEL_PATH_MAX: usize = 1024;
/// Rows that are tried for a path before it counts among the others.
const PROBES: usize = 32;

/// What is known of a descriptor; otherwise a row of the record, from [`FIRST`], with or without [`APPEND`].
const UNKNOWN: u32 = 0;
/// Not a file that counts.
const IGNORED: u32 = 1;
/// A file that was opened by a call that was seen; its row is not known.
const STALE: u32 = 2;
const FIRST: u32 = 3;
/// Each write goes to the file's end, wherever that is.
const APPEND: u32 = 1 << 31;
/// No write yet.
const NOWHERE: u64 = u64::MAX;

struct Fd {
    state: AtomicU32,
    /// Where the next write goes that names no offset.
    position: AtomicU64,
    /// Where the last write ended.
    end: AtomicU64,
}

static TABLE: [Fd; FDS] = [const {
    Fd { state: AtomicU32::new(UNKNOWN), position: AtomicU64::new(0), end: AtomicU64::new(NOWHERE) }
}; FDS];
/// The highest descriptor that was ever known, and one.
static USED: AtomicU32 = AtomicU32::new(0);

fn at(fd: c_int) -> Option<&'static Fd> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// A descriptor of a file that counts.
#[derive(Clone, Copy)]
pub struct Counted {
    pub rec: Rec,
    pub row: usize,
    fd: &'static Fd,
    append: bool,
}

/// Is this descriptor to be counted? Looks at it if it is not known yet.
#[inline]
pub fn counted(fd: c_int) -> Option<Counted> {
    let entry = at(fd)?;
    let state = entry.state.load(Ordering::Acquire);
    if state == IGNORED || !record::on() {
        return None;
    }
    if state == UNKNOWN {
        return identify(fd, entry, false);
    }
    // In a child of fork, this may begin its own record, whose rows are others.
    let rec = record::here()?;
    match entry.state.load(Ordering::Acquire) {
        state @ (UNKNOWN | STALE) => identify(fd, entry, state == STALE),
        state => of_state(rec, entry, state),
    }
}

/// The same, but only if it is known to count already.
#[inline]
pub fn known(fd: c_int) -> Option<Counted> {
    let entry = at(fd)?;
    match entry.state.load(Ordering::Acquire) {
        UNKNOWN | IGNORED | STALE => None,
        state => of_state(record::present()?, entry, state),
    }
}

/// Is it beyond what is followed?
pub fn is_beyond(fd: c_int) -> bool {
    usize::try_from(fd).is_ok_and(|fd| fd >= FDS)
}

fn of_state(rec: Rec, fd: &'static Fd, state: u32) -> Option<Counted> {
    let row = (state & !APPEND).checked_sub(FIRST)? as usize;
    (row < FILES).then_some(Counted { rec, row, fd, append: state & APPEND != 0 })
}

/// A file was opened, or a stream: forgets what its number was before, and looks at it.
pub fn opened(fd: c_int) {
    if fd < 0 || !record::on() || record::is_guest() {
        return;
    }
    let Some(entry) = at(fd) else { return };
    entry.state.store(UNKNOWN, Ordering::Release);
    if let Some(c) = identify(fd, entry, true) {
        c.rec.add(|r| file(r, c.row, Count::Opens), 1);
    }
}

/// `new` is another number of `old`'s file now.
pub fn copied(old: c_int, new: c_int) {
    if old == new || !record::on() || record::is_guest() {
        return;
    }
    let (Some(from), Some(to)) = (at(old), at(new)) else { return };
    for (from, to) in [(&from.position, &to.position), (&from.end, &to.end)] {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    // Of 0 to 2 only those count that were opened here: unknown must not become "inherited".
    let state = match from.state.load(Ordering::Acquire) {
        UNKNOWN if old > 2 => STALE,
        state => state,
    };
    to.state.store(state, Ordering::Release);
    USED.fetch_max((new as u32).saturating_add(1), Ordering::Relaxed);
}

/// The number is about to be closed, and may be another file's at any moment.
pub fn closing(fd: c_int) {
    let Some(entry) = at(fd) else { return };
    match entry.state.load(Ordering::Relaxed) {
        UNKNOWN => {}
        IGNORED => entry.state.store(UNKNOWN, Ordering::Release),
        // The descriptor of the process that shares its memory with us stays open.
        _ if record::is_guest() => {}
        _ => entry.state.store(UNKNOWN, Ordering::Release),
    }
}

/// A range of numbers is about to be closed.
pub fn closing_range(first: u32, last: u32) {
    let end = USED.load(Ordering::Relaxed).min(last.saturating_add(1));
    for fd in first..end {
        closing(fd as c_int);
    }
}

/// Rows of another record mean nothing in this process's.
pub fn forget_files() {
    let used = USED.load(Ordering::Relaxed) as usize;
    for entry in TABLE.iter().take(used) {
        if !matches!(entry.state.load(Ordering::Relaxed), UNKNOWN | IGNORED) {
            entry.state.store(STALE, Ordering::Relaxed);
        }
    }
}

/// Looks at a descriptor that is not known yet. `opened`: by a call that was seen, so that 0 to 2 count, too.
#[cold]
fn identify(number: c_int, entry: &'static Fd, opened: bool) -> Option<Counted> {
    // SAFETY: the number is the caller's open descriptor, or an error comes of it; it is borrowed for the
    // calls of this function only and never closed.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    // Not open: nothing to remember.
    let stat = rustix::fs::fstat(fd).ok()?;
    let flags = rustix::fs::fcntl_getfl(fd).ok()?;
    USED.fetch_max((number as u32).saturating_add(1), Ordering::Relaxed);
    let mut path = [0u8; KERNEL_PATH_MAX];
    let length = path_of(number, &mut path);
    let path = path.get(..length).unwrap_or_default();
    let counts = FileType::from_raw_mode(stat.st_mode).is_file()
        && flags & OFlags::ACCMODE != OFlags::RDONLY
        && (opened || number > 2)
        && is_for_data(path);
    if !counts {
        entry.state.store(IGNORED, Ordering::Release);
        return None;
    }
    let rec = record::here()?;
    // A child of vfork sees our table, but its descriptors are its own.
    if record::is_guest() {
        return None;
    }
    let row = row_of(rec, path);
    let append = flags.contains(OFlags::APPEND);
    entry
        .position
        .store(rustix::fs::seek(fd, SeekFrom::Current(0)).unwrap_or(0), Ordering::Relaxed);
    entry.end.store(NOWHERE, Ordering::Relaxed);
    let state = (row as u32).wrapping_add(FIRST) | if append { APPEND } else { 0 };
    entry.state.store(state, Ordering::Release);
    of_state(rec, entry, state)
}

fn path_of(fd: c_int, path: &mut [u8]) -> usize {
    let mut name = record::Text::<40>::new();
    name.push(b"/proc/self/fd/");
    name.number(u64::from(fd.unsigned_abs()));
    let name: &CStr = name.c_str();
    rustix::fs::readlinkat_raw(CWD, name, path).unwrap_or(0)
}

/// Files of the kernel and memory that only looks like files are no data.
fn is_for_data(path: &[u8]) -> bool {
    let kernel = [&b"/proc/"[..], b"/sys/", b"/dev/", b"/memfd:"];
    path.starts_with(b"/dev/shm/") || !kernel.iter().any(|k| path.starts_with(k))
}

/// FNV-1a; never 0.
fn hash_of(path: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for b in path {
        hash = (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
    }
    hash | u64::from(hash == 0)
}

/// The row of a path: its own, a free one, or 0 when too many are taken.
fn row_of(rec: Rec, path: &[u8]) -> usize {
    let hash = hash_of(path);
    for probe in 0..PROBES {
        // Row 0 is that of the others.
        let row = (hash.wrapping_add(probe as u64) % (FILES as u64 - 1)) as usize + 1;
        let slot = field!(rec, .files[row].hash);
        match slot.compare_exchange(0, hash, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                write_path(rec, row, path);
                return row;
            }
            Err(other) if other == hash => return row,
            Err(_) => {}
        }
    }
    0
}

fn write_path(rec: Rec, row: usize, path: &[u8]) {
    let mut field = [0u8; PATH_BYTES];
    let room = PATH_BYTES - 1;
    let from = path.get(path.len().saturating_sub(room)..).unwrap_or_default();
    if let Some(into) = field.get_mut(..from.len()) {
        into.copy_from_slice(from);
    }
    // SAFETY: the record stays mapped; the row became this thread's when it put the hash into it, and
    // nobody in this process reads or writes paths but here.
    unsafe { (&raw mut (*rec.place()).files[row].path).write(field) };
}

/// Counters of a file.
#[derive(Clone, Copy)]
pub enum Count {
    Opens,
    Writes,
    Bytes,
    Nanoseconds,
    Syncs,
    SyncNanoseconds,
    CloseNanoseconds,
    Jumps,
}

/// Where a counter of a file is.
#[inline]
pub fn file(record: *mut stanchion_format::profile::Record, row: usize, count: Count) -> *mut u64 {
    let row = if row < FILES { row } else { 0 };
    // SAFETY: inside of the record that stays mapped: the row is below FILES. Only the address is taken.
    unsafe {
        let f = &raw mut (*record).files[row];
        match count {
            Count::Opens => &raw mut (*f).opens,
            Count::Writes => &raw mut (*f).writes,
            Count::Bytes => &raw mut (*f).bytes,
            Count::Nanoseconds => &raw mut (*f).ns,
            Count::Syncs => &raw mut (*f).syncs,
            Count::SyncNanoseconds => &raw mut (*f).sync_ns,
            Count::CloseNanoseconds => &raw mut (*f).close_ns,
            Count::Jumps => &raw mut (*f).jumps,
        }
    }
}

/// Where a write went.
#[derive(Clone, Copy)]
pub enum Place {
    /// To where the descriptor stood, or to the end.
    Next,
    /// To this offset; the descriptor stays where it was.
    At(i64),
}

impl Counted {
    /// Notes a write of `n` bytes; true if it did not begin where the one before had ended.
    #[inline]
    pub fn is_jump(&self, place: Place, n: u64) -> bool {
        let begin = match place {
            Place::Next => self.fd.position.fetch_add(n, Ordering::Relaxed),
            Place::At(offset) => offset as u64,
        };
        let last = self.fd.end.swap(begin.wrapping_add(n), Ordering::Relaxed);
        last != NOWHERE && last != begin && !self.append
    }

    /// The descriptor stands here now.
    pub fn seek(&self, position: i64) {
        if let Ok(position) = u64::try_from(position) {
            self.fd.position.store(position, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_data() {
        for path in [&b"/scratch/x"[..], b"/dev/shm/x", b"/process/x", b"/home/dev/x"] {
            assert!(is_for_data(path));
        }
        for path in [&b"/proc/self/mem"[..], b"/sys/x", b"/dev/null", b"/memfd:x (deleted)"] {
            assert!(!is_for_data(path));
        }
    }

    #[test]
    fn no_path_has_the_hash_of_a_free_row() {
        assert_ne!(hash_of(b""), 0);
        assert_ne!(hash_of(b"/a"), hash_of(b"/b"));
    }
}
