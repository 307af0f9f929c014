"""Regions of memory: what the native interface writes survives what files of a program's own survive.

heat2d_regions computes what heat2d does, to the bit; the references are those of heat2d-plain.
"""

import json
import os
import signal
from functools import partial
from pathlib import Path

import test_damage
import test_loss
from harness import Skip, check, files_under, until
from test_loss import ARGS, RANKS, committed, losses_before_protected, protected, three_losses

PROGRAM = "heat2d_regions"
FILES = "*.stn"
APP_FAILED, UNRECOVERABLE = 3, 4

# How a checkpoint is written.
INCREMENTAL, STREAM, COW = ("--mode", "incremental"), ("--mode", "stream"), ("--mode", "cow")
COW_INCREMENTAL = ("--mode", "cow-incremental")
BY_THREAD, BY_CHILD = ("--set", "cow=userfaultfd"), ("--set", "cow=fork")
# The program's words and the runner's.
MODES = {"": ((), ()), "incremental_": (INCREMENTAL, ()), "stream_": (STREAM, ()), "cow_": (COW, BY_THREAD),
         "cow_fork_": (COW, BY_CHILD), "cow_incremental_": (COW_INCREMENTAL, ())}

# With a history, so that all three regions have bytes.
heat = partial(test_loss.heat, program=PROGRAM, mb=1)
# Without: a region of no bytes is a region.
bare = partial(test_loss.heat, program=PROGRAM)


def grid(nx, ny):
    return ("--nx", str(nx), "--ny", str(ny)) + ARGS[4:]


def test_undisturbed(lab):
    run = heat(lab, spares=0, run_args=("--flush-every", 5))
    run.finish()
    run.same()
    check("start from step 0" in run.text and "rejected" not in run.text, run.text[-2000:])
    names = [d["name"] for d in lab.listed()["datasets"]]
    check(names == ["ckpt.000050", "ckpt.000100"], f"{names}")
    for name in names:
        files = sorted((lab.prefix / name).iterdir())
        check([p.name for p in files] == [f"rank.{r:06}.stn" for r in range(RANKS)], f"{files}")
        sizes = [p.stat().st_size for p in files]
        # What the regions hold, and little more.
        check(all(1 << 20 <= size < (1 << 20) + (1 << 16) for size in sizes), f"{sizes}")
    lab.tool("verify", "--all", "--prefix", lab.prefix)


def test_where_the_time_went(lab):
    """Every dataset tells it: in the events, and in the prefix for good."""
    run = heat(lab, spares=0, run_args=("--flush-every", 5))
    run.finish()
    for event in run.all_events("committed"):
        t = event["times"]
        check(0 < t["copy_us"] <= t["blocked_us"] and t["pool_us"] <= t["blocked_us"], f"{event}")
        # The longest of 16 ranks, and of all of them.
        check(t["copy_us"] <= t["copy_sum_us"] <= RANKS * t["copy_us"], f"{event}")
        check(t["pool_us"] <= t["pool_sum_us"] <= RANKS * t["pool_us"], f"{event}")
    names = [d["name"] for d in lab.listed()["datasets"]]
    check(names, "nothing was flushed")
    for name in names:
        times = json.loads(lab.tool("inspect", name, "--prefix", lab.prefix, "--json").stdout)["times"]
        told = next(e["times"] for e in run.all_events("committed") if e["name"] == name)
        same = ("copy_us", "copy_sum_us", "pool_us", "pool_sum_us", "blocked_us", "write_us", "coordinate_us")
        check(all(times[k] == told[k] for k in same), f"{times} {told}")
        behind = ("digest_us", "transfer_us", "encode_us", "storage_us")
        check(all(times[k] > 0 for k in behind), f"{times}")
        shown = lab.tool("inspect", name, "--prefix", lab.prefix).stdout
        for word in ("copied", "waited for the pool", "coordinated", "encoded", "transferred", "stored"):
            check(word in shown, f"{word} is not in\n{shown}")


