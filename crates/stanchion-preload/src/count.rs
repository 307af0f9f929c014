//! Counting one call: before it, whether it counts and the time; after it, what it did.

use crate::fds::{self, Count, Counted, Place};
use crate::record::{Rec, field, join_clock, now, present, split_clock};
use core::ffi::c_int;
use core::sync::atomic::Ordering;
use stanchion_format::profile::{BURSTS, CLASSES, Cell, Kind, Record, class_of};

/// A call under way. It is plain data: nothing happens if it is never ended.
#[derive(Clone, Copy)]
pub struct Call {
    file: Counted,
    begin: u64,
}

/// A write to this descriptor begins; `None` if it does not count.
#[inline]
pub fn begin(fd: c_int) -> Option<Call> {
    match fds::counted(fd) {
        Some(file) => Some(Call { file, begin: now() }),
        None => {
            if fds::is_beyond(fd)
                && let Some(rec) = present()
            {
                field!(rec, .head.untracked).fetch_add(1, Ordering::Relaxed);
            }
            None
        }
    }
}

/// A call other than a write begins; only descriptors that are known already count.
#[inline]
pub fn begin_known(fd: c_int) -> Option<Call> {
    fds::known(fd).map(|file| Call { file, begin: now() })
}

impl Call {
    /// It wrote `n` bytes; below 0: it failed.
    #[inline]
    pub fn wrote(self, n: i64, place: Place, kind: Kind) {
        let end = now();
        let rec = self.file.rec;
        let Ok(bytes) = u64::try_from(n) else {
            field!(rec, .head.failed).fetch_add(1, Ordering::Relaxed);
            return;
        };
        let ns = end.saturating_sub(self.begin);
        let jump = self.file.is_jump(place, bytes);
        let class = class_of(bytes);
        for (counter, n) in [(Part::Count, 1), (Part::Bytes, bytes), (Part::Nanoseconds, ns)] {
            rec.add(|r| cell(r, kind, class, counter), n);
        }
        let row = self.file.row;
        for (counter, n) in [(Count::Writes, 1), (Count::Bytes, bytes), (Count::Nanoseconds, ns)] {
            rec.add(|r| fds::file(r, row, counter), n);
        }
        if jump {
            rec.add(|r| fds::file(r, row, Count::Jumps), 1);
        }
        let first = field!(rec, .files[row].first_ns);
        if first.load(Ordering::Relaxed) == 0 {
            // Who is not the first finds another number there, and leaves it.
            let _taken =
                first.compare_exchange(0, self.begin, Ordering::Relaxed, Ordering::Relaxed);
        }
        field!(rec, .files[row].last_ns).fetch_max(end, Ordering::Relaxed);
        if let Some(burst) = burst_of(rec, self.begin, end, true) {
            field!(rec, .bursts[burst].writes).fetch_add(1, Ordering::Relaxed);
            field!(rec, .bursts[burst].bytes).fetch_add(bytes, Ordering::Relaxed);
            field!(rec, .bursts[burst].ns).fetch_add(ns, Ordering::Relaxed);
        }
    }

    /// It was an fsync.
    pub fn synced(self, good: bool) {
        if good {
            self.add(Count::Syncs, 1);
            self.spent(Count::SyncNanoseconds);
        }
    }

    /// It was fflush, close or fclose.
    pub fn closed(self) {
        self.spent(Count::CloseNanoseconds);
    }

    fn add(self, count: Count, n: u64) {
        self.file.rec.add(|r| fds::file(r, self.file.row, count), n);
    }

    fn spent(self, count: Count) {
        let end = now();
        let ns = end.saturating_sub(self.begin);
        self.add(count, ns);
        if let Some(burst) = burst_of(self.file.rec, self.begin, end, false) {
            field!(self.file.rec, .bursts[burst].sync_ns).fetch_add(ns, Ordering::Relaxed);
        }
    }
}

/// Counters of a class.
#[derive(Clone, Copy)]
enum Part {
    Count,
    Bytes,
    Nanoseconds,
}

/// Where a counter of a class is.
#[inline]
fn cell(record: *mut Record, kind: Kind, class: usize, part: Part) -> *mut u64 {
    let class = if class < CLASSES { class } else { CLASSES - 1 };
    // SAFETY: inside of the record that stays mapped: Kind has two values, the class is below CLASSES.
    // Only the address is taken.
    unsafe {
        let c: *mut Cell = &raw mut (*record).classes[kind as usize][class];
        match part {
            Part::Count => &raw mut (*c).count,
            Part::Bytes => &raw mut (*c).bytes,
            Part::Nanoseconds => &raw mut (*c).ns,
        }
    }
}

/// The burst, from 0, that a call between these two times belongs to; `None` if there is none.
///
/// One word says which burst is the present one and when its last write ended, so that of several threads
/// exactly one begins the next.
#[inline]
fn burst_of(rec: Rec, begin: u64, end: u64, is_write: bool) -> Option<usize> {
    let clock = field!(rec, .head.clock);
    let began = field!(rec, .head.began_ns).load(Ordering::Relaxed);
    let gap = field!(rec, .head.gap_ns).load(Ordering::Relaxed) / 1000;
    let micros = |ns: u64| ns.saturating_sub(began) / 1000;
    let mut word = clock.load(Ordering::Relaxed);
    let (burst, fresh) = loop {
        let (present, last) = split_clock(word);
        let paused = present == 0 || micros(begin).saturating_sub(last) >= gap;
        if paused && !is_write {
            // Closed long after: the burst that it belongs to is over.
            return None;
        }
        // The last one takes all that comes after it.
        let fresh = paused && present < BURSTS as u64;
        let burst = if fresh { present.wrapping_add(1) } else { present };
        let next = join_clock(burst, last.max(micros(end)));
        match clock.compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break (burst, fresh),
            Err(other) => word = other,
        }
    };
    let at = usize::try_from(burst).ok()?.checked_sub(1).filter(|at| *at < BURSTS)?;
    if fresh {
        field!(rec, .bursts[at].begin_ns).store(begin, Ordering::Relaxed);
    }
    field!(rec, .bursts[at].end_ns).fetch_max(end, Ordering::Relaxed);
    Some(at)
}
