/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_CORE_ERROR_H
#define SLUICE_CORE_ERROR_H

#include "sluice/core.h"

/* Fills `text` (may be NULL) and returns `error`, so that a refusal is one line. */
enum sluice_error sluice_fail(struct sluice_error_text *text, enum sluice_error error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
