/* What a GPU draws under its power limit and how fast it then is, and how the limit is set. */
#include <unistd.h>

#include "sim.h"

/* NVML's throttle bits; the last three halve the clock, or worse. */
enum { ONE = 1000, SW_POWER_CAP = 0x4, HW_SLOWDOWN = 0x8, HW_THERMAL = 0x40, HW_POWER_BRAKE = 0x80 };

/* A GPU that would draw more than its highest limit has a fault that no limit holds. */
static bool limited(const struct sim_gpu *gpu)
{
    return gpu->power_mw > gpu->power_limit_mw && gpu->power_mw <= gpu->power_limit_max_mw;
}

uint32_t sim_power(const struct sim_gpu *gpu)
{
    return limited(gpu) ? gpu->power_limit_mw : gpu->power_mw;
}

uint32_t sim_speed(const struct sim_gpu *gpu)
{
    static const struct sim_curve curve[] = SIM_SPEED_CURVE;
    uint64_t share = limited(gpu) ? (uint64_t)gpu->power_limit_mw * ONE / gpu->power_mw : ONE;
    unsigned i = 1;
    while (curve[i].share < share) {
        i++;
    }
    const struct sim_curve *from = &curve[i - 1], *to = &curve[i];
    return (uint32_t)(from->speed + (share - from->share) * (to->speed - from->speed) / (to->share - from->share));
}

uint32_t sim_clock(const struct sim_gpu *gpu)
{
    return gpu->clock_graphics * sim_speed(gpu) / ONE;
}

uint32_t sim_clock_at_work(const struct sim_gpu *gpu)
{
    const uint64_t halves = HW_SLOWDOWN | HW_THERMAL | HW_POWER_BRAKE;
    uint32_t clock = gpu->clock_locked > 0 ? gpu->clock_locked : gpu->clock_graphics_max;
    clock = clock * sim_speed(gpu) / ONE / (gpu->throttle_reasons & halves ? 2 : 1);
    return clock > 0 ? clock : 1;
}

uint64_t sim_throttle(const struct sim_gpu *gpu)
{
    return gpu->throttle_reasons | (limited(gpu) ? SW_POWER_CAP : 0u);
}

uint64_t sim_energy(const struct sim_gpu *gpu)
{
    uint64_t ns = sim_now_ns();
    uint64_t elapsed_ms = ns > gpu->energy_since_ns ? (ns - gpu->energy_since_ns) / 1000000u : 0;
    return gpu->energy_mj + sim_power(gpu) * elapsed_ms / 1000u;
}

static enum sim_status set_limit(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    uint32_t mw = *(const uint32_t *)argument;
    if (head->drivers[gpu->vendor].power_limits == SIM_POWERLIMITS_UNSUPPORTED) {
        return SIM_OLD_DRIVER;
    }
    if (head->drivers[gpu->vendor].power_limits == SIM_POWERLIMITS_REFUSED) {
        return SIM_IO;
    }
    if (mw < gpu->power_limit_min_mw || mw > gpu->power_limit_max_mw) {
        return SIM_REFUSED;
    }
    gpu->energy_mj = sim_energy(gpu); /* drawn under the limit of before */
    gpu->energy_since_ns = sim_now_ns();
    gpu->power_limit_mw = mw;
    return SIM_OK;
}

enum sim_status sim_limit_power(unsigned index, uint32_t mw)
{
    return sim_change(index, set_limit, &mw);
}
