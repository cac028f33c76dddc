/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Profiles of a job's processes on one node: how a profile is asked for, and what the injected library
 * (libsluice_profile.so) writes. Everything here belongs to the job's user, and nobody else's program reads it.
 *
 * The library finds the folder of the profile in SLUICE_PROFILE_FOLDER. In it:
 *   control    struct sluice_profile_control, written by whoever asks
 *   *.profile  one file for each process and profile: a header, then records of 64 bytes, in no order of time
 *
 * All numbers are little-endian. Times are ns of the node's CLOCK_MONOTONIC; records of kind CLOCK say what time of
 * day that was. A file is whole after each write: its process may die at any moment, and what follows the last complete
 * record is then to be ignored. The first record has room for kind END from the start, so that a full disk can be reported: as
 * long as it is of kind 0 the process runs, or has died.
 */
#ifndef SLUICE_PROFILE_H
#define SLUICE_PROFILE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SLUICE_PROFILE_FOLDER_VARIABLE "SLUICE_PROFILE_FOLDER"
#define SLUICE_PROFILE_CONTROL_NAME "control"
#define SLUICE_PROFILE_SUFFIX ".profile"
#define SLUICE_PROFILE_MAGIC "SLUPROF1"         /* the first 8 bytes of a profile */
#define SLUICE_PROFILE_CONTROL_MAGIC "SLUPCTL1" /* and of a control file */

enum {
    SLUICE_PROFILE_VERSION = 1,
    SLUICE_PROFILE_MAX_NAME = 4096, /* bytes of a name; longer ones are cut */
};

/* What is collected: bits of `wanted`. */
enum {
    SLUICE_PROFILE_WANT_KERNELS = 1,
    SLUICE_PROFILE_WANT_COPIES = 2, /* and fills */
    SLUICE_PROFILE_WANT_SYNCHRONISATION = 4,
    SLUICE_PROFILE_WANT_MEMORY = 8, /* allocations and their release */
    SLUICE_PROFILE_WANT_CALLS = 16, /* the driver's calls, on the processor: many; not part of ALL */
    SLUICE_PROFILE_WANT_COLLECTIVES = 32,
    SLUICE_PROFILE_WANT_SAMPLES = 64, /* of the processor; not part of ALL */
    SLUICE_PROFILE_WANT_ALL = 1 | 2 | 4 | 8 | 32,
};

/* 64 bytes, replaced by rename. Processes look four times a second; a profile that is asked for starts in later ones, too. */
struct sluice_profile_control {
    char magic[8];
    uint32_t seconds;     /* that a process is profiled, from when its own profile begins; 0: without end */
    uint32_t wanted;      /* 0: no profile */
    uint64_t until;       /* ns of CLOCK_MONOTONIC at which all processes stop by themselves; 0: never */
    uint32_t budget;      /* millionths of the time that tracing may cost a process; 0: the default, 10,000 (1 %) */
    uint32_t number;      /* of the profile: another one ends it, and starts the next; a process has each once */
    uint64_t bytes;       /* the most that one process may write; 0: the default, 256 MiB */
    uint64_t reserved[3]; /* 0 */
};

/* The first 256 bytes of a profile. */
struct sluice_profile_header {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes; /* 256 */
    uint32_t record_bytes; /* 64 */
    uint32_t vendor;       /* SLUICE_PROFILE_NVIDIA, ... */
    uint64_t started;      /* CLOCK_MONOTONIC */
    uint64_t time_of_day;  /* CLOCK_REALTIME at `started` */
    uint32_t pid;          /* as the process sees it */
    uint32_t number;       /* control.number */
    uint32_t job, step;    /* SLURM_JOB_ID, SLURM_STEP_ID; UINT32_MAX: not known */
    uint32_t rank;         /* SLURM_PROCID; UINT32_MAX: not known */
    uint32_t node;         /* SLURM_NODEID; UINT32_MAX: not known */
    uint32_t wanted;       /* control.wanted */
    uint32_t budget;       /* control.budget, or the default */
    char host[64];         /* ends with 0, as the next */
    char program[64];
    char boot[40];     /* boot_id of the kernel: times of other boots are not comparable; empty: not known */
    char reserved[16]; /* 0 */
};

enum { SLUICE_PROFILE_NVIDIA = 1, SLUICE_PROFILE_AMD = 2, SLUICE_PROFILE_INTEL = 3 };

