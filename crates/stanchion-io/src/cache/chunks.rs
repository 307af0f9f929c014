//! The ranks' files as chunks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rustix::io::Errno;
use stanchion_format::checksum::{Crc, crc64};
use stanchion_format::ids::{Key, RankId, SlotId};
use stanchion_format::manifest::{ChunkAt, FileDecl, FileEntry, Manifest, pieces};
use stanchion_format::peer::{Cause, Trouble};
use stanchion_format::{limits, name};

use super::{Cache, cancelled, rank_dir};
use crate::fs::{self, Handle, How, Kind};
use crate::trouble::{At, cause};

/// Trouble with a file of one rank on one slot.
pub(super) fn of<'a>(
    slot: SlotId,
    rank: RankId,
    path: &'a str,
) -> impl Fn(Cause) -> Trouble + use<'a> {
    move |cause| Trouble::new(cause).slot(slot).rank(rank).file(path)
}

/// A chunk or a parity that is being read.
pub struct OpenPiece {
    /// Its file.
    pub file: Box<dyn Handle>,
    /// Where it lies in that.
    pub offset: u64,
    /// How long it is.
    pub len: u32,
    /// What its checksum must be.
    pub crc: Crc,
    /// Reading it does not fail.
    pub steady: bool,
}

/// Bytes and their checksum, which who adds them up makes on the way.
#[derive(Clone, Copy, Debug)]
pub struct Summed<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Of these.
    pub crc: Crc,
}

impl<'a, T: AsRef<[u8]> + ?Sized> From<&'a T> for Summed<'a> {
    fn from(bytes: &'a T) -> Summed<'a> {
        let bytes = bytes.as_ref();
        Summed { bytes, crc: crc64(bytes) }
    }
}

impl Cache {
    /// Where a rank's file lies below the root.
    pub(super) fn file_path(&self, key: Key, slot: SlotId, rank: RankId, path: &str) -> PathBuf {
        rank_dir(key, slot, rank).join(path)
    }

    /// Compares declared sizes with the files: regular files, reached without links (FM-S2). Two ranks
    /// of the slot with one path are refused here already (FM-S16), and files beyond the cache's limit.
    pub fn stat(&self, key: Key, slot: SlotId, files: &[FileDecl]) -> Result<(), Trouble> {
        let mut owners: BTreeMap<&str, RankId> = BTreeMap::new();
        let mut total = 0u64;
        for decl in files {
            let trouble = of(slot, decl.rank, &decl.path);
            name::check_path(&decl.path).map_err(|_| trouble(Cause::Name))?;
            if owners.insert(&decl.path, decl.rank).is_some() {
                return Err(trouble(Cause::SamePath));
            }
            let path = self.file_path(key, slot, decl.rank, &decl.path);
            let stat = match (self.memory.open(&path), self.memory.refused(&path)) {
                (Some(file), _) => file.stat(),
                (None, Some(cause)) => return Err(trouble(cause)),
                (None, None) => self.fs.stat(&path),
            };
            let stat = stat.map_err(|e| trouble(cause(e)))?;
            regular(stat.kind).map_err(|e| trouble(cause(e)))?;
            if stat.bytes != decl.bytes {
                return Err(trouble(Cause::Size { want: decl.bytes, have: stat.bytes }));
            }
            total = total.saturating_add(stat.bytes);
        }
        self.usage().found_files(key, slot, total).map_err(|_| {
            Trouble::new(Cause::NoSpace).slot(slot).file(self.root.display().to_string())
        })
    }

    /// Reads all files once and checksums every chunk. The manifest is ordered by rank and path.
    pub fn digest(
        &self,
        key: Key,
        slot: SlotId,
        chunk_bytes: u32,
        files: &[FileDecl],
        cancel: &dyn Fn() -> bool,
    ) -> Result<Manifest, Trouble> {
        if !(limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            return Err(Trouble::new(Cause::Malformed).slot(slot));
        }
        let mut buf = Vec::new();
        let mut entries = Vec::with_capacity(files.len());
        for decl in files {
            let trouble = of(slot, decl.rank, &decl.path);
            name::check_path(&decl.path).map_err(|_| trouble(Cause::Name))?;
            let path = self.file_path(key, slot, decl.rank, &decl.path);
            let file = self.open_file(&path, How::Read).map_err(|e| trouble(cause(e)))?;
            let entry = digest_file(&*file, decl, chunk_bytes, &mut buf, cancel);
            if entry.as_ref().is_err_and(|t| t.cause == Cause::Damaged) {
                self.memory.spoiled(&path);
            }
            entries.push(entry.map_err(|t| t.slot(slot).rank(decl.rank).file(&decl.path))?);
        }
        entries.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
        if let Some(w) =
            entries.windows(2).find(|w| (w[0].rank, &w[0].path) == (w[1].rank, &w[1].path))
        {
            return Err(of(slot, w[0].rank, &w[0].path)(Cause::SamePath));
        }
        Ok(Manifest { key, slot, chunk_bytes, files: entries })
    }

