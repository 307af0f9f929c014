//! The store after a failure at every single step: FM-T1 to FM-T4, FM-F8.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, LazyLock};

use common::{bytes, key};
use proptest::prelude::*;
use rustix::io::Errno;
use stanchion_format::ids::{Key, RankId, SlotId};
use stanchion_format::peer::Trouble;
use stanchion_io::fs::testing::{Fault, FaultyFs, Keep};
use stanchion_io::store::{Piece, Place, Source, Store, StoreConfig, Tag};

const SEGMENT: u64 = 64 << 10;
const KEEPS: [Keep; 6] = [
    Keep::Nothing,
    Keep::Journal(11),
    Keep::Journal(1234),
    Keep::Any(5),
    Keep::Any(77),
    Keep::Any(4242),
];

fn open(fs: &FaultyFs, keep: bool) -> Result<Store, Trouble> {
    let config = StoreConfig { segment_bytes: SEGMENT, keep, ..StoreConfig::default() };
    Store::on(Arc::new(fs.clone()), Path::new("store"), config)
}

fn tag(no: u64, i: u64) -> Tag {
    Tag { key: key(no), slot: SlotId(0), rank: RankId(1), file: 0, offset: i }
}

/// A chunk's bytes follow from what it is; of whole blocks and others, so that both ways are gone.
fn contents(tag: &Tag) -> Vec<u8> {
    let i = tag.key.no.0 * 100 + tag.offset;
    let len = if i.is_multiple_of(3) { 8192 } else { 3000 + 777 * (i % 11) };
    let from = i as usize * 1009;
    RANDOM[from..from + len as usize].to_vec()
}

/// Made once: it takes longer than the store does.
static RANDOM: LazyLock<Vec<u8>> = LazyLock::new(|| bytes(1, 8 << 20));

/// What somebody who uses a store knows.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Appended with success and not freed.
    there: BTreeMap<Tag, Place>,
    /// Of these, what a sync vouches for.
    durable: BTreeSet<Tag>,
    /// Datasets that were freed.
    freed: BTreeSet<Key>,
}

impl Known {
    fn append(&mut self, store: &Store, no: u64, chunks: std::ops::Range<u64>) {
        let tags: Vec<Tag> = chunks.map(|i| tag(no, i)).collect();
        let all: Vec<Vec<u8>> = tags.iter().map(contents).collect();
        let pieces: Vec<Piece<'_>> = tags
            .iter()
            .zip(&all)
            .map(|(tag, bytes)| Piece { tag: *tag, from: Source::from(&bytes[..]), crc: None })
            .collect();
        if let Ok(places) = store.append(&pieces) {
            self.durable.retain(|t| !tags.contains(t));
            self.there.extend(tags.into_iter().zip(places));
        }
    }

    fn sync(&mut self, store: &Store) -> bool {
        let done = store.sync().is_ok();
        if done {
            self.durable = self.there.keys().copied().collect();
        }
        done
    }

    fn free(&mut self, store: &Store, no: u64) {
        store.free(key(no));
        self.there.retain(|t, _| t.key != key(no));
        self.durable.retain(|t| t.key != key(no));
        self.freed.insert(key(no));
    }
}

/// Some datasets come and go: new segments, sealed ones, ones used again.
fn script(store: &Store) -> Known {
    let mut known = Known::default();
    known.append(store, 1, 0..6);
    known.append(store, 1, 6..9);
    known.sync(store);
    known.append(store, 2, 0..8);
    let _may_fail = store.seal();
    known.sync(store);
    known.free(store, 1);
    for i in 0..8 {
        known.append(store, 3, i..i + 1);
    }
    known.sync(store);
    known.free(store, 2);
    known.append(store, 4, 0..12);
    known.sync(store);
    known.append(store, 5, 0..3);
    known
}

fn read(store: &Store, place: &Place) -> Result<Vec<u8>, Trouble> {
    let mut buf = vec![0; place.len as usize];
    store.read(place, &mut buf)?;
    Ok(buf)
}

/// All that a store lists is what it was when it was appended.
fn all_true(store: &Store, context: &str) -> BTreeSet<Tag> {
    for (tag, place) in store.list() {
        let have = read(store, &place).unwrap_or_else(|t| panic!("{context}: {tag:?}: {t:?}"));
        assert!(have == contents(&tag), "{context}: {tag:?} is another one");
    }
    store.list().into_iter().map(|(tag, _)| tag).collect()
}

/// After a crash: FM-T1, FM-T2; and it can be gone on with.
fn judge(fs: &FaultyFs, known: &Known, context: &str) {
    let store = open(fs, true).unwrap_or_else(|t| panic!("{context}: {t:?}"));
    let there = all_true(&store, context);
    let lost: Vec<_> = known.durable.difference(&there).collect();
    assert!(lost.is_empty(), "{context}: lost {lost:?}, {:?}", store.recovered());
    let mut known = known.clone();
    known.there = store.list().into_iter().collect();
    known.append(&store, 9, 0..5);
    assert!(known.sync(&store), "{context}");
    fs.crash(Keep::Nothing);
    let store = open(fs, true).unwrap();
    let there = all_true(&store, context);
    assert!(known.durable.is_subset(&there), "{context}: {:?}", store.recovered());
    assert!((0..5).all(|i| there.contains(&tag(9, i))), "{context}");
}

