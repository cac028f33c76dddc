/* SPDX-License-Identifier: Apache-2.0 */
#include "fairshare.h"

#include <stdlib.h>

#include "error.h"
#include "fixed.h"
#include "sort.h"

enum { MAX_SHARES = 1000000, MAX_DEPTH = 64 };
static const uint64_t MAX_CHARGE = UINT64_C(1) << 40;

struct account {
    uint64_t usage; /* decayed to `used_at` */
    int64_t used_at;
    uint32_t parent;
    uint32_t depth;
    uint32_t shares;
    uint32_t factor;
    uint32_t first_child; /* 0: none; the root is never a child */
    uint32_t next_sibling;
    uint32_t subtree_size; /* of accounts below and itself */
};

/* A sibling in the order of its level: more shares per usage first. */
struct rank {
    uint64_t shares;
    uint64_t usage;
    uint32_t account;
};

struct sluice_fairshare {
    int64_t half_life_s;
    uint32_t count;
    uint32_t capacity;
    struct account *accounts;
    struct rank *ranks;        /* scratch of the refresh: the siblings of one level */
    struct rank *rank_scratch; /* what sorting them needs */
    uint32_t *positions;       /* scratch: place of each account, its subtree right behind it */
};

enum sluice_error sluice_fairshare_new(uint32_t max_accounts, int64_t half_life_s, struct sluice_fairshare **fairshare,
                                       struct sluice_error_text *text)
{
    if (max_accounts < 1 || half_life_s < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "fair-share of %u accounts, half-life %lld s: at least one and not negative", max_accounts,
                           (long long)half_life_s);
    struct sluice_fairshare *made = calloc(1, sizeof *made);
    if (made) {
        made->half_life_s = half_life_s;
        made->capacity = max_accounts;
        made->accounts = calloc(max_accounts, sizeof *made->accounts);
        made->ranks = calloc(max_accounts, sizeof *made->ranks);
        made->rank_scratch = calloc(max_accounts, sizeof *made->rank_scratch);
        made->positions = calloc(max_accounts, sizeof *made->positions);
    }
    if (!made || !made->accounts || !made->ranks || !made->rank_scratch || !made->positions) {
        sluice_fairshare_free(made);
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "fair-share of %u accounts: out of host memory", max_accounts);
    }
    made->count = 1;
    made->accounts[SLUICE_FAIRSHARE_ROOT] =
        (struct account){.shares = 1, .subtree_size = 1, .factor = SLUICE_FACTOR_ONE};
    *fairshare = made;
    return SLUICE_OK;
}

void sluice_fairshare_free(struct sluice_fairshare *fairshare)
{
    if (!fairshare)
        return;
    free(fairshare->accounts);
    free(fairshare->ranks);
    free(fairshare->rank_scratch);
    free(fairshare->positions);
    free(fairshare);
}

bool sluice_fairshare_knows(const struct sluice_fairshare *fairshare, uint32_t account)
{
    return account < fairshare->count;
}

uint32_t sluice_fairshare_factor_of(const struct sluice_fairshare *fairshare, uint32_t account)
{
    return fairshare->accounts[account].factor;
}

static enum sluice_error check_account(const struct sluice_fairshare *fairshare, uint32_t account,
                                       struct sluice_error_text *text)
{
    if (sluice_fairshare_knows(fairshare, account))
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "account %u: the fair-share tree has %u; add it first", account,
                       fairshare->count);
}

static enum sluice_error check_shares(uint32_t shares, struct sluice_error_text *text)
{
    if (shares <= MAX_SHARES)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_RANGE, "shares %u: at most %d", shares, MAX_SHARES);
}

enum sluice_error sluice_fairshare_add(struct sluice_fairshare *fairshare, uint32_t parent, uint32_t shares,
                                       uint32_t *account, struct sluice_error_text *text)
{
    enum sluice_error error = check_account(fairshare, parent, text);
    if (error == SLUICE_OK)
        error = check_shares(shares, text);
    if (error != SLUICE_OK)
        return error;
    struct account *accounts = fairshare->accounts;
    if (fairshare->count == fairshare->capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "account below %u: the fair-share tree was made for %u", parent,
                           fairshare->capacity);
    if (accounts[parent].depth + 1 >= MAX_DEPTH)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "account below %u: deeper than %d levels", parent, MAX_DEPTH);
    uint32_t id = fairshare->count++;
    accounts[id] = (struct account){.parent = parent,
                                    .depth = accounts[parent].depth + 1,
                                    .shares = shares,
                                    .next_sibling = accounts[parent].first_child,
                                    .subtree_size = 1};
    accounts[parent].first_child = id;
    for (uint32_t above = id; above != SLUICE_FAIRSHARE_ROOT;) {
        above = accounts[above].parent;
        accounts[above].subtree_size++;
    }
    *account = id;
    return SLUICE_OK;
}

enum sluice_error sluice_fairshare_set_shares(struct sluice_fairshare *fairshare, uint32_t account, uint32_t shares,
                                              struct sluice_error_text *text)
{
    enum sluice_error error = check_account(fairshare, account, text);
    if (error == SLUICE_OK)
        error = check_shares(shares, text);
    if (error == SLUICE_OK)
        fairshare->accounts[account].shares = shares;
    return error;
}

