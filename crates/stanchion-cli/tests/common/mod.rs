//! The real binary in scratch directories; prefixes made with stanchion-io.
#![allow(dead_code, reason = "each test file uses its part")]

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;
use stanchion_format::checksum::Crc;
use stanchion_format::ids::{Ancestry, DatasetNo, Epoch, Incarnation, Key, RankId, SlotId};
use stanchion_format::index::{INDEX_VERSION, IndexRecord, Layout};
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::{DatasetInfo, RankRange, Times};
use stanchion_io::cache::Cache;
use stanchion_io::prefix::Prefix;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// For everything that should take a second.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// No test of real processes takes so long: whatever it waits for never comes.
const TEST_LIMIT: Duration = Duration::from_secs(300);

/// Directories of one test. When it goes nothing that was started with them lives on, and a test that waits
/// for ever, in whatever call, ends its whole binary instead: a gate that hangs tells nobody why.
pub struct Scratch(tempfile::TempDir, std::sync::mpsc::Sender<()>);

impl Scratch {
    pub fn new() -> Scratch {
        // Sockets need short paths, wherever TMPDIR is.
        let dir = tempfile::Builder::new().prefix("stn").tempdir_in("/tmp").unwrap();
        for name in ["p", "c"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let path = dir.path().to_owned();
        let test = std::thread::current().name().unwrap_or("?").to_owned();
        let (alive, ended) = channel();
        std::thread::spawn(move || {
            if ended.recv_timeout(TEST_LIMIT) == Err(RecvTimeoutError::Timeout) {
                let left: Vec<_> = marked(&path).into_iter().map(|(_, command)| command).collect();
                eprintln!("test {test} hangs: FAILED; its processes: {left:#?}");
                kill_marked(&path);
                std::process::exit(101);
            }
        });
        Scratch(dir, alive)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn prefix(&self) -> PathBuf {
        self.path("p")
    }

    /// The binary, with the environment of nobody.
    pub fn stanchion(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stanchion"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("STANCHION_")
                || name.to_string_lossy().starts_with("SCR_")
            {
                command.env_remove(name);
            }
        }
        command.args(args).current_dir(self.prefix()).stdin(Stdio::null());
        command.env("STANCHION_RUN_DIR", self.0.path()).env("STANCHION_CACHE_DIR", self.path("c"));
        command
    }

    /// Runs it to its end.
    pub fn ends(&self, args: &[&str]) -> Ended {
        ended(self.stanchion(args))
    }

    /// `stanchion run` with a script for `sh` as its application, followed through its events.
    pub fn run(&self, args: &[&str], script: &str) -> Run {
        self.run_with(args, &["sh", "-c", script], |_| {})
    }

    pub fn run_with(
        &self,
        args: &[&str],
        command: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Run {
        let fifo = self.fifo("events");
        let mut all = vec!["run", "--json-events", fifo.to_str().unwrap()];
        all.extend(args);
        all.push("--");
        all.extend(command);
        let mut started = self.stanchion(&all);
        started.stdout(Stdio::piped()).stderr(Stdio::piped());
        change(&mut started);
        Run::new(started, fifo)
    }

    /// A named pipe: who opens it waits for the other side.
    pub fn fifo(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let _from_the_run_before = std::fs::remove_file(&path);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path
    }

    /// FM-V4: nothing of any job is left.
    pub fn nothing_left(&self) {
        let here =
            |name: &str| std::fs::read_dir(self.path(name)).unwrap().flatten().map(|e| e.path());
        let caches: Vec<PathBuf> = here("c").collect();
        assert!(caches.is_empty(), "caches are left: {caches:?}");
        let dirs: Vec<PathBuf> = here("")
            .filter(|p| p.file_name().unwrap().to_string_lossy().starts_with("stanchion-"))
            .collect();
        assert!(dirs.is_empty(), "job directories are left: {dirs:?}");
        assert!(!self.prefix().join(".stanchion/lease.json").exists(), "the lease is left");
        assert_eq!(self.processes(), Vec::<String>::new(), "processes are left");
    }

    /// Command lines of processes that have this directory in their environment.
    pub fn processes(&self) -> Vec<String> {
        marked(self.0.path()).into_iter().map(|(_, command)| command).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        kill_marked(self.0.path());
    }
}

/// Processes that have this directory in their environment.
fn marked(dir: &Path) -> Vec<(i32, String)> {
    let mark = dir.to_string_lossy().into_owned();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let read = |what: &str| {
            let bytes = std::fs::read(entry.path().join(what)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\0', " ")
        };
        if let Ok(pid) = entry.file_name().to_string_lossy().parse()
            && read("environ").contains(&mark)
            && !read("stat").contains(") Z ")
        {
            found.push((pid, read("cmdline")));
        }
    }
    found
}

fn kill_marked(dir: &Path) {
    for (pid, _) in marked(dir) {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        let _gone_is_fine = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    #[track_caller]
    pub fn code(self, code: i32) -> Ended {
        assert_eq!(self.code, Some(code), "{}\n{}", self.out, self.err);
        self
    }

    /// Its error names all of these.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Ended {
        for part in parts {
            assert!(self.err.contains(part), "'{part}' is not in: {}", self.err);
        }
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out)
            .unwrap_or_else(|e| panic!("{e}: {}\n{}", self.out, self.err))
    }
}

pub fn ended(mut command: Command) -> Ended {
    let out = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { code: out.status.code(), out: text(out.stdout), err: text(out.stderr) }
}

/// A job that runs.
pub struct Run {
    pub child: Child,
    events: Receiver<Value>,
    seen: Vec<Value>,
}

impl Run {
    fn new(mut command: Command, fifo: PathBuf) -> Run {
        let (tell, events) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(std::fs::File::open(fifo).unwrap()).lines() {
                let event = serde_json::from_str(&line.unwrap()).unwrap();
                if tell.send(event).is_err() {
                    return;
                }
            }
        });
        Run { child: command.spawn().unwrap(), events, seen: Vec::new() }
    }

    /// Waits for the next event of this kind.
    #[track_caller]
    pub fn event(&mut self, kind: &str) -> Value {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => {
                    self.seen.push(event.clone());
                    if event["event"] == kind {
                        return event;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no '{kind}' in time; seen: {:#?}", self.texts())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("no '{kind}' to the end; seen: {:#?}", self.texts())
                }
            }
        }
    }

    fn texts(&self) -> Vec<&str> {
        self.seen.iter().filter_map(|e| e["text"].as_str()).collect()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Its end, and all its events.
    #[track_caller]
    pub fn end(mut self, code: i32) -> (String, Vec<Value>) {
        let mut text = String::new();
        let err = self.child.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut BufReader::new(err), &mut text).unwrap();
        let status = self.wait();
        assert_eq!(status.code(), Some(code), "{text}");
        self.seen.extend(self.events.iter());
        (text, self.seen)
    }

    pub fn wait(&mut self) -> ExitStatus {
        let pidfd = pidfd(self.child.id());
        assert!(gone(&pidfd), "the runner does not end");
        self.child.wait().unwrap()
    }
}

