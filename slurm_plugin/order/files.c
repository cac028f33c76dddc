/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Files of the order: what it keeps over a restart, and the table as text. */
#include "order/order_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rules/rules.h"
#include "runtime/runtime.h"

enum {
    STATE_VERSION = 1,
    MAX_STATE_BYTES = 64 * 1024 * 1024,
    MAX_ACCOUNT = 256,
};

/* A file that is written next to `path` and replaces it when it is complete. */
struct new_file {
    FILE *file;
    const char *path;
    char temporary[4096];
    uint32_t crc; /* of the lines so far, as sluice_crc32 would have it */
};

/* Of a line, mixed into the sum of the lines before it. */
static uint32_t add_line(uint32_t sum, const char *line, size_t length)
{
    return sluice_crc32(line, length) + ((sum << 5) | (sum >> 27));
}

static void put_line(struct new_file *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put_line(struct new_file *to, const char *format, ...)
{
    char line[2048];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof line, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= sizeof line)
        return;
    to->crc = add_line(to->crc, line, (size_t)length);
    fputs(line, to->file);
    fputc('\n', to->file);
}

static enum sluice_error open_new(struct new_file *to, const char *path, struct sluice_error_text *text)
{
    *to = (struct new_file){.path = path};
    int length = snprintf(to->temporary, sizeof to->temporary, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof to->temporary)
        return sluice_fail_with(text, SLUICE_ERROR_RANGE, "%s: path too long", path);
    int descriptor = open(to->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    to->file = descriptor >= 0 ? fdopen(descriptor, "w") : NULL;
    if (to->file)
        return SLUICE_OK;
    int reason = errno;
    if (descriptor >= 0)
        close(descriptor);
    return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", to->temporary, strerror(reason));
}

static enum sluice_error close_new(struct new_file *to, struct sluice_error_text *text)
{
    fprintf(to->file, "end %08" PRIx32 "\n", to->crc);
    bool good = !ferror(to->file) && fflush(to->file) == 0 && fsync(fileno(to->file)) == 0;
    int reason = errno;
    if (fclose(to->file) != 0 && good) {
        reason = errno;
        good = false;
    }
    if (good && rename(to->temporary, to->path) == 0)
        return SLUICE_OK;
    if (good)
        reason = errno;
    unlink(to->temporary);
    return sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", to->path, strerror(reason));
}

enum sluice_error sluice_ranker_save(const struct sluice_ranker *ranker, const char *path,
                                     struct sluice_error_text *text)
{
    uint64_t *direct = sluice_tenants_direct_usage(ranker, ranker->charged_to_s);
    if (!direct)
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "order: out of memory for %u tenants",
                                ranker->tenant_count);
    struct new_file to;
    enum sluice_error error = open_new(&to, path, text);
    if (error == SLUICE_OK) {
        put_line(&to, "sluice-order %d", STATE_VERSION);
        put_line(&to, "charged %" PRId64, ranker->charged_to_s);
        for (uint32_t i = 0; i < ranker->tenant_count; i++) {
            if (direct[i])
                put_line(&to, "usage %" PRIu64 " %s", direct[i], ranker->tenants[i].account);
        }
        uint64_t first = ranker->run_count > SLUICE_RANKER_MAX_RUNS ? ranker->run_count - SLUICE_RANKER_MAX_RUNS : 0;
        for (uint64_t i = first; i < ranker->run_count; i++) {
            const struct run *run = &ranker->runs[i % SLUICE_RANKER_MAX_RUNS];
            put_line(&to, "run %" PRIu32 " %" PRIu32 " %016" PRIx64 " %" PRId64, run->uid, run->gpus, run->name_hash,
                     run->run_s);
        }
        error = close_new(&to, text);
    }
    free(direct);
    return error;
}

/* A decimal number at *from, which is moved behind it and one following blank; false when there is none or it is
 * larger than `most`. */
static bool take_number(const char **from, uint64_t most, uint64_t *number)
{
    uint64_t value = 0;
    const char *at = *from;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(value, UINT64_C(10), &value) ||
            __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value) || value > most)
            return false;
    }
    if (*at == ' ')
        at++;
    *number = value;
    *from = at;
    return true;
}

