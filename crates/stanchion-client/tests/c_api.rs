//! The native C interface: header and library agree, and C and C++ programs run with it.

#[path = "fake/cc.rs"]
mod cc;
mod fake;
#[path = "fake/pool.rs"]
mod pool;

use cc::{compile, exports, good, prototypes_of_header, prototypes_of_rust, repository, run};
use fake::{Fake, Reply};
use pool::Pool;
use stanchion_format::client::Code;
use std::path::{Path, PathBuf};

const HEADER: &str = include_str!("../../../include/stanchion.h");
const SOURCE: &str = concat!(
    include_str!("../src/capi.rs"),
    include_str!("../src/capi/regions.rs"),
    include_str!("../src/capi/streams.rs")
);

#[test]
fn header_source_and_library_agree() {
    let header = prototypes_of_header(HEADER, "stn_");
    assert_eq!(header.len(), 33);
    assert_eq!(header, prototypes_of_rust(SOURCE, "stn_"));
    let names: Vec<_> = header.iter().map(|p| p.name.clone()).collect();
    assert_eq!(exports("stanchion"), names, "nothing else leaves the library");
}

#[test]
fn the_headers_numbers_are_the_librarys() {
    let number = |name: &str| {
        let line = HEADER.lines().find(|l| l.starts_with(&format!("#define {name} "))).unwrap();
        let value = line.split_once('(').unwrap().1.split_once(')').unwrap().0;
        value.trim_end_matches('u').parse::<i64>().unwrap()
    };
    let codes = [
        ("INVALID", Code::Invalid),
        ("STATE", Code::State),
        ("TIMEOUT", Code::Timeout),
        ("AGENT", Code::Agent),
        ("MISMATCH", Code::Mismatch),
        ("DROPPED", Code::Dropped),
        ("REJECTED", Code::Rejected),
        ("NOTFOUND", Code::NotFound),
        ("RANKS", Code::Ranks),
        ("LEVEL", Code::Level),
        ("SPACE", Code::Space),
        ("IO", Code::Io),
        ("CLOSING", Code::Closing),
        ("PROTOCOL", Code::Protocol),
        ("INTERNAL", Code::Internal),
    ];
    for (name, code) in codes {
        assert_eq!(number(&format!("STN_ERR_{name}")), -(code as i64));
    }
    assert_eq!(HEADER.matches("#define STN_ERR_").count(), codes.len());
    assert_eq!(number("STN_FLAG_CHECKPOINT"), i64::from(stanchion::FLAG_CHECKPOINT));
    assert_eq!(number("STN_FLAG_OUTPUT"), i64::from(stanchion::FLAG_OUTPUT));
    assert_eq!(number("STN_NAME_SIZE"), stanchion::capi::STN_NAME_SIZE as i64);
    assert_eq!(number("STN_READ"), i64::from(stanchion::capi::streams::STN_READ));
    assert_eq!(number("STN_WRITE"), i64::from(stanchion::capi::streams::STN_WRITE));
    assert_eq!(number("STN_LEVEL_CACHED"), i64::from(stanchion::capi::STN_LEVEL_CACHED));
    assert_eq!(number("STN_LEVEL_PROTECTED"), i64::from(stanchion::capi::STN_LEVEL_PROTECTED));
    assert_eq!(number("STN_LEVEL_PERSISTENT"), i64::from(stanchion::capi::STN_LEVEL_PERSISTENT));
}

fn source() -> PathBuf {
    repository().join("crates/stanchion-client/tests/c/native.c")
}

fn play(program: &Path, scene: &str, fake: &Fake) {
    let nodes = fake.socket();
    let variables = [("STANCHION_NODES", nodes.to_str().unwrap())];
    let said = good(run(program, &[scene], &variables, fake.root()));
    assert_eq!(said, "", "the library prints nothing");
}

fn scenes(cpp: bool) {
    let tmp = tempfile::tempdir().unwrap();
    let program = compile(tmp.path(), cpp, "stanchion", &[source()]);
    for scene in ["life", "abuse", "fork", "streams"] {
        play(&program, scene, &Fake::model());
    }
    // The same with a pool, and with one that is too small for a part of it.
    for max in [64 << 20, 96 << 10] {
        let pool = Pool::new(32 << 10, max);
        play(&program, "streams", &pool.fake());
        assert!(pool.lent_ever() > 0);
    }
    let closes = Fake::with(|_| {}, |n, _| (n >= 2).then_some(Reply::Close));
    play(&program, "dead", &closes);
    assert_eq!(good(run(&program, &["nobody"], &[], tmp.path())), "");
}

#[test]
fn a_c_program_runs() {
    scenes(false);
}

#[test]
fn a_cpp_program_runs() {
    scenes(true);
}
