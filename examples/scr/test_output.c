/* SPDX-License-Identifier: Apache-2.0
 *
 * test_output: datasets that are output, checkpoint, or both, and one without a
 * name. Each step of three writes, in this order:
 *
 *   3k+1  output only, named    NAME.SSSSSS
 *   3k+2  checkpoint and output NAME.SSSSSS
 *   3k+3  output only, NULL for a name; its files are below NAME_unnamed.SSSSSS
 *
 * so that only the middle ones may ever be offered for a restart.
 *
 *   --check-prefix 1   writes nothing; checks that the files of all these steps
 *                      lie in the prefix directory (each rank looks for its own)
 *
 * Without it, --expect-restart names the newest 3k+2 that was written.
 */
#include <mpi.h>
#include <stdio.h>

#include "common.h"

static void directory_of(char out[SCR_MAX_FILENAME], const struct options *o, long step)
{
  struct options unnamed = *o;
  char name[SCR_MAX_FILENAME];
  if (step % 3 == 0) {
    snprintf(name, sizeof name, "%.900s_unnamed", o->name);
    unnamed.name = name;
  }
  dataset_name(out, &unnamed, step);
}

/* By the plain path, past the library. */
static void check_prefix(const struct options *o)
{
  char dataset[SCR_MAX_FILENAME], path[SCR_MAX_FILENAME];
  for (long step = 1; step <= o->steps; step++) {
    directory_of(dataset, o, step);
    for (long part = 0; part < o->files; part++) {
      struct identity id = identify(o, step, part);
      file_path(path, dataset, part);
      EXPECT(check_pattern(path, &id), "output of step %ld is not in the prefix as written", step);
    }
  }
  say("outputs of %ld steps are in the prefix", o->steps);
}

static void write_step(const struct options *o, long step, bool restarted)
{
  char dataset[SCR_MAX_FILENAME];
  directory_of(dataset, o, step);
  int flags = SCR_FLAG_OUTPUT;
  if (step % 3 == 2) {
    flags |= SCR_FLAG_CHECKPOINT;
  }
  write_dataset(o, step % 3 == 0 ? NULL : dataset, dataset, step, flags, restarted);
}

int main(int argc, char **argv)
{
  int rank;
  long check = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  set_rank("test_output", rank);
  const struct extra_option extra[] = {{"check-prefix", &check, NULL}, {NULL, NULL, NULL}};
  struct options o = parse_options(argc, argv, "output", extra);
  if (check) {
    check_prefix(&o);
    MPI_Finalize();
    return 0;
  }
  must(SCR_Init(), "SCR_Init");
  long done = restart(&o);
  EXPECT(done == 0 || done % 3 == 2, "offered step %ld, which is no checkpoint", done);
  for (long step = done + 1; step <= o.steps; step++) {
    pause_ms(o.sleep_ms);
    die_if_asked(&o, step, DIE_STEP, done > 0);
    MPI_Barrier(MPI_COMM_WORLD);
    write_step(&o, step, done > 0);
    say("step %ld: written", step);
  }
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld", o.steps);
  MPI_Finalize();
  return 0;
}
