//! `stanchion run` around programs that need no SCR.

mod common;

use common::{Scratch, ended, gone, pidfd};
use rustix::process::Signal;
use serde_json::Value;
use stanchion_format::index::key_dir;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileTypeExt;

fn events<'a>(all: &'a [Value], kind: &str) -> Vec<&'a Value> {
    all.iter().filter(|e| e["event"] == kind).collect()
}

/// The status of the one job.
fn status(s: &Scratch) -> Value {
    let json = s.ends(&["status", "--json"]).code(0).json();
    let jobs = json["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 1, "{json}");
    jobs[0].clone()
}

fn pids(job: &Value) -> Vec<u32> {
    let agents = job["status"]["agents"].as_array().unwrap();
    agents.iter().map(|a| a["pid"].as_u64().unwrap() as u32).collect()
}

#[test]
fn a_program_without_scr_runs_and_nothing_is_left() {
    let s = Scratch::new();
    let ended = s.ends(&["run", "--nodes", "2", "--spares", "1", "--", "true"]).code(0);
    ended.says(&["2 nodes up, 1 spare ready", "launching the application", "success", "in all"]);
    s.nothing_left();
}

#[test]
fn a_failure_is_tried_again_and_its_code_is_named() {
    let s = Scratch::new();
    let count = s.path("count");
    let script = format!("echo x >> {}; exit 7", count.display());
    let (text, all) = s.run(&["--nodes", "2"], &script).end(3);
    assert!(text.contains("exit code 7") && text.contains("retries_max"), "{text}");
    assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), 3);
    assert_eq!(events(&all, "launching").len(), 3);
    let last = all.last().unwrap();
    assert_eq!((&last["event"], &last["exit_code"]), (&"outcome".into(), &3.into()));
    assert_eq!((&last["outcome"], &last["code"]), (&"app_failed".into(), &7.into()));
    let (text, all) = s.run(&["--runs-max", "1"], "kill -9 $$").end(3);
    assert!(text.contains("SIGKILL"), "{text}");
    assert_eq!(events(&all, "launching").len(), 1);
    s.nothing_left();
}

#[test]
fn a_later_try_may_succeed() {
    let s = Scratch::new();
    let mark = s.path("mark");
    let script = format!("test -e {0} || {{ touch {0}; exit 1; }}", mark.display());
    let (_, all) = s.run(&[], &script).end(0);
    assert_eq!(events(&all, "app_lost").len(), 1);
    assert_eq!(events(&all, "launching").len(), 2);
    s.nothing_left();
}

#[test]
fn the_application_sees_its_environment() {
    let s = Scratch::new();
    let out = s.path("out");
    let script = format!(
        "env > {}; for n in $(echo $STANCHION_NODES | tr : ' '); do test -S $n || exit 9; done",
        out.display()
    );
    let mut run =
        s.run_with(&["--nodes", "3", "--set", "flush_every=4"], &["sh", "-c", &script], |c| {
            c.env("SCR_COPY_TYPE", "PARTNER").env("SCR_PREFIX", "..//p/.");
        });
    run.event("launching");
    run.end(0);
    let env = std::fs::read_to_string(out).unwrap();
    let value = |name: &str| env.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='));
    let prefix = std::fs::canonicalize(s.prefix()).unwrap();
    assert_eq!(value("SCR_PREFIX"), prefix.to_str());
    assert_eq!(value("STANCHION_PREFIX"), prefix.to_str());
    assert_eq!(value("STANCHION_FLUSH_EVERY"), Some("4"));
    assert_eq!(value("SCR_COPY_TYPE"), Some("PARTNER"));
    assert_eq!(value("STANCHION_NODES").unwrap().split(':').count(), 3);
    // FM-V4: what a killed Open MPI leaves goes with the job.
    assert_eq!(value("PRTE_MCA_prte_tmpdir_base"), value("STANCHION_JOB_DIR"));
    assert!(!env.contains("secret"));
    s.nothing_left();
}

