/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What a job holds by its record, and which jobs are running. */
#include "mirror/mirror_internal.h"

#include "mirror/nics.h"
#include "mirror/request.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"

#include <stdlib.h>
#include <string.h>

/* The GRES of a job on its node number `n`. */
struct held_gres {
    uint32_t n;
    uint32_t gpus; /* held whole */
    uint32_t nics;
    int64_t shares[SLUICE_MAX_GPUS];
    bool mps; /* of GPUs that only the node's records name */
};

static int add_job_gres(void *item, void *argument)
{
    const gres_state_t *state = item;
    struct held_gres *held = argument;
    const gres_job_state_t *job = state->gres_data;
    if (!state->gres_name || !job || held->n >= job->node_cnt || !job->gres_bit_alloc || !job->gres_bit_alloc[held->n])
        return 0;
    bitstr_t *bits = job->gres_bit_alloc[held->n];
    bitoff_t size = bit_size(bits) < SLUICE_MAX_GPUS ? bit_size(bits) : SLUICE_MAX_GPUS;
    if (!strcmp(state->gres_name, "gpu")) {
        for (bitoff_t i = 0; i < size; i++)
            held->gpus |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    } else if (!strcmp(state->gres_name, "shard")) {
        const uint64_t *each = SLUICE_GRES_SHARES(job, held->n);
        uint64_t count = job->gres_cnt_node_alloc ? job->gres_cnt_node_alloc[held->n] : 0;
        int32_t gpus = bit_set_count(bits);
        for (bitoff_t i = 0; i < size; i++)
            if (bit_test(bits, i))
                held->shares[i] += (int64_t)(each ? each[i] : gpus ? count / (uint64_t)gpus : 0);
    } else if (!strcmp(state->gres_name, "mps")) {
        held->mps = true;
    } else if (!strcmp(state->gres_name, "nic")) {
        for (bitoff_t i = 0; i < bit_size(bits) && i < SLUICE_MAX_NICS; i++)
            held->nics |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    }
    return 0;
}

static int64_t job_cores(const struct sluice_mirror *mirror, const job_record_t *job, uint32_t node, int offset,
                         int cores)
{
    const job_resources_t *resources = job->job_resrcs;
    if (sluice_cores_oversubscribed(job))
        return sluice_cores_of(mirror->cores, node, job->job_id);
    if (resources->whole_node == 1)
        return cores;
    return resources->core_bitmap ? bit_set_count_range(resources->core_bitmap, offset, offset + cores) : 0;
}

/* Has the job given up its cores? A time-sliced job keeps them. */
static bool is_suspended(const job_record_t *job)
{
    return IS_JOB_SUSPENDED(job) && !job->priority;
}

/* Others may have got the cores of a job while it was suspended, so that it shares them now: Slurm lets that happen. */
static bool shares_cores(const job_record_t *job)
{
    return job->suspend_time != 0;
}

/*
 * Are its cores, or others', uncertain? After a restart or reconfiguration Slurm 22.05 assigns the cores of running
 * jobs again, in the order of its list: a job that had those of a suspended one, which runs again, finds them taken, is
 * entered nowhere, and all of its cores count as free.
 */
static bool meets_suspended(const struct sluice_mirror *mirror, const job_record_t *job)
{
    size_t words = 0;
    const uint64_t *nodes = mirror->suspended_once ? sluice_bitmap_words(job->job_resrcs->node_bitmap, &words) : NULL;
    for (size_t w = 0; w < words && w < mirror->words; w++)
        if (nodes[w] & mirror->suspended_once[w])
            return true;
    return false;
}

/* Changes when a job holds something else than before. */
static uint64_t signature_of(const job_record_t *job, bool suspended)
{
    uint64_t hash = mix(3, (uint64_t)job->start_time);
    hash = mix(hash, (uint64_t)job->resize_time);
    hash = mix(hash, suspended);
    return mix(hash, job->job_resrcs ? job->job_resrcs->nhosts : 0);
}

/*
 * No more than is free, so that a commit never fails of CPUs, memory and compute; and of a GPU no more than Slurm's
 * record of the node says is in use: where it gave a GPU out twice, the end of one job frees it while the other still
 * has it.
 */
