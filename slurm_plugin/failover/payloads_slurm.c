/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What is in the payloads of the journal's entries: see failover_internal_slurm.h. */
#include "failover/failover_internal_slurm.h"

#include "src/common/assoc_mgr.h"
#include "src/common/job_resources.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

void sluice_submission_pack(const struct sluice_submission_facts *facts, buf_t *buffer)
{
    pack16(facts->version, buffer);
    pack32(facts->uid, buffer);
    pack32(facts->flags, buffer);
    pack32(facts->components, buffer);
    pack32(facts->het_offset, buffer);
    pack_time(facts->submit_time, buffer);
    pack64(facts->db_index, buffer);
    packstr(facts->name, buffer);
    packstr(facts->tasks, buffer);
}

bool sluice_submission_unpack(struct sluice_submission_facts *facts, buf_t *buffer)
{
    uint32_t size;
    *facts = (struct sluice_submission_facts){0};
    return !unpack16(&facts->version, buffer) && !unpack32(&facts->uid, buffer) && !unpack32(&facts->flags, buffer) &&
           !unpack32(&facts->components, buffer) && !unpack32(&facts->het_offset, buffer) &&
           !unpack_time(&facts->submit_time, buffer) && !unpack64(&facts->db_index, buffer) &&
           !unpackstr_xmalloc_chooser(&facts->name, &size, buffer) &&
           !unpackstr_xmalloc_chooser(&facts->tasks, &size, buffer);
}

void sluice_ending_pack(const struct sluice_ending *ending, buf_t *buffer)
{
    pack16(ending->version, buffer);
    pack32(ending->state, buffer);
    pack32(ending->exit_code, buffer);
    pack32(ending->derived_code, buffer);
    pack32(ending->reason, buffer);
    pack32(ending->restarts, buffer);
    pack32(ending->array_id, buffer);
    pack32(ending->task_id, buffer);
    pack32(ending->uid, buffer);
    pack_time(ending->start_time, buffer);
    pack_time(ending->end_time, buffer);
    pack64(ending->db_index, buffer);
}

bool sluice_ending_unpack(struct sluice_ending *ending, buf_t *buffer)
{
    *ending = (struct sluice_ending){0};
    return !unpack16(&ending->version, buffer) && !unpack32(&ending->state, buffer) &&
           !unpack32(&ending->exit_code, buffer) && !unpack32(&ending->derived_code, buffer) &&
           !unpack32(&ending->reason, buffer) && !unpack32(&ending->restarts, buffer) &&
           !unpack32(&ending->array_id, buffer) && !unpack32(&ending->task_id, buffer) &&
           !unpack32(&ending->uid, buffer) && !unpack_time(&ending->start_time, buffer) &&
           !unpack_time(&ending->end_time, buffer) && !unpack64(&ending->db_index, buffer);
}

void sluice_start_pack(job_record_t *job, buf_t *buffer)
{
    pack16(SLURM_PROTOCOL_VERSION, buffer);
    pack32(job->array_job_id, buffer);
    pack32(job->array_task_id, buffer);
    pack_time(job->start_time, buffer);
    pack32(job->restart_cnt, buffer);
    packstr(job->nodes, buffer);
    pack_time(job->end_time, buffer);
    pack_time(job->end_time_exp, buffer);
    pack_time(job->details->submit_time, buffer);
    pack32(job->time_limit, buffer);
    pack16(job->limit_set.time, buffer);
    pack32(job->priority, buffer);
    pack32(job->total_cpus, buffer);
    pack32(job->total_nodes, buffer);
    pack32(job->node_cnt, buffer);
    pack32(job->cpu_cnt, buffer);
    pack32(job->next_step_id, buffer);
    pack32(job->resv_id, buffer);
    pack32(job->db_flags, buffer);
    pack64(job->db_index, buffer);
    packdouble(job->billable_tres, buffer);
    packstr(job->partition, buffer);
    packstr(job->batch_host, buffer);
    packstr(job->resv_name, buffer);
    packstr(job->tres_alloc_str, buffer);
    packstr(job->tres_fmt_alloc_str, buffer);
    pack_job_resources(job->job_resrcs, buffer, SLURM_PROTOCOL_VERSION);
    (void)gres_job_state_pack(job->gres_list_req, buffer, job->job_id, true, SLURM_PROTOCOL_VERSION);
    (void)gres_job_state_pack(job->gres_list_alloc, buffer, job->job_id, true, SLURM_PROTOCOL_VERSION);
}

