/* SPDX-License-Identifier: Apache-2.0 */
/* Which of a job's processes have ended: found out by the preloaded library, in a process of the job's own. */
#include "region.h"

#include "ledger_region.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- who is alive ---- */

/* State, number of threads and start time of a process by its folder in /proc; false: there is none to be seen. */
static bool read_stat(const char *pid, char *state, uint64_t *threads, uint64_t *start)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file >= 0 ? read(file, line, sizeof line - 1) : -1;
    if (file >= 0)
        close(file);
    line[size > 0 ? size : 0] = 0;
    const char *rest = strrchr(line, ')'); /* the name before it may hold anything */
    return rest &&
           sscanf(rest + 1,
                  " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %" SCNu64 " %*d %" SCNu64, state,
                  threads, start) == 3;
}

struct limit_self limit_self(void)
{
    struct limit_self self = {.pid = (uint32_t)getpid(), .space = 1}; /* without /proc: a namespace like no other */
    struct stat stamp;
    char state;
    uint64_t threads;
    char number[16] = "";
    if (stat("/proc/self/ns/pid", &stamp) == 0)
        self.space = stamp.st_ino;
    self.proc = readlink("/proc/self", number, sizeof number - 1) > 0 && strtoul(number, NULL, 10) == self.pid;
    if (!read_stat("self", &state, &threads, &self.start))
        self.start = 0;
    return self;
}

uint32_t limit_ledger_pid(struct limit_region *region, uint32_t pid, uint64_t space)
{
    for (uint32_t i = 0; i < LIMIT_SPACES; i++) {
        uint64_t seen = atomic_load_explicit(&region->spaces[i], memory_order_relaxed);
        if (seen == 0 && atomic_compare_exchange_strong(&region->spaces[i], &seen, space))
            seen = space;
        if (seen == space)
            return i << LIMIT_PID_BITS | pid;
    }
    return 0;
}

bool limit_has_joined(const struct limit_region *region, uint32_t ledger_pid)
{
    for (uint32_t seat = 0; seat < region->file->processes; seat++) {
        uint32_t id;
        struct sluice_ledger_process who;
        if (ledger_read_seat(region->ledger, seat, &id, &who, NULL) == SLUICE_OK && id && who.pid == ledger_pid)
            return true;
    }
    return false;
}

/* ---- judging ---- */

/* One search: the process that searches, and what it found out once. */
struct look {
    struct limit_region *region;
    const struct limit_self *self;
    enum limit_depth depth;
    int64_t end;        /* ms of the thread's own time, after which nothing that takes long is begun */
    char mapping[64];   /* device and inode of the ledger, as the kernel writes them in maps; "": not known */
    uint32_t *suspects; /* [processes]: those on a seat from another PID namespace that were not seen since; or 0 */
};

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now); /* own time: a busy machine cuts no search short */
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool is_late(const struct look *look)
{
    return now_ms() >= look->end;
}

enum found { NO, YES, UNKNOWN };

/* The mapping at `address`, or any like `wanted`, in /proc/PID/maps; its device and inode in `identity`. */
static enum found find_mapping(const struct look *look, const char *pid, const void *address, const char *wanted,
                               char identity[64])
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *maps = fopen(path, "re");
    enum found found = UNKNOWN;
    for (uint32_t lines = 1; maps && found != YES && fgets(line, sizeof line, maps); lines++) {
        char start[32], seen[64], inode[32];
        if (lines % 1024 == 0 && is_late(look)) {
            found = UNKNOWN;
            break;
        }
        found = NO;
        if (sscanf(line, "%31[0-9a-f]-%*s %*s %*s %30s %31s", start, seen, inode) != 3)
            continue;
        strcat(strcat(seen, " "), inode);
        if (address ? strtoull(start, NULL, 16) == (uintptr_t)address : strcmp(seen, wanted) == 0) {
            found = YES;
            strcpy(identity, seen);
        }
    }
    if (maps)
        fclose(maps);
    return found;
}

