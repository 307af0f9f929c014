//! The agents' shared memory: extents that come and go, who has them mapped, and which files are in them.
//!
//! What a rank copies into its extents becomes the file's bytes when the agent keeps it; from then on the rules are
//! looked after: nobody writes where a dataset is (FM-P3), and nobody is lent what another living process maps
//! (FM-P2).

use crate::app::{GRID_BLOCK, Grid};
use crate::store::FileId;
use crate::stores::{Device, Whose};
use crate::world::{Event, World};
use stanchion_core::api::{AgentEvent, ConnId};
use stanchion_format::changed::{Changed, ChangedWriter};
use stanchion_format::client::{Base, Lent, MemoryFile, Part, PartFrom};
use stanchion_format::ids::{AgentId, ExtentId, Key, RankId, SlotId};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes to be copied: to where.
pub type Copy = (ExtentId, usize, Vec<u8>);

/// One agent's shared memory.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Extents that exist.
    pub(crate) extents: BTreeMap<ExtentId, Vec<u8>>,
    /// Who has mapped them.
    pub(crate) mapped: BTreeMap<ExtentId, BTreeSet<ConnId>>,
    /// Files that are in them.
    pub(crate) files: BTreeMap<FileId, Vec<ExtentId>>,
    /// What was in them when they were kept: what is damaged later is not what a rank has not written again.
    pub(crate) whole: BTreeMap<FileId, Vec<u8>>,
    /// Where it is stored.
    pub(crate) device: Device,
}

fn file_name(path: &str) -> Option<&str> {
    path.rsplit('/').next()
}

/// A grid as what another one is but for the blocks that differ, if they are of one size; and those.
fn over((key, path, theirs): &Grid, bytes: &[u8]) -> (Option<Base>, Vec<u8>) {
    if theirs.len() != bytes.len() {
        return (None, bytes.to_vec());
    }
    let mut changed = ChangedWriter::default();
    let mut own = Vec::new();
    for (theirs, ours) in theirs.chunks(GRID_BLOCK).zip(bytes.chunks(GRID_BLOCK)) {
        if theirs == ours {
            changed.same(ours.len() as u64);
        } else {
            changed.own(ours.len() as u64);
            own.extend_from_slice(ours);
        }
    }
    (Some(Base { key: *key, path: path.clone(), changed: changed.finish() }), own)
}

fn merged(theirs: &[u8], mut own: &[u8], changed: &Changed) -> Vec<u8> {
    let mut all = Vec::new();
    for stretch in changed.stretches() {
        let (at, same) = (all.len(), stretch.same as usize);
        all.extend_from_slice(theirs.get(at..at + same).unwrap_or_default());
        let (first, rest) = own.split_at(own.len().min(stretch.own as usize));
        all.extend_from_slice(first);
        own = rest;
    }
    all
}

impl World {
    /// Memory is made, or is not: systems run out of it.
    pub(crate) fn grow(&mut self, id: AgentId, extents: Vec<(ExtentId, u64)>) {
        for (extent, bytes) in extents {
            let full = self.agents[&id].store.full_until > self.now;
            let there = !full || self.rng.chance(500);
            if there && let Some(p) = self.agents.get_mut(&id) {
                p.memory.extents.insert(extent, vec![0; bytes as usize]);
                let total: u64 = p.memory.extents.values().map(|e| e.len() as u64).sum();
                if total > self.sc.pool_bytes_max {
                    let text = format!("agent {id} has {total} bytes in its pool");
                    return self.violate("FM-P1", text);
                }
            }
            let delay = 50 + self.rng.below(self.sc.work_us);
            let event = AgentEvent::Grown { ids: vec![extent], there };
            self.push(delay, Event::Memory(id, Box::new(event)));
        }
    }

    /// Memory is given back.
    pub(crate) fn retire(&mut self, id: AgentId, ids: Vec<ExtentId>) {
        for extent in &ids {
            self.nobodys(id, *extent, "is given back");
            self.no_childs(id, *extent, "is given back");
            if let Some(p) = self.agents.get_mut(&id) {
                p.memory.extents.remove(extent);
                p.memory.mapped.remove(extent);
            }
        }
        let delay = 50 + self.rng.below(2_000);
        self.push(delay, Event::Memory(id, Box::new(AgentEvent::Retired(ids))));
    }

