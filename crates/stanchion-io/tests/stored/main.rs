//! Files of datasets on their way from memory to the store: FM-T5, FM-T6, FM-T7, FM-F8, FM-F9, FM-S7.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod node;
mod spoiled;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{bytes, go_on, key};
use node::{EXTENT, Node, Plain, RANK, SLOT, data, ids, memory};
use rustix::io::Errno;
use stanchion_format::changed::{Changed, ChangedWriter};
use stanchion_format::client::{Base, Filled, MemoryFile, Part, PartFrom};
use stanchion_format::ids::ExtentId;
use stanchion_format::manifest::FileDecl;
use stanchion_format::peer::Cause;
use stanchion_io::cache::memory::Memory;
use stanchion_io::cache::{Lies, Share};
use stanchion_io::fs::testing::Fault;

#[test]
fn what_is_stored_gives_its_memory_back_and_reads_the_same() {
    // FM-T5
    let mut node = Node::new();
    let data = data(1);
    let decl = node.keep(key(1), "a", &data, None);
    let before = node.digest(key(1), &decl);
    node.assert_whole(&before, &data);
    assert!(node.freed().is_empty());
    node.store_all();
    assert_eq!(node.freed(), ids(1..4));
    node.assert_whole(&before, &data);
    // Nothing has to be read for a manifest: who stored it has summed it up.
    node.disk.plan(0, Fault::Stuck(Errno::IO));
    let ops = node.disk.ops();
    assert_eq!(node.digest(key(1), &decl), before);
    assert_eq!(node.disk.ops(), ops);
    assert!(node.told.lock().unwrap().is_empty());
}

#[test]
fn without_a_store_memory_is_kept_as_long_as_a_file_has_it() {
    // FM-P3, FM-T5: nothing is left to be stored there, which is not that all is stored.
    let mut node = Node::without_store();
    let data = data(1);
    let decl = node.keep(key(1), "a", &data, None);
    let m = node.digest(key(1), &decl);
    node.store_all();
    node.cache.reclaim(u64::MAX);
    assert!(node.freed().is_empty());
    node.assert_whole(&m, &data);
    node.cache.evict(&[key(1)]);
    assert_eq!(node.freed(), ids(1..4));
}

#[test]
fn the_manifest_is_the_same_whoever_sums_first() {
    let data = data(2);
    let mut first = Node::new();
    let decl = first.keep(key(1), "a", &data, None);
    let summed = first.digest(key(1), &decl);
    first.store_all();
    let mut second = Node::new();
    second.keep(key(1), "a", &data, None);
    second.store_all();
    assert_eq!(second.digest(key(1), &decl), summed);
    first.assert_whole(&summed, &data);
    second.assert_whole(&summed, &data);
}

/// Bytes that are the base's and of its own, in turns.
fn changed(steps: &[(u64, u64)]) -> Changed {
    let mut writer = ChangedWriter::default();
    for (same, own) in steps {
        writer.same(*same);
        writer.own(*own);
    }
    writer.finish()
}

/// What a file is that has `old`'s bytes but for these.
fn patched(old: &[u8], changed: &Changed, own: &[u8]) -> Vec<u8> {
    let (mut whole, mut at, mut used) = (old.to_vec(), 0, 0);
    for stretch in changed.stretches() {
        at += stretch.same as usize;
        let len = stretch.own as usize;
        whole[at..at + len].copy_from_slice(&own[used..used + len]);
        (at, used) = (at + len, used + len);
    }
    whole
}

