//! Where a job's sockets, logs and caches are, who of the job still lives, and how nothing of it is left.
//!
//! ```text
//! RUN_DIR/stanchion-UID/                 0700, ours; locked while a job's directory is made or removed
//!   NAME.TAG/                            one job
//!     job.json                           what it is (JobInfo)
//!     runner.lock, runner.sock           the runner holds the lock as long as it lives
//!     nK/lock, nK/...                    agent K holds the lock; its socket and log
//! CACHE_DIR/stanchion-UID-TAG/nK/        agent K's cache
//! ```
//! A lock ends with its process, however that ends: nobody has to trust process numbers.

use crate::exit::{Exit, Failed, OrExit};
use anyhow::{Context, anyhow};
use rustix::fs::Mode;
use rustix::process::getuid;
use serde::{Deserialize, Serialize};
use stanchion_format::config::Settings;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Longest path of a socket: sun_path has 108 bytes, with its NUL, on Linux.
const SOCKET_PATH_BYTES_MAX: usize = 100;
/// The longest socket path below a job's directory.
const LONGEST_SOCKET: &str = "/n131071/agent.sock";
/// What of a job's name goes into its directory's.
const NAME_CHARS_MAX: usize = 16;
/// How often an agent finds its lock in somebody's hands, at most.
const LOOKERS_MAX: u32 = 100;
/// job.json is ours and small.
const INFO_BYTES_MAX: u64 = 1 << 20;

/// What a job is, for `status` and for who cleans up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobInfo {
    /// Its name.
    pub name: String,
    /// The runner's process.
    pub pid: u32,
    /// The prefix.
    pub prefix: PathBuf,
    /// The directory of all caches of the job on this machine.
    pub caches: PathBuf,
    /// The launch command, for people.
    pub command: Vec<String>,
    /// Nodes.
    pub nodes: u32,
    /// Spares.
    pub spares: u32,
    /// When it was started, seconds since 1970.
    pub started_unix_s: u64,
}

/// A job's directory, held by its runner.
#[derive(Debug)]
pub struct JobDir {
    path: PathBuf,
    info: JobInfo,
    _lock: File,
}

/// A job's directory as others see it.
#[derive(Debug)]
pub struct Found {
    /// Where.
    pub path: PathBuf,
    /// What.
    pub info: Option<JobInfo>,
    /// Its runner lives.
    pub runner: bool,
    /// Its agents that live.
    pub agents: Vec<u32>,
}

impl Found {
    /// Somebody of the job lives.
    pub fn alive(&self) -> bool {
        self.runner || !self.agents.is_empty()
    }
}

/// `RUN_DIR/stanchion-UID`, whether it is there or not.
pub fn base(settings: &Settings) -> PathBuf {
    let set = settings.text("run_dir");
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|p| p.is_absolute() && p.is_dir());
    let dir = if set.is_empty() { runtime.unwrap_or_else(|| "/tmp".into()) } else { set.into() };
    dir.join(format!("stanchion-{}", getuid().as_raw()))
}

/// Makes the directory with mode 0700 or checks that it is ours alone (FM-C2).
fn private_dir(path: &Path) -> anyhow::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e).with_context(|| format!("{} cannot be made", path.display())),
    }
    let meta = std::fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
    if !meta.is_dir() {
        return Err(anyhow!("{} is no directory", path.display()));
    }
    if meta.uid() != getuid().as_raw() {
        return Err(anyhow!("{} belongs to another user (uid {})", path.display(), meta.uid()));
    }
    if meta.mode() & 0o077 != 0 {
        rustix::fs::chmod(path, Mode::RWXU)
            .with_context(|| format!("{} is open to others", path.display()))?;
    }
    Ok(())
}

fn lock_file(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Is somebody else holding this lock? A lock that is not there is held by nobody.
fn held(path: &Path) -> bool {
    // Shared, so that two who look do not take each other for the holder; given back with the file.
    let taken = File::open(path).map(|f| f.try_lock_shared());
    matches!(taken, Ok(Err(TryLockError::WouldBlock)))
}

/// Locks `base` while a job's directory is made or removed in it. The directory itself is the lock: nothing
/// is left behind.
fn base_lock(base: &Path) -> std::io::Result<File> {
    loop {
        let dir = File::open(base)?;
        dir.lock()?;
        // Whoever held it may have removed it.
        let (ours, there) = (dir.metadata()?, std::fs::metadata(base)?);
        if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
            return Ok(dir);
        }
    }
}

