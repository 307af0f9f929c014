//! Facts that every agent stores before any agent acts on them (FM-S2, FM-L4).
//!
//! The root numbers them from 1 in each incarnation. They go down the tree, acknowledgements of what a
//! whole subtree has stored come up, and only then the announcement goes down: every agent acts on record
//! `n` knowing that every other agent has stored it. All three are sent again until they have had effect.

use super::{Agent, Dataset, Phase, RESEND_MS, SlotPart};
use crate::api::{AgentAction, Millis};
use crate::bugs::Bug;
use stanchion_format::ids::{AgentId, Key, Level};
use stanchion_format::peer::{Msg, Record, Severity};
use std::collections::BTreeMap;

/// Records that may be missing in between, or sent again at once.
const RECORDS_WINDOW: u64 = 64;

/// What is stored and how far it is known to be.
#[derive(Debug, Default)]
pub(super) struct Records {
    stored: BTreeMap<u64, Record>,
    /// All up to here are stored.
    upto: u64,
    /// Came before their predecessors.
    early: BTreeMap<u64, Record>,
    kids: BTreeMap<AgentId, u64>,
    announced: u64,
    sent_up: Option<(u64, Millis)>,
    sent_down: Option<Millis>,
}

impl Records {
    pub(super) fn announced(&self) -> u64 {
        self.announced
    }

    /// Is there a record that not all are known to have?
    pub(super) fn pending(&self) -> bool {
        self.announced < self.upto
    }

    pub(super) fn get(&self, n: u64) -> Option<&Record> {
        self.stored.get(&n)
    }
}

impl Agent {
    /// The root issues a fact.
    pub(super) fn issue(&mut self, record: Record) -> u64 {
        assert!(self.is_root(), "only the root issues records");
        let n = self.records.upto + 1;
        self.store(n, record);
        self.acknowledge();
        n
    }

    pub(super) fn on_record(&mut self, from: AgentId, n: u64, record: Record) {
        let from_parent = self.view.as_ref().and_then(|v| v.tree.parent()) == Some(from);
        if !from_parent || !matches!(self.phase, Phase::Restored | Phase::Open) {
            return;
        }
        if n <= self.records.upto {
            self.acknowledge_again();
            return;
        }
        if n > self.records.upto + RECORDS_WINDOW {
            return;
        }
        self.records.early.insert(n, record);
        while let Some(record) = {
            let next = self.records.upto + 1;
            self.records.early.remove(&next)
        } {
            let next = self.records.upto + 1;
            self.store(next, record);
        }
        self.acknowledge();
    }

    fn store(&mut self, n: u64, record: Record) {
        assert_eq!(n, self.records.upto + 1, "records are stored in order");
        self.apply_stored(&record);
        self.records.upto = n;
        let inc = self.incarnation();
        let children = self.children();
        for child in children {
            self.send_agent(child, Msg::Record(inc, n, record.clone()));
        }
        self.records.sent_down = Some(self.now.mono);
        self.records.stored.insert(n, record);
    }

    pub(super) fn children(&self) -> Vec<AgentId> {
        self.view.as_ref().map_or_else(Vec::new, |v| v.tree.children().to_vec())
    }

    fn subtree_stored(&self) -> u64 {
        self.children()
            .iter()
            .map(|c| self.records.kids.get(c).copied().unwrap_or(0))
            .fold(self.records.upto, u64::min)
    }

    /// Tells the parent what this subtree has stored; at the root, announces it.
    fn acknowledge(&mut self) {
        let stored = if self.bug(Bug::AnnounceBeforeStored) && self.is_root() {
            self.records.upto
        } else {
            self.subtree_stored()
        };
        if self.is_root() {
            if stored > self.records.announced {
                self.announce(stored);
            }
        } else if self.records.sent_up.is_none_or(|(n, _)| n < stored) && stored > 0 {
            self.send_stored(stored);
        }
    }

    fn acknowledge_again(&mut self) {
        let stored = self.subtree_stored();
        if !self.is_root() && stored > 0 {
            self.send_stored(stored);
        }
    }

    fn send_stored(&mut self, stored: u64) {
        let inc = self.incarnation();
        if let Some(parent) = self.parent_peer() {
            self.records.sent_up = Some((stored, self.now.mono));
            self.send(parent, Msg::Stored(inc, stored));
        }
    }

