/* Simulated AMD SMI: its devices, and what they are. */
#include "amd.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

amdsmi_status_t amd_failure(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return AMDSMI_STATUS_SUCCESS;
    case SIM_NOT_LOADED:
        return AMDSMI_STATUS_DRIVER_NOT_LOADED;
    case SIM_CORRUPT:
        return AMDSMI_STATUS_UNEXPECTED_DATA;
    case SIM_CLOSED:
        return AMDSMI_STATUS_NOT_INIT;
    case SIM_OLD_DRIVER:
        return AMDSMI_STATUS_NOT_SUPPORTED;
    case SIM_NO_DEVICE:
        return AMDSMI_STATUS_NOT_FOUND;
    case SIM_NO_MEMORY:
        return AMDSMI_STATUS_OUT_OF_RESOURCES;
    case SIM_LOST: /* its sysfs files are gone */
    case SIM_IO:
        return AMDSMI_STATUS_IO;
    case SIM_DENIED:
        return AMDSMI_STATUS_NO_PERM;
    case SIM_BUSY:
        return AMDSMI_STATUS_BUSY;
    case SIM_REFUSED:
        return AMDSMI_STATUS_SETTING_UNAVAILABLE;
    }
    return AMDSMI_STATUS_API_FAILED;
}

/* ---- devices ---- */

static char handles[SIM_MAX_GPUS][SIM_MAX_INSTANCES]; /* addresses within it are handles */

/* Which partitions each GPU had when the library was opened, as bits; 1 for a whole GPU, 0 for one that is not visible.
 * Like the real one, the library does not look again: a program that changes partitions opens it again. */
static struct {
    pthread_mutex_t lock;
    uint8_t parts[SIM_MAX_GPUS];
} listed = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void list_devices(void)
{
    uint8_t visible[SIM_MAX_GPUS], parts[SIM_MAX_GPUS] = {0};
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        struct sim_gpu gpu;
        bool there = sim_peek(visible[i], &gpu), whole = there && !gpu.instances[0].used;
        parts[visible[i]] = whole;
        for (unsigned k = 0; there && !whole && k < SIM_MAX_INSTANCES; k++) {
            if (gpu.instances[k].used && sim_instance_visible(&gpu, &gpu.instances[k])) {
                parts[visible[i]] |= (uint8_t)(1u << k);
            }
        }
    }
    pthread_mutex_lock(&listed.lock);
    memcpy(listed.parts, parts, sizeof parts);
    pthread_mutex_unlock(&listed.lock);
}

static unsigned parts_of(unsigned index)
{
    pthread_mutex_lock(&listed.lock);
    unsigned parts = listed.parts[index];
    pthread_mutex_unlock(&listed.lock);
    return parts;
}

static amdsmi_processor_handle handle_of(unsigned index, unsigned part)
{
    return (amdsmi_processor_handle)(void *)&handles[index][part];
}

unsigned amd_devices(amdsmi_processor_handle *out)
{
    unsigned count = 0;
    for (unsigned i = 0; i < SIM_MAX_GPUS; i++) {
        for (unsigned k = 0, parts = parts_of(i); k < SIM_MAX_INSTANCES; k++) {
            if (parts >> k & 1u) {
                out[count++] = handle_of(i, k);
            }
        }
    }
    return count;
}

unsigned amd_gpu_of(amdsmi_processor_handle handle)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)handles;
    return offset < sizeof handles ? (unsigned)(offset / SIM_MAX_INSTANCES) : UINT32_MAX;
}

amdsmi_status_t amd_enter(amdsmi_processor_handle handle, struct amd_target *t)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)handles;
    if (offset >= sizeof handles) {
        return AMDSMI_STATUS_INVAL;
    }
    t->index = (unsigned)(offset / SIM_MAX_INSTANCES);
    t->part = (uint8_t)(offset % SIM_MAX_INSTANCES);
    amdsmi_status_t result = amd_failure(sim_gpu(0, t->index, &t->gpu));
    if (result == AMDSMI_STATUS_SUCCESS && !t->gpu.instances[t->part].used) {
        result = t->part == 0 ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_NOT_FOUND; /* a partition that is no more */
        t->part = SIM_NO_INSTANCE;
    }
    return result;
}

uint32_t amd_ordinal(const struct amd_target *t)
{
    amdsmi_processor_handle all[AMD_MAX_DEVICES];
    unsigned count = amd_devices(all);
    for (uint32_t i = 0; i < count; i++) {
        if (all[i] == handle_of(t->index, t->part == SIM_NO_INSTANCE ? 0 : t->part)) {
            return i;
        }
    }
    return UINT32_MAX;
}

