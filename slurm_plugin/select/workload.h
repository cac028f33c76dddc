/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What usually arrives, counted as jobs are submitted; fragmentation-aware policies place by it
 * (sluice_cluster_set_workload). Prices are worked out anew when enough has arrived since, never for a decision.
 */
#ifndef SLUICE_SELECT_WORKLOAD_H
#define SLUICE_SELECT_WORKLOAD_H

#include "controller/mirror.h"

/* A job that asks this was submitted. O(1). */
void sluice_workload_arrival(const struct sluice_request *request);
/* Tell the mirror's cluster, if it is time to. O(nodes) then. */
void sluice_workload_refresh(struct sluice_mirror *mirror, time_t now);
/* The cluster was made anew: tell it what is known. */
void sluice_workload_apply(struct sluice_mirror *mirror);

#endif
