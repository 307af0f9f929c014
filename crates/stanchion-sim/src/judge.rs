//! Who knows what was promised (docs/failure-model.md) and looks after every step whether it is kept.

use crate::app::State;
use crate::world::{CtrlId, World};
use stanchion_core::api::{AgentAction, ControllerAction, Notice, Outcome};
use stanchion_format::client::{Answer, FLAG_CHECKPOINT, FLAG_OUTPUT};
use stanchion_format::ids::{AgentId, Epoch, Incarnation, Key, Level, PeerId, RankId, SlotId};
use stanchion_format::layout::{Asked, Scheme};
use stanchion_format::peer::{Cause, DatasetInfo, Msg, Plan, Record, Report};
use stanchion_format::place;
use std::collections::{BTreeMap, BTreeSet};

/// A file as a rank wrote it.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Who.
    pub rank: RankId,
    /// Where, below the prefix.
    pub path: String,
    /// What.
    pub bytes: Vec<u8>,
}

/// What ranks really wrote.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    /// After which step.
    pub step: u64,
    /// What they had computed.
    pub value: u64,
    /// Files.
    pub files: BTreeMap<RankId, BTreeMap<String, Vec<u8>>>,
    /// What each rank said at complete.
    pub said: BTreeMap<RankId, bool>,
}

/// What was promised of a dataset.
#[derive(Clone, Debug)]
pub struct Promise {
    /// Its certificate.
    pub info: DatasetInfo,
    /// The run that wrote it.
    pub run: u32,
    /// `cached` was said.
    pub said: bool,
    /// That, and the caches are not evicted.
    pub cached: bool,
    /// `protected` was said, and the caches are not evicted.
    pub protected: bool,
    /// `persistent` was said.
    pub persistent: bool,
    /// Its flush was said to have failed.
    pub flush_failed: bool,
    /// Slots whose nodes were lost since it was protected last.
    pub lost: BTreeSet<SlotId>,
    /// Slots whose bytes in the cache were damaged.
    pub rotten: BTreeSet<SlotId>,
    /// Its bytes in the prefix were damaged.
    pub prefix_rot: bool,
    /// A rank rejected it.
    pub rejected: bool,
    /// The job went on from an older one.
    pub dead: bool,
    /// The incarnations in which `protected` was said.
    pub protected_in: BTreeSet<Incarnation>,
}

/// The judge's memory.
#[derive(Debug, Default)]
pub struct Judge {
    /// By key.
    pub truth: BTreeMap<Key, Truth>,
    /// By key.
    pub promises: BTreeMap<Key, Promise>,
    /// Keys for which a commit record was issued.
    pub certified: BTreeSet<Key>,
    /// Committed in an incarnation that was over, by agents that had not heard so.
    late: BTreeMap<Key, DatasetInfo>,
    /// Commits that the runner was told of.
    heard: BTreeSet<Key>,
    dropped: BTreeSet<Key>,
    stored: BTreeMap<(Incarnation, AgentId), u64>,
    announced: BTreeMap<Incarnation, u64>,
    pub(crate) plan: Option<Plan>,
    plans: BTreeSet<Incarnation>,
    /// What each incarnation went on from.
    pub(crate) bases: BTreeMap<Incarnation, Option<Key>>,
    epochs: BTreeMap<AgentId, Epoch>,
    answers: BTreeMap<(usize, u64), (usize, String)>,
    pub(crate) lost: BTreeSet<AgentId>,
    /// Slots that were verified for a restart: what happens to their files until the ranks have read
    /// them nobody can know (FM-N2).
    pub(crate) verified: BTreeSet<(Key, SlotId)>,
    /// The index could not be read since the last decision.
    pub index_failed: bool,
    /// The runner of this run was killed.
    pub runner_killed: bool,
    /// The application reached its end and the runner said so.
    pub finished: bool,
    /// The application ended by itself, with success.
    pub app_succeeded: bool,
    /// A full device or a failing prefix stood in the way of what was promised.
    pub excused: bool,
    /// Outcomes of controllers, for statistics.
    pub outcomes: Vec<Outcome>,
    /// Restarts that were decided: the dataset, or none.
    pub restarts: Vec<Option<Key>>,
}

