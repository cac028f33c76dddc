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

static const struct sluice_nic_groups *known_of(const char *node)
{
    return sluice_nics_of(nics.known, node);
}

void sluice_nics_start(void)
{
    sluice_listing_follow(&nics.file, sluice_settings_folder(), SLUICE_NICS_FILE);
    nics.pairs = sluice_status_counter("select.nic_pairs");
    nics.near = sluice_status_counter("select.nic_pairs_near");
    sluice_nics_near(known_of);
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
        sluice_log_error("select/sluice: %s: %s; NICs are chosen as before; write it again: sluice gres write --nics",
                         nics.file.path, text.text);
        return;
    }
    sluice_nics_free(nics.known);
    nics.known = next;
    sluice_mirrors_outdated();
}

void sluice_nics_stop(void)
{
    sluice_nics_near(NULL);
    sluice_nics_free(nics.known);
    nics.known = NULL;
}

/* The job's NICs; NULL: it has none, or ones that are left to stock. */
static const gres_job_state_t *nics_of(const job_record_t *job)
{
    return gets_whole_nodes(job) ? NULL : sluice_gres_in(job->gres_list_req).nic;
}

/* A node's NICs: what is near what, and which of them the job may have now. */
struct offered {
    struct sluice_nic_groups groups;
    uint32_t free;
};

static uint8_t any_kind(void *argument, const char *type)
{
    (void)argument;
    (void)type;
    return 0;
}

/* False: the file does not know the node's, or knows others: stock picks those near the job's cores. */
static bool offered_to(struct sluice_mirror *mirror, const gres_job_state_t *job, uint32_t index,
                       struct offered *offered)
{
    const node_record_t *node = node_record_table_ptr[index];
    const gres_node_state_t *nic = node ? sluice_gres_in(node->gres_list).nic : NULL;
    const struct sluice_nic_groups *known = nic ? known_of(node->name) : NULL;
    struct sluice_node_view view;
    if (!known || sluice_node_read(sluice_mirror_cluster(mirror), index, &view, NULL) ||
        !sluice_nics_of_node(node, view.gpu_count, any_kind, NULL, &offered->groups) ||
        known->gpu_count != view.gpu_count || known->nic_count != offered->groups.nic_count)
        return false;
    uint32_t count = offered->groups.nic_count, type = job->type_name && *job->type_name ? job->type_id : 0;
    offered->free =
        ~sluice_nics_held(nic, count) & sluice_nics_of_type(nic, type) & (uint32_t)((UINT64_C(1) << count) - 1);
    return true;
}

bool sluice_nics_pair(struct sluice_mirror *mirror, const job_record_t *job, struct sluice_part *part)
{
    const gres_job_state_t *nic = nics_of(job);
    uint32_t before = part->gpus;
    struct offered offered;
    struct sluice_nic_choice choice;
    return !part->nics && nic && nic->gres_per_node && nic->gres_per_node <= SLUICE_MAX_NICS &&
           offered_to(mirror, nic, part->node, &offered) &&
           !sluice_choose_nics(sluice_mirror_cluster(mirror), &offered.groups, offered.free,
                               (uint32_t)nic->gres_per_node, false, part, &choice, NULL) &&
           part->gpus != before;
}

void sluice_nics_choose(struct sluice_mirror *mirror, const job_record_t *job, const struct sluice_part *part)
{
    const gres_job_state_t *nic = nics_of(job);
    bitstr_t *bits = picked(nic, part->node);
    struct offered offered;
    struct sluice_part own = *part;
    struct sluice_nic_choice choice = {.nics = part->nics};
    if (!bits || !offered_to(mirror, nic, part->node, &offered) || bit_size(bits) != (bitoff_t)offered.groups.nic_count)
        return;
    uint32_t asked = (uint32_t)bit_set_count(bits), gpus = (uint32_t)__builtin_popcount(part->gpus);
    if (gpus && sluice_choose_nics(sluice_mirror_cluster(mirror), &offered.groups, offered.free, asked, true, &own,
                                   &choice, NULL))
        return;
    if ((uint32_t)__builtin_popcount(part->nics) == asked && !(part->nics & ~offered.free))
        choice.nics = part->nics;
    if ((uint32_t)__builtin_popcount(choice.nics) != asked || (choice.nics & ~offered.free))
        return;
    set_mask(bits, choice.nics);
    if (!gpus)
        return;
    atomic_fetch_add_explicit(nics.pairs, asked > gpus ? asked : gpus, memory_order_relaxed);
    atomic_fetch_add_explicit(nics.near, choice.pairs, memory_order_relaxed);
}
