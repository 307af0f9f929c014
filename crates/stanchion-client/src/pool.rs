//! Shared memory of the agent, and writing into it.
//!
//! What was mapped once stays mapped: mapping costs as much as the copy. Whether an extent may be written to is the
//! agent's word alone: what it lent, from its answer to `Lend` until this rank says `Complete`.

use crate::client::Client;
use crate::error::Error;
use stanchion_format::changed::ChangedWriter;
use stanchion_format::client::{Base, Filled, Lent, MemoryFile, Part, PartFrom, Request};
use stanchion_format::ids::{ExtentId, Key};
use stanchion_format::regions::ALIGN;
use stanchion_mem::copy::{Piece, copied_soon, copies_done};
use stanchion_mem::track::Run;
use stanchion_mem::{Mapping, MemError};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// What is lent at a time where it is handed over in turns, bytes.
const HAND_BYTES: u64 = 64 << 20;
/// Numbers of what streams hand over are below this ([`crate::alloc`]).
const HANDED_FIRST: u64 = 1 << 48;
/// Reservations grow by at least so much, bytes: one request for many small regions.
const RESERVE_STEP: u64 = 4 << 20;
const ZEROS: [u8; 4096] = [0; 4096];

/// Where the time of a copy went.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolTimes {
    /// Asking for memory, and waiting for it.
    pub wait: Duration,
    /// Copying.
    pub copy: Duration,
}

impl PoolTimes {
    pub(crate) fn add(&mut self, other: PoolTimes) {
        self.wait += other.wait;
        self.copy += other.copy;
    }
}

/// The agent's memory as far as it is mapped here.
#[derive(Debug, Default)]
pub(crate) struct PoolMap {
    maps: HashMap<ExtentId, Mapping>,
    /// What an answer brought could not be mapped, or the agent had no descriptors: it must say all again.
    in_vain: bool,
    /// Does the agent store what is full, and lend the memory again?
    stores: bool,
    /// What is full and was not said yet.
    filled: Vec<Filled>,
    expected: u64,
    reserved: u64,
}

impl PoolMap {
    /// Of an agent that stores what is full, or does not.
    pub(crate) fn new(stores: bool) -> PoolMap {
        PoolMap { stores, ..PoolMap::default() }
    }

    /// Is what is full to be handed over?
    pub(crate) fn stores(&self) -> bool {
        self.stores
    }

    /// It is full, and not written to any more.
    pub(crate) fn hand(&mut self, filled: Filled) {
        self.filled.push(filled);
    }

    /// Nothing is handed over of the dataset that begins.
    pub(crate) fn begin(&mut self) {
        self.filled.clear();
    }

    /// The request for more memory.
    pub(crate) fn wish(&mut self, bytes: u64) -> Request {
        let (filled, anew) = (std::mem::take(&mut self.filled), self.anew());
        Request::Lend { bytes, filled, anew }
    }

    /// Maps what is new. False if the answer makes no sense.
    pub(crate) fn take(&mut self, lent: &[Lent], fds: Vec<OwnedFd>) -> Result<bool, Error> {
        let fresh = lent.iter().filter(|l| l.fresh).count();
        let known = lent.iter().all(|l| {
            l.bytes > 0
                && (l.fresh || self.maps.get(&l.id).is_some_and(|m| m.len() as u64 == l.bytes))
        });
        if fresh != fds.len() || !known {
            return Ok(false);
        }
        let fresh = lent.iter().filter(|l| l.fresh).zip(fds);
        for (lent, fd) in fresh {
            let mapped = Mapping::of(fd, lent.bytes).and_then(|mapping| {
                mapping.warm(&|| false)?;
                Ok(mapping)
            });
            self.maps.insert(lent.id, mapped.inspect_err(|_| self.in_vain = true)?);
        }
        Ok(true)
    }

    /// The agent could not give what it lent.
    pub(crate) fn refused(&mut self) {
        self.in_vain = true;
    }

    /// Must the agent say again what it has said? Asked once for each request.
    pub(crate) fn anew(&mut self) -> bool {
        std::mem::take(&mut self.in_vain)
    }

    /// A part of what is written has `new` bytes now, not `old`; what to reserve then, if it is more than before.
    pub(crate) fn expect(&mut self, old: u64, new: u64) -> Option<u64> {
        let page = |bytes: u64| bytes.checked_next_multiple_of(ALIGN).unwrap_or(bytes);
        self.expected = self.expected.saturating_sub(page(old)).saturating_add(page(new));
        let bytes = self.expected.saturating_add(ALIGN);
        if bytes <= self.reserved {
            return None;
        }
        self.reserved = bytes.checked_next_multiple_of(RESERVE_STEP).unwrap_or(bytes);
        Some(self.reserved)
    }