def test_undisturbed_with_an_empty_region(lab):
    run = bare(lab, spares=0)
    run.finish()
    run.same()


def test_a_node_dies_partner(lab):
    # FM-L2
    run = heat(lab, scheme="PARTNER", spares=1)
    at, _ = protected(run, committed(run, 0))
    run.kill_node(3)
    at, _ = run.wait_event("node_lost", after=at)
    run.wait_event("launching", after=at)
    run.finish()
    chosen = run.all_events("restart_chosen")[1:]
    check(chosen and chosen[0]["dataset"], f"a restart from nothing: {chosen}")
    check("restart from step" in run.text, run.text[-2000:])
    run.same()


def test_restart_from_the_prefix(lab):
    # SIGINT: the newest checkpoint is flushed, and the next run goes on from it.
    run = heat(lab, spares=0, step_ms=40, run_args=("--flush-every", 0))
    _, event = protected(run, committed(run, 0))
    run.process.send_signal(2)
    run.finish(code=130)
    newest = lab.listed()["datasets"][-1]
    check(newest["number"] >= event["dataset"]["number"], f"the newest checkpoint was not flushed: {newest}")
    lab.tool("verify", "--all", "--prefix", lab.prefix)
    again = heat(lab, spares=0)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["name"] == newest["name"], f"{chosen}")
    again.finish()
    check(f"({newest['name']})" in again.text, again.text[-2000:])
    again.same()


def flip_in_pool(agent, mask=0x40, at=4100):
    """Flips bits of every rank's regions in an agent's shared memory, of all datasets it keeps; how many."""
    flipped = 0
    for fd in Path(f"/proc/{agent['pid']}/fd").iterdir():
        try:
            if not os.readlink(fd).startswith("/memfd:stanchion"):
                continue
        except OSError:
            continue
        with open(fd, "r+b", buffering=0) as memory:
            if memory.read(8) == b"STNREGN1":
                byte = os.pread(memory.fileno(), 1, at)
                os.pwrite(memory.fileno(), bytes([byte[0] ^ mask]), at)
                flipped += 1
    return flipped


def damaged_in_pool(lab, nodes, **more):
    """A run whose regions were damaged in the pools of `nodes`, and whose ranks then died; (run, index)."""
    run = bare(lab, spares=0, step_ms=40, **more)
    at, _ = protected(run, committed(run, 0, 2))
    pids = test_damage.stop_ranks(run)
    test_damage.newest_protected(run)
    for node in nodes:
        agent = run.node(node)
        # Two are kept; a third may have been begun.
        check(flip_in_pool(agent) >= 2, f"node {node} has no regions in its pool")
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the launcher was quicker
    return run, run.wait_event("app_lost", after=at)[0]


def a_node_dies_xor(lab, mode, sets):
    # FM-L2, FM-P3: what a dataset shares with the one before is rebuilt and restarted from like the rest.
    run = heat(lab, steps_args=ARGS + mode, run_args=sets)
    three_losses(run, lambda n: run.kill_node((2, 0, 7)[n]))


def a_rank_dies(lab, mode, sets):
    # FM-L1, FM-F1, FM-P10: whatever was under way; after a restart the first increment is full.
    run = heat(lab, spares=0, steps_args=ARGS + mode, run_args=sets)
    three_losses(run, lambda n: run.kill_rank(3 + 4 * n))


def a_flipped_byte_in_the_pool(lab, mode, sets):
    # FM-F9, FM-S7: found and repaired from parity; a page that two datasets share is damaged in both.
    run, at = damaged_in_pool(lab, [1], steps_args=ARGS + mode, run_args=sets)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"], f"a restart from nothing: {chosen}")
    at, done = run.wait_event("restore_done", after=at)
    check(done["repaired_files"], f"no repair was reported: {done}")
    run.finish()
    run.same()


