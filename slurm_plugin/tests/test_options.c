/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "rules/options.h"

#include "check.h"

static struct sluice_options options;
static char why[SLUICE_OPTION_WHY_MAX];

static bool set(const char *name, const char *value)
{
    return sluice_option_set(&options, name, value, why, sizeof why);
}

static void check_sizes(void)
{
    static const struct {
        const char *text;
        uint64_t mib;
    } good[] = {
        {"1", 1},           {"10240", 10240},       {"10G", 10240},    {"10g", 10240},      {"10GB", 10240},
        {"10GiB", 10240},   {"1T", 1048576},        {"16T", 16777216}, {"1.5G", 1536},      {"0.001G", 2},
        {"1K", 1},          {"1024k", 1},           {"1025K", 2},      {"512m", 512},       {"0.5M", 1},
        {"79.999G", 81919}, {"16777216", 16777216}, {"007", 7},        {"17179869184K", 0},
    };
    static const char *const bad[] = {
        "",
        "0",
        "0G",
        "-1",
        "+1",
        "1 G",
        " 1",
        "1G ",
        "G",
        "1X",
        "1GG",
        "1Gi",
        "1.G",
        ".5G",
        "1.2345G",
        "1..5G",
        "1e3",
        "0x10",
        "17T",
        "16777217",
        "99999999999999999999",
        "18446744073709551617",
        "1G\n",
        "1\x1bG",
        "\xff",
        "50%",
        "nan",
        "1,5G",
    };
    uint64_t mib;
    for (size_t i = 0; i < sizeof good / sizeof good[0] - 1; i++) {
        CHECK(sluice_parse_mib(good[i].text, SLUICE_GPU_MEM_MAX_MIB, &mib));
        CHECK_INT(mib, good[i].mib);
    }
    CHECK(!sluice_parse_mib("17179869184K", SLUICE_GPU_MEM_MAX_MIB - 1, &mib));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (sluice_parse_mib(bad[i], SLUICE_GPU_MEM_MAX_MIB, &mib)) {
            fprintf(stderr, "\"%s\" was taken for %" PRIu64 " MiB\n", bad[i], mib);
            exit(1);
        }
    CHECK(!sluice_parse_mib(NULL, 1, &mib));
    char text[24];
    CHECK_STR(sluice_format_mib(10240, text, sizeof text), "10G");
    CHECK_STR(sluice_format_mib(10241, text, sizeof text), "10241M");
    CHECK_STR(sluice_format_mib(UINT64_MAX, text, sizeof text), "18446744073709551615M");
}

