//! Copy-on-write by userfaultfd: a thread of this process copies, also as an ordinary user, and whatever happens
//! meanwhile. What needs a machine that allows it says so and is left out elsewhere.

#[path = "fake/cc.rs"]
mod cc;
mod fake;
#[path = "fake/pool.rs"]
mod pool;

use cc::{compile, good, repository, run};
use fake::{Fake, Reply, failed, sealed};
use pool::Pool;
use stanchion::{Client, Code, CopiedBy, FLAG_CHECKPOINT, Level, Region};
use stanchion_format::client::{Answer, Ask, Request};
use stanchion_mem::cow::{Faults, probe};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

const BYTES: usize = 3 << 20;
/// Only what somebody waits for is copied.
const SLOW: (&str, &str) = ("STANCHION_COW_BYTES_PER_S", "1");
const PATH: &str = "d/rank.000000.stn";

fn pool() -> Pool {
    Pool::new(1 << 20, 64 << 20)
}

fn connect(fake: &Fake, environment: &[(&str, &str)]) -> Client {
    Client::connect(&fake.options(environment)).unwrap()
}

fn state(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at >> 12) as u8 ^ seed).collect()
}

fn snapshot(client: &mut Client, state: &[u8]) -> stanchion::DatasetNo {
    let regions = [Region { id: 4, bytes: state }, Region { id: 5, bytes: b"small" }];
    client.checkpoint_cow("d", FLAG_CHECKPOINT, &regions).unwrap().no
}

/// Is the region in the pool as it was?
fn stored(pool: &Pool, seed: u8) -> bool {
    let file = pool.file(PATH).unwrap();
    file.windows(BYTES).step_by(4096).any(|part| part == state(seed))
}

/// Who counts threads has the process alone.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "stn-cow").count()
}

/// Who was waited for may be listed for a moment more.
fn no_threads() {
    let until = Instant::now() + Duration::from_secs(30);
    while threads() > 0 {
        assert!(Instant::now() < until, "the thread does not end");
        std::thread::yield_now();
    }
}

fn said(requests: &[Request], what: &Request) -> usize {
    requests.iter().filter(|r| *r == what).count()
}

/// Whose writes can be held up here; `None`: nobody's.
fn faults() -> Option<Faults> {
    probe().inspect_err(|why| println!("left out: {why}")).ok()
}

/// A thread copies what was there, and is gone.
fn copies(declared: bool, by: CopiedBy) {
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &[SLOW]);
    let mut memory = state(1);
    client.declare_no_io(4, declared);
    client.declare_no_io(5, declared);
    snapshot(&mut client, &memory);
    let (was, words) = client.copied_by();
    assert_eq!(was, by, "{words}");
    memory.fill(9);
    client.settle();
    no_threads();
    assert!(stored(&pool, 1));
    client.finalize().unwrap();
    drop(client);
    let (_, requests) = fake.end();
    assert_eq!(said(&requests, &Request::Copied), 1);
    let thread = |r: &&Request| matches!(r, Request::Attach { thread: true, .. });
    let expected = usize::from(by != CopiedBy::Fork);
    assert_eq!(requests.iter().filter(thread).count(), expected);
}

/// Not a test of its own: what an ordinary user does.
#[test]
fn ordinary_user() {
    let _alone = alone();
    if std::env::var_os("STN_TEST_ORDINARY").is_none() || faults() != Some(Faults::User) {
        return;
    }
    println!("as an ordinary user");
    copies(true, CopiedBy::UserfaultfdUserMode);
    // Not all are declared: by fork, or where that is not wanted only what is.
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &[]);
    let memory = state(2);
    client.declare_no_io(4, true);
    snapshot(&mut client, &memory);
    let (by, words) = client.copied_by();
    assert_eq!(by, CopiedBy::Fork);
    assert!(words.contains("region 5 is not declared"), "{words}");
    client.set("cow", "userfaultfd").unwrap();
    snapshot(&mut client, &memory);
    assert_eq!(client.copied_by().0, CopiedBy::UserfaultfdUserMode);
    client.declare_no_io(4, false);
    snapshot(&mut client, &memory);
    assert_eq!(client.copied_by().0, CopiedBy::AtOnce);
    client.settle();
    assert!(stored(&pool, 2));
    drop(client);
    fake.end();
    println!("done");
}

