/* SPDX-License-Identifier: Apache-2.0 */
/* Texts with the checksum that the plugins' files end with. */
#ifndef SLUICE_TESTS_WITH_CHECKSUM_H
#define SLUICE_TESTS_WITH_CHECKSUM_H

#include "rules/policy.h"

#include "check.h"

/* The text and the right checksum under it, ended by a zero that `length` does not count; free it. */
static inline char *with_checksum(const char *body, size_t *length)
{
    const size_t size = strlen(body), room = size + 64;
    char *whole = malloc(room);
    CHECK(whole != NULL);
    *length = (size_t)snprintf(whole, room, "%schecksum = crc32:%08" PRIx32 "\n", body, sluice_crc32(body, size));
    return whole;
}

/* Defines NAME(body, &made, text): what PARSE makes, a TYPE, of the body with its checksum under it. */
#define PARSE_WITH_CHECKSUM(NAME, PARSE, TYPE)                                                                         \
    static enum sluice_error NAME(const char *body, TYPE **made, struct sluice_error_text *text)                       \
    {                                                                                                                  \
        size_t length;                                                                                                 \
        char *whole = with_checksum(body, &length);                                                                    \
        enum sluice_error error = PARSE(whole, length, made, text);                                                    \
        free(whole);                                                                                                   \
        return error;                                                                                                  \
    }

#endif
