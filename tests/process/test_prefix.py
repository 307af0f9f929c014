"""What lies in the prefix alone, in both layouts: restarts from it, damage to it, and files made of it again."""

import shutil
from pathlib import Path

from harness import check, files_under
from test_damage import KINDS, damage
from test_loss import RANKS, committed, heat, lose_at, lose_two_of_a_set
from test_scavenge import kill_all


def containers(lab, number=None):
    """Container files of one dataset, or of all, in the order of numbers and nodes."""
    found = files_under(lab.prefix / ".stanchion/data", "a.*/c.*")
    return [f for f in found if number is None or int(f.parts[-3].split(".")[0]) == number]


def shared_memory(lab):
    """What MPI has made for this job's processes, and would remove at their end."""
    found = set()
    for pid, _ in lab.processes():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if " /dev/shm/" in line}
    return found


def only_prefix(layout):
    def test(lab):
        # FM-L3: every process is killed and every cache wiped.
        run = heat(lab, spares=0, run_args=("--flush-every", 2, "--layout", layout))
        at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent")
        committed(run, at)
        mapped = shared_memory(lab)
        agents = kill_all(lab, run)
        for agent in agents:
            shutil.rmtree(agent["cache"])
        # On real nodes it goes with them.
        for path in mapped:
            path.unlink(missing_ok=True)
        ours = [p for p in files_under(lab.prefix) if ".stanchion" not in p.parts]
        check(bool(ours) == (layout == "files"), f"{layout}: {ours[:3]}")
        check(bool(containers(lab)) == (layout == "containers"), f"{containers(lab)}")
        lab.tool("verify", "--all", "--prefix", lab.prefix)
        # With the other layout from then on: what is there counts, whatever it is.
        other = "files" if layout == "containers" else "containers"
        again = heat(lab, spares=0, run_args=("--flush-every", 2, "--layout", other))
        _, chosen = again.wait_event("restart_chosen")
        check(chosen["from_prefix"] and chosen["dataset"]["number"] >= event["dataset"]["number"], f"{chosen}")
        again.finish()
        again.same()
        lab.tool("verify", "--all", "--prefix", lab.prefix)

    return test


test_only_the_files_are_left = only_prefix("files")
test_only_the_containers_are_left = only_prefix("containers")


def container_kind(kind):
    def test(lab):
        # FM-F9, FM-S7
        run = heat(lab, spares=0, run_args=("--flush-every", 1, "--layout", "containers"))
        run.finish()
        listed = lab.listed()["datasets"]
        newest, older = listed[-1], listed[-2]
        mine, before = containers(lab, newest["number"]), containers(lab, older["number"])
        check(len(mine) == 8 and len(before) == 8, f"{mine} {before}")
        damage(kind, mine[3], mine[4], before[3])
        found = lab.tool("verify", newest["name"], "--prefix", lab.prefix, "--json", code=1)
        check("c.000003" in found.stdout or "rank_00000" in found.stdout, found.both)
        again = heat(lab, spares=0)
        _, skipped = again.wait_event("skipped")
        check(skipped["name"] == newest["name"] and skipped["trouble"]["file"], f"{skipped}")
        _, chosen = again.wait_event(lambda e: e["event"] == "restart_chosen" and e["name"] == older["name"])
        check(chosen["from_prefix"], f"{chosen}")
        again.finish()
        again.same()

    return test


for _kind in KINDS:
    globals()[f"test_container_{_kind}"] = container_kind(_kind)


def test_a_node_dies_while_containers_are_written(lab):
    # FM-S9, FM-S19
    def missed(run, at, lost, event):
        return any(e["event"] == "level" and e["level"] == "persistent"
                   and e["dataset"]["number"] == event["dataset"]["number"] for e in run.events[at:lost])

    lose_at(lab, lambda run, at: run.wait_event(
        lambda e: e["event"] == "level" and e["level"] == "protected", after=at), missed,
        mb=16, run_args=("--flush-every", 1, "--layout", "containers"))
    lab.tool("verify", "--all", "--prefix", lab.prefix)
    # Of each dataset one attempt is left: that of its record.
    for dataset in lab.listed()["datasets"]:
        attempts = {f.parent.name for f in containers(lab, dataset["number"])}
        check(len(attempts) == 1, f"{dataset['name']}: {attempts}")


