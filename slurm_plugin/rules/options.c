/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "rules/options.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SHOWN_MAX = 64 };

#define NO_ARGUMENT "(null)" /* as Slurm stores it, or as an empty string */
#define GUISE "SPANK_"       /* which slurmd puts before each string, unless it is there already */

static const size_t prefix = sizeof SLUICE_SPANK_ENV_PREFIX - 1;

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_name_character(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-' || c == '.';
}

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* A value for a message: bounded, and nothing in it that a terminal or a log would act upon. */
static const char *shown(const char *value, char *text)
{
    size_t i = 0;
    for (; value && value[i] && i < SHOWN_MAX; i++)
        text[i] = value[i] >= ' ' && value[i] <= '~' ? value[i] : '?';
    text[i] = '\0';
    return text;
}

/* Digits up to `most`; moves `*at` past them. */
static bool parse_digits(const char **at, uint64_t most, uint64_t *number)
{
    const char *start = *at;
    uint64_t value = 0;
    for (; is_digit(**at); (*at)++) {
        value = value * 10 + (uint64_t)(**at - '0');
        if (value > most)
            return false;
    }
    *number = value;
    return *at > start;
}

/* The whole of `text` is a number of `least` to `most`. */
static bool parse_number(const char *text, uint64_t least, uint64_t most, uint32_t *number)
{
    uint64_t value;
    if (!parse_digits(&text, most, &value) || *text || value < least)
        return false;
    *number = (uint32_t)value;
    return true;
}

bool sluice_parse_mib(const char *text, uint64_t most, uint64_t *mib)
{
    uint64_t whole, thousandths = 0;
    if (!text || !parse_digits(&text, UINT64_C(1) << 33, &whole))
        return false;
    if (*text == '.') {
        const char *start = ++text;
        if (!parse_digits(&text, 999, &thousandths) || text - start > 3)
            return false;
        for (ptrdiff_t digits = text - start; digits < 3; digits++)
            thousandths *= 10;
    }
    whole = whole * 1000 + thousandths; /* below 2^43, so that the largest unit keeps it below 2^64 */
    uint64_t factor = 1, divisor = 1;
    bool unit = true;
    switch (lower(*text)) {
    case 't':
        factor = UINT64_C(1) << 20;
        break;
    case 'g':
        factor = UINT64_C(1) << 10;
        break;
    case 'k':
        divisor = 1024;
        break;
    case 'm':
        break;
    default:
        unit = false;
    }
    text += unit;
    if (lower(text[0]) == 'i' && lower(text[1]) == 'b')
        text += 2;
    else if (lower(text[0]) == 'b')
        text++;
    if (*text)
        return false;
    uint64_t value = (whole * factor + 1000 * divisor - 1) / (1000 * divisor);
    if (value < 1 || value > most)
        return false;
    *mib = value;
    return true;
}

const char *sluice_format_mib(uint64_t mib, char *text, size_t size)
{
    if (mib && mib % 1024 == 0)
        snprintf(text, size, "%" PRIu64 "G", mib / 1024);
    else
        snprintf(text, size, "%" PRIu64 "M", mib);
    return text;
}

/* Each option is set from what a user wrote, and written in one spelling for all later readers. */

static void write_gpu_mem(const struct sluice_options *options, char *value, size_t size)
{
    sluice_format_mib(options->gpu_mem_mib, value, size);
}

static void write_gpu_share(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%" PRIu32, options->gpu_share);
}

static void write_gpu_spread(const struct sluice_options *options, char *value, size_t size)
{
    (void)options;
    snprintf(value, size, "%s", NO_ARGUMENT);
}

static void write_gang(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%s:%" PRIu32, options->gang_name, options->gang_count);
}

static void write_nics_per_gpu(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%" PRIu32, options->nics_per_gpu);
}

static bool set_nics_per_gpu(struct sluice_options *options, const char *value)
{
    return parse_number(value, 1, SLUICE_NICS_PER_GPU_MAX, &options->nics_per_gpu);
}

static bool set_gpu_mem(struct sluice_options *options, const char *value)
{
    return sluice_parse_mib(value, SLUICE_GPU_MEM_MAX_MIB, &options->gpu_mem_mib);
}

