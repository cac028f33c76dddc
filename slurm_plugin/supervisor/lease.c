/* SPDX-License-Identifier: Apache-2.0 */
#include "supervisor/lease.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LEASE_FILE "sluice.lease"
enum { CLAIMS_KEPT = 16 };
enum { FILE_NAME = sizeof(LEASE_FILE) + SLUICE_LEASE_NAME + 32 };

/* ---- text ---- */

size_t sluice_lease_format(const struct sluice_lease *lease, char *text, size_t size)
{
    int length =
        snprintf(text, size,
                 "sluice-lease 1\nepoch %" PRIu64 "\nseq %" PRIu64 "\nstate %s\nhost %s\nboot-id %s\nvalid-ms %" PRIu64
                 "\nboottime-ms %" PRIu64 "\ntime %" PRIu64 "\n",
                 lease->epoch, lease->seq, lease->held ? "held" : "free", lease->host, lease->boot, lease->valid_ms,
                 lease->boottime_ms, lease->time_s);
    return length > 0 && (size_t)length < size ? (size_t)length : 0;
}

/* What follows `key` and a space, up to the line's end, which is passed; NULL when the next line is another. */
static const char *take(const char **at, const char *end, const char *key, size_t *length)
{
    size_t key_length = strlen(key);
    const char *stop = memchr(*at, '\n', (size_t)(end - *at));
    if (!stop || (size_t)(stop - *at) <= key_length || memcmp(*at, key, key_length) != 0 || (*at)[key_length] != ' ')
        return NULL;
    const char *value = *at + key_length + 1;
    *length = (size_t)(stop - value);
    *at = stop + 1;
    return value;
}

static bool take_number(const char **at, const char *end, const char *key, uint64_t *number)
{
    size_t length = 0;
    const char *value = take(at, end, key, &length);
    if (!value || length == 0 || length > 18 || (length > 1 && value[0] == '0'))
        return false;
    *number = 0;
    for (size_t i = 0; i < length; i++) {
        if (value[i] < '0' || value[i] > '9')
            return false;
        *number = *number * 10 + (uint64_t)(value[i] - '0');
    }
    return true;
}