#[test]
fn output_is_passed_through_live() {
    let s = Scratch::new();
    let gate = s.fifo("gate");
    let mut run = s.run(&[], &format!("echo hello; read x < {}; echo bye", gate.display()));
    let mut out = BufReader::new(run.child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "hello\n");
    // It waits for this.
    std::fs::OpenOptions::new().write(true).open(&gate).unwrap().write_all(b"go\n").unwrap();
    line.clear();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "bye\n");
    run.end(0);
}

/// An application with a descendant that left its session and its parent, and ignores polite signals. It
/// tells when all of it stands.
fn stubborn(s: &Scratch) -> (String, std::path::PathBuf) {
    let ready = s.fifo("ready");
    let stray = format!(
        "trap \"\" TERM HUP INT; echo $$ > {}; while :; do sleep 1000; done",
        ready.display()
    );
    (format!("setsid sh -c '{stray}' & sleep 1000"), ready)
}

fn first_line(path: &std::path::Path) -> String {
    let mut line = String::new();
    BufReader::new(std::fs::File::open(path).unwrap()).read_line(&mut line).unwrap();
    line
}

#[test]
fn an_interrupt_ends_everything_strays_included() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let s = Scratch::new();
        let (script, ready) = stubborn(&s);
        let run = s.run(&["--nodes", "2", "--set", "mpi_launch_grace_ms=100"], &script);
        let stray = pidfd(first_line(&ready).trim().parse().unwrap());
        run.signal(signal);
        let (text, _) = run.end(130);
        assert!(text.contains("interrupted"), "{text}");
        assert!(gone(&stray));
        s.nothing_left();
    }
}

#[test]
fn a_runner_that_is_killed_leaves_nothing_behind() {
    // FM-F4, FM-V3, FM-V4
    let s = Scratch::new();
    let (script, ready) = stubborn(&s);
    let args = ["--nodes", "2", "--set", "mpi_launch_grace_ms=100", "--set", "orphan_grace_ms=100"];
    let mut run = s.run(&args, &script);
    let stray = pidfd(first_line(&ready).trim().parse().unwrap());
    let agents: Vec<_> = pids(&status(&s)).into_iter().map(pidfd).collect();
    run.signal(Signal::KILL);
    run.wait();
    assert!(gone(&stray), "the stray lives on");
    assert!(agents.iter().all(gone), "agents stay");
    s.nothing_left();
}

#[test]
fn agents_hold_no_pipe_of_whoever_started_the_runner() {
    let s = Scratch::new();
    let mut run =
        s.run_with(&["--nodes", "2", "--set", "orphan_grace_ms=20000"], &["sleep", "1000"], |c| {
            c.stderr(std::process::Stdio::null());
        });
    run.event("launching");
    let agents: Vec<_> = pids(&status(&s)).into_iter().map(pidfd).collect();
    run.signal(Signal::KILL);
    // Read to its end while the agents still wait for a new runner.
    let mut rest = Vec::new();
    run.child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
    run.wait();
    for agent in &agents {
        rustix::process::pidfd_send_signal(agent, Signal::TERM).expect("the agent still lives");
    }
    assert!(agents.iter().all(gone));
    // They had no time to give the lease back: it is in nobody's way.
    s.ends(&["run", "--", "true"]).code(0);
    s.nothing_left();
}

#[test]
fn inherited_descriptors_do_not_reach_agents() {
    let s = Scratch::new();
    let gate = s.fifo("gate");
    let script = format!(
        "exec {} run --nodes 1 -- sh -c 'ls -l /proc/*/fd 2>/dev/null > /dev/null; read x < {}' 9>{}",
        env!("CARGO_BIN_EXE_stanchion"),
        gate.display(),
        s.path("nine").display()
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).current_dir(s.prefix());
    command.env("STANCHION_RUN_DIR", s.path("")).env("STANCHION_CACHE_DIR", s.path("c"));
    let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    // The application opens the gate when it runs; so does this, and both go on.
    let mut open = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    let agent = pids(&status(&s))[0];
    let links: Vec<_> = std::fs::read_dir(format!("/proc/{agent}/fd"))
        .unwrap()
        .filter_map(|e| std::fs::read_link(e.unwrap().path()).ok())
        .collect();
    assert!(!links.is_empty() && !links.contains(&s.path("nine")), "{links:?}");
    open.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    s.nothing_left();
}

