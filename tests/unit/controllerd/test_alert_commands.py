"""What `sluice alerts` prints about rules and policies that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from policy.alerts import NodeAlerts, NodeRule
from policy.node import FILE_NAME, NodePolicy
from sluice.base.errors import SluiceError
from sluice.cli import alerts
from sluice.exchange.silences import read_silences


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of alerts and of slurm.conf, with a policy of two rules and no sink."""
    rules = tuple(NodeRule(name=name, kind="node-drained", threshold=1, duration=0) for name in ("hot", "quiet"))
    (tmp_path / FILE_NAME).write_text(NodePolicy(alerts=NodeAlerts(rules=rules)).render())
    monkeypatch.setattr(
        alerts, "_folder", lambda conf, prefix: (tmp_path, {"SLURM_CONF": str(tmp_path / "slurm.conf")})
    )
    return tmp_path


def silence(*words: str) -> Result:
    return CliRunner().invoke(alerts.command, ["silence", *words])


@pytest.mark.parametrize(("rule", "known"), [("hot", True), ("*t", True), ("hto", False)])
def test_a_silence_of_no_rule_is_kept_and_said(folder: Path, rule: str, known: bool) -> None:
    done = silence(rule, "--for", "2h")
    assert done.exit_code == 0 and [one.rule for one in read_silences(folder, 0.0)] == [rule]
    said = "no rule of the policy is called 'hto' now; its rules: hot, quiet"
    assert (said in done.output) is not known


def test_nothing_fires_because_there_is_no_rule(folder: Path) -> None:
    said = "the policy has no rules for alerts"
    assert said not in CliRunner().invoke(alerts.command, ["list"]).output
    (folder / FILE_NAME).write_text(NodePolicy().render())
    assert said in CliRunner().invoke(alerts.command, ["list"]).output
    assert said not in CliRunner().invoke(alerts.command, ["list", "-P"]).output


def test_a_policy_that_cannot_be_read_is_reported_and_does_not_prevent_silence(folder: Path) -> None:
    (folder / FILE_NAME).write_text("{")
    assert silence("hot").exit_code == 0
    done = CliRunner().invoke(alerts.command, ["test"])
    assert isinstance(done.exception, SluiceError) and FILE_NAME in str(done.exception)
