//! From the cache into the prefix, in two steps: written under temporary names, then renamed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use stanchion_format::checksum::crc64;
use stanchion_format::ids::{Key, SlotId};
use stanchion_format::index::{DIR, INDEX_VERSION, Layout, SlotFile};
use stanchion_format::limits;
use stanchion_format::manifest::{FileEntry, Manifest, pieces};
use stanchion_format::peer::{Cause, Trouble};

use super::place::new_name;
use super::{Prefix, attempt_dir, blocks, json, parse_attempt_dir, record_file, slot_file};
use crate::cache::{Cache, cancelled};
use crate::fs::{self, Handle, How, Kind};
use crate::trouble::At;

/// In an attempt's directory, where each slot lists the paths it is going to write. An application
/// cannot have files there: the name is reserved.
pub(super) fn claims_dir(key: Key, attempt: u32) -> String {
    format!("{}/{DIR}", attempt_dir(key, attempt))
}

fn claim_file(key: Key, attempt: u32, slot: SlotId) -> String {
    format!("{}/slot.{:06}", claims_dir(key, attempt), slot.0)
}

/// Where a file lies until it is published.
pub(super) fn staged(key: Key, attempt: u32, path: &str) -> PathBuf {
    Path::new(&attempt_dir(key, attempt)).join(path)
}

/// Can both be files of one directory tree?
fn collide(a: &str, b: &str) -> bool {
    let below = |a: &str, b: &str| b.strip_prefix(a).is_some_and(|rest| rest.starts_with('/'));
    a == b || below(a, b) || below(b, a)
}

impl Prefix {
    /// Copies a slot's files under temporary names into the prefix and makes them durable, with the
    /// slot's manifest. Every chunk is verified on its way (FM-F9). A path that another slot claims is
    /// refused as `SamePath` (FM-S16); what is left of other attempts of this slot is removed.
    pub fn flush_prepare(
        &self,
        cache: &Cache,
        m: &Manifest,
        (layout, attempt): (Layout, u32),
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let prepare = || {
            self.writable()?;
            m.check().map_err(|_| Trouble::new(Cause::Malformed))?;
            self.refuse_collisions(m)?;
            self.refuse_other_content(m)?;
            match layout {
                Layout::Files => self.prepare_files(cache, m, attempt, cancel),
                Layout::Containers => self.container_write(cache, m, attempt, cancel),
            }
        };
        prepare().map_err(|t| t.slot(m.slot))
    }

    fn prepare_files(
        &self,
        cache: &Cache,
        m: &Manifest,
        attempt: u32,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        self.remove_other_attempts(m, attempt)?;
        self.withdraw_intent(m.key, attempt)?;
        if self.fs.free().at(DIR)?.is_some_and(|free| m.bytes() > free) {
            return Err(Trouble::new(Cause::NoSpace).file(self.root.display().to_string()));
        }
        self.claim(m, attempt)?;
        let mut buf = Vec::new();
        for entry in &m.files {
            self.refuse_blocked(&entry.path).map_err(|t| t.rank(entry.rank))?;
            self.copy_out(cache, m, entry, attempt, &mut buf, cancel)
                .map_err(|t| t.rank(entry.rank))?;
        }
        self.sync_staged_dirs(m, attempt)?;
        self.write_slot_file(m)
    }

    /// Within the slot, before anything is written.
    fn refuse_collisions(&self, m: &Manifest) -> Result<(), Trouble> {
        let mut seen = BTreeSet::new();
        for entry in &m.files {
            if !seen.insert(entry.path.as_str()) {
                return Err(Trouble::new(Cause::SamePath).rank(entry.rank).file(&entry.path));
            }
        }
        for entry in &m.files {
            let mut above = entry.path.as_str();
            while let Some((dir, _)) = above.rsplit_once('/') {
                if seen.contains(dir) {
                    return Err(Trouble::new(Cause::SamePath).rank(entry.rank).file(&entry.path));
                }
                above = dir;
            }
        }
        Ok(())
    }

