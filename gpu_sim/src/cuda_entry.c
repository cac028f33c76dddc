/* Simulated CUDA: names of errors, and its functions by name. */
#include "cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult error_text(CUresult error, const char **text, bool name)
{
    for (size_t i = 0; text != NULL && i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) {
            *text = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    if (text != NULL) {
        *text = NULL;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CU(cuGetErrorName, CUresult error, const char **text)
{
    return error_text(error, text, true);
}

CU(cuGetErrorString, CUresult error, const char **text)
{
    return error_text(error, text, false);
}

/* The newest form of a function that a program written for `version` knows. */
static void *entry_point(void *library, const char *symbol, int version)
{
    static const struct {
        const char *symbol;
        int since;
        const char *suffix;
    } exceptions[] = {
        {"cuCtxCreate", 12050, "_v4"},
        {"cuCtxCreate", 11040, "_v3"},
        {"cuGetProcAddress", 12000, "_v2"},
        {"cuGetProcAddress", 0, ""},
        {"cuEventElapsedTime", 12080, "_v2"},
        {"cuEventElapsedTime", 0, ""},
        {"cuGraphAddNode", 12030, "_v2"},
        {"cuGraphAddNode", 0, ""},
        {"cuGraphGetEdges", 12030, "_v2"},
        {"cuGraphGetEdges", 0, ""},
        {"cuGraphInstantiate", 12000, "WithFlags"},
        {"cuGraphInstantiate", 11000, "_v2"},
        {"cuMemAdvise", 12020, "_v2"},
        {"cuMemAdvise", 0, ""},
        {"cuMemPrefetchAsync", 12020, "_v2"},
        {"cuMemPrefetchAsync", 0, ""},
        {"cuStreamGetCaptureInfo", 12030, "_v3"},
        {"cuStreamGetCaptureInfo", 11030, "_v2"},
        {"cuStreamGetCaptureInfo", 0, ""},
    };
    const char *suffix = NULL;
    for (size_t i = 0; i < sizeof exceptions / sizeof *exceptions && suffix == NULL; i++) {
        if (strcmp(exceptions[i].symbol, symbol) == 0 && version >= exceptions[i].since) {
            suffix = exceptions[i].suffix;
        }
    }
    char name[128];
    snprintf(name, sizeof name, "%s%s", symbol, suffix != NULL ? suffix : "_v2");
    void *found = dlsym(library, name);
    return found != NULL || suffix != NULL ? found : dlsym(library, symbol);
}

/* As the driver does, this answers with its own functions, whatever was loaded before it. */
CU(cuGetProcAddress_v2, const char *symbol, void **function, int version, uint64_t flags, int *found)
{
    Dl_info self;
    (void)flags;
    if (symbol == NULL || function == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = NULL;
    if (dladdr((void *)errors, &self) != 0) {
        void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) {
            *function = entry_point(library, symbol, version);
            dlclose(library);
        }
    }
    if (found != NULL) {
        *found = *function != NULL ? 0 : 1; /* success, symbol not found */
    }
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CU(cuGetProcAddress, const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
