//! list, inspect, verify, halt on prefixes as agents leave them, whole and damaged.

mod common;

use common::{Scratch, dataset, ended};
use rustix::mount::{MountFlags, UnmountFlags};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Stdio;

fn three(s: &Scratch) {
    dataset(&s.prefix(), &s.path(""), 1, "ckpt.1", 1);
    dataset(&s.prefix(), &s.path(""), 2, "ckpt.2", 1);
    dataset(&s.prefix(), &s.path(""), 3, "out\u{e9}", 2);
}

fn flip(path: &Path, at: u64) {
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
}

#[test]
fn list_shows_datasets_and_which_is_the_newest_checkpoint() {
    let s = Scratch::new();
    assert!(s.ends(&["list"]).code(0).out.contains("no datasets"));
    assert_eq!(
        std::fs::read_dir(s.prefix()).unwrap().count(),
        0,
        "a tool that looks writes nothing"
    );
    three(&s);
    let out = s.ends(&["list"]).code(0).out;
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 4, "{out}");
    let words = ["2", "ckpt.2", "checkpoint", "4", "35.2 KiB", "2024-02-29 12:34:56Z", "newest"];
    assert!(words.iter().all(|w| lines[2].contains(w)), "{out}");
    assert!(lines[1].contains("complete") && lines[3].contains("output"), "{out}");
    let json = s.ends(&["list", "--json"]).code(0).json();
    let sets = json["datasets"].as_array().unwrap();
    assert_eq!(sets.len(), 3);
    assert_eq!(sets[1]["state"], "newest");
    assert_eq!((&sets[2]["name"], &sets[2]["output"]), (&"outé".into(), &true.into()));
    assert_eq!((sets[0]["ranks"].as_u64(), sets[0]["bytes"].as_u64()), (Some(4), Some(36006)));
    assert_eq!(json["lease"], serde_json::Value::Null);
    // By the environment, and by SCR's name for it.
    let mut command = s.stanchion(&["list", "--json"]);
    command.current_dir("/").env("SCR_PREFIX", s.prefix());
    assert_eq!(ended(command).code(0).json()["datasets"].as_array().unwrap().len(), 3);
}

#[test]
fn inspect_by_number_and_by_name() {
    let s = Scratch::new();
    three(&s);
    for which in ["2", "ckpt.2"] {
        let out = s.ends(&["inspect", which]).code(0).out;
        for part in ["'ckpt.2' (number 2", "XOR", "ckpt.2/rank 3", "9003"] {
            assert!(out.contains(part), "'{part}' is not in {out}");
        }
        let json = s.ends(&["inspect", which, "--json"]).code(0).json();
        let files = json["file_list"].as_array().unwrap();
        assert_eq!(files.len(), 4);
        assert_eq!((files[2]["rank"].as_u64(), files[2]["node"].as_u64()), (Some(2), Some(1)));
        assert_eq!(files[2]["path"], "ckpt.2/rank 2");
    }
    s.ends(&["inspect", "ckpt.9\n"]).code(1).says(&["no dataset 'ckpt.9\\n'", "stanchion list"]);
}

#[test]
fn verify_reads_every_byte_and_names_what_is_damaged() {
    let s = Scratch::new();
    s.ends(&["verify", "--all"]).code(1).says(&["no datasets"]);
    three(&s);
    let good = s.ends(&["verify", "--all"]).code(0);
    assert_eq!(good.out.matches("good").count(), 3, "{}", good.out);
    assert!(good.err.is_empty(), "progress is for terminals: {}", good.err);
    flip(&s.prefix().join("ckpt.2/rank 3"), 5000);
    std::fs::remove_file(s.prefix().join("ckpt.2/rank 0")).unwrap();
    let bad = s.ends(&["verify"]).code(1);
    for part in [
        "'ckpt.2' (number 2): DAMAGED",
        "node 1: rank 3: ckpt.2/rank 3: bytes do not match",
        "ckpt.2/rank 0",
    ] {
        assert!(bad.out.contains(part), "'{part}' is not in {}", bad.out);
    }
    let json = s.ends(&["verify", "--all", "--json"]).code(1).json();
    assert_eq!(json["good"], false);
    let sets = json["datasets"].as_array().unwrap();
    assert_eq!((&sets[0]["good"], &sets[1]["good"]), (&true.into(), &false.into()));
    let ranks: Vec<_> =
        sets[1]["troubles"].as_array().unwrap().iter().map(|t| t["rank"].as_u64()).collect();
    assert_eq!(ranks, [Some(0), Some(3)]);
    s.ends(&["verify", "ckpt.1"]).code(0);
}

