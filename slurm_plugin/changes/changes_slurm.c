/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The thread that looks which jobs changed, while the controllers' daemon wants to know: it touches `changes.wanted`.
 *
 * A look is one pass over all jobs under slurmctld's read locks, a few hundred nanoseconds each, LOOK_SLICE of them under
 * one hold of the locks, and takes at most one part in SHARE of a processor. What changed is packed by Slurm's own
 * function, as for squeue, SLICE jobs under one hold; all else happens without locks, and files are written by this
 * thread alone.
 */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#if SLUICE_PACKS_JOBS

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "changes/changes.h"
#include "queue/queue.h"
#include "runtime/runtime.h"
#include "src/common/assoc_mgr.h"
#include "src/common/pack.h"
#include "src/common/slurm_protocol_pack.h"
#include "src/slurmctld/locks.h"

enum {
    PERIOD_MS = 500, /* from one look's begin to the next */
    LEAST_PAUSE_MS = 50,
    SHARE = 8,
    WANTED_S = 60,
    LOOK_SLICE = 20000, /* jobs under one hold of the locks: looked at; each hold may wait for a scheduler first ... */
    SLICE = 100,        /* ... and packed */
    RETRY_MS = 10000,
    NODES_WIDTH = 16,
};

static struct {
    pthread_t thread;
    pthread_mutex_t lock; /* of `stop` */
    pthread_cond_t wake;
    bool stop, failure_logged;
    char folder[3072], wanted[3200];
    struct sluice_changes *changes; /* NULL: resting */
    struct sluice_changes_files files;
    uint32_t *ids; /* of all jobs, as a look began */
    uint32_t id_count, id_room;
    int64_t looked_s; /* the second in which the last look began */
    _Atomic uint64_t *look_us, *look_cpu_us, *held_us_most, *pack_us_most, *jobs;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- a look ---- */

/* Of all that squeue shows. */
static uint64_t print_of(const job_record_t *job, int64_t now_s)
{
    const sluice_job_details *details = job->details;
    uint64_t print = sluice_print_number(0, (uint64_t)job->job_state << 32 | job->state_reason);
    print = sluice_print_number(print, (uint64_t)job->start_time);
    print = sluice_print_number(print, (uint64_t)job->end_time);
    print = sluice_print_number(print, (uint64_t)job->time_limit << 32 | job->priority);
    print = sluice_print_number(print, (uint64_t)job->node_cnt << 32 | job->total_cpus);
    print = sluice_print_number(print, (uint64_t)job->cpu_cnt << 32 | job->array_task_id);
    print = sluice_print_number(print, (uint64_t)job->array_job_id << 32 | job->user_id);
    print = sluice_print_number(print, (uint64_t)(uintptr_t)job->part_ptr);
    print = sluice_print_number(print, (uint64_t)(uintptr_t)job->qos_ptr);
    print = sluice_print_number(print, job->array_recs ? (uint64_t)job->array_recs->task_cnt + 1 : 0);
    if (IS_JOB_COMPLETING(job) && job->node_bitmap_cg)
        print = sluice_print_number(print, (uint64_t)bit_set_count(job->node_bitmap_cg));
    if (IS_JOB_PENDING(job) && job->start_time &&
        job->start_time < now_s) /* Slurm says "now": once a minute is enough */
        print = sluice_print_number(print, (uint64_t)(now_s / 60));
    const char *const texts[] = {
        job->state_desc,    job->partition,          job->account,          job->admin_comment, job->comment,
        job->name,          job->tres_fmt_alloc_str, job->tres_fmt_req_str, job->tres_per_node, job->tres_per_job,
        job->tres_per_task, job->resv_name,
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        print = sluice_print_text(print, texts[i], 1);
    print = sluice_print_text(print, job->nodes, NODES_WIDTH);
    if (!details)
        return print;
    print = sluice_print_number(print, (uint64_t)details->begin_time);
    print = sluice_print_number(print, (uint64_t)details->submit_time);
    print = sluice_print_number(print, (uint64_t)details->min_cpus << 32 | details->min_nodes);
    print = sluice_print_number(print, (uint64_t)details->num_tasks << 32 | details->max_nodes);
    print = sluice_print_text(print, details->features, 1);
    print = sluice_print_text(print, details->dependency, 1);
    return sluice_print_text(print, details->work_dir, 1);
}

static int note_id(void *item, void *argument)
{
    (void)argument;
    if (watch.id_count < watch.id_room)
        watch.ids[watch.id_count++] = ((const job_record_t *)item)->job_id;
    return 0;
}

/* Room for all jobs, and for those that come until the list is walked. */
static bool make_room(void)
{
    int wanted = list_count(job_list) + 1024;
    return sluice_grow_array(&watch.ids, &watch.id_room, (uint32_t)wanted, sizeof *watch.ids);
}

/* What print_of will read of a job, so that it is in the cache by then: nearly all of the time is waiting for memory. */
static void fetch_record(const job_record_t *job)
{
    for (size_t at = 0; job && at < sizeof *job; at += 64)
        __builtin_prefetch((const char *)job + at);
}

static void fetch_texts(const job_record_t *job)
{
    if (!job)
        return;
    __builtin_prefetch(job->comment);
    __builtin_prefetch(job->name);
    __builtin_prefetch(job->account);
    __builtin_prefetch(job->partition);
    __builtin_prefetch(job->nodes);
    __builtin_prefetch(job->state_desc);
    __builtin_prefetch(job->admin_comment);
    __builtin_prefetch(job->tres_fmt_alloc_str);
    __builtin_prefetch(job->tres_fmt_req_str);
    __builtin_prefetch(job->tres_per_node);
    if (job->details) {
        __builtin_prefetch(job->details);
        __builtin_prefetch(&job->details->work_dir);
    }
}

/* The jobs of a slice; the caller holds the locks. One that has gone since the list was walked is not seen. */
static void see(const uint32_t *ids, uint32_t count, int64_t now_s)
{
    const job_record_t *jobs[LOOK_SLICE];
    for (uint32_t i = 0; i < count; i++)
        jobs[i] = find_job_record(ids[i]);
    for (uint32_t i = 0; i < count; i++) {
        if (i + 16 < count)
            fetch_record(jobs[i + 16]);
        if (i + 6 < count)
            fetch_texts(jobs[i + 6]);
        if (jobs[i])
            sluice_changes_see(watch.changes, ids[i], print_of(jobs[i], now_s));
    }
}

/* ---- what changed ---- */

static void put_time(struct sluice_changes_text *text, time_t when)
{
    if (when > 0 && when != (time_t)NO_VAL && when != (time_t)INFINITE)
        sluice_changes_put_number(text, (uint64_t)when);
    else
        sluice_changes_put_field(text, NULL, 1);
}

/* squeue's fields, in the order of `_JOB_FIELDS` in sluice/slurm/text.py. */
static void put_job(struct sluice_changes_text *text, const slurm_job_info_t *job, int64_t now_s)
{
    bool is_task = job->array_task_id != NO_VAL, of_array = job->array_task_str || is_task;
    sluice_changes_put(text, "[\"job\"");
    sluice_changes_put_number(text, job->job_id);
    sluice_changes_put_number(text, of_array ? job->array_job_id : job->job_id);
    if (job->array_task_str || !is_task)
        sluice_changes_put_field(text, job->array_task_str, 1);
    else
        sluice_changes_put_number(text, job->array_task_id);
    sluice_changes_put_field(text, job->name, 1);
    sluice_changes_put_field(text, NULL, 1); /* the user's name: looked up by the reader, as by squeue */
    sluice_changes_put_number(text, job->user_id);
    sluice_changes_put_field(text, job->account, 1);
    sluice_changes_put_field(text, job->qos, 1);
    sluice_changes_put_field(text, job->partition, 1);
    sluice_changes_put_field(text, job_state_string(job->job_state), 1);
    sluice_changes_put_field(text, job->state_desc ? job->state_desc : sluice_reason_string(job->state_reason), 1);
    sluice_changes_put_field(text, job->nodes, NODES_WIDTH);
    sluice_changes_put_number(text, job->num_nodes);
    sluice_changes_put_number(text, job->num_cpus);
    put_time(text, job->submit_time);
    put_time(text, job->eligible_time);
    put_time(text, job->start_time);
    put_time(text, job->time_limit == INFINITE && job->end_time > now_s ? 0 : job->end_time);
    if (job->time_limit == INFINITE || job->time_limit == NO_VAL) {
        sluice_changes_put_field(text, job->time_limit == INFINITE ? "UNLIMITED" : NULL, 1);
    } else {
        char limit[32];
        snprintf(limit, sizeof limit, "%" PRIu32 ":00", job->time_limit);
        sluice_changes_put_field(text, limit, 1);
    }
    sluice_changes_put_number(text, job->priority);
    sluice_changes_put_field(text, job->tres_alloc_str ? job->tres_alloc_str : job->tres_req_str, 1);
    sluice_changes_put_field(text, job->tres_per_node, 1);
    sluice_changes_put_field(text, job->tres_per_job, 1);
    sluice_changes_put_field(text, job->tres_per_task, 1);
    sluice_changes_put_field(text, job->features, 1);
    sluice_changes_put_field(text, job->dependency, 1);
    sluice_changes_put_field(text, job->resv_name, 1);
    sluice_changes_put_field(text, job->comment, 1);
    sluice_changes_put_field(text, job->work_dir, 1);
    sluice_changes_put_field(text, job->admin_comment, 1);
    sluice_changes_put(text, "]\n");
}

/* As slurmctld does for a listing, for these alone. NULL: slurmctld is not in charge any more. */
static buf_t *pack(const uint32_t *ids, uint32_t count)
{
    const slurmctld_lock_t locks = {
        .conf = READ_LOCK, .job = READ_LOCK, .node = READ_LOCK, .part = READ_LOCK, .fed = READ_LOCK};
    /* Held here, as for a listing: pack_job of 24.11 unlocks QOS that it has not locked where a waiting job asks for one. */
    assoc_mgr_lock_t qos_lock = {.qos = READ_LOCK};
    if (!sluice_in_charge())
        return NULL;
    buf_t *buffer = init_buf(64 * 1024);
    uint32_t packed = 0;
    pack32(0, buffer);
    pack_time(0, buffer);
    pack_time(0, buffer);
    lock_slurmctld(locks);
    assoc_mgr_lock(&qos_lock);
    uint64_t from = sluice_now_us();
    for (uint32_t i = 0; i < count; i++) {
        job_record_t *job = find_job_record(ids[i]);
        if (!job)
            continue; /* the next look says that it is gone */
        pack_job(job, SHOW_ALL, buffer, SLURM_PROTOCOL_VERSION, 0, true);
        packed++;
    }
    uint64_t took = sluice_now_us() - from;
    assoc_mgr_unlock(&qos_lock);
    unlock_slurmctld(locks);
    if (took > atomic_load(watch.pack_us_most))
        atomic_store(watch.pack_us_most, took);
    uint32_t end = get_buf_offset(buffer);
    set_buf_offset(buffer, 0);
    pack32(packed, buffer);
    set_buf_offset(buffer, 0);
    buffer->size = end;
    return buffer;
}

static bool put_jobs(struct sluice_changes_text *text, const uint32_t *ids, uint32_t count)
{
    for (uint32_t from = 0; from < count; from += SLICE) {
        buf_t *buffer = pack(&ids[from], count - from < SLICE ? count - from : SLICE);
        if (!buffer)
            return false;
        slurm_msg_t message;
        slurm_msg_t_init(&message);
        message.protocol_version = SLURM_PROTOCOL_VERSION;
        message.msg_type = RESPONSE_JOB_INFO;
        bool good = unpack_msg(&message, buffer) == SLURM_SUCCESS && message.data;
        free_buf(buffer);
        if (!good)
            return false;
        job_info_msg_t *found = message.data;
        for (uint32_t i = 0; i < found->record_count; i++)
            put_job(text, &found->job_array[i], time(NULL));
        atomic_fetch_add(watch.jobs, found->record_count);
        slurm_free_job_info_msg(found);
    }
    return true;
}

static void complain(const char *what, int reason)
{
    if (!watch.failure_logged)
        sluice_log_error("sluice: changes of jobs in %s: %s: %s; viewers see them later", watch.folder, what,
                         strerror(reason));
    watch.failure_logged = true;
}

static void rest(void)
{
    sluice_changes_free(watch.changes);
    watch.changes = NULL;
    free(watch.ids);
    watch.ids = NULL;
    watch.id_room = 0;
    sluice_changes_files_stop(&watch.files);
}

/* All jobs that were listed; false: not all that differs is known. */
static bool look(int64_t now_s)
{
    sluice_changes_begin(watch.changes);
    for (uint32_t from = 0; from < watch.id_count; from += LOOK_SLICE) {
        if (!sluice_queue_lock())
            return false;
        uint64_t since = sluice_now_us();
        see(&watch.ids[from], watch.id_count - from < LOOK_SLICE ? watch.id_count - from : LOOK_SLICE, now_s);
        uint64_t held = sluice_now_us() - since;
        sluice_queue_unlock();
        if (held > atomic_load(watch.held_us_most))
            atomic_store(watch.held_us_most, held);
    }
    return sluice_changes_end(watch.changes);
}

/* Milliseconds until the next. */
static int64_t step(void)
{
    struct sluice_changes_text text = {0};
    struct timespec now;
    bool first = !watch.changes;
    if (first) {
        watch.changes = sluice_changes_new();
        sluice_changes_files_start(&watch.files, watch.folder);
        if (!watch.changes) {
            complain("no look", ENOMEM);
            return RETRY_MS;
        }
    }
    if (!sluice_queue_lock())
        return PERIOD_MS;
    uint64_t from = sluice_now_us();
    int64_t cpu_from = sluice_clock_us(CLOCK_THREAD_CPUTIME_ID);
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t now_s = now.tv_sec;
    bool whole = true;
    /* Slurm stamps the lists with seconds, and so what came in the second of the last look may be new. */
    bool same = !first && last_job_update < watch.looked_s && now_s / 60 == watch.looked_s / 60;
    if (!same) {
        watch.id_count = 0;
        whole = make_room();
        if (whole)
            list_for_each(job_list, note_id, NULL);
    }
    sluice_queue_unlock();
    if (!same && whole)
        whole = look(now_s);
    uint64_t took = sluice_now_us() - from, cpu = (uint64_t)(sluice_clock_us(CLOCK_THREAD_CPUTIME_ID) - cpu_from);
    watch.looked_s = now_s;
    atomic_store(watch.look_us, took);
    atomic_store(watch.look_cpu_us, cpu);
    uint32_t count = 0, gone_count = 0;
    if (!same && whole) {
        const uint32_t *differ = sluice_changes_differ(watch.changes, &count);
        whole = put_jobs(&text, differ, count) && !text.failed;
        const uint32_t *gone = sluice_changes_gone(watch.changes, &gone_count);
        for (uint32_t i = 0; whole && i < gone_count; i++) {
            char line[32];
            snprintf(line, sizeof line, "[\"gone\", %" PRIu32 "]\n", gone[i]);
            sluice_changes_put(&text, line);
        }
    }
    if (!whole || text.failed) {
        text.length = 0;
        text.failed = false;
        sluice_changes_put(&text, "[\"lost\"]\n");
    }
    char line[96];
    snprintf(line, sizeof line, "[\"look\", %" PRId64 ".%06ld, %" PRIu64 "]\n", now_s, now.tv_nsec / 1000, took / 1000);
    sluice_changes_put(&text, line);
    bool written = !text.failed && sluice_changes_write(&watch.files, &text, first);
    int reason = text.failed ? ENOMEM : errno;
    free(text.bytes);
    if (!written) {
        complain("not written", reason);
        rest();
        return RETRY_MS;
    }
    watch.failure_logged = false;
    int64_t period = (int64_t)cpu * SHARE / 1000;
    int64_t pause = (period > PERIOD_MS ? period : PERIOD_MS) - (int64_t)took / 1000;
    return pause > LEAST_PAUSE_MS ? pause : LEAST_PAUSE_MS; /* next to none after one that waited for locks */
}

/* The level that was asked for: without a policy none is in force, and there are viewers all the same. */
static bool is_on(void)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    bool on = settings && settings->asked >= SLUICE_LEVEL_ADMIT;
    sluice_settings_release(settings);
    return on && sluice_in_charge();
}

static bool wanted(void)
{
    struct stat facts;
    if (!is_on())
        return false;
    (void)mkdir(watch.folder, 0700);
    if (lstat(watch.folder, &facts) != 0 || !S_ISDIR(facts.st_mode) || facts.st_uid != geteuid() ||
        facts.st_mode & 0022)
        return false;
    return lstat(watch.wanted, &facts) == 0 && S_ISREG(facts.st_mode) && time(NULL) - facts.st_mtime < WANTED_S;
}

/* ---- the thread ---- */

/* False: stop. */
static bool wait_for(int64_t ms)
{
    struct timespec until = sluice_deadline(CLOCK_MONOTONIC, ms);
    pthread_mutex_lock(&watch.lock);
    while (!watch.stop && pthread_cond_timedwait(&watch.wake, &watch.lock, &until) != ETIMEDOUT)
        ;
    bool go_on = !watch.stop;
    pthread_mutex_unlock(&watch.lock);
    return go_on;
}

static void *run(void *argument)
{
    (void)argument;
    int64_t wait_ms = PERIOD_MS;
    while (wait_for(wait_ms)) {
        wait_ms = PERIOD_MS;
        if (wanted())
            wait_ms = step();
        else if (watch.changes)
            rest();
    }
    if (watch.changes)
        rest();
    return NULL;
}

static bool start(const struct sluice_site *site)
{
    int length = snprintf(watch.folder, sizeof watch.folder, "%s/" SLUICE_STATE_FOLDER, site->state_folder);
    if (length < 0 || (size_t)length >= sizeof watch.folder)
        return false;
    snprintf(watch.wanted, sizeof watch.wanted, "%s/changes.wanted", watch.folder);
    watch.look_us = sluice_status_counter("changes.look_us_last");
    watch.look_cpu_us = sluice_status_counter("changes.look_cpu_us_last");
    watch.held_us_most = sluice_status_counter("changes.held_us_most");
    watch.pack_us_most = sluice_status_counter("changes.pack_us_most");
    watch.jobs = sluice_status_counter("changes.jobs");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&watch.wake, &attributes);
    pthread_condattr_destroy(&attributes);
    watch.stop = watch.failure_logged = false;
    bool good = pthread_create(&watch.thread, NULL, run, NULL) == 0;
    if (!good)
        pthread_cond_destroy(&watch.wake);
    return good;
}

static void stop(void)
{
    pthread_mutex_lock(&watch.lock);
    watch.stop = true;
    pthread_cond_signal(&watch.wake);
    pthread_mutex_unlock(&watch.lock);
    pthread_join(watch.thread, NULL);
    pthread_cond_destroy(&watch.wake);
}

static struct sluice_module module = {.name = "changes", .start = start, .stop = stop};

__attribute__((constructor)) static void announce(void)
{
    sluice_controller_module(&module);
}

#endif /* SLUICE_PACKS_JOBS */
