/* SPDX-License-Identifier: Apache-2.0 */
/* The gate and death: a worker killed after every single instruction of its life, and random SIGKILLs among many. */
#include "gate_memory.h"
#include "gate_region.h"

#include <errno.h>
#include <linux/futex.h>
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

enum { CHILD_PID = 4242, SITTER_PID = 17, TOKENS = 1000000 };

struct stage {
    struct sluice_gate *gate;
    void *region;
    size_t size;
    uint32_t sitter;
    uint64_t waiting;       /* the sitter's ticket, waiting throughout */
    volatile int *finished; /* shared: the child's life is over */
};

static struct stage set_up(void)
{
    struct stage stage = {.finished = shared_memory(sizeof(int))};
    struct sluice_gate_shape shape = {2, 12, 1, 2, 8, 8};
    stage.size = sluice_gate_size(&shape);
    stage.gate = new_gate(shape, &stage.region);
    stage.sitter = join(stage.gate, SITTER_PID);
    limit(stage.gate, SLUICE_GATE_TENANT, TENANT,
          (struct sluice_gate_limit){.requests = TOKENS, .tokens = TOKENS, .concurrent = 8, .queued = 8});
    struct sluice_gate_request request = request_of(0, 100);
    replica(stage.gate, 11, 1, SLUICE_GATE_USABLE);
    stage.waiting = admit(stage.gate, stage.sitter, 0, request);
    take_turn(stage.gate, stage.sitter, 0);
    admit(stage.gate, stage.sitter, 0, request);
    return stage;
}

/* A whole life in the gate, with every call that changes it; no time passes, so that no bucket refills. */
enum { CALLS = 17 };

struct child {
    struct sluice_gate *gate;
    struct sluice_gate_request request;
    uint32_t worker;
    uint64_t late, ticket;
};

static void live(struct child *child, int call)
{
    struct sluice_gate *gate = child->gate;
    struct sluice_gate_turn turns[3];
    uint64_t expired[2];
    uint32_t count;
    switch (call) {
    case 0:
        child->worker = join(gate, CHILD_PID);
        break;
    case 1:
        replica(gate, 12, 1, SLUICE_GATE_USABLE);
        break;
    case 2:
        child->late = admit(gate, child->worker, 0, child->request);
        break;
    case 3:
        child->request.deadline_us = 0;
        child->request.priority = 7;
        child->ticket = admit(gate, child->worker, 0, child->request);
        break;
    case 4:
        CHECK_INT(take_turns(gate, child->worker, 0, turns, 3), 1);
        break;
    case 5:
        CHECK_INT(sluice_gate_progress(gate, child->ticket, 10, 3, NULL), SLUICE_OK);
        break;
    case 6:
        CHECK_INT(sluice_gate_again(gate, child->ticket, 0, 12, NONE, NULL), SLUICE_OK);
        break;
    case 7:
        CHECK_INT(sluice_gate_set_weight(gate, TENANT + 1, 2, NULL), SLUICE_OK);
        break;
    case 8:
        CHECK_INT(sluice_gate_set_weight(gate, TENANT + 1, 1, NULL), SLUICE_OK);
        break;
    case 9:
        CHECK_INT(sluice_gate_expired(gate, child->worker, 5, 2, expired, &count, NULL, NULL), SLUICE_OK);
        CHECK_INT(count, 1);
        break;
    case 10:
        CHECK_INT(sluice_gate_abandon(gate, child->late, 5, NULL, NULL), SLUICE_OK);
        break;
    case 11:
        CHECK_INT(take_turns(gate, child->worker, 5, turns, 3), 1);
        break;
    case 12:
        settle(gate, child->ticket, 5, 10, 20);
        break;
    case 13:
        CHECK_INT(take_turns(gate, child->worker, 5, turns, 3), 0); /* it is the sitter's */
        break;
    case 14:
        CHECK_INT(sluice_gate_remove_replica(gate, 12, NULL), SLUICE_OK);
        break;
    case 15:
        admit(gate, child->worker, 5, child->request);
        break;
    case 16:
        CHECK_INT(sluice_gate_reap(gate, CHILD_PID, 1, 5, NULL, NULL), SLUICE_OK);
        break;
    }
}

/* A child, stopped right before its call number `from`; *finished is set after number `to`. */
static pid_t start_child(const struct stage *stage, int from, int to)
{
    *stage->finished = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct child child = {.gate = stage->gate, .request = request_of(0, 30)};
        child.request.prefix_count = 2;
        child.request.deadline_us = 5;
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
            _exit(77);
        for (int call = 0; call <= to; call++) {
            if (call == from)
                raise(SIGSTOP);
            live(&child, call);
        }
        *stage->finished = 1;
        raise(SIGSTOP);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        return -1;
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
    return pid;
}

static void step(pid_t child)
{
    int status;
    CHECK(!ptrace(PTRACE_SINGLESTEP, child, NULL, NULL));
    CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
}

