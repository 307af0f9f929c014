"""Runner, agents and ranks are killed at once: what lies in the nodes' directories comes back by `stanchion scavenge`.

No MPI, as in test_codes.py: keep.c compares what comes back byte for byte.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness import STANCHION, check, files_under, until
from test_codes import end, keep, new_one


def kill_all(lab, run):
    """At once: nobody can flush, or remove anything. The agents as they were."""
    agents = run.agents()
    pids = [run.process.pid, *(a["pid"] for a in agents), *(r["pid"] for a in agents for r in a["ranks"])]
    pids += [pid for pid, _ in lab.processes() if pid not in pids]
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                pass
    run.process.wait(20)
    until(lambda: not any(map(lives, pids)), 20, "all are dead")
    return agents


def lives(pid):
    """Until its files are closed; it has no memory, and so no command line, some time before that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def lose(agents, slots):
    for agent in agents:
        if agent["node"] in slots:
            shutil.rmtree(agent["cache"])


def survivors(agents, slots):
    return [a for a in agents if a["node"] is not None and a["node"] not in slots]


def scavenge(lab, *args, code=0):
    done = lab.tool("scavenge", "--prefix", lab.prefix, "--json", *args, code=code, timeout=120)
    return json.loads(done.stdout), done


def index_of(lab):
    return sorted(p.name for p in files_under(lab.prefix / ".stanchion/index"))


def protected_twice(run):
    """What was protected first is behind a second one: a level does not wait for what is written beside the files."""
    at, number = new_one(run, 0)
    new_one(run, at)
    return number


def comes_back(lab, scheme, nodes, losses, number, told):
    """What was saved is in the prefix, whole, and a new run goes on from it with the right bytes."""
    check(told["outcome"] == "success" and told["left"] == [], f"{told}")
    check(told["dataset"]["number"] >= number, f"{told}, although {number} was protected")
    lab.nothing_left()
    lab.tool("verify", "--all", "--prefix", lab.prefix)
    again = keep(lab, scheme, nodes, 0, how="files")
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["dataset"]["number"] == told["dataset"]["number"], f"{chosen}")
    new_one(again, 0)
    end(lab, again)


def saved(lab, scheme, nodes, slots, spoil=lambda lab, agents: None):
    run = keep(lab, scheme, nodes, 0, how="files")
    number = protected_twice(run)
    agents = kill_all(lab, run)
    lose(agents, slots)
    spoil(lab, survivors(agents, slots))
    told, _ = scavenge(lab)
    comes_back(lab, scheme, nodes, slots, number, told)
    return told


def flip(lab, agents):
    """One byte in each data file that one node has."""
    found = files_under(agents[0]["cache"], "*/*/r*/state.*")
    check(found, "there is data")
    for path in found:
        with open(path, "r+b") as file:
            file.seek(70_000)
            byte = file.read(1)
            file.seek(70_000)
            file.write(bytes([byte[0] ^ 0x40]))


def test_nobody_is_lost_but_all_processes(lab):
    # FM-A1: SINGLE has nothing to rebuild from, and needs nothing.
    saved(lab, "SINGLE", 3, ())


def test_rs_3_2_two_nodes_are_gone_as_well(lab):
    # FM-A1, FM-L2
    told = saved(lab, "RS(3,2)", 5, (1, 4))
    check(set(told["rebuilt"]) == {1, 4}, f"{told}")


def test_xor_one_node_is_gone_as_well(lab):
    # FM-A1, FM-L2
    told = saved(lab, "XOR", 4, (2,))
    check(told["rebuilt"] == [2], f"{told}")


def test_rs_3_2_a_node_is_gone_and_another_is_damaged(lab):
    # FM-A2, FM-S7, FM-F9: damage is an erasure like any other.
    saved(lab, "RS(3,2)", 5, (0,), flip)


def test_xor_a_node_is_damaged(lab):
    # FM-A2, FM-S7, FM-F9
    saved(lab, "XOR", 4, (), flip)


def test_partner_of_regions_comes_from_the_copies(lab):
    # FM-A3: what was in memory alone is gone with its agent; the copies are in files.
    run = keep(lab, "PARTNER", 4, 0)
    number = protected_twice(run)
    kill_all(lab, run)
    told, _ = scavenge(lab)
    check(told["dataset"]["number"] >= number and told["rebuilt"] == [0, 1, 2, 3], f"{told}")
    lab.nothing_left()
    again = keep(lab, "PARTNER", 4, 0)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"], f"{chosen}")
    new_one(again, 0)
    end(lab, again)


def one_too_many(lab, scheme, nodes, slots):
    run = keep(lab, scheme, nodes, 0, how="files")
    protected_twice(run)
    agents = kill_all(lab, run)
    lose(agents, slots)
    before = {p: p.read_bytes() for p in files_under(lab.cache)}
    told, done = scavenge(lab, code=4)
    check(told["outcome"] == "unrecoverable" and told["dataset"]["number"] > 0, f"{told}")
    check(index_of(lab) == [], f"{index_of(lab)}")
    # Nothing is lost by trying; it goes when it is told to.
    check({p: p.read_bytes() for p in files_under(lab.cache)} == before, "the caches were changed")
    check(len(told["left"]) == nodes - len(slots), f"{told}")
    lab.tool("scavenge", "--discard", "--prefix", lab.prefix)


