#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

/* A node of dev_cluster has its state in its private /dev, which wins: a job must not choose another by environment. */
#define NODE_STATE "/dev/sluice-sim/state"
#define STATE_VARIABLE "SLUICE_SIM_STATE"
#define DEVICE_VARIABLE "SLUICE_SIM_DEV" /* folder of the device files where it is not /dev (tests) */

struct snapshot {
    struct sim_state head;
    struct sim_gpu gpus[SIM_MAX_GPUS];
};

static struct {
    pthread_mutex_t lock;
    unsigned opened;
    enum sim_vendor vendor;
    char path[4096];
    char devices[4096]; /* folder of the device files; empty: visibility is not checked */
    struct stat stamp;  /* of the file that `now` was read from */
    struct snapshot *now, *spare;
    uint32_t visible; /* bit mask of the node's GPUs */
} session = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- the state file ---- */

uint32_t sim_checksum(const void *bytes, size_t size)
{
    const uint8_t *data = bytes;
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
        }
    }
    return ~crc;
}

static bool terminated(const char *text, size_t size)
{
    return memchr(text, 0, size) != NULL;
}

/* Everything that the rest of the code relies on, so that no state can lead it out of bounds. */
static bool sound(const struct snapshot *state, size_t size)
{
    const struct sim_state *head = &state->head;
    if (size < sizeof *head || memcmp(head->magic, SIM_MAGIC, sizeof head->magic) != 0 ||
        head->version != SIM_VERSION || head->size != size || head->gpu_count > SIM_MAX_GPUS ||
        size != sizeof *head + head->gpu_count * sizeof(struct sim_gpu) || head->numa_count > SIM_MAX_NUMA ||
        head->checksum != sim_checksum((const uint8_t *)state + SIM_CHECKED_FROM, size - SIM_CHECKED_FROM)) {
        return false;
    }
    bool good = terminated(head->node, sizeof head->node);
    for (unsigned i = 0; i < SIM_VENDORS; i++) {
        good = good && terminated(head->drivers[i].version, sizeof head->drivers[i].version) &&
               terminated(head->drivers[i].library, sizeof head->drivers[i].library);
    }
    for (unsigned i = 0; i < head->gpu_count; i++) {
        const struct sim_gpu *gpu = &state->gpus[i];
        good = good && gpu->vendor < SIM_VENDORS && gpu->link_count <= SIM_MAX_LINKS &&
               gpu->process_count <= SIM_MAX_PROCESSES && gpu->profile_count <= SIM_MAX_PROFILES &&
               terminated(gpu->name, sizeof gpu->name) && terminated(gpu->uuid, sizeof gpu->uuid) &&
               terminated(gpu->serial, sizeof gpu->serial) && terminated(gpu->vbios, sizeof gpu->vbios) &&
               terminated(gpu->part_number, sizeof gpu->part_number) &&
               terminated(gpu->architecture_name, sizeof gpu->architecture_name) &&
               gpu->memory_reserved_mib < gpu->memory_total_mib && gpu->tiles >= 1 && gpu->tiles <= 2 &&
               gpu->dies <= SIM_MAX_INSTANCES &&
               (gpu->dies == 0 ||
                (gpu->compute_partition >= SIM_COMPUTE_SPX && gpu->compute_partition <= SIM_COMPUTE_CPX));
        for (unsigned k = 0; good && k < SIM_MAX_LINKS; k++) {
            good = gpu->links[k].peer_gpu < SIM_MAX_GPUS;
        }
        for (unsigned k = 0; good && k < SIM_MAX_INSTANCES; k++) {
            const struct sim_instance *instance = &gpu->instances[k];
            good = !instance->used ||
                   (instance->profile < gpu->profile_count && terminated(instance->uuid, sizeof instance->uuid));
        }
        for (unsigned k = 0; good && k < SIM_MAX_PROFILES; k++) {
            good = terminated(gpu->profiles[k].name, sizeof gpu->profiles[k].name);
        }
        for (unsigned k = 0; good && k < SIM_MAX_PROCESSES; k++) {
            good = terminated(gpu->processes[k].name, sizeof gpu->processes[k].name);
        }
    }
    return good;
}

bool sim_sound(const void *state, size_t size)
{
    return sound(state, size);
}

