//! The system calls that the rest of this crate needs, as a trait.
//!
//! An [`Fs`] is one directory and what is below it. Paths are relative to it, in plain form (no `.`,
//! `..` or doubled `/`); the empty path is the directory itself. No call follows a symbolic link below
//! the root, so that a link which somebody placed there leads nowhere.

use stanchion_format::checksum::{Crc, Crc64};
use std::ffi::OsString;
use std::fmt;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::io::Errno;

mod posix;
pub mod testing;

pub use posix::PosixFs;

/// What a system call returns.
pub type Result<T> = std::result::Result<T, Errno>;

/// How to open a file. Only regular files are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// For reading; it must exist.
    Read,
    /// For reading and writing; it must exist.
    Write,
    /// The same past the page cache; `EINVAL` where the file system has no such thing.
    Direct,
    /// For writing; made with these permission bits if it does not exist.
    Create(u32),
    /// For writing; made with these permission bits, `EEXIST` if anything is there.
    CreateNew(u32),
}

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Link,
    /// A pipe, socket or device.
    Other,
}

/// What is known of a file without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: Kind,
    /// Its size, bytes.
    pub bytes: u64,
    /// Permission bits (`0o777`).
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: OsString,
    /// What it stands for.
    pub kind: Kind,
}

/// What direct I/O asks for, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory.
    pub memory: u32,
    /// Of offsets and lengths.
    pub offset: u32,
}

/// An open regular file.
pub trait Handle: Send + Sync {
    /// Reads up to `buf.len()` bytes from `offset` on; 0 at the end.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize>;
    /// Writes up to `bytes.len()` bytes at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize>;
    /// Cuts or extends (with zeros) the file.
    fn set_len(&self, bytes: u64) -> Result<()>;
    /// Writes up to the sum of `parts`, one behind the other, at `offset`.
    fn write_parts_at(&self, parts: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let first = parts.iter().find(|part| !part.is_empty());
        first.map_or(Ok(0), |part| self.write_at(part, offset))
    }
    /// Makes the file `bytes` long and takes the space for them, where the file system can.
    fn reserve(&self, bytes: u64) -> Result<()> {
        self.set_len(bytes)
    }
    /// What direct reads and writes of the file must be multiples of, if the system says.
    fn direct_alignment(&self) -> Option<Alignment> {
        None
    }
    /// The file itself, where it is one of the system.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Gives a socket up to `bytes` bytes from `offset` on without copying them here; 0 at the end. `None`: it must be read.
    /// What changes before the other side has taken it may be seen there.
    fn send_to(&self, socket: BorrowedFd<'_>, offset: u64, bytes: u64) -> Option<Result<u64>> {
        let _ = (socket, offset, bytes);
        None
    }
    /// Sets the permission bits.
    fn set_mode(&self, mode: u32) -> Result<()>;
    /// Makes contents durable.
    fn sync(&self) -> Result<()>;
    /// Makes contents durable, but not times and the like.
    fn sync_data(&self) -> Result<()> {
        self.sync()
    }
    /// What it is now.
    fn stat(&self) -> Result<Stat>;
    /// The checksum of a range, where it is known without reading the file. `BADMSG`: the bytes have changed since one
    /// was made of them.
    fn sum_at(&self, offset: u64, bytes: u64) -> Result<Option<Crc>> {
        let _ = (offset, bytes);
        Ok(None)
    }
    /// Of what was read from `offset` on, a checksum is being made: `BADMSG` if it is known not to be what was written.
    fn vouch(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let _ = (offset, bytes);
        Ok(())
    }
}

/// A directory and what is below it.
pub trait Fs: Send + Sync + fmt::Debug {
    /// Opens a regular file.
    fn open(&self, path: &Path, how: How) -> Result<Box<dyn Handle>>;
    /// What the name stands for.
    fn stat(&self, path: &Path) -> Result<Stat>;
    /// Everything in a directory, in no particular order.
    fn list(&self, path: &Path) -> Result<Vec<Entry>>;
    /// Makes a directory; the process's umask applies.
    fn mkdir(&self, path: &Path, mode: u32) -> Result<()>;
    /// Removes an empty directory.
    fn rmdir(&self, path: &Path) -> Result<()>;
    /// Removes a name that is no directory.
    fn unlink(&self, path: &Path) -> Result<()>;
    /// Renames, replacing what is at `to`.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
    /// Gives a file a second name; `EEXIST` if that is taken.
    fn link(&self, from: &Path, to: &Path) -> Result<()>;
    /// Sets permission bits of a file or directory.
    fn chmod(&self, path: &Path, mode: u32) -> Result<()>;
    /// Makes a directory's entries durable.
    fn sync_dir(&self, path: &Path) -> Result<()>;
    /// Free bytes for us, if the file system says.
    fn free(&self) -> Result<Option<u64>>;
    /// Are its files nothing but memory, so that reading them does not fail?
    fn is_memory(&self) -> bool {
        false
    }
}

/// Reads until `buf` is full or the file ends; how many bytes were there.
pub fn read_full(file: &dyn Handle, buf: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(done)
}

