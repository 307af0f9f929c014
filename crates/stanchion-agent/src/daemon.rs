//! One agent process: events to core, actions to the world.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stanchion_core::agent::{Agent, AgentConfig};
use stanchion_core::api::{AgentAction, AgentEvent, ConnId, Now};
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{ControllerConfig, Purpose, Status};
use stanchion_format::client::{Answer, Code, MemoryAt};
use stanchion_format::config::Settings;
use stanchion_format::holding::Holding;
use stanchion_format::ids::{AgentId, JobId, Key, PeerId, RankId, SlotId};
use stanchion_format::limits::{EXTENTS_PER_ANSWER_MAX, PARTS_PER_ANSWER_MAX, TEXT_BYTES_MAX};
use stanchion_format::peer::{AgentAddr, Msg, Severity, Trouble};
use stanchion_io::cache::{Cache, Lies};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use crate::bulk::{Bulk, BulkConfig, Done};
use crate::lead::LeadConfig;
use crate::link::{Credentials, Gate, GateError, LinkEvent, LinkId, Links, Tuning};
use crate::mind::{AgentMind, Clock};
use crate::orphans::{End, OrphanError, lead_orphans};
use crate::pool::Pool;
use crate::ranks::{Ranks, RanksError};
use crate::secret::Secret;
use crate::store::{self, StoreError};

/// A `Tick` comes at least so often.
const TICK: Duration = Duration::from_millis(100);
/// Events of ranks that wait for the control thread; beyond, their sockets are not read.
const RANK_EVENTS_MAX: usize = 1024;
/// At the end: for ranks to be gone, for links to be read to their end, for bulk threads to stop.
const END_DEADLINE: Duration = Duration::from_secs(5);
/// At the end: for an orphans' controller in this process to tell the others.
const LEAD_END_DEADLINE: Duration = Duration::from_secs(30);

/// What an agent is started with.
#[derive(Debug)]
pub struct AgentOptions {
    /// Its identity, never used twice in a run.
    pub id: AgentId,
    /// The job.
    pub job: JobId,
    /// The job's secret.
    pub secret: Arc<Secret>,
    /// Where to listen; the port is the system's choice.
    pub listen: IpAddr,
    /// The ranks' socket, in a directory of mode 0700.
    pub socket: PathBuf,
    /// The cache directory: absolute; emptied now and removed at the end, unless it is adopted.
    pub cache: PathBuf,
    /// The cache is one that an agent left which is gone: what is in it is told to who leads, and stays.
    pub adopt: bool,
    /// The persistent directory: absolute.
    pub prefix: PathBuf,
    /// Shared memory for datasets, bytes.
    pub pool_bytes_max: u64,
    /// The job's settings.
    pub settings: Settings,
}

/// What is known when an agent listens.
#[derive(Clone, Copy, Debug)]
pub struct ReadyInfo {
    /// Its TCP listener.
    pub addr: SocketAddr,
    /// Its process.
    pub pid: u32,
}

/// Why an agent does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The cache cannot be used.
    #[error("the cache {0}: {1}")]
    Cache(PathBuf, Trouble),
    /// The store that the settings ask for cannot be had.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A path that ranks are told is not text.
    #[error("the path {0:?} is not UTF-8")]
    Path(PathBuf),
    /// The TCP listener.
    #[error(transparent)]
    Listen(#[from] GateError),
    /// The ranks' socket.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// Threads, timers or signals.
    #[error("the system gives no threads or timers: {0}")]
    System(io::Error),
    /// Orphans could not take the right to decide in the prefix; nothing was flushed.
    #[error(transparent)]
    Orphaned(#[from] OrphanError),
}

/// Runs an agent until it is told to leave (or SIGTERM). `ready` is called when it listens. Whatever the
/// end, the cache and the socket are removed (FM-V4).
///
/// To be called from the main thread of a process of its own: sets the umask, raises the limit of open files,
/// handles SIGTERM, ignores SIGINT and SIGHUP (the terminal's are meant for the runner).
pub fn run(options: AgentOptions, ready: impl FnOnce(ReadyInfo)) -> Result<(), AgentError> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    raise_file_limit();
    stanchion_mem::maps::give_large_buffers_back();
    let text = |p: &PathBuf| p.to_str().map(str::to_owned).ok_or(AgentError::Path(p.clone()));
    let config = AgentConfig {
        id: options.id,
        job: options.job,
        cache: text(&options.cache)?,
        prefix: text(&options.prefix)?,
        settings: options.settings.clone(),
        pool_bytes_max: options.pool_bytes_max,
        stores: false,
        bugs: Bugs::default(),
    };
    let terminate = || async {
        use tokio::signal::unix::{SignalKind, signal};
        let ignored = [SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => {
                terminate.recv().await;
            }
            Err(error) => {
                warn!(%error, "SIGTERM ends this agent without an orderly end");
                std::future::pending::<()>().await;
            }
        }
        drop(ignored);
    };
    let left = match options.adopt {
        true => left_in(&options.cache)?,
        false => Vec::new(),
    };
    let mind = |stores, now| Agent::new(AgentConfig { stores, ..config }, now).adopting(left);
    run_with(options, mind, ready, terminate)
}

