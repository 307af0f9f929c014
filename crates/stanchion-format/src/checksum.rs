//! CRC-64/NVME of chunks, frames and files.
//!
//! 64 bits because a job of 10 000 nodes verifies some 10^9 chunks in its life: with 32 bits a
//! damaged one would pass now and then. Parameters: NVM Express base specification, 64-bit CRC.

use serde::{Deserialize, Serialize};

/// A CRC-64/NVME.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Crc(pub u64);

/// The checksum of `bytes`.
pub fn crc64(bytes: &[u8]) -> Crc {
    Crc(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes))
}

/// The checksum of two runs of bytes, one behind the other, from theirs; `bytes`: how long the second one is.
pub fn joined(first: Crc, second: Crc, bytes: u64) -> Crc {
    let kind = crc_fast::CrcAlgorithm::Crc64Nvme;
    Crc(crc_fast::checksum_combine(kind, first.0, second.0, bytes))
}

/// The checksum of bytes that come one after another.
#[derive(Clone, Debug)]
pub struct Crc64(crc_fast::Digest);

impl Default for Crc64 {
    fn default() -> Self {
        Crc64::new()
    }
}

impl Crc64 {
    /// Of nothing yet.
    pub fn new() -> Crc64 {
        Crc64(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme))
    }

    /// Goes on with `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all bytes so far.
    pub fn crc(&self) -> Crc {
        Crc(self.0.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_published_check_value() {
        // "Check" of CRC-64/NVME in the CRC catalogue: the CRC of the nine digits.
        assert_eq!(crc64(b"123456789"), Crc(0xae8b_1486_0a79_9888));
    }

    #[test]
    fn is_the_same_in_pieces() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31) as u8).collect();
        for step in [1, 7, 64, 4096, 70_000] {
            let mut crc = Crc64::new();
            bytes.chunks(step).for_each(|piece| crc.update(piece));
            assert_eq!(crc.crc(), crc64(&bytes), "{step}");
        }
        assert_eq!(Crc64::new().crc(), crc64(&[]));
    }

    #[test]
    fn two_checksums_are_joined_without_the_bytes() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31) as u8).collect();
        for at in [0, 1, 8, 4096, 99_999, 100_000] {
            let (a, b) = bytes.split_at(at);
            assert_eq!(joined(crc64(a), crc64(b), b.len() as u64), crc64(&bytes), "{at}");
        }
    }
}