amdsmi_status_t amd_copy(char *to, size_t size, const char *from)
{
    if (to == NULL || size == 0) {
        return AMDSMI_STATUS_INVAL;
    }
    return sim_text(to, size, from) ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_INSUFFICIENT_SIZE;
}

/* The number of a partition takes the place of the PCI function, which it does not have. */
uint64_t amd_bdf(const struct sim_pci *pci, uint8_t part)
{
    unsigned function = part == SIM_NO_INSTANCE ? pci->function : part;
    return (uint64_t)pci->domain << 16 | (uint64_t)pci->bus << 8 | (uint64_t)pci->device << 3 | function;
}

uint64_t amd_used(const struct amd_target *t)
{
    return sim_used(t->index, &t->gpu, SIM_NO_INSTANCE) + t->gpu.memory_reserved_mib * SIM_MIB;
}

static uint32_t render_of(const struct amd_target *t)
{
    return t->part == SIM_NO_INSTANCE ? t->gpu.minor : t->gpu.instances[t->part].access_minor;
}

static uint32_t card_of(const struct amd_target *t)
{
    return t->part == SIM_NO_INSTANCE ? t->gpu.card : t->gpu.instances[t->part].compute_minor;
}

/* ---- start and end, handles ---- */

SIM_API amdsmi_status_t amdsmi_init(uint64_t flags)
{
    (void)flags;
    enum sim_status status = sim_open(SIM_VENDOR_AMD);
    if (status == SIM_OK) {
        list_devices();
    }
    return amd_failure(status);
}

SIM_API amdsmi_status_t amdsmi_shut_down(void)
{
    return amd_failure(sim_close());
}

SIM_API amdsmi_status_t amdsmi_get_lib_version(amdsmi_version_t *version)
{
    if (version == NULL) {
        return AMDSMI_STATUS_INVAL;
    }
    *version = (amdsmi_version_t){.major = 26, .minor = 0, .release = 2, .build = "26.0.2"};
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_status_code_to_string(amdsmi_status_t status, const char **text)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {AMDSMI_STATUS_SUCCESS, "AMDSMI_STATUS_SUCCESS: Call succeeded."},
        {AMDSMI_STATUS_INVAL, "AMDSMI_STATUS_INVAL: Invalid parameters."},
        {AMDSMI_STATUS_NOT_SUPPORTED, "AMDSMI_STATUS_NOT_SUPPORTED: Command not supported."},
        {AMDSMI_STATUS_IO, "AMDSMI_STATUS_IO: I/O Error."},
        {AMDSMI_STATUS_NOT_FOUND, "AMDSMI_STATUS_NOT_FOUND: Device Not found."},
        {AMDSMI_STATUS_NOT_INIT, "AMDSMI_STATUS_NOT_INIT: Device not initialized."},
        {AMDSMI_STATUS_NO_PERM, "AMDSMI_STATUS_NO_PERM: Permission Denied."},
        {AMDSMI_STATUS_BUSY, "AMDSMI_STATUS_BUSY: Device busy."},
        {AMDSMI_STATUS_AMDGPU_RESTART_ERR, "AMDSMI_STATUS_AMDGPU_RESTART_ERR: Could not restart the driver."},
        {AMDSMI_STATUS_SETTING_UNAVAILABLE, "AMDSMI_STATUS_SETTING_UNAVAILABLE: Setting is not available."},
        {AMDSMI_STATUS_DRIVER_NOT_LOADED, "AMDSMI_STATUS_DRIVER_NOT_LOADED: Driver not loaded."},
        {AMDSMI_STATUS_UNEXPECTED_DATA, "AMDSMI_STATUS_UNEXPECTED_DATA: Unexpected data."},
    };
    if (text == NULL) {
        return AMDSMI_STATUS_INVAL;
    }
    *text = "An unknown error occurred";
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].code == (int)status) {
            *text = texts[i].text;
        }
    }
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_socket_handles(uint32_t *count, amdsmi_socket_handle *out)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || count == NULL) {
        return status != SIM_OK ? amd_failure(status) : AMDSMI_STATUS_INVAL;
    }
    uint32_t found = 0, room = *count;
    for (unsigned i = 0; i < SIM_MAX_GPUS; i++) {
        if (parts_of(i) != 0) {
            if (out != NULL && found < room) {
                out[found] = handle_of(i, 0);
            }
            found++;
        }
    }
    *count = out != NULL && room < found ? room : found;
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_processor_handles(amdsmi_socket_handle socket, uint32_t *count,
                                                     amdsmi_processor_handle *out)
{
    unsigned index = amd_gpu_of(socket);
    if (count == NULL || index >= SIM_MAX_GPUS) {
        return AMDSMI_STATUS_INVAL;
    }
    uint32_t found = 0, room = *count;
    for (unsigned k = 0, parts = parts_of(index); k < SIM_MAX_INSTANCES; k++) {
        if (parts >> k & 1u) {
            if (out != NULL && found < room) {
                out[found] = handle_of(index, k);
            }
            found++;
        }
    }
    *count = out != NULL && room < found ? room : found; /* a lost GPU keeps its handle */
    return amd_failure(sim_enter(0, NULL));
}

