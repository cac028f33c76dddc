/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of libraries that load no tools by themselves, which a preloaded library sees before them. */
#ifndef SLUICE_PROFILE_PRELOAD_H
#define SLUICE_PROFILE_PRELOAD_H

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

/* A call of `library`, also where the program has it in a scope of its own; NULL: it is not loaded. */
HIDDEN void *preload_find(const char *library, const char *name);

/* A call of a library of another name: the next of all, or what `caller` has in its own scope; NULL: there is none. */
HIDDEN void *preload_find_next(const char *name, const void *caller);

/* The library of profiles is loaded: `look_up` finds a name in it. */
HIDDEN void oneccl_begin(void *library, void *(*look_up)(void *library, const char *name));

/* Of oneCCL's calls the one here in its place; NULL: it has none. */
HIDDEN void *oneccl_wrapper(const char *name);

#define ONECCL_LIBRARY "libccl.so.2"

#endif
