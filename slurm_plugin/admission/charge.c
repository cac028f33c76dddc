/* SPDX-License-Identifier: Apache-2.0 */
#include "admission/charge.h"

#include "admission/rate.h"
#include "runtime/runtime.h"

#include <time.h>

static struct sluice_rate rate = SLUICE_RATE_INITIALIZER;

/* What this thread's request has taken. */
static _Thread_local struct {
    struct sluice_rate_receipt receipt;
    int64_t at_s; /* 0: nothing */
} taken;

void sluice_charge_begin(void)
{
    taken.at_s = 0;
}

bool sluice_charge_take(const char *account, uint32_t per_minute, int64_t *wait_ms)
{
    if (!sluice_rate_take(&rate, account, per_minute, sluice_clock_us(CLOCK_MONOTONIC) / 1000, wait_ms, &taken.receipt))
        return false;
    taken.at_s = (int64_t)time(NULL);
    return true;
}

void sluice_charge_give_back(int64_t submitted_s)
{
    if (taken.at_s && submitted_s >= taken.at_s)
        sluice_rate_give_back(&rate, &taken.receipt);
    taken.at_s = 0;
}
