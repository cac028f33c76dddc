/* SPDX-License-Identifier: Apache-2.0 */
/* A driver that grants what cuda_old_forms.c asks for. */
int cuMemAlloc(void)
{
    return 0;
}

int cuArrayCreate(void)
{
    return 0;
}
