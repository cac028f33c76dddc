/* SPDX-License-Identifier: Apache-2.0 */
#include "region.h"

#include "error.h"
#include "ledger_region.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static const char limits_name[] = "limits", unfinished_name[] = "limits.new", ledger_name[] = "ledger";

enum { MAX_SPILL = 7, MODE_FILE = 0600, MODE_FOLDER = 0700, MOUNTS = 16 };

static const uint64_t max_bytes = UINT64_C(1) << 46; /* the ledger's */

enum sluice_error limit_fail_system(struct sluice_error_text *text, const char *what, const char *path)
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

static bool is_terminated(const char *name)
{
    return memchr(name, 0, SLUICE_LIMIT_NAME_SIZE) != NULL;
}

static const char *name_of(const struct sluice_limit_device *device)
{
    return *device->uuid ? device->uuid : *device->pci ? device->pci : device->name;
}

enum sluice_error limit_check(uint32_t i, const struct sluice_limit_device *device, uint64_t limit,
                              struct sluice_error_text *text)
{
    if (device->total > max_bytes)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "device %" PRIu32 " (%.48s) of %" PRIu64 " bytes: at most 2^46", i,
                           name_of(device), device->total);
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
    if (!is_terminated(device->uuid) || !is_terminated(device->pci) || !is_terminated(device->name))
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
    enum sluice_error error = limit_check(i, device, device->limit, text);
    if (!error && (device->spill / MAX_SPILL > device->limit || device->spill > max_bytes))
        error = sluice_fail(text, SLUICE_ERROR_RANGE,
                            "spill of %" PRIu64 " bytes on device %" PRIu32
                            " (%.48s): at most %d times its limit, and 2^46",
                            device->spill, i, name_of(device), MAX_SPILL);
    return error;
}

static enum sluice_error check_file(const struct limit_file *file, size_t size, const char *folder,
                                    struct sluice_error_text *text)
{
    if (size < sizeof *file || file->magic != LIMIT_MAGIC)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/limits: no file of limits; make the region again",
                           folder);
    if (file->version != LIMIT_VERSION)
        return sluice_fail(text, SLUICE_ERROR_VERSION, "%.120s/limits: version %" PRIu32 ", this library reads %d",
                           folder, file->version, LIMIT_VERSION);
    if (file->count == 0 || file->count > SLUICE_LIMIT_MAX_DEVICES ||
        size != sizeof *file + file->count * sizeof *file->devices || file->checksum != checksum(file))
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/limits: damaged; make the region again", folder);
    return SLUICE_OK;
}

/* ---- making ---- */

struct sluice_ledger_shape limit_shape(uint32_t count, uint32_t processes)
{
    return (struct sluice_ledger_shape){.devices = 2 * count, .owners = 1, .processes = processes};
}

size_t limit_ledger_offset(uint32_t processes)
{
    size_t size = LIMIT_SPACES_SIZE + processes * sizeof(struct limit_sharing);
    return (size + SLUICE_LEDGER_ALIGNMENT - 1) / SLUICE_LEDGER_ALIGNMENT * SLUICE_LEDGER_ALIGNMENT;
}

size_t limit_ledger_size(uint32_t count, uint32_t processes)
{
    struct sluice_ledger_shape shape = limit_shape(count, processes);
    return limit_ledger_offset(processes) + sluice_ledger_size(&shape);
}

static size_t limits_size(uint32_t count)
{
    return sizeof(struct limit_file) + count * sizeof(struct sluice_limit_device);
}

