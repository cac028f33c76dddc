/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/admission.h"
#include "admission/rate.h"

#include "check.h"

static const int64_t now = 1800000000;
static const struct sluice_slurm slurm_22_05 = {.now = 1800000000, .places = true};
static const struct sluice_slurm slurm_24_11 = {.now = 1800000000, .places = true, .slash = true};
static const struct sluice_slurm slurm_24_11_several = {
    .now = 1800000000, .places = true, .slash = true, .several_sharing = true};

static const char policy[] = "[global]\n"
                             "cpus-per-gpu-milli = 4000\n"
                             "memory-mib-per-gpu = 8192\n"
                             "[class big]\n"
                             "gpu-types = h100,h200\n"
                             "cpus-per-gpu-milli = 12000\n"
                             "gpu-memory-mib = 81920\n"
                             "power-least-w = 200\n"
                             "power-most-w = 700\n"
                             "[class small]\n"
                             "gpu-types = l4\n"
                             "gpu-memory-mib = 20480\n"
                             "[tenant open]\n"
                             "[tenant near]\n"
                             "one-block-s = 600\n"
                             "[tenant memory]\n"
                             "gpu-memory-mib-per-gpu = 20480\n"
                             "gpu-memory-mib-per-job = 40960\n"
                             "[tenant few]\n"
                             "gpus-per-job = 4\n"
                             "run-time-s = 7200\n"
                             "[tenant smallonly]\n"
                             "classes = small\n"
                             "[tenant bigonly]\n"
                             "classes = big\n"
                             "class.big.gpus-per-job = 4\n"
                             "class.big.run-time-s = 3600\n"
                             "class.big.power-w = 400\n"
                             "class.big.power-most-w = 500\n"
                             "class.small.power-w = 60\n"
                             "[tenant atonce]\n"
                             "class.small.gpus-limit = 16\n"
                             "[tenant smallatonce]\n"
                             "classes = small\n"
                             "class.small.gpus-limit = 16\n"
                             "[tenant both]\n"
                             "classes = big\n"
                             "features = secure\n"
                             "[tenant none]\n"
                             "classes =\n"
                             "[tenant strict]\n"
                             "gang = no\n"
                             "deadline = no\n"
                             "partitions = gpu,fast\n"
                             "qos = silver\n"
                             "features = secure\n"
                             "expires-s = 1900000000\n"
                             "[tenant expired]\n"
                             "expires-s = 1700000000\n";

static struct sluice_rules *rules;

static void read_policy(void)
{
    static char text[4096];
    struct sluice_error_text error;
    int length = snprintf(text, sizeof text, "sluice-policy 1.0\ngenerated-s = 1\nsource = test\n%s", policy);
    snprintf(text + length, sizeof text - (size_t)length, "checksum = crc32:%08x\n",
             sluice_crc32(text, (size_t)length));
    if (sluice_rules_parse(text, strlen(text), &rules, &error)) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
}

static struct sluice_admission admission;

static void admit(const char *account, const struct sluice_slurm *slurm, const struct sluice_submission *submission)
{
    const struct sluice_tenant *tenant = account ? sluice_rules_tenant(rules, account) : NULL;
    CHECK(!account || tenant);
    memset(&admission, 0xa5, sizeof admission); /* nothing may be left to what was there */
    sluice_admit(account ? rules : NULL, tenant, slurm, submission, &admission);
}

static void expect_refused(const char *what, const char *part)
{
    if (admission.refusal == SLUICE_ADMITTED || !strstr(admission.message, part)) {
        fprintf(stderr, "%s: expected a refusal with \"%s\", got %d \"%s\"\n", what, part, admission.refusal,
                admission.message);
        exit(1);
    }
}

static void expect_admitted(const char *what)
{
    if (admission.refusal != SLUICE_ADMITTED) {
        fprintf(stderr, "%s: refused: %s\n", what, admission.message);
        exit(1);
    }
}

/* --gpu-mem=10G with every way to ask for GPUs; NODE and TASK are what tres_per_node and tres_per_task become. */
#define MEM .options = {.gpu_mem_mib = 10240}
#define PER_JOB(text) .tres = {text, NULL, NULL, NULL}
#define PER_NODE(text) .tres = {NULL, text, NULL, NULL}
#define PER_SOCKET(text) .tres = {NULL, NULL, text, NULL}
#define PER_TASK(text) .tres = {NULL, NULL, NULL, text}
#define NODES(n) .min_nodes = (n), .max_nodes = (n)

