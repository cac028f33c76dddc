/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs and RDMA NICs of a node that are near each other. See sluice/core.h. */
#include "cluster.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

/* What is free of the node, by group. */
struct near {
    uint16_t gpus[SLUICE_MAX_NIC_GROUPS];
    uint32_t nics[SLUICE_MAX_NIC_GROUPS];
    uint64_t groups; /* bit g: group g has GPUs and NICs */
};

/* As many GPUs as are wanted, and the NICs that are paired with them. */
struct pairing {
    uint16_t gpus;
    uint32_t nics;
    int pairs;
};

static struct near near_of(const struct sluice_nic_groups *groups, uint16_t gpus, uint32_t nics)
{
    struct near near;
    memset(&near, 0, sizeof near);
    uint64_t with_gpus = 0, with_nics = 0;
    for (uint32_t set = gpus; set; set &= set - 1) {
        uint32_t gpu = (uint32_t)__builtin_ctz(set);
        near.gpus[groups->gpu_group[gpu]] |= (uint16_t)(1u << gpu);
        with_gpus |= UINT64_C(1) << groups->gpu_group[gpu];
    }
    for (uint32_t set = nics; set; set &= set - 1) {
        uint32_t nic = (uint32_t)__builtin_ctz(set);
        near.nics[groups->nic_group[nic]] |= UINT32_C(1) << nic;
        with_nics |= UINT64_C(1) << groups->nic_group[nic];
    }
    near.groups = with_gpus & with_nics;
    return near;
}

static int least(int a, int b)
{
    return a < b ? a : b;
}

static uint32_t lowest(uint32_t mask, int count)
{
    uint32_t rest = mask;
    for (; count > 0; count--)
        rest &= rest - 1;
    return mask & ~rest;
}

/*
 * Of these GPUs and NICs as many as wanted, with the most pairs. What is fewer (NICs, or else GPUs) is taken one after the
 * other, each where most of the others are left to pair it with. What a group gains by one more never grows, and
 * groups are independent, so that nothing is lost by taking the largest gain first.
 */
static struct pairing pair_up(const struct sluice_nic_groups *groups, uint16_t gpus, int gpu_count, uint32_t nics,
                              int nic_count)
{
    struct pairing found = {0};
    struct near near = near_of(groups, gpus, nics);
    bool fewer_nics = nic_count < gpu_count;
    int each_nic = fewer_nics ? (gpu_count + nic_count - 1) / nic_count : 1;
    int each_gpu = fewer_nics ? 1 : (nic_count + gpu_count - 1) / gpu_count;
    int gpus_left = gpu_count, nics_left = nic_count;
    while (gpus_left && nics_left && near.groups) {
        int most = 0, from = 0;
        for (uint64_t set = near.groups; set; set &= set - 1) {
            int group = __builtin_ctzll(set);
            int gain = fewer_nics ? least(sluice_count(near.gpus[group]), least(each_nic, gpus_left))
                                  : least(__builtin_popcount(near.nics[group]), least(each_gpu, nics_left));
            if (gain > most) {
                most = gain;
                from = group;
            }
        }
        uint16_t own_gpus = (uint16_t)lowest(near.gpus[from], fewer_nics ? most : 1);
        uint32_t own_nics = lowest(near.nics[from], fewer_nics ? 1 : most);
        near.gpus[from] &= (uint16_t)~own_gpus;
        near.nics[from] &= ~own_nics;
        if (!near.gpus[from] || !near.nics[from])
            near.groups &= ~(UINT64_C(1) << from);
        found.gpus |= own_gpus;
        found.nics |= own_nics;
        found.pairs += most;
        gpus_left -= sluice_count(own_gpus);
        nics_left -= __builtin_popcount(own_nics);
    }
    found.gpus |= (uint16_t)lowest(gpus & (uint16_t)~found.gpus, gpus_left);
    return found;
}

