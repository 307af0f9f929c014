//! Where the redundancy of a set's chunks lies: pure arithmetic that every agent computes alike.
//!
//! A set has `n` members (slots). Member `i` has chunks `0..c_i`. Each chunk belongs to exactly one
//! *stripe*; each stripe has `m` *holders*, members that keep one of its parities each and contribute nothing to it.
//! XOR and RS: parity `j` of stripe `t` is held by member `(t + j) mod n`; a member's s-th chunk goes to the s-th stripe
//! where it holds no parity (rotating parity as in RAID-5; Patterson, Gibson, Katz 1988). XOR is RS with one parity.
//! PARTNER is the same machinery with one contributor a stripe: stripe `s * n + i` is member `i`'s s-th chunk, held by
//! member `i + 1 mod n`. Missing members count as zeros.

use crate::ids::{SlotId, StripeId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Members of an RS set at most: as many as GF(2^8) has elements (k + m <= 256).
pub const RS_SET_MAX: u32 = 256;

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
    /// Several parities over the set (Reed-Solomon): as many of its members may be lost.
    Rs {
        /// How many, m; at least 1.
        parities: u8,
    },
}

impl Scheme {
    /// The word that users write and read.
    pub fn as_str(self) -> &'static str {
        match self {
            Scheme::Single => "SINGLE",
            Scheme::Partner => "PARTNER",
            Scheme::Xor => "XOR",
            Scheme::Rs { .. } => "RS",
        }
    }

    /// Losses in one set that are made good, whichever members they are.
    pub fn losses(self) -> u32 {
        match self {
            Scheme::Single => 0,
            Scheme::Partner | Scheme::Xor => 1,
            Scheme::Rs { parities } => u32::from(parities.max(1)),
        }
    }
}

/// A scheme and how many nodes share a code, as users ask for it: `SINGLE`, `PARTNER`, `XOR`, `RS`, or `RS(k,m)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Asked {
    /// The scheme.
    pub scheme: Scheme,
    /// Largest set.
    pub set_size: u32,
}

impl Asked {
    /// What the words say: `RS(k,m)` makes sets of k + m; others have `set_size`, and plain `RS` has `parities`.
    pub fn parse(word: &str, set_size: u64, parities: u64) -> Option<Asked> {
        let most = u32::MAX.into();
        let set_size = set_size.clamp(2, most) as u32;
        let scheme = match word {
            "SINGLE" => Scheme::Single,
            "PARTNER" => Scheme::Partner,
            "XOR" => Scheme::Xor,
            "RS" => {
                let parities = parities.clamp(1, u64::from(RS_SET_MAX) - 1) as u8;
                return Some(Asked { scheme: Scheme::Rs { parities }, set_size });
            }
            _ => {
                let inside = word.strip_prefix("RS(")?.strip_suffix(')')?;
                let (k, m) = inside.split_once(',')?;
                let (k, m): (u32, u8) = (k.trim().parse().ok()?, m.trim().parse().ok()?);
                let set_size = k.checked_add(m.into())?;
                if k == 0 || m == 0 || set_size > RS_SET_MAX {
                    return None;
                }
                return Some(Asked { scheme: Scheme::Rs { parities: m }, set_size });
            }
        };
        Some(Asked { scheme, set_size })
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.scheme {
            Scheme::Rs { parities } => {
                write!(f, "RS({},{parities})", self.set_size.saturating_sub(parities.into()))
            }
            scheme => f.write_str(scheme.as_str()),
        }
    }
}

/// How the slots of a job are divided: each dataset stores its own.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct Sets {
    /// The scheme.
    pub scheme: Scheme,
    /// Slots of the job.
    pub slots: u32,
    /// Largest set.
    pub set_size: u32,
    /// Where neighbours must not share a set; otherwise sets are runs of slots.
    order: Option<Arc<Order>>,
}

/// Which slot stands where, sets being runs of places.
#[derive(PartialEq, Eq, Hash, Debug)]
struct Order {
    sets: u32,
    slots: Vec<u32>,
    /// The place of each slot.
    places: Vec<u32>,
}

/// As it is stored.
#[derive(Serialize, Deserialize)]
struct Raw {
    scheme: Scheme,
    slots: u32,
    set_size: u32,
    #[serde(default)]
    order: Option<(u32, Vec<u32>)>,
}

