//! A node's cache with a store, of which the tests know everything.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use stanchion_format::changed::Changed;
use stanchion_format::client::{Base, MemoryFile, Part, PartFrom};
use stanchion_format::ids::{ExtentId, Key, RankId, SlotId};
use stanchion_format::manifest::{FileDecl, Manifest};
use stanchion_format::peer::Trouble;
use stanchion_io::cache::memory::Memory;
use stanchion_io::cache::{Cache, Share};
use stanchion_io::fs::Fs;
use stanchion_io::fs::testing::FaultyFs;
use stanchion_io::store::{Store, StoreConfig, WriterKind};

use crate::common::{CHUNK, bytes, go_on, key};

pub const SLOT: SlotId = SlotId(0);
pub const RANK: RankId = RankId(0);
pub const EXTENT: u64 = 4 * CHUNK as u64;

#[derive(Debug)]
pub struct Plain(pub Mutex<Vec<u8>>);

impl Memory for Plain {
    fn bytes(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        buf.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..buf.len()]);
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.0.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

/// A file, and what another one has of it: offsets and lengths.
pub type Over<'a> = ((Key, &'a str), Changed);

/// A cache with a store, and what happened to its memory.
pub struct Node {
    pub cache: Arc<Cache>,
    pub disk: FaultyFs,
    pub store: Arc<Store>,
    pub freed: Arc<Mutex<Vec<ExtentId>>>,
    pub told: Arc<Mutex<Vec<Trouble>>>,
    pub next: u64,
    /// All memory that ranks were lent, by number; the first one is 1.
    pub lent: Vec<Arc<Plain>>,
}

impl Node {
    pub fn new() -> Node {
        Node::on(|disk| Arc::new(disk))
    }

    /// Whose cache is memory alone.
    pub fn without_store() -> Node {
        Node::made(|disk| Arc::new(disk), false, false)
    }

    /// Whose store syncs all that it promises.
    pub fn durable() -> Node {
        Node::made(|disk| Arc::new(disk), true, true)
    }

    pub fn on(wrap: impl FnOnce(FaultyFs) -> Arc<dyn Fs>) -> Node {
        Node::made(wrap, true, false)
    }

    fn made(wrap: impl FnOnce(FaultyFs) -> Arc<dyn Fs>, stores: bool, durable: bool) -> Node {
        let disk = FaultyFs::new();
        let mut cache = Cache::on(Arc::new(FaultyFs::new()), Path::new("node"), 1 << 30).unwrap();
        let freed: Arc<Mutex<Vec<ExtentId>>> = Arc::default();
        let to = freed.clone();
        cache.on_freed(Box::new(move |id| to.lock().unwrap().push(id)));
        let config = StoreConfig {
            segment_bytes: 128 << 10,
            writer: WriterKind::Blocking,
            durable,
            ..StoreConfig::default()
        };
        let store = Store::on(wrap(disk.clone()), Path::new("store"), config).unwrap();
        let store = Arc::new(store);
        let told: Arc<Mutex<Vec<Trouble>>> = Arc::default();
        let to = told.clone();
        let tell = Box::new(move |t: &Trouble| to.lock().unwrap().push(t.clone()));
        if stores {
            cache.use_store(store.clone(), CHUNK.into(), tell);
        }
        Node { cache: Arc::new(cache), disk, store, freed, told, next: 1, lent: Vec::new() }
    }

    /// A rank completes a file of `data` in extents of its own; `base`: in how far it is another one's, and `data` only
    /// the rest.
    pub fn keep(&mut self, key: Key, path: &str, data: &[u8], base: Option<Over<'_>>) -> FileDecl {
        let mut parts = Vec::new();
        let mut made = Vec::new();
        let mut size = data.len() as u64;
        let skip = 64 * (self.next % 3);
        for piece in data.chunks((EXTENT - skip) as usize) {
            let id = ExtentId(self.next);
            self.next += 1;
            let mut memory = vec![0xee; EXTENT as usize];
            memory[skip as usize..][..piece.len()].copy_from_slice(piece);
            self.lent.push(Arc::new(Plain(Mutex::new(memory))));
            made.push((id, self.lent.last().unwrap().clone() as Arc<dyn Memory>));
            parts.push(Part {
                from: PartFrom::Extent { id, offset: skip },
                bytes: piece.len() as u64,
            });
        }
        let base = base.map(|((key, path), changed)| {
            size = changed.bytes();
            Base { key, path: path.to_owned(), changed }
        });
        let file = MemoryFile { path: path.into(), base, parts };
        let extent = |id| made.iter().find(|(i, _)| *i == id).map(|(_, m)| m.clone());
        self.cache.keep((key, SLOT, RANK), &file, size, extent).unwrap();
        FileDecl { rank: RANK, path: path.into(), bytes: size }
    }

    /// A stray write of the rank, to the place in its memory where `bytes` lie.
    pub fn spoil(&self, bytes: &[u8]) {
        let mut found = 0;
        for memory in &self.lent {
            let mut memory = memory.0.lock().unwrap();
            for at in 0..memory.len() - bytes.len() + 1 {
                if &memory[at..at + bytes.len()] == bytes {
                    memory[at] ^= 1;
                    found += 1;
                }
            }
        }
        assert_eq!(found, 1, "bytes that are there once are wanted");
    }

    pub fn store_all(&self) {
        self.cache.store_kept((key(1), SLOT, RANK));
        while self.cache.store_some(Share::All) {}
        // As if it were protected: nobody reads it soon.
        (1..100).for_each(|no| self.cache.settled(key(no)));
    }

    pub fn digest(&self, key: Key, decl: &FileDecl) -> Manifest {
        self.cache.stat(key, SLOT, std::slice::from_ref(decl)).unwrap();
        self.try_digest(key, decl).unwrap()
    }

    pub fn try_digest(&self, key: Key, decl: &FileDecl) -> Result<Manifest, Trouble> {
        self.cache.digest(key, SLOT, CHUNK, std::slice::from_ref(decl), &go_on)
    }

    /// The file as it is read, chunk by chunk.
    pub fn read(&self, m: &Manifest) -> Vec<u8> {
        let mut all = Vec::new();
        let mut buf = Vec::new();
        for chunk in 0..m.chunk_count() {
            let crc = self.cache.read_chunk(m, chunk, &mut buf).unwrap();
            assert_eq!(crc, m.chunk(chunk).unwrap().crc, "chunk {chunk}");
            all.extend_from_slice(&buf);
        }
        all
    }

    pub fn freed(&self) -> BTreeSet<ExtentId> {
        let freed = self.freed.lock().unwrap();
        let set: BTreeSet<ExtentId> = freed.iter().copied().collect();
        assert_eq!(set.len(), freed.len(), "an extent came back twice: {freed:?}");
        set
    }

    pub fn assert_whole(&self, m: &Manifest, data: &[u8]) {
        assert_eq!(self.cache.verify(m, &go_on), Ok((vec![], vec![])));
        assert!(self.read(m) == data, "{} differs", m.files[0].path);
    }
}

pub fn ids(range: std::ops::Range<u64>) -> BTreeSet<ExtentId> {
    range.map(ExtentId).collect()
}

/// A file of some extents, the last one not full.
pub fn data(seed: u64) -> Vec<u8> {
    bytes(seed, 2 * EXTENT as usize + CHUNK as usize + 17)
}

/// An extent's memory.
pub fn memory(bytes: &[u8]) -> Option<Arc<dyn Memory>> {
    Some(Arc::new(Plain(Mutex::new(bytes.to_vec()))))
}
