/* What all simulated drivers share: the node's state, who may see which GPU, and who holds how much memory. */
#ifndef SIM_H
#define SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "layout.h"

#define SIM_API __attribute__((visibility("default")))
#define SIM_MIB ((uint64_t)1024 * 1024)

enum sim_status {
    SIM_OK = 0,
    SIM_NOT_LOADED, /* no state, or no driver of this vendor */
    SIM_CORRUPT,    /* a state that fails its checks */
    SIM_CLOSED,     /* sim_open was not called */
    SIM_OLD_DRIVER, /* the driver's generation lacks the function */
    SIM_NO_DEVICE,  /* no such GPU, or not visible */
    SIM_LOST,       /* the GPU fell off the bus */
    SIM_NO_MEMORY,  /* device memory is used up */
    SIM_IO,         /* the process registry cannot be used */
    SIM_DENIED,     /* for root only */
    SIM_BUSY,       /* processes use it */
    SIM_REFUSED,    /* what is asked for cannot be */
};

/* One process's use of one GPU or MIG instance. */
struct sim_use {
    uint32_t pid;
    bool graphics;
    uint8_t instance; /* SIM_NO_INSTANCE: the whole GPU */
    uint64_t bytes;
    bool loads;         /* it reported a load, see sim_load */
    uint32_t permille;  /* of the GPU's (or instance's) time, now */
    uint32_t before;    /* the same before `since_ns` */
    uint64_t since_ns;  /* when it last changed */
    uint64_t before_ns; /* and when `before` began */
    uint64_t busy_ns;   /* GPU time that it took until now */
};

/* Load the node's state for the driver of `vendor` and find out which GPUs this process may see. Calls nest. Every
 * function below is safe to call from any thread and works on its own copy of the state. */
enum sim_status sim_open(enum sim_vendor vendor);
enum sim_status sim_close(void);

/* Wait out the driver's delay or hang, refresh the state where it changed, and check that the driver's generation is at
 * least `since` (0: any). `head` may be NULL. */
enum sim_status sim_enter(uint32_t since, struct sim_state *head);

/* The node's indices of this vendor's visible GPUs, in order; `indices` holds SIM_MAX_GPUS. */
unsigned sim_visible(uint8_t *indices);

/* sim_enter, then a copy of one GPU by the node's index. SIM_LOST still fills `gpu`. */
enum sim_status sim_gpu(uint32_t since, unsigned index, struct sim_gpu *gpu);

/* A copy without delay and without visibility, for a peer's figures. */
bool sim_peek(unsigned index, struct sim_gpu *gpu);

/* Whether this process may open a MIG instance's capability files, or an AMD partition's render node. */
bool sim_instance_visible(const struct sim_gpu *gpu, const struct sim_instance *instance);

/* Live processes on a GPU, made-up ones first, then those that allocate; at most `room` are written, the number of all
 * is returned. `instance` SIM_NO_INSTANCE: all of the GPU, its instances included. */
unsigned sim_uses(unsigned index, const struct sim_gpu *gpu, uint8_t instance, struct sim_use *uses, unsigned room);

/* Bytes in use on a GPU or instance without what the driver reserves. */
uint64_t sim_used(unsigned index, const struct sim_gpu *gpu, uint8_t instance);

/* Bytes that can be allocated on a GPU or instance when nothing is in use. */
uint64_t sim_capacity(const struct sim_gpu *gpu, uint8_t instance);

/* Multiprocessors (compute units) of a GPU or instance. */
uint32_t sim_multiprocessors(const struct sim_gpu *gpu, uint8_t instance);

/* Add `change` bytes to what this process holds. SIM_NO_MEMORY, and SIM_BUSY where the GPU's compute mode does not let
 * it in, leave all as it was. Atomic over processes; what a
 * process held is gone when it dies. */
enum sim_status sim_hold(unsigned index, uint8_t instance, int64_t change);

/* What this process holds of it. */
uint64_t sim_held(unsigned index, uint8_t instance);

/* A process that holds nothing keeps nothing open of the node's, and may go on as another process, on another node. */
void sim_let_go(void);

/* Find out again which GPUs this process may see. */
void sim_look_again(void);

/* The share of a GPU's or instance's time, in thousandths, that this process takes from now on: instead of the work of
 * kernels, which do not run. It must hold memory there. */
