/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "error.h"

enum { NOWHERE = -1, LEAST_HISTORY = 2, MAX_CAPACITY = 1 << 24 };

/* The last run times under one key; a ring. Entries are chained by hash bucket and by how recently they were
 * recorded. */
struct history {
    uint64_t key;
    int64_t run_s[SLUICE_PREDICTOR_HISTORY];
    uint32_t recorded; /* in all; at most SLUICE_PREDICTOR_HISTORY are remembered */
    int32_t next_in_bucket;
    int32_t older;
    int32_t newer;
};

struct sluice_predictor {
    uint32_t quantile_percent;
    uint32_t capacity;
    uint32_t count;
    uint32_t bucket_mask;
    int32_t oldest;
    int32_t newest;
    int32_t *buckets;
    struct history *histories;
};

enum sluice_error sluice_predictor_new(uint32_t capacity, uint32_t quantile_percent,
                                       struct sluice_predictor **predictor, struct sluice_error_text *text)
{
    if (capacity < 1 || capacity > MAX_CAPACITY || quantile_percent < 1 || quantile_percent > 100)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "predictor of %u keys, quantile %u%%: 1 to %d keys, 1 to 100%%",
                           capacity, quantile_percent, MAX_CAPACITY);
    uint32_t buckets = 1;
    while (buckets < capacity)
        buckets *= 2;
    struct sluice_predictor *made = calloc(1, sizeof *made);
    if (made) {
        made->quantile_percent = quantile_percent;
        made->capacity = capacity;
        made->bucket_mask = buckets - 1;
        made->oldest = made->newest = NOWHERE;
        made->buckets = malloc(buckets * sizeof *made->buckets);
        made->histories = calloc(capacity, sizeof *made->histories);
    }
    if (!made || !made->buckets || !made->histories) {
        sluice_predictor_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "predictor of %u keys: out of host memory", capacity);
    }
    for (uint32_t bucket = 0; bucket < buckets; bucket++)
        made->buckets[bucket] = NOWHERE;
    *predictor = made;
    return SLUICE_OK;
}

void sluice_predictor_free(struct sluice_predictor *predictor)
{
    if (!predictor)
        return;
    free(predictor->buckets);
    free(predictor->histories);
    free(predictor);
}

/* Keys are hashes already, but their low bits may be poor: spread them (D. Knuth's multiplicative hashing). */
static int32_t *bucket_of(const struct sluice_predictor *predictor, uint64_t key)
{
    return &predictor->buckets[(key * UINT64_C(0x9E3779B97F4A7C15) >> 32) & predictor->bucket_mask];
}

static int32_t find(const struct sluice_predictor *predictor, uint64_t key)
{
    int32_t at = *bucket_of(predictor, key);
    while (at != NOWHERE && predictor->histories[at].key != key)
        at = predictor->histories[at].next_in_bucket;
    return at;
}

static void unchain_age(struct sluice_predictor *predictor, int32_t at)
{
    struct history *history = &predictor->histories[at];
    *(history->older == NOWHERE ? &predictor->oldest : &predictor->histories[history->older].newer) = history->newer;
    *(history->newer == NOWHERE ? &predictor->newest : &predictor->histories[history->newer].older) = history->older;
}

static void make_newest(struct sluice_predictor *predictor, int32_t at)
{
    struct history *history = &predictor->histories[at];
    history->older = predictor->newest;
    history->newer = NOWHERE;
    *(predictor->newest == NOWHERE ? &predictor->oldest : &predictor->histories[predictor->newest].newer) = at;
    predictor->newest = at;
}

static int32_t forget_oldest(struct sluice_predictor *predictor)
{
    int32_t at = predictor->oldest;
    int32_t *link = bucket_of(predictor, predictor->histories[at].key);
    while (*link != at)
        link = &predictor->histories[*link].next_in_bucket;
    *link = predictor->histories[at].next_in_bucket;
    unchain_age(predictor, at);
    return at;
}

static int32_t add(struct sluice_predictor *predictor, uint64_t key)
{
    int32_t at = predictor->count < predictor->capacity ? (int32_t)predictor->count++ : forget_oldest(predictor);
    int32_t *bucket = bucket_of(predictor, key);
    predictor->histories[at] = (struct history){.key = key, .next_in_bucket = *bucket};
    *bucket = at;
    make_newest(predictor, at);
    return at;
}

static enum sluice_error check_keys(uint32_t key_count, struct sluice_error_text *text)
{
    if (key_count >= 1 && key_count <= SLUICE_PREDICTOR_MAX_KEYS)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_RANGE, "%u predictor keys: 1 to %d", key_count, SLUICE_PREDICTOR_MAX_KEYS);
}

enum sluice_error sluice_predictor_record(struct sluice_predictor *predictor, const uint64_t *keys, uint32_t key_count,
                                          int64_t run_s, struct sluice_error_text *text)
{
    enum sluice_error error = check_keys(key_count, text);
    if (error != SLUICE_OK)
        return error;
    if (run_s < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "run time %lld s: must not be negative", (long long)run_s);
    for (uint32_t i = 0; i < key_count; i++) {
        int32_t at = find(predictor, keys[i]);
        if (at == NOWHERE) {
            at = add(predictor, keys[i]);
        } else {
            unchain_age(predictor, at);
            make_newest(predictor, at);
        }
        struct history *history = &predictor->histories[at];
        history->run_s[history->recorded++ % SLUICE_PREDICTOR_HISTORY] = run_s;
        if (history->recorded == 2 * SLUICE_PREDICTOR_HISTORY)
            history->recorded = SLUICE_PREDICTOR_HISTORY; /* same ring position, and no overflow */
    }
    return SLUICE_OK;
}

/* The smallest remembered run time that is not exceeded by `quantile_percent` of them. */
static int64_t quantile(const struct history *history, uint32_t quantile_percent)
{
    uint32_t count =
        history->recorded < SLUICE_PREDICTOR_HISTORY ? history->recorded : (uint32_t)SLUICE_PREDICTOR_HISTORY;
    int64_t sorted[SLUICE_PREDICTOR_HISTORY];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t place = i;
        for (; place > 0 && sorted[place - 1] > history->run_s[i]; place--)
            sorted[place] = sorted[place - 1];
        sorted[place] = history->run_s[i];
    }
    return sorted[(count * quantile_percent + 99) / 100 - 1];
}

enum sluice_error sluice_predictor_predict(const struct sluice_predictor *predictor, const uint64_t *keys,
                                           uint32_t key_count, int64_t elapsed_s, int64_t limit_s, int64_t *remaining_s,
                                           struct sluice_error_text *text)
{
    enum sluice_error error = check_keys(key_count, text);
    if (error != SLUICE_OK)
        return error;
    if (elapsed_s < 0 || limit_s < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "elapsed %lld s, limit %lld s: must not be negative",
                           (long long)elapsed_s, (long long)limit_s);
    int64_t most_s = limit_s == 0 ? INT64_MAX : limit_s > elapsed_s ? limit_s - elapsed_s : 0;
    int64_t predicted_s = most_s;
    for (uint32_t i = 0; i < key_count; i++) {
        int32_t at = find(predictor, keys[i]);
        if (at != NOWHERE && predictor->histories[at].recorded >= LEAST_HISTORY) {
            int64_t run_s = quantile(&predictor->histories[at], predictor->quantile_percent);
            predicted_s = run_s > elapsed_s ? run_s - elapsed_s : elapsed_s;
            break;
        }
    }
    *remaining_s = predicted_s < most_s ? predicted_s : most_s;
    return SLUICE_OK;
}
