/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A submission as Slurm has it, and the result of its admission. */
#ifndef SLUICE_ADMISSION_SUBMISSION_H
#define SLUICE_ADMISSION_SUBMISSION_H

#include "admission/outlook.h"
#include "admission/tres.h"
#include "rules/rules.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    SLUICE_REFUSAL_MAX = 1024, /* room that any message fits in */
    SLUICE_NAME_LIST_MAX = 512,
};

/* Why a submission was refused; job_submit gives each its Slurm error code. */
enum sluice_refusal {
    SLUICE_ADMITTED,
    SLUICE_REFUSED_REQUEST,  /* malformed or contradictory, or more than this Slurm can do */
    SLUICE_REFUSED_LIMIT,    /* a limit of the tenant */
    SLUICE_REFUSED_TIME,     /* run time or deadline */
    SLUICE_REFUSED_TIME_MIN, /* --time-min beyond the deadline */
    SLUICE_REFUSED_ACCOUNT,  /* expired tenant */
    SLUICE_REFUSED_RATE,     /* too many submissions per minute; from rate.h */
};

/* What Slurm knows of the network. */
enum sluice_topology {
    SLUICE_TOPOLOGY_NONE,
    SLUICE_TOPOLOGY_SWITCHES,
    SLUICE_TOPOLOGY_BLOCK, /* topology/block only: no switches */
};

/* What this Slurm can do. */
struct sluice_slurm {
    bool slash;           /* GRES are written gres/gpu (23.11 and later), else gres:gpu */
    bool several_sharing; /* tasks of a node may get shards of different GPUs: 24.05 and MULTIPLE_SHARING_GRES_PJ */
    bool places;          /* level place: Sluice chooses nodes and GPUs */
    bool list_offers;     /* if more nodes are named than -N asks for, takes some (24.05 and later), else all */
    enum sluice_topology topology;
    int64_t now;                    /* seconds since 1970 */
    struct sluice_outlook *outlook; /* when GPUs come free, for deadlines; NULL: not known */
};

/* A request as Slurm has it. 0, NULL and false are "not asked". Strings are only read. */
struct sluice_submission {
    const char *tres[SLUICE_PER_COUNT];     /* tres_per_job, tres_per_node, tres_per_socket, tres_per_task */
    const char *replaced[SLUICE_PER_COUNT]; /* of a changed job: what the change's texts above replace */
    const char *cpus_per_tres, *mem_per_tres, *features, *prefer, *partition, *qos;
    uint32_t min_nodes, max_nodes, tasks, tasks_per_node, tasks_per_gpu, sockets_per_node, cpus_per_task, min_cpus;
    uint32_t min_cpus_per_node;
    uint32_t required_nodes;       /* nodes that are required by name */
    uint32_t switches;             /* --switches */
    uint32_t slurm_segment;        /* Slurm's own --segment; 0: none */
    uint32_t time_limit, time_min; /* minutes; UINT32_MAX without end */
    int64_t deadline, begin;       /* seconds since 1970 */
    bool memory_asked;             /* --mem or --mem-per-cpu */
    bool whole_nodes;              /* --exclusive */
    bool contiguous;               /* of a new job: the gaps between required nodes are filled */
    bool step_at_once;             /* srun: its step repeats the command's own request, however the job's is changed */
    bool script;                   /* a new job has one: sbatch */
    bool stays_ended;              /* --no-requeue */
    bool truncates;                /* --open-mode=truncate */
    bool heterogeneous;            /* a component of a heterogeneous job */
    bool admitted_before;          /* a job as a modification would leave it: its --gpu-mem has become shards */
    bool tasks_split;              /* of such a job: each task's shards are on a GPU of its own */
    struct sluice_options options;
};

/*
 * The result. The request keeps what `set_...` and empty texts do not change. With a refusal only `refusal` and
 * `message` count; with SLUICE_ADMITTED `message` is a notice for the user, often empty.
 */
struct sluice_admission {
    enum sluice_refusal refusal;
    char message[SLUICE_REFUSAL_MAX];
    bool set_tres; /* all four texts replace the request's, empty ones included */
    char tres[SLUICE_PER_COUNT][SLUICE_TRES_TEXT_MAX + 192];
    bool set_cpus_per_tres, set_mem_per_tres; /* the texts replace the request's, empty or not */
    char cpus_per_tres[64], mem_per_tres[64];
    char features[SLUICE_NAME_LIST_MAX], prefer[SLUICE_NAME_LIST_MAX];
    char partition[SLUICE_NAME_LIST_MAX], qos[SLUICE_NAME_LIST_MAX];
    uint32_t min_nodes, max_nodes, time_limit, min_cpus_per_node; /* 0: as it was */
    uint64_t memory_per_node_mib;                                 /* 0: as it was */
    bool set_switches;
    uint32_t switches, switch_wait_s; /* as --switches=N@TIME; UINT32_MAX: as long as Slurm lets it wait */
    bool one_task_per_sharing;
    bool clear_binding; /* of tasks to whole GPUs, which --gpus-per-task implies */
};

#endif
