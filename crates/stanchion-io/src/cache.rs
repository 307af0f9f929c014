//! One agent's cache directory.

use std::path::{Path, PathBuf};

use stanchion_format::checksum::Crc;
use stanchion_format::ids::{Key, RankId, SlotId};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::{Cause, Trouble};

/// One agent's cache directory.
#[derive(Debug)]
pub struct Cache {
    root: PathBuf,
}

fn missing<T>() -> Result<T, Trouble> {
    Err(Trouble::new(Cause::State))
}

impl Cache {
    /// Opens or creates (0700) the cache, and empties it. Refuses symlinks and foreign owners.
    pub fn open(root: &Path, _bytes_max: u64) -> Result<Cache, Trouble> {
        Ok(Cache { root: root.to_owned() })
    }
    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// Creates the ranks' directories of a new dataset.
    pub fn make_dirs(&self, _key: Key, _slot: SlotId, _ranks: &[RankId]) -> Result<(), Trouble> {
        missing()
    }
    /// Compares declared sizes with the files.
    pub fn stat(&self, _key: Key, _slot: SlotId, _files: &[FileDecl]) -> Result<(), Trouble> {
        missing()
    }
    /// Reads all files once and checksums every chunk.
    pub fn digest(
        &self,
        _key: Key,
        _slot: SlotId,
        _chunk_bytes: u32,
        _files: &[FileDecl],
        _cancel: &dyn Fn() -> bool,
    ) -> Result<Manifest, Trouble> {
        missing()
    }
    /// Reads a chunk as it is; the checksum is of what was read.
    pub fn read_chunk(&self, _m: &Manifest, _n: u64, _buf: &mut Vec<u8>) -> Result<Crc, Trouble> {
        missing()
    }
    /// Writes a chunk that was rebuilt; refuses what the manifest does not vouch for.
    pub fn write_chunk(&self, _m: &Manifest, _n: u64, _bytes: &[u8]) -> Result<(), Trouble> {
        missing()
    }
    /// Reads a place of the parity file, verified.
    pub fn read_parity(
        &self,
        _key: Key,
        _slot: SlotId,
        _index: u64,
        _chunk_bytes: u32,
        _len_max: u32,
        _buf: &mut Vec<u8>,
    ) -> Result<Crc, Trouble> {
        missing()
    }
    /// Writes a place of the parity file.
    pub fn write_parity(
        &self,
        _key: Key,
        _slot: SlotId,
        _index: u64,
        _chunk_bytes: u32,
        _bytes: &[u8],
    ) -> Result<(), Trouble> {
        missing()
    }
    /// Bad chunks and the files they are in; files of the wrong size or kind are made anew.
    pub fn verify(
        &self,
        _m: &Manifest,
        _cancel: &dyn Fn() -> bool,
    ) -> Result<(Vec<u64>, Vec<String>), Trouble> {
        missing()
    }
    /// Removes datasets.
    pub fn evict(&self, _keys: &[Key]) {}
    /// Removes everything, the directory included.
    pub fn remove_all(&self) {}
    /// What counts against the limit, bytes.
    pub fn bytes_used(&self) -> u64 {
        0
    }
}
