/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What a job asks of GPUs, read from Slurm's own request strings (--gres, --gpus, --gpus-per-node, ... arrive as
 * "gres:gpu:h100:2,gres:shard:10240" in 22.05 and with a slash after gres since 23.11). Stricter than Slurm's parsers,
 * which look for "gres" anywhere in a string and take "+8", " 8" or a product that overflows for a count: what they
 * might read differently is refused here, so that no spelling escapes a limit.
 */
#ifndef SLUICE_ADMISSION_TRES_H
#define SLUICE_ADMISSION_TRES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SLUICE_GPU_TYPES_MAX = 8, /* types of GPU that one job may name */
    SLUICE_GPU_TYPE_LENGTH = 63,
    SLUICE_TRES_TEXT_MAX = 512, /* a longer request is refused */
};

/* No count of GRES is larger: sums and products of some of them stay below 2^63. */
#define SLUICE_GRES_COUNT_MAX (UINT64_C(1) << 32)

/* What a count is per. */
enum sluice_per { SLUICE_PER_JOB, SLUICE_PER_NODE, SLUICE_PER_SOCKET, SLUICE_PER_TASK, SLUICE_PER_COUNT };

/* Counts of one kind of GRES, and of one type where the user named it; 0 is "not asked". */
struct sluice_gres_counts {
    char type[SLUICE_GPU_TYPE_LENGTH + 1]; /* "" without */
    uint64_t per[SLUICE_PER_COUNT];
};

struct sluice_tres_request {
    struct sluice_gres_counts gpus[SLUICE_GPU_TYPES_MAX];
    size_t gpu_types;                      /* used entries of `gpus` */
    struct sluice_gres_counts shards, mps; /* types add up: they share the same GPUs' memory */
    bool shards_typed;                     /* somebody wrote shard:TYPE:N */
    bool gpus_differ;                      /* the same GPUs were asked for with different counts */
};

/*
 * Adds what `text` (NULL or "" for nothing) asks per `per`. Of several counts of the same GPUs the last one holds, as in
 * Slurm. False with one line in `why` when it cannot be read, or names more types than fit.
 */
bool sluice_tres_add(struct sluice_tres_request *request, enum sluice_per per, const char *text, char *why,
                     size_t why_size);

/*
 * Copies `text` without its gpu, shard and mps items to `rest` (SLUICE_TRES_TEXT_MAX bytes). `text` is one that
 * sluice_tres_add has read. Returns the length.
 */
size_t sluice_tres_without_gpus(const char *text, char *rest);

/* Does `text`, which sluice_tres_add has read, name a GRES of this name? */
bool sluice_tres_names(const char *text, const char *name);

/* The user's option for a count, e.g. "--gpus-per-node"; for messages. */
const char *sluice_per_option(enum sluice_per per);

#endif