static enum sluice_error write_whole(int file, const void *bytes, size_t size, const char *path,
                                     struct sluice_error_text *text)
{
    for (const char *at = bytes; size > 0;) {
        ssize_t written = write(file, at, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return limit_fail_system(text, "write", path);
        at += written;
        size -= (size_t)written;
    }
    return SLUICE_OK;
}

enum { EXECUTE = 1, WRITE = 2, READ = 4 };

/* Give the user `rights`; the owner, root, keeps its own, and others get none. */
static int let_in(int file, uint16_t owners, uint32_t uid, uint16_t rights)
{
    enum { USER_OWNER = 1, USER = 2, GROUP_OWNER = 4, MASK = 0x10, OTHER = 0x20 };
    const struct {
        uint32_t version;
        struct {
            uint16_t tag, permission;
            uint32_t id;
        } entries[5];
    } acl = {.version = 2,
             .entries = {{USER_OWNER, owners, UINT32_MAX},
                         {USER, rights, uid},
                         {GROUP_OWNER, 0, UINT32_MAX},
                         {MASK, rights, UINT32_MAX},
                         {OTHER, 0, UINT32_MAX}}};
    return uid == geteuid() ? 0 : fsetxattr(file, "system.posix_acl_access", &acl, sizeof acl, 0);
}

static enum sluice_error make_folder(const char *folder, struct sluice_error_text *text)
{
    if (mkdir(folder, MODE_FOLDER) == 0)
        return SLUICE_OK;
    return errno == EEXIST
               ? sluice_fail(text, SLUICE_ERROR_DUPLICATE, "%.160s: is there already; remove it first", folder)
               : limit_fail_system(text, "make", folder);
}

static enum sluice_error mount_memory(const char *folder, uint64_t bytes, uint32_t inodes,
                                      struct sluice_error_text *text)
{
    char options[96];
    snprintf(options, sizeof options, "size=%" PRIu64 ",nr_inodes=%" PRIu32 ",mode=0700", bytes, inodes);
    return mount("sluice", folder, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options) == 0
               ? SLUICE_OK
               : limit_fail_system(text, "mount a tmpfs on", folder);
}

/* Open a folder that was just made, and let the user look into it; -1 on failure. */
static int open_to(const char *folder, uint32_t uid)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0 || let_in(at, READ | WRITE | EXECUTE, uid, READ | EXECUTE) == 0)
        return at;
    int number = errno;
    close(at);
    errno = number;
    return -1;
}

enum sluice_error sluice_limit_make_folder(const char *folder, uint32_t uid, uint64_t bytes, uint32_t inodes,
                                           struct sluice_error_text *text)
{
    enum sluice_error error = make_folder(folder, text);
    if (error)
        return error;
    error = mount_memory(folder, bytes, inodes, text);
    int at = error ? -1 : open_to(folder, uid);
    if (!error && at < 0)
        error = limit_fail_system(text, "open", folder);
    if (at >= 0)
        close(at);
    if (error)
        sluice_limit_remove_folder(folder, NULL);
    return error;
}

enum sluice_error sluice_limit_remove_folder(const char *folder, struct sluice_error_text *text)
{
    for (int mounts = 0; mounts < MOUNTS && umount2(folder, MNT_DETACH | UMOUNT_NOFOLLOW) == 0; mounts++)
        ;
    return rmdir(folder) == 0 || errno == ENOENT ? SLUICE_OK : limit_fail_system(text, "remove", folder);
}

/* Devices have no limits in there: those in force are the ones in `limits`. */
static enum sluice_error format_ledger(void *memory, size_t size, uint32_t count, uint32_t processes,
                                       struct sluice_error_text *text)
{
    struct sluice_ledger_shape shape = limit_shape(count, processes);
    struct sluice_ledger *ledger = NULL;
    enum sluice_error error = sluice_ledger_format(memory, size, &shape, text);
    if (!error)
        error = sluice_ledger_new(memory, size, 0, &ledger, text);
    for (uint32_t i = 0; i < shape.devices && !error; i++)
        error = sluice_ledger_set_quota(ledger, 0, i, UINT64_MAX, text);
    sluice_ledger_free(ledger);
    return error;
}

