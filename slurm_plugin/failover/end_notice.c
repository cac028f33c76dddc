/* SPDX-License-Identifier: Apache-2.0 */
#include "failover/end_notice.h"

#include <string.h>

static const char word[] = "sluice-ended ";

bool sluice_is_end_notice(const char *comment)
{
    return comment && strncmp(comment, word, sizeof word - 1) == 0;
}

/* A decimal number up to `most` and the space behind it. */
static bool take(const char **at, uint64_t most, uint64_t *value)
{
    const char *from = *at;
    *value = 0;
    for (; **at >= '0' && **at <= '9'; (*at)++) {
        *value = *value * 10 + (uint64_t)(**at - '0');
        if (*value > most)
            return false;
    }
    return *at > from && *(*at)++ == ' ';
}

bool sluice_end_notice_parse(const char *comment, struct sluice_end_notice *notice)
{
    uint64_t version, job, restarts, uid, status, ended;
    if (!sluice_is_end_notice(comment))
        return false;
    const char *at = comment + sizeof word - 1;
    if (!take(&at, 1, &version) || version != 1 || !take(&at, UINT32_MAX, &job) || !job ||
        !take(&at, UINT32_MAX, &restarts) || !take(&at, UINT32_MAX, &uid) || !take(&at, UINT16_MAX, &status) ||
        !take(&at, UINT32_MAX, &ended))
        return false;
    size_t length = strlen(at);
    if (!length || length >= sizeof notice->node ||
        strspn(at, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                   "0123456789-_.") != length)
        return false;
    notice->job = (uint32_t)job;
    notice->restarts = (uint32_t)restarts;
    notice->uid = (uint32_t)uid;
    notice->status = (uint32_t)status;
    notice->ended = (int64_t)ended;
    memcpy(notice->node, at, length + 1);
    return true;
}
