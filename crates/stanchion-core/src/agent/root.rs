//! What only the root of the tree decides: numbers, commits, levels, when to checkpoint, when to end.

use super::{Agent, RESEND_MS, UNPROTECTED_MAX};
use crate::api::{Millis, Now, TaskResult};
use crate::bugs::Bug;
use stanchion_format::client::{Ask, Code, FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::{DatasetNo, Key, Level, PeerId};
use stanchion_format::name;
use stanchion_format::peer::{
    Cause, CollId, Contrib, DatasetInfo, Msg, Plan, Record, Report, Severity, Times, Trouble,
    Verdict,
};
use stanchion_format::place::sets_anyhow;
use std::collections::{BTreeSet, VecDeque};

/// Reports that may wait for the controller's acknowledgement; beyond it the controller is as good as gone
/// and further ones are not made.
const REPORTS_MAX: usize = 1024;
/// Prefix of settings that carry halt conditions; they are not in the table.
const HALT_PREFIX: &str = "halt.";

/// When the application should end.
#[derive(Clone, Debug, Default)]
struct Halt {
    now: bool,
    after_checkpoints: Option<u64>,
    before_unix_s: Option<u64>,
    after_unix_s: Option<u64>,
}

/// A begin that waits until fewer datasets wait for their protection.
#[derive(Debug)]
struct PendingBegin {
    id: CollId,
    name: String,
    flags: u32,
    since: Millis,
}

/// A dataset of which all ranks have asked a snapshot, until the record that commits or drops it is announced.
#[derive(Debug)]
struct Filling {
    key: Key,
    /// What the ranks said.
    said: Contrib,
    decided: bool,
}

/// The root's own memory.
#[derive(Debug)]
pub(super) struct Root {
    next_no: DatasetNo,
    next_report: u64,
    pub(super) reports: VecDeque<(u64, Report)>,
    reports_sent: Option<Millis>,
    open: Option<(Key, Millis)>,
    pending_begin: Option<PendingBegin>,
    filling: Option<Filling>,
    /// Finalize, and the controller's wish to finish, while a dataset is being filled.
    pending_finalize: Option<CollId>,
    pending_finish: Option<bool>,
    restart: Option<Key>,
    restart_started: bool,
    /// The restart dataset was rejected, or another one is wanted: what the controller must decide.
    redecide: Option<Msg>,
    need_calls: u64,
    started: Millis,
    last_checkpoint: Millis,
    checkpoint_us: u64,
    halt: Halt,
    advised: bool,
    finalized: bool,
    /// Ranks of the job, once all have come.
    ranks: u32,
    pub(super) flush: super::flush::RootFlush,
}

impl Root {
    pub(super) fn new(plan: &Plan, now: Now, old: Option<Root>) -> Root {
        let mut root = Root {
            next_no: plan.next_no,
            next_report: 1,
            reports: VecDeque::new(),
            reports_sent: None,
            open: None,
            pending_begin: None,
            filling: None,
            pending_finalize: None,
            pending_finish: None,
            restart: plan.restart.map(|(key, _)| key),
            restart_started: false,
            redecide: None,
            need_calls: 0,
            started: now.mono,
            last_checkpoint: now.mono,
            checkpoint_us: 0,
            halt: Halt::default(),
            advised: false,
            finalized: false,
            ranks: 0,
            flush: super::flush::RootFlush::default(),
        };
        if let Some(old) = old {
            root.ranks = if plan.keep_ranks { old.ranks } else { 0 };
            root.need_calls = old.need_calls;
            root.halt = old.halt;
        }
        root
    }

    /// Keeps a report until it is acknowledged; gives its number.
    pub(super) fn report(&mut self, report: Report, now: Millis) -> Option<u64> {
        if self.reports.len() >= REPORTS_MAX {
            return None;
        }
        let n = self.next_report;
        self.reports.push_back((n, report));
        self.next_report += 1;
        self.reports_sent.get_or_insert(now);
        Some(n)
    }
}

impl Agent {
    fn root_mut(&mut self) -> &mut Root {
        self.root.as_mut().expect("decisions are made at the root only")
    }

    /// The one place where a question gets its answer.
    pub(super) fn decide(&mut self, id: CollId, all: Contrib) {
        match id {
            CollId::Init => self.decide_init(all),
            CollId::Seq(_) => self.decide_seq(id, all),
            CollId::Protect(key) => self.decide_protect(key, all),
            CollId::FlushPrepare(key, attempt) => self.decide_prepared(key, attempt, all),
            CollId::FlushPublish(key, attempt) => self.decide_published(key, attempt, all),
            CollId::Filled(key) => self.decide_filled(key, all),
        }
    }

    fn decide_init(&mut self, all: Contrib) {
        let id = CollId::Init;
        if let Some(trouble) = all.trouble {
            let code = if trouble.cause == Cause::Timeout { Code::Timeout } else { Code::Ranks };
            self.report(Report::CollectiveFailed(trouble.clone()));
            self.answer_coll(id, Verdict::Failed(code, trouble));
            return;
        }
        // FM-S15
        let restart = self.root_mut().restart;
        let wanted = restart.and_then(|k| self.datasets.get(&k)).map(|d| d.info.ranks);
        if let Some(want) = wanted.filter(|want| *want != all.size) {
            let trouble = Trouble::new(Cause::Ranks { want, have: all.size });
            self.report(Report::CollectiveFailed(trouble.clone()));
            self.answer_coll(id, Verdict::Failed(Code::Ranks, trouble));
            return;
        }
        match self.checked_settings(&all, false) {
            Err(trouble) => {
                self.report(Report::CollectiveFailed(trouble.clone()));
                self.answer_coll(id, Verdict::Failed(Code::Invalid, trouble));
            }
            Ok(pairs) => {
                self.root_mut().ranks = all.size;
                self.report(Report::RanksReady { ranks: all.size });
                let verdict = if pairs.is_empty() {
                    Verdict::Ok
                } else {
                    Verdict::Record(self.issue(Record::Settings(pairs)))
                };
                self.answer_coll(id, verdict);
            }
        }
    }

    /// The application's settings, each checked; the first refused one is the trouble.
    fn checked_settings(
        &mut self,
        all: &Contrib,
        running: bool,
    ) -> Result<Vec<(String, String)>, Trouble> {
        let mut copy = self.settings().clone();
        for (name, value) in &all.settings {
            if let Err(error) = copy.set_by_application(name, value, running) {
                self.log(Severity::Error, format!("setting refused: {error}"));
                let shown = stanchion_format::config::Shown::new(&format!("{name}={value}"));
                return Err(Trouble::new(Cause::Setting).file(shown.to_string()));
            }
        }
        Ok(all.settings.clone())
    }

    fn decide_seq(&mut self, id: CollId, all: Contrib) {
        if !all.settings.is_empty()
            && let Ok(pairs) = self.checked_settings(&all, true)
        {
            self.issue(Record::Settings(pairs));
        }
        if let Some((a, b)) = all.disagree {
            self.log(
                Severity::Error,
                format!("ranks {a} and {b} do not make the same call, or with other arguments; every rank must call alike"),
            );
            let trouble = Trouble::new(Cause::Disagree).rank(b);
            self.collective_failed(id, &all, Code::Mismatch, trouble);
            return;
        }
        let urgent =
            all.trouble.clone().filter(|t| matches!(t.cause, Cause::Timeout | Cause::Unreachable));
        let Some(ask) = all.ask.clone() else {
            self.answer_coll(id, Verdict::Failed(Code::Internal, Trouble::new(Cause::State)));
            return;
        };
        if let Some(trouble) = urgent.filter(|_| !matches!(ask, Ask::Complete | Ask::Snapshot)) {
            self.collective_failed(id, &all, Code::Timeout, trouble);
            return;
        }
        match ask {
            Ask::NeedCheckpoint => {
                let need = self.need_checkpoint();
                self.answer_coll(id, Verdict::Flag(need));
            }
            Ask::ShouldExit => {
                let exit = self.should_exit();
                self.answer_coll(id, Verdict::Flag(exit));
            }
            Ask::Barrier => self.answer_coll(id, Verdict::Ok),
            Ask::Begin { name, flags } => self.decide_begin(id, name, flags),
            Ask::Complete => self.decide_complete(id, all),
            Ask::Snapshot => self.decide_snapshot(id, all),
            Ask::HaveRestart => self.answer_coll(id, Verdict::Ok),
            Ask::StartRestart => self.decide_start_restart(id),
            Ask::CompleteRestart => self.decide_complete_restart(id, all),
            Ask::Current { name } => self.decide_current(id, name),
            Ask::Drop { name } => self.decide_forget(id, &name, false),
            Ask::Delete { name } => self.decide_forget(id, &name, true),
            // What is being filled is complete before the ranks go.
            Ask::Finalize if self.filling() => self.root_mut().pending_finalize = Some(id),
            Ask::Finalize => self.finalize(id),
        }
    }

    fn finalize(&mut self, id: CollId) {
        self.root_mut().finalized = true;
        self.report(Report::Finalized);
        self.answer_coll(id, Verdict::Ok);
    }

    /// Is a dataset being copied behind the application?
    fn filling(&self) -> bool {
        self.root.as_ref().is_some_and(|r| r.filling.is_some())
    }

    /// Without ranks nobody says any more what is filled.
    pub(super) fn root_ranks_ended(&mut self) {
        if let Some(root) = &mut self.root {
            root.filling = None;
        }
    }

    /// The controller's wish to finish waits for a dataset that is being filled.
    pub(super) fn finish_waits(&mut self, flush: bool) -> bool {
        let waits = self.filling();
        if waits {
            self.root_mut().pending_finish = Some(flush);
        }
        waits
    }

    /// A dataset was committed or dropped: what waited for that goes on.
    fn filled_over(&mut self, key: Key) {
        let Some(root) = self.root.as_mut() else { return };
        if root.filling.as_ref().is_none_or(|f| f.key != key) {
            return;
        }
        root.filling = None;
        let (finalize, finish) = (root.pending_finalize.take(), root.pending_finish.take());
        if let Some(id) = finalize {
            self.finalize(id);
        }
        if let Some(flush) = finish {
            self.on_finish(flush);
        }
        self.try_begin_if_pending();
    }

    fn collective_failed(&mut self, id: CollId, all: &Contrib, code: Code, trouble: Trouble) {
        self.report(Report::CollectiveFailed(trouble.clone()));
        let completing = matches!(all.ask, Some(Ask::Complete | Ask::Snapshot));
        let open = self.root_mut().open;
        let verdict = match open {
            // FM-S2: what cannot be voted on is dropped, by a record like any other.
            Some((key, _)) if completing => {
                self.root_mut().open = None;
                Verdict::Record(self.issue(Record::Drop(key, trouble)))
            }
            _ => Verdict::Failed(code, trouble),
        };
        self.answer_coll(id, verdict);
    }

    fn need_checkpoint(&mut self) -> bool {
        let now = self.now.mono;
        let halting = self.halt_due();
        let settings = self.settings().clone();
        let root = self.root_mut();
        root.need_calls += 1;
        let interval = settings.number("checkpoint_interval");
        let seconds = settings.number("checkpoint_s");
        let overhead = settings.percent("checkpoint_overhead_percent");
        if halting || (interval == 0 && seconds == 0 && overhead <= 0.0) {
            return true;
        }
        let by_count = interval > 0 && root.need_calls.is_multiple_of(interval);
        let by_time = seconds > 0 && now.since(root.last_checkpoint) >= seconds * 1000;
        let elapsed = now.since(root.started).max(1) as f64;
        let by_cost =
            overhead > 0.0 && root.checkpoint_us as f64 / 1000.0 / elapsed * 100.0 < overhead;
        by_count || by_time || by_cost
    }

    fn halt_due(&self) -> bool {
        let Some(root) = &self.root else { return false };
        let unix = self.now.unix_s;
        let margin = self.settings().number("halt_s");
        let end = self.settings().number("end_time");
        root.halt.now
            || root.halt.after_checkpoints == Some(0)
            || root.halt.after_unix_s.is_some_and(|t| unix >= t)
            || root.halt.before_unix_s.is_some_and(|t| unix + margin >= t)
            || (margin > 0 && end > 0 && unix + margin >= end)
    }

    fn should_exit(&mut self) -> bool {
        let exit = self.halt_due();
        if exit && !std::mem::replace(&mut self.root_mut().advised, true) {
            self.report(Report::ExitAdvised);
        }
        exit
    }

    /// Halt conditions and live settings from the runner.
    pub(super) fn on_halt_settings(&mut self, pairs: Vec<(String, String)>) {
        if self.root.is_none() {
            return;
        }
        let mut live = Vec::new();
        for (name, value) in pairs {
            let Some(what) = name.strip_prefix(HALT_PREFIX) else {
                live.push((name, value));
                continue;
            };
            let number = value.parse::<u64>().ok();
            let halt = &mut self.root_mut().halt;
            match what {
                "now" => halt.now = number == Some(1),
                "after_checkpoints" => halt.after_checkpoints = number,
                "before_unix_s" => halt.before_unix_s = number,
                "after_unix_s" => halt.after_unix_s = number,
                _ => {}
            }
        }
        if !live.is_empty() {
            self.issue(Record::Settings(live));
        }
    }

    fn decide_begin(&mut self, id: CollId, name: String, flags: u32) {
        let bad_name = !name.is_empty() && name::check_dataset(&name).is_err();
        let unknown = flags & !(FLAG_CHECKPOINT | FLAG_OUTPUT) != 0;
        if bad_name || unknown {
            let shown = stanchion_format::config::Shown::new(&name);
            let trouble = Trouble::new(Cause::Name).file(shown.to_string());
            self.answer_coll(id, Verdict::Failed(Code::Invalid, trouble));
            return;
        }
        let root = self.root_mut();
        if root.open.is_some() || root.restart_started || root.pending_begin.is_some() {
            let trouble = Trouble::new(Cause::State);
            self.answer_coll(id, Verdict::Failed(Code::State, trouble));
            return;
        }
        let since = self.now.mono;
        self.root_mut().pending_begin = Some(PendingBegin { id, name, flags, since });
        self.try_begin();
    }

    /// Begins the dataset that waits, if no more than a bounded number wait for their protection, and none is still
    /// being filled.
    fn try_begin(&mut self) {
        if self.filling() {
            return;
        }
        let waiting = self.datasets.values().filter(|d| d.protecting()).count();
        let limit = self.settings().number("collective_timeout_ms");
        let now = self.now.mono;
        let behind = self.flush_is_behind();
        let Some(pending) = &self.root_mut().pending_begin else { return };
        if behind {
            // What waits for its flush must not be evicted meanwhile; but no prefix holds the job for ever.
            if now.since(pending.since) <= limit / 2 {
                return;
            }
            self.give_up_queued_flushes();
        }
        let Some(pending) = &self.root_mut().pending_begin else { return };
        if waiting >= UNPROTECTED_MAX {
            if now.since(pending.since) > limit {
                let id = pending.id;
                self.root_mut().pending_begin = None;
                let trouble = Trouble::new(Cause::Timeout);
                self.report(Report::CollectiveFailed(trouble.clone()));
                self.answer_coll(id, Verdict::Failed(Code::Timeout, trouble));
            }
            return;
        }
        let pending = self.root_mut().pending_begin.take().expect("it was just there");
        let info = self.new_dataset(pending.name, pending.flags);
        self.root_mut().open = Some((info.key, now));
        self.report(Report::Began(Box::new(info.clone())));
        self.answer_coll(pending.id, Verdict::Begun(Box::new(info)));
    }

    fn new_dataset(&mut self, name: String, flags: u32) -> DatasetInfo {
        let inc = self.incarnation();
        let settings = self.settings().clone();
        let slots = self.view.as_ref().map_or(1, |v| v.plan.slots.len() as u32);
        let groups = self.view.as_ref().map_or(&[][..], |v| &v.plan.groups);
        let groups = if self.bug(Bug::IgnoreGroups) { &[][..] } else { groups };
        let sets = sets_anyhow(settings.redundancy(), slots, groups);
        let root = self.root_mut();
        let no = root.next_no;
        root.next_no = DatasetNo(no.0 + 1);
        DatasetInfo {
            key: Key { no, inc },
            name: if name.is_empty() { format!("dataset.{no}") } else { name },
            flags,
            ranks: 0,
            sets,
            chunk_bytes: settings.number("chunk_bytes") as u32,
            bytes: 0,
            files: 0,
            placement: [].into(),
        }
    }

    fn decide_complete(&mut self, id: CollId, all: Contrib) {
        let Some((key, all)) = self.take_declared(id, all) else { return };
        let n = self.certify(key, all);
        self.answer_coll(id, Verdict::Record(n));
    }

    /// The open dataset, and what all ranks said of it.
    fn take_declared(&mut self, id: CollId, mut all: Contrib) -> Option<(Key, Contrib)> {
        let Some((key, _)) = self.root_mut().open.take() else {
            self.answer_coll(id, Verdict::Failed(Code::State, Trouble::new(Cause::State)));
            return None;
        };
        let since = self.coll(id).since;
        all.times.coordinate_us = self.now.mono.since(since) * 1000;
        // FM-S2: who does not speak has not said yes.
        let silent = all.ranks != self.root_mut().ranks;
        all.trouble = all.trouble.or(silent.then(|| Trouble::new(Cause::Unreachable)));
        Some((key, all))
    }

    fn decide_snapshot(&mut self, id: CollId, all: Contrib) {
        let Some((key, all)) = self.take_declared(id, all) else { return };
        if all.trouble.is_some() {
            let n = self.certify(key, all);
            self.answer_coll(id, Verdict::Record(n));
            return;
        }
        self.root_mut().filling = Some(Filling { key, said: all, decided: false });
        // Its deadline runs.
        self.coll(CollId::Filled(key));
        self.answer_coll(id, Verdict::Ok);
        self.advance(CollId::Filled(key));
    }

    /// FM-P9: what all agents have of it is what all ranks declared, or it is dropped.
    fn decide_filled(&mut self, key: Key, all: Contrib) {
        let id = CollId::Filled(key);
        let filling = self.root_mut().filling.as_mut().filter(|f| f.key == key && !f.decided);
        let Some(filling) = filling else {
            self.answer_coll(id, Verdict::Failed(Code::State, Trouble::new(Cause::State)));
            return;
        };
        filling.decided = true;
        let mut said = filling.said.clone();
        said.trouble = all.trouble;
        said.times = said.times.max(all.times);
        let n = self.certify(key, said);
        self.answer_coll(id, Verdict::Record(n));
    }

    /// The record that commits a dataset, or drops it if there is trouble.
    fn certify(&mut self, key: Key, all: Contrib) -> u64 {
        let trouble = all.trouble.clone();
        let Some(dataset) = self.datasets.get_mut(&key) else {
            return self.issue(Record::Drop(key, Trouble::new(Cause::NoDataset)));
        };
        let mut info = dataset.info.clone();
        info.ranks = all.ranks;
        info.bytes = all.bytes;
        info.files = all.files;
        info.placement = all.ranges.as_slice().into();
        dataset.times = dataset.times.max(all.times);
        dataset.times.coordinate_us = all.times.coordinate_us;
        match trouble {
            Some(trouble) => self.issue(Record::Drop(key, trouble)),
            None => self.issue(Record::Commit(Box::new(info))),
        }
    }

    fn decide_start_restart(&mut self, id: CollId) {
        let root = self.root_mut();
        let writing = root.open.is_some() || root.filling.is_some();
        let allowed = root.restart.is_some() && !root.restart_started && !writing;
        if allowed {
            root.restart_started = true;
            self.answer_coll(id, Verdict::Ok);
        } else {
            self.answer_coll(id, Verdict::Failed(Code::State, Trouble::new(Cause::State)));
        }
    }

    fn decide_complete_restart(&mut self, id: CollId, all: Contrib) {
        let root = self.root_mut();
        let Some(key) = root.restart.filter(|_| root.restart_started) else {
            self.answer_coll(id, Verdict::Failed(Code::State, Trouble::new(Cause::State)));
            return;
        };
        root.restart_started = false;
        match all.trouble {
            None => {
                self.root_mut().restart = None;
                self.report(Report::RestartDone(key));
                self.answer_coll(id, Verdict::Ok);
                self.root_restarted(key);
            }
            // The ranks wait until the controller has decided anew (FM-S3).
            Some(trouble) => {
                let inc = self.incarnation();
                self.ask_again(Msg::Rejected(inc, key, trouble));
            }
        }
    }

    fn decide_current(&mut self, id: CollId, wanted: String) {
        let restart = self.root_mut().restart;
        let name = restart.and_then(|k| self.datasets.get(&k)).map(|d| d.info.name.clone());
        let fresh = self.root_mut().open.is_none() && !self.root_mut().restart_started;
        let begun = self.datasets.keys().any(|k| k.inc == self.incarnation());
        if name.as_ref() == Some(&wanted) || (begun && self.newest_named(&wanted).is_some()) {
            self.answer_coll(id, Verdict::Ok);
        } else if fresh && !begun {
            let inc = self.incarnation();
            self.ask_again(Msg::RestartFrom(inc, wanted));
        } else {
            let trouble = Trouble::new(Cause::NoDataset);
            self.answer_coll(id, Verdict::Failed(Code::NotFound, trouble));
        }
    }

    fn ask_again(&mut self, msg: Msg) {
        self.root_mut().redecide = Some(msg.clone());
        self.send(PeerId::Controller, msg);
    }

    fn newest_named(&self, name: &str) -> Option<Key> {
        self.datasets.iter().rev().find(|(_, d)| d.cached && d.info.name == name).map(|(k, _)| *k)
    }

    /// Drop or delete: first in the prefix, then in the caches, so that a crash in between leaves nothing that
    /// could be restarted from. The ranks hear of it when both are done.
    fn decide_forget(&mut self, id: CollId, name: &str, delete: bool) {
        let key = self.newest_named(name);
        let work = crate::api::Work::Forget { key, name: name.to_owned(), delete };
        self.run(super::TaskFor::Forget(id, key), work);
    }

    pub(super) fn on_forgotten(&mut self, id: CollId, key: Option<Key>, result: TaskResult) {
        let Some(root) = &mut self.root else { return };
        let verdict = match (result, key) {
            (TaskResult::Failed { trouble, .. }, None) if trouble.cause == Cause::NoDataset => {
                Verdict::Failed(Code::NotFound, trouble)
            }
            (TaskResult::Failed { trouble, .. }, _) if trouble.cause != Cause::NoDataset => {
                Verdict::Failed(Code::Io, trouble)
            }
            (_, None) => Verdict::Ok,
            // It was about to be restarted from: the controller chooses another, and the ranks hear then.
            (_, Some(key)) if root.restart == Some(key) => {
                let inc = self.incarnation();
                self.ask_again(Msg::Rejected(inc, key, Trouble::new(Cause::Dropped)));
                return;
            }
            (_, Some(key)) => {
                self.abort_flush_of(key);
                Verdict::Record(self.issue(Record::Forget(key)))
            }
        };
        self.answer_coll(id, verdict);
    }

    fn decide_protect(&mut self, key: Key, all: Contrib) {
        if self.goes(key) {
            // It was chosen to make room before the last vote came.
            return;
        }
        if let Some(dataset) = self.datasets.get_mut(&key) {
            dataset.times = dataset.times.max(all.times);
        }
        let record = match all.trouble {
            None => Record::Level(key, Level::Protected),
            Some(trouble) => Record::ProtectFailed(key, trouble),
        };
        let n = self.issue(record);
        self.answer_coll(CollId::Protect(key), Verdict::Record(n));
    }

    pub(super) fn root_committed(&mut self, key: Key) {
        if self.root.is_none() {
            return;
        }
        let now = self.now.mono;
        let Some(dataset) = self.datasets.get(&key) else { return };
        let (info, times) = (dataset.info.clone(), dataset.times);
        let checkpoint = dataset.is_checkpoint();
        let root = self.root_mut();
        if checkpoint {
            root.last_checkpoint = now;
            root.checkpoint_us += times.blocked_us;
            if let Some(left) = &mut root.halt.after_checkpoints {
                *left = left.saturating_sub(1);
            }
        }
        self.report(Report::Committed(Box::new(info), times));
        if checkpoint && self.halt_due() && self.settings().flag("halt_enabled") {
            self.report(Report::HaltDue);
        }
        self.filled_over(key);
    }

    pub(super) fn root_dropped(&mut self, key: Key, trouble: &Trouble) {
        self.report(Report::Dropped(key, trouble.clone()));
        self.filled_over(key);
    }

    pub(super) fn root_protect_failed(&mut self, key: Key, trouble: Trouble) {
        self.report(Report::ProtectFailed(key, trouble));
        self.flush_if_due(key);
    }

    pub(super) fn root_level(&mut self, key: Key, level: Level) {
        let times = self.datasets.get(&key).map_or_else(Times::default, |d| d.times);
        self.report(Report::Level(key, level, times));
        if level == Level::Protected {
            self.flush_if_due(key);
        }
        let (last, every) =
            (self.settings().number("keep_last"), self.settings().number("keep_every"));
        if level == Level::Persistent && self.root.is_some() && last > 0 {
            // What it cannot delete now the next one does.
            let keep = crate::retention::Keep { last, every };
            self.run(super::TaskFor::Nothing, crate::api::Work::Prune { key, keep });
        }
    }

    pub(super) fn root_forgotten(&mut self, key: Key) {
        self.report(Report::Forgotten(key));
    }

    /// Flush the dataset that the ranks restarted from, if that is wanted.
    fn root_restarted(&mut self, key: Key) {
        if self.settings().flag("flush_on_restart") {
            self.queue_flush(key);
        }
        self.evict();
    }

    /// Policy: outputs always, every k-th checkpoint.
    fn flush_if_due(&mut self, key: Key) {
        if self.root.is_none() {
            return;
        }
        if self.datasets.get(&key).is_some_and(|d| d.flush_wanted) {
            self.queue_flush(key);
        }
    }

    /// Starts what follows from the plan once ranks (or a flush) may come.
    pub(super) fn root_opened(&mut self) {
        if self.root.is_none() {
            return;
        }
        let outputs: BTreeSet<Key> = self
            .datasets
            .iter()
            .filter(|(_, d)| d.is_output() && d.cached)
            .map(|(k, _)| *k)
            .collect();
        for key in outputs {
            self.queue_flush(key);
        }
    }

    pub(super) fn send_reports(&mut self) {
        let inc = self.incarnation();
        let now = self.now.mono;
        let Some(root) = &mut self.root else { return };
        root.reports_sent = Some(now);
        let reports: Vec<(u64, Report)> = root.reports.iter().take(16).cloned().collect();
        for (n, report) in reports {
            self.send(PeerId::Controller, Msg::Report(inc, n, report));
        }
    }

    pub(super) fn tick_root(&mut self) {
        let now = self.now.mono;
        let Some(root) = &mut self.root else { return };
        let due = root.reports_sent.is_some_and(|at| now.since(at) >= RESEND_MS);
        let pending = !root.reports.is_empty();
        if due && pending {
            self.send_reports();
        }
        if due && let Some(msg) = self.root_mut().redecide.clone() {
            self.root_mut().reports_sent = Some(now);
            self.send(PeerId::Controller, msg);
        }
        self.try_begin_if_pending();
        if !self.filling()
            && let Some(flush) = self.root_mut().pending_finish.take()
        {
            self.on_finish(flush);
        }
        self.tick_flush();
    }

    fn try_begin_if_pending(&mut self) {
        if self.root.as_ref().is_some_and(|r| r.pending_begin.is_some()) {
            self.try_begin();
        }
    }
}
