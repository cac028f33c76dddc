"""`sluice` itself: what every command has in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.main import COMMANDS

MAN = Path(__file__).parents[3] / "docs" / "man"


def test_a_full_disk_gets_one_line() -> None:
    command = [sys.executable, "-m", "sluice.main", "lint", "--explain", "all"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    assert done.returncode == 1
    assert done.stderr == "sluice: No space left on device\n"


def test_a_reader_that_goes_away_gets_no_complaint() -> None:
    command = [sys.executable, "-m", "sluice.main", "lint", "--explain", "all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["sluice", *(f"sluice-{name}" for name in sorted(COMMANDS))])
def test_each_command_has_a_man_page(name: str) -> None:
    text = (MAN / f"{name}.1").read_text()
    for section in (".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH EXIT STATUS"):
        assert section in text


def test_a_command_of_another_package_names_it() -> None:
    script = """
import sys
from sluice.main import main
class Without:
    def find_spec(self, name, *_):
        if name == "dev_cluster":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Without())
main()
"""
    done = subprocess.run([sys.executable, "-c", script, "cluster", "up"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "sluice: sluice cluster: not installed on this host; install the package sluice-dev-cluster\n"
