//! Datasets as containers: one file for each slot, written once under a name of its own ([`stanchion_format::container`]).
//!
//! Nothing of the application's is replaced, and nothing that is there is changed: a record names the attempt whose
//! containers it vouches for, so what other attempts left is never read (FM-S9, FM-S10).

use stanchion_format::container::{self, BLOCK, ContainerError, Identity, Tail};
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::index::{DIR, IndexRecord, key_dir};
use stanchion_format::limits;
use stanchion_format::manifest::{FileEntry, Manifest};
use stanchion_format::peer::{Cause, Trouble};

use super::fetch::verified;
use super::place::Filling;
use super::{Prefix, number};
use crate::cache::{Cache, cancelled};
use crate::fs::{self, Handle, Stat};
use crate::trouble::At;
use rustix::io::Errno;

/// What is looked through at a time for bytes that should be zeros.
const ZEROS: [u8; BLOCK] = [0; BLOCK];

/// The containers of an attempt.
fn attempt_dir(key: Key, attempt: u32) -> String {
    format!("{DIR}/data/{}/a.{attempt:010}", key_dir(key))
}

fn container_file(key: Key, attempt: u32, slot: SlotId) -> String {
    format!("{}/c.{:06}", attempt_dir(key, attempt), slot.0)
}

/// What is wrong with a container, to a user.
fn cause_of(error: ContainerError) -> Cause {
    match error {
        ContainerError::Damaged => Cause::Damaged,
        _ => Cause::Malformed,
    }
}

/// A container that is read.
pub(super) struct Container {
    file: String,
    handle: Box<dyn Handle>,
    manifest: Manifest,
    places: Vec<u64>,
    tail: Tail,
    bytes: u64,
}

/// One of the files in it.
pub(super) struct Part<'a> {
    handle: &'a dyn Handle,
    at: u64,
    bytes: u64,
    mode: u32,
}

impl Handle for Part<'_> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> fs::Result<usize> {
        let left = self.bytes.saturating_sub(offset);
        let len = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        self.handle.read_at(&mut buf[..len], self.at + offset)
    }

    fn write_at(&self, _: &[u8], _: u64) -> fs::Result<usize> {
        Err(Errno::BADF)
    }

    fn set_len(&self, _: u64) -> fs::Result<()> {
        Err(Errno::BADF)
    }

    fn set_mode(&self, _: u32) -> fs::Result<()> {
        Err(Errno::BADF)
    }

    fn sync(&self) -> fs::Result<()> {
        Ok(())
    }

    fn stat(&self) -> fs::Result<Stat> {
        Ok(Stat { bytes: self.bytes, mode: self.mode, ..self.handle.stat()? })
    }
}

impl Container {
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn into_manifest(self) -> Manifest {
        self.manifest
    }

    /// File number `n` of the manifest.
    pub fn part(&self, n: usize) -> Part<'_> {
        let FileEntry { bytes, mode, .. } = self.manifest.files[n];
        Part { handle: &*self.handle, at: self.places[n], bytes, mode }
    }

    /// Is what is not the files' what it was when it was written? The first block, and the zeros behind each file.
    pub fn check_frame(&self) -> Result<(), Trouble> {
        let wrong = |cause| Trouble::new(cause).slot(self.manifest.slot).file(&self.file);
        let mut block = vec![0; BLOCK];
        let have = fs::read_full(&*self.handle, &mut block, 0).at(self.file.as_str())?;
        match container::parse_head(&block[..have]) {
            Ok(identity) if identity == self.tail.identity => {}
            Ok(_) => return Err(wrong(Cause::Malformed)),
            Err(error) => return Err(wrong(cause_of(error))),
        }
        let ends = self.manifest.files.iter().zip(&self.places).map(|(f, at)| at + f.bytes);
        let table_end = self.tail.table_at + self.tail.table_bytes;
        for (from, to) in
            ends.zip(&self.places[1..]).chain([(table_end, &(self.bytes - BLOCK as u64))])
        {
            let len = (to - from) as usize;
            let have =
                fs::read_full(&*self.handle, &mut block[..len], from).at(self.file.as_str())?;
            if have < len || block[..len] != ZEROS[..len] {
                return Err(wrong(Cause::Damaged));
            }
        }
        Ok(())
    }
}

