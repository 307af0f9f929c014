//! `stanchion bench`: ratios against goals, measured side by side in one run.

mod aggregate;
mod blocked;
mod code;
mod commit;
mod job;
mod overhead;
mod pool;
mod rebuild;
mod routed;
mod schemes;

use crate::args::{Bench, BenchArgs};
use crate::exit::{Exit, Failed};
use crate::out;
use anyhow::Context;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Runs a benchmark.
pub fn bench(args: &BenchArgs) -> Result<Exit, Failed> {
    match &args.bench {
        Bench::Aggregate(args) => aggregate::run(args),
        Bench::AggregateRanks(args) => aggregate::ranks(args),
        Bench::AggregateRank(args) => aggregate::rank(args),
        Bench::Routed(args) => routed::run(args),
        Bench::Blocked(args) => blocked::run(args),
        Bench::BlockedRanks(args) => blocked::ranks(args),
        Bench::BlockedRank(args) => blocked::rank(args),
        Bench::Code(args) => code::run(args),
        Bench::Commit(args) => commit::run(args),
        Bench::CommitRanks(args) => commit::ranks(args),
        Bench::CommitRank(args) => commit::rank(args),
        Bench::Schemes(args) => schemes::run(args),
        Bench::SchemesRanks(args) => schemes::ranks(args),
        Bench::SchemesRank(args) => schemes::rank(args),
        Bench::Rebuild(args) => rebuild::run(args),
        Bench::RebuildRanks(args) => rebuild::ranks(args),
        Bench::RebuildRank(args) => rebuild::rank(args),
        Bench::Overhead(args) => overhead::run(args),
        Bench::OverheadRanks(args) => overhead::ranks(args),
        Bench::OverheadRank(args) => overhead::rank(args),
        Bench::Pool(args) => pool::run(args),
        Bench::PoolRanks(args) => pool::ranks(args),
        Bench::PoolRank(args) => pool::rank(args),
    }
}

/// One line of the result.
pub(super) struct Row {
    name: String,
    value: f64,
    unit: &'static str,
    /// Holds if the value is at most this, or at least, as `sense` says.
    goal: Option<f64>,
    sense: Sense,
}

/// Which values are good.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sense {
    AtMost,
    AtLeast,
}

impl Row {
    fn holds(&self) -> Option<bool> {
        self.goal.map(|goal| match self.sense {
            Sense::AtMost => self.value <= goal,
            Sense::AtLeast => self.value >= goal,
        })
    }
}

/// A row that holds if the value is at least the goal.
pub(super) fn at_least(name: impl Into<String>, value: f64, unit: &'static str, goal: f64) -> Row {
    Row { name: name.into(), value, unit, goal: Some(goal), sense: Sense::AtLeast }
}

pub(super) fn fact(name: impl Into<String>, value: f64, unit: &'static str) -> Row {
    Row { name: name.into(), value, unit, goal: None, sense: Sense::AtMost }
}

/// Directories of one benchmark, removed at its end.
pub(super) struct Scratch(Vec<PathBuf>);

impl Scratch {
    pub(super) fn add(&mut self, parent: &Path, what: &str) -> anyhow::Result<PathBuf> {
        let path = parent.join(format!("stanchion-bench-{}-{what}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("{} cannot be made", path.display()))?;
        self.0.push(path.clone());
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for path in &self.0 {
            let _best_effort = std::fs::remove_dir_all(path);
        }
    }
}

/// The middle, the ends, and the quartiles.
pub(super) struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

pub(super) fn spread(values: &[f64]) -> Spread {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    let n = v.len();
    let median = if n % 2 == 1 { v[n / 2] } else { (v[n / 2 - 1] + v[n / 2]) / 2.0 };
    Spread { median, min: v[0], max: v[n - 1] }
}

/// Prints the rows, as a table or as JSON.
pub(super) fn report(
    bench: &str,
    (json, check): (bool, bool),
    setup: Value,
    rows: &[Row],
) -> Result<Exit, Failed> {
    if json {
        let list: Vec<Value> = rows
            .iter()
            .map(|r| {
                let mut row = json!({"name": r.name, "value": r.value, "unit": r.unit, "goal": r.goal, "holds": r.holds()});
                if r.sense == Sense::AtLeast {
                    row["at_least"] = true.into();
                }
                row
            })
            .collect();
        out::print_json(&json!({
            "bench": bench, "machine": machine(), "rows": list, "setup": setup,
        }))?;
    } else {
        let table = rows
            .iter()
            .map(|r| {
                let goal = r.goal.map_or("-".into(), |g| match r.sense {
                    Sense::AtMost => format!("<= {g}"),
                    Sense::AtLeast => format!(">= {g}"),
                });
                let holds = r.holds().map_or("-", |h| if h { "yes" } else { "NO" });
                vec![r.name.clone(), format!("{:.4}", r.value), r.unit.into(), goal, holds.into()]
            })
            .collect();
        out::print(&out::table(&["NAME", "VALUE", "UNIT", "GOAL", "HOLDS"], &[1], table))?;
    }
    let missed = rows.iter().any(|r| r.holds() == Some(false));
    Ok(if check && missed { Exit::Failure } else { Exit::Success })
}

fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        text.lines()
            .find(|l| l.starts_with(name))
            .and_then(|l| l.split_once(':'))
            .map(|(_, v)| v.trim().to_owned())
    };
    let uname = rustix::system::uname();
    json!({
        "cpu": field(&read("/proc/cpuinfo"), "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "kernel": uname.release().to_string_lossy(),
    })
}
