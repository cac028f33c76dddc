"""A batch with llama.cpp: every answer exact and once, also when it was killed and began again."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.batches import BatchPlace
from sluice.serve.batch.main import _Port
from sluice.serve.batch.orders import Output, Request, engine_of_model, parse_orders, requests
from sluice.serve.batch.remote import Remote
from sluice.serve.rpc import serve_pb2 as pb
from sluice.serve.rpc.jobs import batch_script
from tests.serve_models import counted, make_model, word

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = "/opt/sluice/bin/sluice-batch"


def orders(**words: Any) -> str:
    given = {"version": 1, "engine": None, "options": [], "sampling": {}, "output": None, **words}
    return json.dumps(given)


def start(text: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "17"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice.serve.batch.main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=folder, env=environment,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_submit_job_writes_is_answered(tmp_path: Path) -> None:
    model = make_model(tmp_path / "counting.gguf", "counting")
    request = pb.SubmitJobRequest(
        model_path=str(model), prompts=pb.Prompts(prompts=[f" {word(3)}", f" {word(40)}"]),
        sampling=pb.Sampling(max_tokens=5), engine_options=["--ctx-size", "4096"],
    )  # fmt: skip
    text = batch_script(request, PROGRAM).splitlines()[2]
    process = start(text, tmp_path)
    said, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    found = {one["custom_id"]: one for one in lines(tmp_path / "sluice-batch-17.jsonl")}
    assert {name: one["response"]["body"]["choices"][0]["text"].strip() for name, one in found.items()} == {
        "request-1": counted(3, 5).strip(), "request-2": counted(40, 5).strip()
    }  # fmt: skip
    assert "2 answers, 0 of them errors" in said


def test_a_batch_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    model = make_model(tmp_path / "counting.gguf", "counting", layers=6, feed=8192)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = []
    for number in range(1, 41):
        message = [{"role": "user", "content": word(number)}]
        body = {"messages": message, "max_tokens": 20, "temperature": 0}
        asked.append({"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    source.write_text("".join(json.dumps(one) + "\n" for one in asked))
    text = orders(model=str(model), input=str(source), output=str(output), options=["--ctx-size", "16384"])
    process = start(text, tmp_path)
    until = time.monotonic() + 90
    while not output.exists() or output.read_bytes().count(b"\n") < 10:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = output.read_bytes().count(b"\n")
    assert before < 40
    with output.open("ab") as file:
        file.write(b'{"custom_id":"n40","resp')  # as a write that was cut
    process = start(text, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = lines(output)
    assert sorted(one["custom_id"] for one in found) == sorted(f"n{number}" for number in range(1, 41))
    for one in found:
        said = one["response"]["body"]["choices"][0]["message"]["content"]
        assert said.strip() == counted(int(one["custom_id"][1:]), 20).strip()


def test_errors_are_in_the_file_and_in_the_status(tmp_path: Path) -> None:
    model = make_model(tmp_path / "counting.gguf", "counting")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        json.dumps({"prompt": f" {word(1)}", "max_tokens": 2}) + "\n" + json.dumps({"messages": 5}) + "\n"
    )
    process = start(orders(model=str(model), input=str(source), output=str(output)), tmp_path)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    found = {one["custom_id"]: one for one in lines(output)}
    assert found["request-1"]["response"]["status_code"] == 200 and found["request-1"]["error"] is None
    assert found["request-2"]["response"]["status_code"] >= 400 and found["request-2"]["error"]["message"]


def test_an_engine_that_does_not_start_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUFno")
    process = start(orders(model=str(broken), prompts=["a"]), tmp_path)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1 and "ended before it was ready" in errors


def test_orders_and_inputs_that_are_wrong_name_the_place(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    source = tmp_path / "in"
    for text, words in (
        ("{", "orders"), (orders(model=str(gguf)), "orders"), (orders(model="/none.gguf", prompts=["a"]), "not there"),
        (orders(model=str(gguf), prompts=["a"], engine="x"), "engine 'x'"),
        (json.dumps({"version": 2}), "version 2"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            parse_orders(text, "1")
    for line, words in (
        ("{", "in:1: not JSON"), ("[]", "in:1: not an object"), ('{"a":1}', "in:1: no request"),
        ('{"url":"/x","body":{}}', "in:1: url"), ('{"prompt":"a","stream":true}', "in:1: stream"),
    ):  # fmt: skip
        source.write_text(line)
        with pytest.raises(UsageError, match=words):
            list(requests(parse_orders(orders(model=str(gguf), input=str(source)), "1")))
    with pytest.raises(UsageError, match="No such file"):
        list(requests(parse_orders(orders(model=str(gguf), input=str(tmp_path / "none")), "1")))


def test_a_full_disk_leaves_whole_lines_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, write, room = Output(tmp_path / "out"), os.write, [1 << 20]
    made.write(Request("a", "/v1/completions", {}), 200, {"x": 1})

    def limited(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        done = write(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    room[0] = 150
    with pytest.raises(SluiceError, match="No space left.*make room"):
        made.write(Request("b", "/v1/completions", {}), 200, {"x": "y" * 1000})
    room[0] = 1 << 20
    made.write(Request("c", "/v1/completions", {}), 200, {"x": 1})  # of another thread, when there is room again
    assert Output(tmp_path / "out").done == {"a", "c"}


def test_a_port_that_somebody_else_has_taken_gets_neither_key_nor_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _Port("127.0.0.1", port).connect()
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
        with pytest.raises(ConnectionRefusedError):
            _Port("127.0.0.1", port).request("POST", "/", "prompt")


def test_engines_by_the_models_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert engine_of_model(tmp_path) == "vllm"
    (tmp_path / "a.gguf").touch()
    assert engine_of_model(tmp_path) == engine_of_model(tmp_path / "a.gguf") == "llama.cpp"
    (tmp_path / "b").touch()
    with pytest.raises(UsageError, match="neither"):
        engine_of_model(tmp_path / "b")


def test_an_output_that_has_something_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("my work\n")
    with pytest.raises(UsageError, match="no answers"):
        Output(other)
    assert other.read_text() == "my work\n"
    with pytest.raises(SluiceError, match="cannot|Is a directory|directory"):
        Output(tmp_path)
    made = Output(tmp_path / "new")
    made.write(Request("a", "/v1/completions", {}), 500, {}, "broken")
    assert Output(tmp_path / "new").done == set(), "what failed is asked again"


@contextmanager
def tls_gateway(pem: Path) -> Iterator[tuple[str, list[str]]]:
    """One that has nothing to do; its address, and the secrets that it was sent."""
    secrets: list[str] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            secrets.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            answer = b'{"do": "go on", "at": null, "requests": []}'
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    key, certificate = pem.with_suffix(".key"), pem
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}", secrets
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_job_tells_its_secret_to_gateways_with_the_sites_certificate_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tls_gateway(tmp_path / "other.pem") as (other, stolen), tls_gateway(tmp_path / "site.pem") as (site, told):
        job = Remote(BatchPlace((other, site), str(tmp_path / "site.pem"), "/batch", "s3cret"), 1)
        job.look()  # the first one has another certificate
        assert (stolen, told) == ([], []) and "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out
        job.look()
        assert (stolen, told) == ([], ["Bearer s3cret"]) and job.take() is None