#[test]
fn a_lost_node_is_replaced_by_a_spare_and_without_one_the_run_ends() {
    let s = Scratch::new();
    let gate = s.fifo("gate");
    let first = s.fifo("first");
    // The first launch says that it is one and waits for ever, the second ends.
    let script = format!(
        "test -e {0}.2 && exit 0; touch {0}.2; echo > {1}; read x < {0}",
        gate.display(),
        first.display()
    );
    let mut run = s.run(&["--nodes", "2", "--spares", "1"], &script);
    run.event("launching");
    // Lost any earlier, the second launch would be the first.
    first_line(&first);
    let job = status(&s);
    let node = job["status"]["agents"].as_array().unwrap().iter().find(|a| a["node"] == 1).unwrap();
    let pid = node["pid"].as_u64().unwrap() as u32;
    rustix::process::pidfd_send_signal(pidfd(pid), Signal::KILL).unwrap();
    let lost = run.event("node_lost");
    assert_eq!((&lost["nodes"], &lost["silent"]), (&serde_json::json!([1]), &false.into()));
    assert_eq!(run.event("spare_used")["node"], 1);
    let (text, _) = run.end(0);
    assert!(
        text.contains("node 1 is lost") && text.contains("takes the place of node 1"),
        "{text}"
    );
    s.nothing_left();
    let mut run = s.run(&["--nodes", "2"], &format!("read x < {}", gate.display()));
    run.event("launching");
    let pid = pids(&status(&s))[0];
    rustix::process::pidfd_send_signal(pidfd(pid), Signal::KILL).unwrap();
    let (text, _) = run.end(5);
    assert!(text.contains("--spares"), "{text}");
    s.nothing_left();
}

#[test]
fn agents_that_do_not_come_up_in_time_end_the_run() {
    let s = Scratch::new();
    let args = ["run", "--nodes", "8", "--set", "start_timeout_ms=1", "--", "true"];
    s.ends(&args).code(11).says(&["agent"]);
    s.nothing_left();
}

#[test]
fn a_wish_to_halt_reaches_a_running_job() {
    let s = Scratch::new();
    let mut run = s.run(&[], "sleep 1000");
    run.event("launching");
    let text = s.ends(&["halt", "--immediately"]).code(0).out;
    assert!(text.contains("a run (process"), "{text}");
    let (text, _) = run.end(6);
    assert!(text.contains("halt --unset"), "{text}");
    s.nothing_left();
}

#[test]
fn a_second_run_with_the_prefix_waits_and_then_refuses() {
    // FM-C5
    let s = Scratch::new();
    let gate = s.fifo("gate");
    let mut run = s.run(&["--name", "first"], &format!("read x < {}", gate.display()));
    run.event("launching");
    let refused = s.ends(&["run", "--set", "lease_wait_ms=300", "--", "true"]).code(8);
    refused.says(&["the job 'first'", "waiting for it to leave", "lease_wait_ms"]);
    // With another run directory it is seen by its lease.
    let mut command = s.stanchion(&["run", "--set", "lease_wait_ms=300", "--", "true"]);
    std::fs::create_dir(s.path("o")).unwrap();
    command.env("STANCHION_RUN_DIR", s.path("o"));
    ended(command).code(8).says(&["a run (process"]);
    let mut command = s.stanchion(&["run", "--", "true"]);
    let waiting = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    std::fs::OpenOptions::new().write(true).open(&gate).unwrap().write_all(b"\n").unwrap();
    run.end(0);
    assert!(waiting.wait_with_output().unwrap().status.success());
    s.nothing_left();
}

