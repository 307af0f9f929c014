//! One suite for every way in which a store writes: io_uring and blocking, past and through the page cache, on
//! the system's files and on those that tests use to fail.

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use common::{bytes, key};
use stanchion_format::checksum::crc64;
use stanchion_format::ids::{RankId, SlotId};
use stanchion_format::peer::{Cause, Trouble};
use stanchion_io::fs::testing::FaultyFs;
use stanchion_io::fs::{Fs, PosixFs};
use stanchion_io::store::{Piece, Place, Source, Store, StoreConfig, Tag, WriterKind};

const SEGMENT: u64 = 8 << 20;

fn tag(no: u64, offset: u64) -> Tag {
    Tag { key: key(no), slot: SlotId(3), rank: RankId(17), file: 2, offset }
}

/// Bytes that begin at a multiple of 4096 plus `off`.
struct Buf {
    all: Vec<u8>,
    from: usize,
    len: usize,
}

impl Buf {
    fn new(len: usize, off: usize) -> Buf {
        let all = vec![0; len + off + 4096];
        let from = all.as_ptr().addr().wrapping_neg() % 4096 + off;
        Buf { all, from, len }
    }

    fn of(contents: &[u8], off: usize) -> Buf {
        let mut buf = Buf::new(contents.len(), off);
        buf.bytes().copy_from_slice(contents);
        buf
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.all[self.from..self.from + self.len]
    }

    fn source(&self) -> Source<'_> {
        Source::from(&self.all[self.from..self.from + self.len])
    }
}

fn piece<'a>(tag: Tag, from: &'a [u8]) -> Piece<'a> {
    Piece { tag, from: Source::from(from), crc: None }
}

fn read(store: &Store, place: &Place, off: usize) -> Result<Vec<u8>, Trouble> {
    let mut buf = Buf::new(place.len as usize, off);
    store.read(place, buf.bytes())?;
    Ok(buf.bytes().to_vec())
}

/// A way to write, and a place for it. Each `open` is another process in the same directory.
struct Way<'a> {
    name: &'a str,
    config: StoreConfig,
    open: &'a (dyn Fn(StoreConfig) -> Result<Store, Trouble> + Sync),
}

impl Way<'_> {
    fn open(&self, change: impl FnOnce(&mut StoreConfig)) -> Store {
        let mut config = self.config.clone();
        change(&mut config);
        (self.open)(config).unwrap_or_else(|t| panic!("{}: {t}", self.name))
    }

    fn plain(&self) -> Store {
        self.open(|_| {})
    }

    fn kept(&self) -> Store {
        self.open(|c| c.keep = true)
    }
}

fn what_goes_in_comes_out(way: &Way<'_>) {
    let store = way.plain();
    let lens = [1, 18, 4095, 4096, 4097, 8192, 100_000, 1 << 20, (1 << 20) + 1, (3 << 20) + 5];
    for off in [0, 1, 8, 512, 4095] {
        for len in lens {
            let data = bytes(len as u64 * 7 + off as u64, len);
            let buf = Buf::of(&data, off);
            let said = (len % 2 == 0).then(|| crc64(&data));
            let piece = Piece { tag: tag(1, len as u64), from: buf.source(), crc: said };
            let places = store.append(&[piece]).unwrap();
            assert_eq!((places.len(), places[0].crc), (1, crc64(&data)));
            assert_eq!(places[0].offset % 4096, 0);
            for off in [0, 1, 512] {
                let back = read(&store, &places[0], off).unwrap();
                assert!(back == data, "{}: {len} bytes at {off}", way.name);
            }
        }
    }
    store.sync().unwrap();
    assert!(store.append(&[]).unwrap().is_empty());
}

fn many_pieces_in_one_call(way: &Way<'_>) {
    let store = way.plain();
    let all: Vec<Buf> =
        (0..300).map(|i| Buf::of(&bytes(i, 200 * i as usize + 1), i as usize % 3 * 4)).collect();
    let pieces: Vec<Piece<'_>> = all
        .iter()
        .enumerate()
        .map(|(i, b)| Piece { tag: tag(1, i as u64), from: b.source(), crc: None })
        .collect();
    let places = store.append(&pieces).unwrap();
    assert!(places.iter().any(|p| p.segment != places[0].segment), "more than one segment");
    for (i, place) in places.iter().enumerate() {
        assert!(read(&store, place, 0).unwrap() == bytes(i as u64, 200 * i + 1), "{i}");
    }
    let listed: Vec<Place> = store.list().into_iter().map(|(_, place)| place).collect();
    assert_eq!(listed, places);
}

