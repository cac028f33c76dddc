/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Making a mirror, following Slurm, and reading what is in it. */
#include "mirror/mirror_internal.h"

#include "src/common/bitstring.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SCAN_SLICE = 32 };

/* ---- following ---- */

enum sluice_error sluice_mirror_new(struct sluice_mirror **mirror, struct sluice_error_text *text)
{
    struct sluice_mirror *made = calloc(1, sizeof(*made));
    char(*models)[64] = calloc(SLUICE_MAX_MODELS, sizeof(*models));
    char(*nic_types)[64] = calloc(SLUICE_MAX_NIC_KINDS, sizeof(*nic_types));
    if (!made || !models || !nic_types) {
        free(made);
        free(models);
        free(nic_types);
        if (text)
            snprintf(text->text, sizeof(text->text), "out of memory for a mirror");
        return SLUICE_ERROR_NO_MEMORY;
    }
    made->models = models;
    made->nic_types = nic_types;
    made->free_holding = NONE;
    *mirror = made;
    return SLUICE_OK;
}

void sluice_mirror_free(struct sluice_mirror *mirror)
{
    if (!mirror)
        return;
    sluice_mirror_forget(mirror);
    free(mirror->table);
    free(mirror->holdings);
    free(mirror->models);
    free(mirror->nic_types);
    free(mirror);
}

void sluice_mirror_record(struct sluice_mirror *mirror, struct sluice_decision_recorder *recorder)
{
    if (mirror->recorder != recorder)
        mirror->valid = false;
    mirror->recorder = recorder;
}

void sluice_mirror_invalidate(struct sluice_mirror *mirror)
{
    mirror->valid = false;
}

/* Grows when a mirror finds that the nodes' configuration changed: the others need not compare. */
static _Atomic uint64_t configurations;

void sluice_mirrors_outdated(void)
{
    atomic_fetch_add(&configurations, 1);
}

/*
 * Is any node configured in another way than when the cluster was made? Slurm calls a select plugin only for some such
 * changes, so all nodes are compared: at once by a thread, a few at a call by the hook.
 */
static bool configuration_changed(struct sluice_mirror *mirror, bool all, time_t now)
{
    if ((uint32_t)node_record_count != mirror->nodes || mirror->configuration != atomic_load(&configurations))
        return true;
    if (!mirror->scan_next) {
        /* Times are whole seconds: what changed in the second of the last round may have been missed by it. */
        if (now == mirror->scanned || last_node_update < mirror->scanned)
            return false;
        mirror->scanned = now;
        mirror->counts.scans++;
    }
    uint32_t end =
        all || mirror->nodes - mirror->scan_next < SCAN_SLICE ? mirror->nodes : mirror->scan_next + SCAN_SLICE;
    for (; mirror->scan_next < end; mirror->scan_next++) {
        if (sluice_mirror_fingerprint(node_record_table_ptr[mirror->scan_next]) !=
            mirror->fingerprint[mirror->scan_next]) {
            atomic_fetch_add(&configurations, 1);
            return true;
        }
    }
    if (mirror->scan_next == mirror->nodes)
        mirror->scan_next = 0;
    return false;
}

enum sluice_error sluice_mirror_sync(struct sluice_mirror *mirror, bool jobs, time_t now,
                                     struct sluice_error_text *text)
{
    if (!mirror->valid || configuration_changed(mirror, jobs, now)) {
        uint64_t configuration = atomic_load(&configurations);
        enum sluice_error error = sluice_mirror_build(mirror, text);
        if (error)
            return error;
        mirror->configuration = configuration;
        mirror->scanned = now;
        mirror->scan_next = 0;
        sluice_mirror_hold_all(mirror);
        sluice_mirror_correct_all(mirror);
    } else if (jobs) {
        sluice_mirror_sync_jobs(mirror);
        if (mirror->short_of || mirror->foreign)
            sluice_mirror_correct_all(mirror);
    }
    return SLUICE_OK;
}

