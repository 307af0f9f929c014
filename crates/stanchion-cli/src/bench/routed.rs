//! `stanchion bench routed`: a program's own files.

use super::{Row, Scratch, Sense, Spread, fact, report, spread};
use crate::args::RoutedArgs;
use crate::exit::{Exit, Failed, OrExit};
use crate::out;
use anyhow::{Context, anyhow};
use serde::Deserialize;
use serde_json::json;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Blocked with Stanchion over blocked without, at most (SCR: 2.9).
const ROUTED_GOAL: f64 = 1.05;
/// What of a failed run's output is shown.
const SHOWN_LINES: usize = 20;

/// What heat2d writes with `--timing`.
#[derive(Debug, Deserialize)]
struct Timing {
    mode: String,
    bytes_per_rank: u64,
    checkpoints: Vec<Checkpoint>,
}

#[derive(Clone, Debug, Deserialize)]
struct Checkpoint {
    blocked_s: f64,
    start_s: f64,
    write_s: f64,
    complete_s: f64,
}

/// What both kinds of run need.
struct Setup<'a> {
    args: &'a RoutedArgs,
    program: PathBuf,
    log: PathBuf,
    prefix: PathBuf,
    plain: PathBuf,
}

impl Setup<'_> {
    fn launch(&self, timing: &Path) -> Vec<OsString> {
        let a = self.args;
        // Every checkpoint after so many steps, whose length makes the pause between checkpoints.
        const STEPS: u32 = 10;
        let mut command: Vec<OsString> = vec![a.mpiexec.clone().into()];
        command.extend(a.mpiexec_arg.iter().map(OsString::from));
        command.extend(["-n".into(), a.ranks.to_string().into(), self.program.clone().into()]);
        for (name, value) in [
            ("--steps", STEPS * a.checkpoints),
            ("--every", STEPS),
            ("--ckpt-mb", a.mb),
            ("--step-ms", a.pause_ms / STEPS),
        ] {
            command.extend([name.into(), value.to_string().into()]);
        }
        command.extend(["--timing".into(), timing.into()]);
        command
    }

    fn run(&self, stanchion: bool) -> anyhow::Result<Timing> {
        let timing = self.prefix.join("timing.json");
        let mut launch = self.launch(&timing);
        if !stanchion {
            launch.extend(["--plain".into(), self.plain.clone().into()]);
        }
        let mut command = Command::new(&launch[0]);
        if stanchion {
            command = Command::new(std::env::current_exe()?);
            command.args([
                "run",
                "--nodes",
                &self.args.nodes.to_string(),
                "--scheme",
                &self.args.scheme,
            ]);
            command.arg("--prefix").arg(&self.prefix).arg("--cache-dir").arg(&self.args.dir);
            command.args([
                "--name",
                "bench",
                "--from-scratch",
                "--runs-max",
                "1",
                "--set",
                "flush_every=0",
            ]);
            command.args(["--set", "flush_at_end=0", "--"]).args(&launch);
        } else {
            command.args(&launch[1..]).current_dir(&self.prefix);
        }
        let log = File::create(&self.log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let what = if stanchion { "with Stanchion" } else { "plain" };
        let status =
            command.status().with_context(|| format!("the run {what} cannot be started"))?;
        if !status.success() {
            let text = String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            let tail = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
            return Err(anyhow!("the run {what} ended with {status}; its last words:\n{tail}"));
        }
        let bytes =
            std::fs::read(&timing).with_context(|| format!("the run {what} left no times"))?;
        std::fs::remove_file(&timing)?;
        let result: Timing =
            serde_json::from_slice(&bytes).context("the program's times do not parse")?;
        let want = if stanchion { "scr" } else { "plain" };
        if result.mode != want || result.checkpoints.len() < self.args.checkpoints as usize {
            let n = result.checkpoints.len();
            return Err(anyhow!("the run {what} took {n} checkpoints in mode '{}'", result.mode));
        }
        Ok(result)
    }
}

fn check(args: &RoutedArgs) -> Result<PathBuf, Failed> {
    let usage = |text: &str| Failed::new(Exit::Usage, anyhow!("{text}"));
    if args.repeats == 0 || args.ranks == 0 || args.nodes == 0 || args.mb == 0 {
        return Err(usage("--repeats, --ranks, --nodes and --mb must be at least 1"));
    }
    if args.checkpoints < 2 {
        return Err(usage("--checkpoints must be at least 2: the first of a run is not counted"));
    }
    std::fs::canonicalize(&args.program)
        .with_context(|| format!("--program {}", args.program.display()))
        .or_exit(Exit::Usage)
}