static const struct gpu_mem_case {
    const char *name;
    struct sluice_submission submission;
    const char *node, *task;  /* 22.05 and 24.11 without several; in 22.05's words. NULL: refused */
    const char *refused;      /* words of the refusal there */
    const char *task_several; /* with several_sharing, where that differs: tres_per_task in 24.11's words */
    uint32_t min_nodes, max_nodes;
} gpu_mem_cases[] = {
    {"alone", {MEM}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"-N4", {MEM, NODES(4)}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"-n4", {MEM, .tasks = 4}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gpus=1", {MEM, PER_JOB("gres:gpu:1")}, "gres:shard:10240", "", NULL, NULL, 1, 1},
    {"--gpus=1 -N1", {MEM, NODES(1), PER_JOB("gres:gpu:1")}, "gres:shard:10240", "", NULL, NULL, 1, 1},
    {"--gpus=1 -N2", {MEM, NODES(2), PER_JOB("gres:gpu:1")}, NULL, NULL, "another number of nodes", NULL, 0, 0},
    {"--gpus=1 -N1-4",
     {MEM, .min_nodes = 1, .max_nodes = 4, PER_JOB("gres:gpu:1")},
     "gres:shard:10240",
     "",
     NULL,
     NULL,
     1,
     1},
    {"--gpus=2", {MEM, PER_JOB("gres:gpu:2")}, NULL, NULL, "-N 2 --gpus-per-node=1", NULL, 0, 0},
    {"--gpus=2 -N2", {MEM, NODES(2), PER_JOB("gres:gpu:2")}, "gres:shard:10240", "", NULL, NULL, 2, 2},
    {"--gpus=3 -N2", {MEM, NODES(2), PER_JOB("gres:gpu:3")}, NULL, NULL, "one GPU on each", NULL, 0, 0},
    {"--gpus=3 --gpus-per-node=1",
     {MEM, .tres = {"gres:gpu:3", "gres:gpu:1", NULL, NULL}},
     "gres:shard:10240",
     "",
     NULL,
     NULL,
     3,
     3},
    {"--gpus=3 --gpus-per-node=1 -N2",
     {MEM, NODES(2), .tres = {"gres:gpu:3", "gres:gpu:1", NULL, NULL}},
     NULL,
     NULL,
     "another number of nodes",
     NULL,
     0,
     0},
    {"--gpus-per-node=1", {MEM, PER_NODE("gres:gpu:1")}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gres=gpu", {MEM, PER_NODE("gres:gpu")}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gres=gpu,nic:2", {MEM, PER_NODE("gres:gpu,gres:nic:2")}, "gres:nic:2,gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gpus-per-node=2", {MEM, PER_NODE("gres:gpu:2")}, NULL, NULL, "of only one GPU of a node", NULL, 0, 0},
    {"--gpus-per-socket=1", {MEM, PER_SOCKET("gres:gpu:1")}, NULL, NULL, "sockets", NULL, 0, 0},
    {"--gpus-per-task=1", {MEM, PER_TASK("gres:gpu:1")}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gpus-per-task=1 -n1", {MEM, .tasks = 1, PER_TASK("gres:gpu:1")}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--gpus-per-task=1 -n4",
     {MEM, .tasks = 4, PER_TASK("gres:gpu:1")},
     NULL,
     NULL,
     "one task on each node",
     "gres/shard:10240",
     0,
     0},
    {"--gpus-per-task=1 -n4 -N4",
     {MEM, .tasks = 4, NODES(4), PER_TASK("gres:gpu:1")},
     "gres:shard:10240",
     "",
     NULL,
     NULL,
     0,
     0},
    {"--gpus-per-task=1 -n4 -N2",
     {MEM, .tasks = 4, NODES(2), PER_TASK("gres:gpu:1")},
     NULL,
     NULL,
     "one task on each node",
     "gres/shard:10240",
     0,
     0},
    {"--gpus-per-task=1 --ntasks-per-node=1",
     {MEM, .tasks = 4, .tasks_per_node = 1, PER_TASK("gres:gpu:1")},
     "gres:shard:10240",
     "",
     NULL,
     NULL,
     0,
     0},
    {"--gpus-per-task=1 --ntasks-per-node=2",
     {MEM, NODES(2), .tasks_per_node = 2, PER_TASK("gres:gpu:1")},
     NULL,
     NULL,
     "one task on each node",
     "gres/shard:10240",
     0,
     0},
    {"--gpus-per-task=2", {MEM, .tasks = 1, PER_TASK("gres:gpu:2")}, NULL, NULL, "--gpus-per-task=2", NULL, 0, 0},
    {"--gpus=4 --gpus-per-task=1 -n4",
     {MEM, .tasks = 4, .tres = {"gres:gpu:4", NULL, NULL, "gres:gpu:1"}},
     NULL,
     NULL,
     "one task on each node",
     "gres/shard:10240",
     0,
     0},
    {"--gpus=4 --gpus-per-task=1 -n3",
     {MEM, .tasks = 3, .tres = {"gres:gpu:4", NULL, NULL, "gres:gpu:1"}},
     NULL,
     NULL,
     "contradict",
     NULL,
     0,
     0},
    {"--ntasks-per-gpu=2", {MEM, .tasks = 4, .tasks_per_gpu = 2}, NULL, NULL, "--ntasks-per-gpu", NULL, 0, 0},
    {"--gres=shard:5", {MEM, PER_NODE("gres:shard:5")}, NULL, NULL, "two ways", NULL, 0, 0},
    {"--gres=mps:50", {MEM, PER_NODE("gres:mps:50")}, NULL, NULL, "two ways", NULL, 0, 0},
    {"--exclusive", {MEM, .whole_nodes = true}, NULL, NULL, "--exclusive", NULL, 0, 0},
    {"--gpus=h100:1,l4:1", {MEM, PER_JOB("gres:gpu:h100:1,gres:gpu:l4:1")}, NULL, NULL, "several types", NULL, 0, 0},
    {"srun --gpus=1", {MEM, .step_at_once = true, PER_JOB("gres:gpu:1")}, NULL, NULL, "srun's own step", NULL, 0, 0},
    {"srun", {MEM, .step_at_once = true, NODES(2)}, "gres:shard:10240", "", NULL, NULL, 0, 0},
    {"--cpus-per-gpu --mem-per-gpu",
     {MEM, PER_JOB("gres:gpu:1"), .cpus_per_tres = "gres:gpu:8", .mem_per_tres = "gres:gpu:4096"},
     "gres:shard:10240",
     "",
     NULL,
     NULL,
     1,
     1},
};

static void to_slash(const char *text, char *slashed, size_t size)
{
    snprintf(slashed, size, "%s", text);
    for (char *at = slashed; (at = strstr(at, "gres:")); at += 5)
        at[4] = '/';
}

static void check_gpu_mem_case(const struct gpu_mem_case *one, const struct sluice_slurm *slurm)
{
    char expected[128];
    admit(NULL, slurm, &one->submission);
    if (slurm->several_sharing && one->task_several) {
        expect_admitted(one->name);
        CHECK_STR(admission.tres[SLUICE_PER_TASK], one->task_several);
        CHECK_STR(admission.tres[SLUICE_PER_NODE], "");
        CHECK(admission.one_task_per_sharing && admission.clear_binding);
        return;
    }
    if (!one->node) {
        expect_refused(one->name,
                       slurm->several_sharing && strstr(one->refused, "of only one GPU") ? "one each" : one->refused);
        CHECK_INT(admission.refusal, SLUICE_REFUSED_REQUEST);
        CHECK(strstr(admission.message, "10G") || strstr(admission.message, "contradict"));
        return;
    }
    expect_admitted(one->name);
    CHECK(admission.set_tres && !admission.one_task_per_sharing);
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "");
    CHECK_STR(admission.tres[SLUICE_PER_SOCKET], "");
    to_slash(one->node, expected, sizeof expected);
    /* What the user wrote stays in his words; only the shards are in Slurm's. */
    CHECK_STR(admission.tres[SLUICE_PER_NODE],
              slurm->slash && !strchr(one->node, ',') ? expected : admission.tres[SLUICE_PER_NODE]);
    if (!slurm->slash)
        CHECK_STR(admission.tres[SLUICE_PER_NODE], one->node);
    CHECK_STR(admission.tres[SLUICE_PER_TASK], one->task);
    CHECK_INT(admission.min_nodes, one->min_nodes);
    CHECK_INT(admission.max_nodes, one->max_nodes);
    CHECK_INT(admission.set_cpus_per_tres, one->submission.cpus_per_tres != NULL);
    CHECK_INT(admission.min_cpus_per_node, one->submission.cpus_per_tres ? 8 : 0);
    CHECK_INT(admission.memory_per_node_mib, one->submission.mem_per_tres ? 4096 : 0);
}

static void check_gpu_mem(void)
{
    for (size_t i = 0; i < sizeof gpu_mem_cases / sizeof gpu_mem_cases[0]; i++) {
        check_gpu_mem_case(&gpu_mem_cases[i], &slurm_22_05);
        check_gpu_mem_case(&gpu_mem_cases[i], &slurm_24_11);
        check_gpu_mem_case(&gpu_mem_cases[i], &slurm_24_11_several);
    }
    admit(NULL, &slurm_22_05, &(struct sluice_submission){MEM, PER_NODE("gres:gpu:h100:1"), .features = "nvlink&ib"});
    CHECK_STR(admission.features, "nvlink&ib&h100");
    admit(NULL, &slurm_22_05, &(struct sluice_submission){MEM, PER_NODE("gres:gpu:h100:1"), .features = "h100"});
    CHECK_STR(admission.features, "");
    admit(NULL, &slurm_22_05, &(struct sluice_submission){MEM, PER_NODE("gres:gpu:h100:1"), .features = "a|b"});
    expect_refused("alternatives", "joins features by &");
    admit(NULL, &slurm_24_11, &(struct sluice_submission){MEM, PER_NODE("gres/gpu:2")});
    expect_refused("24.11", "MULTIPLE_SHARING_GRES_PJ");
}

static void check_malformed(void)
{
    static const char *const bad[] = {
        "gres:gpu:-1",
        "gres:gpu:+1",
        "gres:gpu: 1",
        "gres:gpu:",
        "gres:gpu::1",
        "gres:gpu:h100:",
        "gres:gpu:1:h100",
        "gres:gpu:a:b:1",
        "gpu:1\n",
        "gres:gpu:1\x1b",
        "gres:gpu:4294967297",
        "gres:gpu:-2",
        "gres:gpu:18446744073709551617",
        "gres:gpu:8P",
        "foogres:gpu:8",
        "x,ygres:gpu:1",
        "gres:agres:gpu:1",
        "gres:gpu:h100:99999999999999999999",
        "gres:\xff\xfe:1",
        "gpu;1",
        "gres:gpu(1)",
        "gres:gpu:a:1,gres:gpu:b:1,gres:gpu:c:1,gres:gpu:d:1,gres:gpu:e:1,gres:gpu:f:1,gres:gpu:g:1,gres:gpu:h:1,gres:"
        "gpu:i:1",
    };
    char because[256];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        admit(NULL, &slurm_22_05, &(struct sluice_submission){PER_NODE(bad[i])});
        snprintf(because, sizeof because, "--gres: ");
        expect_refused(bad[i], because);
        for (const char *at = admission.message; *at; at++)
            CHECK(*at >= ' ' && *at <= '~');
    }
    static char huge[SLUICE_TRES_TEXT_MAX + 1];
    memset(huge, 'a', sizeof huge - 1);
    admit(NULL, &slurm_22_05, &(struct sluice_submission){PER_NODE(huge)});
    expect_refused("huge", "too long");

    static const char *const good[] = {
        "gres:gpu:2k", "gres/gpu:h100=2", "gres:gpu:h100_1g.10gb:1", "gpu",  "license:matlab:2", "gres:none",
        "bb:cap=3G",   "gres:gpu:0",      ",,gres:nic:1,",           "cpu:4"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        admit(NULL, &slurm_22_05, &(struct sluice_submission){PER_NODE(good[i])});
        expect_admitted(good[i]);
        CHECK(!admission.set_tres && !admission.message[0]);
    }
}

