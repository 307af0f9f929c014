//! What a stream has written so far: ranges of its file, and where they lie in the agent's memory.
//!
//! Writes may come in any order and size. A range that is lent for the first time holds bytes of an earlier dataset:
//! what the stream skips in it is made zero before anybody can see it.

use crate::alloc::{Alloc, Lender, PAGE, Span};
use crate::error::Error;
use crate::pool::{PoolTimes, Put};
use stanchion_format::client::{Part, PartFrom};
use stanchion_mem::Mapping;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A stream's file is no larger, bytes.
pub(crate) const STREAM_BYTES_MAX: u64 = i64::MAX as u64 & !(PAGE - 1);
/// New memory is this fraction of what is there already beside it: little is taken in vain, and large streams are
/// few pieces.
const GROWTH: u64 = 8;
/// A stream of so many pieces is not handed over any more: it may still have to become a file.
const HANDED_RUNS_MAX: usize = 1024;
/// After so many pieces the smallest doubles: streams written in no order at all are still a bounded number.
const PIECES_PER_DOUBLING: usize = 256;
/// Copies to files go through a buffer of so many bytes.
const BUFFER: usize = 1 << 20;
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// A range of the file in memory.
#[derive(Clone, Copy, Debug)]
struct Run {
    span: Span,
    /// Bytes from its beginning that are the stream's; beyond, the memory holds what it held before.
    good: u64,
    /// Bytes in memory around it without a gap, about.
    chain: u64,
}

/// A stream's file in memory.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// By where they begin; they do not overlap, and neighbours that are one in memory are one here.
    runs: BTreeMap<u64, Run>,
    size: u64,
}

/// How a stream's file is to be declared.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    /// These follow each other without gaps.
    Are(Vec<Part>),
    /// The pool is too small, or they are too many.
    None,
}

impl Ranges {
    /// Bytes up to the last one written.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Puts `bytes` at `at`; the end is within [`STREAM_BYTES_MAX`]. `TooLarge`: some of them may be there.
    pub(crate) fn put(
        &mut self,
        alloc: &mut Alloc,
        lender: &mut impl Lender,
        mut at: u64,
        mut bytes: &[u8],
        times: &mut PoolTimes,
    ) -> Result<Put, Error> {
        while !bytes.is_empty() {
            let found = self.runs.range_mut(..=at).next_back();
            let found = found.filter(|(start, run)| at - **start < run.span.bytes);
            if let Some((start, run)) = &found
                && alloc.is_handed(run.span.id)
            {
                // Those bytes are on their way to a device: what is new goes elsewhere.
                let start = **start;
                let len = (start + run.span.bytes - at).min(bytes.len() as u64);
                self.carve(start, at, len);
                continue;
            }
            let Some((start, run)) = found else {
                match self.room(alloc, lender, at, bytes.len() as u64, times)? {
                    Put::Done => continue,
                    Put::TooLarge => return Ok(Put::TooLarge),
                }
            };
            let within = at - start;
            let step = (run.span.bytes - within).min(bytes.len() as u64);
            let (now, later) = bytes.split_at(step as usize);
            let mapping = lender.mapping(alloc.extent(run.span.id));
            let good = run.good;
            run.clear(mapping, within);
            mapping.write((run.span.offset + within) as usize, now);
            run.good = run.good.max(within + step);
            alloc.good(run.span.id, run.good - good);
            at += step;
            self.size = self.size.max(at);
            bytes = later;
        }
        Ok(Put::Done)
    }

