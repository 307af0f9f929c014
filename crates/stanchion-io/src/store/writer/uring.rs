//! The kernel writes, several requests at once.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Condvar, Mutex, PoisonError};

use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;

use super::{BlockingWriter, Request, Write, Writer, requests};
use crate::fs::{Handle, Result};

/// Rings at most, that is threads that write at once; more of them wait for one another.
const RINGS_MAX: usize = 16;

/// Writes through io_uring. A thread that writes has a ring for itself as long as it does: nobody waits for
/// another one's completions, and nothing of a call is under way when it returns.
pub struct UringWriter {
    depth: u32,
    rings: Mutex<Rings>,
    back: Condvar,
}

struct Rings {
    idle: Vec<IoUring>,
    lent: usize,
}

impl fmt::Debug for UringWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringWriter").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl UringWriter {
    /// With so many requests under way for each thread; the system's error where it has no io_uring for us.
    pub fn new(depth: u32) -> Result<UringWriter> {
        let ring = ring(depth)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|e| errno(&e))?;
        if !probe.is_supported(opcode::Writev::CODE) {
            return Err(Errno::NOSYS);
        }
        let rings = Mutex::new(Rings { idle: vec![ring], lent: 0 });
        Ok(UringWriter { depth, rings, back: Condvar::new() })
    }

    fn rings(&self) -> std::sync::MutexGuard<'_, Rings> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<IoUring> {
        let mut rings = self.rings();
        loop {
            if let Some(ring) = rings.idle.pop() {
                rings.lent += 1;
                return Ok(ring);
            }
            if rings.lent < RINGS_MAX {
                match ring(self.depth) {
                    Ok(ring) => {
                        rings.lent += 1;
                        return Ok(ring);
                    }
                    // Memory for rings is limited: those that there are have to do.
                    Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE) if rings.lent > 0 => {}
                    Err(e) => return Err(e),
                }
            }
            rings = self.back.wait(rings).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a ring back; `None`: it is not fit for use any more.
    fn give(&self, ring: Option<IoUring>) {
        let mut rings = self.rings();
        rings.lent -= 1;
        rings.idle.extend(ring);
        self.back.notify_one();
    }
}

impl Writer for UringWriter {
    fn write(&self, file: &dyn Handle, writes: &[Write<'_>]) -> Result<()> {
        let Some(fd) = file.fd() else { return BlockingWriter.write(file, writes) };
        let mut run = Run { ring: self.take()?, fd, requests: requests(writes), under_way: 0 };
        let done = run.all(self.depth as usize);
        // With requests under way the kernel may still read what they point to, but it only reads, and it
        // writes to places that are not used again before they were written anew.
        let whole = run.under_way == 0;
        self.give(whole.then_some(run.ring));
        done
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }
}

fn ring(depth: u32) -> Result<IoUring> {
    IoUring::builder().dontfork().build(depth).map_err(|e| errno(&e))
}

fn errno(e: &std::io::Error) -> Errno {
    e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// The requests of one call, on a ring of their own.
struct Run<'a> {
    ring: IoUring,
    fd: BorrowedFd<'a>,
    requests: Vec<Request<'a>>,
    under_way: usize,
}

impl Run<'_> {
    /// Until all are done, or one failed and no other is under way.
    fn all(&mut self, depth: usize) -> Result<()> {
        let mut todo: Vec<usize> = (0..self.requests.len()).rev().collect();
        let mut failed = None;
        loop {
            while failed.is_none() && self.under_way < depth {
                let Some(index) = todo.pop() else { break };
                self.push(index);
            }
            if self.under_way == 0 {
                return failed.map_or(Ok(()), Err);
            }
            self.wait()?;
            // Taken out first: `completion` borrows the ring.
            let done: Vec<(u64, i32)> =
                self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (index, result) in done {
                self.under_way -= 1;
                match self.finished(index as usize, result) {
                    Ok(true) => {}
                    Ok(false) => todo.push(index as usize),
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
        }
    }

    fn push(&mut self, index: usize) {
        let request = &self.requests[index];
        // IoSlice has the layout of iovec, as std promises.
        let parts = request.parts.as_ptr().cast();
        let write =
            opcode::Writev::new(types::Fd(self.fd.as_raw_fd()), parts, request.parts.len() as u32)
                .offset(request.offset)
                .build()
                .user_data(index as u64);
        // SAFETY: the kernel reads the parts and what they point to until the request completes. `self` keeps
        // the list unchanged until then (`advance` comes after completion), the writes' lifetime the bytes, and
        // `all` returns with requests under way only if the ring itself is broken; then nothing that the
        // kernel still does writes to memory.
        let pushed = unsafe { self.ring.submission().push(&write) };
        assert!(pushed.is_ok(), "the ring has a place for each of `depth` requests");
        self.under_way += 1;
    }

    /// Until one completes at least.
    fn wait(&mut self) -> Result<()> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(e) => match errno(&e) {
                    Errno::INTR => {}
                    // Out of memory or place for a moment: completions make room, if there are any.
                    Errno::AGAIN | Errno::BUSY if !self.ring.completion().is_empty() => {
                        return Ok(());
                    }
                    other => return Err(other),
                },
            }
        }
    }

    fn finished(&mut self, index: usize, result: i32) -> Result<bool> {
        match u32::try_from(result) {
            Ok(n) => self.requests[index].advance(n as usize),
            Err(_) => match Errno::from_raw_os_error(-result) {
                // The system's way to say: again.
                Errno::INTR | Errno::AGAIN => Ok(false),
                other => Err(other),
            },
        }
    }
}
