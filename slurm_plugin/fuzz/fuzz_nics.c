/* SPDX-License-Identifier: Apache-2.0 */
/* Which NICs are near which GPUs, of any content: as it comes, and with the right checksum put under it. */
#include "runtime/nics.h"

#include "fuzz/checksummed.h"

/* Is what is known of the node that a line begins with, if anything, what the core takes? */
static void look(const struct sluice_nics *nics, const char *line, size_t length)
{
    char name[SLUICE_NICS_MAX_NAME + 1] = "";
    const char *blank = memchr(line, ' ', length);
    if (!blank || blank - line > SLUICE_NICS_MAX_NAME)
        return;
    memcpy(name, line, (size_t)(blank - line));
    const struct sluice_nic_groups *groups = sluice_nics_of(nics, name);
    if (!groups)
        return;
    require(groups->gpu_count >= 1 && groups->gpu_count <= SLUICE_MAX_GPUS);
    require(groups->nic_count >= 1 && groups->nic_count <= SLUICE_MAX_NICS);
    for (uint32_t i = 0; i < groups->gpu_count; i++)
        require(groups->gpu_group[i] < SLUICE_MAX_NIC_GROUPS);
    for (uint32_t i = 0; i < groups->nic_count; i++)
        require(groups->nic_group[i] < SLUICE_MAX_NIC_GROUPS && groups->nic_plane[i] <= SLUICE_MAX_NIC_PLANES);
}

static void try(const char *data, size_t length)
{
    struct sluice_nics *nics = NULL;
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_nics_parse(data, length, &nics, &text);
    require((error == SLUICE_OK) == (nics != NULL));
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL);
    for (size_t i = 0; nics && i < length; i++)
        if (!i || data[i - 1] == '\n')
            look(nics, data + i, length - i);
    sluice_nics_free(nics);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-nics", "1", data, size, try);
}