fn steps() -> u64 {
    let fs = FaultyFs::new();
    let known = script(&open(&fs, false).unwrap());
    assert_eq!((known.there.len(), known.durable.len()), (23, 20));
    let lives = known.there.values().map(|p| p.life).max().unwrap();
    assert!(lives > fs.files().len() as u64, "no segment was used again: {:?}", fs.files());
    fs.ops()
}

#[test]
fn the_machine_stops_at_every_step() {
    for step in 0..steps() {
        let stopped = FaultyFs::new();
        stopped.plan(step, Fault::Down);
        let known = open(&stopped, false).map_or(Known::default(), |store| script(&store));
        for keep in KEEPS {
            let fs = stopped.fork();
            fs.crash(keep);
            judge(&fs, &known, &format!("step {step}, {keep:?}"));
        }
    }
}

#[test]
fn recovery_stops_at_every_step() {
    let crashed = FaultyFs::new();
    let known = script(&open(&crashed, false).unwrap());
    crashed.crash(Keep::Any(99));
    let counted = crashed.fork();
    let before = counted.ops();
    open(&counted, true).unwrap();
    for step in 0..counted.ops() - before {
        for keep in KEEPS {
            let fs = crashed.fork();
            fs.plan(step, Fault::Down);
            let _interrupted = open(&fs, true);
            fs.crash(keep);
            judge(&fs, &known, &format!("recovery, step {step}, {keep:?}"));
        }
        // One error of a device that otherwise works costs nothing for good.
        let fs = crashed.fork();
        fs.plan(step, Fault::Once(Errno::IO));
        let _may_fail = open(&fs, true);
        fs.heal();
        judge(&fs, &known, &format!("recovery, error at step {step}"));
    }
}

/// What a store that met errors must still do.
fn goes_on(fs: &FaultyFs, store: &Store, known: &Known, context: &str) {
    for (tag, place) in &known.there {
        let have = read(store, place).unwrap_or_else(|t| panic!("{context}: {tag:?}: {t:?}"));
        assert!(have == contents(tag), "{context}: {tag:?}");
    }
    let listed: BTreeSet<Tag> = store.list().into_iter().map(|(tag, _)| tag).collect();
    assert!(listed.iter().eq(known.there.keys()), "{context}: {listed:?}");
    let crashed = fs.fork();
    crashed.crash(Keep::Any(3));
    judge(&crashed, known, &format!("{context}, then a crash"));
    let mut known = known.clone();
    known.append(store, 8, 0..9);
    assert!(known.there.contains_key(&tag(8, 8)), "{context}: it does not go on");
    if !known.sync(store) {
        // FM-T4: the error stays until what it was about is forgotten.
        assert!(store.sync().is_err(), "{context}");
        for no in 1..6 {
            known.free(store, no);
        }
        assert!(known.sync(store), "{context}");
    }
    fs.crash(Keep::Nothing);
    judge(fs, &known, &format!("{context}, and more"));
}

fn with_fault(step: u64, fault: Fault) {
    let fs = FaultyFs::new();
    fs.plan(step, fault);
    let context = format!("step {step}, {fault:?}");
    let Ok(store) = open(&fs, false) else {
        fs.heal();
        open(&fs, false).unwrap_or_else(|t| panic!("{context}: {t:?}"));
        return;
    };
    let known = script(&store);
    fs.heal();
    goes_on(&fs, &store, &known, &context);
}

#[test]
fn every_step_fails_once() {
    let faults = [Fault::Once(Errno::IO), Fault::Once(Errno::NOSPC), Fault::Torn];
    for step in 0..steps() {
        faults.into_iter().for_each(|fault| with_fault(step, fault));
    }
}

#[test]
fn the_device_stays_full_or_broken_from_any_step_on() {
    for step in 0..steps() {
        for errno in [Errno::NOSPC, Errno::IO, Errno::ROFS] {
            with_fault(step, Fault::Stuck(errno));
        }
    }
}

#[test]
fn short_writes_and_reads_change_nothing() {
    for step in 0..steps() {
        let fs = FaultyFs::new();
        fs.plan(step, Fault::Short);
        let store = open(&fs, false).unwrap();
        let known = script(&store);
        assert_eq!((known.there.len(), known.durable.len()), (23, 20), "step {step}");
        goes_on(&fs, &store, &known, &format!("step {step}, short"));
    }
}

#[test]
fn a_full_device_gives_no_half_segment() {
    // The space is taken when a segment is made, not while it is written.
    let fs = FaultyFs::new();
    let store = open(&fs, false).unwrap();
    fs.capacity(Some(2 * SEGMENT + 4096));
    let mut known = Known::default();
    for i in 0..60 {
        known.append(&store, 1, i..i + 1);
    }
    assert!((8..20).contains(&known.there.len()), "{}", known.there.len());
    assert_eq!(fs.files(), ["seg.000000", "seg.000001"]);
    assert_eq!(all_true(&store, "full").len(), known.there.len());
    fs.capacity(None);
    known.append(&store, 1, 60..61);
    assert!(known.there.contains_key(&tag(1, 60)));
}