static void fit_to_free(const struct sluice_mirror *mirror, struct sluice_part *part)
{
    struct sluice_node_view view;
    int64_t free_mib[SLUICE_MAX_GPUS];
    if (sluice_node_read(mirror->cluster, part->node, &view, NULL))
        return;
    if (part->cpus_milli > view.cpus_milli_free)
        part->cpus_milli = view.cpus_milli_free;
    if (part->host_memory_mib > view.host_memory_mib_free)
        part->host_memory_mib = view.host_memory_mib_free;
    if (!part->gpus && !part->nics)
        return;
    struct sluice_node_gres gres = sluice_gres_of_node(node_record_table_ptr[part->node]);
    part->nics &= view.nics_free & sluice_nics_held(gres.nic, view.nic_count);
    if (!part->gpus)
        return;
    sluice_mirror_free_by_slurm(&gres, &view, free_mib);
    for (uint32_t i = 0; i < SLUICE_MAX_GPUS; i++) {
        if (!(part->gpus >> i & 1))
            continue;
        int64_t asked = i >= view.gpu_count    ? INT64_MAX
                        : part->gpu_memory_mib ? part->gpu_memory_mib
                                               : view.gpu_memory_mib[i];
        if (i >= view.gpu_count || view.gpu_memory_mib_free[i] - free_mib[i] < asked)
            part->gpus &= ~(UINT32_C(1) << i);
    }
    for (unsigned set = part->gpus; set; set &= set - 1) {
        uint32_t unclaimed = view.gpu_compute_free[__builtin_ctz(set)];
        if (part->gpu_compute_percent > unclaimed)
            part->gpu_compute_percent = unclaimed;
    }
    if (!part->gpus)
        part->gpu_memory_mib = part->gpu_compute_percent = 0;
}

/* Write the parts of one group of what a job holds; groups differ in how much of a GPU they hold. Group 0 has the
 * CPUs, the memory and the whole GPUs. Returns how many parts there are; *again: further groups are needed; *clipped:
 * set where a part holds less compute than the job claims. */
static uint32_t parts_of_job(struct sluice_mirror *mirror, const job_record_t *job, bool sharing, uint32_t group,
                             bool *again, bool *clipped)
{
    const job_resources_t *resources = job->job_resrcs;
    uint32_t count = 0, n = 0, share = job->gres_list_alloc ? sluice_job_gpu_share(job) : 0;
    int offset = 0;
    *again = false;
    for (bitoff_t i = bit_ffs(resources->node_bitmap), last = bit_fls(resources->node_bitmap); i >= 0 && i <= last;
         i++) {
        if (!bit_test(resources->node_bitmap, i))
            continue;
        const node_record_t *node = (uint32_t)i < mirror->nodes ? node_record_table_ptr[i] : NULL;
        uint32_t number = n++;
        if (!node)
            continue;
        int cores = node->tot_cores, begin = offset;
        offset += cores;
        if (resources->cpus && !resources->cpus[number])
            continue; /* given back by a resize */
        struct held_gres held = {.n = number};
        if (job->gres_list_alloc)
            list_for_each_ro(job->gres_list_alloc, add_job_gres, &held);
        mirror->short_of |= held.mps;
        struct sluice_part part = {.node = (uint32_t)i};
        /* The distinct amounts of shares, in ascending order of GPU, are the groups behind the first. */
        uint32_t seen = 0;
        for (uint32_t gpu = 0; gpu < SLUICE_MAX_GPUS; gpu++) {
            bool first = held.shares[gpu] > 0;
            for (uint32_t before = 0; before < gpu && first; before++)
                first = held.shares[before] != held.shares[gpu];
            if (!first)
                continue;
            seen++;
            if (seen != group)
                continue;
            part.gpu_memory_mib = held.shares[gpu];
            for (uint32_t other = gpu; other < SLUICE_MAX_GPUS; other++)
                part.gpus |= (uint32_t)(held.shares[other] == held.shares[gpu]) << other;
        }
        *again = *again || seen > group;
        if (group == 0) {
            part.gpus = held.gpus;
            part.nics = held.nics;
            part.cpus_milli = sharing ? 0 : job_cores(mirror, job, part.node, begin, cores) * node->tpc * 1000;
            part.host_memory_mib = resources->memory_allocated ? (int64_t)resources->memory_allocated[number] : 0;
        } else if (!part.gpus) {
            continue;
        }
        uint32_t gpus = part.gpus;
        part.gpu_compute_percent = gpus ? share : 0;
        fit_to_free(mirror, &part);
        mirror->short_of |= part.gpus != gpus;
        *clipped |= part.gpus && part.gpu_compute_percent < share;
        mirror->parts[count++] = part;
    }
    return count;
}

