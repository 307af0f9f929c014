//! Changed pages: every write is found, and with the kernel's help nothing else.

mod common;

use common::{Map, PAGE, as_everybody, in_child};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use stanchion_mem::maps::Why;
use stanchion_mem::track::{
    Changes, Collected, Mark, Method, Reason, RegionId, Run, TrackError, Tracker, Wanted,
};

const ID: RegionId = RegionId(1);
const KINDS: [Wanted; 2] = [Wanted::Scan, Wanted::Hash { block: PAGE }];

fn tracker(kind: Wanted) -> Option<Tracker> {
    match Tracker::new(kind) {
        Ok((tracker, _)) => Some(tracker),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

fn watch(t: &mut Tracker, id: RegionId, map: &Map, offset: usize, len: usize) -> Method {
    // SAFETY: the tests keep what they watch readable.
    unsafe { t.watch(id, map.ptr(offset), len) }.unwrap()
}

/// Collects and commits.
fn changes(t: &mut Tracker) -> Changes {
    let Collected { mark, changes } = t.collect(ID).unwrap();
    t.committed(ID, mark).unwrap();
    changes
}

fn pages(runs: &[(usize, usize)]) -> Changes {
    let run = |&(first, n): &(usize, usize)| Run { offset: first * PAGE, len: n * PAGE };
    Changes::Runs(runs.iter().map(run).collect())
}

/// As everybody, with both kinds, on a filled region of `n` pages of which all is known.
fn on_region(n: usize, f: impl Fn(&mut Tracker, &Map)) {
    as_everybody(|| {
        for kind in KINDS {
            let Some(mut t) = tracker(kind) else { continue };
            let map = Map::private(n * PAGE);
            map.fill(1);
            watch(&mut t, ID, &map, 0, n * PAGE);
            assert_eq!(changes(&mut t), Changes::All);
            assert_eq!(changes(&mut t), pages(&[]));
            f(&mut t, &map);
        }
    });
}

#[test]
fn writes_are_found_once() {
    on_region(16, |t, map| {
        map.set(3 * PAGE, 7);
        map.set(4 * PAGE + 5, 7);
        map.set(15 * PAGE, 7);
        assert_eq!(changes(t), pages(&[(3, 2), (15, 1)]));
        assert_eq!(changes(t), pages(&[]));
    });
}

// DESIGN.md, rule 9.
#[test]
fn what_is_not_committed_comes_again() {
    on_region(16, |t, map| {
        map.set(PAGE, 7);
        let a = t.collect(ID).unwrap();
        assert_eq!(a.changes, pages(&[(1, 1)]));
        t.dropped(ID, a.mark).unwrap();
        map.set(2 * PAGE, 7);
        let b = t.collect(ID).unwrap();
        assert_eq!(b.changes, pages(&[(1, 2)]));
        // Nothing is heard of b, then the next one is committed, and b's fate does not matter.
        map.set(9 * PAGE, 7);
        let c = t.collect(ID).unwrap();
        assert_eq!(c.changes, pages(&[(1, 2), (9, 1)]));
        map.set(10 * PAGE, 7);
        let d = t.collect(ID).unwrap();
        t.committed(ID, c.mark).unwrap();
        t.committed(ID, b.mark).unwrap();
        t.dropped(ID, d.mark).unwrap();
        assert_eq!(changes(t), pages(&[(10, 1)]));
        assert_eq!(changes(t), pages(&[]));
        // More intervals than are kept apart: the oldest merge, nothing is lost.
        let marks: Vec<Mark> = (0..16)
            .map(|page| {
                map.set(page * PAGE, 99);
                t.collect(ID).unwrap().mark
            })
            .collect();
        t.committed(ID, marks[0]).unwrap();
        assert_eq!(t.collect(ID).unwrap().changes, pages(&[(0, 16)]));
        t.committed(ID, marks[14]).unwrap();
        assert_eq!(changes(t), pages(&[(15, 1)]));
        t.forget(ID).unwrap();
        assert_eq!(changes(t), Changes::All);
    });
}

#[test]
fn an_uncommitted_first_collection_stays_full() {
    as_everybody(|| {
        for kind in KINDS {
            let Some(mut t) = tracker(kind) else { continue };
            let map = Map::private(4 * PAGE);
            watch(&mut t, ID, &map, 0, 4 * PAGE);
            let first = t.collect(ID).unwrap();
            map.set(0, 1);
            assert_eq!(t.collect(ID).unwrap().changes, Changes::All);
            t.committed(ID, first.mark).unwrap();
            assert_eq!(t.collect(ID).unwrap().changes, pages(&[(0, 1)]));
        }
    });
}

#[test]
fn partial_pages_count_as_changed() {
    as_everybody(|| {
        let Some(mut t) = tracker(Wanted::Scan) else { return };
        let map = Map::private(8 * PAGE);
        assert_eq!(watch(&mut t, ID, &map, 100, 5 * PAGE), Method::Scan);
        assert_eq!(changes(&mut t), Changes::All);
        map.set(3 * PAGE, 1);
        let (head, tail) = (PAGE - 100, 5 * PAGE - 100);
        let run = |offset, len| Run { offset, len };
        let expected = vec![run(0, head), run(head + 2 * PAGE, PAGE), run(tail, 100)];
        assert_eq!(changes(&mut t), Changes::Runs(expected));
        // One that shares a page with it, but no whole one, and one without any whole page.
        assert_eq!(watch(&mut t, RegionId(2), &map, 5 * PAGE + 100, PAGE + 9), Method::Scan);
        assert_eq!(t.collect(RegionId(2)).unwrap().changes, Changes::All);
        assert_eq!(t.collect(RegionId(2)).unwrap().changes, Changes::All);
        let hashed = Method::Hash(Reason::Overlaps(ID));
        assert_eq!(watch(&mut t, RegionId(3), &map, 4 * PAGE, PAGE), hashed);
        t.unwatch(ID).unwrap();
        assert_eq!(watch(&mut t, RegionId(4), &map, 4 * PAGE, PAGE), Method::Scan);
    });
}

#[test]
fn system_calls_write_without_harm() {
    on_region(64, |t, map| {
        let mut fds = [0; 2];
        // SAFETY: the kernel writes two descriptors; the buffers lie in the mappings.
        unsafe {
            let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()), 0);
            let from = [9u8; 2 * PAGE];
            assert_eq!(libc::write(fds[0], from.as_ptr().cast(), PAGE), PAGE as isize);
            assert_eq!(libc::read(fds[1], map.ptr(5 * PAGE).cast(), PAGE), PAGE as isize);
            assert_eq!(libc::send(fds[0], from.as_ptr().cast(), 10, 0), 10);
            assert_eq!(libc::recv(fds[1], map.ptr(20 * PAGE - 5).cast(), 10, 0), 10);
            let zero = libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY);
            assert_eq!(libc::read(zero, map.ptr(40 * PAGE).cast(), PAGE), PAGE as isize);
            // Another process's write, as MPI does it within a node.
            let local =
                libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: 2 * PAGE };
            let remote = libc::iovec { iov_base: map.ptr(50 * PAGE).cast(), iov_len: 2 * PAGE };
            let n = libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0);
            assert_eq!(n, 2 * PAGE as isize);
            [fds[0], fds[1], zero].iter().for_each(|fd| assert_eq!(libc::close(*fd), 0));
        }
        assert_eq!(changes(t), pages(&[(5, 1), (19, 2), (40, 1), (50, 2)]));
    });
}

