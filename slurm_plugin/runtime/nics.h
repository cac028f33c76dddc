/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which GPUs and RDMA NICs of each node are near each other: `nics.sluice.conf` in the folder of slurm.conf, written by
 * `sluice gres write --nics`; and in which plane each NIC is, by `sluice fabric discover --write`; see listing.h.
 *
 *   sluice-nics 1
 *   NODE GROUP,GROUP,... GROUP,GROUP/PLANE,...   of each GPU and each NIC, in the order of gres/gpu and gres/nic
 *   checksum = crc32:0123abcd              of all bytes before this line
 */
#ifndef SLUICE_RUNTIME_NICS_H
#define SLUICE_RUNTIME_NICS_H

#include "sluice/core.h"

#include <stddef.h>

#define SLUICE_NICS_FILE "nics.sluice.conf"

enum { SLUICE_NICS_MAX = 65536 /* nodes */, SLUICE_NICS_MAX_NAME = 63 };

struct sluice_nics;

/* Read a file's content; needs no terminating zero. On success *nics is the caller's, to be freed. Errors: INVALID
 * (`text` says the line), VERSION, CORRUPT, CAPACITY, NO_MEMORY. */
enum sluice_error sluice_nics_parse(const char *data, size_t length, struct sluice_nics **nics,
                                    struct sluice_error_text *text);
void sluice_nics_free(struct sluice_nics *nics);

/* Of a node; NULL: not known. O(log nodes). */
const struct sluice_nic_groups *sluice_nics_of(const struct sluice_nics *nics, const char *node);

#endif