/// Bytes that are read at a time where only their checksum is wanted: a chunk would take its size in memory for each
/// thread, and what was just copied would be gone from the processor's cache before it is looked at.
const SLICE_BYTES: usize = 256 << 10;

/// The checksum of `len` bytes from `offset`, and how many there are. `buf` is for reading.
pub fn checksum(
    file: &dyn Handle,
    buf: &mut Vec<u8>,
    offset: u64,
    len: usize,
) -> Result<(usize, Crc)> {
    checksum_with(file, buf, (offset, len), |_, _| Ok(()))
}

/// The same; `each` looks at what is read.
pub fn checksum_with(
    file: &dyn Handle,
    buf: &mut Vec<u8>,
    (offset, len): (u64, usize),
    each: impl Fn(u64, &[u8]) -> Result<()>,
) -> Result<(usize, Crc)> {
    let mut crc = Crc64::new();
    let mut done = 0;
    while done < len {
        buf.resize(SLICE_BYTES.min(len - done), 0);
        let have = read_full(file, buf, offset + done as u64)?;
        crc.update(&buf[..have]);
        each(offset + done as u64, &buf[..have])?;
        done += have;
        if have < buf.len() {
            break;
        }
    }
    Ok((done, crc.crc()))
}

/// Gives a socket bytes of a file of the system; see [`Handle::send_to`].
pub(crate) fn send_file(
    socket: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: u64,
    bytes: u64,
) -> Result<u64> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut at = offset;
    let sent = rustix::io::retry_on_intr(|| {
        at = offset;
        rustix::fs::sendfile(socket, file, Some(&mut at), bytes)
    });
    sent.map(|n| n as u64)
}

/// Writes all of `bytes`.
pub fn write_all(file: &dyn Handle, bytes: &[u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], offset + done as u64)? {
            // POSIX allows 0 only for no bytes; taking it for progress would spin.
            0 => return Err(Errno::IO),
            n => done += n,
        }
    }
    Ok(())
}

/// Reads a whole file of at most `max` bytes; `FBIG` if it is longer.
pub fn read_small(fs: &dyn Fs, path: &Path, max: u64) -> Result<Vec<u8>> {
    let file = fs.open(path, How::Read)?;
    let bytes = file.stat()?.bytes;
    if bytes > max {
        return Err(Errno::FBIG);
    }
    let mut buf = vec![0; bytes as usize];
    let have = read_full(&*file, &mut buf, 0)?;
    buf.truncate(have);
    Ok(buf)
}

/// Makes a directory and those above it; none may be a link.
pub fn make_dirs(fs: &dyn Fs, path: &Path, mode: u32) -> Result<()> {
    match fs.mkdir(path, mode) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => match fs.stat(path)?.kind {
            Kind::Dir => Ok(()),
            _ => Err(Errno::NOTDIR),
        },
        Err(Errno::NOENT) => {
            let above = path.parent().ok_or(Errno::NOENT)?;
            make_dirs(fs, above, mode)?;
            match fs.mkdir(path, mode) {
                Err(Errno::EXIST) => Ok(()),
                other => other,
            }
        }
        Err(e) => Err(e),
    }
}

/// Removes whatever is at `path`, if anything. Entries that appear meanwhile are removed as well, unless
/// they keep coming.
pub fn remove_tree(fs: &dyn Fs, path: &Path) -> Result<()> {
    match fs.stat(path) {
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(e),
        Ok(stat) if stat.kind != Kind::Dir => return gone_is_fine(fs.unlink(path)),
        Ok(_) => {}
    }
    for _ in 0..16 {
        remove_contents(fs, path)?;
        match gone_is_fine(fs.rmdir(path)) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            other => return other,
        }
    }
    Err(Errno::NOTEMPTY)
}

/// Removes everything in the directory `path`.
pub fn remove_contents(fs: &dyn Fs, path: &Path) -> Result<()> {
    let entries = match with_rights(fs, path, || fs.list(path)) {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let inner = path.join(&entry.name);
        with_rights(fs, path, || match entry.kind {
            Kind::Dir => remove_tree(fs, &inner),
            _ => gone_is_fine(fs.unlink(&inner)),
        })?;
    }
    Ok(())
}

/// Does something in our directory `dir`, even if an application took its own rights there away.
pub fn with_rights<T>(fs: &dyn Fs, dir: &Path, call: impl Fn() -> Result<T>) -> Result<T> {
    match call() {
        Err(Errno::ACCESS) if !dir.as_os_str().is_empty() => {
            fs.chmod(dir, 0o700)?;
            call()
        }
        other => other,
    }
}

/// Removes empty directories from `path` upwards, but not `stop` or what is above it.
pub fn prune(fs: &dyn Fs, path: &Path, stop: &Path) {
    let mut at = Some(path);
    while let Some(dir) = at {
        if dir == stop || !dir.starts_with(stop) || fs.rmdir(dir).is_err() {
            return;
        }
        at = dir.parent();
    }
}

/// Success where the name is gone already.
pub fn gone_is_fine(result: Result<()>) -> Result<()> {
    match result {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}
