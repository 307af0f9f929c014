//! The two operations, over any processor's vectors.
//!
//! Everything here is inlined into functions that a processor's features are switched on for; by itself it would be
//! correct as well where the processor has them, and slow.

#![allow(clippy::needless_range_loop, reason = "one index goes through several arrays at once")]

use super::{Factor, GROUP, Source};
use std::ops::Range;

/// Vectors in a row, of each source: what one waits for, the other does meanwhile.
const ROW: usize = 2;
/// How far ahead memory is asked for.
const AHEAD: usize = 1024;

/// A vector of bytes, and how its processor multiplies it.
///
/// # Safety
/// `BYTES` is its size, and [`Vector::load`] and [`Vector::store`] touch no more.
pub(super) unsafe trait Vector: Copy {
    /// Bytes in it.
    const BYTES: usize;
    /// A factor, in registers.
    type By: Copy;
    /// One that is to be multiplied, prepared for any factor.
    type Split: Copy;

    /// # Safety
    /// The processor has what this kind of vector needs.
    unsafe fn zero() -> Self;
    /// # Safety
    /// The processor has what this kind of vector needs. `BYTES` bytes at `from` may be read.
    unsafe fn load(from: *const u8) -> Self;
    /// # Safety
    /// The processor has what this kind of vector needs. `BYTES` bytes at `to` may be written.
    unsafe fn store(self, to: *mut u8);
    /// # Safety
    /// The processor has what this kind of vector needs.
    unsafe fn xor(self, other: Self) -> Self;
    /// # Safety
    /// The processor has what this kind of vector needs.
    unsafe fn split(self) -> Self::Split;
    /// # Safety
    /// The processor has what this kind of vector needs.
    unsafe fn by(factor: &Factor) -> Self::By;
    /// # Safety
    /// The processor has what this kind of vector needs.
    unsafe fn times(split: Self::Split, by: Self::By) -> Self;
    /// Asks for the memory at an address, which need not be any.
    fn ahead(at: *const u8);
}

/// As `Kernel::update`, of whole rows of vectors in a range; gives where the rest begins.
///
/// # Safety
/// The processor has what `V` needs.
#[inline(always)]
pub(super) unsafe fn update<V: Vector>(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    let xor = factors.first().is_some_and(|f| f.by() == 1);
    // SAFETY: the processor has what `V` needs: our caller's promise.
    unsafe {
        match (sums.len(), xor) {
            (1, true) => update_some::<V, 1, true>(factors, data, sums, range),
            (1, false) => update_some::<V, 1, false>(factors, data, sums, range),
            (2, true) => update_some::<V, 2, true>(factors, data, sums, range),
            (2, false) => update_some::<V, 2, false>(factors, data, sums, range),
            (3, true) => update_some::<V, 3, true>(factors, data, sums, range),
            (3, false) => update_some::<V, 3, false>(factors, data, sums, range),
            (4, true) => update_some::<V, 4, true>(factors, data, sums, range),
            (4, false) => update_some::<V, 4, false>(factors, data, sums, range),
            _ => range.start,
        }
    }
}

/// As `Kernel::encode`, of whole rows of vectors in a range; gives where the rest begins.
///
/// # Safety
/// The processor has what `V` needs.
#[inline(always)]
pub(super) unsafe fn encode<V: Vector>(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    let xor = sources.iter().all(|(_, factors)| factors[first].by() == 1);
    // SAFETY: the processor has what `V` needs: our caller's promise.
    unsafe {
        match (sums.len(), xor) {
            (1, true) => encode_some::<V, 1, true>(sources, first, sums, range),
            (1, false) => encode_some::<V, 1, false>(sources, first, sums, range),
            (2, true) => encode_some::<V, 2, true>(sources, first, sums, range),
            (2, false) => encode_some::<V, 2, false>(sources, first, sums, range),
            (3, true) => encode_some::<V, 3, true>(sources, first, sums, range),
            (3, false) => encode_some::<V, 3, false>(sources, first, sums, range),
            (4, true) => encode_some::<V, 4, true>(sources, first, sums, range),
            (4, false) => encode_some::<V, 4, false>(sources, first, sums, range),
            _ => range.start,
        }
    }
}

