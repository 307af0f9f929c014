//! Driving a controller: in the runner, or in an orphaned agent in its place (FM-V3).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use stanchion_core::api::{ControllerAction, ControllerEvent, Notice, Outcome};
use stanchion_core::controller::{Controller, ControllerConfig, Status};
use stanchion_format::ids::{AgentId, DatasetNo, Epoch, Key, PeerId};
use stanchion_format::index::LeaseFile;
use stanchion_format::peer::{AgentAddr, Cause, Severity, Trouble};
use stanchion_io::prefix::Prefix;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::link::{Credentials, LinkEvent, Links, Tuning};
use crate::mind::{Clock, ControllerMind, unix_s};
use crate::secret::Secret;

/// A `Tick` comes at least so often.
const TICK: Duration = Duration::from_millis(100);
/// The prefix's lease is written so often.
pub(crate) const LEASE_EVERY: Duration = Duration::from_secs(2);
/// Longest wait for the first one.
const FIRST_LEASE_DEADLINE: Duration = Duration::from_secs(10);
/// A prefix that does not answer for so long cannot be read.
const INDEX_DEADLINE: Duration = Duration::from_secs(120);
/// At the end: for agents to take their last message and hang up, and for the outer world to listen.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

/// What a lead needs.
#[derive(Debug)]
pub struct LeadConfig {
    /// For the controller.
    pub core: ControllerConfig,
    /// Agents that are there already; more may come as `ControllerEvent::AgentUp` from outside.
    pub agents: Vec<AgentAddr>,
    /// The job's secret.
    pub secret: Arc<Secret>,
    /// The persistent directory.
    pub prefix: PathBuf,
    /// The lease's word for who leads: `run` or `orphans`.
    pub role: &'static str,
    /// Where the status is shown, as of a tenth of a second ago.
    pub status: watch::Sender<Status>,
}

/// Leads agents until the controller says how it ended.
///
/// `actions` gets what concerns the outer world, in order: `LaunchApp`, `StopApp`, `Fence`, `Say`, `Exit`. What
/// happens there comes by `events`: `AgentUp` (an agent's address is known: it is called, and is up for the
/// controller when its link stands), `AgentDown` (its process ended), `AppExited`, `AppStopped`, `Interrupt`,
/// `Settings`. When either is closed the lead goes on alone.
pub async fn lead(
    config: LeadConfig,
    actions: mpsc::Sender<ControllerAction>,
    events: mpsc::Receiver<ControllerEvent>,
) -> Outcome {
    let core = config.core.clone();
    lead_with(config, |now| Controller::new(core, now), actions, events).await
}

/// The same with any mind.
pub async fn lead_with<M: ControllerMind>(
    config: LeadConfig,
    mind: impl FnOnce(stanchion_core::api::Now) -> M,
    actions: mpsc::Sender<ControllerAction>,
    mut outside: mpsc::Receiver<ControllerEvent>,
) -> Outcome {
    let LeadConfig { core, agents, secret, prefix, role, status } = config;
    let clock = Clock::new();
    let who = Credentials { me: PeerId::Controller, job: core.job, secret, encrypt: false };
    let silence = Duration::from_millis(core.settings.number("silence_timeout_ms"));
    let tuning = Tuning { silence: silence * 2, ..Tuning::default() };
    let (links, mut link_events) = Links::new(Arc::new(who), tuning);
    let (own, mut own_events) = mpsc::unbounded_channel();
    let (say, forward) = forward(actions);
    let mut lead = Lead {
        mind: mind(clock.now()),
        clock,
        links: links.clone(),
        known: HashMap::new(),
        up: HashSet::new(),
        dead: HashSet::new(),
        say,
        own,
        prefix: prefix.clone(),
        status,
    };
    let (stop_lease, mut lease, written) = keep_lease(prefix, core.epoch, role);
    let mut lease_kept = true;
    // Nothing is decided before others can see that somebody decides (FM-C5); but a prefix that does not
    // answer is no reason not to lead.
    if tokio::time::timeout(FIRST_LEASE_DEADLINE, written).await.is_err() {
        warn!("the prefix does not answer; leading without a lease");
    }
    let mut ended = None;
    for agent in agents {
        lead.outside(ControllerEvent::AgentUp(agent), &mut ended);
    }
    let mut tick = Instant::now();
    let mut outside_open = true;
    let outcome = loop {
        if let Some(outcome) = ended.take() {
            break outcome;
        }
        tokio::select! {
            Some(event) = link_events.recv() => lead.link(event, &mut ended),
            Some(event) = own_events.recv() => lead.step(event, &mut ended),
            event = outside.recv(), if outside_open => match event {
                Some(event) => lead.outside(event, &mut ended),
                None => outside_open = false,
            },
            higher = &mut lease, if lease_kept => {
                lease_kept = false;
                if let Ok(Some(epoch)) = higher {
                    break Outcome::Fenced(epoch);
                }
            }
            () = tokio::time::sleep_until(tick) => {
                tick = Instant::now() + TICK;
                lead.step(ControllerEvent::Tick, &mut ended);
                lead.status.send_replace(lead.mind.status());
            }
        }
    };
    debug!(?outcome, "leading ends");
    lead.status.send_replace(lead.mind.status());
    drop(stop_lease);
    links.close(&mut link_events, CLOSE_DEADLINE).await;
    drop(lead);
    if tokio::time::timeout(CLOSE_DEADLINE, forward).await.is_err() {
        debug!("nobody takes the last actions");
    }
    if lease_kept && tokio::time::timeout(CLOSE_DEADLINE, lease).await.is_err() {
        warn!("the prefix does not answer; its lease stays until it is too old");
    }
    outcome
}

