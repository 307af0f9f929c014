//! Tasks: what agents' threads do with files and each other's chunks, step by step.

use crate::fault::Moment;
use crate::store::entry;
use crate::world::{Event, Peer, World};
use stanchion_core::api::{AgentEvent, ChunkSource, TaskResult, Work};
use stanchion_core::fold::{Fold, FoldError};
use stanchion_format::checksum::crc64;
use stanchion_format::holding::Holding;
use stanchion_format::ids::{AgentId, Key, SlotId, TaskId};
use stanchion_format::index::Layout;
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Times, Trouble};
use std::sync::Arc;

/// A task under way.
#[derive(Clone, Debug)]
pub struct Running {
    work: Work,
    /// Chunks that were fetched: which source, what came.
    got: Vec<(usize, Vec<u8>)>,
    /// The next file or source.
    next: usize,
}

impl Running {
    /// Whose task it is.
    pub fn key(&self) -> Key {
        match &self.work {
            Work::MakeDirs { key, .. }
            | Work::Stat { key, .. }
            | Work::Digest { key, .. }
            | Work::Encode { key, .. }
            | Work::FlushAbort { key, .. }
            | Work::Prune { key, .. } => *key,
            Work::Forget { key, .. } => key.unwrap_or_default(),
            Work::Verify(m)
            | Work::Rebuild { manifest: m, .. }
            | Work::FlushPrepare { manifest: m, .. }
            | Work::FlushPublish { manifest: m, .. } => m.key,
            Work::Fetch { info, .. } => info.key,
            Work::Remember(holding) => holding.info.key,
            Work::FlushIntend { record, .. } | Work::WriteIndex(record) => record.info.key,
        }
    }
}

impl Running {
    fn slot(&self) -> Option<SlotId> {
        match &self.work {
            Work::Digest { slot, .. } | Work::Fetch { slot, .. } => Some(*slot),
            Work::Verify(m) => Some(m.slot),
            _ => None,
        }
    }
}

/// A step's end: more to do, or the result.
type Step = Result<Option<TaskResult>, (Trouble, Option<usize>)>;

fn plain(trouble: Trouble) -> (Trouble, Option<usize>) {
    (trouble, None)
}

fn done() -> TaskResult {
    TaskResult::Done(Times::default())
}

impl World {
    pub(crate) fn start_task(&mut self, id: AgentId, task: TaskId, work: Work) {
        match &work {
            // Nobody waits for it, and no history reads it: it must be one that a reader would believe.
            Work::Remember(holding) => {
                let read = holding.encode().and_then(|bytes| Holding::parse(&bytes));
                if read.as_ref() != Ok(&**holding) {
                    self.violate("FM-A2", format!("a{} writes down {holding:?}", id.0));
                }
                return;
            }
            Work::MakeDirs { .. } => self.moment(Moment::Begin),
            Work::Stat { .. } => self.moment(Moment::Stat),
            Work::Digest { .. } => self.moment(Moment::Digest),
            Work::Encode { .. } => self.moment(Moment::Encode),
            Work::Verify(_) => self.moment(Moment::Verify),
            Work::Rebuild { .. } => self.moment(Moment::Rebuild),
            Work::Fetch { .. } => self.moment(Moment::Fetch),
            Work::FlushPrepare { .. } => self.moment(Moment::FlushPrepare),
            Work::FlushPublish { .. } => self.moment(Moment::FlushPublish),
            Work::WriteIndex(_) => self.moment(Moment::WriteIndex),
            _ => {}
        }
        let running = Running { work, got: Vec::new(), next: 0 };
        if let Some(p) = self.agents.get_mut(&id).filter(|p| p.alive) {
            p.tasks.insert(task, running);
            self.next_step(id, task, true);
        }
    }

    fn next_step(&mut self, id: AgentId, task: TaskId, wanted: bool) {
        let chance = 100 + self.rng.below(self.sc.work_us);
        let delay = self.cost_handed(id).unwrap_or(chance);
        self.push(delay, Event::Task(id, task, wanted));
    }