#define REFUSED(account, part, ...)                                                                                    \
    do {                                                                                                               \
        admit(account, &slurm_22_05, &(struct sluice_submission){__VA_ARGS__});                                        \
        expect_refused(account ": " #__VA_ARGS__, part);                                                               \
    } while (0)
#define ADMITTED(account, ...)                                                                                         \
    do {                                                                                                               \
        admit(account, &slurm_22_05, &(struct sluice_submission){__VA_ARGS__});                                        \
        expect_admitted(account ": " #__VA_ARGS__);                                                                    \
    } while (0)

static void check_memory_limits(void)
{
    ADMITTED("memory", .options = {.gpu_mem_mib = 20480});
    ADMITTED("memory", PER_NODE("gres:shard:20480"), NODES(2));
    REFUSED("memory", "ask for --gpu-mem=20G", .options = {.gpu_mem_mib = 20481});
    REFUSED("memory", "20481M of one GPU", PER_NODE("gres:shard:20481"));
    REFUSED("memory", "20481M of one GPU", PER_JOB("gres:shard:20481"), NODES(1));
    REFUSED("memory", "60G of GPU memory on 3 GPUs", NODES(3), .options = {.gpu_mem_mib = 20480});
    REFUSED("memory", "whole GPUs", PER_NODE("gres:gpu:1"));
    REFUSED("memory", "whole GPUs", PER_NODE("gres:gpu:h100:1"));
    REFUSED("memory", "whole GPUs", PER_NODE("gres:gpu:mi300x:1"));
    ADMITTED("memory", PER_NODE("gres:gpu:l4:2"));
    ADMITTED("memory", PER_NODE("gres:gpu:2"), .features = "l4");
    REFUSED("memory", "whole GPUs with 60G of memory", PER_NODE("gres:gpu:l4:3"));
    REFUSED("memory", "whole GPUs", PER_NODE("gres:mps:10"));
    REFUSED("memory", "whole GPUs", .tasks = 4, .tasks_per_gpu = 2);
    REFUSED("memory", "whole GPUs", .whole_nodes = true);
    REFUSED("memory", "80G of one GPU", .tasks = 8, PER_TASK("gres:shard:10240"), NODES(1));
    ADMITTED("memory", .tasks = 8);
    /* an open number of nodes is bounded, not refused */
    ADMITTED("memory", .tasks = 8, .options = {.gpu_mem_mib = 20480});
    CHECK_INT(admission.max_nodes, 2);
    REFUSED("memory", "GPU memory on 8 GPUs", .tasks = 8, .tasks_per_node = 1, .options = {.gpu_mem_mib = 20480});
    ADMITTED("memory", .min_cpus = 64, .options = {.gpu_mem_mib = 20480});
    CHECK_INT(admission.max_nodes, 2);
    admit("memory", &slurm_24_11_several,
          &(struct sluice_submission){.tasks = 2, PER_TASK("gres/gpu:1"), .options = {.gpu_mem_mib = 20480}});
    expect_admitted("split");
    admit("memory", &slurm_24_11_several,
          &(struct sluice_submission){.tasks = 3, PER_TASK("gres/gpu:1"), .options = {.gpu_mem_mib = 20480}});
    expect_refused("split", "60G of GPU memory on 3 GPUs");
}

/* --gpus and --gpus-per-task: from 23.11 on the number of tasks prevails, which changes of a job may raise. */
static void check_gpus_by_task(void)
{
    const struct {
        struct sluice_submission submission;
        const char *refused;
    } cases[] = {
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:4"}, .tasks = 1}, NULL},
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:1"}, .tasks = 4, NODES(1)}, NULL},
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:2"}}, NULL},
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:4"}, .min_nodes = 1, .max_nodes = 4}, NULL},
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:4"}, NODES(4)}, NULL}, /* Slurm keeps one task */
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:4"}, .tasks = 4}, "16 GPUs"},
        {{.tres = {"gres/gpu:4", NULL, NULL, "gres/gpu:4"}, .tasks_per_node = 4, NODES(1)}, "16 GPUs"},
        {{.tres = {NULL, NULL, NULL, "gres/gpu:4"}, .tasks = 1, .tasks_per_node = 4, NODES(1)}, "16 GPUs"},
        {{.tres = {NULL, NULL, NULL, "gres/gpu:4"}, .tasks = 1, NODES(4), .admitted_before = true}, "16 GPUs"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        admit("few", &slurm_24_11, &cases[i].submission);
        if (cases[i].refused)
            expect_refused("GPUs by task", cases[i].refused);
        else
            expect_admitted("GPUs by task");
    }
    ADMITTED("few", PER_TASK("gres:gpu:4"), .tasks = 1, .tasks_per_node = 4, NODES(1)); /* 22.05 keeps to -n */
}

static void check_gpu_limits(void)
{
    ADMITTED("few", PER_JOB("gres:gpu:4"));
    REFUSED("few", "5 GPUs", PER_JOB("gres:gpu:5"));
    REFUSED("few", "6 GPUs (on 2 nodes)", PER_NODE("gres:gpu:3"), NODES(2));
    REFUSED("few", "5 GPUs (on 1 node):", PER_NODE("gres:gpu:5"), NODES(1));
    REFUSED("few", "6 GPUs", PER_JOB("gres:gpu:h100:3,gres:gpu:l4:3"));
    ADMITTED("few", PER_NODE("gres:gpu:4,gres:gpu:4"), NODES(1)); /* --gpus-per-node and --gres */
    REFUSED("few", "8 GPUs (on 1 node):", PER_NODE("gres:gpu:4,gres:gpu:8"), NODES(1));
    ADMITTED("few", PER_NODE("gres:gpu:8,craynetwork:1,gres:gpu:4"), NODES(1)); /* the last one, as in Slurm */
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "craynetwork:1,gres:gpu:4");
    REFUSED("few", "--gres=mps with gpu", PER_NODE("gres:gpu:2,gres:gpu:4,gres:mps:50"), NODES(1));
    char longest[SLUICE_TRES_TEXT_MAX] = "";
    for (size_t i = 0, length = 0; i < 2 * SLUICE_GPU_TYPES_MAX; i++)
        length += (size_t)sprintf(longest + length, "%sgpu:%c---------------------:%s", i ? "," : "",
                                  'a' + (char)(i / 2), i % 2 ? "1k" : "2");
    ADMITTED("open", PER_NODE(longest));
    CHECK(strstr(admission.tres[SLUICE_PER_NODE], ",gres:gpu:h---------------------:1024"));
    admit(NULL, &slurm_22_05, &(struct sluice_submission){PER_NODE("gres:gpu:8,gres:gpu:4")});
    expect_admitted("of nobody's tenant");
    CHECK(!admission.set_tres);
    REFUSED("few", "8 GPUs", PER_TASK("gres:gpu:1"), .tasks = 8);
    REFUSED("few", "8 GPUs", PER_SOCKET("gres:gpu:2"), .sockets_per_node = 2, NODES(2));
    REFUSED("few", "5 GPUs", .tasks = 10, .tasks_per_gpu = 2);
    REFUSED("few", "contradict each other", PER_TASK("gres:gpu:1"), .tasks = 1, .tasks_per_gpu = 8);
    REFUSED("few", "5 GPUs", NODES(5), PER_NODE("gres:shard:100"));
    REFUSED("few", "5 GPUs", PER_NODE("gres:mps:500"), NODES(1));
    REFUSED("few", "--exclusive", .whole_nodes = true);
    REFUSED("few", "4294967296 GPUs", PER_NODE("gres:gpu:4294967296"));
    REFUSED("few", "288230376151711744 GPUs", PER_TASK("gres:gpu:4294967296"), .tasks_per_node = 65533,
            NODES(4294967293));
    REFUSED("few", "288230376151711744 GPUs", PER_NODE("gres:gpu:4294967296"), NODES(4294967293));
    REFUSED("few", "288230376151711744 GPUs", PER_SOCKET("gres:gpu:4294967296"), .sockets_per_node = 65533,
            NODES(4294967293));
    ADMITTED("few", PER_NODE("gres:gpu:2"), .tasks = 16);
    CHECK_INT(admission.max_nodes, 2);
    ADMITTED("few", PER_NODE("gres:gpu:2"));
    CHECK_INT(admission.max_nodes, 0);
    ADMITTED("open", PER_NODE("gres:gpu:8"), .tasks = 4000000000); /* no limit bounds nodes */
    CHECK_INT(admission.max_nodes, 0);

    check_gpus_by_task();

    REFUSED("few", "ask for --time=02:00:00 or less", .time_limit = 121);
    REFUSED("few", "--time=UNLIMITED", .time_limit = UINT32_MAX);
    ADMITTED("few", .time_limit = 120);
    CHECK_INT(admission.time_limit, 0);
    ADMITTED("few", .tasks = 1);
    CHECK_INT(admission.time_limit, 120);
}

static void check_classes(void)
{
    ADMITTED("bigonly", PER_NODE("gres:gpu:h100:2,gres:gpu:h200:2"));
    CHECK_INT(admission.time_limit, 60);
    REFUSED("bigonly", "6 GPUs of class big", PER_NODE("gres:gpu:h100:3,gres:gpu:h200:3"));
    REFUSED("bigonly", "not open to account bigonly; it may use h100, h200", PER_NODE("gres:gpu:l4:1"));
    REFUSED("bigonly", "belong to no class", PER_NODE("gres:gpu:mi300x:1"));
    ADMITTED("atonce", PER_NODE("gres:gpu:mi300x:1"));
    REFUSED("atonce", "takes it for h100", PER_NODE("gres:gpu:xeeexeeexfee:1")); /* the same gres_build_id */
    REFUSED("atonce", "takes it for h100", PER_NODE("gres:gpu:h100:1,gres:gpu:xeeexeeexfee:8"));
    REFUSED("bigonly", "on GPUs of class big for 01:00:00", PER_NODE("gres:gpu:h100:1"), .time_limit = 61);
    ADMITTED("bigonly", .time_limit = 10000); /* no GPUs */
    REFUSED("bigonly", "name the type, as in --gres=gpu:h100:1; it may be one of: h100 h200", PER_NODE("gres:gpu:1"));
    ADMITTED("bigonly", PER_NODE("gres:gpu:2"), .features = "ib&h200");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:h200:2");
    REFUSED("bigonly", "not open", PER_NODE("gres:gpu:2"), .features = "l4");
    REFUSED("bigonly", "5 GPUs of class big", PER_JOB("gres:gpu:5"), .features = "h200");
    REFUSED("bigonly", "5 GPUs of class big", PER_JOB("gres:gpu:5"));
    REFUSED("bigonly", "and GPUs without", PER_JOB("gres:gpu:h100:1,gres:gpu:1"));
    ADMITTED("bigonly", .options = {.gpu_mem_mib = 100});
    CHECK_STR(admission.features, "h100|h200");
    ADMITTED("bigonly", .options = {.gpu_mem_mib = 100}, .features = "ib");
    CHECK_STR(admission.features, "ib&(h100|h200)");
    REFUSED("bigonly", "cannot be added", .options = {.gpu_mem_mib = 100}, .features = "ib|nvlink");
    /* added to what is joined by &, and to nothing that merely ends with it */
    ADMITTED("bigonly", .options = {.gpu_mem_mib = 100}, .features = "(ib|nvlink)");
    CHECK_STR(admission.features, "(ib|nvlink)&(h100|h200)");
    REFUSED("bigonly", "cannot be added", PER_NODE("gres:shard:100"), .features = "l4*1&(h100|h200)");
    REFUSED("bigonly", "cannot be added", PER_NODE("gres:shard:100"), .features = "[l4*1&ib*1]&(h100|h200)");
    REFUSED("bigonly", "cannot be added", PER_NODE("gres:shard:100"), .features = "l4|ib&(h100|h200)");
    ADMITTED("both", .options = {.gpu_mem_mib = 100}, .features = "ib");
    CHECK_STR(admission.features, "ib&secure&(h100|h200)");
    ADMITTED("both", PER_NODE("gres:shard:100"), .features = "ib&secure&(h100|h200)");
    CHECK_STR(admission.features, "");
    /* what was completed once is left alone */
    ADMITTED("bigonly", PER_NODE("gres:shard:100"), .features = "ib&(h100|h200)");
    CHECK_STR(admission.features, "");
    ADMITTED("bigonly", PER_NODE("gres:shard:100"), .features = "h100|h200");
    CHECK_STR(admission.features, "");
    ADMITTED("bigonly", .options = {.gpu_mem_mib = 100}, .features = "ib&h100");
    ADMITTED("bigonly", PER_NODE("gres:gpu:h100:2"), .tasks = 16);
    CHECK_INT(admission.max_nodes, 2);

    ADMITTED("smallonly", PER_NODE("gres:gpu:3"), NODES(2));
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:l4:3");
    ADMITTED("smallonly", PER_NODE("gres:nic:1,gres:gpu:3"));
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:nic:1,gres:gpu:l4:3");
    ADMITTED("smallonly", .options = {.gpu_mem_mib = 100});
    CHECK_STR(admission.features, "l4");
    REFUSED("smallonly", "--exclusive", .whole_nodes = true);
    /* limits on GPUs running at once are Slurm's to keep, by type */
    REFUSED("atonce", "name the type", PER_NODE("gres:gpu:1"));
    REFUSED("atonce", "name the type", .tasks = 4, .tasks_per_gpu = 2);
    REFUSED("atonce", "--exclusive", .whole_nodes = true);
    ADMITTED("atonce", PER_NODE("gres:gpu:l4:1"));
    ADMITTED("atonce", PER_NODE("gres:gpu:1"), .features = "l4");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:l4:1");
    ADMITTED("atonce", .options = {.gpu_mem_mib = 100});
    CHECK_STR(admission.features, "");
    ADMITTED("smallatonce", PER_JOB("gres:gpu:20"));
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "gres:gpu:l4:20");
    REFUSED("none", "may use none", PER_NODE("gres:gpu:1"));
    REFUSED("none", "no GPUs at all", PER_NODE("gres:gpu:h100:1"));
    ADMITTED("none", .tasks = 4);
    ADMITTED("open", PER_NODE("gres:gpu:mi300x:64"), .whole_nodes = true);
}

/* Slurm looks for nodes with the preferred features instead of those of the constraint. */
static void check_preferences(void)
{
    ADMITTED("bigonly", .options = {.gpu_mem_mib = 100}, .prefer = "l4");
    CHECK_STR(admission.features, "h100|h200");
    CHECK_STR(admission.prefer, "l4&(h100|h200)");
    ADMITTED("bigonly", PER_NODE("gres:shard:100"), .features = "h100|h200", .prefer = "l4&(h100|h200)");
    CHECK_STR(admission.features, "");
    CHECK_STR(admission.prefer, "");
    ADMITTED("bigonly", PER_NODE("gres:shard:100"), .features = "h200", .prefer = "ib");
    CHECK_STR(admission.features, "");
    CHECK_STR(admission.prefer, "ib&h200");
    REFUSED("bigonly", "write a --prefer that joins features by & only", .options = {.gpu_mem_mib = 100},
            .prefer = "[l4*1&ib*1]");
    ADMITTED("strict", .tasks = 1, .prefer = "ib");
    CHECK_STR(admission.features, "secure");
    CHECK_STR(admission.prefer, "ib&secure");
    ADMITTED("strict", .tasks = 1, .prefer = "ib&(a|b)");
    CHECK_STR(admission.prefer, "ib&(a|b)&secure");
    REFUSED("strict", "--prefer", .tasks = 1, .prefer = "ib|secure");
    REFUSED("strict", "--prefer", .tasks = 1, .prefer = "ib*1&secure");
    /* whole GPUs whose memory is known by the constraint only */
    ADMITTED("memory", PER_NODE("gres:gpu:2"), .features = "l4", .prefer = "h100");
    CHECK_STR(admission.prefer, "h100&l4");
    ADMITTED("memory", PER_NODE("gres:gpu:l4:2"), .prefer = "h100");
    CHECK_STR(admission.prefer, "");
    ADMITTED("bigonly", PER_NODE("gres:gpu:h100:2"), .prefer = "l4");
    CHECK_STR(admission.prefer, "");
    admit(NULL, &slurm_22_05, &(struct sluice_submission){MEM, PER_NODE("gres:gpu:h100:1"), .prefer = "ib"});
    expect_admitted("a type with --gpu-mem");
    CHECK_STR(admission.prefer, "ib&h100");
    ADMITTED("open", .options = {.gpu_mem_mib = 100}, .prefer = "[l4*1&ib*1]");
    CHECK_STR(admission.prefer, "");
}

static void check_required_nodes(void)
{
    REFUSED("few", "32 GPUs (on 8 nodes)", PER_NODE("gres:gpu:4"), .required_nodes = 8);
    REFUSED("few", "32 GPUs (on 8 nodes)", PER_NODE("gres:gpu:4"), .required_nodes = 8, .min_nodes = 1);
    ADMITTED("few", PER_NODE("gres:gpu:4"), .required_nodes = 1);
    ADMITTED("few", PER_NODE("gres:gpu:4"), .required_nodes = 8, NODES(1)); /* which Slurm refuses */
    REFUSED("memory", "160G of GPU memory on 8 GPUs", PER_NODE("gres:shard:20480"), .required_nodes = 8);
    const struct sluice_slurm offers = {.now = 1800000000, .list_offers = true};
    const struct sluice_submission some = {PER_NODE("gres:gpu:2"), .required_nodes = 8, .min_nodes = 1},
                                   all = {PER_NODE("gres:gpu:2"), .required_nodes = 8};
    admit("few", &offers, &some);
    expect_admitted("some of a list");
    CHECK_INT(admission.max_nodes, 2);
    admit("few", &offers, &all);
    expect_refused("all of a list", "16 GPUs (on 8 nodes)");
    /* only slurmctld knows what lies between them */
    ADMITTED("few", PER_NODE("gres:gpu:1"), .required_nodes = 2, .min_nodes = 2, .contiguous = true);
    CHECK_INT(admission.max_nodes, 2);
    ADMITTED("open", PER_NODE("gres:gpu:1"), .required_nodes = 2, .min_nodes = 2, .contiguous = true);
    CHECK_INT(admission.max_nodes, 0);
}

static void check_tenant(void)
{
    ADMITTED("strict", .tasks = 1);
    CHECK_STR(admission.partition, "gpu");
    CHECK_STR(admission.qos, "silver");
    CHECK_STR(admission.features, "secure");
    ADMITTED("strict", .partition = "fast,gpu", .qos = "gold", .features = "ib");
    CHECK_STR(admission.partition, "");
    CHECK_STR(admission.qos, "");
    CHECK_STR(admission.features, "ib&secure");
    REFUSED("strict", "partition slow: account strict may use gpu, fast", .partition = "fast,slow");
    REFUSED("strict", "joins features by &", .features = "a|b");
    REFUSED("strict", "--gang=a:2 is not open", .options = {.gang_name = "a", .gang_count = 2});
    REFUSED("strict", "--deadline is not open", .deadline = now + 36000);
    REFUSED("expired", "expired on 2023-11-1", .tasks = 1);
    CHECK_INT(admission.refusal, SLUICE_REFUSED_ACCOUNT);
}

/* Two nodes of eight GPUs; the first is taken for two hours, the second for four. */
static void check_deadlines_behind_the_plan(void)
{
    static const int64_t at = 1800000000, hour = 3600;
    static const uint64_t all = 3;
    const struct sluice_outlook_node nodes[] = {{0xff, "h100"}, {0xff, "h100"}};
    const struct sluice_outlook_partition partition = {"gpu", &all, true};
    struct sluice_outlook_span spans[] = {{0, 0xff, 0, at + 2 * hour}, {1, 0xff, 0, at + 4 * hour}};
    struct sluice_outlook_parts parts = {at, nodes, 2, spans, 2, &partition, 1};
    struct sluice_slurm slurm = {.now = at, .places = true, .outlook = sluice_outlook_new(&parts)};
    struct sluice_submission job = {PER_NODE("gres:gpu:8"), NODES(1), .time_limit = 60, .deadline = at + 3 * hour};
    admit(NULL, &slurm, &job); /* just in time */
    expect_admitted("in time");
    CHECK_STR(admission.message, "");
    job.deadline--;
    admit(NULL, &slurm, &job); /* others may end sooner: it is taken in */
    expect_admitted("late");
    CHECK(strstr(admission.message, "may be missed: after all that is planned (at 2027-01-15T08:00:00, each job"));
    CHECK(strstr(admission.message, "starts by 2027-01-15T10:00:00 and ends at 2027-01-15T11:00:00"));
    job.deadline = at + hour - 1;
    admit(NULL, &slurm, &job);
    expect_refused("too early",
                   "started now, a job of 01:00:00 ends at 2027-01-15T09:00:00; after all that is planned");
    expect_refused("too early", "it ends at 2027-01-15T11:00:00; ask for --deadline=2027-01-15T11:00:00 or later");
    job.begin = at + 5 * hour;
    job.deadline = at + 6 * hour - 1;
    admit(NULL, &slurm, &job);
    expect_refused("begin",
                   "started with --begin at 2027-01-15T13:00:00, a job of 01:00:00 ends at 2027-01-15T14:00:00; "
                   "ask for --deadline=2027-01-15T14:00:00 or later");
    job.deadline++;
    admit(NULL, &slurm, &job);
    expect_admitted("begin");
    const struct sluice_submission never = {.time_limit = 60, .begin = INT64_MAX, .deadline = INT64_MAX - 1};
    admit(NULL, &slurm, &never);
    expect_admitted("an absurd begin");
    CHECK_STR(admission.message, "");
    /* what it does not know it does not say */
    const struct sluice_submission silent[] = {
        {PER_NODE("gres:shard:100"), NODES(1), .time_limit = 60, .deadline = at + hour},
        {.time_limit = 60, .deadline = at + hour},
        {PER_NODE("gres:gpu:8"), NODES(3), .time_limit = 60, .deadline = at + hour},
        {PER_NODE("gres:gpu:8"), NODES(1), .time_limit = 60, .deadline = at + hour, .partition = "other"},
        {PER_NODE("gres:gpu:8"), NODES(1), .time_limit = 60, .deadline = at + hour, .admitted_before = true},
        {PER_NODE("gres:gpu:8"), NODES(1), .time_limit = 60, .deadline = at + hour, .heterogeneous = true},
    };
    for (size_t i = 0; i < sizeof silent / sizeof *silent; i++) {
        admit(NULL, &slurm, &silent[i]);
        expect_admitted("silent");
        CHECK_STR(admission.message, "");
    }
    /* other ways to ask for the same */
    const struct sluice_submission same[] = {
        {PER_JOB("gres:gpu:16"), NODES(2), .time_limit = 60, .deadline = at + 2 * hour},
        {PER_JOB("gres:gpu:3"), .time_limit = 60, .deadline = at + 2 * hour},
        {PER_TASK("gres:gpu:2"), NODES(1), .tasks = 4, .time_limit = 60, .deadline = at + 2 * hour},
        {PER_NODE("gres:gpu:h100:1"), .time_limit = 60, .deadline = at + 2 * hour, .partition = "gpu,other"},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        admit(NULL, &slurm, &same[i]);
        expect_admitted("same");
        CHECK(strstr(admission.message, i ? "starts by 2027-01-15T10:00:00" : "starts by 2027-01-15T12:00:00"));
    }
    sluice_outlook_release(slurm.outlook);
}

static void check_time_and_options(void)
{
    ADMITTED("open", .deadline = now + 3600, .time_limit = 60);
    REFUSED("open", "started now, a job of 01:01:00 ends at", .deadline = now + 3600, .time_limit = 61);
    CHECK_INT(admission.refusal, SLUICE_REFUSED_TIME);
    ADMITTED("open", .deadline = now + 3600, .time_limit = 600, .time_min = 60);
    REFUSED("open", "or for a shorter --time-min", .deadline = now + 3600, .time_limit = 600, .time_min = 61);
    CHECK_INT(admission.refusal, SLUICE_REFUSED_TIME_MIN);
    REFUSED("open", "cannot be met", .deadline = now - 1);
    REFUSED("open", "without a time limit", .deadline = now + 3600, .time_limit = UINT32_MAX);
    ADMITTED("open", .deadline = now + 1);

    const struct sluice_slurm admit_only = {.now = 1800000000};
    admit("open", &admit_only, &(struct sluice_submission){.options = {.gang_name = "a", .gang_count = 2}});
    expect_refused("gang below place", "below level place");
    admit("open", &admit_only, &(struct sluice_submission){PER_NODE("gres:gpu:2"), .options = {.gpu_spread = true}});
    expect_admitted("spread below place");
    CHECK(strstr(admission.message, "no effect"));
    ADMITTED("open", .options = {.gang_name = "a", .gang_count = 2});
    REFUSED("open", "heterogeneous", .heterogeneous = true, .options = {.gang_name = "a", .gang_count = 2});
    REFUSED("open", "--gpu-share=50", PER_NODE("gres:gpu:1"), .options = {.gpu_share = 50});
    rules->gpu_shares = true;
    ADMITTED("open", PER_NODE("gres:gpu:1"), .options = {.gpu_share = 50});
    REFUSED("open", "--gpu-share is a share of GPUs", .options = {.gpu_share = 50});
    rules->gpu_shares = false;
    REFUSED("open", "asks for none", .options = {.gpu_affinity = SLUICE_AFFINITY_LINK});
    REFUSED("open", "nothing to spread", PER_NODE("gres:gpu:2"), NODES(1), .options = {.gpu_spread = true});
    ADMITTED("open", .options = {.checkpoint = SLUICE_CHECKPOINT_APP, .checkpoint_s = 600});
    REFUSED("open", "--checkpoint-interval is the time", .options = {.checkpoint_s = 600});
    const struct sluice_options system = {.checkpoint = SLUICE_CHECKPOINT_SYSTEM};
    REFUSED("open", "do not save jobs", .script = true, .options = system);
    rules->checkpoint_system = true;
    ADMITTED("open", .script = true, .options = system);
    CHECK(admission.max_nodes == 1);
    REFUSED("open", "submit it with sbatch", .options = system);
    REFUSED("open", "several nodes", .script = true, NODES(2), .options = system);
    REFUSED("open", "several nodes", .script = true, .heterogeneous = true, .options = system);
    ADMITTED("open", .script = true, PER_NODE("gres:gpu:1"), .options = system);
    REFUSED("open", "the state of a part of a GPU", .script = true, PER_NODE("gres:shard:1024"), .options = system);
    REFUSED("open", "--no-requeue", .script = true, .stays_ended = true, .options = system);
    REFUSED("open", "--open-mode=truncate", .script = true, .truncates = true, .options = system);
    rules->checkpoint_system = false;
    REFUSED("open", "with gpu or mps", PER_NODE("gres:gpu:1,gres:shard:100"));
    REFUSED("open", "with a type", PER_NODE("gres:shard:h100:100"));
}

static void check_nics_per_gpu(void)
{
#define NICS(COUNT) .options = {.nics_per_gpu = COUNT}
    ADMITTED("open", PER_NODE("gres:gpu:4"), NICS(1));
    CHECK(admission.set_tres);
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:4,gres:nic:4");
    ADMITTED("open", .tres = {"gres:gpu:16", NULL, NULL, "gres:gpu:h100:1,license:2"}, NICS(2));
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "gres:gpu:16");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "");
    CHECK_STR(admission.tres[SLUICE_PER_TASK], "gres:gpu:h100:1,license:2,gres:nic:2");
    ADMITTED("open", PER_NODE("gres:gpu:a:1,gres:gpu:b:2"), NICS(1));
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:a:1,gres:gpu:b:2,gres:nic:3");
    ADMITTED("open", .tres = {"gres:gpu:5"}, NODES(1), NICS(1));
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "gres:gpu:5");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:nic:5");
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:5"}, NICS(1));
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:5"}, NODES(2), NICS(1));
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:6"}, .tasks = 4, NICS(1));
    REFUSED("open", "that divides 6 (-N1, -N2, -N3, -N6), or count GPUs with --gpus-per-node or --gpus-per-task",
            .tres = {"gres:gpu:6"}, NICS(1));
    REFUSED("open", "that divides 4000 (-N250, -N400, -N500, -N800, -N1000), or", .tres = {"gres:gpu:4000"}, NICS(1));
    REFUSED("open", "that divides 3 (-N1), or", .tres = {"gres:gpu:a:2,gres:gpu:b:1"}, NODES(2), NICS(1));
    REFUSED("open", "that divides 20, or", .tres = {"gres:gpu:a:17,gres:gpu:b:3"}, NODES(2), NICS(1));
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:4"}, .tasks = 4, .tasks_per_gpu = 1,
            NICS(1));
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:6"}, .min_nodes = 2, .max_nodes = 3,
            NICS(1));
    REFUSED("open", "Slurm divides --gpus among nodes", .tres = {"gres:gpu:a:2,gres:gpu:b:1"}, NODES(2), NICS(1));
    ADMITTED("open", .tres = {"gres:gpu:a:2,gres:gpu:b:4"}, NODES(2), NICS(2));
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "gres:gpu:a:2,gres:gpu:b:4");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres:gpu:a:1,gres:gpu:b:2,gres:nic:6");
    ADMITTED("open", .tres = {"gres:gpu:8"}, .tasks = 4, NICS(1));
    CHECK_STR(admission.tres[SLUICE_PER_JOB], "gres:gpu:8");
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "");
    CHECK_STR(admission.tres[SLUICE_PER_TASK], "gres:gpu:2,gres:nic:2");
    REFUSED("open", "--nics-per-gpu=1: the job asks for no whole GPUs", NICS(1));
    REFUSED("open", "no whole GPUs", PER_NODE("gres:shard:100"), NICS(1));
    REFUSED("open", "no whole GPUs", .options = {.gpu_mem_mib = 100, .nics_per_gpu = 1});
    REFUSED("open", "in another way", PER_NODE("gres:gpu:1,gres:nic:1"), NICS(1));
    REFUSED("open", "in another way", .tres = {"gres:gpu:1", "gres:nic:ib:1"}, NICS(1));
    REFUSED("open", "srun's own step", PER_NODE("gres:gpu:1"), .step_at_once = true, NICS(1));
    char gpus[SLUICE_TRES_TEXT_MAX], more[SLUICE_TRES_TEXT_MAX] = "license:1"; /* each is taken, but not both in one */
    for (int type = 0, length = 0; type < SLUICE_GPU_TYPES_MAX; type++)
        length += snprintf(gpus + length, sizeof gpus - (size_t)length, "%sgres:gpu:a%045d:2", type ? "," : "", type);
    while (strlen(more) + strlen(",license:1") < sizeof more)
        strcat(more, ",license:1");
    REFUSED("open", "becomes too long", .tres = {gpus, more}, NODES(2), NICS(1));
    ADMITTED("open", .tres = {gpus, "license:1"}, NODES(2), NICS(1));
    const struct sluice_slurm with_slash = {.places = true, .slash = true, .now = 1800000000};
    admit("open", &with_slash, &(struct sluice_submission){PER_NODE("gres/gpu:2"), NICS(1)});
    CHECK_STR(admission.tres[SLUICE_PER_NODE], "gres/gpu:2,gres/nic:2");
}

