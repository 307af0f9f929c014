//! The local socket: ranks of this node.
//!
//! Each connection is one process of the job's own user (FM-C2), one request at a time, each with one
//! answer. The process is held by a pidfd from the start, so that what is ended later is it and nobody who
//! got its number since; its exit ends the connection even where a child of it still holds the socket.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use stanchion_core::api::{AgentEvent, ConnId};
use stanchion_format::client::{Answer, Code, KIND_ANSWER, KIND_REQUEST, Request};
use stanchion_format::frame::{self, FrameError, HEADER_BYTES, Header};
use stanchion_format::limits::CLIENT_FRAME_BYTES_MAX;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::{debug, warn};

/// Longest path of a Unix socket, bytes (`sun_path` of unix(7), less the terminating zero).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Connections at a time; a node has fewer ranks.
const CONNECTIONS_MAX: usize = 16_384;
/// From a frame's first byte to its last, and for an answer to be taken.
const FRAME_DEADLINE: Duration = Duration::from_secs(60);
/// A process that was killed is gone by then, or hangs in the kernel.
const KILL_DEADLINE: Duration = Duration::from_secs(5);
/// From the end of a connection to that of its process, if it is ending.
const EXIT_PAUSE: Duration = Duration::from_millis(200);
/// Pause when the system gives no new connection (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why there is no local socket.
#[derive(Debug, thiserror::Error)]
pub enum RanksError {
    /// The path does not fit into a socket's address.
    #[error("the socket's path {path} has {bytes} bytes, the system's limit is {max}; choose a shorter run_dir", max = SOCKET_PATH_BYTES_MAX)]
    PathTooLong {
        /// Which.
        path: PathBuf,
        /// How long.
        bytes: usize,
    },
    /// Others could get at the socket.
    #[error("the directory {0} is not the user's own with mode 0700")]
    Directory(PathBuf),
    /// A system call failed.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
enum Closed {
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("the deadline for a frame passed")]
    Deadline,
    #[error("a second request came before the first was answered")]
    TwoRequests,
    #[error("the process ended")]
    Exited,
    #[error("the agent ended it")]
    Ended,
}

/// The local socket and its connections.
pub struct Ranks {
    inside: Arc<Inside>,
    accept: tokio::task::AbortHandle,
    path: PathBuf,
}

struct Inside {
    events: mpsc::Sender<AgentEvent>,
    table: Mutex<Table>,
    uid: u32,
}

#[derive(Default)]
struct Table {
    conns: HashMap<ConnId, Conn>,
    next: u64,
}

struct Conn {
    pidfd: Option<Arc<OwnedFd>>,
    /// Where the outstanding request waits; descriptors that go with the answer.
    answer: Option<oneshot::Sender<(Answer, Vec<OwnedFd>)>>,
    held: Held,
    end: Arc<Notify>,
}

/// Who has the other end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// The process that connected.
    Process,
    /// A child of that process, and it alone.
    Child,
    /// A thread of that process, which must not be ended in place of it.
    Thread,
}

impl Ranks {
    /// Listens at `path`, whose directory is created if it is missing. Requests and ends of connections go
    /// to `events`.
    pub fn bind(path: &Path, events: mpsc::Sender<AgentEvent>) -> Result<Ranks, RanksError> {
        let uid = rustix::process::geteuid().as_raw();
        let bytes = path.as_os_str().as_bytes().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            return Err(RanksError::PathTooLong { path: path.to_owned(), bytes });
        }
        check_directory(path.parent().unwrap_or(Path::new(".")), uid)?;
        let failed = |e| RanksError::Io(path.to_owned(), e);
        let listener = UnixListener::bind(path).map_err(failed)?;
        // Nobody else can pass the directory; the mode says the same once more.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let inside = Arc::new(Inside { events, table: Mutex::default(), uid });
        let accept = tokio::spawn(accept(inside.clone(), listener)).abort_handle();
        Ok(Ranks { inside, accept, path: path.to_owned() })
    }

    /// Answers a rank's outstanding request; without one, nothing happens.
    pub fn answer(&self, conn: ConnId, answer: Answer, fds: Vec<OwnedFd>) {
        let waiting = self.inside.table().conns.get_mut(&conn).and_then(|c| c.answer.take());
        match waiting {
            // A rank that is gone in this moment needs no answer.
            Some(waiting) => drop(waiting.send((answer, fds))),
            None => debug!(?conn, "an answer without a request"),
        }
    }

    /// Kills the processes of these connections, or of all if none are named, and closes them. `RankGone`
    /// follows when a process is gone.
    pub fn end(&self, conns: &[ConnId]) {
        let table = self.inside.table();
        for (id, conn) in &table.conns {
            if conns.is_empty() || conns.contains(id) {
                // A child or a thread sees that its agent hangs up.
                if let Some(pidfd) = conn.pidfd.as_ref().filter(|_| conn.held == Held::Process)
                    && let Err(error) = pidfd_send_signal(pidfd, Signal::KILL)
                    && error != rustix::io::Errno::SRCH
                {
                    warn!(conn = id.0, %error, "a rank cannot be ended");
                }
                conn.end.notify_one();
            }
        }
    }

    /// How many connections stand.
    pub fn count(&self) -> usize {
        self.inside.table().conns.len()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.accept.abort();
        for conn in self.inside.table().conns.values() {
            conn.end.notify_one();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn check_directory(dir: &Path, uid: u32) -> Result<(), RanksError> {
    let failed = |e| RanksError::Io(dir.to_owned(), e);
    match std::fs::DirBuilder::new().recursive(false).mode(0o700).create(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(dir).map_err(failed)?;
    if meta.is_dir() && meta.uid() == uid && meta.mode() & 0o077 == 0 {
        Ok(())
    } else {
        Err(RanksError::Directory(dir.to_owned()))
    }
}

impl Inside {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics while it holds the table")
    }

    fn held(&self, id: ConnId) -> Held {
        self.table().conns.get(&id).map_or(Held::Process, |c| c.held)
    }
}

async fn accept(inside: Arc<Inside>, listener: UnixListener) {
    let mut told_other_uid = false;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "the local socket gives no connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        match credentials(&stream, inside.uid) {
            Ok(pidfd) => admit(&inside, stream, pidfd),
            Err(Refused::OtherUser(uid)) => {
                if !std::mem::replace(&mut told_other_uid, true) {
                    warn!(uid, "another user's process is refused at the local socket");
                }
            }
            Err(Refused::Gone) => debug!("a process is gone before it was let in"),
            Err(Refused::Os(error)) => warn!(%error, "a process cannot be let in"),
        }
    }
}

