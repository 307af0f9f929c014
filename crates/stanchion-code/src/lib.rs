//! Erasure codes: XOR (RAID-5 parity; Patterson, Gibson, Katz 1988) and Reed-Solomon ([`rs`]).
//!
//! No dependencies. Kernels do not allocate; which one is the fastest here is found when it runs ([`kernel`]).

pub mod gf;
pub mod kernel;
mod matrix;
pub mod rs;
mod solve;

pub use solve::Way;

/// Adds `data` into `parity`: `parity[i] ^= data[i]`. `data` may be shorter than `parity` (the missing
/// rest counts as zeros), never longer.
pub fn xor_into(parity: &mut [u8], data: &[u8]) {
    rs::mul_into(parity, data, 1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_one_of_a_stripe_is_the_sum_of_the_others(
            members in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 1..6),
            lost in any::<proptest::sample::Index>(),
        ) {
            let len = members.iter().map(Vec::len).max().unwrap_or(0);
            let mut parity = vec![0; len];
            members.iter().for_each(|m| xor_into(&mut parity, m));
            let lost = lost.index(members.len());
            let mut sum = parity;
            for (i, m) in members.iter().enumerate() {
                if i != lost {
                    xor_into(&mut sum, m);
                }
            }
            prop_assert_eq!(&sum[..members[lost].len()], &members[lost][..]);
            prop_assert!(sum[members[lost].len()..].iter().all(|b| *b == 0));
        }
    }
}