def test_two_nodes_of_a_set_die_and_containers_are_there(lab):
    run = heat(lab, run_args=("--flush-every", 3, "--layout", "containers"), spares=3)
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent")
    at = lose_two_of_a_set(run, committed(run, at, 1))
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["from_prefix"] and chosen["dataset"]["number"] >= event["dataset"]["number"], f"{chosen}")
    run.finish()
    run.same()


def test_an_export_is_what_the_program_wrote(lab):
    # The same program twice: its files in the prefix, and those that are made of containers.
    run = heat(lab, spares=0, run_args=("--flush-every", 1))
    run.finish()
    files, name = lab.prefix, lab.listed()["datasets"][-1]["name"]
    lab.prefix = lab.dir / "other"
    lab.prefix.mkdir()
    run = heat(lab, spares=0, run_args=("--flush-every", 1, "--layout", "containers"))
    run.finish()
    target = lab.dir / "target"
    missing = lab.tool("export", name, "--to", target, "--prefix", lab.prefix, code=7)
    check("create it" in missing.stderr, missing.both)
    target.mkdir()
    lab.tool("export", name, "--to", target, "--prefix", lab.prefix)
    want = {p.relative_to(files): p.read_bytes() for p in files_under(files / name)}
    have = {p.relative_to(target): p.read_bytes() for p in files_under(target)}
    check(want == have, f"{sorted(want)} {sorted(have)}")
    # Again: nothing to do. One differs: refused, then replaced.
    again = lab.tool("export", name, "--to", target, "--prefix", lab.prefix)
    check(f"{len(want)} were there already" in again.stdout, again.both)
    victim = target / sorted(want)[0]
    victim.write_bytes(b"something else")
    refused = lab.tool("export", name, "--to", target, "--prefix", lab.prefix, code=1)
    check("--replace" in refused.stderr and victim.name in refused.stderr, refused.both)
    lab.tool("export", name, "--to", target, "--prefix", lab.prefix, "--replace")
    check(victim.read_bytes() == want[sorted(want)[0]], "it was not replaced")
    lab.tool("export", name, "--to", lab.prefix, "--prefix", lab.prefix, code=2)


def keeps(layout):
    def test(lab):
        # FM-S20: every checkpoint is flushed, two are kept, and one that is pinned meanwhile.
        run = heat(lab, spares=0, run_args=("--flush-every", 1, "--layout", layout, "--set", "keep_last=2"))
        run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent")
        # The newest of a moment, for two more must come before it goes.
        pinned = lab.listed()["datasets"][-1]["name"]
        lab.tool("pin", pinned, "--prefix", lab.prefix)
        run.finish()
        left = lab.listed()["datasets"]
        check(left[0]["name"] == pinned and left[0]["pinned"], f"{left}")
        # The last one is deleted behind the last flush, which the end of the job may overtake.
        check(len(left) in (3, 4), f"{[d['name'] for d in left]}")
        newest = left[-1]["number"]
        check([d["number"] for d in left[-2:]] == [newest - 1, newest], f"{left}")
        lab.tool("verify", "--all", "--prefix", lab.prefix)
        ours = [p for p in files_under(lab.prefix, "*.heat")]
        want = len(left) * RANKS if layout == "files" else 0
        check(len(ours) == want, f"{len(ours)} files are left, not {want}")
        check(len({f.parts[-3] for f in containers(lab)}) == (len(left) if layout == "containers" else 0),
              f"{containers(lab)}")

    return test


test_two_files_datasets_are_kept = keeps("files")
test_two_containers_datasets_are_kept = keeps("containers")
