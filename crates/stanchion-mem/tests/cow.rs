//! A snapshot by write protection: what was there at `begin`, whatever happens meanwhile, or an error.

mod common;

use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{Map, PAGE, as_everybody, in_child};
use proptest::prelude::*;
use rustix::io::Errno;
use stanchion_mem::copy::Piece;
use stanchion_mem::cow::{
    Copied, CowError, Faults, Lacking, MIN_BLOCK, Manner, Reins, Snapshot, probe,
};
use stanchion_mem::maps::{Span, Why, gather_huge_pages, gather_huge_pages_while};
use stanchion_mem::track::{Changes, Method, Reason, RegionId, Run, Tracker, Wanted};

fn piece(src: &Map, dst: &Map) -> Piece {
    Piece { src: src.at, dst: dst.at, len: src.len.min(dst.len) }
}

fn begin(pieces: &[Piece]) -> Result<Snapshot, CowError> {
    // SAFETY: nobody else writes yet, and the destinations are the test's own.
    unsafe { Snapshot::begin(pieces, MIN_BLOCK, Faults::All) }
}

/// In a child, with a source filled with pattern 1 and a destination; not where it may not be done.
fn with_maps(pages: usize, f: impl Fn(&Map, &Map)) {
    if let Err(e) = probe() {
        println!("skipped: {e}");
        return;
    }
    assert!(in_child(false, || {
        let (src, dst) = (Map::private(pages * PAGE), Map::shared(pages * PAGE));
        src.fill(1);
        f(&src, &dst);
    }));
}

#[test]
fn the_probe_tells_what_may_be_done() {
    as_everybody(|| {
        // SAFETY: a plain system call.
        if unsafe { libc::geteuid() } == 0 {
            assert_eq!(probe(), Ok(Faults::All));
            return;
        }
        let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap();
        if sysctl.trim() == "0" {
            assert_eq!(probe(), Ok(Faults::User));
            let (src, dst) = (Map::private(PAGE), Map::shared(PAGE));
            let refused = begin(&[piece(&src, &dst)]).err();
            assert_eq!(refused, Some(CowError::Lacking(Lacking::UserModeOnly)));
        }
    });
}

#[test]
fn threads_that_write_at_once_do_not_get_into_the_copy() {
    with_maps(4096, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        let start = Barrier::new(5);
        let copied: Copied = thread::scope(|s| {
            for t in 0..4 {
                let start = &start;
                s.spawn(move || {
                    start.wait();
                    // Two forward, two backward, all over the same pages.
                    for i in 0..4096 {
                        let page = if t % 2 == 0 { i } else { 4095 - i };
                        src.set(page * PAGE + t, 0xee);
                    }
                });
            }
            start.wait();
            snapshot.run().unwrap()
        });
        assert_eq!(copied.blocks, 256);
        assert!(dst.has(1, dst.len));
        assert!((0..4096).all(|p| src.get(p * PAGE) == 0xee && src.get(p * PAGE + 3) == 0xee));
    });
}

#[test]
fn writers_wait_until_their_block_is_copied() {
    with_maps(64, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        let written = AtomicBool::new(false);
        let at_it = Barrier::new(2);
        thread::scope(|s| {
            s.spawn(|| {
                at_it.wait();
                src.set(40 * PAGE, 0xee);
                written.store(true, Ordering::SeqCst);
            });
            at_it.wait();
            assert!(!written.load(Ordering::SeqCst));
            snapshot.run().unwrap();
        });
        assert!(dst.has(1, dst.len) && src.get(40 * PAGE) == 0xee);
    });
}

#[test]
fn system_calls_wait_as_well() {
    with_maps(64, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        thread::scope(|s| {
            s.spawn(|| {
                let zero = std::fs::File::open("/dev/zero").unwrap();
                let fd = std::os::fd::AsRawFd::as_raw_fd(&zero);
                // SAFETY: into the test's own mapping.
                let n = unsafe { libc::read(fd, src.ptr(16 * PAGE).cast(), 20 * PAGE) };
                assert_eq!(n, 20 * PAGE as isize);
            });
            snapshot.run().unwrap();
        });
        assert!(dst.has(1, dst.len) && (0..20 * PAGE).all(|i| src.get(16 * PAGE + i) == 0));
    });
}

