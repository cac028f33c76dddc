/*
 * Simulated CUDA: checkpoints of a process, which others ask for: cuCheckpointProcess*, as drivers from 570 have them.
 *
 * A thread of the process, begun by cuInit, does it. Requests are in memory without a name that the process has open,
 * which others find in /proc; so they reach it in any PID namespace, and after it was saved and resumed by CRIU.
 */
#include "cuda.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHANNEL_NAME "sluice-sim-checkpoint"
enum { SINCE = 570, REMAPS_SINCE = 580, ALIVE_MS = 100 };

typedef enum { RUNNING, LOCKED, CHECKPOINTED, FAILED } CUprocessState;

typedef struct {
    unsigned int timeoutMs, reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointCheckpointArgs, CUcheckpointUnlockArgs;

typedef struct {
    unsigned char oldUuid[16], newUuid[16];
} CUcheckpointGpuPair;

typedef struct {
    CUcheckpointGpuPair *gpuPairs;
    unsigned int gpuPairsCount;
    char reserved[64 - sizeof(CUcheckpointGpuPair *) - sizeof(unsigned int)];
} CUcheckpointRestoreArgs;

_Static_assert(sizeof(CUcheckpointLockArgs) == 64 && sizeof(CUcheckpointRestoreArgs) == 64, "as in cuda.h");

enum call { LOCK, CHECKPOINT, RESTORE, UNLOCK, STATE };

struct channel {
    uint32_t pid, thread;   /* in the process's own PID namespace */
    _Atomic uint32_t turn;  /* odd: there is a request */
    _Atomic uint32_t state; /* CUprocessState */
    uint32_t call, timeout_ms, result, count;
    struct rt_remap maps[SIM_MAX_GPUS];
};

static void futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout)
{
    syscall(SYS_futex, (void *)word, operation, value, timeout, NULL, 0);
}

/* ---- in the process ---- */

static CUresult checkpoint_self(struct channel *channel)
{
    enum rt_status status = rt_suspend();
    if (status == RT_OK) {
        channel->state = CHECKPOINTED;
    }
    return status == RT_OK ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

static void *nothing(void *unused)
{
    return unused;
}

/* As NVIDIA's driver does: it begins its threads again, and waits for them. */
static void begin_threads(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, nothing, NULL) == 0) {
        pthread_join(thread, NULL);
    }
}

static CUresult restore_self(struct channel *channel)
{
    begin_threads();
    enum rt_status status = rt_resume(channel->maps, channel->count);
    if (status == RT_OK) {
        channel->state = LOCKED;
    }
    return result_of(status);
}

static CUresult answer(struct channel *channel)
{
    static const CUprocessState from[] = {
        [LOCK] = RUNNING, [CHECKPOINT] = LOCKED, [RESTORE] = CHECKPOINTED, [UNLOCK] = LOCKED};
    if (channel->call == STATE) {
        return CUDA_SUCCESS;
    }
    if (channel->call > UNLOCK || channel->state != from[channel->call]) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    switch ((enum call)channel->call) {
    case LOCK:
        if (!rt_lock_calls(channel->timeout_ms)) {
            return CUDA_ERROR_NOT_READY;
        }
        channel->state = LOCKED;
        return CUDA_SUCCESS;
    case CHECKPOINT:
        return checkpoint_self(channel);
    case RESTORE:
        return restore_self(channel);
    case UNLOCK:
        rt_unlock_calls();
        channel->state = RUNNING;
        return CUDA_SUCCESS;
    case STATE:
        break;
    }
    return CUDA_ERROR_UNKNOWN;
}

static void *serve(void *argument)
{
    struct channel *channel = argument;
    prctl(PR_SET_NAME, "cuda-checkpoint");
    channel->thread = (uint32_t)syscall(SYS_gettid);
    for (;;) {
        uint32_t turn = channel->turn;
        if (turn % 2 == 0) {
            futex(&channel->turn, FUTEX_WAIT, turn, NULL);
            continue;
        }
        channel->result = answer(channel);
        channel->turn = turn + 1;
        futex(&channel->turn, FUTEX_WAKE, INT32_MAX, NULL);
    }
    return NULL;
}

