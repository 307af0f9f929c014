//! Whole clusters in one thread: the real [`stanchion_core`] agents and controllers on a virtual clock,
//! with a network, devices, a prefix and an application that fail as the seed says, and a judge that
//! knows docs/failure-model.md.
//!
//! A history is a function of its seed, its faults and the commit. [`check`] runs one; [`shrink::shrink`]
//! finds the shortest list of faults that still breaks the same rule.

pub mod agents;
pub mod app;
mod checks;
pub mod child;
pub mod cost;
pub mod ctrl;
pub mod fault;
pub mod hunt;
pub mod judge;
pub mod memory;
pub mod net;
pub mod prefix;
pub mod rng;
pub mod scenario;
pub mod shrink;
pub mod store;
pub mod stores;
mod strike;
pub mod work;
pub mod world;

use scenario::Scenario;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use world::{Violation, World};

thread_local! {
    static IN_CORE: Cell<bool> = const { Cell::new(false) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps panics of core for the history's report instead of printing them.
pub fn quiet_panics() {
    std::panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        if !IN_CORE.get() {
            eprintln!("{text}");
        }
        LAST_PANIC.with(|p| *p.borrow_mut() = text);
    }));
}

/// Runs a step of core; `None` if it panics.
pub(crate) fn in_core<T>(step: impl FnOnce() -> T) -> Option<T> {
    IN_CORE.set(true);
    let done = catch_unwind(AssertUnwindSafe(step)).ok();
    IN_CORE.set(false);
    done
}

/// What the last panic on this thread said.
pub(crate) fn last_panic() -> String {
    LAST_PANIC.with(|p| p.borrow().clone())
}

/// How a history ended.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The broken rule, if any.
    pub violation: Option<Violation>,
    /// Depends on every event.
    pub hash: u64,
    /// Events handled.
    pub events: u64,
    /// Virtual time, microseconds.
    pub time: u64,
    /// How controllers ended.
    pub outcomes: Vec<stanchion_core::api::Outcome>,
    /// Restart decisions.
    pub restarts: usize,
    /// The history's lines, if they were wanted.
    pub trace: Vec<String>,
}

/// Runs one history.
pub fn check(sc: Scenario, trace: bool) -> Verdict {
    let mut w = World::new(sc, trace);
    w.run();
    Verdict {
        violation: w.violation,
        hash: w.hash,
        events: w.events,
        time: w.now,
        outcomes: w.judge.outcomes,
        restarts: w.judge.restarts.len(),
        trace: w.trace.unwrap_or_default(),
    }
}
