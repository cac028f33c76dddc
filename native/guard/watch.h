/* SPDX-License-Identifier: Apache-2.0 */
/* What the guard knows: which jobs have limits, when they were watched last, which it froze, how the agent was lost. */
#ifndef SLUICE_GUARD_WATCH_H
#define SLUICE_GUARD_WATCH_H

#include "cgroup.h"
#include "message.h"

#include <stdio.h>

enum {
    GUARD_JOBS = 1024,
    GUARD_OUTAGES = 16, /* kept for the agent to report */
    GUARD_NAMED = 32,   /* jobs that are named with an outage */
    GUARD_CAUSE = 16,
    GUARD_BOUND_MS = 10000, /* until the agent says another */
};

struct guard_job {
    uint32_t number;
    unsigned vendors;
    bool frozen;   /* by this guard, or by the one before it */
    bool due;      /* it is to be frozen now, and counts as frozen already */
    bool named;    /* by the agent that runs now */
    int64_t since; /* named, frozen, or found that it cannot be */
    char path[GUARD_PATH];
};

struct guard_names {
    uint32_t count;
    uint32_t jobs[GUARD_NAMED];
};

/* A time in which jobs were not watched. */
struct guard_outage {
    uint32_t number;
    int64_t when;   /* milliseconds since 1970 */
    int64_t began;  /* on the guard's clock */
    int64_t lasted; /* milliseconds; -1: it lasts */
    char cause[GUARD_CAUSE];
    struct guard_names frozen, about; /* `about`: whose data the agent read as it died */
};

struct guard_watch {
    int64_t bound;
    int64_t started; /* the agent that runs now */
    bool ready;
    bool changed; /* what `guard_save` writes */
    struct {
        bool loops; /* the agent that runs now has such a loop */
        int64_t beat, sampled;
    } vendors[GUARD_VENDORS];
    uint32_t count;
    struct guard_job jobs[GUARD_JOBS];
    uint32_t last_outage, outage_count;
    struct guard_outage outages[GUARD_OUTAGES]; /* the oldest first */
};

struct guard_tools {
    enum guard_frost (*look)(const char *path);
    enum guard_frost (*freeze)(const char *path);
    enum guard_frost (*thaw)(const char *path);
    int64_t (*today)(void); /* milliseconds since 1970 */
    void (*save)(void);     /* what `guard_save` writes reaches the file now */
};

/* Times are milliseconds on a clock that stops while the guard itself does not run. */
void guard_start(struct guard_watch *watch, int64_t now);

/* A new agent runs from now on. */
void guard_agent_starts(struct guard_watch *watch, int64_t now);

/* The agent has ended, as `cause` says. */
void guard_agent_lost(struct guard_watch *watch, const struct guard_tools *tools, const char *cause,
                      const struct guard_names *about, int64_t now);

void guard_take(struct guard_watch *watch, const struct guard_tools *tools, const struct guard_message *message,
                int64_t now);

/* Freeze what was unwatched for too long, once that is saved; thaw what is watched again. */
void guard_tick(struct guard_watch *watch, const struct guard_tools *tools, int64_t now);

/* After `guard_load`: what the guard before this one did not come to. */
void guard_freeze_again(struct guard_watch *watch, const struct guard_tools *tools);

/* Whether one of the agent's loops has stopped. */
bool guard_hangs(const struct guard_watch *watch, int64_t now);

/* Thaw everything: the admin ends the guard. */
void guard_release(struct guard_watch *watch, const struct guard_tools *tools);

/* What outlives the guard, as lines. `guard_load` leaves out what it does not know. */
void guard_save(const struct guard_watch *watch, FILE *file);
void guard_load(struct guard_watch *watch, FILE *file, int64_t now);

/* Deaths of the agent within the minute before `today`, in milliseconds since 1970. */
uint32_t guard_deaths(const struct guard_watch *watch, int64_t today);

#endif
