//! Making a slot whole: verified where it is, rebuilt from the set, or fetched from the prefix (FM-S7, FM-S8).

use super::protect::passing;
use super::{
    Agent, Dataset, Phase, RESEND_MS, SOURCE_RETRY_MS, SOURCE_TRIES_MAX, TASK_WINDOW, TaskFor,
};
use crate::api::{ChunkSource, Millis, TaskResult, Work};
use crate::bugs::Bug;
use crate::stripe::{Term, lost_terms};
use stanchion_format::data::Piece;
use stanchion_format::ids::{AgentId, Key, PeerId, RankId, SlotId};
use stanchion_format::layout::Part;
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Msg, Restored, Severity, Source, Trouble};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sources that cannot be reached are waited for as long as so many silences that would be called a death.
const SILENCES_MAX: u64 = 3;

/// One slot of one dataset on its way.
#[derive(Debug)]
struct Job {
    state: State,
    /// Chunks to rebuild, by number.
    bad: BTreeMap<u64, Bad>,
    asked: Option<Millis>,
    /// The slot's data was here: what is bad is damage, not loss.
    held: bool,
}

/// A chunk that is to be rebuilt.
#[derive(Debug, Default)]
struct Bad {
    tries: u32,
    /// Since when sources cannot be reached.
    unreachable: Option<Millis>,
    not_before: Millis,
    running: bool,
    /// How many sums were wrong although their sources were right: which parities are taken next.
    turn: u32,
    /// What the sum that is under way is made of.
    sources: Vec<(SlotId, Piece)>,
    /// Sources that failed: others are taken as long as there are enough.
    avoid: Vec<(SlotId, Piece)>,
}

impl Bad {
    /// It failed; is it to be given up? Who cannot be reached is either found silent by the controller, which then decides
    /// anew, or comes back: that takes its time, however often it is tried.
    fn failed(&mut self, cause: Cause, now: Millis, patience: u64) -> bool {
        if cause == Cause::Unreachable {
            return now.since(*self.unreachable.get_or_insert(now)) > patience;
        }
        self.unreachable = None;
        self.tries += 1;
        self.tries >= SOURCE_TRIES_MAX
    }
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Manifests of the set are asked for.
    Manifests,
    /// A verify, digest or fetch is under way.
    Working,
    /// Bad chunks are being rebuilt.
    Rebuilding,
    /// Every byte is verified.
    Done,
}

/// What this agent restores.
#[derive(Debug, Default)]
pub(super) struct Restore {
    jobs: BTreeMap<(Key, SlotId), Job>,
    verified_bytes: u64,
    rebuilt_bytes: u64,
    /// Bytes that are known to be damaged or missing.
    bad_bytes: u64,
    fetched_bytes: u64,
    repaired_files: Vec<String>,
    /// The answer, to be told again.
    outcome: Option<Restored>,
}

impl Agent {
    pub(super) fn on_restore(&mut self) {
        match self.phase {
            Phase::Installed => self.begin_restore(),
            Phase::Restored | Phase::Open | Phase::Restoring => self.tell_restored(),
            Phase::Idle => {}
        }
    }

    fn begin_restore(&mut self) {
        self.phase = Phase::Restoring;
        self.restore = Restore::default();
        let Some(view) = &self.view else { return };
        let (restart, keys) = (view.plan.restart, view.plan.restore.clone());
        let mut jobs: Vec<(Key, SlotId, Source)> = Vec::new();
        for slot in self.my_slots() {
            for key in &keys {
                jobs.push((*key, slot, Source::Cache));
            }
            if let Some((key, Source::Prefix)) = restart {
                jobs.push((key, slot, Source::Prefix));
            }
        }
        for (key, slot, _) in &jobs {
            let job = Job { state: State::Working, bad: BTreeMap::new(), asked: None, held: false };
            self.restore.jobs.insert((*key, *slot), job);
        }
        for (key, slot, source) in jobs {
            match source {
                Source::Prefix => self.fetch(key, slot),
                Source::Cache => self.restore_from_cache(key, slot),
            }
        }
        self.check_restored();
    }

