//! A benchmark's job: a program under `stanchion run` whose ranks leave what they measured in files.

use crate::exit::{Exit, Failed};
use anyhow::{Context, anyhow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// `stanchion run` of one node, of this program: what it runs is to be added.
pub(super) fn in_job(prefix: &Path, sets: &[&str]) -> anyhow::Result<Command> {
    in_job_of(1, prefix, sets)
}

/// The same of so many nodes.
pub(super) fn in_job_of(nodes: u32, prefix: &Path, sets: &[&str]) -> anyhow::Result<Command> {
    let me = std::env::current_exe()?;
    let mut command = Command::new(&me);
    command.args([
        "run",
        "--nodes",
        &nodes.to_string(),
        "--name",
        "bench",
        "--runs-max",
        "1",
        "--from-scratch",
    ]);
    for set in sets {
        command.args(["--set", set]);
    }
    command.arg("--prefix").arg(prefix).arg("--").arg(&me);
    Ok(command)
}

/// Adds options.
pub(super) fn options(command: &mut Command, options: &[(&str, u64)]) {
    for (name, value) in options {
        command.args([(*name).to_owned(), value.to_string()]);
    }
}

/// Runs it to its end; what it says is told only if it fails.
pub(super) fn finish(mut command: Command, log: &Path) -> Result<(), Failed> {
    let to = File::create(log)?;
    command.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
    let status = command.status().context("the job cannot be started")?;
    if !status.success() {
        let text = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
        return Err(anyhow!("the job ended with {status}; its words:\n{text}").into());
    }
    Ok(())
}

fn result_file(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("times.{rank}"))
}

/// What a rank measured.
pub(super) fn leave(dir: &Path, rank: u32, times: &impl Serialize) -> Result<Exit, Failed> {
    let bytes = serde_json::to_vec(times).context("times as JSON")?;
    std::fs::write(result_file(dir, rank), bytes)?;
    Ok(Exit::Success)
}

/// What all ranks left, by rank.
pub(super) fn times<T: DeserializeOwned>(dir: &Path, ranks: u32) -> anyhow::Result<Vec<T>> {
    let read = |rank| {
        let bytes = std::fs::read(result_file(dir, rank))
            .with_context(|| format!("rank {rank} left no times"))?;
        serde_json::from_slice(&bytes).context("a rank's times do not parse")
    };
    (0..ranks).map(read).collect()
}

/// What mpiexec would be: all ranks at once, each `stanchion bench WHAT --rank N` and what `more` adds.
pub(super) fn spawn(
    what: &str,
    ranks: u32,
    more: impl Fn(&mut Command),
) -> anyhow::Result<Vec<Child>> {
    let me = std::env::current_exe()?;
    let start = |rank: u32| {
        let mut command = Command::new(&me);
        command.args(["bench", what, "--rank", &rank.to_string()]);
        command.args(["--ranks", &ranks.to_string()]);
        // As launchers do: `stanchion status` finds ranks by it.
        command.env("STANCHION_RANK", rank.to_string()).env("STANCHION_SIZE", ranks.to_string());
        more(&mut command);
        command.spawn().context("a rank cannot be started")
    };
    (0..ranks).map(start).collect()
}

/// Waits for all of them.
pub(super) fn wait(children: Vec<Child>) -> Result<Exit, Failed> {
    let mut failed = false;
    for mut child in children {
        failed |= !child.wait()?.success();
    }
    Ok(if failed { Exit::Failure } else { Exit::Success })
}

/// The slowest rank's time in each round.
pub(super) fn slowest<T>(times: &[T], part: impl Fn(&T) -> &[f64]) -> Vec<f64> {
    let rounds = times.iter().map(|t| part(t).len()).min().unwrap_or(0);
    (0..rounds).map(|n| times.iter().map(|t| part(t)[n]).fold(0.0, f64::max)).collect()
}
