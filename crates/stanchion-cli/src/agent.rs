//! `stanchion agent`: the process of a node's agent, around `stanchion_agent::daemon`.

use crate::exit::{Exit, Failed, OrExit};
use crate::jobdir::NodeDir;
use crate::procs;
use anyhow::{Context, anyhow};
use rustix::thread::LinkNameSpaceType;
use serde::{Deserialize, Serialize};
use stanchion_agent::daemon::{self, AgentError, AgentOptions};
use stanchion_agent::secret::Secret;
use stanchion_format::config::Settings;
use stanchion_format::ids::{AgentId, JobId};
use std::io::{BufRead, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Name of the ranks' socket in the agent's directory.
pub const SOCKET: &str = "agent.sock";
/// Longest line of options, bytes.
const OPTIONS_BYTES_MAX: u64 = 8 << 20;

/// What is taken to be free where the system does not tell, bytes.
const POOL_BYTES_UNKNOWN: u64 = 2 << 30;

/// What the runner tells an agent through its standard input: nobody else can read it there.
#[derive(Clone, Serialize, Deserialize)]
pub struct Options {
    /// The job's secret.
    pub secret: [u8; 32],
    /// Its identity.
    pub id: u32,
    /// The job's name.
    pub name: String,
    /// The job's id.
    pub job: u64,
    /// The prefix.
    pub prefix: PathBuf,
    /// Its cache.
    pub cache: PathBuf,
    /// That is what another agent left: nothing of it is removed.
    pub adopt: bool,
    /// Its directory: socket, log.
    pub root: PathBuf,
    /// Agents on this machine.
    pub agents_here: u32,
    /// The job's settings that differ from the defaults.
    pub settings: Vec<(String, String)>,
}

/// What an agent answers on its standard output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ready {
    /// It listens for peers here.
    Addr(String),
    /// It cannot.
    Failed {
        /// Exit code.
        exit: u8,
        /// Why.
        text: String,
    },
}

/// Runs the agent to its end.
pub fn agent() -> Result<Exit, Failed> {
    close_inherited();
    // A session of its own: the terminal's signals and its hang-up are the runner's.
    let _leads_one_already = rustix::process::setsid();
    let options = read_options().or_exit(Exit::Usage)?;
    let (root, job_dir) = (options.root.clone(), options.root.parent().map(Path::to_owned));
    let grace = options.settings.number("mpi_launch_grace_ms");
    log_to_stderr(options.settings.number("debug"));
    let node = NodeDir::enter(&root)
        .or_exit(Exit::Storage)
        .inspect_err(|f| answer_failure(f.exit, &f.error))?;
    let started = SystemTime::now();
    let runner_gone = Arc::new(AtomicBool::new(false));
    watch_runner(runner_gone.clone(), job_dir.clone(), Duration::from_millis(grace))?;
    let mut ready = false;
    let ended = daemon::run(options.daemon, |info| {
        ready = true;
        answer(&Ready::Addr(info.addr.to_string()));
    });
    let result = ended.map(|()| Exit::Success).map_err(|e| {
        let storage = matches!(e, AgentError::Cache(..) | AgentError::Path(_));
        Failed::new(if storage { Exit::Storage } else { Exit::AgentsFailed }, e)
    });
    if let (Err(failed), false) = (&result, ready) {
        answer_failure(failed.exit, &failed.error);
    }
    if runner_gone.load(Ordering::Acquire) {
        job_dir.iter().for_each(|dir| procs::end_application(dir, Duration::ZERO));
        crate::shm::sweep(started);
    }
    node.leave();
    result
}

/// What the shell that started the runner had open is none of the agent's: whoever reads such a pipe to its
/// end would wait for the agent.
fn close_inherited() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> = entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|fd| *fd > 2)
        .collect();
    for fd in open {
        // SAFETY: first thing in the process: nothing here has opened a descriptor yet, so nobody's is
        // closed under it. The one of the directory just read is in the list and closed already, which
        // the kernel answers with an error that does not matter.
        unsafe { rustix::io::close(fd) };
    }
}

/// Set by benchmarks: what the names of network namespaces begin with, of which agent K is in `NAME-K`.
pub const NETNS: &str = "BENCH_NETNS";