    /// The dataset may be in the index already, flushed by others: then with these contents or not at
    /// all, for its manifests must not be pulled away from under its record.
    fn refuse_other_content(&self, m: &Manifest) -> Result<(), Trouble> {
        match self.record(m.key) {
            Ok(Some(rec)) if !rec.slots.contains(&(m.slot, m.crc())) => {
                Err(Trouble::new(Cause::State).file(record_file(m.key)))
            }
            Ok(_) | Err(Trouble { cause: Cause::Malformed, .. }) => Ok(()),
            Err(trouble) => Err(trouble),
        }
    }

    fn remove_other_attempts(&self, m: &Manifest, attempt: u32) -> Result<(), Trouble> {
        for name in self.names(&format!("{DIR}/tmp"))? {
            if let Some((key, other)) = parse_attempt_dir(&name)
                && key == m.key
                && other != attempt
                && !self.intended(key, other)
            {
                self.remove_staged(m, other);
            }
        }
        Ok(())
    }

    /// Removes this slot's part of an attempt; other slots' files stay.
    fn remove_staged(&self, m: &Manifest, attempt: u32) {
        let top = PathBuf::from(attempt_dir(m.key, attempt));
        for entry in &m.files {
            let path = staged(m.key, attempt, &entry.path);
            if let Err(e) = fs::gone_is_fine(self.fs.unlink(&path)) {
                tracing::debug!(path = %path.display(), "left behind: {e}");
            }
            fs::prune(&*self.fs, path.parent().unwrap_or(&top), &top);
        }
        self.discard(&claim_file(m.key, attempt, m.slot));
        fs::prune(
            &*self.fs,
            Path::new(&claims_dir(m.key, attempt)),
            Path::new(&format!("{DIR}/tmp")),
        );
    }

    /// Lists the paths that this slot is going to write, before it writes any of them: a file that is
    /// there already is somebody else's only if somebody else claims it.
    fn claim(&self, m: &Manifest, attempt: u32) -> Result<(), Trouble> {
        let dir = claims_dir(m.key, attempt);
        fs::make_dirs(&*self.fs, Path::new(&dir), 0o700).at(dir.as_str())?;
        let text: Vec<&str> = m.files.iter().map(|f| f.path.as_str()).collect();
        let file = claim_file(m.key, attempt, m.slot);
        let new = format!("{dir}/{}", new_name().at(dir.as_str())?);
        let write = || {
            let handle = self.fs.open(Path::new(&new), How::CreateNew(0o600))?;
            fs::write_all(&*handle, text.join("\n").as_bytes(), 0)?;
            self.fs.rename(Path::new(&new), Path::new(&file))
        };
        write().at(file.as_str())
    }

