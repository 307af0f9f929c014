//! One suite for every file system behind [`Fs`]: the system's, in memory and on a disk, and the one
//! that tests use to fail. What holds for the latter must be what holds for the former.

mod common;

use std::path::{Path, PathBuf};

use common::bytes;
use proptest::prelude::*;
use rustix::io::Errno;
use stanchion_io::fs::testing::FaultyFs;
use stanchion_io::fs::{
    Fs, How, Kind, PosixFs, make_dirs, prune, read_full, read_small, remove_tree, write_all,
};

fn p(path: &str) -> &Path {
    Path::new(path)
}

fn contents_and_sizes(fs: &dyn Fs) {
    let data = bytes(1, 3 << 20);
    let file = fs.open(p("f"), How::CreateNew(0o600)).unwrap();
    write_all(&*file, &data, 0).unwrap();
    file.sync().unwrap();
    assert_eq!(read_small(fs, p("f"), 4 << 20).unwrap(), data);
    assert_eq!(read_small(fs, p("f"), 1 << 20), Err(Errno::FBIG));
    let mut buf = vec![7; 100];
    assert_eq!(read_full(&*file, &mut buf, data.len() as u64 - 10), Ok(10));
    assert_eq!(buf[..10], data[data.len() - 10..]);
    assert_eq!(read_full(&*file, &mut buf, 1 << 40), Ok(0));
    file.set_len(10).unwrap();
    file.set_len(20).unwrap();
    assert_eq!(read_small(fs, p("f"), 20).unwrap(), [&data[..10], &[0; 10]].concat());
    write_all(&*file, b"x", 29).unwrap();
    assert_eq!(file.stat().unwrap().bytes, 30);
    assert_eq!(read_small(fs, p("f"), 30).unwrap()[20..], *b"\0\0\0\0\0\0\0\0\0x");
    let reader = fs.open(p("f"), How::Read).unwrap();
    assert_eq!(reader.write_at(b"x", 0), Err(Errno::BADF));
    assert_eq!(fs.stat(p("f")).unwrap().uid, rustix::process::geteuid().as_raw());
}

fn names(fs: &dyn Fs) {
    assert!(matches!(fs.open(p("a"), How::Read), Err(Errno::NOENT)));
    assert!(matches!(fs.open(p("a"), How::Write), Err(Errno::NOENT)));
    assert!(matches!(fs.open(p("no/a"), How::Create(0o600)), Err(Errno::NOENT)));
    make_dirs(fs, p("d/e"), 0o700).unwrap();
    make_dirs(fs, p("d/e"), 0o700).unwrap();
    fs.open(p("a"), How::CreateNew(0o600)).unwrap();
    assert!(matches!(fs.open(p("a"), How::CreateNew(0o600)), Err(Errno::EXIST)));
    assert!(matches!(fs.open(p("d"), How::Read), Err(Errno::ISDIR)));
    assert!(matches!(fs.open(p("a/b"), How::Read), Err(Errno::NOTDIR)));
    assert_eq!(make_dirs(fs, p("a"), 0o700), Err(Errno::NOTDIR));
    assert_eq!(make_dirs(fs, p("a/b"), 0o700), Err(Errno::NOTDIR));
    fs.link(p("a"), p("d/e/b")).unwrap();
    assert_eq!(fs.link(p("a"), p("d/e/b")), Err(Errno::EXIST));
    assert_eq!(fs.rename(p("a"), p("d")), Err(Errno::ISDIR));
    fs.rename(p("a"), p("d/c")).unwrap();
    assert_eq!(fs.stat(p("a")), Err(Errno::NOENT));
    assert_eq!(fs.stat(p("d/c")).unwrap().kind, Kind::File);
    let mut names: Vec<_> =
        fs.list(p("d")).unwrap().into_iter().map(|e| (e.name, e.kind)).collect();
    names.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(names, [("c".into(), Kind::File), ("e".into(), Kind::Dir)]);
    assert_eq!(fs.rmdir(p("d")), Err(Errno::NOTEMPTY));
    assert_eq!(fs.rmdir(p("d/c")), Err(Errno::NOTDIR));
    assert_eq!(fs.unlink(p("d/e")), Err(Errno::ISDIR));
    assert_eq!(fs.unlink(p("d/x")), Err(Errno::NOENT));
    fs.sync_dir(p("d/e")).unwrap();
    fs.sync_dir(p("")).unwrap();
    fs.unlink(p("d/e/b")).unwrap();
    prune(fs, p("d/e"), p("d"));
    assert_eq!(fs.stat(p("d/e")), Err(Errno::NOENT));
    remove_tree(fs, p("d")).unwrap();
    remove_tree(fs, p("d")).unwrap();
    assert_eq!(fs.list(p("")).unwrap(), []);
}

