/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "order/order_slurm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "order/order.h"
#include "queue/queue.h"
#include "runtime/runtime.h"
#include "src/common/assoc_mgr.h"
#include "src/slurmctld/locks.h"

enum { SAVE_INTERVAL_S = 60, WRITE_INTERVAL_S = 15, FEW_JOBS = 1000, FULL_PRIORITY = 1000000 };

static struct {
    pthread_t thread;
    pthread_mutex_t lock; /* of `stop` and `woken` */
    pthread_cond_t wake;
    bool started, stop, woken;
    char folder[3072], state[3200], ranks[3200], applied[3200];

    /* the thread's */
    struct sluice_ranker *ranker;
    struct sluice_queue *queue;
    const struct sluice_ranks *before; /* the table of the step before */
    uint64_t rules_generation;
    int64_t saved_s, written_s;
    bool failure_logged, marked;

    pthread_mutex_t factors_lock; /* of the next; innermost */
    struct sluice_site_factors factors;
    bool factors_loaded;

    atomic_bool touched; /* jobs may carry site factors of ours */
    _Atomic uint64_t *update_us, *update_us_most, *take_us, *take_us_most, *take_cpu_us, *step_us, *applied_jobs,
        *apply_us_most, *pending_jobs;
} order = {.lock = PTHREAD_MUTEX_INITIALIZER, .factors_lock = PTHREAD_MUTEX_INITIALIZER};

static void note(_Atomic uint64_t *last, _Atomic uint64_t *most, uint64_t value)
{
    if (last)
        atomic_store(last, value);
    if (value > atomic_load(most))
        atomic_store(most, value);
}

/* ---- hooks ---- */

static bool in_force(void)
{
    return sluice_settings_level() >= SLUICE_LEVEL_PLACE;
}

struct gres_sum {
    uint32_t gpu_id, shard_id;
    uint64_t gpus, shards;
};

static int add_gres(void *entry, void *argument)
{
    const gres_state_t *state = entry;
    const gres_job_state_t *asked = state->gres_data;
    struct gres_sum *sum = argument;
    if (asked && state->plugin_id == sum->gpu_id)
        sum->gpus += asked->total_gres;
    else if (asked && state->plugin_id == sum->shard_id)
        sum->shards += asked->total_gres;
    return 0;
}

/* A job that the table does not have yet. */
static int32_t score_new(const struct sluice_ranks *ranks, const job_record_t *job, int64_t now_s)
{
    struct gres_sum sum = {.gpu_id = gres_build_id("gpu"), .shard_id = gres_build_id("shard")};
    if (job->gres_list_req)
        list_for_each(job->gres_list_req, add_gres, &sum);
    int64_t limit_s =
        job->time_limit == NO_VAL || job->time_limit == INFINITE ? INT64_MAX : (int64_t)job->time_limit * 60;
    int64_t submit_s = job->details && job->details->submit_time > 0 ? job->details->submit_time : now_s;
    int64_t eligible_s = job->details && job->details->accrue_time > 0 ? job->details->accrue_time : now_s;
    struct sluice_order_job asked = {.id = job->job_id,
                                     .submit_s = submit_s,
                                     .eligible_s = eligible_s > submit_s ? eligible_s : submit_s,
                                     .deadline_s =
                                         job->deadline > 0 && job->deadline != (time_t)NO_VAL ? job->deadline : 0,
                                     .remaining_s = limit_s,
                                     .gpus = (uint32_t)sum.gpus};
    return sluice_ranks_score(ranks, job->account, &asked, now_s);
}

static bool job_exists(uint32_t job_id)
{
    return find_job_record(job_id) != NULL;
}

/* Once in a process that is in charge, before the first factor is set. Caller holds factors_lock. */
static void load_factors(void)
{
    struct sluice_error_text text;
    if (order.factors_loaded)
        return;
    order.factors_loaded = true;
    if (sluice_site_factors_load(&order.factors, order.ranks, &text) != SLUICE_OK)
        sluice_log_error("site_factor/sluice: %s", text.text);
}