/// Sets that are none: from a damaged or foreign source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("sets that do not divide the slots of a job")]
pub struct NoSets;

impl TryFrom<Raw> for Sets {
    type Error = NoSets;

    fn try_from(raw: Raw) -> Result<Sets, NoSets> {
        let sets = Sets::new(raw.scheme, raw.slots.max(1), raw.set_size);
        if raw.slots == 0 {
            return Err(NoSets);
        }
        match raw.order {
            None => Ok(sets),
            Some((count, order)) => sets.ordered(count, order),
        }
    }
}

impl From<Sets> for Raw {
    fn from(sets: Sets) -> Raw {
        let order = sets.order.map(|o| (o.sets, o.slots.clone()));
        Raw { scheme: sets.scheme, slots: sets.slots, set_size: sets.set_size, order }
    }
}

/// One member's chunk as a part of a stripe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Whose chunk.
    pub slot: SlotId,
    /// Which of its chunks.
    pub chunk: u64,
    /// Which piece of the code it is.
    pub column: u32,
}

/// The set of a slot.
#[derive(Clone, Copy)]
struct Place {
    /// The place of its first member.
    first: u32,
    /// Members, n.
    n: u64,
    /// Which of them the slot is.
    i: u64,
    /// Contributors to a stripe, k.
    k: u64,
    /// Parities of a stripe, m.
    m: u64,
}

impl Place {
    /// How far member `i` is behind the first holder of stripes of this residue: holders are `0..m`.
    fn behind(self, i: u64, stripe: StripeId) -> u64 {
        (i + self.n - stripe.0 % self.n) % self.n
    }
}

impl Sets {
    /// Sets for `slots` nodes, in runs. The slots are divided evenly, and so that each set has more members than may be
    /// lost, where the job has.
    pub fn new(scheme: Scheme, slots: u32, set_size: u32) -> Sets {
        assert!(slots > 0, "a job has at least one node");
        let set_size = set_size.max(2).max(scheme.losses() + 1);
        let set_size = match scheme {
            Scheme::Rs { .. } => set_size.min(RS_SET_MAX),
            _ => set_size,
        };
        Sets { scheme, slots, set_size, order: None }
    }

    /// The same with other neighbours: `count` sets are runs of `order`, each slot once.
    ///
    /// # Errors
    /// [`NoSets`] if that is no order of the slots, or an RS set would be too large.
    pub fn ordered(self, count: u32, mut order: Vec<u32>) -> Result<Sets, NoSets> {
        let slots = self.slots;
        if order.len() != slots as usize || count == 0 || count > slots {
            return Err(NoSets);
        }
        let too_large = slots.div_ceil(count) > RS_SET_MAX;
        if matches!(self.scheme, Scheme::Rs { .. }) && too_large {
            return Err(NoSets);
        }
        for set in 0..count {
            let (first, len) = span(set, count, slots);
            order[first as usize..(first + len) as usize].sort_unstable();
        }
        let mut places = vec![u32::MAX; slots as usize];
        for (place, slot) in (0u32..).zip(&order) {
            match places.get_mut(*slot as usize) {
                Some(free) if *free == u32::MAX => *free = place,
                _ => return Err(NoSets),
            }
        }
        let order = Order { sets: count, slots: order, places };
        Ok(Sets { order: Some(Arc::new(order)), ..self })
    }

    pub(crate) fn count(&self) -> u32 {
        match (&self.order, self.scheme) {
            (Some(order), _) => order.sets,
            (None, Scheme::Single) => self.slots,
            // Rounded so that every set has enough members where the job has.
            (None, scheme) => {
                let enough = (self.slots / (scheme.losses() + 1)).max(1);
                let count = self.slots.div_ceil(self.set_size.max(2));
                match scheme {
                    // An odd job of more than the field has elements: rather smaller sets than none.
                    Scheme::Rs { .. } => count.min(enough).max(self.slots.div_ceil(RS_SET_MAX)),
                    _ => count.min(enough),
                }
            }
        }
    }

    /// The place of a slot, where sets are runs of places.
    fn place_of(&self, slot: SlotId) -> u32 {
        self.order.as_ref().map_or(slot.0, |o| o.places[slot.0 as usize])
    }

    fn at(&self, place: u32) -> SlotId {
        SlotId(self.order.as_ref().map_or(place, |o| o.slots[place as usize]))
    }

