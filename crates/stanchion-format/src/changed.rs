//! Which bytes of a file are its own, and which are those of an earlier file at the same place.
//!
//! As a list of parts, one for each run, this was the greater half of what an incremental checkpoint took: a tenth of
//! 64 Ki pages are 13 000 of them. Two lengths for each run, as varints, are 3 to 5 bytes. They are read once, when they
//! arrive: a [`Changed`] that exists is sound.

use crate::limits::MEMORY_PARTS_MAX;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A varint of 64 bits has at most so many bytes.
const VARINT_BYTES_MAX: usize = 10;
/// Of `MEMORY_PARTS_MAX` runs, none longer than a varint may be.
const CHANGED_BYTES_MAX: usize = MEMORY_PARTS_MAX * 2 * VARINT_BYTES_MAX;

/// A stretch of a file: first bytes that are the base's, then bytes of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// As the base has them at the same place.
    pub same: u64,
    /// Its own.
    pub own: u64,
}

/// What of a file is its own, in order, as lengths of [`Stretch`]es: all have bytes of their own but the last, all
/// have bytes of the base's but the first.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Changed {
    lengths: Vec<u8>,
    sums: Sums,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    bytes: u64,
    own: u64,
    runs: usize,
}

/// Why bytes are no such list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangedError {
    /// A length is cut off, or longer than a number may be.
    #[error("a length is not a number")]
    Length,
    /// A stretch has none of the bytes it must have.
    #[error("a stretch is empty")]
    Empty,
    /// The lengths have no sum.
    #[error("the file would be longer than any")]
    Sum,
    /// More stretches than a file may have parts.
    #[error("more stretches than a file may have")]
    Many,
}

impl Changed {
    /// The file's size, bytes.
    pub fn bytes(&self) -> u64 {
        self.sums.bytes
    }

    /// Of that: its own.
    pub fn own(&self) -> u64 {
        self.sums.own
    }

    /// How many stretches it has.
    pub fn runs(&self) -> usize {
        self.sums.runs
    }

    /// In order.
    pub fn stretches(&self) -> impl Iterator<Item = Stretch> {
        // What is wrong was found when it was made: nothing ends this but its end.
        Lengths(&self.lengths).map_while(Result::ok)
    }

    /// Checks lengths that came from elsewhere.
    pub fn parse(lengths: Vec<u8>) -> Result<Changed, ChangedError> {
        if lengths.len() > CHANGED_BYTES_MAX {
            return Err(ChangedError::Many);
        }
        let mut sums = Sums::default();
        let mut ended = false;
        for stretch in Lengths(&lengths) {
            let Stretch { same, own } = stretch?;
            if ended || (same == 0 && (sums.runs > 0 || own == 0)) {
                return Err(ChangedError::Empty);
            }
            ended = own == 0;
            let both = same.checked_add(own).ok_or(ChangedError::Sum)?;
            sums.bytes = sums.bytes.checked_add(both).ok_or(ChangedError::Sum)?;
            sums.own += own;
            sums.runs += 1;
            if sums.runs > MEMORY_PARTS_MAX {
                return Err(ChangedError::Many);
            }
        }
        Ok(Changed { lengths, sums })
    }
}

/// Bytes as stretches.
struct Lengths<'a>(&'a [u8]);

impl Lengths<'_> {
    fn length(&mut self) -> Result<u64, ChangedError> {
        let mut value = 0u64;
        for n in 0..VARINT_BYTES_MAX {
            let (byte, rest) = self.0.split_first().ok_or(ChangedError::Length)?;
            self.0 = rest;
            let bits = u64::from(byte & 0x7f);
            let shifted = bits << (7 * n);
            if shifted >> (7 * n) != bits {
                return Err(ChangedError::Length);
            }
            value |= shifted;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(ChangedError::Length)
    }
}

impl Iterator for Lengths<'_> {
    type Item = Result<Stretch, ChangedError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let same = self.length();
        let stretch = same.and_then(|same| Ok(Stretch { same, own: self.length()? }));
        if stretch.is_err() {
            self.0 = &[];
        }
        Some(stretch)
    }
}

/// Puts a [`Changed`] together.
#[derive(Clone, Debug, Default)]
pub struct ChangedWriter {
    lengths: Vec<u8>,
    sums: Sums,
    /// Not written yet: more of the same may follow.
    last: Stretch,
}

impl ChangedWriter {
    /// The next bytes are the base's.
    pub fn same(&mut self, bytes: u64) {
        if bytes > 0 && self.last.own > 0 {
            self.flush();
        }
        self.last.same += bytes;
    }

    /// The next bytes are the file's own.
    pub fn own(&mut self, bytes: u64) {
        self.last.own += bytes;
    }

    /// How many stretches there are so far.
    pub fn runs(&self) -> usize {
        self.sums.runs + usize::from(self.last != Stretch::default())
    }

    fn flush(&mut self) {
        let Stretch { same, own } = std::mem::take(&mut self.last);
        for mut length in [same, own] {
            while length >= 0x80 {
                self.lengths.push(length as u8 | 0x80);
                length >>= 7;
            }
            self.lengths.push(length as u8);
        }
        self.sums.bytes += same + own;
        self.sums.own += own;
        self.sums.runs += 1;
    }