static bool set_gpu_share(struct sluice_options *options, const char *value)
{
    char digits[4];
    size_t length = strnlen(value, sizeof digits + 1);
    if (length && value[length - 1] == '%')
        length--;
    if (length == 0 || length >= sizeof digits)
        return false;
    memcpy(digits, value, length);
    digits[length] = '\0';
    return parse_number(digits, 1, 100, &options->gpu_share);
}

/* As sites know it: watts, with or without the unit. */
static bool set_gpu_power(struct sluice_options *options, const char *value)
{
    uint64_t watts;
    if (!parse_digits(&value, SLUICE_GPU_POWER_MAX_W, &watts) || watts < 1)
        return false;
    if (lower(*value) == 'w')
        value++;
    if (*value)
        return false;
    options->gpu_power_w = (uint32_t)watts;
    return true;
}

static void write_gpu_power(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%" PRIu32 "W", options->gpu_power_w);
}

static const char *const affinities[] = {
    [SLUICE_AFFINITY_UNSET] = "",
    [SLUICE_AFFINITY_NONE] = "none",
    [SLUICE_AFFINITY_LINK] = "link",
    [SLUICE_AFFINITY_NUMA] = "numa",
};

static bool set_gpu_affinity(struct sluice_options *options, const char *value)
{
    for (size_t i = SLUICE_AFFINITY_NONE; i < sizeof affinities / sizeof affinities[0]; i++)
        if (strcmp(value, affinities[i]) == 0) {
            options->gpu_affinity = (enum sluice_affinity)i;
            return true;
        }
    return false;
}

static void write_gpu_affinity(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%s", affinities[options->gpu_affinity]);
}

static bool set_gpu_spread(struct sluice_options *options, const char *value)
{
    if (value[0] && strcmp(value, NO_ARGUMENT) != 0)
        return false;
    options->gpu_spread = true;
    return true;
}

static bool set_gang(struct sluice_options *options, const char *value)
{
    size_t length = 0;
    uint32_t count;
    while (length <= SLUICE_GANG_NAME_MAX && is_name_character(value[length]))
        length++;
    if (length == 0 || length > SLUICE_GANG_NAME_MAX || value[length] != ':' || value[0] == '-' || value[0] == '.' ||
        !parse_number(value + length + 1, 1, SLUICE_GANG_COUNT_MAX, &count))
        return false;
    memset(options->gang_name, 0, sizeof options->gang_name);
    memcpy(options->gang_name, value, length);
    options->gang_count = count;
    return true;
}

static bool set_gpu_profile(struct sluice_options *options, const char *value)
{
    if (value[0] && strcmp(value, NO_ARGUMENT) != 0)
        return parse_number(value, 1, SLUICE_PROFILE_MAX_S, &options->gpu_profile);
    options->gpu_profile = SLUICE_PROFILE_WHOLE;
    return true;
}

static void write_gpu_profile(const struct sluice_options *options, char *value, size_t size)
{
    if (options->gpu_profile == SLUICE_PROFILE_WHOLE)
        snprintf(value, size, "%s", NO_ARGUMENT);
    else
        snprintf(value, size, "%" PRIu32, options->gpu_profile);
}

static const char *const checkpoints[] = {
    [SLUICE_CHECKPOINT_AUTO] = "auto",
    [SLUICE_CHECKPOINT_NO] = "no",
    [SLUICE_CHECKPOINT_APP] = "app",
    [SLUICE_CHECKPOINT_SYSTEM] = "system",
};

static bool set_checkpoint(struct sluice_options *options, const char *value)
{
    for (size_t i = 0; i < sizeof checkpoints / sizeof checkpoints[0]; i++)
        if (strcmp(value, checkpoints[i]) == 0) {
            options->checkpoint = (enum sluice_checkpoint)i;
            return true;
        }
    return false;
}

static void write_checkpoint(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%s", checkpoints[options->checkpoint]);
}

static bool set_checkpoint_interval(struct sluice_options *options, const char *value)
{
    static const char units[] = "smhd";
    static const uint32_t seconds[] = {1, 60, 3600, 86400};
    uint64_t count;
    if (strcmp(value, "daly") == 0) {
        options->checkpoint_s = SLUICE_CHECKPOINT_DALY;
        return true;
    }
    if (!parse_digits(&value, SLUICE_CHECKPOINT_MOST_S, &count) || !*value || value[1])
        return false;
    const char *unit = strchr(units, lower(*value));
    if (!unit)
        return false;
    count *= seconds[unit - units];
    if (count < SLUICE_CHECKPOINT_LEAST_S || count > SLUICE_CHECKPOINT_MOST_S)
        return false;
    options->checkpoint_s = (uint32_t)count;
    return true;
}

