//! `stanchion bench commit`: how long ranks wait for the agreement on a dataset, by the number of nodes: in the
//! simulator, which runs core's own agents against the prices of messages; and with real agents on this machine,
//! beside what the simulator says of them.

mod real;

use super::{Row, Scratch, fact, report, spread};
use crate::args::{CommitArgs, CommitRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use crate::out;
use anyhow::{anyhow, bail};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use stanchion_sim::cost::{Cost, Handling, Job, Timed};

/// What a commit may take, milliseconds, by nodes.
const GOALS: &[(u32, f64)] = &[(1_024, 100.0), (16_384, 1_000.0)];
/// How far the model may be from real agents.
const MODEL_GOAL: f64 = 1.5;
/// Checkpoints that a calibrating run of the model makes.
const MODEL_ROUNDS: usize = 9;
/// Of the real agents a fourth and a half are those from which the price of a message on this machine is taken.
const CALIBRATED_BY: [u32; 2] = [4, 2];
/// Prices of a hop that are tried, microseconds.
const HOPS_US: [f64; 7] = [0.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0];
/// The price of a message is looked for up to here, microseconds, in so many halvings.
const MESSAGE_US_MAX: f64 = 2_000.0;
const HALVINGS: usize = 14;

/// Time that this thread had a core, nanoseconds: what others do on this machine is not in it.
fn thread_ns() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Measures.
pub(super) fn run(args: &CommitArgs) -> Result<Exit, Failed> {
    check(args)?;
    let mut rows = Vec::new();
    for nodes in &args.nodes {
        out::say(&format!("{nodes} simulated nodes"));
        rows.extend(curve(args, *nodes)?);
    }
    if args.real > 0 {
        rows.extend(beside(args)?);
    }
    let setup = json!({
        "nodes": args.nodes, "ranks_per_node": args.ranks_per_node, "rounds": args.rounds,
        "hop_us": args.hop_us, "message_us": args.message_us, "handling_us": args.handling_us,
        "real": args.real, "real_rounds": args.real_rounds,
    });
    report("commit", (args.json, args.check), setup, &rows)
}

fn check(args: &CommitArgs) -> Result<(), Failed> {
    let usage = |text: &str| Err(Failed::new(Exit::Usage, anyhow!("{text}")));
    let most = stanchion_format::limits::SLOTS_MAX;
    if args.nodes.iter().any(|n| *n == 0 || *n > most) {
        return usage(&format!("--nodes must be from 1 to {most}"));
    }
    if args.ranks_per_node == 0 || args.rounds == 0 || args.real_rounds == 0 {
        return usage("--ranks-per-node, --rounds and --real-rounds must be at least 1");
    }
    let prices = [args.hop_us, args.message_us, args.handling_us.unwrap_or(0.0)];
    if prices.iter().any(|p| !(0.0..=1e6).contains(p)) {
        return usage("--hop-us, --message-us and --handling-us must be from 0 to 1000000");
    }
    Ok(())
}

fn ns(us: f64) -> u64 {
    (us * 1e3) as u64
}

fn handling(args: &CommitArgs) -> Handling {
    args.handling_us.map_or(Handling::Measured(thread_ns), |us| Handling::Fixed(ns(us)))
}

/// Times in milliseconds.
fn ms(us: &[u64]) -> Vec<f64> {
    us.iter().map(|us| *us as f64 / 1e3).collect()
}

fn timed(job: Job) -> anyhow::Result<Timed> {
    let timed = job.run();
    if let Some(v) = &timed.violation {
        bail!("{} simulated nodes: {}: {}", job.nodes, v.rule, v.text);
    }
    if timed.commits.is_empty() {
        bail!("{} simulated nodes made no checkpoint", job.nodes);
    }
    Ok(timed)
}

/// One number of simulated nodes: all ranks say complete at the same moment.
fn curve(args: &CommitArgs, nodes: u32) -> anyhow::Result<Vec<Row>> {
    let cost = Cost {
        hop_ns: ns(args.hop_us),
        message_ns: ns(args.message_us),
        handling: handling(args),
        cores: None,
        meet: true,
    };
    let rounds = args.rounds as usize;
    let job = Job { nodes, ranks_per_node: args.ranks_per_node, files: 1, rounds, cost };
    let timed = timed(job)?;
    let commits = spread(&ms(&timed.commits));
    let goal = GOALS.iter().find(|(n, _)| *n == nodes).map(|(_, goal)| *goal);
    let name = |what: &str| format!("{what}, {nodes} nodes");
    let mut rows = vec![
        Row { goal, ..fact(name("commit"), commits.median, "ms") },
        fact(name("commit, the longest"), commits.max, "ms"),
        fact(name("begin"), spread(&ms(&timed.begins)).median, "ms"),
    ];
    for (kind, ns) in &timed.handling {
        rows.push(fact(name(&format!("handling, {kind}")), f64::from(*ns) / 1e3, "us"));
    }
    if timed.record_bytes > 0 {
        rows.push(fact(name("record of a commit"), timed.record_bytes as f64 / 1e3, "kB"));
    }
    Ok(rows)
}

/// Prices as they are on this machine, where all agents share the cores.
#[derive(Clone, Copy, Debug)]
struct Prices {
    hop_us: f64,
    message_us: f64,
}

/// The model of real agents, milliseconds.
fn model(args: &CommitArgs, nodes: u32, prices: Prices) -> anyhow::Result<f64> {
    let cost = Cost {
        hop_ns: ns(prices.hop_us),
        message_ns: ns(prices.message_us),
        handling: handling(args),
        cores: Some(std::thread::available_parallelism().map_or(1, usize::from)),
        meet: false,
    };
    let job = Job { nodes, ranks_per_node: 1, files: 0, rounds: MODEL_ROUNDS, cost };
    Ok(spread(&ms(&timed(job)?.commits)).median)
}

/// The prices by which the model has the times of a few real agents.
fn calibrate(args: &CommitArgs, [small, large]: [(u32, f64); 2]) -> anyhow::Result<Prices> {
    let mut best: Option<(f64, Prices)> = None;
    for hop_us in HOPS_US {
        let (mut low, mut high) = (0.0, MESSAGE_US_MAX);
        for _ in 0..HALVINGS {
            let message_us = (low + high) / 2.0;
            if model(args, large.0, Prices { hop_us, message_us })? < large.1 {
                low = message_us;
            } else {
                high = message_us;
            }
        }
        let prices = Prices { hop_us, message_us: (low + high) / 2.0 };
        // Both ends count: where even free messages are too dear, the larger run is not met either.
        let off = |(nodes, real): (u32, f64)| {
            model(args, nodes, prices).map(|model| (model / real).ln().abs())
        };
        let off = off(small)? + off(large)?;
        if best.as_ref().is_none_or(|(least, _)| off < *least) {
            best = Some((off, prices));
        }
    }
    best.map(|(_, prices)| prices).ok_or_else(|| anyhow!("no price was tried"))
}

/// Real agents, and the model of them.
fn beside(args: &CommitArgs) -> Result<Vec<Row>, Failed> {
    let mut scratch = Scratch(Vec::new());
    let dir = scratch.add(&args.disk, "commit").or_exit(Exit::Storage)?;
    let mut rows = Vec::new();
    let mut medians = Vec::new();
    let few = CALIBRATED_BY.map(|of| (args.real / of).max(2));
    for nodes in few.into_iter().chain([args.real]) {
        out::say(&format!("{nodes} real agents"));
        let commits = spread(&real::commits(args, nodes, &dir)?);
        rows.push(fact(format!("commit, {nodes} real agents"), commits.median, "ms"));
        rows.push(fact(format!("commit, {nodes} real agents, the longest"), commits.max, "ms"));
        medians.push((nodes, commits.median));
    }
    let prices = calibrate(args, [medians[0], medians[1]])?;
    let (nodes, measured) = medians[2];
    let predicted = model(args, nodes, prices)?;
    rows.push(fact("a message here, each end", prices.message_us, "us"));
    rows.push(fact("a hop here", prices.hop_us, "us"));
    rows.push(fact(format!("commit, {nodes} agents on these cores, model"), predicted, "ms"));
    let goal = Some(MODEL_GOAL);
    let ratio = |name: String, value| Row { goal, ..fact(name, value, "ratio") };
    rows.push(ratio(format!("{nodes} real agents / model"), measured / predicted));
    rows.push(ratio(format!("model / {nodes} real agents"), predicted / measured));
    Ok(rows)
}

/// Inside of the job: what mpiexec would be.
pub(super) fn ranks(args: &CommitRankArgs) -> Result<Exit, Failed> {
    real::ranks(args)
}

/// One rank of the job.
pub(super) fn rank(args: &CommitRankArgs) -> Result<Exit, Failed> {
    real::rank(args)
}
