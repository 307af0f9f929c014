//! The cache: FM-S2, FM-S7, FM-S8, FM-S16, FM-F8, FM-F9, FM-C2, FM-C4, FM-V4.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use common::*;
use proptest::prelude::*;
use rustix::io::Errno;
use stanchion_format::checksum::crc64;
use stanchion_format::holding::{self, Holding};
use stanchion_format::ids::{Ancestry, JobId, Key, RankId, SlotId};
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::Cause;
use stanchion_io::cache::Cache;
use stanchion_io::fs::testing::Fault;
use stanchion_io::fs::{self, Fs, How, Kind};

const SLOT: SlotId = SlotId(0);

fn one(rank: u32, path: &str, data: &[u8]) -> Rank {
    Rank { rank, path: path.into(), data: data.to_vec() }
}

/// A node whose slot 0 holds three files, one of them empty.
fn held() -> (Node, Vec<Rank>, Manifest) {
    let node = Node::new(1 << 30);
    let files = vec![
        one(0, "a", &bytes(1, 3 * CHUNK as usize + 5)),
        one(0, "dir/b", &bytes(2, CHUNK as usize)),
        one(1, "empty", b""),
    ];
    let m = node.manifest(key(1), SLOT, &files);
    (node, files, m)
}

fn assert_whole(node: &Node, files: &[Rank], m: &Manifest) {
    assert_eq!(node.cache.verify(m, &go_on), Ok((vec![], vec![])));
    for f in files {
        let path = node.place(m.key, SLOT, f.rank, &f.path);
        assert_eq!(fs::read_small(&node.fs, &path, 1 << 20).unwrap(), f.data, "{}", f.path);
    }
}

/// Writes the bad chunks as a rebuild would.
fn repair(node: &Node, files: &[Rank], m: &Manifest, bad: &[u64]) {
    for chunk in bad {
        let at = m.chunk(*chunk).unwrap();
        let entry = &m.files[at.file];
        let data = &files.iter().find(|f| f.path == entry.path).unwrap().data;
        let piece = &data[at.offset as usize..][..at.len as usize];
        node.cache.write_chunk(m, *chunk, piece).unwrap();
    }
}

#[test]
fn a_manifest_says_what_is_there() {
    let (node, files, m) = held();
    m.check().unwrap();
    assert_eq!(
        m.files.iter().map(|f| f.path.as_str()).collect::<Vec<_>>(),
        ["a", "dir/b", "empty"]
    );
    assert_eq!((m.chunk_count(), m.files[0].mode), (5, 0o640));
    let mut buf = Vec::new();
    for chunk in 0..m.chunk_count() {
        assert_eq!(node.cache.read_chunk(&m, chunk, &mut buf), Ok(m.chunk(chunk).unwrap().crc));
        assert_eq!(crc64(&buf), m.chunk(chunk).unwrap().crc);
    }
    assert_eq!(node.cache.read_chunk(&m, 5, &mut buf).unwrap_err().cause, Cause::Missing);
    assert_whole(&node, &files, &m);
}

#[test]
fn the_vote_counts_every_byte() {
    // FM-S2
    let (node, files, _) = held();
    let decls = node.write(key(1), SLOT, &files);
    let cause = |decls: &[FileDecl]| node.cache.stat(key(1), SLOT, decls).unwrap_err();
    let mut wrong = decls.clone();
    wrong[0].bytes += 1;
    let trouble = cause(&wrong);
    let have = decls[0].bytes;
    assert_eq!(trouble.cause, Cause::Size { want: have + 1, have });
    assert_eq!((trouble.rank, trouble.file.as_deref()), (Some(RankId(0)), Some("a")));
    wrong[0].path = "nothing".into();
    assert_eq!(cause(&wrong).cause, Cause::Missing);
    wrong[0].path = "dir".into();
    assert_eq!(cause(&wrong).cause, Cause::Os(Errno::ISDIR.raw_os_error()));
    for name in ["../r000001/empty", "", "/etc/passwd", "a\nb", ".stanchion/job", "a//b"] {
        wrong[0].path = name.into();
        assert_eq!(cause(&wrong).cause, Cause::Name, "{name:?}");
        assert_eq!(
            node.cache.digest(key(1), SLOT, CHUNK, &wrong, &go_on).unwrap_err().cause,
            Cause::Name
        );
    }
}

