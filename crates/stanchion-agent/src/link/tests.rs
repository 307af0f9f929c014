use std::io::Read as _;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use stanchion_format::ids::JobId;
use stanchion_format::peer::Severity;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;

use super::handshake::Initiator;
use super::*;
use crate::secret::Secret;

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Nothing here takes longer, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(60);

fn who(me: PeerId, job: u64, secret: u8) -> Arc<Credentials> {
    let secret = Arc::new(Secret::new([secret; 32]));
    Arc::new(Credentials { me, job: JobId(job), secret, encrypt: false })
}

fn agent(id: u32) -> PeerId {
    PeerId::Agent(AgentId(id))
}

/// One process of the job, as far as links go.
struct Node {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    data: UnboundedReceiver<DataConn>,
    addr: SocketAddr,
    gate: AbortHandle,
}

async fn node_of(who: Arc<Credentials>, tuning: Tuning) -> Node {
    let (links, events) = Links::new(who.clone(), tuning);
    let gate = Gate::listen(LOCALHOST).await.unwrap();
    let addr = gate.address();
    let (data_to, data) = mpsc::unbounded_channel();
    let run = gate.run(who, tuning, links.clone(), move |conn| {
        let _ = data_to.send(conn);
    });
    Node { links, events, data, addr, gate: tokio::spawn(run).abort_handle() }
}

async fn node(id: u32) -> Node {
    node_of(who(agent(id), 1, 7), Tuning::default()).await
}

impl Node {
    fn knows(&self, id: u32, addr: SocketAddr) {
        self.links.set_address(&AgentAddr { id: AgentId(id), addr: addr.to_string() });
    }

    async fn next(&mut self) -> LinkEvent {
        let event = tokio::time::timeout(PATIENCE, self.events.recv()).await;
        event.expect("an event comes in time").expect("links live")
    }

    /// The next message; links may come up meanwhile, but not go down.
    async fn message(&mut self) -> (PeerId, LinkId, Msg) {
        loop {
            match self.next().await {
                LinkEvent::Message { from, via, msg } => return (from, via, msg),
                LinkEvent::Up(_) => {}
                other => panic!("a message is expected, not {other:?}"),
            }
        }
    }

    /// Ends as a process does: its sockets close.
    fn die(self) {
        self.gate.abort();
    }
}

#[tokio::test]
async fn peers_of_one_job_talk_both_ways_on_one_link() {
    // FM-C1
    let (mut a, mut b) = (node(1).await, node(2).await);
    a.knows(2, b.addr);
    a.links.send(agent(2), Msg::Ping(1));
    assert!(matches!(b.next().await, LinkEvent::Up(p) if p == agent(1)));
    let (from, via, msg) = b.message().await;
    assert_eq!((from, msg), (agent(1), Msg::Ping(1)));
    // B does not know A's address: it answers on A's link.
    b.links.send_by(agent(1), Some(via), Msg::Pong(1));
    assert_eq!(a.message().await.2, Msg::Pong(1));
    assert!(a.links.stands(agent(2)) && b.links.stands(agent(1)));
}

#[tokio::test]
async fn long_messages_cross_in_many_pieces_and_in_order() {
    let (a, mut b) = (node(1).await, node(2).await);
    a.knows(2, b.addr);
    let long = "x".repeat(5_000_000);
    for text in [long.as_str(), "short", long.as_str()] {
        a.links.send(agent(2), Msg::Notice(Severity::Info, text.into()));
    }
    for text in [long.as_str(), "short", long.as_str()] {
        let (_, _, msg) = b.message().await;
        assert!(msg == Msg::Notice(Severity::Info, text.into()), "{} bytes differ", text.len());
    }
}

#[tokio::test]
async fn who_lacks_the_secret_or_is_of_another_job_is_not_let_in() {
    // FM-C1, FM-C4
    let mut b = node(2).await;
    for (job, secret) in [(1, 8), (2, 7)] {
        let mut a = node_of(who(agent(1), job, secret), Tuning::default()).await;
        a.knows(2, b.addr);
        a.links.send(agent(2), Msg::Ping(1));
        assert!(matches!(a.next().await, LinkEvent::Down(p) if p == agent(2)));
    }
    // Nothing of that reached B; the next thing it hears is the right peer.
    let c = node(3).await;
    c.knows(2, b.addr);
    c.links.send(agent(2), Msg::Ping(9));
    assert!(matches!(b.next().await, LinkEvent::Up(p) if p == agent(3)));
    assert_eq!(b.message().await.2, Msg::Ping(9));
}

#[tokio::test]
async fn somebody_else_at_a_dead_peers_address_is_not_taken_for_it() {
    let (mut a, b) = (node(1).await, node(2).await);
    a.knows(5, b.addr);
    a.links.send(agent(5), Msg::Ping(1));
    assert!(matches!(a.next().await, LinkEvent::Down(p) if p == agent(5)));
}

