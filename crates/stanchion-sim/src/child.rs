//! Children of ranks that copy what their ranks had behind them, one piece after the other.

use crate::app::State;
use crate::fault::Moment;
use crate::memory::Copy;
use crate::world::{Event, World};
use stanchion_core::api::ConnId;
use stanchion_format::client::{Answer, Own, Request};
use stanchion_format::ids::{AgentId, ExtentId, RankId};
use std::collections::VecDeque;

/// How far a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// Its connection is there, it is not.
    Attaching,
    /// It copies; told to end, it does so after the piece it is at.
    Copying {
        told: bool,
    },
    Dead,
}

/// A child, or a connection that one will have.
#[derive(Debug)]
pub struct Child {
    app: usize,
    rank: usize,
    agent: AgentId,
    pieces: VecDeque<Copy>,
    life: Life,
}

impl Child {
    /// Is there a process?
    pub fn lives(&self) -> bool {
        matches!(self.life, Life::Copying { .. })
    }
}

impl World {
    /// A rank makes the second connection for the child that will copy `pieces`.
    pub(crate) fn rank_attaches(&mut self, app: usize, rank: usize, own: Own, pieces: Vec<Copy>) {
        self.connections += 1;
        let conn = ConnId(self.connections);
        let r = self.rank(app, rank);
        (r.said, r.state) = (Some(own), State::Attach);
        let agent = r.agent;
        let pieces = pieces.into();
        self.children.insert(conn, Child { app, rank, agent, pieces, life: Life::Attaching });
        let delay = 10 + self.rng.below(500);
        let request = Request::Attach { rank: RankId(rank as u32), thread: false };
        self.push(delay, Event::Request(agent, conn, Box::new(request)));
    }

    /// The agent knows the connection: the rank forks. Or it does not want it: the rank copies at once.
    pub(crate) fn child_answered(&mut self, conn: ConnId, answer: Answer) {
        let Some(child) = self.children.get(&conn) else { return };
        let (app, rank, agent, life) = (child.app, child.rank, child.agent, child.life);
        let r = self.rank(app, rank);
        if life != Life::Attaching || !r.alive || r.state != State::Attach {
            return;
        }
        let Some(mut own) = r.said.take() else { return };
        let forks = answer == Answer::Ok && !self.rng.chance(30);
        if !forks {
            while self.copy_piece(conn) {}
            self.child_dies(conn);
            return self.rank_declares(app, rank, own);
        }
        own.child = true;
        let ids: Vec<ExtentId> =
            self.children[&conn].pieces.iter().map(|(extent, ..)| *extent).collect();
        for id in ids {
            if let Some(p) = self.agents.get_mut(&agent) {
                p.memory.mapped.entry(id).or_default().insert(conn);
            }
        }
        self.note(|| format!("rank {rank} has child {conn:?}"));
        if let Some(child) = self.children.get_mut(&conn) {
            child.life = Life::Copying { told: false };
        }
        self.next_piece(conn);
        self.moment(Moment::Fill);
        self.rank_declares(app, rank, own);
    }

    fn next_piece(&mut self, conn: ConnId) {
        let most = self.rng.pick(&[300, 3_000, 40_000, 400_000, 2_000_000]);
        let delay = 10 + self.rng.below(most);
        self.push(delay, Event::Child(conn));
    }

    /// A piece is copied, or all were.
    pub(crate) fn child_goes_on(&mut self, conn: ConnId) {
        let Some(child) = self.children.get(&conn) else { return };
        let (Life::Copying { told }, agent) = (child.life, child.agent) else { return };
        let more = self.copy_piece(conn);
        if self.violation.is_some() {
            return;
        }
        if told {
            return self.child_dies(conn);
        }
        if more {
            return self.next_piece(conn);
        }
        self.push(5, Event::Request(agent, conn, Box::new(Request::Copied)));
        self.child_dies(conn);
    }

    fn copy_piece(&mut self, conn: ConnId) -> bool {
        let Some(child) = self.children.get_mut(&conn) else { return false };
        let (agent, Some((extent, from, bytes))) = (child.agent, child.pieces.pop_front()) else {
            return false;
        };
        let lives = child.lives();
        self.nobodys(agent, extent, "is written to");
        let Some(p) = self.agents.get_mut(&agent).filter(|p| p.alive) else { return false };
        let free = lives && p.agent.pool_spare(extent);
        match p.memory.extents.get_mut(&extent) {
            Some(place) if !free => place[from..from + bytes.len()].copy_from_slice(&bytes),
            _ => {
                let text = format!("{conn:?} writes to extent {extent}, which is nobody's");
                self.violate("FM-P3", text);
            }
        }
        true
    }

    /// FM-P10: no child that lives may write to it.
    pub(crate) fn no_childs(&mut self, id: AgentId, extent: ExtentId, what: &str) {
        let writes = |c: &Child| c.agent == id && c.pieces.iter().any(|(e, ..)| *e == extent);
        let whose = self.children.iter().find(|(_, c)| c.lives() && writes(c)).map(|(c, _)| *c);
        if let Some(conn) = whose {
            self.violate("FM-P10", format!("extent {extent} of {conn:?} {what} on agent {id}"));
        }
    }

    /// It ends, whatever of.
    pub(crate) fn child_dies(&mut self, conn: ConnId) {
        let Some(child) = self.children.get_mut(&conn) else { return };
        if child.life == Life::Dead {
            return;
        }
        child.life = Life::Dead;
        let agent = child.agent;
        // Behind what it said last.
        let delay = 20 + self.rng.below(300);
        self.push(delay, Event::ChildGone(agent, conn));
    }

    /// Its agent hangs up.
    pub(crate) fn child_told_to_end(&mut self, conn: ConnId) {
        match self.children.get_mut(&conn) {
            Some(child) if child.lives() => child.life = Life::Copying { told: true },
            _ => self.child_dies(conn),
        }
    }

    /// Children and what may become one on an agent's node.
    pub(crate) fn children_of(&self, agent: AgentId) -> Vec<ConnId> {
        let mine = |c: &Child| c.agent == agent && c.life != Life::Dead;
        self.children.iter().filter(|(_, c)| mine(c)).map(|(conn, _)| *conn).collect()
    }

    /// A rank ends its children: their dataset is dropped.
    pub(crate) fn children_stop(&mut self, app: usize, rank: usize) {
        let mine = |c: &Child| (c.app, c.rank) == (app, rank) && c.life != Life::Dead;
        let conns: Vec<_> =
            self.children.iter().filter(|(_, c)| mine(c)).map(|(conn, _)| *conn).collect();
        conns.into_iter().for_each(|conn| self.child_dies(conn));
    }

    /// A rank is gone: what it had only connected for a child is closed with it.
    pub(crate) fn rank_leaves_children(&mut self, app: usize, rank: usize) {
        let mine = |c: &Child| (c.app, c.rank) == (app, rank) && c.life == Life::Attaching;
        let conns: Vec<_> =
            self.children.iter().filter(|(_, c)| mine(c)).map(|(conn, _)| *conn).collect();
        conns.into_iter().for_each(|conn| self.child_dies(conn));
    }

    pub(crate) fn strike_child(&mut self, n: u32) {
        let living: Vec<ConnId> =
            self.children.iter().filter(|(_, c)| c.lives()).map(|(conn, _)| *conn).collect();
        if !living.is_empty() {
            self.child_dies(living[n as usize % living.len()]);
        }
    }

    pub(crate) fn strike_children(&mut self) {
        let all: Vec<ConnId> = self.children.keys().copied().collect();
        all.into_iter().for_each(|conn| self.child_dies(conn));
    }
}