#[test]
fn one_path_of_two_ranks_is_refused() {
    // FM-S16
    let node = Node::new(1 << 30);
    let decls = node.write(key(1), SLOT, &[one(0, "same", b"x"), one(1, "same", b"x")]);
    let trouble = node.cache.stat(key(1), SLOT, &decls).unwrap_err();
    assert_eq!((trouble.cause, trouble.rank), (Cause::SamePath, Some(RankId(1))));
    let twice = [decls[0].clone(), decls[0].clone()];
    let trouble = node.cache.digest(key(1), SLOT, CHUNK, &twice, &go_on).unwrap_err();
    assert_eq!(trouble.cause, Cause::SamePath);
}

#[test]
fn digest_notices_a_size_that_is_not_the_declared_one() {
    let (node, files, _) = held();
    let mut decls = node.write(key(1), SLOT, &files);
    decls[1].bytes -= 1;
    let trouble = node.cache.digest(key(1), SLOT, CHUNK, &decls, &go_on).unwrap_err();
    assert_eq!(trouble.cause, Cause::Size { want: decls[1].bytes, have: decls[1].bytes + 1 });
    assert_eq!(trouble.rank, Some(RankId(0)));
    for chunk_bytes in [0, 1, u32::MAX] {
        assert!(node.cache.digest(key(1), SLOT, chunk_bytes, &decls, &go_on).is_err());
    }
}

#[test]
fn work_that_is_void_stops() {
    let (node, files, m) = held();
    let decls = node.write(key(1), SLOT, &files);
    let stop = || true;
    assert_eq!(
        node.cache.digest(key(1), SLOT, CHUNK, &decls, &stop).unwrap_err().cause,
        Cause::Closing
    );
    assert_eq!(node.cache.verify(&m, &stop).unwrap_err().cause, Cause::Closing);
    assert_whole(&node, &files, &m);
}

/// Damage, and which chunks of which files are then bad.
fn damage(
    node: &Node,
    files: &[Rank],
    m: &Manifest,
    how: impl FnOnce(&Node),
    bad: &[u64],
    names: &[&str],
) {
    how(node);
    let found = node.cache.verify(m, &go_on).unwrap();
    assert_eq!(found.0, bad);
    assert_eq!(found.1, names);
    repair(node, files, m, bad);
    assert_whole(node, files, m);
}

