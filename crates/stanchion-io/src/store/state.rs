//! What the store knows of its segments. No I/O here.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rustix::io::Errno;
use stanchion_format::ids::Key;
use stanchion_format::segment::{BLOCK, Entry, GROUP_ENTRIES_MAX, Life, Tag, padded, table_bytes};

use super::files::Files;
use super::{Place, SEGMENTS_MAX};

const ONE: u64 = BLOCK as u64;

/// Where a segment is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Holds nothing; its file waits for the next life.
    Free,
    /// Its next life is being prepared.
    Making,
    /// Takes chunks.
    Open,
    /// Takes none any more; some are still being written.
    Closed,
    /// All are written; its index is being written.
    Sealing,
    /// Written to its end. Sealed, unless that failed.
    Kept,
    /// A write failed: not used again.
    Dead,
}

/// A segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) bytes: u64,
    pub(super) life: Life,
    pub(super) stage: Stage,
    /// By place.
    pub(super) entries: Vec<Entry>,
    pub(super) files: Option<Arc<Files>>,
    /// Where the next group goes.
    used: u64,
    /// Chunks that the table must have room for.
    promised: u64,
    in_flight: u32,
    /// Writes that ended well, and how many of them are durable.
    done: u64,
    synced: u64,
    sync_failed: Option<Errno>,
    bad: bool,
}

impl Segment {
    fn new(bytes: u64, life: Life, stage: Stage) -> Segment {
        Segment {
            bytes,
            life,
            stage,
            entries: Vec::new(),
            files: None,
            used: ONE,
            promised: 0,
            in_flight: 0,
            done: 0,
            synced: 0,
            sync_failed: None,
            bad: false,
        }
    }

    /// How many of these chunks go into one more group here.
    fn fitting(&self, lens: impl Iterator<Item = u32>) -> usize {
        let mut end = self.used + ONE;
        let mut count = 0;
        for len in lens.take(GROUP_ENTRIES_MAX) {
            end += padded(len.into());
            let table = table_bytes(self.promised + count as u64 + 1);
            if end + table + ONE > self.bytes {
                break;
            }
            count += 1;
        }
        count
    }

    fn find(&self, at: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&at, |e| e.at).ok()
    }
}

/// The largest chunk that a segment takes.
pub(super) fn chunk_max(segment_bytes: u64) -> u64 {
    // Header, group, table, trailer.
    segment_bytes - 4 * ONE
}

/// Room for a group in a segment.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) life: Life,
    pub(super) files: Arc<Files>,
    pub(super) at: u64,
    pub(super) count: usize,
}

/// A segment that is to have its next life.
#[derive(Debug)]
pub(super) struct Next {
    pub(super) life: Life,
    pub(super) bytes: u64,
    /// There is no file of it yet.
    pub(super) fresh: bool,
}

/// What is to be made durable.
#[derive(Debug)]
pub(super) struct Dirty {
    pub(super) life: Life,
    pub(super) files: Option<Arc<Files>>,
    done: u64,
}

/// A segment that an earlier process left.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) life: Life,
    pub(super) bytes: u64,
    pub(super) entries: Vec<Entry>,
    /// It has no index yet, and all that it holds was read.
    pub(super) seal: bool,
    /// Part of it could not be read.
    pub(super) unreadable: bool,
}

/// All segments.
#[derive(Debug)]
pub(super) struct State {
    segments: BTreeMap<u32, Segment>,
    free: VecDeque<u32>,
    current: Option<u32>,
    store: u64,
    life: u64,
    segment_bytes: u64,
    bytes_max: u64,
}

impl State {
    pub(super) fn new(store: u64, segment_bytes: u64, bytes_max: u64) -> State {
        State {
            segments: BTreeMap::new(),
            free: VecDeque::new(),
            current: None,
            store,
            life: 0,
            segment_bytes,
            bytes_max,
        }
    }

    fn get(&mut self, life: Life) -> &mut Segment {
        let segment = self.segments.get_mut(&life.segment).expect("segments are not forgotten");
        assert_eq!(segment.life, life, "a segment that is in use gets no new life");
        segment
    }

