/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What people have set: the compiled policy of the site (policy.h) and the options that a user gives a job (options.h).
 * Knows no Slurm, files or clocks.
 */
#ifndef SLUICE_RULES_RULES_H
#define SLUICE_RULES_RULES_H

#include "rules/options.h"
#include "rules/policy.h"

#endif