#[test]
fn a_forked_child_disturbs_nothing() {
    on_region(16, |t, map| {
        map.set(PAGE, 7);
        assert!(in_child(false, || {
            map.set(2 * PAGE, 7);
            assert!(matches!(t.collect(ID), Err(TrackError::OtherProcess)));
            assert!(matches!(t.unwatch(ID), Err(TrackError::OtherProcess)));
        }));
        map.set(3 * PAGE, 7);
        assert_eq!(changes(t), pages(&[(1, 1), (3, 1)]));
        // A child drops its copy of a tracker: the parent's still works.
        assert!(in_child(false, || drop(std::mem::replace(
            t,
            Tracker::new(Wanted::Auto).unwrap().0
        ))));
        map.set(4 * PAGE, 7);
        assert_eq!(changes(t), pages(&[(4, 1)]));
    });
}

fn covers(changes: &Changes, page: usize) -> bool {
    match changes {
        Changes::All => true,
        Changes::Runs(runs) => {
            runs.iter().any(|r| r.offset <= page * PAGE && (page + 1) * PAGE <= r.offset + r.len)
        }
    }
}

#[test]
fn dropped_pages_count_as_written() {
    // A part of a page table, and whole ones, which the kernel may drop as well.
    for (at, n) in [(3, 5), (512, 2048), (0, 4096)] {
        on_region(4096, |t, map| {
            map.advise(at * PAGE, n * PAGE, libc::MADV_DONTNEED);
            let found = changes(t);
            // The mapping need not begin at a page table; so look at what must be there.
            assert!((at..at + n).all(|p| covers(&found, p)), "{found:?}");
            assert_eq!(changes(t), pages(&[]));
            map.set((at + 1) * PAGE, 3);
            assert_eq!(changes(t), pages(&[(at + 1, 1)]));
        });
    }
}

