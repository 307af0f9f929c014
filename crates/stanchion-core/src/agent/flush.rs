//! The way to the prefix: prepare under temporary names, publish, index, record (FM-S9).

use super::{Agent, Phase, TaskFor};
use crate::api::{Millis, TaskResult, Work};
use crate::bugs::Bug;
use stanchion_format::checksum::Crc;
use stanchion_format::ids::{Incarnation, Key, Level, PeerId, SlotId};
use stanchion_format::index::{INDEX_VERSION, IndexRecord, Layout};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, CollId, Contrib, Msg, Record, Report, Times, Trouble};
use std::collections::{BTreeSet, VecDeque};

/// Attempts to flush a dataset when the job ends.
const FINISH_ATTEMPTS_MAX: u32 = 3;

/// The number of an attempt. What another incarnation had begun must stay as it is until this one is through: it
/// may be all that the prefix can be completed from (FM-L3). What is older than a run, the run sweeps.
fn attempt_number(inc: Incarnation, n: u32) -> u32 {
    let epoch = (inc.epoch.0 & 0xff) as u32;
    (epoch << 24) | ((inc.count & 0xfff) << 12) | (n & 0xfff)
}

/// The attempt of a flush that was given up before it began; attempts count from 1.
const NEVER_STARTED: u32 = 0;

/// Which half of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Prepare,
    Publish,
}

/// A flush as one agent sees it.
#[derive(Debug, Default)]
pub(super) struct FlushState {
    /// The attempt and its half, while one is under way.
    active: Option<(u32, Step)>,
    voted: Option<(u32, Step)>,
    trouble: Option<Trouble>,
}

impl FlushState {
    /// Must the dataset stay?
    pub(super) fn busy(&self) -> bool {
        self.active.is_some()
    }
}

/// The flush that the root has under way.
#[derive(Debug)]
struct Active {
    key: Key,
    attempt: u32,
    since: Millis,
    /// The record of its end is issued, and not yet announced.
    ending: bool,
}

/// What the root flushes.
#[derive(Debug, Default)]
pub(super) struct RootFlush {
    queue: VecDeque<Key>,
    active: Option<Active>,
    attempts: u32,
    /// `Finish` was said: flush (or not), then tell.
    finish: Option<Finish>,
}

#[derive(Debug, Default)]
struct Finish {
    /// The newest checkpoint is wanted, too, not only outputs.
    checkpoint: bool,
    queued: BTreeSet<Key>,
    tries: u32,
    trouble: Option<Trouble>,
    done: bool,
    persistent: Option<Key>,
}

impl Agent {
    /// The root wants this dataset in the prefix.
    pub(super) fn queue_flush(&mut self, key: Key) {
        let persistent =
            self.datasets.get(&key).is_none_or(|d| d.levels.contains(&Level::Persistent));
        let Some(root) = &mut self.root else { return };
        let active = root.flush.active.as_ref().is_some_and(|a| a.key == key);
        if !persistent && !active && !root.flush.queue.contains(&key) {
            root.flush.queue.push_back(key);
        }
    }

    pub(super) fn tick_flush(&mut self) {
        if !matches!(self.phase, Phase::Open | Phase::Restored) {
            return;
        }
        self.flush_tasks();
        if self.root.is_some() {
            self.root_flush();
        }
    }

    /// Starts what this agent has to write and can.
    fn flush_tasks(&mut self) {
        let active: Vec<(Key, u32, Step)> = self
            .datasets
            .iter()
            .filter_map(|(k, d)| d.flush.active.map(|(attempt, step)| (*k, attempt, step)))
            .collect();
        for (key, attempt, step) in active {
            let mut all = true;
            for slot in self.my_slots() {
                all &= self.flush_slot(key, slot, attempt, step);
            }
            let trouble = self.datasets.get(&key).and_then(|d| d.flush.trouble.clone());
            if all || trouble.is_some() {
                self.vote_flush(key, attempt, step, trouble);
            }
        }
    }