fn several_threads(way: &Way<'_>) {
    let store = way.plain();
    let work = |thread: u64| {
        for i in 0..40 {
            let data = bytes(thread << 32 | i, 60_000 + 3000 * i as usize);
            let buf = Buf::of(&data, (i % 4) as usize * 512);
            let tag = Tag { rank: RankId(thread as u32), ..tag(1, i) };
            let from = buf.source();
            let places = store.append(&[Piece { tag, from, crc: None }]).unwrap();
            if i % 8 == 0 {
                store.sync().unwrap();
            }
            assert!(read(&store, &places[0], 0).unwrap() == data, "{}: {tag:?}", way.name);
        }
    };
    std::thread::scope(|s| {
        for thread in 0..4 {
            s.spawn(move || work(thread));
        }
    });
    let check = |store: &Store| {
        let all = store.list();
        assert_eq!(all.len(), 160);
        for (tag, place) in all {
            let want = bytes(u64::from(tag.rank.0) << 32 | tag.offset, place.len as usize);
            assert!(read(store, &place, 0).unwrap() == want, "{}: {tag:?}", way.name);
        }
    };
    check(&store);
    assert!(store.usage().segments > 2);
    store.sync().unwrap();
    drop(store);
    check(&way.kept());
}

fn segments_are_used_again(way: &Way<'_>) {
    let store = way.open(|c| c.bytes_max = 3 * SEGMENT);
    let data = bytes(1, 1 << 20);
    let dataset = |no: u64| {
        let pieces: Vec<_> = (0..7).map(|i| piece(tag(no, i), &data)).collect();
        store.append(&pieces)
    };
    let first = dataset(1).unwrap();
    for no in 2..30 {
        dataset(no).unwrap();
        store.sync().unwrap();
        store.free(key(no - 1));
        assert!(store.usage().bytes <= 3 * SEGMENT);
    }
    let gone = read(&store, &first[0], 0).unwrap_err();
    assert_eq!((gone.cause, gone.file), (Cause::Missing, Some("seg.000000".into())));
    dataset(30).unwrap();
    dataset(31).unwrap();
    let full = dataset(32).unwrap_err();
    assert_eq!(
        (full.cause, full.slot, full.rank),
        (Cause::NoSpace, Some(SlotId(3)), Some(RankId(17)))
    );
    let there: Vec<_> = store.list().iter().map(|(t, _)| t.key.no.0).collect();
    assert!(!there.contains(&32), "nothing of what failed");
    (29..32).for_each(|no| store.free(key(no)));
    dataset(33).unwrap();
    assert!(store.list().iter().all(|(t, _)| t.key == key(33)));
    // A dataset that was forgotten in the open segment makes room as well.
    for no in 34..40 {
        store.free(key(no - 1));
        dataset(no).unwrap();
    }
    assert_eq!(store.usage().dead, 0);
}

fn another_process_finds_it(way: &Way<'_>) {
    let data = bytes(9, 100_000);
    let mut places = BTreeMap::new();
    {
        let store = way.plain();
        for i in 0..200 {
            places.insert(
                tag(1, i),
                store.append(&[piece(tag(1, i), &data[i as usize..])]).unwrap()[0],
            );
        }
        store.sync().unwrap();
    }
    let check = |store: &Store| {
        assert_eq!(store.list().into_iter().collect::<BTreeMap<_, _>>(), places);
        for (tag, place) in &places {
            assert!(read(store, place, 0).unwrap() == data[tag.offset as usize..]);
        }
    };
    let store = way.kept();
    let recovered = store.recovered().clone();
    assert_eq!((recovered.sealed, recovered.torn.len()), (2, 1), "{}: {recovered:?}", way.name);
    assert_eq!((recovered.torn[0].lost, recovered.unreadable.len()), (0, 0));
    check(&store);
    // What was cut has its index now; a chunk stored again counts once.
    let again = store.append(&[piece(tag(1, 5), &data[5..])]).unwrap()[0];
    store.seal().unwrap();
    places.insert(tag(1, 5), again);
    drop(store);
    let store = way.kept();
    assert_eq!((store.recovered().sealed, &*store.recovered().torn), (4, &[][..]));
    let listed: BTreeMap<_, _> = store.list().into_iter().collect();
    assert_eq!(listed, places);
    // Not kept: the files stay, nothing in them counts.
    drop(store);
    let store = way.plain();
    let usage = store.usage();
    assert_eq!((store.list().len(), usage.segments, usage.free), (0, 4, 4));
    drop(store);
    assert_eq!(way.kept().list(), []);
}

