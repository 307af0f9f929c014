//! Datasets in containers: FM-S7, FM-S9, FM-S19, FM-F8, FM-F9.

mod common;

use std::sync::Arc;

use common::*;
use rustix::io::Errno;
use stanchion_format::container::BLOCK;
use stanchion_format::ids::{Epoch, JobId, RankId, SlotId};
use stanchion_format::index::{IndexRecord, Layout};
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::cache::Cache;
use stanchion_io::fs::testing::{Fault, FaultyFs, Keep};
use stanchion_io::prefix::{Export, Exported, Prefix};

const KEEPS: [Keep; 4] = [Keep::Nothing, Keep::Journal(11), Keep::Any(5), Keep::Any(77)];

struct Scene {
    fs: FaultyFs,
    epoch: Epoch,
    job: JobId,
    /// Takes the names of dataset 2, which lies in files.
    third: Dataset,
}

/// 1 in containers, 2 in files.
fn scene() -> Scene {
    let fs = FaultyFs::new();
    let prefix = prefix_on(&fs);
    let epoch = prefix.take_epoch().unwrap();
    Dataset::own(1).in_containers().flush(&prefix, epoch, 1).unwrap();
    Dataset::rotating(2).flush(&prefix, epoch, 1).unwrap();
    fs.crash(Keep::Nothing);
    let prefix = prefix_on(&fs);
    assert_eq!(assert_index_true(&prefix, "scene"), [1, 2]);
    let job = prefix.job().unwrap();
    Scene { fs, epoch, job, third: Dataset::rotating(3).in_containers() }
}

fn cache() -> Cache {
    Cache::on(Arc::new(FaultyFs::new()), std::path::Path::new("node"), 1 << 30).unwrap()
}

fn containers(fs: &FaultyFs, no: u64) -> Vec<String> {
    let of = format!("/data/{no:012}.");
    let mut files: Vec<String> =
        fs.files().into_iter().filter(|f| f.contains(&of) && f.contains("/a.")).collect();
    files.sort();
    files
}

/// Flushes dataset 3; true if it has its record.
fn flush(scene: &Scene, prefix: &Prefix) -> bool {
    let record = scene.third.record(scene.job, scene.epoch);
    let run = || {
        scene.third.prepare(prefix, 1)?;
        prefix.flush_intend(&record, 1)?;
        scene.third.publish(prefix, 1)?;
        prefix.write_index(&record)
    };
    run().is_ok()
}

fn judge(fs: &FaultyFs, done: bool, context: &str) {
    let there = assert_index_true(&prefix_on(fs), context);
    // What lies in files under the same names is not touched.
    assert!(there.starts_with(&[1, 2]), "{context}: {there:?}");
    assert!(!done || there == [1, 2, 3], "{context}: {there:?}");
}

/// The next run comes through and leaves nothing of the first attempt, but what counts.
fn recover(scene: &Scene, fs: &FaultyFs, context: &str) {
    let prefix = prefix_on(fs);
    let epoch = prefix.take_epoch().unwrap();
    prefix.flush_complete(epoch).unwrap_or_else(|t| panic!("{context}: {t}"));
    prefix.sweep(&[]).unwrap();
    let there = assert_index_true(&prefix, context).contains(&3);
    assert_eq!(containers(fs, 3).len(), if there { 2 } else { 0 }, "{context}: {:?}", fs.files());
    scene.third.flush(&prefix, epoch, 2).unwrap_or_else(|t| panic!("{context}: {t}"));
    fs.crash(Keep::Nothing);
    assert_eq!(assert_index_true(&prefix_on(fs), context), [1, 2, 3]);
    prefix_on(fs).sweep(&[]).unwrap();
    assert_eq!(containers(fs, 3).len(), 2, "{context}");
    let left: Vec<String> = fs.files().into_iter().filter(|f| f.contains(".new.")).collect();
    assert!(left.is_empty(), "{context}: {left:?}");
}

fn steps(scene: &Scene) -> u64 {
    let fs = scene.fs.fork();
    let prefix = prefix_on(&fs);
    let before = fs.ops();
    assert!(flush(scene, &prefix));
    fs.ops() - before
}