/// What an agent that is gone has written down of its cache.
fn left_in(cache: &Path) -> Result<Vec<Holding>, AgentError> {
    let unusable = |trouble| AgentError::Cache(cache.to_owned(), trouble);
    let left = Cache::left(cache).map_err(unusable)?;
    for (file, why) in &left.refused {
        warn!(file = %file.display(), why, "what it says of the cache is not believed");
    }
    Ok(left.holdings)
}

/// The same with any mind, and without changes to the process; `terminate` is an order to leave. The mind is told
/// whether what ranks hand over in memory is stored, and comes back: what it tells them to wait for.
pub fn run_with<M, F>(
    options: AgentOptions,
    mind: impl FnOnce(bool, Now) -> M,
    ready: impl FnOnce(ReadyInfo),
    terminate: impl FnOnce() -> F,
) -> Result<(), AgentError>
where
    M: AgentMind,
    F: Future<Output = ()>,
{
    let open = if options.adopt { Cache::adopt } else { Cache::open };
    let mut cache = open(&options.cache, store::bytes_max(&options.settings))
        .map_err(|trouble| AgentError::Cache(options.cache.clone(), trouble))?;
    let (memory_to, memory) = mpsc::unbounded_channel();
    let freed = memory_to.clone();
    cache.on_freed(Box::new(move |id| {
        // If nobody listens any more, the process is ending.
        let _ = freed.send(AgentEvent::Released(vec![id]));
    }));
    let (trouble_to, trouble) = mpsc::unbounded_channel();
    // Nothing is written in memory any more where a cache is adopted.
    let store = match options.adopt {
        true => Ok(None),
        false => store::open(&options.cache, &options.settings),
    };
    match store {
        Ok(Some(store)) => {
            let chunk = options.settings.number("chunk_bytes");
            let told = Box::new(move |t: &Trouble| drop(trouble_to.send(t.clone())));
            cache.use_store(Arc::new(store), chunk, told);
        }
        Ok(None) => {}
        Err(error) => {
            cache.remove_all();
            return Err(error.into());
        }
    }
    let cache = Arc::new(cache);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(AgentError::System)?;
    let ended = runtime.block_on(async {
        let daemon = Daemon::start(&options, cache.clone(), (memory_to, memory), mind).await;
        match daemon {
            Ok((daemon, mut sources, addr)) => {
                sources.trouble = Some(trouble);
                ready(ReadyInfo { addr, pid: std::process::id() });
                daemon.serve(sources, terminate()).await
            }
            Err(error) => Err(error),
        }
    });
    // Nothing may wait for a name service or a file system that does not answer.
    runtime.shutdown_background();
    cache.remove_all();
    ended
}

/// As many open files as the system allows: a link, a rank and a data connection are one each.
pub fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        debug!(%error, "the limit of open files stays");
    }
}

/// Where events come from.
struct Sources {
    links: mpsc::Receiver<LinkEvent>,
    ranks: mpsc::Receiver<AgentEvent>,
    results: mpsc::UnboundedReceiver<Done>,
    memory: mpsc::UnboundedReceiver<AgentEvent>,
    /// The store's.
    trouble: Option<mpsc::UnboundedReceiver<Trouble>>,
}

/// What happens to the pool's memory: where it is told, and where it is heard.
type MemoryEvents = (mpsc::UnboundedSender<AgentEvent>, mpsc::UnboundedReceiver<AgentEvent>);

