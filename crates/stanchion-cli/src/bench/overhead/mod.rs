//! `stanchion bench overhead`: what checkpoints cost a job that computes.
//!
//! Fixed work with and without checkpoints, in turns: a pair is two runs of one round, and what counts is how much
//! longer the one took. What is behind the application (checksums, parity, flushes) is within the time measured.

mod job;

pub(super) use job::{rank, ranks};

use super::job as common;
use super::{Row, Scratch, Sense, fact, report, spread};
use crate::args::{OverheadArgs, Place, Way};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::anyhow;
use job::{Times, step_time};
use serde_json::{Value, json};
use std::process::Command;

/// How much longer the job may take, percent.
const BUSY_GOAL: f64 = 6.0;
const SPARE_GOAL: f64 = 1.0;
/// Steps of the run that finds out how long one takes.
const TRIAL_STEPS: u64 = 24;

/// One run of the job.
#[derive(Debug)]
struct Run {
    way: Way,
    round: u32,
    ranks: Vec<Times>,
}

impl Run {
    fn total(&self) -> f64 {
        self.ranks.iter().map(|t| t.total).fold(0.0, f64::max)
    }

    /// The time it took over what it would have taken if every step were like its own median one: a slow machine is
    /// slow for all steps of a run, checkpoints are in few.
    fn uneven(&self) -> f64 {
        let steps = &self.ranks[0].steps;
        self.total() / (spread(steps).median * steps.len() as f64)
    }

    /// The slowest rank's time in each checkpoint.
    fn blocked(&self) -> Vec<f64> {
        common::slowest(&self.ranks, |t| &t.blocked)
    }

    fn json(&self) -> Value {
        json!({"way": self.way.word(), "round": self.round, "total_s": self.total(), "blocked_s": self.blocked(),
               "safe_s": self.ranks.first().map(|t| &t.safe), "uneven": self.uneven(), "protect_s": self.protect()})
    }

    fn protect(&self) -> f64 {
        self.ranks.iter().map(|t| t.protect).fold(0.0, f64::max)
    }
}

/// Measures.
pub(super) fn run(args: &OverheadArgs) -> Result<Exit, Failed> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let bad = if args.ranks == 0 || args.mb == 0 || args.repeats == 0 || args.checkpoints == 0 {
        Some("--ranks, --mb, --repeats and --checkpoints must be at least 1")
    } else if !(args.seconds >= 1.0 && args.seconds <= 86_400.0) {
        Some("--seconds must be between 1 and 86400")
    } else if args.place.contains(&Place::Spare) && cores < 2 {
        Some("a spare core needs two cores: use --place busy")
    } else {
        None
    };
    if let Some(text) = bad {
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let mut rows = Vec::new();
    let mut raw = serde_json::Map::new();
    for place in &args.place {
        let held = if *place == Place::Spare { cores - 1 } else { 0 };
        let runs = place_runs(args, held)?;
        let used = if held > 0 { held } else { cores };
        rows.extend(place_rows(*place, used, &runs));
        raw.insert(place.word().into(), runs.iter().map(Run::json).collect());
    }
    let setup = json!({
        "ranks": args.ranks, "mb": args.mb, "seconds": args.seconds, "checkpoints": args.checkpoints,
        "repeats": args.repeats, "runs": raw,
    });
    report("overhead", (args.json, args.check), setup, &rows)
}

/// All runs of one placement, the ways in another order in each round.
fn place_runs(args: &OverheadArgs, cores: usize) -> Result<Vec<Run>, Failed> {
    let trial = job(args, (Way::None, cores, TRIAL_STEPS), 0)?;
    let steps = (args.seconds / step_time(trial.total(), TRIAL_STEPS).as_secs_f64()) as u64;
    let steps = steps.max(u64::from(args.checkpoints) + 1);
    let mut ways = vec![Way::None];
    ways.extend(args.ways.iter().filter(|w| **w != Way::None));
    let mut runs = Vec::new();
    for round in 0..args.repeats {
        for n in 0..ways.len() {
            let way = ways[(n + round as usize) % ways.len()];
            runs.push(job(args, (way, cores, steps), round)?);
        }
    }
    Ok(runs)
}

