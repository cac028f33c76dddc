/* SPDX-License-Identifier: Apache-2.0 */
/* For withdrawn.c and withdrawn_parse.c only. */
#ifndef SLUICE_RUNTIME_WITHDRAWN_INTERNAL_H
#define SLUICE_RUNTIME_WITHDRAWN_INTERNAL_H

#include "runtime/withdrawn.h"

#include <stdatomic.h>

struct shared_list {
    struct sluice_withdrawn shown; /* first: the two have one address */
    struct sluice_withdrawn_gpu *gpus;
    atomic_uint users;
};

/* An empty list with room for so many GPUs and one user; NULL without memory. */
struct shared_list *sluice_withdrawn_new(size_t lines);

#endif