/// Measures.
pub(super) fn run(args: &RoutedArgs) -> Result<Exit, Failed> {
    let program = check(args)?;
    let mut scratch = Scratch(Vec::new());
    let prefix = scratch.add(&std::env::temp_dir(), "prefix").or_exit(Exit::Storage)?;
    let plain = scratch.add(&args.dir, "plain").or_exit(Exit::Storage)?;
    let setup = Setup { args, program, log: prefix.join("log"), prefix, plain };
    let mut runs: Vec<[Timing; 2]> = Vec::new();
    for repeat in 0..args.repeats {
        // Who goes first alternates, so that what drifts, drifts for both.
        let (first, second) = if repeat % 2 == 0 { (false, true) } else { (true, false) };
        let (a, b) = (setup.run(first)?, setup.run(second)?);
        let pair = if first { [b, a] } else { [a, b] };
        let ratio = blocked(&pair[1]).median / blocked(&pair[0]).median;
        out::say(&format!("pair {} of {}: ratio {ratio:.3}", repeat + 1, args.repeats));
        runs.push(pair);
    }
    drop(setup);
    let rows = rows(&runs);
    let setup = json!({
        "ranks": args.ranks, "nodes": args.nodes, "mb": args.mb, "repeats": args.repeats,
        "checkpoints": args.checkpoints, "scheme": args.scheme, "pause_ms": args.pause_ms,
        "mpiexec": args.mpiexec,
    });
    report("routed", (args.json, args.check), setup, &rows)
}

/// Blocked times of a run but its first.
fn blocked(t: &Timing) -> Spread {
    spread(&t.checkpoints[1..].iter().map(|c| c.blocked_s).collect::<Vec<f64>>())
}

fn rows(runs: &[[Timing; 2]]) -> Vec<Row> {
    let all = |which: usize, part: fn(&Checkpoint) -> f64| -> Vec<f64> {
        runs.iter().flat_map(|pair| pair[which].checkpoints[1..].iter().map(part)).collect()
    };
    let mut rows =
        vec![fact("size of a rank's checkpoint", runs[0][1].bytes_per_rank as f64 / 1e6, "MB")];
    let mut medians = [0.0; 2];
    for (which, name) in ["plain", "stanchion"].into_iter().enumerate() {
        let s = spread(&all(which, |c| c.blocked_s));
        medians[which] = s.median;
        rows.push(fact(format!("{name}: blocked, median"), s.median, "s"));
        rows.push(fact(format!("{name}: blocked, least"), s.min, "s"));
        rows.push(fact(format!("{name}: blocked, most"), s.max, "s"));
        let first: Vec<f64> =
            runs.iter().map(|pair| pair[which].checkpoints[0].blocked_s).collect();
        rows.push(fact(format!("{name}: first of a run, median"), spread(&first).median, "s"));
    }
    type Part = fn(&Checkpoint) -> f64;
    let parts: [(&str, Part); 3] =
        [("start", |c| c.start_s), ("write", |c| c.write_s), ("complete", |c| c.complete_s)];
    for (name, part) in parts {
        rows.push(fact(format!("stanchion: {name}, median"), spread(&all(1, part)).median, "s"));
    }
    let ratios: Vec<f64> =
        runs.iter().map(|pair| blocked(&pair[1]).median / blocked(&pair[0]).median).collect();
    let s = spread(&ratios);
    rows.push(fact("blocked, stanchion / plain, least of a pair", s.min, "ratio"));
    rows.push(fact("blocked, stanchion / plain, most of a pair", s.max, "ratio"));
    let value = medians[1] / medians[0];
    rows.push(Row {
        name: "blocked, stanchion / plain".into(),
        value,
        unit: "ratio",
        goal: Some(ROUTED_GOAL),
        sense: Sense::AtMost,
    });
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(blocked: &[f64]) -> Timing {
        let checkpoints = blocked
            .iter()
            .map(|b| Checkpoint { blocked_s: *b, start_s: 0.0, write_s: *b, complete_s: 0.0 })
            .collect();
        Timing { mode: "scr".into(), bytes_per_rank: 1, checkpoints }
    }

    #[test]
    fn the_first_of_each_run_does_not_count() {
        let rows = rows(&[
            [timing(&[9.0, 1.0, 1.2]), timing(&[50.0, 1.1, 1.1])],
            [timing(&[9.0, 0.8, 1.0]), timing(&[50.0, 1.2, 1.0])],
        ]);
        let ratio = rows.last().expect("the ratio is the last row");
        assert!((ratio.value - 1.1).abs() < 1e-9, "{}", ratio.value);
        assert_eq!(ratio.holds(), Some(false));
    }
}
