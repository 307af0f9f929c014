//! From the prefix into the cache, and comparing the prefix with its index.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use stanchion_format::checksum::crc64;
use stanchion_format::ids::{RankId, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::manifest::{FileEntry, Manifest, pieces};
use stanchion_format::peer::{Cause, DatasetInfo, Trouble};

use super::container::Container;
use super::{Prefix, record_file};
use crate::cache::{Cache, cancelled};
use crate::fs::{self, Handle, How};
use crate::trouble::At;

/// Where a file lies: in a container, of which it is number so and so, or under its own name.
type Source = Option<(Arc<Container>, usize)>;

/// Takes verified bytes and their offset.
type Take<'a> = dyn FnMut(&[u8], u64) -> Result<(), Trouble> + 'a;

/// Reads a file chunk by chunk and hands on what is verified.
pub(super) fn verified(
    file: &dyn Handle,
    entry: &FileEntry,
    chunk_bytes: u32,
    buf: &mut Vec<u8>,
    take: &mut Take<'_>,
) -> Result<(), Trouble> {
    let path = entry.path.as_str();
    let have = file.stat().at(path)?.bytes;
    if have != entry.bytes {
        return Err(Trouble::new(Cause::Size { want: entry.bytes, have }).file(path));
    }
    for ((offset, len), crc) in pieces(entry.bytes, chunk_bytes).zip(&entry.chunks) {
        buf.resize(len as usize, 0);
        let have = fs::read_full(file, buf, offset).at(path)?;
        if have < len as usize || crc64(buf) != *crc {
            return Err(Trouble::new(Cause::Damaged).file(path));
        }
        take(buf, offset)?;
    }
    Ok(())
}

impl Prefix {
    /// Copies the files of these ranks (first, count), whichever slot wrote them, into the cache as
    /// `slot`, verifying every chunk (FM-S7). The result is the manifest of `slot`. If anything is
    /// wrong, nothing stays in the cache.
    pub fn fetch(
        &self,
        cache: &Cache,
        info: &DatasetInfo,
        slot: SlotId,
        ranks: &[(RankId, u32)],
        cancel: &dyn Fn() -> bool,
    ) -> Result<Manifest, Trouble> {
        let (m, sources) = self.collect(info, slot, ranks).map_err(|t| t.slot(slot))?;
        let copied = self.copy_in(cache, &m, &sources, cancel).map_err(|t| t.slot(slot));
        if copied.is_err() {
            cache.drop_files(m.key, slot);
        }
        copied.map(|()| m)
    }

    /// The manifest of what these ranks wrote, as `slot`'s, and where it lies.
    fn collect(
        &self,
        info: &DatasetInfo,
        slot: SlotId,
        ranks: &[(RankId, u32)],
    ) -> Result<(Manifest, Vec<Source>), Trouble> {
        let file = record_file(info.key);
        // How its redundancy is laid out is this job's business, not that of the job that wrote it.
        let rec = self.record(info.key)?;
        let rec =
            rec.filter(|r| DatasetInfo { sets: info.sets.clone(), ..r.info.clone() } == *info);
        let rec = rec.ok_or_else(|| Trouble::new(Cause::NoDataset).file(&file))?;
        let spans = |first: RankId, count: u32| {
            let end = u64::from(first.0) + u64::from(count);
            (u64::from(first.0), end)
        };
        let wanted = |from: u64, to: u64| {
            ranks.iter().map(|(f, c)| spans(*f, *c)).any(|(a, b)| a < to && from < b)
        };
        let mut slots = BTreeSet::new();
        for range in info.placement.iter() {
            let (from, to) = spans(range.first, range.count);
            if wanted(from, to) {
                slots.insert(range.slot);
            }
        }
        let mut files = Vec::new();
        for source in slots {
            let (of, container) = self.open_slot(&rec, source)?;
            let container = container.map(Arc::new);
            for (n, entry) in of.files.into_iter().enumerate() {
                if wanted(entry.rank.0.into(), u64::from(entry.rank.0) + 1) {
                    files.push((entry, container.clone().map(|c| (c, n))));
                }
            }
        }
        files.sort_by(|(a, _), (b, _)| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
        let (files, sources) = files.into_iter().unzip();
        let m = Manifest { key: info.key, slot, chunk_bytes: info.chunk_bytes, files };
        m.check().map_err(|_| Trouble::new(Cause::Malformed).file(file))?;
        Ok((m, sources))
    }

    /// A slot's manifest and, if it is in one, its container.
    pub(super) fn open_slot(
        &self,
        rec: &IndexRecord,
        slot: SlotId,
    ) -> Result<(Manifest, Option<Container>), Trouble> {
        match rec.containers {
            Some(attempt) => {
                let container = self.container(rec, attempt, slot)?;
                Ok((container.manifest().clone(), Some(container)))
            }
            None => Ok((self.read_slot(rec, slot)?, None)),
        }
    }

    fn copy_in(
        &self,
        cache: &Cache,
        m: &Manifest,
        sources: &[Source],
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        cache.admit(m.key, m.slot, m.bytes())?;
        cache.keep_only(m)?;
        let mut buf = Vec::new();
        for (entry, source) in m.files.iter().zip(sources) {
            let path = entry.path.as_str();
            let mut copy = |from: &dyn Handle| {
                let to = cache.fresh_file(m.key, m.slot, entry.rank, path)?;
                verified(from, entry, m.chunk_bytes, &mut buf, &mut |bytes, offset| {
                    if cancel() {
                        return Err(cancelled());
                    }
                    fs::write_all(&*to, bytes, offset).at(path)
                })?;
                to.set_mode(entry.mode).at(path)
            };
            let copied = match source {
                Some((container, n)) => copy(&container.part(*n)),
                None => {
                    self.fs.open(Path::new(path), How::Read).at(path).and_then(|from| copy(&*from))
                }
            };
            copied.map_err(|t| t.rank(entry.rank))?;
        }
        Ok(())
    }

    /// Reads everything that the record vouches for, and tells what is wrong, one trouble a file.
    /// `progress` hears of bytes as they are read.
    pub fn verify(
        &self,
        rec: &IndexRecord,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<Trouble>, Trouble> {
        let mut troubles = Vec::new();
        let mut buf = Vec::new();
        for (slot, _) in &rec.slots {
            let (m, container) = match self.open_slot(rec, *slot) {
                Ok(open) => open,
                Err(trouble) => {
                    troubles.push(trouble);
                    continue;
                }
            };
            for (n, entry) in m.files.iter().enumerate() {
                let checked = match &container {
                    None => self.check_file(&m, entry, &mut buf, progress),
                    Some(c) => check(&c.part(n), &m, entry, &mut buf, progress),
                };
                troubles.extend(checked.err().map(|t| t.slot(*slot).rank(entry.rank)));
            }
            troubles.extend(container.and_then(|c| c.check_frame().err()));
        }
        Ok(troubles)
    }

    /// Is the file in the prefix what the manifest says?
    pub(super) fn check_file(
        &self,
        m: &Manifest,
        entry: &FileEntry,
        buf: &mut Vec<u8>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Trouble> {
        let path = entry.path.as_str();
        let file = self.fs.open(Path::new(path), How::Read).at(path)?;
        check(&*file, m, entry, buf, progress)
    }
}

fn check(
    file: &dyn Handle,
    m: &Manifest,
    entry: &FileEntry,
    buf: &mut Vec<u8>,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Trouble> {
    verified(file, entry, m.chunk_bytes, buf, &mut |bytes, _| {
        progress(bytes.len() as u64);
        Ok(())
    })
}
