//! The node's store: chunks of datasets in large files that are written from front to back.
//!
//! ```text
//! ROOT/seg.NNNNNN    a segment: header, groups of chunks, when full an index
//! ```
//!
//! Writing to a device is fastest in large aligned pieces past the page cache, several at once, into blocks
//! that the file has already. So chunks of whatever file follow one another in a segment; a segment whose chunks
//! are all forgotten keeps its file and is written anew, since removing a file may take longer than
//! writing it. Where the system has no direct I/O or no io_uring, the same goes through the page cache or by
//! blocking calls; [`Store::facts`] says so. The bytes are described in docs/format.md, "Segments".

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, retry_on_intr};
use stanchion_format::checksum::{Crc, crc64};
use stanchion_format::ids::Key;
use stanchion_format::peer::{Cause, Trouble};
use stanchion_format::segment::{BLOCK, Entry, Life, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, padded};

use crate::fs::{self, Fs, PosixFs};
use crate::trouble::{At, cause};
use files::Files;
use source::Aligned;
use state::{Stage, State};

mod append;
mod files;
mod probe;
mod recover;
mod source;
mod state;
mod writer;

pub use probe::Facts;
pub use recover::{Recovered, Torn};
pub use source::{Piece, Source};
pub use stanchion_format::segment::Tag;
pub use writer::{BlockingWriter, UringWriter, Write, Writer};

/// Segments of a store.
pub const SEGMENTS_MAX: u32 = 1 << 16;
/// Requests under way for one thread.
pub const DEPTH_MAX: u32 = 256;

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriterKind {
    /// io_uring where it works, otherwise blocking.
    Auto,
    /// The same; to be told by [`Facts::writer_why`] if it does not work.
    Uring,
    /// Blocking calls.
    Blocking,
}

/// How a store is to be.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Size of a segment's file; a multiple of 4096.
    pub segment_bytes: u64,
    /// All files together.
    pub bytes_max: u64,
    /// Past the page cache, where that works?
    pub direct: bool,
    /// Who writes.
    pub writer: WriterKind,
    /// Requests under way for one thread, with io_uring.
    pub depth: u32,
    /// Is what an earlier process left to be kept?
    pub keep: bool,
    /// Is another process to find what this one wrote (FM-T2, FM-T3)? Otherwise nothing is synced but by
    /// [`Store::sync`], and no segment gets an index.
    pub durable: bool,
}

impl Default for StoreConfig {
    fn default() -> Self {
        StoreConfig {
            segment_bytes: 256 << 20,
            bytes_max: u64::MAX,
            direct: true,
            writer: WriterKind::Auto,
            depth: 8,
            keep: false,
            durable: true,
        }
    }
}

/// Where a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// In which segment.
    pub segment: u32,
    /// In which life of it: when the next one has begun, the place is void.
    pub life: u64,
    /// Where in the segment.
    pub offset: u64,
    /// Length.
    pub len: u32,
    /// Checksum.
    pub crc: Crc,
}

impl Place {
    fn new(life: Life, entry: &Entry) -> Place {
        let Entry { at, len, crc, .. } = *entry;
        Place { segment: life.segment, life: life.life, offset: at, len, crc }
    }
}

/// What a store holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of all files, bytes.
    pub bytes: u64,
    /// Files.
    pub segments: usize,
    /// Files that wait for their next life.
    pub free: usize,
    /// Files given up because of errors.
    pub dead: usize,
}

/// One agent's store.
#[derive(Debug)]
pub struct Store {
    fs: Arc<dyn Fs>,
    root: PathBuf,
    /// Is `root` a directory of the system, to be removed in the end?
    real: bool,
    config: StoreConfig,
    facts: Facts,
    writer: Box<dyn Writer>,
    state: Mutex<State>,
    /// Held by who prepares the next segment; taken before `state`, never while holding it.
    rolling: Mutex<()>,
    recovered: Recovered,
}

impl Store {
    /// Opens or creates (0700) a store in a directory of its own, whose parent must exist. Refuses a symbolic
    /// link, a foreign owner and a directory that another process uses (FM-C4).
    pub fn open(root: &Path, config: StoreConfig) -> Result<Store, Trouble> {
        let fs = PosixFs::own(root).at(root.display().to_string())?;
        let mut store = Store::on(Arc::new(fs), root, config)?;
        store.real = true;
        Ok(store)
    }

