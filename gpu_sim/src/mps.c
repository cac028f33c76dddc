#include "mps.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    int server; /* 0: none */
    unsigned percentage;
} mps = {.percentage = 100};

static int reach(void)
{
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/control",
                          folder != NULL && folder[0] != 0 ? folder : "/tmp/nvidia-mps");
    if (length < 0 || (size_t)length >= sizeof address.sun_path) {
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void limit_gpu(const char *uuid, unsigned long long bytes)
{
    struct sim_gpu gpu;
    for (unsigned i = 0; i < SIM_MAX_GPUS && sim_peek(i, &gpu); i++) {
        if (strcmp(gpu.uuid, uuid) == 0 && (sim_process_limit[i] == 0 || bytes < sim_process_limit[i])) {
            sim_process_limit[i] = bytes;
        }
    }
}

/* "percentage N", "limit UUID BYTES", "end": what the server holds this client to. */
static bool take_terms(int fd)
{
    char text[4096];
    size_t size = 0;
    while (size < sizeof text - 1 && (size < 4 || memcmp(text + size - 4, "end\n", 4) != 0)) {
        ssize_t got = recv(fd, text + size, sizeof text - 1 - size, 0);
        if (got <= 0) {
            return false;
        }
        size += (size_t)got;
    }
    text[size] = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
        char uuid[64];
        unsigned long long bytes;
        unsigned percentage;
        if (sscanf(line, "percentage %u", &percentage) == 1 && percentage >= 1 && percentage <= 100) {
            mps.percentage = percentage;
        } else if (sscanf(line, "limit %63s %llu", uuid, &bytes) == 2) {
            limit_gpu(uuid, bytes);
        }
    }
    return true;
}

/* A client may hold itself to less: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. */
static void lower_percentage(void)
{
    const char *text = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    unsigned long wanted = text != NULL ? strtoul(text, NULL, 10) : 0;
    if (wanted >= 1 && wanted < mps.percentage) {
        mps.percentage = (unsigned)wanted;
    }
}

void mps_join(void)
{
    char hello[32];
    int fd = reach();
    int length = snprintf(hello, sizeof hello, "client %d\n", (int)getpid());
    if (fd < 0) {
        return;
    }
    if (send(fd, hello, (size_t)length, MSG_NOSIGNAL) == length && take_terms(fd)) {
        struct ucred daemon = {0};
        socklen_t room = sizeof daemon;
        lower_percentage();
        mps.server = fd;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &daemon, &room) == 0) {
            sim_mps_server = (uint32_t)daemon.pid;
        }
    } else {
        close(fd);
    }
}

unsigned mps_percentage(void)
{
    return mps.percentage;
}

bool mps_lost(void)
{
    char byte;
    return mps.server > 0 && recv(mps.server, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}
