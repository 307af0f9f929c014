/* SPDX-License-Identifier: Apache-2.0
 *
 * serial: a program of one process that knows nothing of MPI. It sums numbers,
 * and its whole state is a step and a sum; the files of the common options come
 * with it, so that there is something to check.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "common.h"

struct state {
  long step, sum;
};

static void state_path(char out[SCR_MAX_FILENAME], const char *dataset)
{
  file_path(out, dataset, 0);
  char *slash = strstr(out, "/part_0/");
  EXPECT(slash != NULL, "strange path %s", out);
  strcpy(slash, "/state.txt");
}

static void save(const struct options *o, const struct state *s, bool restarted)
{
  char name[SCR_MAX_FILENAME], file[SCR_MAX_FILENAME], path[SCR_MAX_FILENAME];
  dataset_name(name, o, s->step);
  must(SCR_Start_output(name, SCR_FLAG_CHECKPOINT), "SCR_Start_output");
  die_if_asked(o, s->step, DIE_START, restarted);
  state_path(file, name);
  must(SCR_Route_file(file, path), "SCR_Route_file");
  FILE *f = fopen(path, "w");
  bool good = f != NULL && fprintf(f, "%ld %ld\n", s->step, s->sum) > 0;
  good = (f == NULL || fclose(f) == 0) && good;
  good = write_files(o, name, s->step, restarted) && good;
  EXPECT(good, "%s: %s", path, strerror(errno));
  must(SCR_Complete_output(1), "SCR_Complete_output");
  die_if_asked(o, s->step, DIE_DONE, restarted);
}

static void load(const struct options *o, struct state *s)
{
  char name[SCR_MAX_FILENAME], file[SCR_MAX_FILENAME], path[SCR_MAX_FILENAME];
  int have = 0;
  must(SCR_Have_restart(&have, NULL), "SCR_Have_restart");
  if (!have) {
    say("start from step 0");
    return;
  }
  must(SCR_Start_restart(name), "SCR_Start_restart");
  long step = dataset_step(o, name);
  EXPECT(step > 0, "'%s' is not a dataset of this test", name);
  state_path(file, name);
  must(SCR_Route_file(file, path), "SCR_Route_file");
  FILE *f = fopen(path, "r");
  EXPECT(f != NULL, "%s: %s", path, strerror(errno));
  EXPECT(fscanf(f, "%ld %ld", &s->step, &s->sum) == 2, "%s: not two numbers", path);
  fclose(f);
  EXPECT(s->step == step, "%s: of step %ld", path, s->step);
  EXPECT(check_files(o, name, step, NULL), "dataset %s is damaged", name);
  must(SCR_Complete_restart(1), "SCR_Complete_restart");
  say("restart from step %ld (%s)", step, name);
}

int main(int argc, char **argv)
{
  struct state s = {0, 0};
  set_rank("serial", 0);
  struct options o = parse_options(argc, argv, "serial", NULL);
  must(SCR_Init(), "SCR_Init");
  load(&o, &s);
  expect_restart(&o, s.step);
  bool restarted = s.step > 0;
  while (s.step < o.steps) {
    int need = 0, stop = 0;
    pause_ms(o.sleep_ms);
    s.step++;
    s.sum += s.step;
    die_if_asked(&o, s.step, DIE_STEP, restarted);
    must(SCR_Need_checkpoint(&need), "SCR_Need_checkpoint");
    if (need || o.always) {
      save(&o, &s, restarted);
      say("step %ld: written", s.step);
    }
    must(SCR_Should_exit(&stop), "SCR_Should_exit");
    if (stop) {
      say("asked to stop at step %ld", s.step);
      break;
    }
  }
  EXPECT(s.sum == s.step * (s.step + 1) / 2, "the sum up to %ld is %ld", s.step, s.sum);
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld, sum %ld", s.step, s.sum);
  return 0;
}
