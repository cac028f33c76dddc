"""The typed client: every call against the real application, and what it does when the server or the network fails."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.client import ApiError, AsyncClient, Change, Client, models
from sluice.client import transport as module
from sluice.client.base import BaseClient
from sluice.web.api import ENDPOINTS
from sluice.web.endpoint import PREFIX
from tests.unit.controllerd.slurm_objects import a_job
from tests.unit.web.test_access import OWNERS, Web

Handle = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def _nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLUICE_TOKEN", "SLUICE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def a_client(handle: Handle, **words: Any) -> tuple[Client, list[float]]:
    """A client of a server that is a function, and how long it has waited."""
    waited: list[float] = []
    return Client(token="t", transport=httpx.MockTransport(handle), sleep=waited.append, **words), waited


def problem(status: int, **headers: str) -> httpx.Response:
    body = {"title": "x", "status": status, "detail": "job 17: not known", "remedy": "look", "request_id": "abc"}
    return httpx.Response(status, headers=headers, json=body)


def in_turn(*answers: httpx.Response | Exception) -> tuple[Handle, list[httpx.Request]]:
    """A server that gives these answers."""
    left, asked = list(answers), []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle, asked


WHO = {"user": "alice", "level": "user", "coordinates": [], "accounts": []}


def methods() -> list[str]:
    base = {name for name, _ in inspect.getmembers(BaseClient)}
    return sorted(name for name, _ in inspect.getmembers(Client) if name[0] != "_" and name not in base)


def test_every_endpoint_that_reads_gives_its_model_to_both_clients(tmp_path: Path) -> None:
    web = Web(tmp_path, [])
    asked: set[str] = set()

    async def pass_on(request: httpx.Request) -> httpx.Response:
        asked.add(request.url.path)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(web.app)) as inner:  # type: ignore[arg-type]
            answer = await inner.request(request.method, request.url, headers=request.headers, content=request.content)
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    given = {"job": 3, "tenant": "chemistry", "node": "n1", "report": "users", "service": "own", "pool": "p5"}
    token = web.token("root")
    sync = Client(token=token, transport=httpx.MockTransport(lambda one: asyncio.run(pass_on(one))))
    reads = [
        name for name in methods() if "GET /" in (getattr(Client, name).__doc__ or "") or name + "_page" in methods()
    ]

    def words(name: str) -> list[Any]:
        wanted = inspect.signature(getattr(Client, name)).parameters.values()
        return [given[one.name] for one in wanted if one.kind is one.POSITIONAL_OR_KEYWORD and one.name in given]

    async def of_async(name: str) -> Any:
        async with AsyncClient(token=token, transport=httpx.MockTransport(pass_on)) as client:
            made = getattr(client, name)(*words(name))
            return [one async for one in made] if inspect.isasyncgen(made) else await made

    for name in reads:
        found = getattr(sync, name)(*words(name))
        found = list(found) if inspect.isgenerator(found) else found
        assert found, name
        assert asyncio.run(of_async(name)) == found, name
    paths = {PREFIX + one.path.format(**given) for one in ENDPOINTS if getattr(one, "method", "GET") == "GET"}
    assert asked == paths


def test_jobs_are_read_page_by_page_as_they_are_needed(tmp_path: Path) -> None:
    web, pages = Web(tmp_path, []), []

    def handle(request: httpx.Request) -> httpx.Response:
        pages.append(request.url.query.decode())
        answer = web.get("/jobs?" + pages[-1], "root")
        return httpx.Response(answer.status_code, content=answer.content)

    client, _ = a_client(handle)
    jobs = client.jobs(limit=1, order="ascending")
    assert next(jobs).id == 1 and len(pages) == 1
    assert [job.id for job in jobs] == sorted(OWNERS)[1:] and len(pages) == len(OWNERS)
    assert [job.id for job in client.jobs(user="mallory")] == [3]


@pytest.mark.parametrize(
    ("first", "tries", "waits"),
    [
        (httpx.ConnectError("refused"), 2, 0.5),
        (httpx.ReadTimeout("late"), 2, 0.5),
        (httpx.Response(502), 2, 0.5),
        (problem(503, **{"retry-after": "7"}), 2, 7),
        (problem(429, **{"retry-after": "7"}), 2, 7),
        (problem(409, **{"retry-after": "2"}), 2, 2),
        (problem(409), 1, 0),
        (problem(429, **{"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), 2, 0.5),
        (problem(429, **{"retry-after": "3600"}), 1, 0),
        (problem(429, **{"retry-after": "soon"}), 1, 0),
        (problem(503), 1, 0),
        (problem(500), 1, 0),
        (problem(404), 1, 0),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again_as_late_as_the_server_wants(first: Any, tries: int, waits: float) -> None:
    handle, asked = in_turn(first, httpx.Response(200, json=WHO))
    client, waited = a_client(handle)
    if tries == 1:
        with pytest.raises(ApiError):
            client.whoami()
    else:
        assert client.whoami().user == "alice"
        assert waits <= waited[0] <= 1.5 * waits + 0.01
    assert len(asked) == tries


def test_it_gives_up_after_the_retries_and_says_why() -> None:
    handle, asked = in_turn(*[httpx.ConnectError("refused") for _ in range(9)])
    client, waited = a_client(handle, retries=3)
    with pytest.raises(ApiError, match="GET /api/v1/whoami: no answer: refused") as error:
        client.whoami()
    assert error.value.status == 0 and error.value.remedy and len(asked) == 4
    assert waited == sorted(waited) and waited[-1] >= 2


def test_a_write_has_one_key_for_all_its_attempts_and_a_read_has_none() -> None:
    handle, asked = in_turn(*[answer for _ in range(2) for answer in (httpx.ReadTimeout(""), problem(502))] * 2)
    client, _ = a_client(handle, retries=1)
    for call in ("POST", "POST", "GET"):
        with pytest.raises(ApiError):
            client.call(module.Call(models.Whoami, call, "/jobs", body={"a": None, "b": 1}))
    keys = [request.headers.get("idempotency-key") for request in asked]
    assert keys[0] == keys[1] != keys[2] == keys[3] and keys[0] and len(keys[0]) == 32
    assert keys[4:] == [None, None] and json.loads(asked[0].content) == {"b": 1}


def test_an_error_names_what_where_the_remedy_and_the_request() -> None:
    client, _ = a_client(in_turn(problem(404))[0])
    with pytest.raises(ApiError) as caught:
        client.job(17)
    error = caught.value
    assert (error.status, error.what, error.remedy, error.request_id) == (404, "job 17: not known", "look", "abc")
    assert str(error) == "GET /api/v1/jobs/17: job 17: not known; look (request abc)"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>\x1b[31mlog in"),
        httpx.Response(200, json={"user": 5}),
        httpx.Response(404, text="\x1b]0;title\x07"),
        httpx.Response(302, headers={"location": "https://evil.example/"}),
    ],
    ids=str,
)
def test_what_is_no_answer_of_sluice_is_an_error_that_a_terminal_can_print(answer: httpx.Response) -> None:
    handle, asked = in_turn(answer)
    client, _ = a_client(handle)
    with pytest.raises(ApiError) as error:
        client.whoami()
    assert str(error.value).isprintable() and len(asked) == 1


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    handle, asked = in_turn(problem(404))
    client, _ = a_client(handle)
    with pytest.raises(UsageError, match="not a name"):
        client.tenant(name)
    with pytest.raises(ApiError):
        client.tenant("a/../b?c#d")
    assert asked[0].url.raw_path == b"/api/v1/tenants/a%2F..%2Fb%3Fc%23d"


# ---- the token ----


def test_the_token_comes_from_the_argument_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / ".config/sluice/token"
    with pytest.raises(SluiceError, match="no token"):
        Client()
    file.parent.mkdir(parents=True)
    file.write_text("of-file\n")
    file.chmod(0o600)

    def sent(**words: Any) -> str:
        handle, asked = in_turn(httpx.Response(200, json=WHO))
        Client(transport=httpx.MockTransport(handle), **words).whoami()
        return asked[0].headers["authorization"]

    assert sent() == "Bearer of-file"
    monkeypatch.setenv("SLUICE_TOKEN", "of-environment")
    assert sent() == "Bearer of-environment" and sent(token="of-argument") == "Bearer of-argument"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(mode)
    with pytest.raises(SluiceError, match="others than its owner can read it or change it") as error:
        Client(token_file=file)
    assert "secret" not in str(error.value)


def test_what_is_no_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(SluiceError):
        Client(token_file=tmp_path / "token")


@pytest.mark.parametrize("token", ["a b", "a\nb", "a\r\nx-evil: 1", "é", "x" * 9000])
def test_a_token_that_is_none_is_refused_before_it_is_sent(token: str) -> None:
    with pytest.raises(UsageError, match="token"):
        Client(token=token)


@pytest.mark.parametrize("url", ["http://web.example", "ftp://x", "web.example", "http://user:x@127.0.0.1", "https://"])
def test_a_token_is_not_sent_where_it_can_be_read(url: str) -> None:
    with pytest.raises(UsageError, match="url"):
        Client(url, token="t")
    if url == "http://web.example":
        Client(url, token="t", without_tls=True)


def test_a_proxy_of_the_environment_gets_no_token_that_is_not_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    client = Client("http://127.0.0.1:1", token="t")
    assert not [one for one in client._http._mounts.values() if one is not None]


# ---- what changes ----


def row(number: int, state: str) -> dict[str, Any]:
    from sluice.controllerd.snapshot import job_row

    return job_row(a_job(number, state=state))


def event(topic: str, document: dict[str, Any]) -> str:
    return f"event: {topic}\ndata: {json.dumps(document)}\n\n"


def changed(number: int, state: str) -> str:
    return event("jobs", {"key": str(number), "row": row(number, state)})


class Server:
    """Streams, one after the other, each with its lines, and jobs that can be read."""

    def __init__(self, *streams: str | httpx.Response, jobs: dict[int, list[str]] | None = None) -> None:
        self.streams = list(streams)
        self.jobs = jobs or {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/stream"):
            found = self.streams.pop(0) if self.streams else problem(403)
            return httpx.Response(200, stream=_Lines(found)) if isinstance(found, str) else found
        states = self.jobs.get(int(request.url.path.rpartition("/")[2]), [])
        if not states:
            return problem(404)
        state = states.pop(0) if len(states) > 1 else states[0]
        return httpx.Response(200, json={"job": row(7, state), "gpus": []})


class _Lines(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[bytes]:
        half = len(self.text) // 2
        yield self.text[:half].encode()
        yield self.text[half:].encode()
        raise httpx.ReadError("lost")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in (self.text[:7], self.text[7:]):
            yield piece.encode()
        raise httpx.ReadError("lost")


async def no_sleep(seconds: float) -> None:
    del seconds


def followed(server: Server, *topics: str, asynchronous: bool) -> list[Change]:
    """All changes until the server refuses."""
    found: list[Change] = []

    async def follow() -> None:
        async with AsyncClient(token="t", transport=httpx.MockTransport(server), sleep=no_sleep) as client:
            async for one in client.events(*topics):
                found.append(one)

    with pytest.raises(ApiError) as error:
        if asynchronous:
            asyncio.run(follow())
        else:
            for one in a_client(server)[0].events(*topics):
                found.append(one)
    assert error.value.status == 403
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_is_followed_over_its_connections_each_of_which_begins_with_a_reset(asynchronous: bool) -> None:
    server = Server(
        "retry: 3000\n\n" + event("quiet", {}) + changed(7, "PENDING") + event("jobs", {"key": "8"}),
        problem(503, **{"retry-after": "1"}),
        event("reset", {}) + event("of a newer server", {"key": "1"}) + changed(7, "RUNNING") + "event: jobs\ndata: {",
    )
    found = followed(server, "jobs", asynchronous=asynchronous)
    assert [(one.topic, one.key) for one in found] == [
        ("reset", ""), ("jobs", "7"), ("jobs", "8"), ("reset", ""), ("reset", ""), ("jobs", "7"),
    ]  # fmt: skip
    assert isinstance(found[1].row, models.Job) and found[1].row.state == "PENDING" and found[2].row is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_jobs_are_watched_until_they_have_ended_whatever_is_lost_on_the_way(asynchronous: bool) -> None:
    other = changed(8, "RUNNING")

    def served() -> Server:
        return Server(
            changed(7, "PENDING") + other,
            changed(7, "RUNNING") * 2,
            ": x\n",
            jobs={7: ["PENDING", "RUNNING", "COMPLETED"]},
        )

    async def watch() -> list[str]:
        async with AsyncClient(token="t", transport=httpx.MockTransport(served()), sleep=no_sleep) as client:
            return [job.state async for job in client.watch(7)]

    states = asyncio.run(watch()) if asynchronous else [job.state for job in a_client(served())[0].watch(7)]
    assert states == ["PENDING", "RUNNING", "COMPLETED"]


def test_a_job_that_is_new_is_waited_for_and_one_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = a_client(Server(changed(7, "COMPLETED")))
    assert [job.state for job in client.watch(7)] == ["COMPLETED"]
    monkeypatch.setattr("sluice.client.follow.KNOWN_S", 0.0)
    client, _ = a_client(Server(changed(8, "COMPLETED")))
    with pytest.raises(ApiError, match="not known"):
        list(client.watch(7))


def test_a_server_that_never_answered_is_not_waited_for_without_end() -> None:
    handle, asked = in_turn(*[httpx.ConnectError("refused") for _ in range(9)])
    client, _ = a_client(handle, retries=2)
    with pytest.raises(ApiError, match="no answer"):
        next(client.events("jobs"))
    assert len(asked) == 3


def test_without_httpx_the_models_are_there_and_a_client_says_what_to_install() -> None:
    from sluice.base.run import PYTHON, run_command

    program = """
