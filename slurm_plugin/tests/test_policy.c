/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/policy.h"

#include "check.h"
#include "with_checksum.h"

/* Parse `body` with its checksum below. */
static enum sluice_error parse(const char *body, struct sluice_rules **rules, struct sluice_error_text *text)
{
    size_t length;
    char *whole = with_checksum(body, &length);
    enum sluice_error error = sluice_rules_parse(whole, length, rules, text);
    free(whole);
    return error;
}

static void test_crc(void)
{
    CHECK_INT(sluice_crc32("123456789", 9), 0xcbf43926); /* the check value of ISO 3309's CRC */
    CHECK_INT(sluice_crc32("", 0), 0);
}

static const char whole_policy[] = "sluice-policy 1.7\n"
                                   "generated-s = 1763740000\n"
                                   "source = sha256:00ff\n"
                                   "# a remark\n"
                                   "\n"
                                   "[global]\n"
                                   "weight.fair-share = 1000\n"
                                   "weight.age = 20\n"
                                   "age-full-s = 3600\n"
                                   "placement = fgd\n"
                                   "deadlines = no\n"
                                   "invented-later = 3\n"
                                   "[class h100]\n"
                                   "gpu-types = h100,h100_1g.10gb\n"
                                   "strategy = hybrid\n"
                                   "reserved-permille = 250\n"
                                   "[class v1.5]\n"
                                   "[tenant physics]\n"
                                   "partitions = gpu,long\n"
                                   "features =\n"
                                   "qos = high\n"
                                   "gpus-per-job = 0\n"
                                   "gang = no\n"
                                   "classes = v1.5\n"
                                   "class.v1.5.run-time-s = 60\n"
                                   "class.h100.gpus-guaranteed = 8\n"
                                   "[quotas of tomorrow]\n"
                                   "any = thing\n"
                                   "[tenant atoms]\n"
                                   "parent = physics\n";

static void test_whole(void)
{
    struct sluice_rules *rules;
    struct sluice_error_text text;
    enum sluice_error error = parse(whole_policy, &rules, &text);
    if (error)
        fprintf(stderr, "%s\n", text.text);
    CHECK_INT(error, SLUICE_OK);
    CHECK(!rules->empty);
    CHECK_INT(rules->minor, 7);
    CHECK_INT(rules->generated_s, 1763740000);
    CHECK_STR(rules->source, "sha256:00ff");
    CHECK_INT(rules->order.weight[SLUICE_FACTOR_FAIR_SHARE], 1000);
    CHECK_INT(rules->order.weight[SLUICE_FACTOR_AGE], 20);
    CHECK_INT(rules->order.weight[SLUICE_FACTOR_SIZE], 0);
    CHECK_INT(rules->placement, SLUICE_POLICY_FGD);
    CHECK(!rules->deadlines);
    CHECK_INT(rules->gang_limit_s, 300);
    CHECK_INT(rules->gang_incomplete_s, 3600);
    CHECK(!rules->gang_incomplete_cancel);
    CHECK_INT(rules->class_count, 2);
    CHECK_INT(rules->classes[0].strategy, SLUICE_CLASS_HYBRID);
    CHECK_INT(rules->classes[0].reserved_permille, 250);
    CHECK_INT(rules->classes[1].strategy, SLUICE_CLASS_DYNAMIC);
    CHECK_INT(sluice_rules_class_of_type(rules, "h100_1g.10gb"), 0);
    CHECK_INT(sluice_rules_class_of_type(rules, "a100"), SLUICE_NO_CLASS);
    CHECK_INT(sluice_rules_class_of_type(rules, NULL), SLUICE_NO_CLASS);
    CHECK_INT(sluice_rules_class_by_name(rules, "v1.5"), 1);
    const struct sluice_tenant *tenant = sluice_rules_tenant(rules, "physics");
    CHECK(tenant && tenant == &rules->tenants[0]);
    CHECK(!tenant->parent);
    CHECK_STR(tenant->qos, "high");
    CHECK_INT(tenant->partitions.count, 2);
    CHECK_STR(tenant->partitions.items[1], "long");
    CHECK_INT(tenant->features.count, 0);
    CHECK(!tenant->features.items);
    CHECK_INT(tenant->gpus_per_job, 0);
    CHECK_INT(tenant->run_time_s, SLUICE_NO_LIMIT);
    CHECK(tenant->gpu_memory_mib_per_job == SLUICE_NO_LIMIT_64);
    CHECK(!tenant->gang && tenant->deadline && tenant->borrow);
    CHECK(!tenant->classes[0].allowed && tenant->classes[1].allowed);
    CHECK_INT(tenant->classes[0].gpus_guaranteed, 8);
    CHECK_INT(tenant->classes[1].run_time_s, 60);
    CHECK_INT(tenant->classes[1].gpus_limit, SLUICE_NO_LIMIT);
    tenant = sluice_rules_tenant(rules, "atoms");
    CHECK(tenant && tenant->classes[0].allowed && tenant->classes[1].allowed);
    CHECK_STR(tenant->parent, "physics");
    CHECK_INT(tenant->shares, 1);
    CHECK(!sluice_rules_tenant(rules, "Physics") && !sluice_rules_tenant(rules, "") &&
          !sluice_rules_tenant(rules, NULL));
    CHECK_INT(rules->warning_count, 2);
    CHECK_STR(rules->warnings[0].text, "line 12: [global] invented-later: not known to this version, ignored");
    CHECK_STR(rules->warnings[1].text, "line 27: [quotas]: not known to this version, ignored");
    sluice_rules_free(rules);
}

