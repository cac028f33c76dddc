/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of moves, of any content: as they come, and with the right checksum put under them. */
#include "planner/moves.h"

#include "fuzz/checksummed.h"

static void try(const char *data, size_t length)
{
    struct sluice_moves moves = {0};
    struct sluice_error_text text;
    memset(text.text, 'x', sizeof(text.text));
    enum sluice_error error = sluice_moves_parse(data, length, &moves, &text);
    if (error)
        require(memchr(text.text, '\0', sizeof(text.text)) != NULL && !moves.count);
    for (uint32_t i = 0; i < moves.count; i++) {
        const struct sluice_job_move *move = &moves.items[i];
        require(move->stage < SLUICE_MOVE_STAGES && move->why < SLUICE_MOVE_WHYS);
        require(strlen(move->from) && strlen(move->to) && strlen(move->room));
        require(!i || moves.items[i - 1].asked_s <= move->asked_s);
    }
    sluice_moves_give_up(&moves, SLUICE_MOVE_WHY_OTHER);
    for (uint32_t i = 0; i < moves.count; i++)
        require(moves.items[i].stage != SLUICE_MOVE_ASKED);
    sluice_moves_free(&moves);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return try_both("sluice-moves", "1", data, size, try);
}
