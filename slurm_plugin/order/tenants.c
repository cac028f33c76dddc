/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Tenants of the order: Slurm's accounts by name, the fair-share tree of them, and what they have used. */
#include "order/order_internal.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"

enum { OTHERS_SHARES = 1 }; /* accounts that are not tenants count together, as one tenant with one share */
/* What a fair-share tree takes in one charge. */
static const uint64_t MOST_CHARGE = UINT64_C(1) << 40;
static const char OTHERS[] = "(others)";
enum { NONE = UINT32_MAX };

bool sluice_account_table_new(struct account_table *table, uint32_t count)
{
    uint32_t size = 16;
    while (size < 2 * count)
        size *= 2;
    table->slots = calloc(size, sizeof *table->slots);
    table->mask = size - 1;
    return table->slots;
}

uint32_t *sluice_account_table_slot(const struct account_table *table, const char *account, const void *names,
                                    size_t stride)
{
    uint32_t at = (uint32_t)sluice_queue_hash(account) & table->mask;
    for (; table->slots[at]; at = (at + 1) & table->mask) {
        const char *known = *(const char *const *)((const char *)names + stride * (table->slots[at] - 1));
        if (strcmp(known, account) == 0)
            break;
    }
    return &table->slots[at];
}

uint32_t sluice_tenant_of(const struct sluice_ranker *ranker, const char *account)
{
    uint32_t slot = *sluice_account_table_slot(&ranker->accounts, account ? account : "", &ranker->tenants[0].account,
                                               sizeof *ranker->tenants);
    return slot ? slot - 1 : 0;
}

void sluice_tenants_free(struct sluice_ranker *ranker)
{
    for (uint32_t i = 0; ranker->tenants && i < ranker->tenant_count; i++)
        free(ranker->tenants[i].account);
    free(ranker->tenants);
    free(ranker->accounts.slots);
    sluice_fairshare_free(ranker->fairshare);
    ranker->tenants = NULL;
    ranker->accounts.slots = NULL;
    ranker->fairshare = NULL;
}

static int compare_numbers(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

/* Tiers as 0, 1, 2 ...: how many different ones are lower. */
static enum sluice_error number_tiers(struct sluice_ranker *ranker, struct sluice_error_text *text)
{
    uint32_t *tiers = calloc(ranker->tenant_count, sizeof *tiers);
    if (!tiers)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                ranker->tenant_count);
    for (uint32_t i = 0; i < ranker->tenant_count; i++)
        tiers[i] = ranker->tenants[i].tier;
    qsort(tiers, ranker->tenant_count, sizeof *tiers, compare_numbers);
    uint32_t different = 0;
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        if (i == 0 || tiers[i] != tiers[different - 1])
            tiers[different++] = tiers[i];
    }
    for (uint32_t i = 0; i < ranker->tenant_count; i++) {
        const uint32_t *found = bsearch(&ranker->tenants[i].tier, tiers, different, sizeof *tiers, compare_numbers);
        ranker->tenants[i].tier = (uint32_t)(found - tiers);
    }
    free(tiers);
    return SLUICE_OK;
}

enum sluice_error sluice_tenants_enter(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                       struct sluice_error_text *text)
{
    ranker->tenants = calloc((size_t)config->tenant_count + 1, sizeof *ranker->tenants);
    if (!ranker->tenants || !sluice_account_table_new(&ranker->accounts, config->tenant_count + 1))
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                config->tenant_count);
    ranker->tenants[0] = (struct tenant){.account = strdup(OTHERS), .shares = OTHERS_SHARES, .parent = NONE};
    ranker->tenant_count = 1;
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        const struct sluice_ranker_tenant *from = &config->tenants[i];
        uint32_t *slot = sluice_account_table_slot(&ranker->accounts, from->account, &ranker->tenants[0].account,
                                                   sizeof *ranker->tenants);
        if (*slot)
            return sluice_fail_with(text, SLUICE_ERROR_DUPLICATE, "tenant %s: given twice", from->account);
        if (from->priority > SLUICE_FACTOR_ONE)
            return sluice_fail_with(text, SLUICE_ERROR_RANGE, "tenant %s: priority %u: at most %d", from->account,
                                    from->priority, SLUICE_FACTOR_ONE);
        struct tenant *to = &ranker->tenants[ranker->tenant_count];
        *to = (struct tenant){.account = strdup(from->account),
                              .parent = NONE,
                              .shares = from->shares,
                              .priority = from->priority,
                              .tier = from->tier};
        ranker->tenant_count++;
        *slot = ranker->tenant_count;
        if (!to->account)
            return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                    config->tenant_count);
    }
    return ranker->tenants[0].account ? number_tiers(ranker, text)
                                      : sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory");
}

