"""What lint says of topology.yaml and topology.conf; integration tests compare with slurmctld."""

from __future__ import annotations

from pathlib import Path

import pytest

from gres_probe.lint import Site, lint
from sluice.slurm.slurm_conf import interpret_slurm_conf, parse_text
from tests.integration.topology_cases import CASES, CONF_CASES, CONF_NODES, SLURM_CONF


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


def of_conf(text: str, plugin: str = "topology/tree") -> list[str]:
    slurm = interpret_slurm_conf(parse_text(f"TopologyPlugin={plugin}\nNodeName={CONF_NODES}\n"))
    return [finding.rule.code for finding in lint(Site(slurm, topology_conf=parse_text(text, Path("topology.conf"))))]


@pytest.mark.parametrize("name", CONF_CASES)
def test_each_case_of_topology_conf(name: str) -> None:
    text, expected = CONF_CASES[name]
    assert sorted(set(of_conf(text))) == expected
    assert of_conf(text, "topology/none") == []  # which reads no file


def test_blocks() -> None:
    good = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n"
    assert of_conf(good, "topology/block") == []
    assert of_conf(good.replace("n[3-4]", "n3"), "topology/block") == ["SL078"]
    assert of_conf(good.replace("n[3-4]", "n[2-4]"), "topology/block") == ["SL075"]
    assert of_conf(good.replace("b2", "b1"), "topology/block") == ["SL071"]
    assert of_conf(good.replace("2,4", "two"), "topology/block") == ["SL070"]
    assert of_conf(good + "SwitchName=s1 Nodes=n1\n", "topology/block") == ["SL070"]
