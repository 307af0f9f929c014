use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;

use stanchion_core::api::ChunkSource;
use stanchion_core::bugs::Bugs;
use stanchion_core::stripe::{Term, lost_terms, parity_terms};
use stanchion_format::checksum::Crc;
use stanchion_format::data::Piece;
use stanchion_format::ids::{DatasetNo, Incarnation, JobId, RankId, SlotId, StripeId};
use stanchion_format::index::cache_rank_dir;
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::FileDecl;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::link::{Gate, Links, Tuning, initiate_data};
use crate::secret::Secret;

/// Nothing here takes longer, however loaded the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
const CHUNK: u32 = 4096;

fn key() -> Key {
    Key { no: DatasetNo(3), inc: Incarnation::default() }
}

fn who(me: u32, encrypt: bool) -> Arc<Credentials> {
    let secret = Arc::new(Secret::new([7; 32]));
    Arc::new(Credentials { me: PeerId::Agent(AgentId(me)), job: JobId(1), secret, encrypt })
}

/// An agent without a control thread.
struct Node {
    id: AgentId,
    bulk: Bulk,
    done: UnboundedReceiver<Done>,
    cache: Arc<Cache>,
    addr: SocketAddr,
    gate: tokio::task::AbortHandle,
    tasks: AtomicUsize,
    _dir: tempfile::TempDir,
}

impl Node {
    async fn new(id: u32, encrypt: bool) -> Node {
        // Some in memory, from where chunks go out uncopied; others on whatever has the temporary files.
        let memory = id % 2 == 1;
        let dir = if memory { tempfile::tempdir_in("/dev/shm") } else { tempfile::tempdir() };
        let dir = dir.unwrap();
        let cache = Arc::new(Cache::open(&dir.path().join("cache"), u64::MAX).unwrap());
        let who = who(id, encrypt);
        let (to, done) = mpsc::unbounded_channel();
        let config = BulkConfig {
            me: AgentId(id),
            cache: cache.clone(),
            prefix: dir.path().join("prefix"),
            who: who.clone(),
            io_threads: 2,
            durable: false,
            connect: Duration::from_secs(5),
            stall: PATIENCE,
        };
        let bulk = Bulk::start(config, to).unwrap();
        let gate = Gate::listen(IpAddr::V4(Ipv4Addr::LOCALHOST)).await.unwrap();
        let addr = gate.address();
        let (links, _) = Links::new(who.clone(), Tuning::default());
        let run = gate.run(who, Tuning::default(), links, bulk.server());
        let gate = tokio::spawn(run).abort_handle();
        let tasks = AtomicUsize::new(0);
        Node { id: AgentId(id), bulk, done, cache, addr, gate, tasks, _dir: dir }
    }

    fn start(&self, work: Work) -> TaskId {
        let task = TaskId(self.tasks.fetch_add(1, Ordering::Relaxed) as u64);
        self.bulk.run(task, work, None);
        task
    }

    async fn finish(&mut self, task: TaskId) -> TaskResult {
        let done = tokio::time::timeout(PATIENCE, self.done.recv()).await;
        let done = done.expect("a task ends in time").expect("threads live");
        assert_eq!(done.task, task);
        assert!(self.bulk.is_current(&done));
        done.result
    }

    async fn run(&mut self, work: Work) -> TaskResult {
        let task = self.start(work);
        self.finish(task).await
    }

    fn path(&self, slot: SlotId, rank: RankId, path: &str) -> PathBuf {
        let root = self.cache.root().to_str().unwrap();
        PathBuf::from(cache_rank_dir(root, key(), slot, rank)).join(path)
    }

    fn address(&self) -> AgentAddr {
        AgentAddr { id: self.id, addr: self.addr.to_string() }
    }
}

