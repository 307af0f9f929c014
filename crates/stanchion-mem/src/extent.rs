//! Extents and their mappings.

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// Largest extent, bytes: what one mapping may cost.
pub const EXTENT_BYTES_MAX: u64 = 4 << 30;
/// How much is made warm between two looks at whether it is still wanted, bytes.
const WARM_STEP: usize = 4 << 20;

/// Why memory is not to be had or not to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemError {
    /// The system gives no more: memory, descriptors or mappings.
    #[error("the system gives no memory: {0}")]
    Os(#[from] Errno),
    /// A size that no extent has.
    #[error("an extent of {0} bytes cannot be")]
    Size(u64),
    /// A descriptor that is not what it was said to be.
    #[error("a descriptor of {have} bytes, sealed: {sealed}, was said to be an extent of {want}")]
    Descriptor {
        /// As it was said.
        want: u64,
        /// As it is.
        have: u64,
        /// Its size cannot change.
        sealed: bool,
    },
}

/// Shared memory mapped into this process.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range that belongs to the value and not to a thread; what is in it is only copied
// in and out as raw bytes, and concurrent copies (other processes make them anyway) can mix bytes, never more.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of an extent, after looking that the descriptor is one: of that size, sealed against
    /// shrinking, so that no access can fault. A child of fork() does not inherit it.
    pub fn of(fd: impl AsFd, len: u64) -> Result<Mapping, MemError> {
        let bytes = usize::try_from(len).map_err(|_| MemError::Size(len))?;
        if bytes == 0 || len > EXTENT_BYTES_MAX {
            return Err(MemError::Size(len));
        }
        let have = u64::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        let sealed = seals.contains(SealFlags::SHRINK);
        if have != len || !sealed {
            return Err(MemError::Descriptor { want: len, have, sealed });
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, &fd, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        let mapping = Mapping { start, len: bytes };
        mapping.advise(Advice::LinuxDontFork);
        mapping.advise(Advice::LinuxDontDump);
        mapping.advise(Advice::LinuxHugepage);
        Ok(mapping)
    }

    /// What the kernel does not know it may ignore: these are wishes.
    fn advise(&self, advice: Advice) {
        // SAFETY: the range is this mapping's own, and none of the advices used here changes what is in it.
        let _a_wish = unsafe { madvise(self.start.as_ptr().cast::<c_void>(), self.len, advice) };
    }

    /// Does a child of fork() inherit it? At first it does not.
    pub fn inherit(&self, inherit: bool) -> Result<(), MemError> {
        let advice = if inherit { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
        // SAFETY: the range is this mapping's own, and what is in it stays as it is.
        unsafe { madvise(self.start.as_ptr().cast::<c_void>(), self.len, advice) }?;
        Ok(())
    }

    /// Its size, bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an extent has bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first byte. To be read and written as raw bytes only.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Makes every page exist in memory and in this process's page tables, writable and marked as written, so that
    /// the first copy costs what the later ones do. (`MAP_POPULATE` is not enough: it maps shared pages as if for
    /// reading, and the first write to each then costs as much as the copy itself.) Stops when `cancel` says so.
    pub fn warm(&self, cancel: &dyn Fn() -> bool) -> Result<(), MemError> {
        let mut at = 0;
        while at < self.len && !cancel() {
            let step = WARM_STEP.min(self.len - at);
            // SAFETY: the range lies in this mapping; populating changes no byte.
            let done = unsafe {
                let start = self.start.as_ptr().add(at).cast::<c_void>();
                madvise(start, step, Advice::LinuxPopulateWrite)
            };
            match done {
                Ok(()) => at += step,
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Before Linux 5.14: pages come when they are touched, slower, and are as good then.
                Err(Errno::INVAL) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Copies `bytes` to `offset`. Panics beyond the end: that is our own bug.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: checked to lie in the mapping, which lives as long as `self`; `bytes` is memory of our own that
        // does not overlap a mapping nobody has a reference to.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.start.as_ptr().add(offset),
                bytes.len(),
            );
        }
    }

    /// As [`Mapping::write`], for many small copies that nobody here reads soon; [`crate::copy::copies_done`] when others
    /// are to be told of them.
    pub fn write_past_caches(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe {
            crate::copy::copy_past_caches(
                bytes.as_ptr(),
                self.start.as_ptr().add(offset),
                bytes.len(),
            );
        }
    }

    /// Copies from `offset` into `buf`: whatever is there at the moment. Panics beyond the end.
    pub fn read(&self, offset: usize, buf: &mut [u8]) {
        self.check(offset, buf.len());
        // SAFETY: as in `write`, the other way.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.start.as_ptr().add(offset),
                buf.as_mut_ptr(),
                buf.len(),
            );
        }
    }

    fn check(&self, offset: usize, len: usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "a copy of {len} bytes at {offset} goes beyond an extent of {}", self.len);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and nobody has a reference into it: only copies are handed out.
        let _nothing_to_do_about_it =
            unsafe { munmap(self.start.as_ptr().cast::<c_void>(), self.len) };
    }
}

