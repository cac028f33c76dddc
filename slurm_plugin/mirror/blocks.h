/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The blocks of topology/block, from slurmctld's own words for them: one reader for topology.conf and topology.yaml.
 */
#ifndef SLUICE_MIRROR_BLOCKS_H
#define SLUICE_MIRROR_BLOCKS_H

#include "sluice/core.h"

/* Base blocks in Slurm's order; names are cut off. */
struct sluice_block_names {
    char (*names)[128];
    uint32_t count, room;
};

/* Read what `scontrol show topology` shows (24.11 and later), which is overwritten. False: these are no such blocks, or
 * more than there is room for. O(length). */
bool sluice_blocks_read(char *text, struct sluice_block_names *names, struct sluice_blocks *blocks);

#endif
