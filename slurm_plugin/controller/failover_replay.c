/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Replay of the failover journal: what Slurm's own state file did not have yet when the last controller ended.
 *
 * The journal's records behind the state file's time are folded to one picture a job: was it submitted, where does it
 * run, how did it end. As records and state are about the same events in the same order, the last record of a job says
 * how it stands, whatever of it the state file has already.
 *
 * In two steps, both within Slurm's own start and under its locks, before any request is answered:
 *   loaded  job records are there, and nothing has been derived from them: records are edited, as if Slurm had loaded
 *           them so. What Slurm would delete as unknown is moved aside.
 *   ready   nodes, reservations and limits are there, too: jobs that are missing are submitted again by their own id,
 *           and entered where they run. The next job id is raised above all of them.
 * What cannot be settled is written to the log and to replays.jsonl, and nothing is guessed.
 */
#include "controller/failover_slurm.h"

#include "controller/status.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/common/job_resources.h"
#include "src/common/slurm_protocol_pack.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"
#include "src/slurmctld/acct_policy.h"
#include "src/slurmctld/gang.h"
#include "src/slurmctld/job_scheduler.h"
#include "src/slurmctld/reservation.h"
#include "src/slurmctld/state_save.h"

enum { REPORT_BYTES = 1 << 20, TEXT = 512, PATH = 4400 };

/* A record's payload, kept. */
struct bytes {
    uint8_t *data;
    uint32_t length;
};

/* What the journal says of a job. */
struct picture {
    uint32_t job_id, next; /* next: of the same bucket, as index + 1 */
    struct bytes submit, start, ending, modification;
    enum { KNOWN, VOID, WAITS, RUNS, ENDED, REQUEUED } state;
    uint32_t modifications;
    bool missing, done;
};

enum outcome { RESUBMITTED, RESTORED, ENDINGS, REQUEUES, UNSETTLED, OUTCOMES };
static const char *const outcome_names[] = {"resubmitted", "restored", "ended", "requeued", "unsettled"};

static struct {
    struct picture *items;
    uint32_t count, room;
    uint32_t *buckets, bucket_count;
    int64_t covered_us;
    uint32_t jobs; /* with records behind the state's time */
    struct sluice_segments found;
    char *list[OUTCOMES]; /* ids, or for UNSETTLED objects, with commas */
    uint32_t counts[OUTCOMES];
    int64_t began_us;
} own;

/* While it is handed to the hooks, they journal nothing. */
static const struct sluice_submission nothing;

/* ---- reading ---- */

static void fill_buckets(void)
{
    memset(own.buckets, 0, own.bucket_count * sizeof *own.buckets);
    for (uint32_t i = 0; i < own.count; i++) {
        own.items[i].next = own.buckets[own.items[i].job_id % own.bucket_count];
        own.buckets[own.items[i].job_id % own.bucket_count] = i + 1;
    }
}

static int by_id(const void *left, const void *right)
{
    uint32_t a = ((const struct picture *)left)->job_id, b = ((const struct picture *)right)->job_id;
    return (a > b) - (a < b);
}

/* In the order of the ids, which is that of their making: a start may be journalled before an earlier task's. */
static void sort_pictures(void)
{
    if (own.count < 2)
        return;
    qsort(own.items, own.count, sizeof *own.items, by_id);
    fill_buckets();
}

static struct picture *picture_of(uint32_t job_id, bool make)
{
    uint32_t bucket = own.bucket_count ? job_id % own.bucket_count : 0;
    for (uint32_t i = own.bucket_count ? own.buckets[bucket] : 0; i; i = own.items[i - 1].next)
        if (own.items[i - 1].job_id == job_id)
            return &own.items[i - 1];
    if (!make)
        return NULL;
    if (own.count == own.room) {
        uint32_t room = own.room ? 2 * own.room : 1024;
        own.items = xrealloc(own.items, room * sizeof *own.items);
        own.buckets = xrealloc(own.buckets, room * sizeof *own.buckets);
        own.room = own.bucket_count = room;
        fill_buckets();
        bucket = job_id % room;
    }
    own.items[own.count] = (struct picture){.job_id = job_id, .next = own.buckets[bucket]};
    own.buckets[bucket] = ++own.count;
    return &own.items[own.count - 1];
}

static void keep(struct bytes *bytes, const struct sluice_record *record)
{
    xfree(bytes->data);
    *bytes = (struct bytes){0};
    if (record && record->length) {
        bytes->data = xmalloc(record->length);
        memcpy(bytes->data, record->payload, record->length);
        bytes->length = record->length;
    }
}

