//! Faults strike.

use crate::fault::What;
use crate::net::place_bit;
use crate::rng::Rng;
use crate::world::{Event, Peer, RUNNER_PLACE, World};
use stanchion_format::ids::{AgentId, Key, SlotId};
use stanchion_format::layout::Sets;

impl World {
    fn living(&self) -> Vec<AgentId> {
        self.agents.iter().filter(|(_, p)| p.alive).map(|(a, _)| *a).collect()
    }

    fn who(&self, n: u32) -> Option<AgentId> {
        let living = self.living();
        (!living.is_empty()).then(|| living[n as usize % living.len()])
    }

    /// Fault number `i` happens now.
    pub(crate) fn strike(&mut self, i: usize) {
        let what = self.sc.faults[i].what;
        self.note(|| format!("FAULT {i}: {what:?}"));
        match what {
            What::NetLoss(n) => self.net.0 = n,
            What::NetTwice(n) => self.net.1 = n,
            What::NetSlow(n) => self.net.2 = n,
            What::KillRank(n) => self.strike_rank(n),
            What::KillAllRanks => self.strike_ranks(),
            What::KillChild(n) => self.strike_child(n),
            What::KillAllRanksAnd(children) => {
                self.strike_ranks();
                if children {
                    self.strike_children();
                }
            }
            What::KillAgent(n) => {
                if let Some(a) = self.who(n) {
                    self.kill_agent(a);
                }
            }
            What::KillNode(n) => self.strike_nodes(&[n]),
            What::KillTwoNodes(a, b) => self.strike_nodes(&[a, b]),
            What::KillMembers(slot, count, apart) => self.strike_members(slot, count, apart),
            What::KillGroup(slot) => self.strike_group(slot),
            What::KillRunner => self.kill_runner(),
            What::KillRunnerAndNode(n) => {
                self.kill_runner();
                self.strike_nodes(&[n]);
            }
            What::FreezeAgent(n, ms) => {
                let until = self.now + ms * 1000;
                if let Some(p) = self.who(n).and_then(|a| self.agents.get_mut(&a)) {
                    p.frozen = p.frozen.max(until);
                }
            }
            What::FreezeRunner(ms) => {
                let until = self.now + ms * 1000;
                for p in self.ctrls.values_mut().filter(|p| p.alive && p.host.is_none()) {
                    p.frozen = p.frozen.max(until);
                }
            }
            What::Partition(mask, runner, ms) => {
                let mask = u64::from(mask) | if runner { place_bit(RUNNER_PLACE) } else { 0 };
                self.cuts.push((mask, self.now + ms * 1000));
            }
            What::ResetLink(a, b) => {
                if let (Some(a), Some(b)) = (self.who(a), self.who(b)) {
                    self.reset_link(a, b);
                }
            }
            What::ResetController(n) => self.strike_controller_link(n),
            What::DiskFull(n, ms) => {
                let until = self.now + ms * 1000;
                if let Some(p) = self.who(n).and_then(|a| self.agents.get_mut(&a)) {
                    p.store.full_until = until;
                }
            }
            What::PrefixBroken(ms) => self.prefix.broken_until = self.now + ms * 1000,
            What::RotPrefix => self.rot_prefix(i),
            What::RotData(n) | What::Truncate(n) | What::Remove(n) | What::Swap(n) => {
                self.rot_data(i, n);
            }
            What::RotParity(n) => self.rot_parity(i, n),
            // A job none of whose ranks calls any more is the user's to notice.
            What::RankHangs(_) if self.sc.app.ranks < 2 => {}
            What::RankHangs(_)
            | What::RankInvalid(_)
            | What::RankShort(_)
            | What::RankRejects(_) => self.armed.push(what),
        }
    }

    fn strike_nodes(&mut self, numbers: &[u32]) {
        let agents: Vec<AgentId> = numbers.iter().filter_map(|n| self.who(*n)).collect();
        self.strike_agents(&agents);
    }

    /// These nodes die.
    pub(crate) fn strike_agents(&mut self, agents: &[AgentId]) {
        for a in agents {
            let doomed = self.ranks_on(*a);
            self.kill_agent(*a);
            for (app, rank) in doomed {
                self.kill_rank(app, rank, 137);
            }
            self.children_of(*a).into_iter().for_each(|conn| self.child_dies(conn));
        }
    }

    /// Kills the first of the set of a slot that live, one now, the others one by one.
    fn strike_members(&mut self, slot: u32, count: u32, apart_ms: u64) {
        let Some(plan) = &self.judge.plan else { return };
        let slots = plan.slots.len() as u32;
        let sets = match plan.ledger.last() {
            Some(entry) => entry.info.sets.clone(),
            None => {
                let asked = self.sc.settings.redundancy();
                Sets::new(asked.scheme, slots, asked.set_size)
            }
        };
        if sets.slots != slots {
            return;
        }
        let members = sets.members(SlotId(slot % slots));
        let hosts: Vec<AgentId> = members.iter().map(|m| plan.slots[m.0 as usize]).collect();
        let living: Vec<AgentId> =
            hosts.into_iter().filter(|a| self.agents.get(a).is_some_and(|p| p.alive)).collect();
        let doomed = living.into_iter().take(count as usize);
        for (n, agent) in (0u64..).zip(doomed) {
            match n * apart_ms {
                0 => self.strike_agents(&[agent]),
                ms => self.push(ms * 1000, Event::NodeDies(agent)),
            }
        }
    }

