/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Which jobs make a gang, and what their users see. */
#include "check.h"
#include "planner/gang.h"

enum { ROOM = 64 };

static struct sluice_gang_member members[ROOM];
static struct sluice_gang_instance instances[ROOM];
static uint32_t count;

static struct sluice_gang_member *add(uint32_t uid, const char *name, uint32_t wanted, uint32_t job_id)
{
    struct sluice_gang_member *member = &members[count];
    *member = (struct sluice_gang_member){.uid = uid, .count = wanted, .job_id = job_id, .tasks = 1, .index = count};
    snprintf(member->name, sizeof member->name, "%s", name);
    count++;
    return member;
}

static uint32_t form(void)
{
    return sluice_gang_form(members, &count, ROOM, instances, ROOM);
}

static void name_user_and_count_make_a_gang(void)
{
    count = 0;
    add(1, "a", 2, 10);
    add(2, "a", 2, 11);
    add(1, "b", 2, 12);
    add(1, "a", 3, 13);
    add(1, "a", 2, 14);
    CHECK_INT(form(), 4);
    uint32_t ready = 0, incomplete = 0;
    for (uint32_t i = 0; i < 4; i++) {
        ready += instances[i].phase == SLUICE_GANG_READY;
        incomplete += instances[i].phase == SLUICE_GANG_INCOMPLETE;
        if (instances[i].phase != SLUICE_GANG_READY)
            continue;
        CHECK_INT(members[instances[i].first].job_id, 10);
        CHECK_INT(members[instances[i].first + 1].job_id, 14);
    }
    CHECK_INT(ready, 1);
    CHECK_INT(incomplete, 3);
}

static void a_name_is_used_again(void)
{
    count = 0;
    for (uint32_t id = 5; id > 0; id--)
        add(1, "a", 2, id);
    CHECK_INT(form(), 3);
    CHECK_INT(members[instances[0].first].job_id, 1);
    CHECK_INT(instances[0].phase, SLUICE_GANG_READY);
    CHECK_INT(members[instances[1].first].job_id, 3);
    CHECK_INT(instances[1].phase, SLUICE_GANG_READY);
    CHECK_INT(instances[2].phase, SLUICE_GANG_INCOMPLETE);
    CHECK_INT(instances[2].present, 1);
}

static void an_incomplete_gang_is_given_up_some_time_after_its_last_member(void)
{
    char text[SLUICE_GANG_REASON_SIZE];
    count = 0;
    add(1, "a", 3, 1)->submitted_s = 100;
    add(1, "a", 3, 2)->submitted_s = 160;
    add(1, "b", 1, 3)->submitted_s = 100;
    CHECK_INT(form(), 2);
    const struct sluice_gang_instance *a = &instances[1], *b = &instances[0]; /* smaller counts go first */
    CHECK_INT(a->newest_s, 160);
    sluice_gang_give_up(instances, 2, 219, 60);
    CHECK_INT(a->phase, SLUICE_GANG_INCOMPLETE);
    sluice_gang_give_up(instances, 2, 1000000, 0); /* never */
    CHECK_INT(a->phase, SLUICE_GANG_INCOMPLETE);
    sluice_gang_give_up(instances, 2, 220, 60);
    CHECK_INT(a->phase, SLUICE_GANG_GIVEN_UP);
    CHECK_INT(b->phase, SLUICE_GANG_READY);
    CHECK(!strcmp(sluice_gang_reason(&members[a->first], a, text, sizeof text),
                  "Gang a: only 2 of 3 members submitted, none since 1970-01-01T00:02:40; submit the rest or cancel"));
}

static void members_with_nodes_are_the_first_instance(void)
{
    count = 0;
    add(1, "a", 3, 1);
    add(1, "a", 3, 2);
    add(1, "a", 3, 7)->configuring = true;
    add(1, "a", 3, 8)->configuring = true;
    CHECK_INT(form(), 2);
    CHECK_INT(instances[0].phase, SLUICE_GANG_STARTING);
    CHECK_INT(instances[0].configuring, 2);
    CHECK_INT(instances[0].present, 3);
    CHECK_INT(members[instances[0].first + 2].job_id, 1);
    CHECK_INT(instances[1].phase, SLUICE_GANG_INCOMPLETE);
}

static void a_blocked_member_blocks_its_instance_only(void)
{
    count = 0;
    for (uint32_t id = 1; id <= 4; id++)
        add(1, "a", 2, id)->blocked = id == 2;
    CHECK_INT(form(), 2);
    CHECK_INT(instances[0].phase, SLUICE_GANG_BLOCKED);
    CHECK_INT(instances[0].blocked, 1);
    CHECK_INT(instances[1].phase, SLUICE_GANG_READY);
}

static void an_array_is_cut_into_instances(void)
{
    count = 0;
    add(1, "a", 4, 10)->tasks = 10;
    add(1, "a", 4, 20);
    CHECK_INT(form(), 3);
    CHECK_INT(count, 4);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_INT(instances[i].present, i < 2 ? 4 : 3);
    CHECK_INT(instances[2].members, 2);
    CHECK_INT(members[instances[2].first].tasks, 2);
    CHECK_INT(members[instances[2].first + 1].job_id, 20);
}

static void room_for_splits_may_end(void)
{
    count = 0;
    add(1, "a", 1, 10)->tasks = 1000;
    uint32_t made = sluice_gang_form(members, &count, 8, instances, ROOM);
    CHECK_INT(count, 8);
    CHECK_INT(made, 8);
    count = 0;
    add(1, "a", 1, 10)->tasks = 1000;
    CHECK_INT(sluice_gang_form(members, &count, ROOM, instances, 3), 3);
    count = 0;
    CHECK_INT(form(), 0);
}

static void users_are_told_what_is_missing(void)
{
    char text[SLUICE_GANG_REASON_SIZE];
    count = 0;
    add(1, "train", 4, 1);
    add(1, "train", 4, 2);
    form();
    CHECK_STR(sluice_gang_reason(&members[0], &instances[0], text, sizeof text),
              "Gang train: 2 of 4 members submitted");
    instances[0].phase = SLUICE_GANG_READY;
    CHECK_STR(sluice_gang_reason(&members[0], &instances[0], text, sizeof text),
              "Gang train: waits for room for 4 members");
    instances[0].phase = SLUICE_GANG_STARTING;
    instances[0].configuring = 3;
    CHECK_STR(sluice_gang_reason(&members[0], &instances[0], text, sizeof text),
              "Gang train: 3 of 4 members have nodes");
    instances[0].phase = SLUICE_GANG_BLOCKED;
    instances[0].blocked = 1;
    CHECK_STR(sluice_gang_reason(&members[0], &instances[0], text, sizeof text),
              "Gang train: 1 of 4 members held, dependent or not eligible yet");
    count = 0;
    add(1, "odd", 2, 1)->blocked = true;
    struct sluice_gang_member *odd = add(1, "odd", 2, 2);
    odd->blocked = odd->unplaced = true;
    form();
    CHECK_STR(sluice_gang_reason(&members[0], &instances[0], text, sizeof text),
              "Gang odd: 1 of 2 members ask for what gangs cannot have; see sluice explain");
}

int main(void)
{
    setenv("TZ", "UTC", 1);
    name_user_and_count_make_a_gang();
    a_name_is_used_again();
    an_incomplete_gang_is_given_up_some_time_after_its_last_member();
    members_with_nodes_are_the_first_instance();
    a_blocked_member_blocks_its_instance_only();
    an_array_is_cut_into_instances();
    room_for_splits_may_end();
    users_are_told_what_is_missing();
    return 0;
}
