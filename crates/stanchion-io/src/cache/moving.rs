//! From memory to the store: what ranks completed is appended behind them, and its memory given back.
//!
//! The threads are the caller's: [`Cache::store_wait`] says when there is something to do, [`Cache::store_some`] does
//! it. A device that is full or fails costs nothing but room in the pool: what cannot be stored stays in memory and is
//! tried again later, at growing intervals (FM-T6).

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::manifest::FileDecl;
use stanchion_format::peer::{Cause, Trouble};

use super::held::{Last, Used};
use super::memory::Memory;
use super::{Cache, cancelled, slot_dir};
use crate::fs::{self, How};
use crate::store::{Piece, Place, Source, Store, Tag};
use crate::trouble::cause;

/// Bytes of one append: a few chunks, so that several requests are under way for each thread.
const BATCH_BYTES: u64 = 32 << 20;
/// After this many failures in a row nothing more is tried, unless space comes back: datasets stay in memory.
pub const STORE_TRIES_MAX: u32 = 16;
/// Pause after the first failure; it doubles with each, up to the longest.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Somebody who waits for data to be stored looks so often whether he is still wanted.
const LOOK: Duration = Duration::from_millis(100);

/// Called with the first of each row of failures.
pub type OnTrouble = Box<dyn Fn(&Trouble) + Send + Sync>;

/// What is on its way to the store.
pub(super) struct Moves {
    store: Arc<Store>,
    chunk_bytes: u64,
    trouble: OnTrouble,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// What a thread stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Whatever waits.
    All,
    /// What ranks handed over of a dataset that they still write: while they are in the checkpoint, nothing is computed
    /// that storing could slow down.
    Handed,
}

#[derive(Default)]
struct Queue {
    ready: VecDeque<Weak<Used>>,
    /// Comes first.
    handed: VecDeque<Weak<Used>>,
    /// In a row.
    failures: u32,
    last: Option<Trouble>,
    not_before: Option<Instant>,
    stopping: bool,
}

impl fmt::Debug for Moves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Moves").field("store", &self.store.root()).finish_non_exhaustive()
    }
}

/// A part of a batch.
struct Part {
    used: Arc<Used>,
    memory: Arc<dyn Memory>,
    range: (u64, u64),
}

impl Moves {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has something to be stored.
    pub(super) fn push(&self, used: &Arc<Used>) {
        self.queue().ready.push_back(Arc::downgrade(used));
        self.changed.notify_all();
    }

    /// The same, of a dataset that is still written.
    pub(super) fn push_handed(&self, used: &Arc<Used>) {
        self.queue().handed.push_back(Arc::downgrade(used));
        self.changed.notify_all();
    }

    pub(super) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Chunks that nobody needs any more. Where the device was full there may be room now.
    pub(super) fn forget(&self, places: &[Place]) {
        if places.is_empty() {
            return;
        }
        self.store.forget(places);
        let mut queue = self.queue();
        if queue.not_before.is_some()
            && queue.last.as_ref().is_some_and(|t| t.cause == Cause::NoSpace)
        {
            queue.not_before = None;
            // One more try, after however many.
            queue.failures = queue.failures.min(STORE_TRIES_MAX - 1);
            self.changed.notify_all();
        }
    }

    pub(super) fn read(
        &self,
        place: &Place,
        skip: u64,
        buf: &mut [u8],
        last: &mut Last,
    ) -> fs::Result<()> {
        // What is damaged is as good as unreadable, and is repaired like that.
        let failed = |trouble: Trouble| match trouble.cause {
            Cause::Os(errno) => Errno::from_raw_os_error(errno),
            _ => Errno::IO,
        };
        if skip == 0 && buf.len() == place.len as usize {
            return self.store.read(place, buf).map_err(failed);
        }
        let chunk = last.chunk(place, |buf| self.store.read(place, buf).map_err(failed))?;
        buf.copy_from_slice(&chunk[skip as usize..][..buf.len()]);
        Ok(())
    }