ssize_t sim_read(int fd, void *buffer, size_t size, off_t offset)
{
    size_t done = 0;
    while (done < size) {
        ssize_t got = pread(fd, (char *)buffer + done, size - done, offset + (off_t)done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return -1;
        }
        if (got == 0) {
            break;
        }
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Read the file again where it changed. It is read, never mapped: a file cut short must not raise SIGBUS in a job. */
static enum sim_status refresh(void)
{
    struct stat stamp;
    if (stat(session.path, &stamp) != 0) {
        session.stamp = (struct stat){0};
        return SIM_NOT_LOADED;
    }
    if (same_file(&stamp, &session.stamp)) {
        return SIM_OK;
    }
    int fd = open(session.path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return SIM_NOT_LOADED;
    }
    ssize_t size = fstat(fd, &stamp) == 0 ? sim_read(fd, session.spare, sizeof *session.spare, 0) : -1;
    close(fd);
    if (size < 0 || stamp.st_size != size || !sound(session.spare, (size_t)size)) {
        session.stamp = (struct stat){0};
        return SIM_CORRUPT;
    }
    struct snapshot *fresh = session.spare;
    session.spare = session.now;
    session.now = fresh;
    session.stamp = stamp;
    return SIM_OK;
}

/* ---- visibility ---- */

/* The device cgroup answers an open with EPERM; a device without a driver behind it with ENXIO, which is a yes. */
static bool may_open(const char *name)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", session.devices, name);
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd >= 0) {
        close(fd);
        return true;
    }
    return errno == ENXIO || errno == ENODEV;
}

static bool gpu_visible(const struct sim_gpu *gpu)
{
    if (session.devices[0] == 0) {
        return true;
    }
    for (unsigned k = 0; gpu->vendor == SIM_VENDOR_AMD && k < SIM_MAX_INSTANCES; k++) {
        if (gpu->instances[k].used && sim_instance_visible(gpu, &gpu->instances[k])) {
            return true;
        }
    }
    char name[64];
    snprintf(name, sizeof name, gpu->vendor == SIM_VENDOR_NVIDIA ? "nvidia%u" : "dri/renderD%u", gpu->minor);
    return may_open(name);
}

bool sim_instance_visible(const struct sim_gpu *gpu, const struct sim_instance *instance)
{
    if (session.devices[0] == 0) {
        return true;
    }
    char access[64], compute[64];
    if (gpu->vendor == SIM_VENDOR_AMD) {
        snprintf(access, sizeof access, "dri/renderD%u", instance->access_minor);
        return may_open(access);
    }
    snprintf(access, sizeof access, "nvidia-caps/nvidia-cap%u", instance->access_minor);
    snprintf(compute, sizeof compute, "nvidia-caps/nvidia-cap%u", instance->compute_minor);
    return may_open(access) && may_open(compute);
}

/* ---- open, enter ---- */

static enum sim_status find_state(void)
{
    const char *path = NODE_STATE, *devices = "/dev";
    if (access(NODE_STATE, F_OK) != 0) {
        path = getenv(STATE_VARIABLE);
        devices = getenv(DEVICE_VARIABLE);
        if (path == NULL || path[0] == 0) {
            return SIM_NOT_LOADED;
        }
    }
    return sim_text(session.path, sizeof session.path, path) &&
                   sim_text(session.devices, sizeof session.devices, devices != NULL ? devices : "")
               ? SIM_OK
               : SIM_NOT_LOADED;
}

/* A fork copies the lock as another thread may hold it; the child has no other threads. */
static void after_fork(void)
{
    pthread_mutex_init(&session.lock, NULL);
}

static void look(enum sim_vendor vendor)
{
    session.visible = 0;
    for (unsigned i = 0; i < session.now->head.gpu_count; i++) {
        if (session.now->gpus[i].vendor == vendor && gpu_visible(&session.now->gpus[i])) {
            session.visible |= 1u << i;
        }
    }
}

void sim_look_again(void)
{
    pthread_mutex_lock(&session.lock);
    if (session.opened > 0 && refresh() == SIM_OK) {
        look(session.vendor);
    }
    pthread_mutex_unlock(&session.lock);
}

static enum sim_status open_locked(enum sim_vendor vendor)
{
    if (session.opened > 0) {
        session.opened++;
        return SIM_OK;
    }
    if (session.now == NULL && (session.now = malloc(2 * sizeof *session.now)) != NULL) {
        session.spare = session.now + 1;
        pthread_atfork(NULL, NULL, after_fork);
    }
    if (session.now == NULL) {
        return SIM_NOT_LOADED;
    }
    session.vendor = vendor;
    session.stamp = (struct stat){0};
    enum sim_status status = find_state();
    if (status == SIM_OK) {
        status = refresh();
    }
    if (status == SIM_OK && session.now->head.drivers[vendor].loaded == 0) {
        status = SIM_NOT_LOADED;
    }
    if (status != SIM_OK) {
        return status;
    }
    look(vendor);
    session.opened = 1;
    return SIM_OK;
}

enum sim_status sim_open(enum sim_vendor vendor)
{
    pthread_mutex_lock(&session.lock);
    enum sim_status status = open_locked(vendor);
    pthread_mutex_unlock(&session.lock);
    return status == SIM_OK ? sim_enter(0, NULL) : status;
}