static bool take_hash(const char **from, uint64_t *hash)
{
    uint64_t value = 0;
    for (int i = 0; i < 16; i++) {
        char digit = (*from)[i];
        int number = digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
        if (number < 0)
            return false;
        value = value << 4 | (uint64_t)number;
    }
    *from += 16;
    if (**from == ' ')
        ++*from;
    *hash = value;
    return true;
}

/* The content of a state file, before any of it is used. */
struct state {
    int64_t charged_to_s;
    struct {
        uint64_t usage;
        const char *account;
    } *usages;
    struct run *runs;
    uint32_t usage_count, run_count;
};

static bool read_state_line(struct state *state, const char *line)
{
    uint64_t number[3], hash;
    if (strncmp(line, "charged ", 8) == 0) {
        line += 8;
        if (!take_number(&line, INT64_MAX, &number[0]) || *line)
            return false;
        state->charged_to_s = (int64_t)number[0];
        return true;
    }
    if (strncmp(line, "usage ", 6) == 0) {
        line += 6;
        if (!take_number(&line, UINT64_MAX, &number[0]) || !*line || strlen(line) > MAX_ACCOUNT)
            return false;
        state->usages[state->usage_count].usage = number[0];
        state->usages[state->usage_count++].account = line;
        return true;
    }
    if (strncmp(line, "run ", 4) != 0)
        return false;
    line += 4;
    if (!take_number(&line, UINT32_MAX, &number[0]) || !take_number(&line, UINT32_MAX, &number[1]) ||
        !take_hash(&line, &hash) || !take_number(&line, INT64_MAX, &number[2]) || *line)
        return false;
    state->runs[state->run_count++] = (struct run){
        .uid = (uint32_t)number[0], .gpus = (uint32_t)number[1], .name_hash = hash, .run_s = (int64_t)number[2]};
    return true;
}

/* Cuts `data` into lines. The caller made room for as many entries as there are lines. */
static enum sluice_error read_state(struct state *state, char *data, const char *path, struct sluice_error_text *text)
{
    uint32_t sum = 0, line_number = 0;
    for (char *line = data, *next; *line; line = next) {
        char *end = strchr(line, '\n');
        line_number++;
        if (!end)
            break;
        *end = '\0';
        next = end + 1;
        char wanted[32];
        snprintf(wanted, sizeof wanted, "end %08" PRIx32, sum);
        if (strcmp(line, wanted) == 0 && !*next)
            return SLUICE_OK;
        sum = add_line(sum, line, (size_t)(end - line));
        if (line_number == 1) {
            char first[32];
            snprintf(first, sizeof first, "sluice-order %d", STATE_VERSION);
            if (strcmp(line, first) == 0)
                continue;
            if (strncmp(line, "sluice-order ", 13) == 0)
                return sluice_fail_with(text, SLUICE_ERROR_VERSION, "%s: \"%.40s\": this Sluice writes version %d",
                                        path, line, STATE_VERSION);
            break;
        }
        if (!read_state_line(state, line))
            break;
    }
    return sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "%s:%u: damaged or cut off; usage starts from zero", path,
                            line_number);
}

/* The whole file, NUL-terminated; NULL with `error` set. */
static char *read_file(const char *path, size_t *length, enum sluice_error *error, struct sluice_error_text *text)
{
    *error = SLUICE_OK;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0 && errno == ENOENT)
        return NULL;
    struct stat status;
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        *error = sluice_fail_with(text, SLUICE_ERROR_SYSTEM, "%s: %s", path, strerror(errno));
        if (descriptor >= 0)
            close(descriptor);
        return NULL;
    }
    if (!S_ISREG(status.st_mode) || status.st_size > MAX_STATE_BYTES) {
        *error =
            sluice_fail_with(text, SLUICE_ERROR_CORRUPT, "%s: no file, or larger than %d bytes", path, MAX_STATE_BYTES);
        close(descriptor);
        return NULL;
    }
    char *data = malloc((size_t)status.st_size + 1);
    size_t have = 0;
    while (data && have < (size_t)status.st_size) {
        ssize_t got = read(descriptor, data + have, (size_t)status.st_size - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        have += (size_t)got;
    }
    close(descriptor);
    if (!data) {
        *error = sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "%s: out of memory", path);
        return NULL;
    }
    data[have] = '\0';
    *length = strlen(data);
    return data;
}

