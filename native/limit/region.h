/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A region's files and the handle on them, shared by the library for root (limit.h) and the preloaded one.
 *
 *   limits: header | device[count]               mapped read-only; root changes `limit` in place
 *   ledger: PID namespaces (two pages) | sharing[processes] | ledger   mapped writable
 */
#ifndef SLUICE_LIMIT_REGION_H
#define SLUICE_LIMIT_REGION_H

#include "sluice/limit.h"

#include <stdatomic.h>
#include <sys/types.h>

#define LIMIT_MAGIC 0x73696d696c6c7331u
enum {
    LIMIT_VERSION = 1,
    /* The ledger knows a process by a number of 32 bits. Process numbers have 22, so that ten tell the PID namespace.
     */
    LIMIT_PID_BITS = 22,
    LIMIT_SPACES = 1 << 10,
    LIMIT_SPACES_SIZE = LIMIT_SPACES * 8,
};

/*
 * What a process shares with others, by its seat. Memory lives on in those who imported it when its exporter is dead,
 * who is then not struck off before them: too much is safe, too little is not.
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

struct sluice_limit {
    const struct limit_file *file;
    size_t file_size;
    void *shared; /* the ledger file */
    size_t shared_size;
    atomic_uint_least64_t *spaces; /* [LIMIT_SPACES]: inodes of PID namespaces, 0: free; never taken back */
    struct limit_sharing *sharing; /* [processes] */
    struct sluice_ledger *ledger;  /* device i: what is on GPU i; device count + i: what it spilled to the host */
};

/* Open the region in the folder `at`; both files must be `owner`'s. Errors as sluice_limit_open. */
enum sluice_error limit_region_open(int at, const char *folder, uid_t owner, bool may_change,
                                    struct sluice_limit *limit, struct sluice_error_text *text);
void limit_region_close(struct sluice_limit *limit);

/* The limit in force, which root may change at any time. */
static inline uint64_t limit_in_force(const struct sluice_limit *limit, uint32_t device)
{
    return __atomic_load_n(&limit->file->devices[device].limit, __ATOMIC_RELAXED);
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
uint32_t limit_ledger_pid(struct sluice_limit *limit, uint32_t pid, uint64_t space);

enum limit_depth {
    LIMIT_QUICK,      /* the caller's PID namespace */
    LIMIT_FULL,       /* and processes that live on as another program */
    LIMIT_EVERYWHERE, /* and other namespaces: for those who see them */
};

/* Strike off all who are certainly dead, as far as `self` can tell. */
enum sluice_error limit_reap_dead(struct sluice_limit *limit, const struct limit_self *self, enum limit_depth depth,
                                  uint64_t *released, uint32_t *count, struct sluice_error_text *text);

#endif
