/* SPDX-License-Identifier: Apache-2.0 */
#include "region.h"

#include "error.h"
#include "ledger_region.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char limits_name[] = "limits", unfinished_name[] = "limits.new", ledger_name[] = "ledger";

enum { MAX_SPILL = 7, MODE_LIMITS = 0644, MODE_LEDGER = 0600 };

static enum sluice_error fail_system(struct sluice_error_text *text, const char *what, const char *path)
{
    int number = errno;
    return sluice_fail(text, SLUICE_ERROR_SYSTEM, "%s %.120s: %s%s", what, path, strerror(number),
                       number == ENOSPC ? "; make room there" : "");
}

/* ---- the file `limits` ---- */

static uint64_t hash(uint64_t seen, const void *bytes, size_t size)
{
    for (const unsigned char *at = bytes; size > 0; size--) /* FNV-1a */
        seen = (seen ^ *at++) * UINT64_C(0x100000001b3);
    return seen;
}

static uint64_t checksum(const struct limit_file *file)
{
    struct limit_file head = *file;
    head.checksum = 0;
    uint64_t sum = hash(UINT64_C(0xcbf29ce484222325), &head, sizeof head);
    for (uint32_t i = 0; i < file->count; i++) {
        struct sluice_limit_device device = file->devices[i];
        device.limit = 0;
        sum = hash(sum, &device, sizeof device);
    }
    return sum;
}

static bool ends(const char *name)
{
    return memchr(name, 0, SLUICE_LIMIT_NAME_SIZE) != NULL;
}

static const char *name_of(const struct sluice_limit_device *device)
{
    return *device->uuid ? device->uuid : *device->pci ? device->pci : device->name;
}

static enum sluice_error check_limit(uint32_t i, const struct sluice_limit_device *device, uint64_t limit,
                                     struct sluice_error_text *text)
{
    if (limit == 0 || limit > device->total)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "limit of %" PRIu64 " bytes on device %" PRIu32
                           " (%.48s): must be 1 to what it has, %" PRIu64,
                           limit, i, name_of(device), device->total);
    if (device->context >= limit)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "limit of %" PRIu64 " bytes on device %" PRIu32
                           " (%.48s): a driver context alone takes %" PRIu64 "; ask for more",
                           limit, i, name_of(device), device->context);
    return SLUICE_OK;
}

static enum sluice_error check_device(const struct sluice_limit_device *devices, uint32_t i,
                                      struct sluice_error_text *text)
{
    const struct sluice_limit_device *device = &devices[i];
    if (!ends(device->uuid) || !ends(device->pci) || !ends(device->name))
        return sluice_fail(text, SLUICE_ERROR_INVALID, "device %" PRIu32 ": its UUID, PCI address or name has no end",
                           i);
    if (!*name_of(device))
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "device %" PRIu32 ": has neither UUID nor PCI address nor OpenCL name; give one", i);
    for (uint32_t k = 0; k < i; k++)
        if ((*device->uuid && strcasecmp(device->uuid, devices[k].uuid) == 0) ||
            (*device->pci && strcasecmp(device->pci, devices[k].pci) == 0) ||
            (*device->name && strcmp(device->name, devices[k].name) == 0))
            return sluice_fail(text, SLUICE_ERROR_INVALID, "device %.64s: in the list twice, %" PRIu32 " and %" PRIu32,
                               name_of(device), k, i);
    enum sluice_error error = check_limit(i, device, device->limit, text);
    if (!error && device->spill / MAX_SPILL > device->limit)
        error = sluice_fail(text, SLUICE_ERROR_RANGE,
                            "spill of %" PRIu64 " bytes on device %" PRIu32 " (%.48s): at most %d times its limit",
                            device->spill, i, name_of(device), MAX_SPILL);
    return error;
}

