"""The loss matrix: whatever dies, the end is byte-identical, or the refusal is honest.

8 nodes with 2 ranks each, sets of 4, at least 3 losses in a run of at least 5 datasets.
"""

import os
import signal

from harness import check, kill_agent, same_result, until

RANKS = 16
ARGS = ("--nx", "256", "--ny", "256", "--steps", "100", "--every", "10")


def heat(lab, run_args=(), spares=3, step_ms=30, mb=0, env=None, steps_args=ARGS, scheme="XOR", within=(),
         program="heat2d"):
    """heat2d on 8 nodes, under Stanchion."""
    out = lab.dir / "result"
    more = ("--ckpt-mb", str(mb)) if mb else ()
    command = lab.mpiexec(RANKS, lab.program(program), *steps_args, *more, "--step-ms", str(step_ms), "--out", out)
    run = lab.run("--scheme", scheme, "--set-size", 4, *run_args, command=command, spares=spares, env=env,
                  within=within)
    run.result = out
    run.same = lambda: same_result(lab, out, RANKS, *steps_args, *more)
    return run


def committed(run, after, count=1):
    """Waits for `count` further checkpoints; the index of the last event."""
    for _ in range(count):
        after, _ = run.wait_event("committed", after=after)
        after += 1
    return after


def protected(run, after):
    """Waits for a checkpoint that is protected; the index after it."""
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "protected", after=after)
    return at + 1, event


def losses_before_protected(run, lose, ranks):
    """Two nodes are lost, each right behind a commit: the newest dataset or the one before it is used."""
    at, _ = protected(run, committed(run, 0))
    for rank in ranks:
        at, _ = run.wait_event("committed", after=at)
        lose(rank)
        at, _ = run.wait_event("node_lost", after=at)
        at, chosen = run.wait_event("restart_chosen", after=at)
        check(chosen["dataset"], f"a restart from nothing: {chosen}")
        at, _ = run.wait_event("launching", after=at)
    run.finish()
    run.same()


def three_losses(run, lose):
    """Lets the job make a protected checkpoint, loses something, three times; then to the end."""
    at = 0
    for n in range(3):
        # A checkpoint of this launch: what was restored is protected anew before the ranks are there.
        at = committed(run, at)
        at, _ = protected(run, at)
        lose(n)
        at, _ = run.wait_event(lambda e: e["event"] in ("node_lost", "app_lost"), after=at)
        at, _ = run.wait_event("launching", after=at)
    run.finish()
    check(len(run.all_events("committed")) >= 5, "fewer than 5 datasets")
    chosen = run.all_events("restart_chosen")[1:]
    check(len(chosen) >= 3 and all(e["dataset"] for e in chosen), f"a restart from nothing: {chosen}")
    run.same()


def test_a_rank_dies(lab):
    # FM-L1, FM-F1
    run = heat(lab, spares=0)
    three_losses(run, lambda n: run.kill_rank(3 + 4 * n))


def test_all_ranks_die(lab):
    # FM-L1
    run = heat(lab, spares=0)

    def lose(_):
        for pid in run.ranks().values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    three_losses(run, lose)


def test_an_agent_dies(lab):
    # FM-F2a
    run = heat(lab)
    three_losses(run, lambda n: run.kill_agent((1, 5, 0)[n]))


def test_a_node_dies_xor(lab):
    # FM-L2
    run = heat(lab)
    three_losses(run, lambda n: run.kill_node((2, 0, 7)[n]))


def test_a_node_dies_partner(lab):
    # FM-L2
    run = heat(lab, scheme="PARTNER")
    three_losses(run, lambda n: run.kill_node((3, 0, 6)[n]))


def test_one_node_in_each_of_two_sets_dies(lab):
    # FM-L2: XOR survives one node of each set, at once.
    run = heat(lab, spares=6)

    def lose(n):
        first, second = run.node(n), run.node(4 + n)
        for agent in (first, second):
            os.kill(agent["pid"], signal.SIGSTOP)
        kill_agent(first, ranks=True, wipe=True)
        kill_agent(second, ranks=True, wipe=True)

    three_losses(run, lose)


