//! Wrong usage: exit code 2, and a text that says what would be right. Settings: who wins.

mod common;

use common::{Scratch, ended};

#[test]
fn every_usage_error_has_code_2_and_says_what_is_wrong() {
    let s = Scratch::new();
    let cases: &[(&[&str], &[&str])] = &[
        (&[], &["Usage: stanchion"]),
        (&["frobnicate"], &["unrecognized subcommand 'frobnicate'"]),
        (&["run"], &["COMMAND", "-- <COMMAND>"]),
        (&["run", "--nodes", "x", "--", "true"], &["--nodes"]),
        (&["run", "--nodes", "0", "--", "true"], &["--nodes 0 is not between 1 and"]),
        (
            &["run", "--nodes", "131072", "--spares", "1", "--", "true"],
            &["--nodes and --spares are more than"],
        ),
        (&["run", "--scheme", "RAID", "--", "true"], &["scheme", "'RAID'", "SINGLE, PARTNER, XOR"]),
        (&["run", "--set-size", "1", "--", "true"], &["set_size", "'1'"]),
        (&["run", "--set", "novalue", "--", "true"], &["--set 'novalue'", "NAME=VALUE"]),
        (
            &["run", "--set", "flush_evry=1", "--", "true"],
            &["no setting 'flush_evry'", "did you mean 'flush_every'"],
        ),
        (&["run", "--set", "prefix=a\nb", "--", "true"], &["prefix", "\\n"]),
        (&["run", "--", "no-such-program-here"], &["'no-such-program-here'", "PATH"]),
        (&["run", "--", "./not\nthere"], &["'./not\\nthere'", "No such file"]),
        (&["run", "--", "/etc/passwd"], &["'/etc/passwd'", "not an executable file"]),
        (&["inspect"], &["<NAME|NUMBER>"]),
        (&["verify", "--all", "x"], &["cannot be used with"]),
        (&["halt", "--now", "--show"], &["cannot be used with"]),
        (&["halt", "--before", "tomorrow"], &["'tomorrow' is no time", "+15m"]),
        (&["halt", "--after-checkpoints", "-1"], &["-1"]),
        (&["config", "prefx"], &["no setting 'prefx'", "did you mean 'prefix'"]),
        (&["config", "--markdown", "--json"], &["cannot be used with"]),
        (&["help", "exit-cods"], &["no help on 'exit-cods'"]),
        (&["bench", "routed"], &["--program"]),
        (&["bench", "routed", "--program", "/none"], &["--program /none"]),
        (&["bench", "routed", "--program", "/bin/sh", "--checkpoints", "1"], &["at least 2"]),
        (
            &["agent", "--id", "1", "--job", "x"],
            &["started by `stanchion run` and `scavenge` only"],
        ),
        (&["scavenge", "--cache", "x", "--job", "y"], &["cannot be used with"]),
        (&["scavenge", "--cache", "x", "--discard"], &["cannot be used with"]),
    ];
    for (args, parts) in cases {
        s.ends(args).code(2).says(parts);
    }
    let deep = s.path(&"d".repeat(90));
    let long = ["run", "--set", &format!("run_dir={}", deep.display()), "--", "true"];
    s.ends(&long).code(2).says(&["too long for sockets", "run_dir"]);
    s.nothing_left();
}

#[test]
fn malformed_environment_and_files_are_usage_errors() {
    let s = Scratch::new();
    for (name, value, parts) in [
        ("STANCHION_FLUSH_EVERY", "often", &["flush_every", "'often'", "count"][..]),
        ("STANCHION_NONSENSE", "1", &["STANCHION_NONSENSE"]),
        ("SCR_COPY_TYPE", "QUAD", &["scheme", "'QUAD'"]),
        ("SCR_CONF_FILE", "/no/such/file", &["/no/such/file"]),
    ] {
        let mut command = s.stanchion(&["run", "--", "true"]);
        command.env(name, value);
        ended(command).code(2).says(parts);
    }
    let mut command = s.stanchion(&["config"]);
    command.env("SCR_PREFIX", std::ffi::OsStr::new(&os(b"/\xff")));
    ended(command).code(2).says(&["SCR_PREFIX", "UTF-8"]);
    for (text, parts) in [
        ("nonsense\n", &[".scrconf", "line 1", "name = value"][..]),
        ("flush_every = x\n", &[".scrconf", "flush_every"]),
        ("# fine\nSCR_NO_SUCH = 1\n", &[".scrconf", "SCR_NO_SUCH"]),
    ] {
        std::fs::write(s.prefix().join(".scrconf"), text).unwrap();
        s.ends(&["run", "--", "true"]).code(2).says(parts);
    }
    std::fs::write(s.prefix().join(".scrconf"), vec![b'#'; 2 << 20]).unwrap();
    s.ends(&["config"]).code(2).says(&["longer than"]);
}

