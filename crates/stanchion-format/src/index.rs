//! What the prefix says about itself: JSON that people can read, immutable once it is there.
//!
//! ```text
//! PREFIX/.stanchion/job                     the job's id, written once
//! PREFIX/.stanchion/epoch/NNNNNNNNNN        taken by O_EXCL: the fencing epochs (FM-S11)
//! PREFIX/.stanchion/data/KEY/slot.NNNNNN    manifest of each slot, JSON (SlotFile); or, with containers,
//! PREFIX/.stanchion/data/KEY/a.ATTEMPT/c.NNNNNN    what each slot has (see [`crate::container`])
//! PREFIX/.stanchion/index/NO.INC.json       record of a complete dataset (IndexRecord), made by link()
//! PREFIX/.stanchion/tmp/KEY.ATTEMPT/...     files that are being written
//! PREFIX/.stanchion/pins/KEY                the dataset is not to be deleted
//! PREFIX/.stanchion/halt.json               wishes of `stanchion halt`
//! PREFIX/.stanchion/lease.json              who uses the prefix now (FM-C5)
//! ```

use crate::checksum::{Crc, crc64};
use crate::ids::{Ancestry, Epoch, Incarnation, JobId, Key, RankId, SlotId};
use crate::manifest::Manifest;
use crate::peer::{DatasetInfo, Times};
use serde::{Deserialize, Serialize};

/// Our directory in the prefix.
pub const DIR: &str = ".stanchion";
/// Version of these files.
pub const INDEX_VERSION: u32 = 1;

/// What a pin's file says; nobody reads it.
pub const PIN: &[u8] = b"{\"version\": 1}\n";

/// How a dataset lies in the prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// As the application's own files, under their names.
    #[default]
    Files,
    /// As a container for each slot, under names of ours.
    Containers,
}

/// A complete dataset in the prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexRecord {
    /// [`INDEX_VERSION`].
    pub version: u32,
    /// The job.
    pub job: JobId,
    /// The epoch of who flushed it.
    pub epoch: Epoch,
    /// The incarnation that flushed it.
    pub inc: Incarnation,
    /// Its ancestry.
    pub ancestry: Ancestry,
    /// The dataset.
    pub info: DatasetInfo,
    /// When it became persistent, seconds since 1970.
    pub unix_s: u64,
    /// For each slot the checksum of its manifest ([`Manifest::crc`]).
    pub slots: Vec<(SlotId, Crc)>,
    /// The attempt whose containers have its data; none: the application's own files have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containers: Option<u32>,
    /// Where its time went until it was written; older records have none, and are what they are without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// Checksum of this record with this field 0, see [`IndexRecord::seal`].
    pub crc: Crc,
}

impl IndexRecord {
    fn compute(&self) -> Crc {
        let mut copy = self.clone();
        copy.crc = Crc(0);
        crc64(&serde_json::to_vec(&copy).expect("a record always encodes"))
    }

    /// Sets `crc`.
    pub fn seal(mut self) -> IndexRecord {
        self.crc = self.compute();
        self
    }

    /// Parses and verifies; `None` if it is not what it was when sealed.
    pub fn parse(bytes: &[u8]) -> Option<IndexRecord> {
        let record: IndexRecord = serde_json::from_slice(bytes).ok()?;
        (record.version == INDEX_VERSION && record.compute() == record.crc).then_some(record)
    }

    /// How its data lies in the prefix.
    pub fn layout(&self) -> Layout {
        if self.containers.is_some() { Layout::Containers } else { Layout::Files }
    }

    /// Was the job led on past the incarnation that wants to write this record, as `there` in the index shows? A later
    /// one wrote that; or one whose line this one does not go on with, for it goes on with an earlier one's. Then what
    /// this record is of is not the newest any more, however late it comes.
    pub fn led_past(&self, there: &IndexRecord) -> bool {
        let parent = self.ancestry.0.iter().map(|(inc, _)| *inc).max().unwrap_or_default();
        let between = parent.epoch.0 > 0 && parent < there.inc && there.inc < self.inc;
        there.inc > self.inc || (between && !self.ancestry.admits(self.inc, there.info.key))
    }

    /// May nobody complete the flush that this record was intended for? It has its record, a newer dataset may have
    /// taken its names since, or the line of one that was written later does not know it.
    pub fn overtaken(&self, there: &IndexRecord) -> bool {
        let key = self.info.key;
        let abandoned = there.inc > self.inc && !there.ancestry.admits(there.inc, key);
        there.info.key >= key || abandoned
    }

    /// The record's file name.
    pub fn file_name(key: Key) -> String {
        format!("{:012}.{}.{}.json", key.no.0, key.inc.epoch.0, key.inc.count)
    }
}

/// The directory name of a dataset below `data/`, `tmp/` and in caches.
pub fn key_dir(key: Key) -> String {
    format!("{:012}.{}.{}", key.no.0, key.inc.epoch.0, key.inc.count)
}

/// The manifest of one slot as it lies in the prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotFile {
    /// [`INDEX_VERSION`].
    pub version: u32,
    /// The manifest.
    pub manifest: Manifest,
    /// [`Manifest::crc`].
    pub crc: Crc,
}

impl SlotFile {
    /// Parses and verifies.
    pub fn parse(bytes: &[u8]) -> Option<SlotFile> {
        let file: SlotFile = serde_json::from_slice(bytes).ok()?;
        let good = file.version == INDEX_VERSION
            && file.manifest.check().is_ok()
            && file.manifest.crc() == file.crc;
        good.then_some(file)
    }
}

