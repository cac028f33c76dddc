/* The part of AMD SMI's binary interface (ROCm 7.0) that the simulated driver answers, declared from AMD's public
 * documentation of it. */
#ifndef AMD_SMI_ABI_H
#define AMD_SMI_ABI_H

#include <stdbool.h>
#include <stdint.h>

typedef struct amd_handle *amdsmi_processor_handle;
typedef struct amd_handle *amdsmi_socket_handle;

typedef enum {
    AMDSMI_STATUS_SUCCESS = 0,
    AMDSMI_STATUS_INVAL = 1,
    AMDSMI_STATUS_NOT_SUPPORTED = 2,
    AMDSMI_STATUS_API_FAILED = 7,
    AMDSMI_STATUS_NO_PERM = 10,
    AMDSMI_STATUS_IO = 12,
    AMDSMI_STATUS_OUT_OF_RESOURCES = 15,
    AMDSMI_STATUS_BUSY = 30,
    AMDSMI_STATUS_NOT_FOUND = 31,
    AMDSMI_STATUS_NOT_INIT = 32,
    AMDSMI_STATUS_DRIVER_NOT_LOADED = 34,
    AMDSMI_STATUS_INSUFFICIENT_SIZE = 41,
    AMDSMI_STATUS_UNEXPECTED_DATA = 43,
    AMDSMI_STATUS_AMDGPU_RESTART_ERR = 54,
    AMDSMI_STATUS_SETTING_UNAVAILABLE = 55
} amdsmi_status_t;

enum { AMDSMI_LINK_INTERNAL, AMDSMI_LINK_PCIE, AMDSMI_LINK_XGMI, AMDSMI_LINK_NOT_APPLICABLE };

/* function:3, device:5, bus:8, domain:48 from the lowest bit */
typedef uint64_t amdsmi_bdf_t;

typedef struct {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id, num_of_compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id, reserved[21];
} amdsmi_asic_info_t;

typedef struct {
    char model_number[256], product_serial[256], fru_id[256], product_name[256], manufacturer_name[256];
    uint64_t reserved[64];
} amdsmi_board_info_t;

typedef struct {
    uint32_t drm_render, drm_card, hsa_id, hip_id;
    char hip_uuid[256];
} amdsmi_enumeration_info_t;

typedef struct {
    uint64_t kfd_id;
    uint32_t node_id, current_partition_id, reserved[12];
} amdsmi_kfd_info_t;

typedef struct {
    uint32_t vram_type;
    char vram_vendor[256];
    uint64_t vram_size; /* MB */
    uint32_t vram_bit_width;
    uint64_t vram_max_bandwidth, reserved[37];
} amdsmi_vram_info_t;

typedef struct {
    uint32_t vram_total, vram_used, reserved[2]; /* MB */
} amdsmi_vram_usage_t;

typedef struct {
    uint32_t gfx_activity, umc_activity, mm_activity, reserved[13];
} amdsmi_engine_usage_t;

typedef struct {
    char driver_version[256], driver_date[256], driver_name[256];
} amdsmi_driver_info_t;

typedef struct {
    char name[256], build_date[256], part_number[256], version[256];
    uint64_t reserved[68];
} amdsmi_vbios_info_t;

typedef struct {
    uint64_t correctable_count, uncorrectable_count, deferred_count, reserved[5];
} amdsmi_error_count_t;

typedef struct {
    uint64_t power_cap, default_power_cap, dpm_cap, min_power_cap, max_power_cap, reserved[3]; /* uW */
} amdsmi_power_cap_info_t;

typedef struct {
    uint64_t socket_power; /* W */
    uint32_t current_socket_power, average_socket_power;
    uint64_t gfx_voltage, soc_voltage, mem_voltage; /* mV */
    uint32_t power_limit;                           /* W */
    uint64_t reserved[18];
} amdsmi_power_info_t;

typedef struct {
    uint32_t clk, min_clk, max_clk; /* MHz */
    uint8_t clk_locked, clk_deep_sleep;
    uint32_t reserved[4];
} amdsmi_clk_info_t;

typedef struct {
    bool has_deep_sleep;
    uint32_t num_supported, current;
    uint64_t frequency[33]; /* Hz */
} amdsmi_frequencies_t;

