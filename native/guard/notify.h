/* SPDX-License-Identifier: Apache-2.0 */
/* What the guard tells systemd, its parent, as sd_notify(3) does: a datagram to $NOTIFY_SOCKET. */
#ifndef SLUICE_GUARD_NOTIFY_H
#define SLUICE_GUARD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* Takes the socket and WatchdogSec= from the environment, which the agent does not inherit. Without them nothing is
 * sent. */
void guard_notify_open(void);

/* `state`: lines as in sd_notify(3). False if systemd's queue is full: the guard never waits. */
bool guard_notify(const char *state);

/* The start goes on, for another minute at least: to be called again and again. `now`: milliseconds. */
void guard_notify_start_lasts(int64_t now);

/* The guard goes on: sent four times within WatchdogSec=. `now`: milliseconds. */
void guard_notify_alive(int64_t now);

#endif