/* Ours, or the operator's. */
static void give(job_record_t *job, uint32_t ours)
{
    bool fresh = false;
    pthread_mutex_lock(&order.factors_lock);
    load_factors();
    job->site_factor = sluice_site_factors_choose(&order.factors, job->job_id, job->array_job_id, job->site_factor,
                                                  ours, job_exists, &fresh);
    pthread_mutex_unlock(&order.factors_lock);
    if (fresh)
        sluice_log_info("site_factor/sluice: job %u: site factor %" PRId64 " was set by an operator and is kept until "
                        "sitefactor=0; Sluice's would be %" PRId64,
                        job->job_id, (int64_t)job->site_factor - (int64_t)NICE_OFFSET,
                        (int64_t)ours - (int64_t)NICE_OFFSET);
}

static void set_site(const struct sluice_ranks *ranks, job_record_t *job, int64_t now_s)
{
    const struct sluice_rank *rank = sluice_ranks_find(ranks, job->job_id);
    int32_t site = rank ? rank->site : score_new(ranks, job, now_s);
    give(job, NICE_OFFSET + (uint32_t)site);
}

void sluice_order_site_set(job_record_t *job)
{
    if (!in_force())
        return;
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    if (ranks) {
        set_site(ranks, job, time(NULL));
        atomic_store_explicit(&order.touched, true, memory_order_relaxed);
    }
    sluice_ranks_release(ranks);
}

struct updating {
    const struct sluice_ranks *ranks; /* NULL: remove ours */
    int64_t now_s;
    uint64_t pending;
};

static int renew_site(void *item, void *argument)
{
    job_record_t *job = item;
    struct updating *updating = argument;
    if (!IS_JOB_PENDING(job))
        return 0;
    updating->pending++;
    if (updating->ranks)
        set_site(updating->ranks, job, updating->now_s);
    else
        give(job, NICE_OFFSET);
    return 0;
}

void sluice_order_site_update(void)
{
    uint64_t from = sluice_now_us();
    struct updating updating = {.ranks = in_force() ? sluice_ranks_acquire() : NULL, .now_s = time(NULL)};
    /* If there is no order of ours any more, its factors are removed once; otherwise nothing is changed. */
    if (updating.ranks || atomic_load(&order.touched)) {
        list_for_each(job_list, renew_site, &updating);
        atomic_store(&order.touched, updating.ranks != NULL);
    }
    sluice_ranks_release(updating.ranks);
    if (order.started)
        note(order.update_us, order.update_us_most, sluice_now_us() - from);
}

/* ---- the thread ---- */

static void log_failure(const struct sluice_error_text *text)
{
    if (!order.failure_logged)
        sluice_log_error("site_factor/sluice: %s", text->text);
    order.failure_logged = true;
}

/* The policy in the ranker's form. The caller frees config->tenants. */
static bool config_from(const struct sluice_rules *rules, struct sluice_ranker_config *config)
{
    struct sluice_ranker_tenant *tenants = calloc((size_t)rules->tenant_count + 1, sizeof *tenants);
    if (!tenants)
        return false;
    for (uint32_t i = 0; i < rules->tenant_count; i++) {
        const struct sluice_tenant *from = &rules->tenants[i];
        tenants[i] = (struct sluice_ranker_tenant){
            .account = from->account,
            .parent = from->parent,
            .shares = from->shares,
            .priority = (uint32_t)((uint64_t)from->default_priority * SLUICE_FACTOR_ONE / FULL_PRIORITY),
            .tier = from->tier};
    }
    *config = (struct sluice_ranker_config){.policy = rules->order,
                                            .half_life_s = rules->fair_share_half_life_s,
                                            .tenants = tenants,
                                            .tenant_count = rules->tenant_count};
    if (!rules->deadlines)
        config->policy.weight[SLUICE_FACTOR_DEADLINE] = 0;
    return true;
}

/* A ranker that follows the policy in force; false where there is none. */
static bool follow_policy(void)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    bool good = settings != NULL;
    if (good && (!order.ranker || settings->rules_generation != order.rules_generation)) {
        struct sluice_ranker_config config;
        struct sluice_error_text text = {"out of memory"};
        enum sluice_error error = SLUICE_ERROR_NO_MEMORY;
        if (config_from(settings->rules, &config)) {
            error = order.ranker ? sluice_ranker_configure(order.ranker, &config, &text)
                                 : sluice_ranker_new(&config, &order.ranker, &text);
            free((void *)(uintptr_t)config.tenants);
        }
        if (error != SLUICE_OK)
            log_failure(&text); /* the policy before stays in force */
        else
            order.failure_logged = false;
        order.rules_generation = settings->rules_generation;
        good = order.ranker != NULL;
    }
    sluice_settings_release(settings);
    return good;
}

