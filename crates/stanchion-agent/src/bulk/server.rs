//! Giving chunks to other agents: a thread for each data connection, at lowered priority.
//!
//! A connection is idle most of its life and then moves megabytes; a thread may wait in both without
//! holding up another connection, even if its peer was stopped in mid-transfer. Their number is bounded:
//! of more, the one that is idle longest is closed, and its owner calls again when it needs one.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use stanchion_format::data::{ChunkAnswer, ChunkRequest, KIND_CHUNK, KIND_CHUNK_REQUEST, Piece};
use stanchion_format::frame::{self, HEADER_BYTES, Header};
use stanchion_format::ids::{Key, PeerId, SlotId};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::cache::{Cache, OpenPiece};
use tracing::{debug, warn};

use super::client::{FRAME_BYTES_MAX, Patience, SLICE, read_full};
use super::lower_priority;
use crate::link::{DataConn, DataStream};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 512;
/// A connection that asks for nothing is closed after so long.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Its buffer is freed after so long.
const IDLE_BUFFER: Duration = Duration::from_secs(2);
/// A chunk goes out in pieces of so many bytes.
const PIECE_BYTES: usize = 256 << 10;
/// Stack of a serving thread, bytes; its buffer is on the heap.
const STACK_BYTES: usize = 256 << 10;

/// Which manifests vouch for what is in the cache.
#[derive(Default)]
pub(super) struct Published(RwLock<HashMap<(Key, SlotId), Arc<Manifest>>>);

impl Published {
    pub fn add(&self, manifest: Arc<Manifest>) {
        let mut map = self.0.write().expect("no thread panics while it holds this");
        map.insert((manifest.key, manifest.slot), manifest);
    }

    pub fn remove(&self, keys: &[Key]) {
        let mut map = self.0.write().expect("no thread panics while it holds this");
        map.retain(|(key, _), _| !keys.contains(key));
    }

    /// A piece that is vouched for, to be read bit by bit.
    pub fn open(
        &self,
        cache: &Cache,
        (key, slot, piece): (Key, SlotId, Piece),
    ) -> Result<OpenPiece, Trouble> {
        let manifest = self.manifest(key, slot)?;
        match piece {
            Piece::Data(chunk) => cache.open_chunk(&manifest, chunk),
            Piece::Parity(index) => {
                let size = manifest.chunk_bytes;
                cache.open_parity(key, slot, index, size, size)
            }
        }
    }

    fn manifest(&self, key: Key, slot: SlotId) -> Result<Arc<Manifest>, Trouble> {
        let map = self.0.read().expect("no thread panics while it holds this");
        let found = map.get(&(key, slot)).cloned();
        found.ok_or_else(|| Trouble::new(Cause::Missing).slot(slot))
    }
}

/// The data side of this agent.
pub(super) struct Server {
    cache: Arc<Cache>,
    published: Arc<Published>,
    stall: Duration,
    stopping: AtomicBool,
    table: Mutex<Table>,
    ended: Condvar,
}

#[derive(Default)]
struct Table {
    conns: HashMap<u64, Seat>,
    next: u64,
}

struct Seat {
    socket: TcpStream,
    /// `None` while it serves a request.
    idle_since: Option<Instant>,
}

impl Server {
    pub fn new(cache: Arc<Cache>, published: Arc<Published>, stall: Duration) -> Server {
        Server {
            cache,
            published,
            stall,
            stopping: AtomicBool::new(false),
            table: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics while it holds the table")
    }

    /// Serves a connection on a thread of its own.
    pub fn serve(self: &Arc<Self>, conn: DataConn) {
        let DataConn { peer, stream } = conn;
        let Some(id) = self.seat(&stream) else {
            warn!(?peer, "a data connection is refused: {CONNECTIONS_MAX} are busy");
            return;
        };
        let server = self.clone();
        let thread = thread::Builder::new().name("stn-serve".into()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            lower_priority();
            let why = server.connection(id, peer, stream);
            debug!(?peer, ?why, "a data connection ends");
            server.table().conns.remove(&id);
            server.ended.notify_all();
        });
        if let Err(error) = spawned {
            warn!(%error, "no thread for a data connection");
            self.table().conns.remove(&id);
        }
    }

    fn seat(&self, stream: &DataStream) -> Option<u64> {
        let socket = stream.socket().try_clone().ok()?;
        socket.set_read_timeout(Some(SLICE)).ok()?;
        socket.set_write_timeout(Some(self.stall)).ok()?;
        let mut table = self.table();
        if self.stopping.load(Ordering::Relaxed) {
            return None;
        }
        if table.conns.len() >= CONNECTIONS_MAX {
            let idle = table.conns.iter().filter_map(|(id, s)| Some((s.idle_since?, *id)));
            let (_, longest) = idle.min()?;
            let seat = table.conns.remove(&longest)?;
            let _ = seat.socket.shutdown(Shutdown::Both);
        }
        table.next += 1;
        let id = table.next;
        table.conns.insert(id, Seat { socket, idle_since: Some(Instant::now()) });
        Some(id)
    }

