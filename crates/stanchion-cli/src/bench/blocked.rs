//! `stanchion bench blocked`: how long a checkpoint of memory holds a program up, beside what the same copy costs.
//!
//! Everything is measured in one job: its ranks take turns between a plain copy into warm shared memory, a
//! checkpoint, and writes to files, all ranks at once. What counts is the slowest rank's time.

use super::job::{self, slowest};
use super::{Row, Scratch, Sense, fact, report, spread};
use crate::args::{BlockedArgs, BlockedRankArgs};
use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::json;
use stanchion::{Client, CopiedBy, FLAG_CHECKPOINT, Level, Options, Region};
use stanchion_mem::Extent;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// A checkpoint from the pool over a parallel copy into warm shared memory, at most.
const POOL_GOAL: f64 = 1.11;
/// The first checkpoint over the later ones, at most.
const FIRST_GOAL: f64 = 1.2;
/// An incremental checkpoint with a tenth of the pages changed over one of all, at most; and what it stores.
const INCREMENTAL_GOAL: f64 = 0.25;
const STORED_GOAL: f64 = 0.12;
/// A copy-on-write checkpoint over one from the pool, at most.
const COW_GOAL: f64 = 0.15;
/// Of so many pages a program rewrites one, or each, when it goes on after such a checkpoint.
const REWRITTEN: [(usize, &str); 2] = [(10, "10 %"), (1, "100 %")];
/// Of so many pages one changes between two incremental checkpoints.
const CHANGED_IN: u64 = 10;
/// Values of the setting `cow` that go on behind the program.
const WAYS: [&str; 2] = ["userfaultfd", "fork"];
/// For the background's work to end between two measurements, milliseconds.
const SETTLE_MS: u64 = 120_000;

/// What one rank measured; seconds, one entry a round.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    memcpy: Vec<f64>,
    pool: Vec<f64>,
    tmpfs: Vec<f64>,
    disk: Vec<f64>,
    /// Reserving memory before the first checkpoint.
    protect: f64,
    /// With a tenth of the pages changed at random since the one before.
    incremental: Vec<f64>,
    /// What these copied, of their size.
    stored: Vec<f64>,
    /// The same with copy-on-write, taken in turns with full ones and such from the pool.
    both: BothTimes,
    /// Beside copy-on-write: checkpoints from the pool, and for each of [`REWRITTEN`] rewriting without a checkpoint
    /// under way.
    cow_pool: Vec<f64>,
    alone: [Vec<f64>; 2],
    cows: Vec<CowTimes>,
}

/// Copy-on-write in one of [`WAYS`].
#[derive(Debug, Default, Serialize, Deserialize)]
struct CowTimes {
    /// By what it was.
    by: String,
    blocked: Vec<f64>,
    /// For each of [`REWRITTEN`]: rewriting right behind a checkpoint, whole pages.
    behind: [Vec<f64>; 2],
}

/// Copy-on-write and incremental.
#[derive(Debug, Default, Serialize, Deserialize)]
struct BothTimes {
    pool: Vec<f64>,
    increments: Vec<f64>,
    full: Vec<f64>,
    /// What the increments stored, of their size.
    stored: Vec<f64>,
    /// By what full ones were copied.
    by: String,
}

/// Measures.
pub(super) fn run(args: &BlockedArgs) -> Result<Exit, Failed> {
    if args.ranks == 0 || args.mb == 0 || args.repeats < 2 {
        let text = "--ranks and --mb must be at least 1, --repeats at least 2";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let mut scratch = Scratch(Vec::new());
    let disk = scratch.add(&args.disk, "blocked").or_exit(Exit::Storage)?;
    let tmpfs = scratch.add(Path::new("/dev/shm"), "blocked").or_exit(Exit::Storage)?;
    let times = run_job(args, (&disk, &tmpfs), Part::All, &[])?;
    let hashed = run_job(args, (&disk, &tmpfs), Part::Incremental, &["incremental_tracking=hash"])?;
    let small = run_job(args, (&disk, &tmpfs), Part::Cow, &["region_huge_pages=never"])?;
    let setup = json!({"ranks": args.ranks, "mb": args.mb, "repeats": args.repeats});
    let mut rows = rows(args, &times);
    let pool = spread(&slowest(&times, |t| &t.pool)[1..]).median;
    for n in 0..times.iter().map(|t| t.cows.len()).min().unwrap_or(0) {
        rows.extend(cow(&times, n, ""));
    }
    for n in 0..small.iter().map(|t| t.cows.len()).min().unwrap_or(0) {
        rows.extend(cow(&small, n, ", region_huge_pages=never"));
    }
    rows.extend(incremental("kernel", &times, pool, true));
    rows.extend(incremental("hashes", &hashed, pool, false));
    rows.extend(both(&times));
    report("blocked", (args.json, args.check), setup, &rows)
}

/// What a job measures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    /// Incremental checkpoints alone.
    Incremental,
    /// Copy-on-write alone.
    Cow,
}

