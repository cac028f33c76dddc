"""The texts in a job's AdminComment with a node's reason for refusing the job, and what came of saving it
(prolog_epilog/holds.py).

What a site and `sluice/controllerd/accounting.py` write there is kept.
"""

from __future__ import annotations

import re

from sluice.base.text import one_line

_OURS = re.compile(r"(?:^|\s)sluice-refused: (.*?)(?=\s+sluice[:-]|$)", re.DOTALL)
_STATE = re.compile(r"(?:^|\s)sluice-state: (.*?)(?=\s+sluice[:-]|$)", re.DOTALL)
_UNSAFE = re.compile(r"""['"\\`]""")  # sacctmgr changes quotes
_MOST = 512


def with_reason(comment: str, why: str) -> str:
    """The comment with this reason in place of an earlier one."""
    others = _OURS.sub("", comment).strip()
    return f"{others} sluice-refused: {_UNSAFE.sub('', one_line(why, limit=_MOST))}".strip()


def with_state(comment: str, words: str) -> str:
    """The comment with what came of saving or resuming the job, in place of what came of it before."""
    others = _STATE.sub("", comment).strip()
    return f"{others} sluice-state: {_UNSAFE.sub('', one_line(words, limit=_MOST))}".strip()


def reason_in(comment: str) -> str:
    """Why the job was refused; empty: it was not."""
    found = _OURS.search(comment)
    return found[1].strip() if found else ""