static bool is_name(const char *value, size_t length, size_t size)
{
    if (length == 0 || length >= size || value[0] == '.')
        return false;
    for (size_t i = 0; i < length; i++) {
        char byte = value[i];
        if (!((byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || (byte >= '0' && byte <= '9') ||
              byte == '.' || byte == '-' || byte == '_'))
            return false;
    }
    return true;
}

static bool take_name(const char **at, const char *end, const char *key, char *name, size_t size)
{
    size_t length = 0;
    const char *value = take(at, end, key, &length);
    if (!value || !is_name(value, length, size))
        return false;
    memcpy(name, value, length);
    name[length] = '\0';
    return true;
}

bool sluice_lease_parse(const char *text, size_t length, struct sluice_lease *lease)
{
    const char *at = text, *end = text + length;
    uint64_t version = 0;
    char state[8];
    bool good = take_number(&at, end, "sluice-lease", &version) && version == 1 &&
                take_number(&at, end, "epoch", &lease->epoch) && take_number(&at, end, "seq", &lease->seq) &&
                take_name(&at, end, "state", state, sizeof(state)) &&
                take_name(&at, end, "host", lease->host, sizeof(lease->host)) &&
                take_name(&at, end, "boot-id", lease->boot, sizeof(lease->boot)) &&
                take_number(&at, end, "valid-ms", &lease->valid_ms) &&
                take_number(&at, end, "boottime-ms", &lease->boottime_ms) &&
                take_number(&at, end, "time", &lease->time_s) && at == end;
    if (!good)
        return false;
    lease->held = strcmp(state, "held") == 0;
    return lease->held || strcmp(state, "free") == 0;
}

/* ---- watching ---- */

int64_t sluice_lease_stale_ns(int64_t valid_ns)
{
    return valid_ns + valid_ns / 2;
}

/* 1: read, 0: there is none, or it is damaged (`damaged`), -1: the folder fails. */
static int read_lease(int folder, struct sluice_lease *lease, bool *damaged)
{
    char text[SLUICE_LEASE_TEXT + 1];
    *damaged = false;
    int file = openat(folder, LEASE_FILE, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0)
        return errno == ENOENT ? 0 : -1;
    ssize_t length = read(file, text, sizeof(text));
    int failed = errno;
    close(file);
    if (length < 0) {
        errno = failed;
        return -1;
    }
    *damaged = !sluice_lease_parse(text, (size_t)length, lease);
    return *damaged ? 0 : 1;
}

bool sluice_lease_watch(struct sluice_lease_side *side)
{
    struct sluice_lease found;
    bool damaged = false;
    int rc = read_lease(side->folder, &found, &damaged);
    if (rc < 0)
        return false;
    int64_t now = side->now_ns();
    if (damaged && !side->damaged)
        side->seen_ns = now;
    side->damaged = damaged;
    if (rc == 0 || (side->any && found.epoch < side->seen.epoch))
        return true; /* of a holder that was paused, and has not noticed yet */
    if (!side->any || found.epoch != side->seen.epoch || found.seq != side->seen.seq || found.held != side->seen.held)
        side->seen_ns = now;
    side->seen = found;
    side->any = true;
    return true;
}

/* Whether no other controller can count the lease as its own. */
static bool is_free(const struct sluice_lease_side *side, int64_t now)
{
    bool stale = now - side->seen_ns > sluice_lease_stale_ns(side->valid_ns);
    if (side->damaged)
        return stale;
    if (!side->any || !side->seen.held)
        return true;
    if (strcmp(side->seen.host, side->host) == 0 && strcmp(side->seen.boot, side->boot) != 0)
        return true; /* this process was restarted since */
    int64_t theirs = (int64_t)(side->seen.valid_ms % 3600000) * 1000000;
    return stale && now - side->seen_ns > sluice_lease_stale_ns(theirs);
}

/* ---- holding ---- */

static bool write_lease(struct sluice_lease_side *side, bool held)
{
    struct sluice_lease lease = {.epoch = side->epoch,
                                 .seq = side->seq + 1,
                                 .held = held,
                                 .valid_ms = (uint64_t)(side->valid_ns / 1000000),
                                 .boottime_ms = (uint64_t)(side->now_ns() / 1000000),
                                 .time_s = (uint64_t)time(NULL)};
    memcpy(lease.host, side->host, sizeof(lease.host));
    memcpy(lease.boot, side->boot, sizeof(lease.boot));
    char text[SLUICE_LEASE_TEXT], fresh[FILE_NAME];
    size_t length = sluice_lease_format(&lease, text, sizeof(text));
    snprintf(fresh, sizeof(fresh), "." LEASE_FILE ".%s", side->host);
    int file = openat(side->folder, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file < 0)
        return false;
    bool good = write(file, text, length) == (ssize_t)length && fsync(file) == 0;
    int failed = errno;
    good = close(file) == 0 && good;
    if (good && renameat(side->folder, fresh, side->folder, LEASE_FILE) == 0) {
        side->seq++;
        side->seen = lease;
        side->any = true;
        side->damaged = false;
        side->seen_ns = side->now_ns();
        return true;
    }
    failed = failed ? failed : errno;
    unlinkat(side->folder, fresh, 0);
    errno = failed ? failed : EIO;
    return false;
}

static void claim_name(char *name, uint64_t epoch)
{
    snprintf(name, FILE_NAME, LEASE_FILE ".claim.%" PRIu64, epoch);
}

/* Only this process gets this epoch. */
static enum sluice_lease_answer claim(struct sluice_lease_side *side, uint64_t epoch)
{
    char name[FILE_NAME];
    claim_name(name, epoch);
    int file = openat(side->folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (file >= 0) {
        close(file);
        return SLUICE_LEASE_OURS;
    }
    if (errno != EEXIST)
        return SLUICE_LEASE_ERROR;
    int64_t now = side->now_ns();
    if (side->claimed != epoch) {
        side->claimed = epoch;
        side->claimed_ns = now;
    }
    return SLUICE_LEASE_WAIT;
}

static enum sluice_lease_answer take_it(struct sluice_lease_side *side, int64_t now)
{
    if (!is_free(side, now))
        return SLUICE_LEASE_WAIT;
    uint64_t epoch = (side->any ? side->seen.epoch : 0) + 1;
    /* A claimant that did not continue in the time that a holder has to renew has ended. */
    if (side->claimed >= epoch)
        epoch = side->claimed + (now - side->claimed_ns > sluice_lease_stale_ns(side->valid_ns) ? 1 : 0);
    enum sluice_lease_answer answer = claim(side, epoch);
    if (answer != SLUICE_LEASE_OURS)
        return answer;
    if (!sluice_lease_watch(side))
        return SLUICE_LEASE_ERROR; /* the claim stays, and is passed over in time */
    if (side->any && side->seen.epoch >= epoch)
        return SLUICE_LEASE_WAIT; /* the claim's file was cleared away long ago: we are very late */
    side->epoch = epoch;
    side->seq = 0;
    if (!write_lease(side, true))
        return SLUICE_LEASE_ERROR;
    side->holds = true;
    side->from_ns = now;
    if (epoch > CLAIMS_KEPT) {
        char old[FILE_NAME];
        claim_name(old, epoch - CLAIMS_KEPT);
        unlinkat(side->folder, old, 0);
    }
    return SLUICE_LEASE_OURS;
}

static enum sluice_lease_answer lose(struct sluice_lease_side *side)
{
    side->holds = false;
    return SLUICE_LEASE_LOST;
}

enum sluice_lease_answer sluice_lease_hold(struct sluice_lease_side *side)
{
    int64_t now = side->now_ns();
    if (side->holds && now - side->from_ns >= side->valid_ns)
        return lose(side);
    if (!sluice_lease_watch(side))
        return SLUICE_LEASE_ERROR;
    if (!side->holds)
        return take_it(side, now);
    if (side->seen.epoch > side->epoch)
        return lose(side);
    if (!write_lease(side, true))
        return SLUICE_LEASE_ERROR;
    if (side->now_ns() - side->from_ns >= side->valid_ns)
        return lose(side); /* the write took too long: a watcher could have taken it */
    side->from_ns = now;
    return SLUICE_LEASE_OURS;
}

enum sluice_lease_answer sluice_lease_release(struct sluice_lease_side *side)
{
    if (!side->holds)
        return SLUICE_LEASE_OURS;
    side->holds = false;
    if (!sluice_lease_watch(side))
        return SLUICE_LEASE_ERROR;
    if (side->seen.epoch > side->epoch)
        return SLUICE_LEASE_LOST;
    return write_lease(side, false) ? SLUICE_LEASE_OURS : SLUICE_LEASE_ERROR;
}
