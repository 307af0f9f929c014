//! An agent's store: whether there is one, and what was promised of it.

use std::path::{Path, PathBuf};

use stanchion_format::config::Settings;
use stanchion_format::peer::Trouble;
use stanchion_format::segment::{SEGMENT_BYTES_MAX, padded};
use stanchion_io::cache::Cache;
use stanchion_io::store::{Store, StoreConfig};
use tracing::{info, warn};

/// Chunks of a segment of the store, and the least that it has, bytes.
const SEGMENT_CHUNKS: u64 = 16;
const SEGMENT_BYTES_LEAST: u64 = 64 << 20;

/// Why an agent does not start without the store that its settings ask for. Whoever chose the settings must act.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Segments were asked for, and there are none.
    #[error(
        "the store {0}: {1}. cache_store=memory keeps checkpoints in memory; cache_dir says where else there is a disk"
    )]
    Unusable(PathBuf, Trouble),
    /// What lies in memory cannot be synced.
    #[error(
        "cache_durable=1 wants checkpoints on a disk, and {0} is {1}. Set cache_dir to a directory of a local disk \
         and leave cache_store alone, or set cache_durable=0"
    )]
    NotDurable(PathBuf, NotDurable),
}

/// Why nothing of a cache survives a loss of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDurable {
    /// Its file system is memory.
    MemoryFs,
    /// Regions and streams are kept in the pool.
    Pool,
}

impl std::fmt::Display for NotDurable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            NotDurable::MemoryFs => "memory",
            NotDurable::Pool => "not used for them (cache_store=memory)",
        })
    }
}

/// The store of an agent whose cache is in `cache`, as `settings` want it. `None`: checkpoints of regions and streams
/// stay in memory.
pub(crate) fn open(cache: &Path, settings: &Settings) -> Result<Option<Store>, StoreError> {
    let durable = settings.flag("cache_durable");
    let in_memory = is_memory(cache);
    let not_durable = |why| Err(StoreError::NotDurable(cache.to_owned(), why));
    let asked = match settings.text("cache_store") {
        "memory" if durable => return not_durable(NotDurable::Pool),
        "memory" => return Ok(None),
        "segments" => true,
        _ => durable,
    };
    if durable && in_memory {
        return not_durable(NotDurable::MemoryFs);
    }
    if in_memory && !asked {
        return Ok(None);
    }
    let root = Cache::store_dir(cache);
    match Store::open(&root, config(settings, durable)) {
        Ok(store) => {
            info!(root = %root.display(), "checkpoints in memory go to segments: {}", store.facts());
            Ok(Some(store))
        }
        Err(trouble) if asked => Err(StoreError::Unusable(root, trouble)),
        Err(trouble) => {
            warn!(%trouble, "no store: checkpoints stay in memory");
            Ok(None)
        }
    }
}

/// 0: what the device has.
pub(crate) fn bytes_max(settings: &Settings) -> u64 {
    match settings.number("cache_bytes_max") {
        0 => u64::MAX,
        max => max,
    }
}

fn is_memory(cache: &Path) -> bool {
    const TMPFS: rustix::fs::FsWord = 0x0102_1994;
    const RAMFS: rustix::fs::FsWord = 0x8584_58f6;
    rustix::fs::statfs(cache).is_ok_and(|s| s.f_type == TMPFS || s.f_type == RAMFS)
}

fn config(settings: &Settings, durable: bool) -> StoreConfig {
    // Several agents may share a disk, and at the end all is removed: no larger than it must be to cost nothing.
    let chunks = settings.number("chunk_bytes").saturating_mul(SEGMENT_CHUNKS);
    let segment_bytes = padded(chunks.clamp(SEGMENT_BYTES_LEAST, SEGMENT_BYTES_MAX));
    StoreConfig {
        segment_bytes,
        bytes_max: bytes_max(settings).saturating_add(segment_bytes),
        // An agent that dies is its node's loss: nobody will look for what it wrote (FM-F2a).
        durable,
        ..StoreConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(set: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        for (name, value) in set {
            settings.set(name, value).unwrap();
        }
        settings
    }

    #[test]
    fn a_store_that_was_asked_for_is_there_or_an_error() {
        // FM-T6: without a word about it, a job goes on in memory.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        std::fs::write(Cache::store_dir(dir.path()), "not a directory").unwrap();
        for asked in [("cache_store", "segments"), ("cache_durable", "1")] {
            let error = open(dir.path(), &settings(&[asked])).unwrap_err();
            assert!(matches!(error, StoreError::Unusable(..)), "{asked:?}: {error}");
            assert!(error.to_string().contains("cache_store=memory"), "{error}");
        }
        assert!(open(dir.path(), &settings(&[])).unwrap().is_none());
        assert!(open(dir.path(), &settings(&[("cache_store", "memory")])).unwrap().is_none());
    }
}
