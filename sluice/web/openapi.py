"""The API's description, OpenAPI 3.1, made from the table of endpoints and their models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sluice.client.models import Problem


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


def document(prefix: str, endpoints: Iterable[Described], stream: type[BaseModel]) -> dict[str, Any]:
    """All of it. `stream`: the parameters of what follows changes."""
    endpoints = list(endpoints)
    used: list[type[BaseModel]] = list(dict.fromkeys([Problem, *(one.model for one in endpoints)]))
    _, schemas = models_json_schema(
        [(one, "serialization") for one in used], ref_template="#/components/schemas/{model}"
    )
    paths = {
        prefix + one.path: {"get": _get(one.path, one.summary, one.query, _json(one.model.__name__))}
        for one in endpoints
    }
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    paths[f"{prefix}/stream"] = {"get": _get("/stream", "What changes, as server-sent events", stream, events)}
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


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _get(path: str, summary: str, query: Any, content: dict[str, Any]) -> dict[str, Any]:
    properties = query.model_json_schema().get("properties", {})
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "required": False, "schema": {k: v for k, v in schema.items() if k != "title"}}
        for name, schema in properties.items()
    ]
    for name in re.findall(r"{(\w+)}", path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    said = {"400": "A bad parameter", "401": "No token, or a bad one", "403": "Not for this user", "404": "Not known",
            "429": "Too many requests", "503": "Not known now"}  # fmt: skip
    return {
        "operationId": re.sub(r"\W+", "_", path).strip("_"),
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": summary, "content": content},
            **{code: {"description": text, "content": problem} for code, text in said.items()},
        },
    }
