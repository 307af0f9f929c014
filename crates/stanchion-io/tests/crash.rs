//! The prefix after a failure at every single step: FM-S9, FM-S10, FM-S11, FM-F8, FM-L3.

mod common;

use std::sync::Arc;

use common::*;
use rustix::io::Errno;
use stanchion_format::ids::{Epoch, JobId};
use stanchion_format::index::Layout;
use stanchion_io::fs::testing::{Fault, FaultyFs, Keep};
use stanchion_io::prefix::Prefix;

const KEEPS: [Keep; 6] = [
    Keep::Nothing,
    Keep::Journal(11),
    Keep::Journal(1234),
    Keep::Any(5),
    Keep::Any(77),
    Keep::Any(4242),
];

/// What was begun before the fault, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    Prepare,
    Intend,
    Publish,
    Index,
    Done,
}

struct Scene {
    /// 1 has names of its own, 2 has those that 3 is going to take.
    fs: FaultyFs,
    epoch: Epoch,
    job: JobId,
    third: Dataset,
}

fn scene() -> Scene {
    let fs = FaultyFs::new();
    let prefix = prefix_on(&fs);
    let epoch = prefix.take_epoch().unwrap();
    Dataset::own(1).flush(&prefix, epoch, 1).unwrap();
    Dataset::rotating(2).flush(&prefix, epoch, 1).unwrap();
    assert_eq!(assert_index_true(&prefix, "scene"), [1, 2]);
    fs.crash(Keep::Nothing);
    assert_eq!(assert_index_true(&prefix_on(&fs), "what is persistent"), [1, 2]);
    Scene { job: prefix_on(&fs).job().unwrap(), fs, epoch, third: Dataset::rotating(3) }
}

/// Flushes dataset 3 as its nodes and the root would; how far it came.
fn flush(scene: &Scene, prefix: &Prefix) -> Reached {
    let mut reached = Reached::Prepare;
    let mut run = || {
        scene.third.prepare(prefix, 1)?;
        reached = Reached::Intend;
        prefix.flush_intend(&scene.third.record(scene.job, scene.epoch), 1)?;
        reached = Reached::Publish;
        scene.third.publish(prefix, 1)?;
        reached = Reached::Index;
        prefix.write_index(&scene.third.record(scene.job, scene.epoch))
    };
    if run().is_ok() { Reached::Done } else { reached }
}

/// What must hold whatever happened.
fn judge(fs: &FaultyFs, reached: Reached, context: &str) {
    let there = assert_index_true(&prefix_on(fs), context);
    assert!(there.contains(&1), "{context}: nobody touched 1, there are {there:?}");
    match reached {
        Reached::Prepare | Reached::Intend => assert_eq!(there, [1, 2], "{context}"),
        Reached::Publish => assert!(!there.contains(&3), "{context}: {there:?}"),
        Reached::Index => assert!(!there.contains(&2), "{context}: {there:?}"),
        Reached::Done => assert_eq!(there, [1, 3], "{context}"),
    }
}

/// The next run, or the next attempt, must come through; the next run finds the older or the newer dataset,
/// without any cache.
fn recover(scene: &Scene, fs: &FaultyFs, reached: Reached, context: &str) {
    let prefix = prefix_on(fs);
    let epoch = prefix.take_epoch().unwrap();
    assert!(epoch > scene.epoch, "{context}: {epoch}");
    prefix.flush_complete(epoch).unwrap_or_else(|t| panic!("{context}: {t}"));
    prefix.sweep(&[]).unwrap();
    fs.crash(Keep::Nothing);
    let prefix = prefix_on(fs);
    match (reached, &*assert_index_true(&prefix, context)) {
        (Reached::Prepare | Reached::Intend, [1, 2]) => {}
        (Reached::Intend | Reached::Publish | Reached::Index | Reached::Done, [1, 3]) => {}
        (_, there) => panic!("{context}: FM-L3 is broken, there are {there:?}"),
    }
    scene.third.flush(&prefix, epoch, 2).unwrap_or_else(|t| panic!("{context}: {t}"));
    fs.crash(Keep::Nothing);
    assert_eq!(assert_index_true(&prefix_on(fs), context), [1, 3]);
    prefix_on(fs).sweep(&[]).unwrap();
    let left: Vec<String> = fs.files().into_iter().filter(|f| f.contains("/tmp/")).collect();
    assert!(left.is_empty(), "{context}: {left:?}");
}

