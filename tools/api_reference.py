"""Writes docs/api.md from the docstrings of the Python rooms and the public C header; --check compares."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["sluice_base", "gres_probe", "slurm_client", "policy", "native/sluice_core", "dev_cluster"]
HEADER = ROOT / "native/include/sluice/core.h"


def public(nodes: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Classes and functions that others may use."""
    for node in nodes:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node)
        ):
            yield node


def signature(node: ast.FunctionDef) -> str:
    """The call as it is written, without the body."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    return f"{node.name}({arguments}){returns}"


def describe(node: ast.AST) -> str:
    """The docstring, indented as a list item's text."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)  # noqa: S101
    return inspect.cleandoc(ast.get_docstring(node) or "").replace("\n", "\n  ")


def module_reference(path: Path, name: str) -> str:
    """One module; empty when it has nothing public."""
    tree = ast.parse(path.read_text())
    lines: list[str] = []
    for node in public(tree.body):
        if isinstance(node, ast.FunctionDef):
            lines.append(f"- `{signature(node)}`\n  {describe(node)}")
            continue
        lines.append(f"- **class `{node.name}`**\n  {describe(node)}")
        lines.extend(
            f"  - `{signature(method)}`: {describe(method).splitlines()[0]}"
            for method in public(node.body)
            if isinstance(method, ast.FunctionDef)
        )
    if not lines:
        return ""
    return "\n".join([f"### {name}", "", ast.get_docstring(tree) or "", "", *lines, ""])


def python_reference() -> str:
    """All rooms."""
    parts: list[str] = []
    for room in ROOMS:
        folder = ROOT / room
        parts.append(f"## {folder.name}\n")
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder.parent).with_suffix("")
            name = ".".join(relative.parts).removesuffix(".__init__")
            parts.append(module_reference(path, name))
    return "\n".join(part for part in parts if part)


def render() -> str:
    """The whole page."""
    return (
        "# API reference\n\nWritten by `tools/api_reference.py` from the sources; edit those. "
        "The commands are described by their man pages.\n\n"
        + python_reference()
        + "\n## C: sluice/core.h\n\n```c\n"
        + HEADER.read_text()
        + "```\n"
    )


def main() -> int:
    """Write the page, or with --check compare it."""
    target = ROOT / "docs/api.md"
    text = render()
    if "--check" in sys.argv:
        if target.read_text() != text:
            print("docs/api.md is out of date: run tools/api_reference.py", file=sys.stderr)
            return 1
        return 0
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