/* Slurm's state has the job. Its script may not be on the disk, as Slurm does not sync it; and it may have been saved
 * between its start and its launch. */
static void keep_covered(struct picture *job, const struct sluice_record *record)
{
    if (record->type == SLUICE_RECORD_SUBMIT)
        keep(&job->submit, record);
    else if (record->type == SLUICE_RECORD_START)
        keep(&job->start, record);
    else if (record->type == SLUICE_RECORD_END || record->type == SLUICE_RECORD_REQUEUE)
        keep(&job->start, NULL);
}

static bool fold(const struct sluice_record *record, void *argument)
{
    (void)argument;
    bool covered = record->at_us < own.covered_us;
    if (record->type == SLUICE_RECORD_OPEN || !record->job_id)
        return true;
    struct picture *job = picture_of(record->job_id, true);
    if (covered) {
        keep_covered(job, record);
        return true;
    }
    own.jobs += job->state == KNOWN;
    switch (record->type) {
    case SLUICE_RECORD_SUBMIT:
        keep(&job->submit, record);
        keep(&job->start, NULL);
        keep(&job->ending, NULL);
        job->state = WAITS;
        break;
    case SLUICE_RECORD_VOID:
        job->state = VOID;
        break;
    case SLUICE_RECORD_START:
        keep(&job->start, record);
        keep(&job->ending, NULL);
        job->state = RUNS;
        break;
    case SLUICE_RECORD_END:
        keep(&job->ending, record);
        job->state = ENDED;
        break;
    case SLUICE_RECORD_REQUEUE:
        keep(&job->start, NULL);
        keep(&job->ending, record);
        job->state = REQUEUED;
        break;
    case SLUICE_RECORD_MODIFY:
        keep(&job->modification, record);
        job->modifications++;
        break;
    default:
        break;
    }
    return true;
}

/* A buffer of Slurm's over a copy of the bytes. */
static buf_t *buffer_of(const struct bytes *bytes)
{
    char *data = xmalloc(bytes->length ? bytes->length : 1);
    if (bytes->length)
        memcpy(data, bytes->data, bytes->length);
    return create_buf(data, bytes->length);
}

static bool ending_of(const struct picture *job, struct sluice_ending *ending)
{
    buf_t *buffer = buffer_of(&job->ending);
    bool good = sluice_ending_unpack(ending, buffer);
    free_buf(buffer);
    return good;
}

static bool start_of(const struct picture *job, struct sluice_start *start)
{
    buf_t *buffer = buffer_of(&job->start);
    bool good = sluice_start_peek(buffer, start);
    free_buf(buffer);
    return good;
}

/* ---- what came of it ---- */

static void note(enum outcome outcome, uint32_t job_id)
{
    xstrfmtcat(own.list[outcome], "%s%u", own.list[outcome] ? "," : "", job_id);
    own.counts[outcome]++;
}

/* Text for JSON: what could end a string, or is no plain character, is left out. */
static void plain(char *text)
{
    for (; *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < ' ' || (unsigned char)*text > '~')
            *text = ' ';
}

static __attribute__((format(printf, 2, 3))) void unsettled(uint32_t job_id, const char *format, ...)
{
    char text[TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error("sluice: failover journal: JobId=%u: %s", job_id, text);
    plain(text);
    xstrfmtcat(own.list[UNSETTLED], "%s{\"job\":%u,\"why\":\"%s\"}", own.list[UNSETTLED] ? "," : "", job_id, text);
    own.counts[UNSETTLED]++;
}

static void report(void)
{
    char path[PATH], old[PATH + 8], host[256] = "", problem[sizeof own.found.problem], *text = NULL;
    (void)gethostname(host, sizeof host - 1);
    snprintf(problem, sizeof problem, "%s", own.found.problem);
    plain(problem);
    plain(host);
    xstrfmtcat(text,
               "{\"schema_version\":1,\"at\":%" PRId64 ",\"controller\":\"%s\",\"state_saved\":%" PRId64
               ",\"records\":%" PRIu64 ",\"jobs\":%u,\"torn_bytes\":%" PRIu64 ",\"lost_bytes\":%" PRIu64
               ",\"late_bytes\":%" PRIu64 ",\"problem\":\"%s\"",
               (int64_t)time(NULL), host, own.covered_us / 1000000, own.found.records, own.jobs, own.found.torn_bytes,
               own.found.lost_bytes, own.found.late_bytes, problem);
    for (int i = 0; i < OUTCOMES; i++)
        xstrfmtcat(text, ",\"%s\":[%s]", outcome_names[i], own.list[i] ? own.list[i] : "");
    xstrcat(text, "}\n");
    snprintf(path, sizeof path, "%s/replays.jsonl", sluice_failover_folder());
    snprintf(old, sizeof old, "%s.1", path);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat facts;
    bool wrote = file >= 0 && fstat(file, &facts) == 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) &&
                 fsync(file) == 0;
    if (!wrote)
        error("sluice: failover journal: %s: %m; the report is: %s", path, text);
    else if (facts.st_size > REPORT_BYTES)
        (void)rename(path, old);
    if (file >= 0)
        close(file);
    xfree(text);
    for (int i = 0; i < OUTCOMES; i++) {
        char name[64];
        snprintf(name, sizeof name, "journal.replay_%s", outcome_names[i]);
        atomic_store(sluice_status_counter(name), own.counts[i]);
    }
}

