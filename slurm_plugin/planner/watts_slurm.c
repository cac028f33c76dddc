/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "planner/watts_slurm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

/* As the prolog gets it, with SPANK_ before it. */
#define CAP "SLUICE_GPU_POWER="

void sluice_watts_begin(struct sluice_watts_basis *basis, const struct sluice_rules *rules,
                        const struct sluice_draws *draws, struct sluice_mirror *mirror)
{
    *basis = (struct sluice_watts_basis){.rules = rules, .draws = draws, .mirror = mirror};
    for (uint32_t i = 0; i < rules->class_count; i++)
        for (uint32_t t = 0; t < rules->classes[i].gpu_types.count; t++)
            basis->models[i] |= sluice_mirror_models(mirror, rules->classes[i].gpu_types.items[t]);
}

/* What of a job is in its record alone. */
static struct sluice_job_draw draw_of(const job_record_t *job)
{
    struct sluice_job_draw draw = {
        .user = job->user_id, .account = job->account, .qos = job->qos_ptr ? job->qos_ptr->name : NULL};
    struct sluice_options options = {0};
    char why[128];
    if (job->spank_job_env_size &&
        sluice_options_from_env(&options, job->spank_job_env, job->spank_job_env_size, why, sizeof why))
        draw.cap_w = options.gpu_power_w;
    return draw;
}

struct sluice_job_watts sluice_watts_of_pending(const struct sluice_watts_basis *basis, const job_record_t *job,
                                                const struct sluice_request *request)
{
    struct sluice_job_draw draw = draw_of(job);
    if (request->gpus <= 0)
        return (struct sluice_job_watts){0};
    draw.gpu_memory_mib = request->gpu_memory_mib;
    for (uint32_t i = 0; i < basis->rules->class_count; i++)
        if (!request->models || (request->models & basis->models[i]))
            draw.classes |= UINT64_C(1) << i;
    return sluice_watts_of(basis->rules, basis->draws, &draw);
}

/* ... and what follows from the GPUs that it has. */
static struct sluice_job_draw draw_on(const struct sluice_watts_basis *basis, const job_record_t *job,
                                      const struct sluice_part *parts, uint32_t count)
{
    struct sluice_job_draw draw = draw_of(job);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t class =
            sluice_rules_class_of_type(basis->rules, sluice_mirror_node_type(basis->mirror, parts[i].node));
        if (parts[i].gpus && class != SLUICE_NO_CLASS)
            draw.classes |= UINT64_C(1) << class;
        if (parts[i].gpu_memory_mib > draw.gpu_memory_mib)
            draw.gpu_memory_mib = parts[i].gpu_memory_mib;
    }
    return draw;
}

struct sluice_job_watts sluice_watts_of_start(const struct sluice_watts_basis *basis, const job_record_t *job,
                                              const struct sluice_part *parts, uint32_t count)
{
    const struct sluice_job_draw draw = draw_on(basis, job, parts, count);
    return sluice_watts_of(basis->rules, basis->draws, &draw);
}

struct sluice_job_watts sluice_watts_of_running(const struct sluice_watts_basis *basis, const job_record_t *job)
{
    uint32_t count = 0;
    const struct sluice_part *parts = sluice_mirror_parts(basis->mirror, job->job_id, &count);
    struct sluice_job_draw draw = draw_on(basis, job, parts, count);
    draw.job_id = job->job_id;
    for (uint32_t i = 0; i < job->spank_job_env_size; i++)
        if (!xstrncmp(job->spank_job_env[i], CAP, sizeof CAP - 1))
            draw.cap_w = (uint32_t)strtoul(job->spank_job_env[i] + sizeof CAP - 1, NULL, 10);
    return sluice_watts_of(basis->rules, basis->draws, &draw);
}

void sluice_watts_set_cap(job_record_t *job, uint32_t watts)
{
    char value[16];
    snprintf(value, sizeof value, "%" PRIu32, watts);
    sluice_job_tell_prologs(job, CAP, watts ? value : NULL);
}

/* ---- budgets ---- */

static bool names_nodes(const struct sluice_rules *rules, uint32_t budget)
{
    return rules->budgets[budget].nodes != NULL;
}

static void name_nodes(struct sluice_bound_budgets *bound, const struct sluice_budget *budget, uint64_t *words)
{
    bitstr_t *bitmap = NULL;
    size_t count = 0;
    if (sluice_node_bitmap((char *)(uintptr_t)budget->nodes, &bitmap) != SLURM_SUCCESS) {
        error("sluice: the power budget %s names nodes that Slurm does not know: it counts no node; correct it in "
              "sluice.yaml",
              budget->name);
    } else {
        const uint64_t *from = sluice_bitmap_words(bitmap, &count);
        memcpy(words, from, (count < bound->node_words ? count : bound->node_words) * sizeof *words);
    }
    FREE_NULL_BITMAP(bitmap);
}

