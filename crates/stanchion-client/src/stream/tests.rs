//! Streams against a vector of bytes.

use super::*;
use crate::alloc::tests::Bank;

const CHUNK: u64 = 32 << 10;

struct Rig {
    bank: Bank,
    alloc: Alloc,
    zeros: Zeros,
    times: PoolTimes,
}

impl Rig {
    fn new(sizes: &[u64], limit: u64) -> Rig {
        Rig {
            bank: Bank::new(sizes, limit),
            alloc: Alloc::new(CHUNK),
            zeros: Zeros::default(),
            times: PoolTimes::default(),
        }
    }

    fn put(&mut self, ranges: &mut Ranges, at: u64, bytes: &[u8]) -> Put {
        ranges.put(&mut self.alloc, &mut self.bank, at, bytes, &mut self.times).unwrap()
    }

    fn finish(&mut self, ranges: &mut Ranges, max: usize) -> Parts {
        let Rig { bank, alloc, zeros, times } = self;
        ranges.finish(alloc, zeros, bank, max, times).unwrap()
    }

    fn bytes(&self, parts: &Parts) -> Vec<u8> {
        let Parts::Are(parts) = parts else { panic!("it is in memory") };
        let mut parts = parts.clone();
        self.alloc.declare(&mut parts);
        let mut all = Vec::new();
        for Part { from, bytes } in &parts {
            assert!(*bytes > 0);
            match from {
                PartFrom::Extent { id, offset } => {
                    all.extend(self.bank.read(*id, *offset, *bytes));
                }
                PartFrom::Filled { number, offset } => {
                    let stored = &self.bank.stored[number];
                    all.extend(&stored[*offset as usize..(*offset + *bytes) as usize]);
                }
            }
        }
        all
    }
}

