/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Encoding of decisions: whole numbers as LEB128, texts and bitmaps with their length (docs/explain.md).
 *
 * Everything is appended to a `struct bytes`; where something does not fit, `full` is set and nothing more is taken, so
 * that only the end needs a check. Uses only its arguments: no two threads may share one. Numbers are inline, as a hook
 * puts some hundred of them into an entry.
 */
#ifndef SLUICE_DECISIONS_ENCODING_H
#define SLUICE_DECISIONS_ENCODING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "decisions/decisions.h"

/* Bytes being written: `full` once something did not fit. */
struct bytes {
    uint8_t *data;
    size_t length, room;
    bool grows; /* the memory is ours to enlarge */
    bool full;
};

/* Is there room for so many bytes more? */
static inline bool sluice_more_room(struct bytes *to, size_t length)
{
    if (to->full || to->room - to->length >= length)
        return !to->full;
    size_t room = to->room ? to->room : 4096;
    while (room - to->length < length)
        room *= 2;
    uint8_t *grown = to->grows ? realloc(to->data, room) : NULL;
    if (!grown) {
        to->full = true;
        return false;
    }
    to->data = grown;
    to->room = room;
    return true;
}

static inline void sluice_put_bytes(struct bytes *to, const void *data, size_t length)
{
    if (length == 0 || !sluice_more_room(to, length))
        return;
    memcpy(to->data + to->length, data, length);
    to->length += length;
}

static inline void sluice_put(struct bytes *to, uint64_t number)
{
    if (!sluice_more_room(to, 10))
        return;
    uint8_t *at = to->data + to->length;
    for (; number >= 0x80; number >>= 7)
        *at++ = (uint8_t)(number | 0x80);
    *at++ = (uint8_t)number;
    to->length = (size_t)(at - to->data);
}

/* A number that may be negative: two's complement, ten bytes where it is. */
static inline void sluice_put_signed(struct bytes *to, int64_t number)
{
    sluice_put(to, (uint64_t)number);
}

/* At most 255 bytes of it; NULL is an empty one. */
void sluice_put_text(struct bytes *to, const char *text);
/* `count` words; NULL: none, which is distinguished from an empty one. */
void sluice_put_bitmap(struct bytes *to, const uint64_t *words, size_t count);
/* Without its `allowed` nodes, which are a bitmap of their own, and without compute, NICs and segments, which
 * came later. */
void sluice_put_request(struct bytes *to, const struct sluice_request *request);
void sluice_put_parts(struct bytes *to, const struct sluice_part *parts, uint32_t count);
/* The NICs of parts. */
void sluice_put_nics(struct bytes *to, const struct sluice_part *parts, uint32_t count);
void sluice_put_job(struct bytes *to, const struct sluice_decision_job *job);
/* An image of a node; it begins with the node's number. */
void sluice_put_image(struct bytes *to, uint32_t node, const struct sluice_node_view *view);

#endif /* SLUICE_DECISIONS_ENCODING_H */