    /// Makes a run that has `at`, which none has, and as much of the `len` bytes behind it as comes at once.
    fn room(
        &mut self,
        alloc: &mut Alloc,
        lender: &mut impl Lender,
        at: u64,
        len: u64,
        times: &mut PoolTimes,
    ) -> Result<Put, Error> {
        let before = self.runs.range(..=at).next_back().map(|(start, run)| (*start, *run));
        let next = self.runs.range(at..).next().map(|(start, run)| (*start, *run));
        let low = before.map_or(0, |(start, run)| start + run.span.bytes);
        let high = next.map_or(STREAM_BYTES_MAX, |(start, _)| start);
        let mut chain = before.filter(|_| low == at).map_or(0, |(_, run)| run.chain);
        chain = chain.max(next.filter(|_| high - at <= len).map_or(0, |(_, run)| run.chain));
        let grain = self.grain(alloc.chunk(), chain);
        let mut start = low.max(at - at % grain);
        let end = (at + len).max(start.saturating_add(grain)).next_multiple_of(PAGE).min(high);
        let after = before.filter(|_| start == low).map(|(_, run)| run.span);
        let Some(mut span) = alloc.take(lender, (end - start, PAGE), after, times)? else {
            return Ok(Put::TooLarge);
        };
        // Less than was asked for goes to where it is needed: before what comes next, if that is near.
        if start + span.bytes <= at {
            start = if end - at <= span.bytes { end - span.bytes } else { at };
        }
        span = alloc.trim(span, end - start);
        // A piece may be a little longer than what there is room for: what is beyond is nobody's.
        let bytes = span.bytes.min(end - start);
        alloc.good(span.id, span.bytes - bytes);
        span.bytes = bytes;
        if self.runs.len() >= HANDED_RUNS_MAX {
            alloc.keep_all();
        }
        self.add(start, span, chain);
        Ok(Put::Done)
    }

    fn add(&mut self, start: u64, span: Span, chain: u64) {
        if let Some((at, run)) = self.runs.range_mut(..start).next_back()
            && at + run.span.bytes == start
            && (run.span.id, run.span.offset + run.span.bytes) == (span.id, span.offset)
        {
            run.span.bytes += span.bytes;
            run.chain = run.chain.saturating_add(span.bytes);
            return;
        }
        let chain = chain.saturating_add(span.bytes);
        self.runs.insert(start, Run { span, good: 0, chain });
    }

    /// Makes a gap of `len` bytes at `at` in the run that begins at `start` and has them.
    fn carve(&mut self, start: u64, at: u64, len: u64) {
        let Some(run) = self.runs.remove(&start) else { return };
        let Run { span, good, chain } = run;
        let part = |from: u64, to: u64| Run {
            span: Span { offset: span.offset + from, bytes: to - from, ..span },
            good: good.clamp(from, to) - from,
            chain,
        };
        if at > start {
            self.runs.insert(start, part(0, at - start));
        }
        if at + len < start + span.bytes {
            self.runs.insert(at + len, part(at + len - start, span.bytes));
        }
    }

    /// How much is taken at least.
    fn grain(&self, chunk: u64, chain: u64) -> u64 {
        let doublings = (self.runs.len() / PIECES_PER_DOUBLING).min(20);
        let least = (PAGE << doublings).min(chunk);
        let wanted = (chain / GROWTH).max(1);
        let wanted = 1u64 << wanted.ilog2();
        wanted.clamp(least, chunk)
    }

    /// Makes everything up to the size the stream's own, gives back what lies beyond, and lists the parts, at most
    /// `max`, by the names that pieces have here ([`Alloc::declare`]). What nobody wrote is zeros: of one piece of memory for all of it, where it has no own.
    pub(crate) fn finish(
        &mut self,
        alloc: &mut Alloc,
        zeros: &mut Zeros,
        lender: &mut impl Lender,
        max: usize,
        times: &mut PoolTimes,
    ) -> Result<Parts, Error> {
        for (_, beyond) in self.runs.split_off(&self.size) {
            alloc.give(beyond.span);
        }
        let mut largest = 0;
        let mut end = 0;
        for (start, run) in &mut self.runs {
            largest = largest.max(start - end);
            let bytes = run.span.bytes.min(self.size - start);
            let good = run.good;
            run.clear(lender.mapping(alloc.extent(run.span.id)), bytes);
            alloc.good(run.span.id, run.good - good);
            end = start + run.span.bytes;
        }
        if let Some(mut last) = self.runs.last_entry() {
            let (start, run) = (*last.key(), last.get_mut());
            run.span = alloc.trim(run.span, self.size - start);
            // The rest of the last line of the processor's cache is nobody's.
            alloc.good(run.span.id, run.span.bytes.saturating_sub(run.good));
            run.good = run.good.max(run.span.bytes);
        }
        if largest > 0 && !zeros.provide(alloc, lender, largest, times)? {
            return Ok(Parts::None);
        }
        Ok(self.list(zeros, max).map_or(Parts::None, Parts::Are))
    }

