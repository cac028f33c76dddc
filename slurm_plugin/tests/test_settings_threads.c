/* SPDX-License-Identifier: Apache-2.0 */
/* Level and policy from files that appear, change, break and go, while others look; also under ThreadSanitizer. */
#include "runtime/controller.h"
#include "runtime/settings.h"
#include "runtime/status.h"

#include "check.h"
#include "with_checksum.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char folder[] = "/tmp/sluice-settings-XXXXXX";
static char path[128], other[160];

static void put(const char *name, const char *text)
{
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    snprintf(other, sizeof(other), "%s.new", path);
    FILE *file = fopen(other, "w");
    CHECK(file);
    fputs(text, file);
    CHECK(fclose(file) == 0 && rename(other, path) == 0);
}

static void put_policy(const char *body)
{
    size_t length;
    char *text = with_checksum(body, &length);
    put(SLUICE_POLICY_FILE, text);
    free(text);
}

static void take_away(const char *name)
{
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    CHECK(unlink(path) == 0);
}

static void check_level(enum sluice_level level, enum sluice_level asked)
{
    sluice_settings_reload();
    CHECK_INT(sluice_settings_level(), level);
    const struct sluice_settings *settings = sluice_settings_acquire();
    CHECK(settings && settings->rules);
    CHECK_INT(settings->level, level);
    CHECK_INT(settings->asked, asked);
    sluice_settings_release(settings);
}

static const struct sluice_settings_state *state(void)
{
    static struct sluice_settings_state state;
    sluice_settings_describe(&state);
    return &state;
}

#define ONE "sluice-policy 1.0\nsource = one\n[tenant physics]\n"
#define TWO "sluice-policy 1.0\nsource = two\n[tenant atoms]\nunknown = 1\n"

static void test_files(void)
{
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_OFF); /* neither file */
    put(SLUICE_LEVEL_FILE, "place\n");
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_PLACE); /* no policy */
    put(SLUICE_POLICY_FILE, "");
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_PLACE); /* an empty file */
    CHECK(!state()->policy);
    put_policy("sluice-policy 1.0\n");
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_PLACE); /* a policy that says nothing */
    put_policy(ONE);
    check_level(SLUICE_LEVEL_PLACE, SLUICE_LEVEL_PLACE);
    CHECK(state()->policy && state()->policy_loaded > 0);
    CHECK_STR(state()->source, "one");
    put(SLUICE_LEVEL_FILE, "  shadow");
    check_level(SLUICE_LEVEL_SHADOW, SLUICE_LEVEL_SHADOW);
    uint64_t generation = state()->generation;
    check_level(SLUICE_LEVEL_SHADOW, SLUICE_LEVEL_SHADOW); /* nothing new */
    CHECK(state()->generation == generation);

    const struct sluice_settings *held = sluice_settings_acquire();
    put_policy(TWO);
    check_level(SLUICE_LEVEL_SHADOW, SLUICE_LEVEL_SHADOW);
    CHECK(sluice_rules_tenant(held->rules, "physics")); /* what is held stays as it was */
    CHECK_STR(state()->source, "two");
    CHECK_INT(state()->warnings, 1);
    CHECK(strstr(state()->warning, "unknown"));
    const struct sluice_settings *now = sluice_settings_acquire();
    CHECK(now->rules_generation > held->rules_generation && now->generation > held->generation);
    sluice_settings_release(now);
    sluice_settings_release(held);

    static const char *const bad_levels[] = {"on", "place off", "",
                                             "placeplaceplaceplaceplaceplaceplaceplaceplaceplaceplaceplaceplace"};
    for (size_t i = 0; i < sizeof(bad_levels) / sizeof(*bad_levels); i++) {
        put(SLUICE_LEVEL_FILE, bad_levels[i]);
        check_level(SLUICE_LEVEL_SHADOW, SLUICE_LEVEL_SHADOW); /* as it was, and said */
        CHECK(strstr(state()->level_error, "stays as it was"));
    }
    put(SLUICE_LEVEL_FILE, "admit\n");
    check_level(SLUICE_LEVEL_ADMIT, SLUICE_LEVEL_ADMIT);
    CHECK_STR(state()->level_error, "");

    put(SLUICE_POLICY_FILE, "sluice-policy 1.0\nsource = thr"); /* cut off */
    check_level(SLUICE_LEVEL_ADMIT, SLUICE_LEVEL_ADMIT);
    CHECK_STR(state()->source, "two");
    CHECK(strstr(state()->policy_error, "last good policy stays"));
    put_policy("sluice-policy 9.0\n");
    check_level(SLUICE_LEVEL_ADMIT, SLUICE_LEVEL_ADMIT);
    CHECK(strstr(state()->policy_error, "policy format 9.0"));
    take_away(SLUICE_POLICY_FILE);
    CHECK(mkdir(path, 0700) == 0); /* no file at all */
    check_level(SLUICE_LEVEL_ADMIT, SLUICE_LEVEL_ADMIT);
    CHECK(state()->policy_error[0]);
    CHECK(rmdir(path) == 0);
    put_policy(ONE);
    check_level(SLUICE_LEVEL_ADMIT, SLUICE_LEVEL_ADMIT);
    CHECK_STR(state()->policy_error, "");
    take_away(SLUICE_POLICY_FILE);
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_ADMIT); /* taken away: none */
    take_away(SLUICE_LEVEL_FILE);
    check_level(SLUICE_LEVEL_OFF, SLUICE_LEVEL_OFF);
}

