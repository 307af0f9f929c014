//! What the kernel offers: userfaultfd, PAGEMAP_SCAN, reading memory without risking a signal.
//!
//! rustix and libc have no types for these ioctls; the structures here follow the kernel's ABI
//! (include/uapi/linux/userfaultfd.h and fs.h), which does not change.

use std::fs::File;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::{MsyncFlags, UserfaultfdFlags};
use thiserror::Error;

/// What a machine lacks for a way of watching or copying memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Lacking {
    /// userfaultfd(2) is refused.
    #[error("no userfaultfd here ({0})")]
    Userfaultfd(Errno),
    /// Only faults of user mode can be had, so a system call that writes would fail.
    #[error(
        "userfaultfd serves faults of user mode only (needs CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1 or access to /dev/userfaultfd)"
    )]
    UserModeOnly,
    /// The kernel is too old.
    #[error("the kernel's userfaultfd lacks the features {missing:#x}")]
    Features {
        /// The missing bits of `uffdio_api.features`.
        missing: u64,
    },
    /// /proc/self/pagemap cannot be opened.
    #[error("/proc/self/pagemap cannot be read ({0})")]
    Pagemap(Errno),
    /// The kernel has no PAGEMAP_SCAN (Linux 6.7).
    #[error("no PAGEMAP_SCAN here ({0})")]
    PagemapScan(Errno),
    /// process_vm_readv(2) on the own process is refused.
    #[error("process_vm_readv is refused ({0})")]
    ReadSelf(Errno),
    /// A trial on a page of our own failed.
    #[error("a trial on own memory failed ({0})")]
    Trial(Errno),
    /// A trial on a page of our own gave a wrong answer.
    #[error("a trial on own memory gave a wrong answer")]
    WrongAnswer,
}

pub(crate) const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
pub(crate) const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub(crate) const WP_UNPOPULATED: u64 = 1 << 13;
pub(crate) const WP_ASYNC: u64 = 1 << 15;

const UFFD_API: u64 = 0xaa;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

/// `struct uffd_msg`; of its union only the page fault is ever asked for.
#[repr(C)]
struct UffdMsg {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

const OP_API: Opcode = opcode::read_write::<UffdioApi>(0xaa, 0x3f);
const OP_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xaa, 0x00);
const OP_UNREGISTER: Opcode = opcode::read::<UffdioRange>(0xaa, 0x01);
const OP_WAKE: Opcode = opcode::read::<UffdioRange>(0xaa, 0x02);
const OP_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteprotect>(0xaa, 0x06);
const OP_SCAN: Opcode = opcode::read_write::<ScanArg>(b'f', 16);
const OP_NEW: Opcode = opcode::none(0xaa, 0x00);

/// Whose faults a userfaultfd is to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    /// Those of user mode; to be had by everybody.
    User,
    /// Those of system calls too.
    All,
}

