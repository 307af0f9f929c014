//! A frame: fixed header, postcard body, both covered by a checksum.
//!
//! The header is verified before its length is believed, the length before memory is taken (FM-F11).

use crate::checksum::{Crc, crc64};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{Read, Write};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every frame.
pub const MAGIC: u32 = 0x4e54_5331; // "1STN" in memory order
/// Version of the protocol; a peer of another one is refused.
pub const VERSION: u16 = 1;
/// Size of the header, bytes.
pub const HEADER_BYTES: usize = 32;

/// The header on the wire. Little endian.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
pub struct Header {
    magic: U32,
    version: U16,
    kind: U16,
    body_bytes: U32,
    reserved: U32,
    body_crc: U64,
    header_crc: U64,
}

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream ended or failed.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// Not our protocol.
    #[error("these bytes are not Stanchion's protocol")]
    Magic,
    /// Another version of it.
    #[error("the peer speaks version {0} of the protocol, this program version {VERSION}")]
    Version(u16),
    /// The header or the body was damaged on its way.
    #[error("a frame was damaged on its way")]
    Damaged,
    /// Longer than the limit of this connection.
    #[error("a frame of {bytes} bytes exceeds this connection's limit of {max}")]
    TooLong {
        /// What was announced.
        bytes: u64,
        /// What is allowed.
        max: u32,
    },
    /// The body does not decode.
    #[error("a frame's body does not decode")]
    Body,
}

impl Header {
    fn new(kind: u16, body: &[u8]) -> Header {
        let mut header = Header {
            magic: MAGIC.into(),
            version: VERSION.into(),
            kind: kind.into(),
            body_bytes: (body.len() as u32).into(),
            reserved: 0.into(),
            body_crc: crc64(body).0.into(),
            header_crc: 0.into(),
        };
        header.header_crc = crc64(&header.as_bytes()[..HEADER_BYTES - 8]).0.into();
        header
    }

    /// Reads and checks a header; `max` limits the body.
    pub fn parse(bytes: &[u8; HEADER_BYTES], max: u32) -> Result<Header, FrameError> {
        let header = Header::read_from_bytes(bytes).map_err(|_| FrameError::Damaged)?;
        if header.magic.get() != MAGIC {
            return Err(FrameError::Magic);
        }
        if header.version.get() != VERSION {
            return Err(FrameError::Version(header.version.get()));
        }
        if crc64(&bytes[..HEADER_BYTES - 8]) != Crc(header.header_crc.get()) {
            return Err(FrameError::Damaged);
        }
        if header.body_bytes.get() > max {
            return Err(FrameError::TooLong { bytes: header.body_bytes.get().into(), max });
        }
        Ok(header)
    }

    /// Length of the body that follows, bytes.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes.get() as usize
    }

    /// What kind of body follows; the meaning is the connection's.
    pub fn kind(&self) -> u16 {
        self.kind.get()
    }

    /// Is this the body that the header announced?
    pub fn check(&self, body: &[u8]) -> Result<(), FrameError> {
        if body.len() == self.body_bytes() && crc64(body) == Crc(self.body_crc.get()) {
            Ok(())
        } else {
            Err(FrameError::Damaged)
        }
    }
}

/// A whole frame around `body`. The caller keeps `body` within its connection's limit.
pub fn seal(kind: u16, body: &[u8]) -> Vec<u8> {
    assert!(u32::try_from(body.len()).is_ok(), "a frame's body is limited long before 4 GiB");
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend_from_slice(Header::new(kind, body).as_bytes());
    out.extend_from_slice(body);
    out
}

/// Encodes `value` as a whole frame; refuses what the peer would refuse.
pub fn encode<T: Serialize>(kind: u16, value: &T, max: u32) -> Result<Vec<u8>, FrameError> {
    let body = postcard::to_stdvec(value).map_err(|_| FrameError::Body)?;
    if body.len() as u64 > u64::from(max) {
        return Err(FrameError::TooLong { bytes: body.len() as u64, max });
    }
    Ok(seal(kind, &body))
}

/// Decodes a body. Trailing bytes are an error: two readings of one frame must not differ.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes::<T>(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(FrameError::Body),
    }
}

/// Writes one frame to a blocking stream.
pub fn write<T: Serialize>(
    to: &mut impl Write,
    kind: u16,
    value: &T,
    max: u32,
) -> Result<(), FrameError> {
    to.write_all(&encode(kind, value, max)?)?;
    to.flush()?;
    Ok(())
}

/// Reads one frame from a blocking stream: its kind and its body, verified.
pub fn read_raw(from: &mut impl Read, max: u32) -> Result<(u16, Vec<u8>), FrameError> {
    let mut bytes = [0u8; HEADER_BYTES];
    from.read_exact(&mut bytes)?;
    let header = Header::parse(&bytes, max)?;
    let mut body = vec![0u8; header.body_bytes()];
    from.read_exact(&mut body)?;
    header.check(&body)?;
    Ok((header.kind(), body))
}

/// Reads one frame from a blocking stream and decodes it.
pub fn read<T: DeserializeOwned>(from: &mut impl Read, max: u32) -> Result<T, FrameError> {
    decode(&read_raw(from, max)?.1)
}