#[test]
fn a_region_shrunk_and_grown_again_counts_as_written() {
    on_region(4096, |t, map| {
        // SAFETY: within the test's own mapping, of which nothing is used while it is small.
        unsafe {
            assert_ne!(libc::mremap(map.at.cast(), map.len, 1024 * PAGE, 0), libc::MAP_FAILED);
            let grown = libc::mremap(map.at.cast(), 1024 * PAGE, map.len, 0);
            assert_eq!(grown, map.at.cast(), "its place was taken meanwhile");
        }
        let found = changes(t);
        assert!((1024..4096).all(|p| covers(&found, p)), "{found:?}");
        assert_eq!(changes(t), pages(&[]));
        map.set(4000 * PAGE, 3);
        assert_eq!(changes(t), pages(&[(4000, 1)]));
    });
}

#[test]
fn reading_is_not_writing() {
    as_everybody(|| {
        for kind in KINDS {
            let Some(mut t) = tracker(kind) else { continue };
            let map = Map::private(1024 * PAGE);
            watch(&mut t, ID, &map, 0, map.len);
            assert_eq!(changes(&mut t), Changes::All);
            assert!((0..1024).all(|p| map.get(p * PAGE) == 0));
            assert_eq!(changes(&mut t), pages(&[]));
            map.set(77 * PAGE, 1);
            assert_eq!(changes(&mut t), pages(&[(77, 1)]));
        }
    });
}

#[test]
fn what_was_mapped_anew_counts_as_written() {
    on_region(64, |t, map| {
        map.replace(10 * PAGE, 2 * PAGE);
        let found = changes(t);
        assert!(covers(&found, 10) && covers(&found, 11));
        // And it is watched like the rest.
        assert_eq!(changes(t), pages(&[]));
        map.set(10 * PAGE, 1);
        assert_eq!(changes(t), pages(&[(10, 1)]));
        map.replace(0, map.len);
        map.set(0, 5);
        assert!((0..64).all(|p| covers(&changes(t), p) || p > 0));
        assert_eq!(changes(t), pages(&[]));
    });
}

#[test]
fn what_is_unmapped_is_an_error() {
    on_region(64, |t, map| {
        map.unmap(10 * PAGE, 2 * PAGE);
        assert_eq!(t.collect(ID), Err(TrackError::Unmapped(ID)));
        assert_eq!(t.collect(ID), Err(TrackError::Unmapped(ID)));
        map.replace(10 * PAGE, 2 * PAGE);
        let found = changes(t);
        assert!(covers(&found, 10) && covers(&found, 11));
        map.unmap(0, map.len);
        assert_eq!(t.collect(ID), Err(TrackError::Unmapped(ID)));
        t.unwatch(ID).unwrap();
        assert_eq!(t.unwatch(ID), Err(TrackError::Unknown(ID)));
    });
}

