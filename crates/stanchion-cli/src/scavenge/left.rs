//! What dead jobs left in their caches: of which line it is, and whether anything of it is worth saving.

use crate::jobdir::{self, Found};
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::holding::Holding;
use stanchion_format::ids::{Ancestry, Incarnation, JobId, Key, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_io::cache::Cache;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// One node's cache with something in it.
#[derive(Debug)]
pub struct Node {
    /// Where.
    pub cache: PathBuf,
    /// What is known of it.
    pub holdings: Vec<Holding>,
}

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Looked {
    /// Nodes of this job's prefix.
    pub nodes: Vec<Node>,
    /// Records that are not believed, and caches that cannot be read, with the reason.
    pub refused: Vec<(PathBuf, String)>,
}

/// What it is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// There is nothing.
    Nothing,
    /// The newest that there is something of; too much of every one is lost.
    Unrecoverable(Key),
    /// A later run went on from something else: what is left is of another line (FM-S1).
    Stale(Key),
    /// The prefix has this one of the line already, and nothing is newer.
    Persistent(Key),
    /// This can be saved.
    Savable(Key),
}

/// Looks at these caches; `job`: what else there is of others is refused.
pub fn look(caches: &[PathBuf], job: JobId) -> Looked {
    let mut found = Looked::default();
    for cache in caches {
        match Cache::left(cache) {
            Ok(left) => {
                found
                    .refused
                    .extend(left.refused.into_iter().map(|(file, why)| (cache.join(file), why)));
                let (holdings, others): (Vec<_>, Vec<_>) =
                    left.holdings.into_iter().partition(|h| h.job == job);
                if !others.is_empty() {
                    found.refused.push((cache.clone(), "it is of another prefix".into()));
                }
                if !holdings.is_empty() {
                    found.nodes.push(Node { cache: cache.clone(), holdings });
                }
            }
            Err(t) => found.refused.push((cache.clone(), t.to_string())),
        }
    }
    found
}

/// The line that counts: the newest that anything is of.
fn line(holdings: &[&Holding]) -> Option<(Incarnation, Ancestry)> {
    let newest = holdings.iter().max_by_key(|h| h.inc)?;
    Some((newest.inc, newest.ancestry.clone()))
}

/// Slots of a dataset whose data is there.
pub fn slots_there(holdings: &[&Holding], key: Key) -> BTreeSet<SlotId> {
    holdings.iter().filter(|h| h.info.key == key && h.data).map(|h| h.slot).collect()
}

fn recoverable(parts: &[&Holding]) -> bool {
    let Some(first) = parts.first() else { return false };
    let sets = &first.info.sets;
    let has = |slot: SlotId, wanted: fn(&Holding) -> bool| {
        parts.iter().any(|h| h.slot == slot && wanted(h))
    };
    let missing = (0..sets.slots).map(SlotId).filter(|s| !has(*s, |h| h.data));
    let mut judged = BTreeSet::new();
    let mut lost = missing.filter(|s| judged.insert(sets.set_of(*s)));
    lost.all(|slot| sets.recoverable(slot, |s| has(s, |h| h.data), |s| has(s, |h| h.parity)))
}

/// What all that is worth, beside what the prefix has.
pub fn worth(holdings: &[&Holding], records: &[IndexRecord]) -> Worth {
    let Some((inc, ancestry)) = line(holdings) else { return Worth::Nothing };
    let mut datasets: BTreeMap<Key, Vec<&Holding>> = BTreeMap::new();
    for h in holdings.iter().filter(|h| ancestry.admits(inc, h.info.key)) {
        datasets.entry(h.info.key).or_default().push(h);
    }
    let Some(newest) = datasets.keys().next_back().copied() else { return Worth::Nothing };
    datasets.retain(|_, parts| recoverable(parts));
    let flag = |key: &Key, flag: u32| datasets[key][0].info.flags & flag != 0;
    // Those of the line in the prefix: of its own incarnations, or written by who went on from it.
    let there = records.iter().filter(|r| {
        r.inc == inc || ancestry.admits(inc, r.info.key) || r.ancestry.admits(r.inc, newest)
    });
    let there: BTreeSet<Key> = there.map(|r| r.info.key).collect();
    let Some(best) = datasets.keys().next_back().copied() else {
        return there.last().map_or(Worth::Unrecoverable(newest), |k| {
            if *k >= newest { Worth::Persistent(*k) } else { Worth::Unrecoverable(newest) }
        });
    };
    let later = records.iter().max_by_key(|r| (r.inc, r.info.key));
    if let Some(later) = later
        && later.inc > inc
        && !later.ancestry.admits(later.inc, best)
    {
        return Worth::Stale(later.info.key);
    }
    let wanted = |key: &&Key| {
        let newer = there.last().is_none_or(|k| *k < **key);
        flag(key, FLAG_CHECKPOINT) && newer || flag(key, FLAG_OUTPUT) && !there.contains(key)
    };
    match (datasets.keys().rev().find(wanted), there.last()) {
        (Some(key), _) => Worth::Savable(*key),
        (None, Some(key)) => Worth::Persistent(*key),
        (None, None) => Worth::Unrecoverable(best),
    }
}

