/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The picture that a plan is made from, taken under the read locks. */
#include "planner/planner_internal_slurm.h"

#include "planner/planner_slurm.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/runtime.h"
#include "src/common/xstring.h"
#include "src/slurmctld/slurmctld.h"

enum {
    NO_LIMIT_S = 365 * 24 * 3600, /* as sched/backfill takes jobs without a time limit */
    MOST_HOLDS = 64,              /* jobs that sched/backfill keeps nodes for ... */
    HOLD_S = 60,                  /* ... for so long after that was last seen ... */
    HOLD_LATE_S = 120,            /* ... and after the expected start: sched/backfill does not get to it */
    SOON_S = 90,                  /* an expected start that is put off by the hook is expected now */
    ROOM_S = 120,                 /* nodes that came free are kept so long at most, if no pass of sched/backfill ends */
    VAIN_S = 180,                 /* a job that has not started so long after the first start expected ... */
    VAIN_STARTS = 3,              /* ... and has been expected again so often since ... */
    LAPSE_S = 1800,               /* ... has nothing kept for so long */
};

static bool grow(struct sluice_picture *picture, void *array, uint32_t *room, uint32_t wanted, size_t size)
{
    bool grown = sluice_grow_array(array, room, wanted, size);
    picture->failed_memory |= !grown;
    return grown;
}

static void copy_words(const struct sluice_picture *picture, uint64_t *to, bitstr_t *bitmap)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    memset(to, 0, picture->node_words * sizeof *to);
    memcpy(to, from ? from : to, (count < picture->node_words ? count : picture->node_words) * sizeof *to);
}

static bool copy_named(const struct sluice_picture *picture, uint64_t *to, char *names)
{
    bitstr_t *bitmap = NULL;
    bool good = sluice_node_bitmap(names, &bitmap) == SLURM_SUCCESS;
    if (good)
        copy_words(picture, to, bitmap);
    FREE_NULL_BITMAP(bitmap);
    return good;
}

static void add_words(const struct sluice_picture *picture, uint64_t *words, bitstr_t *bitmap)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    for (size_t i = 0; i < picture->node_words && i < count; i++)
        words[i] |= from[i];
}

static void and_words(const struct sluice_picture *picture, uint64_t *words, bitstr_t *bitmap, bool with)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    for (size_t i = 0; i < picture->node_words; i++) {
        uint64_t word = from && i < count ? from[i] : 0;
        words[i] &= with ? word : ~word;
    }
}

static int add_window(void *item, void *argument)
{
    slurmctld_resv_t *resv = item;
    struct sluice_picture *picture = argument;
    if (!resv->node_bitmap || resv->end_time <= picture->now_s)
        return 0;
    struct sluice_window window = {.start_s = resv->start_time, .nodes = resv->node_bitmap};
    if (picture->window_count == SLUICE_PICTURE_WINDOWS) { /* too many: as if it began now */
        and_words(picture, picture->usable, resv->node_bitmap, false);
        return 0;
    }
    picture->windows[picture->window_count++] = window;
    return 0;
}

static void see_owned(struct sluice_picture *picture)
{
    picture->owned_count = 0;
    for (uint32_t node = 0; node < (uint32_t)node_record_count; node++) {
        const node_record_t *record = node_record_table_ptr[node];
        if (record && record->owner != NO_VAL &&
            grow(picture, &picture->owned, &picture->owned_room, picture->owned_count + 1, sizeof *picture->owned))
            picture->owned[picture->owned_count++] = (struct sluice_owned_node){.node = node, .uid = record->owner};
    }
}

static struct sluice_leaving_node *add_leaving(struct sluice_picture *picture, uint32_t node, int64_t needed_s)
{
    if (!grow(picture, &picture->leaving, &picture->leaving_room, picture->leaving_count + 1, sizeof *picture->leaving))
        return NULL;
    struct sluice_leaving_node *leaving = &picture->leaving[picture->leaving_count++];
    *leaving = (struct sluice_leaving_node){.node = node, .needed_s = needed_s, .leaves = true};
    snprintf(leaving->name, sizeof leaving->name, "%s", node_record_table_ptr[node]->name);
    return leaving;
}

bool sluice_leaving_is_told(const struct sluice_leaving_node *leaving)
{
    return leaving->ordered || leaving->asked;
}

static int add_maintained(void *item, void *argument)
{
    slurmctld_resv_t *resv = item;
    struct sluice_picture *picture = argument;
    if (!resv->node_bitmap || !(resv->flags & RESERVE_FLAG_MAINT) || resv->end_time <= picture->now_s ||
        resv->start_time > picture->now_s + picture->rules->compaction_empty_within_s)
        return 0;
    for (uint32_t node = 0; node < (uint32_t)node_record_count; node++) {
        const node_record_t *record = node_record_table_ptr[node];
        if (record && bit_test(resv->node_bitmap, node) && !IS_NODE_DRAIN(record))
            add_leaving(picture, node, resv->start_time > picture->now_s ? resv->start_time : picture->now_s);
    }
    return 0;
}

