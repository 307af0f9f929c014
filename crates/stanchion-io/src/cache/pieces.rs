//! What a file in memory is made of.
//!
//! A file has a table of extents, and pieces that name theirs by its place there: a file that was written incrementally
//! has tens of thousands of pieces, all of which the next one takes over, and counting references for each of them would
//! cost more than copying what changed.
//!
//! Even so, putting that list together takes longer than ranks should wait for. A file that was written incrementally is
//! at first its predecessor and what is not that one's ([`Over`]); its own list is made by who reads it first, which is
//! who makes the manifest, on a thread of its own.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use stanchion_format::changed::{Changed, Stretch};
use stanchion_format::ids::ExtentId;
use stanchion_format::peer::Cause;

use super::held::Used;

/// Files without a list of their own that may follow each other: so deep is what goes through them, and so long lives
/// what none of them has any more.
const OVER_MAX: usize = 16;

/// A piece of an extent as a piece of a file.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Where it begins in the file.
    start: u64,
    /// Where it begins in the extent.
    offset: u64,
    bytes: u64,
    /// Which of the file's extents.
    used: u32,
}

/// A file in memory.
pub(super) struct MemFile {
    pub(super) bytes: u64,
    list: OnceLock<List>,
    /// As long as there is no list.
    over: Mutex<Option<Over>>,
    /// Files without lists below this one, when it came.
    depth: usize,
    /// Bytes of it are known to be damaged.
    spoiled: AtomicBool,
}

/// Pieces that follow each other without gaps.
#[derive(Debug, Default)]
pub(super) struct List {
    bytes: u64,
    pieces: Vec<Piece>,
    /// Each has a piece.
    used: Vec<Arc<Used>>,
}

/// A file as what another one is, but for some of it.
struct Over {
    base: Arc<MemFile>,
    changed: Changed,
    /// What is not the base's, one after another.
    own: List,
}

impl fmt::Debug for MemFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFile").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl MemFile {
    /// A file of its own.
    pub(super) fn of(list: List) -> MemFile {
        let bytes = list.bytes;
        MemFile {
            bytes,
            list: OnceLock::from(list),
            over: Mutex::default(),
            depth: 0,
            spoiled: AtomicBool::new(false),
        }
    }

    /// A file that is as long as `base` and has its bytes but for `changed`: those are `own`; or why it cannot be.
    pub(super) fn over(
        base: Arc<MemFile>,
        changed: Changed,
        own: List,
    ) -> (MemFile, Option<Cause>) {
        if changed.bytes() != base.bytes || changed.own() != own.bytes {
            return (MemFile::of(own), Some(Cause::Malformed));
        }
        let depth = if base.list.get().is_some() { 0 } else { base.depth } + 1;
        let bytes = base.bytes;
        let over = Mutex::new(Some(Over { base, changed, own }));
        let spoiled = AtomicBool::new(false);
        (MemFile { bytes, list: OnceLock::new(), over, depth, spoiled }, None)
    }

    /// Bytes of it are not what they were.
    pub(super) fn spoil(&self) {
        self.spoiled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Relaxed)
    }

    /// Makes its list if too many files below it have none. Not to be called with locks held, as all that makes lists:
    /// extents that the file does not share with its base any more may be free then, which calls out.
    pub(super) fn shorten(&self) {
        if self.depth >= OVER_MAX {
            self.flatten();
        }
    }

    /// Makes its list.
    pub(super) fn flatten(&self) {
        self.list();
    }

    fn list(&self) -> &List {
        self.list.get_or_init(|| {
            let over = self.over.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Over { base, changed, own } = over.expect("a file has a list or is over another");
            List::merged(base.list(), &changed, own)
        })
    }

    /// Calls `each` with the pieces of a range: (extent, offset in it, range of the buffer). Gives the bytes that there
    /// are.
    pub(super) fn walk(
        &self,
        offset: u64,
        len: usize,
        each: impl FnMut(&Arc<Used>, u64, usize, usize),
    ) -> usize {
        self.list().walk(offset, len, each)
    }

    /// In how many pieces is a range?
    pub(super) fn pieces_within(&self, offset: u64, bytes: u64) -> usize {
        let list = self.list();
        let end = offset.saturating_add(bytes);
        let first = list.piece_at(offset);
        list.pieces.partition_point(|p| p.start < end).saturating_sub(first)
    }

    /// Its pieces from `from` on: (extent, offset in it, bytes).
    pub(super) fn pieces(&self, from: u64) -> impl Iterator<Item = (&Arc<Used>, u64, u64)> {
        let list = self.list();
        list.pieces[list.piece_at(from)..].iter().map(move |p| {
            let skip = from.saturating_sub(p.start);
            (&list.used[p.used as usize], p.offset + skip, p.bytes - skip)
        })
    }

    /// The extents that it has pieces of.
    pub(super) fn extents(&self) -> &[Arc<Used>] {
        &self.list().used
    }
}

