/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slurm's own log, for files that include no Slurm header. A message begins with "sluice: "; one about the work of a
 * single plugin with that plugin's type, e.g. "select/sluice: " (placement) or "prep/sluice: " (gangs). Outside Slurm
 * (unit tests) they go to standard error. Never from a signal handler.
 */
#ifndef SLUICE_RUNTIME_LOG_H
#define SLUICE_RUNTIME_LOG_H

/* An error that an admin should correct. */
__attribute__((format(printf, 1, 2))) void sluice_log_error(const char *format, ...);
/* A change of state. */
__attribute__((format(printf, 1, 2))) void sluice_log_info(const char *format, ...);

#endif
