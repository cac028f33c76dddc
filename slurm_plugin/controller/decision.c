/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "controller/decision.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "controller/controller.h"
#include "controller/fail.h"
#include "controller/log.h"
#include "controller/order.h"
#include "controller/status.h"
#include "policy/policy.h"

/* Records of a file, by number; docs/explain.md has their fields. Append only. */
enum record_type {
    RECORD_TOPOLOGY = 1,
    RECORD_IMAGE = 2,
    RECORD_DECISION = 3,
    RECORD_START = 4,
    RECORD_PLAN = 5,
    RECORD_LOST = 6,
};

/* Entries of a topology record. Append only. */
enum topology_entry {
    ENTRY_MODEL = 1,
    ENTRY_SHAPE = 2,
    ENTRY_SWITCH = 3,
    ENTRY_NODE = 4,
    ENTRY_ORDER = 5,
    ENTRY_WORKLOAD = 6,
};

enum {
    DEFAULT_RING_BYTES = 8 * 1024 * 1024,
    DEFAULT_FILE_BYTES = 32 * 1024 * 1024,
    DEFAULT_FILES = 8,
    DEFAULT_REPEAT_S = 60,
    DEFAULT_JOBS = 65536,
    MAX_PAYLOAD = 256 * 1024,
    MAX_TEXT = 255,
    MAX_IMAGE = 512,
    IMAGES_AT_ONCE = 1024, /* in one call of a hook; the rest with the next */
    MEMORY_TRIES = 8,      /* places of a job in what is remembered of it */
    BUFFER_BYTES = 256 * 1024,
    SHORTEST_NAP_MS = 5,
    LONGEST_NAP_MS = 200,
    RETRY_S = 10, /* after a file could not be written */
    MAX_NODE_CHECK = SLUICE_MAX_NODES,
};
static const char MAGIC[8] = "SLUICEDR";
#define FILE_PREFIX "decisions."

/* ---- encoding: whole numbers as LEB128, texts and bitmaps with their length ---- */

/* Bytes in the making: `full` once something did not fit. */
struct bytes {
    uint8_t *data;
    size_t length, room;
    bool grows; /* the memory is ours to enlarge */
    bool full;
};

static bool more_room(struct bytes *to, size_t length)
{
    if (to->full || to->room - to->length >= length)
        return !to->full;
    size_t room = to->room ? to->room : 4096;
    while (room - to->length < length)
        room *= 2;
    uint8_t *grown = to->grows ? realloc(to->data, room) : NULL;
    if (!grown) {
        to->full = true;
        return false;
    }
    to->data = grown;
    to->room = room;
    return true;
}

static void put_bytes(struct bytes *to, const void *data, size_t length)
{
    if (length == 0 || !more_room(to, length))
        return;
    memcpy(to->data + to->length, data, length);
    to->length += length;
}

static void put(struct bytes *to, uint64_t number)
{
    if (!more_room(to, 10))
        return;
    uint8_t *at = to->data + to->length;
    for (; number >= 0x80; number >>= 7)
        *at++ = (uint8_t)(number | 0x80);
    *at++ = (uint8_t)number;
    to->length = (size_t)(at - to->data);
}

/* A number that may be negative: two's complement, ten bytes where it is. */
static void put_signed(struct bytes *to, int64_t number)
{
    put(to, (uint64_t)number);
}

static void put_text(struct bytes *to, const char *text)
{
    size_t length = text ? strnlen(text, MAX_TEXT) : 0;
    put(to, length);
    put_bytes(to, text, length);
}

/* Words of a bitmap as runs: length * 4 + kind, kind 0 all zero, 1 all one, 2 as they are (the words follow). */
static void put_bitmap(struct bytes *to, const uint64_t *words, size_t count)
{
    if (!words) {
        put(to, 0);
        return;
    }
    put(to, count + 1);
    for (size_t from = 0, end; from < count; from = end) {
        unsigned kind = words[from] == 0 ? 0 : words[from] == UINT64_MAX ? 1 : 2;
        for (end = from + 1; end < count; end++) {
            unsigned next = words[end] == 0 ? 0 : words[end] == UINT64_MAX ? 1 : 2;
            if (next != kind)
                break;
        }
        put(to, (end - from) << 2 | kind);
        if (kind == 2)
            put_bytes(to, words + from,
                      (end - from) * sizeof *words); /* little-endian, as all that Slurm runs on here */
    }
}

