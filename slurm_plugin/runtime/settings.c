/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/settings.h"

#include "runtime/log.h"
#include "runtime/status.h"
#include "runtime/ticker.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PERIOD_MS = 1000, LEVEL_BYTES = 64 };

static const char *const level_names[] = {"off", "admit", "shadow", "place"};
enum { LEVELS = sizeof(level_names) / sizeof(*level_names) };

/* Rules live as long as a snapshot that shows them. */
struct shared_rules {
    struct sluice_rules *rules;
    atomic_uint users;
};

struct snapshot {
    struct sluice_settings shown; /* first: the two have one address */
    struct shared_rules *rules;
    atomic_uint users;
};

/* What a file was when it was last looked at. */
struct seen {
    bool there;
    struct stat facts;
};

static struct {
    pthread_mutex_t reload; /* one at a time; taken before `lock` */
    pthread_mutex_t lock;   /* guards `current`, `state` and `tick` */
    struct snapshot *current;
    struct sluice_settings_state state;
    char folder[4096];
    struct seen level_seen, policy_seen;
    struct sluice_tick *tick;
} in_force = {.reload = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic enum sluice_level level_now = SLUICE_LEVEL_OFF;

const char *sluice_level_name(enum sluice_level level)
{
    return level_names[level];
}

bool sluice_level_by_name(const char *name, enum sluice_level *level)
{
    for (unsigned i = 0; i < LEVELS; i++)
        if (strcmp(level_names[i], name) == 0) {
            *level = (enum sluice_level)i;
            return true;
        }
    return false;
}

enum sluice_level sluice_settings_level(void)
{
    return atomic_load_explicit(&level_now, memory_order_acquire);
}

/* ---- snapshots ---- */

static struct shared_rules *share_rules(struct sluice_rules *rules)
{
    struct shared_rules *shared = malloc(sizeof(*shared));
    if (shared) {
        shared->rules = rules;
        atomic_init(&shared->users, 1);
    }
    return shared;
}

static void drop_rules(struct shared_rules *shared)
{
    if (shared && atomic_fetch_sub(&shared->users, 1) == 1) {
        sluice_rules_free(shared->rules);
        free(shared);
    }
}

static void drop_snapshot(struct snapshot *snapshot)
{
    if (snapshot && atomic_fetch_sub(&snapshot->users, 1) == 1) {
        drop_rules(snapshot->rules);
        free(snapshot);
    }
}

const struct sluice_settings *sluice_settings_acquire(void)
{
    pthread_mutex_lock(&in_force.lock);
    struct snapshot *current = in_force.current;
    if (current)
        atomic_fetch_add(&current->users, 1);
    pthread_mutex_unlock(&in_force.lock);
    return current ? &current->shown : NULL;
}

void sluice_settings_release(const struct sluice_settings *settings)
{
    drop_snapshot((struct snapshot *)settings);
}

/* Put level and rules in force; takes over one use of `rules`. Only under in_force.reload. */
static bool publish(enum sluice_level asked, struct shared_rules *rules)
{
    struct snapshot *fresh = calloc(1, sizeof(*fresh)), *before = in_force.current;
    if (!fresh) {
        drop_rules(rules);
        return false;
    }
    bool same_rules = before && before->rules == rules;
    fresh->rules = rules;
    atomic_init(&fresh->users, 1);
    fresh->shown = (struct sluice_settings){
        .asked = asked,
        .level = rules->rules->empty ? SLUICE_LEVEL_OFF : asked,
        .rules = rules->rules,
        .generation = before ? before->shown.generation + 1 : 1,
        .rules_generation = !before ? 1 : before->shown.rules_generation + !same_rules,
    };
    pthread_mutex_lock(&in_force.lock);
    in_force.current = fresh;
    pthread_mutex_unlock(&in_force.lock);
    enum sluice_level was = atomic_exchange(&level_now, fresh->shown.level);
    if (was != fresh->shown.level)
        sluice_log_info("sluice: level %s, was %s", level_names[fresh->shown.level], level_names[was]);
    drop_snapshot(before);
    return true;
}

static struct shared_rules *no_rules(void)
{
    static const char nothing[] = "sluice-policy 1.0\nchecksum = crc32:efdd568a\n";
    struct sluice_rules *rules;
    struct sluice_error_text text;
    if (sluice_rules_parse(nothing, sizeof(nothing) - 1, &rules, &text))
        return NULL;
    struct shared_rules *shared = share_rules(rules);
    if (!shared)
        sluice_rules_free(rules);
    return shared;
}

/* ---- files ---- */

static bool same_file(const struct seen *seen, const struct stat *facts, bool there)
{
    if (seen->there != there)
        return false;
    return !there || (seen->facts.st_mtim.tv_sec == facts->st_mtim.tv_sec &&
                      seen->facts.st_mtim.tv_nsec == facts->st_mtim.tv_nsec && seen->facts.st_ino == facts->st_ino &&
                      seen->facts.st_dev == facts->st_dev && seen->facts.st_size == facts->st_size);
}

/*
 * Read a whole file, if it has changed since the last call. Returns -1 when it is as it was, 0 when it was read or is
 * not there (*data NULL), else an errno. The data is the caller's.
 */
static int read_changed(const char *name, size_t most, struct seen *seen, char **data, size_t *length)
{
    char path[sizeof(in_force.folder) + 32];
    snprintf(path, sizeof(path), "%s/%s", in_force.folder, name);
    struct stat facts = {0};
    bool there = stat(path, &facts) == 0;
    if (!there && errno != ENOENT)
        return errno;
    if (same_file(seen, &facts, there))
        return -1;
    *data = NULL;
    *length = 0;
    int file = there ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (there && file < 0)
        return errno;
    if (there && (fstat(file, &facts) < 0 || !S_ISREG(facts.st_mode))) {
        close(file);
        return EINVAL;
    }
    int error = 0;
    if (there) {
        size_t size = (size_t)facts.st_size;
        *data = size <= most ? malloc(size + 1) : NULL;
        error = size > most ? EFBIG : *data ? 0 : ENOMEM;
        while (!error && *length < size) {
            ssize_t got = read(file, *data + *length, size - *length);
            if (got < 0 && errno != EINTR)
                error = errno;
            else if (got == 0)
                break;
            else if (got > 0)
                *length += (size_t)got;
        }
        if (*data)
            (*data)[*length] = '\0';
        close(file);
    }
    *seen = (struct seen){.there = there, .facts = facts};
    if (error) {
        free(*data);
        *data = NULL;
    }
    return error;
}

/* Remember why a file is not in force, and log it once. An empty text clears it. */
__attribute__((format(printf, 3, 4))) static void note(char *place, size_t size, const char *format, ...)
{
    char words[sizeof(in_force.state.policy_error)];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&in_force.lock);
    bool news = strcmp(words, place) != 0;
    snprintf(place, size, "%s", words);
    pthread_mutex_unlock(&in_force.lock);
    if (news && *words)
        sluice_log_error("sluice: %s", words);
}