bool sluice_start_peek(buf_t *buffer, struct sluice_start *start)
{
    *start = (struct sluice_start){0};
    return !unpack16(&start->version, buffer) && !unpack32(&start->array_id, buffer) &&
           !unpack32(&start->task_id, buffer) && !unpack_time(&start->at, buffer) &&
           !unpack32(&start->restarts, buffer);
}

/* A string of the entry in place of the job's. */
static bool take_text(char **place, buf_t *buffer)
{
    char *text = NULL;
    uint32_t size;
    if (unpackstr_xmalloc_chooser(&text, &size, buffer))
        return false;
    xfree(*place);
    *place = text;
    return true;
}

static bool take_numbers(job_record_t *job, buf_t *buffer)
{
    uint64_t db_index;
    bool good = !unpack_time(&job->end_time, buffer) && !unpack_time(&job->end_time_exp, buffer) &&
                !unpack_time(&job->details->submit_time, buffer) && !unpack32(&job->time_limit, buffer) &&
                !unpack16(&job->limit_set.time, buffer) && !unpack32(&job->priority, buffer) &&
                !unpack32(&job->total_cpus, buffer) && !unpack32(&job->total_nodes, buffer) &&
                !unpack32(&job->node_cnt, buffer) && !unpack32(&job->cpu_cnt, buffer) &&
                !unpack32(&job->next_step_id, buffer) && !unpack32(&job->resv_id, buffer) &&
                !unpack32(&job->db_flags, buffer) && !unpack64(&db_index, buffer) &&
                !unpackdouble(&job->billable_tres, buffer);
    if (!good)
        return false;
    if (db_index && db_index != NO_VAL64) /* slurmdbd was being asked for it */
        job->db_index = db_index;
    return true;
}

/* The partition that it was started in, of those that it asked for. */
static void settle_partition(job_record_t *job)
{
    part_record_t *partition = job->partition ? find_part_record(job->partition) : NULL;
    if (partition)
        job->part_ptr = partition;
}

bool sluice_start_unpack(job_record_t *job, buf_t *buffer)
{
    struct sluice_start start;
    job_resources_t *resources = NULL;
    struct xlist *wanted = NULL, *given = NULL;
    if (!sluice_start_peek(buffer, &start) || !take_text(&job->nodes, buffer) || !take_numbers(job, buffer) ||
        !take_text(&job->partition, buffer) || !take_text(&job->batch_host, buffer) ||
        !take_text(&job->resv_name, buffer) || !take_text(&job->tres_alloc_str, buffer) ||
        !take_text(&job->tres_fmt_alloc_str, buffer) || unpack_job_resources(&resources, buffer, start.version) ||
        gres_job_state_unpack(&wanted, buffer, job->job_id, start.version) ||
        gres_job_state_unpack(&given, buffer, job->job_id, start.version)) {
        free_job_resources(&resources);
        FREE_NULL_LIST(wanted);
        FREE_NULL_LIST(given);
        return false;
    }
    job->start_time = start.at;
    job->restart_cnt = (uint16_t)start.restarts;
    free_job_resources(&job->job_resrcs);
    job->job_resrcs = resources;
    FREE_NULL_LIST(job->gres_list_req);
    job->gres_list_req = wanted;
    FREE_NULL_LIST(job->gres_list_alloc);
    job->gres_list_alloc = given;
    settle_partition(job);
    if (job->tres_alloc_str)
        sluice_set_tres_counts(&job->tres_alloc_cnt, job->tres_alloc_str);
    else
        job_set_alloc_tres(job, false);
    sluice_job_state_set(job, JOB_RUNNING);
    job->bit_flags |= JOB_WAS_RUNNING;
    job->state_reason = WAIT_NO_REASON;
    xfree(job->state_desc);
    job->exit_code = 0;
    job->time_last_active = time(NULL);
    if (!job->step_list)
        job->step_list = list_create(free_step_record);
    return true;
}
