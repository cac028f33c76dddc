/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's doubly linked lists. */
#include "gate_parts.h"

static struct gate_link *link_of(struct gate_links links, uint32_t row)
{
    return (struct gate_link *)(void *)(links.rows + row * links.stride + links.link);
}

void gate_list_append(struct sluice_gate *gate, struct gate_links links, struct gate_list *list, uint32_t row)
{
    struct gate_link *link = link_of(links, row);
    gate_put32(gate, &link->previous, list->last);
    gate_put32(gate, &link->next, 0);
    gate_put32(gate, list->last ? &link_of(links, list->last)->next : &list->first, row);
    gate_put32(gate, &list->last, row);
}

void gate_list_remove(struct sluice_gate *gate, struct gate_links links, struct gate_list *list, uint32_t row)
{
    struct gate_link *link = link_of(links, row);
    gate_put32(gate, link->previous ? &link_of(links, link->previous)->next : &list->first, link->next);
    gate_put32(gate, link->next ? &link_of(links, link->next)->previous : &list->last, link->previous);
}

struct gate_links gate_own_links(const struct sluice_gate *gate)
{
    return (struct gate_links){(char *)gate->tickets, sizeof *gate->tickets, offsetof(struct gate_ticket, own)};
}

struct gate_links gate_ticket_links(const struct sluice_gate *gate)
{
    return (struct gate_links){(char *)gate->tickets, sizeof *gate->tickets, offsetof(struct gate_ticket, link)};
}

struct gate_links gate_replica_links(const struct sluice_gate *gate)
{
    return (struct gate_links){(char *)gate->replicas, sizeof *gate->replicas, offsetof(struct gate_replica, link)};
}

struct gate_links gate_dirty_links(const struct sluice_gate *gate)
{
    return (struct gate_links){(char *)gate->services, sizeof *gate->services, offsetof(struct gate_service, dirty)};
}
