/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/nics_per_gpu.h"

#include "admission/wording.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool refuse(const struct sluice_submission *submission, const char *why, struct sluice_admission *admission)
{
    return sluice_refuse(admission, SLUICE_REFUSED_REQUEST, "--nics-per-gpu=%" PRIu32 ": %s",
                         submission->options.nics_per_gpu, why);
}

static uint64_t gpus_per(const struct sluice_tres_request *request, enum sluice_per per)
{
    uint64_t gpus = 0;
    for (size_t i = 0; i < request->gpu_types; i++)
        gpus += request->gpus[i].per[per];
    return gpus;
}

/* Are GPUs counted for all nodes together, and in no other way? */
static bool only_in_total(const struct sluice_tres_request *request)
{
    return gpus_per(request, SLUICE_PER_JOB) && !gpus_per(request, SLUICE_PER_NODE) &&
           !gpus_per(request, SLUICE_PER_SOCKET) && !gpus_per(request, SLUICE_PER_TASK);
}

/* GPUs in total count as those of the one node: Slurm 22.05 gives too few GPUs with NICs in total. */
static uint64_t gpus_with_nics(const struct sluice_tres_request *request, enum sluice_per per)
{
    if (per == SLUICE_PER_JOB)
        return 0;
    return gpus_per(request, per == SLUICE_PER_NODE && only_in_total(request) ? SLUICE_PER_JOB : per);
}

static const char *contradiction(const struct sluice_submission *submission, const struct sluice_tres_request *request)
{
    if (!request->gpu_types)
        return "the job asks for no whole GPUs; add --gpus-per-node=N or --gres=gpu:N, or ask for interfaces with "
               "--gres=nic:N";
    if (submission->step_at_once)
        return "srun's own step would get GPUs without interfaces; write --gres=gpu:N,nic:N, or use sbatch or salloc";
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        if (sluice_tres_names(submission->tres[per], "nic"))
            return "the job counts its interfaces in another way, too; leave out either";
    if (only_in_total(request) && submission->max_nodes != 1)
        return "Slurm divides --gpus among nodes without a look at interfaces; add -N1, or count GPUs with "
               "--gpus-per-node or --gpus-per-task";
    return NULL;
}

bool sluice_add_nics_per_gpu(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                             const struct sluice_tres_request *request, struct sluice_admission *admission)
{
    const char *why = contradiction(submission, request);
    if (why)
        return refuse(submission, why, admission);
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        uint64_t gpus = gpus_with_nics(request, (enum sluice_per)per);
        char *text = admission->tres[per], nics[64];
        const char *asked = submission->tres[per] ? submission->tres[per] : "";
        if (!admission->set_tres)
            snprintf(text, sizeof admission->tres[per], "%s", asked);
        if (!gpus)
            continue;
        sluice_gres_text(slurm, "nic", "", gpus * submission->options.nics_per_gpu, nics, sizeof nics);
        size_t length = strlen(text);
        snprintf(text + length, sizeof admission->tres[per] - length, "%s%s", length ? "," : "", nics);
    }
    admission->set_tres = true;
    return true;
}
