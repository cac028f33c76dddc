/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include "ledger_region.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NEW, JOINING, JOINED };
enum { PART = 512 }; /* small pieces are multiples of it */

__thread int limit_inside;

/* ---- where the region is ---- */

static size_t read_file(const char *path, char *text, size_t size)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;
    for (ssize_t got = 1; file >= 0 && got > 0 && length < size - 1; length += got > 0 ? (size_t)got : 0)
        got = read(file, text + length, size - 1 - length);
    if (file >= 0)
        close(file);
    text[length] = 0;
    return length;
}

/* Root as this process sees it: in a user namespace of its own it is "nobody", and not that namespace's root. */
static uid_t root(void)
{
    char map[4096], overflow[32];
    if (read_file("/proc/self/uid_map", map, sizeof map) == 0)
        return 0;
    for (char *line = map; line && *line; line = strchr(line, '\n'), line += line != NULL) {
        unsigned long inside, outside, count;
        if (sscanf(line, "%lu %lu %lu", &inside, &outside, &count) == 3 && outside == 0 && count > 0)
            return (uid_t)inside;
    }
    return read_file("/proc/sys/kernel/overflowuid", overflow, sizeof overflow) ? (uid_t)strtoul(overflow, NULL, 10)
                                                                                : 65534;
}

static enum sluice_error open_folder(const char *folder, uid_t owner, struct limit_region *region,
                                     struct sluice_error_text *text)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == EACCES ? limit_fail_system(text, "open", folder) : SLUICE_ERROR_UNKNOWN;
    enum sluice_error error = limit_region_open(at, folder, owner, region, text);
    close(at);
    return error;
}

/* A part of a cgroup's path that may name a region: nothing that leads elsewhere. */
static bool is_name(const char *part, size_t length)
{
    if (length == 0 || length > 64 || *part == '.')
        return false;
    for (size_t i = 0; i < length; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-", part[i]))
            return false;
    return true;
}

static enum sluice_error open_by_cgroup(uid_t owner, struct limit_region *region, struct sluice_error_text *text)
{
    static const char none[] = "no region of this job in " SLUICE_LIMIT_FOLDER;
    char groups[16384], folder[sizeof SLUICE_LIMIT_FOLDER + 80];
    memcpy(text->text, none, sizeof none);
    if (read_file("/proc/self/cgroup", groups, sizeof groups) == 0)
        return SLUICE_ERROR_UNKNOWN;
    char *rest = groups;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;)
        for (char *slash; (slash = strrchr(line, '/')) != NULL; *slash = 0) {
            size_t length = strlen(slash + 1);
            if (!is_name(slash + 1, length))
                continue;
            snprintf(folder, sizeof folder, "%s/%s", SLUICE_LIMIT_FOLDER, slash + 1);
            enum sluice_error error = open_folder(folder, owner, region, text);
            if (error != SLUICE_ERROR_UNKNOWN)
                return error;
        }
    memcpy(text->text, none, sizeof none);
    return SLUICE_ERROR_UNKNOWN;
}

/* ---- joining ---- */

static struct limit_session *mapped_session(void)
{
    static _Atomic(struct limit_session *) session;
    struct limit_session *mine = atomic_load_explicit(&session, memory_order_acquire);
    if (mine)
        return mine;
    mine = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED || madvise(mine, sizeof *mine, MADV_WIPEONFORK) != 0)
        return NULL;
    struct limit_session *first = NULL;
    if (atomic_compare_exchange_strong(&session, &first, mine))
        return mine;
    munmap(mine, sizeof *mine);
    return first;
}

static void say_once(const char *why)
{
    static atomic_flag said = ATOMIC_FLAG_INIT;
    char line[400];
    if (atomic_flag_test_and_set(&said))
        return;
    int size = snprintf(line, sizeof line, "sluice: this process gets no GPU memory: %s\n", why);
    if (write(STDERR_FILENO, line, size < (int)sizeof line ? (size_t)size : sizeof line - 1) < 0)
        return; /* standard error is closed */
}