    /// Reads a chunk as it is; the checksum is of what was read, for the reader to compare.
    pub fn read_chunk(&self, m: &Manifest, chunk: u64, buf: &mut Vec<u8>) -> Result<Crc, Trouble> {
        let (at, entry) = find(m, chunk)?;
        let trouble = of(m.slot, entry.rank, &entry.path);
        let path = self.file_path(m.key, m.slot, entry.rank, &entry.path);
        buf.resize(at.len as usize, 0);
        let mut read = || {
            let file = self.open_file(&path, How::Read)?;
            let have = fs::read_full(&*file, buf, at.offset)?;
            Ok((have, if have < at.len as usize { file.stat()?.bytes } else { entry.bytes }))
        };
        let (have, bytes) = read().map_err(|e| trouble(cause(e)))?;
        if have < at.len as usize {
            return Err(trouble(Cause::Size { want: entry.bytes, have: bytes }));
        }
        Ok(crc64(buf))
    }

    /// A chunk's file, to be read in pieces, and where in it the chunk lies. What the file has not is an error, as in
    /// [`Cache::read_chunk`]. `steady`: reading does not fail.
    pub fn open_chunk(&self, m: &Manifest, chunk: u64) -> Result<OpenPiece, Trouble> {
        let (at, entry) = find(m, chunk)?;
        let trouble = of(m.slot, entry.rank, &entry.path);
        let path = self.file_path(m.key, m.slot, entry.rank, &entry.path);
        let (file, steady) = match self.memory.open(&path) {
            // What is in the store by now is on a device.
            Some(file) => (file, !self.has_store()),
            None => {
                let file = self.open_file(&path, How::Read).map_err(|e| trouble(cause(e)))?;
                (file, self.fs.is_memory())
            }
        };
        let have = file.stat().map_err(|e| trouble(cause(e)))?.bytes;
        if have < at.offset + u64::from(at.len) {
            return Err(trouble(Cause::Size { want: entry.bytes, have }));
        }
        let ChunkAt { offset, len, crc, .. } = at;
        Ok(OpenPiece { file, offset, len, crc, steady })
    }

