//! One job at a time uses a prefix (FM-C5): waiting for others to leave, and saying that we are here. The
//! lease is kept and given back by `stanchion_agent::lead`.

use crate::exit::{Exit, Failed};
use crate::{jobdir, out, prefix as tools};
use anyhow::anyhow;
use stanchion_format::ids::Epoch;
use stanchion_format::index::{HaltFile, LeaseFile};
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::prefix::Prefix;
use std::fs::{File, TryLockError};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A lease that does not change for so long has no holder any more: it is written every 5 s. Seen by the
/// change, not by its time: clocks differ.
const SILENT: Duration = Duration::from_secs(16);
/// Unless its time is so old that no clock is that wrong.
const OLD_S: u64 = 24 * 3600;
/// How often the halt file is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often a waiting run looks again.
const RETRY: Duration = Duration::from_millis(200);

/// Where we are.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Waits until nobody uses the prefix, at most `wait`, and takes it with a new epoch. `base`: where this user's jobs are;
/// `role`: the lease's word for us.
pub fn take(prefix: &Prefix, base: &Path, wait: Duration, role: &str) -> Result<Epoch, Failed> {
    let unusable = |t: Trouble| tools::unusable(prefix.root(), &t);
    let begin = Instant::now();
    // Two that start at once: one looks and takes, then the other looks. Where the file system has no
    // locks, the epoch still decides, only less politely.
    let _turn = turn(prefix, begin, wait)?;
    let mut said = false;
    let mut seen: Option<(LeaseFile, Instant)> = None;
    loop {
        let lease = prefix.read_lease().or_else(|t| match t.cause {
            // A torn lease is nobody's.
            Cause::Malformed | Cause::Damaged => Ok(None),
            _ => Err(unusable(t)),
        })?;
        if seen.as_ref().map(|(l, _)| l) != lease.as_ref() {
            seen = lease.clone().map(|l| (l, Instant::now()));
        }
        let Some(user) = user(prefix.root(), base, seen.as_ref()) else { break };
        if begin.elapsed() >= wait {
            let text = format!(
                "{user} uses the prefix {} and did not leave within {}; end it (`stanchion halt`), wait, or raise \
                 lease_wait_ms",
                prefix.root().display(),
                out::millis(wait.as_millis() as u64)
            );
            return Err(Failed::new(Exit::PrefixInUse, anyhow!(text)));
        }
        if !said {
            let longest = out::millis(wait.as_millis() as u64);
            out::say(&format!(
                "{user} uses the prefix; waiting for it to leave, at most {longest}"
            ));
            said = true;
        }
        std::thread::sleep(RETRY.min(wait));
    }
    let epoch = prefix.take_epoch().map_err(unusable)?;
    let ours = LeaseFile {
        epoch,
        host: host(),
        pid: std::process::id(),
        unix_s: out::unix_s(),
        role: role.into(),
    };
    prefix.write_lease(&ours).map_err(unusable)?;
    tidy(prefix, epoch);
    Ok(epoch)
}

/// Completes what runs that died left half-flushed, where that can be (FM-L3), and removes the rest. Neither is in
/// anybody's way: no reason to stop.
fn tidy(prefix: &Prefix, epoch: Epoch) {
    let dir = prefix.root().join(stanchion_format::index::DIR);
    let done = prefix.flush_complete(epoch).and_then(|completed| {
        for key in completed {
            out::say(&format!(
                "dataset number {} was being written to the prefix when the run before ended: it is complete now",
                key.no
            ));
        }
        prefix.sweep(&[])
    });
    if let Err(trouble) = done {
        out::say(&format!(
            "what earlier runs left half-written in {} stays there: {trouble}; the next run tries again",
            dir.display()
        ));
    }
}

/// Our turn to look and take; given back with the file.
fn turn(prefix: &Prefix, begin: Instant, wait: Duration) -> Result<Option<File>, Failed> {
    let path = prefix.root().join(stanchion_format::index::DIR).join("job");
    let Ok(file) = File::open(path) else { return Ok(None) };
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(_)) => return Ok(None),
            Err(TryLockError::WouldBlock) if begin.elapsed() >= wait => {
                let text = format!(
                    "another run is just starting with the prefix {}",
                    prefix.root().display()
                );
                return Err(Failed::new(Exit::PrefixInUse, anyhow!(text)));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(RETRY.min(wait)),
        }
    }
}

/// Who uses the prefix, in words; `None` if it is free. `seen`: the lease, and since when it is as it is.
fn user(root: &Path, base: &Path, seen: Option<&(LeaseFile, Instant)>) -> Option<String> {
    // Of our own jobs on this machine we know for certain.
    let jobs = jobdir::all(base);
    let here =
        jobs.iter().find(|f| f.alive() && f.info.as_ref().is_some_and(|info| info.prefix == root));
    if let Some(found) = here {
        let name = found.info.as_ref().map_or("?", |info| info.name.as_str());
        let name = stanchion_format::config::Shown::new(name);
        return Some(match found.runner {
            true => format!("the job '{name}' in {}", found.path.display()),
            false => format!("the lost job '{name}' (its agents write its newest checkpoint)"),
        });
    }
    let (lease, since) = seen?;
    let fresh = since.elapsed() < SILENT && out::unix_s().abs_diff(lease.unix_s) < OLD_S;
    let gone = lease.host == host() && crate::procs::look(lease.pid as i32).is_none();
    (fresh && !gone).then(|| tools::holder(lease))
}

/// Looks for wishes to halt on a thread of its own: a file system that hangs must not stop the runner.
/// Ends when the receiver is dropped; nobody waits for it.
pub fn watch_halt(
    prefix: Arc<Prefix>,
    mut halt: HaltFile,
    tell: tokio::sync::mpsc::UnboundedSender<HaltFile>,
) -> std::io::Result<()> {
    std::thread::Builder::new().name("stn-halt".into()).spawn(move || {
        while !tell.is_closed() {
            std::thread::sleep(LOOK);
            // A file that cannot be read now says nothing new.
            let Ok(now) = prefix.read_halt().map(Option::unwrap_or_default) else { continue };
            if now != halt {
                halt = now.clone();
                if tell.send(now).is_err() {
                    return;
                }
            }
        }
    })?;
    Ok(())
}
