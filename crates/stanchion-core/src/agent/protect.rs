//! Behind the application: digests, the exchange of manifests within a set, parity.

use super::{Agent, Phase, RESEND_MS, SOURCE_RETRY_MS, SOURCE_TRIES_MAX, TASK_WINDOW, TaskFor};
use crate::api::{AgentAction, ChunkSource, Millis, TaskResult, Work};
use crate::bugs::Bug;
use crate::stripe::{Term, parity_terms};
use stanchion_format::data::Piece;
use stanchion_format::ids::{AgentId, Key, Level, SlotId, StripeId};
use stanchion_format::manifest::Manifest;
use stanchion_format::peer::{Cause, CollId, Msg, Severity, Trouble};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Is a trouble worth another try? Then its cause may go away by itself.
pub(super) fn passing(cause: Cause) -> bool {
    matches!(cause, Cause::Unreachable | Cause::Missing | Cause::Damaged | Cause::Timeout)
}

impl Agent {
    /// Moves every dataset that is committed and not protected one step on.
    pub(super) fn tick_protect(&mut self) {
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let keys: Vec<Key> = self
            .datasets
            .iter()
            .filter(|(_, d)| d.protect_since.is_some() && !d.protect_voted)
            .map(|(k, _)| *k)
            .collect();
        for key in keys {
            self.protect(key);
        }
        self.send_manifests();
    }

    fn protect(&mut self, key: Key) {
        let mut done = true;
        for slot in self.my_slots() {
            done &= self.protect_slot(key, slot);
            if self.datasets.get(&key).is_none_or(|d| d.protect_voted) {
                return;
            }
        }
        // In front of the vote: who evicts a predecessor because of it does so after that was queued.
        self.remember(key);
        let limit = self.settings().number("protect_timeout_ms");
        let now = self.now.mono;
        let Some(dataset) = self.datasets.get(&key) else { return };
        let late = dataset.protect_since.is_some_and(|since| now.since(since) > limit);
        if done {
            self.vote_protect(key, None);
        } else if late {
            self.vote_protect(key, Some(Trouble::new(Cause::Timeout).agent(self.cfg.id)));
        }
    }

    /// Has this slot all it must have? Starts what is missing.
    fn protect_slot(&mut self, key: Key, slot: SlotId) -> bool {
        let (inc, bugs) = (self.incarnation(), self.cfg.bugs);
        let Some(dataset) = self.datasets.get_mut(&key) else { return false };
        if !dataset.manifests.contains_key(&slot) {
            self.digest(key, slot);
            return false;
        }
        let before = bugs.on(Bug::SkipReprotect) && key.inc < inc;
        if !dataset.info.sets.redundant(slot) || before {
            return true;
        }
        let Some(counts) = dataset.counts(slot) else { return false };
        self.encode(key, slot, &counts);
        let me = self.cfg.id;
        let members: Vec<AgentId> = self.set_agents(key, slot);
        let Some(dataset) = self.datasets.get(&key) else { return false };
        let Some(part) = dataset.slots.get(&slot) else { return false };
        part.parity_done && members.iter().all(|a| *a == me || part.manifest_acks.contains(a))
    }

    /// The agents that host the set of `slot`.
    fn set_agents(&self, key: Key, slot: SlotId) -> Vec<AgentId> {
        let Some(dataset) = self.datasets.get(&key) else { return Vec::new() };
        let mut agents: Vec<AgentId> =
            dataset.info.sets.members(slot).into_iter().filter_map(|m| self.host_of(m)).collect();
        agents.sort();
        agents.dedup();
        agents
    }

    /// Starts reading a slot's files once, to checksum them.
    pub(super) fn digest(&mut self, key: Key, slot: SlotId) {
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        let chunk_bytes = dataset.info.chunk_bytes;
        let part = dataset.slots.entry(slot).or_default();
        if part.digesting || !part.data {
            return;
        }
        part.digesting = true;
        let files = part.declared.clone().unwrap_or_default();
        self.run(TaskFor::Digest(key, slot), Work::Digest { key, slot, chunk_bytes, files });
    }