#[test]
fn as_an_ordinary_user_declared_regions_alone_are_protected() {
    if rustix::process::geteuid().as_raw() != 0 {
        println!("not root: who runs the tests is an ordinary user already");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "ordinary_user", "--nocapture"]).env("STN_TEST_ORDINARY", "1");
    if rustix::process::geteuid().as_raw() == 0 {
        command.uid(65534).gid(65534);
    }
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    // Where the system gives everybody all faults there is no such user.
    assert_eq!(text.contains("as an ordinary user"), text.contains("done"), "{text}");
}

#[test]
fn a_thread_copies_and_is_gone() {
    let _alone = alone();
    if faults() == Some(Faults::All) {
        copies(false, CopiedBy::Userfaultfd);
    }
}

/// What of the memory is in huge pages, KiB.
fn huge_kb(memory: &[u8]) -> usize {
    let (start, end) = (memory.as_ptr().addr(), memory.as_ptr().addr() + memory.len());
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in text.lines() {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        let hex = |t| usize::from_str_radix(t, 16).ok();
        if let Some((from, to)) = range.and_then(|(a, b)| Some((hex(a)?, hex(b)?))) {
            inside = from < end && start < to;
        } else if let Some(kb) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            sum += kb.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    sum
}

#[test]
fn memory_is_gathered_in_huge_pages_behind_the_first_copy() {
    let _alone = alone();
    let granted = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if faults().is_none() || granted.is_ok_and(|text| text.contains("[never]")) {
        println!("left out: no huge pages, or no thread");
        return;
    }
    for (setting, gathered) in [("auto", true), ("never", false)] {
        let pool = pool();
        let fake = pool.fake();
        let mut client = connect(&fake, &[("STANCHION_REGION_HUGE_PAGES", setting)]);
        client.declare_no_io(4, true);
        let mut memory = vec![0; 8 << 20];
        // As they come where the system does not give them by itself.
        memory.iter_mut().step_by(4096).enumerate().for_each(|(n, byte)| *byte = n as u8);
        let before = huge_kb(&memory);
        let regions = [Region { id: 4, bytes: &memory }];
        client.checkpoint_cow("d", FLAG_CHECKPOINT, &regions).unwrap();
        no_threads();
        // All but the ends, which are parts of one.
        let least = if gathered { 4 << 10 } else { before };
        assert!(huge_kb(&memory) >= least, "{setting}: {} KiB", huge_kb(&memory));
        assert!(gathered || huge_kb(&memory) == before, "{setting}: {} KiB", huge_kb(&memory));
        assert!(memory.iter().step_by(4096).enumerate().all(|(n, byte)| *byte == n as u8));
        drop(client);
        fake.end();
    }
}

#[test]
fn the_setting_chooses() {
    let _alone = alone();
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &[]);
    let memory = state(3);
    for (way, by) in [("fork", CopiedBy::Fork), ("copy", CopiedBy::AtOnce)] {
        client.set("cow", way).unwrap();
        snapshot(&mut client, &memory);
        assert_eq!(client.copied_by(), (by, format!("{}: the setting cow says so", word(by))));
    }
    assert!(client.set("cow", "magic").is_err());
    drop(client);
    let (model, _) = fake.end();
    assert!(model.warnings.is_empty(), "it was asked for: {:?}", model.warnings);
}

fn word(by: CopiedBy) -> &'static str {
    if by == CopiedBy::Fork { "fork" } else { "copied at once" }
}

// FM-P8: who is told to stop has not copied; nobody waits for ever, and the process lives.
#[test]
fn an_agent_that_hangs_up_stops_the_copy() {
    let _alone = alone();
    if faults() != Some(Faults::All) {
        return;
    }
    let pool = pool();
    let (hung_up_to, hung_up) = mpsc::channel();
    let fake = pool.scripted(move |request| match request {
        Request::Attach { .. } => {
            let hung_up = hung_up_to.clone();
            Some(Reply::Do(Box::new(move |mut stream| {
                stream.write_all(&sealed(&Answer::Ok))?;
                stream.shutdown(Shutdown::Write)?;
                hung_up.send(()).map_err(std::io::Error::other)
            })))
        }
        Request::Wait { .. } => Some(Reply::Answer(failed(Code::Level, "it was dropped"))),
        _ => None,
    });
    let mut client = connect(&fake, &[SLOW]);
    let mut memory = state(1);
    let no = snapshot(&mut client, &memory);
    // Before that, who writes gets its blocks copied, and that may be all.
    hung_up.recv_timeout(Duration::from_secs(30)).unwrap();
    memory.fill(2);
    let error = client.wait(no, Level::Cached, 1000).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (Code::Level, "it was dropped"));
    no_threads();
    drop(client);
    let (model, requests) = fake.end();
    assert_eq!(said(&requests, &Request::Copied), 0);
    assert!(model.warnings.is_empty(), "{:?}", model.warnings);
}