static enum sluice_error check_file(const struct limit_file *file, size_t size, const char *folder,
                                    struct sluice_error_text *text)
{
    if (size < sizeof *file || file->magic != LIMIT_MAGIC)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/limits: no file of limits; make the region anew",
                           folder);
    if (file->version != LIMIT_VERSION)
        return sluice_fail(text, SLUICE_ERROR_VERSION, "%.120s/limits: version %" PRIu32 ", this library reads %d",
                           folder, file->version, LIMIT_VERSION);
    if (file->count == 0 || file->count > SLUICE_LIMIT_MAX_DEVICES ||
        size != sizeof *file + file->count * sizeof *file->devices || file->checksum != checksum(file))
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/limits: damaged; make the region anew", folder);
    return SLUICE_OK;
}

/* ---- making ---- */

static struct sluice_ledger_shape shape_of(uint32_t count, uint32_t processes)
{
    return (struct sluice_ledger_shape){.devices = 2 * count, .owners = 1, .processes = processes};
}

/* What lies before the ledger in its file. */
static size_t size_before(uint32_t processes)
{
    size_t size = LIMIT_SPACES_SIZE + processes * sizeof(struct limit_sharing);
    return (size + SLUICE_LEDGER_ALIGNMENT - 1) / SLUICE_LEDGER_ALIGNMENT * SLUICE_LEDGER_ALIGNMENT;
}

