//! Erasure codes: XOR (RAID-5 parity; Patterson, Gibson, Katz 1988) and Reed-Solomon ([`rs`]).
//!
//! No dependencies. Kernels do not allocate. The compiler makes vector code of the XOR loop; that of Reed-Solomon has
//! kernels of its own, chosen when it runs ([`kernel`]).

pub mod gf;
pub mod kernel;
pub mod rs;
mod solve;

pub use solve::Way;

/// Adds `data` into `parity`: `parity[i] ^= data[i]`. `data` may be shorter than `parity` (the missing
/// rest counts as zeros), never longer.
pub fn xor_into(parity: &mut [u8], data: &[u8]) {
    assert!(data.len() <= parity.len(), "a contribution is no longer than its parity");
    let parity = &mut parity[..data.len()];
    let mut p = parity.chunks_exact_mut(32);
    let mut d = data.chunks_exact(32);
    for (p, d) in (&mut p).zip(&mut d) {
        for (p, d) in p.iter_mut().zip(d) {
            *p ^= d;
        }
    }
    for (p, d) in p.into_remainder().iter_mut().zip(d.remainder()) {
        *p ^= d;
    }
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
