//! `stanchion bench code`: the codes on one core, beside what is known to be fast: XOR beside memcpy, Reed-Solomon beside
//! Intel ISA-L where that is installed.
//!
//! Both sides have the same matrix and the same buffers, and take turns; what begins changes from round to round.

mod isal;

use super::{Row, at_least, fact, report, spread};
use crate::args::CodeArgs;
use crate::exit::{Exit, Failed};
use anyhow::{anyhow, ensure};
use isal::{Isal, Tables};
use serde_json::json;
use stanchion_code::kernel::Kernel;
use stanchion_code::rs::{Code, Matrix};
use std::hint::black_box;
use std::time::Instant;

/// The codes: pieces of data, parities.
const SHAPES: [(usize, usize); 2] = [(8, 2), (16, 4)];
/// XOR's part of memcpy's speed, at least.
const XOR_GOAL: f64 = 0.60;
/// Reed-Solomon's, of ISA-L's.
const RS_GOAL: f64 = 1.0;
/// The largest piece, KiB.
const SIZE_MAX: u32 = 64 << 10;

/// What goes over a stripe: its data, its sums.
type Stripe<'a> = dyn FnMut(&[&[u8]], &mut [&mut [u8]]) + 'a;

/// What is measured against what, of one size.
struct Pair {
    name: String,
    /// GB/s, round after round.
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

/// Where the buffers begin: at a page, as is best for everybody.
const PAGE: usize = 4096;

/// Pieces of one size.
struct Pieces {
    size: usize,
    /// Each with a page to spare.
    data: Vec<Vec<u8>>,
    sums: Vec<Vec<u8>>,
    /// Data that goes through at each measurement.
    bytes: u64,
}

/// Measures.
pub(super) fn run(args: &CodeArgs) -> Result<Exit, Failed> {
    let sizes = !args.sizes.is_empty() && args.sizes.iter().all(|s| (1..=SIZE_MAX).contains(s));
    if args.rounds == 0 || args.mb == 0 || !sizes {
        let text = "--rounds and --mb must be at least 1, --sizes between 1 and 65536";
        return Err(Failed::new(Exit::Usage, anyhow!(text)));
    }
    let isal = Isal::load();
    let mut rows = Vec::new();
    for size in &args.sizes {
        let mut pieces = Pieces::new(usize::try_from(*size)? << 10, args.mb << 20);
        rows.extend(xor(args, &mut pieces).rows("memcpy", Some(XOR_GOAL)));
        for shape in SHAPES {
            rows.extend(reed_solomon(args, &mut pieces, shape, isal)?);
        }
        rows.extend(kernels(args, &mut pieces)?);
    }
    let names = |here: bool| -> Vec<&str> {
        Kernel::ALL.into_iter().filter(|k| k.runs_here() == here).map(Kernel::name).collect()
    };
    let setup = json!({
        "rounds": args.rounds, "mb": args.mb, "sizes_kib": args.sizes,
        "kernel": Kernel::best().name(), "kernels_not_measured_here": names(false),
        "isal": isal.map_or("not installed (libisal2): no goals for Reed-Solomon".into(),
            |_| isal::LIBRARY.to_string_lossy()),
    });
    if !args.json {
        eprintln!(
            "kernel {}; not measured here: {}",
            Kernel::best().name(),
            names(false).join(", ")
        );
        if isal.is_none() {
            eprintln!("libisal2 is not installed: Reed-Solomon has nothing to be compared with");
        }
    }
    report("code", (args.json, args.check), setup, &rows)
}

impl Pair {
    fn new(pieces: &Pieces, what: &str) -> Pair {
        let name = format!("{} KiB: {what}", pieces.size >> 10);
        Pair { name, ours: Vec::new(), theirs: Vec::new() }
    }

