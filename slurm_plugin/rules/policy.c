/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/policy.h"

#include "rules/options.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory: what a policy holds is given back at once ---- */

struct block {
    struct block *next;
    max_align_t data[];
};

/* Open addressing by name; a place holds an index + 1. */
struct names {
    uint32_t *places;
    uint32_t mask;
};

struct rules {
    struct sluice_rules shown; /* first: the two have one address */
    struct block *blocks;
    struct names tenants, types;
    const char **type_names;
    uint32_t *type_classes;
    uint32_t type_count;
};

static void *take(struct rules *rules, size_t count, size_t size)
{
    struct block *block = calloc(1, sizeof(struct block) + count * size);
    if (!block)
        return NULL;
    block->next = rules->blocks;
    rules->blocks = block;
    return block->data;
}

void sluice_rules_free(struct sluice_rules *rules)
{
    struct rules *compiled = (struct rules *)rules;
    if (!compiled)
        return;
    while (compiled->blocks) {
        struct block *next = compiled->blocks->next;
        free(compiled->blocks);
        compiled->blocks = next;
    }
    free(compiled);
}

/* FNV-1a (G. Fowler, L. Noll, K. Vo), 64 bits folded to 32. */
static uint32_t hash(const char *name)
{
    uint64_t value = UINT64_C(14695981039346656037);
    for (; *name; name++)
        value = (value ^ (uint8_t)*name) * UINT64_C(1099511628211);
    return (uint32_t)(value ^ value >> 32);
}

static bool names_new(struct rules *rules, struct names *names, uint32_t most)
{
    uint32_t size = 8;
    while (size < 2 * most)
        size *= 2;
    names->places = take(rules, size, sizeof(*names->places));
    names->mask = size - 1;
    return names->places != NULL;
}

/* The place of a name, or the free one where it belongs; `name_of` gives an index's name. */
static uint32_t *names_place(const struct rules *rules, const struct names *names, const char *name,
                             const char *(*name_of)(const struct rules *, uint32_t))
{
    uint32_t at = hash(name) & names->mask;
    while (names->places[at] && strcmp(name_of(rules, names->places[at] - 1), name) != 0)
        at = (at + 1) & names->mask;
    return &names->places[at];
}

static const char *tenant_name(const struct rules *rules, uint32_t index)
{
    return rules->shown.tenants[index].account;
}

static const char *type_name(const struct rules *rules, uint32_t index)
{
    return rules->type_names[index];
}

const struct sluice_tenant *sluice_rules_tenant(const struct sluice_rules *rules, const char *account)
{
    const struct rules *compiled = (const struct rules *)rules;
    uint32_t found = account ? *names_place(compiled, &compiled->tenants, account, tenant_name) : 0;
    return found ? &rules->tenants[found - 1] : NULL;
}

uint32_t sluice_rules_class_of_type(const struct sluice_rules *rules, const char *gpu_type)
{
    const struct rules *compiled = (const struct rules *)rules;
    uint32_t found = gpu_type ? *names_place(compiled, &compiled->types, gpu_type, type_name) : 0;
    return found ? compiled->type_classes[found - 1] : SLUICE_NO_CLASS;
}

uint32_t sluice_rules_class_by_name(const struct sluice_rules *rules, const char *name)
{
    for (uint32_t i = 0; name && i < rules->class_count; i++)
        if (strcmp(rules->classes[i].name, name) == 0)
            return i;
    return SLUICE_NO_CLASS;
}

uint32_t sluice_crc32(const void *data, size_t length)
{
    static const uint32_t part[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                      0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                      0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const uint8_t *bytes = data;
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < length; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ part[crc & 15];
        crc = crc >> 4 ^ part[crc & 15];
    }
    return ~crc;
}

/* ---- reading ---- */

enum section { SECTION_HEAD, SECTION_GLOBAL, SECTION_CLASS, SECTION_TENANT, SECTION_BUDGET, SECTION_UNKNOWN };

struct reader {
    struct rules *rules;
    struct sluice_error_text *text;
    struct sluice_class *classes;
    struct sluice_tenant *tenants;
    struct sluice_budget *budgets;
    struct sluice_error_text *warnings;
    struct sluice_class_rule *row; /* of the tenant that is being read */
    enum section section;
    bool class_list; /* the tenant has a list of allowed classes */
    uint32_t line, tenant_room, type_room;
    uint64_t seen; /* keys of the section, by their place in its table */
};

/* A file's text is shown in logs and on terminals: printable ASCII only. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

/* A failure in the current line. */
__attribute__((format(printf, 3, 4))) static enum sluice_error fail(const struct reader *reader,
                                                                    enum sluice_error error, const char *format, ...)
{
    if (reader->text) {
        int used = snprintf(reader->text->text, sizeof(reader->text->text), "line %" PRIu32 ": ", reader->line);
        va_list words;
        va_start(words, format);
        vsnprintf(reader->text->text + used, sizeof(reader->text->text) - (size_t)used, format, words);
        va_end(words);
        make_printable(reader->text->text);
    }
    return error;
}

static enum sluice_error no_memory(const struct reader *reader)
{
    return fail(reader, SLUICE_ERROR_NO_MEMORY, "no memory");
}

__attribute__((format(printf, 2, 3))) static void warn(struct reader *reader, const char *format, ...)
{
    struct sluice_rules *shown = &reader->rules->shown;
    if (shown->warning_count++ >= SLUICE_RULES_MAX_WARNINGS)
        return;
    char *to = reader->warnings[shown->warning_count - 1].text;
    int used = snprintf(to, SLUICE_ERROR_TEXT_SIZE, "line %" PRIu32 ": ", reader->line);
    va_list words;
    va_start(words, format);
    vsnprintf(to + used, SLUICE_ERROR_TEXT_SIZE - (size_t)used, format, words);
    va_end(words);
    make_printable(to);
}

