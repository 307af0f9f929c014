//! What a file in memory is made of.
//!
//! A file has a table of extents, and pieces that name theirs by its place there: a file that was written incrementally
//! has tens of thousands of pieces, all of which the next one takes over, and counting references for each of them would
//! cost more than copying what changed.

use std::collections::HashMap;
use std::sync::Arc;

use stanchion_format::ids::ExtentId;
use stanchion_format::peer::Cause;

use super::memory::Used;

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

/// A file in memory. Its pieces follow each other without gaps.
#[derive(Debug)]
pub(super) struct MemFile {
    pub(super) bytes: u64,
    pieces: Vec<Piece>,
    /// Each has a piece.
    used: Vec<Arc<Used>>,
}

impl MemFile {
    /// Calls `each` with the pieces of a range: (extent, offset in it, range of the buffer). Gives the bytes that there
    /// are.
    pub(super) fn walk(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(&Arc<Used>, u64, usize, usize),
    ) -> usize {
        let first = self.piece_at(offset);
        self.walk_from(first, offset, len, |piece, at, from, to| {
            each(&self.used[piece.used as usize], at, from, to);
        })
        .1
    }

    fn piece_at(&self, offset: u64) -> usize {
        self.pieces.partition_point(|p| p.start + p.bytes <= offset)
    }

    /// The same from the piece that has `offset`; gives also the one to go on with.
    fn walk_from(
        &self,
        first: usize,
        offset: u64,
        len: usize,
        mut each: impl FnMut(&Piece, u64, usize, usize),
    ) -> (usize, usize) {
        let end = self.bytes.min(offset.saturating_add(len as u64));
        let mut at = offset;
        let mut n = first;
        while at < end {
            let piece = &self.pieces[n];
            let within = at - piece.start;
            let step = (piece.bytes - within).min(end - at);
            let from = (at - offset) as usize;
            each(piece, piece.offset + within, from, from + step as usize);
            at += step;
            n += usize::from(at == piece.start + piece.bytes);
        }
        (n, end.saturating_sub(offset) as usize)
    }

    /// Its pieces from `from` on: (extent, offset in it, bytes).
    pub(super) fn pieces(&self, from: u64) -> impl Iterator<Item = (&Arc<Used>, u64, u64)> {
        self.pieces[self.piece_at(from)..].iter().map(move |p| {
            let skip = from.saturating_sub(p.start);
            (&self.used[p.used as usize], p.offset + skip, p.bytes - skip)
        })
    }
}

/// A file that is being put together.
pub(super) struct Building<'a> {
    base: Option<&'a MemFile>,
    /// The piece of the base that is likely to have the next byte.
    place: usize,
    pieces: Vec<Piece>,
    /// Those of the base, then its own.
    used: Vec<Arc<Used>>,
    own: HashMap<ExtentId, u32>,
    /// Parts mostly follow each other in one extent.
    last: Option<(ExtentId, u32)>,
    at: u64,
}

impl<'a> Building<'a> {
    /// Of about so many parts.
    pub(super) fn new(base: Option<&'a MemFile>, parts: usize) -> Building<'a> {
        let (had, used) = base.map_or((0, Vec::new()), |b| (b.pieces.len(), b.used.clone()));
        // Each part adds its own piece and may cut one of the base's in two.
        let pieces = Vec::with_capacity(had.saturating_add(parts));
        Building { base, place: 0, pieces, used, own: HashMap::new(), last: None, at: 0 }
    }

    /// Bytes so far.
    pub(super) fn bytes(&self) -> u64 {
        self.at
    }

    /// The rank's own extent of this name, if it was added.
    pub(super) fn known(&mut self, id: ExtentId) -> Option<u32> {
        if self.last.is_none_or(|(last, _)| last != id) {
            self.last = self.own.get(&id).map(|index| (id, *index));
        }
        self.last.map(|(_, index)| index)
    }

    /// Adds an extent of the rank's own: it has it from now on, whatever becomes of its pieces.
    pub(super) fn add(&mut self, id: ExtentId, used: Arc<Used>) -> u32 {
        let index = self.used.len() as u32;
        self.used.push(used);
        self.own.insert(id, index);
        self.last = Some((id, index));
        index
    }

    fn extent(&self, index: u32) -> &Arc<Used> {
        &self.used[index as usize]
    }

    /// What follows is in this extent.
    pub(super) fn put(&mut self, index: u32, offset: u64, bytes: u64) -> Result<(), Cause> {
        let fits =
            offset.checked_add(bytes).is_some_and(|end| end <= self.extent(index).memory.bytes());
        if !fits {
            return Err(Cause::Malformed);
        }
        self.pieces.push(Piece { start: self.at, offset, bytes, used: index });
        self.at = self.at.saturating_add(bytes);
        Ok(())
    }

    /// What follows the base has at `offset`.
    pub(super) fn borrow(&mut self, offset: u64, bytes: u64) -> Result<(), Cause> {
        let base = self.base.ok_or(Cause::Malformed)?;
        let len = usize::try_from(bytes).map_err(|_| Cause::Malformed)?;
        if offset.checked_add(bytes).is_none_or(|end| end > base.bytes) {
            return Err(Cause::Malformed);
        }
        let has = |n: usize| {
            base.pieces.get(n).is_some_and(|p| p.start <= offset && offset < p.start + p.bytes)
        };
        // What lies between two borrowed ranges is a run that changed: one piece or two of the base.
        let near = (self.place..self.place.saturating_add(3)).find(|n| has(*n));
        let first = near.unwrap_or_else(|| base.piece_at(offset));
        let (pieces, at) = (&mut self.pieces, self.at);
        (self.place, _) = base.walk_from(first, offset, len, |piece, offset, from, to| {
            let bytes = (to - from) as u64;
            // Neighbours stay one: increments of increments do not make lists grow without end.
            match pieces.last_mut() {
                Some(last) if last.used == piece.used && last.offset + last.bytes == offset => {
                    last.bytes += bytes;
                }
                _ => {
                    pieces.push(Piece { start: at + from as u64, offset, bytes, used: piece.used });
                }
            }
        });
        self.at = self.at.saturating_add(bytes);
        Ok(())
    }

    /// The file, and the extents that it has no piece of: to be dropped where that may call out, since they may be free
    /// then.
    pub(super) fn finish(mut self) -> (MemFile, Vec<Arc<Used>>) {
        let mut counts = vec![0u32; self.used.len()];
        self.pieces.iter().for_each(|p| counts[p.used as usize] += 1);
        let mut without = Vec::new();
        if counts.contains(&0) {
            let mut places = Vec::with_capacity(counts.len());
            let all = std::mem::take(&mut self.used);
            for (used, count) in all.into_iter().zip(counts) {
                places.push(self.used.len() as u32);
                let has = if count > 0 { &mut self.used } else { &mut without };
                has.push(used);
            }
            self.pieces.iter_mut().for_each(|p| p.used = places[p.used as usize]);
        }
        (MemFile { bytes: self.at, pieces: self.pieces, used: self.used }, without)
    }
}
