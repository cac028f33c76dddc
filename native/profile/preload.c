/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded (LD_PRELOAD) into programs of steps that asked for a profile of Intel's GPUs, whose driver loads no tools by
 * itself. It waits for the program to initialize Level Zero, and only then loads the library of profiles next to it: a
 * shell of the job has this small library and nothing else, no thread and no open file. Calls of oneCCL pass through it,
 * too (preload_oneccl.c).
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "level_zero_abi.h"
#include "preload.h"

#define LOADER "libze_loader.so.1"

/* musl has none: a program of it, which LD_PRELOAD brings this library into as well, would not start. It is not profiled. */
#pragma weak dlvsym

typedef void *dlsym_function(void *handle, const char *symbol);
typedef uint32_t init_function(uint32_t flags);
typedef uint32_t init_drivers_function(uint32_t *count, void *drivers, void *how);

/* For dlsym.S: the next after ours, which is the C library's or the limiter's, who must not be led past. */
HIDDEN _Atomic(dlsym_function *) dlsym_next;

static dlsym_function *look_up(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    dlsym_function *next = atomic_load_explicit(&dlsym_next, memory_order_acquire), *of_libc = NULL;
    if (next != NULL) {
        return next;
    }
    if (dlvsym == NULL) {
        return dlsym; /* musl's, which passes by ours as it has versions */
    }
    for (size_t i = 0; of_libc == NULL && i < sizeof versions / sizeof *versions; i++) {
        *(void **)&of_libc = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    }
    if (of_libc != NULL) {
        *(void **)&next = of_libc(RTLD_NEXT, "dlsym");
    }
    next = next != NULL ? next : of_libc;
    atomic_store_explicit(&dlsym_next, next, memory_order_release);
    return next;
}

/* ---- jobs that a step submits ---- */

/* A list of names without one of them, in its place. */
static void remove_name(char *list, const char *name)
{
    static const char separators[] = ": ";
    char *end = list;
    for (char *at = list + strspn(list, separators); *at != 0; at += strspn(at, separators)) {
        size_t length = strcspn(at, separators);
        if (length != strlen(name) || memcmp(at, name, length) != 0) {
            if (end != list) {
                *end++ = ':';
            }
            memmove(end, at, length);
            end += length;
        }
        at += length;
    }
    *end = 0;
}

/* What this program submits has this environment: the library may not be where it runs, of which ld.so would say a line
 * for each program. Where it asked for a profile, its tasks are given it again. */
__attribute__((constructor)) static void leave_submitted(void)
{
    const char *own_name = program_invocation_short_name;
    Dl_info own;
    if (strcmp(own_name, "sbatch") != 0 && strcmp(own_name, "srun") != 0 && strcmp(own_name, "salloc") != 0) {
        return;
    }
    char *list = getenv("LD_PRELOAD");
    if (list != NULL && dladdr((void *)look_up, &own) != 0) {
        remove_name(list, own.dli_fname);
        if (*list == 0) {
            unsetenv("LD_PRELOAD");
        }
    }
}

/* ---- the program begins ---- */

static void load(void)
{
    static const char name[] = "libsluice_profile.so";
    char path[4096];
    Dl_info own;
    void (*begin)(void) = NULL;
    if (dladdr((void *)look_up, &own) == 0 || strlen(own.dli_fname) + sizeof name > sizeof path) {
        return;
    }
    strcpy(path, own.dli_fname);
    char *slash = strrchr(path, '/');
    strcpy(slash != NULL ? slash + 1 : path, name);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) {
        *(void **)&begin = look_up()(library, "sluice_profile_level_zero");
    }
    if (begin != NULL) {
        begin();
        oneccl_begin(library, look_up());
    }
}

static uint32_t initialized(uint32_t result)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (result == ZE_OK && dlvsym != NULL) {
        pthread_once(&once, load);
    }
    return result;
}

void *preload_find(const char *library, const char *name)
{
    dlsym_function *look = look_up();
    void *opened = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void *found = look != NULL && opened != NULL ? look(opened, name) : NULL;
    if (opened != NULL) {
        dlclose(opened);
    }
    return found;
}

void *preload_find_next(const char *name, const void *caller)
{
    dlsym_function *look = look_up();
    void *found = look != NULL ? look(RTLD_NEXT, name) : NULL;
    Dl_info of_caller;
    if (found == NULL && dladdr(caller, &of_caller) != 0) {
        found = preload_find(of_caller.dli_fname, name);
    }
    return found;
}

EXPORT uint32_t zeInit(uint32_t flags);
EXPORT uint32_t zeInitDrivers(uint32_t *count, void *drivers, void *how);

uint32_t zeInit(uint32_t flags)
{
    init_function *theirs;
    *(void **)&theirs = preload_find(LOADER, "zeInit");
    return theirs != NULL ? initialized(theirs(flags)) : ZE_NOT_INITIALIZED;
}

uint32_t zeInitDrivers(uint32_t *count, void *drivers, void *how)
{
    init_drivers_function *theirs;
    *(void **)&theirs = preload_find(LOADER, "zeInitDrivers");
    return theirs != NULL ? initialized(theirs(count, drivers, how)) : ZE_NOT_INITIALIZED;
}

/* ---- programs that look these calls up ---- */

static void *wrapper_of(const char *symbol)
{
    return strcmp(symbol, "zeInit") == 0          ? (void *)zeInit
           : strcmp(symbol, "zeInitDrivers") == 0 ? (void *)zeInitDrivers
                                                  : oneccl_wrapper(symbol);
}

/* What dlsym answers by itself; (void *)-1: the C library answers (dlsym.S). */
HIDDEN void *dlsym_choose(void *handle, const char *symbol)
{
    void *const leave = (void *)-1;
    dlsym_function *look = look_up();
    void *wrapper = symbol != NULL ? wrapper_of(symbol) : NULL;
    if (wrapper == NULL || look == NULL || handle == RTLD_NEXT) {
        return leave;
    }
    void *theirs = preload_find(symbol[0] == 'z' ? LOADER : ONECCL_LIBRARY, symbol), *found = look(handle, symbol);
    if (found == wrapper) { /* in the global scope: our export must not pretend that there is a loader */
        return theirs != NULL ? wrapper : look(RTLD_NEXT, symbol);
    }
    return found != NULL && found == theirs ? wrapper : leave;
}
