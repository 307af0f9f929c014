//! A segment's file: opening, beginning a life, sealing.

use std::path::{Path, PathBuf};

use stanchion_format::checksum::crc64;
use stanchion_format::segment::{
    BLOCK, ENTRY_BYTES, Entry, Life, Trailer, put_entries, put_header, put_trailer, table_bytes,
};

use super::source::{Aligned, Source};
use super::state::Next;
use super::writer::{Write, Writer};
use crate::fs::{Fs, Handle, How, Result, gone_is_fine};

/// Name of a segment's file.
pub(super) fn name(number: u32) -> String {
    format!("seg.{number:06}")
}

/// The number in a name, if it is the name of a segment.
pub(super) fn number(of: &str) -> Option<u32> {
    let number = of.strip_prefix("seg.")?.parse().ok()?;
    (name(number) == of).then_some(number)
}

fn path(number: u32) -> PathBuf {
    PathBuf::from(name(number))
}

/// The open file of a segment.
pub(super) struct Files {
    /// Through the page cache.
    pub(super) plain: Box<dyn Handle>,
    /// Past it, where there is such a way.
    pub(super) direct: Option<Box<dyn Handle>>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("direct", &self.direct.is_some()).finish_non_exhaustive()
    }
}

impl Files {
    pub(super) fn open(fs: &dyn Fs, number: u32, direct: bool) -> Result<Files> {
        let plain = fs.open(&path(number), How::Write)?;
        let direct = if direct { Some(fs.open(&path(number), How::Direct)?) } else { None };
        Ok(Files { plain, direct })
    }

    /// Where everything is written to.
    pub(super) fn target(&self) -> &dyn Handle {
        self.direct.as_deref().unwrap_or(&*self.plain)
    }
}

/// Begins a life: from here on nothing of an earlier one counts, even if the machine stops (FM-T3).
pub(super) fn begin(
    fs: &dyn Fs,
    writer: &dyn Writer,
    next: &Next,
    (direct, durable): (bool, bool),
) -> Result<Files> {
    let number = next.life.segment;
    if next.fresh {
        let made = make(fs, number, next.bytes, durable);
        if made.is_err() {
            // Gives back what space there was; an empty leftover is removed at the next start.
            let _ = fs.unlink(&path(number));
            made?;
        }
    }
    let files = Files::open(fs, number, direct)?;
    let mut block = Aligned::blocks(1);
    put_header(block.block(), next.life, next.bytes);
    write_block(writer, &files, &block, 0)?;
    if durable {
        files.plain.sync_data()?;
    }
    Ok(files)
}

/// A new file with its space: writes that do not make it longer need no lock of the file system's.
fn make(fs: &dyn Fs, number: u32, bytes: u64, durable: bool) -> Result<()> {
    let file = fs.open(&path(number), How::Create(0o600))?;
    file.reserve(bytes)?;
    if !durable {
        return Ok(());
    }
    file.sync()?;
    fs.sync_dir(Path::new(""))
}

/// Ends whatever life a file has, so that nothing in it is found again.
pub(super) fn void(fs: &dyn Fs, number: u32) -> Result<()> {
    let file = fs.open(&path(number), How::Write)?;
    crate::fs::write_all(&*file, &[0; BLOCK], 0)?;
    file.sync_data()
}

pub(super) fn remove(fs: &dyn Fs, number: u32) -> Result<()> {
    gone_is_fine(fs.unlink(&path(number)))
}

/// Writes a segment's index: the table, and behind it the trailer, which vouches for the table. What the table
/// names must be durable already (FM-T2).
pub(super) fn put_index(
    writer: &dyn Writer,
    files: &Files,
    life: Life,
    bytes: u64,
    entries: &[Entry],
) -> Result<()> {
    let table = table_bytes(entries.len() as u64) as usize;
    let mut buf = Aligned::blocks(table / BLOCK + 1);
    put_entries(&mut buf[..table], entries);
    let at = bytes - (table + BLOCK) as u64;
    let crc = crc64(&buf[..entries.len() * ENTRY_BYTES]);
    let trailer = Trailer { at, entries: entries.len() as u32, crc };
    let block = (&mut buf[table..]).try_into().expect("a block is left for the trailer");
    put_trailer(block, life, trailer);
    write_block(writer, files, &buf, at)
}

fn write_block(writer: &dyn Writer, files: &Files, buf: &Aligned, offset: u64) -> Result<()> {
    writer.write(files.target(), &[Write { from: Source::from(&buf[..]), offset }])
}
