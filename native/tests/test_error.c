/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "error.h"

int main(void)
{
    for (int error = SLUICE_OK; error <= SLUICE_ERROR_SYSTEM; error++)
        CHECK(strcmp(sluice_strerror((enum sluice_error)error), "unknown error") != 0);
    CHECK_STR(sluice_strerror((enum sluice_error)9999), "unknown error");

    CHECK(strchr(sluice_core_version(), '.') != NULL);

    struct sluice_error_text text;
    CHECK_INT(sluice_fail(&text, SLUICE_ERROR_RANGE, "cpus %d: must not be negative", -3), SLUICE_ERROR_RANGE);
    CHECK_STR(text.text, "cpus -3: must not be negative");
    char name[2 * SLUICE_ERROR_TEXT_SIZE];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = '\0';
    sluice_fail(&text, SLUICE_ERROR_UNKNOWN, "node %s", name);
    CHECK_INT(strlen(text.text), SLUICE_ERROR_TEXT_SIZE - 1);
    sluice_fail(&text, SLUICE_ERROR_UNKNOWN, "model %s", "a\nb\x1b[2J\x7f");
    CHECK_STR(text.text, "model a?b?[2J?");
    CHECK_INT(sluice_fail(NULL, SLUICE_ERROR_BUSY, "busy"), SLUICE_ERROR_BUSY);
    return 0;
}
