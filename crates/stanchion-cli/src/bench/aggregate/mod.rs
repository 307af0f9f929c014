//! `stanchion bench aggregate`: checkpoints of many processes that write in small and large pieces, until they are
//! durable: a file each, and through the pool, beside what the device can do at all.
//!
//! All is measured in one job whose ranks take turns between the ways, all ranks at once. What counts is the slowest
//! rank's time.

mod device;
mod rank;
mod stream;

use super::{Row, Scratch, at_least, fact, report, spread};
use crate::args::{AggregateArgs, AggregateRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use device::Held;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(super) use rank::rank;

/// Speed until durable over that of raw direct writes, at least: on a device held to a bandwidth, and as it is.
const HELD_GOAL: f64 = 0.95;
const BARE_GOAL: f64 = 0.80;
/// Over a file a process, at least, where an operation costs.
const FILES_GOAL: f64 = 2.62;
/// The goal on the bare disk is for so many bytes.
const BARE_BYTES: u64 = 2 << 30;
/// Rounds that do not count: the store's segments and the pool come to be in them.
const ROUNDS_WARM: u32 = 2;
/// A measurement on a held device takes about so long, seconds.
const HELD_SECONDS: u64 = 2;

/// What one rank measured, an entry a round, seconds: until the calls had returned (of the pool: until the checkpoint
/// was complete), and until all was durable.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    files: Vec<(f64, f64)>,
    /// The same with every call durable when it returns.
    dsync: Vec<(f64, f64)>,
    pool: Vec<(f64, f64)>,
    raw: Vec<f64>,
}

fn result_file(work: &Path, rank: u32) -> PathBuf {
    work.join(format!("times.{rank}"))
}

fn streams_file(work: &Path) -> PathBuf {
    work.join("streams")
}

fn load(path: &Path) -> anyhow::Result<Vec<Vec<u64>>> {
    let bytes = std::fs::read(path)?;
    serde_json::from_slice(&bytes).context("the streams do not parse")
}

/// One way of writing, on one device.
struct Setup<'a> {
    args: &'a AggregateArgs,
    name: String,
    streams: Vec<Vec<u64>>,
    copies: u64,
    /// The checkpoint's size.
    bytes: u64,
}

