//! The job that `bench overhead` measures: ranks that compute, in step with each other.
//!
//! No MPI: a rank says "I am here" by a byte on its standard output and goes on when a byte comes on its standard
//! input. Waiting in a read gives the core away, as an MPI does that yields.

use crate::args::{OverheadRankArgs, Way};
use crate::bench::job as common;
use crate::exit::{Exit, Failed};
use anyhow::{Context, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use stanchion::{Client, Code, FLAG_CHECKPOINT, Level, Options, Region};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

/// A plan has a character for each window: with a checkpoint where it begins, or without one.
pub(super) const CHECKPOINT: char = 'x';
pub(super) const NONE: char = '-';
/// For what is behind the application to end when the job has ended, milliseconds.
const SETTLE_MS: u64 = 300_000;

/// What one rank measured, seconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// From the first step to the last.
    pub total: f64,
    /// Each window, from the end of the one before.
    pub windows: Vec<f64>,
    /// Before the first step: memory made warm and mapped.
    pub protect: f64,
    /// Each checkpoint.
    pub blocked: Vec<f64>,
    /// From the beginning of each checkpoint until it was safe, in their order; rank 0 only, to within a step.
    pub safe: Vec<f64>,
}

/// What mpiexec would be: starts the ranks on the first `cores` cores (0: on all) and lets them wait for each other.
pub(in crate::bench) fn ranks(args: &OverheadRankArgs) -> Result<Exit, Failed> {
    if args.cores > 0 {
        pin(args.cores)?;
    }
    let mut children = common::spawn("overhead-rank", args.ranks, |command| {
        command.args(["--way", args.way.word(), "--plan", &args.plan]);
        common::options(command, &[("--mb", args.mb), ("--steps", args.steps)]);
        command.arg("--dir").arg(&args.dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
    })?;
    let met = meet(&mut children);
    let ended = common::wait(children);
    met?;
    ended
}

fn pin(cores: usize) -> anyhow::Result<()> {
    let may = sched_getaffinity(None)?;
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|c| may.is_set(*c)).take(cores).for_each(|c| set.set(c));
    sched_setaffinity(None, &set).context("the ranks cannot be held to some cores")
}

/// One barrier after the other until the ranks end.
fn meet(children: &mut [Child]) -> anyhow::Result<()> {
    let mut ends: Vec<(ChildStdout, ChildStdin)> = Vec::new();
    for child in children {
        let ends_of = child.stdout.take().zip(child.stdin.take());
        ends.push(ends_of.context("a rank has no pipes")?);
    }
    loop {
        let mut here = 0;
        for (from, _) in &mut ends {
            here += from.read(&mut [0])?;
        }
        if here == 0 {
            return Ok(());
        }
        if here < ends.len() {
            // Closing the pipes ends those that still wait.
            bail!("some ranks have ended before the others");
        }
        for (_, to) in &mut ends {
            to.write_all(&[0])?;
        }
    }
}

/// Returns when all ranks are here.
fn barrier() -> anyhow::Result<()> {
    std::io::stdout().write_all(&[0])?;
    std::io::stdout().flush()?;
    std::io::stdin().read_exact(&mut [0]).context("another rank has failed")
}

/// One rank.
pub(in crate::bench) fn rank(args: &OverheadRankArgs) -> Result<Exit, Failed> {
    common::leave(&args.dir, args.rank, &compute(args)?)
}

/// A step of a stencil: every value becomes the mean of it and its neighbours.
fn sweep(state: &mut [f64]) {
    let mut left = state[0];
    for i in 1..state.len() - 1 {
        let here = state[i];
        state[i] = 0.25 * (left + 2.0 * here + state[i + 1]);
        left = here;
    }
}

