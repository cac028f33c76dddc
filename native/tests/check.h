/* SPDX-License-Identifier: Apache-2.0 */
/* The few words that the C unit tests need: a failed CHECK prints where and what, and the test exits 1. */
#ifndef SLUICE_TESTS_CHECK_H
#define SLUICE_TESTS_CHECK_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_INT(actual, expected)                                                                                    \
    do {                                                                                                               \
        intmax_t actual_ = (intmax_t)(actual), expected_ = (intmax_t)(expected);                                       \
        if (actual_ != expected_) {                                                                                    \
            fprintf(stderr, "%s:%d: %s is %jd, expected %jd\n", __FILE__, __LINE__, #actual, actual_, expected_);      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_STR(actual, expected)                                                                                    \
    do {                                                                                                               \
        const char *actual_ = (actual), *expected_ = (expected);                                                       \
        if (strcmp(actual_, expected_) != 0) {                                                                         \
            fprintf(stderr, "%s:%d: %s is \"%s\", expected \"%s\"\n", __FILE__, __LINE__, #actual, actual_,            \
                    expected_);                                                                                        \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#endif