/// The job's id as it lies in the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFile {
    /// [`INDEX_VERSION`].
    pub version: u32,
    /// The id.
    pub job: JobId,
    /// Checksum of the id's eight bytes, little endian.
    pub crc: Crc,
}

impl JobFile {
    /// Of this job.
    pub fn new(job: JobId) -> JobFile {
        JobFile { version: INDEX_VERSION, job, crc: crc64(&job.0.to_le_bytes()) }
    }

    /// Parses and verifies.
    pub fn parse(bytes: &[u8]) -> Option<JobFile> {
        let file: JobFile = serde_json::from_slice(bytes).ok()?;
        (file == JobFile::new(file.job)).then_some(file)
    }
}

/// Wishes of `stanchion halt`, read by the runner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HaltFile {
    /// End at the next opportunity: after the next complete checkpoint, or at `SCR_Should_exit`.
    pub now: bool,
    /// End the application at once, without a further checkpoint.
    pub immediately: bool,
    /// End after this many further checkpoints.
    pub after_checkpoints: Option<u64>,
    /// End before this time, seconds since 1970 (less the setting `halt_s`).
    pub before_unix_s: Option<u64>,
    /// End after this time, seconds since 1970.
    pub after_unix_s: Option<u64>,
}

/// Who uses the prefix now; rewritten every few seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFile {
    /// The holder's epoch.
    pub epoch: Epoch,
    /// Where it runs, for people.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// When it last said so, seconds since 1970.
    pub unix_s: u64,
    /// `run`, `orphans` when agents flush without a runner, or `scavenge` when those are gone as well.
    pub role: String,
}

/// The directory in an agent's cache where one rank writes its files of a dataset.
pub fn cache_rank_dir(cache: &str, key: Key, slot: SlotId, rank: RankId) -> String {
    format!("{}/r{:06}", cache_slot_dir(cache, key, slot), rank.0)
}

/// The directory in an agent's cache of one slot's part of a dataset. Its parity is the file `parity` there.
pub fn cache_slot_dir(cache: &str, key: Key, slot: SlotId) -> String {
    format!("{cache}/{}/s{:06}", key_dir(key), slot.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::DatasetNo;
    use crate::layout::{Asked, Scheme, Sets};

    fn inc(epoch: u64, count: u32) -> Incarnation {
        Incarnation { epoch: Epoch(epoch), count }
    }

    /// A record of dataset `no` of incarnation `of`, flushed by `by`, whose line is `line`.
    fn record(
        (no, of): (u64, Incarnation),
        by: Incarnation,
        line: &[(Incarnation, u64)],
    ) -> IndexRecord {
        let asked = Asked { scheme: Scheme::Single, set_size: 2 };
        IndexRecord {
            version: INDEX_VERSION,
            job: JobId(1),
            epoch: by.epoch,
            inc: by,
            ancestry: Ancestry(line.iter().map(|(i, no)| (*i, DatasetNo(*no))).collect()),
            info: DatasetInfo {
                key: Key { no: DatasetNo(no), inc: of },
                name: format!("ckpt.{no}"),
                flags: 1,
                ranks: 1,
                sets: Sets::new(asked.scheme, 1, asked.set_size),
                chunk_bytes: 4096,
                bytes: 0,
                files: 0,
                placement: Vec::new().into(),
            },
            unix_s: 0,
            slots: Vec::new(),
            containers: None,
            times: None,
            crc: Crc(0),
        }
    }

    #[test]
    fn who_was_left_behind_flushes_nothing() {
        let start = (inc(0, 0), 0);
        let second = [start, (inc(1, 1), 7)];
        let led_on = record((9, inc(1, 2)), inc(1, 2), &second);
        // An agent that slept in the first incarnation; orphans of it; those of the second one.
        let sleeper = record((8, inc(1, 1)), inc(1, 1), &[start]);
        assert!(sleeper.led_past(&led_on) && sleeper.overtaken(&led_on));
        let orphans = record((8, inc(1, 1)), inc(2, 1), &[start, (inc(1, 1), 8)]);
        assert!(orphans.led_past(&led_on));
        let heirs = [start, (inc(1, 1), 7), (inc(1, 2), 10)];
        let heirs = record((10, inc(1, 2)), inc(2, 1), &heirs);
        assert!(!heirs.led_past(&led_on) && !heirs.overtaken(&led_on));
        // What they have in common may be flushed by either.
        let common = record((6, inc(1, 1)), inc(1, 2), &second);
        assert!(!orphans.led_past(&common) && !orphans.overtaken(&common));
        // A job that goes on from an older dataset leaves records of its own past behind.
        let behind = record((9, inc(1, 1)), inc(1, 1), &[start]);
        assert!(!record((7, inc(1, 1)), inc(1, 2), &second).led_past(&behind));
        // A run that could not read what was there knows of no line.
        assert!(!record((1, inc(3, 1)), inc(3, 1), &[start]).led_past(&led_on));
    }

    #[test]
    fn an_abandoned_flush_is_not_completed() {
        let start = (inc(0, 0), 0);
        let intended = record((9, inc(1, 2)), inc(1, 2), &[start, (inc(1, 1), 7)]);
        let other_line = record((8, inc(1, 1)), inc(2, 1), &[start, (inc(1, 1), 8)]);
        assert!(intended.overtaken(&other_line));
        let same_line = [start, (inc(1, 1), 7), (inc(1, 2), 9)];
        assert!(!intended.overtaken(&record((6, inc(1, 1)), inc(1, 3), &same_line)));
        assert!(intended.overtaken(&record((10, inc(1, 3)), inc(1, 3), &same_line)));
    }
}
