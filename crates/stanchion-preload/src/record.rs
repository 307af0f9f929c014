//! This process's record: when it is made, where, and adding to it.

use crate::{fds, ffi};
use core::ffi::CStr;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::time::{ClockId, clock_gettime};
use stanchion_format::profile::{
    CLOCK_BITS, DIR_VARIABLE, GAP_MS, GAP_VARIABLE, Head, MAGIC, NAME_BYTES, NO_RANK, RECORD_BYTES,
    Record, VERSION,
};
use std::sync::OnceLock;

/// Longest name of a record with its directory, bytes.
const NAME_MAX: usize = 1024;
/// Records that one host may have of one process number; a process that execs begins another.
const SAME_PID_MAX: u64 = 100_000;
/// What a variable of the launcher may hold.
const NUMBER_MAX: usize = 24;

/// States of [`Page`]; others are `tid << 2 | MAKING`.
const NOBODY: u64 = 0;
const MAKING: u64 = 1;
const READY: u64 = 2;
const OFF: u64 = 3;

/// A page that the kernel wipes in a child of fork, so that it reads [`NOBODY`] there, however the child
/// was made. A child of vfork shares it: it counts into its parent's record.
#[repr(C)]
struct Page {
    state: AtomicU64,
}

static PAGE: AtomicPtr<Page> = AtomicPtr::new(null_mut());
/// Where records are mapped in this process and its children, one over the other.
static PLACE: AtomicPtr<Record> = AtomicPtr::new(null_mut());
static GIVEN: OnceLock<Given> = OnceLock::new();

/// What the environment said when the program began.
struct Given {
    dir: [u8; NAME_MAX],
    dir_len: usize,
    rank: u64,
    ranks: u64,
    gap_ns: u64,
}

/// The record of this process; a place in memory that stays mapped.
#[derive(Clone, Copy)]
pub struct Rec(*mut Record);

/// Adds to a counter.
///
/// # Safety
/// `counter` is in a mapped record.
unsafe fn add_to(counter: *mut u64, n: u64) {
    // SAFETY: aligned, as fields of Record are, and mapped, as the caller has it; everybody who uses it
    // while the process lives does so as an atomic.
    unsafe { AtomicU64::from_ptr(counter) }.fetch_add(n, Ordering::Relaxed);
}

/// Projects a [`Rec`] to the atomic behind one of its fields.
macro_rules! field {
    ($rec:expr, $($path:tt)+) => {{
        let record: *mut stanchion_format::profile::Record = $rec.place();
        // SAFETY: PLACE is mapped, readable and writable, from the moment a Rec exists to the end of the
        // process; the field is an aligned u64 and is used as an atomic only.
        unsafe { core::sync::atomic::AtomicU64::from_ptr(&raw mut (*record)$($path)+) }
    }};
}
pub(crate) use field;

impl Rec {
    /// Its address.
    pub fn place(self) -> *mut Record {
        self.0
    }

    /// Adds to a counter of the record that `of` picks.
    #[inline]
    pub fn add(self, of: impl FnOnce(*mut Record) -> *mut u64, n: u64) {
        // SAFETY: `of` only projects to a field of the record, which stays mapped.
        unsafe { add_to(of(self.0), n) }
    }
}

/// Nanoseconds of the clock that only goes forward.
#[inline]
pub fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

/// Is anything to be counted in this process?
#[inline]
pub fn on() -> bool {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return false;
    }
    // SAFETY: what PAGE points to is mapped for ever.
    unsafe { &*page }.state.load(Ordering::Relaxed) != OFF
}

/// The record of this process, made if there is none yet; `None` if there cannot be one.
#[inline]
pub fn here() -> Option<Rec> {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return None;
    }
    // SAFETY: what PAGE points to is mapped for ever.
    let page = unsafe { &*page };
    match page.state.load(Ordering::Acquire) {
        READY => Some(Rec(PLACE.load(Ordering::Relaxed))),
        OFF => None,
        _ => make_once(page),
    }
}

/// The record of this process, if it has one.
#[inline]
pub fn present() -> Option<Rec> {
    let page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        return None;
    }
    // SAFETY: what PAGE points to is mapped for ever.
    let ready = unsafe { &*page }.state.load(Ordering::Acquire) == READY;
    ready.then(|| Rec(PLACE.load(Ordering::Relaxed)))
}

/// Does this process share memory with another, whose record is mapped? A child of vfork does.
pub fn is_guest() -> bool {
    present().is_some_and(|rec| field!(rec, .head.pid).load(Ordering::Relaxed) != pid_now())
}

fn pid_now() -> u64 {
    rustix::process::getpid().as_raw_nonzero().get() as u64
}

#[cold]
fn make_once(page: &Page) -> Option<Rec> {
    let me = (rustix::thread::gettid().as_raw_nonzero().get() as u64) << 2 | MAKING;
    loop {
        match page.state.compare_exchange(NOBODY, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let made = make();
                page.state.store(if made { READY } else { OFF }, Ordering::Release);
            }
            Err(READY) => return Some(Rec(PLACE.load(Ordering::Relaxed))),
            // In a signal handler that interrupted the making: this one write is lost.
            Err(OFF) => return None,
            Err(other) if other == me => return None,
            Err(_) => rustix::thread::sched_yield(),
        }
    }
}

