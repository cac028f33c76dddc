/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making room by exchanges. Where every hole on a shared GPU is too small for any job, no chain of moves makes room; but
 * two jobs of different sizes that change places, or one that goes into another hole, make one hole larger and another
 * smaller. Each step is that which makes the sum of the squares of what GPUs have free grow most for each job that
 * moves, so that holes grow together into room; it never falls, so that the steps come to an end.
 */
#include "compaction.h"

enum {
    PAIRS = 256,      /* pairs of kinds of slots that are tried for one step, best first */
    MEMBERS = 64,     /* slots of a kind that are tried */
    KINDS_MAX = 1024, /* of slots */
};

/* The slots of equal share and free memory, in a list. */
struct slot_kind {
    int32_t share, free;
    uint32_t first; /* slot */
};

struct slot_kinds {
    struct slot_kind kinds[KINDS_MAX];
    uint32_t count;
    uint16_t table[2 * KINDS_MAX]; /* open addressing: kinds by share and free memory, 0: none, else 1 + its number */
};

/* The jobs of `from` go where those of `to` are, and they to them. */
struct pair {
    int64_t worth; /* of the step, for each job that moves */
    const struct slot_kind *from, *to;
};

/* ---- slots ---- */

/* NULL when there are too many kinds; then the others will do. */
static struct slot_kind *kind_of(struct slot_kinds *kinds, int32_t share, int32_t free)
{
    uint64_t hash = ((uint64_t)(uint32_t)share << 32 | (uint32_t)free) * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)(hash >> 40) % (2 * KINDS_MAX);
    for (; kinds->table[at]; at = (at + 1) % (2 * KINDS_MAX)) {
        struct slot_kind *kind = &kinds->kinds[kinds->table[at] - 1];
        if (kind->share == share && kind->free == free)
            return kind;
    }
    if (kinds->count == KINDS_MAX)
        return NULL;
    kinds->kinds[kinds->count++] = (struct slot_kind){.share = share, .free = free, .first = NONE};
    kinds->table[at] = (uint16_t)kinds->count;
    return &kinds->kinds[kinds->count - 1];
}

/* Only where jobs may start. */
static void add_slot(struct sluice_compaction *compaction, struct slot_kinds *kinds, struct slot slot)
{
    const struct sluice_cluster *cluster = compaction->cluster;
    if (!sluice_node_open(cluster, slot.node) || !(cluster->nodes[slot.node].healthy >> slot.gpu & 1))
        return;
    slot.free = cluster->gpu_free[slot.node].mib[slot.gpu];
    struct slot_kind *kind = kind_of(kinds, slot.share, slot.free);
    if (!kind)
        return;
    slot.next = kind->first;
    kind->first = compaction->slot_count;
    compaction->slots[compaction->slot_count++] = slot;
}

static void list_jobs(struct sluice_compaction *compaction, struct slot_kinds *kinds)
{
    for (uint32_t i = 0; i < compaction->movable_count; i++) {
        const struct part *part = &compaction->now[i];
        const struct need *need = &compaction->needs[compaction->movables[i].request];
        if (part->share && part->share == need->share && need->gpus == 1 && need->plain)
            add_slot(
                compaction, kinds,
                (struct slot){
                    .movable = i, .node = part->node, .share = part->share, .gpu = (uint8_t)__builtin_ctz(part->gpus)});
    }
}

static void list_holes(struct sluice_compaction *compaction, struct slot_kinds *kinds)
{
    const struct sluice_cluster *cluster = compaction->cluster;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const struct node *row = &cluster->nodes[node];
        for (unsigned set = row->healthy & ~(unsigned)row->idle; set; set &= set - 1) {
            uint8_t gpu = (uint8_t)__builtin_ctz(set);
            if (cluster->gpu_free[node].mib[gpu])
                add_slot(compaction, kinds, (struct slot){.movable = NONE, .node = node, .gpu = gpu});
        }
    }
}

/* ---- one step ---- */

/* The best pairs, best first; how many there are. */
static uint32_t list_pairs(const struct slot_kinds *all, struct pair *pairs)
{
    const struct slot_kind *kinds = all->kinds;
    uint32_t found = 0;
    for (uint32_t from = 0; from < all->count; from++) {
        for (uint32_t to = 0; to < all->count; to++) {
            int64_t more = kinds[from].share - kinds[to].share;
            if (more <= 0 || more > kinds[to].free)
                continue;
            int64_t worth = more * (kinds[from].free - kinds[to].free + more) * (kinds[to].share ? 1 : 2);
            if (worth <= 0 || (found == PAIRS && worth <= pairs[PAIRS - 1].worth))
                continue;
            uint32_t place = found < PAIRS ? found++ : PAIRS - 1;
            for (; place > 0 && pairs[place - 1].worth < worth; place--)
                pairs[place] = pairs[place - 1];
            pairs[place] = (struct pair){.worth = worth, .from = &kinds[from], .to = &kinds[to]};
        }
    }
    return found;
}

