//! Adding products: `sum[i] ^= data[i] * by`, by what the processor has.
//!
//! All give the same bytes. AVX2 looks products up by halves of a byte, 16 at a time (Plank, Greenan, Miller, "Screaming
//! fast Galois field arithmetic using Intel SIMD instructions", FAST 2013); GFNI multiplies by the matrix of bits that
//! `by` is (its own multiplication is of another field).

use crate::gf::mul;

/// A way to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A table of all products, on any processor.
    Plain,
    /// 32 bytes at a time.
    Avx2,
    /// 64 bytes at a time.
    Gfni,
}

impl Kernel {
    /// All, slowest first.
    pub const ALL: [Kernel; 3] = [Kernel::Plain, Kernel::Avx2, Kernel::Gfni];

    /// Has this processor what it needs?
    pub fn runs_here(self) -> bool {
        match self {
            Kernel::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Kernel::Gfni => {
                std::arch::is_x86_feature_detected!("gfni")
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx2 | Kernel::Gfni => false,
        }
    }

    /// The fastest that runs here.
    pub fn best() -> Kernel {
        let mut all = Kernel::ALL.into_iter().rev();
        all.find(|k| k.runs_here()).expect("the plain one always does")
    }

    /// Adds `data` times `by` into `sum`. `data` may be shorter than `sum` (the missing rest counts as zeros).
    ///
    /// # Panics
    /// If `data` is longer than `sum`, or the processor has not what this kernel needs.
    pub fn mul_into(self, sum: &mut [u8], data: &[u8], by: u8) {
        assert!(data.len() <= sum.len(), "a contribution is no longer than its parity");
        assert!(self.runs_here(), "the processor has not what {self:?} needs");
        let sum = &mut sum[..data.len()];
        let done = match self {
            Kernel::Plain => 0,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has AVX2, as was asserted above.
            Kernel::Avx2 => unsafe { x86::avx2(sum, data, by) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has GFNI, AVX-512F and AVX-512BW, as was asserted above.
            Kernel::Gfni => unsafe { x86::gfni(sum, data, by) },
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx2 | Kernel::Gfni => unreachable!("it does not run here"),
        };
        plain(&mut sum[done..], &data[done..], by);
    }
}

fn plain(sum: &mut [u8], data: &[u8], by: u8) {
    if data.is_empty() {
        return;
    }
    let products: [u8; 256] = std::array::from_fn(|a| mul(a as u8, by));
    for (s, d) in sum.iter_mut().zip(data) {
        *s ^= products[usize::from(*d)];
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::gf::mul;
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256,
        _mm256_loadu_si256, _mm256_set1_epi8, _mm256_shuffle_epi8, _mm256_srli_epi64,
        _mm256_storeu_si256, _mm256_xor_si256, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512,
        _mm512_set1_epi64, _mm512_storeu_si512, _mm512_xor_si512,
    };

    /// # Safety
    /// The processor has AVX2. Both slices are equally long; gives how many bytes were done.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2(sum: &mut [u8], data: &[u8], by: u8) -> usize {
        assert_eq!(sum.len(), data.len());
        let low: [u8; 16] = std::array::from_fn(|n| mul(n as u8, by));
        let high: [u8; 16] = std::array::from_fn(|n| mul((n as u8) << 4, by));
        // SAFETY: each array has the 16 bytes that are loaded.
        let (low, high) = unsafe {
            (
                _mm256_broadcastsi128_si256(_mm_loadu_si128(low.as_ptr().cast::<__m128i>())),
                _mm256_broadcastsi128_si256(_mm_loadu_si128(high.as_ptr().cast::<__m128i>())),
            )
        };
        let half = _mm256_set1_epi8(0x0f);
        let whole = data.len() / 32 * 32;
        for at in (0..whole).step_by(32) {
            // SAFETY: `at + 32` is within both slices, which are equally long; loads and stores need no alignment.
            unsafe {
                let to = sum.as_mut_ptr().add(at).cast::<__m256i>();
                let d = _mm256_loadu_si256(data.as_ptr().add(at).cast::<__m256i>());
                let a = _mm256_shuffle_epi8(low, _mm256_and_si256(d, half));
                let b = _mm256_and_si256(_mm256_srli_epi64::<4>(d), half);
                let product = _mm256_xor_si256(a, _mm256_shuffle_epi8(high, b));
                _mm256_storeu_si256(to, _mm256_xor_si256(_mm256_loadu_si256(to), product));
            }
        }
        whole
    }

    /// The matrix of multiplication by `by`, as GF2P8AFFINEQB wants it: byte 7 - i is the row of the product's bit i, and
    /// its bit j says whether the factor's bit j is in that.
    fn matrix(by: u8) -> u64 {
        let column = |j: u32| mul(1 << j, by);
        let row = |i: u32| (0..8).fold(0u64, |row, j| row | u64::from(column(j) >> i & 1) << j);
        (0..8).fold(0, |all, i| all | row(i) << (8 * (7 - i)))
    }

    /// # Safety
    /// The processor has GFNI, AVX-512F and AVX-512BW. Both slices are equally long; gives how many bytes were done.
    #[target_feature(enable = "gfni,avx512f,avx512bw")]
    pub(super) unsafe fn gfni(sum: &mut [u8], data: &[u8], by: u8) -> usize {
        assert_eq!(sum.len(), data.len());
        let matrix = _mm512_set1_epi64(matrix(by).cast_signed());
        let whole = data.len() / 64 * 64;
        for at in (0..whole).step_by(64) {
            // SAFETY: `at + 64` is within both slices, which are equally long; loads and stores need no alignment.
            unsafe {
                let to = sum.as_mut_ptr().add(at);
                let d = _mm512_loadu_si512(data.as_ptr().add(at).cast());
                let product = _mm512_gf2p8affine_epi64_epi8::<0>(d, matrix);
                let old = _mm512_loadu_si512(to.cast());
                _mm512_storeu_si512(to.cast(), _mm512_xor_si512(old, product));
            }
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kernels() -> impl Iterator<Item = Kernel> {
        Kernel::ALL.into_iter().filter(|k| k.runs_here())
    }

    #[test]
    fn every_product_by_every_kernel() {
        let data: Vec<u8> = (0..=255).chain(0..=255).collect();
        for kernel in kernels() {
            for by in 0..=255 {
                let mut sum = vec![0x5a; data.len()];
                kernel.mul_into(&mut sum, &data, by);
                let right = data.iter().map(|d| 0x5a ^ mul(*d, by));
                assert!(sum.iter().copied().eq(right), "{kernel:?} by {by}");
            }
        }
    }

    #[test]
    fn the_best_one_runs_here() {
        assert!(Kernel::best().runs_here());
        assert!(Kernel::Plain.runs_here());
    }

    #[test]
    #[should_panic(expected = "no longer than its parity")]
    fn more_data_than_parity_is_a_bug() {
        Kernel::Plain.mul_into(&mut [0; 3], &[0; 4], 7);
    }

    proptest! {
        #[test]
        fn any_lengths_and_places(
            data in proptest::collection::vec(any::<u8>(), 0..400),
            skip in (0usize..70, 0usize..70),
            longer in 0usize..70,
            by: u8,
        ) {
            for kernel in kernels() {
                let from = &data[skip.0.min(data.len())..];
                let mut memory = vec![0xc3; skip.1 + from.len() + longer];
                kernel.mul_into(&mut memory[skip.1..], from, by);
                for (at, found) in memory.iter().enumerate() {
                    let product = at.checked_sub(skip.1).and_then(|n| from.get(n)).map_or(0, |d| mul(*d, by));
                    prop_assert_eq!(*found, 0xc3 ^ product, "{:?} at {}", kernel, at);
                }
            }
        }
    }
}