#[test]
fn never_touched_and_partial_pages() {
    with_maps(64, |src, dst| {
        // Holes whose first write comes during the snapshot, and borders within pages.
        src.replace(0, src.len);
        src.set(100, 1);
        src.set(63 * PAGE, 2);
        let len = 63 * PAGE;
        let snapshot = begin(&[Piece { src: src.ptr(100), dst: dst.at, len }]).unwrap();
        thread::scope(|s| {
            s.spawn(|| (0..64).for_each(|p| src.set(p * PAGE + 100, 9)));
            snapshot.run().unwrap();
        });
        let expected = |i| if i == 0 { 1 } else { 2 * u8::from(i == 63 * PAGE - 100) };
        assert!((0..len).all(|i| dst.get(i) == expected(i)));
    });
}

#[test]
fn many_pieces() {
    with_maps(300, |src, dst| {
        // Some smaller than a page, some with gaps between, in no order.
        let mut pieces = Vec::new();
        let mut at = 0;
        for len in [10, 5000, 70_000, 4096, 300_000, 1, 12_288, 100_000, 0] {
            pieces.insert(0, Piece { src: src.ptr(at), dst: dst.ptr(at), len });
            at += len + len % 7 * 100;
        }
        let snapshot = begin(&pieces).unwrap();
        let before: Vec<Vec<u8>> = pieces
            .iter()
            .map(|p| (0..p.len).map(|i| src.get(p.src.addr() - src.at.addr() + i)).collect())
            .collect();
        thread::scope(|s| {
            s.spawn(|| src.fill(2));
            snapshot.run().unwrap();
        });
        for (p, before) in pieces.iter().zip(before) {
            let at = p.dst.addr() - dst.at.addr();
            assert!(before.iter().enumerate().all(|(i, b)| dst.get(at + i) == *b));
        }
    });
}

#[test]
fn wrong_uses_are_errors() {
    with_maps(64, |src, dst| {
        let p = piece(src, dst);
        // SAFETY: nobody else writes.
        let refused = unsafe { Snapshot::begin(&[p], 4096, Faults::All) };
        assert!(matches!(refused, Err(CowError::Block(4096))));
        assert_eq!(begin(&[p, p]).err(), Some(CowError::Overlap(1)));
        let shared = Piece { src: dst.at, dst: src.at, len: PAGE };
        let why = Why::Shared;
        assert_eq!(begin(&[p, shared]).err(), Some(CowError::Unsuitable { index: 1, why }));
        // After all these nothing is protected.
        src.fill(2);
        assert_eq!(begin(&[]).unwrap().run(), Ok(Copied::default()));
        drop(begin(&[p]).unwrap());
        src.fill(3);
    });
}

// A mapping has one userfaultfd; who is second is told so.
#[test]
fn a_region_is_watched_or_protected_but_not_both() {
    with_maps(64, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        let (mut t, _) = Tracker::new(Wanted::Scan).unwrap();
        let id = RegionId(1);
        // SAFETY: the region stays readable.
        let method = unsafe { t.watch(id, src.at, src.len) };
        assert_eq!(method, Ok(Method::Hash(Reason::Refused(Errno::BUSY))));
        snapshot.run().unwrap();
        t.unwatch(id).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { t.watch(id, src.at, src.len) }, Ok(Method::Scan));
        let errno = Errno::BUSY;
        assert_eq!(begin(&[piece(src, dst)]).err(), Some(CowError::Os { index: 0, errno }));
        let first = t.collect(id).unwrap();
        t.committed(id, first.mark).unwrap();
        src.set(3 * PAGE, 1);
        let run = Run { offset: 3 * PAGE, len: PAGE };
        assert_eq!(t.collect(id).unwrap().changes, Changes::Runs(vec![run]));
    });
}

#[test]
fn a_child_forked_meanwhile_is_free_and_changes_nothing() {
    with_maps(256, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        assert!(in_child(false, || {
            // It sees the old values and writes without waiting for anybody.
            assert!(src.has(1, src.len));
            src.fill(5);
        }));
        let mut snapshot = Some(snapshot);
        assert!(in_child(false, || {
            let refused = snapshot.take().unwrap().run();
            assert_eq!(refused, Err(CowError::OtherProcess));
        }));
        thread::scope(|s| {
            s.spawn(|| src.fill(2));
            snapshot.take().unwrap().run().unwrap();
        });
        assert!(dst.has(1, dst.len) && src.has(2, src.len));
    });
}

