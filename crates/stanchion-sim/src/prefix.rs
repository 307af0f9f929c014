//! The persistent directory: epochs, temporary names, files, manifests, index. As `stanchion-io` keeps it.

use crate::store::entry;
use stanchion_format::ids::{Epoch, Key, RankId, SlotId};
use stanchion_format::index::IndexRecord;
use stanchion_format::manifest::{FileEntry, Manifest};
use stanchion_format::peer::{Cause, DatasetInfo, Trouble};
use std::collections::{BTreeMap, BTreeSet};

/// A manifest, and the bytes of its files.
pub type Container = (Manifest, Vec<Vec<u8>>);

/// The prefix.
#[derive(Clone, Debug, Default)]
pub struct Prefix {
    /// The highest epoch taken.
    pub epoch: u64,
    /// Files under temporary names.
    pub tmp: BTreeMap<(Key, u32, String), Vec<u8>>,
    /// Files in place.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Manifests in place.
    pub slots: BTreeMap<(Key, SlotId), Manifest>,
    /// Containers of attempts.
    pub containers: BTreeMap<(Key, u32, SlotId), Container>,
    /// What attempts are going to vouch for.
    pub intents: BTreeMap<(Key, u32), IndexRecord>,
    /// Records.
    pub index: BTreeMap<Key, IndexRecord>,
    /// When a runner said last that it uses the prefix (microseconds).
    pub lease: Option<u64>,
    /// Everything fails until then (microseconds).
    pub broken_until: u64,
    /// Datasets whose records were withdrawn because their files were replaced.
    pub withdrawn: BTreeSet<Key>,
}

/// How old a lease is that nobody keeps, microseconds.
pub const LEASE_STALE_US: u64 = 6_000_000;
/// The errno of a prefix that fails.
pub const EIO: i32 = 5;

impl Prefix {
    /// Works it now?
    pub fn check(&self, now: u64) -> Result<(), Trouble> {
        if now < self.broken_until { Err(Trouble::new(Cause::Os(EIO))) } else { Ok(()) }
    }

    /// Takes the next epoch exclusively (FM-S11).
    pub fn take_epoch(&mut self, now: u64) -> Result<Epoch, Trouble> {
        self.check(now)?;
        self.epoch += 1;
        self.lease = Some(now);
        Ok(Epoch(self.epoch))
    }

    /// Does a runner live? Orphans take no epoch from one that does: an agent that was given up by its
    /// runner must not take the prefix from it.
    pub fn leased(&self, now: u64) -> bool {
        self.lease.is_some_and(|at| now < at + LEASE_STALE_US)
    }

    /// All records, oldest first.
    pub fn read_index(&self, now: u64) -> Result<Vec<IndexRecord>, Trouble> {
        self.check(now)?;
        Ok(self.index.values().cloned().collect())
    }

    /// Renames one file of an attempt; before it replaces another, what vouches for that is withdrawn (FM-S10).
    /// Who slept while the job was led on replaces nothing.
    pub fn publish_file(&mut self, key: Key, attempt: u32, path: &str) -> Result<(), Trouble> {
        let staged = self.tmp.contains_key(&(key, attempt, path.to_owned()));
        let mine = self.intents.get(&(key, attempt)).filter(|_| staged);
        let void = |k: Key| k != key && self.files.contains_key(path) && self.vouched(k, path);
        if mine.is_some_and(|m| self.index.iter().any(|(k, r)| m.led_past(r) && void(*k))) {
            return Err(Trouble::new(Cause::Fenced));
        }
        self.place_file(key, attempt, path)
    }

    fn place_file(&mut self, key: Key, attempt: u32, path: &str) -> Result<(), Trouble> {
        let from = (key, attempt, path.to_owned());
        let Some(bytes) = self.tmp.remove(&from) else {
            // Renamed by an attempt that was told to do it twice.
            let there = self.files.contains_key(path) && self.vouched(key, path);
            return if there { Ok(()) } else { Err(Trouble::new(Cause::Missing).file(path)) };
        };
        if self.files.contains_key(path) {
            let void: Vec<Key> = self
                .index
                .keys()
                .filter(|k| **k != key && self.vouched(**k, path))
                .copied()
                .collect();
            for k in void {
                self.index.remove(&k);
                self.withdrawn.insert(k);
                self.forget_attempts(k);
            }
        }
        self.files.insert(path.to_owned(), bytes);
        Ok(())
    }

