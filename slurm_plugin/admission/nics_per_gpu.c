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

static bool is_divisible(const struct sluice_tres_request *request, uint32_t parts)
{
    bool all = parts > 0;
    for (size_t i = 0; all && i < request->gpu_types; i++)
        all = request->gpus[i].per[SLUICE_PER_JOB] % parts == 0;
    return all;
}

/*
 * What GPUs in total are to be counted by, so that each node has NICs for as many as it gives: Slurm divides a total
 * among nodes without a look at NICs, and 22.05 gives too few GPUs with NICs in total. SLUICE_PER_JOB: neither its nodes
 * nor its tasks get equal parts.
 */
static enum sluice_per counted_by(const struct sluice_submission *submission, const struct sluice_tres_request *request,
                                  uint32_t *parts)
{
    *parts = submission->max_nodes;
    if (*parts == 1 || (submission->min_nodes == *parts && is_divisible(request, *parts)))
        return SLUICE_PER_NODE;
    *parts = submission->tasks_per_gpu ? 0 : submission->tasks; /* Slurm takes no GPUs by task with these */
    return is_divisible(request, *parts) ? SLUICE_PER_TASK : SLUICE_PER_JOB;
}

/* False: there is no room for it. */
static bool add_item(char *text, size_t size, const char *item)
{
    size_t length = strlen(text);
    return (size_t)snprintf(text + length, size - length, "%s%s", length ? "," : "", item) < size - length;
}

/* Each part of a total, as GPUs of a node or a task; the total stays. */
static bool add_gpus(const struct sluice_slurm *slurm, const struct sluice_tres_request *request, uint32_t parts,
                     char *text, size_t size)
{
    char gpus[SLUICE_GPU_TYPE_LENGTH + 32];
    bool fits = true;
    for (size_t i = 0; i < request->gpu_types && fits; i++) {
        sluice_gres_text(slurm, "gpu", request->gpus[i].type, request->gpus[i].per[SLUICE_PER_JOB] / parts, gpus,
                         sizeof gpus);
        fits = add_item(text, size, gpus);
    }
    return fits;
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
    return NULL;
}

/* GPUs in total that neither nodes nor tasks divide: which numbers of nodes would, e.g. " (-N1, -N5)". */
static bool refuse_open(const struct sluice_submission *submission, const struct sluice_tres_request *request,
                        struct sluice_admission *admission)
{
    enum { LISTED = 5, MOST_NODES = 1024, MOST_GPUS = 16 }; /* of a node, as in the core */
    const uint64_t gpus = gpus_per(request, SLUICE_PER_JOB);
    char fit[LISTED * 8 + 8] = "", why[288];
    size_t length = 0;
    uint64_t nodes = (gpus + MOST_GPUS - 1) / MOST_GPUS;
    for (int listed = 0; listed < LISTED && nodes <= gpus && nodes <= MOST_NODES; nodes++) {
        if (!is_divisible(request, (uint32_t)nodes))
            continue;
        length += (size_t)snprintf(fit + length, sizeof fit - length, "%s-N%" PRIu64, listed++ ? ", " : " (", nodes);
    }
    snprintf(why, sizeof why,
             "Slurm divides --gpus among nodes without a look at interfaces; add a number of nodes (-N) or tasks (-n) "
             "that divides %" PRIu64 "%s%s, or count GPUs with --gpus-per-node or --gpus-per-task",
             gpus, fit, length ? ")" : "");
    return refuse(submission, why, admission);
}

bool sluice_add_nics_per_gpu(const struct sluice_slurm *slurm, const struct sluice_submission *submission,
                             const struct sluice_tres_request *request, struct sluice_admission *admission)
{
    const char *why = contradiction(submission, request);
    if (why)
        return refuse(submission, why, admission);
    const bool total = only_in_total(request);
    bool fits = true;
    uint32_t parts = 1;
    if (total && counted_by(submission, request, &parts) == SLUICE_PER_JOB)
        return refuse_open(submission, request, admission);
    const int divided = total ? (int)counted_by(submission, request, &parts) : SLUICE_PER_COUNT;
    for (int per = 0; per < SLUICE_PER_COUNT; per++) {
        uint64_t gpus = per == divided          ? gpus_per(request, SLUICE_PER_JOB) / parts
                        : per == SLUICE_PER_JOB ? 0
                                                : gpus_per(request, (enum sluice_per)per);
        char *text = admission->tres[per], nics[64];
        const char *asked = submission->tres[per] ? submission->tres[per] : "";
        if (!admission->set_tres)
            snprintf(text, sizeof admission->tres[per], "%s", asked);
        if (!gpus)
            continue;
        if (per == divided && submission->max_nodes != 1)
            fits = fits && add_gpus(slurm, request, parts, text, sizeof admission->tres[per]);
        sluice_gres_text(slurm, "nic", "", gpus * submission->options.nics_per_gpu, nics, sizeof nics);
        fits = fits && add_item(text, sizeof admission->tres[per], nics);
    }
    admission->set_tres = true;
    return fits || refuse(submission, "the request of GRES becomes too long with these; name fewer types or other GRES",
                          admission);
}
