//! Whole agents in this process, with a script in the place of core: real sockets, threads and files.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stanchion_agent::daemon::{AgentError, AgentOptions, ReadyInfo, run_with};
use stanchion_agent::lead::{LeadConfig, lead_with};
use stanchion_agent::link::{Credentials, LinkEvent, Links, Tuning};
use stanchion_agent::mind::{AgentMind, ControllerMind};
use stanchion_agent::secret::Secret;
use stanchion_agent::store::{NotDurable, StoreError};
use stanchion_core::api::*;
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{ControllerConfig, Purpose, Status};
use stanchion_format::client::{Answer, KIND_REQUEST, Request};
use stanchion_format::config::Settings;
use stanchion_format::frame;
use stanchion_format::ids::*;
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::peer::{AgentAddr, Cause, Msg, Severity};
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// Nothing here takes longer, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it comes in time")
}

type Respond = Box<dyn FnMut(&AgentEvent) -> Vec<AgentAction> + Send>;

/// Answers events by a rule, and shows them.
struct Script {
    respond: Respond,
    seen: mpsc::UnboundedSender<AgentEvent>,
}

impl AgentMind for Script {
    fn step(&mut self, _now: Now, event: AgentEvent) -> Vec<AgentAction> {
        let actions = (self.respond)(&event);
        let _ = self.seen.send(event);
        actions
    }

    fn deadline(&self) -> Option<Millis> {
        None
    }
}

fn key() -> Key {
    Key { no: DatasetNo(1), inc: Incarnation::default() }
}

fn say(text: &str) -> AgentAction {
    let msg = Msg::Notice(Severity::Info, text.into());
    AgentAction::Send { to: PeerId::Controller, msg: Box::new(msg) }
}

/// What most scripts do.
fn usual(event: &AgentEvent) -> Vec<AgentAction> {
    match event {
        AgentEvent::Message { from, msg: Msg::Ping(n) } => {
            vec![AgentAction::Send { to: *from, msg: Box::new(Msg::Pong(*n)) }]
        }
        AgentEvent::Message { msg: Msg::Survey { .. }, .. } => {
            let (key, slot, ranks) = (key(), SlotId(0), vec![RankId(4)]);
            let work = Work::MakeDirs { key, slot, ranks };
            vec![AgentAction::Run { task: TaskId(5), work, due: None }]
        }
        AgentEvent::TaskDone { task: TaskId(5), result: TaskResult::Done(_) } => vec![say("made")],
        AgentEvent::RankRequest { conn, .. } => {
            vec![AgentAction::Answer { conn: *conn, answer: Box::new(Answer::Flag(true)) }]
        }
        AgentEvent::RankGone { .. } => vec![AgentAction::Log(Severity::Warn, "rank gone".into())],
        AgentEvent::Message { msg: Msg::Shutdown(_), .. } => vec![AgentAction::Exit],
        _ => Vec::new(),
    }
}

fn secret() -> Arc<Secret> {
    Arc::new(Secret::new([9; 32]))
}

/// An agent on a thread of its own.
struct Agent {
    id: AgentId,
    ready: ReadyInfo,
    seen: mpsc::UnboundedReceiver<AgentEvent>,
    terminate: Arc<Notify>,
    thread: std::thread::JoinHandle<Result<(), AgentError>>,
    cache: PathBuf,
    socket: PathBuf,
}

fn options(id: u32, dir: &Path) -> AgentOptions {
    AgentOptions {
        id: AgentId(id),
        job: JobId(3),
        secret: secret(),
        listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
        socket: dir.join(format!("run{id}/agent")),
        cache: dir.join(format!("cache{id}")),
        adopt: false,
        prefix: dir.join("prefix"),
        pool_bytes_max: 64 << 20,
        settings: Settings::default(),
    }
}

async fn start(id: u32, dir: &Path, respond: Respond) -> Agent {
    let options = options(id, dir);
    let (cache, socket) = (options.cache.clone(), options.socket.clone());
    let (seen_to, seen) = mpsc::unbounded_channel();
    let (ready_to, ready) = oneshot::channel();
    let terminate = Arc::new(Notify::new());
    let order = terminate.clone();
    let thread = std::thread::spawn(move || {
        let mind = |_, _| Script { respond, seen: seen_to };
        let ready = |info| ready_to.send(info).unwrap();
        run_with(options, mind, ready, || async move { order.notified().await })
    });
    let ready = soon(ready).await.unwrap();
    Agent { id: AgentId(id), ready, seen, terminate, thread, cache, socket }
}

