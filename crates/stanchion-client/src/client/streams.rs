//! Streams: files of a dataset that are written and read in pieces of any size, at any place.
//!
//! A stream that is written is in the agent's memory; where that is too small it goes on as a file in the cache
//! directory, as if it had been routed. What is written without a request to the agent costs a copy and two look-ups.

use super::{Client, PATHS_BYTES_MAX, Phase, ask_lent};
use crate::alloc::{Alloc, Lender};
use crate::error::{Error, Fault, Words};
use crate::pool::{PoolMap, PoolTimes, Put};
use crate::route;
use crate::source::Source;
use crate::stream::{Parts, Ranges, STREAM_BYTES_MAX, Zeros};
use crate::wire::{self, Link};
use stanchion_format::client::{Code, Filled, Lent, MemoryFile};
use stanchion_format::config::Settings;
use stanchion_format::ids::ExtentId;
use stanchion_format::limits;
use stanchion_mem::Mapping;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

/// Writes of fewer bytes are not timed: looking at the clock would cost as much.
const TIMED_BYTES: usize = 64 << 10;

/// Descriptors of the agent's memory that streams keep which are not being read. Each could hold as many as one answer
/// brings, and a process may have few.
const KEPT_FDS: usize = 256;

/// An open stream. Numbers are never used again by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u64);

/// What a stream is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A file of the dataset to restart from.
    Read,
    /// A new file of the dataset that is being written.
    Write,
}

/// All streams of a client.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    last: u64,
    open: BTreeMap<StreamId, Stream>,
    /// Of the dataset that is being written, also those that are closed.
    paths: BTreeSet<String>,
    /// How many of them are files.
    files: usize,
    /// Those that are closed and in memory, with their sizes; their parts have the names that `alloc` gives.
    closed: Vec<(MemoryFile, u64)>,
    /// Parts of those.
    parts: usize,
    alloc: Alloc,
    zeros: Zeros,
    /// The first that failed, and why.
    broken: Option<(Words, Words)>,
    times: PoolTimes,
    /// Time spent on files.
    blocked: Duration,
}

#[derive(Debug)]
enum Stream {
    Read(Reader),
    Write(Writer),
}

#[derive(Debug)]
struct Reader {
    source: Source,
    at: u64,
}

#[derive(Debug)]
struct Writer {
    path: String,
    at: u64,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Memory(Ranges),
    File { file: File, place: String, size: u64 },
}

/// The agent's memory.
struct Agent<'a> {
    link: &'a mut Option<Link>,
    pool: &'a mut PoolMap,
    settings: &'a Settings,
}

impl Lender for Agent<'_> {
    fn lend(&mut self, bytes: u64) -> Result<Vec<Lent>, Error> {
        let wait = wire::patience(self.settings.number("pool_wait_ms"));
        let request = self.pool.wish(bytes);
        ask_lent(self.link, self.pool, "write", &request, wait)
    }

    fn mapping(&self, id: ExtentId) -> &Mapping {
        self.pool.map(id)
    }

    fn stores(&self) -> bool {
        self.pool.stores()
    }

    fn hand(&mut self, filled: Filled) {
        self.pool.hand(filled);
    }
}

/// Where files of the dataset go that is being written.
struct Files<'a> {
    dir: &'a str,
    routed: &'a mut BTreeSet<String>,
    count: &'a mut usize,
}

impl Files<'_> {
    /// As if it had been routed.
    fn create(&mut self, path: &str, size: u64) -> Result<Body, Error> {
        route::make_parents(self.dir, path, 0o700)?;
        let body = create(format!("{}/{path}", self.dir), size, 0o600)?;
        *self.count += usize::from(self.routed.insert(path.to_owned()));
        Ok(body)
    }
}

fn create(place: String, size: u64, mode: u32) -> Result<Body, Error> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(mode);
    let file = options.open(&place).map_err(|cause| cannot_write(&place, cause))?;
    Ok(Body::File { file, place, size })
}

fn cannot_write(place: &str, cause: std::io::Error) -> Error {
    Error::Io { what: "cannot write stream", path: Words::name(place), cause }
}

/// Everything that a write needs beside its stream.
struct Tools<'a> {
    agent: Agent<'a>,
    files: Option<Files<'a>>,
    alloc: &'a mut Alloc,
    zeros: &'a mut Zeros,
    times: &'a mut PoolTimes,
}