#define ROLES(...) .options = {.gpu_role_count = 2, .gpu_roles = {__VA_ARGS__}}
#define THREE_AND_FIVE ROLES({"prefill", 3}, {"decode", 5})

static void check_roles(void)
{
    ADMITTED("open", PER_JOB("gres:gpu:8"), THREE_AND_FIVE);
    CHECK_STR(admission.message, "");
    ADMITTED("open", PER_JOB("gres:gpu:a:2,gres:gpu:b:6"), THREE_AND_FIVE);
    ADMITTED("open", PER_NODE("gres:gpu:4"), NODES(2), THREE_AND_FIVE);
    ADMITTED("open", PER_NODE("gres:gpu:8"), THREE_AND_FIVE);
    ADMITTED("open", PER_TASK("gres:gpu:2"), .tasks = 4, THREE_AND_FIVE);
    ADMITTED("open", .tasks = 8, .tasks_per_gpu = 1, THREE_AND_FIVE);
    REFUSED("open", "the roles have 8 GPUs, and the job asks for 7; make both", PER_JOB("gres:gpu:7"), THREE_AND_FIVE);
    REFUSED("open", "the job asks for 16", PER_NODE("gres:gpu:8"), NODES(2), THREE_AND_FIVE);
    REFUSED("open", "asks for none; add --gpus=8", THREE_AND_FIVE);
    REFUSED("open", "is open; ask for --gpus=8", PER_NODE("gres:gpu:4"), .min_nodes = 1, .max_nodes = 2,
            THREE_AND_FIVE);
    REFUSED("open", "is open", PER_NODE("gres:gpu:8"), .tasks = 2, THREE_AND_FIVE);
    REFUSED("open", "parts of GPUs", PER_NODE("gres:shard:100"), THREE_AND_FIVE);
    REFUSED("open", "heterogeneous job", PER_JOB("gres:gpu:8"), .heterogeneous = true, THREE_AND_FIVE);
    REFUSED("open", "--exclusive", PER_JOB("gres:gpu:8"), .whole_nodes = true, THREE_AND_FIVE);
    /* A change of the job: what it is to have is compared again, where that is known. */
    ADMITTED("open", PER_JOB("gres:gpu:8"), .admitted_before = true, THREE_AND_FIVE);
    ADMITTED("open", PER_NODE("gres:gpu:4"), .min_nodes = 1, .max_nodes = 2, .admitted_before = true, THREE_AND_FIVE);
    REFUSED("open", "the job asks for 7", PER_JOB("gres:gpu:7"), .admitted_before = true, THREE_AND_FIVE);
    const struct sluice_slurm admit_only = {.now = 1800000000};
    admit("open", &admit_only, &(struct sluice_submission){PER_JOB("gres:gpu:8"), THREE_AND_FIVE});
    expect_refused("roles below place", "below level place");
}

