//! Tracking for callers that show their regions at each collection.

use std::collections::BTreeMap;

use super::{Collected, Facts, Mark, Method, RegionId, TrackError, Tracker, Wanted};
use crate::maps::Span;

/// A tracker whose regions are those of the last collection.
pub struct SliceTracker {
    tracker: Tracker,
    /// Where each watched region was, and its length.
    known: BTreeMap<RegionId, (usize, usize)>,
}

impl std::fmt::Debug for SliceTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SliceTracker").field("known", &self.known).finish_non_exhaustive()
    }
}

impl SliceTracker {
    /// A tracker, and what it can do here.
    pub fn new(wanted: Wanted) -> Result<(SliceTracker, Facts), TrackError> {
        let (tracker, facts) = Tracker::new(wanted)?;
        Ok((SliceTracker { tracker, known: BTreeMap::new() }, facts))
    }

    /// What changed in each region since the last interval that was committed; the next one begins. A region that is
    /// new, or has moved, or has another length, brings everything; one that is missing is watched no more.
    pub fn collect(&mut self, regions: &[(RegionId, &[u8])]) -> Result<Vec<Collected>, TrackError> {
        let at = |bytes: &[u8]| (bytes.as_ptr().addr(), bytes.len());
        let stale: Vec<RegionId> = self
            .known
            .iter()
            .filter(|(id, known)| !regions.iter().any(|(r, b)| r == *id && at(b) == **known))
            .map(|(id, _)| *id)
            .collect();
        for id in stale {
            self.known.remove(&id);
            self.tracker.unwatch(id)?;
        }
        let new: Vec<(RegionId, *const u8, usize)> = regions
            .iter()
            .filter(|(id, _)| !self.known.contains_key(id))
            .map(|(id, bytes)| (*id, bytes.as_ptr(), bytes.len()))
            .collect();
        if new.is_empty() {
            // Looking at the mappings costs milliseconds.
            return regions.iter().map(|(id, _)| self.tracker.collect(*id)).collect();
        }
        // SAFETY: a region is collected below only, while the slice that it is borrows it: readable. What was watched
        // for an earlier call and is not among these slices was unwatched above.
        unsafe { self.tracker.watch_all(&new) }?;
        self.known.extend(new.iter().map(|(id, start, len)| (*id, (start.addr(), *len))));
        regions.iter().map(|(id, _)| self.tracker.collect(*id)).collect()
    }

    /// Does the kernel tell of pages of this region, which is where it was when it was last collected? A mapping has one
    /// userfaultfd: nobody else can write-protect it then.
    pub fn kernel_watches(&self, id: RegionId, bytes: &[u8]) -> bool {
        let span = Span { start: bytes.as_ptr().addr(), len: bytes.len() };
        self.known.get(&id) == Some(&(span.start, span.len))
            && span.pages(self.tracker.page).len > 0
            && self.tracker.method(id) == Ok(Method::Scan)
    }

    /// The dataset with these collections is committed.
    pub fn committed(&mut self, marks: &[(RegionId, Mark)]) {
        for (id, mark) in marks {
            // One that was forgotten since has nothing to remember.
            let _unknown_is_fine = self.tracker.committed(*id, *mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Changes;
    use super::*;

    fn collected(t: &mut SliceTracker, id: u64, bytes: &[u8]) -> Collected {
        t.collect(&[(RegionId(id), bytes)]).unwrap().remove(0)
    }

    #[test]
    fn what_moved_or_grew_comes_whole_and_the_rest_by_pages() {
        for wanted in [Wanted::Auto, Wanted::Hash { block: 4096 }] {
            let (mut tracker, _) = SliceTracker::new(wanted).unwrap();
            let mut a = vec![1u8; 64 * 4096];
            let first = collected(&mut tracker, 1, &a);
            assert_eq!(first.changes, Changes::All);
            tracker.committed(&[(RegionId(1), first.mark)]);
            a[20 * 4096 + 5] = 9;
            let second = collected(&mut tracker, 1, &a);
            let Changes::Runs(runs) = &second.changes else { panic!("{second:?}") };
            assert!(runs.iter().any(|r| (r.offset..r.offset + r.len).contains(&(20 * 4096 + 5))));
            assert!(runs.iter().map(|r| r.len).sum::<usize>() <= 3 * 4096, "{runs:?}");
            // Not committed: it comes again.
            let third = collected(&mut tracker, 1, &a);
            let Changes::Runs(again) = &third.changes else { panic!("{third:?}") };
            assert!(again.iter().any(|r| (r.offset..r.offset + r.len).contains(&(20 * 4096 + 5))));
            let b = vec![2u8; 65 * 4096];
            assert_eq!(collected(&mut tracker, 1, &b).changes, Changes::All);
            assert_eq!(collected(&mut tracker, 1, &a).changes, Changes::All);
        }
    }

    #[test]
    fn regions_come_and_go() {
        let (mut tracker, _) = SliceTracker::new(Wanted::Auto).unwrap();
        let (a, b) = (vec![1u8; 40_000], vec![2u8; 50_000]);
        let both = [(RegionId(1), &a[..]), (RegionId(2), &b[..])];
        assert_eq!(tracker.collect(&both).unwrap().len(), 2);
        assert_eq!(tracker.collect(&both[1..]).unwrap().len(), 1);
        let again = tracker.collect(&both).unwrap();
        assert_eq!(again[0].changes, Changes::All, "it was not watched meanwhile");
        assert!(tracker.collect(&[]).unwrap().is_empty());
    }
}
