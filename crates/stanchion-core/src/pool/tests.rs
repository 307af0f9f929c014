//! The pool against a model that knows only what must never be.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const A: ConnId = ConnId(1);
const B: ConnId = ConnId(2);
const NOW: Millis = Millis(5);
const LATER: Millis = Millis(1000);

/// A pool and everything around it: memory that comes and goes at once when told.
struct Rig {
    pool: Pool,
    /// Asked for and not yet there.
    growing: Vec<(ExtentId, u64)>,
    retiring: Vec<ExtentId>,
    /// What each rank may write to.
    lent: BTreeMap<ConnId, Vec<Lent>>,
    /// Who was given a descriptor of what.
    maps: BTreeMap<ExtentId, BTreeSet<ConnId>>,
    full: Vec<ConnId>,
    /// What was to be given back by the store.
    wanted: Vec<u64>,
    answered: Vec<(ConnId, Vec<Lent>)>,
    bytes: BTreeMap<ExtentId, u64>,
}

impl Rig {
    fn new(max: u64) -> Rig {
        Rig {
            pool: Pool::new(4, max),
            growing: Vec::new(),
            retiring: Vec::new(),
            lent: BTreeMap::new(),
            maps: BTreeMap::new(),
            full: Vec::new(),
            wanted: Vec::new(),
            answered: Vec::new(),
            bytes: BTreeMap::new(),
        }
    }

    fn take(&mut self, done: Vec<Do>, lending: bool) {
        for d in done {
            match d {
                Do::Grow(new) => self.growing.extend(new),
                Do::Retire(ids) => self.retiring.extend(ids),
                Do::Full(conn) => self.full.push(conn),
                Do::Reclaim(bytes) => self.wanted.push(bytes),
                Do::Lend(conn, list) => {
                    for l in &list {
                        let maps = self.maps.entry(l.id).or_default();
                        assert_eq!(l.fresh, !maps.contains(&conn), "a descriptor goes once");
                        maps.insert(conn);
                        assert!(maps.len() == 1, "FM-P2: {:?} is mapped by {maps:?}", l.id);
                        assert_eq!(self.bytes.get(&l.id), Some(&l.bytes));
                    }
                    if lending || !list.is_empty() {
                        self.answered.push((conn, list));
                    }
                }
            }
        }
        let existing: u64 =
            self.bytes.values().sum::<u64>() + self.growing.iter().map(|(_, b)| *b).sum::<u64>();
        assert!(existing <= self.pool.max, "FM-P1: {existing} of {}", self.pool.max);
        assert_eq!(existing, self.pool.usage().total);
    }

    /// Memory comes and goes until nothing is asked for.
    fn run(&mut self) {
        loop {
            if let Some(id) = self.retiring.pop() {
                assert!(self.bytes.remove(&id).is_some());
                self.maps.remove(&id);
                let done = self.pool.retired(&[id], NOW);
                self.take(done, true);
            } else if let Some((id, bytes)) = self.growing.pop() {
                assert!(self.bytes.insert(id, bytes).is_none(), "a name is used once");
                let done = self.pool.grown(&[id], NOW);
                self.take(done, true);
            } else {
                return;
            }
        }
    }

    fn lend(&mut self, conn: ConnId, bytes: u64, patient: bool) -> Vec<Lent> {
        let done = self.pool.lend(conn, bytes, (patient, LATER), NOW);
        self.take(done, true);
        self.run();
        let at = self.answered.iter().position(|(c, _)| *c == conn);
        at.map_or_else(Vec::new, |at| self.answered.remove(at).1)
    }

    /// As a rank does: what comes is used, and the rest is asked for.
    fn lend_all(&mut self, conn: ConnId, bytes: u64) -> Vec<Lent> {
        let (mut all, mut got) = (Vec::new(), 0);
        while got < bytes {
            let list = self.lend(conn, bytes - got, true);
            assert!(!list.is_empty(), "there is room");
            got += list.iter().map(|l| l.bytes).sum::<u64>();
            all.extend(list);
        }
        all
    }

    fn ids(list: &[Lent]) -> Vec<ExtentId> {
        list.iter().map(|l| l.id).collect()
    }
}

