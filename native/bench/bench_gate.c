/* SPDX-License-Identifier: Apache-2.0 */
/* The request gate among processes: time from a request's admission over its turn to its end. */
#include "bench.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_PROCESSES = 16, SERVICE = 1, BUSY_SERVICE = 2, OTHERS = 100, BLOCKS = 4, SLOTS = 64 };

static enum sluice_error fail(struct sluice_error_text *text, enum sluice_error error, const char *what)
{
    if (text)
        snprintf(text->text, sizeof text->text, "%s: %s", what,
                 error == SLUICE_ERROR_SYSTEM ? strerror(errno) : sluice_strerror(error));
    return error;
}

/* What the processes share, before the gate's region. */
struct start {
    _Alignas(SLUICE_GATE_ALIGNMENT) atomic_uint ready;
    atomic_bool go;
};

struct stage {
    struct start *start;
    uint64_t *times; /* shared */
    size_t size, times_size, rounds;
    struct sluice_gate *gate;
};

static void *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void close_stage(struct stage *stage)
{
    sluice_gate_free(stage->gate);
    if (stage->start)
        munmap(stage->start, stage->size);
    if (stage->times)
        munmap(stage->times, stage->times_size);
}

static struct sluice_gate_request request_of(uint64_t tenant, uint64_t service, uint64_t number)
{
    struct sluice_gate_request request = {
        .subjects = {tenant + 1, tenant + 1, tenant + 1, service}, .tokens = 600, .prefix_count = BLOCKS};
    for (uint64_t i = 0; i < BLOCKS; i++)
        request.prefix[i] = (i + 1) * 1000003 + number % 512 * (i > 1);
    return request;
}

/* Limits of all kinds that never refuse, replicas with free places, and a queue elsewhere. */
static enum sluice_error set_up(struct sluice_gate *gate, uint32_t replicas, uint32_t waiting,
                                struct sluice_error_text *text)
{
    const uint64_t most = SLUICE_GATE_MAX_AMOUNT;
    const struct sluice_gate_limit limit = {most, most, most, most, most, most};
    enum sluice_error error = SLUICE_OK;
    uint32_t worker;
    for (int kind = 0; kind < SLUICE_GATE_KINDS && !error; kind++)
        error = sluice_gate_set_limit(gate, (enum sluice_gate_kind)kind, 1, &limit, text);
    for (uint32_t i = 0; i < replicas && !error; i++)
        error = sluice_gate_set_replica(gate, i + 1, SERVICE, SLOTS, SLUICE_GATE_USABLE, NULL, text);
    if (!error)
        error = sluice_gate_join(gate, UINT32_MAX, 1, MAX_PROCESSES, &worker, text);
    for (uint32_t i = 0; i < waiting && !error; i++) {
        struct sluice_gate_request request = request_of(1 + i % OTHERS, BUSY_SERVICE, i);
        struct sluice_gate_answer answer;
        request.deadline_us = UINT64_C(1) << 50;
        error = sluice_gate_admit(gate, worker, 0, &request, &answer, text);
    }
    return error;
}

static enum sluice_error open_stage(struct stage *stage, uint32_t processes, uint32_t replicas, uint32_t waiting,
                                    struct sluice_error_text *text)
{
    const struct sluice_gate_shape shape = {MAX_PROCESSES + 1, 4096, 16, 1024, waiting + 1024, 65536};
    size_t size = sluice_gate_size(&shape);
    if (!size)
        return fail(text, SLUICE_ERROR_RANGE, "waiting tickets");
    stage->size = sizeof *stage->start + size;
    stage->times_size = sizeof *stage->times * processes * stage->rounds;
    stage->start = map(stage->size);
    stage->times = map(stage->times_size);
    if (!stage->start || !stage->times)
        return fail(text, SLUICE_ERROR_SYSTEM, "mmap");
    memset(stage->times, 0, stage->times_size); /* its pages are there before the clock runs */
    enum sluice_error error = sluice_gate_format(stage->start + 1, size, &shape, text);
    if (!error)
        error = sluice_gate_new(stage->start + 1, size, &stage->gate, text);
    return error ? error : set_up(stage->gate, replicas, waiting, text);
}

static bool time_requests(struct sluice_gate *gate, uint32_t number, size_t rounds, uint64_t *times)
{
    struct sluice_error_text text;
    uint32_t worker, count;
    if (sluice_gate_join(gate, (uint32_t)getpid(), 1, number, &worker, &text))
        return false;
    for (size_t i = 0; i < rounds; i++) {
        struct sluice_gate_request request = request_of(0, SERVICE, i);
        struct sluice_gate_answer answer;
        struct sluice_gate_turn turn;
        uint64_t begin = bench_now_ns(), now_us = begin / 1000;
        if (sluice_gate_admit(gate, worker, now_us, &request, &answer, &text) || !answer.ticket ||
            sluice_gate_turn(gate, worker, now_us, 1, &turn, &count, &text) || count != 1 ||
            sluice_gate_settle(gate, turn.ticket, now_us, 100, 300, NULL, &text))
            return false;
        times[i] = bench_now_ns() - begin;
    }
    return !sluice_gate_reap(gate, (uint32_t)getpid(), 1, 0, NULL, &text);
}

static uint32_t start_processes(const struct stage *stage, uint32_t processes)
{
    uint32_t started = 0;
    for (; started < processes; started++) {
        pid_t pid = fork();
        if (pid < 0)
            break;
        if (pid == 0) {
            atomic_fetch_add(&stage->start->ready, 1);
            while (!atomic_load(&stage->start->go))
                usleep(50);
            _exit(time_requests(stage->gate, started, stage->rounds, stage->times + started * stage->rounds) ? 0 : 1);
        }
    }
    while (started == processes && atomic_load(&stage->start->ready) < processes)
        usleep(50);
    return started;
}

static enum sluice_error check_left(struct sluice_gate *gate, bool fine, struct sluice_error_text *text)
{
    struct sluice_gate_service service = {0};
    enum sluice_error error = sluice_gate_audit(gate, text);
    if (!error)
        error = sluice_gate_get_service(gate, SERVICE, &service, text);
    if (!error && (!fine || service.waiting || service.in_flight))
        error = fail(text, SLUICE_ERROR_CORRUPT, "a process failed, or tickets are left over");
    return error;
}

enum sluice_error sluice_bench_gate(uint32_t processes, uint32_t rounds, uint32_t replicas, uint32_t waiting,
                                    uint64_t *times, uint64_t *elapsed_ns, struct sluice_error_text *text)
{
    struct stage stage = {.rounds = rounds};
    if (!processes || processes > MAX_PROCESSES || !rounds || !replicas || replicas > 1024)
        return fail(text, SLUICE_ERROR_RANGE, "processes, rounds or replicas");
    enum sluice_error error = open_stage(&stage, processes, replicas, waiting, text);
    if (!error) {
        uint32_t started = start_processes(&stage, processes);
        uint64_t begin = bench_now_ns();
        atomic_store(&stage.start->go, true);
        bool fine = started == processes;
        for (uint32_t i = 0; i < started; i++) {
            int status;
            fine = wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 && fine;
        }
        *elapsed_ns = bench_now_ns() - begin;
        error = check_left(stage.gate, fine, text);
        memcpy(times, stage.times, stage.times_size);
    }
    close_stage(&stage);
    return error;
}
