/* SPDX-License-Identifier: Apache-2.0
 *
 * heat2d_regions: heat2d.c once more, with Stanchion's native interface and no
 * files of its own. The program says where its state lies in memory (stn_protect);
 * one call writes all of it (stn_checkpoint), one reads it back (stn_restore).
 *
 * Each rank has three regions: a header that says what the numbers are, its rows of
 * the grid, and its history. They hold what a checkpoint file of heat2d holds, so
 * that both programs' checkpoints cost the same, and the result for the same options
 * is the same file.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "heat2d_core.h"
#include "stanchion.h"

enum { REGIONS = 3 };

struct region {
  uint64_t id;
  const char *what;
  void *start;
  size_t bytes;
};

static stn_ctx *g_ctx;
static struct ckpt_header g_header;

/* ---- small things -------------------------------------------------------- */

static void check_stn(int rc, const char *what)
{
  if (rc != STN_OK) {
    char text[1024] = "";
    stn_error_text(g_ctx, text, sizeof text);
    die("%s failed (%d): %s", what, rc, text);
  }
}

static void list_regions(struct state *s, struct region list[REGIONS])
{
  size_t rows = (size_t)(s->rows * s->nx) * sizeof(double);
  size_t history = (size_t)s->history_len * sizeof(double);
  list[0] = (struct region){1, "header", &g_header, sizeof g_header};
  list[1] = (struct region){2, "rows of the grid", own_rows(s), rows};
  list[2] = (struct region){3, "history", s->history, history};
}

/* Protecting a region again tells its new place: the steps swap two buffers, and
 * the rows are now in one, now in the other. It costs nothing worth asking first. */
static void protect(struct state *s)
{
  struct region list[REGIONS];
  list_regions(s, list);
  for (size_t i = 0; i < REGIONS; i++) {
    check_stn(stn_protect(g_ctx, list[i].id, list[i].start, list[i].bytes), "stn_protect");
  }
}

/* ---- restart ------------------------------------------------------------- */

/* What stn_restore checks too, but here the numbers have names and the user learns
 * which options are meant. A program whose arrays grow would take the sizes from
 * here, allocate, and protect again. */
static bool sizes_fit(const char *name, struct state *s)
{
  struct region list[REGIONS];
  list_regions(s, list);
  bool good = true;
  for (size_t i = 0; i < REGIONS; i++) {
    const struct region *r = &list[i];
    size_t bytes = 0;
    char why[256];
    int rc = stn_region_bytes(g_ctx, r->id, &bytes);
    if (rc == STN_OK && bytes == r->bytes) {
      continue;
    }
    if (rc == STN_OK) {
      snprintf(why, sizeof why,
               "region %" PRIu64 " (%s) has %zu bytes there, %zu here (--nx, --ny, --ckpt-mb)",
               r->id, r->what, bytes, r->bytes);
    } else if (rc == STN_ERR_NOTFOUND) {
      snprintf(why, sizeof why, "region %" PRIu64 " (%s) is missing", r->id, r->what);
    } else {
      check_stn(rc, "stn_region_bytes");
    }
    good = bad_file(name, why);
  }
  return good;
}

/* Sizes may agree by chance, and nobody but the program knows what its numbers mean. */
static bool contents_fit(const char *name, struct state *s)
{
  return header_fits(name, &g_header, s) &&
         (g_header.step == dataset_step(name) || bad_file(name, "checkpoint of another step")) &&
         take_header(name, &g_header, s);
}

/* ---- the same as a stream (--mode stream) --------------------------------- */

/* Small and large writes, and one that goes back: the sizes stand in front and are
 * known to be right when all else is written. */
enum { PIECE = 4000 };

static void stream_path(char path[NAME_SIZE], const char *name)
{
  snprintf(path, NAME_SIZE, "%s/rank_%d.stream", name, g_rank);
}

static int stream_write(struct state *s, const char *name)
{
  char path[NAME_SIZE];
  uint64_t stream, sizes[REGIONS];
  struct region list[REGIONS];
  list_regions(s, list);
  stream_path(path, name);
  int rc = stn_open(g_ctx, path, strlen(path), STN_WRITE, &stream);
  if (rc == STN_OK) {
    rc = stn_seek(g_ctx, stream, sizeof sizes);
  }
  for (int i = 0; i < REGIONS; i++) {
    sizes[i] = list[i].bytes;
    const char *from = list[i].start;
    for (size_t done = 0; rc == STN_OK && done < list[i].bytes; done += PIECE) {
      size_t left = list[i].bytes - done;
      rc = stn_write(g_ctx, stream, from + done, left < PIECE ? left : PIECE);
    }
  }
  if (rc == STN_OK) {
    rc = stn_seek(g_ctx, stream, 0);
  }
  if (rc == STN_OK) {
    rc = stn_write(g_ctx, stream, sizes, sizeof sizes);
  }
  return rc == STN_OK ? stn_close(g_ctx, stream) : rc;
}