#define NOTE(PLACE, ...) note(in_force.state.PLACE, sizeof(in_force.state.PLACE), __VA_ARGS__)

/* The level that the file asks for; false when there is nothing new, or nothing good. */
static bool read_level(enum sluice_level *asked)
{
    char *text;
    size_t length;
    int error = read_changed(SLUICE_LEVEL_FILE, LEVEL_BYTES, &in_force.level_seen, &text, &length);
    if (error < 0)
        return false;
    if (error) {
        NOTE(level_error, "%s/%s: %s; the level stays as it was", in_force.folder, SLUICE_LEVEL_FILE, strerror(error));
        return false;
    }
    enum sluice_level found = SLUICE_LEVEL_OFF;
    bool good = true;
    if (text) {
        char word[LEVEL_BYTES + 1] = "";
        good = strlen(text) == length && sscanf(text, " %64s", word) == 1;
        const char *rest = good ? strstr(text, word) + strlen(word) : "";
        good = good && rest[strspn(rest, " \t\r\n")] == '\0' && sluice_level_by_name(word, &found);
        if (!good)
            NOTE(level_error, "%s/%s: \"%.64s\" is not off, admit, shadow or place; the level stays as it was",
                 in_force.folder, SLUICE_LEVEL_FILE, word);
    }
    free(text);
    if (!good)
        return false;
    NOTE(level_error, "%s", "");
#ifdef SLUICE_ADMITS_ONLY
    if (found > SLUICE_LEVEL_ADMIT) { /* not off: limits that held before an upgrade of Slurm hold after it */
        NOTE(level_error, "%s/%s: \"%s\": the plugins for this Slurm only admit; the level is admit", in_force.folder,
             SLUICE_LEVEL_FILE, level_names[found]);
        found = SLUICE_LEVEL_ADMIT;
    }
#endif
    pthread_mutex_lock(&in_force.lock);
    in_force.state.level_loaded = time(NULL);
    pthread_mutex_unlock(&in_force.lock);
    *asked = found;
    return true;
}

