//! The shortest history that still breaks the rule.

use crate::check;
use crate::scenario::Scenario;
use crate::world::Violation;

/// The conditions with only these faults, by their numbers.
pub fn only(sc: &Scenario, faults: &[usize]) -> Scenario {
    let mut sc = sc.clone();
    sc.faults = faults.iter().filter_map(|i| sc.faults.get(*i)).copied().collect();
    sc
}

/// Leaves out faults, one at a time, as long as the same rule is broken. Gives their numbers.
pub fn shrink(sc: &Scenario, broken: &Violation) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..sc.faults.len()).collect();
    loop {
        let before = kept.len();
        for place in (0..kept.len()).rev() {
            let mut fewer = kept.clone();
            fewer.remove(place);
            let same =
                check(only(sc, &fewer), false).violation.is_some_and(|v| v.rule == broken.rule);
            if same {
                kept = fewer;
            }
        }
        if kept.len() == before {
            return kept;
        }
    }
}
