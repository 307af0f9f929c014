//! Where the prefix's own files lie, and its containers: a directory, or a bucket ([`super::objects`]).
//!
//! What is here is all that differs between them. Names are in plain form below the prefix, with `/` between their parts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use stanchion_format::index::DIR;

use super::{NEW, random};
use crate::fs::{self, Fs, Handle, How, Result};

/// A file that is being written from front to back, and not seen before it is finished. Dropped, it leaves nothing that
/// anybody takes for a file.
pub(super) trait Filling: Send {
    /// Writes on.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;
    /// It is there now, whole and durable.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Files by name. What is said to be done is durable.
pub(super) trait Place: Send + Sync + fmt::Debug {
    /// Makes it ready for writing.
    fn prepare(&self) -> Result<()>;
    /// A whole file of at most so many bytes (`FBIG`).
    fn read(&self, file: &str, bytes_max: u64) -> Result<Vec<u8>>;
    /// A file for reading parts of it.
    fn open(&self, file: &str) -> Result<Box<dyn Handle>>;
    /// Replaces a file by a small one, or makes it; whoever reads it sees the one or the other.
    fn put(&self, file: &str, bytes: &[u8]) -> Result<()>;
    /// Makes a small file, whole or not at all; false if there is one, of whoever's making.
    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool>;
    /// Begins a large file, which nobody else writes and that is not there yet.
    fn create(&self, file: &str) -> Result<Box<dyn Filling>>;
    /// Removes a file; fine if there is none.
    fn remove(&self, file: &str) -> Result<()>;
    /// Removes all that is below, and the directory. Not told to be durable.
    fn remove_tree(&self, dir: &str) -> Result<()>;
    /// The first parts of all names below `dir`; none if there is no such directory.
    fn names(&self, dir: &str) -> Result<Vec<String>>;
    /// Is there such a file now, whatever a listing says?
    fn is_there(&self, file: &str) -> Result<bool>;
    /// What others made or removed there is durable too.
    fn settle(&self, dir: &str) -> Result<()>;
    /// Bytes that may still be written, where that is known.
    fn free(&self) -> Result<Option<u64>>;
}

/// A name that nobody else takes.
pub(super) fn new_name() -> Result<String> {
    Ok(format!("{NEW}{:016x}", random()?))
}

/// A directory.
#[derive(Debug)]
pub(super) struct Directory(pub Arc<dyn Fs>);

fn parent(file: &str) -> &Path {
    Path::new(file).parent().unwrap_or(Path::new(""))
}

impl Directory {
    /// A new file with these contents, durable, beside `file`.
    fn put_beside(&self, file: &str, bytes: &[u8]) -> Result<String> {
        let dir = file.rsplit_once('/').map_or("", |(dir, _)| dir);
        let new = format!("{dir}/{}", new_name()?);
        let write = || {
            let handle = self.0.open(Path::new(&new), How::CreateNew(0o600))?;
            fs::write_all(&*handle, bytes, 0)?;
            handle.sync()
        };
        write().inspect_err(|_| self.discard(&new))?;
        Ok(new)
    }

    fn put_in_place(&self, file: &str, bytes: &[u8]) -> Result<bool> {
        let handle = match self.0.open(Path::new(file), How::CreateNew(0o600)) {
            Err(Errno::EXIST) => return Ok(false),
            other => other?,
        };
        let written = fs::write_all(&*handle, bytes, 0).and_then(|()| handle.sync());
        written.inspect_err(|_| self.discard(file))?;
        Ok(true)
    }