/* Text of a name: printable ASCII without what separates names in this file and in Slurm's. */
static bool is_name(const char *text)
{
    size_t length = strlen(text);
    if (length == 0 || length > SLUICE_RULES_MAX_NAME)
        return false;
    for (; *text; text++)
        if (*text <= ' ' || *text > '~' || strchr(",=[]#'\"\\|&()*;", *text))
            return false;
    return true;
}

static enum sluice_error read_number(const struct reader *reader, const char *key, const char *value, uint64_t least,
                                     uint64_t most, uint64_t *number)
{
    char *end;
    errno = 0;
    if (*value < '0' || *value > '9')
        return fail(reader, SLUICE_ERROR_INVALID, "%.60s: \"%.40s\" is not a number", key, value);
    unsigned long long found = strtoull(value, &end, 10);
    if (*end)
        return fail(reader, SLUICE_ERROR_INVALID, "%.60s: \"%.40s\" is not a number", key, value);
    if (errno || found < least || found > most)
        return fail(reader, SLUICE_ERROR_RANGE, "%.60s: %.40s is not in %" PRIu64 " to %" PRIu64, key, value, least,
                    most);
    *number = found;
    return SLUICE_OK;
}

static enum sluice_error read_yes_no(const struct reader *reader, const char *key, const char *value, bool *yes)
{
    if (strcmp(value, "yes") != 0 && strcmp(value, "no") != 0)
        return fail(reader, SLUICE_ERROR_INVALID, "%.60s: \"%.40s\" is neither yes nor no", key, value);
    *yes = *value == 'y';
    return SLUICE_OK;
}

static enum sluice_error read_name(const struct reader *reader, const char *key, const char *value, const char **name)
{
    if (!is_name(value))
        return fail(reader, SLUICE_ERROR_INVALID, "%.60s: \"%.40s\" is not a name", key, value);
    *name = value;
    return SLUICE_OK;
}

/* Names separated by commas; the value is cut up in place. An empty value is an empty list. */
static enum sluice_error read_words(const struct reader *reader, const char *key, char *value,
                                    struct sluice_words *words)
{
    uint32_t count = *value != '\0';
    for (const char *at = value; *at; at++)
        count += *at == ',';
    if (count > SLUICE_RULES_MAX_LIST)
        return fail(reader, SLUICE_ERROR_CAPACITY, "%.60s: %" PRIu32 " names, at most %d", key, count,
                    SLUICE_RULES_MAX_LIST);
    const char **items = take(reader->rules, count + 1, sizeof(*items));
    if (!items)
        return no_memory(reader);
    for (uint32_t i = 0; i < count; i++) {
        char *comma = strchr(value, ',');
        if (comma)
            *comma = '\0';
        enum sluice_error error = read_name(reader, key, value, &items[i]);
        if (error)
            return error;
        for (uint32_t j = 0; j < i; j++)
            if (strcmp(items[i], items[j]) == 0)
                return fail(reader, SLUICE_ERROR_DUPLICATE, "%.60s: \"%.40s\" is named twice", key, value);
        value += strlen(value) + 1;
    }
    *words = (struct sluice_words){.items = count ? items : NULL, .count = count};
    return SLUICE_OK;
}

/* A key with a plain value: where it goes in its structure. */
struct key {
    const char *name;
    enum { KEY_U32, KEY_U64, KEY_I64, KEY_TRUTH, KEY_NAME, KEY_WORDS } kind;
    size_t offset;
    uint64_t least, most;
};

#define MOST_S UINT64_C(315360000) /* ten years: no time in a policy is longer */
#define MOST_GPUS UINT64_C(10000000)
#define MOST_MIB (UINT64_C(1) << 40)

#define WEIGHT(NAME, FACTOR)                                                                                           \
    {.name = "weight." NAME,                                                                                           \
     .kind = KEY_U32,                                                                                                  \
     .offset = offsetof(struct sluice_rules, order.weight) + 4 * FACTOR,                                               \
     .most = SLUICE_ORDER_MAX_WEIGHT}

