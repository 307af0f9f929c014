/* Copy-on-write by userfaultfd, and what a program does to its memory in the middle. C11 and C++17. */
#define _GNU_SOURCE 1
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stanchion.h"

#define REGION 7u
#define BYTES ((size_t)4 << 20)

static stn_ctx *ctx;

static void fail(const char *what, int line) {
  char text[512] = "";
  if (ctx != NULL) stn_error_text(ctx, text, sizeof text);
  fprintf(stderr, "cow: line %d: %s: %s\n", line, what, text);
  exit(1);
}

#define NEED(what) do { if (!(what)) fail(#what, __LINE__); } while (0)

static unsigned char value(size_t at) { return (unsigned char)(at >> 12 ^ at); }

static void fill(unsigned char *memory) {
  for (size_t i = 0; i < BYTES; i++) memory[i] = value(i);
}

static int is_filled(const unsigned char *memory) {
  for (size_t i = 0; i < BYTES; i++) {
    if (memory[i] != value(i)) return 0;
  }
  return 1;
}

static unsigned char *mapped(void) {
  void *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  NEED(at != MAP_FAILED);
  return (unsigned char *)at;
}

/* A checkpoint of `memory` that is only copied where somebody waits for it: the settings say one byte a second. */
static uint64_t begin(unsigned char *memory) {
  uint64_t no = 0;
  char how[128] = "";
  fill(memory);
  NEED(stn_protect(ctx, REGION, memory, BYTES) == STN_OK);
  NEED(stn_advise(ctx, REGION, 2u) == STN_ERR_INVALID);
  NEED(stn_advise(ctx, REGION + 1, STN_REGION_NO_IO) == STN_ERR_NOTFOUND);
  NEED(stn_advise(ctx, REGION, STN_REGION_NO_IO) == STN_OK);
  NEED(stn_checkpoint(ctx, "d", 1, STN_FLAG_CHECKPOINT | STN_COW, &no) == STN_OK);
  NEED(stn_cow_text(ctx, how, sizeof how) == STN_OK);
  NEED(strncmp(how, "userfaultfd", 11) == 0);
  return no;
}

/* The dataset was dropped, and the reason is ours. */
static void is_torn(uint64_t no) {
  char text[512];
  NEED(stn_wait(ctx, no, STN_LEVEL_CACHED, 60000) == STN_ERR_LEVEL);
  stn_error_text(ctx, text, sizeof text);
  NEED(strstr(text, "memory of region 7 was unmapped") != NULL);
}

/* A child has the memory, waits for nobody, and keeps nobody waiting. */
static void forks(void) {
  unsigned char *memory = mapped();
  begin(memory);
  pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int good = is_filled(memory);
    memset(memory, 1, BYTES);
    _exit(good ? 0 : 1);
  }
  int status = 1;
  NEED(child > 0 && waitpid(child, &status, 0) == child && status == 0);
  memory[0] = 9;
  memset(memory + BYTES / 2, 2, BYTES / 2);
  NEED(stn_unprotect(ctx, REGION) == STN_OK);
  NEED(munmap(memory, BYTES) == 0);
}

/* Freed as it should be: the copy is completed first. */
static void freed(void) {
  unsigned char *memory = mapped();
  begin(memory);
  NEED(stn_unprotect(ctx, REGION) == STN_OK);
  NEED(munmap(memory, BYTES) == 0);
}

/* Moved as it should be. */
static void moved(void) {
  unsigned char *memory = mapped(), *other = mapped();
  begin(memory);
  NEED(stn_protect(ctx, REGION, other, BYTES) == STN_OK);
  NEED(munmap(memory, BYTES) == 0);
}

static void unmapped(void) {
  unsigned char *memory = mapped();
  uint64_t no = begin(memory);
  NEED(munmap(memory + BYTES / 2, BYTES / 4) == 0);
  is_torn(no);
  /* Nothing waits for ever. */
  memset(memory, 3, BYTES / 2);
}

static void dropped(void) {
  unsigned char *memory = mapped();
  uint64_t no = begin(memory);
  NEED(madvise(memory + BYTES / 2, BYTES / 4, MADV_DONTNEED) == 0);
  is_torn(no);
  memset(memory, 3, BYTES);
}

static void shrunk(void) {
  unsigned char *memory = (unsigned char *)malloc(BYTES);
  NEED(memory != NULL);
  uint64_t no = begin(memory);
  unsigned char *less = (unsigned char *)realloc(memory, BYTES / 64);
  NEED(less != NULL && less[0] == value(0) && less[BYTES / 64 - 1] == value(BYTES / 64 - 1));
  less[0] = 9;
  is_torn(no);
  free(less);
}

static void freed_too_early(void) {
  unsigned char *memory = (unsigned char *)malloc(BYTES);
  NEED(memory != NULL);
  uint64_t no = begin(memory);
  free(memory);
  is_torn(no);
}

int main(int argc, char **argv) {
  static const struct {
    const char *name;
    void (*play)(void);
  } scenes[] = {
    {"forks", forks},       {"freed", freed},     {"moved", moved},
    {"unmapped", unmapped}, {"dropped", dropped}, {"shrunk", shrunk},
    {"freed too early", freed_too_early},
  };
  NEED(argc == 2);
  NEED(stn_init(NULL, &ctx) == STN_OK);
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; i++) {
    if (strcmp(argv[1], scenes[i].name) == 0) {
      scenes[i].play();
      NEED(stn_finalize(ctx) == STN_OK);
      stn_free(ctx);
      return 0;
    }
  }
  return 2;
}
