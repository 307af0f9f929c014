//! Where the redundancy of a set's chunks lies: pure arithmetic that every agent computes alike.
//!
//! A set has `n` members (slots). Member `i` has chunks `0..c_i`. Each chunk belongs to exactly one
//! *stripe*; each stripe has one *holder*, a member that keeps its parity and contributes nothing to it.
//! XOR: stripe `t` is held by member `t mod n`; a member's s-th chunk goes to the s-th stripe where it
//! holds no parity (rotating parity as in RAID-5; Patterson, Gibson, Katz 1988). PARTNER is the same
//! machinery with one contributor a stripe: stripe `s * n + i` is member `i`'s s-th chunk, held by
//! member `i + 1 mod n`. Missing members count as zeros.

use crate::ids::{SlotId, StripeId};
use serde::{Deserialize, Serialize};

/// A redundancy scheme.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Scheme {
    /// No redundancy.
    Single,
    /// A copy on the next member of the set.
    Partner,
    /// One parity over the set.
    Xor,
}

impl Scheme {
    /// The word that users write and read.
    pub fn as_str(self) -> &'static str {
        match self {
            Scheme::Single => "SINGLE",
            Scheme::Partner => "PARTNER",
            Scheme::Xor => "XOR",
        }
    }
}

/// How the slots of a job are divided: each dataset stores its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Sets {
    /// The scheme.
    pub scheme: Scheme,
    /// Slots of the job.
    pub slots: u32,
    /// Largest set.
    pub set_size: u32,
}

/// One member's chunk as a part of a stripe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Whose chunk.
    pub slot: SlotId,
    /// Which of its chunks.
    pub chunk: u64,
}

impl Sets {
    /// Sets for `slots` nodes. The slots are divided evenly, so that no set is left with one member
    /// while another has more than two (an odd single member could not be protected).
    pub fn new(scheme: Scheme, slots: u32, set_size: u32) -> Sets {
        assert!(slots > 0, "a job has at least one node");
        Sets { scheme, slots, set_size: set_size.max(2) }
    }

    fn count(&self) -> u32 {
        match self.scheme {
            Scheme::Single => self.slots,
            // Rounded so that every set has at least two members where the job has.
            _ => self.slots.div_ceil(self.set_size).min((self.slots / 2).max(1)),
        }
    }

    /// First slot and length of set number `set`.
    fn span(&self, set: u32) -> (u32, u32) {
        let (count, slots) = (u64::from(self.count()), u64::from(self.slots));
        let first = u64::from(set) * slots / count;
        let next = (u64::from(set) + 1) * slots / count;
        (first as u32, (next - first) as u32)
    }

    /// The number of the set that `slot` is in.
    pub fn set_of(&self, slot: SlotId) -> u32 {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
        let (count, slots) = (u64::from(self.count()), u64::from(self.slots));
        // The inverse of `span`'s floor division.
        let guess = ((u64::from(slot.0) + 1) * count - 1) / slots;
        guess as u32
    }

    /// The slots that share `slot`'s code, itself included, in order.
    pub fn members(&self, slot: SlotId) -> Vec<SlotId> {
        let (first, len) = self.span(self.set_of(slot));
        (first..first + len).map(SlotId).collect()
    }

    /// True where losing a node can be made good: there is a scheme, and more than one member.
    pub fn redundant(&self, slot: SlotId) -> bool {
        self.scheme != Scheme::Single && self.span(self.set_of(slot)).1 > 1
    }

    fn place(&self, slot: SlotId) -> (u32, u64, u64) {
        let (first, len) = self.span(self.set_of(slot));
        (first, u64::from(len), u64::from(slot.0 - first))
    }

    /// The stripe that `slot`'s chunk number `chunk` belongs to; `None` without redundancy.
    pub fn stripe_of(&self, slot: SlotId, chunk: u64) -> Option<StripeId> {
        if !self.redundant(slot) {
            return None;
        }
        let (_, n, i) = self.place(slot);
        Some(StripeId(match self.scheme {
            Scheme::Partner => chunk * n + i,
            // Of every n stripes the member takes part in n - 1: all but stripe i.
            _ => {
                let (round, k) = (chunk / (n - 1), chunk % (n - 1));
                round * n + k + u64::from(k >= i)
            }
        }))
    }

    /// Who keeps the parity of `stripe` in the set of `slot`.
    pub fn holder(&self, slot: SlotId, stripe: StripeId) -> SlotId {
        let (first, n, _) = self.place(slot);
        let member = match self.scheme {
            Scheme::Partner => (stripe.0 % n + 1) % n,
            _ => stripe.0 % n,
        };
        SlotId(first + member as u32)
    }

