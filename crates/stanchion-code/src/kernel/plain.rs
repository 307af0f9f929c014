//! Byte by byte: for processors without a kernel of their own, and for what does not fill a vector.

use super::{Factor, Source};
use std::ops::Range;

/// Adds a range of `data` into each sum, times its factor.
pub(super) fn update(factors: &[Factor], data: &[u8], sums: &mut [&mut [u8]], range: Range<usize>) {
    for (factor, sum) in factors.iter().zip(sums) {
        add(&mut sum[range.clone()], &data[range.clone()], factor);
    }
}

/// Makes a range of each sum. Of a source, its factors from `first` on are those of these sums.
pub(super) fn encode(
    sources: &[Source<'_>],
    first: usize,
    sums: &mut [&mut [u8]],
    range: Range<usize>,
) {
    for (n, sum) in sums.iter_mut().enumerate() {
        sum[range.clone()].fill(0);
        for (data, factors) in sources {
            add(&mut sum[range.clone()], &data[range.clone()], &factors[first + n]);
        }
    }
}

fn add(sum: &mut [u8], data: &[u8], factor: &Factor) {
    let each = sum.iter_mut().zip(data);
    match factor.by() {
        0 => {}
        1 => each.for_each(|(s, d)| *s ^= d),
        _ => each.for_each(|(s, d)| *s ^= factor.times(*d)),
    }
}
