//! The prefix: FM-S9 to FM-S12, FM-S16, FM-F8, FM-F9, FM-C5.

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use common::*;
use rustix::io::Errno;
use stanchion_format::ids::{Epoch, RankId, SlotId};
use stanchion_format::index::Layout;
use stanchion_format::index::{HaltFile, LeaseFile};
use stanchion_format::peer::Cause;
use stanchion_io::fs::testing::{Fault, FaultyFs, Keep};
use stanchion_io::prefix::Prefix;

fn os(errno: Errno) -> Cause {
    Cause::Os(errno.raw_os_error())
}

fn started() -> (FaultyFs, Prefix, Epoch) {
    let fs = FaultyFs::new();
    let prefix = prefix_on(&fs);
    let epoch = prefix.take_epoch().unwrap();
    (fs, prefix, epoch)
}

#[test]
fn what_cannot_be_a_prefix_is_told_apart() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let cause = |path: &Path| Prefix::open(path).unwrap_err().cause;
    let missing = dir.path().join("no");
    assert_eq!(cause(&missing), Cause::Missing);
    let file = Prefix::open(&missing).unwrap_err().file.unwrap();
    assert!(file.ends_with("/no"), "{file}");
    std::fs::write(dir.path().join("f"), "").unwrap();
    assert_eq!(cause(&dir.path().join("f")), os(Errno::NOTDIR));
    let fs = FaultyFs::new();
    for errno in [Errno::ROFS, Errno::ACCESS] {
        fs.plan(0, Fault::Stuck(errno));
        let opened = Prefix::on(Arc::new(fs.clone()), Path::new("p"));
        assert_eq!(opened.unwrap_err().cause, os(errno));
        fs.heal();
    }
    // Through a link is fine for the prefix itself, but not for what is ours in it.
    symlink(dir.path(), dir.path().join("link")).unwrap();
    symlink("/", dir.path().join(".stanchion")).unwrap();
    assert!(matches!(cause(&dir.path().join("link")), Cause::Os(_)));
    std::fs::remove_file(dir.path().join(".stanchion")).unwrap();
    Prefix::open(&dir.path().join("link")).unwrap();
    let mode = std::fs::metadata(dir.path().join(".stanchion")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(dir.path().join(".stanchion"), Some(12345), None).unwrap();
        assert_eq!(cause(dir.path()), os(Errno::PERM));
    }
}

#[test]
fn looking_changes_nothing() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let prefix = Prefix::open_readonly(dir.path()).unwrap();
    assert_eq!(prefix.read_index(), Ok((vec![], vec![])));
    assert_eq!(prefix.newest_epoch(), Ok(Epoch(0)));
    assert_eq!((prefix.read_halt(), prefix.read_lease()), (Ok(None), Ok(None)));
    for refused in [
        prefix.take_epoch().map(|_| ()),
        prefix.job().map(|_| ()),
        prefix.write_halt(&HaltFile::default()),
        prefix.withdraw(key(1)),
        prefix.delete(key(1)),
        prefix.sweep(&[]),
    ] {
        assert_eq!(refused.unwrap_err().cause, os(Errno::ROFS));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_full_prefix_says_so() {
    let Some(small) = SmallDevice::new() else { return };
    let prefix = Prefix::open(small.0.path()).unwrap();
    let epoch = prefix.take_epoch().unwrap();
    let files = vec![Rank { rank: 0, path: "f".into(), data: bytes(1, 60_000) }];
    let data = Dataset::of(key(1), files);
    assert_eq!(data.flush(&prefix, epoch, 1).unwrap_err().cause, Cause::NoSpace);
    prefix.flush_abort(key(1), 1);
    assert!(assert_index_true(&prefix, "full").is_empty());
}

fn whole_life_on(parent: &Path) {
    let dir = tempfile::tempdir_in(parent).unwrap();
    let prefix = Prefix::open(dir.path()).unwrap();
    let (job, epoch) = (prefix.job().unwrap(), prefix.take_epoch().unwrap());
    let data = Dataset::own(1);
    data.flush(&prefix, epoch, 1).unwrap();
    for f in &data.files {
        let path = dir.path().join(&f.path);
        assert_eq!(std::fs::read(&path).unwrap(), f.data, "{}", f.path);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }
    let prefix = Prefix::open(dir.path()).unwrap();
    assert_eq!(prefix.job(), Ok(job));
    assert_eq!(assert_index_true(&prefix, "reopened"), [1]);
    let (records, _) = prefix.read_index().unwrap();
    assert_eq!(records, [data.record(job, epoch)]);
    let mut read = 0;
    prefix.verify(&records[0], &mut |n| read += n).unwrap();
    assert_eq!(read, records[0].info.bytes);
    // Nothing temporary stays.
    prefix.sweep(&[]).unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join(".stanchion/tmp")).unwrap().count(), 0);
    prefix.delete(key(1)).unwrap();
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, [".stanchion"]);
}

