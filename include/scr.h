/* SPDX-License-Identifier: Apache-2.0
 *
 * scr.h: Stanchion for programs written for SCR, the Scalable Checkpoint/Restart
 * library. Source-compatible with the C interface of SCR 3.1; recompile, link
 * with -lscr, and start the job with `stanchion run`.
 *
 * Shape of a program
 *
 *     MPI_Init
 *     SCR_Config ...                          settings, if any
 *     SCR_Init
 *     while SCR_Have_restart says yes:
 *         SCR_Start_restart
 *         SCR_Route_file, open, read, close   for each file of this process
 *         SCR_Complete_restart                success: leave the loop
 *     for each step:
 *         SCR_Need_checkpoint says yes:
 *             SCR_Start_output
 *             SCR_Route_file, open, write, close
 *             SCR_Complete_output
 *             SCR_Should_exit says yes: leave the loop
 *     SCR_Finalize
 *     MPI_Finalize
 *
 * Collective calls are called by every process of the job, in the same order
 * and, unless said otherwise, with equal arguments; they return the same value
 * everywhere. They are synchronous, and they do not use the application's
 * communicators: nothing here needs MPI. SCR_Route_file and SCR_Get_version
 * are local. One thread at a time may be inside the library.
 *
 * Errors. Functions that return int return SCR_SUCCESS, or another value if
 * they failed; the reason goes to standard error, with dataset, rank and file.
 * The library never ends the process, neither on a failure of the system nor on
 * calls in the wrong order; where an output argument is not meaningful after a
 * failure, flags are 0 and names are empty. A null pointer where one is not
 * allowed is a failure.
 */
#ifndef SCR_H
#define SCR_H