#[test]
fn all_damage_is_found_and_can_be_repaired() {
    // FM-S7, FM-F9
    let (node, files, m) = held();
    let a = place(key(1), SLOT, 0, "a");
    let b = place(key(1), SLOT, 0, "dir/b");
    let empty = place(key(1), SLOT, 1, "empty");
    let d = |how: &dyn Fn(&Node), bad: &[u64], names: &[&str]| {
        damage(&node, &files, &m, |n| how(n), bad, names);
    };
    d(&|n| n.fs.tamper(&a, |data| data[CHUNK as usize] ^= 1), &[1], &["a"]);
    d(&|n| n.fs.tamper(&a, |data| data.truncate(CHUNK as usize + 1)), &[1, 2, 3], &["a"]);
    d(&|n| n.fs.tamper(&a, |data| data.clear()), &[0, 1, 2, 3], &["a"]);
    d(&|n| n.fs.tamper(&a, |data| data.push(0)), &[], &["a"]);
    d(&|n| n.fs.unlink(&b).unwrap(), &[4], &["dir/b"]);
    d(&|n| n.fs.unlink(&empty).unwrap(), &[], &["empty"]);
    d(&|n| n.fs.tamper(&empty, |data| data.push(1)), &[], &["empty"]);
    // Swapped files; a file of an older dataset.
    let swap = |n: &Node| {
        let tmp = Path::new("tmp");
        n.fs.rename(&a, tmp).unwrap();
        n.fs.rename(&b, &a).unwrap();
        n.fs.rename(tmp, &b).unwrap();
    };
    d(&swap, &[0, 1, 2, 3, 4], &["a", "dir/b"]);
    d(&|n| n.fs.tamper(&a, |data| *data = bytes(99, data.len())), &[0, 1, 2, 3], &["a"]);
    // A directory in the place of a file and the other way round.
    let upside_down = |n: &Node| {
        n.fs.unlink(&a).unwrap();
        put(&n.fs, &a.join("x"), b"x");
        fs::remove_tree(&n.fs, b.parent().unwrap()).unwrap();
        put(&n.fs, b.parent().unwrap(), b"x");
    };
    d(&upside_down, &[0, 1, 2, 3, 4], &["a", "dir/b"]);
    // Everything.
    let all = |n: &Node| fs::remove_contents(&n.fs, Path::new("")).unwrap();
    d(&all, &[0, 1, 2, 3, 4], &["a", "dir/b", "empty"]);
    // What nobody names goes; parity stays.
    node.cache.write_parity(key(1), SLOT, 0, CHUNK, b"parity").unwrap();
    put(&node.fs, &place(key(1), SLOT, 0, "stale/x"), b"old");
    put(&node.fs, &place(key(1), SLOT, 7, "stale"), b"old");
    d(&|_| {}, &[], &[]);
    assert!(!node.fs.files().iter().any(|f| f.contains("stale")));
    node.cache.read_parity(key(1), SLOT, 0, CHUNK, CHUNK, &mut Vec::new()).unwrap();
    // Modes come back without being damage.
    node.fs.chmod(&a, 0o777).unwrap();
    d(&|_| {}, &[], &[]);
    assert_eq!(node.fs.stat(&a).unwrap().mode, 0o640);
}

#[test]
fn an_unreadable_block_is_a_bad_chunk() {
    let (node, files, m) = held();
    let before = node.fs.ops();
    assert_whole(&node, &files, &m);
    // Whatever single read fails, the rest is still verified; other calls may fail the task.
    let (mut as_damage, mut as_trouble) = (0, 0);
    for step in 0..node.fs.ops() - before {
        node.fs.plan(step, Fault::Once(Errno::IO));
        match node.cache.verify(&m, &go_on) {
            Ok((bad, _)) => {
                as_damage += usize::from(!bad.is_empty());
                repair(&node, &files, &m, &bad);
            }
            Err(trouble) => {
                assert_eq!(trouble.cause, Cause::Os(Errno::IO.raw_os_error()));
                as_trouble += 1;
            }
        }
        node.fs.heal();
        let (bad, _) = node.cache.verify(&m, &go_on).unwrap();
        repair(&node, &files, &m, &bad);
        assert_whole(&node, &files, &m);
    }
    assert!(as_damage >= 5, "five chunks were read, {as_damage} failed ({as_trouble})");
}

#[test]
fn want_of_descriptors_does_not_cost_a_good_file() {
    let (node, files, m) = held();
    for step in 0..40 {
        node.fs.plan(step, Fault::Once(Errno::MFILE));
        if let Ok(found) = node.cache.verify(&m, &go_on) {
            // A read does not need a descriptor; anything else is refused, not taken for damage.
            repair(&node, &files, &m, &found.0);
        }
        node.fs.heal();
        for f in &files {
            let path = node.place(m.key, SLOT, f.rank, &f.path);
            assert_eq!(fs::read_small(&node.fs, &path, 1 << 20).unwrap(), f.data, "step {step}");
        }
    }
}

#[test]
fn a_rebuilt_chunk_is_the_lost_one_or_refused() {
    // FM-S8
    let (node, files, m) = held();
    let good = &files[0].data[..CHUNK as usize];
    let mut wrong = good.to_vec();
    wrong[17] ^= 1;
    assert_eq!(node.cache.write_chunk(&m, 0, &wrong).unwrap_err().cause, Cause::Damaged);
    assert_eq!(node.cache.write_chunk(&m, 0, &good[1..]).unwrap_err().cause, Cause::Damaged);
    assert_eq!(node.cache.write_chunk(&m, 9, good).unwrap_err().cause, Cause::Missing);
    assert_whole(&node, &files, &m);
    // Without `verify` before it: the file is made in its full size.
    fs::remove_contents(&node.fs, Path::new("")).unwrap();
    repair(&node, &files, &m, &[3, 0, 4, 2, 1]);
    let found = node.cache.verify(&m, &go_on).unwrap();
    assert_eq!(found, (vec![], vec!["empty".into()]));
    assert_whole(&node, &files, &m);
}

