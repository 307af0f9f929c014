//! Bulk data: threads of our own, so that the control thread never waits for a disk or a copy.
//!
//! Tasks of core wait in one bounded queue (see [`queue`]) for three sets of threads: one *quick* thread,
//! some at normal priority, some at nice 19 (which also gives their reads and writes the lowest best-effort
//! priority: the kernel derives it from the nice value. Not the idle class: a flush would never end beside
//! a busy application). Chunks of other agents are pulled over data connections ([`client`]), our own are given out by
//! [`server`] threads, at nice 19 as well.

mod client;
mod queue;
mod server;
mod sum;
mod work;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use std::{io, thread};

use stanchion_core::api::{TaskResult, Work};
use stanchion_format::ids::{AgentId, Key, PeerId, TaskId};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{AgentAddr, Cause, Trouble};
use stanchion_io::cache::{Cache, Share};
use tokio::sync::mpsc;
use tracing::{debug, error, warn};

use crate::link::{Credentials, DataConn};
use client::Clients;
use queue::{Class, IDLE, Next, Queue};
use server::{Published, Server};
use work::{LazyPrefix, Scratch, Tools};

/// Threads at normal priority.
const NORMAL_THREADS: usize = 2;
/// Threads that write from memory to the store: while one makes checksums, the others wait for the device. A set of its
/// own: a device that hangs holds up nothing else.
const STORE_THREADS: usize = 3;

/// What bulk threads need.
#[derive(Debug)]
pub struct BulkConfig {
    /// This agent.
    pub me: AgentId,
    /// Its cache.
    pub cache: Arc<Cache>,
    /// The persistent directory; opened when it is first needed.
    pub prefix: PathBuf,
    /// For data connections.
    pub who: Arc<Credentials>,
    /// Threads at lowered priority (the setting `io_threads`).
    pub io_threads: usize,
    /// Is a dataset to be durable here before it counts as protected (the setting `cache_durable`)?
    pub durable: bool,
    /// For a data connection to be made.
    pub connect: Duration,
    /// A peer that moves no byte for so long in mid-transfer is given up.
    pub stall: Duration,
}

/// The end of a task.
#[derive(Debug)]
pub struct Done {
    /// Which.
    pub task: TaskId,
    /// How.
    pub result: TaskResult,
    generation: u64,
}

/// The threads and what waits for them.
pub struct Bulk {
    inside: Arc<Inside>,
    server: Arc<Server>,
}

struct Inside {
    queue: Queue,
    tools: Tools,
    /// Tasks of another generation are void.
    generation: AtomicU64,
    results: mpsc::UnboundedSender<Done>,
    stopping: AtomicBool,
    /// Threads that live.
    threads: Mutex<usize>,
    ended: Condvar,
}

/// Lowers the calling thread's priority for good.
fn lower_priority() {
    let me = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(me), 19) {
        debug!(%error, "a thread keeps its priority");
    }
}

impl Bulk {
    /// Starts the threads. Ends of tasks go to `results`; there are never more than tasks.
    pub fn start(config: BulkConfig, results: mpsc::UnboundedSender<Done>) -> io::Result<Bulk> {
        let BulkConfig { me, cache, prefix, who, io_threads, durable, connect, stall } = config;
        debug_assert_eq!(who.me, PeerId::Agent(me));
        let published = Arc::new(Published::default());
        let server = Arc::new(Server::new(cache.clone(), published.clone(), stall));
        let clients = Clients::new(who, connect, stall);
        let prefix = LazyPrefix::new(prefix);
        let inside = Arc::new(Inside {
            queue: Queue::default(),
            tools: Tools { me, cache, prefix, published, clients, durable },
            generation: AtomicU64::new(0),
            results,
            stopping: AtomicBool::new(false),
            threads: Mutex::new(0),
            ended: Condvar::new(),
        });
        let low = std::iter::repeat_n((Class::Low, "stn-low"), io_threads.max(1));
        let normal = std::iter::repeat_n((Class::Normal, "stn-bulk"), NORMAL_THREADS);
        let bulk = Bulk { inside, server };
        for (class, name) in low.chain(normal).chain([(Class::Quick, "stn-quick")]) {
            bulk.spawn(name, move |inside| inside.thread(class))?;
        }
        let stores = if bulk.inside.tools.cache.has_store() { STORE_THREADS } else { 0 };
        for _ in 0..stores {
            bulk.spawn("stn-store", |inside| {
                lower_priority();
                inside.store(Share::All);
            })?;
        }
        if stores > 0 {
            bulk.spawn("stn-hand", |inside| inside.store(Share::Handed))?;
        }
        Ok(bulk)
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&Inside) + Send + 'static) -> io::Result<()> {
        let inside = self.inside.clone();
        *inside.threads.lock().expect("no thread panics while it holds this") += 1;
        let spawned = thread::Builder::new().name(name.into()).spawn(move || {
            work(&inside);
            *inside.threads.lock().expect("no thread panics while it holds this") -= 1;
            inside.ended.notify_all();
        });
        if let Err(error) = spawned {
            *self.inside.threads.lock().expect("no thread panics while it holds this") -= 1;
            return Err(error);
        }
        Ok(())
    }

    /// Queues a task; its end comes as [`Done`]. `due`: from then on it is late, and goes on at normal priority.
    pub fn run(&self, task: TaskId, work: Work, due: Option<Instant>) {
        if !self.inside.queue.push(task, work, due) {
            warn!("a task is refused: too many wait");
            let trouble = Trouble::new(Cause::Os(rustix::io::Errno::AGAIN.raw_os_error()));
            let result = TaskResult::Failed { trouble, source: None };
            let generation = self.inside.generation.load(Ordering::Relaxed);
            let _ = self.inside.results.send(Done { task, result, generation });
        }
    }

    /// Voids all tasks: those that wait are forgotten, those that run stop soon.
    pub fn cancel_all(&self) {
        let generation = self.inside.queue.cancel();
        self.inside.generation.store(generation, Ordering::Relaxed);
    }

    /// Does this end belong to a task that was not voided?
    pub fn is_current(&self, done: &Done) -> bool {
        done.generation == self.inside.generation.load(Ordering::Relaxed)
    }

    /// The manifest vouches for the slot's files: other agents get their chunks.
    pub fn publish(&self, manifest: Arc<Manifest>) {
        self.inside.tools.published.add(manifest);
    }

    /// Forgets datasets at once and removes their files later.
    pub fn evict(&self, keys: &[Key]) {
        self.inside.tools.published.remove(keys);
        self.inside.queue.evict(keys);
    }

    /// Who is where.
    pub fn set_addresses(&self, agents: &[AgentAddr]) {
        self.inside.tools.clients.set_addresses(agents);
    }

    /// Gives chunks on this connection.
    pub fn serve(&self, conn: DataConn) {
        self.server.serve(conn);
    }

    /// A handle that does only that, for the listener.
    pub fn server(&self) -> impl Fn(DataConn) + Send + Sync + 'static {
        let server = self.server.clone();
        move |conn| server.serve(conn)
    }

    /// Voids everything and waits for the threads, for at most `limit`. False if one hangs (in a file
    /// system that does not answer, say).
    pub fn stop(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.inside.stop();
        self.inside.generation.store(u64::MAX, Ordering::Relaxed);
        let served = self.server.stop(deadline);
        let mut threads = self.inside.threads.lock().expect("no thread panics while it holds this");
        while *threads > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.inside.ended.wait_timeout(threads, left);
            threads = waited.expect("no thread panics while it holds this").0;
        }
        self.inside.tools.clients.clear();
        served
    }
}