static void on(enum sluice_topology topology, const char *account, struct sluice_submission submission)
{
    const struct sluice_slurm slurm = {.now = 1800000000, .places = true, .topology = topology};
    admit(account, &slurm, &submission);
}

#define ON(TOPOLOGY, ACCOUNT, ...) on(SLUICE_TOPOLOGY_##TOPOLOGY, ACCOUNT, (struct sluice_submission){__VA_ARGS__})
#define FABRIC(WHERE, WAIT) .options = {.fabric = SLUICE_FABRIC_##WHERE, .fabric_wait_s = (WAIT)}

static void expect_switches(bool set, uint32_t wait_s)
{
    expect_admitted("switches");
    CHECK_INT(admission.set_switches, set);
    CHECK_INT(admission.switches, set);
    CHECK_INT(admission.switch_wait_s, set ? wait_s : 0);
}

static void check_nic_planes(void)
{
#define PLANES(WHERE, COUNT) .options = {.nic_planes = SLUICE_NIC_PLANES_##WHERE, .nics_per_gpu = (COUNT)}
    ON(NONE, "open", PER_NODE("gres:gpu:4"), PLANES(ONE, 1));
    expect_admitted("planes of interfaces with GPUs");
    ON(SWITCHES, "open", NODES(4), PER_NODE("gres:gpu:4,gres:nic:2"), PLANES(SPREAD, 0));
    expect_admitted("planes of counted interfaces");
    ON(NONE, "open", .tres = {NULL, NULL, NULL, "gres:gpu:1,gres:nic:ib:1"}, PLANES(ONE, 0));
    expect_admitted("planes of a type's interfaces");
    ON(NONE, "open", PER_NODE("gres:gpu:4"), PLANES(ONE, 0));
    expect_refused("planes of nothing", "--nic-planes=one: the job asks for no RDMA interfaces");
    ON(NONE, "open", PER_NODE("gres:gpu:4,gres:nic:4"), NODES(2), .required_nodes = 2, PLANES(SPREAD, 0));
    expect_refused("planes by name", "--nic-planes=spread: not in a heterogeneous job");
    const struct sluice_slurm alone = {.now = 1800000000};
    admit("open", &alone, &(struct sluice_submission){PER_NODE("gres:gpu:4,gres:nic:4"), PLANES(ONE, 0)});
    expect_refused("planes by nobody", "Slurm alone chooses the interfaces");
    /* What asks for nothing is refused nowhere. */
    admit("open", &alone, &(struct sluice_submission){PER_NODE("gres:gpu:4"), PLANES(ANY, 0)});
    expect_admitted("any planes");
    ON(NONE, "open", PER_NODE("gres:gpu:4"), .admitted_before = true, PLANES(ONE, 0));
    expect_admitted("a change of a job that has them");
}