#[test]
fn a_lease_that_an_agent_took_and_died_with_is_given_back() {
    // FM-V4, FM-S11: one that was cut off may have taken it, and is killed when it is late.
    let s = Scratch::new();
    let gate = s.fifo("gate");
    let mut run = s.run(
        &["--nodes", "1", "--set", "shutdown_timeout_ms=500"],
        &format!("read x < {}", gate.display()),
    );
    run.event("launching");
    let agents = pids(&status(&s));
    let lease = stanchion_format::index::LeaseFile {
        epoch: stanchion_format::ids::Epoch(1000),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        pid: agents[0],
        unix_s: 1,
        role: "orphans".into(),
    };
    let file = s.prefix().join(".stanchion/lease.json");
    std::fs::write(&file, serde_json::to_vec(&lease).unwrap()).unwrap();
    run.end(10);
    s.nothing_left();
    // Nobody's else is taken away: not one of a process that may live, nor one of another machine.
    for (host, pid) in [(lease.host.as_str(), std::process::id()), ("elsewhere", lease.pid)] {
        let mut run =
            s.run(&["--set", "shutdown_timeout_ms=500"], &format!("read x < {}", gate.display()));
        run.event("launching");
        let other = stanchion_format::index::LeaseFile { host: host.into(), pid, ..lease.clone() };
        std::fs::write(&file, serde_json::to_vec(&other).unwrap()).unwrap();
        run.end(10);
        assert!(file.exists(), "the lease of process {pid} on {host}");
        std::fs::remove_file(&file).unwrap();
    }
    s.nothing_left();
}

#[test]
fn status_tells_running_and_dead_jobs() {
    let s = Scratch::new();
    assert!(s.ends(&["status"]).code(0).out.contains("no jobs"));
    let mut run = s.run(&["--nodes", "2", "--spares", "1", "--name", "my job"], "sleep 1000");
    run.event("launching");
    let job = status(&s);
    assert_eq!((&job["state"], &job["info"]["name"]), (&"running".into(), &"my job".into()));
    assert_eq!(job["status"]["placement"], serde_json::json!([0, 1]));
    let nodes: Vec<_> =
        job["status"]["agents"].as_array().unwrap().iter().map(|a| a["node"].as_u64()).collect();
    assert_eq!(nodes, [Some(0), Some(1), None]);
    assert!(job["status"]["app_pid"].is_u64());
    let socket = std::path::PathBuf::from(job["status"]["agents"][0]["socket"].as_str().unwrap());
    assert!(std::fs::metadata(socket).unwrap().file_type().is_socket());
    let text = s.ends(&["status", "my job"]).code(0).out;
    assert!(text.contains("running") && text.contains("spare"), "{text}");
    s.ends(&["status", "another"]).code(1).says(&["no job 'another'"]);
    // Everybody is killed: nobody could clean up.
    let agents: Vec<_> = pids(&job).into_iter().map(pidfd).collect();
    for agent in &agents {
        rustix::process::pidfd_send_signal(agent, Signal::STOP).unwrap();
    }
    run.signal(Signal::KILL);
    run.wait();
    for agent in &agents {
        rustix::process::pidfd_send_signal(agent, Signal::KILL).unwrap();
        assert!(gone(agent));
    }
    assert!(s.ends(&["status"]).code(0).out.contains("nobody of it lives"));
    assert_eq!(s.ends(&["status", "--json"]).code(0).json()["jobs"][0]["state"], "dead");
    // The next run removes what was left, and does not wait for the dead one's lease.
    s.ends(&["run", "--", "true"]).code(0);
    s.nothing_left();
}

#[test]
fn strangers_questions_to_the_runner_are_harmless() {
    let s = Scratch::new();
    let mut run = s.run(&[], "sleep 1000");
    run.event("launching");
    let dir = std::path::PathBuf::from(status(&s)["dir"].as_str().unwrap());
    let mut socket = std::os::unix::net::UnixStream::connect(dir.join("runner.sock")).unwrap();
    socket.write_all(&[b'x'; 10_000]).ok();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok();
    assert!(answer.is_empty() || answer.contains("only question"), "{answer}");
    status(&s);
    run.signal(Signal::TERM);
    run.end(130);
}

