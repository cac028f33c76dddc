/* SPDX-License-Identifier: Apache-2.0 */
/* What the node agent sends to its guard: one message a packet, with text that only the agent makes. */
#ifndef SLUICE_GUARD_MESSAGE_H
#define SLUICE_GUARD_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { GUARD_PATH = 256, GUARD_MESSAGE = 512 };

enum guard_vendor { GUARD_NVIDIA, GUARD_AMD, GUARD_INTEL, GUARD_VENDORS };

enum guard_kind {
    GUARD_READY,  /* ready: it answers, and has named all jobs that are to be watched */
    GUARD_BEAT,   /* beat VENDOR: the vendor's loop goes on, whether or not its driver answers */
    GUARD_SAMPLE, /* sample VENDOR: the vendor's processes were looked at just now */
    GUARD_WATCH,  /* watch JOB VENDOR[,VENDOR...] PATH: the job has limits; PATH: the folder of its cgroup */
    GUARD_FORGET, /* forget JOB */
    GUARD_BOUND,  /* bound SECONDS: how long a job may run unwatched; 0: for ever */
};

struct guard_message {
    enum guard_kind kind;
    enum guard_vendor vendor;
    unsigned vendors; /* a bit each */
    uint32_t job;
    uint32_t seconds;
    char path[GUARD_PATH];
};

/* False if it is not a message. */
bool guard_parse(const char *text, size_t length, struct guard_message *message);

/* Whether a path may be that of a job's cgroup: absolute, plain, its last word `job_N` or a SLUID. */
bool guard_path_is_job(const char *path);

/* The bit set of a list `nvidia,amd`, 0 where it is none. */
unsigned guard_vendors_of(const char *text, size_t length);

extern const char *const guard_vendor_names[GUARD_VENDORS];

#endif