    fn fetch(&mut self, key: Key, slot: SlotId) {
        let slots = self.view.as_ref().map_or(1, |v| v.plan.slots.len() as u64);
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        // Whatever is here of it may be damaged or of another division of the ranks.
        dataset.manifests.clear();
        dataset.slots.insert(slot, super::SlotPart::default());
        let info = Box::new(dataset.info.clone());
        let ranks = u64::from(info.ranks);
        // The ranks r with r * slots / ranks == slot, as `block_slot` places them.
        let first = (u64::from(slot.0) * ranks).div_ceil(slots);
        let next = ((u64::from(slot.0) + 1) * ranks).div_ceil(slots);
        let range = vec![(RankId(first as u32), (next - first) as u32)];
        self.run(TaskFor::Restore(key, slot), Work::Fetch { info, slot, ranks: range });
    }

    fn restore_from_cache(&mut self, key: Key, slot: SlotId) {
        let Some(dataset) = self.datasets.get(&key) else {
            self.restore_failed(key, Trouble::new(Cause::NoDataset).slot(slot));
            return;
        };
        let held = dataset.slots.get(&slot).is_some_and(|p| p.data);
        let manifest = dataset.manifests.get(&slot).cloned();
        if let Some(job) = self.restore.jobs.get_mut(&(key, slot)) {
            job.held = held;
        }
        match manifest {
            Some(manifest) => self.verify(manifest),
            // Committed, then lost its ranks before it was digested: what is there is what they wrote.
            None if held => self.digest(key, slot),
            None => self.set_state(key, slot, State::Manifests),
        }
        self.ask_manifests();
    }

    fn set_state(&mut self, key: Key, slot: SlotId, state: State) {
        if let Some(job) = self.restore.jobs.get_mut(&(key, slot)) {
            job.state = state;
        }
    }

    fn verify(&mut self, manifest: Arc<Manifest>) {
        let (key, slot) = (manifest.key, manifest.slot);
        self.set_state(key, slot, State::Working);
        self.own_manifest(manifest.clone());
        let held = self.restore.jobs.get(&(key, slot)).is_some_and(|j| j.held);
        if let Some(part) = self.datasets.get_mut(&key).and_then(|d| d.slots.get_mut(&slot)) {
            // What is still to be rebuilt is not held: the next survey must not count on it.
            part.data = held;
        }
        if self.bug(Bug::SkipVerify) {
            self.slot_verified(key, slot, 0);
            return;
        }
        self.run(TaskFor::Restore(key, slot), Work::Verify(manifest));
    }

    /// Asks the other members of the set for what they know of a lost slot.
    fn ask_manifests(&mut self) {
        let now = self.now.mono;
        let inc = self.incarnation();
        let me = self.cfg.id;
        let due: Vec<(Key, SlotId)> = self
            .restore
            .jobs
            .iter()
            .filter(|(_, j)| j.state == State::Manifests || j.state == State::Rebuilding)
            .filter(|(_, j)| j.asked.is_none_or(|at| now.since(at) >= RESEND_MS))
            .map(|(id, _)| *id)
            .collect();
        for (key, slot) in due {
            let Some(dataset) = self.datasets.get(&key) else { continue };
            let sets = dataset.info.sets.clone();
            if !sets.redundant(slot) && !dataset.manifests.contains_key(&slot) {
                self.restore_failed(key, Trouble::new(Cause::BeyondScheme).slot(slot));
                return;
            }
            if dataset.counts(slot).is_some() && dataset.manifests.contains_key(&slot) {
                continue;
            }
            let members = sets.members(slot);
            let mut agents: Vec<AgentId> =
                members.iter().filter_map(|m| self.host_of(*m)).filter(|a| *a != me).collect();
            agents.sort();
            agents.dedup();
            if let Some(job) = self.restore.jobs.get_mut(&(key, slot)) {
                job.asked = Some(now);
            }
            for agent in agents {
                self.send_agent(agent, Msg::ManifestWanted(inc, key));
            }
        }
    }

