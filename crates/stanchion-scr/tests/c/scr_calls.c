/* SPDX-License-Identifier: Apache-2.0
 *
 * Every function of scr.h, against the agent of tests/scr_api.rs. C11 and C++17.
 *
 *   scr_calls life       a job from start to end
 *   scr_calls abuse      arguments and orders that must be refused
 *   scr_calls config     settings before and after SCR_Init
 *   scr_calls late V     SCR_Config(V), then SCR_Init must fail
 *   scr_calls set V      SCR_Config(V), then SCR_Init must succeed
 *   scr_calls init       SCR_Init must fail
 *   scr_calls disabled   calls pass through
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "scr.h"

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      fprintf(stderr, "line %d: %s\n", __LINE__, #condition);              \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

#define GOOD(call) EXPECT((call) == SCR_SUCCESS)
#define BAD(call) EXPECT((call) != SCR_SUCCESS)

static void put(const char *file, const char *bytes)
{
  char path[SCR_MAX_FILENAME];
  GOOD(SCR_Route_file(file, path));
  FILE *f = fopen(path, "w");
  EXPECT(f != NULL && fputs(bytes, f) >= 0 && fclose(f) == 0);
}

static void asked(const char *question, const char *expected)
{
  const char *answer = SCR_Config(question);
  if (expected == NULL ? answer != NULL : answer == NULL || strcmp(answer, expected) != 0) {
    fprintf(stderr, "SCR_Config(\"%s\") is %s\n", question, answer ? answer : "NULL");
    exit(1);
  }
  free((void *)(uintptr_t)answer);
}

static void life(void)
{
  char name[SCR_MAX_FILENAME], again[SCR_MAX_FILENAME], path[SCR_MAX_FILENAME];
  int flag = 9;
  GOOD(SCR_Init());
  GOOD(SCR_Have_restart(&flag, name));
  EXPECT(flag == 0 && name[0] == '\0');
  GOOD(SCR_Need_checkpoint(&flag));
  EXPECT(flag == 1);
  GOOD(SCR_Start_output("one", SCR_FLAG_CHECKPOINT | SCR_FLAG_OUTPUT));
  put("a/f", "one");
  put("b/f", "two");
  GOOD(SCR_Complete_output(1));
  GOOD(SCR_Start_checkpoint());
  put("f", "three");
  GOOD(SCR_Complete_checkpoint(1));
  GOOD(SCR_Start_output(NULL, SCR_FLAG_OUTPUT));
  BAD(SCR_Complete_output(0));
  GOOD(SCR_Have_restart(&flag, name));
  EXPECT(flag == 1 && strcmp(name, "dataset.2") == 0);
  GOOD(SCR_Start_restart(NULL));
  GOOD(SCR_Route_file("f", path));
  BAD(SCR_Complete_restart(0));
  GOOD(SCR_Have_restart(&flag, name));
  GOOD(SCR_Start_restart(again));
  EXPECT(strcmp(name, "one") == 0 && strcmp(again, name) == 0);
  strcpy(path, "b/f");
  GOOD(SCR_Route_file(path, path)); /* the same buffer */
  EXPECT(access(path, R_OK) == 0);
  BAD(SCR_Route_file("c/f", path));
  EXPECT(path[0] == '\0');
  GOOD(SCR_Complete_restart(1));
  GOOD(SCR_Route_file("any/where", path));
  EXPECT(strcmp(path, "any/where") == 0);
  GOOD(SCR_Should_exit(&flag));
  EXPECT(flag == 0);
  GOOD(SCR_Current("one"));
  BAD(SCR_Current("no"));
  GOOD(SCR_Drop("no"));
  GOOD(SCR_Delete("one"));
  GOOD(SCR_Finalize());
  BAD(SCR_Finalize());
  BAD(SCR_Init());
  EXPECT(strstr(SCR_Get_version(), "Stanchion") != NULL);
}