struct Lead<M> {
    mind: M,
    clock: Clock,
    links: Links,
    known: HashMap<AgentId, AgentAddr>,
    up: HashSet<AgentId>,
    /// An agent that was declared dead stays so (FM-F2a).
    dead: HashSet<AgentId>,
    say: mpsc::UnboundedSender<ControllerAction>,
    own: mpsc::UnboundedSender<ControllerEvent>,
    prefix: PathBuf,
    status: watch::Sender<Status>,
}

impl<M: ControllerMind> Lead<M> {
    fn outside(&mut self, event: ControllerEvent, ended: &mut Option<Outcome>) {
        match event {
            // It is up when its link stands.
            ControllerEvent::AgentUp(agent) => {
                if !self.dead.contains(&agent.id) {
                    self.links.set_address(&agent);
                    self.links.connect(agent.id);
                    self.known.insert(agent.id, agent);
                }
            }
            ControllerEvent::AgentDown(id) => self.down(id, ended),
            event => self.step(event, ended),
        }
    }

    fn link(&mut self, event: LinkEvent, ended: &mut Option<Outcome>) {
        match event {
            LinkEvent::Up(PeerId::Agent(id)) if !self.dead.contains(&id) => {
                if self.up.insert(id)
                    && let Some(agent) = self.known.get(&id).cloned()
                {
                    self.step(ControllerEvent::AgentUp(agent), ended);
                }
            }
            LinkEvent::Message { from: PeerId::Agent(from), msg, .. }
                if !self.dead.contains(&from) =>
            {
                self.step(ControllerEvent::Message { from, msg }, ended);
            }
            LinkEvent::Down(PeerId::Agent(id)) => self.down(id, ended),
            // It may come back: core asks others about it before it is given up.
            LinkEvent::Silent(PeerId::Agent(id)) if !self.dead.contains(&id) => {
                debug!(agent = id.0, "an agent is silent; calling again");
                self.links.connect(id);
            }
            event => debug!(?event, "an event of a dead agent"),
        }
    }

    fn down(&mut self, id: AgentId, ended: &mut Option<Outcome>) {
        self.links.forget(PeerId::Agent(id));
        if self.dead.insert(id) {
            self.step(ControllerEvent::AgentDown(id), ended);
        }
    }

    fn step(&mut self, event: ControllerEvent, ended: &mut Option<Outcome>) {
        if ended.is_some() {
            return;
        }
        let mut seen = false;
        for action in self.mind.step(self.clock.now(), event) {
            match action {
                ControllerAction::Send { to, msg } => {
                    if !self.dead.contains(&to) {
                        self.links.send(PeerId::Agent(to), *msg);
                    }
                }
                ControllerAction::ReadIndex => self.read_index(),
                ControllerAction::Exit(outcome) => {
                    let _ = self.say.send(ControllerAction::Exit(outcome.clone()));
                    *ended = Some(outcome);
                    return;
                }
                action => {
                    let _ = self.say.send(action);
                    seen = true;
                }
            }
        }
        // Whoever hears of it finds the status up to date.
        if seen {
            self.status.send_replace(self.mind.status());
        }
    }

    fn read_index(&self) {
        let prefix = self.prefix.clone();
        let say = self.say.clone();
        let read = off_thread(move || read_index(&prefix, &say));
        let own = self.own.clone();
        tokio::spawn(async move {
            let timeout = || Err(Trouble::new(Cause::Timeout));
            let read = tokio::time::timeout(INDEX_DEADLINE, read).await;
            let event = match read.unwrap_or_else(|_| Ok(timeout())).unwrap_or_else(|_| timeout()) {
                Ok(records) => ControllerEvent::Index(records),
                Err(trouble) => ControllerEvent::IndexFailed(trouble),
            };
            let _ = own.send(event);
        });
    }
}

