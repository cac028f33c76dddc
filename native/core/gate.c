/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's region and handles. The protocol is in gate_lock.c, the decisions in gate_limits.c, gate_queue.c and
 * gate_replicas.c. */
#include "error.h"
#include "gate_parts.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- layout ---- */

/* Where each part of a region begins, in bytes. */
struct layout {
    size_t workers, subjects, services, flows, replicas, tickets;
    size_t subject_buckets, service_buckets, flow_buckets, replica_buckets, prefixes;
    size_t size;
};

static bool shape_is_valid(const struct sluice_gate_shape *shape)
{
    return shape->workers >= 1 && shape->workers <= SLUICE_GATE_MAX_WORKERS && shape->subjects >= 1 &&
           shape->subjects <= SLUICE_GATE_MAX_SUBJECTS && shape->services >= 1 &&
           shape->services <= SLUICE_GATE_MAX_SERVICES && shape->replicas >= 1 &&
           shape->replicas <= SLUICE_GATE_MAX_REPLICAS && shape->tickets >= 1 &&
           shape->tickets <= SLUICE_GATE_MAX_TICKETS && shape->prefixes >= 1 &&
           shape->prefixes <= SLUICE_GATE_MAX_PREFIXES;
}

/* The least power of two that is not less. */
static uint32_t power_of_two(uint32_t least)
{
    uint32_t power = 1;
    while (power < least)
        power *= 2;
    return power;
}

static uint32_t prefix_count(const struct sluice_gate_shape *shape)
{
    return power_of_two(shape->prefixes < GATE_PREFIX_WAYS ? GATE_PREFIX_WAYS : shape->prefixes);
}

static size_t place(size_t *end, size_t count, size_t each)
{
    size_t begin = *end;
    *end += (count * each + SLUICE_GATE_ALIGNMENT - 1) / SLUICE_GATE_ALIGNMENT * SLUICE_GATE_ALIGNMENT;
    return begin;
}

static struct layout lay_out(const struct sluice_gate_shape *shape)
{
    struct layout layout;
    size_t end = 0;
    place(&end, 1, sizeof(struct gate_header));
    layout.workers = place(&end, shape->workers, sizeof(struct gate_worker));
    layout.subjects = place(&end, shape->subjects + 1, sizeof(struct gate_subject));
    layout.services = place(&end, shape->services + 1, sizeof(struct gate_service));
    layout.flows = place(&end, shape->tickets + 1, sizeof(struct gate_flow));
    layout.replicas = place(&end, shape->replicas + 1, sizeof(struct gate_replica));
    layout.tickets = place(&end, shape->tickets + 1, sizeof(struct gate_ticket));
    layout.subject_buckets = place(&end, power_of_two(shape->subjects), sizeof(uint32_t));
    layout.service_buckets = place(&end, power_of_two(shape->services), sizeof(uint32_t));
    layout.flow_buckets = place(&end, power_of_two(shape->tickets), sizeof(uint32_t));
    layout.replica_buckets = place(&end, power_of_two(shape->replicas), sizeof(uint32_t));
    layout.prefixes = place(&end, prefix_count(shape), sizeof(struct gate_prefix));
    layout.size = end;
    return layout;
}

size_t sluice_gate_size(const struct sluice_gate_shape *shape)
{
    return shape && shape_is_valid(shape) ? lay_out(shape).size : 0;
}

static enum sluice_error check_region(const void *region, size_t size, size_t needed, struct sluice_error_text *text)
{
    if (!region || (uintptr_t)region % SLUICE_GATE_ALIGNMENT)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "gate at %p: must be aligned to %d bytes", region,
                           SLUICE_GATE_ALIGNMENT);
    if (size < needed)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "gate of %zu bytes: needs %zu", size, needed);
    return SLUICE_OK;
}

/* ---- format ---- */

static int make_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    int result = pthread_mutexattr_init(&attributes);
    if (result)
        return result;
    result = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    if (!result)
        result = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    if (!result)
        result = pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    return result;
}