struct seeding {
    int gpu_position;
    int64_t now_s;
};

/* Users' associations: an account's own are the sums of those below it. */
static int seed_from(void *item, void *argument)
{
    const slurmdb_assoc_rec_t *association = item;
    const struct seeding *seeding = argument;
    if (!association->user || !association->usage || !association->usage->usage_tres_raw)
        return 0;
    long double gpu_seconds = association->usage->usage_tres_raw[seeding->gpu_position];
    if (gpu_seconds >= 1)
        sluice_ranker_seed(order.ranker, association->acct, (uint64_t)gpu_seconds, seeding->now_s);
    return 0;
}

/* What Slurm knows of usage, where the site tracks gres/gpu (AccountingStorageTRES). */
static void seed_usage(void)
{
    assoc_mgr_lock_t locks = {.assoc = READ_LOCK, .tres = READ_LOCK};
    slurmdb_tres_rec_t gpu = {.type = (char *)(uintptr_t) "gres", .name = (char *)(uintptr_t) "gpu"};
    struct seeding seeding = {.now_s = time(NULL)};
    sluice_ranker_seed(order.ranker, "", 0, seeding.now_s);
    assoc_mgr_lock(&locks);
    seeding.gpu_position = assoc_mgr_find_tres_pos(&gpu, true);
    if (seeding.gpu_position >= 0 && assoc_mgr_assoc_list)
        list_for_each(assoc_mgr_assoc_list, seed_from, &seeding);
    assoc_mgr_unlock(&locks);
}

static void remember_usage(void)
{
    struct sluice_error_text text;
    if (!sluice_ranker_wants_usage(order.ranker))
        return;
    if (sluice_ranker_load(order.ranker, order.state, &text) != SLUICE_OK)
        sluice_log_error("site_factor/sluice: %s", text.text);
    if (sluice_ranker_wants_usage(order.ranker))
        seed_usage();
}

static void save_usage(int64_t now_s)
{
    struct sluice_error_text text;
    order.saved_s = now_s;
    if (sluice_ranker_save(order.ranker, order.state, &text) != SLUICE_OK)
        log_failure(&text);
}

/* ---- operators' factors ---- */

/* Which of the queue's factors an operator set; the others are ours, also after a start. */
static void mark_kept(struct sluice_queue *queue)
{
    for (uint32_t i = 0; i < queue->pending_count; i++) {
        struct sluice_queue_job *job = &queue->pending[i];
        pthread_mutex_lock(&order.factors_lock); /* for one job: hooks should not wait */
        load_factors();
        if (sluice_site_factors_kept(&order.factors, job->id, job->array_id, job->site_factor))
            job->flags |= SLUICE_QUEUE_SITE_KEPT;
        pthread_mutex_unlock(&order.factors_lock);
    }
}

/* Another controller is in charge: it knows better. */
static void forget_factors(void)
{
    pthread_mutex_lock(&order.factors_lock);
    sluice_site_factors_clear(&order.factors);
    order.factors_loaded = false;
    pthread_mutex_unlock(&order.factors_lock);
}

/* ---- factors that should not wait ---- */

struct change {
    uint32_t job;
    int64_t by;
};

static int compare_changes(const void *left, const void *right)
{
    int64_t a = ((const struct change *)left)->by, b = ((const struct change *)right)->by;
    return (a < b) - (a > b);
}

/* Jobs whose factor differs from what Slurm has, for a reason other than age; the largest changes first. Without
 * accounting Slurm never asks for new factors: then for any reason. */
