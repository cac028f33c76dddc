"""`sluice node` before it asks slurmctld: which nodes are meant, and who may."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from sluice.base.errors import SluiceError, UsageError
from sluice.cli import node
from sluice.exchange.emptying import Emptying, LeavingJob
from sluice.slurm import Commands

TOPOLOGY = """SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]
"""
KNOWN = ["n1", "n2", "n3", "n4"]


class Scontrol:
    """`scontrol show topology`."""

    stdout = TOPOLOGY

    def run(self, *words: str, check: bool) -> Scontrol:
        assert words == ("scontrol", "show", "topology") and not check
        return self


def resolve(*names: str, switches: tuple[str, ...] = ()) -> list[str]:
    return node._resolve(cast(Commands, Scontrol()), names, switches, KNOWN)


def test_nodes_and_switches_are_put_together() -> None:
    assert resolve("n4,n[1-2]", "n1") == ["n1", "n2", "n4"]
    assert resolve("n1", switches=("leaf2",)) == ["n1", "n3", "n4"]


@pytest.mark.parametrize(
    ("names", "switches", "said"),
    [
        ((), (), "no node is named"),
        (("n[1-5]",), (), "node 'n5': Slurm has none"),
        (("n[1-",), (), "hostlist"),
        ((), ("spine",), "'spine': no leaf switch"),
        ((), ("leaf9",), "'leaf9': no leaf switch"),
    ],
)
def test_what_is_not_there_is_refused_by_name(names: tuple[str, ...], switches: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")) as raised:
        resolve(*names, switches=switches)
    assert not switches or "leaf1, leaf2" in raised.value.remedy


def test_more_nodes_than_slurmctld_reads_are_refused() -> None:
    with pytest.raises(UsageError, match="4097 nodes: too many"):
        node._resolve(cast(Commands, Scontrol()), ("n[1-4097]",), (), {f"n{i}" for i in range(1, 4098)})


def test_only_root_and_slurm_user_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for uid in (0, 64030):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        node._check_caller({"SlurmUser": "slurm(64030)"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SluiceError, match="uid 1000: not root or SlurmUser"):
        node._check_caller({"SlurmUser": "slurm(64030)"})


def test_a_deadline_is_to_come() -> None:
    assert node._deadline(None) == 0
    assert node._deadline("now+1hour") > 0
    for word in ("now-1hour", "now", "some day"):
        with pytest.raises(UsageError, match=word.split("-")[0]):
            node._deadline(word)


def test_what_somebody_has_to_look_after_comes_last() -> None:
    jobs = [
        LeavingJob(number, where, cast(Any, decision), why, 0, to)
        for number, where, decision, why, to in (
            (3, "n1", "stays", "unsaved", ""),
            (5, "n9", "moves", "-", "n2"),
            (2, "n1", "ends", "soon", ""),
            (4, "n1", "moves", "-", "n2"),
        )
    ]
    rows = node._rows(Emptying(1, {}, frozenset(), jobs), ["n1"], {})
    assert [(row["job"], row["decision"], row["to"]) for row in rows] == [
        (4, "moves", "n2"), (2, "ends", None), (3, "stays", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "reason", "said"),
    [
        ((), "", "it does not drain"),
        (("drain",), "new fan", "it is drained for: new fan"),
        (("drain",), "sluice empty: new fan", ("State=UNDRAIN",)),
        (("drain",), "sluice empty: new fan; drained before: a, b: c", ("State=DRAIN", "Reason=a, b: c")),
    ],
)
def test_resume_takes_back_its_own_orders_alone(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], reason: str, said: str | tuple[str, ...]
) -> None:
    changes: list[tuple[str, ...]] = []
    seen = SimpleNamespace(name="n1", flags=frozenset(flags), reason=reason)
    monkeypatch.setattr("sluice.slurm.connect", lambda **_: SimpleNamespace(nodes=lambda: [seen]))
    monkeypatch.setattr("sluice.slurm.Commands.output", lambda _, *words: changes.append(words))
    found = CliRunner().invoke(node.command, ["resume", "n1"])
    if isinstance(said, tuple):
        assert changes == [("scontrol", "update", "NodeName=n1", *said)] and found.output.startswith("n1")
    else:
        assert isinstance(found.exception, SluiceError) and said in str(found.exception) and not changes


@pytest.mark.parametrize(
    ("flags", "reason", "wanted"),
    [
        ((), "", "sluice empty: new fan"),
        (("drain",), "hot", "sluice empty: new fan; drained before: hot"),
        (("drain",), "sluice empty: old fan", "sluice empty: new fan"),
        (("drain",), "sluice empty: old; drained before: hot", "sluice empty: new fan; drained before: hot"),
        (("not_responding",), "Not responding", "sluice empty: new fan"),
    ],
)
def test_a_drained_node_keeps_its_reason(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], reason: str, wanted: str
) -> None:
    """Names that Slurm cannot read with brackets inside them are written out."""
    changes: list[tuple[str, ...]] = []
    seen = [SimpleNamespace(name=f"rack{rack}-n1", flags=frozenset(flags), reason=reason) for rack in (1, 2)]
    config = {"SlurmUser": f"slurm({os.geteuid()})", "StateSaveLocation": "/nowhere"}
    client = SimpleNamespace(nodes=lambda: seen, config=lambda: config)
    monkeypatch.setattr("sluice.slurm.connect", lambda **_: client)
    monkeypatch.setattr("sluice.exchange.emptying.ask", lambda *_: Emptying(1, {}, frozenset(), []))
    monkeypatch.setattr("sluice.slurm.Commands.output", lambda _, *words: changes.append(words))
    words = ["empty", "rack[1-2]-n1", "--reason", "new fan"]
    assert CliRunner().invoke(node.command, [*words, "--dry-run"]).exit_code == 0 and not changes
    assert CliRunner().invoke(node.command, words).exit_code == 0
    assert changes == [("scontrol", "update", "NodeName=rack1-n1,rack2-n1", "State=DRAIN", f"Reason={wanted}")]
