//! What waits for a bulk thread, and in which order it may run.
//!
//! Three classes, so that nobody waits behind what is slower than himself: *quick* (a rank waits for it),
//! *normal* (the job waits for it) and *low* (nobody waits). An old low task may be taken by a normal
//! thread, since a lowered priority cannot be raised again; so is one that is late (the next checkpoint may come soon),
//! also when it has begun: it ends where it is and begins again. It was starved, so little is lost.
//!
//! Order by dataset: a task that was cancelled may still be writing; a task of a later generation on the
//! same dataset starts only when it is gone. An eviction runs when no task on its dataset runs, and before
//! any that comes after it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use stanchion_core::api::Work;
use stanchion_format::ids::{Key, TaskId};

/// Tasks that wait; core keeps far fewer.
const TASKS_MAX: usize = 1 << 16;
/// A low task that has waited for so long may run at normal priority.
const LOW_AGE: Duration = Duration::from_secs(10);
/// An idle thread looks for aged tasks, and frees its memory, so often.
pub(super) const IDLE: Duration = Duration::from_secs(5);

/// Which threads do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A rank waits: directories, sizes.
    Quick,
    /// The job waits: restoring.
    Normal,
    /// Nobody waits: digests, parity, flushes, evictions.
    Low,
}

pub(super) fn class(work: &Work) -> Class {
    match work {
        Work::MakeDirs { .. } | Work::Stat { .. } => Class::Quick,
        Work::Verify(_) | Work::Rebuild { .. } | Work::Fetch { .. } => Class::Normal,
        Work::Digest { .. }
        | Work::Encode { .. }
        | Work::FlushPrepare { .. }
        | Work::FlushPublish { .. }
        | Work::FlushAbort { .. }
        | Work::FlushIntend { .. }
        | Work::Prune { .. }
        | Work::WriteIndex(_)
        | Work::Forget { .. }
        | Work::Remember(_) => Class::Low,
    }
}