static void note_given_back(struct sluice_mirror *mirror, const job_record_t *job)
{
    uint32_t count = 0;
    const struct sluice_part *parts = sluice_mirror_parts(mirror, job->job_id, &count);
    for (uint32_t i = 0; i < count; i++)
        if (!bit_test(job->job_resrcs->node_bitmap, parts[i].node))
            mirror->given_back[parts[i].node / 64] |= UINT64_C(1) << parts[i].node % 64;
}

void sluice_mirror_hold_job(struct sluice_mirror *mirror, const job_record_t *job, bool suspended)
{
    const struct entry *before = sluice_mirror_find_entry(mirror, job->job_id);
    bool shared = before && before->sharing; /* and does so until it ends */
    bool has_nodes = job->job_resrcs && job->job_resrcs->node_bitmap;
    if (has_nodes && job->resize_time)
        note_given_back(mirror, job);
    sluice_mirror_let_go(mirror, job->job_id);
    if (!has_nodes)
        return;
    struct entry *entry = sluice_mirror_add_entry(mirror, job->job_id);
    if (!entry)
        return;
    bool sharing = shared || suspended || shares_cores(job) || meets_suspended(mirror, job);
    mirror->sharing += sharing;
    entry->sharing = sharing;
    entry->pooled = !entry->sharing && sluice_cores_oversubscribed(job);
    mirror->reshare |= entry->pooled;
    bool clipped = false;
    entry->signature = signature_of(job, suspended);
    entry->seen = mirror->seen;
    bool again = true;
    for (uint32_t group = 0; again && group < MAX_GROUPS; group++) {
        uint32_t count = parts_of_job(mirror, job, sharing, group, &again, &clipped);
        sluice_mirror_hold(mirror, entry, mirror->parts, count);
    }
    entry->clipped = clipped;
    mirror->clipped += clipped;
    mirror->counts.jobs_held++;
}

/* ---- claims on compute ---- */

void sluice_mirror_hold_clipped(struct sluice_mirror *mirror)
{
    uint32_t count = 0, *jobs = mirror->clipped ? calloc(mirror->clipped, sizeof(*jobs)) : NULL;
    for (uint32_t i = 0; jobs && i < mirror->table_size; i++)
        if (mirror->table[i].job_id && mirror->table[i].clipped)
            jobs[count++] = mirror->table[i].job_id;
    for (uint32_t i = 0; i < count; i++) {
        const job_record_t *job = find_job_record(jobs[i]);
        if (job)
            sluice_mirror_hold_job(mirror, job, is_suspended(job));
    }
    free(jobs);
}

struct claims {
    const struct sluice_mirror *mirror;
    uint32_t (*by_gpu)[SLUICE_MAX_GPUS];
};

