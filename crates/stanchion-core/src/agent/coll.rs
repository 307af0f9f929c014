//! Questions that are gathered up the tree and answered down it (FM-S13).
//!
//! An agent's contribution to a question goes up when its own part and those of all children whose
//! subtrees have a part are there. It is sent again until the answer comes; an answered question is
//! answered again from the record. A subtree that cannot complete (deadline, a rank that is gone) goes up
//! with the trouble, which answers the question at once.

use super::{Agent, Phase, RESEND_MS};
use crate::api::Millis;
use crate::bugs::Bug;
use stanchion_format::ids::{AgentId, PeerId, RankId, SlotId};
use stanchion_format::peer::{Cause, CollId, Contrib, Msg, RankRange, Trouble, Verdict};
use std::collections::BTreeMap;

/// How far ahead of the newest answered question a peer may ask: ranks are in step.
const SEQ_AHEAD_MAX: u64 = 1024;
/// Answered questions that are kept to be answered again.
const ANSWERED_KEPT: u64 = 256;

/// One question.
#[derive(Debug)]
pub(super) struct Coll {
    /// This agent's own part.
    pub own: Contrib,
    /// That part is whole.
    pub own_done: bool,
    /// Parts of the children's subtrees.
    kids: BTreeMap<AgentId, Contrib>,
    /// A trouble that does not wait for anybody.
    pub urgent: Option<Trouble>,
    /// When it was first heard of.
    pub since: Millis,
    sent: Option<Millis>,
    /// There is something new to send up, which waits for more or for the next tick.
    unsent: bool,
    /// At the root: the merged contribution was handed to the decision.
    pub asked: bool,
    /// The answer.
    pub verdict: Option<Verdict>,
    /// The answer has been acted on.
    pub delivered: bool,
}

impl Coll {
    fn new(now: Millis) -> Coll {
        Coll {
            own: Contrib::default(),
            own_done: false,
            kids: BTreeMap::new(),
            urgent: None,
            since: now,
            sent: None,
            unsent: false,
            asked: false,
            verdict: None,
            delivered: false,
        }
    }

    /// All parts that are here.
    fn parts(&self) -> impl Iterator<Item = &Contrib> {
        std::iter::once(&self.own).chain(self.kids.values())
    }

    /// Of `merged` what tells whether all ranks have come: their number, what it should be, and any trouble.
    fn counted(&self) -> (u32, u32, bool) {
        let size = self.parts().map(|c| c.size).find(|size| *size != 0).unwrap_or(0);
        let trouble = self.parts().any(|c| c.trouble.is_some() || c.size != 0 && c.size != size);
        (self.parts().map(|c| c.ranks).sum(), size, trouble || self.urgent.is_some())
    }

    fn merged(&self) -> Contrib {
        let mut all = self.own.clone();
        for kid in self.kids.values() {
            add(&mut all, kid);
        }
        all.ranges = join_ranges(all.ranges);
        if let Some(trouble) = &self.urgent {
            all.trouble = Some(trouble.clone());
        }
        all
    }
}

/// Adds `b` to `a`.
pub(super) fn merge(a: &mut Contrib, b: &Contrib) {
    add(a, b);
    a.ranges = join_ranges(std::mem::take(&mut a.ranges));
}

/// The same, but for the ranges, which are only put behind each other.
fn add(a: &mut Contrib, b: &Contrib) {
    if a.disagree.is_none() {
        a.disagree = b.disagree;
    }
    match (&a.ask, &b.ask) {
        (Some(x), Some(y)) if x != y && a.disagree.is_none() => {
            a.disagree = Some((a.ask_rank.min(b.ask_rank), a.ask_rank.max(b.ask_rank)));
        }
        (None, Some(y)) => {
            a.ask = Some(y.clone());
            a.ask_rank = b.ask_rank;
        }
        _ => {}
    }
    if b.ask.is_some() && (a.ranks == 0 || b.ask_rank < a.ask_rank) {
        if !b.settings.is_empty() {
            a.settings = b.settings.clone();
        }
        a.ask_rank = b.ask_rank;
    } else if a.settings.is_empty() {
        a.settings = b.settings.clone();
    }
    if a.trouble.is_none() {
        a.trouble = b.trouble.clone();
    }
    a.ranks += b.ranks;
    a.bytes += b.bytes;
    a.files += b.files;
    a.times = a.times.with(b.times);
    a.ranges.extend_from_slice(&b.ranges);
    a.slots.extend_from_slice(&b.slots);
    if a.size == 0 {
        a.size = b.size;
    } else if b.size != 0 && b.size != a.size && a.trouble.is_none() {
        a.trouble = Some(Trouble::new(Cause::Ranks { want: a.size, have: b.size }));
    }
}

/// Is it decided for ranks, and by what they say?
pub(super) fn of_ranks(id: CollId) -> bool {
    matches!(id, CollId::Init | CollId::Seq(_) | CollId::Filled(_))
}

