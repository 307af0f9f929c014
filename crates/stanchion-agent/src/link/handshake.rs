//! Who is at the other end: Noise NNpsk0 with the job's secret as the pre-shared key (FM-C1).
//!
//! ```text
//! initiator -> responder   preface (8 bytes, clear), then message 1: psk, e   { sender's PeerId }
//! responder -> initiator   message 2: e, ee                                   { responder's PeerId }
//! initiator -> responder   confirmation: an empty transport message
//! ```
//! Each message has its length before it (16 bits, little endian). The preface and the job's id are the
//! prologue, so both sides have seen the same. Without the confirmation, a recorded message 1 sent again
//! would be served on data connections, which go on in the clear unless `encrypt` is set.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use snow::{Builder, HandshakeState, StatelessTransportState};
use stanchion_format::frame;
use stanchion_format::ids::{JobId, PeerId};

use crate::secret::Secret;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const MAGIC: [u8; 4] = *b"STNL";
/// Size of the preface, bytes.
pub(crate) const PREFACE_BYTES: usize = 8;
/// Largest message of the handshake, bytes; ours have some 60.
pub(crate) const HANDSHAKE_BYTES_MAX: usize = 256;
/// Largest message after the handshake, bytes, and what of it is not payload (Noise, sections 3 and 5.1).
const MESSAGE_BYTES_MAX: usize = 65_535;
const TAG_BYTES: usize = 16;

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection could not be made, or broke.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The other side does not speak our protocol.
    #[error("the other side does not speak Stanchion's protocol")]
    Stranger,
    /// The other side is of another version.
    #[error("the peer speaks version {0} of the protocol, this program version {ours}", ours = frame::VERSION)]
    Version(u16),
    /// Another job's secret, or none.
    #[error("the other side does not have this job's secret, or another setting of 'encrypt'")]
    Secret,
    /// At this address is somebody else of this job.
    #[error("the other side is {have:?} instead of {want:?}")]
    Identity {
        /// Who was called.
        want: PeerId,
        /// Who answered.
        have: PeerId,
    },
    /// Bytes on an authenticated link that make no sense.
    #[error("the peer sent what is not allowed: {0}")]
    Frame(#[from] frame::FrameError),
    /// A message is larger than its limit.
    #[error("the peer sent a handshake of {0} bytes")]
    TooLong(usize),
    /// The deadline passed.
    #[error("the deadline passed")]
    Timeout,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Messages of `format::peer`.
    Control,
    /// Chunks, `format::data`.
    Data,
}

/// What one needs to be let in.
#[derive(Debug)]
pub struct Credentials {
    /// Who we are.
    pub me: PeerId,
    /// Of which job.
    pub job: JobId,
    /// What proves it.
    pub secret: Arc<Secret>,
    /// Data connections are encrypted too (the setting `encrypt`).
    pub encrypt: bool,
}

#[derive(Serialize, Deserialize)]
struct Hello {
    from: PeerId,
}

fn preface(role: Role, encrypt: bool) -> [u8; PREFACE_BYTES] {
    let [a, b, c, d] = MAGIC;
    let [low, high] = frame::VERSION.to_le_bytes();
    let role_byte = match role {
        Role::Control => 1,
        Role::Data => 2,
    };
    [a, b, c, d, low, high, role_byte, u8::from(encrypt && role == Role::Data)]
}

fn prologue(preface: &[u8; PREFACE_BYTES], job: JobId) -> Vec<u8> {
    [&preface[..], &job.0.to_le_bytes()].concat()
}

fn builder<'a>(secret: &'a Secret, prologue: &'a [u8]) -> Result<Builder<'a>, LinkError> {
    let pattern = PATTERN.parse().expect("the pattern is a constant that snow knows");
    Builder::new(pattern)
        .psk(0, secret.bytes())
        .and_then(|b| b.prologue(prologue))
        .map_err(|_| LinkError::Secret)
}

/// A handshake message with its length before it.
fn with_length(message: &[u8]) -> Vec<u8> {
    let len = u16::try_from(message.len()).expect("handshake messages are short");
    [&len.to_le_bytes()[..], message].concat()
}

fn write(state: &mut HandshakeState, me: PeerId) -> Result<Vec<u8>, LinkError> {
    let hello = postcard::to_stdvec(&Hello { from: me }).expect("a peer id always encodes");
    let mut message = [0u8; HANDSHAKE_BYTES_MAX];
    let n = state.write_message(&hello, &mut message).map_err(|_| LinkError::Secret)?;
    Ok(with_length(&message[..n]))
}

fn read(state: &mut HandshakeState, message: &[u8]) -> Result<PeerId, LinkError> {
    let mut payload = [0u8; HANDSHAKE_BYTES_MAX];
    let n = state.read_message(message, &mut payload).map_err(|_| LinkError::Secret)?;
    Ok(frame::decode::<Hello>(&payload[..n])?.from)
}

/// An authenticated connection's keys and the peer's name.
pub(crate) struct Session {
    /// Who is at the other end.
    pub peer: PeerId,
    /// Encrypts what we send.
    pub sealer: Sealer,
    /// Decrypts what comes.
    pub opener: Opener,
}

