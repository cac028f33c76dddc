/* What is in device memory that no process has: a GPU whose driver does not clear memory between programs. */
#ifndef VRAM_H
#define VRAM_H

#include "sim.h"

/* Whether this node's GPUs keep what was in them: whether there is a file "vram" next to the state. Asked once. */
void vram_find(void);
/* Leave what a program had behind; and show the next one what was left. The first 64 KiB of each represent all. */
void vram_leave(unsigned index, const void *memory, size_t size);
void vram_show(unsigned index, void *memory, size_t size);

#endif
