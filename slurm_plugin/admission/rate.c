/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/rate.h"

/* FNV-1a; 0 is kept for "unused". */
static uint64_t hash_of(const char *text)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(1099511628211);
    return hash ? hash : 1;
}

/* The account's bucket, else the fullest of those that it may have. */
static struct sluice_rate_bucket *find(struct sluice_rate *rate, uint64_t account)
{
    struct sluice_rate_bucket *fullest = &rate->buckets[account % SLUICE_RATE_BUCKETS];
    for (uint64_t i = 0; i < SLUICE_RATE_PROBES; i++) {
        struct sluice_rate_bucket *bucket = &rate->buckets[(account + i) % SLUICE_RATE_BUCKETS];
        if (bucket->account == account)
            return bucket;
        if (bucket->full_ms < fullest->full_ms)
            fullest = bucket;
    }
    fullest->account = account;
    fullest->full_ms = 0;
    return fullest;
}

bool sluice_rate_take(struct sluice_rate *rate, const char *account, uint32_t per_minute, int64_t now_ms,
                      int64_t *wait_ms, struct sluice_rate_receipt *receipt)
{
    const int64_t minute = 60000;
    *wait_ms = -1;
    if (per_minute == 0)
        return false;
    int64_t each = minute / per_minute > 0 ? minute / per_minute : 1;
    pthread_mutex_lock(&rate->mutex);
    uint64_t hash = hash_of(account);
    struct sluice_rate_bucket *bucket = find(rate, hash);
    int64_t full = (bucket->full_ms > now_ms ? bucket->full_ms : now_ms) + each;
    /* Rounded down, `each` never adds up to more than a minute for a minute's worth. */
    *wait_ms = full - now_ms - minute;
    bool accepted = *wait_ms <= 0;
    if (accepted) {
        bucket->full_ms = full;
        *receipt = (struct sluice_rate_receipt){.account = hash, .each_ms = each};
    }
    pthread_mutex_unlock(&rate->mutex);
    return accepted;
}

void sluice_rate_give_back(struct sluice_rate *rate, const struct sluice_rate_receipt *receipt)
{
    pthread_mutex_lock(&rate->mutex);
    for (uint64_t i = 0; i < SLUICE_RATE_PROBES; i++) {
        struct sluice_rate_bucket *bucket = &rate->buckets[(receipt->account + i) % SLUICE_RATE_BUCKETS];
        if (bucket->account == receipt->account) {
            bucket->full_ms -= receipt->each_ms;
            break;
        }
    }
    pthread_mutex_unlock(&rate->mutex);
}
