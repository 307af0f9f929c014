//! Thousands of histories, and the judge's eyesight.

use stanchion_core::bugs::{Bug, Bugs};
use stanchion_sim::fault::{Fault, Moment, What, When};
use stanchion_sim::hunt::{self, BUGS};
use stanchion_sim::scenario::Scenario;
use stanchion_sim::{check, quiet_panics, shrink};

/// Threads of every test here: the machines that run it have two cores.
const THREADS: usize = 2;
/// Seeds in which each deliberate bug must show.
const HUNT_SEEDS: u64 = 6_000;

fn seeds() -> u64 {
    let wanted = std::env::var("STANCHION_SIM_SEEDS").ok();
    wanted.map_or(10_000, |n| n.parse().expect("STANCHION_SIM_SEEDS is a number"))
}

#[test]
fn no_history_breaks_a_rule() {
    quiet_panics();
    let sum = hunt::run(0..seeds(), THREADS, 1, Scenario::new);
    println!("{} histories, {} events, {} decisions", sum.histories, sum.events, sum.restarts);
    let Some((seed, verdict)) = sum.broken.first() else { return };
    let v = verdict.violation.as_ref().expect("broken histories have a violation");
    let sc = Scenario::new(*seed);
    let kept = shrink::shrink(&sc, v);
    let short = check(shrink::only(&sc, &kept), true);
    let from = short.trace.len().saturating_sub(80);
    panic!(
        "seed {seed}: {} {}\nfaults {:?}\n{}\nagain: stanchion-sim --seed {seed} --only {} --trace",
        v.rule,
        v.text,
        shrink::only(&sc, &kept).faults,
        short.trace[from..].join("\n"),
        kept.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    );
}

#[test]
fn without_faults_every_run_ends_with_success() {
    let sum = hunt::run(0..500, THREADS, 1, |seed| shrink::only(&Scenario::new(seed), &[]));
    assert!(sum.broken.is_empty(), "{:?}", sum.broken.first());
    for seed in 0..300 {
        let verdict = check(shrink::only(&Scenario::new(seed), &[]), false);
        let word = format!("{:?}", verdict.outcomes);
        assert!(word.starts_with("[Success"), "seed {seed}: {word}");
    }
}

#[test]
fn nodes_without_ranks_pass_on_what_their_subtrees_ask() {
    // Slot 3 has a rank and hangs below slot 1, which has none; more collectives than a peer may be ahead.
    let mut s = Scenario::calm(7);
    (s.nodes, s.app.ranks, s.app.steps, s.app.step_ms) = (6, 2, 450, 50);
    s.settings.set("fanout", "2").unwrap();
    let verdict = check(s, false);
    assert!(verdict.violation.is_none(), "{verdict:?}");
    assert_eq!(format!("{:?}", verdict.outcomes[0]), "Success { flush_trouble: None }");
}

/// Histories beyond those that are tried each time, each of which found a defect.
const FOUND: [(u64, &str); 2] = [
    (
        24_092,
        "FM-L2: sources that were cut off for a while were avoided for good, so every sum needed the rotten parity",
    ),
    (
        42_211,
        "FM-V3: the application ended while a commit was told, and the last flush was of the one before",
    ),
];

#[test]
fn what_was_found_once_stays_mended() {
    for (seed, what) in FOUND {
        let verdict = check(Scenario::new(seed), false);
        assert!(verdict.violation.is_none(), "seed {seed}: {:?}; it was {what}", verdict.violation);
    }
}

#[test]
fn a_seed_is_a_history() {
    quiet_panics();
    for seed in 0..200 {
        let (a, b) = (check(Scenario::new(seed), false), check(Scenario::new(seed), true));
        assert_eq!((a.hash, a.events, a.time), (b.hash, b.events, b.time), "seed {seed}");
    }
}

#[test]
fn every_deliberate_bug_is_found() {
    quiet_panics();
    let mut hidden = Vec::new();
    for bug in BUGS {
        let sum = hunt::run(0..HUNT_SEEDS, THREADS, 1, |seed| with(seed, *bug));
        match sum.broken.first() {
            Some((seed, v)) => {
                let rule = v.violation.as_ref().map_or("", |v| v.rule);
                println!("{bug:?}: {rule} in seed {seed}, after {} histories", sum.histories);
            }
            None => hidden.push(*bug),
        }
    }
    assert!(hidden.is_empty(), "not found: {hidden:?}");
}

fn with(seed: u64, bug: Bug) -> Scenario {
    let mut sc = Scenario::new(seed);
    sc.bugs = Bugs::only(bug);
    sc
}

#[test]
fn a_broken_history_is_shortened_to_the_fault_that_matters() {
    quiet_panics();
    // Files that are not verified reach ranks only if something damaged or took them: some fault stays. Of so many not
    // all can matter, as all of four may, if three of them are how the network is.
    let bug = Bug::SkipVerify;
    let (seed, v) = (0..HUNT_SEEDS)
        .find_map(|seed| {
            let sc = with(seed, bug);
            let v = check(sc.clone(), false).violation.filter(|v| v.rule == "FM-S7")?;
            (sc.faults.len() >= 6).then_some((seed, v))
        })
        .expect("the hunt finds it");
    let sc = with(seed, bug);
    let kept = shrink::shrink(&sc, &v);
    assert!(!kept.is_empty() && kept.len() < sc.faults.len(), "{kept:?} of {:?}", sc.faults);
    let short = shrink::only(&sc, &kept);
    assert!(!short.faults.iter().all(|f| matches!(f.what, What::NetLoss(_))));
    assert_eq!(check(short, false).violation.map(|v| v.rule), Some(v.rule));
}

#[test]
fn increments_are_made_and_restarted_from() {
    // Whether their bytes are right is looked after by the judge; this, that there are any.
    let (mut increments, mut restarts) = (0, 0);
    for seed in (0..400).filter(|seed| Scenario::new(*seed).app.increments) {
        let verdict = check(Scenario::new(seed), true);
        assert!(verdict.violation.is_none(), "seed {seed}: {:?}", verdict.violation);
        let has = verdict.trace.iter().filter(|line| line.contains("has an increment")).count();
        increments += has;
        restarts += if has > 0 { verdict.restarts } else { 0 };
    }
    assert!(increments > 300 && restarts > 30, "{increments} increments, {restarts} restarts");
}

#[test]
fn how_far_a_rebuild_is_can_be_seen() {
    // One slow chunk after the other: the runner tells of it.
    let mut s = Scenario::calm(11);
    (s.nodes, s.spares, s.app.ranks, s.app.large_in) = (4, 1, 4, 1);
    s.settings.set("scheme", "RS(2,2)").unwrap();
    s.work_us = 1_500_000;
    let at = When::Moment(Moment::Level, 2, 200_000);
    s.faults = vec![Fault { when: at, what: What::KillNode(2) }];
    let verdict = check(s, true);
    assert!(verdict.violation.is_none(), "{verdict:?}");
    let told: Vec<_> = verdict.trace.iter().filter(|l| l.contains("Rebuilding {")).collect();
    assert!(!told.is_empty() && told.iter().all(|l| l.contains("done_bytes")), "{told:?}");
}