    /// Does a manifest of `key` name this path?
    fn vouched(&self, key: Key, path: &str) -> bool {
        self.slots
            .range((key, SlotId(0))..=(key, SlotId(u32::MAX)))
            .any(|(_, m)| m.files.iter().any(|f| f.path == path))
    }

    /// Says what an attempt is going to vouch for, unless the job was led on without it.
    pub fn intend(&mut self, now: u64, rec: IndexRecord, attempt: u32) -> Result<(), Trouble> {
        self.check(now)?;
        if self.epoch > rec.epoch.0 || self.led_past(&rec) {
            return Err(Trouble::new(Cause::Fenced));
        }
        if rec.containers.is_none() {
            self.intents.insert((rec.info.key, attempt), rec);
        }
        Ok(())
    }

    fn led_past(&self, rec: &IndexRecord) -> bool {
        self.index.values().any(|there| rec.led_past(there))
            || self.intents.values().any(|there| there.inc > rec.inc)
    }

    /// Makes the record appear by link(), unless the job was led on without those who flushed it.
    pub fn write_index(&mut self, now: u64, rec: &IndexRecord) -> Result<(), Trouble> {
        self.check(now)?;
        if self.led_past(rec) {
            return Err(Trouble::new(Cause::Fenced));
        }
        self.write_record(now, rec)
    }

    fn write_record(&mut self, now: u64, rec: &IndexRecord) -> Result<(), Trouble> {
        self.check(now)?;
        let covers: u32 = rec.info.placement.iter().map(|r| r.count).sum();
        let plausible = *rec == rec.clone().seal() && covers == rec.info.ranks && covers > 0;
        if !plausible {
            return Err(Trouble::new(Cause::Malformed));
        }
        if self.epoch > rec.epoch.0 {
            return Err(Trouble::new(Cause::Fenced));
        }
        match self.index.get(&rec.info.key) {
            None => {
                self.index.insert(rec.info.key, rec.clone());
            }
            Some(there) if there.slots == rec.slots && there.info == rec.info => {}
            Some(_) => return Err(Trouble::new(Cause::State)),
        }
        self.forget_attempts(rec.info.key);
        Ok(())
    }

    /// Completes flushes that were interrupted between their intent and their record (FM-L3).
    pub fn flush_complete(&mut self, now: u64, epoch: Epoch) -> Vec<IndexRecord> {
        let mut completed = Vec::new();
        for ((key, attempt), rec) in std::mem::take(&mut self.intents) {
            let overtaken = self.index.values().any(|there| rec.overtaken(there));
            let manifests: Result<Vec<Manifest>, Trouble> =
                rec.slots.iter().map(|(s, _)| self.vouched_slot(&rec, *s).cloned()).collect();
            let Some(manifests) = manifests.ok().filter(|_| !overtaken) else { continue };
            let whole = |m: &Manifest, f: &FileEntry| {
                let from = (key, attempt, f.path.clone());
                let bytes = self.tmp.get(&from).or_else(|| self.files.get(&f.path));
                bytes.is_some_and(|b| entry(f.rank, &f.path, b, m.chunk_bytes) == *f)
            };
            if !manifests.iter().all(|m| m.files.iter().all(|f| whole(m, f))) {
                continue;
            }
            let mut paths = manifests.iter().flat_map(|m| &m.files);
            let published = paths.try_for_each(|f| self.place_file(key, attempt, &f.path));
            let rec = IndexRecord { epoch, ..rec }.seal();
            if published.and_then(|()| self.write_record(now, &rec)).is_ok() {
                completed.push(rec);
            }
        }
        completed
    }

