/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/gpu_mem.h"

#include "admission/constraint.h"
#include "admission/wording.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* How --gpu-mem is put into shards. */
struct layout {
    bool by_task;   /* each task's shards on a GPU of its own; else one GPU of each node */
    uint32_t nodes; /* exactly so many; 0: as asked */
};

static const char *why_one_gpu(const struct sluice_slurm *slurm)
{
    if (slurm->several_sharing)
        return "Slurm divides several shared GPUs of a node only among tasks, one each";
    if (slurm->slash)
        return "this Slurm gives a job shared memory of only one GPU of a node, as its SelectTypeParameters has no "
               "MULTIPLE_SHARING_GRES_PJ";
    return "Slurm before 23.11 gives a job shared memory of only one GPU of a node";
}

static bool refuse_several(const struct sluice_slurm *slurm, struct sluice_admission *admission, enum sluice_per per,
                           uint64_t count, const char *size)
{
    const char *option = sluice_per_option(per);
    return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                         "%s=%" PRIu64 " with --gpu-mem=%s: %s; ask for %sone GPU on each of several nodes (-N %" PRIu64
                         " --gpus-per-node=1 --gpu-mem=%s), or for whole GPUs (%s=%" PRIu64 " without --gpu-mem)",
                         option, count, size, why_one_gpu(slurm),
                         slurm->several_sharing ? "one GPU of each task (--gpus-per-task=1 and as many tasks), for "
                                                : "",
                         count, size, option, count);
}

static bool refuse_tasks(const struct sluice_slurm *slurm, struct sluice_admission *admission, const char *size)
{
    return sluice_refuse(
        admission, SLUICE_REFUSED_REQUEST,
        "--gpus-per-task=1 with --gpu-mem=%s and several tasks on a node: %s; put one task on each node "
        "(--ntasks-per-node=1), or let the tasks of a node share one GPU (leave out --gpus-per-task)",
        size, why_one_gpu(slurm));
}

static bool is_one_task_a_node(const struct sluice_submission *submission)
{
    bool node_each = submission->min_nodes == submission->tasks && submission->max_nodes == submission->tasks;
    return submission->tasks == 1 || submission->tasks_per_node == 1 || (submission->tasks && node_each) ||
           (!submission->tasks && !submission->tasks_per_node);
}

static bool choose_layout(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                          const struct sluice_gres_counts *gpus, const char *size, struct layout *layout,
                          struct sluice_admission *admission)
{
    uint64_t job = gpus->per[SLUICE_PER_JOB], node = gpus->per[SLUICE_PER_NODE], task = gpus->per[SLUICE_PER_TASK];
    memset(layout, 0, sizeof *layout);
    if (gpus->per[SLUICE_PER_SOCKET])
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                             "--gpus-per-socket with --gpu-mem=%s: shared memory is not counted by sockets; use "
                             "--gpus-per-node=1 or --gpus-per-task=1",
                             size);
    if (node > 1)
        return refuse_several(slurm, admission, SLUICE_PER_NODE, node, size);
    if (task > 1)
        return refuse_several(slurm, admission, SLUICE_PER_TASK, task, size);
    if (task && job && submission->tasks && job != submission->tasks)
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                             "--gpus=%" PRIu64
                             " with --gpus-per-task=1 and %u tasks contradict each other; leave out --gpus",
                             job, submission->tasks);
    if (task && !is_one_task_a_node(submission)) {
        if (node || !slurm->several_sharing)
            return refuse_tasks(slurm, admission, size);
        layout->by_task = true;
        return true;
    }
    if (job > 1 && !node && !task && !(submission->min_nodes == job && submission->max_nodes == job))
        return refuse_several(slurm, admission, SLUICE_PER_JOB, job, size);
    if (job) {
        if (job > UINT32_MAX || submission->min_nodes > job || (submission->max_nodes && submission->max_nodes < job))
            return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                                 "--gpus=%" PRIu64 " with --gpu-mem=%s is one GPU on each of %" PRIu64
                                 " nodes, but -N asks for another number of nodes; leave out -N or --gpus",
                                 job, size, job);
        layout->nodes = (uint32_t)job;
    }
    return true;
}

