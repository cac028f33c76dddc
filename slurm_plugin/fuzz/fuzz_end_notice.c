/* SPDX-License-Identifier: Apache-2.0 */
/* What a node tells of a job's end, of any content: as it comes, and behind a good beginning. */
#include "journal/told.h"

#include <stdlib.h>
#include <string.h>

static void try(const char *text)
{
    struct sluice_told told;
    memset(&told, 'x', sizeof told);
    bool good = sluice_told_read(text, &told);
    if (good && (!sluice_told_is(text) || !told.job || told.status > UINT16_MAX || !told.node[0] ||
                 !memchr(told.node, '\0', sizeof told.node)))
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