static void put_request(struct bytes *to, const struct sluice_request *request)
{
    put_signed(to, request->nodes_min);
    put_signed(to, request->nodes_max);
    put_signed(to, request->gpus);
    put_signed(to, request->gpu_memory_mib);
    put_signed(to, request->cpus_milli);
    put_signed(to, request->host_memory_mib);
    put_signed(to, request->cpus_milli_per_gpu);
    put_signed(to, request->host_memory_mib_per_gpu);
    put(to, request->models);
    put_signed(to, request->capability_min);
    put_signed(to, request->gpu_memory_mib_min);
    put(to, request->one_link_domain);
    put(to, request->one_numa_node);
    put(to, request->near_nic);
    put(to, request->one_switch);
    put(to, request->switch_level);
    put(to, request->layout);
    put(to, request->flags);
    put(to, request->seed);
}

static void put_part(struct bytes *to, const struct sluice_part *part)
{
    put(to, part->node);
    put(to, part->gpus);
    put_signed(to, part->gpu_memory_mib);
    put_signed(to, part->cpus_milli);
    put_signed(to, part->host_memory_mib);
    put(to, part->exclusive);
}

static void put_parts(struct bytes *to, const struct sluice_part *parts, uint32_t count)
{
    put(to, count);
    for (uint32_t i = 0; i < count; i++)
        put_part(to, &parts[i]);
}

static void put_job(struct bytes *to, const struct sluice_decision_job *job)
{
    put(to, job->id);
    put(to, job->array_id);
    put(to, job->array_task);
    put(to, job->uid);
    put(to, job->priority);
    put(to, job->gpus);
    put_signed(to, job->submit_s);
    put_signed(to, job->limit_s);
    put_text(to, job->account);
    put_text(to, job->partition);
}

/* Image flags. Append only. */
enum { IMAGE_EXCLUSIVE = 1, IMAGE_UTILISATION = 2 };

static void put_image(struct bytes *to, uint32_t node, const struct sluice_node_view *view)
{
    uint32_t utilised = 0;
    for (uint32_t gpu = 0; gpu < view->gpu_count; gpu++)
        utilised |= view->gpu_utilisation[gpu];
    put(to, node);
    put(to, view->state);
    put(to, (view->exclusive ? IMAGE_EXCLUSIVE : 0u) | (utilised ? IMAGE_UTILISATION : 0u));
    put(to, view->parts);
    put_signed(to, view->cpus_milli);
    put_signed(to, view->cpus_milli_free);
    put_signed(to, view->host_memory_mib);
    put_signed(to, view->host_memory_mib_free);
    put(to, view->gpus_healthy);
    put(to, view->gpus_idle);
    put(to, view->gpu_count);
    for (uint32_t gpu = 0; gpu < view->gpu_count; gpu++)
        put_signed(to, view->gpu_memory_mib_free[gpu]);
    for (uint32_t gpu = 0; utilised && gpu < view->gpu_count; gpu++)
        put(to, view->gpu_utilisation[gpu]);
}

/* ---- the ring: many writers, one reader, records in the order in which they were reserved ---- */

/* Before each record. `length`: of the record with this header, a multiple of 8; 0: not complete yet. Where the ring
 * ends too early for a record, one of type 0 fills the rest. */
struct slot {
    _Atomic uint32_t length;
    uint16_t type;
    uint16_t unused;
    uint32_t payload;
    uint32_t more_unused;
    int64_t time_us;
};

struct ring {
    uint8_t *data; /* zero wherever no record is */
    uint64_t size;
    _Alignas(64) _Atomic uint64_t head; /* reserved up to here */
    _Alignas(64) _Atomic uint64_t tail; /* read up to here */
};

static struct slot *slot_at(const struct ring *ring, uint64_t place)
{
    return (struct slot *)(void *)(ring->data + (place & (ring->size - 1)));
}

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* False when there is no room. */
static bool ring_push(struct ring *ring, enum record_type type, const void *payload, size_t length)
{
    const uint64_t needed = (sizeof(struct slot) + length + 7) & ~UINT64_C(7);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed), filler;
    do {
        uint64_t left = ring->size - (head & (ring->size - 1));
        filler = left < needed ? left : 0;
        if (head + filler + needed - atomic_load_explicit(&ring->tail, memory_order_acquire) > ring->size)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&ring->head, &head, head + filler + needed, memory_order_relaxed,
                                                    memory_order_relaxed));
    if (filler) { /* its other fields may not fit; they are zero, as type 0 */
        atomic_store_explicit(&slot_at(ring, head)->length, (uint32_t)filler, memory_order_release);
        head += filler;
    }
    struct slot *slot = slot_at(ring, head);
    slot->type = (uint16_t)type;
    slot->payload = (uint32_t)length;
    slot->time_us = now_us();
    memcpy(slot + 1, payload, length);
    atomic_store_explicit(&slot->length, (uint32_t)needed, memory_order_release);
    return true;
}

