/* SPDX-License-Identifier: Apache-2.0
 *
 * The body of SCR_Configf. A symbol of a C object is not exported from a Rust
 * library, so the exported SCR_Configf is a jump to this one: see configf.rs.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const char *SCR_Config(const char *config);
/* Says that the arguments could not be formatted; returns NULL. Hidden: that makes it so
 * for the whole library, whose interface it is no part of. */
__attribute__((visibility("hidden"))) const char *stanchion_scr_configf_failed(void);
const char *stanchion_scr_configf(const char *format, ...);

enum { LONGEST = 1 << 20 };

const char *stanchion_scr_configf(const char *format, ...)
{
  va_list args;
  if (format == NULL) {
    return NULL;
  }
  va_start(args, format);
  int length = vsnprintf(NULL, 0, format, args);
  va_end(args);
  char *text = length >= 0 && length <= LONGEST ? malloc((size_t)length + 1) : NULL;
  if (text == NULL) {
    return stanchion_scr_configf_failed();
  }
  va_start(args, format);
  int written = vsnprintf(text, (size_t)length + 1, format, args);
  va_end(args);
  const char *value = written == length ? SCR_Config(text) : stanchion_scr_configf_failed();
  free(text);
  return value;
}
