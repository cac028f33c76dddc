/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Stock's answers to "could this job ever run on these nodes" (TEST_ONLY), which slurmctld asks twice for each pending
 * job in each pass. The answer depends on the job's request, on its partition and on how nodes are configured, not on
 * what runs; so it is kept for the next job with the same request (struct sluice_job_shape: compared word by word)
 * until the configuration changes. A positive answer holds for other candidates, too, as long as the nodes that stock
 * chose are among them; a negative one only for the same candidates.
 */
#ifndef SLUICE_HOOK_CACHE_H
#define SLUICE_HOOK_CACHE_H

#include "mirror/mirror.h"

struct sluice_cache;

/* Room for `entries`, a power of two; nodes as bitmaps of `words` words. NULL: out of memory. */
struct sluice_cache *sluice_cache_new(uint32_t entries, size_t words);
void sluice_cache_free(struct sluice_cache *cache);
void sluice_cache_clear(struct sluice_cache *cache);

/* Stock's answer if it is known: *rc, and the nodes it would choose. The memory is the cache's. O(shape + words). */
bool sluice_cache_find(struct sluice_cache *cache, const struct sluice_job_shape *shape, const uint64_t *candidates,
                       int *rc, const uint64_t **nodes);
/* Keep an answer; an older one in its place goes. `nodes` counts where rc is 0. */
void sluice_cache_put(struct sluice_cache *cache, const struct sluice_job_shape *shape, const uint64_t *candidates,
                      int rc, const uint64_t *nodes);

#endif