/* One of those of which `sluice node empty` asks. */
static void add_asked(struct sluice_picture *picture, const struct sluice_empty_ask *ask)
{
    const node_record_t *record = ask->until_s < picture->now_s ? NULL : find_node_record2((char *)ask->node);
    struct sluice_leaving_node *leaving = NULL;
    if (!record)
        return;
    for (uint32_t i = 0; i < picture->leaving_count && !leaving; i++)
        if (picture->leaving[i].node == record->index)
            leaving = &picture->leaving[i];
    if (!leaving && (leaving = add_leaving(picture, record->index, picture->now_s)))
        leaving->leaves = false;
    if (leaving) {
        leaving->asked = true;
        leaving->deadline_s = ask->deadline_s;
    }
}

/* Nodes that drain, those that have maintenance soon, and those that are asked about. */
static void see_leaving(struct sluice_picture *picture)
{
    bool drained = picture->rules->compaction_wait_s && picture->rules->compaction_empty_within_s;
    picture->leaving_count = picture->leaver_count = 0;
    for (uint32_t node = 0; node < (uint32_t)node_record_count; node++) {
        const node_record_t *record = node_record_table_ptr[node];
        int64_t deadline_s;
        if (!record || !IS_NODE_DRAIN(record))
            continue; /* whether jobs are there is not known to slurmctld when it has started */
        bool ordered = sluice_empty_ordered(record->reason, &deadline_s);
        struct sluice_leaving_node *leaving = ordered || drained ? add_leaving(picture, node, picture->now_s) : NULL;
        if (leaving && ordered) {
            leaving->ordered = true;
            leaving->deadline_s = deadline_s;
        }
    }
    if (resv_list && drained)
        list_for_each(resv_list, add_maintained, picture);
    const struct sluice_empty_asks *asks = sluice_moving_asks();
    for (uint32_t i = 0; asks && i < asks->listed.count; i++)
        add_asked(picture, &asks->items[i]);
    picture->told_count = 0;
    for (uint32_t i = 0; i < picture->leaving_count; i++)
        picture->told_count += sluice_leaving_is_told(&picture->leaving[i]);
}

static void free_hold(struct sluice_hold *hold)
{
    free(hold->names);
    free(hold);
}

/* What no longer waits, or waits without an expected start, has none. One that is late stays, as does what is known of
 * the starts that were expected of it. */
static void end_holds(struct sluice_picture *picture, bool all)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < picture->hold_count; i++) {
        struct sluice_hold *hold = picture->holds[i];
        if (hold->waits && hold->seen_s >= picture->now_s - HOLD_S && !all)
            picture->holds[kept++] = hold;
        else
            free_hold(hold);
    }
    picture->hold_count = kept;
}

/* Which nodes may be used at all, and which not at this moment. */
static bool see_nodes(struct sluice_picture *picture)
{
    uint32_t words = ((uint32_t)node_record_count + 63) / 64;
    if (!grow(picture, &picture->bitmaps, &picture->bitmap_room, 6 * words, sizeof *picture->bitmaps))
        return false;
    if (picture->node_words != words)
        end_holds(picture, true);
    picture->node_words = words;
    picture->usable = picture->bitmaps;
    picture->busy = picture->usable + words;
    picture->asleep = picture->busy + words;
    picture->features = picture->asleep + words;
    see_owned(picture);
    see_leaving(picture);
    picture->window_count = 0;
    copy_words(picture, picture->usable, avail_node_bitmap);
    copy_words(picture, picture->busy, cg_node_bitmap);
    copy_words(picture, picture->asleep, SLUICE_POWERED_DOWN);
    add_words(picture, picture->asleep, booting_node_bitmap);
    if (resv_list)
        list_for_each(resv_list, add_window, picture);
    return true;
}

/* One feature's nodes, those that the features before it left, and those that the open parenthesis leaves. */
struct featuring {
    const struct sluice_picture *picture;
    const char *name;
    uint64_t *one, *all, *group;
    uint16_t depth;        /* of parentheses, as Slurm counts: the last feature of one is outside */
    bool or_one, or_group; /* what is before this feature, and before its parenthesis: OR, else AND */
};

static void combine(const struct sluice_picture *picture, uint64_t *left, const uint64_t *right, bool or_them)
{
    for (size_t i = 0; i < picture->node_words; i++)
        left[i] = or_them ? left[i] | right[i] : left[i] & right[i];
}

static void fill(const struct sluice_picture *picture, uint64_t *words)
{
    memset(words, 0xff, picture->node_words * sizeof *words);
}

static int copy_feature(void *item, void *argument)
{
    const node_feature_t *feature = item;
    struct featuring *featuring = argument;
    if (xstrcmp(feature->name, featuring->name))
        return 0;
    copy_words(featuring->picture, featuring->one, feature->node_bitmap);
    return -1;
}

