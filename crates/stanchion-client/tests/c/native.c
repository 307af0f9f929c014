/* SPDX-License-Identifier: Apache-2.0
 *
 * Every function of stanchion.h, against the agent of tests/c_api.rs. C11 and C++17.
 *
 *   native life      a job from start to end
 *   native abuse     arguments that must be refused
 *   native fork      a child with its parent's context
 *   native dead      an agent that closes after the second question
 *   native streams   files of a dataset written and read in pieces
 *   native nobody    no agent at all
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stanchion.h"

static stn_ctx *ctx;

#define EXPECT(condition)                                                                    \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      char text_[512] = "";                                                                  \
      stn_error_text(ctx, text_, sizeof text_);                                              \
      fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, text_);         \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

#define TEXT(s) s, strlen(s)

static void join(void)
{
  stn_options options = STN_OPTIONS_INIT;
  const char *settings = "# ours\nflush_every = 3\nset_size = 4\n";
  options.rank = 0;
  options.ranks = 1;
  options.settings = settings;
  options.settings_len = strlen(settings);
  EXPECT(stn_init(&options, &ctx) == STN_OK);
  EXPECT(stn_error_text(ctx, NULL, 0) == 0);
}

static void put(const char *file, const char *bytes)
{
  char path[1024];
  EXPECT(stn_route(ctx, TEXT(file), path, sizeof path) == STN_OK);
  FILE *f = fopen(path, "w");
  EXPECT(f != NULL && fputs(bytes, f) >= 0 && fclose(f) == 0);
}

static void *barriers(void *count)
{
  for (int i = 0; i < 50; i++) {
    if (stn_barrier(ctx) == STN_OK) {
      ++*(int *)count;
    }
  }
  return NULL;
}

static void threads(void)
{
  pthread_t thread[4];
  int count[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; i++) {
    EXPECT(pthread_create(&thread[i], NULL, barriers, &count[i]) == 0);
  }
  for (int i = 0; i < 4; i++) {
    EXPECT(pthread_join(thread[i], NULL) == 0 && count[i] == 50);
  }
}

static void regions(void)
{
  double grid[1000];
  int step = 7;
  uint64_t no = 0;
  size_t bytes = 0;
  char name[STN_NAME_SIZE];
  for (int i = 0; i < 1000; i++) {
    grid[i] = i / 3.0;
  }
  EXPECT(stn_restore(ctx, name, sizeof name, &no) == STN_ERR_NOTFOUND);
  EXPECT(stn_protect(ctx, 2, grid, sizeof grid / 2) == STN_OK);
  EXPECT(stn_protect(ctx, 1, &step, sizeof step) == STN_OK);
  EXPECT(stn_protect(ctx, 2, grid, sizeof grid) == STN_OK);
  EXPECT(stn_protect(ctx, 3, NULL, 0) == STN_OK);
  for (int n = 0; n < 2; n++) {
    uint32_t flags = STN_FLAG_CHECKPOINT | STN_COW | STN_INCREMENTAL;
    EXPECT(stn_checkpoint(ctx, TEXT("both"), flags, &no) == STN_OK && no > 0);
    EXPECT(stn_cow_text(ctx, name, sizeof name) == STN_OK && strncmp(name, "copied at once", 14) == 0);
    EXPECT(stn_wait(ctx, no, STN_LEVEL_CACHED, 1000) == STN_OK);
    EXPECT(stn_delete(ctx, TEXT("both")) == STN_OK);
  }
  EXPECT(stn_checkpoint(ctx, TEXT("memory"), STN_FLAG_CHECKPOINT, &no) == STN_OK && no > 0);
  memset(grid, 0, sizeof grid);
  step = 0;
  EXPECT(stn_start_restart(ctx, name, sizeof name, NULL) == STN_OK);
  EXPECT(stn_region_bytes(ctx, 2, &bytes) == STN_OK && bytes == sizeof grid);
  EXPECT(stn_region_bytes(ctx, 8, &bytes) == STN_ERR_NOTFOUND && bytes == 0);
  EXPECT(stn_restore(ctx, name, sizeof name, &no) == STN_OK);
  EXPECT(strcmp(name, "memory") == 0 && step == 7);
  for (int i = 0; i < 1000; i++) {
    EXPECT(grid[i] == i / 3.0);
  }
  /* What must be refused, and what it leaves as it was. */
  EXPECT(stn_protect(ctx, 4, NULL, 8) == STN_ERR_INVALID);
  EXPECT(stn_protect(ctx, 4, grid, (size_t)-1) == STN_ERR_INVALID);
  EXPECT(stn_region_bytes(ctx, 2, NULL) == STN_ERR_INVALID);
  EXPECT(stn_region_bytes(ctx, 2, &bytes) == STN_ERR_STATE);
  EXPECT(stn_protect(ctx, 3, grid + 10, sizeof *grid) == STN_OK);
  EXPECT(stn_restore(ctx, name, sizeof name, &no) == STN_ERR_INVALID);
  EXPECT(stn_unprotect(ctx, 3) == STN_OK);
  EXPECT(stn_unprotect(ctx, 3) == STN_ERR_NOTFOUND);
  EXPECT(stn_unprotect(ctx, 1) == STN_OK);
  EXPECT(stn_unprotect(ctx, 2) == STN_OK);
  EXPECT(stn_protect(NULL, 1, grid, 8) == STN_ERR_INVALID);
  EXPECT(stn_delete(ctx, TEXT("memory")) == STN_OK);
}

