//! One writer of the job.

use super::{ROUNDS_WARM, Times, load, streams_file};
use crate::args::AggregateRankArgs;
use crate::bench::job;
use crate::exit::Exit;
use anyhow::Context;
use stanchion::{Client, FLAG_CHECKPOINT, Level, Mode, Options};
use stanchion_format::segment::BLOCK;
use stanchion_io::fs::{Fs, How, PosixFs};
use stanchion_io::store::{BlockingWriter, Source, UringWriter, Write, Writer};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

/// For the data to be durable, milliseconds.
const DURABLE_MS: u64 = 600_000;
/// Requests of the raw writer under way, and bytes of each.
const RAW_DEPTH: u32 = 8;
const RAW_BYTES: usize = 8 << 20;

/// A rank measures in turn with all others.
pub(crate) fn rank(args: &AggregateRankArgs) -> Result<Exit, crate::exit::Failed> {
    job::leave(&args.work, args.rank, &measure(args)?)
}

struct Bench<'a> {
    args: &'a AggregateRankArgs,
    client: Client,
    /// The calls of one stream, and the bytes that they write.
    calls: Vec<u64>,
    data: Vec<u8>,
    total: u64,
    times: Times,
}

fn measure(args: &AggregateRankArgs) -> anyhow::Result<Times> {
    let streams = load(&streams_file(&args.work))?;
    let mine = &streams[args.rank as usize % streams.len()];
    let calls: Vec<u64> =
        std::iter::repeat_n(mine, args.copies as usize).flatten().copied().collect();
    let sum = |calls: &[u64]| calls.iter().sum::<u64>() * args.copies;
    let total = (0..args.ranks as usize).map(|r| sum(&streams[r % streams.len()])).sum();
    let most = usize::try_from(calls.iter().copied().max().unwrap_or(0))?;
    let data = (0..most + BLOCK).map(|n| (n >> 3) as u8 ^ args.rank as u8).collect();
    let mut options = Options::from_environment();
    options.identity = Some((args.rank, args.ranks));
    let client = Client::connect(&options)?;
    let mut bench = Bench { args, client, calls, data, total, times: Times::default() };
    let own: u64 = bench.calls.iter().sum();
    // What a program does that knows how much it will write.
    bench.client.expect(0, own)?;
    let raw = (args.rank == 0).then(|| Raw::new(&args.work, bench.total)).transpose()?;
    for round in 0..args.repeats + ROUNDS_WARM {
        let counts = round >= ROUNDS_WARM;
        for n in 0..4 {
            match (round + n) % 4 {
                0 => bench.files(counts, false)?,
                1 => bench.pool(counts, round)?,
                2 => bench.raw(counts, raw.as_ref())?,
                _ if args.dsync => bench.files(counts, true)?,
                _ => {}
            }
        }
    }
    bench.client.finalize()?;
    Ok(bench.times)
}

impl Bench<'_> {
    /// Each call's bytes: from another place each time, as they are in a program.
    fn bytes(&self, n: usize) -> &[u8] {
        let from = n * 64 % BLOCK;
        &self.data[from..from + self.calls[n] as usize]
    }

    /// A file a process: through the page cache and synced, or each call for itself.
    fn files(&mut self, counts: bool, dsync: bool) -> anyhow::Result<()> {
        let path = self.args.work.join(format!("file.{}", self.args.rank));
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        if dsync {
            options.custom_flags(rustix::fs::OFlags::DSYNC.bits().cast_signed());
        }
        self.client.barrier()?;
        let start = Instant::now();
        let mut file = options.open(&path)?;
        for n in 0..self.calls.len() {
            file.write_all(self.bytes(n))?;
        }
        let written = start.elapsed().as_secs_f64();
        file.sync_all()?;
        let durable = start.elapsed().as_secs_f64();
        drop(file);
        // What removing costs is nobody's here.
        std::fs::remove_file(&path)?;
        File::open(&self.args.work)?.sync_all()?;
        self.client.barrier()?;
        if counts {
            let to = if dsync { &mut self.times.dsync } else { &mut self.times.files };
            to.push(written, durable);
        }
        Ok(())
    }

    fn pool(&mut self, counts: bool, round: u32) -> anyhow::Result<()> {
        self.client.barrier()?;
        let start = Instant::now();
        let begun = self.client.begin(&format!("round{round}"), FLAG_CHECKPOINT)?;
        let id = self.client.stream_open(&format!("image.{}", self.args.rank), Mode::Write)?;
        for n in 0..self.calls.len() {
            let from = n * 64 % BLOCK;
            let bytes = &self.data[from..from + self.calls[n] as usize];
            self.client.stream_write(id, bytes)?;
        }
        self.client.stream_close(id)?;
        self.client.complete(true)?;
        let created = start.elapsed().as_secs_f64();
        self.client.wait(begun.no, Level::Protected, DURABLE_MS)?;
        let durable = start.elapsed().as_secs_f64();
        self.client.barrier()?;
        if counts {
            self.times.pool.push(created, durable);
        }
        Ok(())
    }

    fn raw(&mut self, counts: bool, raw: Option<&Raw>) -> anyhow::Result<()> {
        self.client.barrier()?;
        let start = Instant::now();
        if let Some(raw) = raw {
            raw.write(self.total)?;
        }
        let took = start.elapsed().as_secs_f64();
        self.client.barrier()?;
        if counts {
            self.times.raw.push(took);
        }
        Ok(())
    }
}

/// The device's own speed: one writer, large direct writes one behind the other, several under way, into a file whose
/// blocks exist.
struct Raw {
    file: Box<dyn stanchion_io::fs::Handle>,
    plain: Box<dyn stanchion_io::fs::Handle>,
    writer: Box<dyn Writer>,
    data: Vec<u8>,
}

impl Raw {
    fn new(work: &Path, total: u64) -> anyhow::Result<Raw> {
        let dir = work.join("raw");
        let errno = std::io::Error::from;
        let fs = PosixFs::own(&dir).map_err(errno)?;
        let name = Path::new("raw");
        let made = fs.open(name, How::Create(0o600)).map_err(errno)?;
        made.reserve(total.next_multiple_of(BLOCK as u64)).map_err(errno)?;
        let file = fs.open(name, How::Direct).map_err(errno).context("direct I/O")?;
        let writer: Box<dyn Writer> = match UringWriter::new(RAW_DEPTH) {
            Ok(writer) => Box::new(writer),
            Err(_) => Box::new(BlockingWriter),
        };
        let data = vec![0x5a; RAW_BYTES + BLOCK];
        Ok(Raw { file, plain: made, writer, data })
    }

    fn write(&self, total: u64) -> anyhow::Result<()> {
        let skip = self.data.as_ptr().addr().wrapping_neg() % BLOCK;
        let block = &self.data[skip..skip + RAW_BYTES];
        let total = total.next_multiple_of(BLOCK as u64);
        let step = |at: u64| Write {
            from: Source::from(&block[..(total - at).min(RAW_BYTES as u64) as usize]),
            offset: at,
        };
        let writes: Vec<Write<'_>> = (0..total).step_by(RAW_BYTES).map(step).collect();
        let errno = std::io::Error::from;
        self.writer.write(&*self.file, &writes).map_err(errno)?;
        Ok(self.plain.sync_data().map_err(errno)?)
    }
}