static struct change *find_changes(const struct sluice_ranks *ranks, uint32_t *found)
{
    uint32_t count, changes = 0;
    const struct sluice_rank *all = sluice_ranks_all(ranks, &count);
    struct change *list = calloc(count ? count : 1, sizeof *list);
    for (uint32_t i = 0; list && i < count; i++) {
        int64_t by = (int64_t)all[i].site - ((int64_t)all[i].site_was - (int64_t)NICE_OFFSET);
        const struct sluice_rank *last = order.before ? sluice_ranks_find(order.before, all[i].job_id) : NULL;
        if (by != 0 && !all[i].operators && (!assoc_mgr_root_assoc || !last || last->urgent != all[i].urgent))
            list[changes++] = (struct change){.job = all[i].job_id, .by = by < 0 ? -by : by};
    }
    if (list)
        qsort(list, changes, sizeof *list, compare_changes);
    *found = changes < SLUICE_ORDER_MAX_APPLIED ? changes : SLUICE_ORDER_MAX_APPLIED;
    return list;
}

static void apply(const struct change *changes, uint32_t count)
{
    const slurmctld_lock_t locks = {.conf = READ_LOCK, .job = WRITE_LOCK, .node = READ_LOCK, .part = READ_LOCK};
    for (uint32_t from = 0; from < count; from += SLUICE_ORDER_BATCH) {
        if (slurmctld_config.shutdown_time)
            return;
        lock_slurmctld(locks);
        uint64_t since = sluice_now_us();
        for (uint32_t i = from; i < count && i < from + SLUICE_ORDER_BATCH; i++) {
            job_record_t *job = find_job_record(changes[i].job);
            if (job && IS_JOB_PENDING(job) && job->priority > 0 && !job->direct_set_prio) {
                set_job_prio(job); /* asks site_factor_p_set first */
                atomic_fetch_add(order.applied_jobs, 1);
            }
        }
        last_job_update = time(NULL);
        note(NULL, order.apply_us_most, sluice_now_us() - since);
        unlock_slurmctld(locks);
        sched_yield();
    }
}

/* set_job_prio does this only with Slurm's own multifactor priorities that may also fall. */
static bool may_apply(void)
{
    return in_force() && slurm_conf.priority_type && strcmp(slurm_conf.priority_type, "priority/multifactor") == 0 &&
           !(slurm_conf.priority_flags & PRIORITY_FLAGS_INCR_ONLY);
}

/* A file says that jobs may carry our factors: slurmctld may be started at a lower level next time. It is written
 * before the first job can have one, and removed when they were removed. */
