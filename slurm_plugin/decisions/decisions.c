/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "decisions/decisions_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "order/order.h"
#include "runtime/runtime.h"

enum {
    DEFAULT_RING_BYTES = 8 * 1024 * 1024,
    DEFAULT_FILE_BYTES = 32 * 1024 * 1024,
    DEFAULT_FILES = 8,
    DEFAULT_REPEAT_S = 60,
    DEFAULT_JOBS = 65536,
    MAX_PAYLOAD = 256 * 1024,
    MEMORY_TRIES = 8, /* entries in which a job's last decision may be */
};

/* ---- decisions ---- */

bool sluice_decision_record(struct sluice_decision_recorder *recorder, enum entry_type type,
                            const struct bytes *payload)
{
    if (payload->full || !sluice_ring_push(&recorder->ring, type, payload->data, payload->length)) {
        atomic_fetch_add_explicit(&recorder->dropped, 1, memory_order_relaxed);
        return false;
    }
    atomic_fetch_add_explicit(&recorder->recorded, 1, memory_order_relaxed);
    return true;
}

static uint64_t hash_bytes(const uint8_t *data, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo) */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Was the same recorded of the job less than `within_s` ago? If not, remember it: in the job's own entry, else in the
 * oldest of the few where it may be. */
static bool said_before(struct said *table, uint32_t mask, uint32_t job, uint64_t what, uint32_t within_s)
{
    uint32_t now = sluice_monotonic_s(), first = job * UINT32_C(2654435769);
    struct said *place = &table[first & mask];
    for (uint32_t i = 0; i < MEMORY_TRIES; i++) {
        struct said *entry = &table[(first + i) & mask];
        if (entry->job == job) {
            if (entry->what == what && now - entry->at_s < within_s)
                return true;
            place = entry;
            break;
        }
        if (entry->at_s < place->at_s)
            place = entry;
    }
    *place = (struct said){.job = job, .at_s = now, .what = what};
    return false;
}

static bool starts_something(const struct sluice_decision *decision)
{
    if (decision->mode != SLUICE_DECISION_RUN_NOW)
        return false;
    switch (decision->outcome) {
    case SLUICE_DECISION_USED:
    case SLUICE_DECISION_OVERRULED:
    case SLUICE_DECISION_STOCK_FOUND:
        return true;
    case SLUICE_DECISION_SHADOWED:
        return decision->stock_fits;
    default:
        return false;
    }
}

/* Of what a decision is about, for repeats. `so_far` has the job and its request without what is appended later. */
static uint64_t hash_question(const struct bytes *so_far, const struct sluice_request *request)
{
    const int64_t appended[] = {request->gpu_compute_percent, request->nics,      request->nics_per_gpu,
                                (int64_t)request->nic_kinds,  request->segment,   request->lower_switches,
                                request->switch_layout,       request->nic_planes};
    return hash_bytes(so_far->data, so_far->length) ^ hash_bytes((const uint8_t *)appended, sizeof appended);
}

static void put_decision(struct bytes *to, const struct sluice_decision *decision, uint64_t *what)
{
    bool fits = decision->verdict == SLUICE_OK;
    sluice_put_job(to, &decision->job);
    sluice_put(to, decision->mode);
    sluice_put(to, decision->outcome);
    const struct sluice_request *request = decision->request;
    const bool claims = request->gpu_compute_percent != 0, nics = request->nics || request->nics_per_gpu,
               segments = request->segment > 1, switches = request->lower_switches || request->switch_layout,
               planes = request->nic_planes != SLUICE_LAYOUT_POLICY;
    sluice_put(to, (decision->backfill ? 1u : 0u) | (decision->stock_answered ? 2u : 0u) |
                       (decision->stock_fits ? 4u : 0u) | (decision->planned ? 8u : 0u) | (claims ? 16u : 0u) |
                       (nics ? 32u : 0u) | (segments ? 64u : 0u) | (switches ? 128u : 0u) | (planes ? 256u : 0u));
    sluice_put(to, decision->policy);
    sluice_put(to, decision->verdict);
    sluice_put_request(to, decision->request);
    *what = hash_question(to, request);
    sluice_put_bitmap(to, decision->request->allowed, decision->request->allowed_words);
    sluice_put_signed(to, fits ? decision->placement->score : 0);
    sluice_put_parts(to, fits ? decision->placement->parts : NULL, fits ? decision->placement->part_count : 0);
    uint32_t stock_nodes = decision->stock_fits ? decision->stock_node_count : 0;
    sluice_put(to, stock_nodes);
    for (uint32_t i = 0; i < stock_nodes; i++)
        sluice_put(to, decision->stock_nodes[i]);
    sluice_put(to, decision->core_ns);
    sluice_put(to, decision->stock_ns);
    if (claims)
        sluice_put_signed(to, request->gpu_compute_percent);
    if (nics) {
        sluice_put_signed(to, request->nics);
        sluice_put_signed(to, request->nics_per_gpu);
        sluice_put(to, request->nic_kinds);
        sluice_put(to, fits ? decision->placement->nic_pairs : 0);
        sluice_put_nics(to, fits ? decision->placement->parts : NULL, fits ? decision->placement->part_count : 0);
    }
    if (segments)
        sluice_put_signed(to, request->segment);
    if (switches) {
        sluice_put_signed(to, request->lower_switches);
        sluice_put(to, request->switch_layout);
    }
    if (planes)
        sluice_put(to, request->nic_planes);
}