    /// A file without anything of use.
    pub(super) fn adopt_free(&mut self, number: u32, bytes: u64) {
        let life = Life { store: self.store, segment: number, life: 0 };
        self.segments.insert(number, Segment::new(bytes, life, Stage::Free));
        self.free.push_back(number);
    }

    /// A segment that an earlier process left.
    pub(super) fn adopt(&mut self, found: Found) {
        let stage = if found.seal { Stage::Sealing } else { Stage::Kept };
        let mut segment = Segment::new(found.bytes, found.life, stage);
        segment.entries = found.entries;
        segment.entries.sort_by_key(|e| e.at);
        segment.bad = found.unreadable;
        self.life = self.life.max(found.life.life);
        self.segments.insert(found.life.segment, segment);
    }

    /// All are adopted: those that want sealing. Of a chunk that was stored twice the newer one stays.
    pub(super) fn adopted(&mut self) -> Vec<Life> {
        self.drop_doubles();
        for number in self.numbers() {
            self.release(number);
        }
        let torn = self.segments.values().filter(|s| s.stage == Stage::Sealing);
        torn.map(|s| s.life).collect()
    }

    /// A file that cannot be read: its name is taken, no more.
    pub(super) fn adopt_dead(&mut self, number: u32, bytes: u64) {
        let life = Life { store: self.store, segment: number, life: 0 };
        self.segments.insert(number, Segment::new(bytes, life, Stage::Dead));
    }

    fn drop_doubles(&mut self) {
        let mut newest: BTreeMap<Tag, (u64, u64)> = BTreeMap::new();
        for segment in self.segments.values() {
            for entry in &segment.entries {
                let mine = (segment.life.life, entry.at);
                let best = newest.entry(entry.tag).or_insert(mine);
                *best = mine.max(*best);
            }
        }
        for segment in self.segments.values_mut() {
            let life = segment.life.life;
            segment.entries.retain(|e| newest[&e.tag] == (life, e.at));
        }
    }

    /// Room for as many of the chunks as go into one group; `None`: there is no open segment with any.
    pub(super) fn reserve(&mut self, lens: impl Iterator<Item = u32> + Clone) -> Option<Room> {
        let segment = self.segments.get_mut(&self.current?).expect("the current one is there");
        let count = segment.fitting(lens.clone());
        if count == 0 {
            return None;
        }
        let at = segment.used;
        segment.used += ONE + lens.take(count).map(|len| padded(len.into())).sum::<u64>();
        segment.promised += count as u64;
        segment.in_flight += 1;
        let files = segment.files.clone().expect("an open segment has its files");
        Some(Room { life: segment.life, files, at, count })
    }

    /// Is there room for a chunk?
    pub(super) fn has_room(&self, len: u32) -> bool {
        self.current.is_some_and(|n| self.segments[&n].fitting(std::iter::once(len)) == 1)
    }

    /// The segment to be opened next; `None`: the store is full.
    pub(super) fn next(&mut self) -> Option<Next> {
        if self.free.is_empty() && self.bytes() + self.segment_bytes > self.bytes_max {
            self.free_current();
        }
        self.life += 1;
        if let Some(number) = self.free.pop_front() {
            let life = Life { store: self.store, segment: number, life: self.life };
            let segment = self.segments.get_mut(&number).expect("free ones are there");
            (segment.life, segment.stage) = (life, Stage::Making);
            return Some(Next { life, bytes: segment.bytes, fresh: false });
        }
        let number = (0..).find(|n| !self.segments.contains_key(n)).expect("numbers are many");
        if self.bytes() + self.segment_bytes > self.bytes_max || number >= SEGMENTS_MAX {
            return None;
        }
        let life = Life { store: self.store, segment: number, life: self.life };
        self.segments.insert(number, Segment::new(self.segment_bytes, life, Stage::Making));
        Some(Next { life, bytes: self.segment_bytes, fresh: true })
    }

