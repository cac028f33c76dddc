"""Tables as Slurm's commands print them: aligned for people, or with ``-P``, ``-n`` and ``-o`` for programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from sluice.base.errors import UsageError
from sluice.base.text import one_line

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column: its name for ``-o`` and the header, and how to take it from a row; None prints as unknown."""

    name: str
    value: Callable[[Row], object]
    shown: Callable[[Any], str] = str  # for people; -P prints the plain value
    right: bool = False


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What the options of `table_options` say."""

    fields: str | None = None
    parsable2: bool = False
    noheader: bool = False

    @property
    def asked(self) -> bool:
        """Whether this table was asked for: no words around it, and an empty one is printed too."""
        return self.parsable2 or self.fields is not None

    def print(self, columns: Sequence[Column[Row]], rows: Sequence[Row], *, default: Sequence[str]) -> None:
        """Print rows on standard output. `default` names the columns that are printed without ``-o``.

        What cannot be printed is taken out of the values. Raises UsageError for a column that does not exist.
        """
        known = {column.name: column for column in columns}
        if self.fields == "help":
            click.echo("\n".join(known))
            return
        names = [name.strip().lower() for name in self.fields.split(",")] if self.fields else list(default)
        for name in names:
            if name not in known:
                raise UsageError(f"--format: no column {name!r}", remedy=f"choose from {', '.join(known)}")
        chosen = [known[name] for name in names]
        header = [] if self.noheader else [[column.name.upper() for column in chosen]]
        if self.parsable2:
            lines = header + [[_plain(column.value(row)).replace("|", " ") for column in chosen] for row in rows]
            click.echo("".join("|".join(line) + "\n" for line in lines), nl=False)
            return
        lines = header + [[_shown(column, row) for column in chosen] for row in rows]
        widths = [max((len(line[place]) for line in lines), default=0) for place in range(len(chosen))]
        for line in lines:
            cells = (
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(line, widths, chosen, strict=True)
            )
            click.echo("  ".join(cells).rstrip())


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that prints a table, given to it as one `TableOptions`, `table`."""

    @functools.wraps(command)
    def call(fields: str | None, parsable2: bool, noheader: bool, **given: Any) -> Any:
        return command(table=TableOptions(fields, parsable2, noheader), **given)

    wrapped: Callable[..., Any] = call
    for option in (
        click.option("-o", "--format", "fields", metavar="FIELDS", help="Columns, comma-separated; 'help' names all."),
        click.option("-n", "--noheader", is_flag=True, help="No header line."),
        click.option("-P", "--parsable2", is_flag=True, help="Plain values separated by '|'."),
    ):
        wrapped = option(wrapped)
    return wrapped


def _shown(column: Column[Row], row: Row) -> str:
    value = column.value(row)
    return "-" if value is None or value == "" else one_line(column.shown(value), limit=None)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value))
    return "" if value is None else one_line(str(value), limit=None)