impl Prefix {
    /// Writes a slot's files into a container of this attempt, durably. Every chunk is verified on its way (FM-F9).
    pub(super) fn container_write(
        &self,
        cache: &Cache,
        m: &Manifest,
        attempt: u32,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let file = container_file(m.key, attempt, m.slot);
        let identity = Identity { job: self.job()?, key: m.key, slot: m.slot, attempt };
        if self.place.free().at(DIR)?.is_some_and(|free| m.bytes() > free) {
            return Err(Trouble::new(Cause::NoSpace).file(self.root.display().to_string()));
        }
        let tail = container::tail(identity, m)
            .map_err(|e| Trouble::new(cause_of(e)).file(file.as_str()))?;
        let mut to = self.place.create(&file).at(file.as_str())?;
        to.append(&container::head(identity)).at(file.as_str())?;
        let mut buf = Vec::new();
        for entry in &m.files {
            pour(cache, m, entry, (&file, &mut *to), &mut buf, cancel)
                .map_err(|t| t.rank(entry.rank))?;
        }
        to.append(&tail).at(file.as_str())?;
        to.finish().at(file)
    }

    /// Opens the container of a slot that the record vouches for.
    pub(super) fn container(
        &self,
        rec: &IndexRecord,
        attempt: u32,
        slot: SlotId,
    ) -> Result<Container, Trouble> {
        let file = container_file(rec.info.key, attempt, slot);
        let wrong = |cause| Trouble::new(cause).slot(slot).file(file.as_str());
        let want = rec.slots.iter().find(|(s, _)| *s == slot);
        let want = want.ok_or_else(|| wrong(Cause::Malformed))?.1;
        let handle = self.place.open(&file).at(file.as_str()).map_err(|t| t.slot(slot))?;
        let bytes = handle.stat().at(file.as_str())?.bytes;
        let read = |at: u64, len: usize| {
            let mut buf = vec![0; len];
            let have = fs::read_full(&*handle, &mut buf, at).at(file.as_str())?;
            if have == len {
                Ok(buf)
            } else {
                Err(wrong(Cause::Size { want: at + len as u64, have: at + have as u64 }))
            }
        };
        let at = bytes.checked_sub(BLOCK as u64).ok_or_else(|| wrong(Cause::Malformed))?;
        let tail = Tail::parse(&read(at, BLOCK)?, bytes).map_err(|e| wrong(cause_of(e)))?;
        if tail.identity != (Identity { job: rec.job, key: rec.info.key, slot, attempt }) {
            return Err(wrong(Cause::Malformed));
        }
        let table = read(tail.table_at, tail.table_bytes as usize)?;
        let manifest = tail.manifest(&table).map_err(|e| wrong(cause_of(e)))?;
        if manifest.crc() != want || manifest.chunk_bytes != rec.info.chunk_bytes {
            return Err(wrong(Cause::Malformed));
        }
        let places = container::places(&manifest).ok_or_else(|| wrong(Cause::Malformed))?;
        Ok(Container { file, handle, manifest, places, tail, bytes })
    }

    /// Removes the containers of this dataset's attempts, but for `keep`. What cannot be removed is swept later.
    pub(super) fn forget_containers(&self, key: Key, keep: Option<u32>) {
        for attempt in self.container_attempts(key) {
            if Some(attempt) != keep {
                self.container_abort(key, attempt);
            }
        }
    }

    /// Attempts that left containers, or parts of them.
    pub(super) fn container_attempts(&self, key: Key) -> Vec<u32> {
        let names = self.names(&format!("{DIR}/data/{}", key_dir(key))).unwrap_or_default();
        let attempts = names.iter().filter_map(|n| number(n.strip_prefix("a.")?));
        attempts.filter_map(|n| u32::try_from(n).ok()).collect()
    }

    pub(super) fn container_abort(&self, key: Key, attempt: u32) {
        let dir = attempt_dir(key, attempt);
        if let Err(e) = self.place.remove_tree(&dir) {
            tracing::warn!(%dir, "cannot remove the leftovers of a flush: {e}");
        }
    }
}

/// One file, chunk by chunk, and zeros up to the next whole block.
fn pour(
    cache: &Cache,
    m: &Manifest,
    entry: &FileEntry,
    (file, to): (&str, &mut dyn Filling),
    buf: &mut Vec<u8>,
    cancel: &dyn Fn() -> bool,
) -> Result<(), Trouble> {
    let from = cache.manifest_file(m, entry)?;
    verified(&*from, entry, m.chunk_bytes, buf, &mut |bytes, _| {
        if cancel() {
            return Err(cancelled());
        }
        to.append(bytes).at(file)
    })?;
    let padding = container::padded(entry.bytes).map_or(0, |end| (end - entry.bytes) as usize);
    to.append(&ZEROS[..padding]).at(file)
}

const _: () = assert!(limits::INDEX_FILE_BYTES_MAX < usize::MAX as u64);
