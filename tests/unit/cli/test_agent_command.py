"""`sluice agent` before it is the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.cli.agent import command


@pytest.mark.parametrize(("site", "expected"), [({}, "2"), ({"MALLOC_ARENA_MAX": "8"}, "8")])
def test_its_threads_share_arenas_unless_the_site_says_otherwise(
    site: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def become(path: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        found.append(environment["MALLOC_ARENA_MAX"])

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr("prolog_epilog.daemon.serve", lambda _: None)
    CliRunner().invoke(command, ["--run", str(tmp_path)], env=site, catch_exceptions=False)
    assert found == [expected]
