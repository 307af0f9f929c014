//! The ranks' socket, with real processes at the other end.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use stanchion_agent::ranks::{Ranks, RanksError, SOCKET_PATH_BYTES_MAX};
use stanchion_core::api::{AgentEvent, ConnId};
use stanchion_format::client::{Answer, Code, KIND_REQUEST, Request};
use stanchion_format::frame;
use stanchion_format::ids::RankId;
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use tokio::sync::mpsc::{Receiver, channel};

/// Nothing here takes longer, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(60);
const CHILD_SOCKET: &str = "STANCHION_TEST_CHILD_SOCKET";
const CHILD_ROLE: &str = "STANCHION_TEST_CHILD_ROLE";

struct Fixture {
    ranks: Ranks,
    events: Receiver<AgentEvent>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

fn fixture() -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run").join("agent");
    let (to, events) = channel(64);
    let ranks = Ranks::bind(&socket, to).unwrap();
    Fixture { ranks, events, socket, _dir: dir }
}

impl Fixture {
    async fn next(&mut self) -> AgentEvent {
        let event = tokio::time::timeout(PATIENCE, self.events.recv()).await;
        event.expect("an event comes in time").expect("the socket lives")
    }

    async fn request(&mut self) -> (ConnId, Request) {
        match self.next().await {
            AgentEvent::RankRequest { conn, request } => (conn, request),
            other => panic!("a request is expected, not {other:?}"),
        }
    }

    async fn gone(&mut self, want: ConnId) {
        match self.next().await {
            AgentEvent::RankGone { conn, .. } => assert_eq!(conn, want),
            other => panic!("an end is expected, not {other:?}"),
        }
    }
}

fn warn(text: &str) -> Request {
    Request::Warn { text: text.into() }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn ask(stream: &mut UnixStream, request: &Request) {
    frame::write(stream, KIND_REQUEST, request, CLIENT_FRAME_BYTES_MAX).unwrap();
}

fn answer(stream: &mut UnixStream) -> Answer {
    frame::read(stream, CLIENT_FRAME_BYTES_MAX).unwrap()
}

/// On a thread: the runtime of these tests has only one, which serves the socket.
fn client<T: Send + 'static>(
    socket: &Path,
    work: impl FnOnce(UnixStream) -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    let socket = socket.to_owned();
    std::thread::spawn(move || work(connect(&socket)))
}