enum sluice_error sluice_gate_format(void *region, size_t size, const struct sluice_gate_shape *shape,
                                     struct sluice_error_text *text)
{
    if (!shape)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no gate shape");
    size_t needed = sluice_gate_size(shape);
    if (!needed)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "gate of %" PRIu32 " workers, %" PRIu32 " subjects, %" PRIu32 " services, %" PRIu32
                           " replicas, %" PRIu32 " tickets, %" PRIu32
                           " prefixes: at least 1 of each, at most %d, %d, %d, %d, %d, %d",
                           shape->workers, shape->subjects, shape->services, shape->replicas, shape->tickets,
                           shape->prefixes, SLUICE_GATE_MAX_WORKERS, SLUICE_GATE_MAX_SUBJECTS, SLUICE_GATE_MAX_SERVICES,
                           SLUICE_GATE_MAX_REPLICAS, SLUICE_GATE_MAX_TICKETS, SLUICE_GATE_MAX_PREFIXES);
    enum sluice_error error = check_region(region, size, needed, text);
    if (error)
        return error;
    memset(region, 0, needed);
    struct gate_header *header = region;
    int result = make_mutex(&header->mutex);
    if (result)
        return sluice_fail(text, SLUICE_ERROR_SYSTEM, "a gate's lock: %s", strerror(result));
    header->version = GATE_VERSION;
    header->shape = *shape;
    __atomic_store_n(&header->magic, GATE_MAGIC, __ATOMIC_RELEASE);
    return SLUICE_OK;
}

/* ---- handles ---- */

static struct gate_table table_of(struct gate_table_state *state, void *rows, size_t stride, char *buckets,
                                  uint32_t capacity)
{
    return (struct gate_table){.state = state,
                               .rows = rows,
                               .buckets = (uint32_t *)(void *)buckets,
                               .stride = stride,
                               .capacity = capacity,
                               .mask = power_of_two(capacity) - 1};
}

static void open_region(struct sluice_gate *gate, char *base)
{
    const struct sluice_gate_shape *shape = &gate->shape;
    struct layout layout = lay_out(shape);
    struct gate_header *header = (struct gate_header *)(void *)base;
    gate->header = header;
    gate->workers = (struct gate_worker *)(void *)(base + layout.workers);
    gate->subjects = (struct gate_subject *)(void *)(base + layout.subjects);
    gate->services = (struct gate_service *)(void *)(base + layout.services);
    gate->flows = (struct gate_flow *)(void *)(base + layout.flows);
    gate->replicas = (struct gate_replica *)(void *)(base + layout.replicas);
    gate->tickets = (struct gate_ticket *)(void *)(base + layout.tickets);
    gate->prefixes = (struct gate_prefix *)(void *)(base + layout.prefixes);
    gate->prefix_sets = prefix_count(shape) / GATE_PREFIX_WAYS - 1;
    gate->subject_table = table_of(&header->subjects, gate->subjects, sizeof *gate->subjects,
                                   base + layout.subject_buckets, shape->subjects);
    gate->service_table = table_of(&header->services, gate->services, sizeof *gate->services,
                                   base + layout.service_buckets, shape->services);
    gate->flow_table =
        table_of(&header->flows, gate->flows, sizeof *gate->flows, base + layout.flow_buckets, shape->tickets);
    gate->replica_table = table_of(&header->replicas, gate->replicas, sizeof *gate->replicas,
                                   base + layout.replica_buckets, shape->replicas);
}

enum sluice_error sluice_gate_new(void *region, size_t size, struct sluice_gate **gate, struct sluice_error_text *text)
{
    if (!gate)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no place for the gate's handle");
    enum sluice_error error = check_region(region, size, sizeof(struct gate_header), text);
    if (error)
        return error;
    const struct gate_header *header = region;
    if (__atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) != GATE_MAGIC)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "this memory holds no gate: format it first");
    if (header->version != GATE_VERSION)
        return sluice_fail(text, SLUICE_ERROR_VERSION, "gate of version %" PRIu32 ": this library reads %d",
                           header->version, GATE_VERSION);
    struct sluice_gate_shape shape = header->shape;
    size_t needed = sluice_gate_size(&shape);
    if (!needed || needed > size)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "a gate of %zu bytes in %zu; format it again", needed, size);
    struct sluice_gate *made = calloc(1, sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a gate's handle");
    made->shape = shape;
    open_region(made, region);
    *gate = made;
    return SLUICE_OK;
}

void sluice_gate_free(struct sluice_gate *gate)
{
    free(gate);
}

void sluice_gate_get_shape(const struct sluice_gate *gate, struct sluice_gate_shape *shape)
{
    *shape = gate->shape;
}
