//! `stanchion bench code`, `rebuild` and `schemes`: their results have their form. How fast anything is, is not asserted.

mod common;

use common::Scratch;
use serde_json::Value;

#[test]
fn code_reports_ratios_and_facts() {
    let s = Scratch::new();
    let args = ["bench", "code", "--rounds", "1", "--mb", "1", "--sizes", "64", "--json"];
    let result = s.ends(&args).code(0).json();
    assert_eq!(result["bench"], "code");
    assert_eq!(result["setup"]["rounds"], 1);
    assert_eq!(result["setup"]["sizes_kib"], serde_json::json!([64]));
    let rows = result["rows"].as_array().unwrap();
    let row = |name: &str| -> &Value {
        rows.iter().find(|r| r["name"] == name).unwrap_or_else(|| panic!("no {name}: {result:#}"))
    };
    let xor = row("64 KiB: xor / memcpy");
    assert_eq!((&xor["goal"], &xor["at_least"]), (&0.6.into(), &true.into()));
    let isal = result["setup"]["isal"].as_str().unwrap();
    for code in ["RS(8,2)", "RS(16,4)"] {
        for way in ["accumulating", "whole stripes"] {
            let name = format!("64 KiB: {code}, {way}");
            assert!(row(&name)["value"].as_f64().unwrap() > 0.0);
            assert!(row(&format!("{name}, kernel plain"))["value"].as_f64().unwrap() > 0.0);
            if isal == "libisal.so.2" {
                assert_eq!(row(&format!("{name} / ISA-L"))["goal"], 1.0);
            } else {
                assert!(!rows.iter().any(|r| r["name"].as_str().unwrap().contains("ISA-L")));
            }
        }
    }
    let not_here = result["setup"]["kernels_not_measured_here"].as_array().unwrap();
    assert!(not_here.iter().all(Value::is_string));
    s.nothing_left();
}

#[test]
fn code_needs_something_to_measure() {
    let s = Scratch::new();
    for args in [["--rounds", "0"], ["--mb", "0"], ["--sizes", "0"], ["--sizes", "64,99999"]] {
        let args = [&["bench", "code"], &args[..]].concat();
        s.ends(&args).code(2).says(&["--rounds and --mb", "--sizes"]);
    }
}

fn rows(result: &Value) -> Vec<(&str, f64)> {
    let rows = result["rows"].as_array().unwrap();
    rows.iter().map(|r| (r["name"].as_str().unwrap(), r["value"].as_f64().unwrap())).collect()
}

#[test]
fn rebuild_loses_nodes_and_reports() {
    let s = Scratch::new();
    let disk = s.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let disk = disk.to_str().unwrap();
    for files in [&["--files"][..], &[]] {
        let args = ["bench", "rebuild", "--mb", "4", "--rounds", "2", "--disk", disk, "--json"];
        let result = s.ends(&[&args[..], files].concat()).code(0).json();
        assert_eq!(result["bench"], "rebuild");
        let rows = rows(&result);
        for (case, goal) in
            [("XOR, one node", 1.5), ("RS(2,2), one node", 2.0), ("RS(2,2), 2 nodes", 2.0)]
        {
            let name = format!("{case} lost: rebuild / bare writes");
            assert!(rows.iter().any(|r| r.0 == name && r.1 > 0.0), "{rows:?}");
            let list = result["rows"].as_array().unwrap();
            assert!(list.iter().any(|r| r["name"] == name && r["goal"] == goal));
        }
        let lost = rows.iter().find(|r| r.0 == "RS(2,2), 2 nodes lost: rebuilt, median").unwrap();
        assert!(lost.1 >= 2.0 * 4.19, "{lost:?}");
    }
    s.nothing_left();
}

#[test]
fn schemes_are_compared() {
    let s = Scratch::new();
    let disk = s.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let small =
        ["--nodes", "2,4", "--mb", "1", "--rounds", "1", "--disk-held", "0", "--prefix-held", "0"];
    let blocked = ["--blocked-mb", "1", "--blocked-rounds", "1", "--blocked-checkpoints", "1"];
    let more = ["--disk", disk.to_str().unwrap(), "--json"];
    let args = [&["bench", "schemes"], &small[..], &blocked, &more].concat();
    let result = s.ends(&args).code(0).json();
    let rows = rows(&result);
    for name in [
        "memory, 2 nodes, PARTNER: until protected, median",
        "memory, 4 nodes, RS(2,2): until protected, median",
        "6 x 1 MiB, blocked, XOR / SINGLE, median",
        "6 x 1 MiB, blocked, RS(4,2) / SINGLE, median",
    ] {
        assert!(rows.iter().any(|r| r.0 == name && r.1 > 0.0), "no {name}: {rows:?}");
    }
    s.nothing_left();
}
