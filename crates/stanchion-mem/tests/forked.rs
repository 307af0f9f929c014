//! A snapshot by fork.

mod common;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use std::{io::Read, thread};

use common::{Map, PAGE, as_everybody, in_child};
use stanchion_mem::copy::Piece;
use stanchion_mem::forked::{ForkError, Forked, Manner, forked_copy};
use stanchion_mem::maps::{Purpose, Span, Why, unsuitable};
use stanchion_mem::track::{Changes, Method, RegionId, Tracker, Wanted};

const LONG: Duration = Duration::from_secs(60);

fn fork(pieces: &[Piece]) -> Result<Forked, ForkError> {
    // SAFETY: nobody else writes yet, and the destinations are the test's own shared mappings.
    unsafe { forked_copy(pieces, Manner::default()) }
}

fn maps(pages: usize) -> (Map, Map, Piece) {
    let (src, dst) = (Map::private(pages * PAGE), Map::shared(pages * PAGE));
    src.fill(1);
    let piece = Piece { src: src.at, dst: dst.at, len: src.len };
    (src, dst, piece)
}

#[test]
fn the_copy_is_of_the_moment() {
    as_everybody(|| {
        let (src, dst, piece) = maps(4096);
        let mut child = fork(&[piece]).unwrap();
        src.fill(2);
        child.wait(LONG).unwrap();
        child.wait(LONG).unwrap();
        assert!(dst.has(1, dst.len) && src.has(2, src.len));
    });
}

#[test]
fn losses_of_the_parent_do_not_matter() {
    as_everybody(|| {
        let (src, dst, piece) = maps(4096);
        let mut child = fork(&[piece]).unwrap();
        src.advise(0, 100 * PAGE, libc::MADV_DONTNEED);
        src.unmap(100 * PAGE, 3000 * PAGE);
        child.wait(LONG).unwrap();
        assert!(dst.has(1, dst.len));
    });
}

#[test]
fn it_tells_whom_it_shall_and_the_application_meets_no_child() {
    as_everybody(|| {
        let (_src, dst, piece) = maps(64);
        let (mut here, there) = UnixStream::pair().unwrap();
        let manner = Manner { ready: Some((there.as_fd(), b"finished")), ..Manner::default() };
        // SAFETY: as in `fork`.
        let mut child = unsafe { forked_copy(&[piece], manner) }.unwrap();
        drop(there);
        child.go();
        // The application's own wait() finds nothing.
        // SAFETY: plain system calls.
        unsafe {
            assert_eq!(libc::waitpid(-1, std::ptr::null_mut(), 0), -1);
            assert_eq!(*libc::__errno_location(), libc::ECHILD);
        }
        let mut word = String::new();
        here.read_to_string(&mut word).unwrap();
        assert_eq!(word, "finished");
        assert!(dst.has(1, dst.len));
        child.wait(LONG).unwrap();
    });
}

#[test]
fn the_child_keeps_no_descriptor_open() {
    as_everybody(|| {
        let (_src, _dst, piece) = maps(16384);
        let (mut here, there) = UnixStream::pair().unwrap();
        let mut child = fork(&[piece]).unwrap();
        drop(there);
        // It ends while the child waits to be let go.
        assert_eq!(here.read(&mut [0; 8]).unwrap(), 0);
        child.wait(LONG).unwrap();
    });
}

#[test]
fn a_killed_child_is_an_error_and_a_dropped_one_is_killed() {
    as_everybody(|| {
        let (_src, _dst, piece) = maps(65536);
        let mut child = fork(&[piece]).unwrap();
        rustix::process::pidfd_send_signal(child.pidfd(), rustix::process::Signal::KILL).unwrap();
        assert_eq!(child.wait(LONG), Err(ForkError::Died));
        let child = fork(&[piece]).unwrap();
        let pidfd = rustix::io::dup(child.pidfd()).unwrap();
        drop(child);
        let gone = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        assert_eq!(gone, Err(rustix::io::Errno::SRCH));
    });
}

#[test]
fn the_child_waits_until_it_is_let_go_or_not_wanted() {
    as_everybody(|| {
        let (src, dst, piece) = maps(4096);
        let (mut here, there) = UnixStream::pair().unwrap();
        let manner = Manner { ready: Some((there.as_fd(), b"x")), ..Manner::default() };
        // SAFETY: as in `fork`.
        let mut child = unsafe { forked_copy(&[piece], manner) }.unwrap();
        src.fill(2);
        here.shutdown(std::net::Shutdown::Write).unwrap();
        drop(there);
        // It was never let go, and ends all the same.
        assert_eq!(here.read(&mut [0; 8]).unwrap(), 0);
        assert!(dst.bytes(0, dst.len).iter().all(|b| *b == 0), "nothing was copied");
        assert_eq!(child.wait(LONG), Err(ForkError::Died));
        // Its parent is gone, or has something else to do: it goes on alone.
        let (mut here, there) = UnixStream::pair().unwrap();
        let manner = Manner { ready: Some((there.as_fd(), b"x")), ..Manner::default() };
        // SAFETY: as in `fork`.
        unsafe { forked_copy(&[piece], manner) }.unwrap().leave();
        drop(there);
        let mut word = String::new();
        here.read_to_string(&mut word).unwrap();
        assert!(word == "x" && dst.has(2, dst.len));
    });
}

