//! Handshakes and frames over real sockets.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use stanchion_format::frame::{self, FrameError, HEADER_BYTES, Header};
use stanchion_format::ids::PeerId;
use stanchion_format::limits::PEER_FRAME_BYTES_MAX;
use stanchion_format::peer::{Envelope, KIND_PEER, Msg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::handshake::{
    Credentials, HANDSHAKE_BYTES_MAX, Initiator, LinkError, Opener, PREFACE_BYTES, Responder, Role,
    Sealer, Session,
};

/// How much is encrypted and handed to the kernel at a time, bytes.
const WRITE_BYTES: usize = 256 << 10;

/// Options of every connection between agents. A peer whose node vanished without a word makes the kernel
/// give up after `silence`; that is silence, not death (FM-F5a), see [`is_evidence`].
pub(crate) fn tune(socket: impl AsFd, silence: Duration) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, (silence / 2).max(Duration::from_secs(1)))?;
    sockopt::set_tcp_keepintvl(&socket, (silence / 6).max(Duration::from_secs(1)))?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    let ms = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(&socket, ms)?;
    Ok(())
}

/// Does this failure say that the peer's process is gone (closed, reset, refused, somebody else at its
/// address), and not merely that it is silent?
pub(crate) fn is_evidence(error: &LinkError) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, UnexpectedEof,
    };
    match error {
        LinkError::Io(e) | LinkError::Frame(FrameError::Io(e)) => matches!(
            e.kind(),
            BrokenPipe | ConnectionAborted | ConnectionRefused | ConnectionReset | UnexpectedEof
        ),
        LinkError::Identity { .. } | LinkError::Stranger | LinkError::Secret => true,
        _ => false,
    }
}

/// The handshake of who connects.
pub(crate) async fn initiate(
    stream: &mut TcpStream,
    who: &Credentials,
    want: PeerId,
) -> Result<Session, LinkError> {
    let (initiator, bytes) = Initiator::start(who, Role::Control)?;
    stream.write_all(&bytes).await?;
    let message = read_handshake(stream).await?;
    let (session, confirmation) = initiator.finish(&message, want)?;
    stream.write_all(&confirmation).await?;
    Ok(session)
}

/// The same for a data connection, on a thread that may wait; the stream's timeouts limit it.
pub(crate) fn initiate_data(
    stream: &mut std::net::TcpStream,
    who: &Credentials,
    want: PeerId,
) -> Result<Session, LinkError> {
    let (initiator, bytes) = Initiator::start(who, Role::Data)?;
    stream.write_all(&bytes)?;
    let mut len = [0u8; 2];
    stream.read_exact(&mut len)?;
    let mut message = vec![0; handshake_len(len)?];
    stream.read_exact(&mut message)?;
    let (session, confirmation) = initiator.finish(&message, want)?;
    stream.write_all(&confirmation)?;
    Ok(session)
}

/// The handshake of who was connected to.
pub(crate) async fn respond(
    stream: &mut TcpStream,
    who: &Credentials,
) -> Result<(Role, Session), LinkError> {
    let mut preface = [0u8; PREFACE_BYTES];
    stream.read_exact(&mut preface).await?;
    let role = Responder::role(&preface)?;
    let message = read_handshake(stream).await?;
    let (responder, bytes) = Responder::answer(who, &preface, &message)?;
    stream.write_all(&bytes).await?;
    let confirmation = read_handshake(stream).await?;
    Ok((role, responder.finish(&confirmation)?))
}

fn handshake_len(bytes: [u8; 2]) -> Result<usize, LinkError> {
    match usize::from(u16::from_le_bytes(bytes)) {
        len if len > HANDSHAKE_BYTES_MAX => Err(LinkError::TooLong(len)),
        len => Ok(len),
    }
}

