//! Removing datasets and leftovers from the prefix.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use stanchion_format::ids::Key;
use stanchion_format::index::{DIR, IndexRecord, SlotFile, key_dir};
use stanchion_format::limits;
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Trouble};

use super::{NEW, Prefix, attempt_dir, parse_attempt_dir, parse_key_dir};
use crate::fs::{self, Kind};
use crate::trouble::At;

impl Prefix {
    /// Withdraws the record, then removes the dataset's files, but for those that another record vouches
    /// for or that were changed in size since. A dataset that is not there is no error, one that is pinned is (`EPERM`).
    pub fn delete(&self, key: Key) -> Result<(), Trouble> {
        self.writable()?;
        self.not_pinned(key)?;
        let manifests = self.manifests_of(key)?;
        let (mut others, _) = self.read_index()?;
        others.retain(|r| r.info.key != key);
        let mut doomed = Vec::new();
        for entry in manifests.iter().flat_map(|m| &m.files) {
            if !self.anyone_vouches(&others, &entry.path)? {
                doomed.push(entry);
            }
        }
        self.withdraw(key)?;
        for entry in &doomed {
            let path = Path::new(&entry.path);
            let ours = self.fs.stat(path);
            if ours.is_ok_and(|s| s.kind == Kind::File && s.bytes == entry.bytes) {
                fs::gone_is_fine(self.fs.unlink(path))
                    .at(entry.path.as_str())
                    .map_err(|t| t.rank(entry.rank))?;
                fs::prune(&*self.fs, path.parent().unwrap_or(Path::new("")), Path::new(""));
            }
        }
        // The manifests last, and durably so: a delete that was interrupted still finds its files.
        let dirs: BTreeSet<&Path> =
            doomed.iter().flat_map(|f| Path::new(&f.path).ancestors().skip(1)).collect();
        for dir in dirs.iter().rev() {
            fs::gone_is_fine(self.fs.sync_dir(dir)).at(dir.display().to_string())?;
        }
        let data = format!("{DIR}/data/{}", key_dir(key));
        self.place.remove_tree(&data).at(data)
    }

    /// All manifests of a dataset that can be read, recorded or not.
    fn manifests_of(&self, key: Key) -> Result<Vec<Manifest>, Trouble> {
        let dir = format!("{DIR}/data/{}", key_dir(key));
        let mut manifests = Vec::new();
        for name in self.names(&dir)?.iter().filter(|n| n.starts_with("slot.")) {
            let file = format!("{dir}/{name}");
            let bytes = self.place.read(&file, limits::INDEX_FILE_BYTES_MAX);
            match bytes.at(file) {
                Err(Trouble { cause: Cause::Missing, .. }) => {}
                Err(trouble) => return Err(trouble),
                Ok(bytes) => manifests
                    .extend(SlotFile::parse(&bytes).map(|f| f.manifest).filter(|m| m.key == key)),
            }
        }
        Ok(manifests)
    }

    /// Removes what earlier runs left under temporary names, but for these attempts, and manifests of
    /// datasets that never came to have a record. For whoever has just taken the prefix over: nobody
    /// else may be flushing (FM-C5).
    pub fn sweep(&self, keep: &[(Key, u32)]) -> Result<(), Trouble> {
        self.writable()?;
        let tmp = format!("{DIR}/tmp");
        for name in self.names(&tmp)? {
            if parse_attempt_dir(&name).is_none_or(|attempt| !keep.contains(&attempt)) {
                let path = format!("{tmp}/{name}");
                self.place.remove_tree(&path).at(path)?;
            }
        }
        for dir in
            [DIR.to_owned(), format!("{DIR}/index"), format!("{DIR}/epoch"), format!("{DIR}/pins")]
        {
            for name in self.names(&dir)?.iter().filter(|n| n.starts_with(NEW)) {
                self.discard(&format!("{dir}/{name}"));
            }
        }
        self.sweep_containers(keep);
        let mut wanted: HashSet<String> = keep.iter().map(|(key, _)| key_dir(*key)).collect();
        // By name only: a damaged record's manifests may still help a person.
        wanted.extend(self.record_names()?.iter().map(|n| n.trim_end_matches(".json").to_owned()));
        let data = format!("{DIR}/data");
        for name in self.names(&data)? {
            if parse_key_dir(&name).is_some() && !wanted.contains(&name) {
                let path = format!("{data}/{name}");
                self.place.remove_tree(&path).at(path)?;
            }
        }
        Ok(())
    }

    /// Removes containers that no record vouches for. Where a record cannot be read they stay.
    fn sweep_containers(&self, keep: &[(Key, u32)]) {
        let names = self.names(&format!("{DIR}/data")).unwrap_or_default();
        for key in names.iter().filter_map(|name| parse_key_dir(name)) {
            if !keep.iter().any(|(k, _)| *k == key) && !self.container_attempts(key).is_empty() {
                self.forget_attempts(key);
            }
        }
    }

    /// Removes the temporary names of an attempt.
    pub(super) fn staged_abort(&self, key: Key, attempt: u32) {
        let dir = attempt_dir(key, attempt);
        if let Err(e) = self.place.remove_tree(&dir) {
            tracing::warn!(%dir, "cannot remove the leftovers of a flush: {e}");
        }
    }

    /// Records but this dataset's, for [`Prefix::flush_publish`].
    pub(super) fn other_records(&self, key: Key) -> Result<Vec<IndexRecord>, Trouble> {
        let (mut records, _) = self.read_index()?;
        records.retain(|r| r.info.key != key);
        Ok(records)
    }
}
