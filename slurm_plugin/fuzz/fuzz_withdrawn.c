/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of GPUs out of service, of any content: as they come, and with the right checksum put under them. */
#include "runtime/withdrawn.h"

#include "fuzz/checksummed.h"

static void try(const char *data, size_t length)
{
    struct sluice_withdrawn *list = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_withdrawn_parse(data, length, &list, &text);
    require((error == SLUICE_OK) == (list != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    for (uint32_t i = 0; list && i < list->listed.count; i++) {
        require(list->gpus[i].gpu <= SLUICE_WITHDRAWN_MAX_GPU && list->gpus[i].node[0]);
        require(!i || strcmp(list->gpus[i - 1].node, list->gpus[i].node) < 0 ||
                (!strcmp(list->gpus[i - 1].node, list->gpus[i].node) && list->gpus[i - 1].gpu < list->gpus[i].gpu));
    }
    sluice_withdrawn_release(list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-withdrawn", "1", data, size, try);
}
