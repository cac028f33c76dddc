/* SPDX-License-Identifier: Apache-2.0 */
/* Which GPUs of an allocation belong to which of its roles. See sluice/core.h. */
#include "cluster.h"
#include "error.h"
#include "sort.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* From the widest to the narrowest. On a node, of links and NUMA nodes the one that makes fewer parts is the wider. */
enum { LEAF, NODE, WIDER, NARROWER, LEVELS };

struct slot {
    uint32_t domain[LEVELS];
    uint32_t part, gpu, role;
};

/* GPUs of one domain of a level, which are next to each other. */
struct domain {
    uint32_t first, size;
    uint32_t given; /* of them, to roles */
};

struct scratch {
    struct slot *slots, *sorting; /* room for all GPUs each */
    struct domain *domains;
    uint32_t *reached; /* for each sum up to all GPUs: 1 + the domain that completes it; 0: no domains have this sum */
};

static int by_domain(const void *a, const void *b)
{
    const struct slot *x = a, *y = b;
    for (int level = 0; level < LEVELS; level++)
        if (x->domain[level] != y->domain[level])
            return x->domain[level] < y->domain[level] ? -1 : 1;
    return 0;
}

/* ---- where the GPUs are ---- */

/* How many of a node's groups have some of these GPUs. */
static uint32_t count_groups(const uint16_t *groups, uint32_t count, uint32_t gpus)
{
    uint32_t found = 0;
    for (uint32_t group = 0; group < count; group++)
        found += (groups[group] & gpus) != 0;
    return found;
}

static uint32_t group_of(const uint16_t *groups, uint32_t count, uint32_t gpu)
{
    uint32_t group = 0;
    while (group < count && !(groups[group] >> gpu & 1))
        group++;
    return group;
}

/* A node whose place in the network is not known counts as alone below a switch. */
static uint32_t add_slots(const struct sluice_cluster *cluster, const struct sluice_part *part, uint32_t index,
                          struct slot *slots)
{
    const struct shape *shape = sluice_shape_of(cluster, part->node);
    const uint32_t leaf = cluster->nodes[part->node].leaf;
    const bool links_first = count_groups(shape->link_group, shape->link_groups, part->gpus) <=
                             count_groups(shape->numa_group, shape->numa_groups, part->gpus);
    uint32_t count = 0;
    for (uint32_t gpus = part->gpus; gpus; gpus &= gpus - 1) {
        const uint32_t gpu = (uint32_t)__builtin_ctz(gpus);
        const uint32_t link = group_of(shape->link_group, shape->link_groups, gpu);
        const uint32_t numa = group_of(shape->numa_group, shape->numa_groups, gpu);
        slots[count++] = (struct slot){
            .domain = {leaf == cluster->unplaced ? UINT32_MAX - part->node : leaf, part->node,
                       links_first ? link : numa, links_first ? numa : link},
            .part = index,
            .gpu = gpu,
        };
    }
    return count;
}

/* ---- dividing the GPUs of one domain among roles ---- */

static uint32_t find_domains(const struct scratch *scratch, uint32_t first, uint32_t count, int level)
{
    uint32_t found = 0;
    for (uint32_t i = first; i < first + count; i++) {
        if (i == first || scratch->slots[i].domain[level] != scratch->slots[i - 1].domain[level])
            scratch->domains[found++] = (struct domain){.first = i};
        scratch->domains[found - 1].size++;
    }
    return found;
}

static uint32_t left(const struct domain *domain)
{
    return domain->size - domain->given;
}

static void give(const struct scratch *scratch, struct domain *domain, uint32_t role, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        scratch->slots[domain->first + domain->given++].role = role;
}

/* Give the role whole domains, if some have as many GPUs together as it wants (subset sum, the first domains first). */
static bool give_whole(const struct scratch *scratch, uint32_t domains, uint32_t role, uint32_t wanted)
{
    uint32_t *reached = scratch->reached;
    memset(reached, 0, (wanted + 1) * sizeof *reached);
    for (uint32_t d = 0; d < domains && !reached[wanted]; d++) {
        const uint32_t size = scratch->domains[d].size;
        for (uint32_t sum = wanted; !scratch->domains[d].given && sum >= size; sum--)
            if (!reached[sum] && (sum == size || reached[sum - size]))
                reached[sum] = d + 1;
    }
    if (!reached[wanted])
        return false;
    for (uint32_t sum = wanted; sum;) {
        struct domain *domain = &scratch->domains[reached[sum] - 1];
        sum -= domain->size;
        give(scratch, domain, role, domain->size);
    }
    return true;
}

/* The smallest domain that has room for so many GPUs, or else the largest; the first of equal ones. */
static struct domain *best_domain(const struct scratch *scratch, uint32_t domains, uint32_t wanted)
{
    struct domain *best = NULL;
    for (uint32_t d = 0; d < domains; d++) {
        struct domain *domain = &scratch->domains[d];
        const uint32_t size = left(domain);
        if (size && (!best || (size >= wanted ? left(best) < wanted || size < left(best)
                                              : left(best) < wanted && size > left(best))))
            best = domain;
    }
    return best;
}

