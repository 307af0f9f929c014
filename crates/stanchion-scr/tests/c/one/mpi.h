/* SPDX-License-Identifier: Apache-2.0
 *
 * MPI for a job of one process: what the programs of examples/scr need, so that
 * they can be tested where no MPI is.
 */
#ifndef MPI_OF_ONE_H
#define MPI_OF_ONE_H
#include <string.h>

typedef int MPI_Comm;
typedef size_t MPI_Datatype; /* its size */
typedef int MPI_Op;
#define MPI_COMM_WORLD 0
#define MPI_INT sizeof(int)
#define MPI_LONG sizeof(long)
#define MPI_MIN 0
#define MPI_MAX 0

static inline int MPI_Init(int *argc, char ***argv)
{
  (void)argc, (void)argv;
  return 0;
}
static inline int MPI_Finalize(void)
{
  return 0;
}
static inline int MPI_Comm_rank(MPI_Comm comm, int *rank)
{
  (void)comm;
  *rank = 0;
  return 0;
}
static inline int MPI_Comm_size(MPI_Comm comm, int *size)
{
  (void)comm;
  *size = 1;
  return 0;
}
static inline int MPI_Barrier(MPI_Comm comm)
{
  (void)comm;
  return 0;
}
static inline int MPI_Allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op,
                                MPI_Comm comm)
{
  (void)op, (void)comm;
  memcpy(out, in, (size_t)count * type);
  return 0;
}
#endif
