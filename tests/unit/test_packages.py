"""What `make install` brings onto a host: what builds Sluice and its plugins, and no daemon."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
DAEMONS = {"slurmctld", "slurmd", "slurmdbd", "munge", "mariadb-server"}


def groups() -> dict[str, set[str]]:
    lines = (ROOT / "tools/debian-packages.txt").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: set(packages.split()) for name, _, packages in pairs}


def test_installing_brings_no_daemon() -> None:
    done = subprocess.run(["make", "-n", "install"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    (called,) = re.findall(r"tools/install-packages (.*)", done.stdout)
    packages = set().union(*(groups()[name] for name in called.split()))
    assert not packages & DAEMONS
    assert {"gcc", "cmake", "ninja-build", "patch", "xz-utils"} <= packages, "what `sluice plugin build` calls"


def test_a_cluster_of_this_machine_has_them() -> None:
    assert groups()["cluster"] >= DAEMONS | groups()["plugins"]