#[test]
fn mremap_is_noticed() {
    on_region(64, |t, map| {
        // Shrunk and grown again in place.
        // SAFETY: within the test's own mapping.
        unsafe {
            assert_ne!(libc::mremap(map.at.cast(), map.len, 32 * PAGE, 0), libc::MAP_FAILED);
            if libc::mremap(map.at.cast(), 32 * PAGE, map.len, 0) == libc::MAP_FAILED {
                map.replace(32 * PAGE, 32 * PAGE);
            }
        }
        let found = changes(t);
        assert!((32..64).all(|p| covers(&found, p)), "{found:?}");
        assert_eq!(changes(t), pages(&[]));
        // Another watched mapping moved over a part of it, then the region itself moved away and back.
        let other = Map::private(8 * PAGE);
        other.fill(5);
        watch(t, RegionId(2), &other, 0, other.len);
        t.collect(RegionId(2)).unwrap();
        // SAFETY: both places are the test's own.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let (from, to) = (other.at.cast(), map.ptr(16 * PAGE).cast::<libc::c_void>());
            assert_eq!(libc::mremap(from, other.len, other.len, flags, to), to);
        }
        let found = changes(t);
        assert!((16..24).all(|p| covers(&found, p)), "{found:?}");
        assert_eq!(changes(t), pages(&[]));
        let away = Map::private(map.len);
        // SAFETY: both places are the test's own; it is written to while it is away.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let (here, there) = (map.at.cast::<libc::c_void>(), away.at.cast::<libc::c_void>());
            // It consists of several mappings by now, which move one by one.
            for page in 0..64 {
                let by = page * PAGE;
                let (a, b) = (here.byte_add(by), there.byte_add(by));
                assert_eq!(libc::mremap(a, PAGE, PAGE, flags, b), b);
            }
            away.set(7 * PAGE, 77);
            for page in 0..64 {
                let by = page * PAGE;
                let (a, b) = (here.byte_add(by), there.byte_add(by));
                assert_eq!(libc::mremap(b, PAGE, PAGE, flags, a), a);
            }
        }
        assert!(covers(&changes(t), 7));
    });
}

#[test]
fn protections_and_swapping_out_change_nothing() {
    on_region(64, |t, map| {
        // SAFETY: nobody touches it while it is protected.
        unsafe {
            assert_eq!(libc::mprotect(map.at.cast(), map.len, libc::PROT_READ), 0);
            let both = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(map.at.cast(), map.len, both), 0);
        }
        assert_eq!(changes(t), pages(&[]));
        map.advise(0, map.len, libc::MADV_PAGEOUT);
        map.set(8 * PAGE, 1);
        assert_eq!(changes(t), pages(&[(8, 1)]));
    });
}

#[test]
fn huge_pages_are_reported_by_small_ones() {
    on_region(1024, |t, map| {
        t.unwatch(ID).unwrap();
        map.advise(0, map.len, libc::MADV_HUGEPAGE);
        map.replace(0, map.len);
        map.advise(0, map.len, libc::MADV_HUGEPAGE);
        map.fill(2);
        watch(t, ID, map, 0, map.len);
        assert_eq!(changes(t), Changes::All);
        assert_eq!(changes(t), pages(&[]));
        map.set(700 * PAGE, 1);
        let found = changes(t);
        assert!(covers(&found, 700) && !covers(&found, 10) && !covers(&found, 1000), "{found:?}");
        assert_eq!(changes(t), pages(&[]));
    });
}

#[test]
fn memory_that_the_kernel_cannot_watch_is_hashed() {
    as_everybody(|| {
        let Some(mut t) = tracker(Wanted::Scan) else { return };
        let shared = Map::shared(4 * PAGE);
        let memory = |why| Method::Hash(Reason::Memory(why));
        assert_eq!(watch(&mut t, ID, &shared, 0, shared.len), memory(Why::Shared));
        assert_eq!(changes(&mut t), Changes::All);
        assert!(in_child(false, || shared.set(2 * PAGE, 4)));
        assert_eq!(changes(&mut t), pages(&[(2, 1)]));
        let pinned = Map::private(4 * PAGE);
        pinned.advise(0, pinned.len, libc::MADV_DONTFORK);
        assert_eq!(watch(&mut t, RegionId(2), &pinned, 0, pinned.len), memory(Why::NotForked));
        // A region that turns into something else while it is watched.
        let map = Map::private(4 * PAGE);
        t.unwatch(ID).unwrap();
        assert_eq!(watch(&mut t, ID, &map, 0, map.len), Method::Scan);
        // SAFETY: both places are the test's own.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            libc::mremap(shared.at.cast(), shared.len, shared.len, flags, map.at);
        }
        assert_eq!(changes(&mut t), Changes::All);
        assert_eq!(t.method(ID), Ok(memory(Why::Shared)));
        assert_eq!(changes(&mut t), pages(&[]));
        map.set(0, 9);
        assert_eq!(changes(&mut t), pages(&[(0, 1)]));
    });
}

