/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "watch.h"

#define ONE "/sys/fs/cgroup/freezer/job_1"
#define TWO "/sys/fs/cgroup/freezer/job_2"
#define THREE "/sys/fs/cgroup/freezer/job_3"

static struct guard_watch watch;
static char done[256];                 /* "+1" frozen, "-1" thawed */
static enum guard_frost found, answer; /* of a look, and of freezing and thawing */
static char saved[4096];
static int64_t calendar;

static enum guard_frost act(char what, const char *path)
{
    size_t used = strlen(done);
    snprintf(done + used, sizeof done - used, "%c%c", what, path[strlen(path) - 1]);
    return answer;
}

static enum guard_frost look(const char *path)
{
    (void)path;
    return found;
}

static void save(void)
{
    FILE *file = fmemopen(saved, sizeof saved, "w");
    CHECK(file != NULL);
    guard_save(&watch, file);
    fclose(file);
}

/* The next guard would thaw it, if this one were killed just now, and the agent knows of the outage. */
static enum guard_frost freeze(const char *path)
{
    char line[64];
    snprintf(line, sizeof line, "frozen %c ", path[strlen(path) - 1]);
    CHECK(strstr(saved, line) != NULL && strstr(saved, "\noutage ") != NULL);
    return act('+', path);
}

static enum guard_frost thaw(const char *path)
{
    return act('-', path);
}

static int64_t today(void)
{
    return calendar;
}

static const struct guard_tools tools = {look, freeze, thaw, today, save};

static void begin(void)
{
    guard_start(&watch, 0);
    guard_agent_starts(&watch, 0);
    done[0] = '\0';
    found = answer = GUARD_DONE;
    saved[0] = '\0';
    calendar = 1000;
}

static void say(const char *text, int64_t now)
{
    struct guard_message message;
    CHECK(guard_parse(text, strlen(text), &message));
    guard_take(&watch, &tools, &message, now);
    guard_tick(&watch, &tools, now);
}

static void lose(const char *cause, uint32_t about, int64_t now)
{
    struct guard_names names = {about != 0, {about}};
    guard_agent_lost(&watch, &tools, cause, &names, now);
    guard_tick(&watch, &tools, now);
}

static void tick(int64_t now)
{
    guard_tick(&watch, &tools, now);
}

static const struct guard_outage *last(void)
{
    return &watch.outages[watch.outage_count - 1];
}

static void test_a_job_is_frozen_after_the_bound_and_thawed_with_the_next_sample(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("ready", 0);
    say("sample nvidia", 5000);
    lose("signal-9", 0, 6000);
    tick(15000);
    CHECK_STR(done, ""); /* the bound is counted from the last sample */
    tick(15001);
    CHECK_STR(done, "+1");
    guard_agent_starts(&watch, 16000);
    say("watch 1 nvidia " ONE, 16500);
    say("ready", 16600);
    say("beat nvidia", 16700); /* proves nothing */
    CHECK_STR(done, "+1");
    CHECK_INT(last()->lasted, -1);
    say("sample nvidia", 17000);
    CHECK_STR(done, "+1-1");
    CHECK_INT(last()->lasted, 11000);
    CHECK_INT(last()->frozen.count, 1);
    CHECK_INT(last()->frozen.jobs[0], 1);
    tick(27000);
    CHECK_STR(done, "+1-1");
}

static void test_each_vendor_counts_for_its_own_jobs(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("watch 2 amd " TWO, 0);
    say("ready", 0);
    for (int64_t now = 500; now < 20000; now += 500) {
        say("sample nvidia", now);
        say("beat amd", now); /* AMD's driver hangs, the agent does not */
    }
    CHECK_STR(done, "+2");
    CHECK_STR(last()->cause, "stalled");
    CHECK(!guard_hangs(&watch, 20000));
    say("sample amd", 20000);
    CHECK_STR(done, "+2-2");
    CHECK(last()->lasted >= 19000);
    CHECK_INT(watch.outage_count, 1);
    CHECK_INT(guard_deaths(&watch, calendar), 0);
}

static void test_the_policy_can_say_never(void)
{
    begin();
    say("bound 0", 0);
    say("watch 1 nvidia " ONE, 0);
    tick(1000000);
    CHECK_STR(done, "");
    say("bound 5", 1000000);
    CHECK_STR(done, "+1");
    say("bound 0", 1000100);
    CHECK_STR(done, "+1-1");
}

