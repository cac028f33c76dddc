"""Programs of Slurm, run as a user: nothing of this process goes along, and nothing of the user's comes in.

The child has the user's ids and groups, no privilege that it could gain again (this process has set no_new_privs, which
children keep), a session of its own, an environment that is made here, and no file that it is not given.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.run import Finished, finish, input_file
from sluice.exchange.acts import ActError

MOST_OUTPUT = 256 << 10
_LOGIN_DEFS = Path("/etc/login.defs")
_USUAL_LEAST_UID = 1000
_BOUNDED = ("/usr/bin/prlimit", f"--data={128 << 20}", "--cpu=30", "--core=0")
_PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this host."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


def gain_nothing() -> None:
    """From now on neither this process nor its children gain a privilege by a program's mode. Raises SluiceError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SluiceError(f"no_new_privs: {os.strerror(ctypes.get_errno())}", remedy="use Linux 3.5 or newer")


def least_uid() -> int:
    """UID_MIN of login.defs: below are the system's own users."""
    try:
        match = re.search(r"^\s*UID_MIN\s+(\d+)", _LOGIN_DEFS.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) if match else _USUAL_LEAST_UID


def account(name: str, least: int, never: Iterable[int] = ()) -> Account:
    """The user of a name, for whom something may be done. Raises ActError 403."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError) as error:
        raise ActError(403, f"user {name!r}: not known on this host", remedy="add the user to this host") from error
    if found.pw_uid < max(least, 1) or found.pw_uid in set(never):
        raise ActError(403, f"user {name!r}: nothing is done for root and users of the system", remedy="use sluice(1)")
    groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
    if 0 in groups:
        raise ActError(403, f"user {name!r}: is in root's group", remedy="take the user out of it")
    home = found.pw_dir if found.pw_dir.startswith("/") else "/"
    return Account(found.pw_name, found.pw_uid, found.pw_gid, groups, home, found.pw_shell)


def run_as(
    who: Account,
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    given: bytes = b"",
    files: Sequence[int] = (),
    most: int = MOST_OUTPUT,
) -> Finished:
    """Run a program as a user to its end. Raises ActError 503 where it cannot be started.

    `given` is its standard input, `files` are descriptors that it gets under their numbers, `most` bounds each of its
    two outputs. Whatever it started and left in its session's group is ended with it.
    """
    root = os.geteuid() == 0
    try:
        with input_file(given) as stdin:
            child = subprocess.Popen(
                [*_BOUNDED, *words],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=dict(env),
                user=who.uid if root else None,
                group=who.gid if root else None,
                extra_groups=list(who.groups) if root else None,
                umask=0o022,
                start_new_session=True,
                close_fds=True,
                pass_fds=tuple(files),
            )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise ActError(503, f"{words[0]}: {said}", remedy="see the log of sluice-actd") from error
    return finish(child, timeout, most)