#[test]
fn a_rank_gets_again_what_it_maps() {
    let mut rig = Rig::new(400);
    let first = rig.lend_all(A, 10);
    assert_eq!(first.iter().map(|l| l.bytes).sum::<u64>(), 12);
    assert!(first.iter().all(|l| l.fresh));
    let used = Rig::ids(&first);
    let done = rig.pool.complete(A, &used, NOW);
    rig.take(done, true);
    let second = rig.lend_all(A, 12);
    assert!(Rig::ids(&second).iter().all(|id| !used.contains(id)), "data is not lent");
    let done = rig.pool.released(&used, NOW);
    rig.take(done, true);
    let done = rig.pool.complete(A, &Rig::ids(&second), NOW);
    rig.take(done, true);
    let third = rig.lend_all(A, 12);
    assert_eq!(BTreeSet::from_iter(Rig::ids(&third)), BTreeSet::from_iter(used));
    assert!(third.iter().all(|l| !l.fresh));
}

#[test]
fn one_ranks_burst_may_use_all_of_it() {
    let mut rig = Rig::new(256);
    rig.lend_all(A, 256);
    assert!(rig.lend(B, 4, true).is_empty(), "it waits");
    let done = rig.pool.tick(LATER);
    rig.take(done, true);
    assert_eq!(rig.full, [B]);
}

#[test]
fn what_can_never_fit_does_not_wait() {
    let mut rig = Rig::new(64);
    assert_eq!(rig.pool.lend(A, 65, (true, LATER), NOW), [Do::Lend(A, Vec::new())]);
    rig.lend_all(A, 60);
    assert_eq!(rig.pool.lend(A, 8, (true, LATER), NOW), [Do::Lend(A, Vec::new())]);
}

#[test]
fn who_does_not_wait_is_told_at_once() {
    let mut rig = Rig::new(64);
    assert!(!rig.lend(A, 64, false).is_empty(), "making memory is no wait");
    assert!(rig.lend(B, 4, false).is_empty());
    assert_eq!(rig.full, [B]);
}

#[test]
fn memory_that_does_not_come_costs_the_deadline() {
    let mut rig = Rig::new(64);
    let done = rig.pool.lend(A, 64, (true, LATER), NOW);
    rig.take(done, true);
    assert!(!rig.growing.is_empty() && rig.pool.tick(NOW).is_empty(), "it is being made");
    assert_eq!(rig.pool.tick(LATER), [Do::Full(A)]);
}

#[test]
fn what_was_told_in_vain_is_told_again() {
    let mut rig = Rig::new(64);
    let first = rig.lend(A, 64, true);
    let done = rig.pool.complete(A, &[], NOW);
    rig.take(done, true);
    rig.pool.told_in_vain(A);
    rig.maps.clear();
    let again = rig.lend(A, 64, true);
    assert_eq!(again, first);
    // Whether it was in vain the rank alone knows: nobody else gets what it may have mapped.
    rig.pool.told_in_vain(A);
    let done = rig.pool.gone(A, false, NOW);
    rig.take(done, true);
    rig.run();
    assert!(rig.lend(B, 64, true).iter().all(|l| !Rig::ids(&first).contains(&l.id)));
}

#[test]
fn memory_that_another_rank_maps_is_made_anew() {
    let mut rig = Rig::new(64);
    let mine = rig.lend(A, 64, true);
    let done = rig.pool.complete(A, &[], NOW);
    rig.take(done, true);
    let theirs = rig.lend(B, 64, true);
    assert!(theirs.iter().all(|l| !Rig::ids(&mine).contains(&l.id)));
}

#[test]
fn a_dead_ranks_memory_comes_back_and_a_strangers_is_made_anew() {
    for exited in [true, false] {
        let mut rig = Rig::new(128);
        let (data, open) = (rig.lend(A, 64, true), rig.lend(A, 64, true));
        let done = rig.pool.complete(A, &Rig::ids(&data), NOW);
        rig.take(done, true);
        assert!(!open.is_empty());
        let done = rig.pool.gone(A, exited, NOW);
        if exited {
            rig.maps.clear();
        }
        rig.take(done, true);
        rig.run();
        let next = rig.lend(B, 64, true);
        assert_eq!(Rig::ids(&next) == Rig::ids(&open), exited);
        let done = rig.pool.complete(B, &Rig::ids(&next), NOW);
        rig.take(done, true);
        // FM-P3: a dataset outlives its rank.
        assert_eq!(rig.pool.usage().held, 128);
        let done = rig.pool.released(&Rig::ids(&data), NOW);
        rig.take(done, true);
        rig.run();
        let last = rig.lend(B, 64, true);
        assert_eq!(Rig::ids(&last) == Rig::ids(&data), exited);
    }
}