    pub(super) fn on_stored(&mut self, from: AgentId, n: u64) {
        if !self.children().contains(&from) {
            return;
        }
        let known = self.records.kids.entry(from).or_default();
        *known = (*known).max(n.min(self.records.upto));
        self.acknowledge();
        let (inc, announced) = (self.incarnation(), self.records.announced);
        if announced > 0 {
            // Also tells a child again that missed it.
            self.send_agent(from, Msg::Announce(inc, announced));
        }
    }

    pub(super) fn on_announce(&mut self, from: AgentId, n: u64) {
        let from_parent = self.view.as_ref().and_then(|v| v.tree.parent()) == Some(from);
        let n = n.min(self.records.upto);
        if from_parent && n > self.records.announced {
            self.announce(n);
        }
    }

    fn announce(&mut self, upto: u64) {
        let inc = self.incarnation();
        for child in self.children() {
            self.send_agent(child, Msg::Announce(inc, upto));
        }
        while self.records.announced < upto {
            let n = self.records.announced + 1;
            self.records.announced = n;
            let record = self.records.stored.get(&n).expect("announced records are stored").clone();
            self.apply_announced(n, record);
            let old = n.saturating_sub(4 * RECORDS_WINDOW);
            self.records.stored.remove(&old);
        }
        self.deliver_ready();
    }

    pub(super) fn tick_records(&mut self) {
        let now = self.now.mono;
        let inc = self.incarnation();
        let (upto, announced) = (self.records.upto, self.records.announced);
        if self.records.sent_up.is_some_and(|(n, at)| n > announced && now.since(at) >= RESEND_MS) {
            self.acknowledge_again();
        }
        if announced < upto && self.records.sent_down.is_some_and(|at| now.since(at) >= RESEND_MS) {
            self.records.sent_down = Some(now);
            for child in self.children() {
                let has = self.records.kids.get(&child).copied().unwrap_or(0);
                for n in has + 1..=upto.min(has + RECORDS_WINDOW) {
                    if let Some(record) = self.records.stored.get(&n).cloned() {
                        self.send_agent(child, Msg::Record(inc, n, record));
                    }
                }
            }
        }
    }

    /// What storing a record means: it will be told to a survey.
    fn apply_stored(&mut self, record: &Record) {
        match record {
            Record::Commit(info) => {
                // Where no rank runs nobody waited for the begin: its announcement may have been lost on the way.
                // From the certificate on this agent stands for its part, though nothing is in it.
                let idle: Vec<_> =
                    self.my_slots().into_iter().filter(|slot| !self.ranks.any_on(*slot)).collect();
                let dataset =
                    self.datasets.entry(info.key).or_insert_with(|| Dataset::new((**info).clone()));
                dataset.info = (**info).clone();
                dataset.certified = true;
                dataset.levels_stored.insert(Level::Cached);
                for slot in idle {
                    let empty = SlotPart { data: true, ..SlotPart::default() };
                    dataset.slots.entry(slot).or_insert(empty);
                }
                self.newest_committed = self.newest_committed.max(Some(info.key));
            }
            Record::Level(key, level) => {
                if let Some(dataset) = self.datasets.get_mut(key) {
                    dataset.levels_stored.insert(*level);
                }
            }
            _ => {}
        }
    }

    /// What the announcement of a record means: everybody knows, act.
    fn apply_announced(&mut self, n: u64, record: Record) {
        let _ = n;
        match record {
            Record::Commit(info) => self.committed(info.key),
            Record::Drop(key, trouble) => self.dropped(key, &trouble),
            Record::Level(key, level) => self.level_reached(key, level),
            Record::ProtectFailed(key, trouble) => {
                if let Some(dataset) = self.datasets.get_mut(&key) {
                    (dataset.protect_failed, dataset.protect_voted) = (true, true);
                }
                self.log(Severity::Debug, format!("dataset {key} stays unprotected: {trouble}"));
                self.root_protect_failed(key, trouble);
                self.out.push(AgentAction::Settled(key));
                self.evict();
            }
            Record::FlushStart(key, attempt) => self.flush_started(key, attempt),
            Record::FlushPublish(key, attempt) => self.flush_publishing(key, attempt),
            Record::FlushAbort(key, attempt, trouble) => self.flush_aborted(key, attempt, trouble),
            Record::Evict(key) => self.made_room(key),
            Record::Forget(key) => self.forget(key),
            Record::Settings(pairs) => {
                if let Some(view) = &mut self.view {
                    for (name, value) in &pairs {
                        // The root checked them before it issued them.
                        let _ = view.settings.set(name, value);
                    }
                }
            }
        }
    }