#[test]
fn who_is_slow_ends_at_once_when_it_is_not_wanted() {
    as_everybody(|| {
        let (_src, dst, piece) = maps(4096);
        let (mut here, there) = UnixStream::pair().unwrap();
        // A step takes as long as a step may.
        let manner = Manner { ready: Some((there.as_fd(), b"x")), bytes_per_s: 1 };
        // SAFETY: as in `fork`.
        let mut child = unsafe { forked_copy(&[piece], manner) }.unwrap();
        drop(there);
        child.go();
        while dst.bytes(0, PAGE).iter().all(|b| *b == 0) {
            std::thread::yield_now();
        }
        here.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(here.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(child.wait(LONG), Err(ForkError::Died));
        let half = dst.len / 2;
        assert!(dst.bytes(half, half).iter().all(|b| *b == 0), "the last step was not done");
    });
}

#[test]
fn a_destination_that_ends_early_is_an_error() {
    as_everybody(|| {
        let (_src, dst, piece) = maps(64);
        dst.unmap(32 * PAGE, 32 * PAGE);
        let mut child = fork(&[piece]).unwrap();
        assert_eq!(child.wait(LONG), Err(ForkError::Died));
    });
}

#[test]
fn what_a_child_does_not_see_is_refused() {
    as_everybody(|| {
        let (src, dst, piece) = maps(64);
        src.advise(10 * PAGE, PAGE, libc::MADV_DONTFORK);
        let refused = |why| Some(ForkError::Unsuitable { index: 0, why });
        assert_eq!(fork(&[piece]).err(), refused(Why::NotForked));
        src.advise(10 * PAGE, PAGE, libc::MADV_DOFORK);
        src.advise(12 * PAGE, PAGE, libc::MADV_WIPEONFORK);
        assert_eq!(fork(&[piece]).err(), refused(Why::WipedOnFork));
        src.advise(12 * PAGE, PAGE, libc::MADV_KEEPONFORK);
        fork(&[piece]).unwrap().wait(LONG).unwrap();
        let span = |m: &Map, offset: usize, len| Span { start: m.ptr(offset).addr(), len };
        let gap = Map::private(3 * PAGE);
        gap.unmap(PAGE, PAGE);
        let spans = [span(&src, 5, 100), span(&dst, 0, 1), span(&gap, 10, 2 * PAGE)];
        let expected = vec![(1, Why::Shared), (2, Why::Unmapped)];
        assert_eq!(unsuitable(&spans, Purpose::Fork), Ok(expected));
    });
}

#[test]
fn other_threads_and_their_locks_do_not_matter() {
    assert!(in_child(false, || {
        let (_src, dst, piece) = maps(256);
        let stop = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        drop(std::hint::black_box(vec![0u8; 100_000]));
                    }
                });
            }
            for _ in 0..50 {
                fork(&[piece]).unwrap().wait(LONG).unwrap();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!(dst.has(1, dst.len));
    }));
}

#[test]
fn regions_are_judged_again_when_their_mappings_change() {
    let memory = Map::private(8 * PAGE);
    let spans = [Span { start: memory.at.addr(), len: memory.len }];
    let mut judged = stanchion_mem::maps::Judged::default();
    assert_eq!(judged.unsuitable(&spans, Purpose::Fork), Ok(Vec::new()));
    memory.advise(2 * PAGE, PAGE, libc::MADV_DONTFORK);
    assert_eq!(judged.unsuitable(&spans, Purpose::Fork), Ok(vec![(0, Why::NotForked)]));
    let part = [Span { start: memory.at.addr() + 4 * PAGE, len: 4 * PAGE }];
    assert_eq!(judged.unsuitable(&part, Purpose::Fork), Ok(Vec::new()));
    memory.advise(2 * PAGE, PAGE, libc::MADV_DOFORK);
    assert_eq!(judged.unsuitable(&spans, Purpose::Fork), Ok(Vec::new()));
}

// FM-P13: the marks by which the kernel tells what changed outlive the fork, in the parent.
#[test]
fn what_changes_behind_a_child_is_found() {
    const ID: RegionId = RegionId(7);
    let changed = |t: &mut Tracker| {
        let found = t.collect(ID).unwrap();
        t.committed(ID, found.mark).unwrap();
        found.changes
    };
    for huge in [false, true] {
        as_everybody(|| {
            let (src, dst, piece) = maps(4096);
            if huge {
                src.advise(0, src.len, libc::MADV_HUGEPAGE);
                src.advise(0, src.len, libc::MADV_DONTNEED);
                src.fill(1);
            }
            let (mut tracker, _) = match Tracker::new(Wanted::Scan) {
                Ok(new) => new,
                Err(why) => return println!("left out: {why}"),
            };
            // SAFETY: it stays mapped and readable.
            let method = unsafe { tracker.watch(ID, src.ptr(0), src.len) }.unwrap();
            assert_eq!(method, Method::Scan);
            assert_eq!(changed(&mut tracker), Changes::All);
            let mut written = Vec::new();
            for round in 0..3u8 {
                // Some before the child copies, which is held until it is let go, some when it has.
                let before = src.bytes(0, src.len);
                let mut child = fork(&[piece]).unwrap();
                for page in [3, 700, 4095].map(|n| n - usize::from(round)) {
                    src.set(page * PAGE + 11, 77 + round);
                    written.push(page);
                }
                child.wait(LONG).unwrap();
                src.set(2000 * PAGE, 99 + round);
                written.push(2000);
                assert!(dst.bytes(0, dst.len) == before, "the copy is of the moment");
                let Changes::Runs(runs) = changed(&mut tracker) else { panic!("all of it?") };
                let has = |page: usize| {
                    runs.iter().any(|r| (r.offset..r.offset + r.len).contains(&(page * PAGE)))
                };
                assert!(written.iter().all(|page| has(*page)), "{written:?}: {runs:?}");
                let found: usize = runs.iter().map(|r| r.len).sum();
                assert!(huge || found == written.len() * PAGE, "no other: {runs:?}");
                written.clear();
            }
            assert_eq!(changed(&mut tracker), Changes::Runs(Vec::new()));
        });
    }
}
