"""Profiles of jobs: `sluice profile` as the job's own user, for that user and for operators."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Mapping
from typing import Any

from sluice.actd.arguments import PATH
from sluice.actd.become import Account, run_as
from sluice.actd.jobs import refusal
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON
from sluice.base.text import one_line
from sluice.client.models import ProfileRequest
from sluice.exchange.acts import ActError
from sluice.profile.job import find_job
from sluice.slurm.commands import Commands

_SECONDS = 100.0  # less than the web process waits
_EVENTS = 200_000
"""Fewer than for users on their own: memory of programs that are run here is bounded."""
_OPERATOR = 1


def _python() -> dict[str, str]:
    """Where this process's Python has its packages from, if not from its own place."""
    return {name: os.environ[name] for name in ("PYTHONHOME", "PYTHONPATH") if name in os.environ}


class Profiles:
    """`account`: a user for whom something may be done; `level`: a user's, of Slurm's accounting."""

    def __init__(
        self,
        commands: Commands,
        account: Callable[[str], Account],
        level: Callable[[str], int],
        where: Callable[[], Mapping[str, str]],
    ) -> None:
        self._commands = commands
        self._account = account
        self._level = level
        self._where = where

    def change(self, who: Account, did: str, job: str, body: ProfileRequest) -> dict[str, Any]:
        """Start or stop a profile. Raises ActError."""
        words = ["--seconds", str(body.seconds)] if did == "start" and body.seconds is not None else []
        said = self._run(who, did, job, body.step, words)[1]
        return {"schema_version": 1, "job": job, "did": did, "messages": said}

    def summary(self, who: Account, job: str, body: ProfileRequest) -> dict[str, Any]:
        """What was profiled until now. Raises ActError."""
        text, _ = self._run(who, "summary", job, body.step, ["--json", "--events", str(_EVENTS)])
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:  # it came from a process of the job's user
            raise ActError(503, f"profile of job {job}: not a document", remedy="see sluice-actd's log") from error

    def _run(self, who: Account, did: str, job: str, step: str, words: list[str]) -> tuple[str, list[str]]:
        try:
            found = find_job(self._commands, job)
            user = pwd.getpwuid(found.uid).pw_name
        except (SluiceError, KeyError) as error:
            raise ActError(404, f"job {job}: not known", remedy="see the list of jobs") from error
        if found.uid != who.uid and self._level(who.name) < _OPERATOR:
            raise ActError(403, f"job {job}: is another user's", remedy="ask its user, or an operator of Slurm")
        name = f"{job}.{step}" if step else job
        done = run_as(
            who if found.uid == who.uid else self._account(user),
            [*PYTHON, "-m", "sluice.main", "profile", did, *self._prefix(), *words, name],
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/", **_python(), **self._where()},
            timeout=_SECONDS,
            most=1 << 20,
        )
        if done.status != 0:
            raise refusal("sluice", done)
        return done.out, [one_line(line) for line in done.err.splitlines()[:50]]

    def _prefix(self) -> list[str]:
        return [] if self._commands.prefix is None else ["--slurm-prefix", str(self._commands.prefix)]
