/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Submissions per minute of each account, as token buckets: a minute's worth may come at once, then one for each token
 * that comes back. Memory is bounded however many accounts there are: a bucket that is full again has no information
 * and may be reused.
 */
#ifndef SLUICE_ADMISSION_RATE_H
#define SLUICE_ADMISSION_RATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

enum { SLUICE_RATE_BUCKETS = 4096, SLUICE_RATE_PROBES = 16 };

struct sluice_rate {
    pthread_mutex_t mutex; /* held for some tens of nanoseconds */
    struct sluice_rate_bucket {
        uint64_t account; /* its hash; 0: unused */
        int64_t full_ms;  /* when it will be full again */
    } buckets[SLUICE_RATE_BUCKETS];
};

/* All zero but for the mutex is a usable state. */
#define SLUICE_RATE_INITIALIZER {.mutex = PTHREAD_MUTEX_INITIALIZER}

/* What a submission took; for giving it back. */
struct sluice_rate_receipt {
    uint64_t account;
    int64_t each_ms;
};

/*
 * Takes one submission of `account`, `per_minute` being its limit, at `now_ms` of a monotonic clock. True, or false
 * with the milliseconds until the next one would be accepted. A limit of 0 accepts none (*wait_ms is then -1). Where it
 * accepts it, *receipt says what was taken. Thread-safe.
 */
bool sluice_rate_take(struct sluice_rate *rate, const char *account, uint32_t per_minute, int64_t now_ms,
                      int64_t *wait_ms, struct sluice_rate_receipt *receipt);

/* Undoes one take. Where the bucket has gone since, it was full. Thread-safe. */
void sluice_rate_give_back(struct sluice_rate *rate, const struct sluice_rate_receipt *receipt);

#endif