fn what_cannot_be(way: &Way<'_>) {
    let store = way.open(|c| c.segment_bytes = 64 << 10);
    let data = vec![1; 64 << 10];
    let try_one = |len: usize| store.append(&[piece(tag(1, 0), &data[..len])]).map(|p| p.len());
    assert_eq!(try_one(48 << 10), Ok(1));
    let none = Cause::Size { want: 48 << 10, have: 0 };
    assert_eq!(try_one(0).unwrap_err().cause, none);
    let long = Cause::Size { want: 48 << 10, have: (48 << 10) + 1 };
    assert_eq!(try_one((48 << 10) + 1).unwrap_err().cause, long);
    let place = store.list()[0].1;
    let mut short = vec![0; 10];
    assert!(matches!(store.read(&place, &mut short).unwrap_err().cause, Cause::Size { .. }));
    for wrong in [
        Place { segment: 7, ..place },
        Place { life: place.life + 1, ..place },
        Place { offset: place.offset + 4096, ..place },
        Place { crc: crc64(b"x"), ..place },
    ] {
        assert_eq!(read(&store, &wrong, 0).unwrap_err().cause, Cause::Missing);
    }
    drop(store);
    for bad in [
        StoreConfig { segment_bytes: 4096, ..way.config.clone() },
        StoreConfig { segment_bytes: (1 << 20) + 1, ..way.config.clone() },
        StoreConfig { segment_bytes: 1 << 50, ..way.config.clone() },
        StoreConfig { depth: 0, ..way.config.clone() },
        StoreConfig { depth: 1 << 20, ..way.config.clone() },
    ] {
        assert_eq!((way.open)(bad).unwrap_err().cause, Cause::Setting);
    }
}

fn shared_memory(way: &Way<'_>) {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    let store = way.plain();
    let len = 300_000;
    let data = bytes(4, len);
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let at = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
        )
    }
    .unwrap();
    let at = NonNull::new(at.cast::<u8>()).unwrap();
    // SAFETY: the mapping has `len` bytes, and nobody else knows of it.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at.as_ptr(), len) };
    // SAFETY: mapped until below, and not written to before.
    let from = unsafe { Source::raw(at, len) };
    assert_eq!((from.len(), from.is_empty()), (len, false));
    let places = store.append(&[Piece { tag: tag(1, 0), from, crc: None }]).unwrap();
    // SAFETY: mapped above with this length; the source is not used any more.
    unsafe { munmap(at.as_ptr().cast(), len) }.unwrap();
    assert!(read(&store, &places[0], 0).unwrap() == data);
}

/// A name and what it runs.
type Case = (&'static str, fn(&Way<'_>));

const SUITE: [Case; 7] = [
    ("what goes in comes out", what_goes_in_comes_out),
    ("many pieces in one call", many_pieces_in_one_call),
    ("several threads", several_threads),
    ("segments are used again", segments_are_used_again),
    ("another process finds it", another_process_finds_it),
    ("what cannot be", what_cannot_be),
    ("shared memory", shared_memory),
];

fn run_in(parent: &Path, writer: WriterKind, direct: bool) {
    for (name, test) in SUITE {
        let dir = tempfile::tempdir_in(parent).unwrap();
        let root = dir.path().join("store");
        let open = |config| Store::open(&root, config);
        let config =
            StoreConfig { segment_bytes: SEGMENT, writer, direct, ..StoreConfig::default() };
        test(&Way { name, config, open: &open });
        let store = Store::open(
            &root,
            StoreConfig { segment_bytes: SEGMENT, writer, direct, ..StoreConfig::default() },
        )
        .unwrap();
        println!("{name}: {}", store.facts());
        assert!(direct || !store.facts().direct);
        store.remove_all();
        assert!(!root.exists());
    }
}