    fn strike_group(&mut self, slot: u32) {
        let Some(plan) = &self.judge.plan else { return };
        let host = plan.slots[slot as usize % plan.slots.len()];
        let group = self.group_of(host);
        let doomed: Vec<AgentId> =
            self.living().into_iter().filter(|a| self.group_of(*a) == group).collect();
        self.strike_agents(&doomed);
    }

    /// The failure group of an agent's node; who is in none is one.
    pub(crate) fn group_of(&self, agent: AgentId) -> u32 {
        let place = self.agents.get(&agent).map_or(0, |p| p.place);
        self.sc.groups.get(place as usize).copied().unwrap_or(1000 + place)
    }

    fn strike_rank(&mut self, n: u32) {
        let Some(app) = self.apps.iter().rposition(|a| a.alive) else { return };
        let count = self.apps[app].ranks.len();
        self.kill_rank(app, n as usize % count, 137);
    }

    fn strike_ranks(&mut self) {
        if let Some(app) = self.apps.iter().rposition(|a| a.alive) {
            self.launcher_kills(app);
        }
    }

    fn strike_controller_link(&mut self, n: u32) {
        let Some(a) = self.who(n) else { return };
        let ctrl =
            self.ctrls.iter().find(|(_, p)| p.alive && p.linked.contains(&a)).map(|(c, _)| *c);
        if let Some(c) = ctrl {
            self.push(50, Event::Link { at: Peer::Ctrl(c), gone: Peer::Agent(a) });
        }
    }

    /// Damages a file that a manifest vouches for; before that nobody could know (FM-N2).
    fn rot_data(&mut self, i: usize, n: u32) {
        let what = self.sc.faults[i].what;
        let mut rng = Rng::new(self.sc.seed, 100 + i as u64);
        let restart = self.judge.plan.as_ref().and_then(|p| p.restart).map(|(k, _)| k);
        let verified = self.judge.verified.clone();
        let read = |k: Key, s: SlotId| restart == Some(k) && verified.contains(&(k, s));
        let Some(p) = self.who(n).and_then(|a| self.agents.get_mut(&a)) else { return };
        let vouched: Vec<_> = p
            .store
            .files
            .iter()
            .filter(|((k, s, ..), b)| p.store.published.contains_key(&(*k, *s)) && !b.is_empty())
            .filter(|((k, s, ..), _)| !read(*k, *s))
            .map(|(id, _)| id.clone())
            .collect();
        if vouched.is_empty() {
            return;
        }
        let id = vouched[rng.below(vouched.len() as u64) as usize].clone();
        let other = vouched[rng.below(vouched.len() as u64) as usize].clone();
        match what {
            What::Truncate(_) => {
                if let Some(bytes) = p.store.files.get_mut(&id) {
                    let half = bytes.len() / 2;
                    bytes.truncate(half);
                }
            }
            What::Remove(_) => {
                p.store.files.remove(&id);
            }
            What::Swap(_) if other != id => {
                let a = p.store.files.remove(&id);
                let b = p.store.files.remove(&other);
                p.store.files.extend(b.map(|b| (id.clone(), b)));
                p.store.files.extend(a.map(|a| (other.clone(), a)));
                self.rotten(other.0, other.1);
            }
            _ => {
                if let Some(bytes) = p.store.files.get_mut(&id) {
                    let at = rng.below(bytes.len() as u64) as usize;
                    bytes[at] ^= 1 << rng.below(8);
                }
            }
        }
        self.note(|| format!("damaged: {id:?}"));
        self.rotten(id.0, id.1);
    }

    fn rot_parity(&mut self, i: usize, n: u32) {
        let mut rng = Rng::new(self.sc.seed, 100 + i as u64);
        let Some(p) = self.who(n).and_then(|a| self.agents.get_mut(&a)) else { return };
        let places: Vec<_> = p.store.parity.keys().copied().collect();
        if places.is_empty() {
            return;
        }
        let place = rng.pick(&places);
        let Some(bytes) = p.store.parity.get_mut(&place).and_then(|f| f.values_mut().next()) else {
            return;
        };
        if bytes.is_empty() {
            return;
        }
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << rng.below(8);
        self.rotten(place.0, place.1);
    }

    fn rotten(&mut self, key: Key, slot: SlotId) {
        if let Some(p) = self.judge.promises.get_mut(&key) {
            p.rotten.insert(slot);
        }
    }

    fn rot_prefix(&mut self, i: usize) {
        let mut rng = Rng::new(self.sc.seed, 100 + i as u64);
        let paths: Vec<String> = self
            .prefix
            .files
            .iter()
            .filter(|(_, b)| !b.is_empty())
            .map(|(p, _)| p.clone())
            .collect();
        if paths.is_empty() {
            return;
        }
        let path = paths[rng.below(paths.len() as u64) as usize].clone();
        if let Some(bytes) = self.prefix.files.get_mut(&path) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << rng.below(8);
        }
        for (key, p) in &mut self.judge.promises {
            let slots = self.prefix.slots.range((*key, SlotId(0))..=(*key, SlotId(u32::MAX)));
            if slots.into_iter().any(|(_, m)| m.files.iter().any(|f| f.path == path)) {
                p.prefix_rot = true;
            }
        }
    }
}
