"""The API's description, OpenAPI 3.1, made from the table of endpoints and their models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from policy.model import Policy
from sluice.client.models import Problem
from sluice.exchange.acts import MOST_KEY
from sluice.report.fields import GROUPED_BY


class Described(Protocol):
    """What is needed of an endpoint."""

    @property
    def path(self) -> str:
        """Below the prefix."""

    @property
    def model(self) -> type[BaseModel]:
        """Of its answer."""

    @property
    def query(self) -> type[BaseModel]:
        """Its parameters."""

    @property
    def summary(self) -> str:
        """What it is."""

    @property
    def method(self) -> str:
        """GET, or of a write."""

    @property
    def body(self) -> type[BaseModel] | None:
        """What a write is sent."""

    @property
    def operators(self) -> bool:
        """Whether it is for nobody else."""

    @property
    def by_proof(self) -> bool:
        """Whether the word of a proxy is not enough."""

    @property
    def going(self) -> Any:
        """Since when and until when, where it is to go; else None."""

    @property
    def status(self) -> int:
        """Of a good answer."""


def document(prefix: str, endpoints: Iterable[Described], stream: type[BaseModel]) -> dict[str, Any]:
    """All of it. `stream`: the parameters of what follows changes."""
    endpoints = list(endpoints)
    answers: list[type[BaseModel]] = list(dict.fromkeys([Problem, *(one.model for one in endpoints)]))
    bodies = list(dict.fromkeys(one.body for one in endpoints if one.body is not None))
    _, schemas = models_json_schema(
        [*((one, "serialization") for one in answers), *((one, "validation") for one in bodies)],
        ref_template="#/components/schemas/{model}",
    )
    _describe_policy(schemas["$defs"])
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        make = _get if one.method == "GET" else _write
        made = make(one)
        if one.going is not None:
            made |= one.going.schema()
        paths.setdefault(prefix + one.path, {})[one.method.lower()] = made
    streamed = {status: text for status, text in _READ.items() if status not in _ONLY}
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    paths[f"{prefix}/stream"] = {
        "get": _operation("/stream", "What changes, as server-sent events", _query(stream), {"200": events}, streamed)
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sluice", "version": "1", "description": "See docs/web.md."},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_policy(schemas: dict[str, Any]) -> None:
    """The policy's own models, under names of their own. What a file does not set is left out of what is shown."""
    if "PolicyShown" not in schemas:
        return
    place = "#/components/schemas/Policy"
    found = Policy.model_json_schema(mode="serialization", ref_template=place + ".{model}")
    parts = found.pop("$defs")
    for name, one in {"Policy": found, **{f"Policy.{name}": one for name, one in parts.items()}}.items():
        schemas[name] = {key: value for key, value in one.items() if key != "required"}
    shown = schemas["PolicyShown"]["properties"]
    shown["policy"] = {"$ref": place, "description": shown["policy"]["description"]}


_READ = {"400": "A bad parameter", "401": "No token, or a bad one", "403": "Not for this user", "404": "Not known",
         "429": "Too many requests", "503": "Not known now"}  # fmt: skip
_WRITTEN = {"400": "A bad parameter or header, or no JSON", "401": "No token, or a bad one",
            "403": "Not for this user, or a token that can only read", "404": "Not known",
            "409": "Not as things are: it has ended, the plan has changed, the same key is being done",
            "413": "Too large", "415": "Not JSON", "422": "Refused: a bad field, or what Slurm says",
            "429": "Too many requests", "503": "Cannot be done now; it may have been done"}  # fmt: skip
_ONLY: dict[str, Callable[[Described], bool]] = {
    "403": lambda one: one.operators or one.by_proof or one.method != "GET",
    "404": lambda one: "{" in one.path or one.method != "GET",
    "415": lambda one: one.body is not None,
}
"""What only some operations answer."""
_NAMES = {
    "job": "^[0-9]{1,10}$",
    "silence": "^[0-9a-f]{8,64}$",
    "report": f"^({'|'.join(one for one in GROUPED_BY if one != 'nodes')})$",
}
"""How names in paths are written."""
_TASK = "^[0-9]{1,10}(_[0-9]{1,10})?$"
_KEY = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "description": "Within 24 h the same key with the same request is done once, and answered as then.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MOST_KEY, "pattern": "^[ -~]+$"},
}  # fmt: skip


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _query(model: Any) -> list[dict[str, Any]]:
    properties = model.model_json_schema().get("properties", {})
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            **({"deprecated": True} if schema.get("deprecated") else {}),
            "schema": {k: v for k, v in schema.items() if k != "title"},
        }
        for name, schema in properties.items()
    ]


def _get(one: Described) -> dict[str, Any]:
    done = {"200": _json(one.model.__name__)}
    if "format" in one.query.model_fields:
        done["200"]["text/csv"] = {"schema": {"type": "string"}}
    return _operation(one.path, one.summary, _query(one.query), done, _said(one, _READ))


def _said(one: Described, all_of_them: dict[str, str]) -> dict[str, str]:
    return {status: text for status, text in all_of_them.items() if status not in _ONLY or _ONLY[status](one)}


def _write(one: Described) -> dict[str, Any]:
    done = {str(one.status): _json(one.model.__name__)}
    made = _operation(one.path, one.summary, [_KEY], done, _said(one, _WRITTEN), one.method.lower())
    if one.body is not None:
        made["requestBody"] = {"required": True, "content": _json(one.body.__name__)}
    return made


def _operation(
    path: str,
    summary: str,
    parameters: list[dict[str, Any]],
    done: dict[str, Any],
    said: dict[str, str],
    method: str = "",
) -> dict[str, Any]:
    for name in re.findall(r"{(\w+)}", path):
        pattern = _TASK if name == "job" and method else _NAMES.get(name)
        schema = {"type": "string", **({"pattern": pattern} if pattern else {})}
        parameters = [*parameters, {"name": name, "in": "path", "required": True, "schema": schema}]
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": summary,
        "parameters": parameters,
        "responses": {
            **{code: {"description": summary, "content": content} for code, content in done.items()},
            **{code: {"description": text, "content": problem} for code, text in said.items()},
        },
    }
