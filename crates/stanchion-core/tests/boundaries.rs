//! What core may know of the world, and who may depend on whom (DESIGN.md, section 4).

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages that bring I/O, clocks or threads of their own.
const WORLDLY: &[&str] = &[
    "tokio",
    "rustix",
    "libc",
    "mio",
    "socket2",
    "nix",
    "snow",
    "tempfile",
    "async-std",
    "getrandom",
];
/// Words that mean I/O, a clock or a thread in a source file.
const WORDS: &[&str] = &[
    "std::fs",
    "std::net",
    "std::thread",
    "std::process",
    "std::os",
    "std::env",
    "std::io",
    "Instant",
    "SystemTime",
    "println!",
    "unsafe",
];
/// For each crate, the crates of ours that it may depend on.
const MAY: &[(&str, &[&str])] = &[
    ("stanchion-format", &[]),
    ("stanchion-code", &[]),
    ("stanchion-core", &["format", "code"]),
    ("stanchion-mem", &["format"]),
    ("stanchion-io", &["format", "code"]),
    ("stanchion-client", &["format", "mem"]),
    ("stanchion-scr", &["format", "mem", "client"]),
    ("stanchion-preload", &["format", "mem", "client"]),
    ("stanchion-agent", &["format", "code", "core", "mem", "io"]),
    ("stanchion-sim", &["format", "code", "core"]),
    ("stanchion-cli", &["format", "code", "core", "mem", "io", "agent", "client", "sim"]),
];

fn metadata() -> Value {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline", "--manifest-path"])
        .arg(manifest)
        .output()
        .expect("cargo runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("cargo metadata is JSON")
}

/// Normal dependencies by package name.
fn dependencies(meta: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let names: BTreeMap<String, String> =
        list(&meta["packages"]).iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let mut all = BTreeMap::new();
    for node in list(&meta["resolve"]["nodes"]) {
        let deps = list(&node["deps"])
            .iter()
            .filter(|d| list(&d["dep_kinds"]).iter().any(|k| k["kind"].is_null()))
            .map(|d| names[&text(&d["pkg"])].clone())
            .collect();
        all.insert(names[&text(&node["id"])].clone(), deps);
    }
    all
}

#[test]
fn core_depends_on_nothing_that_touches_the_world() {
    let all = dependencies(&metadata());
    let mut seen = BTreeSet::from(["stanchion-core".to_owned()]);
    let mut open: Vec<String> = seen.iter().cloned().collect();
    while let Some(name) = open.pop() {
        for dep in all.get(&name).into_iter().flatten() {
            if seen.insert(dep.clone()) {
                open.push(dep.clone());
            }
        }
    }
    assert!(seen.len() > 3, "the tree was read: {seen:?}");
    let worldly: Vec<&String> = seen.iter().filter(|n| WORLDLY.contains(&n.as_str())).collect();
    assert!(worldly.is_empty(), "core depends on {worldly:?}");
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).expect("src can be listed") {
        let path = entry.expect("src can be listed").path();
        if path.is_dir() { out.extend(sources(&path)) } else { out.push(path) }
    }
    out
}

/// Is `word` in `code` as a word of its own?
fn speaks_of(code: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word).any(|(at, _)| {
        !part(code[..at].chars().next_back()) && !part(code[at + word.len()..].chars().next())
    })
}

#[test]
fn core_speaks_of_no_file_clock_or_thread() {
    let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(files.len() > 10, "{} files were found", files.len());
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a source is text");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let found = WORDS.iter().find(|w| speaks_of(code, w));
            assert!(found.is_none(), "{}:{}: {found:?}", path.display(), number + 1);
        }
    }
}

#[test]
fn dependencies_point_one_way() {
    let all = dependencies(&metadata());
    for (name, deps) in all.iter().filter(|(n, _)| n.starts_with("stanchion-")) {
        let Some((_, may)) = MAY.iter().find(|(n, _)| n == name) else {
            panic!("{name} is not in the table of DESIGN.md, section 4");
        };
        for dep in deps.iter().filter_map(|d| d.strip_prefix("stanchion-")) {
            assert!(may.contains(&dep), "{name} must not depend on stanchion-{dep}");
        }
    }
}
