//! Many histories on several threads, and the hunt for deliberate bugs.

use crate::scenario::Scenario;
use crate::{Verdict, check};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// What many histories came to.
#[derive(Debug, Default)]
pub struct Sum {
    /// Histories.
    pub histories: u64,
    /// Events.
    pub events: u64,
    /// Restart decisions.
    pub restarts: u64,
    /// Histories with a broken rule: seed and what broke, by seed.
    pub broken: Vec<(u64, Verdict)>,
}

/// Runs all seeds on `threads` threads; stops early after `stop_at` broken ones.
pub fn run(
    seeds: Range<u64>,
    threads: usize,
    stop_at: usize,
    scenario: impl Fn(u64) -> Scenario + Sync,
) -> Sum {
    let next = AtomicU64::new(seeds.start);
    let sum = Mutex::new(Sum::default());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let verdict = check(scenario(seed), false);
                    let mut sum = sum.lock().expect("no thread panics with the sum in hand");
                    sum.histories += 1;
                    sum.events += verdict.events;
                    sum.restarts += verdict.restarts as u64;
                    if verdict.violation.is_some() {
                        sum.broken.push((seed, verdict));
                    }
                    if sum.broken.len() >= stop_at {
                        next.store(seeds.end, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let mut sum = sum.into_inner().expect("no thread panics with the sum in hand");
    sum.broken.sort_by_key(|(seed, _)| *seed);
    sum
}

/// All deliberate bugs.
#[cfg(feature = "deliberate-bugs")]
pub const BUGS: &[stanchion_core::bugs::Bug] = {
    use stanchion_core::bugs::Bug::*;
    &[
        AnnounceBeforeStored,
        AcceptOldIncarnation,
        ApplyTwice,
        EvictBeforeProtected,
        SkipVerify,
        ForgetVote,
        SkipStat,
        CommitWithoutCertificate,
        ProtectWithoutChildren,
        OpenBeforeRestored,
        ObeyFenced,
        SkipSourceChecksum,
        IndexBeforePublish,
        SilentFreshStart,
        DecideAgain,
        EvictBeforeFlush,
        LendMapped,
        FreeData,
        DropNewest,
        LendUnstored,
        CommitUnfilled,
        FreeChild,
        OneRow,
        NoFactors,
        IgnoreGroups,
        NameFirstAttempt,
        PruneOneMore,
        OneIndex,
        ParityDoneEarly,
        RestoredEarly,
        SkipReprotect,
        CountAllSets,
        OneSpareForAll,
        IgnoreAvoid,
    ]
};

/// The bug of this name.
#[cfg(feature = "deliberate-bugs")]
pub fn named(name: &str) -> Option<stanchion_core::bugs::Bug> {
    BUGS.iter().copied().find(|b| format!("{b:?}") == name)
}