/* The next complete record, or NULL. It stays until ring_done. */
static const struct slot *ring_peek(struct ring *ring)
{
    for (;;) {
        uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        struct slot *slot = slot_at(ring, tail);
        uint32_t length = atomic_load_explicit(&slot->length, memory_order_acquire);
        if (length == 0)
            return NULL;
        if (length >= sizeof *slot && slot->type)
            return slot;
        memset(slot, 0, sizeof(uint32_t)); /* a filler: nothing else of it was written */
        atomic_store_explicit(&ring->tail, tail + length, memory_order_release);
    }
}

static void ring_done(struct ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct slot *slot = slot_at(ring, tail);
    uint32_t length = atomic_load_explicit(&slot->length, memory_order_relaxed);
    memset((void *)slot, 0, length);
    atomic_store_explicit(&ring->tail, tail + length, memory_order_release);
}

/* ---- the recorder ---- */

/* What was said last of a job. */
struct said {
    uint32_t job;
    uint32_t at_s; /* monotonic */
    uint64_t what;
};

struct image {
    uint32_t length;
    uint8_t *data;
};

/* What only the thread touches. */
struct writer {
    int file;
    uint64_t number;     /* of the file */
    uint64_t file_bytes; /* so far */
    time_t retry;        /* CLOCK_MONOTONIC second before which no file is opened again */
    bool complained;
    struct bytes buffer;
    uint64_t sequence;
    uint64_t lost_told; /* of the counter `dropped`, in records of type LOST */
    struct bytes topology;
    struct image *images; /* by node */
    uint32_t image_room;
};

struct sluice_decision_topology {
    struct bytes notes;
    uint32_t nodes;
};

struct sluice_decision_recorder {
    char *folder;
    uint64_t max_file_bytes;
    uint32_t max_files, repeat_s;
    struct ring ring;

    /* the hook's */
    const struct sluice_cluster *cluster;
    uint32_t node_count;
    uint64_t *dirty; /* a bit for each node whose image is not recorded */
    size_t dirty_words;
    struct bytes topology; /* to be recorded; data NULL: it is */
    struct bytes scratch;
    struct said *said;
    uint32_t said_mask;

    /* the planner's */
    struct bytes plan_scratch;
    struct said *planned;

    atomic_ullong recorded, repeated, dropped, written, failed;
    _Atomic uint64_t consumed; /* place in the ring up to which everything is in the file */
    atomic_bool stop;
    pthread_t thread;
    struct writer writer;
    bool shared; /* slurmctld's own: its counters are shown in the status */
};

static uint32_t monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)now.tv_sec + 1; /* never 0 */
}

static bool record(struct sluice_decision_recorder *recorder, enum record_type type, const struct bytes *payload)
{
    if (payload->full || !ring_push(&recorder->ring, type, payload->data, payload->length)) {
        atomic_fetch_add_explicit(&recorder->dropped, 1, memory_order_relaxed);
        return false;
    }
    atomic_fetch_add_explicit(&recorder->recorded, 1, memory_order_relaxed);
    return true;
}

/* ---- topology ---- */

struct sluice_decision_topology *sluice_decision_topology_new(void)
{
    struct sluice_decision_topology *topology = calloc(1, sizeof *topology);
    if (topology)
        topology->notes.grows = true;
    return topology;
}

void sluice_decision_topology_free(struct sluice_decision_topology *topology)
{
    if (topology)
        free(topology->notes.data);
    free(topology);
}

void sluice_decision_note_model(struct sluice_decision_topology *topology, const char *name)
{
    put(&topology->notes, ENTRY_MODEL);
    put_text(&topology->notes, name);
}