impl Writer {
    fn put(&mut self, tools: &mut Tools<'_>, bytes: &[u8]) -> Result<(), Error> {
        let end = self.at + bytes.len() as u64;
        if let Body::Memory(ranges) = &mut self.body {
            let Tools { agent, alloc, times, .. } = tools;
            if ranges.put(alloc, agent, self.at, bytes, times)? == Put::Done {
                self.at = end;
                return Ok(());
            }
            self.spill(tools)?;
        }
        if let Body::File { file, place, size } = &mut self.body {
            file.write_all_at(bytes, self.at).map_err(|cause| cannot_write(place, cause))?;
            *size = end.max(*size);
        }
        self.at = end;
        Ok(())
    }

    /// It is a file from now on, and gives its memory back.
    fn spill(&mut self, tools: &mut Tools<'_>) -> Result<(), Error> {
        let (Body::Memory(ranges), Some(files)) = (&mut self.body, &mut tools.files) else {
            return Ok(());
        };
        if ranges.is_handed(tools.alloc) {
            let text = "the pool is too small for streams that are written in this order";
            return Err(super::refused(Code::Space, text));
        }
        let made = files.create(&self.path, ranges.size())?;
        if let Body::File { file, place, .. } = &made {
            ranges
                .spill(tools.alloc, &tools.agent, file)
                .map_err(|cause| cannot_write(place, cause))?;
        }
        std::mem::take(ranges).give(tools.alloc);
        self.body = made;
        Ok(())
    }

    /// Its file, if that is in memory, in at most `parts` parts.
    fn finish(
        mut self,
        tools: &mut Tools<'_>,
        parts: usize,
    ) -> Result<Option<(MemoryFile, u64)>, Error> {
        if let Body::Memory(ranges) = &mut self.body
            && ranges.size() > 0
        {
            let Tools { agent, alloc, zeros, times, .. } = tools;
            if let Parts::Are(parts) = ranges.finish(alloc, zeros, agent, parts, times)? {
                let file = MemoryFile { path: self.path, base: None, parts };
                return Ok(Some((file, ranges.size())));
            }
        }
        // An empty one, too: nothing in memory is nothing that could be found again.
        self.spill(tools).map(|()| None)
    }

    fn in_memory(&self) -> bool {
        matches!(self.body, Body::Memory(_))
    }
}

impl Streams {
    /// Can a file of this path be added?
    pub(super) fn free(&self, path: &str) -> Result<(), Error> {
        free(&self.paths, path)
    }

    /// Files of the dataset that is being written which have no place in the cache directory.
    pub(super) fn in_memory(&self) -> usize {
        self.paths.len() - self.files
    }

    /// The restart is over.
    pub(super) fn close_all(&mut self) {
        self.open.clear();
    }

    fn add(&mut self, stream: Stream) -> StreamId {
        self.last += 1;
        let id = StreamId(self.last);
        if let Stream::Read(reader) = &stream {
            self.release_beside(reader.source.held());
        }
        self.open.insert(id, stream);
        id
    }

    /// Another stream came to have `more` descriptors: if they are too many, those that are open give theirs up.
    fn release_beside(&mut self, more: usize) {
        let sources = |s: &Stream| if let Stream::Read(r) = s { r.source.held() } else { 0 };
        if more == 0 || more + self.open.values().map(sources).sum::<usize>() <= KEPT_FDS {
            return;
        }
        for stream in self.open.values_mut() {
            if let Stream::Read(reader) = stream {
                reader.source.release();
            }
        }
    }

    fn get(&mut self, call: &'static str, id: StreamId) -> Result<&mut Stream, Error> {
        self.open.get_mut(&id).ok_or(Error::NoStream { call, id: id.0 })
    }

    fn fail(&mut self, path: &str, error: &Error) {
        let cause = || (Words::name(path), Words::new(&error.to_string()));
        self.broken.get_or_insert_with(cause);
    }
}

/// A path is neither of a file that is there nor of a directory of one, and no such file is a directory of it.
fn free(paths: &BTreeSet<String>, path: &str) -> Result<(), Error> {
    let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
    let above = ends.map(|end| &path[..end]).find_map(|p| paths.get(p));
    let below = || {
        let below = format!("{path}/");
        paths.range(below.clone()..).next().filter(|p| p.starts_with(&below))
    };
    match above.or_else(below) {
        Some(by) => Err(Error::Taken { path: Words::name(path), by: Words::name(by) }),
        None => Ok(()),
    }
}

impl Client {
    pub(super) fn begin_streams(&mut self) {
        self.streams.alloc = Alloc::new(self.settings.number("chunk_bytes"));
        self.pool.begin();
    }

