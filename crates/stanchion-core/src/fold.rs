//! Adding contributions up to a stripe, each verified whole and applied once (FM-S5; DESIGN.md rule 3).

use crate::api::ChunkSource;
use crate::bugs::{Bug, Bugs};
use stanchion_format::checksum::{Crc, Crc64, crc64};

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
///
/// Sources may come in pieces, one after the other or side by side, and are added up as they come, while they are in the
/// processor's cache. If one turns out in the end not to be what it should be, the sum is of no use: it is never complete.
#[derive(Debug)]
pub struct Fold<'a> {
    sources: &'a [ChunkSource],
    applied: Vec<bool>,
    sum: &'a mut [u8],
    /// So many bytes of `sum` are the sum; what is behind them is whatever it was.
    filled: usize,
    /// Sources that began and did not end as they should.
    torn: usize,
    /// Bytes that the result has, and the checksum of those that do not change any more.
    len: usize,
    sealed: usize,
    crc: Crc64,
    /// The result has a checksum of its own to be compared with: the sources' are not looked at.
    trusting: bool,
    bugs: Bugs,
}

/// A source on its way.
#[derive(Debug)]
pub struct Coming {
    source: usize,
    done: usize,
    crc: Crc64,
    /// It was applied before.
    again: bool,
}

impl<'a> Fold<'a> {
    /// Starts in `sum`, which is as long as the longest source, whatever is in it. The result is its first `len` bytes.
    pub fn new(sources: &'a [ChunkSource], sum: &'a mut [u8], len: usize) -> Fold<'a> {
        assert!(
            sources.iter().all(|s| s.len as usize <= sum.len()) && len <= sum.len(),
            "a stripe is as long as its longest source"
        );
        Fold {
            sources,
            applied: vec![false; sources.len()],
            sum,
            filled: 0,
            torn: 0,
            len,
            sealed: 0,
            crc: Crc64::new(),
            trusting: false,
            bugs: Bugs::default(),
        }
    }

    /// The same without a look at the sources' checksums: for a caller who knows the result's and compares it. It says
    /// more than theirs (the sum itself may be wrong, and what has no checksum too), for a third of the work. Whose fault a wrong
    /// result is, a second fold that is not trusting tells.
    pub fn trusting(self) -> Fold<'a> {
        Fold { trusting: true, ..self }
    }

    /// The same with deliberate bugs, for the simulator.
    pub fn with_bugs(self, bugs: Bugs) -> Fold<'a> {
        Fold { bugs, ..self }
    }

    /// Applies the bytes of source number `source`; a repeat changes nothing. Nothing is applied unless
    /// everything fits.
    pub fn apply(&mut self, source: usize, bytes: &[u8]) -> Result<(), FoldError> {
        let want = &self.sources[source];
        let unseen = self.trusting || self.bugs.on(Bug::SkipSourceChecksum);
        let right = unseen || want.crc.is_none_or(|crc| crc64(bytes) == crc);
        if !right || bytes.len() != want.len as usize {
            return Err(FoldError::Damaged { source });
        }
        if !std::mem::replace(&mut self.applied[source], true) || self.bugs.on(Bug::ApplyTwice) {
            self.add(0, bytes, want.factor);
        }
        Ok(())
    }

    /// Source number `source` comes in pieces: [`Fold::take`] for each in its order, then [`Fold::end`].
    pub fn begin(&mut self, source: usize) -> Coming {
        self.torn += 1;
        let again = self.applied[source] && !self.bugs.on(Bug::ApplyTwice);
        Coming { source, done: 0, crc: Crc64::new(), again }
    }

    /// The next piece.
    pub fn take(&mut self, coming: &mut Coming, bytes: &[u8]) -> Result<(), FoldError> {
        let source = coming.source;
        let want = &self.sources[source];
        let (at, end) = (coming.done, coming.done + bytes.len());
        if end > want.len as usize {
            return Err(FoldError::Damaged { source });
        }
        if want.crc.is_some() && !self.trusting {
            coming.crc.update(bytes);
        }
        coming.done = end;
        if !coming.again {
            self.add(at, bytes, want.factor);
        }
        Ok(())
    }

    /// The next piece, of at most `len` bytes and not beyond the source's end, from `read`, which fills what it is given: `buf`, or
    /// where nothing is to be added to, the sum itself.
    pub fn take_from<E>(
        &mut self,
        coming: &mut Coming,
        len: usize,
        buf: &mut Vec<u8>,
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let want = &self.sources[coming.source];
        let at = coming.done;
        let end = at + len.min(want.len as usize - at);
        if at == end {
            // It has come whole; others are longer.
            return Ok(());
        }
        if at != self.filled || want.factor != 1 || coming.again {
            buf.resize(end - at, 0);
            read(buf)?;
            self.take(coming, buf).expect("it is not beyond the source's end");
            return Ok(());
        }
        assert!(at >= self.sealed, "what is settled does not change");
        read(&mut self.sum[at..end])?;
        if want.crc.is_some() && !self.trusting {
            coming.crc.update(&self.sum[at..end]);
        }
        (coming.done, self.filled) = (end, end);
        Ok(())
    }

    /// All of it has come.
    pub fn end(&mut self, coming: Coming) -> Result<(), FoldError> {
        let Coming { source, done, crc, .. } = coming;
        let want = &self.sources[source];
        let seen = !self.trusting && !self.bugs.on(Bug::SkipSourceChecksum);
        let wrong = seen && want.crc.is_some_and(|want| want != crc.crc());
        if done != want.len as usize || wrong {
            return Err(FoldError::Damaged { source });
        }
        self.applied[source] = true;
        self.torn -= 1;
        Ok(())
    }

    /// Up to `end` nothing is added any more: the result's checksum goes on so far, over bytes that are still in the
    /// processor's cache.
    pub fn settle(&mut self, end: usize) {
        self.seal(end.min(self.filled));
    }

    /// Adds `bytes` times `factor` at `at`, which is not beyond what is filled: every source begins at 0.
    fn add(&mut self, at: usize, bytes: &[u8], factor: u8) {
        let end = at + bytes.len();
        assert!(at <= self.filled, "a source has no gaps");
        assert!(at >= self.sealed, "what is settled does not change");
        let old = self.filled.clamp(at, end);
        let (there, new) = bytes.split_at(old - at);
        stanchion_code::rs::mul_into(&mut self.sum[at..old], there, factor);
        if factor == 1 {
            self.sum[old..end].copy_from_slice(new);
        } else {
            self.sum[old..end].fill(0);
            stanchion_code::rs::mul_into(&mut self.sum[old..end], new, factor);
        }
        self.filled = self.filled.max(end);
    }

    /// Up to `end` nothing changes any more.
    fn seal(&mut self, end: usize) {
        let end = end.min(self.len);
        if end > self.sealed {
            self.crc.update(&self.sum[self.sealed..end]);
            self.sealed = end;
        }
    }

    /// Is everything applied?
    pub fn complete(&self) -> bool {
        self.torn == 0 && self.applied.iter().all(|a| *a)
    }

    /// The checksum of the result, which is in the sum's first bytes. Only of a complete fold.
    pub fn finish(mut self) -> Crc {
        assert!(self.complete(), "a stripe is used only when all its members are in it");
        let filled = self.filled;
        self.sum[filled..].fill(0);
        self.seal(self.len);
        self.crc.crc()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
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
        let mut fold = Fold::new(&sources, &mut sum, 4);
        fold.apply(0, a).unwrap();
        fold.apply(0, a).unwrap();
        assert_eq!(fold.apply(1, b"xz"), Err(FoldError::Damaged { source: 1 }));
        assert_eq!(fold.apply(1, b"x"), Err(FoldError::Damaged { source: 1 }));
        assert!(!fold.complete());
        fold.apply(1, b).unwrap();
        fold.apply(1, b).unwrap();
        let crc = fold.finish();
        assert_eq!(sum, [b'a' ^ b'x', b'b' ^ b'y', b'c', b'd']);
        assert_eq!(crc, crc64(&sum));
    }

    #[test]
    fn a_source_that_ends_wrong_spoils_the_sum() {
        // FM-S5
        let sources = [source(b"abcd")];
        for (bytes, whole) in [(b"abcx".as_slice(), true), (b"abc", true), (b"abcd", false)] {
            let mut sum = [0u8; 4];
            let mut fold = Fold::new(&sources, &mut sum, 4);
            let mut coming = fold.begin(0);
            fold.take(&mut coming, bytes).unwrap();
            if whole {
                assert_eq!(fold.end(coming), Err(FoldError::Damaged { source: 0 }));
            }
            assert!(!fold.complete());
            // Not even what is right makes it good again.
            fold.apply(0, b"abcd").unwrap();
            assert!(!fold.complete());
        }
        let mut sum = [0u8; 4];
        let mut fold = Fold::new(&sources, &mut sum, 4);
        let mut coming = fold.begin(0);
        fold.take(&mut coming, b"ab").unwrap();
        assert_eq!(fold.take(&mut coming, b"cde"), Err(FoldError::Damaged { source: 0 }));
        assert!(!fold.complete());
    }

    #[test]
    fn who_trusts_learns_it_from_the_result() {
        // FM-S5, FM-S8
        let sources = [source(b"abcd"), source(b"xy")];
        let mut sum = [0u8; 4];
        let mut fold = Fold::new(&sources, &mut sum, 4).trusting();
        fold.apply(0, b"abcd").unwrap();
        let mut coming = fold.begin(1);
        fold.take(&mut coming, b"xz").unwrap();
        fold.end(coming).unwrap();
        assert_ne!(fold.finish(), crc64(&[b'a' ^ b'x', b'b' ^ b'y', b'c', b'd']));
        // What is too short is not whole for anybody.
        let mut fold = Fold::new(&sources, &mut sum, 4).trusting();
        assert_eq!(fold.apply(0, b"abc"), Err(FoldError::Damaged { source: 0 }));
        let mut coming = fold.begin(1);
        fold.take(&mut coming, b"x").unwrap();
        assert_eq!(fold.end(coming), Err(FoldError::Damaged { source: 1 }));
    }

    #[test]
    #[should_panic(expected = "what is settled does not change")]
    fn what_is_settled_stays() {
        let sources = [source(b"abcd"), source(b"xy")];
        let mut sum = [0u8; 4];
        let mut fold = Fold::new(&sources, &mut sum, 4);
        fold.apply(0, b"abcd").unwrap();
        fold.settle(2);
        let _ = fold.apply(1, b"xy");
    }

    proptest! {
        #[test]
        fn pieces_give_what_wholes_give(
            data in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..40), any::<u8>(), 1usize..50), 1..6),
            len in 0usize..40,
            dirt in any::<u8>(),
            group in 1usize..7,
            window in 1usize..50,
        ) {
            let mut sources: Vec<ChunkSource> = data.iter().map(|(bytes, ..)| source(bytes)).collect();
            for (source, (_, factor, _)) in sources.iter_mut().zip(&data) {
                source.factor = *factor;
            }
            let mut plain = [0u8; 40];
            for (bytes, factor, _) in &data {
                for (sum, byte) in plain.iter_mut().zip(bytes) {
                    *sum ^= stanchion_code::gf::mul(*byte, *factor);
                }
            }
            let mut whole = [dirt; 40];
            let mut fold = Fold::new(&sources, &mut whole, len);
            for (i, (bytes, ..)) in data.iter().enumerate() {
                fold.apply(i, bytes).unwrap();
            }
            prop_assert_eq!(fold.finish(), crc64(&plain[..len]));
            let mut pieces = [dirt; 40];
            let mut fold = Fold::new(&sources, &mut pieces, len);
            for (i, (bytes, _, step)) in data.iter().enumerate().rev() {
                // The second time nothing comes of it.
                for _ in 0..2 {
                    let mut coming = fold.begin(i);
                    bytes.chunks(*step).for_each(|piece| fold.take(&mut coming, piece).unwrap());
                    fold.end(coming).unwrap();
                }
            }
            prop_assert_eq!(fold.finish(), crc64(&plain[..len]));
            // Side by side, in groups.
            let mut beside = [dirt; 40];
            let mut fold = Fold::new(&sources, &mut beside, len);
            let mut buf = Vec::new();
            let groups = data.len().div_ceil(group);
            for (g, group_of) in data.chunks(group).enumerate() {
                let mut comings: Vec<Coming> =
                    (0..group_of.len()).map(|i| fold.begin(g * group + i)).collect();
                for at in (0..40).step_by(window) {
                    for (coming, (bytes, ..)) in comings.iter_mut().zip(group_of) {
                        let read = |to: &mut [u8]| {
                            to.copy_from_slice(bytes.get(at..at + to.len()).ok_or(())?);
                            Ok::<(), ()>(())
                        };
                        fold.take_from(coming, window, &mut buf, read).unwrap();
                    }
                    if g + 1 == groups {
                        fold.settle(at + window);
                    }
                }
                comings.into_iter().for_each(|coming| fold.end(coming).unwrap());
            }
            prop_assert_eq!(fold.finish(), crc64(&plain[..len]));
            prop_assert_eq!(beside, plain);
            prop_assert_eq!(whole, plain);
            prop_assert_eq!(pieces, plain);
        }
    }
}
