/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/wording.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

bool sluice_refuse(struct sluice_admission *admission, enum sluice_refusal refusal, const char *format, ...)
{
    va_list arguments;
    admission->refusal = refusal;
    va_start(arguments, format);
    vsnprintf(admission->message, sizeof admission->message, format, arguments);
    va_end(arguments);
    for (char *at = admission->message; *at; at++) /* what a user wrote goes to terminals and logs */
        *at = *at >= ' ' && *at <= '~' ? *at : '?';
    return false;
}

void sluice_gres_text(const struct sluice_slurm *slurm, const char *name, const char *type, uint64_t count, char *text,
                      size_t size)
{
    snprintf(text, size, "gres%c%s%s%s:%" PRIu64, slurm->slash ? '/' : ':', name, type[0] ? ":" : "", type, count);
}