#[test]
fn read_only_files_of_the_application_are_ours() {
    let (node, files, _) = held();
    let a = place(key(1), SLOT, 0, "a");
    node.fs.chmod(&a, 0o400).unwrap();
    let m = node.manifest_of(&files);
    assert_eq!(m.files[0].mode, 0o400);
    node.fs.tamper(&a, |data| data[0] ^= 1);
    let (bad, _) = node.cache.verify(&m, &go_on).unwrap();
    assert_eq!(bad, [0]);
    repair(&node, &files, &m, &bad);
    assert_eq!(node.fs.stat(&a).unwrap().mode, 0o400);
    node.fs.chmod(&a, 0).unwrap();
    node.cache.read_chunk(&m, 0, &mut Vec::new()).unwrap();
    assert_eq!(node.fs.stat(&a).unwrap().mode, 0);
}

impl Node {
    /// The manifest of files that are there already.
    fn manifest_of(&self, files: &[Rank]) -> Manifest {
        let decl = |f: &Rank| FileDecl {
            rank: RankId(f.rank),
            path: f.path.clone(),
            bytes: f.data.len() as u64,
        };
        let decls: Vec<FileDecl> = files.iter().map(decl).collect();
        self.cache.stat(key(1), SLOT, &decls).unwrap();
        self.cache.digest(key(1), SLOT, CHUNK, &decls, &go_on).unwrap()
    }
}

#[test]
fn parity_knows_its_own_damage() {
    let (node, _, _) = held();
    let cache = &node.cache;
    let mut buf = Vec::new();
    let mut read = |index| cache.read_parity(key(1), SLOT, index, CHUNK, CHUNK, &mut buf);
    assert_eq!(read(0).unwrap_err().cause, Cause::Missing);
    let (p0, p2) = (bytes(5, CHUNK as usize), bytes(6, 100));
    cache.write_parity(key(1), SLOT, 2, CHUNK, &p2).unwrap();
    assert_eq!(read(0).unwrap_err().cause, Cause::Missing);
    assert_eq!(read(1).unwrap_err().cause, Cause::Missing);
    cache.write_parity(key(1), SLOT, 0, CHUNK, &p0).unwrap();
    assert_eq!((read(0), read(2)), (Ok(crc64(&p0)), Ok(crc64(&p2))));
    assert_eq!(read(3).unwrap_err().cause, Cause::Missing);
    assert_eq!(read(u64::MAX).unwrap_err().cause, Cause::Missing);
    assert!(cache.write_parity(key(1), SLOT, u64::MAX, CHUNK, b"x").is_err());
    assert!(cache.write_parity(key(1), SLOT, 0, CHUNK, &bytes(1, CHUNK as usize + 1)).is_err());
    let mut buf = Vec::new();
    let limited = cache.read_parity(key(1), SLOT, 2, CHUNK, 99, &mut buf);
    assert_eq!(limited.unwrap_err().cause, Cause::Damaged);

    let dir = place(key(1), SLOT, 0, "").parent().unwrap().to_owned();
    let damage = |file: &str, at: usize| {
        node.fs.tamper(dir.join(file), |data| data[at] ^= 1);
        let got = cache.read_parity(key(1), SLOT, 2, CHUNK, CHUNK, &mut Vec::new());
        node.fs.tamper(dir.join(file), |data| data[at] ^= 1);
        got.unwrap_err().cause
    };
    assert_eq!(damage("parity", 2 * CHUNK as usize + 99), Cause::Damaged);
    for byte in 0..32 {
        assert_eq!(damage("parity.sums", 64 + byte), Cause::Damaged, "{byte}");
    }
    // A place whose sum is another's.
    node.fs.tamper(dir.join("parity.sums"), |data| data.copy_within(0..32, 64));
    let got = cache.read_parity(key(1), SLOT, 2, CHUNK, CHUNK, &mut Vec::new());
    assert_eq!(got.unwrap_err().cause, Cause::Damaged);
    node.fs.tamper(dir.join("parity"), |data| data.truncate(7));
    let got = cache.read_parity(key(1), SLOT, 0, CHUNK, CHUNK, &mut Vec::new());
    assert_eq!(got.unwrap_err().cause, Cause::Damaged);
}

