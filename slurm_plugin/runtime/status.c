/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/status.h"

#include "runtime/log.h"
#include "runtime/settings.h"

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
    bool failure_logged;
    time_t started;
    struct {
        char type[PLUGIN_NAME];
        unsigned uses;
    } plugins[PLUGINS];
} status = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct {
    pthread_mutex_t lock;
    char names[SLUICE_STATUS_COUNTERS][SLUICE_STATUS_NAME];
    _Atomic uint64_t values[SLUICE_STATUS_COUNTERS + 1];
    unsigned count;
    bool full; /* it was logged that there is no room */
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
        sluice_log_error("sluice: no room for more than %d counters: %s, and those after it, are not shown",
                         SLUICE_STATUS_COUNTERS, name);
    return &counters.values[at];
}

void sluice_status_start(const char *folder, const char *slurm_version)
{
    pthread_mutex_lock(&status.lock);
    if (gethostname(status.host, sizeof(status.host) - 1) != 0 || strchr(status.host, '/'))
        snprintf(status.host, sizeof(status.host), "localhost");
    snprintf(status.path, sizeof(status.path), "%s/sluice.status.%s", folder, status.host);
    snprintf(status.slurm, sizeof(status.slurm), "%s", slurm_version);
    status.started = time(NULL);
    pthread_mutex_unlock(&status.lock);
}

void sluice_status_plugin(const char *type, bool loaded)
{
    pthread_mutex_lock(&status.lock);
    unsigned at = 0;
    while (at < PLUGINS && status.plugins[at].type[0] && strcmp(status.plugins[at].type, type) != 0)
        at++;
    if (at < PLUGINS) {
        snprintf(status.plugins[at].type, PLUGIN_NAME, "%s", type);
        status.plugins[at].uses += loaded ? 1U : -1U;
    }
    pthread_mutex_unlock(&status.lock);
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
    put_field(to, "host", status.host);
    fprintf(to, ", \"pid\": %ld, \"started\": %" PRId64 ", ", (long)getpid(), (int64_t)status.started);
    put_field(to, "slurm_version", status.slurm);
    fprintf(to, ",\n \"plugins\": [");
    const char *comma = "";
    for (unsigned i = 0; i < PLUGINS; i++)
        if (status.plugins[i].uses) {
            fputs(comma, to);
            put_string(to, status.plugins[i].type);
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
    char fresh[sizeof(status.path) + 8];
    snprintf(fresh, sizeof(fresh), "%s.new", status.path);
    int file = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return false;
    struct stat facts;
    bool good = write(file, text, length) == (ssize_t)length && fstat(file, &facts) == 0;
    if (good)
        status.inode = facts.st_ino;
    good = close(file) == 0 && good && rename(fresh, status.path) == 0;
    if (!good)
        unlink(fresh);
    return good;
}

/* Whether the file holds what we wrote: another slurmctld, started while this one ends, may have written its own. */
static bool is_ours(void)
{
    struct stat facts;
    return status.written && lstat(status.path, &facts) == 0 && facts.st_ino == status.inode;
}

void sluice_status_write(void)
{
    char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return;
    pthread_mutex_lock(&status.lock);
    put_all(to);
    bool whole = fclose(to) == 0;
    if (whole && status.path[0] && (!is_ours() || strcmp(status.written, text) != 0)) {
        bool good = write_file(text, length);
        if (!good && !status.failure_logged)
            sluice_log_error("sluice: %s: cannot be written: %s", status.path, strerror(errno));
        status.failure_logged = !good;
        if (good) {
            char *before = status.written;
            status.written = text;
            text = before;
        }
    }
    pthread_mutex_unlock(&status.lock);
    free(text);
}

void sluice_status_stop(void)
{
    pthread_mutex_lock(&status.lock);
    if (status.path[0] && is_ours())
        unlink(status.path);
    status.path[0] = '\0';
    free(status.written);
    status.written = NULL;
    pthread_mutex_unlock(&status.lock);
}
