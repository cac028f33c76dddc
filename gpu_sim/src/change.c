/* How a driver's setter changes the node's state: the file is replaced as a whole, under the lock of Python's
 * changes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

struct whole {
    struct sim_state head;
    struct sim_gpu gpus[SIM_MAX_GPUS];
};

static enum sim_status load(const char *path, struct whole *state, struct stat *stamp)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return SIM_NOT_LOADED;
    }
    ssize_t size = fstat(fd, stamp) == 0 ? read(fd, state, sizeof *state) : -1;
    close(fd);
    return size > 0 && sim_sound(state, (size_t)size) ? SIM_OK : SIM_CORRUPT;
}

/* A time that is later than the last file's, so that every reader notices. */
static void stamp_file(int fd, const struct stat *last)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec < last->st_mtim.tv_sec ||
        (now.tv_sec == last->st_mtim.tv_sec && now.tv_nsec <= last->st_mtim.tv_nsec)) {
        now = last->st_mtim;
        now.tv_nsec++;
    }
    const struct timespec both[2] = {now, now};
    futimens(fd, both);
}

static enum sim_status store(const char *path, struct whole *state, const struct stat *last)
{
    char name[4300];
    state->head.generation++;
    state->head.checksum =
        sim_checksum((const uint8_t *)state + SIM_CHECKED_FROM, (size_t)state->head.size - SIM_CHECKED_FROM);
    snprintf(name, sizeof name, "%s.XXXXXX", path);
    int fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0) {
        return SIM_IO;
    }
    bool done = fchmod(fd, 0644) == 0 && write(fd, state, state->head.size) == (ssize_t)state->head.size;
    stamp_file(fd, last);
    done = close(fd) == 0 && done && rename(name, path) == 0;
    if (!done) {
        unlink(name);
    }
    return done ? SIM_OK : SIM_IO;
}

enum sim_status sim_change(unsigned index, sim_changer change, void *argument)
{
    char path[4200], lock[4200];
    if (!sim_next_to_state("state", path, sizeof path) || !sim_next_to_state("lock", lock, sizeof lock)) {
        return SIM_IO;
    }
    int guard = geteuid() == 0 ? open(lock, O_RDWR | O_CLOEXEC) : -1;
    if (guard < 0) {
        return SIM_DENIED;
    }
    struct whole *state = calloc(1, sizeof *state);
    struct stat last;
    while (flock(guard, LOCK_EX) != 0 && errno == EINTR) {
    }
    enum sim_status status = state != NULL ? load(path, state, &last) : SIM_IO;
    if (status == SIM_OK && index >= state->head.gpu_count) {
        status = SIM_NO_DEVICE;
    }
    if (status == SIM_OK) {
        status = change(&state->head, &state->gpus[index], argument);
    }
    if (status == SIM_OK) {
        status = store(path, state, &last);
    }
    close(guard);
    free(state);
    return status;
}
