//! Comparing a slot's files with its manifest, and preparing them for repair.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use stanchion_format::holding;
use stanchion_format::manifest::{FileEntry, Manifest, pieces};
use stanchion_format::peer::Trouble;

use super::{Cache, cancelled, rank_dir, slot_dir};
use crate::fs::{self, Handle, How, Kind};
use crate::trouble::At;

/// What is left to be written of a file.
struct Found {
    /// Its chunks that are not what they should be.
    bad: Vec<u64>,
    /// Was anything wrong, repaired or not?
    wrong: bool,
}

impl Cache {
    /// Reads everything the manifest names (FM-S7, FM-F9): the numbers of chunks that are missing or
    /// damaged (an `EIO` is damage), and the files in which anything was wrong. Files that are missing,
    /// of another size or kind are brought to the right size and mode, what the manifest does not name
    /// is removed. Afterwards only the bad chunks remain to be written.
    pub fn verify(
        &self,
        m: &Manifest,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(Vec<u64>, Vec<String>), Trouble> {
        self.admit(m.key, m.slot, m.bytes())?;
        self.keep_only(m)?;
        let (mut bad, mut bad_files) = (Vec::new(), Vec::new());
        let (mut first, mut buf) = (0u64, Vec::new());
        for entry in &m.files {
            let found = self
                .verify_file(m, entry, &mut buf, cancel)
                .map_err(|t| t.slot(m.slot).rank(entry.rank))?;
            bad.extend(found.bad.into_iter().map(|c| first + c));
            if found.wrong {
                bad_files.push(entry.path.clone());
            }
            first += entry.chunks.len() as u64;
        }
        Ok((bad, bad_files))
    }

    fn verify_file(
        &self,
        m: &Manifest,
        entry: &FileEntry,
        buf: &mut Vec<u8>,
        cancel: &dyn Fn() -> bool,
    ) -> Result<Found, Trouble> {
        let path = self.file_path(m.key, m.slot, entry.rank, &entry.path);
        // One in memory has the size it has; of another it is as good as missing.
        self.memory.remove(|place, bytes| place == path && bytes != entry.bytes);
        let file = match self.open_file(&path, How::Write) {
            // Any other error (no descriptors, no memory) says nothing about the file, which may be good.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ISDIR | Errno::LOOP | Errno::IO) => {
                self.replace(&path, entry).at(entry.path.as_str())?;
                return Ok(Found { bad: (0..entry.chunks.len() as u64).collect(), wrong: true });
            }
            other => other.at(entry.path.as_str())?,
        };
        let stat = file.stat().at(entry.path.as_str())?;
        if stat.bytes != entry.bytes {
            file.set_len(entry.bytes).at(entry.path.as_str())?;
        }
        if stat.mode != entry.mode {
            file.set_mode(entry.mode).at(entry.path.as_str())?;
        }
        let mut bad = Vec::new();
        for (i, (offset, len)) in pieces(entry.bytes, m.chunk_bytes).enumerate() {
            if cancel() {
                return Err(cancelled());
            }
            // Behind the old end there are only the zeros that `set_len` put there.
            let mut read = || fs::checksum(&*file, buf, offset, len as usize);
            let good = Ok((len as usize, entry.chunks[i]));
            if offset >= stat.bytes || read() != good {
                bad.push(i as u64);
            }
        }
        let wrong = !bad.is_empty() || stat.bytes != entry.bytes;
        Ok(Found { bad, wrong })
    }

    /// An empty file of the right size in the place of whatever is there.
    fn replace(&self, path: &Path, entry: &FileEntry) -> fs::Result<()> {
        fs::make_dirs(&*self.fs, path.parent().ok_or(Errno::INVAL)?, 0o700)?;
        fs::remove_tree(&*self.fs, path)?;
        let file: Box<dyn Handle> = self.fs.open(path, How::CreateNew(0o600))?;
        file.set_len(entry.bytes)?;
        file.set_mode(entry.mode)
    }

    /// Removes everything from the slot's directory that is neither named by the manifest nor parity, nor
    /// says what is there.
    pub(crate) fn keep_only(&self, m: &Manifest) -> Result<(), Trouble> {
        let mut files: BTreeSet<PathBuf> = BTreeSet::new();
        let mut dirs: BTreeSet<PathBuf> = BTreeSet::new();
        for entry in &m.files {
            let path = rank_dir(m.key, m.slot, entry.rank).join(&entry.path);
            dirs.extend(path.ancestors().skip(1).map(Path::to_owned));
            files.insert(path);
        }
        let top = slot_dir(m.key, m.slot);
        self.memory.remove(|path, _| path.starts_with(&top) && !files.contains(path));
        let clean = || {
            let entries = match self.fs.list(&top) {
                Err(Errno::NOENT) => return Ok(()),
                other => other?,
            };
            for entry in entries {
                let path = top.join(&entry.name);
                let name = entry.name.to_string_lossy();
                match entry.kind {
                    Kind::File if matches!(&*name, "parity" | "parity.sums" | holding::NAME) => {}
                    Kind::Dir if name.starts_with('r') => self.keep_in(&path, &files, &dirs)?,
                    _ => fs::remove_tree(&*self.fs, &path)?,
                }
            }
            Ok(())
        };
        clean().at(top.display().to_string()).map_err(|t| t.slot(m.slot))
    }

    fn keep_in(
        &self,
        dir: &Path,
        files: &BTreeSet<PathBuf>,
        dirs: &BTreeSet<PathBuf>,
    ) -> fs::Result<()> {
        // Files may have to be made or removed here, whatever rights the application left.
        let mode = self.fs.stat(dir)?.mode;
        if mode & 0o700 != 0o700 {
            self.fs.chmod(dir, mode | 0o700)?;
        }
        for entry in self.fs.list(dir)? {
            let path = dir.join(&entry.name);
            match entry.kind {
                Kind::File if files.contains(&path) => {}
                Kind::Dir if dirs.contains(&path) => self.keep_in(&path, files, dirs)?,
                _ => fs::remove_tree(&*self.fs, &path)?,
            }
        }
        Ok(())
    }
}