/* ---- job ids ---- */

/* The next job gets that id, or a higher one. */
static void raise_id(uint32_t job_id)
{
    uint32_t first = slurm_conf.first_job_id;
    if (job_id >= slurm_conf.max_job_id)
        return;
    slurm_conf.first_job_id = job_id;
    reset_first_job_id();
    slurm_conf.first_job_id = first;
}

/* The folder of a missing job's script: Slurm would delete it, and could not make it again while it is there. */
static void move_aside(uint32_t job_id)
{
    char from[PATH], folder[PATH], to[PATH + 64];
    snprintf(from, sizeof from, "%s/hash.%u/job.%u", slurm_conf.state_save_location, job_id % 10, job_id);
    snprintf(folder, sizeof folder, "%s/aside", sluice_failover_folder());
    snprintf(to, sizeof to, "%s/job.%u.%" PRId64, folder, job_id, own.began_us);
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        error("sluice: failover journal: %s: %m", folder);
    if (rename(from, to) != 0 && errno != ENOENT)
        error("sluice: failover journal: %s: %m", from);
}

/* Scripts moved aside are not needed once their jobs are back. */
static void forget_aside(uint32_t job_id)
{
    static const char *const names[] = {"/script", "/environment", ""};
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        char path[PATH];
        snprintf(path, sizeof path, "%s/aside/job.%u.%" PRId64 "%s", sluice_failover_folder(), job_id, own.began_us,
                 names[i]);
        if (names[i][0])
            (void)unlink(path);
        else
            (void)rmdir(path);
    }
}

/* ---- editing records ---- */

/* A requeued job does not start again while nodes may still know the credential of what ran of it, as Slurm does it. */
static void wait_for_nodes(job_record_t *job, const struct sluice_ending *ending)
{
    time_t earliest = ending->end_time + sluice_credential_lifetime() + 1;
    if (job->details->begin_time < earliest)
        job->details->begin_time = earliest;
}

/* A requeued job's record: what ran of it is gone. Slurm's own way (batch_requeue_fini) sends accounting what the old
 * controller has sent already. */
static void make_waiting(job_record_t *job, const struct sluice_ending *ending)
{
    sluice_job_state_set(job, JOB_PENDING);
    job->start_time = job->end_time = job->end_time_exp = job->preempt_time = 0;
    job->total_cpus = job->node_cnt = job->next_step_id = 0;
    xfree(job->batch_host);
    xfree(job->nodes);
    xfree(job->nodes_completing);
    FREE_NULL_BITMAP(job->node_bitmap);
    FREE_NULL_BITMAP(job->node_bitmap_cg);
    free_job_resources(&job->job_resrcs);
    FREE_NULL_LIST(job->gres_list_alloc);
    FREE_NULL_LIST(job->step_list);
    job->step_list = list_create(free_step_record);
    if (ending) { /* else it is run at once */
        job->bit_flags &= ~(uint64_t)JOB_ACCRUE_OVER;
        job->details->accrue_time = 0;
        job->restart_cnt = (uint16_t)ending->restarts;
        job->db_index = 0;
        job->details->submit_time = ending->end_time + 1; /* a row of its own in accounting */
        wait_for_nodes(job, ending);
    }
    job->details->prolog_running = 0;
}