/// A process, for waiting.
pub fn pidfd(pid: u32) -> rustix::fd::OwnedFd {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap()
}

/// Waits for its end.
pub fn gone(pidfd: &rustix::fd::OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&limit)).unwrap() > 0
}

pub const CHUNK: u32 = 4096;

/// Puts a dataset of 4 ranks on 2 nodes into a prefix, as agents do.
pub fn dataset(prefix: &Path, scratch: &Path, no: u64, name: &str, flags: u32) -> Key {
    let prefix = Prefix::open(prefix).unwrap();
    let job = prefix.job().unwrap();
    let epoch = prefix.take_epoch().unwrap();
    let key = Key { no: DatasetNo(no), inc: Incarnation { epoch, count: 1 } };
    let cache = Cache::open(&scratch.join("cache"), u64::MAX).unwrap();
    let mut manifests = Vec::new();
    for slot in [0, 1].map(SlotId) {
        let ranks = [2 * slot.0, 2 * slot.0 + 1].map(RankId);
        cache.make_dirs(key, slot, &ranks).unwrap();
        let mut decls = Vec::new();
        for rank in ranks {
            let path = format!("{name}/rank {}", rank.0);
            let data: Vec<u8> =
                (0..9000 + rank.0).map(|i| (i * 7 + rank.0 + no as u32) as u8).collect();
            let place = stanchion_format::index::cache_rank_dir("", key, slot, rank);
            let place = cache.root().join(&place[1..]).join(&path);
            std::fs::create_dir_all(place.parent().unwrap()).unwrap();
            std::fs::write(place, &data).unwrap();
            decls.push(FileDecl { rank, path, bytes: data.len() as u64 });
        }
        let manifest = cache.digest(key, slot, CHUNK, &decls, &|| false).unwrap();
        prefix.flush_prepare(&cache, &manifest, (Layout::Files, 1), &|| false).unwrap();
        prefix.flush_publish(&manifest, (Layout::Files, 1), &|| false).unwrap();
        manifests.push(manifest);
    }
    prefix.write_index(&record(epoch, job, key, name, flags, &manifests)).unwrap();
    cache.remove_all();
    key
}

fn record(
    epoch: Epoch,
    job: stanchion_format::ids::JobId,
    key: Key,
    name: &str,
    flags: u32,
    manifests: &[Manifest],
) -> IndexRecord {
    let info = DatasetInfo {
        key,
        name: name.into(),
        flags,
        ranks: 4,
        sets: Sets::new(Scheme::Xor, 2, 2),
        chunk_bytes: CHUNK,
        bytes: manifests.iter().map(Manifest::bytes).sum(),
        files: manifests.iter().map(|m| m.files.len() as u64).sum(),
        placement: [0, 1]
            .map(|s| RankRange { first: RankId(2 * s), count: 2, slot: SlotId(s) })
            .into(),
    };
    let slots = manifests.iter().map(|m| (m.slot, m.crc())).collect();
    IndexRecord {
        version: INDEX_VERSION,
        job,
        epoch,
        inc: key.inc,
        // Each goes on from the one before.
        ancestry: Ancestry(
            (1..epoch.0)
                .map(|e| (Incarnation { epoch: Epoch(e), count: 1 }, DatasetNo(key.no.0 - 1)))
                .collect(),
        ),
        info,
        unix_s: 1_709_210_096,
        slots,
        containers: None,
        times: Some(Times { copy_us: 7, ..Times::default() }),
        crc: Crc(0),
    }
    .seal()
}
