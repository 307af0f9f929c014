"""Regions of memory: what the native interface writes survives what files of a program's own survive.

heat2d_regions computes what heat2d does, to the bit; the references are those of heat2d-plain.
"""

from functools import partial

import test_damage
import test_loss
from harness import check
from test_loss import ARGS, RANKS, committed, protected, three_losses

PROGRAM = "heat2d_regions"
FILES = "*.stn"
APP_FAILED = 3

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


def test_undisturbed_with_an_empty_region(lab):
    run = bare(lab, spares=0)
    run.finish()
    run.same()


def test_a_node_dies_xor(lab):
    # FM-L2
    run = heat(lab)
    three_losses(run, lambda n: run.kill_node((2, 0, 7)[n]))


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


def test_a_rank_dies(lab):
    # FM-L1, FM-F1
    run = bare(lab, spares=0)
    three_losses(run, lambda n: run.kill_rank(3 + 4 * n))


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


def test_a_flipped_byte_in_the_cache(lab):
    # FM-F9, FM-S7: found and repaired from parity.
    run, at, newest = test_damage.cache_damage(lab, "flip", [1], program=PROGRAM, pattern=FILES)
    at, chosen = run.wait_event("restart_chosen", after=at)
    at, done = run.wait_event("restore_done", after=at)
    if chosen["dataset"]["number"] == newest:
        check(done["repaired_files"], f"no repair was reported: {done}")
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


for _fn in list(globals().values()):
    if callable(_fn) and getattr(_fn, "__name__", "").startswith("test_"):
        _fn.seconds = 240
del _fn