#[test]
fn the_next_checkpoint_stops_what_is_still_copied() {
    let _alone = alone();
    if faults() != Some(Faults::All) {
        return;
    }
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &[SLOW]);
    let memory = state(1);
    snapshot(&mut client, &memory);
    // By this agent's word the first one is over: in a job it was dropped.
    snapshot(&mut client, &memory);
    assert_eq!(client.copied_by().0, CopiedBy::Userfaultfd, "the regions are free again");
    // At the end what was begun is completed.
    drop(client);
    no_threads();
    let (_, requests) = fake.end();
    assert_eq!(said(&requests, &Request::Copied), 1);
    assert!(stored(&pool, 1));
}

// A mapping has one userfaultfd: what the tracker of increments watches is copied otherwise.
#[test]
fn what_is_tracked_is_forked() {
    let _alone = alone();
    if faults() != Some(Faults::All) {
        return;
    }
    let pool = pool();
    let fake = pool.scripted(|request| match request {
        // It has no datasets that share bytes.
        Request::Collective { ask: Ask::Complete, .. } => Some(Reply::Answer(Answer::Ok)),
        _ => None,
    });
    let mut client = connect(&fake, &[("STANCHION_INCREMENTAL_TRACKING", "scan")]);
    let memory = state(1);
    let regions = [Region { id: 4, bytes: &memory }];
    if client.checkpoint_incremental("d", FLAG_CHECKPOINT, &regions).is_err() {
        println!("left out: the kernel does not tell what changed");
        return;
    }
    snapshot(&mut client, &memory);
    let (by, words) = client.copied_by();
    assert_eq!(by, CopiedBy::Fork, "{words}");
    assert!(words.contains("the kernel tracks which pages of region 4 change"), "{words}");
    drop(client);
    fake.end();
}

#[test]
fn a_c_program_may_do_with_its_memory_what_it_likes() {
    if faults().is_none() {
        return;
    }
    for cpp in [false, true] {
        let tmp = tempfile::tempdir().unwrap();
        let source = repository().join("crates/stanchion-client/tests/c/cow.c");
        let program = compile(tmp.path(), cpp, "stanchion", &[source]);
        let scenes = [
            ("forks", true),
            ("freed", true),
            ("moved", true),
            ("unmapped", false),
            ("dropped", false),
            ("shrunk", false),
            ("freed too early", false),
        ];
        for (scene, whole) in scenes {
            let pool = pool();
            let torn = || Reply::Answer(failed(Code::Level, "it was dropped"));
            let fake = pool.scripted(move |r| matches!(r, Request::Wait { .. }).then(torn));
            let nodes = fake.socket();
            let nodes = [("STANCHION_NODES", nodes.to_str().unwrap()), SLOW];
            let said_there = good(run(&program, &[scene], &nodes, fake.root()));
            assert_eq!(said_there, "", "{scene}: the library prints nothing");
            let (model, requests) = fake.end();
            // FM-P8: what is not whole is not said to be copied.
            assert_eq!(said(&requests, &Request::Copied), usize::from(whole), "{scene}");
            let warned = model.warnings.iter().any(|w| w.contains("memory of region 7"));
            assert_eq!(warned, !whole, "{scene}: {:?}", model.warnings);
            if whole {
                let file = pool.file(PATH).unwrap();
                let at = file.len() - (4 << 20);
                let value = |at: usize| (at >> 12 ^ at) as u8;
                assert!((0..4 << 20).all(|n| file[at + n] == value(n)), "{scene}");
            }
        }
    }
}
