"""Programs that are started: nothing of a user's becomes a part of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.slurm.pyslurm_client import PyslurmClient

ROOT = Path(__file__).parents[3]
SHIPPED = ("sluice", "gres_probe", "policy", "prolog_epilog", "gpu_sim", "dev_cluster")


def test_no_module_is_taken_from_the_folder_in_which_a_command_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("import pathlib; pathlib.Path('taken').touch()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SluiceError, match="not installed"):
        PyslurmClient()
    assert not (tmp_path / "taken").exists()


def test_every_python_is_started_so() -> None:
    """`sluice agent` runs its own command line again: the rest uses `sluice.base.run.PYTHON`."""
    found = {
        str(path.relative_to(ROOT))
        for package in SHIPPED
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"sys\.executable, [\"*]", path.read_text())
    }
    assert found == {"sluice/cli/agent.py", "sluice/base/run.py"}
