/* A program whose whole state is known beforehand: keep BYTES STEP HOW MILLISECONDS
 *
 * A rank keeps BYTES + rank * STEP bytes that follow from its number and the step. It goes on from what Stanchion gives back
 * after comparing every byte, and takes a checkpoint each step, until it is asked to end. HOW: regions, files.
 * Ends with 9 if a byte differs. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stanchion.h"

static stn_ctx *ctx;
static uint64_t rank;

static void die(const char *what) {
  char text[512] = "";
  if (ctx != NULL) stn_error_text(ctx, text, sizeof text);
  fprintf(stderr, "keep: rank %llu: %s: %s\n", (unsigned long long)rank, what, text);
  exit(8);
}

static void ok(int code, const char *what) {
  if (code != STN_OK) die(what);
}

static void fill(unsigned char *data, size_t bytes, uint64_t step) {
  uint64_t x = (rank + 1) * 0x9E3779B97F4A7C15ull ^ (step + 1) * 0xBF58476D1CE4E5B9ull;
  for (size_t i = 0; i < bytes; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    data[i] = (unsigned char)(x >> 32);
  }
}

static void compare(const unsigned char *data, size_t bytes, uint64_t step) {
  unsigned char *want = malloc(bytes);
  if (want == NULL) die("memory");
  fill(want, bytes, step);
  if (memcmp(data, want, bytes) != 0) {
    fprintf(stderr, "keep: rank %llu: what came back of step %llu differs\n", (unsigned long long)rank,
            (unsigned long long)step);
    exit(9);
  }
  free(want);
}

static char path[4096];

static const char *routed(void) {
  char name[64];
  int len = snprintf(name, sizeof name, "state.%llu", (unsigned long long)rank);
  ok(stn_route(ctx, name, (size_t)len, path, sizeof path), "stn_route");
  return path;
}

static void whole(int fd, unsigned char *data, size_t bytes, int writes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = writes ? write(fd, data + done, bytes - done) : read(fd, data + done, bytes - done);
    if (n <= 0) die("a file");
    done += (size_t)n;
  }
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  int files = strcmp(argv[3], "files") == 0;
  long pause = atol(argv[4]);
  const char *me = getenv("STANCHION_RANK");
  rank = me == NULL ? 0 : strtoull(me, NULL, 10);
  size_t bytes = strtoull(argv[1], NULL, 10) + rank * strtoull(argv[2], NULL, 10);
  unsigned char *data = malloc(bytes);
  uint64_t step = 0, no;
  if (data == NULL) die("memory");
  stn_options options = STN_OPTIONS_INIT;
  ok(stn_init(&options, &ctx), "stn_init");
  if (!files) {
    ok(stn_protect(ctx, 0, &step, sizeof step), "stn_protect");
    ok(stn_protect(ctx, 1, data, bytes), "stn_protect");
  }
  int flag = 0;
  ok(stn_have_restart(ctx, &flag, path, sizeof path, &no), "stn_have_restart");
  if (flag && files) {
    ok(stn_start_restart(ctx, path, sizeof path, &no), "stn_start_restart");
    int fd = open(routed(), O_RDONLY);
    if (fd < 0) die("opening what came back");
    whole(fd, (unsigned char *)&step, sizeof step, 0);
    whole(fd, data, bytes, 0);
    close(fd);
    ok(stn_complete_restart(ctx, 1), "stn_complete_restart");
  } else if (flag) {
    ok(stn_restore(ctx, path, sizeof path, &no), "stn_restore");
  }
  if (flag) compare(data, bytes, step);
  for (;;) {
    char name[64];
    step++;
    fill(data, bytes, step);
    int len = snprintf(name, sizeof name, "step.%llu", (unsigned long long)step);
    if (files) {
      ok(stn_begin(ctx, name, (size_t)len, STN_FLAG_CHECKPOINT, &no), "stn_begin");
      int fd = open(routed(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      if (fd < 0) die("opening a file");
      whole(fd, (unsigned char *)&step, sizeof step, 1);
      whole(fd, data, bytes, 1);
      close(fd);
      ok(stn_complete(ctx, 1), "stn_complete");
    } else {
      ok(stn_checkpoint(ctx, name, (size_t)len, STN_FLAG_CHECKPOINT, &no), "stn_checkpoint");
    }
    ok(stn_should_exit(ctx, &flag), "stn_should_exit");
    if (flag) break;
    struct timespec rest = {pause / 1000, pause % 1000 * 1000000};
    nanosleep(&rest, NULL);
  }
  free(data);
  return stn_finalize(ctx) == STN_OK ? 0 : 8;
}
