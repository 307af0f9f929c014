//! Incremental checkpoints: of regions, only the pages that changed are copied; the rest of the dataset's file is what
//! the dataset before it has, and stays in the agent's memory for both (docs/protocol.md, `Base`).
//!
//! With copy-on-write a full one is copied behind the caller, and so is complete or dropped after the call has returned;
//! an increment is copied at once, but its dataset waits for the ranks whose part is full. Either is a base only when
//! this rank has heard that it is complete (FM-P13).

use crate::behind::Copier;
use crate::client::{Begun, Client};
use crate::error::Error;
use crate::pool::{PoolTimes, PoolWriter, Put};
use crate::regions::{Region, placed};
use stanchion_format::ids::{Key, Level};
use stanchion_format::limits::MEMORY_PARTS_MAX;
use stanchion_format::regions::{ALIGN, RegionAt, encode};
use stanchion_mem::track::{Changes, Mark, RegionId, Run, SliceTracker, Wanted};
use std::time::Instant;

/// Hash blocks are pages: what the kernel tells by.
const HASH_BLOCK: usize = 4096;

/// Of the last extent that an increment takes, half is unused: of such as the agent reserves for increments, so much of a
/// full dataset.
const UNUSED_PART: u64 = 128;

/// The next dataset has begun, so the last one is complete or dropped, and all agents have stored which; to this rank's
/// that may be on its way yet. Longest wait for it, milliseconds; then the next one is full.
const HEARD_MS: u64 = 100;

/// By what to tell the tracker that a dataset is committed.
type Marks = Vec<(RegionId, Mark)>;

/// What the last checkpoint of regions stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Size of this rank's part, bytes.
    pub bytes: u64,
    /// Of that: copied, bytes.
    pub copied: u64,
}

/// The dataset that the next one may share bytes with.
#[derive(Clone, Debug)]
struct Base {
    key: Key,
    path: String,
    placed: Vec<RegionAt>,
    /// Copied since the last full dataset, bytes.
    copied: u64,
    /// Datasets since then.
    count: u64,
}

/// What is a base when its dataset is complete, and what the tracker may forget then.
#[derive(Debug)]
struct Next {
    base: Base,
    marks: Marks,
}

/// What is remembered between incremental checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Increment {
    tracker: Option<SliceTracker>,
    base: Option<Base>,
    /// Of the last one, if ranks were still copying when it returned.
    behind: Option<Next>,
    stored: Stored,
}

impl Increment {
    /// The next one is full: after a restart, a loss, or anything that is not understood.
    pub(crate) fn forget(&mut self) {
        (self.base, self.behind) = (None, None);
    }