    /// The same on any file system, whose root is the store. `name` is for messages.
    pub fn on(fs: Arc<dyn Fs>, name: &Path, config: StoreConfig) -> Result<Store, Trouble> {
        let root = name.to_owned();
        let shown = name.display().to_string();
        let sizes = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        if !sizes.contains(&config.segment_bytes)
            || config.segment_bytes != padded(config.segment_bytes)
            || !(1..=DEPTH_MAX).contains(&config.depth)
        {
            return Err(Trouble::new(Cause::Setting).file(shown));
        }
        let (facts, writer) = probe::probe(&*fs, &config).at(shown.as_str())?;
        let random = random().at(shown.as_str())?;
        let mut state = State::new(random, config.segment_bytes, config.bytes_max);
        let recovered = recover::recover(&*fs, &config, &mut state).at(shown)?;
        let torn = state.adopted();
        let (state, rolling) = (Mutex::new(state), Mutex::new(()));
        let store =
            Store { fs, root, real: false, config, facts, writer, state, rolling, recovered };
        for life in torn {
            store.seal_now(Some(life));
        }
        Ok(store)
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// How it writes.
    pub fn facts(&self) -> Facts {
        self.facts
    }

    /// What was there when it was opened; its chunks are in [`Store::list`].
    pub fn recovered(&self) -> &Recovered {
        &self.recovered
    }

    /// What it takes of the device.
    pub fn usage(&self) -> Usage {
        let state = self.state();
        Usage {
            bytes: state.bytes(),
            segments: state.numbers().len(),
            free: state.count(Stage::Free),
            dead: state.count(Stage::Dead),
        }
    }

    /// Every chunk and where it is, by tag.
    pub fn list(&self) -> Vec<(Tag, Place)> {
        self.state().list()
    }

    /// Forgets a dataset. Segments without any other one are free for a next life, but keep their files. This
    /// is not durable: until such a next life, a store that is opened again may find the dataset.
    /// Whoever calls sees to it that nobody appends to the dataset any more.
    pub fn free(&self, key: Key) {
        self.state().free(key);
    }

    /// Forgets single chunks, as [`Store::free`] does all of a dataset.
    pub fn forget(&self, places: &[Place]) {
        self.state().forget_places(places);
    }

    /// A descriptor to read the segment of a chunk through, for another process; what is read is not verified.
    /// The chunk must not be forgotten as long as it is used.
    pub fn reader(&self, place: &Place) -> Result<OwnedFd, Trouble> {
        let trouble = |cause| Trouble::new(cause).file(files::name(place.segment));
        let files = match self.state().find(place) {
            Some(segment) => segment.files.clone(),
            None => return Err(trouble(Cause::Missing)),
        };
        let reader = || {
            let files = self.reopened(place.segment, files)?;
            let fd = files.plain.fd().ok_or(Errno::OPNOTSUPP)?;
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        };
        reader().map_err(|e| trouble(cause(e)))
    }

    /// Reads a chunk, whole and verified (FM-T1). `buf` has its length; where it is aligned as
    /// [`Facts::memory_align`] says, past the page cache.
    pub fn read(&self, place: &Place, buf: &mut [u8]) -> Result<(), Trouble> {
        let trouble = |cause| Trouble::new(cause).file(files::name(place.segment));
        if buf.len() != place.len as usize {
            let (want, have) = (place.len.into(), buf.len() as u64);
            return Err(trouble(Cause::Size { want, have }));
        }
        let files = match self.state().find(place) {
            Some(segment) => segment.files.clone(),
            None => return Err(trouble(Cause::Missing)),
        };
        let read = || {
            let files = self.reopened(place.segment, files)?;
            self.read_from(&files, buf, place.offset)
        };
        match read().map_err(|e| trouble(cause(e)))? {
            true if crc64(buf) == place.crc => Ok(()),
            // Forgotten and written anew while it was read, or damaged.
            _ if self.state().find(place).is_none() => Err(trouble(Cause::Missing)),
            _ => Err(trouble(Cause::Damaged)),
        }
    }

    /// Fills `buf`; `false` if the file ends before.
    fn read_from(&self, files: &Files, buf: &mut [u8], offset: u64) -> fs::Result<bool> {
        let aligned = buf.as_ptr().addr().is_multiple_of(self.facts.memory_align);
        let Some(direct) = files.direct.as_deref().filter(|_| aligned) else {
            return Ok(fs::read_full(&*files.plain, buf, offset)? == buf.len());
        };
        let whole = buf.len() - buf.len() % BLOCK;
        let (blocks, tail) = buf.split_at_mut(whole);
        // A short read may end anywhere, where direct I/O cannot go on.
        if whole > 0 && direct.read_at(blocks, offset)? < whole {
            let have = fs::read_full(&*files.plain, blocks, offset)?;
            if have < whole {
                return Ok(false);
            }
        }
        if !tail.is_empty() {
            let mut block = Aligned::blocks(1);
            let at = offset + whole as u64;
            if direct.read_at(&mut block, at)? < tail.len() {
                return Ok(fs::read_full(&*files.plain, tail, at)? == tail.len());
            }
            tail.copy_from_slice(&block[..tail.len()]);
        }
        Ok(true)
    }

    /// Makes durable what was appended before, also what other threads appended (FM-T2). An error that the
    /// system reports once is reported until the chunks in question are forgotten: they may be lost.
    pub fn sync(&self) -> Result<(), Trouble> {
        let (dirty, failed) = self.state().dirty();
        let mut result = failed.map_or(Ok(()), Err);
        for dirty in dirty {
            let number = dirty.life.segment;
            let sync = self.reopened(number, dirty.files.clone()).and_then(|f| f.plain.sync_data());
            let closed = self.state().synced(&dirty, sync);
            self.seal_now(closed);
            result = result.and(sync.map_err(|e| (number, e)));
        }
        result.map_err(|(number, e)| Trouble::new(cause(e)).file(files::name(number)))
    }

    /// Seals the open segment, full or not: the next chunk begins another one. If chunks are still being
    /// written to it, the last of these seals it.
    pub fn seal(&self) -> Result<(), Trouble> {
        let life = self.state().close();
        life.map_or(Ok(()), |life| self.seal_segment(life).at(files::name(life.segment)))
    }

    /// What seals without being asked for. If it fails, the segment stays as it is: its groups say what is in it.
    fn seal_now(&self, life: Option<Life>) {
        let Some(life) = life else { return };
        if let Err(e) = self.seal_segment(life) {
            let segment = files::name(life.segment);
            tracing::warn!(root = %self.root.display(), %segment, "cannot seal a segment: {e}");
        }
    }

    fn seal_segment(&self, life: Life) -> fs::Result<()> {
        let Some((bytes, entries, dirty)) = self.state().sealing(life) else { return Ok(()) };
        if !self.config.durable {
            self.state().sealed(life, false);
            return Ok(());
        }
        let seal = || {
            let files = self.reopened(life.segment, dirty.files.clone())?;
            let sync = files.plain.sync_data();
            self.state().synced(&dirty, sync);
            sync?;
            files::put_index(&*self.writer, &files, life, bytes, &entries)
        };
        let result = seal();
        self.state().sealed(life, result.is_ok());
        result
    }

    /// Removes everything, the directory included (FM-V4). Nobody uses the store any more.
    pub fn remove_all(&self) {
        let contents = fs::remove_contents(&*self.fs, Path::new(""));
        let done = contents.and_then(|()| match self.real {
            true => fs::gone_is_fine(rustix::fs::rmdir(&self.root)),
            false => Ok(()),
        });
        if let Err(e) = done {
            tracing::warn!(root = %self.root.display(), "cannot remove the store: {e}");
        }
    }

    /// The files of a segment, which only an open one has at hand.
    fn reopened(&self, number: u32, files: Option<Arc<Files>>) -> fs::Result<Arc<Files>> {
        match files {
            Some(files) => Ok(files),
            None => Ok(Arc::new(Files::open(&*self.fs, number, self.facts.direct)?)),
        }
    }

    fn root_name(&self) -> String {
        self.root.display().to_string()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells this store's blocks from those of any other.
fn random() -> fs::Result<u64> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    // Up to 256 bytes come whole.
    retry_on_intr(|| rustix::rand::getrandom(&mut bytes, flags))?;
    Ok(u64::from_le_bytes(bytes))
}