/// Makes the file and maps it; false if that does not work.
fn make() -> bool {
    let Some(given) = GIVEN.get() else { return false };
    let place = PLACE.load(Ordering::Relaxed);
    if place.is_null() {
        return false;
    }
    // A file larger than the user's limit would be a signal.
    if rustix::process::getrlimit(rustix::process::Resource::Fsize)
        .current
        .is_some_and(|limit| limit < RECORD_BYTES as u64)
    {
        return false;
    }
    let Some(file) = create(given) else { return false };
    // Blocks for all of it: a page that finds no space when it is first written would be a signal, too.
    let length = RECORD_BYTES as u64;
    let filled = match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => fill(&file),
        other => other.is_ok(),
    };
    if !filled {
        return false;
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: PLACE is RECORD_BYTES of address space that `start` reserved for this and nothing else. In a
    // child of fork it replaces the mapping of the parent's record, which nobody here uses: the state is
    // MAKING, and what was begun before the fork was begun by threads that the child does not have.
    let mapped =
        unsafe { rustix::mm::mmap(place.cast(), RECORD_BYTES, protection, flags, &file, 0) };
    if mapped.is_err() {
        return false;
    }
    fds::forget_files();
    write_head(place, given);
    true
}

/// Writes zeros over the length of a record.
fn fill(file: &rustix::fd::OwnedFd) -> bool {
    let zeros = [0u8; 4096];
    let mut left = RECORD_BYTES;
    while left > 0 {
        let part = zeros.get(..left.min(zeros.len())).unwrap_or(&zeros);
        match rustix::io::write(file, part) {
            Ok(n) if n > 0 => left = left.saturating_sub(n),
            Err(rustix::io::Errno::INTR) => {}
            _ => return false,
        }
    }
    true
}

fn write_head(place: *mut Record, given: &Given) {
    let mut host = [0; NAME_BYTES];
    put(&mut host, rustix::system::uname().nodename().to_bytes());
    let mut program = [0; NAME_BYTES - 1];
    let length = rustix::fs::readlinkat_raw(CWD, c"/proc/self/exe", &mut program[..]).unwrap_or(0);
    let mut whole = [0; NAME_BYTES];
    put(&mut whole, program.get(..length).unwrap_or_default());
    let head = Head {
        magic: 0,
        version: VERSION,
        bytes: RECORD_BYTES as u64,
        pid: pid_now(),
        ppid: rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get() as u64),
        rank: given.rank,
        ranks: given.ranks,
        gap_ns: given.gap_ns,
        began_ns: now(),
        began_unix_ns: nanoseconds(ClockId::Realtime),
        clock: 0,
        failed: 0,
        untracked: 0,
        maps: 0,
        map_bytes: 0,
        renames: 0,
        host,
        program: whole,
    };
    // SAFETY: mapped and writable since a moment ago; the state is MAKING, so nobody else uses it yet.
    unsafe { (&raw mut (*place).head).write(head) };
    field!(Rec(place), .head.magic).store(MAGIC, Ordering::Release);
}

/// Copies as much as fits and leaves a zero behind it.
fn put(into: &mut [u8], from: &[u8]) {
    let length = from.len().min(into.len().saturating_sub(1));
    if let (Some(into), Some(from)) = (into.get_mut(..length), from.get(..length)) {
        into.copy_from_slice(from);
    }
}

/// A text that is put together without memory of the heap.
pub struct Text<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Text<N> {
    /// An empty one.
    pub fn new() -> Text<N> {
        Text { bytes: [0; N], used: 0 }
    }

    /// Adds bytes; those that leave no room for the zero at the end are lost.
    pub fn push(&mut self, bytes: &[u8]) {
        for b in bytes {
            if self.used.saturating_add(1) < N
                && let Some(at) = self.bytes.get_mut(self.used)
            {
                *at = *b;
                self.used = self.used.saturating_add(1);
            }
        }
    }

    /// Adds a number.
    pub fn number(&mut self, mut n: u64) {
        let mut digits = [0u8; 20];
        let mut used = 0;
        for digit in digits.iter_mut().rev() {
            *digit = b'0'.wrapping_add((n % 10) as u8);
            n /= 10;
            used += 1;
            if n == 0 {
                break;
            }
        }
        let from = digits.len().saturating_sub(used);
        self.push(digits.get(from..).unwrap_or_default());
    }

    /// Cuts it to an earlier length.
    fn cut(&mut self, length: usize) {
        if let Some(rest) = self.bytes.get_mut(length..self.used) {
            rest.fill(0);
            self.used = length;
        }
    }

    /// With the zero behind it.
    pub fn c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}