/// Reads the records; the user hears of those that cannot be used.
fn read_index(
    prefix: &Path,
    say: &mpsc::UnboundedSender<ControllerAction>,
) -> Result<Vec<stanchion_format::index::IndexRecord>, Trouble> {
    let (records, bad) = Prefix::open(prefix)?.read_index()?;
    for record in bad {
        warn!(file = record.file, trouble = %record.trouble, "a record of the index is left out");
        let name = record.file.rsplit('/').next().unwrap_or_default().to_owned();
        let no = name.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let key = Key { no: DatasetNo(no), ..Key::default() };
        let notice = Notice::Skipped { key, name, trouble: record.trouble };
        // Who does not listen any more does not miss it.
        let _ = say.send(ControllerAction::Say(Severity::Warn, notice));
    }
    Ok(records)
}

/// Runs what may hang in a file system on a thread that nobody waits for: tokio's own blocking threads
/// would keep the runtime from ending.
pub(crate) fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> oneshot::Receiver<T> {
    let (tell, told) = oneshot::channel();
    let spawned = std::thread::Builder::new().name("stn-prefix".into()).spawn(move || {
        // Nobody may wait for it any more.
        let _ = tell.send(work());
    });
    if let Err(error) = spawned {
        warn!(%error, "no thread for the prefix");
    }
    told
}

/// Hands actions on in order, however slowly they are taken: the lead itself never waits for the outer
/// world, which may be waiting for it.
fn forward(
    to: mpsc::Sender<ControllerAction>,
) -> (mpsc::UnboundedSender<ControllerAction>, tokio::task::JoinHandle<()>) {
    let (say, mut said) = mpsc::unbounded_channel();
    let task = tokio::spawn(async move {
        while let Some(action) = said.recv().await {
            if to.send(action).await.is_err() {
                return;
            }
        }
    });
    (say, task)
}

/// Keeps the lease on a thread of its own until the sender is dropped; then removes it. Gives the higher
/// epoch if there is one (FM-S11), and tells when it was written or failed for the first time.
fn keep_lease(
    prefix: PathBuf,
    epoch: Epoch,
    role: &'static str,
) -> (std::sync::mpsc::Sender<()>, oneshot::Receiver<Option<Epoch>>, oneshot::Receiver<()>) {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (tell, written) = oneshot::channel();
    let mut tell = Some(tell);
    let kept = off_thread(move || {
        let mut told = false;
        let host = host();
        let pid = std::process::id();
        loop {
            let (host, role) = (host.clone(), role.to_owned());
            let lease = LeaseFile { epoch, host, pid, unix_s: unix_s(), role };
            match renew(&prefix, &lease) {
                Ok(None) => told = false,
                Ok(Some(higher)) => return Some(higher),
                Err(trouble) if !std::mem::replace(&mut told, true) => {
                    warn!(%trouble, "the prefix's lease cannot be written");
                }
                Err(_) => {}
            }
            if let Some(tell) = tell.take() {
                // Nobody may wait for it any more.
                let _ = tell.send(());
            }
            if stopped.recv_timeout(LEASE_EVERY) != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
        if let Err(trouble) = give_back(&prefix, epoch) {
            debug!(%trouble, "the prefix's lease stays");
        }
        None
    });
    (stop, kept, written)
}

/// Where we are.
pub(crate) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Writes the lease, unless somebody has taken a higher epoch: then he decides, lease or not.
fn renew(prefix: &Path, lease: &LeaseFile) -> Result<Option<Epoch>, Trouble> {
    let prefix = Prefix::open(prefix)?;
    let newest = prefix.newest_epoch()?;
    if newest > lease.epoch {
        return Ok(Some(newest));
    }
    match prefix.write_lease(lease) {
        Err(trouble) if trouble.cause == Cause::Fenced => {
            Ok(prefix.read_lease()?.map(|there| there.epoch.max(lease.epoch)))
        }
        written => written.map(|()| None),
    }
}

/// Removes the lease if it is still ours.
fn give_back(prefix: &Path, epoch: Epoch) -> Result<(), Trouble> {
    let prefix = Prefix::open(prefix)?;
    if prefix.read_lease()?.is_some_and(|lease| lease.epoch == epoch) {
        prefix.remove_lease()?;
    }
    Ok(())
}