def test_two_nodes_that_are_no_partners_die(lab):
    # FM-L2: PARTNER survives any nodes but a node with the one that keeps its copy.
    run = heat(lab, spares=6, scheme="PARTNER")

    def lose(n):
        agents = [run.node((0, 1, 4)[n]), run.node((2, 3, 6)[n])]
        for agent in agents:
            os.kill(agent["pid"], signal.SIGSTOP)
        for agent in agents:
            kill_agent(agent, ranks=True, wipe=True)

    three_losses(run, lose)


LONGER = ARGS[:5] + ("160",) + ARGS[6:]


def lose_at(lab, moment, missed, mb=4, run_args=()):
    """Loses nodes at moments that `moment` waits for, at least three of them; `missed` tells whether one came too
    late, which the test cannot forbid: at least one must not."""
    run = heat(lab, spares=8, mb=mb, run_args=run_args, step_ms=40, steps_args=LONGER)
    at, _ = protected(run, committed(run, 0))
    hits = losses = 0
    while losses < 3 or (hits == 0 and losses < 8):
        # Who dies is looked up before: at the moment itself there is no time to ask.
        victim = run.node((1, 6, 3, 4, 0, 2, 5, 7)[losses])
        at, event = moment(run, len(run.events))
        kill_agent(victim, ranks=True, wipe=True)
        lost, _ = run.wait_event("node_lost", after=at)
        losses += 1
        hits += not missed(run, at, lost, event)
        at, _ = run.wait_event("launching", after=lost)
        at, _ = run.wait_event("restart_done", after=at)
    check(hits >= 1, f"none of {losses} losses came at the moment that was meant")
    run.finish(seconds=180)
    run.same()


def test_a_node_dies_while_a_checkpoint_is_written(lab):
    # FM-S2: what is not voted on is never used.
    def missed(run, at, lost, event):
        return any(e["event"] == "committed" and e["number"] == event["number"] for e in run.events[at:lost])

    lose_at(lab, lambda run, at: run.wait_event("began", after=at), missed, mb=16)


def test_a_node_dies_before_the_checkpoint_is_protected(lab):
    def missed(run, at, lost, event):
        return any(e["event"] == "level" and e["level"] == "protected"
                   and e["dataset"]["number"] == event["number"] for e in run.events[at:lost])

    lose_at(lab, lambda run, at: run.wait_event("committed", after=at), missed, mb=16)


def test_a_node_dies_while_a_checkpoint_is_flushed(lab):
    # FM-S9. Every checkpoint is flushed, right after it is protected.
    def missed(run, at, lost, event):
        return any(e["event"] == "level" and e["level"] == "persistent"
                   and e["dataset"]["number"] == event["dataset"]["number"] for e in run.events[at:lost])

    lose_at(lab, lambda run, at: run.wait_event(
        lambda e: e["event"] == "level" and e["level"] == "protected", after=at), missed,
        mb=16, run_args=("--flush-every", 1))
    listed = lab.tool("verify", "--all", "--prefix", lab.prefix)
    check(listed.returncode == 0, listed.both)


def test_a_node_dies_while_a_rebuild_runs(lab):
    # FM-V2: first a node, then the spare that is rebuilding it, then one of another set.
    run = heat(lab, spares=6, mb=16, step_ms=40)
    at, _ = protected(run, 0)
    for n in range(3):
        run.kill_node(n)
        at, spare = run.wait_event("spare_used", after=at)
        at, _ = run.wait_event(lambda e: e["event"] == "restart_chosen" and e["rebuild"], after=at)
        if n % 2 == 0:
            kill_agent(next(a for a in run.agents() if a["id"] == spare["agent"]), ranks=True, wipe=True)
        else:
            run.kill_node(4 + n)
        at, _ = run.wait_event("node_lost", after=at)
        at, _ = run.wait_event("launching", after=at)
        at, _ = protected(run, at)
    run.finish(seconds=180)
    run.same()


