"""gRPC: real channels to the server, over TLS too, before a gateway and an API that are small HTTP servers."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from sluice.base.errors import UsageError
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.rpc import serve_pb2 as pb
from sluice.serve.rpc.client import CallFailed, ClusterClient
from sluice.serve.rpc.jobs import Jobs, batch_script
from sluice.serve.rpc.server import Addresses, Server
from sluice.serve.rpc.status import CallError, code_of, of_event
from sluice.serve.rpc.structs import from_struct, to_struct
from sluice.serve.rpc.table import INFERENCE, JOBS, MOST_MESSAGE, methods

ROOT = Path(__file__).resolve().parents[4]
TOKEN = "sluice_0123456789abcdef_" + "k" * 43


class Gateway:
    """A gateway of which a test says what it answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda one: self.json(one, 404, {})
        self.well = True
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/health":
                    self.close_connection = not gateway.well
                    gateway.json(self, 200 if gateway.well else 503, {})
                    return
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                gateway.asked.append((self.path, headers, json.loads(body) if body else None))
                gateway.answer(self)

            def log_message(self, *words: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.well = False
        self._server.shutdown()
        self._server.server_close()

    @staticmethod
    def json(one: BaseHTTPRequestHandler, status: int, document: Any, **headers: str) -> None:
        body = json.dumps(document).encode()
        one.send_response(status)
        for name, value in {"content-length": str(len(body)), "x-request-id": "r-1", **headers}.items():
            one.send_header(name.replace("_", "-"), value)
        one.end_headers()
        one.wfile.write(body)

    def events(self, *events: Any, ends: str = "data: [DONE]\n\n", pieces: int = 7) -> None:
        """It streams these, in pieces that do not end where lines do."""

        def answer(one: BaseHTTPRequestHandler) -> None:
            one.send_response(200)
            one.send_header("content-type", "text/event-stream")
            one.send_header("connection", "close")
            one.end_headers()
            text = ": waiting\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ends
            raw = text.encode()
            for at in range(0, len(raw), pieces):
                one.wfile.write(raw[at : at + pieces])
            one.close_connection = True

        self.answer = answer


class Running:
    """A server in a thread with a loop of its own."""

    def __init__(self, addresses: Addresses, jobs: Jobs | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def start() -> Server:
            server = Server(addresses, jobs=jobs)
            await server.start()
            return server

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result(20)
        self.port = self._server.port

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0.2), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.stop()


def addresses(gateway: Gateway, **words: Any) -> Addresses:
    return Addresses("127.0.0.1:0", gateway.url, "http://127.0.0.1:9", None, "/opt/sluice/bin/sluice-batch", **words)


@pytest.fixture
def running(gateway: Gateway) -> Iterator[Running]:
    made = Running(addresses(gateway))
    yield made
    made.stop()


@pytest.fixture
def client(running: Running) -> Iterator[ClusterClient]:
    with ClusterClient(f"127.0.0.1:{running.port}", token=TOKEN, timeout=20) as made:
        yield made


def chunk(text: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": content | delta, "finish_reason": finish}]}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


# ---- inference ----


def test_a_chat_is_the_request_that_an_openai_client_sends(gateway: Gateway, client: ClusterClient) -> None:
    message = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "t", "type": "function"}]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    gateway.answer = lambda one: gateway.json(one, 200, {"id": "c", "model": "m", "choices": [choice], "usage": USAGE})
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    reply = client.chat("m", said, max_tokens=5, temperature=0.5, stop="x", top_k=40, tools=[{"type": "function"}])
    path, headers, body = gateway.asked[0]
    assert path == "/v1/chat/completions" and headers["authorization"] == f"Bearer {TOKEN}"
    assert 0 < float(headers["sluice-deadline"]) <= 20
    assert body == {
        "model": "m", "messages": said, "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "top_k": 40,
        "tools": [{"type": "function"}],
    }  # fmt: skip
    assert isinstance(body["top_k"], int)
    assert reply.choices[0].message.content == "hi" and reply.choices[0].finish_reason == "stop"
    assert from_struct(reply.choices[0].message.fields) == {"tool_calls": message["tool_calls"]}
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.cached_tokens) == (3, 2, 1)


