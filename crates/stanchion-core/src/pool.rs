//! Who has which extent of an agent's shared memory (FM-P1 to FM-P10).
//!
//! An extent is made (`Growing`), is free, is lent to a rank, belongs to datasets (`Held`) and is free again; in the
//! end it is given back to the system (`Retiring`). A rank keeps what it was lent mapped, since mapping costs as much
//! as the copy: an extent that a living process maps is lent to no other one (rule 7), but given back and made anew.
//!
//! Nothing here knows what memory is: sizes and names go in, wishes come out as [`Do`].

use crate::api::{ConnId, Millis};
use stanchion_format::client::Lent;
use stanchion_format::ids::ExtentId;
use stanchion_format::limits::{EXTENT_CHUNKS, EXTENTS_PER_ANSWER_MAX};
use std::collections::{BTreeMap, VecDeque};

/// Memory whose bytes are stored already comes back within this: as long waits also who does not wait, milliseconds.
const RECLAIM_MS: u64 = 200;
/// In how many small extents a dataset goes at least.
const SMALL_PARTS: u64 = 64;

/// Who has an extent mapped, beside the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mapped {
    /// Nobody.
    Nobody,
    /// This rank may have: it was told of it.
    By(ConnId),
    /// A process that hung up and may still live.
    Stranger,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Growing,
    Free,
    Lent(ConnId),
    Held,
    Retiring,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    bytes: u64,
    state: State,
    mapped: Mapped,
    /// The rank that maps it has been given the descriptor, and has not said that it was in vain.
    told: bool,
    /// It was given one at some time.
    given: bool,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
struct Want {
    conn: ConnId,
    kind: Kind,
    /// Waits also for what others must give back, not only for memory to be made.
    patient: bool,
    deadline: Millis,
    /// What is stored was asked for; for who is not patient the wait ends then.
    reclaimed: Option<Millis>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// At least one extent, at most so many bytes.
    Lend(u64),
    /// Warm memory of its own.
    Reserve,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Do {
    /// Make these extents and touch their pages; [`Pool::grown`] or [`Pool::not_grown`] when done.
    Grow(Vec<(ExtentId, u64)>),
    /// Give these back to the system; [`Pool::retired`] when done.
    Retire(Vec<ExtentId>),
    /// So many bytes are wanted: what is in the store is to give its memory back, now or when it is there.
    Reclaim(u64),
    /// Tell the rank.
    Lend(ConnId, Vec<Lent>),
    /// There is no room, and the rank's wait is over.
    Full(ConnId),
}

/// Room in numbers, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The limit.
    pub max: u64,
    /// What exists or is being made.
    pub total: u64,
    /// Of that: lent to ranks.
    pub lent: u64,
    /// Of that: data of datasets.
    pub held: u64,
}

/// An agent's pool.
#[derive(Debug)]
pub struct Pool {
    chunk: u64,
    max: u64,
    /// What is held goes to a device, and comes back.
    stores: bool,
    total: u64,
    next: u64,
    extents: BTreeMap<ExtentId, Extent>,
    /// Who waits, oldest first; one entry a rank at most.
    wants: VecDeque<Want>,
    /// What each rank reserved, bytes.
    reserved: BTreeMap<ConnId, u64>,
    /// The system refused memory: no further tries until something came back, or a rank asks anew.
    refused: bool,
    /// Most in use in this and in the last interval of [`Pool::shrink`].
    peak: (u64, u64),
}

impl Pool {
    /// An empty pool of at most `max` bytes in extents of `chunk` bytes or [`EXTENT_CHUNKS`] times as many.
    pub fn new(chunk: u64, max: u64) -> Pool {
        assert!(chunk > 0, "chunks have bytes");
        Pool {
            chunk,
            max: max / chunk * chunk,
            stores: false,
            total: 0,
            next: 1,
            extents: BTreeMap::new(),
            wants: VecDeque::new(),
            reserved: BTreeMap::new(),
            refused: false,
            peak: (0, 0),
        }
    }

    /// The same, with what is held going to a device.
    pub fn storing(mut self, stores: bool) -> Pool {
        self.stores = stores;
        self
    }