/* As valid_feature_counts (node_scheduler.c) reads them: from left to right, what is in parentheses by itself. */
static int add_feature(void *item, void *argument)
{
    const job_feature_t *feature = item;
    struct featuring *featuring = argument;
    const struct sluice_picture *picture = featuring->picture;
    featuring->name = feature->name;
    memset(featuring->one, 0, picture->node_words * sizeof *featuring->one);
    list_for_each(active_feature_list, copy_feature, featuring);
    if (featuring->depth < feature->paren) {
        featuring->or_group = featuring->or_one;
        featuring->or_one = false;
        fill(picture, featuring->group);
    }
    bool inside = featuring->depth || feature->paren;
    combine(picture, inside ? featuring->group : featuring->all, featuring->one, featuring->or_one);
    if (featuring->depth > feature->paren)
        combine(picture, featuring->all, featuring->group, featuring->or_group);
    featuring->or_one = feature->op_code == FEATURE_OP_OR;
    featuring->depth = feature->paren;
    return 0;
}

/* Keep the nodes with the job's features; a job whose features a request cannot express is left to stock. */
static void keep_features(struct sluice_picture *picture, uint64_t *words, const job_record_t *job)
{
    if (!job->details->feature_list)
        return;
    struct featuring featuring = {.picture = picture,
                                  .one = picture->features,
                                  .all = picture->features + picture->node_words,
                                  .group = picture->features + 2 * picture->node_words};
    fill(picture, featuring.all);
    list_for_each(job->details->feature_list, add_feature, &featuring);
    combine(picture, words, featuring.all, false);
}

int64_t sluice_picture_limit(const struct sluice_picture *picture, const struct sluice_queue_job *entry)
{
    int64_t limit_s = entry->limit_s > 0 && entry->limit_s < NO_LIMIT_S ? entry->limit_s : NO_LIMIT_S;
    int64_t left_s = entry->deadline_s ? entry->deadline_s - picture->queue->taken_s : NO_LIMIT_S;
    return left_s > 0 && left_s < limit_s ? left_s : limit_s;
}

/* The nodes that a job may use: of its partition, up, required or not excluded, with its features, not reserved by others. */
static bool allow_nodes(struct sluice_picture *picture, struct sluice_picture_job *sought,
                        const struct sluice_queue *queue, const struct sluice_queue_job *entry, job_record_t *job)
{
    const struct sluice_queue_partition *partition = &queue->partitions[queue->choices[entry->first_choice].partition];
    uint32_t wanted = picture->words_used + picture->node_words;
    if (!grow(picture, &picture->words, &picture->words_room, wanted, sizeof *picture->words))
        return false;
    uint64_t *words = picture->words + picture->words_used;
    for (size_t i = 0; i < picture->node_words; i++)
        words[i] = picture->usable[i] & (i < queue->node_words ? partition->nodes[i] : 0);
    if (job->details->exc_node_bitmap)
        and_words(picture, words, job->details->exc_node_bitmap, false);
    if (job->details->req_node_bitmap)
        and_words(picture, words, job->details->req_node_bitmap, true);
    keep_features(picture, words, job);
    for (uint32_t i = 0; i < picture->owned_count; i++)
        if (picture->owned[i].uid != job->user_id)
            words[picture->owned[i].node / 64] &= ~(UINT64_C(1) << picture->owned[i].node % 64);
    for (uint32_t w = 0; w < picture->window_count; w++)
        if (picture->windows[w].start_s < queue->taken_s + sluice_picture_limit(picture, entry))
            and_words(picture, words, picture->windows[w].nodes, false);
    sought->words = picture->words_used;
    picture->words_used = wanted;
    return true;
}

static void see_running(struct sluice_picture *picture, const struct sluice_queue_job *entry, const job_record_t *job)
{
    uint64_t ids[64];
    uint32_t count = sluice_mirror_allocations(picture->mirror, entry->id, ids, 64);
    if (!grow(picture, &picture->running, &picture->running_room, picture->running_count + count,
              sizeof *picture->running))
        return;
    int64_t end_s = entry->end_s == INT64_MAX || entry->end_s > picture->now_s + NO_LIMIT_S
                        ? picture->now_s + NO_LIMIT_S
                        : entry->end_s;
    struct sluice_job_watts power = {0};
    if (picture->watts.rules) {
        uint32_t part_count = 0;
        const struct sluice_part *parts = sluice_mirror_parts(picture->mirror, job->job_id, &part_count);
        power = sluice_watts_of_running(&picture->watts, job);
        sluice_budgets_count(&picture->budgets, &power, parts, part_count);
    }
    for (uint32_t i = 0; i < count && i < 64; i++)
        picture->running[picture->running_count++] = (struct sluice_backfill_running){
            .allocation = ids[i], .end_s = end_s, .watts = power.watts, .power_budgets = power.budgets};
}

