"""The version is written in native/include/sluice/version.h; everything else reads it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

from click.testing import CliRunner

from sluice.core import version
from sluice.main import sluice
from sluice.plugin.builder import read_build, write_manifest

ROOT = Path(__file__).parents[2]
(VERSION,) = re.findall(
    r'^#define SLUICE_VERSION "(.+)"$', (ROOT / "native/include/sluice/version.h").read_text(), re.MULTILINE
)


def test_the_core_the_package_and_the_command_have_the_headers_version() -> None:
    assert version() == VERSION
    assert importlib.metadata.version("sluice-slurm") == VERSION
    assert CliRunner().invoke(sluice, ["--version"]).output == f"sluice {VERSION}\n"


def test_built_plugins_name_it(tmp_path: Path) -> None:
    write_manifest(tmp_path, (22, 5, 8))
    assert read_build(tmp_path).sluice == VERSION


def test_the_changelog_begins_with_it() -> None:
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1] == VERSION


def test_the_releases_archive_is_named_by_it() -> None:
    done = subprocess.run(["make", "-n", "dist"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert f"sluice-{VERSION}.tar.gz" in done.stdout
