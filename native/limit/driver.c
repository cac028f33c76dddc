/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <stdlib.h>
#include <sys/stat.h>

static const uint64_t far_too_much = UINT64_C(1) << 46;

/* ---- pieces ---- */

void limit_remember(struct limit_entry *entry, enum limit_class class, uint64_t key)
{
    struct limit_session *session = limit_session();
    entry->class = class;
    entry->key = key;
    if (session)
        limit_table_put(&session->table, entry);
}

static bool settle_files(struct limit_session *session);

/* After a refusal: is there room in what this process itself no longer uses? */
static bool find_room(const struct limit_driver *driver)
{
    struct limit_session *session = limit_session();
    if (!session)
        return false;
    bool gave = limit_settle_pools(driver, session);
    pthread_mutex_lock(&session->objects);
    gave = settle_files(session) || gave;
    pthread_mutex_unlock(&session->objects);
    return gave;
}

bool limit_driver_take(const struct limit_driver *driver, int device, uint64_t size, struct limit_entry *entry)
{
    return limit_take_piece(device, size, driver->granule, entry) ||
           (find_room(driver) && limit_take_piece(device, size, driver->granule, entry));
}

bool limit_driver_open_context(const struct limit_driver *driver, int device)
{
    return limit_open_context(device) || (find_room(driver) && limit_open_context(device));
}

void limit_driver_give(const struct limit_driver *driver, const struct limit_entry *entry)
{
    if (entry->spilled)
        limit_give_spill(entry->device, entry->bytes);
    else
        limit_give_piece(entry, driver->granule);
}

static bool lives_in(const struct limit_entry *entry, const void *owner)
{
    return entry->owner == owner;
}

static void drop(const struct limit_entry *entry, const void *driver)
{
    if (entry->link == 0) /* what came from a pool is the pool's */
        limit_driver_give(driver, entry);
}

void limit_drop_owner(const struct limit_driver *driver, struct limit_session *session, const void *owner)
{
    if (owner)
        limit_table_drain(&session->table, lives_in, owner, drop, driver);
}

/* ---- arrays ---- */

static uint64_t texel_bytes(int format, unsigned channels)
{
    enum { WIDEST = 4, MOST_CHANNELS = 4 };
    static const unsigned char bytes_of[256] = {
        [0x01] = 1, [0x02] = 2, [0x03] = 4, [0x08] = 1, [0x09] = 2, [0x0a] = 4, [0x10] = 2,
        [0x20] = 4, [0xc0] = 1, [0xc1] = 1, [0xc2] = 1, [0xc3] = 2, [0xc4] = 2, [0xc5] = 2};
    unsigned char known = format >= 0 && format < 256 ? bytes_of[format] : 0;
    return (known ? known : WIDEST) * (uint64_t)(channels <= MOST_CHANNELS ? channels : MOST_CHANNELS);
}

uint64_t limit_array_bytes(struct extent extent, unsigned levels, bool layered, uint64_t texel)
{
    enum { MAX_SIDE = 1 << 20, MAX_LEVELS = 32 };
    uint64_t sum = 0;
    if (extent.width > MAX_SIDE || extent.height > MAX_SIDE || extent.depth > MAX_SIDE)
        return 0;
    levels = levels ? levels : 1; /* drivers take none for one */
    for (unsigned level = 0; level < levels && level < MAX_LEVELS; level++) {
        uint64_t planes = (uint64_t)(extent.height ? extent.height : 1) * (extent.depth ? extent.depth : 1), bytes;
        if (__builtin_mul_overflow(planes * (extent.width ? extent.width : 1), texel, &bytes) || bytes > far_too_much)
            return far_too_much;
        sum += bytes;
        extent.width /= 2;
        extent.height /= 2;
        extent.depth /= layered ? 1 : 2;
    }
    return sum;
}