static enum sluice_error write_whole(int file, const void *bytes, size_t size, const char *path,
                                     struct sluice_error_text *text)
{
    for (const char *at = bytes; size > 0;) {
        ssize_t written = write(file, at, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return fail_system(text, "write", path);
        at += written;
        size -= (size_t)written;
    }
    return SLUICE_OK;
}

/* Root and the user may read and write, nobody else anything: an ACL, as the owner stays root. */
static int let_in(int file, uint32_t uid)
{
    enum { USER_OWNER = 1, USER = 2, GROUP_OWNER = 4, MASK = 0x10, OTHER = 0x20, READ_WRITE = 6 };
    const struct {
        uint32_t version;
        struct {
            uint16_t tag, permission;
            uint32_t id;
        } entries[5];
    } acl = {.version = 2,
             .entries = {{USER_OWNER, READ_WRITE, UINT32_MAX},
                         {USER, READ_WRITE, uid},
                         {GROUP_OWNER, 0, UINT32_MAX},
                         {MASK, READ_WRITE, UINT32_MAX},
                         {OTHER, 0, UINT32_MAX}}};
    return fsetxattr(file, "system.posix_acl_access", &acl, sizeof acl, 0);
}

static enum sluice_error format_ledger(void *memory, size_t size, const struct sluice_limit_device *devices,
                                       uint32_t count, uint32_t processes, struct sluice_error_text *text)
{
    struct sluice_ledger_shape shape = shape_of(count, processes);
    struct sluice_ledger *ledger = NULL;
    enum sluice_error error = sluice_ledger_format(memory, size, &shape, text);
    if (!error)
        error = sluice_ledger_new(memory, size, 0, &ledger, text);
    for (uint32_t i = 0; i < count && !error; i++) {
        struct sluice_ledger_device terms = {.capacity = devices[i].limit, .granularity = 1, .oversubscription = 1000};
        error = sluice_ledger_set_device(ledger, i, &terms, text);
        terms.capacity = devices[i].spill;
        if (!error)
            error = sluice_ledger_set_device(ledger, count + i, &terms, text);
        if (!error)
            error = sluice_ledger_set_quota(ledger, 0, i, UINT64_MAX, text);
        if (!error)
            error = sluice_ledger_set_quota(ledger, 0, count + i, UINT64_MAX, text);
    }
    sluice_ledger_free(ledger);
    return error;
}

static enum sluice_error make_ledger(int at, const struct sluice_limit_device *devices, uint32_t count,
                                     uint32_t processes, uint32_t uid, const char *folder,
                                     struct sluice_error_text *text)
{
    struct sluice_ledger_shape shape = shape_of(count, processes);
    size_t before = size_before(processes), size = before + sluice_ledger_size(&shape);
    int file = openat(at, ledger_name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, MODE_LEDGER);
    if (file < 0)
        return fail_system(text, "make ledger in", folder);
    enum sluice_error error = SLUICE_OK;
    void *memory = MAP_FAILED;
    if ((errno = posix_fallocate(file, 0, (off_t)size)) != 0) /* a full /run shows here, not as SIGBUS in a job */
        error = fail_system(text, "make ledger in", folder);
    else if ((memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED)
        error = fail_system(text, "map ledger in", folder);
    else if (uid != geteuid() && let_in(file, uid) != 0)
        error = fail_system(text, "set the access list of the ledger in", folder);
    if (!error)
        error = format_ledger((char *)memory + before, size - before, devices, count, processes, text);
    if (memory != MAP_FAILED)
        munmap(memory, size);
    close(file);
    return error;
}

static enum sluice_error make_limits(int at, const struct sluice_limit_device *devices, uint32_t count,
                                     uint32_t processes, uint32_t uid, const char *folder,
                                     struct sluice_error_text *text)
{
    size_t size = sizeof(struct limit_file) + count * sizeof *devices;
    struct limit_file *content = calloc(1, size);
    if (!content)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for the limits of %" PRIu32 " devices", count);
    *content = (struct limit_file){
        .magic = LIMIT_MAGIC, .version = LIMIT_VERSION, .count = count, .processes = processes, .uid = uid};
    memcpy(content->devices, devices, count * sizeof *devices);
    content->checksum = checksum(content);
    enum sluice_error error = SLUICE_OK;
    int file = openat(at, unfinished_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, MODE_LIMITS);
    if (file < 0)
        error = fail_system(text, "make limits in", folder);
    if (!error)
        error = write_whole(file, content, size, folder, text);
    if (!error && fchmod(file, MODE_LIMITS) != 0) /* whatever the umask */
        error = fail_system(text, "set the mode of limits in", folder);
    if (!error && renameat(at, unfinished_name, at, limits_name) != 0)
        error = fail_system(text, "finish limits in", folder);
    if (file >= 0)
        close(file);
    free(content);
    return error;
}

enum sluice_error sluice_limit_create(const char *folder, const struct sluice_limit_device *devices, uint32_t count,
                                      uint32_t processes, uint32_t uid, struct sluice_error_text *text)
{
    if (!folder || !devices)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "no folder or no devices given");
    if (count == 0 || count > SLUICE_LIMIT_MAX_DEVICES)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " devices: must be 1 to %d", count,
                           SLUICE_LIMIT_MAX_DEVICES);
    if (processes == 0 || processes > SLUICE_LEDGER_MAX_PROCESSES)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " processes: must be 1 to %d", processes,
                           SLUICE_LEDGER_MAX_PROCESSES);
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < count && !error; i++)
        error = check_device(devices, i, text);
    if (error)
        return error;
    if (mkdir(folder, 0755) != 0)
        return errno == EEXIST
                   ? sluice_fail(text, SLUICE_ERROR_DUPLICATE, "%.160s: is there already; remove it first", folder)
                   : fail_system(text, "make", folder);
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0 || fchmod(at, 0755) != 0)
        error = fail_system(text, "open", folder);
    if (!error)
        error = make_ledger(at, devices, count, processes, uid, folder, text);
    if (!error) /* last: without it there is no region */
        error = make_limits(at, devices, count, processes, uid, folder, text);
    if (at >= 0)
        close(at);
    if (error)
        sluice_limit_remove(folder, NULL);
    return error;
}

enum sluice_error sluice_limit_remove(const char *folder, struct sluice_error_text *text)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == ENOENT ? SLUICE_OK : fail_system(text, "open", folder);
    enum sluice_error error = SLUICE_OK;
    const char *const names[] = {limits_name, unfinished_name, ledger_name};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (unlinkat(at, names[i], 0) != 0 && errno != ENOENT)
            error = fail_system(text, "empty", folder);
    close(at);
    if (!error && rmdir(folder) != 0 && errno != ENOENT)
        error = fail_system(text, "remove", folder);
    return error;
}

