//! A dataset's files, under their own names, in a directory of the user's choice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use stanchion_format::ids::SlotId;
use stanchion_format::index::{DIR, IndexRecord};
use stanchion_format::manifest::FileEntry;
use stanchion_format::peer::{Cause, Trouble};

use super::container::Container;
use super::fetch::verified;
use super::place::new_name;
use super::{Prefix, blocks};
use crate::fs::{self, Fs, Handle, How, Kind};
use crate::trouble::At;

/// What an export did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Files that were written.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that were there already, byte for byte.
    pub same: u64,
}

/// Where an export goes, and what it may do there.
pub struct Export<'a> {
    /// An existing directory.
    pub to: &'a dyn Fs,
    /// Its name, for messages.
    pub name: &'a Path,
    /// Files that are there and differ may be replaced.
    pub replace: bool,
    /// Hears of bytes as they are read.
    pub progress: &'a mut dyn FnMut(u64),
}

struct File {
    entry: FileEntry,
    slot: SlotId,
    container: Option<(Arc<Container>, usize)>,
}

impl Prefix {
    /// Writes a dataset's files below a directory, each whole and durable under its name or not at all; every chunk is
    /// verified. What is there already with the same bytes stays, so an export that was interrupted goes on. A
    /// file that differs is refused (`EEXIST`) unless it may be replaced, and so are, before anything is written, two of one path
    /// (`SamePath`, FM-S16).
    pub fn export(&self, rec: &IndexRecord, mut to: Export<'_>) -> Result<Exported, Trouble> {
        let target = to.to;
        let name = || to.name.display().to_string();
        let files = self.files_of(rec)?;
        if target.free().at(name())?.is_some_and(|free| rec.info.bytes > free) {
            return Err(Trouble::new(Cause::NoSpace).file(name()));
        }
        let mut done = Exported::default();
        let mut dirs = BTreeSet::new();
        for (path, file) in &files {
            let put = self.export_file(rec, file, &mut to);
            match put.map_err(|t| t.slot(file.slot).rank(file.entry.rank))? {
                true => {
                    done.files += 1;
                    done.bytes += file.entry.bytes;
                }
                false => done.same += 1,
            }
            dirs.extend(Path::new(path).ancestors().skip(1));
        }
        for dir in dirs.iter().rev() {
            target.sync_dir(dir).at(dir.display().to_string())?;
        }
        Ok(done)
    }

    /// The dataset's files by path; none of them excludes another.
    fn files_of(&self, rec: &IndexRecord) -> Result<BTreeMap<String, File>, Trouble> {
        let mut files: BTreeMap<String, File> = BTreeMap::new();
        for (slot, _) in &rec.slots {
            let (manifest, container) = self.open_slot(rec, *slot)?;
            let container = container.map(Arc::new);
            for (n, entry) in manifest.files.into_iter().enumerate() {
                let (path, rank) = (entry.path.clone(), entry.rank);
                let file =
                    File { entry, slot: *slot, container: container.clone().map(|c| (c, n)) };
                if files.insert(path.clone(), file).is_some() {
                    return Err(Trouble::new(Cause::SamePath).slot(*slot).rank(rank).file(path));
                }
            }
        }
        for (path, file) in &files {
            let above = Path::new(path).ancestors().skip(1).filter_map(Path::to_str);
            if above.into_iter().any(|dir| files.contains_key(dir)) {
                let trouble = Trouble::new(Cause::SamePath).slot(file.slot);
                return Err(trouble.rank(file.entry.rank).file(path));
            }
        }
        Ok(files)
    }

    /// True if the file was written.
    fn export_file(
        &self,
        rec: &IndexRecord,
        file: &File,
        to: &mut Export<'_>,
    ) -> Result<bool, Trouble> {
        let target = to.to;
        let entry = &file.entry;
        let (path, place) = (entry.path.as_str(), Path::new(&entry.path));
        let (chunk_bytes, mut buf) = (rec.info.chunk_bytes, Vec::new());
        match target.stat(place) {
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e).at(path),
            Ok(stat) => {
                blocks(stat.kind).at(path)?;
                let same = stat.kind == Kind::File && stat.bytes == entry.bytes && {
                    let there = target.open(place, How::Read).at(path)?;
                    verified(&*there, entry, chunk_bytes, &mut buf, &mut |_, _| Ok(())).is_ok()
                };
                if same {
                    (to.progress)(entry.bytes);
                    return Ok(false);
                }
                if !to.replace {
                    return Err(Errno::EXIST).at(path);
                }
            }
        }
        let dir = place.parent().unwrap_or(Path::new(""));
        fs::make_dirs(target, dir, 0o777)
            .or_else(|e| if dir.as_os_str().is_empty() { Ok(()) } else { Err(e) })
            .at(path)?;
        let new = dir.join(new_name().at(path)?);
        let mut write = || {
            let out = target.open(&new, How::CreateNew(0o600)).at(path)?;
            let mut copy = |from: &dyn Handle| {
                verified(from, entry, chunk_bytes, &mut buf, &mut |bytes, offset| {
                    (to.progress)(bytes.len() as u64);
                    fs::write_all(&*out, bytes, offset).at(path)
                })
            };
            match &file.container {
                Some((container, n)) => copy(&container.part(*n))?,
                None => copy(&*self.fs.open(place, How::Read).at(path)?)?,
            }
            out.set_mode(entry.mode).and_then(|()| out.sync()).at(path)?;
            target.rename(&new, place).at(path)
        };
        write().inspect_err(|_| {
            // What stays has a name that says what it is.
            let _left_behind = target.unlink(&new);
        })?;
        Ok(true)
    }

    /// Is this the prefix's own directory, or one in it that is ours?
    pub fn is_within(&self, dir: &Path) -> bool {
        let canonical = |p: &Path| std::fs::canonicalize(p).unwrap_or_else(|_| p.to_owned());
        let (root, dir) = (canonical(&self.root), canonical(dir));
        dir == root || dir.starts_with(root.join(DIR))
    }
}
