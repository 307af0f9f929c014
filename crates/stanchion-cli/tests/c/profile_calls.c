/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes of known number and size, a scene for each argument: see tests/profile.rs, which knows the numbers.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what)                                                  \
  do {                                                               \
    if (!(what)) {                                                   \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what, strerror(errno)); \
      exit(99);                                                      \
    }                                                                \
  } while (0)

static char bytes[8 << 20];

static void writes(int fd, int n, size_t size)
{
  for (int i = 0; i < n; i++) {
    CHECK(write(fd, bytes, size) == (ssize_t)size);
  }
}

/* Every way to write to a descriptor. */
static void descriptors(void)
{
  umask(0);
  int fd = open("d.1", O_CREAT | O_RDWR | O_TRUNC, 0640);
  struct stat st;
  CHECK(fd >= 0 && fstat(fd, &st) == 0 && (st.st_mode & 07777) == 0640);
  errno = 77;
  writes(fd, 10, 100);
  CHECK(errno == 77);
  CHECK(pwrite(fd, bytes, 5000, 1000) == 5000); /* in order */
  CHECK(pwrite(fd, bytes, 5000, 0) == 5000);    /* a jump */
  struct iovec two[2] = {{bytes, 300}, {bytes, 724}};
  CHECK(writev(fd, two, 2) == 1024);            /* at 1000: a jump */
  CHECK(pwritev(fd, two, 2, 2024) == 1024);     /* in order */
  CHECK(lseek(fd, 3048, SEEK_SET) == 3048);
  writes(fd, 1, 70000);                         /* in order */
  int other = dup(fd);
  CHECK(other >= 0);
  writes(other, 2, 600000);
  CHECK(dprintf(other, "%s %d\n", "twelve bytes", 4) == 15);
  CHECK(fsync(fd) == 0 && fdatasync(fd) == 0);
  CHECK(close(other) == 0 && close(fd) == 0);
  CHECK(write(fd, bytes, 1) == -1 && errno == EBADF);
  CHECK(open("no/such/file", O_WRONLY) == -1 && errno == ENOENT);

  /* A second time, appending: never a jump. */
  fd = openat(AT_FDCWD, "./d.1", O_WRONLY | O_APPEND);
  CHECK(fd >= 0 && lseek(fd, 0, SEEK_SET) == 0);
  writes(fd, 2, 5 << 20);
  CHECK(close(fd) == 0 && rename("d.1", "d.2") == 0);

  /* Fails: the descriptor is there, the offset is not. */
  fd = creat("d.3", 0600);
  CHECK(fd >= 0 && pwrite(fd, bytes, 1, -1) == -1 && errno == EINVAL);
  CHECK(close(fd) == 0);

  /* None of these counts. */
  fd = open("d.2", O_RDONLY);
  CHECK(fd >= 0 && write(fd, bytes, 1) == -1 && errno == EBADF && close(fd) == 0);
  fd = open("/dev/null", O_WRONLY);
  CHECK(fd >= 0);
  writes(fd, 5, 50);
  CHECK(close(fd) == 0);
  int ends[2];
  CHECK(pipe(ends) == 0);
  writes(ends[1], 5, 50);
  CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
  fd = memfd_create("m", 0);
  CHECK(fd >= 0);
  writes(fd, 5, 50);
  CHECK(close(fd) == 0);
  writes(1, 1, 3);

  /* The number of a file that counted is a pipe's now. */
  CHECK(pipe(ends) == 0);
  writes(ends[1], 1, 9);
}

static void streams(void)
{
  FILE *f = fopen("s.1", "w");
  CHECK(f != NULL);
  for (int i = 0; i < 7; i++) {
    CHECK(fwrite(bytes, 20, 10, f) == 10);
  }
  memset(bytes, 'x', 3);
  CHECK(fputs("0123456789", f) >= 0 && fputc('x', f) == 'x');
  CHECK(fprintf(f, "%s %05d %.3f %c %d %d %d\n", "abc", 42, 1.5, 'z', 1, 2, 3) == 24);
  CHECK(fflush(f) == 0 && fsync(fileno(f)) == 0);
  CHECK(fseek(f, 0, SEEK_SET) == 0 && fwrite(bytes, 1, 3, f) == 3); /* a jump */
  CHECK(fclose(f) == 0);
  char *text = NULL;
  size_t length = 0;
  errno = 77;
  f = open_memstream(&text, &length);
  CHECK(f != NULL && fputs("memory", f) >= 0 && fclose(f) == 0 && length == 6 && errno == 77);
  free(text);
  printf("standard output does not count\n");
}