/// Reads to the end; true if the other side closed in time.
async fn is_closed(stream: &mut TcpStream, limit: Duration) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(limit, stream.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn strangers_bytes_are_dropped_and_harm_nobody() {
    // FM-F11
    let mut b = node(2).await;
    let mut seed = 1u64;
    let mut noise = |len: usize| -> Vec<u8> {
        let mut next = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as u8
        };
        (0..len).map(|_| next()).collect()
    };
    let (_, good) = Initiator::start(&who(agent(1), 1, 7), Role::Control).unwrap();
    let mut attacks = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        // The right preface, then a handshake that announces 64 KiB.
        [&good[..8], &[0xff, 0xff], &noise(100)].concat(),
        // A right beginning of another version.
        [&good[..4], &[9, 9], &good[6..]].concat(),
        // An unknown role.
        [&good[..6], &[7], &good[7..]].concat(),
        // Too short to be encrypted.
        [&good[..8], &[1, 0, 0]].concat(),
    ];
    attacks.extend((0..50).map(|i| noise(8 + i * 7)));
    attacks.extend((0..50).map(|i| [&good[..10], &noise(good.len() - 10 + i % 3)].concat()));
    for attack in attacks {
        let mut stream = TcpStream::connect(b.addr).await.unwrap();
        // It may be closed before all of it is written.
        let _ = stream.write_all(&attack).await;
        let _ = stream.shutdown().await;
        assert!(is_closed(&mut stream, PATIENCE).await, "{attack:?} holds a connection");
    }
    let a = node(1).await;
    a.knows(2, b.addr);
    a.links.send(agent(2), Msg::Ping(3));
    assert!(matches!(b.next().await, LinkEvent::Up(p) if p == agent(1)));
    assert_eq!(b.message().await.2, Msg::Ping(3));
}

#[tokio::test]
async fn half_open_connections_are_few_short_and_in_nobodys_way() {
    // FM-V1
    let tuning =
        Tuning { handshake: Duration::from_millis(500), handshakes_max: 4, ..Tuning::default() };
    let mut b = node_of(who(agent(2), 1, 7), tuning).await;
    let (_, good) = Initiator::start(&who(agent(9), 1, 7), Role::Control).unwrap();
    let mut slow = Vec::new();
    for i in 0..20 {
        let mut stream = TcpStream::connect(b.addr).await.unwrap();
        stream.write_all(&good[..i]).await.unwrap();
        slow.push(stream);
    }
    let a = node(1).await;
    a.knows(2, b.addr);
    a.links.send(agent(2), Msg::Ping(1));
    assert!(matches!(b.next().await, LinkEvent::Up(p) if p == agent(1)));
    assert_eq!(b.message().await.2, Msg::Ping(1));
    for mut stream in slow {
        assert!(is_closed(&mut stream, PATIENCE).await);
    }
}

#[tokio::test]
async fn a_recorded_handshake_sent_again_opens_nothing() {
    let mut b = node(2).await;
    for role in [Role::Control, Role::Data] {
        let (_, recorded) = Initiator::start(&who(agent(1), 1, 7), role).unwrap();
        for _ in 0..2 {
            let mut stream = TcpStream::connect(b.addr).await.unwrap();
            stream.write_all(&recorded).await.unwrap();
            let mut len = [0u8; 2];
            stream.read_exact(&mut len).await.unwrap();
            let mut answer = vec![0; usize::from(u16::from_le_bytes(len))];
            stream.read_exact(&mut answer).await.unwrap();
            // Without the keys there is no confirmation; anything else is refused.
            stream.write_all(&[16, 0]).await.unwrap();
            stream.write_all(&[0x5a; 16]).await.unwrap();
            assert!(is_closed(&mut stream, PATIENCE).await);
        }
    }
    assert!(b.data.try_recv().is_err() && b.events.try_recv().is_err());
}

#[tokio::test]
async fn death_is_told_once_and_a_successor_is_reached() {
    // FM-F2
    let (mut a, mut b) = (node(1).await, node(2).await);
    a.knows(2, b.addr);
    a.links.send(agent(2), Msg::Ping(1));
    assert!(matches!(b.next().await, LinkEvent::Up(_)));
    b.message().await;
    let dead = b.addr;
    b.die();
    assert!(matches!(a.next().await, LinkEvent::Up(_)));
    assert!(matches!(a.next().await, LinkEvent::Down(p) if p == agent(2)));
    // Refused at once: nobody listens there any more.
    a.knows(2, dead);
    a.links.send(agent(2), Msg::Ping(2));
    assert!(matches!(a.next().await, LinkEvent::Down(p) if p == agent(2)));
    let mut again = node(2).await;
    a.knows(2, again.addr);
    a.links.send(agent(2), Msg::Ping(3));
    assert_eq!(again.message().await.2, Msg::Ping(3));
    assert!(matches!(a.next().await, LinkEvent::Up(p) if p == agent(2)));
}