    /// Does a child that is forked inherit these?
    pub(crate) fn inherit(&self, ids: &[ExtentId], inherit: bool) -> Result<(), Error> {
        ids.iter().try_for_each(|id| Ok(self.map(*id).inherit(inherit)?))
    }

    /// The memory of what was lent.
    pub(crate) fn map(&self, id: ExtentId) -> &Mapping {
        self.maps.get(&id).expect("what is lent was mapped when it came")
    }
}

/// A file that is written into the pool from its beginning to its end.
#[derive(Debug)]
pub(crate) struct PoolWriter {
    /// Bytes that are still to come, as far as that is known.
    left: u64,
    written: u64,
    /// Lent and not full; how much of the first is used.
    lent: VecDeque<Lent>,
    used: u64,
    parts: Vec<Part>,
    /// Which of it is in `parts`, if the rest is another file's.
    changed: Option<ChangedWriter>,
    /// Is what is full handed over?
    hands: bool,
    /// From which part on the extent is referred to that is being filled.
    first: usize,
    /// Extents that are full and not handed over, and which parts refer to them.
    full: Vec<(ExtentId, Range<usize>)>,
    /// How many were handed over.
    handed: u64,
    times: PoolTimes,
}

/// What a write came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is in the pool.
    Done,
    /// The pool is too small for it.
    TooLarge,
}

