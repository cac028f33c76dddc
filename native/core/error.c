/* SPDX-License-Identifier: Apache-2.0 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include "sluice/version.h"

const char *sluice_strerror(enum sluice_error error)
{
    switch (error) {
    case SLUICE_OK:
        return "ok";
    case SLUICE_ERROR_NO_MEMORY:
        return "out of host memory";
    case SLUICE_ERROR_INVALID:
        return "invalid argument";
    case SLUICE_ERROR_RANGE:
        return "number out of range";
    case SLUICE_ERROR_UNKNOWN:
        return "unknown id or name";
    case SLUICE_ERROR_DUPLICATE:
        return "id or name already known";
    case SLUICE_ERROR_CAPACITY:
        return "more than there is room for";
    case SLUICE_ERROR_NO_PLACE:
        return "no place now";
    case SLUICE_ERROR_NEVER:
        return "no place even when idle";
    case SLUICE_ERROR_QUOTA:
        return "over quota";
    case SLUICE_ERROR_CORRUPT:
        return "state is corrupt";
    case SLUICE_ERROR_BUSY:
        return "busy";
    case SLUICE_ERROR_VERSION:
        return "incompatible version";
    case SLUICE_ERROR_SYSTEM:
        return "the operating system refused";
    }
    return "unknown error";
}

const char *sluice_core_version(void)
{
    return SLUICE_VERSION;
}

enum sluice_error sluice_fail(struct sluice_error_text *text, enum sluice_error error, const char *format, ...)
{
    if (text) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text->text, sizeof text->text, format, arguments);
        va_end(arguments);
        for (char *at = text->text; *at; at++) /* a caller's name must not break the line */
            if ((unsigned char)*at < ' ' || *at == 0x7f)
                *at = '?';
    }
    return error;
}