#[test]
fn the_limit_holds() {
    let node = Node::new(10_000);
    let cache = &node.cache;
    let decls = node.write(key(1), SLOT, &[one(0, "f", &bytes(1, 6000))]);
    cache.stat(key(1), SLOT, &decls).unwrap();
    cache.stat(key(1), SLOT, &decls).unwrap();
    assert_eq!(cache.bytes_used(), 6000);
    cache.write_parity(key(1), SLOT, 0, CHUNK, &bytes(1, 3000)).unwrap();
    cache.write_parity(key(1), SLOT, 0, CHUNK, &bytes(2, 2000)).unwrap();
    assert_eq!(cache.bytes_used(), 8000);
    let full = cache.write_parity(key(1), SLOT, 1, CHUNK, &bytes(2, 2001));
    assert_eq!(full.unwrap_err().cause, Cause::NoSpace);
    assert_eq!(cache.bytes_used(), 8000);
    let more = node.write(key(2), SLOT, &[one(0, "f", &bytes(1, 2001))]);
    assert_eq!(cache.stat(key(2), SLOT, &more).unwrap_err().cause, Cause::NoSpace);
    cache.evict(&[key(2)]);
    assert_eq!(cache.bytes_used(), 8000);
    let m = cache.digest(key(1), SLOT, CHUNK, &decls, &go_on).unwrap();
    let other = Manifest { key: key(3), ..m };
    assert_eq!(cache.verify(&other, &go_on).unwrap_err().cause, Cause::NoSpace);
    cache.evict(&[key(1), key(9)]);
    assert_eq!((cache.bytes_used(), node.fs.files().len()), (0, 0));
    cache.verify(&other, &go_on).unwrap();
    assert_eq!(cache.bytes_used(), 6000);
    cache.remove_all();
    assert_eq!(cache.bytes_used(), 0);
}

#[test]
fn a_full_device_is_no_space_and_costs_nothing() {
    // FM-F8
    let (node, _, _) = held();
    let used = node.cache.bytes_used();
    node.fs.capacity(Some(used + 100));
    let full = node.cache.write_parity(key(1), SLOT, 0, CHUNK, &bytes(2, 2001));
    assert_eq!(full.unwrap_err().cause, Cause::NoSpace);
    assert_eq!(node.cache.bytes_used(), used);
}

#[test]
fn opens_only_what_is_its_own() {
    // FM-C2, FM-C4
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let root = dir.path().join("cache");
    let cause = |path: &Path| Cache::open(path, 1).unwrap_err().cause;
    let cache = Cache::open(&root, 1 << 20).unwrap();
    assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    // Another agent's, while that lives.
    assert_eq!(cause(&root), Cause::Os(Errno::BUSY.raw_os_error()));
    drop(cache);
    // Leftovers go, whatever they are; what links point to stays.
    let outside = dir.path().join("outside");
    std::fs::create_dir_all(root.join("x/y")).unwrap();
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("f"), "f").unwrap();
    std::fs::write(root.join("x/y/f"), "f").unwrap();
    symlink(&outside, root.join("x/link")).unwrap();
    std::fs::set_permissions(root.join("x/y"), std::fs::Permissions::from_mode(0o0)).unwrap();
    std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cache = Cache::open(&root, 1 << 20).unwrap();
    assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
    assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    assert!(outside.join("f").exists());
    // Links and files in its place; no parent.
    symlink(&outside, dir.path().join("link")).unwrap();
    assert!(matches!(cause(&dir.path().join("link")), Cause::Os(_)));
    assert!(matches!(cause(&outside.join("f")), Cause::Os(_)));
    assert_eq!(cause(&dir.path().join("no/cache")), Cause::Missing);
    // FM-V4
    cache.make_dirs(key(1), SLOT, &[RankId(0)]).unwrap();
    cache.remove_all();
    assert!(!root.exists());
    if rustix::process::geteuid().is_root() {
        let foreign = dir.path().join("foreign");
        std::fs::create_dir(&foreign).unwrap();
        std::os::unix::fs::chown(&foreign, Some(12345), None).unwrap();
        assert_eq!(cause(&foreign), Cause::Os(Errno::PERM.raw_os_error()));
    }
}

