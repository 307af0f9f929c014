//! What time a message takes, for planning: a hop, what each end spends on it, and what core itself takes.
//!
//! Without a [`Cost`] a history's delays are chance, and no two steps of core wait for each other. With one a node
//! does one thing at a time: it hears what came in the order of arrival, and each message waits for those before it.
//! Steps run when what they hear arrives; what follows from them leaves when the node would have got so far.

use crate::scenario::Scenario;
use crate::world::{RUNNER_PLACE, Violation, World};
use stanchion_format::client::{Ask, Request};
use stanchion_format::frame;
use stanchion_format::ids::{AgentId, PeerId};
use stanchion_format::limits::PEER_FRAME_BYTES_MAX;
use stanchion_format::peer::{Envelope, KIND_PEER, Msg, Record};
use std::collections::BTreeMap;

/// Samples of one kind that a median is made of.
const SAMPLES_MAX: usize = 20_000;
/// Ranks that meet say complete at the next multiple of this, microseconds.
const MEET_US: u64 = 500_000;

/// Ends of a message within a node: both, between a rank and its agent; a thread's waking, and its answer.
const WITHIN: u64 = 2;

/// What core takes for a step, nanoseconds.
#[derive(Clone, Copy, Debug)]
pub enum Handling {
    /// Always as long.
    Fixed(u64),
    /// As long as it takes here, by this clock, encoding and decoding of what it sends and hears included. What the
    /// clock does not count (other processes) is not in it.
    Measured(fn() -> u64),
}

/// The prices.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// From node to node, nanoseconds.
    pub hop_ns: u64,
    /// Each end spends this on a message, nanoseconds; within a node both ends are the node's.
    pub message_ns: u64,
    /// What core takes.
    pub handling: Handling,
    /// All nodes are on so many cores; none: each has its own.
    pub cores: Option<usize>,
    /// All ranks say complete at the same moment; otherwise each as soon as it has begun.
    pub meet: bool,
}

/// The two collectives that are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// Ranks agree on a dataset.
    Begin,
    /// It is committed.
    Complete,
}

/// One collective.
#[derive(Clone, Copy, Debug)]
struct Round {
    call: Call,
    /// The last request reached its agent.
    asked: u64,
    /// The last answer reached its rank.
    answered: u64,
    answers: u32,
}

/// Prices and clocks of the nodes.
#[derive(Debug)]
pub(crate) struct Costs {
    cost: Cost,
    /// Until when each node is busy, nanoseconds.
    busy: Vec<u64>,
    cores: Vec<u64>,
    rounds: BTreeMap<(usize, u64), Round>,
    samples: BTreeMap<&'static str, Vec<u32>>,
    record_bytes: usize,
}

impl Costs {
    fn sample(&mut self, kind: &'static str, ns: u64) {
        let all = self.samples.entry(kind).or_default();
        if all.len() < SAMPLES_MAX {
            all.push(u32::try_from(ns).unwrap_or(u32::MAX));
        }
    }
}

fn kind(msg: &Msg) -> &'static str {
    match msg {
        Msg::Up(..) => "up",
        Msg::Down(..) => "down",
        Msg::Record(_, _, Record::Commit(_)) => "commit record",
        Msg::Record(..) => "record",
        Msg::Stored(..) => "stored",
        Msg::Announce(..) => "announce",
        Msg::Manifest(..) => "manifest",
        Msg::ManifestStored(..) => "manifest stored",
        _ => "other",
    }
}

/// A step of core that is paid for.
pub(crate) struct Step {
    place: usize,
    core: Option<usize>,
    began: u64,
    kind: &'static str,
    sample: bool,
}

impl World {
    /// From now on messages have prices.
    pub fn set_cost(&mut self, cost: Cost) {
        let nodes = (self.sc.nodes + self.sc.spares) as usize;
        self.costs = Some(Box::new(Costs {
            cost,
            busy: vec![0; nodes],
            cores: vec![0; cost.cores.unwrap_or(0)],
            rounds: BTreeMap::new(),
            samples: BTreeMap::new(),
            record_bytes: 0,
        }));
    }

    /// A node begins to hear something: it waits until it, and a core, is free.
    pub(crate) fn cost_enter(
        &mut self,
        place: u32,
        msg: Option<&Msg>,
        asked: bool,
    ) -> Option<Step> {
        let now = self.now * 1000;
        let costs = self.costs.as_mut()?;
        let place = place as usize;
        let core = (0..costs.cores.len()).min_by_key(|c| costs.cores[*c]);
        let free = core.map_or(0, |c| costs.cores[c]);
        let mut start = now.max(costs.busy[place]).max(free);
        start += costs.cost.message_ns * if asked { WITHIN } else { u64::from(msg.is_some()) };
        let mut step = Step { place, core, began: 0, kind: "", sample: msg.is_some() };
        if let Handling::Measured(clock) = costs.cost.handling {
            step.kind = msg.map_or("other", kind);
            // Plans are large, and nobody waits for them with a commit.
            if let Some(msg) = msg.filter(|m| !matches!(m, Msg::Install(_))) {
                start += coded(msg, clock).1;
            }
            step.began = clock();
        }
        costs.busy[place] = start;
        Some(step)
    }