    /// A slot's manifest as the record vouches for it.
    fn vouched_slot(&self, rec: &IndexRecord, slot: SlotId) -> Result<&Manifest, Trouble> {
        let malformed = || Trouble::new(Cause::Malformed).slot(slot);
        let want = rec.slots.iter().find(|(s, _)| *s == slot).ok_or_else(malformed)?.1;
        let m = match rec.containers {
            Some(attempt) => self.containers.get(&(rec.info.key, attempt, slot)).map(|(m, _)| m),
            None => self.slots.get(&(rec.info.key, slot)),
        };
        let m = m.ok_or_else(malformed)?;
        if m.crc() == want { Ok(m) } else { Err(malformed()) }
    }

    /// The verified files of some ranks.
    pub fn fetch(
        &self,
        now: u64,
        info: &DatasetInfo,
        ranks: &[(RankId, u32)],
    ) -> Result<Vec<(FileEntry, Vec<u8>)>, Trouble> {
        self.check(now)?;
        let rec = self.index.get(&info.key).ok_or(Trouble::new(Cause::NoDataset))?;
        let wanted =
            |r: RankId| ranks.iter().any(|(first, n)| (first.0..first.0 + n).contains(&r.0));
        let mut out = Vec::new();
        for (slot, _) in &rec.slots {
            let m = self.vouched_slot(rec, *slot)?;
            for (n, f) in m.files.iter().enumerate().filter(|(_, f)| wanted(f.rank)) {
                let damaged = |cause| Trouble::new(cause).rank(f.rank).file(f.path.clone());
                let bytes = match rec.containers {
                    Some(a) => self.containers[&(info.key, a, *slot)].1.get(n),
                    None => self.files.get(&f.path),
                };
                let bytes = bytes.ok_or_else(|| damaged(Cause::Missing))?;
                if entry(f.rank, &f.path, bytes, m.chunk_bytes) != *f {
                    return Err(damaged(Cause::Damaged));
                }
                out.push((f.clone(), bytes.clone()));
            }
        }
        out.sort_by(|a, b| (a.0.rank, &a.0.path).cmp(&(b.0.rank, &b.0.path)));
        Ok(out)
    }

    /// What a file of this record has.
    pub fn contents(&self, rec: &IndexRecord, path: &str) -> Option<&Vec<u8>> {
        let Some(attempt) = rec.containers else { return self.files.get(path) };
        let of = rec.slots.iter();
        let mut of = of.filter_map(|(s, _)| self.containers.get(&(rec.info.key, attempt, *s)));
        of.find_map(|(m, bytes)| bytes.get(m.files.iter().position(|f| f.path == path)?))
    }

    /// Is every byte that this record vouches for in place?
    pub fn verify(&self, key: Key) -> Result<(), String> {
        let rec = self.index.get(&key).ok_or("there is no record")?;
        let all = [(RankId(0), u32::MAX)];
        match self.fetch(self.broken_until, &rec.info, &all) {
            Ok(_) if rec.slots.len() as u32 == rec.info.sets.slots => Ok(()),
            Ok(_) => Err("not all slots took part".into()),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Removes an attempt's temporary names.
    pub fn abort(&mut self, key: Key, attempt: u32) {
        self.tmp.retain(|(k, a, _), _| (*k, *a) != (key, attempt));
        self.intents.remove(&(key, attempt));
        if self.index.get(&key).is_none_or(|rec| rec.containers != Some(attempt)) {
            self.containers.retain(|(k, a, _), _| (*k, *a) != (key, attempt));
        }
    }

    /// Withdraws a dataset and removes its files.
    pub fn delete(&mut self, key: Key) {
        self.index.remove(&key);
        self.withdrawn.insert(key);
        self.forget_attempts(key);
    }

    fn forget_attempts(&mut self, key: Key) {
        self.tmp.retain(|(k, _, _), _| *k != key);
        self.intents.retain(|(k, _), _| *k != key);
        let keep = self.index.get(&key).and_then(|rec| rec.containers);
        self.containers.retain(|(k, a, _), _| *k != key || Some(*a) == keep);
    }
}
