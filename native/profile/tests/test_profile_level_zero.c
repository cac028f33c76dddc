/* SPDX-License-Identifier: Apache-2.0 */
/* Times of Intel's devices: counters that overflow and drift, read by a processor that is interrupted. */
#include "check.h"
#include "level_zero.h"

#include <time.h>

struct level_zero ze;

enum { FREQUENCY = 12500000, BITS = 32, NS_OF_CYCLE = 80 };

static char device;
static uint64_t now = 5000000000000; /* ns of a clock that does not advance between the steps of this test */
static uint64_t ahead;               /* cycles that the counter is ahead of it */
static uint64_t late;                /* ns that pass before and after a reading of the counter */

int clock_of_test(clockid_t clock, struct timespec *time)
{
    (void)clock;
    *time = (struct timespec){.tv_sec = (time_t)(now / 1000000000u), .tv_nsec = (long)(now % 1000000000u)};
    return 0;
}

static uint64_t cycles_at(uint64_t ns)
{
    return (ns / NS_OF_CYCLE + ahead) & ((UINT64_C(1) << BITS) - 1);
}

static uint32_t get_drivers(uint32_t *count, ze_handle *drivers)
{
    *count = 1;
    drivers[0] = &device;
    return ZE_OK;
}

static uint32_t get_devices(ze_handle driver, uint32_t *count, ze_handle *devices)
{
    (void)driver;
    *count = 1;
    devices[0] = &device;
    return ZE_OK;
}

static uint32_t get_properties(ze_handle handle, struct ze_device *properties)
{
    CHECK(handle == &device && properties->type == ZE_TYPE_DEVICE_1_2);
    properties->timer = FREQUENCY;
    properties->timestamp_bits = properties->kernel_timestamp_bits = BITS;
    return ZE_OK;
}

static uint32_t get_timestamps(ze_handle handle, uint64_t *host, uint64_t *cycles)
{
    (void)handle;
    now += late;
    *host = 0; /* another clock than ours */
    *cycles = cycles_at(now);
    now += late / 2;
    return ZE_OK;
}

/* ns by which what the device did so long ago is put at a wrong time. */
static uint64_t error_of(uint64_t ago)
{
    uint64_t then = now - ago, found = ze_when(ze_gpu_of(&device), cycles_at(then));
    return found > then ? found - then : then - found;
}

static void test_counters_overflow(void)
{
    const uint64_t all = UINT64_C(1) << BITS, second = 1000000000u;
    const uint64_t wanted[] = {all / 2, all - FREQUENCY / 100, FREQUENCY / 100, all - 1, 0};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        ahead = (wanted[i] - now / NS_OF_CYCLE) & (all - 1);
        ze_find_devices();
        CHECK(error_of(0) <= NS_OF_CYCLE && error_of(100 * second) <= NS_OF_CYCLE);
        for (int looks = 0; looks < 10; looks++) { /* 1000 s: the counter overflows three times */
            now += 100 * second;
            CHECK(error_of(0) <= NS_OF_CYCLE && error_of(50 * second) <= NS_OF_CYCLE);
            ze_compare_clocks();
            CHECK(error_of(0) <= NS_OF_CYCLE && error_of(100 * second) <= NS_OF_CYCLE);
        }
    }
}

static void test_late_readings(void)
{
    enum { LATE_NS = 3000000, DRIFT_NS = 10000000 };
    late = LATE_NS;
    ze_find_devices();
    CHECK(error_of(0) <= LATE_NS / 4 + NS_OF_CYCLE); /* the reading is taken for the middle of what it took */
    late = 0;
    ze_compare_clocks();
    CHECK(error_of(0) <= NS_OF_CYCLE);
    late = LATE_NS;
    ze_compare_clocks(); /* which proves nothing */
    CHECK(error_of(0) <= NS_OF_CYCLE);
    late = 0;
    ahead += DRIFT_NS / NS_OF_CYCLE;
    ze_compare_clocks();
    CHECK(error_of(0) <= NS_OF_CYCLE);
}

int main(void)
{
    ze.zeDriverGet = get_drivers;
    ze.zeDeviceGet = get_devices;
    ze.zeDeviceGetProperties = get_properties;
    ze.zeDeviceGetGlobalTimestamps = get_timestamps;
    test_counters_overflow();
    test_late_readings();
    CHECK(ze_when(NULL, 1) == 0);
    return 0;
}
