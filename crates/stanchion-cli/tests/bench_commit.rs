//! `stanchion bench commit`: the shape of what it says, and that goals are told where they belong. No speed: that is the
//! benchmark's.

use serde_json::Value;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a directory");
    Command::new(env!("CARGO_BIN_EXE_stanchion"))
        .args(["bench", "commit"])
        .args(args)
        .arg("--disk")
        .arg(dir.path())
        .output()
        .expect("the command starts")
}

fn result(out: &Output) -> Value {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("one JSON value")
}

fn row<'a>(result: &'a Value, name: &str) -> &'a Value {
    let rows = result["rows"].as_array().expect("rows");
    let found = rows.iter().find(|r| r["name"] == name);
    let row = found.unwrap_or_else(|| panic!("no row '{name}' in {rows:#?}"));
    assert!(row["value"].as_f64().is_some_and(|v| v >= 0.0), "{row}");
    row
}

#[test]
fn the_curve_has_a_row_for_each_number_of_nodes() {
    let out = bench(&["--nodes", "64,256", "--rounds", "2", "--real", "0", "--json"]);
    let result = result(&out);
    assert_eq!((&result["bench"], &result["setup"]["hop_us"]), (&"commit".into(), &50.0.into()));
    for nodes in [64, 256] {
        for what in ["commit", "begin"] {
            let row = row(&result, &format!("{what}, {nodes} nodes"));
            assert_eq!((&row["unit"], &row["goal"]), (&"ms".into(), &Value::Null));
        }
        assert_eq!(row(&result, &format!("handling, all, {nodes} nodes"))["unit"], "us");
    }
    let rows = result["rows"].as_array().expect("rows");
    assert!(rows.iter().all(|r| !r["name"].as_str().unwrap_or("").contains("real")));
}

#[test]
fn with_a_given_price_of_handling_a_run_is_the_same_each_time() {
    let args = ["--nodes", "1024", "--rounds", "2", "--real", "0", "--handling-us", "2", "--json"];
    let (one, again) = (result(&bench(&args)), result(&bench(&args)));
    assert_eq!(one["rows"], again["rows"]);
    assert_eq!(row(&one, "commit, 1024 nodes")["goal"], 100.0);
}

#[test]
fn real_agents_are_put_beside_the_model() {
    let args = ["--nodes", "8", "--rounds", "1", "--real", "4", "--real-rounds", "3", "--json"];
    let result = result(&bench(&args));
    for name in ["commit, 2 real agents", "commit, 4 real agents", "a message here, each end"] {
        assert_eq!(row(&result, name)["goal"], Value::Null);
    }
    assert_eq!(row(&result, "4 real agents / model")["goal"], 1.5);
}

#[test]
fn prices_that_cannot_be_are_refused() {
    for args in [["--hop-us", "1e9"], ["--nodes", "0"], ["--rounds", "0"], ["--nodes", "1000000"]] {
        let out = bench(&args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(out.stdout.is_empty());
    }
}
