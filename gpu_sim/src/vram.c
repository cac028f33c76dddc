#include "vram.h"

#include <fcntl.h>
#include <unistd.h>

#define KEPT 65536u

static bool keeping;

static int open_vram(int flags)
{
    char path[4200];
    return sim_next_to_state("vram", path, sizeof path) ? open(path, flags | O_CLOEXEC) : -1;
}

void vram_find(void)
{
    int fd = open_vram(O_RDWR);
    keeping = fd >= 0;
    if (fd >= 0) {
        close(fd);
    }
}

void vram_leave(unsigned index, const void *memory, size_t size)
{
    int fd = keeping ? open_vram(O_RDWR) : -1;
    if (fd >= 0) {
        ssize_t done = pwrite(fd, memory, size < KEPT ? size : KEPT, (off_t)index * KEPT);
        (void)done;
        close(fd);
    }
}

void vram_show(unsigned index, void *memory, size_t size)
{
    int fd = keeping ? open_vram(O_RDONLY) : -1;
    if (fd >= 0) {
        ssize_t done = pread(fd, memory, size < KEPT ? size : KEPT, (off_t)index * KEPT);
        (void)done;
        close(fd);
    }
}
