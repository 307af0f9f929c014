"""Regions and streams with the cache on a disk: what holds of those in the pool holds of them in segment files.

heat2d_regions as in test_regions.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import test_damage
from harness import Skip, check, files_under, until
from test_loss import ARGS, committed, losses_before_protected, protected, three_losses
from test_regions import INCREMENTAL, STREAM, UNRECOVERABLE, bare, heat

# Also where the system's temporary directory is memory.
SEGMENTS = ("--set", "cache_store=segments")


def on_disk(lab, *more, run_args=(), program=heat, **others):
    shutil.rmtree(lab.cache)
    lab.cache = Path(tempfile.mkdtemp(prefix="stn-test-", dir=lab.dir))
    return program(lab, run_args=(*SEGMENTS, *run_args), *more, **others)


def flip_in_segments(agent, mask=0x40):
    """Flips bits of every rank's regions in an agent's store, of all datasets it keeps; how many."""
    flipped = 0
    for path in files_under(agent["cache"], "store/seg.*"):
        with open(path, "r+b", buffering=0) as segment:
            for at in range(0, path.stat().st_size, 4096):
                if os.pread(segment.fileno(), 8, at) == b"STNREGN1":
                    byte = os.pread(segment.fileno(), 1, at + 4100)
                    os.pwrite(segment.fileno(), bytes([byte[0] ^ mask]), at + 4100)
                    flipped += 1
    return flipped


def modes(test):
    """The same for whole checkpoints, increments and streams."""
    kinds = {"": (), "_incremental": INCREMENTAL, "_stream": STREAM}
    for name, mode in kinds.items():
        def of(lab, mode=mode):
            test(lab, steps_args=ARGS + mode)
        of.__name__ = f"{test.__name__}{name}"
        globals()[of.__name__] = of
    return globals()[test.__name__]


@modes
def test_a_node_dies_xor(lab, **mode):
    # FM-L2
    run = on_disk(lab, **mode)
    three_losses(run, lambda n: run.kill_node((2, 0, 7)[n]))


@modes
def test_a_rank_dies(lab, **mode):
    # FM-L1
    run = on_disk(lab, spares=0, **mode)
    three_losses(run, lambda n: run.kill_rank(3 + 4 * n))


@modes
def test_from_the_prefix(lab, **mode):
    # What is flushed is read from the segments; and all of them go with the job.
    run = on_disk(lab, spares=0, run_args=("--flush-every", 3), **mode)
    run.finish()
    run.same()
    lab.tool("verify", "--all", "--prefix", lab.prefix)
    run.result.unlink()
    again = heat(lab, spares=0, run_args=SEGMENTS, **mode)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"], f"{chosen}")
    again.finish()
    again.same()


def damaged_in_segments(lab, nodes):
    """A run whose regions were damaged in the stores of `nodes`, and whose ranks then died; (run, index)."""
    run = on_disk(lab, program=bare, spares=0, step_ms=40)
    at, _ = protected(run, committed(run, 0, 2))
    pids = test_damage.stop_ranks(run)
    test_damage.newest_protected(run)
    for node in nodes:
        agent = run.node(node)
        until(lambda: flip_in_segments(agent, mask=0) >= 4, 10, f"node {node} has regions in its segments")
        flip_in_segments(agent)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the launcher was quicker
    return run, run.wait_event("app_lost", after=at)[0]


def test_a_flipped_byte(lab):
    # FM-F9, FM-S7, FM-T1: found and repaired from parity.
    run, at = damaged_in_segments(lab, [1])
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"], f"a restart from nothing: {chosen}")
    at, done = run.wait_event("restore_done", after=at)
    check(done["repaired_files"], f"no repair was reported: {done}")
    run.finish()
    run.same()


def test_bytes_flipped_beyond_the_scheme(lab):
    # FM-S14
    run, at = damaged_in_segments(lab, [0, 1])
    run.wait_event("skipped", after=at)
    run.finish(code=UNRECOVERABLE)


def test_the_pool_is_smaller_than_what_is_kept(lab):
    # FM-T5: two checkpoints are kept and a third is written in memory for one and a half.
    run = on_disk(lab, spares=1, step_ms=40, run_args=("--set", "pool_bytes_max=12M", "--set", "chunk_bytes=1M"))
    at, _ = protected(run, committed(run, 0, 4))
    run.kill_node(4)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()
    check(not run.all_events("dropped"), run.text[-3000:])
    check("the pool is full" not in run.text, run.text[-3000:])


@modes
def test_a_checkpoint_is_larger_than_the_pool(lab, **mode):
    # FM-P11: two ranks of a node write 2 MB through 1 MB: what is full is stored while they write on.
    run = on_disk(lab, spares=1, step_ms=40, run_args=("--set", "pool_bytes_max=1M", "--set", "chunk_bytes=64K"), **mode)
    at, _ = protected(run, committed(run, 0, 2))
    left = files_under(run.node(2)["cache"], "r??????/*")
    check(not left, f"files beside the segments: {left}")
    run.kill_node(2)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()
    check(not run.all_events("dropped"), run.text[-3000:])


def test_an_agent_dies_with_chunks_not_yet_written(lab):
    # FM-F2a: right after the commit; the others have what they need, or the dataset before.
    run = on_disk(lab, spares=2, step_ms=40)
    losses_before_protected(run, run.kill_agent, (3, 6))


def test_durable(lab):
    # `protected` then means that the node's own part is synced: the directory of the store has it.
    kind = subprocess.run(["stat", "-f", "-c", "%T", lab.dir], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        raise Skip(f"{lab.dir} is {kind}, and nothing in memory is durable")
    run = on_disk(lab, spares=1, run_args=("--set", "cache_durable=1"))
    at, _ = protected(run, committed(run, 0, 2))
    check(flip_in_segments(run.node(1), mask=0) >= 2, "what is protected is in segments")
    run.kill_node(1)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()


for _fn in list(globals().values()):
    if callable(_fn) and getattr(_fn, "__name__", "").startswith("test_"):
        _fn.seconds = 240
del _fn