static void test_empty(void)
{
    struct sluice_rules *rules;
    CHECK_INT(parse("sluice-policy 1.0\ngenerated-s = 5\n", &rules, NULL), SLUICE_OK);
    CHECK(rules->empty);
    CHECK_INT(rules->placement, SLUICE_POLICY_SLUICE);
    CHECK(!sluice_rules_tenant(rules, "physics"));
    CHECK_INT(sluice_rules_class_of_type(rules, "h100"), SLUICE_NO_CLASS);
    sluice_rules_free(rules);
    sluice_rules_free(NULL);
    CHECK_INT(parse("sluice-policy 1.0\n[class a]\n", &rules, NULL), SLUICE_OK);
    CHECK(!rules->empty);
    sluice_rules_free(rules);
}

#define HEAD "sluice-policy 1.0\n"

static const struct {
    const char *body, *words;
    enum sluice_error error;
} refused[] = {
    {"sluice-policy 2.0\n", "line 1: policy format 2.0, but these plugins read 1.x", SLUICE_ERROR_VERSION},
    {"sluice-policy 1\n", "line 1: \"sluice-policy 1\"", SLUICE_ERROR_INVALID},
    {"sluice-policy 1.0 \n", "line 1: ", SLUICE_ERROR_INVALID},
    {"sluice-policy  1.0\n", "line 1: ", SLUICE_ERROR_INVALID},
    {"sluice-policy +1.0\n", "line 1: ", SLUICE_ERROR_INVALID},
    {"sluice-policy 1. 0\n", "line 1: ", SLUICE_ERROR_INVALID},
    {"policy 1.0\n", "line 1: ", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nweight.age = 5\n", "line 3: weight.age needs age-full-s", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nweight.deadline = 5\n", "line 3: weight.deadline needs", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nweight.size = 5\n", "line 3: weight.size needs", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nweight.size = 1000001\n", "line 3: weight.size: 1000001 is not in 0 to 1000000",
     SLUICE_ERROR_RANGE},
    {HEAD "[global]\nbackfill-depth = 16385\n", "line 3: backfill-depth: 16385 is not in 1 to 16384",
     SLUICE_ERROR_RANGE},
    {HEAD "[global]\nstarvation-s = 99999999999999999999999\n", "line 3: starvation-s: 9", SLUICE_ERROR_RANGE},
    {HEAD "[global]\nstarvation-s = -1\n", "line 3: starvation-s: \"-1\" is not a number", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nstarvation-s = \n", "line 3: starvation-s: \"\" is not a number", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nstarvation-s = 1h\n", "line 3: starvation-s: \"1h\" is not a number", SLUICE_ERROR_INVALID},
    {HEAD "[global]\nstarvation-s = 1\nstarvation-s = 1\n", "line 4: starvation-s: given twice",
     SLUICE_ERROR_DUPLICATE},
    {HEAD "[global]\nstarvation-s=1\n", "line 3: \"starvation-s=1\": a line is written KEY = VALUE",
     SLUICE_ERROR_INVALID},
    {HEAD "[global]\nplacement = best\n", "line 3: placement policy \"best\" is not known", SLUICE_ERROR_UNKNOWN},
    {HEAD "[global]\ndeadlines = true\n", "line 3: deadlines: \"true\" is neither yes nor no", SLUICE_ERROR_INVALID},
    {HEAD "[global]\n[global]\n", "line 3: [global] must come before all", SLUICE_ERROR_INVALID},
    {HEAD "[global\n", "line 2: \"[global\": a section is written", SLUICE_ERROR_INVALID},
    {HEAD "[class a] \n", "line 2: ", SLUICE_ERROR_INVALID},
    {HEAD "[class]\n", "line 2: [class ]: not a name", SLUICE_ERROR_INVALID},
    {HEAD "[class a b]\n", "line 2: [class a b]: not a name", SLUICE_ERROR_INVALID},
    {HEAD "[class a]\n[class a]\n", "line 3: [class a]: given twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[class a]\nstrategy = lazy\n", "line 3: strategy: \"lazy\" is not static", SLUICE_ERROR_INVALID},
    {HEAD "[class a]\nstrategy = static\nstrategy = static\n", "line 4: strategy: given twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[class a]\ngpu-types = x,,y\n", "line 3: gpu-types: \"\" is not a name", SLUICE_ERROR_INVALID},
    {HEAD "[class a]\ngpu-types = x,x\n", "line 3: gpu-types: \"x\" is named twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[class a]\ngpu-types = x\n[class b]\ngpu-types = x\n", "line 5: GPU type \"x\" is in class a and in class b",
     SLUICE_ERROR_DUPLICATE},
    {HEAD "[class a]\nreserved-permille = 1001\n", "line 3: ", SLUICE_ERROR_RANGE},
    {HEAD "[tenant t]\n[class a]\n", "line 3: [class a]: classes must come before the tenants", SLUICE_ERROR_INVALID},
    {HEAD "[tenant t]\n[tenant t]\n", "line 3: [tenant t]: given twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[tenant t]\nclasses = a\n", "line 3: classes: \"a\" is not a class", SLUICE_ERROR_UNKNOWN},
    {HEAD "[tenant t]\nclass.a.run-time-s = 1\n", "line 3: \"a\" is not a class", SLUICE_ERROR_UNKNOWN},
    {HEAD "[tenant t]\nclass.a = 1\n", "line 3: class.a: write class.NAME.KEY", SLUICE_ERROR_INVALID},
    {HEAD "[tenant t]\nqos = a b\n", "line 3: qos: \"a b\" is not a name", SLUICE_ERROR_INVALID},
    {HEAD "[tenant t\xc3\xa9]\n", "line 2: [tenant t??]: not a name", SLUICE_ERROR_INVALID},
    {HEAD "[tenant t]\nqos = \x1b[2J\n", "line 3: qos: \"?[2J\" is not a name", SLUICE_ERROR_INVALID},
    {HEAD "[tenant t]\r\n", "line 2: control characters", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\n[budget b]\n", "line 3: [budget b]: given twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[budget b]\nwatts = 1000000001\n", "line 3: watts: 1000000001 is not in 0 to", SLUICE_ERROR_RANGE},
    {HEAD "[budget b]\nnodes =\n", "line 3: nodes: 0 bytes", SLUICE_ERROR_CAPACITY},
    {HEAD "[budget b]\nnodes = a\nnodes = b\n", "line 4: nodes: given twice", SLUICE_ERROR_DUPLICATE},
    {HEAD "[budget b]\nnodes = n1 n2\n", "line 3: nodes: \"n1 n2\" is no hostlist", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours = 5-10\n", "line 3: hours: \"5-10\" is not FROM-TO:WATTS", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours = 5:10-1\n", "line 3: hours: \"5:10-1\" is not FROM-TO:WATTS", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours = 5-10:1,\n", "line 3: hours: \"\" is not FROM-TO:WATTS", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours = 5-10081:1\n", "line 3: hours: 10081 is not in 0 to 10080", SLUICE_ERROR_RANGE},
    {HEAD "[budget b]\nhours = 5-10:1,9-20:1\n", "line 3: hours: 9-20: times must ascend", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours = 5-5:1\n", "line 3: hours: 5-5: times must ascend", SLUICE_ERROR_INVALID},
    {HEAD "[budget b]\nhours =\nhours =\n", "line 4: hours: given twice", SLUICE_ERROR_DUPLICATE},
};

static void test_refused(void)
{
    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++) {
        struct sluice_rules *rules = NULL;
        struct sluice_error_text text;
        enum sluice_error error = parse(refused[i].body, &rules, &text);
        if (error != refused[i].error || strncmp(text.text, refused[i].words, strlen(refused[i].words)) != 0)
            fprintf(stderr, "case %zu: %d %s\n", i, (int)error, text.text);
        CHECK_INT(error, refused[i].error);
        CHECK(strncmp(text.text, refused[i].words, strlen(refused[i].words)) == 0);
        CHECK(!rules);
        CHECK_INT(parse(refused[i].body, &rules, NULL), refused[i].error); /* no text wanted */
    }
}

static void test_damage(void)
{
    size_t length;
    char *whole = with_checksum(whole_policy, &length);
    struct sluice_rules *rules;
    struct sluice_error_text text;
    for (size_t cut = 0; cut < length; cut++) /* cut off anywhere */
        CHECK_INT(sluice_rules_parse(whole, cut, &rules, &text), SLUICE_ERROR_CORRUPT);
    for (size_t at = 0; at < length; at++) { /* any byte changed */
        whole[at] ^= 0x04;
        CHECK_INT(sluice_rules_parse(whole, length, &rules, &text), SLUICE_ERROR_CORRUPT);
        whole[at] ^= 0x04;
    }
    CHECK_INT(sluice_rules_parse(whole, length, &rules, &text), SLUICE_OK);
    sluice_rules_free(rules);
    free(whole);
    char *zeros = calloc(1, SLUICE_RULES_MAX_BYTES + 1);
    CHECK(zeros);
    CHECK_INT(sluice_rules_parse(zeros, SLUICE_RULES_MAX_BYTES + 1, &rules, &text), SLUICE_ERROR_CAPACITY);
    free(zeros);
}

/* As many as there may be, each found; and one more of each kind. */
static void test_bounds(void)
{
    size_t room = 64 + (SLUICE_RULES_MAX_TENANTS + 2) * 24;
    char *body = malloc(room), *at = body;
    CHECK(body);
    at += sprintf(at, HEAD);
    for (int i = 0; i < SLUICE_RULES_MAX_TENANTS; i++)
        at += sprintf(at, "[tenant t%d]\n", i);
    struct sluice_rules *rules;
    struct sluice_error_text text;
    CHECK_INT(parse(body, &rules, &text), SLUICE_OK);
    CHECK_INT(rules->tenant_count, SLUICE_RULES_MAX_TENANTS);
    for (int i = 0; i < SLUICE_RULES_MAX_TENANTS; i++) {
        char name[16];
        sprintf(name, "t%d", i);
        CHECK(sluice_rules_tenant(rules, name) == &rules->tenants[i]);
    }
    sluice_rules_free(rules);
    sprintf(at, "[tenant one-more]\n");
    CHECK_INT(parse(body, &rules, &text), SLUICE_ERROR_CAPACITY);
    at = body + sprintf(body, HEAD);
    for (int i = 0; i <= SLUICE_RULES_MAX_CLASSES; i++)
        at += sprintf(at, "[class c%d]\n", i);
    CHECK_INT(parse(body, &rules, &text), SLUICE_ERROR_CAPACITY);
    at = body + sprintf(body, HEAD "[class c]\ngpu-types = t");
    for (int i = 0; i < SLUICE_RULES_MAX_LIST; i++)
        at += sprintf(at, ",t%d", i);
    sprintf(at, "\n");
    CHECK_INT(parse(body, &rules, &text), SLUICE_ERROR_CAPACITY);
    at = body + sprintf(body, HEAD "[global]\n");
    for (int i = 0; i < 100; i++)
        at += sprintf(at, "new%d = 1\n", i);
    CHECK_INT(parse(body, &rules, &text), SLUICE_OK);
    CHECK_INT(rules->warning_count, 100);
    sluice_rules_free(rules);
    memset(body, 'x', 300);
    at = body + sprintf(body, HEAD "[tenant ");
    memset(at, 'n', SLUICE_RULES_MAX_NAME + 1);
    sprintf(at + SLUICE_RULES_MAX_NAME + 1, "]\n");
    CHECK_INT(parse(body, &rules, &text), SLUICE_ERROR_INVALID);
    free(body);
}

static void test_budgets(void)
{
    struct sluice_rules *rules;
    struct sluice_error_text text;
    CHECK_INT(parse(HEAD "[class a]\npower-default-w = 700\npower-idle-w = 60\npower-start-least-w = 300\n"
                         "[tenant t]\n[budget hall]\nnodes = *\nwatts = 120000\nhours = 480-1080:90000,1920-2520:0\n"
                         "[budget row]\nnodes = n[1-16,20]\n[budget of-t]\ntenant = t\nwatts = 5\nhours =\n"
                         "[class b]\n",
                    &rules, &text),
              SLUICE_ERROR_INVALID); /* classes come before the tenants */
    CHECK_INT(parse(HEAD "[class a]\npower-default-w = 700\npower-idle-w = 60\npower-start-least-w = 300\n"
                         "[budget hall]\nnodes = *\nwatts = 120000\nhours = 480-1080:90000,1920-2520:0\nnew = 1\n"
                         "[budget row]\nnodes = n[1-16,20]\n[budget of-t]\ntenant = t\nwatts = 5\nkept = 4\nhours =\n",
                    &rules, &text),
              SLUICE_OK);
    CHECK_INT(rules->classes[0].power_default_w + rules->classes[0].power_idle_w, 760);
    CHECK_INT(rules->classes[0].power_start_least_w, 300);
    CHECK_INT(rules->budget_count, 3);
    CHECK_INT(rules->warning_count, 1);
    const struct sluice_budget *budgets = rules->budgets;
    CHECK(!strcmp(budgets[0].name, "hall") && !budgets[0].nodes && !budgets[0].tenant);
    CHECK_INT(budgets[0].watts, 120000);
    CHECK_INT(budgets[0].hour_count, 2);
    CHECK_INT(budgets[0].hours[0].from_s, 480 * 60);
    CHECK_INT(budgets[0].hours[1].to_s, 2520 * 60);
    CHECK_INT(budgets[0].hours[0].watts, 90000);
    CHECK(!strcmp(budgets[1].nodes, "n[1-16,20]") && !budgets[1].watts);
    CHECK(!strcmp(budgets[2].tenant, "t") && !budgets[2].hour_count);
    CHECK_INT(budgets[2].kept - budgets[0].kept, 4);
    sluice_rules_free(rules);
}

int main(void)
{
    test_budgets();
    test_crc();
    test_whole();
    test_empty();
    test_refused();
    test_damage();
    test_bounds();
    return 0;
}
