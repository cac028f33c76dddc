/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The site factor that each job was given last, so that an operator's is known from it. */
#include <stdlib.h>

#include "order/order_internal.h"

/* The job's slot, or the empty one where it belongs. */
static struct sluice_site_factor *slot_of(const struct sluice_site_factors *factors, uint32_t job_id)
{
    uint32_t at = job_id * UINT32_C(2654435769) & (factors->size - 1);
    while (factors->slots[at].job_id && factors->slots[at].job_id != job_id)
        at = (at + 1) & (factors->size - 1);
    return &factors->slots[at];
}

static const struct sluice_site_factor *find(const struct sluice_site_factors *factors, uint32_t job_id)
{
    const struct sluice_site_factor *slot = factors->size && job_id ? slot_of(factors, job_id) : NULL;
    return slot && slot->job_id ? slot : NULL;
}

static bool is_left(const struct sluice_site_factor *entry, bool (*exists)(uint32_t job_id))
{
    return entry->job_id && (!exists || exists(entry->job_id));
}

/* Without jobs that are gone, and at most a quarter full. */
static bool make_room(struct sluice_site_factors *factors, bool (*exists)(uint32_t job_id))
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < factors->size; i++)
        left += is_left(&factors->slots[i], exists);
    struct sluice_site_factors fresh = {.count = left, .size = 64};
    while (fresh.size / 4 <= left)
        fresh.size *= 2;
    fresh.slots = calloc(fresh.size, sizeof *fresh.slots);
    if (!fresh.slots)
        return false;
    for (uint32_t i = 0; i < factors->size; i++) {
        if (is_left(&factors->slots[i], exists))
            *slot_of(&fresh, factors->slots[i].job_id) = factors->slots[i];
    }
    free(factors->slots);
    *factors = fresh;
    return true;
}

static bool enter(struct sluice_site_factors *factors, const struct sluice_site_factor *entry,
                  bool (*exists)(uint32_t job_id))
{
    if (factors->count >= factors->size / 2 && !find(factors, entry->job_id) && !make_room(factors, exists))
        return false;
    struct sluice_site_factor *slot = slot_of(factors, entry->job_id);
    factors->count += !slot->job_id;
    *slot = *entry;
    return true;
}

static bool is_kept(const struct sluice_site_factor *last, uint32_t has)
{
    return last && last->operators && last->value == has;
}

uint32_t sluice_site_factors_choose(struct sluice_site_factors *factors, uint32_t job_id, uint32_t array_id,
                                    uint32_t has, uint32_t ours, bool (*exists)(uint32_t job_id), bool *fresh)
{
    const struct sluice_site_factor *last = find(factors, job_id);
    *fresh = last && has != SLUICE_SITE_NONE && last->value != has && !last->loaded;
    bool operators = *fresh || is_kept(last ? last : find(factors, array_id), has);
    struct sluice_site_factor entry = {.job_id = job_id, .value = operators ? has : ours, .operators = operators};
    if (enter(factors, &entry, exists))
        return entry.value;
    *fresh = false;
    return ours;
}

bool sluice_site_factors_kept(struct sluice_site_factors *factors, uint32_t job_id, uint32_t array_id, uint32_t has)
{
    bool fresh;
    if (!find(factors, job_id))
        (void)sluice_site_factors_choose(factors, job_id, array_id, has, has, NULL, &fresh);
    return is_kept(find(factors, job_id), has);
}

void sluice_site_factors_enter_loaded(struct sluice_site_factors *factors, uint32_t job_id, uint32_t value)
{
    struct sluice_site_factor entry = {.job_id = job_id, .value = value, .operators = true, .loaded = true};
    (void)enter(factors, &entry, NULL);
}

void sluice_site_factors_clear(struct sluice_site_factors *factors)
{
    free(factors->slots);
    *factors = (struct sluice_site_factors){0};
}