/* NICs that are still wanted, near whatever GPU: first those that no idle GPU has near. */
static uint32_t add_nics(const struct sluice_nic_groups *groups, const struct pairing *found, uint16_t idle,
                         uint32_t nics, int count)
{
    uint64_t near_idle = 0;
    uint32_t left = nics & ~found->nics, alone = 0;
    for (uint32_t set = idle & ~(uint32_t)found->gpus; set; set &= set - 1)
        near_idle |= UINT64_C(1) << groups->gpu_group[__builtin_ctz(set)];
    for (uint32_t set = left; set; set &= set - 1)
        if (!(near_idle >> groups->nic_group[__builtin_ctz(set)] & 1))
            alone |= set & -set;
    alone = lowest(alone, count);
    return found->nics | alone | lowest(left & ~alone, count - __builtin_popcount(alone));
}

/* The idle GPUs that may take the place of the part's, and these themselves. */
static uint16_t exchangeable(const struct sluice_cluster *cluster, const struct sluice_part *part)
{
    const struct shape *shape = sluice_shape_of(cluster, part->node);
    uint16_t gpus = cluster->nodes[part->node].idle, own = (uint16_t)part->gpus;
    int first = __builtin_ctz(part->gpus);
    for (int i = 0; !shape->uniform && i < (int)shape->gpu_count; i++)
        if (shape->model[i] != shape->model[first] || shape->capability[i] != shape->capability[first] ||
            shape->memory.mib[i] != shape->memory.mib[first])
            gpus &= (uint16_t) ~(1u << i);
    return part->gpu_memory_mib || (own & ~gpus) ? own : gpus;
}

enum sluice_error sluice_check_nics(const struct sluice_nic_groups *groups, uint32_t gpu_count,
                                    struct sluice_error_text *text)
{
    if (groups->gpu_count != gpu_count)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "groups of %" PRIu32 " GPUs for a node with %" PRIu32,
                           groups->gpu_count, gpu_count);
    if (groups->nic_count > SLUICE_MAX_NICS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " NICs: a node has at most %d", groups->nic_count,
                           SLUICE_MAX_NICS);
    for (uint32_t i = 0; i < groups->gpu_count; i++)
        if (groups->gpu_group[i] >= SLUICE_MAX_NIC_GROUPS)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "GPU %" PRIu32 ": group %d must be below %d", i,
                               groups->gpu_group[i], SLUICE_MAX_NIC_GROUPS);
    for (uint32_t i = 0; i < groups->nic_count; i++)
        if (groups->nic_group[i] >= SLUICE_MAX_NIC_GROUPS)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "NIC %" PRIu32 ": group %d must be below %d", i,
                               groups->nic_group[i], SLUICE_MAX_NIC_GROUPS);
    for (uint32_t i = 0; i < groups->nic_count; i++)
        if (groups->nic_kind[i] >= SLUICE_MAX_NIC_KINDS)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "NIC %" PRIu32 ": kind %d must be below %d", i,
                               groups->nic_kind[i], SLUICE_MAX_NIC_KINDS);
    for (uint32_t i = 0; i < groups->nic_count; i++)
        if (groups->nic_plane[i] > SLUICE_MAX_NIC_PLANES)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "NIC %" PRIu32 ": plane %d must be 0 to %d", i,
                               groups->nic_plane[i], SLUICE_MAX_NIC_PLANES);
    return SLUICE_OK;
}