static void believe(struct sluice_ranker *ranker, const struct state *state)
{
    ranker->charged_to_s = state->charged_to_s;
    ranker->usage_known = true;
    for (uint32_t i = 0; i < state->usage_count; i++)
        sluice_tenant_charge(ranker, sluice_tenant_of(ranker, state->usages[i].account), state->usages[i].usage,
                             state->charged_to_s);
    for (uint32_t i = 0; i < state->run_count; i++)
        sluice_ranker_learn(ranker, &state->runs[i]);
}

enum sluice_error sluice_ranker_load(struct sluice_ranker *ranker, const char *path, struct sluice_error_text *text)
{
    enum sluice_error error;
    size_t length = 0;
    char *data = read_file(path, &length, &error, text);
    if (!data)
        return error;
    uint32_t lines = 0;
    for (const char *at = data; (at = strchr(at, '\n')); at++)
        lines++;
    struct state state = {0};
    state.usages = calloc((size_t)lines + 1, sizeof *state.usages);
    state.runs = calloc((size_t)lines + 1, sizeof *state.runs);
    error = state.usages && state.runs ? read_state(&state, data, path, text)
                                       : sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "%s: out of memory", path);
    if (error == SLUICE_OK)
        believe(ranker, &state);
    free(state.usages);
    free(state.runs);
    free(data);
    return error;
}

enum sluice_error sluice_ranks_write(const struct sluice_ranks *ranks, const char *path, struct sluice_error_text *text)
{
    struct new_file to;
    enum sluice_error error = open_new(&to, path, text);
    if (error != SLUICE_OK)
        return error;
    put_line(&to, "sluice-ranks 1");
    put_line(&to, "taken %" PRId64, ranks->taken_s);
    const struct sluice_order_policy *policy = &ranks->policy;
    put_line(&to,
             "policy %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRId64
             " %" PRId64 " %" PRIu32 " %" PRId64,
             policy->weight[0], policy->weight[1], policy->weight[2], policy->weight[3], policy->weight[4],
             policy->weight[5], policy->weight[6], policy->age_full_s, policy->laxity_horizon_s, policy->size_full_gpus,
             policy->starvation_s);
    for (uint32_t i = 0; i < ranks->tenant_count; i++)
        put_line(&to, "tenant %" PRIu32 " %" PRIu32 " %" PRIu64 " %" PRIu32 " %" PRIu32 " %s", ranks->tenants[i].shares,
                 ranks->tenants[i].factor, ranks->tenants[i].usage, ranks->tenants[i].priority, ranks->tiers[i],
                 ranks->tenants[i].account);
    for (uint32_t i = 0; i < ranks->count; i++) {
        const struct sluice_rank *rank = &ranks->ranks[i];
        const int64_t *term = rank->terms.term;
        const int32_t *slurm = rank->slurm_term;
        put_line(&to,
                 "job %" PRIu32 " %" PRId32 " %" PRIu32 " %" PRIu32 " %" PRIu32 " %" PRId64 " %d %d %" PRId64
                 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId32
                 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32 " %" PRId32,
                 rank->job_id, rank->site, rank->place, rank->tenant, rank->gpus, rank->remaining_s,
                 (int)rank->terms.deadline, rank->terms.starving, rank->terms.laxity_s, term[0], term[1], term[2],
                 term[3], term[4], term[5], term[6], slurm[0], slurm[1], slurm[2], slurm[3], slurm[4], slurm[5],
                 slurm[6], slurm[7]);
        if (rank->operators)
            put_line(&to, "operator %" PRIu32 " %" PRId64, rank->job_id,
                     (int64_t)rank->site_was - (int64_t)SLUICE_SITE_NONE);
    }
    return close_new(&to, text);
}

enum sluice_error sluice_site_factors_load(struct sluice_site_factors *factors, const char *path,
                                           struct sluice_error_text *text)
{
    enum sluice_error error;
    size_t length = 0;
    char *data = read_file(path, &length, &error, text);
    for (const char *line = data; line; line = (line = strchr(line, '\n')) ? line + 1 : NULL) {
        uint32_t job;
        int32_t factor;
        if (strncmp(line, "operator ", 9) == 0 &&
            sscanf(line, "operator %" SCNu32 " %" SCNd32 "\n", &job, &factor) == 2 && job)
            sluice_site_factors_enter_loaded(factors, job, SLUICE_SITE_NONE + (uint32_t)factor);
    }
    free(data);
    return error;
}