impl List {
    fn walk(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(&Arc<Used>, u64, usize, usize),
    ) -> usize {
        let end = self.bytes.min(offset.saturating_add(len as u64));
        let mut at = offset;
        let mut n = self.piece_at(offset);
        while at < end {
            let piece = &self.pieces[n];
            let within = at - piece.start;
            let step = (piece.bytes - within).min(end - at);
            let from = (at - offset) as usize;
            each(
                &self.used[piece.used as usize],
                piece.offset + within,
                from,
                from + step as usize,
            );
            at += step;
            n += 1;
        }
        end.saturating_sub(offset) as usize
    }

    fn piece_at(&self, offset: u64) -> usize {
        self.pieces.partition_point(|p| p.start + p.bytes <= offset)
    }

    /// Adds a piece. Neighbours stay one: increments of increments do not make lists grow without end.
    fn push(&mut self, used: u32, offset: u64, bytes: u64) {
        match self.pieces.last_mut() {
            Some(last) if last.used == used && last.offset + last.bytes == offset => {
                last.bytes += bytes;
            }
            _ => self.pieces.push(Piece { start: self.bytes, offset, bytes, used }),
        }
        self.bytes += bytes;
    }

    /// The list of a file that has `base`'s bytes but for `changed`. The sums fit.
    fn merged(base: &List, changed: &Changed, own: List) -> List {
        let first = base.used.len() as u32;
        let most = base.pieces.len() + own.pieces.len() + 2 * changed.runs();
        let mut out = List { pieces: Vec::with_capacity(most), ..List::default() };
        out.used.extend(base.used.iter().chain(&own.used).cloned());
        let (mut theirs, mut ours) = (Cursor::new(&base.pieces), Cursor::new(&own.pieces));
        for Stretch { same, own } in changed.stretches() {
            theirs.take(same, |used, offset, bytes| out.push(used, offset, bytes));
            theirs.take(own, |_, _, _| {});
            ours.take(own, |used, offset, bytes| out.push(first + used, offset, bytes));
        }
        out.compacted()
    }

    /// Without the extents that it has no piece of.
    fn compacted(mut self) -> List {
        let mut has = vec![false; self.used.len()];
        self.pieces.iter().for_each(|p| has[p.used as usize] = true);
        if has.contains(&false) {
            let mut places = Vec::with_capacity(has.len());
            let mut kept = Vec::with_capacity(has.len());
            for (used, has) in std::mem::take(&mut self.used).into_iter().zip(has) {
                places.push(kept.len() as u32);
                if has {
                    kept.push(used);
                }
            }
            self.used = kept;
            self.pieces.iter_mut().for_each(|p| p.used = places[p.used as usize]);
        }
        self.pieces.shrink_to_fit();
        self
    }
}

/// Goes through pieces.
struct Cursor<'a> {
    pieces: &'a [Piece],
    /// What of the first was taken, bytes.
    taken: u64,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [Piece]) -> Cursor<'a> {
        Cursor { pieces, taken: 0 }
    }

    /// The next bytes: (extent, offset, bytes).
    fn take(&mut self, mut bytes: u64, mut each: impl FnMut(u32, u64, u64)) {
        while bytes > 0 {
            let piece = self.pieces[0];
            let step = bytes.min(piece.bytes - self.taken);
            each(piece.used, piece.offset + self.taken, step);
            (bytes, self.taken) = (bytes - step, self.taken + step);
            if self.taken == piece.bytes {
                (self.pieces, self.taken) = (&self.pieces[1..], 0);
            }
        }
    }
}

/// By what a rank names an extent of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    /// It is lent to it.
    Lent(ExtentId),
    /// It handed it over as its so-manieth.
    Handed(u64),
}

/// A list that is being put together of what a rank names.
pub(super) struct Building {
    list: List,
    own: HashMap<Of, u32>,
    /// Parts mostly follow each other in one extent.
    last: Option<(Of, u32)>,
}

impl Building {
    /// Of about so many parts.
    pub(super) fn new(parts: usize) -> Building {
        let list = List { pieces: Vec::with_capacity(parts), ..List::default() };
        Building { list, own: HashMap::new(), last: None }
    }

    /// Bytes so far.
    pub(super) fn bytes(&self) -> u64 {
        self.list.bytes
    }

    /// The rank's own extent of this name, if it was added.
    pub(super) fn known(&mut self, of: Of) -> Option<u32> {
        if self.last.is_none_or(|(last, _)| last != of) {
            self.last = self.own.get(&of).map(|index| (of, *index));
        }
        self.last.map(|(_, index)| index)
    }

    /// Adds an extent of the rank's own: it has it from now on, whatever becomes of its pieces.
    pub(super) fn add(&mut self, of: Of, used: Arc<Used>) -> u32 {
        let index = self.list.used.len() as u32;
        self.list.used.push(used);
        self.own.insert(of, index);
        self.last = Some((of, index));
        index
    }

    pub(super) fn extent(&self, index: u32) -> &Arc<Used> {
        &self.list.used[index as usize]
    }

    /// What follows is in this extent.
    pub(super) fn put(&mut self, index: u32, offset: u64, bytes: u64) -> Result<(), Cause> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.extent(index).bytes);
        if !fits || self.list.bytes.checked_add(bytes).is_none() {
            return Err(Cause::Malformed);
        }
        self.list.push(index, offset, bytes);
        Ok(())
    }

    /// The list.
    pub(super) fn finish(self) -> List {
        self.list
    }
}
