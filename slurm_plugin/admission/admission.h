/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Whether a submission may enter the queue, and what it becomes: --gpu-mem turned into shards, defaults completed, the
 * limits of its tenant kept. Pure functions over the structures below: no Slurm, no clock, no allocation, no globals;
 * the same for a new job, an array, one component of a heterogeneous job, and a job as a modification would leave it.
 * job_submit/ fills the structures from Slurm's and writes the result back.
 */
#ifndef SLUICE_ADMISSION_H
#define SLUICE_ADMISSION_H

#include "admission/outlook.h"
#include "admission/tres.h"
#include "options/options.h"
#include "policy/policy.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    SLUICE_REFUSAL_MAX = 1024, /* room that any message fits in */
    SLUICE_NAME_LIST_MAX = 512,
};

/* Why a submission was refused; job_submit gives each its Slurm error code. */
enum sluice_refusal {
    SLUICE_ADMITTED,
    SLUICE_REFUSED_REQUEST, /* malformed or contradictory, or more than this Slurm can do */
    SLUICE_REFUSED_LIMIT,   /* a limit of the tenant */
    SLUICE_REFUSED_TIME,    /* run time or deadline */
    SLUICE_REFUSED_ACCOUNT, /* expired tenant */
    SLUICE_REFUSED_RATE,    /* too many submissions per minute; from rate.h */
};

/* What this Slurm can do. */
struct sluice_slurm {
    bool slash;           /* GRES are written gres/gpu (23.11 and later), else gres:gpu */
    bool several_sharing; /* tasks of a node may get shards of different GPUs: 24.05 and MULTIPLE_SHARING_GRES_PJ */
    bool places;          /* level place: Sluice chooses nodes and GPUs */
    bool list_offers;     /* of more nodes by name than -N asks for it takes some (24.05 and later), else all */
    int64_t now;          /* seconds since 1970 */
    struct sluice_outlook *outlook; /* when GPUs come free, for deadlines; NULL: not known */
};

/* A request as Slurm has it. 0, NULL and false are "not asked". Strings are only read. */
struct sluice_submission {
    const char *tres[SLUICE_PER_COUNT];     /* tres_per_job, tres_per_node, tres_per_socket, tres_per_task */
    const char *replaced[SLUICE_PER_COUNT]; /* of a changed job: what the change's texts above stand in place of */
    const char *cpus_per_tres, *mem_per_tres, *features, *prefer, *partition, *qos;
    uint32_t min_nodes, max_nodes, tasks, tasks_per_node, tasks_per_gpu, sockets_per_node, cpus_per_task, min_cpus;
    uint32_t min_cpus_per_node;
    uint32_t required_nodes;       /* nodes that are required by name */
    uint32_t time_limit, time_min; /* minutes; UINT32_MAX without end */
    int64_t deadline, begin;       /* seconds since 1970 */
    bool memory_asked;             /* --mem or --mem-per-cpu */
    bool whole_nodes;              /* --exclusive */
    bool contiguous;               /* of a new job: the gaps between required nodes are filled */
    bool step_at_once;             /* srun: its step repeats the command's own request, whatever becomes of the job's */
    bool heterogeneous;            /* a component of a heterogeneous job */
    bool admitted_before;          /* a job as a modification would leave it: its --gpu-mem has become shards */
    bool tasks_split;              /* of such a job: each task's shards are on a GPU of its own */
    struct sluice_options options;
};

/*
 * The result. Where `set_...` or a text's first character says nothing, the request stays as it is. With a refusal only
 * `refusal` and `message` count; with SLUICE_ADMITTED `message` is a notice for the user, often empty.
 */
struct sluice_admission {
    enum sluice_refusal refusal;
    char message[SLUICE_REFUSAL_MAX];
    bool set_tres; /* all four texts replace the request's, empty ones included */
    char tres[SLUICE_PER_COUNT][SLUICE_TRES_TEXT_MAX + 96];
    bool set_cpus_per_tres, set_mem_per_tres; /* the texts replace the request's, empty or not */
    char cpus_per_tres[64], mem_per_tres[64];
    char features[SLUICE_NAME_LIST_MAX], prefer[SLUICE_NAME_LIST_MAX];
    char partition[SLUICE_NAME_LIST_MAX], qos[SLUICE_NAME_LIST_MAX];
    uint32_t min_nodes, max_nodes, time_limit, min_cpus_per_node; /* 0: as it was */
    uint64_t memory_per_node_mib;                                 /* 0: as it was */
    bool one_task_per_sharing;
    bool clear_binding; /* of tasks to whole GPUs, which --gpus-per-task brings along */
};

/*
 * Completes and checks one submission. `rules` may be NULL and `tenant` (the account's) too: then only the request
 * itself is checked and rewritten.
 */
void sluice_admit(const struct sluice_rules *rules, const struct sluice_tenant *tenant,
                  const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                  struct sluice_admission *admission);

#endif