#[test]
fn nobody_waits_though_a_child_keeps_the_descriptor() {
    with_maps(64, |src, dst| {
        let mut fds = [0; 2];
        // SAFETY: the kernel writes two descriptors; the child waits until the other end is closed.
        unsafe {
            assert_eq!(libc::pipe(fds.as_mut_ptr()), 0);
            let snapshot = begin(&[piece(src, dst)]).unwrap();
            let child = libc::fork();
            if child == 0 {
                libc::close(fds[1]);
                libc::read(fds[0], (&raw mut fds).cast(), 1);
                libc::_exit(0);
            }
            drop(snapshot);
            src.fill(2);
            libc::close(fds[1]);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
    });
}

#[test]
fn memory_lost_meanwhile_tears_the_snapshot() {
    type Loss = (&'static str, fn(&Map));
    let losses: [Loss; 6] = [
        ("unmapped", |m| m.unmap(100 * PAGE, 2 * PAGE)),
        ("mapped anew", |m| m.replace(100 * PAGE, 2 * PAGE)),
        ("dropped", |m| m.advise(100 * PAGE, 2 * PAGE, libc::MADV_DONTNEED)),
        ("all dropped", |m| m.advise(0, m.len, libc::MADV_DONTNEED)),
        ("all unmapped", |m| m.unmap(0, m.len)),
        ("moved", |m| {
            // SAFETY: within the test's own mapping.
            let moved = unsafe {
                libc::mremap(m.ptr(100 * PAGE).cast(), PAGE, 3 * PAGE, libc::MREMAP_MAYMOVE)
            };
            assert_ne!(moved, libc::MAP_FAILED);
        }),
    ];
    for (name, lose) in losses {
        with_maps(2048, |src, dst| {
            let snapshot = begin(&[piece(src, dst)]).unwrap();
            lose(src);
            let torn = snapshot.run();
            assert!(matches!(torn, Err(CowError::Torn { index: 0, .. })), "{name}: {torn:?}");
        });
    }
}

// An area moved over another keeps its content, and must not be taken for it.
#[test]
fn one_piece_moved_over_another_tears_the_snapshot() {
    with_maps(64, |src, dst| {
        let (other, other_dst) = (Map::private(64 * PAGE), Map::shared(64 * PAGE));
        other.fill(7);
        let snapshot = begin(&[piece(src, dst), piece(&other, &other_dst)]).unwrap();
        // SAFETY: both places are the test's own.
        unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let to = src.ptr(16 * PAGE).cast::<libc::c_void>();
            assert_eq!(libc::mremap(other.at.cast(), 16 * PAGE, 16 * PAGE, flags, to), to);
        }
        assert!(matches!(snapshot.run(), Err(CowError::Torn { .. })));
        src.fill(3);
    });
}

// Threads that wait for a block, while another unmaps memory in the middle.
#[test]
fn losses_and_writers_at_once() {
    for round in 0..20 {
        with_maps(2048, |src, dst| {
            let snapshot = begin(&[piece(src, dst)]).unwrap();
            let start = Barrier::new(4);
            let whole = thread::scope(|s| {
                s.spawn(|| {
                    start.wait();
                    (0..1024).for_each(|p| src.set(p * PAGE, 1));
                });
                s.spawn(|| {
                    start.wait();
                    (1200..2048).rev().for_each(|p| src.set(p * PAGE, 1));
                });
                s.spawn(|| {
                    start.wait();
                    (0..round * 10).for_each(|_| thread::yield_now());
                    src.unmap(1100 * PAGE, 64 * PAGE);
                });
                start.wait();
                snapshot.run()
            });
            match whole {
                Ok(_) => assert!(dst.has(1, dst.len)),
                Err(e) => assert!(matches!(e, CowError::Torn { .. })),
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_writers(
        head in 0usize..5000,
        tail in 0usize..5000,
        writes in prop::collection::vec(prop::collection::vec(0usize..512 * PAGE, 0..300), 1..4),
    ) {
        with_maps(512, |src, dst| {
            let len = src.len - head - tail;
            let snapshot = begin(&[Piece { src: src.ptr(head), dst: dst.ptr(head), len }]).unwrap();
            thread::scope(|s| {
                for list in &writes {
                    s.spawn(move || list.iter().for_each(|at| src.set(*at, 0xee)));
                }
                snapshot.run().unwrap();
            });
            // Where nothing of the region was, the destination is untouched; make it whole to compare.
            let model = Map::private(dst.len);
            model.fill(1);
            for at in (0..head).chain(dst.len - tail..dst.len) {
                assert_eq!(dst.get(at), 0);
                dst.set(at, model.get(at));
            }
            assert!(dst.has(1, dst.len));
        });
    }
}

// What an ordinary user has: instructions wait, a system call that writes fails. So never where there are any.
#[test]
fn in_user_mode_only_instructions_wait() {
    as_everybody(|| {
        let (src, dst) = (Map::private(64 * PAGE), Map::shared(64 * PAGE));
        src.fill(1);
        // SAFETY: nobody else writes yet, and the destination is the test's own.
        let begun = unsafe { Snapshot::begin(&[piece(&src, &dst)], MIN_BLOCK, Faults::User) };
        let Ok(snapshot) = begun else {
            assert!(matches!(begun, Err(CowError::Lacking(_))), "{begun:?}");
            println!("skipped: {begun:?}");
            return;
        };
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&zero);
        // SAFETY: into the test's own mapping.
        let n = unsafe { libc::read(fd, src.ptr(0).cast(), PAGE) };
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((n, errno), (-1, Some(libc::EFAULT)));
        thread::scope(|s| {
            s.spawn(|| src.fill(2));
            snapshot.run().unwrap();
        });
        assert!(dst.has(1, dst.len) && src.has(2, src.len));
    });
}

#[test]
fn held_it_serves_who_waits_and_no_more() {
    with_maps(256, |src, dst| {
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        let reins = Reins::held().unwrap();
        let manner = Manner { reins: Some(&reins), ..Manner::default() };
        thread::scope(|s| {
            let copier = s.spawn(|| snapshot.run_as(manner));
            // Served, or this would not end.
            src.set(40 * PAGE, 0xee);
            let block = MIN_BLOCK / PAGE;
            let at = 40 / block * block * PAGE;
            assert!(dst.bytes(at, MIN_BLOCK).iter().any(|b| *b != 0));
            assert!(dst.bytes(0, MIN_BLOCK).iter().all(|b| *b == 0), "nobody waited for it");
            reins.go();
            let copied = copier.join().unwrap().unwrap();
            assert_eq!(copied.faults, 1);
        });
        assert!(dst.has(1, dst.len) && src.get(40 * PAGE) == 0xee);
    });
}

#[test]
fn paced_it_is_hurried_or_stopped() {
    for whole in [true, false] {
        with_maps(256, |src, dst| {
            let snapshot = begin(&[piece(src, dst)]).unwrap();
            let reins = Reins::held().unwrap();
            reins.go();
            // Of all but the first block it would take hours.
            let manner = Manner { reins: Some(&reins), bytes_per_s: 1, ..Manner::default() };
            let copied = thread::scope(|s| {
                let copier = s.spawn(|| snapshot.run_as(manner));
                src.set(200 * PAGE, 0xee);
                if whole {
                    reins.hurry()
                } else {
                    reins.stop()
                }
                copier.join().unwrap()
            });
            match copied {
                Ok(_) => assert!(whole && dst.has(1, dst.len)),
                Err(e) => assert!(!whole && e == CowError::Stopped, "{e}"),
            }
            // Nothing is protected any more.
            src.fill(2);
        });
    }
}

#[test]
fn who_hangs_up_stops_it() {
    with_maps(256, |src, dst| {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let snapshot = begin(&[piece(src, dst)]).unwrap();
        there.shutdown(std::net::Shutdown::Write).unwrap();
        let link = Some(std::os::fd::AsFd::as_fd(&here));
        let stopped = snapshot.run_as(Manner { link, ..Manner::default() });
        assert_eq!(stopped, Err(CowError::Stopped));
        src.fill(2);
    });
}

/// Kilobytes of huge pages that a mapping has.
fn huge_kb(map: &Map) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (start, end) = (map.at.addr(), map.at.addr() + map.len);
    let mut inside = false;
    let mut sum = 0;
    for line in text.lines() {
        let first = line.split('-').next().and_then(|a| usize::from_str_radix(a, 16).ok());
        if let Some(at) = first.filter(|_| line.contains("-") && line.contains(":")) {
            inside = (start..end).contains(&at);
        } else if let Some(kb) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
            sum += kb.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    sum
}

#[test]
fn memory_in_use_is_gathered_in_huge_pages() {
    const HUGE: usize = 512;
    let map = Map::private(8 * HUGE * PAGE);
    map.advise(0, map.len, libc::MADV_NOHUGEPAGE);
    (0..8 * HUGE).for_each(|p| map.set(p * PAGE, p as u8));
    assert_eq!(huge_kb(&map), 0);
    let start = map.at.addr() + 1;
    let gather = || gather_huge_pages(Span { start, len: map.len - 1 });
    gather();
    assert!((0..8 * HUGE).all(|p| map.get(p * PAGE) == p as u8));
    let granted = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if granted.is_ok_and(|text| !text.contains("[never]")) {
        // All but the ends, which are parts of one.
        let least = (6 * HUGE * PAGE) >> 10;
        // A page that a child of another test has too may stay behind.
        let tried = (0..1000).any(|_| {
            gather();
            huge_kb(&map) >= least
        });
        assert!(tried, "{} KiB", huge_kb(&map));
    }
    gather_huge_pages(Span { start, len: PAGE - 1 });
    gather_huge_pages(Span { start: usize::MAX - PAGE, len: PAGE });
    assert!((0..8 * HUGE).all(|p| map.get(p * PAGE) == p as u8));
}

#[test]
fn memory_is_gathered_as_long_as_nobody_minds() {
    const HUGE: usize = 512;
    let map = Map::private(40 * HUGE * PAGE);
    map.advise(0, map.len, libc::MADV_NOHUGEPAGE);
    (0..40 * HUGE).for_each(|p| map.set(p * PAGE, p as u8));
    let whole = Span { start: map.at.addr(), len: map.len };
    // Its owner has said so.
    gather_huge_pages_while(whole, || true);
    assert_eq!(huge_kb(&map), 0);
    map.advise(0, map.len, libc::MADV_HUGEPAGE);
    let looks = Cell::new(0);
    gather_huge_pages_while(whole, || looks.replace(looks.get() + 1) < 4);
    let granted = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if granted.is_ok_and(|text| !text.contains("[never]")) {
        let part = huge_kb(&map);
        assert!(looks.get() == 5 && part <= (4 * HUGE * PAGE) >> 10, "{part} KiB");
        // A page that a child of another test has too may stay behind.
        let all = (38 * HUGE * PAGE) >> 10;
        let tried = (0..1000).any(|_| {
            gather_huge_pages_while(whole, || true);
            huge_kb(&map) >= all
        });
        assert!(tried, "{} KiB", huge_kb(&map));
    }
    assert!((0..40 * HUGE).all(|p| map.get(p * PAGE) == p as u8));
}

// To free a part of a huge page would split it, and make the next snapshot as slow as one of small pages.
#[test]
fn huge_pages_are_copied_in_one_and_stay() {
    const HUGE: usize = 512;
    with_maps(8 * HUGE, |_, dst| {
        let src = Map::private(8 * HUGE * PAGE);
        src.advise(0, src.len, libc::MADV_HUGEPAGE);
        src.fill(1);
        let before = huge_kb(&src);
        let snapshot = begin(&[piece(&src, dst)]).unwrap();
        thread::scope(|s| {
            s.spawn(|| (0..8 * HUGE).rev().for_each(|p| src.set(p * PAGE, 0xee)));
            snapshot.run().unwrap();
        });
        assert!(dst.has(1, dst.len));
        if before == 0 {
            println!("skipped in part: no huge pages here");
        }
        assert_eq!(huge_kb(&src), before);
    });
}
