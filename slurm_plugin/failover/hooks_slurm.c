/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The failover journal's hooks: see failover.h. */
#include "failover/failover_internal_slurm.h"

#include "failover/fence.h"
#include "runtime/runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/common/slurm_protocol_pack.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"
#include "src/slurmctld/locks.h"

enum { TICK_MS = 250, LOUD_S = 10 };
/*
 * A scancel of thousands of jobs is one hold of the locks: a thread's ends may make slurmctld wait for a tenth of a
 * second at once, and then for as long as it does something else; all of them, while the storage does not answer, for
 * a fifth of the time. What is over is written as soon, and not waited for.
 */
enum { END_BURST_US = 100000, SLOW_SHARE = 5 };
struct budget {
    int64_t left_us, seen_us;
};

static struct {
    _Atomic(struct sluice_journal *) journal;
    char folder[4096], state_file[4096], host[256];
    atomic_bool adapter, adapter_named;
    atomic_bool adapter_unloaded; /* by slurmctld, when it ends, restarts or gives back: it is not missing */
    atomic_bool replayed;         /* the main thread no longer uses the journal: the keeper may open it */
    int64_t covered_us;
    const struct sluice_submission_facts *restoring;
    struct budget slow_ends; /* these two under the job write lock */
    bool is_slow;            /* the last end that was waited for was not durable in time */
    _Atomic int64_t said_us;
} hooks;

/* Jobs that are launched when their start is durable. */
struct launch {
    uint32_t job_id;
    uint64_t ticket;
    int64_t since_us;
    struct sluice_failover_prolog prolog;
};
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    bool running, stopping;
    struct launch *items;
    uint32_t count, room;
    uint64_t durable;
} launches = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* The request whose job comes next, and what of it is not packed; under the job write lock. */
static buf_t *request;
static uint32_t request_offset;
static char *request_tasks;
/* Of the request that this thread handles. */
static _Thread_local uint32_t components_here;
static _Thread_local struct budget ends_here;
static _Thread_local bool waits_for_all;

static void count(const char *name)
{
    atomic_fetch_add(sluice_status_counter(name), 1);
}

/* What the policy says now. */
struct journal_config {
    bool on, refuse;
    uint32_t wait_ms;
    uint64_t max_bytes;
};

static struct journal_config journal_config(void)
{
    struct journal_config config = {0};
    const struct sluice_settings *settings = sluice_settings_acquire();
    if (settings) {
        const struct sluice_rules *rules = settings->rules;
        config = (struct journal_config){.on = rules->journal && settings->level > SLUICE_LEVEL_OFF,
                                         .refuse = !rules->journal_warn,
                                         .wait_ms = rules->journal_wait_ms,
                                         .max_bytes = rules->journal_max_mib << 20};
        sluice_settings_release(settings);
    }
    return config;
}

/* The journal to write to, or NULL: off, not in charge, or Slurm calls the hook for a job that is brought back. */
static struct sluice_journal *journal_for(struct journal_config *config)
{
    struct sluice_journal *journal = atomic_load(&hooks.journal);
    if (!journal || hooks.restoring)
        return NULL;
    *config = journal_config();
    return config->on ? journal : NULL;
}

static const char *failure_text(struct sluice_journal *journal, char *text, size_t size)
{
    struct sluice_journal_stats stats;
    sluice_journal_describe(journal, &stats);
    if (stats.error == EDQUOT)
        snprintf(text, size, "the journal has reached its bound of %" PRIu64 " MiB: Slurm's own state is not saved",
                 stats.bytes >> 20);
    else if (stats.error)
        snprintf(text, size, "%.300s: %s", hooks.folder, strerror(stats.error));
    else
        snprintf(text, size, "%.300s: the storage does not answer in time", hooks.folder);
    return text;
}

/* An error, but not once for each of a thousand jobs. */
static void log_not_journalled(struct sluice_journal *journal, const char *what, uint32_t job_id)
{
    char text[512];
    int64_t now = sluice_clock_us(CLOCK_MONOTONIC), said = atomic_load(&hooks.said_us);
    if (said && now - said < INT64_C(1000000) * LOUD_S)
        return;
    atomic_store(&hooks.said_us, now);
    error("burst_buffer/sluice: JobId=%u: %s without being in the failover journal: %s", job_id, what,
          failure_text(journal, text, sizeof text));
}

