/* SPDX-License-Identifier: Apache-2.0 */
/* The lease's file: what is understood is written again as it was read. */
#include "supervisor/lease.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct sluice_lease lease;
    char text[SLUICE_LEASE_TEXT];
    if (sluice_lease_parse((const char *)data, size, &lease) &&
        (sluice_lease_format(&lease, text, sizeof(text)) != size || memcmp(text, data, size) != 0))
        abort();
    return 0;
}
