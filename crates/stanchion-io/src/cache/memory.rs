//! Files of a dataset whose bytes are in the agent's shared memory: they have no file in the cache directory, and
//! are read, verified, repaired, given to other agents and flushed like those that have.
//!
//! A file is a list of pieces of extents. Several files may have pieces of one extent: of a dataset that was
//! written incrementally, what did not change is what its predecessor has. An extent is given back when the last
//! file that has a piece of it is forgotten and nobody reads from it any more (FM-P3).

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;
use stanchion_format::client::{MemoryFile, PartFrom};
use stanchion_format::ids::{ExtentId, Key, RankId, SlotId};
use stanchion_format::index::key_dir;
use stanchion_format::peer::Cause;

use super::pieces::{Building, MemFile};
use super::{Cache, rank_dir};
use crate::fs::{self, Handle, Kind, Stat};

/// Memory that is shared with other processes: bytes are copied in and out, whatever others do there.
pub trait Memory: fmt::Debug + Send + Sync {
    /// Its size, bytes.
    fn bytes(&self) -> u64;
    /// Copies from `offset`; within the size.
    fn read(&self, offset: u64, buf: &mut [u8]);
    /// Copies to `offset`; within the size.
    fn write(&self, offset: u64, bytes: &[u8]);
}

/// Called with each extent that no file has any more.
pub type OnFreed = Box<dyn Fn(ExtentId) + Send + Sync>;

/// An extent as long as a file or a reader has it.
pub(super) struct Used {
    id: ExtentId,
    pub(super) memory: Arc<dyn Memory>,
    freed: Arc<OnFreed>,
}

impl fmt::Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        (self.freed)(self.id);
    }
}

#[derive(Debug)]
struct MemHandle(Arc<MemFile>);

impl Handle for MemHandle {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> fs::Result<usize> {
        let len = buf.len();
        Ok(self.0.walk(offset, len, |used, at, from, to| used.memory.read(at, &mut buf[from..to])))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> fs::Result<usize> {
        let done = self.0.walk(offset, bytes.len(), |used, at, from, to| {
            used.memory.write(at, &bytes[from..to])
        });
        // It has the size it has.
        if done == 0 && !bytes.is_empty() { Err(Errno::FBIG) } else { Ok(done) }
    }

    fn set_len(&self, bytes: u64) -> fs::Result<()> {
        if bytes == self.0.bytes { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn set_mode(&self, _mode: u32) -> fs::Result<()> {
        Ok(())
    }

    fn sync(&self) -> fs::Result<()> {
        Ok(())
    }

    fn stat(&self) -> fs::Result<Stat> {
        let uid = rustix::process::geteuid().as_raw();
        Ok(Stat { kind: Kind::File, bytes: self.0.bytes, mode: 0o600, uid })
    }
}

/// All files in memory, by their place below the cache's root.
pub(super) struct MemFiles {
    files: Mutex<Table>,
    freed: Arc<OnFreed>,
}

#[derive(Default)]
struct Table {
    files: HashMap<PathBuf, Arc<MemFile>>,
    used: HashMap<ExtentId, Weak<Used>>,
}

impl fmt::Debug for MemFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFiles").field("files", &self.table().files.len()).finish()
    }
}

impl MemFiles {
    pub(super) fn new(freed: OnFreed) -> MemFiles {
        MemFiles { files: Mutex::default(), freed: Arc::new(freed) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn open(&self, path: &Path) -> Option<Box<dyn Handle>> {
        let file = self.table().files.get(path).cloned()?;
        Some(Box::new(MemHandle(file)))
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
            removed
        };
        drop::<Vec<Arc<MemFile>>>(removed);
    }
}

impl Cache {
    /// Who is to know which extents no file has any more. Before the first file.
    pub fn on_freed(&mut self, freed: OnFreed) {
        self.memory = MemFiles::new(freed);
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
        let base = file.base.as_ref().map(|(key, path)| rank_dir(*key, slot, rank).join(path));
        let mut table = self.memory.table();
        let base = base.map(|path| table.files.get(&path).cloned().ok_or(Cause::Missing));
        let mut trouble = base.as_ref().and_then(|b| b.as_ref().err().copied());
        let known = base.as_ref().and_then(|b| b.as_ref().ok());
        let mut built = Building::new(known.map(|b| &**b), file.parts.len());
        for part in &file.parts {
            let found = match part.from {
                PartFrom::Extent { id, offset } => {
                    let index = match built.known(id) {
                        Some(index) => Ok(index),
                        None => {
                            let used = self.memory.used(&mut table, id, &extent);
                            used.map(|used| built.add(id, used))
                        }
                    };
                    index.and_then(|index| built.put(index, offset, part.bytes))
                }
                PartFrom::Base { offset } => built.borrow(offset, part.bytes),
            };
            if let Err(cause) = found {
                trouble.get_or_insert(cause);
            }
        }
        if trouble.is_none() && built.bytes() != bytes {
            trouble = Some(Cause::Size { want: bytes, have: built.bytes() });
        }
        let (built, without) = built.finish();
        let built = Arc::new(built);
        let old = match trouble {
            None => table.files.insert(dir.join(&file.path), built),
            Some(_) => Some(built),
        };
        drop(table);
        drop(without);
        drop(old);
        drop(base);
        trouble.map_or(Ok(()), Err)
    }

    /// The pieces of a file from `from` on, at most `max`: (extent, offset in it, bytes). `None`: it is not in memory.
    pub fn pieces(
        &self,
        (key, slot, rank): (Key, SlotId, RankId),
        path: &str,
        from: u64,
        max: usize,
    ) -> Option<Vec<(ExtentId, u64, u64)>> {
        let file = self.memory.table().files.get(&rank_dir(key, slot, rank).join(path)).cloned()?;
        let piece = |(used, offset, bytes): (&Arc<Used>, u64, u64)| (used.id, offset, bytes);
        Some(file.pieces(from).take(max).map(piece).collect())
    }

    /// Forgets the files in memory of these datasets.
    pub(super) fn forget_memory(&self, keys: &[Key]) {
        let dirs: Vec<String> = keys.iter().map(|key| key_dir(*key)).collect();
        self.memory.remove(|path, _| dirs.iter().any(|dir| path.starts_with(dir)));
    }
}

impl MemFiles {
    fn used(
        &self,
        table: &mut Table,
        id: ExtentId,
        extent: impl Fn(ExtentId) -> Option<Arc<dyn Memory>>,
    ) -> Result<Arc<Used>, Cause> {
        if let Some(used) = table.used.get(&id).and_then(Weak::upgrade) {
            return Ok(used);
        }
        let memory = extent(id).ok_or(Cause::Missing)?;
        let used = Arc::new(Used { id, memory, freed: self.freed.clone() });
        table.used.insert(id, Arc::downgrade(&used));
        Ok(used)
    }
}