fn model(model: &mut Vec<u8>, at: u64, bytes: &[u8]) {
    let end = at as usize + bytes.len();
    if model.len() < end && !bytes.is_empty() {
        model.resize(end, 0);
    }
    model[at as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn check(ranges: &Ranges) {
    let mut end = 0;
    for (start, run) in &ranges.runs {
        assert!(*start >= end, "runs overlap");
        assert!(run.good <= run.span.bytes && run.span.bytes > 0);
        end = start + run.span.bytes;
    }
}

/// (which stream, where: its kind and number, bytes: count and value)
type Step = (u8, u8, u32, u16, u8);

/// Several streams in turns; each is in the end what a vector would be, in memory and as a file.
fn play(steps: &[Step], sizes: &[u64]) {
    play_in(steps, sizes, false);
    // FM-P11: what is full is taken away, its memory is lent again, and nobody notices.
    play_in(steps, sizes, true);
}

fn play_in(steps: &[Step], sizes: &[u64], storing: bool) {
    let mut rig = Rig::new(sizes, 1 << 30);
    rig.bank.storing = storing;
    let mut streams: Vec<(Ranges, Vec<u8>, u64)> = (0..3).map(|_| Default::default()).collect();
    for (which, kind, place, count, value) in steps {
        let (ranges, want, at) = &mut streams[usize::from(*which) % 3];
        match kind % 8 {
            0 => *at = u64::from(*place) % (1 << 20),
            1 => *at = want.len() as u64 / 2,
            2 => *at = want.len() as u64 + u64::from(*place) % 10_000,
            3 => *at = at.saturating_sub(2 * u64::from(*count)),
            _ => {}
        }
        let count = if kind & 16 == 0 { *count % 100 } else { *count };
        let bytes: Vec<u8> = (0..count).map(|n| value.wrapping_add(n as u8)).collect();
        assert_eq!(rig.put(ranges, *at, &bytes), Put::Done);
        if !bytes.is_empty() {
            model(want, *at, &bytes);
        }
        *at += bytes.len() as u64;
        check(ranges);
    }
    let mut done = Vec::new();
    for (mut ranges, want, _) in streams {
        let file = tempfile::tempfile().unwrap();
        if ranges.is_handed(&rig.alloc) {
            let parts = rig.finish(&mut ranges, usize::MAX);
            done.push((parts, want));
            continue;
        }
        ranges.spill(&rig.alloc, &rig.bank, &file).unwrap();
        let mut spilled = vec![1; want.len()];
        file.read_exact_at(&mut spilled, 0).unwrap();
        assert!(spilled == want, "as a file");
        assert_eq!(file.metadata().unwrap().len(), want.len() as u64);
        let parts = rig.finish(&mut ranges, usize::MAX);
        done.push((parts, want));
    }
    // Only now: closing one must not harm another.
    for (parts, want) in done {
        assert!(rig.bytes(&parts) == want, "in memory");
    }
}

#[test]
fn any_writes_in_any_order_are_what_a_vector_would_be() {
    bolero::check!().with_type::<Vec<Step>>().with_iterations(300).for_each(|steps| {
        play(steps, &[CHUNK]);
        play(steps, &[CHUNK, 4 * CHUNK, 12_345]);
    });
}

#[test]
fn long_random_histories() {
    // Longer ones than a generator makes; the numbers are a fixed sequence.
    let mut n = 88_172_645_463_325_252u64;
    let mut next = || {
        n ^= n << 13;
        n ^= n >> 7;
        n ^= n << 17;
        n
    };
    for _ in 0..8 {
        let step =
            |r: u64| (r as u8, (r >> 8) as u8, (r >> 16) as u32, (r >> 48) as u16 % 9000, r as u8);
        let steps: Vec<Step> = (0..600).map(|_| step(next())).collect();
        play(&steps, &[CHUNK, 16 * CHUNK]);
    }
}

#[test]
fn a_stream_from_its_beginning_is_few_parts() {
    let mut rig = Rig::new(&[16 * CHUNK], 1 << 30);
    let mut ranges = Ranges::default();
    let bytes: Vec<u8> = (0..5_000_003u32).map(|n| ((n * 7) >> 4) as u8).collect();
    for (n, piece) in bytes.chunks(1001).enumerate() {
        rig.put(&mut ranges, n as u64 * 1001, piece);
    }
    assert_eq!(ranges.runs.len(), 10, "as many as there are extents");
    assert_eq!(rig.bank.lent(), 10 * 16 * CHUNK);
    let parts = rig.finish(&mut ranges, 10);
    assert!(rig.bytes(&parts) == bytes);
}

#[test]
fn a_stream_from_its_end_is_few_parts_as_well() {
    let mut rig = Rig::new(&[CHUNK], 1 << 30);
    let mut ranges = Ranges::default();
    let bytes: Vec<u8> = (0..150_000u32).map(|n| ((n * 7) >> 4) as u8).collect();
    for at in (0..bytes.len()).rev() {
        rig.put(&mut ranges, at as u64, &bytes[at..=at]);
    }
    let parts = rig.finish(&mut ranges, usize::MAX);
    assert!(rig.bytes(&parts) == bytes);
    let Parts::Are(parts) = parts else { unreachable!() };
    assert!(parts.len() < 60, "{}", parts.len());
    assert!(rig.bank.lent() <= 9 * CHUNK, "{}", rig.bank.lent());
}

#[test]
fn a_thousand_small_streams_share_extents() {
    let mut rig = Rig::new(&[CHUNK], 1 << 30);
    let mut all = Vec::new();
    for n in 0..1000u32 {
        let mut ranges = Ranges::default();
        rig.put(&mut ranges, 0, &n.to_le_bytes());
        all.push(rig.finish(&mut ranges, 1));
    }
    // 64 bytes each, and one page more for the one that is open.
    assert!(rig.bank.lent() <= 3 * CHUNK);
    for (n, parts) in (0u32..).zip(&all) {
        assert_eq!(rig.bytes(parts), n.to_le_bytes());
    }
    // All open at once they need a page each until they are closed.
    let mut open: Vec<Ranges> = (0..1000).map(|_| Ranges::default()).collect();
    for ranges in &mut open {
        rig.put(ranges, 0, b"x");
    }
    assert!(rig.bank.lent() <= 1100 * PAGE + 17 * CHUNK, "{}", rig.bank.lent());
}

#[test]
fn holes_take_no_memory() {
    let mut rig = Rig::new(&[CHUNK], 1 << 30);
    let mut ranges = Ranges::default();
    let far = 1u64 << 24;
    rig.put(&mut ranges, far, b"end");
    rig.put(&mut ranges, 5, b"begin");
    assert_eq!(ranges.size(), far + 3);
    let parts = rig.finish(&mut ranges, usize::MAX);
    assert!(rig.bank.lent() <= 4 * CHUNK);
    let bytes = rig.bytes(&parts);
    assert_eq!(bytes.len() as u64, far + 3);
    assert_eq!((&bytes[..5], &bytes[5..10]), (&[0; 5][..], &b"begin"[..]));
    assert!(bytes[10..far as usize].iter().all(|b| *b == 0));
    assert_eq!(&bytes[far as usize..], b"end");
    // Another stream uses the same zeros; a hole of too many parts is none for memory.
    let zeros = rig.zeros.0;
    let mut other = Ranges::default();
    rig.put(&mut other, far, b"x");
    assert!(matches!(rig.finish(&mut other, usize::MAX), Parts::Are(_)));
    assert_eq!(rig.zeros.0, zeros);
    let mut vast = Ranges::default();
    rig.put(&mut vast, STREAM_BYTES_MAX - 1, b"x");
    assert_eq!(vast.size(), STREAM_BYTES_MAX);
    assert_eq!(rig.finish(&mut vast, 1000), Parts::None);
}

#[test]
fn scattered_writes_are_a_bounded_number_of_parts() {
    let mut rig = Rig::new(&[16 * CHUNK], 1 << 32);
    let mut ranges = Ranges::default();
    // Every third page of 48 MiB, from the end.
    let pages = 4000u64;
    for n in (0..pages).rev() {
        rig.put(&mut ranges, n * 3 * PAGE, b"page");
    }
    assert!(ranges.runs.len() < 4096, "{}", ranges.runs.len());
    let parts = rig.finish(&mut ranges, usize::MAX);
    let bytes = rig.bytes(&parts);
    for (n, page) in bytes.chunks(PAGE as usize).enumerate() {
        let (word, rest) = page.split_at(4);
        assert_eq!(word, if n % 3 == 0 { b"page" } else { &[0; 4] });
        assert!(rest.iter().all(|b| *b == 0));
    }
}

#[test]
fn too_much_is_said_so_and_everything_can_be_had_as_a_file() {
    let mut rig = Rig::new(&[CHUNK], 3 * CHUNK);
    let mut ranges = Ranges::default();
    let bytes = vec![7; 4 * CHUNK as usize];
    assert_eq!(rig.put(&mut ranges, 10, &bytes[..2 * CHUNK as usize]), Put::Done);
    assert_eq!(rig.put(&mut ranges, 10 + 2 * CHUNK, &bytes[2 * CHUNK as usize..]), Put::TooLarge);
    let file = tempfile::tempfile().unwrap();
    ranges.spill(&rig.alloc, &rig.bank, &file).unwrap();
    let mut have = vec![1; 10 + 2 * CHUNK as usize];
    file.read_exact_at(&mut have, 0).unwrap();
    assert!(have[..10].iter().all(|b| *b == 0) && have[10..].iter().all(|b| *b == 7));
    ranges.give(&mut rig.alloc);
    // What it had serves the next.
    let mut next = Ranges::default();
    assert_eq!(rig.put(&mut next, 0, &bytes[..3 * CHUNK as usize]), Put::Done);
    assert!(rig.bank.lent() <= 3 * CHUNK);
}