static void abuse(void)
{
  char path[SCR_MAX_FILENAME], longest[5001];
  int flag = 9;
  memset(longest, 'x', 5000);
  longest[5000] = '\0';
  BAD(SCR_Finalize());
  BAD(SCR_Need_checkpoint(&flag));
  EXPECT(flag == 0);
  BAD(SCR_Start_checkpoint());
  GOOD(SCR_Init());
  BAD(SCR_Init());
  BAD(SCR_Need_checkpoint(NULL));
  BAD(SCR_Should_exit(NULL));
  BAD(SCR_Have_restart(NULL, NULL));
  BAD(SCR_Start_restart(NULL));
  BAD(SCR_Complete_restart(1));
  BAD(SCR_Complete_output(1));
  BAD(SCR_Complete_checkpoint(1));
  BAD(SCR_Start_output("..", 1));
  BAD(SCR_Start_output("a\nb", 1));
  BAD(SCR_Start_output(longest, 1));
  BAD(SCR_Start_output("d", 64));
  BAD(SCR_Start_output("d", -1));
  BAD(SCR_Current(NULL));
  BAD(SCR_Drop(NULL));
  BAD(SCR_Delete(longest));
  BAD(SCR_Route_file(NULL, path));
  BAD(SCR_Route_file("f", NULL));
  BAD(SCR_Route_file("", path));
  BAD(SCR_Route_file(longest, path));
  GOOD(SCR_Start_output("d", SCR_FLAG_CHECKPOINT));
  BAD(SCR_Start_output("e", SCR_FLAG_CHECKPOINT));
  BAD(SCR_Finalize());
  BAD(SCR_Route_file("../../../f", path));
  BAD(SCR_Route_file("a\nb", path));
  BAD(SCR_Route_file("\xff\xfe", path));
  GOOD(SCR_Complete_checkpoint(1)); /* the other name of the same call */
  pid_t child = fork();
  if (child == 0) {
    _exit(SCR_Should_exit(&flag) != SCR_SUCCESS ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  GOOD(SCR_Finalize());
}

static void config(void)
{
  char value[901];
  EXPECT(SCR_Config(NULL) == NULL && SCR_Configf(NULL) == NULL);
  asked("", NULL);
  asked("SCR_NO_SUCH", NULL);
  asked("SCR_FLUSH=5", NULL);
  asked("SCR_FLUSH", "5");
  EXPECT(SCR_Configf("SCR_%s=%d", "FLUSH", 6) == NULL);
  asked("SCR_FLUSH", "6");
  /* More arguments than registers hold, of all kinds. */
  SCR_Configf("SCR_JOB_NAME=%d-%s-%.2f-%c-%ld-%d-%d-%d-%.1f-%s", 1, "two", 3.0, '4', 5L, 6, 7, 8, 9.5,
              "ten");
  asked("SCR_JOB_NAME", "1-two-3.00-4-5-6-7-8-9.5-ten");
  memset(value, 'x', 900);
  value[900] = '\0';
  SCR_Configf("SCR_JOB_NAME=%s", value);
  asked("SCR_JOB_NAME", value);
  asked("SCR_JOB_NAME=", NULL);
  asked("SCR_JOB_NAME", NULL);
  asked("SCR_FETCH=0", NULL); /* the environment says 1 */
  asked("SCR_FETCH", "1");
  asked("CKPT=0 TYPE=PARTNER SET_SIZE=4", NULL);
  asked("CKPT=0 TYPE", "PARTNER");
  asked("CKPT=1 TYPE=XOR", NULL);
  asked("CKPT=0 INTERVAL", NULL);
  GOOD(SCR_Init());
  asked("CKPT=0 SET_SIZE", "4");
  asked("SCR_COPY_TYPE", "PARTNER"); /* the job runs with it */
  asked("SCR_FLUSH", "6");
  asked("SCR_FLUSH=7", NULL); /* may change at any time */
  asked("SCR_FLUSH", "7");
  asked("SCR_CACHE_SIZE=9", NULL); /* may not */
  asked("SCR_CACHE_SIZE", NULL);
  asked("CKPT=0 TYPE=XOR", NULL);
  asked("CKPT=0 TYPE", "PARTNER");
  asked("SCR_FETCH=0", NULL);
  asked("SCR_FETCH", "1");
  int flag;
  GOOD(SCR_Should_exit(&flag));
  GOOD(SCR_Finalize());
}

static void disabled(void)
{
  char path[SCR_MAX_FILENAME];
  int flag = 9;
  GOOD(SCR_Init());
  GOOD(SCR_Have_restart(&flag, path));
  EXPECT(flag == 0);
  GOOD(SCR_Need_checkpoint(&flag));
  EXPECT(flag == 0);
  GOOD(SCR_Start_output("d", SCR_FLAG_CHECKPOINT));
  put("dir/f", "x");
  GOOD(SCR_Complete_output(1));
  EXPECT(access("dir/f", R_OK) == 0);
  GOOD(SCR_Should_exit(&flag));
  EXPECT(flag == 0);
  GOOD(SCR_Finalize());
}

int main(int argc, char **argv)
{
  const char *what = argc > 1 ? argv[1] : "", *value = argc > 2 ? argv[2] : "";
  if (strcmp(what, "life") == 0) {
    life();
  } else if (strcmp(what, "abuse") == 0) {
    abuse();
  } else if (strcmp(what, "config") == 0) {
    config();
  } else if (strcmp(what, "late") == 0) {
    asked(value, NULL);
    BAD(SCR_Init());
  } else if (strcmp(what, "set") == 0) {
    asked(value, NULL);
    GOOD(SCR_Init());
    GOOD(SCR_Finalize());
  } else if (strcmp(what, "init") == 0) {
    BAD(SCR_Init());
  } else if (strcmp(what, "disabled") == 0) {
    disabled();
  } else {
    return 2;
  }
  return 0;
}
