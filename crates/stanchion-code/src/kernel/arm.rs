//! Vectors of 64-bit ARM.

use super::vector::{self, Vector};
use super::{Factor, Source};
use std::arch::aarch64::*;
use std::ops::Range;

#[derive(Clone, Copy)]
struct Neon(uint8x16_t);

// SAFETY: 16 bytes are what the type has, and what the instructions that it names load and store.
unsafe impl Vector for Neon {
    const BYTES: usize = 16;
    type By = (uint8x16_t, uint8x16_t);
    type Split = (uint8x16_t, uint8x16_t);

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the processor has NEON: our caller's promise.
        unsafe { Neon(vdupq_n_u8(0)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the processor has NEON: our caller's promise, and that 16 bytes may be read.
        unsafe { Neon(vld1q_u8(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the processor has NEON: our caller's promise, and that 16 bytes may be written.
        unsafe { vst1q_u8(to, self.0) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: the processor has NEON: our caller's promise.
        unsafe { Neon(veorq_u8(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the processor has NEON: our caller's promise.
        unsafe { (vandq_u8(self.0, vdupq_n_u8(0x0f)), vshrq_n_u8::<4>(self.0)) }
    }

    #[inline(always)]
    unsafe fn by(factor: &Factor) -> Self::By {
        // SAFETY: the processor has NEON: our caller's promise; an array has the 16 bytes that are loaded.
        unsafe { (vld1q_u8(factor.low.as_ptr()), vld1q_u8(factor.high.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn times(split: Self::Split, by: Self::By) -> Self {
        // SAFETY: the processor has NEON: our caller's promise.
        unsafe { Neon(veorq_u8(vqtbl1q_u8(by.0, split.0), vqtbl1q_u8(by.1, split.1))) }
    }

    #[inline(always)]
    fn ahead(at: *const u8) {
        // There is no stable intrinsic for it.
        let _ = at;
    }
}

/// # Safety
/// The processor has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon_update(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has NEON: our caller's promise.
    unsafe { vector::update::<Neon>(factors, data, sums, range) }
}

/// # Safety
/// The processor has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon_encode(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    // SAFETY: the processor has NEON: our caller's promise.
    unsafe { vector::encode::<Neon>(sources, first, sums, range) }
}