fn compute(args: &OverheadRankArgs) -> anyhow::Result<Times> {
    let count = usize::try_from(args.mb << 20)? / size_of::<f64>();
    let mut state: Vec<f64> = (0..count).map(|i| f64::from(i as u32 ^ args.rank)).collect();
    let mut times = Times::default();
    let mut saver = Saver::new(args, &mut times)?;
    barrier()?;
    let start = Instant::now();
    for window in args.plan.chars() {
        let began = Instant::now();
        if window == CHECKPOINT {
            saver.save(&state)?;
            times.blocked.push(began.elapsed().as_secs_f64());
        }
        for _ in 0..args.steps {
            sweep(&mut state);
            barrier()?;
            saver.look(0)?;
        }
        times.windows.push(began.elapsed().as_secs_f64());
    }
    times.total = start.elapsed().as_secs_f64();
    times.safe = saver.end()?;
    // The compiler must not find out that nobody wants the result.
    std::hint::black_box(&state);
    Ok(times)
}

/// How a rank's state is made safe.
struct Saver {
    client: Option<Client>,
    file: Option<File>,
    way: Way,
    /// Begun and not known to be safe; looked after by rank 0.
    pending: Vec<(stanchion::DatasetNo, Instant)>,
    safe: Vec<f64>,
    looks: bool,
}

impl Saver {
    fn new(args: &OverheadRankArgs, times: &mut Times) -> anyhow::Result<Saver> {
        let mut saver = Saver {
            client: None,
            file: None,
            way: args.way,
            pending: Vec::new(),
            safe: Vec::new(),
            looks: args.rank == 0,
        };
        match args.way {
            Way::None => {}
            Way::Files => {
                let path = args.dir.join(format!("state.{}", args.rank));
                let mut options = OpenOptions::new();
                let file = options.write(true).create(true).truncate(false).open(path)?;
                saver.file = Some(file);
            }
            Way::Pool | Way::Flush | Way::Cow | Way::Incremental => {
                let mut options = Options::from_environment();
                options.identity = Some((args.rank, args.ranks));
                let mut client = Client::connect(&options)?;
                barrier()?;
                let began = Instant::now();
                client.expect(0, args.mb << 20)?;
                times.protect = began.elapsed().as_secs_f64();
                saver.client = Some(client);
            }
        }
        Ok(saver)
    }

    fn save(&mut self, state: &[f64]) -> anyhow::Result<()> {
        use zerocopy::IntoBytes;
        let bytes = state.as_bytes();
        let began = Instant::now();
        if let Some(file) = &self.file {
            file.write_all_at(bytes, 0)?;
            file.sync_all()?;
            self.safe.push(began.elapsed().as_secs_f64());
        }
        if let Some(client) = &mut self.client {
            let regions = [Region { id: 1, bytes }];
            let begun = match self.way {
                Way::Incremental => client.checkpoint_incremental("", FLAG_CHECKPOINT, &regions)?,
                Way::Cow => client.checkpoint_cow("", FLAG_CHECKPOINT, &regions)?,
                _ => client.checkpoint("", FLAG_CHECKPOINT, &regions)?,
            };
            if self.looks {
                self.pending.push((begun.no, began));
            }
        }
        Ok(())
    }

    /// What has become safe by now, or within `wait_ms`.
    fn look(&mut self, wait_ms: u64) -> anyhow::Result<()> {
        let level = if self.way == Way::Flush { Level::Persistent } else { Level::Protected };
        let Some(client) = &mut self.client else { return Ok(()) };
        while let Some((no, began)) = self.pending.first().copied() {
            match client.wait(no, level, wait_ms) {
                Ok(()) => {}
                Err(e) if e.code() == Code::Timeout && wait_ms == 0 => return Ok(()),
                Err(e) => return Err(e.into()),
            }
            self.pending.remove(0);
            self.safe.push(began.elapsed().as_secs_f64());
        }
        Ok(())
    }

    fn end(mut self) -> anyhow::Result<Vec<f64>> {
        self.look(SETTLE_MS)?;
        if let Some(client) = &mut self.client {
            client.finalize()?;
        }
        Ok(self.safe)
    }
}
