//! Datasets that are copied behind the application: by children of its ranks (FM-P8 to FM-P10).
//!
//! A child is a connection: attached before it is forked, bound to a dataset when its rank asks for the snapshot, over
//! when the connection is gone, and with it the child and all it had mapped. Until then nobody else gets what it may
//! write to, whatever becomes of its rank and of the dataset. A thread of the rank that copies is a child here: its
//! connection is gone when it has written its last.

use super::{Agent, Phase, TaskFor};
use crate::api::{AgentAction, ConnId, Millis, TaskResult, Work};
use crate::bugs::Bug;
use stanchion_format::client::{Answer, Code, MemoryFile, Request};
use stanchion_format::ids::{ExtentId, Key, RankId, SlotId};
use stanchion_format::peer::{Cause, CollId, Times, Trouble};
use std::collections::BTreeMap;

/// What a child does for a dataset.
#[derive(Debug)]
struct Bound {
    key: Key,
    /// The files that it copies; none if the rank does not rely on it.
    files: Option<Vec<(MemoryFile, u64)>>,
    /// Extents of those files.
    used: Vec<ExtentId>,
    /// All extents that it may write to.
    extents: Vec<ExtentId>,
}

/// A child of a rank.
#[derive(Debug)]
struct Child {
    rank: RankId,
    slot: SlotId,
    /// The connection of its rank.
    parent: ConnId,
    since: Millis,
    copied: bool,
    /// Its connection is gone.
    gone: bool,
    bound: Option<Bound>,
}

/// A dataset that all ranks have asked a snapshot for, and that is not committed yet.
#[derive(Debug)]
struct Filling {
    key: Key,
    /// Files are looked at: how many tasks are under way.
    stats: Option<usize>,
    voted: bool,
}

/// This agent's children and what they fill.
#[derive(Debug, Default)]
pub(super) struct Fill {
    children: BTreeMap<ConnId, Child>,
    /// Ranks that are gone and have left children; had their processes ended?
    left: BTreeMap<ConnId, bool>,
    filling: Option<Filling>,
}

impl Fill {
    pub(super) fn is_child(&self, conn: ConnId) -> bool {
        self.children.contains_key(&conn)
    }

    /// The ranks or the incarnation are over: nothing is committed any more. Children live as long as they do.
    pub(super) fn stop(&mut self) {
        self.filling = None;
    }

    /// The dataset is committed or dropped.
    pub(super) fn close(&mut self, key: Key) {
        if self.filling.as_ref().is_some_and(|f| f.key == key) {
            self.filling = None;
        }
    }

    fn unbound(&self, parent: ConnId) -> Option<ConnId> {
        let mine = |c: &Child| c.parent == parent && c.bound.is_none();
        self.children.iter().rev().find(|(_, c)| mine(c)).map(|(conn, _)| *conn)
    }

    fn has_living(&self, parent: ConnId) -> bool {
        self.children.values().any(|c| c.parent == parent && !c.gone)
    }
}

/// What is known of a rank's child when the rank has said what is in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attached {
    /// There is none, or it is of no concern any more.
    None,
    /// It is there.
    Living(ConnId),
    /// It is gone; had it copied all?
    Gone(bool),
}

impl Agent {
    pub(super) fn on_attach(&mut self, conn: ConnId, rank: RankId) {
        if self.phase != Phase::Open || self.orphan.orphaned() {
            self.fail(conn, Code::Closing, "the job is being restored or winds down".into());
            return;
        }
        let Some((parent, slot)) = self.ranks.living(rank) else {
            self.fail(conn, Code::State, format!("rank {rank} is not here: it has no children"));
            return;
        };
        if self.fill.is_child(conn) || self.ranks.behind(conn).is_some() {
            self.fail(conn, Code::Protocol, "this connection is known already".into());
            return;
        }
        let since = self.now.mono;
        // One that ended before its rank relied on it.
        self.fill.children.retain(|_, c| c.parent != parent || !c.gone || c.bound.is_some());
        let (copied, gone, bound) = (false, false, None);
        let child = Child { rank, slot, parent, since, copied, gone, bound };
        self.fill.children.insert(conn, child);
        self.answer(conn, Answer::Ok);
    }

    pub(super) fn on_child_request(&mut self, conn: ConnId, request: Request) {
        match (request, self.fill.children.get_mut(&conn)) {
            (Request::Copied, Some(child)) => {
                child.copied = true;
                self.answer(conn, Answer::Ok);
            }
            _ => self.fail(conn, Code::Protocol, "a child says that it has copied".into()),
        }
    }

    /// The child that a rank has attached for what it is declaring.
    pub(super) fn attached(&mut self, parent: ConnId) -> Attached {
        let Some(conn) = self.fill.unbound(parent) else { return Attached::None };
        let child = &self.fill.children[&conn];
        if !child.gone {
            return Attached::Living(conn);
        }
        let copied = child.copied;
        self.fill.children.remove(&conn);
        Attached::Gone(copied)
    }

    /// From now on a living child's end decides what becomes of `extents`, and of `files` if it copies them.
    pub(super) fn bind_child(
        &mut self,
        conn: ConnId,
        key: Key,
        files: Option<Vec<(MemoryFile, u64)>>,
        used: Vec<ExtentId>,
        extents: Vec<ExtentId>,
    ) {
        if let Some(child) = self.fill.children.get_mut(&conn) {
            child.bound = Some(Bound { key, files, used, extents });
        }
    }

