//! Comparisons with the truth: bytes in caches, parity, prefix; and how histories end.

use crate::fault::What;
use crate::judge::Promise;
use crate::world::{CtrlId, World};
use stanchion_code::{gf, rs::Code};
use stanchion_core::api::Outcome;
use stanchion_format::client::{FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::{AgentId, Incarnation, Key, RankId, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::layout::block_slot;
use stanchion_format::peer::DatasetInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

impl World {
    fn host(&self, slot: SlotId) -> Option<AgentId> {
        self.judge.plan.as_ref()?.slots.get(slot.0 as usize).copied()
    }

    fn slot_of(&self, rank: RankId) -> SlotId {
        block_slot(rank.0, self.sc.app.ranks, self.sc.nodes)
    }

    /// The ranks of a slot: those that `slot_of` puts there, which are neighbours.
    fn ranks_of(&self, slot: SlotId) -> Range<RankId> {
        let first = |slot: u32| {
            let (mut low, mut high) = (0, self.sc.app.ranks);
            while low < high {
                let middle = low.midpoint(high);
                if self.slot_of(RankId(middle)).0 < slot {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            RankId(low)
        };
        first(slot.0)..first(slot.0 + 1)
    }

    /// Did every rank say yes?
    pub(crate) fn spoken(&self, info: &DatasetInfo) -> Result<(), String> {
        let truth = self.judge.truth.get(&info.key).ok_or("nobody wrote it")?;
        let ranks = self.sc.app.ranks;
        if info.ranks != ranks || truth.said.len() as u32 != ranks {
            return Err(format!("{} of {ranks} ranks, {} spoke", info.ranks, truth.said.len()));
        }
        if let Some((rank, _)) = truth.said.iter().find(|(_, ok)| !**ok) {
            return Err(format!("rank {rank} said invalid"));
        }
        Ok(())
    }

    /// Did every rank say yes, and is every byte where it was written?
    pub(crate) fn whole(&self, info: &DatasetInfo) -> Result<(), String> {
        self.spoken(info)?;
        let truth = self.judge.truth.get(&info.key).ok_or("nobody wrote it")?;
        for (rank, files) in &truth.files {
            let slot = self.slot_of(*rank);
            let Some(host) = self.host(slot).filter(|a| !self.judge.lost.contains(a)) else {
                continue;
            };
            let Some(p) = self.agents.get(&host).filter(|p| p.alive) else { continue };
            for (path, bytes) in files {
                let have = p.store.files.get(&(info.key, slot, *rank, path.clone()));
                if have.map(Vec::len) != Some(bytes.len()) {
                    return Err(format!("{path} of rank {rank} is not whole"));
                }
            }
        }
        Ok(())
    }

    /// A slot's chunks as they were written.
    fn chunks(&self, key: Key, chunk_bytes: u32, slot: SlotId) -> Vec<&[u8]> {
        let Some(truth) = self.judge.truth.get(&key) else { return Vec::new() };
        truth
            .files
            .range(self.ranks_of(slot))
            .flat_map(|(_, files)| files.values())
            .flat_map(|bytes| bytes.chunks(chunk_bytes as usize))
            .collect()
    }

    /// Is the parity that `slot` keeps what its set's chunks add up to?
    fn slot_parity_holds(&self, key: Key, p: &Promise, slot: SlotId) -> Result<(), String> {
        let sets = &p.info.sets;
        let (k, m) = sets.code(slot);
        let Ok(code) = Code::new(k as usize, m as usize) else { return Ok(()) };
        let chunks: BTreeMap<SlotId, Vec<&[u8]>> = sets
            .members(slot)
            .into_iter()
            .map(|s| (s, self.chunks(key, p.info.chunk_bytes, s)))
            .collect();
        let count = |s: SlotId| chunks.get(&s).map_or(0, |c| c.len() as u64);
        let Some(proc) = self.host(slot).and_then(|a| self.agents.get(&a)).filter(|a| a.alive)
        else {
            return Ok(());
        };
        for stripe in sets.held(slot, count) {
            let mut sum: Vec<u8> = Vec::new();
            for part in sets.parts(slot, stripe, count) {
                let bytes = chunks[&part.slot][part.chunk as usize];
                sum.resize(sum.len().max(bytes.len()), 0);
                let row = sets.row(slot, stripe) as usize;
                let by = code.coefficient(row, part.column as usize);
                sum.iter_mut().zip(bytes).for_each(|(a, b)| *a ^= gf::mul(*b, by));
            }
            let index = sets.parity_index(slot, stripe);
            let have = proc.store.parity.get(&(key, slot)).and_then(|f| f.get(&index));
            if have != Some(&sum) {
                return Err(format!("the parity of stripe {stripe} on slot {slot} is not that"));
            }
        }
        Ok(())
    }

    /// Is all parity of a dataset right, where no damage was done on purpose?
    pub(crate) fn parity_holds(&self, key: Key) -> Result<(), String> {
        let Some(p) = self.judge.promises.get(&key) else { return Ok(()) };
        let sets = &p.info.sets;
        for slot in (0..sets.slots).map(SlotId).filter(|s| sets.redundant(*s)) {
            if !p.rotten.contains(&slot) {
                self.slot_parity_holds(key, p, slot)?;
            }
        }
        Ok(())
    }

    /// A slot's files are what was written.
    fn slot_data_holds(&self, key: Key, slot: SlotId) -> bool {
        let Some(truth) = self.judge.truth.get(&key) else { return false };
        let Some(proc) = self.host(slot).and_then(|a| self.agents.get(&a)).filter(|a| a.alive)
        else {
            return false;
        };
        truth.files.range(self.ranks_of(slot)).all(|(rank, files)| {
            files.iter().all(|(path, bytes)| {
                proc.store.files.get(&(key, slot, *rank, path.clone())) == Some(bytes)
            })
        })
    }

    /// It is protected anew: earlier losses and repaired damage count no more.
    pub(crate) fn forgive(&mut self, key: Key, inc: Incarnation) {
        let Some(p) = self.judge.promises.get(&key) else { return };
        let still: BTreeSet<SlotId> = p
            .rotten
            .iter()
            .filter(|s| {
                !self.slot_data_holds(key, **s) || self.slot_parity_holds(key, p, **s).is_err()
            })
            .copied()
            .collect();
        let plan = self.judge.plan.as_ref().filter(|plan| plan.inc == inc);
        let lost: BTreeSet<SlotId> = plan
            .iter()
            .flat_map(|plan| (0..).zip(&plan.slots))
            .filter(|(_, a)| self.judge.lost.contains(a))
            .map(|(s, _)| SlotId(s))
            .collect();
        if let Some(p) = self.judge.promises.get_mut(&key) {
            p.rotten = still;
            p.lost = lost;
        }
    }

    /// FM-S7, FM-S2: what a rank reads is what was written, whole. Gives the step and the value.
    pub(crate) fn judge_read(
        &mut self,
        key: Key,
        rank: RankId,
        read: &[(String, Option<Vec<u8>>)],
    ) -> Option<(u64, u64)> {
        let wrong = match self.judge.truth.get(&key) {
            None => Some(format!("rank {rank} restarts from {key}, which nobody wrote")),
            Some(truth) => {
                let empty = Default::default();
                let files = truth.files.get(&rank).unwrap_or(&empty);
                let right = files.len() == read.len()
                    && read
                        .iter()
                        .all(|(path, bytes)| bytes.is_some() && files.get(path) == bytes.as_ref());
                let all = truth.said.len() as u32 == self.sc.app.ranks;
                let valid = truth.said.values().all(|ok| *ok);
                match (right, all && valid) {
                    (true, true) => return Some((truth.step, truth.value)),
                    (false, _) => Some(format!("rank {rank} reads wrong bytes of {key}")),
                    (true, false) => Some(format!("rank {rank} restarts from invalid {key}")),
                }
            }
        };
        if let Some(text) = wrong {
            self.violate("FM-S7", text);
        }
        None
    }

    /// FM-S9, FM-S12: a record has appeared.
    pub(crate) fn judge_indexed(&mut self, record: &IndexRecord) {
        let key = record.info.key;
        let rot = self.judge.promises.get(&key).is_some_and(|p| p.prefix_rot);
        // One that was there before stands, of another attempt maybe.
        let there = self.prefix.index.get(&key).cloned();
        let Some(record) = there.as_ref().filter(|_| !rot) else { return };
        if let Err(text) = self.prefix.verify(key) {
            return self.violate("FM-S9", format!("the record of {key} is there: {text}"));
        }
        let Some(truth) = self.judge.truth.get(&key) else {
            return self.violate("FM-S9", format!("a record of {key}, which nobody wrote"));
        };
        let wrong = truth
            .files
            .values()
            .flatten()
            .find(|(path, bytes)| self.prefix.contents(record, path) != Some(bytes));
        if let Some((path, _)) = wrong {
            let text = format!("{path} in the prefix is not what {key} wrote");
            self.violate("FM-S9", text);
        }
    }

    /// FM-S20: what is deleted to make room is no output, and enough newer checkpoints of the line are there. `records`: what
    /// there was.
    pub(crate) fn judge_pruned(&mut self, key: Key, records: &[IndexRecord]) {
        let number = |name| self.sc.settings.number(name);
        let (last, every) = (number("keep_last"), number("keep_every"));
        let gone = records.iter().find(|r| r.info.key == key).expect("it was there");
        let kth = every > 0 && key.no.0.is_multiple_of(every);
        let newest = records.iter().max_by_key(|r| (r.inc, r.info.key)).expect("it was there");
        let counts = |r: &&IndexRecord| {
            r.info.key > key
                && r.info.flags & FLAG_CHECKPOINT != 0
                && newest.ancestry.admits(newest.inc, r.info.key)
                && self.prefix.index.contains_key(&r.info.key)
        };
        let newer = records.iter().filter(counts).count() as u64;
        if gone.info.flags & FLAG_OUTPUT != 0 || kth || last == 0 || newer < last {
            let text = format!("{key} is deleted with {newer} newer ones there");
            self.violate("FM-S20", text);
        }
    }

    /// A run that has just begun completed a flush: the dataset is persistent from now on.
    pub(crate) fn judge_flush_completed(&mut self, record: &IndexRecord) {
        if let Some(p) = self.judge.promises.get_mut(&record.info.key) {
            p.persistent = true;
        }
        self.judge_indexed(record);
    }

    /// FM-L3: what was persistent when the runs before died is there, or a newer one that replaced it.
    pub(crate) fn judge_persistent(&mut self) {
        let newest = self.prefix.index.keys().last().copied();
        let lost = self.judge.promises.iter().rev().find(|(_, p)| p.persistent && !p.prefix_rot);
        if let Some((key, _)) = lost
            && newest.is_none_or(|newest| newest < *key)
        {
            let text =
                format!("dataset {key} was persistent; the newest in the prefix is {newest:?}");
            self.violate("FM-L3", text);
        }
    }

    /// FM-S10: a file in the prefix was replaced; no record may vouch for what it was.
    pub(crate) fn judge_replaced(&mut self, path: &str) {
        let named: Vec<Key> = self
            .prefix
            .slots
            .iter()
            .filter(|(_, m)| m.files.iter().any(|f| f.path == path))
            .map(|((key, _), _)| *key)
            .filter(|key| self.prefix.index.contains_key(key))
            .collect();
        for key in named {
            let rot = self.judge.promises.get(&key).is_some_and(|p| p.prefix_rot);
            if !rot && let Err(text) = self.prefix.verify(key) {
                self.violate(
                    "FM-S10",
                    format!("{path} is replaced and {key} still vouched for: {text}"),
                );
            }
        }
    }

    /// A run's first moment: nothing is left in caches.
    pub(crate) fn judge_run_begins(&mut self) {
        self.judge.runner_killed = false;
        self.judge.app_succeeded = false;
        self.judge.plan = None;
        let newest = self.prefix.index.values().max_by_key(|r| (r.inc, r.info.key)).map(|r| r.inc);
        let dead: BTreeSet<Key> = self
            .judge
            .promises
            .keys()
            .filter(|k| newest.is_some_and(|inc| !self.in_line(**k, inc)))
            .copied()
            .collect();
        for (key, p) in &mut self.judge.promises {
            (p.cached, p.protected) = (false, false);
            p.dead = dead.contains(key);
        }
    }

    /// A controller says how it ended.
    pub(crate) fn judge_outcome(&mut self, c: CtrlId, outcome: &Outcome) {
        self.judge.outcomes.push(outcome.clone());
        if self.ctrls[&c].epoch.0 < self.prefix.epoch {
            return;
        }
        let expected = self.expected(!self.judge.index_failed);
        self.judge_absent(c);
        match outcome {
            Outcome::Success { flush_trouble } => {
                self.judge.finished = true;
                if !self.judge.app_succeeded {
                    return self.violate("FM-S14", "success without the application's".into());
                }
                let wanted = self.sc.settings.flag("flush_at_end") && flush_trouble.is_none();
                if wanted && let Some(key) = expected {
                    self.must_be_persistent(key, "the run ends with success");
                }
            }
            // FM-V2: it goes on as long as there are nodes.
            Outcome::NoSpare { have, .. } if *have >= self.sc.nodes => {
                self.violate("FM-V2", format!("{have} agents are not enough?"));
            }
            Outcome::AgentsFailed(trouble) if self.everybody_is_well(c) => {
                self.violate("FM-V2", format!("agents are said to have failed: {trouble}"));
            }
            Outcome::Unrecoverable { key } => {
                if let Some(safe) = expected.filter(|_| !self.judge.excused) {
                    let text = format!("{key} is called unrecoverable although {safe} is safe");
                    self.violate("FM-L2", text);
                }
            }
            Outcome::WoundDown { persistent: Some(key), .. }
            | Outcome::NoSpare { persistent: Some(key), .. } => {
                let rot = self.judge.promises.get(key).is_some_and(|p| p.prefix_rot);
                let replaced = self.prefix.withdrawn.contains(key);
                if !rot
                    && !replaced
                    && let Err(text) = self.prefix.verify(*key)
                {
                    self.violate("FM-V3", format!("{key} is called persistent: {text}"));
                }
            }
            _ => {}
        }
    }

    /// Has nothing happened that could keep an agent from its runner?
    fn everybody_is_well(&self, c: CtrlId) -> bool {
        let harmless = self.sc.faults.iter().all(|f| {
            !matches!(
                f.what,
                What::FreezeAgent(..)
                    | What::FreezeRunner(_)
                    | What::Partition(..)
                    | What::ResetController(_)
                    | What::DiskFull(..)
                    | What::PrefixBroken(_)
            )
        });
        let living = self.agents.iter().filter(|(a, p)| {
            p.alive && self.ctrls[&c].linked.contains(a) && !self.judge.lost.contains(a)
        });
        harmless && !self.net_is_bad() && living.count() as u32 >= self.sc.nodes
    }

    pub(crate) fn net_is_bad(&self) -> bool {
        self.net.2 >= 10 || self.net.0 >= 100
    }

    fn must_be_persistent(&mut self, key: Key, when: &str) {
        let newer = self.prefix.index.keys().any(|k| *k >= key);
        if !newer && !self.prefix_was_harmed() {
            self.violate("FM-V3", format!("{when}, but {key} is not in the prefix"));
        }
    }

    fn prefix_was_harmed(&self) -> bool {
        self.judge.excused || self.sc.faults.iter().any(|f| f.what.harms_prefix())
    }

    /// FM-V3: a run is over, and whatever was safe in caches must be in the prefix.
    pub(crate) fn judge_run_over(&mut self) {
        if self.judge.finished {
            return;
        }
        if let Some(key) = self.expected(true) {
            self.must_be_persistent(key, "the run is over");
        }
    }

    /// The history's last look.
    pub(crate) fn judge_end(&mut self) {
        let keys: Vec<Key> = self.prefix.index.keys().copied().collect();
        for key in keys {
            let rot = self.judge.promises.get(&key).is_some_and(|p| p.prefix_rot);
            if !rot && let Err(text) = self.prefix.verify(key) {
                self.violate("FM-S9", format!("at the end {key} is vouched for: {text}"));
            }
        }
    }
}
