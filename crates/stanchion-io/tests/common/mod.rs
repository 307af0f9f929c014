//! Small datasets on small nodes.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::Path;
use std::sync::Arc;

use stanchion_format::checksum::Crc;
use stanchion_format::ids::{Ancestry, DatasetNo, Epoch, Incarnation, JobId, Key, RankId, SlotId};
use stanchion_format::index::{INDEX_VERSION, IndexRecord, Layout};
use stanchion_format::layout::{Scheme, Sets};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::{DatasetInfo, RankRange, Times, Trouble};
use stanchion_io::cache::Cache;
use stanchion_io::fs::testing::FaultyFs;
use stanchion_io::fs::{self, Fs, How};
use stanchion_io::prefix::Prefix;

pub const CHUNK: u32 = 4096;
pub const SLOTS: u32 = 2;
pub const RANKS: u32 = 4;

pub fn go_on() -> bool {
    false
}

pub fn key(no: u64) -> Key {
    Key { no: DatasetNo(no), inc: Incarnation { epoch: Epoch(1), count: 0 } }
}

/// Bytes that differ for every seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// A rank's file.
#[derive(Clone, Debug)]
pub struct Rank {
    pub rank: u32,
    pub path: String,
    pub data: Vec<u8>,
}

/// Two files a rank, one of them in a directory; sizes around the chunk's.
pub fn files(no: u64, name: impl Fn(u32) -> String) -> Vec<Rank> {
    let sizes = [0, 1, CHUNK as usize, 2 * CHUNK as usize + 17];
    let mut out = Vec::new();
    for rank in 0..RANKS {
        let size = sizes[rank as usize % sizes.len()];
        out.push(Rank {
            rank,
            path: name(rank),
            data: bytes(no * 100 + u64::from(rank), size + 3000),
        });
        out.push(Rank {
            rank,
            path: format!("extra/{no}/r{rank}.log"),
            data: bytes(no * 1000 + u64::from(rank), size),
        });
    }
    out
}

pub fn slot_of(rank: u32) -> SlotId {
    SlotId(rank * SLOTS / RANKS)
}

pub fn put(fs: &dyn Fs, path: &Path, data: &[u8]) {
    fs::make_dirs(fs, path.parent().unwrap(), 0o700).unwrap();
    let file = fs.open(path, How::Create(0o640)).unwrap();
    file.set_len(0).unwrap();
    fs::write_all(&*file, data, 0).unwrap();
}

/// A node: its file system, its cache.
pub struct Node {
    pub fs: FaultyFs,
    pub cache: Cache,
}

impl Node {
    pub fn new(bytes_max: u64) -> Node {
        let fs = FaultyFs::new();
        let cache = Cache::on(Arc::new(fs.clone()), Path::new("node"), bytes_max).unwrap();
        Node { fs, cache }
    }

    /// The ranks of `slot` write their files and declare them.
    pub fn write(&self, key: Key, slot: SlotId, files: &[Rank]) -> Vec<FileDecl> {
        let mine: Vec<&Rank> = files.iter().filter(|f| slot_of(f.rank) == slot).collect();
        let ranks: Vec<RankId> = mine.iter().map(|f| RankId(f.rank)).collect();
        self.cache.make_dirs(key, slot, &ranks).unwrap();
        let mut decls = Vec::new();
        for f in mine {
            put(&self.fs, &self.place(key, slot, f.rank, &f.path), &f.data);
            decls.push(FileDecl {
                rank: RankId(f.rank),
                path: f.path.clone(),
                bytes: f.data.len() as u64,
            });
        }
        decls
    }

    pub fn place(&self, key: Key, slot: SlotId, rank: u32, path: &str) -> std::path::PathBuf {
        place(key, slot, rank, path)
    }

    pub fn manifest(&self, key: Key, slot: SlotId, files: &[Rank]) -> Manifest {
        let decls = self.write(key, slot, files);
        self.cache.stat(key, slot, &decls).unwrap();
        self.cache.digest(key, slot, CHUNK, &decls, &go_on).unwrap()
    }
}

pub fn place(key: Key, slot: SlotId, rank: u32, path: &str) -> std::path::PathBuf {
    let dir = stanchion_format::index::cache_rank_dir("", key, slot, RankId(rank));
    Path::new(&dir[1..]).join(path)
}

pub fn info(key: Key, manifests: &[Manifest]) -> DatasetInfo {
    let per = RANKS / SLOTS;
    DatasetInfo {
        key,
        name: format!("ckpt.{}", key.no),
        flags: 1,
        ranks: RANKS,
        sets: Sets::new(Scheme::Xor, SLOTS, 2),
        chunk_bytes: CHUNK,
        bytes: manifests.iter().map(Manifest::bytes).sum(),
        files: manifests.iter().map(|m| m.files.len() as u64).sum(),
        placement: (0..SLOTS)
            .map(|s| RankRange { first: RankId(s * per), count: per, slot: SlotId(s) })
            .collect(),
    }
}