for _name, (_mode, _sets) in MODES.items():
    for _test in (a_node_dies_xor, a_rank_dies, a_flipped_byte_in_the_pool):
        # What is flipped are regions: a stream has none.
        if (_mode, _test) != (STREAM, a_flipped_byte_in_the_pool):
            globals()[f"test_{_name}{_test.__name__}"] = partial(_test, mode=_mode, sets=_sets)
del _name, _mode, _sets, _test


def test_an_increment_over_spoiled_bytes(lab):
    # FM-P6: in a part that does not change, and the job goes on: no good checksum is made of them, and the next full
    # one ends it.
    run = heat(lab, mb=2, spares=0, step_ms=40, steps_args=ARGS + INCREMENTAL,
               run_args=("--flush-every", 0, "--set", "incremental_max=1000"))
    at, _ = protected(run, committed(run, 0, 2))
    pids = test_damage.stop_ranks(run)
    newest = test_damage.newest_protected(run)
    check(flip_in_pool(run.node(1), at=512 << 10) >= 1, "node 1 has no regions in its pool")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    at, failed = run.wait_event("protect_failed", after=at)
    check(failed["dataset"]["number"] > newest and "restart does not use it" in failed["text"], f"{failed}")
    at, dropped = run.wait_event("dropped", after=at)
    check("checksum" in dropped["text"], f"{dropped}")
    protected(run, committed(run, at))
    run.finish()
    run.same()
    check(len(run.all_events("dropped")) == 1, f"{run.all_events('dropped')}")


def test_bytes_flipped_beyond_the_scheme_in_the_pool(lab):
    # FM-S14: two members of a set, in every dataset there is: no start from nothing.
    run, at = damaged_in_pool(lab, [0, 1])
    run.wait_event("skipped", after=at)
    run.finish(code=UNRECOVERABLE)


def test_regions_lie_in_the_pool(lab):
    # No file of theirs in any cache directory, and all memory is given back.
    run = bare(lab, spares=0, step_ms=40)
    protected(run, committed(run, 0, 2))
    for agent in [a for a in run.agents() if a["alive"] and a["node"] is not None]:
        left = files_under(agent["cache"], FILES)
        check(not left, f"{agent}: {left}")
        check(flip_in_pool(agent, mask=0) >= 2, f"node {agent['node']} has no regions in its pool")
    run.finish()
    run.same()


def test_a_pool_that_is_too_small(lab):
    # Regions become files, as fast as files are; nothing else changes.
    run = bare(lab, spares=1, run_args=("--set", "pool_bytes_max=4K", "--set", "chunk_bytes=4K"))
    at, _ = protected(run, committed(run, 0, 2))
    run.kill_node(2)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()


def two_datasets(lab):
    """A run that leaves two datasets in the prefix, and no result; their names."""
    run = bare(lab, spares=0, run_args=("--flush-every", 5))
    run.finish()
    run.result.unlink()
    return [d["name"] for d in lab.listed()["datasets"]]


def test_another_size_of_the_grid(lab):
    # Every dataset is refused, with the region and both sizes; what then begins anew is right.
    names = two_datasets(lab)
    run = bare(lab, spares=0, steps_args=grid(128, 256))
    run.finish()
    check("region 2 (rows of the grid) has 32768 bytes there, 16384 here" in run.text, run.text[:3000])
    for name in names:
        check(f"{name} rejected" in run.text, f"{name} was not refused: {run.text[:3000]}")
    check("start from step 0" in run.text and "restart from step" not in run.text, run.text[:3000])
    run.same()


def test_another_grid_with_regions_of_the_same_size(lab):
    # Only the program can tell: it ends with an error, and there is no result.
    two_datasets(lab)
    run = bare(lab, spares=0, steps_args=grid(128, 512), run_args=("--runs-max", 1))
    run.finish(code=APP_FAILED)
    check("checkpoint of another size" in run.text, run.text[:3000])
    check("start from step 0" not in run.text and not run.result.exists(), run.text[:3000])