    fn flush_slot(&mut self, key: Key, slot: SlotId, attempt: u32, step: Step) -> bool {
        let Some(dataset) = self.datasets.get_mut(&key) else { return false };
        if !dataset.slots.get(&slot).is_some_and(|p| p.data) {
            // A spare that never got this slot's part must not stand for it (FM-S12).
            dataset.flush.trouble.get_or_insert(Trouble::new(Cause::Missing).slot(slot));
            return false;
        }
        let layout = self.flush_layout();
        let Some(dataset) = self.datasets.get_mut(&key) else { return false };
        let Some(manifest) = dataset.manifests.get(&slot).cloned() else {
            // The digest is still to come, or was never started: a flush does not wait for protection.
            self.digest(key, slot);
            return false;
        };
        let replaces = layout == Layout::Files && step == Step::Prepare;
        if replaces && self.replaced(key, &manifest) {
            // FM-S10: what the application itself has overwritten must not come back over it.
            let trouble = Trouble::new(Cause::SamePath).slot(slot);
            if let Some(dataset) = self.datasets.get_mut(&key) {
                dataset.flush.trouble.get_or_insert(trouble);
            }
            return false;
        }
        let Some(dataset) = self.datasets.get_mut(&key) else { return false };
        let part = dataset.slots.entry(slot).or_default();
        match part.flush {
            Some((a, s, done)) if a == attempt && s == step => return done,
            _ => part.flush = Some((attempt, step, false)),
        }
        let work = match step {
            Step::Prepare => Work::FlushPrepare { manifest, layout, attempt },
            Step::Publish => Work::FlushPublish { manifest, layout, attempt },
        };
        self.run(TaskFor::Flush(key, slot, attempt, step), work);
        false
    }

    fn flush_layout(&self) -> Layout {
        match self.settings().text("flush_layout") {
            "containers" => Layout::Containers,
            _ => Layout::Files,
        }
    }

    /// Is there a file of this manifest in the prefix in a newer version?
    fn replaced(&self, key: Key, manifest: &Manifest) -> bool {
        let newer = self
            .datasets
            .iter()
            .filter(|(k, d)| **k > key && d.levels.contains(&Level::Persistent));
        newer.filter_map(|(_, d)| d.manifests.get(&manifest.slot)).any(|m| {
            let paths: BTreeSet<&str> = m.files.iter().map(|f| f.path.as_str()).collect();
            manifest.files.iter().any(|f| paths.contains(f.path.as_str()))
        })
    }

    pub(super) fn on_flush_task(
        &mut self,
        key: Key,
        slot: SlotId,
        attempt: u32,
        step: Step,
        result: TaskResult,
    ) {
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        if dataset.flush.active != Some((attempt, step)) {
            return;
        }
        match result {
            TaskResult::Done(times) => {
                dataset.times.storage_us += times.storage_us;
                if let Some(part) = dataset.slots.get_mut(&slot) {
                    part.flush = Some((attempt, step, true));
                }
            }
            other => {
                dataset.flush.trouble.get_or_insert(Self::trouble_of(other).slot(slot));
            }
        }
        self.flush_tasks();
    }

    fn vote_flush(&mut self, key: Key, attempt: u32, step: Step, trouble: Option<Trouble>) {
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        if dataset.flush.voted == Some((attempt, step)) {
            return;
        }
        dataset.flush.voted = Some((attempt, step));
        let times = Times { storage_us: dataset.times.storage_us, ..Times::default() };
        let id = match step {
            Step::Prepare => CollId::FlushPrepare(key, attempt),
            Step::Publish => CollId::FlushPublish(key, attempt),
        };
        let slots = self.manifest_sums(key);
        let coll = self.coll(id);
        coll.own.trouble = trouble;
        coll.own.times = times;
        coll.own.slots = slots;
        coll.own_done = true;
        self.advance(id);
    }

    /// What vouches for the manifests of my slots.
    fn manifest_sums(&self, key: Key) -> Vec<(SlotId, Crc)> {
        let Some(dataset) = self.datasets.get(&key) else { return Vec::new() };
        self.my_slots()
            .into_iter()
            .filter_map(|s| dataset.manifests.get(&s).map(|m| (s, m.crc())))
            .collect()
    }

