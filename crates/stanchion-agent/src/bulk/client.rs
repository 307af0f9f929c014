//! Asking other agents for chunks: few connections each, kept and made anew as needed.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use stanchion_core::api::ChunkSource;
use stanchion_format::checksum::{Crc, Crc64};
use stanchion_format::data::{ChunkAnswer, ChunkRequest, KIND_CHUNK, KIND_CHUNK_REQUEST, Piece};
use stanchion_format::frame::{self, HEADER_BYTES, Header};
use stanchion_format::ids::{AgentId, Key, PeerId};
use stanchion_format::limits::CHUNK_BYTES_MAX;
use stanchion_format::peer::{AgentAddr, Cause, Trouble};
use tracing::debug;

use super::sum::WINDOW_BYTES;
use crate::link::{Credentials, DataStream, LinkError, initiate_data, is_timeout, tune};

/// Largest body of a request or an answer (not the raw bytes behind it), bytes.
pub(super) const FRAME_BYTES_MAX: u32 = 256;
/// A wait looks so often whether it is still wanted.
pub(super) const SLICE: Duration = Duration::from_millis(200);
/// Connections that are kept for one agent.
const KEPT_MAX: usize = 8;

/// How long a peer may be silent, and whether anybody still waits.
#[derive(Clone, Copy)]
pub(super) struct Patience<'a> {
    pub stall: Duration,
    pub cancelled: &'a (dyn Fn() -> bool + Sync),
}

