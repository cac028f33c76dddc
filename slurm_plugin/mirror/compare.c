/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Compares the mirror with Slurm's records of its nodes' GRES, and corrects or checks it. */
#include "mirror/mirror_internal.h"

#include "mirror/nics.h"

#include <stdio.h>
#include <stdlib.h>

/* The node's NICs that are free by Slurm's record of it. */
static uint32_t nics_free_by_slurm(const struct sluice_node_gres *gres, const struct sluice_node_view *view)
{
    uint32_t all = (uint32_t)((UINT64_C(1) << view->nic_count) - 1);
    return all & ~sluice_nics_held(gres->nic, view->nic_count);
}

/* Hold what Slurm says is in use, for no job. */
static void hold_foreign(struct sluice_mirror *mirror, uint32_t node, const int64_t *free_mib)
{
    struct entry *entry = NULL;
    struct sluice_node_view view;
    if (sluice_node_read(mirror->cluster, node, &view, NULL))
        return;
    struct sluice_node_gres gres = sluice_gres_of_node(node_record_table_ptr[node]);
    struct sluice_part nics = {.node = node, .nics = view.nics_free & ~nics_free_by_slurm(&gres, &view)};
    if (nics.nics && (entry = sluice_mirror_add_entry(mirror, FOREIGN + node)))
        sluice_mirror_hold(mirror, entry, &nics, 1);
    for (uint32_t i = 0; i < view.gpu_count; i++) {
        int64_t more = view.gpu_memory_mib_free[i] - free_mib[i];
        if (more <= 0)
            continue;
        if (!entry && !(entry = sluice_mirror_add_entry(mirror, FOREIGN + node)))
            return;
        struct sluice_part part = {.node = node, .gpus = UINT32_C(1) << i, .gpu_memory_mib = more};
        sluice_mirror_hold(mirror, entry, &part, 1);
    }
}

bool sluice_mirror_same_free(const struct sluice_mirror *mirror, uint32_t node, int64_t *free_mib)
{
    struct sluice_node_view view;
    const node_record_t *record = node_record_table_ptr[node];
    if (!record || sluice_node_read(mirror->cluster, node, &view, NULL))
        return true;
    struct sluice_node_gres gres = sluice_gres_of_node(record);
    sluice_mirror_free_by_slurm(&gres, &view, free_mib);
    for (uint32_t i = 0; i < view.gpu_count; i++)
        if (view.gpu_memory_mib_free[i] != free_mib[i])
            return false;
    return view.nics_free == nics_free_by_slurm(&gres, &view);
}

void sluice_mirror_correct(struct sluice_mirror *mirror, uint32_t node)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    struct sluice_node_view view;
    bool too_much = false;
    sluice_mirror_let_go(mirror, FOREIGN + node);
    if (!sluice_mirror_same_free(mirror, node, free_mib) && !sluice_node_read(mirror->cluster, node, &view, NULL)) {
        struct sluice_node_gres gres = sluice_gres_of_node(node_record_table_ptr[node]);
        too_much = nics_free_by_slurm(&gres, &view) & ~view.nics_free;
        for (uint32_t i = 0; i < view.gpu_count; i++)
            too_much |= view.gpu_memory_mib_free[i] < free_mib[i];
    }
    if (too_much)
        sluice_mirror_hold_again(mirror, node);
    if (!sluice_mirror_same_free(mirror, node, free_mib))
        hold_foreign(mirror, node, free_mib);
}

void sluice_mirror_correct_all(struct sluice_mirror *mirror)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    for (uint32_t n = 0; n < mirror->nodes; n++)
        if (!is_opaque(mirror, n) && !sluice_mirror_same_free(mirror, n, free_mib))
            sluice_mirror_correct(mirror, n);
    mirror->short_of = false;
}

