//! A snapshot by fork: the child has all memory as it was and copies it out, then it is gone.
//!
//! For those who may not have userfaultfd for system calls. What the application writes meanwhile the
//! kernel copies page by page, so it costs more than write protection does (DESIGN.md, section 9).
//!
//! The child is made by clone(2) directly: no handler of pthread_atfork runs, and with no signal at its
//! end no wait() of the application ever meets it. It holds none of its parent's files, so connections
//! and pipes end with their owners, and has all signals blocked, since their handlers are the
//! application's. It calls nothing but memcpy, setpriority, close_range, poll, madvise, write and _exit.
//!
//! It waits until it is let go, so that it does not take cores from ranks that are still on their way into the same
//! checkpoint; whose parent is gone is let go by that.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thiserror::Error;

use crate::copy::{Piece, copy_out};
use crate::cow::Quiet;
use crate::kernel::own_pid;
use crate::maps::{Purpose, Span, Why, unsuitable};

/// How much nicer than the application a child is: a tenth of its share where there are too few cores.
const NICER: libc::c_long = 10;

/// From Linux 5.14 on; not in all C libraries' headers.
const MADV_POPULATE_WRITE: libc::c_int = 23;
const LEAST_PAGE: usize = 4096;

/// How much is copied between two looks at whether it is still wanted, bytes.
const STEP: usize = 4 << 20;
/// Longest wait to be let go, milliseconds. A parent may take longer, if another rank is slow; its child then only
/// begins to copy, and takes cores from ranks that are still on their way.
const HELD_MS_MAX: libc::c_int = 60_000;
/// Longest pause between two steps, milliseconds.
const PAUSE_MS_MAX: u64 = 60_000;

/// Why a snapshot did not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ForkError {
    /// This piece is to be copied at once.
    #[error("a forked child does not see piece {index} as it is ({why:?})")]
    Unsuitable {
        /// Which of the pieces.
        index: usize,
        /// Why.
        why: Why,
    },
    /// There is no child.
    #[error("no child could be forked ({0})")]
    Fork(Errno),
    /// The child ended before it had copied all.
    #[error("the copying child ended early")]
    Died,
    /// It takes longer than the caller would wait.
    #[error("the copying child is not done yet")]
    Timeout,
    /// The kernel failed.
    #[error("{0}")]
    Os(Errno),
}

/// A child that copies. Dropped before its end is known, it is killed.
#[derive(Debug)]
pub struct Forked {
    /// Whose child it is.
    parent: i32,
    pidfd: OwnedFd,
    result: OwnedFd,
    /// As long as it is open the child waits.
    held: OwnedFd,
    bytes: u64,
    ended: Option<Result<(), ForkError>>,
}

/// How a child copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct Manner<'a> {
    /// Written here when all is copied: to a socket that somebody else listens to, who can stop the child by shutting
    /// down its direction.
    pub ready: Option<(BorrowedFd<'a>, &'a [u8])>,
    /// Bytes a second at most; 0: as fast as it can.
    pub bytes_per_s: u64,
}

/// Forks a child that copies all pieces, once it is let go.
///
/// # Safety
/// No thread writes to the pieces before this returns. Every `dst` is writable, part of a shared mapping
/// that a child inherits, overlaps nothing and is nobody else's before the child has ended.
pub unsafe fn forked_copy(pieces: &[Piece], manner: Manner<'_>) -> Result<Forked, ForkError> {
    let spans: Vec<Span> =
        pieces.iter().map(|p| Span { start: p.src.addr(), len: p.len }).collect();
    if let Some(&(index, why)) = unsuitable(&spans, Purpose::Fork).map_err(ForkError::Os)?.first() {
        return Err(ForkError::Unsuitable { index, why });
    }
    // SAFETY: as our caller promises.
    unsafe { forked_copy_unchecked(pieces, manner) }
}

