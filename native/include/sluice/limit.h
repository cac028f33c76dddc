/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job's limits of GPU memory on one node, for root: makes, reads, changes and removes the region in which all
 * processes of the job account for what they hold. The preloaded library (libsluice_limit.so) is the other user of it.
 *
 * A region is a folder that root owns:
 *   limits   root's, read-only for everyone else: the devices and what the job may hold of each
 *   ledger   root's, writable for root and the job's user alone (a POSIX ACL): the memory ledger of sluice/core.h
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

/* Of one device; contexts are part of charged. */
struct sluice_limit_usage {
    uint64_t limit;
    uint64_t charged; /* now */
    uint64_t peak;    /* highest ever */
    uint64_t refused; /* allocations refused */
    uint64_t spilled; /* now, in host memory beyond the limit */
};

struct sluice_limit_process {
    uint32_t id;    /* for sluice_limit_process_usage */
    uint32_t pid;   /* in its own PID namespace */
    uint64_t space; /* that namespace: inode of /proc/PID/ns/pid */
    uint64_t start; /* field 22 of /proc/PID/stat */
};

struct sluice_limit;

/*
 * Make a region in `folder`, which must not exist while its parent does; `uid` is the job's user. All room is taken at
 * once, so that a full file system is found out here. On failure nothing is left behind.
 * INVALID: no identity, a text without end, or a device twice; RANGE: a limit of 0 or above total, a context that
 * leaves no room, too many devices or processes, spill above 7 limits; DUPLICATE: the folder exists; SYSTEM.
 */
enum sluice_error sluice_limit_create(const char *folder, const struct sluice_limit_device *devices, uint32_t count,
                                      uint32_t processes, uint32_t uid, struct sluice_error_text *text);

/*
 * A handle on a region, checked: owner, mode, size, checksum, ledger. UNKNOWN: no region there; CORRUPT: a damaged one;
 * INVALID: one that the caller does not own, or that others may write; VERSION, SYSTEM, NO_MEMORY.
 */
enum sluice_error sluice_limit_open(const char *folder, struct sluice_limit **limit, struct sluice_error_text *text);
void sluice_limit_close(struct sluice_limit *limit);

uint32_t sluice_limit_device_count(const struct sluice_limit *limit);
enum sluice_error sluice_limit_get_device(const struct sluice_limit *limit, uint32_t device,
                                          struct sluice_limit_device *terms, struct sluice_error_text *text);

/* Change what the job may hold; running processes see it with their next call. Errors: UNKNOWN, RANGE. */
enum sluice_error sluice_limit_set(struct sluice_limit *limit, uint32_t device, uint64_t bytes,
                                   struct sluice_error_text *text);

enum sluice_error sluice_limit_get_usage(struct sluice_limit *limit, uint32_t device, struct sluice_limit_usage *usage,
                                         struct sluice_error_text *text);

/* Up to `room` processes of the job that hold or held memory; *count may be more. */
enum sluice_error sluice_limit_processes(struct sluice_limit *limit, uint32_t room,
                                         struct sluice_limit_process *processes, uint32_t *count,
                                         struct sluice_error_text *text);

/* What one of them holds of a device, its contexts included. UNKNOWN: it is struck off meanwhile. */
enum sluice_error sluice_limit_process_usage(struct sluice_limit *limit, uint32_t process, uint32_t device,
                                             uint64_t *bytes, struct sluice_error_text *text);

/*
 * Strike off the processes that have ended, and give back what they held. A process of another PID namespace is only
 * judged by a caller who sees it, as root outside of it does. *released: bytes, all devices; *count: processes.
 */
enum sluice_error sluice_limit_reap(struct sluice_limit *limit, uint64_t *released, uint32_t *count,
                                    struct sluice_error_text *text);

/* Every device's charge is the sum of its processes'; CORRUPT says where not, or that a limit was tampered with. */
enum sluice_error sluice_limit_audit(struct sluice_limit *limit, struct sluice_error_text *text);

/* Remove a region's folder and files; one that is not there is no error. Processes that have it mapped keep it. */
enum sluice_error sluice_limit_remove(const char *folder, struct sluice_error_text *text);

#ifdef __cplusplus
}
#endif

#endif