static enum sluice_error check(const struct sluice_cluster *cluster, const struct sluice_nic_groups *groups,
                               uint32_t nics_free, uint32_t nic_count, const struct sluice_part *part,
                               struct sluice_error_text *text)
{
    if (part->node >= cluster->node_count)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "node %" PRIu32 " is not known", part->node);
    const struct shape *shape = sluice_shape_of(cluster, part->node);
    if (!part->gpus || part->gpus & ~(uint32_t)shape->all)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "GPUs %#" PRIx32 ": must be some of the node's %" PRIu32,
                           part->gpus, shape->gpu_count);
    enum sluice_error error = sluice_check_nics(groups, shape->gpu_count, text);
    if (error)
        return error;
    if (groups->nic_count < 32 && nics_free >> groups->nic_count)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "free NICs %#" PRIx32 ": there are %" PRIu32, nics_free,
                           groups->nic_count);
    if (!nic_count || nic_count > SLUICE_MAX_NICS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " NICs asked: must be 1 to %d", nic_count,
                           SLUICE_MAX_NICS);
    if (__builtin_popcount(nics_free) < (int)nic_count)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "%" PRIu32 " NICs asked, %d are free", nic_count,
                           __builtin_popcount(nics_free));
    return SLUICE_OK;
}

/*
 * GPUs and NICs with the most pairs: `own`, or as many of `others`; those that are not in pairs, too. Of choices with as
 * many pairs `own` come first, then ones within a link domain.
 */
static struct pairing most_pairs(const struct shape *shape, const struct sluice_nic_groups *groups, uint16_t own,
                                 uint16_t others, uint16_t idle, uint32_t nics_free, int nics)
{
    int gpus = sluice_count(own), all = gpus > nics ? gpus : nics;
    struct pairing best = pair_up(groups, own, gpus, nics_free, nics);
    if (best.pairs < all && others != own) {
        struct pairing any = pair_up(groups, others, gpus, nics_free, nics);
        for (int i = 0; i < shape->link_groups && gpus > 1 && best.pairs < any.pairs; i++) {
            uint16_t linked = others & shape->link_group[i];
            struct pairing near = best;
            if (linked != others && sluice_count(linked) >= gpus)
                near = pair_up(groups, linked, gpus, nics_free, nics);
            if (near.pairs == any.pairs)
                best = near;
        }
        if (best.pairs < any.pairs)
            best = any;
    }
    int left = nics - __builtin_popcount(best.nics);
    if (left)
        best.nics = add_nics(groups, &best, idle, nics_free, left);
    return best;
}

enum sluice_error sluice_choose_nics(const struct sluice_cluster *cluster, const struct sluice_nic_groups *groups,
                                     uint32_t nics_free, uint32_t nic_count, bool keep_gpus, struct sluice_part *part,
                                     struct sluice_nic_choice *choice, struct sluice_error_text *text)
{
    enum sluice_error error = check(cluster, groups, nics_free, nic_count, part, text);
    if (error)
        return error;
    uint16_t own = (uint16_t)part->gpus;
    struct pairing best =
        most_pairs(sluice_shape_of(cluster, part->node), groups, own, keep_gpus ? own : exchangeable(cluster, part),
                   cluster->nodes[part->node].idle, nics_free, (int)nic_count);
    part->gpus = best.gpus;
    *choice = (struct sluice_nic_choice){.nics = best.nics, .pairs = (uint32_t)best.pairs};
    return SLUICE_OK;
}

/* ---- NICs that the cluster knows ---- */

uint32_t sluice_nics_accepted(const struct shape *shape, uint64_t kinds, uint32_t plane)
{
    uint32_t accepted = 0;
    if (!kinds && !plane)
        return shape->all_nics;
    for (uint32_t i = 0; i < shape->nics.nic_count; i++)
        accepted |= (uint32_t)((!kinds || (kinds >> shape->nics.nic_kind[i] & 1)) &&
                               (!plane || shape->nics.nic_plane[i] == plane))
                    << i;
    return accepted;
}

uint32_t sluice_count_planes(const struct shape *shape, uint32_t nics)
{
    uint64_t planes = 0;
    for (; nics; nics &= nics - 1)
        planes |= UINT64_C(1) << shape->nics.nic_plane[__builtin_ctz(nics)];
    return (uint32_t)__builtin_popcountll(planes);
}

