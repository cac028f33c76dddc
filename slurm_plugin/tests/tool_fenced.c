/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that is fenced as slurmctld is, for tests of the supervisor: tool_fenced FOLDER [lead]. Commands are
 * signals: USR1: lead (as a backup that takes over); USR2: be a backup again; TERM: end with 3. While it holds the
 * lease it appends its pid and the time to FOLDER/written every 10 ms, which two at the same time must never do.
 */
#include "failover/fence.h"
#include "supervisor/supervisor.h"

#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t lead, back, over;

static void on_signal(int number)
{
    if (number == SIGUSR1)
        lead = 1;
    else if (number == SIGUSR2)
        back = 1;
    else
        over = 1;
}

static bool relinquished(void)
{
    bool now = back;
    back = 0;
    return now;
}

int main(int argc, char **argv)
{
    char path[4096];
    if (argc < 2)
        return 2;
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    signal(SIGTERM, on_signal);
    snprintf(path, sizeof(path), "%s/written", argv[1]);
    if (!sluice_fence_start(argv[1], 10, relinquished))
        return 4;
    lead = argc > 2;
    bool led = false;
    while (!over) {
        if (lead) {
            lead = 0;
            sluice_fence_lead();
            led = true;
        }
        if (led && sluice_fence_holds()) {
            char line[64];
            int length = snprintf(line, sizeof(line), "%d %" PRId64 " %" PRIu64 "\n", (int)getpid(),
                                  sluice_boottime_ns(), sluice_fence_epoch());
            int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
            if (file < 0 || write(file, line, (size_t)length) != length)
                return 5;
            close(file);
        }
        usleep(10000);
    }
    sluice_fence_stop();
    return 3;
}
