"""What slurmctld's programs leave for fleetd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.exchange import fleet
from sluice.fleet import power


def test_a_request_is_complete_or_not_there(tmp_path: Path) -> None:
    assert power.leave("resume", ["p5-[1-2]"], tmp_path) == 0
    (request,) = tmp_path.iterdir()
    assert request.suffix == ".json" and not request.name.startswith(".")
    document = json.loads(request.read_text())
    assert (document["do"], document["nodes"]) == ("resume", "p5-[1-2]")


@pytest.mark.parametrize("words", [[], ["a", "b"], ["x" * 70_000]])
def test_anything_else_is_refused(tmp_path: Path, words: list[str]) -> None:
    assert power.leave("suspend", words, tmp_path) == 2 and not list(tmp_path.iterdir())


def test_without_fleetd_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert power.leave("resume", ["p5-1"], tmp_path / "none") == 1
    assert "does sluice-fleetd run here?" in capsys.readouterr().err


def test_it_loads_the_standard_library_alone() -> None:
    assert power.REQUESTS == fleet.REQUESTS
    words = "import sys; import sluice.fleet.power; print({'pydantic', 'click', 'json'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "{'json'}\n"