#[test]
fn truncated_and_swapped_files_are_damage() {
    let s = Scratch::new();
    three(&s);
    let path = |name: &str| s.prefix().join(name);
    std::fs::rename(path("ckpt.1/rank 0"), path("x")).unwrap();
    std::fs::rename(path("ckpt.1/rank 1"), path("ckpt.1/rank 0")).unwrap();
    std::fs::rename(path("x"), path("ckpt.1/rank 1")).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(path("ckpt.2/rank 2")).unwrap();
    file.set_len(100).unwrap();
    // A file of an older dataset in the place of the newer one's.
    std::fs::copy(path("ckpt.1/rank 3"), path("out\u{e9}/rank 3")).unwrap();
    let out = s.ends(&["verify", "--all"]).code(1).out;
    for part in [
        "rank 0: ckpt.1/rank 0",
        "rank 1: ckpt.1/rank 1",
        "rank 2: ckpt.2/rank 2: the file has 100 bytes",
    ] {
        assert!(out.contains(part), "'{part}' is not in {out}");
    }
    assert!(out.contains("rank 3: outé/rank 3: bytes do not match"), "{out}");
}

#[test]
fn damaged_records_and_manifests_are_named_and_hide_no_others() {
    let s = Scratch::new();
    three(&s);
    let index: Vec<_> = std::fs::read_dir(s.prefix().join(".stanchion/index"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    let third = index.iter().find(|p| p.to_string_lossy().contains("000000000003.")).unwrap();
    flip(third, 100);
    let listed = s.ends(&["list"]).code(0);
    assert!(listed.out.contains("ckpt.2") && !listed.out.contains("out"), "{}", listed.out);
    listed.says(&["warning", "000000000003.", "left out"]);
    s.ends(&["verify", "--all"]).code(1).says(&["000000000003."]);
    assert_eq!(s.ends(&["list", "--json"]).code(0).json()["bad"].as_array().unwrap().len(), 1);
    let data = s.prefix().join(".stanchion/data");
    let second = std::fs::read_dir(&data)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.to_string_lossy().contains("000000000002."))
        .unwrap();
    flip(&second.join("slot.000001"), 50);
    s.ends(&["inspect", "2"]).code(1).says(&["node 1"]);
    assert!(s.ends(&["verify", "2"]).code(1).out.contains("node 1"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let s = Scratch::new();
    for no in 1..40 {
        dataset(&s.prefix(), &s.path(""), no, &format!("ckpt.{no}"), 1);
    }
    for args in [
        &["list"][..],
        &["list", "--json"],
        &["verify", "--all"],
        &["inspect", "1"],
        &["config"],
        &["help"],
    ] {
        let mut child =
            s.stanchion(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{args:?}");
        assert!(out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn halt_is_set_shown_and_withdrawn() {
    let s = Scratch::new();
    assert!(s.ends(&["halt", "--show"]).code(0).out.contains("no wish"));
    let text = s.ends(&["halt"]).code(0).out;
    assert!(
        text.contains("after the next complete checkpoint") && text.contains("no run uses"),
        "{text}"
    );
    s.ends(&["halt", "--after-checkpoints", "3"]).code(0);
    s.ends(&["halt", "--before", "2030-01-31T12:00:00Z"]).code(0);
    let json = s.ends(&["halt", "--show", "--json"]).code(0).json();
    let halt = &json["halt"];
    assert_eq!((&halt["now"], &halt["after_checkpoints"]), (&true.into(), &3.into()));
    assert_eq!(halt["before_unix_s"], 1_896_091_200u64);
    s.ends(&["run", "--", "true"]).code(6).says(&["wish to halt", "stanchion halt --unset"]);
    assert!(s.ends(&["halt", "--unset"]).code(0).out.contains("no wish"));
    s.ends(&["run", "--", "true"]).code(0);
    s.nothing_left();
}

#[test]
fn a_prefix_or_cache_that_is_missing_or_no_directory() {
    let s = Scratch::new();
    std::fs::write(s.path("file"), "").unwrap();
    for name in ["none", "file"] {
        let path = s.path(name);
        let path = path.to_str().unwrap();
        for args in [&["list"][..], &["verify", "--all"], &["halt"], &["inspect", "x"]] {
            s.ends(&[args, &["--prefix", path]].concat()).code(7).says(&["prefix", path]);
        }
        s.ends(&["run", "--prefix", path, "--", "true"]).code(7).says(&["prefix", path]);
        s.ends(&["run", "--cache-dir", path, "--", "true"]).code(7).says(&["cache", path]);
    }
    s.nothing_left();
}

#[test]
fn a_prefix_where_this_user_may_not_write() {
    use std::os::unix::fs::PermissionsExt;
    if rustix::process::geteuid().is_root() {
        eprintln!("SKIP prefix without the right to write: root may write everywhere");
        return;
    }
    let s = Scratch::new();
    let mode =
        |mode| std::fs::set_permissions(s.prefix(), std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    s.ends(&["run", "--", "true"]).code(7).says(&["prefix", "Permission denied", "right to write"]);
    s.ends(&["list"]).code(0);
    mode(0o755);
    s.nothing_left();
}

/// A small file system of its own; `None` where this user may not mount.
struct Small(std::path::PathBuf);

impl Small {
    fn mount(path: &Path, size: &str) -> Option<Small> {
        std::fs::create_dir(path).unwrap();
        let options = std::ffi::CString::new(format!("size={size},mode=700")).unwrap();
        match rustix::mount::mount(
            "none",
            path,
            "tmpfs",
            MountFlags::empty(),
            Some(options.as_c_str()),
        ) {
            Ok(()) => Some(Small(path.to_owned())),
            Err(e) => {
                eprintln!(
                    "SKIP small file systems: mounting needs rights that this user does not have ({e})"
                );
                None
            }
        }
    }

    fn read_only(&self) {
        let flags = MountFlags::RDONLY;
        rustix::mount::mount_remount(&self.0, flags, c"").unwrap();
    }

    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.join("ballast")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn read_only_and_full_file_systems() {
    let s = Scratch::new();
    let Some(small) = Small::mount(&s.path("small"), "256k") else { return };
    let path = small.0.to_str().unwrap().to_owned();
    dataset(&small.0, &s.path(""), 1, "ckpt.1", 1);
    small.fill();
    s.ends(&["run", "--prefix", &path, "--", "true"]).code(7).says(&[
        &path,
        "no space is left",
        "make room",
    ]);
    s.ends(&["halt", "--prefix", &path]).code(7).says(&["no space is left"]);
    // What is there can be looked at.
    s.ends(&["verify", "--all", "--prefix", &path]).code(0);
    std::fs::remove_file(small.0.join("ballast")).unwrap();
    small.read_only();
    s.ends(&["run", "--prefix", &path, "--", "true"]).code(7).says(&[
        &path,
        "Read-only",
        "--prefix",
    ]);
    s.ends(&["run", "--cache-dir", &path, "--", "true"]).code(7).says(&[
        &path,
        "Read-only",
        "cache_dir",
    ]);
    s.ends(&["halt", "--prefix", &path]).code(7).says(&["Read-only"]);
    s.ends(&["list", "--prefix", &path]).code(0);
    s.nothing_left();
}
