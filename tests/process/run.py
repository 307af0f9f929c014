#!/usr/bin/env python3
"""Runs the tests of real processes: run.py [--mpi openmpi,mpich] [--only WORD] [--list] [--verbose] [--jobs N]"""

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness  # noqa: E402

MODULES = ["test_life", "test_loss", "test_codes", "test_scavenge", "test_damage", "test_prefix", "test_regions", "test_store", "test_scr", "test_bad_input", "test_pool"]
# What these look at is time, or memory: one after the other, when all others are through.
ALONE = ["test_network", "test_cycles", "test_memory"]


# The tests of this run: (name, function, mpi, seconds).
chosen = []


class Deadline(Exception):
    pass


def on_alarm(_signal, _frame):
    raise Deadline("the test's deadline passed")


def collect(mpis):
    """(name, function, mpi, seconds); functions marked `no_mpi` run once."""
    tests = []
    for module in MODULES + ALONE:
        mod = importlib.import_module(module)
        for name, fn in vars(mod).items():
            if not name.startswith("test_") or not callable(fn):
                continue
            seconds = getattr(fn, "seconds", 120)
            for mpi in [mpis[0]] if getattr(fn, "no_mpi", False) else mpis:
                tests.append((f"{module}.{name}[{mpi}]", fn, mpi, seconds))
    return tests


def run_one(name, fn, mpi, seconds):
    lab = harness.Lab(mpi)
    failed = True
    started = time.monotonic()
    signal.alarm(seconds)
    try:
        fn(lab)
        lab.nothing_left()
        failed = False
        return "ok", ""
    except harness.Skip as why:
        failed = False
        return "SKIP", str(why)
    except harness.Failed as why:
        return "FAIL", str(why)
    except Deadline as why:
        # Who hangs, and what it said last.
        words = "".join(run.text[-3000:] for run in lab.runs[-1:])
        living = "\n".join(f"{pid} {command}" for pid, command in lab.processes())
        return "FAIL", f"{why}; its words:\n{words}\nits processes:\n{living}\n{traceback.format_exc()}"
    except Exception:
        return "FAIL", traceback.format_exc()
    finally:
        signal.alarm(0)
        lab.close(failed)
        run_one.seconds = time.monotonic() - started


def run_at(place):
    """The test at this place of the list, in a process of its own; its time is no other one's."""
    signal.signal(signal.SIGALRM, on_alarm)
    outcome, text = run_one(*chosen[place])
    return place, outcome, text, run_one.seconds


def in_turns(jobs):
    """All of the list, so many at a time; results as they come."""
    alone = [n for n, test in enumerate(chosen) if test[0].split(".")[0] in ALONE]
    others = [n for n in range(len(chosen)) if n not in set(alone)]
    if jobs > 1 and len(others) > 1:
        # Who of them is killed is an error here; a multiprocessing.Pool would wait for its result for ever.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            for done in as_completed([pool.submit(run_at, place) for place in others]):
                yield done.result()
    else:
        alone = others + alone
    yield from map(run_at, alone)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mpi", default=os.environ.get("MPI", "openmpi"))
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="also a line for each test that passes")
    # A test waits most of its time: for ranks that sleep in their steps, for one who was killed to be missed.
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), help="tests at the same time")
    args = parser.parse_args()
    each = args.verbose or sys.stdout.isatty()
    chosen.extend(t for t in collect(args.mpi.split(",")) if args.only in t[0])
    if args.list:
        print("\n".join(t[0] for t in chosen))
        return 0
    counts = {"ok": 0, "FAIL": 0, "SKIP": 0}
    skipped, failures = [], []
    since, told = time.monotonic(), 0
    for place, outcome, text, seconds in in_turns(args.jobs):
        name = chosen[place][0]
        counts[outcome] += 1
        if outcome != "ok" or each:
            print(f"{outcome:4} {name} ({seconds:.1f} s)", flush=True)
        if outcome == "FAIL":
            failures.append(name)
            print("    " + text.replace("\n", "\n    "), flush=True)
        elif outcome == "SKIP":
            skipped.append((name, text))
        # What a log keeps of a long run is little: what passed must not hide what failed.
        if sum(counts.values()) // 25 > told:
            told = sum(counts.values()) // 25
            print(f"[{time.monotonic() - since:.0f} s] {sum(counts.values())} of {len(chosen)} tests", flush=True)
    for name, why in skipped:
        print(f"skipped: {name}: {why}")
    for name in failures:
        print(f"failed: {name}")
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] or not counts["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