fn os(bytes: &[u8]) -> std::ffi::OsString {
    std::os::unix::ffi::OsStringExt::from_vec(bytes.to_vec())
}

/// (value, where from) of a setting.
fn value(s: &Scratch, name: &str, args: &[&str], env: &[(&str, &str)]) -> (String, String) {
    let mut command = s.stanchion(&[&["config", name, "--json"], args].concat());
    command.envs(env.iter().copied());
    let json = ended(command).code(0).json();
    let text = |field: &str| json[0][field].as_str().unwrap().to_owned();
    (text("value"), text("origin"))
}

#[test]
fn command_line_before_our_variable_before_scrs_before_file_before_default() {
    let s = Scratch::new();
    let own = ("STANCHION_FLUSH_EVERY", "3");
    let scr = ("SCR_FLUSH", "4");
    let line = ["--set", "flush_every=2"];
    let (v, from) = value(&s, "flush_every", &[], &[]);
    assert_eq!((v.as_str(), from.as_str()), ("10", "default"));
    std::fs::write(s.prefix().join(".stanchion.conf"), "SCR_FLUSH = 5\n").unwrap();
    let (v, from) = value(&s, "flush_every", &[], &[]);
    assert!(v == "5" && from.contains(".stanchion.conf"), "{v} {from}");
    let (v, from) = value(&s, "flush_every", &[], &[scr]);
    assert_eq!((v.as_str(), from.as_str()), ("4", "environment: SCR_FLUSH"));
    let (v, from) = value(&s, "flush_every", &[], &[scr, own]);
    assert_eq!((v.as_str(), from.as_str()), ("3", "environment: STANCHION_FLUSH_EVERY"));
    let (v, from) = value(&s, "SCR_FLUSH", &line, &[scr, own]);
    assert_eq!((v.as_str(), from.as_str()), ("2", "command line"));
    // A named file replaces the one in the prefix.
    let other = s.path("other.conf");
    std::fs::write(&other, "flush_every=6\n").unwrap();
    let (v, _) = value(&s, "flush_every", &[], &[("SCR_CONF_FILE", other.to_str().unwrap())]);
    assert_eq!(v, "6");
}

#[test]
fn variables_without_a_meaning_are_named_once() {
    let s = Scratch::new();
    let mut command = s.stanchion(&["config", "prefix"]);
    command.env("SCR_CRC_ON_COPY", "1").env("SCR_XYZ", "1");
    std::fs::write(s.prefix().join(".scrconf"), "CKPT=0 INTERVAL=1 TYPE=XOR\n").unwrap();
    let err = ended(command).code(0).err;
    for part in ["SCR_CRC_ON_COPY has no meaning here", "SCR_XYZ", "CKPT=0"] {
        assert_eq!(err.matches(part).count(), 1, "{err}");
    }
}

#[test]
fn the_whole_table_as_json_and_text() {
    let s = Scratch::new();
    let all = s.ends(&["config", "--json"]).code(0).json();
    assert_eq!(all.as_array().unwrap().len(), stanchion_format::config::SETTINGS.len());
    let text = s.ends(&["config"]).code(0).out;
    for setting in stanchion_format::config::SETTINGS {
        assert!(text.contains(setting.name));
    }
}

#[test]
fn docs_config_md_is_current() {
    let s = Scratch::new();
    let generated = s.ends(&["config", "--markdown"]).code(0).out;
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    let kept = std::fs::read_to_string(kept).unwrap();
    assert!(kept == generated, "run `stanchion config --markdown > docs/config.md`");
}

#[test]
fn exit_codes_are_documented() {
    let s = Scratch::new();
    let help = s.ends(&["help", "exit-codes"]).code(0).out;
    let docs =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md")).unwrap();
    let codes: Vec<&str> =
        help.lines().skip(2).filter_map(|l| l.split_whitespace().next()).collect();
    assert_eq!(codes.len(), 14, "{help}");
    for code in codes {
        assert!(docs.contains(&format!("| {code} |")), "exit code {code} is not in docs/cli.md");
    }
    s.ends(&["help"]).code(0);
    s.ends(&["help", "run"]).code(0);
    s.ends(&["--version"]).code(0);
}
