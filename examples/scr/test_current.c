/* SPDX-License-Identifier: Apache-2.0
 *
 * test_current: SCR_Drop, SCR_Delete, SCR_Current. After SCR_Init and before the
 * restart, in this order:
 *
 *   --drop STEP      takes the dataset out of the index; its files stay
 *   --delete STEP    removes it with its files
 *   --current STEP   makes it the one to restart from
 *
 * --expect-restart says what must be restarted from after that. Then the steps up
 * to --steps are written, so that a first run with no options makes datasets 1
 * to 6. All are checkpoint and output, so that they are in the prefix.
 */
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>

#include "common.h"

static bool in_prefix(const char *dataset)
{
  char path[SCR_MAX_FILENAME];
  file_path(path, dataset, 0);
  return access(path, F_OK) == 0;
}

/* All ranks have looked before any goes on to change what is there. */
static bool looked(const char *dataset)
{
  bool there = in_prefix(dataset);
  MPI_Barrier(MPI_COMM_WORLD);
  return there;
}

static void drop(const char *dataset)
{
  bool before = looked(dataset);
  int rc = SCR_Drop(dataset);
  EXPECT(rc == SCR_SUCCESS, "SCR_Drop(%s) failed (%d)", dataset, rc);
  EXPECT(in_prefix(dataset) == before, "SCR_Drop(%s) did something to the files", dataset);
}

static void delete(const char *dataset)
{
  int rc = SCR_Delete(dataset);
  EXPECT(rc == SCR_SUCCESS, "SCR_Delete(%s) failed (%d)", dataset, rc);
  EXPECT(!in_prefix(dataset), "SCR_Delete(%s) left files in the prefix", dataset);
}

static void current(const char *dataset)
{
  char name[SCR_MAX_FILENAME];
  int have = 0;
  int rc = SCR_Current(dataset);
  EXPECT(rc == SCR_SUCCESS, "SCR_Current(%s) failed (%d)", dataset, rc);
  must(SCR_Have_restart(&have, name), "SCR_Have_restart");
  EXPECT(have == 1, "after SCR_Current(%s) there is no restart", dataset);
}

static void with(const struct options *o, long step, void (*action)(const char *))
{
  char name[SCR_MAX_FILENAME];
  if (step > 0) {
    dataset_name(name, o, step);
    action(name);
  }
}

int main(int argc, char **argv)
{
  int rank;
  long to_drop = 0, to_delete = 0, to_current = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  set_rank("test_current", rank);
  const struct extra_option extra[] = {{"drop", &to_drop, NULL},
                                       {"delete", &to_delete, NULL},
                                       {"current", &to_current, NULL},
                                       {NULL, NULL, NULL}};
  struct options o = parse_options(argc, argv, "current", extra);
  must(SCR_Init(), "SCR_Init");
  EXPECT(SCR_Current("no-such-dataset") != SCR_SUCCESS, "SCR_Current found what is not there");
  with(&o, to_drop, drop);
  with(&o, to_delete, delete);
  with(&o, to_current, current);
  long done = restart(&o);
  for (long step = done + 1; step <= o.steps; step++) {
    char name[SCR_MAX_FILENAME];
    dataset_name(name, &o, step);
    write_dataset(&o, name, name, step, SCR_FLAG_CHECKPOINT | SCR_FLAG_OUTPUT, done > 0);
    say("step %ld: written", step);
  }
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld", o.steps);
  MPI_Finalize();
  return 0;
}