static int add_claims(void *item, void *argument)
{
    const struct claims *claims = argument;
    const job_record_t *job = item;
    uint32_t share = 0, n = 0;
    if ((IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->job_resrcs && job->job_resrcs->node_bitmap &&
        job->gres_list_alloc)
        share = sluice_job_gpu_share(job);
    for (bitoff_t node = 0; share && node < (bitoff_t)claims->mirror->nodes; node++) {
        if (!bit_test(job->job_resrcs->node_bitmap, node))
            continue;
        struct held_gres held = {.n = n++};
        if (job->job_resrcs->cpus && !job->job_resrcs->cpus[held.n])
            continue; /* given back by a resize */
        list_for_each_ro(job->gres_list_alloc, add_job_gres, &held);
        for (uint32_t gpu = 0; gpu < SLUICE_MAX_GPUS; gpu++)
            claims->by_gpu[node][gpu] += held.gpus >> gpu & 1 || held.shares[gpu] > 0 ? share : 0;
    }
    return 0;
}

void sluice_mirror_add_claims(const struct sluice_mirror *mirror, uint32_t (*claims)[SLUICE_MAX_GPUS])
{
    list_for_each_ro(job_list, add_claims, &(struct claims){mirror, claims});
}

/* ---- cores that are oversubscribed ---- */

/* Jobs that oversubscribe their cores on some nodes. */
struct sharers {
    const struct sluice_mirror *mirror;
    bitstr_t *nodes; /* NULL: all */
    job_record_t **jobs;
    uint32_t count, room;
};

static int add_sharer(void *item, void *argument)
{
    struct sharers *sharers = argument;
    job_record_t *job = item;
    const struct entry *entry = sluice_mirror_find_entry(sharers->mirror, job->job_id);
    if (entry && entry->pooled && sharers->count < sharers->room && sluice_cores_oversubscribed(job) &&
        job->job_resrcs->node_bitmap &&
        (!sharers->nodes || bit_overlap_any(job->job_resrcs->node_bitmap, sharers->nodes)))
        sharers->jobs[sharers->count++] = job;
    return 0;
}

static int ends_later(const void *a, const void *b)
{
    const job_record_t *one = *(job_record_t *const *)a, *other = *(job_record_t *const *)b;
    return (one->end_time < other->end_time) - (one->end_time > other->end_time);
}

/* A core counts for the last of its jobs to end, so that a plan with ends has it free then. */
void sluice_mirror_share_out(struct sluice_mirror *mirror, bitstr_t *nodes)
{
    struct sharers sharers = {.mirror = mirror, .nodes = nodes, .room = mirror->entries};
    sharers.jobs = sharers.room ? calloc(sharers.room, sizeof(job_record_t *)) : NULL;
    if (sharers.jobs)
        list_for_each_ro(job_list, add_sharer, &sharers);
    if (sharers.count)
        qsort(sharers.jobs, sharers.count, sizeof(job_record_t *), ends_later);
    sluice_cores_clear(mirror->cores, nodes);
    for (uint32_t i = 0; i < sharers.count; i++) {
        sluice_mirror_let_go(mirror, sharers.jobs[i]->job_id);
        sluice_cores_claim(mirror->cores, sharers.jobs[i], nodes);
    }
    for (uint32_t i = 0; i < sharers.count; i++)
        sluice_mirror_hold_job(mirror, sharers.jobs[i], false);
    free(sharers.jobs);
    mirror->reshare = false;
}

/* ---- the list of jobs ---- */

static int hold_if_running(void *item, void *argument)
{
    struct sluice_mirror *mirror = argument;
    const job_record_t *job = item;
    if ((!IS_JOB_RUNNING(job) && !IS_JOB_SUSPENDED(job)) || !job->job_resrcs)
        return 0;
    struct entry *entry = sluice_mirror_find_entry(mirror, job->job_id);
    if (entry && entry->signature == signature_of(job, is_suspended(job)))
        entry->seen = mirror->seen;
    else
        sluice_mirror_hold_job(mirror, job, is_suspended(job));
    return 0;
}

void sluice_mirror_sync_jobs(struct sluice_mirror *mirror)
{
    mirror->seen++;
    list_for_each_ro(job_list, hold_if_running, mirror);
    for (uint32_t i = 0; i < mirror->table_size;) {
        const struct entry *entry = &mirror->table[i];
        if (entry->job_id && entry->job_id < FOREIGN && entry->seen != mirror->seen)
            sluice_mirror_let_go(mirror, entry->job_id); /* another entry may have moved here */
        else
            i++;
    }
    sluice_mirror_hold_clipped(mirror);
    if (mirror->reshare)
        sluice_mirror_share_out(mirror, NULL);
}

static int note_suspended(void *item, void *argument)
{
    struct sluice_mirror *mirror = argument;
    const job_record_t *job = item;
    size_t words = 0;
    const uint64_t *nodes = NULL;
    if ((IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->job_resrcs && job->job_resrcs->node_bitmap &&
        (is_suspended(job) || shares_cores(job)))
        nodes = sluice_bitmap_words(job->job_resrcs->node_bitmap, &words);
    for (size_t w = 0; w < words && w < mirror->words; w++)
        mirror->suspended_once[w] |= nodes[w];
    return 0;
}

void sluice_mirror_hold_all(struct sluice_mirror *mirror)
{
    mirror->suspended_once = calloc(mirror->words + 1, sizeof *mirror->suspended_once);
    if (mirror->suspended_once)
        list_for_each_ro(job_list, note_suspended, mirror);
    sluice_mirror_sync_jobs(mirror);
    free(mirror->suspended_once);
    mirror->suspended_once = NULL;
}

struct on_node {
    struct sluice_mirror *mirror;
    uint32_t node;
};

static int hold_again_on_node(void *item, void *argument)
{
    const struct on_node *on = argument;
    const job_record_t *job = item;
    if ((IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->job_resrcs && job->job_resrcs->node_bitmap &&
        bit_test(job->job_resrcs->node_bitmap, on->node))
        sluice_mirror_hold_job(on->mirror, job, is_suspended(job));
    return 0;
}

void sluice_mirror_hold_again(struct sluice_mirror *mirror, uint32_t node)
{
    list_for_each_ro(job_list, hold_again_on_node, &(struct on_node){mirror, node});
}
