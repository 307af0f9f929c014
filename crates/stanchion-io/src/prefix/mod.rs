//! The prefix: the persistent directory with the application's own files, and `.stanchion` in it.
//!
//! The layout is in [`stanchion_format::index`]. What must hold after a crash at any moment: a record in
//! the index vouches for files that are all there and unchanged (FM-S9, FM-S10), epochs are taken once
//! (FM-S11). Hence nothing is seen under its name before it is durable, and names are synced in order.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use stanchion_format::ids::{Epoch, JobId, Key, SlotId};
use stanchion_format::index::{DIR, JobFile, key_dir};
use stanchion_format::peer::{Cause, Trouble};

use crate::fs::{self, Fs, Kind, PosixFs};
use crate::trouble::At;
pub use export::{Export, Exported};
use place::Place;
use vouched::PathSets;

mod container;
mod export;
mod fetch;
mod flush;
mod intent;
mod notes;
mod pins;
mod place;
mod records;
mod remove;
mod vouched;

/// Largest of the small files (job, lease, halt), bytes.
const NOTE_BYTES_MAX: u64 = 64 << 10;
/// How the names of files that are being written begin.
const NEW: &str = ".new.";

/// The persistent directory.
#[derive(Debug)]
pub struct Prefix {
    /// The application's files.
    fs: Arc<dyn Fs>,
    /// Our own.
    place: Arc<dyn Place>,
    root: PathBuf,
    readonly: bool,
    known: Mutex<PathSets>,
}

/// A record of the index that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    /// Its file, below the prefix.
    pub file: String,
    /// What is wrong with it.
    pub trouble: Trouble,
}

impl Prefix {
    /// Opens the prefix for a job. It must exist (`Missing`), be a directory (`ENOTDIR`) and take new
    /// files (`EACCES`, `EROFS`, `NoSpace`); `.stanchion` in it must be ours (`EPERM`).
    pub fn open(root: &Path) -> Result<Prefix, Trouble> {
        let fs = PosixFs::open(root, true).at(root.display().to_string())?;
        Prefix::on(Arc::new(fs), root)
    }

    /// Opens the prefix for tools that only look: nothing is created.
    pub fn open_readonly(root: &Path) -> Result<Prefix, Trouble> {
        let fs = PosixFs::open(root, true).at(root.display().to_string())?;
        Ok(Prefix { readonly: true, ..Prefix::plain(Arc::new(fs), root) })
    }

    /// The same as `open` on any file system, whose root is the prefix. `name` is for messages.
    pub fn on(fs: Arc<dyn Fs>, name: &Path) -> Result<Prefix, Trouble> {
        let prefix = Prefix::plain(fs, name);
        prefix.place.prepare().at(format!("{}/{DIR}", name.display()))?;
        Ok(prefix)
    }

