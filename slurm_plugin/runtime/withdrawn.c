/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/withdrawn.h"

#include "runtime/controller.h"
#include "runtime/log.h"
#include "runtime/published.h"
#include "runtime/status.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* NODE NUMBER, which has one spelling. */
static bool read_line(struct sluice_line *line, void *item)
{
    static const char in_names[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    struct sluice_withdrawn_gpu *gpu = item;
    uint64_t number;
    if (!sluice_line_name(line, gpu->node, sizeof(gpu->node)) || gpu->node[strspn(gpu->node, in_names)])
        return false;
    const char *digits = line->at;
    if (!sluice_line_number(line, SLUICE_WITHDRAWN_MAX_GPU, &number) || line->at)
        return false;
    gpu->gpu = (uint32_t)number;
    return digits[0] != '0' || line->end - digits == 1;
}

static int compare(const void *a, const void *b)
{
    const struct sluice_withdrawn_gpu *one = a, *other = b;
    int names = strcmp(one->node, other->node);
    return names ? names : (one->gpu > other->gpu) - (one->gpu < other->gpu);
}

static void say_twice(const void *item, struct sluice_error_text *text)
{
    const struct sluice_withdrawn_gpu *gpu = item;
    snprintf(text->text, sizeof(text->text), "GPU %" PRIu32 " of node %s is named twice", gpu->gpu, gpu->node);
}

static _Atomic uint64_t generation_now, *listed_now;

/* The generation last: who looks for the new list just before it is there finds the old one with its own generation,
 * and looks again. */
static void announce(struct sluice_listed *next, const struct sluice_listed *before)
{
    struct sluice_withdrawn *list = (struct sluice_withdrawn *)next;
    atomic_store_explicit(listed_now, next->count, memory_order_relaxed);
    if (next->count || (before && before->count))
        sluice_log_info("sluice: %" PRIu32 " GPUs are out of service", next->count);
    list->generation = atomic_load(&generation_now) + 1;
    atomic_store_explicit(&generation_now, list->generation, memory_order_release);
}

static const struct sluice_listing_kind kind = {.name = "sluice-withdrawn",
                                                .items = "GPUs",
                                                .wanted = "a node's name and a GPU's number",
                                                .most = SLUICE_WITHDRAWN_MAX,
                                                .first = offsetof(struct sluice_withdrawn, gpus),
                                                .size = sizeof(struct sluice_withdrawn_gpu),
                                                .read = read_line,
                                                .compare = compare,
                                                .twice = say_twice};
static struct sluice_published withdrawn = {.kind = &kind,
                                            .name = "withdrawn",
                                            .file = SLUICE_WITHDRAWN_FILE,
                                            .kept = "the GPUs that were out of service stay so",
                                            .announce = announce,
                                            .lock = PTHREAD_MUTEX_INITIALIZER};

enum sluice_error sluice_withdrawn_parse(const char *data, size_t length, struct sluice_withdrawn **made,
                                         struct sluice_error_text *text)
{
    struct sluice_listed *listed;
    enum sluice_error error = sluice_listing_parse(&kind, data, length, &listed, text);
    *made = (struct sluice_withdrawn *)listed;
    return error;
}

uint64_t sluice_withdrawn_generation(void)
{
    return atomic_load_explicit(&generation_now, memory_order_acquire);
}

const struct sluice_withdrawn *sluice_withdrawn_acquire(void)
{
    return (const struct sluice_withdrawn *)sluice_published_acquire(&withdrawn);
}

void sluice_withdrawn_release(const struct sluice_withdrawn *list)
{
    sluice_listed_release((const struct sluice_listed *)list);
}

static bool start(const struct sluice_site *site)
{
    listed_now = sluice_status_counter("withdrawn.listed");
    return sluice_published_start(&withdrawn, site->state_folder);
}

static void stop(void)
{
    sluice_published_stop(&withdrawn);
}

__attribute__((constructor)) static void enlist(void)
{
    static struct sluice_module module = {.name = "withdrawn", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
