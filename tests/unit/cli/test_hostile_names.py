"""Names and words that others choose, or that are mistyped, in commands: nothing breaks, nothing is interpolated."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import access, site
from policy.access import Caller
from policy.document import parse
from policy.service_jobs import CALLERS_FILE, FILE_NAME, compile_services
from sluice.exchange import fleet
from sluice.exchange.fleet import Event, FleetStatus, NodeStatus, PoolStatus, Shortage
from sluice.main import main
from sluice.slurm import Commands

NAMES = [
    "\x1b[31mred\x1b]0;title\x07", "two\nlines\r\n", "../../etc/passwd", "..", "-rf", "--reason=x", "$(touch made)",
    "`touch made`", "a;touch made", "a|b&c", "n[1-", "n[1-2],$HOME", "%n%s", "{}", "{0.__class__}", "\u202ereversed",
    "\udcff", "", " ", "x" * 4096, "n[1-4096]" * 400, "'", '"',
]  # fmt: skip
SERVICES = """\
tenants: {nlp: {members: [nlp-serve]}}
services: {llm: {tenant: nlp, user: nlp-serve, engine: vllm, model: /m}}
"""


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """A command as it is called: its exit code and what it prints."""
    monkeypatch.setattr(sys, "argv", ["sluice", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, error = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    for line in (out + error).splitlines():
        assert line.isprintable(), line
        assert len(line) < 1000
    return ended.value.code, out, error


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made here but what the test makes, whatever the words are."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("name", NAMES)
def test_jobs_that_are_none(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(monkeypatch, capfd, "explain", "--decisions", "/nonexistent", "--", name)
    assert (code, out) == (2, "") and "not a job's number" in error
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_services_that_are_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = compile_services(parse(SERVICES))
    (tmp_path / FILE_NAME).write_text(policy.render())
    (tmp_path / CALLERS_FILE).write_text(policy.render_callers())
    client = SimpleNamespace(config=lambda: {"SLURM_CONF": str(tmp_path / "slurm.conf")}, jobs=list)
    root = Caller("root", 1, 2)
    fake = SimpleNamespace(cluster=SimpleNamespace(client=client), caller=lambda: root)
    monkeypatch.setattr(site, "Site", lambda *_: fake)
    monkeypatch.setattr(access, "caller", lambda _: root)
    code, out, error = run(monkeypatch, capfd, "serve", "show", "--socket", str(tmp_path / "none"), "--", name)
    assert (code, out) == (2, "") and "those are: llm" in error
    (tmp_path / "sluice.yaml").write_text(SERVICES)
    for words in (["create", "{}", "tenant=nlp", "user=nlp-serve", "engine=vllm", "model=/m"], ["pause", "{}"],
                  ["scale", "--most", "2", "{}"], ["set", "{}", "idle=10m"], ["remove", "{}"]):  # fmt: skip
        given = [name if word == "{}" else word for word in words[1:]]
        options = ["-y", "-f", str(tmp_path / "sluice.yaml")]
        code, out, error = run(monkeypatch, capfd, "serve", words[0], *options, "--", *given)
        assert code == 2 and error, words
    assert (tmp_path / "sluice.yaml").read_text() == SERVICES
    assert not list(Path().iterdir())


@pytest.fixture
def said(tmp_path: Path) -> Any:
    """A status of fleetd with one pool, whose provider says this."""

    def say(text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        node = NodeStatus("n1", "p5", "up", "launched", text, "big", "zone-a", 1.0, "no_capacity", text, 2e9, (7,))
        out = Shortage("big", "zone-a", "no_capacity", text, 1.0, 1, 2e9)
        pool = PoolStatus("ec2", "n1", 1, 0, "burst", on=1, problem=text, shortages=[out])
        event = Event(1.0, "n1", "p5", "failed", "big", "zone-a", text=text)
        status = tmp_path / "status.json"
        status.write_bytes(fleet.render_status(FleetStatus(4e9, pools={"p5": pool}, nodes=[node], history=[event])))
        return str(status)

    return say


@pytest.mark.parametrize("name", NAMES)
def test_pools_and_nodes_that_are_none(
    name: str, said: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(Commands, "output", lambda _, *words: ran.append(words))
    status = said("well")
    for words in (["show"], ["history"], ["why"], ["return"], ["drain", "--reason", "x"]):
        code, out, error = run(monkeypatch, capfd, "pool", *words, "--status", status, "--", name)
        assert (code, out) == (2, "") and error.startswith("sluice: "), words
    assert not ran
    assert not list(Path().iterdir())


@pytest.mark.parametrize("text", NAMES)
def test_what_providers_and_operators_say(
    text: str, said: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(Commands, "output", lambda _, *words: ran.append(words))
    status = said(text[:200])
    for words in (["list"], ["show", "p5"], ["history", "p5"], ["why", "n1"]):
        assert run(monkeypatch, capfd, "pool", words[0], "--status", status, *words[1:])[0] == 0
    assert run(monkeypatch, capfd, "pool", "drain", "--status", status, f"--reason={text}", "p5")[0] == 0
    (words,) = ran
    assert words[:4] == ("scontrol", "update", "NodeName=n1", "State=DRAIN")
    assert words[4].startswith("Reason=") and words[4].isprintable() and len(words) == 5
    assert not list(Path().iterdir())
