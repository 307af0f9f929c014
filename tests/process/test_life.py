"""The undisturbed life of a job, with both MPIs and with none."""

import json
import os
import subprocess
from pathlib import Path

from harness import ROOT, STANCHION, check, same_result, until
from test_loss import ARGS, RANKS, committed, heat, protected


def test_undisturbed(lab):
    run = heat(lab, spares=1)
    run.finish()
    run.same()
    kinds = [e["event"] for e in run.events]
    for kind in ("started", "launching", "ranks_ready", "began", "committed", "level", "finalized", "outcome"):
        check(kind in kinds, f"no event {kind}")


def test_restart_from_the_prefix_on_other_nodes(lab):
    """8 nodes write, 4 nodes go on: files go to where the ranks run."""
    run = heat(lab, steps_args=ARGS[:5] + ("50",) + ARGS[6:], run_args=("--flush-every", 2))
    run.finish()
    out = lab.dir / "result"
    out.unlink()
    again = lab.run(command=lab.mpiexec(RANKS, lab.program("heat2d"), *ARGS, "--out", out), nodes=4)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["name"] == "ckpt.000050", f"{chosen}")
    again.finish()
    same_result(lab, out, RANKS, *ARGS)


def test_tools_agree(lab):
    """list, inspect and verify tell of what heat2d's own files in the prefix show."""
    heat(lab, run_args=("--flush-every", 5)).finish()
    listed = lab.listed()["datasets"]
    names = [d["name"] for d in listed]
    check(names == ["ckpt.000050", "ckpt.000100"], f"{names}")
    for name in names:
        files = sorted(p.name for p in (lab.prefix / name).iterdir())
        check(files == [f"rank_{r:06}.heat" for r in range(RANKS)], f"{files}")
    inspected = json.loads(lab.tool("inspect", "ckpt.000100", "--prefix", lab.prefix, "--json").stdout)
    check("rank_000015.heat" in json.dumps(inspected), "inspect names every file")
    lab.tool("verify", "--all", "--prefix", lab.prefix)


def test_status_and_halt(lab):
    # A halt ends the job after a checkpoint; the next run goes on from it.
    run = heat(lab, step_ms=40)
    at, _ = protected(run, committed(run, 0))
    status = run.status()
    check(status["ranks"] == RANKS and len(status["slots"]) == 8, f"{status}")
    lab.tool("halt", "--prefix", lab.prefix)
    run.finish(code=6)
    check(run.all_events("exit_advised"), "the application was not told")
    lab.tool("halt", "--unset", "--prefix", lab.prefix)
    again = heat(lab)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"], f"{chosen}")
    again.finish()
    again.same()


def test_a_halt_that_does_not_wait_for_the_application(lab):
    # SCR_HALT_ENABLED. Checkpoints of before a loss count.
    lab.tool("halt", "--after-checkpoints", "3", "--prefix", lab.prefix)
    run = heat(lab, step_ms=150, env={"SCR_HALT_ENABLED": "1"})
    protected(run, committed(run, 0, count=2))
    run.kill_node(1)
    run.finish(code=6)
    check(run.all_events("halt_due"), f"no halt was due: {run.text}")
    check(len(run.all_events("committed")) == 3, f"{len(run.all_events('committed'))} checkpoints, wanted 3")
    lab.tool("halt", "--unset", "--prefix", lab.prefix)


def test_interrupt(lab):
    # SIGINT: flush the newest checkpoint, leave nothing, exit code of its own.
    run = heat(lab, step_ms=40, run_args=("--flush-every", 0))
    _, event = protected(run, committed(run, 0))
    run.process.send_signal(2)
    run.finish(code=130)
    check(lab.listed()["datasets"][-1]["number"] >= event["dataset"]["number"], "the newest checkpoint was not flushed")


def test_two_jobs_on_one_machine_do_not_meet(lab):
    # FM-C4
    other = lab.dir / "other"
    other.mkdir()
    first = heat(lab)
    out = lab.dir / "second"
    second = lab.run(command=lab.mpiexec(RANKS, lab.program("heat2d"), *ARGS, "--out", out), nodes=8, prefix=other)
    first.finish()
    second.finish()
    first.same()
    check(out.read_bytes() == Path(first.result).read_bytes(), "the second job's result differs")


def test_a_second_run_on_the_prefix_waits_or_refuses(lab):
    # FM-C5
    first = heat(lab, step_ms=40)
    first.wait_event("committed")
    second = heat(lab, env={"STANCHION_LEASE_WAIT_MS": 500})
    second.finish(code=8)
    first.finish()
    first.same()


def test_without_mpi(lab):
    program = lab.program("serial")
    lab.run(command=[program, "--die-at", "3"], nodes=1).finish(code=None)
    check(lab.runs[-1].all_events("committed"), "no checkpoint")


test_without_mpi.no_mpi = True


def test_programs_that_use_nothing_of_it(lab):
    lab.run(command=["true"], nodes=3).finish()
    failing = lab.run("--retries-max", 1, command=["sh", "-c", "exit 7"], nodes=2)
    failing.finish(code=3)
    check("exit code 7" in failing.text, failing.text)


test_programs_that_use_nothing_of_it.no_mpi = True


def test_the_output_passes_through_live(lab):
    # Not at the end: as it is written.
    fifo = lab.dir / "go"
    os.mkfifo(fifo)
    run = lab.run(command=["sh", "-c", f"echo first; read x < {fifo}; echo second"], nodes=1)
    until(lambda: "first" in run.text, 20, "the first line")
    check("second" not in run.text, "too early")
    with open(fifo, "w", encoding="utf-8") as go:
        go.write("x\n")
    run.finish()
    check("second" in run.text, run.text)


test_the_output_passes_through_live.no_mpi = True


def test_libscr_needs_no_mpi(lab):
    needed = subprocess.run(["ldd", str(ROOT / "target/release/libscr.so")], capture_output=True, text=True, check=True)
    check("mpi" not in needed.stdout.lower(), needed.stdout)
    check(STANCHION.exists(), "no stanchion")


test_libscr_needs_no_mpi.no_mpi = True