    /// Moves every job one step on.
    pub(super) fn tick_restore(&mut self) {
        if self.phase != Phase::Restoring || self.restore.outcome.is_some() {
            return;
        }
        let ready: Vec<Arc<Manifest>> = self
            .restore
            .jobs
            .iter()
            .filter(|(_, j)| j.state == State::Manifests)
            .filter_map(|((key, slot), _)| {
                self.datasets.get(key).and_then(|d| d.manifests.get(slot)).cloned()
            })
            .collect();
        for manifest in ready {
            self.verify(manifest);
        }
        self.ask_manifests();
        let rebuilding: Vec<(Key, SlotId)> = self
            .restore
            .jobs
            .iter()
            .filter(|(_, j)| j.state == State::Rebuilding)
            .map(|(id, _)| *id)
            .collect();
        for (key, slot) in rebuilding {
            self.rebuild(key, slot);
        }
    }

    pub(super) fn on_restore_task(&mut self, key: Key, slot: SlotId, result: TaskResult) {
        if self.phase != Phase::Restoring {
            return;
        }
        match result {
            TaskResult::Fetched(manifest) => {
                self.restore.fetched_bytes += manifest.bytes();
                self.own_manifest(Arc::new(*manifest));
                self.restored_slot(key, slot);
            }
            TaskResult::Verified { bad, bad_files } => self.on_verified(key, slot, bad, bad_files),
            other => self.restore_failed(key, Self::trouble_of(other).slot(slot)),
        }
    }

    fn on_verified(&mut self, key: Key, slot: SlotId, bad: Vec<u64>, bad_files: Vec<String>) {
        let Some(dataset) = self.datasets.get(&key) else { return };
        let manifest = dataset.manifests[&slot].clone();
        let bytes = manifest.bytes();
        if bad.is_empty() {
            self.slot_verified(key, slot, bytes);
            return;
        }
        let held = self.restore.jobs.get(&(key, slot)).is_some_and(|j| j.held);
        if !dataset.info.sets.redundant(slot) {
            let trouble = Trouble::new(Cause::Damaged).slot(slot);
            let trouble = match bad_files.first() {
                Some(file) => trouble.file(file.clone()),
                None => trouble,
            };
            self.restore_failed(key, trouble);
            return;
        }
        if held {
            let room = 64usize.saturating_sub(self.restore.repaired_files.len());
            for file in bad_files.iter().take(room) {
                self.log(
                    Severity::Warn,
                    format!("{} of dataset {key} on node {slot} is damaged; it is repaired from redundancy", file.escape_debug()),
                );
                self.restore.repaired_files.push(file.clone());
            }
        }
        let lens = bad.iter().filter_map(|c| manifest.chunk(*c)).map(|c| u64::from(c.len));
        self.restore.bad_bytes += lens.sum::<u64>();
        if let Some(job) = self.restore.jobs.get_mut(&(key, slot)) {
            job.state = State::Rebuilding;
            job.bad = bad.into_iter().map(|c| (c, Bad::default())).collect();
        }
        self.tick_restore();
    }