fn steps(scene: &Scene) -> u64 {
    let fs = scene.fs.fork();
    let prefix = prefix_on(&fs);
    let before = fs.ops();
    assert_eq!(flush(scene, &prefix), Reached::Done);
    fs.ops() - before
}

#[test]
fn the_machine_stops_at_every_step_of_a_flush() {
    let scene = scene();
    for step in 0..steps(&scene) {
        let stopped = scene.fs.fork();
        let prefix = prefix_on(&stopped);
        stopped.plan(step, Fault::Down);
        let reached = flush(&scene, &prefix);
        // Cleaning up is the last step and may fail without harm.
        for keep in KEEPS {
            let fs = stopped.fork();
            fs.crash(keep);
            let context = format!("step {step}, {keep:?}, {reached:?}");
            judge(&fs, reached, &context);
            recover(&scene, &fs, reached, &context);
        }
    }
}

#[test]
fn every_step_of_a_flush_fails_once() {
    let scene = scene();
    let faults = [Fault::Once(Errno::IO), Fault::Once(Errno::NOSPC), Fault::Torn];
    for (step, fault) in (0..steps(&scene)).flat_map(|s| faults.map(|f| (s, f))) {
        let fs = scene.fs.fork();
        let prefix = prefix_on(&fs);
        fs.plan(step, fault);
        let reached = flush(&scene, &prefix);
        fs.heal();
        let context = format!("step {step}, {fault:?}, {reached:?}");
        judge(&fs, reached, &context);
        let later = fs.fork();
        later.crash(Keep::Nothing);
        judge(&later, reached, &format!("{context}, then a crash"));
        recover(&scene, &fs, reached, &context);
    }
}

#[test]
fn the_device_stays_full_or_read_only_from_any_step_on() {
    let scene = scene();
    for (step, errno) in
        (0..steps(&scene)).flat_map(|s| [Errno::NOSPC, Errno::ROFS].map(|e| (s, e)))
    {
        let fs = scene.fs.fork();
        let prefix = prefix_on(&fs);
        fs.plan(step, Fault::Stuck(errno));
        let reached = flush(&scene, &prefix);
        fs.heal();
        judge(&fs, reached, &format!("step {step}, {errno}"));
    }
}

#[test]
fn short_writes_and_reads_change_nothing() {
    let scene = scene();
    for step in 0..steps(&scene) {
        let fs = scene.fs.fork();
        let prefix = prefix_on(&fs);
        fs.plan(step, Fault::Short);
        assert_eq!(flush(&scene, &prefix), Reached::Done, "step {step}");
        fs.crash(Keep::Nothing);
        judge(&fs, Reached::Done, &format!("step {step}"));
    }
}

#[test]
fn publishing_may_be_repeated_after_any_partial_success() {
    let scene = scene();
    let fs = scene.fs.fork();
    let prefix = prefix_on(&fs);
    scene.third.prepare(&prefix, 1).unwrap();
    let prepared = fs.fork();
    let before = fs.ops();
    scene.third.publish(&prefix, 1).unwrap();
    let steps = fs.ops() - before;
    for step in 0..steps {
        let fs = prepared.fork();
        let prefix = prefix_on(&fs);
        fs.plan(step, Fault::Once(Errno::IO));
        let first = scene.third.publish(&prefix, 1);
        fs.heal();
        scene.third.publish(&prefix, 1).unwrap_or_else(|t| panic!("step {step}, {first:?}: {t}"));
        prefix.write_index(&scene.third.record(scene.job, scene.epoch)).unwrap();
        fs.crash(Keep::Nothing);
        judge(&fs, Reached::Done, &format!("step {step}"));
    }
}

