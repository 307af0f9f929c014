//! FM-P6: bytes that were spoiled since a checksum was made of them get no good one by an increment that shares them.

use stanchion_format::changed::Changed;
use stanchion_format::client::{Base, MemoryFile};
use stanchion_format::manifest::FileDecl;
use stanchion_format::peer::Cause;

use crate::common::{CHUNK, bytes, go_on, key};
use crate::node::{EXTENT, Node, RANK, SLOT, data};
use crate::{changed, patched};

/// Every `apart`-th kilobyte is new, up to the end of the file.
fn scattered(len: u64, apart: u64) -> Changed {
    let mut steps = Vec::new();
    let mut at = 0;
    while at + apart * 1024 < len {
        steps.push(((apart - 1) * 1024, 1024));
        at += apart * 1024;
    }
    steps.push((len - at, 0));
    changed(&steps)
}

/// A full file and an increment over it.
struct Two {
    node: Node,
    old: Vec<u8>,
    new: Vec<u8>,
    runs: Changed,
    fresh: Vec<u8>,
    decl: FileDecl,
}

fn two(mut node: Node, apart: u64) -> Two {
    let old = data(1);
    let decl = node.keep(key(1), "a", &old, None);
    node.digest(key(1), &decl);
    let runs = scattered(old.len() as u64, apart);
    let fresh = bytes(2, runs.own() as usize);
    let decl = node.keep(key(2), "a", &fresh, Some(((key(1), "a"), runs.clone())));
    let new = patched(&old, &runs, &fresh);
    Two { node, old, new, runs, fresh, decl }
}

/// The manifest of `decl` is refused, or vouches for other bytes than there are: those are repaired when they are read.
fn found(node: &Node, no: u64, decl: &FileDecl) {
    match node.try_digest(key(no), decl) {
        Err(trouble) => assert_eq!(trouble.cause, Cause::Damaged),
        Ok(m) => assert_eq!(node.cache.verify(&m, &go_on).unwrap().0.len(), 1),
    }
}

fn refused(t: &Two) {
    let trouble = t.node.try_digest(key(2), &t.decl).unwrap_err();
    assert_eq!((trouble.cause, trouble.rank), (Cause::Damaged, Some(RANK)));
    // Nor is anything built on it.
    let same = changed(&[(t.old.len() as u64, 0)]);
    let base = Some(Base { key: key(2), path: "a".into(), changed: same });
    let file = MemoryFile { path: "a".into(), base, parts: vec![] };
    let kept = t.node.cache.keep((key(3), SLOT, RANK), &file, t.old.len() as u64, |_| None);
    assert_eq!(kept, Err(Cause::Damaged));
}

/// Chunks of many pieces, which are read at once, and of few, whose pieces are summed one by one.
const APART: [u64; 3] = [2, 7, CHUNK as u64 / 1024];

#[test]
fn spoiled_bytes_of_the_base_are_found() {
    for apart in APART {
        for at in [0, 1000, CHUNK as usize + 3000, 2 * EXTENT as usize + 200] {
            let t = two(Node::without_store(), apart);
            // The rank wrote them before, and not since.
            if t.old[at..at + 16] != t.new[at..at + 16] {
                continue;
            }
            t.node.spoil(&t.old[at..at + 16]);
            found(&t.node, 2, &t.decl);
        }
    }
}

#[test]
fn spoiled_bytes_that_the_increment_has_not_are_none_of_its_business() {
    // Only if a sum is of them and of others too they cost it the dataset: nobody knows which of them it is.
    let t = two(Node::without_store(), 2);
    t.node.spoil(&t.old[1024..1040]);
    refused(&t);
    let mut node = Node::without_store();
    let old = data(1);
    let decl = node.keep(key(1), "a", &old, None);
    node.digest(key(1), &decl);
    let len = old.len() as u64;
    let runs = changed(&[(0, u64::from(CHUNK)), (len - u64::from(CHUNK), 0)]);
    let fresh = bytes(2, CHUNK as usize);
    node.spoil(&old[100..116]);
    let decl = node.keep(key(2), "a", &fresh, Some(((key(1), "a"), runs.clone())));
    let m = node.digest(key(2), &decl);
    node.assert_whole(&m, &patched(&old, &runs, &fresh));
}

#[test]
fn spoiled_bytes_of_an_increment_are_found_by_the_next() {
    for apart in APART {
        let mut t = two(Node::without_store(), apart);
        let m = t.node.digest(key(2), &t.decl);
        t.node.assert_whole(&m, &t.new);
        t.node.spoil(&t.fresh[500..516]);
        let runs = scattered(t.old.len() as u64, 3 * apart);
        let fresh = bytes(3, runs.own() as usize);
        let decl = t.node.keep(key(3), "a", &fresh, Some(((key(2), "a"), runs)));
        found(&t.node, 3, &decl);
    }
}

#[test]
fn what_was_repaired_is_good_again() {
    for apart in APART {
        let mut t = two(Node::without_store(), apart);
        let first = t.node.digest(key(2), &t.decl);
        t.node.spoil(&t.old[10..26]);
        assert_eq!(t.node.cache.verify(&first, &go_on).unwrap().0, [0]);
        t.node.cache.write_chunk(&first, 0, &t.new[..CHUNK as usize]).unwrap();
        let runs = t.runs.clone();
        let fresh = bytes(3, runs.own() as usize);
        let decl = t.node.keep(key(3), "a", &fresh, Some(((key(2), "a"), runs.clone())));
        let m = t.node.digest(key(3), &decl);
        t.node.assert_whole(&m, &patched(&t.new, &runs, &fresh));
    }
}

#[test]
fn what_is_on_its_way_to_the_store_is_compared_too() {
    // Nothing is stored yet: an increment is made of what is in memory.
    for apart in APART {
        let t = two(Node::new(), apart);
        t.node.spoil(&t.old[10..26]);
        found(&t.node, 2, &t.decl);
    }
}