static const struct key global_keys[] = {
    WEIGHT("priority", SLUICE_FACTOR_PRIORITY),
    WEIGHT("age", SLUICE_FACTOR_AGE),
    WEIGHT("fair-share", SLUICE_FACTOR_FAIR_SHARE),
    WEIGHT("deadline", SLUICE_FACTOR_DEADLINE),
    WEIGHT("service", SLUICE_FACTOR_SERVICE),
    WEIGHT("time", SLUICE_FACTOR_TIME),
    WEIGHT("size", SLUICE_FACTOR_SIZE),
    {"age-full-s", KEY_I64, offsetof(struct sluice_rules, order.age_full_s), 1, MOST_S},
    {"laxity-horizon-s", KEY_I64, offsetof(struct sluice_rules, order.laxity_horizon_s), 1, MOST_S},
    {"size-full-gpus", KEY_U32, offsetof(struct sluice_rules, order.size_full_gpus), 1, MOST_GPUS},
    {"starvation-s", KEY_I64, offsetof(struct sluice_rules, order.starvation_s), 0, MOST_S},
    {"fair-share-half-life-s", KEY_I64, offsetof(struct sluice_rules, fair_share_half_life_s), 0, MOST_S},
    {"backfill-reservations", KEY_U32, offsetof(struct sluice_rules, backfill_reservations), 0, 100000},
    {"backfill-depth", KEY_U32, offsetof(struct sluice_rules, backfill_depth), 1, SLUICE_MOST_PLANNED},
    {"planner-interval-ms", KEY_U32, offsetof(struct sluice_rules, planner_interval_ms), 100, 600000},
    {"gang-limit-s", KEY_U32, offsetof(struct sluice_rules, gang_limit_s), 1, 86400},
    {"gang-incomplete-s", KEY_U32, offsetof(struct sluice_rules, gang_incomplete_s), 0, 2592000},
    {"gang-incomplete-cancel", KEY_TRUTH, offsetof(struct sluice_rules, gang_incomplete_cancel), 0, 0},
    {"deadlines", KEY_TRUTH, offsetof(struct sluice_rules, deadlines), 0, 0},
    {"cpus-per-gpu-milli", KEY_U32, offsetof(struct sluice_rules, cpus_per_gpu_milli), 0, 1000000},
    {"memory-mib-per-gpu", KEY_U64, offsetof(struct sluice_rules, memory_mib_per_gpu), 0, MOST_MIB},
    {"gpu-shares", KEY_TRUTH, offsetof(struct sluice_rules, gpu_shares), 0, 0},
    {"checkpoint-signal", KEY_U32, offsetof(struct sluice_rules, checkpoint_signal), 1, 31},
    {"compaction-wait-s", KEY_U32, offsetof(struct sluice_rules, compaction_wait_s), 0, MOST_S},
    {"compaction-factor-permille", KEY_U32, offsetof(struct sluice_rules, compaction_factor_permille), 1, 1000000},
    {"compaction-move-cost-s", KEY_U32, offsetof(struct sluice_rules, compaction_move_cost_s), 1, 86400},
    {"compaction-save-s", KEY_U32, offsetof(struct sluice_rules, compaction_save_s), 1, 3600},
    {"compaction-moves-per-job", KEY_U32, offsetof(struct sluice_rules, compaction_moves_per_job), 1, 1000},
    {"compaction-moves-per-hour", KEY_U32, offsetof(struct sluice_rules, compaction_moves_per_hour), 1,
     SLUICE_COMPACTION_MAX_MOVES},
    {"compaction-moves-unlisted", KEY_TRUTH, offsetof(struct sluice_rules, compaction_moves_unlisted), 0, 0},
    {"compaction-empty-within-s", KEY_U32, offsetof(struct sluice_rules, compaction_empty_within_s), 0, MOST_S},
    {"checkpoint-system", KEY_TRUTH, offsetof(struct sluice_rules, checkpoint_system), 0, 0},
    {"journal", KEY_TRUTH, offsetof(struct sluice_rules, journal), 0, 0},
    {"journal-wait-ms", KEY_U32, offsetof(struct sluice_rules, journal_wait_ms), 1, 10000},
    {"journal-warn", KEY_TRUTH, offsetof(struct sluice_rules, journal_warn), 0, 0},
    {"spread-nodes", KEY_TRUTH, offsetof(struct sluice_rules, spread_nodes), 0, 0},
    {"nic-planes", KEY_U32, offsetof(struct sluice_rules, nic_planes), 0, SLUICE_SPREAD},
    {"journal-max-mib", KEY_U64, offsetof(struct sluice_rules, journal_max_mib), 8, 65536},
};

static const struct key class_keys[] = {
    {"gpu-types", KEY_WORDS, offsetof(struct sluice_class, gpu_types), 0, 0},
    {"gpu-memory-mib", KEY_U64, offsetof(struct sluice_class, gpu_memory_mib), 0, MOST_MIB},
    {"reserved-permille", KEY_U32, offsetof(struct sluice_class, reserved_permille), 0, 1000},
    {"cpus-per-gpu-milli", KEY_U32, offsetof(struct sluice_class, cpus_per_gpu_milli), 0, 1000000},
    {"memory-mib-per-gpu", KEY_U64, offsetof(struct sluice_class, memory_mib_per_gpu), 0, MOST_MIB},
    {"power-default-w", KEY_U32, offsetof(struct sluice_class, power_default_w), 0, SLUICE_POWER_MAX_GPU_WATTS},
    {"power-idle-w", KEY_U32, offsetof(struct sluice_class, power_idle_w), 0, SLUICE_POWER_MAX_GPU_WATTS},
    {"power-start-least-w", KEY_U32, offsetof(struct sluice_class, power_start_least_w), 0, SLUICE_POWER_MAX_GPU_WATTS},
    {"power-least-w", KEY_U32, offsetof(struct sluice_class, power_least_w), 0, SLUICE_GPU_POWER_MAX_W},
    {"power-most-w", KEY_U32, offsetof(struct sluice_class, power_most_w), 0, SLUICE_GPU_POWER_MAX_W},
    {"compaction-wait-s", KEY_U32, offsetof(struct sluice_class, compaction_wait_s), 0, MOST_S},
    {"spread-nodes", KEY_TRUTH, offsetof(struct sluice_class, spread_nodes), 0, 0},
    {"nic-planes", KEY_U32, offsetof(struct sluice_class, nic_planes), 0, SLUICE_SPREAD},
};