/// Sorts and joins neighbours on one slot, so that their number is that of nodes, not of ranks.
pub(super) fn join_ranges(mut ranges: Vec<RankRange>) -> Vec<RankRange> {
    ranges.sort();
    let mut out: Vec<RankRange> = Vec::with_capacity(ranges.len());
    for r in ranges {
        match out.last_mut() {
            Some(last) if last.slot == r.slot && last.first.0 + last.count == r.first.0 => {
                last.count += r.count;
            }
            Some(last) if *last == r => {}
            _ => out.push(r),
        }
    }
    out
}

impl super::View {
    /// How many ranks of `size` come to this agent, if they are placed blockwise.
    fn ranks_expected(&self, size: u32) -> u32 {
        let (size, slots) = (u64::from(size), self.plan.slots.len().max(1) as u64);
        let first = |slot: u64| (slot * size).div_ceil(slots);
        let count = |s: &SlotId| first(u64::from(s.0) + 1) - first(u64::from(s.0));
        u32::try_from(self.my_slots.iter().map(count).sum::<u64>()).unwrap_or(u32::MAX)
    }
}

impl Agent {
    /// The question, created if new.
    pub(super) fn coll(&mut self, id: CollId) -> &mut Coll {
        let now = self.now.mono;
        self.colls.entry(id).or_insert_with(|| Coll::new(now))
    }

    /// A child's subtree contributes.
    pub(super) fn on_up(&mut self, from: AgentId, id: CollId, contrib: Contrib) {
        let child = self.view.as_ref().is_some_and(|v| v.tree.children().contains(&from));
        if !child || self.phase != Phase::Open && self.phase != Phase::Restored {
            // Not yet open: the child sends again.
            return;
        }
        if self.ranks.ended() && of_ranks(id) {
            return;
        }
        if let CollId::Seq(n) = id
            && n > self.ranks.newest_seq() + SEQ_AHEAD_MAX
        {
            return;
        }
        let verdict = self.coll(id).verdict.clone();
        if let Some(verdict) = verdict {
            if self.bug(Bug::DecideAgain) && self.is_root() {
                let coll = self.coll(id);
                coll.verdict = None;
                coll.asked = false;
            } else {
                let inc = self.incarnation();
                self.send_agent(from, Msg::Down(inc, id, verdict));
                return;
            }
        }
        let urgent = contrib.trouble.clone().filter(|t| match id {
            CollId::Protect(_) => true,
            _ => of_ranks(id) && matches!(t.cause, Cause::Timeout | Cause::Unreachable),
        });
        let coll = self.coll(id);
        // What was said before and has gone up is sent again by this agent's own clock: a repetition of every subtree
        // would otherwise go all the way up.
        let known = coll.sent.is_some() && coll.kids.get(&from) == Some(&contrib);
        if coll.urgent.is_none() {
            coll.urgent = urgent;
        }
        coll.kids.insert(from, contrib);
        if !known {
            self.advance(id);
        }
    }

    /// Something about the question changed: send it up or decide it, if that is due.
    pub(super) fn advance(&mut self, id: CollId) {
        let Some(view) = &self.view else { return };
        let children = view.tree.children().to_vec();
        let root = view.tree.is_root();
        // Where no rank is there is nothing to say, and an answer that went before may never have come there.
        let waiting_for_all = !matches!(id, CollId::Seq(_) | CollId::Filled(_));
        let Some(coll) = self.colls.get(&id) else { return };
        if coll.verdict.is_some() || coll.asked {
            return;
        }
        let kids_done = children.iter().all(|c| {
            coll.kids.contains_key(c)
                || (!waiting_for_all && !self.ranks.subtree_has_ranks(*c))
                || (self.bug(Bug::ProtectWithoutChildren) && matches!(id, CollId::Protect(_)))
        });
        let mut later = false;
        let complete = if id == CollId::Init {
            // Ranks trickle in; changes go up, the root counts. From where more is to come they go with the next tick:
            // otherwise each rank would be a message to the root, with all that came before.
            let (ranks, size, trouble) = coll.counted();
            let all = if root {
                ranks >= size
            } else {
                kids_done && coll.own.ranks >= view.ranks_expected(size)
            };
            later = size > 0 && !root;
            size > 0 && (all || trouble)
        } else {
            let own_done = coll.own_done || (!waiting_for_all && self.ranks.none_here());
            own_done && kids_done
        };
        if !complete && coll.urgent.is_none() {
            self.coll(id).unsent = later;
            return;
        }
        if root {
            let merged = coll.merged();
            self.coll(id).asked = true;
            self.decide(id, merged);
        } else {
            self.send_up(id);
        }
    }

    fn send_up(&mut self, id: CollId) {
        let inc = self.incarnation();
        let now = self.now.mono;
        let Some(parent) = self.view.as_ref().and_then(|v| v.tree.parent()) else { return };
        let coll = self.coll(id);
        (coll.sent, coll.unsent) = (Some(now), false);
        let mut merged = coll.merged();
        if self.bug(Bug::ForgetVote) {
            merged.trouble = None;
        }
        self.send_agent(parent, Msg::Up(inc, id, Box::new(merged)));
    }

