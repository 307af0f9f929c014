//! What an agent's cache device holds: bytes of ranks' files and of parity.

use stanchion_format::checksum::crc64;
use stanchion_format::data::Piece;
use stanchion_format::ids::{Key, RankId, SlotId};
use stanchion_format::manifest::{FileDecl, FileEntry, Manifest, pieces};
use stanchion_format::peer::{Cause, Trouble};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A file's place.
pub type FileId = (Key, SlotId, RankId, String);

/// One node's cache.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Files of ranks.
    pub files: BTreeMap<FileId, Vec<u8>>,
    /// Parity by its place in the slot's parity file.
    pub parity: BTreeMap<(Key, SlotId), BTreeMap<u64, Vec<u8>>>,
    /// Manifests that vouch for slots' files: only by these are chunks served.
    pub published: BTreeMap<(Key, SlotId), Arc<Manifest>>,
    /// Every write fails until then (microseconds).
    pub full_until: u64,
}

impl Store {
    /// Sizes as declared?
    pub fn stat(&self, key: Key, slot: SlotId, files: &[FileDecl]) -> Result<(), Trouble> {
        for f in files {
            let trouble = |cause| Trouble::new(cause).rank(f.rank).file(f.path.clone());
            match self.files.get(&(key, slot, f.rank, f.path.clone())) {
                None => return Err(trouble(Cause::Missing)),
                Some(bytes) if bytes.len() as u64 != f.bytes => {
                    let have = bytes.len() as u64;
                    return Err(trouble(Cause::Size { want: f.bytes, have }));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Reads and checksums everything that was declared.
    pub fn digest(
        &self,
        key: Key,
        slot: SlotId,
        chunk_bytes: u32,
        files: &[FileDecl],
    ) -> Result<Manifest, Trouble> {
        self.stat(key, slot, files)?;
        let mut files: Vec<FileEntry> = files
            .iter()
            .map(|f| {
                let bytes = &self.files[&(key, slot, f.rank, f.path.clone())];
                entry(f.rank, &f.path, bytes, chunk_bytes)
            })
            .collect();
        files.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
        Ok(Manifest { key, slot, chunk_bytes, files })
    }

    /// Is every file there, with its size?
    pub fn sized(&self, m: &Manifest) -> bool {
        m.files.iter().all(|f| {
            let file = self.files.get(&(m.key, m.slot, f.rank, f.path.clone()));
            file.is_some_and(|b| b.len() as u64 == f.bytes)
        })
    }

    /// Chunks that are missing or damaged, and the files they are in; files get their size.
    pub fn verify(&mut self, m: &Manifest) -> (Vec<u64>, Vec<String>) {
        let (mut bad, mut bad_files) = (Vec::new(), Vec::new());
        let mut number = 0;
        for f in &m.files {
            let file = self.files.entry((m.key, m.slot, f.rank, f.path.clone())).or_default();
            if file.len() as u64 != f.bytes {
                file.resize(f.bytes as usize, 0);
            }
            let before = bad.len();
            for ((offset, len), crc) in pieces(f.bytes, m.chunk_bytes).zip(&f.chunks) {
                let (from, to) = (offset as usize, offset as usize + len as usize);
                if crc64(&file[from..to]) != *crc {
                    bad.push(number);
                }
                number += 1;
            }
            if bad.len() > before {
                bad_files.push(f.path.clone());
            }
        }
        (bad, bad_files)
    }

    /// Serves a chunk as an agent does.
    pub fn serve(&self, key: Key, slot: SlotId, piece: Piece) -> Option<Vec<u8>> {
        match piece {
            Piece::Parity(index) => self.parity.get(&(key, slot))?.get(&index).cloned(),
            Piece::Data(chunk) => {
                let m = self.published.get(&(key, slot))?;
                let at = m.chunk(chunk)?;
                let f = &m.files[at.file];
                let file = self.files.get(&(key, slot, f.rank, f.path.clone()))?;
                let from = at.offset as usize;
                file.get(from..from + at.len as usize).map(<[u8]>::to_vec)
            }
        }
    }

    /// Writes a chunk into its file.
    pub fn write_chunk(&mut self, m: &Manifest, chunk: u64, bytes: &[u8]) {
        let Some(at) = m.chunk(chunk) else { return };
        let f = &m.files[at.file];
        let file = self.files.entry((m.key, m.slot, f.rank, f.path.clone())).or_default();
        let to = at.offset as usize + bytes.len();
        if file.len() < to {
            file.resize(to, 0);
        }
        file[at.offset as usize..to].copy_from_slice(bytes);
    }

    /// Forgets datasets.
    pub fn evict(&mut self, keys: &[Key]) {
        self.files.retain(|(k, ..), _| !keys.contains(k));
        self.parity.retain(|(k, _), _| !keys.contains(k));
        self.published.retain(|(k, _), _| !keys.contains(k));
    }
}

/// A file's entry in a manifest.
pub fn entry(rank: RankId, path: &str, bytes: &[u8], chunk_bytes: u32) -> FileEntry {
    FileEntry {
        rank,
        path: path.to_owned(),
        bytes: bytes.len() as u64,
        mode: 0o600,
        chunks: pieces(bytes.len() as u64, chunk_bytes)
            .map(|(offset, len)| crc64(&bytes[offset as usize..offset as usize + len as usize]))
            .collect(),
    }
}