static void check_options(void)
{
    CHECK(set("gpu-mem", "10G") && options.gpu_mem_mib == 10240);
    CHECK(set("gpu-mem", "20G") && options.gpu_mem_mib == 20480); /* the last one counts */
    CHECK(set("gpu-share", "50") && options.gpu_share == 50);
    CHECK(set("gpu-share", "100%") && options.gpu_share == 100);
    CHECK(set("gpu-power", "400W") && options.gpu_power_w == 400);
    CHECK(set("gpu-power", "300w") && options.gpu_power_w == 300);
    CHECK(set("gpu-power", "100000") && options.gpu_power_w == 100000);
    CHECK(set("nics-per-gpu", "1") && options.nics_per_gpu == 1);
    CHECK(set("nics-per-gpu", "32") && options.nics_per_gpu == 32);
    CHECK(set("nic-planes", "any") && options.nic_planes == SLUICE_NIC_PLANES_ANY);
    CHECK(set("nic-planes", "spread") && options.nic_planes == SLUICE_NIC_PLANES_SPREAD);
    CHECK(set("nic-planes", "one") && options.nic_planes == SLUICE_NIC_PLANES_ONE);
    CHECK(set("gpu-affinity", "numa") && options.gpu_affinity == SLUICE_AFFINITY_NUMA);
    CHECK(set("gpu-spread", NULL) && options.gpu_spread);
    CHECK(set("gpu-spread", "(null)") && set("gpu-spread", ""));
    CHECK(set("gpu-profile", "30") && options.gpu_profile == 30);
    CHECK(set("gpu-profile", NULL) && options.gpu_profile == SLUICE_PROFILE_WHOLE);
    CHECK(set("checkpoint", "app") && options.checkpoint == SLUICE_CHECKPOINT_APP);
    CHECK(set("checkpoint", "system") && options.checkpoint == SLUICE_CHECKPOINT_SYSTEM);
    CHECK(set("checkpoint-interval", "90s") && options.checkpoint_s == 90);
    CHECK(set("checkpoint-interval", "30D") && options.checkpoint_s == SLUICE_CHECKPOINT_MOST_S);
    CHECK(set("checkpoint-interval", "daly") && options.checkpoint_s == SLUICE_CHECKPOINT_DALY);
    CHECK(set("gang", "train.v2_x-1:4"));
    CHECK_STR(options.gang_name, "train.v2_x-1");
    CHECK_INT(options.gang_count, 4);

    static const struct {
        const char *name, *value;
    } bad[] = {
        {"gpu-mem", NULL},
        {"gpu-mem", "lots"},
        {"gpu-share", "0"},
        {"gpu-share", "101"},
        {"gpu-share", "%"},
        {"gpu-share", "5%%"},
        {"gpu-share", "-5"},
        {"gpu-share", "1.5"},
        {"gpu-power", NULL},
        {"gpu-power", "0W"},
        {"gpu-power", "W"},
        {"gpu-power", "100001"},
        {"gpu-power", "400kW"},
        {"gpu-power", "400W "},
        {"gpu-power", "-400"},
        {"gpu-power", "99999999999999999999"},
        {"nics-per-gpu", NULL},
        {"nics-per-gpu", "0"},
        {"nics-per-gpu", "33"},
        {"nics-per-gpu", "1.5"},
        {"nics-per-gpu", "-1"},
        {"nics-per-gpu", "ib:1"},
        {"nic-planes", NULL},
        {"nic-planes", ""},
        {"nic-planes", "One"},
        {"nic-planes", "one,spread"},
        {"gpu-affinity", "LINK"},
        {"gpu-affinity", ""},
        {"gpu-affinity", "link,numa"},
        {"gpu-spread", "yes"},
        {"gpu-profile", "0"},
        {"gpu-profile", "86401"},
        {"gpu-profile", "10s"},
        {"checkpoint", NULL},
        {"checkpoint", "System"},
        {"checkpoint", "APP"},
        {"checkpoint-interval", "20"},
        {"checkpoint-interval", "59s"},
        {"checkpoint-interval", "31d"},
        {"checkpoint-interval", "2592000d"},
        {"checkpoint-interval", "1h30m"},
        {"checkpoint-interval", "m"},
        {"checkpoint-interval", "Daly"},
        {"gang", "train"},
        {"gang", ":4"},
        {"gang", "train:"},
        {"gang", "train:0"},
        {"gang", "train:257"},
        {"gang", "-x:2"},
        {"gang", ".x:2"},
        {"gang", "a b:2"},
        {"gang", "a:2:3"},
        {"gang", "a:2 "},
        {"gang", "a/b:2"},
        {"gpu", "1"},
        {"gang", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:2"},
        {"gang", "a\n:2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct sluice_options before = options;
        why[0] = '\0';
        if (set(bad[i].name, bad[i].value)) {
            fprintf(stderr, "--%s=%s was accepted\n", bad[i].name, bad[i].value);
            exit(1);
        }
        CHECK(memcmp(&before, &options, sizeof options) == 0);
        CHECK(strstr(why, bad[i].name) != NULL);
    }
    CHECK(set("gang", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:256"));
    CHECK_INT(strlen(options.gang_name), SLUICE_GANG_NAME_MAX);
}

static void check_messages(void)
{
    CHECK(!set("gpu-mem", "1\x1b[31mG\n"));
    CHECK_STR(why,
              "--gpu-mem=1?[31mG? is not understood; write memory of each GPU, 1M to 16T: a number with M, G or T, "
              "e.g. 10G");
    char small[8];
    CHECK(!sluice_option_set(&options, "gpu-mem", "x", small, sizeof small));
    CHECK_STR(small, "--gpu-m");
}

static void check_environment(void)
{
    char *env[] = {"PATH=/bin",
                   "_SLURM_SPANK_OPTION_sluice_gpu_mem=10G",
                   NULL,
                   "_SLURM_SPANK_OPTION_other_gpu_mem=x",
                   "_SLURM_SPANK_OPTION_sluice_gpu_spread=(null)",
                   "_SLURM_SPANK_OPTION_sluice_gang=a:2"};
    CHECK(sluice_options_from_env(&options, env, 6, why, sizeof why));
    CHECK_INT(options.gpu_mem_mib, 10240);
    CHECK(options.gpu_spread);
    CHECK_INT(options.gang_count, 2);
    CHECK_INT(options.gpu_share, 0); /* nothing is left of an earlier use */

    char *twice[] = {env[1], "_SLURM_SPANK_OPTION_sluice_gpu_mem=1G"};
    CHECK(!sluice_options_from_env(&options, twice, 2, why, sizeof why));
    CHECK_STR(why, "--gpu-mem was submitted twice");
    char *unknown[] = {"_SLURM_SPANK_OPTION_sluice_gpu_fast=1"};
    CHECK(!sluice_options_from_env(&options, unknown, 1, why, sizeof why));
    char *malformed[] = {"_SLURM_SPANK_OPTION_sluice_gpu_mem", "_SLURM_SPANK_OPTION_sluice_"};
    CHECK(!sluice_options_from_env(&options, malformed, 1, why, sizeof why));
    CHECK(!sluice_options_from_env(&options, malformed + 1, 1, why, sizeof why));
    CHECK(sluice_options_from_env(&options, NULL, 0, why, sizeof why));
    static char *many[SLUICE_SPANK_ENV_MOST + 1];
    CHECK(sluice_options_from_env(&options, many, SLUICE_SPANK_ENV_MOST, why, sizeof why));
    CHECK(!sluice_options_from_env(&options, many, SLUICE_SPANK_ENV_MOST + 1, why, sizeof why));
    CHECK(strstr(why, "more than 1024 options"));
}

static void check_canonical(const char *entry, const char *expected)
{
    char *env[] = {(char *)entry}, text[SLUICE_OPTION_TEXT_MAX] = "";
    CHECK(sluice_options_from_env(&options, env, 1, why, sizeof why));
    CHECK(sluice_option_canonical(&options, entry, text, sizeof text));
    CHECK_STR(text, expected);
}

/* Times are those of Slurm's --switches=N@TIME. */
static void check_fabric(void)
{
    static const struct {
        const char *value;
        enum sluice_fabric fabric;
        uint32_t wait_s;
        const char *canonical;
    } good[] = {
        {"any", SLUICE_FABRIC_ANY, SLUICE_FABRIC_NO_TIME, "any"},
        {"spread", SLUICE_FABRIC_SPREAD, SLUICE_FABRIC_NO_TIME, "spread"},
        {"block", SLUICE_FABRIC_BLOCK, SLUICE_FABRIC_NO_TIME, "block"},
        {"rail@5", SLUICE_FABRIC_RAIL, 300, "rail@5:00"},
        {"block@1:30", SLUICE_FABRIC_BLOCK, 90, "block@1:30"},
        {"block@1:00:05", SLUICE_FABRIC_BLOCK, 3605, "block@60:05"},
        {"block@1-1", SLUICE_FABRIC_BLOCK, 90000, "block@1500:00"},
        {"block@1-1:30", SLUICE_FABRIC_BLOCK, 91800, "block@1530:00"},
        {"block@1-0:0:7", SLUICE_FABRIC_BLOCK, 86407, "block@1440:07"},
        {"block@0", SLUICE_FABRIC_BLOCK, 0, "block@0:00"},
        {"block@30-0", SLUICE_FABRIC_BLOCK, SLUICE_FABRIC_MOST_S, "block@43200:00"},
    };
    static const char *const bad[] = {"",           "blocks",
                                      "bloc",       "any@5",
                                      "block@",     "block@-1",
                                      "block@5m",   "block@1:2:3:4",
                                      "block@1-",   "block@1-1-1",
                                      "block@1:",   "block@:1",
                                      "block@31-0", "block@99999999999999999999",
                                      "rail@1@2",   "spread@5"};
    char entry[96], expected[96];
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK(set("fabric", good[i].value));
        CHECK_INT(options.fabric, good[i].fabric);
        CHECK_INT(options.fabric_wait_s, good[i].wait_s);
        snprintf(entry, sizeof entry, "_SLURM_SPANK_OPTION_sluice_fabric=%s", good[i].value);
        snprintf(expected, sizeof expected, "_SLURM_SPANK_OPTION_sluice_fabric=%s", good[i].canonical);
        check_canonical(entry, expected);
        CHECK(set("fabric", good[i].canonical));
        CHECK_INT(options.fabric_wait_s, good[i].wait_s);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (set("fabric", bad[i])) {
            fprintf(stderr, "--fabric=%s was accepted\n", bad[i]);
            exit(1);
        }
        CHECK(strstr(why, "block, rail, spread or any") != NULL);
    }
    CHECK(set("segment", "12"));
    CHECK_INT(options.segment, 12);
    CHECK(!set("segment", "0"));
    CHECK(!set("segment", "65534"));
    CHECK(!set("segment", "4x"));
    check_canonical("_SLURM_SPANK_OPTION_sluice_segment=004", "_SLURM_SPANK_OPTION_sluice_segment=4");
}

static void check_roles(void)
{
    static const char *const bad[] = {"",
                                      "prefill",
                                      "prefill:",
                                      "prefill:0",
                                      "prefill:4,",
                                      ",prefill:4",
                                      "prefill:4,prefill:4",
                                      "pre-fill:4",
                                      "2nd:4",
                                      "a:1;b:2",
                                      "a:1 ,b:2",
                                      "a:1,b",
                                      "seventeen_letters:1",
                                      "a:4096,b:1",
                                      "a:99999999999999999999",
                                      "a:1,b:1,c:1,d:1,e:1,f:1,g:1,h:1,i:1",
                                      "a:1,b:1\n"};
    CHECK(set("gpu-role", "prefill:4,decode_2:12"));
    CHECK_INT(options.gpu_role_count, 2);
    CHECK_STR(options.gpu_roles[1].name, "decode_2");
    CHECK_INT(options.gpu_roles[1].gpus, 12);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (set("gpu-role", bad[i])) {
            fprintf(stderr, "--gpu-role=%s was accepted\n", bad[i]);
            exit(1);
        }
        CHECK(strstr(why, "prefill:4,decode:4"));
    }
    CHECK_INT(options.gpu_role_count, 2); /* as it was */
    CHECK(set("gpu-role", "learner:1"));
    CHECK_INT(options.gpu_role_count, 1);
    CHECK(set("gpu-role", "a:4095,sixteen_letters_:1"));
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu-role=a:01,b:002", "_SLURM_SPANK_OPTION_sluice_gpu_role=a:1,b:2");
    CHECK(sluice_is_role_name("decode") && sluice_is_role_name("_1"));
    CHECK(!sluice_is_role_name("") && !sluice_is_role_name("decode:4") && !sluice_is_role_name("4") &&
          !sluice_is_role_name("seventeen_letters"));
}

/* What nodes read is one spelling, whatever was admitted. */
static void check_spellings(void)
{
    static const char *const shares[] = {"_share=50", "_share=50%", "_share=050", "_share=050%"};
    char entry[96], text[SLUICE_OPTION_TEXT_MAX], small[8];
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        snprintf(entry, sizeof entry, "_SLURM_SPANK_OPTION_sluice_gpu%s", shares[i]);
        check_canonical(entry, "_SLURM_SPANK_OPTION_sluice_gpu_share=50");
        entry[sizeof "_SLURM_SPANK_OPTION_sluice_gpu" - 1] = '-';
        check_canonical(entry, "_SLURM_SPANK_OPTION_sluice_gpu_share=50");
    }
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu-mem=10240", "_SLURM_SPANK_OPTION_sluice_gpu_mem=10G");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu_mem=0.5g", "_SLURM_SPANK_OPTION_sluice_gpu_mem=512M");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu_affinity=numa", "_SLURM_SPANK_OPTION_sluice_gpu_affinity=numa");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu_spread=", "_SLURM_SPANK_OPTION_sluice_gpu_spread=(null)");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu-power=0400", "_SLURM_SPANK_OPTION_sluice_gpu_power=400W");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu_profile=", "_SLURM_SPANK_OPTION_sluice_gpu_profile=(null)");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gpu-profile=030", "_SLURM_SPANK_OPTION_sluice_gpu_profile=30");
    check_canonical("_SLURM_SPANK_OPTION_sluice_gang=a:02", "_SLURM_SPANK_OPTION_sluice_gang=a:2");
    check_canonical("_SLURM_SPANK_OPTION_sluice_checkpoint=auto", "_SLURM_SPANK_OPTION_sluice_checkpoint=auto");
    check_canonical("_SLURM_SPANK_OPTION_sluice_checkpoint-interval=20m",
                    "_SLURM_SPANK_OPTION_sluice_checkpoint_interval=1200s");
    check_canonical("_SLURM_SPANK_OPTION_sluice_checkpoint_interval=daly",
                    "_SLURM_SPANK_OPTION_sluice_checkpoint_interval=daly");
    CHECK(!sluice_option_canonical(&options, "_SLURM_SPANK_OPTION_other_gpu_share=1", text, sizeof text));
    CHECK(!sluice_option_canonical(&options, "_SLURM_SPANK_OPTION_sluice_unknown=1", text, sizeof text));
    CHECK(!sluice_option_canonical(&options, "_SLURM_SPANK_OPTION_sluice_gang=a:2", small, sizeof small));
}

