/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror/nics.h"

#include "mirror/gres.h"

#include "src/common/bitstring.h"

static sluice_nic_groups_fn groups_of;

void sluice_nics_near(sluice_nic_groups_fn of_node)
{
    groups_of = of_node;
}

/* Can its NICs be distinguished? */
static bool is_clear(const gres_node_state_t *nic)
{
    return nic->gres_bit_alloc && !nic->no_consume && nic->gres_cnt_avail <= SLUICE_MAX_NICS &&
           bit_size(nic->gres_bit_alloc) == (bitoff_t)nic->gres_cnt_avail;
}

bool sluice_nics_of_node(const node_record_t *node, uint32_t gpu_count, sluice_nic_kind_fn kind, void *argument,
                         struct sluice_nic_groups *out)
{
    const gres_node_state_t *nic = sluice_gres_in(node->gres_list).nic;
    *out = (struct sluice_nic_groups){.gpu_count = gpu_count};
    if (!nic || (!nic->gres_cnt_avail && !nic->gres_cnt_config))
        return true;
    if (!is_clear(nic))
        return false;
    const struct sluice_nic_groups *known = groups_of ? groups_of(node->name) : NULL;
    if (known && known->gpu_count == gpu_count && known->nic_count == nic->gres_cnt_avail) {
        *out = *known;
    } else {
        out->nic_count = (uint32_t)nic->gres_cnt_avail;
        for (uint32_t i = 0; i < gpu_count; i++)
            out->gpu_group[i] = (uint8_t)i;
        for (uint32_t i = 0; i < out->nic_count; i++)
            out->nic_group[i] = (uint8_t)(SLUICE_MAX_GPUS + i);
    }
    for (uint16_t t = 0; nic->topo_gres_bitmap && t < nic->topo_cnt; t++) {
        const char *type = nic->topo_type_name ? nic->topo_type_name[t] : NULL;
        bitstr_t *bits = nic->topo_gres_bitmap[t];
        for (uint32_t i = 0; bits && type && *type && i < out->nic_count && i < bit_size(bits); i++)
            if (bit_test(bits, i))
                out->nic_kind[i] = kind(argument, type);
    }
    return true;
}

uint32_t sluice_nics_held(const gres_node_state_t *nic, uint32_t count)
{
    uint32_t held = 0;
    if (!nic || !is_clear(nic) || nic->gres_cnt_avail != count)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        held |= (uint32_t)(bit_test(nic->gres_bit_alloc, i) ? 1 : 0) << i;
    return held;
}

uint32_t sluice_nics_of_type(const gres_node_state_t *nic, uint32_t type_id)
{
    uint32_t of_type = type_id ? 0 : UINT32_MAX;
    for (uint16_t t = 0; type_id && nic->topo_gres_bitmap && nic->topo_type_id && t < nic->topo_cnt; t++) {
        bitstr_t *bits = nic->topo_gres_bitmap[t];
        for (uint32_t i = 0; bits && nic->topo_type_id[t] == type_id && i < SLUICE_MAX_NICS && i < bit_size(bits); i++)
            of_type |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    }
    return of_type;
}