/* True: a process was struck off. */
static bool reap(struct limit_session *session, enum limit_depth depth)
{
    uint64_t released;
    uint32_t count = 0;
    limit_reap_dead(&session->region, &session->self, depth, &released, &count, NULL);
    return count > 0;
}

/* Whatever it takes to find room, before something is refused. */
static bool make_room(struct limit_session *session)
{
    return reap(session, LIMIT_FULL) || reap(session, LIMIT_EVERYWHERE);
}

/* The same on a device, whose ledger has counted a refusal: if there is room now, it was none. */
static bool make_room_on(struct limit_session *session, uint32_t account)
{
    bool made = make_room(session);
    if (made)
        atomic_fetch_sub_explicit(&session->region.ledger->devices[account].refused, 1, memory_order_relaxed);
    return made;
}

static enum sluice_error join(struct limit_session *session, struct sluice_error_text *text)
{
    uid_t owner = root();
    enum sluice_error error = open_folder(SLUICE_LIMIT_JOB, owner, &session->region, text);
    if (error == SLUICE_ERROR_UNKNOWN)
        error = open_by_cgroup(owner, &session->region, text);
    if (error)
        return error;
    session->self = limit_self();
    uint32_t pid = limit_ledger_pid(&session->region, session->self.pid, session->self.space);
    error = sluice_ledger_join(session->region.ledger, 0, pid, session->self.start, &session->process, text);
    if (error == SLUICE_ERROR_CAPACITY && make_room(session))
        error = sluice_ledger_join(session->region.ledger, 0, pid, session->self.start, &session->process, text);
    if (error) {
        limit_region_close(&session->region);
    } else {
        session->sharing = &session->region.sharing[session->process & 0xffff];
        atomic_store(&session->sharing->exports, 0);
        atomic_store(&session->sharing->imports, 0);
    }
    return error;
}

static struct limit_session *join_once(struct limit_session *session)
{
    for (;;) {
        int state = NEW;
        if (atomic_compare_exchange_strong(&session->state, &state, JOINING)) {
            struct sluice_error_text text = {{0}};
            int kept = errno;
            enum sluice_error error = join(session, &text);
            errno = kept;
            atomic_store_explicit(&session->state, error ? NEW : JOINED, memory_order_release);
            if (error)
                say_once(text.text);
            return error ? NULL : session;
        }
        if (state == JOINED)
            return session;
        sched_yield(); /* another thread joins */
    }
}

struct limit_session *limit_session(void)
{
    struct limit_session *session = mapped_session();
    if (!session)
        say_once("the kernel cannot wipe memory on fork (Linux 4.14)");
    else if (atomic_load_explicit(&session->state, memory_order_acquire) != JOINED)
        session = join_once(session);
    return session;
}

/* ---- devices ---- */

static bool same_uuid(const char *text, const unsigned char uuid[16])
{
    unsigned digits = 0;
    const char *at = strncasecmp(text, "GPU-", 4) == 0 || strncasecmp(text, "MIG-", 4) == 0 ? text + 4 : text;
    for (; *at; at++) {
        if (*at == '-')
            continue;
        const char *hex = "0123456789abcdef", *found = strchr(hex, *at | 0x20);
        unsigned value = digits < 32 ? uuid[digits / 2] >> (digits % 2 ? 0 : 4) & 15u : 16;
        if (!found || (unsigned)(found - hex) != value)
            return false;
        digits++;
    }
    return digits == 32;
}

