//! The index: which datasets are complete in the prefix.

use rustix::io::Errno;
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::index::{DIR, IndexRecord, SlotFile};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, DatasetInfo, Trouble};
use stanchion_format::{limits, name};

use super::{BadRecord, Prefix, json, record_file, slot_file};
use crate::trouble::At;

impl Prefix {
    /// All records, by key. Damaged ones, and those under a wrong name or of another job, are reported
    /// and never used (FM-F9).
    pub fn read_index(&self) -> Result<(Vec<IndexRecord>, Vec<BadRecord>), Trouble> {
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for name in self.record_names()? {
            match self.read_record(&name) {
                Ok(Some(record)) => good.push(record),
                Ok(None) => {}
                Err(trouble) => {
                    bad.push(BadRecord { file: format!("{DIR}/index/{name}"), trouble })
                }
            }
        }
        good.sort_by_key(|r| r.info.key);
        self.part_strangers(&mut good, &mut bad);
        Ok((good, bad))
    }

    /// Records of another job than the newest one's were put here by mistake.
    fn part_strangers(&self, good: &mut Vec<IndexRecord>, bad: &mut Vec<BadRecord>) {
        let file = format!("{DIR}/job");
        let written = self.place.read(&file, super::NOTE_BYTES_MAX).ok();
        let job = written.and_then(|b| stanchion_format::index::JobFile::parse(&b)).map(|f| f.job);
        let Some(job) = job.or(good.last().map(|r| r.job)) else { return };
        good.retain(|record| {
            if record.job != job {
                let file = record_file(record.info.key);
                let trouble = Trouble::new(Cause::NoDataset).file(&file);
                bad.push(BadRecord { file, trouble });
            }
            record.job == job
        });
    }

    /// File names of records, in order.
    pub(super) fn record_names(&self) -> Result<Vec<String>, Trouble> {
        let mut names = self.names(&format!("{DIR}/index"))?;
        names.retain(|n| n.ends_with(".json") && !n.starts_with('.'));
        names.sort();
        Ok(names)
    }

    /// The record in the file of this name; `None` if it has just been withdrawn.
    pub(super) fn read_record(&self, name: &str) -> Result<Option<IndexRecord>, Trouble> {
        let file = format!("{DIR}/index/{name}");
        let bytes = match self.place.read(&file, limits::INDEX_FILE_BYTES_MAX) {
            Err(Errno::NOENT) => return Ok(None),
            other => other.at(file.as_str())?,
        };
        let record = IndexRecord::parse(&bytes)
            .filter(|r| IndexRecord::file_name(r.info.key) == name && plausible(r));
        record.map(Some).ok_or_else(|| Trouble::new(Cause::Malformed).file(file))
    }

    /// The dataset's record, if it has one that is good.
    pub(super) fn record(&self, key: Key) -> Result<Option<IndexRecord>, Trouble> {
        self.read_record(&IndexRecord::file_name(key))
    }

    /// One slot's manifest, verified against the record.
    pub fn read_slot(&self, rec: &IndexRecord, slot: SlotId) -> Result<Manifest, Trouble> {
        if let Some(attempt) = rec.containers {
            return Ok(self.container(rec, attempt, slot)?.into_manifest());
        }
        let file = slot_file(rec.info.key, slot);
        let malformed = || Trouble::new(Cause::Malformed).slot(slot).file(&file);
        let want = rec.slots.iter().find(|(s, _)| *s == slot).ok_or_else(malformed)?.1;
        let bytes = self.place.read(&file, limits::INDEX_FILE_BYTES_MAX);
        let bytes = bytes.at(file.as_str()).map_err(|t| t.slot(slot))?;
        let manifest = SlotFile::parse(&bytes).ok_or_else(malformed)?.manifest;
        let right = manifest.key == rec.info.key
            && manifest.slot == slot
            && manifest.chunk_bytes == rec.info.chunk_bytes
            && manifest.crc() == want;
        if right { Ok(manifest) } else { Err(malformed()) }
    }

    /// Makes the record appear, whole and durable (FM-S9), unless a higher epoch was taken, or the job was led on
    /// without whoever flushed this: then its files may have been replaced since (`Fenced`, FM-S10, FM-S11). A record
    /// that vouches for the same is as good; one that does not is never replaced (`State`), except if it is damaged.
    pub fn write_index(&self, rec: &IndexRecord) -> Result<(), Trouble> {
        self.not_led_past(rec).map_err(|t| t.file(record_file(rec.info.key)))?;
        self.write_record(rec)
    }