#[test]
fn the_machine_stops_at_every_step_of_a_flush() {
    // FM-S9, FM-S19
    let scene = scene();
    for step in 0..steps(&scene) {
        let stopped = scene.fs.fork();
        let prefix = prefix_on(&stopped);
        stopped.plan(step, Fault::Down);
        let done = flush(&scene, &prefix);
        for keep in KEEPS {
            let fs = stopped.fork();
            fs.crash(keep);
            let context = format!("step {step}, {keep:?}, {done}");
            judge(&fs, done, &context);
            recover(&scene, &fs, &context);
        }
    }
}

#[test]
fn every_step_of_a_flush_fails_once() {
    // FM-F8
    let scene = scene();
    let faults = [Fault::Once(Errno::IO), Fault::Once(Errno::NOSPC), Fault::Torn, Fault::Short];
    for (step, fault) in (0..steps(&scene)).flat_map(|s| faults.map(|f| (s, f))) {
        let fs = scene.fs.fork();
        let prefix = prefix_on(&fs);
        fs.plan(step, fault);
        let done = flush(&scene, &prefix);
        fs.heal();
        let context = format!("step {step}, {fault:?}, {done}");
        assert!(done || !matches!(fault, Fault::Short), "{context}");
        judge(&fs, done, &context);
        recover(&scene, &fs, &context);
    }
}

#[test]
fn a_fetch_is_what_was_flushed_wherever_ranks_are_now() {
    // FM-S7
    let scene = scene();
    let prefix = prefix_on(&scene.fs);
    assert!(flush(&scene, &prefix));
    let cache = cache();
    // All ranks on one node, and the second half of a slot alone.
    for ranks in [vec![(RankId(0), RANKS)], vec![(RankId(1), 1), (RankId(3), 1)]] {
        let info = scene.third.record(scene.job, scene.epoch).info;
        let m = prefix.fetch(&cache, &info, SlotId(0), &ranks, &go_on).unwrap();
        let wanted = |f: &&Rank| ranks.iter().any(|(r, n)| (r.0..r.0 + n).contains(&f.rank));
        assert_eq!(m.files.len(), scene.third.files.iter().filter(wanted).count());
        for (entry, chunk0) in m.files.iter().map(|f| (f, f.chunks.len())) {
            let file = scene.third.files.iter().find(|f| f.path == entry.path).unwrap();
            assert_eq!((entry.rank.0, entry.bytes), (file.rank, file.data.len() as u64));
            assert_eq!(chunk0, file.data.len().div_ceil(CHUNK as usize));
        }
        let (bad, _) = cache.verify(&m, &go_on).unwrap();
        assert!(bad.is_empty());
        cache.evict(&[m.key]);
    }
}