int limit_device(const unsigned char uuid[16], const char *pci, const char *name)
{
    struct limit_session *session = limit_session();
    if (!session)
        return LIMIT_CLOSED;
    for (uint32_t i = 0; i < session->region.file->count; i++) {
        const struct sluice_limit_device *device = &session->region.file->devices[i];
        if ((uuid && *device->uuid && same_uuid(device->uuid, uuid)) ||
            (pci && *device->pci && strcasecmp(device->pci, pci) == 0) ||
            (name && *device->name && strcmp(device->name, name) == 0))
            return (int)i;
    }
    return LIMIT_CLOSED;
}

/* ---- charges ---- */

/* Reservations are not committed: that would only show, at a cost, which of them the driver has granted already. */
static bool reserve(struct limit_session *session, uint32_t account, uint64_t bytes)
{
    struct sluice_ledger_charge charge;
    enum sluice_error error;
    do {
        error = sluice_ledger_reserve(session->region.ledger, session->process, account, bytes, 1, &charge, NULL);
    } while (error == SLUICE_ERROR_CAPACITY && make_room_on(session, account));
    return !error;
}

static void release(struct limit_session *session, uint32_t account, uint64_t bytes)
{
    struct sluice_ledger_charge charge = {.asked = bytes, .charged = bytes, .device = account};
    sluice_ledger_release(session->region.ledger, session->process, &charge, NULL);
}

static bool pay_debt(struct limit_session *session, int device)
{
    struct limit_device *it = &session->devices[device];
    if (__atomic_load_n(&it->owed, __ATOMIC_RELAXED) == 0)
        return true;
    pthread_mutex_lock(&it->lock);
    bool paid = it->owed == 0 || reserve(session, (uint32_t)device, it->owed);
    if (paid)
        __atomic_store_n(&it->owed, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&it->lock);
    return paid;
}

bool limit_take(int device, uint64_t bytes)
{
    if (device == LIMIT_NO_LIMIT || device == LIMIT_NO_DEVICE)
        return true;
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    if (!session)
        return false;
    return pay_debt(session, device) && (bytes == 0 || reserve(session, (uint32_t)device, bytes));
}

void limit_give(int device, uint64_t bytes)
{
    struct limit_session *session = device >= 0 && bytes > 0 ? limit_session() : NULL;
    if (!session)
        return;
    struct limit_device *it = &session->devices[device];
    if (__atomic_load_n(&it->owed, __ATOMIC_RELAXED) != 0) { /* what was never charged is not given back */
        pthread_mutex_lock(&it->lock);
        uint64_t less = it->owed < bytes ? it->owed : bytes;
        __atomic_store_n(&it->owed, it->owed - less, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&it->lock);
        bytes -= less;
    }
    if (bytes > 0)
        release(session, (uint32_t)device, bytes);
}

void limit_owe(int device, uint64_t bytes)
{
    struct limit_session *session = device >= 0 && bytes > 0 ? limit_session() : NULL;
    if (!session || reserve(session, (uint32_t)device, bytes))
        return;
    struct limit_device *it = &session->devices[device];
    pthread_mutex_lock(&it->lock);
    __atomic_store_n(&it->owed, it->owed + bytes, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&it->lock);
}

bool limit_owes(int device)
{
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    return session && __atomic_load_n(&session->devices[device].owed, __ATOMIC_RELAXED) != 0;
}

bool limit_take_spill(int device, uint64_t bytes)
{
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    if (!session || session->region.file->devices[device].spill == 0)
        return false;
    return reserve(session, session->region.file->count + (uint32_t)device, bytes);
}

void limit_give_spill(int device, uint64_t bytes)
{
    struct limit_session *session = limit_session();
    if (session)
        release(session, session->region.file->count + (uint32_t)device, bytes);
}

/* The lock is held. */
static bool set_contexts(struct limit_session *session, int device, uint32_t contexts)
{
    uint64_t bytes = contexts * session->region.file->devices[device].context;
    struct sluice_ledger *ledger = session->region.ledger;
    enum sluice_error error;
    do {
        error = sluice_ledger_set_context(ledger, session->process, (uint32_t)device, bytes, NULL);
    } while (error == SLUICE_ERROR_CAPACITY && make_room_on(session, (uint32_t)device));
    if (!error)
        session->devices[device].contexts = contexts;
    return !error;
}

