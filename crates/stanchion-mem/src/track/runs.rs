//! Sorted, disjoint runs of bytes, bounded in number.

/// The most runs that are kept for one region; beyond it neighbours merge, nearest first.
pub const MAX_RUNS: usize = 1 << 18;

/// A run of changed bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// From the region's begin.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

impl Run {
    fn end(&self) -> usize {
        self.offset + self.len
    }
}

/// Runs in order; neighbours never touch.
#[derive(Debug, Clone)]
pub(crate) struct Runs {
    runs: Vec<Run>,
    max: usize,
    /// Runs with a gap of less than this many bytes between them count as one.
    gap: usize,
}

impl Runs {
    pub(crate) fn new(max: usize) -> Runs {
        Runs { runs: Vec::new(), max: max.max(1), gap: 0 }
    }

    /// Adds a run that begins no earlier than the last one.
    pub(crate) fn push(&mut self, run: Run) {
        if run.len == 0 {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if run.offset <= last.end() + self.gap => {
                last.len = last.len.max(run.end() - last.offset);
            }
            _ => self.runs.push(run),
        }
        while self.runs.len() > self.max {
            self.coarsen();
        }
    }

    /// Merges the runs with the smallest gaps.
    fn coarsen(&mut self) {
        self.gap = (self.gap * 2).max(4096);
        let gap = self.gap;
        self.runs.dedup_by(|next, last| {
            let near = next.offset <= last.end() + gap;
            if near {
                last.len = last.len.max(next.end() - last.offset);
            }
            near
        });
    }

    /// Everything in either.
    pub(crate) fn union(&self, other: &Runs) -> Runs {
        let mut out = Runs::new(self.max);
        let (mut a, mut b) = (self.runs.iter().peekable(), other.runs.iter().peekable());
        loop {
            let next = match (a.peek(), b.peek()) {
                (Some(x), Some(y)) if x.offset <= y.offset => a.next(),
                (_, Some(_)) => b.next(),
                _ => a.next(),
            };
            let Some(run) = next else { return out };
            out.push(*run);
        }
    }

    pub(crate) fn as_slice(&self) -> &[Run] {
        &self.runs
    }

    pub(crate) fn into_vec(self) -> Vec<Run> {
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const P: usize = 4096;

    fn from_bits(bits: &[bool], max: usize) -> Runs {
        let mut runs = Runs::new(max);
        for (i, _) in bits.iter().enumerate().filter(|(_, b)| **b) {
            runs.push(Run { offset: i * P, len: P });
        }
        runs
    }

    fn to_bits(runs: &Runs, n: usize) -> Vec<bool> {
        let mut bits = vec![false; n];
        for r in &runs.runs {
            bits[r.offset / P..r.end() / P].fill(true);
        }
        bits
    }

    fn in_order(runs: &Runs) -> bool {
        runs.runs.windows(2).all(|w| w[0].end() < w[1].offset)
    }

    proptest! {
        #[test]
        fn a_union_has_what_either_has(
            pairs in prop::collection::vec((any::<bool>(), any::<bool>()), 0..200),
        ) {
            let (a, b): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let both: Vec<_> = a.iter().zip(&b).map(|(x, y)| *x || *y).collect();
            let union = from_bits(&a, MAX_RUNS).union(&from_bits(&b, MAX_RUNS));
            prop_assert!(in_order(&union));
            prop_assert_eq!(to_bits(&union, both.len()), both);
        }

        #[test]
        fn bounded_runs_lose_nothing(
            bits in prop::collection::vec(any::<bool>(), 0..400),
            max in 1usize..40,
        ) {
            let runs = from_bits(&bits, max);
            prop_assert!(runs.runs.len() <= max && in_order(&runs));
            let out = to_bits(&runs, bits.len());
            prop_assert!(bits.iter().zip(out).all(|(b, o)| !b || o));
        }
    }
}