void cuda_await_checkpoints(void)
{
    pthread_t thread;
    pthread_attr_t small;
    sigset_t all, before;
    if (sim_enter(SINCE, NULL) != SIM_OK) {
        return; /* an older driver has no such thread */
    }
    int file = memfd_create(CHANNEL_NAME, MFD_CLOEXEC);
    void *channel = MAP_FAILED;
    if (file >= 0 && ftruncate(file, sizeof(struct channel)) == 0) {
        channel = mmap(NULL, sizeof(struct channel), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (channel == MAP_FAILED) {
        if (file >= 0) {
            close(file);
        }
        return; /* such a process cannot be suspended */
    }
    ((struct channel *)channel)->pid = (uint32_t)getpid();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's */
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pthread_create(&thread, &small, serve, channel);
    pthread_attr_destroy(&small);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- in who asks ---- */

/* A process's or thread's number in its own PID namespace; 0: there is none. */
static uint32_t own_number(const char *folder)
{
    char path[320], line[256], *last;
    uint32_t found = 0;
    snprintf(path, sizeof path, "%s/status", folder);
    FILE *file = fopen(path, "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "NSpid:", 6) == 0 && (last = strrchr(line, '\t')) != NULL) {
            found = (uint32_t)strtoul(last, NULL, 10);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static bool is_channel(const char *path)
{
    char target[64];
    ssize_t length = readlink(path, target, sizeof target - 1);
    target[length > 0 ? length : 0] = 0;
    return strncmp(target, "/memfd:" CHANNEL_NAME, sizeof "/memfd:" CHANNEL_NAME - 1) == 0;
}

/* The process's channel, which a child without another program has open, too, but is not its. */
static CUresult open_channel(int pid, struct channel **channel, int *file)
{
    char folder[32], path[320];
    struct sim_state head;
    *channel = MAP_FAILED;
    *file = -1;
    CUresult result = pid > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && rt_ready() != RT_OK) {
        result = CUDA_ERROR_NOT_INITIALIZED;
    }
    if (result == CUDA_SUCCESS && (sim_enter(SINCE, &head) != SIM_OK)) {
        result = CUDA_ERROR_NOT_SUPPORTED;
    }
    if (result != CUDA_SUCCESS) {
        return result;
    }
    snprintf(folder, sizeof folder, "/proc/%d", pid);
    snprintf(path, sizeof path, "%s/fd", folder);
    DIR *files = opendir(path);
    for (struct dirent *entry; *file < 0 && files != NULL && (entry = readdir(files)) != NULL;) {
        snprintf(path, sizeof path, "%s/fd/%s", folder, entry->d_name);
        if (is_channel(path)) {
            *file = open(path, O_RDWR | O_CLOEXEC);
        }
    }
    if (files != NULL) {
        closedir(files);
    }
    if (*file >= 0) {
        *channel = mmap(NULL, sizeof **channel, PROT_READ | PROT_WRITE, MAP_SHARED, *file, 0);
    }
    if (*channel != MAP_FAILED && (*channel)->pid == own_number(folder)) {
        return CUDA_SUCCESS;
    }
    if (*channel != MAP_FAILED) {
        munmap(*channel, sizeof **channel);
    }
    if (*file >= 0) {
        close(*file);
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static void close_channel(struct channel *channel, int file)
{
    munmap(channel, sizeof *channel);
    close(file);
}

static bool await_answer(struct channel *channel, int pid)
{
    const struct timespec patience = {.tv_nsec = ALIVE_MS * 1000000L};
    for (uint32_t turn; (turn = channel->turn) % 2 == 1;) {
        if (kill(pid, 0) != 0 && errno == ESRCH) {
            return false;
        }
        futex(&channel->turn, FUTEX_WAIT, turn, &patience);
    }
    return true;
}

static CUresult ask(int pid, enum call call, unsigned timeout_ms, const CUcheckpointGpuPair *pairs, unsigned count)
{
    struct channel *channel;
    int file;
    CUresult result = open_channel(pid, &channel, &file);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    while (flock(file, LOCK_EX) != 0 && errno == EINTR) {
    }
    bool alive = await_answer(channel, pid); /* of one who asked, and died */
    if (alive) {
        channel->call = call;
        channel->timeout_ms = timeout_ms;
        channel->count = count;
        for (unsigned i = 0; i < count; i++) {
            memcpy(channel->maps[i].from, pairs[i].oldUuid, sizeof pairs[i].oldUuid);
            memcpy(channel->maps[i].to, pairs[i].newUuid, sizeof pairs[i].newUuid);
        }
        channel->turn++;
        futex(&channel->turn, FUTEX_WAKE, INT32_MAX, NULL);
        alive = await_answer(channel, pid);
    }
    result = alive ? (CUresult)channel->result : CUDA_ERROR_INVALID_VALUE;
    close_channel(channel, file);
    return result;
}

/* The process's own thread answers, as with NVIDIA's driver: whoever asks for a process that is stopped waits. */
CU(cuCheckpointProcessGetState, int pid, CUprocessState *state)
{
    struct channel *channel;
    int file;
    CUresult result = state != NULL ? ask(pid, STATE, 0, NULL, 0) : CUDA_ERROR_INVALID_VALUE;
    result = result == CUDA_SUCCESS ? open_channel(pid, &channel, &file) : result;
    if (result == CUDA_SUCCESS) {
        *state = (CUprocessState)channel->state;
        close_channel(channel, file);
    }
    return result;
}

CU(cuCheckpointProcessGetRestoreThreadId, int pid, int *tid)
{
    struct channel *channel;
    int file;
    char path[64], thread[320];
    CUresult result = tid != NULL ? open_channel(pid, &channel, &file) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = CUDA_ERROR_NOT_INITIALIZED;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    for (struct dirent *entry; result != CUDA_SUCCESS && threads != NULL && (entry = readdir(threads)) != NULL;) {
        snprintf(thread, sizeof thread, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.' && own_number(thread) == channel->thread) {
            *tid = atoi(entry->d_name);
            result = CUDA_SUCCESS;
        }
    }
    if (threads != NULL) {
        closedir(threads);
    }
    close_channel(channel, file);
    return result;
}

CU(cuCheckpointProcessLock, int pid, CUcheckpointLockArgs *args)
{
    return ask(pid, LOCK, args != NULL ? args->timeoutMs : 0, NULL, 0);
}

CU(cuCheckpointProcessCheckpoint, int pid, CUcheckpointCheckpointArgs *args)
{
    (void)args;
    return ask(pid, CHECKPOINT, 0, NULL, 0);
}

CU(cuCheckpointProcessRestore, int pid, CUcheckpointRestoreArgs *args)
{
    struct sim_state head;
    unsigned count = args != NULL ? args->gpuPairsCount : 0;
    if (count > SIM_MAX_GPUS || (count > 0 && args->gpuPairs == NULL)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (count > 0 && sim_enter(REMAPS_SINCE, &head) != SIM_OK) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return ask(pid, RESTORE, 0, count > 0 ? args->gpuPairs : NULL, count);
}

CU(cuCheckpointProcessUnlock, int pid, CUcheckpointUnlockArgs *args)
{
    (void)args;
    return ask(pid, UNLOCK, 0, NULL, 0);
}