enum sim_status sim_close(void)
{
    pthread_mutex_lock(&session.lock);
    enum sim_status status = session.opened > 0 ? SIM_OK : SIM_CLOSED;
    if (session.opened > 0) {
        session.opened--;
    }
    pthread_mutex_unlock(&session.lock);
    return status;
}

static void pause_ms(uint32_t ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static enum sim_status current_driver(struct sim_driver *driver)
{
    pthread_mutex_lock(&session.lock);
    enum sim_status status = session.opened > 0 ? refresh() : SIM_CLOSED;
    if (status == SIM_OK) {
        *driver = session.now->head.drivers[session.vendor];
        status = driver->loaded ? SIM_OK : SIM_NOT_LOADED;
    }
    pthread_mutex_unlock(&session.lock);
    return status;
}

enum sim_status sim_enter(uint32_t since, struct sim_state *head)
{
    struct sim_driver driver;
    enum sim_status status = current_driver(&driver);
    if (status == SIM_OK && driver.delay_ms > 0) {
        pause_ms(driver.delay_ms);
    }
    while (status == SIM_OK && driver.hang) { /* until someone sets it free, or kills us */
        pause_ms(20);
        status = current_driver(&driver);
    }
    if (status == SIM_OK && driver.generation < since) {
        status = SIM_OLD_DRIVER;
    }
    if (status == SIM_OK && head != NULL) {
        pthread_mutex_lock(&session.lock);
        *head = session.now->head;
        pthread_mutex_unlock(&session.lock);
    }
    return status;
}

bool sim_limits_power(void)
{
    pthread_mutex_lock(&session.lock);
    bool limits =
        session.opened > 0 && session.now->head.drivers[session.vendor].power_limits != SIM_POWERLIMITS_UNSUPPORTED;
    pthread_mutex_unlock(&session.lock);
    return limits;
}

unsigned sim_visible(uint8_t *indices)
{
    unsigned count = 0;
    pthread_mutex_lock(&session.lock);
    for (uint8_t i = 0; i < SIM_MAX_GPUS; i++) {
        if (session.visible >> i & 1u) {
            indices[count++] = i;
        }
    }
    pthread_mutex_unlock(&session.lock);
    return count;
}

bool sim_peek(unsigned index, struct sim_gpu *gpu)
{
    pthread_mutex_lock(&session.lock);
    bool there = session.opened > 0 && index < session.now->head.gpu_count;
    if (there) {
        *gpu = session.now->gpus[index];
    }
    pthread_mutex_unlock(&session.lock);
    return there;
}

enum sim_status sim_gpu(uint32_t since, unsigned index, struct sim_gpu *gpu)
{
    enum sim_status status = sim_enter(since, NULL);
    if (status != SIM_OK) {
        return status;
    }
    pthread_mutex_lock(&session.lock);
    bool visible = index < SIM_MAX_GPUS && (session.visible >> index & 1u);
    pthread_mutex_unlock(&session.lock);
    if (!visible || !sim_peek(index, gpu)) {
        return SIM_NO_DEVICE;
    }
    return gpu->lost ? SIM_LOST : SIM_OK;
}

/* ---- files ---- */

bool sim_next_to_state(const char *name, char *path, size_t size)
{
    pthread_mutex_lock(&session.lock);
    const char *slash = strrchr(session.path, '/');
    int folder = slash != NULL ? (int)(slash - session.path) + 1 : 0;
    int length = snprintf(path, size, "%.*s%s", folder, session.path, name);
    pthread_mutex_unlock(&session.lock);
    return length > 0 && (size_t)length < size;
}

/* False where device files are not looked at. */
static bool device_path(const char *name, char *path, size_t size)
{
    pthread_mutex_lock(&session.lock);
    bool checked = session.devices[0] != 0;
    snprintf(path, size, "%s/%s", session.devices, name);
    pthread_mutex_unlock(&session.lock);
    return checked;
}

void sim_make_device(const char *name, uint32_t major, uint32_t minor, uint32_t mode)
{
    char path[4300];
    char *slash = device_path(name, path, sizeof path) ? strrchr(path, '/') : NULL;
    if (slash != NULL) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
        if (mknod(path, S_IFCHR | mode, makedev(major, minor)) == 0) {
            chmod(path, mode); /* whatever the umask */
        }
    }
}

void sim_drop_device(const char *name)
{
    char path[4300];
    if (device_path(name, path, sizeof path)) {
        unlink(path);
    }
}

/* ---- small things ---- */

uint64_t sim_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void sim_pci_text(const struct sim_pci *pci, char *text, size_t size)
{
    snprintf(text, size, "%04x:%02x:%02x.%x", pci->domain, pci->bus, pci->device, pci->function);
}

bool sim_text(char *to, size_t size, const char *from)
{
    if (size == 0) {
        return false;
    }
    size_t length = strnlen(from, size);
    memcpy(to, from, length < size ? length : size - 1);
    to[length < size ? length : size - 1] = 0;
    return length < size;
}
