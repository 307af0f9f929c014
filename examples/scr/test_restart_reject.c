/* SPDX-License-Identifier: Apache-2.0
 *
 * test_restart_reject: one rank does not like the newest dataset; all get the
 * one before it. Then the rejected steps are written again, with other contents.
 *
 *   --rejects N        how many datasets to reject (1)
 *   --reject-rank R    the rank that does (the last one)
 *
 * Run it with --steps 3 --seed 1 --rejects 0, then with --steps 3 --seed 2
 * --expect-restart 2, then with --rejects 0 --expect-restart 3 --expect-seed 2:
 * the third run must see what the second one wrote. Rejecting all of them must
 * end with a start from nothing (--expect-restart 0).
 */
#include <mpi.h>
#include <string.h>

#include "common.h"

/* Reads what is on offer, and votes. The vote's result must be the same on all
 * ranks: one no, and it fails everywhere. */
static bool read_and_vote(const struct options *o, bool reject, bool i_reject, long *step)
{
  char name[SCR_MAX_FILENAME];
  must(SCR_Start_restart(name), "SCR_Start_restart");
  *step = dataset_step(o, name);
  EXPECT(*step > 0, "'%s' is not a dataset of this test", name);
  EXPECT(check_files(o, name, *step, NULL), "dataset %s is damaged", name);
  int rc = SCR_Complete_restart(i_reject ? 0 : 1);
  EXPECT((rc != SCR_SUCCESS) == reject, "SCR_Complete_restart of %s returned %d on a vote to %s",
         name, rc, reject ? "reject" : "accept");
  say("%s %s", reject ? "rejected" : "restart from", name);
  return !reject;
}

static long restart_rejecting(const struct options *o, long rejects, bool i_reject)
{
  long previous = 0, step = 0;
  for (;;) {
    int have = 0;
    must(SCR_Have_restart(&have, NULL), "SCR_Have_restart");
    if (!have) {
      return 0;
    }
    bool reject = rejects > 0;
    rejects--;
    bool accepted = read_and_vote(o, reject, reject && i_reject, &step);
    EXPECT(previous == 0 || step < previous, "step %ld offered after step %ld was rejected", step,
           previous);
    if (accepted) {
      return step;
    }
    previous = step;
  }
}

int main(int argc, char **argv)
{
  int rank, ranks;
  long rejects = 1, reject_rank = -1;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  set_rank("test_restart_reject", rank);
  const struct extra_option extra[] = {
      {"rejects", &rejects, NULL}, {"reject-rank", &reject_rank, NULL}, {NULL, NULL, NULL}};
  struct options o = parse_options(argc, argv, "reject", extra);
  if (reject_rank < 0) {
    reject_rank = ranks - 1;
  }
  SCR_Configf("SCR_CACHE_SIZE=%ld", o.steps > 2 ? o.steps : 2);
  must(SCR_Init(), "SCR_Init");
  long done = restart_rejecting(&o, rejects, rank == reject_rank);
  expect_restart(&o, done);
  for (long step = done + 1; step <= o.steps; step++) {
    char name[SCR_MAX_FILENAME];
    pause_ms(o.sleep_ms);
    die_if_asked(&o, step, DIE_STEP, done > 0);
    dataset_name(name, &o, step);
    write_dataset(&o, name, name, step, SCR_FLAG_CHECKPOINT, done > 0);
    say("step %ld: written", step);
  }
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld", o.steps);
  MPI_Finalize();
  return 0;
}