static enum sluice_error make_ledger(int at, uint32_t count, uint32_t processes, uint32_t uid, const char *folder,
                                     struct sluice_error_text *text)
{
    size_t before = limit_ledger_offset(processes), size = limit_ledger_size(count, processes);
    int file = openat(at, ledger_name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, MODE_FILE);
    if (file < 0)
        return limit_fail_system(text, "make ledger in", folder);
    enum sluice_error error = SLUICE_OK;
    void *memory = MAP_FAILED;
    if ((errno = posix_fallocate(file, 0, (off_t)size)) != 0) /* a full /run shows here, not as SIGBUS in a job */
        error = limit_fail_system(text, "make ledger in", folder);
    else if ((memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED)
        error = limit_fail_system(text, "map ledger in", folder);
    if (!error) {
        atomic_store((atomic_uint_least64_t *)memory, limit_self().space); /* LIMIT_NODE_SPACE */
        error = format_ledger((char *)memory + before, size - before, count, processes, text);
    }
    if (memory != MAP_FAILED)
        munmap(memory, size);
    if (!error && let_in(file, READ | WRITE, uid, READ | WRITE) != 0) /* last: until here nobody else can shorten it */
        error = limit_fail_system(text, "set the access list of the ledger in", folder);
    close(file);
    return error;
}

static enum sluice_error make_limits(int at, const struct sluice_limit_device *devices, uint32_t count,
                                     uint32_t processes, uint32_t uid, const char *folder,
                                     struct sluice_error_text *text)
{
    size_t size = limits_size(count);
    struct limit_file *content = calloc(1, size);
    if (!content)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "no memory for the limits of %" PRIu32 " devices", count);
    *content = (struct limit_file){
        .magic = LIMIT_MAGIC, .version = LIMIT_VERSION, .count = count, .processes = processes, .uid = uid};
    memcpy(content->devices, devices, count * sizeof *devices);
    content->checksum = checksum(content);
    enum sluice_error error = SLUICE_OK;
    int file = openat(at, unfinished_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, MODE_FILE);
    if (file < 0)
        error = limit_fail_system(text, "make limits in", folder);
    if (!error)
        error = write_whole(file, content, size, folder, text);
    if (!error && let_in(file, READ | WRITE, uid, READ) != 0)
        error = limit_fail_system(text, "set the access list of limits in", folder);
    if (!error && renameat(at, unfinished_name, at, limits_name) != 0)
        error = limit_fail_system(text, "finish limits in", folder);
    if (file >= 0)
        close(file);
    free(content);
    return error;
}

static enum sluice_error fill(const char *folder, const struct sluice_limit_device *devices, uint32_t count,
                              uint32_t processes, uint32_t uid, struct sluice_error_text *text)
{
    int at = open_to(folder, uid);
    if (at < 0)
        return limit_fail_system(text, "open", folder);
    enum sluice_error error = make_ledger(at, count, processes, uid, folder, text);
    if (!error) /* last: without it there is no region */
        error = make_limits(at, devices, count, processes, uid, folder, text);
    close(at);
    return error;
}

static uint64_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

enum sluice_error sluice_limit_create(const char *folder, const struct sluice_limit_device *devices, uint32_t count,
                                      uint32_t processes, uint32_t uid, bool mounted, struct sluice_error_text *text)
{
    enum { INODES = 4 }; /* the folder, its two files, and the first name of one of them */
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
    if (!error)
        error = make_folder(folder, text);
    if (error)
        return error;
    if (mounted)
        error = mount_memory(folder, whole_pages(limits_size(count)) + whole_pages(limit_ledger_size(count, processes)),
                             INODES, text);
    if (!error)
        error = fill(folder, devices, count, processes, uid, text);
    if (error)
        sluice_limit_remove(folder, NULL);
    return error;
}

/* Of a region that is no file system of its own, as earlier versions made them: the three names, whatever is there. */
static enum sluice_error empty(const char *folder, struct sluice_error_text *text)
{
    int at = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (at < 0)
        return errno == ENOENT ? SLUICE_OK : limit_fail_system(text, "open", folder);
    enum sluice_error error = SLUICE_OK;
    const char *const names[] = {limits_name, unfinished_name, ledger_name};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (unlinkat(at, names[i], 0) != 0 && errno != ENOENT)
            error = limit_fail_system(text, "empty", folder);
    close(at);
    return error;
}

enum sluice_error sluice_limit_remove(const char *folder, struct sluice_error_text *text)
{
    if (sluice_limit_remove_folder(folder, NULL) == SLUICE_OK)
        return SLUICE_OK;
    enum sluice_error error = empty(folder, text);
    return error ? error : sluice_limit_remove_folder(folder, text);
}

/* ---- opening ---- */