/// A redundancy set whose slot `i` is on agent `i`, one rank each; the last agent is a spare.
struct Cluster {
    nodes: Vec<Node>,
    sets: Sets,
    manifests: Vec<Arc<Manifest>>,
    contents: Vec<Vec<(String, Vec<u8>)>>,
    lost: Vec<SlotId>,
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + i / 251) ^ (seed * 97)) as u8).collect()
}

impl Cluster {
    /// `sizes[i]`: of the files of slot `i`.
    async fn new(scheme: Scheme, encrypt: bool, sizes: &[&[usize]]) -> Cluster {
        let mut nodes = Vec::new();
        for id in 0..=sizes.len() {
            nodes.push(Node::new(id as u32, encrypt).await);
        }
        let addresses: Vec<AgentAddr> = nodes.iter().map(Node::address).collect();
        nodes.iter().for_each(|n| n.bulk.set_addresses(&addresses));
        let sets = Sets::new(scheme, sizes.len() as u32, 8);
        let (manifests, contents, lost) = (Vec::new(), Vec::new(), vec![SlotId(0)]);
        let mut cluster = Cluster { nodes, sets, manifests, contents, lost };
        for (i, sizes) in sizes.iter().enumerate() {
            cluster.write(i, sizes).await;
        }
        cluster
    }

    async fn write(&mut self, i: usize, sizes: &[usize]) {
        let (slot, rank) = (SlotId(i as u32), RankId(i as u32));
        let node = &mut self.nodes[i];
        let made = node.run(Work::MakeDirs { key: key(), slot, ranks: vec![rank] }).await;
        assert!(matches!(made, TaskResult::Done(_)), "{made:?}");
        let mut contents = Vec::new();
        let mut files = Vec::new();
        for (n, size) in sizes.iter().enumerate() {
            let (path, content) = (format!("d{n}/f"), bytes(i * 10 + n, *size));
            let place = node.path(slot, rank, &path);
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            std::fs::write(place, &content).unwrap();
            files.push(FileDecl { rank, path: path.clone(), bytes: *size as u64 });
            contents.push((path, content));
        }
        let stat = node.run(Work::Stat { key: key(), slot, files: files.clone() }).await;
        assert!(matches!(stat, TaskResult::Done(_)), "{stat:?}");
        let digest = Work::Digest { key: key(), slot, chunk_bytes: CHUNK, files };
        let TaskResult::Digested(manifest, _) = node.run(digest).await else { panic!("no digest") };
        let manifest = Arc::new(*manifest);
        node.bulk.publish(manifest.clone());
        self.manifests.push(manifest);
        self.contents.push(contents);
    }

    fn chunks(&self, slot: SlotId) -> u64 {
        self.manifests[slot.0 as usize].chunk_count()
    }

    fn source(&self, slot: SlotId, chunk: u64) -> ChunkSource {
        let at = self.manifests[slot.0 as usize].chunk(chunk).unwrap();
        let agent = AgentId(slot.0);
        let crc = Some(at.crc);
        ChunkSource { slot, agent, piece: Piece::Data(chunk), len: at.len, crc, factor: 1 }
    }

    fn sources(&self, terms: Vec<Term>, len: u32) -> Vec<ChunkSource> {
        let source = |Term { slot, piece, factor }| match piece {
            Piece::Data(chunk) => ChunkSource { factor, ..self.source(slot, chunk) },
            Piece::Parity(_) => {
                let agent = AgentId(slot.0);
                ChunkSource { slot, agent, piece, len, crc: None, factor }
            }
        };
        terms.into_iter().map(source).collect()
    }

    fn stripe_len(&self, slot: SlotId, stripe: StripeId) -> u32 {
        let parts = self.sets.parts(slot, stripe, |s| self.chunks(s));
        parts.iter().map(|p| self.source(p.slot, p.chunk).len).max().unwrap()
    }

    fn encode_work(&self, slot: SlotId, stripe: StripeId) -> Work {
        let chunks = |s| self.chunks(s);
        let terms = parity_terms(&self.sets, slot, stripe, chunks, Bugs::default());
        let len = self.stripe_len(slot, stripe);
        let sources = self.sources(terms, len);
        let index = self.sets.parity_index(slot, stripe);
        Work::Encode { key: key(), slot, stripe, index, len, chunk_bytes: CHUNK, sources }
    }

