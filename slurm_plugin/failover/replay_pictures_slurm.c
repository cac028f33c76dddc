/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Replay of the failover journal: its entries, folded to one picture a job. */
#include "failover/replay_internal_slurm.h"

#include <stdlib.h>
#include <string.h>

#include "src/common/slurm_protocol_pack.h"
#include "src/common/xmalloc.h"

static void fill_buckets(void)
{
    memset(sluice_replay.buckets, 0, sluice_replay.bucket_count * sizeof *sluice_replay.buckets);
    for (uint32_t i = 0; i < sluice_replay.count; i++) {
        sluice_replay.items[i].next = sluice_replay.buckets[sluice_replay.items[i].job_id % sluice_replay.bucket_count];
        sluice_replay.buckets[sluice_replay.items[i].job_id % sluice_replay.bucket_count] = i + 1;
    }
}

static int by_id(const void *left, const void *right)
{
    uint32_t a = ((const struct picture *)left)->job_id, b = ((const struct picture *)right)->job_id;
    return (a > b) - (a < b);
}

void sluice_pictures_sort(void)
{
    if (sluice_replay.count < 2)
        return;
    qsort(sluice_replay.items, sluice_replay.count, sizeof *sluice_replay.items, by_id);
    fill_buckets();
}

struct picture *sluice_picture_of(uint32_t job_id, bool make)
{
    uint32_t bucket = sluice_replay.bucket_count ? job_id % sluice_replay.bucket_count : 0;
    for (uint32_t i = sluice_replay.bucket_count ? sluice_replay.buckets[bucket] : 0; i;
         i = sluice_replay.items[i - 1].next)
        if (sluice_replay.items[i - 1].job_id == job_id)
            return &sluice_replay.items[i - 1];
    if (!make)
        return NULL;
    if (sluice_replay.count == sluice_replay.room) {
        uint32_t room = sluice_replay.room ? 2 * sluice_replay.room : 1024;
        sluice_replay.items = xrealloc(sluice_replay.items, room * sizeof *sluice_replay.items);
        sluice_replay.buckets = xrealloc(sluice_replay.buckets, room * sizeof *sluice_replay.buckets);
        sluice_replay.room = sluice_replay.bucket_count = room;
        fill_buckets();
        bucket = job_id % room;
    }
    sluice_replay.items[sluice_replay.count] =
        (struct picture){.job_id = job_id, .next = sluice_replay.buckets[bucket]};
    sluice_replay.buckets[bucket] = ++sluice_replay.count;
    return &sluice_replay.items[sluice_replay.count - 1];
}

static void keep(struct bytes *bytes, const struct sluice_journal_entry *entry)
{
    xfree(bytes->data);
    *bytes = (struct bytes){0};
    if (entry && entry->length) {
        bytes->data = xmalloc(entry->length);
        memcpy(bytes->data, entry->payload, entry->length);
        bytes->length = entry->length;
    }
}

/* Slurm's state has the job. Its script may not be on the disk, as Slurm does not sync it; and it may have been saved
 * between its start and its launch. */
static void keep_covered(struct picture *job, const struct sluice_journal_entry *entry)
{
    if (entry->type == SLUICE_JOURNAL_SUBMIT)
        keep(&job->submit, entry);
    else if (entry->type == SLUICE_JOURNAL_START)
        keep(&job->start, entry);
    else if (entry->type == SLUICE_JOURNAL_END || entry->type == SLUICE_JOURNAL_REQUEUE)
        keep(&job->start, NULL);
}

bool sluice_pictures_fold(const struct sluice_journal_entry *entry, void *argument)
{
    (void)argument;
    bool covered = entry->at_us < sluice_replay.covered_us;
    if (entry->type == SLUICE_JOURNAL_OPEN || !entry->job_id)
        return true;
    struct picture *job = sluice_picture_of(entry->job_id, true);
    if (covered) {
        keep_covered(job, entry);
        return true;
    }
    sluice_replay.jobs += job->state == KNOWN;
    switch (entry->type) {
    case SLUICE_JOURNAL_SUBMIT:
        keep(&job->submit, entry);
        keep(&job->start, NULL);
        keep(&job->ending, NULL);
        job->state = WAITS;
        break;
    case SLUICE_JOURNAL_VOID:
        job->state = VOID;
        break;
    case SLUICE_JOURNAL_START:
        keep(&job->start, entry);
        keep(&job->ending, NULL);
        job->state = RUNS;
        break;
    case SLUICE_JOURNAL_END:
        keep(&job->ending, entry);
        job->state = ENDED;
        break;
    case SLUICE_JOURNAL_REQUEUE:
        keep(&job->start, NULL);
        keep(&job->ending, entry);
        job->state = REQUEUED;
        break;
    case SLUICE_JOURNAL_MODIFY:
        keep(&job->modification, entry);
        job->modifications++;
        break;
    default:
        break;
    }
    return true;
}

void sluice_pictures_free(void)
{
    for (uint32_t i = 0; i < sluice_replay.count; i++) {
        keep(&sluice_replay.items[i].submit, NULL);
        keep(&sluice_replay.items[i].start, NULL);
        keep(&sluice_replay.items[i].ending, NULL);
        keep(&sluice_replay.items[i].modification, NULL);
    }
    xfree(sluice_replay.items);
    xfree(sluice_replay.buckets);
}

buf_t *sluice_picture_buffer(const struct bytes *bytes)
{
    char *data = xmalloc(bytes->length ? bytes->length : 1);
    if (bytes->length)
        memcpy(data, bytes->data, bytes->length);
    return create_buf(data, bytes->length);
}

bool sluice_picture_ending(const struct picture *job, struct sluice_ending *ending)
{
    buf_t *buffer = sluice_picture_buffer(&job->ending);
    bool good = sluice_ending_unpack(ending, buffer);
    free_buf(buffer);
    return good;
}

bool sluice_picture_start(const struct picture *job, struct sluice_start *start)
{
    buf_t *buffer = sluice_picture_buffer(&job->start);
    bool good = sluice_start_peek(buffer, start);
    free_buf(buffer);
    return good;
}

void sluice_picture_task(const struct picture *picture, uint32_t *array_id, uint32_t *task_id)
{
    struct sluice_start start;
    struct sluice_ending ending;
    *array_id = 0;
    *task_id = NO_VAL;
    if (sluice_picture_start(picture, &start)) {
        *array_id = start.array_id;
        *task_id = start.task_id;
    } else if (sluice_picture_ending(picture, &ending)) {
        *array_id = ending.array_id;
        *task_id = ending.task_id;
    }
    if (!*array_id)
        *task_id = NO_VAL;
}

bool sluice_picture_is_last_task(const struct picture *picture)
{
    uint32_t array_id, task_id;
    sluice_picture_task(picture, &array_id, &task_id);
    return task_id != NO_VAL && array_id == picture->job_id;
}

job_desc_msg_t *sluice_picture_request(const struct picture *picture, struct sluice_submission_facts *facts)
{
    slurm_msg_t message;
    buf_t *buffer = sluice_picture_buffer(&picture->submit);
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