void sluice_decision_note_shape(struct sluice_decision_topology *topology, const struct sluice_node_shape *shape)
{
    struct bytes *to = &topology->notes;
    put(to, ENTRY_SHAPE);
    put(to, shape->gpu_count);
    for (uint32_t i = 0; i < shape->gpu_count && i < SLUICE_MAX_GPUS; i++) {
        const struct sluice_gpu_shape *gpu = &shape->gpus[i];
        put(to, gpu->model);
        put(to, gpu->capability);
        put_signed(to, gpu->memory_mib);
        put(to, gpu->link_domain);
        put(to, gpu->numa_node);
        put(to, gpu->near_nic);
    }
    for (uint32_t i = 0; i < shape->gpu_count && i < SLUICE_MAX_GPUS; i++)
        put_bytes(to, shape->links[i], shape->gpu_count);
}

void sluice_decision_note_switch(struct sluice_decision_topology *topology, uint32_t parent)
{
    put(&topology->notes, ENTRY_SWITCH);
    put(&topology->notes, parent);
}

void sluice_decision_note_node(struct sluice_decision_topology *topology, const char *name, uint32_t shape,
                               int64_t cpus_milli, int64_t host_memory_mib, uint32_t switch_id)
{
    put(&topology->notes, ENTRY_NODE);
    put_text(&topology->notes, name);
    put(&topology->notes, shape);
    put_signed(&topology->notes, cpus_milli);
    put_signed(&topology->notes, host_memory_mib);
    put(&topology->notes, switch_id);
    topology->nodes++;
}

void sluice_decision_note_order(struct sluice_decision_topology *topology, const uint32_t *rank, uint32_t node_count)
{
    put(&topology->notes, ENTRY_ORDER);
    put(&topology->notes, rank ? node_count : 0);
    for (uint32_t i = 0; rank && i < node_count; i++)
        put(&topology->notes, rank[i]);
}

void sluice_decision_note_workload(struct sluice_decision_topology *topology, const struct sluice_request *shapes,
                                   const uint32_t *weights, uint32_t count)
{
    put(&topology->notes, ENTRY_WORKLOAD);
    put(&topology->notes, count);
    for (uint32_t i = 0; i < count; i++) {
        put_request(&topology->notes, &shapes[i]);
        put_bitmap(&topology->notes, shapes[i].allowed, shapes[i].allowed_words);
        put(&topology->notes, weights[i]);
    }
}

enum sluice_error sluice_decision_set_topology(struct sluice_decision_recorder *recorder,
                                               const struct sluice_decision_topology *topology,
                                               const struct sluice_cluster *cluster, struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    size_t words = ((size_t)totals.nodes + 63) / 64;
    uint64_t *dirty = calloc(words + 1, sizeof *dirty);
    struct bytes copy = {.grows = true};
    put_bytes(&copy, topology->notes.data, topology->notes.length);
    if (!dirty || copy.full || topology->notes.full) {
        free(dirty);
        free(copy.data);
        recorder->cluster = NULL; /* what is recorded no longer fits */
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decision records: out of memory for %u nodes",
                                totals.nodes);
    }
    if (totals.nodes != topology->nodes) {
        free(dirty);
        free(copy.data);
        recorder->cluster = NULL;
        return sluice_fail_with(text, SLUICE_ERROR_INVALID, "decision records: %u nodes noted, the cluster has %u",
                                topology->nodes, totals.nodes);
    }
    for (uint32_t node = 0; node < totals.nodes; node++)
        dirty[node / 64] |= UINT64_C(1) << (node % 64);
    free(recorder->dirty);
    free(recorder->topology.data);
    recorder->dirty = dirty;
    recorder->dirty_words = words;
    recorder->topology = copy;
    recorder->node_count = totals.nodes;
    recorder->cluster = cluster;
    return SLUICE_OK;
}

void sluice_decision_node_changed(struct sluice_decision_recorder *recorder, uint32_t node)
{
    if (node < recorder->node_count)
        recorder->dirty[node / 64] |= UINT64_C(1) << (node % 64);
}

/* Is the topology in the ring? False: what needs it cannot be recorded now. */
static bool record_topology(struct sluice_decision_recorder *recorder)
{
    if (!recorder->cluster)
        return false;
    if (!recorder->topology.data)
        return true;
    /* It may be larger than the ring: the thread gets the memory itself. */
    uint8_t handed[sizeof recorder->topology];
    memcpy(handed, &recorder->topology, sizeof handed);
    struct bytes payload = {.data = handed, .length = sizeof handed};
    if (!record(recorder, RECORD_TOPOLOGY, &payload))
        return false;
    recorder->topology = (struct bytes){0};
    return true;
}