    /// The open segment may hold nothing but what was forgotten.
    fn free_current(&mut self) {
        let Some(number) = self.current else { return };
        let segment = self.segments.get_mut(&number).expect("the current one is there");
        if segment.entries.is_empty() && segment.in_flight == 0 && segment.used > ONE {
            self.current = None;
            segment.stage = Stage::Kept;
            self.release(number);
        }
    }

    /// The preparation of `next` failed.
    pub(super) fn not_made(&mut self, next: &Next, errno: Errno) {
        let segment = self.get(next.life);
        assert_eq!(segment.stage, Stage::Making);
        if next.fresh {
            self.segments.remove(&next.life.segment);
            return;
        }
        segment.bad |= spoils(errno);
        segment.stage = Stage::Kept;
        self.release(next.life.segment);
    }

    /// The next life begins; the segment before may want sealing now.
    pub(super) fn made(&mut self, next: &Next, files: Arc<Files>) -> Option<Life> {
        let segment = self.get(next.life);
        assert_eq!(segment.stage, Stage::Making);
        *segment = Segment::new(next.bytes, next.life, Stage::Open);
        segment.files = Some(files);
        let before = self.close();
        self.current = Some(next.life.segment);
        before
    }

    /// Ends the open segment; it may want sealing now.
    pub(super) fn close(&mut self) -> Option<Life> {
        let number = self.current.take()?;
        let segment = self.segments.get_mut(&number).expect("the current one is there");
        assert_eq!(segment.stage, Stage::Open);
        segment.stage = Stage::Closed;
        let life = segment.life;
        self.settle(life)
    }

    /// A group is written; its segment may want sealing now.
    pub(super) fn written(&mut self, room: &Room, entries: &[Entry]) -> Option<Life> {
        let segment = self.get(room.life);
        let at = segment.entries.partition_point(|e| e.at < room.at);
        segment.entries.splice(at..at, entries.iter().copied());
        segment.done += 1;
        segment.in_flight -= 1;
        self.settle(room.life)
    }

    /// A group could not be written: nothing more goes into its segment, which may want sealing now.
    pub(super) fn not_written(&mut self, room: &Room, errno: Errno) -> Option<Life> {
        let segment = self.get(room.life);
        segment.in_flight -= 1;
        segment.bad |= spoils(errno);
        if self.current == Some(room.life.segment) {
            self.current = None;
            self.get(room.life).stage = Stage::Closed;
        }
        self.settle(room.life)
    }

    fn settle(&mut self, life: Life) -> Option<Life> {
        let segment = self.get(life);
        if segment.stage != Stage::Closed || segment.in_flight > 0 {
            return None;
        }
        if segment.entries.is_empty() {
            segment.stage = Stage::Kept;
            self.release(life.segment);
            return None;
        }
        segment.stage = Stage::Sealing;
        Some(life)
    }

    /// What sealing a segment needs: its size, its chunks, and how many writes are to be durable before.
    /// `None`: it is not to be sealed, since nothing is in it, or something that may be lost.
    pub(super) fn sealing(&mut self, life: Life) -> Option<(u64, Vec<Entry>, Dirty)> {
        let segment = self.get(life);
        assert_eq!(segment.stage, Stage::Sealing);
        if segment.entries.is_empty() || segment.sync_failed.is_some() {
            self.sealed(life, false);
            return None;
        }
        let dirty = Dirty { life, files: segment.files.clone(), done: segment.done };
        Some((segment.bytes, segment.entries.clone(), dirty))
    }

    /// Sealing came to its end; `wrote`: there is something to be made durable again.
    pub(super) fn sealed(&mut self, life: Life, wrote: bool) {
        let segment = self.get(life);
        assert_eq!(segment.stage, Stage::Sealing);
        segment.stage = Stage::Kept;
        segment.files = None;
        segment.done += u64::from(wrote);
        self.release(life.segment);
    }

    /// Chunks of a segment are not wanted any more.
    fn release(&mut self, number: u32) {
        let segment = self.segments.get_mut(&number).expect("segments are not forgotten");
        if segment.stage != Stage::Kept || !segment.entries.is_empty() {
            return;
        }
        (segment.files, segment.sync_failed, segment.synced) = (None, None, segment.done);
        if segment.bad || segment.bytes != self.segment_bytes {
            segment.stage = Stage::Dead;
        } else {
            segment.stage = Stage::Free;
            self.free.push_back(number);
        }
    }