    /// The first region, as it is now, of which the kernel tells what changes.
    pub(crate) fn tracked(&self, regions: &[Region<'_>]) -> Option<u64> {
        let tracker = self.tracker.as_ref()?;
        regions
            .iter()
            .map(|r| (RegionId(r.id), r.bytes))
            .find_map(|(id, bytes)| tracker.kernel_watches(id, bytes).then_some(id.0))
    }

    /// Its dataset is complete.
    fn completed(&mut self, next: Option<Next>) {
        let Some(Next { base, marks }) = next else { return };
        if let Some(tracker) = &mut self.tracker {
            tracker.committed(&marks);
        }
        self.base = Some(base);
    }
}

impl Client {
    /// As [`Client::checkpoint`], but only what changed since the last dataset of this kind is copied. Full: the first
    /// one, the first after a restart, after a dataset that was dropped, after `incremental_max` others or
    /// nearly as many copied bytes as a full one has, where most of it changed, and where regions were added, removed or
    /// resized. Every dataset can be restarted from, and deleted, like any other. Collective.
    pub fn checkpoint_incremental(
        &mut self,
        dataset: &str,
        flags: u32,
        regions: &[Region<'_>],
    ) -> Result<Begun, Error> {
        let begun = self.begin(dataset, flags)?;
        if !self.enabled() {
            return self.complete(true).map(|()| begun);
        }
        let (stored, next) = match self.store_changes(&begun, regions, false) {
            Ok((_, next)) => (Ok(()), next),
            Err(error) => (Err(error), None),
        };
        self.increment.forget();
        self.complete_regions(stored)?;
        self.increment.completed(next);
        Ok(begun)
    }

    /// As [`Client::checkpoint_incremental`], but one that is full is copied behind the caller as by
    /// [`Client::checkpoint_cow`]; what changed is copied before the call returns. Ranks may differ in which of both they
    /// do, so all end the dataset in the same way, and it is complete when the slowest has copied. If it is dropped
    /// after all, the next one is full. Collective.
    pub fn checkpoint_cow_incremental(
        &mut self,
        dataset: &str,
        flags: u32,
        regions: &[Region<'_>],
    ) -> Result<Begun, Error> {
        let begun = self.begin(dataset, flags)?;
        if !self.enabled() {
            return self.complete(true).map(|()| begun);
        }
        let (stored, next) = match self.store_changes(&begun, regions, true) {
            Ok((copier, next)) => (Ok(copier), next),
            Err(error) => (Err(error), None),
        };
        self.increment.forget();
        self.snapshot_copies(stored)?;
        self.increment.behind = next;
        Ok(begun)
    }

    /// What was copied behind when the last one returned is a base, if it came to be complete: this dataset began after
    /// that was decided.
    fn hear_of_base(&mut self) -> Result<(), Error> {
        let Some(next) = self.increment.behind.take() else { return Ok(()) };
        match self.wait(next.base.key.no, Level::Cached, HEARD_MS) {
            Ok(()) => self.increment.completed(Some(next)),
            // FM-P13: what is not known to be complete is no base, and what changed before it comes again.
            Err(Error::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What the last checkpoint of regions stored of this rank. Local.
    pub fn stored(&self) -> Stored {
        self.increment.stored
    }

    /// Stores what changed, or all; `behind`: all of it may be copied behind the caller.
    fn store_changes(
        &mut self,
        begun: &Begun,
        regions: &[Region<'_>],
        behind: bool,
    ) -> Result<(Option<Copier>, Option<Next>), Error> {
        let name = self.regions_file(&begun.name);
        let (placed, end) = placed(&name, regions)?;
        let start = Instant::now();
        self.hear_of_base()?;
        let (marks, changes) = self.changes(regions)?;
        let changed = self.shareable(regions, &placed, &changes);
        // To look for what need not be copied is part of copying.
        self.spend(PoolTimes { copy: start.elapsed(), ..PoolTimes::default() });
        let path = self.regions_path(&begun.name);
        let key = self.writing_key()?;
        let (put, copier) = match (&changed, behind) {
            (Some(runs), _) => (self.pool_changes(&path, regions, &placed, runs)?, None),
            (None, true) => self.pool_regions_behind(begun, regions, &placed, end)?,
            (None, false) => (self.pool_regions(&begun.name, regions, &placed, end)?, None),
        };
        if put == Put::TooLarge || changed.is_none() {
            self.increment.stored = Stored { bytes: end, copied: end };
        }
        if behind && changed.is_some() {
            self.snapshots.copied_at_once(put == Put::Done);
        }
        if put == Put::TooLarge {
            return self.file_regions(&name, regions, &placed, end).map(|()| (None, None));
        }
        let (count, copied) = match (&changed, &self.increment.base) {
            (Some(_), Some(base)) => {
                (base.count + 1, base.copied.saturating_add(self.increment.stored.copied))
            }
            _ => (0, 0),
        };
        let base = Base { key, path, placed, copied, count };
        Ok((copier, Some(Next { base, marks })))
    }

    /// What changed in each region, and by what name to remember it.
    fn changes(&mut self, regions: &[Region<'_>]) -> Result<(Marks, Vec<Changes>), Error> {
        let wanted = match self.settings().text("incremental_tracking") {
            "scan" => Wanted::Scan,
            "hash" => Wanted::Hash { block: HASH_BLOCK },
            _ => Wanted::Auto,
        };
        let mut tracker = match self.increment.tracker.take() {
            Some(tracker) => tracker,
            None => SliceTracker::new(wanted)?.0,
        };
        let slices: Vec<(RegionId, &[u8])> =
            regions.iter().map(|r| (RegionId(r.id), r.bytes)).collect();
        let collected = tracker.collect(&slices)?;
        self.increment.tracker = Some(tracker);
        let marks = slices.iter().zip(&collected).map(|((id, _), c)| (*id, c.mark)).collect();
        Ok((marks, collected.into_iter().map(|c| c.changes).collect()))
    }

    /// The runs of each region that must be copied, if the rest may be the base's.
    fn shareable(
        &self,
        regions: &[Region<'_>],
        placed: &[RegionAt],
        changes: &[Changes],
    ) -> Option<Vec<Vec<Run>>> {
        let base = self.increment.base.as_ref()?;
        if base.placed != placed || base.count >= self.settings().number("incremental_max") {
            return None;
        }
        let (mut parts, mut changed) = (0, 0u64);
        let mut all = Vec::with_capacity(regions.len());
        for (region, changes) in regions.iter().zip(changes) {
            let runs = match changes {
                Changes::Runs(runs) => runs.clone(),
                Changes::All => vec![Run { offset: 0, len: region.bytes.len() }],
            };
            parts += runs.len() + 2;
            changed += runs.iter().map(|r| r.len as u64).sum::<u64>();
            all.push(runs);
        }
        // While the next full one is written, the last one and all since are still there; and so they are while the first
        // increment of that is written. What is reserved are three full ones: room for this one and that one is left.
        let full: u64 = regions.iter().map(|r| r.bytes.len() as u64).sum();
        let unused = full / UNUSED_PART;
        let since = base.copied.saturating_add(base.count.saturating_mul(unused));
        let fits = since.saturating_add(changed.saturating_add(unused).saturating_mul(2)) <= full;
        (fits && parts < MEMORY_PARTS_MAX / 2).then_some(all)
    }

    fn pool_changes(
        &mut self,
        path: &str,
        regions: &[Region<'_>],
        placed: &[RegionAt],
        runs: &[Vec<Run>],
    ) -> Result<Put, Error> {
        let head = encode(placed);
        let changed: usize = runs.iter().flatten().map(|r| r.len).sum();
        let copied = head.len() as u64 + changed as u64;
        let mut writer = PoolWriter::new(copied.saturating_add(ALIGN)).handing(self).over();
        if writer.put(self, &head)? == Put::TooLarge {
            return Ok(Put::TooLarge);
        }
        writer.align();
        for ((region, at), runs) in regions.iter().zip(placed).zip(runs) {
            // The zeros in between are the base's too.
            writer.same(at.offset - writer.written());
            if writer.put_changed(self, region.bytes, runs)? == Put::TooLarge {
                return Ok(Put::TooLarge);
            }
        }
        let base = self.increment.base.as_ref().map(|b| (b.key, b.path.clone()));
        let (file, bytes, times) = writer.finish(path.to_owned(), base);
        self.increment.stored = Stored { bytes, copied };
        self.add_memory(file, bytes, times);
        Ok(Put::Done)
    }
}
