/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "sluice/core.h"

static struct sluice_error_text text;

static uint32_t add(struct sluice_fairshare *tree, uint32_t parent, uint32_t shares)
{
    uint32_t account;
    CHECK_INT(sluice_fairshare_add(tree, parent, shares, &account, &text), SLUICE_OK);
    return account;
}

static uint32_t factor(struct sluice_fairshare *tree, uint32_t account)
{
    uint32_t value;
    CHECK_INT(sluice_fairshare_factor(tree, account, &value, &text), SLUICE_OK);
    return value;
}

static uint64_t usage(struct sluice_fairshare *tree, uint32_t account, int64_t now_s)
{
    uint64_t value;
    CHECK_INT(sluice_fairshare_usage(tree, account, now_s, &value, &text), SLUICE_OK);
    return value;
}

/* A user of an account that used little comes before every user of an account that used much. */
static void test_tree(void)
{
    struct sluice_fairshare *tree;
    CHECK_INT(sluice_fairshare_new(16, 1000, &tree, &text), SLUICE_OK);
    uint32_t physics = add(tree, SLUICE_FAIRSHARE_ROOT, 1), biology = add(tree, SLUICE_FAIRSHARE_ROOT, 3);
    uint32_t ann = add(tree, physics, 1), ben = add(tree, physics, 1);
    uint32_t cem = add(tree, biology, 1), dia = add(tree, biology, 1);

    sluice_fairshare_refresh(tree, 0);
    CHECK_INT(factor(tree, SLUICE_FAIRSHARE_ROOT), SLUICE_FACTOR_ONE);
    CHECK(factor(tree, cem) > factor(tree, ann)); /* nothing used: more shares first */
    CHECK_INT(factor(tree, ann), factor(tree, ben));

    CHECK_INT(sluice_fairshare_charge(tree, ann, 1000000, 0, &text), SLUICE_OK);
    CHECK_INT(sluice_fairshare_charge(tree, cem, 2000000, 0, &text), SLUICE_OK);
    CHECK_INT(usage(tree, physics, 0), 1000000);
    CHECK_INT(usage(tree, SLUICE_FAIRSHARE_ROOT, 0), 3000000);
    sluice_fairshare_refresh(tree, 0);
    /* biology used 2 of shares 3, physics 1 of 1 */
    CHECK(factor(tree, dia) > factor(tree, cem));
    CHECK(factor(tree, cem) > factor(tree, ben));
    CHECK(factor(tree, ben) > factor(tree, ann));
    CHECK(factor(tree, ann) > 0);

    CHECK_INT(sluice_fairshare_charge(tree, dia, 1500000, 0, &text), SLUICE_OK);
    sluice_fairshare_refresh(tree, 0); /* biology used 3.5 of 3 */
    CHECK(factor(tree, ben) > factor(tree, dia));
    CHECK_INT(sluice_fairshare_set_shares(tree, physics, 0, &text), SLUICE_OK);
    sluice_fairshare_refresh(tree, 0); /* no shares: only idle GPUs */
    CHECK(factor(tree, dia) > factor(tree, ben));

    uint64_t decayed = usage(tree, cem, 1000);
    CHECK(decayed >= 999990 && decayed <= 1000000);
    CHECK_INT(usage(tree, cem, 100000), 0);
    /* Time that goes back neither grows usage nor fails. */
    CHECK_INT(sluice_fairshare_charge(tree, cem, 5, 5000, &text), SLUICE_OK);
    uint64_t before = usage(tree, cem, 5000);
    CHECK_INT(usage(tree, cem, 10), before);
    sluice_fairshare_free(tree);
}