#[tokio::test]
async fn each_request_gets_its_answer() {
    let mut f = fixture();
    let mode = std::fs::metadata(&f.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let rank = client(&f.socket, |mut stream| {
        ask(&mut stream, &warn("one"));
        assert_eq!(answer(&mut stream), Answer::Flag(true));
        ask(&mut stream, &warn("two"));
        assert_eq!(answer(&mut stream), Answer::Ok);
    });
    let (conn, request) = f.request().await;
    assert_eq!(request, warn("one"));
    f.ranks.answer(conn, Answer::Flag(true), Vec::new());
    let (again, request) = f.request().await;
    assert_eq!((again, request), (conn, warn("two")));
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    // One that nobody waits for is dropped.
    f.ranks.answer(ConnId(99), Answer::Ok, Vec::new());
    f.gone(conn).await;
    rank.join().unwrap();
    let socket = f.socket.clone();
    drop(f.ranks);
    assert!(!socket.exists());
}

#[tokio::test]
async fn what_violates_the_protocol_is_told_and_closed() {
    // FM-F11, FM-C3
    let whole = frame::encode(KIND_REQUEST, &warn("x"), CLIENT_FRAME_BYTES_MAX).unwrap();
    let mut oversize = whole.clone();
    oversize[8..12].copy_from_slice(&(CLIENT_FRAME_BYTES_MAX + 1).to_le_bytes());
    let crc = stanchion_format::checksum::crc64(&oversize[..24]);
    oversize[24..32].copy_from_slice(&crc.0.to_le_bytes());
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let other_kind = frame::seal(9, &whole[32..]);
    let trailing = frame::seal(KIND_REQUEST, &[&whole[32..], &[0]].concat());
    let stranger = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    for bytes in [oversize, damaged, other_kind, trailing, stranger] {
        let mut f = fixture();
        let rank = client(&f.socket, move |mut stream| {
            stream.write_all(&bytes).unwrap();
            let told = answer(&mut stream);
            assert!(matches!(told, Answer::Failed { code: Code::Protocol, .. }), "{told:?}");
            let mut rest = Vec::new();
            // A reset is an end too.
            let _ = stream.read_to_end(&mut rest);
            assert!(rest.is_empty());
        });
        assert!(matches!(f.next().await, AgentEvent::RankGone { .. }));
        rank.join().unwrap();
    }
}

#[tokio::test]
async fn a_second_request_before_the_answer_ends_the_connection() {
    let mut f = fixture();
    let rank = client(&f.socket, |mut stream| {
        ask(&mut stream, &warn("one"));
        ask(&mut stream, &warn("two"));
        assert!(matches!(answer(&mut stream), Answer::Failed { code: Code::Protocol, .. }));
    });
    let (conn, _) = f.request().await;
    f.gone(conn).await;
    rank.join().unwrap();
}

#[tokio::test]
async fn a_rank_that_hangs_up_while_it_waits_is_gone() {
    let mut f = fixture();
    let (hang_up, told) = std::sync::mpsc::channel::<()>();
    let rank = client(&f.socket, move |mut stream| {
        ask(&mut stream, &warn("one"));
        // One that is gone before it is let in was never there.
        told.recv().unwrap();
    });
    let (conn, _) = f.request().await;
    hang_up.send(()).unwrap();
    rank.join().unwrap();
    f.gone(conn).await;
}

#[tokio::test]
async fn paths_and_directories_that_will_not_do_are_refused() {
    // FM-C2
    let dir = tempfile::tempdir().unwrap();
    let (to, _events) = channel(1);
    let long = dir.path().join("x".repeat(SOCKET_PATH_BYTES_MAX));
    let error = Ranks::bind(&long, to.clone()).err();
    assert!(matches!(error, Some(RanksError::PathTooLong { .. })), "{error:?}");
    let open = dir.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Ranks::bind(&open.join("agent"), to.clone()).err();
    assert!(matches!(error, Some(RanksError::Directory(_))), "{error:?}");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let error = Ranks::bind(&link.join("agent"), to).err();
    assert!(matches!(error, Some(RanksError::Directory(_))), "{error:?}");
}

#[tokio::test]
async fn another_users_process_is_refused() {
    // FM-C2
    if !rustix::process::geteuid().is_root() {
        println!("SKIP ranks: another user's process needs root");
        return;
    }
    let mut f = fixture();
    // Open every door but the last: what is tested is the look at the peer's credentials.
    for path in
        [&f.socket, f.socket.parent().unwrap(), f.socket.parent().unwrap().parent().unwrap()]
            .map(Path::to_owned)
    {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let socket = f.socket.clone();
    let other = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let mut stream = connect(&socket);
        // It may be closed before it has spoken.
        let _ = frame::write(&mut stream, KIND_REQUEST, &warn("x"), CLIENT_FRAME_BYTES_MAX);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "another user got an answer");
    });
    tokio::task::spawn_blocking(move || other.join().unwrap()).await.unwrap();
    assert_eq!(f.ranks.count(), 0);
    let rank = client(&f.socket, |mut stream| {
        ask(&mut stream, &warn("mine"));
        answer(&mut stream)
    });
    let (conn, request) = f.request().await;
    assert_eq!(request, warn("mine"));
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    tokio::task::spawn_blocking(move || rank.join().unwrap()).await.unwrap();
}

/// Not a test of its own: what the child processes of the tests below do.
#[test]
fn child() {
    let Some(socket) = std::env::var_os(CHILD_SOCKET) else { return };
    let mut stream = connect(Path::new(&socket));
    let role = std::env::var(CHILD_ROLE).unwrap();
    let attach = |thread| Request::Attach { rank: RankId(0), thread };
    ask(&mut stream, &if role == "attaches" { attach(true) } else { warn("child") });
    assert_eq!(answer(&mut stream), Answer::Ok);
    if role == "attaches late" {
        ask(&mut stream, &attach(false));
    }
    if role == "leaves_heir" || role == "attaches" {
        rustix::io::fcntl_setfd(&stream, rustix::io::FdFlags::empty()).unwrap();
        let heir = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        println!("heir {}", heir.id());
        std::process::exit(0);
    }
    // Until it is killed; no longer than the test's patience.
    let _ = stream.read(&mut [0u8; 1]);
}

/// Of a child that leaves one.
fn heir(out: &mut impl std::io::BufRead) -> rustix::process::Pid {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0);
        if let Some((_, pid)) = line.split_once("heir ") {
            return rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        }
    }
}

