//! Files of a dataset whose bytes are in the agent's shared memory: they have no file in the cache directory, and
//! are read, verified, repaired, given to other agents and flushed like those that have.
//!
//! A file is a list of pieces of extents. Several files may have pieces of one extent: of a dataset that was
//! written incrementally, what did not change is what its predecessor has. An extent is given back when the last
//! file that has a piece of it is forgotten and nobody reads from it any more (FM-P3), or when all that files have of it
//! is in the store ([`super::moving`]).

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;
use stanchion_format::checksum::{Crc, joined};
use stanchion_format::client::{Filled, MemoryFile, PartFrom};
use stanchion_format::ids::{ExtentId, Key, RankId, SlotId};
use stanchion_format::index::key_dir;
use stanchion_format::peer::{Cause, Trouble};

use super::held::{Last, Lies, Used};
use super::moving::Moves;
use super::pieces::{Building, MemFile, Of};
use super::vouch::Vouched;
use super::{Cache, rank_dir};
use crate::fs::{self, Handle, Kind, Stat};
use crate::store::{Place, Tag};

/// Memory that is shared with other processes: bytes are copied in and out, whatever others do there.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Its size, bytes.
    fn bytes(&self) -> u64;
    /// Copies from `offset`; within the size.
    fn read(&self, offset: u64, buf: &mut [u8]);
    /// Copies to `offset`; within the size.
    fn write(&self, offset: u64, bytes: &[u8]);
    /// The memory as a file, from the extent's beginning on.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Where it is mapped, from `offset` on, for the kernel to write from.
    fn at(&self, offset: u64) -> Option<NonNull<u8>> {
        let _ = offset;
        None
    }
}

/// A smaller piece is sent as fast by copying it, together with its neighbours.
const SEND_BYTES_MIN: u64 = 64 << 10;

/// See [`MemHandle::sum_at`].
const JOIN_BYTES: u64 = 256 << 10;

/// Called with each extent that no file has any more.
pub type OnFreed = Box<dyn Fn(ExtentId) + Send + Sync>;

struct MemHandle {
    file: Arc<MemFile>,
    last: Mutex<Last>,
    vouched: Vouched,
}

impl Handle for MemHandle {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> fs::Result<usize> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut failed = Ok(());
        let done = self.file.walk(offset, buf.len(), |used, at, from, to| {
            if failed.is_ok() {
                failed = used.read(at, &mut buf[from..to], &mut last);
            }
        });
        failed.map(|()| done)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> fs::Result<usize> {
        let mut failed = Ok(());
        let done = self.file.walk(offset, bytes.len(), |used, at, from, to| {
            if failed.is_ok() {
                failed = used.write(at, &bytes[from..to]);
            }
        });
        failed?;
        // It has the size it has.
        if done == 0 && !bytes.is_empty() { Err(Errno::FBIG) } else { Ok(done) }
    }

    fn send_to(&self, socket: BorrowedFd<'_>, offset: u64, bytes: u64) -> Option<fs::Result<u64>> {
        if offset >= self.file.bytes {
            return None;
        }
        let (used, at, len) = self.file.pieces(offset).next()?;
        let step = len.min(bytes);
        if step < SEND_BYTES_MIN.min(bytes) {
            return None;
        }
        used.send_to(socket, at, step)
    }

    fn sum_at(&self, offset: u64, bytes: u64) -> fs::Result<Option<Crc>> {
        // Joining two sums takes as long as summing so many bytes: pages from everywhere are read instead. Two pieces
        // are any chunk that lies across the end of an extent.
        if self.file.pieces_within(offset, bytes) as u64 > 2 + bytes / JOIN_BYTES {
            return Ok(None);
        }
        let mut sum = None;
        let mut known = Ok(true);
        let len = usize::try_from(bytes).map_err(|_| Errno::FBIG)?;
        let done = self.file.walk(offset, len, |used, at, from, to| {
            let len = (to - from) as u64;
            let next = match known {
                Ok(true) => used.sum(at, len, &self.vouched),
                _ => return,
            };
            match (next, sum) {
                (Ok(Some(next)), Some(before)) => sum = Some(joined(before, next, len)),
                (Ok(Some(next)), None) => sum = Some(next),
                (Ok(None), _) => known = Ok(false),
                (Err(e), _) => known = Err(e),
            }
        });
        let known = known?;
        Ok(sum.filter(|_| known && done == len))
    }

