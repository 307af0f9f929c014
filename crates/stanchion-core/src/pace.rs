//! How long work behind the application may take before it is late: it should be done before the next checkpoint comes.
//!
//! At the lowest priority it takes what the application leaves, which may be next to nothing. The time between the
//! last checkpoints tells when the next one is due; what is not done at half of it goes on at normal priority, which
//! costs the application no more processor time, only at a worse moment.

use crate::api::Millis;
use std::collections::VecDeque;

/// Intervals that are kept in mind.
const KEPT: usize = 4;
/// Nothing is late sooner, milliseconds.
pub const LATE_MIN_MS: u64 = 500;

/// The moments of the last checkpoints.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    last: Option<Millis>,
    intervals: VecDeque<u64>,
}

impl Pace {
    /// A dataset was committed.
    pub fn committed(&mut self, now: Millis) {
        if let Some(last) = self.last.replace(now) {
            self.intervals.push_back(now.since(last));
            if self.intervals.len() > KEPT {
                self.intervals.pop_front();
            }
        }
    }

    /// The application was ended: the time until its next checkpoint is no interval.
    pub fn interrupted(&mut self) {
        self.last = None;
    }

    /// How long after its commit a dataset's work is late; `None` while nothing is known.
    pub fn patience(&self) -> Option<u64> {
        // The shortest: late too early costs little, a checkpoint that waits costs the job.
        self.intervals.iter().min().map(|ms| (ms / 2).max(LATE_MIN_MS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_shortest_recent_interval() {
        let mut pace = Pace::default();
        assert_eq!(pace.patience(), None);
        pace.committed(Millis(1_000));
        assert_eq!(pace.patience(), None);
        for at in [16_000, 36_000, 46_000] {
            pace.committed(Millis(at));
        }
        assert_eq!(pace.patience(), Some(5_000));
        for n in 1..=4 {
            pace.committed(Millis(46_000 + n * 20_000));
        }
        assert_eq!(pace.patience(), Some(10_000), "the short one is forgotten");
    }

    #[test]
    fn a_restart_is_no_interval_and_haste_has_a_limit() {
        let mut pace = Pace::default();
        pace.committed(Millis(0));
        pace.interrupted();
        pace.committed(Millis(90_000));
        assert_eq!(pace.patience(), None);
        pace.committed(Millis(90_010));
        assert_eq!(pace.patience(), Some(LATE_MIN_MS));
    }
}
