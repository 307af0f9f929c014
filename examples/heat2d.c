/* SPDX-License-Identifier: Apache-2.0
 *
 * heat2d: heat flow in a plate, an application as SCR's users write them. The
 * plate itself is in heat2d_core.c; this is how its state is saved and read back.
 * heat2d_regions.c does the same with regions of memory, without files of its own.
 *
 * The plate is a grid of nx columns and ny rows, cut into one block of rows for
 * each rank. A step exchanges the rows at the cuts and then relaxes every cell
 * towards its four neighbours.
 *
 * Checkpoints are the program's own binary files, one for each rank, at
 * PREFIX/ckpt.SSSSSS/rank_RRRRRR.heat, where PREFIX is the environment's
 * SCR_PREFIX or the working directory. To make them as large as those of real
 * applications (--ckpt-mb), the program keeps a history: a ring of fields into
 * which each step copies the current one. It belongs to the state like the field.
 *
 * With --plain DIR the same files are written below DIR by the program alone,
 * for comparison; that mode never restarts. With -DHEAT2D_NO_SCR there is only
 * that mode, and no SCR library is needed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "heat2d_core.h"

#ifdef HEAT2D_NO_SCR
#define SCR_MAX_FILENAME 1024
#else
#include "scr.h"
#endif

/* ---- checkpoint files ---------------------------------------------------- */

static bool write_checkpoint(const char *path, const struct ckpt_header *h, const struct state *s)
{
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) {
    return bad_file(path, strerror(errno));
  }
  bool good = write_all(fd, h, sizeof *h) &&
              write_all(fd, own_rows(s), (size_t)(s->rows * s->nx) * sizeof(double)) &&
              write_all(fd, s->history, (size_t)s->history_len * sizeof(double));
  if (!good) {
    bad_file(path, strerror(errno));
  }
  if (close(fd) != 0) {
    good = bad_file(path, strerror(errno));
  }
  return good;
}

#ifndef HEAT2D_NO_SCR
static bool read_all(int fd, void *data, size_t size)
{
  char *at = data;
  while (size > 0) {
    ssize_t done = read(fd, at, size);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      errno = done == 0 ? ENODATA : errno;
      return false;
    }
    at += done;
    size -= (size_t)done;
  }
  return true;
}

static bool read_checkpoint(const char *path, int64_t step, struct state *s)
{
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return bad_file(path, strerror(errno));
  }
  struct ckpt_header h;
  bool good = read_all(fd, &h, sizeof h) || bad_file(path, "too short for a header");
  good = good && header_fits(path, &h, s);
  good = good && (h.step == step || bad_file(path, "checkpoint of another step"));
  if (good && (!read_all(fd, own_rows(s), (size_t)(s->rows * s->nx) * sizeof(double)) ||
               !read_all(fd, s->history, (size_t)s->history_len * sizeof(double)))) {
    good = bad_file(path, errno == ENODATA ? "truncated" : strerror(errno));
  }
  char extra;
  if (good && read(fd, &extra, 1) != 0) {
    good = bad_file(path, "longer than it should be");
  }
  close(fd);
  return good && take_header(path, &h, s);
}
#endif

/* ---- where checkpoints go: SCR, or a directory of our own ---------------- */

static void file_path(char path[SCR_MAX_FILENAME], const char *base, const char *name)
{
  int len = snprintf(path, SCR_MAX_FILENAME, "%s%s%s/rank_%06d.heat", base, *base ? "/" : "", name,
                     g_rank);
  if (len < 0 || len >= SCR_MAX_FILENAME) {
    die("path too long: %s/%s", base, name);
  }
}

/* The directory has to exist before any rank opens a file in it. */
static void plain_begin(const char *dir, const char *name)
{
  bool good = true;
  if (g_rank == 0) {
    char path[SCR_MAX_FILENAME];
    int len = snprintf(path, sizeof path, "%s/%s", dir, name);
    good = len > 0 && len < SCR_MAX_FILENAME && (mkdir(dir, 0700) == 0 || errno == EEXIST) &&
           (mkdir(path, 0700) == 0 || errno == EEXIST);
    if (!good) {
      bad_file(dir, strerror(errno));
    }
  }
  if (!all_ranks(good)) {
    die("cannot make the directory of %s", name);
  }
}

/* Keeps two checkpoints, as one would; outside of all timing. */
static void plain_remove(const char *dir, int64_t step)
{
  char name[NAME_SIZE], path[SCR_MAX_FILENAME];
  if (step <= 0) {
    return;
  }
  dataset_name(name, step);
  file_path(path, dir, name);
  unlink(path);
  check_mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
  if (g_rank == 0) {
    snprintf(path, sizeof path, "%s/%s", dir, name);
    rmdir(path);
  }
}

#ifndef HEAT2D_NO_SCR
static void check_scr(int rc, const char *what)
{
  if (rc != SCR_SUCCESS) {
    die("%s failed (%d)", what, rc);
  }
}

static const char *prefix(void)
{
  const char *value = getenv("SCR_PREFIX");
  return value != NULL ? value : "";
}

