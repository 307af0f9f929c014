//! Which dataset a job goes on from: the newest that is complete and recoverable on all ranks.

use crate::bugs::{Bug, Bugs};
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::{AgentId, Ancestry, Incarnation, Key, Level, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::peer::{Cause, DatasetInfo, Holdings, Source, Trouble};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that is known after a survey.
pub(super) struct Known<'a> {
    pub holdings: &'a BTreeMap<AgentId, Holdings>,
    pub index: &'a [IndexRecord],
    /// The index could be read.
    pub index_read: bool,
    /// Where each slot was, and is if that agent answered.
    pub slots: &'a [AgentId],
    /// What has been tried in vain.
    pub excluded: &'a BTreeSet<(Key, bool)>,
    /// A dataset asked for by name.
    pub named: Option<&'a str>,
    pub fetch: bool,
    pub bugs: Bugs,
}

/// A dataset that could be gone on from.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub info: DatasetInfo,
    pub source: Source,
    pub persistent: bool,
    /// Slots whose data must be rebuilt.
    pub rebuild: Vec<SlotId>,
    /// If any must: slots whose parity is not whole.
    pub no_parity: Vec<SlotId>,
}

/// What came out.
#[derive(Debug, Default)]
pub(super) struct Choice {
    pub restart: Option<Candidate>,
    /// Newer ones that cannot be used, with the reason.
    pub skipped: Vec<(Key, String, Trouble)>,
    /// Others that stay in the caches: older checkpoints, and outputs that still must be flushed.
    pub keep: Vec<Candidate>,
    /// The newest dataset that was ever committed in this run.
    pub newest_committed: Option<Key>,
    /// The greatest number in use anywhere.
    pub newest_no: u64,
    /// The incarnation whose line is gone on with, and its ancestry.
    pub parent: Incarnation,
    pub ancestry: Ancestry,
}