static uint64_t usage_at(const struct sluice_fairshare *fairshare, const struct account *account, int64_t now_s)
{
    if (fairshare->half_life_s == 0 || now_s <= account->used_at)
        return account->usage;
    return sluice_decay(account->usage, now_s - account->used_at, fairshare->half_life_s);
}

static void bring_to(const struct sluice_fairshare *fairshare, struct account *account, int64_t now_s)
{
    account->usage = usage_at(fairshare, account, now_s);
    if (now_s > account->used_at)
        account->used_at = now_s;
}

enum sluice_error sluice_fairshare_charge(struct sluice_fairshare *fairshare, uint32_t account, uint64_t usage,
                                          int64_t now_s, struct sluice_error_text *text)
{
    enum sluice_error error = check_account(fairshare, account, text);
    if (error != SLUICE_OK)
        return error;
    if (usage > MAX_CHARGE || now_s < 0)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "charge of %llu at %lld s: at most 2^40, at a time from 0 on",
                           (unsigned long long)usage, (long long)now_s);
    for (uint32_t id = account;; id = fairshare->accounts[id].parent) {
        struct account *charged = &fairshare->accounts[id];
        bring_to(fairshare, charged, now_s);
        if (__builtin_add_overflow(charged->usage, usage, &charged->usage))
            charged->usage = UINT64_MAX;
        if (id == SLUICE_FAIRSHARE_ROOT)
            return SLUICE_OK;
    }
}

enum sluice_error sluice_fairshare_usage(const struct sluice_fairshare *fairshare, uint32_t account, int64_t now_s,
                                         uint64_t *usage, struct sluice_error_text *text)
{
    enum sluice_error error = check_account(fairshare, account, text);
    if (error == SLUICE_OK)
        *usage = usage_at(fairshare, &fairshare->accounts[account], now_s);
    return error;
}

/* Level fair-share compared without division: shares/usage is the same order as normalised shares over normalised
 * usage, since siblings have the same sums. No shares: last; no usage: first. */
static int compare_level_fair_share(const struct rank *left, const struct rank *right)
{
    bool left_idle = left->shares == 0, right_idle = right->shares == 0;
    if (left_idle != right_idle)
        return left_idle ? 1 : -1;
    sluice_u128 left_ratio = (sluice_u128)left->shares * right->usage;
    sluice_u128 right_ratio = (sluice_u128)right->shares * left->usage;
    if (left_ratio != right_ratio)
        return left_ratio > right_ratio ? -1 : 1;
    /* Both unused: more shares first. */
    if (left->usage == 0 && right->usage == 0 && left->shares != right->shares)
        return left->shares > right->shares ? -1 : 1;
    return 0;
}

static int compare_ranks(const void *left_rank, const void *right_rank)
{
    const struct rank *left = left_rank, *right = right_rank;
    int order = compare_level_fair_share(left, right);
    return order ? order : (left->account > right->account) - (left->account < right->account);
}

/* Places the children of `parent`, whose subtree begins at positions[parent], and their subtrees after one another. */
static void rank_children(struct sluice_fairshare *fairshare, uint32_t parent)
{
    struct rank *ranks = fairshare->ranks;
    struct account *accounts = fairshare->accounts;
    uint32_t count = 0;
    for (uint32_t child = accounts[parent].first_child; child; child = accounts[child].next_sibling)
        ranks[count++] =
            (struct rank){.shares = accounts[child].shares, .usage = accounts[child].usage, .account = child};
    sluice_sort(ranks, fairshare->rank_scratch, count, sizeof *ranks, compare_ranks);
    uint32_t position = fairshare->positions[parent] + 1;
    for (uint32_t i = 0; i < count; i++) {
        /* Equal siblings without children of their own share one place: neither is before the other. */
        bool equal = i > 0 && compare_level_fair_share(&ranks[i - 1], &ranks[i]) == 0 &&
                     accounts[ranks[i].account].first_child == 0 && accounts[ranks[i - 1].account].first_child == 0;
        fairshare->positions[ranks[i].account] = equal ? fairshare->positions[ranks[i - 1].account] : position;
        position += accounts[ranks[i].account].subtree_size;
    }
}

void sluice_fairshare_refresh(struct sluice_fairshare *fairshare, int64_t now_s)
{
    for (uint32_t id = 0; id < fairshare->count; id++)
        bring_to(fairshare, &fairshare->accounts[id], now_s);
    fairshare->positions[SLUICE_FAIRSHARE_ROOT] = 0;
    /* Parents have smaller ids than their children, so that each parent is placed before its children are. */
    for (uint32_t id = 0; id < fairshare->count; id++) {
        rank_children(fairshare, id);
        fairshare->accounts[id].factor = (uint32_t)sluice_scale(
            SLUICE_FACTOR_ONE, fairshare->count - (id ? fairshare->positions[id] - 1 : 0), fairshare->count);
    }
}

enum sluice_error sluice_fairshare_factor(const struct sluice_fairshare *fairshare, uint32_t account, uint32_t *factor,
                                          struct sluice_error_text *text)
{
    enum sluice_error error = check_account(fairshare, account, text);
    if (error == SLUICE_OK)
        *factor = sluice_fairshare_factor_of(fairshare, account);
    return error;
}