enum Refused {
    OtherUser(u32),
    Gone,
    Os(io::Error),
}

/// Holds the process at the other end, if it is the user's own (FM-C2). `None`: it is in another pid
/// namespace, where it cannot be named; it is served, but can only be told to go.
fn credentials(stream: &UnixStream, uid: u32) -> Result<Option<Arc<OwnedFd>>, Refused> {
    let cred = stream.peer_cred().map_err(Refused::Os)?;
    if cred.uid() != uid {
        return Err(Refused::OtherUser(cred.uid()));
    }
    let Some(pid) = cred.pid().and_then(Pid::from_raw) else { return Ok(None) };
    let pidfd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => Arc::new(pidfd),
        Err(rustix::io::Errno::SRCH) => return Err(Refused::Gone),
        Err(e) => return Err(Refused::Os(e.into())),
    };
    // If the process had ended and its number gone to another before we opened it, the socket would
    // have been closed with it.
    if hung_up(stream).map_err(Refused::Os)? {
        return Err(Refused::Gone);
    }
    Ok(Some(pidfd))
}

fn hung_up(stream: &UnixStream) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::new(stream, PollFlags::HUP)];
    poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

fn admit(inside: &Arc<Inside>, stream: UnixStream, pidfd: Option<Arc<OwnedFd>>) {
    let mut table = inside.table();
    if table.conns.len() >= CONNECTIONS_MAX {
        warn!("a process is refused: {CONNECTIONS_MAX} connections stand");
        return;
    }
    table.next += 1;
    let id = ConnId(table.next);
    let end = Arc::new(Notify::new());
    table.conns.insert(
        id,
        Conn { pidfd: pidfd.clone(), answer: None, held: Held::Process, end: end.clone() },
    );
    tokio::spawn(connection(inside.clone(), id, stream, pidfd, end));
}

/// Serves one connection to its end.
async fn connection(
    inside: Arc<Inside>,
    id: ConnId,
    mut stream: UnixStream,
    pidfd: Option<Arc<OwnedFd>>,
    end: Arc<Notify>,
) {
    let why = tokio::select! {
        why = serve(&inside, id, &mut stream) => why.err().unwrap_or(Closed::Exited),
        () = exited(pidfd.clone(), || inside.held(id) == Held::Child) => Closed::Exited,
        () = end.notified() => Closed::Ended,
    };
    debug!(conn = id.0, %why, "a rank's connection ends");
    if matches!(why, Closed::Frame(_) | Closed::Deadline | Closed::TwoRequests) {
        warn!(conn = id.0, %why, "a rank's connection is closed");
        let text = why.to_string();
        let answer = Answer::Failed { code: Code::Protocol, text };
        let told = send(&mut stream, &answer, &[]);
        let _ = tokio::time::timeout(KILL_DEADLINE, told).await;
    }
    let held = inside.held(id);
    if held != Held::Process {
        // A child of the application may hold a thread's end too: it writes to nothing.
        let process = exited(pidfd, || held == Held::Child);
        let gone = async {
            tokio::select! {
                () = child_gone(&mut stream) => {}
                () = process => {}
            }
        };
        let exited = tokio::time::timeout(KILL_DEADLINE, gone).await.is_ok();
        if !exited {
            warn!(conn = id.0, "what copies a rank's memory was told to end and is still there");
        }
        drop(stream);
        inside.table().conns.remove(&id);
        // If nobody listens any more, the process is ending.
        let _ = inside.events.send(AgentEvent::RankGone { conn: id, exited }).await;
        return;
    }
    drop(stream);
    let (known, gone) = (pidfd.is_some(), exited(pidfd.clone(), || false));
    if matches!(why, Closed::Ended) && pidfd.is_some() {
        let gone = tokio::time::timeout(KILL_DEADLINE, exited(pidfd, || false)).await;
        if gone.is_err() {
            warn!(conn = id.0, "a rank that was killed is still there: it hangs in the kernel");
        }
    }
    inside.table().conns.remove(&id);
    // A socket closes a little before its process has ended.
    let exited = known && tokio::time::timeout(EXIT_PAUSE, gone).await.is_ok();
    // If nobody listens any more, the process is ending.
    let _ = inside.events.send(AgentEvent::RankGone { conn: id, exited }).await;
}

