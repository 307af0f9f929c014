//! Which nodes share a redundancy set: none that can fail together (failure groups: nodes of a rack, of a power supply).
//!
//! Nodes are dealt out, group by group, to as many sets as the largest group has members: neighbours in the deal never
//! meet. What a whole group takes with it is then one member of each set.

use crate::layout::{Asked, RS_SET_MAX, Scheme, Sets};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The job is too small for what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooSmall {
    /// What is asked.
    pub asked: Asked,
    /// Nodes of the job.
    pub nodes: u32,
    /// Groups that they are in; as many as nodes where each fails by itself.
    pub groups: u32,
    /// Members that every set can have.
    pub members: u32,
    /// The nearest that fits.
    pub nearest: Asked,
}

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TooSmall { asked, nodes, groups, members, nearest } = self;
        let losses = asked.scheme.losses();
        write!(
            f,
            "{asked} survives {losses} of a set and needs sets of at least {} nodes",
            losses + 1
        )?;
        if groups < nodes {
            write!(f, " that do not fail together; {nodes} nodes in {groups} failure groups")?;
        } else {
            write!(f, "; {nodes} nodes")?;
        }
        write!(f, " make sets of {members}. What fits is {nearest}")?;
        match nearest.scheme {
            Scheme::Single => write!(f, ", which survives the loss of no node"),
            _ => write!(f, " with sets of {}", nearest.set_size),
        }?;
        write!(
            f,
            ": take that, or more nodes{}",
            if groups < nodes { " in more groups" } else { "" }
        )
    }
}

impl std::error::Error for TooSmall {}

/// Sets for the nodes of a job; `groups` has the failure group of each.
///
/// # Errors
/// [`TooSmall`] where not every set can have more members than may be lost, of as many groups. A single node with a scheme
/// that knows no number of losses is no error: there is nothing to lose it to.
///
/// # Panics
/// If there is no node.
pub fn sets(asked: Asked, groups: &[u32]) -> Result<Sets, TooSmall> {
    let slots = u32::try_from(groups.len()).expect("slots are numbered");
    let natural = Sets::new(asked.scheme, slots, asked.set_size);
    let alone = slots == 1 && !matches!(asked.scheme, Scheme::Rs { .. });
    if asked.scheme == Scheme::Single || alone {
        return Ok(natural);
    }
    let mut of: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    (0..).zip(groups).for_each(|(slot, group)| of.entry(*group).or_default().push(slot));
    let largest = of.values().map(|g| g.len() as u32).max().expect("a job has a node");
    let members = slots / largest;
    if members <= asked.scheme.losses() {
        let nearest = nearest(asked, slots, largest);
        return Err(TooSmall { asked, nodes: slots, groups: of.len() as u32, members, nearest });
    }
    if largest == 1 {
        return Ok(natural);
    }
    let count = natural.count().max(largest);
    let mut dealt: Vec<Vec<u32>> = vec![Vec::new(); count as usize];
    for (place, slot) in of.into_values().flatten().enumerate() {
        dealt[place % count as usize].push(slot);
    }
    // Runs of places are as long as `Sets` makes them, the longer ones not always first.
    dealt.sort_by_key(Vec::len);
    let (mut short, mut long): (Vec<_>, Vec<_>) =
        dealt.into_iter().partition(|set| set.len() as u32 == slots / count);
    let mut order = Vec::with_capacity(groups.len());
    for set in 0..u64::from(count) {
        let bound = |set| set * u64::from(slots) / u64::from(count);
        let len = bound(set + 1) - bound(set);
        let from = if len == u64::from(slots / count) { &mut short } else { &mut long };
        order.extend(from.pop().expect("as many sets of each length are dealt"));
    }
    Ok(natural.ordered(count, order).expect("every slot was dealt once"))
}

/// The same for a job that runs already, where `groups` may be empty: then each node fails alone. Where it cannot be
/// otherwise, after a loss, neighbours that fail together share a set: less redundancy than asked for, but some.
pub fn sets_anyhow(asked: Asked, slots: u32, groups: &[u32]) -> Sets {
    let natural = || Sets::new(asked.scheme, slots, asked.set_size);
    if groups.len() != slots as usize {
        return natural();
    }
    sets(asked, groups).unwrap_or_else(|_| natural())
}

/// What comes nearest to `asked` on so many nodes: fewer losses, then none.
fn nearest(asked: Asked, slots: u32, largest: u32) -> Asked {
    let members = slots / largest;
    let set_size = asked.set_size.min(slots.div_ceil(largest)).min(RS_SET_MAX);
    let scheme = match members {
        0 | 1 => Scheme::Single,
        2 => Scheme::Xor,
        n => Scheme::Rs { parities: (n - 1).min(RS_SET_MAX - 1) as u8 },
    };
    Asked { scheme, set_size }
}

/// Why a file of failure groups is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupsError {
    /// A line is not `NAME: NODE NODE...`.
    #[error("line {0} is not 'NAME: NODE NODE FIRST-LAST ...'")]
    Line(usize),
    /// A node is in two groups of one kind, or named twice.
    #[error("line {0}: node {1} is in a group already")]
    Twice(usize, u32),
    /// A node beyond the job's.
    #[error("line {0}: there is no node {1}; the job has {2}, spares included")]
    NoNode(usize, u32, u32),
}