/// An extent as its agent has it: the memory and the descriptor that shares it.
#[derive(Debug)]
pub struct Extent {
    fd: OwnedFd,
    mapping: Mapping,
}

impl Extent {
    /// A new one. Its pages do not exist yet: see [`Mapping::warm`].
    pub fn create(bytes: u64) -> Result<Extent, MemError> {
        if bytes == 0 || bytes > EXTENT_BYTES_MAX {
            return Err(MemError::Size(bytes));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("stanchion", flags)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        let mapping = Mapping::of(&fd, bytes)?;
        Ok(Extent { fd, mapping })
    }

    /// Its memory in this process.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// A descriptor of the same memory that can only be read through.
    pub fn reader(&self) -> Result<OwnedFd, MemError> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
    }

    /// Gives the memory back to the system, also from under those who still map it: they see zeros from now on, and
    /// what they write there is nobody's.
    pub fn discard(&self) {
        let (flags, len) = (
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            self.mapping.len as u64,
        );
        let _goes_with_the_last_mapping = rustix::fs::fallocate(&self.fd, flags, 0, len);
    }
}

impl AsFd for Extent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_are_one_memory() {
        let extent = Extent::create(3 << 20).unwrap();
        let other = Mapping::of(&extent, 3 << 20).unwrap();
        extent.mapping().warm(&|| false).unwrap();
        other.warm(&|| false).unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
        extent.mapping().write(12_345, &bytes);
        let mut back = vec![0; bytes.len()];
        other.read(12_345, &mut back);
        assert_eq!(back, bytes);
        let mut read = vec![0; 10];
        rustix::io::pread(extent.reader().unwrap(), &mut read, 12_345).unwrap();
        assert_eq!(read, bytes[..10]);
    }

    #[test]
    fn a_reader_cannot_write_and_nobody_can_resize() {
        let extent = Extent::create(8192).unwrap();
        let reader = extent.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&reader, b"x", 0), Err(Errno::BADF));
        assert_eq!(rustix::fs::ftruncate(&extent, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&extent, 1 << 20), Err(Errno::PERM));
    }

    #[test]
    fn what_is_no_extent_is_not_mapped() {
        let extent = Extent::create(8192).unwrap();
        let wrong = Mapping::of(&extent, 4096).unwrap_err();
        assert_eq!(wrong, MemError::Descriptor { want: 4096, have: 8192, sealed: true });
        // It could shrink under a mapping, which then faults.
        let loose = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        let wrong = Mapping::of(&loose, 4096).unwrap_err();
        assert_eq!(wrong, MemError::Descriptor { want: 4096, have: 4096, sealed: false });
        assert_eq!(Extent::create(0).unwrap_err(), MemError::Size(0));
        assert_eq!(Extent::create(u64::MAX).unwrap_err(), MemError::Size(u64::MAX));
    }

    #[test]
    #[should_panic(expected = "goes beyond an extent")]
    fn a_copy_beyond_the_end_is_a_bug() {
        Extent::create(4096).unwrap().mapping().write(4090, b"seven b");
    }

    #[test]
    fn a_discarded_extent_is_empty_for_who_still_maps_it() {
        let extent = Extent::create(8192).unwrap();
        let other = Mapping::of(&extent, 8192).unwrap();
        extent.mapping().write(0, b"data");
        extent.discard();
        let mut back = [1; 4];
        other.read(0, &mut back);
        assert_eq!(back, [0; 4]);
    }

    #[test]
    fn a_child_does_not_inherit_the_memory() {
        let extent = Extent::create(8192).unwrap();
        let flags = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let at = format!("{:x}-", extent.mapping().as_ptr() as usize);
        let mine = flags.split(&at).nth(1).unwrap();
        let line = mine.lines().find(|l| l.starts_with("VmFlags")).unwrap();
        assert!(line.split_whitespace().any(|f| f == "dc"), "{line}");
    }
}
