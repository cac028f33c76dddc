/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The RDMA NICs of Slurm's nodes (gres/nic), and which GPUs are near them. On a node of which that is not known, or
 * known otherwise than Slurm has it, NICs are counted and near no GPU.
 */
#ifndef SLUICE_MIRROR_NICS_H
#define SLUICE_MIRROR_NICS_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "sluice/core.h"

/* What is known of a node's GPUs and NICs by its name; NULL: nothing. */
typedef const struct sluice_nic_groups *(*sluice_nic_groups_fn)(const char *node);
/* From where mirrors have it from now on. What it returns may change under config write alone; mirrors are made again
 * after sluice_mirrors_outdated. */
void sluice_nics_near(sluice_nic_groups_fn of_node);

/* Of what type a NIC is, as the core's kind; below SLUICE_MAX_NIC_KINDS. */
typedef uint8_t (*sluice_nic_kind_fn)(void *argument, const char *type);

/* The node's NICs, which has so many GPUs; without any nic_count is 0. False: Slurm has NICs there that it does not
 * distinguish (no File, `no_consume`), or more than the core can. */
bool sluice_nics_of_node(const node_record_t *node, uint32_t gpu_count, sluice_nic_kind_fn kind, void *argument,
                         struct sluice_nic_groups *nics);

/* Which of the first `count` NICs jobs hold, by the node's record; 0 where they are not distinguished. */
uint32_t sluice_nics_held(const gres_node_state_t *nic, uint32_t count);

/* Of these NICs those of a type (a job's type_id; 0: of any). */
uint32_t sluice_nics_of_type(const gres_node_state_t *nic, uint32_t type_id);

#endif
