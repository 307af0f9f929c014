//! Agents that store what is in their pools: what ranks hand over or complete reaches the device after a while, and its
//! memory comes back when it is wanted, or when nobody needs it any more (FM-P11, FM-T5).

use crate::memory::Memory;
use crate::world::{Event, World};
use stanchion_core::api::AgentEvent;
use stanchion_format::client::{Filled, Lent};
use stanchion_format::ids::{AgentId, ExtentId, Key, RankId, SlotId};
use std::collections::{BTreeMap, BTreeSet};

/// Whose dataset's part.
pub type Whose = (Key, SlotId, RankId);

/// What a rank handed over.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Where it is, as long as its memory is not given back.
    pub extent: Option<ExtentId>,
    /// As it was stored.
    pub stored: Option<Vec<u8>>,
}

/// What is on its way to the device, and what is there.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Handed over and not completed, by number.
    pub taken: BTreeMap<Whose, BTreeMap<u64, Taken>>,
    /// Extents that hold something that is to be stored: with a token, since extents are used again.
    holds: BTreeMap<ExtentId, u64>,
    next: u64,
    /// Those that are stored.
    clean: BTreeSet<ExtentId>,
    /// Bytes that are wanted back.
    wanted: u64,
    settled: BTreeSet<Key>,
}

impl Memory {
    /// Was an extent handed over, and is not given back?
    pub(crate) fn is_taken(&self, extent: ExtentId) -> Option<Whose> {
        let mut all = self.device.taken.iter();
        let found = all.find(|(_, taken)| taken.values().any(|t| t.extent == Some(extent)));
        found.map(|(whose, _)| *whose)
    }

    /// Nothing is in it any more.
    pub(crate) fn forget_extent(&mut self, extent: ExtentId) {
        self.device.holds.remove(&extent);
        self.device.clean.remove(&extent);
    }
}

impl World {
    /// A rank fills all that it was lent, and hands it over.
    pub(crate) fn hand_in(
        &mut self,
        id: AgentId,
        lent: &[Lent],
        mut bytes: &[u8],
        mut number: u64,
    ) -> Vec<Filled> {
        let mut filled = Vec::new();
        for l in lent {
            self.nobodys(id, l.id, "is filled");
            let Some(p) = self.agents.get_mut(&id) else { break };
            let Some(place) = p.memory.extents.get_mut(&l.id) else { break };
            let (now, later) = bytes.split_at(place.len().min(bytes.len()));
            place[..now.len()].copy_from_slice(now);
            bytes = later;
            filled.push(Filled { id: l.id, number });
            number += 1;
        }
        filled
    }

    /// The agent takes over what is full.
    pub(crate) fn take_filled(&mut self, id: AgentId, whose: Whose, filled: &[Filled]) {
        for f in filled {
            self.nobodys(id, f.id, "is handed over");
            let Some(p) = self.agents.get_mut(&id) else { return };
            let taken = Taken { extent: Some(f.id), stored: None };
            p.memory.device.taken.entry(whose).or_default().insert(f.number, taken);
        }
        self.onto_device(id, filled.iter().map(|f| f.id).collect());
    }

    /// These are to be stored.
    pub(crate) fn onto_device(&mut self, id: AgentId, extents: Vec<ExtentId>) {
        if !self.sc.stores {
            return;
        }
        for extent in extents {
            let Some(p) = self.agents.get_mut(&id) else { return };
            let device = &mut p.memory.device;
            if device.holds.contains_key(&extent) {
                continue;
            }
            device.next += 1;
            let token = device.next;
            device.holds.insert(extent, token);
            // Now and then it hangs.
            let slow = if self.rng.chance(50) { 400 } else { 1 };
            let delay = 50 + self.rng.below(self.sc.work_us * slow);
            self.push(delay, Event::Stored(id, extent, token));
        }
    }

    /// An extent is stored.
    pub(crate) fn stored(&mut self, id: AgentId, extent: ExtentId, token: u64) {
        let Some(p) = self.agents.get_mut(&id).filter(|p| p.alive) else { return };
        let memory = &mut p.memory;
        if memory.device.holds.get(&extent) != Some(&token) {
            return;
        }
        let bytes = memory.extents.get(&extent).cloned().unwrap_or_default();
        for taken in memory.device.taken.values_mut().flat_map(|t| t.values_mut()) {
            if taken.extent == Some(extent) {
                taken.stored = Some(bytes.clone());
            }
        }
        memory.device.clean.insert(extent);
        let settled = memory
            .files
            .iter()
            .any(|(place, ids)| ids.contains(&extent) && memory.device.settled.contains(&place.0));
        if settled || memory.device.wanted > 0 {
            self.give_back(id, vec![extent]);
        }
    }

    /// Memory is wanted.
    pub(crate) fn reclaim(&mut self, id: AgentId, bytes: u64) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        p.memory.device.wanted = bytes;
        let clean = p.memory.device.clean.iter().copied().collect();
        self.give_back(id, clean);
    }

    /// A dataset needs no memory any more.
    pub(crate) fn settled(&mut self, id: AgentId, key: Key) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        p.memory.device.settled.insert(key);
        let clean = &p.memory.device.clean;
        let files = p.memory.files.iter().filter(|(place, _)| place.0 == key);
        let of: BTreeSet<ExtentId> =
            files.flat_map(|(_, ids)| ids.iter().filter(|e| clean.contains(e)).copied()).collect();
        self.give_back(id, of.into_iter().collect());
    }

    fn give_back(&mut self, id: AgentId, extents: Vec<ExtentId>) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        let memory = &mut p.memory;
        for extent in &extents {
            let bytes = memory.extents.get(extent).map_or(0, |e| e.len() as u64);
            memory.device.wanted = memory.device.wanted.saturating_sub(bytes);
            memory.forget_extent(*extent);
            memory.files.values_mut().for_each(|ids| ids.retain(|e| e != extent));
            for taken in memory.device.taken.values_mut().flat_map(|t| t.values_mut()) {
                if taken.extent == Some(*extent) {
                    taken.extent = None;
                }
            }
        }
        self.released(id, extents);
    }

    /// Core hears that nobody has these any more.
    pub(crate) fn released(&mut self, id: AgentId, extents: Vec<ExtentId>) {
        if !extents.is_empty() {
            let delay = 50 + self.rng.below(5_000);
            let event = AgentEvent::Released(extents);
            self.push(delay, Event::Memory(id, Box::new(event)));
        }
    }
}
