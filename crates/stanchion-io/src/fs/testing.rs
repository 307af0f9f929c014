//! A file system in memory that does to its users what real ones may do (FM-F8, FM-F9).
//!
//! It knows what is durable: contents after `sync`, names after `sync_dir`, nothing else. At
//! [`FaultyFs::crash`] all the rest is forgotten, kept, or torn, as [`Keep`] says. Errors, short and
//! torn writes come when a countdown of operations ends.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{Entry, Fs, Handle, How, Kind, Result, Stat};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// One operation fails, with nothing done.
    Once(Errno),
    /// From here on every operation that changes something fails.
    Stuck(Errno),
    /// A read or write does one byte; other operations go on as usual.
    Short,
    /// A write does half of its bytes and fails with `EIO`; other operations fail with nothing done.
    Torn,
    /// The machine stops: this operation and all later ones fail until [`FaultyFs::crash`].
    Down,
}

/// What of the things that were not made durable a crash leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: a file system that writes back as late as it may.
    Nothing,
    /// Names up to a random moment, in order, and contents torn: a journal of names only.
    Journal(u64),
    /// Names in any subset, contents torn: no journal at all.
    Any(u64),
}

/// A file system in memory. Clones are the same one.
#[derive(Clone, Debug)]
pub struct FaultyFs(Arc<Mutex<State>>);

const ROOT: u64 = 0;
/// Contents reach the disk in blocks of this size, in any order.
const BLOCK: usize = 512;

#[derive(Clone, Debug, Default)]
struct Inode {
    /// `None`: a directory.
    data: Option<Vec<u8>>,
    durable: Vec<u8>,
    entries: BTreeMap<OsString, u64>,
    mode: u32,
}

/// A change of names that is not durable yet: all of it or nothing.
type Change = Vec<(u64, OsString, Option<u64>)>;

#[derive(Clone, Debug)]
struct State {
    inodes: BTreeMap<u64, Inode>,
    /// Names that would be there after a crash that keeps nothing.
    durable: BTreeMap<(u64, OsString), u64>,
    pending: Vec<Change>,
    next: u64,
    ops: u64,
    plan: Option<(u64, Fault)>,
    stuck: Option<Errno>,
    down: bool,
    boots: u64,
    capacity: Option<u64>,
    direct: bool,
}

impl Default for FaultyFs {
    fn default() -> Self {
        FaultyFs::new()
    }
}

