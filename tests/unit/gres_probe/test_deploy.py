"""`sluice gres write` in a site's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import dgx, l40s

from gres_probe.collect import write_inventory

SLURM_CONF = """\
ClusterName=test
GresTypes=gpu
NodeName=dgx[1-2] NodeAddr=10.0.0.[1-2] Feature=ib,h100 Weight=9 Gres=gpu:8
NodeName=login1
PartitionName=all Nodes=ALL
"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.etc = folder / "etc"
        self.etc.mkdir()
        self.inventories = folder / "inventories"
        (self.etc / "slurm.conf").write_text(SLURM_CONF)
        for machine in (dgx("dgx1"), dgx("dgx2"), l40s("l40s1")):
            write_inventory(self.inventories, machine)

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "sluice.main", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={key: value for key, value in os.environ.items() if key != "SLURM_CONF"},
        )
        assert done.returncode == code, done.stderr
        return done

    def write(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        common = ["--slurm-conf", str(self.etc), "--inventory-dir", str(self.inventories), "--slurm-version", "22.05.8"]
        return self.run("gres", "write", *common, *arguments, code=code)

    def text(self, name: str) -> str:
        return (self.etc / name).read_text()

    def files(self) -> dict[str, tuple[str, int]]:
        return {path.name: (path.read_text(), path.stat().st_mtime_ns) for path in self.etc.iterdir()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_writes_separate_files_and_says_what_is_left_to_do(site: Site) -> None:
    done = site.write()
    assert done.stdout.splitlines() == [f"wrote {site.etc}/nodes.sluice.conf", f"wrote {site.etc}/gres.sluice.conf"]
    assert site.text("slurm.conf") == SLURM_CONF
    assert not (site.etc / "gres.conf").exists()
    for step in (
        "set GresTypes=gpu,shard",
        "in slurm.conf add: include nodes.sluice.conf",
        "in gres.conf add: include gres.sluice.conf",
        f"move your NodeName lines to {site.etc}/nodes.site.conf: {site.etc}/slurm.conf:3",
    ):
        assert step in done.stderr


def test_what_the_site_says_of_a_node_stays(site: Site) -> None:
    site.write()
    line = next(line for line in site.text("nodes.sluice.conf").splitlines() if "dgx2" in line)
    assert line.endswith(" NodeAddr=10.0.0.2")
    assert " Gres=gpu:h100:8,shard:648296 " in line
    assert " Feature=nvidia,h100,gpumem80g,sm90,nvlink8,ib " in line
    assert " Weight=9 " in line


def test_nothing_is_written_twice(site: Site) -> None:
    site.write()
    before = site.files()
    assert "nothing to change" in site.write().stderr
    assert site.files() == before


def test_a_finished_site_has_nothing_left_to_do(site: Site) -> None:
    site.write()
    own = [line for line in SLURM_CONF.splitlines() if line.startswith("NodeName=dgx")]
    (site.etc / "nodes.site.conf").write_text("\n".join(own))
    rest = SLURM_CONF.replace(own[0], "include nodes.sluice.conf").replace("GresTypes=gpu", "GresTypes=gpu,shard")
    (site.etc / "slurm.conf").write_text(rest + "SelectType=select/cons_tres\n")
    (site.etc / "gres.conf").write_text("include gres.sluice.conf\n")
    before = site.files()
    done = site.write()
    assert (done.stdout, done.stderr) == ("", "nothing to change\n")
    assert site.files() == before
    site.run("lint", "--slurm-conf", str(site.etc), "--inventory-dir", str(site.inventories), "--strict")


def test_interfaces_for_the_placement(site: Site, tmp_path: Path) -> None:
    """The third file is read next to slurm.conf; elsewhere it is left to the admin."""
    assert f"wrote {site.etc}/nics.sluice.conf" in (done := site.write("--nics")).stdout.splitlines()
    assert site.text("nics.sluice.conf").startswith("sluice-nics 1\n")
    assert "next to slurm.conf" not in done.stderr
    (folder := tmp_path / "out").mkdir()
    done = site.write("--nics", "--output-dir", str(folder))
    assert f"to do: copy {folder}/nics.sluice.conf next to slurm.conf on each controller" in done.stderr


def test_diff_writes_nothing(site: Site) -> None:
    before = site.files()
    shown = site.write("--diff").stdout
    assert site.files() == before
    assert "+NodeName=dgx[1-2] Name=shard Count=648296 File=/dev/nvidia[0-7]" in shown
    site.write()
    assert site.write("--diff").stdout == ""


def test_files_of_each_node(site: Site) -> None:
    site.write("--per-node")
    text = site.text("dgx2/gres.sluice.conf")
    assert "NodeName=dgx2 Name=gpu " in text and "dgx1" not in text and "l40s" not in text
    assert not (site.etc / "gres.sluice.conf").exists()


def test_without_a_slurm_conf(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    site.run("gres", "write", "--output-dir", str(folder), "--inventory-dir", str(site.inventories), "--nodes", "l40s1")
    assert "NodeName=l40s1 " in (folder / "nodes.sluice.conf").read_text()
    assert "dgx" not in (folder / "gres.sluice.conf").read_text()


@pytest.mark.parametrize("where", ["slurm.conf", "gres.conf"])
def test_shards_of_the_sites_own_are_not_replaced_unasked(site: Site, where: str) -> None:
    if where == "slurm.conf":
        (site.etc / where).write_text(SLURM_CONF.replace("Gres=gpu:8", "Gres=gpu:8,shard:64"))
    else:
        (site.etc / where).write_text("Name=shard Count=64\n")
    before = site.files()
    done = site.write(code=1)
    assert "already uses shards" in done.stderr and "--migrate-shards" in done.stderr
    assert site.files() == before
    site.write("--no-shards")
    assert "Name=shard" not in site.text("gres.sluice.conf")
    site.write("--migrate-shards")
    assert "Name=shard" in site.text("gres.sluice.conf")


@pytest.mark.parametrize("where", ["slurm.conf", "gres.conf"])
def test_a_configuration_that_cannot_be_parsed_stops_the_write(site: Site, where: str) -> None:
    (site.etc / where).write_text("rubbish\n" + (SLURM_CONF if where == "slurm.conf" else ""))
    before = site.files()
    done = site.write(code=1)
    assert f"{where}:1: " in done.stderr and "not key=value; nothing written" in done.stderr
    assert site.files() == before


def test_classes_of_the_policy_become_features(site: Site, tmp_path: Path) -> None:
    policy = tmp_path / "sluice.yaml"
    policy.write_text("grouping:\n  strategies: [{by: memory, step: 8G}]\n")
    site.write("--policy", str(policy))
    assert "class_80g" in site.text("nodes.sluice.conf") and "class_48g" in site.text("nodes.sluice.conf")


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["--slurm-version", "new"], "not a version", 2),
        (["--slurm-version", "20.11.1"], "too old", 1),
        (["--nodes", "dgx[1-"], "hostlist", 2),
        (["--nodes", "dgx9"], "no inventory of dgx9", 1),
        (["--output-dir", "/nonexistent"], "no such folder", 2),
        (["--inventory-dir", "/nonexistent"], "No such file", 1),
        (["--slurm-conf", "/nonexistent"], "no such file", 2),
        (["--policy", "/nonexistent"], "No such file", 2),
        (["--unknown"], "No such option", 2),
    ],
)
def test_bad_input(site: Site, arguments: list[str], says: str, code: int) -> None:
    before = site.files()
    done = site.write(*arguments, code=code)
    assert says in done.stderr and "Traceback" not in done.stderr
    assert site.files() == before


def test_broken_inventory(site: Site) -> None:
    (site.inventories / "dgx1.json").write_text('{"schema_version": 99}')
    before = site.files()
    done = site.write(code=1)
    assert "inventory schema 99" in done.stderr and "nothing written" in done.stderr
    assert site.files() == before
    site.write("--nodes", "dgx2,l40s1")