    /// Room in numbers.
    pub fn usage(&self) -> Usage {
        let sum = |f: &dyn Fn(&Extent) -> bool| {
            self.extents.values().filter(|e| f(e)).map(|e| e.bytes).sum()
        };
        Usage {
            max: self.max,
            total: self.total,
            lent: sum(&|e| matches!(e.state, State::Lent(_))),
            held: sum(&|e| e.state == State::Held),
        }
    }

    /// Does anybody wait for room?
    pub fn waiting(&self) -> bool {
        self.wants.iter().any(|w| matches!(w.kind, Kind::Lend(_)))
    }

    /// Does a rank wait for what only the end of a dataset can bring?
    pub fn starving(&self) -> bool {
        let comes = |e: &Extent| matches!(e.state, State::Growing | State::Retiring);
        self.waiting() && !self.extents.values().any(comes)
    }

    /// The rank wants up to `bytes` bytes to write to. It is answered by `deadline`, whatever is under way then; who is
    /// not `patient` waits only for memory to be made. With what it has, more than the limit: it is told at once, by
    /// an empty list.
    pub fn lend(
        &mut self,
        conn: ConnId,
        bytes: u64,
        (patient, deadline): (bool, Millis),
        now: Millis,
    ) -> Vec<Do> {
        let mine: u64 =
            self.extents.values().filter(|e| e.state == State::Lent(conn)).map(|e| e.bytes).sum();
        let most = self.max.saturating_sub(mine);
        if bytes > most && (!self.stores || most == 0) {
            return vec![Do::Lend(conn, Vec::new())];
        }
        let kind = Kind::Lend(bytes.min(most).max(1));
        self.wants.retain(|w| w.conn != conn);
        self.wants.push_back(Want { conn, kind, patient, deadline, reclaimed: None });
        // A new wish is a new try.
        self.refused = false;
        self.settle(now)
    }

    /// The rank has not mapped what it was told of last, for want of descriptors or room: all it is lent from now on
    /// comes with a descriptor again. It is still the only one to have it.
    pub fn told_in_vain(&mut self, conn: ConnId) {
        for extent in self.extents.values_mut().filter(|e| e.mapped == Mapped::By(conn)) {
            extent.told = false;
        }
    }

    /// The rank's datasets will need `bytes` bytes each, and there will be so many of them: they are made warm for it. One
    /// in small extents, for those datasets that have only what changed.
    pub fn reserve(
        &mut self,
        conn: ConnId,
        (bytes, datasets): (u64, u64),
        deadline: Millis,
        now: Millis,
    ) -> Vec<Do> {
        self.wants.retain(|w| w.conn != conn);
        let all = bytes.saturating_mul(datasets);
        let have = |small: bool| {
            let mine = self.extents.values().filter(|e| e.mapped == Mapped::By(conn));
            mine.filter(|e| !small || e.bytes < self.large()).map(|e| e.bytes).sum::<u64>()
        };
        let missing = all.saturating_sub(have(false));
        let small = if datasets > 1 { bytes.saturating_sub(have(true)).min(missing) } else { 0 };
        self.reserved.insert(conn, all.min(self.max));
        self.refused = false;
        let mut out: Vec<Do> =
            self.grow(missing - small, EXTENT_CHUNKS, Mapped::By(conn)).into_iter().collect();
        out.extend(self.grow(small, self.small_chunks(bytes), Mapped::By(conn)));
        let kind = Kind::Reserve;
        self.wants.push_back(Want { conn, kind, patient: false, deadline, reclaimed: None });
        out.extend(self.settle(now));
        out
    }

    /// The size of a large extent.
    fn large(&self) -> u64 {
        EXTENT_CHUNKS * self.chunk
    }

    /// How many chunks small extents have for datasets of so many bytes: a dataset that takes whole ones of them takes
    /// at most a hundredth and a half too much; but each costs a descriptor and a mapping.
    fn small_chunks(&self, bytes: u64) -> u64 {
        let most = (bytes / SMALL_PARTS / self.chunk).clamp(1, EXTENT_CHUNKS);
        1 << most.ilog2()
    }

    /// Is the extent lent to this rank? Its size then.
    pub fn lent(&self, conn: ConnId, id: ExtentId) -> Option<u64> {
        self.extents.get(&id).filter(|e| e.state == State::Lent(conn)).map(|e| e.bytes)
    }