#[test]
fn reserved_memory_is_warm_and_mapped_before_it_is_needed() {
    let mut rig = Rig::new(1000);
    let done = rig.pool.reserve(A, (100, 1), LATER, NOW);
    rig.take(done, true);
    assert!(rig.answered.is_empty(), "it is being made");
    rig.run();
    let (_, ready) = rig.answered.remove(0);
    assert_eq!(ready.iter().map(|l| l.bytes).sum::<u64>(), 100);
    assert!(ready.iter().all(|l| l.fresh));
    let lent = rig.lend(A, 100, true);
    assert!(lent.iter().all(|l| !l.fresh));
    // Others do not get it while there is room.
    let theirs = rig.lend(B, 8, true);
    assert!(theirs.iter().all(|l| l.fresh && !Rig::ids(&ready).contains(&l.id)));
    // A second reservation of the same size asks for nothing.
    let done = rig.pool.reserve(A, (100, 1), LATER, NOW);
    assert_eq!(done, [Do::Lend(A, Vec::new())]);
}

#[test]
fn small_datasets_do_not_take_what_large_ones_need() {
    // A full dataset and increments of a tenth of it, in what is reserved: no memory is made for any of them, though none
    // comes back before the next full one and one more increment are there.
    let (full, tenth) = (16 * 4 * 4 + 1, 26 * 4 / 4);
    let mut rig = Rig::new(4000);
    let done = rig.pool.reserve(A, (full + 3, 3), LATER, NOW);
    rig.take(done, true);
    rig.run();
    rig.answered.clear();
    let total = rig.pool.usage().total;
    assert_eq!(total, 3 * (full + 3));
    let (mut chain, mut last): (Vec<ExtentId>, Vec<ExtentId>) = Default::default();
    for round in 0..50 {
        let bytes = if round % 9 == 0 { full } else { tenth };
        let old = match round % 9 {
            0 => {
                last = std::mem::take(&mut chain);
                Vec::new()
            }
            // Of two that are kept one is of the last chain until then.
            2 => std::mem::take(&mut last),
            _ => Vec::new(),
        };
        let done = rig.pool.released(&old, NOW);
        rig.take(done, true);
        let lent = rig.lend_all(A, bytes);
        assert_eq!(rig.pool.usage().total, total, "round {round} made memory");
        assert!(lent.iter().map(|l| l.bytes).sum::<u64>() < bytes + 4, "round {round} took more");
        let ids = Rig::ids(&lent);
        let done = rig.pool.complete(A, &ids, NOW);
        rig.take(done, true);
        chain.extend(ids);
    }
}

#[test]
fn what_is_too_large_is_lent_alone() {
    let mut rig = Rig::new(4000);
    let all = rig.lend_all(A, 64 + 3 * 4);
    let done = rig.pool.complete(A, &[], NOW);
    rig.take(done, true);
    let large = all.iter().find(|l| l.bytes == 64).map(|l| l.id);
    // Not the small ones as well, which do not make it smaller.
    assert_eq!(Rig::ids(&rig.lend(A, 20, true)), Vec::from_iter(large));
    assert_eq!(rig.lend(A, 10, true).len(), 3);
}

#[test]
fn a_reservation_is_answered_when_its_time_is_over() {
    let mut rig = Rig::new(1000);
    let done = rig.pool.reserve(A, (100, 1), LATER, NOW);
    rig.take(done, true);
    let done = rig.pool.tick(LATER);
    assert_eq!(done, [Do::Lend(A, Vec::new())]);
}

#[test]
fn what_is_not_needed_any_more_is_given_back() {
    let mut rig = Rig::new(1000);
    let list = rig.lend_all(A, 400);
    let done = rig.pool.complete(A, &Rig::ids(&list), NOW);
    rig.take(done, true);
    let done = rig.pool.released(&Rig::ids(&list), NOW);
    rig.take(done, true);
    for idle in [false, false, true] {
        let done = rig.pool.shrink();
        assert_eq!(!done.is_empty(), idle, "two intervals are kept");
        rig.take(done, true);
        rig.run();
    }
    assert_eq!(rig.pool.usage().total, 0);
}

