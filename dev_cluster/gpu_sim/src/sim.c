#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
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
               gpu->memory_reserved_mib < gpu->memory_total_mib && gpu->tiles >= 1 && gpu->tiles <= 2;
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

static ssize_t read_whole(int fd, void *buffer, size_t size, off_t offset)
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
    ssize_t size = fstat(fd, &stamp) == 0 ? read_whole(fd, session.spare, sizeof *session.spare, 0) : -1;
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
    session.visible = 0;
    for (unsigned i = 0; i < session.now->head.gpu_count; i++) {
        if (session.now->gpus[i].vendor == vendor && gpu_visible(&session.now->gpus[i])) {
            session.visible |= 1u << i;
        }
    }
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

/* ---- who holds what ---- */

/* When a process started; 0 where there is none, or only its remains. `pid` is as /proc has it, which may show an outer
   namespace; 0: this process. */
static uint64_t process_start(uint32_t pid)
{
    char path[64] = "/proc/self/stat", text[1024];
    if (pid != 0) {
        snprintf(path, sizeof path, "/proc/%u/stat", pid);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t size = read_whole(fd, text, sizeof text - 1, 0);
    close(fd);
    if (size <= 0) {
        return 0;
    }
    text[size] = 0;
    char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    char state = 0;
    unsigned long long start = 0;
    if (rest == NULL ||
        sscanf(rest + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
               &start) != 2) {
        return 0;
    }
    return state == 'Z' || state == 'X' ? 0 : start;
}

bool sim_beside(const char *name, char *path, size_t size)
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

static int open_registry(int flags)
{
    char path[4200];
    return sim_beside("processes", path, sizeof path) ? open(path, flags | O_CLOEXEC) : -1;
}

/* All slots; the registry grows with them. It is short or gone: nobody holds anything. */
static unsigned read_slots(int fd, struct sim_slot **slots)
{
    struct stat stamp;
    *slots = NULL;
    if (fd < 0 || fstat(fd, &stamp) != 0 || stamp.st_size <= 0) {
        return 0;
    }
    size_t size = SIM_PROCESS_SLOTS * sizeof(struct sim_slot);
    size = stamp.st_size < (off_t)size ? (size_t)stamp.st_size : size;
    *slots = malloc(size);
    ssize_t got = *slots != NULL ? read_whole(fd, *slots, size, 0) : -1;
    return got > 0 ? (unsigned)((size_t)got / sizeof(struct sim_slot)) : 0;
}

static bool matches(const struct sim_slot *slot, unsigned index, uint8_t instance)
{
    return slot->pid != 0 && slot->gpu == index && (instance == SIM_NO_INSTANCE || slot->instance == instance);
}

/* A slot's owner holds a lock on its first byte for as long as it lives, in whatever PID namespace. */
static struct flock slot_lock(unsigned place)
{
    return (struct flock){
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(place * sizeof(struct sim_slot)), .l_len = 1};
}

/* `fd` must not be the description that this process locks with. */
static bool alive(int fd, unsigned place)
{
    struct flock lock = slot_lock(place);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

static uint64_t own_space(void)
{
    struct stat stamp;
    return stat("/proc/self/ns/pid", &stamp) == 0 ? stamp.st_ino : 0;
}

/* The last number of the NSpid line: a process's number in its own namespace. */
static uint32_t inner_number(const char *pid)
{
    char path[300], text[4096];
    snprintf(path, sizeof path, "/proc/%s/status", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd >= 0 ? read_whole(fd, text, sizeof text - 1, 0) : -1;
    if (fd >= 0) {
        close(fd);
    }
    text[size > 0 ? size : 0] = 0;
    char *line = strstr(text, "\nNSpid:"), *end = line != NULL ? strchr(line + 1, '\n') : NULL;
    if (end == NULL) {
        return 0;
    }
    *end = 0;
    return (uint32_t)strtoul(strrchr(line, '\t') + 1, NULL, 10);
}

/* The number by which this process knows a slot's owner; 0 when it cannot see it, as from within a container. */
static uint32_t visible_number(const struct sim_slot *slot, uint64_t space)
{
    if (slot->space == space) {
        return slot->pid;
    }
    uint32_t found = 0;
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; found == 0 && folder != NULL && (entry = readdir(folder)) != NULL;) {
        uint32_t pid = (uint32_t)strtoul(entry->d_name, NULL, 10);
        if (pid != 0 && process_start(pid) == slot->start && inner_number(entry->d_name) == slot->pid) {
            found = pid;
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return found;
}

static uint64_t later(uint64_t ns, uint64_t than)
{
    return ns > than ? ns - than : 0;
}

static struct sim_use use_of(const struct sim_slot *slot, uint32_t pid)
{
    uint32_t load = slot->load <= 1000 ? slot->load : 1000, before = slot->load_before <= 1000 ? slot->load_before : 0;
    return (struct sim_use){.pid = pid,
                            .instance = (uint8_t)slot->instance,
                            .bytes = slot->bytes,
                            .loads = slot->load_since_ns != 0,
                            .permille = load,
                            .before = before,
                            .since_ns = slot->load_since_ns,
                            .before_ns = slot->before_since_ns,
                            .busy_ns = slot->busy_ns + later(sim_now_ns(), slot->load_since_ns) / 1000 * load};
}

uint32_t sim_average(const struct sim_use *use, uint64_t from_ns)
{
    uint64_t now = sim_now_ns();
    uint64_t from = from_ns > use->before_ns ? from_ns : use->before_ns; /* it did nothing before */
    if (!use->loads || now <= from) {
        return use->permille;
    }
    uint64_t in_before = later(use->since_ns, from), in_now = later(now, from > use->since_ns ? from : use->since_ns);
    uint64_t whole = later(now, from_ns > 0 && from_ns < from ? from_ns : from);
    return (uint32_t)((in_before * use->before + in_now * use->permille + whole / 2) / whole);
}

unsigned sim_uses(unsigned index, const struct sim_gpu *gpu, uint8_t instance, struct sim_use *uses, unsigned room)
{
    unsigned found = 0;
    for (unsigned i = 0; i < gpu->process_count; i++) {
        const struct sim_process *process = &gpu->processes[i];
        if (instance == SIM_NO_INSTANCE || process->instance == instance) {
            if (found < room) {
                uses[found] = (struct sim_use){.pid = process->pid,
                                               .graphics = process->graphics != 0,
                                               .instance = process->instance,
                                               .bytes = process->memory_mib * SIM_MIB};
            }
            found++;
        }
    }
    struct sim_slot *slots;
    int fd = open_registry(O_RDONLY);
    unsigned count = read_slots(fd, &slots);
    uint64_t space = count > 0 ? own_space() : 0;
    for (unsigned i = 0; i < count; i++) {
        bool here = matches(&slots[i], index, instance) && slots[i].bytes > 0 && alive(fd, i);
        uint32_t pid = here ? visible_number(&slots[i], space) : 0;
        if (pid != 0) {
            if (found < room) {
                uses[found] = use_of(&slots[i], pid);
            }
            found++;
        }
    }
    free(slots);
    if (fd >= 0) {
        close(fd);
    }
    return found;
}

/* What is in use without any process of the registry. */
static uint64_t standing(const struct sim_gpu *gpu, uint8_t instance)
{
    uint64_t mib = instance == SIM_NO_INSTANCE ? gpu->memory_used_mib : gpu->instances[instance].memory_used_mib;
    for (unsigned i = 0; i < gpu->process_count; i++) {
        if (instance == SIM_NO_INSTANCE || gpu->processes[i].instance == instance) {
            mib += gpu->processes[i].memory_mib;
        }
    }
    for (unsigned i = 0; instance == SIM_NO_INSTANCE && i < SIM_MAX_INSTANCES; i++) {
        mib += gpu->instances[i].used ? gpu->instances[i].memory_used_mib : 0;
    }
    return mib * SIM_MIB;
}

uint64_t sim_capacity(const struct sim_gpu *gpu, uint8_t instance)
{
    if (instance != SIM_NO_INSTANCE) {
        return gpu->profiles[gpu->instances[instance].profile].memory_mib * SIM_MIB;
    }
    return (gpu->memory_total_mib - gpu->memory_reserved_mib) * SIM_MIB;
}

uint32_t sim_multiprocessors(const struct sim_gpu *gpu, uint8_t instance)
{
    return instance == SIM_NO_INSTANCE ? gpu->multiprocessors
                                       : gpu->profiles[gpu->instances[instance].profile].multiprocessors;
}

uint64_t sim_used(unsigned index, const struct sim_gpu *gpu, uint8_t instance)
{
    uint64_t bytes = standing(gpu, instance);
    struct sim_slot *slots;
    int fd = open_registry(O_RDONLY);
    unsigned count = read_slots(fd, &slots);
    for (unsigned i = 0; i < count; i++) {
        if (matches(&slots[i], index, instance) && slots[i].bytes > 0 && alive(fd, i)) {
            bytes += slots[i].bytes;
        }
    }
    free(slots);
    if (fd >= 0) {
        close(fd);
    }
    uint64_t capacity = sim_capacity(gpu, instance);
    return bytes < capacity ? bytes : capacity;
}

/* Sum over the slots of a GPU or instance, the dead ones left out only when `careful`: asking costs. */
static uint64_t held(int fd, const struct sim_slot *slots, unsigned count, unsigned index, uint8_t instance,
                     bool careful)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < count; i++) {
        if (matches(&slots[i], index, instance) && (!careful || alive(fd, i))) {
            bytes += slots[i].bytes;
        }
    }
    return bytes;
}

/* Who this process is, asked for once, and the description with which it locks its slots. The registry's lock guards
 * it. */
struct owner {
    pid_t pid;
    uint64_t start, space;
    int anchor;
};

static bool is_mine(const struct sim_slot *slot, const struct owner *me)
{
    return slot->pid == (uint32_t)me->pid && slot->start == me->start && slot->space == me->space;
}

static bool same_inode(int one, int other)
{
    struct stat a, b;
    return one >= 0 && fstat(one, &a) == 0 && fstat(other, &b) == 0 && a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

/* What this process held before it went on as another program is gone: nobody locks it any more. */
static void drop_earlier_program(int fd, struct sim_slot *slots, unsigned count, const struct owner *me)
{
    for (unsigned i = 0; i < count; i++) {
        if (is_mine(&slots[i], me) && !alive(fd, i)) {
            slots[i] = (struct sim_slot){0};
            ssize_t done = pwrite(fd, &slots[i], sizeof slots[i], (off_t)(i * sizeof slots[i]));
            (void)done;
        }
    }
}

static const struct owner *myself(int fd, struct sim_slot *slots, unsigned count)
{
    static struct owner owner = {.anchor = -1};
    bool first = owner.pid == 0;
    bool kept = same_inode(owner.anchor, fd); /* not where the program closed what it did not open */
    if (owner.pid != getpid()) {
        if (kept) {
            close(owner.anchor); /* a copy of the parent's, from before a fork */
        }
        kept = false;
        owner = (struct owner){.pid = getpid(), .start = process_start(0), .space = own_space(), .anchor = -1};
    }
    if (first) {
        drop_earlier_program(fd, slots, count, &owner);
    }
    if (!kept) {
        owner.anchor = open_registry(O_RDWR);
    }
    for (unsigned i = 0; !kept && i < count; i++) {
        struct flock lock = slot_lock(i);
        if (is_mine(&slots[i], &owner)) {
            fcntl(owner.anchor, F_OFD_SETLK, &lock);
        }
    }
    return &owner;
}

/* This process's slot for a GPU or instance, else one that is nobody's any more, else a new one. */
static unsigned own_slot(int fd, const struct sim_slot *slots, unsigned count, unsigned index, uint8_t instance,
                         const struct owner *me)
{
    for (unsigned i = 0; i < count; i++) {
        if (is_mine(&slots[i], me) && slots[i].gpu == index && slots[i].instance == instance) {
            return i;
        }
    }
    unsigned place = 0;
    while (place < count && alive(fd, place)) {
        place++;
    }
    return place;
}

uint64_t sim_process_limit[SIM_MAX_GPUS];
uint32_t sim_mps_server;

/* Whether the compute mode lets this process, which has nothing there yet, onto a GPU. */
static bool let_in(int fd, const struct sim_slot *slots, unsigned count, unsigned index, const struct sim_gpu *gpu,
                   const struct owner *me)
{
    if (gpu->compute_mode != SIM_COMPUTEMODE_EXCLUSIVE_PROCESS) {
        return gpu->compute_mode != SIM_COMPUTEMODE_PROHIBITED;
    }
    for (unsigned i = 0; i < count; i++) {
        bool mine = is_mine(&slots[i], me) || (sim_mps_server != 0 && slots[i].server == sim_mps_server);
        if (!mine && matches(&slots[i], index, SIM_NO_INSTANCE) && alive(fd, i)) {
            return false;
        }
    }
    return gpu->process_count == 0;
}

/* Whether this process, which has so much, may have more: as an MPS client, and as a member of its cgroup. */
static bool within_limits(unsigned index, uint64_t has, uint64_t more)
{
    uint64_t most = sim_process_limit[index];
    if (most != 0 && (more > most || has > most - more)) {
        return false;
    }
    struct sim_cgroup_limit limit;
    return !sim_own_limits(index, &limit) || limit.hard == SIM_NO_LIMIT ||
           (more <= limit.hard && limit.used <= limit.hard - more);
}

static enum sim_status change_slot(int fd, unsigned index, const struct sim_gpu *gpu, uint8_t instance, int64_t change)
{
    struct sim_slot *slots;
    unsigned count = read_slots(fd, &slots);
    const struct owner *me = myself(fd, slots, count);
    unsigned place = own_slot(fd, slots, count, index, instance, me);
    enum sim_status status = place < SIM_PROCESS_SLOTS && me->start != 0 && me->anchor >= 0 ? SIM_OK : SIM_IO;
    struct sim_slot slot = {
        .pid = (uint32_t)me->pid, .gpu = (uint16_t)index, .instance = instance, .start = me->start, .space = me->space};
    slot.server = sim_mps_server;
    if (status == SIM_OK && place < count && is_mine(&slots[place], me)) {
        slot = slots[place];
    } else if (status == SIM_OK && change > 0 && gpu->vendor == SIM_VENDOR_NVIDIA &&
               !let_in(fd, slots, count, index, gpu, me)) {
        status = SIM_BUSY;
    }
    if (status == SIM_OK && change > 0) {
        uint64_t room = sim_capacity(gpu, instance), fixed = standing(gpu, instance);
        uint64_t wanted = fixed + (uint64_t)change;
        if (wanted < fixed || wanted + held(fd, slots, count, index, instance, false) > room) {
            wanted += held(fd, slots, count, index, instance, true);
            status = wanted > room || wanted < (uint64_t)change ? SIM_NO_MEMORY : SIM_OK;
        }
        if (status == SIM_OK && !within_limits(index, slot.bytes, (uint64_t)change)) {
            status = SIM_NO_MEMORY;
        }
    }
    if (status == SIM_OK) {
        uint64_t less = change < 0 ? (uint64_t)-change : 0;
        slot.bytes = change < 0 ? slot.bytes - (less < slot.bytes ? less : slot.bytes) : slot.bytes + (uint64_t)change;
        struct flock lock = slot_lock(place);
        if (slot.bytes == 0) {
            slot = (struct sim_slot){0};
            lock.l_type = F_UNLCK;
        }
        off_t offset = lock.l_start;
        bool done = fcntl(me->anchor, F_OFD_SETLK, &lock) == 0 &&
                    pwrite(fd, &slot, sizeof slot, offset) == (ssize_t)sizeof slot;
        status = done ? SIM_OK : SIM_IO;
    }
    free(slots);
    return status;
}

/* Change this process's slot under the registry's lock. */
static enum sim_status change_load(int fd, unsigned index, uint8_t instance, uint32_t permille)
{
    struct sim_slot *slots;
    unsigned count = read_slots(fd, &slots);
    const struct owner *me = myself(fd, slots, count);
    enum sim_status status = SIM_NO_DEVICE;
    for (unsigned i = 0; i < count; i++) {
        if (is_mine(&slots[i], me) && slots[i].gpu == index && slots[i].instance == instance) {
            struct sim_slot slot = slots[i];
            uint64_t now = sim_now_ns();
            slot.busy_ns += later(now, slot.load_since_ns) / 1000 * slot.load;
            slot.before_since_ns = slot.load_since_ns != 0 ? slot.load_since_ns : now;
            slot.load_before = slot.load;
            slot.load_since_ns = now;
            slot.load = permille;
            off_t offset = (off_t)(i * sizeof slot);
            status = pwrite(fd, &slot, sizeof slot, offset) == (ssize_t)sizeof slot ? SIM_OK : SIM_IO;
            break;
        }
    }
    free(slots);
    return status;
}

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;

/* The registry, locked against this process's threads and all other processes; -1 when there is none. */
static int lock_registry(void)
{
    int fd = open_registry(O_RDWR);
    if (fd >= 0) {
        pthread_mutex_lock(&registry);
        while (flock(fd, LOCK_EX) != 0 && errno == EINTR) { /* the kernel frees it when its holder dies */
        }
    }
    return fd;
}

static void unlock_registry(int fd)
{
    close(fd);
    pthread_mutex_unlock(&registry);
}

enum sim_status sim_hold(unsigned index, uint8_t instance, int64_t change)
{
    struct sim_gpu gpu;
    if (!sim_peek(index, &gpu)) {
        return SIM_NO_DEVICE;
    }
    int fd = lock_registry();
    if (fd < 0) {
        return SIM_IO;
    }
    enum sim_status status = change_slot(fd, index, &gpu, instance, change);
    unlock_registry(fd);
    return status;
}

enum sim_status sim_load(unsigned index, uint8_t instance, uint32_t permille)
{
    int fd = permille <= 1000 ? lock_registry() : -1;
    if (fd < 0) {
        return SIM_IO;
    }
    enum sim_status status = change_load(fd, index, instance, permille);
    unlock_registry(fd);
    return status;
}

enum { MAX_USES = 512 };

uint32_t sim_utilisation(unsigned index, const struct sim_gpu *gpu)
{
    struct sim_use uses[MAX_USES];
    unsigned found = sim_uses(index, gpu, SIM_NO_INSTANCE, uses, MAX_USES);
    uint32_t permille = gpu->utilisation * 10;
    for (unsigned i = 0; i < found && i < MAX_USES; i++) {
        permille += uses[i].permille;
    }
    return permille < 1000 ? (permille + 5) / 10 : 100;
}

uint64_t sim_busy(unsigned index, const struct sim_gpu *gpu, uint8_t instance)
{
    struct sim_use uses[MAX_USES];
    unsigned found = sim_uses(index, gpu, instance, uses, MAX_USES);
    uint64_t busy = gpu->active_us * 1000 + later(sim_now_ns(), gpu->active_since_ns) / 100 * gpu->utilisation;
    for (unsigned i = 0; i < found && i < MAX_USES; i++) {
        busy += uses[i].busy_ns;
    }
    return busy;
}

/* ---- small things ---- */

uint64_t sim_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t sim_energy(const struct sim_gpu *gpu)
{
    uint64_t ns = sim_now_ns();
    uint64_t elapsed_ms = ns > gpu->energy_since_ns ? (ns - gpu->energy_since_ns) / 1000000u : 0;
    return gpu->energy_mj + gpu->power_mw * elapsed_ms / 1000u;
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
