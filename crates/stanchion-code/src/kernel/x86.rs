//! Vectors of x86-64: AVX2, AVX-512 without and with GFNI.

use super::vector::{self, Vector};
use super::{Factor, Source};
#[allow(clippy::wildcard_imports, reason = "dozens of names that begin with _mm")]
use std::arch::x86_64::*;
use std::ops::Range;

#[derive(Clone, Copy)]
struct Avx2(__m256i);

// SAFETY: 32 bytes are what the type has, and what the instructions that it names load and store.
unsafe impl Vector for Avx2 {
    const BYTES: usize = 32;
    type By = (__m256i, __m256i);
    type Split = (__m256i, __m256i);

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the processor has AVX2: our caller's promise.
        unsafe { Avx2(_mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the processor has AVX2: our caller's promise, and that 32 bytes may be read.
        unsafe { Avx2(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the processor has AVX2: our caller's promise, and that 32 bytes may be written.
        unsafe { _mm256_storeu_si256(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the processor has AVX2: our caller's promise.
        unsafe { Avx2(_mm256_xor_si256(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the processor has AVX2: our caller's promise.
        unsafe {
            let half = _mm256_set1_epi8(0x0f);
            let high = _mm256_srli_epi64::<4>(self.0);
            (_mm256_and_si256(self.0, half), _mm256_and_si256(high, half))
        }
    }

    #[inline(always)]
    unsafe fn by(factor: &Factor) -> Self::By {
        // SAFETY: the processor has AVX2: our caller's promise; an array has the 16 bytes that are loaded.
        unsafe {
            let wide =
                |t: &[u8; 16]| _mm256_broadcastsi128_si256(_mm_loadu_si128(t.as_ptr().cast()));
            (wide(&factor.low), wide(&factor.high))
        }
    }

    #[inline(always)]
    unsafe fn times(split: Self::Split, by: Self::By) -> Self {
        // SAFETY: the processor has AVX2: our caller's promise.
        unsafe {
            let low = _mm256_shuffle_epi8(by.0, split.0);
            Avx2(_mm256_xor_si256(low, _mm256_shuffle_epi8(by.1, split.1)))
        }
    }

    #[inline(always)]
    fn ahead(at: *const u8) {
        // SAFETY: a hint, which reads nothing and may name any address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

#[derive(Clone, Copy)]
struct Avx512(__m512i);

// SAFETY: 64 bytes are what the type has, and what the instructions that it names load and store.
unsafe impl Vector for Avx512 {
    const BYTES: usize = 64;
    type By = (__m512i, __m512i);
    type Split = (__m512i, __m512i);

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise.
        unsafe { Avx512(_mm512_setzero_si512()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise, and that 64 bytes may be read.
        unsafe { Avx512(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise, and that 64 bytes may be written.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise.
        unsafe { Avx512(_mm512_xor_si512(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise.
        unsafe {
            let half = _mm512_set1_epi8(0x0f);
            let high = _mm512_srli_epi64::<4>(self.0);
            (_mm512_and_si512(self.0, half), _mm512_and_si512(high, half))
        }
    }

    #[inline(always)]
    unsafe fn by(factor: &Factor) -> Self::By {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise; an array has the 16 bytes that are loaded.
        unsafe {
            let wide = |t: &[u8; 16]| _mm512_broadcast_i32x4(_mm_loadu_si128(t.as_ptr().cast()));
            (wide(&factor.low), wide(&factor.high))
        }
    }

    #[inline(always)]
    unsafe fn times(split: Self::Split, by: Self::By) -> Self {
        // SAFETY: the processor has AVX-512F and BW: our caller's promise.
        unsafe {
            let low = _mm512_shuffle_epi8(by.0, split.0);
            Avx512(_mm512_xor_si512(low, _mm512_shuffle_epi8(by.1, split.1)))
        }
    }

    #[inline(always)]
    fn ahead(at: *const u8) {
        // SAFETY: a hint, which reads nothing and may name any address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

#[derive(Clone, Copy)]
struct Gfni(__m512i);

// SAFETY: 64 bytes are what the type has, and what the instructions that it names load and store.
unsafe impl Vector for Gfni {
    const BYTES: usize = 64;
    type By = __m512i;
    type Split = __m512i;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
        unsafe { Gfni(_mm512_setzero_si512()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise, and that 64 bytes may be read.
        unsafe { Gfni(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise, and that 64 bytes may be written.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
        unsafe { Gfni(_mm512_xor_si512(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        self.0
    }

    #[inline(always)]
    unsafe fn by(factor: &Factor) -> Self::By {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
        unsafe { _mm512_set1_epi64(factor.bits.cast_signed()) }
    }

    #[inline(always)]
    unsafe fn times(split: Self::Split, by: Self::By) -> Self {
        // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
        unsafe { Gfni(_mm512_gf2p8affine_epi64_epi8::<0>(split, by)) }
    }

    #[inline(always)]
    fn ahead(at: *const u8) {
        // SAFETY: a hint, which reads nothing and may name any address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2_update(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has AVX2: our caller's promise.
    unsafe { vector::update::<Avx2>(factors, data, sums, range) }
}

/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn avx2_encode(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has AVX2: our caller's promise.
    unsafe { vector::encode::<Avx2>(sources, first, sums, range) }
}

/// # Safety
/// The processor has AVX-512F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn avx512_update(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has AVX-512F and BW: our caller's promise.
    unsafe { vector::update::<Avx512>(factors, data, sums, range) }
}

/// # Safety
/// The processor has AVX-512F and BW.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn avx512_encode(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has AVX-512F and BW: our caller's promise.
    unsafe { vector::encode::<Avx512>(sources, first, sums, range) }
}

/// # Safety
/// The processor has GFNI, AVX-512F and BW.
#[target_feature(enable = "gfni,avx512f,avx512bw")]
pub(super) unsafe fn gfni_update(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
    unsafe { vector::update::<Gfni>(factors, data, sums, range) }
}

/// # Safety
/// The processor has GFNI, AVX-512F and BW.
#[target_feature(enable = "gfni,avx512f,avx512bw")]
pub(super) unsafe fn gfni_encode(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has GFNI, AVX-512F and BW: our caller's promise.
    unsafe { vector::encode::<Gfni>(sources, first, sums, range) }
}