uint64_t limit_array_2d_bytes(const struct array_2d *what)
{
    return what ? limit_array_bytes((struct extent){what->width, what->height, 0}, 1, false,
                                    texel_bytes(what->format, what->channels))
                : 0;
}

uint64_t limit_array_3d_bytes(const struct array_3d *what, unsigned levels)
{
    enum { LAYERED = 1 };
    return what ? limit_array_bytes(what->extent, levels, (what->flags & LAYERED) != 0,
                                    texel_bytes(what->format, what->channels))
                : 0;
}

/* ---- pools ---- */

enum { POOL_RESERVED = 5, POOL_USED = 7, GRAPH_USED = 0, GRAPH_RESERVED = 2 }; /* the same in CUDA and HIP */

/* What a driver freed may take it some waiting to give up: so many looks, when a program waits for its device,
 * suffice. */
enum { LATE_LOOKS = 4 };

/* A pool that is charged for; a process has a few. */
struct limit_pool_record {
    struct limit_pool pool;
    int device; /* of the ledger */
    uint64_t bytes;
    struct limit_pool_record *next;
};

static bool reserved_of(struct limit_pool pool, uint64_t *bytes)
{
    return pool.handle ? pool.driver->pool_attribute(pool.handle, POOL_RESERVED, bytes)
                       : pool.driver->graph_attribute(pool.ordinal, GRAPH_RESERVED, bytes);
}

static bool used_of(struct limit_pool pool, uint64_t *bytes)
{
    return pool.handle ? pool.driver->pool_attribute(pool.handle, POOL_USED, bytes)
                       : pool.driver->graph_attribute(pool.ordinal, GRAPH_USED, bytes);
}

/* The lock `pools` is held here and below. */
static struct limit_pool_record *find_pool(struct limit_session *session, struct limit_pool pool)
{
    struct limit_pool_record *record = session->pool_list;
    while (record && (record->pool.handle != pool.handle || record->pool.driver != pool.driver ||
                      (!pool.handle && record->pool.ordinal != pool.ordinal)))
        record = record->next;
    return record;
}

static struct limit_pool_record *add_pool(struct limit_session *session, struct limit_pool pool, int device)
{
    struct limit_pool_record *record = malloc(sizeof *record);
    if (record) {
        *record = (struct limit_pool_record){.pool = pool, .device = device, .next = session->pool_list};
        session->pool_list = record;
    }
    return record;
}

static struct limit_pool_record *know_pool(struct limit_session *session, struct limit_pool pool)
{
    struct limit_pool_record *record = find_pool(session, pool);
    return record ? record : add_pool(session, pool, pool.driver->device(pool.ordinal));
}

static void trim(struct limit_pool pool)
{
    if (pool.handle)
        pool.driver->trim_pool(pool.handle);
    else
        pool.driver->trim_graphs(pool.ordinal);
}

/* Bring the charge to what the driver keeps; true: something was given back. While it holds more than there is room for,
 * pools keep nothing that is unused: what was freed in a stream goes once the host has waited for that. */
static bool settle(struct limit_pool_record *record)
{
    uint64_t reserved, before = record->bytes;
    if (record->device < 0 || !reserved_of(record->pool, &reserved))
        return false;
    if (reserved > before && limit_take(record->device, reserved - before))
        before = reserved;
    if (reserved > before || limit_owes(record->device)) {
        trim(record->pool);
        reserved_of(record->pool, &reserved);
    }
    if (reserved > before)
        limit_owe(record->device, reserved - before);
    else
        limit_give(record->device, before - reserved);
    record->bytes = reserved;
    return reserved < before;
}

bool limit_settle_pools(const struct limit_driver *driver, struct limit_session *session)
{
    bool gave = false;
    pthread_mutex_lock(&session->pools);
    for (struct limit_pool_record *record = session->pool_list; record; record = record->next)
        gave = (record->pool.driver == driver && settle(record)) || gave;
    pthread_mutex_unlock(&session->pools);
    return gave;
}