    async fn encode_all(&mut self) {
        for i in 0..self.manifests.len() {
            let slot = SlotId(i as u32);
            for stripe in self.sets.held(slot, |s| self.chunks(s)) {
                let work = self.encode_work(slot, stripe);
                let done = self.nodes[i].run(work).await;
                assert!(matches!(done, TaskResult::Done(_)), "{done:?}");
            }
        }
    }

    fn rebuild_work(&self, slot: SlotId, chunk: u64) -> Work {
        let stripe = self.sets.stripe_of(slot, chunk).unwrap();
        let usable = |s: SlotId, _| !self.lost.contains(&s);
        let chunks = |s| self.chunks(s);
        let terms = lost_terms(&self.sets, (slot, chunk), chunks, usable, 0, Bugs::default());
        let sources = self.sources(terms.unwrap(), self.stripe_len(slot, stripe));
        Work::Rebuild { manifest: self.manifests[slot.0 as usize].clone(), chunk, sources }
    }

    /// Rebuilds a slot on the spare and compares it byte for byte.
    async fn rebuild_on_spare(&mut self, lost: SlotId) {
        let manifest = self.manifests[lost.0 as usize].clone();
        let spare = self.nodes.len() - 1;
        let verify = Work::Verify(manifest.clone());
        let TaskResult::Verified { bad, .. } = self.nodes[spare].run(verify.clone()).await else {
            panic!("not verified")
        };
        assert_eq!(bad, (0..manifest.chunk_count()).collect::<Vec<_>>());
        for chunk in bad {
            let work = self.rebuild_work(lost, chunk);
            let done = self.nodes[spare].run(work).await;
            assert!(matches!(done, TaskResult::Done(_)), "{done:?}");
        }
        let TaskResult::Verified { bad, bad_files } = self.nodes[spare].run(verify).await else {
            panic!("not verified")
        };
        assert!(bad.is_empty() && bad_files.is_empty());
        for (path, content) in &self.contents[lost.0 as usize] {
            let rebuilt = self.nodes[spare].path(lost, RankId(lost.0), path);
            assert!(std::fs::read(rebuilt).unwrap() == *content, "{path} of slot {lost} differs");
        }
    }
}

const SIZES: &[&[usize]] =
    &[&[CHUNK as usize * 5 + 17, 0, 1], &[CHUNK as usize * 2], &[100, CHUNK as usize * 7 - 1]];

#[tokio::test]
async fn what_is_lost_is_rebuilt_byte_for_byte() {
    // FM-L2, FM-S8
    let two = Scheme::Rs { parities: 2 };
    let cases: [(_, _, &[u32]); 6] = [
        (Scheme::Xor, false, &[0]),
        (Scheme::Partner, false, &[0]),
        (Scheme::Xor, true, &[0]),
        (two, false, &[0, 1]),
        (two, false, &[0, 2]),
        (two, true, &[2, 1]),
    ];
    for (scheme, encrypt, lost) in cases {
        let mut c = Cluster::new(scheme, encrypt, SIZES).await;
        c.encode_all().await;
        // Slot 0 has chunks in every kind of stripe; the agents and their caches are gone.
        c.lost = lost.iter().copied().map(SlotId).collect();
        for slot in lost {
            let node = &mut c.nodes[*slot as usize];
            node.gate.abort();
            assert!(node.bulk.stop(PATIENCE));
            node.cache.remove_all();
        }
        for slot in lost {
            c.rebuild_on_spare(SlotId(*slot)).await;
        }
    }
}

fn failed(result: TaskResult) -> (Cause, Option<usize>) {
    match result {
        TaskResult::Failed { trouble, source } => (trouble.cause, source),
        other => panic!("it should have failed: {other:?}"),
    }
}

