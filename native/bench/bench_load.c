/* SPDX-License-Identifier: Apache-2.0 */
/* A cluster under load: jobs arrive, wait, run and leave. */
#include "bench.h"

#include "../core/cluster.h"

#include <stdlib.h>

enum { NOBODY = UINT32_MAX };

static void set_bit(uint64_t *bitmap, uint32_t bit)
{
    bitmap[bit / 64] |= (uint64_t)1 << (bit % 64);
}

static void clear_bit(uint64_t *bitmap, uint32_t bit)
{
    bitmap[bit / 64] &= ~((uint64_t)1 << (bit % 64));
}

/* A job that runs, in a heap by when it ends. */
struct running {
    uint64_t end;
    uint32_t job;
};

struct load {
    struct sluice_cluster *cluster;
    enum sluice_policy policy;
    const struct sluice_request *requests;
    uint32_t request_count;
    const struct sluice_bench_job *jobs;
    uint64_t patience;

    /* One queue for each request, in order of arrival: within it, if the first finds no place, the others do not. */
    uint32_t *first, *last; /* per request: jobs, or NOBODY */
    uint32_t *next;         /* per job: the next one that waits for the same request */
    uint64_t *allocation;   /* per job */
    uint32_t *node;         /* per job: where it runs */
    struct running *running;
    uint32_t running_count;
    uint32_t *fronts; /* requests that are still to be tried, in a heap by their first job */

    uint64_t *bitmaps; /* the memory of the next four */
    uint64_t *all;     /* bitmap of all nodes */
    uint64_t *freed;   /* of nodes that changed since every waiting job was last tried */
    uint64_t *kept;    /* of nodes that are set aside for a job out of patience */
    uint64_t *asked;   /* of nodes where a job may go */
    size_t words;
    uint32_t *reserved; /* per request: the node set aside for its first job, or NOBODY */
    uint32_t kept_count, kept_most;
};

/* ---- heaps ---- */