#[tokio::test]
async fn calls_that_cross_leave_both_sides_connected() {
    for round in 0..20 {
        let (mut a, mut b) = (node(1).await, node(2).await);
        a.knows(2, b.addr);
        b.knows(1, a.addr);
        for i in 0..10 {
            a.links.send(agent(2), Msg::Ping(i));
            b.links.send(agent(1), Msg::Ping(100 + i));
        }
        let mut heard: Vec<u64> = Vec::new();
        for node in [&mut b, &mut a] {
            for _ in 0..10 {
                let (_, _, Msg::Ping(n)) = node.message().await else { panic!("not a ping") };
                heard.push(n);
            }
        }
        heard.sort_unstable();
        let all: Vec<u64> = (0..10).chain(100..110).collect();
        assert_eq!(heard, all, "round {round}");
        // A while later both still stand, and nobody was told of a loss (`message` would panic).
        a.links.send(agent(2), Msg::Pong(1));
        b.links.send(agent(1), Msg::Pong(2));
        assert_eq!(b.message().await.2, Msg::Pong(1));
        assert_eq!(a.message().await.2, Msg::Pong(2));
    }
}

#[tokio::test]
async fn each_controller_hears_its_own_answer_and_the_newest_the_rest() {
    // FM-S11: an old runner must be told that it is fenced.
    let mut a = node(1).await;
    let mut controllers = Vec::new();
    let mut ways = Vec::new();
    for i in 0..2 {
        let controller = node_of(who(PeerId::Controller, 1, 7), Tuning::default()).await;
        controller.knows(1, a.addr);
        controller.links.send(agent(1), Msg::Ping(i));
        let (from, via, msg) = a.message().await;
        assert_eq!((from, msg), (PeerId::Controller, Msg::Ping(i)));
        ways.push(via);
        controllers.push(controller);
    }
    a.links.send_by(PeerId::Controller, Some(ways[0]), Msg::Pong(0));
    a.links.send_by(PeerId::Controller, Some(ways[1]), Msg::Pong(1));
    a.links.send(PeerId::Controller, Msg::Ping(7));
    assert_eq!(controllers[0].message().await.2, Msg::Pong(0));
    assert_eq!(controllers[1].message().await.2, Msg::Pong(1));
    assert_eq!(controllers[1].message().await.2, Msg::Ping(7));
    // The first leaves: the second is still there.
    controllers.remove(0).die();
    controllers[0].links.send(agent(1), Msg::Ping(8));
    assert_eq!(a.message().await.2, Msg::Ping(8));
    controllers.remove(0).die();
    assert!(matches!(a.next().await, LinkEvent::Down(PeerId::Controller)));
}

#[tokio::test]
async fn who_does_not_answer_is_silent_not_dead() {
    // FM-F5a: the kernel of a stopped process still accepts.
    let stopped = TcpListener::bind((LOCALHOST, 0)).await.unwrap();
    let tuning = Tuning { handshake: Duration::from_millis(200), ..Tuning::default() };
    let mut a = node_of(who(agent(1), 1, 7), tuning).await;
    a.knows(2, stopped.local_addr().unwrap());
    a.links.send(agent(2), Msg::Ping(1));
    assert!(matches!(a.next().await, LinkEvent::Silent(p) if p == agent(2)));
}

/// A peer with the secret that speaks as it likes.
async fn authenticated(b: &Node, me: PeerId) -> (TcpStream, Session) {
    let mut stream = TcpStream::connect(b.addr).await.unwrap();
    let session = initiate(&mut stream, &who(me, 1, 7), agent(2)).await.unwrap();
    (stream, session)
}

