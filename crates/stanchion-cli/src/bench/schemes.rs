//! `stanchion bench schemes`: what each redundancy scheme takes until a dataset is protected, with caches in memory and on
//! a slow disk, beside a flush to a slow prefix; and what it adds to the time that the application is blocked.

use super::aggregate::device::Held;
use super::job::{self, slowest};
use super::{Row, Scratch, Sense, fact, report, spread};
use crate::args::{SchemesArgs, SchemesRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use crate::out;
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::json;
use stanchion::{Client, FLAG_CHECKPOINT, Level, Options, Region};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Blocked with redundancy over blocked without, at most.
const BLOCKED_GOAL: f64 = 1.05;
/// Compared for that, on six nodes.
const BLOCKED: [&str; 3] = ["SINGLE", "XOR", "RS(4,2)"];
const BLOCKED_NODES: u32 = 6;
/// For a level to be reached, milliseconds.
const LEVEL_MS: u64 = 600_000;
/// What a job computes between two checkpoints whose blocked times are compared: what is evicted behind a protected dataset
/// is gone by then.
const PAUSE_MS: u64 = 300;
/// A held device has room for so many times what lies on it at once, and for a file system.
const ROOM: u64 = 8;
const ROOM_BASE: u64 = 256 << 20;

/// What one rank measured, seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    /// It was held up.
    blocked: Vec<f64>,
    /// From then on until the dataset had its level.
    level: Vec<f64>,
}

/// One job.
struct Job<'a> {
    nodes: u32,
    scheme: &'a str,
    mb: u64,
    checkpoints: u32,
    cache: &'a Path,
    prefix: &'a Path,
    /// A file system to be synced before a dataset counts as protected.
    sync: Option<&'a Path>,
    /// Waits for the prefix.
    persistent: bool,
    /// Between a dataset's level and the next checkpoint, as if the application computed.
    pause_ms: u64,
}

impl Job<'_> {
    fn run(&self, dir: &Path) -> Result<Vec<Times>, Failed> {
        let sets = [
            format!("flush_every={}", u32::from(self.persistent)),
            "flush_at_end=0".into(),
            format!("scheme={}", self.scheme),
            format!("cache_dir={}", self.cache.display()),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let mut command = job::in_job_of(self.nodes, self.prefix, &sets)?;
        command.args(["bench", "schemes-ranks", "--ranks", &self.nodes.to_string()]);
        let counts = [("--mb", self.mb), ("--checkpoints", self.checkpoints.into())];
        job::options(&mut command, &counts);
        job::options(&mut command, &[("--pause-ms", self.pause_ms)]);
        command.arg("--dir").arg(dir).args(self.persistent.then_some("--persistent"));
        if let Some(sync) = self.sync {
            command.arg("--sync").arg(sync);
        }
        job::finish(command, &dir.join("log"))?;
        Ok(job::times(dir, self.nodes)?)
    }
}

/// The scheme with two parities that fits on so many nodes, and the others.
fn schemes(nodes: u32) -> Vec<String> {
    let mut all = vec!["SINGLE".to_owned()];
    if nodes > 1 {
        all.extend(["PARTNER".into(), "XOR".into()]);
    }
    if nodes > 2 {
        all.push(format!("RS({},2)", nodes.min(8) - 2));
    }
    all
}

