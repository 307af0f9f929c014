//! The persistent directory.

use std::path::{Path, PathBuf};

use crate::cache::Cache;
use stanchion_format::ids::{Epoch, JobId, Key, RankId, SlotId};
use stanchion_format::index::{HaltFile, IndexRecord, LeaseFile};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, DatasetInfo, Trouble};

/// The persistent directory.
#[derive(Debug)]
pub struct Prefix {
    root: PathBuf,
}

/// A record of the index that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    /// Its file, below the prefix.
    pub file: String,
    /// What is wrong with it.
    pub trouble: Trouble,
}

fn missing<T>() -> Result<T, Trouble> {
    Err(Trouble::new(Cause::State))
}

impl Prefix {
    /// Opens the prefix for a job.
    pub fn open(root: &Path) -> Result<Prefix, Trouble> {
        Ok(Prefix { root: root.to_owned() })
    }
    /// Opens the prefix for tools that only look.
    pub fn open_readonly(root: &Path) -> Result<Prefix, Trouble> {
        Ok(Prefix { root: root.to_owned() })
    }
    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// The job's id: made once.
    pub fn job(&self) -> Result<JobId, Trouble> {
        missing()
    }
    /// Takes the next epoch (FM-S11).
    pub fn take_epoch(&self) -> Result<Epoch, Trouble> {
        missing()
    }
    /// The highest epoch that was taken; 0 if none was.
    pub fn newest_epoch(&self) -> Result<Epoch, Trouble> {
        missing()
    }
    /// All records, by key; and those that are damaged.
    pub fn read_index(&self) -> Result<(Vec<IndexRecord>, Vec<BadRecord>), Trouble> {
        missing()
    }
    /// One slot's manifest, verified against the record.
    pub fn read_slot(&self, _rec: &IndexRecord, _slot: SlotId) -> Result<Manifest, Trouble> {
        missing()
    }
    /// Copies these ranks' files into the cache as `slot`, verifying every chunk.
    pub fn fetch(
        &self,
        _cache: &Cache,
        _info: &DatasetInfo,
        _slot: SlotId,
        _ranks: &[(RankId, u32)],
        _cancel: &dyn Fn() -> bool,
    ) -> Result<Manifest, Trouble> {
        missing()
    }
    /// Copies a slot's files under temporary names into the prefix, durably.
    pub fn flush_prepare(
        &self,
        _cache: &Cache,
        _m: &Manifest,
        _attempt: u32,
        _cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        missing()
    }
    /// Gives them their names, durably (FM-S10). May be repeated.
    pub fn flush_publish(&self, _m: &Manifest, _attempt: u32) -> Result<(), Trouble> {
        missing()
    }
    /// Removes the temporary names of an attempt.
    pub fn flush_abort(&self, _key: Key, _attempt: u32) {}
    /// Makes the record appear (FM-S9, FM-S11).
    pub fn write_index(&self, _rec: &IndexRecord) -> Result<(), Trouble> {
        missing()
    }
    /// Makes the record disappear, durably. The files stay.
    pub fn withdraw(&self, _key: Key) -> Result<(), Trouble> {
        missing()
    }
    /// Withdraws the record, then removes the files that no other record vouches for.
    pub fn delete(&self, _key: Key) -> Result<(), Trouble> {
        missing()
    }
    /// Reads everything that the record vouches for; what is wrong.
    pub fn verify(
        &self,
        _rec: &IndexRecord,
        _progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<Trouble>, Trouble> {
        missing()
    }
    /// What `stanchion halt` wants, if anything.
    pub fn read_halt(&self) -> Result<Option<HaltFile>, Trouble> {
        missing()
    }
    /// Says what `stanchion halt` wants.
    pub fn write_halt(&self, _halt: &HaltFile) -> Result<(), Trouble> {
        missing()
    }
    /// Nothing is wanted any more.
    pub fn clear_halt(&self) -> Result<(), Trouble> {
        missing()
    }
    /// Who uses the prefix, if anyone said so.
    pub fn read_lease(&self) -> Result<Option<LeaseFile>, Trouble> {
        missing()
    }
    /// Says who uses the prefix; `Fenced` if a higher epoch does.
    pub fn write_lease(&self, _lease: &LeaseFile) -> Result<(), Trouble> {
        missing()
    }
    /// Nobody uses the prefix any more.
    pub fn remove_lease(&self) -> Result<(), Trouble> {
        missing()
    }
    /// Removes what earlier runs left under temporary names, but for these attempts.
    pub fn sweep(&self, _keep: &[(Key, u32)]) -> Result<(), Trouble> {
        missing()
    }
}