static void write_checkpoint_interval(const struct sluice_options *options, char *value, size_t size)
{
    if (options->checkpoint_s == SLUICE_CHECKPOINT_DALY)
        snprintf(value, size, "daly");
    else
        snprintf(value, size, "%" PRIu32 "s", options->checkpoint_s);
}

static const char *const fabrics[] = {
    [SLUICE_FABRIC_UNSET] = "",    [SLUICE_FABRIC_ANY] = "any",       [SLUICE_FABRIC_BLOCK] = "block",
    [SLUICE_FABRIC_RAIL] = "rail", [SLUICE_FABRIC_SPREAD] = "spread",
};

static const char *const nic_planes[] = {
    [SLUICE_NIC_PLANES_UNSET] = "",
    [SLUICE_NIC_PLANES_ANY] = "any",
    [SLUICE_NIC_PLANES_ONE] = "one",
    [SLUICE_NIC_PLANES_SPREAD] = "spread",
};

static bool set_nic_planes(struct sluice_options *options, const char *value)
{
    for (size_t i = SLUICE_NIC_PLANES_ANY; i < sizeof nic_planes / sizeof nic_planes[0]; i++)
        if (strcmp(value, nic_planes[i]) == 0) {
            options->nic_planes = (enum sluice_nic_planes)i;
            return true;
        }
    return false;
}

static void write_nic_planes(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%s", nic_planes[options->nic_planes]);
}

/* A time as --switches takes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. */
static bool parse_time(const char *text, uint32_t *seconds)
{
    static const uint32_t units[][3] = {{60, 0, 0}, {60, 1, 0}, {3600, 60, 1}};
    uint64_t parts[3] = {0}, days = 0, sum;
    size_t count = 0;
    bool has_days = false;
    for (;; text++) {
        if (count == 3 || !parse_digits(&text, SLUICE_FABRIC_MOST_S, &parts[count]))
            return false;
        if (*text == '-' && count == 0 && !has_days) {
            days = parts[0];
            has_days = true;
            continue;
        }
        count++;
        if (*text != ':')
            break;
    }
    if (*text)
        return false;
    const uint32_t *unit = has_days ? units[2] : units[count - 1];
    sum = days * 86400 + parts[0] * unit[0] + parts[1] * unit[1] + parts[2] * unit[2];
    *seconds = (uint32_t)sum;
    return sum <= SLUICE_FABRIC_MOST_S;
}

static bool set_fabric(struct sluice_options *options, const char *value)
{
    const char *at = strchr(value, '@');
    size_t length = at ? (size_t)(at - value) : strlen(value);
    options->fabric_wait_s = SLUICE_FABRIC_NO_TIME;
    for (size_t i = SLUICE_FABRIC_ANY; i < sizeof fabrics / sizeof fabrics[0]; i++)
        if (strlen(fabrics[i]) == length && strncmp(value, fabrics[i], length) == 0) {
            options->fabric = (enum sluice_fabric)i;
            const bool waits = i == SLUICE_FABRIC_BLOCK || i == SLUICE_FABRIC_RAIL;
            return !at || (waits && parse_time(at + 1, &options->fabric_wait_s));
        }
    return false;
}

static void write_fabric(const struct sluice_options *options, char *value, size_t size)
{
    const uint32_t wait_s = options->fabric_wait_s;
    int length = snprintf(value, size, "%s", fabrics[options->fabric]);
    if (wait_s != SLUICE_FABRIC_NO_TIME && (size_t)length < size)
        snprintf(value + length, size - (size_t)length, "@%" PRIu32 ":%02" PRIu32, wait_s / 60, wait_s % 60);
}

static bool set_segment(struct sluice_options *options, const char *value)
{
    return parse_number(value, 1, SLUICE_SEGMENT_MAX, &options->segment);
}

static void write_segment(const struct sluice_options *options, char *value, size_t size)
{
    snprintf(value, size, "%" PRIu32, options->segment);
}

