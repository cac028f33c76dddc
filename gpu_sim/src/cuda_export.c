/* Simulated CUDA: the tables of unnamed functions that the vendor's runtime library (libcudart) asks the driver for, as
 * far as that library calls them. The layouts are what it was seen to call, and what ZLUDA documents. */
#include "cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void function(void);
#define ENTRY(FUNCTION) ((function *)(FUNCTION))
static CUresult unknown_entry(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- the runtime's own calls: primary contexts, and code ---- */

/* Without making it active. */
static CUresult primary_handle(CUcontext *context, CUdevice device)
{
    if (context == NULL || rt_primary_handle(device) == NULL) {
        return context == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    }
    *context = rt_primary_handle(device);
    return CUDA_SUCCESS;
}

static CUresult load(struct cu_code **code, const void *image)
{
    return cuda_load(code, image);
}

static CUresult load_from(const void *image, struct cu_code **code)
{
    return cuda_load(code, image);
}

/* The driver brings its compilers. */
static CUresult load_compilers(void)
{
    return CUDA_SUCCESS;
}

static function *runtime_table[13] = {[1] = ENTRY(load),
                                      [2] = ENTRY(primary_handle),
                                      [6] = ENTRY(load),
                                      [8] = ENTRY(load_from),
                                      [12] = ENTRY(load_compilers)};

/* ---- contexts, for tools ---- */

/* Drivers have two entries; a third stands for what later ones may have. */
static int create_state(void)
{
    return 42;
}

static function *create_table[3] = {[1] = ENTRY(cuda_create_context), [2] = ENTRY(create_state)};

/* ---- callbacks of profilers, for which the runtime asks which are on: none ---- */

enum { CALLBACKS = 1024, RESOURCES = 64 };
static unsigned callback_flags[CALLBACKS], resource_flags[RESOURCES];

static void callbacks_of(unsigned **flags, size_t *count)
{
    *flags = callback_flags;
    *count = CALLBACKS;
}

static void resources_of(unsigned **flags, size_t *count)
{
    *flags = resource_flags;
    *count = RESOURCES;
}

static function *callback_table[7] = {[2] = ENTRY(callbacks_of), [6] = ENTRY(resources_of)};

/* ---- values that the runtime keeps with a context ---- */

typedef void destructor(CUcontext context, void *key, void *value);

struct local_value {
    CUcontext context;
    void *key, *value;
    destructor *destroy;
    struct local_value *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct local_value *local_values;

/* The lock is held. */
static struct local_value **place_of(CUcontext context, const void *key)
{
    struct local_value **place = &local_values;
    while (*place != NULL && ((*place)->context != context || (*place)->key != key)) {
        place = &(*place)->next;
    }
    return place;
}

static CUresult context_or_current(CUcontext *context)
{
    if (*context == NULL) {
        return cuda_context(context);
    }
    return rt_context_valid(*context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult local_put(CUcontext context, void *key, void *value, destructor *destroy)
{
    CUresult result = context_or_current(&context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    struct local_value **place = place_of(context, key);
    struct local_value *it = *place != NULL ? *place : calloc(1, sizeof *it);
    if (it != NULL) {
        *it = (struct local_value){context, key, value, destroy, it->next};
        *place = it;
    }
    pthread_mutex_unlock(&lock);
    return it != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult local_delete(CUcontext context, void *key)
{
    CUresult result = context_or_current(&context);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    struct local_value **place = place_of(context, key), *it = *place;
    if (it != NULL) {
        *place = it->next;
    }
    pthread_mutex_unlock(&lock);
    free(it);
    return it != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult local_get(void **value, CUcontext context, void *key)
{
    CUresult result = value != NULL ? context_or_current(&context) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    pthread_mutex_lock(&lock);
    struct local_value *it = *place_of(context, key);
    if (it != NULL) {
        *value = it->value;
    }
    pthread_mutex_unlock(&lock);
    return it != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void cuda_context_ends(CUcontext context)
{
    cuda_drop_variables(context);
    for (;;) {
        pthread_mutex_lock(&lock);
        struct local_value **place = &local_values;
        while (*place != NULL && (*place)->context != context) {
            place = &(*place)->next;
        }
        struct local_value *it = *place;
        if (it != NULL) {
            *place = it->next;
        }
        pthread_mutex_unlock(&lock);
        if (it == NULL) {
            return;
        }
        if (it->destroy != NULL) { /* without the lock: it may come back here */
            it->destroy(it->context, it->key, it->value);
        }
        free(it);
    }
}

static function *local_table[4] = {ENTRY(local_put), ENTRY(local_delete), ENTRY(local_get)};

/* ---- whether a context is in a state that the runtime must not use: none is ---- */

static CUresult check_context(CUcontext context, unsigned *state, const void **detail)
{
    (void)context;
    (void)detail;
    *state = 0;
    return CUDA_SUCCESS;
}

static unsigned checks_wanted(void)
{
    return 0;
}

static function *check_table[4] = {[2] = ENTRY(check_context), [3] = ENTRY(checks_wanted)};

/* ---- the runtime's test of the driver: HMAC-MD2 (RFC 2104, RFC 1319) of what both know ---- */

enum { BLOCK = 16, ROUNDS = 18 };

/* RFC 1319's permutation of the bytes, from the digits of pi. */
static const unsigned char pi[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243, 192, 199,
    115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,  103, 66,  111, 24,
    138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142, 187, 47,  238, 122, 169, 104,
    121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,
    53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,
    170, 198, 79,  184, 56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,
    100, 113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,
    97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,
    44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193,
    171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,
    80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20};

struct md2 {
    unsigned char state[3 * BLOCK], checksum[BLOCK], pending[BLOCK];
    unsigned length; /* of what is pending */
};

static void md2_block(struct md2 *md, const unsigned char *block)
{
    unsigned char last = md->checksum[BLOCK - 1];
    for (unsigned i = 0; i < BLOCK; i++) {
        md->state[BLOCK + i] = block[i];
        md->state[2 * BLOCK + i] = block[i] ^ md->state[i];
        last = md->checksum[i] ^= pi[block[i] ^ last];
    }
    unsigned char at = 0;
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < sizeof md->state; i++) {
            at = md->state[i] ^= pi[at];
        }
        at = (unsigned char)(at + round);
    }
}

static void md2_add(struct md2 *md, const void *bytes, size_t size)
{
    const unsigned char *from = bytes;
    for (size_t i = 0; i < size; i++) {
        md->pending[md->length++] = from[i];
        if (md->length == BLOCK) {
            md2_block(md, md->pending);
            md->length = 0;
        }
    }
}

static void md2_end(struct md2 *md, unsigned char digest[BLOCK])
{
    unsigned char padding[BLOCK], checksum[BLOCK];
    memset(padding, (int)(BLOCK - md->length), sizeof padding);
    md2_add(md, padding, BLOCK - md->length);
    memcpy(checksum, md->checksum, sizeof checksum);
    md2_block(md, checksum);
    memcpy(digest, md->state, BLOCK);
}

static void md2_key(struct md2 *md, unsigned char pad)
{
    static const unsigned char key[BLOCK] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                             0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};
    for (unsigned i = 0; i < BLOCK; i++) {
        md2_add(md, &(unsigned char){key[i] ^ pad}, 1);
    }
}

static CUresult test_driver(unsigned version, uint64_t seconds, unsigned char digest[BLOCK]);

static function *test_table[3] = {[1] = ENTRY(test_driver)};

static CUresult test_driver(unsigned version, uint64_t seconds, unsigned char digest[BLOCK])
{
    struct md2 inner = {0}, outer = {0};
    int driver;
    cuDriverGetVersion(&driver);
    const struct {
        int driver;
        unsigned version, process, thread;
        const void *runtime_table, *test_table;
        function *test;
        uint64_t seconds;
    } known = {driver,        version,    (unsigned)getpid(), (unsigned)pthread_self(),
               runtime_table, test_table, test_table[1],      seconds};
    md2_key(&inner, 0x36);
    md2_add(&inner, &known, sizeof known);
    for (int i = 0; i < rt_count(); i++) {
        struct {
            unsigned char uuid[16];
            unsigned domain, bus, slot;
        } device = {0};
        struct sim_gpu gpu;
        CUresult result = result_of(rt_gpu(i, &gpu, NULL, NULL));
        if (result == CUDA_SUCCESS) {
            result = cuDeviceGetUuid_v2(device.uuid, i);
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
        device.domain = gpu.pci.domain;
        device.bus = gpu.pci.bus;
        device.slot = gpu.pci.device;
        md2_add(&inner, &device, sizeof device);
    }
    md2_end(&inner, digest);
    md2_key(&outer, 0x5c);
    md2_add(&outer, digest, BLOCK);
    md2_end(&outer, digest);
    return CUDA_SUCCESS;
}

/* ---- the tables ---- */

/* The runtime asks for these, and was not seen to call them. */
static function *thread_table[4], *newer_table[8];

struct table {
    unsigned char id[16];
    function **entries;
    size_t count;
    bool sized; /* the first entry is the size in bytes */
};

#define TABLE(TABLE, SIZED, ...) {{__VA_ARGS__}, TABLE, sizeof(TABLE) / sizeof *(TABLE), SIZED}

static const struct table tables[] = {
    TABLE(runtime_table, true, 0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d,
          0xf9),
    TABLE(callback_table, true, 0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c,
          0x0a, 0x66),
    TABLE(thread_table, true, 0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec,
          0xdc),
    TABLE(local_table, false, 0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95,
          0x93),
    TABLE(check_table, true, 0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa,
          0x7e),
    TABLE(create_table, true, 0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a, 0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72,
          0x86),
    TABLE(test_table, true, 0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1,
          0xf2),
    TABLE(newer_table, true, 0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8,
          0xf2),
};

CU(cuGetExportTable, const void **entries, const unsigned char *id)
{
    if (entries == NULL || id == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *entries = NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables && *entries == NULL; i++) {
        const struct table *table = &tables[i];
        if (memcmp(table->id, id, sizeof table->id) != 0) {
            continue;
        }
        for (size_t k = 0; k < table->count; k++) {
            if (table->entries[k] == NULL) {
                table->entries[k] =
                    k == 0 && table->sized ? (function *)(table->count * sizeof *table->entries) : ENTRY(unknown_entry);
            }
        }
        *entries = table->entries;
    }
    return *entries != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
