/* SPDX-License-Identifier: Apache-2.0
 *
 * test_config: SCR_Config and SCR_Configf, before and after SCR_Init. Takes the
 * common options only; writes one checkpoint at the end to see that the settings
 * did no harm.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

/* Asks, and compares with what is expected; NULL: nothing is set. */
static void ask(const char *question, const char *expected)
{
  const char *answer = SCR_Config(question);
  bool good = expected == NULL ? answer == NULL : answer != NULL && strcmp(answer, expected) == 0;
  EXPECT(good, "SCR_Config(\"%s\") is %s, expected %s", question, answer ? answer : "NULL",
         expected ? expected : "NULL");
  free((void *)(uintptr_t)answer); /* the caller's, for all its const */
}

static void set(const char *setting)
{
  EXPECT(SCR_Config(setting) == NULL, "SCR_Config(\"%s\") returned a value", setting);
}

static void simple_settings(void)
{
  set("SCR_CACHE_SIZE=3");
  ask("SCR_CACHE_SIZE", "3");
  set("SCR_CACHE_SIZE=4");
  ask("SCR_CACHE_SIZE", "4");
  EXPECT(SCR_Configf("SCR_CACHE_SIZE=%d", 5) == NULL, "SCR_Configf returned a value");
  ask("SCR_CACHE_SIZE", "5");
  EXPECT(SCR_Configf("%s_%s=%d", "SCR_CACHE", "SIZE", 2) == NULL, "SCR_Configf returned a value");
  ask("SCR_CACHE_SIZE", "2");

  /* Taken back; and a second time, when there is nothing to take back. */
  set("SCR_JOB_NAME=some");
  ask("SCR_JOB_NAME", "some");
  set("SCR_JOB_NAME=");
  ask("SCR_JOB_NAME", NULL);
  set("SCR_JOB_NAME=");
  ask("SCR_JOB_NAME", NULL);

  /* Values that hold the characters that mean something here. */
  set("SCR_JOB_NAME=a=b=c");
  ask("SCR_JOB_NAME", "a=b=c");
  set("SCR_JOB_NAME=\"two words = one value\"");
  ask("SCR_JOB_NAME", "two words = one value");
  set("SCR_JOB_NAME=");
}

static void long_setting(void)
{
  enum { LENGTH = 900 };
  char value[LENGTH + 1];
  memset(value, 'x', LENGTH);
  value[LENGTH] = '\0';
  SCR_Configf("SCR_JOB_NAME=%s", value);
  ask("SCR_JOB_NAME", value);
  set("SCR_JOB_NAME=");
}

/* The environment goes before SCR_Config, and stays when that is taken back. */
static void environment(void)
{
  ask("SCR_LOG_ENABLE", "0");
  set("SCR_LOG_ENABLE=1");
  ask("SCR_LOG_ENABLE", "0");
  set("SCR_LOG_ENABLE=");
  ask("SCR_LOG_ENABLE", "0");
}

static void entries(void)
{
  set("CKPT=0 TYPE=XOR SET_SIZE=4");
  ask("CKPT=0 TYPE", "XOR");
  ask("CKPT=0 SET_SIZE", "4");
  ask("CKPT=0 INTERVAL", NULL);
  ask("CKPT=1 TYPE", NULL);
  set("CKPT=1 TYPE=PARTNER");
  ask("CKPT=1 TYPE", "PARTNER");
  ask("CKPT=0 TYPE", "XOR");
  SCR_Configf("CKPT=%d SET_SIZE=%d", 0, 8); /* the other members stay */
  ask("CKPT=0 SET_SIZE", "8");
  ask("CKPT=0 TYPE", "XOR");
  set("CKPT=1 TYPE=SINGLE"); /* something that works on one node */
  set("CKPT=0 TYPE=SINGLE");
  ask("CKPT=0 TYPE", "SINGLE");
}

static void nonsense(void)
{
  EXPECT(SCR_Config(NULL) == NULL, "SCR_Config(NULL) returned a value");
  ask("", NULL);
  ask("   ", NULL);
  ask("SCR_NO_SUCH_SETTING", NULL);
}

/* After SCR_Init settings can be read, and not be changed. */
static void after_init(void)
{
  ask("SCR_CACHE_SIZE", "2");
  ask("CKPT=0 TYPE", "SINGLE");
  SCR_Config("SCR_CACHE_SIZE=9");
  ask("SCR_CACHE_SIZE", "2");
  SCR_Configf("CKPT=%d TYPE=%s", 0, "XOR");
  ask("CKPT=0 TYPE", "SINGLE");
  SCR_Config("SCR_CACHE_SIZE=");
  ask("SCR_CACHE_SIZE", "2");
}

int main(int argc, char **argv)
{
  int rank;
  /* What this test compares with must not come from the environment, but where
   * it is meant to. */
  unsetenv("SCR_CACHE_SIZE");
  unsetenv("SCR_JOB_NAME");
  setenv("SCR_LOG_ENABLE", "0", 1);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  set_rank("test_config", rank);
  struct options o = parse_options(argc, argv, "config", NULL);

  simple_settings();
  long_setting();
  environment();
  entries();
  nonsense();
  must(SCR_Init(), "SCR_Init");
  after_init();
  long step = restart(&o) + 1;
  char name[SCR_MAX_FILENAME];
  dataset_name(name, &o, step);
  write_dataset(&o, name, name, step, SCR_FLAG_CHECKPOINT, false);
  after_init();
  must(SCR_Finalize(), "SCR_Finalize");
  say("finished at step %ld", step);
  MPI_Finalize();
  return 0;
}