static uint64_t hand_over(struct sluice_journal *journal, enum sluice_journal_entry_type type, uint32_t job_id,
                          buf_t *buffer)
{
    return sluice_journal_append(journal, type, job_id, get_buf_data(buffer), get_buf_offset(buffer), sluice_wall_us());
}

/* ---- submissions ---- */

void sluice_failover_components(uint32_t components)
{
    components_here = components;
}

static void forget_request(void)
{
    if (request)
        free_buf(request);
    request = NULL;
    xfree(request_tasks);
}

void sluice_failover_request(struct job_descriptor *wanted)
{
    struct journal_config config;
    forget_request();
    if (!journal_for(&config))
        return;
    slurm_msg_t message;
    slurm_msg_t_init(&message);
    message.msg_type = REQUEST_SUBMIT_BATCH_JOB;
    message.protocol_version = SLURM_PROTOCOL_VERSION;
    message.data = wanted;
    /* Packing notes in the request which of its parts are defaults; by now Slurm has filled them in. */
    uint64_t flags = wanted->bitflags;
    request = init_buf(16 * 1024);
    pack_msg(&message, request);
    wanted->bitflags = flags;
    request_offset = wanted->het_job_offset;
    if (wanted->array_bitmap)
        request_tasks = bit_fmt_full(wanted->array_bitmap);
}

static int refuse(struct sluice_journal *journal, job_record_t *job, uint64_t ticket, char **text)
{
    char why[512];
    /* What is being written at this moment is cancelled by another entry. */
    if (ticket && !sluice_journal_withdraw(journal, ticket))
        sluice_journal_append(journal, SLUICE_JOURNAL_VOID, job->job_id, NULL, 0, sluice_wall_us());
    count("journal.refused");
    if (text) {
        xfree(*text);
        *text =
            xstrdup_printf("sluice: the job was not accepted, as it could not be made safe against a failure of this "
                           "controller: %s. Submit it again later, or contact an administrator",
                           failure_text(journal, why, sizeof why));
    }
    return ESLURM_WRITING_TO_FILE;
}

int sluice_failover_submitted(struct job_record *job, char **text)
{
    struct journal_config config;
    if (hooks.restoring) {
        if (!hooks.restoring->submit_time)
            return SLURM_SUCCESS;
        job->details->submit_time = hooks.restoring->submit_time;
        if (hooks.restoring->db_index)
            job->db_index = hooks.restoring->db_index;
        return SLURM_SUCCESS;
    }
    struct sluice_journal *journal = journal_for(&config);
    /* Slurm also asks for tasks that leave their array's record: these are no submissions. */
    if (!journal || !request || job->array_job_id || job->array_task_id != NO_VAL) {
        forget_request();
        return SLURM_SUCCESS;
    }
    const struct sluice_submission_facts facts = {
        .version = SLURM_PROTOCOL_VERSION,
        .uid = job->user_id,
        .flags = (job->batch_flag ? SLUICE_SUBMIT_BATCH : 0U) | (job->bit_flags & CRON_JOB ? SLUICE_SUBMIT_CRON : 0U),
        .components = components_here,
        .het_offset = request_offset,
        .submit_time = job->details->submit_time,
        .db_index = job->db_index,
        .name = job->name,
        .tasks = request_tasks,
    };
    buf_t *buffer = init_buf(get_buf_offset(request) + 256);
    sluice_submission_pack(&facts, buffer);
    packmem_array(get_buf_data(request), get_buf_offset(request), buffer);
    uint64_t ticket = hand_over(journal, SLUICE_JOURNAL_SUBMIT, job->job_id, buffer);
    free_buf(buffer);
    forget_request();
    enum sluice_journal_result result =
        ticket ? sluice_journal_wait(journal, ticket, config.wait_ms) : SLUICE_JOURNAL_FAILED;
    if (result == SLUICE_JOURNAL_DURABLE && sluice_fence_holds())
        return SLURM_SUCCESS;
    if (result == SLUICE_JOURNAL_DURABLE) /* another controller may lead: nothing more is acknowledged */
        return refuse(journal, job, ticket, text);
    if (result == SLUICE_JOURNAL_LATE)
        count("journal.late");
    log_not_journalled(journal, config.refuse ? "refused, as it would be" : "accepted", job->job_id);
    if (config.refuse)
        return refuse(journal, job, ticket, text);
    count("journal.warned");
    return SLURM_SUCCESS;
}

/* ---- ends ---- */

