//! SCR's interface as C and C++ programs see it. Each scene is a process: the library has one context.

#[path = "../../stanchion-client/tests/fake/cc.rs"]
mod cc;
#[path = "../../stanchion-client/tests/fake/mod.rs"]
mod fake;

use cc::{
    compile, compile_with, exports, good, prototypes_of_header, prototypes_of_rust, repository, run,
};
use fake::{Fake, Model, Reply, failed};
use stanchion::Code;
use stanchion_format::client::{Ask, Request};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const HEADER: &str = include_str!("../../../include/scr.h");

#[test]
fn header_source_and_library_agree() {
    let header = prototypes_of_header(HEADER, "SCR_");
    assert_eq!(header.len(), 18);
    let mut rust = prototypes_of_rust(include_str!("../src/lib.rs"), "SCR_");
    rust.extend(prototypes_of_rust(include_str!("../src/configf.rs"), "SCR_"));
    rust.sort();
    for (h, r) in header.iter().zip(&rust) {
        let mut fixed = h.arguments.clone();
        // Rust sees only the first of SCR_Configf's.
        fixed.retain(|t| t != "...");
        assert_eq!((&h.name, &h.result, &fixed), (&r.name, &r.result, &r.arguments));
    }
    let names: Vec<_> = header.iter().map(|p| p.name.clone()).collect();
    assert_eq!(exports("scr"), names, "nothing else leaves the library");
    assert!(HEADER.contains(&format!("#define SCR_MAX_FILENAME {}", scr::SCR_MAX_FILENAME)));
}

/// The program of all scenes, as C and as C++.
fn programs() -> &'static (tempfile::TempDir, [PathBuf; 2]) {
    static PROGRAMS: OnceLock<(tempfile::TempDir, [PathBuf; 2])> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let tmp = tempfile::tempdir().unwrap();
        let source = repository().join("crates/stanchion-scr/tests/c/scr_calls.c");
        let both =
            [false, true].map(|cpp| compile(tmp.path(), cpp, "scr", std::slice::from_ref(&source)));
        (tmp, both)
    })
}

/// Plays a scene in C and in C++; gives what the agent knows and what came on standard error, each time.
fn play(
    arguments: &[&str],
    variables: &[(&str, &str)],
    fake: impl Fn() -> Fake,
    check: impl Fn(&Model, &[Request], &str),
) {
    for program in &programs().1 {
        let fake = fake();
        let nodes = fake.socket().to_str().unwrap().to_owned();
        let mut variables = variables.to_vec();
        variables.push(("STANCHION_NODES", &nodes));
        let said = good(run(program, arguments, &variables, fake.root()));
        let (model, requests) = fake.end();
        check(&model, &requests, &said);
    }
}

fn hello(requests: &[Request]) -> Vec<(String, String)> {
    match &requests[0] {
        Request::Hello { settings, .. } => settings.clone(),
        other => panic!("{other:?}"),
    }
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.into(), value.into())
}

#[test]
fn a_job_from_start_to_end() {
    play(&["life"], &[], Fake::model, |model, requests, said| {
        let own = requests.iter().find_map(|r| match r {
            Request::Collective { ask: Ask::Complete, own } => Some(own),
            _ => None,
        });
        let files: Vec<_> = own.unwrap().files.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(files, ["a/f", "b/f"]);
        assert!(requests.iter().any(|r| matches!(r,
            Request::Collective { ask: Ask::Begin { name, flags: 1 }, .. } if name.is_empty())));
        // Failures are told by way of the agent while there is one.
        assert!(
            model
                .warnings
                .iter()
                .any(|w| w.contains("rank 0: SCR_Route_file") && w.contains("c/f"))
        );
        assert!(!model.warnings.iter().any(|w| w.contains("SCR_Drop")));
        for line in said.lines() {
            assert!(line.contains("SCR_Finalize") || line.contains("SCR_Init"), "{said}");
        }
    });
}

#[test]
fn wrong_arguments_and_orders_are_refused() {
    play(&["abuse"], &[], Fake::model, |model, requests, _| {
        assert_eq!(model.complete.len(), 1);
        let asked: Vec<_> = requests
            .iter()
            .filter_map(|r| match r {
                Request::Collective { ask, .. } => Some(ask.verb()),
                _ => None,
            })
            .collect();
        assert_eq!(asked, ["start_restart", "start", "complete", "finalize"], "nothing refused");
        assert!(model.warnings.iter().any(|w| w.contains("the path leaves the prefix")));
    });
}

#[test]
fn settings_before_and_after_init() {
    let variables = [("SCR_FETCH", "1"), ("SCR_CRC_ON_COPY", "1"), ("SCR_SOMETHING", "1")];
    play(&["config"], &variables, Fake::model, |model, requests, said| {
        let expected = [pair("flush_every", "6"), pair("scheme", "PARTNER"), pair("set_size", "4")];
        assert_eq!(hello(requests), expected);
        let changed = requests.iter().find_map(|r| match r {
            Request::Collective { own, .. } => Some(own.settings.clone()),
            _ => None,
        });
        assert_eq!(changed.unwrap(), [pair("flush_every", "7")]);
        for word in ["SCR_CRC_ON_COPY", "SCR_SOMETHING", "CKPT=1 TYPE=XOR"] {
            assert_eq!(model.warnings.iter().filter(|w| w.contains(word)).count(), 1, "{word}");
        }
        assert!(model.warnings.iter().any(|w| w.contains("cache_datasets")));
        assert_eq!(said, "");
    });
}

