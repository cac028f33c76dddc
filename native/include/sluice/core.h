/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sluice's scheduling core: where jobs go, in which order, and who holds how much GPU memory.
 *
 * Contract of the whole header
 *   - The core knows no Slurm, files, clocks or logging: `now` is a parameter, so every decision can be
 * replayed.
 *   - Handles are opaque, made by *_new and given back by *_free; *_free(NULL) does nothing.
 *   - Distinct handles are independent; calls on one handle must not overlap, unless a function says
 * otherwise.
 *   - Every function that can fail returns enum sluice_error and writes results through out-pointers, which
 * it leaves untouched on failure. A last parameter `struct sluice_error_text *text` may be NULL; on failure
 * it receives one line that names the value, the place and the remedy. A failed call changes nothing.
 *   - After set-up no function on the decision path allocates memory.
 *   - Decisions are deterministic: the same calls give the same results on every machine. No floating point
 * decides.
 *   - Memory is in MiB, CPUs in thousandths of a CPU, time in seconds, unless a name says otherwise.
 *
 * cffi definitions are generated from this file: declarations, enums and structs only, no function-like
 * macros.
 */
#ifndef SLUICE_CORE_H
#define SLUICE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------ errors
 * ---- */

/* Append only: values are part of the ABI. */
enum sluice_error {
    SLUICE_OK = 0,
    SLUICE_ERROR_NO_MEMORY = 1, /* the host is out of memory */
    SLUICE_ERROR_INVALID = 2,   /* an argument is malformed or contradicts another */
    SLUICE_ERROR_RANGE = 3,     /* a number is negative, overflows or lies outside its documented bounds */
    SLUICE_ERROR_UNKNOWN = 4,   /* an id or name that the handle does not know */
    SLUICE_ERROR_DUPLICATE = 5, /* an id or name that the handle knows already */
    SLUICE_ERROR_CAPACITY = 6,  /* more than the handle was made for, or more than a device has */
    SLUICE_ERROR_NO_PLACE = 7,  /* valid, but nothing fits now; see sluice_explanation */
    SLUICE_ERROR_NEVER = 8,     /* valid, but nothing would fit even on an idle cluster */
    SLUICE_ERROR_QUOTA = 9,     /* an owner's quota or limit forbids it */
    SLUICE_ERROR_CORRUPT = 10,  /* shared or serialised state fails its checks */
    SLUICE_ERROR_BUSY = 11,     /* in use; try again */
    SLUICE_ERROR_VERSION = 12,  /* made by an incompatible version */
    SLUICE_ERROR_SYSTEM = 13,   /* the operating system refused; text carries errno's words */
};

enum { SLUICE_ERROR_TEXT_SIZE = 256 };

/* Caller-owned room for one line of explanation; always NUL-terminated after a failed call. */
struct sluice_error_text {
    char text[SLUICE_ERROR_TEXT_SIZE];
};

/* The error's name in words, e.g. "no place now". Never NULL; static storage. */
const char *sluice_strerror(enum sluice_error error);

/* Version of this library, "MAJOR.MINOR.PATCH"; static storage. */
const char *sluice_core_version(void);

/* ----------------------------------------------------------------------- cluster model (nodes, GPUs, state)
 * ---- */

/* --------------------------------------------------------------- requests, placement, gang, release, explain
 * ---- */

/* ------------------------------------------------------------------ order: priority, fair-share, deadline
 * ... ---- */

/* ------------------------------------------------------------------------------------------------ preemption
 * ---- */

/* -------------------------------------------------------------------------------------------------- backfill
 * ---- */

/* --------------------------------------------------------------------------------------------- memory ledger
 * ---- */

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CORE_H */