#[test]
fn deleting_stops_at_every_step() {
    let scene = scene();
    let count = |fs: &FaultyFs| {
        let (prefix, before) = (prefix_on(fs), fs.ops());
        let before = before.max(fs.ops());
        prefix.delete(key(2)).unwrap();
        fs.ops() - before
    };
    let steps = count(&scene.fs.fork());
    for step in 0..steps {
        for keep in KEEPS {
            let fs = scene.fs.fork();
            let prefix = prefix_on(&fs);
            fs.plan(step, Fault::Down);
            let done = prefix.delete(key(2)).is_ok();
            fs.crash(keep);
            let context = format!("step {step}, {keep:?}");
            let there = assert_index_true(&prefix_on(&fs), &context);
            assert!(there.contains(&1) && !(done && there.contains(&2)), "{context}: {there:?}");
            // Again, to the end: nothing of it is left.
            prefix_on(&fs).delete(key(2)).unwrap();
            let left = fs.files();
            assert!(!left.iter().any(|f| f.starts_with("rotating")), "{context}: {left:?}");
            assert_eq!(assert_index_true(&prefix_on(&fs), &context), [1]);
        }
    }
}

#[test]
fn no_epoch_is_taken_twice() {
    // FM-S11
    let fs = FaultyFs::new();
    prefix_on(&fs);
    let mut highest = Epoch(0);
    for step in 0..24 {
        for keep in KEEPS {
            let prefix = prefix_on(&fs);
            fs.plan(step, Fault::Down);
            let taken = prefix.take_epoch();
            fs.crash(keep);
            if let Ok(epoch) = taken {
                assert!(epoch > highest, "step {step}, {keep:?}: {epoch} after {highest}");
                highest = epoch;
            }
            assert!(prefix_on(&fs).newest_epoch().unwrap() >= highest, "step {step}, {keep:?}");
        }
    }
    assert!(highest > Epoch(0));
}

#[test]
fn the_jobs_id_never_changes_once_it_was_told() {
    for step in 0..24 {
        for keep in KEEPS {
            let fs = FaultyFs::new();
            let prefix = prefix_on(&fs);
            fs.plan(step, Fault::Down);
            let told = prefix.job();
            fs.crash(keep);
            let again = prefix_on(&fs).job();
            if let Ok(job) = told {
                assert_eq!(again, Ok(job), "step {step}, {keep:?}");
            }
            assert!(again.is_ok(), "step {step}, {keep:?}: {again:?}");
        }
    }
}

#[test]
fn opening_stops_at_every_step() {
    for step in 0..40 {
        for keep in KEEPS {
            let fs = FaultyFs::new();
            fs.plan(step, Fault::Down);
            let _ = Prefix::on(Arc::new(fs.clone()), std::path::Path::new("prefix"));
            fs.crash(keep);
            let prefix = prefix_on(&fs);
            let epoch = prefix.take_epoch().unwrap();
            fs.crash(Keep::Nothing);
            assert_eq!(prefix_on(&fs).newest_epoch(), Ok(epoch), "step {step}, {keep:?}");
        }
    }
}

