"""`sluice plugin disable` and `uninstall`: members of gangs are waited for on controllers only."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from sluice.cli import plugin
from sluice.plugin.install import Result
from sluice.plugin.site import SiteOptions
from sluice.plugin.status import SCHEMA_VERSION


def has_run(folder: Path, host: str) -> None:
    (folder / f"sluice.status.{host}").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "level": "off"}))


def leave(folder: Path) -> list[str]:
    result = Result()
    plugin._await_gangs(result, SiteOptions(state_folder=str(folder)))
    return result.left


@pytest.mark.parametrize("host", [None, "another"])
def test_where_no_slurmctld_has_run_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    if host:
        has_run(tmp_path, host)
    monkeypatch.setattr(plugin, "_held_members", lambda: pytest.fail("Slurm was asked"))
    assert leave(tmp_path) == []


def test_who_is_still_held_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_run(tmp_path, socket.gethostname())
    monkeypatch.setattr(plugin, "_RELEASE_S", 0)
    monkeypatch.setattr(plugin, "_held_members", lambda: ["7", "12_3"])
    assert [line for line in leave(tmp_path) if line.endswith("scontrol release 7,12_3")]
    monkeypatch.setattr(plugin, "_held_members", list)
    assert leave(tmp_path) == []