static const struct need *need_of(const struct sluice_compaction *compaction, const struct slot *slot)
{
    static const struct need nothing;
    return slot->movable == NONE ? &nothing : &compaction->needs[compaction->movables[slot->movable].request];
}

static const struct part *held_at(const struct sluice_compaction *compaction, const struct slot *slot)
{
    static const struct part nothing;
    return slot->movable == NONE ? &nothing : &compaction->now[slot->movable];
}

/* May the job of one slot, if it has one, be on the GPU of another, once the job that is there has left? */
static bool may_go_to(const struct sluice_compaction *compaction, const struct slot *from, const struct slot *to)
{
    if (from->movable == NONE)
        return true;
    const struct sluice_cluster *cluster = compaction->cluster;
    const struct need *need = need_of(compaction, from), *other = need_of(compaction, to);
    const struct part *held = held_at(compaction, from), *leaving = held_at(compaction, to);
    const struct node *row = &cluster->nodes[to->node];
    int32_t cpus = row->cpus_free + leaving->cpus, host_memory = row->host_memory_free + leaving->host_memory;
    if (from->node == to->node) { /* then it leaves as well, and the other comes back */
        cpus += held->cpus - other->cpus;
        host_memory += held->host_memory - other->host_memory;
    }
    return sluice_node_allowed(need, to->node) &&
           sluice_eligible(sluice_shape_of(cluster, to->node), need) >> to->gpu & 1 &&
           need->share <= to->free + leaving->share && need->cpus <= cpus && need->host_memory <= host_memory &&
           need->compute <= cluster->compute_free[to->node].percent[to->gpu] + leaving->compute;
}

static bool affordable(const struct sluice_compaction *compaction, const struct slot *a, const struct slot *b)
{
    uint32_t moves = compaction->moves;
    int64_t cost = compaction->spent;
    const struct slot *both[] = {a, b};
    for (int i = 0; i < 2; i++) {
        if (both[i]->movable == NONE || compaction->moved[both[i]->movable])
            continue;
        moves++;
        if (__builtin_add_overflow(cost, compaction->movables[both[i]->movable].cost, &cost))
            return false;
    }
    return moves <= compaction->most_moves && cost < compaction->most_cost;
}

static void put_on_gpu(struct sluice_compaction *compaction, const struct slot *job, const struct slot *to)
{
    struct sluice_part part = sluice_part_of(need_of(compaction, job), to->node, (uint16_t)(1u << to->gpu), 0);
    sluice_compaction_put_on(compaction, job->movable, &part);
}

static bool try_pair(struct sluice_compaction *compaction, const struct pair *pair)
{
    const struct slot *slots = compaction->slots;
    uint32_t i = pair->from->first;
    for (int froms = 0; i != NONE && froms < MEMBERS; i = slots[i].next, froms++) {
        uint32_t j = pair->to->first;
        for (int tos = 0; j != NONE && tos < MEMBERS; j = slots[j].next, tos++) {
            const struct slot from = slots[i], to = slots[j];
            if ((from.node == to.node && from.gpu == to.gpu) || !affordable(compaction, &from, &to) ||
                !may_go_to(compaction, &from, &to) || !may_go_to(compaction, &to, &from))
                continue;
            sluice_compaction_take_off(compaction, from.movable);
            if (to.movable != NONE)
                sluice_compaction_take_off(compaction, to.movable);
            put_on_gpu(compaction, &from, &to);
            if (to.movable != NONE)
                put_on_gpu(compaction, &to, &from);
            return true;
        }
    }
    return false;
}

bool sluice_compaction_exchange(struct sluice_compaction *compaction)
{
    struct slot_kinds kinds = {0};
    struct pair pairs[PAIRS];
    if (compaction->step_count + STEPS_OF_EXCHANGE > STEPS_MAX)
        return false;
    compaction->slot_count = 0;
    list_jobs(compaction, &kinds);
    list_holes(compaction, &kinds);
    uint32_t count = list_pairs(&kinds, pairs);
    for (uint32_t i = 0; i < count; i++)
        if (try_pair(compaction, &pairs[i]))
            return true;
    return false;
}
