/* SPDX-License-Identifier: GPL-2.0-or-later */
/* GPUs, what shares them, and RDMA NICs in Slurm's lists of generic resources. */
#ifndef SLUICE_MIRROR_GRES_H
#define SLUICE_MIRROR_GRES_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

/* The records of a list of `gres_state_t`: NULL, where it has none, or where it is NULL. */
struct sluice_gres {
    void *gpu, *shard, *mps, *nic; /* of a node, or of a job */
};
struct sluice_gres sluice_gres_in(struct xlist *list);

/* The same of a node. */
struct sluice_node_gres {
    gres_node_state_t *gpu, *shard, *mps, *nic;
};
struct sluice_node_gres sluice_gres_of_node(const node_record_t *node);

#endif