static int stream_checkpoint(struct state *s, const char *name)
{
  int rc = stn_begin(g_ctx, name, strlen(name), STN_FLAG_CHECKPOINT, NULL);
  if (rc != STN_OK) {
    return rc;
  }
  int written = stream_write(s, name);
  rc = stn_complete(g_ctx, written == STN_OK);
  return written == STN_OK ? rc : written;
}

static bool stream_read(struct state *s, const char *name)
{
  char path[NAME_SIZE];
  uint64_t stream, sizes[REGIONS];
  size_t got = 0;
  struct region list[REGIONS];
  list_regions(s, list);
  stream_path(path, name);
  bool good = stn_open(g_ctx, path, strlen(path), STN_READ, &stream) == STN_OK &&
              stn_read(g_ctx, stream, sizes, sizeof sizes, &got) == STN_OK &&
              got == sizeof sizes;
  for (int i = 0; i < REGIONS && good; i++) {
    good = sizes[i] == list[i].bytes &&
           stn_read(g_ctx, stream, list[i].start, list[i].bytes, &got) == STN_OK &&
           got == list[i].bytes;
  }
  return good && stn_close(g_ctx, stream) == STN_OK;
}

static bool stream_restore(struct state *s)
{
  char name[STN_NAME_SIZE] = "";
  check_stn(stn_start_restart(g_ctx, name, sizeof name, NULL), "stn_start_restart");
  bool good = stream_read(s, name) && contents_fit(name, s);
  if (stn_complete_restart(g_ctx, good) != STN_OK) {
    say("%s rejected", name);
    return false;
  }
  g_restart_step = s->step;
  say("restart from step %" PRId64 " (%s)", s->step, name);
  return true;
}

/* One dataset that is on offer. False if it was rejected, by whichever rank. */
static bool try_restore(struct state *s)
{
  char name[STN_NAME_SIZE] = "", same[STN_NAME_SIZE];
  check_stn(stn_start_restart(g_ctx, name, sizeof name, NULL), "stn_start_restart");
  bool fits = sizes_fit(name, s);
  /* Called even if it cannot succeed: that is this rank's vote against the dataset. */
  int rc = stn_restore(g_ctx, same, sizeof same, NULL);
  if (rc != STN_OK) {
    char text[1024] = "";
    stn_error_text(g_ctx, text, sizeof text);
    if (fits) {
      bad_file(name, text); /* otherwise it was said already, in better words */
    }
    say("%s rejected: %s", name, text);
    return false;
  }
  /* All ranks took it, so that there is no way back to an older one: what is wrong
   * now is the command line or the machine, and a fresh start would hide it. */
  if (!all_ranks(fits && contents_fit(name, s))) {
    die("%s was restored, but is not a state of this program with these options", name);
  }
  g_restart_step = s->step;
  say("restart from step %" PRId64 " (%s)", s->step, name);
  return true;
}

static void restart(struct state *s, bool stream)
{
  double since = MPI_Wtime();
  char last[STN_NAME_SIZE] = "", name[STN_NAME_SIZE] = "";
  for (;;) {
    int have = 0;
    check_stn(stn_have_restart(g_ctx, &have, name, sizeof name, NULL), "stn_have_restart");
    if (!have) {
      return;
    }
    /* Something else than the dataset is wrong, and asking for ever does not help. */
    if (strcmp(name, last) == 0) {
      die("%s could not be restored and is offered again", name);
    }
    if (stream ? stream_restore(s) : try_restore(s)) {
      break;
    }
    memcpy(last, name, sizeof last);
    state_reset(s); /* what was read of the rejected one must not stay */
  }
  g_restart_seconds = MPI_Wtime() - since;
}

/* ---- checkpoints --------------------------------------------------------- */

static bool wants_checkpoint(const struct options *o)
{
  int flag = 0;
  (void)o;
  check_stn(stn_need_checkpoint(g_ctx, &flag), "stn_need_checkpoint");
  return flag != 0;
}

static bool wants_exit(const struct options *o)
{
  int flag = 0;
  (void)o;
  check_stn(stn_should_exit(g_ctx, &flag), "stn_should_exit");
  return flag != 0;
}

static bool is_stream(const struct options *o)
{
  return o->mode != NULL && strcmp(o->mode, "stream") == 0;
}