    /// Stores a piece that was repaired.
    pub(super) fn append_bytes(&self, tag: Tag, bytes: &[u8]) -> fs::Result<Place> {
        let piece = Piece { tag, from: Source::from(bytes), crc: None };
        match self.store.append(&[piece]) {
            Ok(places) => Ok(places[0]),
            Err(Trouble { cause: Cause::NoSpace, .. }) => Err(Errno::NOSPC),
            Err(Trouble { cause: Cause::Os(errno), .. }) => Err(Errno::from_raw_os_error(errno)),
            Err(_) => Err(Errno::IO),
        }
    }

    pub(super) fn reader(&self, place: &Place) -> Result<OwnedFd, Trouble> {
        self.store.reader(place)
    }

    /// What is to be stored next.
    fn batch(&self, share: Share) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut left = BATCH_BYTES;
        while left > 0 {
            let Some((next, handed)) = self.queue().pop(share) else { break };
            let Some(used) = next.upgrade() else { continue };
            let Some((memory, ranges)) = used.take(left) else { continue };
            if used.is_left() {
                let mut queue = self.queue();
                let to = if handed { &mut queue.handed } else { &mut queue.ready };
                to.push_front(next);
            }
            for range in ranges {
                left = left.saturating_sub(range.1);
                parts.push(Part { used: used.clone(), memory: memory.clone(), range });
            }
        }
        parts
    }

    fn append(&self, parts: &[Part]) -> Result<Vec<Place>, Trouble> {
        // Memory that cannot be pointed to is copied.
        let copies: Vec<Option<Vec<u8>>> = parts
            .iter()
            .map(|part| {
                let (offset, bytes) = part.range;
                part.memory.at(offset).is_none().then(|| {
                    let mut copy = vec![0; bytes as usize];
                    part.memory.read(offset, &mut copy);
                    copy
                })
            })
            .collect();
        let pieces: Vec<Piece<'_>> = parts
            .iter()
            .zip(&copies)
            .map(|(part, copy)| {
                let (used, (offset, bytes)) = (&part.used, part.range);
                let tag = Tag { offset, ..used.tag };
                let crc = used.known(offset, bytes);
                Piece { tag, crc, from: part.source(copy.as_deref()) }
            })
            .collect();
        self.store.append(&pieces)
    }

    fn failed(&self, trouble: Trouble) {
        let mut queue = self.queue();
        queue.failures = queue.failures.saturating_add(1);
        let pause = PAUSE.saturating_mul(1 << queue.failures.min(10).saturating_sub(1));
        queue.not_before = Some(Instant::now() + pause.min(PAUSE_MAX));
        queue.last = Some(trouble.clone());
        let first = queue.failures == 1;
        drop(queue);
        if first {
            (self.trouble)(&trouble);
        }
        self.changed.notify_all();
    }

    fn worked(&self) {
        let mut queue = self.queue();
        (queue.failures, queue.last, queue.not_before) = (0, None, None);
        drop(queue);
        self.changed.notify_all();
    }
}

impl Queue {
    fn has(&self, share: Share) -> bool {
        !self.handed.is_empty() || share == Share::All && !self.ready.is_empty()
    }

    /// The next one, and whether it was handed over.
    fn pop(&mut self, share: Share) -> Option<(Weak<Used>, bool)> {
        let handed = self.handed.pop_front().map(|used| (used, true));
        let mut any = || self.ready.pop_front().map(|used| (used, false));
        handed.or_else(|| if share == Share::All { any() } else { None })
    }
}

impl Part {
    fn source<'a>(&'a self, copy: Option<&'a [u8]>) -> Source<'a> {
        let (offset, bytes) = self.range;
        match (copy, self.memory.at(offset)) {
            (Some(copy), _) => Source::from(copy),
            // SAFETY: the memory is this part's, and ends behind the range (`Used::want`); `self` keeps it as long as
            // the source. A rank that writes there still breaks the protocol, since it has completed; a repair that
            // does makes what is stored void (`Used::moved`), whatever was read.
            (None, Some(at)) => unsafe { Source::raw(at, bytes as usize) },
            (None, None) => Source::from(&[][..]),
        }
    }
}