static const struct key tenant_keys[] = {
    {"parent", KEY_NAME, offsetof(struct sluice_tenant, parent), 0, 0},
    {"qos", KEY_NAME, offsetof(struct sluice_tenant, qos), 0, 0},
    {"partitions", KEY_WORDS, offsetof(struct sluice_tenant, partitions), 0, 0},
    {"features", KEY_WORDS, offsetof(struct sluice_tenant, features), 0, 0},
    {"shares", KEY_U32, offsetof(struct sluice_tenant, shares), 0, 1000000},
    {"tier", KEY_U32, offsetof(struct sluice_tenant, tier), 0, 1000},
    {"default-priority", KEY_U32, offsetof(struct sluice_tenant, default_priority), 0, 1000000},
    {"gpu-memory-mib-per-job", KEY_U64, offsetof(struct sluice_tenant, gpu_memory_mib_per_job), 0, MOST_MIB},
    {"gpu-memory-mib-per-gpu", KEY_U64, offsetof(struct sluice_tenant, gpu_memory_mib_per_gpu), 0, MOST_MIB},
    {"gpus-per-job", KEY_U32, offsetof(struct sluice_tenant, gpus_per_job), 0, MOST_GPUS},
    {"run-time-s", KEY_U32, offsetof(struct sluice_tenant, run_time_s), 0, MOST_S},
    {"submissions-per-minute", KEY_U32, offsetof(struct sluice_tenant, submissions_per_minute), 0, 1000000},
    {"expires-s", KEY_I64, offsetof(struct sluice_tenant, expires_s), 0, INT64_C(1) << 40},
    {"one-block-s", KEY_U32, offsetof(struct sluice_tenant, one_block_s), 0, SLUICE_FABRIC_MOST_S},
    {"gang", KEY_TRUTH, offsetof(struct sluice_tenant, gang), 0, 0},
    {"deadline", KEY_TRUTH, offsetof(struct sluice_tenant, deadline), 0, 0},
    {"borrow", KEY_TRUTH, offsetof(struct sluice_tenant, borrow), 0, 0},
    {"movable", KEY_TRUTH, offsetof(struct sluice_tenant, movable), 0, 0},
};

static const struct key budget_keys[] = {
    {"tenant", KEY_NAME, offsetof(struct sluice_budget, tenant), 0, 0},
    {"watts", KEY_I64, offsetof(struct sluice_budget, watts), 0, SLUICE_POWER_MAX_WATTS},
    {"kept", KEY_I64, offsetof(struct sluice_budget, kept), 0, SLUICE_POWER_MAX_WATTS},
};

/* Of one class, behind `class.NAME.` */
static const struct key rule_keys[] = {
    {"gpus-per-job", KEY_U32, offsetof(struct sluice_class_rule, gpus_per_job), 0, MOST_GPUS},
    {"run-time-s", KEY_U32, offsetof(struct sluice_class_rule, run_time_s), 0, MOST_S},
    {"gpus-limit", KEY_U32, offsetof(struct sluice_class_rule, gpus_limit), 0, MOST_GPUS},
    {"gpus-guaranteed", KEY_U32, offsetof(struct sluice_class_rule, gpus_guaranteed), 0, MOST_GPUS},
    {"power-w", KEY_U32, offsetof(struct sluice_class_rule, power_w), 0, SLUICE_GPU_POWER_MAX_W},
    {"power-most-w", KEY_U32, offsetof(struct sluice_class_rule, power_most_w), 0, SLUICE_GPU_POWER_MAX_W},
};

#define COUNT(TABLE) (sizeof(TABLE) / sizeof(*(TABLE)))

static enum sluice_error store(struct reader *reader, const struct key *key, char *value, void *structure)
{
    char *to = (char *)structure + key->offset;
    uint64_t number = 0;
    enum sluice_error error = SLUICE_OK;
    switch (key->kind) {
    case KEY_U32:
        if (!(error = read_number(reader, key->name, value, key->least, key->most, &number)))
            memcpy(to, &(uint32_t){(uint32_t)number}, sizeof(uint32_t));
        break;
    case KEY_U64:
    case KEY_I64: /* `most` of these fits */
        if (!(error = read_number(reader, key->name, value, key->least, key->most, &number)))
            memcpy(to, &number, sizeof(number));
        break;
    case KEY_TRUTH:
        error = read_yes_no(reader, key->name, value, (bool *)to);
        break;
    case KEY_NAME:
        error = read_name(reader, key->name, value, (const char **)(void *)to);
        break;
    case KEY_WORDS:
        error = read_words(reader, key->name, value, (struct sluice_words *)(void *)to);
        break;
    }
    return error;
}

/* Read a key by its table into a structure; `found` says whether the table has it. */
static enum sluice_error read_key(struct reader *reader, const struct key *keys, size_t count, const char *name,
                                  char *value, void *structure, bool *found)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(keys[i].name, name) != 0)
            continue;
        *found = true;
        if (reader->seen & UINT64_C(1) << i)
            return fail(reader, SLUICE_ERROR_DUPLICATE, "%.60s: given twice in one section", name);
        reader->seen |= UINT64_C(1) << i;
        return store(reader, &keys[i], value, structure);
    }
    *found = false;
    return SLUICE_OK;
}

/* Keys outside the tables are seen, too: these bits. */
enum { SEEN_STRATEGY = 62, SEEN_CLASSES = 62, SEEN_PLACEMENT = 62, SEEN_NODES = 62, SEEN_HOURS = 63 };

static enum sluice_error see(struct reader *reader, unsigned bit, const char *name)
{
    if (reader->seen & UINT64_C(1) << bit)
        return fail(reader, SLUICE_ERROR_DUPLICATE, "%.60s: given twice in one section", name);
    reader->seen |= UINT64_C(1) << bit;
    return SLUICE_OK;
}

static enum sluice_error read_global(struct reader *reader, const char *name, char *value)
{
    struct sluice_rules *shown = &reader->rules->shown;
    shown->empty = false;
    if (strcmp(name, "placement") == 0) {
        struct sluice_error_text words;
        enum sluice_error error = see(reader, SEEN_PLACEMENT, name);
        if (!error && (error = sluice_policy_by_name(value, &shown->placement, &words)))
            return fail(reader, error, "%.200s", words.text);
        return error;
    }
    bool found;
    enum sluice_error error = read_key(reader, global_keys, COUNT(global_keys), name, value, shown, &found);
    if (!found)
        warn(reader, "[global] %.60s: not known to this version, ignored", name);
    return error;
}

