/* SPDX-License-Identifier: Apache-2.0 */
/* The supervisor's log: standard error, which systemd keeps. */
#ifndef SLUICE_SUPERVISOR_SAY_H
#define SLUICE_SUPERVISOR_SAY_H

__attribute__((format(printf, 1, 2))) void sluice_say(const char *format, ...);

#endif
