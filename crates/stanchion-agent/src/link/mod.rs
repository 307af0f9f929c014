//! Control links between agents and the controller: authenticated, encrypted, opened on demand.
//!
//! What core can rely on is little, and it relies on no more (FM-F6): messages may be lost, and overtake
//! each other when two links to one peer stand. Queues are bounded; a full one drops its *oldest*
//! message, since senders repeat until answered and newer messages tell more than older ones.
//!
//! Two agents that call each other at the same moment get two links. Both stay and both are read; each side
//! sends on its oldest living one, so nothing is torn down and nothing flaps. A controller is answered on
//! the link its message came by (an old controller must hear that it is fenced), otherwise on the newest.
//!
//! [`LinkEvent::Down`] is evidence of death: a connection that was closed, reset or refused, and no other
//! link left. Silence (no answer to a connect, a kernel timeout, no route) is only [`LinkEvent::Silent`]: that
//! needs a second observer (FM-F5a), and core's own pings find it.

mod gate;
mod handshake;
mod stream;

pub use gate::{DataConn, Gate, GateError};
pub use handshake::{Credentials, LinkError, Role};
pub(crate) use stream::{DataStream, initiate_data, is_timeout, tune};

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use stanchion_format::ids::{AgentId, PeerId};
use stanchion_format::peer::{AgentAddr, Msg};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;
use tracing::{debug, warn};

use handshake::Session;
use stream::{FrameWriter, MessageReader, envelope, initiate, is_evidence};

/// Messages that wait for one link.
const QUEUE_MESSAGES_MAX: usize = 8192;
/// Bytes that wait for one link; the newest message is kept whatever its size.
const QUEUE_BYTES_MAX: usize = 256 << 20;
/// Links to one peer; of more, the oldest is closed.
const LINKS_PER_PEER_MAX: usize = 4;
/// Events that wait for the control thread; beyond, links are not read (TCP then slows the peers).
const EVENTS_MAX: usize = 1024;
/// Calls to a peer that hangs up in the handshake (it may be full of strangers), and the pause between.
const CALLS_MAX: u32 = 3;
const CALL_PAUSE: Duration = Duration::from_millis(100);
/// After silence, no new call to the same peer for so long.
const SILENCE_PAUSE: Duration = Duration::from_millis(250);

/// Deadlines of links.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// For a whole handshake.
    pub handshake: Duration,
    /// For a connection to be made.
    pub connect: Duration,
    /// After so long without any sign from the peer's kernel a link is given up, as silent.
    pub silence: Duration,
    /// Handshakes under way; of more, the oldest is dropped.
    pub handshakes_max: usize,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            handshake: Duration::from_secs(5),
            connect: Duration::from_secs(5),
            silence: Duration::from_secs(60),
            handshakes_max: 64,
        }
    }
}

/// One link; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkId(u64);

/// What happens on links.
#[derive(Debug)]
pub enum LinkEvent {
    /// There is a link to a peer that had none.
    Up(PeerId),
    /// A message.
    Message {
        /// Who.
        from: PeerId,
        /// By which link, for [`Links::send_by`].
        via: LinkId,
        /// What.
        msg: Msg,
    },
    /// The last link was closed or reset, or a call was refused: the peer's process is gone.
    Down(PeerId),
    /// The peer does not answer; what was queued for it is dropped.
    Silent(PeerId),
}

/// The links of one process. Cheap to clone; all clones are one. With the last clone the links go.
#[derive(Clone)]
pub struct Links(Arc<Owner>);

/// Tasks hold `Shared`, handles hold this.
struct Owner(Arc<Shared>);

impl std::ops::Deref for Owner {
    type Target = Arc<Shared>;

    fn deref(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.abort_all();
    }
}

struct Shared {
    who: Arc<Credentials>,
    tuning: Tuning,
    events: mpsc::Sender<LinkEvent>,
    table: Mutex<Table>,
    /// A link ended.
    ended: Notify,
}