static amdsmi_status_t name_of(amdsmi_processor_handle handle, size_t size, char *name)
{
    struct amd_target t;
    amdsmi_status_t result = amd_enter(handle, &t);
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    char text[32];
    sim_pci_text(&t.gpu.pci, text, sizeof text);
    return amd_copy(name, size, text);
}

SIM_API amdsmi_status_t amdsmi_get_socket_info(amdsmi_socket_handle socket, size_t size, char *name)
{
    return name_of(socket, size, name);
}

SIM_API amdsmi_status_t amdsmi_get_processor_info(amdsmi_processor_handle handle, size_t size, char *name)
{
    return name_of(handle, size, name);
}

SIM_API amdsmi_status_t amdsmi_get_processor_handle_from_bdf(amdsmi_bdf_t bdf, amdsmi_processor_handle *out)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || out == NULL) {
        return status != SIM_OK ? amd_failure(status) : AMDSMI_STATUS_INVAL;
    }
    amdsmi_processor_handle all[AMD_MAX_DEVICES];
    unsigned count = amd_devices(all);
    for (unsigned i = 0; i < count; i++) {
        struct amd_target t;
        amdsmi_status_t result = amd_enter(all[i], &t);
        if ((result == AMDSMI_STATUS_SUCCESS || result == AMDSMI_STATUS_IO) && amd_bdf(&t.gpu.pci, t.part) == bdf) {
            *out = all[i];
            return AMDSMI_STATUS_SUCCESS;
        }
    }
    return AMDSMI_STATUS_NOT_FOUND;
}

/* ---- what it is ---- */

AMD_READ(amdsmi_get_processor_type, uint32_t, true, 1)
AMD_READ(amdsmi_get_gpu_device_bdf, amdsmi_bdf_t, true, amd_bdf(&t.gpu.pci, t.part))
AMD_READ(amdsmi_get_gpu_bdf_id, uint64_t, true,
         (uint64_t)t.gpu.pci.domain << 32 | (amd_bdf(&t.gpu.pci, t.part) & 0xFFFF))
AMD_READ(amdsmi_get_gpu_id, uint16_t, true, t.gpu.pci.device_id)
AMD_READ(amdsmi_get_gpu_revision, uint16_t, true, t.gpu.pci.revision)
AMD_READ(amdsmi_get_gpu_subsystem_id, uint16_t, true, t.gpu.pci.sub_device_id)
AMD_READ(amdsmi_get_gpu_topo_numa_affinity, int32_t, true, t.gpu.numa_node)
AMD_READ(amdsmi_topo_get_numa_node_number, uint32_t, t.gpu.numa_node >= 0, (uint32_t)t.gpu.numa_node)
AMD_READ(amdsmi_get_gpu_kfd_info, amdsmi_kfd_info_t, true,
         (amdsmi_kfd_info_t){.kfd_id = 0x1000u + render_of(&t),
                             .node_id = 2 + amd_ordinal(&t),
                             .current_partition_id = t.part == SIM_NO_INSTANCE ? 0 : t.part})

SIM_API amdsmi_status_t amdsmi_get_gpu_device_uuid(amdsmi_processor_handle handle, uint32_t *size, char *uuid)
{
    struct amd_target t;
    amdsmi_status_t result = size != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    return result != AMDSMI_STATUS_SUCCESS ? result : amd_copy(uuid, *size, t.gpu.uuid);
}

/* The 16 hexadecimal digits of the serial number that the UUID is made from. */
static void serial_of(const struct sim_gpu *gpu, char *text, size_t size)
{
    if (strlen(gpu->uuid) == 36) {
        snprintf(text, size, "%.2s%.2s%.12s", gpu->uuid, gpu->uuid + 21, gpu->uuid + 24);
    } else {
        snprintf(text, size, "0");
    }
}

