/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * GPUs and RDMA NICs (gres/nic) of one job that are near each other. Where the request says how many NICs the job has on
 * each node, the core has chosen them with its nodes and GPUs; here is what is done where it has not, and stock's choice
 * is exchanged. Jobs that ask for no NIC or for whole nodes are left alone, and so are nodes that nics.sluice.conf does
 * not know or knows otherwise than Slurm.
 */
#ifndef SLUICE_HOOK_NICS_H
#define SLUICE_HOOK_NICS_H

#include "mirror/mirror.h"

/* Which GPUs and NICs are near each other is in nics.sluice.conf (runtime/nics.h). */
void sluice_nics_start(void);
/* Read the file if it is another than before, and have all mirrors made again; it may be gone. One that cannot be used
 * is logged, and the last good one stays in force. Whenever Slurm reads slurm.conf, under config write. */
void sluice_nics_read(void);
void sluice_nics_stop(void);

/* Before stock has picked: exchange the GPUs of a part without NICs for ones near NICs that are free, where the job asks
 * for so many NICs on each node. True if they are others now. */
bool sluice_nics_pair(struct sluice_mirror *mirror, const job_record_t *job, struct sluice_part *part);

/* Afterwards: exchange the NICs that stock picked on the part's node for the part's, or else for as many near its GPUs. */
void sluice_nics_choose(struct sluice_mirror *mirror, const job_record_t *job, const struct sluice_part *part);

#endif