/* ---- opening ---- */

/* Map one of the region's files, if it is a plain file of the right owner that nobody else may write. */
static enum sluice_error map_file(int at, const char *name, const char *folder, uid_t owner, int access, int protection,
                                  mode_t forbidden, void **memory, struct stat *stamp, struct sluice_error_text *text)
{
    int file = openat(at, name, access | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return errno == ENOENT ? sluice_fail(text, SLUICE_ERROR_UNKNOWN, "%.120s/%s: no such region", folder, name)
                               : fail_system(text, name, folder);
    enum sluice_error error = SLUICE_OK;
    if (fstat(file, stamp) != 0)
        error = fail_system(text, name, folder);
    else if (!S_ISREG(stamp->st_mode) || stamp->st_uid != owner || (stamp->st_mode & forbidden) != 0)
        error = sluice_fail(text, SLUICE_ERROR_INVALID,
                            "%.120s/%s: owner %u, mode %o: must be user %u's, and nobody else's to write", folder, name,
                            (unsigned)stamp->st_uid, (unsigned)stamp->st_mode, (unsigned)owner);
    else if (stamp->st_size <= 0)
        error = sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/%s: empty; make the region anew", folder, name);
    if (!error) {
        *memory = mmap(NULL, (size_t)stamp->st_size, protection, MAP_SHARED, file, 0);
        if (*memory == MAP_FAILED)
            error = fail_system(text, name, folder);
    }
    close(file);
    return error;
}

enum sluice_error limit_region_open(int at, const char *folder, uid_t owner, bool may_change,
                                    struct sluice_limit *limit, struct sluice_error_text *text)
{
    void *limits = MAP_FAILED, *shared = MAP_FAILED;
    struct stat limits_stamp, ledger_stamp;
    *limit = (struct sluice_limit){0};
    enum sluice_error error = map_file(at, limits_name, folder, owner, may_change ? O_RDWR : O_RDONLY, PROT_READ, 022,
                                       &limits, &limits_stamp, text);
    if (error)
        return error;
    limit->file = limits;
    limit->file_size = (size_t)limits_stamp.st_size;
    error = check_file(limit->file, limit->file_size, folder, text);
    if (!error)
        error =
            map_file(at, ledger_name, folder, owner, O_RDWR, PROT_READ | PROT_WRITE, 002, &shared, &ledger_stamp, text);
    if (!error) {
        limit->shared = shared;
        limit->shared_size = (size_t)ledger_stamp.st_size;
        limit->spaces = shared;
        struct sluice_ledger_shape shape = shape_of(limit->file->count, limit->file->processes), found = {0};
        size_t before = size_before(limit->file->processes), size = before + sluice_ledger_size(&shape);
        limit->sharing = (struct limit_sharing *)((char *)shared + LIMIT_SPACES_SIZE);
        if (limit->shared_size == size)
            error = sluice_ledger_new((char *)shared + before, size - before, 0, &limit->ledger, text);
        if (limit->ledger)
            sluice_ledger_get_shape(limit->ledger, &found);
        if (!error && (found.devices != shape.devices || found.owners != 1 || found.processes != shape.processes))
            error = sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/ledger: does not fit limits; make the region anew",
                                folder);
    }
    if (error)
        limit_region_close(limit);
    return error;
}

void limit_region_close(struct sluice_limit *limit)
{
    sluice_ledger_free(limit->ledger);
    if (limit->shared)
        munmap(limit->shared, limit->shared_size);
    if (limit->file)
        munmap((void *)(uintptr_t)limit->file, limit->file_size);
    *limit = (struct sluice_limit){0};
}

enum sluice_error sluice_limit_open(const char *folder, struct sluice_limit **limit, struct sluice_error_text *text)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == ENOENT || errno == ENOTDIR
                   ? sluice_fail(text, SLUICE_ERROR_UNKNOWN, "%.160s: no such region", folder)
                   : fail_system(text, "open", folder);
    struct sluice_limit *made = malloc(sizeof *made);
    enum sluice_error error = made ? limit_region_open(at, folder, geteuid(), true, made, text)
                                   : sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for a region's handle");
    close(at);
    if (error)
        free(made);
    else
        *limit = made;
    return error;
}

