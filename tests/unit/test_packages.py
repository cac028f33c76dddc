"""What `make install` installs on a host: what builds Sluice and its plugins, and no daemon."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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


def test_root_installs_only_what_has_a_hash() -> None:
    done = subprocess.run(["make", "-n", "install"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    calls = [line for line in done.stdout.splitlines() if "/bin/pip install" in line]
    assert len(calls) == 3 and all("--require-hashes" in line or "--no-index --no-deps" in line for line in calls)
    assert all("--no-build-isolation" in line for line in calls[1:])  # a package's build would fetch what has no hash


def test_what_is_installed_stays_until_the_new_one_is_built() -> None:
    done = subprocess.run(["make", "-n", "install"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    built, *_, installed = [line for line in done.stdout.splitlines() if "/bin/pip" in line][2:]
    assert "pip wheel" in built and "--no-index" in built and installed.endswith(".whl")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("build", [*PROJECT["build-system"]["requires"], "setuptools", "wheel"]),
        ("install", [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["amd"]]),
    ],
)
def test_lock_files_hold_what_the_project_needs(name: str, wanted: list[str]) -> None:
    """tools/lock was run after the last change of a dependency."""
    text = (ROOT / f"tools/{name}.lock").read_text()
    entries = re.findall(r"^(\S+)==(\S+)[^\n]*\n((?: {4}--hash=sha256:[0-9a-f]{64}[^\n]*\n)+)", text, re.MULTILINE)
    assert "://" not in text and len(entries) == len(re.findall(r"^\w", text, re.MULTILINE))
    locked = {canonicalize_name(package): version for package, version, _ in entries}
    for line in wanted:
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


def test_a_cluster_of_this_machine_has_them() -> None:
    assert groups()["cluster"] >= DAEMONS | groups()["plugins"]