static void make_ended(job_record_t *job, const struct sluice_ending *ending)
{
    uint32_t state = ending->state & (JOB_STATE_BASE | JOB_COMPLETING);
    if (!job->nodes)
        state &= JOB_STATE_BASE;
    job->start_time = ending->start_time;
    job->end_time = ending->end_time;
    job->exit_code = ending->exit_code;
    job->derived_ec = ending->derived_code;
    job->state_reason = ending->reason;
    job->requid = ending->uid;
    xfree(job->state_desc);
    if (ending->db_index)
        job->db_index = ending->db_index;
    job->details->prolog_running = 0;
    sluice_job_state_set(job, state);
}

static bool make_running(job_record_t *job, const struct picture *picture)
{
    buf_t *buffer = buffer_of(&picture->start);
    bool good = sluice_start_unpack(job, buffer);
    free_buf(buffer);
    job->details->prolog_running = 0;
    if (!good)
        unsettled(job->job_id, "its start is damaged in the journal");
    return good;
}

/* Which task of which array its start or end was; task NO_VAL: none. */
static void task_of(const struct picture *picture, uint32_t *array_id, uint32_t *task_id)
{
    struct sluice_start start;
    struct sluice_ending ending;
    *array_id = 0;
    *task_id = NO_VAL;
    if (start_of(picture, &start)) {
        *array_id = start.array_id;
        *task_id = start.task_id;
    } else if (ending_of(picture, &ending)) {
        *array_id = ending.array_id;
        *task_id = ending.task_id;
    }
    if (!*array_id)
        *task_id = NO_VAL;
}

/* The last task to leave an array's record keeps it, with the array's id: it comes after all the others. */
static bool is_last_task(const struct picture *picture)
{
    uint32_t array_id, task_id;
    task_of(picture, &array_id, &task_id);
    return task_id != NO_VAL && array_id == picture->job_id;
}

/* The record of a task that the state file has in its array's: made one of its own, with the id that it had. */
static job_record_t *split_task(uint32_t job_id, uint32_t array_id, uint32_t task_id)
{
    job_record_t *job = find_job_record(array_id);
    if (!job || !job->array_recs || !job->array_recs->task_id_bitmap || !IS_JOB_PENDING(job) ||
        task_id >= (uint32_t)bit_size(job->array_recs->task_id_bitmap) ||
        !bit_test(job->array_recs->task_id_bitmap, task_id))
        return NULL;
    if (job_id == array_id && job->array_recs->task_cnt > 1) { /* Slurm would give the id twice */
        unsettled(job_id, "task %u of array %u has the array's id, but the journal lacks other tasks that have left it",
                  task_id, array_id);
        return NULL;
    }
    uint32_t first = slurm_conf.first_job_id;
    job->array_job_id = array_id;
    job->array_task_id = task_id;
    slurm_conf.first_job_id = job_id; /* Slurm takes the next free id from there */
    sluice_job_array_post_sched(job);
    slurm_conf.first_job_id = first;
    if (job->job_id != job_id)
        unsettled(job_id, "task %u of array %u got job id %u, as its own was taken", task_id, array_id, job->job_id);
    return job;
}

/* The job's record, or that of the array that it was a task of, made its own. */
static job_record_t *record_of(const struct picture *picture)
{
    uint32_t array_id, task_id;
    job_record_t *job = find_job_record(picture->job_id);
    task_of(picture, &array_id, &task_id);
    if (task_id != NO_VAL && (!job || (job->array_recs && job->array_task_id == NO_VAL)))
        return split_task(picture->job_id, array_id, task_id);
    return job;
}

/* Whether Slurm's state has the job in a later run already than the record says. */
static bool is_later(const job_record_t *job, uint32_t restarts)
{
    return job->restart_cnt > restarts;
}

/* Slurm has saved that start. If it did so before the launch, for which all was ready once the start was durable, the
 * job is not launched a second time, upon which its node would have it requeued while it runs. A site's own prolog, and
 * nodes that are being powered up or rebooted, take longer. */
static bool has_started(job_record_t *job, const struct sluice_start *start)
{
    if ((!IS_JOB_RUNNING(job) && !IS_JOB_SUSPENDED(job)) || job->start_time != start->at)
        return false;
    if (!slurm_conf.prolog_slurmctld && !slurm_conf.resume_program && !job->reboot) {
        job->details->prolog_running = 0;
        sluice_job_state_set(job, job->job_state & ~(uint32_t)JOB_CONFIGURING);
    }
    return true;
}

