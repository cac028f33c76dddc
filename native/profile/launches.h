/* SPDX-License-Identifier: Apache-2.0 */
/* What launches take the program, with and without collection: the price of an event. */
#ifndef SLUICE_PROFILE_LAUNCHES_H
#define SLUICE_PROFILE_LAUNCHES_H

#include <stddef.h>
#include <stdint.h>

#include "governor.h"

/* In the thread that launches. Where one launch is made of others, the outer one counts. */
void launches_begin(void);
void launches_end(void);

struct launches {
    _Atomic unsigned count;
    uint32_t ns[GOVERNOR_SAMPLES];
};

/* From now on launches are timed into an empty set; NULL: no more. */
void launches_time(struct launches *set);
size_t launches_timed(const struct launches *set);

#endif
