/* SPDX-License-Identifier: Apache-2.0 */
/* One profile of this process, from its start to its end, in our own thread. */
#ifndef SLUICE_PROFILE_SESSION_H
#define SLUICE_PROFILE_SESSION_H

#include <stdbool.h>

#include "tracer.h"

/* Whether the profile shall go on; 0, or why not. */
typedef enum sluice_profile_reason session_asked(const struct sluice_profile_control *control);

/* Returns when the profile has ended and its file says why. */
void session_run(const struct tracer *tracer, int folder, const struct sluice_profile_control *control,
                 session_asked *asked);

/* From any thread: the process ends, and with it the profile that runs. */
void session_end(void);

/* In a child after a fork. */
void session_abandon(void);

#endif