struct Daemon<M> {
    mind: M,
    clock: Clock,
    who: Arc<Credentials>,
    links: Links,
    ranks: Ranks,
    bulk: Bulk,
    pool: Pool,
    cache: Arc<Cache>,
    gate: tokio::task::AbortHandle,
    /// By which link the controller spoke, while its message is being handled.
    answering: Option<LinkId>,
    lead: Option<JoinHandle<Result<End, OrphanError>>>,
    /// A controller spoke since this agent wanted to lead.
    heard: Arc<AtomicBool>,
    prefix: PathBuf,
    settings: Settings,
}

async fn next_trouble(from: &mut Option<mpsc::UnboundedReceiver<Trouble>>) -> Option<Trouble> {
    match from {
        Some(from) => from.recv().await,
        None => None,
    }
}

/// What a step asks of the loop.
#[derive(PartialEq, Eq)]
enum Flow {
    On,
    Leave,
}

impl<M: AgentMind> Daemon<M> {
    async fn start(
        options: &AgentOptions,
        cache: Arc<Cache>,
        (memory_to, memory): MemoryEvents,
        mind: impl FnOnce(bool, Now) -> M,
    ) -> Result<(Daemon<M>, Sources, SocketAddr), AgentError> {
        let settings = options.settings.clone();
        let silence = Duration::from_millis(settings.number("silence_timeout_ms"));
        let tuning = Tuning { silence: silence * 2, ..Tuning::default() };
        let who = Arc::new(Credentials {
            me: PeerId::Agent(options.id),
            job: options.job,
            secret: options.secret.clone(),
            encrypt: settings.flag("encrypt"),
        });
        let (results_to, results) = mpsc::unbounded_channel();
        let bulk = BulkConfig {
            me: options.id,
            cache: cache.clone(),
            prefix: options.prefix.clone(),
            who: who.clone(),
            durable: settings.flag("cache_durable"),
            io_threads: usize::try_from(settings.number("io_threads")).unwrap_or(1),
            connect: tuning.connect,
            stall: silence,
        };
        let bulk = Bulk::start(bulk, results_to).map_err(AgentError::System)?;
        let pool = Pool::start(memory_to).map_err(AgentError::System)?;
        let gate = Gate::listen(options.listen).await?;
        let addr = gate.address();
        let (links, link_events) = Links::new(who.clone(), tuning);
        let (rank_events, ranks_from) = mpsc::channel(RANK_EVENTS_MAX);
        let ranks = Ranks::bind(&options.socket, rank_events)?;
        let accepting = gate.run(who.clone(), tuning, links.clone(), bulk.server());
        let gate = tokio::spawn(accepting).abort_handle();
        let clock = Clock::new();
        let daemon = Daemon {
            mind: mind(cache.has_store(), clock.now()),
            clock,
            who,
            links,
            ranks,
            bulk,
            pool,
            cache,
            gate,
            answering: None,
            lead: None,
            heard: Arc::default(),
            prefix: options.prefix.clone(),
            settings,
        };
        let sources =
            Sources { links: link_events, ranks: ranks_from, results, memory, trouble: None };
        Ok((daemon, sources, addr))
    }

    async fn serve(
        mut self,
        mut from: Sources,
        terminate: impl Future<Output = ()>,
    ) -> Result<(), AgentError> {
        tokio::pin!(terminate);
        let mut tick = Instant::now();
        let mut ended = Ok(());
        loop {
            let wanted = self.mind.deadline().map(|at| Instant::from_std(self.clock.instant(at)));
            let next = wanted.map_or(tick, |at| at.min(tick));
            let flow = tokio::select! {
                Some(event) = from.links.recv() => self.link(event),
                Some(event) = from.ranks.recv() => self.step(event),
                Some(done) = from.results.recv() => self.done(done),
                Some(event) = from.memory.recv() => self.step(event),
                Some(trouble) = next_trouble(&mut from.trouble) => self.store_trouble(&trouble),
                led = async { self.lead.as_mut().expect("checked").await }, if self.lead.is_some() => {
                    self.lead = None;
                    match led {
                        Ok(Ok(end)) => {
                            info!(?end, "leading the orphans ended");
                            Flow::On
                        }
                        Ok(Err(error)) => {
                            error!(%error, "this agent leaves");
                            ended = Err(error.into());
                            Flow::Leave
                        }
                        Err(_) => {
                            error!("a bug: leading the orphans panicked");
                            Flow::Leave
                        }
                    }
                }
                () = &mut terminate => {
                    info!("told to leave by a signal");
                    Flow::Leave
                }
                () = tokio::time::sleep_until(next) => {
                    tick = Instant::now() + TICK;
                    self.step(AgentEvent::Tick)
                }
            };
            if flow == Flow::Leave {
                break;
            }
        }
        self.leave(from).await;
        ended
    }

