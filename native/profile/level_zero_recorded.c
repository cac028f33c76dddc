/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A command list that is recorded while nothing is collected has no events of ours, and a closed one takes none any more:
 * what it runs in a later profile has no times, and is counted. Nothing in the driver says what is in a list, so it is
 * counted when it is appended, from the program's start.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "level_zero.h"
#include "level_zero_tables.h"

struct recorded {
    struct ze_known known;
    _Atomic uint64_t without[ZE_RECORDED_KINDS];
};

static struct {
    pthread_rwlock_t lock; /* written when lists come and go */
    struct ze_table lists;
    _Atomic uint64_t unseen;
} all = {.lock = PTHREAD_RWLOCK_INITIALIZER};

void ze_recorded_made(ze_handle list)
{
    pthread_rwlock_wrlock(&all.lock);
    ze_table_remove(&all.lists, list); /* of one that ended with its context */
    ze_table_add(&all.lists, list, sizeof(struct recorded));
    pthread_rwlock_unlock(&all.lock);
}

void ze_recorded_gone(ze_handle list)
{
    pthread_rwlock_wrlock(&all.lock);
    ze_table_remove(&all.lists, list);
    pthread_rwlock_unlock(&all.lock);
}

void ze_recorded_reset(ze_handle list)
{
    pthread_rwlock_rdlock(&all.lock);
    struct recorded *found = ze_table_find(&all.lists, list);
    for (unsigned kind = 0; found != NULL && kind < ZE_RECORDED_KINDS; kind++) {
        found->without[kind] = 0;
    }
    pthread_rwlock_unlock(&all.lock);
}

void ze_recorded_append(ze_handle list, enum ze_recorded kind)
{
    pthread_rwlock_rdlock(&all.lock);
    struct recorded *found = ze_table_find(&all.lists, list);
    if (found != NULL) {
        found->without[kind]++;
    }
    pthread_rwlock_unlock(&all.lock);
}

void ze_recorded_execute(uint32_t count, const ze_handle *lists, unsigned kinds)
{
    pthread_rwlock_rdlock(&all.lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct recorded *found = ze_table_find(&all.lists, lists[i]);
        for (unsigned kind = 0; found != NULL && kind < ZE_RECORDED_KINDS; kind++) {
            all.unseen += (kinds >> kind & 1) != 0 ? found->without[kind] : 0;
        }
    }
    pthread_rwlock_unlock(&all.lock);
}

uint64_t ze_recorded_unseen(void)
{
    return atomic_exchange(&all.unseen, 0);
}
