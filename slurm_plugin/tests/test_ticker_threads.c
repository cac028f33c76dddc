/* SPDX-License-Identifier: Apache-2.0 */
/* Functions come and go while the thread runs; also under ThreadSanitizer. */
#include "runtime/ticker.h"

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static void nap(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void count(void *argument)
{
    atomic_fetch_add((atomic_int *)argument, 1);
}

static void wait_for(atomic_int *counter, int most_ms)
{
    for (int i = 0; atomic_load(counter) == 0; i++) {
        CHECK(i < most_ms);
        nap(1);
    }
}

static void test_one(void)
{
    atomic_int calls = 0, slow = 0;
    struct sluice_tick *tick = sluice_ticker_add("test", 10, count, &calls);
    struct sluice_tick *never = sluice_ticker_add("a name that is longer than a thread's", 3600000, count, &slow);
    CHECK(tick && never);
    wait_for(&calls, 5000);
    sluice_ticker_remove(tick);
    int at_end = atomic_load(&calls);
    nap(40);
    CHECK_INT(atomic_load(&calls), at_end);
    CHECK_INT(atomic_load(&slow), 0);
    sluice_ticker_wake(never);
    wait_for(&slow, 5000);
    sluice_ticker_remove(never);
    sluice_ticker_remove(NULL);
}

/* A removed function has ended: what it uses may go. */
static void use(void *argument)
{
    int *users = argument;
    (*users)++;
    nap(2);
    (*users)--;
    CHECK_INT(*users, 0);
}

static void *come_and_go(void *unused)
{
    (void)unused;
    for (int i = 0; i < 20; i++) {
        int *users = calloc(1, sizeof(*users));
        CHECK(users);
        struct sluice_tick *tick = sluice_ticker_add("use", 10, use, users);
        CHECK(tick);
        sluice_ticker_wake(tick);
        nap(i % 4);
        sluice_ticker_remove(tick);
        free(users);
    }
    return NULL;
}

int main(void)
{
    test_one();
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, come_and_go, NULL) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    test_one(); /* the thread is started again */
    return 0;
}