def test_a_stream_is_given_piece_by_piece_and_whole(gateway: Gateway, client: ClusterClient) -> None:
    usage = {"id": "c", "model": "m", "choices": [], "usage": USAGE}
    gateway.events(chunk(None, role="assistant"), chunk("zwölf "), chunk("Worte", "stop"), usage)
    chunks = list(client.chat_stream("m", "count"))
    assert "".join(one.text for one in chunks) == "zwölf Worte"
    assert from_struct(chunks[0].fields) == {"role": "assistant"}
    assert [one.finish_reason for one in chunks] == ["", "", "stop", ""] and chunks[-1].usage.completion_tokens == 2
    assert gateway.asked[0][2]["stream"] is True and gateway.asked[0][2]["stream_options"] == {"include_usage": True}


def test_completions_and_models(gateway: Gateway, client: ClusterClient) -> None:
    choice = {"index": 0, "text": "b", "finish_reason": "length"}
    gateway.answer = lambda one: gateway.json(one, 200, {"id": "c", "model": "m", "choices": [choice], "usage": USAGE})
    assert client.complete("m", "a", seed=7).choices[0].text == "b" and gateway.asked[0][2]["seed"] == 7
    gateway.events({"id": "c", "model": "m", "choices": [choice], "usage": USAGE})
    chunks = list(client.complete_stream("m", "a"))
    assert chunks[0].text == "b" and chunks[-1].usage.prompt_tokens == 3
    gateway.answer = lambda one: gateway.json(one, 200, {"data": [{"id": "m", "owned_by": "t", "created": 5}]})
    assert client.models() == [pb.Model(id="m", owned_by="t", created=5)]


def test_embeddings_come_in_the_order_of_the_texts(gateway: Gateway, client: ClusterClient) -> None:
    rows = [{"index": 1, "embedding": [3, 4.5]}, {"index": 0, "embedding": [1, 2]}]
    gateway.answer = lambda one: gateway.json(one, 200, {"model": "m", "data": rows, "usage": USAGE})
    assert client.embed("m", ["a", "b"]) == [[1, 2], [3, 4.5]]
    rows[0]["embedding"] = "AAAA"
    with pytest.raises(CallFailed, match="not lists of numbers"):
        client.embed("m", "a")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "INVALID_ARGUMENT"), (401, "UNAUTHENTICATED"), (402, "RESOURCE_EXHAUSTED"), (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"), (409, "ABORTED"), (413, "INVALID_ARGUMENT"), (418, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"), (500, "INTERNAL"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED"),
    ],
)  # fmt: skip
def test_errors_have_a_code_the_words_and_when_to_come_again(
    gateway: Gateway, client: ClusterClient, status: int, code: str
) -> None:
    error = {"error": {"message": "tokens a minute: 10 of 10; wait", "type": "x", "param": None, "code": None}}
    gateway.answer = lambda one: gateway.json(one, status, error, retry_after="7")
    with pytest.raises(CallFailed, match="10 of 10; wait") as caught:
        client.chat("m", "a")
    assert caught.value.code == getattr(grpc.StatusCode, code) == code_of(status)
    assert (caught.value.retry_after, caught.value.request_id) == (7.0, "r-1")
    assert len(gateway.asked) == 1, "a chat is not sent twice"


def test_a_stream_that_fails_says_so(gateway: Gateway, client: ClusterClient) -> None:
    seen: list[str] = []
    gateway.events(chunk("half "), ends="")
    with pytest.raises(CallFailed, match="not whole") as caught:
        seen.extend(one.text for one in client.chat_stream("m", "a"))
    assert seen == ["half "] and caught.value.code == grpc.StatusCode.UNAVAILABLE
    gateway.events(chunk("half "), {"error": {"message": "tools cannot be continued", "type": "server_error"}})
    with pytest.raises(CallFailed, match="cannot be continued") as caught:
        list(client.chat_stream("m", "a"))
    assert caught.value.code == grpc.StatusCode.INTERNAL
    gateway.events(ends="data: {no json\n\n")
    with pytest.raises(CallFailed, match="was cut"):
        list(client.chat_stream("m", "a"))
    gateway.events(ends=f"data: {'[' * 100_000}\n\n", pieces=1 << 20)
    with pytest.raises(CallFailed, match="was cut"):
        list(client.chat_stream("m", "a"))
    gateway.events(chunk("\ud800"))
    with pytest.raises(CallFailed, match="cannot be sent"):
        list(client.chat_stream("m", "a"))