    pub(super) fn flush_started(&mut self, key: Key, attempt: u32) {
        match self.datasets.get_mut(&key) {
            Some(dataset) => {
                dataset.flush.active = Some((attempt, Step::Prepare));
                dataset.flush.trouble = None;
                self.flush_tasks();
            }
            // FM-S12: nobody waits for the part of one that has nothing of it.
            None => {
                let coll = self.coll(CollId::FlushPrepare(key, attempt));
                coll.own.trouble = Some(Trouble::new(Cause::Missing));
                coll.own_done = true;
                self.advance(CollId::FlushPrepare(key, attempt));
            }
        }
    }

    pub(super) fn flush_publishing(&mut self, key: Key, attempt: u32) {
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.flush.active = Some((attempt, Step::Publish));
        }
        self.flush_tasks();
    }

    pub(super) fn flush_aborted(&mut self, key: Key, attempt: u32, trouble: Trouble) {
        if let Some(dataset) = self.datasets.get_mut(&key) {
            // Files that have begun to get their names are the only copy in the prefix that can still become
            // whole: they go when the dataset has its record (FM-L3).
            let publishing = matches!(dataset.flush.active, Some((_, Step::Publish)));
            dataset.flush = FlushState::default();
            dataset.flush_wanted = false;
            if !publishing && attempt != NEVER_STARTED {
                self.run(TaskFor::Nothing, Work::FlushAbort { key, attempt });
            }
        }
        if self.root.is_some() {
            if attempt == NEVER_STARTED {
                self.report(Report::FlushFailed(key, trouble));
            } else {
                self.root_flush_failed(key, trouble);
            }
        }
        self.evict();
    }

    pub(super) fn decide_prepared(&mut self, key: Key, attempt: u32, all: Contrib) {
        let id = CollId::FlushPrepare(key, attempt);
        if !self.is_active(key, attempt) {
            self.answer_coll(id, stanchion_format::peer::Verdict::Ok);
            return;
        }
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.times = dataset.times.max(all.times);
        }
        self.answer_coll(id, stanchion_format::peer::Verdict::Ok);
        let record = match all.trouble {
            None => self.index_record(key, attempt, all.slots),
            Some(trouble) => Err(trouble),
        };
        match record {
            Ok(record) if self.bug(Bug::IndexBeforePublish) => {
                self.issue(Record::FlushPublish(key, attempt));
                self.run(TaskFor::Index(key, attempt), Work::WriteIndex(record));
            }
            Ok(record) => {
                let work = Work::FlushIntend { record, attempt };
                self.run(TaskFor::Intend(key, attempt), work);
            }
            Err(trouble) => self.abort_flush(key, attempt, trouble),
        }
    }

    pub(super) fn on_intended(&mut self, key: Key, attempt: u32, result: TaskResult) {
        if !self.is_active(key, attempt) {
            return;
        }
        match result {
            TaskResult::Done(_) => {
                self.issue(Record::FlushPublish(key, attempt));
            }
            other => self.abort_flush(key, attempt, Self::trouble_of(other)),
        }
    }

    pub(super) fn decide_published(&mut self, key: Key, attempt: u32, all: Contrib) {
        let id = CollId::FlushPublish(key, attempt);
        self.answer_coll(id, stanchion_format::peer::Verdict::Ok);
        if !self.is_active(key, attempt) {
            return;
        }
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.times = dataset.times.max(all.times);
        }
        match all.trouble {
            None => self.write_index(key, attempt, all.slots),
            Some(trouble) => self.abort_flush(key, attempt, trouble),
        }
    }

    /// A flush is over when the record of its end is announced: until then `Finish` waits.
    fn abort_flush(&mut self, key: Key, attempt: u32, trouble: Trouble) {
        self.end_flush();
        self.issue(Record::FlushAbort(key, attempt, trouble));
    }

    /// One flush is under way and another waits for it.
    pub(super) fn flush_is_behind(&self) -> bool {
        self.root.as_ref().is_some_and(|r| r.flush.active.is_some() && !r.flush.queue.is_empty())
    }

    /// Is its flush under way or to come?
    pub(super) fn flush_is_queued(&self, key: Key) -> bool {
        self.root.as_ref().is_some_and(|r| {
            let active = r.flush.active.as_ref().is_some_and(|a| a.key == key);
            active || r.flush.queue.contains(&key)
        })
    }

    /// FM-V6: what cannot be flushed in time costs its level, not the job.
    pub(super) fn give_up_queued_flushes(&mut self) {
        let queued = self.root.as_mut().map(|r| std::mem::take(&mut r.flush.queue));
        for key in queued.into_iter().flatten() {
            self.issue(Record::FlushAbort(key, NEVER_STARTED, Trouble::new(Cause::Timeout)));
        }
    }

    /// A dataset that is forgotten is not written any further.
    pub(super) fn abort_flush_of(&mut self, key: Key) {
        let Some(root) = &mut self.root else { return };
        root.flush.queue.retain(|k| *k != key);
        if let Some(attempt) =
            root.flush.active.as_ref().filter(|a| a.key == key && !a.ending).map(|a| a.attempt)
        {
            self.abort_flush(key, attempt, Trouble::new(Cause::NoDataset));
        }
    }

    fn end_flush(&mut self) {
        if let Some(active) = self.root.as_mut().and_then(|r| r.flush.active.as_mut()) {
            active.ending = true;
        }
    }

    fn is_active(&self, key: Key, attempt: u32) -> bool {
        self.root
            .as_ref()
            .and_then(|r| r.flush.active.as_ref())
            .is_some_and(|a| a.key == key && a.attempt == attempt && !a.ending)
    }

    fn write_index(&mut self, key: Key, attempt: u32, slots: Vec<(SlotId, Crc)>) {
        match self.index_record(key, attempt, slots) {
            Ok(record) => self.run(TaskFor::Index(key, attempt), Work::WriteIndex(record)),
            Err(trouble) => self.abort_flush(key, attempt, trouble),
        }
    }

    /// What vouches for the dataset in the prefix.
    fn index_record(
        &self,
        key: Key,
        attempt: u32,
        mut slots: Vec<(SlotId, Crc)>,
    ) -> Result<Box<IndexRecord>, Trouble> {
        let missing = || Trouble::new(Cause::Missing);
        let view = self.view.as_ref().ok_or_else(missing)?;
        slots.sort();
        let all = (0..view.plan.slots.len() as u32).map(SlotId);
        if !slots.iter().map(|(slot, _)| *slot).eq(all) {
            // FM-S12: a part of the job writes no dataset.
            return Err(missing());
        }
        let dataset = self.datasets.get(&key).ok_or_else(missing)?;
        let named = match self.bug(Bug::NameFirstAttempt) {
            true => attempt_number(view.plan.inc, 1),
            false => attempt,
        };
        let record = IndexRecord {
            version: INDEX_VERSION,
            job: self.cfg.job,
            epoch: self.epoch,
            inc: view.plan.inc,
            ancestry: view.plan.ancestry.clone(),
            info: dataset.info.clone(),
            unix_s: self.now.unix_s,
            slots,
            containers: (self.flush_layout() == Layout::Containers).then_some(named),
            times: Some(dataset.times),
            crc: Crc(0),
        };
        Ok(Box::new(record.seal()))
    }

    pub(super) fn on_index_written(&mut self, key: Key, attempt: u32, result: TaskResult) {
        if !self.is_active(key, attempt) {
            return;
        }
        match result {
            TaskResult::Done(_) => {
                self.end_flush();
                self.issue(Record::Level(key, Level::Persistent));
            }
            other => {
                let trouble = Self::trouble_of(other);
                self.abort_flush(key, attempt, trouble);
            }
        }
    }

    /// A flush is over for every agent when its level is announced.
    pub(super) fn flush_over(&mut self, key: Key) {
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.flush = FlushState::default();
        }
        if let Some(root) = &mut self.root
            && root.flush.active.as_ref().is_some_and(|a| a.key == key)
        {
            root.flush.active = None;
        }
    }

    fn root_flush_failed(&mut self, key: Key, trouble: Trouble) {
        self.report(Report::FlushFailed(key, trouble.clone()));
        let Some(root) = &mut self.root else { return };
        root.flush.active = None;
        if let Some(finish) = &mut root.flush.finish {
            finish.tries += 1;
            if trouble.cause == Cause::SamePath {
                // A newer dataset is there in its place: nothing is missing.
            } else if finish.tries < FINISH_ATTEMPTS_MAX && trouble.cause != Cause::Fenced {
                root.flush.queue.push_front(key);
            } else {
                finish.trouble.get_or_insert(trouble);
            }
        }
    }

    fn root_flush(&mut self) {
        let now = self.now.mono;
        let limit = self.settings().number("flush_timeout_ms");
        let late = self
            .root
            .as_ref()
            .and_then(|r| r.flush.active.as_ref())
            .filter(|a| !a.ending)
            .and_then(|a| (now.since(a.since) > limit).then_some((a.key, a.attempt)));
        if let Some((key, attempt)) = late {
            // FM-V1: a prefix that hangs costs a deadline, not the job.
            self.abort_flush(key, attempt, Trouble::new(Cause::Timeout));
            return;
        }
        let Some(root) = &mut self.root else { return };
        if root.flush.active.is_some() {
            return;
        }
        if let Some(key) = root.flush.queue.pop_front() {
            if !self.datasets.contains_key(&key) {
                // It was forgotten (`stn_drop`): FM-S17 keeps what is wanted.
                self.report(Report::FlushFailed(key, Trouble::new(Cause::NoDataset)));
            } else {
                let inc = self.incarnation();
                let Some(root) = &mut self.root else { return };
                root.flush.attempts += 1;
                let attempt = attempt_number(inc, root.flush.attempts);
                root.flush.active = Some(Active { key, attempt, since: now, ending: false });
                self.issue(Record::FlushStart(key, attempt));
            }
            return;
        }
        self.finish_if_asked();
    }

    /// The controller wants the end: flush what policy says, then tell it.
    pub(super) fn on_finish(&mut self, flush: bool) {
        if self.finish_waits(flush) {
            return;
        }
        let Some(root) = &mut self.root else { return };
        if root.flush.finish.is_none() {
            root.flush.finish = Some(Finish { checkpoint: flush, ..Finish::default() });
            self.queue_final();
        }
        let done = self.root.as_ref().and_then(|r| r.flush.finish.as_ref()).is_some_and(|f| f.done);
        if done {
            self.tell_finished();
        } else {
            self.tick_flush();
        }
    }

    /// Queues what has to be in the prefix when the job ends and was not queued for that yet; false if there is nothing.
    fn queue_final(&mut self) -> bool {
        let Some(finish) = self.root.as_ref().and_then(|r| r.flush.finish.as_ref()) else {
            return false;
        };
        let cached = || self.datasets.iter().filter(|(_, d)| d.cached);
        let newest = cached().rev().find(|(_, d)| d.is_checkpoint()).map(|(k, _)| *k);
        let outputs = cached().filter(|(_, d)| d.is_output()).map(|(k, _)| *k);
        let wanted = outputs.chain(newest.filter(|_| finish.checkpoint));
        let new: Vec<Key> = wanted.filter(|key| !finish.queued.contains(key)).collect();
        for key in &new {
            self.queue_flush(*key);
        }
        if let Some(finish) = self.root.as_mut().and_then(|r| r.flush.finish.as_mut()) {
            finish.queued.extend(&new);
        }
        !new.is_empty()
    }

    fn finish_if_asked(&mut self) {
        let done = self.root.as_ref().and_then(|r| r.flush.finish.as_ref()).is_none_or(|f| f.done);
        // The application may have ended in the midst of a commit: its record is known everywhere soon, and then it counts.
        if done || self.records.pending() || self.queue_final() {
            return;
        }
        let persistent = self
            .datasets
            .iter()
            .rev()
            .find(|(_, d)| d.is_checkpoint() && d.levels.contains(&Level::Persistent))
            .map(|(k, _)| *k);
        if let Some(finish) = self.root.as_mut().and_then(|r| r.flush.finish.as_mut()) {
            finish.done = true;
            finish.persistent = persistent;
            self.tell_finished();
        }
    }

    fn tell_finished(&mut self) {
        let inc = self.incarnation();
        let Some(finish) = self.root.as_ref().and_then(|r| r.flush.finish.as_ref()) else { return };
        let msg = Msg::Finished(inc, finish.persistent, finish.trouble.clone());
        self.send(PeerId::Controller, msg);
    }
}
