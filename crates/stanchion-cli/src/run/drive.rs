//! The runner's loop: what the controller wants is done, what happens is told to it.

use super::Ended;
use super::agents::{self, Agents};
use super::app::{App, Stop};
use super::control;
use super::events::Reporter;
use super::lease;
use crate::agent::Options;
use crate::exit::{Exit, Failed, OrExit};
use crate::jobdir::JobDir;
use anyhow::{Context, anyhow};
use rustix::process::{WaitOptions, WaitStatus, wait};
use serde_json::{Value, json};
use stanchion_agent::lead::{LeadConfig, lead};
use stanchion_agent::secret::Secret;
use stanchion_core::api::{ControllerAction, ControllerEvent, Notice, Outcome};
use stanchion_core::controller::{ControllerConfig, Status};
use stanchion_format::ids::AgentId;
use stanchion_format::index::HaltFile;
use stanchion_format::layout::block_slot;
use stanchion_format::peer::{Cause, Severity, Trouble};
use stanchion_io::prefix::Prefix;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

/// Actions and events that wait for the other side.
const QUEUE: usize = 64;
/// How often is looked whether a stopped application has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Signals closer together than this are one wish.
const SAME_INTERRUPT: Duration = Duration::from_millis(700);

/// Runs a job.
pub struct Driver<'a> {
    dir: &'a JobDir,
    core: ControllerConfig,
    app: App,
    agents: Agents,
    reporter: &'a mut Reporter,
    child: Signal,
    signals: Signals,
    /// What the controller does not know yet.
    news: VecDeque<ControllerEvent>,
    /// The controller waits for `AppStopped`.
    stop_wanted: bool,
    /// To be launched on these agents once nothing of the last launch is left.
    launch_wanted: Option<Vec<AgentId>>,
    /// Where the slots were at the last launch.
    placement: Vec<AgentId>,
    interrupts: u32,
    interrupted_at: Option<Instant>,
    halted: bool,
    facts: Arc<Mutex<Value>>,
    grace: Duration,
    limit: Duration,
}

/// Those that ask for the end.
pub struct Signals {
    int: Signal,
    term: Signal,
    hup: Signal,
}

impl Signals {
    /// From now on they do not end the process.
    pub fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            int: signal(SignalKind::interrupt())?,
            term: signal(SignalKind::terminate())?,
            hup: signal(SignalKind::hangup())?,
        })
    }

    /// One that asks for the end came.
    pub async fn end(&mut self) {
        tokio::select! {
            _ = self.int.recv() => {}
            _ = self.term.recv() => {}
            _ = self.hup.recv() => {}
        }
    }
}

/// What wakes the loop.
enum Woken {
    Led(Outcome),
    Action(ControllerAction),
    Child,
    Interrupted,
    Halt(HaltFile),
    Look,
    Room,
}

/// Exit code as the shell would have it.
fn code(status: WaitStatus) -> i32 {
    status.exit_status().unwrap_or_else(|| 128 + status.terminating_signal().unwrap_or(0))
}