impl<'a> Setup<'a> {
    /// At least `bytes` bytes of all writers together: a checkpoint of that size is the same calls several times.
    fn new(args: &'a AggregateArgs, name: &str, streams: &[Vec<u64>], bytes: u64) -> Setup<'a> {
        let one: u64 = (0..args.writers as usize)
            .map(|r| streams[r % streams.len()].iter().sum::<u64>())
            .sum();
        let copies = bytes.div_ceil(one).max(1);
        let streams = streams.to_vec();
        Setup { args, name: name.into(), streams, copies, bytes: one * copies }
    }
}

/// Measures.
pub(super) fn run(args: &AggregateArgs) -> Result<Exit, Failed> {
    if args.writers == 0 || args.repeats == 0 || args.mb == 0 {
        let text = "--writers, --repeats and --mb must be at least 1";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let mut all = vec![("BLCR-like".to_owned(), vec![stream::blcr()])];
    if !args.trace.is_empty() {
        let traces = args.trace.iter().map(|path| stream::trace(path));
        let traces = traces.collect::<anyhow::Result<_>>().or_exit(Exit::Usage)?;
        all.push(("traces".to_owned(), traces));
    }
    if args.only_traces && all.len() > 1 {
        all.remove(0);
    }
    let mut rows = Vec::new();
    for (name, streams) in &all {
        if !args.no_plain {
            let setup = Setup::new(args, name, streams, args.mb << 20);
            let mut scratch = Scratch(Vec::new());
            let work = scratch.add(&args.dir, "plain").or_exit(Exit::Storage)?;
            let times = job(&setup, &work, !args.no_dsync)?;
            let goal = if setup.bytes >= BARE_BYTES { Some(BARE_GOAL) } else { None };
            rows.extend(table(&setup, "plain disk", &times, goal));
        }
        for rate in &args.held {
            let device = format!("disk held to {rate} MB/s");
            let bytes = rate * 1_000_000 * HELD_SECONDS;
            let setup = Setup::new(args, name, streams, bytes);
            let mut scratch = Scratch(Vec::new());
            let work = scratch.add(&args.dir, "held").or_exit(Exit::Storage)?;
            // Two checkpoints in the store, a file each, the raw file, and the file system's own.
            match Held::make(&work, setup.bytes * 5 + (1 << 30), rate * 1_000_000) {
                Ok(held) => {
                    let times = job(&setup, held.dir(), false)?;
                    rows.extend(table(&setup, &device, &times, Some(HELD_GOAL)));
                }
                Err(why) => {
                    rows.push(fact(format!("{name}, {device}: not measured: {why:#}"), 0.0, "-"));
                }
            }
        }
    }
    let setup = json!({
        "writers": args.writers, "repeats": args.repeats, "mb": args.mb, "held": args.held,
        "dsync": !args.no_dsync,
    });
    report("aggregate", (args.json, args.check), setup, &rows)
}

/// One job with its cache in `work`.
fn job(setup: &Setup<'_>, work: &Path, dsync: bool) -> Result<Vec<Times>, Failed> {
    let args = setup.args;
    let me = std::env::current_exe()?;
    let bytes = serde_json::to_vec(&setup.streams).context("streams as JSON")?;
    std::fs::write(streams_file(work), bytes)?;
    let dirs = ["cache", "prefix"].map(|name| work.join(name));
    dirs.iter().try_for_each(std::fs::create_dir)?;
    let mut command = Command::new(&me);
    command.args(["run", "--nodes", "1", "--name", "bench", "--runs-max", "1", "--from-scratch"]);
    command.args(["--scheme", "SINGLE", "--prefix"]).arg(&dirs[1]);
    let cache = format!("cache_dir={}", dirs[0].display());
    let mut sets = vec![cache.as_str(), "cache_store=segments", "cache_durable=1"];
    sets.extend(["cache_datasets=1", "flush_every=0", "flush_at_end=0"]);
    sets.extend(args.set.iter().map(String::as_str));
    for set in sets {
        command.args(["--set", set]);
    }
    command.arg("--").arg(&me).args(["bench", "aggregate-ranks"]);
    for (name, value) in [
        ("--ranks", args.writers.to_string()),
        ("--copies", setup.copies.to_string()),
        ("--repeats", args.repeats.to_string()),
    ] {
        command.arg(name).arg(value);
    }
    command.arg("--work").arg(work);
    if dsync {
        command.arg("--dsync");
    }
    let log = work.join("log");
    let to = File::create(&log)?;
    command.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
    let status = command.status().context("the job cannot be started")?;
    if !status.success() {
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        return Err(anyhow!("the job ended with {status}; its words:\n{text}").into());
    }
    let read = |rank| {
        let bytes = std::fs::read(result_file(work, rank))
            .with_context(|| format!("writer {rank} left no times"))?;
        serde_json::from_slice(&bytes).context("a writer's times do not parse")
    };
    Ok((0..args.writers).map(read).collect::<anyhow::Result<_>>()?)
}

/// The slowest writer's time in each round.
fn slowest(times: &[Times], part: impl Fn(&Times) -> Vec<f64>) -> Vec<f64> {
    let all: Vec<Vec<f64>> = times.iter().map(part).collect();
    let rounds = all.iter().map(Vec::len).min().unwrap_or(0);
    (0..rounds).map(|n| all.iter().map(|t| t[n]).fold(0.0, f64::max)).collect()
}

fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter().zip(under).map(|(a, b)| a / b).collect()
}

fn table(setup: &Setup<'_>, device: &str, times: &[Times], goal: Option<f64>) -> Vec<Row> {
    let first = |v: &[(f64, f64)]| v.iter().map(|t| t.0).collect::<Vec<f64>>();
    let second = |v: &[(f64, f64)]| v.iter().map(|t| t.1).collect::<Vec<f64>>();
    let gb = setup.bytes as f64 / 1e9;
    let name = |what: &str| format!("{}, {device}: {what}", setup.name);
    let mut rows = vec![fact(name("size of a checkpoint"), gb, "GB")];
    let mut some = |what: &str, values: &[f64]| {
        if values.is_empty() {
            return;
        }
        let s = spread(values);
        let gbs = |seconds: f64| gb / seconds;
        rows.push(fact(name(&format!("{what}, median")), s.median, "s"));
        rows.push(fact(name(&format!("{what}, least")), s.min, "s"));
        rows.push(fact(name(&format!("{what}, most")), s.max, "s"));
        rows.push(fact(name(&format!("{what}, speed")), gbs(s.median), "GB/s"));
    };
    let raw = slowest(times, |t| t.raw.clone());
    let created = slowest(times, |t| first(&t.pool));
    let durable = slowest(times, |t| second(&t.pool));
    let (files, written) =
        (slowest(times, |t| second(&t.files)), slowest(times, |t| first(&t.files)));
    let dsync = slowest(times, |t| second(&t.dsync));
    some("raw direct writes", &raw);
    some("pool, until durable", &durable);
    some("pool, until the application goes on", &created);
    some("files, until durable", &files);
    some("files, until written to the page cache", &written);
    some("files with O_DSYNC, until durable", &dsync);
    // Pairs of one round: what drifts, drifts for both.
    let pairs = ratios(&raw, &durable);
    let s = spread(&pairs);
    rows.push(fact(name("pool / raw, speed until durable, least of a round"), s.min, "ratio"));
    rows.push(fact(name("pool / raw, speed until durable, most of a round"), s.max, "ratio"));
    let pool_raw = name("pool / raw, speed until durable, median");
    rows.push(match goal {
        Some(goal) => at_least(pool_raw, s.median, "ratio", goal),
        None => fact(pool_raw, s.median, "ratio"),
    });
    let over = |what: &str, slow: &[f64], fast: &[f64]| {
        fact(name(what), spread(&ratios(slow, fast)).median, "ratio")
    };
    rows.push(over("pool over files, speed until durable, median", &files, &durable));
    rows.push(over(
        "pool over files with fsync, creation as the application sees it",
        &files,
        &created,
    ));
    rows.push(over("pool over the page cache alone, creation", &written, &created));
    if !dsync.is_empty() {
        let s = spread(&ratios(&dsync, &durable));
        let what =
            "pool over files where an operation costs (O_DSYNC), speed until durable, median";
        rows.push(at_least(name(what), s.median, "ratio", FILES_GOAL));
        rows.push(over("pool over files with O_DSYNC, creation", &dsync, &created));
    }
    rows
}

/// Inside of the job: what mpiexec would be.
pub(super) fn ranks(args: &AggregateRankArgs) -> Result<Exit, Failed> {
    let me = std::env::current_exe()?;
    let mut children = Vec::new();
    for rank in 0..args.ranks {
        let mut command = Command::new(&me);
        command.args(["bench", "aggregate-rank", "--rank", &rank.to_string()]);
        command.args(["--ranks", &args.ranks.to_string()]);
        command.args(["--copies", &args.copies.to_string()]);
        command.args(["--repeats", &args.repeats.to_string()]);
        command.arg("--work").arg(&args.work);
        if args.dsync {
            command.arg("--dsync");
        }
        children.push(command.spawn().context("a writer cannot be started")?);
    }
    let mut failed = false;
    for mut child in children {
        failed |= !child.wait()?.success();
    }
    Ok(if failed { Exit::Failure } else { Exit::Success })
}