#[test]
fn completing_stops_at_every_step_and_is_done_again() {
    // FM-L3: whoever completes may be interrupted as well.
    let scene = scene();
    let fs = scene.fs.fork();
    let prefix = prefix_on(&fs);
    scene.third.prepare(&prefix, 1).unwrap();
    prefix.flush_intend(&scene.third.record(scene.job, scene.epoch), 1).unwrap();
    prefix.flush_publish(&scene.third.manifests[0], (Layout::Files, 1), &go_on).unwrap();
    fs.crash(Keep::Nothing);
    assert_eq!(assert_index_true(&prefix_on(&fs), "interrupted"), [1]);
    let epoch = prefix_on(&fs).take_epoch().unwrap();
    let whole = fs.fork();
    let prefix = prefix_on(&whole);
    let before = whole.ops();
    assert_eq!(prefix.flush_complete(epoch), Ok(vec![key(3)]));
    let steps = whole.ops() - before;
    assert_eq!(prefix.flush_complete(epoch), Ok(vec![]));
    for step in 0..steps {
        for keep in KEEPS {
            let fs = fs.fork();
            let prefix = prefix_on(&fs);
            fs.plan(step, Fault::Down);
            let _interrupted = prefix.flush_complete(epoch);
            fs.crash(keep);
            let context = format!("step {step}, {keep:?}");
            prefix_on(&fs).flush_complete(epoch).unwrap_or_else(|t| panic!("{context}: {t}"));
            fs.crash(Keep::Nothing);
            assert_eq!(assert_index_true(&prefix_on(&fs), &context), [1, 3], "{context}");
        }
    }
}

#[test]
fn what_cannot_be_completed_or_was_overtaken_is_left_alone() {
    let scene = scene();
    let intended = || {
        let fs = scene.fs.fork();
        let prefix = prefix_on(&fs);
        scene.third.prepare(&prefix, 1).unwrap();
        prefix.flush_intend(&scene.third.record(scene.job, scene.epoch), 1).unwrap();
        fs
    };
    let tmp = |fs: &FaultyFs, what: &str| {
        let found = fs.files().into_iter().find(|f| f.contains("/tmp/") && f.contains(what));
        std::path::PathBuf::from(found.unwrap())
    };
    let epoch = scene.epoch;
    let left_alone = |fs: &FaultyFs, there: &[u64]| {
        assert_eq!(prefix_on(fs).flush_complete(epoch), Ok(vec![]));
        assert_eq!(assert_index_true(&prefix_on(fs), "left alone"), there);
    };
    let fs = intended();
    stanchion_io::fs::Fs::unlink(&fs, &tmp(&fs, "r3.log")).unwrap();
    left_alone(&fs, &[1, 2]);
    let fs = intended();
    put(&fs, &tmp(&fs, "record.json"), b"{ torn");
    left_alone(&fs, &[1, 2]);
    let fs = intended();
    Dataset::rotating(4).flush(&prefix_on(&fs), epoch, 1).unwrap();
    left_alone(&fs, &[1, 4]);
}

#[test]
fn a_further_attempt_takes_nothing_from_one_that_may_be_completed() {
    // FM-L3: dataset 3 has begun to replace the files of 2, whose record is gone. Whatever becomes of the next
    // attempt, also of one with the first one's number, nothing torn is vouched for.
    let scene = scene();
    let first = scene.fs.fork();
    let prefix = prefix_on(&first);
    scene.third.prepare(&prefix, 1).unwrap();
    prefix.flush_intend(&scene.third.record(scene.job, scene.epoch), 1).unwrap();
    prefix.flush_publish(&scene.third.manifests[0], (Layout::Files, 1), &go_on).unwrap();
    first.crash(Keep::Nothing);
    let again = |fs: &FaultyFs, attempt: u32| {
        let (prefix, before) = (prefix_on(fs), fs.ops());
        let _ends_somewhere = scene
            .third
            .prepare(&prefix, attempt)
            .and_then(|()| {
                prefix.flush_intend(&scene.third.record(scene.job, scene.epoch), attempt)
            })
            .and_then(|()| scene.third.publish(&prefix, attempt));
        fs.ops() - before
    };
    for attempt in [1, 2] {
        for step in 0..again(&first.fork(), attempt) {
            for keep in KEEPS {
                let fs = first.fork();
                // What opening the prefix does is not what is looked at.
                let opened = fs.fork();
                let (before, _) = (opened.ops(), prefix_on(&opened));
                fs.plan(opened.ops() - before + step, Fault::Down);
                again(&fs, attempt);
                fs.crash(keep);
                let prefix = prefix_on(&fs);
                let epoch = prefix.take_epoch().unwrap();
                prefix.flush_complete(epoch).unwrap();
                prefix.sweep(&[]).unwrap();
                let context = format!("attempt {attempt}, step {step}, {keep:?}");
                let there = assert_index_true(&prefix, &context);
                assert!(there == [1, 3] || (attempt == 1 && there == [1]), "{context}: {there:?}");
            }
        }
    }
}