    /// Core has answered.
    pub(crate) fn cost_stepped(&mut self, step: Option<&Step>) {
        let (Some(step), Some(costs)) = (step, self.costs.as_mut()) else { return };
        let took = match costs.cost.handling {
            Handling::Fixed(ns) => ns,
            Handling::Measured(clock) => clock().saturating_sub(step.began),
        };
        if step.sample && matches!(costs.cost.handling, Handling::Measured(_)) {
            costs.sample(step.kind, took);
        }
        costs.busy[step.place] += took;
    }

    /// All that followed has left.
    pub(crate) fn cost_leave(&mut self, step: Option<Step>) {
        let (Some(step), Some(costs)) = (step, self.costs.as_mut()) else { return };
        if let Some(core) = step.core {
            costs.cores[core] = costs.busy[step.place];
        }
    }

    /// When a message that leaves now arrives, microseconds.
    pub(crate) fn cost_sent(&mut self, place: u32, msg: &Msg) -> Option<u64> {
        let now = self.now * 1000;
        let costs = self.costs.as_mut()?;
        if place == RUNNER_PLACE {
            return Some((now + costs.cost.hop_ns) / 1000);
        }
        let mut spent = costs.cost.message_ns;
        if let Handling::Measured(clock) = costs.cost.handling {
            let (encoded, _, bytes) = coded(msg, clock);
            spent += encoded;
            if matches!(msg, Msg::Record(_, _, Record::Commit(_))) {
                costs.record_bytes = costs.record_bytes.max(bytes);
            }
        }
        let busy = &mut costs.busy[place as usize];
        *busy = now.max(*busy) + spent;
        Some((*busy + costs.cost.hop_ns) / 1000)
    }

    /// When what an agent hands over within its node (an answer to a rank, a task to a thread) is there, microseconds
    /// from now.
    pub(crate) fn cost_handed(&mut self, id: AgentId) -> Option<u64> {
        let now = self.now;
        let place = self.agents.get(&id)?.place as usize;
        let costs = self.costs.as_mut()?;
        let busy = &mut costs.busy[place];
        *busy = (now * 1000).max(*busy) + WITHIN * costs.cost.message_ns;
        Some((*busy / 1000).saturating_sub(now))
    }

    /// How long a rank writes, microseconds.
    pub(crate) fn cost_writing(&self) -> Option<u64> {
        let costs = self.costs.as_ref()?;
        Some(if costs.cost.meet { MEET_US - self.now % MEET_US } else { 0 })
    }

    /// A request reaches its agent.
    pub(crate) fn cost_asked(&mut self, request: &Request, rank: Option<(usize, usize)>) {
        let (Some(costs), Some((app, rank))) = (self.costs.as_mut(), rank) else { return };
        let call = match request {
            Request::Collective { ask: Ask::Begin { .. }, .. } => Call::Begin,
            Request::Collective { ask: Ask::Complete, .. } => Call::Complete,
            _ => return,
        };
        let key = (app, self.apps[app].ranks[rank].calls);
        let first = Round { call, asked: 0, answered: 0, answers: 0 };
        let round = costs.rounds.entry(key).or_insert(first);
        round.asked = round.asked.max(self.now);
    }

    /// An answer reaches its rank.
    pub(crate) fn cost_answered(&mut self, app: usize, rank: usize) {
        let Some(costs) = self.costs.as_mut() else { return };
        let key = (app, self.apps[app].ranks[rank].calls);
        if let Some(round) = costs.rounds.get_mut(&key) {
            round.answered = round.answered.max(self.now);
            round.answers += 1;
        }
    }

    /// How long collectives took, from the last request at its agent to the last answer at its rank, microseconds.
    pub fn took(&self, call: Call) -> Vec<u64> {
        let ranks = self.sc.app.ranks;
        let rounds = self.costs.iter().flat_map(|c| c.rounds.values());
        let whole = rounds.filter(|r| r.call == call && r.answers == ranks);
        whole.map(|r| r.answered.saturating_sub(r.asked)).collect()
    }
}