    pub(super) fn on_digested(&mut self, key: Key, slot: SlotId, result: TaskResult) {
        if let Some(part) = self.datasets.get_mut(&key).and_then(|d| d.slots.get_mut(&slot)) {
            part.digesting = false;
        }
        match result {
            TaskResult::Digested(manifest, times) => {
                if let Some(dataset) = self.datasets.get_mut(&key) {
                    dataset.times = dataset.times.max(times);
                }
                self.own_manifest(Arc::new(*manifest));
                if self.phase == Phase::Restoring {
                    self.restored_slot(key, slot);
                } else {
                    self.tick_protect();
                    self.tick_flush();
                }
            }
            other => {
                let trouble = Self::trouble_of(other).slot(slot);
                if self.phase == Phase::Restoring {
                    self.restore_failed(key, trouble);
                } else {
                    self.vote_protect(key, Some(trouble));
                }
            }
        }
    }

    /// This manifest vouches for a slot of mine from now on.
    pub(super) fn own_manifest(&mut self, manifest: Arc<Manifest>) {
        let (key, slot) = (manifest.key, manifest.slot);
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        dataset.manifests.insert(slot, manifest.clone());
        let part = dataset.slots.entry(slot).or_default();
        part.data = true;
        part.manifest_acks.clear();
        part.manifest_sent = None;
        self.out.push(AgentAction::Publish(manifest));
    }

    /// Sends my manifests to the members of their sets until all have acknowledged them.
    fn send_manifests(&mut self) {
        let now = self.now.mono;
        let me = self.cfg.id;
        let inc = self.incarnation();
        let mut sends: Vec<(AgentId, Arc<Manifest>)> = Vec::new();
        for slot in self.my_slots() {
            let keys: Vec<Key> = self
                .datasets
                .iter()
                .filter(|(_, d)| d.protect_since.is_some() && d.info.sets.redundant(slot))
                .map(|(k, _)| *k)
                .collect();
            for key in keys {
                let agents = self.set_agents(key, slot);
                let Some(dataset) = self.datasets.get_mut(&key) else { continue };
                let Some(manifest) = dataset.manifests.get(&slot).cloned() else { continue };
                let Some(part) = dataset.slots.get_mut(&slot) else { continue };
                let missing: Vec<AgentId> = agents
                    .into_iter()
                    .filter(|a| *a != me && !part.manifest_acks.contains(a))
                    .collect();
                let due = part.manifest_sent.is_none_or(|at| now.since(at) >= RESEND_MS);
                if due && !missing.is_empty() {
                    part.manifest_sent = Some(now);
                    sends.extend(missing.into_iter().map(|a| (a, manifest.clone())));
                }
            }
        }
        for (to, manifest) in sends {
            self.send_agent(to, Msg::Manifest(inc, Box::new((*manifest).clone())));
        }
    }

    pub(super) fn on_manifest(&mut self, from: AgentId, manifest: Manifest) {
        let (key, slot) = (manifest.key, manifest.slot);
        if manifest.check().is_err() {
            self.log(
                Severity::Warn,
                format!("agent {from} sent a malformed manifest of dataset {key}"),
            );
            return;
        }
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        if !dataset.certified {
            // Its record has not come yet; the sender repeats.
            return;
        }
        let fresh = !dataset.manifests.contains_key(&slot);
        if fresh {
            dataset.manifests.insert(slot, Arc::new(manifest));
        }
        let inc = self.incarnation();
        self.send_agent(from, Msg::ManifestStored(inc, key, slot));
        if fresh {
            if self.phase == Phase::Restoring {
                self.tick_restore();
            } else {
                self.tick_protect();
            }
        }
    }

    pub(super) fn on_manifest_stored(&mut self, from: AgentId, key: Key, slot: SlotId) {
        if let Some(part) = self.datasets.get_mut(&key).and_then(|d| d.slots.get_mut(&slot)) {
            part.manifest_acks.insert(from);
        }
        self.tick_protect();
    }

    pub(super) fn on_manifest_wanted(&mut self, from: AgentId, key: Key) {
        let inc = self.incarnation();
        let manifests: Vec<Arc<Manifest>> = self
            .datasets
            .get(&key)
            .map_or_else(Vec::new, |d| d.manifests.values().cloned().collect());
        for manifest in manifests {
            self.send_agent(from, Msg::Manifest(inc, Box::new((*manifest).clone())));
        }
    }