static uint32_t mode_flags(const struct options *o)
{
  if (o->mode == NULL || strcmp(o->mode, "copy") == 0 || is_stream(o)) {
    return 0;
  }
  if (strcmp(o->mode, "incremental") == 0) {
    return STN_INCREMENTAL;
  }
  if (strcmp(o->mode, "cow") == 0) {
    return STN_COW;
  }
  if (strcmp(o->mode, "cow-incremental") == 0) {
    return STN_COW | STN_INCREMENTAL;
  }
  die("--mode: '%s' is none of copy, cow, incremental, cow-incremental and stream", o->mode);
}

static void checkpoint(struct state *s, const struct options *o)
{
  char name[NAME_SIZE];
  struct timing t = {.step = s->step};
  (void)o;
  dataset_name(name, s->step);
  double before = MPI_Wtime();
  g_header = make_header(s);
  t.digest = MPI_Wtime() - before;
  /* A rank that comes late to the checkpoint is not the checkpoint's cost. */
  check_mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");

  double begin = MPI_Wtime();
  if (!is_stream(o)) {
    protect(s);
  }
  double started = MPI_Wtime();
  uint32_t flags = STN_FLAG_CHECKPOINT | mode_flags(o);
  int rc = is_stream(o) ? stream_checkpoint(s, name)
                        : stn_checkpoint(g_ctx, name, strlen(name), flags, NULL);
  if (rc == STN_ERR_DROPPED || rc == STN_ERR_SPACE) {
    /* No reason to end: the checkpoint before it stays. */
    char text[1024] = "";
    stn_error_text(g_ctx, text, sizeof text);
    fprintf(stderr, "heat2d_regions: rank %d: %s was dropped: %s\n", g_rank, name, text);
  } else {
    check_stn(rc, "stn_checkpoint");
  }
  double end = MPI_Wtime();
  /* One call does it all: nothing is left for t.complete. */
  t.start = started - begin;
  t.write = end - started;
  t.blocked = end - begin;
  keep_timing(&t);
}

/* ---- main ---------------------------------------------------------------- */

static const char usage[] =
    "usage: heat2d_regions [--nx N] [--ny N] [--steps N] [--every K] [--out FILE]\n"
    "                      [--ckpt-mb M] [--step-ms T] [--timing FILE]\n"
    "                      [--mode copy|cow|incremental|cow-incremental|stream]\n"
    "                      [--die-at STEP [--die-rank R]]\n"
    "  --nx, --ny   columns and rows of the grid (256, 256)\n"
    "  --steps      steps in total, those before a restart included (200)\n"
    "  --every      ask every K steps whether a checkpoint is needed (20)\n"
    "  --out        rank 0 writes the final field here\n"
    "  --ckpt-mb    size of each rank's regions in MiB, filled with history\n"
    "  --step-ms    least time of a step in milliseconds\n"
    "  --timing     rank 0 writes what each checkpoint cost, as JSON\n"
    "  --mode       a checkpoint copies all of the regions (copy), behind the program\n"
    "               (cow), or what changed of them (incremental), or that and all of\n"
    "               them behind the program (cow-incremental); or the same is written\n"
    "               as a stream\n"
    "  --die-at     rank R kills itself before it does this step, unless restarted\n";

int main(int argc, char **argv)
{
  begin_run("heat2d_regions", &argc, &argv);
  struct options o = parse(argc, argv, usage);
  if (o.plain != NULL) {
    die("--plain: this program writes no files of its own; heat2d and heat2d-plain do");
  }
  (void)mode_flags(&o);
  double since = MPI_Wtime();
  struct state s;
  state_init(&s, &o);
  stn_options options = STN_OPTIONS_INIT;
  options.rank = g_rank;
  options.ranks = g_ranks;
  check_stn(stn_init(&options, &g_ctx), "stn_init");
  if (!is_stream(&o)) {
    protect(&s);
  }
  restart(&s, is_stream(&o));
  struct checkpointing calls = {.mode = "regions",
                                .wanted = wants_checkpoint,
                                .write = checkpoint,
                                .exit_wanted = wants_exit};
  bool finished = work(&s, &o, &calls, since);
  if ((mode_flags(&o) & STN_COW) != 0) {
    char how[256] = "";
    check_stn(stn_cow_text(g_ctx, how, sizeof how), "stn_cow_text");
    say("how the last checkpoint was copied: %s", how);
  }
  check_stn(stn_finalize(g_ctx), "stn_finalize");
  stn_free(g_ctx); /* before the memory that it knows of */
  end_run(&s, finished);
  return 0;
}
