//! `stanchion bench overhead`: what checkpoints cost a job that computes.
//!
//! Fixed work in windows, with a checkpoint at their beginning or without one. What is behind the application
//! (checksums, parity, flushes) is within the time measured. With and without in one run and side by side, as runs of
//! the same work differ by more than what is to be measured: by their memory's places, and by what else the machine
//! does in that minute. Whole runs against each other can be asked for too: they show what is there between
//! checkpoints.

mod job;

pub(super) use job::{rank, ranks};

use super::job as common;
use super::{Row, Scratch, Sense, fact, report, spread};
use crate::args::{OverheadArgs, Place, Way};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::anyhow;
use job::{CHECKPOINT, NONE, Times};
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
    /// Of a pair of whole runs; none: its windows are the pairs.
    round: Option<u32>,
    plan: String,
    ranks: Vec<Times>,
}

impl Run {
    fn total(&self) -> f64 {
        self.ranks.iter().map(|t| t.total).fold(0.0, f64::max)
    }

    /// The slowest rank's time in each checkpoint.
    fn blocked(&self) -> Vec<f64> {
        common::slowest(&self.ranks, |t| &t.blocked)
    }

    /// Each window; they end at a barrier.
    fn windows(&self) -> Vec<f64> {
        common::slowest(&self.ranks, |t| &t.windows)
    }

    fn protect(&self) -> f64 {
        self.ranks.iter().map(|t| t.protect).fold(0.0, f64::max)
    }

    fn json(&self) -> Value {
        json!({"way": self.way.word(), "round": self.round, "plan": self.plan, "total_s": self.total(),
               "windows_s": self.windows(), "blocked_s": self.blocked(),
               "safe_s": self.ranks.first().map(|t| &t.safe), "protect_s": self.protect()})
    }

    /// What the windows of such a run show.
    fn pairs(&self) -> Pairs {
        let (windows, plan) = (self.windows(), self.plan.as_bytes());
        let mut safe = self.ranks[0].safe.iter();
        // Is there work of a checkpoint left when the window ends?
        let late: Vec<bool> = plan
            .iter()
            .zip(&windows)
            .map(|(p, took)| *p == CHECKPOINT as u8 && safe.next().is_none_or(|safe| safe > took))
            .collect();
        let mut pairs = Pairs::default();
        // The first one is not counted: the memory is touched in it for the first time.
        for at in (1..windows.len().saturating_sub(1)).step_by(2) {
            let with = if plan[at] == CHECKPOINT as u8 { at } else { at + 1 };
            let without = at + at + 1 - with;
            // Whoever runs into the next window makes that one slower than it would be.
            if late[with] || late[at - 1] {
                pairs.late += 1;
            } else {
                pairs.slower.push(windows[with] / windows[without] - 1.0);
            }
        }
        for at in 1..windows.len().saturating_sub(1) {
            if plan[at] == plan[at + 1] && plan[at] == NONE as u8 && !late[at - 1] {
                pairs.noise.push((windows[at + 1] / windows[at] - 1.0).abs());
            }
        }
        pairs
    }
}

/// Pairs of windows, shares.
#[derive(Debug, Default)]
struct Pairs {
    /// How much longer the one with a checkpoint took.
    slower: Vec<f64>,
    /// How much two neighbours differ that both have none.
    noise: Vec<f64>,
    /// Pairs that show nothing, as what was behind a checkpoint took longer than its window.
    late: u32,
}

/// With and without, after a first one without: neither is always the earlier of a pair.
fn turns(pairs: u32) -> String {
    let pair = |n| if n % 2 == 0 { [CHECKPOINT, NONE] } else { [NONE, CHECKPOINT] };
    std::iter::once(NONE).chain((0..pairs).flat_map(pair)).collect()
}