impl Promise {
    /// Are the losses within the scheme?
    pub fn within(&self) -> bool {
        let gone: BTreeSet<SlotId> = self.lost.union(&self.rotten).copied().collect();
        let sets = &self.info.sets;
        gone.iter().all(|slot| {
            let members = sets.members(*slot);
            match sets.scheme {
                Scheme::Single => false,
                _ if members.len() < 2 => false,
                Scheme::Partner => {
                    let place = members.iter().position(|m| m == slot).unwrap_or(0);
                    !gone.contains(&members[(place + 1) % members.len()])
                }
                Scheme::Xor => members.iter().filter(|m| gone.contains(m)).count() == 1,
                Scheme::Rs { parities } => {
                    let most = usize::from(parities).min(members.len() - 1);
                    members.iter().filter(|m| gone.contains(m)).count() <= most
                }
            }
        })
    }

    /// It is called complete, the first time: reports come again, also when it is evicted.
    fn say(&mut self) {
        if !std::mem::replace(&mut self.said, true) {
            self.cached = true;
        }
    }

    fn in_caches(&self) -> bool {
        let unharmed = self.lost.is_empty() && self.rotten.is_empty();
        (self.cached && unharmed) || (self.protected && self.within())
    }

    fn checkpoint(&self) -> bool {
        self.info.flags & FLAG_CHECKPOINT != 0
    }
}

impl Judge {
    /// A rank wrote a file.
    pub fn wrote(&mut self, key: Key, piece: Piece) {
        let truth = self.truth.entry(key).or_default();
        truth.files.entry(piece.rank).or_default().insert(piece.path, piece.bytes);
    }
}

impl World {
    /// A rank is about to say complete.
    pub(crate) fn judge_wrote(&mut self, key: Key, rank: RankId, step: u64, value: u64, ok: bool) {
        let truth = self.judge.truth.entry(key).or_default();
        let first = truth.said.is_empty();
        let twice = truth.said.insert(rank, ok).is_some();
        if first {
            (truth.step, truth.value) = (step, value);
        }
        let mixed = (truth.step, truth.value) != (step, value);
        if twice || mixed {
            let what = if twice { "written twice" } else { "written in different steps" };
            self.violate("FM-S1", format!("dataset {key} is {what} (rank {rank})"));
        }
    }

    /// Is the dataset persistent, as far as the prefix itself knows?
    fn in_prefix(&self, key: Key, p: &Promise) -> bool {
        p.persistent && !p.prefix_rot && self.prefix.index.contains_key(&key)
    }

    /// The newest checkpoint that a job must be able to go on from.
    pub fn expected(&self, with_prefix: bool) -> Option<Key> {
        let fetch = with_prefix && self.sc.settings.flag("fetch");
        self.judge
            .promises
            .iter()
            .rev()
            .filter(|(_, p)| p.checkpoint() && !p.rejected && !p.dead)
            .find(|(key, p)| p.in_caches() || (fetch && self.in_prefix(**key, p)))
            .map(|(key, _)| *key)
    }

    /// The same if nothing in the caches were damaged.
    fn expected_unharmed(&mut self) -> Option<Key> {
        let promises = self.judge.promises.iter_mut();
        let rotten: Vec<_> = promises.map(|(k, p)| (*k, std::mem::take(&mut p.rotten))).collect();
        let expected = self.expected(true);
        for (key, rotten) in rotten {
            if let Some(p) = self.judge.promises.get_mut(&key) {
                p.rotten = rotten;
            }
        }
        expected
    }

