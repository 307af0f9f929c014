//! The agents of the embedded nodes: starting them, knowing who lives, ending them.

use crate::agent::{Options, Ready};
use crate::exit::{Exit, Failed, OrExit};
use crate::jobdir::JobDir;
use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, kill_process};
use stanchion_format::config::Shown;
use stanchion_format::ids::AgentId;
use stanchion_format::peer::AgentAddr;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

/// Longest line with which an agent says that it is ready, bytes.
const READY_BYTES_MAX: u64 = 64 << 10;
/// What of a lost agent's log is shown.
const LOG_BYTES_SHOWN: u64 = 4096;
/// Lines of it.
const LOG_LINES_SHOWN: usize = 8;

/// One agent.
#[derive(Debug)]
pub struct Agent {
    /// Who.
    pub id: AgentId,
    /// Its process; a number to be used only while `alive`, that is: not reaped.
    pub pid: Pid,
    /// Not reaped yet.
    pub alive: bool,
    /// Where it listens for peers; empty until it is ready.
    pub addr: String,
    /// Its directory: socket, log.
    pub root: PathBuf,
    /// Its cache.
    pub cache: PathBuf,
    /// Its end tells the agent that the runner is gone.
    _stdin: ChildStdin,
}

impl Agent {
    /// The process as a plain number.
    pub fn pid_number(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Its socket for ranks.
    pub fn socket(&self) -> PathBuf {
        self.root.join(crate::agent::SOCKET)
    }

    /// SIGKILL. Safe against another process of that number: it is our child and not reaped.
    pub fn kill(&self) {
        if self.alive {
            let _gone_is_fine = kill_process(self.pid, Signal::KILL);
        }
    }

    /// The end of its log, a line each.
    pub fn last_words(&self) -> Vec<String> {
        let Ok(mut file) = std::fs::File::open(self.root.join("agent.log")) else {
            return Vec::new();
        };
        let len = file.metadata().map_or(0, |m| m.len());
        let mut bytes = Vec::new();
        let read = std::io::Seek::seek(
            &mut file,
            std::io::SeekFrom::Start(len.saturating_sub(LOG_BYTES_SHOWN)),
        )
        .and_then(|_| file.take(LOG_BYTES_SHOWN).read_to_end(&mut bytes));
        if read.is_err() {
            return Vec::new();
        }
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..]
            .iter()
            .map(|l| (*l).to_owned())
            .collect()
    }
}

/// All agents of a job.
#[derive(Debug, Default)]
pub struct Agents(pub Vec<Agent>);

impl Agents {
    /// Processes that are agents and live.
    pub fn pids(&self) -> BTreeSet<i32> {
        self.0.iter().filter(|a| a.alive).map(Agent::pid_number).collect()
    }

    /// A child was reaped: which agent was it?
    pub fn reaped(&mut self, pid: Pid) -> Option<AgentId> {
        let agent = self.0.iter_mut().find(|a| a.alive && a.pid == pid)?;
        agent.alive = false;
        Some(agent.id)
    }

    /// Finds one.
    pub fn get(&self, id: AgentId) -> Option<&Agent> {
        self.0.iter().find(|a| a.id == id)
    }

    /// Where they listen.
    pub fn addresses(&self) -> Vec<AgentAddr> {
        self.0.iter().map(|a| AgentAddr { id: a.id, addr: a.addr.clone() }).collect()
    }

    /// SIGKILL to all that live.
    pub fn kill_all(&self) {
        self.0.iter().for_each(Agent::kill);
    }
}

/// Starts an agent for each of these caches; `agents` has those that were started even if it fails. `options` is for each
/// of them, but for id and directories.
pub async fn start(
    job: &JobDir,
    caches: Vec<PathBuf>,
    options: &Options,
    limit: Duration,
    agents: &mut Agents,
) -> Result<(), Failed> {
    let program = std::env::current_exe().context("the path of this program")?;
    let mut waiting = Vec::new();
    for (k, cache) in (0..).zip(caches) {
        let root = job.make_node(k).context("a node's directory").or_exit(Exit::Storage)?;
        let options = Options { id: k, cache, root: root.clone(), ..options.clone() };
        let (agent, ready) = spawn(&program, &options).or_exit(Exit::AgentsFailed)?;
        agents.0.push(agent);
        waiting.push(ready);
    }
    let deadline = tokio::time::Instant::now() + limit;
    for (agent, pipe) in agents.0.iter_mut().zip(waiting) {
        agent.addr = match tokio::time::timeout_at(deadline, ready(pipe)).await {
            Ok(Ok(Ready::Addr(addr))) => addr,
            Ok(Ok(Ready::Failed { exit, text })) => {
                let exit =
                    if exit == Exit::Storage as u8 { Exit::Storage } else { Exit::AgentsFailed };
                return Err(Failed::new(
                    exit,
                    anyhow!("node {}: its agent cannot start: {text}", agent.id),
                ));
            }
            Ok(Err(e)) => {
                let log = agent.last_words().join("\n  ");
                let text = format!("node {}: its agent did not start; its log:\n  {log}", agent.id);
                return Err(Failed::new(Exit::AgentsFailed, e.context(text)));
            }
            Err(_) => {
                let text = format!(
                    "node {}: its agent was not ready within {} ms (setting start_timeout_ms)",
                    agent.id,
                    limit.as_millis()
                );
                return Err(Failed::new(Exit::AgentsFailed, anyhow!(text)));
            }
        };
    }
    Ok(())
}

fn spawn(program: &PathBuf, options: &Options) -> anyhow::Result<(Agent, pipe::Receiver)> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(options.root.join("agent.log"))
        .context("an agent's log")?;
    let mut child = Command::new(program)
        .args([
            "agent",
            "--id",
            &options.id.to_string(),
            "--job",
            &Shown::new(&options.name).to_string(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        // No variable of the job: an agent is not part of the application that is looked for by them.
        .env_remove("STANCHION_JOB_DIR")
        .current_dir(&options.root)
        .spawn()
        .context("an agent cannot be started")?;
    let pid = Pid::from_raw(child.id() as i32).context("an agent's process")?;
    let mut stdin = child.stdin.take().context("an agent's input")?;
    let stdout = child.stdout.take().context("an agent's output")?;
    // Small enough for the pipe's buffer: this does not wait.
    let mut line = serde_json::to_vec(options)?;
    line.push(b'\n');
    stdin.write_all(&line).context("an agent does not take its options")?;
    line.fill(0);
    let ready = pipe::Receiver::from_owned_fd(stdout.into())?;
    let agent = Agent {
        id: AgentId(options.id),
        pid,
        alive: true,
        addr: String::new(),
        root: options.root.clone(),
        cache: options.cache.clone(),
        _stdin: stdin,
    };
    Ok((agent, ready))
}

async fn ready(pipe: pipe::Receiver) -> anyhow::Result<Ready> {
    let mut line = Vec::new();
    pipe.take(READY_BYTES_MAX).read_to_end(&mut line).await?;
    serde_json::from_slice(&line).context("it said nothing that makes sense")
}
