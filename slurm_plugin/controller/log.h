/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slurm's own log, for files that include no Slurm header. Messages begin with the plugin's type, e.g. "select/sluice:
 * ...". Outside Slurm (unit tests) they go to standard error. Never from a signal handler.
 */
#ifndef SLUICE_CONTROLLER_LOG_H
#define SLUICE_CONTROLLER_LOG_H

/* Something that an admin should see to. */
__attribute__((format(printf, 1, 2))) void sluice_log_error(const char *format, ...);
/* A change of state. */
__attribute__((format(printf, 1, 2))) void sluice_log_info(const char *format, ...);

#endif