#[test]
fn what_a_dead_run_left_half_flushed_is_removed() {
    // FM-C5, docs/format.md "In which order"
    let s = Scratch::new();
    let key = common::dataset(&s.prefix(), &s.path(""), 1, "whole", 1);
    let other = common::dataset(&s.prefix(), &s.path(""), 2, "half", 1);
    let dir = s.prefix().join(".stanchion");
    std::fs::remove_file(dir.join(format!("index/{}.json", key_dir(other)))).unwrap();
    std::fs::create_dir_all(dir.join("tmp").join(format!("{}.1", key_dir(other)))).unwrap();
    std::fs::write(dir.join("index/.new.half"), "torn").unwrap();
    s.ends(&["run", "--", "true"]).code(0);
    assert_eq!(std::fs::read_dir(dir.join("tmp")).unwrap().count(), 0);
    let kept: Vec<_> = std::fs::read_dir(dir.join("data")).unwrap().flatten().collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_eq!(kept[0].file_name().to_string_lossy(), key_dir(key));
    assert_eq!(std::fs::read_dir(dir.join("index")).unwrap().count(), 1);
    s.ends(&["verify"]).code(0);
}

#[test]
fn a_flush_that_a_dead_run_had_begun_is_completed() {
    // FM-L3
    let s = Scratch::new();
    let key = common::dataset(&s.prefix(), &s.path(""), 1, "late", 1);
    let dir = s.prefix().join(".stanchion");
    let tmp = dir.join("tmp").join(format!("{}.1", key_dir(key)));
    let staged = tmp.join("late/rank 3");
    std::fs::create_dir_all(tmp.join(".stanchion")).unwrap();
    std::fs::create_dir_all(staged.parent().unwrap()).unwrap();
    let record = dir.join(format!("index/{}.json", key_dir(key)));
    std::fs::rename(record, tmp.join(".stanchion/record.json")).unwrap();
    std::fs::rename(s.prefix().join("late/rank 3"), staged).unwrap();
    assert!(s.ends(&["list"]).code(0).out.contains("no datasets"));
    s.ends(&["run", "--", "true"]).code(0).says(&["number 1", "complete now"]);
    let listed = s.ends(&["list", "--json"]).code(0).json();
    assert_eq!(listed["datasets"][0]["name"], "late");
    s.ends(&["verify"]).code(0);
    assert_eq!(std::fs::read_dir(dir.join("tmp")).unwrap().count(), 0);
}

#[test]
fn a_job_too_small_for_its_scheme_is_told_what_fits() {
    let s = Scratch::new();
    let ended = s.ends(&["run", "--nodes", "2", "--scheme", "RS(4,2)", "--", "true"]).code(2);
    ended.says(&["too small", "needs sets of at least 3 nodes", "What fits is XOR with sets of 2"]);
    let groups = s.path("groups");
    std::fs::write(&groups, "rack a: 0-2\nrack b: 3\n").unwrap();
    let set = format!("failure_groups={}", groups.display());
    let ended = s.ends(&["run", "--nodes", "4", "--set", &set, "--", "true"]).code(2);
    ended.says(&["4 nodes in 2 failure groups make sets of 1", "What fits is SINGLE"]);
    std::fs::write(&groups, "rack a: 0-1\nrack b: 2-3 4\n").unwrap();
    s.ends(&["run", "--nodes", "4", "--spares", "1", "--set", &set, "--", "true"]).code(0);
    std::fs::write(&groups, "rack a: 0-9\n").unwrap();
    let ended = s.ends(&["run", "--nodes", "4", "--set", &set, "--", "true"]).code(2);
    ended.says(&["line 1: there is no node 9; the job has 4, spares included"]);
    let ended = s.ends(&["run", "--nodes", "4", "--scheme", "RS(0,2)", "--", "true"]).code(2);
    ended.says(&["RS(k,m) with k + m <= 256"]);
    s.nothing_left();
}