static void life(void)
{
  char name[STN_NAME_SIZE], value[64];
  uint64_t no = 9, again = 9;
  int flag = 9;
  join();
  EXPECT(stn_have_restart(ctx, &flag, name, sizeof name, &no) == STN_OK);
  EXPECT(flag == 0 && name[0] == '\0' && no == 0);
  EXPECT(stn_start_restart(ctx, NULL, 0, NULL) == STN_ERR_STATE);
  EXPECT(stn_need_checkpoint(ctx, &flag) == STN_OK && flag == 1);
  EXPECT(stn_begin(ctx, TEXT("one"), STN_FLAG_CHECKPOINT | STN_FLAG_OUTPUT, &no) == STN_OK);
  EXPECT(no == 1);
  put("a/f", "one");
  put("b/f", "two");
  EXPECT(stn_complete(ctx, 1) == STN_OK);
  EXPECT(stn_wait(ctx, no, STN_LEVEL_PROTECTED, 1000) == STN_OK);
  EXPECT(stn_wait(ctx, 77, STN_LEVEL_PERSISTENT, 1000) == STN_ERR_NOTFOUND);
  EXPECT(stn_begin(ctx, NULL, 0, STN_FLAG_CHECKPOINT, NULL) == STN_OK);
  EXPECT(stn_complete(ctx, 0) == STN_ERR_DROPPED);
  EXPECT(stn_have_restart(ctx, &flag, NULL, 0, NULL) == STN_OK && flag == 1);
  EXPECT(stn_start_restart(ctx, name, sizeof name, &again) == STN_OK);
  EXPECT(again == no && strcmp(name, "one") == 0);
  char path[1024];
  EXPECT(stn_route(ctx, TEXT("b/f"), path, sizeof path) == STN_OK && access(path, R_OK) == 0);
  EXPECT(stn_route(ctx, TEXT("c/f"), path, sizeof path) == STN_ERR_NOTFOUND && path[0] == '\0');
  EXPECT(stn_complete_restart(ctx, 1) == STN_OK);
  EXPECT(stn_config_get(ctx, TEXT("flush_every"), value, sizeof value) == STN_OK);
  EXPECT(strcmp(value, "3") == 0);
  EXPECT(stn_config_set(ctx, TEXT("flush_every"), TEXT("5")) == STN_OK);
  EXPECT(stn_config_get(ctx, TEXT("flush_every"), value, sizeof value) == STN_OK);
  EXPECT(strcmp(value, "5") == 0);
  EXPECT(stn_config_set(ctx, TEXT("flush_every"), NULL, 0) == STN_OK);
  EXPECT(stn_current(ctx, TEXT("one")) == STN_OK);
  EXPECT(stn_current(ctx, TEXT("no")) == STN_ERR_NOTFOUND);
  EXPECT(stn_drop(ctx, TEXT("one")) == STN_OK);
  EXPECT(stn_delete(ctx, TEXT("one")) == STN_ERR_NOTFOUND);
  EXPECT(stn_should_exit(ctx, &flag) == STN_OK && flag == 0);
  regions();
  threads();
  EXPECT(stn_finalize(ctx) == STN_OK);
  EXPECT(stn_finalize(ctx) == STN_ERR_STATE);
  stn_free(ctx);
}

