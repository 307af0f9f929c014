"""Real processes, real failures: what the tests in this directory share.

A test is a function that takes a `Lab` and raises on a deviation. `run.py` runs them, each with a
deadline, and counts what passed, failed and was skipped, with the reason. Nothing waits for time to
pass: everything waits for an event of the runner (its --json-events through a fifo), for a process to
end, or for a condition, with a deadline.
"""

import json
import os
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STANCHION = ROOT / "target/release/stanchion"


class Failed(Exception):
    """The product did not do what was expected."""


class Skip(Exception):
    """The test cannot run here; the text says why."""


def check(condition, text):
    if not condition:
        raise Failed(text)


def until(condition, seconds, what):
    """Waits for `condition()` to be true; its value. For facts that nothing announces."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"not within {seconds} s: {what}")
        select.select([], [], [], 0.02)


class Lab:
    """A scratch directory, an MPI, and everything that is started in it."""

    def __init__(self, mpi, base=None):
        self.mpi = mpi
        # Short, for sockets below it; node caches in memory.
        self.dir = Path(tempfile.mkdtemp(prefix="stn-", dir=base or "/tmp"))
        self.cache = Path(tempfile.mkdtemp(prefix="stn-test-", dir="/dev/shm"))
        self.prefix = self.dir / "prefix"
        self.prefix.mkdir()
        self.runs = []
        self.shm_before = self.shm()

    def program(self, name):
        path = ROOT / "target/examples" / self.mpi / name
        check(path.exists(), f"{path} is not built: make examples MPI={self.mpi}")
        return str(path)

    def mpiexec(self, ranks, *command):
        return [str(ROOT / "scripts/mpi-env"), self.mpi, "mpiexec", "-n", str(ranks), *map(str, command)]

    def env(self, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("STANCHION_", "SCR_"))}
        if "STANCHION_MPI_DIR" in os.environ:
            env["STANCHION_MPI_DIR"] = os.environ["STANCHION_MPI_DIR"]
        env["STANCHION_RUN_DIR"] = str(self.dir)
        env["STANCHION_CACHE_DIR"] = str(self.cache)
        env.update({k: str(v) for k, v in more.items()})
        return env

    def run(self, *args, command, env=None, nodes=8, spares=0, prefix=None, cwd=None, within=()):
        """`within`: what starts the runner, when it shall not be started plainly."""
        run = Run(self, [*within, str(STANCHION), "run", "--nodes", str(nodes), "--spares", str(spares),
                         "--prefix", str(prefix or self.prefix), *map(str, args)],
                  command, self.env(**(env or {})), cwd)
        self.runs.append(run)
        return run

    def tool(self, *args, env=None, code=0, timeout=60):
        """A stanchion command that ends by itself; its standard output."""
        done = subprocess.run([str(STANCHION), *map(str, args)], env=self.env(**(env or {})),
                              capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        check(code is None or done.returncode == code,
              f"stanchion {' '.join(map(str, args))}: exit {done.returncode}, wanted {code}\n{done.stdout}{done.stderr}")
        done.both = done.stdout + done.stderr
        return done

    def listed(self):
        return json.loads(self.tool("list", "--prefix", self.prefix, "--json").stdout)

    @staticmethod
    def shm():
        """Shared memory that nobody maps: what a living job of somebody else has is not left by ours."""
        there = {n for n in os.listdir("/dev/shm") if not n.startswith("stn-test-")}
        for pid in filter(str.isdigit, os.listdir("/proc")) if there else ():
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            there -= {line.split("/dev/shm/", 1)[1].split("/")[0].strip() for line in maps.splitlines() if "/dev/shm/" in line}
        return there

    def processes(self):
        """Processes that belong to this lab: its directory is in their command line or environment."""
        mine = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if int(pid) == os.getpid():
                continue
            try:
                text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(self.dir).encode() in text and state != "Z":
                mine.append((int(pid), text.split(b"\0")[0].decode(errors="replace")))
        return mine

    @staticmethod
    def logs(job):
        """What is there, and how the agents' logs end: they know why they left it."""
        text = "".join(f"\n  {path}" for path in sorted(job.rglob("*")))
        for log in sorted(job.rglob("agent.log")):
            text += f"\n== {log}\n{log.read_text(errors='replace')[-1500:]}"
        return text

    def nothing_left(self, seconds=20):
        """FM-V4: no process, socket, lock or shared memory outlives the job."""
        until(lambda: not self.processes(), seconds, f"processes gone: {self.processes()}")
        left = [p for p in self.dir.rglob("*") if stat.S_ISSOCK(p.lstat().st_mode)]
        check(not left, f"sockets left: {left}")
        until(lambda: not list(self.cache.iterdir()), 5, f"caches left: {list(self.cache.iterdir())}")
        # A job beside this one may have lost a rank: its runner is given the time to clean up.
        until(lambda: not self.shm() - self.shm_before, 20, f"shared memory left: {self.shm() - self.shm_before}")
        jobs = [p for p in self.dir.glob("stanchion-*/*")]
        check(not jobs, f"job directories left: {jobs}{''.join(map(self.logs, jobs))}")
        lease = self.prefix / ".stanchion/lease.json"
        check(not lease.exists(), f"the lease is left in the prefix: {lease.read_text() if lease.exists() else ''}")

    def close(self, failed):
        for run in self.runs:
            run.kill()
        for pid, _ in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if failed and os.environ.get("STANCHION_TEST_KEEP"):
            print(f"    kept: {self.dir} {self.cache}")
            return
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.rmtree(self.dir, ignore_errors=True)
        if failed:
            # No other test is to find what the killed left.
            for name in self.shm() - self.shm_before:
                Path("/dev/shm", name).unlink(missing_ok=True)


