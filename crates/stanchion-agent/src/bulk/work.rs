//! Doing one task on a bulk thread.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use stanchion_core::api::{ChunkSource, TaskResult, Work};
use stanchion_core::bugs::Bugs;
use stanchion_core::retention;
use stanchion_format::ids::{AgentId, Key, SlotId, StripeId};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, Times, Trouble};
use stanchion_io::cache::{Cache, Summed};
use stanchion_io::prefix::Prefix;
use tracing::debug;

use super::client::{Clients, blame};
use super::server::Published;
use super::sum::Sum;

/// A task that failed, and by which of its sources.
pub(super) struct Failure {
    pub trouble: Trouble,
    pub source: Option<usize>,
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Failure {
        Failure { trouble, source: None }
    }
}

/// Memory that a thread keeps from task to task.
#[derive(Default)]
pub(super) struct Scratch {
    pub sum: Vec<u8>,
    pub buf: Vec<u8>,
}

/// What tasks work with.
pub(super) struct Tools {
    pub me: AgentId,
    pub cache: Arc<Cache>,
    pub prefix: LazyPrefix,
    pub published: Arc<Published>,
    pub clients: Clients,
    pub durable: bool,
}

/// The prefix, opened when it is first needed: a job without it goes on (FM-V6).
pub(super) struct LazyPrefix {
    root: std::path::PathBuf,
    open: OnceLock<Prefix>,
}

impl LazyPrefix {
    pub fn new(root: std::path::PathBuf) -> LazyPrefix {
        LazyPrefix { root, open: OnceLock::new() }
    }

    fn get(&self) -> Result<&Prefix, Trouble> {
        if let Some(prefix) = self.open.get() {
            return Ok(prefix);
        }
        let prefix = Prefix::open(&self.root)?;
        // Two threads may have opened it; both are the same directory.
        Ok(self.open.get_or_init(|| prefix))
    }
}

pub(super) fn micros(since: Instant) -> u64 {
    since.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
}

