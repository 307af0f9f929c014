"""Every loss that a code survives, on real agents: what comes back is compared byte for byte by the program itself.

No MPI: keep.c's ranks are plain processes, so that a loss and a restart take a fraction of a second.
"""

import itertools
import os
import random
import signal
import subprocess

from harness import ROOT, check, kill_agent, until

# Agents of one run, spares included: what two cores start and keep at ease.
AGENTS_MAX = 48


def program(lab):
    out = lab.dir / "keep"
    if not out.exists():
        release = ROOT / "target/release"
        done = subprocess.run(["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-D_GNU_SOURCE", f"-I{ROOT / 'include'}",
                               "-o", str(out), str(ROOT / "tests/process/keep.c"), f"-L{release}",
                               "-lstanchion", f"-Wl,-rpath,{release}"], capture_output=True, text=True)
        check(done.returncode == 0, done.stderr)
    return out


def keep(lab, scheme, nodes, spares, ranks=None, size=150_000, step=70_001, how="regions", pause_ms=30, sets=(),
         prefix=None, more=("--flush-every", 0)):
    ranks = ranks or nodes
    script = (f"for i in $(seq 0 {ranks - 1}); do STANCHION_RANK=$i STANCHION_SIZE={ranks} "
              f"{program(lab)} {size} {step} {how} {pause_ms} & pids=\"$pids $!\"; done; "
              "code=0; for p in $pids; do wait $p || code=$?; done; exit $code")
    settings = ("chunk_bytes=65536", "flush_at_end=0", "runs_max=0", "silence_timeout_ms=20000", *sets)
    words = [word for setting in settings for word in ("--set", setting)]
    return lab.run("--scheme", scheme, *more, *words, nodes=nodes, spares=spares, prefix=prefix,
                   command=["sh", "-c", script])


def level(run, after, name="protected"):
    """The next dataset that reaches a level: its number, and the index behind it."""
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == name, after=after)
    return at + 1, event["dataset"]["number"]


def new_one(run, after):
    """A dataset that was committed after `after` and is protected."""
    at, event = run.wait_event("committed", after=after)
    number = event["number"] if "number" in event else event["dataset"]["number"]
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "protected"
                               and e["dataset"]["number"] >= number, after=at)
    return at + 1, event["dataset"]["number"]


def die(agents):
    """Nodes die at once, with all that they held."""
    for agent in agents:
        os.kill(agent["pid"], signal.SIGSTOP)
    for agent in agents:
        kill_agent(agent, ranks=True, wipe=True)


def nodes_of(run, slots):
    living = {a["node"]: a for a in run.agents() if a["alive"] and a["node"] is not None}
    return [living[s] for s in slots]


def lose(run, at, slots):
    """Loses these nodes behind a protected dataset; the job goes on from that one or a later. The index to go on from."""
    at, number = new_one(run, at)
    die(nodes_of(run, slots))
    lost, _ = run.wait_event("node_lost", after=at)
    at, chosen = run.wait_event("restart_chosen", after=lost)
    # Deaths come to light one by one: what is chosen for the first may be chosen anew with the next.
    at, launched = run.wait_event("launching", after=at)
    chosen = [e for e in run.events[:at] if e["event"] == "restart_chosen"][-1]
    check(chosen["dataset"] and not chosen["from_prefix"], f"lost {slots}: {chosen}")
    check(any(e["rebuild"] for e in run.events[lost:at] if e["event"] == "restart_chosen"), f"lost {slots}: {chosen}")
    check(chosen["dataset"]["number"] >= number, f"lost {slots}: {chosen['dataset']} although {number} was protected")
    return at + 1


def end(lab, run, prefix=None):
    lab.tool("halt", "--prefix", prefix or lab.prefix)
    run.finish(code=6)
    lab.tool("halt", "--unset", "--prefix", prefix or lab.prefix)
    check("differs" not in run.text, run.text[-3000:])


def patterns(lab, scheme, nodes, losses):
    """All of them, in as many runs as their spares need."""
    todo = [p for n in range(1, losses + 1) for p in itertools.combinations(range(nodes), n)]
    total = 0
    while todo:
        spares, now = 0, []
        while todo and spares + len(todo[0]) <= AGENTS_MAX - nodes:
            now.append(todo.pop(0))
            spares += len(now[-1])
        prefix = lab.dir / f"prefix.{total}"
        prefix.mkdir()
        run = keep(lab, scheme, nodes, spares, prefix=prefix)
        at = 0
        for pattern in now:
            at = lose(run, at, pattern)
        new_one(run, at)
        end(lab, run, prefix)
        run.kill()
        total += len(now)
    print(f"    {scheme}: {total} patterns of up to {losses} losses, each byte-identical")


def test_every_loss_of_rs_3_2(lab):
    # FM-L2, FM-L5: redundancy is restored each time, or the next loss would be one too many.
    patterns(lab, "RS(3,2)", 5, 2)


def test_every_loss_of_rs_4_2(lab):
    # FM-L2
    patterns(lab, "RS(4,2)", 6, 2)


def test_every_loss_of_rs_6_3(lab):
    # FM-L2
    patterns(lab, "RS(6,3)", 9, 3)