/* Parents before children, whatever the list's order: as often as the tree is deep, every tenant whose parent is there
 * is added. */
enum sluice_error sluice_tenants_grow(struct sluice_ranker *ranker, const struct sluice_ranker_config *config,
                                      struct sluice_error_text *text)
{
    enum sluice_error error =
        sluice_fairshare_new(config->tenant_count + 2, config->half_life_s, &ranker->fairshare, text);
    if (error == SLUICE_OK)
        error =
            sluice_fairshare_add(ranker->fairshare, SLUICE_FAIRSHARE_ROOT, OTHERS_SHARES, &ranker->tenants[0].id, text);
    uint32_t left = config->tenant_count;
    for (bool more = true; error == SLUICE_OK && left && more;) {
        more = false;
        for (uint32_t i = 0; error == SLUICE_OK && i < config->tenant_count; i++) {
            const struct sluice_ranker_tenant *from = &config->tenants[i];
            struct tenant *tenant = &ranker->tenants[i + 1];
            uint32_t parent = SLUICE_FAIRSHARE_ROOT;
            if (tenant->id)
                continue;
            if (from->parent && *from->parent) {
                uint32_t above = sluice_tenant_of(ranker, from->parent);
                if (!above)
                    return sluice_fail_with(text, SLUICE_ERROR_UNKNOWN, "tenant %s: its parent %s is not a tenant",
                                            from->account, from->parent);
                parent = ranker->tenants[above].id;
                if (!parent)
                    continue;
                tenant->parent = above;
            }
            error = sluice_fairshare_add(ranker->fairshare, parent, from->shares, &tenant->id, text);
            left--;
            more = true;
        }
    }
    if (error == SLUICE_OK && left)
        return sluice_fail_with(text, SLUICE_ERROR_INVALID, "tenants: the parents of %u of them form a cycle", left);
    return error;
}

void sluice_tenant_charge(struct sluice_ranker *ranker, uint32_t tenant, uint64_t usage, int64_t now_s)
{
    while (usage) { /* at most a few times: 2^40 GPU-milliseconds are 35 GPU-years */
        uint64_t part = usage < MOST_CHARGE ? usage : MOST_CHARGE;
        (void)sluice_fairshare_charge(ranker->fairshare, ranker->tenants[tenant].id, part, now_s, NULL);
        usage -= part;
    }
}

uint64_t sluice_tenant_usage(const struct sluice_ranker *ranker, uint32_t tenant, int64_t now_s)
{
    uint64_t usage = 0;
    (void)sluice_fairshare_usage(ranker->fairshare, ranker->tenants[tenant].id, now_s, &usage, NULL);
    return usage;
}

uint64_t *sluice_tenants_direct_usage(const struct sluice_ranker *ranker, int64_t now_s)
{
    uint64_t *direct = calloc(ranker->tenant_count, sizeof *direct);
    for (uint32_t i = 0; direct && i < ranker->tenant_count; i++)
        direct[i] = sluice_tenant_usage(ranker, i, now_s);
    for (uint32_t i = 0; direct && i < ranker->tenant_count; i++) {
        uint32_t parent = ranker->tenants[i].parent;
        uint64_t below = sluice_tenant_usage(ranker, i, now_s);
        if (parent != NONE)
            direct[parent] -= below < direct[parent] ? below : direct[parent];
    }
    return direct;
}