enum sim_status sim_load(unsigned index, uint8_t instance, uint32_t permille);

/* Average load of a process from a time (CLOCK_REALTIME) until now, in thousandths; of its last two loads at most. */
uint32_t sim_average(const struct sim_use *use, uint64_t from_ns);

/* Utilisation of the whole GPU now, in percent: its own and that of its processes. */
uint32_t sim_utilisation(unsigned index, const struct sim_gpu *gpu);

/* GPU time in ns that live processes of a GPU or instance took, and that of the GPU's own utilisation. */
uint64_t sim_busy(unsigned index, const struct sim_gpu *gpu, uint8_t instance);

uint64_t sim_now_ns(void); /* CLOCK_REALTIME */

/* Change a GPU in the node's state, as a driver does for root: `change` gets a copy of all, which becomes the state
 * when it answers SIM_OK and is forgotten otherwise. Whole or not at all, one change at a time. */
typedef enum sim_status (*sim_changer)(struct sim_state *head, struct sim_gpu *gpu, void *argument);
enum sim_status sim_change(unsigned index, sim_changer change, void *argument);

/* All of a file from an offset on, as far as it fits; -1 with errno. */
ssize_t sim_read(int fd, void *buffer, size_t size, off_t offset);
/* A file next to the state: false when its path is too long. */
bool sim_next_to_state(const char *name, char *path, size_t size);
/* A device file of this node, made as the driver's helper makes it, or taken away; nothing where visibility is not
 * checked. */
void sim_make_device(const char *name, uint32_t major, uint32_t minor, uint32_t mode);
void sim_drop_device(const char *name);
/* CRC-32, and whether a state can be relied on. */
uint32_t sim_checksum(const void *data, size_t size);
bool sim_sound(const void *state, size_t size);

/* Limits on the memory of a cgroup (version 2), as drivers from R615 have them; SIM_NO_LIMIT: none. */
#define SIM_NO_LIMIT UINT64_MAX
struct sim_cgroup_limit {
    uint64_t soft, hard, used;
};
enum sim_status sim_limit_cgroup(unsigned index, const char *folder, uint64_t soft, uint64_t hard);
/* The limits of a cgroup itself; SIM_NO_DEVICE when it has none. */
enum sim_status sim_cgroup_limits(unsigned index, const char *folder, struct sim_cgroup_limit *limit);
/* Those that hold this process: of the nearest cgroup above it that has any. */
bool sim_process_cgroup_limits(unsigned index, struct sim_cgroup_limit *limit);

/* Most that this process may hold on a GPU in addition to all other limits, as an MPS client; set by the runtime. */
extern uint64_t sim_process_limit[SIM_MAX_GPUS];
/* The MPS daemon whose client this process is, 0: none; set by the runtime. In the exclusive mode its clients are
 * one. */
extern uint32_t sim_mps_server;

/* Power (power.c): what a GPU draws is what it would, at most its limit. Under a limit it is slower; speed and clock follow
 * layout.py's SPEED_CURVE. */
uint32_t sim_power(const struct sim_gpu *gpu);         /* mW now */
uint32_t sim_speed(const struct sim_gpu *gpu);         /* thousandths of its speed without a limit */
uint32_t sim_clock(const struct sim_gpu *gpu);         /* graphics, MHz */
uint32_t sim_clock_at_work(const struct sim_gpu *gpu); /* the same of a GPU that kernels keep busy: as high as it may */
uint64_t sim_throttle(const struct sim_gpu *gpu);      /* NVML's bits */
uint64_t sim_energy(const struct sim_gpu *gpu);        /* mJ since boot */
/* Whether this vendor's driver has power limits at all. */
bool sim_limits_power(void);
/* Set a GPU's limit until the next one: SIM_REFUSED out of its range, SIM_DENIED for all but root, SIM_OLD_DRIVER and
 * SIM_IO as the driver is told to answer. */
enum sim_status sim_limit_power(unsigned index, uint32_t mw);

/* PCI address as domain:bus:device.function in lower case. */
void sim_pci_text(const struct sim_pci *pci, char *text, size_t size);

/* Copy a string; false when it does not fit (the text is then cut). */
bool sim_text(char *to, size_t size, const char *from);

#endif
