/* SPDX-License-Identifier: Apache-2.0
 *
 * test_halt: works until SCR_Should_exit says stop, or to --steps.
 *
 *   --expect-halt 0|1   whether it has to be stopped (-1: either way)
 *
 * The harness asks for the halt from outside; --sleep-ms gives it the time. The
 * line "step N" on standard output tells how far it is, "halted at step N" that
 * it stopped, with its last state in a checkpoint if the library asked for one.
 */
#include <mpi.h>

#include "common.h"

static bool ask(int (*question)(int *), const char *call)
{
  int mine = -1, least, most;
  must(question(&mine), call);
  MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(&mine, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  EXPECT(least == most, "%s says %d on one rank and %d on another", call, least, most);
  EXPECT(mine == 0 || mine == 1, "%s: flag is %d", call, mine);
  return mine == 1;
}

int main(int argc, char **argv)
{
  int rank;
  long expect_halt = -1;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  set_rank("test_halt", rank);
  const struct extra_option extra[] = {{"expect-halt", &expect_halt, NULL}, {NULL, NULL, NULL}};
  struct options o = parse_options(argc, argv, "halt", extra);
  must(SCR_Init(), "SCR_Init");
  long done = restart(&o);
  bool restarted = done > 0, halted = ask(SCR_Should_exit, "SCR_Should_exit");
  while (!halted && done < o.steps) {
    long step = done + 1;
    char name[SCR_MAX_FILENAME];
    pause_ms(o.sleep_ms);
    die_if_asked(&o, step, DIE_STEP, restarted);
    if (ask(SCR_Need_checkpoint, "SCR_Need_checkpoint")) {
      dataset_name(name, &o, step);
      write_dataset(&o, name, name, step, SCR_FLAG_CHECKPOINT, restarted);
    }
    done = step;
    say("step %ld", done);
    halted = ask(SCR_Should_exit, "SCR_Should_exit");
  }
  must(SCR_Finalize(), "SCR_Finalize");
  say("%s at step %ld", halted ? "halted" : "finished", done);
  EXPECT(expect_halt < 0 || halted == (expect_halt != 0), "%s, against expectation",
         halted ? "was halted" : "was not halted");
  MPI_Finalize();
  return 0;
}
