//! `stanchion bench code`: its result has its form. How fast anything is, is not asserted.

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
