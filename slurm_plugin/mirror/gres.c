/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror/gres.h"

#include "src/common/list.h"

#include <string.h>

static int find(void *item, void *argument)
{
    const gres_state_t *state = item;
    struct sluice_gres *found = argument;
    if (!state->gres_name)
        return 0;
    if (!strcmp(state->gres_name, "gpu"))
        found->gpu = state->gres_data;
    else if (!strcmp(state->gres_name, "shard"))
        found->shard = state->gres_data;
    else if (!strcmp(state->gres_name, "mps"))
        found->mps = state->gres_data;
    else if (!strcmp(state->gres_name, "nic"))
        found->nic = state->gres_data;
    return 0;
}

struct sluice_gres sluice_gres_in(struct xlist *list)
{
    struct sluice_gres found = {0};
    if (list)
        list_for_each_ro(list, find, &found);
    return found;
}

struct sluice_node_gres sluice_gres_of_node(const node_record_t *node)
{
    struct sluice_gres found = sluice_gres_in(node->gres_list);
    return (struct sluice_node_gres){.gpu = found.gpu, .shard = found.shard, .mps = found.mps, .nic = found.nic};
}