import sys
sys.modules["httpx"] = None
from sluice.base.errors import SluiceError
from sluice.client import Client, models
try:
    Client(token="t")
except SluiceError as error:
    print(error)
"""
    assert "pip install 'sluice-slurm[client]'" in run_command([*PYTHON, "-c", program]).stdout


def test_its_calls_are_what_the_endpoints_are() -> None:
    from sluice.base.run import PYTHON, run_command

    tool = Path(__file__).parents[3] / "tools/client_reference.py"
    run_command([*PYTHON, str(tool), "--check"])


def test_reports_come_as_csv_too() -> None:
    handle, asked = in_turn(
        httpx.Response(200, text="User,Jobs\na,1\n", headers={"content-type": "text/csv"}), problem(404)
    )
    client, _ = a_client(handle)
    assert client.report_csv("users", user="a") == "User,Jobs\na,1\n"
    assert asked[0].url.path == f"{PREFIX}/reports/users" and asked[0].url.params["format"] == "csv"
    with pytest.raises(ApiError, match="not known"):
        client.nodes_report_csv()

    async def ask() -> str:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=request.url.params["format"]))
        async with AsyncClient(token="t", transport=transport) as other:
            return await other.reports_jobs_csv(limit=5)

    assert asyncio.run(ask()) == "csv"
