//! What an earlier process left (FM-T1, FM-T2).

use std::path::Path;

use rustix::io::Errno;
use stanchion_format::checksum::Crc64;
use stanchion_format::segment::{
    self, BLOCK, ENTRY_BYTES, Entry, Life, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN,
};

use super::state::{Found, State};
use super::{StoreConfig, files};
use crate::fs::{self, Fs, Handle, How, Kind, Result, read_full};

const ONE: u64 = BLOCK as u64;
/// Bytes of a chunk that are read in one go.
const READ_BYTES: usize = 1 << 20;

/// What was found on opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Segments with their index.
    pub sealed: usize,
    /// Segments without.
    pub torn: Vec<Torn>,
    /// Segments of which something could not be read.
    pub unreadable: Vec<u32>,
}

/// A segment that was not sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Torn {
    /// Its number.
    pub segment: u32,
    /// Where its last good chunk ends.
    pub cut: u64,
    /// Chunks that are as they were written.
    pub good: usize,
    /// Chunks that were announced in the segment, but are not.
    pub lost: usize,
}

/// Looks at everything in the directory. Without `keep` nothing counts any more: files of the right size wait
/// for their next life, everything else is removed.
pub(super) fn recover(fs: &dyn Fs, config: &StoreConfig, state: &mut State) -> Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut entries = fs.list(Path::new(""))?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    for entry in entries {
        let number = entry.name.to_str().and_then(files::number);
        let (Some(number), Kind::File) = (number, entry.kind) else {
            fs::remove_tree(fs, Path::new(&entry.name))?;
            continue;
        };
        let bytes = fs.stat(Path::new(&entry.name))?.bytes;
        let fits = bytes == config.segment_bytes;
        if !config.keep {
            if fits && state.bytes() + bytes <= config.bytes_max {
                files::void(fs, number)?;
                state.adopt_free(number, bytes);
            } else {
                files::remove(fs, number)?;
            }
            continue;
        }
        match look(fs, number, &mut recovered) {
            Ok(Some(found)) => state.adopt(found),
            Ok(None) if fits => state.adopt_free(number, bytes),
            Ok(None) => files::remove(fs, number)?,
            Err(Errno::IO) => {
                recovered.unreadable.push(number);
                state.adopt_dead(number, bytes);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(recovered)
}

/// `None`: no life has begun in this file.
fn look(fs: &dyn Fs, number: u32, recovered: &mut Recovered) -> Result<Option<Found>> {
    let file = fs.open(Path::new(&files::name(number)), How::Read)?;
    let mut block = [0; BLOCK];
    read_full(&*file, &mut block, 0)?;
    let Some((life, bytes)) = segment::header(&block) else { return Ok(None) };
    if life.segment != number {
        return Ok(None);
    }
    debug_assert!((SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes));
    if let Some(entries) = index(&*file, life, bytes) {
        recovered.sealed += 1;
        return Ok(Some(Found { life, bytes, entries, seal: false, unreadable: false }));
    }
    let mut walk = Walk { file: &*file, life, bytes, good: Vec::new(), lost: 0, errors: 0 };
    walk.all();
    let unreadable = walk.errors > 0;
    if unreadable {
        recovered.unreadable.push(number);
    }
    let cut = walk.good.last().map_or(ONE, Entry::end);
    recovered.torn.push(Torn { segment: number, cut, good: walk.good.len(), lost: walk.lost });
    // What could not be read now may be readable later: its groups still say where it is.
    Ok(Some(Found { life, bytes, entries: walk.good, seal: !unreadable, unreadable }))
}

/// The chunks of a sealed segment. Its data was durable before its index was written.
fn index(file: &dyn Handle, life: Life, bytes: u64) -> Option<Vec<Entry>> {
    let mut block = [0; BLOCK];
    read_full(file, &mut block, bytes - ONE).ok()?;
    let trailer = segment::trailer(&block, life, bytes)?;
    // Not more than the segment itself, which the trailer's place was compared with.
    let mut table = vec![0; trailer.entries as usize * ENTRY_BYTES];
    let have = read_full(file, &mut table, trailer.at).ok()?;
    segment::entries(&table[..have], trailer.crc, bytes)
}

/// Goes from group to group.
struct Walk<'f> {
    file: &'f dyn Handle,
    life: Life,
    bytes: u64,
    good: Vec<Entry>,
    lost: usize,
    errors: usize,
}

impl Walk<'_> {
    /// Where there is no group, one may still follow: of writes that were under way together, any may be
    /// missing, and what was synced behind one that failed is to be found.
    fn all(&mut self) {
        let mut at = ONE;
        let mut block = [0; BLOCK];
        while at + ONE < self.bytes {
            let have = self.read(&mut block, at);
            let group = match have {
                Some(BLOCK) => segment::group(&block, self.life, at, self.bytes),
                // The file ends before its segment.
                Some(_) => return,
                None => None,
            };
            let Some(entries) = group else {
                at += ONE;
                continue;
            };
            for entry in entries {
                at = entry.end();
                if self.is_good(&entry) {
                    self.good.push(entry);
                } else {
                    self.lost += 1;
                }
            }
        }
    }

    fn is_good(&mut self, entry: &Entry) -> bool {
        let mut buf = vec![0; READ_BYTES.min(entry.len as usize)];
        let mut crc = Crc64::new();
        let mut done = 0;
        while done < entry.len {
            let want = buf.len().min((entry.len - done) as usize);
            if self.read(&mut buf[..want], entry.at + u64::from(done)) != Some(want) {
                return false;
            }
            crc.update(&buf[..want]);
            done += want as u32;
        }
        crc.crc() == entry.crc
    }

    fn read(&mut self, buf: &mut [u8], at: u64) -> Option<usize> {
        let have = read_full(self.file, buf, at).ok();
        self.errors += usize::from(have.is_none());
        have
    }
}