/// Tells a child or thread to end and waits until it has: a child's mappings are gone when its end of the connection
/// closes, and a thread closes it when it has written its last.
async fn child_gone(stream: &mut UnixStream) {
    let _ = stream.shutdown().await;
    let mut rest = [0u8; 256];
    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
}

/// Ends when the process does; never for one that cannot be named, or whose child then holds the connection.
async fn exited(pidfd: Option<Arc<OwnedFd>>, left: impl Fn() -> bool) {
    if let Some(pidfd) = pidfd {
        // SAFETY: the Arc keeps the descriptor open and the same for as long as the AsyncFd lives.
        let watched = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) };
        if let Ok(watched) = watched {
            // A pidfd becomes readable when its process ends, and stays so.
            let _ = watched.readable().await;
            if !left() {
                return;
            }
        }
    }
    std::future::pending().await
}

async fn serve(inside: &Inside, id: ConnId, stream: &mut UnixStream) -> Result<(), Closed> {
    let mut first = true;
    while let Some(request) = receive(stream).await? {
        let (tell, answer) = oneshot::channel();
        match inside.table().conns.get_mut(&id) {
            Some(conn) => {
                conn.answer = Some(tell);
                // A rank that says it later stays what it is, and can be ended.
                match request {
                    Request::Attach { thread: true, .. } if first => conn.held = Held::Thread,
                    Request::Attach { thread: false, .. } if first => conn.held = Held::Child,
                    _ => {}
                }
                first = false;
            }
            None => return Err(Closed::Ended),
        }
        if inside.events.send(AgentEvent::RankRequest { conn: id, request }).await.is_err() {
            return Err(Closed::Ended);
        }
        let (answer, fds) = tokio::select! {
            answer = answer => answer.map_err(|_| Closed::Ended)?,
            broken = interrupted(stream) => return Err(broken),
        };
        let sent = tokio::time::timeout(FRAME_DEADLINE, send(stream, &answer, &fds)).await;
        sent.map_err(|_| Closed::Deadline)??;
    }
    Ok(())
}

/// While a rank waits for its answer it has nothing to say: what comes is its end or a violation.
async fn interrupted(stream: &mut UnixStream) -> Closed {
    let mut byte = [0u8; 1];
    match stream.read(&mut byte).await {
        Ok(0) => Closed::Io(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Closed::TwoRequests,
        Err(e) => Closed::Io(e),
    }
}

/// The next request; `None` when the rank hangs up between two.
async fn receive(stream: &mut UnixStream) -> Result<Option<Request>, Closed> {
    let mut header = [0u8; HEADER_BYTES];
    if stream.read(&mut header[..1]).await? == 0 {
        return Ok(None);
    }
    let rest = async {
        stream.read_exact(&mut header[1..]).await?;
        let header = Header::parse(&header, CLIENT_FRAME_BYTES_MAX)?;
        if header.kind() != KIND_REQUEST {
            return Err(Closed::Frame(FrameError::Body));
        }
        // Memory grows with what comes, not with what was announced.
        let mut body = Vec::new();
        stream.take(header.body_bytes() as u64).read_to_end(&mut body).await?;
        header.check(&body)?;
        Ok(frame::decode(&body)?)
    };
    let request = tokio::time::timeout(FRAME_DEADLINE, rest).await;
    request.map_err(|_| Closed::Deadline)?.map(Some)
}

async fn send(stream: &mut UnixStream, answer: &Answer, fds: &[OwnedFd]) -> Result<(), Closed> {
    let frame = match frame::encode(KIND_ANSWER, answer, CLIENT_FRAME_BYTES_MAX) {
        Ok(frame) => frame,
        Err(error) => {
            let text = format!("the answer does not fit: {error}");
            let failed = Answer::Failed { code: Code::Internal, text };
            frame::encode(KIND_ANSWER, &failed, CLIENT_FRAME_BYTES_MAX)?
        }
    };
    if fds.is_empty() {
        stream.write_all(&frame).await?;
        return Ok(());
    }
    let all: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut done = 0;
    while done < frame.len() {
        stream.writable().await?;
        // The descriptors go with the first byte.
        let now: &[BorrowedFd<'_>] = if done == 0 { &all } else { &[] };
        let sent = stream.try_io(Interest::WRITABLE, || {
            Ok(stanchion_mem::fds::send(&*stream, &frame[done..], now)?)
        });
        match sent {
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
