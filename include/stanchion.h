/* SPDX-License-Identifier: Apache-2.0
 *
 * stanchion.h: the native C interface of Stanchion, checkpoint/restart for
 * parallel jobs. C11 or C++17; link with -lstanchion; start the job with
 * `stanchion run`.
 *
 * Shape of a program
 *
 *     stn_ctx *ctx;
 *     stn_init(NULL, &ctx);
 *     stn_have_restart(ctx, &have, name, sizeof name, &no);
 *     if (have) {
 *       stn_start_restart(ctx, name, sizeof name, &no);
 *       stn_route(ctx, file, strlen(file), path, sizeof path);   open, read, close
 *       stn_complete_restart(ctx, good);
 *     }
 *     for each step:
 *       stn_need_checkpoint(ctx, &need);
 *       if (need) {
 *         stn_begin(ctx, name, strlen(name), STN_FLAG_CHECKPOINT, &no);
 *         stn_route(ctx, file, strlen(file), path, sizeof path); open, write, close
 *         stn_complete(ctx, good);
 *         stn_wait(ctx, no, STN_LEVEL_PROTECTED, 60000);         if you must know
 *       }
 *     stn_finalize(ctx);
 *     stn_free(ctx);
 *
 * The same with memory instead of files
 *
 *     stn_protect(ctx, 1, grid, grid_bytes);
 *     if (have) stn_restore(ctx, name, sizeof name, &no);
 *     if (need) stn_checkpoint(ctx, name, strlen(name), STN_FLAG_CHECKPOINT, &no);
 *
 * The same with streams, for a program that writes its state piece by piece
 *
 *     stn_open(ctx, file, strlen(file), STN_WRITE, &stream);      after stn_begin
 *     stn_write(ctx, stream, piece, piece_bytes);                 as often as needed
 *     stn_close(ctx, stream);                                     before stn_complete
 *
 * Ranks. A context is one rank's connection to its node's agent. Nothing here
 * needs MPI, and any subset of a job's processes can be the ranks.
 *
 * Collective calls are made by every rank, in the same order and with the same
 * arguments unless said otherwise; they return the same result everywhere. All
 * other calls are local.
 *
 * Results. Functions that return int return STN_OK or one of STN_ERR_...;
 * stn_error_text has the sentence for people. The library never prints, aborts
 * or raises a signal. Every wait has a deadline; after a lost answer
 * (STN_ERR_TIMEOUT of any call but stn_wait and the collective's own deadline,
 * STN_ERR_AGENT, STN_ERR_PROTOCOL) the context is dead and all its calls fail.
 *
 * Texts go in with their length in bytes and need no terminating zero; NULL
 * with length 0 is the empty text. Texts come out with a terminating zero, into
 * a buffer whose size in bytes is given. Names and paths are UTF-8.
 *
 * Threads. A context may be used by several threads; calls on it take turns.
 * Processes. A child of fork() that uses its parent's context gets
 * STN_ERR_STATE.
 *
 * Disabled (STANCHION_ENABLE=0): calls pass through. stn_route gives the file's
 * place in the prefix and makes its directories, streams are files there,
 * which can also be read while no dataset is open, there is never a restart,
 * stn_need_checkpoint follows STANCHION_CHECKPOINT_INTERVAL only; stn_wait fails
 * with STN_ERR_LEVEL, and stn_barrier with STN_ERR_STATE.
 */
#ifndef STANCHION_H
#define STANCHION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- results ------------------------------------------------------------ */