impl Agent {
    fn address(&self) -> AgentAddr {
        AgentAddr { id: self.id, addr: self.ready.addr.to_string() }
    }

    /// The next event that is no tick.
    async fn next(&mut self) -> AgentEvent {
        loop {
            match soon(self.seen.recv()).await.expect("the agent lives") {
                AgentEvent::Tick => {}
                event => return event,
            }
        }
    }

    /// It ended by itself, and nothing of it is left (FM-V4).
    async fn ended(self) -> Result<(), AgentError> {
        let thread = self.thread;
        let end = soon(tokio::task::spawn_blocking(move || thread.join().unwrap())).await.unwrap();
        assert!(!self.cache.exists() && !self.socket.exists());
        end
    }
}

struct Controller {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
}

impl Controller {
    fn new() -> Controller {
        let me = PeerId::Controller;
        let who = Credentials { me, job: JobId(3), secret: secret(), encrypt: false };
        let (links, events) = Links::new(Arc::new(who), Tuning::default());
        Controller { links, events }
    }

    fn knows(&self, agent: &Agent) {
        self.links.set_address(&agent.address());
    }

    async fn hears(&mut self, want: Msg) {
        loop {
            match soon(self.events.recv()).await.unwrap() {
                LinkEvent::Message { msg, .. } => return assert_eq!(msg, want),
                LinkEvent::Up(_) => {}
                other => panic!("{want:?} is expected, not {other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn events_reach_core_and_its_actions_the_world() {
    let dir = tempfile::tempdir().unwrap();
    let mut agent = start(1, dir.path(), Box::new(usual)).await;
    let mut controller = Controller::new();
    controller.knows(&agent);
    let to = PeerId::Agent(AgentId(1));
    controller.links.send(to, Msg::Ping(8));
    controller.hears(Msg::Pong(8)).await;
    let survey = Msg::Survey { epoch: Epoch(1), round: 0, end_ranks: false };
    controller.links.send(to, survey);
    controller.hears(Msg::Notice(Severity::Info, "made".into())).await;
    let made = stanchion_format::index::cache_rank_dir(
        agent.cache.to_str().unwrap(),
        key(),
        SlotId(0),
        RankId(4),
    );
    assert!(Path::new(&made).is_dir());

    let socket = agent.socket.clone();
    let rank = tokio::task::spawn_blocking(move || {
        let mut stream = UnixStream::connect(socket).unwrap();
        let request = Request::GetSetting { name: "x".into() };
        frame::write(&mut stream, KIND_REQUEST, &request, CLIENT_FRAME_BYTES_MAX).unwrap();
        frame::read::<Answer>(&mut stream, CLIENT_FRAME_BYTES_MAX).unwrap()
    });
    assert_eq!(soon(rank).await.unwrap(), Answer::Flag(true));
    // What is logged, the controller hears too.
    controller.hears(Msg::Notice(Severity::Warn, "rank gone".into())).await;
    // Time passes without events as well.
    while !matches!(soon(agent.seen.recv()).await, Some(AgentEvent::Tick)) {}
    while !matches!(soon(agent.seen.recv()).await, Some(AgentEvent::Tick)) {}

    controller.links.send(to, Msg::Shutdown(Epoch(1)));
    assert!(agent.ended().await.is_ok());
    assert!(matches!(soon(controller.events.recv()).await, Some(LinkEvent::Down(p)) if p == to));
}

#[tokio::test]
async fn tasks_that_were_voided_are_not_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let respond = |event: &AgentEvent| match event {
        AgentEvent::Message { msg: Msg::Ping(_), .. } => {
            let dirs = |task| {
                let work = Work::MakeDirs { key: key(), slot: SlotId(0), ranks: vec![RankId(0)] };
                AgentAction::Run { task: TaskId(task), work, due: None }
            };
            vec![dirs(1), dirs(2), AgentAction::CancelAll, dirs(3)]
        }
        AgentEvent::TaskDone { .. } => vec![AgentAction::Exit],
        _ => Vec::new(),
    };
    let mut agent = start(1, dir.path(), Box::new(respond)).await;
    let controller = Controller::new();
    controller.knows(&agent);
    controller.links.send(PeerId::Agent(AgentId(1)), Msg::Ping(0));
    assert!(matches!(agent.next().await, AgentEvent::Message { .. }));
    let done = agent.next().await;
    assert!(matches!(done, AgentEvent::TaskDone { task: TaskId(3), .. }), "{done:?}");
    assert!(agent.ended().await.is_ok());
}

#[tokio::test]
async fn agents_reach_each_other_and_see_each_other_go() {
    // FM-F2
    let dir = tempfile::tempdir().unwrap();
    let mut b = start(2, dir.path(), Box::new(usual)).await;
    let addresses: std::sync::Arc<[_]> = [b.address()].into();
    let respond = move |event: &AgentEvent| match event {
        AgentEvent::Message { from: PeerId::Controller, .. } => vec![
            AgentAction::Addresses(addresses.clone()),
            AgentAction::Send { to: PeerId::Agent(AgentId(2)), msg: Box::new(Msg::Ping(5)) },
        ],
        AgentEvent::LinkDown(PeerId::Agent(_)) => vec![AgentAction::Exit],
        _ => Vec::new(),
    };
    let mut a = start(1, dir.path(), Box::new(respond)).await;
    let controller = Controller::new();
    controller.knows(&a);
    controller.links.send(PeerId::Agent(AgentId(1)), Msg::Ping(0));
    assert!(matches!(a.next().await, AgentEvent::Message { from: PeerId::Controller, .. }));
    let heard = b.next().await;
    let from = PeerId::Agent(AgentId(1));
    assert!(matches!(heard, AgentEvent::Message { from: f, msg: Msg::Ping(5) } if f == from));
    assert!(matches!(a.next().await, AgentEvent::Message { msg: Msg::Pong(5), .. }));
    // An order to leave, as SIGTERM is.
    b.terminate.notify_one();
    assert!(b.ended().await.is_ok());
    assert!(matches!(a.next().await, AgentEvent::LinkDown(PeerId::Agent(AgentId(2)))));
    assert!(a.ended().await.is_ok());
}

#[test]
fn what_does_not_start_says_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let never = |_: ReadyInfo| panic!("it must not get ready");
    let mind = |_, _| -> Script { panic!("it must not think") };
    let mut no_cache = options(1, dir.path());
    std::fs::write(&no_cache.cache, "a file").unwrap();
    let error = run_with(no_cache, mind, never, std::future::pending::<()>).unwrap_err();
    assert!(matches!(error, AgentError::Cache(..)), "{error}");
    std::fs::remove_file(dir.path().join("cache1")).unwrap();

    no_cache = options(1, dir.path());
    no_cache.socket = dir.path().join("x".repeat(200));
    let error = run_with(no_cache, mind, never, std::future::pending::<()>).unwrap_err();
    assert!(matches!(error, AgentError::Ranks(_)), "{error}");
    assert!(error.to_string().contains("run_dir"), "{error}");
    assert!(!dir.path().join("cache1").exists());

    no_cache = options(1, dir.path());
    no_cache.listen = "203.0.113.1".parse().unwrap();
    let error = run_with(no_cache, mind, never, std::future::pending::<()>).unwrap_err();
    assert!(matches!(error, AgentError::Listen(_)), "{error}");
    let shown = format!("{:?}", options(1, dir.path()));
    assert!(shown.contains("Secret(..)") && !shown.contains("9, 9"), "{shown}");
}

/// An agent with these settings that must not start; its cache is in `dir`.
fn refused(dir: &Path, set: &[(&str, &str)]) -> AgentError {
    let mut options = options(1, dir);
    for (name, value) in set {
        options.settings.set(name, value).unwrap();
    }
    let (cache, socket) = (options.cache.clone(), options.socket.clone());
    let never = |_: ReadyInfo| panic!("it must not get ready");
    let mind = |_, _| -> Script { panic!("it must not think") };
    let error = run_with(options, mind, never, std::future::pending::<()>).unwrap_err();
    assert!(!cache.exists() && !socket.exists());
    error
}

#[test]
fn a_store_that_was_asked_for_and_cannot_be_had_is_an_error() {
    // FM-N1: cache_durable promises a disk.
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let error = refused(memory.path(), &[("cache_durable", "1")]);
    let why = NotDurable::MemoryFs;
    assert!(
        matches!(&error, AgentError::Store(StoreError::NotDurable(_, w)) if *w == why),
        "{error}"
    );
    assert!(error.to_string().contains("cache_dir"), "{error}");
    let error = refused(memory.path(), &[("cache_durable", "1"), ("cache_store", "segments")]);
    assert!(
        matches!(&error, AgentError::Store(StoreError::NotDurable(_, w)) if *w == why),
        "{error}"
    );
    let dir = tempfile::tempdir().unwrap();
    let error = refused(dir.path(), &[("cache_durable", "1"), ("cache_store", "memory")]);
    let why = NotDurable::Pool;
    assert!(
        matches!(&error, AgentError::Store(StoreError::NotDurable(_, w)) if *w == why),
        "{error}"
    );
}

/// Does an agent with these settings say that it stores what ranks hand over? It must start.
fn says_it_stores(mut options: AgentOptions, set: &[(&str, &str)]) -> bool {
    for (name, value) in set {
        options.settings.set(name, value).unwrap();
    }
    let told = std::cell::Cell::new(None);
    let mind = |stores, _| {
        told.set(Some(stores));
        let (seen, _) = mpsc::unbounded_channel();
        Script { respond: Box::new(|_| Vec::new()), seen }
    };
    run_with(options, mind, |_| {}, || std::future::ready(())).unwrap();
    told.get().expect("it thinks")
}

#[test]
fn ranks_are_told_of_a_store_only_where_there_is_one() {
    // FM-T6: they wait for memory that the store gives back; without one nobody ever would.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    assert!(says_it_stores(options(1, dir.path()), &[("cache_store", "segments")]));
    assert!(!says_it_stores(options(1, dir.path()), &[("cache_store", "memory")]));
    // Segments are whole blocks, whatever a chunk is.
    let odd = [("cache_store", "segments"), ("chunk_bytes", "5000001")];
    assert!(says_it_stores(options(1, dir.path()), &odd));
}

/// A controller by a rule.
struct Rule<F>(F);

impl<F: FnMut(ControllerEvent) -> Vec<ControllerAction>> ControllerMind for Rule<F> {
    fn step(&mut self, _now: Now, event: ControllerEvent) -> Vec<ControllerAction> {
        (self.0)(event)
    }

    fn status(&self) -> Status {
        Status { phase: "ruled", ..Status::default() }
    }
}

fn lead_config(agents: Vec<AgentAddr>, epoch: Epoch, prefix: &Path) -> LeadConfig {
    let count = agents.len() as u32;
    let core = ControllerConfig {
        job: JobId(3),
        epoch,
        nodes: count,
        agents: count,
        settings: Settings::default(),
        purpose: Purpose::Run,
        from_scratch: false,
        groups: std::collections::BTreeMap::new(),
        bugs: Bugs::default(),
    };
    LeadConfig {
        core,
        agents,
        secret: secret(),
        prefix: prefix.to_owned(),
        role: "run",
        status: watch::Sender::new(Status::default()),
    }
}

#[tokio::test]
async fn a_lead_binds_a_controller_to_agents_prefix_and_the_outer_world() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("prefix");
    std::fs::create_dir(&prefix).unwrap();
    let epoch = stanchion_io::prefix::Prefix::open(&prefix).unwrap().take_epoch().unwrap();
    let a = start(1, dir.path(), Box::new(usual)).await;
    let b = start(2, dir.path(), Box::new(usual)).await;
    let (a_id, b_id) = (a.id, b.id);
    let config = lead_config(vec![a.address()], epoch, &prefix);
    let mut status = config.status.subscribe();
    let mut up = Vec::new();
    let rule = move |event| {
        let send = |to, msg| ControllerAction::Send { to, msg: Box::new(msg) };
        match event {
            ControllerEvent::AgentUp(agent) => {
                up.push(agent.id);
                if up.len() == 2 { vec![ControllerAction::ReadIndex] } else { Vec::new() }
            }
            ControllerEvent::Index(records) => {
                assert!(records.is_empty());
                let launch = ControllerAction::LaunchApp { slots: up.clone(), run: 0 };
                vec![launch, send(b_id, Msg::Shutdown(epoch))]
            }
            ControllerEvent::AgentDown(id) => {
                assert_eq!(id, b_id);
                vec![send(a_id, Msg::Ping(3)), send(b_id, Msg::Ping(4))]
            }
            ControllerEvent::Message { msg: Msg::Pong(3), .. } => vec![ControllerAction::StopApp],
            ControllerEvent::AppStopped => {
                vec![send(a_id, Msg::Shutdown(epoch)), ControllerAction::Exit(Outcome::Halted)]
            }
            ControllerEvent::Tick => Vec::new(),
            other => panic!("not expected: {other:?}"),
        }
    };
    let (actions_to, mut actions) = mpsc::channel(4);
    let (events, events_from) = mpsc::channel(4);
    let leading = tokio::spawn(lead_with(config, move |_| Rule(rule), actions_to, events_from));
    // The second agent's address is known only now.
    events.send(ControllerEvent::AgentUp(b.address())).await.unwrap();
    let launch = soon(actions.recv()).await;
    assert!(
        matches!(launch, Some(ControllerAction::LaunchApp { slots, run: 0 }) if slots.len() == 2)
    );
    soon(status.wait_for(|s| s.phase == "ruled")).await.unwrap();
    assert!(b.ended().await.is_ok());
    assert!(matches!(soon(actions.recv()).await, Some(ControllerAction::StopApp)));
    let lease = stanchion_io::prefix::Prefix::open(&prefix).unwrap().read_lease().unwrap();
    assert_eq!(lease.map(|l| (l.epoch, l.role)), Some((epoch, "run".into())));
    events.send(ControllerEvent::AppStopped).await.unwrap();
    assert!(matches!(soon(actions.recv()).await, Some(ControllerAction::Exit(Outcome::Halted))));
    assert_eq!(soon(leading).await.unwrap(), Outcome::Halted);
    // The last message was sent before the end.
    assert!(a.ended().await.is_ok());
    let lease = stanchion_io::prefix::Prefix::open(&prefix).unwrap().read_lease().unwrap();
    assert_eq!(lease, None);
}

#[tokio::test]
async fn a_lead_ends_when_a_higher_epoch_was_taken() {
    // FM-S11
    let dir = tempfile::tempdir().unwrap();
    let prefix = stanchion_io::prefix::Prefix::open(dir.path()).unwrap();
    let old = prefix.take_epoch().unwrap();
    let new = prefix.take_epoch().unwrap();
    assert!(new > old);
    let config = lead_config(Vec::new(), old, dir.path());
    let (actions_to, _actions) = mpsc::channel(4);
    let (_events, events_from) = mpsc::channel(4);
    let outcome = lead_with(config, |_| Rule(|_| Vec::new()), actions_to, events_from);
    assert_eq!(soon(outcome).await, Outcome::Fenced(new));
}

#[tokio::test]
async fn a_prefix_that_cannot_be_read_is_told_and_no_end() {
    let dir = tempfile::tempdir().unwrap();
    let config = lead_config(Vec::new(), Epoch(1), &dir.path().join("missing"));
    let (actions_to, _actions) = mpsc::channel(4);
    let (_events, events_from) = mpsc::channel(4);
    let mut asked = false;
    let rule = move |event| match event {
        ControllerEvent::Tick if !std::mem::replace(&mut asked, true) => {
            vec![ControllerAction::ReadIndex]
        }
        ControllerEvent::IndexFailed(trouble) => {
            assert!(!matches!(trouble.cause, Cause::Timeout), "{trouble}");
            vec![ControllerAction::Exit(Outcome::Interrupted)]
        }
        _ => Vec::new(),
    };
    let outcome = lead_with(config, |_| Rule(rule), actions_to, events_from);
    assert_eq!(soon(outcome).await, Outcome::Interrupted);
}