static void see_sizes(struct sluice_picture *picture)
{
    uint32_t count = sluice_mirror_nodes(picture->mirror);
    if (picture->size_generation == sluice_mirror_generation(picture->mirror) ||
        !grow(picture, &picture->sizes, &picture->size_room, count, sizeof *picture->sizes))
        return;
    for (picture->size_count = 0; picture->size_count < count; picture->size_count++) {
        struct sluice_node_view view = {.gpu_count = 0};
        (void)sluice_node_read(sluice_mirror_cluster(picture->mirror), picture->size_count, &view, NULL);
        picture->sizes[picture->size_count] =
            (struct sluice_node_size){.cpus = (uint32_t)(view.cpus_milli / 1000), .gpus = view.gpu_count};
    }
    picture->size_generation = sluice_mirror_generation(picture->mirror);
}

static struct sluice_node_size largest_node(struct sluice_picture *picture, const struct sluice_queue *queue,
                                            uint32_t partition)
{
    if (!grow(picture, &picture->largest, &picture->largest_room, partition + 1, sizeof *picture->largest))
        return (struct sluice_node_size){0};
    while (picture->largest_count <= partition)
        picture->largest[picture->largest_count++] = (struct sluice_largest_node){.known = false};
    struct sluice_largest_node *largest = &picture->largest[partition];
    const uint64_t *nodes = queue->partitions[partition].nodes;
    for (uint32_t node = 0; !largest->known && node < picture->size_count && node < queue->node_count; node++) {
        struct sluice_node_size size = picture->sizes[node];
        if (!(nodes[node / 64] >> node % 64 & 1))
            continue;
        largest->size.cpus = size.cpus > largest->size.cpus ? size.cpus : largest->size.cpus;
        largest->size.gpus = size.gpus > largest->size.gpus ? size.gpus : largest->size.gpus;
    }
    largest->known = true;
    return largest->size;
}

static void see_request(struct sluice_picture *picture, struct sluice_picture_job *sought,
                        const struct sluice_queue *queue, const struct sluice_queue_job *entry, job_record_t *job)
{
    struct sluice_job_request made;
    struct sluice_node_size largest = largest_node(picture, queue, queue->choices[entry->first_choice].partition);
    sluice_job_request_make(picture->mirror, job, 0, 0, 0, &made, NULL);
    sluice_job_request_set_planes(&made, picture->rules);
    sought->request = made.wanted;
    bool fits = made.fit != SLUICE_JOB_STOCK && made.wanted.cpus_milli <= (int64_t)largest.cpus * 1000 &&
                (made.wanted.flags & SLUICE_GPUS_TOTAL || made.wanted.gpus <= largest.gpus);
    sought->estimated = !fits && sluice_job_request_estimate(picture->mirror, job, largest, &sought->request);
    if (made.fit == SLUICE_JOB_STOCK && !sought->estimated)
        sought->stock = made.reason;
    else
        sought->usable = allow_nodes(picture, sought, queue, entry, job);
    if (sought->usable && picture->watts.rules)
        sought->power = sluice_watts_of_pending(&picture->watts, job, &sought->request);
}

/* ---- jobs that could be moved ---- */

/* Why a running job may not be moved. */
static enum sluice_leave_why bar_of(const struct sluice_picture *picture, const struct sluice_queue_job *entry,
                                    const job_record_t *job)
{
    uint32_t never = SLUICE_QUEUE_HETEROGENEOUS | SLUICE_QUEUE_RESERVATION | SLUICE_QUEUE_CONFIGURING |
                     SLUICE_QUEUE_COMPLETING | SLUICE_QUEUE_SUSPENDED | SLUICE_QUEUE_CUT;
    if (!picture->saves)
        return SLUICE_LEAVE_WHY_OFF;
    if (!IS_JOB_RUNNING(job) || !job->batch_flag || !job->details || job->fed_details || !job->gres_list_alloc ||
        entry->nodes != 1 || !entry->choices || entry->flags & never)
        return SLUICE_LEAVE_WHY_KIND;
    if (!job->details->requeue)
        return SLUICE_LEAVE_WHY_REQUEUE;
    const struct sluice_tenant *tenant = sluice_rules_tenant(picture->rules, job->account);
    if (tenant ? !tenant->movable : !picture->rules->compaction_moves_unlisted)
        return SLUICE_LEAVE_WHY_TENANT;
    int64_t saved_s = sluice_job_times_of(picture->saves, job->job_id);
    return saved_s && saved_s >= job->start_time ? SLUICE_LEAVE_WHY_NONE : SLUICE_LEAVE_WHY_UNSAVED;
}