/// Measures.
pub(super) fn run(args: &OverheadArgs) -> Result<Exit, Failed> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let bad = if args.ranks == 0 || args.mb == 0 || args.checkpoints == 0 {
        Some("--ranks, --mb and --checkpoints must be at least 1")
    } else if args.pairs == 0 && args.repeats == 0 {
        Some("--pairs or --repeats must be at least 1")
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
        rows.extend(place_rows(args, (*place, used), &runs));
        raw.insert(place.word().into(), runs.iter().map(Run::json).collect());
    }
    let setup = json!({
        "ranks": args.ranks, "mb": args.mb, "seconds": args.seconds, "checkpoints": args.checkpoints,
        "pairs": args.pairs, "repeats": args.repeats, "runs": raw,
    });
    report("overhead", (args.json, args.check), setup, &rows)
}

/// All runs of one placement, the ways in another order in each round.
fn place_runs(args: &OverheadArgs, cores: usize) -> Result<Vec<Run>, Failed> {
    let windows = args.checkpoints as usize + 1;
    let trial = job(args, (Way::None, cores, TRIAL_STEPS), (None, NONE.to_string()))?;
    let apart = args.seconds / windows as f64;
    let steps = ((apart / (trial.total() / TRIAL_STEPS as f64)) as u64).max(1);
    let ways: Vec<Way> = args.ways.iter().copied().filter(|w| *w != Way::None).collect();
    let mut runs = Vec::new();
    if args.pairs > 0 {
        for way in &ways {
            runs.push(job(args, (*way, cores, steps), (None, turns(args.pairs)))?);
        }
    }
    let plan = |way| {
        let rest = if way == Way::None { NONE } else { CHECKPOINT };
        std::iter::once(NONE).chain(std::iter::repeat_n(rest, windows - 1)).collect()
    };
    let all: Vec<Way> = std::iter::once(Way::None).chain(ways).collect();
    for round in 0..args.repeats {
        for n in 0..all.len() {
            let way = all[(n + round as usize) % all.len()];
            runs.push(job(args, (way, cores, steps), (Some(round), plan(way)))?);
        }
    }
    Ok(runs)
}

/// One run of the job, in directories of its own.
fn job(
    args: &OverheadArgs,
    (way, cores, steps): (Way, usize, u64),
    (round, plan): (Option<u32>, String),
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
    command.args(["bench", "overhead-ranks", "--way", way.word(), "--plan", &plan]);
    common::options(
        &mut command,
        &[
            ("--ranks", args.ranks.into()),
            ("--mb", args.mb),
            ("--steps", steps),
            ("--cores", cores as u64),
        ],
    );
    command.arg("--dir").arg(&dir);
    common::finish(command, &dir.join("log"))?;
    Ok(Run { way, round, plan, ranks: common::times(&dir, args.ranks)? })
}

fn place_rows(args: &OverheadArgs, (place, cores): (Place, usize), runs: &[Run]) -> Vec<Row> {
    let place_name = match place {
        Place::Busy => format!("{cores} cores, all busy"),
        Place::Spare => format!("{cores} busy, one spare"),
    };
    let mut rows = Vec::new();
    let bare: Vec<&Run> = runs.iter().filter(|r| r.way == Way::None).collect();
    if !bare.is_empty() {
        let s = spread(&bare.iter().map(|r| r.total()).collect::<Vec<f64>>());
        let name = |what: &str| format!("{place_name}: whole runs without: {what}");
        rows.push(fact(name("median"), s.median, "s"));
        rows.push(fact(name("most / least"), s.max / s.min, "ratio"));
    }
    // One window of a job has no checkpoint.
    let share = f64::from(args.checkpoints) / f64::from(args.checkpoints + 1);
    for way in [Way::Files, Way::Pool, Way::Cow, Way::Flush, Way::Incremental] {
        let of: Vec<&Run> = runs.iter().filter(|r| r.way == way).collect();
        if of.is_empty() {
            continue;
        }
        let goal = match (way, place) {
            (Way::Files | Way::Cow | Way::Incremental, _) => None,
            (_, Place::Busy) => Some(BUSY_GOAL),
            (_, Place::Spare) => Some(SPARE_GOAL),
        };
        let title = format!("{place_name}: {}", way.title());
        rows.extend(slower_rows(&title, goal, share, &of, &bare));
        rows.extend(time_rows(&title, &of));
    }
    rows
}

