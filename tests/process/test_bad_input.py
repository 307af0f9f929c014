"""Bad input and bad luck get a clear error, a distinct exit code, and lose nothing."""

import os
import socket
import subprocess
from pathlib import Path

from harness import STANCHION, Skip, check, until
from test_loss import RANKS, committed, heat, protected

USAGE, STORAGE, BAD_RESTART, APP_FAILED = 2, 7, 9, 3


def refused(lab, code, words, *args, env=None, prefix=None):
    """A run that must not start; its words name what is wrong."""
    run = lab.run(*args, command=["true"], nodes=2, env=env, prefix=prefix)
    run.finish(code=code)
    for word in words:
        check(word in run.text, f"'{word}' is not in: {run.text}")
    check(not run.all_events("launching"), "it was launched")


def once(fn):
    fn.no_mpi = True
    return fn


@once
def test_settings(lab):
    refused(lab, USAGE, ["set_sizes", "did you mean 'set_size'"], "--set", "set_sizes=3")
    refused(lab, USAGE, ["set_size", "takes"], "--set-size", "1")
    refused(lab, USAGE, ["scheme", "SINGLE"], env={"SCR_COPY_TYPE": "RAID6"})
    refused(lab, USAGE, ["flush_every"], env={"STANCHION_FLUSH_EVERY": "-2"})
    refused(lab, USAGE, ["chunk_bytes"], "--set", "chunk_bytes=1")
    (lab.prefix / ".scrconf").write_text("SCR_FLUSH=3\nthis is no setting\n")
    refused(lab, USAGE, ["line 2", ".scrconf"])


@once
def test_prefix_missing_or_a_file(lab):
    refused(lab, STORAGE, ["nowhere"], prefix=lab.dir / "nowhere")
    (lab.dir / "file").write_text("x")
    refused(lab, STORAGE, ["file"], prefix=lab.dir / "file")


def mounted(lab, name, options):
    """A small file system of its own; needs root."""
    if os.geteuid() != 0:
        raise Skip("mounting needs root")
    path = lab.dir / name
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Skip(f"mounting is not allowed here: {done.stderr.strip()}")
    return path


def unmount(path):
    subprocess.run(["umount", "-l", str(path)], check=False)


@once
def test_prefix_read_only(lab):
    path = mounted(lab, "ro", "size=1m,ro")
    try:
        refused(lab, STORAGE, [str(path)], prefix=path)
    finally:
        unmount(path)


def test_prefix_full(lab):
    # FM-V6: a failed flush is reported and costs the level, not the job.
    path = mounted(lab, "small", "size=300k")
    try:
        out = lab.dir / "result"
        run = lab.run("--flush-every", 2, command=lab.mpiexec(4, lab.program("heat2d"), "--nx", 256, "--ny", 256,
                      "--steps", 60, "--every", 10, "--out", out), nodes=2, prefix=path)
        run.finish(code=12)
        failed = run.all_events("flush_failed")
        check(failed and "space" in failed[0]["text"], f"{failed}")
        check(len(run.all_events("committed")) == 6 and out.exists(), "the job itself did not finish")
    finally:
        unmount(path)


def test_cache_full(lab):
    # ENOSPC where the ranks write: an error that says so; the dataset is dropped, nothing older is lost.
    path = mounted(lab, "cache", "size=3m")
    try:
        run = lab.run("--flush-every", 0, "--retries-max", 1, "--cache-dir", path,
                      command=lab.mpiexec(4, lab.program("heat2d"), "--nx", 512, "--ny", 512, "--steps", 60, "--every", 10),
                      nodes=2)
        code = run.finish(code=None)
        check(code != 0, "a job without room for its checkpoints cannot succeed")
        check("No space left" in run.text or "no space" in run.text, run.text[-2000:])
    finally:
        unmount(path)


@once
def test_cache_missing(lab):
    refused(lab, STORAGE, ["nocache"], "--cache-dir", lab.dir / "nocache")


