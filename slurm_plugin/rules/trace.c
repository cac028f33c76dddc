/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { TRACE_AT = 3, TRACE_DIGITS = 32, SPAN_AT = 36, SPAN_DIGITS = 16, FLAGS_AT = 53, LENGTH = 55 };

/* Lower case only, as the grammar has it. */
static bool is_hex(const char *text, size_t count)
{
    for (size_t i = 0; i < count; i++) /* no further: who sent it may have sent megabytes */
        if (!text[i] || !strchr("0123456789abcdef", text[i]))
            return false;
    return true;
}

static bool is_id(const char *text, size_t count)
{
    return is_hex(text, count) && strspn(text, "0") < count;
}

bool sluice_trace_parse(const char *text, char parent[SLUICE_TRACE_SIZE])
{
    if (!text || memchr(text, '\0', LENGTH) || text[2] != '-' || text[SPAN_AT - 1] != '-' || text[FLAGS_AT - 1] != '-')
        return false;
    if (!is_hex(text, 2) || !is_id(text + TRACE_AT, TRACE_DIGITS) || !is_id(text + SPAN_AT, SPAN_DIGITS) ||
        !is_hex(text + FLAGS_AT, 2))
        return false;
    const bool first_version = strncmp(text, "00", 2) == 0;
    if (strncmp(text, "ff", 2) == 0 || (text[LENGTH] && (first_version || text[LENGTH] != '-')))
        return false;
    memcpy(parent, text, LENGTH);
    memcpy(parent, "00", 2);
    parent[FLAGS_AT] = '0';
    parent[FLAGS_AT + 1] = strchr("13579bdf", text[FLAGS_AT + 1]) ? '1' : '0';
    parent[LENGTH] = '\0';
    return true;
}

void sluice_trace_begin(const unsigned char random[SLUICE_TRACE_RANDOM], char parent[SLUICE_TRACE_SIZE])
{
    char trace[TRACE_DIGITS + 1];
    for (size_t i = 0; i < SLUICE_TRACE_RANDOM; i++)
        snprintf(trace + 2 * i, 3, "%02x", (unsigned)(random[i] | (i == 0))); /* no ID may be 0 */
    snprintf(parent, SLUICE_TRACE_SIZE, "00-%s-%.16s-01", trace, trace);
}

bool sluice_trace_is_time(const char *text)
{
    const size_t digits = SLUICE_TRACE_TIME_SIZE - 1;
    return text && memchr(text, '\0', SLUICE_TRACE_TIME_SIZE) == text + digits && text[0] != '0' &&
           strspn(text, "0123456789") == digits;
}

void sluice_trace_comment(const char *parent, int64_t arrived_us, uint64_t took_us, const char *began,
                          char comment[SLUICE_TRACE_COMMENT_SIZE])
{
    snprintf(comment, SLUICE_TRACE_COMMENT_SIZE, SLUICE_TRACE_WORD "%.55s submitted:%016" PRId64 ",%" PRIu64 "%s%.16s",
             parent, arrived_us, took_us < 999999999 ? took_us : 999999999, began ? "," : "", began ? began : "");
}

/* FNV-1a, and MurmurHash3's last steps so that texts that differ in one digit differ in all bits. */
static uint64_t hash(const char *text)
{
    uint64_t value = UINT64_C(0xcbf29ce484222325);
    for (; *text; text++)
        value = (value ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    value = (value ^ value >> 33) * UINT64_C(0xff51afd7ed558ccd);
    value = (value ^ value >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    value ^= value >> 33;
    return value ? value : 1;
}

void sluice_trace_of_job(const char *parent, const char *cluster, uint32_t job, char own[SLUICE_TRACE_SIZE])
{
    char text[128];
    snprintf(text, sizeof text, "%.40s %.32s %" PRIu32 " job", cluster, parent + TRACE_AT, job);
    snprintf(own, SLUICE_TRACE_SIZE, "00-%.32s-%016" PRIx64 "-%.2s", parent + TRACE_AT, hash(text), parent + FLAGS_AT);
}