static void test_who_is_forgotten_is_thawed(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("watch 2 nvidia " TWO, 0);
    tick(10001);
    CHECK_STR(done, "+2+1");
    say("forget 2", 10100);
    CHECK_STR(done, "+2+1-2");
    guard_agent_starts(&watch, 11000); /* job 1 has ended meanwhile: the next agent does not name it */
    say("ready", 12000);
    CHECK_STR(done, "+2+1-2-1");
    CHECK_INT(watch.count, 0);
}

static void test_what_cannot_be_frozen(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    answer = GUARD_OTHERS; /* suspended: not ours to thaw */
    tick(10001);
    tick(10100);
    CHECK_STR(done, "+1");
    say("sample nvidia", 10200);
    CHECK_STR(done, "+1");
    answer = GUARD_FAILED;
    tick(20300);
    CHECK_STR(done, "+1+1");
    answer = GUARD_GONE;
    tick(40000);
    CHECK_STR(done, "+1+1+1");
    CHECK_INT(watch.count, 0);
    CHECK_INT(watch.outage_count, 0);
}

static void test_what_a_look_finds_is_not_frozen(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    found = GUARD_OTHERS;
    tick(10001);
    found = GUARD_FAILED;
    tick(20100);
    CHECK_INT(watch.count, 1);
    found = GUARD_GONE;
    tick(30200);
    CHECK_STR(done, "");
    CHECK_INT(watch.count, 0);
    CHECK_INT(watch.outage_count, 0);
}

static void test_an_outage_names_only_what_was_frozen(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("watch 2 nvidia " TWO, 0);
    tick(10001);
    CHECK_INT(last()->frozen.count, 2);
    say("watch 3 nvidia " THREE, 10002);
    answer = GUARD_FAILED;
    tick(20003);
    CHECK_STR(done, "+2+1+3");
    CHECK_INT(last()->frozen.count, 2);
    CHECK(!watch.jobs[2].frozen && watch.jobs[0].frozen && watch.outage_count == 1);
}

static void test_a_loop_that_stands_still_is_found(void)
{
    begin();
    CHECK(!guard_hangs(&watch, 119000));
    CHECK(guard_hangs(&watch, 121000)); /* never ready */
    say("ready", 121000);
    CHECK(!guard_hangs(&watch, 900000)); /* no GPUs, no loops */
    say("beat nvidia", 900000);
    say("beat amd", 910000);
    CHECK(!guard_hangs(&watch, 915000));
    CHECK(guard_hangs(&watch, 915001));
    guard_agent_starts(&watch, 921000);
    CHECK(!guard_hangs(&watch, 950000));
}

static void test_deaths_are_counted_and_name_the_jobs_that_were_read(void)
{
    begin();
    say("ready", 0);
    for (int death = 1; death <= 20; death++) {
        calendar += 10000;
        lose("signal-7", 40 + (uint32_t)death, 10 * death);
    }
    CHECK_INT(watch.outage_count, GUARD_OUTAGES);
    CHECK_INT(last()->number, 20);
    CHECK_INT(last()->about.jobs[0], 60);
    CHECK_INT(guard_deaths(&watch, calendar), 6);
    CHECK_INT(guard_deaths(&watch, 0), 0); /* the clock was set back */
    say("ready", 900);
    for (int i = 0; i < GUARD_OUTAGES; i++)
        CHECK(watch.outages[i].lasted >= 0);
}

static void test_an_agent_that_hung_and_was_killed_is_one_outage(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("ready", 0);
    say("sample nvidia", 1000);
    tick(12000);
    lose("hung", 0, 16500);
    CHECK_INT(watch.outage_count, 1);
    CHECK_STR(last()->cause, "hung");
    say("sample nvidia", 22000); /* the limits are in force, though nobody is answered yet */
    CHECK_INT(last()->lasted, 21000);
    say("watch 1 nvidia " ONE, 22500);
    say("ready", 22500);
    CHECK_INT(last()->lasted, 21000);
}

