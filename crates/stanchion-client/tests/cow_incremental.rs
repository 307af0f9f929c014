//! Copy-on-write and incremental checkpoints together: what is copied behind is no base until it is complete.

mod fake;
#[path = "fake/pool.rs"]
mod pool;

use fake::{Fake, Reply, failed};
use pool::Pool;
use stanchion::{Client, Code, CopiedBy, Error, FLAG_CHECKPOINT, Region};
use stanchion_format::client::{Answer, Ask, MemoryFile, Own, Request};
use stanchion_format::ids::DatasetNo;
use stanchion_mem::track::{Tracker, Wanted};
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;
const BYTES: usize = 3 << 20;
/// In its file the region ends with the file.
const ID: u64 = 4;

/// Ways to tell what changed that this machine has.
fn trackings() -> Vec<&'static str> {
    match Tracker::new(Wanted::Scan) {
        Ok(_) => vec!["scan", "hash"],
        Err(why) => {
            println!("left out: {why}");
            vec!["hash"]
        }
    }
}

fn tracked_by(tracking: &str) -> Vec<(&str, &str)> {
    vec![("STANCHION_INCREMENTAL_TRACKING", tracking)]
}

fn pool() -> Pool {
    Pool::new(1 << 20, 64 << 20)
}

fn connect(fake: &Fake, environment: &[(&str, &str)]) -> Client {
    Client::connect(&fake.options(environment)).unwrap()
}

fn state() -> Vec<u8> {
    (0..BYTES).map(|at| (at >> 12) as u8).collect()
}

/// Changes a few pages, others each time.
fn work(state: &mut [u8], step: usize) {
    for page in [step, 100 + 2 * step, 600] {
        state[page * PAGE + 5] = state[page * PAGE + 5].wrapping_add(101);
    }
}

fn both(client: &mut Client, state: &[u8]) -> Result<DatasetNo, Error> {
    let regions = [Region { id: ID, bytes: state }];
    client.checkpoint_cow_incremental("", FLAG_CHECKPOINT, &regions).map(|begun| begun.no)
}

fn file(own: &Own) -> &MemoryFile {
    assert_eq!(own.memory.len(), 1);
    &own.memory[0]
}

/// The number of the dataset that each one is based on.
fn bases(completes: &[Own]) -> Vec<Option<u64>> {
    completes.iter().map(|own| file(own).base.as_ref().map(|base| base.key.no.0)).collect()
}

/// By which request datasets were ended, and whether something still copied them.
fn ends(requests: &[Request]) -> Vec<(Ask, bool)> {
    let ended = requests.iter().filter_map(|r| match r {
        Request::Collective { ask: ask @ (Ask::Snapshot | Ask::Complete), own } => {
            Some((ask.clone(), own.child))
        }
        _ => None,
    });
    ended.collect()
}

/// An agent of a job in which these datasets are dropped when all ranks were let go.
fn dropping(pool: &Pool, dropped: &'static [u64]) -> Fake {
    pool.scripted(move |request| match request {
        Request::Wait { no, .. } if dropped.contains(&no.0) => {
            Some(Reply::Answer(failed(Code::Level, "it was dropped")))
        }
        _ => None,
    })
}

/// Takes `count` checkpoints of a state that changes behind each; that state at each, and what the agent was told.
fn take(
    (pool, fake): (&Pool, Fake),
    environment: &[(&str, &str)],
    count: usize,
) -> (Vec<Vec<u8>>, Vec<Own>, Vec<Request>) {
    let mut client = connect(&fake, environment);
    let (mut memory, mut was) = (state(), Vec::new());
    for step in 0..count {
        was.push(memory.clone());
        let no = both(&mut client, &memory).unwrap();
        assert_eq!(no.0 as usize, step + 1);
        work(&mut memory, step);
        // This agent lets the next one begin at once, which would stop a thread.
        client.settle();
    }
    drop(client);
    // Children have copied when their connections have ended.
    let (_, requests) = fake.end();
    (was, pool.completes(), requests)
}

/// Is the region in this file as it was?
fn holds(whole: &[u8], was: &[u8]) -> bool {
    whole[whole.len() - BYTES..] == *was
}

