/* SPDX-License-Identifier: Apache-2.0
 *
 * What heat2d.c and heat2d_regions.c share: options, the state and its steps, the
 * result file, timings. How the state gets into a checkpoint and back is what the
 * two differ in, and is not here.
 */
#ifndef EXAMPLES_HEAT2D_CORE_H
#define EXAMPLES_HEAT2D_CORE_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A dataset's name is short; with it a path still fits SCR_MAX_FILENAME. */
#define NAME_SIZE 32

struct options {
  long nx, ny, steps, every, ckpt_mb, step_ms;
  long die_at, die_rank;
  const char *out, *plain, *timing, *mode;
};

struct state {
  int64_t nx, ny;
  int64_t y0, rows; /* this rank's rows, without halos */
  int64_t step;
  double *field;    /* rows + 2 rows: halo, own, halo */
  double *next;     /* the same for the next step; both keep the edges of the plate */
  double *history;
  int64_t history_len, history_next; /* in numbers */
};

/* All members have 8 bytes: the layout has no holes. */
struct ckpt_header {
  char magic[8];
  uint64_t byte_order;
  int64_t step, nx, ny, y0, rows, rank, ranks;
  int64_t history_len, history_next;
  uint64_t digest; /* of field and history */
};

/* Seconds of one checkpoint: of this rank, later the maxima over all ranks. */
struct timing {
  int64_t step;
  double blocked, start, write, complete, digest;
};

/* What a program does its own way. All of it is called by every rank. */
struct checkpointing {
  const char *mode; /* for --timing */
  bool (*wanted)(const struct options *o);
  void (*write)(struct state *s, const struct options *o);
  bool (*exit_wanted)(const struct options *o);
};

extern int g_rank, g_ranks;
/* Set by the program if it restarted. */
extern int64_t g_restart_step; /* -1: it did not */
extern double g_restart_seconds;

/* ---- small things -------------------------------------------------------- */

/* Says what is wrong on standard error and ends all ranks. */
__attribute__((format(printf, 1, 2), noreturn)) void die(const char *format, ...);

/* Progress, from rank 0 only, line by line: demos and tests read it. */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);

void check_mpi(int rc, const char *what);

/* True on all ranks if it is on all of them. */
bool all_ranks(bool mine);

bool write_all(int fd, const void *data, size_t size);

/* Complains about a file or dataset, and is false: its rank then votes against it. */
bool bad_file(const char *path, const char *why);

/* ---- the state ----------------------------------------------------------- */

void state_init(struct state *s, const struct options *o);

/* Back to step 0. */
void state_reset(struct state *s);

/* This rank's rows in the current field. A step moves them. */
double *own_rows(const struct state *s);

/* ---- checkpoints --------------------------------------------------------- */

void dataset_name(char name[NAME_SIZE], int64_t step);

/* The step of a dataset of this name, or -1 if heat2d gives no such name. */
int64_t dataset_step(const char *name);

struct ckpt_header make_header(const struct state *s);

/* Everything but what the checkpoint alone can tell: step, ring position, digest.
 * Complains about `what` if it does not fit. */
bool header_fits(const char *what, const struct ckpt_header *h, const struct state *s);

/* Takes over what the header tells of a state whose numbers have been read, and
 * compares the digest. */
bool take_header(const char *what, const struct ckpt_header *h, struct state *s);

/* Keeps the maxima over all ranks and tells of the checkpoint. */
void keep_timing(const struct timing *mine);

/* ---- the program --------------------------------------------------------- */

/* Starts MPI; before anything else. `program` is the name in all messages. */
void begin_run(const char *program, int *argc, char ***argv);

struct options parse(int argc, char **argv, const char *usage);

/* All steps that are left, then result and timings. False if the run was asked to
 * stop before its last step. `since` is when it all began. */
bool work(struct state *s, const struct options *o, const struct checkpointing *c, double since);

void end_run(struct state *s, bool finished);

#endif /* EXAMPLES_HEAT2D_CORE_H */