#[test]
fn wrong_uses_are_errors() {
    assert_eq!(Tracker::new(Wanted::Hash { block: 100 }).err(), Some(TrackError::Block(100)));
    let Some(mut t) = tracker(Wanted::Auto) else { return };
    let map = Map::private(PAGE);
    watch(&mut t, ID, &map, 0, PAGE);
    let unmapped = Map::private(PAGE);
    unmapped.unmap(0, PAGE);
    // SAFETY: nothing of it is collected.
    unsafe {
        assert_eq!(t.watch(ID, map.at, PAGE), Err(TrackError::Known(ID)));
        let two = [(RegionId(2), map.at.cast_const(), 1), (RegionId(2), map.at.cast_const(), 1)];
        assert_eq!(t.watch_all(&two), Err(TrackError::Known(RegionId(2))));
        let range = Err(TrackError::Range(RegionId(3)));
        assert_eq!(t.watch(RegionId(3), map.at, usize::MAX), range);
    }
    assert_eq!(t.collect(RegionId(9)), Err(TrackError::Unknown(RegionId(9))));
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize, usize),
    Drop(usize, usize),
    Replace(usize, usize),
    Collect,
    CollectAndCommit,
    CommitLast,
}

fn step(n: usize) -> impl Strategy<Value = Step> {
    let range = (0..n).prop_flat_map(move |a| (Just(a), 1..=(n - a).min(40)));
    prop_oneof![
        8 => (0..n, 0..PAGE).prop_map(|(p, o)| Step::Write(p, o)),
        1 => range.clone().prop_map(|(a, n)| Step::Drop(a, n)),
        1 => range.prop_map(|(a, n)| Step::Replace(a, n)),
        1 => Just(Step::Collect),
        2 => Just(Step::CollectAndCommit),
        1 => Just(Step::CommitLast),
    ]
}

/// Against a model: `copy` is what the committed datasets and the last collection would give back.
fn follow(kind: Wanted, n: usize, steps: &[Step]) -> Result<(), TestCaseError> {
    let Some(mut t) = tracker(kind) else { return Ok(()) };
    let map = Map::private(n * PAGE);
    watch(&mut t, ID, &map, 0, map.len);
    let mut committed = vec![0xff; map.len];
    // Pages that may come: those touched since the last committed collection; all after a replacement.
    let mut may = vec![true; n];
    let mut last: Option<(Mark, Vec<u8>)> = None;
    let mut since = vec![false; n];
    let mut value = 0u8;
    for s in steps {
        match *s {
            Step::Write(page, offset) => {
                value = value.wrapping_add(1);
                map.set(page * PAGE + offset, value);
                since[page] = true;
            }
            Step::Drop(first, len) => {
                map.advise(first * PAGE, len * PAGE, libc::MADV_DONTNEED);
                since[first..first + len].fill(true);
            }
            Step::Replace(first, len) => {
                map.replace(first * PAGE, len * PAGE);
                since.fill(true);
            }
            Step::Collect | Step::CollectAndCommit => {
                may.iter_mut().zip(&since).for_each(|(m, s)| *m |= *s);
                since.fill(false);
                let c = t.collect(ID).unwrap();
                let mut copy = committed.clone();
                for (page, may) in may.iter().enumerate() {
                    if covers(&c.changes, page) {
                        prop_assert!(may, "page {} was not touched", page);
                        let at = page * PAGE;
                        copy[at..at + PAGE].copy_from_slice(&map.bytes(at, PAGE));
                    }
                }
                prop_assert!(copy == map.bytes(0, map.len), "a change was missed");
                if matches!(s, Step::CollectAndCommit) {
                    t.committed(ID, c.mark).unwrap();
                    (committed, last) = (copy, None);
                    may.fill(false);
                } else {
                    last = Some((c.mark, copy));
                }
            }
            Step::CommitLast => {
                if let Some((mark, copy)) = last.take() {
                    t.committed(ID, mark).unwrap();
                    committed = copy;
                    may.fill(false);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn random_histories_lose_no_change() {
    as_everybody(|| {
        // More than a page table covers; hashes know none.
        for (kind, n) in [(Wanted::Scan, 1100), (Wanted::Hash { block: PAGE }, 60)] {
            let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
            let steps = prop::collection::vec(step(n), 1..120);
            TestRunner::new(config).run(&steps, |steps| follow(kind, n, &steps)).unwrap();
        }
    });
}