static void abuse(void)
{
  char path[1024], small[8], *longest = (char *)malloc(5000);
  int flag = 9;
  memset(longest, 'x', 5000);
  EXPECT(stn_init(NULL, NULL) == STN_ERR_INVALID);
  EXPECT(stn_barrier(NULL) == STN_ERR_INVALID);
  EXPECT(stn_complete(NULL, 1) == STN_ERR_INVALID);
  stn_free(NULL);
  EXPECT(stn_error_text(NULL, small, sizeof small) == 0 && small[0] == '\0');

  stn_options options = STN_OPTIONS_INIT;
  options.rank = 3;
  options.ranks = 3;
  EXPECT(stn_init(&options, &ctx) == STN_ERR_INVALID);
  EXPECT(stn_error_text(ctx, small, sizeof small) > sizeof small);
  EXPECT(strlen(small) == sizeof small - 1);
  EXPECT(stn_barrier(ctx) == STN_ERR_AGENT);
  stn_free(ctx);
  options.settings = "flush_every = often";
  options.settings_len = strlen(options.settings);
  options.rank = options.ranks = -1;
  EXPECT(stn_init(&options, &ctx) == STN_ERR_INVALID);
  stn_free(ctx);

  join();
  EXPECT(stn_need_checkpoint(ctx, NULL) == STN_ERR_INVALID);
  EXPECT(stn_have_restart(ctx, NULL, NULL, 0, NULL) == STN_ERR_INVALID);
  EXPECT(stn_have_restart(ctx, &flag, small, sizeof small, NULL) == STN_ERR_INVALID && flag == 0);
  EXPECT(stn_begin(ctx, NULL, 4, 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, longest, 5000, 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, longest, SIZE_MAX, 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, TEXT("a\nb"), 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, TEXT(".."), 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, "a\0b", 3, 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, TEXT("\xff\xfe"), 1, NULL) == STN_ERR_INVALID);
  EXPECT(stn_begin(ctx, TEXT("d"), 64, NULL) == STN_ERR_INVALID);
  EXPECT(stn_complete(ctx, 1) == STN_ERR_STATE);
  EXPECT(stn_begin(ctx, TEXT("d"), STN_FLAG_CHECKPOINT, NULL) == STN_OK);
  EXPECT(stn_route(ctx, TEXT("../f"), path, sizeof path) == STN_ERR_INVALID);
  EXPECT(stn_route(ctx, TEXT("f"), NULL, 0) == STN_ERR_INVALID);
  EXPECT(stn_route(ctx, TEXT("f"), small, sizeof small) == STN_ERR_INVALID && small[0] == '\0');
  EXPECT(stn_route(ctx, TEXT("f"), path, 0) == STN_ERR_INVALID);
  EXPECT(stn_route(ctx, longest, 5000, path, sizeof path) == STN_ERR_INVALID);
  EXPECT(stn_wait(ctx, 1, 3, 10) == STN_ERR_INVALID);
  EXPECT(stn_config_set(ctx, TEXT("nonsense"), TEXT("1")) == STN_ERR_NOTFOUND);
  EXPECT(stn_config_set(ctx, TEXT("flush_every"), TEXT("x")) == STN_ERR_INVALID);
  EXPECT(stn_config_set(ctx, TEXT("prefix"), TEXT("/x")) == STN_ERR_INVALID);
  EXPECT(stn_config_get(ctx, TEXT("cache_dir"), small, 0) == STN_ERR_INVALID);
  /* Nothing of all that became part of the dataset. */
  EXPECT(stn_complete(ctx, 1) == STN_OK);
  EXPECT(stn_finalize(ctx) == STN_OK);
  stn_free(ctx);
  free(longest);
}

static void fork_(void)
{
  join();
  pid_t child = fork();
  EXPECT(child >= 0);
  if (child == 0) {
    char text[256] = "";
    int good = stn_barrier(ctx) == STN_ERR_STATE && stn_error_text(ctx, text, sizeof text) > 0 &&
               strstr(text, "child") != NULL;
    stn_free(ctx);
    _exit(good ? 0 : 1);
  }
  int status = -1;
  EXPECT(waitpid(child, &status, 0) == child && status == 0);
  EXPECT(stn_barrier(ctx) == STN_OK);
  EXPECT(stn_finalize(ctx) == STN_OK);
  stn_free(ctx);
}

