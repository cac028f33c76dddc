/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a compiled policy from standard input and writes what the plugins' parser understood, in the same format (exit
 * 0), or why it refuses it (exit 1). For tests, which compare it with policy/compiled.py.
 */
#include "rules/policy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void put_words(FILE *to, const char *key, const struct sluice_words *words)
{
    fprintf(to, "%s =%s", key, words->count ? " " : "");
    for (uint32_t i = 0; i < words->count; i++)
        fprintf(to, "%s%s", i ? "," : "", words->items[i]);
    fprintf(to, "\n");
}

static void put_number(FILE *to, const char *prefix, const char *name, const char *key, uint64_t value, uint64_t none)
{
    if (value != none)
        fprintf(to, "%s%s%s = %" PRIu64 "\n", prefix, name, key, value);
}

static void put_name(FILE *to, const char *key, const char *name)
{
    if (name)
        fprintf(to, "%s = %s\n", key, name);
}

static const char *yes_no(bool value)
{
    return value ? "yes" : "no";
}

static void put_global(FILE *to, const struct sluice_rules *rules)
{
    static const char *const factors[SLUICE_FACTOR_COUNT] = {"priority", "age",  "fair-share", "deadline",
                                                             "service",  "time", "size"};
    fprintf(to, "sluice-policy 1.0\ngenerated-s = %" PRId64 "\nsource = %s\n[global]\n", rules->generated_s,
            rules->source);
    for (int i = 0; i < SLUICE_FACTOR_COUNT; i++)
        fprintf(to, "weight.%s = %" PRIu32 "\n", factors[i], rules->order.weight[i]);
    put_number(to, "", "", "age-full-s", (uint64_t)rules->order.age_full_s, 0);
    put_number(to, "", "", "laxity-horizon-s", (uint64_t)rules->order.laxity_horizon_s, 0);
    put_number(to, "", "", "size-full-gpus", rules->order.size_full_gpus, 0);
    fprintf(to, "starvation-s = %" PRId64 "\nfair-share-half-life-s = %" PRId64 "\nplacement = %s\n",
            rules->order.starvation_s, rules->fair_share_half_life_s, sluice_policy_name(rules->placement));
    fprintf(to,
            "backfill-reservations = %" PRIu32 "\nbackfill-depth = %" PRIu32 "\nplanner-interval-ms = %" PRIu32 "\n",
            rules->backfill_reservations, rules->backfill_depth, rules->planner_interval_ms);
    fprintf(to, "gang-limit-s = %" PRIu32 "\ngang-incomplete-s = %" PRIu32 "\ngang-incomplete-cancel = %s\n",
            rules->gang_limit_s, rules->gang_incomplete_s, yes_no(rules->gang_incomplete_cancel));
    fprintf(to, "deadlines = %s\ncpus-per-gpu-milli = %" PRIu32 "\n", yes_no(rules->deadlines),
            rules->cpus_per_gpu_milli);
    fprintf(to, "memory-mib-per-gpu = %" PRIu64 "\ngpu-shares = %s\n", rules->memory_mib_per_gpu,
            yes_no(rules->gpu_shares));
    fprintf(to, "checkpoint-signal = %" PRIu32 "\ncheckpoint-system = %s\n", rules->checkpoint_signal,
            yes_no(rules->checkpoint_system));
    fprintf(to, "journal = %s\njournal-wait-ms = %" PRIu32 "\n", yes_no(rules->journal), rules->journal_wait_ms);
    fprintf(to, "journal-warn = %s\njournal-max-mib = %" PRIu64 "\n", yes_no(rules->journal_warn),
            rules->journal_max_mib);
}

static void put_class(FILE *to, const struct sluice_class *class)
{
    static const char *const strategies[] = {"static", "dynamic", "hybrid"};
    fprintf(to, "[class %s]\nstrategy = %s\nreserved-permille = %" PRIu32 "\n", class->name,
            strategies[class->strategy], class->reserved_permille);
    put_words(to, "gpu-types", &class->gpu_types);
    fprintf(to, "gpu-memory-mib = %" PRIu64 "\n", class->gpu_memory_mib);
    fprintf(to, "cpus-per-gpu-milli = %" PRIu32 "\nmemory-mib-per-gpu = %" PRIu64 "\n", class->cpus_per_gpu_milli,
            class->memory_mib_per_gpu);
    fprintf(to, "power-least-w = %" PRIu32 "\npower-most-w = %" PRIu32 "\n", class->power_least_w, class->power_most_w);
    fprintf(to, "power-default-w = %" PRIu32 "\npower-idle-w = %" PRIu32 "\npower-start-least-w = %" PRIu32 "\n",
            class->power_default_w, class->power_idle_w, class->power_start_least_w);
}

