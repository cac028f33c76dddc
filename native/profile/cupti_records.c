/* SPDX-License-Identifier: Apache-2.0 */
/* CUPTI's records as ours. */
#include "cupti.h"

struct reading {
    const struct cupti *cupti;
    struct profile_file *file;
    int64_t clock;
};

/* 0 is CUPTI's word for a time that it does not know. */
static uint64_t when(const struct reading *reading, uint64_t theirs)
{
    return theirs != 0 ? theirs + (uint64_t)reading->clock : 0;
}

static uint8_t place(unsigned kind)
{
    return (uint8_t)(kind == CUPTI_MEMORY_STATIC     ? SLUICE_PROFILE_ON_DEVICE
                     : kind == CUPTI_MANAGED_STATIC  ? SLUICE_PROFILE_MANAGED
                     : kind > SLUICE_PROFILE_MANAGED ? SLUICE_PROFILE_UNKNOWN
                                                     : kind);
}

/* What records of work on a device have under the same names, each structure at places of its own. */
#define ON_DEVICE(READING, THEIRS)                                                                                     \
    .device = (THEIRS)->device, .start = when(READING, (THEIRS)->start), .end = when(READING, (THEIRS)->end),          \
    .context = (THEIRS)->context, .stream = (THEIRS)->stream, .correlation = (THEIRS)->correlation

static void of_kernel(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_kernel *theirs = (const struct cupti_kernel *)record;
    struct sluice_profile_record ours = {.kind = SLUICE_PROFILE_KERNEL, ON_DEVICE(reading, theirs)};
    for (int i = 0; i < 3; i++) {
        ours.kernel.grid[i] = (uint32_t)theirs->grid[i];
        ours.kernel.block[i] = (uint32_t)theirs->block[i];
    }
    ours.name = theirs->name != NULL ? file_name(reading->file, theirs->name) : 0;
    file_add(reading->file, &ours);
}

static void of_memcpy(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memcpy *theirs = (const struct cupti_memcpy *)record;
    file_add(reading->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_COPY,
                                                            ON_DEVICE(reading, theirs),
                                                            .copy = {.bytes = theirs->bytes,
                                                                     .from = place(theirs->from),
                                                                     .to = place(theirs->to),
                                                                     .peer = UINT32_MAX}});
}

static void of_memcpy2(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memcpy2 *theirs = (const struct cupti_memcpy2 *)record;
    bool leaves = theirs->device == theirs->from_device;
    file_add(reading->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_COPY,
                                             ON_DEVICE(reading, theirs),
                                             .copy = {.bytes = theirs->bytes,
                                                      .from = place(theirs->from),
                                                      .to = place(theirs->to),
                                                      .peer = leaves ? theirs->to_device : theirs->from_device}});
}

static void of_memset(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memset *theirs = (const struct cupti_memset *)record;
    file_add(reading->file,
             &(struct sluice_profile_record){
                 .kind = SLUICE_PROFILE_FILL,
                 ON_DEVICE(reading, theirs),
                 .copy = {.bytes = theirs->bytes, .to = place(theirs->memory_kind), .peer = UINT32_MAX}});
}

static void of_memory(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_memory *theirs = (const struct cupti_memory *)record;
    uint64_t at = when(reading, theirs->when);
    file_add(reading->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_MEMORY,
                                             .device = theirs->device,
                                             .start = at,
                                             .end = at,
                                             .context = theirs->context,
                                             .stream = theirs->stream,
                                             .correlation = theirs->correlation,
                                             .memory = {.bytes = theirs->bytes,
                                                        .address = theirs->address,
                                                        .where = place(theirs->memory_kind),
                                                        .released = theirs->operation == CUPTI_MEMORY_RELEASE}});
}

static void of_synchronization(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_synchronization *theirs = (const struct cupti_synchronization *)record;
    uint32_t what = theirs->type <= SLUICE_PROFILE_SYNC_CONTEXT ? theirs->type : SLUICE_PROFILE_SYNC_OTHER;
    file_add(reading->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_SYNC,
                                                            .device = UINT32_MAX, /* CUPTI says the context alone */
                                                            .start = when(reading, theirs->start),
                                                            .end = when(reading, theirs->end),
                                                            .context = theirs->context,
                                                            .stream = theirs->stream,
                                                            .correlation = theirs->correlation,
                                                            .sync = {.what = what, .event = theirs->event}});
}

static void of_call(const struct reading *reading, const struct cupti_record *record)
{
    const struct cupti_api *theirs = (const struct cupti_api *)record;
    const char *name = NULL;
    reading->cupti->cuptiGetCallbackName(CUPTI_DRIVER_API, theirs->function, &name);
    uint32_t number = name != NULL ? file_name(reading->file, name) : 0;
    file_add(reading->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_CALL,
                                             .device = UINT32_MAX,
                                             .start = when(reading, theirs->start),
                                             .end = when(reading, theirs->end),
                                             .correlation = theirs->correlation,
                                             .name = number,
                                             .call = {.thread = theirs->thread, .result = (int32_t)theirs->result}});
}

static void write_record(const struct reading *reading, const struct cupti_record *record)
{
    static const struct {
        uint32_t kind;
        void (*write)(const struct reading *reading, const struct cupti_record *record);
    } kinds[] = {
        {CUPTI_KERNEL, of_kernel},   {CUPTI_MEMCPY, of_memcpy}, {CUPTI_SYNCHRONIZATION, of_synchronization},
        {CUPTI_MEMCPY2, of_memcpy2}, {CUPTI_MEMSET, of_memset}, {CUPTI_MEMORY2, of_memory},
        {CUPTI_DRIVER, of_call},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].kind == record->kind) {
            kinds[i].write(reading, record);
            return;
        }
    }
}

uint64_t cupti_write(const struct cupti *cupti, struct profile_file *file, uint8_t *data, size_t valid, int64_t clock)
{
    struct reading reading = {.cupti = cupti, .file = file, .clock = clock};
    struct cupti_record *record = NULL;
    uint64_t count = 0;
    while (cupti->cuptiActivityGetNextRecord(data, valid, &record) == CUPTI_OK) {
        write_record(&reading, record);
        count++;
    }
    return count;
}