SIM_API amdsmi_status_t amdsmi_get_gpu_asic_info(amdsmi_processor_handle handle, amdsmi_asic_info_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    const char *target = t.gpu.architecture_name;
    *out = (amdsmi_asic_info_t){
        .vendor_id = t.gpu.pci.vendor_id,
        .vendor_name = "Advanced Micro Devices Inc. [AMD/ATI]",
        .subvendor_id = t.gpu.pci.sub_vendor_id,
        .device_id = t.gpu.pci.device_id,
        .rev_id = t.gpu.pci.revision,
        .oam_id = t.gpu.link_count > 0 ? t.index : UINT32_MAX,
        .num_of_compute_units = sim_multiprocessors(&t.gpu, t.part),
        .target_graphics_version = strncmp(target, "gfx", 3) == 0 ? strtoull(target + 3, NULL, 16) : 0,
        .subsystem_id = t.gpu.pci.sub_device_id,
    };
    sim_text(out->market_name, sizeof out->market_name, t.gpu.name);
    serial_of(&t.gpu, out->asic_serial, sizeof out->asic_serial);
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_board_info(amdsmi_processor_handle handle, amdsmi_board_info_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_board_info_t){.manufacturer_name = "AMD"};
        sim_text(out->model_number, sizeof out->model_number, t.gpu.part_number);
        sim_text(out->product_serial, sizeof out->product_serial, t.gpu.serial);
        sim_text(out->product_name, sizeof out->product_name, t.gpu.name);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_enumeration_info(amdsmi_processor_handle handle, amdsmi_enumeration_info_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        char serial[32];
        serial_of(&t.gpu, serial, sizeof serial);
        *out = (amdsmi_enumeration_info_t){.drm_render = render_of(&t),
                                           .drm_card = card_of(&t),
                                           .hsa_id = 2 + amd_ordinal(&t),
                                           .hip_id = amd_ordinal(&t)};
        snprintf(out->hip_uuid, sizeof out->hip_uuid, "GPU-%s", serial);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vram_info(amdsmi_processor_handle handle, amdsmi_vram_info_t *out)
{
    enum { HBM3 = 4, GDDR6 = 22 };
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_vram_info_t){.vram_type = t.gpu.memory_kind == 0 ? HBM3 : GDDR6,
                                    .vram_vendor = "SAMSUNG",
                                    .vram_size = t.gpu.memory_total_mib,
                                    .vram_bit_width = t.gpu.bus_width,
                                    /* two transfers a clock, GB/s */
                                    .vram_max_bandwidth =
                                        (uint64_t)t.gpu.clock_memory_max * 4 * t.gpu.bus_width / 8 / 1000};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_driver_info(amdsmi_processor_handle handle, amdsmi_driver_info_t *out)
{
    struct amd_target t;
    struct sim_state head;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        result = amd_failure(sim_enter(0, &head));
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_driver_info_t){.driver_date = "2015/01/01 00:00", .driver_name = "amdgpu"};
        sim_text(out->driver_version, sizeof out->driver_version, head.drivers[SIM_VENDOR_AMD].version);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vbios_info(amdsmi_processor_handle handle, amdsmi_vbios_info_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_vbios_info_t){.build_date = "2024/10/18 10:15"};
        sim_text(out->name, sizeof out->name, t.gpu.name);
        sim_text(out->part_number, sizeof out->part_number, t.gpu.vbios);
        sim_text(out->version, sizeof out->version, t.gpu.vbios);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vendor_name(amdsmi_processor_handle handle, char *name, size_t size)
{
    struct amd_target t;
    amdsmi_status_t result = amd_enter(handle, &t);
    return result != AMDSMI_STATUS_SUCCESS ? result : amd_copy(name, size, "Advanced Micro Devices, Inc. [AMD/ATI]");
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vram_vendor(amdsmi_processor_handle handle, char *name, uint32_t size)
{
    struct amd_target t;
    amdsmi_status_t result = amd_enter(handle, &t);
    return result != AMDSMI_STATUS_SUCCESS ? result : amd_copy(name, size, "samsung");
}

SIM_API amdsmi_status_t amdsmi_get_cpu_affinity_with_scope(amdsmi_processor_handle handle, uint32_t size, uint64_t *set,
                                                           uint32_t scope)
{
    struct amd_target t;
    (void)scope;
    amdsmi_status_t result = set != NULL && size > 0 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    for (uint32_t i = 0; result == AMDSMI_STATUS_SUCCESS && i < size; i++) {
        set[i] = i < SIM_CPU_WORDS ? t.gpu.cpus[i] : 0;
    }
    return result;
}
