//! [`Fs`] on the system's own calls.

use std::ffi::{OsStr, OsString};
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RawMode, StatxFlags,
};
use rustix::io::{Errno, retry_on_intr};

use super::{Alignment, Entry, Fs, Handle, How, Kind, Result, Stat};

/// A directory of the system.
#[derive(Debug)]
pub struct PosixFs {
    root: OwnedFd,
}

/// Of file systems in memory: statfs(2).
const TMPFS_MAGIC: u32 = 0x0102_1994;
const RAMFS_MAGIC: u32 = 0x8584_58f6;

/// Flags for every step on the way to a file: links are not followed.
const STEP: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl PosixFs {
    /// An existing directory. `follow`: `root` itself may be a link.
    pub fn open(root: &Path, follow: bool) -> Result<PosixFs> {
        let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if !follow {
            flags |= OFlags::NOFOLLOW;
        }
        let root = retry_on_intr(|| rustix::fs::open(root, flags, Mode::empty()))?;
        Ok(PosixFs { root })
    }

    /// A directory for this process alone: made (0700) if it is not there, its parent must be. Refuses a
    /// symbolic link (`ELOOP` or `ENOTDIR`), a foreign owner (`EPERM`) and one that another process has
    /// (`EBUSY`).
    pub fn own(root: &Path) -> Result<PosixFs> {
        match rustix::fs::mkdir(root, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        let fs = PosixFs::open(root, false)?;
        let stat = fs.stat(Path::new(""))?;
        if stat.uid != rustix::process::geteuid().as_raw() {
            return Err(Errno::PERM);
        }
        if stat.mode != 0o700 {
            fs.chmod(Path::new(""), 0o700)?;
        }
        // Before anything is changed: it might be a living job's.
        fs.lock()?;
        Ok(fs)
    }

    /// Takes the directory for this process; `BUSY` if another one has it. The kernel gives it back
    /// when the process is gone.
    pub fn lock(&self) -> Result<()> {
        match retry_on_intr(|| {
            rustix::fs::flock(&self.root, FlockOperation::NonBlockingLockExclusive)
        }) {
            Err(Errno::WOULDBLOCK) => Err(Errno::BUSY),
            other => other,
        }
    }

    /// The directory that `path` is in, and its name there.
    fn place<'p>(&self, path: &'p Path) -> Result<(Option<OwnedFd>, &'p OsStr)> {
        let mut at: Option<OwnedFd> = None;
        let mut parts = path.components().peekable();
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else { return Err(Errno::INVAL) };
            if parts.peek().is_none() {
                return Ok((at, name));
            }
            let from = at.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            at = Some(retry_on_intr(|| rustix::fs::openat(from, name, STEP, Mode::empty()))?);
        }
        Ok((None, OsStr::from_bytes(b".")))
    }

    fn open_raw(&self, path: &Path, flags: OFlags, mode: u32) -> Result<OwnedFd> {
        let (dir, name) = self.place(path)?;
        let dir = dir.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        retry_on_intr(|| rustix::fs::openat(dir, name, flags, bits(mode)))
    }

    /// Runs `call` with the directory that `path` is in and its name there.
    fn with<T>(
        &self,
        path: &Path,
        call: impl Fn(std::os::fd::BorrowedFd<'_>, &OsStr) -> Result<T>,
    ) -> Result<T> {
        let (dir, name) = self.place(path)?;
        let dir = dir.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
        retry_on_intr(|| call(dir, name))
    }

    fn with_two(
        &self,
        from: &Path,
        to: &Path,
        call: impl Fn(
            std::os::fd::BorrowedFd<'_>,
            &OsStr,
            std::os::fd::BorrowedFd<'_>,
            &OsStr,
        ) -> Result<()>,
    ) -> Result<()> {
        self.with(from, |from_dir, from| {
            let (dir, name) = self.place(to)?;
            let dir = dir.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            call(from_dir, from, dir, name)
        })
    }
}

fn bits(mode: u32) -> Mode {
    Mode::from_raw_mode((mode & 0o777) as RawMode)
}

fn kind(of: FileType) -> Kind {
    match of {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Link,
        _ => Kind::Other,
    }
}

fn stat(raw: &rustix::fs::Stat) -> Stat {
    Stat {
        kind: kind(FileType::from_raw_mode(raw.st_mode as RawMode)),
        bytes: u64::try_from(raw.st_size).unwrap_or(0),
        mode: raw.st_mode & 0o777,
        uid: raw.st_uid,
    }
}