    fn plain(fs: Arc<dyn Fs>, name: &Path) -> Prefix {
        let place = Arc::new(place::Directory(fs.clone()));
        Prefix { fs, place, root: name.to_owned(), readonly: false, known: Mutex::default() }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The job's id: made by whoever comes first. If its file was lost or damaged, the id is taken from
    /// the index, so that no record becomes a stranger's.
    pub fn job(&self) -> Result<JobId, Trouble> {
        let file = format!("{DIR}/job");
        for _ in 0..2 {
            let (damaged, found) = match self.place.read(&file, NOTE_BYTES_MAX) {
                Ok(bytes) => (true, JobFile::parse(&bytes)),
                Err(Errno::NOENT) => (false, None),
                Err(Errno::FBIG) => (true, None),
                Err(e) => return Err(e).at(file),
            };
            if let Some(found) = found {
                return Ok(found.job);
            }
            let known = self.read_index()?.0.last().map(|r| r.job);
            if damaged && known.is_none() {
                return Err(Trouble::new(Cause::Malformed).file(file));
            }
            let job = known.map_or_else(random, |j| Ok(j.0)).map(JobId).at("getrandom")?;
            let bytes = json(&JobFile::new(job));
            if damaged {
                self.put(&file, &bytes)?;
                return Ok(job);
            }
            if self.put_new(&file, &bytes)? {
                return Ok(job);
            }
            // Somebody was faster: read theirs.
        }
        Err(Trouble::new(Cause::Malformed).file(file))
    }

    /// Takes the next epoch, exclusively and durably (FM-S11).
    pub fn take_epoch(&self) -> Result<Epoch, Trouble> {
        self.writable()?;
        let dir = format!("{DIR}/epoch");
        // Not below what records and data name, should the epochs' own directory have been lost.
        let mut newest = self.newest_epoch()?.0;
        for of_keys in ["index", "data"] {
            newest = newest.max(self.newest_key_epoch(of_keys)?);
        }
        loop {
            newest += 1;
            let file = format!("{dir}/{newest:010}");
            if self.put_new(&file, b"")? {
                return Ok(Epoch(newest));
            }
        }
    }

    /// The highest epoch that was taken; 0 if none was.
    pub fn newest_epoch(&self) -> Result<Epoch, Trouble> {
        let dir = format!("{DIR}/epoch");
        let mut newest = 0;
        for name in self.names(&dir)? {
            if let Some(n) = number(&name) {
                newest = newest.max(n);
            }
        }
        // A listing may be cached by a network file system; a name is asked for anew.
        while self.place.is_there(&format!("{dir}/{:010}", newest + 1)).unwrap_or(false) {
            newest += 1;
        }
        Ok(Epoch(newest))
    }

    fn newest_key_epoch(&self, of_keys: &str) -> Result<u64, Trouble> {
        let names = self.names(&format!("{DIR}/{of_keys}"))?;
        let epochs = names.iter().filter_map(|n| parse_key_dir(n.trim_end_matches(".json")));
        Ok(epochs.map(|key| key.inc.epoch.0).max().unwrap_or(0))
    }

    /// Names in one of our directories; none if it is not there. What is no text is none of ours.
    fn names(&self, dir: &str) -> Result<Vec<String>, Trouble> {
        self.place.names(dir).at(dir)
    }

    fn writable(&self) -> Result<(), Trouble> {
        if self.readonly { Err(Errno::ROFS).at(self.root.display().to_string()) } else { Ok(()) }
    }

    /// Writes a small file of ours, atomically and durably.
    fn put(&self, file: &str, bytes: &[u8]) -> Result<(), Trouble> {
        self.writable()?;
        self.place.put(file, bytes).at(file)
    }

    /// The same, unless there is such a file: then `false`. Durable in both cases.
    fn put_new(&self, file: &str, bytes: &[u8]) -> Result<bool, Trouble> {
        self.writable()?;
        self.place.put_new(file, bytes).at(file)
    }

    /// Removes a file that nobody will miss; [`Prefix::sweep`] finds it otherwise.
    fn discard(&self, file: &str) {
        if let Err(e) = self.place.remove(file) {
            tracing::debug!(%file, "left behind: {e}");
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("our own types always encode");
    bytes.push(b'\n');
    bytes
}

/// A random number that is not 0.
fn random() -> fs::Result<u64> {
    let mut bytes = [0u8; 8];
    let mut have = 0;
    while have < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        have += rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes[have..], flags))?;
    }
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// A file name of digits only.
fn number(name: &str) -> Option<u64> {
    let digits = !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
    // One below the largest, so that there is always a next one.
    digits.then(|| name.parse().ok()).flatten().filter(|n| *n < u64::MAX)
}

/// The key whose [`key_dir`] this is.
fn parse_key_dir(name: &str) -> Option<Key> {
    use stanchion_format::ids::{DatasetNo, Incarnation};
    let mut parts = name.split('.');
    let (no, epoch, count) = (parts.next()?, parts.next()?, parts.next()?);
    let key = Key {
        no: DatasetNo(number(no)?),
        inc: Incarnation {
            epoch: Epoch(number(epoch)?),
            count: u32::try_from(number(count)?).ok()?,
        },
    };
    (key_dir(key) == name).then_some(key)
}

/// The directory of an attempt to flush.
fn attempt_dir(key: Key, attempt: u32) -> String {
    format!("{DIR}/tmp/{}.{attempt}", key_dir(key))
}

/// The key and attempt whose [`attempt_dir`] has this name.
fn parse_attempt_dir(name: &str) -> Option<(Key, u32)> {
    let (key, attempt) = name.rsplit_once('.')?;
    Some((parse_key_dir(key)?, u32::try_from(number(attempt)?).ok()?))
}

/// A slot's manifest.
fn slot_file(key: Key, slot: SlotId) -> String {
    format!("{DIR}/data/{}/slot.{:06}", key_dir(key), slot.0)
}

/// A dataset's record.
fn record_file(key: Key) -> String {
    format!("{DIR}/index/{}", stanchion_format::index::IndexRecord::file_name(key))
}

/// Does a directory entry of the application stand in the way of a file?
fn blocks(kind: Kind) -> fs::Result<()> {
    if kind == Kind::Dir { Err(Errno::ISDIR) } else { Ok(()) }
}