    /// All that is lent to this rank.
    pub fn lent_to(&self, conn: ConnId) -> Vec<ExtentId> {
        let lent = self.extents.iter().filter(|(_, e)| e.state == State::Lent(conn));
        lent.map(|(id, _)| *id).collect()
    }

    /// Could the extent be lent or given back at any moment?
    pub fn spare(&self, id: ExtentId) -> bool {
        self.extents.get(&id).is_none_or(|e| matches!(e.state, State::Free | State::Retiring))
    }

    /// These are full: the rank writes there no more, and they are its dataset's until they are released.
    pub fn hand_over(&mut self, conn: ConnId, ids: &[ExtentId]) {
        for id in ids {
            assert!(self.lent(conn, *id).is_some(), "extent {id} is lent to {conn:?}");
            if let Some(extent) = self.extents.get_mut(id) {
                extent.state = State::Held;
            }
        }
        self.note_peak();
    }

    /// The rank has completed: what it names belongs to its dataset, what else was lent is free.
    pub fn complete(&mut self, conn: ConnId, used: &[ExtentId], now: Millis) -> Vec<Do> {
        for id in used {
            assert!(self.lent(conn, *id).is_some(), "extent {id} is lent to {conn:?}");
            if let Some(extent) = self.extents.get_mut(id) {
                extent.state = State::Held;
            }
        }
        for extent in self.extents.values_mut().filter(|e| e.state == State::Lent(conn)) {
            extent.state = State::Free;
        }
        self.note_peak();
        self.settle(now)
    }

    /// No dataset has these any more, and nobody reads them.
    pub fn released(&mut self, ids: &[ExtentId], now: Millis) -> Vec<Do> {
        for id in ids {
            if let Some(extent) = self.extents.get_mut(id).filter(|e| e.state == State::Held) {
                extent.state = State::Free;
            }
        }
        let mut out = self.retire_strangers();
        out.extend(self.settle(now));
        out
    }

    /// The memory is there.
    pub fn grown(&mut self, ids: &[ExtentId], now: Millis) -> Vec<Do> {
        for id in ids {
            if let Some(extent) = self.extents.get_mut(id).filter(|e| e.state == State::Growing) {
                extent.state = State::Free;
            }
        }
        let mut out = self.retire_strangers();
        out.extend(self.settle(now));
        out
    }

    /// The system does not give it.
    pub fn not_grown(&mut self, ids: &[ExtentId], now: Millis) -> Vec<Do> {
        for id in ids {
            if let Some(extent) = self.extents.remove(id) {
                self.total -= extent.bytes;
            }
        }
        self.refused = true;
        self.settle(now)
    }

    /// It is given back.
    pub fn retired(&mut self, ids: &[ExtentId], now: Millis) -> Vec<Do> {
        for id in ids {
            if let Some(extent) = self.extents.remove(id) {
                assert_eq!(extent.state, State::Retiring, "extent {id} was to be given back");
                self.total -= extent.bytes;
            }
        }
        self.refused = false;
        self.settle(now)
    }

    /// The rank waits for nothing any more; what it has is still its own.
    pub fn hung_up(&mut self, conn: ConnId) {
        self.wants.retain(|w| w.conn != conn);
        self.reserved.remove(&conn);
    }

    /// A process that hung up and may still live maps these.
    pub fn strange(&mut self, ids: &[ExtentId]) {
        for id in ids {
            if let Some(extent) = self.extents.get_mut(id) {
                (extent.mapped, extent.told) = (Mapped::Stranger, false);
            }
        }
    }

    /// The rank's connection is gone. `exited`: its process too, so that nobody maps what it had.
    pub fn gone(&mut self, conn: ConnId, exited: bool, now: Millis) -> Vec<Do> {
        self.hung_up(conn);
        for extent in self.extents.values_mut() {
            if extent.state == State::Lent(conn) {
                extent.state = State::Free;
            }
            if extent.mapped == Mapped::By(conn) {
                let nobody = exited || !extent.given;
                extent.mapped = if nobody { Mapped::Nobody } else { Mapped::Stranger };
                (extent.told, extent.given) = (false, false);
            }
        }
        let mut out = self.retire_strangers();
        out.extend(self.settle(now));
        out
    }

    /// Time has passed: waits that are over end.
    pub fn tick(&mut self, now: Millis) -> Vec<Do> {
        if self.wants.is_empty() { Vec::new() } else { self.settle(now) }
    }