    /// Starts rebuilds of bad chunks within the window.
    fn rebuild(&mut self, key: Key, slot: SlotId) {
        let now = self.now.mono;
        let Some(job) = self.restore.jobs.get(&(key, slot)) else { return };
        let running = job.bad.values().filter(|b| b.running).count();
        let start: Vec<u64> = job
            .bad
            .iter()
            .filter(|(_, b)| !b.running && b.not_before <= now)
            .map(|(c, _)| *c)
            .take((2 * TASK_WINDOW).saturating_sub(running))
            .collect();
        for chunk in start {
            let Some(sources) = self.rebuild_sources(key, slot, chunk) else { return };
            let Some(manifest) = self.datasets.get(&key).and_then(|d| d.manifests.get(&slot))
            else {
                return;
            };
            let manifest = manifest.clone();
            if let Some(b) =
                self.restore.jobs.get_mut(&(key, slot)).and_then(|j| j.bad.get_mut(&chunk))
            {
                b.running = true;
                b.sources = sources.iter().map(|s| (s.slot, s.piece)).collect();
            }
            let work = Work::Rebuild { manifest, chunk, sources };
            self.run(TaskFor::Rebuild(key, slot, chunk), work);
        }
    }

    /// What the chunk follows from: of its stripe, chunks of other members before parities, and none that failed as long
    /// as there are enough. `None` while a manifest is missing.
    fn rebuild_sources(&self, key: Key, slot: SlotId, chunk: u64) -> Option<Vec<ChunkSource>> {
        let dataset: &Dataset = self.datasets.get(&key)?;
        let counts = dataset.counts(slot)?;
        let sets = &dataset.info.sets;
        let stripe = sets.stripe_of(slot, chunk)?;
        let chunks = |s: SlotId| counts.get(&s).copied().unwrap_or(0);
        let entry = self.view.as_ref()?.plan.ledger.iter().find(|e| e.info.key == key)?;
        let Bad { avoid, turn, .. } = self.restore.jobs.get(&(key, slot))?.bad.get(&chunk)?;
        let missing = |s: SlotId, data: bool| {
            if data { &entry.no_data } else { &entry.no_parity }.contains(&s)
        };
        let failed = |s: SlotId, data: bool| {
            avoid.iter().any(|(a, piece)| *a == s && matches!(piece, Piece::Data(_)) == data)
        };
        let terms = |usable: &dyn Fn(SlotId, bool) -> bool| {
            lost_terms(sets, (slot, chunk), chunks, usable, *turn, self.cfg.bugs)
        };
        // What is not there now may be there soon: another slot is made whole too.
        let terms = terms(&|s, data| !missing(s, data) && !failed(s, data))
            .or_else(|| terms(&|s, data| !missing(s, data)))
            .or_else(|| terms(&|_, _| true))?;
        let parts = sets.parts(slot, stripe, chunks);
        let len = |p: &Part| dataset.manifests.get(&p.slot)?.chunk(p.chunk).map(|c| c.len);
        let len = parts.iter().filter_map(len).max()?;
        let source = |term: Term| match term.piece {
            Piece::Data(_) => self.data_source(key, term),
            piece @ Piece::Parity(_) => {
                let agent = self.host_of(term.slot)?;
                Some(ChunkSource {
                    slot: term.slot,
                    agent,
                    piece,
                    len,
                    crc: None,
                    factor: term.factor,
                })
            }
        };
        terms.into_iter().map(source).collect()
    }

    pub(super) fn on_rebuilt(&mut self, key: Key, slot: SlotId, chunk: u64, result: TaskResult) {
        let patience = SILENCES_MAX * self.settings().number("silence_timeout_ms");
        let (now, bugs) = (self.now.mono, self.cfg.bugs);
        let Some(job) = self.restore.jobs.get_mut(&(key, slot)) else { return };
        match result {
            TaskResult::Done(_) => {
                job.bad.remove(&chunk);
                let done = job.bad.is_empty() || bugs.on(Bug::RestoredEarly);
                let Some(manifest) = self.datasets.get(&key).and_then(|d| d.manifests.get(&slot))
                else {
                    return;
                };
                self.restore.rebuilt_bytes += u64::from(manifest.chunk(chunk).map_or(0, |c| c.len));
                if done {
                    let bytes = manifest.bytes();
                    self.slot_verified(key, slot, bytes);
                } else {
                    self.rebuild(key, slot);
                }
            }
            other => {
                let failed = match &other {
                    TaskResult::Failed { source, .. } => *source,
                    _ => None,
                };
                let trouble = Self::trouble_of(other);
                let Some(b) = job.bad.get_mut(&chunk) else { return };
                b.running = false;
                let late = b.failed(trouble.cause, now, patience);
                match failed.and_then(|i| b.sources.get(i)) {
                    // Another source may do at once.
                    _ if bugs.on(Bug::IgnoreAvoid) => {}
                    // The sum is wrong: any of its parities may be.
                    // And who could not be reached, so that more parities were needed, may be back.
                    None if trouble.cause == Cause::Damaged => {
                        b.turn += 1;
                        b.avoid.clear();
                    }
                    Some(source) if !b.avoid.contains(source) => b.avoid.push(*source),
                    _ => b.avoid.clear(),
                }
                b.not_before = now.after(SOURCE_RETRY_MS);
                // A source may itself be under repair: that passes.
                if late || !passing(trouble.cause) {
                    self.restore_failed(key, trouble);
                }
            }
        }
    }

