"""Profiles over the REST API: what a process of the job's user says is that user's claim."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from sluice.actd import profiles
from sluice.actd.become import Account
from sluice.actd.profiles import Profiles
from sluice.base.run import Finished
from sluice.client.models import ProfileRequest
from sluice.exchange.acts import ActError
from sluice.profile.job import ProfiledJob
from sluice.slurm.commands import Commands

OWN = pwd.getpwuid(os.getuid())
WHO = Account(OWN.pw_name, OWN.pw_uid, OWN.pw_gid, (), "/", "/bin/sh")


@pytest.mark.parametrize("said", ["", "[1]", "7", "[" * 200_000, '{"a":' * 200_000])
def test_what_is_no_document_is_an_error(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    job = ProfiledJob(17, "", WHO.uid, 1, runs=True, work_dir=Path("/"))
    monkeypatch.setattr(profiles, "find_job", lambda *_: job)
    monkeypatch.setattr(profiles, "run_as", lambda *_, **__: Finished(0, said, ""))
    acts = Profiles(Commands(), lambda _: WHO, lambda _: 0, dict)
    with pytest.raises(ActError, match="not a document"):
        acts.summary(WHO, "17", ProfileRequest())
