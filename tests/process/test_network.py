"""The network goes away and comes back: real TCP in a network namespace of the job's own."""

import os
import shutil
import subprocess

from harness import Skip, check, until
from test_loss import committed, heat, protected


class Net:
    """A network namespace with nothing but a loopback device, which can be taken down."""

    def __init__(self):
        if os.geteuid() != 0:
            raise Skip("a network namespace of its own needs root")
        for tool in ("unshare", "nsenter", "ip"):
            if not shutil.which(tool):
                raise Skip(f"{tool} is not installed")
        probe = subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
        if probe.returncode != 0:
            raise Skip(f"network namespaces are not allowed here: {probe.stderr.strip()}")
        # `exec`: the runner's process is the one that the test knows.
        self.within = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

    @staticmethod
    def set(space, state):
        here = f"--net=/proc/{os.getpid()}/fd/{space}"
        subprocess.run(["nsenter", here, "ip", "link", "set", "lo", state], check=True)


def blackout(run, net, seconds):
    """Nothing gets through for so long. The length is the test's input, not a way to wait for something."""
    # The namespace stays while it is open here, also when the runner gives up.
    space = os.open(f"/proc/{run.process.pid}/ns/net", os.O_RDONLY)
    try:
        net.set(space, "down")
        with run.changed:
            run.changed.wait_for(lambda: False, seconds)
        net.set(space, "up")
    finally:
        os.close(space)


def test_a_short_blackout_costs_nothing(lab):
    # FM-F5a: silence is no evidence of death.
    net = Net()
    env = {"STANCHION_SILENCE_TIMEOUT_MS": 4000}
    run = heat(lab, step_ms=60, env=env, run_args=("--flush-every", 2), within=net.within)
    at = 0
    for _ in range(3):
        at, _ = protected(run, committed(run, at))
        blackout(run, net, 1.5)
    run.finish()
    run.same()
    check(not run.all_events("node_lost"), "a node was given up for a short silence")


def test_a_long_blackout_ends_honestly_and_the_next_run_goes_on(lab):
    # FM-F7, FM-V3: nobody hears anybody for longer than silence_timeout_ms.
    net = Net()
    env = {"STANCHION_SILENCE_TIMEOUT_MS": 2000, "STANCHION_ORPHAN_GRACE_MS": 500}
    run = heat(lab, step_ms=100, env=env, run_args=("--flush-every", 1), within=net.within)
    index = committed(run, 0)
    run.wait_event(lambda e: e["event"] == "level" and e["level"] == "persistent", after=index)
    blackout(run, net, 8)
    code = run.finish(code=None)
    if code == 0:
        # Whoever was given up was replaced by a spare.
        run.same()
        return
    check(code in (4, 5, 11), f"exit {code}\n{run.text[-3000:]}")
    until(lambda: not lab.processes(), 60, f"processes {lab.processes()}")
    again = heat(lab)
    _, chosen = again.wait_event("restart_chosen")
    check(chosen["from_prefix"], f"{chosen}")
    again.finish()
    again.same()
