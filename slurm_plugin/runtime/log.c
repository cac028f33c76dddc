/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/log.h"

#include <stdarg.h>
#include <stdio.h>

/* Of libslurmfull; declared here as this file is also built without Slurm. */
__attribute__((weak, format(printf, 1, 2))) void slurm_error(const char *format, ...);
__attribute__((weak, format(printf, 1, 2))) void slurm_info(const char *format, ...);

enum { MOST = 2048 };

#define SAY(FUNCTION)                                                                                                  \
    do {                                                                                                               \
        char line[MOST];                                                                                               \
        va_list words;                                                                                                 \
        va_start(words, format);                                                                                       \
        vsnprintf(line, sizeof(line), format, words);                                                                  \
        va_end(words);                                                                                                 \
        if (FUNCTION)                                                                                                  \
            FUNCTION("%s", line);                                                                                      \
        else                                                                                                           \
            fprintf(stderr, "%s\n", line);                                                                             \
    } while (0)

void sluice_log_error(const char *format, ...)
{
    SAY(slurm_error);
}

void sluice_log_info(const char *format, ...)
{
    SAY(slurm_info);
}
