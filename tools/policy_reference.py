"""The policy file's fields, for docs/policy.md and for sluice.yaml(5): writes the page, or compares it (--check)."""

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
from sluice.base.sizes import format_mib  # noqa: E402

MANUAL = ROOT / "docs/man/sluice.yaml.5"
_ELSEWHERE = {"grouping": "gres.md#classes"}
"""Fields whose models another page describes."""


def kind(annotation: Any, metadata: list[Any]) -> str:
    """The type of a field in words, with its unit."""
    names = {getattr(one, "func", None).__name__ for one in metadata if getattr(one, "func", None)}  # type: ignore[union-attr]
    if names & {"_seconds", "_delay"}:
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
        name = annotation.__name__
        return f"[{name}]({_ELSEWHERE.get(name.lower(), f'#{name.lower()}')})"
    return {int: "number", float: "number", str: "text", bool: "yes/no"}.get(annotation, str(annotation))


def default(field: FieldInfo) -> str:
    """The default as it is written in a policy file."""
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
        return f"`{show_seconds(int(value))}`" if value == int(value) else f"`{value * 1000:g}ms`"
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
    lines = [
        f"### {name}",
        "",
        " ".join((one.__doc__ or "").split()),
        "",
        "| field | type | default | |",
        "|---|---|---|---|",
    ]
    for key, field in one.model_fields.items():
        text = " ".join((field.description or "").split())
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("enforced") is False:
            text += " **Not yet enforced.**"
        text = re.sub(r"(?<!\\)\|", r"\\|", text)
        lines.append(
            f"| `{key}` | {kind(field.annotation, field.metadata)}{bounds(field.metadata)} | {default(field)} "
            f"| {text} |"
        )
    return "\n".join([*lines, ""])


def models(top: type[BaseModel]) -> list[type[BaseModel]]:
    """All models that are reached from one, in the order of the file."""
    found = [top]
    for one in found:
        for key, field in one.model_fields.items():
            if key in _ELSEWHERE:
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


def reference() -> str:
    """Every model as a table."""
    return "\n".join(section("The file" if one is model.Policy else one.__name__, one) for one in models(model.Policy))


def roff(text: str) -> str:
    """Text for a man page."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text.replace("\\|", "|").replace("`", "").replace("**", ""))
    return plain.replace("\\", "\\\\").replace("-", "\\-").replace("'", "\\(aq")


def manual() -> str:
    """sluice.yaml(5)."""
    lines = [
        '.TH SLUICE.YAML 5 "" "Sluice" "Sluice manual"',
        ".SH NAME",
        "sluice.yaml \\- tenants, quotas and scheduling policy",
        ".SH DESCRIPTION",
        "The policy file of",
        ".BR sluice\\-apply (1).",
        "YAML; unknown keys are mistakes. Durations are written 90s, 15m, 48h, 7d; sizes 512M, 80G, 1.5T.",
    ]
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
    """Write the man page, or compare it with --check."""
    text = manual()
    if "--check" not in sys.argv:
        MANUAL.write_text(text)
        return 0
    if MANUAL.read_text() != text:
        print(f"{MANUAL.relative_to(ROOT)} is not what policy/model.py says: run make references", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
