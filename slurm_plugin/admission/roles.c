/* SPDX-License-Identifier: GPL-2.0-or-later */
/* --gpu-role: the GPUs of the job, by purpose. They are laid out as the job starts (hook/roles.c). */
#include "admission/admission_internal.h"

#include "admission/wording.h"

#include <inttypes.h>

static bool refuse_roles(struct sluice_check *check, const char *why)
{
    return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST, "--gpu-role: %s", why);
}

static bool counts(const struct sluice_gres_counts *counts)
{
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        if (counts->per[per])
            return true;
    return false;
}

static uint64_t wanted(const struct sluice_options *options)
{
    uint64_t gpus = 0;
    for (uint32_t i = 0; i < options->gpu_role_count; i++)
        gpus += options->gpu_roles[i].gpus;
    return gpus;
}

/* Does the number of GPUs follow from the request alone? A count by node or task needs a number of nodes or tasks. */
static bool is_exact(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const bool nodes = sluice_least_nodes(check) == check->nodes;
    bool exact = check->request.gpu_types > 0;
    for (size_t i = 0; i < check->request.gpu_types; i++) {
        const uint64_t *per = check->request.gpus[i].per;
        exact &= per[SLUICE_PER_JOB] ||
                 (!per[SLUICE_PER_SOCKET] && (per[SLUICE_PER_TASK] ? submission->tasks || nodes : nodes));
    }
    return exact || (!check->request.gpu_types && submission->tasks_per_gpu && submission->tasks);
}

static uint64_t asked(const struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    uint64_t gpus = 0;
    for (size_t i = 0; i < check->request.gpu_types; i++)
        gpus += sluice_total_of(check, &check->request.gpus[i]);
    return gpus || !submission->tasks_per_gpu ? gpus : (submission->tasks - 1) / submission->tasks_per_gpu + 1;
}

bool sluice_check_roles(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const struct sluice_options *options = &submission->options;
    const uint64_t gpus = wanted(options);
    if (!options->gpu_role_count)
        return true;
    if (counts(&check->request.shards) || counts(&check->request.mps))
        return refuse_roles(check, "roles have whole GPUs, and the job asks for parts of GPUs; leave out either");
    if (submission->heterogeneous)
        return refuse_roles(check,
                            "not in a heterogeneous job, whose components are nodes and GPUs by purpose already; "
                            "submit one job, or leave it out");
    if (submission->whole_nodes)
        return refuse_roles(check,
                            "--exclusive takes all GPUs of a node, however many these are; leave it out, and ask "
                            "for GPUs by number");
    if (!check->slurm->places && !submission->admitted_before)
        return refuse_roles(check,
                            "this cluster does not lay out roles (it runs Sluice below level place); leave it out, "
                            "or submit a heterogeneous job with a component for each role");
    if (!(check->request.gpu_types || submission->tasks_per_gpu))
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--gpu-role: the roles have %" PRIu64 " GPUs, and the job asks for none; add --gpus=%" PRIu64, gpus, gpus);
    if (!is_exact(check))
        return submission->admitted_before ||
               sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--gpu-role: the roles have %" PRIu64 " GPUs, and how many the job gets is open; ask for "
                             "--gpus=%" PRIu64 ", or for one number of nodes (-N)",
                             gpus, gpus);
    return gpus == asked(check) || sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                                                 "--gpu-role: the roles have %" PRIu64
                                                 " GPUs, and the job asks for %" PRIu64 "; make both numbers the same",
                                                 gpus, asked(check));
}