    /// All of it.
    pub fn finish(mut self) -> Changed {
        if self.last != Stretch::default() {
            self.flush();
        }
        Changed { lengths: self.lengths, sums: self.sums }
    }
}

impl fmt::Debug for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.sums.fmt(f)
    }
}

impl Serialize for Changed {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.lengths)
    }
}

impl<'de> Deserialize<'de> for Changed {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Changed, D::Error> {
        from.deserialize_bytes(ChangedVisitor)
    }
}

struct ChangedVisitor;

impl<'de> Visitor<'de> for ChangedVisitor {
    type Value = Changed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lengths of what is the same and what is not")
    }

    fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Changed, E> {
        if bytes.len() > CHANGED_BYTES_MAX {
            return Err(E::custom(ChangedError::Many));
        }
        Changed::parse(bytes.to_vec()).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Changed, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = from.next_element()? {
            if bytes.len() >= CHANGED_BYTES_MAX {
                return Err(A::Error::custom(ChangedError::Many));
            }
            bytes.push(byte);
        }
        Changed::parse(bytes).map_err(A::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(steps: &[(bool, u64)]) -> Changed {
        let mut writer = ChangedWriter::default();
        for (own, bytes) in steps {
            if *own { writer.own(*bytes) } else { writer.same(*bytes) }
        }
        let runs = writer.runs();
        let changed = writer.finish();
        assert_eq!(changed.runs(), runs);
        changed
    }

    #[test]
    fn neighbours_are_one() {
        let changed =
            written(&[(true, 5), (true, 0), (true, 7), (false, 0), (true, 1), (false, 300)]);
        let want = [Stretch { same: 0, own: 13 }, Stretch { same: 300, own: 0 }];
        assert_eq!(changed.stretches().collect::<Vec<_>>(), want);
        assert_eq!((changed.bytes(), changed.own(), changed.runs()), (313, 13, 2));
        assert_eq!(written(&[]), Changed::default());
    }

    #[test]
    fn what_a_liar_may_say_is_refused() {
        let max = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let cases: [(&[&[u8]], ChangedError); 8] = [
            (&[&[1]], ChangedError::Length),
            (&[&[1, 0x80]], ChangedError::Length),
            (&[&[0xff; 9], &[0x02, 0]], ChangedError::Length),
            (&[&[0x80; 10], &[0, 1]], ChangedError::Length),
            (&[&[0, 0]], ChangedError::Empty),
            (&[&[0, 1, 0, 1]], ChangedError::Empty),
            (&[&[1, 0, 1, 1]], ChangedError::Empty),
            (&[&max, &max], ChangedError::Sum),
        ];
        for (bytes, why) in cases {
            assert_eq!(Changed::parse(bytes.concat()), Err(why), "{bytes:?}");
        }
        let many = [1, 1].repeat(MEMORY_PARTS_MAX + 1);
        assert_eq!(Changed::parse(many[2..].to_vec()).map(|c| c.runs()), Ok(MEMORY_PARTS_MAX));
        assert_eq!(Changed::parse(many), Err(ChangedError::Many));
        assert_eq!(Changed::parse(vec![0; CHANGED_BYTES_MAX + 1]), Err(ChangedError::Many));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(steps in proptest::collection::vec((any::<bool>(), 0..1u64 << 40), 0..200)) {
            let changed = written(&steps);
            let bytes = postcard::to_stdvec(&changed).unwrap();
            prop_assert_eq!(postcard::from_bytes::<Changed>(&bytes), Ok(changed.clone()));
            // Byte by byte it is the same.
            let mut at = 0;
            let mut all: Vec<(bool, u64)> = Vec::new();
            for Stretch { same, own } in changed.stretches() {
                all.extend([(false, same), (true, own)]);
                at += same + own;
            }
            prop_assert_eq!(at, changed.bytes());
            let sums = |steps: &[(bool, u64)]| {
                let mut out: Vec<(bool, u64)> = Vec::new();
                for (own, bytes) in steps.iter().filter(|s| s.1 > 0) {
                    match out.last_mut() {
                        Some(last) if last.0 == *own => last.1 += bytes,
                        _ => out.push((*own, *bytes)),
                    }
                }
                out
            };
            prop_assert_eq!(sums(&all), sums(&steps));
        }

        #[test]
        fn what_is_read_is_sound(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(changed) = Changed::parse(bytes) {
                let all: Vec<Stretch> = changed.stretches().collect();
                prop_assert_eq!(all.len(), changed.runs());
                prop_assert_eq!(all.iter().map(|s| s.own).sum::<u64>(), changed.own());
                prop_assert_eq!(all.iter().map(|s| s.same + s.own).sum::<u64>(), changed.bytes());
                prop_assert!(all.iter().skip(1).all(|s| s.same > 0));
                prop_assert!(all.iter().rev().skip(1).all(|s| s.own > 0));
            }
        }
    }
}