static void test_refused(void)
{
    struct sluice_fairshare *tree;
    CHECK_INT(sluice_fairshare_new(0, 0, &tree, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_fairshare_new(1, -1, &tree, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_fairshare_new(3, 0, &tree, &text), SLUICE_OK);
    uint32_t account = 42;
    CHECK_INT(sluice_fairshare_add(tree, 9, 1, &account, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_fairshare_add(tree, 0, 1000001, &account, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(account, 42);
    add(tree, 0, 1);
    add(tree, 0, 1);
    CHECK_INT(sluice_fairshare_add(tree, 0, 1, &account, &text), SLUICE_ERROR_CAPACITY);
    CHECK_INT(sluice_fairshare_charge(tree, 7, 1, 0, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(sluice_fairshare_charge(tree, 1, UINT64_MAX, 0, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_fairshare_charge(tree, 1, 1, -1, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_fairshare_set_shares(tree, 3, 1, &text), SLUICE_ERROR_UNKNOWN);
    CHECK_INT(usage(tree, 1, 0), 0);
    CHECK_INT(sluice_fairshare_charge(tree, 1, 10, 0, &text), SLUICE_OK);
    CHECK_INT(usage(tree, 1, INT64_MAX), 10); /* half-life 0: never decays */
    sluice_fairshare_free(tree);
    sluice_fairshare_free(NULL);
}

static int64_t predict(struct sluice_predictor *predictor, uint64_t specific, uint64_t general, int64_t elapsed_s,
                       int64_t limit_s)
{
    const uint64_t keys[] = {specific, general};
    int64_t remaining_s;
    CHECK_INT(sluice_predictor_predict(predictor, keys, 2, elapsed_s, limit_s, &remaining_s, &text), SLUICE_OK);
    return remaining_s;
}

static void record(struct sluice_predictor *predictor, uint64_t specific, uint64_t general, int64_t run_s)
{
    const uint64_t keys[] = {specific, general};
    CHECK_INT(sluice_predictor_record(predictor, keys, 2, run_s, &text), SLUICE_OK);
}

static void test_predictor(void)
{
    enum { TRAIN = 1001, EVAL = 1002, USER = 1 };
    struct sluice_predictor *predictor;
    CHECK_INT(sluice_predictor_new(8, 50, &predictor, &text), SLUICE_OK);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 3600);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 0), INT64_MAX);
    record(predictor, TRAIN, USER, 600);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 3600); /* one run says little */
    record(predictor, EVAL, USER, 20);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 20); /* two of the user's */
    record(predictor, TRAIN, USER, 800);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 600);
    CHECK_INT(predict(predictor, TRAIN, USER, 100, 3600), 500);
    CHECK_INT(predict(predictor, TRAIN, USER, 700, 3600), 700); /* outlived */
    CHECK_INT(predict(predictor, TRAIN, USER, 3000, 3600), 600);
    CHECK_INT(predict(predictor, TRAIN, USER, 4000, 3600), 0);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 60), 60);
    for (int run = 0; run < 40; run++)
        record(predictor, TRAIN, USER, 50); /* old runs are forgotten */
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 50);
    for (uint64_t other = 1; other <= 7; other++)
        record(predictor, 5000 + other, USER, 10); /* eight keys in all with USER: TRAIN has to go */
    CHECK_INT(predict(predictor, TRAIN, 77, 0, 3600), 3600);
    CHECK_INT(predict(predictor, TRAIN, USER, 0, 3600), 10);

    int64_t remaining_s = 42;
    const uint64_t keys[5] = {1, 2, 3, 4, 5};
    CHECK_INT(sluice_predictor_predict(predictor, keys, 0, 0, 0, &remaining_s, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_predictor_predict(predictor, keys, 5, 0, 0, &remaining_s, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_predictor_predict(predictor, keys, 1, -1, 0, &remaining_s, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_predictor_record(predictor, keys, 1, -1, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(remaining_s, 42);
    sluice_predictor_free(predictor);
    sluice_predictor_free(NULL);
    CHECK_INT(sluice_predictor_new(0, 50, &predictor, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_predictor_new(1, 0, &predictor, &text), SLUICE_ERROR_RANGE);
    CHECK_INT(sluice_predictor_new(1, 101, &predictor, &text), SLUICE_ERROR_RANGE);
}

int main(void)
{
    test_tree();
    test_refused();
    test_predictor();
    return 0;
}
