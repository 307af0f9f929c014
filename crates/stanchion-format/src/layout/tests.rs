use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn scheme() -> impl Strategy<Value = Scheme> {
    prop_oneof![
        Just(Scheme::Partner),
        Just(Scheme::Xor),
        (1u8..6).prop_map(|parities| Scheme::Rs { parities }),
    ]
}

/// Sets in runs of slots, and sets in an order that `turned` makes.
fn sets(scheme: Scheme, slots: u32, size: u32, turned: u32) -> Sets {
    let sets = Sets::new(scheme, slots, size);
    if turned == 0 {
        return sets;
    }
    let count = sets.count();
    let order = (0..slots).map(|n| (n + turned) % slots).collect();
    sets.ordered(count, order).unwrap()
}

proptest! {
    #[test]
    fn sets_partition_the_slots(
        slots in 1u32..200, size in 2u32..20, scheme in scheme(), turned in 0u32..3,
    ) {
        let sets = sets(scheme, slots, size, turned);
        for slot in (0..slots).map(SlotId) {
            let members = sets.members(slot);
            prop_assert!(members.contains(&slot));
            for m in &members {
                prop_assert_eq!(sets.members(*m), members.clone());
            }
            let enough = members.len() as u32 > scheme.losses();
            prop_assert!(slots <= scheme.losses() || enough, "{} members", members.len());
            prop_assert!(members.len() as u32 <= size.max(scheme.losses() + 1) + scheme.losses());
        }
    }

    #[test]
    fn each_chunk_is_in_one_stripe_not_held_by_its_owner(
        slots in 2u32..12, size in 2u32..9, scheme in scheme(), turned in 0u32..3,
        counts in proptest::collection::vec(0u64..9, 12),
    ) {
        let sets = sets(scheme, slots, size, turned);
        let chunks = |s: SlotId| counts[s.0 as usize];
        let mut seen: BTreeMap<(u32, u64), BTreeSet<u32>> = BTreeMap::new();
        for holder in (0..slots).map(SlotId) {
            let held = sets.held(holder, chunks);
            for stripe in &held {
                let (k, m) = sets.code(holder);
                let row = sets.row(holder, *stripe);
                prop_assert!(row < m);
                prop_assert_eq!(sets.holders(holder, *stripe)[row as usize], holder);
                let index = sets.parity_index(holder, *stripe);
                prop_assert!(!held.iter().any(|t| t != stripe && sets.parity_index(holder, *t) == index));
                let mut columns = BTreeSet::new();
                for part in sets.parts(holder, *stripe, chunks) {
                    prop_assert!(!sets.holders(holder, *stripe).contains(&part.slot));
                    prop_assert_eq!(sets.stripe_of(part.slot, part.chunk), Some(*stripe));
                    prop_assert!(part.column < k && columns.insert(part.column));
                    prop_assert!(seen.entry((part.slot.0, part.chunk)).or_default().insert(row));
                }
            }
        }
        let all: u64 = (0..slots).map(|s| chunks(SlotId(s))).sum();
        prop_assert_eq!(seen.len() as u64, all);
        for ((slot, _), rows) in seen {
            prop_assert_eq!(rows.len() as u32, sets.code(SlotId(slot)).1);
        }
    }

    #[test]
    fn what_the_scheme_promises_is_recoverable_and_no_more_than_there_is(
        slots in 2u32..12, size in 2u32..9, scheme in scheme(), lost in 0u32..4096,
    ) {
        let sets = Sets::new(scheme, slots, size);
        let alive = |s: SlotId| lost >> s.0 & 1 == 0;
        for slot in (0..slots).map(SlotId) {
            let members = sets.members(slot);
            let gone = members.iter().filter(|m| !alive(**m)).count() as u32;
            let found = sets.recoverable(slot, alive, alive);
            if gone <= sets.losses(slot) {
                prop_assert!(found);
            } else if scheme != Scheme::Partner {
                prop_assert!(!found);
            }
        }
    }

    #[test]
    fn stored_sets_are_the_same(
        slots in 1u32..40, size in 2u32..9, scheme in scheme(), turned in 0u32..3,
    ) {
        let sets = sets(scheme, slots, size, turned);
        let bytes = postcard::to_stdvec(&sets).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<Sets>(&bytes).unwrap(), &sets);
        let json = serde_json::to_string(&sets).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Sets>(&json).unwrap(), &sets);
    }
}

#[test]
fn what_is_stored_is_what_was_asked_for() {
    // Parities of equal loads of n - 1 rounds, in chunks: m for every k.
    for (scheme, n, per_k) in [
        (Scheme::Partner, 4, (1, 1)),
        (Scheme::Xor, 8, (1, 7)),
        (Scheme::Rs { parities: 2 }, 5, (2, 3)),
        (Scheme::Rs { parities: 3 }, 9, (3, 6)),
    ] {
        let sets = Sets::new(scheme, n, n);
        let chunks = 10 * u64::from(n - scheme.losses());
        let stored: usize = (0..n).map(|s| sets.held(SlotId(s), |_| chunks).len()).sum();
        assert_eq!(stored as u64 * per_k.1, u64::from(n) * chunks * per_k.0, "{scheme:?}");
    }
}

#[test]
fn sets_that_are_none_are_refused() {
    let sets = Sets::new(Scheme::Xor, 4, 2);
    for (count, order) in [
        (2, vec![0, 1, 2]),
        (2, vec![0, 1, 2, 2]),
        (2, vec![0, 1, 2, 4]),
        (0, vec![0, 1, 2, 3]),
        (5, vec![0, 1, 2, 3]),
    ] {
        assert_eq!(sets.clone().ordered(count, order.clone()), Err(NoSets), "{count} {order:?}");
    }
    let json = r#"{"scheme": "XOR", "slots": 2, "set_size": 2, "order": [1, [1, 1]]}"#;
    assert!(serde_json::from_str::<Sets>(json).is_err());
    let json = r#"{"scheme": "XOR", "slots": 0, "set_size": 2}"#;
    assert!(serde_json::from_str::<Sets>(json).is_err());
    let before = r#"{"scheme": "XOR", "slots": 2, "set_size": 2}"#;
    assert_eq!(serde_json::from_str::<Sets>(before).unwrap(), Sets::new(Scheme::Xor, 2, 2));
}

#[test]
fn words_are_schemes() {
    let asked = |word| Asked::parse(word, 8, 2).map(|a| (a.scheme, a.set_size));
    assert_eq!(asked("XOR"), Some((Scheme::Xor, 8)));
    assert_eq!(asked("RS"), Some((Scheme::Rs { parities: 2 }, 8)));
    assert_eq!(asked("RS(6,3)"), Some((Scheme::Rs { parities: 3 }, 9)));
    assert_eq!(Asked::parse("RS(6, 3)", 8, 2).unwrap().to_string(), "RS(6,3)");
    for word in ["", "RS(", "RS(0,1)", "RS(3,0)", "RS(255,2)", "RS(3)", "RS(a,b)", "xor"] {
        assert_eq!(asked(word), None, "{word}");
    }
}
