#!/usr/bin/env python3
"""`make soak`: histories of heat2d under random failures until the time is over; how they ended, counted.

    soak.py [--minutes 30] [--mpi openmpi,mpich] [--seed N] [--log FILE]

A history is one result that is worked towards: a run meets faults at random moments; if it refuses to go on (its own exit
codes for too many losses, no spare, a killed runner), the next run goes on from what is there, and the last one meets none.
Every history must end with the very bytes of the undisturbed program. Anything else ends the soak with 1.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import ROOT, Failed, Lab, check, kill_agent, same_result, until  # noqa: E402

# Scheme, losses that one set survives, nodes.
SCHEMES = [("XOR", 1, 4), ("XOR", 1, 8), ("RS(2,2)", 2, 4), ("RS(4,2)", 2, 6), ("RS(3,2)", 2, 5), ("RS(2,3)", 3, 5)]
ARGS = ("--nx", "128", "--ny", "128", "--steps", "80", "--every", "8")
# The codes with which a run may refuse honestly: unrecoverable, no spare, fenced or agents failed, killed.
HONEST = {0: "success", 3: "the application failed", 4: "too much was lost", 5: "no spare", 7: "no space",
          10: "fenced", 11: "agents failed", -9: "the runner was killed"}
RUNS_MAX = 4


class Soak:
    def __init__(self, args, seed):
        self.args = args
        self.rng = random.Random(seed)
        self.faults = collections.Counter()
        self.ends = collections.Counter()
        self.histories = 0
        self.runs = 0
        self.log = open(args.log, "w", buffering=1)

    def note(self, **facts):
        self.log.write(json.dumps(facts) + "\n")

    def history(self, mpi):
        rng = self.rng
        scheme, losses, nodes = rng.choice(SCHEMES)
        spares = rng.randint(0, 4)
        ranks = rng.choice([nodes, nodes, max(2, nodes // 2)])
        mb = rng.choice([0, 0, 1, 4])
        flush, layout = rng.choice([0, 1, 3]), rng.choice(["files", "containers"])
        lab = Lab(mpi)
        small = Small(lab) if rng.random() < 0.3 else None
        failed, run, hit = True, None, []
        told = {"mpi": mpi, "scheme": scheme, "nodes": nodes, "spares": spares, "ranks": ranks, "mb": mb,
                "flush_every": flush, "layout": layout, "small_cache": bool(small), "runs": []}
        try:
            for attempt in range(RUNS_MAX):
                last = attempt == RUNS_MAX - 1
                run, out = self.start(lab, (scheme, nodes, ranks, spares), mb, flush, layout)
                hit = [] if last else self.disturb(lab, run, losses, small)
                code = self.ended(run, lab)
                told["runs"].append({"faults": hit, "code": code})
                self.runs += 1
                if code == 0:
                    more = ("--ckpt-mb", str(mb)) if mb else ()
                    same_result(lab, out, ranks, *ARGS, *more)
                    self.ends["success, byte-identical" + (" after a refusal" if attempt else "")] += 1
                    failed = False
                    return
                check(code in HONEST, f"exit {code} is no honest end\n{run.text[-3000:]}")
                self.ends[f"refused: {HONEST[code]}"] += 1
                # What was too much stays too much: an empty prefix and from the beginning.
                if code in (3, 4, 7, 11):
                    lab.prefix = lab.dir / f"prefix.{attempt}"
                    lab.prefix.mkdir()
            raise Failed("the last run, which meets no fault, did not succeed")
        except Failed as why:
            told["failed"] = str(why)
            # What it met is only in `runs` when it has ended as it should.
            if run:
                told["last"] = {"text": run.text[-6000:], "code": run.process.poll(), "faults": hit}
            raise Failed(f"{why}\n{run.text[-3000:] if run else ''}") from why
        finally:
            self.note(**told)
            if small:
                small.close()
            lab.close(failed)

    def start(self, lab, shape, mb, flush, layout="files"):
        scheme, nodes, ranks, spares = shape
        out = lab.dir / f"result.{len(lab.runs)}"
        more = ("--ckpt-mb", str(mb)) if mb else ()
        command = lab.mpiexec(ranks, lab.program("heat2d"), *ARGS, *more, "--step-ms", "25", "--out", out)
        words = ["--scheme", scheme, "--set-size", 4, "--flush-every", flush, "--layout", layout, "--set", "silence_timeout_ms=6000",
                 "--set", "orphan_grace_ms=500", "--set", "runs_max=0"]
        return lab.run(*words, command=command, nodes=nodes, spares=spares), out

    def ended(self, run, lab):
        code = run.finish(code=None, seconds=180)
        until(lambda: not lab.processes(), 90, f"processes left after exit {code}: {lab.processes()}")
        try:
            lab.nothing_left()
        except Failed:
            # FM-V4: the runner was alone, its agents had left, when it was killed in the midst of clearing up. Then the
            # next run does it.
            if code != -9 or not run.all_events("final_flush_done"):
                raise
            lab.tool("run", "--nodes", 1, "--prefix", lab.prefix, "--cache-dir", lab.cache, "--", "true")
            lab.nothing_left()
            self.ends["of these, cleared up by the next run"] += 1
        return code

    def disturb(self, lab, run, losses, small):
        """Some faults at random moments; what they were."""
        rng, hit = self.rng, []
        for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
            moment = rng.uniform(0.1, 2.0)
            # The moment is the test's input, not a way to wait for something.
            end = time.monotonic() + moment
            with run.changed:
                run.changed.wait_for(lambda: run.closed or time.monotonic() >= end, moment)
            if run.process.poll() is not None:
                break
            kind = rng.choice(["rank", "agent", "node", "nodes", "nodes", "runner", "freeze agent", "freeze rank",
                               "freeze runner", "disk full", "drop connections", "drop connections"])
            try:
                if self.strike(lab, run, kind, losses, small):
                    hit.append(f"{kind}@{moment:.2f}")
                    self.faults[kind] += 1
            except (Failed, ProcessLookupError, KeyError, json.JSONDecodeError, subprocess.SubprocessError):
                # It ended, or agents went, while it was looked at.
                pass
            if kind == "runner" and hit and hit[-1].startswith("runner"):
                break
        return hit

    def strike(self, lab, run, kind, losses, small):
        rng = self.rng
        if kind == "runner":
            os.kill(run.process.pid, signal.SIGKILL)
            return True
        if kind == "freeze runner":
            return freeze([run.process.pid], rng.uniform(0.1, 4))
        if kind == "disk full":
            return small is not None and small.fill(rng.uniform(0.2, 3))
        living = [a for a in run.agents() if a["alive"]]
        hosts = [a for a in living if a["node"] is not None]
        ranks = [r["pid"] for a in hosts for r in a.get("ranks", [])]
        if kind == "rank" and ranks:
            os.kill(rng.choice(ranks), signal.SIGKILL)
        elif kind == "agent" and living:
            kill_agent(rng.choice(living), False, False)
        elif kind == "node" and living:
            kill_agent(rng.choice(living), True, True)
        elif kind == "nodes" and hosts:
            doomed = rng.sample(hosts, min(len(hosts), rng.randint(1, losses)))
            for agent in doomed:
                os.kill(agent["pid"], signal.SIGSTOP)
            for agent in doomed:
                kill_agent(agent, True, True)
        elif kind == "freeze agent" and living:
            return freeze([rng.choice(living)["pid"]], rng.uniform(0.1, 9))
        elif kind == "freeze rank" and ranks:
            return freeze([rng.choice(ranks)], rng.uniform(0.1, 3))
        elif kind == "drop connections" and living:
            return drop([a["pid"] for a in rng.sample(living, rng.randint(1, len(living)))])
        else:
            return False
        return True

    def run(self):
        end = time.monotonic() + 60 * self.args.minutes
        mpis = self.args.mpi.split(",")
        started = time.monotonic()
        ok = True
        while time.monotonic() < end:
            mpi = mpis[self.histories % len(mpis)]
            try:
                self.history(mpi)
            except Failed as why:
                print(f"FAILED after {self.histories} histories: {why}", flush=True)
                ok = False
                break
            self.histories += 1
            if self.histories % 10 == 0:
                self.report(time.monotonic() - started)
        self.report(time.monotonic() - started)
        self.note(histories=self.histories, runs=self.runs, faults=self.faults, ends=self.ends, ok=ok)
        return 0 if ok else 1

    def report(self, seconds):
        faults = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()))
        ends = ", ".join(f"{n} {end}" for end, n in sorted(self.ends.items()))
        print(f"[{seconds:6.0f} s] {self.histories} histories, {self.runs} runs; faults: {faults or 'none'}; "
              f"ends: {ends or 'none'}", flush=True)


def freeze(pids, seconds):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def thaw():
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass

    # How long is the test's input; the job goes on meanwhile.
    timer = threading.Timer(seconds, thaw)
    timer.daemon = True
    timer.start()
    return True


def drop(pids):
    """Resets the TCP connections of these processes, as a switch that forgets them does."""
    listed = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=True)
    dropped = 0
    for line in listed.stdout.splitlines():
        if not any(f"pid={pid}," in line for pid in pids):
            continue
        words = line.split()
        source, target = words[2], words[3]
        done = subprocess.run(["ss", "-K", "-t", "src", source, "dst", target], capture_output=True, text=True)
        dropped += done.returncode == 0 and source in done.stdout
    return dropped > 0


class Small:
    """A cache on a file system of its own, that can be filled."""

    SIZE = "512m"

    def __init__(self, lab):
        self.dir = lab.cache
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.SIZE},mode=0700", "tmpfs", str(self.dir)],
                              capture_output=True, text=True)
        self.mounted = done.returncode == 0

    def fill(self, seconds):
        if not self.mounted:
            return False
        # Outside of what agents own; it is removed before anybody looks for what is left.
        path = self.dir / ".full"
        try:
            with open(path, "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError:
            pass

        def free():
            path.unlink(missing_ok=True)

        timer = threading.Timer(seconds, free)
        timer.daemon = True
        timer.start()
        self.timer = timer
        return True

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.dir)], capture_output=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--mpi", default="openmpi,mpich")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--log", default=str(ROOT / "target/soak.jsonl"))
    args = parser.parse_args()
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    missing = [tool for tool in ("ss", "mount") if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        print(f"note: not root, or missing {missing}: no dropped connections or full disks", flush=True)
    print(f"seed {seed}: --seed {seed} repeats the choices; a line a history in {args.log}", flush=True)
    sys.exit(Soak(args, seed).run())


if __name__ == "__main__":
    main()
