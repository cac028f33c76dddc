/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What hooks_slurm.c (hooks), replay_slurm.c (replay) and launches_slurm.c share, and what is in the entries'
 * payloads: Slurm's own packing, big-endian, whose version comes first. */
#ifndef SLUICE_FAILOVER_FAILOVER_INTERNAL_SLURM_H
#define SLUICE_FAILOVER_FAILOVER_INTERNAL_SLURM_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "failover/failover.h"
#include "journal/journal.h"

#include "src/common/pack.h"

/* Flags of a submission. */
enum { SLUICE_SUBMIT_BATCH = 1, SLUICE_SUBMIT_CRON = 2 };

/* A submission's facts; behind them in the entry is the request. */
struct sluice_submission_facts {
    uint16_t version;
    uint32_t uid, flags, components, het_offset; /* NO_VAL: not heterogeneous */
    time_t submit_time;
    uint64_t db_index;
    char *name, *tasks; /* tasks: of an array, "1-5,9" */
};
void sluice_submission_pack(const struct sluice_submission_facts *facts, buf_t *buffer);
/* False: damaged. The texts are Slurm's memory. */
bool sluice_submission_unpack(struct sluice_submission_facts *facts, buf_t *buffer);

/* A start: all that a job's record has when it runs and had not when it waited. */
void sluice_start_pack(job_record_t *job, buf_t *buffer);
/* Its beginning: which task of which array it is, and which of the job's runs. False: damaged. */
struct sluice_start {
    uint16_t version;
    uint32_t array_id, task_id, restarts;
    time_t at;
};
bool sluice_start_peek(buf_t *buffer, struct sluice_start *start);
/* Make `job` the record of a running job: state, nodes' names, resources, GRES; not yet entered anywhere else. */
bool sluice_start_unpack(job_record_t *job, buf_t *buffer);

/* An end or a requeue. */
struct sluice_ending {
    uint16_t version;
    uint32_t state, exit_code, derived_code, reason, restarts, array_id, task_id, uid;
    time_t start_time, end_time;
    uint64_t db_index;
};
void sluice_ending_pack(const struct sluice_ending *ending, buf_t *buffer);
bool sluice_ending_unpack(struct sluice_ending *ending, buf_t *buffer);

/* While a job is brought back, Slurm calls the hooks: they give it what it had instead of journalling. */
void sluice_failover_restoring(const struct sluice_submission_facts *facts);

/* A job is cancelled; it is not requeued when it may be one whose launch an earlier controller had begun. */
void sluice_failover_cancelled(job_record_t *job);
/* All is replayed, and this controller leads from now on: the same for those that were cancelled before. */
void sluice_failover_leads(void);
/* Once, some time after that: ask nodes whether jobs are there that an earlier controller started. Without locks. */
void sluice_failover_ask_nodes(void);

/* For replay: where the journal is, and the time in the header of Slurm's job state, in microseconds; 0: none. */
const char *sluice_failover_folder(void);
int64_t sluice_failover_covered_us(void);
/* Whether it is being written: then Slurm only reads its configuration again. */
bool sluice_failover_is_writing(void);
/* Begin to write after what was read. */
void sluice_failover_open(const struct sluice_segments *found);

#endif
