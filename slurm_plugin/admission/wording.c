/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/wording.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

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

void sluice_notice(struct sluice_admission *admission, const char *text)
{
    size_t length = strlen(admission->message);
    snprintf(admission->message + length, SLUICE_REFUSAL_MAX - length, "%s%s", length ? "; " : "", text);
}

const char *sluice_duration(uint64_t minutes, char text[SLUICE_DURATION_MAX])
{
    if (minutes >= 1440)
        snprintf(text, SLUICE_DURATION_MAX, "%" PRIu64 "-%02u:%02u:00", minutes / 1440, (unsigned)(minutes / 60 % 24),
                 (unsigned)(minutes % 60));
    else
        snprintf(text, SLUICE_DURATION_MAX, "%02u:%02u:00", (unsigned)(minutes / 60), (unsigned)(minutes % 60));
    return text;
}

const char *sluice_stamp(int64_t seconds, char text[SLUICE_STAMP_MAX])
{
    time_t when = (time_t)seconds;
    struct tm parts;
    if (!localtime_r(&when, &parts) || !strftime(text, SLUICE_STAMP_MAX, "%Y-%m-%dT%H:%M:%S", &parts))
        snprintf(text, SLUICE_STAMP_MAX, "%" PRId64, seconds);
    return text;
}