pub fn record(epoch: Epoch, job: JobId, key: Key, manifests: &[Manifest]) -> IndexRecord {
    IndexRecord {
        version: INDEX_VERSION,
        job,
        epoch,
        inc: key.inc,
        ancestry: Ancestry::default(),
        info: info(key, manifests),
        unix_s: 1_700_000_000,
        slots: manifests.iter().map(|m| (m.slot, m.crc())).collect(),
        containers: None,
        times: Some(Times { copy_us: 7, ..Times::default() }),
        crc: Crc(0),
    }
    .seal()
}

/// A dataset in the caches of its nodes.
pub struct Dataset {
    pub key: Key,
    pub files: Vec<Rank>,
    pub nodes: Vec<Node>,
    pub manifests: Vec<Manifest>,
    pub layout: Layout,
}

impl Dataset {
    pub fn new(no: u64, name: impl Fn(u32) -> String) -> Dataset {
        Dataset::of(key(no), files(no, name))
    }

    pub fn of(key: Key, files: Vec<Rank>) -> Dataset {
        let nodes: Vec<Node> = (0..SLOTS).map(|_| Node::new(1 << 30)).collect();
        let manifests: Vec<Manifest> =
            (0..SLOTS).map(|s| nodes[s as usize].manifest(key, SlotId(s), &files)).collect();
        Dataset { key, files, nodes, manifests, layout: Layout::Files }
    }

    pub fn in_containers(self) -> Dataset {
        Dataset { layout: Layout::Containers, ..self }
    }

    /// Each rank's file of its own name.
    pub fn own(no: u64) -> Dataset {
        Dataset::new(no, |r| format!("ckpt.{no}/rank_{r}.dat"))
    }

    /// The same names as every other dataset of this kind.
    pub fn rotating(no: u64) -> Dataset {
        Dataset::new(no, |r| format!("rotating/rank_{r}.dat"))
    }

    pub fn record(&self, job: JobId, epoch: Epoch) -> IndexRecord {
        self.record_of(job, epoch, 1)
    }

    pub fn record_of(&self, job: JobId, epoch: Epoch, attempt: u32) -> IndexRecord {
        let containers = (self.layout == Layout::Containers).then_some(attempt);
        IndexRecord { containers, ..record(epoch, job, self.key, &self.manifests) }.seal()
    }

    pub fn prepare(&self, prefix: &Prefix, attempt: u32) -> Result<(), Trouble> {
        for (node, m) in self.nodes.iter().zip(&self.manifests) {
            prefix.flush_prepare(&node.cache, m, (self.layout, attempt), &go_on)?;
        }
        Ok(())
    }

    pub fn publish(&self, prefix: &Prefix, attempt: u32) -> Result<(), Trouble> {
        let how = (self.layout, attempt);
        self.manifests.iter().try_for_each(|m| prefix.flush_publish(m, how, &go_on))
    }

    pub fn flush(&self, prefix: &Prefix, epoch: Epoch, attempt: u32) -> Result<(), Trouble> {
        self.prepare(prefix, attempt)?;
        let record = self.record_of(prefix.job()?, epoch, attempt);
        self.publish(prefix, attempt)?;
        prefix.write_index(&record)
    }
}

pub fn prefix_on(fs: &FaultyFs) -> Prefix {
    Prefix::on(Arc::new(fs.clone()), Path::new("prefix")).unwrap()
}

/// Everything in the index must be what it vouches for.
pub fn assert_index_true(prefix: &Prefix, context: &str) -> Vec<u64> {
    let (records, bad) = prefix.read_index().unwrap();
    assert!(bad.is_empty(), "{context}: {bad:?}");
    for rec in &records {
        let wrong = prefix.verify(rec, &mut |_| {}).unwrap();
        assert!(wrong.is_empty(), "{context}: {} is vouched for: {wrong:?}", rec.info.key);
    }
    records.iter().map(|r| r.info.key.no.0).collect()
}

/// A real tmpfs of 64 KiB, where the user may mount one; gone with the value.
pub struct SmallDevice(pub tempfile::TempDir);

impl SmallDevice {
    pub fn new() -> Option<SmallDevice> {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let flags = rustix::mount::MountFlags::empty();
        match rustix::mount::mount("none", dir.path(), "tmpfs", flags, Some(c"size=64k")) {
            Ok(()) => Some(SmallDevice(dir)),
            Err(e) => {
                eprintln!("skipped: this user may not mount: {e}");
                None
            }
        }
    }
}

impl Drop for SmallDevice {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}
