//! `stanchion-sim [--seeds FROM..TO] [--seed N] [--only 0,3] [--trace] [--calm]`

use stanchion_sim::scenario::Scenario;
use stanchion_sim::{check, quiet_panics, shrink};
use std::collections::BTreeMap;
use std::process::ExitCode;

#[derive(Debug, Default)]
struct Args {
    from: u64,
    to: u64,
    only: Option<Vec<usize>>,
    trace: bool,
    calm: bool,
    all: bool,
    #[cfg(feature = "deliberate-bugs")]
    bug: Option<stanchion_core::bugs::Bug>,
}

fn args() -> Option<Args> {
    let mut out = Args { to: 1000, ..Args::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seeds" => {
                let range = words.next()?;
                let (from, to) = range.split_once("..")?;
                (out.from, out.to) = (from.parse().ok()?, to.parse().ok()?);
            }
            "--seed" => {
                out.from = words.next()?.parse().ok()?;
                out.to = out.from + 1;
            }
            "--only" => {
                let list = words.next()?;
                let numbers: Result<_, _> =
                    list.split(',').filter(|w| !w.is_empty()).map(str::parse).collect();
                out.only = Some(numbers.ok()?);
            }
            "--trace" => out.trace = true,
            "--calm" => out.calm = true,
            "--all" => out.all = true,
            #[cfg(feature = "deliberate-bugs")]
            "--bug" => out.bug = Some(stanchion_sim::hunt::named(&words.next()?)?),
            _ => return None,
        }
    }
    Some(out)
}

fn main() -> ExitCode {
    let Some(args) = args() else {
        eprintln!(
            "stanchion-sim [--seeds FROM..TO | --seed N] [--only FAULT,FAULT] [--calm] [--trace] [--all]"
        );
        return ExitCode::from(2);
    };
    quiet_panics();
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    let mut broken: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
    let (mut events, mut time, mut restarts) = (0, 0, 0);
    for seed in args.from..args.to {
        let mut sc = if args.calm { Scenario::calm(seed) } else { Scenario::new(seed) };
        if let Some(list) = &args.only {
            sc = shrink::only(&sc, list);
        }
        #[cfg(feature = "deliberate-bugs")]
        if let Some(bug) = args.bug {
            sc.bugs = stanchion_core::bugs::Bugs::only(bug);
        }
        let verdict = check(sc.clone(), args.trace);
        events += verdict.events;
        time += verdict.time;
        restarts += verdict.restarts;
        verdict.trace.iter().for_each(|line| println!("{line}"));
        for outcome in &verdict.outcomes {
            let text = format!("{outcome:?}");
            let word = text.split([' ', '(']).next().unwrap_or_default().to_owned();
            *outcomes.entry(word).or_default() += 1;
        }
        if let Some(v) = verdict.violation {
            broken.entry(v.rule).or_default().push(seed);
            if args.all {
                println!("seed {seed}: {} {}", v.rule, v.text.lines().next().unwrap_or_default());
                continue;
            }
            report(seed, &sc, &v, args.only.is_some());
            return ExitCode::FAILURE;
        }
    }
    println!(
        "{} histories, {events} events, {restarts} decisions, {} s of virtual time: {outcomes:?}",
        args.to - args.from,
        time / 1_000_000
    );
    for (rule, seeds) in &broken {
        println!("{rule}: {} histories, e.g. {:?}", seeds.len(), &seeds[..seeds.len().min(8)]);
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn report(seed: u64, sc: &Scenario, v: &stanchion_sim::world::Violation, chosen: bool) {
    println!("seed {seed}: {} {}", v.rule, v.text);
    let kept = shrink::shrink(sc, v);
    let short = shrink::only(sc, &kept);
    for (i, f) in kept.iter().zip(&short.faults) {
        println!("  fault {i}: {f:?}");
    }
    let verdict = check(short, true);
    let from = verdict.trace.len().saturating_sub(60);
    verdict.trace[from..].iter().for_each(|line| println!("{line}"));
    let list: Vec<String> = kept.iter().map(usize::to_string).collect();
    if !chosen {
        println!("again: stanchion-sim --seed {seed} --only {} --trace", list.join(","));
    }
}