#define STN_OK (0)
#define STN_ERR_INVALID (-1)   /* an argument or setting is not allowed */
#define STN_ERR_STATE (-2)     /* the call does not fit what was called before */
#define STN_ERR_TIMEOUT (-3)   /* a deadline passed */
#define STN_ERR_AGENT (-4)     /* the agent cannot be reached or is gone */
#define STN_ERR_MISMATCH (-5)  /* ranks disagree */
#define STN_ERR_DROPPED (-6)   /* a rank's part is not valid: the dataset was dropped */
#define STN_ERR_REJECTED (-7)  /* a rank rejected the restart: an older dataset may be there */
#define STN_ERR_NOTFOUND (-8)  /* no such dataset, file or setting */
#define STN_ERR_RANKS (-9)     /* the dataset is of another number of ranks */
#define STN_ERR_LEVEL (-10)    /* the level cannot be reached */
#define STN_ERR_SPACE (-11)    /* no space left */
#define STN_ERR_IO (-12)       /* input or output failed */
#define STN_ERR_CLOSING (-13)  /* the job winds down */
#define STN_ERR_PROTOCOL (-14) /* the agent's answer makes no sense */
#define STN_ERR_INTERNAL (-15) /* a bug in Stanchion */

/* What a dataset is for; combined with |. */
#define STN_FLAG_CHECKPOINT (1u) /* the application can restart from it */
#define STN_FLAG_OUTPUT (2u)     /* a result: it always goes to the prefix */

/* How stn_checkpoint stores; combined with the flags above. */
#define STN_COW (1u << 16)         /* copy behind the caller (copy-on-write) */
#define STN_INCREMENTAL (1u << 17) /* copy only the pages that changed */

/* What stn_advise says of a region. */
#define STN_REGION_NO_IO (1u) /* only this program's own instructions write to it */

/* What a dataset survives. */
#define STN_LEVEL_CACHED (1)     /* the application's crash */
#define STN_LEVEL_PROTECTED (2)  /* losses of nodes within the redundancy scheme */
#define STN_LEVEL_PERSISTENT (4) /* everything but the loss of the prefix */

/* What a stream is opened for. */
#define STN_READ (1)
#define STN_WRITE (2)

/* A buffer of this size holds the name of every dataset. */
#define STN_NAME_SIZE (256)

/* ---- start and end ------------------------------------------------------ */

typedef struct stn_ctx stn_ctx;

/* Begin with STN_OPTIONS_INIT and set what is needed. */
typedef struct stn_options {
  uint32_t struct_size;  /* sizeof(stn_options) */
  uint32_t flags;        /* 0 */
  int64_t rank;          /* this rank; -1: from the launcher's environment */
  int64_t ranks;         /* number of ranks; -1: likewise */
  const char *nodes;     /* sockets of the agents, separated by ':'; NULL: STANCHION_NODES */
  size_t nodes_len;
  const char *settings;  /* lines "name = value"; the environment goes before them */
  size_t settings_len;
} stn_options;

#define STN_OPTIONS_INIT {(uint32_t)sizeof(stn_options), 0, -1, -1, NULL, 0, NULL, 0}

/* Joins the job; returns when all ranks have come. Collective. `options` may be
 * NULL: all from the environment. *ctx is set even if this fails, to a context
 * that knows only the error's text; it is given to stn_free in any case. */
int stn_init(const stn_options *options, stn_ctx **ctx);

/* Leaves the job, after what must persist has been handed over. Collective. */
int stn_finalize(stn_ctx *ctx);

/* Releases the context; without stn_finalize before it, the rank is missed by
 * the others. NULL is allowed. */
void stn_free(stn_ctx *ctx);

/* The text of the last error of this context, cut to the buffer; returns its
 * whole length. `buf` may be NULL with `buf_len` 0. */
size_t stn_error_text(stn_ctx *ctx, char *buf, size_t buf_len);

/* The version of the library, "1.2.3". At any time. */
const char *stn_version(void);

/* ---- settings ----------------------------------------------------------- */

/* Changes a setting that may change while the job runs (docs/config.md: live).
 * All ranks set the same before their next collective call, with which it
 * counts. An empty value takes the setting back. */
int stn_config_set(stn_ctx *ctx, const char *name, size_t name_len, const char *value,
                   size_t value_len);

/* The value of a setting now; empty if there is none. */
int stn_config_get(stn_ctx *ctx, const char *name, size_t name_len, char *buf, size_t buf_len);

/* ---- writing ------------------------------------------------------------ */

/* Would this be a good time for a checkpoint? *flag becomes 1 or 0. Collective. */
int stn_need_checkpoint(stn_ctx *ctx, int *flag);

