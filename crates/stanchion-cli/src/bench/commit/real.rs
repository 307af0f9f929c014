//! The job of real agents, whose ranks write nothing: what is left of a checkpoint is the agreement.

use crate::args::{CommitArgs, CommitRankArgs};
use crate::bench::job;
use crate::exit::{Exit, Failed};
use anyhow::bail;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use stanchion::{Client, FLAG_CHECKPOINT, Level, Options};
use std::path::Path;

/// Checkpoints that do not count.
const FIRST: usize = 2;
/// For what is behind the application to end, milliseconds.
const SETTLE_MS: u64 = 120_000;

/// What one rank saw, nanoseconds of the clock that all processes of a machine share.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    /// Its calls of complete.
    asked: Vec<u64>,
    /// Their returns.
    answered: Vec<u64>,
}

fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Each commit of a job of `nodes` agents and as many ranks, from the last rank's call to the last rank's return,
/// milliseconds.
pub(super) fn commits(args: &CommitArgs, nodes: u32, dir: &Path) -> Result<Vec<f64>, Failed> {
    let dir = dir.join(nodes.to_string());
    std::fs::create_dir_all(&dir)?;
    let mut command = job::in_job_of(nodes, &dir, &["flush_every=0", "flush_at_end=0"])?;
    command.args(["bench", "commit-ranks", "--ranks", &nodes.to_string()]);
    job::options(&mut command, &[("--rounds", args.real_rounds.into())]);
    command.arg("--dir").arg(&dir);
    job::finish(command, &dir.join("log"))?;
    Ok(rounds(&job::times(&dir, nodes)?)?)
}

fn rounds(times: &[Times]) -> anyhow::Result<Vec<f64>> {
    let last = |part: fn(&Times) -> &Vec<u64>, n: usize| {
        times.iter().filter_map(|t| part(t).get(n)).max().copied().unwrap_or(0)
    };
    let count = times.iter().map(|t| t.answered.len()).min().unwrap_or(0);
    let took = |n| last(|t| &t.answered, n).saturating_sub(last(|t| &t.asked, n)) as f64 / 1e6;
    let all: Vec<f64> = (FIRST..count).map(took).collect();
    if all.is_empty() {
        bail!("the ranks made {count} checkpoints");
    }
    Ok(all)
}

pub(super) fn ranks(args: &CommitRankArgs) -> Result<Exit, Failed> {
    job::wait(job::spawn("commit-rank", args.ranks, |command| {
        job::options(command, &[("--rounds", args.rounds.into())]);
        command.arg("--dir").arg(&args.dir);
    })?)
}

pub(super) fn rank(args: &CommitRankArgs) -> Result<Exit, Failed> {
    job::leave(&args.dir, args.rank, &measure(args)?)
}

fn measure(args: &CommitRankArgs) -> anyhow::Result<Times> {
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let mut client = Client::connect(&options)?;
    let mut times = Times::default();
    for _ in 0..args.rounds as usize + FIRST {
        let begun = client.begin("", FLAG_CHECKPOINT)?;
        times.asked.push(now_ns());
        client.complete(true)?;
        times.answered.push(now_ns());
        // What is behind one is not in the next.
        client.wait(begun.no, Level::Protected, SETTLE_MS)?;
    }
    client.finalize()?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_from_the_last_call_to_the_last_return_and_the_first_do_not_count() {
        let rank = |asked: [u64; 3], answered: [u64; 3]| Times {
            asked: asked.map(|t| t * 1_000_000).to_vec(),
            answered: answered.map(|t| t * 1_000_000).to_vec(),
        };
        let times = [rank([0, 100, 200], [50, 150, 209]), rank([10, 110, 203], [50, 150, 207])];
        assert_eq!(rounds(&times).expect("there is a third"), [6.0]);
        assert!(rounds(&times[..0]).is_err());
    }
}
