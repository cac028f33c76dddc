/* SPDX-License-Identifier: Apache-2.0 */
#include "hook.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

static struct limit_library *const libraries[] = {&limit_cuda, &limit_hip, &limit_opencl, &limit_nvml};

typedef void *dlsym_function(void *handle, const char *symbol);

/* The C library's dlsym. dlvsym is left alone, and leads there. */
__attribute__((visibility("hidden"))) _Atomic(dlsym_function *) dlsym_next;

static dlsym_function *libc_dlsym(void)
{
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    dlsym_function *found = atomic_load_explicit(&dlsym_next, memory_order_acquire);
    for (size_t i = 0; !found && i < sizeof versions / sizeof *versions; i++) {
        void *symbol = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        memcpy(&found, &symbol, sizeof found);
    }
    atomic_store_explicit(&dlsym_next, found, memory_order_release);
    return found;
}

/* What a shared object calls itself; NULL: nothing. */
static const char *soname(const struct link_map *object)
{
    const char *strings = NULL;
    ElfW(Xword) offset = 0;
    for (const ElfW(Dyn) *entry = object->l_ld; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            strings = (const char *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_SONAME)
            offset = entry->d_un.d_val;
    }
    return strings && offset ? strings + offset : NULL;
}

/* By the name in the object itself, so that a copy of the driver under another path is the driver, too. */
static bool is_vendors(const struct limit_library *library, const void *function)
{
    Dl_info info;
    struct link_map *object = NULL;
    if (!dladdr1(function, &info, (void **)&object, RTLD_DL_LINKMAP) || !object)
        return false;
    const char *name = soname(object);
    for (const char *const *known = library->sonames; name && *known; known++)
        if (strncmp(name, *known, strlen(*known)) == 0)
            return true;
    return false;
}

void *limit_vendor(const struct limit_library *library, struct limit_call *call)
{
    void *found = atomic_load_explicit(&call->vendor, memory_order_acquire);
    dlsym_function *look = found ? NULL : libc_dlsym();
    if (found || !look)
        return found;
    found = look(RTLD_NEXT, call->name); /* a wrapper of the tenant's own stays in the chain */
    for (const char *const *name = library->sonames; !found && *name; name++) {
        void *handle = dlopen(*name, RTLD_LAZY | RTLD_NOLOAD);
        if (handle) {
            found = look(handle, call->name);
            dlclose(handle);
        }
    }
    if (found)
        atomic_store_explicit(&call->vendor, found, memory_order_release);
    return found;
}

limit_function *limit_function_of(const struct limit_library *library, struct limit_call *call, limit_function *absent)
{
    void *found = limit_vendor(library, call);
    limit_function *function = absent;
    if (found)
        memcpy(&function, &found, sizeof function);
    return function;
}

struct limit_call *limit_find_call(const struct limit_library *library, const char *name)
{
    for (size_t i = 0; i < library->count; i++)
        if (library->calls[i].wrapper && strcmp(library->calls[i].name, name) == 0)
            return &library->calls[i];
    return NULL;
}

/* Whether `name` is `symbol` with any of _v2 .. _v9 and of _ptsz, _ptds, _spt behind it. */
static bool is_form(const char *name, const char *symbol, bool *per_thread)
{
    size_t length = strlen(symbol);
    if (strncmp(name, symbol, length) != 0)
        return false;
    const char *rest = name + length;
    if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '2' && rest[2] <= '9')
        rest += 3;
    *per_thread = strcmp(rest, "_ptsz") == 0 || strcmp(rest, "_ptds") == 0 || strcmp(rest, "_spt") == 0;
    return *rest == 0 || *per_thread;
}

/* Whether look-up functions may mean this call by `symbol`; *since: from which version on. */
static bool goes_by(const struct limit_call *call, const char *symbol, int *since, bool *per_thread)
{
    *per_thread = false;
    if (call->alias && strcmp(call->alias, symbol) == 0) {
        *since = call->alias_since;
        return true;
    }
    *since = call->since;
    return is_form(call->name, symbol, per_thread);
}

struct limit_call *limit_find_form(const struct limit_library *library, const char *symbol, int version,
                                   bool per_thread, const void *answer)
{
    struct limit_call *best = NULL;
    int best_since = -1;
    bool best_per_thread = false;
    for (size_t i = 0; i < library->count; i++) {
        struct limit_call *call = &library->calls[i];
        bool threads;
        int since;
        if (!call->wrapper || !goes_by(call, symbol, &since, &threads))
            continue;
        if (call->wrapper == answer || limit_vendor(library, call) == answer)
            return call; /* the wrapper: the vendor's library found it through our dlsym, as HIP does */
        if (since > version || (threads && !per_thread) || since < best_since ||
            (since == best_since && (!threads || best_per_thread)))
            continue;
        best = call;
        best_since = since;
        best_per_thread = threads;
    }
    return best;
}

void *limit_replace(struct limit_call *call, void *vendor)
{
    void *none = NULL;
    if (vendor != call->wrapper)
        atomic_compare_exchange_strong(&call->vendor, &none, vendor);
    return call->wrapper;
}

static struct limit_call *find_by_name(const char *symbol, const struct limit_library **library)
{
    if (!symbol || (strncmp(symbol, "cu", 2) != 0 && strncmp(symbol, "hip", 3) != 0 && strncmp(symbol, "cl", 2) != 0 &&
                    strncmp(symbol, "nvml", 4) != 0))
        return NULL;
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        struct limit_call *call = limit_find_call(libraries[i], symbol);
        if (call) {
            *library = libraries[i];
            return call;
        }
    }
    return NULL;
}

/*
 * What our dlsym answers by itself; (void *)-1: the C library answers. It is then jumped to, not called, as it looks at
 * its caller's address to know what comes "next": a tenant's own preloaded library must find what it would without us.
 */
__attribute__((visibility("hidden"))) void *dlsym_choose(void *handle, const char *symbol)
{
    void *const leave = (void *)-1;
    const struct limit_library *library = NULL;
    dlsym_function *look = libc_dlsym();
    struct limit_call *call = find_by_name(symbol, &library);
    if (!call || !look || handle == RTLD_NEXT)
        return leave;
    void *found = handle == RTLD_DEFAULT ? call->wrapper : look(handle, symbol);
    if (found == call->wrapper) /* in the global scope: our exports must not pretend that a driver is loaded */
        return limit_vendor(library, call) ? leave : look(RTLD_NEXT, symbol);
    return found && is_vendors(library, found) ? limit_replace(call, found) : leave;
}
