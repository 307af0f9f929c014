//! The store's device fails, is full or hangs: FM-T4, FM-T5, FM-T6, FM-F8, FM-S7.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::io::Errno;
use stanchion_format::peer::Cause;
use stanchion_io::cache::{STORE_TRIES_MAX, Share};
use stanchion_io::fs::testing::{Fault, FaultyFs};
use stanchion_io::fs::{self, Entry, Fs, Handle, How, Stat};

use crate::common::{CHUNK, bytes, go_on, key};
use crate::node::{Node, RANK, SLOT, data, ids};

#[test]
fn an_error_of_any_write_costs_no_byte() {
    // FM-T6, FM-F8: at each operation of storing a dataset in turn, for good or once.
    let faults = [
        Fault::Once(Errno::NOSPC),
        Fault::Once(Errno::IO),
        Fault::Stuck(Errno::NOSPC),
        Fault::Stuck(Errno::IO),
        Fault::Torn,
        Fault::Short,
    ];
    for fault in faults {
        let mut nth = 0;
        loop {
            let mut node = Node::new();
            let data = data(6);
            let decl = node.keep(key(1), "a", &data, None);
            node.cache.store_kept((key(1), SLOT, RANK));
            let before = node.disk.ops();
            node.disk.plan(nth, fault);
            for _ in 0..4 {
                node.cache.store_some(Share::All);
            }
            let met = node.disk.ops() > before + nth;
            let (told, freed) = (node.told.lock().unwrap().len(), node.freed());
            let stored = freed.len() == 3;
            if let (Fault::Stuck(_), true) = (fault, met) {
                assert!(!stored && told == 1, "{fault:?} at {nth}: {told} {freed:?}");
            }
            // Reading what is in memory needs no device.
            if !stored {
                let m = node.digest(key(1), &decl);
                assert!(freed.is_empty() && node.read(&m) == data, "{fault:?} at {nth}");
            }
            node.disk.heal();
            node.store_all();
            assert_eq!(node.freed(), ids(1..4), "{fault:?} at {nth}");
            let m = node.digest(key(1), &decl);
            node.assert_whole(&m, &data);
            if !met {
                break;
            }
            nth += 1;
        }
        assert!(nth > 3, "{fault:?}: the fault met only {nth} operations");
    }
}

#[test]
fn an_error_of_any_write_is_told_where_data_must_be_durable() {
    // FM-T4, FM-T6: whole and durable, or an error; and whole in memory then.
    for errno in [Errno::NOSPC, Errno::IO] {
        for stuck in [true, false] {
            let fault = if stuck { Fault::Stuck(errno) } else { Fault::Once(errno) };
            let (mut nth, mut errors) = (0, 0);
            loop {
                let mut node = Node::durable();
                let data = data(7);
                let decl = node.keep(key(1), "a", &data, None);
                node.cache.store_kept((key(1), SLOT, RANK));
                let before = node.disk.ops();
                node.disk.plan(nth, fault);
                for _ in 0..STORE_TRIES_MAX {
                    node.cache.store_some(Share::All);
                }
                let decls = std::slice::from_ref(&decl);
                let durable = node.cache.make_durable(key(1), SLOT, decls, &go_on);
                let met = node.disk.ops() > before + nth;
                if let Err(trouble) = durable {
                    let full = trouble.cause == Cause::NoSpace;
                    assert_eq!(full, errno == Errno::NOSPC, "{trouble}");
                    errors += 1;
                }
                node.disk.heal();
                let m = node.digest(key(1), &decl);
                node.assert_whole(&m, &data);
                if !met {
                    break;
                }
                nth += 1;
            }
            // The last operation is the sync: it changes nothing, so that a device which is stuck lets it pass; once,
            // it is the only one that cannot be tried again.
            assert!(
                nth > 3 && errors == if stuck { nth - 1 } else { 1 },
                "{fault:?}: {errors}, {nth}"
            );
        }
    }
}