/// A userfaultfd. Its calls act on the process that opened it, even if a forked child makes them.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// Opens one with just these features. It never blocks and does not pass an exec.
    pub(crate) fn open(faults: Faults, features: u64) -> Result<Uffd, Lacking> {
        let uffd = Uffd { fd: open_fd(faults)? };
        let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
        match uffd.api(&mut api) {
            Ok(()) => Ok(uffd),
            // A second one tells what there is: the first refuses to be asked again.
            Err(refused) => {
                let other = Uffd { fd: open_fd(faults)? };
                let mut there = UffdioApi { api: UFFD_API, features: 0, ioctls: 0 };
                match other.api(&mut there) {
                    Ok(()) if features & !there.features != 0 => {
                        Err(Lacking::Features { missing: features & !there.features })
                    }
                    _ => Err(Lacking::Userfaultfd(refused)),
                }
            }
        }
    }

    /// For poll(2): readable when there is a fault.
    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn api(&self, api: &mut UffdioApi) -> Result<(), Errno> {
        // SAFETY: OP_API reads and writes one `struct uffdio_api`, which UffdioApi is.
        unsafe { ioctl(&self.fd, Updater::<OP_API, _>::new(api)) }
    }

    /// Registers whole pages for write protection.
    pub(crate) fn register(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut arg =
            UffdioRegister { range: range(start, len), mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: OP_REGISTER reads and writes one `struct uffdio_register`; registering changes no content.
        unsafe { ioctl(&self.fd, Updater::<OP_REGISTER, _>::new(&mut arg)) }
    }

    /// Gives pages back, unprotected, and wakes who waits for them.
    pub(crate) fn unregister(&self, start: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: OP_UNREGISTER reads one `struct uffdio_range`; unregistering changes no content.
        unsafe { ioctl(&self.fd, Setter::<OP_UNREGISTER, _>::new(range(start, len))) }
    }

    /// Gives back whatever is still ours of a range, part of which may have gone or be somebody else's.
    /// It takes no memory, for which it tries every page where nothing is ours.
    pub(crate) fn unregister_all(&self, start: usize, len: usize, page: usize) {
        if len == 0 || self.unregister(start, len).is_ok() || len <= page {
            return;
        }
        let half = (len / 2).next_multiple_of(page);
        self.unregister_all(start, half, page);
        self.unregister_all(start + half, len - half, page);
    }

    /// Sets or takes the protection of whole pages; taking it wakes who waits for them.
    pub(crate) fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        let mode = if on { WRITEPROTECT_MODE_WP } else { 0 };
        let mut arg = UffdioWriteprotect { range: range(start, len), mode };
        // SAFETY: OP_WRITEPROTECT reads one `struct uffdio_writeprotect`; protecting changes no content.
        unsafe { ioctl(&self.fd, Updater::<OP_WRITEPROTECT, _>::new(&mut arg)) }
    }

    /// Wakes who waits for these pages; they try again.
    pub(crate) fn wake(&self, start: usize, len: usize) {
        // SAFETY: OP_WAKE reads one `struct uffdio_range`; waking changes no content.
        // It fails only for a malformed range, and then nobody waits in it.
        let _ = unsafe { ioctl(&self.fd, Setter::<OP_WAKE, _>::new(range(start, len))) };
    }

    /// The address of the next fault that nobody has served, if there is one. Never blocks.
    pub(crate) fn next_fault(&self) -> Option<usize> {
        let mut msg = MaybeUninit::<UffdMsg>::uninit();
        // SAFETY: the buffer is one message long and the kernel writes whole messages only.
        let n = unsafe {
            libc::read(self.fd.as_raw_fd(), msg.as_mut_ptr().cast(), size_of::<UffdMsg>())
        };
        if n != size_of::<UffdMsg>() as isize {
            return None;
        }
        // SAFETY: the kernel has written a whole message, and any bytes are a valid UffdMsg.
        let msg = unsafe { msg.assume_init() };
        (msg.event == EVENT_PAGEFAULT).then_some(msg.address as usize)
    }
}

fn range(start: usize, len: usize) -> UffdioRange {
    UffdioRange { start: start as u64, len: len as u64 }
}

fn open_fd(faults: Faults) -> Result<OwnedFd, Lacking> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // UFFD_USER_MODE_ONLY is 1, for which rustix has no name.
    let user = flags | UserfaultfdFlags::from_bits_retain(1);
    let flags = if faults == Faults::User { user } else { flags };
    // SAFETY: a new userfaultfd does nothing before it is told to.
    match unsafe { rustix::mm::userfaultfd(flags) } {
        // Kernels before 5.11 do not know the flag and need no restriction either.
        Err(Errno::INVAL) if faults == Faults::User => open_fd(Faults::All),
        Err(Errno::PERM) if faults == Faults::All => open_dev().ok_or_else(|| {
            // SAFETY: as above; it is closed at once.
            match unsafe { rustix::mm::userfaultfd(user) } {
                Ok(_) => Lacking::UserModeOnly,
                Err(e) => Lacking::Userfaultfd(e),
            }
        }),
        other => other.map_err(Lacking::Userfaultfd),
    }
}