    /// No stream of the dataset that was written is open any more; that none was is for the caller to say.
    pub(super) fn end_streams(&mut self) -> Result<(), Fault> {
        let (mut open, last) = (std::mem::take(&mut self.streams.open), self.streams.last);
        let forgotten = open.values().find_map(|s| match s {
            Stream::Write(writer) => Some(Words::name(&writer.path)),
            Stream::Read(_) => None,
        });
        open.retain(|_, s| matches!(s, Stream::Read(_)));
        let kept = Streams { last, open, ..Streams::default() };
        let mut ended = std::mem::replace(&mut self.streams, kept);
        ended.closed.iter_mut().for_each(|(file, _)| ended.alloc.declare(&mut file.parts));
        if let Phase::Writing { memory, spent, blocked, .. } = &mut self.phase {
            memory.append(&mut ended.closed);
            spent.add(ended.times);
            *blocked += ended.times.wait + ended.times.copy + ended.blocked;
        }
        match (ended.broken, forgotten) {
            (Some((path, cause)), _) => Err(Fault::Stream { path, cause }),
            (None, Some(path)) => Err(Fault::Open { path }),
            (None, None) => Ok(()),
        }
    }

    /// Opens a stream: to write a new file of the dataset that is being written, which the application calls `file`,
    /// or to read one of the dataset that is restarted from. Disabled: the file's place in the prefix. Local.
    pub fn stream_open(&mut self, file: &str, mode: Mode) -> Result<StreamId, Error> {
        const CALL: &str = "open";
        self.not_finished(CALL)?;
        if self.streams.open.len() >= limits::RANK_FILES_MAX {
            return Err(Error::TooManyFiles);
        }
        let stream = match mode {
            Mode::Read => Stream::Read(Reader { source: self.open_source(CALL, file)?, at: 0 }),
            Mode::Write => Stream::Write(self.open_writer(CALL, file)?),
        };
        Ok(self.streams.add(stream))
    }

    fn open_source(&mut self, call: &'static str, file: &str) -> Result<Source, Error> {
        match self.phase {
            _ if self.link.is_none() => Source::of_file(self.pass_through_place(file)?),
            Phase::Reading(_) => Source::open(self, call, file),
            _ => Err(Error::State { call, phase: self.phase.words() }),
        }
    }

    fn open_writer(&mut self, call: &'static str, file: &str) -> Result<Writer, Error> {
        let passes = self.link.is_none();
        let Phase::Writing { files, bytes, .. } = &mut self.phase else {
            return Err(Error::State { call, phase: self.phase.words() });
        };
        if passes {
            let path = self.pass_through(file)?;
            self.streams.free(&path)?;
            let body = create(path.clone(), 0, 0o666)?;
            self.streams.paths.insert(path.clone());
            self.streams.files += 1;
            return Ok(Writer { path, at: 0, body });
        }
        let refuse = |cause| Error::Name { what: "file", name: Words::name(file), cause };
        let path = self.prefix.route(file).map_err(refuse)?;
        self.streams.free(&path)?;
        free(files, &path)?;
        // Its path is said twice: among the files, and again with its parts.
        let room = 2 * (path.len() + 16);
        if files.len() + self.streams.in_memory() >= limits::RANK_FILES_MAX
            || *bytes + room > PATHS_BYTES_MAX
        {
            return Err(Error::TooManyFiles);
        }
        *bytes += room;
        self.streams.paths.insert(path.clone());
        Ok(Writer { path, at: 0, body: Body::Memory(Ranges::default()) })
    }

    /// Writes at the stream's position, and moves that behind it. After a failure, other than of an argument, the
    /// dataset can only be completed, which drops it. Local.
    pub fn stream_write(&mut self, id: StreamId, bytes: &[u8]) -> Result<(), Error> {
        self.own_process()?;
        self.write_here(id, bytes)
    }

