//! Does shared memory still have the bytes that checksums were made of (FM-P6)?
//!
//! An increment has its predecessor's bytes, and a rank's stray write may have spoiled them. A checksum made of them
//! anew would be a good one of bad bytes, and nobody would ever find out. So who makes one where others are known
//! already compares those with what is there now, also beyond what the new one is of. *Instead of* a checksum of each
//! page, which would need no reading beyond: every full checkpoint would pay for it.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use stanchion_format::checksum::{Crc, Crc64, crc64};

use super::held::{SUM_BYTES, State, Used};
use crate::fs;

/// Ranges that were compared: once is enough for a manifest. By extent and offset.
#[derive(Default)]
pub(super) struct Vouched(Mutex<HashSet<(usize, u64)>>);

impl Vouched {
    /// Is it for the first time?
    fn first(&self, used: &Used, offset: u64) -> bool {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert((std::ptr::from_ref(used).addr(), offset))
    }
}

impl Used {
    /// The checksum of a range, if it is known or in memory: each byte is read for it once, by who stores it or by who
    /// makes a manifest of it. `BADMSG` if bytes are not what they were.
    pub(super) fn sum(
        &self,
        offset: u64,
        bytes: u64,
        vouched: &Vouched,
    ) -> fs::Result<Option<Crc>> {
        let version = {
            let state = self.reading();
            if let Some(sum) = state.sum(offset, bytes) {
                return Ok(Some(sum));
            }
            state.version
        };
        let Some(crc) = self.sum_anew(offset, bytes) else { return Ok(None) };
        // Where sums of other ranges are, those are what the store goes by.
        if !self.note((offset, bytes), crc, version) {
            self.compare((offset, bytes), None, vouched)?;
        }
        Ok(Some(crc))
    }

    /// `bytes` were read from `offset` on for a checksum: are they what was there when one was made before? What none
    /// was made of gets its own, which the store makes if there is one.
    pub(super) fn vouch(&self, offset: u64, bytes: &[u8], vouched: &Vouched) -> fs::Result<()> {
        let range = (offset, bytes.len() as u64);
        let (version, none) = {
            let state = self.reading();
            (state.version, State::touching(&state.sums, |(len, _)| *len, range).is_empty())
        };
        if none {
            if !self.has_store() {
                self.note(range, crc64(bytes), version);
            }
            return Ok(());
        }
        self.compare(range, Some(bytes), vouched)
    }

    /// Compares all sums that have bytes of a range; `have`: what was read of it.
    fn compare(&self, range: (u64, u64), have: Option<&[u8]>, vouched: &Vouched) -> fs::Result<()> {
        let (version, sums) = {
            let state = self.reading();
            (state.version, State::touching(&state.sums, |(len, _)| *len, range))
        };
        for (at, (len, crc)) in sums {
            let within = at >= range.0 && at + len <= range.0 + range.1;
            let found = match have.filter(|_| within) {
                Some(have) => Some(crc64(&have[(at - range.0) as usize..][..len as usize])),
                None if vouched.first(self, at) => self.sum_anew(at, len),
                None => continue,
            };
            // What is in the store alone is compared by who reads it; what was repaired meanwhile has other sums.
            if found.is_some_and(|found| found != crc) && self.reading().version == version {
                return Err(Errno::BADMSG);
            }
        }
        Ok(())
    }

    /// Of what is in memory.
    fn sum_anew(&self, offset: u64, bytes: u64) -> Option<Crc> {
        let mut crc = Crc64::new();
        let mut buf = [0; SUM_BYTES];
        let mut done = 0;
        while done < bytes {
            let step = (bytes - done).min(SUM_BYTES as u64);
            let buf = &mut buf[..step as usize];
            self.reading().memory.as_ref()?.read(offset + done, buf);
            crc.update(buf);
            done += step;
        }
        Some(crc.crc())
    }

    /// The sum of a range of which no sum is known; `version`: when it was read.
    fn note(&self, (offset, bytes): (u64, u64), crc: Crc, version: u64) -> bool {
        let mut state = self.writing();
        let free = State::touching(&state.sums, |(len, _)| *len, (offset, bytes)).is_empty();
        if free && state.version == version {
            state.sums.insert(offset, (bytes, crc));
        }
        free
    }
}