#ifdef __cplusplus
extern "C" {
#endif

/* The version of SCR whose interface this is. SCR_Get_version tells which
 * library is behind it. */
#define SCR_MAJOR_VERSION "3"
#define SCR_MINOR_VERSION "1"
#define SCR_PATCH_VERSION "0"
#define SCR_VERSION "v3.1.0"

/* Results. Compare with SCR_SUCCESS: failures may have other values than 1. */
#define SCR_SUCCESS (0)
#define SCR_FAILURE (1)

/* Bytes, including the terminating zero, of the longest name or path. Buffers
 * that receive one must be at least this large. */
#define SCR_MAX_FILENAME 1024

/* What a dataset is for; combined with |. */
#define SCR_FLAG_NONE (0 << 0)
/* The application can restart from it. */
#define SCR_FLAG_CHECKPOINT (1 << 0)
/* It is a result: it always goes to the prefix directory. */
#define SCR_FLAG_OUTPUT (1 << 1)

/* ---- start and end ------------------------------------------------------ */

/* Joins the job and makes ready what there is to restart from. Collective; once
 * per process; in MPI programs after MPI_Init. Before it, only SCR_Config,
 * SCR_Configf and SCR_Get_version may be called. Fails if no agent can be
 * reached, or if another process failed to join. */
int SCR_Init(void);

/* Leaves the job, after what must persist has been handed over to be written.
 * Collective; once per process; in MPI programs before MPI_Finalize. Tells the
 * launcher that the application came to its end and is not to be started again.
 * Afterwards only SCR_Get_version may be called. */
int SCR_Finalize(void);

/* Name and version of the library in use. The string is constant, belongs to
 * the library, and must not be freed. Local; at any time. */
char* SCR_Get_version(void);

/* ---- settings ----------------------------------------------------------- */

/* Sets, unsets or asks for one setting, in the notation of SCR's configuration
 * files. Collective.
 *
 *   "SCR_CACHE_SIZE=3"                 sets
 *   "SCR_CACHE_SIZE"                   asks
 *   "SCR_CACHE_SIZE="                  takes back what such a call has set; the
 *                                      environment and files have their say again
 *   "CKPT=0 TYPE=XOR SET_SIZE=4"       sets members of the entry 0 of CKPT
 *   "CKPT=0 TYPE"                      asks for one member
 *
 * A value extends to the next space; double quotes protect spaces in it, and it
 * may contain further equals signs. Of several such calls the last one holds; the
 * environment goes before them all, the configuration file comes after them.
 *
 * Settings are made before SCR_Init, which applies them and fails if one is
 * malformed. Later only those can change that docs/config.md calls live, with
 * the next collective call; another attempt changes nothing. What is fixed when
 * the job is launched cannot be set here: SCR_Init fails if SCR_PREFIX, SCR_FETCH
 * or SCR_CURRENT ask for another value than the job has, and ignores the others.
 * Asking is possible before and after SCR_Init.
 *
 * Returns for a question the value, in memory that the caller releases with
 * free(), or NULL if there is none. Returns NULL for everything else. */
const char* SCR_Config(const char* config);

/* SCR_Config with a text made from a format and its arguments as by printf. */
const char* SCR_Configf(const char* format, ...);

/* ---- files -------------------------------------------------------------- */

/* Tells under which path to open the file `name`, and makes it part of the
 * dataset that is being written. Local: each process calls it for each of its
 * own files, any number of times.
 *
 * `name` is where the file belongs, absolute or relative to the working
 * directory; it must lie below the prefix directory and be shorter than
 * SCR_MAX_FILENAME. `file` has room for SCR_MAX_FILENAME bytes and receives the
 * path to use now, whose directories exist. That path holds until the matching
 * Complete; the file must be closed by then.
 *
 * While writing: registers the file. Files with the same last component in
 * different directories are different files. Two processes must not register
 * the same file. Fails for a path outside the prefix.
 * While restarting: fails if this process has no such file in the dataset. A
 * name without any directory finds the file by its last component, if only one
 * file of the process has it.
 * Otherwise: copies `name` as it is. */
int SCR_Route_file(const char* name, char* file);

/* ---- restart ------------------------------------------------------------ */

/* Is there a dataset to restart from? Sets *flag to 1 if so, else to 0.
 * Collective. `name`, if not NULL, has room for SCR_MAX_FILENAME bytes and
 * receives the name that the dataset was given when it was written. Possible
 * outside of Start/Complete pairs. */
int SCR_Have_restart(int* flag, char* name);

/* Begins to read the dataset that SCR_Have_restart announced. Collective, also
 * for processes that read nothing. `name` as above. Fails if there is none. */
int SCR_Start_restart(char* name);

/* Ends the reading. Collective; `valid` is each process's own: 1 if it read all
 * of its files well, or had none to read; 0 otherwise. Succeeds if all
 * processes said 1. If one did not, all get a failure, the dataset is not
 * offered again, and SCR_Have_restart tells of the one before it, if any. */
int SCR_Complete_restart(int valid);

/* ---- writing ------------------------------------------------------------ */

/* Would this be a good time for a checkpoint? Sets *flag to 1 if so, else to 0,
 * by the job's policy (see the settings SCR_CHECKPOINT_INTERVAL,
 * SCR_CHECKPOINT_SECONDS and SCR_CHECKPOINT_OVERHEAD) or because the job is
 * about to be halted. Collective. The answer is advice: a checkpoint may be
 * written without it. */
int SCR_Need_checkpoint(int* flag);

/* Begins a dataset. Collective, also for processes that write nothing into it.
 * `name` is what users will see, shorter than SCR_MAX_FILENAME; NULL leaves the
 * choice to the library. `flags` is a combination of the SCR_FLAG_ values. A
 * dataset that is only a checkpoint may be dropped when newer ones are safe; one
 * that is output goes to the prefix directory whatever happens later. */
int SCR_Start_output(const char* name, int flags);

/* Ends the dataset begun last. Collective; `valid` is each process's own: 1 if
 * it wrote and closed all of its files without error, or had none to write; 0
 * otherwise. Succeeds if all processes said 1 and all their files are there;
 * otherwise all get a failure, and the dataset is dropped everywhere. */
int SCR_Complete_output(int valid);

/* SCR_Start_output with a name of the library's choice and SCR_FLAG_CHECKPOINT. */
int SCR_Start_checkpoint(void);

/* SCR_Complete_output. */
int SCR_Complete_checkpoint(int valid);

/* Should the application stop? Sets *flag to 1 if so, else to 0: somebody asked
 * for a halt, or the allocation ends soon. Collective. Best asked after each
 * checkpoint; then leave the main loop and call SCR_Finalize. */
int SCR_Should_exit(int* flag);

/* ---- datasets that exist already ---------------------------------------- */

/* Makes the dataset `name` the one to restart from, and forgets those that came
 * after it. Collective. Called before SCR_Have_restart by an application that
 * wants an older one, or after a restart by own means, so that numbers go on
 * from there. Fails if there is no such dataset. */
int SCR_Current(const char* name);

/* Removes the dataset `name` from the index and leaves its files where they
 * are. Collective. */
int SCR_Drop(const char* name);

/* Removes the dataset `name` and its files, in the cache and in the prefix
 * directory, and directories which that empties. Collective. */
int SCR_Delete(const char* name);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SCR_H */
