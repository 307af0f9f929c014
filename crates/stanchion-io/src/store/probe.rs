//! What the file system and the kernel allow.

use std::fmt;
use std::path::Path;

use rustix::io::Errno;
use stanchion_format::segment::BLOCK;

use super::source::{Aligned, Source};
use super::writer::{BlockingWriter, UringWriter, Write, Writer};
use super::{StoreConfig, WriterKind};
use crate::fs::{Fs, Handle, How, Result, gone_is_fine};

/// How a store writes, and why not better; for the user to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// `io_uring` or `blocking`.
    pub writer: &'static str,
    /// Why not io_uring, if it was wished for.
    pub writer_why: Option<Errno>,
    /// Past the page cache?
    pub direct: bool,
    /// Why not, if it was wished for.
    pub direct_why: Option<Errno>,
    /// What addresses must be multiples of to be written from without a copy, bytes.
    pub memory_align: usize,
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} writer", self.writer)?;
        if let Some(why) = self.writer_why {
            write!(f, " (no io_uring: {why})")?;
        }
        f.write_str(if self.direct { ", direct I/O" } else { ", page cache" })?;
        match self.direct_why {
            Some(why) => write!(f, " (no direct I/O: {why})"),
            None => Ok(()),
        }
    }
}

const NAME: &str = "probe";

/// Finds out by writing a block.
pub(super) fn probe(fs: &dyn Fs, config: &StoreConfig) -> Result<(Facts, Box<dyn Writer>)> {
    let path = Path::new(NAME);
    let plain = fs.open(path, How::Create(0o600))?;
    plain.set_len(BLOCK as u64)?;
    let (direct, mut why) = match config.direct {
        true => open_direct(fs, path)?,
        false => (None, None),
    };
    let (mut writer, mut writer_why) = pick(&*plain, config)?;
    if let Some(file) = &direct {
        match try_block(&*writer, &mut writer_why, &**file) {
            Ok(None) => {}
            Ok(Some(other)) => writer = other,
            Err(e @ (Errno::INVAL | Errno::OPNOTSUPP)) => why = Some(e),
            Err(e) => return Err(e),
        }
    }
    let is_direct = direct.is_some() && why.is_none();
    if !is_direct && let Some(other) = try_block(&*writer, &mut writer_why, &*plain)? {
        writer = other;
    }
    let align = direct.as_ref().and_then(|file| file.direct_alignment());
    let memory_align = match is_direct {
        true => align.map_or(BLOCK, |a| a.memory as usize),
        false => 1,
    };
    drop((plain, direct));
    gone_is_fine(fs.unlink(path))?;
    let writer_name = writer.name();
    let facts =
        Facts { writer: writer_name, writer_why, direct: is_direct, direct_why: why, memory_align };
    Ok((facts, writer))
}

type MaybeDirect = (Option<Box<dyn Handle>>, Option<Errno>);

fn open_direct(fs: &dyn Fs, path: &Path) -> Result<MaybeDirect> {
    let file = match fs.open(path, How::Direct) {
        Ok(file) => file,
        Err(e @ (Errno::INVAL | Errno::OPNOTSUPP)) => return Ok((None, Some(e))),
        Err(e) => return Err(e),
    };
    let fits = |align: u32| (BLOCK as u32).is_multiple_of(align);
    match file.direct_alignment() {
        // Larger blocks than ours.
        Some(a) if !fits(a.memory) || !fits(a.offset) => Ok((None, Some(Errno::INVAL))),
        _ => Ok((Some(file), None)),
    }
}

fn pick(file: &dyn Handle, config: &StoreConfig) -> Result<(Box<dyn Writer>, Option<Errno>)> {
    if config.writer == WriterKind::Blocking {
        return Ok((Box::new(BlockingWriter), None));
    }
    if file.fd().is_none() {
        return Ok((Box::new(BlockingWriter), Some(Errno::OPNOTSUPP)));
    }
    match UringWriter::new(config.depth) {
        Ok(writer) => Ok((Box::new(writer), None)),
        Err(why) => Ok((Box::new(BlockingWriter), Some(why))),
    }
}

/// Writes a block; another writer where that helps.
fn try_block(
    writer: &dyn Writer,
    why: &mut Option<Errno>,
    file: &dyn Handle,
) -> Result<Option<Box<dyn Writer>>> {
    let block = Aligned::blocks(1);
    let write = [Write { from: Source::from(&block[..]), offset: 0 }];
    let Err(first) = writer.write(file, &write) else { return Ok(None) };
    if writer.name() == BlockingWriter.name() {
        return Err(first);
    }
    // The ring was there, but the kernel or a filter lets it do nothing.
    BlockingWriter.write(file, &write)?;
    *why = Some(first);
    Ok(Some(Box::new(BlockingWriter)))
}