static void put_budget(FILE *to, const struct sluice_budget *budget)
{
    fprintf(to, "[budget %s]\n", budget->name);
    put_name(to, "nodes", budget->nodes);
    put_name(to, "tenant", budget->tenant);
    fprintf(to, "watts = %" PRId64 "\nkept = %" PRId64 "\n", budget->watts, budget->kept);
    for (uint32_t i = 0; i < budget->hour_count; i++)
        fprintf(to, "%s%" PRId32 "-%" PRId32 ":%" PRId64 "%s", i ? "," : "hours = ", budget->hours[i].from_s / 60,
                budget->hours[i].to_s / 60, budget->hours[i].watts, i + 1 < budget->hour_count ? "" : "\n");
}

static void put_tenant(FILE *to, const struct sluice_rules *rules, const struct sluice_tenant *tenant)
{
    fprintf(to, "[tenant %s]\n", tenant->account);
    put_name(to, "parent", tenant->parent);
    put_name(to, "qos", tenant->qos);
    put_words(to, "partitions", &tenant->partitions);
    put_words(to, "features", &tenant->features);
    fprintf(to, "shares = %" PRIu32 "\ntier = %" PRIu32 "\ndefault-priority = %" PRIu32 "\n", tenant->shares,
            tenant->tier, tenant->default_priority);
    put_number(to, "", "", "gpu-memory-mib-per-job", tenant->gpu_memory_mib_per_job, SLUICE_NO_LIMIT_64);
    put_number(to, "", "", "gpu-memory-mib-per-gpu", tenant->gpu_memory_mib_per_gpu, SLUICE_NO_LIMIT_64);
    put_number(to, "", "", "gpus-per-job", tenant->gpus_per_job, SLUICE_NO_LIMIT);
    put_number(to, "", "", "run-time-s", tenant->run_time_s, SLUICE_NO_LIMIT);
    put_number(to, "", "", "submissions-per-minute", tenant->submissions_per_minute, SLUICE_NO_LIMIT);
    fprintf(to, "one-block-s = %" PRIu32 "\n", tenant->one_block_s);
    fprintf(to, "expires-s = %" PRId64 "\ngang = %s\ndeadline = %s\nborrow = %s\n", tenant->expires_s,
            yes_no(tenant->gang), yes_no(tenant->deadline), yes_no(tenant->borrow));
    uint32_t allowed = 0;
    for (uint32_t i = 0; i < rules->class_count; i++)
        allowed += tenant->classes[i].allowed;
    if (allowed < rules->class_count) {
        fprintf(to, "classes =%s", allowed ? " " : "");
        const char *comma = "";
        for (uint32_t i = 0; i < rules->class_count; i++)
            if (tenant->classes[i].allowed) {
                fprintf(to, "%s%s", comma, rules->classes[i].name);
                comma = ",";
            }
        fprintf(to, "\n");
    }
    for (uint32_t i = 0; i < rules->class_count; i++) {
        const struct sluice_class_rule *rule = &tenant->classes[i];
        const char *name = rules->classes[i].name;
        put_number(to, "class.", name, ".gpus-per-job", rule->gpus_per_job, SLUICE_NO_LIMIT);
        put_number(to, "class.", name, ".run-time-s", rule->run_time_s, SLUICE_NO_LIMIT);
        put_number(to, "class.", name, ".gpus-limit", rule->gpus_limit, SLUICE_NO_LIMIT);
        put_number(to, "class.", name, ".gpus-guaranteed", rule->gpus_guaranteed, 0);
        put_number(to, "class.", name, ".power-w", rule->power_w, 0);
        put_number(to, "class.", name, ".power-most-w", rule->power_most_w, 0);
    }
}

static char *read_all(size_t *length)
{
    size_t room = 65536;
    char *data = malloc(room);
    *length = 0;
    while (data) {
        *length += fread(data + *length, 1, room - *length, stdin);
        if (*length < room)
            return data;
        room *= 2;
        char *more = realloc(data, room);
        if (!more)
            free(data);
        data = more;
    }
    return NULL;
}

int main(void)
{
    size_t length, used = 0;
    char *data = read_all(&length), *text = NULL;
    struct sluice_rules *rules;
    struct sluice_error_text words;
    if (!data)
        return 2;
    enum sluice_error error = sluice_rules_parse(data, length, &rules, &words);
    free(data);
    if (error) {
        printf("%d %s\n", (int)error, words.text);
        return 1;
    }
    for (uint32_t i = 0; i < rules->warning_count && i < SLUICE_RULES_MAX_WARNINGS; i++)
        fprintf(stderr, "%s\n", rules->warnings[i].text);
    FILE *to = open_memstream(&text, &used);
    if (!to)
        return 2;
    put_global(to, rules);
    for (uint32_t i = 0; i < rules->class_count; i++)
        put_class(to, &rules->classes[i]);
    for (uint32_t i = 0; i < rules->tenant_count; i++)
        put_tenant(to, rules, &rules->tenants[i]);
    for (uint32_t i = 0; i < rules->budget_count; i++)
        put_budget(to, &rules->budgets[i]);
    if (fclose(to) != 0)
        return 2;
    printf("%schecksum = crc32:%08" PRIx32 "\n", text, sluice_crc32(text, used));
    free(text);
    sluice_rules_free(rules);
    return 0;
}
