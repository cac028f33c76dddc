/* SPDX-License-Identifier: Apache-2.0 */
#include "notify.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    int socket; /* 0: none */
    struct sockaddr_un address;
    socklen_t size;
    int64_t period, due; /* milliseconds; period 0: no WatchdogSec= */
    int64_t extend;      /* when the start is extended next */
} notify;

static int64_t watchdog_period(void)
{
    const char *microseconds = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    if (!microseconds || (pid && strtol(pid, NULL, 10) != getpid()))
        return 0;
    return strtoll(microseconds, NULL, 10) / 4000;
}

void guard_notify_open(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    size_t length = path ? strlen(path) : 0;
    if (length > 1 && length < sizeof notify.address.sun_path && (path[0] == '/' || path[0] == '@')) {
        notify.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        notify.address.sun_family = AF_UNIX;
        memcpy(notify.address.sun_path, path, length);
        if (path[0] == '@') /* an abstract socket */
            notify.address.sun_path[0] = 0;
        notify.size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
        notify.period = watchdog_period();
    }
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

bool guard_notify(const char *state)
{
    return notify.socket <= 0 || sendto(notify.socket, state, strlen(state), MSG_NOSIGNAL,
                                        (const struct sockaddr *)&notify.address, notify.size) >= 0;
}

void guard_notify_start_lasts(int64_t now)
{
    enum { EVERY_MS = 15000 };
    if (notify.socket > 0 && now >= notify.extend && guard_notify("EXTEND_TIMEOUT_USEC=60000000"))
        notify.extend = now + EVERY_MS;
}

void guard_notify_alive(int64_t now)
{
    if (notify.period > 0 && now >= notify.due) {
        notify.due = now + notify.period;
        guard_notify("WATCHDOG=1");
    }
}