    /// Forgets a dataset.
    pub(super) fn free(&mut self, key: Key) {
        self.forget(|_, entry| entry.tag.key == key);
    }

    /// Forgets single chunks.
    pub(super) fn forget_places(&mut self, places: &[Place]) {
        let mut places = places.to_vec();
        places.sort_by_key(|p| (p.segment, p.offset));
        for mine in places.chunk_by(|a, b| a.segment == b.segment) {
            let number = mine[0].segment;
            let Some(segment) = self.segments.get_mut(&number) else { continue };
            let life = segment.life.life;
            let listed = |e: &Entry| {
                let found = mine.binary_search_by_key(&e.at, |p| p.offset);
                found.is_ok_and(|n| mine[n].life == life)
            };
            segment.entries.retain(|e| !listed(e));
            self.release(number);
        }
    }

    fn forget(&mut self, mut which: impl FnMut(Life, &Entry) -> bool) {
        let numbers: Vec<u32> = self.segments.keys().copied().collect();
        for number in numbers {
            let segment = self.segments.get_mut(&number).expect("listed a moment ago");
            let (life, before) = (segment.life, segment.entries.len());
            segment.entries.retain(|entry| !which(life, entry));
            if segment.entries.len() < before {
                self.release(number);
            }
        }
    }

    /// Everything that is not durable yet. `Err`: something never will be.
    pub(super) fn dirty(&self) -> (Vec<Dirty>, Option<(u32, Errno)>) {
        let living = || self.segments.iter().filter(|(_, s)| !s.entries.is_empty());
        let failed = living().find_map(|(n, s)| Some((*n, s.sync_failed?)));
        let dirty = living().filter(|(_, s)| s.done > s.synced);
        let dirty =
            dirty.map(|(_, s)| Dirty { life: s.life, files: s.files.clone(), done: s.done });
        (dirty.collect(), failed)
    }

    /// A segment was made durable, or was not: what the system forgot then, no later call brings back, and
    /// nothing more goes into it. It may want to be ended now.
    pub(super) fn synced(&mut self, dirty: &Dirty, result: Result<(), Errno>) -> Option<Life> {
        let segment = self.segments.get_mut(&dirty.life.segment)?;
        if segment.life != dirty.life || segment.stage == Stage::Free {
            return None;
        }
        let Err(e) = result else {
            segment.synced = segment.synced.max(dirty.done);
            return None;
        };
        segment.sync_failed.get_or_insert(e);
        segment.bad |= spoils(e);
        if self.current != Some(dirty.life.segment) {
            return None;
        }
        self.close()
    }

    /// The segment of a place that holds what the place says.
    pub(super) fn find(&self, place: &Place) -> Option<&Segment> {
        let segment = self.segments.get(&place.segment)?;
        let entry = &segment.entries[segment.find(place.offset)?];
        let same =
            segment.life.life == place.life && (entry.len, entry.crc) == (place.len, place.crc);
        same.then_some(segment)
    }

    /// Every chunk and its place.
    pub(super) fn list(&self) -> Vec<(Tag, Place)> {
        let of = |s: &Segment| -> Vec<_> {
            s.entries.iter().map(|e| (e.tag, Place::new(s.life, e))).collect()
        };
        let mut all: Vec<_> = self.segments.values().flat_map(of).collect();
        all.sort_by_key(|(tag, _)| *tag);
        all
    }

    /// Of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.values().map(|s| s.bytes).sum()
    }

    pub(super) fn numbers(&self) -> Vec<u32> {
        self.segments.keys().copied().collect()
    }

    pub(super) fn count(&self, stage: Stage) -> usize {
        self.segments.values().filter(|s| s.stage == stage).count()
    }
}

/// Is a file on which this happened not to be used again? Space may come back.
fn spoils(errno: Errno) -> bool {
    !matches!(errno, Errno::NOSPC | Errno::DQUOT)
}