/* SIGPIPE has its default action here: it would end the program. */
static void dead(void)
{
  join();
  EXPECT(stn_barrier(ctx) == STN_OK);
  for (int i = 0; i < 3; i++) {
    EXPECT(stn_barrier(ctx) == STN_ERR_AGENT);
  }
  stn_free(ctx);
}

/* A matrix that is written by columns into a file of rows, and a stream of single bytes. */
static void streams_write(void)
{
  uint64_t s = 0, t = 0, size = 9;
  EXPECT(stn_begin(ctx, TEXT("piecewise"), STN_FLAG_CHECKPOINT, NULL) == STN_OK);
  EXPECT(stn_open(ctx, TEXT("out/rows"), STN_WRITE, &s) == STN_OK && s != 0);
  EXPECT(stn_open(ctx, TEXT("out/bytes"), STN_WRITE, &t) == STN_OK && t != s);
  for (int column = 0; column < 40; column++) {
    for (int row = 0; row < 100; row++) {
      int value = row * 1000 + column;
      EXPECT(stn_seek(ctx, s, (uint64_t)(row * 50 + column) * sizeof value) == STN_OK);
      EXPECT(stn_write(ctx, s, &value, sizeof value) == STN_OK);
      EXPECT(stn_write(ctx, t, &value, 1) == STN_OK);
    }
  }
  EXPECT(stn_size(ctx, s, &size) == STN_OK && size == (99 * 50 + 40) * sizeof(int));
  EXPECT(stn_write(ctx, t, NULL, 0) == STN_OK);
  EXPECT(stn_close(ctx, t) == STN_OK);
  EXPECT(stn_close(ctx, s) == STN_OK);
  char *much = (char *)malloc(300000);
  EXPECT(much != NULL);
  memset(much, 'm', 300000);
  EXPECT(stn_open(ctx, TEXT("much"), STN_WRITE, &s) == STN_OK);
  EXPECT(stn_write(ctx, s, much, 300000) == STN_OK);
  free(much);
  /* What must be refused changes nothing. */
  uint64_t u = 9;
  EXPECT(stn_open(ctx, TEXT("out/rows"), STN_WRITE, &u) == STN_ERR_INVALID && u == 0);
  EXPECT(stn_open(ctx, TEXT("out"), STN_WRITE, &u) == STN_ERR_INVALID);
  EXPECT(stn_open(ctx, TEXT("../x"), STN_WRITE, &u) == STN_ERR_INVALID);
  EXPECT(stn_open(ctx, TEXT("x"), 3, &u) == STN_ERR_INVALID);
  EXPECT(stn_open(ctx, TEXT("x"), STN_WRITE, NULL) == STN_ERR_INVALID);
  EXPECT(stn_open(ctx, TEXT("x"), STN_READ, &u) == STN_ERR_STATE);
  EXPECT(stn_open(NULL, TEXT("x"), STN_WRITE, &u) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, t, "x", 1) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, 0, "x", 1) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, UINT64_MAX, "x", 1) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, s, NULL, 1) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, s, &u, (size_t)-1) == STN_ERR_INVALID);
  EXPECT(stn_seek(ctx, s, UINT64_MAX) == STN_ERR_INVALID);
  EXPECT(stn_size(ctx, s, NULL) == STN_ERR_INVALID);
  EXPECT(stn_size(ctx, t, &size) == STN_ERR_INVALID && size == 0);
  size_t got = 9;
  char byte;
  EXPECT(stn_read(ctx, s, &byte, 1, &got) == STN_ERR_INVALID && got == 0);
  EXPECT(stn_close(ctx, t) == STN_ERR_INVALID);
  EXPECT(stn_close(ctx, s) == STN_OK);
  EXPECT(stn_complete(ctx, 1) == STN_OK);
  EXPECT(stn_seek(ctx, s, 0) == STN_ERR_INVALID);
  EXPECT(stn_open(ctx, TEXT("x"), STN_WRITE, &u) == STN_ERR_STATE);
}