#[test]
fn files_that_share_extents_live_as_long_as_one_of_them() {
    // FM-P3, FM-T7: an increment refers to what its predecessor stored, and outlives it.
    let mut node = Node::new();
    let old = data(3);
    node.keep(key(1), "a", &old, None);
    node.store_all();
    // All of the first extent, and what lies across the end of the second.
    let len = old.len() as u64;
    let runs = changed(&[(0, EXTENT), (EXTENT - 100, 300), (len - 2 * EXTENT - 200, 0)]);
    let fresh = bytes(4, runs.own() as usize);
    let decl = node.keep(key(2), "a", &fresh, Some(((key(1), "a"), runs.clone())));
    let whole = patched(&old, &runs, &fresh);
    // Not even the predecessor's checksums are of its chunks.
    let m = node.digest(key(2), &decl);
    node.assert_whole(&m, &whole);
    node.cache.evict(&[key(1)]);
    node.assert_whole(&m, &whole);
    node.store_all();
    node.assert_whole(&m, &whole);
    assert!(node.store.list().iter().any(|(tag, _)| tag.key == key(1)));
    node.cache.evict(&[key(2)]);
    assert_eq!(node.store.list(), []);
    assert_eq!(node.freed(), ids(1..node.next));
}

#[test]
fn increments_that_nobody_reads_are_whole_when_their_bases_are_gone() {
    // FM-P3, FM-S8: each is read at last through more of them than may follow each other without lists of their own.
    for stores in [true, false] {
        let mut node = if stores { Node::new() } else { Node::without_store() };
        let mut whole = data(5);
        node.keep(key(1), "a", &whole, None);
        let len = whole.len() as u64;
        let last = 40;
        let mut decl = None;
        for no in 2..=last {
            let at = (no * 7919) % (len - 3000);
            let runs = changed(&[(at, 1000), (1000, 5), (len - at - 2005, 0)]);
            let fresh = bytes(no, 1005);
            whole = patched(&whole, &runs, &fresh);
            decl = Some(node.keep(key(no), "a", &fresh, Some(((key(no - 1), "a"), runs))));
            node.cache.evict(&[key(no - 1)]);
            if no % 5 == 0 && stores {
                node.store_all();
            }
        }
        let m = node.digest(key(last), &decl.unwrap());
        node.assert_whole(&m, &whole);
        if stores {
            node.store_all();
            node.assert_whole(&m, &whole);
        }
        node.cache.evict(&[key(last)]);
        assert_eq!(node.freed(), ids(1..node.next));
        assert_eq!(node.store.list(), []);
    }
}

#[test]
fn what_no_increment_has_any_more_is_free() {
    // FM-P3, FM-P4
    let mut node = Node::without_store();
    let old = data(6);
    node.keep(key(1), "a", &old, None);
    let mine = node.next;
    let len = old.len() as u64;
    let runs = changed(&[(0, len - 10), (10, 0)]);
    let fresh = bytes(7, runs.own() as usize);
    let decl = node.keep(key(2), "a", &fresh, Some(((key(1), "a"), runs.clone())));
    node.cache.evict(&[key(1)]);
    let m = node.digest(key(2), &decl);
    node.assert_whole(&m, &patched(&old, &runs, &fresh));
    // Its last ten bytes are all that is wanted of the old one's.
    assert_eq!(node.freed(), ids(1..mine - 1));
    node.cache.evict(&[key(2)]);
    assert_eq!(node.freed(), ids(1..node.next));
}

#[test]
fn an_increment_that_does_not_fit_its_base_is_refused() {
    // FM-P5: by what a rank says of it, and what it names is free again.
    let mut node = Node::without_store();
    let old = data(8);
    node.keep(key(1), "a", &old, None);
    let len = old.len() as u64;
    let cases = [
        (changed(&[(len, 1)]), key(1), Cause::Malformed),
        (changed(&[(len - 2, 1)]), key(1), Cause::Malformed),
        (changed(&[(len - 2, 2)]), key(1), Cause::Malformed),
        (changed(&[(len - 1, 1)]), key(3), Cause::Missing),
    ];
    for (runs, of, why) in cases {
        let id = ExtentId(node.next);
        node.next += 1;
        let memory = Arc::new(Plain(Mutex::new(vec![1; EXTENT as usize]))) as Arc<dyn Memory>;
        let parts = vec![Part { from: PartFrom::Extent { id, offset: 0 }, bytes: 1 }];
        let bytes = runs.bytes();
        let base = Some(Base { key: of, path: "a".into(), changed: runs });
        let file = MemoryFile { path: "a".into(), base, parts };
        let kept = node.cache.keep((key(2), SLOT, RANK), &file, bytes, |_| Some(memory.clone()));
        assert_eq!(kept, Err(why));
        // And that is what the dataset's end is told with.
        let decl = FileDecl { rank: RANK, path: "a".into(), bytes };
        assert_eq!(node.cache.stat(key(2), SLOT, &[decl]).unwrap_err().cause, why);
        assert!(node.freed().contains(&id));
    }
}