/// Reads a file of failure groups: a line a group, `NAME: NODE NODE FIRST-LAST ...`, nodes by their numbers from 0, spares
/// behind the others; `#` begins a comment. Who is in no group fails alone. Gives each node's group.
///
/// # Errors
/// [`GroupsError`], with the line.
pub fn read_groups(text: &str, nodes: u32) -> Result<Vec<u32>, GroupsError> {
    let mut groups: Vec<u32> = (0..nodes).collect();
    let mut named = BTreeSet::new();
    for (n, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let bad = GroupsError::Line(n);
        let (name, members) = line.split_once(':').ok_or(bad)?;
        if name.trim().is_empty() {
            return Err(bad);
        }
        for word in members.split_whitespace() {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            let first: u32 = first.parse().map_err(|_| bad)?;
            let last: u32 = last.parse().map_err(|_| bad)?;
            if last >= nodes {
                return Err(GroupsError::NoNode(n, last, nodes));
            }
            if first > last {
                return Err(bad);
            }
            for node in first..=last {
                if !named.insert(node) {
                    return Err(GroupsError::Twice(n, node));
                }
                // No node's own number: lines are counted behind them.
                groups[node as usize] = nodes.saturating_add(n as u32);
            }
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SlotId;
    use proptest::prelude::*;

    fn asked(word: &str, set_size: u64) -> Asked {
        Asked::parse(word, set_size, 2).unwrap()
    }

    proptest! {
        #[test]
        fn no_set_has_two_that_fail_together(
            groups in proptest::collection::vec(0u32..12, 1..60),
            size in 2u64..10,
            word in proptest::sample::select(vec!["XOR", "PARTNER", "RS", "RS(4,3)"]),
        ) {
            let asked = asked(word, size);
            match sets(asked, &groups) {
                Ok(sets) => {
                    let mut seen = 0;
                    for slot in (0..groups.len() as u32).map(SlotId) {
                        let members = sets.members(slot);
                        let of: BTreeSet<u32> =
                            members.iter().map(|m| groups[m.0 as usize]).collect();
                        prop_assert_eq!(of.len(), members.len());
                        prop_assert!(sets.losses(slot) == asked.scheme.losses() || groups.len() == 1);
                        seen += usize::from(members[0] == slot) * members.len();
                    }
                    prop_assert_eq!(seen, groups.len());
                }
                Err(small) => {
                    let largest =
                        groups.iter().map(|g| groups.iter().filter(|o| *o == g).count()).max();
                    prop_assert!(groups.len() / largest.unwrap() <= asked.scheme.losses() as usize);
                    prop_assert!(sets(small.nearest, &groups).is_ok(), "{}", small);
                }
            }
        }
    }

    #[test]
    fn two_racks_make_pairs() {
        let sets = sets(asked("XOR", 8), &[0, 0, 0, 0, 1, 1, 1, 1]).unwrap();
        for slot in (0..8).map(SlotId) {
            let members = sets.members(slot);
            assert_eq!(members.len(), 2);
            assert!(members[0].0 < 4 && members[1].0 >= 4);
        }
        // Spread over racks, sets are as large as is asked.
        let groups: Vec<u32> = (0..32).map(|n| n / 4).collect();
        let sets = super::sets(asked("RS(6,2)", 8), &groups).unwrap();
        assert!((0..32).all(|n| sets.members(SlotId(n)).len() == 8));
    }

    #[test]
    fn who_is_too_small_is_told_what_fits() {
        let told = |word, groups: &[u32]| sets(asked(word, 8), groups).unwrap_err().to_string();
        assert_eq!(
            told("RS(4,2)", &[0, 1]),
            "RS(4,2) survives 2 of a set and needs sets of at least 3 nodes; 2 nodes make sets of 2. What fits is XOR with \
             sets of 2: take that, or more nodes"
        );
        assert_eq!(
            told("RS(6,3)", &[0, 1, 2]),
            "RS(6,3) survives 3 of a set and needs sets of at least 4 nodes; 3 nodes make sets of 3. What fits is RS(1,2) \
             with sets of 3: take that, or more nodes"
        );
        assert_eq!(
            told("XOR", &[7, 7, 7, 8]),
            "XOR survives 1 of a set and needs sets of at least 2 nodes that do not fail together; 4 nodes in 2 failure \
             groups make sets of 1. What fits is SINGLE, which survives the loss of no node: take that, or more nodes in \
             more groups"
        );
        assert!(sets(asked("XOR", 8), &[0]).is_ok());
        assert!(sets(asked("RS", 8), &[0]).is_err());
    }

    #[test]
    fn files_of_groups_are_read() {
        let text = "# racks\nrack a: 0 2-3\n\nrack b: 1   # and its spare\n";
        let groups = read_groups(text, 6).unwrap();
        assert_eq!(groups[0], groups[2]);
        assert_eq!(groups[2], groups[3]);
        let different: BTreeSet<u32> = groups.iter().copied().collect();
        assert_eq!(different.len(), 4);
        for (text, error) in [
            ("0 1", GroupsError::Line(1)),
            ("\n: 1", GroupsError::Line(2)),
            ("a: x", GroupsError::Line(1)),
            ("a: 3-1", GroupsError::Line(1)),
            ("a: 1\nb: 0-1", GroupsError::Twice(2, 1)),
            ("a: 6", GroupsError::NoNode(1, 6, 6)),
            ("a: 0-4294967295", GroupsError::NoNode(1, u32::MAX, 6)),
        ] {
            assert_eq!(read_groups(text, 6), Err(error), "{text}");
        }
    }
}
