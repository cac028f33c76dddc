/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This process's part in its job's region: it finds the region, takes a seat in the ledger, and charges. Everything
 * that belongs to one process is in memory that the kernel wipes in a forked child (MADV_WIPEONFORK): a child has no
 * seat and holds nothing until it uses a GPU itself, without any fork handler.
 */
#ifndef SLUICE_LIMIT_SESSION_H
#define SLUICE_LIMIT_SESSION_H

#include "region.h"
#include "table.h"

/* Instead of a device of the ledger. */
enum {
    LIMIT_NO_LIMIT = -1,  /* not limited: the host's own memory */
    LIMIT_CLOSED = -2,    /* no memory at all: a GPU that is not the job's, or no region to account in */
    LIMIT_NO_DEVICE = -3, /* the driver knows no such device: it refuses, with its own error */
};

enum { LIMIT_ORDINALS = 64 };
enum { LIMIT_CUDA, LIMIT_HIP, LIMIT_DRIVERS };

struct limit_device {
    pthread_mutex_t lock; /* of this device's figures below */
    uint64_t small;       /* bytes in pieces that share pages */
    uint32_t contexts;
    uint64_t owed; /* a driver took it without asking; nothing is granted before it is charged */
};

struct limit_session {
    atomic_int state;
    uint32_t process; /* in the ledger */
    struct limit_self self;
    struct limit_sharing *sharing; /* of this process */
    struct limit_region region;
    struct limit_table table;
    struct limit_device devices[SLUICE_LIMIT_MAX_DEVICES];
    atomic_schar ordinals[LIMIT_DRIVERS][LIMIT_ORDINALS]; /* ledger's device by ordinal; 0: not asked yet */
    pthread_mutex_t pools, objects, contexts; /* of the wrappers: pools and graphs; virtual memory; primary contexts */
    void *primary[LIMIT_ORDINALS];            /* CUDA's primary contexts */
    bool opened[SLUICE_LIMIT_MAX_DEVICES];    /* where OpenCL or HIP has a context */
    void *in_files;                           /* physical memory that only exported files keep */
    struct limit_pool_record *pool_list;      /* pools that this process is charged for */
    uint64_t last_graph;                      /* launched, and has its memory still; under `pools` */
    atomic_uint graphs, spills, late_looks;   /* how many need attention; 0 spares looking */
};

/* The session, in order to charge; NULL: there is no region, or it is damaged. Says so once, on standard error. */
struct limit_session *limit_session(void);

/* The device with this UUID, PCI address or OpenCL name (each may be NULL); LIMIT_CLOSED: it is not the job's. */
int limit_device(const unsigned char uuid[16], const char *pci, const char *name);

/* Charge bytes before the driver is asked for them; false: over the limit, or closed. Processes that died are
 * reaped. 0 bytes are refused, too, while something is owed: the driver may hand that out. */
bool limit_take(int device, uint64_t bytes);
void limit_give(int device, uint64_t bytes);
/* The driver holds bytes that no program asked for: charge them now or, when there is no room, before anything else. */
void limit_owe(int device, uint64_t bytes);
bool limit_owes(int device);

/* The same of host memory beyond the limit. */
bool limit_take_spill(int device, uint64_t bytes);
void limit_give_spill(int device, uint64_t bytes);

/* One more or one less driver context on the device. */
bool limit_open_context(int device);
void limit_close_context(int device);

/*
 * A piece of memory as drivers hand it out: in pages of `granule` bytes, of which pieces below half a page share some.
 * Fills device, bytes and small of the entry.
 */
bool limit_take_piece(int device, uint64_t size, uint64_t granule, struct limit_entry *entry);
void limit_give_piece(const struct limit_entry *entry, uint64_t granule);

/*
 * Narrow a driver's figures for a device to what the job may hold and what of it is left; `left` may be NULL. Spill
 * counts: it can be had by the same calls.
 */
void limit_narrow(int device, size_t *left, size_t *total);
/* What the job's living processes hold of it. */
uint64_t limit_charged(int device);

/* While a wrapper calls the vendor's function, what that calls in turn is the vendor's own business. */
extern __thread int limit_inside __attribute__((tls_model("initial-exec"), visibility("hidden")));
#define LIMIT_IN(EXPRESSION)                                                                                           \
    __extension__({                                                                                                    \
        limit_inside++;                                                                                                \
        __auto_type inner_result = (EXPRESSION);                                                                       \
        limit_inside--;                                                                                                \
        inner_result;                                                                                                  \
    })

#endif
