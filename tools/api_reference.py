"""The interfaces, from the docstrings of the Python rooms and the public C header, for docs/api.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = [
    "sluice/base",
    "sluice/core",
    "sluice/slurm",
    "sluice/client",
    "gres_probe",
    "policy",
    "sluice/simulate",
    "gpu_sim",
    "dev_cluster",
]
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
            lines.append(f"- `{signature(node)}`\n  {describe(node)}\n")
            continue
        methods = [method for method in public(node.body) if isinstance(method, ast.FunctionDef)]
        lines.append(f"- **class `{node.name}`**\n  {describe(node)}\n")
        lines.extend(f"  - `{signature(method)}`: {describe(method).splitlines()[0]}" for method in methods)
        lines.extend([""] if methods else [])
    if not lines:
        return ""
    return "\n".join([f"### {name}", "", ast.get_docstring(tree) or "", "", *lines])


def python_reference() -> str:
    """All rooms."""
    parts: list[str] = []
    for room in ROOMS:
        folder = ROOT / room
        parts.append(f"## {room.replace('/', '.')}\n")
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            name = ".".join(relative.parts).removesuffix(".__init__")
            parts.append(module_reference(path, name))
    return "\n".join(part for part in parts if part)


def reference() -> str:
    """Python's rooms, then the C header."""
    return f"{python_reference()}\n## C: sluice/core.h\n\n```c\n{HEADER.read_text()}```\n"
