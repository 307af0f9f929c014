"""A pool that is too small for what is to be kept: what goes, what waits, and what is told (FM-S18, FM-P7)."""

from harness import check
from test_bad_input import mounted, unmount
from test_loss import committed, protected
from test_regions import heat

# Two ranks a node, each with 3 MiB and a little in chunks of 1 MiB: 8 MiB a dataset.
MB, DATASET = 3, 8


def pool(datasets, *settings):
    # What is left over is less than half a dataset.
    mb = int(datasets * DATASET + 2)
    pairs = (f"pool_bytes_max={mb}M", "chunk_bytes=1M", *settings)
    return [word for pair in pairs for word in ("--set", pair)]


def unprotected(lab, *run_args):
    """A run whose parity has nowhere to go: no dataset ever becomes protected."""
    tiny = mounted(lab, "tiny", "size=256k")
    run = heat(lab, mb=MB, spares=0, step_ms=20, run_args=("--flush-every", 0, *run_args),
               env={"STANCHION_CACHE_DIR": tiny})
    return run, tiny


def test_drop_the_oldest_that_is_not_protected(lab):
    # FM-S18: the policy, its report, and that the job goes on from the newest.
    run, tiny = unprotected(lab, *pool(3, "pool_full=drop", "pool_wait_ms=30000"))
    try:
        at, first = run.wait_event("committed")
        at, event = run.wait_event("evicted", after=at)
        check(event["severity"] == "warning" and not event["protected"], f"{event}")
        check(event["dataset"]["number"] == first["number"], f"not the oldest: {event} {first}")
        at = committed(run, at, 2)
        newest = run.all_events("committed")[-1]["number"]
        run.kill_rank(5)
        at, _ = run.wait_event("app_lost", after=at)
        at, chosen = run.wait_event("restart_chosen", after=at)
        check(chosen["dataset"] and chosen["dataset"]["number"] >= newest, f"{chosen}, and {newest} was committed")
        run.finish()
        check(not run.all_events("dropped"), f"{run.all_events('dropped')}")
        gone = [e["dataset"]["number"] for e in run.all_events("evicted")]
        check(gone == sorted(gone), f"{gone}")
        run.same()
    finally:
        unmount(tiny)


def test_wait_and_give_up(lab):
    # FM-P7: nothing may go, so the checkpoint that is being written is dropped, and the job goes on.
    run, tiny = unprotected(lab, *pool(3, "pool_full=wait", "pool_wait_ms=300"))
    try:
        _, event = run.wait_event("dropped")
        check("no space" in event["text"] or "full" in event["text"], f"{event}")
        run.finish()
        check(not run.all_events("evicted"), f"{run.all_events('evicted')}")
        run.same()
    finally:
        unmount(tiny)


def test_what_is_kept_beyond_need_goes_first(lab):
    # FM-S18: two are to be kept and a third is written, but only two fit; nothing is dropped that is written.
    run = heat(lab, mb=MB, spares=1, run_args=("--flush-every", 0, *pool(2, "pool_wait_ms=30000")))
    at, event = run.wait_event("evicted")
    check(event["protected"], f"{event}")
    at, _ = protected(run, committed(run, at))
    run.kill_node(2)
    at, _ = run.wait_event("node_lost", after=at)
    run.finish()
    check(not run.all_events("dropped"), f"{run.all_events('dropped')}")
    run.same()
