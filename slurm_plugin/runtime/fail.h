/* SPDX-License-Identifier: GPL-2.0-or-later */
/* An error code with its words, as the core's functions give them. */
#ifndef SLUICE_RUNTIME_FAIL_H
#define SLUICE_RUNTIME_FAIL_H

#include <stdarg.h>
#include <stdio.h>

#include "sluice/core.h"

/* `error`, with `text` (or NULL) set. */
__attribute__((format(printf, 3, 4))) static inline enum sluice_error
sluice_fail_with(struct sluice_error_text *text, enum sluice_error error, const char *format, ...)
{
    if (text) {
        va_list values;
        va_start(values, format);
        vsnprintf(text->text, sizeof text->text, format, values);
        va_end(values);
    }
    return error;
}

#endif /* SLUICE_RUNTIME_FAIL_H */