/// Measures.
pub(super) fn run(args: &SchemesArgs) -> Result<Exit, Failed> {
    if args.mb == 0 || args.rounds == 0 || args.nodes.contains(&0) {
        let text = "--mb, --rounds and --nodes must be at least 1";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let mut scratch = Scratch(Vec::new());
    let dir = scratch.add(&args.disk, "schemes").or_exit(Exit::Storage)?;
    let memory = scratch.add(Path::new("/dev/shm"), "schemes").or_exit(Exit::Storage)?;
    let mut rows = in_caches(args, &dir, ("memory", &memory, None))?;
    let most = args.nodes.iter().max().copied().unwrap_or(1);
    let size = ROOM * u64::from(most) * (args.mb << 20) + ROOM_BASE;
    let mut skipped = Vec::new();
    if args.disk_held > 0 {
        let name = format!("disk held to {} MB/s", args.disk_held);
        match Held::make(&dir, size, args.disk_held * 1_000_000) {
            Ok(held) => rows.extend(in_caches(args, &dir, (&name, held.dir(), Some(held.dir())))?),
            Err(why) => skipped.push(format!("{name}: {why:#}")),
        }
    }
    if args.prefix_held > 0 {
        let name = format!("prefix held to {} MB/s", args.prefix_held);
        match Held::make(&dir, size, args.prefix_held * 1_000_000) {
            Ok(held) => rows.extend(to_prefix(args, &dir, &memory, (&name, held.dir()))?),
            Err(why) => skipped.push(format!("{name}: {why:#}")),
        }
    }
    if args.blocked_rounds > 0 {
        rows.extend(blocked(args, &dir, &memory)?);
    }
    skipped.iter().for_each(|why| out::say(&format!("not measured: {why}")));
    let setup = json!({
        "nodes": args.nodes, "mb": args.mb, "rounds": args.rounds, "disk_held": args.disk_held,
        "prefix_held": args.prefix_held, "blocked_mb": args.blocked_mb, "blocked_rounds": args.blocked_rounds,
        "not_measured": skipped,
    });
    report("schemes", (args.json, args.check), setup, &rows)
}

/// All schemes on all numbers of nodes, with caches in one place.
fn in_caches(
    args: &SchemesArgs,
    dir: &Path,
    (place, cache, sync): (&str, &Path, Option<&Path>),
) -> Result<Vec<Row>, Failed> {
    let mut rows = Vec::new();
    for nodes in args.nodes.iter().copied() {
        for scheme in schemes(nodes) {
            // The first of a job makes memory and files: it does not count.
            let checkpoints = args.rounds + 1;
            let (mb, persistent) = (args.mb, false);
            let job = Job {
                nodes,
                scheme: &scheme,
                mb,
                checkpoints,
                cache,
                prefix: dir,
                sync,
                persistent,
                pause_ms: 0,
            };
            let s = spread(&slowest(&job.run(dir)?, |t| &t.level)[1..]);
            let name =
                |what: &str| format!("{place}, {nodes} nodes, {scheme}: until protected, {what}");
            out::say(&format!("{} {:.3} s", name("median"), s.median));
            rows.push(fact(name("median"), s.median, "s"));
            rows.push(fact(name("least"), s.min, "s"));
            rows.push(fact(name("most"), s.max, "s"));
        }
    }
    Ok(rows)
}

/// The same data to a prefix on a slow device.
fn to_prefix(
    args: &SchemesArgs,
    dir: &Path,
    cache: &Path,
    (place, prefix): (&str, &Path),
) -> Result<Vec<Row>, Failed> {
    let mut rows = Vec::new();
    for nodes in args.nodes.iter().copied() {
        let (scheme, mb, checkpoints) = ("SINGLE", args.mb, args.rounds + 1);
        let (sync, persistent) = (None, true);
        let pause_ms = 0;
        let job = Job { nodes, scheme, mb, checkpoints, cache, prefix, sync, persistent, pause_ms };
        let s = spread(&slowest(&job.run(dir)?, |t| &t.level)[1..]);
        let name = |what: &str| format!("{place}, {nodes} nodes: until persistent, {what}");
        out::say(&format!("{} {:.3} s", name("median"), s.median));
        rows.push(fact(name("median"), s.median, "s"));
        rows.push(fact(name("least"), s.min, "s"));
        rows.push(fact(name("most"), s.max, "s"));
    }
    Ok(rows)
}

/// Blocked times with and without redundancy: jobs in turns, in another order each round.
fn blocked(args: &SchemesArgs, dir: &Path, cache: &Path) -> Result<Vec<Row>, Failed> {
    let mut medians = [const { Vec::new() }; BLOCKED.len()];
    for round in 0..args.blocked_rounds {
        for n in 0..BLOCKED.len() {
            let which = (n + round as usize) % BLOCKED.len();
            let job = Job {
                nodes: BLOCKED_NODES,
                scheme: BLOCKED[which],
                mb: args.blocked_mb,
                checkpoints: args.blocked_checkpoints + 1,
                cache,
                prefix: dir,
                sync: None,
                persistent: false,
                pause_ms: PAUSE_MS,
            };
            let times = job.run(dir)?;
            medians[which].push(spread(&slowest(&times, |t| &t.blocked)[1..]).median);
        }
        let ratio =
            |n: usize| medians[n].last().unwrap_or(&0.0) / medians[0].last().unwrap_or(&1.0);
        out::say(&format!("blocked, round {}: XOR {:.3}, RS {:.3}", round + 1, ratio(1), ratio(2)));
    }
    let mut rows = Vec::new();
    let size = format!("{BLOCKED_NODES} x {} MiB", args.blocked_mb);
    for (scheme, times) in BLOCKED.iter().zip(&medians) {
        let s = spread(times);
        let name = |what: &str| format!("{size}, {scheme}: blocked, {what}");
        rows.push(fact(name("median"), s.median, "s"));
        rows.push(fact(name("least"), s.min, "s"));
        rows.push(fact(name("most"), s.max, "s"));
    }
    for (scheme, times) in BLOCKED.iter().zip(&medians).skip(1) {
        let ratios: Vec<f64> = times.iter().zip(&medians[0]).map(|(a, b)| a / b).collect();
        let s = spread(&ratios);
        let name = |what: &str| format!("{size}, blocked, {scheme} / SINGLE, {what}");
        rows.push(fact(name("least"), s.min, "ratio"));
        rows.push(fact(name("most"), s.max, "ratio"));
        let (goal, sense, unit) = (Some(BLOCKED_GOAL), Sense::AtMost, "ratio");
        rows.push(Row { name: name("median"), value: s.median, unit, goal, sense });
    }
    Ok(rows)
}

/// Inside of the job: what mpiexec would be.
pub(super) fn ranks(args: &SchemesRankArgs) -> Result<Exit, Failed> {
    job::wait(job::spawn("schemes-rank", args.ranks, |command| {
        let counts = [("--mb", args.mb), ("--checkpoints", args.checkpoints.into())];
        job::options(command, &counts);
        job::options(command, &[("--pause-ms", args.pause_ms)]);
        command.arg("--dir").arg(&args.dir).args(args.persistent.then_some("--persistent"));
        if let Some(sync) = &args.sync {
            command.arg("--sync").arg(sync);
        }
    })?)
}

/// One rank of the job.
pub(super) fn rank(args: &SchemesRankArgs) -> Result<Exit, Failed> {
    job::leave(&args.dir, args.rank, &measure(args)?)
}

fn sync(dir: Option<&PathBuf>) -> anyhow::Result<()> {
    if let Some(dir) = dir {
        rustix::fs::syncfs(File::open(dir)?).context("syncfs")?;
    }
    Ok(())
}

fn measure(args: &SchemesRankArgs) -> anyhow::Result<Times> {
    let bytes = usize::try_from(args.mb << 20)?;
    let mut state: Vec<u8> = (0..bytes).map(|n| (n >> 3) as u8 ^ args.rank as u8).collect();
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let mut client = Client::connect(&options)?;
    client.expect(0, bytes as u64)?;
    let level = if args.persistent { Level::Persistent } else { Level::Protected };
    let mut times = Times::default();
    for n in 0..args.checkpoints {
        // Not the bytes of the checkpoint before.
        state[0] = n as u8;
        client.barrier()?;
        let start = Instant::now();
        let regions = [Region { id: 0, bytes: &state }];
        let begun = client.checkpoint(&format!("bench.{n}"), FLAG_CHECKPOINT, &regions)?;
        times.blocked.push(start.elapsed().as_secs_f64());
        client.wait(begun.no, level, LEVEL_MS)?;
        sync(args.sync.as_ref())?;
        times.level.push(start.elapsed().as_secs_f64());
        std::thread::sleep(Duration::from_millis(args.pause_ms));
    }
    client.finalize()?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_fit_the_nodes() {
        assert_eq!(schemes(1), ["SINGLE"]);
        assert_eq!(schemes(2), ["SINGLE", "PARTNER", "XOR"]);
        assert_eq!(schemes(4)[3], "RS(2,2)");
        assert_eq!(schemes(16)[3], "RS(6,2)");
    }
}