/* Whether what ends is only what ran of it: Slurm then names the cause alone, without COMPLETING, and sets the job to
 * PENDING after this. */
static bool is_requeue(const job_record_t *job)
{
    uint32_t base = job->job_state & JOB_STATE_BASE;
    if (job->job_state & JOB_REQUEUE)
        return true;
    return job->nodes && job->batch_flag && !(job->job_state & JOB_COMPLETING) &&
           (base == JOB_NODE_FAIL || base == JOB_PREEMPTED || base == JOB_BOOT_FAIL);
}

/* A job's own end, which its node reports in a call for it alone, and never again once that is answered. */
static bool is_report(const job_record_t *job)
{
    uint32_t base = job->job_state & JOB_STATE_BASE;
    return base == JOB_COMPLETE || base == JOB_FAILED || base == JOB_OOM;
}

/* Wait for an end to be durable, for as long as it may make slurmctld wait. False: it was not waited for. */
static bool wait_for_end(struct sluice_journal *journal, const job_record_t *job, uint64_t ticket, uint32_t wait_ms,
                         enum sluice_journal_result *result)
{
    struct budget *budget = hooks.is_slow ? &hooks.slow_ends : &ends_here;
    int64_t began = sluice_clock_us(CLOCK_MONOTONIC), since = began - budget->seen_us;
    budget->left_us += budget->seen_us ? since / (hooks.is_slow ? SLOW_SHARE : 1) : END_BURST_US;
    if (budget->left_us > END_BURST_US)
        budget->left_us = END_BURST_US;
    budget->seen_us = began;
    if (!waits_for_all && budget->left_us <= 0 && (hooks.is_slow || !is_report(job)))
        return false;
    *result = sluice_journal_wait(journal, ticket, wait_ms);
    budget->seen_us = sluice_clock_us(CLOCK_MONOTONIC);
    budget->left_us -= budget->seen_us - began;
    hooks.is_slow = *result != SLUICE_JOURNAL_DURABLE;
    return true;
}

/* Without the lease this process is about to be killed, and must not answer before. */
static void wait_for_lease(uint32_t wait_ms)
{
    for (uint32_t waited = 0; !sluice_fence_holds() && waited < wait_ms; waited += 10)
        usleep(10000);
}

void sluice_failover_ended(struct job_record *job)
{
    struct journal_config config;
    struct sluice_journal *journal = journal_for(&config);
    if (!journal || IS_JOB_RESIZING(job) || IS_JOB_REVOKED(job))
        return;
    bool requeue = is_requeue(job);
    if (!requeue && !IS_JOB_FINISHED(job))
        return;
    if (!requeue && IS_JOB_CANCELLED(job))
        sluice_failover_cancelled(job);
    const struct sluice_ending ending = {
        .version = SLURM_PROTOCOL_VERSION,
        .state = job->job_state,
        .exit_code = job->exit_code,
        .derived_code = job->derived_ec,
        .reason = job->state_reason,
        .restarts = job->restart_cnt + (requeue ? 1U : 0U),
        .array_id = job->array_job_id,
        .task_id = job->array_task_id,
        .uid = (uint32_t)job->requid,
        .start_time = job->start_time,
        .end_time = job->end_time,
        .db_index = job->db_index,
    };
    buf_t *buffer = init_buf(128);
    sluice_ending_pack(&ending, buffer);
    uint64_t ticket = hand_over(journal, requeue ? SLUICE_JOURNAL_REQUEUE : SLUICE_JOURNAL_END, job->job_id, buffer);
    free_buf(buffer);
    enum sluice_journal_result result = SLUICE_JOURNAL_FAILED;
    if (ticket && !wait_for_end(journal, job, ticket, config.wait_ms, &result)) {
        count("journal.not_waited");
        return;
    }
    wait_for_lease(config.wait_ms);
    if (result != SLUICE_JOURNAL_DURABLE) {
        count(result == SLUICE_JOURNAL_LATE ? "journal.late" : "journal.warned");
        log_not_journalled(journal, "ended", job->job_id);
    }
}

bool sluice_failover_keeps_requeues(void)
{
    struct journal_config config;
    struct sluice_journal_stats stats;
    struct sluice_journal *journal = journal_for(&config);
    if (!journal || !atomic_load(&hooks.adapter))
        return false;
    sluice_journal_describe(journal, &stats);
    bool behind = stats.oldest_us && sluice_wall_us() - stats.oldest_us >= INT64_C(1000) * config.wait_ms;
    return !stats.error && !behind && sluice_fence_holds();
}

