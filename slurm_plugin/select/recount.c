/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "recount.h"

#include "controller/settings.h"
#include "controller/status.h"

#include "src/common/list.h"
#include "src/common/node_conf.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LOOKS 64

static struct {
    int *waiting; /* nodes that have not registered yet, in no order */
    int count, next;
    bool anew; /* `waiting` is to be made */
} own;

/* Until its node registers, nobody knows how many there are. */
static int find_unknown(void *item, void *unknown)
{
    const gres_state_t *state = item;
    const gres_node_state_t *gres = state->gres_data;
    if (gres->gres_cnt_found == NO_VAL64)
        *(bool *)unknown = true;
    return 0;
}

/* What is allocated of a type by entries of GPUs; false: no entry is of that type. */
static bool count_of_type(const gres_node_state_t *gres, uint16_t type, uint64_t *count)
{
    bool found = false;
    *count = 0;
    for (uint16_t t = 0; t < gres->topo_cnt; t++)
        if (gres->topo_type_name[t] && gres->topo_type_id[t] == gres->type_id[type]) {
            *count += gres->topo_gres_cnt_alloc[t];
            found = true;
        }
    return found;
}

static int recount_gres(void *item, void *corrected)
{
    const gres_state_t *state = item;
    gres_node_state_t *gres = state->gres_data;
    uint64_t count;
    if (gres->no_consume || !gres->topo_gres_cnt_alloc || !gres->topo_type_name || !gres->topo_type_id)
        return 0;
    for (uint16_t type = 0; gres->type_cnt_alloc && type < gres->type_cnt; type++)
        if (count_of_type(gres, type, &count) && gres->type_cnt_alloc[type] != count) {
            gres->type_cnt_alloc[type] = count;
            *(bool *)corrected = true;
        }
    return 0;
}

/* True when a node needs no more looks. */
static bool recounted(int index)
{
    bool unknown = false, corrected = false;
    const node_record_t *node = index < node_record_count ? node_record_table_ptr[index] : NULL;
    if (!node || !node->gres_list)
        return true;
    list_for_each_ro(node->gres_list, find_unknown, &unknown);
    if (unknown)
        return false;
    list_for_each(node->gres_list, recount_gres, &corrected);
    if (corrected)
        atomic_fetch_add_explicit(sluice_status_counter("select.recounted"), 1, memory_order_relaxed);
    return true;
}

static void list_nodes(void)
{
    free(own.waiting);
    own.count = own.next = 0;
    own.anew = false;
    own.waiting = node_record_count > 0 ? calloc((size_t)node_record_count, sizeof(*own.waiting)) : NULL;
    for (int n = 0; own.waiting && n < node_record_count; n++)
        own.waiting[own.count++] = n;
}

void sluice_recount_forget(void)
{
    own.anew = true;
}

void sluice_recount_apply(void)
{
    if ((!own.anew && !own.count) || sluice_settings_level() == SLUICE_LEVEL_OFF)
        return;
    if (own.anew)
        list_nodes();
    for (int looks = 0; looks < own.count && looks < MOST_LOOKS;) {
        own.next %= own.count;
        if (recounted(own.waiting[own.next])) {
            own.waiting[own.next] = own.waiting[--own.count];
        } else {
            own.next++;
            looks++;
        }
    }
}

void sluice_recount_stop(void)
{
    free(own.waiting);
    memset(&own, 0, sizeof(own));
}
