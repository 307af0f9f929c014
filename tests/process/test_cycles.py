"""Launch, kill something at a random moment, again and again: nothing is left, nothing is wrong."""

import os
import random
import signal
import time

from harness import check, kill_agent, until
from test_loss import heat

CYCLES = int(os.environ.get("STANCHION_TEST_CYCLES", "6"))
STEPS = ("--nx", "128", "--ny", "128", "--steps", "60", "--every", "6")


def victims(run, rng):
    """What to kill: a function and its name, chosen among what lives now."""
    agents = [a for a in run.agents() if a["alive"] and a["node"] is not None]
    agent = rng.choice(agents)
    ranks = [r["pid"] for a in agents for r in a.get("ranks", [])]
    choices = [("runner", lambda: os.kill(run.process.pid, signal.SIGKILL)),
               ("agent", lambda: kill_agent(agent, False, False)),
               ("node", lambda: kill_agent(agent, True, True)),
               ("runner and node", lambda: (os.kill(run.process.pid, signal.SIGKILL), kill_agent(agent, True, True)))]
    if ranks:
        choices.append(("rank", lambda: os.kill(rng.choice(ranks), signal.SIGKILL)))
        choices.append(("interrupt", lambda: run.process.send_signal(signal.SIGTERM)))
    return rng.choice(choices)


def test_launch_and_kill(lab):
    seed = int(os.environ.get("STANCHION_TEST_SEED", random.randrange(1 << 32)))
    print(f"    seed {seed}: STANCHION_TEST_SEED={seed} repeats the choices", flush=True)
    rng = random.Random(seed)
    log = []
    for cycle in range(CYCLES):
        run = heat(lab, spares=1, step_ms=40, steps_args=STEPS, run_args=("--flush-every", rng.choice([0, 1, 3])))
        moment = rng.uniform(0.05, 2.5)
        # The moment is the test's input, not a way to wait for something.
        run.wait_event("started")
        end = time.monotonic() + moment
        with run.changed:
            run.changed.wait_for(lambda: run.closed or time.monotonic() >= end, moment)
        name = "nothing"
        if run.process.poll() is None:
            name, kill = victims_or_none(run, rng)
            if kill:
                try:
                    kill()
                except ProcessLookupError:
                    name = "nothing (it had ended)"
        code = run.finish(code=None, seconds=90)
        until(lambda: not lab.processes(), 60, f"cycle {cycle} ({name}): processes {lab.processes()}")
        lab.nothing_left()
        log.append(f"{name}@{moment:.2f}s:{code}")
        check(code in (0, 130, -9, 5, 4), f"cycle {cycle}: {name} at {moment:.2f} s: exit {code}\n{run.text[-3000:]}")
        if code == 0:
            run.same()
            # Where everything is done already, a further run would end before anything can hit it.
            lab.prefix = lab.dir / f"prefix.{cycle}"
            lab.prefix.mkdir()
    # Whatever happened: the last word is the right result.
    last = heat(lab, spares=0, steps_args=STEPS)
    last.finish()
    last.same()
    print("    " + " ".join(log), flush=True)


def victims_or_none(run, rng):
    try:
        return victims(run, rng)
    except Exception:
        # It ended while it was looked at.
        return "nothing (it was ending)", None


test_launch_and_kill.seconds = 60 + CYCLES * 20