#[derive(Default)]
struct Table {
    peers: HashMap<PeerId, Peer>,
    addresses: HashMap<AgentId, String>,
    next: u64,
    closed: bool,
}

#[derive(Default)]
struct Peer {
    /// Oldest first.
    links: Vec<Link>,
    /// A call is under way; what is sent meanwhile.
    call: Option<AbortHandle>,
    pending: Arc<Queue>,
    silent_until: Option<Instant>,
}

struct Link {
    id: LinkId,
    queue: Arc<Queue>,
    reader: Option<AbortHandle>,
    writer: Option<AbortHandle>,
}

impl Links {
    /// Links for `who`, and what happens on them.
    pub fn new(who: Arc<Credentials>, tuning: Tuning) -> (Links, mpsc::Receiver<LinkEvent>) {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let shared = Shared { who, tuning, events, table: Mutex::default(), ended: Notify::new() };
        (Links(Arc::new(Owner(Arc::new(shared)))), receiver)
    }

    /// Who is where from now on. Links that stand are left alone: core judges what comes by them.
    pub fn set_addresses(&self, agents: &[AgentAddr]) {
        self.0.table().addresses = agents.iter().map(|a| (a.id, a.addr.clone())).collect();
    }

    /// Adds one address, or replaces it.
    pub fn set_address(&self, agent: &AgentAddr) {
        self.0.table().addresses.insert(agent.id, agent.addr.clone());
    }

    /// Sends, opening a link if there is none. A failure comes back as an event, or not at all.
    pub fn send(&self, to: PeerId, msg: Msg) {
        self.send_by(to, None, msg);
    }

    /// The same, by that link if it still stands.
    pub fn send_by(&self, to: PeerId, via: Option<LinkId>, msg: Msg) {
        match envelope(self.0.who.me, msg) {
            Ok(frame) => self.queue(to, via, Some(frame)),
            Err(error) => warn!(?to, %error, "a message is not sent"),
        }
    }

    /// Opens a link if there is none.
    pub fn connect(&self, to: AgentId) {
        self.queue(PeerId::Agent(to), None, None);
    }

    /// Does a link to the peer stand?
    pub fn stands(&self, peer: PeerId) -> bool {
        self.0.table().peers.get(&peer).is_some_and(|p| !p.links.is_empty())
    }

    /// Closes the links to a peer that was declared dead, without an event.
    pub fn forget(&self, peer: PeerId) {
        let peer = self.0.table().peers.remove(&peer);
        if let Some(peer) = peer {
            peer.abort();
        }
    }

    /// Sends what is queued and waits until the peers have read it (they hang up then), for at most
    /// `limit`; then closes everything. Events are thrown away. A socket closed with unread bytes in it
    /// would be reset, and the peer would lose what we said last.
    pub async fn close(&self, events: &mut mpsc::Receiver<LinkEvent>, limit: Duration) {
        {
            let mut table = self.0.table();
            table.closed = true;
            table.peers.values().flat_map(|p| &p.links).for_each(|l| l.queue.close());
        }
        let gone = async {
            while self.0.table().peers.values().any(|p| !p.links.is_empty()) {
                tokio::select! {
                    _ = events.recv() => {}
                    () = self.0.ended.notified() => {}
                }
            }
        };
        if tokio::time::timeout(limit, gone).await.is_err() {
            debug!("links are closed before their peers hung up");
        }
        self.0.abort_all();
    }

