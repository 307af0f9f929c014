//! One agent's cache: a directory on the node, in memory or on a disk.
//!
//! ```text
//! ROOT/KEY/sNNNNNN/rNNNNNN/...   the files of a slot's ranks, written by the ranks themselves
//! ROOT/KEY/sNNNNNN/parity        parity that the slot keeps for its set, in places of one chunk
//! ROOT/KEY/sNNNNNN/parity.sums   length and checksum of each place
//! ROOT/KEY/sNNNNNN/holding       what vouches for all that, for who comes when the agent is gone
//! ROOT/store/seg.NNNNNN          chunks of files that were written in memory
//! ```
//!
//! Nothing here is synced: the levels that a cache serves do not promise survival of power loss (FM-N1).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use stanchion_format::ids::{Key, RankId, SlotId};
use stanchion_format::index::{cache_rank_dir, cache_slot_dir, key_dir};
use stanchion_format::peer::{Cause, Trouble};

use crate::fs::{self, Fs, How, Kind, PosixFs};
use crate::trouble::At;
use holding::Written;
use memory::MemFiles;
use usage::Usage;

mod chunks;
mod held;
mod holding;
pub mod memory;
mod moving;
mod parity;
mod pieces;
mod usage;
mod verify;
mod vouch;

pub use chunks::{OpenPiece, Summed};
pub use held::Lies;
pub use holding::Left;
pub use moving::{OnTrouble, STORE_TRIES_MAX, Share};

/// One agent's cache directory.
#[derive(Debug)]
pub struct Cache {
    fs: Arc<dyn Fs>,
    root: PathBuf,
    /// Is `root` a directory of the system, to be removed in the end?
    real: bool,
    /// Another agent's: nothing is removed.
    adopted: bool,
    usage: Mutex<Usage>,
    /// Files that are not in the directory but in shared memory.
    memory: MemFiles,
    /// Held while a file's permission bits are lifted for opening it.
    lifting: Mutex<()>,
    written: Written,
}

impl Cache {
    /// Opens or creates (0700) the cache and empties it. Its parent must exist. Refuses a symbolic link
    /// (`ELOOP` or `ENOTDIR`), a foreign owner (`EPERM`), a directory that another process uses as its
    /// cache (`EBUSY`) and one that cannot be written to (FM-C4, FM-F8).
    pub fn open(root: &Path, bytes_max: u64) -> Result<Cache, Trouble> {
        let name = root.display().to_string();
        let fs = PosixFs::own(root).at(name.as_str())?;
        let mut cache = Cache::on(Arc::new(fs), root, bytes_max)?;
        cache.real = true;
        Ok(cache)
    }

    /// The same on any file system, whose root is the cache. `name` is for messages.
    pub fn on(fs: Arc<dyn Fs>, name: &Path, bytes_max: u64) -> Result<Cache, Trouble> {
        let empty = || {
            fs::remove_contents(&*fs, Path::new(""))?;
            // Shows a read-only or full file system now, not at the first checkpoint.
            fs.mkdir(Path::new("probe"), 0o700)?;
            fs.rmdir(Path::new("probe"))
        };
        empty().at(name.display().to_string())?;
        Ok(Cache {
            fs,
            root: name.to_owned(),
            real: false,
            adopted: false,
            usage: Mutex::new(Usage::new(bytes_max)),
            memory: MemFiles::new(Box::new(|_| {})),
            lifting: Mutex::new(()),
            written: Written::default(),
        })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates the ranks' directories of a new dataset.
    pub fn make_dirs(&self, key: Key, slot: SlotId, ranks: &[RankId]) -> Result<(), Trouble> {
        // A dataset begins: nobody reads one any more to restart from it.
        self.memory.unpin();
        for rank in ranks {
            let dir = rank_dir(key, slot, *rank);
            fs::make_dirs(&*self.fs, &dir, 0o700)
                .at(dir.display().to_string())
                .map_err(|t| t.slot(slot).rank(*rank))?;
        }
        Ok(())
    }

    /// Removes datasets. What cannot be removed is logged: nothing else can be done about it.
    pub fn evict(&self, keys: &[Key]) {
        self.forget_memory(keys);
        for key in keys.iter().filter(|_| !self.adopted) {
            let dir = key_dir(*key);
            self.forget_written(*key);
            if let Err(e) = fs::remove_tree(&*self.fs, Path::new(&dir)) {
                tracing::warn!(root = %self.root.display(), %dir, "cannot evict from the cache: {e}");
            }
            self.usage().forget(*key);
        }
    }

    /// Removes everything, the directory included (FM-V4).
    pub fn remove_all(&self) {
        self.memory.clear();
        if self.adopted {
            return;
        }
        self.remove_store();
        let contents = fs::remove_contents(&*self.fs, Path::new(""));
        let done = contents.and_then(|()| match self.real {
            true => fs::gone_is_fine(rustix::fs::rmdir(&self.root)),
            false => Ok(()),
        });
        if let Err(e) = done {
            tracing::warn!(root = %self.root.display(), "cannot remove the cache: {e}");
        }
        self.usage().clear();
    }

    /// What counts against the limit, bytes: files of the ranks and parity.
    pub fn bytes_used(&self) -> u64 {
        self.usage().total()
    }

    fn usage(&self) -> std::sync::MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Opens an existing file even if its permission bits do not allow it: applications make read-only
    /// files, which are ours all the same.
    fn open_file(&self, path: &Path, how: How) -> fs::Result<Box<dyn fs::Handle>> {
        if let Some(file) = self.memory.open(path) {
            return Ok(file);
        }
        match self.fs.open(path, how) {
            Err(Errno::ACCESS) => {}
            other => return other,
        }
        let _one_at_a_time = self.lifting.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let stat = self.fs.stat(path)?;
        if stat.kind != Kind::File {
            return Err(Errno::ACCESS);
        }
        self.fs.chmod(path, stat.mode | 0o600)?;
        let file = self.fs.open(path, how);
        self.fs.chmod(path, stat.mode)?;
        file
    }
}

/// Below the root: a slot's directory.
fn slot_dir(key: Key, slot: SlotId) -> PathBuf {
    PathBuf::from(&cache_slot_dir("", key, slot)[1..])
}

/// Below the root: a rank's directory.
fn rank_dir(key: Key, slot: SlotId, rank: RankId) -> PathBuf {
    PathBuf::from(&cache_rank_dir("", key, slot, rank)[1..])
}

/// The trouble with somebody who does not want the result any more; nobody will read it.
pub(crate) fn cancelled() -> Trouble {
    Trouble::new(Cause::Closing)
}
