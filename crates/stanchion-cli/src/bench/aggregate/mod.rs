//! `stanchion bench aggregate`: checkpoints of many processes that write in small and large pieces, until they are
//! durable: a file each, and through the pool, beside what the device can do at all.
//!
//! All is measured in one job whose ranks take turns between the ways, all ranks at once. What counts is the slowest
//! rank's time.

pub(in crate::bench) mod device;
mod rank;
mod stream;

use super::job;
use super::{Row, Scratch, at_least, fact, report, spread};
use crate::args::{AggregateArgs, AggregateRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use device::Held;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// What one rank measured, an entry a round, seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    files: Ends,
    /// The same with every call durable when it returns.
    dsync: Ends,
    pool: Ends,
    raw: Vec<f64>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Ends {
    /// Until the calls had returned; of the pool: until the checkpoint was complete.
    returned: Vec<f64>,
    /// Until all was durable.
    durable: Vec<f64>,
}

impl Ends {
    fn push(&mut self, returned: f64, durable: f64) {
        self.returned.push(returned);
        self.durable.push(durable);
    }
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
            let times = run_job(&setup, &work, !args.no_dsync)?;
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
                    let times = run_job(&setup, held.dir(), false)?;
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
fn run_job(setup: &Setup<'_>, work: &Path, dsync: bool) -> Result<Vec<Times>, Failed> {
    let args = setup.args;
    let bytes = serde_json::to_vec(&setup.streams).context("streams as JSON")?;
    std::fs::write(streams_file(work), bytes)?;
    let dirs = ["cache", "prefix"].map(|name| work.join(name));
    dirs.iter().try_for_each(std::fs::create_dir)?;
    let cache = format!("cache_dir={}", dirs[0].display());
    let mut sets = vec![cache.as_str(), "scheme=SINGLE", "cache_store=segments", "cache_durable=1"];
    sets.extend(["cache_datasets=1", "flush_every=0", "flush_at_end=0"]);
    sets.extend(args.set.iter().map(String::as_str));
    let mut command = job::in_job(&dirs[1], &sets)?;
    command.args(["bench", "aggregate-ranks", "--ranks", &args.writers.to_string()]);
    rank_args(&mut command, (setup.copies, args.repeats, dsync), work);
    job::finish(command, &work.join("log"))?;
    Ok(job::times(work, args.writers)?)
}

fn rank_args(command: &mut Command, (copies, repeats, dsync): (u64, u32, bool), work: &Path) {
    job::options(command, &[("--copies", copies), ("--repeats", repeats.into())]);
    command.arg("--work").arg(work);
    if dsync {
        command.arg("--dsync");
    }
}

fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter().zip(under).map(|(a, b)| a / b).collect()
}

fn table(setup: &Setup<'_>, device: &str, times: &[Times], goal: Option<f64>) -> Vec<Row> {
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
    let raw = job::slowest(times, |t| &t.raw);
    let created = job::slowest(times, |t| &t.pool.returned);
    let durable = job::slowest(times, |t| &t.pool.durable);
    let files = job::slowest(times, |t| &t.files.durable);
    let written = job::slowest(times, |t| &t.files.returned);
    let dsync = job::slowest(times, |t| &t.dsync.durable);
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
    job::wait(job::spawn("aggregate-rank", args.ranks, |command| {
        rank_args(command, (args.copies, args.repeats, args.dsync), &args.work);
    })?)
}