    /// FM-P3: no dataset has it.
    pub(crate) fn nobodys(&mut self, id: AgentId, extent: ExtentId, what: &str) {
        let Some(p) = self.agents.get(&id) else { return };
        let whose = p.memory.files.iter().find(|(_, ids)| ids.contains(&extent));
        if let Some((place, _)) = whose {
            let text = format!("extent {extent} of dataset {} {what} on agent {id}", place.0);
            return self.violate("FM-P3", text);
        }
        if let Some(whose) = p.memory.is_taken(extent) {
            let text = format!("extent {extent}, handed over by {whose:?}, {what} on agent {id}");
            self.violate("FM-P11", text);
        }
    }

    /// A rank is told what it may map, and with `lending` also write to.
    pub(crate) fn mapped(&mut self, id: AgentId, conn: ConnId, lent: &[Lent], lending: bool) {
        for l in lent {
            let exists = self.agents.get(&id).is_some_and(|p| p.memory.extents.contains_key(&l.id));
            if !lending && !exists {
                // Given back while the answer was on its way: it maps memory that is nobody's any more.
                continue;
            }
            let Some(p) = self.agents.get_mut(&id) else { return };
            let maps = p.memory.mapped.entry(l.id).or_default();
            let others: Vec<ConnId> = maps.iter().copied().filter(|c| *c != conn).collect();
            let knew = !maps.insert(conn);
            let there = p.memory.extents.get(&l.id).is_some_and(|e| e.len() as u64 == l.bytes);
            if !there || knew == l.fresh {
                let text = format!("{l:?} on agent {id}: there {there}, mapped before {knew}");
                return self.violate("FM-P5", text);
            }
            if let Some(other) = others.into_iter().find(|c| self.process_lives(*c)) {
                let text = format!("{:?} is lent to {conn:?} and still mapped by {other:?}", l.id);
                return self.violate("FM-P2", text);
            }
        }
    }

    /// Is there still a process behind this connection, gone or not?
    fn process_lives(&self, conn: ConnId) -> bool {
        let rank = self.conns.get(&conn).map(|(app, rank)| &self.apps[*app].ranks[*rank]);
        let child = self.children.get(&conn).is_some_and(|c| c.lives());
        child || self.lingering.contains(&conn) || rank.is_some_and(|r| r.alive)
    }

    /// A rank copies files into what it was lent, or says what its child is to copy `later`: what it will declare, or
    /// nothing if there is not enough.
    pub(crate) fn copy_in(
        &mut self,
        id: AgentId,
        lent: &[Lent],
        (files, base): (&[(String, Vec<u8>)], Option<Grid>),
        handed: &[(u64, u64)],
        mut later: Option<&mut Vec<Copy>>,
    ) -> Option<Vec<MemoryFile>> {
        // What was handed over has the first bytes already.
        let mut room: Vec<(PartFrom, u64)> = lent
            .iter()
            .rev()
            .map(|l| (PartFrom::Extent { id: l.id, offset: 0 }, l.bytes))
            .collect();
        room.extend(
            handed.iter().rev().map(|h| (PartFrom::Filled { number: h.0, offset: 0 }, h.1)),
        );
        let mut out = Vec::new();
        for (path, bytes) in files {
            let (base, own) = match base.as_ref().filter(|b| file_name(&b.1) == file_name(path)) {
                Some(base) => over(base, bytes),
                None => (None, bytes.clone()),
            };
            let bytes = &own;
            let mut parts = Vec::new();
            let mut done = 0;
            while done < bytes.len() {
                let (from, left) = room.pop()?;
                let step = left.min((bytes.len() - done) as u64);
                parts.push(Part { from, bytes: step });
                let (extent, offset) = match from {
                    PartFrom::Extent { id, offset } => (id, offset),
                    PartFrom::Filled { number, offset } => {
                        if left > step {
                            let rest = PartFrom::Filled { number, offset: offset + step };
                            room.push((rest, left - step));
                        }
                        done += step as usize;
                        continue;
                    }
                };
                self.nobodys(id, extent, "is written to");
                let from = offset as usize;
                let p = self.agents.get_mut(&id)?;
                let piece = &bytes[done..done + step as usize];
                let place = p.memory.extents.get_mut(&extent)?;
                match later.as_deref_mut() {
                    Some(later) => later.push((extent, from, piece.to_vec())),
                    None => place[from..from + step as usize].copy_from_slice(piece),
                }
                done += step as usize;
                if left > step {
                    let rest = PartFrom::Extent { id: extent, offset: offset + step };
                    room.push((rest, left - step));
                }
            }
            out.push(MemoryFile { path: path.clone(), base, parts });
        }
        Some(out)
    }