#[tokio::test]
async fn nonsense_on_an_authenticated_link_closes_it_and_is_no_death() {
    use stanchion_format::frame::{self, HEADER_BYTES};
    let mut b = node(2).await;
    let ping = envelope(agent(1), Msg::Ping(1)).unwrap();
    let lie = envelope(agent(3), Msg::Ping(1)).unwrap();
    // A header that is right in itself and announces more than is allowed.
    let mut oversize = frame::seal(8, &[]);
    oversize[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let crc = stanchion_format::checksum::crc64(&oversize[..HEADER_BYTES - 8]);
    oversize[HEADER_BYTES - 8..].copy_from_slice(&crc.0.to_le_bytes());
    let mut damaged = ping.to_vec();
    *damaged.last_mut().unwrap() ^= 1;
    let other_kind = frame::seal(1, &ping[HEADER_BYTES..]);
    for bytes in [&lie[..], &oversize, &damaged, &other_kind, &[0u8; 100]] {
        let (mut stream, mut session) = authenticated(&b, agent(1)).await;
        let mut sealed = Vec::new();
        session.sealer.seal(&ping, &mut sealed).unwrap();
        session.sealer.seal(bytes, &mut sealed).unwrap();
        stream.write_all(&sealed).await.unwrap();
        assert!(matches!(b.next().await, LinkEvent::Up(p) if p == agent(1)));
        assert_eq!(b.message().await.2, Msg::Ping(1));
        assert!(matches!(b.next().await, LinkEvent::Silent(p) if p == agent(1)));
        assert!(is_closed(&mut stream, PATIENCE).await);
    }
    // A bit that changes on the way is found by the cipher.
    let (mut stream, mut session) = authenticated(&b, agent(1)).await;
    let mut sealed = Vec::new();
    session.sealer.seal(&ping, &mut sealed).unwrap();
    *sealed.last_mut().unwrap() ^= 1;
    stream.write_all(&sealed).await.unwrap();
    assert!(matches!(b.next().await, LinkEvent::Up(_)));
    assert!(matches!(b.next().await, LinkEvent::Silent(_)));
}

#[tokio::test]
async fn closing_sends_what_was_said_first() {
    let (mut a, mut b) = (node(1).await, node(2).await);
    a.knows(2, b.addr);
    a.links.send(agent(2), Msg::Ping(0));
    b.message().await;
    // Unread bytes in A's socket would reset the connection and take A's last words with it.
    for i in 0..100 {
        b.links.send(agent(1), Msg::Ping(i));
        a.links.send(agent(2), Msg::Pong(i));
    }
    let hearing = tokio::spawn(async move {
        for i in 0..100 {
            assert_eq!(b.message().await.2, Msg::Pong(i));
        }
        assert!(matches!(b.next().await, LinkEvent::Down(_)));
    });
    a.links.close(&mut a.events, PATIENCE).await;
    hearing.await.unwrap();
}

#[test]
fn a_full_queue_drops_its_oldest() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let queue = Queue::default();
        for i in 0..QUEUE_MESSAGES_MAX + 10 {
            queue.push(Arc::from(i.to_le_bytes()));
        }
        assert_eq!(&*queue.next().await.unwrap(), 10usize.to_le_bytes());
        queue.clear();
        // One that exceeds the limit alone is kept, with nothing else.
        queue.push(Arc::from([1u8]));
        queue.push(Arc::from(vec![0u8; QUEUE_BYTES_MAX + 1]));
        queue.close();
        assert_eq!(queue.next().await.map(|f| f.len()), Some(QUEUE_BYTES_MAX + 1));
        assert_eq!(queue.next().await, None);
    });
}

#[test]
fn encrypted_data_connections_carry_what_was_written() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let secret = Arc::new(Secret::new([7; 32]));
    let with =
        |me| Arc::new(Credentials { me, job: JobId(1), secret: secret.clone(), encrypt: true });
    let mut b = runtime.block_on(node_of(with(agent(2)), Tuning::default()));
    let (addr, a) = (b.addr, with(agent(1)));
    let bytes: Vec<u8> = (0..1_000_000u32).map(|i| (i * 7) as u8).collect();
    let sent = bytes.clone();
    let caller = std::thread::spawn(move || {
        let mut tcp = std::net::TcpStream::connect(addr).unwrap();
        let session = initiate_data(&mut tcp, &a, agent(2)).unwrap();
        let mut stream = DataStream::new(tcp, session, true);
        stream.write_all(&sent).unwrap();
        let mut echo = vec![0; sent.len()];
        stream.read_exact(&mut echo).unwrap();
        assert!(echo == sent);
    });
    let mut conn = runtime.block_on(b.data.recv()).unwrap();
    assert_eq!(conn.peer, agent(1));
    let mut got = vec![0; bytes.len()];
    conn.stream.read_exact(&mut got).unwrap();
    assert!(got == bytes);
    conn.stream.write_all(&got).unwrap();
    caller.join().unwrap();
    // One side encrypts, the other does not: no connection. The next one that comes is right again.
    let right = with(agent(4));
    let callers = std::thread::spawn(move || {
        let mut tcp = std::net::TcpStream::connect(addr).unwrap();
        assert!(initiate_data(&mut tcp, &who(agent(3), 1, 7), agent(2)).is_err());
        let mut tcp = std::net::TcpStream::connect(addr).unwrap();
        assert!(initiate_data(&mut tcp, &right, agent(2)).is_ok());
    });
    assert_eq!(runtime.block_on(b.data.recv()).unwrap().peer, agent(4));
    callers.join().unwrap();
}
