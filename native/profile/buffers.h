/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that CUPTI fills in the program's threads and ours empties. Taking never waits: without a free one, CUPTI drops. */
#ifndef SLUICE_PROFILE_BUFFERS_H
#define SLUICE_PROFILE_BUFFERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buffer {
    uint8_t *data;
    size_t valid;
};

/* Once for the process: CUPTI may return a buffer late. False: no memory. */
bool buffers_open(void);

/* CUPTI's callbacks. */
void buffers_take(uint8_t **data, size_t *size, size_t *records);
void buffers_fill(void *context, uint32_t stream, uint8_t *data, size_t size, size_t valid);

/* The next full one, or false after `ns` or buffers_wake. */
bool buffers_wait(struct buffer *buffer, uint64_t ns);
void buffers_return(const struct buffer *buffer);
void buffers_wake(void);

/* Their memory goes back to the system, as far as they are free. */
void buffers_rest(void);

/* In a child after a fork: no more are given out. */
void buffers_abandon(void);

#endif
