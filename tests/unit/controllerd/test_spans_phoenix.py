"""Spans at a receiver that people run: Arize Phoenix, from PyPI; under `make soak`, as it is 850 MB."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policy.traces import NodeTraces
from sluice.controllerd.spans.job_spans import JobLife, spans_of
from sluice.controllerd.spans.otlp import Receiver
from sluice.controllerd.spans.span import Span
from tests.unit.controllerd.test_job_spans import JOB, RECORD, row

PACKAGE = "arize-phoenix==20.26.1"
START_S, ARRIVAL_S = 300.0, 60.0

pytestmark = pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="installs 850 MB: make soak")


@dataclass(frozen=True)
class Phoenix:
    http: str
    grpc: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.http + path, timeout=10) as answer:
            return json.load(answer)

    def spans(self) -> dict[str, dict[str, Any]]:
        """What it has, by ID."""
        found = self.get("/v1/projects/default/spans?limit=1000")["data"]
        spans = {span["context"]["span_id"]: span for span in found}
        assert len(spans) == len(found)
        return spans


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    folder = tmp_path_factory.mktemp("phoenix")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", PACKAGE], check=True)
    http, grpc = free_port(), free_port()
    places = {"PHOENIX_WORKING_DIR": folder, "PHOENIX_PORT": http, "PHOENIX_GRPC_PORT": grpc}
    environment = os.environ | {name: str(value) for name, value in places.items()} | {"PHOENIX_HOST": "127.0.0.1"}
    found = Phoenix(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}")
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([folder / "venv/bin/phoenix", "serve"], env=environment, stdout=log, stderr=log)
    try:
        wait_for(found, server, folder / "log")
        yield found
    finally:
        server.terminate()
        server.wait(60)


def wait_for(phoenix: Phoenix, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            phoenix.get("/v1/projects")
            return
        except (OSError, urllib.error.URLError):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)


def test_what_is_sent_twice_over_both_protocols_is_there_once(phoenix: Phoenix) -> None:
    steps = [row(label="17.batch"), row(label="17.0", state="FAILED", start=1200)]
    sent = {span.id: span for span in spans_of(JobLife("main", [JOB], steps, [RECORD]))}
    lines = b"".join(span.to_line() for span in sent.values())
    for endpoint, protocol in ((phoenix.http, "http"), (phoenix.grpc, "grpc")):
        settings = NodeTraces.model_validate(
            {"endpoint": endpoint, "protocol": protocol, "headers_file": "/nonexistent/headers"}
        )
        Receiver(settings).write(lines)
    deadline = time.monotonic() + ARRIVAL_S
    while set(found := phoenix.spans()) != set(sent):
        assert time.monotonic() < deadline, (set(found), set(sent))
        time.sleep(0.5)
    for number, span in sent.items():
        check(span, found[number])


def check(sent: Span, found: dict[str, Any]) -> None:
    """A span is there as it was sent."""
    assert (found["name"], found["context"]["trace_id"], found["parent_id"] or "") == (
        sent.name, sent.trace, sent.parent,
    )  # fmt: skip
    assert found["status_code"] == ("ERROR" if sent.error else "UNSET")
    assert found["attributes"].items() >= sent.attributes.items()
    assert [event["name"] for event in found["events"]] == [event.name for event in sent.events]