/// The same where the pieces are known to be what a child sees as it is.
///
/// # Safety
/// As for [`forked_copy`].
pub unsafe fn forked_copy_unchecked(
    pieces: &[Piece],
    manner: Manner<'_>,
) -> Result<Forked, ForkError> {
    let (result, tell) = pipe_with(PipeFlags::CLOEXEC).map_err(ForkError::Os)?;
    let (held, gate) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(ForkError::Os)?;
    let bytes = pieces.iter().map(|p| p.len as u64).sum();
    let child = Child { pieces, manner, tell: tell.as_raw_fd(), gate: gate.as_raw_fd(), bytes };
    // The child must not be the first to call these: the linker would look them up, with a lock.
    let mut probe = 0u8;
    // SAFETY: one byte of our own to another; closing and writing are of nothing.
    unsafe {
        copy_out(&raw const child.bytes as *const u8, &raw mut probe, 1);
        libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, 0);
        libc::write(-1, std::ptr::null(), 0);
        libc::poll(std::ptr::null_mut(), 0, 0);
        libc::madvise(std::ptr::null_mut(), 0, MADV_POPULATE_WRITE);
    }
    let quiet = Quiet::new();
    // SAFETY: `run` does nothing that a child of a process with threads must not do.
    let pidfd = match unsafe { clone_process() } {
        Ok(Some(pidfd)) => pidfd,
        // SAFETY: we are the child, and the pieces are as the contract says.
        Ok(None) => unsafe { child.run() },
        Err(e) => return Err(ForkError::Fork(e)),
    };
    drop(quiet);
    Ok(Forked { parent: own_pid(), pidfd, result, held, bytes, ended: None })
}

struct Child<'a> {
    pieces: &'a [Piece],
    manner: Manner<'a>,
    tell: RawFd,
    gate: RawFd,
    bytes: u64,
}

impl Child<'_> {
    /// # Safety
    /// Only in the child, with the contract of `forked_copy`.
    unsafe fn run(&self) -> ! {
        let ready = self.manner.ready.as_ref().map(|(fd, _)| fd.as_raw_fd());
        be_nice();
        close_all_but([self.tell, self.gate, ready.unwrap_or(self.tell)]);
        if wait_for([self.gate, ready.unwrap_or(-1)], HELD_MS_MAX) == Some(1) {
            leave(1);
        }
        let pause = self.pause_ms();
        for p in self.pieces {
            let mut at = 0;
            while at < p.len {
                if ready.is_some_and(|fd| wait_for([-1, fd], 0).is_some()) {
                    leave(1);
                }
                let step = STEP.min(p.len - at);
                let part = p.part(at, step);
                // SAFETY: by the contract of `forked_copy`.
                unsafe {
                    warm(&part);
                    copy_out(part.src, part.dst, part.len);
                }
                at += step;
                if pause > 0 && wait_for([-1, ready.unwrap_or(-1)], pause).is_some() {
                    leave(1);
                }
            }
        }
        let mut well = tell(self.tell, &self.bytes.to_ne_bytes());
        if let Some((fd, word)) = &self.manner.ready {
            well &= tell(fd.as_raw_fd(), word);
        }
        leave(if well { 0 } else { 1 })
    }

    /// After each step.
    fn pause_ms(&self) -> libc::c_int {
        let ms = (STEP as u64 * 1000).checked_div(self.manner.bytes_per_s).unwrap_or(0);
        ms.min(PAUSE_MS_MAX) as libc::c_int
    }
}

/// Ends the child at once, without its parent's handlers of exit.
fn leave(code: libc::c_int) -> ! {
    // SAFETY: it takes a number.
    unsafe { libc::_exit(code) }
}

/// What is shared is not in a child's page tables: all of it at once costs less than page by page.
///
/// # Safety
/// As for `copy_out`.
unsafe fn warm(part: &Piece) {
    let start = part.dst.addr() & !(LEAST_PAGE - 1);
    let at = part.dst.wrapping_sub(part.dst.addr() - start);
    let len = part.dst.addr() + part.len - start;
    // SAFETY: it changes no bytes. Kernels before 5.14 refuse, as do those with larger pages: then it is page by page.
    unsafe { libc::madvise(at.cast(), len, MADV_POPULATE_WRITE) };
}

fn close_all_but(mut keep: [RawFd; 3]) {
    keep.sort_unstable();
    close_between(-1, keep[0]);
    close_between(keep[0], keep[1]);
    close_between(keep[1], keep[2]);
    close_between(keep[2], RawFd::MAX);
}

