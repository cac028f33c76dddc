"""What lint says of topology.yaml; tests/integration/test_sid.py compares with slurmctld."""

from __future__ import annotations

from pathlib import Path

import pytest

from gres_probe.lint import Site, lint
from sluice.slurm.slurm_conf import interpret_slurm_conf, parse_text
from tests.integration.topology_cases import CASES, SLURM_CONF


def codes(folder: Path, more: str = "", version: tuple[int, int, int] = (26, 5, 0)) -> list[str]:
    slurm = interpret_slurm_conf(parse_text(SLURM_CONF.replace("Default=YES", f"Default=YES {more}")))
    found = lint(Site(slurm, version=version, topology=folder / "topology.yaml"))
    return [finding.rule.code for finding in found]


@pytest.mark.parametrize("name", CASES)
def test_each_case(tmp_path: Path, name: str) -> None:
    more, text, expected = CASES[name]
    (tmp_path / "topology.yaml").write_text(text)
    assert codes(tmp_path, more) == expected
    assert codes(tmp_path, more, (24, 11, 5)) == []  # which does not read it


def test_the_older_file_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "topology.yaml").write_text(CASES["good"][1])
    (tmp_path / "topology.conf").touch()
    assert codes(tmp_path) == ["SL008"]
