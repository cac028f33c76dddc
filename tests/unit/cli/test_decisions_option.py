"""--decisions and its former name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sluice.cli import explain, explaind, shadow

COMMANDS = {
    "explain": (explain.command, ["17"]),
    "explaind": (explaind.command, []),
    "shadow": (shadow.command.commands["report"], []),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["--decisions", "--records"])
def test_the_former_name_is_read_and_not_shown(name: str, option: str) -> None:
    command, words = COMMANDS[name]
    assert command.make_context(name, [*words, option, "/x"]).params["decisions"] == Path("/x")
    assert command.make_context(name, [*words]).params["decisions"] is None
    shown = CliRunner().invoke(command, ["--help"]).output
    assert "--decisions" in shown and "--records" not in shown
