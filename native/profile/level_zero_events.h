/* SPDX-License-Identifier: Apache-2.0 */
/* Events of our own in the program's contexts, each with the work whose times it gets. The caller holds a lock. */
#ifndef SLUICE_PROFILE_LEVEL_ZERO_EVENTS_H
#define SLUICE_PROFILE_LEVEL_ZERO_EVENTS_H

#include "level_zero.h"

struct ze_context;

struct ze_work {
    struct sluice_profile_record record;
    const char *name;
    const struct ze_gpu *gpu;
    struct ze_context *context;
    ze_handle event, theirs; /* `theirs`: the program's, which a barrier signals or whose times are copied */
    struct ze_times *times;  /* what the device copies from the program's event; NULL: it cannot */
    bool copied;             /* it does so */
    bool recorded, under_way;
    struct ze_work *next;    /* free, or under way */
    struct ze_work *sibling; /* in a recorded list */
};

/* NULL: no memory. */
struct ze_context *ze_context_of(ze_handle handle);
/* The same, if it is known. */
struct ze_context *ze_context_find(ze_handle handle);
ze_handle ze_context_handle(const struct ze_context *context);
uint32_t ze_context_number(const struct ze_context *context);

/* One that is free, or NULL: all are in use, and there may be no more. */
struct ze_work *ze_event_take(struct ze_context *context);
void ze_event_return(struct ze_work *work);

/* Those of one context, which is then forgotten; of all. */
void ze_events_destroy(struct ze_context *context);
void ze_events_destroy_all(void);
/* Whether any is in use. */
bool ze_events_used(void);

#endif
