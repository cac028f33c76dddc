/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What people have set: the compiled policy of the site (policy.h), the options that a user gives a job (options.h), and
 * the trace that it is submitted in (trace.h). Knows no Slurm, files or clocks.
 */
#ifndef SLUICE_RULES_RULES_H
#define SLUICE_RULES_RULES_H

#include "rules/options.h"
#include "rules/policy.h"
#include "rules/trace.h"

#endif
