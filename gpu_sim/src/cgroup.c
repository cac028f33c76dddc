/* Limits on the device memory of cgroups, as NVIDIA's driver has them from R615: kept in a file next to the state, by
 * the cgroup's inode, so that one that is removed takes its limit along. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "sim.h"

#define MOST_LIMITS 4096
#define CGROUP2_MAGIC 0x63677270

struct record {
    uint64_t inode; /* of the cgroup's folder; 0: free */
    uint64_t gpu;
    uint64_t soft, hard;
};

static const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};

/* The inode of a cgroup; 0 for what is none of version 2. */
static uint64_t inode_of(const char *folder)
{
    struct statfs kind;
    struct stat stamp;
    return statfs(folder, &kind) == 0 && kind.f_type == CGROUP2_MAGIC && stat(folder, &stamp) == 0 ? stamp.st_ino : 0;
}

static int open_limits(int flags)
{
    char path[4200];
    return sim_next_to_state("limits", path, sizeof path) ? open(path, flags | O_CLOEXEC, 0644) : -1;
}

static unsigned read_limits(int fd, struct record **records)
{
    struct stat stamp;
    *records = NULL;
    if (fd < 0 || fstat(fd, &stamp) != 0 || stamp.st_size < (off_t)sizeof **records) {
        return 0;
    }
    size_t most = MOST_LIMITS * sizeof **records;
    size_t size = (size_t)stamp.st_size < most ? (size_t)stamp.st_size : most;
    *records = malloc(size);
    ssize_t got = *records != NULL ? pread(fd, *records, size, 0) : -1;
    return got > 0 ? (unsigned)((size_t)got / sizeof **records) : 0;
}

static const struct record *find(const struct record *records, unsigned count, unsigned index, uint64_t inode)
{
    for (unsigned i = 0; inode != 0 && i < count; i++) {
        if (records[i].inode == inode && records[i].gpu == index) {
            return &records[i];
        }
    }
    return NULL;
}

/* The folder of a process's cgroup; false where it has none of version 2, or none that is seen here. */
static bool cgroup_of(const char *pid, char *folder, size_t size)
{
    char path[64], line[PATH_MAX + 8];
    snprintf(path, sizeof path, "/proc/%s/cgroup", pid);
    FILE *file = fopen(path, "re");
    bool found = false;
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        found = strncmp(line, "0::", 3) == 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    for (size_t i = 0; found && i < sizeof mounts / sizeof *mounts; i++) {
        line[strcspn(line, "\n")] = 0;
        snprintf(folder, size, "%s%s", mounts[i], line + 3);
        if (inode_of(folder) != 0) {
            return true;
        }
    }
    return false;
}

/* The nearest limited cgroup at or above a folder, which is cut to it. */
static const struct record *nearest(const struct record *records, unsigned count, unsigned index, char *folder)
{
    for (;;) {
        const struct record *it = find(records, count, index, inode_of(folder));
        char *slash = strrchr(folder, '/');
        if (it != NULL || slash == NULL || slash == folder) {
            return it;
        }
        *slash = 0;
    }
}

/* What all processes in a limited cgroup hold; those below it with limits of their own are theirs to count. */
static uint64_t used_in(unsigned index, const struct record *records, unsigned count, const struct record *it)
{
    struct sim_gpu gpu;
    if (!sim_peek(index, &gpu)) {
        return 0;
    }
    unsigned uses_count = sim_uses(index, &gpu, SIM_NO_INSTANCE, NULL, 0);
    struct sim_use *uses = calloc(uses_count + 1, sizeof *uses);
    unsigned found = uses != NULL ? sim_uses(index, &gpu, SIM_NO_INSTANCE, uses, uses_count) : 0;
    uint64_t bytes = 0;
    for (unsigned i = 0; i < found && i < uses_count; i++) {
        char pid[16], folder[PATH_MAX + 64];
        snprintf(pid, sizeof pid, "%u", uses[i].pid);
        if (cgroup_of(pid, folder, sizeof folder) && nearest(records, count, index, folder) == it) {
            bytes += uses[i].bytes;
        }
    }
    free(uses);
    return bytes;
}

enum sim_status sim_limit_cgroup(unsigned index, const char *folder, uint64_t soft, uint64_t hard)
{
    uint64_t inode = inode_of(folder);
    if (geteuid() != 0) {
        return SIM_DENIED;
    }
    if (inode == 0) {
        return SIM_NO_DEVICE;
    }
    int fd = open_limits(O_RDWR | O_CREAT);
    if (fd < 0) {
        return SIM_DENIED;
    }
    while (flock(fd, LOCK_EX) != 0 && errno == EINTR) {
    }
    struct record *records;
    unsigned count = read_limits(fd, &records), place = 0;
    const struct record *old = find(records, count, index, inode);
    bool none = soft == 0 && hard == SIM_NO_LIMIT;
    if (old != NULL) {
        place = (unsigned)(old - records);
    } else {
        while (place < count && records[place].inode != 0) {
            place++;
        }
    }
    struct record fresh = {.inode = none ? 0 : inode, .gpu = index, .soft = soft, .hard = hard};
    bool done = (none && old == NULL) ||
                (place < MOST_LIMITS &&
                 pwrite(fd, &fresh, sizeof fresh, (off_t)(place * sizeof fresh)) == (ssize_t)sizeof fresh);
    free(records);
    close(fd);
    return done ? SIM_OK : SIM_IO;
}

enum sim_status sim_cgroup_limits(unsigned index, const char *folder, struct sim_cgroup_limit *limit)
{
    int fd = open_limits(O_RDONLY);
    struct record *records;
    unsigned count = read_limits(fd, &records);
    const struct record *it = find(records, count, index, inode_of(folder));
    if (it != NULL) {
        *limit = (struct sim_cgroup_limit){it->soft, it->hard, used_in(index, records, count, it)};
    }
    enum sim_status status = it != NULL ? SIM_OK : SIM_NO_DEVICE;
    free(records);
    if (fd >= 0) {
        close(fd);
    }
    return status;
}

bool sim_process_cgroup_limits(unsigned index, struct sim_cgroup_limit *limit)
{
    int fd = open_limits(O_RDONLY);
    if (fd < 0) {
        return false;
    }
    struct record *records;
    unsigned count = read_limits(fd, &records);
    char folder[PATH_MAX + 64];
    const struct record *it =
        count > 0 && cgroup_of("self", folder, sizeof folder) ? nearest(records, count, index, folder) : NULL;
    if (it != NULL) {
        *limit = (struct sim_cgroup_limit){it->soft, it->hard, used_in(index, records, count, it)};
    }
    bool limited = it != NULL;
    free(records);
    close(fd);
    return limited;
}