/// Letters, digits, `-`, `_` of a name.
fn short(name: &str) -> String {
    let good: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-' || *c == '_')
        .take(NAME_CHARS_MAX)
        .collect();
    if good.is_empty() { "job".into() } else { good }
}

impl JobDir {
    /// Makes a job's directory and takes its lock. `info.caches` is set here.
    pub fn create(base: &Path, cache_dir: &Path, mut info: JobInfo) -> Result<JobDir, Failed> {
        let mut random = [0u8; 6];
        getrandom::fill(&mut random).map_err(|e| anyhow!("no random numbers: {e}"))?;
        let tag: String = random.iter().map(|b| format!("{b:02x}")).collect();
        let path = base.join(format!("{}.{tag}", short(&info.name)));
        let longest = path.as_os_str().len() + LONGEST_SOCKET.len();
        if longest > SOCKET_PATH_BYTES_MAX {
            let excess = longest - SOCKET_PATH_BYTES_MAX;
            let text = format!(
                "the run directory {} is {excess} bytes too long for sockets; set run_dir to a shorter one",
                base.display()
            );
            return Err(Failed::new(Exit::Usage, anyhow!(text)));
        }
        info.caches = cache_dir.join(format!("stanchion-{}-{tag}", getuid().as_raw()));
        let unusable =
            || format!("the run directory {} cannot be used (setting run_dir)", base.display());
        let lock = JobDir::populate(base, &path, &info);
        let lock = lock.inspect_err(|_| {
            let _best_effort = std::fs::remove_dir_all(&path);
        });
        let lock = lock.with_context(unusable).or_exit(Exit::Storage)?;
        let job = JobDir { path, info, _lock: lock };
        private_dir(&job.info.caches)
            .with_context(|| {
                format!(
                    "the cache directory {} cannot be used (setting cache_dir)",
                    cache_dir.display()
                )
            })
            .inspect_err(|_| job.remove())
            .or_exit(Exit::Storage)?;
        Ok(job)
    }

    fn populate(base: &Path, path: &Path, info: &JobInfo) -> anyhow::Result<File> {
        let _base = loop {
            private_dir(base)?;
            match base_lock(base) {
                // Removed by the last job that ended.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                locked => break locked?,
            }
        };
        std::fs::DirBuilder::new().mode(0o700).create(path)?;
        let lock = lock_file(&path.join("runner.lock"))?;
        lock.lock()?;
        std::fs::write(path.join("job.json"), serde_json::to_vec_pretty(info)?)?;
        Ok(lock)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the job is.
    pub fn info(&self) -> &JobInfo {
        &self.info
    }

    /// Agent `k`'s directory.
    pub fn node(&self, k: u32) -> PathBuf {
        self.path.join(format!("n{k}"))
    }

    /// Agent `k`'s cache.
    pub fn cache(&self, k: u32) -> PathBuf {
        self.info.caches.join(format!("n{k}"))
    }

    /// The status socket.
    pub fn socket(&self) -> PathBuf {
        self.path.join("runner.sock")
    }

    /// Makes agent `k`'s directory.
    pub fn make_node(&self, k: u32) -> anyhow::Result<PathBuf> {
        let node = self.node(k);
        private_dir(&node)?;
        Ok(node)
    }

    /// Removes everything of the job: caches first, so that a failure in between leaves the trace that
    /// [`sweep`] needs.
    pub fn remove(&self) {
        let base = self.path.parent().unwrap_or(Path::new("/"));
        let _base = base_lock(base);
        remove(&self.path, Some(&self.info));
        let _others_are_there = std::fs::remove_dir(base);
    }
}

/// The cache directory of a job, if `info` tells one of ours: removal believes no other.
fn own_caches<'a>(path: &Path, info: &'a JobInfo) -> Option<&'a Path> {
    let tag = path.file_name()?.to_str()?.rsplit_once('.')?.1;
    let name = info.caches.file_name()?.to_str()?;
    (name == format!("stanchion-{}-{tag}", getuid().as_raw())).then_some(&info.caches)
}

fn remove(path: &Path, info: Option<&JobInfo>) {
    for dir in info.and_then(|info| own_caches(path, info)).into_iter().chain([path]) {
        match std::fs::remove_dir_all(dir) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                crate::out::say(&format!("warning: {} could not be removed: {e}", dir.display()));
                return;
            }
            _ => {}
        }
    }
}

