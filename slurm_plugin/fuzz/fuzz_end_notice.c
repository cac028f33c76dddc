/* SPDX-License-Identifier: Apache-2.0 */
/* A node's notice of a job's end, of any content: as it is, and after a good beginning. */
#include "failover/end_notice.h"

#include <stdlib.h>
#include <string.h>

static void try(const char *text)
{
    struct sluice_end_notice notice;
    memset(&notice, 'x', sizeof notice);
    bool good = sluice_end_notice_parse(text, &notice);
    if (good && (!sluice_is_end_notice(text) || !notice.job || notice.status > UINT16_MAX || !notice.node[0] ||
                 !memchr(notice.node, '\0', sizeof notice.node)))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const heads[] = {"", "sluice-ended ", "sluice-ended 1 42 0 1000 256 1700000000 "};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        size_t head = strlen(heads[i]);
        char *text = malloc(head + size + 1);
        if (!text)
            abort();
        memcpy(text, heads[i], head);
        memcpy(text + head, data, size);
        text[head + size] = '\0';
        try(text);
        free(text);
    }
    return 0;
}
