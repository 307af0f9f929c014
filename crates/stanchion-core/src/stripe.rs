//! What a parity is made of, and what a lost chunk follows from (FM-S5, FM-S8).

use crate::bugs::{Bug, Bugs};
use stanchion_code::rs::Code;
use stanchion_format::data::Piece;
use stanchion_format::ids::{SlotId, StripeId};
use stanchion_format::layout::{Part, Sets};

/// A piece of a stripe and what it is multiplied with in the sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Whose it is.
    pub slot: SlotId,
    /// Which.
    pub piece: Piece,
    /// In GF(2^8); never 0.
    pub factor: u8,
}

fn code(sets: &Sets, slot: SlotId) -> Code {
    let (k, m) = sets.code(slot);
    Code::new(k as usize, m as usize).expect("sets are no larger than their codes")
}

fn column(part: &Part) -> usize {
    part.column as usize
}

/// What the parity that `holder` keeps of `stripe` is the sum of.
pub fn parity_terms(
    sets: &Sets,
    holder: SlotId,
    stripe: StripeId,
    chunks: impl Fn(SlotId) -> u64,
    bugs: Bugs,
) -> Vec<Term> {
    let code = code(sets, holder);
    let row = if bugs.on(Bug::OneRow) { 0 } else { sets.row(holder, stripe) as usize };
    let term = |p: Part| Term {
        slot: p.slot,
        piece: Piece::Data(p.chunk),
        factor: code.coefficient(row, column(&p)),
    };
    sets.parts(holder, stripe, chunks).into_iter().map(term).collect()
}

/// What the chunk of `slot` follows from, of the pieces that are `usable` (whose; its data, or else its parity), in the
/// order in which they are wanted: data before parity. `None` if too few are.
///
/// Where more parities are usable than are needed, `turn` says which: a sum that is wrong although each source was what it
/// claims to be does not say which of its parities is the wrong one, and other ones may do.
pub fn lost_terms(
    sets: &Sets,
    (slot, chunk): (SlotId, u64),
    chunks: impl Fn(SlotId) -> u64,
    usable: impl Fn(SlotId, bool) -> bool,
    turn: u32,
    bugs: Bugs,
) -> Option<Vec<Term>> {
    let stripe = sets.stripe_of(slot, chunk)?;
    let parts = sets.parts(slot, stripe, chunks);
    let wanted = parts.iter().find(|p| (p.slot, p.chunk) == (slot, chunk)).map(column)?;
    let there = |p: &Part| column(p) != wanted && usable(p.slot, true);
    let lost: Vec<usize> = parts.iter().filter(|p| !there(p)).map(column).collect();
    let holders = sets.holders(slot, stripe);
    let rows: Vec<usize> = (0..holders.len()).filter(|r| usable(holders[*r], false)).collect();
    let rows = chosen(&rows, lost.len(), turn);
    let way = code(sets, slot).solve(wanted, &lost, &rows).ok()?;
    let data = parts.iter().filter(|p| there(p)).map(|p| {
        let factor = if bugs.on(Bug::NoFactors) { 1 } else { way.data(column(p)) };
        Term { slot: p.slot, piece: Piece::Data(p.chunk), factor }
    });
    let parities = way.parities.iter().map(|(row, factor)| {
        let holder = holders[*row];
        let index = sets.parity_index(holder, stripe);
        Term { slot: holder, piece: Piece::Parity(index), factor: *factor }
    });
    Some(data.chain(parities).filter(|t| t.factor != 0).collect())
}