static void check_fabric(void)
{
    ON(SWITCHES, "open", NODES(4), FABRIC(BLOCK, 300));
    expect_switches(true, 300);
    ON(SWITCHES, "open", NODES(4), FABRIC(RAIL, SLUICE_FABRIC_NO_TIME));
    expect_switches(true, SLUICE_FABRIC_NO_TIME);
    ON(BLOCK, "open", NODES(4), FABRIC(BLOCK, 0));
    expect_switches(true, 0);
    ON(SWITCHES, "open", NODES(1), FABRIC(BLOCK, 300));
    expect_switches(false, 0);
    ON(NONE, "open", NODES(4), FABRIC(BLOCK, 300));
    expect_switches(false, 0);
    CHECK(strstr(admission.message, "--fabric=block has no effect here"));
    /* topology/block alone does not wait; topology/tree does. */
    const struct sluice_slurm below[] = {{.now = 1800000000, .topology = SLUICE_TOPOLOGY_BLOCK},
                                         {.now = 1800000000, .topology = SLUICE_TOPOLOGY_SWITCHES}};
    for (size_t i = 0; i < 2; i++) {
        admit("open", &below[i], &(struct sluice_submission){NODES(4), FABRIC(BLOCK, 300)});
        expect_switches(true, 300);
        CHECK(!strstr(admission.message, "waits for no block") == (i == 1));
    }
    ON(BLOCK, "open", NODES(4), FABRIC(RAIL, 300));
    expect_refused("rail", "no rails");
    ON(SWITCHES, "open", NODES(4), .switches = 2, FABRIC(BLOCK, 300));
    expect_refused("twice", "--switches=2");
    /* Nodes are spread by Sluice's placement alone, which needs to know each node's share. */
    ON(SWITCHES, "near", NODES(4), PER_NODE("gres:gpu:8"), FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    expect_switches(false, 0);
    ON(SWITCHES, "open", NODES(1), .tres = {"gres:gpu:8"}, FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    expect_switches(false, 0);
    ON(SWITCHES, "open", NODES(4), .tres = {"gres:gpu:8"}, FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    expect_refused("spread in total", "--gpus-per-node");
    ON(BLOCK, "open", NODES(4), PER_NODE("gres:gpu:8"), FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    expect_refused("spread over blocks", "topology/block");
    ON(NONE, "open", NODES(4), PER_NODE("gres:gpu:8"), FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    CHECK(strstr(admission.message, "--fabric=spread has no effect here"));
    ON(SWITCHES, "open", NODES(4), PER_NODE("gres:gpu:8"), .required_nodes = 4, FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME));
    expect_refused("spread by name", "--nodelist");
    const struct sluice_slurm alone = {.now = 1800000000, .topology = SLUICE_TOPOLOGY_SWITCHES};
    admit("open", &alone,
          &(struct sluice_submission){NODES(4), PER_NODE("gres:gpu:8"), FABRIC(SPREAD, SLUICE_FABRIC_NO_TIME)});
    expect_refused("spread by nobody", "Slurm alone chooses the nodes");
    /* The tenant's default: not where the job says something, has one node, or the network is not known. */
    ON(SWITCHES, "near", NODES(4));
    expect_switches(true, 600);
    ON(SWITCHES, "near", NODES(4), FABRIC(ANY, SLUICE_FABRIC_NO_TIME));
    expect_switches(false, 0);
    ON(SWITCHES, "near", NODES(4), FABRIC(BLOCK, 60));
    expect_switches(true, 60);
    ON(SWITCHES, "near", NODES(4), .switches = 2);
    expect_switches(false, 0);
    ON(SWITCHES, "near", NODES(1));
    expect_switches(false, 0);
    ON(NONE, "near", NODES(4));
    expect_switches(false, 0);
    CHECK_STR(admission.message, "");
    ON(SWITCHES, "near", NODES(4), .admitted_before = true);
    expect_switches(false, 0);
}

#define SEGMENT(NODES_OF) .options = {.segment = (NODES_OF)}
#define MEM_AND_SEGMENT .options = {.gpu_mem_mib = 10240, .segment = 2}

static void check_segments(void)
{
    ON(SWITCHES, "open", NODES(36), PER_NODE("gres:gpu:8"), SEGMENT(12));
    expect_admitted("3 x 12");
    ON(SWITCHES, "open", NODES(4), MEM_AND_SEGMENT);
    expect_admitted("shards");
    ON(SWITCHES, "open", NODES(35), PER_NODE("gres:gpu:8"), SEGMENT(12));
    expect_refused("35", "ask for -N 36");
    ON(SWITCHES, "open", PER_NODE("gres:gpu:8"), SEGMENT(12));
    expect_refused("no nodes", "say of how many nodes");
    ON(SWITCHES, "open", .min_nodes = 2, .max_nodes = 4, PER_NODE("gres:gpu:8"), SEGMENT(2));
    expect_refused("a range", "say of how many nodes");
    ON(SWITCHES, "open", NODES(4), SEGMENT(2));
    expect_refused("no GPUs", "--gpus-per-node");
    ON(SWITCHES, "open", NODES(4), PER_JOB("gres:gpu:8"), SEGMENT(2));
    expect_refused("GPUs in total", "--gpus-per-node");
    ON(SWITCHES, "open", NODES(4), PER_NODE("gres:gpu:8"), .required_nodes = 4, SEGMENT(2));
    expect_refused("nodelist", "--nodelist");
    ON(NONE, "open", NODES(4), PER_NODE("gres:gpu:8"), SEGMENT(2));
    expect_refused("no topology", "no network topology");
    admit("open", &(struct sluice_slurm){.now = 1800000000, .topology = SLUICE_TOPOLOGY_SWITCHES},
          &(struct sluice_submission){NODES(4), PER_NODE("gres:gpu:8"), SEGMENT(2)});
    expect_refused("below level place", "Slurm alone");
    ON(SWITCHES, "open", NODES(3), PER_NODE("gres:gpu:8"), .admitted_before = true, SEGMENT(2));
    expect_refused("a change", "ask for -N 4");
    admit("open", &(struct sluice_slurm){.now = 1800000000},
          &(struct sluice_submission){NODES(4), PER_NODE("gres:gpu:8"), .admitted_before = true, SEGMENT(2)});
    expect_admitted("a change of something else, while Sluice places no jobs");
}

static void check_slurms_segments(void)
{
    ON(BLOCK, "open", NODES(36), .required_nodes = 36, .slurm_segment = 12);
    expect_admitted("3 x 12");
    ON(SWITCHES, "open", NODES(35), .slurm_segment = 12);
    expect_refused("35", "ask for -N 36");
    ON(SWITCHES, "open", NODES(1), .slurm_segment = 2);
    expect_refused("1", "ask for -N 2");
    ON(SWITCHES, "open", .tasks = 8, .slurm_segment = 4);
    expect_refused("no nodes", "such as -N 8");
    ON(NONE, "open", NODES(3), .slurm_segment = 2);
    expect_admitted("no topology: without effect in Slurm");
    ON(SWITCHES, "open", NODES(3), .slurm_segment = 1);
    expect_admitted("of one node each");
}

#define WATTS(COUNT) .options = {.gpu_power_w = COUNT}

static void check_power(void)
{
    ADMITTED("open", PER_NODE("gres:gpu:h100:1"), WATTS(200));
    ADMITTED("open", PER_NODE("gres:gpu:h100:1"), WATTS(700));
    REFUSED("open", "--gpu-power=199W: GPUs of class big take 200 to 700 W", PER_NODE("gres:gpu:h100:1"), WATTS(199));
    REFUSED("open", "take 200 to 700 W", PER_NODE("gres:gpu:1"), .features = "h200", WATTS(701));
    REFUSED("open", "take 200 to 700 W", PER_NODE("gres:gpu:h100:1,gres:gpu:l4:1"), WATTS(800));
    ADMITTED("open", PER_NODE("gres:gpu:1"), WATTS(72)); /* the range of class small is not known: nodes know it */
    ADMITTED("bigonly", PER_NODE("gres:gpu:h100:1"), WATTS(500));
    REFUSED("bigonly", "--gpu-power=501W: account bigonly may ask for 500 W at most on GPUs of class big",
            PER_NODE("gres:gpu:h100:1"), WATTS(501));
    CHECK_INT(admission.refusal, SLUICE_REFUSED_LIMIT);
    REFUSED("bigonly", "take 200 to 500 W", PER_NODE("gres:gpu:h100:1"), WATTS(100));
    REFUSED("open", "the job asks for none", WATTS(300));
}

static void check_defaults(void)
{
    ADMITTED("open", PER_NODE("gres:gpu:2"));
    CHECK_STR(admission.cpus_per_tres, "gres:gpu:4");
    CHECK_STR(admission.mem_per_tres, "gres:gpu:8192");
    ADMITTED("open", PER_NODE("gres:gpu:h100:2"));
    CHECK_STR(admission.cpus_per_tres, "gres:gpu:12");
    ADMITTED("open", PER_NODE("gres:gpu:2"), .cpus_per_task = 2, .memory_asked = true);
    CHECK(!admission.set_cpus_per_tres && !admission.set_mem_per_tres);
    ADMITTED("open", PER_NODE("gres:gpu:2"), .tasks = 32);
    CHECK(!admission.set_cpus_per_tres && admission.set_mem_per_tres);
    ADMITTED("open", PER_NODE("gres:gpu:2"), .whole_nodes = true);
    CHECK(!admission.set_cpus_per_tres && !admission.set_mem_per_tres);
    /* a part of a GPU: that part of the defaults */
    ADMITTED("open", .options = {.gpu_mem_mib = 20480});
    CHECK(!admission.set_cpus_per_tres && !admission.set_mem_per_tres);
    CHECK_INT(admission.min_cpus_per_node, 0);
    CHECK_INT(admission.memory_per_node_mib, 2048);
    ADMITTED("open", .options = {.gpu_mem_mib = 20480}, .features = "h100");
    CHECK_INT(admission.min_cpus_per_node, 3);
    ADMITTED("open", .options = {.gpu_mem_mib = 20480}, .features = "l4");
    CHECK_INT(admission.min_cpus_per_node, 4);
    CHECK_INT(admission.memory_per_node_mib, 8192);
    ADMITTED("open", .options = {.gpu_mem_mib = 20480}, .features = "l4", .tasks = 2, .memory_asked = true);
    CHECK_INT(admission.min_cpus_per_node, 0);
    CHECK_INT(admission.memory_per_node_mib, 0);
    ADMITTED("open", .tasks = 4);
    CHECK(!admission.set_cpus_per_tres && !admission.set_mem_per_tres);
}

static void check_changed_job(void)
{
    ADMITTED("memory", .admitted_before = true, PER_NODE("gres:shard:20000"), .options = {.gpu_mem_mib = 10240});
    CHECK(!admission.set_tres);
    REFUSED("memory", "20G of each", .admitted_before = true, PER_NODE("gres:shard:30000"),
            .options = {.gpu_mem_mib = 10240});
    REFUSED("open", "only be changed to another number", .admitted_before = true, PER_NODE("gres:gpu:1"),
            .options = {.gpu_mem_mib = 10240});
    REFUSED("open", "only be changed to another number", .admitted_before = true, PER_NODE(""),
            .options = {.gpu_mem_mib = 10240});
    /* a lower bound on nodes with an upper one; CPUs that need nodes, and those of each node */
    REFUSED("few", "32 GPUs (on 8 nodes)", .admitted_before = true, PER_NODE("gres:gpu:4"), .min_nodes = 1,
            .max_nodes = 8);
    REFUSED("few", "32 GPUs (on 8 nodes)", .admitted_before = true, PER_NODE("gres:gpu:4"), .min_nodes = 8,
            .max_nodes = 1);
    ADMITTED("few", PER_NODE("gres:gpu:2"), .min_cpus = 16, .cpus_per_task = 16);
    CHECK_INT(admission.max_nodes, 0);
    ADMITTED("few", PER_NODE("gres:gpu:2"), .min_cpus = 16, .min_cpus_per_node = 16);
    CHECK_INT(admission.max_nodes, 0);
    ADMITTED("few", PER_NODE("gres:gpu:2"), .min_cpus = 16, .cpus_per_task = 1);
    CHECK_INT(admission.max_nodes, 2);
    /* what a change does not name is kept with what it does */
#define CHANGED(old, new) .admitted_before = true, .tres = {NULL, new}, .replaced = {NULL, old}
    REFUSED("few", "the job asks for gpu:h100, and would then ask for both",
            CHANGED("gres:gpu:h100:2", "gres:gpu:l4:2"));
    REFUSED("few", "the job asks for gpu:h100", CHANGED("gres:gpu:h100:2", "gres:gpu:l4:2,gres:gpu:h100:0"));
    REFUSED("few", "the job asks for gpu, and", CHANGED("gres:gpu:2", "gres:nic:1"));
    REFUSED("few", "the job asks for gpu, and", CHANGED("gres:gpu:2", "gres:gpu:h100:2"));
    REFUSED("memory", "the job asks for shard", CHANGED("gres:shard:1024", "gres:gpu:l4:1"));
    ADMITTED("few", CHANGED("gres:gpu:h100:2", "gres:gpu:h100:4"));
    ADMITTED("few", CHANGED("gres:gpu:h100:2", "gres:gpu:h100:1,gres:gpu:l4:2"));
    ADMITTED("few", CHANGED("gres:gpu:h100:2", ""));
    ADMITTED("few", CHANGED(NULL, "gres:gpu:h100:2"));
    ADMITTED("memory", CHANGED("gres:shard:1024", "gres:shard:2048"));
    ADMITTED("open", CHANGED("gres:gpu:h100:2", "gres:gpu:l4:2"));
    ADMITTED("memory", .admitted_before = true, .tasks_split = true, .tasks = 2, PER_TASK("gres:shard:20480"));
}

static void check_rate(void)
{
    static struct sluice_rate rate = SLUICE_RATE_INITIALIZER;
    struct sluice_rate_receipt receipt = {0};
    int64_t wait;
    for (int i = 0; i < 60; i++)
        CHECK(sluice_rate_take(&rate, "a", 60, 1000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "a", 60, 1000, &wait, &receipt));
    CHECK_INT(wait, 1000);
    CHECK(!sluice_rate_take(&rate, "a", 60, 1999, &wait, &receipt));
    CHECK_INT(wait, 1);
    CHECK(sluice_rate_take(&rate, "a", 60, 2000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "a", 60, 2000, &wait, &receipt));
    CHECK(sluice_rate_take(&rate, "b", 60, 2000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "c", 0, 2000, &wait, &receipt) && wait < 0);
    for (int i = 0; i < 7; i++) /* does not divide a minute */
        CHECK(sluice_rate_take(&rate, "d", 7, 5000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "d", 7, 5000, &wait, &receipt));
    sluice_rate_give_back(&rate, &receipt);
    CHECK(sluice_rate_take(&rate, "d", 7, 5000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "d", 7, 5000, &wait, &receipt));
    /* an idle account has no more than a minute's worth, whatever it gives back */
    sluice_rate_give_back(&rate, &receipt);
    for (int i = 0; i < 7; i++)
        CHECK(sluice_rate_take(&rate, "d", 7, 100000000, &wait, &receipt));
    CHECK(!sluice_rate_take(&rate, "d", 7, 100000000, &wait, &receipt));
    /* more accounts than buckets: none is refused that submits once */
    char name[24];
    for (int i = 0; i < 3 * SLUICE_RATE_BUCKETS; i++) {
        snprintf(name, sizeof name, "account%d", i);
        CHECK(sluice_rate_take(&rate, name, 1, 200000000, &wait, &receipt));
    }
}

int main(void)
{
    setenv("TZ", "UTC", 1);
    read_policy();
    check_gpu_mem();
    check_malformed();
    check_memory_limits();
    check_gpu_limits();
    check_classes();
    check_preferences();
    check_required_nodes();
    check_tenant();
    check_time_and_options();
    check_deadlines_behind_the_plan();
    check_nics_per_gpu();
    check_roles();
    check_power();
    check_fabric();
    check_nic_planes();
    check_segments();
    check_slurms_segments();
    check_defaults();
    check_changed_job();
    check_rate();
    sluice_rules_free(rules);
    return 0;
}
