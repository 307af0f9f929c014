//! Processes as /proc shows them: who descends from whom, who belongs to a job, and ending them without
//! ever hitting another process that got the same number.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

/// `/proc/PID/environ` is read up to here; ours stands in the part that the kernel copied at exec.
const ENVIRON_BYTES_MAX: u64 = 4 << 20;

/// How often is looked whether an orphaned application has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Rounds of killing: who forks while it is killed is found in the next.
const KILL_ROUNDS: u32 = 100;

/// A process, told from later ones of the same number by its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proc {
    /// Its number.
    pub pid: i32,
    /// Its parent's.
    pub ppid: i32,
    /// When it started, clock ticks since boot.
    pub start: u64,
    /// It has ended and waits to be reaped.
    pub zombie: bool,
}

/// What /proc says of one process; `None` if it is gone.
pub fn look(pid: i32) -> Option<Proc> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&stat)
}

/// proc(5): `pid (comm) state ppid ... starttime` with starttime the 22nd field. comm may hold anything,
/// even `)`, hence the last one counts.
fn parse_stat(stat: &[u8]) -> Option<Proc> {
    let close = stat.iter().rposition(|b| *b == b')')?;
    let pid = std::str::from_utf8(stat.split(|b| *b == b' ').next()?).ok()?.parse().ok()?;
    let rest: Vec<&str> =
        std::str::from_utf8(stat.get(close + 1..)?).ok()?.split_ascii_whitespace().collect();
    Some(Proc {
        pid,
        ppid: rest.get(1)?.parse().ok()?,
        start: rest.get(19)?.parse().ok()?,
        zombie: matches!(*rest.first()?, "Z" | "X" | "x"),
    })
}

/// All processes now, as far as they can be seen.
fn all() -> Vec<Proc> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(look)
        .collect()
}

/// Living descendants of `root`, without `except` and what descends from these.
pub fn descendants(root: i32, except: &BTreeSet<i32>) -> Vec<Proc> {
    let all = all();
    let mut family = BTreeSet::from([root]);
    // A child may be listed before its parent: repeat until nobody joins.
    loop {
        let before = family.len();
        for p in &all {
            if family.contains(&p.ppid) && !except.contains(&p.pid) {
                family.insert(p.pid);
            }
        }
        if family.len() == before {
            break;
        }
    }
    all.into_iter().filter(|p| p.pid != root && family.contains(&p.pid) && !p.zombie).collect()
}

/// Living processes of this user that were started with `variable` (`NAME=value`) in their environment.
pub fn with_environment(variable: &str) -> Vec<Proc> {
    let own = std::process::id() as i32;
    all()
        .into_iter()
        .filter(|p| p.pid != own && !p.zombie && environment_has(p.pid, variable.as_bytes()))
        .collect()
}

fn environment(pid: i32) -> Vec<u8> {
    let Ok(file) = std::fs::File::open(format!("/proc/{pid}/environ")) else { return Vec::new() };
    let mut bytes = Vec::new();
    // A process that ends meanwhile reads as an error; it is nobody's then.
    match file.take(ENVIRON_BYTES_MAX).read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}

fn environment_has(pid: i32, variable: &[u8]) -> bool {
    environment(pid).split(|b| *b == 0).any(|v| v == variable)
}

/// The value of a variable with which a process was started.
pub fn environment_value(pid: i32, name: &str) -> Option<String> {
    let all = environment(pid);
    let value =
        all.split(|b| *b == 0).find_map(|v| v.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

/// Do both run the same command? So does who was forked and has not become another program.
pub fn same_command(a: i32, b: i32) -> bool {
    let exe = |pid| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let line = |pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok();
    exe(a).is_some() && exe(a) == exe(b) && line(a) == line(b)
}

/// Sends `signal` to exactly this process; false if it is gone.
pub fn signal(target: Proc, signal: Signal) -> bool {
    let Some(pid) = Pid::from_raw(target.pid) else { return false };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    // From here on the pidfd names one process; is it the one that was meant?
    look(target.pid).is_some_and(|now| now.start == target.start)
        && pidfd_send_signal(pidfd, signal).is_ok()
}

/// Ends what of a job's application is left on this machine when its runner is gone: by SIGKILL after
/// `grace`. Returns when nobody is left, or nobody that can be killed.
pub fn end_application(job_dir: &Path, grace: Duration) {
    let mark = format!("STANCHION_JOB_DIR={}", job_dir.display());
    let begin = Instant::now();
    let mut rounds = 0;
    while rounds < KILL_ROUNDS {
        let left = with_environment(&mark);
        if left.is_empty() {
            return;
        }
        if begin.elapsed() >= grace {
            rounds += 1;
            for p in left {
                signal(p, Signal::KILL);
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// Between fork and exec a child holds the locks of its parent's files: tests that look at locks read this, a
/// test that forks writes it.
#[cfg(test)]
pub static FORKS: std::sync::RwLock<()> = std::sync::RwLock::new(());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_a_hostile_name() {
        let line = b"42 (a) S (1) R) Z 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 9999 0 0";
        assert_eq!(parse_stat(line), Some(Proc { pid: 42, ppid: 7, start: 9999, zombie: true }));
        for bad in [&b""[..], b"1 (", b"1 (x)", b"1 (x) S", b"x (x) S 1"] {
            assert_eq!(parse_stat(bad), None);
        }
    }

    #[test]
    fn sees_its_children_and_ends_them() {
        let _alone = FORKS.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let me = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .env("STANCHION_TEST_MARK", "procs")
            .spawn()
            .expect("sleep runs");
        let pid = child.id() as i32;
        let found = descendants(me, &BTreeSet::new());
        let this = *found.iter().find(|p| p.pid == pid).expect("the child is seen");
        assert!(descendants(me, &BTreeSet::from([pid])).iter().all(|p| p.pid != pid));
        assert!(with_environment("STANCHION_TEST_MARK=procs").iter().any(|p| p.pid == pid));
        assert!(
            !signal(Proc { start: this.start + 1, ..this }, Signal::KILL),
            "another process of that number"
        );
        assert!(signal(this, Signal::KILL));
        child.wait().expect("it ended");
        assert!(!signal(this, Signal::KILL));
    }
}