fn modes(fs: &dyn Fs) {
    let file = fs.open(p("f"), How::CreateNew(0o600)).unwrap();
    assert_eq!(file.stat().unwrap().mode, 0o600);
    file.set_mode(0o751).unwrap();
    assert_eq!(fs.stat(p("f")).unwrap().mode, 0o751);
    fs.chmod(p("f"), 0o400).unwrap();
    assert_eq!(file.stat().unwrap().mode, 0o400);
    assert_eq!(fs.chmod(p("g"), 0o400), Err(Errno::NOENT));
}

fn strange_paths(fs: &dyn Fs) {
    fs.mkdir(p("d"), 0o700).unwrap();
    for path in ["..", "../x", "d/../../x", "/etc/passwd"] {
        assert!(matches!(fs.open(p(path), How::Read), Err(Errno::INVAL)), "{path}");
        assert!(fs.mkdir(p(path), 0o700).is_err(), "{path}");
    }
    let long = "x".repeat(200);
    let deep: PathBuf = (0..30).map(|_| long.as_str()).collect();
    make_dirs(fs, &deep, 0o700).unwrap();
    fs.open(&deep.join("f"), How::CreateNew(0o600)).unwrap();
    remove_tree(fs, p(&long)).unwrap();
    assert_eq!(fs.stat(p(&long)), Err(Errno::NOENT));
}

/// A name and what it runs.
type Case = (&'static str, fn(&dyn Fs));

const SUITE: [Case; 4] = [
    ("contents and sizes", contents_and_sizes),
    ("names", names),
    ("modes", modes),
    ("strange paths", strange_paths),
];

fn run_in(parent: &Path) {
    for (name, test) in SUITE {
        println!("{name}");
        let dir = tempfile::tempdir_in(parent).unwrap();
        test(&PosixFs::open(dir.path(), false).unwrap());
    }
}

#[test]
fn posix_in_memory() {
    run_in(p("/dev/shm"));
}

#[test]
fn posix_on_disk() {
    run_in(&std::env::temp_dir());
}

#[test]
fn faulty() {
    for (name, test) in SUITE {
        println!("{name}");
        test(&FaultyFs::new());
    }
}

#[test]
fn links_lead_nowhere() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let outside = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::write(outside.path().join("f"), "secret").unwrap();
    std::os::unix::fs::symlink(outside.path(), dir.path().join("d")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("f"), dir.path().join("f")).unwrap();
    let fs = PosixFs::open(dir.path(), false).unwrap();
    for how in [How::Read, How::Write, How::Create(0o600)] {
        assert!(matches!(fs.open(p("f"), how), Err(Errno::LOOP)), "{how:?}");
        assert!(matches!(fs.open(p("d/f"), how), Err(Errno::NOTDIR | Errno::LOOP)), "{how:?}");
    }
    assert_eq!(fs.stat(p("f")).unwrap().kind, Kind::Link);
    assert_eq!(fs.chmod(p("f"), 0o777), Err(Errno::LOOP));
    assert!(fs.unlink(p("d/f")).is_err());
    assert!(fs.list(p("d")).is_err());
    assert!(fs.mkdir(p("d/new"), 0o700).is_err());
    assert!(make_dirs(&fs, p("d/new"), 0o700).is_err());
    remove_tree(&fs, p("d")).unwrap();
    assert!(outside.path().join("f").exists());
    assert!(matches!(
        PosixFs::open(&dir.path().join("f"), false),
        Err(Errno::NOTDIR | Errno::LOOP)
    ));
}

