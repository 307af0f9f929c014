//! The application: its launcher, unchanged, and whatever descends from it.

use crate::procs::{self, Proc};
use crate::shm;
use anyhow::{Context, anyhow};
use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process_group, set_parent_process_death_signal,
};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Times of files come from a coarser clock than ours.
const CLOCK_COARSE: Duration = Duration::from_millis(20);

/// The launch command and what runs of it.
#[derive(Debug)]
pub struct App {
    program: PathBuf,
    command: Vec<OsString>,
    env: Vec<(String, String)>,
    /// The launcher, as long as it is not reaped: until then its number and its group's are its own.
    leader: Option<Pid>,
    stopping: Option<Stopping>,
    /// When it was launched; what its MPI made before is not its own.
    launched: Option<SystemTime>,
}

#[derive(Debug)]
struct Stopping {
    since: Instant,
    killed: bool,
}

/// How far stopping has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Stop {
    /// Not asked for.
    No,
    /// Some are left.
    Under,
    /// Nobody is left.
    Done,
    /// These do not end, not even killed.
    Stuck(Vec<i32>),
}

/// Finds a program as the shell would.
pub fn resolve(program: &OsString) -> anyhow::Result<PathBuf> {
    let executable = |path: &Path| {
        path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
    };
    let path = Path::new(program);
    let shown = stanchion_format::config::Shown::new(&program.to_string_lossy());
    if path.components().count() > 1 || path.is_absolute() {
        let found = std::fs::metadata(path).with_context(|| format!("the command '{shown}'"))?;
        if !found.is_file() || !executable(path) {
            return Err(anyhow!("the command '{shown}' is not an executable file"));
        }
        return Ok(path.to_owned());
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&dirs)
        .map(|dir| dir.join(path))
        .find(|candidate| executable(candidate))
        .ok_or_else(|| anyhow!("the command '{shown}' is not found in PATH"))
}

impl App {
    /// An application that does not run yet; `program` is where `command[0]` was found.
    pub fn new(program: PathBuf, command: Vec<OsString>, env: Vec<(String, String)>) -> App {
        App { program, command, env, leader: None, stopping: None, launched: None }
    }

    /// The launcher's process, if it runs.
    pub fn pid(&self) -> Option<i32> {
        self.leader.map(|p| p.as_raw_nonzero().get())
    }

    /// Starts it, with these variables beside the others.
    pub fn launch(&mut self, env: &[(String, String)]) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        if let Some(name) = self.command.first() {
            command.arg0(name);
        }
        command.args(self.command.iter().skip(1));
        command.envs(self.env.iter().chain(env).map(|(name, value)| (name, value)));
        // In a group of its own it would be stopped when it reads from the terminal.
        if std::io::stdin().is_terminal() {
            command.stdin(Stdio::null());
        }
        command.process_group(0);
        self.launched.get_or_insert(SystemTime::now() - CLOCK_COARSE);
        let runner = getpid();
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; these are two bare
        // system calls, which neither allocate nor take locks.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::TERM))?;
                // The runner may have died before the line above.
                if getppid() == Some(runner) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("{} cannot be started", self.program.display()))?;
        self.leader = Pid::from_raw(child.id() as i32);
        self.stopping = None;
        Ok(())
    }

    /// A child was reaped; true if it was the launcher.
    pub fn reaped(&mut self, pid: Pid) -> bool {
        let was = self.leader == Some(pid);
        if was {
            self.leader = None;
        }
        was
    }

    /// Is somebody stopping it?
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    /// Begins to end it: SIGTERM to the launcher, which ends its ranks. `agents` are not the application's.
    pub fn stop(&mut self, agents: &BTreeSet<i32>) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(Stopping { since: Instant::now(), killed: false });
        match self.leader {
            Some(group) => {
                let _gone_is_fine = kill_process_group(group, Signal::TERM);
            }
            None => {
                for p in family(agents) {
                    procs::signal(p, Signal::TERM);
                }
            }
        }
    }

    /// SIGKILL to everybody, now.
    pub fn kill(&mut self, agents: &BTreeSet<i32>) {
        let stopping =
            self.stopping.get_or_insert(Stopping { since: Instant::now(), killed: false });
        stopping.killed = true;
        if let Some(group) = self.leader {
            let _gone_is_fine = kill_process_group(group, Signal::KILL);
        }
        for p in family(agents) {
            procs::signal(p, Signal::KILL);
        }
    }

    /// Goes on ending it. To be called every few milliseconds, after reaping.
    pub fn check(&mut self, agents: &BTreeSet<i32>, grace: Duration, limit: Duration) -> Stop {
        let Some(stopping) = &self.stopping else { return Stop::No };
        let since = stopping.since.elapsed();
        let left = family(agents);
        if left.is_empty() && self.leader.is_none() {
            self.stopping = None;
            if let Some(launched) = self.launched.take() {
                shm::sweep(launched);
            }
            return Stop::Done;
        }
        if since >= grace + limit {
            self.stopping = None;
            return Stop::Stuck(left.iter().map(|p| p.pid).collect());
        }
        // Again and again: who was forked between looking and killing is seen the next time.
        if stopping.killed || since >= grace {
            self.kill(agents);
        }
        Stop::Under
    }
}

/// Everybody that descends from the runner but agents. The runner is a subreaper: who lost its parent is
/// its child.
fn family(agents: &BTreeSet<i32>) -> Vec<Proc> {
    procs::descendants(std::process::id() as i32, agents)
}