static void see_leaver(struct sluice_picture *picture, const struct sluice_queue_job *entry, const job_record_t *job)
{
    if (!picture->told_count || !job->node_bitmap || entry->flags & SLUICE_QUEUE_COMPLETING)
        return;
    for (uint32_t i = 0; i < picture->leaving_count; i++) {
        const struct sluice_leaving_node *leaving = &picture->leaving[i];
        if (!sluice_leaving_is_told(leaving) || !bit_test(job->node_bitmap, leaving->node) ||
            !grow(picture, &picture->leavers, &picture->leaver_room, picture->leaver_count + 1,
                  sizeof *picture->leavers))
            continue;
        picture->leavers[picture->leaver_count++] = (struct sluice_leaving_job){
            .leaving = i, .job_id = job->job_id, .end_s = entry->end_s, .bar = bar_of(picture, entry, job)};
    }
}

static void see_movable(struct sluice_picture *picture, const struct sluice_queue *queue,
                        const struct sluice_queue_job *entry, job_record_t *job)
{
    uint64_t allocations[2];
    if (picture->movable_count >= SLUICE_MOST_MOVABLES && !sluice_moving_has(job->job_id))
        return; /* tenants say what has saved, and this is under the locks */
    int64_t saved_s = sluice_job_times_of(picture->saves, job->job_id);
    if (saved_s < job->start_time || !saved_s || bar_of(picture, entry, job) ||
        sluice_mirror_allocations(picture->mirror, job->job_id, allocations, 2) != 1 ||
        !grow(picture, &picture->movables, &picture->movable_room, picture->movable_count + 1,
              sizeof *picture->movables))
        return;
    struct sluice_movable_job *seen = &picture->movables[picture->movable_count];
    *seen = (struct sluice_movable_job){
        .index = queue->running_count - 1, .allocation = allocations[0], .saved_s = saved_s};
    int64_t save_s = sluice_job_times_of(picture->save_times, job->job_id);
    seen->stake = (struct sluice_stake){
        .started_s = job->start_time,
        .saved_s = saved_s,
        .save_s = save_s ? save_s : picture->rules->compaction_save_s, /* the longest that it may take */
        .restart_s = picture->rules->compaction_move_cost_s,
        .gpus_milli = sluice_allocation_gpus_milli(sluice_mirror_cluster(picture->mirror), allocations[0])};
    see_request(picture, &seen->sought, queue, entry, job);
    if (seen->sought.usable && !seen->sought.estimated && seen->sought.request.gpus > 0 &&
        seen->sought.request.nodes_max <= 1)
        picture->movable_count++;
}

void sluice_picture_keep(struct sluice_picture *picture, char *names)
{
    uint32_t made = picture->words_used;
    if (picture->kept_count == sizeof picture->kept / sizeof *picture->kept ||
        !grow(picture, &picture->words, &picture->words_room, made + picture->node_words, sizeof *picture->words) ||
        !copy_named(picture, picture->words + made, names))
        return;
    picture->kept[picture->kept_count++] = (struct sluice_kept_nodes){.names = names, .words = made};
    picture->words_used += picture->node_words;
}

uint32_t sluice_picture_common(struct sluice_picture *picture, uint32_t words, uint32_t others)
{
    uint32_t made = picture->words_used;
    if (!grow(picture, &picture->words, &picture->words_room, made + picture->node_words, sizeof *picture->words))
        return words;
    for (uint32_t i = 0; i < picture->node_words; i++)
        picture->words[made + i] = picture->words[words + i] & picture->words[others + i];
    picture->words_used += picture->node_words;
    return made;
}

uint32_t sluice_picture_count(const struct sluice_picture *picture, uint32_t words)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < picture->node_words; i++)
        count += (uint32_t)__builtin_popcountll(picture->words[words + i]);
    return count;
}

/* ---- nodes that sched/backfill keeps ---- */

/* When room last came on each node, in seconds since 1970; 0: not since the start. For who has a lock on the nodes. */
static struct {
    int64_t *s;
    uint32_t count, room;
} room_came;

void sluice_plan_room_came(const job_record_t *job)
{
    uint32_t nodes = (uint32_t)node_record_count;
    if (!job->node_bitmap ||
        !sluice_grow_array(&room_came.s, &room_came.room, nodes, sizeof *room_came.s)) /* then nothing is kept */
        return;
    for (; room_came.count < nodes; room_came.count++)
        room_came.s[room_came.count] = 0;
    int64_t now_s = time(NULL), last = bit_fls(job->node_bitmap);
    for (int64_t node = bit_ffs(job->node_bitmap); node >= 0 && node <= last && node < room_came.count; node++)
        if (bit_test(job->node_bitmap, node))
            room_came.s[node] = now_s;
}

/* Components are expected each by itself, at first on nodes of others: they start on nodes of their own, so that they
 * need more than is kept for them. Slurm starts nobody before they are looked at again, and then for the nodes that are
 * free; the plan keeps these until then. */
