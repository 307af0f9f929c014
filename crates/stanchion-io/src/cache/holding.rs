//! What is written beside a slot's files, and read when the agents are gone (FM-A1, FM-A2).

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use stanchion_format::holding::{Holding, HoldingError, NAME, NEW_NAME};
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::index::key_dir;
use stanchion_format::limits::HOLDING_BYTES_MAX;
use stanchion_format::peer::{Cause, Trouble};

use super::memory::MemFiles;
use super::usage::Usage;
use super::{Cache, slot_dir};
use crate::fs::{self, Fs, How, Kind, PosixFs};
use crate::trouble::At;

/// The number of what was written last for each slot: threads may overtake each other.
pub(super) type Written = Mutex<HashMap<(Key, SlotId), u64>>;

/// What lies in the cache of an agent that is gone.
#[derive(Debug, Default)]
pub struct Left {
    /// What is known of slots: whole, and in the directory of the slot it is of.
    pub holdings: Vec<Holding>,
    /// Records that are refused, with the reason.
    pub refused: Vec<(PathBuf, String)>,
}

impl Cache {
    /// Opens the cache of an agent that is gone, with what is in it. Nothing of it is ever removed but what a slot's
    /// manifest does not know, when the slot is verified; also not by [`Cache::evict`] and [`Cache::remove_all`].
    pub fn adopt(root: &Path, bytes_max: u64) -> Result<Cache, Trouble> {
        let name = root.display().to_string();
        let there = || PosixFs::open(root, false).map(drop);
        there().at(name.as_str())?;
        let fs = PosixFs::own(root).at(name.as_str())?;
        Ok(Cache {
            fs: Arc::new(fs),
            root: root.to_owned(),
            real: true,
            adopted: true,
            usage: Mutex::new(Usage::new(bytes_max)),
            memory: MemFiles::new(Box::new(|_| {})),
            lifting: Mutex::new(()),
            written: Written::default(),
        })
    }

    /// Looks at the cache of an agent that is gone, without taking it.
    pub fn left(root: &Path) -> Result<Left, Trouble> {
        let name = root.display().to_string();
        left(&PosixFs::open(root, false).at(name.as_str())?).at(name)
    }

    /// Writes down what is known of a slot, beside its files: whole under its name at any moment. Not synced (FM-N1).
    pub fn remember(&self, holding: &Holding) -> Result<(), Trouble> {
        let (key, slot) = (holding.info.key, holding.slot);
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.get(&(key, slot)).is_some_and(|no| *no >= holding.no) {
            return Ok(());
        }
        let own = holding.manifests.iter().find(|m| m.slot == slot);
        // What is in shared memory or in the store ends with this agent.
        let volatile = own.iter().flat_map(|m| &m.files).any(|f| {
            let path = self.file_path(key, slot, f.rank, &f.path);
            self.memory.open(&path).is_some()
        });
        let bytes = match volatile {
            true => Holding { data: false, ..holding.clone() }.encode(),
            false => holding.encode(),
        };
        let cause = |e| match e {
            HoldingError::TooLong => Cause::NoSpace,
            _ => Cause::Malformed,
        };
        let bytes = bytes.map_err(|e| Trouble::new(cause(e)).slot(slot).file(NAME))?;
        self.put(&slot_dir(key, slot), &bytes).at(NAME).map_err(|t| t.slot(slot))?;
        written.insert((key, slot), holding.no);
        Ok(())
    }

    fn put(&self, dir: &Path, bytes: &[u8]) -> fs::Result<()> {
        fs::make_dirs(&*self.fs, dir, 0o700)?;
        let (new, place) = (dir.join(NEW_NAME), dir.join(NAME));
        fs::gone_is_fine(self.fs.unlink(&new))?;
        let write = || {
            let file = self.fs.open(&new, How::CreateNew(0o600))?;
            fs::write_all(&*file, bytes, 0)?;
            self.fs.rename(&new, &place)
        };
        write().inspect_err(|_| {
            // What is cut off has another name, and goes with the slot's directory.
            let _ = self.fs.unlink(&new);
        })
    }

    pub(super) fn forget_written(&self, key: Key) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(k, _), _| *k != key);
    }
}

fn left(root: &dyn Fs) -> fs::Result<Left> {
    let mut left = Left::default();
    for dataset in root.list(Path::new(""))?.into_iter().filter(|e| e.kind == Kind::Dir) {
        // Directories of the store and of others have no slots.
        let dir = PathBuf::from(&dataset.name);
        for slot in root.list(&dir)?.into_iter().filter(|e| e.kind == Kind::Dir) {
            if !slot.name.as_bytes().starts_with(b"s") {
                continue;
            }
            let path = dir.join(&slot.name).join(NAME);
            let refuse = |why: String| (path.clone(), why);
            match fs::read_small(root, &path, HOLDING_BYTES_MAX) {
                Err(Errno::NOENT) => {}
                Err(e) => left.refused.push(refuse(e.to_string())),
                Ok(bytes) => match Holding::parse(&bytes) {
                    // A file in the place of another (FM-F9).
                    Ok(h) if dir.join(&slot.name) != slot_dir(h.info.key, h.slot) => {
                        let of = format!("it is of {}, node {}", key_dir(h.info.key), h.slot);
                        left.refused.push(refuse(of));
                    }
                    Ok(h) => left.holdings.push(h),
                    Err(e) => left.refused.push(refuse(e.to_string())),
                },
            }
        }
    }
    // The newest last, whatever the order of the directory.
    left.holdings.sort_by_key(|h| (h.inc, h.info.key, h.no));
    left.refused.sort();
    Ok(left)
}
