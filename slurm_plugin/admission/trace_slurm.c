/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/admission_slurm.h"

#include "rules/rules.h"

#include <string.h>

/* The value of a variable that spank_sluice passed; NULL: there is none. */
static const char *passed(const job_desc_msg_t *job, const char *name, size_t length)
{
    for (uint32_t i = 0; job->spank_job_env && i < job->spank_job_env_size; i++)
        if (job->spank_job_env[i] && strncmp(job->spank_job_env[i], name, length) == 0)
            return job->spank_job_env[i] + length;
    return NULL;
}

#define PASSED(job, name) passed(job, name "=", sizeof name)

void sluice_keep_trace(job_desc_msg_t *job, uint64_t took_ns)
{
    char parent[SLUICE_TRACE_SIZE], comment[SLUICE_TRACE_COMMENT_SIZE];
    if (job->admin_comment || !sluice_trace_parse(PASSED(job, SLUICE_TRACE_VARIABLE), parent))
        return;
    const uint64_t took_us = took_ns / 1000;
    const char *began = PASSED(job, SLUICE_TRACE_BEGAN);
    sluice_trace_comment(parent, sluice_wall_us() - (int64_t)took_us, took_us,
                         sluice_trace_is_time(began) ? began : NULL, comment);
    job->admin_comment = slurm_xstrdup(comment);
}