/* NICs near these GPUs. */
static uint32_t nics_near(const struct shape *shape, uint16_t gpus)
{
    uint32_t near = 0;
    for (int i = 0; i < shape->near_count; i++)
        near |= gpus & shape->near[i].gpus ? shape->near[i].nics : 0;
    return near;
}

/* Squares of how many are in each plane; those of which it is not known come after all others. */
static int unevenness(const struct shape *shape, uint32_t nics)
{
    enum { UNKNOWN = 2 * SLUICE_MAX_NICS * SLUICE_MAX_NICS };
    int in_plane[SLUICE_MAX_NIC_PLANES + 1] = {0}, squares = 0;
    for (; nics; nics &= nics - 1) {
        int plane = shape->nics.nic_plane[__builtin_ctz(nics)];
        squares += plane ? 2 * in_plane[plane]++ + 1 : UNKNOWN;
    }
    return squares;
}

/* The most even choice without a loss of pairs. Of choices as even, NICs that are in pairs come first; where there are no
 * pairs, those that no idle GPU has near. All are compared. */
static uint32_t most_even(const struct shape *shape, uint16_t gpus, int gpu_count, uint32_t near, uint32_t nics,
                          int nic_count)
{
    const int most = sluice_most_pairs(shape, gpus, gpu_count, nics, nic_count);
    const uint32_t unwanted = most ? ~near : near;
    uint32_t best = nics;
    int least = INT_MAX;
    for (uint32_t some = nics; some; some = (some - 1) & nics) {
        if (__builtin_popcount(some) != nic_count)
            continue;
        int cost = (SLUICE_MAX_NICS + 1) * unevenness(shape, some) + __builtin_popcount(some & unwanted);
        if (cost <= least && sluice_most_pairs(shape, gpus, gpu_count, some, nic_count) == most) {
            least = cost;
            best = some;
        }
    }
    return best;
}

/*
 * Many NICs are left out one after the other until all choices can be compared, each from the fullest plane that can spare
 * one without a loss of pairs: first those that make no pair; where there are no pairs, those near idle GPUs. Of numbers of
 * NICs by plane this greedy way finds the least sum of squares (Federgruen, Groenevelt 1986); as each is a certain NIC, it
 * misses it now and then.
 */
uint32_t sluice_nics_evenly(const struct shape *shape, uint16_t gpus, int gpu_count, uint16_t idle, uint32_t nics,
                            int nic_count)
{
    enum { COMPARED = 10 }; /* 252 choices at most */
    const int most = sluice_most_pairs(shape, gpus, gpu_count, nics, nic_count);
    const uint32_t near = nics_near(shape, idle);
    int full[SLUICE_MAX_NIC_PLANES + 1] = {0};
    for (uint32_t set = nics; set; set &= set - 1)
        full[shape->nics.nic_plane[__builtin_ctz(set)]]++;
    full[0] += full[0] ? SLUICE_MAX_NICS : 0; /* not known: the first to be left out */
    for (int left = __builtin_popcount(nics); left > nic_count && left > COMPARED; left--) {
        int fullest = -1;
        uint32_t from = 0;
        for (uint32_t set = nics; set; set &= set - 1) {
            uint32_t nic = set & -set;
            int rank = 2 * full[shape->nics.nic_plane[__builtin_ctz(set)]] + (!(near & nic) == (most > 0));
            if (rank >= fullest && sluice_most_pairs(shape, gpus, gpu_count, nics & ~nic, nic_count) == most) {
                fullest = rank;
                from = nic;
            }
        }
        nics &= ~from;
        full[shape->nics.nic_plane[__builtin_ctz(from)]]--;
    }
    return __builtin_popcount(nics) > nic_count ? most_even(shape, gpus, gpu_count, near, nics, nic_count) : nics;
}