void sluice_failover_wait_for_all(bool all)
{
    waits_for_all = all;
}

void sluice_failover_modified(uint32_t job_id, uint32_t uid, const char *what)
{
    struct journal_config config;
    struct sluice_journal *journal = journal_for(&config);
    if (!journal)
        return;
    buf_t *buffer = init_buf(256);
    pack16(SLURM_PROTOCOL_VERSION, buffer);
    pack32(uid, buffer);
    packstr((char *)what, buffer);
    (void)hand_over(journal, SLUICE_JOURNAL_MODIFY, job_id, buffer);
    free_buf(buffer);
}

/* ---- starts ---- */

/* Continue with what comes next: the site's prolog, or the launch. */
static void launch(const struct launch *one)
{
    bool background = false;
    if (slurm_conf.prolog_slurmctld) {
        slurmctld_lock_t locks = {
            .conf = READ_LOCK, .job = WRITE_LOCK, .node = WRITE_LOCK, .part = READ_LOCK, .fed = READ_LOCK};
        lock_slurmctld(locks);
        job_record_t *job = find_job_record(one->job_id);
        if (job && IS_JOB_RUNNING(job))
            background = one->prolog.go(job);
        unlock_slurmctld(locks);
    }
    if (!background)
        one->prolog.done(SLURM_SUCCESS, one->job_id, false);
}

/* Whether a job may continue now: its entry is durable, or the time to wait for it is over. */
static bool may_go(const struct launch *one, uint64_t durable, int64_t now)
{
    struct journal_config config = journal_config();
    if (!sluice_in_charge()) /* a controller that ends, or gives back: the next one asks for the job's prolog again */
        return false;
    if (one->ticket && one->ticket <= durable)
        return true;
    return !config.on || (!config.refuse && now - one->since_us > (int64_t)config.wait_ms * 1000);
}

static void *run_launches(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&launches.lock);
    while (!launches.stopping) {
        int64_t now = sluice_clock_us(CLOCK_MONOTONIC);
        uint32_t at = 0;
        while (at < launches.count && !may_go(&launches.items[at], launches.durable, now))
            at++;
        if (at < launches.count) {
            struct launch one = launches.items[at];
            launches.count--;
            memmove(&launches.items[at], &launches.items[at + 1], (launches.count - at) * sizeof one);
            bool safe = one.ticket && one.ticket <= launches.durable;
            pthread_mutex_unlock(&launches.lock);
            if (!safe) {
                count("journal.warned");
                error("prep/sluice: JobId=%u starts without being in the failover journal", one.job_id);
            }
            launch(&one);
            pthread_mutex_lock(&launches.lock);
            continue;
        }
        struct timespec until = sluice_deadline(CLOCK_REALTIME, 100);
        if (launches.count)
            pthread_cond_timedwait(&launches.wake, &launches.lock, &until);
        else
            pthread_cond_wait(&launches.wake, &launches.lock);
    }
    pthread_mutex_unlock(&launches.lock);
    return NULL;
}

static void durable(uint64_t ticket, void *argument)
{
    (void)argument;
    pthread_mutex_lock(&launches.lock);
    launches.durable = ticket;
    if (launches.count)
        pthread_cond_signal(&launches.wake);
    pthread_mutex_unlock(&launches.lock);
}

bool sluice_failover_started(struct job_record *job, const struct sluice_failover_prolog *prolog)
{
    struct journal_config config;
    struct sluice_journal *journal = journal_for(&config);
    if (!journal || !IS_JOB_RUNNING(job) || !job->job_resrcs)
        return false;
    buf_t *buffer = init_buf(4096);
    sluice_start_pack(job, buffer);
    bool kept = false;
    pthread_mutex_lock(&launches.lock);
    if (launches.running &&
        sluice_grow_array(&launches.items, &launches.room, launches.count + 1, sizeof *launches.items)) {
        launches.items[launches.count++] =
            (struct launch){.job_id = job->job_id,
                            .ticket = hand_over(journal, SLUICE_JOURNAL_START, job->job_id, buffer),
                            .since_us = sluice_clock_us(CLOCK_MONOTONIC),
                            .prolog = *prolog};
        pthread_cond_signal(&launches.wake);
        kept = true;
    }
    pthread_mutex_unlock(&launches.lock);
    free_buf(buffer);
    return kept;
}