#[test]
fn to_look_for_what_changed_counts_as_copying() {
    // No machine compares 32 MiB in so little, and nothing is left to be copied.
    const LEAST_US: u64 = 200;
    let pool = Pool::new(1 << 20, 128 << 20);
    let fake = pool.fake();
    let mut client = connect(&fake, &tracked_by("hash"));
    let state = vec![7; 32 << 20];
    for _ in 0..2 {
        let regions = [Region { id: ID, bytes: &state }];
        client.checkpoint_incremental("", FLAG_CHECKPOINT, &regions).unwrap();
    }
    assert!(client.stored().copied < PAGE as u64);
    let own = pool.completes().pop().unwrap();
    assert!(own.copy_us >= LEAST_US && own.blocked_us >= own.copy_us, "{own:?}");
    drop(client);
    fake.end();
}

// FM-P13: each one is of its moment, whatever the program changes behind it.
#[test]
fn full_ones_are_copied_behind_and_increments_at_once() {
    for tracking in trackings() {
        let pool = pool();
        let fake = pool.fake();
        let (was, completes, requests) = take((&pool, fake), &tracked_by(tracking), 4);
        assert_eq!(bases(&completes), [None, Some(1), Some(2), Some(3)], "{tracking}");
        let snapshot = |child| (Ask::Snapshot, child);
        let as_expected = [snapshot(true), snapshot(false), snapshot(false), snapshot(false)];
        assert_eq!(ends(&requests), as_expected, "{tracking}");
        let mut base = Vec::new();
        for (own, was) in completes.iter().zip(&was) {
            base = pool.whole(file(own), &base);
            assert!(holds(&base, was), "{tracking}");
        }
        for own in &completes[1..] {
            let own: u64 = file(own).parts.iter().map(|p| p.bytes).sum();
            assert!(own < (BYTES / 20) as u64, "{tracking}: {own} bytes were copied");
        }
    }
}

// FM-P13
#[test]
fn after_a_dropped_full_one_the_next_is_full() {
    for tracking in trackings() {
        let pool = pool();
        let fake = dropping(&pool, &[1, 2]);
        let (was, completes, _) = take((&pool, fake), &tracked_by(tracking), 4);
        assert_eq!(bases(&completes), [None, None, None, Some(3)], "{tracking}");
        let third = pool.whole(file(&completes[2]), &[]);
        assert!(holds(&third, &was[2]), "{tracking}");
        assert!(holds(&pool.whole(file(&completes[3]), &third), &was[3]), "{tracking}");
    }
}

// FM-P13: another rank's part was full, and its child died.
#[test]
fn an_increment_of_a_dropped_dataset_is_no_base() {
    for tracking in trackings() {
        let pool = pool();
        let fake = dropping(&pool, &[2]);
        let (was, completes, _) = take((&pool, fake), &tracked_by(tracking), 4);
        assert_eq!(bases(&completes), [None, Some(1), None, Some(3)], "{tracking}");
        let third = pool.whole(file(&completes[2]), &[]);
        assert!(holds(&third, &was[2]), "{tracking}");
        assert!(holds(&pool.whole(file(&completes[3]), &third), &was[3]), "{tracking}");
    }
}

// FM-P13: what is not heard of in time may have been dropped.
#[test]
fn what_is_not_known_to_be_complete_is_no_base() {
    let pool = pool();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    let fake = pool.scripted(move |request| match request {
        Request::Wait { no, timeout_ms, .. } => {
            seen.lock().unwrap().push((no.0, *timeout_ms));
            Some(Reply::Answer(failed(Code::Timeout, "not in time")))
        }
        _ => None,
    });
    let (_, completes, _) = take((&pool, fake), &tracked_by("hash"), 3);
    assert_eq!(bases(&completes), [None, None, None]);
    let asked = asked.lock().unwrap();
    assert_eq!(asked.iter().map(|(no, _)| *no).collect::<Vec<_>>(), [1, 2]);
    assert!(asked.iter().all(|(_, ms)| *ms <= 1000), "the job does not wait for it: {asked:?}");
}