def test_incremental_undisturbed(lab):
    # What the prefix gets of an increment is whole: no dataset needs another one.
    run = heat(lab, spares=0, steps_args=ARGS + INCREMENTAL, run_args=("--flush-every", 3))
    run.finish()
    run.same()
    for dataset in lab.listed()["datasets"]:
        sizes = [p.stat().st_size for p in sorted((lab.prefix / dataset["name"]).iterdir())]
        check(len(sizes) == RANKS and all(1 << 20 <= size < (1 << 20) + (1 << 16) for size in sizes), f"{sizes}")
    lab.tool("verify", "--all", "--prefix", lab.prefix)


def test_incremental_by_hashes(lab):
    # As on kernels that do not tell which pages changed.
    run = heat(lab, spares=1, steps_args=ARGS + INCREMENTAL, run_args=("--set", "incremental_tracking=hash"))
    at, _ = protected(run, committed(run, 0, 3))
    run.kill_node(5)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()


def test_a_rank_dies_while_it_copies(lab):
    # FM-S2, FM-P4: nothing of that dataset is used, and its memory comes back: the job ends with room for all others.
    run = heat(lab, spares=0, step_ms=40, run_args=("--set", "pool_bytes_max=32M"))
    at, _ = protected(run, committed(run, 0, 2))
    for n in range(3):
        at, _ = run.wait_event("began", after=at)
        run.kill_rank((1, 6, 4)[n])
        at, _ = run.wait_event("app_lost", after=at)
        at, chosen = run.wait_event("restart_chosen", after=at)
        check(chosen["dataset"], f"a restart from nothing: {chosen}")
        at, _ = run.wait_event("committed", after=at)
    run.finish()
    run.same()


def test_a_node_dies_before_its_regions_are_protected(lab):
    # FM-L1, FM-L2: what was in its pool alone is lost, and the dataset before it is used if need be.
    run = heat(lab, spares=2, step_ms=40)
    losses_before_protected(run, run.kill_node, (3, 6))


def full_pool(lab, policy):
    """A run whose pool is full with two datasets of three; what was committed, dropped and evicted."""
    sets = [x for p in (policy, "pool_bytes_max=16M") for x in ("--set", p)]
    run = bare(lab, spares=0, run_args=sets)
    run.finish()
    run.same()
    return run, *(len(run.all_events(what)) for what in ("committed", "dropped", "evicted"))


def test_a_full_pool_skips(lab):
    # FM-P7: what comes when it is full is dropped at once, and the job goes on.
    run, committed_, dropped, evicted = full_pool(lab, "pool_full=skip")
    check(committed_ >= 2 and dropped and not evicted, f"{committed_}, {dropped} dropped, {evicted} evicted")
    check("the pool is full" in run.text, run.text[-3000:])


def test_a_full_pool_is_waited_for(lab):
    # FM-S18: what is kept beyond the newest protected one goes instead; nothing is dropped (test_pool: where it is).
    run, committed_, dropped, evicted = full_pool(lab, "pool_full=wait")
    check(committed_ == 10 and not dropped and evicted, f"{committed_}, {dropped} dropped, {evicted} evicted")


def test_stream_restart_from_the_prefix(lab):
    # In the prefix a stream is a file of exactly what was written.
    run = heat(lab, spares=0, run_args=("--flush-every", 5), steps_args=ARGS + STREAM)
    run.finish()
    run.same()
    newest = lab.listed()["datasets"][-1]["name"]
    files = sorted((lab.prefix / newest).iterdir())
    check([p.name for p in files] == sorted(f"rank_{r}.stream" for r in range(RANKS)), f"{files}")
    for p in files:
        sizes = [int.from_bytes(p.read_bytes()[8 * i:8 * i + 8], "little") for i in range(3)]
        check(p.stat().st_size == 24 + sum(sizes), f"{p}: {p.stat().st_size}, {sizes}")
    lab.tool("verify", "--all", "--prefix", lab.prefix)
    run.result.unlink()
    again = heat(lab, spares=0, steps_args=ARGS + STREAM)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["name"] == newest, f"{chosen}")
    again.finish()
    again.same()


