/* SPDX-License-Identifier: Apache-2.0 */
#include "sluice/loss.h"

static int64_t positive(int64_t value)
{
    return value > 0 ? value : 0;
}

static int64_t add(int64_t one, int64_t other)
{
    int64_t sum;
    return __builtin_add_overflow(one, other, &sum) ? INT64_MAX : sum;
}

int64_t sluice_lost_s(const struct sluice_stake *stake, enum sluice_way way, int64_t now_s)
{
    const int64_t restart_s = positive(stake->restart_s);
    if (way != SLUICE_WAY_REQUEUE && stake->save_s > 0)
        return add(stake->save_s, restart_s);
    if (way == SLUICE_WAY_MOVE)
        return INT64_MAX;
    const int64_t since_s = positive(stake->saved_s > stake->started_s ? stake->saved_s : stake->started_s);
    return add(positive(now_s - since_s), restart_s);
}

int64_t sluice_loss(const struct sluice_stake *stake, enum sluice_way way, int64_t now_s)
{
    int64_t loss;
    return __builtin_mul_overflow(sluice_lost_s(stake, way, now_s), positive(stake->gpus_milli), &loss) ? INT64_MAX
                                                                                                        : loss;
}
