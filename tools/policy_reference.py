"""Writes docs/policy.md and sluice.yaml(5) from the models of the policy file (policy/model.py); --check compares."""

from __future__ import annotations

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from policy import model  # noqa: E402
from policy.units import show_seconds  # noqa: E402
from sluice_base.sizes import format_mib  # noqa: E402

TARGET = ROOT / "docs/policy.md"
MANUAL = ROOT / "docs/man/sluice.yaml.5"
INTRODUCTION = ROOT / "docs/policy-introduction.md"
_SKIP = {"grouping"}  # docs/gres.md


def kind(annotation: Any, metadata: list[Any]) -> str:
    """The type of a field in words, with its unit."""
    names = {getattr(one, "func", None).__name__ for one in metadata if getattr(one, "func", None)}  # type: ignore[union-attr]
    if "_seconds" in names:
        return "duration"
    if "_mib" in names:
        return "size (MiB)"
    if "_date" in names:
        return "date"
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return kind(get_args(annotation)[0], [*metadata, *get_args(annotation)[1:]])
    if origin is Literal:
        return " \\| ".join(f"`{one}`" for one in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(one, metadata) for one in get_args(annotation) if one is not type(None)))
    if origin is list:
        return f"list of {kind(get_args(annotation)[0], [])}"
    if origin is dict:
        return f"mapping of {kind(get_args(annotation)[1], [])} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {int: "number", float: "number", str: "text", bool: "yes/no"}.get(annotation, str(annotation))


def default(field: FieldInfo) -> str:
    """The default as people write it."""
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if kind(field.annotation, field.metadata) == "duration":
        return f"`{show_seconds(value)}`"
    if kind(field.annotation, field.metadata).startswith("size") and value:
        return f"`{format_mib(value)}`"
    if isinstance(value, dict | list) and not value:
        return "none"
    return f"`{value}`" if value != "" else "empty"


def bounds(metadata: list[Any]) -> str:
    """What values are allowed."""
    found = {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le") if hasattr(one, name)}
    low, high = found.get("ge", found.get("gt")), found.get("le")
    if low is None or high is None or high >= 10**6:
        return ""
    return f" ({low} to {high})"


def section(name: str, one: type[BaseModel]) -> str:
    """One model as a table."""
    lines = [f"### {name}", "", " ".join((one.__doc__ or "").split()), "",
             "| field | type | default | |", "|---|---|---|---|"]  # fmt: skip
    for key, field in one.model_fields.items():
        text = " ".join((field.description or "").split())
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("enforced") is False:
            text += " **Not yet enforced.**"
        text = re.sub(r"(?<!\\)\|", r"\\|", text)
        lines.append(f"| `{key}` | {kind(field.annotation, field.metadata)}{bounds(field.metadata)} | {default(field)} "
                     f"| {text} |")  # fmt: skip
    return "\n".join([*lines, ""])


def models(top: type[BaseModel]) -> list[type[BaseModel]]:
    """All models that are reached from one, in the order of the file."""
    found = [top]
    for one in found:
        for key, field in one.model_fields.items():
            if key in _SKIP:
                continue
            for inner in inner_models(field.annotation):
                if inner not in found:
                    found.append(inner)
    return found


def inner_models(annotation: Any) -> list[type[BaseModel]]:
    """Models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in inner_models(part)]


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION.read_text(), "\n## Every field\n",
             "Written by `tools/policy_reference.py` from `policy/model.py`; edit that.\n"]  # fmt: skip
    parts += [section("The file" if one is model.Policy else one.__name__, one) for one in models(model.Policy)]
    return "\n".join(parts)


def roff(text: str) -> str:
    """Text for a man page."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text.replace("\\|", "|").replace("`", "").replace("**", ""))
    return plain.replace("\\", "\\\\").replace("-", "\\-").replace("'", "\\(aq")


def manual() -> str:
    """sluice.yaml(5)."""
    lines = [
        '.TH SLUICE.YAML 5 "" "Sluice" "Sluice manual"',
        ".SH NAME", "sluice.yaml \\- tenants, quotas and scheduling policy",
        ".SH DESCRIPTION", "The policy file of", ".BR sluice\\-apply (1).",
        "YAML; unknown keys are mistakes. Durations are written 90s, 15m, 48h, 7d; sizes 512M, 80G, 1.5T.",
    ]  # fmt: skip
    for one in models(model.Policy):
        title = "THE FILE" if one is model.Policy else one.__name__.upper()
        lines += [f".SH {title}", roff(" ".join((one.__doc__ or "").split()))]
        for key, field in one.model_fields.items():
            text = " ".join((field.description or "").split())
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("enforced") is False:
                text += " Not yet enforced."
            words = f"{kind(field.annotation, field.metadata)}{bounds(field.metadata)}; default: {default(field)}"
            lines += [".TP", f"\\fB{roff(key)}\\fR ({roff(words)})", roff(text)]
    lines += [
        ".SH FILES",
        ".I /etc/sluice/sluice.yaml",
        ".SH SEE ALSO",
        ".BR sluice\\-policy (1),",
        ".BR sluice\\-plan (1)",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the pages, or with --check compare them."""
    pages = {TARGET: render(), MANUAL: manual()}
    if "--check" in sys.argv:
        old = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: run tools/policy_reference.py", file=sys.stderr)
        return 1 if old else 0
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