bool sluice_mirror_node_agrees(struct sluice_mirror *mirror, uint32_t node)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    if (!mirror->valid || node >= mirror->nodes || is_opaque(mirror, node) ||
        sluice_mirror_same_free(mirror, node, free_mib))
        return true;
    mirror->counts.mismatches++;
    sluice_mirror_sync_jobs(mirror);
    sluice_mirror_correct(mirror, node);
    return false;
}

/* ---- checking ---- */

static enum sluice_error differs(struct sluice_error_text *text, uint32_t node, const char *what, int64_t mirror,
                                 int64_t slurm)
{
    if (text)
        snprintf(text->text, sizeof(text->text), "node %s: %s: the mirror says %lld, Slurm %lld",
                 node_record_table_ptr[node]->name, what, (long long)mirror, (long long)slurm);
    return SLUICE_ERROR_CORRUPT;
}

/* Is as much compute claimed as running jobs do? */
static enum sluice_error check_claims(const struct sluice_mirror *mirror, struct sluice_error_text *text)
{
    uint32_t(*claims)[SLUICE_MAX_GPUS] = calloc((size_t)mirror->nodes + 1, sizeof *claims);
    enum sluice_error error = SLUICE_OK;
    if (!claims)
        return SLUICE_OK;
    sluice_mirror_add_claims(mirror, claims);
    for (uint32_t n = 0; n < mirror->nodes && !error; n++) {
        struct sluice_node_view view;
        if (!node_record_table_ptr[n] || is_opaque(mirror, n) || sluice_node_read(mirror->cluster, n, &view, NULL))
            continue;
        for (uint32_t gpu = 0; gpu < view.gpu_count && !error; gpu++) {
            uint32_t unclaimed = claims[n][gpu] < 100 ? 100 - claims[n][gpu] : 0;
            if (view.gpu_compute_free[gpu] != unclaimed)
                error = differs(text, n, "unclaimed compute", view.gpu_compute_free[gpu], unclaimed);
        }
    }
    free(claims);
    return error;
}

enum sluice_error sluice_mirror_check(struct sluice_mirror *mirror, sluice_mirror_free_fn free_of,
                                      struct sluice_error_text *text)
{
    if (!mirror->valid)
        return SLUICE_OK;
    enum sluice_error error = sluice_cluster_check(mirror->cluster, text);
    if (!error)
        error = check_claims(mirror, text);
    for (uint32_t n = 0; n < mirror->nodes && !error; n++) {
        const node_record_t *node = node_record_table_ptr[n];
        struct sluice_node_view view;
        int64_t free_mib[SLUICE_MAX_GPUS], cpus, memory;
        if (!node || is_opaque(mirror, n) || sluice_node_read(mirror->cluster, n, &view, NULL))
            continue;
        if (sluice_mirror_fingerprint(node) != mirror->fingerprint[n])
            continue; /* found within the next round, and then the mirror is made again */
        if (!sluice_mirror_same_free(mirror, n, free_mib)) {
            struct sluice_node_gres gres = sluice_gres_of_node(node);
            for (uint32_t i = 0; i < view.gpu_count; i++) {
                char what[64];
                snprintf(what, sizeof(what), "free memory of GPU %u", i);
                if (view.gpu_memory_mib_free[i] != free_mib[i])
                    return differs(text, n, what, view.gpu_memory_mib_free[i], free_mib[i]);
            }
            return differs(text, n, "free NICs, as bits", view.nics_free, nics_free_by_slurm(&gres, &view));
        }
        if (!free_of || !free_of(n, &cpus, &memory))
            continue;
        bool loses = mirror->sharing || (SLUICE_RESIZE_LOSES_CORES && mirror->given_back[n / 64] >> n % 64 & 1);
        if (view.cpus_milli_free < cpus * 1000 || (!loses && view.cpus_milli_free != cpus * 1000))
            return differs(text, n, "free CPUs", view.cpus_milli_free / 1000, cpus);
        if (view.host_memory_mib_free != memory)
            return differs(text, n, "free memory", view.host_memory_mib_free, memory);
    }
    return error;
}