def files_under(directory, pattern="*"):
    """The files below that match; other than with rglob, directories may go while it looks."""
    found = (Path(at, name) for at, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if path.match(pattern) and path.is_file())


class Run:
    """One `stanchion run`."""

    def __init__(self, lab, args, command, env, cwd):
        self.lab = lab
        self.events = []
        self.changed = threading.Condition()
        self.closed = False
        n = len(lab.runs)
        self.fifo = lab.dir / f"events.{n}"
        self.out_path = lab.dir / f"out.{n}"
        os.mkfifo(self.fifo)
        self.out = open(self.out_path, "wb")
        self.process = subprocess.Popen([*args, "--json-events", str(self.fifo), "--", *map(str, command)],
                                        env=env, stdin=subprocess.DEVNULL, stdout=self.out,
                                        stderr=subprocess.STDOUT, cwd=cwd or lab.dir)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        fd = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        buffer = b""
        while True:
            ready, _, _ = select.select([fd], [], [], 0.05)
            data = os.read(fd, 65536) if ready else None
            if data:
                *lines, buffer = (buffer + data).split(b"\n")
                with self.changed:
                    self.events += [json.loads(line) for line in lines]
                    self.changed.notify_all()
            elif self.process.poll() is not None:
                break
            elif data == b"":
                select.select([], [], [], 0.02)  # nobody writes yet
        os.close(fd)
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    @property
    def text(self):
        return self.out_path.read_text(errors="replace")

    def wait_event(self, match, seconds=60, after=0):
        """The first event that `match` says yes to, from index `after` on: (index, event)."""
        if isinstance(match, str):
            kind = match
            match = lambda e: e["event"] == kind
        deadline = time.monotonic() + seconds
        with self.changed:
            seen = after
            while True:
                while seen < len(self.events):
                    if match(self.events[seen]):
                        return seen, self.events[seen]
                    seen += 1
                left = deadline - time.monotonic()
                if self.closed or left <= 0:
                    raise Failed(f"the event did not come; the runner's words:\n{self.text[-3000:]}")
                self.changed.wait(left)

    def all_events(self, kind):
        return [e for e in self.events if e["event"] == kind]

    def finish(self, code=0, seconds=120):
        try:
            got = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"the run hangs; its words:\n{self.text[-4000:]}") from None
        with self.changed:
            self.changed.wait_for(lambda: self.closed, 10)
        check(code is None or got == code, f"exit {got}, wanted {code}; its words:\n{self.text[-4000:]}")
        return got

    def status(self):
        jobs = json.loads(self.lab.tool("status", "--json").stdout)["jobs"]
        mine = [j for j in jobs if j["info"] and j["info"]["pid"] == self.process.pid]
        check(mine and mine[0]["status"], f"no status of this run: {jobs}")
        return mine[0]["status"]

    def agents(self):
        return self.status()["agents"]

    def node(self, slot):
        found = [a for a in self.agents() if a["node"] == slot and a["alive"]]
        check(found, f"node {slot} has no living agent")
        return found[0]

    def kill_node(self, slot):
        """A node dies: its agent and ranks at once, and everything it held."""
        agent = self.node(slot)
        kill_agent(agent, ranks=True, wipe=True)
        return agent

    def kill_agent(self, slot):
        agent = self.node(slot)
        kill_agent(agent, ranks=False, wipe=False)
        return agent

    def ranks(self):
        """Pids of the application's ranks, from the agents' status."""
        return {r["rank"]: r["pid"] for a in self.agents() if a["alive"] for r in a.get("ranks", [])}

    def kill_rank(self, rank):
        pid = until(lambda: self.ranks().get(rank), 30, f"rank {rank} is known")
        os.kill(pid, signal.SIGKILL)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.out.close()


def kill_agent(agent, ranks, wipe):
    pids = [agent["pid"]] + [r["pid"] for r in agent.get("ranks", []) if ranks]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            pass
    if wipe:
        shutil.rmtree(agent["cache"], ignore_errors=True)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if wipe:
        shutil.rmtree(agent["cache"], ignore_errors=True)


_references = {}


def reference(lab, ranks, *args):
    """The result of the same program without Stanchion and without failures."""
    key = (lab.mpi, ranks, args)
    if key not in _references:
        with tempfile.TemporaryDirectory(prefix="stn-ref-") as tmp:
            out = Path(tmp) / "result"
            command = lab.mpiexec(ranks, lab.program("heat2d-plain"), *args, "--plain", tmp, "--out", out)
            done = subprocess.run(command, env=lab.env(), capture_output=True, text=True, timeout=120)
            check(done.returncode == 0, f"the reference run failed: {done.stdout}{done.stderr}")
            _references[key] = out.read_bytes()
    return _references[key]


def same_result(lab, out, ranks, *args):
    check(Path(out).read_bytes() == reference(lab, ranks, *args),
          "the result differs from that of the undisturbed run")