impl Cache {
    /// From now on what ranks complete in memory goes to this store, in chunks of at most `chunk_bytes`. Before the
    /// first file.
    pub fn use_store(&mut self, store: Arc<Store>, chunk_bytes: u64, trouble: OnTrouble) {
        let moves = Moves {
            store,
            chunk_bytes: chunk_bytes.max(1),
            trouble,
            queue: Mutex::default(),
            changed: Condvar::new(),
        };
        self.memory.use_moves(Arc::new(moves));
    }

    /// Is what ranks complete in memory stored?
    pub fn has_store(&self) -> bool {
        self.memory.moves().is_some()
    }

    /// Waits until there is something to be stored, at most `limit`. `false`: there is not, or not yet.
    pub fn store_wait(&self, share: Share, limit: Duration) -> bool {
        let Some(moves) = self.memory.moves() else { return false };
        let until = Instant::now() + limit;
        let mut queue = moves.queue();
        loop {
            let now = Instant::now();
            let tried = queue.failures < STORE_TRIES_MAX && queue.has(share);
            let pause =
                queue.not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
            if tried && pause.is_zero() && !queue.stopping {
                return true;
            }
            let mut left = until.saturating_duration_since(now);
            if left.is_zero() || queue.stopping {
                return false;
            }
            if tried {
                left = left.min(pause);
            }
            let waited = moves.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Nobody waits in [`Cache::store_wait`] any more.
    pub fn store_stop(&self) {
        if let Some(moves) = self.memory.moves() {
            moves.queue().stopping = true;
            moves.changed.notify_all();
        }
    }

    /// Stores some of what waits; `false` if nothing does. An error is told to whom [`Cache::use_store`] named, and
    /// what it was about waits again.
    pub fn store_some(&self, share: Share) -> bool {
        let Some(moves) = self.memory.moves() else { return false };
        let parts = moves.batch(share);
        if parts.is_empty() {
            return false;
        }
        let (places, trouble) = match moves.append(&parts) {
            Ok(places) => (places.into_iter().map(Some).collect(), None),
            Err(trouble) => (vec![None; parts.len()], Some(trouble)),
        };
        let mut useless = Vec::new();
        let mut touched: Vec<Arc<Used>> = Vec::new();
        for (part, place) in parts.into_iter().zip(places) {
            useless.extend(part.used.moved(part.range, place));
            if touched.last().is_none_or(|last| !Arc::ptr_eq(last, &part.used)) {
                touched.push(part.used);
            }
        }
        moves.forget(&useless);
        for used in &touched {
            if used.is_left() {
                moves.push(used);
            } else if used.is_clean() {
                self.memory.stored(used);
            }
        }
        match trouble {
            None => moves.worked(),
            Some(trouble) => moves.failed(trouble),
        }
        true
    }

    /// Waits until all that a slot has of a dataset in memory is stored, and makes that and its files durable. An error
    /// is that of the last try: the data is still in memory.
    pub fn make_durable(
        &self,
        key: Key,
        slot: SlotId,
        files: &[FileDecl],
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        for decl in files {
            let trouble = |e| Trouble::new(cause(e)).slot(slot).rank(decl.rank).file(&decl.path);
            let path = self.file_path(key, slot, decl.rank, &decl.path);
            let file = self.open_file(&path, How::Read).map_err(trouble)?;
            file.sync_data().map_err(trouble)?;
        }
        let Some(moves) = self.memory.moves() else { return Ok(()) };
        let used = self.memory.used_below(&slot_dir(key, slot));
        let mut queue = moves.queue();
        while !used.iter().all(|u| u.is_stored()) {
            if cancel() {
                return Err(cancelled());
            }
            if queue.failures >= STORE_TRIES_MAX || queue.stopping {
                let last = queue.last.clone();
                return Err(last.unwrap_or_else(cancelled).slot(slot));
            }
            let waited = moves.changed.wait_timeout(queue, LOOK);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        moves.store.sync().map_err(|t| t.slot(slot))
    }

    /// Removes the store's files, with the cache's.
    pub(super) fn remove_store(&self) {
        if let Some(moves) = self.memory.moves() {
            moves.store.remove_all();
        }
    }

    /// Where a store is, below the cache's root.
    pub fn store_dir(root: &Path) -> std::path::PathBuf {
        root.join("store")
    }
}
