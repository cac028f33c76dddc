/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "hook/recount.h"

#include "runtime/runtime.h"

#include "src/common/list.h"
#include "src/common/node_conf.h"
#if !SLUICE_SLURM_AT_LEAST(22, 6)
#include "src/slurmctld/gres_ctld.h"
#endif
#include "src/slurmctld/slurmctld.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LOOKS 64

static struct {
    int *waiting; /* nodes that have not registered yet, in no order */
    int count, next;
    bool outdated;        /* `waiting` is to be made again */
    bitstr_t *registered; /* since, and not counted by job; NULL: none */
    bool kept_out;        /* a job was kept from starting since a node registered last */
} recount;

/* Until its node registers, their number is not known. */
static int find_unknown(void *item, void *unknown)
{
    const gres_state_t *state = item;
    const gres_node_state_t *gres = state->gres_data;
    if (gres->gres_cnt_found == NO_VAL64)
        *(bool *)unknown = true;
    return 0;
}

static bool has_unknown(const node_record_t *node)
{
    bool unknown = false;
    list_for_each_ro(node->gres_list, find_unknown, &unknown);
    return unknown;
}

/* What is allocated of a type by entries of GPUs; false: no entry is of that type. */
static bool count_of_type(const gres_node_state_t *gres, uint16_t type, uint64_t *count)
{
    bool found = false;
    *count = 0;
    for (uint16_t t = 0; t < gres->topo_cnt; t++)
        if (gres->topo_type_name[t] && gres->topo_type_id[t] == gres->type_id[type]) {
            *count += gres->topo_gres_cnt_alloc[t];
            found = true;
        }
    return found;
}

static int recount_gres(void *item, void *corrected)
{
    const gres_state_t *state = item;
    gres_node_state_t *gres = state->gres_data;
    uint64_t count;
    if (gres->no_consume || !gres->topo_gres_cnt_alloc || !gres->topo_type_name || !gres->topo_type_id)
        return 0;
    for (uint16_t type = 0; gres->type_cnt_alloc && type < gres->type_cnt; type++)
        if (count_of_type(gres, type, &count) && gres->type_cnt_alloc[type] != count) {
            gres->type_cnt_alloc[type] = count;
            *(bool *)corrected = true;
        }
    return 0;
}

/* True when a node needs no more looks. */
static bool recounted(int index)
{
    bool corrected = false;
    const node_record_t *node = index < node_record_count ? node_record_table_ptr[index] : NULL;
    if (!node || !node->gres_list)
        return true;
    if (has_unknown(node))
        return false;
    list_for_each(node->gres_list, recount_gres, &corrected);
    if (corrected)
        atomic_fetch_add_explicit(sluice_status_counter("select.recounted"), 1, memory_order_relaxed);
    return true;
}

/* ---- by job: Slurm 22.05 alone needs it ---- */

#if SLUICE_SLURM_AT_LEAST(22, 6)

bool sluice_recount_jobs(void)
{
    return false;
}

static void registered(int index)
{
    (void)index;
}

void sluice_recount_keep_out(const job_record_t *job, bitstr_t *nodes)
{
    (void)job, (void)nodes;
}

void sluice_recount_registered(void)
{
}

#else