static enum sluice_error read_class(struct reader *reader, const char *name, char *value)
{
    struct sluice_class *class = &reader->classes[reader->rules->shown.class_count - 1];
    if (strcmp(name, "strategy") == 0) {
        static const char *const strategies[] = {"static", "dynamic", "hybrid"};
        enum sluice_error error = see(reader, SEEN_STRATEGY, name);
        if (error)
            return error;
        for (unsigned i = 0; i < COUNT(strategies); i++)
            if (strcmp(value, strategies[i]) == 0) {
                class->strategy = (enum sluice_class_strategy)i;
                return SLUICE_OK;
            }
        return fail(reader, SLUICE_ERROR_INVALID, "strategy: \"%.40s\" is not static, dynamic or hybrid", value);
    }
    bool found;
    enum sluice_error error = read_key(reader, class_keys, COUNT(class_keys), name, value, class, &found);
    if (!found)
        warn(reader, "[class %.60s] %.60s: not known to this version, ignored", class->name, name);
    return error;
}

static enum sluice_error read_allowed(struct reader *reader, char *value)
{
    struct sluice_words words;
    enum sluice_error error = see(reader, SEEN_CLASSES, "classes");
    if (error || (error = read_words(reader, "classes", value, &words)))
        return error;
    for (uint32_t i = 0; i < reader->rules->shown.class_count; i++)
        reader->row[i].allowed = false;
    for (uint32_t i = 0; i < words.count; i++) {
        uint32_t class = sluice_rules_class_by_name(&reader->rules->shown, words.items[i]);
        if (class == SLUICE_NO_CLASS)
            return fail(reader, SLUICE_ERROR_UNKNOWN, "classes: \"%.60s\" is not a class above this line",
                        words.items[i]);
        reader->row[class].allowed = true;
    }
    return SLUICE_OK;
}

/* `class.NAME.KEY`; a class's name may hold dots, a key cannot. Duplicates are not looked for: the last one holds. */
static enum sluice_error read_rule(struct reader *reader, char *name, char *value)
{
    char *class_name = name + strlen("class."), *dot = strrchr(class_name, '.');
    if (!dot)
        return fail(reader, SLUICE_ERROR_INVALID, "%.60s: write class.NAME.KEY", name);
    *dot = '\0';
    uint32_t class = sluice_rules_class_by_name(&reader->rules->shown, class_name);
    if (class == SLUICE_NO_CLASS)
        return fail(reader, SLUICE_ERROR_UNKNOWN, "\"%.60s\" is not a class above this line", class_name);
    for (size_t i = 0; i < COUNT(rule_keys); i++)
        if (strcmp(rule_keys[i].name, dot + 1) == 0)
            return store(reader, &rule_keys[i], value, &reader->row[class]);
    warn(reader, "class.%.60s.%.60s: not known to this version, ignored", class_name, dot + 1);
    return SLUICE_OK;
}

static enum sluice_error read_tenant(struct reader *reader, char *name, char *value)
{
    struct sluice_tenant *tenant = &reader->tenants[reader->rules->shown.tenant_count - 1];
    if (strcmp(name, "classes") == 0)
        return read_allowed(reader, value);
    if (strncmp(name, "class.", strlen("class.")) == 0)
        return read_rule(reader, name, value);
    bool found;
    enum sluice_error error = read_key(reader, tenant_keys, COUNT(tenant_keys), name, value, tenant, &found);
    if (!found)
        warn(reader, "[tenant %.60s] %.60s: not known to this version, ignored", tenant->account, name);
    return error;
}

/* FROM-TO:WATTS in minutes of the week. */
static enum sluice_error read_hours_of(const struct reader *reader, char *value, int32_t before,
                                       struct sluice_power_hours *hours)
{
    char *to = strchr(value, '-'), *watts = to ? strchr(to, ':') : NULL;
    if (!watts)
        return fail(reader, SLUICE_ERROR_INVALID, "hours: \"%.40s\" is not FROM-TO:WATTS", value);
    *to++ = *watts++ = '\0';
    uint64_t from_m, to_m, number;
    enum sluice_error error = read_number(reader, "hours", value, 0, SLUICE_POWER_WEEK_S / 60, &from_m);
    if (error || (error = read_number(reader, "hours", to, 0, SLUICE_POWER_WEEK_S / 60, &to_m)) ||
        (error = read_number(reader, "hours", watts, 0, SLUICE_POWER_MAX_WATTS, &number)))
        return error;
    *hours = (struct sluice_power_hours){
        .from_s = (int32_t)from_m * 60, .to_s = (int32_t)to_m * 60, .watts = (int64_t)number};
    if (hours->from_s < before || hours->to_s <= hours->from_s)
        return fail(reader, SLUICE_ERROR_INVALID, "hours: %.20s-%.20s: times must ascend, without overlap", value, to);
    return SLUICE_OK;
}

static enum sluice_error read_hours(struct reader *reader, char *value, struct sluice_budget *budget)
{
    enum sluice_error error = see(reader, SEEN_HOURS, "hours");
    uint32_t count = *value != '\0';
    for (const char *at = value; *at; at++)
        count += *at == ',';
    if (!error && count > SLUICE_POWER_MAX_HOURS)
        return fail(reader, SLUICE_ERROR_CAPACITY, "hours: %" PRIu32 " times, at most %d", count,
                    SLUICE_POWER_MAX_HOURS);
    struct sluice_power_hours *hours = error ? NULL : take(reader->rules, count + 1, sizeof(*hours));
    if (!hours)
        return error ? error : no_memory(reader);
    int32_t before = 0;
    for (uint32_t i = 0; i < count && !error; i++) {
        char *comma = strchr(value, ','), *next = comma ? comma + 1 : value;
        if (comma)
            *comma = '\0';
        error = read_hours_of(reader, value, before, &hours[i]);
        before = hours[i].to_s;
        value = next;
    }
    budget->hours = hours;
    budget->hour_count = count;
    return error;
}