#[test]
fn a_system_without_memory_is_not_asked_again_and_again() {
    let mut rig = Rig::new(64);
    let done = rig.pool.lend(A, 64, (true, LATER), NOW);
    rig.take(done, true);
    let ids: Vec<ExtentId> = std::mem::take(&mut rig.growing).iter().map(|(id, _)| *id).collect();
    let done = rig.pool.not_grown(&ids, NOW);
    assert!(done.is_empty(), "it waits: {done:?}");
    let done = rig.pool.tick(LATER);
    assert_eq!(done, [Do::Full(A)]);
    // Who asks anew makes it try anew.
    assert!(!rig.lend(A, 64, true).is_empty());
}

#[test]
fn a_dataset_may_be_larger_than_a_pool_that_is_stored() {
    // FM-P11: in turns, each extent is filled, handed over, stored, and lent again.
    let mut rig = Rig::new(64);
    rig.pool = Pool::new(4, 64).storing(true);
    let mut lent = rig.lend(A, 1000, true);
    let mut written = 0;
    for _ in 0..10 {
        assert!(!lent.is_empty());
        let ids = Rig::ids(&lent);
        written += lent.iter().map(|l| l.bytes).sum::<u64>();
        rig.pool.hand_over(A, &ids);
        assert!(ids.iter().all(|id| rig.pool.lent(A, *id).is_none()), "it is not written to");
        assert!(rig.lend(A, 1000, true).is_empty(), "all of it is data");
        assert_eq!(rig.wanted.pop(), Some(64));
        let done = rig.pool.released(&ids, NOW);
        rig.take(done, true);
        lent = rig.answered.remove(0).1;
        assert!(lent.iter().all(|l| !l.fresh), "it maps that already");
    }
    assert!(written > 5 * 64);
    let done = rig.pool.complete(A, &Rig::ids(&lent), NOW);
    rig.take(done, true);
    assert_eq!(rig.pool.usage().lent, 0);
}

#[test]
fn what_one_rank_takes_back_does_not_keep_another_waiting_for_ever() {
    let mut rig = Rig::new(64);
    rig.pool = Pool::new(4, 64).storing(true);
    let mine = Rig::ids(&rig.lend(A, 64, true));
    assert!(rig.lend(B, 64, true).is_empty());
    rig.pool.hand_over(A, &mine);
    assert!(rig.lend(A, 64, true).is_empty());
    let done = rig.pool.released(&mine, NOW);
    rig.take(done, true);
    rig.run();
    // Whoever got it completes with it; the other one has the store asked for it.
    rig.wanted.clear();
    let (conn, list) = rig.answered.remove(0);
    let done = rig.pool.complete(conn, &Rig::ids(&list), NOW);
    rig.take(done, true);
    rig.run();
    assert!(!rig.answered.is_empty() || rig.wanted.contains(&64), "{:?}", rig.answered);
}

#[test]
fn who_does_not_wait_waits_for_what_is_stored_already() {
    let mut rig = Rig::new(64);
    rig.pool = Pool::new(4, 64).storing(true);
    let mine = rig.lend(A, 64, false);
    let done = rig.pool.complete(A, &Rig::ids(&mine), NOW);
    rig.take(done, true);
    assert!(rig.lend(A, 64, false).is_empty() && rig.full.is_empty());
    assert!(rig.wanted.contains(&64));
    let done = rig.pool.tick(LATER);
    rig.take(done, true);
    assert_eq!(rig.full, [A]);
    assert!(rig.lend(A, 64, false).is_empty());
    let done = rig.pool.released(&Rig::ids(&mine), NOW);
    rig.take(done, true);
    assert_eq!(Rig::ids(&rig.answered[0].1), Rig::ids(&mine));
}

#[derive(Clone, Debug)]
enum Op {
    HandOver(u8, u8),
    Lend(u8, u64),
    Reserve(u8, u64, u64),
    Complete(u8, u8),
    Release(u8),
    Gone(u8, bool),
    Work,
    Refuse,
    Shrink,
    Late,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        2 => (0..3u8, any::<u8>()).prop_map(|(c, m)| Op::HandOver(c, m)),
        4 => (0..3u8, 1..300u64).prop_map(|(c, b)| Op::Lend(c, b)),
        1 => (0..3u8, 1..300u64, 1..4u64).prop_map(|(c, b, n)| Op::Reserve(c, b, n)),
        3 => (0..3u8, any::<u8>()).prop_map(|(c, m)| Op::Complete(c, m)),
        3 => any::<u8>().prop_map(Op::Release),
        1 => (0..3u8, any::<bool>()).prop_map(|(c, e)| Op::Gone(c, e)),
        6 => Just(Op::Work),
        1 => Just(Op::Refuse),
        1 => Just(Op::Shrink),
        1 => Just(Op::Late),
    ];
    proptest::collection::vec(op, 1..120)
}