/*
 * Each step gives a role all that it wants or a domain's rest, so that there are at most as many pairs of role and domain
 * as there are roles and domains, less one; each role whose wish whole domains meet saves one more.
 */
static void divide(const struct scratch *scratch, uint32_t domains, uint32_t *wanted, uint32_t roles)
{
    for (uint32_t role = 0; role < roles; role++)
        if (wanted[role] && give_whole(scratch, domains, role, wanted[role]))
            wanted[role] = 0;
    for (;;) {
        uint32_t role = 0;
        for (uint32_t other = 1; other < roles; other++)
            if (wanted[other] > wanted[role])
                role = other;
        if (!wanted[role])
            return;
        struct domain *domain = best_domain(scratch, domains, wanted[role]);
        const uint32_t count = left(domain) < wanted[role] ? left(domain) : wanted[role];
        give(scratch, domain, role, count);
        wanted[role] -= count;
    }
}

/* The slots have roles already: as many of each as they are to have afterwards, level by level. */
static void divide_from(const struct scratch *scratch, uint32_t first, uint32_t count, int level)
{
    uint32_t wanted[SLUICE_MAX_ROLES] = {0}, roles = 0;
    for (uint32_t i = first; i < first + count; i++)
        roles += !wanted[scratch->slots[i].role]++;
    if (roles < 2 || level == LEVELS)
        return;
    const uint32_t domains = find_domains(scratch, first, count, level);
    if (domains > 1)
        divide(scratch, domains, wanted, SLUICE_MAX_ROLES);
    for (uint32_t begin = first, end; begin < first + count; begin = end) {
        for (end = begin + 1; end < first + count; end++)
            if (scratch->slots[end].domain[level] != scratch->slots[begin].domain[level])
                break;
        divide_from(scratch, begin, end - begin, level + 1);
    }
}

/* ---- the call ---- */

static enum sluice_error check_parts(const struct sluice_cluster *cluster, const struct sluice_part *parts,
                                     uint32_t part_count, uint32_t *gpus, struct sluice_error_text *text)
{
    *gpus = 0;
    for (uint32_t i = 0; i < part_count; i++) {
        if (parts[i].node >= cluster->node_count)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "roles: no node %" PRIu32, parts[i].node);
        if (parts[i].gpus >> sluice_shape_of(cluster, parts[i].node)->gpu_count)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "roles: node %" PRIu32 " has no such GPUs", parts[i].node);
        *gpus += (uint32_t)__builtin_popcount(parts[i].gpus);
        if (*gpus > SLUICE_MAX_ROLE_GPUS)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "roles: more than %d GPUs", SLUICE_MAX_ROLE_GPUS);
    }
    return SLUICE_OK;
}

static void lay_out(const struct sluice_cluster *cluster, const struct sluice_part *parts, uint32_t part_count,
                    const uint32_t *wanted, const struct scratch *scratch)
{
    uint32_t count = 0, role = 0, given = 0;
    for (uint32_t i = 0; i < part_count; i++)
        count += add_slots(cluster, &parts[i], i, scratch->slots + count);
    sluice_sort(scratch->slots, scratch->sorting, count, sizeof *scratch->slots, by_domain);
    for (uint32_t i = 0; i < count; i++, given++) {
        for (; given == wanted[role]; role++)
            given = 0;
        scratch->slots[i].role = role;
    }
    divide_from(scratch, 0, count, LEAF);
}

enum sluice_error sluice_lay_out_roles(const struct sluice_cluster *cluster, const struct sluice_part *parts,
                                       uint32_t part_count, const uint32_t *wanted, uint32_t role_count, uint32_t *gpus,
                                       struct sluice_error_text *text)
{
    uint32_t count;
    uint64_t sum = 0;
    if (role_count > SLUICE_MAX_ROLES)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "roles: %" PRIu32 ", at most %d", role_count, SLUICE_MAX_ROLES);
    enum sluice_error error = check_parts(cluster, parts, part_count, &count, text);
    for (uint32_t role = 0; role < role_count; role++)
        sum += wanted[role];
    if (!error && sum != count)
        error = sluice_fail(text, SLUICE_ERROR_INVALID, "roles: %" PRIu64 " GPUs wanted of %" PRIu32, sum, count);
    if (error || !count)
        return error;
    struct scratch scratch = {.slots = malloc(count * sizeof *scratch.slots),
                              .sorting = malloc(count * sizeof *scratch.sorting),
                              .domains = malloc(count * sizeof *scratch.domains),
                              .reached = malloc((count + 1) * sizeof *scratch.reached)};
    if (scratch.slots && scratch.sorting && scratch.domains && scratch.reached) {
        lay_out(cluster, parts, part_count, wanted, &scratch);
        memset(gpus, 0, (size_t)part_count * role_count * sizeof *gpus);
        for (uint32_t i = 0; i < count; i++)
            gpus[scratch.slots[i].part * role_count + scratch.slots[i].role] |= 1u << scratch.slots[i].gpu;
    } else {
        error = sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "roles: out of memory");
    }
    free(scratch.slots);
    free(scratch.sorting);
    free(scratch.domains);
    free(scratch.reached);
    return error;
}
