/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api: checkpoints in a loop, several files for each rank, restart with
 * every byte checked.
 *
 *   --flags checkpoint|output|both   of the datasets (checkpoint)
 *   --style output|checkpoint        Start_output with a name, or Start_checkpoint,
 *                                    whose datasets have names of the library's
 *                                    choice and whose files have the same paths
 *                                    each time (output)
 *
 * and the common options: see --help.
 */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "common.h"

/* The directory of --style checkpoint: the same in all of its datasets. */
static const char same_dir[] = "test_api";

static int flags_of(const char *text)
{
  if (strcmp(text, "checkpoint") == 0) {
    return SCR_FLAG_CHECKPOINT;
  }
  if (strcmp(text, "output") == 0) {
    return SCR_FLAG_OUTPUT;
  }
  EXPECT(strcmp(text, "both") == 0, "--flags: '%s' is none of checkpoint, output, both", text);
  return SCR_FLAG_CHECKPOINT | SCR_FLAG_OUTPUT;
}

/* The name says nothing: the step is in the files. A rank without files hears it
 * from the others. */
static long restart_unnamed(const struct options *o)
{
  int have = 0;
  long mine = 0, step = 0;
  must(SCR_Have_restart(&have, NULL), "SCR_Have_restart");
  if (have) {
    must(SCR_Start_restart(NULL), "SCR_Start_restart");
    EXPECT(check_files(o, same_dir, -1, &mine), "the checkpoint is damaged");
    must(SCR_Complete_restart(1), "SCR_Complete_restart");
  }
  MPI_Allreduce(&mine, &step, 1, MPI_LONG, MPI_MAX, MPI_COMM_WORLD);
  EXPECT(mine == step || mine == -1, "files of step %ld here, of %ld elsewhere", mine, step);
  say(step > 0 ? "restart from step %ld" : "start from step %ld", step);
  expect_restart(o, step);
  return step;
}

static void checkpoint_unnamed(const struct options *o, long step, bool restarted)
{
  must(SCR_Start_checkpoint(), "SCR_Start_checkpoint");
  die_if_asked(o, step, DIE_START, restarted);
  bool good = write_files(o, same_dir, step, restarted);
  must(SCR_Complete_checkpoint(good ? 1 : 0), "SCR_Complete_checkpoint");
  die_if_asked(o, step, DIE_DONE, restarted);
}

static bool needed(const struct options *o)
{
  int flag = -1;
  must(SCR_Need_checkpoint(&flag), "SCR_Need_checkpoint");
  EXPECT(flag == 0 || flag == 1, "SCR_Need_checkpoint: flag is %d", flag);
  return flag == 1 || o->always;
}

/* The steps after `done`; returns the last one. */
static long work(const struct options *o, int flags, bool unnamed, long done)
{
  bool restarted = done > 0;
  char name[SCR_MAX_FILENAME];
  for (long step = done + 1; step <= o->steps; step++) {
    pause_ms(o->sleep_ms);
    die_if_asked(o, step, DIE_STEP, restarted);
    MPI_Barrier(MPI_COMM_WORLD);
    if (needed(o)) {
      if (unnamed) {
        checkpoint_unnamed(o, step, restarted);
      } else {
        dataset_name(name, o, step);
        write_dataset(o, name, name, step, flags, restarted);
      }
      say("step %ld: written", step);
    }
    int stop = 0;
    must(SCR_Should_exit(&stop), "SCR_Should_exit");
    if (stop) {
      say("asked to stop at step %ld", step);
      return step;
    }
  }
  return o->steps;
}

int main(int argc, char **argv)
{
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  set_rank("test_api", rank);
  const char *flags = "checkpoint", *style = "output";
  const struct extra_option extra[] = {
      {"flags", NULL, &flags}, {"style", NULL, &style}, {NULL, NULL, NULL}};
  struct options o = parse_options(argc, argv, "timestep", extra);
  bool unnamed = strcmp(style, "checkpoint") == 0;
  EXPECT(unnamed || strcmp(style, "output") == 0, "--style: output or checkpoint");

  char same[SCR_MAX_FILENAME];
  must(SCR_Init(), "SCR_Init");
  const char *version = SCR_Get_version();
  EXPECT(version != NULL && version[0] != '\0', "SCR_Get_version returned nothing");
  must(SCR_Route_file("some/where", same), "SCR_Route_file outside of a dataset");
  EXPECT(strcmp(same, "some/where") == 0, "SCR_Route_file outside of a dataset: %s", same);

  long done = unnamed ? restart_unnamed(&o) : restart(&o);
  done = work(&o, flags_of(flags), unnamed, done);
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld", done);
  MPI_Finalize();
  return 0;
}