/* ---- what Slurm's own state has caught up with ---- */

static int64_t header_us(const char *path)
{
    /* A string with its length, a version, a time. */
    uint8_t bytes[128];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, bytes, sizeof bytes);
    if (file >= 0)
        close(file);
    if (length < 4)
        return 0;
    buf_t *buffer = create_buf(xmalloc((size_t)length), (uint32_t)length);
    memcpy(get_buf_data(buffer), bytes, (size_t)length);
    char *version = NULL;
    uint32_t size;
    uint16_t protocol;
    time_t at = 0;
    if (unpackstr_xmalloc_chooser(&version, &size, buffer) || unpack16(&protocol, buffer) || unpack_time(&at, buffer))
        at = 0;
    xfree(version);
    free_buf(buffer);
    return (int64_t)at * 1000000;
}

int64_t sluice_failover_covered_us(void)
{
    struct stat facts;
    char old[sizeof hooks.state_file + 4];
    if (stat(hooks.state_file, &facts) == 0 && facts.st_size > 0)
        return header_us(hooks.state_file);
    snprintf(old, sizeof old, "%s.old", hooks.state_file); /* as Slurm does */
    return header_us(old);
}

bool sluice_failover_is_writing(void)
{
    return atomic_load(&hooks.journal) != NULL;
}

const char *sluice_failover_folder(void)
{
    return hooks.folder;
}

void sluice_failover_restoring(const struct sluice_submission_facts *facts)
{
    hooks.restoring = facts;
}