impl Tools {
    /// Does it, and says how it ended.
    pub fn perform(
        &self,
        work: Work,
        scratch: &mut Scratch,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> TaskResult {
        self.attempt(work, scratch, cancelled).unwrap_or_else(|f| {
            debug!(trouble = ?f.trouble, source = ?f.source, "a task failed");
            TaskResult::Failed { trouble: f.trouble, source: f.source }
        })
    }

    fn attempt(
        &self,
        work: Work,
        scratch: &mut Scratch,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<TaskResult, Failure> {
        let start = Instant::now();
        let mut times = Times::default();
        match work {
            Work::MakeDirs { key, slot, ranks } => self.cache.make_dirs(key, slot, &ranks)?,
            Work::Stat { key, slot, files } => self.cache.stat(key, slot, &files)?,
            Work::Digest { key, slot, chunk_bytes, files } => {
                let manifest = self.cache.digest(key, slot, chunk_bytes, &files, cancelled)?;
                times.digest_us = micros(start);
                if self.durable {
                    self.cache.make_durable(key, slot, &files, cancelled)?;
                    times.storage_us = micros(start).saturating_sub(times.digest_us);
                }
                return Ok(TaskResult::Digested(Box::new(manifest), times));
            }
            Work::Encode { key, slot, stripe, index, len, chunk_bytes, sources } => {
                let place = Place { key, slot, stripe, index, len, chunk_bytes };
                times = self.encode(place, &sources, scratch, cancelled)?;
            }
            Work::Verify(manifest) => {
                let (bad, bad_files) = self.cache.verify(&manifest, cancelled)?;
                return Ok(TaskResult::Verified { bad, bad_files });
            }
            Work::Rebuild { manifest, chunk, sources } => {
                times = self.rebuild(&manifest, chunk, &sources, scratch, cancelled)?;
            }
            Work::Fetch { info, slot, ranks } => {
                let prefix = self.prefix.get()?;
                let manifest = prefix.fetch(&self.cache, &info, slot, &ranks, cancelled)?;
                return Ok(TaskResult::Fetched(Box::new(manifest)));
            }
            Work::FlushPrepare { manifest, layout, attempt } => {
                let how = (layout, attempt);
                self.prefix.get()?.flush_prepare(&self.cache, &manifest, how, cancelled)?;
                times.storage_us = micros(start);
            }
            Work::FlushPublish { manifest, layout, attempt } => {
                self.prefix.get()?.flush_publish(&manifest, (layout, attempt), cancelled)?;
                times.storage_us = micros(start);
            }
            Work::FlushAbort { key, attempt } => self.prefix.get()?.flush_abort(key, attempt),
            Work::FlushIntend { record, attempt } => {
                self.prefix.get()?.flush_intend(&record, attempt)?;
                times.storage_us = micros(start);
            }
            Work::WriteIndex(record) => {
                self.prefix.get()?.write_index(&record)?;
                times.storage_us = micros(start);
            }
            Work::Prune { keep, .. } => {
                let prefix = self.prefix.get()?;
                let doomed = retention::doomed(
                    &prefix.read_index()?.0,
                    &prefix.pins()?,
                    keep,
                    Bugs::default(),
                );
                doomed.into_iter().try_for_each(|key| prefix.delete(key))?;
            }
            Work::Forget { key, name, delete } => self.forget(key, &name, delete)?,
            Work::Remember(holding) => self.cache.remember(&holding)?,
        }
        Ok(TaskResult::Done(times))
    }

    fn forget(&self, key: Option<Key>, name: &str, delete: bool) -> Result<(), Trouble> {
        let prefix = self.prefix.get()?;
        let (records, _) = prefix.read_index()?;
        let found = records.iter().rev().find(|r| match key {
            Some(key) => r.info.key == key,
            None => r.info.name == name,
        });
        let key = found.ok_or_else(|| Trouble::new(Cause::NoDataset))?.info.key;
        if delete { prefix.delete(key) } else { prefix.withdraw(key) }
    }

    fn encode(
        &self,
        place: Place,
        sources: &[ChunkSource],
        scratch: &mut Scratch,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Times, Failure> {
        let Place { key, slot, stripe, index, len, chunk_bytes } = place;
        let start = Instant::now();
        let Sum { crc, transfer_us } =
            self.add_up(key, (sources, len), false, scratch, cancelled)?;
        let parity = Summed { bytes: &scratch.sum[..len as usize], crc };
        self.cache.write_parity(key, slot, index, chunk_bytes, parity)?;
        debug!(%key, slot = slot.0, stripe = stripe.0, index, len, "parity is stored");
        let encode_us = micros(start).saturating_sub(transfer_us);
        Ok(Times { transfer_us, encode_us, ..Times::default() })
    }

    fn rebuild(
        &self,
        manifest: &Manifest,
        chunk: u64,
        sources: &[ChunkSource],
        scratch: &mut Scratch,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Times, Failure> {
        let start = Instant::now();
        let malformed = || Trouble::new(Cause::Malformed).slot(manifest.slot);
        let at = manifest.chunk(chunk).ok_or_else(malformed)?;
        let what = (sources, at.len);
        // Not trusting: sources that lack the same bits give a right sum, so what comes back would depend on who is first.
        let sum = self.add_up(manifest.key, what, false, scratch, cancelled)?;
        if sum.crc != at.crc {
            // Every source with a checksum was verified: what had none is wrong (FM-S8), one of them.
            let file = manifest.files[at.file].path.clone();
            let mut parities = (0..).zip(sources).filter(|(_, s)| s.crc.is_none()).map(|(i, _)| i);
            let source = parities.next().filter(|_| parities.next().is_none());
            let trouble = match source {
                Some(i) => blame(&sources[i], Cause::Damaged).file(file),
                None => Trouble::new(Cause::Damaged).slot(manifest.slot).file(file),
            };
            return Err(Failure { trouble, source });
        }
        let bytes = &scratch.sum[..at.len as usize];
        self.cache.write_chunk(manifest, chunk, Summed { bytes, crc: sum.crc })?;
        let transfer_us = sum.transfer_us;
        let encode_us = micros(start).saturating_sub(transfer_us);
        Ok(Times { transfer_us, encode_us, ..Times::default() })
    }
}

struct Place {
    key: Key,
    slot: SlotId,
    stripe: StripeId,
    index: u64,
    len: u32,
    chunk_bytes: u32,
}
