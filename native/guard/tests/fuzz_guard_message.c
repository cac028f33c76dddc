/* SPDX-License-Identifier: Apache-2.0 */
/* Any packet: what is read as a message is within its bounds. */
#include "message.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size); /* so that a byte too far is seen */
    if (size && !text)
        abort();
    if (size)
        memcpy(text, data, size);
    struct guard_message message;
    if (guard_parse(text, size, &message) &&
        (size > GUARD_MESSAGE || message.vendor >= GUARD_VENDORS || message.vendors >> GUARD_VENDORS ||
         ((message.kind == GUARD_WATCH || message.kind == GUARD_FORGET) && message.job == 0) ||
         (message.kind == GUARD_WATCH && (!message.vendors || !guard_path_is_job(message.path)))))
        abort();
    free(text);
    return 0;
}