    /// Does another slot claim this path, or one that excludes it?
    fn claimed_by_other(&self, m: &Manifest, attempt: u32, path: &str) -> Result<bool, Trouble> {
        let dir = claims_dir(m.key, attempt);
        let own = format!("slot.{:06}", m.slot.0);
        for name in self.names(&dir)?.iter().filter(|n| n.starts_with("slot.") && **n != own) {
            let file = format!("{dir}/{name}");
            let bytes = fs::read_small(&*self.fs, Path::new(&file), limits::INDEX_FILE_BYTES_MAX)
                .at(file)?;
            if String::from_utf8_lossy(&bytes).split('\n').any(|p| collide(p, path)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A new file under its temporary name.
    fn stage(&self, m: &Manifest, attempt: u32, path: &str) -> Result<Box<dyn Handle>, Trouble> {
        let place = staged(m.key, attempt, path);
        let mut last = Errno::EXIST;
        for _ in 0..3 {
            let made = match place.parent() {
                Some(dir) => fs::make_dirs(&*self.fs, dir, 0o700),
                None => Ok(()),
            };
            match made.and_then(|()| self.fs.open(&place, How::CreateNew(0o600))) {
                Ok(file) => return Ok(file),
                Err(e @ (Errno::EXIST | Errno::NOTDIR | Errno::ISDIR)) => last = e,
                Err(e) => return Err(e).at(path),
            }
            if self.claimed_by_other(m, attempt, path)? {
                return Err(Trouble::new(Cause::SamePath).file(path));
            }
            // Ours, from before the slot moved here or the task was given again.
            self.remove_staged_tree(m.key, attempt, path).at(path)?;
        }
        Err(last).at(path)
    }

    /// Removes what is at a temporary name or, as a file, in its way.
    fn remove_staged_tree(&self, key: Key, attempt: u32, path: &str) -> fs::Result<()> {
        let mut at = PathBuf::from(attempt_dir(key, attempt));
        for part in Path::new(path).components() {
            at.push(part);
            match self.fs.stat(&at) {
                Ok(stat) if stat.kind == Kind::Dir => {}
                Ok(_) => return fs::remove_tree(&*self.fs, &at),
                Err(Errno::NOENT) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        fs::remove_tree(&*self.fs, &at)
    }

    fn copy_out(
        &self,
        cache: &Cache,
        m: &Manifest,
        entry: &FileEntry,
        attempt: u32,
        buf: &mut Vec<u8>,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let from = cache.manifest_file(m, entry)?;
        let to = self.stage(m, attempt, &entry.path)?;
        for ((offset, len), crc) in pieces(entry.bytes, m.chunk_bytes).zip(&entry.chunks) {
            if cancel() {
                return Err(cancelled());
            }
            buf.resize(len as usize, 0);
            let have = fs::read_full(&*from, buf, offset).at(entry.path.as_str())?;
            if have < len as usize {
                let size = Cause::Size { want: entry.bytes, have: offset + have as u64 };
                return Err(Trouble::new(size).file(&entry.path));
            }
            if crc64(buf) != *crc {
                return Err(Trouble::new(Cause::Damaged).file(&entry.path));
            }
            fs::write_all(&*to, buf, offset).at(entry.path.as_str())?;
        }
        to.set_mode(entry.mode).and_then(|()| to.sync()).at(entry.path.as_str())
    }

    /// Makes the temporary names durable: an interrupted flush is completed from them (FM-L3).
    fn sync_staged_dirs(&self, m: &Manifest, attempt: u32) -> Result<(), Trouble> {
        let dirs: BTreeSet<PathBuf> = m
            .files
            .iter()
            .map(|f| staged(m.key, attempt, &f.path))
            .flat_map(|f| f.ancestors().skip(1).map(Path::to_owned).collect::<Vec<_>>())
            .filter(|dir| dir.starts_with(DIR))
            .collect();
        for dir in dirs.iter().rev() {
            self.fs.sync_dir(dir).at(dir.display().to_string())?;
        }
        Ok(())
    }

    fn write_slot_file(&self, m: &Manifest) -> Result<(), Trouble> {
        let file = slot_file(m.key, m.slot);
        let slot = SlotFile { version: INDEX_VERSION, manifest: m.clone(), crc: m.crc() };
        let bytes = json(&slot);
        if bytes.len() as u64 > limits::INDEX_FILE_BYTES_MAX {
            return Err(Errno::FBIG).at(file);
        }
        let dir = Path::new(&file).parent().unwrap_or(Path::new(DIR)).to_owned();
        fs::make_dirs(&*self.fs, &dir, 0o700).at(file.as_str())?;
        self.put(&file, &bytes)?;
        // The directory's own name, whoever made it.
        let above = dir.parent().unwrap_or(Path::new(DIR));
        self.fs.sync_dir(above).at(above.display().to_string())
    }

    /// Could a file of this path be put in its place? Asked before the copy, not after it.
    fn refuse_blocked(&self, path: &str) -> Result<(), Trouble> {
        let mut at = PathBuf::new();
        let mut parts = Path::new(path).components().peekable();
        while let Some(part) = parts.next() {
            at.push(part);
            let kind = match self.fs.stat(&at) {
                Err(Errno::NOENT) => return Ok(()),
                other => other.at(path)?.kind,
            };
            let fine = match parts.peek() {
                None => blocks(kind),
                Some(_) if kind == Kind::Dir => Ok(()),
                Some(_) => Err(Errno::NOTDIR),
            };
            fine.at(path)?;
        }
        Ok(())
    }

    /// Gives the files their names, durably; records that vouch for what they replace are durably
    /// withdrawn before (FM-S10). May be repeated after partial success. `cancel` is asked before every
    /// rename: one that comes late, when the attempt is void, could replace a newer dataset's file.
    pub fn flush_publish(
        &self,
        m: &Manifest,
        (layout, attempt): (Layout, u32),
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let published = match layout {
            Layout::Files => self.publish(m, attempt, false, cancel),
            // It has its name from the beginning; nobody looks there before the record does.
            Layout::Containers => Ok(()),
        };
        published.map_err(|t| t.slot(m.slot))
    }

    /// `completing`: it was left by others, and nobody has overtaken it.
    pub(super) fn publish(
        &self,
        m: &Manifest,
        attempt: u32,
        completing: bool,
        cancel: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        self.writable()?;
        let (mut waiting, mut done, mut replaced) = (Vec::new(), Vec::new(), BTreeSet::new());
        for entry in &m.files {
            let path = entry.path.as_str();
            match self.fs.stat(&staged(m.key, attempt, path)) {
                Ok(_) => waiting.push(entry),
                Err(Errno::NOENT) => done.push(entry),
                Err(e) => return Err(e).at(path).map_err(|t| t.rank(entry.rank)),
            }
            if self.fs.stat(Path::new(path)).is_ok() {
                replaced.insert(path);
            }
        }
        let mut buf = Vec::new();
        for entry in done {
            // Renamed before, it is said: then it is the right one.
            self.check_file(m, entry, &mut buf, &mut |_| {}).map_err(|t| t.rank(entry.rank))?;
            replaced.remove(entry.path.as_str());
        }
        self.make_places(m)?;
        self.withdraw_for(m, attempt, completing, &replaced)?;
        for entry in &waiting {
            if cancel() {
                return Err(cancelled());
            }
            self.put_in_its_place(m, attempt, entry).map_err(|t| t.rank(entry.rank))?;
        }
        self.sync_dirs_of(m)?;
        self.remove_staged(m, attempt);
        Ok(())
    }

    fn withdraw_for(
        &self,
        m: &Manifest,
        attempt: u32,
        completing: bool,
        replaced: &BTreeSet<&str>,
    ) -> Result<(), Trouble> {
        if replaced.is_empty() {
            return Ok(());
        }
        let mut void = Vec::new();
        // The record of this very dataset stays: its files are replaced by their equals.
        for rec in self.other_records(m.key)? {
            if self.vouches(&rec, m.slot, replaced)? {
                void.push(rec);
            }
        }
        let mine = if completing || void.is_empty() { None } else { self.intent(m.key, attempt)? };
        if mine.is_some_and(|mine| void.iter().any(|there| mine.led_past(there))) {
            // FM-L3: who slept since it was intended does not replace what came in the meantime.
            return Err(Trouble::new(Cause::Fenced));
        }
        for rec in void {
            self.withdraw(rec.info.key)?;
        }
        // What another slot has withdrawn may not be durable yet.
        let index = format!("{DIR}/index");
        self.place.settle(&index).at(index)
    }

    fn put_in_its_place(
        &self,
        m: &Manifest,
        attempt: u32,
        entry: &FileEntry,
    ) -> Result<(), Trouble> {
        let from = staged(m.key, attempt, &entry.path);
        self.fs.rename(&from, Path::new(&entry.path)).at(entry.path.as_str())
    }

    /// The directories of the files, durable before any file moves into them: one that a crash takes with
    /// what was moved there would be lost from both its names.
    fn make_places(&self, m: &Manifest) -> Result<(), Trouble> {
        let dirs: BTreeSet<&Path> =
            m.files.iter().filter_map(|f| Path::new(&f.path).parent()).collect();
        for dir in dirs.iter().filter(|d| !d.as_os_str().is_empty()) {
            // As the application itself would have made them.
            fs::make_dirs(&*self.fs, dir, 0o777).at(dir.display().to_string())?;
        }
        let above: BTreeSet<&Path> = dirs.iter().flat_map(|d| d.ancestors().skip(1)).collect();
        for dir in above.iter().rev() {
            self.fs.sync_dir(dir).at(dir.display().to_string())?;
        }
        Ok(())
    }

    /// Makes the names durable: every directory on the way, for whoever made it may not have synced.
    fn sync_dirs_of(&self, m: &Manifest) -> Result<(), Trouble> {
        let dirs: BTreeSet<&Path> =
            m.files.iter().flat_map(|f| Path::new(&f.path).ancestors().skip(1)).collect();
        // Deepest first.
        for dir in dirs.iter().rev() {
            self.fs.sync_dir(dir).at(dir.display().to_string())?;
        }
        Ok(())
    }
}
