"""The commands of the admin guide, which test_tour.py runs at full scale: each exists, with its options."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from sluice.main import sluice
from tests.integration.guide import commands

SECTIONS = (
    "From packages",
    "Observe, and GRES that Sluice writes",
    "Enforce",
    "Admit",
    "Shadow",
    "Place",
    "Upgrade",
    "Uninstall",
)


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_of_the_guide_are_sluices(section: str) -> None:
    for _, script in commands(section):
        for said in re.findall(r"^(?:.*&& )?(sluice [^&|#\n]*)", script, re.MULTILINE):
            is_a_command(shlex.split(said)[1:])


def is_a_command(words: list[str]) -> None:
    command: click.Command | None = sluice
    while isinstance(command, click.Group):
        name, *words = words
        command = command.get_command(click.Context(command), name)
    assert command is not None, name
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options
