//! Agents with their real core, real ranks, and a runner that is suddenly gone.

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use stanchion_agent::daemon::{AgentError, AgentOptions, ReadyInfo, run_with};
use stanchion_agent::lead::{LeadConfig, lead};
use stanchion_agent::orphans::OrphanError;
use stanchion_agent::secret::Secret;
use stanchion_core::agent::{Agent, AgentConfig};
use stanchion_core::api::{ControllerAction, ControllerEvent, Outcome};
use stanchion_core::bugs::Bugs;
use stanchion_core::controller::{ControllerConfig, Purpose, Status};
use stanchion_format::client::{Answer, Ask, FLAG_CHECKPOINT, KIND_REQUEST, Own, Request};
use stanchion_format::config::Settings;
use stanchion_format::frame;
use stanchion_format::ids::{AgentId, Epoch, JobId, Level, RankId};
use stanchion_format::index::LeaseFile;
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use stanchion_format::manifest::FileDecl;
use stanchion_format::peer::AgentAddr;
use stanchion_io::prefix::Prefix;
use tokio::sync::{mpsc, oneshot, watch};

/// Nothing here takes longer, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
const NODES: u32 = 3;
const CHILD: &str = "STANCHION_TEST_RANK";

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it comes in time")
}

fn content(rank: u32) -> Vec<u8> {
    (0..100_000 + rank * 1000).map(|i| (i ^ (i >> 8) ^ (rank * 57)) as u8).collect()
}

/// Not a test of its own: a rank of the application.
#[test]
fn rank() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (rank, socket) = told.split_once(' ').unwrap();
    let rank: u32 = rank.parse().unwrap();
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut ask = |request| {
        frame::write(&mut stream, KIND_REQUEST, &request, CLIENT_FRAME_BYTES_MAX).unwrap();
        frame::read::<Answer>(&mut stream, CLIENT_FRAME_BYTES_MAX).unwrap()
    };
    let settings = Vec::new();
    let hello = Request::Hello { rank: RankId(rank), size: NODES, pid: 0, settings };
    let welcome = ask(hello);
    assert!(matches!(welcome, Answer::Welcome { .. }), "{welcome:?}");
    let begin = Ask::Begin { name: "first".into(), flags: FLAG_CHECKPOINT };
    let began = ask(Request::Collective { ask: begin, own: Own::default() });
    let Answer::Began { key, dir, .. } = began else { panic!("{began:?}") };
    let (path, content) = (format!("out/rank.{rank}"), content(rank));
    let file = Path::new(&dir).join(&path);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, &content).unwrap();
    let files = vec![FileDecl { rank: RankId(rank), path, bytes: content.len() as u64 }];
    let own = Own { valid: true, files, ..Own::default() };
    assert_eq!(ask(Request::Collective { ask: Ask::Complete, own }), Answer::Ok);
    let (no, level, timeout_ms) = (key.no, Level::Protected, PATIENCE.as_millis() as u64);
    assert_eq!(ask(Request::Wait { no, level, timeout_ms }), Answer::Ok);
    println!("protected");
    // It would compute on; its agent ends it when the runner is gone.
    ask(Request::Collective { ask: Ask::Barrier, own: Own::default() });
    std::thread::park_timeout(PATIENCE);
}

struct Node {
    ready: ReadyInfo,
    thread: std::thread::JoinHandle<Result<(), AgentError>>,
    cache: PathBuf,
    socket: PathBuf,
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    for (name, value) in [("orphan_grace_ms", "100"), ("flush_every", "0"), ("chunk_bytes", "4096")]
    {
        settings.set(name, value).unwrap();
    }
    settings
}

fn secret() -> Arc<Secret> {
    Arc::new(Secret::new([3; 32]))
}

async fn start(id: u32, dir: &Path) -> Node {
    let options = AgentOptions {
        id: AgentId(id),
        job: JobId(3),
        secret: secret(),
        listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
        socket: dir.join(format!("run{id}/agent")),
        cache: dir.join(format!("cache{id}")),
        adopt: false,
        prefix: dir.join("prefix"),
        pool_bytes_max: 64 << 20,
        settings: settings(),
    };
    let (cache, socket) = (options.cache.clone(), options.socket.clone());
    let config = AgentConfig {
        id: options.id,
        job: options.job,
        cache: cache.to_str().unwrap().into(),
        prefix: options.prefix.to_str().unwrap().into(),
        settings: settings(),
        pool_bytes_max: options.pool_bytes_max,
        stores: false,
        bugs: Bugs::default(),
    };
    let (ready_to, ready) = oneshot::channel();
    let thread = std::thread::spawn(move || {
        let mind = |stores, now| Agent::new(AgentConfig { stores, ..config }, now);
        run_with(options, mind, |info| ready_to.send(info).unwrap(), std::future::pending::<()>)
    });
    Node { ready: soon(ready).await.unwrap(), thread, cache, socket }
}