#[test]
fn damage_anywhere_in_a_container_is_found_and_never_fetched() {
    // FM-F9, FM-S7
    let scene = scene();
    let prefix = prefix_on(&scene.fs);
    assert!(flush(&scene, &prefix));
    let record = scene.third.record(scene.job, scene.epoch);
    let files = containers(&scene.fs, 3);
    let (a, b) = (files[0].as_str(), files[1].as_str());
    let ranks = [(RankId(0), RANKS)];
    let check = |what: &str, damage: &dyn Fn(&FaultyFs)| {
        let fs = scene.fs.fork();
        damage(&fs);
        let prefix = prefix_on(&fs);
        let wrong = prefix.verify(&record, &mut |_| {}).unwrap();
        assert!(!wrong.is_empty(), "{what}: not found");
        let named = |t: &Trouble| t.file.is_some() && t.slot.is_some();
        assert!(wrong.iter().all(named), "{what}: {wrong:?}");
        let cache = cache();
        match prefix.fetch(&cache, &record.info, SlotId(0), &ranks, &go_on) {
            Ok(m) => {
                // The head and the zeros between files are nobody's bytes.
                let (bad, _) = cache.verify(&m, &go_on).unwrap();
                assert!(bad.is_empty(), "{what}");
            }
            Err(t) => assert!(
                matches!(
                    t.cause,
                    Cause::Damaged | Cause::Malformed | Cause::Missing | Cause::Size { .. }
                ),
                "{what}: {t}"
            ),
        }
        wrong
    };
    let mut bytes = Vec::new();
    scene.fs.fork().tamper(a, |d| bytes.clone_from(d));
    let last = bytes.len() - BLOCK;
    for at in (0..80).chain((80..last).step_by(61)).chain(last..last + 80).chain([bytes.len() - 1])
    {
        check(&format!("byte {at}"), &|fs| fs.tamper(a, |d| d[at] ^= 0x10));
    }
    for len in [0, 1, BLOCK, last, bytes.len() - 1] {
        check(&format!("cut to {len}"), &|fs| fs.tamper(a, |d| d.truncate(len)));
    }
    check("longer", &|fs| fs.tamper(a, |d| d.resize(d.len() + BLOCK, 0)));
    let mut other = Vec::new();
    scene.fs.fork().tamper(b, |d| other.clone_from(d));
    check("another slot's", &|fs| fs.tamper(a, |d| d.clone_from(&other)));
    let mut older = Vec::new();
    let of_1 = containers(&scene.fs, 1);
    scene.fs.fork().tamper(&of_1[0], |d| older.clone_from(d));
    let wrong = check("another dataset's", &|fs| fs.tamper(a, |d| d.clone_from(&older)));
    assert_eq!(wrong[0].cause, Cause::Malformed);
}

#[test]
fn only_what_the_record_names_counts() {
    // FM-S19
    let scene = scene();
    let prefix = prefix_on(&scene.fs);
    // An attempt that was given up, one that came through, and one of others who did not know of it.
    scene.third.prepare(&prefix, 7).unwrap();
    prefix.flush_abort(scene.third.key, 7);
    assert!(containers(&scene.fs, 3).is_empty());
    assert!(flush(&scene, &prefix));
    let first = containers(&scene.fs, 3);
    scene.third.prepare(&prefix, 2).unwrap();
    assert_eq!(containers(&scene.fs, 3).len(), 4);
    prefix.write_index(&scene.third.record_of(scene.job, scene.epoch, 2)).unwrap();
    assert_eq!(containers(&scene.fs, 3), first, "the first record stands");
    prefix.flush_abort(scene.third.key, 1);
    assert_eq!(containers(&scene.fs, 3), first, "given up too late");
    // Other contents under its key are refused before they are written.
    let mut other = Dataset::new(3, |r| format!("other/{r}")).in_containers();
    assert_eq!(other.prepare(&prefix, 3).unwrap_err().cause, Cause::State);
    other.layout = Layout::Files;
    assert_eq!(other.prepare(&prefix, 3).unwrap_err().cause, Cause::State);
    assert_eq!(assert_index_true(&prefix, "all"), [1, 2, 3]);
    // Deleting takes its own, and not the files of the same names.
    prefix.delete(scene.third.key).unwrap();
    assert!(containers(&scene.fs, 3).is_empty());
    assert_eq!(assert_index_true(&prefix, "deleted"), [1, 2]);
    // And the other way round.
    assert!(flush(&scene, &prefix));
    prefix.delete(key(2)).unwrap();
    assert_eq!(assert_index_true(&prefix, "deleted"), [1, 3]);
}

fn export(
    prefix: &Prefix,
    rec: &IndexRecord,
    to: &FaultyFs,
    replace: bool,
) -> Result<Exported, Trouble> {
    let name = std::path::Path::new("target");
    prefix.export(rec, Export { to, name, replace, progress: &mut |_| {} })
}

/// Are all files there that are there right?
fn right(to: &FaultyFs, data: &Dataset, context: &str) -> usize {
    let mut there = 0;
    for file in to.files().iter().filter(|f| !f.contains(".new.")) {
        let want = data.files.iter().find(|f| f.path == *file).unwrap();
        to.tamper(file, |bytes| assert!(*bytes == want.data, "{context}: {file}"));
        there += 1;
    }
    there
}

