/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A region's files, and the handles on them: root's (root.c) and the job's (limit_region), in the preloaded library.
 *
 *   limits: header | device[count]               mapped by both; root changes `limit` in place
 *   ledger: PID namespaces (two pages) | sharing[processes] | ledger   mapped by the job, writable; copied by root
 */
#ifndef SLUICE_LIMIT_REGION_H
#define SLUICE_LIMIT_REGION_H

#include "sluice/limit.h"

#include <stdatomic.h>
#include <sys/types.h>

#define LIMIT_MAGIC 0x73696d696c6c7331u
enum {
    LIMIT_VERSION = 1,
    /* The ledger knows a process by a number of 32 bits. Process numbers have 22, so that ten are for the PID
     * namespace. */
    LIMIT_PID_BITS = 22,
    LIMIT_SPACES = 1 << 10,
    LIMIT_SPACES_SIZE = LIMIT_SPACES * 8,
    LIMIT_NODE_SPACE = 0, /* the place of root's own, whose processes see those of all */
};

/*
 * What a process shares with others, by its seat. Memory lives on in the processes that imported it when its exporter
 * is dead, which is then not struck off before them: too much is safe, too little is not.
 */
struct limit_sharing {
    atomic_uint exports; /* not 0: it exported memory */
    atomic_uint imports; /* how many pieces of others' it holds */
};

struct limit_file {
    uint64_t magic;
    uint32_t version;
    uint32_t count;
    uint32_t processes;
    uint32_t uid;
    uint64_t checksum; /* over all of the file, this field and the devices' limits taken as 0 */
    struct sluice_limit_device devices[];
};

/* What a region has room for, and where in its file the ledger begins. */
struct sluice_ledger_shape limit_shape(uint32_t count, uint32_t processes);
size_t limit_ledger_offset(uint32_t processes);
size_t limit_ledger_size(uint32_t count, uint32_t processes); /* of the whole file */

enum sluice_error limit_fail_system(struct sluice_error_text *text, const char *what, const char *path);

/* Whether a limit can be set on a device. */
enum sluice_error limit_check(uint32_t i, const struct sluice_limit_device *device, uint64_t limit,
                              struct sluice_error_text *text);

/* The file of limits in the folder `at`, mapped read-only and checked; both files must be `owner`'s. */
enum sluice_error limit_map_limits(int at, const char *folder, uid_t owner, int access, const struct limit_file **file,
                                   size_t *size, struct sluice_error_text *text);
void limit_unmap_limits(const struct limit_file *file, size_t size);

/* The file of the ledger, open, and what size it has now, which the job's user can change. */
enum sluice_error limit_open_ledger(int at, const char *folder, uid_t owner, int access, int *opened, size_t *size,
                                    struct sluice_error_text *text);

/* A region in the hands of a job's process. */
struct limit_region {
    const struct limit_file *file;
    size_t file_size;
    void *shared; /* the ledger file */
    size_t shared_size;
    atomic_uint_least64_t *spaces; /* [LIMIT_SPACES]: inodes of PID namespaces, 0: free; never taken back */
    struct limit_sharing *sharing; /* [processes] */
    struct sluice_ledger *ledger;  /* device i: what is on GPU i; device count + i: what it spilled to the host */
};

/* Open the region in the folder `at`; both files must be `owner`'s. Errors as sluice_limit_open. */
enum sluice_error limit_region_open(int at, const char *folder, uid_t owner, struct limit_region *region,
                                    struct sluice_error_text *text);
void limit_region_close(struct limit_region *region);

/* The limit in force, which root may change at any time. */
static inline uint64_t limit_in_force(const struct limit_file *file, uint32_t device)
{
    return __atomic_load_n(&file->devices[device].limit, __ATOMIC_RELAXED);
}

/* How the caller knows itself: number in its own PID namespace, that namespace, start time (0: unknown). */
struct limit_self {
    uint32_t pid;
    uint64_t space;
    uint64_t start;
    bool proc; /* /proc is of this namespace, so that its numbers mean the same processes */
};
struct limit_self limit_self(void);

/* The number under which the ledger knows a process; 0: too many namespaces. */
uint32_t limit_ledger_pid(struct limit_region *region, uint32_t pid, uint64_t space);

/* Whether a process of this number is in the ledger. */
bool limit_has_joined(const struct limit_region *region, uint32_t ledger_pid);

enum limit_depth {
    LIMIT_QUICK,      /* the caller's PID namespace */
    LIMIT_FULL,       /* there, and processes that live on as another program */
    LIMIT_EVERYWHERE, /* the other namespaces, where the caller sees them */
};

/*
 * Strike off all who are certainly dead, as far as `self` can know within LIMIT_REAP_MS of the thread's own time. From
 * a container the processes of another one are not visible: that is for a process of the node's own PID namespace.
 */
enum { LIMIT_REAP_MS = 1000 };
enum sluice_error limit_reap_dead(struct limit_region *region, const struct limit_self *self, enum limit_depth depth,
                                  uint64_t *released, uint32_t *count, struct sluice_error_text *text);

#endif
