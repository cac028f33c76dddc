/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Replay of the failover journal: its outcome, for the log, for replays.jsonl and for the status. */
#include "failover/replay_internal_slurm.h"

#include "runtime/runtime.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

enum { REPORT_BYTES = 1 << 20, TEXT = 512 };
static const char *const outcome_names[] = {"resubmitted", "restored", "ended", "requeued", "unsettled"};

void sluice_failover_note(enum outcome outcome, uint32_t job_id)
{
    xstrfmtcat(sluice_replay.list[outcome], "%s%u", sluice_replay.list[outcome] ? "," : "", job_id);
    sluice_replay.counts[outcome]++;
}

/* Text for JSON: what could end a string, or is no plain character, is left out. */
static void plain(char *text)
{
    for (; *text; text++)
        if (*text == '"' || *text == '\\' || (unsigned char)*text < ' ' || (unsigned char)*text > '~')
            *text = ' ';
}

void sluice_failover_unsettled(uint32_t job_id, const char *format, ...)
{
    char text[TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error("sluice: failover journal: JobId=%u: %s", job_id, text);
    plain(text);
    xstrfmtcat(sluice_replay.list[UNSETTLED], "%s{\"job\":%u,\"why\":\"%s\"}", sluice_replay.list[UNSETTLED] ? "," : "",
               job_id, text);
    sluice_replay.counts[UNSETTLED]++;
}

void sluice_failover_report(void)
{
    char path[SLUICE_FAILOVER_PATH], old[SLUICE_FAILOVER_PATH + 8],
        host[256] = "", problem[sizeof sluice_replay.found.problem], *text = NULL;
    (void)gethostname(host, sizeof host - 1);
    snprintf(problem, sizeof problem, "%s", sluice_replay.found.problem);
    plain(problem);
    plain(host);
    xstrfmtcat(text,
               "{\"schema_version\":1,\"at\":%" PRId64 ",\"controller\":\"%s\",\"state_saved\":%" PRId64
               ",\"records\":%" PRIu64 ",\"jobs\":%u,\"torn_bytes\":%" PRIu64 ",\"lost_bytes\":%" PRIu64
               ",\"late_bytes\":%" PRIu64 ",\"problem\":\"%s\"",
               (int64_t)time(NULL), host, sluice_replay.covered_us / 1000000, sluice_replay.found.entries,
               sluice_replay.jobs, sluice_replay.found.torn_bytes, sluice_replay.found.lost_bytes,
               sluice_replay.found.late_bytes, problem);
    for (int i = 0; i < OUTCOMES; i++)
        xstrfmtcat(text, ",\"%s\":[%s]", outcome_names[i], sluice_replay.list[i] ? sluice_replay.list[i] : "");
    xstrcat(text, "}\n");
    snprintf(path, sizeof path, "%s/replays.jsonl", sluice_failover_folder());
    snprintf(old, sizeof old, "%s.1", path);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    struct stat facts;
    bool wrote = file >= 0 && fstat(file, &facts) == 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text) &&
                 fsync(file) == 0;
    if (!wrote)
        error("sluice: failover journal: %s: %m; the report is: %s", path, text);
    else if (facts.st_size > REPORT_BYTES)
        (void)rename(path, old);
    if (file >= 0)
        close(file);
    xfree(text);
    for (int i = 0; i < OUTCOMES; i++) {
        char name[64];
        snprintf(name, sizeof name, "journal.replay_%s", outcome_names[i]);
        atomic_store(sluice_status_counter(name), sluice_replay.counts[i]);
    }
}