static void edit_running(struct picture *picture, job_record_t *job)
{
    struct sluice_start start;
    if (!start_of(picture, &start)) {
        unsettled(picture->job_id, "its start is damaged in the journal");
        return;
    }
    if (has_started(job, &start) || IS_JOB_FINISHED(job) || is_later(job, start.restarts))
        return;
    if (!IS_JOB_PENDING(job) || IS_JOB_COMPLETING(job))
        make_waiting(job, NULL);
    picture->done = make_running(job, picture);
    if (!picture->done)
        return;
    job->bit_flags |= JOB_ACCRUE_OVER; /* Slurm's start counts only those that wait: it is in no count */
    note(RESTORED, job->job_id);
}

static void edit_ended(struct picture *picture, job_record_t *job, const struct sluice_ending *ending)
{
    struct sluice_start start;
    if (IS_JOB_FINISHED(job) || is_later(job, ending->restarts))
        return;
    if (start_of(picture, &start) && !(IS_JOB_RUNNING(job) && job->start_time == start.at))
        (void)make_running(job, picture); /* for its nodes, where something may be left of it */
    make_ended(job, ending);
    picture->done = true;
    note(ENDINGS, job->job_id);
}

/* Nothing has happened to it since Slurm's state was saved. */
static void edit_known(struct picture *picture)
{
    struct sluice_start start;
    job_record_t *job = find_job_record(picture->job_id);
    picture->missing = !job;
    if (job && picture->start.length && start_of(picture, &start))
        (void)has_started(job, &start);
}

/* Bring a record that is there to what the journal says; nothing is derived from it yet. */
static void edit(struct picture *picture)
{
    struct sluice_ending ending = {0};
    if (picture->state == KNOWN) {
        edit_known(picture);
        return;
    }
    job_record_t *job = record_of(picture);
    if (!job)
        return;
    picture->missing = false;
    if ((picture->state == ENDED || picture->state == REQUEUED) && !ending_of(picture, &ending)) {
        unsettled(picture->job_id, "its end is damaged in the journal");
        return;
    }
    if (picture->state == RUNS)
        edit_running(picture, job);
    else if (picture->state == ENDED)
        edit_ended(picture, job, &ending);
    else if (picture->state == REQUEUED && !is_later(job, ending.restarts - 1)) {
        make_waiting(job, &ending);
        note(REQUEUES, job->job_id);
    }
}

/* The request as it was taken in; NULL: damaged. */
static job_desc_msg_t *request_of(const struct picture *picture, struct sluice_submission *facts)
{
    slurm_msg_t message;
    buf_t *buffer = buffer_of(&picture->submit);
    job_desc_msg_t *request = NULL;
    slurm_msg_t_init(&message);
    if (sluice_submission_unpack(facts, buffer)) {
        message.msg_type = REQUEST_SUBMIT_BATCH_JOB;
        message.protocol_version = facts->version;
        if (unpack_msg(&message, buffer) == SLURM_SUCCESS)
            request = message.data;
    }
    free_buf(buffer);
    if (request && facts->tasks) {
        request->array_bitmap = bit_alloc(slurm_conf.max_array_sz);
        if (bit_unfmt(request->array_bitmap, facts->tasks) != 0) {
            slurm_free_job_desc_msg(request);
            request = NULL;
        }
    }
    return request;
}

/* ---- files of jobs that Slurm's state has ---- */

/* A file with that content, durable. */
static bool write_file(const char *path, mode_t mode, const void *head, size_t head_size, char *const *texts,
                       uint32_t count)
{
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, mode);
    bool good = file >= 0 && write(file, head, head_size) == (ssize_t)head_size;
    for (uint32_t i = 0; i < count && good; i++)
        good = write(file, texts[i], strlen(texts[i]) + 1) == (ssize_t)strlen(texts[i]) + 1;
    good = good && fsync(file) == 0;
    if (!good)
        error("sluice: failover journal: %s: %m", path);
    if (file >= 0)
        close(file);
    return good;
}

static bool is_empty(const char *path)
{
    struct stat facts;
    return stat(path, &facts) != 0 || facts.st_size == 0;
}

/*
 * Slurm syncs its state, but not a job's script and environment: after a power cut they may be empty, which ends
 * slurmctld when it launches the job. They are written again from the job's submission.
 */