/// Encrypts one direction.
pub(crate) struct Sealer {
    cipher: Arc<StatelessTransportState>,
    nonce: u64,
}

/// Decrypts the other.
pub(crate) struct Opener {
    cipher: Arc<StatelessTransportState>,
    nonce: u64,
}

fn session(state: HandshakeState, peer: PeerId) -> Result<Session, LinkError> {
    let cipher = Arc::new(state.into_stateless_transport_mode().map_err(|_| LinkError::Secret)?);
    Ok(Session {
        peer,
        sealer: Sealer { cipher: cipher.clone(), nonce: 0 },
        opener: Opener { cipher, nonce: 0 },
    })
}

impl Sealer {
    /// Appends `payload` to `out`, in messages with their lengths before them.
    pub fn seal(&mut self, payload: &[u8], out: &mut Vec<u8>) -> Result<(), LinkError> {
        for piece in payload.chunks(MESSAGE_BYTES_MAX - TAG_BYTES) {
            self.seal_one(piece, out)?;
        }
        Ok(())
    }

    fn seal_one(&mut self, piece: &[u8], out: &mut Vec<u8>) -> Result<(), LinkError> {
        let len = u16::try_from(piece.len() + TAG_BYTES).expect("pieces are cut to size");
        out.extend_from_slice(&len.to_le_bytes());
        let at = out.len();
        out.resize(at + usize::from(len), 0);
        self.cipher
            .write_message(self.nonce, piece, &mut out[at..])
            .map_err(|_| LinkError::Secret)?;
        self.nonce += 1;
        Ok(())
    }
}

impl Opener {
    /// Appends what `message` (without its length) holds to `out`.
    pub fn open(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<(), LinkError> {
        let Some(plain) = message.len().checked_sub(TAG_BYTES) else {
            return Err(LinkError::Secret);
        };
        let at = out.len();
        out.resize(at + plain, 0);
        let read = self.cipher.read_message(self.nonce, message, &mut out[at..]);
        if read.is_err() {
            out.truncate(at);
            return Err(LinkError::Secret);
        }
        self.nonce += 1;
        Ok(())
    }
}

/// Who connects.
pub(crate) struct Initiator(HandshakeState);

impl Initiator {
    /// Begins; the bytes go to the responder.
    pub fn start(who: &Credentials, role: Role) -> Result<(Initiator, Vec<u8>), LinkError> {
        let preface = preface(role, who.encrypt);
        let prologue = prologue(&preface, who.job);
        let mut state =
            builder(&who.secret, &prologue)?.build_initiator().map_err(|_| LinkError::Secret)?;
        let mut bytes = preface.to_vec();
        bytes.extend(write(&mut state, who.me)?);
        Ok((Initiator(state), bytes))
    }

    /// Takes message 2; the bytes are the confirmation.
    pub fn finish(mut self, message: &[u8], want: PeerId) -> Result<(Session, Vec<u8>), LinkError> {
        let have = read(&mut self.0, message)?;
        if have != want {
            return Err(LinkError::Identity { want, have });
        }
        let mut session = session(self.0, have)?;
        let mut bytes = Vec::new();
        session.sealer.seal_one(&[], &mut bytes)?;
        Ok((session, bytes))
    }
}

/// Who is connected to.
pub(crate) struct Responder {
    state: HandshakeState,
    peer: PeerId,
}

impl Responder {
    /// What the preface asks for; refuses strangers before any cryptography.
    pub fn role(bytes: &[u8; PREFACE_BYTES]) -> Result<Role, LinkError> {
        if bytes[..4] != MAGIC {
            return Err(LinkError::Stranger);
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != frame::VERSION {
            return Err(LinkError::Version(version));
        }
        match bytes[6] {
            1 => Ok(Role::Control),
            2 => Ok(Role::Data),
            _ => Err(LinkError::Stranger),
        }
    }

    /// Takes the preface and message 1; the bytes are message 2.
    pub fn answer(
        who: &Credentials,
        bytes: &[u8; PREFACE_BYTES],
        message: &[u8],
    ) -> Result<(Responder, Vec<u8>), LinkError> {
        // Both sides must want the same of `encrypt`: the prologue is made of our own preface.
        let prologue = prologue(&preface(Responder::role(bytes)?, who.encrypt), who.job);
        let mut state =
            builder(&who.secret, &prologue)?.build_responder().map_err(|_| LinkError::Secret)?;
        let peer = read(&mut state, message)?;
        let out = write(&mut state, who.me)?;
        Ok((Responder { state, peer }, out))
    }

    /// Takes the confirmation: now it is certain that the peer is there now and has the secret.
    pub fn finish(self, message: &[u8]) -> Result<Session, LinkError> {
        let mut session = session(self.state, self.peer)?;
        let mut empty = Vec::new();
        session.opener.open(message, &mut empty)?;
        if empty.is_empty() { Ok(session) } else { Err(LinkError::Secret) }
    }
}
