/* SPDX-License-Identifier: Apache-2.0 */
/* For fuzz targets of files with a first line and a checksum: data that gets past both. */
#ifndef SLUICE_FUZZ_CHECKSUMMED_H
#define SLUICE_FUZZ_CHECKSUMMED_H

#include "rules/policy.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void require(bool holds)
{
    if (!holds)
        abort();
}

/*
 * The data as a file of a kind: with its first line ("KIND VERSION") where it begins with no line of that kind, a last
 * line's end and the right checksum. `length` gets its bytes; free it.
 */
static inline char *checksummed(const char *kind, const char *version, const uint8_t *data, size_t size, size_t *length)
{
    size_t word = strlen(kind), room = word + strlen(version) + size + 64, used = 0;
    char *whole = malloc(room);
    require(whole != NULL);
    if (size <= word || memcmp(data, kind, word) != 0 || data[word] != ' ')
        used = (size_t)snprintf(whole, room, "%s %s\n", kind, version);
    memcpy(whole + used, data, size);
    used += size;
    whole[used++] = '\n';
    used += (size_t)snprintf(whole + used, room - used, "checksum = crc32:%08" PRIx32 "\n", sluice_crc32(whole, used));
    *length = used;
    return whole;
}

/* The data as they come, and as a file of a kind. Use it as the whole of LLVMFuzzerTestOneInput. */
static inline int try_both(const char *kind, const char *version, const uint8_t *data, size_t size,
                           void (*try_one)(const char *data, size_t length))
{
    size_t length = 0;
    char *whole = checksummed(kind, version, data, size, &length);
    try_one((const char *)data, size);
    try_one(whole, length);
    free(whole);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