static void repair_files(const struct picture *picture)
{
    char folder[PATH], script[PATH + 16], environment[PATH + 16];
    const job_record_t *job = find_job_record(picture->job_id);
    if (!job || !job->batch_flag || !picture->submit.length || (IS_JOB_FINISHED(job) && !job->array_recs))
        return;
    snprintf(folder, sizeof folder, "%s/hash.%u", slurm_conf.state_save_location, picture->job_id % 10);
    (void)mkdir(folder, 0700);
    snprintf(folder, sizeof folder, "%s/hash.%u/job.%u", slurm_conf.state_save_location, picture->job_id % 10,
             picture->job_id);
    snprintf(script, sizeof script, "%s/script", folder);
    snprintf(environment, sizeof environment, "%s/environment", folder);
    if (!is_empty(script) && !is_empty(environment))
        return;
    struct sluice_submission facts;
    job_desc_msg_t *request = request_of(picture, &facts);
    if (request && request->script && (mkdir(folder, 0700) == 0 || errno == EEXIST)) {
        write_file(environment, 0600, &request->env_size, sizeof request->env_size, request->environment,
                   request->env_size);
        write_file(script, 0700, "", 0, &request->script, 1);
        info("sluice: failover journal: JobId=%u: its script and environment were lost, and are written again",
             picture->job_id);
    }
    if (request)
        slurm_free_job_desc_msg(request);
    xfree(facts.name);
    xfree(facts.tasks);
}

/* ---- the first step ---- */

/* Saved while slurmdbd was asked for the index of its row: nobody asks any more, and until it ends Slurm would let
 * nobody change the job, not even tell of its end. Asked anew, slurmdbd answers with the same row. */
static int forget_asking(void *item, void *argument)
{
    job_record_t *job = item;
    (void)argument;
    if (job->db_index == NO_VAL64 && !IS_JOB_FINISHED(job))
        job->db_index = 0;
    return 0;
}

static void settle_loaded(struct picture *picture)
{
    picture->missing = true;
    edit(picture);
    if (!picture->missing || picture->state == KNOWN)
        repair_files(picture);
    else if (picture->submit.length && picture->state != VOID)
        move_aside(picture->job_id);
}

void sluice_failover_loaded(void)
{
    struct timespec now;
    if (sluice_failover_is_writing())
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    own.began_us = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    own.covered_us = sluice_failover_covered_us();
    if (!sluice_segments_read(sluice_failover_folder(), fold, NULL, &own.found))
        error("sluice: failover journal: %s: nothing of it is used", own.found.problem);
    else if (own.found.problem[0])
        error("sluice: failover journal: %s", own.found.problem);
    sort_pictures();
    sluice_failover_reviving(&nothing); /* what Slurm's hooks say meanwhile is not journalled */
    for (uint32_t i = 0; i < own.count; i++)
        if (!is_last_task(&own.items[i]))
            settle_loaded(&own.items[i]);
    for (uint32_t i = 0; i < own.count; i++)
        if (is_last_task(&own.items[i]))
            settle_loaded(&own.items[i]);
    list_for_each(job_list, forget_asking, NULL);
    sluice_failover_reviving(NULL);
    if (own.jobs)
        info("sluice: failover journal: %u jobs since the state was saved at %" PRId64, own.jobs,
             own.covered_us / 1000000);
}

/* ---- the second step ---- */

/* Components of a heterogeneous job know each other. */
static void join_components(struct picture *picture, job_record_t *job, const struct sluice_submission *facts)
{
    job_record_t *leader = facts->het_offset == NO_VAL ? NULL : find_job_record(picture->job_id - facts->het_offset);
    if (!leader)
        return;
    char set[64];
    uint32_t last = leader->job_id + (facts->components ? facts->components : facts->het_offset + 1) - 1;
    if (!leader->het_job_list)
        leader->het_job_list = list_create(NULL);
    list_append(leader->het_job_list, job);
    job->het_job_id = leader->job_id;
    job->het_job_offset = facts->het_offset;
    job->batch_flag = 1;
    snprintf(set, sizeof set, "%u-%u", leader->job_id, last);
    xfree(job->het_job_id_set);
    job->het_job_id_set = xstrdup(set);
}

/* Whether all components of the heterogeneous job were taken in, so that its submitter was answered. */
static bool is_whole(const struct picture *picture, const struct sluice_submission *facts)
{
    if (facts->het_offset == NO_VAL || !facts->components)
        return true;
    for (uint32_t i = 0; i < facts->components; i++) {
        const struct picture *other = picture_of(picture->job_id - facts->het_offset + i, false);
        if ((!other || !other->submit.length || other->state == VOID) &&
            !find_job_record(picture->job_id - facts->het_offset + i))
            return false;
    }
    return true;
}