#[test]
fn a_segment_is_used_again_when_its_datasets_are_gone() {
    let mut node = Node::new();
    for no in 1..60 {
        let data = data(no);
        let decl = node.keep(key(no), "a", &data, None);
        node.store_all();
        let m = node.digest(key(no), &decl);
        node.assert_whole(&m, &data);
        if no > 2 {
            node.cache.evict(&[key(no - 2)]);
        }
    }
    let usage = node.store.usage();
    assert!(usage.segments <= 4 && usage.dead == 0, "{usage:?}");
    assert_eq!(node.freed().len() as u64, node.next - 1);
}

#[test]
fn damage_in_a_segment_is_found_and_repaired() {
    // FM-F9, FM-S7: in a chunk of the store lie parts of two chunks of the file, and the other way round.
    let mut node = Node::new();
    let data = data(5);
    let decl = node.keep(key(1), "a", &data, None);
    node.store_all();
    let m = node.digest(key(1), &decl);
    let mut repaired = 0;
    for (_, place) in node.store.list() {
        if !node.store.list().iter().any(|(_, p)| *p == place) {
            // All that files had of it was repaired with its neighbour.
            continue;
        }
        repaired += 1;
        let at = (place.offset + u64::from(place.len) / 2) as usize;
        node.disk.tamper(format!("seg.{:06}", place.segment), |file| file[at] ^= 1);
        let (bad, files) = node.cache.verify(&m, &go_on).unwrap();
        assert!(!bad.is_empty() && files == ["a"], "{place:?}: {bad:?} {files:?}");
        for chunk in bad {
            let at = m.chunk(chunk).unwrap();
            let right = &data[at.offset as usize..][..at.len as usize];
            node.cache.write_chunk(&m, chunk, right).unwrap();
        }
        node.assert_whole(&m, &data);
    }
    assert!(repaired > 3);
    node.cache.evict(&[key(1)]);
    assert_eq!(node.store.list(), []);
}

#[test]
fn what_ranks_were_told_to_read_in_memory_stays_there() {
    // FM-P3: until the next dataset begins.
    let mut node = Node::new();
    let data = data(11);
    let decl = node.keep(key(1), "a", &data, None);
    let told = node.cache.pieces((key(1), SLOT, RANK), "a", 0, 1).unwrap();
    let [(Lies::Memory(pinned), _, len)] = told[..] else { panic!("{told:?}") };
    node.store_all();
    assert_eq!(node.freed(), &ids(1..4) - &BTreeSet::from([pinned]));
    // The rest is read where it is now: every byte once, in order.
    let rest = node.cache.pieces((key(1), SLOT, RANK), "a", len, 100).unwrap();
    assert!(rest.iter().all(|(lies, ..)| matches!(lies, Lies::Store(_))), "{rest:?}");
    let mut read = data[..len as usize].to_vec();
    for (lies, offset, len) in rest {
        let Lies::Store(place) = lies else { unreachable!() };
        node.disk.tamper(format!("seg.{:06}", place.segment), |file| {
            read.extend_from_slice(&file[offset as usize..(offset + len) as usize]);
        });
    }
    assert!(read == data);
    node.cache.make_dirs(key(2), SLOT, &[RANK]).unwrap();
    assert_eq!(node.freed(), ids(1..4));
    let m = node.digest(key(1), &decl);
    node.assert_whole(&m, &data);
}

