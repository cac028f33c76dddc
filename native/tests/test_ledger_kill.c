/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory ledger and death: a process killed after every single instruction of an operation, one stopped there while
 * others go on, and random SIGKILLs among many.
 */
#include "ledger_region_memory.h"

#include <errno.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static bool full_scale(void)
{
    const char *scale = getenv("SLUICE_TEST_SCALE");
    return scale && !strcmp(scale, "full");
}

/* ---- instruction by instruction ---- */

enum { CAPACITY = 1000, OTHERS = 300, CHILD_PID = 4242, SITTER_PID = 17 };

struct stage {
    struct sluice_ledger *ledger;
    void *region;
    size_t size;
    uint32_t sitter;        /* holds OTHERS bytes throughout */
    volatile int *finished; /* shared: the child's operation is over */
    uint32_t owner;         /* the child's: the sitter's as well where there is only one */
};

static struct stage set_up(uint32_t owners)
{
    struct sluice_ledger_shape shape = {.devices = 1, .owners = owners, .processes = 3};
    struct sluice_ledger_charge charge;
    struct stage stage = {
        .size = sluice_ledger_size(&shape), .finished = shared_memory(sizeof(int)), .owner = owners - 1};
    stage.ledger = new_ledger(shape, CAPACITY, 1, &stage.region);
    CHECK_INT(sluice_ledger_join(stage.ledger, 0, SITTER_PID, 1, &stage.sitter, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(stage.ledger, stage.sitter, 0, OTHERS, 0, &charge, NULL), SLUICE_OK);
    return stage;
}

/* A whole life in the ledger, with every operation that changes it. */
static void live(struct sluice_ledger *ledger, uint32_t owner)
{
    struct sluice_ledger_charge charge;
    uint32_t process;
    CHECK_INT(sluice_ledger_join(ledger, owner, CHILD_PID, 1, &process, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_set_context(ledger, process, 0, 40, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, process, 0, 100, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_commit(ledger, process, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_release(ledger, process, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reap(ledger, CHILD_PID, 1, NULL, NULL), SLUICE_OK);
}

/* A child, stopped right before it lives. */
static pid_t start_child(const struct stage *stage)
{
    *stage->finished = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
            _exit(77);
        raise(SIGSTOP);
        live(stage->ledger, stage->owner);
        *stage->finished = 1;
        raise(SIGSTOP);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        return -1;
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    return child;
}

static void step(pid_t child)
{
    int status;
    CHECK(!ptrace(PTRACE_SINGLESTEP, child, NULL, NULL));
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
}

static void end_child(pid_t child)
{
    CHECK(!kill(child, SIGKILL));
    CHECK(waitpid(child, NULL, 0) == child);
}

/* The child is dead: whatever it did, reaping it leaves exactly the sitter's bytes, and all others can be granted. */
static void check_aftermath(struct sluice_ledger *ledger, uint32_t sitter, uint32_t owner)
{
    struct sluice_ledger_charge charge, more;
    struct sluice_ledger_usage usage;
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    uint64_t before = device_charged(ledger, 0), released;
    CHECK(before == OTHERS || before == OTHERS + 40 || before == OTHERS + 140);
    CHECK_INT(sluice_ledger_reap(ledger, CHILD_PID, 1, &released, NULL), SLUICE_OK);
    CHECK_INT(released, before - OTHERS);
    CHECK_INT(device_charged(ledger, 0), OTHERS);
    CHECK_INT(sluice_ledger_owner_usage(ledger, owner, 0, &usage, NULL), SLUICE_OK);
    CHECK(usage.charged == (owner == 0 ? OTHERS : 0) && usage.committed == 0);
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, sitter, 0, CAPACITY - OTHERS, 0, &charge, NULL), SLUICE_OK);
    CHECK_INT(sluice_ledger_reserve(ledger, sitter, 0, 1, 0, &more, NULL), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_ledger_release(ledger, sitter, &charge, NULL), SLUICE_OK);
}

/* What a process killed after n instructions leaves is the region as it is after n instructions: a copy shows it. */
static uint32_t test_killed_after_each_instruction(uint32_t owners)
{
    struct stage stage = set_up(owners);
    void *copy = shared_memory(stage.size);
    struct sluice_ledger *left;
    memcpy(copy, stage.region, stage.size);
    CHECK_INT(sluice_ledger_new(copy, stage.size, 0, &left, NULL), SLUICE_OK);
    pid_t child = start_child(&stage);
    if (child < 0) {
        fprintf(stderr, "skipped: this system forbids ptrace\n");
        return 0;
    }
    uint32_t instructions = 0;
    while (!*stage.finished) {
        step(child);
        instructions++;
        memcpy(copy, stage.region, stage.size);
        check_aftermath(left, stage.sitter, stage.owner);
    }
    CHECK(instructions > 300);
    end_child(child);
    check_aftermath(stage.ledger, stage.sitter, stage.owner);
    sluice_ledger_free(left);
    sluice_ledger_free(stage.ledger);
    return instructions;
}

/* Stopped after n instructions, the process delays no other; continued, it finishes and repeats nothing. */
static void test_stopped_after_each_instruction(uint32_t owners, uint32_t instructions)
{
    struct stage stage = set_up(owners);
    uint32_t stride = full_scale() ? 1 : instructions / 25 + 1;
    for (uint32_t n = 0; n < instructions; n += stride) {
        pid_t child = start_child(&stage);
        for (uint32_t i = 0; i < n && !*stage.finished; i++)
            step(child);
        uint64_t before = device_charged(stage.ledger, 0);
        struct sluice_ledger_charge charges[3];
        for (uint64_t i = 0; i < 3; i++) {
            CHECK_INT(sluice_ledger_reserve(stage.ledger, stage.sitter, 0, 50 + i, 0, &charges[i], NULL), SLUICE_OK);
            CHECK_INT(sluice_ledger_audit(stage.ledger, NULL), SLUICE_OK);
        }
        CHECK_INT(device_charged(stage.ledger, 0), before + 153);
        CHECK_INT(sluice_ledger_release(stage.ledger, stage.sitter, &charges[1], NULL), SLUICE_OK);
        while (!*stage.finished) {
            CHECK(!ptrace(PTRACE_CONT, child, NULL, NULL));
            CHECK(waitpid(child, NULL, 0) == child);
        }
        CHECK_INT(sluice_ledger_audit(stage.ledger, NULL), SLUICE_OK);
        CHECK_INT(device_charged(stage.ledger, 0), OTHERS + 102);
        CHECK_INT(sluice_ledger_release(stage.ledger, stage.sitter, &charges[0], NULL), SLUICE_OK);
        CHECK_INT(sluice_ledger_release(stage.ledger, stage.sitter, &charges[2], NULL), SLUICE_OK);
        end_child(child);
    }
    sluice_ledger_free(stage.ledger);
}

/* ---- random SIGKILLs ---- */

enum { PROCESSES = 12, DEVICES = 3, OWNERS = 3, HELD = 8 };

/* Allocates and frees for ever, and compares what the ledger says of it with what it knows itself. */
static void run_for_ever(struct sluice_ledger *ledger, uint32_t owner, uint64_t random)
{
    struct sluice_ledger_charge charges[HELD] = {0};
    uint64_t held[DEVICES] = {0};
    uint32_t process;
    CHECK_INT(sluice_ledger_join(ledger, owner, (uint32_t)getpid(), random, &process, NULL), SLUICE_OK);
    for (;;) {
        struct sluice_ledger_charge *charge = &charges[next_random(&random) % HELD];
        uint32_t device = (uint32_t)(next_random(&random) % DEVICES);
        if (charge->charged) {
            device = charge->device;
            held[device] -= charge->charged;
            CHECK_INT(sluice_ledger_release(ledger, process, charge, NULL), SLUICE_OK);
        } else {
            enum sluice_error error =
                sluice_ledger_reserve(ledger, process, device, 1 + next_random(&random) % 3000, 0, charge, NULL);
            CHECK(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY || error == SLUICE_ERROR_QUOTA);
            if (error)
                continue;
            held[device] += charge->charged;
            if (next_random(&random) % 4)
                CHECK_INT(sluice_ledger_commit(ledger, process, charge, NULL), SLUICE_OK);
        }
        struct sluice_ledger_usage usage;
        CHECK_INT(sluice_ledger_process_usage(ledger, process, device, &usage, NULL), SLUICE_OK);
        CHECK_INT(usage.charged, held[device]);
    }
}

static pid_t start_runner(struct sluice_ledger *ledger, uint32_t owner, uint64_t random)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        run_for_ever(ledger, owner, random);
        _exit(0);
    }
    return pid;
}

static void test_random_kills(uint32_t kills)
{
    void *region;
    struct sluice_ledger *ledger =
        new_ledger((struct sluice_ledger_shape){.devices = DEVICES, .owners = OWNERS, .processes = 2 * PROCESSES},
                   40960, 64, &region);
    for (uint32_t device = 0; device < DEVICES; device++)
        CHECK_INT(sluice_ledger_set_quota(ledger, 1, device, 10000, NULL), SLUICE_OK);
    uint64_t random = 0x9e3779b97f4a7c15u, released = 0;
    struct {
        pid_t pid;
        uint64_t start;
    } runners[PROCESSES];
    for (uint32_t i = 0; i < PROCESSES; i++) {
        runners[i].start = next_random(&random);
        runners[i].pid = start_runner(ledger, i % OWNERS, runners[i].start);
    }
    for (uint32_t kill_number = 0; kill_number < kills + PROCESSES; kill_number++) {
        nanosleep(&(struct timespec){.tv_nsec = (long)(next_random(&random) % 3000000)}, NULL);
        bool last_round = kill_number >= kills;
        uint32_t i = last_round ? kill_number - kills : (uint32_t)(next_random(&random) % PROCESSES);
        int status;
        CHECK(!kill(runners[i].pid, SIGKILL));
        CHECK(waitpid(runners[i].pid, &status, 0) == runners[i].pid);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* it found nothing wrong itself */
        uint64_t bytes;
        CHECK_INT(sluice_ledger_reap(ledger, (uint32_t)runners[i].pid, runners[i].start, &bytes, NULL), SLUICE_OK);
        released += bytes;
        for (uint32_t device = 0; device < DEVICES; device++)
            device_charged(ledger, device);
        enum sluice_error error = sluice_ledger_audit(ledger, NULL);
        CHECK(error == SLUICE_OK || error == SLUICE_ERROR_BUSY);
        if (!last_round) {
            runners[i].start = next_random(&random);
            runners[i].pid = start_runner(ledger, i % OWNERS, runners[i].start);
        }
    }
    CHECK(released > 0);
    CHECK_INT(sluice_ledger_audit(ledger, NULL), SLUICE_OK);
    for (uint32_t device = 0; device < DEVICES; device++) {
        CHECK_INT(device_charged(ledger, device), 0);
        for (uint32_t owner = 0; owner < OWNERS; owner++) {
            struct sluice_ledger_usage usage;
            CHECK_INT(sluice_ledger_owner_usage(ledger, owner, device, &usage, NULL), SLUICE_OK);
            CHECK(usage.charged == 0 && usage.available == usage.limit - usage.limit % 64);
            CHECK(owner != 1 || usage.peak <= 10000);
        }
    }
    sluice_ledger_free(ledger);
}

int main(void)
{
    for (uint32_t owners = 1; owners <= 2; owners++)
        test_stopped_after_each_instruction(owners, test_killed_after_each_instruction(owners));
    test_random_kills(full_scale() ? 1000 : 60);
    return 0;
}
