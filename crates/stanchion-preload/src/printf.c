/* SPDX-License-Identifier: Apache-2.0
 *
 * The bodies of fprintf, dprintf and their checked variants. A symbol of a C object is not
 * exported from a Rust library, so the exported functions are jumps to these: see stdio.rs.
 * The functions that take a va_list are the library's own.
 */
#include <stdarg.h>

struct stanchion_file;

int vfprintf(struct stanchion_file *file, const char *format, va_list args);
int __vfprintf_chk(struct stanchion_file *file, int flag, const char *format, va_list args);
int vdprintf(int fd, const char *format, va_list args);
int __vdprintf_chk(int fd, int flag, const char *format, va_list args);

int stanchion_profile_fprintf(struct stanchion_file *file, const char *format, ...);
int stanchion_profile_fprintf_chk(struct stanchion_file *file, int flag, const char *format, ...);
int stanchion_profile_dprintf(int fd, const char *format, ...);
int stanchion_profile_dprintf_chk(int fd, int flag, const char *format, ...);

int stanchion_profile_fprintf(struct stanchion_file *file, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  int n = vfprintf(file, format, args);
  va_end(args);
  return n;
}

int stanchion_profile_fprintf_chk(struct stanchion_file *file, int flag, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  int n = __vfprintf_chk(file, flag, format, args);
  va_end(args);
  return n;
}

int stanchion_profile_dprintf(int fd, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  int n = vdprintf(fd, format, args);
  va_end(args);
  return n;
}

int stanchion_profile_dprintf_chk(int fd, int flag, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  int n = __vdprintf_chk(fd, flag, format, args);
  va_end(args);
  return n;
}
