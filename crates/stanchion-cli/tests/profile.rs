//! `stanchion profile`: what it says of programs whose writes are known.

mod common;

use common::{Ended, Scratch, ended};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// The library of this build: cargo puts it beside the tests.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libstanchion_profile.so")
}

struct Bench {
    scratch: Scratch,
    program: PathBuf,
}

impl Bench {
    fn new() -> Bench {
        let scratch = Scratch::new();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/profile_calls.c").to_owned();
        let program = scratch.path("profile_calls");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let built = Command::new(compiler)
            .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread"])
            .arg("-o")
            .arg(&program)
            .arg(source)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Bench { scratch, program }
    }

    fn command(&self, options: &[&str], command: &[&str]) -> Command {
        let args = [&["profile"], options, &["--"], command].concat();
        let mut command = self.scratch.stanchion(&args);
        command.env("STANCHION_PROFILE_LIB", library()).env("TMPDIR", self.scratch.path("c"));
        for name in ["PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"] {
            command.env_remove(name);
        }
        command
    }

    fn program(&self) -> &str {
        self.program.to_str().unwrap()
    }

    fn scene(&self, name: &str) -> (Value, Ended) {
        let out = self.scratch.path("report.json");
        let options = ["--json", "--out", out.to_str().unwrap()];
        let done = ended(self.command(&options, &[self.program(), name]));
        let text = std::fs::read_to_string(out)
            .unwrap_or_else(|e| panic!("{e}: {}\n{}", done.out, done.err));
        assert!(std::fs::read_dir(self.scratch.path("c")).unwrap().next().is_none(), "left");
        (serde_json::from_str(&text).unwrap(), done)
    }
}

/// (writes, bytes) of each class.
fn classes(report: &Value) -> Vec<(u64, u64)> {
    let class = |c: &Value| (c["writes"].as_u64().unwrap(), c["bytes"].as_u64().unwrap());
    report["profile"]["classes"].as_array().unwrap().iter().map(class).collect()
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("no {field} in {value:#}"))
}

/// The file pattern that ends so.
fn file<'a>(report: &'a Value, end: &str) -> &'a Value {
    let files = report["profile"]["files"].as_array().unwrap();
    files
        .iter()
        .find(|f| f["pattern"].as_str().unwrap().ends_with(end))
        .unwrap_or_else(|| panic!("no {end} in {files:#?}"))
}

#[test]
fn every_way_to_write_to_a_descriptor_is_counted() {
    let bench = Bench::new();
    let (report, done) = bench.scene("descriptors");
    let done = done.code(0);
    assert_eq!(done.out, "\0\0\0", "its output passes through");
    let expected = [
        (1, 15),            // dprintf
        (10, 1000),         // write
        (2, 2048),          // writev, pwritev
        (0, 0),             //
        (2, 10_000),        // pwrite
        (0, 0),             //
        (1, 70_000),        // write
        (0, 0),             //
        (2, 1_200_000),     // by the dup
        (0, 0),             //
        (2, 2 * (5 << 20)), // appending
    ];
    // 1024 bytes are still in the class up to 1 KiB.
    assert_eq!(classes(&report), expected);
    let profile = &report["profile"];
    assert_eq!((number(profile, "failed_writes"), number(profile, "renames")), (1, 1));
    let d = file(&report, "/d.#");
    let facts = ["files", "opens", "writes", "fsyncs", "jumps", "shared"].map(|f| number(d, f));
    // d.1 opened twice, d.3 once; d.3 has no write.
    assert_eq!(facts, [1, 3, 20, 2, 2, 0]);
    assert_eq!(profile["files"].as_array().unwrap().len(), 1, "{profile:#}");
    let [process] = &profile["processes"].as_array().unwrap()[..] else { panic!("{profile:#}") };
    assert_eq!(process["rank"], Value::Null);
    assert_eq!(process["program"], bench.program());
    assert!(number(process, "ns") > 0 && number(process, "fsync_ns") > 0);
}

#[test]
fn streams_are_counted_by_call() {
    let bench = Bench::new();
    let (report, done) = bench.scene("streams");
    done.code(0);
    let c = classes(&report);
    // fputs, fputc, fprintf, fwrite of 3; then seven of 200.
    assert_eq!((c[0], c[1]), ((4, 10 + 1 + 24 + 3), (7, 1400)));
    assert_eq!(number(&report["profile"]["classes"][1]["stdio"], "writes"), 7);
    let s = file(&report, "/s.#");
    let facts = ["files", "opens", "writes", "fsyncs", "jumps"].map(|f| number(s, f));
    assert_eq!(facts, [1, 1, 11, 1, 1]);
}

#[test]
fn threads_lose_nothing() {
    let bench = Bench::new();
    let (report, done) = bench.scene("threads");
    done.code(0);
    assert_eq!(classes(&report)[1], (4000, 400_000));
    let t = file(&report, "/t.#");
    assert_eq!(["files", "opens", "writes", "jumps"].map(|f| number(t, f)), [4, 4, 4000, 0]);
    let [process] = &report["profile"]["processes"].as_array().unwrap()[..] else { panic!() };
    assert_eq!((number(process, "files"), number(process, "bursts")), (4, 1));
}

