/* SPDX-License-Identifier: Apache-2.0
 *
 * What heat2d.c and heat2d_regions.c share: all but how the state gets into a
 * checkpoint and back.
 *
 * Each cell is computed from the same numbers in the same order whatever the cut,
 * so that the result for one grid is the same to the bit, however often the run
 * was interrupted and whichever of the two programs made it.
 */
#define _GNU_SOURCE
#include "heat2d_core.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <mpi.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CKPT_MAGIC "HEAT2DC1"
#define RESULT_MAGIC "HEAT2DR1"
#define BYTE_ORDER_MARK UINT64_C(0x0102030405060708)
#define PATH_SIZE 1024

struct result_header {
  char magic[8];
  uint64_t byte_order;
  int64_t step, nx, ny;
  uint64_t history_digest; /* depends on the number of ranks, unlike the field */
};

int g_rank, g_ranks;
int64_t g_restart_step = -1;
double g_restart_seconds;
static const char *g_program;
static struct timing *g_timings;
static size_t g_timing_count, g_timing_room;

/* ---- small things -------------------------------------------------------- */

void die(const char *format, ...)
{
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fprintf(stderr, "%s: rank %d: %s\n", g_program, g_rank, text);
  fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
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

void check_mpi(int rc, const char *what)
{
  if (rc != MPI_SUCCESS) {
    die("%s failed (MPI error %d)", what, rc);
  }
}

bool all_ranks(bool mine)
{
  int in = mine ? 1 : 0, out = 0;
  check_mpi(MPI_Allreduce(&in, &out, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  return out == 1;
}

static void *allocate(int64_t count)
{
  void *memory = calloc(count > 0 ? (size_t)count : 1, sizeof(double));
  if (memory == NULL) {
    die("out of memory for %" PRId64 " numbers", count);
  }
  return memory;
}

static uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* Four lanes, so that it runs at the memory's speed. Every step is a bijection of
 * its lane: a change in one word always shows. */
static uint64_t digest(const double *data, int64_t count, uint64_t seed)
{
  uint64_t lane[4] = {seed, seed + 1, seed + 2, seed + 3};
  for (int64_t i = 0; i < count; i++) {
    uint64_t word;
    memcpy(&word, &data[i], sizeof word);
    lane[i & 3] = (lane[i & 3] ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    lane[i & 3] ^= lane[i & 3] >> 29;
  }
  return mix(lane[0] ^ mix(lane[1] ^ mix(lane[2] ^ mix(lane[3]))));
}

/* ---- the physics --------------------------------------------------------- */

static double start_value(int64_t x, int64_t y, int64_t nx)
{
  uint64_t noise = mix((uint64_t)(y * nx + x) + 1) >> 11;
  return 20.0 + 60.0 * ((double)noise / 9007199254740992.0);
}

void state_reset(struct state *s)
{
  s->step = 0;
  s->history_next = 0;
  for (int64_t row = 0; row < s->rows + 2; row++) {
    int64_t y = s->y0 + row - 1;
    for (int64_t x = 0; x < s->nx; x++) {
      double value = start_value(x, y, s->nx);
      if (y < 0) {
        value = 100.0; /* the hot edge */
      } else if (y >= s->ny) {
        value = 0.0;
      }
      s->field[row * s->nx + x] = value;
      s->next[row * s->nx + x] = value;
    }
  }
  /* Not zeros: nobody between here and the disk shall get away with less work. */
  for (int64_t i = 0; i < s->history_len; i++) {
    s->history[i] = (double)(mix((uint64_t)i ^ ((uint64_t)g_rank << 40)) >> 11);
  }
}

void state_init(struct state *s, const struct options *o)
{
  memset(s, 0, sizeof *s);
  s->nx = o->nx;
  s->ny = o->ny;
  s->y0 = o->ny * g_rank / g_ranks;
  s->rows = o->ny * (g_rank + 1) / g_ranks - s->y0;
  int64_t own = s->rows * s->nx;
  int64_t wanted = o->ckpt_mb * 1048576 - (int64_t)sizeof(struct ckpt_header);
  s->history_len = wanted / (int64_t)sizeof(double) - own;
  if (s->history_len < 0) {
    s->history_len = 0;
  }
  s->field = allocate((s->rows + 2) * s->nx);
  s->next = allocate((s->rows + 2) * s->nx);
  s->history = allocate(s->history_len);
  state_reset(s);
}

double *own_rows(const struct state *s)
{
  return s->field + s->nx;
}

static void exchange_halos(struct state *s)
{
  int up = g_rank > 0 ? g_rank - 1 : MPI_PROC_NULL;
  int down = g_rank + 1 < g_ranks ? g_rank + 1 : MPI_PROC_NULL;
  int n = (int)s->nx;
  double *first = own_rows(s), *last = s->field + s->rows * s->nx;
  check_mpi(MPI_Sendrecv(first, n, MPI_DOUBLE, up, 1, last + n, n, MPI_DOUBLE, down, 1,
                         MPI_COMM_WORLD, MPI_STATUS_IGNORE),
            "halo exchange upwards");
  check_mpi(MPI_Sendrecv(last, n, MPI_DOUBLE, down, 2, s->field, n, MPI_DOUBLE, up, 2,
                         MPI_COMM_WORLD, MPI_STATUS_IGNORE),
            "halo exchange downwards");
}

static void record_history(struct state *s)
{
  const double *from = own_rows(s);
  int64_t left = s->rows * s->nx;
  while (left > 0 && s->history_len > 0) {
    int64_t room = s->history_len - s->history_next;
    int64_t part = left < room ? left : room;
    memcpy(s->history + s->history_next, from, (size_t)part * sizeof(double));
    s->history_next = (s->history_next + part) % s->history_len;
    from += part;
    left -= part;
  }
}

static void do_step(struct state *s)
{
  exchange_halos(s);
  for (int64_t row = 1; row <= s->rows; row++) {
    const double *here = s->field + row * s->nx;
    const double *above = here - s->nx, *below = here + s->nx;
    double *out = s->next + row * s->nx;
    for (int64_t x = 0; x < s->nx; x++) {
      /* The left and right edges are insulated. */
      double west = here[x > 0 ? x - 1 : x];
      double east = here[x + 1 < s->nx ? x + 1 : x];
      out[x] = here[x] + 0.2 * (((above[x] + below[x]) + (west + east)) - 4.0 * here[x]);
    }
  }
  double *swap = s->field;
  s->field = s->next;
  s->next = swap;
  s->step++;
  record_history(s);
}

/* ---- what a checkpoint says of itself ------------------------------------ */

void dataset_name(char name[NAME_SIZE], int64_t step)
{
  snprintf(name, NAME_SIZE, "ckpt.%06" PRId64, step);
}

int64_t dataset_step(const char *name)
{
  char expected[NAME_SIZE];
  int64_t step = -1;
  if (sscanf(name, "ckpt.%" SCNd64, &step) != 1 || step < 0) {
    return -1;
  }
  dataset_name(expected, step);
  return strcmp(name, expected) == 0 ? step : -1;
}

bool write_all(int fd, const void *data, size_t size)
{
  const char *at = data;
  while (size > 0) {
    ssize_t done = write(fd, at, size);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return false;
    }
    at += done;
    size -= (size_t)done;
  }
  return true;
}

bool bad_file(const char *path, const char *why)
{
  fprintf(stderr, "%s: rank %d: %s: %s\n", g_program, g_rank, path, why);
  return false;
}

struct ckpt_header make_header(const struct state *s)
{
  struct ckpt_header h = {.byte_order = BYTE_ORDER_MARK,
                          .step = s->step,
                          .nx = s->nx,
                          .ny = s->ny,
                          .y0 = s->y0,
                          .rows = s->rows,
                          .rank = g_rank,
                          .ranks = g_ranks,
                          .history_len = s->history_len,
                          .history_next = s->history_next};
  memcpy(h.magic, CKPT_MAGIC, sizeof h.magic);
  uint64_t field = digest(own_rows(s), s->rows * s->nx, 1);
  h.digest = digest(s->history, s->history_len, field);
  return h;
}

bool header_fits(const char *what, const struct ckpt_header *h, const struct state *s)
{
  if (memcmp(h->magic, CKPT_MAGIC, sizeof h->magic) != 0 || h->byte_order != BYTE_ORDER_MARK) {
    return bad_file(what, "not a checkpoint of heat2d on such a machine");
  }
  if (h->nx != s->nx || h->ny != s->ny || h->history_len != s->history_len) {
    return bad_file(what, "checkpoint of another size (--nx, --ny, --ckpt-mb)");
  }
  if (h->rank != g_rank || h->ranks != g_ranks || h->y0 != s->y0 || h->rows != s->rows) {
    return bad_file(what, "checkpoint of another rank or another number of ranks");
  }
  if (h->step < 0 || h->history_next < 0 || h->history_next > h->history_len) {
    return bad_file(what, "impossible numbers in the header");
  }
  return true;
}

bool take_header(const char *what, const struct ckpt_header *h, struct state *s)
{
  s->step = h->step;
  s->history_next = h->history_next;
  return make_header(s).digest == h->digest || bad_file(what, "digest does not match");
}

/* ---- what checkpoints cost ----------------------------------------------- */

void keep_timing(const struct timing *mine)
{
  double in[5] = {mine->blocked, mine->start, mine->write, mine->complete, mine->digest};
  double out[5];
  check_mpi(MPI_Allreduce(in, out, 5, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
  if (g_timing_count == g_timing_room) {
    g_timing_room = g_timing_room ? 2 * g_timing_room : 64;
    g_timings = realloc(g_timings, g_timing_room * sizeof *g_timings);
    if (g_timings == NULL) {
      die("out of memory");
    }
  }
  g_timings[g_timing_count++] = (struct timing){mine->step, out[0], out[1], out[2], out[3], out[4]};
  char name[NAME_SIZE];
  dataset_name(name, mine->step);
  say("step %" PRId64 ": checkpoint %s, blocked %.4f s", mine->step, name, out[0]);
}

/* ---- results ------------------------------------------------------------- */

/* Row by row: rank 0 needs no memory for the whole field, and no count outgrows
 * an int. */
static bool write_rows(int fd, const struct state *s)
{
  bool good = write_all(fd, own_rows(s), (size_t)(s->rows * s->nx) * sizeof(double));
  double *row = allocate(s->nx);
  for (int rank = 1; rank < g_ranks; rank++) {
    int64_t rows = s->ny * (rank + 1) / g_ranks - s->ny * rank / g_ranks;
    for (int64_t i = 0; i < rows; i++) {
      check_mpi(MPI_Recv(row, (int)s->nx, MPI_DOUBLE, rank, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE),
                "receiving the result");
      good = good && write_all(fd, row, (size_t)s->nx * sizeof(double));
    }
  }
  free(row);
  return good;
}

static void write_result(const struct state *s, const char *path)
{
  uint64_t mine = digest(s->history, s->history_len, (uint64_t)g_rank), all = 0;
  check_mpi(MPI_Reduce(&mine, &all, 1, MPI_UINT64_T, MPI_BXOR, 0, MPI_COMM_WORLD), "MPI_Reduce");
  if (g_rank != 0) {
    for (int64_t i = 0; i < s->rows; i++) {
      check_mpi(MPI_Send(own_rows(s) + i * s->nx, (int)s->nx, MPI_DOUBLE, 0, 3, MPI_COMM_WORLD),
                "sending the result");
    }
    return;
  }
  struct result_header h = {.byte_order = BYTE_ORDER_MARK,
                            .step = s->step,
                            .nx = s->nx,
                            .ny = s->ny,
                            .history_digest = all};
  memcpy(h.magic, RESULT_MAGIC, sizeof h.magic);
  /* Whoever waits for the file shall find it whole. */
  char part[PATH_SIZE];
  int len = snprintf(part, sizeof part, "%s.part", path);
  if (len < 0 || len >= PATH_SIZE) {
    die("path too long: %s", path);
  }
  int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) {
    die("%s: %s", part, strerror(errno));
  }
  bool good = write_all(fd, &h, sizeof h) && write_rows(fd, s);
  if (!good || close(fd) != 0 || rename(part, path) != 0) {
    die("%s: %s", path, strerror(errno));
  }
  say("result in %s", path);
}

static void write_timings(const struct options *o, const struct state *s, const char *mode,
                          double seconds)
{
  FILE *f = g_rank == 0 ? fopen(o->timing, "w") : NULL;
  if (g_rank != 0) {
    return;
  }
  if (f == NULL) {
    die("%s: %s", o->timing, strerror(errno));
  }
  int64_t bytes = (int64_t)sizeof(struct ckpt_header) +
                  (s->rows * s->nx + s->history_len) * (int64_t)sizeof(double);
  fprintf(f, "{\"mode\": \"%s\", \"ranks\": %d, \"bytes_per_rank\": %" PRId64 ",\n",
          mode, g_ranks, bytes);
  fprintf(f, " \"seconds\": %.6f, \"restart_step\": %" PRId64 ", \"restart_s\": %.6f,\n", seconds,
          g_restart_step, g_restart_seconds);
  fprintf(f, " \"checkpoints\": [");
  for (size_t i = 0; i < g_timing_count; i++) {
    const struct timing *t = &g_timings[i];
    fprintf(f,
            "%s\n  {\"step\": %" PRId64 ", \"name\": \"ckpt.%06" PRId64
            "\", \"blocked_s\": %.6f, \"start_s\": %.6f, \"write_s\": %.6f, "
            "\"complete_s\": %.6f, \"digest_s\": %.6f}",
            i ? "," : "", t->step, t->step, t->blocked, t->start, t->write, t->complete, t->digest);
  }
  fprintf(f, "\n ]}\n");
  bool good = ferror(f) == 0;
  if (fclose(f) != 0 || !good) {
    die("%s: cannot write", o->timing);
  }
}

/* ---- command line, start and end ----------------------------------------- */

static long number(const char *option, const char *text, long least, long most)
{
  char *end = NULL;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || value < least || value > most) {
    die("--%s: '%s' is not a number from %ld to %ld", option, text, least, most);
  }
  return value;
}

struct options parse(int argc, char **argv, const char *usage)
{
  static const struct option table[] = {
      {"nx", required_argument, NULL, 'x'},      {"ny", required_argument, NULL, 'y'},
      {"steps", required_argument, NULL, 's'},   {"every", required_argument, NULL, 'e'},
      {"out", required_argument, NULL, 'o'},     {"ckpt-mb", required_argument, NULL, 'm'},
      {"step-ms", required_argument, NULL, 't'}, {"plain", required_argument, NULL, 'p'},
      {"timing", required_argument, NULL, 'j'},  {"die-at", required_argument, NULL, 'd'},
      {"die-rank", required_argument, NULL, 'r'}, {"mode", required_argument, NULL, 'M'},
      {"help", no_argument, NULL, 'h'},
      {NULL, 0, NULL, 0}};
  struct options o = {.nx = 256, .ny = 256, .steps = 200, .every = 20, .die_at = -1};
  int which, index = 0;
  while ((which = getopt_long(argc, argv, "", table, &index)) != -1) {
    const char *name = table[index].name;
    switch (which) {
    case 'x': o.nx = number(name, optarg, 1, INT_MAX / 2); break;
    case 'y': o.ny = number(name, optarg, 1, INT_MAX / 2); break;
    case 's': o.steps = number(name, optarg, 0, 1000000000); break;
    case 'e': o.every = number(name, optarg, 1, 1000000000); break;
    case 'm': o.ckpt_mb = number(name, optarg, 0, 1048576); break;
    case 't': o.step_ms = number(name, optarg, 0, 3600000); break;
    case 'd': o.die_at = number(name, optarg, 0, LONG_MAX); break;
    case 'r': o.die_rank = number(name, optarg, 0, INT_MAX); break;
    case 'o': o.out = optarg; break;
    case 'p': o.plain = optarg; break;
    case 'j': o.timing = optarg; break;
    case 'M': o.mode = optarg; break;
    default:
      if (g_rank == 0) {
        fputs(usage, which == 'h' ? stdout : stderr);
      }
      MPI_Finalize();
      exit(which == 'h' ? 0 : 2);
    }
  }
  if (optind < argc) {
    die("unexpected argument '%s'", argv[optind]);
  }
  if (o.ny < g_ranks) {
    die("--ny %ld gives some of %d ranks no row", o.ny, g_ranks);
  }
  return o;
}

void begin_run(const char *program, int *argc, char ***argv)
{
  g_program = program;
  check_mpi(MPI_Init(argc, argv), "MPI_Init");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &g_rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &g_ranks), "MPI_Comm_size");
}

/* Sleeps until the step that began at `since` has taken its least time. */
static void pace(double since, long step_ms)
{
  double left = since + (double)step_ms / 1000.0 - MPI_Wtime();
  if (left > 0.0) {
    struct timespec pause = {.tv_sec = (time_t)left};
    pause.tv_nsec = (long)((left - (double)pause.tv_sec) * 1e9);
    nanosleep(&pause, NULL);
  }
}

/* Returns false if the run was asked to stop before its last step. */
static bool run(struct state *s, const struct options *o, const struct checkpointing *c)
{
  bool asked = true;
  while (s->step < o->steps) {
    double since = MPI_Wtime();
    if (g_restart_step < 0 && s->step + 1 == o->die_at && g_rank == o->die_rank) {
      raise(SIGKILL);
    }
    do_step(s);
    pace(since, o->step_ms);
    asked = s->step % o->every == 0;
    if (!asked) {
      continue;
    }
    if (c->wanted(o)) {
      c->write(s, o);
    } else {
      say("step %" PRId64, s->step);
    }
    if (s->step < o->steps && c->exit_wanted(o)) {
      return false;
    }
  }
  return true;
}

bool work(struct state *s, const struct options *o, const struct checkpointing *c, double since)
{
  if (g_restart_step < 0) {
    say("start from step 0");
  }
  bool finished = run(s, o, c);
  if (finished && o->out != NULL) {
    write_result(s, o->out);
  }
  if (o->timing != NULL) {
    write_timings(o, s, c->mode, MPI_Wtime() - since);
  }
  return finished;
}

void end_run(struct state *s, bool finished)
{
  say(finished ? "finished at step %" PRId64 : "halted at step %" PRId64, s->step);
  free(s->field);
  free(s->next);
  free(s->history);
  free(g_timings);
  check_mpi(MPI_Finalize(), "MPI_Finalize");
}
