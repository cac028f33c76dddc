/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The settings of an admin: the level and the compiled policy, as immutable snapshots.
 *
 * Two files in slurm.conf's folder: `sluice.level` (one word, see enum sluice_level; missing: off) and `sluice.policy`
 * (the compiled policy; missing or empty: none). They are checked every second and at `scontrol reconfigure`; if a file
 * cannot be read or is damaged, the last good one stays in force, and this is logged. Removing the policy file removes
 * the policy.
 */
#ifndef SLUICE_RUNTIME_SETTINGS_H
#define SLUICE_RUNTIME_SETTINGS_H

#include "rules/rules.h"

#include <time.h>

/* Ordered: each level does all that those before it do. */
enum sluice_level {
    SLUICE_LEVEL_OFF = 0,    /* nothing: stock Slurm */
    SLUICE_LEVEL_ADMIT = 1,  /* submissions are checked and completed */
    SLUICE_LEVEL_SHADOW = 2, /* order and placement are decided and recorded, but stock's are used */
    SLUICE_LEVEL_PLACE = 3,  /* order and placement are used */
};

#define SLUICE_LEVEL_FILE "sluice.level"
#define SLUICE_POLICY_FILE "sluice.policy"

struct sluice_settings {
    enum sluice_level level;          /* the file's, but OFF while there is no policy, or an empty one */
    enum sluice_level asked;          /* the file's */
    const struct sluice_rules *rules; /* never NULL; without a policy: an empty one */
    uint64_t generation;              /* grows with each change of level or rules */
    uint64_t rules_generation;        /* grows with each change of rules */
};

/* The level in force. One atomic load: the first question of every hook. */
enum sluice_level sluice_settings_level(void);

/*
 * The settings in force, which stay as they are until they are released; never NULL between the controller's start and
 * stop. Some tens of nanoseconds; hold them for one decision, not for long.
 */
const struct sluice_settings *sluice_settings_acquire(void);
void sluice_settings_release(const struct sluice_settings *settings);

/* Check the files soon, in the background: for reconfigure hooks. */
void sluice_settings_wake(void);

/* "off", "admit" ...; static storage. */
const char *sluice_level_name(enum sluice_level level);
/* The level of that name; false, and *level as it was, when there is none. */
bool sluice_level_by_name(const char *name, enum sluice_level *level);

/* What is known of the two files, for the status. */
struct sluice_settings_state {
    enum sluice_level level, asked;
    time_t level_loaded, policy_loaded; /* when what is in force was read; 0: never */
    bool policy;                        /* one is in force */
    uint32_t checksum, tenants, classes, warnings;
    int64_t generated_s;
    uint64_t generation;
    char source[SLUICE_RULES_MAX_NAME + 1];
    char level_error[512], policy_error[512]; /* why the file as it is now is not in force; empty: it is */
    char warning[SLUICE_ERROR_TEXT_SIZE];     /* the first of the policy's */
};
void sluice_settings_describe(struct sluice_settings_state *state);

/* For controller.c: read the files in `folder` now, and follow them; and the reverse. */
bool sluice_settings_start(const char *folder);
void sluice_settings_stop(void);
/* That folder: slurm.conf's. As long as the settings. */
const char *sluice_settings_folder(void);
/* Check the files now. For the ticker and for tests. */
void sluice_settings_reload(void);

#endif