static job_record_t *submit_again(struct picture *picture)
{
    struct sluice_submission facts;
    job_desc_msg_t *request = request_of(picture, &facts);
    job_record_t *job = NULL;
    char *text = NULL;
    if (!request)
        unsettled(picture->job_id, "its submission is damaged in the journal");
    else if (facts.flags & SLUICE_SUBMIT_CRON)
        unsettled(picture->job_id, "a job of scrontab is not brought back; Slurm makes it anew at its time");
    else if (!(facts.flags & SLUICE_SUBMIT_BATCH) && facts.het_offset == NO_VAL && picture->state == ENDED)
        job = NULL;
    else if (!request->script && facts.het_offset == NO_VAL)
        unsettled(picture->job_id, "an allocation of salloc or srun by uid %u is not made again%s", facts.uid,
                  picture->state == RUNS ? "; it had nodes, which it loses" : "");
    else if (!is_whole(picture, &facts))
        unsettled(picture->job_id, "its heterogeneous job was not taken in whole, and not acknowledged");
    else if (!sluice_make_ready_to_submit())
        unsettled(picture->job_id, "it could not be submitted again: a plugin of Slurm's is not ready");
    else {
        struct sluice_ending ending;
        request->job_id = picture->job_id;
        if (picture->state == REQUEUED && ending_of(picture, &ending)) { /* a row of its own in accounting */
            facts.submit_time = ending.end_time + 1;
            facts.db_index = 0;
        }
        bool later = SLUICE_PRIORITIES_COME_LATER && request->priority == NO_VAL;
        if (later)
            request->priority = 1;
        sluice_failover_reviving(&facts);
        int status = job_allocate(request, 0, false, NULL, facts.het_offset != NO_VAL && facts.het_offset > 0,
                                  slurm_conf.slurm_user_id, false, &job, &text, facts.version);
        if (job && job->job_state == JOB_FAILED)
            job = NULL;
        if (!job)
            unsettled(picture->job_id, "it could not be submitted again: %s%s%s", slurm_strerror(status),
                      text ? "; " : "", text ? text : "");
        else {
            if (later)
                job->direct_set_prio = 0;
            join_components(picture, job, &facts);
            forget_aside(picture->job_id);
            if (picture->state != ENDED)
                note(RESUBMITTED, picture->job_id);
        }
    }
    xfree(text);
    sluice_failover_reviving(&nothing);
    xfree(facts.name);
    xfree(facts.tasks);
    if (request)
        slurm_free_job_desc_msg(request);
    return job;
}

/* A job that runs, entered where Slurm's own start of a job enters it; its resources are counted later, with all. */
static bool enter(job_record_t *job)
{
    FREE_NULL_BITMAP(job->node_bitmap);
    if (!job->nodes || sluice_node_bitmap(job->nodes, &job->node_bitmap) || reset_node_bitmap(job))
        return false;
    allocate_nodes(job);
    job_array_start(job);
    build_node_details(job, false);
    rebuild_job_part_list(job);
    job_set_alloc_tres(job, false);
    sluice_acct_policy_job_begin(job);
    sluice_job_claim_reservation(job);
    jobacct_storage_g_job_start(acct_db_conn, job);
    gs_job_start(job);
    return true;
}

/* Slurm sees a batch script's end by its step. */
static void give_batch_step(job_record_t *job)
{
    step_record_t *step = NULL;
    struct xlist *steps = job->step_list;
    if (!job->batch_flag || !IS_JOB_RUNNING(job) || !job->node_bitmap || (steps && list_count(steps)))
        return;
    step = build_batch_step(job);
    if (step)
        step->start_time = job->start_time;
}

static void leave(job_record_t *job, const struct sluice_ending *ending)
{
    bool had_nodes = IS_JOB_RUNNING(job) && job->node_bitmap;
    make_ended(job, ending);
    if (had_nodes) {
        build_cg_bitmap(job);
        sluice_job_state_set(job, (ending->state & JOB_STATE_BASE) | JOB_COMPLETING);
    }
    job_completion_logger(job, false);
    if (had_nodes)
        deallocate_nodes(job, false, false, false);
}

static bool is_to_come_back(const struct picture *picture)
{
    return picture->missing && picture->state != VOID && picture->state != KNOWN;
}