def test_cow_undisturbed(lab):
    # The program changes its memory while children copy it; what is stored is what it was.
    run = heat(lab, spares=0, steps_args=ARGS + COW, run_args=("--flush-every", 3))
    run.finish()
    run.same()
    check("at once" not in run.text, run.text[:3000])
    lab.tool("verify", "--all", "--prefix", lab.prefix)


def test_cow_a_pool_that_is_too_small(lab):
    run = bare(lab, spares=0, steps_args=ARGS + COW, run_args=("--set", "pool_bytes_max=4K", "--set", "chunk_bytes=4K"))
    run.finish()
    run.same()


# Children that take a second for what they copy; threads likewise.
PACE = ("--set", "cow_bytes_per_s=20M")
SLOW = dict(program=PROGRAM, mb=8, spares=0, steps_args=ARGS + COW, run_args=PACE + BY_CHILD)
SLOW_THREADS = SLOW | dict(run_args=PACE + BY_THREAD)


def parent_and_state(pid):
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return int(parent), state
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""


def copying(ranks):
    """The children of these processes."""
    found = ((int(pid), parent_and_state(pid)) for pid in os.listdir("/proc") if pid.isdigit())
    # One that has copied may wait to be reaped.
    return [pid for pid, (parent, state) in found if parent in ranks and state not in "ZX"]


def stopped_child(run, rank):
    """Stops the child of a rank while it copies; its pid, and the rank's."""
    pid = until(lambda: run.ranks().get(rank), 30, f"rank {rank} is known")
    child = until(lambda: copying([pid]), 60, f"rank {rank} has a child that copies")[0]
    os.kill(child, signal.SIGSTOP)
    until(lambda: parent_and_state(child) == (pid, "T"), 30, f"child {child} of rank {rank} is stopped")
    return child, pid


def number(event):
    return (event.get("dataset") or event)["number"]


def test_cow_a_child_dies(lab):
    # FM-P8, FM-P9: what it copied is dropped, the one before is there, and the job does not stop.
    run = test_loss.heat(lab, **SLOW)
    at, _ = protected(run, committed(run, 0))
    child, _ = stopped_child(run, 3)
    until(lambda: copying(run.ranks().values()) == [child], 60, "all other children are through")
    before = [number(e) for e in run.all_events("committed")]
    os.kill(child, signal.SIGKILL)
    at, dropped = run.wait_event("dropped", after=at)
    check(number(dropped) > max(before), f"{dropped} was committed before its children had copied: {before}")
    check("copied its memory" in str(dropped), f"{dropped}")
    run.kill_rank(5)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"] and number(chosen) != number(dropped), f"{chosen} after {dropped}")
    run.finish()
    run.same()


def test_cow_incremental_undisturbed(lab):
    # Full ones by children, for the kernel tracks the pages, and in between what changed; each is whole in the prefix.
    run = test_loss.heat(lab, program=PROGRAM, mb=8, spares=0, steps_args=ARGS + COW_INCREMENTAL,
                         run_args=("--flush-every", 3, "--set", "incremental_max=3"))
    run.finish()
    run.same()
    # Of ten the last is the first increment of the third full one.
    check("how the last checkpoint was copied: copied at once: only what changed" in run.text, run.text[-3000:])
    for dataset in lab.listed()["datasets"]:
        sizes = [p.stat().st_size for p in sorted((lab.prefix / dataset["name"]).iterdir())]
        check(len(sizes) == RANKS and all(8 << 20 <= size < (8 << 20) + (1 << 16) for size in sizes), f"{sizes}")
    lab.tool("verify", "--all", "--prefix", lab.prefix)