static void streams_read(void)
{
  uint64_t s = 0, size = 0;
  size_t got = 0;
  int row[50];
  char rest[8], *much = (char *)malloc(400000);
  EXPECT(much != NULL);
  EXPECT(stn_start_restart(ctx, NULL, 0, NULL) == STN_OK);
  EXPECT(stn_open(ctx, TEXT("out/rows"), STN_READ, &s) == STN_OK);
  for (int r = 98; r >= 0; r--) {
    EXPECT(stn_seek(ctx, s, (uint64_t)r * sizeof row) == STN_OK);
    EXPECT(stn_read(ctx, s, row, sizeof row, &got) == STN_OK && got == sizeof row);
    for (int column = 0; column < 50; column++) {
      EXPECT(row[column] == (column < 40 ? r * 1000 + column : 0));
    }
  }
  EXPECT(stn_size(ctx, s, &size) == STN_OK && size == (99 * 50 + 40) * sizeof(int));
  EXPECT(stn_seek(ctx, s, size - 2) == STN_OK);
  EXPECT(stn_read(ctx, s, rest, sizeof rest, &got) == STN_OK && got == 2);
  EXPECT(stn_read(ctx, s, rest, sizeof rest, &got) == STN_OK && got == 0);
  EXPECT(stn_read(ctx, s, rest, sizeof rest, NULL) == STN_ERR_INVALID);
  EXPECT(stn_read(ctx, s, NULL, 4, &got) == STN_ERR_INVALID);
  EXPECT(stn_write(ctx, s, rest, 1) == STN_ERR_INVALID);
  EXPECT(stn_close(ctx, s) == STN_OK);
  EXPECT(stn_open(ctx, TEXT("much"), STN_READ, &s) == STN_OK);
  EXPECT(stn_read(ctx, s, much, 400000, &got) == STN_OK && got == 300000);
  EXPECT(much[0] == 'm' && much[299999] == 'm');
  free(much);
  EXPECT(stn_open(ctx, TEXT("none"), STN_READ, &size) == STN_ERR_NOTFOUND && size == 0);
  EXPECT(stn_open(ctx, TEXT("none"), STN_WRITE, &size) == STN_ERR_STATE);
  EXPECT(stn_complete_restart(ctx, 1) == STN_OK);
  EXPECT(stn_read(ctx, s, rest, 1, &got) == STN_ERR_INVALID);
}

static void streams(void)
{
  uint64_t s = 0;
  char text[256] = "";
  join();
  streams_write();
  streams_read();
  /* One that is left open. */
  EXPECT(stn_begin(ctx, TEXT("open"), STN_FLAG_CHECKPOINT, NULL) == STN_OK);
  EXPECT(stn_open(ctx, TEXT("f"), STN_WRITE, &s) == STN_OK);
  EXPECT(stn_write(ctx, s, "x", 1) == STN_OK);
  EXPECT(stn_complete(ctx, 1) == STN_ERR_DROPPED);
  EXPECT(stn_error_text(ctx, text, sizeof text) > 0 && strstr(text, "'f' is still open") != NULL);
  EXPECT(stn_write(ctx, s, "x", 1) == STN_ERR_INVALID);
  streams_read();
  EXPECT(stn_finalize(ctx) == STN_OK);
  stn_free(ctx);
}

static void nobody(void)
{
  char text[256] = "";
  EXPECT(stn_init(NULL, &ctx) == STN_ERR_AGENT && ctx != NULL);
  EXPECT(stn_error_text(ctx, text, sizeof text) == strlen(text));
  EXPECT(strcmp(text, "no agent: start the program with `stanchion run`") == 0);
  stn_free(ctx);
}

int main(int argc, char **argv)
{
  const char *what = argc > 1 ? argv[1] : "";
  EXPECT(stn_version() != NULL && stn_version()[0] != '\0');
  if (strcmp(what, "life") == 0) {
    life();
  } else if (strcmp(what, "abuse") == 0) {
    abuse();
  } else if (strcmp(what, "fork") == 0) {
    fork_();
  } else if (strcmp(what, "dead") == 0) {
    dead();
  } else if (strcmp(what, "streams") == 0) {
    streams();
  } else if (strcmp(what, "nobody") == 0) {
    nobody();
  } else {
    return 2;
  }
  return 0;
}
