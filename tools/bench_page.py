#!/usr/bin/env python3
"""Puts the results of `make bench JSON=DIR` into the tables of docs/benchmarks.md: ``tools/bench_page.py DIR``.

In the section of each benchmark, a row of a table `figure | measured | ...` gets its figure's value, spread, bound and
peer. Prints what changed, for the text around the tables, and what no table has. Other tables are written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/benchmarks.md"


def cells_of(line: str) -> list[str]:
    """The cells of a table's row; none of another line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def number(value: float) -> str:
    """As the tables have it."""
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def values(document: dict[str, Any], figure: str) -> dict[str, str]:
    """The cells of a figure by the heading of their column; what only the peer has, has no other."""
    found = {}
    if figure in document["figures"]:
        found["measured"] = number(document["figures"][figure])
        found["spread"] = (
            " to ".join(number(end(document["spread"][figure])) for end in (min, max))
            if document["spread"].get(figure)
            else ""
        )
        sign, bound = document["must"].get(figure, ("", 0))
        found["must"] = f"{sign} {bound:g}" if sign else ""
    if figure in document["peer"]:
        found["peer"] = number(document["peer"][figure])
    return found


def updated(section: str, document: dict[str, Any]) -> str:
    """A section with the values of a result in its tables."""
    heads: list[str] = []
    lines = []
    for line in section.splitlines():
        cells = cells_of(line)
        if cells[:2] == ["figure", "measured"]:
            heads = cells
        elif not cells:
            heads = []
        elif heads and (found := values(document, cells[0])):
            cells = [found.get(head, cell) for head, cell in zip(heads, cells, strict=True)]
            line = "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
        lines.append(line)
    return "\n".join(lines) + "\n"


def changes(before: str, after: str) -> Iterator[str]:
    """What a reader of the text around the tables has to know."""
    for old, new in zip(before.splitlines(), after.splitlines(), strict=True):
        if cells_of(old) != cells_of(new):
            yield f"  {cells_of(old)[0]}: {' | '.join(cells_of(old)[1:])}  ->  {' | '.join(cells_of(new)[1:])}"


def read(path: Path) -> dict[str, Any]:
    """A result. Exits with its name where it is none."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document["figures"], document["spread"], document["must"], document["peer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a result of a benchmark ({error!r}); remove it, or run that benchmark again")
    return document


def main(folder: Path) -> None:
    """Update the page, when all results have been read."""
    results = {path: read(path) for path in sorted(folder.glob("*.json"))}
    if not results:
        sys.exit(f"{folder}: no results there; make bench JSON={folder}")
    sections = re.split(r"(?m)^(?=### )", PAGE.read_text(encoding="utf-8"))
    for path, document in results.items():
        heading = f"### {path.stem}\n"
        place = next((n for n, section in enumerate(sections) if section.startswith(heading)), None)
        if place is None:
            print(f"{path.stem}: docs/benchmarks.md has no section of this name")
            continue
        fresh = updated(sections[place], document)
        print(path.stem, *changes(sections[place], fresh), sep="\n")
        missing = [figure for figure in document["figures"] if f"| {figure} |" not in fresh]
        if missing:
            print(f"  in no table: {', '.join(missing)}")
        sections[place] = fresh
    fresh_page = PAGE.with_suffix(".new")
    fresh_page.write_text("".join(sections), encoding="utf-8")
    fresh_page.replace(PAGE)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: tools/bench_page.py DIR")
    main(Path(sys.argv[1]))