static atomic_bool done;

static void *look(void *unused)
{
    (void)unused;
    while (!atomic_load(&done)) {
        const struct sluice_settings *settings = sluice_settings_acquire();
        CHECK(settings != NULL);
        bool one = sluice_rules_tenant(settings->rules, "physics") != NULL;
        bool two = sluice_rules_tenant(settings->rules, "atoms") != NULL;
        CHECK(one + two == !settings->rules->empty);
        CHECK(settings->level == SLUICE_LEVEL_OFF || one || two);
        sluice_settings_release(settings);
        sluice_settings_wake();
        atomic_fetch_add(sluice_status_counter("test.looks"), 1);
    }
    return NULL;
}

static void test_threads(void)
{
    put(SLUICE_LEVEL_FILE, "place");
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, look, NULL) == 0);
    for (int i = 0; i < 100; i++) {
        put_policy(i % 2 ? TWO : ONE);
        sluice_settings_reload();
    }
    atomic_store(&done, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

static char *status_text(void)
{
    char host[256] = "", name[512];
    gethostname(host, sizeof(host) - 1);
    snprintf(name, sizeof(name), "%s/sluice.status.%s", folder, host);
    FILE *file = fopen(name, "r");
    if (!file)
        return NULL;
    static char text[16384];
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

static void remove_status(void)
{
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    snprintf(path, sizeof(path), "%s/sluice.status.%s", folder, host);
    CHECK(unlink(path) == 0);
}

static int module_runs, module_stops;

static bool module_start(const struct sluice_site *site)
{
    CHECK_STR(site->slurm_version, "22.05.8");
    module_runs++;
    return true;
}

static bool module_fails(const struct sluice_site *site)
{
    (void)site;
    return false;
}

static void module_stop(void)
{
    module_stops++;
}

static void no_stop(void)
{
    CHECK(false); /* it was not started */
}

int main(void)
{
    CHECK(mkdtemp(folder));
    char conf[128];
    snprintf(conf, sizeof(conf), "%s/slurm.conf", folder);
    struct sluice_site site = {.slurm_conf = conf, .state_folder = folder, .slurm_version = "22.05.8"};
    static struct sluice_module good = {.name = "good", .start = module_start, .stop = module_stop};
    static struct sluice_module bad = {.name = "bad", .start = module_fails, .stop = no_stop};
    sluice_controller_module(&good);
    sluice_controller_module(&bad);
    CHECK(!sluice_in_slurmctld());
    CHECK(!sluice_settings_acquire());
    for (int round = 1; round <= 2; round++) { /* twice: plugins may be loaded again */
        CHECK(sluice_controller_start("select", &site));
        CHECK(sluice_controller_start("job_submit", &site));
        CHECK_INT(module_runs, round);
        test_files();
        atomic_store(&done, false);
        test_threads();
        sluice_status_write();
        const char *text = status_text();
        CHECK(text && strstr(text, "\"plugins\": [\"select\", \"job_submit\"]"));
        remove_status();
        sluice_status_write(); /* removed by somebody: written again, though nothing has changed */
        text = status_text();
        CHECK(text != NULL);
        CHECK(strstr(text, "\"level\": \"place\"") && strstr(text, "\"test.looks\": "));
        take_away(SLUICE_LEVEL_FILE);
        take_away(SLUICE_POLICY_FILE);
        sluice_controller_stop("job_submit");
        CHECK_INT(module_stops, round - 1);
        sluice_controller_stop("select");
        CHECK_INT(module_stops, round);
        CHECK(!status_text());
        CHECK_INT(sluice_settings_level(), SLUICE_LEVEL_OFF);
    }
    CHECK(rmdir(folder) == 0);
    return 0;
}
