/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Inside of admission: the features of nodes that a job asks for, as --constraint and --prefer have them. Slurm looks
 * for nodes with those of --prefer *instead* of those of --constraint, and only where there are none for the latter
 * (job_queue_append_internal in job_scheduler.c): what a job must have is in both.
 */
#ifndef SLUICE_ADMISSION_CONSTRAINT_H
#define SLUICE_ADMISSION_CONSTRAINT_H

#include "admission/submission.h"

/*
 * Adds a feature, or alternatives "a|b", to the job's constraint, and to its preferred features where it has any: "x&y"
 * becomes "x&y&a", or "x&y&(a|b)". False, with a refusal that says `because`, where what the user wrote is more than
 * features, and alternatives in parentheses, joined by &.
 */
bool sluice_require_feature(const struct sluice_submission *submission, const char *feature, const char *because,
                            struct sluice_admission *admission);

/* Whether the constraint, as it is now, is a list joined by & that has the feature. Does not read --prefer. */
bool sluice_has_feature(const struct sluice_submission *submission, const struct sluice_admission *admission,
                        const char *feature);

#endif
