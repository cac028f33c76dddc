"""`--decisions` of commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class _DecisionsOption(click.Option):
    """Also read as `--records`, its name until 0.1.0, which help does not show."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown, self.opts = self.opts, [*self.opts, "--records"]
        super().add_to_parser(parser, ctx)
        self.opts = shown


def decisions_option(
    help_text: str = "The folder of decisions; default: sluice.records in StateSaveLocation.",
) -> Callable[..., Any]:
    """--decisions, a folder."""
    path = click.Path(path_type=Path)
    return click.option("--decisions", cls=_DecisionsOption, type=path, metavar="DIR", help=help_text)