def test_another_number_of_ranks(lab):
    # FM-S15
    heat(lab, steps_args=("--nx", "64", "--ny", "64", "--steps", "20", "--every", "10")).finish()
    run = lab.run(command=lab.mpiexec(4, lab.program("heat2d"), "--nx", 64, "--ny", 64, "--steps", 40, "--every", 10), nodes=4)
    run.finish(code=BAD_RESTART)
    check(f"{RANKS} ranks" in run.text and "4" in run.text, run.text[-2000:])
    check(len(run.all_events("launching")) == 1, "it tried again")


def test_a_rank_says_invalid(lab):
    # FM-F10: test_restart_reject rejects; here the writer does.
    run = lab.run("--runs-max", 1, command=lab.mpiexec(4, lab.program("test_api"), "--steps", 6, "--die-at", 4, "--die-rank", 1,
                  "--die-in", "start"), nodes=2, cwd=lab.prefix)
    run.finish(code=APP_FAILED)
    check(len(run.all_events("committed")) == 3, "datasets before the death are complete, the one under way is not")


SERIAL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <stanchion.h>

/* Two ranks without MPI: what each does is in argv[1]. */
static int say(stn_ctx *ctx, int rc)
{
    char text[4096] = "";
    stn_error_text(ctx, text, sizeof text);
    printf("rank %s: %d %s\n", getenv("STANCHION_RANK"), rc, text);
    return rc == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    stn_ctx *ctx = NULL;
    const char *what = argc > 1 ? argv[1] : "";
    int first = strcmp(getenv("STANCHION_RANK"), "0") == 0;
    int rc = stn_init(NULL, &ctx);
    if (rc != 0) {
        return say(ctx, rc);
    }
    if (strcmp(what, "names") == 0) {
        const char *name = first ? "one" : "two";
        return say(ctx, stn_begin(ctx, name, strlen(name), STN_FLAG_CHECKPOINT, NULL)) ? 0 : 9;
    }
    if (strcmp(what, "late") == 0 && !first) {
        pause();
    }
    return say(ctx, stn_barrier(ctx)) ? 0 : 9;
}
"""


def two_ranks(lab, what, env, late=False):
    """`late`: rank 1 never comes, and is ended when rank 0 has."""
    source = lab.dir / "two.c"
    source.write_text(SERIAL)
    lib = STANCHION.parent
    done = subprocess.run(["gcc", "-std=gnu11", "-Wall", "-Werror", f"-I{STANCHION.parents[2]}/include", str(source), "-o",
                           str(lab.dir / "two"), f"-L{lib}", "-lstanchion", f"-Wl,-rpath,{lib}"],
                          capture_output=True, text=True)
    check(done.returncode == 0, done.stderr)
    script = (f"STANCHION_RANK=0 STANCHION_SIZE=2 {lab.dir}/two {what} & a=$!; "
              f"STANCHION_RANK=1 STANCHION_SIZE=2 {lab.dir}/two {what} & b=$!; wait $a; r=$?; {'kill $b 2>/dev/null; ' if late else ''}wait $b; exit $r")
    run = lab.run("--runs-max", 1, command=["sh", "-c", script], nodes=2, env=env)
    run.finish(code=0)
    return run


@once
def test_ranks_disagree_on_the_name(lab):
    # FM-S13, FM-F10
    run = two_ranks(lab, "names", {})
    check("rank 0: -5" in run.text and "rank 1: -5" in run.text, run.text)


@once
def test_a_rank_that_never_comes(lab):
    # FM-V1: an error within the deadline, which names who is missing.
    run = two_ranks(lab, "late", {"STANCHION_COLLECTIVE_TIMEOUT_MS": "1500"}, late=True)
    check("rank 0: -3" in run.text, run.text)


def test_a_strangers_bytes_and_a_wrong_secret(lab):
    # FM-C1, FM-F11: whatever arrives at an agent's port, the job goes on.
    run = heat(lab, step_ms=40)
    run.wait_event("committed")
    for agent in run.agents()[:4]:
        host, port = agent["addr"].rsplit(":", 1)
        for junk in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(70000), b"\x00" * 48):
            with socket.create_connection((host, int(port)), timeout=10) as s:
                s.settimeout(10)
                try:
                    s.sendall(junk)
                    while s.recv(4096):
                        pass
                except OSError:
                    pass
    run.finish()
    run.same()
    check(len(run.all_events("launching")) == 1 and not run.all_events("node_lost"), "strangers did harm")


def test_a_strangers_bytes_on_the_local_socket(lab):
    run = heat(lab, step_ms=40)
    run.wait_event("committed")
    for agent in run.agents()[:2]:
        for junk in (b"hello\n", os.urandom(5000), b""):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                s.settimeout(10)
                s.connect(agent["socket"])
                try:
                    s.sendall(junk)
                    s.shutdown(socket.SHUT_WR)
                    while s.recv(4096):
                        pass
                except OSError:
                    pass
    run.finish()
    run.same()


def test_another_users_socket(lab):
    # FM-C2: neither the directory nor the socket lets another uid in.
    if os.geteuid() != 0:
        raise Skip("becoming another user needs root")
    os.chmod(lab.dir, 0o755)
    run = heat(lab, step_ms=40)
    run.wait_event("committed")
    path = run.node(0)["socket"]
    os.chmod(Path(path).parent, 0o755)
    os.chmod(Path(path).parents[1], 0o755)
    os.chmod(Path(path).parents[2], 0o755)
    os.chmod(path, 0o777)
    code = ("import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.settimeout(10)\n"
            f"try:\n s.connect({path!r})\n s.sendall(b'x'*100)\n sys.exit(1 if s.recv(100) else 0)\n"
            "except OSError:\n sys.exit(0)\n")
    done = subprocess.run(["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "python3", "-c", code],
                          capture_output=True, text=True, timeout=60)
    check(done.returncode == 0, f"another user got an answer: {done.stderr}")
    run.finish()
    run.same()


def test_modes_of_what_is_on_disk(lab):
    # DESIGN.md section 7: 0600 under 0700.
    run = heat(lab, step_ms=40)
    run.wait_event("committed")
    for agent in run.agents():
        for path in (agent["root"], agent["cache"]):
            mode = os.stat(path).st_mode & 0o777
            check(mode == 0o700, f"{path} has mode {mode:o}")
    with open(f"/proc/{run.agents()[0]['pid']}/environ", "rb") as f:
        check(b"SECRET" not in f.read().upper(), "the secret is in the environment")
    run.finish()


def test_unwritable_prefix_during_a_run(lab):
    """The prefix disappears while the job runs: checkpoints go on, the job does, the end says so."""
    run = heat(lab, step_ms=40, run_args=("--flush-every", 0))
    protected(run, committed(run, 0))
    hidden = lab.dir / "hidden"
    lab.prefix.rename(hidden)
    lab.prefix.write_text("no directory")
    run.finish(code=None)
    run.same()
    check(run.all_events("outcome")[-1]["event"] == "outcome" and "prefix" in run.text, run.text[-1500:])
    lab.prefix.unlink()
    hidden.rename(lab.prefix)
    lease = lab.prefix / ".stanchion/lease.json"
    if lease.exists():
        lease.unlink()


def test_a_frozen_agent(lab):
    # FM-F5a: silent to the runner and to a second observer: its node is lost, the job goes on.
    run = heat(lab, step_ms=40, spares=1, env={"STANCHION_SILENCE_TIMEOUT_MS": "1500"})
    at, _ = protected(run, committed(run, 0))
    agent = run.node(3)
    os.kill(agent["pid"], 19)
    _, lost = run.wait_event("node_lost", after=at)
    check(lost["silent"], f"{lost}")
    run.finish()
    run.same()
    until(lambda: not os.path.exists(f"/proc/{agent['pid']}"), 10, "the frozen agent was ended")