/// A stripe that slot 0 holds, and its work.
fn stripe_of_slot_0(c: &Cluster) -> (u64, Work) {
    let stripe = c.sets.held(SlotId(0), |s| c.chunks(s))[0];
    (c.sets.parity_index(SlotId(0), stripe), c.encode_work(SlotId(0), stripe))
}

fn no_parity(c: &Cluster, index: u64) {
    let read = c.nodes[0].cache.read_parity(key(), SlotId(0), index, CHUNK, CHUNK, &mut Vec::new());
    assert_eq!(read.unwrap_err().cause, Cause::Missing);
}

#[tokio::test]
async fn a_source_that_is_not_what_it_should_be_is_named_and_nothing_is_stored() {
    // FM-F9, FM-S5
    let mut c = Cluster::new(Scheme::Xor, false, SIZES).await;
    let (index, work) = stripe_of_slot_0(&c);
    let Work::Encode { sources, .. } = &work else { panic!() };
    let (at, source) = (1, sources[1]);
    let Piece::Data(chunk) = source.piece else { panic!() };
    let manifest = &c.manifests[source.slot.0 as usize];
    let place = manifest.chunk(chunk).unwrap();
    let entry = &manifest.files[place.file];
    let path = c.nodes[source.slot.0 as usize].path(source.slot, entry.rank, &entry.path);
    let good = std::fs::read(&path).unwrap();

    let mut flipped = good.clone();
    flipped[place.offset as usize] ^= 0x10;
    std::fs::write(&path, &flipped).unwrap();
    assert_eq!(failed(c.nodes[0].run(work.clone()).await), (Cause::Damaged, Some(at)));
    no_parity(&c, index);
    std::fs::write(&path, &good[..place.offset as usize]).unwrap();
    assert_eq!(failed(c.nodes[0].run(work.clone()).await), (Cause::Missing, Some(at)));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(failed(c.nodes[0].run(work.clone()).await), (Cause::Missing, Some(at)));
    no_parity(&c, index);
    std::fs::write(&path, &good).unwrap();
    assert!(matches!(c.nodes[0].run(work.clone()).await, TaskResult::Done(_)));
    // Withdrawn: no longer vouched for.
    c.nodes[source.slot.0 as usize].bulk.evict(&[key()]);
    assert_eq!(failed(c.nodes[0].run(work.clone()).await), (Cause::Missing, Some(at)));
    // Gone altogether.
    c.nodes[source.slot.0 as usize].gate.abort();
    assert!(c.nodes[source.slot.0 as usize].bulk.stop(PATIENCE));
    assert_eq!(failed(c.nodes[0].run(work).await), (Cause::Unreachable, Some(at)));
}

#[tokio::test]
async fn parity_that_is_not_the_parity_is_named_and_nothing_is_written() {
    // FM-S8: one of another dataset would be right in itself.
    let mut c = Cluster::new(Scheme::Xor, false, SIZES).await;
    c.encode_all().await;
    let work = c.rebuild_work(SlotId(0), 0);
    let Work::Rebuild { sources, .. } = &work else { panic!() };
    let (at, parity) = (sources.len() - 1, *sources.last().unwrap());
    let Piece::Parity(index) = parity.piece else { panic!() };
    let holder = &c.nodes[parity.slot.0 as usize].cache;
    let mut sum = Vec::new();
    holder.read_parity(key(), parity.slot, index, CHUNK, CHUNK, &mut sum).unwrap();
    sum[5] ^= 1;
    holder.write_parity(key(), parity.slot, index, CHUNK, &sum).unwrap();
    let spare = c.nodes.last_mut().unwrap();
    assert_eq!(failed(spare.run(work).await), (Cause::Damaged, Some(at)));
    let path = &c.contents[0][0].0;
    assert!(!c.nodes.last().unwrap().path(SlotId(0), RankId(0), path).exists());
}