#[test]
fn links_of_an_application_are_not_followed() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let secret = dir.path().join("secret");
    std::fs::write(&secret, "12345").unwrap();
    let cache = Cache::open(&dir.path().join("cache"), 1 << 20).unwrap();
    cache.make_dirs(key(1), SLOT, &[RankId(0)]).unwrap();
    let rank = cache.root().join(place(key(1), SLOT, 0, ""));
    symlink(&secret, rank.join("f")).unwrap();
    symlink(dir.path(), rank.join("d")).unwrap();
    for path in ["f", "d/secret"] {
        let decl = [FileDecl { rank: RankId(0), path: path.into(), bytes: 5 }];
        assert!(cache.stat(key(1), SLOT, &decl).is_err(), "{path}");
        assert!(cache.digest(key(1), SLOT, CHUNK, &decl, &go_on).is_err(), "{path}");
    }
    // A manifest that names such a path gets a file of its own in the link's place.
    let entry = |path: &str| stanchion_format::manifest::FileEntry {
        rank: RankId(0),
        path: path.into(),
        bytes: 5,
        mode: 0o600,
        chunks: vec![crc64(b"hello")],
    };
    let files = vec![entry("d/secret"), entry("f")];
    let m = Manifest { key: key(1), slot: SLOT, chunk_bytes: CHUNK, files };
    assert_eq!(cache.verify(&m, &go_on).unwrap().0, [0, 1]);
    cache.write_chunk(&m, 0, b"hello").unwrap();
    cache.write_chunk(&m, 1, b"hello").unwrap();
    assert_eq!(std::fs::read(&secret).unwrap(), b"12345");
    assert_eq!(std::fs::read(rank.join("d/secret")).unwrap(), b"hello");
}

#[test]
fn a_small_real_device_fills_up() {
    // FM-F8 on a real tmpfs, where mounting is allowed.
    let Some(small) = SmallDevice::new() else { return };
    let cache = Cache::open(&small.0.path().join("cache"), 1 << 30).unwrap();
    let mut written = 0;
    let full = (0..64).find_map(|i| {
        let done = cache.write_parity(key(1), SLOT, i, CHUNK, &bytes(i, CHUNK as usize));
        written += u64::from(done.is_ok());
        done.err()
    });
    assert_eq!(full.expect("64 KiB are not enough").cause, Cause::NoSpace);
    assert_eq!(cache.bytes_used(), written * u64::from(CHUNK));
    for i in 0..written {
        let crc = cache.read_parity(key(1), SLOT, i, CHUNK, CHUNK, &mut Vec::new());
        assert_eq!(crc, Ok(crc64(&bytes(i, CHUNK as usize))));
    }
    cache.remove_all();
}