/* Enter a job's GRES in the records of the nodes in `nodes`, as select/cons_tres does when it starts. */
static int enter(void *item, void *nodes)
{
    job_record_t *job = item;
    const struct job_resources *resources = job->job_resrcs;
    if (!(IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) || !job->gres_list_alloc || !resources ||
        !resources->node_bitmap || !bit_overlap_any(resources->node_bitmap, nodes))
        return 0;
    bool whole = job->details && SLUICE_WHOLE_NODE(job->details);
    int offset = -1;
    for (int n = 0; n < bit_size(resources->node_bitmap); n++) {
        if (!bit_test(resources->node_bitmap, n))
            continue;
        offset++;
        if (!bit_test(nodes, n) || !resources->cpus[offset]) /* without processors: lost by a resize */
            continue;
        node_record_t *node = node_record_table_ptr[n];
        bitstr_t *cores = copy_job_resources_node(job->job_resrcs, (uint32_t)offset);
        /* Two calls, as an address taken would have to be there in users' commands, too, which load this plugin. */
        if (whole)
            gres_ctld_job_alloc_whole_node(job->gres_list_req, &job->gres_list_alloc, node->gres_list,
                                           (int)resources->nhosts, n, offset, job->job_id, node->name, cores, false);
        else
            gres_ctld_job_alloc(job->gres_list_req, &job->gres_list_alloc, node->gres_list, (int)resources->nhosts, n,
                                offset, job->job_id, node->name, cores, false);
        FREE_NULL_BITMAP(cores);
    }
    return 0;
}

bool sluice_recount_jobs(void)
{
    if (!recount.registered)
        return false;
    if (bit_size(recount.registered) == node_record_count) {
        for (int n = 0; n < node_record_count; n++)
            if (bit_test(recount.registered, n) && node_record_table_ptr[n])
                gres_node_state_dealloc_all(node_record_table_ptr[n]->gres_list);
        list_for_each(job_list, enter, recount.registered);
        for (int n = 0; n < node_record_count; n++)
            if (bit_test(recount.registered, n))
                (void)recounted(n);
    }
    FREE_NULL_BITMAP(recount.registered);
    return true;
}

static void registered(int index)
{
    if (!recount.registered)
        recount.registered = bit_alloc(node_record_count);
    if (index < bit_size(recount.registered))
        bit_set(recount.registered, index);
}

void sluice_recount_keep_out(const job_record_t *job, bitstr_t *nodes)
{
    if (!recount.count || !(job->gres_list_req || SLUICE_WHOLE_NODE(job->details)))
        return;
    for (int w = 0; w < recount.count; w++) {
        const node_record_t *node =
            recount.waiting[w] < node_record_count ? node_record_table_ptr[recount.waiting[w]] : NULL;
        if (node && node->gres_list && !IS_NODE_POWERED_DOWN(node) && bit_test(nodes, recount.waiting[w]) &&
            has_unknown(node)) {
            bit_clear(nodes, recount.waiting[w]);
            recount.kept_out = true;
            atomic_fetch_add_explicit(sluice_status_counter("select.unregistered"), 1, memory_order_relaxed);
        }
    }
}

void sluice_recount_registered(void)
{
    if (recount.kept_out)
        queue_job_scheduler();
    recount.kept_out = false;
}

#endif

static void list_nodes(void)
{
    free(recount.waiting);
    FREE_NULL_BITMAP(recount.registered);
    recount.count = recount.next = 0;
    recount.outdated = false;
    recount.waiting = node_record_count > 0 ? calloc((size_t)node_record_count, sizeof(*recount.waiting)) : NULL;
    for (int n = 0; recount.waiting && n < node_record_count; n++)
        recount.waiting[recount.count++] = n;
}

void sluice_recount_forget(void)
{
    recount.outdated = true;
}

void sluice_recount_apply(void)
{
    if ((!recount.outdated && !recount.count) || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return;
    if (recount.outdated)
        list_nodes();
    for (int looks = 0; looks < recount.count && looks < MOST_LOOKS;) {
        recount.next %= recount.count;
        if (recounted(recount.waiting[recount.next])) {
            registered(recount.waiting[recount.next]);
            recount.waiting[recount.next] = recount.waiting[--recount.count];
        } else {
            recount.next++;
            looks++;
        }
    }
}

bool sluice_recount_waits(void)
{
    return recount.count;
}

void sluice_recount_stop(void)
{
    free(recount.waiting);
    FREE_NULL_BITMAP(recount.registered);
    memset(&recount, 0, sizeof(recount));
}