    /// One round: both, in an order that changes.
    fn round(&mut self, round: u32, mut ours: impl FnMut() -> f64, theirs: impl FnOnce() -> f64) {
        if round.is_multiple_of(2) {
            self.ours.push(ours());
            self.theirs.push(theirs());
        } else {
            self.theirs.push(theirs());
            self.ours.push(ours());
        }
    }

    fn rows(&self, than: &str, goal: Option<f64>) -> Vec<Row> {
        let ratios: Vec<f64> = self.ours.iter().zip(&self.theirs).map(|(a, b)| a / b).collect();
        let name = |what: &str| format!("{} {what}", self.name);
        let mut rows = Vec::new();
        if let Some(goal) = goal {
            let s = spread(&ratios);
            rows.push(at_least(name(&format!("/ {than}")), s.median, "ratio", goal));
            rows.push(fact(name(&format!("/ {than}, least")), s.min, "ratio"));
            rows.push(fact(name(&format!("/ {than}, most")), s.max, "ratio"));
        }
        rows.push(fact(self.name.clone(), spread(&self.ours).median, "GB/s"));
        if goal.is_some() {
            rows.push(fact(name(&format!("by {than}")), spread(&self.theirs).median, "GB/s"));
        }
        rows
    }
}

impl Pieces {
    fn new(size: usize, bytes: u64) -> Pieces {
        let (k, m) = SHAPES.into_iter().max().unwrap_or((1, 1));
        let piece =
            |n: usize| (0..size + PAGE).map(move |at| (at * 131 + (at >> 7) * 17 + n * 71) as u8);
        let data = (0..k).map(|n| piece(n).collect()).collect();
        Pieces { size, data, sums: vec![vec![1; size + PAGE]; m], bytes }
    }

    /// So many of data, and of sums.
    fn some(&mut self, (k, m): (usize, usize)) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        let size = self.size;
        let start = |piece: &[u8]| piece.as_ptr().align_offset(PAGE);
        let data = self.data[..k].iter().map(|d| &d[start(d)..][..size]);
        let sums = self.sums[..m].iter_mut().map(|s| {
            let start = start(s);
            &mut s[start..][..size]
        });
        (data.collect(), sums.collect())
    }