    /// The agent takes a rank's files over.
    pub(crate) fn keep(
        &mut self,
        id: AgentId,
        (key, slot, rank): (Key, SlotId, RankId),
        files: Vec<(MemoryFile, u64)>,
    ) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        let taken = p.memory.device.taken.remove(&(key, slot, rank)).unwrap_or_default();
        let mut kept: BTreeSet<ExtentId> = BTreeSet::new();
        let mut over = 0;
        for (file, bytes) in files {
            let mut all = Vec::new();
            let mut ids = Vec::new();
            for part in &file.parts {
                let (from, offset) = match part.from {
                    PartFrom::Extent { id, offset } => {
                        ids.push(id);
                        (p.memory.extents.get(&id), offset)
                    }
                    PartFrom::Filled { number, offset } => {
                        let Some(taken) = taken.get(&number) else { continue };
                        ids.extend(taken.extent);
                        let here = taken.extent.and_then(|e| p.memory.extents.get(&e));
                        (taken.stored.as_ref().or(here), offset)
                    }
                };
                let from =
                    from.and_then(|e| e.get(offset as usize..(offset + part.bytes) as usize));
                all.extend_from_slice(from.unwrap_or_default());
            }
            if let Some(base) = &file.base {
                let place = (base.key, slot, rank, base.path.clone());
                // None: it is gone, and this is no file.
                let Some(theirs) = p.memory.whole.get(&place) else { continue };
                all = merged(theirs, &all, &base.changed);
                over += 1;
                ids.extend(p.memory.files.get(&place).into_iter().flatten());
            }
            if all.len() as u64 == bytes {
                let place = (key, slot, rank, file.path);
                kept.extend(&ids);
                p.memory.whole.insert(place.clone(), all.clone());
                p.store.files.insert(place.clone(), all);
                p.memory.files.insert(place, ids);
            }
        }
        if over > 0 {
            self.note(|| format!("    rank {rank} of {key} has an increment"));
        }
        let Some(p) = self.agents.get_mut(&id) else { return };
        // What was handed over and is in no file is nobody's.
        let free = taken.values().filter_map(|t| t.extent).filter(|e| !kept.contains(e));
        let free: Vec<ExtentId> = free.collect();
        free.iter().for_each(|e| p.memory.forget_extent(*e));
        self.released(id, free);
        self.onto_device(id, kept.into_iter().collect());
    }

    /// Files are gone: what nobody has any more is told to core.
    pub(crate) fn forget_memory(&mut self, id: AgentId, gone: impl Fn(&FileId) -> bool) {
        let Some(p) = self.agents.get_mut(&id) else { return };
        let places: Vec<FileId> = p.memory.files.keys().filter(|f| gone(f)).cloned().collect();
        let mut freed: BTreeSet<ExtentId> = BTreeSet::new();
        for place in places {
            p.memory.whole.remove(&place);
            freed.extend(p.memory.files.remove(&place).unwrap_or_default());
        }
        let of = |w: &Whose| gone(&(w.0, w.1, w.2, String::new()));
        let whose: Vec<Whose> = p.memory.device.taken.keys().filter(|w| of(w)).copied().collect();
        for whose in whose {
            let taken = p.memory.device.taken.remove(&whose).unwrap_or_default();
            freed.extend(taken.values().filter_map(|t| t.extent));
        }
        freed.retain(|e| !p.memory.files.values().any(|ids| ids.contains(e)));
        freed.retain(|e| p.memory.is_taken(*e).is_none());
        freed.iter().for_each(|e| p.memory.forget_extent(*e));
        self.released(id, freed.into_iter().collect());
    }

    /// A rank's connection is gone: its process mostly too.
    pub(crate) fn conn_gone(&mut self, id: AgentId, conn: ConnId) {
        let exited = !self.rng.chance(100);
        if !exited {
            self.lingering.insert(conn);
        }
        self.agent_event(id, None, AgentEvent::RankGone { conn, exited });
    }
}
