//! Adding products: `sum[i] ^= data[i] * by`, by what the processor has, for up to four sums at once.
//!
//! All give the same bytes. AVX2, AVX-512 and NEON look products up by halves of a byte, 16 at a time (Plank, Greenan,
//! Miller, "Screaming fast Galois field arithmetic using Intel SIMD instructions", FAST 2013); GFNI multiplies by the
//! matrix of bits that a factor is (its own multiplication is of another field).
//!
//! What a kernel does is written once, over [`vector::Vector`]: sums stay in registers while sources go by, or a source
//! while it is added into the sums.

mod plain;
#[cfg(test)]
mod tests;
mod vector;

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::gf::mul;
use std::ops::Range;
use std::sync::OnceLock;

/// Sums that are made at once.
const GROUP: usize = 4;
/// With more sums than a group has, sources are read once for each group: in pieces that the nearest caches keep.
const BLOCK: usize = 128 << 10;
/// Of each source no less than this at a time.
const BLOCK_MIN: usize = 4 << 10;
/// A cache line.
const LINE: usize = 64;
/// With less than this, where lines end does not matter.
const HEAD_MIN: usize = 16 << 10;
/// A source of a stripe: its bytes, and its factors in all sums.
pub(crate) type Source<'a> = (&'a [u8], &'a [Factor]);

/// What multiplies, in the forms that the kernels want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub(crate) struct Factor {
    /// Its products with 0 to 15.
    low: [u8; 16],
    /// Its products with those times 16.
    high: [u8; 16],
    /// The matrix of multiplication by it, as GF2P8AFFINEQB wants it: byte 7 - i is the row of the product's bit i, and
    /// its bit j says whether the other factor's bit j is in that.
    bits: u64,
}

static FACTORS: [Factor; 256] = {
    let mut all = [Factor { low: [0; 16], high: [0; 16], bits: 0 }; 256];
    let mut by = 0;
    while by < 256 {
        all[by] = Factor::new(by as u8);
        by += 1;
    }
    all
};

impl Factor {
    const fn new(by: u8) -> Factor {
        let mut factor = Factor { low: [0; 16], high: [0; 16], bits: 0 };
        let mut n = 0;
        while n < 16 {
            factor.low[n] = mul(n as u8, by);
            factor.high[n] = mul((n as u8) << 4, by);
            n += 1;
        }
        let mut bit = 0;
        while bit < 64 {
            let (row, column) = (7 - bit / 8, bit % 8);
            factor.bits |= ((mul(1 << column, by) >> row & 1) as u64) << bit;
            bit += 1;
        }
        factor
    }

    /// The prepared one.
    pub(crate) fn of(by: u8) -> &'static Factor {
        &FACTORS[usize::from(by)]
    }

    /// What it is.
    fn by(&self) -> u8 {
        self.low[1]
    }

    fn times(&self, a: u8) -> u8 {
        self.low[usize::from(a & 15)] ^ self.high[usize::from(a >> 4)]
    }
}

/// A way to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Byte by byte, on any processor.
    Plain,
    /// 16 bytes at a time, on 64-bit ARM.
    Neon,
    /// 32 bytes at a time.
    Avx2,
    /// 64 bytes at a time.
    Avx512,
    /// 64 bytes at a time, each by one instruction.
    Gfni,
}

impl Kernel {
    /// All, slowest first.
    pub const ALL: [Kernel; 5] =
        [Kernel::Plain, Kernel::Neon, Kernel::Avx2, Kernel::Avx512, Kernel::Gfni];