typedef struct {
    struct {
        uint16_t max_pcie_width;
        uint32_t max_pcie_speed, pcie_interface_version, slot_type, max_pcie_interface_version;
        uint64_t reserved[9];
    } pcie_static;
    struct {
        uint16_t pcie_width;
        uint32_t pcie_speed, pcie_bandwidth; /* MT/s, Mb/s */
        uint64_t pcie_replay_count, pcie_l0_to_recovery_count, pcie_replay_roll_over_count, pcie_nak_sent_count,
            pcie_nak_received_count;
        uint32_t pcie_lc_perf_other_end_recovery_count;
        uint64_t reserved[12];
    } pcie_metric;
    uint64_t reserved[32];
} amdsmi_pcie_info_t;

typedef struct {
    char name[256];
    uint32_t pid;
    uint64_t mem;
    struct {
        uint64_t gfx, enc;
        uint32_t reserved[12];
    } engine_usage;
    struct {
        uint64_t gtt_mem, cpu_mem, vram_mem;
        uint32_t reserved[10];
    } memory_usage;
    char container_name[256];
    uint32_t cu_occupancy, reserved[11];
} amdsmi_proc_info_t;

typedef struct {
    uint32_t process_id;
    uint64_t vram_usage, sdma_usage;
    uint32_t cu_occupancy;
} amdsmi_process_info_t;

typedef struct {
    uint32_t num_links;
    struct {
        amdsmi_bdf_t bdf;
        uint32_t bit_rate, max_bandwidth, link_type; /* Gb/s */
        uint64_t read, write, reserved[2];
    } links[64];
    uint64_t reserved[7];
} amdsmi_link_metrics_t;

typedef struct {
    uint32_t total_links, status[8]; /* 0 down, 1 up, 2 disabled */
    uint64_t reserved[7];
} amdsmi_xgmi_link_status_t;

typedef struct {
    uint8_t xgmi_lanes;
    uint64_t xgmi_hive_id, xgmi_node_id;
    uint32_t index, reserved[9];
} amdsmi_xgmi_info_t;

typedef struct {
    uint32_t count;
    amdsmi_processor_handle processor_list[32];
    uint64_t reserved[15];
} amdsmi_topology_nearest_t;

typedef struct {
    uint8_t is_iolink_coherent, is_iolink_atomics_32bit, is_iolink_atomics_64bit, is_iolink_dma,
        is_iolink_bi_directional;
} amdsmi_p2p_capability_t;

typedef struct {
    uint64_t page_address, page_size;
    uint32_t status;
} amdsmi_retired_page_record_t;

typedef struct {
    uint32_t ras_eeprom_version, ecc_correction_schema_flag;
} amdsmi_ras_feature_t;

/* Throttling: counters since boot and percentages of late, UINT64_MAX where the driver reports none, and what holds
 * now. */
typedef struct {
    uint64_t reference_timestamp, violation_timestamp, counters[7], percents[6];
    uint8_t active_prochot_thrm, active_ppt_pwr, active_socket_thrm, active_vr_thrm, active_hbm_thrm,
        active_gfx_clk_below_host_limit;
    uint64_t partition_counters[8][8][8];
    uint8_t partition_active[4][8][8];
    uint64_t reserved[3][8][8];
} amdsmi_violation_status_t;

/* Parts of the memory (NPS) as a sum: 1, 2, 4, 8. */
typedef uint32_t amdsmi_nps_caps_t;

typedef struct {
    amdsmi_nps_caps_t partition_caps;
    uint32_t mp_mode, num_numa_ranges;
    struct {
        uint32_t memory_type;
        uint64_t start, end;
    } numa_range[32];
    uint64_t reserved[11];
} amdsmi_memory_partition_config_t;

typedef struct {
    uint32_t profile_type, num_partitions;
    amdsmi_nps_caps_t memory_caps;
    uint32_t profile_index, num_resources, resources[8][32];
    uint64_t reserved[13];
} amdsmi_accelerator_partition_profile_t;

typedef struct {
    uint32_t profile_index, resource_type, partition_resource, num_partitions_share_resource;
    uint64_t reserved[6];
} amdsmi_accelerator_partition_resource_profile_t;

typedef struct {
    uint32_t num_profiles, num_resource_profiles;
    amdsmi_accelerator_partition_resource_profile_t resource_profiles[32];
    uint32_t default_profile_index;
    amdsmi_accelerator_partition_profile_t profiles[32];
    uint64_t reserved[30];
} amdsmi_accelerator_partition_profile_config_t;

typedef struct {
    uint32_t major, minor, release;
    const char *build;
} amdsmi_version_t;

#endif