#[test]
fn a_pipe_does_not_block() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let fs = PosixFs::open(dir.path(), false).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    assert!(matches!(fs.open(p("pipe"), How::Read), Err(Errno::INVAL)));
    assert!(matches!(fs.open(p("pipe"), How::Write), Err(Errno::INVAL)));
    assert_eq!(fs.stat(p("pipe")).unwrap().kind, Kind::Other);
}

/// What may be done, on a handful of names.
#[derive(Clone, Debug)]
enum Op {
    Write(usize, u8, u16),
    Cut(usize, u16),
    New(usize),
    Mkdir(usize),
    Rmdir(usize),
    Unlink(usize),
    Rename(usize, usize),
    Link(usize, usize),
}

const NAMES: [&str; 7] = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a"];

fn op() -> impl Strategy<Value = Op> {
    let n = || 0..NAMES.len();
    prop_oneof![
        (n(), any::<u8>(), 0u16..5000).prop_map(|(a, b, c)| Op::Write(a, b, c)),
        (n(), 0u16..5000).prop_map(|(a, b)| Op::Cut(a, b)),
        n().prop_map(Op::New),
        n().prop_map(Op::Mkdir),
        n().prop_map(Op::Rmdir),
        n().prop_map(Op::Unlink),
        (n(), n()).prop_map(|(a, b)| Op::Rename(a, b)),
        (n(), n()).prop_map(|(a, b)| Op::Link(a, b)),
    ]
}

/// Does it and tells what came of it. Which of several errors is reported is the system's affair.
fn apply(fs: &dyn Fs, op: &Op) -> bool {
    let dir = |i: usize| fs.stat(p(NAMES[i])).is_ok_and(|s| s.kind == Kind::Dir);
    let done = match *op {
        Op::Write(n, byte, at) => fs
            .open(p(NAMES[n]), How::Create(0o600))
            .and_then(|f| write_all(&*f, &[byte; 700], at.into())),
        Op::Cut(n, len) => fs.open(p(NAMES[n]), How::Write).and_then(|f| f.set_len(len.into())),
        Op::New(n) => fs.open(p(NAMES[n]), How::CreateNew(0o600)).map(|_| ()),
        Op::Mkdir(n) => fs.mkdir(p(NAMES[n]), 0o700),
        Op::Rmdir(n) => fs.rmdir(p(NAMES[n])),
        Op::Unlink(n) => fs.unlink(p(NAMES[n])),
        // Directories are never renamed or linked here.
        Op::Rename(a, _) | Op::Link(a, _) if dir(a) => return false,
        Op::Rename(a, b) => fs.rename(p(NAMES[a]), p(NAMES[b])),
        Op::Link(a, b) => fs.link(p(NAMES[a]), p(NAMES[b])),
    };
    done.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn the_faulty_one_is_faithful(ops in proptest::collection::vec(op(), 1..60)) {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (posix, faulty) = (PosixFs::open(dir.path(), false).unwrap(), FaultyFs::new());
        for (i, op) in ops.iter().enumerate() {
            prop_assert_eq!(apply(&posix, op), apply(&faulty, op), "step {}: {:?}", i, op);
            for name in NAMES {
                let (a, b) = (posix.stat(p(name)), faulty.stat(p(name)));
                prop_assert_eq!(a.is_ok(), b.is_ok(), "{} after step {}", name, i);
                if a.is_ok_and(|s| s.kind == Kind::File) {
                    prop_assert_eq!(read_small(&posix, p(name), 1 << 20), read_small(&faulty, p(name), 1 << 20));
                }
            }
        }
    }
}