#[test]
fn an_export_is_the_files_and_goes_on_after_a_failure_at_any_step() {
    // FM-S7, FM-F8
    let scene = scene();
    let prefix = prefix_on(&scene.fs);
    assert!(flush(&scene, &prefix));
    let all = scene.third.files.len();
    for (data, rec) in [
        (&scene.third, scene.third.record(scene.job, scene.epoch)),
        (&Dataset::rotating(2), prefix.read_index().unwrap().0[1].clone()),
    ] {
        let to = FaultyFs::new();
        let before = to.ops();
        let done = export(&prefix, &rec, &to, false).unwrap();
        assert_eq!((done.files, done.bytes, done.same), (all as u64, rec.info.bytes, 0));
        let steps = to.ops() - before;
        to.crash(Keep::Nothing);
        assert_eq!(right(&to, data, "whole"), all);
        let again = export(&prefix, &rec, &to, false).unwrap();
        assert_eq!(again, Exported { files: 0, bytes: 0, same: all as u64 });
        for (step, fault) in
            (0..steps).flat_map(|s| [Fault::Once(Errno::IO), Fault::Down].map(|f| (s, f)))
        {
            let to = FaultyFs::new();
            to.plan(step, fault);
            let first = export(&prefix, &rec, &to, false);
            to.heal();
            let context = format!("step {step}, {fault:?}, {first:?}");
            if fault == Fault::Down {
                to.crash(Keep::Any(step));
            }
            let there = right(&to, data, &context);
            assert!(first.is_err() || there == all, "{context}");
            let second =
                export(&prefix, &rec, &to, false).unwrap_or_else(|t| panic!("{context}: {t}"));
            assert_eq!(second.same as usize, there, "{context}");
            assert_eq!(right(&to, data, &context), all);
        }
    }
}

#[test]
fn an_export_takes_nothing_from_anybody() {
    // FM-S16
    let scene = scene();
    let prefix = prefix_on(&scene.fs);
    assert!(flush(&scene, &prefix));
    let rec = scene.third.record(scene.job, scene.epoch);
    let to = FaultyFs::new();
    let path = &scene.third.files[0].path;
    put(&to, std::path::Path::new(path), b"mine");
    let refused = export(&prefix, &rec, &to, false).unwrap_err();
    assert_eq!(
        (refused.cause, refused.file.as_ref()),
        (Cause::Os(Errno::EXIST.raw_os_error()), Some(path))
    );
    to.tamper(path, |bytes| assert_eq!(bytes, b"mine"));
    export(&prefix, &rec, &to, true).unwrap();
    assert_eq!(right(&to, &scene.third, "replaced"), scene.third.files.len());
    // Two ranks of one path live side by side in containers, but not in a directory; nor does one below the other.
    for (no, path) in [(4, "same".to_owned()), (5, "same/below".to_owned())] {
        let two = Dataset::new(no, |rank| match rank {
            0 => "same".to_owned(),
            3 => path.clone(),
            n => format!("r{n}"),
        });
        let two = two.in_containers();
        two.flush(&prefix, scene.epoch, 1).unwrap();
        let rec = two.record(scene.job, scene.epoch);
        let to = FaultyFs::new();
        let refused = export(&prefix, &rec, &to, true).unwrap_err();
        assert_eq!((refused.cause, refused.file), (Cause::SamePath, Some(path)));
        assert!(to.files().is_empty());
        let cache = cache();
        let m = prefix.fetch(&cache, &rec.info, SlotId(0), &[(RankId(0), RANKS)], &go_on).unwrap();
        assert!(cache.verify(&m, &go_on).unwrap().0.is_empty());
    }
    // Damage is found before anything has its name.
    let files = containers(&scene.fs, 3);
    scene.fs.tamper(&files[0], |d| d[BLOCK + 9] ^= 1);
    let to = FaultyFs::new();
    assert_eq!(export(&prefix, &rec, &to, false).unwrap_err().cause, Cause::Damaged);
    right(&to, &scene.third, "damaged");
}