impl<'a> Driver<'a> {
    /// Nothing runs yet.
    pub fn new(
        dir: &'a JobDir,
        core: ControllerConfig,
        app: App,
        reporter: &'a mut Reporter,
    ) -> Result<Driver<'a>, Failed> {
        let millis = |name: &str| Duration::from_millis(core.settings.number(name));
        let (grace, limit) = (millis("mpi_launch_grace_ms"), millis("shutdown_timeout_ms"));
        Ok(Driver {
            dir,
            core,
            app,
            agents: Agents::default(),
            reporter,
            child: signal(SignalKind::child()).context("signals")?,
            signals: Signals::new().context("signals")?,
            news: VecDeque::new(),
            stop_wanted: false,
            launch_wanted: None,
            placement: Vec::new(),
            interrupts: 0,
            interrupted_at: None,
            halted: false,
            facts: Arc::new(Mutex::new(Value::Null)),
            grace,
            limit,
        })
    }

    /// Starts all agents, or says why not.
    pub async fn start_agents(&mut self, options: &Options) -> Result<(), Failed> {
        let limit = Duration::from_millis(self.core.settings.number("start_timeout_ms"));
        let caches = (0..self.core.agents).map(|k| self.dir.cache(k)).collect();
        let starting = agents::start(self.dir, caches, options, limit, &mut self.agents);
        let started = tokio::select! {
            started = starting => started,
            () = self.signals.end() => Err(Failed::new(Exit::Interrupted, anyhow!("interrupted"))),
        };
        self.note_facts();
        started
    }

    /// Drives the controller to its end.
    pub async fn lead(
        &mut self,
        secret: [u8; 32],
        prefix: Arc<Prefix>,
        halt: HaltFile,
    ) -> Result<Ended, Failed> {
        let (status, status_seen) = watch::channel(Status::default());
        let config = LeadConfig {
            core: self.core.clone(),
            agents: self.agents.addresses(),
            secret: Arc::new(Secret::new(secret)),
            prefix: prefix.root().to_owned(),
            role: "run",
            status,
        };
        let socket = control::bind(&self.dir.socket())
            .context("the status socket")
            .or_exit(Exit::Storage)?;
        let (facts, began) = (self.facts.clone(), Instant::now());
        let serving =
            tokio::spawn(control::serve(socket, move || answer(&status_seen, &facts, began)));
        let (tell_halt, mut halts) = mpsc::unbounded_channel();
        self.tell_halt(&halt);
        lease::watch_halt(prefix, halt, tell_halt)
            .context("the thread that looks for wishes to halt")?;
        let (actions_in, mut actions) = mpsc::channel(QUEUE);
        let (events, events_out) = mpsc::channel(QUEUE);
        let led = lead(config, actions_in, events_out);
        tokio::pin!(led);
        let outcome = loop {
            let busy = self.app.is_stopping();
            let woken = tokio::select! {
                // In this order: a dead child before what follows from it.
                biased;
                _ = self.child.recv() => Woken::Child,
                () = self.signals.end() => Woken::Interrupted,
                Some(action) = actions.recv() => Woken::Action(action),
                permit = events.reserve(), if !self.news.is_empty() => {
                    if let (Ok(permit), Some(event)) = (permit, self.news.pop_front()) {
                        permit.send(event);
                    }
                    Woken::Room
                }
                outcome = &mut led => Woken::Led(outcome),
                Some(halt) = halts.recv() => Woken::Halt(halt),
                () = tokio::time::sleep(LOOK), if busy => Woken::Look,
            };
            match woken {
                Woken::Led(outcome) => break outcome,
                Woken::Action(action) => self.act(action),
                Woken::Child => self.reap(),
                Woken::Interrupted => {
                    if self.interrupt() {
                        serving.abort();
                        return Ok(Ended {
                            outcome: Outcome::Interrupted,
                            forced: true,
                            agents: Vec::new(),
                        });
                    }
                }
                Woken::Halt(halt) => self.on_halt(&halt),
                Woken::Look | Woken::Room => {}
            }
            self.check_app();
        };
        while let Ok(action) = actions.try_recv() {
            self.act(action);
        }
        serving.abort();
        let halted = self.halted && self.interrupts == 0 && outcome == Outcome::Interrupted;
        let outcome = if halted { Outcome::Halted } else { outcome };
        Ok(Ended { outcome, forced: false, agents: Vec::new() })
    }

    fn act(&mut self, action: ControllerAction) {
        match action {
            ControllerAction::LaunchApp { slots, .. } => {
                self.placement.clone_from(&slots);
                self.launch_wanted = Some(slots);
                // What the last launch left behind must not write into the next one's files.
                self.app.stop(&self.agents.pids());
            }
            ControllerAction::StopApp => {
                self.launch_wanted = None;
                self.stop_wanted = true;
                self.app.stop(&self.agents.pids());
            }
            ControllerAction::Fence(id) => {
                if let Some(agent) = self.agents.get(id) {
                    agent.kill();
                }
            }
            ControllerAction::Say(severity, notice) => {
                self.reporter.notice(severity, &notice);
                if let Notice::NodeLost { agent, .. } = notice {
                    self.last_words(agent);
                }
            }
            // The lead does these itself, and gives the outcome.
            ControllerAction::Send { .. }
            | ControllerAction::ReadIndex
            | ControllerAction::Exit(_) => {}
        }
        self.note_facts();
    }

    /// What an agent that ended wrote into its log.
    fn last_words(&mut self, id: AgentId) {
        let words = self.agents.get(id).map(agents::Agent::last_words).unwrap_or_default();
        for line in words {
            let facts = json!({"agent": id.0, "line": line});
            let text = format!("agent {id}'s log: {}", line.escape_debug());
            self.reporter.own(Severity::Debug, "agent_log", facts, text);
        }
    }

    fn check_app(&mut self) {
        match self.app.check(&self.agents.pids(), self.grace, self.limit) {
            Stop::No | Stop::Under => return,
            Stop::Done => {}
            Stop::Stuck(pids) => {
                let text = format!(
                    "processes {pids:?} of the application do not end, not even by SIGKILL"
                );
                self.reporter.own(Severity::Error, "stuck", json!({"pids": pids}), text);
            }
        }
        self.reporter.ended();
        if std::mem::take(&mut self.stop_wanted) {
            self.news.push_back(ControllerEvent::AppStopped);
        }
        if let Some(slots) = self.launch_wanted.take() {
            self.launch(&slots);
        }
        self.note_facts();
    }

    fn launch(&mut self, slots: &[AgentId]) {
        let sockets: Vec<String> = slots
            .iter()
            .filter_map(|id| Some(self.agents.get(*id)?.socket().to_string_lossy().into_owned()))
            .collect();
        // A lost node's memory is lost with it; nobody writes there any more.
        let dead =
            self.agents.0.iter().filter(|a| !a.alive).map(|a| a.cache.clone()).collect::<Vec<_>>();
        std::thread::spawn(move || {
            dead.iter().for_each(|cache| drop(std::fs::remove_dir_all(cache)))
        });
        match self.app.launch(&[("STANCHION_NODES".to_owned(), sockets.join(":"))]) {
            Ok(()) => self.reporter.launched(),
            Err(e) => {
                self.reporter.own(Severity::Error, "launch_failed", json!({}), format!("{e:#}"));
                // As a shell says that a command cannot be run.
                self.news.push_back(ControllerEvent::AppExited { success: false, code: 126 });
            }
        }
    }

    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            if let Some(id) = self.agents.reaped(pid) {
                self.news.push_back(ControllerEvent::AgentDown(id));
            } else if self.app.reaped(pid) && !self.app.is_stopping() {
                let code = code(status);
                self.reporter.ended();
                self.news.push_back(ControllerEvent::AppExited { success: code == 0, code });
            }
        }
        self.note_facts();
    }

    /// True if everything shall be killed.
    fn interrupt(&mut self) -> bool {
        // A wrapper passes on what the terminal has sent to all already: that is one.
        if self.interrupted_at.is_some_and(|t| t.elapsed() < SAME_INTERRUPT) {
            return false;
        }
        self.interrupted_at = Some(Instant::now());
        self.interrupts += 1;
        if self.interrupts > 1 {
            let text = "interrupted again: everything is killed".to_owned();
            self.reporter.own(Severity::Warn, "killed", json!({}), text);
            return true;
        }
        let text = "interrupted: ending the application and flushing; once more to kill everything"
            .to_owned();
        self.reporter.own(Severity::Warn, "interrupt", json!({}), text);
        self.news.push_back(ControllerEvent::Interrupt);
        false
    }

    fn on_halt(&mut self, halt: &HaltFile) {
        let text = match crate::prefix::halt_words(halt) {
            Some(words) => format!("asked to halt {words}"),
            None => "the wish to halt was withdrawn".to_owned(),
        };
        self.reporter.own(Severity::Info, "halt", json!({"halt": halt}), text);
        self.tell_halt(halt);
        if halt.immediately && !std::mem::replace(&mut self.halted, true) {
            self.news.push_back(ControllerEvent::Interrupt);
        }
    }

    fn tell_halt(&mut self, halt: &HaltFile) {
        let number = |n: Option<u64>| n.map_or(String::new(), |n| n.to_string());
        let pairs = [
            ("now", u8::from(halt.now).to_string()),
            ("after_checkpoints", number(halt.after_checkpoints)),
            ("before_unix_s", number(halt.before_unix_s)),
            ("after_unix_s", number(halt.after_unix_s)),
        ];
        let pairs = pairs.into_iter().map(|(n, v)| (format!("halt.{n}"), v)).collect();
        self.news.push_back(ControllerEvent::Settings(pairs));
    }

    /// Processes of agents that ended.
    pub fn agents_gone(&self) -> Vec<u32> {
        let gone = self.agents.0.iter().filter(|a| !a.alive);
        gone.map(|a| a.pid_number().cast_unsigned()).collect()
    }

    /// Ends what is left: the application first, agents by themselves, then by force.
    pub async fn wind_down(&mut self, force: bool) {
        let force = force || self.interrupts > 1;
        let begin = Instant::now();
        if force {
            self.app.kill(&self.agents.pids());
            self.agents.kill_all();
        } else {
            self.app.stop(&self.agents.pids());
        }
        let mut killed = force;
        loop {
            self.reap();
            let stop = self.app.check(&self.agents.pids(), self.grace, self.limit);
            if let Stop::Stuck(pids) = &stop {
                crate::out::say(&format!(
                    "warning: processes {pids:?} of the application do not end"
                ));
            }
            let late = begin.elapsed() >= self.limit;
            if !self.app.is_stopping()
                && (self.agents.pids().is_empty() || begin.elapsed() >= 2 * self.limit)
            {
                return;
            }
            if late && !std::mem::replace(&mut killed, true) {
                for id in self.agents.0.iter().filter(|a| a.alive).map(|a| a.id).collect::<Vec<_>>()
                {
                    let t = Trouble::new(Cause::Timeout).agent(id);
                    let text = format!(
                        "agent {id} did not leave within {} ms: killed",
                        self.limit.as_millis()
                    );
                    self.reporter.own(
                        Severity::Warn,
                        "agent_killed",
                        crate::words::trouble(&t),
                        text,
                    );
                }
                self.agents.kill_all();
            }
            tokio::select! {
                _ = self.child.recv() => {}
                () = self.signals.end() => {
                    self.app.kill(&self.agents.pids());
                    self.agents.kill_all();
                }
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// For `stanchion status`.
    fn note_facts(&self) {
        let agents: Vec<Value> = self
            .agents
            .0
            .iter()
            .map(|a| {
                json!({
                    "id": a.id.0, "pid": a.pid_number(), "alive": a.alive, "addr": a.addr, "root": a.root,
                    "cache": a.cache, "socket": a.socket(),
                })
            })
            .collect();
        let info = self.dir.info();
        let facts = json!({
            "name": info.name, "job": self.core.job.0, "epoch": self.core.epoch.0, "prefix": info.prefix,
            "dir": self.dir.path(), "runner_pid": info.pid, "app_pid": self.app.pid(), "agents": agents,
            "placement": self.placement.iter().map(|a| a.0).collect::<Vec<_>>(),
            "nodes": info.nodes, "spares_at_start": info.spares, "command": info.command,
        });
        match self.facts.lock() {
            Ok(mut place) => *place = facts,
            Err(poisoned) => *poisoned.into_inner() = facts,
        }
    }
}

/// Status of the job, whole.
fn answer(status: &watch::Receiver<Status>, facts: &Mutex<Value>, began: Instant) -> Value {
    let mut value = match facts.lock() {
        Ok(facts) => facts.clone(),
        Err(poisoned) => poisoned.into_inner().clone(),
    };
    let known = status.borrow().clone();
    if let (Some(into), Value::Object(more)) = (value.as_object_mut(), control::status(&known)) {
        into.extend(more);
    }
    value["uptime_ms"] = (began.elapsed().as_millis() as u64).into();
    // The runner's own knowledge of the last launch is ahead of the status, which comes every now and then.
    let placement: Vec<u64> =
        value["placement"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let nodes: BTreeMap<u64, u32> = placement.iter().copied().zip(0..).collect();
    let living = value["agents"].as_array().into_iter().flatten().filter(|a| a["alive"] == true);
    let living = living.filter_map(|a| i32::try_from(a["pid"].as_i64()?).ok()).collect();
    let slots = placement.len() as u32;
    let mut of_slot: BTreeMap<u32, Vec<Value>> = BTreeMap::new();
    for (rank, pid) in control::ranks(&living) {
        // Which node a rank is on is known as soon as all have come.
        if let Some(ranks) = known.ranks.filter(|ranks| rank < *ranks && slots > 0) {
            let slot = block_slot(rank, ranks, slots);
            of_slot.entry(slot.0).or_default().push(json!({"rank": rank, "pid": pid}));
        }
    }
    for agent in value["agents"].as_array_mut().into_iter().flatten() {
        let node = agent["id"].as_u64().and_then(|id| nodes.get(&id)).copied();
        agent["node"] = node.into();
        agent["ranks"] = node.and_then(|n| of_slot.remove(&n)).unwrap_or_default().into();
    }
    value
}
