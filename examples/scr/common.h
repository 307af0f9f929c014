/* SPDX-License-Identifier: Apache-2.0
 *
 * What the test programs share: options, files with known contents, and
 * the restart. No MPI in here: serial.c uses it too.
 *
 * Every file holds a header that says what it is and a pattern that follows from
 * the header, so that each byte of it can be checked by whoever reads it.
 */
#ifndef EXAMPLES_SCR_COMMON_H
#define EXAMPLES_SCR_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "scr.h"

/* Where a rank kills itself, if asked to. */
enum die_in { DIE_STEP, DIE_START, DIE_WRITE, DIE_DONE };

struct options {
  const char *program; /* name in messages, and start of dataset names */
  const char *name;    /* datasets are called NAME.SSSSSS */
  long steps, size, files, seed, sleep_ms;
  long rank_without_files;
  long die_at, die_rank;
  enum die_in die_in;
  long expect_restart; /* step; 0: none; -1: any or none */
  long expect_seed;    /* seed of the files restarted from; -1: any */
  bool always;         /* do not ask SCR_Need_checkpoint */
};

/* What the contents of a file follow from. */
struct identity {
  int64_t seed, step, rank, part, size;
};

/* Options that a program has beside the common ones: "--NAME VALUE" is stored as
 * a number in *value, or with a null value pointer as text in *text. */
struct extra_option {
  const char *name;
  long *value;
  const char **text;
};

/* Every message names the rank; set before anything else. */
void set_rank(const char *program, int rank);

/* Says what is wrong on standard error and ends this process at once, without
 * MPI_Finalize: the launcher then ends the others. */
__attribute__((format(printf, 1, 2), noreturn)) void fail(const char *format, ...);

/* A line on standard output, from rank 0 only. */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);

/* Ends the process unless rc is SCR_SUCCESS. */
void must(int rc, const char *call);

/* Ends the process unless the condition holds. */
#define EXPECT(condition, ...)          \
  do {                                  \
    if (!(condition)) fail(__VA_ARGS__); \
  } while (0)

struct options parse_options(int argc, char **argv, const char *name,
                             const struct extra_option *extra);

void pause_ms(long ms);

/* Kills this process if the options say so for this step and place. Only runs
 * that did not restart do it, so that one command line serves the first run and
 * the ones after it. */
void die_if_asked(const struct options *o, long step, enum die_in place, bool restarted);

/* NAME.SSSSSS, and back: -1 if it is no such name. */
void dataset_name(char out[SCR_MAX_FILENAME], const struct options *o, long step);
long dataset_step(const struct options *o, const char *name);

/* PREFIX/DATASET/part_P/rank_RRRRRR.dat, PREFIX being SCR_PREFIX or nothing. */
void file_path(char out[SCR_MAX_FILENAME], const char *dataset, long part);

struct identity identify(const struct options *o, long step, long part);

/* Writes a file as `id` says. If half is true, stops in the middle. False, with a
 * message, if the system does not let us. */
bool write_pattern(const char *path, const struct identity *id, bool half);

/* Reads a file back, to the last byte. Fields of `id` that are -1 are taken from
 * the file's header and filled in. False, with a message, at a deviation. */
bool check_pattern(const char *path, struct identity *id);

/* All files of this rank in the dataset: route and write, or route and check.
 * step -1 takes the step from the files; *found receives it. */
bool write_files(const struct options *o, const char *dataset, long step, bool restarted);
bool check_files(const struct options *o, const char *dataset, long step, long *found);

/* One dataset from Start to Complete; ends the process on an error. */
void write_dataset(const struct options *o, const char *name, const char *dataset, long step,
                   int flags, bool restarted);

/* Restarts from what is on offer. Returns its step, 0 if there is nothing. Ends
 * the process if that is not what the options expect, or if a file is not as it
 * was written: no damaged dataset may be offered. test_restart_reject.c has the
 * loop of an application that refuses datasets. */
long restart(const struct options *o);

/* Compares with --expect-restart. */
void expect_restart(const struct options *o, long step);

#endif
