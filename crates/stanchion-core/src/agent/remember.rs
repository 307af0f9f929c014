//! What is written beside a slot's files while the job runs, and read when all of its agents are gone (FM-A1).
//!
//! At most once in each state: the slot's own manifest is known; those of its set are; its parity is whole. A restart makes
//! another line of it, so it is written again. Nothing waits for it, also no level.

use super::{Agent, Dataset, Phase, SlotPart};
use crate::api::{AgentAction, Work};
use stanchion_format::holding::Holding;
use stanchion_format::ids::{Ancestry, Incarnation, Key, Level, SlotId, TaskId};
use std::sync::Arc;

/// How much of a slot was remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Remembered {
    #[default]
    Nothing,
    /// What vouches for its files.
    Own,
    /// What vouches for those of its set.
    Set,
    /// All of that, and that its parity is whole.
    Parity,
}

/// What was found in a cache whose agent is gone.
#[derive(Debug, Default)]
pub(super) struct Adopted {
    pub(super) inc: Incarnation,
    pub(super) ancestry: Ancestry,
}

impl Dataset {
    /// How much there is to remember of a slot.
    fn memorable(&self, slot: SlotId) -> Remembered {
        let vouched = self.certified && self.manifests.contains_key(&slot);
        let Some(part) = self.slots.get(&slot).filter(|p| vouched && p.data) else {
            return Remembered::Nothing;
        };
        // What is known already needs no look at the set.
        if part.remembered == Remembered::Parity {
            return Remembered::Parity;
        }
        match self.counts(slot) {
            None => Remembered::Own,
            Some(_) if part.parity_done || !self.info.sets.redundant(slot) => Remembered::Parity,
            Some(_) => Remembered::Set,
        }
    }
}

impl Agent {
    pub(super) fn tick_remember(&mut self) {
        if self.phase != Phase::Open {
            return;
        }
        let keys: Vec<Key> = self.datasets.keys().copied().collect();
        for key in keys {
            self.remember(key);
        }
    }

    /// Has written down what is known of a dataset and was not before.
    pub(super) fn remember(&mut self, key: Key) {
        for slot in self.my_slots() {
            let Some(dataset) = self.datasets.get_mut(&key) else { return };
            let state = dataset.memorable(slot);
            let Some(part) = dataset.slots.get_mut(&slot) else { continue };
            if state <= part.remembered {
                continue;
            }
            part.remembered = state;
            let (data, parity) = (part.data, part.parity_done);
            let members = dataset.info.sets.members(slot);
            let known = dataset.manifests.iter().filter(|(s, _)| members.contains(s));
            let manifests = known.map(|(_, m)| m.clone()).collect();
            let info = dataset.info.clone();
            let Some(view) = &self.view else { return };
            self.remembered_no += 1;
            let holding = Holding {
                no: self.remembered_no,
                job: self.cfg.job,
                inc: view.plan.inc,
                ancestry: view.plan.ancestry.clone(),
                info,
                slot,
                data,
                parity,
                manifests,
            };
            let work = Work::Remember(Box::new(holding));
            // Not among the tasks that somebody waits for.
            let task = TaskId(self.next_task);
            self.next_task += 1;
            self.out.push(AgentAction::Run { task, work, due: None });
        }
    }

    /// A new line: what was written down says the old one.
    pub(super) fn remember_anew(&mut self) {
        for dataset in self.datasets.values_mut() {
            for part in dataset.slots.values_mut() {
                part.remembered = Remembered::Nothing;
            }
        }
    }

    /// Takes over what agents that are gone have left in this one's cache. It is told to surveys; nothing of it is believed
    /// before it is compared with its manifest, like all that is restored from. `holdings`: the newest last.
    pub fn adopting(mut self, holdings: Vec<Holding>) -> Agent {
        for holding in holdings.into_iter().filter(|h| h.job == self.cfg.job) {
            if holding.inc >= self.adopted.inc {
                self.adopted = Adopted { inc: holding.inc, ancestry: holding.ancestry };
            }
            let key = holding.info.key;
            let dataset =
                self.datasets.entry(key).or_insert_with(|| Dataset::new(holding.info.clone()));
            dataset.info = holding.info;
            dataset.certified = true;
            dataset.levels_stored.insert(Level::Cached);
            for manifest in holding.manifests {
                dataset.manifests.insert(manifest.slot, Arc::clone(&manifest));
            }
            let part =
                SlotPart { data: holding.data, parity_done: holding.parity, ..SlotPart::default() };
            dataset.slots.insert(holding.slot, part);
        }
        let Adopted { inc, ancestry } = &self.adopted;
        let ours = self.datasets.keys().filter(|k| ancestry.admits(*inc, **k));
        self.newest_committed = ours.max().copied();
        self
    }
}
