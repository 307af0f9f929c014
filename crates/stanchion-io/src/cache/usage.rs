//! What counts against a cache's limit.

use std::collections::{BTreeMap, HashMap};

use stanchion_format::ids::{Key, SlotId};

/// One slot's part of one dataset.
#[derive(Debug, Default)]
struct Part {
    files: u64,
    /// Bytes at each place of the parity file.
    parity: BTreeMap<u64, u32>,
}

/// Bytes in use, by what they are for.
#[derive(Debug)]
pub(super) struct Usage {
    max: u64,
    total: u64,
    parts: HashMap<(Key, SlotId), Part>,
}

/// The limit would be exceeded.
#[derive(Debug)]
pub(super) struct Full;

impl Usage {
    pub(super) fn new(max: u64) -> Usage {
        Usage { max, total: 0, parts: HashMap::new() }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Ranks have written `bytes` as this slot's files. They count even if they are too many: they are there.
    pub(super) fn found_files(&mut self, key: Key, slot: SlotId, bytes: u64) -> Result<(), Full> {
        let part = self.parts.entry((key, slot)).or_default();
        self.total = (self.total - part.files).saturating_add(bytes);
        part.files = bytes;
        if self.total > self.max { Err(Full) } else { Ok(()) }
    }

    /// We are about to write this slot's files ourselves.
    pub(super) fn admit_files(&mut self, key: Key, slot: SlotId, bytes: u64) -> Result<(), Full> {
        let before = self.parts.get(&(key, slot)).map_or(0, |p| p.files);
        let total = (self.total - before).saturating_add(bytes);
        if total > self.max && bytes > before {
            return Err(Full);
        }
        self.parts.entry((key, slot)).or_default().files = bytes;
        self.total = total;
        Ok(())
    }

    /// We are about to write `len` bytes of parity; what was charged for this place before.
    pub(super) fn admit_parity(
        &mut self,
        key: Key,
        slot: SlotId,
        index: u64,
        len: u32,
    ) -> Result<u32, Full> {
        let part = self.parts.entry((key, slot)).or_default();
        let before = part.parity.get(&index).copied().unwrap_or(0);
        let total = (self.total - u64::from(before)).saturating_add(len.into());
        if total > self.max && len > before {
            return Err(Full);
        }
        part.parity.insert(index, len);
        self.total = total;
        Ok(before)
    }

    pub(super) fn forget(&mut self, key: Key) {
        let mut freed = 0u64;
        self.parts.retain(|(k, _), part| {
            if *k == key {
                freed += part.files + part.parity.values().map(|l| u64::from(*l)).sum::<u64>();
            }
            *k != key
        });
        self.total -= freed;
    }

    pub(super) fn clear(&mut self) {
        self.parts.clear();
        self.total = 0;
    }
}