    fn queue(&self, to: PeerId, via: Option<LinkId>, frame: Option<Arc<[u8]>>) {
        let mut guard = self.0.table();
        let table = &mut *guard;
        if table.closed {
            return;
        }
        let address = match to {
            PeerId::Agent(id) => table.addresses.get(&id).cloned(),
            PeerId::Controller => None,
        };
        let peer = table.peers.entry(to).or_default();
        let chosen = via.and_then(|v| peer.links.iter().find(|l| l.id == v));
        let chosen = chosen.or(match to {
            PeerId::Controller => peer.links.last(),
            PeerId::Agent(_) => peer.links.first(),
        });
        if let Some(link) = chosen {
            frame.into_iter().for_each(|f| link.queue.push(f));
            return;
        }
        let Some(address) = address else {
            debug!(?to, "a message is dropped: no link and no address");
            return;
        };
        frame.into_iter().for_each(|f| peer.pending.push(f));
        if peer.call.is_none() {
            let pause = peer.silent_until.map(|t| t.saturating_duration_since(Instant::now()));
            let shared = self.0.0.clone();
            let call = tokio::spawn(call(shared, to, address, pause.unwrap_or_default()));
            peer.call = Some(call.abort_handle());
        }
    }

    /// Takes over a connection whose handshake is done.
    fn adopt(&self, stream: TcpStream, session: Session) {
        adopt(&self.0, stream, session, false);
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics while it holds the table")
    }

    fn abort_all(&self) {
        let peers: Vec<Peer> = self.table().peers.drain().map(|(_, p)| p).collect();
        peers.into_iter().for_each(Peer::abort);
    }
}

impl Peer {
    fn abort(self) {
        let tasks = self.links.iter().flat_map(|l| [&l.reader, &l.writer]).flatten();
        tasks.chain(&self.call).for_each(AbortHandle::abort);
    }
}

/// Calls a peer until it answers or there is nobody.
async fn call(shared: Arc<Shared>, to: PeerId, address: String, pause: Duration) {
    tokio::time::sleep(pause).await;
    let mut calls = 0;
    let error = loop {
        calls += 1;
        match dial(&shared, to, &address).await {
            Ok((stream, session)) => return adopt(&shared, stream, session, true),
            Err(LinkError::Io(e))
                if e.kind() != std::io::ErrorKind::ConnectionRefused && calls < CALLS_MAX =>
            {
                debug!(?to, error = %e, "calling again");
            }
            Err(error) => break error,
        }
        tokio::time::sleep(CALL_PAUSE).await;
    };
    debug!(?to, address, %error, "no link");
    let dead = is_evidence(&error);
    let alone = {
        let mut table = shared.table();
        let Some(peer) = table.peers.get_mut(&to) else { return };
        peer.call = None;
        peer.pending.clear();
        peer.silent_until = Some(Instant::now() + SILENCE_PAUSE);
        peer.links.is_empty()
    };
    if alone {
        let event = if dead { LinkEvent::Down(to) } else { LinkEvent::Silent(to) };
        // If nobody listens any more, the process is ending.
        let _ = shared.events.send(event).await;
    }
}

async fn dial(
    shared: &Shared,
    to: PeerId,
    address: &str,
) -> Result<(TcpStream, Session), LinkError> {
    let connect = tokio::time::timeout(shared.tuning.connect, TcpStream::connect(address));
    let mut stream = connect.await.map_err(|_| LinkError::Timeout)??;
    tune(&stream, shared.tuning.silence)?;
    let shake = initiate(&mut stream, &shared.who, to);
    let session = tokio::time::timeout(shared.tuning.handshake, shake).await;
    Ok((stream, session.map_err(|_| LinkError::Timeout)??))
}

/// Makes a link of an authenticated connection.
fn adopt(shared: &Arc<Shared>, stream: TcpStream, session: Session, called: bool) {
    let Session { peer: peer_id, sealer, opener } = session;
    let (read, write) = stream.into_split();
    let mut guard = shared.table();
    let table = &mut *guard;
    if table.closed {
        return;
    }
    table.next += 1;
    let id = LinkId(table.next);
    let peer = table.peers.entry(peer_id).or_default();
    if called {
        peer.call = None;
    }
    let first = peer.links.is_empty();
    // What was waiting for a link goes by this one.
    let queue = if first { std::mem::take(&mut peer.pending) } else { Arc::default() };
    let writer = write_link(queue.clone(), FrameWriter::new(write, sealer), peer_id);
    let writer = Some(tokio::spawn(writer).abort_handle());
    peer.links.push(Link { id, queue, reader: None, writer });
    if peer.links.len() > LINKS_PER_PEER_MAX {
        peer.links.remove(0).abort();
    }
    let reader = MessageReader::new(read, opener, peer_id);
    let reader = tokio::spawn(read_link(shared.clone(), id, reader, peer_id, first));
    if let Some(link) = peer.links.last_mut() {
        link.reader = Some(reader.abort_handle());
    }
}