/* Begins a dataset. An empty name leaves the choice to the agents. *no becomes
 * its number; `no` may be NULL. Collective. */
int stn_begin(stn_ctx *ctx, const char *name, size_t name_len, uint32_t flags, uint64_t *no);

/* Tells where to open a file. `path` is where it belongs, absolute or relative
 * to the working directory, below the prefix. Between stn_begin and
 * stn_complete: makes it part of the dataset, and makes its directories.
 * Between stn_start_restart and stn_complete_restart: STN_ERR_NOTFOUND if this
 * rank has no such file; a name without a directory finds the only file of that
 * name. Otherwise: copies `path`. If the buffer is too small, nothing was done. */
int stn_route(stn_ctx *ctx, const char *path, size_t path_len, char *buf, size_t buf_len);

/* Ends the dataset. `valid` is each rank's own: not 0 if it wrote and closed all
 * of its files, or had none. One rank with 0, or one routed file missing, and
 * the dataset is dropped everywhere (STN_ERR_DROPPED). Collective. */
int stn_complete(stn_ctx *ctx, int valid);

/* Waits until a dataset has reached a level, or one that survives as much. */
int stn_wait(stn_ctx *ctx, uint64_t dataset_no, int level, uint64_t timeout_ms);

/* ---- restart ------------------------------------------------------------ */

/* Is there a dataset to restart from? *flag becomes 1 or 0; name and number are
 * told, if asked for (`name`, of at least STN_NAME_SIZE bytes, and `no` may be
 * NULL). Collective. */
int stn_have_restart(stn_ctx *ctx, int *flag, char *name, size_t name_size, uint64_t *no);

/* Begins to read it. Collective. */
int stn_start_restart(stn_ctx *ctx, char *name, size_t name_size, uint64_t *no);

/* Ends the reading; `valid` is each rank's own. One rank with 0, and all get
 * STN_ERR_REJECTED; then stn_have_restart tells of the dataset before it. */
int stn_complete_restart(stn_ctx *ctx, int valid);

/* ---- regions of memory -------------------------------------------------- */

/* Makes `bytes` bytes at `start` this rank's region `region_id`, until
 * stn_unprotect or stn_free; a region that is protected again has the new place
 * and size from then on. Nothing is read or written before stn_checkpoint or
 * stn_restore is called; the memory must be there then. Ids are the caller's;
 * ranks may have different ones. `start` may be NULL with 0 bytes. Local. */
int stn_protect(stn_ctx *ctx, uint64_t region_id, void *start, size_t bytes);

/* Forgets the region; STN_ERR_NOTFOUND if there is none. Waits until no thread of
 * the library copies any more, as does stn_protect with a new place or size:
 * afterwards the memory may be freed. Local. */
int stn_unprotect(stn_ctx *ctx, uint64_t region_id);

/* Says something about a region: bits of STN_REGION_..., until the next stn_advise or
 * stn_unprotect. STN_REGION_NO_IO: from a stn_checkpoint with STN_COW on, until that
 * dataset is complete, nothing but instructions of this process writes to it: no
 * system call (read, recv, MPI), no signal handler's stack, no other process, no
 * device. STN_ERR_NOTFOUND if there is no such region. Local. */
int stn_advise(stn_ctx *ctx, uint64_t region_id, uint32_t advice);

/* By what the last checkpoint with STN_COW of this rank was copied: a text that begins
 * with "userfaultfd", "userfaultfd, user mode only", "fork", "copied at once" or
 * "nothing to copy", and goes on with why it was not by something before that. Cut
 * to the buffer. Local. */
int stn_cow_text(stn_ctx *ctx, char *buf, size_t buf_len);