/* Kinds that a reader does not know are skipped, with their slots. */
enum sluice_profile_kind {
    SLUICE_PROFILE_NAME =
        1, /* `name` is its number, `bytes` its length; the text fills `slots` records. Comes before its use */
    SLUICE_PROFILE_DEVICE = 2, /* `device` is used from here on: its UUID, and `name`, e.g. NVIDIA H100 */
    SLUICE_PROFILE_KERNEL = 3,
    SLUICE_PROFILE_COPY = 4,
    SLUICE_PROFILE_FILL = 5,       /* a copy whose `from` is 0 */
    SLUICE_PROFILE_SYNC = 6,       /* the process waited for the device, from `start` to `end` */
    SLUICE_PROFILE_MEMORY = 7,     /* start = end */
    SLUICE_PROFILE_CALL = 8,       /* a call of the driver, on the processor; `name` is its name */
    SLUICE_PROFILE_COLLECTIVE = 9, /* a call of NCCL on the processor; `name`: AllReduce, ... */
    SLUICE_PROFILE_SAMPLE =
        10, /* of the processor, which `call.thread` uses from `start` to `end`; `name`: the function, or [the library] */
    SLUICE_PROFILE_CLOCK = 11, /* at `start` */
    SLUICE_PROFILE_GAP = 12,   /* from `start` to `end` nothing was collected */
    SLUICE_PROFILE_LOST = 13,  /* events that were dropped, and no span of time is known */
    SLUICE_PROFILE_END = 14,   /* the first record: why the profile ended, `start` to `end`; `name`: in words */
};

/* Where memory is: `from`, `to` and `where`. */
enum {
    SLUICE_PROFILE_UNKNOWN = 0,
    SLUICE_PROFILE_PAGEABLE = 1,
    SLUICE_PROFILE_PINNED = 2,
    SLUICE_PROFILE_ON_DEVICE = 3,
    SLUICE_PROFILE_ARRAY = 4,
    SLUICE_PROFILE_MANAGED = 5,
};

/* `what` of a SYNC. */
enum {
    SLUICE_PROFILE_SYNC_OTHER = 0,
    SLUICE_PROFILE_SYNC_EVENT = 1,
    SLUICE_PROFILE_SYNC_STREAM_WAIT = 2, /* a stream waits for an event; the process does not */
    SLUICE_PROFILE_SYNC_STREAM = 3,
    SLUICE_PROFILE_SYNC_CONTEXT = 4,
};

/* `reason` of a GAP, a LOST or an END. */
enum sluice_profile_reason {
    SLUICE_PROFILE_STOPPED = 1,    /* it was asked to */
    SLUICE_PROFILE_TIME = 2,       /* `until` is over */
    SLUICE_PROFILE_EXIT = 3,       /* the process ends */
    SLUICE_PROFILE_QUOTA = 4,      /* `bytes` are written */
    SLUICE_PROFILE_DISK = 5,       /* a write failed */
    SLUICE_PROFILE_BUDGET = 6,     /* tracing would have cost more than `budget` */
    SLUICE_PROFILE_BUFFERS = 7,    /* events came faster than they were written */
    SLUICE_PROFILE_LIBRARY = 8,    /* the vendor's tracing library is not there, or refuses */
    SLUICE_PROFILE_OCCUPIED = 9,   /* another profiler of the process has it, e.g. PyTorch's */
    SLUICE_PROFILE_FORBIDDEN = 10, /* LOST: not all threads are sampled, e.g. as the kernel permits none */
    SLUICE_PROFILE_RECORDED = 11,  /* LOST: ran from a command list that was recorded while nothing was collected */
};

struct sluice_profile_record {
    uint16_t kind;
    uint16_t slots;      /* records that follow and belong to it, as text */
    uint32_t device;     /* the vendor's number within the process; UINT32_MAX: none, or not known */
    uint64_t start, end; /* 0: not known */
    uint32_t context, stream;
    uint32_t correlation; /* what one call of the process caused has one number; 0: not known */
    uint32_t name;        /* a number that a record of kind NAME gave; 0: none */
    union {
        struct {
            uint32_t grid[3], block[3];
        } kernel;
        struct {
            uint64_t bytes;
            uint8_t from, to, unused[2];
            uint32_t peer; /* the other device, or UINT32_MAX */
        } copy;            /* and FILL */
        struct {
            uint64_t bytes, address;
            uint8_t where, released, unused[6];
        } memory;
        struct {
            uint32_t what, event;
        } sync;
        struct {
            uint32_t thread;
            int32_t result;
            uint64_t bytes; /* COLLECTIVE: of this rank */
            uint64_t communicator;
        } call;
        struct {
            uint64_t time_of_day; /* CLOCK_REALTIME at `start` */
            uint64_t uncertainty; /* ns between the two readings around it */
        } clock;
        struct {
            uint64_t events; /* GAP: estimated by the rate around it; LOST: counted; END: written */
            uint32_t reason, unused;
            uint64_t cost; /* END: ns that tracing has cost the process, as the governor measured it */
        } loss;
        struct {
            uint8_t uuid[16];
            uint64_t memory; /* bytes */
        } device_info;
        uint64_t bytes; /* NAME */
        uint32_t words[6];
    };
};

#ifdef __cplusplus
}
#endif

#endif