#[test]
fn children_count_for_themselves() {
    let bench = Bench::new();
    let (report, done) = bench.scene("forks");
    done.code(0);
    let mut processes: Vec<[u64; 3]> = report["profile"]["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| ["writes", "bytes", "files"].map(|f| number(p, f)))
        .collect();
    processes.sort_unstable();
    // The shell's echo, the parent, its child.
    assert_eq!(processes, [[1, 11, 1], [12, 1200, 1], [13, 19_100, 2]]);
    let shared = report["profile"]["files"].as_array().unwrap();
    assert_eq!(shared.iter().map(|f| number(f, "shared")).sum::<u64>(), 1, "f.1: {shared:#?}");
}

#[test]
fn what_a_killed_process_wrote_is_known() {
    let bench = Bench::new();
    let (report, done) = bench.scene("killed");
    done.code(128 + 9);
    assert_eq!(report["exit_code"], 137);
    assert_eq!((classes(&report)[0], classes(&report)[3]), ((1, 10), (3, 3 * 4096)));
}

#[test]
fn exit_and_exec_lose_nothing() {
    let bench = Bench::new();
    let (report, done) = bench.scene("leaves");
    done.code(7);
    assert_eq!(classes(&report)[0], (1, 1));
    let (report, done) = bench.scene("exec");
    done.code(0);
    let processes = report["profile"]["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2);
    assert_eq!(processes[0]["pid"], processes[1]["pid"]);
    assert_eq!((classes(&report)[1], classes(&report)[4]), ((4, 400), (1, 8192)));
    let profile = &report["profile"];
    assert_eq!(
        (number(profile, "writable_maps"), number(profile, "writable_map_bytes")),
        (1, 8192)
    );
}

#[test]
fn bursts_and_what_follows_from_them() {
    let bench = Bench::new();
    let (report, done) = bench.scene("bursts");
    done.code(0);
    let bursts = report["profile"]["bursts"].as_array().unwrap();
    let bytes: Vec<u64> = bursts.iter().map(|b| number(b, "bytes")).collect();
    assert_eq!(bytes, [6 << 20; 3]);
    let advice = &report["advice"];
    assert_eq!((number(advice, "checkpoints"), number(advice, "chunk_bytes")), (3, 4 << 20));
    // 6 MiB in whole chunks, two kept and one under way.
    assert_eq!(number(advice, "pool_bytes"), 3 * (8 << 20));
    assert_eq!(advice["way_in"], "regions");
    let interval = advice["interval_s"].as_f64().unwrap();
    assert!((1.2..30.0).contains(&interval), "{interval}");
    assert_eq!(advice["best_interval_s"], Value::Null);
}

#[test]
fn the_report_for_people() {
    let bench = Bench::new();
    let script = format!("for r in 0 1; do PMI_RANK=$r PMI_SIZE=4 {} forks; done", bench.program());
    let dir = bench.scratch.path("records");
    let options = ["--mtbf-s", "3600", "--dir", dir.to_str().unwrap()];
    let text = ended(bench.command(&options, &["sh", "-c", &script])).code(0).out;
    for part in [
        "2 of 4 ranks wrote",
        "By size of a write",
        "64 - 256",
        "By process",
        "profile_calls",
        "By node",
        "/f.#",
        "Bursts (no write for 1 s begins the next)",
        "Way in:",
        "Pool:",
        "cannot be known from writes",
        "Daly",
    ] {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    // Kept; and not mixed with those of another run.
    assert!(std::fs::read_dir(&dir).unwrap().count() >= 6);
    ended(bench.command(&options, &["true"])).code(2).says(&["records of another run"]);
    let text = ended(bench.command(&[], &["true"])).code(0).out;
    assert!(text.contains("no write to a file was seen"), "{text}");
}

#[test]
fn what_is_preloaded_already_stays() {
    let bench = Bench::new();
    let mut command = bench.command(&[], &["sh", "-c", "echo $LD_PRELOAD"]);
    command.env("LD_PRELOAD", "libm.so.6");
    let text = ended(command).code(0).out;
    assert!(text.starts_with(&format!("libm.so.6:{}", library().display())), "{text}");
}

#[test]
fn wrong_usage() {
    let bench = Bench::new();
    for (options, program, code, parts) in [
        (&["--gap-s", "0"][..], "true", 2, &["--gap-s 0"][..]),
        (&["--gap-s", "x"], "true", 2, &["--gap-s"]),
        (&["--mtbf-s=-1"], "true", 2, &["--mtbf-s"]),
        (&[], "no-such-program-here", 2, &["'no-such-program-here'", "PATH"]),
        (&["--out", "/no/such/dir/x"], "true", 7, &["--out /no/such/dir/x"]),
        (&["--dir", "/proc/x"], "true", 7, &["records in /proc/x"]),
    ] {
        ended(bench.command(options, &[program])).code(code).says(parts);
    }
    let mut command = bench.command(&[], &["true"]);
    command.env("STANCHION_PROFILE_LIB", "/no/such/library.so");
    ended(command).code(2).says(&["STANCHION_PROFILE_LIB=/no/such/library.so"]);
}

#[test]
fn nothing_but_the_functions_that_it_replaces_leaves_the_library() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().nth(2)).collect();
    for name in ["open", "openat64", "write", "pwritev2", "fwrite", "__fprintf_chk", "fdatasync"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    assert!(names.iter().all(|n| !n.contains("stanchion") && !n.starts_with("_Z")), "{names:?}");
}