/// `DIR/HOST-PID-N.prof` with the first N that is free.
fn create(given: &Given) -> Option<rustix::fd::OwnedFd> {
    let mut name = Text::<NAME_MAX>::new();
    name.push(given.dir.get(..given.dir_len)?);
    name.push(b"/");
    for b in rustix::system::uname().nodename().to_bytes() {
        name.push(&[if *b == b'/' { b'_' } else { *b }]);
    }
    name.push(b"-");
    name.number(pid_now());
    name.push(b"-");
    let before = name.used;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    for n in 0..SAME_PID_MAX {
        name.cut(before);
        name.number(n);
        name.push(stanchion_format::profile::SUFFIX.as_bytes());
        match rustix::fs::openat(CWD, name.c_str(), flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Some(file),
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    None
}

/// The variables by which launchers tell ranks who they are, in the order of precedence that the client
/// library has (stanchion-client, identity.rs).
const FAMILIES: &[(&CStr, &[&CStr])] = &[
    (c"STANCHION_RANK", &[c"STANCHION_SIZE"]),
    (c"PMI_RANK", &[c"PMI_SIZE"]),
    (c"OMPI_COMM_WORLD_RANK", &[c"OMPI_COMM_WORLD_SIZE"]),
    (c"PMIX_RANK", &[c"OMPI_COMM_WORLD_SIZE", c"SLURM_STEP_NUM_TASKS", c"SLURM_NTASKS"]),
    (c"SLURM_PROCID", &[c"SLURM_STEP_NUM_TASKS", c"SLURM_NTASKS"]),
    (c"RANK", &[c"WORLD_SIZE"]),
];

fn number(name: &CStr) -> Option<u64> {
    let mut value = [0u8; NUMBER_MAX];
    let length = ffi::variable(name, &mut value)?;
    core::str::from_utf8(value.get(..length)?).ok()?.trim().parse().ok()
}

fn identity() -> (u64, u64) {
    for (rank, sizes) in FAMILIES {
        if let Some(rank) = number(rank)
            && let Some(size) = sizes.iter().find_map(|n| number(n))
            && rank < size
        {
            return (rank, size);
        }
    }
    (NO_RANK, 0)
}

/// A variable's name with its zero; names are short.
fn name_of(name: &str) -> Text<64> {
    let mut text = Text::new();
    text.push(name.as_bytes());
    text
}

/// Reads the environment, looks the real functions up and reserves the record's place. Runs once, before
/// the program's own code.
extern "C" fn start() {
    ffi::look_all_up();
    let mut dir = [0u8; NAME_MAX];
    let Some(dir_len) = ffi::variable(name_of(DIR_VARIABLE).c_str(), &mut dir) else { return };
    // Relative, it would be another directory after the program's chdir.
    if dir.first() != Some(&b'/') {
        return;
    }
    let (rank, ranks) = identity();
    let gap_ms = number(name_of(GAP_VARIABLE).c_str()).unwrap_or(GAP_MS);
    let given = Given { dir, dir_len, rank, ranks, gap_ns: gap_ms.saturating_mul(1_000_000) };
    if GIVEN.set(given).is_err() {
        return;
    }
    // SAFETY: address space of its own that nobody may touch yet.
    let place = unsafe {
        rustix::mm::mmap_anonymous(
            null_mut(),
            RECORD_BYTES,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a page of its own, wanted anywhere.
    let page = unsafe { rustix::mm::mmap_anonymous(null_mut(), 4096, flags, MapFlags::PRIVATE) };
    let (Ok(place), Ok(page)) = (place, page) else { return };
    // Before Linux 4.14 there is none: then a child counts into its parent's record.
    // SAFETY: the page mapped above, which holds nothing yet.
    let _no_separate_children = unsafe { rustix::mm::madvise(page, 4096, Advice::LinuxWipeOnFork) };
    // The clock finds its place in the kernel's page the first time.
    now();
    PLACE.store(place.cast(), Ordering::Relaxed);
    PAGE.store(page.cast(), Ordering::Release);
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// Splits the word [`Head::clock`] into burst and microseconds.
pub fn split_clock(word: u64) -> (u64, u64) {
    (word >> CLOCK_BITS, word & ((1 << CLOCK_BITS) - 1))
}

/// The other way.
pub fn join_clock(burst: u64, micros: u64) -> u64 {
    burst << CLOCK_BITS | (micros & ((1 << CLOCK_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_without_a_heap() {
        let mut text = Text::<12>::new();
        text.push(b"a-");
        text.number(0);
        text.push(b"-");
        text.number(90_210);
        assert_eq!(text.c_str(), c"a-0-90210");
        text.cut(2);
        text.number(u64::MAX);
        assert_eq!(text.c_str(), c"a-184467440", "what does not fit is cut, the zero stays");
    }

    #[test]
    fn nothing_is_counted_without_a_directory() {
        // The test binary has no START; this is what it would do.
        if std::env::var_os(DIR_VARIABLE).is_none() {
            start();
            assert!(!on() && here().is_none() && present().is_none());
        }
    }

    #[test]
    fn a_clock_word_comes_apart_as_it_was_joined() {
        for (burst, micros) in [(0, 0), (1, 7), (512, (1 << CLOCK_BITS) - 1)] {
            assert_eq!(split_clock(join_clock(burst, micros)), (burst, micros));
        }
    }
}