async fn read_handshake(stream: &mut TcpStream) -> Result<Vec<u8>, LinkError> {
    let mut len = [0u8; 2];
    stream.read_exact(&mut len).await?;
    let mut message = vec![0; handshake_len(len)?];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Reads messages of a control link.
pub(crate) struct MessageReader {
    from: BufReader<OwnedReadHalf>,
    opener: Opener,
    peer: PeerId,
    sealed: Vec<u8>,
    plain: Vec<u8>,
}

impl MessageReader {
    pub fn new(half: OwnedReadHalf, opener: Opener, peer: PeerId) -> MessageReader {
        let from = BufReader::with_capacity(64 << 10, half);
        MessageReader { from, opener, peer, sealed: Vec::new(), plain: Vec::new() }
    }

    /// The next message; `None` when the peer closed between two messages. Memory grows with what has
    /// come, not with what was announced.
    pub async fn next(&mut self) -> Result<Option<Msg>, LinkError> {
        loop {
            if let Some(msg) = self.take()? {
                return Ok(Some(msg));
            }
            let mut len = [0u8; 2];
            if self.from.read(&mut len[..1]).await? == 0 {
                let torn = !self.plain.is_empty();
                return if torn { Err(eof()) } else { Ok(None) };
            }
            self.from.read_exact(&mut len[1..]).await?;
            self.sealed.resize(usize::from(u16::from_le_bytes(len)), 0);
            self.from.read_exact(&mut self.sealed).await?;
            self.opener.open(&self.sealed, &mut self.plain)?;
        }
    }

    fn take(&mut self) -> Result<Option<Msg>, LinkError> {
        let Some(header) = self.plain.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::parse(header, PEER_FRAME_BYTES_MAX)?;
        let end = HEADER_BYTES + header.body_bytes();
        if self.plain.len() < end {
            return Ok(None);
        }
        let body = &self.plain[HEADER_BYTES..end];
        header.check(body)?;
        if header.kind() != KIND_PEER {
            return Err(FrameError::Body.into());
        }
        let envelope: Envelope = frame::decode(body)?;
        self.plain.drain(..end);
        if self.plain.is_empty() && self.plain.capacity() > (1 << 20) {
            self.plain = Vec::new();
        }
        // The link vouches for the sender; an envelope that says otherwise is a lie.
        if envelope.from == self.peer {
            Ok(Some(envelope.msg))
        } else {
            Err(LinkError::Identity { want: self.peer, have: envelope.from })
        }
    }
}

fn eof() -> LinkError {
    LinkError::Io(io::ErrorKind::UnexpectedEof.into())
}

/// Writes whole frames to a control link.
pub(crate) struct FrameWriter {
    to: OwnedWriteHalf,
    sealer: Sealer,
    sealed: Vec<u8>,
}

impl FrameWriter {
    pub fn new(half: OwnedWriteHalf, sealer: Sealer) -> FrameWriter {
        FrameWriter { to: half, sealer, sealed: Vec::new() }
    }

    /// Sends one frame.
    pub async fn write(&mut self, frame: &[u8]) -> Result<(), LinkError> {
        for piece in frame.chunks(WRITE_BYTES) {
            self.sealed.clear();
            self.sealer.seal(piece, &mut self.sealed)?;
            self.to.write_all(&self.sealed).await?;
        }
        Ok(())
    }

    /// Says that nothing more comes.
    pub async fn finish(&mut self) {
        // The peer may be gone already; then there is nobody to tell.
        let _ = self.to.shutdown().await;
    }
}

/// A data connection on a thread that may wait: clear, or encrypted on request.
pub(crate) struct DataStream {
    tcp: std::net::TcpStream,
    crypt: Option<Crypt>,
}

struct Crypt {
    sealer: Sealer,
    opener: Opener,
    sealed: Vec<u8>,
    plain: Vec<u8>,
    read: usize,
}

impl DataStream {
    pub fn new(tcp: std::net::TcpStream, session: Session, encrypt: bool) -> DataStream {
        let Session { sealer, opener, .. } = session;
        let crypt = encrypt.then(|| Crypt {
            sealer,
            opener,
            sealed: Vec::new(),
            plain: Vec::new(),
            read: 0,
        });
        DataStream { tcp, crypt }
    }

    /// The socket, if bytes go over it as they are.
    pub fn clear(&self) -> Option<&std::net::TcpStream> {
        self.crypt.is_none().then_some(&self.tcp)
    }

    /// For timeouts, and for closing it from elsewhere.
    pub fn socket(&self) -> &std::net::TcpStream {
        &self.tcp
    }
}

impl Read for DataStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Some(crypt) = &mut self.crypt else { return self.tcp.read(buf) };
        if crypt.read == crypt.plain.len() {
            let mut len = [0u8; 2];
            if self.tcp.read(&mut len[..1])? == 0 {
                return Ok(0);
            }
            read_all(&mut self.tcp, &mut len[1..])?;
            crypt.sealed.resize(usize::from(u16::from_le_bytes(len)), 0);
            read_all(&mut self.tcp, &mut crypt.sealed)?;
            crypt.plain.clear();
            crypt.read = 0;
            let opened = crypt.opener.open(&crypt.sealed, &mut crypt.plain);
            opened.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        }
        let n = buf.len().min(crypt.plain.len() - crypt.read);
        buf[..n].copy_from_slice(&crypt.plain[crypt.read..crypt.read + n]);
        crypt.read += n;
        Ok(n)
    }
}

/// Reads on where a timeout must not tear a message: the rest is on its way or the peer is lost.
fn read_all(from: &mut std::net::TcpStream, buf: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    let mut waits = 0;
    while done < buf.len() {
        match from.read(&mut buf[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => (done, waits) = (done + n, 0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if is_timeout(&e) && waits < TORN_WAITS_MAX => waits += 1,
            Err(e) if is_timeout(&e) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Timeouts in a row within one encrypted message before its peer counts as lost.
const TORN_WAITS_MAX: u32 = 50;

pub(crate) fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl Write for DataStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let Some(crypt) = &mut self.crypt else { return self.tcp.write(buf) };
        let n = buf.len().min(WRITE_BYTES);
        crypt.sealed.clear();
        crypt
            .sealer
            .seal(&buf[..n], &mut crypt.sealed)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        // Half a message is of no use to the peer: after a failure the connection is dropped.
        self.tcp.write_all(&crypt.sealed)?;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tcp.flush()
    }
}

/// A frame from us.
pub(crate) fn envelope(me: PeerId, msg: Msg) -> Result<Arc<[u8]>, FrameError> {
    let envelope = Envelope { from: me, msg };
    Ok(frame::encode(KIND_PEER, &envelope, PEER_FRAME_BYTES_MAX)?.into())
}