void limit_pools_may_have_shrunk(const struct limit_driver *driver)
{
    struct limit_session *session = limit_session();
    unsigned looks = session ? atomic_load_explicit(&session->late_looks, memory_order_relaxed) : 0;
    if (looks == 0)
        return;
    atomic_store_explicit(&session->late_looks, looks - 1, memory_order_relaxed);
    limit_settle_pools(driver, session);
}

static void look_later(struct limit_session *session)
{
    atomic_store_explicit(&session->late_looks, LATE_LOOKS, memory_order_relaxed);
}

static uint64_t whole(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Charge growth by `size` bytes in use before it happens. */
static bool take_growth(struct limit_session *session, struct limit_pool pool, uint64_t size)
{
    struct limit_pool_record *record = know_pool(session, pool);
    uint64_t used;
    if (!record || record->device < 0)
        return record && record->device == LIMIT_NO_LIMIT;
    settle(record);
    if (size > far_too_much || !used_of(pool, &used))
        return false;
    uint64_t need = used + whole(size, 512), reserved = record->bytes;
    uint64_t growth = need > reserved ? whole(need - reserved, pool.driver->pool_step) : 0;
    if (!limit_take(record->device, growth))
        return false;
    record->bytes += growth;
    return true;
}

bool limit_pool_begin(struct limit_session *session, struct limit_pool pool, uint64_t size)
{
    for (int attempt = 0; attempt == 0 || (attempt == 1 && find_room(pool.driver)); attempt++) {
        pthread_mutex_lock(&session->pools);
        if (take_growth(session, pool, size))
            return true;
        pthread_mutex_unlock(&session->pools);
    }
    return false;
}

bool limit_pool_end(struct limit_session *session, struct limit_pool pool, bool allocated)
{
    struct limit_pool_record *record = find_pool(session, pool);
    uint64_t reserved;
    bool covered = true;
    if (record && record->device >= 0 && reserved_of(pool, &reserved)) {
        if (reserved < record->bytes)
            limit_give(record->device, record->bytes - reserved);
        else if (reserved > record->bytes)
            covered = limit_take(record->device, reserved - record->bytes);
        record->bytes = covered ? reserved : record->bytes;
    }
    if (!covered && !allocated)
        settle(record);
    pthread_mutex_unlock(&session->pools);
    if (!covered)
        look_later(session);
    return covered || !allocated;
}

void limit_pool_made(struct limit_pool pool, int device)
{
    struct limit_session *session = limit_session();
    if (!session)
        return;
    pthread_mutex_lock(&session->pools);
    struct limit_pool_record *record = find_pool(session, pool);
    record = record ? record : add_pool(session, pool, device);
    if (record && record->device != device) { /* of one that is gone */
        limit_give(record->device, record->bytes);
        *record = (struct limit_pool_record){.pool = pool, .device = device, .next = record->next};
    }
    pthread_mutex_unlock(&session->pools);
}

int limit_pool_ordinal(struct limit_session *session, const struct limit_driver *driver, void *handle)
{
    pthread_mutex_lock(&session->pools);
    struct limit_pool_record *record = find_pool(session, (struct limit_pool){.driver = driver, .handle = handle});
    int ordinal = record ? record->pool.ordinal : -1;
    pthread_mutex_unlock(&session->pools);
    return ordinal;
}

void limit_pool_gone(struct limit_session *session, const struct limit_driver *driver, void *handle)
{
    struct limit_pool_record *gone = find_pool(session, (struct limit_pool){.driver = driver, .handle = handle});
    struct limit_pool_record **place = &session->pool_list;
    if (!gone)
        return;
    while (*place != gone)
        place = &(*place)->next;
    *place = gone->next;
    limit_give(gone->device, gone->bytes);
    free(gone);
}

void limit_freed(const struct limit_driver *driver, struct limit_session *session, const struct limit_entry *entry)
{
    if (entry->spilled)
        atomic_fetch_sub(&session->spills, 1);
    if (entry->link == 0) {
        limit_driver_give(driver, entry);
        return;
    }
    struct limit_pool pool = {.driver = driver, .handle = (void *)(uintptr_t)entry->link};
    pthread_mutex_lock(&session->pools);
    struct limit_pool_record *record = find_pool(session, pool);
    if (record)
        settle(record);
    pthread_mutex_unlock(&session->pools);
    look_later(session);
}

/* ---- graphs ---- */

/* What a graph's allocation nodes ask for, by ordinal. */
struct graph_memory {
    uint64_t bytes[LIMIT_ORDINALS];
};

/* Adds what the nodes of a graph, and of graphs within it, ask for; *memory is made when there is any. */
static void add_memory(const struct limit_driver *driver, void *graph, unsigned depth, struct graph_memory **memory)
{
    enum { DEEPEST = 16 };
    size_t count = 0;
    void **nodes = NULL;
    if (depth > DEEPEST || !driver->graph_nodes(graph, NULL, &count) || count == 0 ||
        !(nodes = calloc(count, sizeof *nodes)) || !driver->graph_nodes(graph, nodes, &count))
        count = 0;
    for (size_t i = 0; i < count; i++) {
        int ordinal;
        uint64_t bytes;
        void *child;
        if (driver->node_graph(nodes[i], &child))
            add_memory(driver, child, depth + 1, memory);
        if (!driver->node_memory(nodes[i], &ordinal, &bytes) || ordinal < 0 || ordinal >= LIMIT_ORDINALS)
            continue;
        *memory = *memory ? *memory : calloc(1, sizeof **memory);
        if (*memory)
            (*memory)->bytes[ordinal] += (bytes + 511) / 512 * 512;
    }
    free(nodes);
}

void limit_graph_made(const struct limit_driver *driver, void *graph, void *executable)
{
    struct limit_session *session = limit_session();
    struct graph_memory *memory = NULL;
    if (session)
        add_memory(driver, graph, 0, &memory);
    if (!memory)
        return;
    struct limit_entry entry = {.link = (uint64_t)(uintptr_t)memory};
    limit_remember(&entry, LIMIT_GRAPH, (uint64_t)(uintptr_t)executable);
    atomic_fetch_add(&session->graphs, 1);
}

/* The lock `pools` is held. A graph that is launched again has its memory still. Not so if another ran since, or memory
 * of graphs was freed: what is reserved may be in use by others. */
static bool take_graph(struct limit_session *session, const struct limit_driver *driver,
                       const struct limit_entry *entry)
{
    const struct graph_memory *memory = (struct graph_memory *)(uintptr_t)entry->link;
    for (int i = 0; i < LIMIT_ORDINALS; i++) {
        struct limit_pool pool = {.driver = driver, .ordinal = i};
        uint64_t reserved, bytes = memory->bytes[i];
        bool again = session->last_graph == entry->key;
        bool has = bytes == 0 || (again && reserved_of(pool, &reserved) && reserved >= bytes) ||
                   take_growth(session, pool, bytes);
        if (!has)
            return false;
    }
    return true;
}

static void settle_graph(struct limit_session *session, const struct limit_driver *driver,
                         const struct limit_entry *entry)
{
    const struct graph_memory *memory = (struct graph_memory *)(uintptr_t)entry->link;
    for (int i = 0; i < LIMIT_ORDINALS; i++) {
        struct limit_pool pool = {.driver = driver, .ordinal = i};
        struct limit_pool_record *record = memory->bytes[i] > 0 ? know_pool(session, pool) : NULL;
        if (record)
            settle(record);
    }
}

enum limit_launch limit_graph_begin(const struct limit_driver *driver, void *executable, struct limit_entry *entry)
{
    struct limit_session *session = limit_program_session();
    if (!session || atomic_load_explicit(&session->graphs, memory_order_relaxed) == 0 ||
        !limit_table_get(&session->table, LIMIT_GRAPH, (uint64_t)(uintptr_t)executable, entry))
        return LIMIT_PLAIN;
    for (int attempt = 0; attempt == 0 || (attempt == 1 && find_room(driver)); attempt++) {
        pthread_mutex_lock(&session->pools);
        if (take_graph(session, driver, entry))
            return LIMIT_CHARGED;
        settle_graph(session, driver, entry);
        pthread_mutex_unlock(&session->pools);
    }
    return LIMIT_REFUSED;
}

void limit_graph_end(const struct limit_driver *driver, struct limit_entry *entry, bool launched)
{
    struct limit_session *session = limit_session();
    if (launched)
        session->last_graph = entry->key;
    settle_graph(session, driver, entry);
    pthread_mutex_unlock(&session->pools);
    look_later(session);
}

bool limit_graph_take(struct limit_session *session, void *executable, struct limit_entry *entry)
{
    return limit_table_take(&session->table, LIMIT_GRAPH, (uint64_t)(uintptr_t)executable, entry);
}

void limit_graph_memory_freed(const struct limit_driver *driver, struct limit_session *session)
{
    pthread_mutex_lock(&session->pools);
    session->last_graph = 0;
    pthread_mutex_unlock(&session->pools);
    limit_settle_pools(driver, session);
}

void limit_graph_destroyed(struct limit_session *session, struct limit_entry *entry, bool destroyed)
{
    pthread_mutex_lock(&session->pools);
    if (destroyed && session->last_graph == entry->key)
        session->last_graph = 0; /* the next graph may get its address */
    pthread_mutex_unlock(&session->pools);
    if (destroyed)
        free((void *)(uintptr_t)entry->link);
    else
        limit_table_put(&session->table, entry);
}

/* ---- virtual memory ---- */

struct physical {
    int device; /* of the ledger */
    uint64_t bytes;
    uint64_t handles, mappings;
    bool pinned;
    bool imported;         /* another process's, and charged to it */
    int file;              /* the last file that it was exported to or came from, which keeps it, too; -1: none */
    dev_t dev;             /* that file ... */
    ino_t ino;             /* ... as long as the number is still its */
    struct physical *next; /* of those that only their file keeps */
};

static bool file_is_open(const struct physical *it)
{
    struct stat stamp;
    return it->file >= 0 && fstat(it->file, &stamp) == 0 && stamp.st_dev == it->dev && stamp.st_ino == it->ino;
}

/* Give back what nothing keeps; true: done. */
static bool settle_physical(struct limit_session *session, struct physical *it)
{
    if (it->handles > 0 || it->mappings > 0 || it->pinned)
        return false;
    if (file_is_open(it)) {
        it->next = session->in_files;
        session->in_files = it;
        return false;
    }
    if (it->imported)
        limit_import_ended(session);
    else
        limit_give(it->device, it->bytes);
    free(it);
    return true;
}

/* Memory whose exported files have been closed since. */
static bool settle_files(struct limit_session *session)
{
    bool gave = false;
    struct physical *list = session->in_files;
    session->in_files = NULL;
    for (struct physical *it = list, *next; it; it = next) {
        next = it->next;
        gave = settle_physical(session, it) || gave;
    }
    return gave;
}

static struct physical *physical_of(const struct limit_entry *entry)
{
    return (struct physical *)(uintptr_t)entry->link;
}

static struct physical *find_physical(struct limit_session *session, uint64_t handle)
{
    struct limit_entry entry;
    return limit_table_get(&session->table, LIMIT_PHYSICAL, handle, &entry) ? physical_of(&entry) : NULL;
}

void limit_physical_made(const struct limit_entry *charge, uint64_t handle)
{
    struct physical *it = malloc(sizeof *it);
    if (!it)
        return; /* it stays charged */
    *it = (struct physical){.device = charge->device, .bytes = charge->bytes, .handles = 1, .file = -1};
    limit_remember(&(struct limit_entry){.size = 1, .link = (uint64_t)(uintptr_t)it}, LIMIT_PHYSICAL, handle);
}

static void keep_file(struct physical *it, int file)
{
    struct stat stamp;
    if (it && file >= 0 && fstat(file, &stamp) == 0) {
        it->file = file;
        it->dev = stamp.st_dev;
        it->ino = stamp.st_ino;
    }
}

void limit_physical_imported(struct limit_session *session, uint64_t handle, int file)
{
    struct physical *it = find_physical(session, handle);
    struct limit_entry entry;
    if (it) { /* the driver knew it, and gave one more of the same handle */
        limit_table_take(&session->table, LIMIT_PHYSICAL, handle, &entry);
        entry.size++;
        it->handles++;
        limit_table_put(&session->table, &entry);
    } else if ((it = malloc(sizeof *it)) != NULL) {
        *it = (struct physical){.device = LIMIT_NO_LIMIT, .handles = 1, .file = -1, .imported = true};
        limit_remember(&(struct limit_entry){.size = 1, .link = (uint64_t)(uintptr_t)it}, LIMIT_PHYSICAL, handle);
        limit_imported(session);
    }
    keep_file(it, file);
}

void limit_physical_released(struct limit_session *session, uint64_t handle)
{
    struct limit_entry entry;
    if (!limit_table_take(&session->table, LIMIT_PHYSICAL, handle, &entry))
        return;
    if (--entry.size > 0)
        limit_table_put(&session->table, &entry);
    physical_of(&entry)->handles--;
    settle_files(session);
    settle_physical(session, physical_of(&entry));
}

void limit_physical_exported(struct limit_session *session, uint64_t handle, int file)
{
    struct physical *it = find_physical(session, handle);
    limit_exported(session);
    if (it && file < 0)
        it->pinned = true;
    keep_file(it, file);
}

void limit_physical_pinned(struct limit_session *session, uint64_t handle)
{
    struct physical *it = find_physical(session, handle);
    if (it)
        it->pinned = true;
}

void limit_mapped(struct limit_session *session, uint64_t address, uint64_t size, uint64_t handle)
{
    struct physical *it = find_physical(session, handle);
    if (!it)
        return;
    it->mappings++;
    limit_remember(&(struct limit_entry){.size = size, .link = (uint64_t)(uintptr_t)it}, LIMIT_MAPPING, address);
}

struct range {
    uint64_t start, size;
};

static bool starts_within(const struct limit_entry *entry, const void *argument)
{
    const struct range *range = argument;
    return entry->class == LIMIT_MAPPING && entry->key >= range->start && entry->key - range->start < range->size;
}

static bool reaches(const struct limit_entry *entry, const void *argument)
{
    const uint64_t *address = argument;
    return entry->class == LIMIT_MAPPING && *address >= entry->key && *address - entry->key < entry->size;
}

void limit_unmapped(struct limit_session *session, uint64_t address, uint64_t size)
{
    struct range range = {.start = address, .size = size};
    struct limit_entry entry;
    while (range.size > 0 && (limit_table_take(&session->table, LIMIT_MAPPING, range.start, &entry) || /* one by one */
                              limit_table_take_any(&session->table, starts_within, &range, &entry))) {
        physical_of(&entry)->mappings--;
        settle_physical(session, physical_of(&entry));
        uint64_t done = entry.key == range.start ? entry.size : 0;
        range.start += done;
        range.size -= done < range.size ? done : range.size;
    }
}

void limit_physical_retained(struct limit_session *session, uint64_t address, uint64_t handle)
{
    struct limit_entry mapping, entry;
    if (!limit_table_find(&session->table, reaches, &address, &mapping))
        return;
    if (!limit_table_take(&session->table, LIMIT_PHYSICAL, handle, &entry))
        entry = (struct limit_entry){.link = mapping.link};
    entry.size++;
    physical_of(&mapping)->handles++;
    limit_remember(&entry, LIMIT_PHYSICAL, handle);
}
