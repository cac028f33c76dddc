/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin that wants symbols of its program (symbols_program.c), of the C library, and of nobody. */
#include <string.h>

extern int theirs(void), nobodys(void), maybe(void) __attribute__((weak));
extern int variable, lacking;
extern const char *volatile text;
const char *volatile text = "x";
int init(void)
{
    return theirs() + nobodys() + (maybe ? maybe() : 0) + variable + lacking + (int)strlen(text);
}
int same(void)
{
    return 1;
}
static int hidden(void)
{
    return 2;
}
int (*use)(void) = hidden;