    /// A connection is gone, and the memory of who held it comes back if it was the last that may write to it.
    pub(super) fn memory_gone(&mut self, conn: ConnId, exited: bool) {
        let Some(child) = self.fill.children.get_mut(&conn) else {
            if self.bug(Bug::FreeChild) {
                self.free_of_children(conn);
            } else if self.fill.has_living(conn) {
                // FM-P10
                self.fill.left.insert(conn, exited);
                self.pool.hung_up(conn);
                return;
            }
            self.fill.children.retain(|_, c| c.parent != conn || c.bound.is_some() || !c.gone);
            self.lend_gone(conn, exited);
            return;
        };
        child.gone = true;
        let (parent, bound) = (child.parent, child.bound.is_some());
        if bound {
            self.child_over(conn, exited);
        }
        if !self.fill.has_living(parent)
            && let Some(parent_exited) = self.fill.left.remove(&parent)
        {
            self.fill.children.retain(|_, c| c.parent != parent);
            self.lend_gone(parent, parent_exited && exited);
        }
        self.advance_fill();
    }

    fn free_of_children(&mut self, parent: ConnId) {
        let bound = self.fill.children.values().filter(|c| c.parent == parent);
        let ids: Vec<ExtentId> =
            bound.filter_map(|c| c.bound.as_ref()).flat_map(|b| b.extents.clone()).collect();
        self.lend_released(&ids);
    }

    /// A child is gone, and nothing maps any more what only it had.
    fn child_over(&mut self, conn: ConnId, exited: bool) {
        let Some(child) = self.fill.children.remove(&conn) else { return };
        let Some(bound) = child.bound else { return };
        let (rank, slot) = (child.rank, child.slot);
        if !exited {
            self.pool.strange(&bound.extents);
        }
        let mut free = bound.extents;
        if let Some(dataset) = self.datasets.get_mut(&bound.key).filter(|d| !d.certified)
            && let Some(files) = bound.files
        {
            let took = self.now.mono.since(child.since).saturating_mul(1000);
            dataset.times.copy_us = dataset.times.copy_us.max(took);
            if child.copied {
                free.retain(|id| !bound.used.contains(id));
                self.out.push(AgentAction::Keep { key: bound.key, slot, rank, files });
            } else {
                // FM-P8
                let trouble = Trouble::new(Cause::ChildDied).rank(rank).slot(slot);
                dataset.trouble.get_or_insert(trouble);
            }
        }
        // After `Keep`: what is lent next must not be what it refers to.
        self.lend_released(&free);
    }

    /// All ranks have asked for the snapshot: the dataset is being filled.
    pub(super) fn start_filling(&mut self) {
        let Some(key) = self.ranks.open_dataset() else { return };
        self.ranks.close_dataset();
        self.fill.filling = Some(Filling { key, stats: None, voted: false });
        // Its deadline runs.
        self.coll(CollId::Filled(key));
    }

    /// Is this agent's part of the dataset copied, and is it there (FM-P9, FM-S2)?
    pub(super) fn advance_fill(&mut self) {
        let Some(filling) = self.fill.filling.as_ref().filter(|f| !f.voted) else { return };
        let (key, stats) = (filling.key, filling.stats);
        let Some(dataset) = self.datasets.get(&key) else { return };
        if let Some(trouble) = dataset.trouble.clone() {
            self.vote_filled(key, Some(trouble));
            return;
        }
        let copies =
            |c: &Child| c.bound.as_ref().is_some_and(|b| b.key == key && b.files.is_some());
        let busy = self.fill.children.values().any(copies);
        if self.bug(Bug::CommitUnfilled) {
            let parts = self.datasets.get_mut(&key).into_iter().flat_map(|d| d.slots.values_mut());
            parts.for_each(|part| part.data = true);
            self.vote_filled(key, None);
            return;
        }
        match stats {
            _ if busy => {}
            None => {
                let files = self.files_to_look_at(key);
                if let Some(filling) = &mut self.fill.filling {
                    filling.stats = Some(files.len());
                }
                if files.is_empty() {
                    self.vote_filled(key, None);
                }
                for (slot, files) in files {
                    self.run(TaskFor::FillStat(key, slot), Work::Stat { key, slot, files });
                }
            }
            Some(0) => self.vote_filled(key, None),
            Some(_) => {}
        }
    }

    /// Ranks of this agent whose children still copy it.
    pub(super) fn copying(&self, key: Key) -> Vec<RankId> {
        let children = self.fill.children.values();
        let bound = |c: &&Child| c.bound.as_ref().is_some_and(|b| b.key == key);
        children.filter(bound).map(|c| c.rank).collect()
    }

    pub(super) fn on_fill_stat(&mut self, key: Key, slot: SlotId, result: TaskResult) {
        let Some(dataset) = self.datasets.get_mut(&key) else { return };
        match result {
            TaskResult::Done(_) => dataset.slots.entry(slot).or_default().data = true,
            other => {
                let trouble = Self::trouble_of(other).slot(slot);
                dataset.trouble.get_or_insert(trouble);
            }
        }
        if let Some(filling) = self.fill.filling.as_mut().filter(|f| f.key == key) {
            filling.stats = filling.stats.map(|n| n.saturating_sub(1));
        }
        self.advance_fill();
    }

    fn vote_filled(&mut self, key: Key, trouble: Option<Trouble>) {
        if let Some(filling) = &mut self.fill.filling {
            filling.voted = true;
        }
        let copy_us = self.datasets.get(&key).map_or(0, |d| d.times.copy_us);
        let coll = self.coll(CollId::Filled(key));
        coll.own.trouble = trouble;
        coll.own.times = Times { copy_us, ..Times::default() };
        coll.own_done = true;
        self.advance(CollId::Filled(key));
    }
}
