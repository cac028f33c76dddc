/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What usually arrives, counted as jobs are submitted; fragmentation-aware policies place by it
 * (sluice_cluster_set_workload). Prices are computed again when enough jobs have arrived since, never for a decision.
 */
#ifndef SLUICE_HOOK_WORKLOAD_H
#define SLUICE_HOOK_WORKLOAD_H

#include "mirror/mirror.h"

/* A job with this request was submitted. O(1). */
void sluice_workload_arrival(const struct sluice_request *request);
/* Set it in the mirror's cluster, if it is time to. O(nodes) then. */
void sluice_workload_refresh(struct sluice_mirror *mirror, time_t now);
/* The cluster was made again: set what is known. */
void sluice_workload_apply(struct sluice_mirror *mirror);

#endif