/* Of the name that `text` begins with; 0: none, or one that is too long. */
static size_t role_name_length(const char *text)
{
    size_t length = 0;
    while (length <= SLUICE_GPU_ROLE_NAME_MAX && is_name_character(text[length]) && text[length] != '-' &&
           text[length] != '.')
        length++;
    return length > SLUICE_GPU_ROLE_NAME_MAX || is_digit(text[0]) ? 0 : length;
}

bool sluice_is_role_name(const char *text)
{
    size_t length = role_name_length(text);
    return length && !text[length];
}

static bool has_role(const struct sluice_options *options, const char *name)
{
    for (uint32_t i = 0; i < options->gpu_role_count; i++)
        if (strcmp(options->gpu_roles[i].name, name) == 0)
            return true;
    return false;
}

static bool set_gpu_role(struct sluice_options *options, const char *value)
{
    uint64_t gpus, all = 0;
    options->gpu_role_count = 0;
    for (bool more = true; more; value++) {
        struct sluice_gpu_role role = {.name = ""};
        const size_t length = role_name_length(value);
        if (!length || value[length] != ':' || options->gpu_role_count == SLUICE_GPU_ROLES_MAX)
            return false;
        memcpy(role.name, value, length);
        value += length + 1;
        if (!parse_digits(&value, SLUICE_GPU_ROLE_GPUS_MAX, &gpus) || !gpus || has_role(options, role.name))
            return false;
        role.gpus = (uint32_t)gpus;
        options->gpu_roles[options->gpu_role_count++] = role;
        all += gpus;
        if (*value && *value != ',')
            return false;
        more = *value == ',';
    }
    return all <= SLUICE_GPU_ROLE_GPUS_MAX;
}

static void write_gpu_role(const struct sluice_options *options, char *value, size_t size)
{
    size_t length = 0;
    value[0] = '\0';
    for (uint32_t i = 0; i < options->gpu_role_count && length < size; i++)
        length += (size_t)snprintf(value + length, size - length, "%s%s:%" PRIu32, i ? "," : "",
                                   options->gpu_roles[i].name, options->gpu_roles[i].gpus);
}

bool sluice_checkpoint_words(const struct sluice_options *options, char *text, size_t size)
{
    char interval[16];
    int length;
    if (options->checkpoint == SLUICE_CHECKPOINT_AUTO)
        return false;
    if (options->checkpoint_s)
        write_checkpoint_interval(options, interval, sizeof interval);
    else
        write_checkpoint(options, interval, sizeof interval);
    length = snprintf(text, size, "sluice:checkpoint=%s", interval);
    return (size_t)length < size;
}

static const struct {
    const char *name;
    bool (*set)(struct sluice_options *options, const char *value);
    void (*write)(const struct sluice_options *options, char *value, size_t size);
    const char *expected;
} known[] = {
    {"gpu-mem", set_gpu_mem, write_gpu_mem, "memory of each GPU, 1M to 16T: a number with M, G or T, e.g. 10G"},
    {"gpu-share", set_gpu_share, write_gpu_share, "percent of each GPU, 1 to 100, e.g. 50"},
    {"gpu-affinity", set_gpu_affinity, write_gpu_affinity, "link, numa or none"},
    {"gpu-spread", set_gpu_spread, write_gpu_spread, "no value"},
    {"gang", set_gang, write_gang,
     "NAME:COUNT: a name of at most 64 letters, digits, '.', '_', '-', and 1 to 256 jobs, e.g. train:4"},
    {"gpu-power", set_gpu_power, write_gpu_power, "watts of each GPU, 1 to 100000, e.g. 300W"},
    {"gpu-profile", set_gpu_profile, write_gpu_profile, "no value, or seconds of each step, 1 to 86400, e.g. 30"},
    {"checkpoint", set_checkpoint, write_checkpoint, "app, system, no or auto"},
    {"checkpoint-interval", set_checkpoint_interval, write_checkpoint_interval,
     "a time of 60s to 30d, e.g. 20m, or daly"},
    {"nics-per-gpu", set_nics_per_gpu, write_nics_per_gpu, "RDMA interfaces with each GPU, 1 to 32, e.g. 1"},
    {"fabric", set_fabric, write_fabric, "block, rail, spread or any; block and rail with @TIME, e.g. block@30:00"},
    {"segment", set_segment, write_segment, "nodes of each segment, 1 to 65533, e.g. 4"},
    {"gpu-role", set_gpu_role, write_gpu_role,
     "NAME:COUNT[,...]: up to 8 names, each once, of at most 16 letters, digits and '_', and 4096 GPUs in all, e.g. "
     "prefill:4,decode:4"},
    {"nic-planes", set_nic_planes, write_nic_planes, "one, spread or any"},
};