/*
 * Whether a process still has the ledger mapped: it has not when it went on as another program (exec). Where that
 * cannot be known, it has. The caller's own mapping shows how the kernel writes the file, which stat does not show on
 * overlays.
 */
static bool has_mapped(const struct look *look, const char *pid)
{
    char seen[64];
    return !*look->mapping || is_late(look) || find_mapping(look, pid, NULL, look->mapping, seen) != NO;
}

static bool has_ended(char state, uint64_t threads)
{
    return (state == 'Z' || state == 'X') && threads <= 1; /* a first thread may end before the others */
}

static bool is_alive(const struct look *look, uint32_t pid, uint64_t start)
{
    char state, name[16];
    uint64_t threads, started;
    snprintf(name, sizeof name, "%" PRIu32, pid);
    if (!look->self->proc || !read_stat(name, &state, &threads, &started))
        return kill((pid_t)pid, 0) == 0 || errno != ESRCH; /* no /proc, another's, or hidden */
    return !has_ended(state, threads) && (start == 0 || started == start) &&
           (look->depth == LIMIT_QUICK || has_mapped(look, name));
}

/* ---- other PID namespaces ---- */

static bool read_status(const char *pid, char text[4096])
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/status", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file >= 0 ? read(file, text, 4095) : -1;
    if (file >= 0)
        close(file);
    text[size > 0 ? size : 0] = 0;
    return size > 0;
}

enum { ANY_PID = INT32_MAX };

/* A process's number in its own namespace: the last of the NSpid line. 0: it is in that of this /proc, the first. */
static uint32_t inner_pid(const char *status)
{
    const char *line = strstr(status, "\nNSpid:\t"), *end = line ? strchr(line + 1, '\n') : NULL;
    if (!end) /* behind a long list of groups */
        return ANY_PID;
    while (end[-1] != '\t')
        end--;
    return end - line > (ptrdiff_t)strlen("\nNSpid:\t") ? (uint32_t)strtoul(end, NULL, 10) : 0;
}

static bool is_mine(const char *status)
{
    const char *line = strstr(status, "\nUid:");
    return line && strtoul(line + 5, NULL, 10) == getuid();
}

/* Clear those that may be a process of this PID namespace, or of any where that is not known. */
static void clear_suspects(struct look *look, uint32_t pid, uint64_t space, bool any_space)
{
    for (uint32_t seat = 0; seat < look->region->file->processes; seat++) {
        uint32_t id;
        struct sluice_ledger_process who;
        if (!look->suspects[seat] || ledger_read_seat(look->region->ledger, seat, &id, &who, NULL) != SLUICE_OK ||
            (pid != ANY_PID && (who.pid & ((1u << LIMIT_PID_BITS) - 1)) != pid))
            continue;
        if (any_space || look->region->spaces[who.pid >> LIMIT_PID_BITS] == space)
            look->suspects[seat] = 0;
    }
}

static void look_at_process(struct look *look, const char *pid)
{
    char path[300], state, status[4096];
    uint64_t threads, start;
    struct stat stamp;
    snprintf(path, sizeof path, "/proc/%s/ns/pid", pid);
    bool known = stat(path, &stamp) == 0;
    if ((known && stamp.st_ino == look->self->space) || !read_status(pid, status))
        return;
    uint32_t inner = inner_pid(status);
    if (!inner || (!known && !is_mine(status))) /* some of the user's own may not be looked at; others' have no seat */
        return;
    if (read_stat(pid, &state, &threads, &start) && !has_ended(state, threads) && (!known || has_mapped(look, pid)))
        clear_suspects(look, inner, known ? stamp.st_ino : 0, !known);
}

/* Before the walk: it may not see a process that takes a seat during it. */
static bool find_suspects(struct look *look)
{
    bool any = false;
    for (uint32_t seat = 0; seat < look->region->file->processes; seat++) {
        uint32_t id;
        struct sluice_ledger_process who;
        if (ledger_read_seat(look->region->ledger, seat, &id, &who, NULL) == SLUICE_OK && id &&
            look->region->spaces[who.pid >> LIMIT_PID_BITS] != look->self->space) {
            look->suspects[seat] = id;
            any = true;
        }
    }
    return any;
}