    fn list(&self, zeros: &Zeros, max: usize) -> Option<Vec<Part>> {
        let part = |span: Span, bytes| Part {
            from: PartFrom::Extent { id: span.id, offset: span.offset },
            bytes,
        };
        let mut parts = Vec::new();
        let mut at = 0;
        for (start, run) in &self.runs {
            while at < *start {
                let zeros = zeros.0?;
                let bytes = zeros.bytes.min(start - at);
                parts.push(part(zeros, bytes));
                at += bytes;
                if parts.len() > max {
                    return None;
                }
            }
            let bytes = run.span.bytes.min(self.size - start);
            parts.push(part(run.span, bytes));
            at += bytes;
        }
        (parts.len() <= max).then_some(parts)
    }

    /// Was a part handed over? Then it cannot be read here any more.
    pub(crate) fn is_handed(&self, alloc: &Alloc) -> bool {
        self.runs.values().any(|run| alloc.is_handed(run.span.id))
    }

    /// Writes everything to a file, which becomes as large; holes stay holes. Nothing was handed over.
    pub(crate) fn spill(&self, alloc: &Alloc, lender: &impl Lender, file: &File) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        for (start, run) in &self.runs {
            let mapping = lender.mapping(alloc.extent(run.span.id));
            let mut done = 0;
            while done < run.good {
                let step = (run.good - done).min(BUFFER as u64);
                let bytes = &mut buffer[..step as usize];
                mapping.read((run.span.offset + done) as usize, bytes);
                file.write_all_at(bytes, start + done)?;
                done += step;
            }
        }
        file.set_len(self.size)
    }

    /// Gives all memory back.
    pub(crate) fn give(self, alloc: &mut Alloc) {
        for run in self.runs.into_values() {
            alloc.not_good(run.span.id, run.good);
            alloc.give(run.span);
        }
    }
}

impl Run {
    /// Makes zeros of what is not the stream's below `end`.
    fn clear(&mut self, mapping: &Mapping, end: u64) {
        if self.good < end {
            fill(mapping, self.span.offset + self.good, end - self.good);
            self.good = end;
        }
    }
}

fn fill(mapping: &Mapping, offset: u64, bytes: u64) {
    let mut done = 0;
    while done < bytes {
        let step = (bytes - done).min(ZEROS.len() as u64);
        mapping.write((offset + done) as usize, &ZEROS[..step as usize]);
        done += step;
    }
}

/// Memory full of zeros, which all holes of all streams of a dataset share.
#[derive(Debug, Default)]
pub(crate) struct Zeros(Option<Span>);

impl Zeros {
    /// There is a piece for a hole of `bytes` bytes, or for as much of it as a chunk has. False: the pool is too small.
    fn provide(
        &mut self,
        alloc: &mut Alloc,
        lender: &mut impl Lender,
        bytes: u64,
        times: &mut PoolTimes,
    ) -> Result<bool, Error> {
        let want = bytes.clamp(PAGE, alloc.chunk());
        let least = want / 2;
        if self.0.is_some_and(|span| span.bytes >= least) {
            return Ok(true);
        }
        let Some(span) = alloc.take(lender, (want, least), None, times)? else {
            return Ok(self.0.is_some());
        };
        if self.0.is_some_and(|old| old.bytes >= span.bytes) {
            alloc.give(span);
            return Ok(true);
        }
        fill(lender.mapping(alloc.extent(span.id)), span.offset, span.bytes);
        alloc.good(span.id, span.bytes);
        // What had the place before is referred to by streams that are closed: it stays as it is.
        self.0 = Some(span);
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
