/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "common.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *g_program = "test";
static int g_rank;

void set_rank(const char *program, int rank)
{
  g_program = program;
  g_rank = rank;
}

static void complain(const char *format, va_list args)
{
  char text[4096];
  vsnprintf(text, sizeof text, format, args);
  fprintf(stderr, "%s: rank %d: %s\n", g_program, g_rank, text);
  fflush(stderr);
}

void fail(const char *format, ...)
{
  va_list args;
  va_start(args, format);
  complain(format, args);
  va_end(args);
  fflush(stdout);
  _exit(1);
}

/* Always false, for use in conditions. */
__attribute__((format(printf, 1, 2))) static bool wrong(const char *format, ...)
{
  va_list args;
  va_start(args, format);
  complain(format, args);
  va_end(args);
  return false;
}

void say(const char *format, ...)
{
  if (g_rank != 0) {
    return;
  }
  va_list args;
  va_start(args, format);
  printf("%s: ", g_program);
  vprintf(format, args);
  putchar('\n');
  va_end(args);
  fflush(stdout);
}

void must(int rc, const char *call)
{
  if (rc != SCR_SUCCESS) {
    fail("%s failed (%d)", call, rc);
  }
}

/* ---- options ------------------------------------------------------------- */

static const char common_usage[] =
    "  --steps N          steps in total, those before a restart included (6)\n"
    "  --size BYTES       least size of a file; ranks and parts differ (100000)\n"
    "  --files N          files of each rank (2)\n"
    "  --seed S           contents (1)\n"
    "  --name NAME        datasets are called NAME.SSSSSS\n"
    "  --sleep-ms T       pause before each step (0)\n"
    "  --always 1         write each step, without asking SCR_Need_checkpoint (0)\n"
    "  --empty-rank R     this rank has no files\n"
    "  --die-at STEP      --die-rank (0) kills itself at this step, unless restarted,\n"
    "  --die-in PLACE     at its beginning (step, the default), after Start (start), in\n"
    "                     the middle of a file (write), or after Complete (done)\n"
    "  --expect-restart N the step that must be restarted from; 0: from nothing\n"
    "  --expect-seed S    the seed of the files restarted from\n";

static long number(const char *option, const char *text)
{
  char *end = NULL;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0') {
    fail("%s: '%s' is not a number", option, text);
  }
  return value;
}

static enum die_in place_of(const char *text)
{
  static const char *const places[] = {"step", "start", "write", "done"};
  for (int i = 0; i < 4; i++) {
    if (strcmp(text, places[i]) == 0) {
      return (enum die_in)i;
    }
  }
  fail("--die-in: '%s' is none of step, start, write, done", text);
}

static const struct extra_option *find(const struct extra_option *table, const char *name)
{
  for (; table != NULL && table->name != NULL; table++) {
    if (strcmp(table->name, name) == 0) {
      return table;
    }
  }
  return NULL;
}

static void print_usage(const struct extra_option *extra)
{
  if (g_rank != 0) {
    return;
  }
  printf("usage: %s [--OPTION VALUE]...\n%s", g_program, common_usage);
  for (; extra != NULL && extra->name != NULL; extra++) {
    printf("  --%s (see the head of the source)\n", extra->name);
  }
  fflush(stdout);
}

struct options parse_options(int argc, char **argv, const char *name,
                             const struct extra_option *extra)
{
  struct options o = {.program = g_program, .name = name, .steps = 6, .size = 100000, .files = 2,
                      .seed = 1, .rank_without_files = -1, .die_at = -1, .expect_restart = -1,
                      .expect_seed = -1};
  const char *die_in = "step";
  long always = 0;
  const struct extra_option common[] = {{"steps", &o.steps, NULL},
                                        {"size", &o.size, NULL},
                                        {"files", &o.files, NULL},
                                        {"seed", &o.seed, NULL},
                                        {"sleep-ms", &o.sleep_ms, NULL},
                                        {"empty-rank", &o.rank_without_files, NULL},
                                        {"die-at", &o.die_at, NULL},
                                        {"die-rank", &o.die_rank, NULL},
                                        {"expect-restart", &o.expect_restart, NULL},
                                        {"expect-seed", &o.expect_seed, NULL},
                                        {"always", &always, NULL},
                                        {"name", NULL, &o.name},
                                        {"die-in", NULL, &die_in},
                                        {NULL, NULL, NULL}};
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--help") == 0) {
      print_usage(extra);
      _exit(0);
    }
    bool dashes = strncmp(argv[i], "--", 2) == 0;
    const struct extra_option *entry = dashes ? find(common, argv[i] + 2) : NULL;
    if (entry == NULL && dashes) {
      entry = find(extra, argv[i] + 2);
    }
    if (entry == NULL || i + 1 >= argc) {
      fail("unknown option or no value: '%s' (see --help)", argv[i]);
    }
    i++;
    if (entry->value != NULL) {
      *entry->value = number(argv[i - 1], argv[i]);
    } else {
      *entry->text = argv[i];
    }
  }
  o.die_in = place_of(die_in);
  o.always = always != 0;
  EXPECT(o.size >= 0 && o.files >= 0 && o.steps >= 0, "--size, --files, --steps: not below 0");
  return o;
}

