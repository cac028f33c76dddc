"""Checks the layers of what no import shows: modules that are loaded, or run as programs, by their names.

pyproject.toml lists them (tool.sluice). A string of the code that is a module's name must be one of them. What is
loaded obeys the layers as an import would; a program is a process of its own, which every room may start.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
LOADED: dict[str, list[str]] = TOOLS["sluice"]["loaded-by-name"]
PROGRAMS: list[str] = TOOLS["sluice"]["programs"]
ROOMS: list[str] = TOOLS["importlinter"]["root_packages"]
(LAYERS,) = [one["layers"] for one in TOOLS["importlinter"]["contracts"] if one["id"] == "layers"]


def modules() -> dict[str, Path]:
    """All of them, with their files."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def place(module: str) -> tuple[int, str]:
    """The number of its layer, the highest first, and its room."""
    for number, layer in enumerate(LAYERS):
        for room in layer.split(" | "):
            if f"{module}.".startswith(f"{room}."):
                return number, room
    raise KeyError(module)


def named(path: Path) -> Iterator[tuple[int, str]]:
    """Strings of a module with their lines; no docstrings, and no names of loggers."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    others = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
            others |= set(node.args)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in others:
            yield node.lineno, node.value


def mistakes() -> Iterator[str]:
    """Each in a line."""
    known = modules()
    for name in [*PROGRAMS, *LOADED]:
        if name not in known:
            yield f"pyproject.toml: tool.sluice: {name}: no such module"
    for importer, patterns in LOADED.items():
        for loaded in (name for name in known if any(fnmatch(name, pattern) for pattern in patterns)):
            (above, room), (below, other) = place(importer), place(loaded)
            if room != other and above >= below:
                yield f"{importer} loads {loaded} by its name, which is not below it"
    for module, path in known.items():
        for line, text in named(path):
            listed = text in PROGRAMS or any(fnmatch(text, pattern) for pattern in LOADED.get(module, ()))
            if "." in text and text in known and not listed:
                yield f"{path.relative_to(ROOT)}:{line}: {text} is not listed in pyproject.toml, tool.sluice"


if __name__ == "__main__":
    found = list(mistakes())
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    sys.exit(1 if found else 0)