/* A hostlist expression is expanded where Slurm is at hand. */
static enum sluice_error read_nodes(struct reader *reader, const char *value, struct sluice_budget *budget)
{
    enum sluice_error error = see(reader, SEEN_NODES, "nodes");
    const size_t length = strlen(value);
    if (!error && (length == 0 || length > SLUICE_RULES_MAX_NODES))
        error = fail(reader, SLUICE_ERROR_CAPACITY, "nodes: %zu bytes, 1 to %d", length, SLUICE_RULES_MAX_NODES);
    for (const char *at = value; !error && *at; at++) {
        if (*at <= ' ' || *at > '~')
            error = fail(reader, SLUICE_ERROR_INVALID, "nodes: \"%.40s\" is no hostlist", value);
    }
    budget->nodes = strcmp(value, "*") == 0 ? NULL : value;
    return error;
}

static enum sluice_error read_budget(struct reader *reader, const char *name, char *value)
{
    struct sluice_budget *budget = &reader->budgets[reader->rules->shown.budget_count - 1];
    if (strcmp(name, "hours") == 0)
        return read_hours(reader, value, budget);
    if (strcmp(name, "nodes") == 0)
        return read_nodes(reader, value, budget);
    bool found;
    enum sluice_error error = read_key(reader, budget_keys, COUNT(budget_keys), name, value, budget, &found);
    if (!found)
        warn(reader, "[budget %.60s] %.60s: not known to this version, ignored", budget->name, name);
    return error;
}

static enum sluice_error read_head(struct reader *reader, const char *name, char *value)
{
    struct sluice_rules *shown = &reader->rules->shown;
    uint64_t number;
    enum sluice_error error = SLUICE_OK;
    if (strcmp(name, "generated-s") == 0) {
        if (!(error = read_number(reader, name, value, 0, UINT64_C(1) << 40, &number)))
            shown->generated_s = (int64_t)number;
    } else if (strcmp(name, "source") == 0) {
        error = *value ? read_name(reader, name, value, &shown->source) : SLUICE_OK;
    } else {
        warn(reader, "%.60s: not known to this version, ignored", name);
    }
    return error;
}

/* ---- sections ---- */

static enum sluice_error begin_class(struct reader *reader, const char *name)
{
    struct sluice_rules *shown = &reader->rules->shown;
    if (shown->tenant_count)
        return fail(reader, SLUICE_ERROR_INVALID, "[class %.60s]: classes must come before the tenants", name);
    if (shown->class_count == SLUICE_RULES_MAX_CLASSES)
        return fail(reader, SLUICE_ERROR_CAPACITY, "more than %d classes", SLUICE_RULES_MAX_CLASSES);
    if (sluice_rules_class_by_name(shown, name) != SLUICE_NO_CLASS)
        return fail(reader, SLUICE_ERROR_DUPLICATE, "[class %.60s]: given twice", name);
    reader->classes[shown->class_count++] = (struct sluice_class){.name = name, .strategy = SLUICE_CLASS_DYNAMIC};
    reader->section = SECTION_CLASS;
    return SLUICE_OK;
}

static enum sluice_error begin_tenant(struct reader *reader, const char *name)
{
    struct rules *rules = reader->rules;
    struct sluice_rules *shown = &rules->shown;
    if (shown->tenant_count == reader->tenant_room)
        return fail(reader, SLUICE_ERROR_CAPACITY, "more than %d tenants", SLUICE_RULES_MAX_TENANTS);
    uint32_t *place = names_place(rules, &rules->tenants, name, tenant_name);
    if (*place)
        return fail(reader, SLUICE_ERROR_DUPLICATE, "[tenant %.60s]: given twice", name);
    reader->row = take(rules, shown->class_count + 1, sizeof(*reader->row));
    if (!reader->row)
        return no_memory(reader);
    for (uint32_t i = 0; i < shown->class_count; i++)
        reader->row[i] = (struct sluice_class_rule){.allowed = true,
                                                    .gpus_per_job = SLUICE_NO_LIMIT,
                                                    .run_time_s = SLUICE_NO_LIMIT,
                                                    .gpus_limit = SLUICE_NO_LIMIT};
    reader->tenants[shown->tenant_count++] = (struct sluice_tenant){.account = name,
                                                                    .shares = 1,
                                                                    .gpu_memory_mib_per_job = SLUICE_NO_LIMIT_64,
                                                                    .gpu_memory_mib_per_gpu = SLUICE_NO_LIMIT_64,
                                                                    .gpus_per_job = SLUICE_NO_LIMIT,
                                                                    .run_time_s = SLUICE_NO_LIMIT,
                                                                    .submissions_per_minute = SLUICE_NO_LIMIT,
                                                                    .gang = true,
                                                                    .deadline = true,
                                                                    .borrow = true,
                                                                    .movable = true,
                                                                    .classes = reader->row};
    *place = shown->tenant_count;
    reader->section = SECTION_TENANT;
    return SLUICE_OK;
}

static enum sluice_error begin_budget(struct reader *reader, const char *name)
{
    struct sluice_rules *shown = &reader->rules->shown;
    if (shown->budget_count == SLUICE_POWER_MAX_BUDGETS)
        return fail(reader, SLUICE_ERROR_CAPACITY, "more than %d budgets", SLUICE_POWER_MAX_BUDGETS);
    for (uint32_t i = 0; i < shown->budget_count; i++)
        if (strcmp(reader->budgets[i].name, name) == 0)
            return fail(reader, SLUICE_ERROR_DUPLICATE, "[budget %.60s]: given twice", name);
    reader->budgets[shown->budget_count++] = (struct sluice_budget){.name = name};
    reader->section = SECTION_BUDGET;
    return SLUICE_OK;
}

