//! An agent for each cache that is left, and a controller that winds them down.

use crate::agent::Options;
use crate::exit::Failed;
use crate::jobdir::JobDir;
use crate::run::agents::{self, Agents};
use crate::run::drive::Signals;
use crate::run::events::Reporter;
use anyhow::Context;
use rustix::process::{WaitOptions, wait};
use stanchion_agent::lead::{LeadConfig, lead};
use stanchion_agent::secret::Secret;
use stanchion_core::api::{ControllerAction, ControllerEvent, Outcome};
use stanchion_core::controller::{ControllerConfig, Status};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

/// Actions and events that wait for the other side.
const QUEUE: usize = 64;
/// How often is looked whether agents have ended.
const LOOK: Duration = Duration::from_millis(20);

struct Driver<'a> {
    agents: Agents,
    reporter: &'a mut Reporter,
    child: Signal,
    signals: Signals,
    news: VecDeque<ControllerEvent>,
    prefix: PathBuf,
}

/// Starts the agents, and leads them to the end. Nothing that is in the caches goes.
pub fn save(
    dir: &JobDir,
    core: ControllerConfig,
    caches: Vec<PathBuf>,
    reporter: &mut Reporter,
) -> Result<Outcome, Failed> {
    let secret = crate::run::secret()?;
    let options = Options {
        secret,
        id: 0,
        name: dir.info().name.clone(),
        job: core.job.0,
        prefix: dir.info().prefix.clone(),
        cache: PathBuf::new(),
        adopt: true,
        root: PathBuf::new(),
        agents_here: core.agents,
        settings: core.settings.pairs(),
    };
    let millis = |name: &str| Duration::from_millis(core.settings.number(name));
    let (start, limit) = (millis("start_timeout_ms"), millis("shutdown_timeout_ms"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let mut driver = Driver {
            agents: Agents::default(),
            reporter,
            child: signal(SignalKind::child()).context("signals")?,
            signals: Signals::new().context("signals")?,
            news: VecDeque::new(),
            prefix: dir.info().prefix.clone(),
        };
        let starting = agents::start(dir, caches, &options, start, &mut driver.agents);
        let started = tokio::select! {
            started = starting => Some(started),
            () = driver.signals.end() => None,
        };
        let result = match started {
            Some(Ok(())) => driver.lead(core, Arc::new(Secret::new(secret))).await,
            Some(Err(failed)) => Err(failed),
            None => Ok(Outcome::Interrupted),
        };
        let force = !matches!(&result, Ok(outcome) if *outcome != Outcome::Interrupted);
        driver.wind_down(force, limit).await;
        result
    });
    // A thread that hangs in a file system is not waited for.
    runtime.shutdown_background();
    result
}

impl Driver<'_> {
    async fn lead(
        &mut self,
        core: ControllerConfig,
        secret: Arc<Secret>,
    ) -> Result<Outcome, Failed> {
        let config = LeadConfig {
            core,
            agents: self.agents.addresses(),
            secret,
            prefix: self.prefix.clone(),
            role: "scavenge",
            status: watch::Sender::new(Status::default()),
        };
        let (actions_in, mut actions) = mpsc::channel(QUEUE);
        let (events, events_out) = mpsc::channel(QUEUE);
        let led = lead(config, actions_in, events_out);
        tokio::pin!(led);
        let outcome = loop {
            tokio::select! {
                // In this order: a dead child before what follows from it.
                biased;
                _ = self.child.recv() => self.reap(),
                // Nothing is lost by it: what is left stays as it is.
                () = self.signals.end() => return Ok(Outcome::Interrupted),
                Some(action) = actions.recv() => self.act(action),
                permit = events.reserve(), if !self.news.is_empty() => {
                    if let (Ok(permit), Some(event)) = (permit, self.news.pop_front()) {
                        permit.send(event);
                    }
                }
                outcome = &mut led => break outcome,
            }
        };
        while let Ok(action) = actions.try_recv() {
            self.act(action);
        }
        Ok(outcome)
    }

    fn act(&mut self, action: ControllerAction) {
        match action {
            ControllerAction::StopApp => self.news.push_back(ControllerEvent::AppStopped),
            ControllerAction::Fence(id) => self.agents.get(id).into_iter().for_each(|a| a.kill()),
            ControllerAction::Say(severity, notice) => self.reporter.notice(severity, &notice),
            // There is no application, and the lead does the rest.
            _ => {}
        }
    }

    fn reap(&mut self) {
        while let Ok(Some((pid, _))) = wait(WaitOptions::NOHANG) {
            if let Some(id) = self.agents.reaped(pid) {
                self.news.push_back(ControllerEvent::AgentDown(id));
            }
        }
    }

    /// Agents end by themselves, then by force.
    async fn wind_down(&mut self, force: bool, limit: Duration) {
        if force {
            self.agents.kill_all();
        }
        for _ in 0..2 {
            let ended = async {
                loop {
                    self.reap();
                    if self.agents.pids().is_empty() {
                        return;
                    }
                    tokio::select! {
                        _ = self.child.recv() => {}
                        () = tokio::time::sleep(LOOK) => {}
                    }
                }
            };
            if tokio::time::timeout(limit, ended).await.is_ok() {
                return;
            }
            self.agents.kill_all();
        }
    }
}