#[test]
fn an_earlier_life_is_never_found() {
    // FM-T3: the file of a forgotten dataset is begun anew and written in part; the machine stops.
    let fs = FaultyFs::new();
    let store = open(&fs, false).unwrap();
    let mut known = Known::default();
    known.append(&store, 1, 0..9);
    store.seal().unwrap();
    known.sync(&store);
    known.free(&store, 1);
    known.append(&store, 2, 0..1);
    assert_eq!(fs.files(), ["seg.000000", "seg.000001"]);
    let used: Vec<u32> = known.there.values().map(|p| p.segment).collect();
    for keep in KEEPS {
        let fs = fs.fork();
        fs.crash(keep);
        let store = open(&fs, true).unwrap();
        let there = all_true(&store, "an earlier life");
        let of = |no| there.iter().filter(|t| t.key == key(no)).count();
        let old =
            store.list().into_iter().filter(|(t, p)| t.key == key(1) && used.contains(&p.segment));
        assert_eq!(old.count(), 0, "{keep:?}: {there:?}");
        assert!(of(2) <= 1);
    }
}

/// What may be done.
#[derive(Clone, Debug)]
enum Op {
    Append(u8),
    Free(u8),
    Sync,
    Seal,
    Reopen,
    Crash(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (1u8..20).prop_map(Op::Append),
        2 => any::<u8>().prop_map(Op::Free),
        2 => Just(Op::Sync),
        1 => Just(Op::Seal),
        1 => Just(Op::Reopen),
        1 => any::<u64>().prop_map(Op::Crash),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history(ops in prop::collection::vec(op(), 1..40), direct: bool) {
        let fs = FaultyFs::new();
        fs.direct(direct);
        let mut store = open(&fs, false).unwrap();
        let mut known = Known::default();
        let mut no = 0;
        for op in ops {
            let context = format!("{op:?}");
            match op {
                Op::Append(n) => {
                    no += 1;
                    known.append(&store, no, 0..n.into());
                }
                Op::Free(n) => known.free(&store, 1 + u64::from(n) % (no + 1)),
                Op::Sync => assert!(known.sync(&store)),
                Op::Seal => store.seal().unwrap(),
                Op::Reopen | Op::Crash(_) => {
                    drop(store);
                    let mut must: BTreeSet<Tag> = known.there.keys().copied().collect();
                    if let Op::Crash(seed) = op {
                        fs.crash(Keep::Any(seed));
                        must = known.durable.clone();
                    }
                    store = open(&fs, true).unwrap();
                    let there = all_true(&store, &context);
                    assert!(must.is_subset(&there), "{context}: {:?}", store.recovered());
                    // Freeing is not durable: who wants it so does it again.
                    known.there = store.list().into_iter().collect();
                    known.durable = must;
                    for key in known.freed.clone() {
                        known.free(&store, key.no.0);
                    }
                }
            }
            prop_assert!(all_true(&store, &context).iter().eq(known.there.keys()), "{}", context);
        }
    }
}

#[test]
fn a_hole_hides_nothing_behind_it() {
    // FM-T2: a write that had not come to its end when another thread synced, and then the machine stopped.
    let fs = FaultyFs::new();
    let store = open(&fs, false).unwrap();
    let mut known = Known::default();
    for i in 0..4 {
        known.append(&store, 1, i..i + 1);
    }
    known.sync(&store);
    drop(store);
    let hole = known.there[&tag(1, 1)].offset as usize - 4096;
    fs.tamper("seg.000000", |all| all[hole..hole + 4096].fill(7));
    fs.crash(Keep::Nothing);
    let store = open(&fs, true).unwrap();
    let there: Vec<u64> = all_true(&store, "a hole").iter().map(|t| t.offset).collect();
    assert_eq!(there, [0, 2, 3]);
}

#[test]
fn an_error_of_fsync_is_not_forgotten() {
    // FM-T4: the system says it once; the chunks may be lost all the same.
    let fs = FaultyFs::new();
    let store = open(&fs, false).unwrap();
    let mut known = Known::default();
    known.append(&store, 1, 0..2);
    fs.plan(0, Fault::Once(Errno::IO));
    let first = store.sync().unwrap_err();
    assert_eq!(first.file.as_deref(), Some("seg.000000"));
    assert_eq!(store.sync(), Err(first.clone()));
    known.append(&store, 2, 0..2);
    assert_eq!(known.there[&tag(2, 0)].segment, 1, "nothing more goes into that segment");
    assert_eq!(store.sync(), Err(first));
    all_true(&store, "still read");
    known.free(&store, 1);
    assert_eq!(store.sync(), Ok(()));
    assert_eq!((store.usage().dead, store.usage().free), (1, 0));
}
