//! `stanchion bench rebuild`: how long it takes after a loss until the data can be read, beside the bare writes of a
//! checkpoint; and, with agents that reach each other over slow links, beside what the link takes.
//!
//! A real job: its ranks write files as a program without Stanchion does, then take a checkpoint; when that is protected
//! the agents and ranks of some nodes are killed and their caches removed. Spares take over, and it goes round again.

mod job;
mod link;
mod rank;

use super::{Row, Scratch, Sense, Spread, fact, report, spread};
use crate::args::RebuildArgs;
use crate::exit::{Exit, Failed, OrExit};
use crate::out;
use anyhow::anyhow;
use serde_json::json;
use std::path::Path;

pub(super) use rank::{rank, ranks};

/// Until the data can be read, over a bare checkpoint, at most: one parity, and two (SCR: 1.5 and 5.8).
const GOALS: [f64; 2] = [1.5, 2.0];
/// Over the slower of link and copy, at most.
const LINK_GOAL: f64 = 1.5;

/// What is lost of a job with which scheme.
struct Case {
    scheme: &'static str,
    lost: u32,
    goal: f64,
}

const CASES: [Case; 3] = [
    Case { scheme: "XOR", lost: 1, goal: GOALS[0] },
    Case { scheme: "RS(2,2)", lost: 1, goal: GOALS[1] },
    Case { scheme: "RS(2,2)", lost: 2, goal: GOALS[1] },
];

/// Nodes of the job.
const NODES: u32 = 4;

/// One loss.
struct Round {
    /// Bare writes of the launch before it, seconds.
    bare: f64,
    /// From the decision until every byte was verified and in place.
    restore: f64,
    /// From the moment when the loss was seen.
    since_loss: f64,
    /// What was rebuilt, bytes.
    rebuilt: f64,
}

/// Measures.
pub(super) fn run(args: &RebuildArgs) -> Result<Exit, Failed> {
    if args.mb == 0 || args.rounds == 0 {
        return Err(Failed::new(Exit::Usage, anyhow!("--mb and --rounds must be at least 1")));
    }
    let mut scratch = Scratch(Vec::new());
    let net = match args.link_mbit {
        0 => None,
        mbit => Some(link::Net::new(NODES + 2 * args.rounds, mbit).or_exit(Exit::Usage)?),
    };
    let mut rows = vec![fact("size of a checkpoint", f64::from(NODES) * megabytes(args), "MB")];
    for (n, case) in CASES.iter().enumerate() {
        let dir = scratch.add(&args.disk, &format!("rebuild-{n}")).or_exit(Exit::Storage)?;
        let cache =
            scratch.add(Path::new("/dev/shm"), &format!("rebuild-{n}")).or_exit(Exit::Storage)?;
        let rounds = job::losses(args, case, (&dir, &cache), net.as_ref())?;
        rows.extend(case_rows(args, case, &rounds));
    }
    let setup = json!({
        "nodes": NODES, "mb": args.mb, "rounds": args.rounds, "files": args.files, "link_mbit": args.link_mbit,
    });
    report("rebuild", (args.json, args.check), setup, &rows)
}

fn megabytes(args: &RebuildArgs) -> f64 {
    args.mb as f64 * f64::from(1 << 20) / 1e6
}

fn case_rows(args: &RebuildArgs, case: &Case, rounds: &[Round]) -> Vec<Row> {
    let name = |what: &str| format!("{}, {} lost: {what}", case.scheme, nodes(case.lost));
    let of = |part: fn(&Round) -> f64| spread(&rounds.iter().map(part).collect::<Vec<f64>>());
    let three = |what: &str, s: &Spread, unit| {
        [("median", s.median), ("least", s.min), ("most", s.max)]
            .map(|(which, value)| fact(name(&format!("{what}, {which}")), value, unit))
    };
    let mut rows = Vec::new();
    rows.extend(three("bare writes", &of(|r| r.bare), "s"));
    rows.extend(three("until the data can be read", &of(|r| r.restore), "s"));
    rows.push(fact(name("since the loss was seen, median"), of(|r| r.since_loss).median, "s"));
    rows.push(fact(name("rebuilt, median"), of(|r| r.rebuilt).median / 1e6, "MB"));
    let ratio = of(|r| r.restore / r.bare);
    rows.extend(three("rebuild / bare writes", &ratio, "ratio"));
    let goal = (args.link_mbit == 0).then_some(case.goal);
    let (value, unit, sense) = (ratio.median, "ratio", Sense::AtMost);
    rows.push(Row { name: name("rebuild / bare writes"), value, unit, goal, sense });
    if args.link_mbit > 0 {
        // A spare reads as many pieces as a stripe has contributors to make one.
        let rate = f64::from(args.link_mbit) * 1e6 / 8.0;
        let read = if case.scheme == "XOR" { NODES - 1 } else { 2 };
        for (what, pieces, goal) in
            [("what is read", read, Some(LINK_GOAL)), ("what was lost", 1, None)]
        {
            let link = f64::from(pieces) * megabytes(args) * 1e6 / rate;
            let slower = of(|r| r.bare).median.max(link);
            let name = name(&format!("rebuild / {what} over the spare's link"));
            rows.push(Row { name, value: of(|r| r.restore).median / slower, unit, goal, sense });
        }
    }
    let text = format!("{}: {:.2} of the bare writes", name("median"), ratio.median);
    out::say(&text);
    rows
}

fn nodes(n: u32) -> String {
    if n == 1 { "one node".into() } else { format!("{n} nodes") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_each_round() {
        let args = RebuildArgs {
            mb: 256,
            rounds: 2,
            files: false,
            link_mbit: 1000,
            disk: "/tmp".into(),
            json: false,
            check: false,
        };
        let round = |bare, restore| Round { bare, restore, since_loss: restore, rebuilt: 1.0 };
        let rows = case_rows(&args, &CASES[0], &[round(1.0, 7.0), round(2.0, 8.0)]);
        let value = |name: &str| rows.iter().find(|r| r.name.ends_with(name)).map(|r| r.value);
        assert_eq!(value("rebuild / bare writes"), Some(5.5));
        // Three pieces of 268 MB at 125 MB/s.
        let read = value("what is read over the spare's link").unwrap();
        assert!((read - 7.5 / 6.442).abs() < 1e-3, "{read}");
    }
}