    /// An agent is lost: what only its node held is gone.
    pub(crate) fn judge_loss(&mut self, id: AgentId) {
        if !self.judge.lost.insert(id) {
            return;
        }
        let Some(plan) = &self.judge.plan else { return };
        let slots: Vec<SlotId> =
            (0..).zip(&plan.slots).filter(|(_, a)| **a == id).map(|(s, _)| SlotId(s)).collect();
        for p in self.judge.promises.values_mut() {
            p.lost.extend(slots.iter().copied());
        }
    }

    /// Looks at what an agent does before it is done.
    pub(crate) fn judge_agent_action(&mut self, id: AgentId, action: &AgentAction, leaves: bool) {
        match action {
            AgentAction::Evict(keys) if !leaves => self.judge_evict(id, keys),
            AgentAction::Send { msg, to } => match &**msg {
                Msg::Record(inc, _, Record::Commit(info)) => self.judge_certified(*inc, info),
                Msg::Record(_, _, Record::Drop(key, _)) => self.judge_dropped(*key),
                Msg::Record(inc, _, Record::Evict(key)) => self.judge_room(*inc, *key),
                Msg::Stored(inc, n) => {
                    let seen = self.judge.stored.entry((*inc, id)).or_default();
                    *seen = (*seen).max(*n);
                }
                Msg::Announce(inc, n) => self.judge_announce(id, *inc, *n),
                Msg::Report(inc, _, report) => self.judge_report(*inc, report),
                Msg::Holdings(h) => self.judge_epoch(id, h.epoch),
                Msg::Installed(inc) if *to == PeerId::Controller => {
                    self.judge_epoch(id, inc.epoch);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// FM-S11: an agent obeys no lower epoch.
    pub(crate) fn judge_epoch(&mut self, id: AgentId, epoch: Epoch) {
        let highest = self.judge.epochs.entry(id).or_default();
        let before = *highest;
        *highest = before.max(epoch);
        if epoch < before {
            let text = format!("agent {id} obeys epoch {epoch} after epoch {before}");
            self.violate("FM-S11", text);
        }
    }

    /// FM-S6: what a job would go on from is not evicted.
    fn judge_evict(&mut self, id: AgentId, keys: &[Key]) {
        if self.judge.lost.contains(&id) {
            return;
        }
        if let Some(key) = keys.iter().find(|key| self.waits_for_flush(**key)) {
            let text = format!("agent {id} evicts {key}, which waits for its flush");
            return self.violate("FM-S17", text);
        }
        // Damage that nobody has seen yet cannot hold an agent; what is known to be damaged need not.
        let before = [self.expected(true), self.expected_unharmed()];
        for key in keys {
            if let Some(p) = self.judge.promises.get_mut(key) {
                (p.cached, p.protected) = (false, false);
            }
        }
        let after = [self.expected(true), self.expected_unharmed()];
        let changed = before[0] != after[0] && before[1] != after[1];
        let (before, after) = (before[0], after[0]);
        let indexed = |k: Key| self.prefix.index.keys().any(|i| *i >= k);
        let spared = self.judge.finished || self.judge.excused;
        if changed && !spared && !before.is_some_and(indexed) {
            let text = format!(
                "agent {id} evicts {keys:?}; the newest safe one was {before:?}, is {after:?}"
            );
            self.violate("FM-S6", text);
        }
    }

    /// FM-S18: what goes to make room is not what the job would go on from, nor, but where policy allows it, one that
    /// no newer protected one stands for.
    fn judge_room(&mut self, inc: Incarnation, key: Key) {
        let current = self.judge.plan.as_ref().is_some_and(|plan| plan.inc == inc);
        let Some(p) = self.judge.promises.get(&key).filter(|p| current && p.checkpoint()) else {
            return;
        };
        let newer = |f: &dyn Fn(&Promise) -> bool| {
            let after = self.judge.promises.range(key..).skip(1);
            after.filter(|(k, p)| k.inc <= inc && p.checkpoint()).any(|(_, p)| f(p))
        };
        let stood_for = newer(&|p| !p.protected_in.is_empty());
        let may = self.sc.settings.text("pool_full") == "drop" && p.protected_in.is_empty();
        let allowed = may && newer(&|p| p.said || p.cached);
        if !stood_for && !allowed {
            let text = format!("{key} goes to make room, and nothing newer stands for it");
            self.violate("FM-S18", text);
        }
    }

    /// FM-S17: is the dataset one of the running incarnation that policy wants in the prefix, and not there yet?
    fn waits_for_flush(&self, key: Key) -> bool {
        let (Some(plan), Some(p)) = (&self.judge.plan, self.judge.promises.get(&key)) else {
            return false;
        };
        let every = self.sc.settings.number("flush_every");
        let kth = p.checkpoint() && every > 0 && key.no.0.is_multiple_of(every);
        let (mine, output) = (key.inc == plan.inc, p.info.flags & FLAG_OUTPUT != 0);
        let wanted =
            mine && kth || output && (mine || plan.ledger.iter().any(|e| e.info.key == key));
        // The report of a root that died may not have been heard.
        let withdrawn = self.prefix.withdrawn.contains(&key);
        let there = p.persistent || withdrawn || self.prefix.index.contains_key(&key);
        p.said && wanted && !there && !p.flush_failed
    }

    fn judge_dropped(&mut self, key: Key) {
        self.judge.dropped.insert(key);
        if self.judge.certified.contains(&key) {
            self.violate("FM-S4", format!("dataset {key} is committed and dropped"));
        }
    }

    /// FM-S2: a certificate needs every rank's yes and every byte.
    pub(crate) fn judge_certified(&mut self, inc: Incarnation, info: &DatasetInfo) {
        // One that slept through its own replacement goes on with what it had heard before: it sends to
        // agents that have left that incarnation, and a survey that admits its dataset is judged by that.
        let superseded = self.judge.plan.as_ref().is_some_and(|plan| plan.inc > inc);
        let key = info.key;
        if superseded && !self.judge.certified.contains(&key) {
            self.judge.late.entry(key).or_insert_with(|| info.clone());
        }
        if superseded || !self.judge.certified.insert(key) {
            return;
        }
        if self.judge.dropped.contains(&key) || key.inc != inc {
            return self.violate("FM-S4", format!("dataset {key} is dropped and committed"));
        }
        if let Err(text) = self.whole(info) {
            return self.violate("FM-S2", format!("dataset {key} is committed: {text}"));
        }
        self.promised(info);
    }

    /// FM-S4: what agents have committed among themselves while others led the job on stands if those are gone: it is
    /// whole, and whoever survives has its certificate.
    fn admit_late(&mut self, key: Key) {
        let Some(info) = self.judge.late.remove(&key) else { return };
        if let Err(text) = self.spoken(&info) {
            return self.violate("FM-S2", format!("dataset {key} is committed: {text}"));
        }
        if self.judge.certified.insert(key) {
            self.promised(&info);
        }
    }

    /// Nothing is promised of it yet.
    fn promised(&mut self, info: &DatasetInfo) {
        let lost: BTreeSet<SlotId> = match &self.judge.plan {
            Some(plan) => (0..)
                .zip(&plan.slots)
                .filter(|(_, a)| self.judge.lost.contains(a))
                .map(|(s, _)| SlotId(s))
                .collect(),
            None => BTreeSet::new(),
        };
        let promise = Promise {
            info: info.clone(),
            run: self.run,
            said: false,
            cached: false,
            protected: false,
            persistent: false,
            flush_failed: false,
            lost,
            rotten: BTreeSet::new(),
            prefix_rot: false,
            rejected: false,
            dead: false,
            protected_in: BTreeSet::new(),
        };
        self.judge.promises.insert(info.key, promise);
    }

    /// FM-L4: announced is only what every agent of the tree has stored.
    fn judge_announce(&mut self, id: AgentId, inc: Incarnation, n: u64) {
        let Some(plan) = self.judge.plan.as_ref().filter(|p| p.inc == inc) else { return };
        if plan.slots.first() != Some(&id) {
            return;
        }
        let seen = self.judge.announced.entry(inc).or_default();
        if *seen >= n {
            return;
        }
        *seen = n;
        let members: BTreeSet<AgentId> = plan.slots.iter().copied().collect();
        let late = members
            .into_iter()
            .filter(|a| *a != id)
            .find(|a| self.judge.stored.get(&(inc, *a)).copied().unwrap_or(0) < n);
        if let Some(late) = late {
            let text = format!("record {n} is announced, agent {late} has not stored it");
            self.violate("FM-L4", text);
        }
    }

    fn judge_report(&mut self, inc: Incarnation, report: &Report) {
        match report {
            Report::Committed(info, _) => {
                self.judge_certified(inc, info);
                if let Some(p) = self.judge.promises.get_mut(&info.key) {
                    p.say();
                }
            }
            Report::Began(info) => self.judge_sets(inc, info),
            Report::Dropped(key, _) => self.judge_dropped(*key),
            Report::RestartDone(key) => self.judge_restarted(inc, *key),
            Report::Level(key, level, _) => self.judge_level(inc, *key, *level),
            Report::FlushFailed(key, _) => {
                if let Some(p) = self.judge.promises.get_mut(key) {
                    p.flush_failed = true;
                }
            }
            Report::Evicted { key, .. } => self.judge_room(inc, *key),
            Report::Forgotten(key) => {
                self.judge.promises.remove(key);
            }
            _ => {}
        }
    }

    /// All ranks have read it: it is in all caches, whoever had heard that it was committed.
    fn judge_restarted(&mut self, inc: Incarnation, key: Key) {
        self.judge.verified.clear();
        let current = self.judge.plan.as_ref().is_some_and(|plan| plan.inc == inc);
        if let Some(p) = self.judge.promises.get_mut(&key).filter(|_| current) {
            p.say();
        }
    }

    /// FM-L2: no set has two nodes that fail together, where it can be otherwise.
    fn judge_sets(&mut self, inc: Incarnation, info: &DatasetInfo) {
        let Some(plan) = self.judge.plan.as_ref().filter(|p| p.inc == inc) else { return };
        let groups: Vec<u32> = plan.slots.iter().map(|a| self.group_of(*a)).collect();
        let sets = &info.sets;
        let asked = Asked { scheme: sets.scheme, set_size: sets.set_size };
        if sets.slots as usize != groups.len() || place::sets(asked, &groups).is_err() {
            return;
        }
        for slot in (0..sets.slots).map(SlotId).filter(|s| sets.redundant(*s)) {
            let members = sets.members(slot);
            let of: BTreeSet<u32> = members.iter().map(|m| groups[m.0 as usize]).collect();
            if of.len() < members.len() {
                let text = format!("dataset {}: members {members:?} fail together", info.key);
                return self.violate("FM-L2", text);
            }
        }
    }

    fn judge_level(&mut self, inc: Incarnation, key: Key, level: Level) {
        // What a root that slept says of an incarnation that is over, nobody hears (FM-S1).
        let over = self.judge.plan.as_ref().is_some_and(|plan| plan.inc > inc);
        if over && level == Level::Protected {
            return;
        }
        if over && self.judge.late.contains_key(&key) {
            self.admit_late(key);
            // The job has gone on without it.
            let inc = self.judge.plan.as_ref().map(|plan| plan.inc).unwrap_or_default();
            let dead = !self.in_line(key, inc);
            self.judge.promises.entry(key).and_modify(|p| p.dead = dead);
        }
        let Some(p) = self.judge.promises.get_mut(&key) else {
            return self.violate("FM-S2", format!("dataset {key} is {level:?} without a commit"));
        };
        match level {
            Level::Cached => p.say(),
            Level::Persistent => {
                p.persistent = true;
                if !p.prefix_rot
                    && !self.prefix.withdrawn.contains(&key)
                    && let Err(text) = self.prefix.verify(key)
                {
                    self.violate("FM-S9", format!("dataset {key} is persistent: {text}"));
                }
            }
            Level::Protected => {
                if !p.protected_in.insert(inc) {
                    return;
                }
                (p.said, p.cached, p.protected) = (true, true, true);
                if let Err(text) = self.parity_holds(key) {
                    return self.violate("FM-S5", format!("dataset {key} is protected: {text}"));
                }
                self.forgive(key, inc);
            }
        }
    }

    /// Did incarnation `inc` go on from `key`, by whatever way, or write it?
    pub(crate) fn in_line(&self, key: Key, inc: Incarnation) -> bool {
        let (mut inc, mut upto) = (inc, u64::MAX);
        loop {
            if key.inc == inc {
                return key.no.0 <= upto;
            }
            match self.judge.bases.get(&inc) {
                Some(Some(base)) if base.inc < inc => (inc, upto) = (base.inc, base.no.0.min(upto)),
                _ => return false,
            }
        }
    }

    /// Looks at what a controller does before it is done.
    pub(crate) fn judge_ctrl_action(&mut self, c: CtrlId, action: &ControllerAction) {
        if let ControllerAction::Say(_, Notice::Report(Report::Committed(info, _))) = action {
            self.judge.heard.insert(info.key);
        }
        if let ControllerAction::Say(_, Notice::FinalFlushDone { trouble: Some(t), .. }) = action {
            // Deadlines that messages on such a network do not meet.
            self.judge.excused |= t.cause == Cause::Timeout && self.net_is_bad();
        }
        if let ControllerAction::Send { msg, .. } = action
            && let Msg::Install(plan) = &**msg
            && self.ctrls[&c].epoch.0 == self.prefix.epoch
            && self.judge.plans.insert(plan.inc)
        {
            self.judge_absent(c);
            self.judge_plan(plan);
        }
    }

    /// Who does not come to an orphans' leader in time is as good as lost to it (FM-F5a).
    pub(crate) fn judge_absent(&mut self, c: CtrlId) {
        if self.ctrls[&c].host.is_none() {
            return;
        }
        let hosts = self.judge.plan.as_ref().map_or_else(Vec::new, |p| p.slots.clone());
        let linked = self.ctrls[&c].linked.clone();
        hosts.into_iter().filter(|a| !linked.contains(a)).for_each(|a| self.judge_loss(a));
    }

    fn judge_plan(&mut self, plan: &Plan) {
        let expected = self.expected(!self.judge.index_failed);
        self.judge.index_failed = false;
        self.judge.verified.clear();
        let before = self.judge.plan.replace(plan.clone());
        for entry in &plan.ledger {
            let key = entry.info.key;
            if let Some(p) = self.judge.promises.get_mut(&key) {
                // What comes from the prefix gets the sets of this job.
                p.info.sets = entry.info.sets.clone();
            }
            self.admit_late(key);
            if !self.judge.certified.contains(&key) {
                return self
                    .violate("FM-S4", format!("dataset {key} goes on without a certificate"));
            }
        }
        let held = plan.ledger.iter().map(|e| e.info.key).max();
        self.judge.bases.insert(plan.inc, plan.restart.map(|(key, _)| key).or(held));
        if !plan.ranks_welcome {
            return;
        }
        let hosts: BTreeSet<AgentId> = plan.slots.iter().copied().collect();
        if hosts.len() < plan.slots.len() {
            let text = format!("a job goes on with two nodes in one: {:?}", plan.slots);
            return self.violate("FM-L2", text);
        }
        let restart = plan.restart.map(|(key, _)| key);
        self.judge.restarts.push(restart);
        if let Some(p) = restart.and_then(|k| self.judge.promises.get(&k))
            && p.dead
        {
            let text = format!("the job goes on from {restart:?} of an abandoned line");
            return self.violate("FM-S1", text);
        }
        if restart < expected && !self.judge.excused {
            let text = format!("the job goes on from {restart:?} although {expected:?} is safe");
            return self.violate("FM-L2", text);
        }
        if restart.is_none() {
            self.judge_anew(before.as_ref());
        }
        for (key, p) in &mut self.judge.promises {
            if restart.is_none_or(|r| key.no > r.no) {
                p.dead = true;
            }
        }
    }

    /// FM-S14: the job starts from nothing; is there nothing? `before` is what was planned last.
    fn judge_anew(&mut self, before: Option<&Plan>) {
        let run = self.run;
        let rejected = self.judge.promises.values().any(|p| p.rejected);
        // Once all nodes that stored a commit are lost, only its report tells of it, and that may be lost on its way.
        let gone = before.is_none_or(|plan| plan.slots.iter().all(|a| self.judge.lost.contains(a)));
        if gone {
            let heard = &self.judge.heard;
            let untold = self.judge.promises.iter_mut().filter(|(key, _)| !heard.contains(key));
            untold.for_each(|(_, p)| (p.cached, p.protected) = (false, false));
        }
        let committed =
            self.judge.promises.iter().find(|(_, p)| p.run == run && p.cached && !p.rejected);
        if !rejected && let Some((key, _)) = committed {
            let text = format!("the job starts anew although {key} was committed");
            return self.violate("FM-S14", text);
        }
        let there = self
            .prefix
            .index
            .keys()
            .find(|k| self.judge.promises.get(k).is_some_and(|p| p.persistent && !p.dead));
        if !rejected
            && self.sc.settings.flag("fetch")
            && let Some(key) = there
        {
            let text = format!("the job starts anew although {key} is in the prefix");
            self.violate("FM-S14", text);
        }
    }

    /// FM-S13: all ranks get one answer to one call.
    pub(crate) fn judge_answer(&mut self, app: usize, rank: usize, state: State, answer: &Answer) {
        let said = match (state, answer) {
            (State::Level, Answer::Ok) => return self.judge_waited(app, rank),
            (State::Hello | State::Level | State::Attach, _) => return,
            (_, Answer::Flag(flag)) => format!("{flag}"),
            (_, Answer::Ok) => "yes".into(),
            (_, Answer::Began { key, .. }) => format!("begin {key}"),
            (_, Answer::Restart(info)) => {
                format!("restart {:?}", info.as_ref().map(|i| i.key))
            }
            (_, Answer::Failed { code, .. })
                if matches!(state, State::Complete | State::Snapshot) =>
            {
                use stanchion_format::client::Code;
                match code {
                    Code::Dropped | Code::Space => "dropped".into(),
                    _ => return,
                }
            }
            _ => return,
        };
        let call = (app, self.apps[app].ranks[rank].calls);
        if state == State::Complete && said == "yes" {
            self.judge_completed(app, rank);
        }
        let (first, before) =
            self.judge.answers.entry(call).or_insert_with(|| (rank, said.clone())).clone();
        if before != said {
            let text = format!(
                "call {} ({state:?}): rank {first} gets '{before}', rank {rank} '{said}'",
                call.1
            );
            self.violate("FM-S13", text);
        }
    }

    fn judge_completed(&mut self, app: usize, rank: usize) {
        let Some(key) = self.waited_for(app, rank) else { return };
        match self.judge.promises.get_mut(&key) {
            Some(p) => p.say(),
            None => self.violate("FM-S2", format!("rank {rank} hears that {key} is complete")),
        }
    }

    /// FM-L6: a rank was told that a level is reached.
    fn judge_waited(&mut self, app: usize, rank: usize) {
        let Some(key) = self.waited_for(app, rank) else { return };
        let cached = self.level_of(app, rank) == Level::Cached;
        if cached {
            return self.judge_completed(app, rank);
        }
        let reached = self
            .judge
            .promises
            .get(&key)
            .is_some_and(|p| p.persistent || !p.protected_in.is_empty());
        if !reached {
            self.violate(
                "FM-L4",
                format!("rank {rank} hears of a level of {key} that was not reported"),
            );
        }
    }

    /// A rank says no to what it restarts from.
    pub(crate) fn judge_rejected(&mut self, key: Key) {
        if let Some(p) = self.judge.promises.get_mut(&key) {
            p.rejected = true;
        }
    }
}
