//! Messages on their way: late, lost, twice, out of order, cut off.

use crate::fault::Moment;
use crate::world::{Event, Peer, RUNNER_PLACE, World};
use stanchion_core::api::{AgentEvent, ControllerEvent};
use stanchion_format::ids::{AgentId, PeerId};
use stanchion_format::peer::{Holdings, Msg, Record, Report};

/// The runner in the masks of partitions.
const RUNNER_BIT: u32 = 40;

/// A place in the masks of partitions; of many nodes only the first can be cut off.
pub(crate) fn place_bit(place: u32) -> u64 {
    match place {
        RUNNER_PLACE => 1 << RUNNER_BIT,
        node if node < RUNNER_BIT => 1 << node,
        _ => 0,
    }
}

impl World {
    /// Are two places cut off from each other now?
    pub fn cut(&self, a: u32, b: u32) -> bool {
        self.cuts.iter().any(|(mask, until)| {
            *until > self.now && (mask & place_bit(a) != 0) != (mask & place_bit(b) != 0)
        })
    }

    /// When the last cut between two places heals.
    fn healed(&self, a: u32, b: u32) -> u64 {
        self.cuts
            .iter()
            .filter(|(mask, _)| (mask & place_bit(a) != 0) != (mask & place_bit(b) != 0))
            .map(|(_, until)| *until)
            .max()
            .unwrap_or(0)
            .max(self.now)
    }

    /// A message leaves.
    pub fn send(&mut self, from: Peer, to: Peer, msg: Msg) {
        self.note_msg(from, to, &msg);
        match &msg {
            Msg::Record(_, _, Record::Commit(_)) => self.moment(Moment::Record),
            Msg::Announce(..) => self.moment(Moment::Announce),
            Msg::Report(_, _, Report::Level(..)) => self.moment(Moment::Level),
            _ => {}
        }
        if let (Peer::Agent(a), Peer::Agent(b)) = (from, to) {
            self.know_each_other(a, b);
        }
        let Some(here) = self.place(from) else { return };
        let Some(there) = self.place(to) else { return self.refuse(from, to) };
        let local = from == to || self.process(to) == self.process(from);
        let (loss, twice, slow) = self.net;
        let dropped = self.cut(here, there) || self.rng.chance(loss);
        if dropped && !local {
            return;
        }
        let copies = 1 + u32::from(self.rng.chance(twice) && !local);
        if let Some(at) = self.cost_sent(here, &msg) {
            let tie = self.rng.bits();
            return self.push_at(at, tie, Event::Msg { from, to, msg: Box::new(msg) });
        }
        let mut msg = Some(Box::new(msg));
        for left in (0..copies).rev() {
            let mut at = self.now + 20 + self.rng.below(self.sc.hop_us);
            if self.rng.chance(slow) && !local {
                at += self.rng.below(4_000_000);
            }
            if self.sc.fifo || local {
                let last = self.order.entry((from, to)).or_default();
                at = at.max(*last + 1);
                *last = at;
            }
            let tie = self.rng.bits();
            let this = if left > 0 { msg.clone() } else { msg.take() };
            let Some(msg) = this else { return };
            self.push_at(at, tie, Event::Msg { from, to, msg });
        }
    }

    /// Whoever of the two dies, the other has a connection to it that breaks.
    fn know_each_other(&mut self, a: AgentId, b: AgentId) {
        for (one, other) in [(a, b), (b, a)] {
            if let Some(p) = self.agents.get_mut(&one)
                && !p.peers.contains(&other)
            {
                p.peers.insert(other);
            }
        }
    }

    fn process(&self, peer: Peer) -> Peer {
        match peer {
            Peer::Ctrl(c) => {
                self.ctrls.get(&c).and_then(|p| p.host).map_or(Peer::Ctrl(c), Peer::Agent)
            }
            agent => agent,
        }
    }

    /// `to` is gone: `from` gets a reset, as soon as the way is free.
    pub fn refuse(&mut self, from: Peer, to: Peer) {
        let there = match to {
            Peer::Agent(a) => self.agents.get(&a).map(|p| p.place),
            Peer::Ctrl(c) => self.ctrls.get(&c).map(|p| p.place),
        };
        let (Some(here), Some(there)) = (self.place(from), there) else { return };
        let at = self.healed(here, there) + 50 + self.rng.below(self.sc.hop_us);
        let tie = self.rng.bits();
        self.push_at(at, tie, Event::Link { at: from, gone: to });
    }