void pause_ms(long ms)
{
  if (ms > 0) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
  }
}

void die_if_asked(const struct options *o, long step, enum die_in place, bool restarted)
{
  if (!restarted && step == o->die_at && place == o->die_in && g_rank == o->die_rank) {
    raise(SIGKILL);
  }
}

/* ---- names --------------------------------------------------------------- */

void dataset_name(char out[SCR_MAX_FILENAME], const struct options *o, long step)
{
  snprintf(out, SCR_MAX_FILENAME, "%s.%06ld", o->name, step);
}

long dataset_step(const struct options *o, const char *name)
{
  char again[SCR_MAX_FILENAME];
  size_t len = strlen(o->name);
  long step = -1;
  if (strncmp(name, o->name, len) != 0 || sscanf(name + len, ".%ld", &step) != 1 || step < 0) {
    return -1;
  }
  dataset_name(again, o, step);
  return strcmp(again, name) == 0 ? step : -1;
}

/* PREFIX/DATASET/part_P/rank_RRRRRR.dat: the parts of a rank have the same last
 * component, which must not make them the same file. */
void file_path(char out[SCR_MAX_FILENAME], const char *dataset, long part)
{
  const char *prefix = getenv("SCR_PREFIX");
  int len = snprintf(out, SCR_MAX_FILENAME, "%s%s%s/part_%ld/rank_%06d.dat",
                     prefix != NULL ? prefix : "", prefix != NULL ? "/" : "", dataset, part, g_rank);
  if (len < 0 || len >= SCR_MAX_FILENAME) {
    fail("path too long for dataset %s", dataset);
  }
}

/* ---- contents ------------------------------------------------------------ */

/* All members have 8 bytes: the layout has no holes. */
struct file_header {
  char magic[8];
  struct identity id;
};

static const char magic[8] = {'S', 'C', 'R', 'T', 'E', 'S', 'T', '\n'};

struct identity identify(const struct options *o, long step, long part)
{
  /* Sizes that differ and are no multiples of anything. */
  long size = o->size + 13 * g_rank + 4099 * part;
  return (struct identity){.seed = o->seed, .step = step, .rank = g_rank, .part = part,
                           .size = size};
}

static uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* The bytes of the pattern from `offset` on, which is a multiple of 8. */
static void fill(unsigned char *out, size_t count, const struct identity *id, int64_t offset)
{
  uint64_t key = mix((uint64_t)id->seed + mix((uint64_t)id->step + mix((uint64_t)id->rank +
                                              mix((uint64_t)id->part + 1))));
  for (size_t i = 0; i < count; i += 8) {
    uint64_t word = mix(key + ((uint64_t)offset + i) / 8);
    memcpy(out + i, &word, count - i < 8 ? count - i : 8);
  }
}

enum { BLOCK = 65536 };

bool write_pattern(const char *path, const struct identity *id, bool half)
{
  static unsigned char block[BLOCK];
  FILE *f = fopen(path, "wb");
  if (f == NULL) {
    return wrong("%s: %s", path, strerror(errno));
  }
  struct file_header h = {.id = *id};
  memcpy(h.magic, magic, sizeof magic);
  bool good = fwrite(&h, sizeof h, 1, f) == 1;
  int64_t end = half ? id->size / 2 : id->size;
  for (int64_t at = 0; good && at < end; at += BLOCK) {
    size_t part = (size_t)(end - at < BLOCK ? end - at : BLOCK);
    fill(block, part, id, at);
    good = fwrite(block, 1, part, f) == part;
  }
  if (fclose(f) != 0 || !good) {
    return wrong("%s: %s", path, strerror(errno));
  }
  return true;
}

static bool same(const char *path, const char *what, int64_t *wanted, int64_t found)
{
  if (*wanted == -1) {
    *wanted = found;
  }
  return *wanted == found ||
         wrong("%s: %s is %lld, expected %lld", path, what, (long long)found, (long long)*wanted);
}

static bool check_header(FILE *f, const char *path, struct identity *id)
{
  struct file_header h;
  if (fread(&h, sizeof h, 1, f) != 1) {
    return wrong("%s: too short for a header", path);
  }
  if (memcmp(h.magic, magic, sizeof magic) != 0) {
    return wrong("%s: not a file of these tests", path);
  }
  return same(path, "seed", &id->seed, h.id.seed) && same(path, "step", &id->step, h.id.step) &&
         same(path, "rank", &id->rank, h.id.rank) && same(path, "part", &id->part, h.id.part) &&
         same(path, "size", &id->size, h.id.size);
}