    /// The same for a caller that has made sure whose process this is: asking costs as much as a small write.
    pub(crate) fn write_here(&mut self, id: StreamId, bytes: &[u8]) -> Result<(), Error> {
        const CALL: &str = "write";
        let broken = self.streams.broken.is_some();
        let writer = match self.streams.get(CALL, id)? {
            Stream::Write(writer) => writer,
            Stream::Read(_) => return Err(wrong_mode(CALL, Mode::Read)),
        };
        if broken {
            let phase = "after a write that failed: complete the dataset, which drops it";
            return Err(Error::State { call: CALL, phase });
        }
        let end = writer.at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > STREAM_BYTES_MAX) {
            return Err(beyond(CALL));
        }
        let start = (bytes.len() >= TIMED_BYTES).then(Instant::now);
        let waited = self.streams.times.wait;
        let done = self.with_writer(id, |writer, tools| writer.put(tools, bytes));
        if let Some(took) = start.map(|s| s.elapsed()) {
            let copied = took.saturating_sub(self.streams.times.wait - waited);
            match self.streams.open.get(&id) {
                Some(Stream::Write(writer)) if !writer.in_memory() => {
                    self.streams.blocked += copied;
                }
                _ => self.streams.times.copy += copied,
            }
        }
        done
    }

    /// Calls `f` with a stream that is there; a failure breaks the dataset.
    fn with_writer(
        &mut self,
        id: StreamId,
        f: impl FnOnce(&mut Writer, &mut Tools<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Client { phase, link, pool, settings, streams, .. } = self;
        let Streams { open, alloc, zeros, times, files, .. } = streams;
        let Some(Stream::Write(writer)) = open.get_mut(&id) else { return Ok(()) };
        let files = match phase {
            Phase::Writing { dir, files: routed, .. } if link.is_some() => {
                Some(Files { dir, routed, count: files })
            }
            _ => None,
        };
        let agent = Agent { link, pool, settings };
        let done = f(writer, &mut Tools { agent, files, alloc, zeros, times });
        if let Err(error) = &done {
            let path = writer.path.clone();
            streams.fail(&path, error);
        }
        done
    }

    /// Moves the stream's position. What is written beyond the end leaves zeros before it. Local.
    pub fn stream_seek(&mut self, id: StreamId, offset: u64) -> Result<(), Error> {
        const CALL: &str = "seek";
        self.own_process()?;
        let stream = self.streams.get(CALL, id)?;
        if offset > STREAM_BYTES_MAX {
            return Err(beyond(CALL));
        }
        match stream {
            Stream::Read(reader) => reader.at = offset,
            Stream::Write(writer) => writer.at = offset,
        }
        Ok(())
    }

    /// The size of the stream's file, as it is now. Local.
    pub fn stream_size(&mut self, id: StreamId) -> Result<u64, Error> {
        self.own_process()?;
        Ok(match self.streams.get("size", id)? {
            Stream::Read(reader) => reader.source.bytes,
            Stream::Write(Writer { body: Body::Memory(ranges), .. }) => ranges.size(),
            Stream::Write(Writer { body: Body::File { size, .. }, .. }) => *size,
        })
    }

    /// Reads from the stream's position, and moves that behind it; how many bytes there were, fewer than `buf` has
    /// only at the end. Local.
    pub fn stream_read(&mut self, id: StreamId, buf: &mut [u8]) -> Result<usize, Error> {
        const CALL: &str = "read";
        self.own_process()?;
        if let Stream::Write(_) = self.streams.get(CALL, id)? {
            return Err(wrong_mode(CALL, Mode::Write));
        }
        // Out of the table meanwhile: it asks the agent by itself where its bytes are.
        let Some(Stream::Read(mut reader)) = self.streams.open.remove(&id) else { return Ok(0) };
        let left = reader.source.bytes.saturating_sub(reader.at);
        let bytes = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let had = reader.source.held();
        let done = reader.source.read(self, CALL, &mut buf[..bytes], reader.at);
        if done.is_ok() {
            reader.at += bytes as u64;
        }
        if reader.source.held() != had {
            self.streams.release_beside(reader.source.held());
        }
        self.streams.open.insert(id, Stream::Read(reader));
        done.map(|()| bytes)
    }

    /// Ends the stream: what was written is a file of the dataset. Local.
    pub fn stream_close(&mut self, id: StreamId) -> Result<(), Error> {
        self.own_process()?;
        self.streams.get("close", id)?;
        // After a failure there is nothing to be finished.
        let done = if self.streams.broken.is_some() { Ok(()) } else { self.finish_stream(id) };
        self.streams.open.remove(&id);
        done
    }

    fn finish_stream(&mut self, id: StreamId) -> Result<(), Error> {
        let (mut kept, start) = (None, Instant::now());
        let waited = self.streams.times.wait;
        let left = limits::MEMORY_PARTS_MAX.saturating_sub(self.streams.parts);
        self.with_writer(id, |writer, tools| {
            let empty = Body::Memory(Ranges::default());
            let Writer { path, at, body } = writer;
            let (path, body) = (path.clone(), std::mem::replace(body, empty));
            kept = Writer { path, at: *at, body }.finish(tools, left)?;
            Ok(())
        })?;
        let took = start.elapsed().saturating_sub(self.streams.times.wait - waited);
        self.streams.blocked += took;
        if let Some((file, size)) = kept {
            self.streams.parts += file.parts.len();
            self.streams.closed.push((file, size));
        }
        Ok(())
    }
}

fn beyond(call: &'static str) -> Error {
    Error::Argument { call, what: "beyond what a file can hold" }
}

fn wrong_mode(call: &'static str, mode: Mode) -> Error {
    let what = match mode {
        Mode::Read => "the stream is open for reading",
        Mode::Write => "the stream is open for writing",
    };
    Error::Argument { call, what }
}