    /// Starts encodes of stripes that `slot` keeps, within the window.
    fn encode(&mut self, key: Key, slot: SlotId, counts: &BTreeMap<SlotId, u64>) {
        let (now, bugs) = (self.now.mono, self.cfg.bugs);
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        let sets = dataset.info.sets.clone();
        let held = sets.held(slot, |s| counts.get(&s).copied().unwrap_or(0));
        let part = dataset.slots.entry(slot).or_default();
        if part.parity_done {
            return;
        }
        let early = bugs.on(Bug::ParityDoneEarly) && !part.parity.is_empty();
        if early || held.iter().all(|t| part.parity.contains(t)) {
            part.parity_done = true;
            return;
        }
        let mut running = part.encoding.values().filter(|e| e.2).count();
        let mut start = Vec::new();
        for stripe in held {
            if running >= TASK_WINDOW {
                break;
            }
            if part.parity.contains(&stripe) {
                continue;
            }
            let entry = part.encoding.entry(stripe).or_insert((0, Millis(0), false));
            if entry.2 || entry.1 > now {
                continue;
            }
            entry.2 = true;
            running += 1;
            start.push(stripe);
        }
        for stripe in start {
            self.start_encode(key, slot, stripe, counts);
        }
    }

    fn start_encode(
        &mut self,
        key: Key,
        slot: SlotId,
        stripe: StripeId,
        counts: &BTreeMap<SlotId, u64>,
    ) {
        let Some(dataset) = self.datasets.get(&key) else { return };
        let sets = dataset.info.sets.clone();
        let chunks = |s| counts.get(&s).copied().unwrap_or(0);
        let terms = parity_terms(&sets, slot, stripe, chunks, self.cfg.bugs);
        let sources: Vec<ChunkSource> =
            terms.into_iter().filter_map(|term| self.data_source(key, term)).collect();
        let len = sources.iter().map(|s| s.len).max().unwrap_or(0);
        let work = Work::Encode {
            key,
            slot,
            stripe,
            index: match self.bug(Bug::OneIndex) {
                true => stripe.0 / sets.members(slot).len() as u64,
                false => sets.parity_index(slot, stripe),
            },
            len,
            chunk_bytes: dataset.info.chunk_bytes,
            sources,
        };
        self.run(TaskFor::Encode(key, slot, stripe), work);
    }

    /// Where a member's chunk is to be had, and what it must be.
    pub(super) fn data_source(&self, key: Key, term: Term) -> Option<ChunkSource> {
        let Term { slot, piece, factor } = term;
        let Piece::Data(chunk) = piece else { return None };
        let at = self.datasets.get(&key)?.manifests.get(&slot)?.chunk(chunk)?;
        let agent = self.host_of(slot)?;
        Some(ChunkSource { slot, agent, piece, len: at.len, crc: Some(at.crc), factor })
    }

    pub(super) fn on_encoded(
        &mut self,
        key: Key,
        slot: SlotId,
        stripe: StripeId,
        result: TaskResult,
    ) {
        let now = self.now.mono;
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        let Some(part) = dataset.slots.get_mut(&slot) else { return };
        match result {
            TaskResult::Done(times) => {
                part.encoding.remove(&stripe);
                part.parity.insert(stripe);
                dataset.times.transfer_us += times.transfer_us;
                dataset.times.encode_us += times.encode_us;
                self.tick_protect();
            }
            other => {
                let trouble = Self::trouble_of(other);
                let entry = part.encoding.entry(stripe).or_insert((0, now, false));
                entry.2 = false;
                entry.0 += 1;
                entry.1 = now.after(SOURCE_RETRY_MS);
                let hopeless = entry.0 >= SOURCE_TRIES_MAX || !passing(trouble.cause);
                if hopeless {
                    self.vote_protect(key, Some(trouble));
                }
            }
        }
    }

    /// My part of "is it protected?"; once in an incarnation.
    fn vote_protect(&mut self, key: Key, trouble: Option<Trouble>) {
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        if dataset.protect_voted || dataset.protect_since.is_none() {
            return;
        }
        dataset.protect_voted = true;
        let times = dataset.times;
        let id = CollId::Protect(key);
        let coll = self.coll(id);
        // Who waits for this one's manifest would wait until `protect_timeout_ms`.
        coll.urgent = trouble.clone();
        coll.own.trouble = trouble;
        coll.own.times = times;
        coll.own_done = true;
        self.advance(id);
    }

    /// The restart dataset must be protected anew where a loss degraded it (FM-L5).
    pub(super) fn protect_restored(&mut self) {
        let now = self.now.mono;
        let keys = self.view.as_ref().map_or_else(Vec::new, |v| {
            let mut keys = v.plan.restore.clone();
            keys.extend(v.plan.restart.map(|(k, _)| k));
            keys
        });
        for key in keys {
            if let Some(dataset) = self.datasets.get_mut(&key)
                && !dataset.levels.contains(&Level::Protected)
            {
                dataset.protect_since.get_or_insert(now);
            }
        }
        self.tick_protect();
    }
}