def test_events_of_errors_have_codes() -> None:
    for found, code in (
        ({"code": 429}, "RESOURCE_EXHAUSTED"), ({"type": "timeout"}, "DEADLINE_EXCEEDED"), ({}, "INTERNAL"),
        ({"type": "server_error", "code": "insufficient_quota"}, "RESOURCE_EXHAUSTED"),
        # what the gateway says of a stream that it cannot bring to its end, or for which there was no replica
        *((json.loads(RefusalError(502, "", code=one).document(""))["error"], "UNAVAILABLE") for one in
          ("stream_broken", "replica_failed", "deadline_exceeded", "busy")),
    ):  # fmt: skip
        assert of_event(found, "").code == getattr(grpc.StatusCode, code)


def test_what_ends_a_call_ends_the_request(gateway: Gateway, client: ClusterClient) -> None:
    ended = threading.Event()

    def endless(one: BaseHTTPRequestHandler) -> None:
        one.send_response(200)
        one.end_headers()
        try:
            while True:
                one.wfile.write(f"data: {json.dumps(chunk('x'))}\n\n".encode())
                time.sleep(0.01)
        except OSError:
            ended.set()

    gateway.answer = endless
    stream = client.chat_stream("m", "a")
    assert next(stream).text == "x"
    stream.close()  # type: ignore[attr-defined]
    assert ended.wait(20), "a cancelled call goes on at the gateway"
    ended.clear()
    with pytest.raises(CallFailed) as caught:
        list(client.chat_stream("m", "a", timeout=0.5))
    assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert ended.wait(20), "a call goes on at the gateway after its deadline"
    assert 0 < float(gateway.asked[-1][1]["sluice-deadline"]) <= 0.5


def test_calls_without_a_token_or_with_two_are_refused_before_the_gateway(gateway: Gateway, running: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        for service, name in ((INFERENCE, "ListModels"), (JOBS, "GetJob")):
            method = next(one for one in methods(service) if one.name == name)
            call = channel.unary_unary(method.path, method.request.SerializeToString, method.reply.FromString)
            request = method.request(**({"job_id": 1} if service == JOBS else {}))
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, caught.value  # type: ignore[attr-defined]
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=[("authorization", "Bearer a"), ("authorization", "Bearer b")])
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value  # type: ignore[attr-defined]
    assert gateway.asked == []


def test_requests_that_cannot_be_made_name_the_field(gateway: Gateway, client: ClusterClient) -> None:
    for call, words in (
        (lambda: client.chat("", "a"), "model: empty"),
        (lambda: client.chat("m", []), "messages: empty"),
        (lambda: client.chat("m", "a", stream=True), "options: stream has a field"),
        (lambda: client.embed("m", []), "input: empty"),
        (lambda: client.chat("m", "a", x=float("nan")), "not a number of JSON"),
    ):
        with pytest.raises(CallFailed, match=words) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert gateway.asked == []


def test_a_message_that_is_too_long_is_refused(gateway: Gateway, running: Running) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{running.port}", options) as channel:
        method = methods(INFERENCE)[1]
        call = channel.unary_unary(method.path, method.request.SerializeToString, method.reply.FromString)
        with pytest.raises(grpc.RpcError) as caught:
            call(pb.ChatRequest(model="x" * (MOST_MESSAGE + 1)), metadata=[("authorization", "Bearer a")])
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert gateway.asked == []


