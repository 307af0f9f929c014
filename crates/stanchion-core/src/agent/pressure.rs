//! A pool that is full while ranks wait for it: what goes to make room (FM-S18).
//!
//! An agent whose ranks wait for what only the end of a dataset can bring says so to the root, again and again while
//! it lasts. The root chooses one dataset and says it by a record, so that all agents keep or drop it alike; it
//! chooses the next one only for somebody who has done that.

use super::{Agent, Dataset, Phase};
use crate::api::Millis;
use crate::bugs::Bug;
use stanchion_format::ids::{Key, Level};
use stanchion_format::peer::{CollId, Msg, Record, Report};

/// After asking, and after a dataset went, so long until the next asking, milliseconds.
const ASK_AGAIN_MS: u64 = 1_000;
/// Memory comes back piece by piece: with none for so long, all of it has come, milliseconds.
const RETURNED_MS: u64 = 50;
/// The root keeps in mind so long that somebody wants room, milliseconds.
const WANTED_MS: u64 = 1_500;

/// What is known of a full pool.
#[derive(Debug, Default)]
pub(super) struct Pressure {
    /// When this agent asked last, or a dataset went.
    asked: Option<Millis>,
    /// Since then, the last piece of memory that came back.
    returned: Option<Millis>,
    /// The root: there was nothing to give; who asked had acted on records up to this one.
    wanted: Option<(u64, Millis)>,
    /// The root: the last record that made room, and what goes by it.
    made: u64,
    gone: Option<Key>,
}

impl Agent {
    /// Asks for room if ranks wait and nothing under way will bring it.
    pub(super) fn tick_pressure(&mut self) {
        let open = self.phase == Phase::Open && !self.orphan.orphaned();
        if !open || !self.pool.starving() || self.settings().text("pool_full") == "skip" {
            return;
        }
        let now = self.now.mono;
        let returned = self.pressure.returned.is_some_and(|at| now.since(at) >= RETURNED_MS);
        if !returned && self.pressure.asked.is_some_and(|at| now.since(at) < ASK_AGAIN_MS) {
            return;
        }
        (self.pressure.asked, self.pressure.returned) = (Some(now), None);
        let seen = self.records.announced();
        if self.is_root() {
            self.make_room(seen);
        } else if let Some(root) = self.view.as_ref().and_then(|v| v.tree.root()) {
            let inc = self.incarnation();
            self.send_agent(root, Msg::PoolFull(inc, seen));
        }
    }

    /// An agent that has acted on all records up to `seen` has ranks that wait for room.
    pub(super) fn make_room(&mut self, seen: u64) {
        if !self.is_root() || self.phase != Phase::Open || seen < self.pressure.made {
            return;
        }
        self.pressure.wanted = None;
        let Some(key) = self.dispensable() else {
            self.pressure.wanted = Some((seen, self.now.mono));
            return;
        };
        // Before it is issued: where there are no other agents, it is announced at once.
        self.pressure.gone = Some(key);
        self.pressure.made = self.issue(Record::Evict(key));
    }

    /// Something changed that may make a dataset dispensable.
    pub(super) fn room_still_wanted(&mut self) {
        if let Some((seen, since)) = self.pressure.wanted
            && self.now.mono.since(since) <= WANTED_MS
        {
            self.make_room(seen);
        }
    }

    /// Memory has come back.
    pub(super) fn memory_returned(&mut self) {
        self.pressure.returned = Some(self.now.mono);
    }

    /// What the job can do without: first what is older than the newest protected checkpoint and is there only because
    /// `cache_datasets` allows it; then, where policy says so, the oldest one that was never protected. Never the newest,
    /// which the job would go on from, nor what is read, flushed, or to be flushed (FM-S6, FM-S17).
    fn dispensable(&self) -> Option<Key> {
        let checkpoints = || self.datasets.iter().filter(|(_, d)| d.cached && d.is_checkpoint());
        let newest = checkpoints().next_back().map(|(key, _)| *key)?;
        if self.bug(Bug::DropNewest) {
            return Some(newest);
        }
        let restart = self.pinned_restart();
        let free = |key: Key, d: &Dataset| {
            let wanted = d.flush.busy() || d.waits_for_flush() || self.flush_is_queued(key);
            let only = d.is_output() && !d.levels.contains(&Level::Persistent);
            key != newest && !self.goes(key) && Some(key) != restart && !wanted && !only
        };
        let protected = |d: &Dataset| d.levels.contains(&Level::Protected);
        let safe = checkpoints().rev().find(|(_, d)| protected(d)).map(|(key, _)| *key);
        let spare = checkpoints().find(|(key, d)| {
            safe.is_some_and(|safe| **key < safe) && !d.protecting() && free(**key, d)
        });
        let drops = self.settings().text("pool_full") == "drop";
        let unprotected = || {
            checkpoints().find(|(key, d)| {
                // The record that says it is protected may be on its way.
                let never = !d.promised && !d.levels_stored.contains(&Level::Protected);
                drops && never && free(**key, d)
            })
        };
        spare.or_else(unprotected).map(|(key, _)| *key)
    }

    /// The root: has this dataset been chosen to make room?
    pub(super) fn goes(&self, key: Key) -> bool {
        self.pressure.gone == Some(key)
    }

    /// Every agent knows that it goes.
    pub(super) fn made_room(&mut self, key: Key) {
        (self.pressure.asked, self.pressure.returned) = (Some(self.now.mono), None);
        let Some(dataset) = self.datasets.get(&key) else { return };
        let protected = dataset.levels.contains(&Level::Protected);
        self.report(Report::Evicted { key, protected });
        self.remove(vec![key]);
        // Nobody answers this any more.
        self.colls.remove(&CollId::Protect(key));
        self.tick_waits();
    }
}