#[test]
fn tries_are_bounded_and_pauses_grow() {
    // FM-T6
    let mut node = Node::new();
    let data = data(8);
    let decl = node.keep(key(1), "a", &data, None);
    node.cache.store_kept((key(1), SLOT, RANK));
    assert!(node.cache.store_wait(Share::All, Duration::ZERO));
    node.disk.plan(0, Fault::Stuck(Errno::IO));
    node.cache.store_some(Share::All);
    // The pause is on.
    assert!(!node.cache.store_wait(Share::All, Duration::from_millis(1)));
    for _ in 0..STORE_TRIES_MAX {
        node.cache.store_some(Share::All);
    }
    node.disk.heal();
    assert!(!node.cache.store_wait(Share::All, Duration::from_millis(1)));
    assert_eq!(node.told.lock().unwrap().len(), 1);
    let m = node.digest(key(1), &decl);
    node.assert_whole(&m, &data);
    node.cache.evict(&[key(1)]);
    assert_eq!(node.freed(), ids(1..4));
}

#[test]
fn space_that_comes_back_ends_the_pause() {
    // FM-T6
    let mut node = Node::new();
    node.keep(key(1), "a", &data(9), None);
    node.store_all();
    let used = node.store.usage().bytes;
    node.disk.capacity(Some(used));
    let long = bytes(10, used as usize);
    let decl = node.keep(key(2), "a", &long, None);
    node.cache.store_kept((key(1), SLOT, RANK));
    while node.told.lock().unwrap().is_empty() {
        node.cache.store_some(Share::All);
    }
    // However long it was full: a job may be days in that state.
    for _ in 0..STORE_TRIES_MAX {
        node.cache.store_some(Share::All);
    }
    assert!(!node.cache.store_wait(Share::All, Duration::ZERO));
    node.disk.capacity(None);
    node.cache.evict(&[key(1)]);
    assert!(node.cache.store_wait(Share::All, Duration::ZERO));
    node.store_all();
    assert_eq!(node.freed().len() as u64, node.next - 1);
    let m = node.digest(key(2), &decl);
    node.assert_whole(&m, &long);
}

/// A file system whose writes wait as long as its gate is shut.
#[derive(Clone, Debug)]
struct Gated(FaultyFs, Arc<Gate>);

#[derive(Debug, Default)]
struct Gate {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        while state.0 {
            state = self.changed.wait(state).unwrap();
        }
        state.1 -= 1;
    }

    fn shut(&self, shut: bool) {
        self.state.lock().unwrap().0 = shut;
        self.changed.notify_all();
    }

    fn until_somebody_waits(&self) {
        let mut state = self.state.lock().unwrap();
        while state.1 == 0 {
            state = self.changed.wait(state).unwrap();
        }
    }
}

struct GatedFile(Box<dyn Handle>, Arc<Gate>);