/// `count` of `rows`, others with each turn, until all choices were made and the first is made again.
fn chosen(rows: &[usize], count: usize, turn: u32) -> Vec<usize> {
    let mut picked: Vec<usize> = (0..count.min(rows.len())).collect();
    for _ in 0..turn {
        // The last that can still go up does, those behind it follow closely.
        match (0..picked.len()).rev().find(|i| picked[*i] < rows.len() - picked.len() + i) {
            Some(i) => {
                let from = picked[i] + 1;
                picked[i..].iter_mut().zip(from..).for_each(|(p, n)| *p = n);
            }
            None => picked.iter_mut().zip(0..).for_each(|(p, n)| *p = n),
        }
    }
    picked.into_iter().map(|i| rows[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stanchion_code::rs::mul_into;
    use stanchion_format::layout::Scheme;
    use std::collections::BTreeMap;

    const LEN: usize = 9;

    #[test]
    fn every_choice_has_its_turn() {
        let all: Vec<Vec<usize>> = (0..7).map(|turn| chosen(&[3, 5, 6, 9], 2, turn)).collect();
        let right = [[3, 5], [3, 6], [3, 9], [5, 6], [5, 9], [6, 9], [3, 5]];
        assert_eq!(all, right);
        assert_eq!(chosen(&[4], 2, 3), [4]);
        assert!(chosen(&[], 1, 1).is_empty());
    }

    fn bytes(slot: SlotId, chunk: u64) -> Vec<u8> {
        (0..LEN).map(|i| (i * 41 + slot.0 as usize * 97 + chunk as usize * 13 + 1) as u8).collect()
    }

    fn sum(terms: &[Term], get: impl Fn(&Term) -> Vec<u8>) -> Vec<u8> {
        let mut sum = vec![0; LEN];
        terms.iter().for_each(|t| mul_into(&mut sum, &get(t), t.factor));
        sum
    }

    /// A set as large as the field allows, with uneven loads.
    #[test]
    fn a_set_of_256_loses_six() {
        let sets = Sets::new(Scheme::Rs { parities: 6 }, 256, 256);
        assert_eq!(sets.code(SlotId(0)), (250, 6));
        let chunks = |s: SlotId| 250 + u64::from(s.0 % 3);
        let none = Bugs::default();
        let parity = |holder: SlotId, index: u64| {
            let stripes = sets.held(holder, chunks);
            let stripe = stripes.into_iter().find(|t| sets.parity_index(holder, *t) == index);
            let terms = parity_terms(&sets, holder, stripe.unwrap(), chunks, none);
            sum(&terms, |t| match t.piece {
                Piece::Data(chunk) => bytes(t.slot, chunk),
                Piece::Parity(_) => unreachable!("parities are made of data"),
            })
        };
        let lost = [0, 1, 2, 100, 254, 255].map(SlotId);
        for slot in lost {
            for chunk in [0, 249, 250].into_iter().filter(|c| *c < chunks(slot)) {
                let usable = |s: SlotId, _| !lost.contains(&s);
                let terms = lost_terms(&sets, (slot, chunk), chunks, usable, 0, none).unwrap();
                let found = sum(&terms, |t| match t.piece {
                    Piece::Data(chunk) => bytes(t.slot, chunk),
                    Piece::Parity(index) => parity(t.slot, index),
                });
                assert_eq!(found, bytes(slot, chunk), "chunk {chunk} of slot {slot}");
            }
        }
    }

    proptest! {
        /// FM-S8: whatever a set may lose comes back, of any scheme, from any members.
        #[test]
        fn what_a_set_may_lose_comes_back(
            slots in 2u32..14, size in 2u32..14, m in 0u8..5,
            counts in proptest::collection::vec(0u64..7, 14), lost in any::<u32>(), turn in 0u32..9,
        ) {
            let scheme = match m {
                0 => Scheme::Partner,
                1 => Scheme::Xor,
                parities => Scheme::Rs { parities },
            };
            let sets = Sets::new(scheme, slots, size);
            let chunks = |s: SlotId| counts[s.0 as usize];
            let mut kept: BTreeMap<(SlotId, u64), Vec<u8>> = BTreeMap::new();
            let get = |t: &Term, kept: &BTreeMap<(SlotId, u64), Vec<u8>>| match t.piece {
                Piece::Data(chunk) => bytes(t.slot, chunk),
                Piece::Parity(index) => kept[&(t.slot, index)].clone(),
            };
            for holder in (0..slots).map(SlotId) {
                for stripe in sets.held(holder, chunks) {
                    let terms = parity_terms(&sets, holder, stripe, chunks, Bugs::default());
                    let index = sets.parity_index(holder, stripe);
                    let parity = sum(&terms, |t| get(t, &kept));
                    prop_assert!(kept.insert((holder, index), parity).is_none());
                }
            }
            let alive = |s: SlotId| lost >> s.0 & 1 == 0;
            for slot in (0..slots).map(SlotId).filter(|s| !alive(*s)) {
                for chunk in 0..chunks(slot) {
                    let terms = lost_terms(
                        &sets, (slot, chunk), chunks, |s, _| alive(s), turn, Bugs::default(),
                    );
                    let Some(terms) = terms else {
                        prop_assert!(!sets.recoverable(slot, alive, alive));
                        continue;
                    };
                    prop_assert!(terms.iter().all(|t| alive(t.slot)));
                    prop_assert_eq!(sum(&terms, |t| get(t, &kept)), bytes(slot, chunk));
                }
            }
        }
    }
}
