/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled policies of any content: as they come, and with the right checksum put under them, so that the parser behind
 * it is reached. What is accepted can be looked up by every name in it, and holds what the header promises.
 */
#include "fuzz/checksummed.h"

/* One line that can be shown anywhere, whatever the file says. */
static void require_text(const struct sluice_error_text *text)
{
    require(memchr(text->text, '\0', sizeof(text->text)) && strncmp(text->text, "line ", 5) == 0);
    for (const char *at = text->text; *at; at++)
        require(*at >= ' ' && *at <= '~');
}

static void check(const struct sluice_rules *rules)
{
    require(rules->class_count <= SLUICE_RULES_MAX_CLASSES && rules->tenant_count <= SLUICE_RULES_MAX_TENANTS);
    for (uint32_t i = 0; i < rules->class_count; i++) {
        const struct sluice_class *class = &rules->classes[i];
        require(sluice_rules_class_by_name(rules, class->name) == i && class->reserved_permille <= 1000);
        for (uint32_t j = 0; j < class->gpu_types.count; j++)
            require(sluice_rules_class_of_type(rules, class->gpu_types.items[j]) == i);
    }
    for (uint32_t i = 0; i < rules->tenant_count; i++) {
        const struct sluice_tenant *tenant = &rules->tenants[i];
        require(sluice_rules_tenant(rules, tenant->account) == tenant);
        require(strlen(tenant->account) <= SLUICE_RULES_MAX_NAME && tenant->shares <= 1000000);
        require(rules->class_count == 0 || tenant->classes[rules->class_count - 1].gpus_guaranteed <= 10000000);
    }
    require(rules->budget_count <= SLUICE_POWER_MAX_BUDGETS);
    for (uint32_t i = 0; i < rules->budget_count; i++) {
        const struct sluice_budget *budget = &rules->budgets[i];
        require(budget->name[0] && budget->watts >= 0 && budget->watts <= SLUICE_POWER_MAX_WATTS);
        require(!budget->nodes || strlen(budget->nodes) <= SLUICE_RULES_MAX_NODES);
        for (uint32_t j = 0; j < budget->hour_count; j++)
            require(budget->hours[j].from_s < budget->hours[j].to_s && budget->hours[j].to_s <= SLUICE_POWER_WEEK_S &&
                    (!j || budget->hours[j - 1].to_s <= budget->hours[j].from_s));
    }
    require(!sluice_rules_tenant(rules, "no such") && !sluice_rules_tenant(rules, NULL));
    require(rules->planner_interval_ms >= 100 && rules->placement < SLUICE_POLICY_COUNT);
    for (uint32_t i = 0; i < rules->warning_count && i < SLUICE_RULES_MAX_WARNINGS; i++)
        require_text(&rules->warnings[i]);
}

static void try(const char *data, size_t length)
{
    struct sluice_rules *rules = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_rules_parse(data, length, &rules, &text);
    require((error == SLUICE_OK) == (rules != NULL));
    if (error)
        require_text(&text);
    else
        check(rules);
    sluice_rules_free(rules);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-policy", "1.0", data, size, try);
}