/// What it takes to encode a message and to decode it, nanoseconds, and its size, bytes.
fn coded(msg: &Msg, clock: fn() -> u64) -> (u64, u64, usize) {
    let envelope = Envelope { from: PeerId::Controller, msg: msg.clone() };
    let began = clock();
    let bytes = frame::encode(KIND_PEER, &envelope, PEER_FRAME_BYTES_MAX).unwrap_or_default();
    let encoded = clock();
    let body = bytes.get(frame::HEADER_BYTES..).unwrap_or_default();
    let back = frame::decode::<Envelope>(body).ok();
    let decoded = clock();
    drop(back);
    (encoded.saturating_sub(began), decoded.saturating_sub(encoded), bytes.len())
}

/// A job whose commits are timed.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Nodes, without spares.
    pub nodes: u32,
    /// Ranks of each.
    pub ranks_per_node: u32,
    /// Files of a rank, at most; small ones.
    pub files: u64,
    /// Checkpoints.
    pub rounds: usize,
    /// Prices.
    pub cost: Cost,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Timed {
    /// Each commit, microseconds.
    pub commits: Vec<u64>,
    /// Each begin, microseconds.
    pub begins: Vec<u64>,
    /// Medians of what core took for a message, nanoseconds, by kind; the last is of all. Empty if it was not measured.
    pub handling: Vec<(&'static str, u32)>,
    /// Bytes of the record of a commit; 0 if it was not measured.
    pub record_bytes: usize,
    /// A rule that was broken.
    pub violation: Option<Violation>,
}

impl Job {
    fn scenario(&self) -> Scenario {
        let mut s = Scenario::calm(1);
        s.settings = stanchion_format::config::Settings::default();
        (s.nodes, s.spares) = (self.nodes, 0);
        s.app.ranks = self.nodes * self.ranks_per_node;
        (s.app.steps, s.app.step_ms) = (self.rounds as u64 + 1, 2_000);
        (s.app.files, s.app.large_in, s.app.output_every, s.app.wait_permille) =
            (self.files, 0, 0, 0);
        (s.app.memory, s.app.cow, s.app.increments, s.app.same_names) =
            (false, false, false, false);
        (s.stores, s.fifo) = (false, false);
        for (name, value) in [("chunk_bytes", "4096"), ("flush_every", "0"), ("flush_at_end", "0")]
        {
            s.settings.set(name, value).expect("a value of the table");
        }
        s
    }

    /// Runs it until it has made its checkpoints.
    pub fn run(&self) -> Timed {
        let mut w = World::new(self.scenario(), false);
        w.set_cost(self.cost);
        let ranks = self.nodes * self.ranks_per_node;
        w.run_while(|w| {
            let Some(costs) = &w.costs else { return false };
            let done = |r: &&Round| r.call == Call::Complete && r.answers == ranks;
            costs.rounds.len() < 2 * self.rounds
                || costs.rounds.values().filter(done).count() < self.rounds
        });
        let (commits, begins) = (w.took(Call::Complete), w.took(Call::Begin));
        let (samples, record_bytes) =
            w.costs.take().map(|c| (c.samples, c.record_bytes)).unwrap_or_default();
        Timed { commits, begins, handling: medians(samples), record_bytes, violation: w.violation }
    }
}

fn medians(samples: BTreeMap<&'static str, Vec<u32>>) -> Vec<(&'static str, u32)> {
    let all: Vec<u32> = samples.values().flatten().copied().collect();
    let kinds = samples.into_iter().chain([("all", all)]).filter(|(_, v)| !v.is_empty());
    kinds
        .map(|(kind, mut v)| {
            v.sort_unstable();
            (kind, v[v.len() / 2])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(nodes: u32, cores: Option<usize>) -> Job {
        let cost = Cost {
            hop_ns: 50_000,
            message_ns: 10_000,
            handling: Handling::Fixed(2_000),
            cores,
            meet: true,
        };
        Job { nodes, ranks_per_node: 1, files: 1, rounds: 3, cost }
    }

    #[test]
    fn a_commit_takes_its_hops_and_messages_and_is_the_same_each_time() {
        let (one, again) = (job(64, None).run(), job(64, None).run());
        assert_eq!((&one.violation, one.commits.len()), (&None, 3));
        assert_eq!((&one.commits, &one.begins), (&again.commits, &again.begins));
        // Two levels below the root: question, record, stored, announcement are at least eight hops and sixteen
        // messages' ends.
        let least = 8 * 50 + 16 * 10;
        assert!(one.commits.iter().all(|us| (least..100_000).contains(us)), "{one:?}");
    }

    #[test]
    fn nodes_that_share_cores_wait_for_each_other() {
        let apart = job(64, None).run().commits;
        let together = job(64, Some(2)).run().commits;
        assert!(together.iter().min() > apart.iter().max(), "{together:?} {apart:?}");
    }
}
