/* SPDX-License-Identifier: Apache-2.0 */
/* A vendor's tracing library, as a profile uses it. One profile at a time; all but launches are our thread's. */
#ifndef SLUICE_PROFILE_TRACER_H
#define SLUICE_PROFILE_TRACER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buffers.h"
#include "file.h"

enum { TRACER_DEVICES = 64 }; /* of a process, at most */

struct tracer {
    uint32_t vendor; /* SLUICE_PROFILE_NVIDIA, ... */

    /* Once, when profiles can be asked for from now on, and before our thread starts; NULL: nothing is to be done. */
    void (*begin)(void);

    /* Loads the library, or takes it for this profile: 0, or why not, with words for a person. */
    enum sluice_profile_reason (*open)(char *words, size_t size);
    void (*close)(void);

    /* Begins or ends the collection of what is wanted; answers as `open` does. Records come through buffers.h. */
    enum sluice_profile_reason (*collect)(uint32_t wanted, bool on, char *words, size_t size);

    /* Calls launches_begin and launches_end around launches, or no more. */
    void (*watch_launches)(bool on);

    /* What is complete comes into full buffers; `all`: and what is not. */
    void (*flush)(bool all);

    /* ns of the vendor's clock. */
    uint64_t (*now)(void);

    /* Writes the records of a buffer; how many there were. `clock` is what to add to get CLOCK_MONOTONIC. */
    uint64_t (*write)(struct profile_file *file, const struct buffer *buffer, int64_t clock);

    /* How many events had no room since it was last asked. */
    uint64_t (*dropped)(void);

    /* How many kernels and copies ran since then without times, as they were recorded before; NULL: there are none. */
    uint64_t (*unseen)(void);

    /* ns of processor time that threads of the library have spent since it was last asked; NULL: none are ours to count. */
    uint64_t (*spent)(void);

    /* Writes all devices that the process sees: one is known before its records come. */
    void (*note_devices)(struct profile_file *file);

    /* In a child after a fork: its callbacks do nothing from now on; NULL: they do no harm. */
    void (*abandon)(void);
};

#endif