def test_cow_incremental_by_hashes(lab):
    # As on kernels that do not tell which pages changed: threads may copy full ones.
    need_threads()
    run = heat(lab, spares=1, steps_args=ARGS + COW_INCREMENTAL,
               run_args=("--set", "incremental_tracking=hash", "--set", "incremental_max=2") + BY_THREAD)
    at, _ = protected(run, committed(run, 0, 3))
    run.kill_node(5)
    run.wait_event("node_lost", after=at)
    run.finish()
    run.same()


def test_cow_incremental_a_child_dies(lab):
    # FM-P13: a full one whose child died is nobody's base; the one after it is full again, and so is what is restored.
    sets = ("--set", "cow_bytes_per_s=8M", "--set", "incremental_max=2")
    run = test_loss.heat(lab, **SLOW | dict(steps_args=ARGS + COW_INCREMENTAL, run_args=sets))
    # Full, two increments, full.
    at, _ = protected(run, committed(run, 0, 2))
    child, _ = stopped_child(run, 3)
    until(lambda: copying(run.ranks().values()) == [child], 60, "all other children are through")
    before = [number(e) for e in run.all_events("committed")]
    os.kill(child, signal.SIGKILL)
    at, dropped = run.wait_event("dropped", after=at)
    check(number(dropped) > max(before), f"{dropped} was committed before its children had copied: {before}")
    check("copied its memory" in str(dropped), f"{dropped}")
    until(lambda: copying(run.ranks().values()), 60, "the next one is full")
    after = [number(e) for e in run.all_events("committed")]
    check(after == before, f"{after}: one after {dropped} was not full")
    at, event = run.wait_event("committed", after=at)
    at, event = run.wait_event("committed", after=at + 1)
    run.kill_rank(5)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"] and number(chosen) >= number(event), f"{chosen} after {event}")
    run.finish()
    run.same()


def test_cow_a_rank_dies_while_its_child_copies(lab):
    # FM-P10: nothing of the one before is lost, and what the child still writes to is nobody else's.
    run = test_loss.heat(lab, **SLOW)
    at, _ = protected(run, committed(run, 0))
    child, rank = stopped_child(run, 3)
    os.kill(rank, signal.SIGKILL)
    try:
        os.kill(child, signal.SIGCONT)
    except ProcessLookupError:
        pass  # the runner ends what descends from it
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"], f"a restart from nothing: {chosen}")
    run.finish()
    run.same()


def need_threads():
    """Ranks must be able to hold up what the kernel writes for them: otherwise nothing here is copied by threads."""
    if os.geteuid() != 0 and Path("/proc/sys/vm/unprivileged_userfaultfd").read_text().strip() != "1":
        raise Skip("userfaultfd serves faults of user mode only")


def copying_thread(run, rank):
    """Waits until a thread of the rank copies; the rank's pid."""
    def found():
        pid = run.ranks().get(rank)
        try:
            names = [p.read_text().strip() for p in Path(f"/proc/{pid}/task").glob("*/comm")]
        except FileNotFoundError:
            return None
        return pid if "stn-cow" in names else None
    return until(found, 60, f"rank {rank} has a thread that copies")


def test_cow_a_rank_dies_while_its_thread_copies(lab):
    # FM-P8, FM-P10: what it had not copied is nowhere used; nothing of the one before is lost.
    need_threads()
    run = test_loss.heat(lab, **SLOW_THREADS)
    at, _ = protected(run, committed(run, 0))
    os.kill(copying_thread(run, 3), signal.SIGKILL)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"], f"a restart from nothing: {chosen}")
    run.finish()
    run.same()


def test_cow_a_node_dies_while_its_threads_copy(lab):
    # FM-L2, FM-P9
    need_threads()
    run = test_loss.heat(lab, **SLOW_THREADS | dict(spares=1))
    at, _ = protected(run, committed(run, 0))
    copying_thread(run, 6)
    run.kill_node(3)
    at, _ = run.wait_event("node_lost", after=at)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["dataset"], f"a restart from nothing: {chosen}")
    run.finish()
    run.same()


for _name, _fn in list(globals().items()):
    if _name.startswith("test_"):
        _fn.seconds = 240
del _name, _fn