    /// GB of data per second that `stripe` does, which has `k` pieces and `m` sums.
    fn rate(
        &mut self,
        (k, m): (usize, usize),
        mut stripe: impl FnMut(&[&[u8]], &mut [&mut [u8]]),
    ) -> f64 {
        let each = (self.size * k) as u64;
        let times = self.bytes.div_ceil(each);
        let (data, mut sums) = self.some((k, m));
        // What is not yet in the caches, nor at this speed, does not count.
        stripe(&data, &mut sums);
        let start = Instant::now();
        for _ in 0..times {
            stripe(black_box(&data), black_box(&mut sums));
        }
        (times * each) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// Pieces added into one, and pieces copied into one.
fn xor(args: &CodeArgs, pieces: &mut Pieces) -> Pair {
    let mut pair = Pair::new(pieces, "xor");
    let k = pieces.data.len();
    for round in 0..args.rounds {
        let cell = std::cell::RefCell::new(&mut *pieces);
        let added = || {
            cell.borrow_mut().rate((k, 1), |data, sums| {
                data.iter().for_each(|d| stanchion_code::xor_into(sums[0], d));
            })
        };
        let copied = || {
            cell.borrow_mut().rate((k, 1), |data, sums| {
                data.iter().for_each(|d| black_box(&mut *sums[0]).copy_from_slice(d));
            })
        };
        pair.round(round, added, copied);
    }
    pair
}

/// Both ways of making parities, each beside ISA-L's.
fn reed_solomon(
    args: &CodeArgs,
    pieces: &mut Pieces,
    (k, m): (usize, usize),
    isal: Option<Isal>,
) -> anyhow::Result<Vec<Row>> {
    let code = Code::new(k, m)?;
    let matrix = Matrix::of(code);
    let factor = |n| code.coefficient(n / k, n % k);
    let factors: Vec<u8> = (0..k * m).map(factor).collect();
    let tables = isal.map(|isal| isal.tables((k, m), &factors));
    if let Some(tables) = &tables {
        same(pieces, &matrix, tables)?;
    }
    let mut updates = Pair::new(pieces, &format!("RS({k},{m}), accumulating"));
    let mut stripes = Pair::new(pieces, &format!("RS({k},{m}), whole stripes"));
    for round in 0..args.rounds {
        let cell = std::cell::RefCell::new(&mut *pieces);
        let rate = |stripe: &mut Stripe<'_>| cell.borrow_mut().rate((k, m), stripe);
        let ours = || {
            rate(&mut |data, sums| {
                data.iter().enumerate().for_each(|(n, d)| matrix.update(n, d, sums));
            })
        };
        updates.round(round, ours, || {
            tables.as_ref().map_or(0.0, |t| {
                rate(&mut |data, sums| {
                    data.iter().enumerate().for_each(|(n, d)| t.update(n, d, sums));
                })
            })
        });
        let ours = || rate(&mut |data, sums| matrix.encode(data, sums));
        stripes.round(round, ours, || {
            tables.as_ref().map_or(0.0, |t| rate(&mut |data, sums| t.encode(data, sums)))
        });
    }
    let goal = tables.map(|_| RS_GOAL);
    let mut rows = updates.rows("ISA-L", goal);
    rows.extend(stripes.rows("ISA-L", goal));
    Ok(rows)
}

/// Both give the same bytes, whole and accumulated.
fn same(pieces: &mut Pieces, matrix: &Matrix, tables: &Tables) -> anyhow::Result<()> {
    let (k, m) = (matrix.columns(), matrix.rows());
    let (data, mut to) = pieces.some((k, m));
    let mut made: Vec<Vec<Vec<u8>>> = Vec::new();
    for way in 0..4 {
        to.iter_mut().for_each(|sum| sum.fill(0));
        match way {
            0 => tables.encode(&data, &mut to),
            1 => matrix.encode(&data, &mut to),
            2 => data.iter().enumerate().for_each(|(n, d)| tables.update(n, d, &mut to)),
            _ => data.iter().enumerate().for_each(|(n, d)| matrix.update(n, d, &mut to)),
        }
        made.push(to.iter().map(|sum| sum.to_vec()).collect());
    }
    ensure!(made.iter().all(|sums| *sums == made[0]), "RS({k},{m}) is not what ISA-L makes");
    Ok(())
}

/// What each kernel does that runs here.
fn kernels(args: &CodeArgs, pieces: &mut Pieces) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (k, m) in SHAPES {
        let matrix = Matrix::of(Code::new(k, m)?);
        for kernel in Kernel::ALL.into_iter().filter(|k| k.runs_here()) {
            // The plain one is slow, and a rate is a rate.
            let bytes = pieces.bytes;
            pieces.bytes = if kernel == Kernel::Plain { bytes.div_ceil(16) } else { bytes };
            let mut rates = [Vec::new(), Vec::new()];
            for _ in 0..args.rounds.div_ceil(3) {
                rates[0].push(pieces.rate((k, m), |data, sums| {
                    data.iter().enumerate().for_each(|(n, d)| matrix.update_by(kernel, n, d, sums));
                }));
                rates[1].push(pieces.rate((k, m), |data, sums| {
                    matrix.encode_by(kernel, data, sums);
                }));
            }
            pieces.bytes = bytes;
            for (rates, what) in rates.iter().zip(["accumulating", "whole stripes"]) {
                let (kib, kernel) = (pieces.size >> 10, kernel.name());
                let name = format!("{kib} KiB: RS({k},{m}), {what}, kernel {kernel}");
                rows.push(fact(name, spread(rates).median, "GB/s"));
            }
        }
    }
    Ok(rows)
}
