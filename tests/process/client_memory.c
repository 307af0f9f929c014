/* What the library takes of a rank's memory: client_memory RANK RANKS MIB ROUNDS HOW
 *
 * HOW: regions, incremental, cow, streams. Prints one line: the most that the library ever had, bytes, beside the
 * agent's memory that it maps (which counts as shared) and what this program itself has. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stanchion.h"

struct use {
  long anon, file, shmem, peak; /* KiB */
};

static char text[8192];

static void die(const char *what) {
  fprintf(stderr, "client_memory: %s: %s\n", what, strerror(errno));
  exit(1);
}

static long field(const char *name) {
  const char *at = strstr(text, name);
  if (at == NULL) die(name);
  return strtol(at + strlen(name), NULL, 10);
}

static struct use now(void) {
  int fd = open("/proc/self/status", O_RDONLY);
  ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  if (got <= 0) die("/proc/self/status");
  text[got] = 0;
  close(fd);
  struct use use = {field("RssAnon:"), field("RssFile:"), field("RssShmem:"), field("VmHWM:")};
  return use;
}

/* From here on VmHWM counts anew. */
static void reset_peak(void) {
  int fd = open("/proc/self/clear_refs", O_WRONLY);
  if (fd < 0 || write(fd, "5", 1) != 1) die("/proc/self/clear_refs");
  close(fd);
}

static long most;
static long base;

static struct use before(void) {
  reset_peak();
  return now();
}

/* What there was at most since `old`: anonymous memory then, and what came on top of it in between. Code and shared
 * memory that was touched for the first time is not the library's. */
static void after(const struct use *old) {
  struct use use = now();
  long fresh = (use.shmem - old->shmem) + (use.file - old->file);
  long top = use.peak - (old->anon + old->file + old->shmem) - (fresh > 0 ? fresh : 0);
  long had = old->anon - base + (top > 0 ? top : 0);
  if (use.anon - base > had) had = use.anon - base;
  if (had > most) most = had;
}

static void ok(int code, stn_ctx *ctx, const char *what) {
  if (code == STN_OK) return;
  char words[512];
  stn_error_text(ctx, words, sizeof words);
  fprintf(stderr, "client_memory: %s: %d: %s\n", what, code, words);
  exit(1);
}

static void streams(stn_ctx *ctx, const unsigned char *state, size_t bytes, long long rank,
                    int round) {
  uint64_t no = 0, stream = 0;
  char name[64];
  snprintf(name, sizeof name, "state.%lld.%d", rank, round);
  ok(stn_begin(ctx, NULL, 0, STN_FLAG_CHECKPOINT, &no), ctx, "begin");
  ok(stn_open(ctx, name, strlen(name), STN_WRITE, &stream), ctx, "open");
  /* As programs write: headers of some bytes, and pieces of all sizes. */
  size_t at = 0, piece = 18;
  while (at < bytes) {
    size_t step = piece < bytes - at ? piece : bytes - at;
    ok(stn_write(ctx, stream, state + at, step), ctx, "write");
    at += step;
    piece = piece > ((size_t)1 << 20) ? 18 : piece * 3;
  }
  ok(stn_close(ctx, stream), ctx, "close");
  ok(stn_complete(ctx, 1), ctx, "complete");
}

int main(int argc, char **argv) {
  if (argc != 6) return 2;
  const char *how = argv[5];
  size_t bytes = strtoul(argv[3], NULL, 10) << 20;
  int rounds = atoi(argv[4]);
  unsigned char *state =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (state == MAP_FAILED) die("mmap");
  for (size_t i = 0; i < bytes; i += 64) state[i] = (unsigned char)(i >> 12);
  stn_options options = STN_OPTIONS_INIT;
  options.rank = atoi(argv[1]);
  options.ranks = atoi(argv[2]);
  /* Touched now, they are not the library's later. */
  printf("%s", "");
  base = now().anon;
  struct use old = before();
  stn_ctx *ctx = NULL;
  ok(stn_init(&options, &ctx), ctx, "init");
  after(&old);
  if (strcmp(how, "streams") != 0) {
    /* Two regions; the second one small, as counters are. */
    old = before();
    ok(stn_protect(ctx, 1, state, bytes - 4096), ctx, "protect");
    ok(stn_protect(ctx, 2, state + bytes - 4096, 64), ctx, "protect");
    after(&old);
  }
  uint32_t flags = STN_FLAG_CHECKPOINT;
  if (strcmp(how, "incremental") == 0) flags |= STN_INCREMENTAL;
  if (strcmp(how, "cow") == 0) flags |= STN_COW;
  for (int round = 0; round < rounds; round++) {
    for (size_t i = (size_t)(round % 10) << 12; i < bytes; i += 10u << 12) state[i]++;
    old = before();
    uint64_t no = 0;
    if (strcmp(how, "streams") == 0)
      streams(ctx, state, bytes, options.rank, round);
    else
      ok(stn_checkpoint(ctx, NULL, 0, flags, &no), ctx, "checkpoint");
    if (flags & STN_COW) ok(stn_wait(ctx, no, STN_LEVEL_CACHED, 60000), ctx, "wait");
    after(&old);
  }
  ok(stn_finalize(ctx), ctx, "finalize");
  stn_free(ctx);
  printf("client_memory rank=%s how=%s most=%ld\n", argv[1], how, most << 10);
  return 0;
}