/* A dataset of all regions of all ranks: begins it, copies the regions, completes
 * it. When it returns, the memory may be changed. Names, flags and results as in
 * stn_begin and stn_complete. Disabled: does nothing.
 *
 * With STN_INCREMENTAL only pages that changed since the last checkpoint with that
 * flag are copied; the first one, one after a restart or a dropped dataset, one of
 * which more than half changed, and one after incremental_max increments, or as many
 * as nearly add up to a full one, are full. Each can be restarted from like any other.
 * No other thread may write to the regions during the call; memory that a device
 * writes to behind the kernel's back (RDMA) needs incremental_tracking = hash.
 *
 * With STN_COW it returns when all ranks have called it: the memory is that of this
 * moment and may be changed; it is copied behind the caller. The dataset is complete,
 * and could be restarted from, only when all ranks' memory is copied:
 * stn_wait(ctx, no, STN_LEVEL_CACHED, ...) tells. If that fails on one rank, the
 * dataset is dropped, the one before stays, and that wait fails with STN_ERR_LEVEL.
 * The next begin and stn_finalize wait for it.
 *
 * With both, a full one is copied behind the caller, and what changed is copied before
 * the call returns ("copied at once: only what changed"). As with STN_COW alone the
 * dataset is complete only when all ranks' memory is copied, and ranks may differ in
 * which of both they do. If it is dropped, the next one is full. Where the kernel
 * tracks which pages change, a full one is copied by fork, or before the call returns
 * with cow = userfaultfd; with incremental_tracking = hash it can be userfaultfd too.
 *
 * With STN_COW there are two ways (setting `cow`; stn_cow_text tells which one it was,
 * and why):
 *
 * userfaultfd: pages are write-protected, and a thread of this process ("stn-cow",
 * all signals blocked, gone when all is copied and gathered) copies them; who writes to a page
 * that is not copied yet waits for its block (256 KiB, or a huge page), which comes
 * first. It ends with its process: what a dead rank had not copied is not stored.
 * Memory in huge pages is protected several times faster, and stays in them: behind the
 * first such checkpoint the thread gathers it in huge pages, where the system grants
 * them (MADV_COLLAPSE; setting region_huge_pages). A region that must not be wants
 * MADV_NOHUGEPAGE.
 *   Memory must stay mapped until it is copied: before it is given back, call
 * stn_unprotect, or stn_protect with the new place, which wait for that. Memory that
 * was unmapped, moved or dropped all the same (munmap, realloc, MADV_DONTNEED) is
 * noticed: the dataset is dropped, never stored torn, and the error's text names the
 * region. fork() is allowed: the child has the memory, unprotected, and waits for
 * nobody.
 *   Buffers of MPI may be in the regions where the kernel's writes are held up like
 * the program's (root, CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1, or access to
 * /dev/userfaultfd): read(), recv() and MPI's shared-memory transports wait as the
 * program does. A device does not: what it writes into memory that was registered
 * before is not seen. So where the process has pinned memory (VmPin in
 * /proc/self/status; RDMA drivers account for it) this way is not taken; registering
 * memory later counts as writing to it, and waits. Memory that others have mapped
 * (XPMEM) is not seen: use cow = fork or copy with that.
 *   As an ordinary user only the program's own instructions are held up, and a system
 * call that writes into a protected page would fail (EFAULT). So it is used only if
 * all regions are declared STN_REGION_NO_IO (stn_advise), which is a promise.
 *
 * fork: a child process copies. It is not reported to wait() or by SIGCHLD, and runs
 * no atfork handlers. A rank that dies meanwhile takes nothing with it that its child
 * has not copied yet, unless the job is restarted at once. While the child copies, a
 * first write to a page costs a copy of the page, and the process needs that much
 * more memory.
 *   Buffers that MPI sends from and receives into may be in the regions: pages are
 * this process's own, those that it changes are new ones. Memory that is registered
 * with hardware must keep its pages; drivers say so (MADV_DONTFORK, as libibverbs
 * does after ibv_fork_init). (Looked at when the regions or their mappings change;
 * memory on which MADV_DONTFORK is set later kills a child once, and MADV_WIPEONFORK
 * must not be set later: a child would find zeros.) Hardware that writes to memory
 * for which nobody said so is not seen: do not use STN_COW with that.
 *
 * In both, memory with MADV_DONTFORK, shared memory and huge pages of hugetlbfs, and
 * with userfaultfd private mappings of files, are copied before the call returns; so
 * is all, where nothing else can be had, and the job's log says why.
 *
 * All ranks give the same flags. Collective. */