static void see_room(const struct sluice_picture *picture, const struct sluice_queue *queue,
                     const struct sluice_queue_job *entry, struct sluice_hold *hold)
{
    uint64_t *came = hold->nodes + picture->node_words;
    const int64_t least_s = picture->now_s - ROOM_S, since_s = hold->pass_s > least_s ? hold->pass_s : least_s;
    memset(came, 0, picture->node_words * sizeof *came);
    hold->room_came = false;
    for (uint32_t node = 0; entry->het_id && node < room_came.count; node++) {
        const uint64_t bit = UINT64_C(1) << node % 64;
        bool usable = false;
        for (uint32_t c = 0; room_came.s[node] >= since_s && !usable && c < entry->choices; c++) {
            const uint32_t partition = queue->choices[entry->first_choice + c].partition;
            usable = node / 64 < queue->node_words && queue->partitions[partition].nodes[node / 64] & bit;
        }
        if (usable && node / 64 < picture->node_words) {
            came[node / 64] |= bit;
            hold->room_came = true;
        }
    }
}

static bool share_nodes(const struct sluice_picture *picture, const struct sluice_hold *one,
                        const struct sluice_hold *other)
{
    uint64_t shared = 0;
    for (size_t i = 0; i < picture->node_words; i++)
        shared |= one->nodes[i] & other->nodes[i];
    return shared != 0;
}

/* Components that are expected on nodes of their own need no other ones. */
static void forget_room(struct sluice_picture *picture)
{
    for (uint32_t i = 0; i < picture->hold_count; i++) {
        struct sluice_hold *hold = picture->holds[i];
        bool apart = true;
        for (uint32_t j = 0; hold->room_came && apart && j < picture->hold_count; j++)
            apart =
                j == i || picture->holds[j]->het_id != hold->het_id || !share_nodes(picture, hold, picture->holds[j]);
        hold->room_came &= !apart;
    }
}

/* Make room for one more: the last in the order goes, if the job is before it, so that nobody's many jobs that are late
 * in the order leave none for others' first. */
static bool has_place(struct sluice_picture *picture, const struct sluice_plan_place *wanted)
{
    uint32_t last = 0;
    if (picture->hold_count < MOST_HOLDS)
        return true;
    for (uint32_t i = 1; i < picture->hold_count; i++)
        if (sluice_plan_is_before(&picture->holds[last]->place, &picture->holds[i]->place))
            last = i;
    struct sluice_hold *hold = picture->holds[last];
    if (!sluice_plan_is_before(wanted, &hold->place))
        return false;
    picture->holds[last] = picture->holds[--picture->hold_count];
    free_hold(hold);
    return true;
}

static struct sluice_hold *find_hold(const struct sluice_picture *picture, uint32_t job_id)
{
    for (uint32_t i = 0; i < picture->hold_count; i++)
        if (picture->holds[i]->place.job_id == job_id)
            return picture->holds[i];
    return NULL;
}

static struct sluice_hold *add_hold(struct sluice_picture *picture, const struct sluice_plan_place *wanted)
{
    if (!has_place(picture, wanted) ||
        !grow(picture, &picture->holds, &picture->hold_room, picture->hold_count + 1, sizeof *picture->holds))
        return NULL;
    struct sluice_hold *made = calloc(1, sizeof *made + 2 * picture->node_words * sizeof *made->nodes);
    if (made) {
        made->place = *wanted;
        picture->holds[picture->hold_count++] = made;
    }
    return made;
}

/* Names of thousands of nodes take milliseconds, under the locks: they are looked up when they have changed. */
static bool name_nodes(const struct sluice_picture *picture, struct sluice_hold *hold, char *names)
{
    if (hold->names && strcmp(hold->names, names) == 0)
        return true;
    free(hold->names);
    hold->names = copy_named(picture, hold->nodes, names) ? strdup(names) : NULL;
    return hold->names;
}

/* Does sched/backfill expect starts that do not come? Some jobs never start, and it keeps nodes for them again in each
 * pass. Slurm's main scheduler starts others there nevertheless; for the plan the claim lapses for a while. */
static void see_start(const struct sluice_picture *picture, struct sluice_hold *hold, int64_t start_s)
{
    if (!hold->first_start_s || hold->short_of_watts || hold->lapsed_until_s > picture->now_s) {
        hold->first_start_s = hold->start_s = start_s;
        hold->starts = 0;
    }
    hold->starts += start_s != hold->start_s;
    hold->start_s = start_s;
    if (start_s < hold->first_start_s)
        hold->first_start_s = start_s;
    if (picture->now_s > hold->first_start_s + VAIN_S && hold->starts >= VAIN_STARTS) {
        debug("sluice: JobId=%u did not start when it was expected to: no nodes are kept for it for %d s",
              hold->place.job_id, (int)LAPSE_S);
        hold->lapsed_until_s = picture->now_s + LAPSE_S;
    }
}

/* A pass of sched/backfill clears all expected starts and lets go of the locks before all are known again, so that the
 * last one that was seen holds for a while. */