/* The rules that the file holds, or none; NULL when there is nothing new, or nothing good. */
static struct shared_rules *read_rules(void)
{
    char *text;
    size_t length;
    int error = read_changed(SLUICE_POLICY_FILE, SLUICE_RULES_MAX_BYTES, &in_force.policy_seen, &text, &length);
    if (error < 0)
        return NULL;
    if (error) {
        NOTE(policy_error, "%s/%s: %s; the last good policy stays in force", in_force.folder, SLUICE_POLICY_FILE,
             strerror(error));
        return NULL;
    }
    struct shared_rules *shared = NULL;
    if (length == 0) {
        shared = no_rules();
    } else {
        struct sluice_rules *rules;
        struct sluice_error_text words;
        if (sluice_rules_parse(text, length, &rules, &words)) {
            NOTE(policy_error, "%s/%s: %s; the last good policy stays in force", in_force.folder, SLUICE_POLICY_FILE,
                 words.text);
            free(text);
            return NULL;
        }
        shared = share_rules(rules);
        if (!shared)
            sluice_rules_free(rules);
    }
    free(text);
    if (!shared) {
        NOTE(policy_error, "%s/%s: no memory; the last good policy stays in force", in_force.folder,
             SLUICE_POLICY_FILE);
        return NULL;
    }
    NOTE(policy_error, "%s", "");
    pthread_mutex_lock(&in_force.lock);
    in_force.state.policy_loaded = length ? time(NULL) : 0;
    pthread_mutex_unlock(&in_force.lock);
    return shared;
}

static void log_rules(const struct sluice_rules *rules)
{
    if (rules->empty) {
        sluice_log_info("sluice: no policy in force");
        return;
    }
    sluice_log_info("sluice: policy %08" PRIx32 " in force: %" PRIu32 " tenants, %" PRIu32 " classes", rules->checksum,
                    rules->tenant_count, rules->class_count);
    for (uint32_t i = 0; i < rules->warning_count && i < SLUICE_RULES_MAX_WARNINGS; i++)
        sluice_log_info("sluice: policy: %s", rules->warnings[i].text);
}

void sluice_settings_reload(void)
{
    pthread_mutex_lock(&in_force.reload);
    if (in_force.current) {
        enum sluice_level asked = in_force.current->shown.asked;
        bool changed = read_level(&asked) && asked != in_force.current->shown.asked;
        struct shared_rules *rules = read_rules();
        if (rules)
            log_rules(rules->rules);
        if (rules || changed) {
            if (!rules) {
                rules = in_force.current->rules;
                atomic_fetch_add(&rules->users, 1);
            }
            publish(asked, rules);
        }
    }
    pthread_mutex_unlock(&in_force.reload);
    sluice_status_write();
}

static void tick(void *unused)
{
    (void)unused;
    sluice_settings_reload();
}

void sluice_settings_wake(void)
{
    pthread_mutex_lock(&in_force.lock);
    if (in_force.tick)
        sluice_ticker_wake(in_force.tick);
    pthread_mutex_unlock(&in_force.lock);
}

const char *sluice_settings_folder(void)
{
    return in_force.folder;
}

bool sluice_settings_start(const char *folder)
{
    struct shared_rules *rules = no_rules();
    if (!rules)
        return false;
    pthread_mutex_lock(&in_force.reload);
    snprintf(in_force.folder, sizeof(in_force.folder), "%s", folder);
    in_force.level_seen = in_force.policy_seen = (struct seen){0};
    in_force.state = (struct sluice_settings_state){0};
    bool good = publish(SLUICE_LEVEL_OFF, rules);
    pthread_mutex_unlock(&in_force.reload);
    if (!good)
        return false;
    sluice_settings_reload();
    struct sluice_tick *added = sluice_ticker_add("settings", PERIOD_MS, tick, NULL);
    pthread_mutex_lock(&in_force.lock);
    in_force.tick = added;
    pthread_mutex_unlock(&in_force.lock);
    if (!added)
        sluice_log_error("sluice: cannot start a thread: changes of level and policy need a restart of slurmctld");
    return true;
}

void sluice_settings_stop(void)
{
    pthread_mutex_lock(&in_force.lock);
    struct sluice_tick *removed = in_force.tick;
    in_force.tick = NULL;
    pthread_mutex_unlock(&in_force.lock);
    sluice_ticker_remove(removed);
    pthread_mutex_lock(&in_force.reload);
    atomic_store(&level_now, SLUICE_LEVEL_OFF);
    pthread_mutex_lock(&in_force.lock);
    struct snapshot *last = in_force.current;
    in_force.current = NULL;
    pthread_mutex_unlock(&in_force.lock);
    drop_snapshot(last);
    pthread_mutex_unlock(&in_force.reload);
}

void sluice_settings_describe(struct sluice_settings_state *state)
{
    pthread_mutex_lock(&in_force.lock);
    *state = in_force.state;
    if (in_force.current) {
        const struct sluice_settings *shown = &in_force.current->shown;
        const struct sluice_rules *rules = shown->rules;
        state->level = shown->level;
        state->asked = shown->asked;
        state->policy = !rules->empty;
        state->checksum = rules->checksum;
        state->tenants = rules->tenant_count;
        state->classes = rules->class_count;
        state->warnings = rules->warning_count;
        state->generated_s = rules->generated_s;
        state->generation = shown->generation;
        snprintf(state->source, sizeof(state->source), "%s", rules->source);
        if (rules->warning_count)
            snprintf(state->warning, sizeof(state->warning), "%s", rules->warnings[0].text);
    }
    pthread_mutex_unlock(&in_force.lock);
}
