"""How much memory Stanchion takes: the agent its pool's limit and a little, the library of a rank next to nothing."""

import re
import subprocess
import threading
from pathlib import Path

from harness import ROOT, check
from test_loss import committed, protected
from test_regions import heat
from test_store import on_disk

MIB = 1 << 20
# What an agent may have beside its pool, and the library beside what it was asked for.
AGENT_BESIDE = 64 * MIB
LIBRARY_MOST = 1 * MIB


class Peaks(threading.Thread):
    """The most that each agent of a run had until it ended, bytes: all that it maps, its pool's shared memory included.

    Looked at again and again: who asks at one moment asks too early, or finds nobody."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self.agents = {a["pid"]: a["node"] for a in run.agents() if a["alive"] and a["node"] is not None}
        self.process, self.most = run.process, {}
        self.start()

    def run(self):
        while self.process.poll() is None:
            for pid, node in self.agents.items():
                try:
                    text = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                if found := re.search(r"VmHWM:\s+(\d+) kB", text):
                    self.most[node] = max(self.most.get(node, 0), int(found.group(1)) << 10)
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass


def agents_under_their_limit(lab, program):
    pool = 256 * MIB
    # Two ranks a node, three datasets: 240 MiB.
    run = program(lab, mb=40, spares=1, step_ms=90, run_args=("--flush-every", 4, "--set", f"pool_bytes_max={pool}"))
    at, _ = protected(run, committed(run, 0))
    at, _ = protected(run, committed(run, at, 2))
    run.kill_node(3)
    at, _ = run.wait_event("node_lost", after=at)
    at, _ = run.wait_event("restore_done", after=at)
    run.wait_event("launching", after=at)
    # All that follow, and the flush of the last one, which reads all of it again from a store.
    peaks = Peaks(run)
    run.finish()
    run.same()
    peaks.join(10)
    peaks = peaks.most
    print("peaks, MiB:", {n: p // MIB for n, p in peaks.items()})
    check(len(peaks) == 8, f"{peaks}")
    check(max(peaks.values()) > pool // 2, f"the pool was hardly used: {peaks}")
    check(max(peaks.values()) <= pool + AGENT_BESIDE, f"an agent took more than its limit and 64 MiB: {peaks}")


def test_agents_stay_under_their_limit(lab):
    """Encoding, the loss of a node, rebuilding, flushing: the pool's limit and 64 MiB."""
    agents_under_their_limit(lab, heat)


def test_agents_with_a_store_stay_under_their_limit(lab):
    """The same where all of it goes to segments."""
    agents_under_their_limit(lab, on_disk)


test_agents_stay_under_their_limit.seconds = 240
test_agents_with_a_store_stay_under_their_limit.seconds = 240


def library(lab, how, mb, rounds, *settings):
    program = lab.dir / "client_memory"
    if not program.exists():
        release = ROOT / "target/release"
        done = subprocess.run(["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-D_GNU_SOURCE", f"-I{ROOT / 'include'}",
                               "-o", str(program), str(ROOT / "tests/process/client_memory.c"), f"-L{release}",
                               "-lstanchion", f"-Wl,-rpath,{release}"], capture_output=True, text=True)
        check(done.returncode == 0, done.stderr)
    both = " & ".join(f"{program} {rank} 2 {mb} {rounds} {how}" for rank in (0, 1))
    sets = [word for setting in settings for word in ("--set", setting)]
    run = lab.run("--from-scratch", "--flush-every", 0, "--set", "flush_at_end=0", *sets, nodes=1,
                  command=["sh", "-c", f"{both} & wait"])
    run.finish()
    most = [int(m) for m in re.findall(r"most=(\d+)", run.text)]
    check(len(most) == 2, run.text)
    print(f"{how}: the library had at most {max(most) >> 10} KiB")
    check(max(most) <= LIBRARY_MOST, f"the library took more than 1 MiB: {most}")


def test_the_library_takes_little_for_regions(lab):
    library(lab, "regions", 64, 12)


def test_the_library_takes_little_for_increments(lab):
    library(lab, "incremental", 64, 24)


def test_the_library_takes_little_for_hashed_increments(lab):
    # 16 bytes for each page are what is asked for: 256 KiB here.
    library(lab, "incremental", 64, 24, "incremental_tracking=hash")


def test_the_library_takes_little_for_streams(lab):
    library(lab, "streams", 64, 12)


def test_the_library_takes_little_for_copy_on_write(lab):
    library(lab, "cow", 64, 12)


def test_the_library_takes_little_for_copy_on_write_by_fork(lab):
    library(lab, "cow", 64, 12, "cow=fork")


for _test in (test_the_library_takes_little_for_regions, test_the_library_takes_little_for_increments,
              test_the_library_takes_little_for_hashed_increments, test_the_library_takes_little_for_streams,
              test_the_library_takes_little_for_copy_on_write, test_the_library_takes_little_for_copy_on_write_by_fork):
    _test.no_mpi = True