fn read_info(path: &Path) -> Option<JobInfo> {
    let mut bytes = Vec::new();
    File::open(path.join("job.json")).ok()?.take(INFO_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

fn look(path: PathBuf) -> Found {
    let mut agents: Vec<u32> = std::fs::read_dir(&path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix('n')?.parse().ok())
        .filter(|k| held(&path.join(format!("n{k}/lock"))))
        .collect();
    agents.sort_unstable();
    Found { info: read_info(&path), runner: held(&path.join("runner.lock")), agents, path }
}

/// All jobs of this user below `base`.
pub fn all(base: &Path) -> Vec<Found> {
    // A directory of somebody else tells nothing that may be believed.
    if !std::fs::symlink_metadata(base).is_ok_and(|m| m.is_dir() && m.uid() == getuid().as_raw()) {
        return Vec::new();
    }
    let mut paths: Vec<PathBuf> = std::fs::read_dir(base)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths.into_iter().map(look).collect()
}

/// The caches of a job's nodes, by number.
pub fn node_caches(found: &Found) -> Vec<PathBuf> {
    let own = found.info.as_ref().and_then(|info| own_caches(&found.path, info));
    own.map_or_else(Vec::new, nodes_below)
}

/// The directories `nK` in this one, by number; none where there is something else of that name.
pub fn nodes_below(caches: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(caches).into_iter().flatten().flatten();
    let number =
        |e: &std::fs::DirEntry| e.file_name().to_str()?.strip_prefix('n')?.parse::<u32>().ok();
    let mut nodes: Vec<(u32, PathBuf)> = entries
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|e| Some((number(&e)?, e.path())))
        .collect();
    nodes.sort();
    nodes.into_iter().map(|(_, path)| path).collect()
}

/// Takes a dead job for this process: as long as the lock is held nobody sweeps it. `None` if it is not dead.
pub fn hold(found: &Found) -> Option<File> {
    let _base = base_lock(found.path.parent()?).ok()?;
    let lock = lock_file(&found.path.join("runner.lock")).ok()?;
    lock.try_lock().ok()?;
    look(found.path.clone()).agents.is_empty().then_some(lock)
}

/// Removes what a dead job left.
pub fn discard(found: &Found) {
    let base = found.path.parent().unwrap_or(Path::new("/"));
    let _base = base_lock(base);
    remove(&found.path, found.info.as_ref());
    let _others_are_there = std::fs::remove_dir(base);
}

/// Ends what jobs left behind whose runner and agents are all dead, and removes it but for what `keep` says of them. Returns
/// how many are removed, and who is kept.
pub fn sweep(base: &Path, keep: impl FnOnce(&[Found]) -> BTreeSet<PathBuf>) -> (usize, Vec<Found>) {
    let Ok(_lock) = base_lock(base) else { return (0, Vec::new()) };
    let dead: Vec<Found> = all(base).into_iter().filter(|f| !f.alive()).collect();
    for found in &dead {
        crate::procs::end_application(&found.path, std::time::Duration::ZERO);
    }
    let kept = keep(&dead);
    let (kept, gone): (Vec<Found>, Vec<Found>) =
        dead.into_iter().partition(|f| kept.contains(&f.path));
    for found in &gone {
        remove(&found.path, found.info.as_ref());
    }
    let _others_are_there = std::fs::remove_dir(base);
    (gone.len(), kept)
}

/// An agent's part: its lock, and its leaving.
#[derive(Debug)]
pub struct NodeDir {
    path: PathBuf,
    lock: File,
}

impl NodeDir {
    /// Takes the lock of the agent whose directory this is.
    pub fn enter(path: &Path) -> anyhow::Result<NodeDir> {
        let lock = lock_file(&path.join("lock")).with_context(|| path.display().to_string())?;
        // Who looks whether an agent lives holds its lock for a moment.
        for _ in 0..LOOKERS_MAX {
            match lock.try_lock() {
                Ok(()) => return Ok(NodeDir { path: path.to_owned(), lock }),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(std::time::Duration::from_millis(10))
                }
                Err(TryLockError::Error(e)) => {
                    return Err(e).with_context(|| path.display().to_string());
                }
            }
        }
        Err(anyhow!("{} is another agent's", path.display()))
    }

    /// Removes the agent's directory; where the runner is gone, the last agent removes the job's.
    pub fn leave(self) {
        let NodeDir { path, lock } = self;
        let Some((job, base)) = path.parent().and_then(|job| Some((job, job.parent()?))) else {
            return;
        };
        let Ok(_base) = base_lock(base) else { return };
        // The runner looks at the log of an agent that failed, and removes all of it.
        if held(&job.join("runner.lock")) {
            return;
        }
        drop(lock);
        let found = look(job.to_owned());
        if found.alive() {
            let _next_sweep_does_it = std::fs::remove_dir_all(&path);
        } else {
            remove(&found.path, found.info.as_ref());
            let _others_are_there = std::fs::remove_dir(base);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> JobInfo {
        JobInfo {
            name: "my job/../x".into(),
            pid: std::process::id(),
            prefix: "/".into(),
            caches: PathBuf::new(),
            command: vec![],
            nodes: 2,
            spares: 0,
            started_unix_s: 0,
        }
    }

    fn no_forks() -> std::sync::RwLockReadGuard<'static, ()> {
        crate::procs::FORKS.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[test]
    fn the_dead_are_swept_and_the_living_are_not() {
        let _no_forks = no_forks();
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("b");
        let dead = JobDir::create(&base, dir.path(), info()).unwrap();
        let caches = dead.info().caches.clone();
        let (dead_path, living) =
            (dead.path.clone(), JobDir::create(&base, dir.path(), info()).unwrap());
        assert!(dead_path.file_name().unwrap().to_str().unwrap().starts_with("myjobx."));
        assert_eq!(std::fs::metadata(&dead_path).unwrap().mode() & 0o777, 0o700);
        // Its runner is gone, one of its agents is not.
        let node = NodeDir::enter(&dead.make_node(1).unwrap()).unwrap();
        drop(dead);
        assert_eq!(sweep(&base, |_| BTreeSet::new()).0, 0);
        assert!(all(&base).iter().any(|f| f.path == dead_path && !f.runner && f.agents == [1]));
        drop(node);
        // Who has something to save stays, until somebody took it.
        let (swept, kept) = sweep(&base, |dead| dead.iter().map(|f| f.path.clone()).collect());
        assert!(swept == 0 && kept[0].path == dead_path && caches.exists());
        let held = hold(&kept[0]).unwrap();
        assert!(hold(&kept[0]).is_none());
        assert_eq!(sweep(&base, |_| BTreeSet::new()).0, 0);
        drop(held);
        assert_eq!(sweep(&base, |_| BTreeSet::new()).0, 1);
        assert!(!dead_path.exists() && !caches.exists());
        assert!(living.path().exists() && living.info().caches.exists());
        living.remove();
        assert_eq!(all(&base).len(), 0);
    }

    #[test]
    fn the_last_agent_of_a_lost_runner_removes_all() {
        let _no_forks = no_forks();
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("b");
        let job = JobDir::create(&base, dir.path(), info()).unwrap();
        let path = job.path().to_owned();
        let caches = job.info().caches.clone();
        let nodes: Vec<NodeDir> =
            (0..3).map(|k| NodeDir::enter(&job.make_node(k).unwrap()).unwrap()).collect();
        let mut nodes = nodes.into_iter();
        // Killed: it removes nothing itself.
        drop(nodes.next());
        drop(job);
        nodes.next().unwrap().leave();
        assert!(path.exists() && path.join("n2").exists() && !path.join("n1").exists());
        nodes.next().unwrap().leave();
        assert!(!path.exists() && !caches.exists());
    }

    #[test]
    fn caches_of_others_are_never_removed() {
        let _no_forks = no_forks();
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("b");
        let job = JobDir::create(&base, dir.path(), info()).unwrap();
        let precious = dir.path().join("precious");
        std::fs::create_dir(&precious).unwrap();
        let mut lie = info();
        lie.caches = precious.clone();
        std::fs::write(job.path().join("job.json"), serde_json::to_vec(&lie).unwrap()).unwrap();
        drop(job);
        assert_eq!(sweep(&base, |_| BTreeSet::new()).0, 1);
        assert!(precious.exists());
    }

    #[test]
    fn a_run_directory_that_is_too_long_or_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let failed =
            JobDir::create(&dir.path().join("x".repeat(90)), dir.path(), info()).unwrap_err();
        assert_eq!(failed.exit, Exit::Usage);
        std::fs::write(dir.path().join("b"), "").unwrap();
        let failed = JobDir::create(&dir.path().join("b"), dir.path(), info()).unwrap_err();
        assert_eq!(failed.exit, Exit::Storage);
    }
}