    /// Removes a file that nobody will miss; [`super::Prefix::sweep`] finds it otherwise.
    fn discard(&self, file: &str) {
        discard(&*self.0, file);
    }
}

fn discard(fs: &dyn Fs, file: &str) {
    if let Err(e) = fs::gone_is_fine(fs.unlink(Path::new(file))) {
        tracing::debug!(%file, "left behind: {e}");
    }
}

impl Place for Directory {
    fn prepare(&self) -> Result<()> {
        for dir in ["", "/epoch", "/data", "/index", "/pins", "/tmp"] {
            fs::make_dirs(&*self.0, Path::new(&format!("{DIR}{dir}")), 0o700)?;
        }
        // Somebody else's `.stanchion` in a directory open to all: its records are not to be believed.
        if self.0.stat(Path::new(DIR))?.uid != rustix::process::geteuid().as_raw() {
            return Err(Errno::PERM);
        }
        let probe = format!("{DIR}/tmp/{}", new_name()?);
        self.0.open(Path::new(&probe), How::CreateNew(0o600))?;
        self.0.unlink(Path::new(&probe))?;
        self.0.sync_dir(Path::new(DIR))?;
        self.0.sync_dir(Path::new(""))
    }

    fn read(&self, file: &str, bytes_max: u64) -> Result<Vec<u8>> {
        fs::read_small(&*self.0, Path::new(file), bytes_max)
    }

    fn open(&self, file: &str) -> Result<Box<dyn Handle>> {
        self.0.open(Path::new(file), How::Read)
    }

    fn put(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let new = self.put_beside(file, bytes)?;
        let renamed = self.0.rename(Path::new(&new), Path::new(file));
        renamed.inspect_err(|_| self.discard(&new))?;
        self.0.sync_dir(parent(file))
    }

    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool> {
        let new = self.put_beside(file, bytes)?;
        let made = match self.0.link(Path::new(&new), Path::new(file)) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            // No hard links here. What is written under its own name may be seen torn after a crash;
            // its checksum tells.
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS) => self.put_in_place(file, bytes),
            Err(e) => Err(e),
        };
        self.discard(&new);
        let made = made?;
        self.0.sync_dir(parent(file))?;
        Ok(made)
    }

    fn create(&self, file: &str) -> Result<Box<dyn Filling>> {
        let (dir, top) = (parent(file), Path::new(DIR));
        fs::make_dirs(&*self.0, dir, 0o700)?;
        let new = dir.join(new_name()?);
        let handle = self.0.open(&new, How::CreateNew(0o600))?;
        let synced = dir.ancestors().take_while(|d| d.starts_with(top)).map(Path::to_owned);
        let synced = synced.collect();
        let (fs, file) = (self.0.clone(), Path::new(file).to_owned());
        Ok(Box::new(NewFile { fs, handle, new: Some(new), file, synced, at: 0 }))
    }

    fn remove(&self, file: &str) -> Result<()> {
        fs::gone_is_fine(self.0.unlink(Path::new(file)))?;
        // Even if somebody else unlinked it: that may not be durable yet.
        fs::gone_is_fine(self.0.sync_dir(parent(file)))
    }

    fn remove_tree(&self, dir: &str) -> Result<()> {
        fs::remove_tree(&*self.0, Path::new(dir))
    }

    fn names(&self, dir: &str) -> Result<Vec<String>> {
        let entries = match self.0.list(Path::new(dir)) {
            Err(Errno::NOENT) => return Ok(Vec::new()),
            other => other?,
        };
        // What is no text is none of ours.
        Ok(entries.into_iter().filter_map(|e| e.name.into_string().ok()).collect())
    }

    fn is_there(&self, file: &str) -> Result<bool> {
        match self.0.stat(Path::new(file)) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn settle(&self, dir: &str) -> Result<()> {
        self.0.sync_dir(Path::new(dir))
    }

    fn free(&self) -> Result<Option<u64>> {
        self.0.free()
    }
}

/// A file under a temporary name.
struct NewFile {
    fs: Arc<dyn Fs>,
    handle: Box<dyn Handle>,
    /// `None` once it has its own name.
    new: Option<std::path::PathBuf>,
    file: std::path::PathBuf,
    /// Directories whose entries are to be durable, the innermost first.
    synced: Vec<std::path::PathBuf>,
    at: u64,
}

impl Filling for NewFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        fs::write_all(&*self.handle, bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.handle.sync()?;
        if let Some(new) = &self.new {
            self.fs.rename(new, &self.file)?;
        }
        self.new = None;
        self.synced.iter().try_for_each(|dir| self.fs.sync_dir(dir))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(new) = self.new.take() {
            discard(&*self.fs, &new.display().to_string());
        }
    }
}
