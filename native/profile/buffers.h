/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that a vendor's library fills in the program's threads and ours empties. Taking never waits: without a free one,
 * events are dropped. */
#ifndef SLUICE_PROFILE_BUFFERS_H
#define SLUICE_PROFILE_BUFFERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buffer {
    uint8_t *data;
    size_t valid;
};

/* Once for the process: a buffer may be returned late. False: no memory. */
bool buffers_open(void);

/* An empty one and its size, or NULL. */
uint8_t *buffers_take(size_t *size);
/* Return it with `valid` bytes; what is none of these is left alone. */
void buffers_fill(uint8_t *data, size_t valid);

/* The next full one, or false after `ns` or buffers_wake. */
bool buffers_wait(struct buffer *buffer, uint64_t ns);
void buffers_return(const struct buffer *buffer);
void buffers_wake(void);

/* Their memory goes back to the system, as far as they are free. */
void buffers_rest(void);

/* In a child after a fork: no more are given out. */
void buffers_abandon(void);

#endif
