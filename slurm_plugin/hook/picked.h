/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The devices that stock picked for a job, as bit masks; for files of hook/ only. */
#ifndef SLUICE_HOOK_PICKED_H
#define SLUICE_HOOK_PICKED_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "src/common/bitstring.h"

#include <stdint.h>

/* The first 32 bits. */
static inline uint32_t mask_of(bitstr_t *bits)
{
    uint32_t mask = 0;
    for (bitoff_t i = 0; i < bit_size(bits) && i < 32; i++)
        mask |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    return mask;
}

static inline void set_mask(bitstr_t *bits, uint32_t mask)
{
    for (bitoff_t i = 0; i < bit_size(bits); i++) {
        if (i < 32 && (mask >> i & 1))
            bit_set(bits, i);
        else
            bit_clear(bits, i);
    }
}

/* What stock picked on a node, or NULL. */
static inline bitstr_t *picked(const gres_job_state_t *gres, uint32_t node)
{
    if (!gres || !gres->gres_bit_select || node >= gres->total_node_cnt)
        return NULL;
    return gres->gres_bit_select[node];
}

static inline bool gets_whole_nodes(const job_record_t *job)
{
    return job->details && SLUICE_WHOLE_NODE(job->details);
}

#endif