impl FaultyFs {
    /// An empty one, without faults.
    pub fn new() -> FaultyFs {
        let root = Inode { mode: 0o700, ..Inode::default() };
        FaultyFs(Arc::new(Mutex::new(State {
            inodes: BTreeMap::from([(ROOT, root)]),
            durable: BTreeMap::new(),
            pending: Vec::new(),
            next: ROOT + 1,
            ops: 0,
            plan: None,
            stuck: None,
            down: false,
            boots: 0,
            capacity: None,
            direct: true,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An independent copy as it is now.
    pub fn fork(&self) -> FaultyFs {
        FaultyFs(Arc::new(Mutex::new(self.state().clone())))
    }

    /// Operations so far.
    pub fn ops(&self) -> u64 {
        self.state().ops
    }

    /// Lets the `nth` operation from now (0: the next) meet `fault`.
    pub fn plan(&self, nth: u64, fault: Fault) {
        let mut s = self.state();
        s.plan = Some((s.ops + nth, fault));
    }

    /// Ends all faults. What stopped stays stopped.
    pub fn heal(&self) {
        let mut s = self.state();
        (s.plan, s.stuck) = (None, None);
    }

    /// Limits the bytes of all files: beyond, `ENOSPC`.
    pub fn capacity(&self, bytes: Option<u64>) {
        self.state().capacity = bytes;
    }

    /// Has it direct I/O? If so, then as strictly as a device with blocks of 4 KiB.
    pub fn direct(&self, has: bool) {
        self.state().direct = has;
    }

    /// The machine fails and comes back: what was not durable is treated as `keep` says, open files are
    /// stale, faults are over.
    pub fn crash(&self, keep: Keep) {
        let mut s = self.state();
        let mut random = match keep {
            Keep::Nothing => Random(1),
            Keep::Journal(seed) | Keep::Any(seed) => Random(seed | 1),
        };
        s.settle_names(keep, &mut random);
        s.settle_contents(keep, &mut random);
        (s.plan, s.stuck, s.down) = (None, None, false);
        s.boots += 1;
    }

    /// Changes a file's contents behind everybody's back: damage at rest, durable at once.
    pub fn tamper(&self, path: impl AsRef<Path>, change: impl FnOnce(&mut Vec<u8>)) {
        let mut s = self.state();
        let ino = s.find(path.as_ref()).expect("a file to damage");
        let inode = s.inodes.get_mut(&ino).expect("an entry leads to an inode");
        let data = inode.data.as_mut().expect("a file, not a directory");
        change(data);
        inode.durable = data.clone();
    }

    /// Every file's path, for tests that look for leftovers.
    pub fn files(&self) -> Vec<String> {
        let s = self.state();
        let mut out = Vec::new();
        let mut todo = vec![(ROOT, String::new())];
        while let Some((ino, path)) = todo.pop() {
            let inode = &s.inodes[&ino];
            if inode.data.is_some() {
                out.push(path);
                continue;
            }
            for (name, inner) in &inode.entries {
                let name = name.to_string_lossy();
                let slash = if path.is_empty() { "" } else { "/" };
                todo.push((*inner, format!("{path}{slash}{name}")));
            }
        }
        out.sort();
        out
    }
}

/// xorshift64: what a test needs of chance.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }
}

impl State {
    /// Counts an operation; its fault, if it is its turn.
    fn step(&mut self, changes: bool) -> Result<Option<Fault>> {
        let op = self.ops;
        self.ops += 1;
        if self.down {
            return Err(Errno::IO);
        }
        if let (Some(errno), true) = (self.stuck, changes) {
            return Err(errno);
        }
        let Some((at, fault)) = self.plan else { return Ok(None) };
        if op < at {
            return Ok(None);
        }
        self.plan = None;
        match fault {
            Fault::Once(errno) => Err(errno),
            Fault::Stuck(errno) => {
                self.stuck = Some(errno);
                if changes { Err(errno) } else { Ok(None) }
            }
            Fault::Down => {
                self.down = true;
                Ok(Some(fault))
            }
            other => Ok(Some(other)),
        }
    }

    /// The same for operations that are done whole or not at all.
    fn whole(&mut self, changes: bool) -> Result<()> {
        match self.step(changes)? {
            Some(Fault::Down | Fault::Torn) => Err(Errno::IO),
            _ => Ok(()),
        }
    }

    fn find(&self, path: &Path) -> Result<u64> {
        let mut at = ROOT;
        for part in path.components() {
            let Component::Normal(name) = part else { return Err(Errno::INVAL) };
            let inode = &self.inodes[&at];
            if inode.data.is_some() {
                return Err(Errno::NOTDIR);
            }
            at = *inode.entries.get(name).ok_or(Errno::NOENT)?;
        }
        Ok(at)
    }

    /// The directory that `path` is in, and its name there.
    fn place(&self, path: &Path) -> Result<(u64, OsString)> {
        if !path.components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(Errno::INVAL);
        }
        let name = path.file_name().ok_or(Errno::ISDIR)?;
        let dir = self.find(path.parent().unwrap_or(Path::new("")))?;
        if self.inodes[&dir].data.is_some() {
            return Err(Errno::NOTDIR);
        }
        Ok((dir, name.to_owned()))
    }

    fn there(&self, dir: u64, name: &OsString) -> Option<u64> {
        self.inodes[&dir].entries.get(name).copied()
    }

    /// Changes names now, durably later.
    fn change(&mut self, change: Change) {
        for (dir, name, to) in &change {
            let entries = &mut self.inodes.get_mut(dir).expect("a live directory").entries;
            match to {
                Some(ino) => entries.insert(name.clone(), *ino),
                None => entries.remove(name),
            };
        }
        self.pending.push(change);
    }

    fn make_durable(&mut self, change: Change) {
        for (dir, name, to) in change {
            match to {
                Some(ino) => self.durable.insert((dir, name), ino),
                None => self.durable.remove(&(dir, name)),
            };
        }
    }

    /// Makes the changes in `dir` durable, and what came before them in directories they share.
    fn sync_names(&mut self, dir: u64) {
        let mut dirs = vec![dir];
        let mut keep = vec![false; self.pending.len()];
        for (i, change) in self.pending.iter().enumerate().rev() {
            if change.iter().any(|(d, ..)| dirs.contains(d)) {
                dirs.extend(change.iter().map(|(d, ..)| *d));
            } else {
                keep[i] = true;
            }
        }
        let pending = std::mem::take(&mut self.pending);
        for (change, keep) in pending.into_iter().zip(keep) {
            if keep {
                self.pending.push(change);
            } else {
                self.make_durable(change);
            }
        }
    }

    fn settle_names(&mut self, keep: Keep, random: &mut Random) {
        let pending = std::mem::take(&mut self.pending);
        let cut = random.next() as usize % (pending.len() + 1);
        let mut lost: Vec<(u64, OsString)> = Vec::new();
        for (i, change) in pending.into_iter().enumerate() {
            let survives = match keep {
                Keep::Nothing => false,
                Keep::Journal(_) => i < cut,
                // A later change of a name implies the earlier ones.
                Keep::Any(_) => {
                    random.coin() && !change.iter().any(|(d, n, _)| lost.contains(&(*d, n.clone())))
                }
            };
            if survives {
                self.make_durable(change);
            } else {
                lost.extend(change.into_iter().map(|(d, n, _)| (d, n)));
            }
        }
        for inode in self.inodes.values_mut() {
            inode.entries.clear();
        }
        for ((dir, name), ino) in &self.durable {
            let dir = self.inodes.get_mut(dir).expect("inodes are never reused");
            dir.entries.insert(name.clone(), *ino);
        }
    }

    fn settle_contents(&mut self, keep: Keep, random: &mut Random) {
        for inode in self.inodes.values_mut() {
            let Some(data) = &mut inode.data else { continue };
            if *data != inode.durable && keep != Keep::Nothing {
                tear(&mut inode.durable, data, random);
            }
            data.clone_from(&inode.durable);
        }
    }

    fn used(&self) -> u64 {
        // Files without a name are taken for closed.
        let named: BTreeSet<u64> =
            self.inodes.values().flat_map(|i| i.entries.values().copied()).collect();
        let data = named.iter().filter_map(|ino| self.inodes[ino].data.as_ref());
        data.map(|d| d.len() as u64).sum()
    }
}

/// Some blocks of `new` reach `durable`, in no order.
fn tear(durable: &mut Vec<u8>, new: &[u8], random: &mut Random) {
    if random.coin() {
        durable.resize(new.len(), 0);
    }
    for (i, block) in new.chunks(BLOCK).enumerate() {
        let at = i * BLOCK;
        if random.coin() && at < durable.len() {
            let end = (at + block.len()).min(durable.len());
            durable[at..end].copy_from_slice(&block[..end - at]);
        }
    }
}

impl Fs for FaultyFs {
    fn open(&self, path: &Path, how: How) -> Result<Box<dyn Handle>> {
        let mut s = self.state();
        s.whole(matches!(how, How::Create(_) | How::CreateNew(_)))?;
        if how == How::Direct && !s.direct {
            return Err(Errno::INVAL);
        }
        let (dir, name) = s.place(path)?;
        let ino = match (s.there(dir, &name), how) {
            (Some(_), How::CreateNew(_)) => return Err(Errno::EXIST),
            (Some(ino), _) => {
                let inode = &s.inodes[&ino];
                let needs = if how == How::Read { 0o400 } else { 0o600 };
                if inode.data.is_none() {
                    return Err(Errno::ISDIR);
                }
                if inode.mode & needs != needs {
                    return Err(Errno::ACCESS);
                }
                ino
            }
            (None, How::Read | How::Write | How::Direct) => return Err(Errno::NOENT),
            (None, How::Create(mode) | How::CreateNew(mode)) => {
                let ino = s.next;
                s.next += 1;
                let inode = Inode { data: Some(Vec::new()), mode, ..Inode::default() };
                s.inodes.insert(ino, inode);
                s.change(vec![(dir, name, Some(ino))]);
                ino
            }
        };
        let boots = s.boots;
        let (write, direct) = (how != How::Read, how == How::Direct);
        Ok(Box::new(FaultyFile { fs: self.clone(), ino, boots, write, direct }))
    }

    fn stat(&self, path: &Path) -> Result<Stat> {
        let mut s = self.state();
        s.whole(false)?;
        let ino = s.find(path)?;
        Ok(stat(&s.inodes[&ino]))
    }

    fn list(&self, path: &Path) -> Result<Vec<Entry>> {
        let mut s = self.state();
        s.whole(false)?;
        let ino = s.find(path)?;
        if s.inodes[&ino].data.is_some() {
            return Err(Errno::NOTDIR);
        }
        let entry = |(name, inner): (&OsString, &u64)| Entry {
            name: name.clone(),
            kind: stat(&s.inodes[inner]).kind,
        };
        Ok(s.inodes[&ino].entries.iter().map(entry).collect())
    }

    fn mkdir(&self, path: &Path, mode: u32) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        if path.as_os_str().is_empty() {
            return Err(Errno::EXIST);
        }
        let (dir, name) = s.place(path)?;
        if s.there(dir, &name).is_some() {
            return Err(Errno::EXIST);
        }
        let ino = s.next;
        s.next += 1;
        s.inodes.insert(ino, Inode { mode, ..Inode::default() });
        s.change(vec![(dir, name, Some(ino))]);
        Ok(())
    }

    fn rmdir(&self, path: &Path) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let (dir, name) = s.place(path)?;
        let ino = s.there(dir, &name).ok_or(Errno::NOENT)?;
        let inode = &s.inodes[&ino];
        if inode.data.is_some() {
            return Err(Errno::NOTDIR);
        }
        if !inode.entries.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        s.change(vec![(dir, name, None)]);
        Ok(())
    }

    fn unlink(&self, path: &Path) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let (dir, name) = s.place(path)?;
        let ino = s.there(dir, &name).ok_or(Errno::NOENT)?;
        if s.inodes[&ino].data.is_none() {
            return Err(Errno::ISDIR);
        }
        s.change(vec![(dir, name, None)]);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let ((from_dir, from), (to_dir, to)) = (s.place(from)?, s.place(to)?);
        let ino = s.there(from_dir, &from).ok_or(Errno::NOENT)?;
        if let Some(old) = s.there(to_dir, &to) {
            if s.inodes[&old].data.is_none() {
                return Err(Errno::ISDIR);
            }
            if old == ino {
                return Ok(());
            }
        }
        s.change(vec![(from_dir, from, None), (to_dir, to, Some(ino))]);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let ino = s.find(from)?;
        let (dir, name) = s.place(to)?;
        if s.there(dir, &name).is_some() {
            return Err(Errno::EXIST);
        }
        if s.inodes[&ino].data.is_none() {
            return Err(Errno::PERM);
        }
        s.change(vec![(dir, name, Some(ino))]);
        Ok(())
    }