static void sift_up_running(struct running *heap, uint32_t at)
{
    struct running moved = heap[at];
    for (; at > 0 && heap[(at - 1) / 2].end > moved.end; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = moved;
}

static void pop_running(struct running *heap, uint32_t *count)
{
    struct running moved = heap[--*count];
    uint32_t at = 0;
    for (uint32_t child; (child = 2 * at + 1) < *count; at = child) {
        child += child + 1 < *count && heap[child + 1].end < heap[child].end;
        if (heap[child].end >= moved.end)
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void sift_down_front(const struct load *load, uint32_t count, uint32_t at)
{
    uint32_t moved = load->fronts[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && load->first[load->fronts[child + 1]] < load->first[load->fronts[child]])
            child++;
        if (load->first[load->fronts[child]] >= load->first[moved])
            break;
        load->fronts[at] = load->fronts[child];
    }
    load->fronts[at] = moved;
}

/* ---- jobs ---- */

static void wait_behind(struct load *load, uint32_t job)
{
    uint32_t request = load->jobs[job].request;
    load->next[job] = NOBODY;
    if (load->first[request] == NOBODY)
        load->first[request] = job;
    else
        load->next[load->last[request]] = job;
    load->last[request] = job;
}

/* Start the job on one of `nodes`, or where one is set aside for it; NO_PLACE where it has to wait. */
static enum sluice_error try_job(struct load *load, uint32_t job, const uint64_t *nodes, uint64_t now,
                                 struct sluice_error_text *text)
{
    uint32_t reserved = load->reserved[load->jobs[job].request];
    for (size_t i = 0; i < load->words; i++)
        load->asked[i] = (nodes ? nodes[i] : load->all[i]) & ~load->kept[i];
    if (reserved != NOBODY)
        set_bit(load->asked, reserved);
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    struct sluice_request request = load->requests[load->jobs[job].request];
    request.seed = job;
    request.allowed = load->asked;
    request.allowed_words = load->words;
    enum sluice_error error =
        sluice_start(load->cluster, load->policy, &request, &placement, &load->allocation[job], text);
    if (error)
        return error == SLUICE_ERROR_NEVER ? SLUICE_ERROR_NO_PLACE : error;
    load->node[job] = part.node;
    load->running[load->running_count] = (struct running){.end = now + load->jobs[job].duration, .job = job};
    sift_up_running(load->running, load->running_count++);
    return SLUICE_OK;
}

/* Set the node aside that can host the job and has the most free GPU memory. */
static void keep_node(struct load *load, uint32_t request)
{
    struct need need;
    if (load->kept_count == load->kept_most ||
        sluice_need_from_request(load->cluster, &load->requests[request], &need, NULL))
        return;
    uint32_t best = NOBODY;
    for (uint32_t node = 0; node < load->cluster->node_count; node++)
        if (!sluice_bit(load->kept, node) &&
            sluice_offer_idle(load->cluster, sluice_class_of(load->cluster, node), &need).units &&
            (best == NOBODY || load->cluster->nodes[node].gpu_free > load->cluster->nodes[best].gpu_free))
            best = node;
    if (best == NOBODY)
        return;
    load->reserved[request] = best;
    set_bit(load->kept, best);
    load->kept_count++;
}

static void give_node_back(struct load *load, uint32_t request)
{
    if (load->reserved[request] == NOBODY)
        return;
    clear_bit(load->kept, load->reserved[request]);
    set_bit(load->freed, load->reserved[request]);
    load->reserved[request] = NOBODY;
    load->kept_count--;
}

/* Try waiting jobs, in order of arrival, on the nodes that were freed since: they found no place on the others. One
 * that is out of patience gets a node set aside. */
static enum sluice_error try_waiting(struct load *load, uint64_t now, struct sluice_bench_load_result *result,
                                     struct sluice_error_text *text)
{
    uint32_t count = 0;
    for (uint32_t request = 0; request < load->request_count; request++)
        if (load->first[request] != NOBODY)
            load->fronts[count++] = request;
    for (uint32_t at = count / 2; at-- > 0;)
        sift_down_front(load, count, at);
    while (count > 0) {
        uint32_t request = load->fronts[0], job = load->first[request];
        enum sluice_error error = try_job(load, job, load->freed, now, text);
        if (error == SLUICE_OK) {
            result->wait[job] = now - load->jobs[job].arrival;
            load->first[request] = load->next[job];
            result->waiting--;
            give_node_back(load, request);
        } else if (error != SLUICE_ERROR_NO_PLACE) {
            return error;
        } else if (load->reserved[request] == NOBODY && now - load->jobs[job].arrival > load->patience) {
            keep_node(load, request);
        }
        if (error || load->first[request] == NOBODY)
            load->fronts[0] = load->fronts[--count];
        if (count)
            sift_down_front(load, count, 0);
    }
    for (size_t i = 0; i < load->words; i++)
        load->freed[i] = 0;
    return SLUICE_OK;
}

static enum sluice_error run(struct load *load, uint32_t job_count, uint64_t from, uint64_t until,
                             struct sluice_bench_load_result *result, struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    enum sluice_error error = SLUICE_OK;
    uint64_t now = 0;
    for (uint32_t arrived = 0; now < until && !error;) {
        /* The state until the next event. */
        uint64_t next = arrived < job_count ? load->jobs[arrived].arrival : until;
        if (load->running_count && load->running[0].end < next)
            next = load->running[0].end;
        next = next < until ? next : until;
        if (next > from) {
            uint64_t span = next - (now > from ? now : from);
            sluice_cluster_read_totals(load->cluster, &totals);
            result->used_mib_s += (double)(totals.gpu_memory_mib - totals.gpu_memory_mib_free) * (double)span;
            result->used_cpu_s += (double)(totals.cpus_milli - totals.cpus_milli_free) * (double)span / 1000;
            result->waiting_s += (double)result->waiting * (double)span;
        }
        now = next;
        bool left = false;
        for (; load->running_count && load->running[0].end <= now && !error; left = true) {
            uint32_t job = load->running[0].job;
            pop_running(load->running, &load->running_count);
            set_bit(load->freed, load->node[job]);
            error = sluice_release(load->cluster, load->allocation[job], text);
        }
        if (left && !error)
            error = try_waiting(load, now, result, text);
        for (; arrived < job_count && load->jobs[arrived].arrival <= now && !error; arrived++) {
            error = SLUICE_ERROR_NO_PLACE;
            if (load->first[load->jobs[arrived].request] == NOBODY)
                error = try_job(load, arrived, NULL, now, text);
            if (error == SLUICE_ERROR_NO_PLACE) {
                error = SLUICE_OK;
                wait_behind(load, arrived);
                result->waiting++;
                result->wait[arrived] = UINT64_MAX;
            } else if (!error) {
                result->wait[arrived] = 0;
            }
        }
    }
    return error ? error : sluice_cluster_check(load->cluster, text);
}

enum sluice_error sluice_bench_load(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *requests, uint32_t request_count,
                                    const struct sluice_bench_job *jobs, uint32_t job_count, uint64_t patience,
                                    uint32_t kept_most, uint64_t from, uint64_t until,
                                    struct sluice_bench_load_result *result, struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    for (uint32_t i = 0; i < job_count; i++)
        if (jobs[i].request >= request_count || (i && jobs[i].arrival < jobs[i - 1].arrival))
            return sluice_fail(text, SLUICE_ERROR_RANGE, "job %u: its request is unknown, or it comes before job %u", i,
                               i - 1);
    struct load load = {
        .cluster = cluster,
        .policy = policy,
        .requests = requests,
        .request_count = request_count,
        .jobs = jobs,
        .patience = patience,
        .kept_most = kept_most,
        .words = (totals.nodes + 63) / 64,
        .first = malloc((request_count + (size_t)1) * sizeof *load.first),
        .last = calloc(request_count + (size_t)1, sizeof *load.last),
        .fronts = calloc(request_count + (size_t)1, sizeof *load.fronts),
        .next = calloc(job_count + (size_t)1, sizeof *load.next),
        .node = calloc(job_count + (size_t)1, sizeof *load.node),
        .allocation = calloc(job_count + (size_t)1, sizeof *load.allocation),
        .running = calloc(job_count + (size_t)1, sizeof *load.running),
    };
    load.reserved = malloc((request_count + (size_t)1) * sizeof *load.reserved);
    load.bitmaps = calloc(4 * load.words + 1, sizeof *load.bitmaps);
    enum sluice_error error = SLUICE_ERROR_NO_MEMORY;
    if (load.first && load.last && load.fronts && load.next && load.node && load.allocation && load.running &&
        load.reserved && load.bitmaps) {
        load.all = load.bitmaps;
        load.freed = load.all + load.words;
        load.kept = load.freed + load.words;
        load.asked = load.kept + load.words;
        for (uint32_t node = 0; node < totals.nodes; node++)
            set_bit(load.all, node);
        for (uint32_t i = 0; i < request_count; i++)
            load.first[i] = load.reserved[i] = NOBODY;
        error = run(&load, job_count, from, until, result, text);
    } else {
        sluice_fail(text, error, "out of memory for %u jobs", job_count);
    }
    free(load.first);
    free(load.last);
    free(load.fronts);
    free(load.next);
    free(load.node);
    free(load.allocation);
    free(load.running);
    free(load.reserved);
    free(load.bitmaps);
    return error;
}
