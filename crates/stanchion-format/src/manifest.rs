//! What a slot holds of a dataset, byte for byte: files, sizes and the checksum of every chunk.

use crate::checksum::{Crc, crc64};
use crate::ids::{Key, RankId, SlotId};
use crate::{limits, name};
use serde::{Deserialize, Serialize};

/// A file as its rank declared it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDecl {
    /// The rank that wrote it.
    pub rank: RankId,
    /// Its path below the prefix, in the form of [`name::route`].
    pub path: String,
    /// Its size, bytes.
    pub bytes: u64,
}

/// A file and the checksums that vouch for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The rank that wrote it.
    pub rank: RankId,
    /// Its path below the prefix.
    pub path: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// Permission bits.
    pub mode: u32,
    /// One checksum for each chunk, in order.
    pub chunks: Vec<Crc>,
}

/// All files of one slot in one dataset, ordered by rank and path. The slot's chunks are numbered
/// through in this order; no chunk spans two files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Which dataset.
    pub key: Key,
    /// Whose files.
    pub slot: SlotId,
    /// Size of all chunks but the last of each file, bytes.
    pub chunk_bytes: u32,
    /// The files.
    pub files: Vec<FileEntry>,
}

/// Where one of a slot's chunks lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkAt {
    /// Index into `files`.
    pub file: usize,
    /// Offset in that file, bytes.
    pub offset: u64,
    /// Length, bytes; never 0.
    pub len: u32,
    /// Its checksum.
    pub crc: Crc,
}

/// Why a manifest is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// A path that no client of ours would send.
    #[error("a file's path is not allowed: {0}")]
    Path(#[from] name::NameError),
    /// Sizes and numbers of chunks contradict each other.
    #[error("a file's size and its number of chunks differ")]
    Chunks,
    /// Not ordered by rank and path, or a file twice.
    #[error("files are not in order, or one is there twice")]
    Order,
    /// The chunk size is out of its limits.
    #[error("chunks of {0} bytes are not allowed")]
    ChunkBytes(u32),
}

impl Manifest {
    /// Checks everything that later arithmetic relies on.
    pub fn check(&self) -> Result<(), ManifestError> {
        if !(limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX).contains(&self.chunk_bytes) {
            return Err(ManifestError::ChunkBytes(self.chunk_bytes));
        }
        for file in &self.files {
            name::check_path(&file.path)?;
            if file.bytes.div_ceil(self.chunk_bytes.into()) != file.chunks.len() as u64 {
                return Err(ManifestError::Chunks);
            }
        }
        let ordered = self
            .files
            .windows(2)
            .all(|w| (w[0].rank, w[0].path.as_str()) < (w[1].rank, w[1].path.as_str()));
        if ordered { Ok(()) } else { Err(ManifestError::Order) }
    }

    /// How many chunks the slot has.
    pub fn chunk_count(&self) -> u64 {
        self.files.iter().map(|f| f.chunks.len() as u64).sum()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }

    /// Where chunk number `chunk` lies; `None` beyond the last.
    pub fn chunk(&self, chunk: u64) -> Option<ChunkAt> {
        let mut before = 0u64;
        for (file, entry) in self.files.iter().enumerate() {
            let count = entry.chunks.len() as u64;
            if chunk < before + count {
                let within = chunk - before;
                let offset = within * u64::from(self.chunk_bytes);
                let len = (entry.bytes - offset).min(self.chunk_bytes.into()) as u32;
                return Some(ChunkAt { file, offset, len, crc: entry.chunks[within as usize] });
            }
            before += count;
        }
        None
    }

    /// The checksum that vouches for the whole manifest.
    pub fn crc(&self) -> Crc {
        crc64(&postcard::to_stdvec(self).expect("a manifest always encodes"))
    }
}

/// `chunk_bytes`-sized pieces of a file of `bytes` bytes: (offset, length).
pub fn pieces(bytes: u64, chunk_bytes: u32) -> impl Iterator<Item = (u64, u32)> {
    let step = u64::from(chunk_bytes);
    (0..bytes.div_ceil(step)).map(move |i| (i * step, (bytes - i * step).min(step) as u32))
}