    fn slot_verified(&mut self, key: Key, slot: SlotId, bytes: u64) {
        self.restore.verified_bytes += bytes;
        self.restored_slot(key, slot);
    }

    /// A slot is whole.
    pub(super) fn restored_slot(&mut self, key: Key, slot: SlotId) {
        self.set_state(key, slot, State::Done);
        if let Some(part) = self.datasets.get_mut(&key).and_then(|d| d.slots.get_mut(&slot)) {
            part.data = true;
        }
        self.check_restored();
    }

    fn check_restored(&mut self) {
        if self.phase != Phase::Restoring || self.restore.outcome.is_some() {
            return;
        }
        if self.restore.jobs.values().all(|j| j.state == State::Done) {
            let r = &self.restore;
            self.restore.outcome = Some(Restored::Ok {
                verified_bytes: r.verified_bytes,
                rebuilt_bytes: r.rebuilt_bytes,
                fetched_bytes: r.fetched_bytes,
                repaired_files: r.repaired_files.clone(),
            });
            self.phase = Phase::Restored;
            self.tell_restored();
        }
    }

    pub(super) fn restore_failed(&mut self, key: Key, trouble: Trouble) {
        if self.restore.outcome.is_none() {
            self.restore.outcome = Some(Restored::Failed(key, trouble));
            self.tell_restored();
        }
    }

    fn tell_restored(&mut self) {
        let inc = self.incarnation();
        let msg = match self.restore.outcome.clone() {
            Some(outcome) => Msg::Restored(inc, outcome),
            None => Msg::Restoring(inc, self.restore.rebuilt_bytes, self.restore.bad_bytes),
        };
        self.send(PeerId::Controller, msg);
    }

    pub(super) fn on_open(&mut self) {
        let inc = self.incarnation();
        match self.phase {
            Phase::Restored => {
                self.phase = Phase::Open;
                self.answer_across();
                self.protect_restored();
                self.root_opened();
            }
            Phase::Open => {}
            _ => return,
        }
        self.send(PeerId::Controller, Msg::Opened(inc));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_be_reached_is_waited_for_and_what_is_wrong_is_counted() {
        let mut bad = Bad::default();
        for at in (1_000..=16_000).step_by(250) {
            assert!(!bad.failed(Cause::Unreachable, Millis(at), 15_000), "at {at}");
        }
        assert!(bad.failed(Cause::Unreachable, Millis(16_001), 15_000));
        // Something else came between: the wait begins anew.
        assert!(!bad.failed(Cause::Damaged, Millis(16_100), 15_000));
        assert!(!bad.failed(Cause::Unreachable, Millis(16_200), 15_000));
        for _ in 2..SOURCE_TRIES_MAX {
            assert!(!bad.failed(Cause::Damaged, Millis(16_300), 15_000));
        }
        assert!(bad.failed(Cause::Damaged, Millis(16_400), 15_000));
    }
}