int sluice_count_pairs(const struct shape *shape, uint16_t gpus, uint32_t nics)
{
    int pairs = 0;
    for (int i = 0; i < shape->near_count; i++)
        pairs += least(sluice_count(gpus & shape->near[i].gpus), __builtin_popcount(nics & shape->near[i].nics));
    return pairs;
}

struct offer sluice_offer_with_nics(const struct shape *shape, const struct need *need, uint32_t nics_free,
                                    struct offer offer)
{
    if (!offer.units)
        return offer;
    uint32_t accepted = nics_free & sluice_nics_accepted(shape, need->nic_kinds, need->plane);
    int left = __builtin_popcount(accepted) - (int)need->nics;
    if (left < 0)
        offer.units = 0;
    else if (need->nics_per_gpu)
        offer.units = (uint8_t)least(offer.units, left / (int)need->nics_per_gpu);
    if (need->all_paired)
        offer.units = (uint8_t)least(offer.units, sluice_count_pairs(shape, offer.fit, accepted));
    return offer;
}

void sluice_choose_pairs(const struct sluice_cluster *cluster, const struct need *need, uint16_t fit,
                         struct choice *choice)
{
    const struct shape *shape = sluice_shape_of(cluster, choice->node);
    uint32_t free_nics = cluster->nics_free[choice->node] & sluice_nics_accepted(shape, need->nic_kinds, need->plane);
    uint16_t idle = cluster->nodes[choice->node].idle;
    int gpus = sluice_count(choice->gpus), nics = (int)need->nics + gpus * (int)need->nics_per_gpu;
    uint16_t others = need->share ? choice->gpus : fit;
    struct pairing none = {0};
    if (need->spread_planes && shape->several_planes)
        free_nics = sluice_nics_evenly(shape, others, gpus, idle, free_nics, nics);
    if (!choice->gpus) {
        choice->nics = add_nics(&shape->nics, &none, idle, free_nics, nics);
        return;
    }
    struct pairing best = most_pairs(shape, &shape->nics, choice->gpus, others, idle, free_nics, nics);
    choice->gpus = best.gpus;
    choice->nics = best.nics;
    choice->pairs = (uint16_t)best.pairs;
}

uint32_t sluice_nics_for(const struct shape *shape, uint16_t gpus, uint32_t nics, int count)
{
    struct pairing none = {0};
    if (!count)
        return 0;
    return gpus ? most_pairs(shape, &shape->nics, gpus, gpus, shape->all, nics, count).nics
                : add_nics(&shape->nics, &none, shape->all, nics, count);
}

/* As pair_up, which says why; only the number of pairs. */
int sluice_most_pairs(const struct shape *shape, uint16_t gpus, int gpu_count, uint32_t nics, int nic_count)
{
    if (!gpu_count || !nic_count)
        return 0;
    if (gpu_count == nic_count)
        return least(gpu_count, sluice_count_pairs(shape, gpus, nics));
    bool fewer_nics = nic_count < gpu_count;
    int fewer = fewer_nics ? nic_count : gpu_count, more = fewer_nics ? gpu_count : nic_count;
    int each = (more + fewer - 1) / fewer, whole = 0;
    uint8_t rests[SLUICE_MAX_NICS] = {0}; /* how many groups have so many left for one that would take `each` */
    for (int i = 0; i < shape->near_count; i++) {
        int near_gpus = sluice_count(gpus & shape->near[i].gpus),
            near_nics = __builtin_popcount(nics & shape->near[i].nics);
        int takers = fewer_nics ? near_nics : near_gpus, taken = fewer_nics ? near_gpus : near_nics;
        whole += least(takers, taken / each);
        rests[taken / each < takers ? taken % each : 0]++;
    }
    int left = fewer - least(fewer, whole), pairs = (fewer - left) * each;
    for (int rest = each - 1; rest > 0 && left; rest--) {
        int takers = least(left, rests[rest]);
        pairs += takers * rest;
        left -= takers;
    }
    return least(pairs, more);
}
