//! Extents that ranks hand over while they still write (FM-P11): they are stored behind them, and their memory serves
//! the rest of the dataset.

use super::Agent;
use crate::api::{AgentAction, ConnId};
use crate::bugs::Bug;
use stanchion_format::client::Filled;
use stanchion_format::ids::{ExtentId, Key, RankId, SlotId};
use stanchion_format::limits::MEMORY_PARTS_MAX;
use std::collections::{BTreeMap, BTreeSet};

/// What a rank handed over of the dataset that it writes.
#[derive(Debug)]
pub(super) struct Handed {
    whose: (Key, SlotId, RankId),
    /// Bytes by number.
    parts: BTreeMap<u64, u64>,
}

impl Agent {
    /// Takes over what is full. False: the rank does not keep to the rules.
    pub(super) fn hand_over(&mut self, conn: ConnId, filled: &[Filled]) -> bool {
        if filled.is_empty() {
            return true;
        }
        let behind = self.ranks.behind(conn);
        let (Some(key), Some((rank, slot))) = (self.ranks.open_dataset(), behind) else {
            return false;
        };
        let whose = (key, slot, rank);
        if self.handed.get(&conn).is_some_and(|h| h.whose != whose) {
            self.forgo(conn);
        }
        let had = self.handed.get(&conn).map_or(0, |h| h.parts.len());
        let ids: BTreeSet<ExtentId> = filled.iter().map(|f| f.id).collect();
        let numbers: BTreeSet<u64> = filled.iter().map(|f| f.number).collect();
        let known = |n: &u64| self.handed_bytes(conn, *n).is_some();
        if ids.len() < filled.len()
            || numbers.len() < filled.len()
            || numbers.iter().any(known)
            || had.saturating_add(filled.len()) > MEMORY_PARTS_MAX
        {
            return false;
        }
        let mut sizes = Vec::with_capacity(filled.len());
        for f in filled {
            let Some(bytes) = self.pool.lent(conn, f.id) else { return false };
            sizes.push((f.number, bytes));
        }
        let ids: Vec<ExtentId> = ids.into_iter().collect();
        self.pool.hand_over(conn, &ids);
        let handed = self.handed.entry(conn);
        handed.or_insert(Handed { whose, parts: BTreeMap::new() }).parts.extend(sizes);
        self.out.push(AgentAction::Take { key, slot, rank, filled: filled.to_vec() });
        if self.bug(Bug::LendUnstored) {
            let wishes = self.pool.released(&ids, self.now.mono);
            self.pool_do(wishes);
        }
        true
    }

    /// The size of what the rank handed over by this number.
    pub(super) fn handed_bytes(&self, conn: ConnId, number: u64) -> Option<u64> {
        self.handed.get(&conn)?.parts.get(&number).copied()
    }

    /// The dataset is not completed by this rank: what it handed over is nobody's.
    pub(super) fn forgo(&mut self, conn: ConnId) {
        if let Some(Handed { whose: (key, slot, rank), .. }) = self.handed.remove(&conn) {
            self.out.push(AgentAction::Keep { key, slot, rank, files: Vec::new() });
        }
    }
}