static void test_the_next_guard_thaws_what_this_one_froze(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("watch 2 amd,intel " TWO, 0);
    lose("signal-9", 2, 100);
    tick(10001);
    say("watch 3 nvidia " THREE, 10001);
    char memory[4096];
    FILE *file = fmemopen(memory, sizeof memory, "w");
    guard_save(&watch, file);
    fclose(file);

    begin();
    file = fmemopen(memory, strlen(memory), "r");
    guard_load(&watch, file, 0);
    fclose(file);
    CHECK_INT(watch.count, 3);
    CHECK_INT(last()->about.jobs[0], 2);
    CHECK_INT(last()->frozen.count, 2);
    CHECK_STR(last()->cause, "signal-9");
    tick(100);
    CHECK_STR(done, "");
    tick(10001); /* no agent comes up: who was not frozen is, after another bound */
    CHECK_STR(done, "+3");
    done[0] = '\0';
    say("watch 1 nvidia " ONE, 10200);
    say("watch 2 amd,intel " TWO, 10200);
    say("sample nvidia", 10300);
    say("sample amd", 10300);
    CHECK_STR(done, "-3-1");
    say("ready", 10300); /* job 3 has ended */
    CHECK_INT(last()->lasted, -1);
    say("sample intel", 10400);
    CHECK_STR(done, "-3-1-2");
    CHECK_INT(last()->lasted, 10400);
}

static void test_the_next_guard_freezes_what_this_one_did_not_come_to(void)
{
    begin();
    say("watch 1 nvidia " ONE, 0);
    say("watch 2 nvidia " TWO, 0);
    tick(10001);
    say("watch 3 nvidia " THREE, 10001);
    save();
    done[0] = '\0';
    answer = GUARD_OTHERS; /* or it did */
    guard_freeze_again(&watch, &tools);
    CHECK_STR(done, "+2+1");
    CHECK(watch.jobs[0].frozen && watch.jobs[1].frozen && !watch.jobs[2].frozen);
    answer = GUARD_GONE;
    guard_freeze_again(&watch, &tools);
    CHECK_INT(watch.count, 1);
    CHECK_INT(watch.jobs[0].number, 3);
}

static void test_a_damaged_memory_is_left_out(void)
{
    static const char memory[] = "sluice-guard 1\n"
                                 "frozen 1 1 /tmp/../job_1\n"
                                 "frozen 2 0 " TWO "\n"
                                 "frozen 3 9 " TWO "\n"
                                 "frozen x\n"
                                 "outage 1 2 signal-9 -1 1,2\n"
                                 "outage 1 2 signal-9 -1 1,,2 -\n"
                                 "melted 5 1 " TWO "\n"
                                 "watched 4 1 " ONE "\n"
                                 "frozen 4 1 " ONE "\n";
    begin();
    FILE *file = fmemopen((void *)(uintptr_t)memory, sizeof memory - 1, "r");
    guard_load(&watch, file, 0);
    fclose(file);
    CHECK_INT(watch.count, 1);
    CHECK_INT(watch.jobs[0].number, 4);
    CHECK_INT(watch.outage_count, 0);
}

static void test_more_jobs_than_there_is_room_for(void)
{
    begin();
    for (int job = 1; job <= GUARD_JOBS + 5; job++) {
        char text[64];
        snprintf(text, sizeof text, "watch %d nvidia /sys/fs/cgroup/job_%d", job, job);
        say(text, 0);
    }
    CHECK_INT(watch.count, GUARD_JOBS);
    say("forget 1", 0);
    say("watch 9999 nvidia " ONE, 0);
    CHECK_INT(watch.count, GUARD_JOBS);
}

int main(void)
{
    test_a_job_is_frozen_after_the_bound_and_thawed_with_the_next_sample();
    test_each_vendor_counts_for_its_own_jobs();
    test_the_policy_can_say_never();
    test_who_is_forgotten_is_thawed();
    test_what_cannot_be_frozen();
    test_what_a_look_finds_is_not_frozen();
    test_an_outage_names_only_what_was_frozen();
    test_a_loop_that_stands_still_is_found();
    test_deaths_are_counted_and_name_the_jobs_that_were_read();
    test_an_agent_that_hung_and_was_killed_is_one_outage();
    test_the_next_guard_thaws_what_this_one_froze();
    test_the_next_guard_freezes_what_this_one_did_not_come_to();
    test_a_damaged_memory_is_left_out();
    test_more_jobs_than_there_is_room_for();
    return 0;
}
