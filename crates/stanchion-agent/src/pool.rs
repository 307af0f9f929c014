//! The pool's memory: extents are made, touched and given back on threads of their own, so that neither the control
//! thread nor a task that reads a disk stands in the way of a rank that waits for memory.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::{io, thread};

use stanchion_core::api::AgentEvent;
use stanchion_format::client::Lent;
use stanchion_format::ids::ExtentId;
use stanchion_io::cache::memory::Memory;
use stanchion_mem::{Extent, MemError};
use tokio::sync::mpsc;
use tracing::{debug, warn};

/// Threads that touch pages: one core's worth of zeroing is a fraction of what memory takes.
const THREADS: usize = 2;

#[derive(Debug)]
enum Job {
    Grow(ExtentId, u64),
    Retire(ExtentId),
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    extents: HashMap<ExtentId, Arc<Extent>>,
}

#[derive(Debug)]
struct Inside {
    state: Mutex<State>,
    changed: Condvar,
    stopping: AtomicBool,
    events: mpsc::UnboundedSender<AgentEvent>,
}

/// The extents of an agent and who makes them.
#[derive(Debug)]
pub(crate) struct Pool(Arc<Inside>);

/// An extent as the cache sees it.
#[derive(Debug)]
struct Shared(Arc<Extent>);

impl Memory for Shared {
    fn bytes(&self) -> u64 {
        self.0.mapping().len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        self.0.mapping().read(usize::try_from(offset).expect("within the extent"), buf);
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.mapping().write(usize::try_from(offset).expect("within the extent"), bytes);
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn at(&self, offset: u64) -> Option<NonNull<u8>> {
        let (offset, mapping) = (usize::try_from(offset).ok()?, self.0.mapping());
        // Made by arithmetic on the address alone: whoever reads there has to say why he may.
        (offset < mapping.len())
            .then(|| NonNull::new(mapping.as_ptr().wrapping_add(offset)))
            .flatten()
    }
}

impl Pool {
    /// Starts the threads. What becomes of extents goes to `events`.
    pub fn start(events: mpsc::UnboundedSender<AgentEvent>) -> io::Result<Pool> {
        let inside = Arc::new(Inside {
            state: Mutex::default(),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            events,
        });
        for _ in 0..THREADS {
            let inside = inside.clone();
            thread::Builder::new().name("stn-pool".into()).spawn(move || inside.work())?;
        }
        Ok(Pool(inside))
    }

    /// Makes extents; `Grown` comes for each.
    pub fn grow(&self, extents: Vec<(ExtentId, u64)>) {
        self.push(extents.into_iter().map(|(id, bytes)| Job::Grow(id, bytes)));
    }

    /// Gives extents back; `Retired` comes for each.
    pub fn retire(&self, ids: Vec<ExtentId>) {
        self.push(ids.into_iter().map(Job::Retire));
    }

    fn push(&self, jobs: impl Iterator<Item = Job>) {
        self.0.state().jobs.extend(jobs);
        self.0.changed.notify_all();
    }

    /// An extent's memory.
    pub fn memory(&self, id: ExtentId) -> Option<Arc<dyn Memory>> {
        let extent = self.0.state().extents.get(&id).cloned()?;
        Some(Arc::new(Shared(extent)))
    }

    /// Descriptors for the fresh ones of a list, in its order, to be written through.
    pub fn writers(&self, lent: &[Lent]) -> io::Result<Vec<OwnedFd>> {
        let fresh = lent.iter().filter(|l| l.fresh);
        fresh.map(|l| self.extent(l.id)?.as_fd().try_clone_to_owned()).collect()
    }

    /// A descriptor to read an extent through.
    pub fn reader(&self, id: ExtentId) -> io::Result<OwnedFd> {
        self.extent(id)?.reader().map_err(|e| match e {
            MemError::Os(errno) => errno.into(),
            other => io::Error::other(other),
        })
    }

    fn extent(&self, id: ExtentId) -> io::Result<Arc<Extent>> {
        self.0.state().extents.get(&id).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Within the lock: a thread that has just looked must not miss it and wait for ever.
        let state = self.0.state();
        self.0.stopping.store(true, Ordering::Relaxed);
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Inside {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the pool")
    }

    fn work(&self) {
        loop {
            let job = {
                let mut state = self.state();
                loop {
                    if self.stopping.load(Ordering::Relaxed) {
                        return;
                    }
                    if let Some(job) = state.jobs.pop_front() {
                        break job;
                    }
                    state = self.changed.wait(state).expect("no thread panics while it holds it");
                }
            };
            let event = match job {
                Job::Grow(id, bytes) => self.grow(id, bytes),
                Job::Retire(id) => self.retire(id),
            };
            // If nobody listens any more, the process is ending.
            let _ = self.events.send(event);
        }
    }

    fn grow(&self, id: ExtentId, bytes: u64) -> AgentEvent {
        let made = Extent::create(bytes).and_then(|extent| {
            extent.mapping().warm(&|| self.stopping.load(Ordering::Relaxed))?;
            Ok(extent)
        });
        let there = match made {
            Ok(extent) => {
                self.state().extents.insert(id, Arc::new(extent));
                true
            }
            Err(error) => {
                warn!(bytes, %error, "the pool cannot grow");
                false
            }
        };
        AgentEvent::Grown { ids: vec![id], there }
    }

    fn retire(&self, id: ExtentId) -> AgentEvent {
        let extent = self.state().extents.remove(&id);
        match extent {
            Some(extent) => extent.discard(),
            None => debug!(%id, "an extent is given back that was not there"),
        }
        AgentEvent::Retired(vec![id])
    }
}