/// The dataset that it touches.
pub(super) fn key(work: &Work) -> Key {
    match work {
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

fn remembers(job: &Job) -> bool {
    matches!(job.work, Work::Remember(_))
}

/// A task on its way.
#[derive(Debug)]
pub(super) struct Job {
    pub generation: u64,
    pub task: TaskId,
    pub work: Work,
    since: Instant,
    /// From then on it is late.
    due: Option<Instant>,
}

impl Job {
    /// Should it run at normal priority from now on?
    pub fn late(&self) -> bool {
        self.due.is_some_and(|due| Instant::now() >= due)
    }
}

/// What a thread does next.
#[derive(Debug)]
pub(super) enum Next {
    /// This task; [`Queue::done`] when it ended.
    Job(Job),
    /// Remove this dataset; [`Queue::evicted`] when it is gone.
    Evict(Key),
    /// Nothing for a while.
    Idle,
    /// End.
    Stop,
}

#[derive(Default)]
struct State {
    generation: u64,
    stopping: bool,
    quick: VecDeque<Job>,
    normal: VecDeque<Job>,
    low: VecDeque<Job>,
    evictions: VecDeque<Key>,
    evicting: HashSet<Key>,
    /// Generations of the tasks that run, by dataset.
    running: HashMap<Key, Vec<u64>>,
}

/// The queue of all bulk threads.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the queue")
    }

    /// Adds a task; false if too many wait.
    pub fn push(&self, task: TaskId, work: Work, due: Option<Instant>) -> bool {
        let mut state = self.state();
        if state.quick.len() + state.normal.len() + state.low.len() >= TASKS_MAX {
            return false;
        }
        let job = Job { generation: state.generation, task, work, since: Instant::now(), due };
        match class(&job.work) {
            Class::Quick => state.quick.push_back(job),
            Class::Normal => state.normal.push_back(job),
            Class::Low => state.low.push_back(job),
        }
        self.changed.notify_all();
        true
    }

    /// A task that was late ended before it was done: it goes on at normal priority. Instead of [`Queue::done`].
    pub fn again(&self, job: Job) {
        self.done(&job);
        let mut state = self.state();
        if job.generation == state.generation {
            state.normal.push_back(job);
            self.changed.notify_all();
        }
    }

    pub fn evict(&self, keys: &[Key]) {
        let mut state = self.state();
        // Behind the eviction it would make the dataset's directory anew.
        state.low.retain(|job| !(remembers(job) && keys.contains(&key(&job.work))));
        for key in keys {
            if !state.evictions.contains(key) {
                state.evictions.push_back(*key);
            }
        }
        self.changed.notify_all();
    }

    /// Voids all tasks; gives the new generation.
    pub fn cancel(&self) -> u64 {
        let mut state = self.state();
        state.generation += 1;
        state.quick.clear();
        state.normal.clear();
        state.low.clear();
        state.generation
    }

    /// Voids all and ends the threads.
    pub fn stop(&self) {
        self.cancel();
        let mut state = self.state();
        state.stopping = true;
        state.evictions.clear();
        self.changed.notify_all();
    }

    /// Is the dataset to be removed as soon as nothing works on it?
    pub fn goes(&self, key: Key) -> bool {
        self.state().evictions.contains(&key)
    }

    pub fn done(&self, job: &Job) {
        let mut state = self.state();
        let key = key(&job.work);
        if let Some(generations) = state.running.get_mut(&key) {
            if let Some(at) = generations.iter().position(|g| *g == job.generation) {
                generations.swap_remove(at);
            }
            if generations.is_empty() {
                state.running.remove(&key);
            }
        }
        self.changed.notify_all();
    }

    pub fn evicted(&self, key: Key) {
        self.state().evicting.remove(&key);
        self.changed.notify_all();
    }

    /// Waits for something to do, for at most [`IDLE`].
    pub fn next(&self, class: Class) -> Next {
        let mut state = self.state();
        let until = Instant::now() + IDLE;
        loop {
            if state.stopping {
                return Next::Stop;
            }
            if let Some(next) = state.take(class) {
                return next;
            }
            let now = Instant::now();
            let mut left = until.saturating_duration_since(now);
            if class == Class::Normal
                && let Some(due) = state.low.iter().filter_map(|j| j.due).filter(|d| *d > now).min()
            {
                left = left.min(due - now);
            }
            if now >= until {
                return Next::Idle;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.expect("no thread panics while it holds the queue").0;
        }
    }
}

impl State {
    fn take(&mut self, class: Class) -> Option<Next> {
        match class {
            Class::Quick => self.take_from(|s| &mut s.quick, Duration::ZERO),
            Class::Normal => self
                .take_from(|s| &mut s.normal, Duration::ZERO)
                .or_else(|| self.take_late())
                .or_else(|| self.take_from(|s| &mut s.low, LOW_AGE)),
            // First what takes no time, and by which a predecessor is not needed any more; then what gives room back: a
            // rank may wait for it.
            Class::Low => self
                .take_remember()
                .or_else(|| self.take_eviction(None))
                .or_else(|| self.take_from(|s| &mut s.low, Duration::ZERO)),
        }
    }

    fn take_from(
        &mut self,
        queue: impl Fn(&mut State) -> &mut VecDeque<Job>,
        age: Duration,
    ) -> Option<Next> {
        let mut at = 0;
        loop {
            let job = queue(self).get(at)?;
            if job.since.elapsed() < age {
                return None;
            }
            let (generation, key) = (job.generation, key(&job.work));
            if self.evictions.contains(&key) {
                if let Some(eviction) = self.take_eviction(Some(key)) {
                    return Some(eviction);
                }
            } else if self.may_run(generation, key) {
                let job = queue(self).remove(at)?;
                self.running.entry(key).or_default().push(generation);
                return Some(Next::Job(job));
            }
            at += 1;
        }
    }

    fn take_remember(&mut self) -> Option<Next> {
        let may = |job: &Job| {
            let key = key(&job.work);
            remembers(job) && !self.evictions.contains(&key) && self.may_run(job.generation, key)
        };
        let at = self.low.iter().position(may)?;
        let job = self.low.remove(at)?;
        self.running.entry(key(&job.work)).or_default().push(job.generation);
        Some(Next::Job(job))
    }

    /// A late low task goes before what is only old.
    fn take_late(&mut self) -> Option<Next> {
        let may = |job: &&Job| {
            let key = key(&job.work);
            job.late() && !self.evictions.contains(&key) && self.may_run(job.generation, key)
        };
        let task = self.low.iter().find(may)?.task;
        let at = self.low.iter().position(|job| job.task == task)?;
        let job = self.low.remove(at)?;
        self.running.entry(key(&job.work)).or_default().push(job.generation);
        Some(Next::Job(job))
    }

    fn may_run(&self, generation: u64, key: Key) -> bool {
        let older = |generations: &Vec<u64>| generations.iter().any(|g| *g < generation);
        !self.evicting.contains(&key) && !self.running.get(&key).is_some_and(older)
    }

    fn take_eviction(&mut self, wanted: Option<Key>) -> Option<Next> {
        let free = |k: &Key| wanted.is_none_or(|w| w == *k) && !self.running.contains_key(k);
        let at = self.evictions.iter().position(free)?;
        let key = self.evictions.remove(at)?;
        self.evicting.insert(key);
        Some(Next::Evict(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stanchion_format::ids::{DatasetNo, Incarnation, SlotId};

    fn key_of(no: u64) -> Key {
        Key { no: DatasetNo(no), inc: Incarnation::default() }
    }

    fn dirs(no: u64) -> Work {
        Work::MakeDirs { key: key_of(no), slot: SlotId(0), ranks: Vec::new() }
    }

    fn abort(no: u64) -> Work {
        Work::FlushAbort { key: key_of(no), attempt: 0 }
    }

    fn job(next: Option<Next>) -> Job {
        match next {
            Some(Next::Job(job)) => job,
            other => panic!("a job is expected, not {other:?}"),
        }
    }

    #[test]
    fn a_new_generation_waits_for_the_old_one_on_the_same_dataset() {
        let queue = Queue::default();
        assert!(queue.push(TaskId(1), abort(7), None));
        let old = job(queue.state().take(Class::Low));
        queue.cancel();
        assert!(queue.push(TaskId(2), abort(7), None) && queue.push(TaskId(3), abort(8), None));
        // The other dataset is free, this one is not.
        assert_eq!(job(queue.state().take(Class::Low)).task, TaskId(3));
        assert!(queue.state().take(Class::Low).is_none());
        queue.done(&old);
        assert_eq!(job(queue.state().take(Class::Low)).task, TaskId(2));
    }

    #[test]
    fn evictions_run_between_what_was_before_and_what_comes_after() {
        let queue = Queue::default();
        assert!(queue.push(TaskId(1), dirs(7), None));
        let before = job(queue.state().take(Class::Quick));
        queue.evict(&[key_of(7)]);
        assert!(queue.push(TaskId(2), dirs(7), None));
        assert!(queue.state().take(Class::Quick).is_none());
        assert!(queue.state().take(Class::Low).is_none());
        queue.done(&before);
        let evict = queue.state().take(Class::Quick);
        assert!(matches!(evict, Some(Next::Evict(k)) if k == key_of(7)), "{evict:?}");
        assert!(queue.state().take(Class::Quick).is_none());
        queue.evicted(key_of(7));
        assert_eq!(job(queue.state().take(Class::Quick)).task, TaskId(2));
    }

    #[test]
    fn what_is_to_go_is_not_worked_on_and_goes_before_other_work() {
        let queue = Queue::default();
        assert!(queue.push(TaskId(1), abort(7), None));
        let under_way = job(queue.state().take(Class::Low));
        assert!(queue.push(TaskId(2), abort(8), None));
        queue.evict(&[key_of(7)]);
        assert!(queue.goes(key_of(7)) && !queue.goes(key_of(8)));
        assert_eq!(job(queue.state().take(Class::Low)).task, TaskId(2));
        assert!(queue.push(TaskId(3), abort(9), None));
        queue.done(&under_way);
        let evict = queue.state().take(Class::Low);
        assert!(matches!(evict, Some(Next::Evict(k)) if k == key_of(7)), "{evict:?}");
        assert!(!queue.goes(key_of(7)));
    }

    #[test]
    fn what_is_late_goes_on_at_normal_priority() {
        let queue = Queue::default();
        let (past, future) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        assert!(queue.push(TaskId(1), abort(7), Some(future)));
        assert!(queue.state().take(Class::Normal).is_none());
        assert!(queue.push(TaskId(2), abort(8), Some(past)));
        let late = job(queue.state().take(Class::Normal));
        assert!(late.task == TaskId(2) && late.late());
        queue.done(&late);
        // One that has begun is given up by the low thread.
        assert!(queue.push(TaskId(3), abort(9), Some(past)));
        let begun = job(queue.state().take(Class::Low));
        assert_eq!(begun.task, TaskId(1));
        let begun = job(queue.state().take(Class::Low));
        queue.again(begun);
        assert_eq!(job(queue.state().take(Class::Normal)).task, TaskId(3));
        // Not across a cancellation.
        assert!(queue.push(TaskId(4), abort(10), Some(past)));
        let begun = job(queue.state().take(Class::Low));
        queue.cancel();
        queue.again(begun);
        assert!(queue.state().take(Class::Normal).is_none());
    }

    #[test]
    fn cancelled_tasks_are_gone_and_the_queue_is_bounded() {
        let queue = Queue::default();
        for task in 0..TASKS_MAX as u64 {
            assert!(queue.push(TaskId(task), abort(task), None));
        }
        assert!(!queue.push(TaskId(0), dirs(0), None));
        queue.cancel();
        assert!(queue.state().take(Class::Low).is_none());
        assert!(queue.push(TaskId(0), dirs(0), None));
    }

    #[test]
    fn what_is_written_down_goes_first_and_not_behind_its_eviction() {
        // FM-A1: a predecessor is evicted behind what makes it needless, and nothing makes its directory anew.
        let queue = Queue::default();
        let remember = |no: u64| Work::Remember(Box::new(holding(no)));
        assert!(queue.push(TaskId(1), abort(9), None));
        assert!(
            queue.push(TaskId(2), remember(7), None) && queue.push(TaskId(3), remember(8), None)
        );
        queue.evict(&[key_of(7)]);
        let first = job(queue.state().take(Class::Low));
        assert_eq!(first.task, TaskId(3));
        assert!(
            matches!(queue.state().take(Class::Low), Some(Next::Evict(key)) if key == key_of(7))
        );
        // One that is new after that is of a dataset that came back.
        assert!(queue.push(TaskId(4), remember(7), None));
        assert_eq!(job(queue.state().take(Class::Low)).task, TaskId(1));
        assert!(queue.state().take(Class::Low).is_none());
        queue.evicted(key_of(7));
        assert_eq!(job(queue.state().take(Class::Low)).task, TaskId(4));
    }

    fn holding(no: u64) -> stanchion_format::holding::Holding {
        use stanchion_format::layout::{Scheme, Sets};
        let info = stanchion_format::peer::DatasetInfo {
            key: key_of(no),
            name: "x".into(),
            flags: 1,
            ranks: 1,
            sets: Sets::new(Scheme::Single, 1, 2),
            chunk_bytes: 4096,
            bytes: 0,
            files: 0,
            placement: [].into(),
        };
        stanchion_format::holding::Holding {
            no: 1,
            job: stanchion_format::ids::JobId(1),
            inc: Incarnation::default(),
            ancestry: Default::default(),
            info,
            slot: SlotId(0),
            data: true,
            parity: false,
            manifests: Vec::new(),
        }
    }
}
