/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "decisions/encoding.h"

enum { MAX_TEXT = 255 };

void sluice_put_text(struct bytes *to, const char *text)
{
    size_t length = text ? strnlen(text, MAX_TEXT) : 0;
    sluice_put(to, length);
    sluice_put_bytes(to, text, length);
}

/* Words of a bitmap as runs: length * 4 + kind, kind 0 all zero, 1 all one, 2 as they are (the words follow). */
void sluice_put_bitmap(struct bytes *to, const uint64_t *words, size_t count)
{
    if (!words) {
        sluice_put(to, 0);
        return;
    }
    sluice_put(to, count + 1);
    for (size_t from = 0, end; from < count; from = end) {
        unsigned kind = words[from] == 0 ? 0 : words[from] == UINT64_MAX ? 1 : 2;
        for (end = from + 1; end < count; end++) {
            unsigned next = words[end] == 0 ? 0 : words[end] == UINT64_MAX ? 1 : 2;
            if (next != kind)
                break;
        }
        sluice_put(to, (end - from) << 2 | kind);
        if (kind == 2)
            sluice_put_bytes(to, words + from,
                             (end - from) * sizeof *words); /* little-endian, as all that Slurm runs on here */
    }
}

void sluice_put_request(struct bytes *to, const struct sluice_request *request)
{
    sluice_put_signed(to, request->nodes_min);
    sluice_put_signed(to, request->nodes_max);
    sluice_put_signed(to, request->gpus);
    sluice_put_signed(to, request->gpu_memory_mib);
    sluice_put_signed(to, request->cpus_milli);
    sluice_put_signed(to, request->host_memory_mib);
    sluice_put_signed(to, request->cpus_milli_per_gpu);
    sluice_put_signed(to, request->host_memory_mib_per_gpu);
    sluice_put(to, request->models);
    sluice_put_signed(to, request->capability_min);
    sluice_put_signed(to, request->gpu_memory_mib_min);
    sluice_put(to, request->one_link_domain);
    sluice_put(to, request->one_numa_node);
    sluice_put(to, request->near_nic);
    sluice_put(to, request->one_switch);
    sluice_put(to, request->switch_level);
    sluice_put(to, request->layout);
    sluice_put(to, request->flags);
    sluice_put(to, request->seed);
}

static void put_part(struct bytes *to, const struct sluice_part *part)
{
    sluice_put(to, part->node);
    sluice_put(to, part->gpus);
    sluice_put_signed(to, part->gpu_memory_mib);
    sluice_put_signed(to, part->cpus_milli);
    sluice_put_signed(to, part->host_memory_mib);
    sluice_put(to, part->exclusive);
}

void sluice_put_parts(struct bytes *to, const struct sluice_part *parts, uint32_t count)
{
    sluice_put(to, count);
    for (uint32_t i = 0; i < count; i++)
        put_part(to, &parts[i]);
}

void sluice_put_nics(struct bytes *to, const struct sluice_part *parts, uint32_t count)
{
    sluice_put(to, count);
    for (uint32_t i = 0; i < count; i++)
        sluice_put(to, parts[i].nics);
}

void sluice_put_job(struct bytes *to, const struct sluice_decision_job *job)
{
    sluice_put(to, job->id);
    sluice_put(to, job->array_id);
    sluice_put(to, job->array_task);
    sluice_put(to, job->uid);
    sluice_put(to, job->priority);
    sluice_put(to, job->gpus);
    sluice_put_signed(to, job->submit_s);
    sluice_put_signed(to, job->limit_s);
    sluice_put_text(to, job->account);
    sluice_put_text(to, job->partition);
}

/* Image flags. Append only. */
enum { IMAGE_EXCLUSIVE = 1, IMAGE_UTILISATION = 2, IMAGE_COMPUTE = 4, IMAGE_NICS = 8 };

void sluice_put_image(struct bytes *to, uint32_t node, const struct sluice_node_view *view)
{
    uint32_t utilised = 0;
    bool claimed = false;
    for (uint32_t gpu = 0; gpu < view->gpu_count; gpu++) {
        utilised |= view->gpu_utilisation[gpu];
        claimed |= view->gpu_compute_free[gpu] < 100;
    }
    sluice_put(to, node);
    sluice_put(to, view->state);
    sluice_put(to, (view->exclusive ? IMAGE_EXCLUSIVE : 0u) | (utilised ? IMAGE_UTILISATION : 0u) |
                       (claimed ? IMAGE_COMPUTE : 0u) | (view->nic_count ? IMAGE_NICS : 0u));
    sluice_put(to, view->parts);
    sluice_put_signed(to, view->cpus_milli);
    sluice_put_signed(to, view->cpus_milli_free);
    sluice_put_signed(to, view->host_memory_mib);
    sluice_put_signed(to, view->host_memory_mib_free);
    sluice_put(to, view->gpus_healthy);
    sluice_put(to, view->gpus_idle);
    sluice_put(to, view->gpu_count);
    for (uint32_t gpu = 0; gpu < view->gpu_count; gpu++)
        sluice_put_signed(to, view->gpu_memory_mib_free[gpu]);
    for (uint32_t gpu = 0; utilised && gpu < view->gpu_count; gpu++)
        sluice_put(to, view->gpu_utilisation[gpu]);
    for (uint32_t gpu = 0; claimed && gpu < view->gpu_count; gpu++)
        sluice_put(to, view->gpu_compute_free[gpu]);
    if (view->nic_count)
        sluice_put(to, view->nics_free);
}