def lose_two_of_a_set(run, at):
    agents = [run.node(1), run.node(2)]
    for agent in agents:
        os.kill(agent["pid"], signal.SIGSTOP)
    for agent in agents:
        kill_agent(agent, ranks=True, wipe=True)
    return run.wait_event("node_lost", after=at)[0]


def test_two_nodes_of_a_set_die_and_a_flushed_dataset_is_there(lab):
    # Beyond the scheme: the newest flushed dataset, and it says so.
    run = heat(lab, run_args=("--flush-every", 3), spares=3)
    at, event = run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent")
    flushed = event["dataset"]["number"]
    at = committed(run, at, 1)
    at = lose_two_of_a_set(run, at)
    _, skipped = run.wait_event("skipped", after=at)
    at, chosen = run.wait_event("restart_chosen", after=at)
    check(chosen["from_prefix"] and chosen["dataset"]["number"] >= flushed, f"{chosen}")
    check("lost" in skipped["text"], skipped["text"])
    run.finish()
    run.same()


def test_two_nodes_of_a_set_die_and_nothing_is_flushed(lab):
    # FM-S14: its own exit code, never a wrong restart.
    run = heat(lab, run_args=("--flush-every", 0), spares=3)
    at, _ = protected(run, 0)
    at = lose_two_of_a_set(run, at)
    run.finish(code=4)
    check("lost" in run.text and "--from-scratch" in run.text, run.text[-1500:])
    check(not [e for e in run.events[at:] if e["event"] == "launching"], "it was launched again")


def test_no_spare_is_left(lab):
    # The survivors flush what they have before the job ends, and the next run resumes from it.
    run = heat(lab, run_args=("--flush-every", 0), spares=0)
    at, event = protected(run, 0)
    run.kill_node(3)
    run.finish(code=5)
    listed = lab.listed()["datasets"]
    check(listed and listed[-1]["number"] >= event["dataset"]["number"], f"{listed}")
    again = heat(lab, spares=0)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["dataset"], f"{chosen}")
    again.finish()
    again.same()


def runner_dies(lab, with_node):
    run = heat(lab, run_args=("--flush-every", 0), spares=1)
    at, event = protected(run, 0)
    agents = run.agents()
    check(agents, "no agents")
    node = run.node(0)
    os.kill(run.process.pid, signal.SIGKILL)
    if with_node:
        kill_agent(node, ranks=True, wipe=True)
    run.process.wait()
    # FM-V3: the agents flush by themselves and leave.
    until(lambda: not lab.processes(), 60, "the agents left")
    listed = lab.listed()["datasets"]
    check(listed and listed[-1]["number"] >= event["dataset"]["number"], f"{listed}")
    again = heat(lab, spares=0)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"] and chosen["dataset"]["number"] == listed[-1]["number"], f"{chosen}")
    again.finish()
    again.same()


def test_the_runner_dies(lab):
    # FM-F4, FM-V3
    runner_dies(lab, with_node=False)


def test_the_runner_dies_with_its_node(lab):
    # FM-F4, FM-V3
    runner_dies(lab, with_node=True)


def test_the_next_run_waits_for_the_orphans(lab):
    # FM-C5: started at once, it does not miss what they are about to flush.
    run = heat(lab, run_args=("--flush-every", 0), spares=0, mb=8)
    _, event = protected(run, 0)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    again = heat(lab, spares=0, mb=8)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["dataset"] and chosen["dataset"]["number"] >= event["dataset"]["number"], f"{chosen}")
    again.finish()
    again.same()


for _fn in list(globals().values()):
    if callable(_fn) and getattr(_fn, "__name__", "").startswith("test_"):
        _fn.seconds = 240
del _fn