impl Known<'_> {
    /// The line of incarnations that counts: that of the newest incarnation any survivor is in; without
    /// survivors, that of the newest record in the index.
    fn line(&self) -> (Incarnation, Ancestry) {
        let held = self.holdings.values().max_by_key(|h| h.inc).filter(|h| h.inc.epoch.0 > 0);
        if let Some(h) = held {
            return (h.inc, h.ancestry.clone());
        }
        self.index
            .iter()
            .max_by_key(|r| (r.inc, r.info.key))
            .map(|r| (r.inc, r.ancestry.clone()))
            .unwrap_or_default()
    }

    pub(super) fn choose(&self) -> Choice {
        let (parent, ancestry) = self.line();
        let mut choice = Choice { parent, ancestry, ..Choice::default() };
        choice.newest_committed = self.holdings.values().filter_map(|h| h.newest_committed).max();
        let cached = self.cached(&choice);
        let indexed: BTreeMap<Key, &IndexRecord> = self
            .index
            .iter()
            .filter(|r| choice.ancestry.admits(choice.parent, r.info.key) || r.inc == choice.parent)
            .map(|r| (r.info.key, r))
            .collect();
        let all_numbers = self
            .index
            .iter()
            .map(|r| r.info.key.no.0)
            .chain(self.holdings.values().flat_map(|h| h.datasets.iter().map(|d| d.info.key.no.0)))
            .chain(choice.newest_committed.map(|k| k.no.0));
        choice.newest_no = all_numbers.max().unwrap_or(0);
        let mut keys: BTreeSet<Key> = cached.keys().copied().collect();
        if self.fetch || self.named.is_some() {
            keys.extend(indexed.keys().copied());
        }
        for key in keys.into_iter().rev() {
            self.consider(key, cached.get(&key), indexed.get(&key).copied(), &mut choice);
        }
        choice
    }

    /// Committed datasets of the line that survivors hold anything of.
    fn cached(&self, choice: &Choice) -> BTreeMap<Key, DatasetInfo> {
        let mut cached: BTreeMap<Key, DatasetInfo> = BTreeMap::new();
        for h in self.holdings.values() {
            for d in &h.datasets {
                let key = d.info.key;
                // FM-S4: any survivor's certificate commits it; without one it is dropped.
                let committed = d.certified || self.bugs.on(Bug::CommitWithoutCertificate);
                let ours = choice.ancestry.admits(choice.parent, key)
                    || self.bugs.on(Bug::AcceptOldIncarnation);
                if committed && ours {
                    let better = cached.get(&key).is_none_or(|i| i.ranks < d.info.ranks);
                    if better {
                        cached.insert(key, d.info.clone());
                    }
                }
            }
        }
        cached
    }

    fn consider(
        &self,
        key: Key,
        cached: Option<&DatasetInfo>,
        indexed: Option<&IndexRecord>,
        choice: &mut Choice,
    ) {
        let Some(info) = cached.or(indexed.map(|r| &r.info)) else { return };
        let checkpoint = info.flags & FLAG_CHECKPOINT != 0;
        let output = info.flags & FLAG_OUTPUT != 0;
        let persistent = indexed.is_some() || self.persistent(key);
        let recovered = match cached {
            Some(info) if !self.excluded.contains(&(key, false)) => self.recoverable(info),
            Some(_) => Err(Trouble::new(Cause::Damaged)),
            None => Err(Trouble::new(Cause::Missing)),
        };
        let from_cache = recovered.as_ref().ok().map(|rebuild| Candidate {
            info: info.clone(),
            source: Source::Cache,
            persistent,
            rebuild: rebuild.clone(),
            no_parity: if rebuild.is_empty() { Vec::new() } else { self.without(info, true) },
        });
        let wanted = self.named.is_none_or(|n| n == info.name);
        if choice.restart.is_some() || !checkpoint || !wanted {
            // Older, or no checkpoint: stays where it is if it can still be of use.
            let useful = checkpoint || (output && !persistent);
            choice.keep.extend(from_cache.filter(|_| useful));
            return;
        }
        let from_prefix = indexed
            .filter(|_| self.fetch || self.named.is_some())
            .filter(|_| !self.excluded.contains(&(key, true)))
            .map(|r| Candidate {
                info: r.info.clone(),
                source: Source::Prefix,
                persistent: true,
                rebuild: Vec::new(),
                no_parity: Vec::new(),
            });
        match from_cache.or(from_prefix) {
            Some(candidate) => choice.restart = Some(candidate),
            None => {
                let trouble = recovered.err().unwrap_or_else(|| Trouble::new(Cause::BeyondScheme));
                choice.skipped.push((key, info.name.clone(), trouble));
            }
        }
    }

    /// Do agents know that it was persistent, and is it still, or a newer one in its place? A newer one that only began to
    /// replace its files has had its record withdrawn.
    fn persistent(&self, key: Key) -> bool {
        let stands = !self.index_read || self.index.iter().any(|r| r.info.key >= key);
        stands
            && self.holdings.values().any(|h| {
                h.datasets
                    .iter()
                    .any(|d| d.info.key == key && d.levels.contains(&Level::Persistent))
            })
    }

    /// Does the agent of `slot` have its data, or the parity it keeps?
    fn has(&self, key: Key, slot: SlotId, parity: bool) -> bool {
        self.slots
            .get(slot.0 as usize)
            .and_then(|agent| self.holdings.get(agent))
            .and_then(|h| h.datasets.iter().find(|d| d.info.key == key))
            .and_then(|d| d.slots.iter().find(|s| s.slot == slot))
            .is_some_and(|s| if parity { s.parity } else { s.data })
    }

    /// The slots whose data (or parity) is not there.
    fn without(&self, info: &DatasetInfo, parity: bool) -> Vec<SlotId> {
        (0..info.sets.slots).map(SlotId).filter(|s| !self.has(info.key, *s, parity)).collect()
    }

    /// The slots to rebuild, or why not all can be.
    fn recoverable(&self, info: &DatasetInfo) -> Result<Vec<SlotId>, Trouble> {
        if info.sets.slots as usize != self.slots.len() {
            return Err(Trouble::new(Cause::BeyondScheme));
        }
        let rebuild = self.without(info, false);
        let mut judged = BTreeSet::new();
        for slot in &rebuild {
            // Once for each set.
            if !judged.insert(info.sets.set_of(*slot)) {
                continue;
            }
            let has = |slot, parity| self.has(info.key, slot, parity);
            let whole = info.sets.recoverable(*slot, |s| has(s, false), |s| has(s, true));
            let all =
                self.bugs.on(Bug::CountAllSets) && rebuild.len() as u32 > info.sets.scheme.losses();
            if !whole || all {
                return Err(Trouble::new(Cause::BeyondScheme).slot(*slot));
            }
        }
        Ok(rebuild)
    }
}