/* What idle GPUs draw is drawn of every budget that is not a tenant's. */
static void add_base(struct sluice_bound_budgets *bound, const struct sluice_watts_basis *basis, uint32_t node)
{
    struct sluice_node_view view;
    const uint32_t class = sluice_rules_class_of_type(basis->rules, sluice_mirror_node_type(basis->mirror, node));
    if (class == SLUICE_NO_CLASS || sluice_node_read(sluice_mirror_cluster(basis->mirror), node, &view, NULL))
        return;
    for (uint32_t i = 0; i < bound->count; i++)
        if ((bound->counting[node] >> i & 1) && !basis->rules->budgets[i].tenant)
            bound->base[i] += (int64_t)view.gpu_count * basis->rules->classes[class].power_idle_w;
}

bool sluice_budgets_bind(struct sluice_bound_budgets *bound, const struct sluice_watts_basis *basis)
{
    const struct sluice_rules *rules = basis->rules;
    const uint64_t generation = sluice_mirror_generation(basis->mirror);
    memset(bound->guaranteed, 0, sizeof bound->guaranteed);
    if (bound->generation == generation && bound->checksum == rules->checksum && bound->count == rules->budget_count)
        return true;
    free(bound->words);
    free(bound->counting);
    bound->generation = 0;
    bound->count = rules->budget_count;
    bound->nodes = sluice_mirror_nodes(basis->mirror);
    bound->node_words = (uint32_t)sluice_mirror_words(basis->mirror);
    bound->words = calloc((size_t)bound->count * bound->node_words + 1, sizeof *bound->words);
    bound->counting = calloc(bound->nodes + 1, sizeof *bound->counting);
    memset(bound->base, 0, sizeof bound->base);
    if (!bound->words || !bound->counting)
        return false;
    for (uint32_t i = 0; i < bound->count; i++) {
        uint64_t *words = bound->words + (size_t)i * bound->node_words;
        if (names_nodes(rules, i))
            name_nodes(bound, &rules->budgets[i], words);
        for (uint32_t node = 0; node < bound->nodes; node++)
            if (!names_nodes(rules, i) || (words[node / 64] >> node % 64 & 1))
                bound->counting[node] |= UINT64_C(1) << i;
    }
    for (uint32_t node = 0; node < bound->nodes; node++)
        add_base(bound, basis, node);
    bound->generation = generation;
    bound->checksum = rules->checksum;
    return true;
}

void sluice_budgets_count(struct sluice_bound_budgets *bound, const struct sluice_job_watts *power,
                          const struct sluice_part *parts, uint32_t count)
{
    if (bound->counting) /* NULL: no memory */
        sluice_watts_count_kept(bound->guaranteed, bound->counting, bound->nodes, power, parts, count);
}

struct sluice_power *sluice_budgets_now(struct sluice_bound_budgets *bound, const struct sluice_rules *rules,
                                        const struct sluice_draws *draws, int64_t now_s)
{
    struct sluice_power_budget budgets[SLUICE_POWER_MAX_BUDGETS];
    struct sluice_error_text text = {{0}};
    enum sluice_error failed = SLUICE_OK;
    if (bound->power_nodes < bound->nodes) {
        sluice_power_free(bound->power);
        bound->power = NULL;
        failed = sluice_power_new(bound->nodes, &bound->power, &text);
        bound->power_nodes = failed ? 0 : bound->nodes;
    }
    for (uint32_t i = 0; i < bound->count; i++) {
        budgets[i] = sluice_watts_budget(&rules->budgets[i], sluice_draws_budget(draws, rules->budgets[i].name),
                                         bound->base[i], bound->guaranteed[i]);
        if (names_nodes(rules, i)) {
            budgets[i].nodes = bound->words + (size_t)i * bound->node_words;
            budgets[i].node_words = bound->node_words;
        }
    }
    if (!failed)
        failed = sluice_power_set(bound->power, budgets, bound->count, sluice_watts_week(now_s), &text);
    if (failed)
        error("sluice: power budgets: %s", text.text);
    return failed ? NULL : bound->power;
}

void sluice_budgets_free(struct sluice_bound_budgets *bound)
{
    sluice_power_free(bound->power);
    free(bound->words);
    free(bound->counting);
    memset(bound, 0, sizeof *bound);
}