    /// Tasks are void. A thread looks for that between two steps: one more may be done.
    pub(crate) fn cancel_tasks(&mut self, id: AgentId) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        let tasks = std::mem::take(&mut p.tasks);
        for (task, running) in tasks {
            if self.rng.chance(500) {
                if let Some(p) = self.agents.get_mut(&id) {
                    p.ghosts.insert(task, running);
                }
                self.next_step(id, task, false);
            }
        }
    }

    /// One step of a task.
    pub(crate) fn task_step(&mut self, id: AgentId, task: TaskId, wanted: bool) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        let taken = if wanted { p.tasks.remove(&task) } else { p.ghosts.remove(&task) };
        let Some(mut running) = taken else { return };
        let result = self.work_step(id, &mut running);
        if !wanted || self.violation.is_some() {
            return;
        }
        if matches!(running.work, Work::Verify(_) | Work::Digest { .. } | Work::Fetch { .. })
            && let Some(slot) = running.slot()
        {
            self.judge.verified.insert((running.key(), slot));
        }
        let result = match result {
            Ok(None) => {
                if let Some(p) = self.agents.get_mut(&id) {
                    p.tasks.insert(task, running);
                }
                return self.next_step(id, task, true);
            }
            Ok(Some(result)) => result,
            Err((trouble, source)) => {
                let restores = matches!(
                    running.work,
                    Work::Verify(_) | Work::Rebuild { .. } | Work::Fetch { .. }
                );
                if restores && matches!(trouble.cause, Cause::NoSpace | Cause::Os(_)) {
                    self.judge.excused = true;
                }
                self.note(|| format!("a{} task {task} fails: {trouble}", id.0));
                TaskResult::Failed { trouble, source }
            }
        };
        self.agent_event(id, None, AgentEvent::TaskDone { task, result });
    }

    /// Fails while the cache takes no writes.
    fn space(&self, id: AgentId) -> Result<(), (Trouble, Option<usize>)> {
        if self.agents[&id].store.full_until > self.now {
            return Err(plain(Trouble::new(Cause::NoSpace)));
        }
        Ok(())
    }

    fn work_step(&mut self, id: AgentId, t: &mut Running) -> Step {
        match t.work.clone() {
            Work::Remember(_) => Ok(Some(done())),
            Work::MakeDirs { .. } => {
                self.space(id)?;
                Ok(Some(done()))
            }
            Work::Stat { key, slot, files } => {
                self.agents[&id].store.stat(key, slot, &files).map_err(plain)?;
                Ok(Some(done()))
            }
            Work::Digest { key, slot, chunk_bytes, files } => {
                let store = &self.agents[&id].store;
                let m = store.digest(key, slot, chunk_bytes, &files).map_err(plain)?;
                Ok(Some(TaskResult::Digested(Box::new(m), Times::default())))
            }
            Work::Encode { key, slot, index, len, sources, .. } => {
                if self.gather(id, &sources, t)? {
                    return Ok(None);
                }
                self.space(id)?;
                let got = self.any_order(t);
                let sum = self.add_up(&sources, len, &got, false)?;
                let Some(p) = self.agents.get_mut(&id) else { return Ok(None) };
                p.store.parity.entry((key, slot)).or_default().insert(index, sum);
                Ok(Some(done()))
            }
            Work::Verify(m) => {
                if !self.agents[&id].store.sized(&m) {
                    self.space(id)?;
                }
                let Some(p) = self.agents.get_mut(&id) else { return Ok(None) };
                let (bad, bad_files) = p.store.verify(&m);
                Ok(Some(TaskResult::Verified { bad, bad_files }))
            }
            Work::Rebuild { manifest, chunk, sources } => {
                if self.gather(id, &sources, t)? {
                    return Ok(None);
                }
                self.space(id)?;
                self.rebuild(id, &manifest, chunk, &sources, t)
            }
            Work::Fetch { info, slot, ranks } => {
                self.space(id)?;
                let files = self.prefix.fetch(self.now, &info, &ranks).map_err(plain)?;
                Ok(Some(self.fetched(id, info.key, slot, info.chunk_bytes, files)))
            }
            Work::FlushPrepare { manifest, layout, attempt } => {
                self.flush_prepare(id, &manifest, (layout, attempt), t)
            }
            Work::FlushPublish { manifest, layout, attempt } => {
                self.flush_publish(&manifest, (layout, attempt), t)
            }
            Work::FlushAbort { key, attempt } => {
                self.prefix.check(self.now).map_err(plain)?;
                self.prefix.abort(key, attempt);
                Ok(Some(done()))
            }
            Work::FlushIntend { record, attempt } => {
                self.prefix.intend(self.now, *record, attempt).map_err(plain)?;
                Ok(Some(done()))
            }
            Work::WriteIndex(record) => {
                self.prefix.write_index(self.now, &record).map_err(plain)?;
                self.judge_indexed(&record);
                Ok(Some(done()))
            }
            Work::Prune { keep, .. } => {
                self.prefix.check(self.now).map_err(plain)?;
                self.prune(keep);
                Ok(Some(done()))
            }
            Work::Forget { key, .. } => {
                if let Some(key) = key {
                    self.prefix.delete(key);
                }
                Ok(Some(done()))
            }
        }
    }

    /// Fetches the next source. True while there is more to do.
    fn gather(
        &mut self,
        id: AgentId,
        sources: &[ChunkSource],
        t: &mut Running,
    ) -> Result<bool, (Trouble, Option<usize>)> {
        let n = t.next;
        let Some(source) = sources.get(n) else { return Ok(false) };
        t.next += 1;
        let failed = |cause| (Trouble::new(cause).agent(source.agent).slot(source.slot), Some(n));
        let here = self.agents[&id].place;
        let now = self.now;
        let Some(there) = self.place(Peer::Agent(source.agent)) else {
            return Err(failed(Cause::Unreachable));
        };
        let p = &self.agents[&source.agent];
        if self.cut(here, there) || p.frozen > now {
            return Err(failed(Cause::Unreachable));
        }
        let key = t.key();
        let Some(bytes) = p.store.serve(key, source.slot, source.piece) else {
            return Err(failed(Cause::Missing));
        };
        if self.rng.chance(200) {
            t.got.push((n, bytes.clone()));
        }
        t.got.push((n, bytes));
        Ok(true)
    }

    /// What came, in any order.
    fn any_order(&mut self, t: &mut Running) -> Vec<(usize, Vec<u8>)> {
        let mut got = std::mem::take(&mut t.got);
        let mut order = Vec::with_capacity(got.len());
        while !got.is_empty() {
            order.push(got.swap_remove(self.rng.below(got.len() as u64) as usize));
        }
        order
    }

    /// Adds up what came.
    fn add_up(
        &self,
        sources: &[ChunkSource],
        len: u32,
        got: &[(usize, Vec<u8>)],
        trusting: bool,
    ) -> Result<Vec<u8>, (Trouble, Option<usize>)> {
        let mut sum = vec![0; len as usize];
        let mut fold = Fold::new(sources, &mut sum, len as usize).with_bugs(self.sc.bugs);
        if trusting {
            fold = fold.trusting();
        }
        for (n, bytes) in got {
            // Whole, or in pieces.
            let added = if n % 2 == 0 {
                fold.apply(*n, bytes)
            } else {
                let mut coming = fold.begin(*n);
                let taken = bytes.chunks(7).try_for_each(|piece| fold.take(&mut coming, piece));
                taken.and_then(|()| fold.end(coming))
            };
            added.map_err(|FoldError::Damaged { source }| {
                let s = &sources[source];
                (Trouble::new(Cause::Damaged).agent(s.agent).slot(s.slot), Some(source))
            })?;
        }
        fold.finish();
        Ok(sum)
    }

    fn rebuild(
        &mut self,
        id: AgentId,
        m: &Manifest,
        chunk: u64,
        sources: &[ChunkSource],
        t: &mut Running,
    ) -> Step {
        let Some(at) = m.chunk(chunk) else {
            return Err(plain(Trouble::new(Cause::Malformed)));
        };
        let len = sources.iter().map(|s| s.len).max().unwrap_or(0).max(at.len);
        let got = self.any_order(t);
        let wrong = |sum: &[u8]| crc64(&sum[..at.len as usize]) != at.crc;
        let sum = self.add_up(sources, len, &got, false)?;
        if wrong(&sum) {
            let mut parities = (0..).zip(sources).filter(|(_, s)| s.crc.is_none()).map(|(i, _)| i);
            let source = parities.next().filter(|_| parities.next().is_none());
            return Err((Trouble::new(Cause::Damaged).slot(m.slot), source));
        }
        let Some(p) = self.agents.get_mut(&id) else { return Ok(None) };
        p.store.write_chunk(m, chunk, &sum[..at.len as usize]);
        Ok(Some(done()))
    }

    fn fetched(
        &mut self,
        id: AgentId,
        key: Key,
        slot: SlotId,
        chunk_bytes: u32,
        files: Vec<(stanchion_format::manifest::FileEntry, Vec<u8>)>,
    ) -> TaskResult {
        let mut m = Manifest { key, slot, chunk_bytes, files: Vec::new() };
        let Some(p) = self.agents.get_mut(&id) else { return done() };
        for (f, bytes) in files {
            m.files.push(entry(f.rank, &f.path, &bytes, chunk_bytes));
            p.store.files.insert((key, slot, f.rank, f.path), bytes);
        }
        TaskResult::Fetched(Box::new(m))
    }

    /// Deletes what is not kept; the judge counts for himself.
    fn prune(&mut self, keep: stanchion_core::retention::Keep) {
        let records: Vec<_> = self.prefix.index.values().cloned().collect();
        for key in
            stanchion_core::retention::doomed(&records, &Default::default(), keep, self.sc.bugs)
        {
            self.prefix.delete(key);
            self.judge_pruned(key, &records);
        }
    }

    /// One file under its temporary name, verified as it is read (FM-F9); at last the manifest.
    fn flush_prepare(
        &mut self,
        id: AgentId,
        m: &Arc<Manifest>,
        (layout, attempt): (Layout, u32),
        t: &mut Running,
    ) -> Step {
        self.prefix.check(self.now).map_err(plain)?;
        let Some(f) = m.files.get(t.next) else {
            match layout {
                Layout::Files => {
                    self.prefix.slots.insert((m.key, m.slot), (**m).clone());
                }
                Layout::Containers => {
                    let bytes = t.got.drain(..).map(|(_, bytes)| bytes).collect();
                    self.prefix.containers.insert((m.key, attempt, m.slot), ((**m).clone(), bytes));
                }
            }
            return Ok(Some(done()));
        };
        t.next += 1;
        let trouble = |cause| plain(Trouble::new(cause).rank(f.rank).file(f.path.clone()));
        let place = (m.key, m.slot, f.rank, f.path.clone());
        let Some(bytes) = self.agents[&id].store.files.get(&place) else {
            return Err(trouble(Cause::Missing));
        };
        if entry(f.rank, &f.path, bytes, m.chunk_bytes) != *f {
            return Err(trouble(Cause::Damaged));
        }
        match layout {
            Layout::Files => {
                self.prefix.tmp.insert((m.key, attempt, f.path.clone()), bytes.clone());
            }
            Layout::Containers => t.got.push((t.next, bytes.clone())),
        }
        Ok(None)
    }

    /// One file renamed.
    fn flush_publish(
        &mut self,
        m: &Arc<Manifest>,
        (layout, attempt): (Layout, u32),
        t: &mut Running,
    ) -> Step {
        if layout == Layout::Containers {
            return Ok(Some(done()));
        }
        self.prefix.check(self.now).map_err(plain)?;
        if let Some(f) = m.files.get(t.next) {
            t.next += 1;
            self.prefix.publish_file(m.key, attempt, &f.path).map_err(plain)?;
            self.judge_replaced(&f.path);
            return Ok(None);
        }
        Ok(Some(done()))
    }
}