/* --cpus-per-gpu and --mem-per-gpu: no gres/gpu is left to count them by. */
static bool convert_per_gpu(const struct sluice_submission *submission, const struct layout *layout, const char *size,
                            struct sluice_admission *admission)
{
    const char *texts[] = {submission->cpus_per_tres, submission->mem_per_tres};
    uint64_t counts[2];
    for (size_t i = 0; i < 2; i++) {
        struct sluice_tres_request per_gpu = {.gpu_types = 0};
        char why[SLUICE_OPTION_WHY_MAX];
        if (!sluice_tres_add(&per_gpu, SLUICE_PER_NODE, texts[i], why, sizeof why))
            return sluice_refuse(admission, SLUICE_REFUSED_REQUEST, "%s: %s", i ? "--mem-per-gpu" : "--cpus-per-gpu",
                                 why);
        counts[i] = per_gpu.gpu_types ? per_gpu.gpus[0].per[SLUICE_PER_NODE] : 0;
    }
    if (layout->by_task && (counts[0] || counts[1]))
        return sluice_refuse(
            admission, SLUICE_REFUSED_REQUEST,
            "%s with --gpu-mem=%s and several tasks on a node: write --cpus-per-task and --mem-per-cpu",
            counts[0] ? "--cpus-per-gpu" : "--mem-per-gpu", size);
    admission->set_cpus_per_tres = counts[0] > 0;
    admission->set_mem_per_tres = counts[1] > 0;
    if (counts[0] > UINT16_MAX - 2)
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST, "--cpus-per-gpu=%" PRIu64 " is more than any node has",
                             counts[0]);
    if (counts[0] > submission->min_cpus_per_node)
        admission->min_cpus_per_node = (uint32_t)counts[0];
    admission->memory_per_node_mib = counts[1];
    return true;
}

static void write_tres(const struct sluice_slurm *slurm, const struct sluice_submission *submission, bool by_task,
                       uint64_t shards, struct sluice_admission *admission)
{
    char shard[64];
    sluice_gres_text(slurm, "shard", "", shards, shard, sizeof shard);
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        char rest[SLUICE_TRES_TEXT_MAX];
        bool here = per == (by_task ? SLUICE_PER_TASK : SLUICE_PER_NODE);
        size_t length = sluice_tres_without_gpus(submission->tres[per], rest);
        snprintf(admission->tres[per], sizeof admission->tres[per], "%s%s%s", rest, here && length ? "," : "",
                 here ? shard : "");
    }
    admission->set_tres = true;
}

bool sluice_gpu_mem_rewrite(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                            struct sluice_tres_request *request, struct sluice_admission *admission)
{
    static const struct sluice_gres_counts nothing;
    const struct sluice_gres_counts *gpus = request->gpu_types ? &request->gpus[0] : &nothing;
    uint64_t mib = submission->options.gpu_mem_mib;
    struct layout layout;
    char size[24];
    sluice_format_mib(mib, size, sizeof size);
    if (memcmp(request->shards.per, nothing.per, sizeof nothing.per) != 0 ||
        memcmp(request->mps.per, nothing.per, sizeof nothing.per) != 0)
        return sluice_refuse(
            admission, SLUICE_REFUSED_REQUEST,
            "--gpu-mem=%s and --gres=shard or mps share GPUs in two ways; leave out one of them (one shard "
            "is one MiB)",
            size);
    if (submission->whole_nodes)
        return sluice_refuse(
            admission, SLUICE_REFUSED_REQUEST,
            "--exclusive takes whole nodes with all their GPUs, and --gpu-mem=%s a part of one; leave out one of "
            "them",
            size);
    if (submission->step_at_once && request->gpu_types)
        return sluice_refuse(
            admission, SLUICE_REFUSED_REQUEST,
            "srun --gpu-mem=%s: leave out --gpus and the like, as srun's own step would ask for whole GPUs; "
            "--gpu-mem alone is one GPU of each node (-N), --constraint names its type; or use sbatch or "
            "salloc",
            size);
    if (submission->tasks_per_gpu)
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                             "--ntasks-per-gpu counts whole GPUs; with --gpu-mem=%s write --ntasks-per-node", size);
    if (request->gpu_types > 1)
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST,
                             "--gpu-mem=%s of several types of GPU: name one type, or none", size);
    if (!choose_layout(slurm, submission, gpus, size, &layout, admission) ||
        !convert_per_gpu(submission, &layout, size, admission))
        return false;
    /* Shards have no type that all versions accept: the type becomes the feature that `sluice gres write` gives
     * nodes. */
    if (gpus->type[0] && !sluice_require_feature(submission, gpus->type, "--gpu-mem of a type of GPU", admission))
        return false;
    write_tres(slurm, submission, layout.by_task, mib, admission);
    admission->one_task_per_sharing = layout.by_task;
    admission->clear_binding = gpus->per[SLUICE_PER_TASK] > 0;
    if (layout.nodes) {
        admission->min_nodes = layout.nodes;
        admission->max_nodes = layout.nodes;
    }
    memset(request, 0, sizeof *request);
    request->shards.per[layout.by_task ? SLUICE_PER_TASK : SLUICE_PER_NODE] = mib;
    return true;
}