    /// Has nobody led the job on without those who write this record?
    pub(super) fn not_led_past(&self, rec: &IndexRecord) -> Result<(), Trouble> {
        let led_past = self.read_index()?.0.iter().any(|there| rec.led_past(there));
        // A later incarnation that is about to write its record has withdrawn those of the files it replaced.
        if led_past || self.intents()?.iter().any(|(_, _, there)| there.inc > rec.inc) {
            return Err(Trouble::new(Cause::Fenced));
        }
        Ok(())
    }

    /// The same for whoever completes what others left.
    pub(super) fn write_record(&self, rec: &IndexRecord) -> Result<(), Trouble> {
        let file = record_file(rec.info.key);
        if *rec != rec.clone().seal() || !plausible(rec) {
            return Err(Trouble::new(Cause::Malformed).file(file));
        }
        if self.newest_epoch()? > rec.epoch {
            return Err(Trouble::new(Cause::Fenced).file(file));
        }
        let bytes = json(rec);
        if bytes.len() as u64 > limits::INDEX_FILE_BYTES_MAX {
            return Err(Errno::FBIG).at(file);
        }
        if !self.put_new(&file, &bytes)? {
            match self.record(rec.info.key) {
                Ok(Some(there)) if there.slots == rec.slots && there.info == rec.info => {}
                Ok(_) => return Err(Trouble::new(Cause::State).file(file)),
                Err(Trouble { cause: Cause::Malformed, .. }) => self.put(&file, &bytes)?,
                Err(trouble) => return Err(trouble),
            }
        }
        self.forget_attempts(rec.info.key);
        Ok(())
    }

    /// The attempt whose containers the dataset's record vouches for, if it has one.
    fn recorded_attempt(&self, key: Key) -> Result<Option<u32>, Trouble> {
        Ok(self.record(key)?.and_then(|rec| rec.containers))
    }

    /// The dataset has its record, or shall have none: no other attempt is of use any more.
    pub(super) fn forget_attempts(&self, key: Key) {
        for attempt in self.staged_attempts(key) {
            self.staged_abort(key, attempt);
        }
        match self.recorded_attempt(key) {
            Ok(keep) => self.forget_containers(key, keep),
            Err(trouble) => tracing::debug!(?trouble, "containers stay until they are swept"),
        }
    }

    /// Removes what an attempt wrote under names that nobody reads. What cannot be removed is logged and swept later.
    pub fn flush_abort(&self, key: Key, attempt: u32) {
        self.staged_abort(key, attempt);
        // A record that came late, behind a deadline, counts all the same.
        if self.recorded_attempt(key).is_ok_and(|recorded| recorded != Some(attempt)) {
            self.container_abort(key, attempt);
        }
    }

    /// Makes the record disappear, durably. The files stay.
    pub fn withdraw(&self, key: Key) -> Result<(), Trouble> {
        self.writable()?;
        let file = record_file(key);
        self.place.remove(&file).at(file)?;
        self.forget_attempts(key);
        Ok(())
    }
}

/// Can core compute with this record? Its checksum holds off accidents, not programs with bugs.
pub(super) fn plausible(rec: &IndexRecord) -> bool {
    let info = &rec.info;
    let slots = info.sets.slots;
    let ordered = rec.slots.windows(2).all(|w| w[0].0 < w[1].0);
    name::check_dataset(&info.name).is_ok()
        && (limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX).contains(&info.chunk_bytes)
        && (1..=limits::SLOTS_MAX).contains(&slots)
        && (2..=limits::SET_SIZE_MAX).contains(&info.sets.set_size)
        && rec.ancestry.0.len() <= limits::ANCESTRY_ENTRIES_MAX
        && ordered
        && rec.slots.iter().all(|(s, _)| s.0 < slots)
        && covers(info)
        && info
            .placement
            .iter()
            .all(|p| rec.slots.binary_search_by_key(&p.slot, |(s, _)| *s).is_ok())
}

/// Does the placement name each rank once?
fn covers(info: &DatasetInfo) -> bool {
    let mut next = 0u64;
    for range in info.placement.iter() {
        if u64::from(range.first.0) != next || range.count == 0 {
            return false;
        }
        next += u64::from(range.count);
    }
    (1..=limits::RANKS_MAX).contains(&info.ranks) && next == u64::from(info.ranks)
}
