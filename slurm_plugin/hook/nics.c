/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "hook/nics.h"

#include "hook/picked.h"

#include "runtime/runtime.h"

#include "src/common/node_conf.h"

#include <stdatomic.h>
#include <stdlib.h>

static struct {
    struct sluice_listing_file file;
    struct sluice_nics *known;
    _Atomic uint64_t *pairs, *near; /* counters */
} nics;

void sluice_nics_start(void)
{
    sluice_listing_follow(&nics.file, sluice_settings_folder(), SLUICE_NICS_FILE);
    nics.pairs = sluice_status_counter("select.nic_pairs");
    nics.near = sluice_status_counter("select.nic_pairs_near");
    sluice_nics_read();
}

void sluice_nics_read(void)
{
    char *data;
    size_t length;
    struct sluice_nics *next = NULL;
    struct sluice_error_text text = {.text = ""};
    enum sluice_listing found = sluice_listing_look(&nics.file, &data, &length, &text);
    if (found == SLUICE_LISTING_SAME)
        return;
    if (data)
        (void)sluice_nics_parse(data, length, &next, &text);
    free(data);
    if (!next && found != SLUICE_LISTING_GONE) {
        sluice_log_error("select/sluice: %s: %s; NICs are chosen as before", nics.file.path, text.text);
        return;
    }
    sluice_nics_free(nics.known);
    nics.known = next;
}

void sluice_nics_stop(void)
{
    sluice_nics_free(nics.known);
    nics.known = NULL;
}

/* The job's NICs; NULL: it has none, or ones that are left to stock. */
static const gres_job_state_t *nics_of(const job_record_t *job)
{
    const gres_job_state_t *nic = nics.known ? sluice_gres_in(job->gres_list_req).nic : NULL;
    return nic && !(nic->type_name && *nic->type_name) && !gets_whole_nodes(job) ? nic : NULL;
}

/* What is near what on the node, and its free NICs; NULL: not known, or not of the NICs that Slurm has there. */
static const struct sluice_nic_groups *groups_of(uint32_t index, uint32_t *nics_free)
{
    const node_record_t *node = node_record_table_ptr[index];
    const gres_node_state_t *nic = node ? sluice_gres_in(node->gres_list).nic : NULL;
    const struct sluice_nic_groups *groups = nic ? sluice_nics_of(nics.known, node->name) : NULL;
    if (!groups || !nic->gres_bit_alloc || bit_size(nic->gres_bit_alloc) != (bitoff_t)groups->nic_count)
        return NULL;
    *nics_free = ~mask_of(nic->gres_bit_alloc) & (uint32_t)((UINT64_C(1) << groups->nic_count) - 1);
    return groups;
}

bool sluice_nics_pair(struct sluice_mirror *mirror, const job_record_t *job, struct sluice_part *part)
{
    const gres_job_state_t *nic = nics_of(job);
    uint32_t nics_free = 0, before = part->gpus;
    const struct sluice_nic_groups *groups =
        nic && nic->gres_per_node && nic->gres_per_node <= SLUICE_MAX_NICS ? groups_of(part->node, &nics_free) : NULL;
    struct sluice_nic_choice choice;
    return groups &&
           !sluice_choose_nics(sluice_mirror_cluster(mirror), groups, nics_free, (uint32_t)nic->gres_per_node, false,
                               part, &choice, NULL) &&
           part->gpus != before;
}

void sluice_nics_choose(struct sluice_mirror *mirror, const job_record_t *job, const struct sluice_part *part)
{
    const gres_job_state_t *nic = nics_of(job);
    bitstr_t *bits = picked(nic, part->node);
    uint32_t nics_free = 0;
    const struct sluice_nic_groups *groups = bits ? groups_of(part->node, &nics_free) : NULL;
    struct sluice_part own = *part;
    struct sluice_nic_choice choice;
    if (!groups || bit_size(bits) != (bitoff_t)groups->nic_count)
        return;
    uint32_t asked = (uint32_t)bit_set_count(bits);
    if (sluice_choose_nics(sluice_mirror_cluster(mirror), groups, nics_free, asked, true, &own, &choice, NULL))
        return;
    set_mask(bits, choice.nics);
    uint32_t gpus = (uint32_t)__builtin_popcount(own.gpus);
    atomic_fetch_add_explicit(nics.pairs, asked > gpus ? asked : gpus, memory_order_relaxed);
    atomic_fetch_add_explicit(nics.near, choice.pairs, memory_order_relaxed);
}
