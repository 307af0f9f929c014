//! An agent without a runner that wants to lead the others (FM-V3).
//!
//! That this agent has lost its runner does not say that the runner is lost: it may have given this agent up,
//! or be cut off from it. Taking an epoch then would end a job that lives (FM-S11). So first the lease
//! in the prefix must be nobody's: absent, of a process of this machine that ended, or not renewed for long. A
//! lease that goes on being renewed says that somebody leads without this agent: it leaves.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use stanchion_core::api::{ControllerAction, ControllerEvent, Outcome};
use stanchion_format::index::LeaseFile;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::prefix::Prefix;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use crate::lead::{LEASE_EVERY, LeadConfig, host, lead, off_thread};

/// A lease that does not change for so long is nobody's. Seen by the change, not by its time: clocks differ.
const LEASE_STALE: Duration = LEASE_EVERY.saturating_mul(4);
/// A lease that changed so often is kept: who keeps it would have called, if it wanted this agent.
const RENEWALS_MAX: u32 = 6;
/// Pause between looks at the lease.
const LOOK: Duration = Duration::from_millis(500);
/// Failures in a row to read or write the prefix before the agent gives up, and the pause between.
const TRIES: u32 = 5;
const TRY_PAUSE: Duration = Duration::from_secs(2);
/// Longest wait for one such try.
const TRY_DEADLINE: Duration = Duration::from_secs(60);

/// Why an orphan leaves without having led.
#[derive(Debug, thiserror::Error)]
pub enum OrphanError {
    /// The right to decide cannot be taken; nothing was flushed.
    #[error("without a runner and without the prefix nothing can be flushed: {0}")]
    Prefix(Trouble),
    /// The lease is kept by somebody who does without this agent.
    #[error("epoch {} leads the job from process {} on {} without this agent", .0.epoch, .0.pid, .0.host.escape_debug())]
    Unwanted(Box<LeaseFile>),
}

/// How an orphan's wish to lead ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// It led.
    Led(Outcome),
    /// A controller spoke first.
    Heard,
}

/// Waits until nobody else leads, takes the right to decide and leads. `heard` is set when a controller
/// speaks to this agent. The outer world of orphans: agents end their own ranks, nobody can fence, and nobody
/// listens but the log.
pub async fn lead_orphans(
    mut config: LeadConfig,
    heard: Arc<AtomicBool>,
) -> Result<End, OrphanError> {
    if !lease_is_free(&config.prefix, &heard).await? {
        return Ok(End::Heard);
    }
    config.core.epoch = on_prefix(&config.prefix, Prefix::take_epoch).await?;
    info!(epoch = config.core.epoch.0, "leading the orphans");
    let (actions_to, actions) = mpsc::channel(64);
    let (events, events_from) = mpsc::channel(64);
    let led = tokio::join!(lead(config, actions_to, events_from), world(actions, events));
    Ok(End::Led(led.0))
}

async fn world(
    mut actions: mpsc::Receiver<ControllerAction>,
    events: mpsc::Sender<ControllerEvent>,
) {
    while let Some(action) = actions.recv().await {
        let event = match action {
            ControllerAction::StopApp => ControllerEvent::AppStopped,
            ControllerAction::Fence(agent) => ControllerEvent::AgentDown(agent),
            ControllerAction::LaunchApp { .. } => {
                error!("a bug: orphans launch nothing");
                ControllerEvent::AppExited { success: false, code: 1 }
            }
            ControllerAction::Say(severity, notice) => {
                info!(?severity, ?notice, "the orphans' controller");
                continue;
            }
            _ => continue,
        };
        if events.send(event).await.is_err() {
            return;
        }
    }
}

/// True when nobody keeps the lease any more, false when a controller spoke meanwhile.
async fn lease_is_free(prefix: &Path, heard: &AtomicBool) -> Result<bool, OrphanError> {
    let mut seen: Option<(LeaseFile, Instant)> = None;
    let mut renewals = 0;
    while !heard.load(Ordering::Relaxed) {
        let lease = on_prefix(prefix, |p| match p.read_lease() {
            // A torn lease is nobody's.
            Err(t) if matches!(t.cause, Cause::Malformed | Cause::Damaged) => Ok(None),
            other => other,
        });
        let Some(lease) = lease.await? else { return Ok(true) };
        if ended_here(&lease) {
            return Ok(true);
        }
        match &seen {
            Some((same, since)) if *same == lease => {
                if since.elapsed() >= LEASE_STALE {
                    return Ok(true);
                }
            }
            other => {
                renewals += u32::from(other.is_some());
                if renewals >= RENEWALS_MAX {
                    return Err(OrphanError::Unwanted(Box::new(lease)));
                }
                debug!(?lease, renewals, "somebody may still lead");
                seen = Some((lease, Instant::now()));
            }
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(false)
}

/// Was it written by a process of this machine that is gone? A zombie is gone as well: it writes no more.
fn ended_here(lease: &LeaseFile) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let pid = i32::try_from(lease.pid).ok().and_then(Pid::from_raw);
    let (true, Some(pid)) = (lease.host == host(), pid) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
        }
        Err(error) => error == rustix::io::Errno::SRCH,
    }
}

/// Does something with the prefix, several times if it fails, never waiting for ever.
async fn on_prefix<T: Send + 'static>(
    prefix: &Path,
    work: impl Fn(&Prefix) -> Result<T, Trouble> + Copy + Send + 'static,
) -> Result<T, OrphanError> {
    let mut tries = 0;
    loop {
        let root = prefix.to_owned();
        let done = off_thread(move || work(&Prefix::open(&root)?));
        let timeout = || Err(Trouble::new(Cause::Timeout));
        let done = tokio::time::timeout(TRY_DEADLINE, done).await;
        match done.unwrap_or_else(|_| Ok(timeout())).unwrap_or_else(|_| timeout()) {
            Ok(done) => return Ok(done),
            Err(trouble) => {
                tries += 1;
                warn!(%trouble, tries, "the prefix cannot be used");
                if tries == TRIES {
                    return Err(OrphanError::Prefix(trouble));
                }
            }
        }
        tokio::time::sleep(TRY_PAUSE).await;
    }
}