/// Closes the descriptors between two others.
fn close_between(below: RawFd, above: RawFd) {
    let (first, last) = (below.wrapping_add(1), above.wrapping_sub(1));
    if below < above && first <= last {
        // SAFETY: in a child that uses none of them; kernels before 5.9 refuse, and they stay open.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// Gives way to the application: its ranks may have fewer cores than they and their children could use.
fn be_nice() {
    // SAFETY: two system calls on numbers; the first gives 20 less the nice value.
    unsafe {
        let now = 20 - libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, 0);
        libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, (now + NICER).min(19));
    }
}

/// Waits until the other side of one of these has hung up, and tells which; numbers below 0 are nobody.
fn wait_for(fds: [RawFd; 2], ms: libc::c_int) -> Option<usize> {
    let look = |fd| libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
    let mut looks = fds.map(look);
    // SAFETY: two descriptors of our own. All signals are blocked: it is not interrupted.
    unsafe { libc::poll(looks.as_mut_ptr(), 2, ms) };
    // Who is not wanted any more need not start either.
    let hung_up = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
    [1, 0].into_iter().find(|n| looks[*n].revents & hung_up != 0)
}

fn tell(fd: RawFd, bytes: &[u8]) -> bool {
    // SAFETY: bytes of our own. A pipe that nobody reads gives EPIPE: the signal is blocked.
    unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) == bytes.len() as isize }
}

/// The parent gets the child's pidfd, the child nothing.
///
/// # Safety
/// The child has one thread, in a process where others may have held any lock.
unsafe fn clone_process() -> Result<Option<OwnedFd>, Errno> {
    let mut fd: RawFd = -1;
    let flags = libc::CLONE_PIDFD as libc::c_ulong;
    // For CLONE_PIDFD the third argument, for threads the parent's copy of the number, is the descriptor.
    // SAFETY: without CLONE_VM and a new stack this is fork(2), with no signal at the end.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone,
            flags,
            std::ptr::null_mut::<libc::c_void>(),
            &raw mut fd,
            std::ptr::null_mut::<libc::c_void>(),
            0 as libc::c_ulong,
        )
    };
    match pid {
        0 => Ok(None),
        // SAFETY: the kernel has just made it for us.
        1.. => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN)),
    }
}

impl Forked {
    /// Readable when the child has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Readable when the child has copied all, at its end otherwise.
    pub fn result(&self) -> BorrowedFd<'_> {
        self.result.as_fd()
    }

    /// Lets it begin.
    pub fn go(&self) {
        // A child of the application's may hold the descriptor too: closing it would not be enough. It may be gone.
        let _ = shutdown(&self.held, Shutdown::Both);
    }

    /// Waits until the child has ended, so that nothing is written to the destinations any more.
    pub fn wait(&mut self, patience: Duration) -> Result<(), ForkError> {
        if let Some(ended) = self.ended {
            return ended;
        }
        self.go();
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], left.as_ref()) {
                Ok(0) => return Err(ForkError::Timeout),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(e) => return Err(ForkError::Os(e)),
            }
        }
        let ended = self.reap();
        self.ended = Some(ended);
        ended
    }

    /// Lets the child go on alone; nobody asks any more how it ends.
    pub fn leave(mut self) {
        self.go();
        self.ended = Some(Err(ForkError::Timeout));
    }

    /// Takes leave of a child that has ended or is just about to.
    fn reap(&self) -> Result<(), ForkError> {
        // __WALL: a child that gives no signal at its end is waited for only so.
        let options = WaitIdOptions::EXITED | WaitIdOptions::from_bits_retain(0x4000_0000);
        let status = loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        // Somebody else may have waited for all children; what it wrote is enough then.
        let well = match status {
            Ok(Some(status)) => status.exit_status() == Some(0),
            _ => true,
        };
        let mut told = [0; 8];
        // It has ended; but a child of the application's may hold the other end, so do not wait.
        let flags = PollFlags::IN;
        let there = poll(&mut [PollFd::new(&self.result, flags)], Some(&Timespec::default()));
        let all = there == Ok(1)
            && rustix::io::read(&self.result, &mut told) == Ok(8)
            && u64::from_ne_bytes(told) == self.bytes;
        if well && all { Ok(()) } else { Err(ForkError::Died) }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if self.ended.is_none() && self.parent == own_pid() {
            // It may have ended already; either way it is waited for.
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            let _ = self.reap();
        }
    }
}