#[test]
fn the_words_say_what_it_was() {
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &tracked_by("scan"));
    let mut memory = state();
    if let Err(why) = both(&mut client, &memory) {
        println!("left out: {why}");
        return;
    }
    let (by, words) = client.copied_by();
    assert_eq!(by, CopiedBy::Fork);
    assert_eq!(words, "fork: the kernel tracks which pages of region 4 change");
    assert_eq!(
        (client.stored().copied, client.stored().bytes),
        (client.stored().bytes, 3 << 20 | PAGE as u64)
    );
    work(&mut memory, 1);
    both(&mut client, &memory).unwrap();
    assert_eq!(client.copied_by(), (CopiedBy::AtOnce, "copied at once: only what changed".into()));
    assert!(client.stored().copied < (BYTES / 20) as u64);
    // Another size: full. With a thread or not at all: not at all, and it is said once.
    client.set("cow", "userfaultfd").unwrap();
    for short in [PAGE, 2 * PAGE] {
        both(&mut client, &memory[short..]).unwrap();
        let (by, words) = client.copied_by();
        assert_eq!(by, CopiedBy::AtOnce);
        assert_eq!(words, "copied at once: the kernel tracks which pages of region 4 change");
    }
    client.set("cow", "copy").unwrap();
    both(&mut client, &memory).unwrap();
    assert_eq!(client.copied_by().1, "copied at once: the setting cow says so");
    drop(client);
    let (model, _) = fake.end();
    assert_eq!(model.warnings.len(), 1, "{:?}", model.warnings);
    assert_eq!(bases(&pool.completes()), [None, Some(1), None, None, None]);
}

// A program may change its mind: either kind goes on from the other.
#[test]
fn increments_with_and_without_share_bases() {
    let pool = pool();
    let fake = pool.fake();
    let mut client = connect(&fake, &tracked_by("hash"));
    let (mut memory, mut was) = (state(), Vec::new());
    for step in 0..4 {
        was.push(memory.clone());
        if step % 2 == 0 {
            both(&mut client, &memory).unwrap();
        } else {
            let regions = [Region { id: ID, bytes: &memory }];
            client.checkpoint_incremental("", FLAG_CHECKPOINT, &regions).unwrap();
        }
        work(&mut memory, step);
        client.settle();
    }
    // A restart: what is in memory may be anything.
    client.have_restart().unwrap();
    both(&mut client, &memory).unwrap();
    client.settle();
    drop(client);
    let (_, requests) = fake.end();
    let completes = pool.completes();
    assert_eq!(bases(&completes), [None, Some(1), Some(2), Some(3), None]);
    let asks: Vec<Ask> = ends(&requests).into_iter().map(|(ask, _)| ask).collect();
    let (snapshot, complete) = (Ask::Snapshot, Ask::Complete);
    assert_eq!(
        asks,
        [snapshot.clone(), complete.clone(), snapshot.clone(), complete.clone(), snapshot]
    );
    let mut base = Vec::new();
    for (own, was) in completes.iter().zip(&was) {
        base = pool.whole(file(own), &base);
        assert!(holds(&base, was));
    }
}

#[test]
fn a_file_is_no_base_and_what_cannot_be_stored_keeps_nobody_waiting() {
    // No room in the pool: a file, as without increments.
    let fake = Fake::model();
    let mut client = connect(&fake, &tracked_by("hash"));
    let memory = state();
    for _ in 0..2 {
        both(&mut client, &memory).unwrap();
        assert_eq!(client.copied_by(), (CopiedBy::AtOnce, "copied at once".into()));
        assert_eq!(client.stored().copied, client.stored().bytes);
    }
    let twice = [Region { id: 3, bytes: b"x" }, Region { id: 3, bytes: b"y" }];
    let error = client.checkpoint_cow_incremental("e", FLAG_CHECKPOINT, &twice).unwrap_err();
    assert!(matches!(error, Error::Regions { .. }), "{error}");
    both(&mut client, &memory).unwrap();
    drop(client);
    let (model, requests) = fake.end();
    assert_eq!(model.complete.len(), 3);
    let said: Vec<bool> = requests
        .iter()
        .filter_map(|r| match r {
            Request::Collective { ask: Ask::Snapshot, own } => {
                assert!(own.memory.is_empty() && !own.child);
                Some(own.valid)
            }
            _ => None,
        })
        .collect();
    assert_eq!(said, [true, true, false, true]);
    assert!(!requests.iter().any(|r| matches!(r, Request::Wait { .. })), "nobody's base");
}

// An agent that is gone is not taken for a dropped dataset.
#[test]
fn an_agent_that_answers_nonsense_is_an_error() {
    let pool = pool();
    let fake = pool.scripted(|request| match request {
        Request::Wait { .. } => Some(Reply::Answer(Answer::Flag(true))),
        _ => None,
    });
    let mut client = connect(&fake, &tracked_by("hash"));
    let memory = state();
    both(&mut client, &memory).unwrap();
    client.settle();
    assert_eq!(both(&mut client, &memory).unwrap_err().code(), Code::Protocol);
    assert!(!client.alive());
    drop(client);
    fake.end();
}
