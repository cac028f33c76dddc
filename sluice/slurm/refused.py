"""The words in a job's AdminComment by which a node tells why it refused the job (prolog_epilog/holds.py).

Between what a site and `usage/admin_comment.py` write there, which is kept.
"""

from __future__ import annotations

import re

from sluice_base.text import one_line

_OURS = re.compile(r"(?:^|\s)sluice-refused: (.*?)(?=\s+sluice:|$)", re.DOTALL)
_UNSAFE = re.compile(r"""['"\\`]""")  # sacctmgr changes quotes
_MOST = 512


def with_reason(comment: str, why: str) -> str:
    """The comment with this reason in the place of an earlier one."""
    others = _OURS.sub("", comment).strip()
    return f"{others} sluice-refused: {_UNSAFE.sub('', one_line(why, limit=_MOST))}".strip()


def reason_in(comment: str) -> str:
    """Why the job was refused; empty: it was not."""
    found = _OURS.search(comment)
    return found[1].strip() if found else ""