/// Those who may open /dev/userfaultfd get the faults of system calls too.
fn open_dev() -> Option<OwnedFd> {
    let dev =
        rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value and gives a new descriptor.
    let fd = unsafe { libc::ioctl(dev.as_raw_fd(), OP_NEW as _, flags) };
    // SAFETY: a descriptor that the kernel has just made for us is owned by nobody else.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) const SCAN_WP_MATCHING: u64 = 1 << 0;
pub(crate) const SCAN_CHECK_WPASYNC: u64 = 1 << 1;
pub(crate) const PAGE_IS_WRITTEN: u64 = 1 << 1;
pub(crate) const PAGE_IS_PRESENT: u64 = 1 << 3;
pub(crate) const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct page_region`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PageRegion {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ScanArg {
    /// This and five more are filled in by `Pagemap::scan`.
    pub(crate) size: u64,
    pub(crate) flags: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) walk_end: u64,
    pub(crate) vec: u64,
    pub(crate) vec_len: u64,
    pub(crate) max_pages: u64,
    pub(crate) category_inverted: u64,
    pub(crate) category_mask: u64,
    pub(crate) category_anyof_mask: u64,
    pub(crate) return_mask: u64,
}

struct ScanCall<'a>(&'a mut ScanArg);

// SAFETY: PAGEMAP_SCAN reads and writes one `struct pm_scan_arg` behind the pointer that `as_ptr`
// gives, and returns the number of filled entries.
unsafe impl Ioctl for ScanCall<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        OP_SCAN
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        (&raw mut *self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut std::ffi::c_void) -> Result<usize, Errno> {
        Ok(out as usize)
    }
}

/// /proc/self/pagemap of the process that opened it.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    pub(crate) fn open() -> Result<Pagemap, Lacking> {
        let fd =
            rustix::fs::open("/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        Ok(Pagemap { file: File::from(fd.map_err(Lacking::Pagemap)?) })
    }

    /// One step of a scan from `start` towards `end`: the filled entries, and how far it came.
    pub(crate) fn scan<'v>(
        &self,
        what: ScanArg,
        start: usize,
        end: usize,
        vec: &'v mut [PageRegion],
    ) -> Result<(&'v [PageRegion], usize), Errno> {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start: start as u64,
            end: end as u64,
            walk_end: start as u64,
            vec: vec.as_mut_ptr() as u64,
            vec_len: vec.len() as u64,
            ..what
        };
        // SAFETY: the kernel fills at most `vec_len` entries of `vec`, exclusively ours for the call.
        let n = unsafe { ioctl(self.file.as_fd(), ScanCall(&mut arg)) }?;
        Ok((vec.get(..n).unwrap_or_default(), arg.walk_end as usize))
    }

    /// Whether these addresses are huge pages; kernels before 6.7 cannot tell.
    pub(crate) fn is_huge(&self, start: usize, len: usize) -> bool {
        let what = ScanArg {
            category_mask: PAGE_IS_HUGE,
            return_mask: PAGE_IS_HUGE,
            ..ScanArg::default()
        };
        let mut vec = [PageRegion::default()];
        let found = self.scan(what, start, start + len, &mut vec);
        found.is_ok_and(|(found, _)| {
            found.first().is_some_and(|r| (r.start, r.end) == (start as u64, (start + len) as u64))
        })
    }

    /// Whether every page from `start` on is write-protected, one page for each entry of `entries`.
    pub(crate) fn all_protected(&self, start: usize, page: usize, entries: &mut [u8]) -> bool {
        const UFFD_WP: u64 = 1 << 57;
        let offset = (start / page * 8) as u64;
        self.file.read_exact_at(entries, offset).is_ok()
            && entries.as_chunks::<8>().0.iter().all(|e| u64::from_ne_bytes(*e) & UFFD_WP != 0)
    }
}

/// Whether pages of this process are pinned for a device, as memory that is registered with a network card is. Drivers
/// tell the kernel (RDMA of all kinds, io_uring's registered buffers); where that cannot be read, it is yes.
pub fn pinned() -> bool {
    std::fs::read("/proc/self/status").map_or(true, |text| pinned_in(&text))
}

fn pinned_in(status: &[u8]) -> bool {
    let line = status.split(|b| *b == b'\n').find_map(|l| l.strip_prefix(b"VmPin:"));
    // A word that is no number is not 0 either.
    let amount = line.and_then(|l| l.split(u8::is_ascii_whitespace).find(|w| !w.is_empty()));
    amount.is_none_or(|w| w.iter().any(|b| *b != b'0'))
}

/// Bytes of a page.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf reads no memory of ours.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).unwrap_or(4096)
}

/// The number of this process; asked anew each time, so that a forked child notices what it is.
pub(crate) fn own_pid() -> i32 {
    // SAFETY: getpid reads no memory of ours.
    unsafe { libc::getpid() }
}

/// Whether every page of a range of whole pages is mapped.
pub(crate) fn is_mapped(start: usize, len: usize) -> bool {
    // SAFETY: msync with MS_ASYNC only looks at the mappings and fails with ENOMEM for a gap.
    len == 0 || unsafe { rustix::mm::msync(start as *mut _, len, MsyncFlags::ASYNC) }.is_ok()
}

/// Reads own memory that may have been unmapped: an error then, and no signal.
pub(crate) fn read_self(pid: i32, src: *const u8, dst: *mut u8, len: usize) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        let local = libc::iovec { iov_base: dst.wrapping_add(done).cast(), iov_len: len - done };
        let remote =
            libc::iovec { iov_base: src.wrapping_add(done).cast_mut().cast(), iov_len: len - done };
        // SAFETY: the kernel checks both ranges; that `dst` may be overwritten is for the caller, as for
        // a write through a raw pointer.
        let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
        match usize::try_from(n) {
            Ok(0) => return Err(Errno::FAULT),
            Ok(n) => done += n,
            Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                other => return Err(other.unwrap_or(Errno::IO)),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pinned_is_read_from_the_status() {
        assert!(!pinned_in(b"Name:\tx\nVmLck:\t  12 kB\nVmPin:\t       0 kB\nVmHWM:\t 9 kB\n"));
        assert!(pinned_in(b"VmLck:\t 0 kB\nVmPin:\t      104 kB\n"));
        assert!(pinned_in(b"VmPin:\n") && pinned_in(b"VmLck:\t 0 kB\n") && pinned_in(b""));
        assert!(!pinned(), "nothing here registers memory with a device");
    }
}