impl Drop for Bulk {
    fn drop(&mut self) {
        self.inside.stop();
        self.inside.generation.store(u64::MAX, Ordering::Relaxed);
        // Connections are closed; their threads end by themselves.
        self.server.stop(Instant::now());
    }
}

impl Inside {
    fn stop(&self) {
        self.queue.stop();
        self.stopping.store(true, Ordering::Relaxed);
        self.tools.cache.store_stop();
    }

    /// Writes from memory to the store what ranks completed or handed over.
    fn store(&self, share: Share) {
        while !self.stopping.load(Ordering::Relaxed) {
            if !self.tools.cache.store_wait(share, IDLE) {
                continue;
            }
            let stored =
                std::panic::catch_unwind(AssertUnwindSafe(|| self.tools.cache.store_some(share)));
            if stored.is_err() {
                // What it was about stays in memory for good.
                error!("a bug: storing panicked");
            }
        }
    }

    fn thread(&self, class: Class) {
        if class == Class::Low {
            lower_priority();
        }
        let mut scratch = Scratch::default();
        loop {
            match self.queue.next(class) {
                Next::Job(job) => {
                    let void = || self.generation.load(Ordering::Relaxed) != job.generation;
                    // What it works on may be wanted gone: a rank may wait for the room.
                    let key = queue::key(&job.work);
                    // Digests and parity can begin again; a flush has written too much by then.
                    let again = matches!(job.work, Work::Digest { .. } | Work::Encode { .. });
                    let late = AtomicBool::new(false);
                    let starved = || {
                        let now = class == Class::Low && again && job.late();
                        late.fetch_or(now, Ordering::Relaxed) || now
                    };
                    let cancelled = || void() || self.queue.goes(key) || starved();
                    let work = job.work.clone();
                    let result =
                        self.guarded(|| self.tools.perform(work, &mut scratch, &cancelled));
                    let failed = matches!(result, TaskResult::Failed { .. });
                    if failed && late.load(Ordering::Relaxed) && !void() {
                        self.queue.again(job);
                        continue;
                    }
                    self.queue.done(&job);
                    if !void() {
                        let generation = job.generation;
                        // If nobody listens any more, the process is ending.
                        let _ = self.results.send(Done { task: job.task, result, generation });
                    }
                }
                Next::Evict(key) => {
                    if std::panic::catch_unwind(AssertUnwindSafe(|| self.tools.cache.evict(&[key])))
                        .is_err()
                    {
                        error!(%key, "a bug: an eviction panicked");
                    }
                    self.queue.evicted(key);
                }
                Next::Idle => scratch = Scratch::default(),
                Next::Stop => return,
            }
        }
    }

    /// A bug in one task must cost that task, not the thread and with it the job's way forward.
    fn guarded(&self, work: impl FnOnce() -> TaskResult) -> TaskResult {
        std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            error!("a bug: a task panicked");
            let trouble = Trouble::new(Cause::Os(rustix::io::Errno::NOTRECOVERABLE.raw_os_error()));
            TaskResult::Failed { trouble, source: None }
        })
    }
}

#[cfg(test)]
mod tests;