#[test]
fn directories_without_rights_are_repaired_too() {
    // As root this says little.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = Cache::open(&dir.path().join("cache"), 1 << 20).unwrap();
    cache.make_dirs(key(1), SLOT, &[RankId(0)]).unwrap();
    let rank = cache.root().join(place(key(1), SLOT, 0, ""));
    std::fs::create_dir_all(rank.join("d/e")).unwrap();
    std::fs::write(rank.join("d/e/f"), "hello").unwrap();
    std::fs::write(rank.join("d/stale"), "x").unwrap();
    let decl = [FileDecl { rank: RankId(0), path: "d/e/f".into(), bytes: 5 }];
    let m = cache.digest(key(1), SLOT, CHUNK, &decl, &go_on).unwrap();
    std::fs::remove_file(rank.join("d/e/f")).unwrap();
    for (dir, mode) in [("d/e", 0o100), ("d", 0o500)] {
        std::fs::set_permissions(rank.join(dir), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    assert_eq!(cache.verify(&m, &go_on), Ok((vec![0], vec!["d/e/f".into()])));
    cache.write_chunk(&m, 0, b"hello").unwrap();
    assert_eq!(cache.verify(&m, &go_on), Ok((vec![], vec![])));
    assert!(!rank.join("d/stale").exists());
}

#[test]
fn eviction_takes_what_the_application_protected() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let cache = Cache::open(&dir.path().join("cache"), 1 << 20).unwrap();
    cache.make_dirs(key(1), SLOT, &[RankId(0)]).unwrap();
    let rank = cache.root().join(place(key(1), SLOT, 0, ""));
    std::fs::create_dir_all(rank.join("d/e")).unwrap();
    std::fs::write(rank.join("d/e/f"), "x").unwrap();
    std::fs::write(rank.join(std::ffi::OsStr::new("\u{fffd} strange")), "x").unwrap();
    std::fs::create_dir(rank.join("d/closed")).unwrap();
    for (dir, mode) in [("d/closed", 0o0), ("d/e", 0o500), ("d", 0o600)] {
        std::fs::set_permissions(rank.join(dir), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    cache.evict(&[key(1)]);
    assert_eq!(std::fs::read_dir(cache.root()).unwrap().count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// FM-S7: any flips, cuts and losses of any files are found and repaired.
    #[test]
    fn verify_finds_everything(
        sizes in proptest::collection::vec(0usize..20_000, 1..6),
        damage in proptest::collection::vec((any::<u16>(), any::<u32>(), 0u8..4), 0..8),
    ) {
        let node = Node::new(1 << 30);
        let files: Vec<Rank> = sizes.iter().enumerate()
            .map(|(i, len)| one(i as u32 % 2, &format!("d{}/f{i}", i % 3), &bytes(i as u64, *len)))
            .collect();
        let m = node.manifest(key(1), SLOT, &files);
        for (file, at, kind) in damage {
            let f = &files[file as usize % files.len()];
            let path = place(key(1), SLOT, f.rank, &f.path);
            if !node.fs.stat(&path).is_ok_and(|s| s.kind == Kind::File) {
                continue;
            }
            let at = |data: &Vec<u8>| at as usize % (data.len() + 1);
            match kind {
                0 => node.fs.unlink(&path).unwrap(),
                1 => node.fs.tamper(&path, |d| { let n = at(d); d.truncate(n) }),
                2 => node.fs.tamper(&path, |d| d.push(7)),
                _ => node.fs.tamper(&path, |d| if !d.is_empty() { let n = at(d) % d.len(); d[n] ^= 0x40 }),
            }
        }
        let mut wrong = Vec::new();
        for f in &files {
            let path = place(key(1), SLOT, f.rank, &f.path);
            if fs::read_small(&node.fs, &path, 1 << 20) != Ok(f.data.clone()) {
                wrong.push((f.rank, f.path.clone()));
            }
        }
        wrong.sort();
        let (bad, bad_files) = node.cache.verify(&m, &go_on).unwrap();
        let wrong: Vec<String> = wrong.into_iter().map(|(_, path)| path).collect();
        prop_assert_eq!(bad_files, wrong);
        repair(&node, &files, &m, &bad);
        assert_whole(&node, &files, &m);
    }
}

#[test]
fn reading_survives_short_reads() {
    let (node, files, m) = held();
    let before = node.fs.ops();
    assert_whole(&node, &files, &m);
    for step in 0..node.fs.ops() - before {
        node.fs.plan(step, Fault::Short);
        assert_whole(&node, &files, &m);
        node.fs.heal();
    }
    let file = node.fs.open(&place(key(1), SLOT, 0, "a"), How::Read).unwrap();
    assert_eq!(file.stat().unwrap().bytes, m.files[0].bytes);
}

/// What an agent writes of a slot.
fn holding(no: u64, m: &Manifest) -> Holding {
    let mut info = info(m.key, std::slice::from_ref(m));
    info.sets = Sets::new(Scheme::Single, 3, 3);
    Holding {
        no,
        job: JobId(1),
        inc: m.key.inc,
        ancestry: Ancestry::default(),
        info,
        slot: m.slot,
        data: true,
        parity: false,
        manifests: vec![m.clone().into()],
    }
}

fn beside(key: Key, slot: SlotId, name: &str) -> std::path::PathBuf {
    let dir = stanchion_format::index::cache_slot_dir("", key, slot);
    Path::new(&dir[1..]).join(name)
}

#[test]
fn what_is_written_beside_the_files_goes_with_them() {
    // FM-A1
    let (node, files, m) = held();
    let path = beside(m.key, SLOT, holding::NAME);
    let read = || Holding::parse(&fs::read_small(&node.fs, &path, 1 << 20).unwrap()).unwrap();
    let used = node.cache.bytes_used();
    node.cache.remember(&holding(2, &m)).unwrap();
    assert_eq!((read(), node.cache.bytes_used()), (holding(2, &m), used));
    // An older one that was overtaken replaces nothing.
    node.cache.remember(&holding(1, &m)).unwrap();
    assert_eq!(read().no, 2);
    node.cache.remember(&holding(3, &m)).unwrap();
    assert_eq!(read().no, 3);
    // It is no file that the manifest does not know, and one that was cut off is.
    put(&node.fs, &beside(m.key, SLOT, holding::NEW_NAME), b"half");
    assert_whole(&node, &files, &m);
    assert_eq!(read().no, 3);
    assert!(node.fs.stat(&beside(m.key, SLOT, holding::NEW_NAME)).is_err());
    node.cache.evict(&[m.key]);
    assert_eq!(node.fs.list(Path::new("")).unwrap(), []);
}

#[test]
fn a_record_that_cannot_be_written_leaves_the_older_one() {
    // FM-A1, FM-F8
    let (node, _, m) = held();
    node.cache.remember(&holding(1, &m)).unwrap();
    let path = beside(m.key, SLOT, holding::NAME);
    for nth in 0..8 {
        node.fs.plan(nth, Fault::Once(Errno::NOSPC));
        let _ = node.cache.remember(&holding(2 + nth, &m));
        node.fs.heal();
        let read = fs::read_small(&node.fs, &path, 1 << 20).unwrap();
        assert!(Holding::parse(&read).is_ok(), "after call {nth}");
    }
}

#[test]
fn an_adopted_cache_stays() {
    // FM-A1, FM-A2
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("n0");
    let (_, _, m) = held();
    let dead = Cache::open(&root, 1 << 30).unwrap();
    dead.remember(&holding(1, &m)).unwrap();
    let other = Manifest { slot: SlotId(1), ..m.clone() };
    dead.remember(&holding(2, &other)).unwrap();
    // Living agents' caches are theirs.
    assert_eq!(
        Cache::adopt(&root, 1 << 30).unwrap_err().cause,
        Cause::Os(Errno::BUSY.raw_os_error())
    );
    drop(dead);
    // One in the place of another is refused, as is one that is bent.
    let slot = |n: u32| root.join(beside(m.key, SlotId(n), holding::NAME));
    std::fs::create_dir_all(slot(2).parent().unwrap()).unwrap();
    std::fs::copy(slot(0), slot(2)).unwrap();
    let mut bytes = std::fs::read(slot(1)).unwrap();
    bytes[50] ^= 1;
    std::fs::write(slot(1), bytes).unwrap();
    let cache = Cache::adopt(&root, 1 << 30).unwrap();
    let left = Cache::left(&root).unwrap();
    assert_eq!((left.holdings, left.refused.len()), (vec![holding(1, &m)], 2));
    cache.evict(&[m.key]);
    cache.remove_all();
    drop(cache);
    assert_eq!(Cache::left(&root).unwrap().holdings, [holding(1, &m)]);
    let link = dir.path().join("link");
    symlink(&root, &link).unwrap();
    assert!(Cache::adopt(&link, 1 << 30).is_err() && Cache::left(&link).is_err());
    assert!(Cache::adopt(&dir.path().join("none"), 1 << 30).is_err());
    assert!(!dir.path().join("none").exists());
}