def test_random_losses_of_sixteen_agents(lab):
    """Three sets that are not of one size, two ranks on some nodes, losses in all sets at once."""
    # FM-L2
    seed = int(os.environ.get("TEST_CODES_SEED", random.randrange(1 << 32)))
    print(f"    seed {seed}: TEST_CODES_SEED={seed} repeats it", flush=True)
    rng = random.Random(seed)
    sets = [range(0, 5), range(5, 10), range(10, 16)]
    lost = [sorted(s for members in sets for s in rng.sample(list(members), rng.randint(0, 2))) for _ in range(6)]
    run = keep(lab, "RS(4,2)", 16, sum(map(len, lost)), ranks=23, step=30_011)
    at = 0
    for slots in lost:
        at = lose(run, at, slots) if slots else at
    new_one(run, at)
    end(lab, run)


def test_one_loss_more_than_the_code_survives(lab):
    # FM-S14: its own exit code, never a wrong restart.
    run = keep(lab, "RS(3,2)", 5, 3)
    at, _ = new_one(run, 0)
    die(nodes_of(run, (0, 2, 3)))
    run.finish(code=4)
    check("lost" in run.text and "--from-scratch" in run.text, run.text[-1500:])
    check(not [e for e in run.events[at:] if e["event"] == "launching"], "it was launched again")


def test_one_loss_more_and_a_flushed_dataset_is_there(lab):
    # Beyond the scheme: the newest flushed dataset, and it says so.
    run = keep(lab, "RS(3,2)", 5, 3, more=("--flush-every", 2), pause_ms=100)
    at, flushed = level(run, 0, "persistent")
    at, _ = new_one(run, at)
    die(nodes_of(run, (1, 2, 4)))
    at, _ = run.wait_event("skipped", after=at)
    at, chosen = run.wait_event("restart_chosen", after=at)
    at, _ = run.wait_event("launching", after=at)
    chosen = [e for e in run.events[:at] if e["event"] == "restart_chosen"][-1]
    check(chosen["from_prefix"] and chosen["dataset"]["number"] >= flushed, f"{chosen}")
    new_one(run, at)
    end(lab, run)


def test_a_node_is_lost_while_another_is_rebuilt(lab):
    # FM-V2: within the scheme, whichever is lost meanwhile; also the spare that rebuilds.
    run = keep(lab, "RS(3,2)", 5, 6, size=3_000_000)
    at, _ = new_one(run, 0)
    for first, second in ((0, 3), (2, "spare")):
        die(nodes_of(run, [first]))
        at, _ = run.wait_event("spare_used", after=at)
        spare = run.events[at]["agent"]
        at, _ = run.wait_event(lambda e: e["event"] == "restart_chosen" and e["rebuild"], after=at)
        agents = run.agents()
        die([a for a in agents if a["alive"] and (a["id"] == spare if second == "spare" else a["node"] == second)])
        at, _ = run.wait_event("node_lost", after=at)
        at, _ = run.wait_event("launching", after=at)
        at, _ = new_one(run, at)
    end(lab, run)


def test_survivors_rebuild_what_has_no_spare(lab):
    # FM-V3: onto survivors, which then hold several nodes' data; the next run goes on from what they flush.
    run = keep(lab, "RS(3,2)", 5, 0)
    at, number = new_one(run, 0)
    die(nodes_of(run, (1, 4)))
    run.finish(code=5)
    listed = lab.listed()["datasets"]
    check(listed and listed[-1]["number"] >= number, f"{listed}")
    again = keep(lab, "RS(3,2)", 5, 0)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["dataset"]["number"] == listed[-1]["number"], f"{chosen}")
    at, _ = new_one(again, 0)
    end(lab, again)


def test_a_rack_is_lost(lab):
    # FM-L2: no set has two of a failure group, so that XOR survives a whole one.
    groups = lab.dir / "groups"
    groups.write_text("rack a: 0-3 8-9\nrack b: 4-7 10-13\n")
    run = keep(lab, "XOR", 8, 6, sets=(f"failure_groups={groups}",))
    at = lose(run, 0, (0, 1, 2, 3))
    new_one(run, at)
    end(lab, run)


def stored(lab):
    """Bytes of the caches' files but for the few that number what they hold: data, parity."""
    total = 0
    for at, _, names in os.walk(lab.cache):
        for name in names:
            try:
                size = os.path.getsize(os.path.join(at, name))
            except OSError:
                continue
            total += size
    return total


def test_what_redundancy_takes(lab):
    """B, 2 B, B + B / (N - 1), B (1 + m / k): within 1 % for equal loads, checksums included."""
    size = 60 * 32768 - 8
    for scheme, nodes, factor in (("SINGLE", 4, 1), ("PARTNER", 4, 2), ("XOR", 8, 1 + 1 / 7), ("RS(3,2)", 5, 1 + 2 / 3),
                                  ("RS(4,2)", 6, 1.5), ("RS(6,3)", 9, 1.5)):
        prefix = lab.dir / f"prefix.{scheme}"
        prefix.mkdir()
        run = keep(lab, scheme, nodes, 0, size=size, step=0, how="files", pause_ms=600_000, prefix=prefix,
                   sets=("chunk_bytes=32768", f"set_size={nodes}"))
        new_one(run, 0)
        found = until(lambda: stored(lab), 10, "something is stored")
        ratio = found / (nodes * (size + 8))
        print(f"    {scheme}: {ratio:.4f} B, {factor:.4f} is right")
        check(abs(ratio / factor - 1) < 0.01, f"{scheme} on {nodes} nodes stores {ratio:.4f} B instead of {factor:.4f}")
        run.process.send_signal(signal.SIGTERM)
        run.finish(code=None)
        run.kill()
        until(lambda: not stored(lab), 20, "the caches are empty again")


for _fn in list(globals().values()):
    if callable(_fn) and getattr(_fn, "__name__", "").startswith("test_"):
        _fn.seconds = 240
        _fn.no_mpi = True
del _fn
