/* SPDX-License-Identifier: GPL-2.0-or-later */
/* --fabric, --segment and --nic-planes: where in the network a job's nodes and NICs are to be. */
#include "admission/admission_internal.h"

#include "admission/wording.h"

#include <inttypes.h>
#include <stdio.h>

static const char *fabric_name(enum sluice_fabric fabric)
{
    return fabric == SLUICE_FABRIC_RAIL ? "rail" : fabric == SLUICE_FABRIC_SPREAD ? "spread" : "block";
}

/* Its nodes together, as Slurm's --switches=1 asks it; Slurm bounds the time by max_switch_wait. */
static void ask_together(struct sluice_check *check, uint32_t wait_s)
{
    check->admission->set_switches = true;
    check->admission->switches = 1;
    check->admission->switch_wait_s = wait_s;
}

static bool gpus_by_node(const struct sluice_check *check)
{
    for (size_t i = 0; i < check->request.gpu_types; i++)
        if (check->request.gpus[i].per[SLUICE_PER_NODE])
            return true;
    return check->request.shards.per[SLUICE_PER_NODE] > 0;
}

/* Only Sluice's placement spreads nodes over switches, and only where it knows each node's share. */
static bool check_spread(struct sluice_check *check)
{
    if (!check->slurm->places)
        return sluice_refuse(
            check->admission, SLUICE_REFUSED_REQUEST,
            "--fabric=spread: Slurm alone chooses the nodes on this cluster, and spreads none; leave it "
            "out");
    if (check->slurm->topology == SLUICE_TOPOLOGY_BLOCK)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--fabric=spread: Slurm keeps jobs within as few blocks as it can (topology/block); leave "
                             "it out");
    if (check->submission->heterogeneous || check->submission->required_nodes || check->submission->contiguous)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--fabric=spread: not in a heterogeneous job, with --nodelist or with --contiguous, where "
                             "Slurm alone chooses the nodes");
    return gpus_by_node(check) ||
           sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                         "--fabric=spread: say how many GPUs each node is to give, such as --gpus-per-node=8");
}

static bool check_fabric(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const struct sluice_options *options = &submission->options;
    const char *name = fabric_name(options->fabric);
    if (submission->switches)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--fabric with --switches=%" PRIu32 ": both say how near the nodes are to be; give one of "
                             "them",
                             submission->switches);
    if (options->fabric == SLUICE_FABRIC_ANY)
        return true;
    if (options->fabric == SLUICE_FABRIC_RAIL && check->slurm->topology == SLUICE_TOPOLOGY_BLOCK)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--fabric=rail: Slurm knows the blocks of this cluster (topology/block), but no rails; "
                             "ask for --fabric=block");
    if (check->slurm->topology == SLUICE_TOPOLOGY_NONE) {
        char text[128];
        snprintf(text, sizeof text, "--fabric=%s has no effect here: Slurm knows no network topology of this cluster",
                 name);
        sluice_notice(check->admission, text);
        return true;
    }
    if (submission->max_nodes == 1)
        return true;
    if (options->fabric == SLUICE_FABRIC_SPREAD)
        return check_spread(check);
    if (check->slurm->topology == SLUICE_TOPOLOGY_BLOCK && !check->slurm->places)
        sluice_notice(
            check->admission,
            "--fabric=block: only Slurm chooses the nodes here, and its topology/block waits for no block: the "
            "job is in one block if its nodes fit into one that Slurm finds, at whatever time it starts");
    ask_together(check, options->fabric_wait_s);
    return true;
}

static bool refuse_segment(struct sluice_check *check, const char *why)
{
    return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST, "--segment=%" PRIu32 ": %s",
                         check->submission->options.segment, why);
}

static bool check_whole(struct sluice_check *check, uint32_t segment)
{
    const uint32_t nodes = check->submission->min_nodes;
    return nodes % segment == 0 ||
           sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                         "--segment=%" PRIu32 ": %" PRIu32 " nodes are not whole segments; ask for -N %" PRIu64,
                         segment, nodes, (uint64_t)(nodes / segment + 1) * segment);
}

/* Slurm's own: only topology/block compares it with the number of nodes, and says nothing of it to the user. */
static bool check_slurm_segment(struct sluice_check *check)
{
    const uint32_t segment = check->submission->slurm_segment;
    if (segment < 2 || !check->slurm->places || check->slurm->topology == SLUICE_TOPOLOGY_NONE)
        return true;
    if (!check->submission->min_nodes)
        return sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST,
                             "--segment=%" PRIu32 ": say of how many nodes the job is, such as -N %" PRIu32, segment,
                             2 * segment);
    return check_whole(check, segment);
}

/* What Sluice's placement can keep whole; Slurm alone would not. Of a job that has the option already, only what a
 * change changes. */
static bool check_segment(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const uint32_t nodes = submission->min_nodes;
    if (!check->slurm->places && !submission->admitted_before)
        return refuse_segment(check, "Slurm alone chooses the nodes on this cluster, and knows no segments; leave it "
                                     "out");
    if (check->slurm->topology == SLUICE_TOPOLOGY_NONE && !submission->admitted_before)
        return refuse_segment(check, "Slurm knows no network topology of this cluster; leave it out");
    if (submission->heterogeneous || submission->required_nodes || submission->contiguous)
        return refuse_segment(check, "not in a heterogeneous job, with --nodelist or with --contiguous, where Slurm "
                                     "alone chooses the nodes");
    if (!nodes || (submission->max_nodes && submission->max_nodes != nodes))
        return refuse_segment(check, "say of how many nodes the job is, such as -N 8");
    if (!check_whole(check, submission->options.segment))
        return false;
    return gpus_by_node(check) ||
           refuse_segment(check, "say how many GPUs each node is to give, such as --gpus-per-node=8");
}

static bool asks_nics(const struct sluice_submission *submission)
{
    bool found = submission->options.nics_per_gpu > 0;
    for (int per = 0; per < SLUICE_PER_COUNT; per++)
        found = found || (submission->tres[per] && sluice_tres_names(submission->tres[per], "nic"));
    return found;
}

/* Only Sluice's placement knows planes. */
static bool check_planes(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    const char *why = NULL;
    if (!asks_nics(submission))
        why = "the job asks for no RDMA interfaces; ask for some, such as --nics-per-gpu=1";
    else if (!check->slurm->places)
        why = "Slurm alone chooses the interfaces on this cluster, and knows no planes; leave it out";
    else if (submission->heterogeneous || submission->required_nodes || submission->contiguous)
        why = "not in a heterogeneous job, with --nodelist or with --contiguous, where Slurm alone chooses the nodes";
    return !why || sluice_refuse(check->admission, SLUICE_REFUSED_REQUEST, "--nic-planes=%s: %s",
                                 submission->options.nic_planes == SLUICE_NIC_PLANES_ONE ? "one" : "spread", why);
}

bool sluice_check_fabric(struct sluice_check *check)
{
    const struct sluice_submission *submission = check->submission;
    if (submission->options.segment && !check_segment(check))
        return false;
    if (submission->admitted_before)
        return true;
    if (!check_slurm_segment(check))
        return false;
    if (submission->options.nic_planes > SLUICE_NIC_PLANES_ANY && !check_planes(check))
        return false;
    if (submission->options.fabric != SLUICE_FABRIC_UNSET)
        return check_fabric(check);
    if (check->tenant && check->tenant->one_block_s && !submission->switches && sluice_most_nodes(check) > 1 &&
        check->slurm->topology != SLUICE_TOPOLOGY_NONE)
        ask_together(check, check->tenant->one_block_s);
    return true;
}
