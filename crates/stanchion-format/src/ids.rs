//! Newtypes for everything that is numbered.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
        #[serde(transparent)]
        pub struct $name(pub $inner);
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// The identity of a line of runs that share a prefix; random, kept in the prefix.
    JobId(u64), "job"
);
id!(
    /// One agent process. Never used twice within a run: an agent that comes back is another one (FM-F2a).
    AgentId(u32), "agent"
);
id!(
    /// A node's place in the job. Ranks, redundancy sets and holdings belong to slots; agents occupy them.
    SlotId(u32), "slot"
);
id!(
    /// A process of the application, numbered as its launcher does.
    RankId(u32), "rank"
);
id!(
    /// The number of a dataset within a job; grows.
    DatasetNo(u64), "ds"
);
id!(
    /// A stripe of a redundancy set's code; see [`crate::layout`].
    StripeId(u64), "stripe"
);
id!(
    /// The right to decide, taken exclusively in the prefix (FM-S11). Higher fences lower.
    Epoch(u64), "epoch"
);
id!(
    /// A piece of an agent's shared memory. Never used twice by an agent.
    ExtentId(u64), "extent"
);
id!(
    /// Names a task that core asked the agent's threads to do.
    TaskId(u64), "task"
);

/// The state of the job between two restart decisions: the epoch of who decided and a count below it.
/// Ordered by age (FM-S1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Incarnation {
    /// The epoch under which the decision was made.
    pub epoch: Epoch,
    /// Decisions of this epoch so far.
    pub count: u32,
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch.0, self.count)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch.0, self.count)
    }
}

/// What a dataset is called by the machines; the job is implied by the connection or the prefix.
/// Ordered by number first, so that the newest dataset of one ancestry is the greatest key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Key {
    /// Number within the job.
    pub no: DatasetNo,
    /// The incarnation that wrote it.
    pub inc: Incarnation,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.no.0, self.inc)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.no.0, self.inc)
    }
}

/// Who speaks on a link.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum PeerId {
    /// Who decides on restarts: the runner, or an orphaned agent in its place.
    Controller,
    /// An agent.
    Agent(AgentId),
}

/// Which datasets an incarnation may use: everything of its own, and of each ancestor up to the dataset
/// that the job went on from (FM-S1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ancestry(pub Vec<(Incarnation, DatasetNo)>);

impl Ancestry {
    /// Is `key` of this line? `own` is the incarnation that asks.
    pub fn admits(&self, own: Incarnation, key: Key) -> bool {
        key.inc == own || self.0.iter().any(|(inc, last)| *inc == key.inc && key.no <= *last)
    }

    /// The ancestry of an incarnation that goes on from `from`, whose own ancestry is `self` and which
    /// was written by `from.inc`. Every entry is cut at `from.no`: what came later is another line.
    pub fn descend(&self, parent: Incarnation, from: Option<Key>) -> Ancestry {
        let Some(from) = from else { return Ancestry::default() };
        let mut line: Vec<(Incarnation, DatasetNo)> =
            self.0.iter().map(|(inc, last)| (*inc, (*last).min(from.no))).collect();
        if !line.iter().any(|(inc, _)| *inc == parent) {
            line.push((parent, from.no));
        }
        if !line.iter().any(|(inc, _)| *inc == from.inc) {
            line.push((from.inc, from.no));
        }
        line.sort();
        let excess = line.len().saturating_sub(crate::limits::ANCESTRY_ENTRIES_MAX);
        line.drain(..excess);
        Ancestry(line)
    }
}

/// A level of safety that a dataset has reached; see docs/failure-model.md, FM-L.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Survives the application's crash.
    Cached,
    /// Survives losses within the redundancy scheme.
    Protected,
    /// Survives everything but the loss of the prefix.
    Persistent,
}

impl Level {
    /// The word that users see.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Cached => "cached",
            Level::Protected => "protected",
            Level::Persistent => "persistent",
        }
    }
}