    /// The number of the set that `slot` is in.
    pub fn set_of(&self, slot: SlotId) -> u32 {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
        let (count, slots) = (u64::from(self.count()), u64::from(self.slots));
        // The inverse of `span`'s floor division.
        let guess = ((u64::from(self.place_of(slot)) + 1) * count - 1) / slots;
        guess as u32
    }

    /// The slots that share `slot`'s code, itself included, in order.
    pub fn members(&self, slot: SlotId) -> Vec<SlotId> {
        let (first, len) = span(self.set_of(slot), self.count(), self.slots);
        (first..first + len).map(|place| self.at(place)).collect()
    }

    /// True where losing a node can be made good: there is a scheme, and more than one member.
    pub fn redundant(&self, slot: SlotId) -> bool {
        self.scheme != Scheme::Single && self.place(slot).n > 1
    }

    /// Losses in the set of `slot` that are made good, whichever members they are. A set that is too small for its scheme
    /// makes fewer good.
    pub fn losses(&self, slot: SlotId) -> u32 {
        if self.redundant(slot) { self.place(slot).m as u32 } else { 0 }
    }

    fn place(&self, slot: SlotId) -> Place {
        let (first, len) = span(self.set_of(slot), self.count(), self.slots);
        let (n, i) = (u64::from(len), u64::from(self.place_of(slot) - first));
        let m = u64::from(self.scheme.losses()).min(n - 1);
        let k = if self.scheme == Scheme::Partner { 1 } else { n - m };
        Place { first, n, i, k, m }
    }

    /// Contributors and parities of each stripe in the set of `slot`: the shape of its code, (k, m).
    pub fn code(&self, slot: SlotId) -> (u32, u32) {
        let p = self.place(slot);
        (p.k as u32, p.m as u32)
    }

    /// The stripe that `slot`'s chunk number `chunk` belongs to; `None` without redundancy.
    pub fn stripe_of(&self, slot: SlotId, chunk: u64) -> Option<StripeId> {
        if !self.redundant(slot) {
            return None;
        }
        let p = self.place(slot);
        Some(StripeId(match self.scheme {
            Scheme::Partner => chunk * p.n + p.i,
            _ => {
                // Of every n stripes the member takes part in k: all but the m of which it is a holder.
                let (round, nth) = (chunk / p.k, chunk % p.k);
                round * p.n + nth_contributed(p, nth)
            }
        }))
    }

    /// Who keeps the parities of `stripe` in the set of `slot`, in their order.
    pub fn holders(&self, slot: SlotId, stripe: StripeId) -> Vec<SlotId> {
        let p = self.place(slot);
        match self.scheme {
            Scheme::Single => Vec::new(),
            Scheme::Partner => vec![self.at(p.first + ((stripe.0 % p.n + 1) % p.n) as u32)],
            _ => (0..p.m).map(|j| self.at(p.first + ((stripe.0 + j) % p.n) as u32)).collect(),
        }
    }

    /// Which of the stripe's parities `holder` keeps.
    pub fn row(&self, holder: SlotId, stripe: StripeId) -> u32 {
        let p = self.place(holder);
        match self.scheme {
            Scheme::Single | Scheme::Partner => 0,
            _ => p.behind(p.i, stripe) as u32,
        }
    }

    /// The chunks that make up `stripe` in the set of `slot`; `chunks(m)` is how many member `m` has.
    pub fn parts(
        &self,
        slot: SlotId,
        stripe: StripeId,
        chunks: impl Fn(SlotId) -> u64,
    ) -> Vec<Part> {
        let p = self.place(slot);
        let mut parts = Vec::new();
        let mut push = |member: u64, chunk: u64, column: u64| {
            let slot = self.at(p.first + member as u32);
            if chunk < chunks(slot) {
                parts.push(Part { slot, chunk, column: column as u32 });
            }
        };
        match self.scheme {
            Scheme::Single => {}
            Scheme::Partner => push(stripe.0 % p.n, stripe.0 / p.n, 0),
            Scheme::Xor | Scheme::Rs { .. } => {
                let (round, t) = (stripe.0 / p.n, stripe.0 % p.n);
                for member in 0..p.n {
                    let behind = p.behind(member, stripe);
                    if behind >= p.m {
                        let of = Place { i: member, ..p };
                        push(member, round * p.k + contributed_before(of, t), behind - p.m);
                    }
                }
            }
        }
        parts
    }

