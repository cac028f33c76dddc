/* SPDX-License-Identifier: Apache-2.0 */
/* Nodes that are asked about, and drain reasons that may be orders to empty a node, of any content. */
#include "planner/emptying.h"

#include "fuzz/checksummed.h"

static void try_asks(const char *data, size_t length)
{
    struct sluice_empty_asks *asks = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_empty_asks_parse(data, length, &asks, &text);
    require((error == SLUICE_OK) == (asks != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    for (uint32_t i = 0; asks && i < asks->listed.count; i++) {
        const struct sluice_empty_ask *ask = &asks->items[i];
        require(ask->node[0] && memchr(ask->node, '\0', sizeof(ask->node)) && ask->until_s >= 0 &&
                ask->deadline_s >= 0);
        require(!i || strcmp(asks->items[i - 1].node, ask->node) < 0);
    }
    sluice_listed_release((struct sluice_listed *)asks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *reason = malloc(size + 1);
    int64_t deadline_s = -1;
    require(reason != NULL);
    memcpy(reason, data, size);
    reason[size] = '\0';
    (void)sluice_empty_ordered(reason, &deadline_s);
    require(deadline_s >= 0 && deadline_s < INT64_C(10000000000000)); /* thirteen digits are read again */
    free(reason);
    return try_both("sluice-empty", "1", data, size, try_asks);
}
