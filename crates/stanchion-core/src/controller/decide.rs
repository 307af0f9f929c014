//! Survey, plan, install, restore, open; and the end.

use super::choose::{self, Candidate, Choice};
use super::{Controller, DECISIONS_MAX, Ending, Phase, Purpose, RestoredSum};
use crate::api::{ControllerAction, Notice, Outcome};
use crate::bugs::Bug;
use stanchion_format::ids::{AgentId, Ancestry, DatasetNo, Incarnation, Key, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::peer::{
    AgentAddr, Cause, DatasetInfo, Holdings, LedgerEntry, Msg, Plan, Restored, Severity, Source,
    Trouble,
};
use stanchion_format::place::sets_anyhow;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A rebuild that takes longer says so often how far it is, milliseconds.
const PROGRESS_MS: u64 = 2_000;

impl Controller {
    /// Asks every agent what it holds; the old incarnation ends there.
    pub(super) fn survey(&mut self, end_ranks: bool) {
        self.decisions += 1;
        if self.decisions > DECISIONS_MAX {
            self.exit(Outcome::AgentsFailed(Trouble::new(Cause::Timeout)));
            return;
        }
        self.enter(Phase::Surveying);
        self.keep_ranks = !end_ranks;
        self.round += 1;
        self.holdings.clear();
        self.read_index();
        self.send_round();
    }

    /// Sends what this phase asks to all who have not answered.
    pub(super) fn send_round(&mut self) {
        self.sent = self.now.mono;
        let epoch = self.cfg.epoch;
        let (round, end_ranks) = (self.round, !self.keep_ranks);
        let flush = self.flush_wanted();
        let plan = self.plan.clone();
        let root = plan.as_ref().map(|p| p.slots[0]);
        for agent in self.asked() {
            if self.answered.contains(&agent) {
                continue;
            }
            let msg = match (self.phase, &plan) {
                (Phase::Surveying, _) => Msg::Survey { epoch, round, end_ranks },
                (Phase::Installing, Some(plan)) => Msg::Install(plan.clone()),
                (Phase::Restoring, Some(plan)) => Msg::Restore(plan.inc),
                (Phase::Opening, Some(plan)) => Msg::Open(plan.inc),
                (Phase::Finishing, Some(plan)) if Some(agent) == root => {
                    Msg::Finish { inc: plan.inc, flush }
                }
                _ => continue,
            };
            self.send(agent, msg);
        }
    }

    /// Who has to answer what this phase asks: in a survey everybody, then those that the plan was made for. Who
    /// comes later is idle until the next survey.
    fn asked(&self) -> Vec<AgentId> {
        let all = self.agents.keys().copied();
        match &self.plan {
            Some(plan) if self.phase != Phase::Surveying => {
                let of_plan: BTreeSet<AgentId> = plan.agents.iter().map(|a| a.id).collect();
                all.filter(|a| of_plan.contains(a)).collect()
            }
            _ => all.collect(),
        }
    }

    fn flush_wanted(&self) -> bool {
        let s = &self.cfg.settings;
        // Flushing was switched off as a whole by flush_every = 0 only if flush_at_end is off too.
        match self.ending {
            Some(Ending::Success) => s.flag("flush_at_end"),
            _ => true,
        }
    }

    pub(super) fn on_holdings(&mut self, from: AgentId, holdings: Holdings) {
        if self.phase != Phase::Surveying
            || holdings.epoch != self.cfg.epoch
            || holdings.round != self.round
        {
            return;
        }
        self.newest_committed = self.newest_committed.max(holdings.newest_committed);
        self.holdings.insert(from, holdings);
        self.answered.insert(from);
        self.plan_if_known();
    }

    /// Asks for the prefix's index; what was known of it is not true any more.
    pub(super) fn read_index(&mut self) {
        self.index = None;
        self.prefix_trouble = None;
        self.index_at = self.now.mono;
        self.index_reads += 1;
        self.out.push(ControllerAction::ReadIndex);
    }

    /// Is this the answer to the last question?
    fn is_last_read(&mut self) -> bool {
        self.index_reads = self.index_reads.saturating_sub(1);
        self.index_reads == 0
    }

    pub(super) fn on_index(&mut self, records: Vec<IndexRecord>) {
        if self.is_last_read() {
            self.index = Some(records);
            self.plan_if_known();
        }
    }

    pub(super) fn on_index_failed(&mut self, trouble: Trouble) {
        if self.is_last_read() {
            self.without_index(trouble);
        }
    }

    /// It takes too long: nobody waits for the answers that are out.
    pub(super) fn index_timed_out(&mut self) {
        self.index_reads = 0;
        self.without_index(Trouble::new(Cause::Timeout));
    }

    fn without_index(&mut self, trouble: Trouble) {
        if self.phase == Phase::Surveying && self.index.is_none() {
            self.prefix_trouble = Some(trouble.clone());
            self.index = Some(Vec::new());
            self.say(Severity::Warn, Notice::PrefixTrouble(trouble));
            self.plan_if_known();
        }
    }

    /// Decides, once everything is known that can be.
    pub(super) fn plan_if_known(&mut self) {
        if self.phase != Phase::Surveying
            || self.index.is_none()
            || self.holdings.len() < self.agents.len()
            || self.agents.keys().any(|a| !self.holdings.contains_key(a))
        {
            return;
        }
        // The root sends its reports before its holdings.
        if let Some(trouble) = self.refused() {
            self.exit(Outcome::BadRestart(trouble));
            return;
        }
        let old_slots = self.slots.clone();
        if self.cfg.purpose == Purpose::WindDown && self.slots.is_empty() {
            self.slots_from_holdings();
        }
        if self.slots.is_empty() {
            self.slots = old_slots;
        }
        let slots = self.slots.clone();
        let mut choice = self.choose(&slots);
        if self.agents.is_empty() {
            let outcome = self.nobody_left(&choice);
            self.exit(outcome);
            return;
        }
        if choice.restart.is_none() && self.keep_ranks && self.named.is_some() {
            // The application asked for a name that does not exist: it is told so, and all is as before.
            self.named = None;
            choice = self.choose(&slots);
        }
        if let Some(outcome) = self.hopeless(&choice) {
            self.exit(outcome);
            return;
        }
        for (key, name, trouble) in choice.skipped.clone() {
            self.say(Severity::Warn, Notice::Skipped { key, name, trouble });
        }
        if !self.place() {
            return;
        }
        self.make_plan(choice);
    }

    fn choose(&self, slots: &[AgentId]) -> Choice {
        if self.cfg.from_scratch && self.newest_committed.is_none() {
            let mut choice = self.known(slots).choose();
            choice.restart = None;
            choice.skipped.clear();
            choice.keep.clear();
            return choice;
        }
        self.known(slots).choose()
    }

    fn known<'a>(&'a self, slots: &'a [AgentId]) -> choose::Known<'a> {
        choose::Known {
            holdings: &self.holdings,
            index: self.index.as_deref().unwrap_or(&[]),
            index_read: self.prefix_trouble.is_none(),
            slots,
            excluded: &self.excluded,
            named: self.named.as_deref(),
            fetch: self.cfg.settings.flag("fetch"),
            bugs: self.cfg.bugs,
        }
    }

    /// Who leads without having led before learns from the agents who hosted what: of a slot that several have something
    /// of, the one of the newest incarnation that has its data, and of the newest dataset.
    fn slots_from_holdings(&mut self) {
        let line = self.holdings.values().max_by_key(|h| h.inc);
        let all = || self.holdings.values().flat_map(|h| &h.datasets).map(|d| &d.info);
        // Directories of other lines may lie beside those of the newest (FM-S1).
        let ours = all().filter(|i| line.is_some_and(|h| h.ancestry.admits(h.inc, i.key)));
        let newest = ours.max_by_key(|i| i.key).or_else(|| all().max_by_key(|i| i.key));
        let nodes = newest.map_or(self.cfg.nodes, |i| i.sets.slots);
        let mut best: Vec<Option<_>> = vec![None; nodes as usize];
        for (agent, holdings) in &self.holdings {
            for dataset in &holdings.datasets {
                for slot in dataset.slots.iter().filter(|s| s.data || s.parity) {
                    let worth = (holdings.inc, slot.data, dataset.info.key, slot.parity, *agent);
                    if let Some(place) = best.get_mut(slot.slot.0 as usize) {
                        *place = (*place).max(Some(worth));
                    }
                }
            }
        }
        self.slots = best.into_iter().map(|b| b.map_or(AgentId(u32::MAX), |b| b.4)).collect();
    }

    /// How it ends without any agent.
    fn nobody_left(&self, choice: &Choice) -> Outcome {
        let trouble = Trouble::new(Cause::Unreachable);
        let persistent = choice.restart.as_ref().map(|c| c.info.key);
        match (&self.ending, persistent, self.newest_committed) {
            (Some(Ending::Success), ..) if self.halted => Outcome::Halted,
            (Some(Ending::Success), ..) => Outcome::Success { flush_trouble: Some(trouble) },
            (Some(Ending::Interrupted), ..) => Outcome::Interrupted,
            (Some(Ending::AppFailed { code, reason }), ..) => {
                Outcome::AppFailed { code: *code, reason: *reason }
            }
            (Some(Ending::WindDown), ..) => {
                Outcome::WoundDown { persistent, trouble: Some(trouble) }
            }
            (_, Some(_), _) => Outcome::NoSpare { have: 0, want: self.cfg.nodes, persistent },
            (_, None, Some(key)) => Outcome::Unrecoverable { key },
            (_, None, None) => Outcome::AgentsFailed(trouble),
        }
    }

    /// Must the job end here?
    fn hopeless(&mut self, choice: &Choice) -> Option<Outcome> {
        if choice.restart.is_some() || self.bug(Bug::SilentFreshStart) {
            return None;
        }
        if let (Some(_), None) = (&self.named, &self.ending) {
            return Some(Outcome::BadRestart(Trouble::new(Cause::NoDataset)));
        }
        // Ranks that rejected every dataset start anew by their own decision; a loss must not (FM-S14), be it
        // of what this run wrote or of what the prefix has.
        let rejected = self.keep_ranks && self.app_running;
        let skipped = choice.skipped.iter().map(|s| s.0);
        let committed = [self.newest_committed, choice.newest_committed].into_iter().flatten();
        let lost = skipped.chain(committed).filter(|k| !self.rejected.contains(k)).max();
        let unread = self.prefix_trouble.clone().filter(|_| self.cfg.settings.flag("fetch"));
        let (Some(committed), false) = (lost, rejected) else {
            let first = self.rejected.is_empty() && self.ending.is_none();
            return unread.filter(|_| first).map(Outcome::BadRestart);
        };
        match &self.ending {
            Some(Ending::Success) => None,
            Some(_) if self.cfg.purpose == Purpose::WindDown => Some(Outcome::WoundDown {
                persistent: None,
                trouble: Some(Trouble::new(Cause::BeyondScheme)),
            }),
            _ => Some(Outcome::Unrecoverable { key: committed }),
        }
    }

    /// Puts living agents into the places of dead ones. False if the job ends instead.
    fn place(&mut self) -> bool {
        let living: BTreeSet<AgentId> = self.agents.keys().copied().collect();
        let mut spares: Vec<AgentId> = self.idle().collect();
        spares.reverse();
        let lost: Vec<usize> =
            (0..self.slots.len()).filter(|s| !living.contains(&self.slots[*s])).collect();
        let winding_down = self.ending.is_some();
        if lost.len() > spares.len() && !winding_down {
            let have = living.len() as u32;
            self.ending = Some(Ending::NoSpare { have });
            if self.app_running {
                self.stop_app();
                return false;
            }
        }
        // At the end, survivors take over what has no spare: only to flush it.
        let survivors: Vec<AgentId> = living.iter().copied().collect();
        for (n, slot) in lost.into_iter().enumerate() {
            let agent = match self.best_spare(&mut spares, slot) {
                Some(spare) => {
                    if self.cfg.purpose == Purpose::Run {
                        let notice = Notice::SpareUsed { slot: SlotId(slot as u32), agent: spare };
                        self.say(Severity::Info, notice);
                    }
                    spare
                }
                None => survivors[n % survivors.len()],
            };
            self.slots[slot] = agent;
        }
        true
    }

    /// The failure group of an agent's node; who is in none is one.
    fn group_of(&self, agent: AgentId) -> u32 {
        self.cfg.groups.get(&agent).copied().unwrap_or(agent.0 | 1 << 31)
    }

    /// The failure group of each slot; none if nobody named any.
    fn groups(&self) -> Vec<u32> {
        if self.cfg.groups.is_empty() {
            return Vec::new();
        }
        self.slots.iter().map(|a| self.group_of(*a)).collect()
    }

    /// The spare for a slot: of the lost node's failure group, which leaves the sets as good as they were; else of one that
    /// no slot is in; else any.
    fn best_spare(&self, spares: &mut Vec<AgentId>, slot: usize) -> Option<AgentId> {
        let lost = self.group_of(self.slots[slot]);
        let others: BTreeSet<u32> = if self.cfg.groups.is_empty() {
            BTreeSet::new()
        } else {
            self.slots.iter().map(|a| self.group_of(*a)).collect()
        };
        let same = spares.iter().rposition(|a| self.group_of(*a) == lost);
        let fresh = || spares.iter().rposition(|a| !others.contains(&self.group_of(*a)));
        let place = same.or_else(fresh).or(spares.len().checked_sub(1))?;
        if self.bug(Bug::OneSpareForAll) {
            return Some(spares[place]);
        }
        Some(spares.remove(place))
    }

    fn make_plan(&mut self, choice: Choice) {
        // Numbered by the survey that it follows from: agents tell by it what came before what.
        let inc = Incarnation { epoch: self.cfg.epoch, count: self.round };
        let settings = self.cfg.settings.clone();
        let mut ledger: Vec<LedgerEntry> = Vec::new();
        let mut restore: Vec<Key> = Vec::new();
        let mut restart = None;
        let mut rebuild = Vec::new();
        let ancestry = match &choice.restart {
            Some(c) => choice.ancestry.descend(choice.parent, Some(c.info.key)),
            None if self.cfg.from_scratch && self.newest_committed.is_none() => Ancestry::default(),
            // Nothing to restart from; outputs that are still to be flushed go on.
            None => {
                let newest = Key { no: DatasetNo(choice.newest_no), inc: choice.parent };
                choice.ancestry.descend(choice.parent, Some(newest))
            }
        };
        // Who only winds down need not bring back what the prefix has.
        let idle = self.ending.is_some() && choice.restart.as_ref().is_some_and(|c| c.persistent);
        if let Some(c) = choice.restart.as_ref().filter(|_| idle) {
            ledger.push(entry(c.info.clone(), c, true));
        }
        if let Some(c) = choice.restart.as_ref().filter(|_| !idle) {
            let mut info = c.info.clone();
            if c.source == Source::Prefix {
                // In the cache it gets the redundancy of this job, on this number of nodes.
                let asked = settings.redundancy();
                info.sets = sets_anyhow(asked, self.slots.len() as u32, &self.groups());
            } else {
                restore.push(info.key);
                rebuild = c.rebuild.clone();
            }
            restart = Some((info.key, c.source));
            ledger.push(entry(info, c, c.persistent));
        }
        for c in choice.keep {
            if !ancestry.admits(inc, c.info.key) {
                continue;
            }
            let output = c.info.flags & stanchion_format::client::FLAG_OUTPUT != 0;
            if output && !c.persistent {
                restore.push(c.info.key);
            }
            ledger.push(entry(c.info.clone(), &c, c.persistent));
        }
        let agents: Arc<[AgentAddr]> = self.agents.values().map(|k| k.addr.clone()).collect();
        let next_no =
            DatasetNo(choice.newest_no.max(self.newest_committed.map_or(0, |k| k.no.0)) + 1);
        let name = choice.restart.as_ref().map(|c| (c.info.key, c.info.name.clone()));
        let from_prefix = matches!(restart, Some((_, Source::Prefix)));
        if self.cfg.purpose == Purpose::Run {
            let notice = Notice::RestartChosen { dataset: name, from_prefix, rebuild };
            self.say(Severity::Info, notice);
        }
        self.plan = Some(Arc::new(Plan {
            inc,
            ancestry,
            slots: self.slots.clone(),
            agents,
            fanout: settings.number("fanout") as u32,
            ledger,
            restart,
            restore,
            next_no,
            settings: settings.pairs(),
            keep_ranks: self.keep_ranks && self.app_running,
            groups: self.groups(),
            ranks_welcome: self.ending.is_none(),
        }));
        self.restored = RestoredSum::default();
        self.reports_seen = 0;
        self.restore_at = self.now.mono;
        self.enter(Phase::Installing);
        self.send_round();
    }

    pub(super) fn on_answer(&mut self, from: AgentId, phase: Phase, inc: Incarnation) {
        if self.phase == phase && self.current(inc) {
            self.answered.insert(from);
            self.check_answers();
        }
    }

    /// How far an agent is with its rebuild; told on from time to time.
    pub(super) fn on_restoring(&mut self, from: AgentId, inc: Incarnation, far: (u64, u64)) {
        if self.phase != Phase::Restoring || !self.current(inc) || self.answered.contains(&from) {
            return;
        }
        self.restored.far.insert(from, far);
        let (done_bytes, bad_bytes) = self.restored.progress();
        let now = self.now.mono;
        let (since, before) = self.restored.told.unwrap_or((self.restore_at, 0));
        if now.since(since) >= PROGRESS_MS && done_bytes > before {
            self.restored.told = Some((now, done_bytes));
            self.say(Severity::Info, Notice::Rebuilding { done_bytes, bad_bytes });
        }
    }

    pub(super) fn on_restored(&mut self, from: AgentId, inc: Incarnation, restored: Restored) {
        if self.phase != Phase::Restoring || !self.current(inc) || self.answered.contains(&from) {
            return;
        }
        self.answered.insert(from);
        if let Some(far) = self.restored.far.get_mut(&from) {
            far.0 = far.1;
        }
        match restored {
            Restored::Ok { rebuilt_bytes, fetched_bytes, repaired_files, .. } => {
                self.restored.rebuilt += rebuilt_bytes;
                self.restored.fetched += fetched_bytes;
                self.restored.repaired.extend(repaired_files);
            }
            Restored::Failed(key, trouble) => {
                self.restored.failed.get_or_insert((from, key, trouble));
            }
        }
        if self.restored.failed.is_some() {
            self.restore_failed();
            return;
        }
        self.check_answers();
    }

    /// A dataset cannot be restored after all. The restart goes to the next older one only if it is the one
    /// that failed: an output that cannot be made whole must not hold the job, nor cost it a checkpoint.
    pub(super) fn restore_failed(&mut self) {
        let failed = self.restored.failed.take();
        let Some(plan) = &self.plan else { return };
        let restart = plan.restart;
        let (keys, trouble) = match failed {
            Some((agent, key, t)) => (vec![key], if t.slot.is_none() { t.agent(agent) } else { t }),
            // Too slow: nobody knows which.
            None => {
                let mut all = plan_restore(&self.plan);
                all.extend(restart.map(|r| r.0));
                (all, Trouble::new(Cause::Timeout))
            }
        };
        for key in keys {
            let from_prefix = restart == Some((key, Source::Prefix));
            if !self.excluded.insert((key, from_prefix)) {
                continue;
            }
            let entry = self.plan.iter().flat_map(|p| &p.ledger).find(|e| e.info.key == key);
            let name = entry.map_or_else(String::new, |e| e.info.name.clone());
            self.say(Severity::Warn, Notice::Skipped { key, name, trouble: trouble.clone() });
        }
        let end_ranks = !(self.keep_ranks && self.app_running);
        self.survey(end_ranks);
    }

    /// Goes on when all have answered.
    pub(super) fn check_answers(&mut self) {
        let all = self.asked().iter().all(|a| self.answered.contains(a));
        let some = self.bug(Bug::OpenBeforeRestored) && !self.answered.is_empty();
        match self.phase {
            Phase::Installing if all => {
                self.enter(Phase::Restoring);
                self.send_round();
            }
            Phase::Restoring if all || some => self.all_restored(),
            Phase::Opening if all => self.all_open(),
            _ => {}
        }
    }

    fn all_restored(&mut self) {
        let now = self.now.mono;
        if self.cfg.purpose == Purpose::Run
            && self.plan.as_ref().is_some_and(|p| p.restart.is_some())
        {
            let notice = Notice::RestoreDone {
                since_loss_ms: now.since(self.loss_at),
                restore_ms: now.since(self.restore_at),
                rebuilt_bytes: self.restored.rebuilt,
                fetched_bytes: self.restored.fetched,
                repaired_files: self.restored.repaired.clone(),
            };
            self.say(Severity::Info, notice);
        }
        if self.ending.is_some() {
            self.begin_finishing();
            return;
        }
        self.enter(Phase::Opening);
        self.send_round();
    }

    fn all_open(&mut self) {
        self.enter(Phase::Running);
        self.decisions = 0;
        self.node_lost = false;
        self.send_settings();
        if self.app_running {
            return;
        }
        if self.ending.is_some() {
            self.finish();
            return;
        }
        self.progress = false;
        self.bad_restart = None;
        self.app_failed = false;
        self.app_running = true;
        let run = self.runs;
        self.runs += 1;
        self.say(Severity::Info, Notice::Launching { run });
        let slots = self.slots.clone();
        self.out.push(ControllerAction::LaunchApp { slots, run });
    }

    /// The application is over: flush what policy says, then leave.
    pub(super) fn finish(&mut self) {
        if self.phase == Phase::Running {
            self.begin_finishing();
        } else {
            self.survey(true);
        }
    }

    fn begin_finishing(&mut self) {
        if self.flush_wanted() && self.cfg.purpose == Purpose::Run {
            self.say(Severity::Debug, Notice::FinalFlush);
        }
        self.enter(Phase::Finishing);
        self.send_round();
    }

    pub(super) fn on_finished(
        &mut self,
        inc: Incarnation,
        persistent: Option<Key>,
        trouble: Option<Trouble>,
    ) {
        if self.phase != Phase::Finishing || !self.current(inc) {
            return;
        }
        let damaged = trouble.as_ref().is_some_and(|t| {
            matches!(t.cause, Cause::Damaged | Cause::Missing | Cause::Size { .. })
        });
        if damaged && self.ending.is_some() && !std::mem::replace(&mut self.mended, true) {
            // FM-F9: damage is an erasure. It was found by the last flush: what is restored is repaired.
            self.survey(true);
            return;
        }
        self.finished(persistent, trouble);
    }

    pub(super) fn finished(&mut self, persistent: Option<Key>, trouble: Option<Trouble>) {
        let notice = Notice::FinalFlushDone { persistent, trouble: trouble.clone() };
        self.say(Severity::Debug, notice);
        let want = self.cfg.nodes;
        let outcome = match self.ending.clone() {
            None | Some(Ending::Success) if self.halted => Outcome::Halted,
            None | Some(Ending::Success) => Outcome::Success { flush_trouble: trouble },
            Some(Ending::Interrupted) => Outcome::Interrupted,
            Some(Ending::NoSpare { have }) => Outcome::NoSpare { have, want, persistent },
            Some(Ending::AppFailed { code, reason }) => match self.refused() {
                Some(trouble) => Outcome::BadRestart(trouble),
                None => Outcome::AppFailed { code, reason },
            },
            Some(Ending::WindDown) => Outcome::WoundDown { persistent, trouble },
        };
        self.exit(outcome);
    }

    /// A rank will not restart from this one: the next older (FM-S3: decided for all).
    pub(super) fn on_rejected(&mut self, inc: Incarnation, key: Key, trouble: Trouble) {
        if self.phase != Phase::Running || !self.current(inc) {
            return;
        }
        self.rejected.insert(key);
        self.excluded.insert((key, false));
        self.excluded.insert((key, true));
        let name = self.name_of(key);
        self.say(Severity::Warn, Notice::Skipped { key, name, trouble });
        self.survey(false);
    }

    fn name_of(&self, key: Key) -> String {
        self.plan
            .iter()
            .flat_map(|p| &p.ledger)
            .find(|e| e.info.key == key)
            .map_or_else(String::new, |e| e.info.name.clone())
    }

    pub(super) fn on_restart_from(&mut self, inc: Incarnation, name: String) {
        if self.phase != Phase::Running || !self.current(inc) {
            return;
        }
        self.named = Some(name);
        self.survey(false);
    }
}

fn entry(info: DatasetInfo, c: &Candidate, persistent: bool) -> LedgerEntry {
    LedgerEntry { info, persistent, no_data: c.rebuild.clone(), no_parity: c.no_parity.clone() }
}

fn plan_restore(plan: &Option<Arc<Plan>>) -> Vec<Key> {
    plan.as_ref().map_or_else(Vec::new, |p| p.restore.clone())
}