#[test]
fn a_whole_life_in_memory_and_on_disk() {
    whole_life_on(Path::new("/dev/shm"));
    whole_life_on(&std::env::temp_dir());
}

#[test]
fn one_id_and_many_epochs_however_many_ask_at_once() {
    // FM-S11
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let asked: Vec<_> = std::thread::scope(|s| {
        let ask = || {
            let prefix = Prefix::open(dir.path()).unwrap();
            (prefix.job().unwrap(), prefix.take_epoch().unwrap())
        };
        let threads: Vec<_> = (0..8).map(|_| s.spawn(ask)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let jobs: BTreeSet<_> = asked.iter().map(|a| a.0).collect();
    let epochs: BTreeSet<_> = asked.iter().map(|a| a.1).collect();
    assert_eq!((jobs.len(), epochs.len()), (1, 8));
    assert_eq!(Prefix::open(dir.path()).unwrap().newest_epoch().unwrap(), *epochs.last().unwrap());
}

#[test]
fn lost_ids_and_epochs_are_found_in_the_index() {
    let (fs, prefix, epoch) = started();
    let job = prefix.job().unwrap();
    Dataset::own(1).flush(&prefix, epoch, 1).unwrap();
    fs.tamper(".stanchion/job", |data| data.truncate(3));
    assert_eq!(prefix.job(), Ok(job));
    use stanchion_io::fs::Fs;
    fs.unlink(Path::new(".stanchion/job")).unwrap();
    assert_eq!(prefix.job(), Ok(job));
    assert_eq!(prefix_on(&fs).job(), Ok(job));
    stanchion_io::fs::remove_tree(&fs, Path::new(".stanchion/epoch")).unwrap();
    assert!(prefix_on(&fs).take_epoch().unwrap() > epoch);
    // Nothing to learn it from: said, not made up.
    let (fs, prefix, _) = started();
    prefix.job().unwrap();
    fs.tamper(".stanchion/job", |data| data[20] ^= 1);
    let trouble = prefix.job().unwrap_err();
    assert_eq!(
        (trouble.cause, trouble.file.as_deref()),
        (Cause::Malformed, Some(".stanchion/job"))
    );
}

#[test]
fn damaged_records_are_reported_and_never_used() {
    // FM-F9
    let (fs, prefix, epoch) = started();
    for no in 1..=4 {
        Dataset::own(no).flush(&prefix, epoch, 1).unwrap();
    }
    let file = |no: u64| format!(".stanchion/index/{:012}.1.0.json", no);
    let whole = {
        use stanchion_io::fs::Fs;
        let path = file(1);
        fs.stat(Path::new(&path)).unwrap().bytes as usize
    };
    let good = |fs: &FaultyFs| {
        let (good, bad) = prefix_on(fs).read_index().unwrap();
        (good.iter().map(|r| r.info.key.no.0).collect::<Vec<_>>(), bad)
    };
    assert_eq!(good(&fs), (vec![1, 2, 3, 4], vec![]));
    for at in (0..whole).step_by(7) {
        let fs = fs.fork();
        fs.tamper(file(2), |data| data[at] ^= 1);
        let (numbers, bad) = good(&fs);
        assert!(numbers == [1, 3, 4] && bad.len() == 1 || numbers == [1, 2, 3, 4], "byte {at}");
        let fs = fs.fork();
        fs.tamper(file(2), |data| data.truncate(at));
        let (numbers, bad) = good(&fs);
        assert_eq!((numbers, bad[0].file.clone()), (vec![1, 3, 4], file(2)), "cut to {at}");
    }
    // Swapped: under each other's name. And a stranger's.
    use stanchion_io::fs::Fs;
    fs.rename(Path::new(&file(2)), Path::new("x")).unwrap();
    fs.rename(Path::new(&file(3)), Path::new(&file(2))).unwrap();
    fs.rename(Path::new("x"), Path::new(&file(3))).unwrap();
    put(&fs, Path::new(".stanchion/index/notes.json"), b"{}");
    put(&fs, Path::new(".stanchion/index/README"), b"text");
    let (numbers, bad) = good(&fs);
    assert_eq!((numbers, bad.len()), (vec![1, 4], 3));
    let (other, theirs, their_epoch) = started();
    Dataset::own(7).flush(&theirs, their_epoch, 1).unwrap();
    let path = ".stanchion/index/000000000007.1.0.json";
    put(
        &fs,
        Path::new(path),
        &stanchion_io::fs::read_small(&other, Path::new(path), 1 << 20).unwrap(),
    );
    let (numbers, bad) = good(&fs);
    assert_eq!(numbers, [1, 4]);
    assert!(bad.iter().any(|b| b.file == path && b.trouble.cause == Cause::NoDataset), "{bad:?}");
}

#[test]
fn a_record_is_immutable_and_fenced() {
    // FM-S9, FM-S11
    let (fs, prefix, epoch) = started();
    let job = prefix.job().unwrap();
    let data = Dataset::own(1);
    data.flush(&prefix, epoch, 1).unwrap();
    let rec = data.record(job, epoch);
    prefix.write_index(&rec).unwrap();
    let mut later = rec.clone();
    later.unix_s += 5;
    prefix.write_index(&later.clone().seal()).unwrap();
    assert_eq!(prefix.read_index().unwrap().0[0], rec);
    assert_eq!(prefix.write_index(&later).unwrap_err().cause, Cause::Malformed);
    let mut other = rec.clone();
    other.slots[0].1.0 ^= 1;
    assert_eq!(prefix.write_index(&other.seal()).unwrap_err().cause, Cause::State);
    let mut half = rec.clone();
    half.info.placement = half.info.placement[..half.info.placement.len() - 1].into();
    assert_eq!(prefix.write_index(&half.seal()).unwrap_err().cause, Cause::Malformed);
    fs.tamper(".stanchion/index/000000000001.1.0.json", |data| data[50] ^= 1);
    prefix.write_index(&rec).unwrap();
    assert_eq!(assert_index_true(&prefix, "damaged, then written again"), [1]);
    let newer = prefix_on(&fs).take_epoch().unwrap();
    assert!(newer > epoch);
    assert_eq!(prefix.write_index(&rec).unwrap_err().cause, Cause::Fenced);
    // Another content of a dataset that is in the index must not get at its manifests (FM-S1).
    let mut files = data.files.clone();
    files[0].data[0] ^= 1;
    let changed = Dataset::of(key(1), files);
    assert_eq!(changed.prepare(&prefix, 2).unwrap_err().cause, Cause::State);
    // The same content may be flushed again, and its record stays meanwhile.
    data.prepare(&prefix, 3).unwrap();
    data.publish(&prefix, 3).unwrap();
    assert_eq!(assert_index_true(&prefix, "flushed twice"), [1]);
}

fn two(a: &str, b: &str) -> Dataset {
    let file =
        |rank: u32, path: &str| Rank { rank, path: path.into(), data: bytes(rank.into(), 5000) };
    Dataset::of(key(1), vec![file(0, a), file(3, b)])
}

#[test]
fn two_files_never_become_one() {
    // FM-S16, whoever comes first
    for (a, b) in [("same", "same"), ("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/b")] {
        let data = two(a, b);
        for order in [[0, 1], [1, 0]] {
            let (fs, prefix, _) = started();
            let prepare = |i: usize| {
                prefix.flush_prepare(
                    &data.nodes[i].cache,
                    &data.manifests[i],
                    (Layout::Files, 1),
                    &go_on,
                )
            };
            prepare(order[0]).unwrap();
            let trouble = prepare(order[1]).unwrap_err();
            assert_eq!(trouble.cause, Cause::SamePath, "{a} {b} {order:?}: {trouble}");
            assert_eq!(trouble.slot, Some(SlotId(order[1] as u32)));
            // Given again, as after the agent's loss: the same answer.
            assert_eq!(prepare(order[1]).unwrap_err().cause, Cause::SamePath);
            prefix.flush_abort(key(1), 1);
            assert!(!fs.files().iter().any(|f| f.contains("/tmp/")), "{:?}", fs.files());
        }
    }
    // Names that only look alike are different files.
    let (_, prefix, epoch) = started();
    two("a/f", "b/f").flush(&prefix, epoch, 1).unwrap();
    assert_eq!(assert_index_true(&prefix, "two directories"), [1]);
}

#[test]
fn two_slots_with_one_path_at_the_same_moment() {
    // FM-S16: at least one is refused, every time.
    let data = two("same", "same");
    for _ in 0..50 {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let gate = std::sync::Barrier::new(2);
        let run = |i: usize| {
            let prefix = Prefix::open(dir.path()).unwrap();
            let (cache, m) = (&data.nodes[i].cache, &data.manifests[i]);
            gate.wait();
            prefix.flush_prepare(cache, m, (Layout::Files, 1), &go_on)
        };
        let results: Vec<_> = std::thread::scope(|s| {
            let threads = [0, 1].map(|i| {
                s.spawn({
                    let run = &run;
                    move || run(i)
                })
            });
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(results.iter().any(|r| r.is_err()), "{results:?}");
        for trouble in results.into_iter().filter_map(Result::err) {
            assert_eq!(trouble.cause, Cause::SamePath);
        }
    }
}

#[test]
fn a_slot_that_moved_takes_its_own_leftovers() {
    let (fs, prefix, epoch) = started();
    let data = Dataset::own(1);
    // Torn at some step by the agent's death; then the same attempt on another node, which sees a
    // torn file under the temporary name.
    for step in 0..60 {
        let fs = fs.fork();
        let before = prefix_on(&fs);
        fs.plan(step, Fault::Torn);
        let _ = data.prepare(&before, 1);
        fs.heal();
        let prefix = prefix_on(&fs);
        data.flush(&prefix, epoch, 1).unwrap_or_else(|t| panic!("step {step}: {t}"));
        assert_eq!(assert_index_true(&prefix, &format!("step {step}")), [1]);
    }
    // Leftovers of an older attempt go when the next one starts.
    data.prepare(&prefix, 1).unwrap();
    data.prepare(&prefix, 2).unwrap();
    assert!(!fs.files().iter().any(|f| f.contains(".1.0.1/")), "{:?}", fs.files());
}

#[test]
fn damage_in_the_cache_never_reaches_the_prefix() {
    // FM-F9, FM-V6
    let path = "ckpt.1/rank_1.dat";
    type Damage = (fn(&mut Vec<u8>), bool);
    let damages: [Damage; 3] =
        [(|d| d[9] ^= 1, true), (|d| d.truncate(10), false), (|d| *d = bytes(3, d.len()), true)];
    for (damage, same_size) in damages {
        let (fs, prefix, epoch) = started();
        let data = Dataset::own(1);
        data.nodes[0].fs.tamper(place(key(1), SlotId(0), 1, path), damage);
        let trouble = data.flush(&prefix, epoch, 1).unwrap_err();
        match trouble.cause {
            Cause::Damaged => assert!(same_size),
            Cause::Size { have: 10, .. } => assert!(!same_size),
            other => panic!("{other:?}"),
        }
        assert_eq!(
            (trouble.slot, trouble.rank, trouble.file.as_deref()),
            (Some(SlotId(0)), Some(RankId(1)), Some(path))
        );
        prefix.flush_abort(key(1), 1);
        assert!(!fs.files().iter().any(|f| !f.starts_with(".stanchion")));
    }
    let (_, prefix, _) = started();
    let data = Dataset::own(1);
    data.nodes[1].cache.evict(&[key(1)]);
    assert_eq!(data.prepare(&prefix, 1).unwrap_err().cause, Cause::Missing);
    let stop = || true;
    let (node, m) = (&data.nodes[0], &data.manifests[0]);
    let stopped = prefix.flush_prepare(&node.cache, m, (Layout::Files, 1), &stop);
    assert_eq!(stopped.unwrap_err().cause, Cause::Closing);
}

#[test]
fn what_stands_in_the_way_is_named_before_the_copy() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let outside = tempfile::tempdir_in("/dev/shm").unwrap();
    let prefix = Prefix::open(dir.path()).unwrap();
    let data = two("d/f", "g");
    let cause = || data.prepare(&prefix, 1).unwrap_err().cause;
    std::fs::create_dir_all(dir.path().join("d/f")).unwrap();
    assert_eq!(cause(), os(Errno::ISDIR));
    std::fs::remove_dir_all(dir.path().join("d")).unwrap();
    std::fs::write(dir.path().join("d"), "file").unwrap();
    assert_eq!(cause(), os(Errno::NOTDIR));
    std::fs::remove_file(dir.path().join("d")).unwrap();
    symlink(outside.path(), dir.path().join("d")).unwrap();
    assert!(matches!(cause(), Cause::Os(_)));
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    std::fs::remove_file(dir.path().join("d")).unwrap();
    // A link in the file's own place is replaced, not followed.
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    symlink(outside.path().join("secret"), dir.path().join("g")).unwrap();
    let epoch = prefix.take_epoch().unwrap();
    data.flush(&prefix, epoch, 1).unwrap();
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"secret");
    assert_eq!(assert_index_true(&prefix, "link replaced"), [1]);
}

#[test]
fn only_records_of_replaced_files_are_withdrawn() {
    // FM-S10
    let (fs, prefix, epoch) = started();
    Dataset::own(1).flush(&prefix, epoch, 1).unwrap();
    Dataset::rotating(2).flush(&prefix, epoch, 1).unwrap();
    Dataset::own(3).flush(&prefix, epoch, 1).unwrap();
    // One path of another slot and rank is enough.
    let one = Rank { rank: 3, path: "rotating/rank_0.dat".into(), data: bytes(9, 100) };
    let fourth = Dataset::of(key(4), vec![one]);
    fourth.prepare(&prefix, 1).unwrap();
    assert_eq!(assert_index_true(&prefix, "prepared"), [1, 2, 3]);
    fourth.publish(&prefix, 1).unwrap();
    assert_eq!(assert_index_true(&prefix, "published"), [1, 3]);
    prefix.write_index(&fourth.record(prefix.job().unwrap(), epoch)).unwrap();
    assert_eq!(assert_index_true(&prefix, "indexed"), [1, 3, 4]);
    // One that is void renames nothing.
    let late = Dataset::rotating(5);
    late.prepare(&prefix, 1).unwrap();
    let stopped =
        prefix.flush_publish(&late.manifests[0], (Layout::Files, 1), &|| true).unwrap_err();
    assert_eq!(stopped.cause, Cause::Closing);
    prefix.flush_abort(key(5), 1);
    assert!(late.publish(&prefix, 1).is_err());
    prefix.write_index(&fourth.record(prefix.job().unwrap(), epoch)).unwrap();
    assert_eq!(assert_index_true(&prefix, "a late one"), [1, 3, 4]);
    // Twice published is as good as once; without its files it is not.
    fourth.publish(&prefix, 1).unwrap();
    fs.tamper("rotating/rank_0.dat", |data| data[0] ^= 1);
    assert_eq!(fourth.publish(&prefix, 1).unwrap_err().cause, Cause::Damaged);
    prefix.withdraw(key(1)).unwrap();
    prefix.withdraw(key(1)).unwrap();
    let numbers: Vec<u64> =
        prefix.read_index().unwrap().0.iter().map(|r| r.info.key.no.0).collect();
    assert_eq!(numbers, [3, 4]);
}

#[test]
fn delete_takes_only_what_nobody_else_vouches_for() {
    let (fs, prefix, epoch) = started();
    let own = |no: u64, rank: u32, path: &str| {
        (no, Rank { rank, path: path.into(), data: bytes(no, 5000) })
    };
    let (_, shared) = own(0, 0, "shared");
    let (_, a) = own(1, 1, "d/a");
    let (_, changed) = own(1, 3, "changed");
    let first = Dataset::of(key(1), vec![shared.clone(), a, changed]);
    first.flush(&prefix, epoch, 1).unwrap();
    let second = Dataset::of(key(2), vec![shared]);
    second.flush(&prefix, epoch, 1).unwrap();
    // Withdrawn for the shared file, but it can still be deleted.
    assert_eq!(assert_index_true(&prefix, "two"), [2]);
    fs.tamper("changed", |data| data.push(1));
    prefix.delete(key(1)).unwrap();
    let files: Vec<String> =
        fs.files().into_iter().filter(|f| !f.starts_with(".stanchion")).collect();
    assert_eq!(files, ["changed", "shared"]);
    assert_eq!(assert_index_true(&prefix, "deleted"), [2]);
    prefix.delete(key(1)).unwrap();
    prefix.delete(key(2)).unwrap();
    assert!(!fs.files().iter().any(|f| f == "shared" || f.contains("/data/")), "{:?}", fs.files());
}

#[test]
fn what_is_pinned_is_not_deleted() {
    // FM-S20
    let (fs, prefix, epoch) = started();
    for data in [Dataset::own(1), Dataset::own(2).in_containers()] {
        data.flush(&prefix, epoch, 1).unwrap();
        assert!(prefix.pin(data.key).unwrap());
        fs.crash(Keep::Nothing);
        let prefix = prefix_on(&fs);
        assert!(!prefix.pin(data.key).unwrap() && prefix.pins().unwrap().contains(&data.key));
        let refused = prefix.delete(data.key).unwrap_err();
        assert_eq!(refused.cause, os(Errno::PERM));
        assert!(refused.file.unwrap().contains("/pins/"));
        prefix.sweep(&[]).unwrap();
    }
    let prefix = prefix_on(&fs);
    assert_eq!(assert_index_true(&prefix, "pinned"), [1, 2]);
    assert!(prefix.unpin(key(1)).unwrap() && !prefix.unpin(key(1)).unwrap());
    fs.crash(Keep::Nothing);
    let prefix = prefix_on(&fs);
    prefix.delete(key(1)).unwrap();
    assert_eq!(assert_index_true(&prefix, "one goes"), [2]);
    assert_eq!(prefix.pins().unwrap().len(), 1);
}

#[test]
fn a_fetch_is_what_was_flushed_wherever_ranks_are_now() {
    let (_, prefix, epoch) = started();
    let data = Dataset::own(1);
    data.flush(&prefix, epoch, 1).unwrap();
    let info = info(key(1), &data.manifests);
    for ranks in
        [vec![(RankId(0), 4)], vec![(RankId(1), 2)], vec![(RankId(3), 1), (RankId(0), 1)], vec![]]
    {
        let node = Node::new(1 << 30);
        let m = prefix.fetch(&node.cache, &info, SlotId(5), &ranks, &go_on).unwrap();
        m.check().unwrap();
        assert_eq!((m.key, m.slot), (key(1), SlotId(5)));
        let wanted = |r: u32| ranks.iter().any(|(f, n)| (f.0..f.0 + n).contains(&r));
        let want: Vec<&Rank> = data.files.iter().filter(|f| wanted(f.rank)).collect();
        assert_eq!(m.files.len(), want.len());
        for f in want {
            let path = place(key(1), SlotId(5), f.rank, &f.path);
            assert_eq!(stanchion_io::fs::read_small(&node.fs, &path, 1 << 20).unwrap(), f.data);
        }
        assert_eq!(node.cache.verify(&m, &go_on), Ok((vec![], vec![])));
        assert_eq!(node.cache.bytes_used(), m.bytes());
        // Flushed again from there, as another slot: the same files.
        assert!(m.files.iter().all(|f| f.mode == 0o640));
    }
    let mut other = info.clone();
    other.name = "another".into();
    let node = Node::new(1 << 30);
    let all = [(RankId(0), 4)];
    let trouble = prefix.fetch(&node.cache, &other, SlotId(0), &all, &go_on).unwrap_err();
    assert_eq!(trouble.cause, Cause::NoDataset);
    let small = Node::new(100);
    let full = prefix.fetch(&small.cache, &info, SlotId(0), &all, &go_on).unwrap_err();
    assert_eq!((full.cause, small.cache.bytes_used()), (Cause::NoSpace, 0));
    let stop = || true;
    let stopped = prefix.fetch(&node.cache, &info, SlotId(0), &all, &stop).unwrap_err();
    assert_eq!(stopped.cause, Cause::Closing);
}

#[test]
fn all_damage_in_the_prefix_is_found() {
    // FM-F9, FM-S7: by fetch, which leaves nothing, and by verify, which names it.
    let (whole, prefix, epoch) = started();
    let data = Dataset::own(1);
    data.flush(&prefix, epoch, 1).unwrap();
    Dataset::rotating(2).flush(&prefix, epoch, 1).unwrap();
    let (a, b) = ("ckpt.1/rank_0.dat", "ckpt.1/rank_3.dat");
    let info = info(key(1), &data.manifests);
    let check = |damage: &dyn Fn(&FaultyFs), cause: &dyn Fn(Cause) -> bool, files: &[&str]| {
        let fs = whole.fork();
        damage(&fs);
        let prefix = prefix_on(&fs);
        let node = Node::new(1 << 30);
        let all = [(RankId(0), RANKS)];
        let fetched = prefix.fetch(&node.cache, &info, SlotId(0), &all, &go_on).unwrap_err();
        assert!(cause(fetched.cause), "{fetched:?}");
        assert_eq!((node.fs.files(), node.cache.bytes_used()), (vec![], 0));
        let rec = &prefix.read_index().unwrap().0[0];
        let found = prefix.verify(rec, &mut |_| {}).unwrap();
        assert!(found.iter().all(|t| cause(t.cause) && t.slot.is_some()), "{found:?}");
        let names: Vec<&str> = found.iter().filter_map(|t| t.file.as_deref()).collect();
        assert_eq!(names, files);
    };
    let damaged = |c: Cause| c == Cause::Damaged;
    let size = |c: Cause| matches!(c, Cause::Size { .. });
    let len = data.files[0].data.len();
    for at in [0, CHUNK as usize - 1, len - 1].map(|at| at.min(len - 1)) {
        check(&|fs| fs.tamper(a, |d| d[at] ^= 1), &damaged, &[a]);
    }
    check(&|fs| fs.tamper(a, |d| d.truncate(len - 1)), &size, &[a]);
    check(&|fs| fs.tamper(a, |d| d.push(0)), &size, &[a]);
    use stanchion_io::fs::Fs;
    let p = Path::new;
    check(&|fs| fs.unlink(p(a)).unwrap(), &|c| c == Cause::Missing, &[a]);
    let swap = |fs: &FaultyFs| {
        fs.rename(p(a), p("x")).unwrap();
        fs.rename(p(b), p(a)).unwrap();
        fs.rename(p("x"), p(b)).unwrap();
    };
    check(&swap, &|c| damaged(c) || size(c), &[a, b]);
    check(&|fs| fs.tamper(a, |d| *d = bytes(4, d.len())), &damaged, &[a]);
    let older = |fs: &FaultyFs| fs.rename(p("rotating/rank_0.dat"), p(a)).unwrap();
    check(&older, &|c| damaged(c) || size(c), &[a]);
    let slot = ".stanchion/data/000000000001.1.0/slot.000001";
    check(&|fs| fs.tamper(slot, |d| d[40] ^= 1), &|c| c == Cause::Malformed, &[slot]);
    check(&|fs| fs.unlink(p(slot)).unwrap(), &|c| c == Cause::Missing, &[slot]);
    let swapped = |fs: &FaultyFs| {
        fs.rename(p(".stanchion/data/000000000002.1.0/slot.000001"), p(slot)).unwrap();
    };
    check(&swapped, &|c| c == Cause::Malformed, &[slot]);
}

#[test]
fn a_fetch_that_fails_at_any_step_leaves_nothing() {
    let (_, prefix, epoch) = started();
    let data = Dataset::own(1);
    data.flush(&prefix, epoch, 1).unwrap();
    let info = info(key(1), &data.manifests);
    let all = [(RankId(0), RANKS)];
    let node = Node::new(1 << 30);
    let before = node.fs.ops();
    prefix.fetch(&node.cache, &info, SlotId(0), &all, &go_on).unwrap();
    for step in 0..node.fs.ops() - before {
        for fault in [Fault::Once(Errno::NOSPC), Fault::Torn, Fault::Short] {
            let node = Node::new(1 << 30);
            node.fs.plan(step, fault);
            match prefix.fetch(&node.cache, &info, SlotId(0), &all, &go_on) {
                Ok(m) => assert_eq!(node.cache.verify(&m, &go_on), Ok((vec![], vec![]))),
                Err(_) => {
                    assert_ne!(fault, Fault::Short);
                    assert_eq!(
                        (node.fs.files(), node.cache.bytes_used()),
                        (vec![], 0),
                        "step {step}"
                    );
                }
            }
        }
    }
}

#[test]
fn notes_are_kept_and_strangers_text_is_refused() {
    // FM-C5
    let (fs, prefix, _) = started();
    assert_eq!(prefix.read_halt(), Ok(None));
    let halt = HaltFile { now: true, after_checkpoints: Some(3), ..HaltFile::default() };
    prefix.write_halt(&halt).unwrap();
    assert_eq!(prefix.read_halt(), Ok(Some(halt)));
    fs.tamper(".stanchion/halt.json", |d| d.truncate(9));
    assert_eq!(prefix.read_halt().unwrap_err().cause, Cause::Malformed);
    fs.tamper(".stanchion/halt.json", |d| d.resize(1 << 20, b' '));
    assert_eq!(prefix.read_halt().unwrap_err().cause, os(Errno::FBIG));
    prefix.clear_halt().unwrap();
    prefix.clear_halt().unwrap();
    assert_eq!(prefix.read_halt(), Ok(None));
    let lease = |epoch| LeaseFile {
        epoch: Epoch(epoch),
        host: "node".into(),
        pid: 1,
        unix_s: 5,
        role: "run".into(),
    };
    prefix.write_lease(&lease(3)).unwrap();
    assert_eq!(prefix.write_lease(&lease(2)).unwrap_err().cause, Cause::Fenced);
    prefix.write_lease(&lease(4)).unwrap();
    assert_eq!(prefix.read_lease(), Ok(Some(lease(4))));
    fs.tamper(".stanchion/lease.json", |d| d.truncate(4));
    assert_eq!(prefix.read_lease(), Ok(None));
    prefix.remove_lease().unwrap();
    assert_eq!(prefix.read_lease(), Ok(None));
}

#[test]
fn sweeping_keeps_what_is_in_use() {
    let (fs, prefix, epoch) = started();
    Dataset::own(1).flush(&prefix, epoch, 1).unwrap();
    Dataset::own(2).prepare(&prefix, 1).unwrap();
    Dataset::own(3).prepare(&prefix, 4).unwrap();
    put(&fs, Path::new(".stanchion/tmp/.new.0123"), b"x");
    put(&fs, Path::new(".stanchion/index/.new.0123"), b"x");
    prefix.sweep(&[(key(3), 4)]).unwrap();
    let files = fs.files();
    let any = |part: &str| files.iter().any(|f| f.contains(part));
    assert!(any("data/000000000001") && any("data/000000000003") && !any("000000000002"));
    assert!(any("tmp/000000000003.1.0.4/ckpt.3") && !any(".new."));
    assert_eq!(assert_index_true(&prefix, "swept"), [1]);
    Dataset::own(3).publish(&prefix, 4).unwrap();
}

#[test]
fn unusual_names_and_modes_arrive() {
    let (fs, prefix, epoch) = started();
    let long = "n".repeat(255);
    let names = ["späth/ü", "a b", "-rf", "%s%n", "\u{202e}x", &long, ".hidden", "x/.stanchion/y"];
    let files: Vec<Rank> = names
        .iter()
        .enumerate()
        .map(|(i, n)| Rank { rank: i as u32 % RANKS, path: (*n).into(), data: bytes(i as u64, 10) })
        .collect();
    Dataset::of(key(1), files.clone()).flush(&prefix, epoch, 1).unwrap();
    for f in files {
        let there = stanchion_io::fs::read_small(&fs, Path::new(&f.path), 100).unwrap();
        assert_eq!(there, f.data);
    }
    // On a real file system a component may be too long: an error that names it.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let real = Prefix::open(dir.path()).unwrap();
    let path = format!("{}x", "n".repeat(255));
    let data = Dataset::of(key(1), vec![Rank { rank: 0, path: path.clone(), data: vec![1] }]);
    let trouble = data.prepare(&real, 1).unwrap_err();
    assert_eq!((trouble.cause, trouble.file), (os(Errno::NAMETOOLONG), Some(path)));
}

mod random {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Whatever files, what is fetched is what was written, wherever ranks are.
        #[test]
        fn flush_and_fetch_are_inverse(
            files in proptest::collection::btree_map("[a-c]{1,2}(/[d-f]{1,2}){0,2}", (0u32..RANKS, 0usize..20_000), 0..10),
            first in 0u32..RANKS, count in 0u32..RANKS,
        ) {
            let mut ranks: Vec<Rank> = Vec::new();
            for (path, (rank, len)) in files {
                let inside = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|r| r.starts_with('/'));
                if !ranks.iter().any(|r| inside(&r.path, &path) || inside(&path, &r.path)) {
                    ranks.push(Rank { rank, data: bytes(len as u64, len), path });
                }
            }
            let (_, prefix, epoch) = started();
            let data = Dataset::of(key(1), ranks.clone());
            data.flush(&prefix, epoch, 1).unwrap();
            assert_eq!(assert_index_true(&prefix, "random"), [1]);
            let node = Node::new(1 << 30);
            let info = info(key(1), &data.manifests);
            let m = prefix.fetch(&node.cache, &info, SlotId(0), &[(RankId(first), count)], &go_on).unwrap();
            for f in ranks {
                let path = place(key(1), SlotId(0), f.rank, &f.path);
                let there = stanchion_io::fs::read_small(&node.fs, &path, 1 << 20);
                if (first..first + count).contains(&f.rank) {
                    prop_assert_eq!(there, Ok(f.data));
                    prop_assert!(m.files.iter().any(|e| e.path == f.path));
                } else {
                    prop_assert!(there.is_err());
                }
            }
            prefix.delete(key(1)).unwrap();
            prop_assert_eq!(prefix.read_index().unwrap().0.len(), 0);
        }
    }
}