static void mark(bool touched)
{
    if (touched == order.marked)
        return;
    if (touched) {
        int descriptor = open(order.applied, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (descriptor < 0)
            return; /* tried again with the next step */
        close(descriptor);
    } else {
        unlink(order.applied);
    }
    order.marked = touched;
}

static void step(void)
{
    struct sluice_error_text text;
    if (!follow_policy() || !sluice_queue_lock()) {
        return;
    }
    sluice_queue_take(order.queue, NULL, NULL);
    sluice_queue_unlock();
    if (in_force())
        mark_kept(order.queue);
    note(order.take_us, order.take_us_most, order.queue->taken_us);
    atomic_store(order.take_cpu_us, order.queue->taken_cpu_us);
    atomic_store(order.pending_jobs, order.queue->pending_count);
    uint64_t from = sluice_now_us();
    remember_usage();
    if (in_force())
        mark(true);
    if (sluice_ranker_step(order.ranker, order.queue, &text) != SLUICE_OK) {
        log_failure(&text);
        return;
    }
    atomic_store(order.step_us, sluice_now_us() - from);
    const struct sluice_ranks *ranks = sluice_ranks_acquire();
    if (ranks && may_apply()) {
        uint32_t count = 0;
        struct change *changes = find_changes(ranks, &count);
        if (changes)
            apply(changes, count);
        free(changes);
    }
    int64_t now_s = order.queue->taken_s;
    if (ranks && (now_s - order.written_s >= WRITE_INTERVAL_S || order.queue->pending_count <= FEW_JOBS)) {
        order.written_s = now_s;
        if (sluice_ranks_write(ranks, order.ranks, &text) != SLUICE_OK)
            log_failure(&text);
    }
    if (now_s - order.saved_s >= SAVE_INTERVAL_S)
        save_usage(now_s);
    sluice_ranks_release(order.before);
    order.before = ranks;
}

/* No order any more: at a lower level, or while another controller is in charge. */
static void rest(void)
{
    sluice_ranks_withdraw();
    sluice_ranks_release(order.before);
    order.before = NULL;
    if (order.ranker && sluice_queue_lock()) { /* else another controller writes it */
        sluice_queue_unlock();
        save_usage(time(NULL));
    }
    sluice_ranker_free(order.ranker);
    order.ranker = NULL;
}

static bool make_folder(void)
{
    struct stat status;
    (void)mkdir(order.folder, 0700);
    return lstat(order.folder, &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == geteuid() &&
           !(status.st_mode & 0022);
}

/* False: stop. */
static bool wait_for(int64_t seconds)
{
    struct timespec until = sluice_deadline(CLOCK_MONOTONIC, seconds * 1000);
    pthread_mutex_lock(&order.lock);
    while (!order.stop && !order.woken && pthread_cond_timedwait(&order.wake, &order.lock, &until) != ETIMEDOUT)
        ;
    order.woken = false;
    bool go_on = !order.stop;
    pthread_mutex_unlock(&order.lock);
    return go_on;
}

static void *run(void *argument)
{
    (void)argument;
    bool resting = true;
    int64_t wait_s = 1;
    while (wait_for(wait_s)) {
        bool wanted = sluice_settings_level() >= SLUICE_LEVEL_SHADOW && sluice_in_charge() && make_folder();
        wait_s = wanted ? SLUICE_ORDER_INTERVAL_S : 1;
        if (wanted)
            step();
        else if (!resting)
            rest();
        resting = !wanted;
        if (!sluice_in_charge())
            forget_factors();
        if (sluice_in_charge() && !in_force())
            mark(atomic_load(&order.touched));
    }
    if (!resting && order.ranker)
        save_usage(order.queue->taken_s); /* slurmctld ends: its locks must not be taken any more */
    return NULL;
}

void sluice_order_wake(void)
{
    pthread_mutex_lock(&order.lock);
    order.woken = true;
    if (order.started)
        pthread_cond_signal(&order.wake);
    pthread_mutex_unlock(&order.lock);
}

static bool start(const struct sluice_site *site)
{
    int length = snprintf(order.folder, sizeof order.folder, "%s/" SLUICE_STATE_FOLDER, site->state_folder);
    if (length < 0 || (size_t)length >= sizeof order.folder)
        return false;
    snprintf(order.state, sizeof order.state, "%s/order.state", order.folder);
    snprintf(order.ranks, sizeof order.ranks, "%s/order.ranks", order.folder);
    snprintf(order.applied, sizeof order.applied, "%s/order.applied", order.folder);
    order.update_us = sluice_status_counter("site_factor.update_us_last");
    order.update_us_most = sluice_status_counter("site_factor.update_us_most");
    order.take_us = sluice_status_counter("order.queue_us_last");
    order.take_us_most = sluice_status_counter("order.queue_us_most");
    order.take_cpu_us = sluice_status_counter("order.queue_cpu_us_last");
    order.step_us = sluice_status_counter("order.step_us_last");
    order.applied_jobs = sluice_status_counter("order.applied_jobs");
    order.apply_us_most = sluice_status_counter("order.apply_us_most");
    order.pending_jobs = sluice_status_counter("order.pending_jobs");
    order.marked = access(order.applied, F_OK) == 0;
    atomic_store(&order.touched, order.marked);
    order.queue = sluice_queue_new(NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&order.wake, &attributes);
    pthread_condattr_destroy(&attributes);
    order.stop = order.woken = false;
    order.rules_generation = 0;
    order.started = order.queue && pthread_create(&order.thread, NULL, run, NULL) == 0;
    if (!order.started) {
        sluice_queue_free(order.queue);
        order.queue = NULL;
    }
    return order.started;
}

static void stop(void)
{
    pthread_mutex_lock(&order.lock);
    order.stop = true;
    pthread_cond_signal(&order.wake);
    pthread_mutex_unlock(&order.lock);
    pthread_join(order.thread, NULL);
    order.started = false;
    sluice_ranks_withdraw();
    sluice_ranks_release(order.before);
    order.before = NULL;
    sluice_ranker_free(order.ranker);
    order.ranker = NULL;
    sluice_queue_free(order.queue);
    order.queue = NULL;
    forget_factors();
    pthread_cond_destroy(&order.wake);
}

static struct sluice_module module = {.name = "order", .start = start, .stop = stop};

__attribute__((constructor)) static void announce(void)
{
    sluice_controller_module(&module);
}