    fn link(&mut self, event: LinkEvent) -> Flow {
        match event {
            LinkEvent::Message { from, via, msg } => {
                if from == PeerId::Controller {
                    self.heard.store(true, Ordering::Relaxed);
                    self.answering = Some(via);
                }
                let flow = self.step(AgentEvent::Message { from, msg });
                self.answering = None;
                flow
            }
            LinkEvent::Down(peer) => self.step(AgentEvent::LinkDown(peer)),
            LinkEvent::Up(peer) => {
                debug!(?peer, "a link stands");
                Flow::On
            }
            // Core's own pings find out about silence (FM-F5a).
            LinkEvent::Silent(peer) => {
                debug!(?peer, "a peer is silent");
                Flow::On
            }
        }
    }

    fn done(&mut self, done: Done) -> Flow {
        if !self.bulk.is_current(&done) {
            return Flow::On;
        }
        self.step(AgentEvent::TaskDone { task: done.task, result: done.result })
    }

    fn step(&mut self, event: AgentEvent) -> Flow {
        for action in self.mind.step(self.clock.now(), event) {
            if self.act(action) == Flow::Leave {
                return Flow::Leave;
            }
        }
        Flow::On
    }

    fn act(&mut self, action: AgentAction) -> Flow {
        match action {
            AgentAction::Send { to, msg } => {
                let via = self.answering.filter(|_| to == PeerId::Controller);
                self.links.send_by(to, via, *msg);
            }
            AgentAction::Addresses(agents) => {
                self.links.set_addresses(&agents);
                self.bulk.set_addresses(&agents);
            }
            AgentAction::Answer { conn, answer } => self.answer(conn, *answer),
            AgentAction::Grow(extents) => self.pool.grow(extents),
            AgentAction::Retire(ids) => self.pool.retire(ids),
            AgentAction::Keep { key, slot, rank, files } => {
                for (file, bytes) in files {
                    let extent = |id| self.pool.memory(id);
                    if let Err(cause) = self.cache.keep((key, slot, rank), &file, bytes, extent) {
                        // Its `Stat` fails, and the vote with it.
                        warn!(%key, %rank, path = file.path, %cause, "a file in memory cannot be kept");
                    }
                }
                self.cache.store_kept((key, slot, rank));
            }
            AgentAction::Take { key, slot, rank, filled } => {
                let filled = filled.into_iter().map(|f| (f, self.pool.memory(f.id)));
                self.cache.take((key, slot, rank), filled);
            }
            AgentAction::Reclaim(bytes) => self.cache.reclaim(bytes),
            AgentAction::Settled(key) => self.cache.settled(key),
            AgentAction::OpenMemory { conn, key, slot, rank, path, from } => {
                self.open_memory(conn, (key, slot, rank), &path, from);
            }
            AgentAction::Run { task, work, due } => {
                let due = due.map(|at| self.clock.instant(at));
                self.bulk.run(task, work, due);
            }
            AgentAction::CancelAll => self.bulk.cancel_all(),
            AgentAction::Publish(manifest) => self.bulk.publish(manifest),
            AgentAction::EndRanks(conns) => self.ranks.end(&conns),
            AgentAction::Evict(keys) => self.bulk.evict(&keys),
            AgentAction::Log(severity, text) => self.log(severity, text),
            AgentAction::Lead { agents, nodes, settings } => self.lead(agents, nodes, settings),
            AgentAction::Exit => return Flow::Leave,
        }
        Flow::On
    }

    /// Descriptors go with the answers that need them.
    fn answer(&self, conn: ConnId, answer: Answer) {
        let fds = match &answer {
            Answer::Lent(lent) => self.pool.writers(lent),
            _ => Ok(Vec::new()),
        };
        self.answer_with(conn, answer, fds);
    }

    fn answer_with(&self, conn: ConnId, answer: Answer, fds: std::io::Result<Vec<OwnedFd>>) {
        match fds {
            Ok(fds) => self.ranks.answer(conn, answer, fds),
            Err(error) => {
                warn!(conn = conn.0, %error, "no descriptors for a rank");
                let text = format!("the agent has no descriptors for shared memory: {error}");
                self.ranks.answer(conn, Answer::Failed { code: Code::Space, text }, Vec::new());
            }
        }
    }