/// Starts a rank on each node; ends when all have protected their first checkpoint.
async fn launch(nodes: &[Node], slots: &[AgentId]) -> Vec<Child> {
    let mut ranks = Vec::new();
    let mut lines = Vec::new();
    for (rank, agent) in slots.iter().enumerate() {
        let socket = nodes[agent.0 as usize].socket.to_str().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture"])
            .env(CHILD, format!("{rank} {socket}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = std::io::BufReader::new(child.stdout.take().unwrap());
        lines.push(tokio::task::spawn_blocking(move || {
            use std::io::BufRead;
            out.lines().any(|line| line.unwrap().contains("protected"))
        }));
        ranks.push(child);
    }
    for line in lines {
        assert!(soon(line).await.unwrap(), "a rank ended before its checkpoint was protected");
    }
    ranks
}

/// A job that runs, with its first checkpoint protected in the caches and nothing in the prefix.
struct Job {
    dir: tempfile::TempDir,
    nodes: Vec<Node>,
    ranks: Vec<Child>,
    runner: tokio::task::JoinHandle<Outcome>,
    prefix: Prefix,
    _events: mpsc::Sender<ControllerEvent>,
}

async fn running_job() -> Job {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("prefix");
    std::fs::create_dir(&root).unwrap();
    let prefix = Prefix::open(&root).unwrap();
    let mut nodes = Vec::new();
    for id in 0..NODES {
        nodes.push(start(id, dir.path()).await);
    }
    let addr = |(id, n): (usize, &Node)| AgentAddr {
        id: AgentId(id as u32),
        addr: n.ready.addr.to_string(),
    };
    let core = ControllerConfig {
        job: JobId(3),
        epoch: prefix.take_epoch().unwrap(),
        nodes: NODES,
        agents: NODES,
        settings: settings(),
        purpose: Purpose::Run,
        from_scratch: false,
        groups: std::collections::BTreeMap::new(),
        bugs: Bugs::default(),
    };
    let config = LeadConfig {
        core,
        agents: nodes.iter().enumerate().map(addr).collect(),
        secret: secret(),
        prefix: root,
        role: "run",
        status: watch::Sender::new(Status::default()),
    };
    let (actions_to, mut actions) = mpsc::channel(64);
    let (events, events_from) = mpsc::channel(64);
    let runner = tokio::spawn(lead(config, actions_to, events_from));
    let slots = loop {
        match soon(actions.recv()).await.expect("the lead lives") {
            ControllerAction::LaunchApp { slots, .. } => break slots,
            ControllerAction::Say(..) => {}
            other => panic!("not expected: {other:?}"),
        }
    };
    let ranks = launch(&nodes, &slots).await;
    assert!(prefix.read_index().unwrap().0.is_empty());
    Job { dir, nodes, ranks, runner, prefix, _events: events }
}

/// Ranks are killed, agents end by themselves, and nothing of them is left; how they ended.
async fn all_leave(ranks: Vec<Child>, nodes: Vec<Node>) -> Vec<Result<(), AgentError>> {
    for mut rank in ranks {
        let end = soon(tokio::task::spawn_blocking(move || rank.wait().unwrap())).await.unwrap();
        assert_eq!(end.signal(), Some(9), "agents end the ranks");
    }
    let mut ends = Vec::new();
    for node in nodes {
        let thread = node.thread;
        let ended = soon(tokio::task::spawn_blocking(move || thread.join().unwrap())).await;
        assert!(!node.cache.exists() && !node.socket.exists());
        ends.push(ended.unwrap());
    }
    ends
}

#[tokio::test]
async fn without_their_runner_agents_flush_and_leave() {
    // FM-V3, FM-V4
    let job = running_job().await;
    // As if it were killed: its connections close without a word. Its lease is that of a process of this
    // machine that is gone.
    job.runner.abort();
    assert!(job.runner.await.unwrap_err().is_cancelled());
    let mut gone = Command::new("true").spawn().unwrap();
    let lease = LeaseFile {
        epoch: job.prefix.newest_epoch().unwrap(),
        host: rustix::system::uname().nodename().to_str().unwrap().into(),
        pid: gone.id(),
        unix_s: 1,
        role: "run".into(),
    };
    gone.wait().unwrap();
    job.prefix.write_lease(&lease).unwrap();
    for end in all_leave(job.ranks, job.nodes).await {
        end.unwrap();
    }
    let (records, bad) = job.prefix.read_index().unwrap();
    assert!(bad.is_empty());
    assert_eq!(records.iter().map(|r| r.info.name.as_str()).collect::<Vec<_>>(), ["first"]);
    for rank in 0..NODES {
        let file = job.dir.path().join(format!("prefix/out/rank.{rank}"));
        assert!(std::fs::read(file).unwrap() == content(rank), "rank {rank}'s file differs");
    }
    assert_eq!(job.prefix.read_lease().unwrap(), None);
}

#[tokio::test]
async fn agents_that_were_given_up_take_nothing_from_who_leads() {
    // FM-S11
    let job = running_job().await;
    let newest = job.prefix.newest_epoch().unwrap();
    // Somebody else leads: the runner sees it and ends, the agents have no runner any more.
    let prefix = Prefix::open(job.prefix.root()).unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        for unix_s in 1.. {
            let (host, role) = ("elsewhere".into(), "run".into());
            let lease = LeaseFile { epoch: Epoch(99), host, pid: 1, unix_s, role };
            prefix.write_lease(&lease).unwrap();
            let pause = stopped.recv_timeout(Duration::from_millis(200));
            if pause != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                return;
            }
        }
    });
    assert_eq!(soon(job.runner).await.unwrap(), Outcome::Fenced(Epoch(99)));
    let ends = all_leave(job.ranks, job.nodes).await;
    let unwanted = |e: &Result<(), AgentError>| {
        matches!(e, Err(AgentError::Orphaned(OrphanError::Unwanted(_))))
    };
    assert!(ends.iter().any(unwanted), "{ends:?}");
    drop(stop);
    other.join().unwrap();
    assert_eq!(job.prefix.newest_epoch().unwrap(), newest);
    assert!(job.prefix.read_index().unwrap().0.is_empty());
    assert_eq!(job.prefix.read_lease().unwrap().unwrap().epoch, Epoch(99));
}
