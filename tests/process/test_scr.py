"""Programs written for SCR, unmodified, through libscr.so: every call and setting, one rank and several."""

import subprocess

from harness import ROOT, check, files_under


def sequence(lab, steps, ranks, nodes, env=None):
    """Runs a program again and again on one prefix; each step is (arguments, may fail)."""
    for args, dies in steps:
        program = lab.program(args[0])
        command = [program, *args[1:]] if args[0] == "serial" else lab.mpiexec(ranks, program, *args[1:])
        # One launch: the kill and the second run are the sequence's own.
        run = lab.run("--runs-max", 1, *(env or {}).get("args", ()), command=command, nodes=nodes,
                      env=(env or {}).get("env"), cwd=lab.prefix)
        code = run.finish(code=None)
        check((code != 0) == dies, f"{args}: exit {code}\n{run.text[-3000:]}")


SEQUENCES = {
    "api": [(("test_api", "--steps", "6", "--die-at", "4", "--die-rank", "0", "--die-in", "write"), True),
            (("test_api", "--steps", "6", "--expect-restart", "3"), False)],
    "api_start_checkpoint": [(("test_api", "--style", "checkpoint", "--steps", "6", "--die-at", "4", "--die-rank", "0"), True),
                             (("test_api", "--style", "checkpoint", "--steps", "6"), False)],
    "api_both_flags": [(("test_api", "--flags", "both", "--files", "3", "--steps", "4"), False),
                       (("test_api", "--flags", "both", "--files", "3", "--steps", "6", "--expect-restart", "4"), False)],
    "config": [(("test_config",), False), (("test_config", "--expect-restart", "1"), False)],
    "output": [(("test_output", "--steps", "6"), False), (("test_output", "--check-prefix", "1"), False),
               (("test_output", "--steps", "9", "--expect-restart", "5"), False)],
    "reject": [(("test_restart_reject", "--steps", "3", "--rejects", "0"), False),
               (("test_restart_reject", "--steps", "3", "--seed", "2", "--expect-restart", "2"), False),
               (("test_restart_reject", "--steps", "3", "--rejects", "0", "--expect-restart", "3", "--expect-seed", "2"), False),
               (("test_restart_reject", "--steps", "3", "--rejects", "3", "--expect-restart", "0"), False)],
    "current": [(("test_current", "--steps", "6"), False),
                (("test_current", "--drop", "6", "--steps", "5", "--expect-restart", "5"), False),
                (("test_current", "--delete", "5", "--steps", "4", "--expect-restart", "4"), False),
                (("test_current", "--current", "2", "--expect-restart", "2", "--steps", "2"), False)],
    "cpp": [(("test_cpp", "--die-at", "3"), True), (("test_cpp", "--expect-restart", "2"), False)],
}
# Every checkpoint goes to the prefix, since each step is a run of its own.
FLUSH = {"args": ("--flush-every", 1)}


def several(name):
    def test(lab):
        sequence(lab, SEQUENCES[name], ranks=4, nodes=2, env=FLUSH)

    return test


def single(name):
    def test(lab):
        sequence(lab, SEQUENCES[name], ranks=1, nodes=2, env=FLUSH)

    test.no_mpi = True
    return test


for _name in SEQUENCES:
    globals()[f"test_{_name}_4_ranks"] = several(_name)
    globals()[f"test_{_name}_1_rank"] = single(_name)


def test_serial(lab):
    sequence(lab, [(("serial", "--die-at", "3"), True), (("serial", "--expect-restart", "2"), False)], 1, 1, FLUSH)


test_serial.no_mpi = True


def test_halt(lab):
    run = lab.run("--flush-every", 0, command=lab.mpiexec(4, lab.program("test_halt"), "--sleep-ms", 50, "--steps", 1000,
                                                          "--expect-halt", 1), nodes=2, cwd=lab.prefix)
    run.wait_event("committed")
    lab.tool("halt", "--prefix", lab.prefix)
    run.finish(code=6)
    lab.tool("halt", "--unset", "--prefix", lab.prefix)


def test_settings_of_scr(lab):
    """SCR's variables in the environment act; those without a meaning are named once, and so are unknown ones."""
    env = {"SCR_COPY_TYPE": "PARTNER", "SCR_SET_SIZE": "2", "SCR_FLUSH": "2", "SCR_CACHE_SIZE": "3", "SCR_DEBUG": "1",
           "SCR_CHECKPOINT_INTERVAL": "2", "SCR_RUNS": "1", "SCR_CRC_ON_COPY": "1", "SCR_NO_SUCH": "1",
           "SCR_PREFIX": str(lab.prefix), "SCR_CACHE_BASE": str(lab.cache)}
    run = lab.run(command=lab.mpiexec(4, lab.program("test_api"), "--steps", "8"), nodes=2, env=env, cwd=lab.prefix)
    run.finish()
    check(run.text.count("SCR_CRC_ON_COPY") == 1, run.text)
    check(run.text.count("SCR_NO_SUCH") == 1, run.text)
    done = run.all_events("committed")
    check(len(done) == 4, f"{len(done)} checkpoints of 8 calls at interval 2")
    check(all(e["scheme"] == "PARTNER" and e["set_size"] == 2 for e in done), f"{done}")
    flushed = [e for e in run.all_events("level") if e["level"] == "persistent"]
    check(len(flushed) == 2, f"{flushed}")


def test_disabled_passes_through(lab):
    """SCR_ENABLE=0: files go straight to the prefix, no agent is asked."""
    env = {"SCR_ENABLE": "0", "SCR_PREFIX": str(lab.prefix)}
    command = lab.mpiexec(2, lab.program("test_api"), "--steps", "3", "--always", "1")
    done = subprocess.run(command, env=lab.env(**env), capture_output=True, text=True, timeout=60, cwd=lab.prefix)
    check(done.returncode == 0, done.stdout + done.stderr)
    check(files_under(lab.prefix), "no file in the prefix")


def test_checkpoint_by_seconds_and_overhead(lab):
    """need_checkpoint by time: a job of many short steps makes few; by overhead: likewise."""
    # A checkpoint of this program takes more than 20 us, which is 0.002 % of a second.
    for setting, value, most in (("SCR_CHECKPOINT_SECONDS", "1", 4), ("SCR_CHECKPOINT_OVERHEAD", "0.01", 25)):
        prefix = lab.dir / setting
        prefix.mkdir()
        env = {setting: value, "SCR_FLUSH": "0"}
        run = lab.run(command=lab.mpiexec(2, lab.program("test_api"), "--steps", "30", "--sleep-ms", "40"), nodes=2,
                      env=env, prefix=prefix, cwd=prefix)
        run.finish()
        made = len(run.all_events("committed"))
        check(1 <= made <= most, f"{setting}: {made} checkpoints in 30 steps of 40 ms")


def test_header_compiles(lab):
    """C11 and C++17 without a warning."""
    for compiler, std, name in (("gcc", "c11", "x.c"), ("g++", "c++17", "x.cpp")):
        for header in ("scr.h", "stanchion.h"):
            source = lab.dir / name
            source.write_text(f'#include "{header}"\nint main(void) {{ return 0; }}\n')
            done = subprocess.run([compiler, f"-std={std}", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic",
                                   f"-I{ROOT}/include", "-c", str(source), "-o", str(lab.dir / "x.o")],
                                  capture_output=True, text=True, timeout=60)
            check(done.returncode == 0, done.stderr)


test_header_compiles.no_mpi = True