static enum sluice_error begin_section(struct reader *reader, char *line)
{
    char *end = strchr(line, ']');
    if (!end || end[1])
        return fail(reader, SLUICE_ERROR_INVALID, "\"%.60s\": a section is written [NAME]", line);
    *end = '\0';
    char *kind = line + 1, *name = strchr(kind, ' ');
    if (name)
        *name++ = '\0';
    reader->seen = 0;
    if (strcmp(kind, "global") == 0 && !name) {
        if (reader->section != SECTION_HEAD)
            return fail(reader, SLUICE_ERROR_INVALID, "[global] must come before all other sections");
        reader->section = SECTION_GLOBAL;
        return SLUICE_OK;
    }
    static const struct {
        const char *kind;
        enum sluice_error (*begin)(struct reader *reader, const char *name);
    } named[] = {{"class", begin_class}, {"tenant", begin_tenant}, {"budget", begin_budget}};
    for (size_t i = 0; i < COUNT(named); i++) {
        if (strcmp(kind, named[i].kind) != 0)
            continue;
        if (!name || !is_name(name))
            return fail(reader, SLUICE_ERROR_INVALID, "[%s %.60s]: not a name", kind, name ? name : "");
        reader->rules->shown.empty = false;
        return named[i].begin(reader, name);
    }
    warn(reader, "[%.60s]: not known to this version, ignored", kind);
    reader->section = SECTION_UNKNOWN;
    return SLUICE_OK;
}

static enum sluice_error read_line(struct reader *reader, char *line)
{
    if (!*line || *line == '#')
        return SLUICE_OK;
    if (*line == '[')
        return begin_section(reader, line);
    char *value = strstr(line, " = ");
    if (value) {
        *value = '\0';
        value += 3;
    } else {
        size_t length = strlen(line);
        if (length < 2 || strcmp(line + length - 2, " =") != 0)
            return fail(reader, SLUICE_ERROR_INVALID, "\"%.60s\": a line is written KEY = VALUE", line);
        line[length - 2] = '\0';
        value = line + length;
    }
    switch (reader->section) {
    case SECTION_HEAD:
        return read_head(reader, line, value);
    case SECTION_GLOBAL:
        return read_global(reader, line, value);
    case SECTION_CLASS:
        return read_class(reader, line, value);
    case SECTION_TENANT:
        return read_tenant(reader, line, value);
    case SECTION_BUDGET:
        return read_budget(reader, line, value);
    case SECTION_UNKNOWN:
        break;
    }
    return SLUICE_OK;
}

/* ---- a whole file ---- */

/* Where the last line begins, which is the checksum of all before it; verified. */
static enum sluice_error check_sum(struct reader *reader, const char *data, size_t length, size_t *body)
{
    static const char key[] = "checksum = crc32:";
    enum { LAST = sizeof(key) - 1 + 8 + 1 };
    for (size_t i = 0; i < length; i++)
        if (data[i] == '\n')
            reader->line++;
    const char *last = length > LAST ? data + length - LAST : NULL;
    if (!last || last[-1] != '\n' || last[LAST - 1] != '\n' || memcmp(last, key, sizeof(key) - 1) != 0)
        return fail(reader, SLUICE_ERROR_CORRUPT,
                    "the last line is not a checksum: the file was cut off, or written by hand");
    char digits[9] = {0}, *end;
    memcpy(digits, last + sizeof(key) - 1, 8);
    unsigned long given = strtoul(digits, &end, 16);
    for (size_t i = 0; i < 8; i++)
        if (!strchr("0123456789abcdef", digits[i]))
            end = digits;
    if (end != digits + 8)
        return fail(reader, SLUICE_ERROR_CORRUPT, "\"%.8s\" is not a checksum of eight digits 0-9 and a-f", digits);
    *body = length - LAST;
    reader->rules->shown.checksum = sluice_crc32(data, *body);
    if (reader->rules->shown.checksum != given)
        return fail(reader, SLUICE_ERROR_CORRUPT,
                    "checksum %08lx, but the file's is %08" PRIx32
                    ": it was changed by hand or damaged; write it again with sluice apply",
                    given, reader->rules->shown.checksum);
    return SLUICE_OK;
}

static enum sluice_error check_version(struct reader *reader, const char *line)
{
    char digits[2][5]; /* %u would skip spaces and read signs */
    int used = 0;
    if (sscanf(line, "sluice-policy%*1[ ]%4[0-9].%4[0-9]%n", digits[0], digits[1], &used) != 2 || line[used])
        return fail(reader, SLUICE_ERROR_INVALID, "\"%.60s\": a compiled policy begins with sluice-policy MAJOR.MINOR",
                    line);
    unsigned long major = strtoul(digits[0], NULL, 10), minor = strtoul(digits[1], NULL, 10);
    if (major != SLUICE_RULES_MAJOR)
        return fail(reader, SLUICE_ERROR_VERSION,
                    "policy format %lu.%lu, but these plugins read %d.x; write it with the Sluice that built them",
                    major, minor, SLUICE_RULES_MAJOR);
    reader->rules->shown.minor = (uint32_t)minor;
    return SLUICE_OK;
}