/// One job.
fn run_job(
    args: &BlockedArgs,
    (disk, tmpfs): (&Path, &Path),
    part: Part,
    settings: &[&str],
) -> Result<Vec<Times>, Failed> {
    let mut sets = vec!["flush_every=0", "flush_at_end=0"];
    sets.extend(settings);
    let mut command = job::in_job(disk, &sets)?;
    command.args(["bench", "blocked-ranks", "--ranks", &args.ranks.to_string()]);
    let part = match part {
        Part::All => &[][..],
        Part::Incremental => &["--incremental-only"],
        Part::Cow => &["--cow-only"],
    };
    rank_args(&mut command, (args.mb, args.repeats), (disk, tmpfs), part);
    job::finish(command, &disk.join("log"))?;
    Ok(job::times(disk, args.ranks)?)
}

fn rank_args(
    command: &mut Command,
    (mb, repeats): (u64, u32),
    (disk, tmpfs): (&Path, &Path),
    part: &[&str],
) {
    job::options(command, &[("--mb", mb), ("--repeats", repeats.into())]);
    command.arg("--disk").arg(disk).arg("--tmpfs").arg(tmpfs).args(part);
}

fn incremental(how: &str, times: &[Times], pool: f64, goals: bool) -> Vec<Row> {
    let s = spread(&slowest(times, |t| &t.incremental));
    // Where there are many rounds some are full: what they store is theirs, and not what an increment stores.
    let stored: Vec<f64> = times.iter().flat_map(|t| &t.stored).copied().collect();
    let full = stored.iter().filter(|s| **s >= 1.0).count() as f64 / stored.len().max(1) as f64;
    let stored = spread(&stored).median;
    let name = |what: &str| format!("incremental, 10 % changed, by {how}: {what}");
    let goal = |goal: f64| goals.then_some(goal);
    vec![
        fact(name("blocked, median"), s.median, "s"),
        fact(name("blocked, least"), s.min, "s"),
        fact(name("blocked, most"), s.max, "s"),
        Row {
            name: name("blocked / pool"),
            value: s.median / pool,
            unit: "ratio",
            goal: goal(INCREMENTAL_GOAL),
            sense: Sense::AtMost,
        },
        Row {
            name: name("stored, median"),
            value: stored,
            unit: "ratio",
            goal: goal(STORED_GOAL),
            sense: Sense::AtMost,
        },
        fact(name("full ones among them"), full, "ratio"),
    ]
}

/// With both flags. Increments are copied at once: the goal is that of copy-on-write, for no program knows which it gets.
fn both(times: &[Times]) -> Vec<Row> {
    // Taken in turns: what drifts, drifts for all.
    let pool = spread(&slowest(times, |t| &t.both.pool)).median;
    let full = format!("full ones, by {}", times[0].both.by);
    let kinds: [(&str, Vec<f64>, Option<f64>); 2] = [
        ("10 % changed", slowest(times, |t| &t.both.increments), Some(COW_GOAL)),
        (&full, slowest(times, |t| &t.both.full), None),
    ];
    let mut rows = Vec::new();
    for (kind, seconds, goal) in kinds {
        if seconds.is_empty() {
            continue;
        }
        let s = spread(&seconds);
        let name = |what: &str| format!("copy-on-write and incremental, {kind}: {what}");
        rows.push(fact(name("blocked, median"), s.median, "s"));
        rows.push(fact(name("blocked, least"), s.min, "s"));
        rows.push(fact(name("blocked, most"), s.max, "s"));
        let (value, sense) = (s.median / pool, Sense::AtMost);
        rows.push(Row { name: name("blocked / pool"), value, unit: "ratio", goal, sense });
    }
    let stored: Vec<f64> = times.iter().flat_map(|t| &t.both.stored).copied().collect();
    if !stored.is_empty() {
        let name = "copy-on-write and incremental, 10 % changed: stored, median";
        rows.push(fact(name, spread(&stored).median, "ratio"));
    }
    rows
}