/* slurmd puts SPANK_ before a string unless it is there: a prolog would see an option that admission has not. */
static void check_disguises(void)
{
    char *disguised[] = {"SPANK__SLURM_SPANK_OPTION_sluice_gpu_share=90"};
    CHECK(!sluice_options_from_env(&options, disguised, 1, why, sizeof why));
    CHECK_STR(why,
              "SPANK__SLURM_SPANK_OPTION_sluice_gpu_share=90: srun, sbatch and salloc do not send an option like this");
    /* What only slurmctld says, as prologs have it. */
    static const char *const said[] = {"SPANK_SLUICE_GPU_ROLES=a n1=0", "SPANK_SLUICE_GPU_POWER=700"};
    for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
        char *env[] = {(char *)said[i]};
        CHECK(!sluice_options_from_env(&options, env, 1, why, sizeof why));
        CHECK(strstr(why, "do not send an option like this"));
    }
}

/* A prolog whose environment is too large for the kernel does not start, and Slurm drains the node. */
static void check_sizes_in_all(void)
{
    static char most[SLUICE_SPANK_ENV_MAX], half[SLUICE_SPANK_ENV_MAX / 2 + 1];
    memset(most, 'x', sizeof most - 1);
    memset(half, 'y', sizeof half - 1);
    char *one[] = {most}, *two[] = {half, half};
    CHECK(sluice_options_from_env(&options, one, 1, why, sizeof why));
    CHECK(!sluice_options_from_env(&options, two, 2, why, sizeof why));
    CHECK_STR(why, "the options of the job's SPANK plugins are larger than 64 KiB in all");
}