#[test]
fn other_ranks_leave_common_warnings_to_the_first() {
    let variables = [("SCR_CRC_ON_COPY", "1"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    play(&["set", "SCR_SOMETHING=1"], &variables, Fake::model, |model, _, said| {
        assert!(model.warnings.is_empty() && said.is_empty());
    });
}

#[test]
fn malformed_settings_stop_init_with_their_name() {
    for (line, words) in [
        ("SCR_SET_SIZE=many", "set_size"),
        ("SCR_COPY_TYPE=RAID", "SINGLE, PARTNER, XOR"),
        ("A B", "sets or asks"),
    ] {
        play(&["late", line], &[], Fake::model, |_, requests, said| {
            assert!(requests.is_empty());
            assert!(said.contains("SCR_Init") && said.contains(words), "{said}");
        });
    }
    play(&["init"], &[("SCR_FLUSH", "x")], Fake::model, |_, requests, said| {
        assert!(requests.is_empty() && said.contains("flush_every"), "{said}");
    });
}

#[test]
fn what_is_fixed_at_launch_must_fit_or_is_ignored_aloud() {
    for line in ["SCR_PREFIX=/elsewhere", "SCR_FETCH=0", "SCR_CURRENT=older"] {
        play(&["late", line], &[], Fake::model, |model, requests, said| {
            assert!(hello(requests).is_empty());
            let name = line.split_once('=').unwrap().0;
            assert!(model.warnings[0].contains(name), "{:?}", model.warnings);
            assert_eq!((model.warnings.len(), said), (1, ""));
        });
    }
    // Another name of the same directory is the same prefix.
    for line in ["SCR_PREFIX=prefix/../prefix/", "SCR_FETCH=1"] {
        play(&["set", line], &[], Fake::model, |model, _, _| {
            assert!(model.warnings.is_empty(), "{:?}", model.warnings);
        });
    }
    play(&["set", "SCR_CACHE_BASE=/ssd"], &[], Fake::model, |model, requests, _| {
        assert!(hello(requests).is_empty());
        assert!(
            model.warnings[0].contains("SCR_CACHE_BASE") && model.warnings[0].contains("ignored")
        );
    });
}

#[test]
fn without_an_agent_the_reason_is_on_standard_error() {
    for program in &programs().1 {
        let said = good(run(program, &["init"], &[], Path::new("/")));
        assert_eq!(
            said,
            "stanchion: rank 0: SCR_Init: no agent: start the program with `stanchion run`\n"
        );
    }
}

#[test]
fn a_refused_rank_says_why() {
    let refuse =
        |_: usize, _: &Request| Some(Reply::Answer(failed(Code::Timeout, "rank 3 did not come")));
    let fake = || Fake::with(|_| {}, refuse);
    play(&["init"], &[], fake, |_, _, said| {
        assert_eq!(said, "stanchion: rank 0: SCR_Init: rank 3 did not come\n");
    });
}

#[test]
fn disabled_calls_pass_through() {
    play(&["disabled"], &[("SCR_ENABLE", "0")], Fake::model, |_, requests, said| {
        assert!(requests.is_empty() && said.is_empty(), "{said}");
    });
}

/// Programs of examples/scr, written by somebody else for SCR's interface, as jobs of one rank: each is run
/// with each of its lists of arguments in turn, against one agent.
fn example(name: &str, runs: &[&[&str]]) {
    let tmp = tempfile::tempdir().unwrap();
    let root = repository();
    let sources =
        [format!("{name}.c"), "common.c".into()].map(|f| root.join("examples/scr").join(f));
    let mpi = root.join("crates/stanchion-scr/tests/c/one");
    let program = compile_with(tmp.path(), false, "scr", &sources, &[mpi]);
    let fake = Fake::model();
    let nodes = fake.socket().to_str().unwrap().to_owned();
    let prefix = fake.root().join("prefix");
    for arguments in runs {
        good(run(&program, arguments, &[("STANCHION_NODES", &nodes)], &prefix));
    }
}

#[test]
fn example_serial() {
    let runs: [&[&str]; 2] =
        [&["--steps", "3", "--expect-restart", "0"], &["--steps", "5", "--expect-restart", "3"]];
    example("serial", &runs);
}

#[test]
fn example_test_config() {
    example("test_config", &[&["--expect-restart", "0"], &["--expect-restart", "1"]]);
}

#[test]
fn example_test_api() {
    let runs: [&[&str]; 2] =
        [&["--steps", "3", "--expect-restart", "0"], &["--steps", "5", "--expect-restart", "3"]];
    example("test_api", &runs);
    example(
        "test_api",
        &runs.map(|r| [r, &["--style", "checkpoint"]].concat()).each_ref().map(|v| &v[..]),
    );
}

#[test]
fn example_test_output() {
    let runs: [&[&str]; 2] =
        [&["--steps", "6", "--expect-restart", "0"], &["--steps", "9", "--expect-restart", "5"]];
    example("test_output", &runs);
}

#[test]
fn example_test_restart_reject() {
    let runs: [&[&str]; 3] = [
        &["--steps", "3", "--seed", "1", "--rejects", "0"],
        &["--steps", "3", "--seed", "2", "--expect-restart", "2"],
        &["--rejects", "0", "--expect-restart", "3", "--expect-seed", "2", "--steps", "3"],
    ];
    example("test_restart_reject", &runs);
}

#[test]
fn example_test_current() {
    let runs: [&[&str]; 2] = [
        &["--steps", "6", "--expect-restart", "0"],
        &[
            "--drop",
            "6",
            "--delete",
            "5",
            "--current",
            "3",
            "--expect-restart",
            "3",
            "--steps",
            "4",
        ],
    ];
    example("test_current", &runs);
}

#[test]
fn example_test_halt() {
    example("test_halt", &[&["--steps", "3", "--expect-halt", "0"]]);
}
