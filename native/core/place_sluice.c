/* SPDX-License-Identifier: Apache-2.0 */
/* The sluice policy's score; its index is still to come: every node is scored. */
#include "cluster.h"

enum sluice_error sluice_index_new(struct sluice_cluster *cluster)
{
    (void)cluster;
    return SLUICE_OK;
}

void sluice_index_free(struct sluice_cluster *cluster)
{
    (void)cluster;
}

void sluice_index_node_changed(struct sluice_cluster *cluster, uint32_t node)
{
    (void)cluster;
    (void)node;
}

void sluice_index_order_changed(struct sluice_cluster *cluster)
{
    (void)cluster;
}

enum sluice_error sluice_index_set_workload(struct sluice_cluster *cluster, const struct need *shapes,
                                            const uint32_t *weights, uint32_t count)
{
    (void)cluster;
    (void)shapes;
    (void)weights;
    (void)count;
    return SLUICE_OK;
}

int64_t sluice_score_sluice(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    return sluice_score_fgd(cluster, node, need, gpus, fit, chosen, terms);
}

bool sluice_choose_sluice(struct sluice_cluster *cluster, const struct need *need, struct choice *choice)
{
    return sluice_scan(cluster, &sluice_policies[SLUICE_POLICY_SLUICE], need, choice);
}