proptest! {
    #[test]
    fn an_extent_has_one_owner_at_a_time(ops in ops(), stores in any::<bool>()) {
        let mut rig = Rig::new(256);
        rig.pool = Pool::new(4, 256).storing(stores);
        let mut conns: Vec<ConnId> = (1..=3).map(ConnId).collect();
        let mut held: Vec<ExtentId> = Vec::new();
        let mut next = 4;
        for op in ops {
            let done = match op {
                Op::HandOver(c, mask) => {
                    let list = rig.lent.entry(conns[c as usize]).or_default();
                    let full = |i: &u32| mask >> (i % 8) & 1 == 1;
                    let ids: Vec<ExtentId> = (0u32..).zip(list.iter())
                        .filter(|(i, _)| full(i)).map(|(_, l)| l.id).collect();
                    list.retain(|l| !ids.contains(&l.id));
                    rig.pool.hand_over(conns[c as usize], &ids);
                    held.extend(&ids);
                    Vec::new()
                }
                Op::Lend(c, bytes) => rig.pool.lend(conns[c as usize], bytes, (true, LATER), NOW),
                Op::Reserve(c, bytes, n) => {
                    rig.pool.reserve(conns[c as usize], (bytes, n), LATER, NOW)
                }
                Op::Complete(c, mask) => {
                    let conn = conns[c as usize];
                    let list = rig.lent.remove(&conn).unwrap_or_default();
                    let used: Vec<ExtentId> = (0u32..).zip(&list)
                        .filter(|(i, _)| mask >> (i % 8) & 1 == 1).map(|(_, l)| l.id).collect();
                    held.extend(&used);
                    rig.pool.complete(conn, &used, NOW)
                }
                Op::Release(n) => {
                    let ids: Vec<ExtentId> =
                        held.iter().copied().filter(|id| id.0 % 5 == u64::from(n) % 5).collect();
                    held.retain(|id| !ids.contains(id));
                    rig.pool.released(&ids, NOW)
                }
                Op::Gone(c, exited) => {
                    let conn = std::mem::replace(&mut conns[c as usize], ConnId(next));
                    next += 1;
                    rig.lent.remove(&conn);
                    if exited {
                        rig.maps.values_mut().for_each(|m| { m.remove(&conn); });
                    }
                    rig.pool.gone(conn, exited, NOW)
                }
                Op::Work => { rig.run(); Vec::new() }
                Op::Refuse => {
                    let ids: Vec<ExtentId> =
                        std::mem::take(&mut rig.growing).iter().map(|(id, _)| *id).collect();
                    rig.pool.not_grown(&ids, NOW)
                }
                Op::Shrink => rig.pool.shrink(),
                Op::Late => rig.pool.tick(LATER),
            };
            rig.take(done, true);
            for (conn, list) in std::mem::take(&mut rig.answered) {
                // A reservation lists what may be mapped; only what the pool says is lent may be written to.
                let lent = list.into_iter().filter(|l| rig.pool.lent(conn, l.id).is_some());
                rig.lent.entry(conn).or_default().extend(lent);
            }
            let mut seen = BTreeSet::new();
            for l in rig.lent.values().flatten() {
                prop_assert!(seen.insert(l.id), "FM-P2: {:?} is lent twice", l.id);
                prop_assert!(!held.contains(&l.id), "FM-P3: {:?} is data and lent", l.id);
            }
            let usage = rig.pool.usage();
            let sum = |ids: &mut dyn Iterator<Item = ExtentId>| ids.map(|id| rig.bytes[&id]).sum::<u64>();
            prop_assert_eq!(usage.held, sum(&mut held.iter().copied()));
            prop_assert_eq!(usage.lent, sum(&mut seen.iter().copied()));
        }
        // FM-P4: when all are gone and all is released, all of it can be given back.
        for conn in conns {
            let done = rig.pool.gone(conn, true, NOW);
            rig.maps.clear();
            rig.take(done, true);
        }
        let done = rig.pool.released(&held, NOW);
        rig.take(done, true);
        for _ in 0..3 {
            rig.run();
            let done = rig.pool.shrink();
            rig.take(done, true);
        }
        rig.run();
        prop_assert_eq!(rig.pool.usage().total, 0);
    }
}