fn cow(times: &[Times], way: usize, pages: &str) -> Vec<Row> {
    let by = &times[0].cows[way].by;
    let all = slowest(times, |t| &t.cows[way].blocked);
    let s = spread(&all);
    let pool = spread(&slowest(times, |t| &t.cow_pool)).median;
    let name = |what: &str| format!("copy-on-write by {by}{pages}: {what}");
    let mut rows = vec![
        fact(name("blocked, first"), all[0], "s"),
        fact(name("blocked, median"), s.median, "s"),
        fact(name("blocked, least"), s.min, "s"),
        fact(name("blocked, most"), s.max, "s"),
        Row {
            name: name("blocked / pool"),
            value: s.median / pool,
            unit: "ratio",
            goal: Some(COW_GOAL),
            sense: Sense::AtMost,
        },
    ];
    for (n, (_, share)) in REWRITTEN.iter().enumerate() {
        let alone = spread(&slowest(times, |t| &t.alone[n])).median;
        let behind = spread(&slowest(times, |t| &t.cows[way].behind[n])).median;
        let name = |what: &str| name(&format!("rewriting {share} at once: {what}"));
        rows.push(fact(name("alone"), alone, "s"));
        rows.push(fact(name("behind the checkpoint"), behind, "s"));
        rows.push(fact(name("lost"), behind - alone, "s"));
    }
    rows
}

fn rows(args: &BlockedArgs, times: &[Times]) -> Vec<Row> {
    let bytes = f64::from(args.ranks) * args.mb as f64 * f64::from(1 << 20);
    let (memcpy, pool) = (slowest(times, |t| &t.memcpy), slowest(times, |t| &t.pool));
    let mut rows = vec![fact("size of a checkpoint", bytes / 1e9, "GB")];
    let protect = times.iter().map(|t| t.protect).fold(0.0, f64::max);
    rows.push(fact("stn_protect, once: memory made warm and mapped", protect, "s"));
    let named: [(&str, Vec<f64>); 4] = [
        ("copy into warm shared memory", memcpy.clone()),
        ("checkpoint, pool", pool[1..].to_vec()),
        ("write to a fresh file on tmpfs", slowest(times, |t| &t.tmpfs)),
        ("write to a file on disk, fsync", slowest(times, |t| &t.disk)),
    ];
    for (name, values) in &named {
        let s = spread(values);
        rows.push(fact(format!("{name}: blocked, median"), s.median, "s"));
        rows.push(fact(format!("{name}: blocked, least"), s.min, "s"));
        rows.push(fact(format!("{name}: blocked, most"), s.max, "s"));
    }
    rows.push(fact("checkpoint, pool: blocked, first", pool[0], "s"));
    // Pairs of one round: what drifts, drifts for both.
    let ratios: Vec<f64> = pool[1..].iter().zip(&memcpy[1..]).map(|(p, m)| p / m).collect();
    let s = spread(&ratios);
    rows.push(fact("pool / copy, least of a round", s.min, "ratio"));
    rows.push(fact("pool / copy, most of a round", s.max, "ratio"));
    rows.push(Row {
        name: "pool / copy, median".into(),
        value: s.median,
        unit: "ratio",
        goal: Some(POOL_GOAL),
        sense: Sense::AtMost,
    });
    rows.push(Row {
        name: "first checkpoint / later ones".into(),
        value: pool[0] / spread(&pool[1..]).median,
        unit: "ratio",
        goal: Some(FIRST_GOAL),
        sense: Sense::AtMost,
    });
    rows
}

/// Inside of the job: what mpiexec would be.
pub(super) fn ranks(args: &BlockedRankArgs) -> Result<Exit, Failed> {
    let part = match (args.incremental_only, args.cow_only) {
        (true, _) => &["--incremental-only"][..],
        (_, true) => &["--cow-only"],
        _ => &[],
    };
    job::wait(job::spawn("blocked-rank", args.ranks, |command| {
        rank_args(command, (args.mb, args.repeats), (&args.disk, &args.tmpfs), part);
    })?)
}

/// One rank of the job.
pub(super) fn rank(args: &BlockedRankArgs) -> Result<Exit, Failed> {
    job::leave(&args.disk, args.rank, &measure(args)?)
}