/* As policy/checkpoint.py reads them. */
static void check_words(void)
{
    static const struct {
        enum sluice_checkpoint checkpoint;
        uint32_t seconds;
        const char *words;
    } cases[] = {
        {SLUICE_CHECKPOINT_NO, 0, "sluice:checkpoint=no"},
        {SLUICE_CHECKPOINT_APP, 0, "sluice:checkpoint=app"},
        {SLUICE_CHECKPOINT_SYSTEM, 0, "sluice:checkpoint=system"},
        {SLUICE_CHECKPOINT_APP, 1200, "sluice:checkpoint=1200s"},
        {SLUICE_CHECKPOINT_APP, SLUICE_CHECKPOINT_DALY, "sluice:checkpoint=daly"},
    };
    char text[SLUICE_OPTION_TEXT_MAX], small[8];
    struct sluice_options asked = {0};
    CHECK(!sluice_checkpoint_words(&asked, text, sizeof text));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        asked = (struct sluice_options){.checkpoint = cases[i].checkpoint, .checkpoint_s = cases[i].seconds};
        CHECK(sluice_checkpoint_words(&asked, text, sizeof text));
        CHECK_STR(text, cases[i].words);
        CHECK(!sluice_checkpoint_words(&asked, small, sizeof small));
    }
}

int main(void)
{
    check_sizes();
    check_options();
    check_messages();
    check_environment();
    check_spellings();
    check_fabric();
    check_roles();
    check_disguises();
    check_words();
    check_sizes_in_all();
    for (size_t i = 0; i < 14; i++)
        CHECK(sluice_option_name(i) != NULL);
    CHECK(sluice_option_name(14) == NULL);
    return 0;
}