/* Open one of the region's files, if it is a plain file of the right owner that nobody else may write. */
static enum sluice_error open_file(int at, const char *name, const char *folder, uid_t owner, int access,
                                   mode_t forbidden, int *file, size_t *size, struct sluice_error_text *text)
{
    struct stat stamp;
    *file = openat(at, name, access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (*file < 0)
        return errno == ENOENT ? sluice_fail(text, SLUICE_ERROR_UNKNOWN, "%.120s/%s: no such region", folder, name)
                               : limit_fail_system(text, name, folder);
    enum sluice_error error = SLUICE_OK;
    if (fstat(*file, &stamp) != 0)
        error = limit_fail_system(text, name, folder);
    else if (!S_ISREG(stamp.st_mode) || stamp.st_uid != owner || (stamp.st_mode & forbidden) != 0)
        error = sluice_fail(text, SLUICE_ERROR_INVALID,
                            "%.120s/%s: owner %u, mode %o: must be user %u's, and nobody else's to write", folder, name,
                            (unsigned)stamp.st_uid, (unsigned)stamp.st_mode, (unsigned)owner);
    *size = error ? 0 : (size_t)stamp.st_size;
    if (error)
        close(*file);
    return error;
}

void limit_unmap_limits(const struct limit_file *file, size_t size)
{
    if (file)
        munmap((void *)(uintptr_t)file, size);
}

enum sluice_error limit_map_limits(int at, const char *folder, uid_t owner, int access, const struct limit_file **file,
                                   size_t *size, struct sluice_error_text *text)
{
    int opened;
    enum sluice_error error = open_file(at, limits_name, folder, owner, access, 022, &opened, size, text);
    if (error)
        return error;
    void *memory = *size > 0 ? mmap(NULL, *size, PROT_READ, MAP_SHARED, opened, 0) : NULL;
    if (memory == MAP_FAILED)
        error = limit_fail_system(text, limits_name, folder);
    close(opened);
    if (!error && (error = check_file(memory, *size, folder, text)) != SLUICE_OK)
        limit_unmap_limits(memory, *size);
    *file = error ? NULL : memory;
    return error;
}

enum sluice_error limit_open_ledger(int at, const char *folder, uid_t owner, int access, int *opened, size_t *size,
                                    struct sluice_error_text *text)
{
    return open_file(at, ledger_name, folder, owner, access, 002, opened, size, text);
}

/* ---- the job's side ---- */

/* The ledger in the mapped file, its limits being those of `limits`, which the job cannot write. */
static enum sluice_error find_ledger(struct limit_region *region, const char *folder, struct sluice_error_text *text)
{
    const struct limit_file *file = region->file;
    struct sluice_ledger_shape shape = limit_shape(file->count, file->processes), found;
    size_t before = limit_ledger_offset(file->processes);
    enum sluice_error error =
        sluice_ledger_new((char *)region->shared + before, region->shared_size - before, 0, &region->ledger, text);
    if (error)
        return error;
    sluice_ledger_get_shape(region->ledger, &found);
    if (memcmp(&found, &shape, sizeof shape) != 0)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/ledger: does not fit limits; damaged", folder);
    for (uint32_t i = 0; i < file->count; i++) {
        region->ledger->limits[i] = &file->devices[i].limit;
        region->ledger->limits[file->count + i] = &file->devices[i].spill;
    }
    region->spaces = region->shared;
    region->sharing = (struct limit_sharing *)((char *)region->shared + LIMIT_SPACES_SIZE);
    return SLUICE_OK;
}

static enum sluice_error map_ledger(struct limit_region *region, int at, const char *folder, uid_t owner,
                                    struct sluice_error_text *text)
{
    int file;
    size_t size;
    enum sluice_error error = limit_open_ledger(at, folder, owner, O_RDWR, &file, &size, text);
    if (error)
        return error;
    void *memory = MAP_FAILED;
    if (size != limit_ledger_size(region->file->count, region->file->processes))
        error = sluice_fail(text, SLUICE_ERROR_CORRUPT, "%.120s/ledger: %zu bytes do not fit limits; damaged", folder,
                            size);
    else if ((memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED)
        error = limit_fail_system(text, ledger_name, folder);
    close(file);
    if (error)
        return error;
    region->shared = memory;
    region->shared_size = size;
    return find_ledger(region, folder, text);
}

enum sluice_error limit_region_open(int at, const char *folder, uid_t owner, struct limit_region *region,
                                    struct sluice_error_text *text)
{
    *region = (struct limit_region){0};
    enum sluice_error error = limit_map_limits(at, folder, owner, O_RDONLY, &region->file, &region->file_size, text);
    if (!error)
        error = map_ledger(region, at, folder, owner, text);
    if (error)
        limit_region_close(region);
    return error;
}

void limit_region_close(struct limit_region *region)
{
    sluice_ledger_free(region->ledger);
    if (region->shared)
        munmap(region->shared, region->shared_size);
    limit_unmap_limits(region->file, region->file_size);
    *region = (struct limit_region){0};
}
