/* SPDX-License-Identifier: Apache-2.0 */
#include "controller/status.h"

#include "controller/log.h"
#include "controller/settings.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PLUGINS = 16, PLUGIN_NAME = 24 };

static struct {
    pthread_mutex_t lock;
    char path[4096];
    char host[256];
    char slurm[32];
    char *written; /* what is in the file */
    ino_t inode;   /* the file */
    bool complained;
    time_t started;
    struct {
        char type[PLUGIN_NAME];
        unsigned uses;
    } plugins[PLUGINS];
} own = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    pthread_mutex_t lock;
    char names[SLUICE_STATUS_COUNTERS][SLUICE_STATUS_NAME];
    _Atomic uint64_t values[SLUICE_STATUS_COUNTERS + 1];
    unsigned count;
    bool full; /* somebody was told that there is no room */
} counters = {.lock = PTHREAD_MUTEX_INITIALIZER};

_Atomic uint64_t *sluice_status_counter(const char *name)
{
    pthread_mutex_lock(&counters.lock);
    unsigned at = 0;
    while (at < counters.count && strcmp(counters.names[at], name) != 0)
        at++;
    if (at == counters.count && at < SLUICE_STATUS_COUNTERS) {
        snprintf(counters.names[at], SLUICE_STATUS_NAME, "%s", name);
        counters.count++;
    }
    bool first = at == SLUICE_STATUS_COUNTERS && !counters.full;
    counters.full |= first;
    pthread_mutex_unlock(&counters.lock);
    if (first)
        sluice_log_error("sluice: no room for more than %d counters: %s, and what comes after it, is not shown",
                         SLUICE_STATUS_COUNTERS, name);
    return &counters.values[at];
}

void sluice_status_start(const char *folder, const char *slurm_version)
{
    pthread_mutex_lock(&own.lock);
    if (gethostname(own.host, sizeof(own.host) - 1) != 0 || strchr(own.host, '/'))
        snprintf(own.host, sizeof(own.host), "localhost");
    snprintf(own.path, sizeof(own.path), "%s/sluice.status.%s", folder, own.host);
    snprintf(own.slurm, sizeof(own.slurm), "%s", slurm_version);
    own.started = time(NULL);
    pthread_mutex_unlock(&own.lock);
}

void sluice_status_plugin(const char *type, bool loaded)
{
    pthread_mutex_lock(&own.lock);
    unsigned at = 0;
    while (at < PLUGINS && own.plugins[at].type[0] && strcmp(own.plugins[at].type, type) != 0)
        at++;
    if (at < PLUGINS) {
        snprintf(own.plugins[at].type, PLUGIN_NAME, "%s", type);
        own.plugins[at].uses += loaded ? 1U : -1U;
    }
    pthread_mutex_unlock(&own.lock);
}

static void put_string(FILE *to, const char *text)
{
    putc('"', to);
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte == '"' || byte == '\\')
            fprintf(to, "\\%c", byte);
        else if (byte < ' ' || byte > '~')
            fprintf(to, "\\u%04x", byte);
        else
            putc(byte, to);
    }
    putc('"', to);
}

static void put_field(FILE *to, const char *name, const char *text)
{
    fprintf(to, "\"%s\": ", name);
    put_string(to, text);
}

static void put_policy(FILE *to, const struct sluice_settings_state *state)
{
    if (!state->policy) {
        fprintf(to, " \"policy\": null,\n");
        return;
    }
    fprintf(to, " \"policy\": {");
    put_field(to, "source", state->source);
    fprintf(to, ", \"checksum\": \"%08" PRIx32 "\", \"generated\": %" PRId64 ", \"loaded\": %" PRId64, state->checksum,
            state->generated_s, (int64_t)state->policy_loaded);
    fprintf(to, ", \"tenants\": %" PRIu32 ", \"classes\": %" PRIu32 ", \"warnings\": %" PRIu32 ", ", state->tenants,
            state->classes, state->warnings);
    put_field(to, "first_warning", state->warning);
    fprintf(to, "},\n");
}

static void put_all(FILE *to)
{
    struct sluice_settings_state state;
    sluice_settings_describe(&state);
    fprintf(to, "{\"schema_version\": 1,\n ");
    put_field(to, "host", own.host);
    fprintf(to, ", \"pid\": %ld, \"started\": %" PRId64 ", ", (long)getpid(), (int64_t)own.started);
    put_field(to, "slurm_version", own.slurm);
    fprintf(to, ",\n \"plugins\": [");
    const char *comma = "";
    for (unsigned i = 0; i < PLUGINS; i++)
        if (own.plugins[i].uses) {
            fputs(comma, to);
            put_string(to, own.plugins[i].type);
            comma = ", ";
        }
    fprintf(to, "],\n ");
    put_field(to, "level", sluice_level_name(state.level));
    fprintf(to, ", ");
    put_field(to, "level_asked", sluice_level_name(state.asked));
    fprintf(to, ", \"level_loaded\": %" PRId64 ", ", (int64_t)state.level_loaded);
    put_field(to, "level_error", state.level_error);
    fprintf(to, ",\n");
    put_policy(to, &state);
    fprintf(to, " ");
    put_field(to, "policy_error", state.policy_error);
    fprintf(to, ",\n \"counters\": {");
    pthread_mutex_lock(&counters.lock);
    for (unsigned i = 0; i < counters.count; i++)
        fprintf(to, "%s\n  \"%s\": %" PRIu64, i ? "," : "", counters.names[i], atomic_load(&counters.values[i]));
    pthread_mutex_unlock(&counters.lock);
    fprintf(to, "}}\n");
}

static bool write_file(const char *text, size_t length)
{
    char fresh[sizeof(own.path) + 8];
    snprintf(fresh, sizeof(fresh), "%s.new", own.path);
    int file = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return false;
    struct stat facts;
    bool good = write(file, text, length) == (ssize_t)length && fstat(file, &facts) == 0;
    if (good)
        own.inode = facts.st_ino;
    good = close(file) == 0 && good && rename(fresh, own.path) == 0;
    if (!good)
        unlink(fresh);
    return good;
}

/* Whether the file holds what we wrote: another slurmctld, started while we end, may have written its own there. */
static bool is_ours(void)
{
    struct stat facts;
    return own.written && lstat(own.path, &facts) == 0 && facts.st_ino == own.inode;
}

void sluice_status_write(void)
{
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return;
    pthread_mutex_lock(&own.lock);
    put_all(to);
    bool whole = fclose(to) == 0;
    if (whole && own.path[0] && (!is_ours() || strcmp(own.written, text) != 0)) {
        bool good = write_file(text, length);
        if (!good && !own.complained)
            sluice_log_error("sluice: %s: cannot be written: %s", own.path, strerror(errno));
        own.complained = !good;
        if (good) {
            char *before = own.written;
            own.written = text;
            text = before;
        }
    }
    pthread_mutex_unlock(&own.lock);
    free(text);
}

void sluice_status_stop(void)
{
    pthread_mutex_lock(&own.lock);
    if (own.path[0] && is_ours())
        unlink(own.path);
    own.path[0] = '\0';
    free(own.written);
    own.written = NULL;
    pthread_mutex_unlock(&own.lock);
}