def test_rs_3_2_one_node_too_many_is_gone(lab):
    # FM-A2, FM-S14
    one_too_many(lab, "RS(3,2)", 5, (0, 2, 3))


def test_xor_one_node_too_many_is_gone(lab):
    # FM-A2, FM-S14
    one_too_many(lab, "XOR", 4, (1, 2))


def test_records_that_are_damaged_are_not_believed(lab):
    # FM-A2: cut off, bent, of another node; two nodes' records of five are bad, and that is as if they were lost.
    run = keep(lab, "RS(3,2)", 5, 0, how="files")
    number = protected_twice(run)
    agents = sorted(kill_all(lab, run), key=lambda a: a["node"])
    for path in files_under(agents[0]["cache"], "*/*/holding"):
        os.truncate(path, path.stat().st_size // 2)
    for path in files_under(agents[3]["cache"], "*/*/holding"):
        other = agents[2]["cache"] + f"/{path.parent.parent.name}/s000002/holding"
        if os.path.exists(other):
            shutil.copyfile(other, path)
        else:
            path.write_bytes(b"STNHOLD1" + os.urandom(500))
    told, done = scavenge(lab)
    check(len(told["refused"]) >= 4 and set(told["rebuilt"]) == {0, 3}, f"{told}")
    check("is not believed" in done.stderr, done.both)
    comes_back(lab, "RS(3,2)", 5, (0, 3), number, told)


def test_no_record_is_whole(lab):
    # FM-A2: nothing is believed, nothing is written, nothing is removed.
    run = keep(lab, "XOR", 4, 0, how="files")
    protected_twice(run)
    kill_all(lab, run)
    for path in files_under(lab.cache, "*/*/*/*/holding"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    told, _ = scavenge(lab, code=4)
    check(index_of(lab) == [] and told["dataset"] is None and told["left"], f"{told}")
    lab.tool("scavenge", "--discard", "--prefix", lab.prefix)
    lab.nothing_left()
    scavenge(lab, code=9)


def test_directories_of_another_line_are_refused(lab):
    # FM-A2, FM-S1: the next run says what is there, goes on without, and what it writes makes that void.
    run = keep(lab, "XOR", 4, 0, how="files")
    protected_twice(run)
    kill_all(lab, run)
    left = sorted(lab.cache.iterdir())
    again = keep(lab, "XOR", 4, 0, how="files", more=("--flush-every", 2))
    _, told = again.wait_event("left_behind")
    check("stanchion scavenge" in told["text"], f"{told}")
    again.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent")
    end(lab, again)
    check(sorted(lab.cache.iterdir()) == left, "what was left stays as it was")
    before = index_of(lab)
    told, _ = scavenge(lab, code=9)
    check(index_of(lab) == before, "nothing of the other line is in the index")
    # The next run knows as well that it is of no use.
    last = keep(lab, "XOR", 4, 0, how="files")
    new_one(last, 0)
    end(lab, last)


def test_from_scratch_wants_nothing_of_it(lab):
    # FM-A4
    run = keep(lab, "XOR", 4, 0, how="files")
    protected_twice(run)
    kill_all(lab, run)
    again = keep(lab, "XOR", 4, 0, how="files", more=("--flush-every", 0, "--from-scratch"))
    new_one(again, 0)
    check(not again.all_events("left_behind"), again.text[-1000:])
    end(lab, again)


def test_a_living_job_is_not_scavenged(lab):
    # FM-C5
    run = keep(lab, "XOR", 4, 0, how="files")
    new_one(run, 0)
    done = lab.tool("scavenge", "--prefix", lab.prefix, "--set", "lease_wait_ms=300", code=8)
    check("uses the prefix" in done.both, done.both)
    end(lab, run)
    scavenge(lab, code=9)


def test_scavenge_is_killed_and_called_again(lab):
    # FM-A1: at any moment; what it began is no reason not to succeed.
    run = keep(lab, "RS(3,2)", 5, 0, how="files", size=3_000_000)
    number = protected_twice(run)
    agents = kill_all(lab, run)
    lose(agents, (1, 3))
    began = subprocess.Popen([str(STANCHION), "scavenge", "--prefix", str(lab.prefix)], env=lab.env(),
                             stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    began.stderr.readline()
    # Stopped, it starts no agent that would not be found.
    os.kill(began.pid, signal.SIGSTOP)
    pids = [pid for pid, _ in lab.processes()]
    for pid in {began.pid, *pids}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    began.wait()
    began.stderr.close()
    until(lambda: not any(map(lives, pids)), 20, "all are dead")
    told, _ = scavenge(lab)
    comes_back(lab, "RS(3,2)", 5, (1, 3), number, told)


for _fn in list(globals().values()):
    if callable(_fn) and getattr(_fn, "__name__", "").startswith("test_"):
        _fn.seconds = 180
        _fn.no_mpi = True
del _fn