    fn vouch(&self, offset: u64, bytes: &[u8]) -> fs::Result<()> {
        let mut same = Ok(());
        self.file.walk(offset, bytes.len(), |used, at, from, to| {
            if same.is_ok() {
                same = used.vouch(at, &bytes[from..to], &self.vouched);
            }
        });
        same
    }

    fn set_len(&self, bytes: u64) -> fs::Result<()> {
        if bytes == self.file.bytes { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn set_mode(&self, _mode: u32) -> fs::Result<()> {
        Ok(())
    }

    fn sync(&self) -> fs::Result<()> {
        Ok(())
    }

    fn stat(&self) -> fs::Result<Stat> {
        let uid = rustix::process::geteuid().as_raw();
        Ok(Stat { kind: Kind::File, bytes: self.file.bytes, mode: 0o600, uid })
    }
}

/// All files in memory, by their place below the cache's root.
pub(super) struct MemFiles {
    files: Mutex<Table>,
    freed: Arc<OnFreed>,
    moves: Option<Arc<Moves>>,
}

#[derive(Default)]
struct Table {
    files: HashMap<PathBuf, Arc<MemFile>>,
    /// By the extent's number, as long as its memory is theirs.
    used: HashMap<ExtentId, Weak<Used>>,
    /// Those of files that were taken over, and are not on their way to the store yet.
    fresh: Vec<Arc<Used>>,
    /// Of which ranks were told where in memory they are.
    pinned: Vec<Weak<Used>>,
    /// What ranks handed over and did not complete yet, by number.
    handed: HashMap<(Key, SlotId, RankId), HashMap<u64, Arc<Used>>>,
    /// Stored, and with their memory as long as nobody wants it; oldest first.
    clean: VecDeque<Weak<Used>>,
    /// Bytes of memory that are wanted back.
    wanted: u64,
    /// Why there are no such files.
    refused: HashMap<PathBuf, Cause>,
}

impl fmt::Debug for MemFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFiles").field("files", &self.table().files.len()).finish()
    }
}

impl MemFiles {
    pub(super) fn new(freed: OnFreed) -> MemFiles {
        MemFiles { files: Mutex::default(), freed: Arc::new(freed), moves: None }
    }

    pub(super) fn use_moves(&mut self, moves: Arc<Moves>) {
        self.moves = Some(moves);
    }

    pub(super) fn moves(&self) -> Option<&Arc<Moves>> {
        self.moves.as_ref()
    }

    /// All of an extent is in the store: its memory is given back, now or when it is wanted.
    pub(super) fn stored(&self, used: &Arc<Used>) {
        let mut table = self.table();
        if used.is_settled() || table.wanted > 0 {
            table.wanted = table.wanted.saturating_sub(used.bytes);
            MemFiles::release(&mut table, used);
        } else {
            table.clean.push_back(Arc::downgrade(used));
        }
    }

    /// Gives the memory of some that are stored back; what they are too few for, others give that come to be stored.
    fn reclaim(&self, bytes: u64) {
        let mut table = self.table();
        table.wanted = table.wanted.max(bytes);
        while table.wanted > 0 {
            let Some(next) = table.clean.pop_front() else { break };
            let Some(used) = next.upgrade().filter(|u| u.is_clean()) else { continue };
            table.wanted = table.wanted.saturating_sub(used.bytes);
            MemFiles::release(&mut table, &used);
        }
    }