def test_a_gateway_that_is_not_there_is_unavailable_and_health_says_so(gateway: Gateway, running: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving, other = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [health.Check(health_pb2.HealthCheckRequest(service=one)).status for one in ("", INFERENCE, JOBS)] == [
            serving
        ] * 3
        gateway.stop()
        until = time.monotonic() + 30
        while health.Check(health_pb2.HealthCheckRequest(service=INFERENCE)).status != other:
            assert time.monotonic() < until
            time.sleep(0.1)
    with ClusterClient(f"127.0.0.1:{running.port}", token=TOKEN) as client, pytest.raises(CallFailed) as caught:
        client.chat("m", "a")
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE and "sluice gateway running" in str(caught.value)


def test_reflection_names_both_services(running: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        found = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {INFERENCE, JOBS, "grpc.health.v1.Health"} <= set(found)


# ---- TLS ----


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", made, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return made, key


def test_tls_with_a_certificate_that_is_renewed_while_it_runs(gateway: Gateway, tmp_path: Path) -> None:
    gateway.answer = lambda one: gateway.json(one, 200, {"data": []})
    first, key = certificate(tmp_path, "first")
    second, second_key = certificate(tmp_path, "second")
    made, made_key = tmp_path / "made.pem", tmp_path / "made.key"
    made.write_bytes(first.read_bytes())
    made_key.write_bytes(key.read_bytes())
    server = Running(addresses(gateway, certificate=made, key=made_key))
    try:
        address = f"127.0.0.1:{server.port}"
        with ClusterClient(address, token=TOKEN, ca=first) as client:
            assert client.models() == []
        for path, source in ((made_key, second_key), (made, second)):
            new = path.with_suffix(".new")
            new.write_bytes(source.read_bytes())
            new.replace(path)
        with ClusterClient(address, token=TOKEN, ca=second) as client:
            assert client.models() == []
        shown = ssl.get_server_certificate(("127.0.0.1", server.port))
        assert shown.strip() == second.read_text().strip()
        with ClusterClient(address, token=TOKEN, ca=first) as client, pytest.raises(CallFailed) as caught:
            client.models(timeout=3)
        assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    finally:
        server.stop()


# ---- jobs ----

JOB = {
    "id": 17, "array_id": None, "array_tasks": "", "name": "batch", "user": "alice", "account": "physics", "qos": "q",
    "partition": "main", "state": "PENDING", "reason": "Resources", "nodes": "", "node_count": 1, "cpus": 1, "gpus": 1,
    "gpu_mem_mib": 0, "memory_mib": 1, "submit_time": 5, "eligible_time": 5, "start_time": None, "end_time": None,
    "time_limit_s": 60, "priority": 1, "features": "", "dependency": "", "reservation": "", "comment": "",
    "work_dir": "/", "refused": "",
}  # fmt: skip


class Api:
    """A REST API of which a test says what it answers."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.answers: list[httpx.Response] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answers.pop(0)


@pytest.fixture
def api(gateway: Gateway) -> Iterator[tuple[Api, ClusterClient]]:
    made = Api()
    jobs = Jobs("http://127.0.0.1:9", None, "/opt/sluice/bin/sluice-batch", httpx.MockTransport(made))
    server = Running(addresses(gateway), jobs)
    with ClusterClient(f"127.0.0.1:{server.port}", token=TOKEN, timeout=20) as client:
        yield made, client
    server.stop()


def submitted(**words: Any) -> httpx.Response:
    return httpx.Response(201, json={"job_id": 17, "messages": ["said"], **words})


def test_a_job_is_submitted_with_the_callers_own_token(api: tuple[Api, ClusterClient]) -> None:
    made, client = api
    made.answers = [submitted(), submitted()]
    job = client.submit_job(
        model_path="/models/deepseek-7b", input_data=["it's\nSLUICE_BATCH\n", "$HOME `id`"],
        account="physics", key="k-1", gpu_requirements={"gpus": "h100:1", "gpu_mem": "10G"}, max_tokens=9,
        output_path=Path("/home/a/out.jsonl"), time_limit="30",
    )  # fmt: skip
    assert job == 17
    request = made.asked[0]
    assert request.headers["authorization"] == f"Bearer {TOKEN}" and request.headers["idempotency-key"] == "k-1"
    body = json.loads(request.content)
    script = body.pop("script")
    assert body == {
        "name": "batch-deepseek-7b", "gpus": "h100:1", "gpu_mem": "10G", "account": "physics", "time_limit": "30",
        "gpu_spread": False, "hold": False, "exclusive": False,
    }  # fmt: skip
    # What a shell makes of it: the program's standard input is the orders, byte for byte.
    seen = subprocess.run(
        ["sh", "-s"], input=script.replace("/opt/sluice/bin/sluice-batch", "cat"), capture_output=True, text=True,
        check=True, timeout=20,
    ).stdout  # fmt: skip
    orders = json.loads(seen)
    assert orders["prompts"] == ["it's\nSLUICE_BATCH\n", "$HOME `id`"] and orders["sampling"] == {"max_tokens": 9}
    assert (orders["model"], orders["output"]) == ("/models/deepseek-7b", "/home/a/out.jsonl")
    client.submit_job(model_path="/m.gguf", input_data=Path("/in.jsonl"), gpu_requirements="12G")
    body = json.loads(made.asked[1].content)
    assert body["gpu_mem"] == "12G" and '"input":"/in.jsonl"' in body["script"]


def test_jobs_that_cannot_be_are_refused_before_the_api(api: tuple[Api, ClusterClient]) -> None:
    made, client = api
    for words, text in (
        ({"model_path": "m", "input_data": "a"}, "model_path 'm': not an absolute path"),
        ({"model_path": "/m", "input_data": []}, "prompts: empty"),
        ({"model_path": "/m", "input_data": Path("in")}, "input_path 'in': not an absolute"),
        ({"model_path": "/m", "input_data": "x" * (3 << 20)}, "write a file"),
        ({"model_path": "/m", "input_data": "a", "engine": "gpt"}, "engine 'gpt': not known"),
    ):
        with pytest.raises(CallFailed, match=text) as caught:
            client.submit_job(**words)  # type: ignore[arg-type]
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(UsageError, match="memory is not known"):
        client.submit_job(model_path="/m", input_data="a", gpu_requirements={"memory": "1G"})
    with pytest.raises(UsageError, match="top_k: not an option"):
        client.submit_job(model_path="/m", input_data="a", top_k=1)
    with pytest.raises(CallFailed, match="not a job's number"):
        client.job(-1)
    assert made.asked == []
    with pytest.raises(CallError, match="input_data: missing"):
        batch_script(pb.SubmitJobRequest(model_path="/m"), "/p")


def test_jobs_are_read_watched_and_cancelled(api: tuple[Api, ClusterClient]) -> None:
    made, client = api
    ended = JOB | {"state": "COMPLETED", "start_time": 6, "end_time": 9, "nodes": "n1"}
    change = f"event: jobs\ndata: {json.dumps({'key': '17', 'row': ended})}\n\n"
    made.answers = [
        httpx.Response(200, json={"job": JOB, "gpus": []}),
        httpx.Response(200, text=change),
        httpx.Response(200, json={"job": JOB, "gpus": []}),
        httpx.Response(200, json={"job": "17", "did": "cancel", "messages": []}),
    ]
    assert client.job(17).state == "PENDING"
    seen = list(client.watch_job(17))
    assert [(one.state, one.ended) for one in seen] == [("PENDING", False), ("COMPLETED", True)]
    assert (seen[-1].start_time, seen[-1].end_time, seen[-1].nodes) == (6, 9, "n1")
    client.cancel_job(17)
    assert made.asked[-1].url.path == "/api/v1/jobs/17/cancel" and made.asked[-1].headers["idempotency-key"]


def test_errors_of_the_api_have_its_words(api: tuple[Api, ClusterClient]) -> None:
    made, client = api
    problem = {"title": "x", "status": 403, "detail": "token: read only", "remedy": "make one", "request_id": "abc"}
    made.answers = [httpx.Response(403, json=problem)]
    with pytest.raises(CallFailed, match="token: read only; make one") as caught:
        client.submit_job(model_path="/m", input_data="a")
    assert (caught.value.code, caught.value.request_id) == (grpc.StatusCode.PERMISSION_DENIED, "abc")


# ---- the rest ----


def test_structs_keep_whole_numbers_and_bound_their_depth() -> None:
    values = {"a": 1, "b": 1.5, "c": None, "d": [True, "x", {"e": 1 << 40}]}
    found = from_struct(to_struct(values))
    assert found == values and isinstance(found["a"], int) and isinstance(found["d"][2]["e"], int)
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        from_struct(to_struct({"a": deep}))


def test_what_is_generated_is_what_the_description_says() -> None:
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [sys.executable, ROOT / "tools/grpc_reference.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