    /// The chunks that make up `stripe` in the set of `slot`; `chunks(m)` is how many member `m` has.
    pub fn parts(
        &self,
        slot: SlotId,
        stripe: StripeId,
        chunks: impl Fn(SlotId) -> u64,
    ) -> Vec<Part> {
        let (first, n, _) = self.place(slot);
        let mut parts = Vec::new();
        let mut push = |member: u64, chunk: u64| {
            let slot = SlotId(first + member as u32);
            if chunk < chunks(slot) {
                parts.push(Part { slot, chunk });
            }
        };
        match self.scheme {
            Scheme::Single => {}
            Scheme::Partner => push(stripe.0 % n, stripe.0 / n),
            Scheme::Xor => {
                let (round, t) = (stripe.0 / n, stripe.0 % n);
                for member in (0..n).filter(|m| *m != t) {
                    push(member, round * (n - 1) + t - u64::from(t > member));
                }
            }
        }
        parts
    }

    /// The stripes whose parity `holder` keeps, in order, given every member's number of chunks.
    pub fn held(&self, holder: SlotId, chunks: impl Fn(SlotId) -> u64) -> Vec<StripeId> {
        if !self.redundant(holder) {
            return Vec::new();
        }
        let (first, n, i) = self.place(holder);
        match self.scheme {
            Scheme::Single => Vec::new(),
            Scheme::Partner => {
                let of = (i + n - 1) % n;
                (0..chunks(SlotId(first + of as u32))).map(|s| StripeId(s * n + of)).collect()
            }
            Scheme::Xor => {
                let longest = (0..n).map(|m| chunks(SlotId(first + m as u32))).max().unwrap_or(0);
                let rounds = longest.div_ceil(n - 1);
                (0..rounds)
                    .map(|round| StripeId(round * n + i))
                    .filter(|t| !self.parts(holder, *t, &chunks).is_empty())
                    .collect()
            }
        }
    }

    /// The place of `stripe` among those that its holder keeps: its position in the parity file.
    pub fn parity_index(&self, holder: SlotId, stripe: StripeId) -> u64 {
        let (_, n, _) = self.place(holder);
        stripe.0 / n
    }
}

/// The slot of `rank` in a job of `ranks` ranks on `slots` nodes, blockwise: the embedded placement.
pub fn block_slot(rank: u32, ranks: u32, slots: u32) -> SlotId {
    assert!(rank < ranks && slots > 0, "rank {rank} of {ranks} on {slots}");
    SlotId((u64::from(rank) * u64::from(slots) / u64::from(ranks)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn scheme() -> impl Strategy<Value = Scheme> {
        prop_oneof![Just(Scheme::Partner), Just(Scheme::Xor)]
    }

    proptest! {
        #[test]
        fn sets_partition_the_slots(slots in 1u32..200, size in 2u32..20, scheme in scheme()) {
            let sets = Sets::new(scheme, slots, size);
            for slot in (0..slots).map(SlotId) {
                let members = sets.members(slot);
                prop_assert!(members.contains(&slot));
                for m in &members {
                    prop_assert_eq!(sets.members(*m), members.clone());
                }
                prop_assert!(slots == 1 || members.len() >= 2, "{} members", members.len());
                prop_assert!(members.len() as u32 <= size + 1);
            }
        }

        #[test]
        fn each_chunk_is_in_one_stripe_not_held_by_its_owner(
            slots in 2u32..12, size in 2u32..9, scheme in scheme(),
            counts in proptest::collection::vec(0u64..9, 12),
        ) {
            let sets = Sets::new(scheme, slots, size);
            let chunks = |s: SlotId| counts[s.0 as usize];
            let mut seen: BTreeMap<(u32, u64), u32> = BTreeMap::new();
            for holder in (0..slots).map(SlotId) {
                let held = sets.held(holder, chunks);
                for (place, stripe) in held.iter().enumerate() {
                    prop_assert_eq!(sets.holder(holder, *stripe), holder);
                    prop_assert!(place as u64 <= sets.parity_index(holder, *stripe));
                    for part in sets.parts(holder, *stripe, chunks) {
                        prop_assert_ne!(part.slot, holder);
                        prop_assert_eq!(sets.stripe_of(part.slot, part.chunk), Some(*stripe));
                        *seen.entry((part.slot.0, part.chunk)).or_default() += 1;
                    }
                }
            }
            let all: u64 = (0..slots).map(|s| chunks(SlotId(s))).sum();
            prop_assert_eq!(seen.len() as u64, all);
            prop_assert!(seen.values().all(|n| *n == 1));
        }
    }
}