    /// The stripes of which `holder` keeps a parity, in order, given every member's number of chunks.
    pub fn held(&self, holder: SlotId, chunks: impl Fn(SlotId) -> u64) -> Vec<StripeId> {
        if !self.redundant(holder) {
            return Vec::new();
        }
        let p = self.place(holder);
        match self.scheme {
            Scheme::Single => Vec::new(),
            Scheme::Partner => {
                let of = (p.i + p.n - 1) % p.n;
                (0..chunks(self.at(p.first + of as u32))).map(|s| StripeId(s * p.n + of)).collect()
            }
            Scheme::Xor | Scheme::Rs { .. } => {
                let members = (0..p.n).map(|m| chunks(self.at(p.first + m as u32)));
                let rounds = members.max().unwrap_or(0).div_ceil(p.k);
                let mut residues: Vec<u64> = (0..p.m).map(|j| (p.i + p.n - j) % p.n).collect();
                residues.sort_unstable();
                (0..rounds)
                    .flat_map(|round| residues.iter().map(move |t| StripeId(round * p.n + t)))
                    .filter(|t| !self.parts(holder, *t, &chunks).is_empty())
                    .collect()
            }
        }
    }

    /// The place of `stripe` among those that its holder keeps a parity of: its position in the parity file.
    pub fn parity_index(&self, holder: SlotId, stripe: StripeId) -> u64 {
        let p = self.place(holder);
        match self.scheme {
            Scheme::Single | Scheme::Partner => stripe.0 / p.n,
            _ => stripe.0 / p.n * p.m + p.behind(p.i, stripe),
        }
    }

    /// Can all data of the set of `slot` be had, of members whose data and whose parity are there as these say?
    pub fn recoverable(
        &self,
        slot: SlotId,
        data: impl Fn(SlotId) -> bool,
        parity: impl Fn(SlotId) -> bool,
    ) -> bool {
        let p = self.place(slot);
        let member = |i: u64| self.at(p.first + (i % p.n) as u32);
        if !self.redundant(slot) {
            return data(slot);
        }
        match self.scheme {
            Scheme::Single => data(slot),
            Scheme::Partner => (0..p.n).all(|i| data(member(i)) || parity(member(i + 1))),
            // Each stripe of a round has the same holders and contributors as that of any other.
            Scheme::Xor | Scheme::Rs { .. } => (0..p.n).all(|t| {
                let left = (0..p.m).filter(|j| parity(member(t + j))).count();
                let lost = (p.m..p.n).filter(|j| !data(member(t + j))).count();
                lost <= left
            }),
        }
    }
}

/// The residue of the nth stripe of a round to which the member contributes.
fn nth_contributed(p: Place, nth: u64) -> u64 {
    // It holds parities of the stripes i - m + 1 ..= i, round the corner.
    let low = (p.i + p.n + 1 - p.m) % p.n;
    if low <= p.i {
        if nth < low { nth } else { nth + p.m }
    } else {
        // The held ones are 0..=i and low..n: between them all are contributed to.
        p.i + 1 + nth
    }
}

/// How many stripes of a round before residue `t`, which it contributes to, the member contributes to.
fn contributed_before(p: Place, t: u64) -> u64 {
    let low = (p.i + p.n + 1 - p.m) % p.n;
    if low <= p.i { if t < low { t } else { t - p.m } } else { t - p.i - 1 }
}

/// First place and length of set number `set` of `count`.
fn span(set: u32, count: u32, slots: u32) -> (u32, u32) {
    let (count, slots) = (u64::from(count), u64::from(slots));
    let first = u64::from(set) * slots / count;
    let next = (u64::from(set) + 1) * slots / count;
    (first as u32, (next - first) as u32)
}

/// The slot of `rank` in a job of `ranks` ranks on `slots` nodes, blockwise: the embedded placement.
pub fn block_slot(rank: u32, ranks: u32, slots: u32) -> SlotId {
    assert!(rank < ranks && slots > 0, "rank {rank} of {ranks} on {slots}");
    SlotId((u64::from(rank) * u64::from(slots) / u64::from(ranks)) as u32)
}

#[cfg(test)]
mod tests;
