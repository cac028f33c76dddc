"""The API is what its description says: schemathesis makes requests from it, good and bad ones, and checks the answers.

With SLUICE_TEST_SCALE=full it makes 10,000.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from sluice.base.errors import SluiceError
from sluice.exchange.acts import ActError, render_answer, render_error
from sluice.web.api import ENDPOINTS
from sluice.web.app import STREAM, description
from sluice.web.endpoint import PREFIX
from sluice.web.limits import Rates
from sluice.web.problems import ProblemError
from tests.unit.web.test_access import OWNERS, Web

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
DESCRIBED = description()
SCHEMAS = DESCRIBED["components"]["schemas"]
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DESCRIBED["paths"].items()
    for method, operation in methods.items()
}
ENDING = [one for one in OPERATIONS if one[1] != STREAM]
BOUNDED = [one for one in ENDING if any(set(of["schema"]) != {"type"} for of in OPERATIONS[one]["parameters"])]
"""Operations of which requests can be bad; of the others there are few."""
MOST = 10_000
CASES = -(-MOST // len(BOUNDED)) if FULL else 12
KNOWN = {
    "job": list(map(str, OWNERS)),
    "tenant": ["physics"],
    "node": ["n1"],
    "report": ["users"],
    "service": ["own"],
    "pool": ["p5"],
    "silence": ["0123456789abcdef"],
}
"""What the snapshot has, of the parameters of paths."""
EXAMPLES = {"hash": "0" * 64}
MODELS = {(one.method, PREFIX + one.path): one for one in ENDPOINTS}


def example(schema: dict[str, Any]) -> Any:
    """The simplest value that a schema allows."""
    if "$ref" in schema:
        return example(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [""])[0])
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        wanted = schema.get("required") or list(fields)[: schema.get("minProperties", 0)]
        return {name: EXAMPLES.get(name) or example(fields[name]) for name in wanted}
    return {"string": "0", "integer": 1, "number": 1.0, "boolean": True, "array": []}.get(schema.get("type", ""))


class _Free(Rates):
    """Without bounds, or with none left: what is tested is answers."""

    spent = False

    def _spend(self, *_: Any, **__: Any) -> None:
        if self.spent:
            raise ProblemError(429, "too many requests", remedy="ask less often", headers={"retry-after": "1"})

    def spend_time(self, user: str, seconds: float) -> None:
        pass


class Served:
    """The application, with a helper that does everything, or says why not."""

    def __init__(self, web: Web) -> None:
        self.web = web
        self.rates = web.site.rates = _Free()
        self.refusal = 0
        self.cases = 0
        self.reached: dict[tuple[str, str], set[int]] = {one: set() for one in OPERATIONS}
        self._of: tuple[str, str] = ("", "")
        self._tokens: dict[tuple[str, str], str] = {}
        web.site.acts._send = self._act  # type: ignore[method-assign]
        self._explain = web.site.feed.ask
        web.site.feed.ask = self._ask  # type: ignore[method-assign]

    async def _ask(self, do: str, **words: Any) -> Any:
        if do == "jwt":
            raise SluiceError("token: not one of Slurm's key", remedy="make one with: scontrol token")
        return await self._explain(do, **words)

    async def _act(self, line: bytes) -> bytes:
        del line
        if self.refusal:
            return render_error(ActError(self.refusal, "not now", remedy="read why"))
        return render_answer(example({"$ref": f"/{MODELS[self._of].model.__name__}"}))

    def headers(self, user: str, *scopes: str) -> dict[str, str]:
        key = user, " ".join(scopes)
        if user and key not in self._tokens:
            scopes = scopes or ("read", "write")
            self._tokens[key] = self.web.site.login.tokens.create(user, scopes, now=time.time(), seconds=3600)[1]
        return {"authorization": f"Bearer {self._tokens[key]}"} if user else {}

    def saw(self, one: tuple[str, str], status: int) -> None:
        self.reached[one].add(status)

    def about(self, one: tuple[str, str]) -> None:
        self._of, self.refusal, self.rates.spent = one, 0, False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(Web(tmp_path_factory.mktemp("web"), []))


@pytest.fixture(scope="module")
def schema(served: Served) -> Any:
    made = schemathesis.openapi.from_dict({name: part for name, part in DESCRIBED.items() if name != "security"})
    made.app = served.web.app  # who calls is this test's
    return made


@pytest.mark.parametrize("one", ENDING, ids=" ".join)
def test_answers_are_as_described(served: Served, schema: Any, one: tuple[str, str]) -> None:
    operation = schema[one[1]][one[0]]
    served.about(one)

    def check(case: Any, user: str, known: bool) -> None:
        if mode is GenerationMode.POSITIVE:
            case.query.pop("cursor", None)  # what a server made, which no schema says
            if "since" in case.query:
                case.query.pop("until", None)  # not before it
            for name in case.path_parameters if known else ():
                case.path_parameters[name] = KNOWN[name][0]
        assume(all(value not in ([], {}, None) for value in case.query.values()))  # else nothing is sent of it
        answer = case.call(headers=served.headers(user))
        served.saw(one, answer.status_code)
        served.cases += 1
        assert user or answer.status_code >= 400, answer.text
        case.validate_response(answer, headers=served.headers(user))

    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if one in BOUNDED else [])]
    for mode in modes:
        cases = operation.as_strategy(generation_mode=mode)
        run = given(cases, st.sampled_from(["root", "root", "alice", ""]), st.booleans())(check)
        most = CASES // len(modes)
        settings(
            max_examples=most, database=None, derandomize=not FULL,  # a red CI is red again
            suppress_health_check=list(HealthCheck),
        )(run)()  # fmt: skip


@pytest.mark.parametrize("one", OPERATIONS, ids=" ".join)
def test_each_answer_that_is_described_can_be_had(served: Served, one: tuple[str, str]) -> None:
    """What chance has not found."""
    method, path = one
    client = TestClient(served.web.app, raise_server_exceptions=False)  # type: ignore[arg-type]
    body = OPERATIONS[one].get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    good = path.format(**{name: values[0] for name, values in KNOWN.items()})
    wanted = {int(status) for status in OPERATIONS[one]["responses"] if status < "500"}

    def ask(status: int) -> int:
        served.about(one)
        headers = served.headers("" if status == 401 else "alice" if status == 403 else "root")
        sent: dict[str, Any] = {} if body is None else {"json": example(body)}
        place = good
        by_proof = bool(MODELS.get(one)) and MODELS[one].by_proof
        if status == 403 and by_proof:
            headers, served.refusal = served.headers("root"), 403
        elif status == 403 and method != "GET":
            headers = served.headers("root", "read")
        elif status == 400:
            place += "?no-such-parameter=1"
        elif status == 413:
            sent = {"content": b" " * (64 << 20)}
        elif status == 415:
            sent = {"content": b"{}", "headers": {"content-type": "text/plain"}}
        elif status == 429:
            served.rates.spent = True
        elif status in (404, 409, 422) and (method != "GET" or by_proof):
            served.refusal = status
        elif status == 404:
            place = path.format_map({**dict.fromkeys(KNOWN, "nothing"), "job": 4_000_000_000})
        sent["headers"] = {**headers, **sent.get("headers", {})}
        return client.request(method, place, **sent).status_code

    assert wanted >= {200, 400, 401, 429} or wanted >= {201, 400, 401, 429}
    for status in wanted - served.reached[one] - ({200} if path == STREAM else set()):
        assert ask(status) == status
    served.about(one)


def test_so_many_requests_were_made(served: Served) -> None:
    assert served.cases >= (MOST if FULL else 0)


def parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema and all that are in it."""
    inner = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    inner += [one for name in ("items", "additionalProperties") if isinstance(one := schema.get(name), dict)]
    return [schema, *(found for one in inner for found in parts(one))]


def test_no_schema_is_empty() -> None:
    assert len(SCHEMAS) > 30
    for name, schema in SCHEMAS.items():
        assert {"properties", "enum", "anyOf"} & set(schema) or name == "Nothing", f"{name} says nothing"
        for one in parts(schema):
            assert {"type", "$ref", "anyOf", "oneOf", "enum", "const"} & set(
                one
            ), f"{name} has a field of any kind: {one}"
    for operation in OPERATIONS.values():
        for response in operation["responses"].values():
            for content in response["content"].values():
                assert content["schema"].get("$ref") or content["schema"].get("type") == "string"