static void see_hold(struct sluice_picture *picture, const struct sluice_queue *queue,
                     const struct sluice_queue_job *entry, const job_record_t *job)
{
    const struct sluice_queue_choice *choice = &queue->choices[entry->first_choice];
    uint32_t cannot = SLUICE_QUEUE_HELD | SLUICE_QUEUE_DEPENDENT | SLUICE_QUEUE_NOT_ELIGIBLE;
    if (entry->flags & cannot)
        return;
    struct sluice_hold *hold = find_hold(picture, job->job_id);
    if (job->sched_nodes && job->start_time) {
        const struct sluice_plan_place place = {
            .tier = queue->partitions[choice->partition].tier, .priority = choice->priority, .job_id = job->job_id};
        if (!hold)
            hold = add_hold(picture, &place);
        if (!hold || !name_nodes(picture, hold, job->sched_nodes))
            return;
        hold->place = place;
        hold->het_id = entry->het_id;
        hold->pass_s = slurmctld_diag_stats.bf_when_last_cycle;
        see_start(picture, hold, job->start_time);
        hold->short_of_watts = false;
        hold->seen_s = picture->now_s;
    }
    if (!hold)
        return;
    see_room(picture, queue, entry, hold);
    hold->waits = true;
}

/* The GPUs of a job that only Slurm finds nodes for, evenly on the nodes that are kept for it: the plan keeps watts for
 * them. */
static void see_drawing(struct sluice_picture *picture, struct sluice_picture_job *sought, const job_record_t *job)
{
    const struct sluice_hold *hold = find_hold(picture, job->job_id);
    const struct sluice_gpus_asked asked = sluice_job_gpus_asked(job);
    uint32_t nodes = 0, count = 0;
    if (!hold || !hold->waits || hold->lapsed_until_s > picture->now_s ||
        (!asked.gpus && !asked.shares && !asked.whole_nodes))
        return;
    for (uint32_t i = 0; i < picture->node_words; i++)
        nodes += (uint32_t)__builtin_popcountll(hold->nodes[i]);
    if (!nodes || !grow(picture, &picture->drawing, &picture->drawing_room, picture->drawing_count + nodes,
                        sizeof *picture->drawing))
        return;
    struct sluice_part *parts = &picture->drawing[picture->drawing_count];
    for (uint32_t node = 0; node < picture->size_count && node < picture->node_words * 64; node++) {
        const uint32_t gpus = sluice_gpus_on_node(&asked, nodes, picture->sizes[node].gpus);
        if (hold->nodes[node / 64] >> node % 64 & 1 && gpus)
            parts[count++] = (struct sluice_part){.node = node, .gpus = (1u << gpus) - 1};
    }
    sought->power = sluice_watts_of_start(&picture->watts, job, parts, count);
    if (!sought->power.watts)
        return;
    sought->drawing = picture->drawing_count;
    sought->drawing_count = count;
    sought->drawing_from_s = hold->start_s > picture->now_s + SOON_S ? hold->start_s : picture->now_s;
    picture->drawing_count += count;
}

void sluice_picture_short_of_watts(struct sluice_picture *picture, uint32_t index)
{
    struct sluice_hold *hold = find_hold(picture, picture->queue->pending[index].id);
    picture->pending[index].short_of_watts = true;
    if (hold)
        hold->short_of_watts = true;
}

uint32_t sluice_picture_keep_out(struct sluice_picture *picture, const struct sluice_plan_place *place, int64_t limit_s,
                                 uint32_t words)
{
    uint32_t made = picture->words_used;
    bool kept = false;
    for (uint32_t h = 0; h < picture->hold_count; h++) {
        struct sluice_hold *hold = picture->holds[h];
        bool overlaps = hold->start_s < picture->now_s + limit_s;
        if (hold->lapsed_until_s > picture->now_s || hold->start_s < picture->now_s - HOLD_LATE_S ||
            !(overlaps || hold->room_came) || !sluice_plan_is_before(&hold->place, place))
            continue;
        if (!kept &&
            !grow(picture, &picture->words, &picture->words_room, made + picture->node_words, sizeof *picture->words))
            return words;
        if (!kept)
            memcpy(picture->words + made, picture->words + words, picture->node_words * sizeof *picture->words);
        kept = true;
        for (size_t i = 0; i < picture->node_words; i++)
            picture->words[made + i] &=
                ~((overlaps ? hold->nodes[i] : 0) | (hold->room_came ? hold->nodes[picture->node_words + i] : 0));
    }
    picture->words_used += kept ? picture->node_words : 0;
    return kept ? made : words;
}