    fn chmod(&self, path: &Path, mode: u32) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let ino = s.find(path)?;
        s.inodes.get_mut(&ino).expect("an entry leads to an inode").mode = mode;
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let mut s = self.state();
        s.whole(true)?;
        let ino = s.find(path)?;
        if s.inodes[&ino].data.is_some() {
            return Err(Errno::NOTDIR);
        }
        s.sync_names(ino);
        Ok(())
    }

    fn free(&self) -> Result<Option<u64>> {
        let mut s = self.state();
        s.whole(false)?;
        Ok(s.capacity.map(|c| c.saturating_sub(s.used())))
    }
}

fn stat(inode: &Inode) -> Stat {
    let uid = rustix::process::geteuid().as_raw();
    match &inode.data {
        Some(data) => Stat { kind: Kind::File, bytes: data.len() as u64, mode: inode.mode, uid },
        None => Stat { kind: Kind::Dir, bytes: 0, mode: inode.mode, uid },
    }
}

/// An open file; stale after a crash.
struct FaultyFile {
    fs: FaultyFs,
    ino: u64,
    boots: u64,
    write: bool,
    direct: bool,
}

/// What direct I/O asks for here.
const DIRECT: usize = 4096;

impl FaultyFile {
    /// Direct I/O takes whole blocks from aligned memory only.
    fn check(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let fits = bytes.as_ptr().addr().is_multiple_of(DIRECT)
            && bytes.len().is_multiple_of(DIRECT)
            && offset.is_multiple_of(DIRECT as u64);
        if self.direct && !fits { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// Runs `call` on the contents after counting the operation.
    fn with<T>(
        &self,
        changes: bool,
        call: impl FnOnce(&mut State, Option<Fault>) -> Result<T>,
    ) -> Result<T> {
        let mut s = self.fs.state();
        if s.boots != self.boots {
            return Err(Errno::IO);
        }
        let fault = s.step(changes)?;
        if changes && !self.write {
            return Err(Errno::BADF);
        }
        call(&mut s, fault)
    }
}

impl Handle for FaultyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.check(buf, offset)?;
        self.with(false, |s, fault| {
            if let Some(Fault::Down | Fault::Torn) = fault {
                return Err(Errno::IO);
            }
            let data = s.inodes[&self.ino].data.as_ref().expect("a file");
            let at = usize::try_from(offset).map_or(data.len(), |o| o.min(data.len()));
            let mut n = buf.len().min(data.len() - at);
            if fault == Some(Fault::Short) {
                n = n.min(1);
            }
            buf[..n].copy_from_slice(&data[at..at + n]);
            Ok(n)
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize> {
        self.check(bytes, offset)?;
        self.with(true, |s, fault| {
            let mut n = match fault {
                Some(Fault::Down | Fault::Torn) => bytes.len() / 2,
                Some(Fault::Short) => bytes.len().min(1),
                _ => bytes.len(),
            };
            let at = usize::try_from(offset).map_err(|_| Errno::FBIG)?;
            let (used, capacity) = (s.used(), s.capacity);
            let data = s.inodes.get_mut(&self.ino).and_then(|i| i.data.as_mut()).expect("a file");
            if let Some(capacity) = capacity {
                // Room for what is overwritten, and for as much as may still grow.
                let room = (data.len().saturating_sub(at) as u64) + capacity.saturating_sub(used);
                if room == 0 && n > 0 {
                    return Err(Errno::NOSPC);
                }
                n = n.min(usize::try_from(room).unwrap_or(usize::MAX));
            }
            if data.len() < at + n {
                data.resize(at + n, 0);
            }
            data[at..at + n].copy_from_slice(&bytes[..n]);
            if let Some(Fault::Down | Fault::Torn) = fault { Err(Errno::IO) } else { Ok(n) }
        })
    }

    fn set_len(&self, bytes: u64) -> Result<()> {
        self.with(true, |s, fault| {
            if let Some(Fault::Down | Fault::Torn) = fault {
                return Err(Errno::IO);
            }
            let len = usize::try_from(bytes).map_err(|_| Errno::FBIG)?;
            let inode = s.inodes.get_mut(&self.ino).expect("inodes are never reused");
            inode.data.as_mut().expect("a file").resize(len, 0);
            Ok(())
        })
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        let full = {
            let s = self.fs.state();
            let has = s.inodes[&self.ino].data.as_ref().map_or(0, Vec::len) as u64;
            let wants = bytes.saturating_sub(has);
            s.capacity.is_some_and(|capacity| wants > capacity.saturating_sub(s.used()))
        };
        if full {
            return Err(Errno::NOSPC);
        }
        self.set_len(bytes)
    }

    fn set_mode(&self, mode: u32) -> Result<()> {
        // Not `changes`: the system allows this on files that are open for reading.
        self.with(false, |s, fault| {
            if let Some(Fault::Down | Fault::Torn) = fault {
                return Err(Errno::IO);
            }
            s.inodes.get_mut(&self.ino).expect("inodes are never reused").mode = mode;
            Ok(())
        })
    }

    fn sync(&self) -> Result<()> {
        self.with(false, |s, fault| {
            if let Some(Fault::Down | Fault::Torn) = fault {
                return Err(Errno::IO);
            }
            let inode = s.inodes.get_mut(&self.ino).expect("inodes are never reused");
            inode.durable = inode.data.clone().expect("a file");
            Ok(())
        })
    }

    fn stat(&self) -> Result<Stat> {
        self.with(false, |s, fault| {
            if let Some(Fault::Down | Fault::Torn) = fault {
                return Err(Errno::IO);
            }
            Ok(stat(&s.inodes[&self.ino]))
        })
    }
}