/* A process of the node's PID namespace sees those of all others, unless this /proc hides some. */
static bool sees_all(const struct look *look)
{
    char status[4096];
    return look->self->proc && look->self->space == look->region->spaces[LIMIT_NODE_SPACE] && read_status("1", status);
}

/* Find, in one walk, which processes of the other PID namespaces have ended. False: none, or it cannot be known. */
static bool look_elsewhere(struct look *look)
{
    look->suspects = calloc(look->region->file->processes, sizeof *look->suspects);
    DIR *folder = look->suspects && find_suspects(look) && sees_all(look) ? opendir("/proc") : NULL;
    if (!folder)
        return false;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL && !is_late(look);)
        if (strspn(entry->d_name, "0123456789") == strlen(entry->d_name))
            look_at_process(look, entry->d_name);
    closedir(folder);
    return !is_late(look);
}

/* ---- striking off ---- */

/* Which process is on a seat, and whether it lives, as far as can be known. */
static enum sluice_error look_at(const struct look *look, uint32_t seat, struct sluice_ledger_process *who, bool *taken,
                                 bool *alive, struct sluice_error_text *text)
{
    uint32_t id;
    enum sluice_error error = ledger_read_seat(look->region->ledger, seat, &id, who, text);
    *taken = !error && id != 0;
    *alive = false;
    if (!*taken)
        return error;
    uint64_t space = atomic_load_explicit(&look->region->spaces[who->pid >> LIMIT_PID_BITS], memory_order_relaxed);
    if (look->depth == LIMIT_EVERYWHERE)
        *alive = look->suspects[seat] != id;
    else
        *alive = space != look->self->space || is_alive(look, who->pid & ((1u << LIMIT_PID_BITS) - 1), who->start);
    return SLUICE_OK;
}

/* Whether a living process holds memory that another process made. */
static enum sluice_error find_importers(const struct look *look, bool *importers, struct sluice_error_text *text)
{
    struct sluice_ledger_process who;
    bool taken, alive;
    enum sluice_error error = SLUICE_OK;
    *importers = false;
    for (uint32_t seat = 0; seat < look->region->file->processes && !*importers && !error; seat++) {
        if (atomic_load(&look->region->sharing[seat].imports) == 0)
            continue;
        error = look_at(look, seat, &who, &taken, &alive, text);
        *importers = taken && alive;
    }
    return error;
}

static enum sluice_error strike_off(const struct look *look, uint64_t *released, uint32_t *count,
                                    struct sluice_error_text *text)
{
    struct sluice_ledger_process who;
    bool alive, taken, importers;
    enum sluice_error error = find_importers(look, &importers, text);
    for (uint32_t seat = 0; seat < look->region->file->processes && !error; seat++) {
        error = look_at(look, seat, &who, &taken, &alive, text);
        if (error || !taken || alive || (importers && atomic_load(&look->region->sharing[seat].exports) > 0))
            continue;
        uint64_t bytes = 0;
        error = sluice_ledger_reap(look->region->ledger, who.pid, who.start, &bytes, text);
        *released += bytes;
        *count += !error;
    }
    return error;
}

enum sluice_error limit_reap_dead(struct limit_region *region, const struct limit_self *self, enum limit_depth depth,
                                  uint64_t *released, uint32_t *count, struct sluice_error_text *text)
{
    struct look look = {.region = region, .self = self, .depth = depth, .end = now_ms() + LIMIT_REAP_MS};
    *released = *count = 0;
    if (depth != LIMIT_QUICK && find_mapping(&look, "self", region->shared, NULL, look.mapping) != YES)
        *look.mapping = 0;
    enum sluice_error error = SLUICE_OK;
    if (depth != LIMIT_EVERYWHERE || look_elsewhere(&look))
        error = strike_off(&look, released, count, text);
    free(look.suspects);
    return error;
}