fn timed(f: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

fn measure(args: &BlockedRankArgs) -> anyhow::Result<Times> {
    let bytes = usize::try_from(args.mb << 20)?;
    let mut state = vec![0u8; bytes];
    for (n, b) in state.iter_mut().enumerate() {
        *b = (n >> 3) as u8 ^ args.rank as u8;
    }
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let mut client = Client::connect(&options)?;
    let mut times = Times::default();
    let warm = Extent::create(bytes as u64)?;
    warm.mapping().warm(&|| false)?;
    warm.mapping().write(0, &state);
    client.barrier()?;
    times.protect = timed(|| {
        client.gather(&state);
        Ok(client.expect(0, bytes as u64)?)
    })?;
    if !args.incremental_only && !args.cow_only {
        rounds(args, &mut client, &mut times, &mut state, &warm)?;
    }
    if !args.incremental_only {
        cows(args, &mut client, &mut times, &mut state)?;
    }
    if !args.cow_only {
        increments(args, &mut client, &mut times, &mut state)?;
    }
    if !args.cow_only && !args.incremental_only {
        cow_increments(args, &mut client, &mut times, &mut state)?;
    }
    client.finalize()?;
    Ok(times)
}

/// Checkpoints of a state of which a tenth of the pages changes in between; the first is full and does not count.
fn increments(
    args: &BlockedRankArgs,
    client: &mut Client,
    times: &mut Times,
    state: &mut [u8],
) -> anyhow::Result<()> {
    let mut dice = 0x9e37_79b9_7f4a_7c15u64 ^ u64::from(args.rank);
    for round in 0..args.repeats {
        change(state, &mut dice);
        client.barrier()?;
        let mut begun = None;
        let took = timed(|| {
            let regions = [Region { id: 1, bytes: state }];
            begun = Some(client.checkpoint_incremental("", FLAG_CHECKPOINT, &regions)?);
            Ok(())
        })?;
        if round > 0 {
            let stored = client.stored();
            times.incremental.push(took);
            times.stored.push(stored.copied as f64 / stored.bytes as f64);
        }
        client.wait(begun.context("it was just begun")?.no, Level::Protected, SETTLE_MS)?;
    }
    Ok(())
}

/// One of [`CHANGED_IN`] pages, at random.
fn change(state: &mut [u8], dice: &mut u64) {
    for page in state.chunks_mut(4096) {
        *dice ^= *dice << 13;
        *dice ^= *dice >> 7;
        *dice ^= *dice << 17;
        if dice.is_multiple_of(CHANGED_IN) {
            page[0] = page[0].wrapping_add(1);
        }
    }
}

/// With copy-on-write too, in turns: all pages changed, so that it is full, and a tenth of them. And from the pool, to
/// compare with.
fn cow_increments(
    args: &BlockedRankArgs,
    client: &mut Client,
    times: &mut Times,
    state: &mut [u8],
) -> anyhow::Result<()> {
    let mut dice = 0x2545_f491_4f6c_dd1du64 ^ u64::from(args.rank);
    for n in 0..3 * args.repeats {
        match n % 3 {
            0 => state.iter_mut().step_by(4096).for_each(|b| *b = b.wrapping_add(1)),
            _ => change(state, &mut dice),
        }
        let plain = n % 3 == 2;
        client.barrier()?;
        let mut begun = None;
        let took = timed(|| {
            let regions = [Region { id: 1, bytes: state }];
            begun = Some(match plain {
                true => client.checkpoint("", FLAG_CHECKPOINT, &regions)?,
                false => client.checkpoint_cow_incremental("", FLAG_CHECKPOINT, &regions)?,
            });
            Ok(())
        })?;
        let (both, stored) = (&mut times.both, client.stored());
        // What it was, not what it was meant to be.
        if plain {
            both.pool.push(took);
        } else if stored.copied == stored.bytes {
            both.full.push(took);
            both.by = client.copied_by().1;
            both.by.truncate(both.by.find(':').unwrap_or(both.by.len()));
        } else {
            both.increments.push(took);
            both.stored.push(stored.copied as f64 / stored.bytes as f64);
        }
        client.wait(begun.context("it was just begun")?.no, Level::Protected, SETTLE_MS)?;
    }
    Ok(())
}

/// Whole pages, one of so many.
fn rewrite(state: &mut [u8], one_in: usize) {
    for page in state.chunks_mut(4096).step_by(one_in) {
        let next = page[0].wrapping_add(1);
        page.fill(next);
    }
}

/// Checkpoints that are copied behind, in each way that this machine has, and what the program loses when it goes on at
/// once.
fn cows(
    args: &BlockedRankArgs,
    client: &mut Client,
    times: &mut Times,
    state: &mut [u8],
) -> anyhow::Result<()> {
    // As an ordinary user has userfaultfd: nobody but this program writes to it.
    client.declare_no_io(1, true);
    // One after the other: what a fork leaves shared the kernel splits into small pages.
    for way in WAYS {
        client.set("cow", way)?;
        let mut cow = CowTimes::default();
        let by = cow_once(client, &mut CowTimes::default(), state, 0)?;
        if by == CopiedBy::AtOnce {
            continue;
        }
        cow.by = client.copied_by().1;
        // Why it was not by something else is known here.
        cow.by.truncate(cow.by.find(':').unwrap_or(cow.by.len()));
        for _ in 0..args.repeats {
            for n in 0..REWRITTEN.len() {
                beside(client, times, state, n)?;
                cow_once(client, &mut cow, state, n)?;
            }
        }
        times.cows.push(cow);
    }
    Ok(client.set("cow", "")?)
}

/// What to compare with.
fn beside(
    client: &mut Client,
    times: &mut Times,
    state: &mut [u8],
    n: usize,
) -> anyhow::Result<()> {
    client.barrier()?;
    times.alone[n].push(timed(|| {
        rewrite(state, REWRITTEN[n].0);
        Ok(())
    })?);
    client.barrier()?;
    let mut begun = None;
    times.cow_pool.push(timed(|| {
        let regions = [Region { id: 1, bytes: state }];
        begun = Some(client.checkpoint("", FLAG_CHECKPOINT, &regions)?);
        Ok(())
    })?);
    let no = begun.context("it was just begun")?.no;
    Ok(client.wait(no, Level::Protected, SETTLE_MS)?)
}

fn cow_once(
    client: &mut Client,
    times: &mut CowTimes,
    state: &mut [u8],
    n: usize,
) -> anyhow::Result<CopiedBy> {
    client.barrier()?;
    let mut begun = None;
    times.blocked.push(timed(|| {
        let regions = [Region { id: 1, bytes: state }];
        begun = Some(client.checkpoint_cow("", FLAG_CHECKPOINT, &regions)?);
        Ok(())
    })?);
    // Who is back first must not take cores from who is not, as it does not in the other modes either.
    client.barrier()?;
    times.behind[n].push(timed(|| {
        rewrite(state, REWRITTEN[n].0);
        Ok(())
    })?);
    let no = begun.context("it was just begun")?.no;
    client.wait(no, Level::Protected, SETTLE_MS)?;
    Ok(client.copied_by().0)
}

fn rounds(
    args: &BlockedRankArgs,
    client: &mut Client,
    times: &mut Times,
    state: &mut [u8],
    warm: &Extent,
) -> anyhow::Result<()> {
    for round in 0..args.repeats {
        // What a program does between two checkpoints.
        state.iter_mut().step_by(4096).for_each(|b| *b = b.wrapping_add(1));
        if round % 2 == 0 {
            copy(client, times, state, warm)?;
        }
        client.barrier()?;
        let mut begun = None;
        times.pool.push(timed(|| {
            let regions = [Region { id: 1, bytes: state }];
            begun = Some(client.checkpoint("", FLAG_CHECKPOINT, &regions)?);
            Ok(())
        })?);
        let begun = begun.context("it was just begun")?;
        // Digests and parity are behind the application; they must not be beside the next measurement.
        client.wait(begun.no, Level::Protected, SETTLE_MS)?;
        if round % 2 == 1 {
            copy(client, times, state, warm)?;
        }
        if round < args.repeats.min(3) {
            files(args, client, times, state)?;
        }
    }
    Ok(())
}

/// What nothing can be faster than.
fn copy(client: &mut Client, times: &mut Times, state: &[u8], warm: &Extent) -> anyhow::Result<()> {
    client.barrier()?;
    times.memcpy.push(timed(|| {
        warm.mapping().write(0, state);
        Ok(())
    })?);
    Ok(())
}

fn files(
    args: &BlockedRankArgs,
    client: &mut Client,
    times: &mut Times,
    state: &[u8],
) -> anyhow::Result<()> {
    let name = format!("rank.{}", args.rank);
    let (fresh, slow) = (args.tmpfs.join(&name), args.disk.join(&name));
    client.barrier()?;
    times.tmpfs.push(timed(|| Ok(File::create(&fresh)?.write_all(state)?))?);
    std::fs::remove_file(&fresh)?;
    client.barrier()?;
    times.disk.push(timed(|| {
        let mut file = File::create(&slow)?;
        file.write_all(state)?;
        Ok(file.sync_all()?)
    })?);
    std::fs::remove_file(&slow)?;
    client.barrier()?;
    Ok(())
}
