//! export, pin, unpin and prune on prefixes as agents leave them.

mod common;

use common::{Scratch, dataset};
use serde_json::Value;

fn datasets(s: &Scratch) -> Vec<Value> {
    s.ends(&["list", "--json"]).code(0).json()["datasets"].as_array().unwrap().clone()
}

fn numbers(s: &Scratch) -> Vec<u64> {
    datasets(s).iter().map(|d| d["number"].as_u64().unwrap()).collect()
}

fn out_has(s: &Scratch, args: &[&str], parts: &[&str]) {
    let out = s.ends(args).code(0).out;
    assert!(parts.iter().all(|part| out.contains(part)), "{args:?}: {out}");
}

/// Checkpoints 1 to 6, with an output for the third.
fn six(s: &Scratch) {
    for no in 1..=6 {
        dataset(&s.prefix(), &s.path(""), no, &format!("d{no}"), if no == 3 { 2 } else { 1 });
    }
    assert_eq!(numbers(s), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn the_newest_ones_outputs_and_pinned_ones_stay() {
    // FM-S20
    let s = Scratch::new();
    six(&s);
    out_has(&s, &["pin", "d2"], &["'d2'", "unpin"]);
    out_has(&s, &["pin", "2"], &["was pinned before"]);
    let listed = s.ends(&["list"]).code(0).out;
    assert!(listed.lines().nth(2).unwrap().contains("complete, pinned"), "{listed}");
    assert_eq!(datasets(&s)[1]["pinned"], true);
    out_has(&s, &["prune", "--keep-last", "2", "--dry-run"], &["'d1'", "'d4'", "would be deleted"]);
    assert_eq!(numbers(&s), [1, 2, 3, 4, 5, 6], "a dry run deletes nothing");
    let told = s.ends(&["prune", "--keep-last", "2", "--keep-every", "4", "--json"]).code(0).json();
    let gone: Vec<u64> =
        told["deleted"].as_array().unwrap().iter().map(|d| d["number"].as_u64().unwrap()).collect();
    assert_eq!((gone, &told["failed"]), (vec![1], &Value::Null));
    assert_eq!(numbers(&s), [2, 3, 4, 5, 6]);
    s.ends(&["prune", "--keep-last", "2"]).code(0);
    assert_eq!(numbers(&s), [2, 3, 5, 6]);
    s.ends(&["verify", "--all"]).code(0);
    out_has(&s, &["unpin", "d2"], &["pinned no more"]);
    out_has(&s, &["unpin", "d2"], &["was not pinned"]);
    s.ends(&["prune", "--keep-last", "2"]).code(0);
    assert_eq!(numbers(&s), [3, 5, 6]);
    out_has(&s, &["prune", "--keep-last", "2"], &["nothing is to be deleted"]);
    s.nothing_left();
}

#[test]
fn those_named_go_unless_one_of_them_is_pinned() {
    let s = Scratch::new();
    six(&s);
    s.ends(&["pin", "d5"]).code(0);
    s.ends(&["prune", "d4", "d5"]).code(1).says(&["'d5'", "unpin", "nothing was deleted"]);
    assert_eq!(numbers(&s), [1, 2, 3, 4, 5, 6]);
    out_has(&s, &["prune", "d4", "3"], &["'d4'", "'d3'", "deleted"]);
    assert_eq!(numbers(&s), [1, 2, 5, 6]);
    s.ends(&["prune", "d9"]).code(1).says(&["d9", "stanchion list"]);
    s.ends(&["prune"]).code(2).says(&["--keep-last"]);
    s.ends(&["prune", "d1", "--keep-last", "1"]).code(2);
    s.nothing_left();
}

#[test]
fn a_prefix_in_use_is_not_pruned() {
    // FM-C5
    let s = Scratch::new();
    six(&s);
    let gate = s.fifo("gate");
    let mut run = s.run(&[], &format!("read x < {}", gate.display()));
    run.event("launching");
    let mut command = s.stanchion(&["prune", "--keep-last", "1"]);
    command.env("STANCHION_LEASE_WAIT_MS", "200");
    common::ended(command).code(8).says(&["uses the prefix"]);
    assert_eq!(numbers(&s).len(), 6);
    std::io::Write::write_all(
        &mut std::fs::OpenOptions::new().write(true).open(&gate).unwrap(),
        b"\n",
    )
    .unwrap();
    run.end(0);
    s.nothing_left();
}

#[test]
fn an_export_is_the_files_and_takes_nothing_away() {
    let s = Scratch::new();
    six(&s);
    let to = s.path("to");
    let target = to.to_str().unwrap();
    s.ends(&["export", "d1", "--to", target]).code(7).says(&["create it"]);
    std::fs::create_dir(&to).unwrap();
    let told = s.ends(&["export", "d1", "--to", target, "--json"]).code(0).json();
    assert_eq!((&told["written"]["bytes"], &told["same"]), (&36006.into(), &0.into()));
    let files = told["written"]["files"].as_u64().unwrap();
    let again = s.ends(&["export", "d1", "--to", target, "--json"]).code(0).json();
    assert_eq!((&again["written"]["files"], again["same"].as_u64()), (&0.into(), Some(files)));
    // Without a name: the newest checkpoint.
    out_has(&s, &["export", "--to", target], &["'d6'"]);
    s.ends(&["export", "d1", "--to", s.prefix().to_str().unwrap()])
        .code(2)
        .says(&["the prefix itself"]);
    s.ends(&["export", "d1"]).code(2);
    s.nothing_left();
}