void sluice_mirror_job_changed(struct sluice_mirror *mirror, job_record_t *job, enum sluice_mirror_job what)
{
    if (!mirror->valid || (uint32_t)node_record_count != mirror->nodes)
        return;
    if (what == SLUICE_MIRROR_ENDED) {
        sluice_mirror_let_go(mirror, job->job_id);
        sluice_mirror_hold_clipped(mirror);
    } else {
        sluice_mirror_hold_job(mirror, job, what == SLUICE_MIRROR_SUSPENDED);
    }
    if (mirror->reshare)
        sluice_mirror_share_out(mirror, job->job_resrcs ? job->job_resrcs->node_bitmap : NULL);
    /* If Slurm gave a GPU out twice, or something that is not a job holds it, the node's records decide. */
    bool compare = mirror->short_of || mirror->foreign || what == SLUICE_MIRROR_ENDED;
    mirror->short_of = false;
    if (!compare || !job->job_resrcs || !job->job_resrcs->node_bitmap)
        return;
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    for (bitoff_t i = bit_ffs(nodes), last = bit_fls(nodes); i >= 0 && i <= last; i++) {
        int64_t free_mib[SLUICE_MAX_GPUS];
        if (bit_test(nodes, i) && !is_opaque(mirror, (uint32_t)i) &&
            !sluice_mirror_same_free(mirror, (uint32_t)i, free_mib))
            sluice_mirror_correct(mirror, (uint32_t)i);
    }
}

/* ---- reading ---- */

struct sluice_cluster *sluice_mirror_cluster(struct sluice_mirror *mirror)
{
    return mirror->cluster;
}

uint64_t sluice_mirror_generation(const struct sluice_mirror *mirror)
{
    return mirror->generation;
}

struct sluice_mirror_counts sluice_mirror_counts(const struct sluice_mirror *mirror)
{
    return mirror->counts;
}

const uint64_t *sluice_mirror_opaque(const struct sluice_mirror *mirror)
{
    return mirror->opaque;
}

uint64_t sluice_mirror_models_hash(const struct sluice_mirror *mirror)
{
    uint64_t hash = 5;
    for (uint32_t m = 0; m < mirror->model_count; m++)
        for (const char *c = mirror->models[m]; *c; c++)
            hash = mix(hash, (uint8_t)*c);
    return hash;
}

enum sluice_error sluice_mirror_set_workload(struct sluice_mirror *mirror, const struct sluice_request *shapes,
                                             const uint32_t *weights, uint32_t count)
{
    if (!mirror->valid)
        return SLUICE_OK;
    enum sluice_error error = sluice_cluster_set_workload(mirror->cluster, shapes, weights, count, NULL);
    if (!error && mirror->notes) {
        sluice_decision_note_workload(mirror->notes, shapes, weights, count);
        sluice_decision_set_topology(mirror->recorder, mirror->notes, mirror->cluster, NULL);
    }
    return error;
}

uint32_t sluice_mirror_nodes(const struct sluice_mirror *mirror)
{
    return mirror->nodes;
}

bool sluice_mirror_has_switches(const struct sluice_mirror *mirror)
{
    return mirror->switch_count > 0;
}

const struct sluice_blocks *sluice_mirror_blocks(const struct sluice_mirror *mirror)
{
    return mirror->blocks.levels ? &mirror->blocks : NULL;
}

uint32_t sluice_mirror_weights(const struct sluice_mirror *mirror)
{
    return mirror->weight_count;
}

const uint64_t *sluice_mirror_light(const struct sluice_mirror *mirror, uint32_t weight)
{
    return mirror->light + weight * mirror->words;
}

size_t sluice_mirror_words(const struct sluice_mirror *mirror)
{
    return mirror->words;
}

uint64_t sluice_mirror_models(const struct sluice_mirror *mirror, const char *type)
{
    for (uint32_t m = 0; m < mirror->model_count; m++)
        if (!strcmp(mirror->models[m], type))
            return UINT64_C(1) << m;
    return 0;
}

uint64_t sluice_mirror_nic_kinds(const struct sluice_mirror *mirror, const char *type)
{
    for (uint32_t k = 1; !mirror->nics_unclear && k < mirror->nic_type_count; k++)
        if (!strcmp(mirror->nic_types[k], type))
            return UINT64_C(1) << k;
    return 0;
}

const char *sluice_mirror_node_type(const struct sluice_mirror *mirror, uint32_t node)
{
    struct sluice_node_view view;
    if (sluice_node_read(mirror->cluster, node, &view, NULL) || view.shape >= mirror->shape_count ||
        !mirror->shape_models[view.shape])
        return "";
    return mirror->models[mirror->shape_models[view.shape] - 1];
}

const uint64_t *sluice_bitmap_words(bitstr_t *bitmap, size_t *words)
{
    /* Two words of header, then bit n in word n / 64, the lowest first: as the core has it on little-endian
     * machines. */
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Slurm counts bits from the other end there");
    _Static_assert(sizeof(bitstr_t) == sizeof(uint64_t), "");
    *words = ((size_t)bit_size(bitmap) + 63) / 64;
    return (const uint64_t *)(const void *)(bitmap + 2);
}
