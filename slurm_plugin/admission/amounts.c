/* SPDX-License-Identifier: GPL-2.0-or-later */
/* How many nodes, tasks, GPUs and shards a request comes to, at most. */
#include "admission/admission_internal.h"

uint32_t sluice_least_nodes(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    uint32_t least = check->admission->min_nodes ? check->admission->min_nodes : submission->min_nodes;
    if (submission->required_nodes > least && !(least && check->slurm->list_offers))
        least = submission->required_nodes;
    if (submission->tasks && submission->tasks_per_node) {
        uint32_t needed = (submission->tasks - 1) / submission->tasks_per_node + 1;
        least = least > needed ? least : needed;
    }
    return least ? least : 1;
}

/* An upper bound: without -N, Slurm may spread a job over as many nodes as it has tasks. */
uint64_t sluice_most_nodes(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    uint32_t given = check->admission->max_nodes ? check->admission->max_nodes : submission->max_nodes;
    if (given)
        return larger(given, check->admission->max_nodes ? 0 : submission->min_nodes);
    uint64_t each = larger(larger(submission->cpus_per_task, submission->min_cpus_per_node), 1);
    uint64_t most = larger(larger(sluice_least_nodes(check), submission->required_nodes), submission->tasks);
    return larger(most, (submission->min_cpus + each - 1) / each);
}

static bool has_fixed_nodes(const struct sluice_check *check)
{
    return check->submission->min_nodes && check->submission->min_nodes == check->submission->max_nodes;
}

/*
 * Tasks on all nodes, at most. Slurm gives a job that is changed a task for each node, and from 23.11 on, where the
 * number of nodes is fixed, as many as --ntasks-per-node says (_figure_out_num_tasks).
 */
uint64_t sluice_most_tasks(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    uint64_t by_nodes = check->nodes * (submission->tasks_per_node ? submission->tasks_per_node : 1);
    if (!submission->tasks)
        return by_nodes;
    uint64_t least = larger(submission->tasks, submission->min_nodes);
    return check->slurm->slash && has_fixed_nodes(check) ? larger(least, by_nodes) : least;
}

uint64_t sluice_per_socket_factor(const struct sluice_check *check)
{
    /* Slurm refuses a count per socket without --sockets-per-node; if it did not, no node has more. */
    return check->submission->sockets_per_node ? check->submission->sockets_per_node : 64;
}

/* What each further node adds, and what does not depend on nodes. */
uint64_t sluice_total_of(const struct sluice_check *check, const struct sluice_gres_counts *counts)
{
    const struct sluice_submission *submission = check->submission;
    uint64_t by_tasks = mul_saturating(counts->per[SLUICE_PER_TASK], sluice_most_tasks(check));
    /* From 23.11 on the number of tasks, where there is one, prevails over --gpus (_test_gres_cnt); a number of nodes
     * alone gives none, at submission or later (tried with 24.11.5). Before, Slurm refuses numbers that differ. */
    if (counts->per[SLUICE_PER_JOB] && (submission->tasks || submission->tasks_per_node))
        return larger(counts->per[SLUICE_PER_JOB], by_tasks);
    if (counts->per[SLUICE_PER_JOB])
        return counts->per[SLUICE_PER_JOB];
    uint64_t total = mul_saturating(counts->per[SLUICE_PER_NODE], check->nodes);
    total =
        larger(total, mul_saturating(counts->per[SLUICE_PER_SOCKET], sluice_per_socket_factor(check) * check->nodes));
    return larger(total, by_tasks);
}

/* GPUs that parts are taken of: one of each node, or one for each task where tasks have their own. */
uint64_t sluice_shared_gpus(const struct sluice_check *check)
{
    return check->request.shards.per[SLUICE_PER_TASK] ? sluice_most_tasks(check) : check->nodes;
}

/* Shards on one GPU, at most: nothing says that Slurm divides what a node gives. */
uint64_t sluice_shards_of_one_gpu(const struct sluice_check *check)
{
    const struct sluice_gres_counts *shards = &check->request.shards;
    uint64_t tasks =
        check->admission->one_task_per_sharing || check->submission->tasks_split ? 1 : sluice_most_tasks(check);
    uint64_t most = larger(shards->per[SLUICE_PER_JOB], shards->per[SLUICE_PER_NODE]);
    most = larger(most, shards->per[SLUICE_PER_SOCKET] * sluice_per_socket_factor(check));
    return larger(most, mul_saturating(shards->per[SLUICE_PER_TASK], tasks));
}

/*
 * An open number of nodes is no reason to refuse: the job gets so many that `each` (per node) times them stays within
 * the limit, where that is possible.
 */
void sluice_cap_nodes(struct sluice_check *check, uint64_t each, uint64_t limit)
{
    bool fixed = check->submission->max_nodes || check->admission->min_nodes;
    uint64_t fitting = limit / each;
    if (fixed || fitting < sluice_least_nodes(check) || fitting >= check->nodes)
        return;
    check->admission->max_nodes = (uint32_t)fitting;
    check->nodes = fitting;
}

/* Where Slurm fills the gaps between required nodes, only Slurm knows with how many; it then refuses more than are
 * counted here. */
void sluice_bound_gaps(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    if (submission->contiguous && submission->required_nodes && !submission->max_nodes && !check->admission->max_nodes)
        check->admission->max_nodes = (uint32_t)(check->nodes < UINT32_MAX - 2 ? check->nodes : UINT32_MAX - 2);
}