    /// To be called at long intervals: gives back what neither this interval nor the last one needed.
    pub fn shrink(&mut self) -> Vec<Do> {
        self.note_peak();
        let reserved: u64 = self.reserved.values().sum();
        let keep = self.peak.0.max(self.peak.1).max(reserved.min(self.max));
        self.peak = (0, self.peak.0);
        let mut spare = self.total.saturating_sub(keep);
        let mut ids = Vec::new();
        // First what nobody maps.
        for unmapped in [true, false] {
            for (id, e) in &self.extents {
                let nobody = e.mapped == Mapped::Nobody;
                if e.state == State::Free && nobody == unmapped && e.bytes <= spare {
                    spare -= e.bytes;
                    ids.push(*id);
                }
            }
        }
        self.retire(ids).into_iter().collect()
    }

    fn note_peak(&mut self) {
        let used = |e: &&Extent| matches!(e.state, State::Lent(_) | State::Held);
        let now: u64 = self.extents.values().filter(used).map(|e| e.bytes).sum();
        self.peak.0 = self.peak.0.max(now);
    }

    fn retire(&mut self, ids: Vec<ExtentId>) -> Option<Do> {
        for id in &ids {
            let extent = self.extents.get_mut(id).expect("only what exists is retired");
            assert_eq!(extent.state, State::Free, "only what is free is given back");
            extent.state = State::Retiring;
        }
        (!ids.is_empty()).then_some(Do::Retire(ids))
    }

    /// What a process maps that nobody can ask any more is of no use to others.
    fn retire_strangers(&mut self) -> Vec<Do> {
        let ids = self
            .extents
            .iter()
            .filter(|(_, e)| e.state == State::Free && e.mapped == Mapped::Stranger);
        let ids = ids.map(|(id, _)| *id).collect();
        self.retire(ids).into_iter().collect()
    }

    /// New extents for `bytes` bytes as far as the limit allows: of so many chunks each, and of one for the rest.
    fn grow(&mut self, bytes: u64, each: u64, mapped: Mapped) -> Option<Do> {
        if self.refused {
            return None;
        }
        let room = self.max - self.total.min(self.max);
        let mut left = bytes.div_ceil(self.chunk).min(room / self.chunk);
        let mut new = Vec::new();
        while left > 0 {
            let chunks = if left >= each { each } else { 1 };
            let (id, bytes) = (ExtentId(self.next), chunks * self.chunk);
            self.next += 1;
            self.total += bytes;
            let extent = Extent { bytes, state: State::Growing, mapped, told: false, given: false };
            self.extents.insert(id, extent);
            new.push((id, bytes));
            left -= chunks;
        }
        (!new.is_empty()).then_some(Do::Grow(new))
    }

    /// Gives everybody what can be given, and starts what is missing.
    fn settle(&mut self, now: Millis) -> Vec<Do> {
        let mut out = Vec::new();
        for mut want in std::mem::take(&mut self.wants) {
            let done = match want.kind {
                Kind::Lend(bytes) => self.settle_lend(&mut want, bytes, now, &mut out),
                Kind::Reserve => self.settle_reserve(want, now, &mut out),
            };
            if !done {
                self.wants.push_back(want);
            }
        }
        out
    }

    fn settle_reserve(&mut self, want: Want, now: Millis, out: &mut Vec<Do>) -> bool {
        let mine = Mapped::By(want.conn);
        let growing = self.extents.values().any(|e| e.mapped == mine && e.state == State::Growing);
        if growing && now < want.deadline {
            return false;
        }
        let fresh: Vec<ExtentId> = self
            .extents
            .iter()
            .filter(|(_, e)| e.mapped == mine && e.state == State::Free && !e.told)
            .map(|(id, _)| *id)
            .take(EXTENTS_PER_ANSWER_MAX)
            .collect();
        out.push(Do::Lend(want.conn, self.tell(want.conn, &fresh)));
        true
    }

    /// Marks them as told; the list for the rank.
    fn tell(&mut self, conn: ConnId, ids: &[ExtentId]) -> Vec<Lent> {
        let tell = |id: &ExtentId| {
            let extent = self.extents.get_mut(id).expect("only what exists is lent");
            let fresh = !std::mem::replace(&mut extent.told, true);
            (extent.mapped, extent.given) = (Mapped::By(conn), true);
            Lent { id: *id, bytes: extent.bytes, fresh }
        };
        ids.iter().map(tell).collect()
    }

