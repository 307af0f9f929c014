//! What copies behind the caller: forked children, or threads that let each write wait until its block is copied.
//!
//! A thread lives from the checkpoint until all is copied, and only where userfaultfd is used. Nobody's lock is of
//! concern to it: who writes to a block that is not copied yet may hold any, and waits for this thread. So it takes none
//! and no memory between the moment at which it is seen to run and the end of the copy (stanchion_mem::cow).

use crate::error::{Error, Words};
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use stanchion_format::ids::DatasetNo;
use stanchion_mem::cow::{CowError, Manner, Reins, Snapshot};
use stanchion_mem::forked::{ForkError, Forked};
use stanchion_mem::maps::{Judged, Span, gather_huge_pages_while};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::Duration;

/// What its name is in the process.
const NAME: &str = "stn-cow";
/// It calls the kernel and little else.
const STACK_BYTES: usize = 256 << 10;

/// A checkpoint that is being copied.
#[derive(Debug)]
pub(crate) enum Copier {
    Child(Forked),
    Thread(Copying),
}

impl Copier {
    /// All ranks are on their way again: it is in the way of none of them.
    pub(crate) fn go(&self) {
        match self {
            Copier::Child(child) => child.go(),
            Copier::Thread(thread) => thread.reins.go(),
        }
    }
}

/// A thread that copies. Dropped, it is stopped.
#[derive(Debug)]
pub(crate) struct Copying {
    no: DatasetNo,
    owner: u32,
    reins: Arc<Reins>,
    /// The first piece of each region.
    regions: Vec<(usize, u64)>,
    thread: Option<JoinHandle<Result<(), CowError>>>,
}

impl Copying {
    /// Serves who waits at once, copies the rest when it is let go, says `copied` over the link if that was all, and
    /// ends the link. Then it gathers `scattered` in huge pages, until somebody waits for it.
    pub(crate) fn start(
        (no, snapshot): (DatasetNo, Snapshot),
        (link, copied): (OwnedFd, Vec<u8>),
        bytes_per_s: u64,
        regions: Vec<(usize, u64)>,
        scattered: Vec<Span>,
    ) -> Result<Copying, Error> {
        let os =
            |errno| Error::Behind { no, region: None, cause: CowError::Os { index: 0, errno } };
        let reins = Arc::new(Reins::held().map_err(os)?);
        let runs = Arc::new(Barrier::new(2));
        let (its_reins, it_runs) = (reins.clone(), runs.clone());
        let work = move || {
            it_runs.wait();
            let link_fd = Some(link.as_fd());
            let manner = Manner { reins: Some(&its_reins), link: link_fd, bytes_per_s };
            let done = snapshot.run_as(manner).map(drop);
            if done.is_ok() {
                // What cannot be said was not copied, to the agent (FM-P8).
                let _ = send(&link, &copied, SendFlags::NOSIGNAL);
            }
            // A child of the application's may hold it too: closing it would not be enough.
            let _ = shutdown(&link, Shutdown::Both);
            if done.is_ok() {
                for memory in scattered {
                    gather_huge_pages_while(memory, || !its_reins.is_urged());
                }
            }
            done
        };
        let thread = quietly(|| {
            std::thread::Builder::new().name(NAME.into()).stack_size(STACK_BYTES).spawn(work)
        });
        let thread = thread.map_err(|cause| Error::Thread { cause })?;
        runs.wait();
        let owner = std::process::id();
        Ok(Copying { no, owner, reins, regions, thread: Some(thread) })
    }

    fn is_mine(&self) -> bool {
        self.owner == std::process::id()
    }

    fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for its end; what went wrong, if it did.
    fn join(&mut self) -> Option<Error> {
        let thread = self.thread.take()?;
        if !self.is_mine() {
            // A forked child has no such thread.
            std::mem::forget(thread);
            return None;
        }
        let cause = match thread.join() {
            // Who stops it has his reason.
            Ok(Ok(()) | Err(CowError::Stopped)) => return None,
            Ok(Err(cause)) => cause,
            Err(_) => {
                return Some(Error::Internal { text: Words::new("a copying thread panicked") });
            }
        };
        let region = match cause {
            CowError::Torn { index, .. } | CowError::Os { index, .. } => {
                let next = self.regions.partition_point(|(first, _)| *first <= index);
                next.checked_sub(1).map(|at| self.regions[at].1)
            }
            _ => None,
        };
        Some(Error::Behind { no: self.no, region, cause })
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        if self.is_mine() {
            self.reins.stop();
        }
        let _nobody_asked = self.join();
    }
}

/// New threads take over which signals are blocked: all, since handlers are the application's.
fn quietly<T>(f: impl FnOnce() -> T) -> T {
    let _quiet = stanchion_mem::cow::Quiet::new();
    f()
}

/// What went wrong in a thread is remembered of so many datasets.
const FAILURES_MAX: usize = 4;

/// All that may still copy.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    all: Vec<Copier>,
    /// What of the regions can be copied behind.
    pub(crate) judged: Judged,
    /// What went wrong lately.
    failed: VecDeque<Error>,
    /// So many of those, the last ones, were not told yet.
    untold: usize,
}

impl Copies {
    pub(crate) fn add(&mut self, copier: Copier) {
        self.all.push(copier);
    }

    /// Those that have ended leave nothing behind.
    pub(crate) fn reap(&mut self) {
        for mut copier in std::mem::take(&mut self.all) {
            match &mut copier {
                // What its end means for the dataset its agent knows.
                Copier::Child(child) => match child.wait(Duration::ZERO) {
                    Err(ForkError::Timeout) => self.all.push(copier),
                    Err(_) => self.judged.forget(),
                    Ok(()) => {}
                },
                Copier::Thread(thread) if thread.is_over() => self.over(thread),
                Copier::Thread(_) => self.all.push(copier),
            }
        }
    }

    fn over(&mut self, thread: &mut Copying) {
        let Some(error) = thread.join() else { return };
        self.judged.forget();
        self.failed.push_back(error);
        if self.failed.len() > FAILURES_MAX {
            self.failed.pop_front();
        }
        self.untold = (self.untold + 1).min(FAILURES_MAX);
    }

    /// Waits until no thread of this process copies: its memory is not needed any more as it is.
    pub(crate) fn settle(&mut self) {
        self.end_threads(|_| true, Reins::hurry);
    }

    /// The next checkpoint begins: what is still being copied is of a dataset that was dropped.
    pub(crate) fn stop(&mut self) {
        self.end_threads(|_| true, Reins::stop);
    }

    fn end_threads(&mut self, which: impl Fn(&Copying) -> bool, how: impl Fn(&Reins)) {
        for mut copier in std::mem::take(&mut self.all) {
            match &mut copier {
                Copier::Thread(thread) if which(thread) => {
                    if thread.is_mine() {
                        how(&thread.reins);
                    }
                    self.over(thread);
                }
                _ => self.all.push(copier),
            }
        }
    }

    /// What went wrong with a dataset that was dropped.
    pub(crate) fn failure(&mut self, no: DatasetNo) -> Option<&Error> {
        // Hurried, not stopped: it may be about to find out.
        self.end_threads(|thread| thread.no == no, Reins::hurry);
        self.failed.iter().find(|e| matches!(e, Error::Behind { no: of, .. } if *of == no))
    }

    /// What is to be told, once.
    pub(crate) fn untold(&mut self) -> Vec<String> {
        let untold = std::mem::take(&mut self.untold);
        self.failed.iter().rev().take(untold).rev().map(Error::to_string).collect()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // What was begun is completed: nobody needs this process for a child, and a thread does not take long.
        self.settle();
        for copier in self.all.drain(..) {
            if let Copier::Child(child) = copier {
                child.leave();
            }
        }
    }
}