impl PoolWriter {
    /// For about `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> PoolWriter {
        PoolWriter {
            left: bytes,
            written: 0,
            lent: VecDeque::new(),
            used: 0,
            parts: Vec::new(),
            changed: None,
            hands: false,
            first: 0,
            full: Vec::new(),
            handed: 0,
            times: PoolTimes::default(),
        }
    }

    /// Hands over what is full, where the agent wants it: bytes are in their place when [`PoolWriter::put`] returns.
    pub(crate) fn handing(mut self, client: &Client) -> PoolWriter {
        self.hands = client.pool().stores();
        self
    }

    /// What is not written is another file's.
    pub(crate) fn over(mut self) -> PoolWriter {
        self.changed = Some(ChangedWriter::default());
        self
    }

    /// Bytes so far.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Adds bytes.
    pub(crate) fn put(&mut self, client: &mut Client, bytes: &[u8]) -> Result<Put, Error> {
        self.timed(|w| w.add(client, bytes, |mapping, offset, bytes| mapping.write(offset, bytes)))
    }

    /// Adds `bytes`, which the base has, but for `runs` of them.
    pub(crate) fn put_changed(
        &mut self,
        client: &mut Client,
        bytes: &[u8],
        runs: &[Run],
    ) -> Result<Put, Error> {
        // Once for all: there are thousands.
        self.timed(|w| {
            let mut done = 0;
            for (n, run) in runs.iter().enumerate() {
                if let Some(next) = runs.get(n + 1) {
                    copied_soon(&bytes[next.offset..]);
                }
                w.same((run.offset - done) as u64);
                let end = run.offset + run.len;
                let put = w.add(client, &bytes[run.offset..end], |mapping, at, bytes| {
                    mapping.write_past_caches(at, bytes);
                })?;
                if put == Put::TooLarge {
                    return Ok(put);
                }
                done = end;
            }
            copies_done();
            w.same((bytes.len() - done) as u64);
            Ok(Put::Done)
        })
    }

    /// What follows begins at a page of its extent: pages are copied fastest to where they are pages.
    pub(crate) fn align(&mut self) {
        let Some(first) = self.lent.front() else { return };
        self.used = self.used.next_multiple_of(ALIGN).min(first.bytes);
        if self.used == first.bytes {
            self.lent.pop_front();
            self.used = 0;
        }
    }

    /// All of this is copying, but for the waiting in between.
    fn timed(
        &mut self,
        work: impl FnOnce(&mut PoolWriter) -> Result<Put, Error>,
    ) -> Result<Put, Error> {
        let (start, waited) = (Instant::now(), self.times.wait);
        let done = work(self);
        self.times.copy += start.elapsed().saturating_sub(self.times.wait - waited);
        done
    }

    /// Adds bytes that are to be copied later: as `pieces` say, before the file is read.
    pub(crate) fn put_later(
        &mut self,
        client: &mut Client,
        bytes: &[u8],
        pieces: &mut Vec<Piece>,
    ) -> Result<Put, Error> {
        self.add(client, bytes, |mapping, offset, bytes| {
            assert!(offset + bytes.len() <= mapping.len(), "a piece lies within its extent");
            let dst = mapping.as_ptr().wrapping_add(offset);
            pieces.push(Piece { src: bytes.as_ptr(), dst, len: bytes.len() });
        })
    }

    fn add(
        &mut self,
        client: &mut Client,
        mut bytes: &[u8],
        mut copy: impl FnMut(&Mapping, usize, &[u8]),
    ) -> Result<Put, Error> {
        while !bytes.is_empty() {
            let Some(first) = self.lent.front().copied() else {
                let start = Instant::now();
                let mut wanted = self.left.max(bytes.len() as u64);
                if self.hands {
                    // Others are not to wait for all of this, nor the device for its end.
                    wanted = wanted.min(HAND_BYTES);
                    self.hand_over(client);
                }
                let lent = client.lend("checkpoint", wanted)?;
                self.times.wait += start.elapsed();
                if lent.is_empty() {
                    return Ok(Put::TooLarge);
                }
                self.lent.extend(lent);
                continue;
            };
            let room = usize::try_from(first.bytes - self.used)
                .map_err(|_| MemError::Size(first.bytes))?;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            copy(client.pool().map(first.id), self.used as usize, now);
            self.note(first.id, self.used, now.len() as u64);
            self.used += now.len() as u64;
            if self.used == first.bytes {
                self.lent.pop_front();
                self.used = 0;
                let from = std::mem::replace(&mut self.first, self.parts.len());
                if self.hands {
                    self.full.push((first.id, from..self.parts.len()));
                }
            }
            bytes = later;
        }
        Ok(Put::Done)
    }

    /// Hands over what is full, with the wish that follows: its bytes have another name from now on.
    fn hand_over(&mut self, client: &mut Client) {
        copies_done();
        for (full, parts) in std::mem::take(&mut self.full) {
            let number = HANDED_FIRST + self.handed;
            self.handed += 1;
            for part in &mut self.parts[parts] {
                if let PartFrom::Extent { id, offset } = part.from
                    && id == full
                {
                    part.from = PartFrom::Filled { number, offset };
                }
            }
            client.hand_over(Filled { id: full, number });
        }
    }

    /// Time that copying took elsewhere.
    pub(crate) fn copied(&mut self, took: Duration) {
        self.times.copy += took;
    }

    /// The extents that it is in.
    pub(crate) fn extents(&self) -> Vec<ExtentId> {
        let mut ids: Vec<ExtentId> = Vec::new();
        for part in &self.parts {
            if let PartFrom::Extent { id, .. } = part.from
                && ids.last() != Some(&id)
            {
                ids.push(id);
            }
        }
        ids
    }

    /// Adds what the base has there.
    pub(crate) fn same(&mut self, bytes: u64) {
        self.written += bytes;
        self.changed.as_mut().expect("it is over another file").same(bytes);
    }

    /// Adds zeros up to `offset`.
    pub(crate) fn pad(&mut self, client: &mut Client, offset: u64) -> Result<Put, Error> {
        while self.written < offset {
            let zeros =
                ZEROS.len().min(usize::try_from(offset - self.written).unwrap_or(usize::MAX));
            if self.put(client, &ZEROS[..zeros])? == Put::TooLarge {
                return Ok(Put::TooLarge);
            }
        }
        Ok(Put::Done)
    }

    fn note(&mut self, id: ExtentId, offset: u64, bytes: u64) {
        self.written += bytes;
        self.left = self.left.saturating_sub(bytes);
        if let Some(changed) = &mut self.changed {
            changed.own(bytes);
        }
        match self.parts.last_mut() {
            Some(Part { from: PartFrom::Extent { id: last, offset: at }, bytes: had })
                if *last == id && *at + *had == offset =>
            {
                *had += bytes;
            }
            _ => self.parts.push(Part { from: PartFrom::Extent { id, offset }, bytes }),
        }
    }

    /// The file as it is to be declared, and the time it took. `base`: which it is over.
    pub(crate) fn finish(
        self,
        path: String,
        base: Option<(Key, String)>,
    ) -> (MemoryFile, u64, PoolTimes) {
        assert_eq!(base.is_some(), self.changed.is_some(), "what is the same is somebody's");
        let over = |((key, path), changed): ((Key, String), ChangedWriter)| Base {
            key,
            path,
            changed: changed.finish(),
        };
        let base = base.zip(self.changed).map(over);
        (MemoryFile { path, base, parts: self.parts }, self.written, self.times)
    }
}
