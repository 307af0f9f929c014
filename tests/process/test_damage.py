"""The damage matrix: whatever happens to bytes at rest is detected, and repaired where redundancy holds.

The cache is damaged between a protected checkpoint and a restart (all ranks are killed); the prefix
between two runs.
"""

import os
import signal
from pathlib import Path

from harness import check, files_under
from test_loss import RANKS, committed, heat, protected

KINDS = ("flip", "truncate", "remove", "swap", "older")


def damage(kind, victim, other, older, shift=0):
    """One kind of damage to the file `victim`; `other` of the same dataset, `older` of one before.

    `shift`: another one for each victim of a stripe. Two that lack the same bit give a third one whose sum is right.
    """
    data = victim.read_bytes()
    os.chmod(victim, 0o600)
    if kind == "flip":
        at = len(data) // 2 + shift
        victim.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    elif kind == "truncate":
        victim.write_bytes(data[:-1])
    elif kind == "remove":
        victim.unlink()
    elif kind == "swap":
        theirs = other.read_bytes()
        os.chmod(other, 0o600)
        victim.write_bytes(theirs)
        other.write_bytes(data)
    else:
        victim.write_bytes(older.read_bytes())


def stop_ranks(run):
    """Stops all ranks, so that nothing is written while files are damaged; their pids."""
    pids = list(run.ranks().values())
    check(len(pids) == RANKS, f"{len(pids)} ranks are known")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def newest_protected(run):
    """The newest complete dataset, once it is protected: agents go on while the ranks are stopped."""
    number = run.all_events("committed")[-1]["number"]
    run.wait_event(lambda e: e["event"] == "level" and e["level"] == "protected" and e["dataset"]["number"] == number)
    return number


def datasets_in(agent):
    """Directories of datasets in an agent's cache, newest last."""
    return sorted(d for d in Path(agent["cache"]).iterdir() if d.is_dir() and d.name[0].isdigit())


def cache_damage(lab, kind, nodes, spares=0, scheme="XOR", run_args=(), program="heat2d", pattern="*.heat"):
    """Damages the newest dataset on `nodes`, kills all ranks; (run, index, number of the damaged one).

    `pattern`: the names of the files that `program` writes.
    """
    run = heat(lab, spares=spares, scheme=scheme, run_args=run_args, step_ms=40, program=program)
    at, _ = protected(run, committed(run, 0, 2))
    pids = stop_ranks(run)
    number = newest_protected(run)
    newest = None
    for shift, node in enumerate(nodes):
        agent = run.node(node)
        # What was being written when the ranks were stopped has no certificate.
        dirs = [d for d in datasets_in(agent) if int(d.name.split(".")[0]) <= number]
        mine = files_under(dirs[-1], pattern)
        newest = int(dirs[-1].name.split(".")[0])
        check(newest == number and len(dirs) >= 2, f"node {node} has {dirs}, wanted number {number}")
        damage(kind, mine[0], mine[1], files_under(dirs[-2], pattern)[0], shift)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the launcher was quicker
    at, _ = run.wait_event("app_lost", after=at)
    return run, at, newest


def cache_kind(kind):
    def test(lab):
        # FM-F9, FM-S7: found and repaired from parity.
        run, at, newest = cache_damage(lab, kind, [1])
        at, chosen = run.wait_event("restart_chosen", after=at)
        at, done = run.wait_event("restore_done", after=at)
        if chosen["dataset"]["number"] == newest:
            check(done["repaired_files"], f"no repair was reported: {done}")
        run.finish()
        run.same()

    return test


def beyond_kind(kind):
    def test(lab):
        # Two members of a set are damaged in one stripe: the dataset before it, on all ranks, with a message.
        run, at, newest = cache_damage(lab, kind, [0, 1, 2, 3])
        _, skipped = run.wait_event("skipped", after=at)
        check(skipped["dataset"]["number"] == newest and skipped["trouble"]["file"] is not None
              or skipped["trouble"]["cause"], f"{skipped}")
        _, chosen = run.wait_event(lambda e: e["event"] == "restart_chosen" and e["dataset"], after=at)
        _, done = run.wait_event("restart_done", after=at)
        check(done["dataset"]["number"] < newest, f"{done} after {newest}")
        run.finish()
        run.same()

    return test


def prefix_kind(kind):
    def test(lab):
        run = heat(lab, spares=0, run_args=("--flush-every", 1))
        run.finish()
        listed = lab.listed()["datasets"]
        newest = listed[-1]["name"]
        mine, older = (files_under(lab.prefix / d, "*.heat") for d in (newest, listed[-2]["name"]))
        damage(kind, mine[5], mine[6], older[5])
        found = lab.tool("verify", newest, "--prefix", lab.prefix, "--json", code=1)
        check("rank_000005" in found.stdout, found.both)
        again = heat(lab, spares=0)
        _, skipped = again.wait_event("skipped")
        check(skipped["name"] == newest and skipped["trouble"]["file"], f"{skipped}")
        _, chosen = again.wait_event(lambda e: e["event"] == "restart_chosen" and e["name"] == listed[-2]["name"])
        check(chosen["from_prefix"], f"{chosen}")
        again.finish()
        again.same()

    return test


for _kind in KINDS:
    globals()[f"test_cache_{_kind}"] = cache_kind(_kind)
    globals()[f"test_cache_beyond_the_scheme_{_kind}"] = beyond_kind(_kind)
    globals()[f"test_prefix_{_kind}"] = prefix_kind(_kind)


def test_prefix_index_and_manifest(lab):
    """Damage to what vouches: the record, and a slot's manifest."""
    run = heat(lab, spares=0, run_args=("--flush-every", 1))
    run.finish()
    listed = lab.listed()["datasets"]
    records = sorted((lab.prefix / ".stanchion/index").iterdir())
    damage("flip", records[-1], None, None)
    manifests = sorted((lab.prefix / ".stanchion/data").iterdir())
    damage("flip", sorted(manifests[-2].iterdir())[0], None, None)
    again = heat(lab, spares=0)
    _, skipped = again.wait_event(lambda e: e["event"] == "skipped" and records[-1].name in e["text"])
    check("parse" in skipped["text"], f"{skipped}")
    _, chosen = again.wait_event(lambda e: e["event"] == "restart_chosen" and e["name"] == listed[-3]["name"])
    check(chosen["from_prefix"], f"{chosen}")
    again.finish()
    again.same()


def test_cache_parity(lab):
    """Damaged parity is found when it is needed, and nothing wrong comes of it."""
    run = heat(lab, spares=1, run_args=("--flush-every", 1))
    at = committed(run, 0, 2)
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent", after=at)
    pids = stop_ranks(run)
    newest_protected(run)
    for node in (0, 2, 3):
        for directory in datasets_in(run.node(node)):
            for parity in files_under(directory, "parity"):
                if parity.stat().st_size:
                    damage("flip", parity, None, None)
    run.kill_node(1)
    at, _ = run.wait_event("node_lost", after=at)
    _, chosen = run.wait_event(lambda e: e["event"] == "restart_done", after=at)
    check(chosen["dataset"]["number"] >= event["dataset"]["number"] - 1, f"{chosen}")
    for pid in pids:
        check(not os.path.exists(f"/proc/{pid}"), "an old rank lives on")
    run.finish()
    run.same()