int stn_checkpoint(stn_ctx *ctx, const char *name, size_t name_len, uint32_t flags, uint64_t *no);

/* The size that a region of this rank has in the dataset that is being read:
 * between stn_start_restart and its end, for regions whose sizes change. */
int stn_region_bytes(stn_ctx *ctx, uint64_t region_id, size_t *bytes);

/* Fills the regions from the dataset to restart from, and ends the restart. Begins
 * it, if stn_start_restart was not called. STN_ERR_NOTFOUND if there is none. A
 * rank whose protected regions are not those of the dataset, in number, ids and
 * sizes, rejects it (its error text says why): all get STN_ERR_REJECTED or that
 * rank's own error, regions may be filled in part, and the next call takes the
 * dataset before it. Collective. */
int stn_restore(stn_ctx *ctx, char *name, size_t name_size, uint64_t *no);

/* ---- streams ------------------------------------------------------------ */

/* A stream is a file of the dataset that is written or read through the library:
 * the bytes go into memory that the node's agent has, and are safe from there on
 * like those of all files. A context may have many streams open; each has a
 * position of its own, which begins at 0. All calls are local.
 *
 * Opens one. `path` is as in stn_route. STN_WRITE, between stn_begin and
 * stn_complete: a new file of the dataset; STN_ERR_INVALID if the dataset has
 * it already, by stn_open or stn_route. STN_READ, between stn_start_restart and
 * the end of the restart: a file of that dataset, also one that was written at
 * its routed place. (A file that was written as a stream is to be read as one:
 * there may be nothing at the place that stn_route tells.) *stream becomes a
 * number that this context never uses again. */
int stn_open(stn_ctx *ctx, const char *path, size_t path_len, int mode, uint64_t *stream);

/* Writes `bytes` bytes, any number, at the position and moves that behind them;
 * what was there is replaced. The memory may be changed when it returns. Many
 * small writes are cheap. May wait for room in the agent's memory (`pool_full`
 * and `pool_wait_ms` in docs/config.md): STN_ERR_SPACE, STN_ERR_TIMEOUT. After
 * a failure other than STN_ERR_INVALID no stream of the dataset can be written
 * any more, and stn_complete drops it. */
int stn_write(stn_ctx *ctx, uint64_t stream, const void *buf, size_t bytes);

/* Reads up to `bytes` bytes at the position and moves that behind them. *got
 * becomes their number: less than `bytes` only at the end of the file, 0 there. */
int stn_read(stn_ctx *ctx, uint64_t stream, void *buf, size_t bytes, size_t *got);

/* Moves the position. It may be beyond the end: what is never written before the
 * last byte that is, reads as zeros. */
int stn_seek(stn_ctx *ctx, uint64_t stream, uint64_t offset);

/* The size of the file: up to the last byte written so far, or as it is read. */
int stn_size(stn_ctx *ctx, uint64_t stream, uint64_t *bytes);

/* Ends the stream; its number is STN_ERR_INVALID from then on. A stream that was
 * written is part of the dataset only now: one that is open when stn_complete is
 * called makes that drop the dataset. Those that are read end with the restart. */
int stn_close(stn_ctx *ctx, uint64_t stream);

/* ---- the job ------------------------------------------------------------ */

/* Should the application end? *flag becomes 1 or 0. Collective. */
int stn_should_exit(stn_ctx *ctx, int *flag);

/* Returns when all ranks have called it. */
int stn_barrier(stn_ctx *ctx);

/* ---- datasets that exist already ---------------------------------------- */

/* Makes the dataset of this name the one to restart from, and forgets those
 * after it. Collective. */
int stn_current(stn_ctx *ctx, const char *name, size_t name_len);

/* Forgets the dataset; its files in the prefix stay. Collective. */
int stn_drop(stn_ctx *ctx, const char *name, size_t name_len);

/* Forgets the dataset and deletes its files. Collective. */
int stn_delete(stn_ctx *ctx, const char *name, size_t name_len);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* STANCHION_H */