    fn settle_lend(&mut self, want: &mut Want, bytes: u64, now: Millis, out: &mut Vec<Do>) -> bool {
        let chosen = self.choose(want.conn, bytes);
        if !chosen.is_empty() {
            for id in &chosen {
                self.extents.get_mut(id).expect("it was just chosen").state =
                    State::Lent(want.conn);
            }
            self.note_peak();
            out.push(Do::Lend(want.conn, self.tell(want.conn, &chosen)));
            return true;
        }
        if now >= want.deadline {
            out.push(Do::Full(want.conn));
            return true;
        }
        let coming = self.extents.values().any(|e| match e.state {
            State::Growing => {
                matches!(e.mapped, Mapped::Nobody) || e.mapped == Mapped::By(want.conn)
            }
            State::Retiring => true,
            _ => false,
        });
        if coming {
            return false;
        }
        if let Some(grow) = self.grow(bytes, EXTENT_CHUNKS, Mapped::Nobody) {
            out.push(grow);
            return false;
        }
        if let Some(retire) = self.take_from_others(want.conn, bytes) {
            out.push(retire);
            return false;
        }
        if !self.stores {
            if !want.patient {
                out.push(Do::Full(want.conn));
            }
            return !want.patient;
        }
        let over = now >= *want.reclaimed.get_or_insert(now.after(RECLAIM_MS)) && !want.patient;
        // Each time anew: what came back of the last wish may have gone to others.
        out.push(if over { Do::Full(want.conn) } else { Do::Reclaim(bytes) });
        over
    }

    /// Free extents for the rank: those that it maps, then those that nobody maps; large ones for what fills them. What is
    /// lent is a dataset's as a whole, however little of it that needs.
    fn choose(&self, conn: ConnId, bytes: u64) -> Vec<ExtentId> {
        let mut free: Vec<(bool, u64, ExtentId)> = self
            .extents
            .iter()
            .filter(|(_, e)| e.state == State::Free)
            .filter(|(_, e)| e.mapped == Mapped::By(conn) || e.mapped == Mapped::Nobody)
            .map(|(id, e)| (e.mapped == Mapped::Nobody, e.bytes, *id))
            .collect();
        // Mapped ones first, in each kind the large ones.
        free.sort_by_key(|(unmapped, bytes, id)| (*unmapped, std::cmp::Reverse(*bytes), *id));
        let mut left = bytes.checked_next_multiple_of(self.chunk).unwrap_or(bytes);
        let mut chosen: Vec<(u64, ExtentId)> = Vec::new();
        // The least of those that have more than is left.
        let mut spared: Option<(bool, u64, ExtentId)> = None;
        for extent @ (_, bytes, id) in free {
            if left == 0 || chosen.len() >= EXTENTS_PER_ANSWER_MAX {
                break;
            }
            if bytes > left {
                let least = spared.filter(|s| (s.0, s.1) <= (extent.0, extent.1));
                spared = least.or(Some(extent));
                continue;
            }
            left -= bytes;
            chosen.push((bytes, id));
        }
        // Better too large than none, or than another round.
        if left > 0
            && chosen.len() < EXTENTS_PER_ANSWER_MAX
            && let Some((_, bytes, id)) = spared
        {
            let mut over = bytes - left;
            // What it has room for, too, is not needed.
            chosen.retain(|(bytes, _)| {
                let fits = *bytes <= over;
                over -= if fits { *bytes } else { 0 };
                !fits
            });
            chosen.push((bytes, id));
        }
        chosen.into_iter().map(|(_, id)| id).collect()
    }

    /// Free memory that other ranks map, for `bytes` bytes: it is given back, to be made anew.
    fn take_from_others(&mut self, conn: ConnId, bytes: u64) -> Option<Do> {
        let mut left = bytes;
        let mut ids = Vec::new();
        for (id, e) in &self.extents {
            let others = matches!(e.mapped, Mapped::By(c) if c != conn);
            if left > 0 && e.state == State::Free && others {
                left = left.saturating_sub(e.bytes);
                ids.push(*id);
            }
        }
        self.retire(ids)
    }
}

#[cfg(test)]
mod tests;