void sluice_limit_close(struct sluice_limit *limit)
{
    if (limit)
        limit_region_close(limit);
    free(limit);
}

/* ---- reading and changing ---- */

uint32_t sluice_limit_device_count(const struct sluice_limit *limit)
{
    return limit->file->count;
}

static enum sluice_error check_index(const struct sluice_limit *limit, uint32_t device, struct sluice_error_text *text)
{
    return device < limit->file->count
               ? SLUICE_OK
               : sluice_fail(text, SLUICE_ERROR_UNKNOWN, "device %" PRIu32 ": the region has %" PRIu32, device,
                             limit->file->count);
}

enum sluice_error sluice_limit_get_device(const struct sluice_limit *limit, uint32_t device,
                                          struct sluice_limit_device *terms, struct sluice_error_text *text)
{
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        *terms = limit->file->devices[device];
    return error;
}

enum sluice_error sluice_limit_set(struct sluice_limit *limit, uint32_t device, uint64_t bytes,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        error = check_limit(device, &limit->file->devices[device], bytes, text);
    if (error)
        return error;
    /* The ledger never grants more than the file says: it is lowered first and raised last. */
    struct sluice_ledger_device terms = {.capacity = bytes, .granularity = 1, .oversubscription = 1000};
    if (bytes < limit_in_force(limit, device) &&
        (error = sluice_ledger_set_device(limit->ledger, device, &terms, text)))
        return error;
    /* The pages are made writable for one store; the preloaded library opened them for reading, and cannot. */
    struct limit_file *file = (struct limit_file *)(uintptr_t)limit->file;
    char what[32];
    snprintf(what, sizeof what, "device %" PRIu32, device);
    if (mprotect(file, limit->file_size, PROT_READ | PROT_WRITE) != 0)
        return fail_system(text, "change the limit of", what);
    __atomic_store_n(&file->devices[device].limit, bytes, __ATOMIC_SEQ_CST);
    mprotect(file, limit->file_size, PROT_READ);
    return sluice_ledger_set_device(limit->ledger, device, &terms, text);
}

enum sluice_error sluice_limit_get_usage(struct sluice_limit *limit, uint32_t device, struct sluice_limit_usage *usage,
                                         struct sluice_error_text *text)
{
    struct sluice_ledger_usage on_device, on_host;
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        error = sluice_ledger_device_usage(limit->ledger, device, &on_device, text);
    if (!error)
        error = sluice_ledger_device_usage(limit->ledger, limit->file->count + device, &on_host, text);
    if (!error)
        *usage = (struct sluice_limit_usage){.limit = limit_in_force(limit, device),
                                             .charged = on_device.charged,
                                             .peak = on_device.peak,
                                             .refused = on_device.refused,
                                             .spilled = on_host.charged};
    return error;
}

enum sluice_error sluice_limit_processes(struct sluice_limit *limit, uint32_t room,
                                         struct sluice_limit_process *processes, uint32_t *count,
                                         struct sluice_error_text *text)
{
    uint32_t found = 0;
    for (uint32_t seat = 0; seat < limit->file->processes; seat++) {
        uint32_t id;
        struct sluice_ledger_process who;
        enum sluice_error error = ledger_read_seat(limit->ledger, seat, &id, &who, text);
        if (error)
            return error;
        if (!id)
            continue;
        if (found < room)
            processes[found] = (struct sluice_limit_process){
                .id = id,
                .pid = who.pid & ((1u << LIMIT_PID_BITS) - 1),
                .space = atomic_load_explicit(&limit->spaces[who.pid >> LIMIT_PID_BITS], memory_order_relaxed),
                .start = who.start};
        found++;
    }
    *count = found;
    return SLUICE_OK;
}