/// Reads exactly `buf`, in slices of the socket's timeout. Every byte that comes renews the patience.
pub(super) fn read_full(
    from: &mut impl Read,
    buf: &mut [u8],
    patience: Patience<'_>,
) -> io::Result<()> {
    let mut done = 0;
    let mut last = Instant::now();
    while done < buf.len() {
        if (patience.cancelled)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match from.read(&mut buf[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                done += n;
                last = Instant::now();
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if is_timeout(&e) && last.elapsed() < patience.stall => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The connections to other agents' data sides.
pub(super) struct Clients {
    who: Arc<Credentials>,
    connect: Duration,
    stall: Duration,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    addresses: HashMap<AgentId, String>,
    kept: HashMap<AgentId, Vec<DataStream>>,
}

/// A request that was sent and not answered yet.
pub(super) struct Asked {
    stream: DataStream,
    /// The connection had been kept: the peer may have closed it meanwhile.
    kept: bool,
}

/// An answer on its way.
pub(super) struct Incoming {
    stream: DataStream,
    left: u32,
    /// Of parity: what came, and what it must be.
    crc: Crc64,
    want: Crc,
}

impl Clients {
    pub fn new(who: Arc<Credentials>, connect: Duration, stall: Duration) -> Clients {
        Clients { who, connect, stall, table: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics while it holds the table")
    }

    pub fn set_addresses(&self, agents: &[AgentAddr]) {
        let mut table = self.table();
        let new: HashMap<_, _> = agents.iter().map(|a| (a.id, a.addr.clone())).collect();
        let Table { addresses, kept } = &mut *table;
        kept.retain(|id, _| new.contains_key(id) && new.get(id) == addresses.get(id));
        *addresses = new;
    }

    /// Closes what is kept.
    pub fn clear(&self) {
        self.table().kept.clear();
    }

    fn dial(&self, agent: AgentId) -> Result<DataStream, LinkError> {
        let address = self.table().addresses.get(&agent).cloned();
        let address = address.ok_or(io::Error::from(io::ErrorKind::AddrNotAvailable))?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.connect) {
                Ok(mut tcp) => {
                    tune(&tcp, self.stall)?;
                    tcp.set_read_timeout(Some(self.connect))?;
                    tcp.set_write_timeout(Some(self.stall))?;
                    let session = initiate_data(&mut tcp, &self.who, PeerId::Agent(agent))?;
                    tcp.set_read_timeout(Some(SLICE))?;
                    return Ok(DataStream::new(tcp, session, self.who.encrypt));
                }
                Err(e) => last = e,
            }
        }
        Err(last.into())
    }

    /// Sends a request for `source`.
    pub fn ask(&self, key: Key, source: &ChunkSource) -> Result<Asked, Trouble> {
        let kept = self.table().kept.get_mut(&source.agent).and_then(Vec::pop);
        if let Some(mut stream) = kept
            && request(&mut stream, key, source).is_ok()
        {
            return Ok(Asked { stream, kept: true });
        }
        self.ask_anew(key, source)
    }

    fn ask_anew(&self, key: Key, source: &ChunkSource) -> Result<Asked, Trouble> {
        let asked = self.dial(source.agent).and_then(|mut stream| {
            request(&mut stream, key, source)?;
            Ok(Asked { stream, kept: false })
        });
        asked.map_err(|error| {
            debug!(agent = source.agent.0, %error, "an agent gives no chunks");
            blame(source, Cause::Unreachable)
        })
    }

    /// Waits for the beginning of the answer.
    pub fn begin(
        &self,
        key: Key,
        source: &ChunkSource,
        asked: Asked,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Incoming, Trouble> {
        let patience = Patience { stall: self.stall, cancelled };
        let Asked { mut stream, mut kept } = asked;
        loop {
            match receive_head(&mut stream, patience) {
                Ok(Ok((len, want))) => {
                    fits(source, len).map_err(|cause| blame(source, cause))?;
                    return Ok(Incoming { stream, left: len, crc: Crc64::new(), want });
                }
                Ok(Err(cause)) => {
                    // Only after a whole answer the connection is in step.
                    if cause != Cause::Malformed {
                        self.keep(source.agent, stream);
                    }
                    return Err(blame(source, cause));
                }
                // What is kept may have been closed meanwhile: that shows before the first byte.
                Err(_) if kept && !cancelled() => {
                    Asked { stream, kept } = self.ask_anew(key, source)?;
                }
                Err(error) => return Err(broke(source, &error)),
            }
        }
    }

    /// The next bytes of the answer, unverified (the fold does that).
    pub fn take(
        &self,
        source: &ChunkSource,
        incoming: &mut Incoming,
        to: &mut [u8],
        (trusting, cancelled): (bool, &(dyn Fn() -> bool + Sync)),
    ) -> Result<(), Trouble> {
        let patience = Patience { stall: self.stall, cancelled };
        read_full(&mut incoming.stream, to, patience).map_err(|e| broke(source, &e))?;
        if !trusting && source.crc.is_none() {
            incoming.crc.update(to);
        }
        incoming.left -= to.len() as u32;
        Ok(())
    }

    /// What is taken is enough. Of parity, whose place may hold more than the stripe needs, the rest is read too, and unless
    /// the caller is trusting it is compared with what the peer once wrote.
    pub fn end(
        &self,
        source: &ChunkSource,
        mut incoming: Incoming,
        buf: &mut Vec<u8>,
        (trusting, cancelled): (bool, &(dyn Fn() -> bool + Sync)),
    ) -> Result<(), Trouble> {
        while incoming.left > 0 {
            buf.resize(WINDOW_BYTES.min(incoming.left as usize), 0);
            self.take(source, &mut incoming, buf, (trusting, cancelled))?;
        }
        let Incoming { stream, crc, want, .. } = incoming;
        self.keep(source.agent, stream);
        if !trusting && source.crc.is_none() && crc.crc() != want {
            return Err(blame(source, Cause::Damaged));
        }
        Ok(())
    }

    fn keep(&self, agent: AgentId, stream: DataStream) {
        let mut table = self.table();
        if table.addresses.contains_key(&agent) {
            let kept = table.kept.entry(agent).or_default();
            if kept.len() < KEPT_MAX {
                kept.push(stream);
            }
        }
    }
}

fn broke(source: &ChunkSource, error: &io::Error) -> Trouble {
    debug!(agent = source.agent.0, %error, "a chunk did not come");
    blame(source, Cause::Unreachable)
}

pub(super) fn blame(source: &ChunkSource, cause: Cause) -> Trouble {
    Trouble::new(cause).slot(source.slot).agent(source.agent)
}

fn request(to: &mut DataStream, key: Key, source: &ChunkSource) -> io::Result<()> {
    let request = ChunkRequest { key, slot: source.slot, piece: source.piece };
    let frame = frame::encode(KIND_CHUNK_REQUEST, &request, FRAME_BYTES_MAX)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    to.write_all(&frame)
}

/// Length and checksum of what follows. The outer error: the connection broke. The inner: the peer's answer is no chunk;
/// `Malformed` also says that the connection is out of step.
fn receive_head(
    from: &mut DataStream,
    patience: Patience<'_>,
) -> io::Result<Result<(u32, Crc), Cause>> {
    let mut header = [0u8; HEADER_BYTES];
    read_full(from, &mut header, patience)?;
    let Ok(header) = Header::parse(&header, FRAME_BYTES_MAX) else {
        return Ok(Err(Cause::Malformed));
    };
    let mut body = vec![0u8; header.body_bytes()];
    read_full(from, &mut body, patience)?;
    if header.check(&body).is_err() || header.kind() != KIND_CHUNK {
        return Ok(Err(Cause::Malformed));
    }
    Ok(match frame::decode(&body) {
        Ok(ChunkAnswer::Bytes { len, crc }) if len <= CHUNK_BYTES_MAX => Ok((len, crc)),
        Ok(ChunkAnswer::Bytes { .. }) | Err(_) => Err(Cause::Malformed),
        Ok(ChunkAnswer::Missing) => Err(Cause::Missing),
        Ok(ChunkAnswer::Failed(errno)) => Err(Cause::Os(errno)),
    })
}

/// Is a source of this length enough? A parity's place may hold more than the stripe needs; data has its length or is
/// wrong.
pub(super) fn fits(source: &ChunkSource, have: u32) -> Result<(), Cause> {
    match source.piece {
        Piece::Parity(_) if have >= source.len => Ok(()),
        _ if have == source.len => Ok(()),
        _ => Err(Cause::Size { want: source.len.into(), have: have.into() }),
    }
}