/// How much longer the job took; the goal is for what was measured best.
fn slower_rows(title: &str, goal: Option<f64>, share: f64, of: &[&Run], bare: &[&Run]) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut slower = |what: &str, goal, shares: Vec<f64>| {
        let name = |part: &str| format!("{title}: slower, {} {what}, {part}", shares.len());
        if shares.is_empty() {
            return;
        }
        let s = spread(&shares);
        let (value, sense) = (s.median * 100.0, Sense::AtMost);
        rows.push(Row { name: name("median"), value, unit: "%", goal, sense });
        rows.push(fact(name("least"), s.min * 100.0, "%"));
        rows.push(fact(name("most"), s.max * 100.0, "%"));
    };
    let whole: Vec<f64> = of
        .iter()
        .filter_map(|r| {
            let without = bare.iter().find(|n| r.round.is_some() && n.round == r.round)?;
            Some(r.total() / without.total() - 1.0)
        })
        .collect();
    let Some(pairs) = of.iter().find(|r| r.round.is_none()).map(|r| r.pairs()) else {
        slower("whole runs", goal, whole);
        return rows;
    };
    slower("pairs of windows", goal, pairs.slower.iter().map(|s| s * share).collect());
    slower("whole runs", None, whole);
    if !pairs.noise.is_empty() {
        let s = spread(&pairs.noise);
        let name = |part: &str| format!("{title}: windows without differ by, {part}");
        rows.push(fact(name("median"), s.median * share * 100.0, "%"));
        rows.push(fact(name("most"), s.max * share * 100.0, "%"));
    }
    if pairs.late > 0 {
        let text =
            "pairs not counted, as a checkpoint's work outlasted its window (raise --seconds)";
        rows.push(fact(format!("{title}: {text}"), f64::from(pairs.late), ""));
    }
    rows
}

fn time_rows(title: &str, of: &[&Run]) -> Vec<Row> {
    let mut rows = Vec::new();
    let blocked: Vec<f64> = of.iter().flat_map(|r| r.blocked()).collect();
    rows.push(fact(format!("{title}: blocked, median"), spread(&blocked).median, "s"));
    let safe: Vec<f64> = of.iter().flat_map(|r| r.ranks[0].safe.clone()).collect();
    rows.push(fact(format!("{title}: until safe, median"), spread(&safe).median, "s"));
    rows.push(fact(format!("{title}: until safe, most"), spread(&safe).max, "s"));
    let protect: Vec<f64> = of.iter().map(|r| r.protect()).filter(|p| *p > 0.0).collect();
    if !protect.is_empty() {
        let text = format!("{title}: stn_protect, once, not counted above");
        rows.push(fact(text, spread(&protect).median, "s"));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(plan: &str, windows: &[f64], safe: &[f64]) -> Run {
        let times = Times { windows: windows.to_vec(), safe: safe.to_vec(), ..Times::default() };
        Run { way: Way::Flush, round: None, plan: plan.into(), ranks: vec![times] }
    }

    #[test]
    fn a_pair_is_two_windows_side_by_side() {
        let plan = turns(3);
        assert_eq!(plan, "-x--xx-");
        let pairs = run(&plan, &[9.0, 1.5, 1.0, 2.0, 3.0, 1.25, 1.0], &[1.0; 3]).pairs();
        assert_eq!(pairs.slower, [0.5, 0.5, 0.25]);
        assert_eq!(pairs.noise, [1.0], "the second and third without");
        assert_eq!(pairs.late, 0);
    }

    #[test]
    fn what_outlasts_its_window_is_not_counted() {
        // The second checkpoint's work goes on in the third's window.
        let windows = [9.0, 1.5, 1.0, 2.0, 3.0, 1.25, 1.0];
        let pairs = run(&turns(3), &windows, &[1.0, 3.5, 1.0]).pairs();
        assert_eq!((pairs.slower, pairs.late), (vec![0.5], 2));
        // The first one's, in the window without that it is compared with.
        let pairs = run(&turns(3), &windows, &[2.0, 1.0, 1.0]).pairs();
        assert_eq!((pairs.slower, pairs.late, pairs.noise), (vec![0.5, 0.25], 1, vec![]));
        // Never safe.
        assert_eq!(run(&turns(1), &windows[..3], &[]).pairs().late, 1);
    }
}
