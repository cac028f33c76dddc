/* SPDX-License-Identifier: Apache-2.0 */
/* What symbols_plugin.c finds in its program. */
int theirs(void)
{
    return 1;
}
int variable;
int same(void)
{
    return 2;
}
int init;