    /// Closes all connections and waits until their threads are gone, until `deadline`.
    pub fn stop(&self, deadline: Instant) -> bool {
        self.stopping.store(true, Ordering::Relaxed);
        let mut table = self.table();
        for seat in table.conns.values() {
            let _ = seat.socket.shutdown(Shutdown::Both);
        }
        while !table.conns.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.ended.wait_timeout(table, left);
            table = waited.expect("no thread panics while it holds the table").0;
        }
        true
    }

    fn mark(&self, id: u64, idle_since: Option<Instant>) {
        if let Some(seat) = self.table().conns.get_mut(&id) {
            seat.idle_since = idle_since;
        }
    }

    fn connection(&self, id: u64, peer: PeerId, mut stream: DataStream) -> io::Result<()> {
        let mut buf = Vec::new();
        loop {
            self.mark(id, Some(Instant::now()));
            let Some(request) = self.receive(&mut stream, &mut buf)? else { return Ok(()) };
            self.mark(id, None);
            self.answer(peer, request, &mut stream, &mut buf)?;
        }
    }

    /// The next request; `None` when the peer hung up or asked for nothing for long.
    fn receive(
        &self,
        stream: &mut DataStream,
        buf: &mut Vec<u8>,
    ) -> io::Result<Option<ChunkRequest>> {
        let stopping = || self.stopping.load(Ordering::Relaxed);
        let mut header = [0u8; HEADER_BYTES];
        let mut patience = Patience { stall: IDLE_BUFFER, cancelled: &stopping };
        let mut first = read_full(stream, &mut header[..1], patience);
        if first.as_ref().is_err_and(crate::link::is_timeout) {
            *buf = Vec::new();
            patience.stall = IDLE_MAX;
            first = read_full(stream, &mut header[..1], patience);
        }
        match first {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(e) if crate::link::is_timeout(&e) => return Ok(None),
            other => other?,
        }
        patience.stall = self.stall;
        read_full(stream, &mut header[1..], patience)?;
        let malformed = |_| io::Error::from(io::ErrorKind::InvalidData);
        let header = Header::parse(&header, FRAME_BYTES_MAX).map_err(malformed)?;
        let mut body = vec![0u8; header.body_bytes()];
        read_full(stream, &mut body, patience)?;
        header.check(&body).map_err(malformed)?;
        if header.kind() != KIND_CHUNK_REQUEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        frame::decode(&body).map(Some).map_err(malformed)
    }

    fn answer(
        &self,
        peer: PeerId,
        request: ChunkRequest,
        stream: &mut DataStream,
        buf: &mut Vec<u8>,
    ) -> io::Result<()> {
        let ChunkRequest { key, slot, piece } = request;
        let answer = match self.open(key, slot, piece, buf) {
            Ok(open) => return give(&open, stream, buf),
            Err(Trouble { cause: Cause::Missing | Cause::Size { .. }, .. }) => ChunkAnswer::Missing,
            Err(Trouble { cause: Cause::Os(errno), .. }) => ChunkAnswer::Failed(errno),
            Err(_) => ChunkAnswer::Failed(rustix::io::Errno::IO.raw_os_error()),
        };
        debug!(?peer, %key, slot = slot.0, ?piece, ?answer, "a chunk is not given");
        head(stream, &answer)
    }

    /// What is to be given bit by bit: what fails in reading it must be known before the first one goes.
    fn open(
        &self,
        key: Key,
        slot: SlotId,
        piece: Piece,
        buf: &mut Vec<u8>,
    ) -> Result<OpenPiece, Trouble> {
        let open = self.published.open(&self.cache, (key, slot, piece))?;
        if !open.steady {
            let len = open.len as usize;
            let read = stanchion_io::fs::checksum(&*open.file, buf, open.offset, len);
            let (have, _) = read.map_err(|e| Trouble::new(stanchion_io::trouble::cause(e)))?;
            if have < len {
                return Err(Trouble::new(Cause::Missing).slot(slot));
            }
        }
        Ok(open)
    }
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn head(stream: &mut DataStream, answer: &ChunkAnswer) -> io::Result<()> {
    let frame = frame::encode(KIND_CHUNK, answer, FRAME_BYTES_MAX).map_err(|_| invalid())?;
    stream.write_all(&frame)
}

/// Gives a chunk bit by bit: a connection needs no memory for a whole one, however many there are; and where it is in
/// memory and goes out as it is, it is not even copied. The checksum is what it must be; who asks compares the bytes with
/// it himself.
fn give(open: &OpenPiece, stream: &mut DataStream, buf: &mut Vec<u8>) -> io::Result<()> {
    let OpenPiece { file, offset, len, crc, steady } = open;
    head(stream, &ChunkAnswer::Bytes { len: *len, crc: *crc })?;
    let (mut offset, end) = (*offset, offset + u64::from(*len));
    while offset < end {
        let left = end - offset;
        let socket = stream.clear().filter(|_| *steady);
        let sent = socket.and_then(|to| file.send_to(to.as_fd(), offset, left));
        let step = match sent {
            Some(sent) => sent?,
            None => {
                buf.resize(PIECE_BYTES.min(left as usize), 0);
                let have = stanchion_io::fs::read_full(&**file, buf, offset)?;
                stream.write_all(&buf[..have])?;
                have as u64
            }
        };
        if step == 0 {
            // It became shorter since it was looked at; the one who asks sees a broken connection.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        offset += step;
    }
    Ok(())
}
