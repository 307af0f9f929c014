//! A rank of the job: bare writes, then a checkpoint; ended with its node, or by the runner.

use super::NODES;
use crate::args::RebuildRankArgs;
use crate::bench::job;
use crate::exit::{Exit, Failed};
use anyhow::Context;
use stanchion::{Client, FLAG_CHECKPOINT, Options, Region, RegionMut};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bare writes of a launch; the fastest counts.
const BARE: usize = 2;

fn left(dir: &Path, launch: u32, rank: u32) -> PathBuf {
    dir.join(format!("bare.{launch}.{rank}"))
}

/// The bare writes of a launch: the slowest rank of the faster time, seconds.
pub(super) fn bare(dir: &Path, launch: u32) -> anyhow::Result<f64> {
    let mut slowest = [0.0f64; BARE];
    for rank in 0..NODES {
        let bytes = std::fs::read(left(dir, launch, rank)).context("a rank left no times")?;
        let times: [f64; BARE] = serde_json::from_slice(&bytes)?;
        slowest.iter_mut().zip(times).for_each(|(s, t)| *s = s.max(t));
    }
    Ok(slowest.into_iter().fold(f64::INFINITY, f64::min))
}

/// Inside of the job: what mpiexec would be.
pub(in crate::bench) fn ranks(args: &RebuildRankArgs) -> Result<Exit, Failed> {
    let children = job::spawn("rebuild-rank", args.ranks, |command| {
        job::options(command, &[("--mb", args.mb)]);
        command.arg("--dir").arg(&args.dir).arg("--cache").arg(&args.cache);
        command.args(args.files.then_some("--files"));
    })?;
    job::wait(children)
}

/// One rank of the job.
pub(in crate::bench) fn rank(args: &RebuildRankArgs) -> Result<Exit, Failed> {
    let bytes = usize::try_from(args.mb << 20).context("--mb")?;
    let mut state = vec![0u8; bytes];
    for (n, b) in state.iter_mut().enumerate() {
        *b = (n >> 3) as u8 ^ args.rank as u8;
    }
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let mut client = Client::connect(&options)?;
    let mut launch = 0u32.to_le_bytes();
    if client.have_restart()?.is_some() {
        read_back(&mut client, args.files, &mut launch, &mut state)?;
    }
    let now = u32::from_le_bytes(launch);
    let mut times = [0.0; BARE];
    for time in &mut times {
        let path = args.cache.join(format!("bare.{}", args.rank));
        client.barrier()?;
        let start = Instant::now();
        File::create(&path)?.write_all(&state)?;
        *time = start.elapsed().as_secs_f64();
        client.barrier()?;
        std::fs::remove_file(&path)?;
    }
    std::fs::write(left(&args.dir, now, args.rank), serde_json::to_vec(&times).context("times")?)?;
    launch = (now + 1).to_le_bytes();
    let name = format!("launch.{now}");
    if args.files {
        client.begin(&name, FLAG_CHECKPOINT)?;
        let path = client.route(&format!("state.{}", args.rank))?;
        let mut file = File::create(path)?;
        file.write_all(&launch)?;
        file.write_all(&state)?;
        client.complete(true)?;
    } else {
        let regions = [Region { id: 0, bytes: &launch }, Region { id: 1, bytes: &state }];
        client.checkpoint(&name, FLAG_CHECKPOINT, &regions)?;
    }
    // The next loss ends it.
    loop {
        std::thread::park();
    }
}

fn read_back(
    client: &mut Client,
    files: bool,
    launch: &mut [u8],
    state: &mut [u8],
) -> anyhow::Result<()> {
    if !files {
        let mut regions = [RegionMut { id: 0, bytes: launch }, RegionMut { id: 1, bytes: state }];
        client.restore(&mut regions)?;
        return Ok(());
    }
    client.start_restart()?;
    let rank = client.identity().rank;
    let path = client.route(&format!("state.{rank}"))?;
    let mut file = File::open(path)?;
    std::io::Read::read_exact(&mut file, launch)?;
    std::io::Read::read_exact(&mut file, state)?;
    client.complete_restart(true)?;
    Ok(())
}
