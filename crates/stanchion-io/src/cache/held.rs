//! An extent as the files have it whose bytes are in it: in memory, in the store, or on the way there.
//!
//! Its memory is given back when all that files have of it is in the store, and nobody was told to read it there
//! (FM-T5). What is repaired while it is being stored is stored again.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::io::Errno;
use stanchion_format::checksum::{Crc, joined};
use stanchion_format::ids::ExtentId;

use super::memory::{Memory, OnFreed};
use super::moving::Moves;
use crate::fs;
use crate::store::{Place, Tag};

/// Bytes that are copied with the lock held: who gives memory back, or takes a file over, does not wait for more.
const STEP_BYTES: u64 = 256 << 10;
/// Bytes that are copied and summed in one go: what stays in the processor's nearest cache.
pub(super) const SUM_BYTES: usize = 32 << 10;

/// An extent as long as a file or a reader has it.
pub(super) struct Used {
    pub(super) id: ExtentId,
    pub(super) bytes: u64,
    /// What its chunks are called in the store; the offset is added.
    pub(super) tag: Tag,
    freed: Arc<OnFreed>,
    moves: Option<Arc<Moves>>,
    state: RwLock<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) memory: Option<Arc<dyn Memory>>,
    /// What files have of it and the store not, nor is it on the way: offset and length.
    left: BTreeMap<u64, u64>,
    stored: BTreeMap<u64, Slice>,
    moving: Vec<Moving>,
    /// Checksums that are known, by offset: length and checksum.
    pub(super) sums: BTreeMap<u64, (u64, Crc)>,
    /// Grows with each repair: a checksum of before is of other bytes.
    pub(super) version: u64,
    /// Other processes were told where in memory it is.
    pinned: bool,
    /// Nobody is likely to read it soon.
    settled: bool,
}

/// A range of the extent in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    pub(super) bytes: u64,
    pub(super) place: Place,
    /// Where in the chunk it begins.
    pub(super) skip: u64,
}

#[derive(Clone, Copy)]
struct Moving {
    offset: u64,
    bytes: u64,
    /// It was repaired meanwhile.
    void: bool,
}

/// Where a part of a file lies, for other processes to read it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// In an extent.
    Memory(ExtentId),
    /// In the segment of this chunk.
    Store(Place),
}

/// Offsets and lengths.
pub(super) type Ranges = Vec<(u64, u64)>;

/// The chunk of the store that was read last.
#[derive(Default)]
pub(super) struct Last(Option<(Place, Vec<u8>)>);

impl fmt::Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(moves) = &self.moves {
            let mut places: Vec<Place> = state.stored.values().map(|s| s.place).collect();
            places.dedup();
            moves.forget(&places);
        }
        if state.memory.take().is_some() {
            (self.freed)(self.id);
        }
    }
}

