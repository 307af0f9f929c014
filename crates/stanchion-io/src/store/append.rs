//! Chunks into a segment.

use rustix::io::Errno;
use stanchion_format::checksum::{Crc, Crc64, crc64};
use stanchion_format::limits;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_format::segment::{BLOCK, Entry, padded, put_group};

use super::files::{begin, name};
use super::source::{Aligned, Piece, Source};
use super::state::{Room, chunk_max};
use super::writer::Write;
use super::{Place, Store};
use crate::fs::Result as Sys;
use crate::trouble::cause;

/// Blocks through which goes what direct I/O does not take as it is.
const BOUNCE_BLOCKS: usize = 256;
/// Bytes that are copied and summed in one go: what stays in the processor's nearest cache.
const STEP_BYTES: usize = 32 << 10;

/// What a group still has to write, and the blocks that this needs.
struct Wave<'s> {
    store: &'s Store,
    room: &'s Room,
    bounce: Aligned,
    used: usize,
    /// Where in the file; from the bounce buffer (blocks from, to) or the piece (number, bytes from, to).
    parts: Vec<(u64, Part)>,
}

enum Part {
    Bounce(usize, usize),
    Piece(usize, usize, usize),
}

impl Store {
    /// Stores chunks; when it returns, they can be read, and after the next [`Store::sync`] they are durable.
    /// Several threads may call it at once: their writes go to the device side by side. On an error none of
    /// the chunks is stored.
    pub fn append(&self, pieces: &[Piece<'_>]) -> Result<Vec<Place>, Trouble> {
        for piece in pieces {
            let len = piece.from.len() as u64;
            let most = u64::from(limits::CHUNK_BYTES_MAX).min(chunk_max(self.config.segment_bytes));
            if len == 0 || len > most {
                let trouble = Trouble::new(Cause::Size { want: most, have: len });
                return Err(trouble.slot(piece.tag.slot).rank(piece.tag.rank));
            }
        }
        let mut places = Vec::with_capacity(pieces.len());
        while places.len() < pieces.len() {
            let rest = &pieces[places.len()..];
            let stored = self.room(rest).and_then(|room| self.group(room, rest));
            match stored {
                Ok(more) => places.extend(more),
                Err(trouble) => {
                    self.state().forget_places(&places);
                    return Err(trouble.slot(rest[0].tag.slot).rank(rest[0].tag.rank));
                }
            }
        }
        Ok(places)
    }

    /// Room for the first of `pieces` at least.
    fn room(&self, pieces: &[Piece<'_>]) -> Result<Room, Trouble> {
        let lens = pieces.iter().map(|p| p.from.len() as u32);
        loop {
            if let Some(room) = self.state().reserve(lens.clone()) {
                return Ok(room);
            }
            self.roll(pieces[0].from.len() as u32)?;
        }
    }

    /// Opens the next segment, unless another thread did.
    fn roll(&self, len: u32) -> Result<(), Trouble> {
        let one_at_a_time = self.rolling.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let next = {
            let mut state = self.state();
            if state.has_room(len) {
                return Ok(());
            }
            state.next().ok_or_else(|| Trouble::new(Cause::NoSpace).file(self.root_name()))?
        };
        let before = match begin(
            &*self.fs,
            &*self.writer,
            &next,
            (self.facts.direct, self.config.durable),
        ) {
            Ok(files) => self.state().made(&next, files.into()),
            Err(e) => {
                self.state().not_made(&next, e);
                return Err(Trouble::new(cause(e)).file(name(next.life.segment)));
            }
        };
        drop(one_at_a_time);
        // Others go on in the new one meanwhile.
        self.seal_now(before);
        Ok(())
    }

    /// Writes one group.
    fn group(&self, room: Room, pieces: &[Piece<'_>]) -> Result<Vec<Place>, Trouble> {
        let pieces = &pieces[..room.count];
        let written = self.write_group(&room, pieces);
        let (result, before) = match written {
            Ok(entries) => {
                let places = entries.iter().map(|e| Place::new(room.life, e)).collect();
                (Ok(places), self.state().written(&room, &entries))
            }
            Err(e) => {
                let trouble = Trouble::new(cause(e)).file(name(room.life.segment));
                (Err(trouble), self.state().not_written(&room, e))
            }
        };
        self.seal_now(before);
        result
    }

    fn write_group(&self, room: &Room, pieces: &[Piece<'_>]) -> Sys<Vec<Entry>> {
        // The header's block; each piece's tail, or all of a piece that lies badly.
        let align = self.facts.memory_align;
        let blocks = |p: &Piece<'_>| match p.from.is_aligned(align) {
            true => usize::from(!p.from.len().is_multiple_of(BLOCK)),
            false => p.from.len().div_ceil(BLOCK),
        };
        let needed = 1 + pieces.iter().map(blocks).sum::<usize>();
        let bounce = Aligned::blocks(needed.min(BOUNCE_BLOCKS));
        let mut wave = Wave { store: self, room, bounce, used: 0, parts: Vec::new() };
        let mut at = room.at + BLOCK as u64;
        let mut entries = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.iter().enumerate() {
            let len = piece.from.len();
            let crc = match piece.from.is_aligned(align) {
                true => wave.put_aligned(pieces, index, at)?,
                false => wave.put_copied(pieces, index, 0, at)?,
            };
            entries.push(Entry { tag: piece.tag, at, len: len as u32, crc });
            at += padded(len as u64);
        }
        wave.header(pieces, &entries)?;
        wave.flush(pieces)?;
        Ok(entries)
    }
}

impl Wave<'_> {
    /// A piece as it lies, but for its last bytes.
    fn put_aligned(&mut self, pieces: &[Piece<'_>], index: usize, at: u64) -> Sys<Crc> {
        let piece = &pieces[index];
        let len = piece.from.len();
        let whole = len - len % BLOCK;
        if whole > 0 {
            self.parts.push((at, Part::Piece(index, 0, whole)));
        }
        if whole < len {
            self.put_copied(pieces, index, whole, at + whole as u64)?;
        }
        Ok(piece.crc.unwrap_or_else(|| crc64(piece.from.bytes())))
    }

    /// A piece from byte `from` on through the bounce buffer; the checksum of these bytes, or what was said of
    /// the piece.
    fn put_copied(&mut self, pieces: &[Piece<'_>], index: usize, from: usize, at: u64) -> Sys<Crc> {
        let Piece { from: source, crc: said, .. } = &pieces[index];
        let bytes = &source.bytes()[from..];
        let mut crc = Crc64::new();
        let mut done = 0;
        while done < bytes.len() {
            let first = self.take(pieces, (bytes.len() - done).div_ceil(BLOCK))?;
            let room = self.used - first;
            let n = (bytes.len() - done).min(room * BLOCK);
            let into = &mut self.bounce[first * BLOCK..self.used * BLOCK];
            for (into, step) in
                into.chunks_mut(STEP_BYTES).zip(bytes[done..done + n].chunks(STEP_BYTES))
            {
                into[..step.len()].copy_from_slice(step);
                into[step.len()..].fill(0);
                if said.is_none() {
                    // Of the copy: what is stored is what was summed, whatever happens to the source.
                    crc.update(&into[..step.len()]);
                }
            }
            self.parts.push((at + done as u64, Part::Bounce(first, self.used)));
            done += n;
        }
        Ok(said.unwrap_or_else(|| crc.crc()))
    }

    /// Up to `count` blocks of the bounce buffer, one at least; the first one's number.
    fn take(&mut self, pieces: &[Piece<'_>], count: usize) -> Sys<usize> {
        if self.used * BLOCK == self.bounce.len() {
            self.flush(pieces)?;
        }
        let first = self.used;
        self.used = (first + count).min(self.bounce.len() / BLOCK);
        Ok(first)
    }

    /// The group's own block, when all checksums are known.
    fn header(&mut self, pieces: &[Piece<'_>], entries: &[Entry]) -> Sys<()> {
        let first = self.take(pieces, 1)?;
        let block = &mut self.bounce[first * BLOCK..(first + 1) * BLOCK];
        let block = block.try_into().expect("one block");
        put_group(block, self.room.life, self.room.at, entries);
        self.parts.push((self.room.at, Part::Bounce(first, first + 1)));
        Ok(())
    }

    /// Writes what there is and waits for it.
    fn flush(&mut self, pieces: &[Piece<'_>]) -> Result<(), Errno> {
        self.parts.sort_by_key(|(at, _)| *at);
        let write = |(offset, part): &(u64, Part)| {
            let from = match part {
                Part::Bounce(from, to) => Source::from(&self.bounce[from * BLOCK..to * BLOCK]),
                Part::Piece(index, from, to) => pieces[*index].from.part(*from, *to),
            };
            Write { from, offset: *offset }
        };
        let writes: Vec<Write<'_>> = self.parts.iter().map(write).collect();
        self.store.writer.write(self.room.files.target(), &writes)?;
        self.parts.clear();
        self.used = 0;
        Ok(())
    }
}