fn start_child(f: &Fixture, role: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD_SOCKET, &f.socket)
        .env(CHILD_ROLE, role)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn ranks_are_ended_by_the_kernel_and_only_those_that_are_meant() {
    let mut f = fixture();
    let mut first = start_child(&f, "waits");
    let (one, _) = f.request().await;
    f.ranks.answer(one, Answer::Ok, Vec::new());
    let mut second = start_child(&f, "waits");
    let (two, _) = f.request().await;
    f.ranks.answer(two, Answer::Ok, Vec::new());
    f.ranks.end(&[one]);
    f.gone(one).await;
    assert_eq!(first.wait().unwrap().signal(), Some(9));
    assert!(second.try_wait().unwrap().is_none());
    f.ranks.end(&[]);
    f.gone(two).await;
    assert_eq!(second.wait().unwrap().signal(), Some(9));
    assert_eq!(f.ranks.count(), 0);
}

#[tokio::test]
async fn a_rank_is_gone_when_its_process_is_though_its_child_holds_the_socket() {
    // FM-F1
    let mut f = fixture();
    let mut child = start_child(&f, "leaves_heir");
    let (conn, _) = f.request().await;
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    // The heir keeps the pipe open as well: its line is read, not the end of the file.
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let heir = tokio::task::spawn_blocking(move || heir(&mut out)).await.unwrap();
    f.gone(conn).await;
    child.wait().unwrap();
    rustix::process::test_kill_process(heir).expect("the heir lives");
    rustix::process::kill_process(heir, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn the_connection_of_a_child_ends_with_the_child() {
    // FM-P10. The process that connected is this one: it is not ended in place of its child.
    let mut f = fixture();
    let (got, ready) = tokio::sync::oneshot::channel();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let child = client(&f.socket, move |mut stream| {
        ask(&mut stream, &Request::Attach { rank: RankId(0), thread: false });
        assert_eq!(answer(&mut stream), Answer::Ok);
        got.send(()).unwrap();
        // It is told to end, and takes its time.
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        wait.recv().unwrap();
    });
    let (conn, request) = f.request().await;
    assert_eq!(request, Request::Attach { rank: RankId(0), thread: false });
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    ready.await.unwrap();
    f.ranks.end(&[conn]);
    let early = tokio::time::timeout(Duration::from_millis(300), f.events.recv()).await;
    assert!(early.is_err(), "{early:?}");
    go.send(()).unwrap();
    match f.next().await {
        AgentEvent::RankGone { conn: gone, exited } => assert_eq!((gone, exited), (conn, true)),
        other => panic!("an end is expected, not {other:?}"),
    }
    child.join().unwrap();
}

#[tokio::test]
async fn the_connection_of_a_thread_ends_by_its_word_or_with_its_process() {
    // FM-P10. The process that connected is this one: it is told, and not ended.
    let mut f = fixture();
    let (got, ready) = tokio::sync::oneshot::channel();
    let thread = client(&f.socket, move |mut stream| {
        ask(&mut stream, &Request::Attach { rank: RankId(0), thread: true });
        assert_eq!(answer(&mut stream), Answer::Ok);
        // A child of the application's has the connection too.
        let copy = stream.try_clone().unwrap();
        got.send(copy).unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
    let (conn, _) = f.request().await;
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    let copy = ready.await.unwrap();
    f.ranks.end(&[conn]);
    match f.next().await {
        AgentEvent::RankGone { conn: gone, exited } => assert_eq!((gone, exited), (conn, true)),
        other => panic!("an end is expected, not {other:?}"),
    }
    thread.join().unwrap();
    drop(copy);
    // A process that dies has said nothing, and an heir holds the connection.
    let mut child = start_child(&f, "attaches");
    let (conn, request) = f.request().await;
    assert_eq!(request, Request::Attach { rank: RankId(0), thread: true });
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let heir = tokio::task::spawn_blocking(move || heir(&mut out)).await.unwrap();
    f.gone(conn).await;
    child.wait().unwrap();
    rustix::process::kill_process(heir, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn a_rank_that_says_later_that_it_is_a_child_is_ended_all_the_same() {
    let mut f = fixture();
    let mut child = start_child(&f, "attaches late");
    let (conn, _) = f.request().await;
    f.ranks.answer(conn, Answer::Ok, Vec::new());
    let (_, request) = f.request().await;
    assert_eq!(request, Request::Attach { rank: RankId(0), thread: false });
    f.ranks.end(&[conn]);
    f.gone(conn).await;
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}