enum sluice_error sluice_limit_process_usage(struct sluice_limit *limit, uint32_t process, uint32_t device,
                                             uint64_t *bytes, struct sluice_error_text *text)
{
    struct sluice_ledger_usage usage;
    enum sluice_error error = check_index(limit, device, text);
    if (!error)
        error = sluice_ledger_process_usage(limit->ledger, process, device, &usage, text);
    if (!error)
        *bytes = usage.charged;
    return error;
}

enum sluice_error sluice_limit_audit(struct sluice_limit *limit, struct sluice_error_text *text)
{
    for (uint32_t i = 0; i < limit->file->count; i++) {
        uint64_t told = atomic_load_explicit(&limit->ledger->devices[i].limit, memory_order_relaxed);
        if (told != limit_in_force(limit, i))
            return sluice_fail(text, SLUICE_ERROR_CORRUPT,
                               "device %" PRIu32 ": the ledger says %" PRIu64 ", the limit is %" PRIu64
                               "; tampered with",
                               i, told, limit_in_force(limit, i));
    }
    return sluice_ledger_audit(limit->ledger, text);
}

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

uint32_t limit_ledger_pid(struct sluice_limit *limit, uint32_t pid, uint64_t space)
{
    for (uint32_t i = 0; i < LIMIT_SPACES; i++) {
        uint64_t seen = atomic_load_explicit(&limit->spaces[i], memory_order_relaxed);
        if (seen == 0 && atomic_compare_exchange_strong(&limit->spaces[i], &seen, space))
            seen = space;
        if (seen == space)
            return i << LIMIT_PID_BITS | pid;
    }
    return 0;
}

/* Device and inode of the mapping at `address`, or of any like `wanted`, in the words of /proc/PID/maps. */
static bool find_mapping(const char *pid, const void *address, const char *wanted, char identity[64], bool *readable)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%s/maps", pid);
    FILE *maps = fopen(path, "re");
    bool found = false;
    *readable = false;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        char start[32], seen[64], inode[32];
        *readable = true;
        if (sscanf(line, "%31[0-9a-f]-%*s %*s %*s %31s %31s", start, seen, inode) != 3)
            continue;
        strcat(strcat(seen, " "), inode);
        found = address ? strtoull(start, NULL, 16) == (uintptr_t)address : strcmp(seen, wanted) == 0;
        if (found)
            strcpy(identity, seen);
    }
    if (maps)
        fclose(maps);
    return found;
}

/*
 * Whether a process still has the ledger mapped: it has not when it went on as another program (exec). Where that
 * cannot be told, it has. The caller's own mapping shows how the kernel writes the file, which stat does not tell on
 * overlays.
 */
static bool has_mapped(const struct sluice_limit *limit, const char *pid)
{
    char wanted[64], seen[64];
    bool readable;
    return !find_mapping("self", limit->shared, NULL, wanted, &readable) ||
           find_mapping(pid, NULL, wanted, seen, &readable) || !readable;
}

static bool is_alive(const struct sluice_limit *limit, const struct limit_self *self, const char *pid, uint64_t start,
                     bool quick)
{
    char state;
    uint64_t threads, started;
    if (!self->proc || !read_stat(pid, &state, &threads, &started))
        return kill((pid_t)atoi(pid), 0) == 0 || errno != ESRCH; /* no /proc, another's, or hidden */
    bool over = (state == 'Z' || state == 'X') && threads <= 1;  /* a first thread may end before the others */
    return !over && (start == 0 || started == start) && (quick || has_mapped(limit, pid));
}

/* The last number of the NSpid line: a process's number in its own namespace. */
static uint32_t inner_pid(const char *pid)
{
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%s/status", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = file >= 0 ? read(file, text, sizeof text - 1) : -1;
    if (file >= 0)
        close(file);
    text[size > 0 ? size : 0] = 0;
    char *line = strstr(text, "\nNSpid:"), *end = line ? strchr(line + 1, '\n') : NULL;
    if (!end)
        return 0;
    *end = 0;
    return (uint32_t)strtoul(strrchr(line, '\t') + 1, NULL, 10);
}

