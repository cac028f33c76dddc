/* Device memory as programs see it: how long a copy takes, and whether it comes out wrong, as the GPUs' state says. */
#include "line.h"
#include "runtime_internal.h"

#include <stdatomic.h>

enum { NO_DEVICE = -1, STEP = 4099 };

static _Atomic uint64_t spoilt;

static int device_of(const void *memory)
{
    struct rt_block block;
    bool on_device = rt_find(memory, &block) == RT_OK && block.kind != RT_HOST && !block.unpaid;
    return on_device ? block.device : NO_DEVICE;
}

/* MB/s of one end; UINT32_MAX: as fast as this machine copies. `wrong` is set where this GPU spoils such copies. */
static uint32_t rate_of(int device, enum sim_copykind kind, bool *wrong)
{
    struct sim_gpu gpu;
    if (device == NO_DEVICE || !sim_peek(rt_all.devices[device].index, &gpu)) {
        return UINT32_MAX;
    }
    *wrong = *wrong || (gpu.copy_wrong >> kind & 1u);
    uint32_t rate = gpu.copy_mbps[kind];
    return rate > 0 ? rate : UINT32_MAX;
}

uint64_t rt_copied(void *to, const void *from, size_t bytes, uint64_t took)
{
    int here = device_of(from), there = device_of(to);
    enum sim_copykind kind = here == NO_DEVICE || there == NO_DEVICE ? SIM_COPYKIND_HOST
                             : here == there                         ? SIM_COPYKIND_LOCAL
                                                                     : SIM_COPYKIND_PEER;
    bool wrong = false;
    uint32_t one = rate_of(here, kind, &wrong), other = rate_of(there, kind, &wrong);
    uint32_t rate = one < other ? one : other;
    if (wrong && bytes > 0) { /* each another byte: two faults at one place would be none */
        ((unsigned char *)to)[atomic_fetch_add(&spoilt, 1) * STEP % bytes] ^= 1;
    }
    return rate == UINT32_MAX ? took : bytes * 1000u / rate;
}