static void see_pending(struct sluice_picture *picture, const struct sluice_queue *queue,
                        const struct sluice_queue_job *entry, job_record_t *job)
{
    uint32_t index = queue->pending_count - 1;
    if (!grow(picture, &picture->pending, &picture->pending_room, queue->pending_count, sizeof *picture->pending))
        return;
    struct sluice_picture_job *sought = &picture->pending[index];
    *sought = (struct sluice_picture_job){
        .tasks = entry->tasks, .rank = sluice_job_rank(job), .begin_s = job->details ? job->details->begin_time : 0};
    if (job->array_recs && job->array_recs->max_run_tasks) {
        uint32_t most = job->array_recs->max_run_tasks, now = job->array_recs->tot_run_tasks;
        uint32_t left = most > now ? most - now : 0;
        sought->tasks = left < sought->tasks ? left : sought->tasks;
    }
    uint32_t never = SLUICE_QUEUE_HETEROGENEOUS | SLUICE_QUEUE_RESERVATION;
    if (entry->choices && job->details && !job->fed_details && !(entry->flags & never))
        see_request(picture, sought, queue, entry, job);
    if (entry->flags & SLUICE_QUEUE_HETEROGENEOUS)
        sought->stock = SLUICE_STOCK_HET;
    if (sought->stock && entry->choices) {
        see_hold(picture, queue, entry, job);
        if (picture->watts.rules)
            see_drawing(picture, sought, job);
    }
    picture->accrual_lost |= sluice_accrual_lost(job);
    sluice_gang_picture_job(entry, index, true, sought->usable && !sought->estimated, job);
}

static void see_job(void *argument, const struct sluice_queue *queue, const struct sluice_queue_job *entry,
                    struct job_record *job)
{
    struct sluice_picture *picture = argument;
    if (IS_JOB_PENDING(job)) {
        see_pending(picture, queue, entry, job);
        return;
    }
    see_running(picture, entry, job);
    if (picture->saves)
        see_movable(picture, queue, entry, job);
    see_leaver(picture, entry, job);
    sluice_gang_picture_job(entry, 0, false, true, job);
}

/* Jobs' watts are found while the picture is taken, if the policy has budgets. */
static void see_budgets(struct sluice_picture *picture, const struct sluice_rules *rules,
                        const struct sluice_draws *draws)
{
    picture->watts.rules = NULL;
    if (!rules->budget_count)
        return;
    sluice_watts_begin(&picture->watts, rules, draws, picture->mirror);
    picture->failed_memory |= !sluice_budgets_bind(&picture->budgets, &picture->watts);
}

bool sluice_picture_take(struct sluice_picture *picture, struct sluice_planner *planner,
                         const struct sluice_rules *rules, const struct sluice_draws *draws, uint64_t *lock_us)
{
    struct sluice_error_text text = {{0}};
    picture->now_s = time(NULL);
    picture->accrual_lost = false;
    picture->rules = rules;
    picture->saves = rules->compaction_wait_s && rules->journal ? sluice_saves_acquire() : NULL;
    picture->save_times = picture->saves ? sluice_save_times_acquire() : NULL;
    if (!sluice_queue_lock()) {
        sluice_job_times_release(picture->saves);
        sluice_job_times_release(picture->save_times);
        return false;
    }
    uint64_t from = sluice_now_us();
    sluice_planner_begin(planner);
    picture->running_count = picture->largest_count = picture->movable_count = picture->drawing_count = 0;
    picture->words_used = 0;
    picture->failed_memory = false;
    for (uint32_t i = 0; i < picture->hold_count; i++)
        picture->holds[i]->waits = false;
    sluice_gang_picture_begin(picture->now_s, rules);
    enum sluice_error failed = sluice_mirror_sync(picture->mirror, true, picture->now_s, &text);
    if (!failed && see_nodes(picture)) {
        see_sizes(picture);
        see_budgets(picture, rules, draws);
        sluice_moving_see(picture);
        sluice_queue_take(picture->queue, see_job, picture);
    } else {
        picture->failed_memory = true;
    }
    sluice_queue_unlock();
    sluice_job_times_release(picture->saves);
    sluice_job_times_release(picture->save_times);
    *lock_us = sluice_now_us() - from;
    if (failed || picture->failed_memory) {
        error("sluice: the planner has no picture of the cluster: %s", failed ? text.text : "no memory");
        return false;
    }
    sluice_gang_picture_end();
    end_holds(picture, sluice_mirror_generation(picture->mirror) != picture->generation);
    forget_room(picture);
    if (sluice_mirror_generation(picture->mirror) != picture->generation) {
        picture->generation = sluice_mirror_generation(picture->mirror);
        sluice_planner_forget(planner);
    }
    return true;
}

bool sluice_picture_new(struct sluice_picture *picture, struct sluice_error_text *text)
{
    memset(picture, 0, sizeof *picture);
    return !sluice_mirror_new(&picture->mirror, text) && (picture->queue = sluice_queue_new(NULL));
}

void sluice_picture_free(struct sluice_picture *picture)
{
    end_holds(picture, true);
    free(picture->holds);
    sluice_mirror_free(picture->mirror);
    sluice_queue_free(picture->queue);
    free(picture->pending);
    free(picture->words);
    free(picture->bitmaps);
    free(picture->owned);
    free(picture->sizes);
    free(picture->largest);
    free(picture->running);
    free(picture->movables);
    free(picture->leaving);
    free(picture->leavers);
    free(picture->drawing);
    sluice_budgets_free(&picture->budgets);
    memset(picture, 0, sizeof *picture);
}