fn overlaps(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

impl State {
    /// Ranges of a map by offset that have bytes of a range.
    pub(super) fn touching<T: Copy>(
        map: &BTreeMap<u64, T>,
        bytes: impl Fn(&T) -> u64,
        range: (u64, u64),
    ) -> Vec<(u64, T)> {
        let before = map.range(..range.0).next_back();
        let inside = map.range(range.0..range.0 + range.1);
        let all = before.into_iter().chain(inside).map(|(at, t)| (*at, *t));
        all.filter(|(at, t)| overlaps((*at, bytes(t)), range)).collect()
    }

    /// What of a range is nowhere noted yet.
    fn missing(&self, (offset, bytes): (u64, u64)) -> Vec<(u64, u64)> {
        let mut taken: Vec<(u64, u64)> = State::touching(&self.left, |b| *b, (offset, bytes));
        let stored = State::touching(&self.stored, |s| s.bytes, (offset, bytes));
        taken.extend(stored.into_iter().map(|(at, s)| (at, s.bytes)));
        let moving = self.moving.iter().map(|m| (m.offset, m.bytes));
        taken.extend(moving.filter(|m| overlaps(*m, (offset, bytes))));
        taken.sort_unstable();
        let (mut at, end, mut out) = (offset, offset + bytes, Vec::new());
        for (start, len) in taken {
            if start > at {
                out.push((at, start - at));
            }
            at = at.max(start + len);
        }
        if at < end {
            out.push((at, end - at));
        }
        out
    }

    fn is_stored(&self) -> bool {
        self.left.is_empty() && self.moving.is_empty()
    }

    /// A chunk takes the place of what the store had of its range; the chunks that are of no use any more.
    fn put(&mut self, offset: u64, slice: Slice) -> Vec<Place> {
        let end = offset + slice.bytes;
        let old = State::touching(&self.stored, |s| s.bytes, (offset, slice.bytes));
        for (at, s) in &old {
            self.stored.remove(at);
            if *at < offset {
                self.stored.insert(*at, Slice { bytes: offset - at, ..*s });
            }
            if at + s.bytes > end {
                let skip = s.skip + (end - at);
                self.stored.insert(end, Slice { bytes: at + s.bytes - end, skip, ..*s });
            }
        }
        self.stored.insert(offset, slice);
        let mut gone: Vec<Place> = old.iter().map(|(_, s)| s.place).collect();
        gone.dedup();
        gone.retain(|p| !self.stored.values().any(|s| s.place == *p));
        gone
    }

    fn changed(&mut self, range: (u64, u64)) {
        self.version += 1;
        for (at, _) in State::touching(&self.sums, |(bytes, _)| *bytes, range) {
            self.sums.remove(&at);
        }
        for moving in &mut self.moving {
            moving.void |= overlaps((moving.offset, moving.bytes), range);
        }
    }

    pub(super) fn sum(&self, offset: u64, bytes: u64) -> Option<Crc> {
        let (mut at, end) = (offset, offset + bytes);
        let mut sum: Option<Crc> = None;
        while at < end {
            let (len, crc) = self.sums.get(&at).filter(|(len, _)| at + len <= end)?;
            sum = Some(sum.map_or(*crc, |before| joined(before, *crc, *len)));
            at += len;
        }
        sum
    }
}

impl Used {
    pub(super) fn new(
        id: ExtentId,
        memory: Arc<dyn Memory>,
        tag: Tag,
        freed: Arc<OnFreed>,
        moves: Option<Arc<Moves>>,
    ) -> Used {
        let bytes = memory.bytes();
        let state = State { memory: Some(memory), ..State::default() };
        Used { id, bytes, tag, freed, moves, state: RwLock::new(state) }
    }

    pub(super) fn reading(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn writing(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file has this range: it is to be stored, in pieces that end where `cut` says. False: there is no store.
    pub(super) fn want(&self, mut offset: u64, bytes: u64, cut: impl Fn(u64) -> u64) -> bool {
        if self.moves.is_none() {
            return false;
        }
        let (start, end) = (offset, offset.saturating_add(bytes).min(self.bytes));
        let mut state = self.writing();
        while offset < end {
            let step = cut(offset - start).clamp(1, end - offset);
            for (at, len) in state.missing((offset, step)) {
                state.left.insert(at, len);
            }
            offset += step;
        }
        true
    }

    /// Up to `max` bytes (one range at least) that are to be stored now, and the memory they are in.
    pub(super) fn take(&self, max: u64) -> Option<(Arc<dyn Memory>, Ranges)> {
        let mut state = self.writing();
        let memory = state.memory.clone()?;
        let mut ranges = Vec::new();
        let mut total = 0;
        while let Some((offset, bytes)) = state.left.first_key_value().map(|(o, b)| (*o, *b)) {
            if total > 0 && total + bytes > max {
                break;
            }
            state.left.pop_first();
            state.moving.push(Moving { offset, bytes, void: false });
            ranges.push((offset, bytes));
            total += bytes;
        }
        (!ranges.is_empty()).then_some((memory, ranges))
    }

    /// Is there more to be stored?
    pub(super) fn is_left(&self) -> bool {
        !self.reading().left.is_empty()
    }

    /// All that files have of it is in the store.
    pub(super) fn is_stored(&self) -> bool {
        self.reading().is_stored()
    }

    /// A range that was taken is in the store; `None`: it could not be. The chunk, if it is of no use.
    pub(super) fn moved(&self, (offset, bytes): (u64, u64), place: Option<Place>) -> Vec<Place> {
        let mut state = self.writing();
        let at = state.moving.iter().position(|m| (m.offset, m.bytes) == (offset, bytes));
        let moving = state.moving.swap_remove(at.expect("what was stored was taken for it"));
        match place.filter(|_| !moving.void) {
            Some(place) => {
                state.sums.insert(offset, (bytes, place.crc));
                state.put(offset, Slice { bytes, place, skip: 0 })
            }
            None => {
                state.left.insert(offset, bytes);
                place.into_iter().collect()
            }
        }
    }

    /// Nobody is likely to read it soon.
    pub(super) fn settle(&self) {
        self.writing().settled = true;
    }

    /// Is it not worth its memory?
    pub(super) fn is_settled(&self) -> bool {
        self.reading().settled
    }

    /// Its memory can be given back. Without a store it never can: there nothing is left to be stored.
    pub(super) fn is_clean(&self) -> bool {
        let state = self.reading();
        self.moves.is_some() && state.memory.is_some() && state.is_stored() && !state.pinned
    }

    /// Gives the memory back if everything is in the store. Who calls has seen to it that nobody finds this extent by
    /// its number any more: that may belong to others in a moment.
    pub(super) fn release(&self) {
        let memory = {
            let mut state = self.writing();
            let free = self.moves.is_some() && state.is_stored() && !state.pinned;
            if free { state.memory.take() } else { None }
        };
        if memory.is_some() {
            (self.freed)(self.id);
        }
    }

    /// Nobody was told to read it in memory, or all have read it.
    pub(super) fn unpin(&self) {
        self.writing().pinned = false;
    }

    /// Where a range lies: the place, where in it, and how much of the range.
    pub(super) fn lies(&self, mut offset: u64, bytes: u64) -> Vec<(Lies, u64, u64)> {
        let mut state = self.writing();
        if state.memory.is_some() {
            state.pinned = true;
            return vec![(Lies::Memory(self.id), offset, bytes)];
        }
        let end = offset + bytes;
        let mut out = Vec::new();
        for (at, s) in State::touching(&state.stored, |s| s.bytes, (offset, bytes)) {
            let within = offset - at;
            let step = (s.bytes - within).min(end - offset);
            out.push((Lies::Store(s.place), s.place.offset + s.skip + within, step));
            offset += step;
        }
        out
    }

    /// Copies from `offset`; within the size.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8], last: &mut Last) -> fs::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let left = (buf.len() - done) as u64;
            let state = self.reading();
            if let Some(memory) = &state.memory {
                let step = left.min(STEP_BYTES) as usize;
                memory.read(at, &mut buf[done..done + step]);
                done += step;
                continue;
            }
            let slice = state.stored.range(..=at).next_back().map(|(start, s)| (*start, *s));
            drop(state);
            let (start, slice) =
                slice.filter(|(start, s)| at < start + s.bytes).ok_or(Errno::IO)?;
            let within = at - start;
            let step = left.min(slice.bytes - within) as usize;
            let moves = self.moves.as_deref().ok_or(Errno::IO)?;
            let buf = &mut buf[done..done + step];
            let read = moves.read(&slice.place, slice.skip + within, buf, last);
            let same = || self.reading().stored.get(&start).is_some_and(|s| s.place == slice.place);
            match read {
                Ok(()) => done += step,
                // Repaired while it was read.
                Err(_) if !same() => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Gives a socket bytes from `offset` on; within the size. `None`: they are to be read. Without the lock: a peer that
    /// does not read must hold up nobody here. Memory that is given back meanwhile may have other bytes then, which the
    /// peer sees by their checksum.
    pub(super) fn send_to(
        &self,
        socket: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
    ) -> Option<fs::Result<u64>> {
        let memory = self.reading().memory.clone()?;
        Some(fs::send_file(socket, memory.fd()?, offset, bytes))
    }

    /// Copies to `offset`; within the size. For repair: the bytes go to where those lie that they replace.
    pub(super) fn write(self: &Arc<Self>, offset: u64, bytes: &[u8]) -> fs::Result<()> {
        let range = (offset, bytes.len() as u64);
        let mut state = self.writing();
        if let Some(memory) = state.memory.clone() {
            state.changed(range);
            memory.write(offset, bytes);
            let old = State::touching(&state.stored, |s| s.bytes, range);
            for (at, slice) in &old {
                state.stored.remove(at);
                state.left.insert(*at, slice.bytes);
            }
            drop(state);
            if let (Some(moves), false) = (&self.moves, old.is_empty()) {
                let mut places: Vec<Place> = old.iter().map(|(_, s)| s.place).collect();
                places.dedup();
                moves.forget(&places);
                moves.push(self);
            }
            return Ok(());
        }
        drop(state);
        let moves = self.moves.as_deref().ok_or(Errno::IO)?;
        let place = moves.append_bytes(Tag { offset, ..self.tag }, bytes)?;
        let gone = {
            let mut state = self.writing();
            state.changed(range);
            state.put(offset, Slice { bytes: range.1, place, skip: 0 })
        };
        moves.forget(&gone);
        Ok(())
    }

    /// Is what files have of it stored?
    pub(super) fn has_store(&self) -> bool {
        self.moves.is_some()
    }

    /// The checksum of exactly this range, if it is known.
    pub(super) fn known(&self, offset: u64, bytes: u64) -> Option<Crc> {
        self.reading().sum(offset, bytes)
    }
}

impl Last {
    /// The chunk at `place`, which `fill` reads if it is not the one of before.
    pub(super) fn chunk(
        &mut self,
        place: &Place,
        fill: impl FnOnce(&mut [u8]) -> fs::Result<()>,
    ) -> fs::Result<&[u8]> {
        if self.0.as_ref().is_none_or(|(p, _)| p != place) {
            let mut buf = self.0.take().map(|(_, buf)| buf).unwrap_or_default();
            buf.resize(place.len as usize, 0);
            fill(&mut buf)?;
            self.0 = Some((*place, buf));
        }
        Ok(self.0.as_ref().map_or(&[], |(_, buf)| buf))
    }
}
