/* Who holds how much memory: the node's registry of processes, and how busy they keep its GPUs. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

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
    ssize_t size = sim_read(fd, text, sizeof text - 1, 0);
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

static int open_registry(int flags)
{
    char path[4200];
    return sim_next_to_state("processes", path, sizeof path) ? open(path, flags | O_CLOEXEC) : -1;
}

/* All slots; the registry grows with them. It is short or gone: no process holds anything. */
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
    ssize_t got = *slots != NULL ? sim_read(fd, *slots, size, 0) : -1;
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

/* `pid` as in /proc, or "self"; 0 where that may not be asked. */
static uint64_t pid_namespace_of(const char *pid)
{
    struct stat stamp;
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/ns/pid", pid);
    return stat(path, &stamp) == 0 ? stamp.st_ino : 0;
}

static uint64_t pid_namespace(void)
{
    return pid_namespace_of("self");
}

/* The last number of the NSpid line: a process's number in its own namespace. */
static uint32_t inner_number(const char *pid)
{
    char path[300], text[4096];
    snprintf(path, sizeof path, "/proc/%s/status", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd >= 0 ? sim_read(fd, text, sizeof text - 1, 0) : -1;
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
        if (pid == 0 || inner_number(entry->d_name) != slot->pid) {
            continue;
        }
        /* In a time namespace, as CRIU makes them, a process starts at another time than outside. */
        if (process_start(pid) == slot->start || pid_namespace_of(entry->d_name) == slot->space) {
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
    uint64_t space = count > 0 ? pid_namespace() : 0;
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

/* What this process held before it went on as another program is gone: it is not locked any more. */
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

static struct owner owner = {.anchor = -1};

static const struct owner *myself(int fd, struct sim_slot *slots, unsigned count)
{
    bool first = owner.pid == 0;
    bool kept = same_inode(owner.anchor, fd); /* not where the program closed what it did not open */
    if (owner.pid != getpid()) {
        if (kept) {
            close(owner.anchor); /* a copy of the parent's, from before a fork */
        }
        kept = false;
        owner = (struct owner){.pid = getpid(), .start = process_start(0), .space = pid_namespace(), .anchor = -1};
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

/* This process's slot for a GPU or instance, else one that is free again, else a new one. */
static unsigned slot_for(int fd, const struct sim_slot *slots, unsigned count, unsigned index, uint8_t instance,
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
    return !sim_process_cgroup_limits(index, &limit) || limit.hard == SIM_NO_LIMIT ||
           (more <= limit.hard && limit.used <= limit.hard - more);
}

static enum sim_status change_slot(int fd, unsigned index, const struct sim_gpu *gpu, uint8_t instance, int64_t change)
{
    struct sim_slot *slots;
    unsigned count = read_slots(fd, &slots);
    const struct owner *me = myself(fd, slots, count);
    unsigned place = slot_for(fd, slots, count, index, instance, me);
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

uint64_t sim_held(unsigned index, uint8_t instance)
{
    struct sim_slot *slots;
    uint64_t bytes = 0;
    int fd = lock_registry();
    if (fd < 0) {
        return 0;
    }
    unsigned count = read_slots(fd, &slots);
    const struct owner *me = myself(fd, slots, count);
    for (unsigned i = 0; i < count; i++) {
        if (is_mine(&slots[i], me) && slots[i].gpu == index && slots[i].instance == instance) {
            bytes = slots[i].bytes;
        }
    }
    free(slots);
    unlock_registry(fd);
    return bytes;
}

void sim_let_go(void)
{
    int fd = lock_registry();
    if (fd < 0) {
        return;
    }
    if (same_inode(owner.anchor, fd)) {
        close(owner.anchor);
    }
    owner = (struct owner){.anchor = -1};
    unlock_registry(fd);
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
