/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/admission_slurm.h"

#include "rules/rules.h"

#include <string.h>

static const char *passed_trace(const job_desc_msg_t *job)
{
    static const char name[] = SLUICE_TRACE_VARIABLE "=";
    for (uint32_t i = 0; job->spank_job_env && i < job->spank_job_env_size; i++)
        if (job->spank_job_env[i] && strncmp(job->spank_job_env[i], name, sizeof name - 1) == 0)
            return job->spank_job_env[i] + sizeof name - 1;
    return NULL;
}

void sluice_keep_trace(job_desc_msg_t *job)
{
    char comment[sizeof SLUICE_TRACE_WORD + SLUICE_TRACE_SIZE] = SLUICE_TRACE_WORD;
    if (!job->admin_comment && sluice_trace_parse(passed_trace(job), comment + sizeof SLUICE_TRACE_WORD - 1))
        job->admin_comment = slurm_xstrdup(comment);
}
