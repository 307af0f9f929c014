//! The job that loses nodes, from outside.

use super::{Case, NODES, Round, link::Net, rank};
use crate::args::RebuildArgs;
use crate::bench::job;
use crate::exit::Failed;
use crate::{jobdir, settings, status};
use anyhow::{Context, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(300);
/// Between two looks at what the job says.
const LOOK: Duration = Duration::from_millis(5);

/// A job under way.
struct Job {
    child: Child,
    events: File,
    seen: Vec<Value>,
    rest: Vec<u8>,
    log: PathBuf,
}

impl Drop for Job {
    fn drop(&mut self) {
        // The runner ends its application and its agents.
        if let (Ok(None), Some(pid)) =
            (self.child.try_wait(), Pid::from_raw(self.child.id() as i32))
        {
            let _gone_is_fine = kill_process(pid, Signal::TERM);
            let _reaped = self.child.wait();
        }
    }
}

impl Job {
    fn start(
        args: &RebuildArgs,
        case: &Case,
        (dir, cache): (&Path, &Path),
        net: Option<&Net>,
    ) -> anyhow::Result<Job> {
        let (log, events) = (dir.join("log"), dir.join("events"));
        let set = |name: &str, value: &str| format!("{name}={value}");
        let sets = [
            set("flush_every", "0"),
            set("flush_at_end", "0"),
            set("runs_max", "0"),
            set("scheme", case.scheme),
            set("set_size", &NODES.to_string()),
            set("cache_dir", &cache.to_string_lossy()),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let mut command = std::process::Command::new(std::env::current_exe()?);
        let spares = (args.rounds * case.lost).to_string();
        command.args([
            "run",
            "--nodes",
            &NODES.to_string(),
            "--spares",
            &spares,
            "--name",
            "bench",
            "--from-scratch",
        ]);
        for set in sets {
            command.args(["--set", set]);
        }
        command.arg("--json-events").arg(&events).arg("--prefix").arg(dir).arg("--");
        command.arg(std::env::current_exe()?).args([
            "bench",
            "rebuild-ranks",
            "--ranks",
            &NODES.to_string(),
        ]);
        job::options(&mut command, &[("--mb", args.mb)]);
        command.arg("--dir").arg(dir).arg("--cache").arg(cache);
        command.args(args.files.then_some("--files"));
        if let Some(net) = net {
            command.env(crate::agent::NETNS, net.name());
        }
        let to = File::create(&log)?;
        File::create(&events)?;
        command.stdin(Stdio::null()).stdout(to.try_clone()?).stderr(to);
        let child = command.spawn().context("the job cannot be started")?;
        let events = File::open(&events)?;
        Ok(Job { child, events, seen: Vec::new(), rest: Vec::new(), log })
    }

    /// The first event from number `after` on of which this is true, and its number.
    fn wait(
        &mut self,
        after: usize,
        is: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<(usize, Value)> {
        let until = Instant::now() + PATIENCE;
        let mut next = after;
        loop {
            self.events.read_to_end(&mut self.rest)?;
            while let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                self.seen.push(serde_json::from_slice(&line).context("an event does not parse")?);
            }
            while next < self.seen.len() {
                if is(&self.seen[next]) {
                    return Ok((next, self.seen[next].clone()));
                }
                next += 1;
            }
            if self.child.try_wait()?.is_some() || Instant::now() > until {
                let words = std::fs::read(&self.log).unwrap_or_default();
                bail!("the job does not go on; its words:\n{}", String::from_utf8_lossy(&words));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The agents of the first so many nodes, as `stanchion status` tells.
    fn agents(&self, count: u32) -> anyhow::Result<Vec<Value>> {
        let gathered = settings::gather(&[]).map_err(|_| anyhow!("the settings do not parse"))?;
        let found = jobdir::all(&jobdir::base(&gathered.settings));
        let pid = self.child.id();
        let job = found.iter().find(|f| f.info.as_ref().is_some_and(|i| i.pid == pid));
        let job = job.ok_or_else(|| anyhow!("the job has no directory"))?;
        let status = status::ask(&job.path)?;
        let of = |n: u32| {
            let all = status["agents"].as_array().into_iter().flatten();
            all.into_iter().find(|a| a["alive"] == true && a["node"] == n).cloned()
        };
        (0..count).map(|n| of(n).ok_or_else(|| anyhow!("node {n} has no agent"))).collect()
    }
}

/// A node dies, with all it held.
fn kill_nodes(agents: &[Value]) -> anyhow::Result<()> {
    let pids = |agent: &Value| -> Vec<Pid> {
        let ranks = agent["ranks"].as_array().into_iter().flatten().map(|r| &r["pid"]);
        let all = std::iter::once(&agent["pid"]).chain(ranks);
        all.filter_map(Value::as_i64).filter_map(|p| Pid::from_raw(p as i32)).collect()
    };
    for signal in [Signal::STOP, Signal::KILL] {
        for pid in agents.iter().flat_map(pids) {
            let _gone_is_fine = kill_process(pid, signal);
        }
    }
    for agent in agents {
        let cache = agent["cache"].as_str().context("an agent without a cache")?;
        let _gone_is_fine = std::fs::remove_dir_all(cache);
    }
    Ok(())
}

/// So many losses one after the other.
pub(super) fn losses(
    args: &RebuildArgs,
    case: &Case,
    dirs: (&Path, &Path),
    net: Option<&Net>,
) -> Result<Vec<Round>, Failed> {
    let mut job = Job::start(args, case, dirs, net)?;
    let mut rounds = Vec::new();
    let mut at = 0;
    for launch in 0..args.rounds {
        let protected = |e: &Value| e["event"] == "level" && e["level"] == "protected";
        let (committed, _) = job.wait(at, |e| e["event"] == "committed")?;
        (at, _) = job.wait(committed, protected)?;
        let bare = rank::bare(dirs.0, launch)?;
        kill_nodes(&job.agents(case.lost)?)?;
        (at, _) = job.wait(at, |e| e["event"] == "launching")?;
        let done = job.seen[..at].iter().rfind(|e| e["event"] == "restore_done");
        let done = done.ok_or_else(|| anyhow!("nothing was restored"))?;
        let number = |name: &str| done[name].as_f64().unwrap_or(0.0);
        rounds.push(Round {
            bare,
            restore: number("restore_ms") / 1e3,
            since_loss: number("since_loss_ms") / 1e3,
            rebuilt: number("rebuilt_bytes"),
        });
        if number("rebuilt_bytes") < f64::from(case.lost) * args.mb as f64 * f64::from(1 << 20) {
            return Err(anyhow!("less was rebuilt than was lost: {done}").into());
        }
    }
    Ok(rounds)
}
