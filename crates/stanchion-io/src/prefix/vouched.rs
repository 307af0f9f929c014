//! Which records vouch for a path, without reading every manifest every time.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};

use stanchion_format::checksum::{Crc, crc64};
use stanchion_format::ids::SlotId;
use stanchion_format::index::{IndexRecord, Layout};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Trouble};

use super::Prefix;

/// Paths whose checksums are remembered, at most; eight bytes each.
const REMEMBERED_MAX: usize = 4 << 20;

/// Checksums of the paths of manifests, sorted, by the manifest's own checksum.
#[derive(Debug, Default)]
pub(super) struct PathSets {
    sets: HashMap<Crc, Arc<[u64]>>,
    paths: usize,
}

fn hash(path: &str) -> u64 {
    crc64(path.as_bytes()).0
}

impl Prefix {
    /// Checksums of the paths of one slot of a record. A manifest that is lost or damaged names none:
    /// its dataset cannot be used in any case.
    pub(super) fn path_set(
        &self,
        rec: &IndexRecord,
        slot: SlotId,
        crc: Crc,
    ) -> Result<Arc<[u64]>, Trouble> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(set) = known().sets.get(&crc) {
            return Ok(set.clone());
        }
        let Some(manifest) = self.manifest_if_good(rec, slot)? else { return Ok(Arc::new([])) };
        let mut set: Vec<u64> = manifest.files.iter().map(|f| hash(&f.path)).collect();
        set.sort_unstable();
        let set: Arc<[u64]> = set.into();
        let mut known = known();
        if known.paths + set.len() <= REMEMBERED_MAX
            && known.sets.insert(crc, set.clone()).is_none()
        {
            known.paths += set.len();
        }
        Ok(set)
    }

    fn manifest_if_good(
        &self,
        rec: &IndexRecord,
        slot: SlotId,
    ) -> Result<Option<Manifest>, Trouble> {
        match self.read_slot(rec, slot) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(Trouble { cause: Cause::Malformed | Cause::Missing, .. }) => Ok(None),
            Err(trouble) => Err(trouble),
        }
    }

    /// Does the record vouch for any of these paths? `first`: the slot that most likely names them.
    pub(super) fn vouches(
        &self,
        rec: &IndexRecord,
        first: SlotId,
        paths: &BTreeSet<&str>,
    ) -> Result<bool, Trouble> {
        if rec.layout() == Layout::Containers {
            return Ok(false);
        }
        let mut slots = rec.slots.clone();
        slots.sort_by_key(|(s, _)| *s != first);
        for (slot, crc) in slots {
            let set = self.path_set(rec, slot, crc)?;
            if !paths.iter().any(|p| set.binary_search(&hash(p)).is_ok()) {
                continue;
            }
            // A checksum may be another path's.
            let manifest = self.manifest_if_good(rec, slot)?;
            if manifest.is_some_and(|m| m.files.iter().any(|f| paths.contains(f.path.as_str()))) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Does any of these records vouch for this path? May err towards yes.
    pub(super) fn anyone_vouches(
        &self,
        records: &[IndexRecord],
        path: &str,
    ) -> Result<bool, Trouble> {
        for rec in records.iter().filter(|rec| rec.layout() == Layout::Files) {
            for (slot, crc) in &rec.slots {
                if self.path_set(rec, *slot, *crc)?.binary_search(&hash(path)).is_ok() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }
}