    /// The root has decided.
    pub(super) fn answer_coll(&mut self, id: CollId, verdict: Verdict) {
        self.coll(id).verdict = Some(verdict.clone());
        self.pass_down(id, &verdict);
        self.deliver(id);
    }

    /// The answer came from the parent.
    pub(super) fn on_down(&mut self, from: AgentId, id: CollId, verdict: Verdict) {
        let from_parent = self.view.as_ref().and_then(|v| v.tree.parent()) == Some(from);
        if !from_parent || self.phase != Phase::Open && self.phase != Phase::Restored {
            return;
        }
        if self.coll(id).verdict.is_some() {
            return;
        }
        self.coll(id).verdict = Some(verdict.clone());
        self.pass_down(id, &verdict);
        self.deliver(id);
    }

    fn pass_down(&mut self, id: CollId, verdict: &Verdict) {
        let inc = self.incarnation();
        let children = self.view.as_ref().map_or_else(Vec::new, |v| v.tree.children().to_vec());
        for child in children {
            self.send_agent(child, Msg::Down(inc, id, verdict.clone()));
        }
    }

    /// Acts on an answer, once, as soon as what it refers to is known.
    pub(super) fn deliver(&mut self, id: CollId) {
        let announced = self.records.announced();
        let coll = self.coll(id);
        let Some(verdict) = coll.verdict.clone() else { return };
        if coll.delivered {
            return;
        }
        if let Verdict::Record(n) = verdict
            && n > announced
        {
            return;
        }
        coll.delivered = true;
        match id {
            CollId::Init => self.deliver_init(verdict),
            CollId::Seq(n) => {
                self.ranks.answered(n);
                self.deliver_seq(n, verdict);
                let keep = n.saturating_sub(ANSWERED_KEPT);
                self.colls.retain(|id, _| !matches!(id, CollId::Seq(m) if *m < keep));
            }
            CollId::Protect(_)
            | CollId::FlushPrepare(..)
            | CollId::FlushPublish(..)
            | CollId::Filled(_) => {}
        }
    }

    /// Delivers what waited for records that are now announced.
    pub(super) fn deliver_ready(&mut self) {
        let ready: Vec<CollId> = self
            .colls
            .iter()
            .filter(|(_, c)| !c.delivered && c.verdict.is_some())
            .map(|(id, _)| *id)
            .collect();
        for id in ready {
            self.deliver(id);
        }
    }

    /// Sends again, and ends what waited too long.
    pub(super) fn tick_colls(&mut self) {
        let now = self.now.mono;
        let collective_ms = self.settings().number("collective_timeout_ms");
        let init_ms = self.settings().number("init_timeout_ms");
        let mut again = Vec::new();
        let mut late = Vec::new();
        for (id, coll) in &self.colls {
            if coll.verdict.is_some() {
                continue;
            }
            if coll.unsent || coll.sent.is_some_and(|s| now.since(s) >= RESEND_MS) {
                again.push(*id);
            }
            let limit = match id {
                CollId::Init => init_ms,
                CollId::Seq(_) | CollId::Filled(_) => collective_ms,
                _ => continue,
            };
            if coll.urgent.is_none() && !coll.asked && now.since(coll.since) > limit {
                late.push(*id);
            }
        }
        for id in again {
            self.send_up(id);
        }
        for id in late {
            // FM-V1: the error names who did not come.
            let mut trouble = Trouble::new(Cause::Timeout);
            let missing = self.missing(id);
            trouble.rank = missing.first().copied();
            trouble.slot = trouble.rank.and_then(|r| self.ranks.slot_of(r));
            self.coll(id).urgent = Some(trouble);
            self.advance(id);
        }
    }

    /// Ranks of this agent that have not joined the question (for Init: unknown, none).
    fn missing(&self, id: CollId) -> Vec<RankId> {
        match id {
            CollId::Seq(n) => self.ranks.missing(n),
            CollId::Init => self.colls.get(&id).map_or_else(Vec::new, |c| {
                let sum = c.merged();
                let mut next = 0;
                for r in &sum.ranges {
                    if r.first.0 > next {
                        break;
                    }
                    next = next.max(r.first.0 + r.count);
                }
                if next < sum.size { vec![RankId(next)] } else { Vec::new() }
            }),
            CollId::Filled(key) => self.copying(key),
            _ => Vec::new(),
        }
    }

    /// Notes how many ranks each child's subtree has, when all have come.
    pub(super) fn learn_subtrees(&mut self) {
        let kids: BTreeMap<AgentId, u32> =
            self.coll(CollId::Init).kids.iter().map(|(agent, c)| (*agent, c.ranks)).collect();
        self.ranks.set_subtrees(kids);
    }

    /// Convenience for tests and logs: who is the parent?
    pub(super) fn parent_peer(&self) -> Option<PeerId> {
        self.view.as_ref().and_then(|v| v.tree.parent()).map(PeerId::Agent)
    }
}
