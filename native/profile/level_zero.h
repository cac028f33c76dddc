/* SPDX-License-Identifier: Apache-2.0 */
/* Intel's GPUs through the tracing layer of Level Zero's loader, with events of our own that have the device's times. */
#ifndef SLUICE_PROFILE_LEVEL_ZERO_H
#define SLUICE_PROFILE_LEVEL_ZERO_H

#include "level_zero_abi.h"
#include "tracer.h"

struct level_zero {
#define ZE_POINTER(NAME, PARAMETERS) uint32_t(*NAME) PARAMETERS;
    ZE_CALLS(ZE_POINTER)
#undef ZE_POINTER
};

extern const struct tracer level_zero_tracer;
extern struct level_zero ze; /* filled in before anything else here is called */

/* ---- level_zero_devices.c: for one thread at a time ---- */

struct ze_gpu;

/* Once for each profile: what was known of clocks is forgotten. */
void ze_find_devices(void);
/* Of a device or a part of one; NULL: not known. From any thread. */
const struct ze_gpu *ze_gpu_of(ze_handle device);
/* UINT32_MAX: not known. */
uint32_t ze_gpu_number(const struct ze_gpu *gpu);
/* Again and again, as the devices' counters overflow. */
void ze_compare_clocks(void);
/* CLOCK_MONOTONIC by a kernel's timestamp. */
uint64_t ze_when(const struct ze_gpu *gpu, uint64_t cycles);
void ze_note_devices(struct profile_file *file);

/* ---- level_zero_records.c: from any thread ---- */

/* Into a buffer, if a profile wants records; `name` is never freed, or NULL. */
void ze_keep(const struct sluice_profile_record *record, const char *name);
void ze_keep_open(bool on);
void ze_lose(uint64_t events);
/* What was lost since the last call. */
uint64_t ze_lost(void);
/* What is kept comes to be written. */
void ze_pass_on(void);
/* Writes the records of a buffer; how many there were. */
uint64_t ze_write(struct profile_file *file, const struct buffer *buffer);

/* ---- level_zero_recorded.c: what command lists have that was recorded without events of ours; from any thread ---- */

enum ze_recorded { ZE_RECORDED_KERNELS, ZE_RECORDED_COPIES, ZE_RECORDED_KINDS };

/* One that is to be recorded is made, emptied, destroyed. Immediate ones are not known here. */
void ze_recorded_made(ze_handle list);
void ze_recorded_reset(ze_handle list);
void ze_recorded_gone(ze_handle list);
/* Something is appended that has no event. */
void ze_recorded_append(ze_handle list, enum ze_recorded kind);
/* They are executed while a profile wants `kinds` (bits). */
void ze_recorded_execute(uint32_t count, const ze_handle *lists, unsigned kinds);
/* How much was executed so since the last call. */
uint64_t ze_recorded_unseen(void);

/* ---- level_zero_work.c: work on the device, from when it is appended to a command list; from any thread ---- */

struct ze_work;

/* What is appended next to `list` and would signal `*signal`: takes an event of our own for its times. `kernel` may be NULL.
 * NULL: there is no event, or nothing is known of the list, and it is counted as lost; or no profile wants it. */
struct ze_work *ze_work_begin(ze_handle list, ze_handle *signal, const struct sluice_profile_record *record,
                              ze_handle kernel);
/* It is appended, or not; its correlation. */
uint32_t ze_work_end(struct ze_work *work, ze_handle list, bool appended);

/* Threads of a group, from now on. */
void ze_kernel_group(ze_handle kernel, const uint32_t *block);

/* A kind of memory (ze_memory_type_t) as a profile has it; 0: unknown. */
uint8_t ze_place(uint32_t kind);
/* Where memory is that work of this list uses. */
uint8_t ze_place_of(ze_handle list, const void *memory);

/* Before and after lists are executed. */
void ze_lists_begin(uint32_t count, const ze_handle *lists);
void ze_lists_end(uint32_t count, const ze_handle *lists);

/* A profile begins and ends. True: nothing of ours is in the program's contexts and lists any more. */
void ze_work_open(void);
bool ze_work_close(void);
/* The records of what is complete on the devices, which then come to be written. */
void ze_harvest(void);

/* The program ends the life of a thing whose handle may be used again. */
void ze_forget_list(ze_handle list, bool destroyed);
void ze_forget_kernel(ze_handle kernel);
void ze_forget_context(ze_handle context);

#endif