/// Where the whole rows of a range end.
fn rows_end<V: Vector>(range: &Range<usize>) -> usize {
    range.start + range.len() / (ROW * V::BYTES) * (ROW * V::BYTES)
}

/// Where the sums begin, all of which have the range.
fn starts<const G: usize>(sums: &mut [&mut [u8]], range: &Range<usize>) -> [*mut u8; G] {
    assert!(G <= GROUP && sums.len() == G && sums.iter().all(|s| range.end <= s.len()));
    std::array::from_fn(|g| sums[g].as_mut_ptr())
}

/// With so many sums; `XOR` says that the first factor is one.
///
/// # Safety
/// The processor has what `V` needs.
#[inline(always)]
unsafe fn update_some<V: Vector, const G: usize, const XOR: bool>(
    factors: &[Factor],
    data: &[u8],
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    assert!(factors.len() == G && range.end <= data.len());
    let sums: [*mut u8; G] = starts(sums, &range);
    let end = rows_end::<V>(&range);
    // SAFETY: the processor has what `V` needs: our caller's promise. Each row from `at` ends at `end` or before, which is
    // within the range, which `data` and all sums have, as was asserted; the sums are nobody else's, being mutable slices.
    unsafe {
        let by: [V::By; G] = std::array::from_fn(|g| V::by(&factors[g]));
        let mut at = range.start;
        while at < end {
            // All is read before anything is written: buffers often begin at the same place of a page, and a processor
            // that compares the low bits of addresses only would take one sum's write for what the next one reads.
            let from = data.as_ptr().add(at);
            let d: [V; ROW] = std::array::from_fn(|n| V::load(from.add(n * V::BYTES)));
            let split: [V::Split; ROW] = std::array::from_fn(|n| d[n].split());
            let mut new = [[V::zero(); ROW]; G];
            for g in 0..G {
                for n in 0..ROW {
                    let product = if XOR && g == 0 { d[n] } else { V::times(split[n], by[g]) };
                    new[g][n] = V::load(sums[g].add(at + n * V::BYTES)).xor(product);
                }
            }
            for g in 0..G {
                for n in 0..ROW {
                    new[g][n].store(sums[g].add(at + n * V::BYTES));
                }
            }
            at += ROW * V::BYTES;
        }
    }
    end
}

/// With so many sums; `XOR` says that all sources' factors in the first of them are one.
///
/// # Safety
/// The processor has what `V` needs.
#[inline(always)]
unsafe fn encode_some<V: Vector, const G: usize, const XOR: bool>(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) -> usize {
    let fit = |(data, factors): &Source<'_>| range.end <= data.len() && first + G <= factors.len();
    assert!(sources.iter().all(fit));
    let sums: [*mut u8; G] = starts(sums, &range);
    let end = rows_end::<V>(&range);
    let mut at = range.start;
    while at < end {
        // SAFETY: the processor has what `V` needs: our caller's promise. The row from `at` ends at `end` or before, which
        // is within the range, which all sources and sums have, and all sources have factors up to `first + G`, as was
        // asserted; the sums are nobody else's, being mutable slices.
        unsafe {
            let mut made = [[V::zero(); ROW]; G];
            for (data, factors) in sources {
                let from = data.as_ptr().add(at);
                V::ahead(from.wrapping_add(AHEAD));
                V::ahead(from.wrapping_add(AHEAD + V::BYTES));
                let d: [V; ROW] = std::array::from_fn(|n| V::load(from.add(n * V::BYTES)));
                let split: [V::Split; ROW] = std::array::from_fn(|n| d[n].split());
                for g in 0..G {
                    let by = V::by(factors.get_unchecked(first + g));
                    for n in 0..ROW {
                        let product = if XOR && g == 0 { d[n] } else { V::times(split[n], by) };
                        made[g][n] = made[g][n].xor(product);
                    }
                }
            }
            for g in 0..G {
                for n in 0..ROW {
                    made[g][n].store(sums[g].add(at + n * V::BYTES));
                }
            }
        }
        at += ROW * V::BYTES;
    }
    end
}
