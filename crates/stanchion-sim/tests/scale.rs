//! One history of a job on thousands of nodes: sets, spares and incarnations.

use stanchion_core::api::Outcome;
use stanchion_sim::fault::{Fault, Moment, What, When};
use stanchion_sim::scenario::Scenario;
use stanchion_sim::world::World;
use std::collections::BTreeSet;

const NODES: u32 = 2048;
const SPARES: u32 = 4;
const SET: u32 = 8;

fn scenario() -> Scenario {
    let mut s = Scenario::calm(1);
    (s.nodes, s.spares) = (NODES, SPARES);
    (s.app.ranks, s.app.steps, s.app.step_ms) = (NODES, 6, 300);
    (s.app.files, s.app.large_in, s.app.output_every) = (2, 5, 0);
    (s.app.memory, s.app.increments, s.app.same_names) = (false, false, false);
    s.app.wait_permille = 0;
    (s.stores, s.fifo, s.hop_us, s.work_us) = (false, false, 3_000, 10_000);
    (s.fence, s.launcher_dies) = (true, true);
    for (name, value) in [
        ("scheme", "XOR"),
        ("set_size", &SET.to_string()),
        ("fanout", "16"),
        ("flush_every", "0"),
        ("flush_at_end", "1"),
        ("checkpoint_interval", "1"),
        ("cache_datasets", "2"),
        ("collective_timeout_ms", "60000"),
        ("init_timeout_ms", "60000"),
        ("silence_timeout_ms", "5000"),
    ] {
        s.settings.set(name, value).expect("a value of the table");
    }
    s
}

#[test]
fn two_nodes_of_two_sets_are_lost_at_once_and_rebuilt_onto_spares() {
    let mut s = scenario();
    // Both while the third checkpoint waits for its vote: what the job goes on from is the second or the third.
    let when = When::Moment(Moment::Begin, u64::from(NODES * 2 + 1) as u32, 20_000);
    s.faults = vec![Fault { when, what: What::KillTwoNodes(700, 1_500) }];
    let mut w = World::new(s, false);
    w.run();
    // FM-S1, FM-S2, FM-S5, FM-S7, FM-S13, FM-L2, FM-L4: the judge looks after every step.
    assert_eq!(w.violation, None);
    // FM-V2: it goes on, and to its end.
    assert_eq!(w.judge.outcomes, [Outcome::Success { flush_trouble: None }]);
    println!("{} events, {} s of virtual time", w.events, w.now / 1_000_000);
    // FM-L2: two decisions, and the second goes on from a checkpoint.
    assert_eq!(w.judge.restarts.len(), 2, "{:?}", w.judge.restarts);
    let from = w.judge.restarts[1].expect("there was a protected checkpoint");
    assert_eq!(w.apps.len(), 2, "two launches");
    // FM-V2: the two lost slots are on spares, the others where they were.
    let hosts = |app: usize| w.apps[app].ranks.iter().map(|r| r.agent).collect::<Vec<_>>();
    let (before, after) = (hosts(0), hosts(1));
    let moved: Vec<usize> = (0..before.len()).filter(|r| before[*r] != after[*r]).collect();
    assert_eq!(moved, [700, 1_500]);
    assert!(moved.iter().all(|r| !before.contains(&after[*r])));
    // FM-S8, FM-L2: what was there was made again of the sets; the judge compared what the ranks read of it.
    let incs: BTreeSet<_> = w.judge.promises.keys().map(|k| k.inc).collect();
    assert_eq!(incs.len(), 2, "datasets of two incarnations");
    let first = from.inc;
    let last = *incs.last().expect("there are two");
    assert_eq!(incs.first(), Some(&first));
    let restored = &w.judge.promises[&from];
    // FM-L5: what the loss degraded is protected anew.
    assert!(restored.protected_in.contains(&first) && restored.protected_in.contains(&last));
    // FM-L4: and so are the checkpoints after it.
    let after = w.judge.promises.iter().filter(|(k, _)| k.inc == last);
    let mut protected = after.filter(|(_, p)| p.protected_in.contains(&last));
    assert!(protected.next().is_some());
}
