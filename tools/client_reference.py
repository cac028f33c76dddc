#!/usr/bin/env python3
"""Writes sluice/client/calls.py, a method for each endpoint, from the table of endpoints; --check only compares."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sluice.base.run import run_command
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import Endpoint

PATH = Path(__file__).resolve().parents[1] / "sluice/client/calls.py"
NAMES = {
    "GET /events": "past_events",
    "GET /reports/nodes": "nodes_report",
    "POST /jobs": "submit",
    "PATCH /jobs/{job}": "update",
    "PATCH /services/{service}": "change_service",
    "POST /jobs/{job}/cancel": "cancel",
    "POST /jobs/{job}/hold": "hold",
    "POST /jobs/{job}/release": "release",
    "POST /jobs/{job}/requeue": "requeue",
    "POST /health/return": "return_to_service",
    "POST /alerts/silences": "silence",
    "DELETE /alerts/silences/{silence}": "end_silence",
}
"""Methods that are not called as their paths."""
HEAD = '''"""A method for each endpoint; written by tools/client_reference.py."""

# ruff: noqa: A002, E501, N803

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import date
from typing import Any, Literal

from sluice.client import models
from sluice.client.base import BaseAsyncClient, BaseClient
from sluice.client.transport import Call
'''
NUMBERS = {"job"}
"""Names in paths that are numbers; a task of an array, which can be written to, is written as 17_4."""


def method_of(endpoint: Endpoint) -> str:
    """Its name: that of the path, where {x} is one of what is before it."""
    given = NAMES.get(f"{endpoint.method} {endpoint.path}")
    return given or re.sub(r"\W+", "_", re.sub(r"/[^/]+/{(\w+)}", r"/\1", endpoint.path)).strip("_")


def typed(annotation: Any) -> str:
    """A type as source."""
    origin, words = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return typed(words[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, words))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(typed, words))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(typed, words))}]"
    if annotation in (None, type(None)):
        return "None"
    if annotation is Any:
        return "Any"
    return f"models.{annotation.__name__}" if issubclass(annotation, BaseModel) else str(annotation.__name__)


def default(field: FieldInfo) -> str:
    """What follows the type of a parameter."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    return f" = {value!r}" if isinstance(value, str | int | float | None) else " = None"


def parameters(model: type[BaseModel] | None) -> Mapping[str, str]:
    """The parameters of a method, by name, those that must be given first."""
    fields = {} if model is None else {name: one for name, one in model.model_fields.items() if name != "format"}
    found = {}
    for name, field in sorted(fields.items(), key=lambda one: not one[1].is_required()):
        kind, value = typed(field.annotation), default(field)
        found[name] = f"{kind} | None{value}" if value == " = None" and "None" not in kind else f"{kind}{value}"
    return found


def dictionary(names: Mapping[str, str] | list[str]) -> str:
    """Source of a dict of variables."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def methods(endpoint: Endpoint, *, wait: str, kind: str) -> Iterator[str]:
    """Source of an endpoint's methods. `wait`: what is before a call; `kind`: before `def`."""
    name, writes = method_of(endpoint), endpoint.method != "GET"
    in_path = re.findall(r"{(\w+)}", endpoint.path)
    query, body = parameters(endpoint.query), parameters(endpoint.body)
    named = {**query, **body} | ({"key": 'str = ""'} if writes else {})
    words = ["self", *(f"{one}: {('int | str' if writes else 'int') if one in NUMBERS else 'str'}" for one in in_path)]
    words += ["*", *(f"{one}: {text}" for one, text in named.items())] if named else []
    given = [f"models.{endpoint.model.__name__}", repr(endpoint.method), repr(endpoint.path)]
    given += [f"names={dictionary(in_path)}"] if in_path else []
    given += [f"query={dictionary(query)}"] if query else []
    given += [f"body={dictionary(body)}", "key=key"] if body else ["key=key"] if writes else []
    pages = "cursor" in query
    said = f'"""{endpoint.summary}{", one page" * pages}. `{endpoint.method} {endpoint.path}`."""'
    answer = f"models.{endpoint.model.__name__}"
    yield (
        f"    {kind}def {name}{'_page' * pages}({', '.join(words)}) -> {answer}:\n        {said}\n"
        f"        return {wait}self.call(Call({', '.join(given)}))\n"
    )
    if "format" in endpoint.query.model_fields:
        asked = ", ".join(given[1:]).replace(dictionary(query), dictionary(query)[:-1] + ", 'format': 'csv'}")
        call = f"{wait}self.call(Call(models.Text, {asked}))"
        yield (
            f"    {kind}def {name}_csv({', '.join(words)}) -> str:\n"
            f'        """The same for spreadsheets, as CSV with a first line of names."""\n'
            f"        return {f'({call})' if wait else call}.text\n"
        )
    if pages:
        (item, of) = next(
            (n, f.annotation) for n, f in endpoint.model.model_fields.items() if typed(f.annotation)[:5] == "list["
        )
        words = [word for word in words if not word.startswith("cursor:")]
        asked = ", ".join([*in_path, *(f"{one}={one}" for one in query)])
        iterator = "AsyncIterator" if kind else "Iterator"
        each = "for one in page." + item + ":\n                yield one" if kind else f"yield from page.{item}"
        yield (
            f"    {kind}def {name}({', '.join(words)}) -> {iterator}[{typed(get_args(of)[0])}]:\n"
            f'        """{endpoint.summary}, read page by page."""\n'
            f"        {kind}for page in self._pages(lambda cursor: self.{name}_page({asked})):\n            {each}\n"
        )


def source() -> str:
    """The whole file, formatted."""
    parts = [HEAD]
    for title, base, wait, kind in (
        ("Client", "BaseClient", "", ""),
        ("AsyncClient", "BaseAsyncClient", "await ", "async "),
    ):
        made = "\n".join(text for one in ENDPOINTS for text in methods(one, wait=wait, kind=kind))
        parts.append(f'class {title}({base}):\n    """All calls. Each raises ApiError."""\n\n{made}')
    ruff = Path(sys.executable).with_name("ruff")
    text = "\n\n".join(parts)
    if "Any" not in text.removeprefix(HEAD):
        text = text.replace("import Any, Literal", "import Literal")
    if " date " not in text.removeprefix(HEAD):
        text = text.replace("from datetime import date\n", "")
    words = ["format", "-q", "--stdin-filename", str(PATH), "-"]
    return run_command([str(ruff), *words], input_text=text).stdout


if __name__ == "__main__":
    made = source()
    if sys.argv[1:] != ["--check"]:
        PATH.write_text(made)
    elif PATH.read_text() != made:
        sys.exit(f"{PATH}: not what the endpoints are; run tools/client_reference.py")