impl Link {
    fn abort(self) {
        [self.reader, self.writer].iter().flatten().for_each(AbortHandle::abort);
    }
}

async fn write_link(queue: Arc<Queue>, mut writer: FrameWriter, peer: PeerId) {
    while let Some(frame) = queue.next().await {
        if let Err(error) = writer.write(&frame).await {
            // The reader of the same link sees it too, after what the peer said last.
            debug!(?peer, %error, "a link broke in sending");
            break;
        }
    }
    queue.fail();
    writer.finish().await;
}

async fn read_link(
    shared: Arc<Shared>,
    id: LinkId,
    mut reader: MessageReader,
    peer: PeerId,
    first: bool,
) {
    if first && shared.events.send(LinkEvent::Up(peer)).await.is_err() {
        return;
    }
    let ended = loop {
        match reader.next().await {
            Ok(Some(msg)) => {
                let event = LinkEvent::Message { from: peer, via: id, msg };
                if shared.events.send(event).await.is_err() {
                    return;
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    let dead = match &ended {
        None => true,
        // Messages that cannot be are a fault of the program, not the peer's death; a new link may work.
        Some(LinkError::Io(_)) => is_evidence(ended.as_ref().expect("matched just now")),
        Some(error) => {
            warn!(?peer, %error, "a link is closed");
            false
        }
    };
    debug!(?peer, ?ended, "a link ended");
    let last = {
        let mut table = shared.table();
        let Some(entry) = table.peers.get_mut(&peer) else { return };
        if let Some(at) = entry.links.iter().position(|l| l.id == id) {
            // Not the reader: that is this task.
            entry.links.remove(at).writer.iter().for_each(AbortHandle::abort);
        }
        entry.links.is_empty()
    };
    shared.ended.notify_one();
    if last {
        let event = if dead { LinkEvent::Down(peer) } else { LinkEvent::Silent(peer) };
        let _ = shared.events.send(event).await;
    }
}

/// Frames that wait for one link.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Notify,
}

#[derive(Default)]
struct QueueState {
    frames: VecDeque<Arc<[u8]>>,
    bytes: usize,
    closed: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("no thread panics while it holds a queue")
    }

    fn push(&self, frame: Arc<[u8]>) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        state.bytes += frame.len();
        state.frames.push_back(frame);
        while state.frames.len() > 1
            && (state.frames.len() > QUEUE_MESSAGES_MAX || state.bytes > QUEUE_BYTES_MAX)
        {
            let oldest = state.frames.pop_front().map_or(0, |f| f.len());
            state.bytes -= oldest;
        }
        self.changed.notify_one();
    }

    fn clear(&self) {
        let mut state = self.state();
        state.frames.clear();
        state.bytes = 0;
    }

    /// The next frame; `None` when closed and empty.
    async fn next(&self) -> Option<Arc<[u8]>> {
        loop {
            {
                let mut state = self.state();
                if let Some(frame) = state.frames.pop_front() {
                    state.bytes -= frame.len();
                    return Some(frame);
                }
                if state.closed {
                    return None;
                }
            }
            self.changed.notified().await;
        }
    }

    /// Takes no more; what is there is still sent.
    fn close(&self) {
        self.state().closed = true;
        self.changed.notify_one();
    }

    /// Nothing of it will be sent any more.
    fn fail(&self) {
        let mut state = self.state();
        state.closed = true;
        state.frames.clear();
        state.bytes = 0;
    }
}

#[cfg(test)]
mod tests;