impl Handle for GatedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> fs::Result<usize> {
        self.0.read_at(buf, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> fs::Result<usize> {
        self.1.pass();
        self.0.write_at(bytes, offset)
    }
    fn set_len(&self, bytes: u64) -> fs::Result<()> {
        self.0.set_len(bytes)
    }
    fn set_mode(&self, mode: u32) -> fs::Result<()> {
        self.0.set_mode(mode)
    }
    fn sync(&self) -> fs::Result<()> {
        self.0.sync()
    }
    fn stat(&self) -> fs::Result<Stat> {
        self.0.stat()
    }
}

impl Fs for Gated {
    fn open(&self, path: &Path, how: How) -> fs::Result<Box<dyn Handle>> {
        Ok(Box::new(GatedFile(self.0.open(path, how)?, self.1.clone())))
    }
    fn stat(&self, path: &Path) -> fs::Result<Stat> {
        self.0.stat(path)
    }
    fn list(&self, path: &Path) -> fs::Result<Vec<Entry>> {
        self.0.list(path)
    }
    fn mkdir(&self, path: &Path, mode: u32) -> fs::Result<()> {
        self.0.mkdir(path, mode)
    }
    fn rmdir(&self, path: &Path) -> fs::Result<()> {
        self.0.rmdir(path)
    }
    fn unlink(&self, path: &Path) -> fs::Result<()> {
        self.0.unlink(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> fs::Result<()> {
        self.0.rename(from, to)
    }
    fn link(&self, from: &Path, to: &Path) -> fs::Result<()> {
        self.0.link(from, to)
    }
    fn chmod(&self, path: &Path, mode: u32) -> fs::Result<()> {
        self.0.chmod(path, mode)
    }
    fn sync_dir(&self, path: &Path) -> fs::Result<()> {
        self.0.sync_dir(path)
    }
    fn free(&self) -> fs::Result<Option<u64>> {
        self.0.free()
    }
}

#[test]
fn a_device_that_hangs_holds_up_only_who_writes_to_it() {
    // FM-T6: as long as it hangs, datasets come, are read, repaired and go; then all is as it should be.
    let gate: Arc<Gate> = Arc::default();
    let mut node = Node::on(|disk| Arc::new(Gated(disk, gate.clone())));
    let (first, second) = (data(12), data(13));
    let decl = node.keep(key(1), "a", &first, None);
    node.cache.store_kept((key(1), SLOT, RANK));
    gate.shut(true);
    let cache = node.cache.clone();
    let writer = std::thread::spawn(move || while cache.store_some(Share::All) {});
    gate.until_somebody_waits();
    let m = node.digest(key(1), &decl);
    node.assert_whole(&m, &first);
    let at = m.chunk(1).unwrap();
    let right = &first[at.offset as usize..][..at.len as usize];
    node.cache.write_chunk(&m, 1, right).unwrap();
    let other = node.keep(key(2), "a", &second, None);
    node.cache.store_kept((key(1), SLOT, RANK));
    let m2 = node.digest(key(2), &other);
    node.assert_whole(&m2, &second);
    node.cache.evict(&[key(2)]);
    // Only what is on its way is not back.
    assert!(node.freed().is_superset(&ids(4..7)), "{:?}", node.freed());
    gate.shut(false);
    writer.join().unwrap();
    node.store_all();
    assert_eq!(node.freed(), ids(1..7));
    node.assert_whole(&m, &first);
}

#[test]
fn what_is_repaired_on_its_way_is_stored_as_repaired() {
    // FM-T5, FM-S7
    let gate: Arc<Gate> = Arc::default();
    let mut node = Node::on(|disk| Arc::new(Gated(disk, gate.clone())));
    let right = data(14);
    let decl = node.keep(key(1), "a", &right, None);
    let m = node.digest(key(1), &decl);
    // The same file, but damaged in memory when it is taken on its way.
    let mut node = Node::on(|disk| Arc::new(Gated(disk, gate.clone())));
    let mut wrong = right.clone();
    wrong[CHUNK as usize + 3] ^= 4;
    node.keep(key(1), "a", &wrong, None);
    node.cache.store_kept((key(1), SLOT, RANK));
    gate.shut(true);
    let cache = node.cache.clone();
    let writer = std::thread::spawn(move || while cache.store_some(Share::All) {});
    gate.until_somebody_waits();
    assert_eq!(node.cache.verify(&m, &go_on).unwrap(), (vec![1], vec!["a".to_owned()]));
    node.cache.write_chunk(&m, 1, &right[CHUNK as usize..2 * CHUNK as usize]).unwrap();
    node.assert_whole(&m, &right);
    gate.shut(false);
    writer.join().unwrap();
    node.store_all();
    assert_eq!(node.freed(), ids(1..4));
    node.assert_whole(&m, &right);
    assert_eq!(node.digest(key(1), &decl), m);
}
