/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate's heaps: leftist trees (Crane 1972) with parents. A node's rank is the length of its right spine, never more
 * than that of its left child's, so a right spine has at most log2(n + 1) nodes. All that is done goes along right spines,
 * or up from a node while ranks change, which then rise with each step: every call writes O(log n) words, which the log
 * needs, and a balanced tree or an array of pointers would not do in fewer.
 */
#include "gate_parts.h"

static struct gate_node *node_of(struct gate_heap heap, uint32_t row)
{
    return (struct gate_node *)(void *)(heap.rows + row * heap.stride + heap.node);
}

static bool before(const struct gate_node *a, const struct gate_node *b)
{
    return a->hi != b->hi ? a->hi < b->hi : a->lo < b->lo;
}

static uint32_t rank_of(struct gate_heap heap, uint32_t row)
{
    return row ? node_of(heap, row)->rank : 0;
}

/* Makes a node leftist whose children are, and says whether its rank changed. */
static bool mend(struct sluice_gate *gate, struct gate_heap heap, struct gate_node *node)
{
    uint32_t left = rank_of(heap, node->left), right = rank_of(heap, node->right);
    if (left < right) {
        uint32_t child = node->left;
        gate_put32(gate, &node->left, node->right);
        gate_put32(gate, &node->right, child);
        right = left;
    }
    uint32_t rank = node->rank;
    gate_put32(gate, &node->rank, right + 1);
    return node->rank != rank;
}

/* One tree of two, with `parent` above it: down both right spines, then up again. */
static uint32_t merge(struct sluice_gate *gate, struct gate_heap heap, uint32_t a, uint32_t b, uint32_t parent)
{
    uint32_t root = 0, last = 0;
    while (a && b) {
        if (before(node_of(heap, b), node_of(heap, a))) {
            uint32_t other = a;
            a = b;
            b = other;
        }
        if (last)
            gate_put32(gate, &node_of(heap, last)->right, a);
        else
            root = a;
        gate_put32(gate, &node_of(heap, a)->parent, last ? last : parent);
        last = a;
        a = node_of(heap, a)->right;
    }
    uint32_t rest = a ? a : b;
    if (rest)
        gate_put32(gate, &node_of(heap, rest)->parent, last ? last : parent);
    if (!last)
        return rest;
    gate_put32(gate, &node_of(heap, last)->right, rest);
    for (uint32_t row = last;; row = node_of(heap, row)->parent) {
        mend(gate, heap, node_of(heap, row));
        if (row == root || gate->overflow)
            return root;
    }
}

void gate_heap_insert(struct sluice_gate *gate, struct gate_heap heap, uint32_t *root, uint32_t row, uint64_t hi,
                      uint64_t lo)
{
    struct gate_node *node = node_of(heap, row);
    gate_put64(gate, &node->hi, hi);
    gate_put64(gate, &node->lo, lo);
    gate_put32(gate, &node->left, 0);
    gate_put32(gate, &node->right, 0);
    gate_put32(gate, &node->rank, 1);
    gate_put32(gate, root, merge(gate, heap, *root, row, 0));
}

void gate_heap_remove(struct sluice_gate *gate, struct gate_heap heap, uint32_t *root, uint32_t row)
{
    struct gate_node *node = node_of(heap, row);
    uint32_t parent = node->parent;
    uint32_t rest = merge(gate, heap, node->left, node->right, parent);
    if (!parent) {
        gate_put32(gate, root, rest);
        return;
    }
    struct gate_node *above = node_of(heap, parent);
    gate_put32(gate, above->left == row ? &above->left : &above->right, rest);
    while (parent && mend(gate, heap, node_of(heap, parent)) && !gate->overflow)
        parent = node_of(heap, parent)->parent;
}

struct gate_heap gate_queue_heap(const struct sluice_gate *gate)
{
    return (struct gate_heap){(char *)gate->tickets, sizeof *gate->tickets, offsetof(struct gate_ticket, queue)};
}

struct gate_heap gate_expiry_heap(const struct sluice_gate *gate)
{
    return (struct gate_heap){(char *)gate->tickets, sizeof *gate->tickets, offsetof(struct gate_ticket, expiry)};
}

struct gate_heap gate_flow_heap(const struct sluice_gate *gate)
{
    return (struct gate_heap){(char *)gate->flows, sizeof *gate->flows, offsetof(struct gate_flow, node)};
}
