"""SlurmUser: its uid, and changing to it."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Mapping

from sluice.base.errors import SluiceError


def slurm_user(config: Mapping[str, str]) -> int:
    """SlurmUser's uid, from ``slurm(64030)``. Raises SluiceError."""
    match = re.search(r"\((\d+)\)\s*$", config.get("SlurmUser", ""))
    if match is None:
        raise SluiceError(
            f"SlurmUser {config.get('SlurmUser', '')!r}: has no uid",
            remedy="check SlurmUser in slurm.conf, and that the user exists on this host",
        )
    return int(match[1])


def drop_privileges(uid: int) -> None:
    """Become SlurmUser for good, with that user's groups. Raises SluiceError for another user's process."""
    if os.geteuid() == uid:
        return
    if os.geteuid() != 0:
        raise SluiceError(f"uid {os.geteuid()}: not root or SlurmUser ({uid})", remedy="start it as SlurmUser")
    try:
        user = pwd.getpwuid(uid)
    except KeyError as error:
        raise SluiceError(
            f"SlurmUser: uid {uid} has no entry in passwd", remedy="create the user, with the same uid on all hosts"
        ) from error
    groups = [group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem]
    os.setgroups([user.pw_gid, *groups])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(uid, uid, uid)
