//! Changed blocks by comparing hashes: works with any memory that can be read.
//!
//! XXH3 with 128 bits, keyed with a random seed. A change that keeps the hash would go unnoticed, and no
//! later check could find it. A CRC-64 is linear: it misses a change whenever the difference of old and
//! new is a multiple of its polynomial, whatever the data, so values that drift by a fixed pattern meet
//! the same difference in millions of blocks at every checkpoint. With 128 mixed bits 2^40 compared
//! blocks miss a change with probability 2^-88. Nobody attacks their own memory, so nothing
//! cryptographic is needed, and that would be slower than memory.

use std::hash::{BuildHasher, RandomState};

use twox_hash::XxHash3_128;

use super::runs::{Run, Runs};
use crate::copy::copy_out;

pub(super) struct Hashes {
    block: usize,
    seed: u64,
    /// One for each block; empty until the first look.
    known: Vec<u128>,
    /// Memory that others may write is never hashed in place.
    buffer: Vec<u8>,
}

impl Hashes {
    pub(super) fn new(block: usize) -> Hashes {
        let seed = RandomState::new().hash_one(block);
        Hashes { block, seed, known: Vec::new(), buffer: vec![0; block] }
    }

    pub(super) fn forget(&mut self) {
        self.known = Vec::new();
    }

    /// The blocks that differ from the last look; `None` at the first.
    ///
    /// # Safety
    /// `len` bytes from `start` on are readable.
    pub(super) unsafe fn look(&mut self, start: *const u8, len: usize, max: usize) -> Option<Runs> {
        let first = self.known.is_empty();
        let mut runs = Runs::new(max);
        for i in 0..len.div_ceil(self.block) {
            let offset = i * self.block;
            let n = self.block.min(len - offset);
            // SAFETY: the part lies in the caller's readable range; the buffer is ours and as long as a block.
            unsafe { copy_out(start.wrapping_add(offset), self.buffer.as_mut_ptr(), n) };
            let hash = XxHash3_128::oneshot_with_seed(self.seed, &self.buffer[..n]);
            match self.known.get_mut(i) {
                Some(known) if *known == hash => {}
                Some(known) => {
                    *known = hash;
                    runs.push(Run { offset, len: n });
                }
                None => self.known.push(hash),
            }
        }
        (!first).then_some(runs)
    }
}