/// The address that an agent has there.
pub fn netns_address(id: u32) -> Ipv4Addr {
    let [_, _, high, low] = (id + 1).to_be_bytes();
    Ipv4Addr::new(10, 77, high, low)
}

/// Where the agent listens: the loopback, or its address in its network namespace, which it enters. Nothing else runs in
/// this process yet.
fn enter_net(id: u32) -> anyhow::Result<Ipv4Addr> {
    let Some(name) = std::env::var_os(NETNS) else { return Ok(Ipv4Addr::LOCALHOST) };
    let path = format!("/run/netns/{}-{id}", name.to_string_lossy());
    let file = std::fs::File::open(&path).with_context(|| path.clone())?;
    rustix::thread::move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("entering {path}"))?;
    Ok(netns_address(id))
}

struct Started {
    daemon: AgentOptions,
    root: PathBuf,
    settings: Settings,
}

fn read_options() -> anyhow::Result<Started> {
    let mut line = Vec::new();
    let mut stdin = std::io::stdin().lock().take(OPTIONS_BYTES_MAX);
    stdin.read_until(b'\n', &mut line).context("options")?;
    let parsed = serde_json::from_slice::<Options>(&line);
    line.fill(0);
    // Without the parser's words, which may quote what was given.
    let mut options = parsed.map_err(|_| {
        anyhow!("`stanchion agent` is started by `stanchion run` and `scavenge` only")
    })?;
    let settings = Settings::from_pairs(&options.settings).context("settings")?;
    let secret = Arc::new(Secret::new(options.secret));
    options.secret.fill(0);
    let daemon = AgentOptions {
        id: AgentId(options.id),
        job: JobId(options.job),
        secret,
        listen: IpAddr::V4(enter_net(options.id)?),
        socket: options.root.join(SOCKET),
        cache: options.cache,
        adopt: options.adopt,
        prefix: options.prefix,
        pool_bytes_max: pool_bytes_max(&settings, options.agents_here),
        settings: settings.clone(),
    };
    Ok(Started { daemon, root: options.root, settings })
}

/// What the pool may have: as set, or this agent's part of half of what is free now.
fn pool_bytes_max(settings: &Settings, agents_here: u32) -> u64 {
    match settings.number("pool_bytes_max") {
        0 => memory_free().unwrap_or(POOL_BYTES_UNKNOWN) / 2 / u64::from(agents_here.max(1)),
        max => max,
    }
}

/// Memory that can be had without swapping, bytes (proc(5): MemAvailable).
fn memory_free() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn log_to_stderr(debug: u64) {
    let level = match debug {
        0 => "info",
        1 => "debug",
        _ => "trace",
    };
    let filter = tracing_subscriber::EnvFilter::new(level);
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(std::io::stderr);
    let _first_one_stays = log.try_init();
}

/// Says one line to the runner and lets go of its pipe: who waits for its end waits for no agent.
fn answer(ready: &Ready) {
    let line = serde_json::to_string(ready).unwrap_or_default();
    let _runner_is_gone =
        writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        let _still_the_pipe = rustix::stdio::dup2_stdout(null);
    }
}

fn answer_failure(exit: Exit, error: &anyhow::Error) {
    answer(&Ready::Failed { exit: exit as u8, text: format!("{error:#}") });
}

/// The runner holds the other end of standard input as long as it lives. When it is gone, its application
/// has nobody else to end it: ranks that came to an agent are ended by core, the others here.
fn watch_runner(
    gone: Arc<AtomicBool>,
    job_dir: Option<PathBuf>,
    grace: Duration,
) -> std::io::Result<()> {
    let watch = move || {
        let mut rest = [0u8; 256];
        let mut stdin = std::io::stdin().lock();
        // The runner says nothing more; only the end of the pipe counts.
        while matches!(stdin.read(&mut rest), Ok(n) if n > 0) {}
        gone.store(true, Ordering::Release);
        // Its launcher got SIGTERM when the runner died, and may take its time to end its ranks.
        job_dir.iter().for_each(|dir| procs::end_application(dir, grace));
    };
    std::thread::Builder::new().name("stn-runner".into()).spawn(watch)?;
    Ok(())
}