/* Topology and images up to date in the ring? False: the decision that would need them cannot be recorded now. */
static bool record_images(struct sluice_decision_recorder *recorder)
{
    if (!record_topology(recorder))
        return false;
    uint32_t images = 0;
    for (size_t word = 0; word < recorder->dirty_words; word++) {
        while (recorder->dirty[word]) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(recorder->dirty[word]);
            struct sluice_node_view view;
            if (images++ == IMAGES_AT_ONCE || sluice_node_read(recorder->cluster, node, &view, NULL) != SLUICE_OK)
                return false;
            uint8_t data[MAX_IMAGE];
            struct bytes image = {.data = data, .room = sizeof data};
            put_image(&image, node, &view);
            if (!record(recorder, RECORD_IMAGE, &image))
                return false;
            recorder->dirty[word] &= recorder->dirty[word] - 1;
        }
    }
    return true;
}

/* ---- decisions ---- */

static uint64_t hash_bytes(const uint8_t *data, size_t length)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a (G. Fowler, L. C. Noll, K.-P. Vo) */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Was the same said of the job less than `within_s` ago? If not, remember it: in the job's own entry, else in the
 * oldest of the few where it may stand. */
static bool said_before(struct said *table, uint32_t mask, uint32_t job, uint64_t what, uint32_t within_s)
{
    uint32_t now = monotonic_s(), first = job * UINT32_C(2654435769);
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

static void put_decision(struct bytes *to, const struct sluice_decision *decision, uint64_t *what)
{
    bool fits = decision->verdict == SLUICE_OK;
    put_job(to, &decision->job);
    put(to, decision->mode);
    put(to, decision->outcome);
    put(to, (decision->backfill ? 1u : 0u) | (decision->stock_answered ? 2u : 0u) | (decision->stock_fits ? 4u : 0u) |
                (decision->planned ? 8u : 0u));
    put(to, decision->policy);
    put(to, decision->verdict);
    put_request(to, decision->request);
    *what = hash_bytes(to->data, to->length);
    put_bitmap(to, decision->request->allowed, decision->request->allowed_words);
    put_signed(to, fits ? decision->placement->score : 0);
    put_parts(to, fits ? decision->placement->parts : NULL, fits ? decision->placement->part_count : 0);
    uint32_t stock_nodes = decision->stock_fits ? decision->stock_node_count : 0;
    put(to, stock_nodes);
    for (uint32_t i = 0; i < stock_nodes; i++)
        put(to, decision->stock_nodes[i]);
    put(to, decision->core_ns);
    put(to, decision->stock_ns);
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
    if (!record_images(recorder)) {
        atomic_fetch_add_explicit(&recorder->dropped, 1, memory_order_relaxed);
        return;
    }
    (void)record(recorder, RECORD_DECISION, to);
}

static void put_rank(struct bytes *to, uint32_t job_id)
{
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    const struct sluice_rank *rank = ranks ? sluice_ranks_find(ranks, job_id) : NULL;
    put(to, rank != NULL);
    if (rank) {
        const struct sluice_order_policy *policy = sluice_ranks_policy(ranks);
        put_signed(to, sluice_ranks_taken_s(ranks));
        put_signed(to, rank->site);
        put(to, rank->place);
        put(to, rank->gpus);
        put_signed(to, rank->remaining_s);
        put(to, rank->terms.deadline);
        put(to, rank->terms.starving);
        put_signed(to, rank->terms.laxity_s);
        put(to, SLUICE_FACTOR_COUNT);
        for (int factor = 0; factor < SLUICE_FACTOR_COUNT; factor++) {
            put(to, policy->weight[factor]);
            put_signed(to, rank->terms.term[factor]);
        }
        put(to, SLUICE_QUEUE_TERM_COUNT);
        for (int term = 0; term < SLUICE_QUEUE_TERM_COUNT; term++)
            put_signed(to, rank->slurm_term[term]);
    }
    sluice_ranks_release(ranks);
}

void sluice_decision_started(struct sluice_decision_recorder *recorder, const struct sluice_decision_job *job,
                             const struct sluice_part *parts, uint32_t part_count)
{
    if (!recorder)
        return;
    struct bytes *to = &recorder->scratch;
    to->length = 0;
    to->full = false;
    put_job(to, job);
    put_parts(to, parts, part_count);
    put_rank(to, job->id);
    (void)record_topology(recorder); /* its nodes and GPUs have names also where the core was never asked */
    (void)record(recorder, RECORD_START, to);
}

void sluice_decision_planned(struct sluice_decision_recorder *recorder, const struct sluice_decision_plan *plan)
{
    if (!recorder)
        return;
    struct bytes *to = &recorder->plan_scratch;
    to->length = 0;
    to->full = false;
    put(to, plan->job_id);
    put(to, plan->gang);
    put_signed(to, plan->start_s);
    put_parts(to, plan->parts, plan->part_count);
    put_text(to, plan->reason);
    uint64_t what = hash_bytes(to->data, to->length);
    if (said_before(recorder->planned, recorder->said_mask, plan->job_id, what, UINT32_MAX)) {
        atomic_fetch_add_explicit(&recorder->repeated, 1, memory_order_relaxed);
        return;
    }
    put_signed(to, plan->planned_s);
    (void)record(recorder, RECORD_PLAN, to);
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

/* ---- the thread: files ---- */

static void file_name(const struct sluice_decision_recorder *recorder, uint64_t number, char *name, size_t size)
{
    snprintf(name, size, "%s/" FILE_PREFIX "%012" PRIu64, recorder->folder, number);
}

/* The number of a records file of this name; false for any other. */
static bool file_number(const char *name, uint64_t *number)
{
    if (strncmp(name, FILE_PREFIX, sizeof FILE_PREFIX - 1) != 0)
        return false;
    name += sizeof FILE_PREFIX - 1;
    if (strlen(name) != 12 || strspn(name, "0123456789") != 12)
        return false;
    *number = strtoull(name, NULL, 10);
    return true;
}

/* Take the oldest files away until `keep` are left; gives the largest number there is. */
static uint64_t clear_old(const struct sluice_decision_recorder *recorder, uint32_t keep)
{
    uint64_t largest = 0;
    for (bool again = true; again;) {
        DIR *folder = opendir(recorder->folder);
        uint64_t number, smallest = UINT64_MAX, count = 0;
        if (!folder)
            return largest;
        for (const struct dirent *entry; (entry = readdir(folder));) {
            if (!file_number(entry->d_name, &number))
                continue;
            count++;
            largest = number > largest ? number : largest;
            smallest = number < smallest ? number : smallest;
        }
        closedir(folder);
        char name[4096];
        file_name(recorder, smallest, name, sizeof name);
        again = count > keep && unlink(name) == 0;
    }
    return largest;
}

static void complain(struct sluice_decision_recorder *recorder, const char *what, int reason)
{
    struct writer *writer = &recorder->writer;
    if (!writer->complained)
        sluice_log_error("sluice: decision records in %s: %s: %s; trying again every %d s", recorder->folder, what,
                         strerror(reason), RETRY_S);
    writer->complained = true;
    writer->retry = (time_t)monotonic_s() + RETRY_S;
    if (writer->file >= 0)
        close(writer->file);
    writer->file = -1;
    writer->buffer.length = 0;
}

static void write_out(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    size_t done = 0;
    while (writer->file >= 0 && done < writer->buffer.length) {
        ssize_t wrote = write(writer->file, writer->buffer.data + done, writer->buffer.length - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            atomic_fetch_add(&recorder->failed, 1);
            complain(recorder, "write", wrote < 0 ? errno : ENOSPC);
            return;
        }
        done += (size_t)wrote;
        atomic_fetch_add(&recorder->written, (unsigned long long)wrote);
        writer->file_bytes += (uint64_t)wrote;
    }
    writer->buffer.length = 0;
}

static void put_fixed(struct bytes *to, uint64_t number, int bytes)
{
    uint8_t data[8];
    for (int i = 0; i < bytes; i++)
        data[i] = (uint8_t)(number >> (8 * i));
    put_bytes(to, data, (size_t)bytes);
}

/* Length, type, sequence number, time, payload, checksum of all that. */
static void append(struct sluice_decision_recorder *recorder, enum record_type type, int64_t time_us,
                   const uint8_t *payload, size_t length)
{
    struct writer *writer = &recorder->writer;
    struct bytes *to = &writer->buffer;
    if (to->length > BUFFER_BYTES)
        write_out(recorder);
    size_t from = to->length;
    put_fixed(to, length, 4);
    put_fixed(to, type, 2);
    put_fixed(to, 0, 2);
    put_fixed(to, writer->sequence++, 8);
    put_fixed(to, (uint64_t)time_us, 8);
    put_bytes(to, payload, length);
    if (!to->full)
        put_fixed(to, sluice_crc32(to->data + from, to->length - from), 4);
    if (to->full) {
        atomic_fetch_add(&recorder->failed, 1);
        to->full = false;
        to->length = from;
    }
}

/* A new file begins with all that its records will refer to. */
static void append_base(struct sluice_decision_recorder *recorder, int64_t time_us)
{
    struct writer *writer = &recorder->writer;
    put_bytes(&writer->buffer, MAGIC, sizeof MAGIC);
    put_fixed(&writer->buffer, SLUICE_DECISION_FORMAT, 4);
    put_fixed(&writer->buffer, 0, 4);
    if (!writer->topology.length)
        return;
    append(recorder, RECORD_TOPOLOGY, time_us, writer->topology.data, writer->topology.length);
    for (uint32_t node = 0; node < writer->image_room; node++) {
        if (writer->images[node].length)
            append(recorder, RECORD_IMAGE, time_us, writer->images[node].data, writer->images[node].length);
    }
}

static bool make_folder(struct sluice_decision_recorder *recorder)
{
    struct stat status;
    if (mkdir(recorder->folder, 0700) != 0 && errno != EEXIST) {
        complain(recorder, "cannot be made", errno);
        return false;
    }
    if (lstat(recorder->folder, &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != geteuid() ||
        (status.st_mode & 0022)) {
        complain(recorder, "must be a folder of SlurmUser's that only it can write", EPERM);
        return false;
    }
    return true;
}

static bool open_file(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    if ((time_t)monotonic_s() < writer->retry || !make_folder(recorder))
        return false;
    uint64_t largest = clear_old(recorder, recorder->max_files - 1);
    writer->number = (largest > writer->number ? largest : writer->number) + 1;
    char name[4096];
    file_name(recorder, writer->number, name, sizeof name);
    writer->file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (writer->file < 0) {
        complain(recorder, name, errno);
        return false;
    }
    writer->complained = false;
    writer->file_bytes = 0;
    writer->buffer.length = 0;
    append_base(recorder, now_us());
    return true;
}

static void close_file(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    write_out(recorder);
    if (writer->file >= 0) {
        fsync(writer->file);
        close(writer->file);
    }
    writer->file = -1;
}

static void forget_images(struct writer *writer)
{
    for (uint32_t node = 0; node < writer->image_room; node++)
        free(writer->images[node].data);
    free(writer->images);
    writer->images = NULL;
    writer->image_room = 0;
}

/* The node's number stands first in an image. */
static uint32_t image_node(const uint8_t *data, size_t length)
{
    uint64_t number = 0;
    for (size_t i = 0; i < length && i < 5; i++) {
        number |= (uint64_t)(data[i] & 0x7f) << (7 * i);
        if (!(data[i] & 0x80))
            break;
    }
    return number < MAX_NODE_CHECK ? (uint32_t)number : 0;
}

static void remember_image(struct sluice_decision_recorder *recorder, const uint8_t *data, size_t length)
{
    struct writer *writer = &recorder->writer;
    uint32_t node = image_node(data, length);
    if (node >= writer->image_room) {
        uint32_t room = writer->image_room ? writer->image_room : 256;
        while (room <= node)
            room *= 2;
        struct image *grown = realloc(writer->images, room * sizeof *grown);
        if (!grown) {
            atomic_fetch_add(&recorder->failed, 1);
            return;
        }
        memset(grown + writer->image_room, 0, (room - writer->image_room) * sizeof *grown);
        writer->images = grown;
        writer->image_room = room;
    }
    struct image *image = &writer->images[node];
    uint8_t *copy = realloc(image->data, length);
    if (!copy) {
        atomic_fetch_add(&recorder->failed, 1);
        return;
    }
    memcpy(copy, data, length);
    image->data = copy;
    image->length = (uint32_t)length;
}

static void take_topology(struct writer *writer, const void *payload)
{
    free(writer->topology.data);
    memcpy(&writer->topology, payload, sizeof writer->topology);
    forget_images(writer);
}

static void tell_lost(struct sluice_decision_recorder *recorder)
{
    struct writer *writer = &recorder->writer;
    uint64_t dropped = atomic_load(&recorder->dropped);
    if (dropped == writer->lost_told || writer->file < 0)
        return;
    uint8_t data[10];
    struct bytes payload = {.data = data, .room = sizeof data};
    put(&payload, dropped - writer->lost_told);
    append(recorder, RECORD_LOST, now_us(), payload.data, payload.length);
    writer->lost_told = dropped;
}

static void handle(struct sluice_decision_recorder *recorder, const struct slot *slot)
{
    struct writer *writer = &recorder->writer;
    const uint8_t *payload = (const uint8_t *)(slot + 1);
    size_t length = slot->payload;
    bool was_open = writer->file >= 0;
    if (slot->type == RECORD_TOPOLOGY) {
        take_topology(writer, payload);
        payload = writer->topology.data;
        length = writer->topology.length;
    } else if (slot->type == RECORD_IMAGE) {
        remember_image(recorder, payload, length);
    }
    if (was_open && writer->file_bytes + writer->buffer.length > recorder->max_file_bytes) {
        close_file(recorder);
        was_open = false;
    }
    if (!was_open) {
        if (!open_file(recorder)) {
            atomic_fetch_add(&recorder->failed, 1);
            return;
        }
        if (slot->type == RECORD_TOPOLOGY || slot->type == RECORD_IMAGE)
            return; /* the file's base has it */
    }
    append(recorder, slot->type, slot->time_us, payload, length);
}

static void show_counters(const struct sluice_decision_recorder *recorder)
{
    struct sluice_decision_counters counters;
    sluice_decision_read_counters(recorder, &counters);
    atomic_store(sluice_status_counter("decisions.recorded"), counters.recorded);
    atomic_store(sluice_status_counter("decisions.repeated"), counters.repeated);
    atomic_store(sluice_status_counter("decisions.dropped"), counters.dropped);
    atomic_store(sluice_status_counter("decisions.failed"), counters.failed);
    atomic_store(sluice_status_counter("decisions.written_bytes"), counters.written);
}

static void nap(uint32_t milliseconds)
{
    struct timespec time = {.tv_sec = milliseconds / 1000, .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    nanosleep(&time, NULL);
}

static void *run(void *argument)
{
    struct sluice_decision_recorder *recorder = argument;
    uint32_t nap_ms = SHORTEST_NAP_MS;
    for (bool last = false; !last;) {
        last = atomic_load(&recorder->stop); /* what was recorded before is still written */
        bool worked = false;
        for (const struct slot *slot; (slot = ring_peek(&recorder->ring)); worked = true) {
            handle(recorder, slot);
            ring_done(&recorder->ring);
        }
        tell_lost(recorder);
        write_out(recorder);
        atomic_store(&recorder->consumed, atomic_load(&recorder->ring.tail));
        if (worked && recorder->shared)
            show_counters(recorder);
        nap_ms = worked ? SHORTEST_NAP_MS : nap_ms * 2 < LONGEST_NAP_MS ? nap_ms * 2 : LONGEST_NAP_MS;
        if (!last)
            nap(nap_ms);
    }
    close_file(recorder);
    return NULL;
}

bool sluice_decision_flush(struct sluice_decision_recorder *recorder, uint32_t timeout_ms)
{
    uint64_t wanted = atomic_load(&recorder->ring.head);
    for (uint32_t waited = 0; atomic_load(&recorder->consumed) < wanted; waited += SHORTEST_NAP_MS) {
        if (waited > timeout_ms)
            return false;
        nap(SHORTEST_NAP_MS);
    }
    return true;
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
    forget_images(&recorder->writer);
    free(recorder->writer.topology.data);
    free(recorder->writer.buffer.data);
    free(recorder);
}

enum sluice_error sluice_decision_new(const struct sluice_decision_config *config,
                                      struct sluice_decision_recorder **recorder, struct sluice_error_text *text)
{
    uint64_t ring_bytes = config->ring_bytes ? config->ring_bytes : DEFAULT_RING_BYTES;
    if (ring_bytes < 4096 || (ring_bytes & (ring_bytes - 1)))
        return sluice_fail_with(text, SLUICE_ERROR_RANGE,
                                "decision records: ring of %" PRIu64 " bytes: a power of two from 4096", ring_bytes);
    struct sluice_decision_recorder *made = aligned_alloc(64, (sizeof *made + 63) & ~(size_t)63);
    if (!made)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decision records: out of memory");
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
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decision records: out of memory");
    }
    int reason = pthread_create(&made->thread, NULL, run, made);
    if (reason != 0) {
        free_recorder(made);
        return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "decision records: no thread: %s", strerror(reason));
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
        snprintf(folder, sizeof folder, "%s/" SLUICE_DECISION_FOLDER, site->state_folder ? site->state_folder : ".");
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