impl Fs for PosixFs {
    fn open(&self, path: &Path, how: How) -> Result<Box<dyn Handle>> {
        // NONBLOCK: opening a pipe that somebody left here must not wait for its other end.
        let plain = OFlags::NONBLOCK | OFlags::NOCTTY;
        let (flags, mode) = match how {
            How::Read => (OFlags::RDONLY, 0),
            How::Write => (OFlags::RDWR, 0),
            How::Direct => (OFlags::RDWR | OFlags::DIRECT, 0),
            How::Create(mode) => (OFlags::RDWR | OFlags::CREATE, mode),
            How::CreateNew(mode) => (OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode),
        };
        let file = PosixFile { fd: self.open_raw(path, flags | plain, mode)? };
        match file.stat()?.kind {
            Kind::File => Ok(Box::new(file)),
            Kind::Dir => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    fn stat(&self, path: &Path) -> Result<Stat> {
        self.with(path, |dir, name| {
            Ok(stat(&rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?))
        })
    }

    fn list(&self, path: &Path) -> Result<Vec<Entry>> {
        let fd = self.open_raw(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let mut entries = Vec::new();
        for entry in Dir::new(fd)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                // Some file systems do not say in the directory.
                FileType::Unknown => match self.stat(&path.join(name)) {
                    Err(Errno::NOENT) => continue,
                    other => other?.kind,
                },
                known => kind(known),
            };
            entries.push(Entry { name: OsString::from(name), kind });
        }
        Ok(entries)
    }

    fn mkdir(&self, path: &Path, mode: u32) -> Result<()> {
        self.with(path, |dir, name| rustix::fs::mkdirat(dir, name, bits(mode)))
    }

    fn rmdir(&self, path: &Path) -> Result<()> {
        self.with(path, |dir, name| rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR))
    }

    fn unlink(&self, path: &Path) -> Result<()> {
        self.with(path, |dir, name| rustix::fs::unlinkat(dir, name, AtFlags::empty()))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.with_two(from, to, |from_dir, from, to_dir, to| {
            rustix::fs::renameat(from_dir, from, to_dir, to)
        })
    }

    fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.with_two(from, to, |from_dir, from, to_dir, to| {
            rustix::fs::linkat(from_dir, from, to_dir, to, AtFlags::empty())
        })
    }

    fn chmod(&self, path: &Path, mode: u32) -> Result<()> {
        self.with(path, |dir, name| {
            let raw = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
            // Linux has no chmod that refuses links before 6.6; only our own uid could swap it here.
            match stat(&raw).kind {
                Kind::File | Kind::Dir => {
                    rustix::fs::chmodat(dir, name, bits(mode), AtFlags::empty())
                }
                _ => Err(Errno::LOOP),
            }
        })
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let fd = self.open_raw(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        match retry_on_intr(|| rustix::fs::fsync(&fd)) {
            // File systems without durable directories of their own answer so; there is no other call.
            Err(Errno::INVAL) => Ok(()),
            other => other,
        }
    }

    fn free(&self) -> Result<Option<u64>> {
        let space = retry_on_intr(|| rustix::fs::fstatvfs(&self.root))?;
        Ok((space.f_blocks > 0).then(|| space.f_bavail.saturating_mul(space.f_frsize)))
    }

    fn is_memory(&self) -> bool {
        let stat = rustix::fs::fstatfs(&self.root);
        // The type has another width on each architecture.
        stat.is_ok_and(|stat| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(stat.f_type as u32)))
    }
}

/// An open file of the system.
#[derive(Debug)]
struct PosixFile {
    fd: OwnedFd,
}

impl Handle for PosixFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        retry_on_intr(|| rustix::io::pread(&self.fd, &mut *buf, offset))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize> {
        retry_on_intr(|| rustix::io::pwrite(&self.fd, bytes, offset))
    }

    fn write_parts_at(&self, parts: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        retry_on_intr(|| rustix::io::pwritev(&self.fd, parts, offset))
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        self.set_len(bytes)?;
        match retry_on_intr(|| rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, bytes)) {
            // The space is then taken by the first writes.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            other => other,
        }
    }

    fn direct_alignment(&self) -> Option<Alignment> {
        let stat = rustix::fs::statx(&self.fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
        let stat = stat.ok().filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0)?;
        // Zeros: no direct I/O, which opening for it has said or will say.
        (stat.stx_dio_mem_align > 0 && stat.stx_dio_offset_align > 0).then_some(Alignment {
            memory: stat.stx_dio_mem_align,
            offset: stat.stx_dio_offset_align,
        })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn send_to(&self, socket: BorrowedFd<'_>, offset: u64, bytes: u64) -> Option<Result<u64>> {
        match super::send_file(socket, self.fd.as_fd(), offset, bytes) {
            // Not of a file of this kind.
            Err(Errno::INVAL | Errno::NOSYS) => None,
            sent => Some(sent),
        }
    }

    fn set_len(&self, bytes: u64) -> Result<()> {
        retry_on_intr(|| rustix::fs::ftruncate(&self.fd, bytes))
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        retry_on_intr(|| rustix::fs::fchmod(&self.fd, bits(mode)))
    }

    fn sync(&self) -> Result<()> {
        retry_on_intr(|| rustix::fs::fsync(&self.fd))
    }

    fn sync_data(&self) -> Result<()> {
        retry_on_intr(|| rustix::fs::fdatasync(&self.fd))
    }

    fn stat(&self) -> Result<Stat> {
        Ok(stat(&rustix::fs::fstat(&self.fd)?))
    }
}