#[test]
fn agents_past_which_the_job_was_led_on_do_not_flush() {
    use stanchion_format::ids::{Ancestry, DatasetNo, Incarnation, Key};
    let fs = FaultyFs::new();
    let prefix = prefix_on(&fs);
    let epoch = prefix.take_epoch().unwrap();
    let inc = |count| Incarnation { epoch, count };
    let key = |no, count| Key { no: DatasetNo(no), inc: inc(count) };
    let files = |no| Dataset::rotating(no).files;
    let line = |rec: stanchion_format::index::IndexRecord, last| {
        let ancestry = Ancestry(vec![(inc(1), DatasetNo(last))]);
        stanchion_format::index::IndexRecord { ancestry, ..rec }.seal()
    };
    let (old, new) = (Dataset::of(key(2, 1), files(2)), Dataset::of(key(3, 2), files(3)));
    let job = prefix.job().unwrap();
    let asleep = Dataset::of(key(1, 1), files(1));
    asleep.prepare(&prefix, 9).unwrap();
    prefix.flush_intend(&asleep.record(job, epoch), 9).unwrap();
    // Files get their names one after the other; the runner is gone before the record is there.
    let intended = line(new.record(job, epoch), 1);
    new.prepare(&prefix, 1).unwrap();
    prefix.flush_intend(&intended, 1).unwrap();
    let interrupted = fs.fork();
    new.publish(&prefix, 1).unwrap();
    prefix.write_index(&intended).unwrap();
    // Agents of the first incarnation, awake again, and their orphans.
    old.prepare(&prefix, 2).unwrap();
    let fenced = |rec| prefix.flush_intend(&rec, 2).map_err(|t| t.cause);
    let refused = Err(stanchion_format::peer::Cause::Fenced);
    assert_eq!(fenced(old.record(job, epoch)), refused);
    let later = prefix.take_epoch().unwrap();
    let orphans = stanchion_format::index::IndexRecord {
        inc: Incarnation { epoch: later, count: 1 },
        ..line(old.record(job, later), 2)
    };
    assert_eq!(fenced(orphans.clone().seal()), refused);
    // They may have fallen asleep after the intent, or when they were about to write the record.
    assert_eq!(asleep.publish(&prefix, 9).map_err(|t| t.cause), refused);
    assert_eq!(assert_index_true(&prefix, "nothing is replaced"), [3]);
    let written = |rec| prefix.write_index(&rec).map_err(|t| t.cause);
    assert_eq!(written(old.record(job, epoch)), refused);
    assert_eq!(assert_index_true(&prefix, "refused"), [3]);
    // If nothing of the newer line has come so far, theirs is the one, and is not replaced later.
    let prefix = prefix_on(&interrupted);
    let written = prefix.write_index(&asleep.record(job, epoch)).map_err(|t| t.cause);
    assert_eq!(written, refused, "the newer one is about to replace its files");
    old.prepare(&prefix, 2).unwrap();
    prefix.flush_intend(&orphans.clone().seal(), 2).unwrap();
    old.publish(&prefix, 2).unwrap();
    prefix.write_index(&orphans.seal()).unwrap();
    assert_eq!(prefix.flush_complete(later), Ok(vec![]));
    assert_eq!(assert_index_true(&prefix, "not completed"), [2]);
}