bool limit_open_context(int device)
{
    if (device == LIMIT_NO_LIMIT || device == LIMIT_NO_DEVICE)
        return true;
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    if (!session || !pay_debt(session, device))
        return false;
    pthread_mutex_lock(&session->devices[device].lock);
    bool done = set_contexts(session, device, session->devices[device].contexts + 1);
    pthread_mutex_unlock(&session->devices[device].lock);
    return done;
}

void limit_close_context(int device)
{
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    if (!session)
        return;
    pthread_mutex_lock(&session->devices[device].lock);
    if (session->devices[device].contexts > 0)
        set_contexts(session, device, session->devices[device].contexts - 1);
    pthread_mutex_unlock(&session->devices[device].lock);
}

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

bool limit_take_piece(int device, uint64_t size, uint64_t granule, struct limit_entry *entry)
{
    entry->device = device;
    entry->small = size < granule / 2;
    if (size > UINT64_C(1) << 46)
        return false;
    if (device < 0)
        return limit_take(device, size);
    if (!entry->small) {
        entry->bytes = round_up(size, granule);
        return limit_take(device, entry->bytes);
    }
    entry->bytes = round_up(size, PART);
    struct limit_session *session = limit_session();
    if (!session || !pay_debt(session, device))
        return false;
    struct limit_device *it = &session->devices[device];
    pthread_mutex_lock(&it->lock);
    uint64_t more = round_up(it->small + entry->bytes, granule) - round_up(it->small, granule);
    bool done = more == 0 || reserve(session, (uint32_t)device, more);
    if (done)
        it->small += entry->bytes;
    pthread_mutex_unlock(&it->lock);
    return done;
}

void limit_give_piece(const struct limit_entry *entry, uint64_t granule)
{
    if (entry->device < 0)
        return;
    if (!entry->small) {
        limit_give(entry->device, entry->bytes);
        return;
    }
    struct limit_session *session = limit_session();
    if (!session)
        return;
    struct limit_device *it = &session->devices[entry->device];
    pthread_mutex_lock(&it->lock);
    uint64_t bytes = entry->bytes < it->small ? entry->bytes : it->small;
    uint64_t less = round_up(it->small, granule) - round_up(it->small - bytes, granule);
    it->small -= bytes;
    pthread_mutex_unlock(&it->lock);
    limit_give(entry->device, less);
}

/* ---- figures ---- */

uint64_t limit_charged(int device)
{
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    uint64_t bytes = 0;
    if (session) {
        reap(session, LIMIT_QUICK);
        if (ledger_read_device(session->region.ledger, (uint32_t)device, &bytes, NULL) != SLUICE_OK)
            bytes = limit_in_force(session->region.file, (uint32_t)device);
    }
    return bytes;
}

void limit_narrow(int device, size_t *left, size_t *total)
{
    struct limit_session *session = device >= 0 ? limit_session() : NULL;
    if (device == LIMIT_NO_LIMIT || device == LIMIT_NO_DEVICE)
        return;
    uint64_t limit = 0, charged = 0, spill = 0, spilled = 0;
    if (session) {
        limit = limit_in_force(session->region.file, (uint32_t)device);
        charged = left ? limit_charged(device) : 0;
        spill = session->region.file->devices[device].spill;
        uint32_t account = session->region.file->count + (uint32_t)device;
        if (spill > 0 && ledger_read_device(session->region.ledger, account, &spilled, NULL) != SLUICE_OK)
            spilled = spill;
    }
    uint64_t room = charged < limit ? limit - charged : 0;
    if (left)
        *left = (*left < room ? *left : room) + (spilled < spill ? spill - spilled : 0);
    *total = (*total < limit ? *total : limit) + spill;
}
