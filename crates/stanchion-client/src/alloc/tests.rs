//! A lender with real extents that are full of somebody else's bytes.

use super::*;
use stanchion_mem::Extent;

/// What an extent has before anybody writes to it.
pub(crate) const STALE: u8 = 0xa5;

/// Lends extents of these sizes, in turns, up to a limit.
pub(crate) struct Bank {
    sizes: Vec<u64>,
    left: u64,
    extents: Vec<Extent>,
    pub asked: Vec<u64>,
    /// Takes over what is full, and lends its memory again.
    pub storing: bool,
    /// What was handed over, by number.
    pub stored: BTreeMap<u64, Vec<u8>>,
    again: Vec<ExtentId>,
}

impl Bank {
    pub fn new(sizes: &[u64], limit: u64) -> Bank {
        Bank {
            sizes: sizes.to_vec(),
            left: limit,
            extents: Vec::new(),
            asked: Vec::new(),
            storing: false,
            stored: BTreeMap::new(),
            again: Vec::new(),
        }
    }

    pub fn lent(&self) -> u64 {
        self.extents.iter().map(|e| e.mapping().len() as u64).sum()
    }

    pub fn read(&self, id: ExtentId, offset: u64, bytes: u64) -> Vec<u8> {
        let mut buf = vec![0; bytes as usize];
        self.mapping(id).read(offset as usize, &mut buf);
        buf
    }
}

impl Lender for Bank {
    fn lend(&mut self, bytes: u64) -> Result<Vec<Lent>, Error> {
        self.asked.push(bytes);
        if bytes > self.left {
            return Ok(Vec::new());
        }
        let mut lent = Vec::new();
        let mut given = 0;
        for id in std::mem::take(&mut self.again) {
            let bytes = self.mapping(id).len() as u64;
            self.mapping(id).write(0, &vec![STALE; bytes as usize]);
            lent.push(Lent { id, bytes, fresh: false });
            given += bytes;
        }
        while given < bytes && lent.len() < 3 {
            let size = self.sizes[self.extents.len() % self.sizes.len()];
            let extent = Extent::create(size).unwrap();
            extent.mapping().write(0, &vec![STALE; size as usize]);
            self.extents.push(extent);
            let id = ExtentId(self.extents.len() as u64);
            lent.push(Lent { id, bytes: size, fresh: true });
            given += size;
        }
        self.left = self.left.saturating_sub(given);
        Ok(lent)
    }

    fn mapping(&self, id: ExtentId) -> &Mapping {
        self.extents[id.0 as usize - 1].mapping()
    }

    fn stores(&self) -> bool {
        self.storing
    }

    fn hand(&mut self, filled: Filled) {
        let bytes = self.mapping(filled.id).len() as u64;
        let old = self.stored.insert(filled.number, self.read(filled.id, 0, bytes));
        assert!(old.is_none(), "a number is used once");
        self.again.push(filled.id);
    }
}

fn take(alloc: &mut Alloc, bank: &mut Bank, want: u64) -> Option<Span> {
    alloc.take(bank, (want, PAGE), None, &mut PoolTimes::default()).unwrap()
}

/// Both tables say the same, pieces do not touch, and nothing is lost.
fn check(alloc: &Alloc, given: &[Span]) {
    let by_place: Vec<_> = alloc.free.iter().map(|((id, at), bytes)| (*bytes, *id, *at)).collect();
    let sizes: BTreeSet<_> = by_place.iter().copied().collect();
    assert_eq!(sizes, alloc.sizes);
    let mut all: Vec<(ExtentId, u64, u64, bool)> =
        by_place.iter().map(|(bytes, id, at)| (*id, *at, *bytes, true)).collect();
    all.extend(given.iter().map(|s| (s.id, s.offset, s.bytes, false)));
    all.sort_unstable();
    for pair in all.windows(2) {
        let (a, b) = (pair[0], pair[1]);
        assert!(a.0 != b.0 || a.1 + a.2 <= b.1, "{a:?} and {b:?} overlap");
        assert!(a.0 != b.0 || a.1 + a.2 < b.1 || !(a.3 && b.3), "{a:?} and {b:?} are one");
    }
    let sum: u64 = all.iter().map(|(_, _, bytes, _)| bytes).sum();
    assert_eq!(sum, alloc.total);
}

#[test]
fn pieces_never_overlap_and_come_back_whole() {
    bolero::check!().with_type::<Vec<(u8, u16)>>().with_iterations(500).for_each(|steps| {
        let mut bank = Bank::new(&[8192, 65_536], 1 << 20);
        let mut alloc = Alloc::new(8192);
        let mut given: Vec<Span> = Vec::new();
        for (what, n) in steps {
            let n = u64::from(*n);
            match what % 4 {
                0 | 1 => {
                    let after = given.last().copied();
                    let times = &mut PoolTimes::default();
                    if let Some(span) = alloc.take(&mut bank, (n + 1, PAGE), after, times).unwrap()
                    {
                        assert!(span.bytes > 0 && span.bytes < n + 1 + LINE);
                        given.push(span);
                    }
                }
                2 if !given.is_empty() => {
                    alloc.give(given.swap_remove(n as usize % given.len()));
                }
                _ => {
                    if let Some(span) = given.pop() {
                        given.push(alloc.trim(span, n.clamp(1, span.bytes)));
                    }
                }
            }
            check(&alloc, &given);
        }
        for span in given.drain(..) {
            alloc.give(span);
        }
        check(&alloc, &[]);
        assert_eq!(alloc.free.len(), alloc.lent.len(), "each extent is one piece again");
    });
}

#[test]
fn more_is_asked_for_the_more_there_is() {
    let mut bank = Bank::new(&[4096], 1 << 30);
    let mut alloc = Alloc::new(4096);
    for _ in 0..4000 {
        assert_eq!(take(&mut alloc, &mut bank, 4096).unwrap().bytes, 4096);
    }
    assert_eq!(bank.asked[..3], [4096, 4096, 4096]);
    assert_eq!(bank.asked.last(), Some(&(16 * 4096)), "and there is a limit");
    // All of what is needed, if that is more; in pieces, as they come.
    for _ in 0..20 {
        assert!(take(&mut alloc, &mut bank, 1 << 20).unwrap().bytes >= 4096);
    }
    assert!(bank.asked.contains(&(1 << 20)));
}

#[test]
fn where_there_is_no_room_for_a_step_there_may_be_for_the_need() {
    let mut bank = Bank::new(&[4096], 11 * 4096);
    let mut alloc = Alloc::new(4096);
    for _ in 0..11 {
        take(&mut alloc, &mut bank, 4096).unwrap();
    }
    assert_eq!(take(&mut alloc, &mut bank, 4096), None);
    assert_eq!(bank.lent(), 11 * 4096);
}

#[test]
fn an_extent_that_is_lent_twice_is_refused() {
    struct Liar(Bank);
    impl Lender for Liar {
        fn lend(&mut self, bytes: u64) -> Result<Vec<Lent>, Error> {
            let mut lent = self.0.lend(bytes)?;
            lent.extend_from_within(..);
            Ok(lent)
        }
        fn mapping(&self, id: ExtentId) -> &Mapping {
            self.0.mapping(id)
        }
    }
    let mut liar = Liar(Bank::new(&[4096], 1 << 20));
    let done = Alloc::new(4096).take(&mut liar, (1, 1), None, &mut PoolTimes::default());
    assert!(matches!(done, Err(Error::Answer { .. })));
}
