/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "admission/constraint.h"

#include "admission/wording.h"

#include <stdio.h>
#include <string.h>

static const char *constraint(const struct sluice_submission *submission, const struct sluice_admission *admission)
{
    if (admission->features[0])
        return admission->features;
    return submission->features ? submission->features : "";
}

static const char *preference(const struct sluice_submission *submission, const struct sluice_admission *admission)
{
    if (admission->prefer[0])
        return admission->prefer;
    return submission->prefer ? submission->prefer : "";
}

/* The length of the term that `list` begins with: a feature, or what one pair of parentheses holds. 0 where it is
 * neither, or not joined to what follows by &: counts, brackets, and alternatives without parentheses. */
static size_t term_length(const char *list)
{
    static const char special[] = "&|*()[]!,";
    size_t length;
    if (*list == '(') {
        length = 1 + strcspn(list + 1, "*()[]!,");
        length = list[length] == ')' ? length + 1 : 0;
    } else {
        length = strcspn(list, special);
    }
    return length && (list[length] == '&' || list[length] == '\0') ? length : 0;
}

static const char *after_term(const char *list, size_t length)
{
    return list + length + (list[length] == '&');
}

/* Whether Slurm reads `list` so that all of its terms must hold. */
static bool is_conjunction(const char *list)
{
    while (*list) {
        size_t length = term_length(list);
        if (!length)
            return false;
        list = after_term(list, length);
    }
    return true;
}

static bool has_term(const char *list, const char *term)
{
    size_t wanted = strlen(term);
    if (!is_conjunction(list))
        return false;
    for (size_t length; *list; list = after_term(list, length)) {
        length = term_length(list);
        if (length == wanted && memcmp(list, term, length) == 0)
            return true;
    }
    return false;
}

bool sluice_has_feature(const struct sluice_submission *submission, const struct sluice_admission *admission,
                        const char *feature)
{
    return has_term(constraint(submission, admission), feature);
}

/* Adds to `list`, the value of `option`; writes the result, if there is one, to `out`. */
static bool add_term(const char *option, const char *list, const char *feature, const char *because, char *out,
                     struct sluice_admission *admission)
{
    char joined[SLUICE_NAME_LIST_MAX], added[SLUICE_NAME_LIST_MAX];
    snprintf(added, sizeof added, strchr(feature, '|') ? "(%s)" : "%s", feature);
    if (strcmp(list, feature) == 0 || has_term(list, added))
        return true;
    if (!is_conjunction(list))
        return sluice_refuse(
            admission, SLUICE_REFUSED_REQUEST,
            "%s needs the constraint %s, which cannot be added to yours; write a %s that joins features by & only",
            because, feature, option);
    int length =
        *list ? snprintf(joined, sizeof joined, "%s&%s", list, added) : snprintf(joined, sizeof joined, "%s", feature);
    if (length < 0 || (size_t)length >= sizeof joined)
        return sluice_refuse(admission, SLUICE_REFUSED_REQUEST, "the %s is too long; at most %d characters", option,
                             SLUICE_NAME_LIST_MAX - 1);
    memcpy(out, joined, (size_t)length + 1);
    return true;
}

bool sluice_require_feature(const struct sluice_submission *submission, const char *feature, const char *because,
                            struct sluice_admission *admission)
{
    const char *preferred = preference(submission, admission);
    return add_term("--constraint", constraint(submission, admission), feature, because, admission->features,
                    admission) &&
           (!*preferred || add_term("--prefer", preferred, feature, because, admission->prefer, admission));
}