    /// Gives an extent's memory back, if all of it is in the store.
    fn release(table: &mut Table, used: &Arc<Used>) {
        // First nobody finds it under its number any more, which is another one's when it is back.
        let mine = table.used.get(&used.id).is_some_and(|u| u.as_ptr() == Arc::as_ptr(used));
        if used.is_clean() {
            if mine {
                table.used.remove(&used.id);
            }
            // Within the lock: between a look-up and the file that comes of it there must be no release.
            used.release();
        }
    }

    /// All extents that files below a directory have pieces of.
    pub(super) fn used_below(&self, dir: &Path) -> Vec<Arc<Used>> {
        let table = self.table();
        let files = table.files.iter().filter(|(path, _)| path.starts_with(dir));
        let files: Vec<Arc<MemFile>> = files.map(|(_, file)| file.clone()).collect();
        drop(table);
        let mut used: Vec<Arc<Used>> =
            files.iter().flat_map(|file| file.extents().iter().cloned()).collect();
        used.sort_by_key(|u| Arc::as_ptr(u).addr());
        used.dedup_by_key(|u| Arc::as_ptr(u).addr());
        used
    }

    /// Nobody reads any more what [`Cache::pieces`] told.
    pub(super) fn unpin(&self) {
        let pinned = std::mem::take(&mut self.table().pinned);
        for used in pinned.iter().filter_map(Weak::upgrade) {
            used.unpin();
            if used.is_clean() {
                self.stored(&used);
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, path: &Path) -> Option<Box<dyn Handle>> {
        let file = self.table().files.get(path).cloned()?;
        Some(Box::new(MemHandle { file, last: Mutex::default(), vouched: Vouched::default() }))
    }

    /// Why a file that a rank had in memory is not one of the dataset's.
    pub(super) fn refused(&self, path: &Path) -> Option<Cause> {
        self.table().refused.get(path).copied()
    }

    /// Bytes of a file are not what they were: nothing is to be built on it.
    pub(super) fn spoiled(&self, path: &Path) {
        if let Some(file) = self.table().files.get(path) {
            file.spoil();
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        let table = std::mem::take(&mut *self.table());
        drop(table);
    }

    /// Forgets files. They are dropped outside of the lock, since that calls out.
    pub(super) fn remove(&self, gone: impl Fn(&Path, u64) -> bool) {
        let removed: Vec<_> = {
            let mut table = self.table();
            let paths: Vec<PathBuf> = table
                .files
                .iter()
                .filter(|(path, file)| gone(path, file.bytes))
                .map(|(path, _)| path.clone())
                .collect();
            let removed = paths.iter().filter_map(|path| table.files.remove(path)).collect();
            table.used.retain(|_, used| used.strong_count() > 0);
            table.refused.retain(|path, _| !gone(path, 0));
            removed
        };
        drop::<Vec<Arc<MemFile>>>(removed);
    }
}

impl Cache {
    /// Who is to know which extents no file has any more. Before the first file.
    pub fn on_freed(&mut self, freed: OnFreed) {
        self.memory.freed = Arc::new(freed);
    }

    /// A rank's file is in memory from now on. `extent` gives the memory of an extent; each that the file names is
    /// reported as freed sooner or later, also if this fails.
    pub fn keep(
        &self,
        (key, slot, rank): (Key, SlotId, RankId),
        file: &MemoryFile,
        bytes: u64,
        extent: impl Fn(ExtentId) -> Option<Arc<dyn Memory>>,
    ) -> Result<(), Cause> {
        let dir = rank_dir(key, slot, rank);
        let mut table = self.memory.table();
        let base = match &file.base {
            None => Ok(None),
            Some(base) => {
                let known = table.files.get(&rank_dir(base.key, slot, rank).join(&base.path));
                match known {
                    None => Err(Cause::Missing),
                    Some(known) if known.is_spoiled() => Err(Cause::Damaged),
                    Some(known) => Ok(Some((known.clone(), base.changed.clone()))),
                }
            }
        };
        let mut trouble = base.as_ref().err().copied();
        let mut built = Building::new(file.parts.len());
        let tag = Tag { key, slot, rank, file: 0, offset: 0 };
        let mut fresh: Vec<Arc<Used>> = Vec::new();
        // Taken out while the table is changed.
        let handed = table.handed.remove(&(key, slot, rank)).unwrap_or_default();
        for part in &file.parts {
            let found = match part.from {
                PartFrom::Extent { id, offset } => {
                    let of = Of::Lent(id);
                    let index = match built.known(of) {
                        Some(index) => Ok(index),
                        None => {
                            let used = self.memory.used(&mut table, id, tag, &extent);
                            used.map(|used| built.add(of, used))
                        }
                    };
                    index.and_then(|index| {
                        let at = built.bytes();
                        built.put(index, offset, part.bytes)?;
                        if self.memory.wants(built.extent(index), offset, part.bytes, at) {
                            fresh.push(built.extent(index).clone());
                        }
                        Ok(())
                    })
                }
                PartFrom::Filled { number, offset } => {
                    let of = Of::Handed(number);
                    let index = match built.known(of) {
                        Some(index) => Ok(index),
                        None => match handed.get(&number) {
                            Some(used) => Ok(built.add(of, used.clone())),
                            None => Err(Cause::Malformed),
                        },
                    };
                    index.and_then(|index| built.put(index, offset, part.bytes))
                }
            };
            if let Err(cause) = found {
                trouble.get_or_insert(cause);
            }
        }
        let own = built.finish();
        let (built, unfit) = match base.ok().flatten() {
            None => (MemFile::of(own), None),
            Some((base, changed)) => MemFile::over(base, changed, own),
        };
        trouble = trouble.or(unfit);
        if trouble.is_none() && built.bytes != bytes {
            trouble = Some(Cause::Size { want: bytes, have: built.bytes });
        }
        let built = Arc::new(built);
        let kept = built.clone();
        let old = match trouble {
            None => table.files.insert(dir.join(&file.path), built),
            Some(cause) => {
                table.refused.insert(dir.join(&file.path), cause);
                Some(built)
            }
        };
        if !handed.is_empty() {
            table.handed.insert((key, slot, rank), handed);
        }
        fresh.dedup_by_key(|u| Arc::as_ptr(u).addr());
        table.fresh.append(&mut fresh);
        drop(table);
        drop(old);
        kept.shorten();
        trouble.map_or(Ok(()), Err)
    }

    /// These extents are full, and of a dataset that the rank still writes: they are on their way to the store. Parts of
    /// files name them by their numbers, until [`Cache::store_kept`].
    pub fn take(
        &self,
        (key, slot, rank): (Key, SlotId, RankId),
        filled: impl Iterator<Item = (Filled, Option<Arc<dyn Memory>>)>,
    ) {
        let chunk = self.memory.moves.as_ref().map_or(1, |m| m.chunk_bytes());
        let mut taken = Vec::new();
        for (Filled { id, number }, memory) in filled {
            let Some(memory) = memory else {
                (self.memory.freed)(id);
                continue;
            };
            let tag = Tag { key, slot, rank, file: id.0 as u32, offset: 0 };
            let (freed, moves) = (self.memory.freed.clone(), self.memory.moves.clone());
            let used = Arc::new(Used::new(id, memory, tag, freed, moves));
            // Where in which file it will be is not known yet; mostly that begins with an extent.
            used.want(0, used.bytes, |done| chunk - done % chunk);
            taken.push((number, used));
        }
        if let Some(moves) = self.memory.moves() {
            taken.iter().for_each(|(_, used)| moves.push_handed(used));
        }
        let mut table = self.memory.table();
        table.handed.entry((key, slot, rank)).or_default().extend(taken);
    }

    /// Memory of so many bytes is wanted: what is stored gives its own back, now or when it is stored.
    pub fn reclaim(&self, bytes: u64) {
        self.memory.reclaim(bytes);
    }

    /// A dataset will not be read soon: what is stored of it needs no memory.
    pub fn settled(&self, key: Key) {
        for used in self.memory.used_below(Path::new(&key_dir(key))) {
            used.settle();
            if used.is_clean() {
                self.memory.stored(&used);
            }
        }
    }

    /// All files of a rank that share extents are taken over: from now on they are on their way to the store, and what
    /// the rank handed over has no numbers any more.
    pub fn store_kept(&self, whose: (Key, SlotId, RankId)) {
        let (fresh, handed) = {
            let mut table = self.memory.table();
            (std::mem::take(&mut table.fresh), table.handed.remove(&whose))
        };
        drop(handed);
        if let Some(moves) = self.memory.moves() {
            fresh.iter().for_each(|used| moves.push(used));
        }
    }

    /// A descriptor for other processes to read a chunk of the store through.
    pub fn reader(&self, place: &Place) -> Result<OwnedFd, Trouble> {
        let none = || Trouble::new(Cause::Missing).file(self.root().display().to_string());
        self.memory.moves().ok_or_else(none)?.reader(place)
    }

    /// Where a file is from `from` on, in at most `max` pieces: what they lie in, the offset there, bytes. `None`: it is
    /// neither in memory nor in the store. It stays there until the next dataset begins.
    pub fn pieces(
        &self,
        (key, slot, rank): (Key, SlotId, RankId),
        path: &str,
        from: u64,
        max: usize,
    ) -> Option<Vec<(Lies, u64, u64)>> {
        let place = rank_dir(key, slot, rank).join(path);
        // What looking at it for the first time frees is dropped outside of the lock.
        self.memory.table().files.get(&place).cloned()?.flatten();
        let mut table = self.memory.table();
        let file = table.files.get(&place).cloned()?;
        let mut pieces = Vec::new();
        for (used, offset, bytes) in file.pieces(from) {
            let lies = used.lies(offset, bytes);
            if self.memory.moves.is_some() && lies.iter().any(|l| matches!(l.0, Lies::Memory(_))) {
                table.pinned.push(Arc::downgrade(used));
            }
            pieces.extend(lies);
            if pieces.len() >= max {
                break;
            }
        }
        pieces.truncate(max);
        Some(pieces)
    }

    /// Forgets the files in memory of these datasets.
    pub(super) fn forget_memory(&self, keys: &[Key]) {
        let unfinished = {
            let handed = &mut self.memory.table().handed;
            let whose: Vec<_> = handed.keys().filter(|w| keys.contains(&w.0)).copied().collect();
            whose.iter().filter_map(|w| handed.remove(w)).collect::<Vec<_>>()
        };
        drop(unfinished);
        let dirs: Vec<String> = keys.iter().map(|key| key_dir(*key)).collect();
        self.memory.remove(|path, _| dirs.iter().any(|dir| path.starts_with(dir)));
    }
}

impl MemFiles {
    /// A file has a range of an extent, and has it from `start` on: it is to be stored in pieces of the file's chunks, so
    /// that the checksums of those follow from the store's.
    fn wants(&self, used: &Used, offset: u64, bytes: u64, start: u64) -> bool {
        let chunk = self.moves.as_ref().map_or(1, |m| m.chunk_bytes());
        used.want(offset, bytes, |done| chunk - (start + done) % chunk)
    }

    fn used(
        &self,
        table: &mut Table,
        id: ExtentId,
        tag: Tag,
        extent: impl Fn(ExtentId) -> Option<Arc<dyn Memory>>,
    ) -> Result<Arc<Used>, Cause> {
        if let Some(used) = table.used.get(&id).and_then(Weak::upgrade) {
            return Ok(used);
        }
        let memory = extent(id).ok_or(Cause::Missing)?;
        // Within a dataset a chunk's name is its extent's number and its place there.
        let tag = Tag { file: id.0 as u32, ..tag };
        let (freed, moves) = (self.freed.clone(), self.moves.clone());
        let used = Arc::new(Used::new(id, memory, tag, freed, moves));
        table.used.insert(id, Arc::downgrade(&used));
        Ok(used)
    }
}