    fn committed(&mut self, key: Key) {
        self.fill.close(key);
        if self.ranks.open_dataset() == Some(key) {
            self.ranks.close_dataset();
        }
        let now = self.now.mono;
        let every = self.settings().number("flush_every");
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.cached = true;
            dataset.levels.insert(Level::Cached);
            dataset.protect_since = Some(now);
            let kth = dataset.is_checkpoint() && every > 0 && key.no.0.is_multiple_of(every);
            dataset.flush_wanted = dataset.is_output() || kth;
        }
        self.pace.committed(now);
        self.root_committed(key);
        if self.bug(Bug::EvictBeforeProtected) {
            self.evict_older(key);
        }
        self.tick_protect();
        self.tick_waits();
    }

    fn dropped(&mut self, key: Key, trouble: &stanchion_format::peer::Trouble) {
        if self.ranks.open_dataset() == Some(key) {
            self.ranks.close_dataset();
        }
        self.fill.close(key);
        self.datasets.remove(&key);
        self.out.push(AgentAction::Evict(vec![key]));
        self.root_dropped(key, trouble);
        self.tick_waits();
    }

    fn level_reached(&mut self, key: Key, level: Level) {
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.levels.insert(level);
            dataset.levels_stored.insert(level);
        }
        if level == Level::Persistent {
            self.flush_over(key);
        }
        if level == Level::Protected {
            self.out.push(AgentAction::Settled(key));
        }
        self.root_level(key, level);
        self.evict();
        self.tick_waits();
    }

    fn forget(&mut self, key: Key) {
        if self.datasets.remove(&key).is_some() {
            self.out.push(AgentAction::Evict(vec![key]));
        }
        self.root_forgotten(key);
    }

    /// FM-S6: a checkpoint goes only when it is neither the newest, nor the newest protected, nor one of
    /// those to keep; outputs go when they are persistent. FM-S17: what is to be flushed stays.
    pub(super) fn evict(&mut self) {
        let keep = usize::try_from(self.settings().number("cache_datasets")).unwrap_or(usize::MAX);
        let restart = self.pinned_restart();
        let checkpoints: Vec<Key> = self
            .datasets
            .iter()
            .rev()
            .filter(|(_, d)| d.cached && d.is_checkpoint())
            .map(|(k, _)| *k)
            .collect();
        let newest_protected =
            checkpoints.iter().find(|k| self.datasets[k].levels.contains(&Level::Protected));
        let Some(newest_protected) = newest_protected.copied() else { return };
        let mut gone = Vec::new();
        for (place, key) in checkpoints.iter().enumerate() {
            // Until the ranks have taken the restart dataset they may want an older one.
            if place >= keep && *key < newest_protected && restart.is_none() {
                gone.push(*key);
            }
        }
        for (key, d) in &self.datasets {
            if d.cached && !d.is_checkpoint() && d.levels.contains(&Level::Persistent) {
                gone.push(*key);
            }
        }
        gone.retain(|k| {
            let d = &self.datasets[k];
            let waits = d.waits_for_flush() && !self.bug(Bug::EvictBeforeFlush);
            Some(*k) != restart && !d.flush.busy() && !waits && !d.protecting()
        });
        self.remove(gone);
        self.room_still_wanted();
    }

    fn evict_older(&mut self, key: Key) {
        let gone = self.datasets.keys().filter(|k| **k < key).copied().collect();
        self.remove(gone);
    }

    pub(super) fn remove(&mut self, gone: Vec<Key>) {
        if gone.is_empty() {
            return;
        }
        for key in &gone {
            self.datasets.remove(key);
        }
        self.tasks.retain(|_, t| !t.concerns(&gone));
        self.out.push(AgentAction::Evict(gone));
    }
}

impl super::TaskFor {
    fn concerns(&self, keys: &[Key]) -> bool {
        use super::TaskFor::*;
        match self {
            MakeDirs(k)
            | Stat(k, ..)
            | FillStat(k, _)
            | Digest(k, _)
            | Encode(k, ..)
            | Restore(k, _)
            | Rebuild(k, ..)
            | Flush(k, ..)
            | Intend(k, _)
            | Index(k, _) => keys.contains(k),
            Forget(..) | Nothing => false,
        }
    }
}