/* Whatever the child did, reaping it leaves the sitter's tickets alone, and its tokens' worth in the bucket. */
static void check_aftermath(struct sluice_gate *gate, uint32_t sitter)
{
    struct sluice_gate_settled left[4];
    uint32_t count;
    audit_gate(gate);
    CHECK_INT(sluice_gate_left(gate, CHILD_PID, 1, 4, left, &count, NULL), SLUICE_OK);
    uint64_t billed = 0;
    for (uint32_t i = 0; i < count; i++)
        billed += left[i].prompt_tokens + left[i].completion_tokens;
    CHECK(count <= 2 && (billed == 0 || billed == 18 || billed == 13));
    int64_t spent = TOKENS - subject(gate, SLUICE_GATE_TENANT, TENANT, 5).tokens_left;
    int64_t open = (int64_t)subject(gate, SLUICE_GATE_TENANT, TENANT, 5).open - 2;
    CHECK(open >= 0 && open <= 2);
    CHECK_INT(sluice_gate_reap(gate, CHILD_PID, 1, 5, NULL, NULL), SLUICE_OK);
    audit_gate(gate);
    struct sluice_gate_subject tenant = subject(gate, SLUICE_GATE_TENANT, TENANT, 5);
    CHECK(tenant.open == 2 && tenant.tokens == 200);
    /* Each of its open tickets had reserved 30, and leaves what is billed. */
    CHECK_INT(TOKENS - tenant.tokens_left, spent - 30 * open + (int64_t)billed);
    struct sluice_gate_service figures = service(gate);
    CHECK_INT(figures.waiting + figures.in_flight, 2);
    struct sluice_gate_answer answer = ask(gate, sitter, 5, request_of(1, 1));
    CHECK(answer.ticket != 0);
    settle(gate, answer.ticket, 5, 0, 0);
}

/* As the kernel does for a robust lock when its owner ends. */
static void release_lock_of(void *region, pid_t dead)
{
    int *word = &((struct gate_header *)region)->mutex.__data.__lock;
    if ((*word & FUTEX_TID_MASK) == dead)
        *word = FUTEX_OWNER_DIED;
}

/* What a worker killed after n instructions leaves is the region as it is after n instructions: a copy shows it. */
static void test_killed_after_each_instruction(int from, int to)
{
    struct stage stage = set_up();
    void *copy = shared_memory(stage.size);
    memcpy(copy, stage.region, stage.size);
    struct sluice_gate *left = open_gate(copy, stage.size);
    pid_t child = start_child(&stage, from, to);
    if (child < 0) {
        fprintf(stderr, "skipped: this system forbids ptrace\n");
        return;
    }
    uint32_t begun = 0;
    while (!*stage.finished) {
        step(child);
        memcpy(copy, stage.region, stage.size);
        begun += ((struct gate_header *)copy)->log_count > 0;
        release_lock_of(copy, child);
        check_aftermath(left, stage.sitter);
    }
    CHECK(begun > 100); /* it was killed in the middle of changes so many times */
    CHECK(!kill(child, SIGKILL));
    CHECK(waitpid(child, NULL, 0) == child);
    check_aftermath(stage.gate, stage.sitter);
    sluice_gate_free(left);
    sluice_gate_free(stage.gate);
}

/* ---- random SIGKILLs, the kernel's own part in them included ---- */

enum { PROCESSES = 6 };

static pid_t start_runner(struct sluice_gate *gate, uint64_t random)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct life life = {.gate = gate, .worker = join(gate, (uint32_t)getpid()), .random = random};
        for (;;)
            live_on(&life);
    }
    return pid;
}

static void test_random_kills(uint32_t kills)
{
    void *region;
    struct sluice_gate *gate = new_busy_gate(PROCESSES, &region);
    uint64_t random = 0x9e3779b97f4a7c15u, ended = 0;
    pid_t runners[PROCESSES];
    for (uint32_t i = 0; i < PROCESSES; i++)
        runners[i] = start_runner(gate, next_random(&random));
    for (uint32_t n = 0; n < kills + PROCESSES; n++) {
        nanosleep(&(struct timespec){.tv_nsec = (long)(next_random(&random) % 2000000)}, NULL);
        uint32_t i = n < kills ? (uint32_t)(next_random(&random) % PROCESSES) : n - kills, count;
        int status;
        CHECK(!kill(runners[i], SIGKILL));
        CHECK(waitpid(runners[i], &status, 0) == runners[i]);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* it found nothing wrong itself */
        audit_gate(gate);
        CHECK_INT(sluice_gate_reap(gate, (uint32_t)runners[i], 1, 0, &count, NULL), SLUICE_OK);
        ended += count;
        audit_gate(gate);
        CHECK(subject(gate, SLUICE_GATE_TENANT, TENANT, 0).open <= 6);
        CHECK(subject(gate, SLUICE_GATE_SERVICE, SERVICE, 0).open <= 30);
        if (n < kills)
            runners[i] = start_runner(gate, next_random(&random));
    }
    CHECK(ended > 0);
    CHECK_INT(service(gate).waiting + service(gate).in_flight, 0);
    CHECK_INT(sluice_gate_wakes(gate), 0);
    for (uint64_t n = 0; n < LIFE_TENANTS; n++)
        CHECK_INT(subject(gate, SLUICE_GATE_TENANT, TENANT + n, 0).tokens, 0);
    sluice_gate_free(gate);
}

int main(void)
{
    /* The calls that change most; in full, all. */
    static const int calls[] = {3, 4, 6, 12, 16};
    if (full_scale())
        test_killed_after_each_instruction(0, CALLS - 1);
    for (size_t i = 0; !full_scale() && i < sizeof calls / sizeof *calls; i++)
        test_killed_after_each_instruction(calls[i], calls[i]);
    test_random_kills(full_scale() ? 2000 : 100);
    return 0;
}