/* All types of all classes by name; a type belongs to one class. */
static enum sluice_error index_types(struct reader *reader)
{
    struct rules *rules = reader->rules;
    uint32_t count = 0;
    for (uint32_t i = 0; i < rules->shown.class_count; i++)
        count += rules->shown.classes[i].gpu_types.count;
    if (count > SLUICE_RULES_MAX_TYPES)
        return fail(reader, SLUICE_ERROR_CAPACITY, "%" PRIu32 " GPU types, at most %d", count, SLUICE_RULES_MAX_TYPES);
    rules->type_names = take(rules, count + 1, sizeof(*rules->type_names));
    rules->type_classes = take(rules, count + 1, sizeof(*rules->type_classes));
    if (!rules->type_names || !rules->type_classes || !names_new(rules, &rules->types, count))
        return no_memory(reader);
    for (uint32_t i = 0; i < rules->shown.class_count; i++) {
        const struct sluice_class *class = &rules->shown.classes[i];
        for (uint32_t j = 0; j < class->gpu_types.count; j++) {
            uint32_t *place = names_place(rules, &rules->types, class->gpu_types.items[j], type_name);
            if (*place)
                return fail(reader, SLUICE_ERROR_DUPLICATE, "GPU type \"%.60s\" is in class %.40s and in class %.40s",
                            class->gpu_types.items[j], rules->shown.classes[rules->type_classes[*place - 1]].name,
                            class->name);
            rules->type_names[rules->type_count] = class->gpu_types.items[j];
            rules->type_classes[rules->type_count] = i;
            *place = ++rules->type_count;
        }
    }
    return SLUICE_OK;
}

/* Room for as many tenants as the file has lines that begin one. */
static enum sluice_error make_room(struct reader *reader, const char *data, size_t length)
{
    struct rules *rules = reader->rules;
    static const char words[] = "\n[tenant ";
    uint32_t tenants = 0;
    for (const char *at = data; (at = memmem(at, length - (size_t)(at - data), words, sizeof(words) - 1)); at++)
        tenants += tenants < SLUICE_RULES_MAX_TENANTS;
    reader->tenant_room = tenants;
    reader->tenants = take(rules, tenants + 1, sizeof(*reader->tenants));
    reader->classes = take(rules, SLUICE_RULES_MAX_CLASSES, sizeof(*reader->classes));
    reader->warnings = take(rules, SLUICE_RULES_MAX_WARNINGS, sizeof(*reader->warnings));
    reader->budgets = take(rules, SLUICE_POWER_MAX_BUDGETS, sizeof(*reader->budgets));
    if (!reader->tenants || !reader->classes || !reader->budgets || !reader->warnings ||
        !names_new(rules, &rules->tenants, tenants))
        return no_memory(reader);
    rules->shown.tenants = reader->tenants;
    rules->shown.classes = reader->classes;
    rules->shown.budgets = reader->budgets;
    rules->shown.warnings = reader->warnings;
    return SLUICE_OK;
}

/* Settings that contradict each other, as the core would refuse them. */
static enum sluice_error check_order(const struct reader *reader)
{
    const struct sluice_order_policy *order = &reader->rules->shown.order;
    if (order->weight[SLUICE_FACTOR_AGE] && !order->age_full_s)
        return fail(reader, SLUICE_ERROR_INVALID, "weight.age needs age-full-s");
    if (order->weight[SLUICE_FACTOR_DEADLINE] && !order->laxity_horizon_s)
        return fail(reader, SLUICE_ERROR_INVALID, "weight.deadline needs laxity-horizon-s");
    if (order->weight[SLUICE_FACTOR_SIZE] && !order->size_full_gpus)
        return fail(reader, SLUICE_ERROR_INVALID, "weight.size needs size-full-gpus");
    return SLUICE_OK;
}

static enum sluice_error read_file(struct reader *reader, const char *data, size_t length)
{
    size_t body = 0;
    enum sluice_error error = check_sum(reader, data, length, &body);
    if (error || (error = make_room(reader, data, body)))
        return error;
    char *copy = take(reader->rules, body + 1, 1);
    if (!copy)
        return no_memory(reader);
    memcpy(copy, data, body);
    reader->line = 0;
    for (char *line = copy, *end; !error && line < copy + body; line = end + 1) {
        end = memchr(line, '\n', (size_t)(copy + body - line)); /* body ends with a line's end */
        *end = '\0';
        reader->line++;
        if (memchr(line, '\0', (size_t)(end - line)) || memchr(line, '\r', (size_t)(end - line)))
            return fail(reader, SLUICE_ERROR_INVALID, "control characters");
        error = reader->line == 1 ? check_version(reader, line) : read_line(reader, line);
    }
    if (!error && reader->line == 0)
        error = check_version(reader, "");
    if (!error)
        error = check_order(reader);
    return error ? error : index_types(reader);
}

enum sluice_error sluice_rules_parse(const char *data, size_t length, struct sluice_rules **rules,
                                     struct sluice_error_text *text)
{
    struct reader reader = {.text = text};
    if (length > SLUICE_RULES_MAX_BYTES)
        return fail(&reader, SLUICE_ERROR_CAPACITY, "%zu bytes, at most %d", length, SLUICE_RULES_MAX_BYTES);
    reader.rules = calloc(1, sizeof(*reader.rules));
    if (!reader.rules)
        return no_memory(&reader);
    reader.rules->shown = (struct sluice_rules){.source = "",
                                                .empty = true,
                                                .placement = SLUICE_POLICY_SLUICE,
                                                .fair_share_half_life_s = 604800,
                                                .backfill_reservations = 64,
                                                .backfill_depth = 10000,
                                                .planner_interval_ms = 2000,
                                                .gang_limit_s = 300,
                                                .gang_incomplete_s = 3600,
                                                .deadlines = true,
                                                .checkpoint_signal = SIGUSR1,
                                                .compaction_factor_permille = 2000,
                                                .compaction_move_cost_s = 120,
                                                .compaction_save_s = 60,
                                                .compaction_moves_per_job = 2,
                                                .compaction_moves_per_hour = 8,
                                                .compaction_moves_unlisted = true,
                                                .journal_wait_ms = 500,
                                                .journal_max_mib = 256};
    enum sluice_error error = read_file(&reader, data, length);
    if (error) {
        sluice_rules_free(&reader.rules->shown);
        return error;
    }
    *rules = &reader.rules->shown;
    return SLUICE_OK;
}