enum { KNOWN = sizeof known / sizeof known[0] };

const char *sluice_option_name(size_t index)
{
    return index < KNOWN ? known[index].name : NULL;
}

bool sluice_option_set(struct sluice_options *options, const char *name, const char *value, char *why, size_t why_size)
{
    char text[SHOWN_MAX + 1];
    for (size_t i = 0; i < KNOWN; i++) {
        if (strcmp(name, known[i].name) != 0)
            continue;
        struct sluice_options changed = *options;
        if (known[i].set(&changed, value ? value : "")) {
            *options = changed;
            return true;
        }
        snprintf(why, why_size, "--%s=%s is not understood; write %s", name, shown(value, text), known[i].expected);
        return false;
    }
    snprintf(why, why_size, "--%s is not an option of Sluice", shown(name, text));
    return false;
}

static bool starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

/* The option of a variable "gpu_mem=...", KNOWN when there is none; `*value` is what follows. */
static size_t find_variable(const char *variable, const char **value)
{
    for (size_t i = 0; i < KNOWN; i++) {
        const char *name = known[i].name, *at = variable;
        while (*name && (*at == *name || (*at == '_' && *name == '-')))
            name++, at++;
        if (*name == '\0' && *at == '=') {
            *value = at + 1;
            return i;
        }
    }
    return KNOWN;
}

bool sluice_options_from_env(struct sluice_options *options, char *const *env, size_t count, char *why, size_t why_size)
{
    bool seen[KNOWN] = {false};
    char text[SHOWN_MAX + 1];
    size_t bytes = 0;
    memset(options, 0, sizeof *options);
    if (count > SLUICE_SPANK_ENV_MOST) {
        snprintf(why, why_size, "the job has more than %d options of SPANK plugins", SLUICE_SPANK_ENV_MOST);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if (!env[i])
            continue;
        bytes += strlen(env[i]) + 1;
        if (bytes > SLUICE_SPANK_ENV_MAX) {
            snprintf(why, why_size, "the options of the job's SPANK plugins are larger than %d KiB in all",
                     SLUICE_SPANK_ENV_MAX / 1024);
            return false;
        }
        if (starts_with(env[i], GUISE SLUICE_SPANK_ENV_PREFIX) || starts_with(env[i], GUISE "SLUICE_")) {
            snprintf(why, why_size, "%s: srun, sbatch and salloc do not send an option like this", shown(env[i], text));
            return false;
        }
        if (!starts_with(env[i], SLUICE_SPANK_ENV_PREFIX))
            continue;
        const char *value;
        size_t option = find_variable(env[i] + prefix, &value);
        if (option == KNOWN) {
            snprintf(why, why_size, "%s: not an option of this Sluice; the login node may have a newer version",
                     shown(env[i] + prefix, text));
            return false;
        }
        if (seen[option]) {
            snprintf(why, why_size, "--%s was submitted twice", known[option].name);
            return false;
        }
        seen[option] = true;
        if (!sluice_option_set(options, known[option].name, value, why, why_size))
            return false;
    }
    return true;
}

bool sluice_option_canonical(const struct sluice_options *options, const char *variable, char *text, size_t size)
{
    const char *value;
    if (!starts_with(variable, SLUICE_SPANK_ENV_PREFIX))
        return false;
    size_t option = find_variable(variable + prefix, &value);
    if (option == KNOWN)
        return false;
    size_t length = (size_t)snprintf(text, size, "%s%s=", SLUICE_SPANK_ENV_PREFIX, known[option].name);
    if (length >= size)
        return false;
    for (char *at = text + prefix; *at; at++)
        *at = *at == '-' ? '_' : *at;
    known[option].write(options, text + length, size - length);
    return true;
}