/* A process of another PID namespace, looked for from outside. Start times may differ there (time namespaces). */
static bool is_alive_elsewhere(const struct sluice_limit *limit, uint32_t pid, uint64_t space)
{
    bool found = false;
    DIR *folder = opendir("/proc");
    if (!folder)
        return true;
    for (struct dirent *entry; !found && (entry = readdir(folder)) != NULL;) {
        char path[300], state;
        uint64_t threads, start;
        struct stat stamp;
        if (strspn(entry->d_name, "0123456789") != strlen(entry->d_name))
            continue;
        snprintf(path, sizeof path, "/proc/%s/ns/pid", entry->d_name);
        found = stat(path, &stamp) == 0 && stamp.st_ino == space && inner_pid(entry->d_name) == pid &&
                read_stat(entry->d_name, &state, &threads, &start) &&
                !((state == 'Z' || state == 'X') && threads <= 1) && has_mapped(limit, entry->d_name);
    }
    closedir(folder);
    return found;
}

/* Who sits where, and whether he lives, as far as `self` can tell. */
static enum sluice_error look_at(struct sluice_limit *limit, const struct limit_self *self, enum limit_depth depth,
                                 uint32_t seat, struct sluice_ledger_process *who, bool *alive, bool *taken,
                                 struct sluice_error_text *text)
{
    uint32_t id;
    enum sluice_error error = ledger_read_seat(limit->ledger, seat, &id, who, text);
    *taken = !error && id != 0;
    *alive = false;
    if (!*taken)
        return error;
    uint32_t pid = who->pid & ((1u << LIMIT_PID_BITS) - 1);
    uint64_t space = atomic_load_explicit(&limit->spaces[who->pid >> LIMIT_PID_BITS], memory_order_relaxed);
    char name[16];
    snprintf(name, sizeof name, "%" PRIu32, pid);
    *alive = space == self->space ? is_alive(limit, self, name, who->start, depth == LIMIT_QUICK)
                                  : depth != LIMIT_EVERYWHERE || is_alive_elsewhere(limit, pid, space);
    return SLUICE_OK;
}

enum sluice_error limit_reap_dead(struct sluice_limit *limit, const struct limit_self *self, enum limit_depth depth,
                                  uint64_t *released, uint32_t *count, struct sluice_error_text *text)
{
    unsigned char dead[SLUICE_LEDGER_MAX_PROCESSES / 8] = {0};
    struct sluice_ledger_process who;
    uint64_t bytes = 0;
    uint32_t reaped = 0;
    bool alive, taken, importers = false;
    enum sluice_error error = SLUICE_OK;
    for (uint32_t seat = 0; seat < limit->file->processes && !error; seat++) {
        error = look_at(limit, self, depth, seat, &who, &alive, &taken, text);
        if (!error && taken && !alive)
            dead[seat / 8] |= (unsigned char)(1u << seat % 8);
        importers = importers || (taken && alive && atomic_load(&limit->sharing[seat].imports) > 0);
    }
    for (uint32_t seat = 0; seat < limit->file->processes && !error; seat++) {
        if (!(dead[seat / 8] >> seat % 8 & 1) || (importers && atomic_load(&limit->sharing[seat].exports) > 0))
            continue;
        uint64_t one = 0;
        error = look_at(limit, self, depth, seat, &who, &alive, &taken, text);
        if (error || !taken || alive)
            continue; /* somebody else sits there by now */
        error = sluice_ledger_reap(limit->ledger, who.pid, who.start, &one, text);
        bytes += one;
        reaped += !error;
    }
    if (!error) {
        *released = bytes;
        *count = reaped;
    }
    return error;
}

enum sluice_error sluice_limit_reap(struct sluice_limit *limit, uint64_t *released, uint32_t *count,
                                    struct sluice_error_text *text)
{
    struct limit_self self = limit_self();
    return limit_reap_dead(limit, &self, LIMIT_EVERYWHERE, released, count, text);
}