    /// As it is called in results.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Plain => "plain",
            Kernel::Neon => "neon",
            Kernel::Avx2 => "avx2",
            Kernel::Avx512 => "avx512",
            Kernel::Gfni => "gfni",
        }
    }

    /// Has this processor what it needs?
    #[cfg(target_arch = "x86_64")]
    pub fn runs_here(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Kernel::Plain => true,
            Kernel::Neon => false,
            Kernel::Avx2 => has!("avx2"),
            Kernel::Avx512 => has!("avx512f") && has!("avx512bw"),
            Kernel::Gfni => has!("gfni") && has!("avx512f") && has!("avx512bw"),
        }
    }

    /// Has this processor what it needs?
    #[cfg(target_arch = "aarch64")]
    pub fn runs_here(self) -> bool {
        match self {
            Kernel::Plain => true,
            Kernel::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Kernel::Avx2 | Kernel::Avx512 | Kernel::Gfni => false,
        }
    }

    /// Has this processor what it needs?
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn runs_here(self) -> bool {
        self == Kernel::Plain
    }

    /// The fastest that runs here. The processor is asked once.
    pub fn best() -> Kernel {
        static BEST: OnceLock<Kernel> = OnceLock::new();
        *BEST.get_or_init(|| {
            let mut all = Kernel::ALL.into_iter().rev();
            all.find(|k| k.runs_here()).expect("the plain one always does")
        })
    }

    /// Adds `data` times `by` into `sum`. `data` may be shorter than `sum` (the missing rest counts as zeros).
    ///
    /// # Panics
    /// If `data` is longer than `sum`, or the processor has not what this kernel needs.
    pub fn mul_into(self, sum: &mut [u8], data: &[u8], by: u8) {
        self.update(std::slice::from_ref(Factor::of(by)), data, &mut [sum]);
    }

    /// Adds `data` into each sum, times the factor of the same place.
    pub(crate) fn update(self, factors: &[Factor], data: &[u8], sums: &mut [&mut [u8]]) {
        assert_eq!(factors.len(), sums.len(), "each sum has its factor");
        let fits = sums.iter().all(|sum| data.len() <= sum.len());
        assert!(fits, "a contribution is no longer than its parity");
        assert!(self.runs_here(), "the processor has not what {self:?} needs");
        let block = if sums.len() > GROUP { BLOCK } else { usize::MAX };
        let head = head(sums, &(0..data.len()));
        plain::update(factors, data, sums, 0..head);
        for range in blocks(head..data.len(), block) {
            for (factors, sums) in factors.chunks(GROUP).zip(sums.chunks_mut(GROUP)) {
                let done = self.update_whole(factors, data, sums, range.clone());
                plain::update(factors, data, sums, done..range.end);
            }
        }
    }

    /// Makes a range of each sum of all sources: of each its bytes there, times its factor in this sum.
    pub(crate) fn encode(
        self,
        sources: &[Source<'_>],
        sums: &mut [&mut [u8]],
        range: Range<usize>,
    ) {
        let reach = sources.iter().all(|(data, _)| range.end <= data.len());
        assert!(reach && sums.iter().all(|sum| range.end <= sum.len()), "all have the range");
        let each = sources.iter().all(|(_, factors)| factors.len() == sums.len());
        assert!(each, "each source has a factor in each sum");
        assert!(self.runs_here(), "the processor has not what {self:?} needs");
        let part = (BLOCK / sources.len().max(1)).max(BLOCK_MIN);
        let block = if sums.len() > GROUP { part } else { usize::MAX };
        let head = head(sums, &range);
        plain::encode(sources, 0, sums, range.start..head);
        for range in blocks(head..range.end, block) {
            for (n, sums) in sums.chunks_mut(GROUP).enumerate() {
                let done = self.encode_whole(sources, n * GROUP, sums, range.clone());
                plain::encode(sources, n * GROUP, sums, done..range.end);
            }
        }
    }

    /// Does the vectors that are whole, and gives where the rest begins.
    fn update_whole(
        self,
        factors: &[Factor],
        data: &[u8],
        sums: &mut [&mut [u8]],
        range: Range<usize>,
    ) -> usize {
        match self {
            // SAFETY: the processor has AVX2, as `update` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => unsafe { x86::avx2_update(factors, data, sums, range) },
            // SAFETY: the processor has AVX-512F and BW, as `update` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => unsafe { x86::avx512_update(factors, data, sums, range) },
            // SAFETY: the processor has GFNI, AVX-512F and BW, as `update` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni => unsafe { x86::gfni_update(factors, data, sums, range) },
            // SAFETY: the processor has NEON, as `update` asserted; it is our only caller.
            #[cfg(target_arch = "aarch64")]
            Kernel::Neon => unsafe { arm::neon_update(factors, data, sums, range) },
            _ => range.start,
        }
    }

    /// The same for a stripe.
    fn encode_whole(
        self,
        sources: &[Source<'_>],
        first: usize,
        sums: &mut [&mut [u8]],
        range: Range<usize>,
    ) -> usize {
        match self {
            // SAFETY: the processor has AVX2, as `encode` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => unsafe { x86::avx2_encode(sources, first, sums, range) },
            // SAFETY: the processor has AVX-512F and BW, as `encode` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => unsafe { x86::avx512_encode(sources, first, sums, range) },
            // SAFETY: the processor has GFNI, AVX-512F and BW, as `encode` asserted; it is our only caller.
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni => unsafe { x86::gfni_encode(sources, first, sums, range) },
            // SAFETY: the processor has NEON, as `encode` asserted; it is our only caller.
            #[cfg(target_arch = "aarch64")]
            Kernel::Neon => unsafe { arm::neon_encode(sources, first, sums, range) },
            _ => range.start,
        }
    }
}

/// Where the vectors are to begin: where no write of the first sum goes over a cache line's end. Memory of the allocator
/// begins 16 bytes behind a page's start, so that the other sums and the sources mostly have it there as well.
fn head(sums: &[&mut [u8]], range: &Range<usize>) -> usize {
    let Some(sum) = sums.first() else { return range.start };
    let skip = sum[range.start..].as_ptr().align_offset(LINE);
    if range.len() >= HEAD_MIN && skip < LINE { range.start + skip } else { range.start }
}

fn blocks(all: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    all.clone().step_by(len).map(move |at| at..at.saturating_add(len).min(all.end))
}