    pub(crate) fn deliver(&mut self, from: Peer, to: Peer, msg: Msg) {
        match (from, to) {
            (Peer::Agent(a), Peer::Agent(b)) => {
                let event = AgentEvent::Message { from: PeerId::Agent(a), msg };
                self.agent_event(b, None, event);
            }
            (Peer::Ctrl(c), Peer::Agent(b)) => {
                let event = AgentEvent::Message { from: PeerId::Controller, msg };
                self.agent_event(b, Some(c), event);
            }
            (Peer::Agent(a), Peer::Ctrl(c)) => {
                if self.ctrls[&c].linked.contains(&a) {
                    self.ctrl_event(c, ControllerEvent::Message { from: a, msg });
                }
            }
            (Peer::Ctrl(_), Peer::Ctrl(_)) => {}
        }
    }

    /// A process learns that a connection is gone.
    pub(crate) fn link_gone(&mut self, at: Peer, gone: Peer) {
        match (at, gone) {
            (Peer::Agent(a), Peer::Agent(b)) => {
                self.agent_event(a, None, AgentEvent::LinkDown(PeerId::Agent(b)));
            }
            (Peer::Agent(a), Peer::Ctrl(c)) => {
                let Some(p) = self.agents.get_mut(&a) else { return };
                if !p.ctrls.contains(&c) {
                    return;
                }
                p.ctrls.retain(|x| *x != c);
                if p.ctrls.is_empty() {
                    self.agent_event(a, None, AgentEvent::LinkDown(PeerId::Controller));
                }
            }
            (Peer::Ctrl(c), Peer::Agent(b)) => self.ctrl_lost_agent(c, b),
            _ => {}
        }
    }

    /// A process died: whoever has a connection to it learns it.
    pub(crate) fn reset_links_of(&mut self, gone: Peer) {
        let mut others: Vec<Peer> = Vec::new();
        match gone {
            Peer::Agent(a) => {
                let peers = self.agents.get(&a).map(|p| p.peers.clone()).unwrap_or_default();
                let alive = |b: &AgentId| self.agents.get(b).is_some_and(|p| p.alive);
                others.extend(peers.into_iter().filter(alive).map(Peer::Agent));
                others.extend(
                    self.ctrls
                        .iter()
                        .filter(|(_, p)| p.alive && p.linked.contains(&a))
                        .map(|(c, _)| Peer::Ctrl(*c)),
                );
            }
            Peer::Ctrl(c) => others.extend(
                self.agents
                    .iter()
                    .filter(|(_, p)| p.alive && p.ctrls.contains(&c))
                    .map(|(a, _)| Peer::Agent(*a)),
            ),
        }
        for other in others {
            self.refuse(other, gone);
        }
    }

    /// A connection between two agents is reset: both learn it.
    pub(crate) fn reset_link(&mut self, a: AgentId, b: AgentId) {
        self.push(50, Event::Link { at: Peer::Agent(a), gone: Peer::Agent(b) });
        self.push(60, Event::Link { at: Peer::Agent(b), gone: Peer::Agent(a) });
    }

    fn note_msg(&mut self, from: Peer, to: Peer, msg: &Msg) {
        if self.trace.is_none() || matches!(msg, Msg::Ping(_) | Msg::Pong(_)) {
            return;
        }
        let mut text = match msg {
            Msg::Up(inc, id, c) => format!("Up({inc}, {id:?}, {} ranks, {:?})", c.ranks, c.trouble),
            Msg::Report(inc, n, report) => format!("Report({inc}, {n}, {})", brief(report)),
            Msg::Holdings(h) => holdings(h),
            Msg::ReportAck(..) => return,
            msg => format!("{msg:?}"),
        };
        if text.len() > 300 {
            text = text.chars().take(300).collect();
        }
        self.note(|| format!("  {} > {}  {text}", name(from), name(to)));
    }
}

/// A short name.
pub(crate) fn name(peer: Peer) -> String {
    match peer {
        Peer::Agent(a) => format!("a{}", a.0),
        Peer::Ctrl(c) => format!("c{c}"),
    }
}

fn brief(report: &Report) -> String {
    match report {
        Report::Began(info) => format!("Began({})", info.key),
        Report::Committed(info, _) => format!("Committed({})", info.key),
        Report::Level(key, level, _) => format!("Level({key}, {level:?})"),
        other => format!("{other:?}"),
    }
}

fn holdings(h: &Holdings) -> String {
    let datasets: Vec<String> = h
        .datasets
        .iter()
        .map(|d| {
            let slots: Vec<String> = d
                .slots
                .iter()
                .map(|s| format!("{}:{}{}", s.slot, u8::from(s.data), u8::from(s.parity)))
                .collect();
            format!("{} cert {} {:?} [{}]", d.info.key, d.certified, d.levels, slots.join(" "))
        })
        .collect();
    format!("Holdings({}.{} inc {}; {})", h.epoch, h.round, h.inc, datasets.join("; "))
}