void sluice_decision_placed(struct sluice_decision_recorder *recorder, const struct sluice_decision *decision)
{
    if (!recorder)
        return;
    struct bytes *to = &recorder->scratch;
    uint64_t what;
    to->length = 0;
    to->full = false;
    put_decision(to, decision, &what);
    if (!starts_something(decision) &&
        said_before(recorder->said, recorder->said_mask, decision->job.id, what, recorder->repeat_s)) {
        atomic_fetch_add_explicit(&recorder->repeated, 1, memory_order_relaxed);
        return;
    }
    if (!sluice_decision_record_images(recorder)) {
        atomic_fetch_add_explicit(&recorder->dropped, 1, memory_order_relaxed);
        return;
    }
    (void)sluice_decision_record(recorder, ENTRY_DECISION, to);
}

static void put_rank(struct bytes *to, uint32_t job_id)
{
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    const struct sluice_rank *rank = ranks ? sluice_ranks_find(ranks, job_id) : NULL;
    sluice_put(to, rank != NULL);
    if (rank) {
        const struct sluice_order_policy *policy = sluice_ranks_policy(ranks);
        sluice_put_signed(to, sluice_ranks_taken_s(ranks));
        sluice_put_signed(to, rank->site);
        sluice_put(to, rank->place);
        sluice_put(to, rank->gpus);
        sluice_put_signed(to, rank->remaining_s);
        sluice_put(to, rank->terms.deadline);
        sluice_put(to, rank->terms.starving);
        sluice_put_signed(to, rank->terms.laxity_s);
        sluice_put(to, SLUICE_FACTOR_COUNT);
        for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++) {
            sluice_put(to, policy->weight[factor]);
            sluice_put_signed(to, rank->terms.term[factor]);
        }
        sluice_put(to, SLUICE_QUEUE_TERM_COUNT);
        for (int term = 0; term < SLUICE_QUEUE_TERM_COUNT; term++)
            sluice_put_signed(to, rank->slurm_term[term]);
        sluice_put(to, rank->operators);
        if (rank->operators)
            sluice_put_signed(to, (int64_t)rank->site_was - (int64_t)SLUICE_SITE_NONE);
    }
    sluice_ranks_release(ranks);
}

static void put_roles(struct bytes *to, uint32_t part_count, const struct sluice_decision_roles *roles)
{
    sluice_put(to, roles->count);
    for (uint32_t role = 0; role < roles->count; role++)
        sluice_put_text(to, roles->names[role]);
    for (uint32_t i = 0; i < part_count * roles->count; i++)
        sluice_put(to, roles->gpus[i]);
}

void sluice_decision_started(struct sluice_decision_recorder *recorder, const struct sluice_decision_job *job,
                             const struct sluice_part *parts, uint32_t part_count,
                             const struct sluice_decision_roles *roles)
{
    if (!recorder)
        return;
    struct bytes *to = &recorder->scratch;
    to->length = 0;
    to->full = false;
    sluice_put_job(to, job);
    sluice_put_parts(to, parts, part_count);
    put_rank(to, job->id);
    sluice_put_nics(to, parts, part_count);
    if (roles && roles->count)
        put_roles(to, part_count, roles);
    (void)sluice_decision_record_topology(
        recorder); /* so that its nodes and GPUs have names even if the core was never asked */
    (void)sluice_decision_record(recorder, ENTRY_START, to);
}

void sluice_decision_planned(struct sluice_decision_recorder *recorder, const struct sluice_decision_plan *plan)
{
    if (!recorder)
        return;
    struct bytes *to = &recorder->plan_scratch;
    to->length = 0;
    to->full = false;
    sluice_put(to, plan->job_id);
    sluice_put(to, plan->gang);
    sluice_put_signed(to, plan->start_s);
    sluice_put_parts(to, plan->parts, plan->part_count);
    sluice_put_text(to, plan->reason);
    uint64_t what = hash_bytes(to->data, to->length);
    if (said_before(recorder->planned, recorder->said_mask, plan->job_id, what, UINT32_MAX)) {
        atomic_fetch_add_explicit(&recorder->repeated, 1, memory_order_relaxed);
        return;
    }
    sluice_put_signed(to, plan->planned_s);
    (void)sluice_decision_record(recorder, ENTRY_PLAN, to);
}