/* What is missing is there again, as it was when it was submitted. True: something has changed. */
static bool take_in(struct picture *picture)
{
    return is_to_come_back(picture) && picture->submit.length && !find_job_record(picture->job_id) &&
           submit_again(picture);
}

/* A job that was missing: to where it was. True: something has changed. */
static bool bring_back(struct picture *picture)
{
    struct sluice_ending ending = {0};
    if (!is_to_come_back(picture))
        return false;
    job_record_t *job = record_of(picture);
    if (!job && !picture->submit.length && picture->state == RUNS)
        unsettled(picture->job_id, "it runs, but neither Slurm's state nor the journal has its submission");
    if (!job)
        return false;
    if ((picture->state == ENDED || picture->state == REQUEUED) && !ending_of(picture, &ending)) {
        unsettled(picture->job_id, "its end is damaged in the journal");
        return true;
    }
    if (picture->state == REQUEUED) {
        job->restart_cnt = (uint16_t)ending.restarts;
        wait_for_nodes(job, &ending);
    }
    if (picture->start.length && make_running(job, picture)) {
        if (!enter(job))
            unsettled(job->job_id, "its nodes %s are not there any more", job->nodes ? job->nodes : "");
        else if (picture->state == RUNS)
            note(RESTORED, job->job_id);
    }
    return true;
}

/* A job that is back, and has ended: its nodes are told, as something of it may be left there. */
static void end_again(struct picture *picture)
{
    struct sluice_ending ending;
    job_record_t *job = find_job_record(picture->job_id);
    if (!job || !picture->missing || picture->state != ENDED || !ending_of(picture, &ending))
        return;
    leave(job, &ending);
    note(ENDINGS, job->job_id);
}

static void tell_modifications(const struct picture *picture)
{
    uint32_t uid = 0, size;
    uint16_t version;
    char *what = NULL;
    if (!picture->modifications || picture->state == ENDED)
        return;
    buf_t *buffer = buffer_of(&picture->modification);
    if (unpack16(&version, buffer) || unpack32(&uid, buffer) || unpackstr_xmalloc_chooser(&what, &size, buffer))
        what = NULL;
    unsettled(picture->job_id,
              "%u changes were asked for since Slurm's state was saved; whether they hold is not known, "
              "they are not repeated. The last: by uid %u, %s",
              picture->modifications, uid, what ? what : "");
    xfree(what);
    free_buf(buffer);
}

static void forget_all(void)
{
    for (uint32_t i = 0; i < own.count; i++) {
        keep(&own.items[i].submit, NULL);
        keep(&own.items[i].start, NULL);
        keep(&own.items[i].ending, NULL);
        keep(&own.items[i].modification, NULL);
    }
    xfree(own.items);
    xfree(own.buckets);
    for (int i = 0; i < OUTCOMES; i++)
        xfree(own.list[i]);
    free(own.found.items);
    memset(&own, 0, sizeof own);
}

void sluice_failover_ready(int (*recount)(void))
{
    bool changed = false;
    if (!own.began_us)
        return;
    sluice_failover_reviving(&nothing);
    for (uint32_t i = 0; i < own.count; i++)
        changed |= take_in(&own.items[i]);
    for (uint32_t i = 0; i < own.count; i++)
        changed |= !is_last_task(&own.items[i]) && bring_back(&own.items[i]);
    for (uint32_t i = 0; i < own.count; i++)
        changed |= is_last_task(&own.items[i]) && bring_back(&own.items[i]);
    if (changed)
        (void)recount();
    for (uint32_t i = 0; i < own.count; i++) {
        job_record_t *job = find_job_record(own.items[i].job_id);
        end_again(&own.items[i]);
        if (job && own.items[i].state == RUNS)
            give_batch_step(job);
        tell_modifications(&own.items[i]);
    }
    sluice_failover_reviving(NULL);
    if (own.found.highest_id) /* last: tasks that leave their arrays get their ids from Slurm's sequence */
        raise_id(own.found.highest_id + 1);
    if (own.jobs || own.found.problem[0]) {
        report();
        last_job_update = time(NULL);
        schedule_job_save();
        info("sluice: failover journal: %u resubmitted, %u restored as running, %u ended, %u requeued, %u not settled",
             own.counts[RESUBMITTED], own.counts[RESTORED], own.counts[ENDINGS], own.counts[REQUEUES],
             own.counts[UNSETTLED]);
    }
    sluice_failover_open(&own.found);
    if (sluice_failover_is_writing())
        sluice_failover_leads();
    forget_all();
}
