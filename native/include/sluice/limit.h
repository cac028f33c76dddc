/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job's limits of GPU memory on one node, for root: makes, reads, changes and removes the region in which all
 * processes of the job account for what they hold. The preloaded library (libsluice_limit.so) is the other user of it.
 *
 * A region is a folder that root owns, into which the job's user alone may look (POSIX ACLs), on a tmpfs that has room
 * for its two files and no more:
 *   limits   root's; the job's user may read it: the devices and what the job may hold of each. These are in force
 *   ledger   root's; the job's user may write it: the memory ledger of sluice/core.h
 * What is in the ledger is the job's claim. Root never maps it, strikes off no process, and walks nothing that the job
 * made: figures are read from a copy of a fixed size, and removing a region is one unmount.
 *
 * The library looks for it in SLUICE_LIMIT_JOB, where the node agent binds it in the job's own mount namespace, and
 * else in SLUICE_LIMIT_FOLDER/NAME for each part NAME of its cgroup's path, the innermost first. It takes nothing from
 * the environment, and a process that finds no region, or a damaged one, gets no GPU memory.
 *
 * The contract of sluice/core.h holds here, too. Sizes are bytes.
 */
#ifndef SLUICE_LIMIT_H
#define SLUICE_LIMIT_H

#include "sluice/core.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SLUICE_LIMIT_FOLDER "/run/sluice/limit"
#define SLUICE_LIMIT_JOB SLUICE_LIMIT_FOLDER "/job"

enum {
    SLUICE_LIMIT_MAX_DEVICES = 32,
    SLUICE_LIMIT_DEFAULT_PROCESSES = 1024, /* alive at one time, of one job on one node */
    SLUICE_LIMIT_NAME_SIZE = 128,
};

/*
 * A GPU or MIG instance of the job. The library knows a device by its UUID (CUDA, NVML), its PCI address (HIP, OpenCL)
 * or its OpenCL name, whichever is given; at least one is. A GPU that is not in the list gets no memory at all; a CPU
 * that is not in it is not limited.
 */
struct sluice_limit_device {
    char uuid[SLUICE_LIMIT_NAME_SIZE]; /* as the vendor's tool prints it: GPU-..., MIG-... */
    char pci[SLUICE_LIMIT_NAME_SIZE];  /* 0000:1b:00.0; empty for a MIG instance */
    char name[SLUICE_LIMIT_NAME_SIZE]; /* CL_DEVICE_NAME, for a device that has neither */
    uint64_t total;                    /* what the device has, as its driver tells programs */
    uint64_t limit;   /* what the job's processes may hold together, driver contexts included: 1 to total */
    uint64_t context; /* what one driver context takes of it: measured; below limit */
    uint64_t spill;   /* what they may hold beyond it in host memory (managed memory); 0: nothing */
};

/* Of one device; contexts are part of charged. All but the limit is what the job's ledger says: a claim. */
struct sluice_limit_usage {
    uint64_t limit;   /* in force */
    uint64_t charged; /* now */
    uint64_t peak;    /* highest ever */
    uint64_t refused; /* allocations refused */
    uint64_t spilled; /* now, in host memory beyond the limit */
};

struct sluice_limit;

/*
 * A folder of a job's on a tmpfs of its own, which bounds what is written there to `bytes` and `inodes` and goes in one
 * step, whatever is in it. User `uid` may look into it, and nobody else but root. The caller's mount namespace must be
 * the one that jobs start from. On failure nothing is left behind. Errors: DUPLICATE: it exists; SYSTEM.
 */
enum sluice_error sluice_limit_make_folder(const char *folder, uint32_t uid, uint64_t bytes, uint32_t inodes,
                                           struct sluice_error_text *text);
/* One that is not there is no error; one that is no file system of its own must be empty. */
enum sluice_error sluice_limit_remove_folder(const char *folder, struct sluice_error_text *text);

/*
 * Make a region in `folder`, which must not exist while its parent does; `uid` is the job's user. All room is taken at
 * once, so that a full file system is found out here. On failure nothing is left behind. `mounted`: as above, on a
 * tmpfs of its own; without, the user can fill the file system that the folder is on.
 * INVALID: no identity, a text without end, or a device twice; RANGE: a limit of 0 or above total, a context that
 * leaves no room, too many devices or processes, spill above 7 limits; DUPLICATE: the folder exists; SYSTEM.
 */
enum sluice_error sluice_limit_create(const char *folder, const struct sluice_limit_device *devices, uint32_t count,
                                      uint32_t processes, uint32_t uid, bool mounted, struct sluice_error_text *text);

/*
 * A handle on a region, checked: owner, mode, size, checksum. UNKNOWN: no region there; CORRUPT: a damaged one;
 * INVALID: one that the caller does not own, or that others may write; VERSION, SYSTEM, NO_MEMORY.
 */
enum sluice_error sluice_limit_open(const char *folder, struct sluice_limit **limit, struct sluice_error_text *text);
void sluice_limit_close(struct sluice_limit *limit);

uint32_t sluice_limit_device_count(const struct sluice_limit *limit);
enum sluice_error sluice_limit_get_device(const struct sluice_limit *limit, uint32_t device,
                                          struct sluice_limit_device *terms, struct sluice_error_text *text);

/*
 * Change what the job may hold: every grant from here on is by the new limit, in running processes, too. What they hold
 * already they keep. Errors: UNKNOWN, RANGE.
 */
enum sluice_error sluice_limit_set(struct sluice_limit *limit, uint32_t device, uint64_t bytes,
                                   struct sluice_error_text *text);

/*
 * Dead processes count until one of the job's own strikes them off, for want of room. Takes a few microseconds whatever
 * is in the ledger. Errors: UNKNOWN; CORRUPT: the ledger was shortened, or says what none says.
 */
enum sluice_error sluice_limit_get_usage(struct sluice_limit *limit, uint32_t device, struct sluice_limit_usage *usage,
                                         struct sluice_error_text *text);

/*
 * Remove a region, also one that is no file system of its own; one that is not there is no error. Processes that have
 * it mapped keep it.
 */
enum sluice_error sluice_limit_remove(const char *folder, struct sluice_error_text *text);

#ifdef __cplusplus
}
#endif

#endif
