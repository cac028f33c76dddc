"""What root's helper writes into the policy file, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import document
from policy.access import Caller
from sluice.actd import policy_run
from sluice.base.errors import SluiceError, UsageError

ROOT = Caller("root", 0, 3)
POLICY = """\
tenants:
  physics: {members: [alice]}
services:
  llm: &common
    tenant: physics
    user: alice
    engine: openai
    command: [/usr/bin/true]
    replicas: &few {least: 0, most: 1}
    paused: true
  merged:
    <<: *common
    replicas: {most: 2}
  sharing:
    tenant: physics
    user: alice
    engine: openai
    command: [/usr/bin/true]
    replicas: *few
  own:  # a comment
    tenant: physics
    user: alice
    engine: openai
    command: [/usr/bin/true]
    replicas: {least: 0, most: 1}
"""


class Cluster:
    """A site where everything is applied at once; `meanwhile` is what others do before."""

    def __init__(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def compare(self, source: document.Source, *, keep_level: bool = False) -> Any:
        shown = {"cluster": "c", "version": source.digest, "changes": [], "notes": []}
        return SimpleNamespace(source=source, changes=[], document=lambda: shown)

    def apply(self, comparison: Any, *, before: Callable[[], None], **_: Any) -> tuple[list[Any], list[Any]]:
        self.meanwhile()
        before()
        return [], []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sluice.yaml"
    path.write_text(POLICY)
    path.chmod(0o640)
    return path


def change(site: Any, path: Path, service: str, **words: Any) -> None:
    policy_run.change_service(site, path, {"service": service, **words}, ROOT)


def test_a_service_is_changed_and_nothing_else(path: Path) -> None:
    change(Cluster(), path, "own", most=3, paused=True)
    last = "replicas: {least: 0, most: "
    assert path.read_text() == POLICY.removesuffix(last + "1}\n") + last + "3}\n    paused: true\n"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pause_that_is_merged_into_a_service_is_taken_back_there_alone(path: Path) -> None:
    change(Cluster(), path, "merged", paused=False)
    services = document.load(path).policy.services
    assert {name: one.paused for name, one in services.items() if one.paused} == {"llm": True}


@pytest.mark.parametrize(
    ("service", "words"), [("llm", {"most": 3}), ("sharing", {"least": 1}), ("llm", {"paused": False})]
)
def test_what_services_share_is_not_changed_for_one_of_them(path: Path, service: str, words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="by an anchor"):
        change(Cluster(), path, service, **words)
    assert path.read_text() == POLICY


def apply_another(site: Any, path: Path) -> None:
    text = POLICY.replace("alice", "bob")
    policy_run.apply(site, path, text, policy_run.plan(site, path, text)[1]["hash"], ROOT)


@pytest.mark.parametrize("write", [lambda site, path: change(site, path, "own", most=3), apply_another])
def test_what_an_editor_saves_meanwhile_is_not_lost(path: Path, write: Callable[[Any, Path], None]) -> None:
    with pytest.raises(SluiceError, match="somebody changed it in the meantime"):
        write(Cluster(lambda: path.write_text(POLICY + "# saved\n")), path)
    assert path.read_text() == POLICY + "# saved\n"
    write(Cluster(), path)
    assert path.read_text() not in (POLICY, POLICY + "# saved\n")