void sluice_decision_read_counters(const struct sluice_decision_recorder *recorder,
                                   struct sluice_decision_counters *counters)
{
    struct sluice_decision_recorder *own = (struct sluice_decision_recorder *)(uintptr_t)recorder;
    *counters = (struct sluice_decision_counters){.recorded = atomic_load(&own->recorded),
                                                  .repeated = atomic_load(&own->repeated),
                                                  .dropped = atomic_load(&own->dropped),
                                                  .written = atomic_load(&own->written),
                                                  .failed = atomic_load(&own->failed)};
}

/* ---- start and end ---- */

static bool make_tables(struct sluice_decision_recorder *made, uint32_t max_jobs)
{
    uint32_t size = 1024;
    while (size < max_jobs)
        size *= 2;
    made->said_mask = size - 1;
    made->said = calloc(size, sizeof *made->said);
    made->planned = calloc(size, sizeof *made->planned);
    made->scratch = (struct bytes){.data = malloc(MAX_PAYLOAD), .room = MAX_PAYLOAD};
    made->plan_scratch = (struct bytes){.data = malloc(MAX_PAYLOAD), .room = MAX_PAYLOAD};
    made->writer.buffer = (struct bytes){.grows = true};
    made->ring.data = calloc(1, made->ring.size);
    return made->said && made->planned && made->scratch.data && made->plan_scratch.data && made->ring.data;
}

static void free_recorder(struct sluice_decision_recorder *recorder)
{
    free(recorder->folder);
    free(recorder->dirty);
    free(recorder->topology.data);
    free(recorder->scratch.data);
    free(recorder->plan_scratch.data);
    free(recorder->said);
    free(recorder->planned);
    free(recorder->ring.data);
    sluice_decision_writer_free(&recorder->writer);
    free(recorder);
}

enum sluice_error sluice_decision_new(const struct sluice_decision_config *config,
                                      struct sluice_decision_recorder **recorder, struct sluice_error_text *text)
{
    uint64_t ring_bytes = config->ring_bytes ? config->ring_bytes : DEFAULT_RING_BYTES;
    if (ring_bytes < 4096 || (ring_bytes & (ring_bytes - 1)))
        return sluice_fail_with(text, SLUICE_ERROR_RANGE,
                                "decisions: ring of %" PRIu64 " bytes: a power of two from 4096", ring_bytes);
    struct sluice_decision_recorder *made = aligned_alloc(64, (sizeof *made + 63) & ~(size_t)63);
    if (!made)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decisions: out of memory");
    memset(made, 0, sizeof *made);
    made->folder = strdup(config->folder);
    made->ring.size = ring_bytes;
    made->max_file_bytes = config->max_file_bytes ? config->max_file_bytes : DEFAULT_FILE_BYTES;
    made->max_files = config->max_files ? config->max_files : DEFAULT_FILES;
    made->repeat_s = config->repeat_s ? config->repeat_s : DEFAULT_REPEAT_S;
    made->writer.file = -1;
    made->shared = config->shared;
    if (!made->folder || !make_tables(made, config->max_jobs ? config->max_jobs : DEFAULT_JOBS)) {
        free_recorder(made);
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decisions: out of memory");
    }
    int reason = pthread_create(&made->thread, NULL, sluice_decision_write_all, made);
    if (reason != 0) {
        free_recorder(made);
        return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "decisions: no thread: %s", strerror(reason));
    }
    *recorder = made;
    return SLUICE_OK;
}

void sluice_decision_free(struct sluice_decision_recorder *recorder)
{
    if (!recorder)
        return;
    atomic_store(&recorder->stop, true);
    pthread_join(recorder->thread, NULL);
    free_recorder(recorder);
}

/* ---- slurmctld's own ---- */

static struct sluice_decision_recorder *_Atomic shared;

struct sluice_decision_recorder *sluice_decision_shared(void)
{
    return atomic_load_explicit(&shared, memory_order_acquire);
}

static bool start_shared(const struct sluice_site *site)
{
    char folder[4096];
    struct sluice_error_text text;
    struct sluice_decision_recorder *made = NULL;
    int length =
        snprintf(folder, sizeof folder, "%s/" SLUICE_STATE_FOLDER, site->state_folder ? site->state_folder : ".");
    if (length < 0 || (size_t)length >= sizeof folder)
        return false;
    if (sluice_decision_new(&(struct sluice_decision_config){.folder = folder, .shared = true}, &made, &text) !=
        SLUICE_OK) {
        sluice_log_error("sluice: %s", text.text);
        return false;
    }
    atomic_store(&shared, made);
    return true;
}

static void stop_shared(void)
{
    sluice_decision_free(atomic_exchange(&shared, NULL));
}

static struct sluice_module module = {.name = "decisions", .start = start_shared, .stop = stop_shared};

__attribute__((constructor)) static void announce(void)
{
    sluice_controller_module(&module);
}
