/* SPDX-License-Identifier: Apache-2.0 */
/* The memory ledger in one process: what it grants, refuses, reports and plans. */
#include "ledger_region.h"
#include "ledger_region_memory.h"

static const struct sluice_ledger_shape small = {.devices = 2, .owners = 3, .processes = 4};

static void test_regions(void)
{
    static const struct {
        struct sluice_ledger_shape shape;
        bool valid;
    } shapes[] = {
        {{1, 1, 1}, true},     {{128, 4096, 4096}, true}, {{0, 1, 1}, false},
        {{1, 0, 1}, false},    {{1, 1, 0}, false},        {{129, 1, 1}, false},
        {{1, 4097, 1}, false}, {{1, 1, 4097}, false},     {{UINT32_MAX, UINT32_MAX, UINT32_MAX}, false},
    };
    struct sluice_error_text text;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        CHECK((sluice_ledger_size(&shapes[i].shape) > 0) == shapes[i].valid);
        if (!shapes[i].valid)
            CHECK_INT(sluice_ledger_format(NULL, 0, &shapes[i].shape, NULL), SLUICE_ERROR_RANGE);
    }
    CHECK_INT(sluice_ledger_size(NULL), 0);

    size_t size = sluice_ledger_size(&small);
    char *region = shared_memory(size + 64);
    struct sluice_ledger *ledger = NULL;
    CHECK_INT(sluice_ledger_format(region + 8, size, &small, &text), SLUICE_ERROR_INVALID);
    CHECK(strstr(text.text, "aligned to 64"));
    CHECK_INT(sluice_ledger_format(region, size - 1, &small, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_ledger_format(region, size, NULL, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_ledger_new(region, size, 0, &ledger, NULL), SLUICE_ERROR_CORRUPT);
    CHECK_INT(sluice_ledger_format(region, size, &small, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_new(region, size - 1, 0, &ledger, NULL), SLUICE_ERROR_CORRUPT);
    CHECK_INT(sluice_ledger_new(region, 63, 0, &ledger, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_ledger_new(NULL, size, 0, &ledger, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_ledger_new(region, size, 0, NULL, NULL), SLUICE_ERROR_INVALID);
    struct ledger_header *header = (struct ledger_header *)region;
    header->version++;
    CHECK_INT(sluice_ledger_new(region, size, 0, &ledger, &text), SLUICE_ERROR_VERSION);
    header->version--;
    header->shape.devices = 200;
    CHECK_INT(sluice_ledger_new(region, size, 0, &ledger, NULL), SLUICE_ERROR_CORRUPT);
    header->shape.devices = small.devices;
    CHECK(!ledger);
    CHECK_INT(sluice_ledger_new(region, size, 0, &ledger, NULL), SLUICE_OK);
    struct sluice_ledger_shape shape;
    sluice_ledger_get_shape(ledger, &shape);
    CHECK(shape.devices == 2 && shape.owners == 3 && shape.processes == 4);
    sluice_ledger_free(ledger);
    sluice_ledger_free(NULL);
}

static void test_terms(void)
{
    static const struct {
        struct sluice_ledger_device terms;
        enum sluice_error error;
        uint64_t limit;
    } cases[] = {
        {{1000, 1, 1000, 0}, SLUICE_OK, 1000},
        {{1000, 512, 1000, 0}, SLUICE_OK, 512},
        {{1000, 1, 1500, 0}, SLUICE_OK, 1500},
        {{1001, 1, 1999, 0}, SLUICE_OK, 2000},
        {{0, 1, 1000, 0}, SLUICE_OK, 0},
        {{UINT64_C(1) << 46, 1, 1000, 0}, SLUICE_OK, UINT64_C(1) << 46},
        {{UINT64_C(1) << 46, 1, 1001, 0}, SLUICE_ERROR_RANGE, 0},
        {{UINT64_MAX, 1, 1000, 0}, SLUICE_ERROR_RANGE, 0},
        {{1000, 0, 1000, 0}, SLUICE_ERROR_RANGE, 0},
        {{1000, 3, 1000, 0}, SLUICE_ERROR_RANGE, 0},
        {{1000, UINT64_C(1) << 31, 1000, 0}, SLUICE_ERROR_RANGE, 0},
        {{1000, 1, 999, 0}, SLUICE_ERROR_RANGE, 0},
        {{1000, 1, 8001, 0}, SLUICE_ERROR_RANGE, 0},
    };
    void *region;
    struct sluice_ledger *ledger = new_ledger(small, 77, 1, &region);
    struct sluice_ledger_usage usage;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_INT(sluice_ledger_set_device(ledger, 1, &cases[i].terms, NULL), cases[i].error);
        CHECK_INT(sluice_ledger_device_usage(ledger, 1, &usage, NULL), SLUICE_OK);
        if (!cases[i].error)
            CHECK_INT(usage.limit, cases[i].limit);
    }
    CHECK_INT(sluice_ledger_set_device(ledger, 2, &cases[0].terms, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_ledger_set_quota(ledger, 3, 0, 1, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_ledger_set_quota(ledger, 0, 2, 1, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, NULL), SLUICE_OK);
    CHECK_INT(usage.limit, 77);
    sluice_ledger_free(ledger);
}

static void test_charges(void)
{
    void *region;
    struct sluice_ledger *ledger = new_ledger(small, 100 * MIB, 2 * MIB, &region);
    struct sluice_ledger_usage usage;
    struct sluice_ledger_charge charge, untouched = {.asked = 9, .charged = 9}, fine;
    struct sluice_error_text text;
    uint32_t a, b;
    CHECK_INT(sluice_ledger_join(ledger, 0, 11, 1, &a, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_join(ledger, 1, 12, 1, &b, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_set_quota(ledger, 1, 0, 10 * MIB, NULL), SLUICE_OK);

    CHECK_INT(sluice_ledger_reserve(ledger, a, 0, 1, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(charge.charged, 2 * MIB);
    CHECK_INT(sluice_ledger_reserve(ledger, a, 0, 513, 512, &fine, NULL), SLUICE_OK);
    CHECK_INT(fine.charged, 1024);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == 2 * MIB + 1024 && usage.committed == 0 && usage.slack == 0);
    CHECK_INT(sluice_ledger_commit(ledger, a, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_commit(ledger, a, &charge, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(sluice_ledger_process_usage(ledger, a, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == 2 * MIB + 1024 && usage.committed == 2 * MIB && usage.slack == 2 * MIB - 1);
    CHECK_INT(usage.available, 96 * MIB);
    CHECK_INT(sluice_ledger_release(ledger, a, &fine, NULL), SLUICE_OK);
    CHECK_INT(fine.charged, 0);
    CHECK_INT(sluice_ledger_release(ledger, a, &fine, NULL), SLUICE_ERROR_INVALID);

    /* The last byte of the quota, and of the device: granted; one more: refused, and nothing changes. */
    CHECK_INT(sluice_ledger_reserve(ledger, b, 0, 10 * MIB, 0, &fine, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, b, 0, 1, 1, &untouched, &text), SLUICE_ERROR_QUOTA);
    CHECK_STR(text.text, "1 bytes of device 0: owner 1 holds 10485760 of its quota of 10485760; release some or raise "
                         "the quota");
    CHECK_INT(sluice_ledger_owner_usage(ledger, 1, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.refused == 1 && usage.available == 0 && usage.limit == 10 * MIB && usage.peak == 10 * MIB);
    struct sluice_ledger_charge rest;
    CHECK_INT(sluice_ledger_reserve(ledger, a, 0, 88 * MIB, 0, &rest, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, a, 0, 1, 1, &untouched, &text), SLUICE_ERROR_CAPACITY);
    CHECK(untouched.asked == 9 && untouched.charged == 9);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.refused == 1 && usage.available == 0 && usage.charged == 100 * MIB && usage.peak == 100 * MIB);
    CHECK_INT(device_charged(ledger, 1), 0);

    /* Lowered limits take nothing away and grant nothing more. */
    struct sluice_ledger_device terms = {.capacity = 50 * MIB, .granularity = 2 * MIB, .oversubscription = 1000};
    CHECK_INT(sluice_ledger_set_device(ledger, 0, &terms, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, a, 0, 1, 1, &untouched, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == 100 * MIB && usage.available == 0);
    CHECK_INT(sluice_ledger_release(ledger, a, &rest, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_release(ledger, b, &fine, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_release(ledger, a, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_device_usage(ledger, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == 0 && usage.committed == 0 && usage.slack == 0 && usage.available == 50 * MIB);
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    sluice_ledger_free(ledger);
}

static void test_bad_requests(void)
{
    void *region;
    struct sluice_ledger *ledger = new_ledger(small, 100, 1, &region);
    uint32_t process, other;
    CHECK_INT(sluice_ledger_join(ledger, 0, 11, 1, &process, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_join(ledger, 0, 12, 1, &other, NULL), SLUICE_OK);
    const struct {
        uint32_t process, device;
        uint64_t bytes, granularity;
        enum sluice_error error;
    } cases[] = {
        {process, 2, 1, 0, SLUICE_ERROR_UNKNOWN},
        {process, 0, 0, 0, SLUICE_ERROR_RANGE},
        {process, 0, (UINT64_C(1) << 46) + 1, 0, SLUICE_ERROR_RANGE},
        {process, 0, UINT64_MAX, 0, SLUICE_ERROR_RANGE},
        {process, 0, 1, 3, SLUICE_ERROR_RANGE},
        {process, 0, 1, UINT64_C(1) << 31, SLUICE_ERROR_RANGE},
        {process, 0, 1, 128, SLUICE_ERROR_CAPACITY},
        {0, 0, 1, 0, SLUICE_ERROR_UNKNOWN},
        {process + (1 << 16), 0, 1, 0, SLUICE_ERROR_UNKNOWN},
        {process | 0xffff, 0, 1, 0, SLUICE_ERROR_UNKNOWN},
        {(1 << 16) | 3, 0, 1, 0, SLUICE_ERROR_UNKNOWN},
    };
    struct sluice_ledger_charge charge;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_INT(sluice_ledger_reserve(ledger, cases[i].process, cases[i].device, cases[i].bytes, cases[i].granularity,
                                        &charge, NULL),
                  cases[i].error);
    CHECK_INT(device_charged(ledger, 0), 0);

    CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 10, 0, &charge, NULL), SLUICE_OK);
    const struct sluice_ledger_charge forged[] = {
        {.asked = 1, .charged = 0, .device = 0},  {.asked = 2, .charged = 1, .device = 0},
        {.asked = 0, .charged = 1, .device = 0},  {.asked = 1, .charged = 1, .device = 7},
        {.asked = 1, .charged = 11, .device = 0}, {.asked = 1, .charged = UINT64_MAX, .device = 0},
    };
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        struct sluice_ledger_charge copy = forged[i];
        CHECK(sluice_ledger_release(ledger, process, &copy, NULL) != SLUICE_OK);
    }
    struct sluice_ledger_charge copy = charge;
    CHECK_INT(sluice_ledger_release(ledger, other, &copy, NULL), SLUICE_ERROR_INVALID);
    CHECK_INT(device_charged(ledger, 0), 10);
    CHECK_INT(sluice_ledger_join(ledger, 0, 0, 1, &other, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_ledger_join(ledger, 3, 1, 1, &other, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_ledger_reap(ledger, 0, 1, NULL, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_ledger_set_context(ledger, process, 0, UINT64_MAX, NULL), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    sluice_ledger_free(ledger);
}

static void test_context(void)
{
    void *region;
    struct sluice_ledger *ledger = new_ledger(small, 1000, 1, &region);
    struct sluice_ledger_usage usage;
    uint32_t process;
    CHECK_INT(sluice_ledger_join(ledger, 2, 11, 1, &process, NULL), SLUICE_OK);
    static const struct {
        uint64_t bytes;
        enum sluice_error error;
        uint64_t charged;
    } steps[] = {
        {300, SLUICE_OK, 300},   {300, SLUICE_OK, 300}, {1001, SLUICE_ERROR_CAPACITY, 300},
        {1000, SLUICE_OK, 1000}, {250, SLUICE_OK, 250}, {0, SLUICE_OK, 0},
        {0, SLUICE_OK, 0},       {7, SLUICE_OK, 7},
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        CHECK_INT(sluice_ledger_set_context(ledger, process, 1, steps[i].bytes, NULL), steps[i].error);
        CHECK_INT(sluice_ledger_device_usage(ledger, 1, &usage, NULL), SLUICE_OK);
        CHECK(usage.charged == steps[i].charged && usage.context == steps[i].charged &&
              usage.committed == steps[i].charged);
    }
    uint64_t released;
    CHECK_INT(sluice_ledger_reap(ledger, 11, 1, &released, NULL), SLUICE_OK);
    CHECK_INT(released, 7);
    sluice_ledger_free(ledger);
}

static void test_processes(void)
{
    void *region;
    struct sluice_ledger *ledger = new_ledger(small, 1000, 1, &region);
    struct sluice_ledger_charge charge;
    struct sluice_ledger_process who[4];
    uint32_t ids[4], first, again, count;
    uint64_t released;
    CHECK_INT(sluice_ledger_join(ledger, 1, 11, 5, &first, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, first, 0, 100, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_commit(ledger, first, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, first, 1, 50, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_processes(ledger, 4, ids, who, &count, NULL), SLUICE_OK);
    CHECK(count == 1 && ids[0] == first && who[0].owner == 1 && who[0].pid == 11 && who[0].start == 5);

    /* Not there, or another life of the same pid: nothing to release. */
    CHECK_INT(sluice_ledger_reap(ledger, 99, 5, &released, NULL), SLUICE_OK);
    CHECK_INT(released, 0);
    CHECK_INT(sluice_ledger_reap(ledger, 11, 6, &released, NULL), SLUICE_OK);
    CHECK_INT(released, 0);

    /* exec: the same process joins again and what it held is released; its old name is no longer known. */
    CHECK_INT(sluice_ledger_join(ledger, 2, 11, 5, &again, NULL), SLUICE_OK);
    CHECK(again != first);
    CHECK_INT(device_charged(ledger, 0), 0);
    CHECK_INT(sluice_ledger_release(ledger, first, &charge, NULL), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_ledger_reserve(ledger, again, 0, 30, 0, &charge, NULL), SLUICE_OK);
    struct sluice_ledger_usage usage;
    CHECK_INT(sluice_ledger_process_usage(ledger, again, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == 30 && usage.committed == 0);
    CHECK_INT(sluice_ledger_process_usage(ledger, first, 0, &usage, NULL), SLUICE_ERROR_UNKNOWN);
    /* A used pid: its earlier life is over. */
    CHECK_INT(sluice_ledger_join(ledger, 2, 11, 6, &again, NULL), SLUICE_OK);
    CHECK_INT(device_charged(ledger, 0), 0);

    uint32_t process;
    for (uint32_t pid = 12; pid < 15; pid++)
        CHECK_INT(sluice_ledger_join(ledger, 0, pid, 1, &process, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_join(ledger, 0, 15, 1, &process, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_ledger_processes(ledger, 2, ids, who, &count, NULL), SLUICE_OK);
    CHECK_INT(count, 4);
    CHECK_INT(sluice_ledger_reap(ledger, 13, 1, NULL, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_join(ledger, 0, 15, 1, &process, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    sluice_ledger_free(ledger);
}

static void test_seat_reuse(void)
{
    /* The name of a seat's occupant stays fresh when its 16-bit sequence goes round. */
    void *region;
    struct sluice_ledger *ledger =
        new_ledger((struct sluice_ledger_shape){.devices = 1, .owners = 1, .processes = 1}, 10, 1, &region);
    uint32_t process = 0;
    for (uint32_t i = 0; i < 0x10001; i++) {
        uint32_t before = process;
        CHECK_INT(sluice_ledger_join(ledger, 0, 7, i, &process, NULL), SLUICE_OK);
        CHECK(process != 0 && process != before);
    }
    sluice_ledger_free(ledger);
}

/* Anyone may have written the region: each of these is found, and nothing crashes or hangs. */
static void test_tampering(void)
{
    enum {
        DECISION_SEAT,
        DECISION_OWNER,
        DECISION_NUMBER,
        TOTAL,
        TOTAL_AHEAD,
        OWNER,
        PROCESS,
        SEAT_OWNER,
        GRANULARITY,
        LIMIT,
        CASES
    };
    for (int i = 0; i < CASES; i++) {
        void *region;
        struct sluice_ledger *ledger = new_ledger(small, 1000, 1, &region);
        struct sluice_ledger_charge charge, more;
        struct sluice_error_text text = {""};
        uint32_t process;
        CHECK_INT(sluice_ledger_join(ledger, 0, 11, 5, &process, NULL), SLUICE_OK);
        CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 100, 0, &charge, NULL), SLUICE_OK);
        struct ledger_device *device = &ledger->devices[0];
        switch (i) {
        case DECISION_SEAT:
            device->decision.words.mark = 2 << 16 | 0xfff0;
            break;
        case DECISION_OWNER:
            device->decision.words = (struct ledger_words){.mark = 2 << 16, .value = 0xffff};
            break;
        case DECISION_NUMBER:
            device->decision.words.mark = UINT64_MAX << 16;
            break;
        case TOTAL:
            device->total.words.value = UINT64_MAX;
            break;
        case TOTAL_AHEAD:
            device->total.words.mark = 77;
            break;
        case OWNER:
            ledger_owner(ledger, 0, 0)->charged.words = (struct ledger_words){.mark = 99, .value = 5};
            break;
        case PROCESS:
            ledger_process(ledger, process & 0xffff, 0)->charged.words.value = UINT64_MAX;
            break;
        case SEAT_OWNER:
            ledger->seats[process & 0xffff].occupant.words.mark |= UINT64_C(0xff00) << 16;
            break;
        case GRANULARITY:
            device->granularity = 3;
            break;
        case LIMIT:
            device->limit = UINT64_MAX;
            break;
        }
        enum sluice_error reserved = sluice_ledger_reserve(ledger, process, 0, 1, 0, &more, &text);
        enum sluice_error audited = sluice_ledger_audit(ledger, NULL);
        CHECK(reserved == SLUICE_ERROR_CORRUPT || audited == SLUICE_ERROR_CORRUPT);
        if (reserved == SLUICE_ERROR_CORRUPT)
            CHECK(strlen(text.text) > 10);
        sluice_ledger_release(ledger, process, &charge, NULL);
        sluice_ledger_reap(ledger, 11, 5, NULL, NULL);
        sluice_ledger_free(ledger);
    }
}

static void test_fragmentation(void)
{
    void *region;
    struct sluice_ledger *ledger =
        new_ledger((struct sluice_ledger_shape){.devices = 3, .owners = 1, .processes = 2}, 100, 1, &region);
    struct sluice_ledger_fragmentation found;
    struct sluice_ledger_charge charge;
    uint32_t process;
    CHECK_INT(sluice_ledger_join(ledger, 0, 11, 5, &process, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 90, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, process, 2, 35, 8, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_commit(ledger, process, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_get_fragmentation(ledger, &found, NULL), SLUICE_OK);
    CHECK(found.free == 10 + 100 + 60 && found.largest == 100 && found.largest_device == 1);
    CHECK_INT(found.external_permille, 1000 * 70 / 170);
    CHECK_INT(found.slack, 5);
    sluice_ledger_free(ledger);
}

int main(void)
{
    test_regions();
    test_terms();
    test_charges();
    test_bad_requests();
    test_context();
    test_processes();
    test_seat_reuse();
    test_tampering();
    test_fragmentation();
    return 0;
}