    /// Writes a chunk that was rebuilt; refuses what the manifest does not vouch for (FM-S8).
    pub fn write_chunk<'a>(
        &self,
        m: &Manifest,
        chunk: u64,
        what: impl Into<Summed<'a>>,
    ) -> Result<(), Trouble> {
        let Summed { bytes, crc } = what.into();
        let (at, entry) = find(m, chunk)?;
        let trouble = of(m.slot, entry.rank, &entry.path);
        if bytes.len() != at.len as usize || crc != at.crc {
            return Err(trouble(Cause::Damaged));
        }
        let write = || {
            let file = self.open_or_make(m.key, m.slot, entry)?;
            fs::write_all(&*file, bytes, at.offset)
        };
        write().map_err(|e| trouble(cause(e)))
    }

    /// The entry's file, of the entry's size.
    fn open_or_make(
        &self,
        key: Key,
        slot: SlotId,
        entry: &FileEntry,
    ) -> fs::Result<Box<dyn Handle>> {
        let path = self.file_path(key, slot, entry.rank, &entry.path);
        match self.open_file(&path, How::Write) {
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
            Ok(file) => {
                if file.stat()?.bytes != entry.bytes {
                    file.set_len(entry.bytes)?;
                }
                return Ok(file);
            }
        }
        fs::make_dirs(&*self.fs, path.parent().ok_or(Errno::INVAL)?, 0o700)?;
        // Another thread may rebuild another chunk of the same file: Create, not CreateNew.
        let file = self.fs.open(&path, How::Create(0o600))?;
        file.set_len(entry.bytes)?;
        file.set_mode(entry.mode)?;
        Ok(file)
    }

    /// A new file in the place of whatever is there, for [`crate::prefix::Prefix::fetch`].
    pub(crate) fn fresh_file(
        &self,
        key: Key,
        slot: SlotId,
        rank: RankId,
        path: &str,
    ) -> Result<Box<dyn Handle>, Trouble> {
        let place = self.file_path(key, slot, rank, path);
        self.memory.remove(|path, _| path == place);
        let make = || {
            fs::make_dirs(&*self.fs, place.parent().ok_or(Errno::INVAL)?, 0o700)?;
            fs::remove_tree(&*self.fs, &place)?;
            self.fs.open(&place, How::CreateNew(0o600))
        };
        make().at(path).map_err(|t| t.slot(slot).rank(rank))
    }

    /// Removes a slot's files, but not its parity.
    pub(crate) fn drop_files(&self, key: Key, slot: SlotId) {
        let nothing = Manifest { key, slot, chunk_bytes: limits::CHUNK_BYTES, files: Vec::new() };
        if let Err(trouble) = self.keep_only(&nothing).and_then(|()| self.admit(key, slot, 0)) {
            tracing::warn!("left in the cache: {trouble}");
        }
    }

    /// A file of the manifest for reading, for [`crate::prefix::Prefix::flush_prepare`].
    pub(crate) fn manifest_file(
        &self,
        m: &Manifest,
        entry: &FileEntry,
    ) -> Result<Box<dyn Handle>, Trouble> {
        let path = self.file_path(m.key, m.slot, entry.rank, &entry.path);
        self.open_file(&path, How::Read)
            .at(entry.path.as_str())
            .map_err(|t| t.slot(m.slot).rank(entry.rank))
    }

    /// Room for files that we write ourselves.
    pub(crate) fn admit(&self, key: Key, slot: SlotId, bytes: u64) -> Result<(), Trouble> {
        let full = || Trouble::new(Cause::NoSpace).slot(slot).file(self.root.display().to_string());
        self.usage().admit_files(key, slot, bytes).map_err(|_| full())?;
        Ok(())
    }
}

/// Why something that is no regular file is not opened.
pub(super) fn regular(kind: Kind) -> fs::Result<()> {
    match kind {
        Kind::File => Ok(()),
        Kind::Dir => Err(Errno::ISDIR),
        Kind::Link => Err(Errno::LOOP),
        Kind::Other => Err(Errno::INVAL),
    }
}

fn find(m: &Manifest, chunk: u64) -> Result<(ChunkAt, &FileEntry), Trouble> {
    let at = m.chunk(chunk).ok_or_else(|| Trouble::new(Cause::Missing).slot(m.slot))?;
    Ok((at, &m.files[at.file]))
}

fn digest_file(
    file: &dyn Handle,
    decl: &FileDecl,
    chunk_bytes: u32,
    buf: &mut Vec<u8>,
    cancel: &dyn Fn() -> bool,
) -> Result<FileEntry, Trouble> {
    let before = file.stat().at(decl.path.as_str())?;
    let size = |have| Trouble::new(Cause::Size { want: decl.bytes, have });
    if before.bytes != decl.bytes {
        return Err(size(before.bytes));
    }
    let mut chunks = Vec::with_capacity(decl.bytes.div_ceil(chunk_bytes.into()) as usize);
    for (offset, len) in pieces(decl.bytes, chunk_bytes) {
        if cancel() {
            return Err(cancelled());
        }
        if let Some(sum) = file.sum_at(offset, len.into()).at(decl.path.as_str())? {
            chunks.push(sum);
            continue;
        }
        let each = |at, bytes: &[u8]| file.vouch(at, bytes);
        let summed = fs::checksum_with(file, buf, (offset, len as usize), each);
        let (have, crc) = summed.at(decl.path.as_str())?;
        if have < len as usize {
            return Err(size(offset + have as u64));
        }
        chunks.push(crc);
    }
    // A rank that still writes behind its `complete` is caught where it can be (FM-N2).
    let after = file.stat().at(decl.path.as_str())?;
    if after.bytes != decl.bytes {
        return Err(size(after.bytes));
    }
    Ok(FileEntry {
        rank: decl.rank,
        path: decl.path.clone(),
        bytes: decl.bytes,
        mode: before.mode,
        chunks,
    })
}