#[tokio::test]
async fn work_on_files_fails_as_work() {
    let mut c = Cluster::new(Scheme::Xor, false, SIZES).await;
    let files = vec![FileDecl { rank: RankId(0), path: "d0/f".into(), bytes: 1 }];
    let slot = SlotId(0);
    let (cause, source) = failed(c.nodes[0].run(Work::Stat { key: key(), slot, files }).await);
    assert!(matches!(cause, Cause::Size { want: 1, .. }) && source.is_none(), "{cause:?}");
    // A chunk that does not exist must cost the task, not the thread.
    let manifest = c.manifests[0].clone();
    let work = Work::Rebuild { manifest, chunk: 999, sources: Vec::new() };
    assert_eq!(failed(c.nodes[0].run(work).await), (Cause::Malformed, None));
    let stripe = StripeId(0);
    for _ in 0..20 {
        // Sources that are longer than a place: more than a parity file takes.
        let sources = vec![ChunkSource { len: CHUNK * 2, ..c.source(slot, 0) }];
        let (index, len) = (0, CHUNK * 2);
        let work =
            Work::Encode { key: key(), slot, stripe, index, len, chunk_bytes: CHUNK, sources };
        failed(c.nodes[0].run(work).await);
    }
}

/// Lets connections in and never serves them.
async fn stalled(id: u32) -> (SocketAddr, mpsc::UnboundedReceiver<DataConn>) {
    let gate = Gate::listen(IpAddr::V4(Ipv4Addr::LOCALHOST)).await.unwrap();
    let addr = gate.address();
    let (links, _) = Links::new(who(id, false), Tuning::default());
    let (to, conns) = mpsc::unbounded_channel();
    tokio::spawn(gate.run(who(id, false), Tuning::default(), links, move |conn| {
        let _ = to.send(conn);
    }));
    (addr, conns)
}

#[tokio::test]
async fn cancelled_tasks_end_soon_and_say_nothing() {
    let mut c = Cluster::new(Scheme::Xor, false, SIZES).await;
    let (index, work) = stripe_of_slot_0(&c);
    let (addr, mut conns) = stalled(1).await;
    let mut addresses: Vec<AgentAddr> = c.nodes.iter().map(Node::address).collect();
    addresses[1].addr = addr.to_string();
    c.nodes[0].bulk.set_addresses(&addresses);
    c.nodes[0].start(work.clone());
    // It waits for a chunk that never comes, and would for `PATIENCE`.
    let conn = tokio::time::timeout(PATIENCE, conns.recv()).await.unwrap().unwrap();
    let waited = Instant::now();
    c.nodes[0].bulk.cancel_all();
    addresses[1].addr = c.nodes[1].addr.to_string();
    c.nodes[0].bulk.set_addresses(&addresses);
    // The next one is of the same dataset: it starts when the first is gone, and it alone is told of.
    let done = c.nodes[0].run(work).await;
    assert!(matches!(done, TaskResult::Done(_)), "{done:?}");
    assert!(waited.elapsed() < PATIENCE / 2);
    assert!(c.nodes[0].done.try_recv().is_err());
    let mut parity = Vec::new();
    c.nodes[0].cache.read_parity(key(), SlotId(0), index, CHUNK, CHUNK, &mut parity).unwrap();
    drop(conn);
}

