"""What is to go says so: in the description, and in each answer to who still uses it."""

from __future__ import annotations

import asyncio
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, Field

from sluice.web import app as module
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import PREFIX, Endpoint, Going
from tests.unit.web.test_access import Web

GOING = Going(date(2026, 11, 1), date(2027, 6, 1), "/new")
HEADERS = {"deprecation": "@1793491200", "sunset": "Tue, 01 Jun 2027 00:00:00 GMT"}


class Answer(BaseModel):
    """Made up."""

    new: int = 1
    old: int = Field(1, json_schema_extra=GOING.schema())


class Asked(BaseModel, extra="forbid"):
    """Made up."""

    new: str = ""
    old: str = Field("", json_schema_extra=GOING.schema())


async def _write(*_: Any) -> dict[str, Any]:
    return {"new": 1, "old": 1}


MADE_UP = (
    Endpoint("/old", lambda *_: {"new": 1, "old": 1}, Answer, "Made up", going=GOING),
    Endpoint("/new", lambda *_: {"new": 1, "old": 1}, Answer, "Made up", Asked),
    Endpoint("/write", _write, Answer, "Made up", method="POST", scope="write", body=Asked),
)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Web:
    monkeypatch.setattr(module, "ENDPOINTS", (*ENDPOINTS, *MADE_UP))
    return Web(tmp_path, [])


def going_in(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {name: answer.headers[name] for name in HEADERS if name in answer.headers}


def test_answers_of_what_is_to_go(web: Web) -> None:
    assert going_in(web.get("/old", "alice")) == HEADERS
    assert going_in(web.get("/new?old=x&new=y", "alice")) == HEADERS, "a parameter"
    assert (
        going_in(web.get("/new?new=y", "alice")) == {}
    ), "that an answer has a field that is to go, the description says"
    assert going_in(web.get("/jobs", "alice")) == {}
    tag = web.get("/old", "alice").headers["etag"]
    again = web.get("/old", "alice", **{"if-none-match": tag})
    assert again.status_code == 304 and again.headers["sunset"] == HEADERS["sunset"]


@pytest.mark.parametrize(("body", "wanted"), [({"old": "x"}, HEADERS), ({"new": "x"}, {})])
def test_a_field_that_is_sent(web: Web, body: dict[str, str], wanted: dict[str, str]) -> None:
    token = web.site.login.tokens.create("alice", ["read", "write"], now=time.time(), seconds=60)[1]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(web.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
            return await client.post(f"{PREFIX}/write", json=body, headers={"authorization": f"Bearer {token}"})

    assert going_in(asyncio.run(send())) == wanted


def test_the_description_marks_it(web: Web) -> None:
    made = module.description()
    said = {"deprecated": True, "x-since": "2026-11-01", "x-sunset": "2027-06-01", "x-instead": "/new"}
    assert made["paths"][f"{PREFIX}/old"]["get"].items() >= said.items()
    assert made["components"]["schemas"]["Answer"]["properties"]["old"].items() >= said.items()
    (old,) = (one for one in made["paths"][f"{PREFIX}/new"]["get"]["parameters"] if one["name"] == "old")
    assert old["deprecated"] is True and old["schema"]["x-sunset"] == "2027-06-01"
    assert not [
        one for one in ENDPOINTS if one.going
    ], "nothing is to go yet: else docs/web.md and the changelog say so"