static bool check_body(FILE *f, const char *path, const struct identity *id)
{
  static unsigned char block[BLOCK], expected[BLOCK];
  for (int64_t at = 0; at < id->size; at += BLOCK) {
    size_t part = (size_t)(id->size - at < BLOCK ? id->size - at : BLOCK);
    size_t got = fread(block, 1, part, f);
    fill(expected, part, id, at);
    for (size_t i = 0; i < got; i++) {
      if (block[i] != expected[i]) {
        return wrong("%s: byte %lld is %02x, expected %02x", path,
                     (long long)(at + (int64_t)(i + sizeof(struct file_header))), block[i],
                     expected[i]);
      }
    }
    if (got < part) {
      return wrong("%s: ends after %lld of %lld bytes", path, (long long)(at + (int64_t)got),
                   (long long)id->size);
    }
  }
  return fgetc(f) == EOF || wrong("%s: longer than %lld bytes", path, (long long)id->size);
}

bool check_pattern(const char *path, struct identity *id)
{
  FILE *f = fopen(path, "rb");
  if (f == NULL) {
    return wrong("%s: %s", path, strerror(errno));
  }
  bool good = check_header(f, path, id) && check_body(f, path, id);
  fclose(f);
  return good;
}

/* ---- datasets ------------------------------------------------------------ */

static long file_count(const struct options *o)
{
  return g_rank == o->rank_without_files ? 0 : o->files;
}

static bool route(const char *dataset, long part, char path[SCR_MAX_FILENAME])
{
  char file[SCR_MAX_FILENAME];
  file_path(file, dataset, part);
  int rc = SCR_Route_file(file, path);
  return rc == SCR_SUCCESS || wrong("SCR_Route_file(\"%s\") failed (%d)", file, rc);
}

bool write_files(const struct options *o, const char *dataset, long step, bool restarted)
{
  char path[SCR_MAX_FILENAME];
  for (long part = 0; part < file_count(o); part++) {
    struct identity id = identify(o, step, part);
    if (!route(dataset, part, path)) {
      return false;
    }
    if (part == 0 && o->die_at == step && o->die_in == DIE_WRITE) {
      write_pattern(path, &id, true);
      die_if_asked(o, step, DIE_WRITE, restarted);
    }
    if (!write_pattern(path, &id, false)) {
      return false;
    }
  }
  return true;
}

bool check_files(const struct options *o, const char *dataset, long step, long *found)
{
  char path[SCR_MAX_FILENAME];
  for (long part = 0; part < file_count(o); part++) {
    struct identity id = identify(o, step, part);
    id.seed = o->expect_seed;
    if (!route(dataset, part, path) || !check_pattern(path, &id)) {
      return false;
    }
    step = (long)id.step; /* the same in all parts */
  }
  if (found != NULL) {
    *found = step;
  }
  return true;
}

void write_dataset(const struct options *o, const char *name, const char *dataset, long step,
                   int flags, bool restarted)
{
  int rc = SCR_Start_output(name, flags);
  EXPECT(rc == SCR_SUCCESS, "SCR_Start_output(%s) failed (%d)", name ? name : "NULL", rc);
  die_if_asked(o, step, DIE_START, restarted);
  bool good = write_files(o, dataset, step, restarted);
  rc = SCR_Complete_output(good ? 1 : 0);
  EXPECT(rc == SCR_SUCCESS, "SCR_Complete_output of %s failed (%d)", dataset, rc);
  die_if_asked(o, step, DIE_DONE, restarted);
}

void expect_restart(const struct options *o, long step)
{
  EXPECT(o->expect_restart < 0 || o->expect_restart == step,
         "restart from step %ld, expected %ld (0: from nothing)", step, o->expect_restart);
}

long restart(const struct options *o)
{
  char offered[SCR_MAX_FILENAME], started[SCR_MAX_FILENAME];
  int have = -1;
  long step = 0;
  must(SCR_Have_restart(&have, offered), "SCR_Have_restart");
  EXPECT(have == 0 || have == 1, "SCR_Have_restart: flag is %d", have);
  if (have == 0) {
    say("start from step 0");
  } else {
    must(SCR_Start_restart(started), "SCR_Start_restart");
    EXPECT(strcmp(offered, started) == 0, "offered %s, started %s", offered, started);
    step = dataset_step(o, started);
    EXPECT(step > 0, "'%s' is not a dataset of this test", started);
    EXPECT(check_files(o, started, step, NULL), "dataset %s is damaged", started);
    must(SCR_Complete_restart(1), "SCR_Complete_restart");
    say("restart from step %ld (%s)", step, started);
  }
  expect_restart(o, step);
  return step;
}