/// Between two agents, to cut what stands.
fn proxy(to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<TcpStream>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let open: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let opened = open.clone();
    std::thread::spawn(move || {
        for inward in listener.incoming() {
            let (inward, outward) = (inward.unwrap(), TcpStream::connect(to).unwrap());
            opened.lock().unwrap().push(inward.try_clone().unwrap());
            for (mut a, mut b) in
                [(inward.try_clone().unwrap(), outward.try_clone().unwrap()), (outward, inward)]
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut a, &mut b);
                    let _ = b.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    (addr, open)
}

#[tokio::test]
async fn connections_are_kept_and_made_anew_when_they_broke() {
    let mut c = Cluster::new(Scheme::Partner, false, SIZES).await;
    let (addr, open) = proxy(c.nodes[2].addr);
    let mut addresses: Vec<AgentAddr> = c.nodes.iter().map(Node::address).collect();
    addresses[2].addr = addr.to_string();
    c.nodes[0].bulk.set_addresses(&addresses);
    let stripes = c.sets.held(SlotId(0), |s| c.chunks(s));
    for stripe in &stripes {
        let work = c.encode_work(SlotId(0), *stripe);
        assert!(matches!(c.nodes[0].run(work).await, TaskResult::Done(_)));
    }
    assert_eq!(open.lock().unwrap().len(), 1, "one connection serves all, one after the other");
    open.lock().unwrap()[0].shutdown(std::net::Shutdown::Both).unwrap();
    let work = c.encode_work(SlotId(0), stripes[0]);
    assert!(matches!(c.nodes[0].run(work).await, TaskResult::Done(_)));
    assert_eq!(open.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn evicted_datasets_are_gone_and_can_come_back() {
    let mut c = Cluster::new(Scheme::Xor, false, SIZES).await;
    let path = c.nodes[1].path(SlotId(1), RankId(1), "d0/f");
    assert!(path.exists());
    c.nodes[1].bulk.evict(&[key()]);
    let ranks = vec![RankId(1)];
    // Comes after the eviction, whichever thread is faster.
    let made = c.nodes[1].run(Work::MakeDirs { key: key(), slot: SlotId(1), ranks }).await;
    assert!(matches!(made, TaskResult::Done(_)));
    assert!(!path.exists());
    assert!(path.parent().unwrap().parent().unwrap().exists());
}

#[tokio::test]
async fn nonsense_on_an_authenticated_data_connection_closes_it() {
    // FM-F11
    use stanchion_format::data::{ChunkRequest, KIND_CHUNK_REQUEST};
    use stanchion_format::frame;
    let c = Cluster::new(Scheme::Xor, false, SIZES).await;
    let (addr, slot) = (c.nodes[1].addr, SlotId(1));
    let request = |piece| {
        let request = ChunkRequest { key: key(), slot, piece };
        frame::encode(KIND_CHUNK_REQUEST, &request, 256).unwrap()
    };
    let good = request(Piece::Data(0));
    let want = c.manifests[1].chunk(0).unwrap().crc;
    // What does not exist is `Missing`, and the connection lives on.
    let absent = [Piece::Data(u64::MAX), Piece::Parity(u64::MAX), Piece::Parity(1)].map(request);
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let nonsense = [damaged, frame::seal(16, &[0; 300]), frame::seal(8, &good[32..]), vec![9; 64]];
    let check = move || {
        use stanchion_format::data::ChunkAnswer;
        for bad in nonsense {
            let mut tcp = TcpStream::connect(addr).unwrap();
            tcp.set_read_timeout(Some(PATIENCE)).unwrap();
            initiate_data(&mut tcp, &who(0, false), PeerId::Agent(AgentId(1))).unwrap();
            for request in &absent {
                tcp.write_all(request).unwrap();
                assert_eq!(
                    frame::read::<ChunkAnswer>(&mut tcp, 256).unwrap(),
                    ChunkAnswer::Missing
                );
            }
            tcp.write_all(&good).unwrap();
            let answer: ChunkAnswer = frame::read(&mut tcp, 256).unwrap();
            let ChunkAnswer::Bytes { len, crc } = answer else { panic!("{answer:?}") };
            let mut bytes = vec![0; len as usize];
            tcp.read_exact(&mut bytes).unwrap();
            assert!(crc == want && stanchion_format::checksum::crc64(&bytes) == Crc(want.0));
            tcp.write_all(&bad).unwrap();
            let mut rest = Vec::new();
            // A reset is an end too.
            let _ = tcp.read_to_end(&mut rest);
            assert!(rest.is_empty());
        }
    };
    tokio::task::spawn_blocking(check).await.unwrap();
}