#[test]
fn what_is_handed_over_is_stored_before_its_dataset_is_complete() {
    // FM-P11: and its memory comes back when it is wanted, under the same number as later ones.
    let node = Node::new();
    let whose = (key(1), SLOT, RANK);
    let data = bytes(15, 3 * EXTENT as usize);
    let id = ExtentId(1);
    let mut parts = Vec::new();
    for (number, piece) in (7u64..).zip(data.chunks(EXTENT as usize)) {
        node.cache.take(whose, [(Filled { id, number }, memory(piece))].into_iter());
        node.cache.reclaim(EXTENT);
        assert!(node.freed.lock().unwrap().is_empty(), "it is not stored");
        while node.cache.store_some(Share::Handed) {}
        assert_eq!(std::mem::take(&mut *node.freed.lock().unwrap()), [id]);
        parts.push(Part { from: PartFrom::Filled { number, offset: 0 }, bytes: EXTENT });
    }
    // In another order, and not all of it.
    parts.swap(0, 2);
    parts[1].bytes -= 100;
    let size = data.len() as u64 - 100;
    let mut want = data[2 * EXTENT as usize..].to_vec();
    want.extend(&data[EXTENT as usize..2 * EXTENT as usize - 100]);
    want.extend(&data[..EXTENT as usize]);
    let file = MemoryFile { path: "a".into(), base: None, parts };
    node.cache.keep(whose, &file, size, |_| None).unwrap();
    node.cache.store_kept(whose);
    let decl = FileDecl { rank: RANK, path: "a".into(), bytes: size };
    let m = node.digest(key(1), &decl);
    node.assert_whole(&m, &want);
    assert!(node.freed().is_empty());
    node.cache.evict(&[key(1)]);
    assert_eq!(node.store.list(), []);
}

#[test]
fn what_is_handed_over_and_not_completed_is_nobodys() {
    // FM-P4: the rank completes without it, or its dataset is dropped.
    let node = Node::new();
    let whose = (key(1), SLOT, RANK);
    let hand = |no: u64, number| {
        let filled = Filled { id: ExtentId(number), number };
        node.cache.take((key(no), SLOT, RANK), [(filled, memory(&data(no)))].into_iter());
    };
    hand(1, 1);
    node.cache.store_kept(whose);
    assert_eq!(node.freed(), ids(1..2));
    hand(1, 2);
    hand(2, 3);
    while node.cache.store_some(Share::All) {}
    node.cache.evict(&[key(1)]);
    assert_eq!(node.freed(), ids(1..3));
    assert!(node.store.list().iter().all(|(tag, _)| tag.key == key(2)));
    node.cache.remove_all();
    assert_eq!(node.freed(), ids(1..4));
    // A number that nobody gave is refused.
    let parts = vec![Part { from: PartFrom::Filled { number: 9, offset: 0 }, bytes: 1 }];
    let file = MemoryFile { path: "a".into(), base: None, parts };
    assert_eq!(node.cache.keep(whose, &file, 1, |_| None), Err(Cause::Malformed));
}

#[test]
fn memory_stays_until_it_is_wanted_or_needed_no_more() {
    // FM-T5: what redundancy and flushes read right after complete is in memory.
    let mut node = Node::new();
    let both = [data(16), data(17)];
    let decls = [1, 2].map(|no| node.keep(key(no), "a", &both[no as usize - 1], None));
    node.cache.store_kept((key(1), SLOT, RANK));
    assert!(!node.cache.store_wait(Share::Handed, Duration::ZERO), "it is complete");
    assert!(!node.cache.store_some(Share::Handed));
    while node.cache.store_some(Share::All) {}
    assert!(node.freed().is_empty());
    node.disk.plan(0, Fault::Stuck(Errno::IO));
    let m = node.digest(key(1), &decls[0]);
    let ops = node.disk.ops();
    node.assert_whole(&m, &both[0]);
    assert_eq!(node.disk.ops(), ops, "it is read in memory");
    node.disk.heal();
    // The oldest first, and no more than is wanted.
    node.cache.reclaim(EXTENT + 1);
    assert_eq!(node.freed(), ids(1..3));
    node.cache.settled(key(2));
    assert_eq!(node.freed(), &ids(1..3) | &ids(4..7));
    node.assert_whole(&m, &both[0]);
    let m = node.digest(key(2), &decls[1]);
    node.assert_whole(&m, &both[1]);
}
