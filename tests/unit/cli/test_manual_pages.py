"""Each command's manual page names the options and subcommands of its --help, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sluice.main import COMMANDS, sluice

PAGES = Path(__file__).parents[3] / "docs/man"
CONTEXT = click.Context(sluice)


def page_of(name: str) -> str:
    """Its text without font changes and examples."""
    return re.sub(r"\\f.", "", (PAGES / f"{name}.1").read_text().replace("\\-", "-")).split(".SH EXAMPLES")[0]


def commands_of(command: click.Command) -> Iterator[click.Command]:
    """The command itself, and all below it."""
    yield command
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from commands_of(one)


def options_of(command: click.Command) -> set[str]:
    shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    return {text for one in shown for text in (*one.opts, *one.secondary_opts)}


def command_named(name: str) -> click.Command:
    command = sluice.get_command(CONTEXT, name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_page_names_every_option_and_subcommand(name: str) -> None:
    page, command = page_of(f"sluice-{name}"), command_named(name)
    words = {text for one in commands_of(command) for text in options_of(one)}
    words |= {one.name or "" for one in commands_of(command) if one is not command and not one.hidden}
    assert sorted(word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", page)) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_page_describes_no_option_that_the_command_lacks(name: str) -> None:
    described = re.findall(r"^\.TP\n(\..*)$", page_of(f"sluice-{name}"), re.MULTILINE)
    options = {text for tag in described for text in re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", tag)}
    own = {text for one in commands_of(command_named(name)) for text in options_of(one)} | {"-h", "--help"}
    assert sorted(options - own) == []


def test_the_main_page_names_every_command() -> None:
    page = page_of("sluice")
    assert [name for name in sorted(COMMANDS) if f"sluice-{name}" not in page] == []
