//! `stanchion bench pool`: what the agent's shared memory costs: asking for it, making it, copying into it cold and
//! warm, and waiting for it.

use super::job::{self, slowest};
use super::{Row, Scratch, fact, report, spread};
use crate::args::{PoolArgs, PoolRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::json;
use stanchion::{Client, FLAG_CHECKPOINT, Level, Mode, Options, Region};
use stanchion_mem::{Extent, Mapping};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Round trips that a median is made of.
const TRIPS: usize = 200;
/// For what is behind the application to end, milliseconds.
const SETTLE_MS: u64 = 120_000;
/// Datasets that a pool has room for which is to be full: those that are kept, and a half.
const FULL_TENTHS: u64 = 25;

/// What one rank measured, seconds.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    /// A question to the agent that it answers from memory.
    ask: Vec<f64>,
    /// The first byte of a stream: memory is lent.
    lend: Vec<f64>,
    /// Ending a dataset of one byte: memory is taken over, and the dataset committed.
    end: Vec<f64>,
    /// A checkpoint for which the pool had nothing yet.
    cold: f64,
    /// Making memory for three datasets.
    grow: f64,
    /// Checkpoints into warm memory.
    warm: Vec<f64>,
}

/// Measures.
pub(super) fn run(args: &PoolArgs) -> Result<Exit, Failed> {
    if args.ranks == 0 || args.mb == 0 || args.repeats < 2 {
        let text = "--ranks and --mb must be at least 1, --repeats at least 2";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let mut rows = memory(args)?;
    let counts = (0..).map(|n| 1 << n).take_while(|n| *n < args.ranks);
    let counts: Vec<u32> = counts.chain([args.ranks]).collect();
    for ranks in counts {
        let times = run_job(args, ranks, false)?;
        rows.extend(job_rows(args, ranks, &times));
    }
    let full = run_job(args, args.ranks, true)?;
    let waits = spread(&slowest(&full, |t| &t.warm)[2..]);
    let name = |what: &str| format!("{} ranks, pool of 2.5 datasets: blocked, {what}", args.ranks);
    rows.push(fact(name("median"), waits.median, "s"));
    rows.push(fact(name("most"), waits.max, "s"));
    let setup = json!({"ranks": args.ranks, "mb": args.mb, "repeats": args.repeats});
    report("pool", (args.json, args.check), setup, &rows)
}

/// One process, no agent: what the memory itself does.
fn memory(args: &PoolArgs) -> anyhow::Result<Vec<Row>> {
    let bytes = usize::try_from(args.mb << 20)?;
    let rate = |s: &[f64]| bytes as f64 / spread(s).median / 1e9;
    let state: Vec<u8> = (0..bytes).map(|n| (n >> 3) as u8).collect();
    let mut plain = vec![1u8; bytes];
    let [mut grow, mut map, mut cold, mut warm, mut memcpy] = [const { Vec::new() }; 5];
    let mut huge = 0u64;
    for _ in 0..args.repeats {
        let extent = Extent::create(bytes as u64)?;
        cold.push(copied(|| extent.mapping().write(0, &state)));
        drop(extent);
        let extent = Extent::create(bytes as u64)?;
        grow.push(timed(|| Ok(extent.mapping().warm(&|| false)?))?);
        let mut second = None;
        map.push(timed(|| {
            let mapping = Mapping::of(extent.as_fd(), bytes as u64)?;
            mapping.warm(&|| false)?;
            second = Some(mapping);
            Ok(())
        })?);
        huge = huge.max(huge_bytes());
        let second = second.context("it was just mapped")?;
        warm.push(copied(|| second.write(0, &state)));
        memcpy.push(copied(|| plain.copy_from_slice(&state)));
    }
    Ok(vec![
        fact("one process: memcpy between warm pages", rate(&memcpy), "GB/s"),
        fact("one process: copy into warm shared memory", rate(&warm), "GB/s"),
        fact("one process: copy into cold shared memory", rate(&cold), "GB/s"),
        fact("one process: making shared memory warm", rate(&grow), "GB/s"),
        fact("one process: mapping warm memory once more", rate(&map), "GB/s"),
        fact("one process: of it in huge pages", huge as f64 / bytes as f64, "ratio"),
    ])
}

/// Shared memory that this process has mapped by huge pages.
fn huge_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("ShmemPmdMapped:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn run_job(args: &PoolArgs, ranks: u32, full: bool) -> Result<Vec<Times>, Failed> {
    let mut scratch = Scratch(Vec::new());
    let dir = scratch.add(&args.disk, "pool").or_exit(Exit::Storage)?;
    let limit = format!("pool_bytes_max={}", (u64::from(ranks) * args.mb * FULL_TENTHS / 10) << 20);
    let mut sets = vec!["flush_every=0", "flush_at_end=0"];
    sets.extend(full.then_some(limit.as_str()));
    let mut command = job::in_job(&dir, &sets)?;
    command.args(["bench", "pool-ranks", "--ranks", &ranks.to_string()]);
    rank_args(&mut command, (args.mb, args.repeats, full), &dir);
    job::finish(command, &dir.join("log"))?;
    Ok(job::times(&dir, ranks)?)
}

fn rank_args(command: &mut Command, (mb, repeats, full): (u64, u32, bool), dir: &Path) {
    job::options(command, &[("--mb", mb), ("--repeats", repeats.into())]);
    command.arg("--dir").arg(dir);
    if full {
        command.arg("--full");
    }
}

fn job_rows(args: &PoolArgs, ranks: u32, times: &[Times]) -> Vec<Row> {
    let name = |what: &str| format!("{ranks} ranks: {what}");
    let most = |f: &dyn Fn(&Times) -> f64| times.iter().map(f).fold(0.0, f64::max);
    let trip = |f: &dyn Fn(&Times) -> &Vec<f64>| {
        let all: Vec<f64> = times.iter().flat_map(|t| f(t).iter().copied()).collect();
        spread(&all).median * 1e6
    };
    let warm = spread(&slowest(times, |t| &t.warm));
    // Three datasets: two are kept, one is written.
    let made = 3.0 * f64::from(ranks) * args.mb as f64 * f64::from(1 << 20);
    vec![
        fact(name("a question to the agent"), trip(&|t| &t.ask), "us"),
        fact(name("memory lent, from the first byte"), trip(&|t| &t.lend), "us"),
        fact(name("memory handed over, dataset committed"), trip(&|t| &t.end), "us"),
        fact(name("making three datasets' memory, mapped"), made / most(&|t| t.grow) / 1e9, "GB/s"),
        fact(name("checkpoint, memory made for it: blocked"), most(&|t| t.cold), "s"),
        fact(name("checkpoint into warm memory: blocked, median"), warm.median, "s"),
        fact(name("checkpoint into warm memory: blocked, most"), warm.max, "s"),
        fact(name("made for it / warm"), most(&|t| t.cold) / warm.median, "ratio"),
    ]
}

/// Inside of the job: what mpiexec would be.
pub(super) fn ranks(args: &PoolRankArgs) -> Result<Exit, Failed> {
    job::wait(job::spawn("pool-rank", args.ranks, |command| {
        rank_args(command, (args.mb, args.repeats, args.full), &args.dir);
    })?)
}

/// One rank of the job.
pub(super) fn rank(args: &PoolRankArgs) -> Result<Exit, Failed> {
    job::leave(&args.dir, args.rank, &measure(args)?)
}

fn timed(f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

fn copied(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn measure(args: &PoolRankArgs) -> anyhow::Result<Times> {
    let bytes = usize::try_from(args.mb << 20)?;
    let state: Vec<u8> = (0..bytes).map(|n| (n >> 3) as u8 ^ args.rank as u8).collect();
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let mut client = Client::connect(&options)?;
    let mut times = Times::default();
    if args.full {
        client.expect(0, bytes as u64)?;
        for _ in 0..args.repeats + 2 {
            // No wait in between: the next one is there before there is room.
            times.warm.push(checkpoint(&mut client, &state)?.1);
        }
        client.finalize()?;
        return Ok(times);
    }
    let (no, took) = checkpoint(&mut client, &state)?;
    times.cold = took;
    client.wait(no, Level::Protected, SETTLE_MS)?;
    client.barrier()?;
    times.grow = timed(|| Ok(client.expect(0, bytes as u64)?))?;
    for _ in 0..args.repeats {
        let (no, took) = checkpoint(&mut client, &state)?;
        times.warm.push(took);
        client.wait(no, Level::Protected, SETTLE_MS)?;
    }
    for _ in 0..TRIPS {
        times.ask.push(timed(|| client.get("scheme").map(drop).map_err(Into::into))?);
    }
    for round in 0..args.repeats {
        let begun = client.begin("", FLAG_CHECKPOINT)?;
        let path = format!("{}/lent.{}.{round}", client.prefix(), args.rank);
        let stream = client.stream_open(&path, Mode::Write)?;
        times.lend.push(timed(|| Ok(client.stream_write(stream, &[1])?))?);
        client.stream_close(stream)?;
        times.end.push(timed(|| Ok(client.complete(true)?))?);
        client.wait(begun.no, Level::Protected, SETTLE_MS)?;
    }
    client.finalize()?;
    Ok(times)
}

fn checkpoint(client: &mut Client, state: &[u8]) -> anyhow::Result<(stanchion::DatasetNo, f64)> {
    client.barrier()?;
    let start = Instant::now();
    let regions = [Region { id: 1, bytes: state }];
    let begun = client.checkpoint("", FLAG_CHECKPOINT, &regions)?;
    Ok((begun.no, start.elapsed().as_secs_f64()))
}
