/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How programs come to our functions instead of the vendor's: each vendor has one table of calls. The library exports
 * the wrappers under the vendor's names, dlsym answers with them, and so do the vendors' own look-up functions.
 */
#ifndef SLUICE_LIMIT_HOOK_H
#define SLUICE_LIMIT_HOOK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* One entry point of a vendor's library. */
struct limit_call {
    const char *name;
    void *wrapper;     /* NULL: called by us, but not wrapped */
    int since;         /* interface version that brought it, for look-up functions that ask for one */
    const char *alias; /* another name that look-up functions know it by, from version alias_since on */
    int alias_since;
    _Atomic(void *) vendor; /* the vendor's function, once known */
};

struct limit_library {
    const char *const *sonames; /* ending with NULL */
    struct limit_call *calls;
    size_t count;
};

extern struct limit_library limit_cuda, limit_hip, limit_opencl, limit_nvml;

/* The vendor's function; NULL where its library is not loaded or lacks it. */
void *limit_vendor(const struct limit_library *library, struct limit_call *call);

/* The same to call; `absent` where there is none: it answers as the vendor's library does before it is initialized. */
typedef void limit_function(void);
limit_function *limit_function_of(const struct limit_library *library, struct limit_call *call, limit_function *absent);

/* The call of this name that has a wrapper, or NULL. */
struct limit_call *limit_find_call(const struct limit_library *library, const char *name);

/*
 * Which call the vendor's look-up function answered with, when it was asked for `symbol` (name, for any of name,
 * name_v2, name_ptsz ...): the one whose exported function this is, or else the newest form that a program written for
 * `version` knows; `per_thread`: the form for per-thread default streams, where there is one. NULL: none that has a
 * wrapper.
 */
struct limit_call *limit_find_form(const struct limit_library *library, const char *symbol, int version,
                                   bool per_thread, const void *answer);

/* A found function is the vendor's own: remember it, unless one is known, and answer with the wrapper. */
void *limit_replace(struct limit_call *call, void *vendor);

/*
 * A vendor's table is two lists of names: WRAPPED(CALL) of CALL(name) or CALL(name, since, alias, alias_since), and
 * NEEDED(CALL), what else we call, of CALL(name, types of its parameters ...). From them come the calls' numbers, their
 * rows in the table, and the declarations of what we only call.
 */
#define LIMIT_NUMBER(NAME, ...) CALL_##NAME,
#define LIMIT_ROW(NAME, ...) [CALL_##NAME] = {.name = #NAME, .wrapper = (void *)(NAME), __VA_ARGS__},
#define LIMIT_ROW_NEEDED(NAME, ...) [CALL_##NAME] = {.name = #NAME},
#define LIMIT_DECLARE(NAME, ...) int NAME(__VA_ARGS__);

#define LIMIT_EXPORT __attribute__((visibility("default")))

#endif
