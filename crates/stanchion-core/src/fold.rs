//! Adding contributions up to a stripe, each verified whole and applied once (FM-S5; DESIGN.md rule 3).

use crate::api::ChunkSource;
use crate::bugs::{Bug, Bugs};
use stanchion_format::checksum::{Crc, crc64};

/// Why a contribution is not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoldError {
    /// It is not what its source should be: length or checksum.
    Damaged {
        /// Which source.
        source: usize,
    },
}

/// The sum of a stripe's sources as they come in, in any order, any number of times.
#[derive(Debug)]
pub struct Fold<'a> {
    sources: &'a [ChunkSource],
    applied: Vec<bool>,
    sum: &'a mut [u8],
    bugs: Bugs,
}

impl<'a> Fold<'a> {
    /// Starts with zeros in `sum`, which is as long as the longest source.
    pub fn new(sources: &'a [ChunkSource], sum: &'a mut [u8]) -> Fold<'a> {
        assert!(
            sources.iter().all(|s| s.len as usize <= sum.len()),
            "a stripe is as long as its longest source"
        );
        sum.fill(0);
        Fold { sources, applied: vec![false; sources.len()], sum, bugs: Bugs::default() }
    }

    /// The same with deliberate bugs, for the simulator.
    pub fn with_bugs(self, bugs: Bugs) -> Fold<'a> {
        Fold { bugs, ..self }
    }

    /// Applies the bytes of source number `source`; a repeat changes nothing. Nothing is applied unless
    /// everything fits.
    pub fn apply(&mut self, source: usize, bytes: &[u8]) -> Result<(), FoldError> {
        let want = &self.sources[source];
        let right =
            want.crc.is_none_or(|crc| crc64(bytes) == crc) || self.bugs.on(Bug::SkipSourceChecksum);
        if !right || bytes.len() != want.len as usize {
            return Err(FoldError::Damaged { source });
        }
        if !std::mem::replace(&mut self.applied[source], true) || self.bugs.on(Bug::ApplyTwice) {
            stanchion_code::rs::mul_into(self.sum, bytes, want.factor);
        }
        Ok(())
    }

    /// Is everything applied?
    pub fn complete(&self) -> bool {
        self.applied.iter().all(|a| *a)
    }

    /// The sum and its checksum over the first `len` bytes. Only of a complete fold.
    pub fn finish(self, len: usize) -> Crc {
        assert!(self.complete(), "a stripe is used only when all its members are in it");
        crc64(&self.sum[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::data::Piece;
    use stanchion_format::ids::{AgentId, SlotId};

    fn source(bytes: &[u8]) -> ChunkSource {
        ChunkSource {
            slot: SlotId(0),
            agent: AgentId(0),
            piece: Piece::Data(0),
            len: bytes.len() as u32,
            crc: Some(crc64(bytes)),
            factor: 1,
        }
    }

    #[test]
    fn repeats_and_damage_change_nothing() {
        // FM-S5
        let (a, b) = (b"abcd".as_slice(), b"xy".as_slice());
        let sources = [source(a), source(b)];
        let mut sum = [9u8; 4];
        let mut fold = Fold::new(&sources, &mut sum);
        fold.apply(0, a).unwrap();
        fold.apply(0, a).unwrap();
        assert_eq!(fold.apply(1, b"xz"), Err(FoldError::Damaged { source: 1 }));
        assert_eq!(fold.apply(1, b"x"), Err(FoldError::Damaged { source: 1 }));
        assert!(!fold.complete());
        fold.apply(1, b).unwrap();
        fold.apply(1, b).unwrap();
        fold.finish(4);
        assert_eq!(sum, [b'a' ^ b'x', b'b' ^ b'y', b'c', b'd']);
    }
}
