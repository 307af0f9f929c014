//! A flush that was interrupted while its files got their names is completed by whoever comes next (FM-L3).
//!
//! Files that a newer dataset replaces are lost to the older one with the first rename, and the newer one has
//! its record only after the last. What bridges the gap is the record itself, laid beside the attempt's files
//! before the first of them gets its name: with it, and with files that are either still under their
//! temporary names or already under their own, the rest can be done without any cache.

use std::path::Path;

use rustix::io::Errno;
use stanchion_format::ids::{Epoch, Key};
use stanchion_format::index::{DIR, IndexRecord};
use stanchion_format::limits;
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Trouble};

use super::fetch::verified;
use super::flush::{claims_dir, staged};
use super::records::plausible;
use super::{Prefix, json, parse_attempt_dir};
use crate::fs::{self, How};
use crate::trouble::At;

fn intent_file(key: Key, attempt: u32) -> String {
    format!("{}/record.json", claims_dir(key, attempt))
}

impl Prefix {
    /// Says durably what this attempt is going to vouch for. After all slots have prepared, before any of
    /// them publishes.
    pub fn flush_intend(&self, rec: &IndexRecord, attempt: u32) -> Result<(), Trouble> {
        self.writable()?;
        let file = intent_file(rec.info.key, attempt);
        if *rec != rec.clone().seal() || !plausible(rec) {
            return Err(Trouble::new(Cause::Malformed).file(file));
        }
        if self.newest_epoch()? > rec.epoch {
            return Err(Trouble::new(Cause::Fenced).file(file));
        }
        // FM-S11: agents that were cut off, or slept, while the job was led on without them.
        self.not_led_past(rec).map_err(|t| t.file(file.as_str()))?;
        if rec.containers.is_some() {
            // Nothing is replaced, so nothing is to be completed: until it has its record, the one before is whole.
            return Ok(());
        }
        let dir = claims_dir(rec.info.key, attempt);
        fs::make_dirs(&*self.fs, Path::new(&dir), 0o700).at(dir.as_str())?;
        self.put(&file, &json(rec))?;
        for dir in Path::new(&dir).ancestors().skip(1).take_while(|d| d.starts_with(DIR)) {
            self.fs.sync_dir(dir).at(dir.display().to_string())?;
        }
        Ok(())
    }

    /// Completes interrupted flushes, oldest first; gives their datasets. Those of which something is missing
    /// or damaged stay as they are, as do those that a newer dataset, or another line of the job, has overtaken. For
    /// whoever has just taken the prefix over with `epoch`: nobody else may be flushing (FM-C5).
    pub fn flush_complete(&self, epoch: Epoch) -> Result<Vec<Key>, Trouble> {
        self.writable()?;
        // A record that is there need not be durable: whoever wrote it may have died before it was.
        let index = format!("{DIR}/index");
        self.place.settle(&index).at(index)?;
        let mut intents = self.intents()?;
        intents.sort_by_key(|(key, attempt, _)| (*key, *attempt));
        let mut completed = Vec::new();
        for (key, attempt, rec) in intents {
            let Some(manifests) = self.completable(&rec, attempt)? else { continue };
            for manifest in &manifests {
                self.publish(manifest, attempt, true, &|| false)
                    .map_err(|t| t.slot(manifest.slot))?;
            }
            self.write_record(&IndexRecord { epoch, ..rec }.seal())?;
            completed.push(key);
        }
        Ok(completed)
    }

    /// An attempt that is begun again cannot be completed from what the first one said.
    pub(super) fn withdraw_intent(&self, key: Key, attempt: u32) -> Result<(), Trouble> {
        if !self.intended(key, attempt) {
            return Ok(());
        }
        let file = intent_file(key, attempt);
        self.place.remove(&file).at(file)
    }

    /// Did this attempt come so far that it may be completed?
    pub(super) fn intended(&self, key: Key, attempt: u32) -> bool {
        self.place.is_there(&intent_file(key, attempt)).unwrap_or(false)
    }

    /// What all attempts that came so far are going to vouch for.
    pub(super) fn intents(&self) -> Result<Vec<(Key, u32, IndexRecord)>, Trouble> {
        let mut intents = Vec::new();
        for name in self.names(&format!("{DIR}/tmp"))? {
            let Some((key, attempt)) = parse_attempt_dir(&name) else { continue };
            if let Some(rec) = self.intent(key, attempt)? {
                intents.push((key, attempt, rec));
            }
        }
        Ok(intents)
    }

    /// What an attempt was going to vouch for; `None` if it did not come so far.
    pub(super) fn intent(&self, key: Key, attempt: u32) -> Result<Option<IndexRecord>, Trouble> {
        let file = intent_file(key, attempt);
        let bytes = match self.place.read(&file, limits::INDEX_FILE_BYTES_MAX) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::FBIG) => return Ok(None),
            other => other.at(file)?,
        };
        Ok(IndexRecord::parse(&bytes).filter(|r| r.info.key == key && plausible(r)))
    }

    /// The slots' manifests, if nothing of the dataset is missing and it is wanted.
    fn completable(
        &self,
        rec: &IndexRecord,
        attempt: u32,
    ) -> Result<Option<Vec<Manifest>>, Trouble> {
        let (records, _) = self.read_index()?;
        if self.job()? != rec.job || records.iter().any(|there| rec.overtaken(there)) {
            return Ok(None);
        }
        let mut manifests = Vec::new();
        let mut buf = Vec::new();
        for (slot, _) in &rec.slots {
            let whole = self.read_slot(rec, *slot).and_then(|m| {
                self.is_whole(&m, attempt, &mut buf)?;
                Ok(m)
            });
            match whole {
                Ok(manifest) => manifests.push(manifest),
                Err(Trouble { cause, .. }) if lost(&cause) => return Ok(None),
                Err(trouble) => return Err(trouble),
            }
        }
        Ok(Some(manifests))
    }

    /// Is every file there and whole, under one of its names? Asked for all slots before anything is renamed.
    fn is_whole(&self, m: &Manifest, attempt: u32, buf: &mut Vec<u8>) -> Result<(), Trouble> {
        for entry in &m.files {
            let place = staged(m.key, attempt, &entry.path);
            match self.fs.open(&place, How::Read) {
                Ok(file) => verified(&*file, entry, m.chunk_bytes, buf, &mut |_, _| Ok(()))?,
                Err(Errno::NOENT | Errno::NOTDIR) => self.check_file(m, entry, buf, &mut |_| {})?,
                Err(e) => return Err(e).at(entry.path.as_str()),
            }
        }
        Ok(())
    }

    /// Attempts that have files under temporary names.
    pub(super) fn staged_attempts(&self, key: Key) -> Vec<u32> {
        let names = self.names(&format!("{DIR}/tmp")).unwrap_or_default();
        let attempts = names.iter().filter_map(|n| parse_attempt_dir(n));
        attempts.filter(|(k, _)| *k == key).map(|(_, attempt)| attempt).collect()
    }
}

/// Does this say that the dataset cannot be completed, however often it is tried?
fn lost(cause: &Cause) -> bool {
    matches!(
        cause,
        Cause::Missing | Cause::Damaged | Cause::Size { .. } | Cause::Malformed | Cause::NoDataset
    )
}