static void *thread(void *name)
{
  int fd = open(name, O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  writes(fd, 1000, 100);
  CHECK(close(fd) == 0);
  return NULL;
}

static int ends_of_pipe[2];

static void *blocked(void *unused)
{
  (void)unused;
  while (write(ends_of_pipe[1], bytes, 4096) == 4096) {
  }
  return NULL;
}

static void threads(void)
{
  pthread_t all[4];
  char names[4][16];
  for (int i = 0; i < 4; i++) {
    snprintf(names[i], sizeof names[i], "t.%d", i);
    CHECK(pthread_create(&all[i], NULL, thread, names[i]) == 0);
  }
  for (int i = 0; i < 4; i++) {
    CHECK(pthread_join(all[i], NULL) == 0);
  }
  /* A thread that is cancelled in write. */
  void *result;
  CHECK(pipe(ends_of_pipe) == 0 && pthread_create(&all[0], NULL, blocked, NULL) == 0);
  CHECK(pthread_cancel(all[0]) == 0 && pthread_join(all[0], &result) == 0);
  CHECK(result == PTHREAD_CANCELED);
}

/* The child writes to its parent's descriptor and to a file of its own, and leaves by _exit. */
static void forks(void)
{
  int fd = open("f.1", O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  writes(fd, 5, 100);
  pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    writes(fd, 11, 100);
    int own = open("f.2", O_CREAT | O_WRONLY, 0600);
    CHECK(own >= 0);
    writes(own, 2, 9000);
    _exit(0);
  }
  int status;
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  writes(fd, 6, 100);
  /* Children that write nothing, by fork and by vfork. */
  CHECK((pid = fork()) >= 0);
  if (pid == 0) {
    close(fd);
    _exit(0);
  }
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  CHECK((pid = vfork()) >= 0);
  if (pid == 0) {
    close(fd);
    execl("/bin/true", "true", (char *)NULL);
    _exit(1);
  }
  CHECK(waitpid(pid, &status, 0) == pid && status == 0);
  writes(fd, 1, 100);
  CHECK(system("echo redirected > f.3") == 0);
}

static void handler(int number)
{
  (void)number;
  int fd = open("k.2", O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  writes(fd, 1, 10);
  CHECK(close(fd) == 0);
}

static void killed(void)
{
  CHECK(signal(SIGUSR1, handler) != SIG_ERR && raise(SIGUSR1) == 0);
  int fd = open("k.1", O_CREAT | O_WRONLY, 0600);
  CHECK(fd >= 0);
  writes(fd, 3, 4096);
  raise(SIGKILL);
}

static void bursts(void)
{
  for (int i = 0; i < 3; i++) {
    char name[16];
    snprintf(name, sizeof name, "b.%d", i);
    int fd = open(name, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0);
    writes(fd, 2, 3 << 20);
    CHECK(close(fd) == 0);
    struct timespec computing = {1, 200000000};
    CHECK(i == 2 || nanosleep(&computing, NULL) == 0);
  }
}

static void maps(void)
{
  int fd = open("m.1", O_CREAT | O_RDWR, 0600);
  CHECK(fd >= 0);
  writes(fd, 1, 8192);
  char *at = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(at != MAP_FAILED && munmap(at, 8192) == 0);
  at = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
  CHECK(at != MAP_FAILED);
}

int main(int argc, char **argv)
{
  const char *scene = argc > 1 ? argv[1] : "";
  if (strcmp(scene, "descriptors") == 0) {
    descriptors();
  } else if (strcmp(scene, "streams") == 0) {
    streams();
  } else if (strcmp(scene, "threads") == 0) {
    threads();
  } else if (strcmp(scene, "forks") == 0) {
    forks();
  } else if (strcmp(scene, "killed") == 0) {
    killed();
  } else if (strcmp(scene, "bursts") == 0) {
    bursts();
  } else if (strcmp(scene, "maps") == 0) {
    maps();
  } else if (strcmp(scene, "exec") == 0) {
    writes(open("e.1", O_CREAT | O_WRONLY, 0600), 4, 100);
    execl(argv[0], argv[0], "maps", (char *)NULL);
    return 98;
  } else if (strcmp(scene, "leaves") == 0) {
    writes(open("l.1", O_CREAT | O_WRONLY, 0600), 1, 1);
    _exit(7);
  } else {
    return 97;
  }
  return 0;
}