fn run_faulty(direct: bool) {
    for (name, test) in SUITE {
        println!("{name}");
        let fs = FaultyFs::new();
        fs.direct(direct);
        let open = |config| Store::on(Arc::new(fs.clone()), Path::new("store"), config);
        let config = StoreConfig { segment_bytes: SEGMENT, ..StoreConfig::default() };
        test(&Way { name, config: config.clone(), open: &open });
        let facts = open(config).unwrap().facts();
        assert_eq!((facts.direct, facts.writer), (direct, "blocking"));
        assert_eq!(facts.direct_why.is_none(), direct);
    }
}

#[test]
fn uring_direct() {
    run_in(&std::env::temp_dir(), WriterKind::Uring, true);
}

#[test]
fn uring_buffered() {
    run_in(&std::env::temp_dir(), WriterKind::Uring, false);
}

#[test]
fn blocking_direct() {
    run_in(&std::env::temp_dir(), WriterKind::Blocking, true);
}

#[test]
fn blocking_buffered() {
    run_in(&std::env::temp_dir(), WriterKind::Blocking, false);
}

#[test]
fn in_memory() {
    run_in(Path::new("/dev/shm"), WriterKind::Auto, true);
}

#[test]
fn faulty_direct() {
    run_faulty(true);
}

#[test]
fn faulty_without_direct() {
    run_faulty(false);
}

#[test]
fn damage_is_found() {
    // FM-F9: a flipped byte, a truncated and a missing file.
    let fs = FaultyFs::new();
    let open = |keep| {
        let config = StoreConfig { segment_bytes: 1 << 20, keep, ..StoreConfig::default() };
        Store::on(Arc::new(fs.clone()), Path::new("store"), config).unwrap()
    };
    let store = open(false);
    let data = bytes(1, 50_000);
    let pieces: Vec<_> = (0..10).map(|i| piece(tag(1, i), &data)).collect();
    let places = store.append(&pieces).unwrap();
    let flip = |at: u64| fs.tamper("seg.000000", |all| all[at as usize] ^= 1);
    flip(places[3].offset + 7);
    assert_eq!(read(&store, &places[3], 0).unwrap_err().cause, Cause::Damaged);
    assert_eq!(read(&store, &places[4], 0), Ok(data.clone()));
    // Not sealed: the damaged one is not found again.
    drop(store);
    let store = open(true);
    assert_eq!((store.recovered().torn[0].good, store.recovered().torn[0].lost), (9, 1));
    assert_eq!(store.list().len(), 9);
    drop(store);
    // Sealed by now: believed until it is read; with its index damaged as well, looked at again.
    flip(places[5].offset);
    let store = open(true);
    assert_eq!((store.recovered().sealed, store.list().len()), (1, 9));
    assert_eq!(read(&store, &places[5], 0).unwrap_err().cause, Cause::Damaged);
    drop(store);
    flip((1 << 20) - 4096 + 9);
    assert_eq!(open(true).list().len(), 8);
    fs.tamper("seg.000000", |all| all.truncate(places[8].offset as usize + 100));
    let store = open(true);
    let left: Vec<_> = store.list().iter().map(|(t, _)| t.offset).collect();
    assert_eq!(left, [0, 1, 2, 4, 6, 7]);
    fs.unlink(Path::new("seg.000000")).unwrap();
    let trouble = read(&store, &places[0], 0).unwrap_err();
    assert_eq!((trouble.cause, trouble.file), (Cause::Missing, Some("seg.000000".into())));
}

#[test]
fn the_directory_is_ours_alone() {
    // FM-C4
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let config = StoreConfig { segment_bytes: 1 << 20, ..StoreConfig::default() };
    let store = Store::open(&root, config.clone()).unwrap();
    let busy = Store::open(&root, config.clone()).unwrap_err();
    assert_eq!(busy.cause, Cause::Os(rustix::io::Errno::BUSY.raw_os_error()));
    drop(store);
    std::fs::write(root.join("rubbish"), "x").unwrap();
    std::fs::write(root.join("seg.1"), "x").unwrap();
    std::fs::write(root.join("seg.000001"), "x").unwrap();
    let store = Store::open(&root, config).unwrap();
    assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0);
    let data = [1; 5000];
    store.append(&[piece(tag(1, 0), &data)]).unwrap();
    let fs = PosixFs::open(&root, false).unwrap();
    let stat = fs.stat(Path::new("seg.000000")).unwrap();
    assert_eq!((stat.mode, stat.bytes), (0o600, 1 << 20));
    assert_eq!(fs.stat(Path::new("")).unwrap().mode, 0o700);
}