/* One dataset that is on offer: read it, and vote. True if all ranks have it. */
static bool try_restart(struct state *s)
{
  char name[SCR_MAX_FILENAME], file[SCR_MAX_FILENAME], path[SCR_MAX_FILENAME];
  check_scr(SCR_Start_restart(name), "SCR_Start_restart");
  int64_t step = dataset_step(name);
  bool good = step >= 0;
  if (!good) {
    bad_file(name, "not a dataset of heat2d");
  } else {
    file_path(file, prefix(), name);
    good = SCR_Route_file(file, path) == SCR_SUCCESS || bad_file(file, "SCR_Route_file failed");
  }
  good = good && read_checkpoint(path, step, s);
  if (SCR_Complete_restart(good ? 1 : 0) != SCR_SUCCESS) {
    say("%s rejected", name);
    return false;
  }
  g_restart_step = step;
  say("restart from step %" PRId64 " (%s)", step, name);
  return true;
}

static void scr_restart(struct state *s)
{
  double since = MPI_Wtime();
  bool restarted = false;
  for (;;) {
    int have = 0;
    check_scr(SCR_Have_restart(&have, NULL), "SCR_Have_restart");
    if (!have) {
      break;
    }
    restarted = try_restart(s);
    if (restarted) {
      break;
    }
    state_reset(s); /* what was read of the rejected one must not stay */
  }
  g_restart_seconds = restarted ? MPI_Wtime() - since : 0.0;
}
#endif

static bool wants_checkpoint(const struct options *o)
{
#ifndef HEAT2D_NO_SCR
  if (o->plain == NULL) {
    int flag = 0;
    check_scr(SCR_Need_checkpoint(&flag), "SCR_Need_checkpoint");
    return flag != 0;
  }
#endif
  return o->plain != NULL;
}

static bool wants_exit(const struct options *o)
{
  int flag = 0;
#ifndef HEAT2D_NO_SCR
  if (o->plain == NULL) {
    check_scr(SCR_Should_exit(&flag), "SCR_Should_exit");
  }
#endif
  (void)o;
  return flag != 0;
}

/* ---- one checkpoint, timed ----------------------------------------------- */

static void checkpoint(struct state *s, const struct options *o)
{
  char name[NAME_SIZE], file[SCR_MAX_FILENAME];
  struct timing t = {.step = s->step};
  dataset_name(name, s->step);
  double before = MPI_Wtime();
  struct ckpt_header header = make_header(s);
  t.digest = MPI_Wtime() - before;
  /* A rank that comes late to the checkpoint is not the checkpoint's cost. */
  check_mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");

  double begin = MPI_Wtime(), started, written;
  bool good;
#ifndef HEAT2D_NO_SCR
  if (o->plain == NULL) {
    char path[SCR_MAX_FILENAME];
    check_scr(SCR_Start_output(name, SCR_FLAG_CHECKPOINT), "SCR_Start_output");
    started = MPI_Wtime();
    file_path(file, prefix(), name);
    good = SCR_Route_file(file, path) == SCR_SUCCESS || bad_file(file, "SCR_Route_file failed");
    good = good && write_checkpoint(path, &header, s);
    written = MPI_Wtime();
    good = SCR_Complete_output(good ? 1 : 0) == SCR_SUCCESS;
  } else
#endif
  {
    plain_begin(o->plain, name);
    started = MPI_Wtime();
    file_path(file, o->plain, name);
    good = write_checkpoint(file, &header, s);
    written = MPI_Wtime();
    good = all_ranks(good);
  }
  double end = MPI_Wtime();
  if (!good) {
    die("checkpoint %s failed", name);
  }
  t.start = started - begin;
  t.write = written - started;
  t.complete = end - written;
  t.blocked = end - begin;
  keep_timing(&t);
  if (o->plain != NULL) {
    static int64_t kept[2];
    plain_remove(o->plain, kept[0]);
    kept[0] = kept[1];
    kept[1] = s->step;
  }
}

/* ---- command line and main ----------------------------------------------- */

static const char usage[] =
    "usage: heat2d [--nx N] [--ny N] [--steps N] [--every K] [--out FILE]\n"
    "              [--ckpt-mb M] [--step-ms T] [--plain DIR] [--timing FILE]\n"
    "              [--die-at STEP [--die-rank R]]\n"
    "  --nx, --ny   columns and rows of the grid (256, 256)\n"
    "  --steps      steps in total, those before a restart included (200)\n"
    "  --every      ask every K steps whether a checkpoint is needed (20)\n"
    "  --out        rank 0 writes the final field here\n"
    "  --ckpt-mb    size of each rank's checkpoint in MiB, filled with history\n"
    "  --step-ms    least time of a step in milliseconds\n"
    "  --plain      without SCR: write the same files below DIR\n"
    "  --timing     rank 0 writes what each checkpoint cost, as JSON\n"
    "  --die-at     rank R kills itself before it does this step, unless restarted\n";

int main(int argc, char **argv)
{
  begin_run("heat2d", &argc, &argv);
  struct options o = parse(argc, argv, usage);
#ifdef HEAT2D_NO_SCR
  if (o.plain == NULL) {
    die("built without SCR: --plain DIR is needed");
  }
#endif
  double since = MPI_Wtime();
  struct state s;
  state_init(&s, &o);
#ifndef HEAT2D_NO_SCR
  if (o.plain == NULL) {
    check_scr(SCR_Init(), "SCR_Init");
    scr_restart(&s);
  }
#endif
  struct checkpointing calls = {.mode = o.plain != NULL ? "plain" : "scr",
                                .wanted = wants_checkpoint,
                                .write = checkpoint,
                                .exit_wanted = wants_exit};
  bool finished = work(&s, &o, &calls, since);
#ifndef HEAT2D_NO_SCR
  if (o.plain == NULL) {
    check_scr(SCR_Finalize(), "SCR_Finalize");
  }
#endif
  end_run(&s, finished);
  return 0;
}