/* Nothing of what the file covers is needed once all is durable. */
static void follow_state(struct sluice_journal *journal)
{
    int64_t covered = sluice_failover_covered_us();
    if (covered == hooks.covered_us)
        return;
    /* All of it: Slurm syncs its state, but neither its name nor jobs' scripts, which the journal has till then. */
    int folder = open(slurm_conf.state_save_location, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool synced = folder >= 0 && syncfs(folder) == 0;
    if (folder >= 0)
        close(folder);
    if (!synced)
        return;
    hooks.covered_us = covered;
    sluice_journal_trim(journal, covered);
}

static void publish(struct sluice_journal *journal)
{
    struct sluice_journal_stats stats = {0};
    if (journal)
        sluice_journal_describe(journal, &stats);
    int64_t lag = stats.oldest_us ? (sluice_wall_us() - stats.oldest_us) / 1000 : 0;
    const struct {
        const char *name;
        uint64_t value;
    } shown[] = {
        {"journal.open", journal && journal_config().on && hooks.adapter},
        {"journal.entries", stats.entries},
        {"journal.records", stats.entries}, /* the old name, kept for one release */
        {"journal.syncs", stats.syncs},
        {"journal.failures", stats.failures},
        {"journal.lag", stats.queued},
        {"journal.lag_ms", lag > 0 ? (uint64_t)lag : 0},
        {"journal.bytes", stats.bytes},
        {"journal.segments", stats.segments},
        {"journal.longest_sync_us", stats.longest_sync_us},
        {"journal.error", (uint64_t)stats.error},
        {"journal.last_entry_s", (uint64_t)(stats.last_us / 1000000)},
        {"journal.last_record_s", (uint64_t)(stats.last_us / 1000000)}, /* the same */
        {"journal.state_saved_s", (uint64_t)(hooks.covered_us / 1000000)},
    };
    for (unsigned i = 0; i < sizeof shown / sizeof *shown; i++)
        atomic_store(sluice_status_counter(shown[i].name), shown[i].value);
}

static void look_after(void)
{
    struct sluice_journal *journal = atomic_load(&hooks.journal);
    static int64_t said;
    static bool led;
    bool on = journal_config().on;
    if ((journal || !SLUICE_SELECT_JOB_INIT) && on && !hooks.adapter && !hooks.adapter_unloaded &&
        time(NULL) - said > 600) {
        said = time(NULL);
        error("sluice: the policy asks for the failover journal, but its burst_buffer plugin is not loaded: nothing is "
              "journalled; sluice plugin check says why");
    }
    if (!journal && on && sluice_in_charge() && atomic_load(&hooks.replayed)) { /* switched on while running */
        struct sluice_segments found;
        if (sluice_segments_read(hooks.folder, NULL, NULL, &found))
            sluice_failover_open(&found);
        free(found.items);
        journal = atomic_load(&hooks.journal);
    }
    /* A backup that has given back; while it takes over, it has replayed before it has a control_time. */
    if (slurmctld_primary || control_time)
        led = true;
    else if (led) {
        led = false;
        atomic_store(&hooks.replayed, false);
        atomic_store(&hooks.adapter_unloaded, false); /* in a next time in charge it may be missing again */
        if (atomic_exchange(&hooks.journal, NULL)) {
            usleep(TICK_MS * 1000); /* a hook may be using it for this moment */
            sluice_journal_close(journal);
        }
        journal = NULL;
    }
    if (journal) {
        follow_state(journal);
        sluice_failover_ask_nodes();
    }
    publish(journal);
}

/* A thread of its own, as syncfs may take long. */
static struct {
    pthread_t thread;
    bool running;
    atomic_bool stopping;
} keeper;

static void *run_keeper(void *argument)
{
    (void)argument;
    while (!atomic_load(&keeper.stopping)) {
        look_after();
        usleep(TICK_MS * 1000);
    }
    return NULL;
}

static void open_journal(const struct sluice_segments *found)
{
    char about[512];
    struct journal_config config = journal_config();
    int64_t covered = sluice_failover_covered_us();
    hooks.covered_us = covered ? covered : 1;
    if (!config.on || atomic_load(&hooks.journal))
        return;
    snprintf(about, sizeof about, "host=%s slurm=%s", hooks.host, SLURM_VERSION_STRING);
    struct sluice_journal *journal = sluice_journal_open(
        &(struct sluice_journal_options){.folder = hooks.folder,
                                         .about = about,
                                         .max_bytes = config.max_bytes,
                                         .next = found->next,
                                         .floor_us = found->last_us > covered ? found->last_us : covered,
                                         .segments = found->items,
                                         .segment_count = found->count,
                                         .durable = durable});
    if (!journal)
        error("sluice: no failover journal: %s: %m", hooks.folder);
    pthread_mutex_lock(&launches.lock);
    launches.durable = 0;
    launches.count = 0; /* of an earlier time in charge */
    pthread_mutex_unlock(&launches.lock);
    atomic_store(&hooks.journal, journal);
}

void sluice_failover_open(const struct sluice_segments *found)
{
    open_journal(found);
    atomic_store(&hooks.replayed, true); /* last: the keeper would open it a second time */
}

void sluice_failover_adapter(bool loaded, bool named)
{
    if (!loaded)
        hooks.adapter_unloaded = true; /* first: the keeper must not see it missing in between */
    hooks.adapter = loaded;
    hooks.adapter_named = loaded && named;
}

void sluice_failover_reconfigured(void)
{
    if (hooks.adapter_named && !slurm_conf.bb_type)
        slurm_conf.bb_type = xstrdup("burst_buffer/sluice");
}

/* ---- with the first plugin, and the last ---- */

static void stop(void)
{
    atomic_store(&keeper.stopping, true);
    if (keeper.running)
        pthread_join(keeper.thread, NULL);
    keeper.running = false;
    struct sluice_journal *journal = atomic_exchange(&hooks.journal, NULL);
    pthread_mutex_lock(&launches.lock);
    launches.stopping = true;
    pthread_cond_signal(&launches.wake);
    pthread_mutex_unlock(&launches.lock);
    if (launches.running)
        pthread_join(launches.thread, NULL);
    launches.running = false;
    sluice_journal_close(journal);
    free(launches.items);
    launches.items = NULL;
    launches.count = launches.room = 0;
}

static bool start(const struct sluice_site *site)
{
    snprintf(hooks.folder, sizeof hooks.folder, "%s/sluice.journal", site->state_folder);
    snprintf(hooks.state_file, sizeof hooks.state_file, "%s/job_state", site->state_folder);
    if (gethostname(hooks.host, sizeof hooks.host - 1) != 0)
        snprintf(hooks.host, sizeof hooks.host, "unknown");
    launches.stopping = false;
    launches.running = pthread_create(&launches.thread, NULL, run_launches, NULL) == 0;
    atomic_store(&hooks.replayed, false);
    atomic_store(&keeper.stopping, false);
    keeper.running = pthread_create(&keeper.thread, NULL, run_keeper, NULL) == 0;
    if (launches.running && keeper.running)
        return true;
    stop(); /* nobody else would: the module counts as not started */
    return false;
}

__attribute__((constructor)) static void offer(void)
{
    static struct sluice_module module = {.name = "journal", .start = start, .stop = stop};
    sluice_controller_module(&module);
}