/// Dead jobs whose caches stay for `stanchion scavenge`: of each prefix the youngest that has anything to save. With
/// `own` what `root`'s index has is known; with `from_scratch` nothing of it is wanted.
pub fn kept(
    dead: &[Found],
    root: &Path,
    (job, records): (JobId, &[IndexRecord]),
    from_scratch: bool,
) -> BTreeSet<PathBuf> {
    let mut youngest: BTreeMap<&Path, (u64, &Path)> = BTreeMap::new();
    for found in dead {
        let Some(info) = &found.info else { continue };
        let own = info.prefix == root;
        if own && from_scratch {
            continue;
        }
        let caches = jobdir::node_caches(found);
        let left: Vec<Holding> =
            caches.iter().filter_map(|c| Cache::left(c).ok()).flat_map(|l| l.holdings).collect();
        let of = if own { Some(job) } else { left.first().map(|h| h.job) };
        let left: Vec<&Holding> = left.iter().filter(|h| Some(h.job) == of).collect();
        // The index of another prefix may be out of reach.
        let records = if own { records } else { &[] };
        if matches!(worth(&left, records), Worth::Savable(_)) {
            let this = (info.started_unix_s, found.path.as_path());
            let place = youngest.entry(&info.prefix).or_insert(this);
            *place = (*place).max(this);
        }
    }
    youngest.into_values().map(|(_, path)| path.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::checksum::Crc;
    use stanchion_format::ids::{DatasetNo, Epoch};
    use stanchion_format::index::INDEX_VERSION;
    use stanchion_format::layout::{Scheme, Sets};
    use stanchion_format::peer::DatasetInfo;

    fn inc(epoch: u32) -> Incarnation {
        Incarnation { epoch: Epoch(epoch.into()), count: 1 }
    }

    fn key(no: u64, epoch: u32) -> Key {
        Key { no: DatasetNo(no), inc: inc(epoch) }
    }

    fn info(key: Key) -> DatasetInfo {
        DatasetInfo {
            key,
            name: "x".into(),
            flags: FLAG_CHECKPOINT,
            ranks: 3,
            sets: Sets::new(Scheme::Xor, 3, 3),
            chunk_bytes: 4096,
            bytes: 0,
            files: 0,
            placement: [].into(),
        }
    }

    fn holding(key: Key, slot: u32, data: bool, parity: bool) -> Holding {
        Holding {
            no: 1,
            job: JobId(1),
            inc: key.inc,
            ancestry: Ancestry::default(),
            info: info(key),
            slot: SlotId(slot),
            data,
            parity,
            manifests: Vec::new(),
        }
    }

    fn record(key: Key, inc: Incarnation, ancestry: Ancestry) -> IndexRecord {
        IndexRecord {
            version: INDEX_VERSION,
            job: JobId(1),
            epoch: inc.epoch,
            inc,
            ancestry,
            info: info(key),
            unix_s: 0,
            slots: Vec::new(),
            containers: None,
            times: None,
            crc: Crc(0),
        }
    }

    fn of(holdings: &[Holding], records: &[IndexRecord]) -> Worth {
        worth(&holdings.iter().collect::<Vec<_>>(), records)
    }

    #[test]
    fn the_newest_that_can_be_rebuilt() {
        // FM-A1, FM-L2
        assert_eq!(of(&[], &[]), Worth::Nothing);
        let six = |slot| holding(key(6, 1), slot, true, true);
        let seven = |slot| holding(key(7, 1), slot, true, false);
        assert_eq!(of(&[six(0), six(2)], &[]), Worth::Savable(key(6, 1)));
        // No parity yet: all of its data must be there.
        let mut both = vec![six(0), six(2), seven(0), seven(2)];
        assert_eq!(of(&both, &[]), Worth::Savable(key(6, 1)));
        both.push(seven(1));
        assert_eq!(of(&both, &[]), Worth::Savable(key(7, 1)));
        assert_eq!(of(&[six(0), seven(1)], &[]), Worth::Unrecoverable(key(7, 1)));
        // Data was in memory alone; nothing but its parity is left.
        let gone = [0, 1, 2].map(|slot| holding(key(6, 1), slot, false, true));
        assert_eq!(of(&gone, &[]), Worth::Unrecoverable(key(6, 1)));
    }

    #[test]
    fn what_the_prefix_has_need_not_be_saved() {
        let left = [0, 1, 2].map(|slot| holding(key(6, 1), slot, true, true));
        let same = record(key(6, 1), inc(1), Ancestry::default());
        let older = record(key(5, 1), inc(1), Ancestry::default());
        let newer = record(key(7, 1), inc(1), Ancestry::default());
        assert_eq!(of(&left, &[older.clone(), same]), Worth::Persistent(key(6, 1)));
        assert_eq!(of(&left, &[newer]), Worth::Persistent(key(7, 1)));
        assert_eq!(of(&left, &[older]), Worth::Savable(key(6, 1)));
    }

    #[test]
    fn a_later_run_makes_it_stale() {
        // FM-S1: it went on from 3, so that 6 is of another line; who went on from 6 has it.
        let left = [0, 1, 2].map(|slot| holding(key(6, 1), slot, true, true));
        let went_on = |from| record(key(4, 2), inc(2), Ancestry(vec![(inc(1), DatasetNo(from))]));
        assert_eq!(of(&left, &[went_on(3)]), Worth::Stale(key(4, 2)));
        assert_ne!(of(&left, &[went_on(6)]), Worth::Stale(key(4, 2)));
        // Of two lines side by side the newer counts, whatever the numbers.
        let newer = [0, 1, 2].map(|slot| holding(key(2, 2), slot, true, true));
        let all: Vec<Holding> = left.into_iter().chain(newer).collect();
        assert_eq!(of(&all, &[]), Worth::Savable(key(2, 2)));
    }
}