    fn open_memory(&self, conn: ConnId, whose: (Key, SlotId, RankId), path: &str, from: u64) {
        let pieces = self.cache.pieces(whose, path, from, PARTS_PER_ANSWER_MAX);
        // What one descriptor is enough for.
        let same = |a: &Lies, b: &Lies| match (a, b) {
            (Lies::Store(a), Lies::Store(b)) => a.segment == b.segment,
            _ => a == b,
        };
        let mut all: Vec<Lies> = Vec::new();
        let mut parts = Vec::new();
        for (lies, offset, bytes) in pieces.unwrap_or_default() {
            let known = all.iter().position(|l| same(l, &lies));
            if known.is_none() && all.len() >= EXTENTS_PER_ANSWER_MAX {
                break;
            }
            let fd = known.unwrap_or_else(|| {
                all.push(lies);
                all.len() - 1
            });
            parts.push(MemoryAt { bytes, fd: fd as u32, offset });
        }
        let reader = |lies: &Lies| match lies {
            Lies::Memory(id) => self.pool.reader(*id),
            Lies::Store(place) => {
                self.cache.reader(place).map_err(|t| std::io::Error::other(t.to_string()))
            }
        };
        let fds = all.iter().map(reader).collect();
        self.answer_with(conn, Answer::Memory(parts), fds);
    }

    /// FM-T6: nothing is lost, and the user hears of it once.
    fn store_trouble(&self, trouble: &Trouble) -> Flow {
        let text =
            format!("checkpoints stay in memory until the cache's disk works again: {trouble}");
        self.log(Severity::Warn, text);
        Flow::On
    }

    fn log(&self, severity: Severity, mut text: String) {
        match severity {
            Severity::Debug => debug!("{text}"),
            Severity::Info => info!("{text}"),
            Severity::Warn => warn!("{text}"),
            Severity::Error => error!("{text}"),
        }
        let wanted = severity != Severity::Debug || self.settings.number("debug") > 0;
        if wanted && self.links.stands(PeerId::Controller) {
            let fits = (0..=TEXT_BYTES_MAX.min(text.len())).rev();
            text.truncate(fits.into_iter().find(|at| text.is_char_boundary(*at)).unwrap_or(0));
            self.links.send(PeerId::Controller, Msg::Notice(severity, text));
        }
    }

    /// Runs an orphans' controller beside this agent, which it reaches by TCP like all others.
    fn lead(&mut self, agents: Vec<AgentAddr>, nodes: u32, settings: Settings) {
        if self.lead.is_some() {
            return;
        }
        let count = u32::try_from(agents.len()).unwrap_or(u32::MAX);
        let core = ControllerConfig {
            job: self.who.job,
            epoch: Default::default(),
            nodes,
            agents: count,
            settings,
            purpose: Purpose::WindDown,
            from_scratch: false,
            groups: std::collections::BTreeMap::new(),
            bugs: Bugs::default(),
        };
        let config = LeadConfig {
            core,
            agents,
            secret: self.who.secret.clone(),
            prefix: self.prefix.clone(),
            role: "orphans",
            status: watch::Sender::new(Status::default()),
        };
        self.heard.store(false, Ordering::Relaxed);
        self.lead = Some(tokio::spawn(lead_orphans(config, self.heard.clone())));
    }

    /// The orderly end: ranks first, so that nothing writes to the cache any more.
    async fn leave(mut self, mut from: Sources) {
        self.gate.abort();
        self.bulk.cancel_all();
        self.ranks.end(&[]);
        let ranks_gone = async {
            while self.ranks.count() > 0 {
                from.ranks.recv().await;
            }
        };
        if tokio::time::timeout(END_DEADLINE, ranks_gone).await.is_err() {
            warn!("ranks are still there after they were killed");
        }
        if let Some(mut lead) = self.lead.take() {
            let ended = async {
                loop {
                    tokio::select! {
                        led = &mut lead => break debug!(?led, "leading ended"),
                        Some(_) = from.links.recv() => {}
                    }
                }
            };
            if tokio::time::timeout(LEAD_END_DEADLINE, ended).await.is_err() {
                warn!("leading the orphans does not end");
            }
        }
        self.links.close(&mut from.links, END_DEADLINE).await;
        if !self.bulk.stop(END_DEADLINE) {
            warn!("a file system does not answer; a thread is left in it");
        }
    }
}