/// One run of the job, in directories of its own.
fn job(
    args: &OverheadArgs,
    (way, cores, steps): (Way, usize, u64),
    round: u32,
) -> Result<Run, Failed> {
    let mut scratch = Scratch(Vec::new());
    let dir = scratch.add(&args.disk, "overhead").or_exit(Exit::Storage)?;
    let mut command = match way {
        Way::None | Way::Files => Command::new(std::env::current_exe()?),
        _ => {
            let flush = if way == Way::Flush { "flush_every=1" } else { "flush_every=0" };
            common::in_job(&dir, &["flush_at_end=0", flush])?
        }
    };
    command.args(["bench", "overhead-ranks", "--way", way.word()]);
    common::options(
        &mut command,
        &[
            ("--ranks", args.ranks.into()),
            ("--mb", args.mb),
            ("--steps", steps),
            ("--checkpoints", args.checkpoints.into()),
            ("--cores", cores as u64),
        ],
    );
    command.arg("--dir").arg(&dir);
    common::finish(command, &dir.join("log"))?;
    Ok(Run { way, round, ranks: common::times(&dir, args.ranks)? })
}

fn place_rows(place: Place, cores: usize, runs: &[Run]) -> Vec<Row> {
    let of = |way: Way| runs.iter().filter(move |r| r.way == way);
    let place_name = match place {
        Place::Busy => format!("{cores} cores, all busy"),
        Place::Spare => format!("{cores} busy, one spare"),
    };
    let name = |what: &str| format!("{place_name}: {what}");
    let bare: Vec<f64> = of(Way::None).map(Run::total).collect();
    let mut rows = vec![
        fact(name("no checkpoints, median"), spread(&bare).median, "s"),
        fact(name("no checkpoints, most / least"), spread(&bare).max / spread(&bare).min, "ratio"),
    ];
    for way in [Way::Files, Way::Pool, Way::Cow, Way::Flush, Way::Incremental] {
        let slower: Vec<f64> = of(way)
            .filter_map(|r| {
                let bare = of(Way::None).find(|n| n.round == r.round)?.total();
                Some((r.total() / bare - 1.0) * 100.0)
            })
            .collect();
        if slower.is_empty() {
            continue;
        }
        let by_steps: Vec<f64> = of(way)
            .filter_map(|r| {
                let bare = of(Way::None).find(|n| n.round == r.round)?.uneven();
                Some((r.uneven() / bare - 1.0) * 100.0)
            })
            .collect();
        let s = spread(&slower);
        let goal = match (way, place) {
            (Way::Files | Way::Cow | Way::Incremental, _) => None,
            (_, Place::Busy) => Some(BUSY_GOAL),
            (_, Place::Spare) => Some(SPARE_GOAL),
        };
        let title = way.title();
        let slower = name(&format!("{title}: slower, median of pairs"));
        rows.push(Row { name: slower, value: s.median, unit: "%", goal, sense: Sense::AtMost });
        rows.push(fact(name(&format!("{title}: slower, least")), s.min, "%"));
        rows.push(fact(name(&format!("{title}: slower, most")), s.max, "%"));
        let by_steps = spread(&by_steps).median;
        rows.push(fact(name(&format!("{title}: slower, by a run's own steps")), by_steps, "%"));
        let blocked: Vec<f64> = of(way).flat_map(Run::blocked).collect();
        rows.push(fact(name(&format!("{title}: blocked, median")), spread(&blocked).median, "s"));
        let safe: Vec<f64> = of(way).flat_map(|r| r.ranks[0].safe.clone()).collect();
        rows.push(fact(name(&format!("{title}: until safe, median")), spread(&safe).median, "s"));
        rows.push(fact(name(&format!("{title}: until safe, most")), spread(&safe).max, "s"));
        let protect: Vec<f64> = of(way).map(Run::protect).filter(|p| *p > 0.0).collect();
        if !protect.is_empty() {
            let text = name(&format!("{title}: stn_protect, once, not counted above"));
            rows.push(fact(text, spread(&protect).median, "s"));
        }
    }
    rows
}
