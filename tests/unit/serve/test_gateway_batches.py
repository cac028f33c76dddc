"""Files and batches as the `openai` package uses them; the batches' jobs are real ones, but for Slurm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import openai
import pytest

from policy.service_jobs import BatchPolicy, ServicePolicy, ServicesPolicy
from sluice.base.tokens import TokenStore
from sluice.client import ApiError, models
from sluice.exchange.requests import RequestRecord
from sluice.exchange.serving import AccountRow, Limit, LimitRow
from sluice.serve.batch.lines import MOST_LINES, Lines
from sluice.serve.gateway import batch_state, stored
from sluice.serve.gateway import shelf as shelf_module
from sluice.serve.gateway.batch_state import Asked, Batches
from sluice.serve.gateway.keys import Keys
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.shelf import Incoming, Owner, Shelf
from tests.unit.serve.gateway_bed import Bed, bed, identity_provider, run, service_row

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "tests/integration/small_engine.py"
MIB = 1 << 20


def line(number: int, **changed: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": f"word {number}"}], **changed.pop("body", {})}
    words = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body, **changed}
    return json.dumps(words).encode() + b"\n"


def lines(count: int) -> bytes:
    return b"".join(map(line, range(1, count + 1)))


class Cluster:
    """The REST API and Slurm, as far as batches see them: jobs are processes of this host."""

    def __init__(self) -> None:
        self.jobs: dict[int, dict[str, Any]] = {}
        self.keys: dict[str, int] = {}
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.states: dict[int, str] = {}
        self.error: ApiError | None = None
        self.starts = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def _refuse(self) -> None:
        if self.error is not None:
            raise self.error

    async def submit(self, *, key: str, **fields: Any) -> models.Submitted:
        self._refuse()
        models.JobRequest(**fields)
        if key not in self.keys:
            number = self.keys[key] = 100 + len(self.keys)
            self.jobs[number] = fields
            if self.starts:
                self.start(number)
        return models.Submitted(schema_version=1, job_id=self.keys[key], messages=[])

    def start(self, number: int) -> None:
        """Also again, as a requeue does."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": str(number)}
        process = subprocess.Popen(["sh", "-s"], stdin=subprocess.PIPE, env=environment, process_group=0)
        assert process.stdin is not None
        process.stdin.write(self.jobs[number]["script"].encode())
        process.stdin.close()
        self.running[number] = process

    async def job(self, number: int) -> Any:
        self._refuse()
        process = self.running.get(number)
        state = self.states.get(number)
        if state is None:
            state = "PENDING" if process is None else "RUNNING" if process.poll() is None else "FAILED"

        class Page:
            class job:  # noqa: N801
                pass

        Page.job.state = state  # type: ignore[attr-defined]
        return Page

    async def cancel(self, number: int) -> None:
        self._refuse()
        self.states[number] = "CANCELLED"
        if number in self.running:
            self.running[number].terminate()

    def end(self, number: int) -> None:
        process = self.running.get(number)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def close(self) -> None:
        for number in self.running:
            self.end(number)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    one = Cluster()
    monkeypatch.setattr(stored, "AsyncClient", lambda *_, **__: one)
    monkeypatch.setattr(stored, "_LOOK_S", 0.0)
    monkeypatch.setattr(stored, "_SILENT_S", 0.5)
    yield one
    one.close()


def write_policy(folder: Path, port: int, *, delay: float = 0.0, quota: int = 100, slots: int = 4) -> None:
    program = folder / "sluice-batch"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -P -m sluice.serve.batch.main\n")
    program.chmod(0o755)
    batches = BatchPolicy(
        gateways=(f"http://127.0.0.1:{port}",), api="http://127.0.0.1:9", folder=str(folder / "files"), quota=quota,
        keep=86_400, nice=1000, program=str(program),
    )  # fmt: skip
    command = (sys.executable, str(ENGINE), "{socket}", "{service}", str(delay))
    service = ServicePolicy(
        name="m", tenant="physics", user="alice", engine="openai", command=command, health="/v1/models", slots=slots
    )
    other = service.model_copy(update={"name": "wide", "nodes": 2})
    policy = ServicesPolicy(services={"m": service, "wide": other}, batches=batches)
    (folder / "services.json").write_text(policy.render())


def client_of(one: Bed, key: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=one.url, api_key=key or one.key, max_retries=0)


def key_of(one: Bed, user: str) -> str:
    return TokenStore(one.store.path).create(user, ["serve"], now=time.time(), seconds=3600)[1]


def with_bed(folder: Path, work: Callable[[Bed, openai.OpenAI], None], **policy: Any) -> None:
    """`work` runs in a thread, next to a gateway that knows mallory of chemistry and bob of physics, too."""

    async def all_() -> None:
        async with bed(folder, services=None, services_file=str(folder / "services.json")) as one:
            one.accounts += [AccountRow("mallory", ("chemistry",)), AccountRow("bob", ("physics",))]
            one.publish()
            write_policy(folder, one.port, **policy)
            await asyncio.to_thread(work, one, client_of(one))

    run(all_())


def batch_of(client: openai.OpenAI, data: bytes, window: Any = "24h", **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window=window, **more
    )


def wait(client: openai.OpenAI, name: str, *states: str) -> Any:
    end = time.monotonic() + 90
    while (found := client.batches.retrieve(name)).status not in states:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def rows(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    found = [json.loads(one) for one in client.files.content(file).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "a line is there twice"
    return {one["custom_id"]: one for one in found}


def billed(one: Bed) -> list[RequestRecord]:
    return [record for record in one.records() if record.endpoint == "/v1/batches"]


def test_from_an_upload_to_the_answers(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        data = lines(70) + b"\n" + line(71).rstrip()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (len(data), "in.jsonl", "batch", "file")
        assert client.files.content(file.id).content == data
        assert client.files.retrieve(file.id) == file and [row.id for row in client.files.list()] == [file.id]
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "test"}
        )
        assert (batch.status, batch.metadata) == ("in_progress", {"for": "test"})
        client.files.delete(file.id)  # the batch has what it needs
        done = wait(client, batch.id, "completed")
        assert done.request_counts is not None and done.request_counts.model_dump() == {
            "total": 71, "completed": 71, "failed": 0
        }  # fmt: skip
        assert done.error_file_id is None and done.usage is not None and done.usage.total_tokens == 71 * 4
        found = rows(client, done.output_file_id)
        assert {name: row["response"]["body"]["choices"][0]["message"]["content"] for name, row in found.items()} == {
            f"r{number}": f"word {number}" for number in range(1, 72)
        }  # fmt: skip
        (job,) = cluster.jobs.values()
        wanted = ("sluice-batch.m", "physics", 1000, True, batch.id)
        assert tuple(job[name] for name in ("name", "account", "nice", "requeue", "comment")) == wanted
        made = billed(one)
        assert len(made) == 71 == len({record.id for record in made}) and {record.job for record in made} == {100}
        assert {(record.tenant, record.user, record.service, record.prompt_tokens) for record in made} == {
            ("physics", "alice", "m", 3)
        }  # fmt: skip
        counts = one.worker.metrics.counts
        assert counts["batch_requests", "m", "ok"] == 71 and counts["batch_prompt_tokens", "m", ""] == 3 * 71
        assert counts["batch_completion_tokens", "m", ""] == 71
        second = batch_of(client, lines(1))
        assert [row.id for row in client.batches.list(limit=1)] == [second.id, batch.id]
        _nobody_else(one, done)
        assert client.files.delete(done.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(done.output_file_id)

    with_bed(tmp_path, work)


def _nobody_else(one: Bed, batch: Any) -> None:
    """What is another's and what is not there are one answer."""
    for user in ("mallory", "bob"):
        client = client_of(one, key_of(one, user))
        assert not list(client.files.list()) and not list(client.batches.list())
        asks: list[tuple[str, Callable[[str], Any]]] = [
            (batch.output_file_id, client.files.retrieve), (batch.output_file_id, client.files.content),
            (batch.output_file_id, client.files.delete), (batch.id, client.batches.retrieve),
            (batch.id, client.batches.cancel),
        ]  # fmt: skip
        for name, ask in asks:
            said = []
            for tried in (name, name[:-1] + ("0" if name[-1] != "0" else "1"), name.replace("_", "-")[:20]):
                with pytest.raises(openai.NotFoundError) as caught:
                    ask(tried)
                said.append(caught.value.message.replace(tried, "ID"))
            assert len(set(said)) == 1
        with pytest.raises(openai.NotFoundError):
            client.batches.create(
                input_file_id=batch.output_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )


def test_a_job_that_is_killed_goes_on_at_the_first_line_without_a_result(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        batch = batch_of(client, lines(60))
        while client.batches.retrieve(batch.id).request_counts.completed < 10:  # type: ignore[union-attr]
            time.sleep(0.05)
        cluster.end(100)
        before = client.batches.retrieve(batch.id).request_counts.completed  # type: ignore[union-attr]
        assert before < 60
        cluster.start(100)  # as Slurm does with a job that it has requeued
        done = wait(client, batch.id, "completed")
        assert sorted(rows(client, done.output_file_id)) == sorted(f"r{number}" for number in range(1, 61))
        assert len({record.id for record in billed(one)}) == 60 and len(billed(one)) == 60
        assert len(cluster.jobs) == 1

    with_bed(tmp_path, work, delay=0.15)


def test_a_job_whose_time_is_over_sends_what_it_has_and_is_queued_again(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {said}\nkill -9 $PPID\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def work(one: Bed, client: openai.OpenAI) -> None:
        services = tmp_path / "services.json"
        services.write_text(services.read_text().replace('"gateways": [', '"gateways": ["http://127.0.0.1:1",'))
        batch = batch_of(client, lines(40))
        while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            time.sleep(0.05)
        cluster.running[100].terminate()
        cluster.running[100].wait(30)
        assert said.read_text() == "requeue 100\n"
        before = len(billed(one))
        assert before == client.batches.retrieve(batch.id).request_counts.completed < 40  # type: ignore[union-attr]
        cluster.start(100)
        assert len(rows(client, wait(client, batch.id, "completed").output_file_id)) == 40 == len(billed(one))

    with_bed(tmp_path, work, delay=0.2)


def test_the_end_of_a_job_is_followed_by_another_one_or_by_the_batchs(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        cluster.starts = False
        batch = batch_of(client, lines(3))
        for number, state in ((100, "PREEMPTED"), (101, "TIMEOUT"), (102, "NODE_FAIL")):
            cluster.states[number] = state
            time.sleep(0.6)  # longer than it may be silent
            assert client.batches.retrieve(batch.id).status == "in_progress"
        assert len(cluster.jobs) == 4
        cluster.states[103] = "TIMEOUT"
        done = wait(client, batch.id, "failed")
        assert "job 103: TIMEOUT" in done.errors.data[0].message
        assert {row["error"]["code"] for row in rows(client, done.error_file_id).values()} == {"job_ended"}
        assert done.request_counts.failed == 3 and not billed(one)

    with_bed(tmp_path, work)


def test_cancelled_with_what_was_done(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        batch = batch_of(client, lines(60))
        while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            time.sleep(0.05)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = wait(client, batch.id, "cancelled")
        good, bad = rows(client, done.output_file_id), rows(client, done.error_file_id)
        assert 0 < len(good) < 60 and len(good) + len(bad) == 60 and not set(good) & set(bad)
        assert {row["error"]["code"] for row in bad.values()} == {"batch_cancelled"}
        assert len(billed(one)) == len(good)
        assert client.batches.cancel(batch.id).status == "cancelled"

    with_bed(tmp_path, work, delay=0.2)


def test_a_batch_whose_window_is_over_has_what_was_done(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        batch = batch_of(client, lines(60), "1h")
        while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            time.sleep(0.05)
        (path,) = (tmp_path / "files").glob("physics/alice/batches/*/batch.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": int(time.time()) - 1}))
        done = wait(client, batch.id, "expired")
        good, bad = rows(client, done.output_file_id), rows(client, done.error_file_id)
        assert good and len(good) + len(bad) == 60
        assert {row["error"]["code"] for row in bad.values()} == {"batch_expired"}

    with_bed(tmp_path, work, delay=0.2)


def test_an_engine_that_does_not_start_fails_its_batch(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        services = tmp_path / "services.json"
        services.write_text(services.read_text().replace(str(ENGINE), "/nowhere.py"))
        done = wait(client, batch_of(client, lines(2)).id, "failed")
        assert done.errors.data[0].code == "engine_failed" and "nowhere" in done.errors.data[0].message

    with_bed(tmp_path, work)


def test_what_the_rest_api_says_of_a_job(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        cluster.error = ApiError(403, "not for 'write'", where="POST /jobs")
        with pytest.raises(openai.PermissionDeniedError, match="--scope write"):
            batch_of(client, lines(1))
        cluster.error = ApiError(422, "Job violates accounting/QOS policy", where="POST /jobs")
        with pytest.raises(openai.BadRequestError, match="violates"):
            batch_of(client, lines(1))
        assert not list(client.batches.list())
        cluster.error = ApiError(0, "no answer", where="POST /jobs")
        batch = batch_of(client, lines(1))
        assert batch.status == "validating" and not cluster.jobs
        cluster.error = None
        wait(client, batch.id, "completed")
        again = [
            batch_of(client, lines(1), extra_headers={"Idempotency-Key": "k"}).id for _ in range(2)
        ]  # fmt: skip
        assert again[0] == again[1] and len(cluster.jobs) == 2

    with_bed(tmp_path, work)


WRONG: list[tuple[bytes, str, int | None]] = [
    (line(1) + b"{\n" + line(2), "invalid_json_line", 2),
    (line(1) + b"[1]\n", "invalid_json_line", 2),
    (line(1) + b'{"a":' + b"[" * 100_000 + b"\n", "invalid_json_line", 2),
    (line(1) + line(2, custom_id=""), "missing_required_parameter", 2),
    (line(1) + line(2) + line(1), "duplicate_custom_id", 3),
    (line(1, method="GET"), "invalid_method", 1),
    (line(1, url="/v1/models"), "invalid_url", 1),
    (line(1) + line(2, url="/v1/embeddings"), "mismatched_url", 2),
    (line(1, url="/v1/completions"), "mismatched_url", 1),
    (line(1, body={"model": ""}), "missing_required_parameter", 1),
    (line(1) + line(2, body={"model": "other"}), "mismatched_model", 2),
    (line(1, body={"model": "none"}), "model_not_found", 1),
    (line(1, body={"model": "wide"}), "unusable_model", 1),
    (line(1, body={"model": "paused"}), "unusable_model", 1),
    (line(1) + line(2, body={"stream": True}), "invalid_request", 2),
    (line(1) + line(2, body={"x": "y" * (4 * MIB)}), "too_long", 2),
    (b"\n\n", "empty_file", None),
    (line(1) + b"\n" * MOST_LINES, "too_many_tasks", MOST_LINES + 1),
]


def test_wrong_lines_fail_the_batch_with_their_number(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        one.services |= {"wide": service_row("wide"), "paused": service_row("paused", paused=True)}
        one.worker.loop.call_soon_threadsafe(one.publish)
        for data, code, number in WRONG:
            batch = batch_of(client, data)
            assert batch.status == "failed" and batch.failed_at and not cluster.jobs
            assert batch.errors is not None and batch.errors.data is not None
            assert [(found.code, found.line) for found in batch.errors.data] == [(code, number)]
            assert batch.errors.data[0].message

    with_bed(tmp_path, work)


def test_files_that_are_too_large_and_tenants_that_have_too_much(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MOST_FILE", 2 * MIB)

    def work(one: Bed, client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match="more than") as caught:
            client.files.create(file=("big", b"x" * (8 * MIB)), purpose="batch")
        assert caught.value.status_code == 413
        client.files.create(file=("a", b"x" * (MIB + MIB // 2)), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="bytes of"):
            client.files.create(file=("b", b"x" * (MIB + MIB // 2)), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError, match="bytes of"):  # bob's are his tenant's, too
            client_of(one, key_of(one, "bob")).files.create(file=("b", b"x" * MIB), purpose="batch")
        client_of(one, key_of(one, "mallory")).files.create(file=("b", b"x" * MIB), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("c", b"x"), purpose="fine-tune")
        kept = [path.name for path in (tmp_path / "files").glob("physics/*/files/*")]
        assert len(kept) == 2, "what was refused left something"
        assert one.worker.stored.uploads == {}

    with_bed(tmp_path, work, quota=2)


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def work(one: Bed, client: openai.OpenAI) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shelf_module, "write_all", no_room)
            with pytest.raises(openai.InternalServerError, match="disk is full") as caught:
                client.files.create(file=("a", lines(3)), purpose="batch")
            assert caught.value.status_code == 507
        assert not list(client.files.list()) and client.files.create(file=("a", lines(3)), purpose="batch").id
        (tmp_path / "files").chmod(0o755)
        (tmp_path / "services.json").write_text((tmp_path / "services.json").read_text().replace("1000,", "999,"))
        with pytest.raises(openai.InternalServerError, match="others could read them"):
            client.files.list()

    with_bed(tmp_path, work)


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nX\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (FORM, 200),
        (FORM[:-6], 400),
        (b"X" + FORM, 400),
        (FORM.replace(b'; name="file"', b""), 400),
        (FORM.replace(b'name="file"', b'name="purpose"'), 400),
        (FORM.replace(b'name="file"', b'name="other"'), 400),
        (FORM.replace(b"batch", b"b" * 2000), 400),
        (FORM.replace(b"--b--", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nY\r\n--b--'), 400),
        (FORM.replace(b"filename", b"x: " + b"y" * 9000 + b"filename"), 400),
        (b"", 400),
    ],
)
def test_forms_that_are_none_are_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async def work() -> None:
        async with bed(tmp_path, services_file=str(tmp_path / "services.json")) as one:
            write_policy(tmp_path, one.port)
            answer = await one.ask(body, "/v1/files", content_type="multipart/form-data; boundary=b")
            assert answer.status == status, answer.body
            assert not list((tmp_path / "files").glob("*/*/files/.*"))

    run(work())


def test_uploads_wait_for_the_disk_and_end_with_their_client(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, slow = Incoming.write, [True]

    def slowly(self: Incoming, data: bytes) -> None:
        while slow[0]:
            time.sleep(0.01)
        write(self, data)

    monkeypatch.setattr(Incoming, "write", slowly)

    async def work() -> None:
        async with bed(tmp_path, services_file=str(tmp_path / "services.json")) as one:
            write_policy(tmp_path, one.port)
            head = (
                b"POST /v1/files HTTP/1.1\r\nhost: g\r\nauthorization: Bearer " + one.key.encode() + b"\r\n"
                b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 20000000\r\n\r\n" + FORM[:-9]
            )
            writers = []
            for _ in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(head)
                writers.append(writer)
            await _until(lambda: len(one.worker.stored.uploads) == 4)
            (first, *_) = one.worker.stored.uploads
            for _ in range(200):
                writers[0].write(b"y" * 65536)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writers[0].drain(), 1)
            assert max(len(upload._waiting) for upload in one.worker.stored.uploads) < 3 * MIB
            assert (await one.ask(FORM, "/v1/files", content_type="multipart/form-data; boundary=b")).status == 429
            for writer in writers:
                writer.transport.abort()
            slow[0] = False
            await _until(lambda: not one.worker.stored.uploads)
            await _until(lambda: not list((tmp_path / "files").glob("*/*/files/.*")))
            assert first.task.cancelled()

    run(work())


async def _until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not seen():
            await asyncio.sleep(0.01)


def test_only_its_job_may_ask_for_a_batch(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        cluster.starts = False
        batch = batch_of(client, lines(2))
        orders = json.loads(cluster.jobs[100]["script"].splitlines()[2])
        path, secret = orders["batch"]["path"], orders["batch"]["secret"]

        def ask(path: str, secret: str, **said: Any) -> Any:
            coming = one.ask(said, path, authorization=f"Bearer {secret}")
            return asyncio.run_coroutine_threadsafe(coming, one.worker.loop).result(20)

        assert ask(path, one.key).status == 401 and ask(path, "0" * 64).status == 401
        assert ask(path.replace("alice", "bob"), secret).status == 401
        head = one.request(b"", path, authorization=f"Bearer {one.key}", content_length=str(30 * MIB))
        sent = asyncio.run_coroutine_threadsafe(one.send(head), one.worker.loop)
        assert b" 401 " in sent.result(20) and not one.worker.held, "no body is taken without the secret"
        for _ in range(40):
            assert ask(path, "0" * 64).status in (401, 429)  # a neighbour on its node; what follows is served
        assert client.files.list().data and ask(path.replace("/batch/", "/v1/files/"), secret).status == 404
        found = ask(path, secret, at=None).document
        assert [number for number, _ in found["requests"]] == [1, 2] and found["at"] is None
        for wrong in (
            [[3, "x", 200, {}]],
            [[0, "x", 200, {}]],
            [[1, "x", "200", {}]],
            [[1]],
            5,
            [[1, "x", 200, {}]] * 257,
        ):
            assert ask(path, secret, results=wrong).status == 400
        for wrong in ("x", [1], [-1, 0], ["a", 0], {}):
            assert ask(path, secret, at=wrong).status == 400
        results = [[1, "r1", 200, {"x": "y" * 40}], [2, "r2", 0, "no answer"], [1, "r1", 200, {}]]
        assert ask(path, secret, results=results).document == {"do": "stop"}
        assert ask(path, secret, results=results).document == {"do": "stop"}
        done = client.batches.retrieve(batch.id)
        assert (done.status, len(billed(one))) == ("completed", 2)
        assert billed(one)[0].completion_tokens == 12, "without a usage, by its length"
        assert rows(client, done.error_file_id)["r2"]["response"] is None

    with_bed(tmp_path, work)


def test_jobs_find_a_gateway_that_was_just_started_and_a_folder_that_was_just_named(
    tmp_path: Path, cluster: Cluster
) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        def ask_job(number: int) -> int:
            orders = json.loads(cluster.jobs[number]["script"].splitlines()[2])["batch"]
            coming = one.ask({}, orders["path"], authorization=f"Bearer {orders['secret']}")
            return asyncio.run_coroutine_threadsafe(coming, one.worker.loop).result(20).status

        def ask_again(number: int) -> int:
            end = time.monotonic() + 20
            while (status := ask_job(number)) == 503 and time.monotonic() < end:
                time.sleep(0.1)
            return status

        cluster.starts = False
        batch_of(client, lines(2))
        known, one.worker.stored = one.worker.stored, stored.Stored(
            one.worker, tmp_path / "services.json", one.records_folder
        )  # fmt: skip
        assert ask_job(100) == 503 and ask_again(100) == 200
        services = tmp_path / "services.json"
        services.write_text(services.read_text().replace(f'"{tmp_path}/files"', f'"{tmp_path}/more"'))
        one.worker.stored, fresh = known, one.worker.stored  # `fresh` has not heard of the other folder
        batch_of(client, lines(2))
        time.sleep(1.1)
        one.worker.stored = fresh
        assert ask_job(101) == 503 and ask_again(101) == 200

    with_bed(tmp_path, work)


def test_one_user_does_not_take_all_threads(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, files = threading.Event(), Shelf.files
    monkeypatch.setattr(stored, "_CALLS_OF_USER", 2)

    def slowly(self: Shelf, owner: Owner) -> list[dict[str, Any]]:
        if owner == ALICE:
            go_on.wait(60)
        return files(self, owner)

    monkeypatch.setattr(Shelf, "files", slowly)

    def work(one: Bed, client: openai.OpenAI) -> None:
        head = f"GET /v1/files HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {one.key}\r\n\r\n".encode()
        try:
            for _ in range(2):  # clients that leave do not give back what still works for them
                with socket.create_connection(("127.0.0.1", one.port)) as connection:
                    connection.sendall(head)
                    time.sleep(0.3)
            with pytest.raises(openai.RateLimitError, match="at once"):
                client.files.list()
            assert not client_of(one, key_of(one, "bob")).files.list().data
        finally:
            go_on.set()
        end = time.monotonic() + 20
        while one.worker.stored.calls and time.monotonic() < end:
            time.sleep(0.01)
        assert not client.files.list().data

    with_bed(tmp_path, work)


def test_uploads_with_identity_tokens_count_by_their_user(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, token = identity_provider()

    async def work() -> None:
        async with bed(tmp_path, services_file=str(tmp_path / "services.json")) as one:
            write_policy(tmp_path, one.port)
            one.worker.keys = Keys(one.store, provider)
            kind = "multipart/form-data; boundary=b"
            made = await one.ask(FORM, "/v1/files", content_type=kind, authorization=f"Bearer {token()}")
            assert (made.status, made.document["filename"]) == (200, "a")
            assert [path.suffix for path in (tmp_path / "files/physics/alice/files").iterdir()].count(".data") == 1
            wrong = await one.ask(FORM, "/v1/files", content_type=kind, authorization=f"Bearer {token(aud='x')}")
            assert wrong.status == 401 and not one.worker.stored.uploads
            for number in range(4):
                proof = f"Bearer {token(sub=str(number))}"
                head = one.request(b"", "/v1/files", content_type=kind, content_length="1000", authorization=proof)
                _, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(head)
            await _until(lambda: list(one.worker.stored.uploads.values()) == ["alice"] * 4)
            more = await one.ask(FORM, "/v1/files", content_type=kind, authorization=f"Bearer {token(sub='x')}")
            assert more.status == 429 and len(one.worker.stored.uploads) == 4

    run(work())


def test_a_tenant_without_tokens_gets_no_more_answers(tmp_path: Path, cluster: Cluster) -> None:
    def work(one: Bed, client: openai.OpenAI) -> None:
        batch = batch_of(client, lines(60))
        while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
            time.sleep(0.05)
        one.limits = [LimitRow("tenant", "physics", Limit(), tokens_left=0)]
        one.worker.loop.call_soon_threadsafe(one.publish)
        done = wait(client, batch.id, "failed")
        assert done.errors.data[0].code == "insufficient_quota" and done.output_file_id
        with pytest.raises(openai.RateLimitError, match="has used its tokens"):
            batch_of(client, lines(1))

    with_bed(tmp_path, work, delay=0.2)


def test_without_a_folder_in_the_policy_there_are_none(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, services_file=str(tmp_path / "none")) as one:
            for ask in (client_of(one).files.list, client_of(one).batches.list):
                with pytest.raises(openai.NotFoundError, match="serving.batches"):
                    await asyncio.to_thread(ask)
            answer = await one.ask(FORM, "/v1/files", content_type="multipart/form-data; boundary=b")
            assert answer.status == 404

    run(work())


def test_a_gateway_that_has_heard_of_nobody_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, publish=False, services_file=str(tmp_path / "services.json")) as one:
            write_policy(tmp_path, one.port)
            for ask in (client_of(one).files.list, client_of(one).batches.list):
                with pytest.raises(openai.InternalServerError, match="not heard of its services"):
                    await asyncio.to_thread(ask)

    run(work())


# ---- on disk ----

ALICE = Owner("physics", "alice")


def batch_on_disk(folder: Path, count: int, *, window_s: int = 3600) -> tuple[Batches, str]:
    shelf = Shelf(folder, 100 * MIB, 86_400.0)
    incoming = shelf.begin(ALICE, MIB)
    incoming.write(lines(count))
    file = incoming.done("in", time.time() + 3600)
    incoming.drop()
    batches = Batches(shelf)
    asked = Asked(file["id"], "/v1/chat/completions", window_s, "1h", "m", None, "key", [])
    return batches, str(batches.create(ALICE, asked)["id"])


def test_two_gateways_and_what_dies_in_the_middle_double_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, name = batch_on_disk(tmp_path, 6)
    second = Batches(Shelf(tmp_path, 100 * MIB, 86_400.0))
    bills: list[str] = []

    def say(gateway: Batches, *numbers: int) -> dict[str, Any]:
        results = [[number, f"r{number}", 200, {"from": id(gateway)}] for number in numbers]
        said = {"results": results, "at": None}
        return gateway.exchange(ALICE, name, said, lambda one: bills.append(one.id), has_budget=True)

    say(first, 1, 2)
    assert [number for number, _ in say(second, 2, 3)["requests"]] == [4, 5, 6]
    (path,) = tmp_path.glob("physics/alice/batches/*")
    for broken in ("output", "index"):
        append = os.fdatasync

        def dies(descriptor: int) -> None:
            if Path(f"/proc/self/fd/{descriptor}").readlink().name == broken:  # noqa: B023
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 7)
                raise OSError(28, "No space left on device")
            append(descriptor)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", dies)
            with pytest.raises(OSError, match="No space"):
                say(first, 4)
    with pytest.raises(ZeroDivisionError):
        first.exchange(ALICE, name, {"results": [[4, "r4", 200, {}]]}, lambda _: 1 // 0 and None, has_budget=True)
    say(second, 4, 5)
    say(first, 5, 6)
    found = [json.loads(one) for one in next(tmp_path.glob("physics/alice/files/*.data")).read_bytes().splitlines()]
    document = first.read(ALICE, name)
    (output,) = (tmp_path / "physics/alice/files").glob(f"{document['output_file_id']}.data")
    found = [json.loads(one) for one in output.read_bytes().splitlines()]
    assert [one["custom_id"] for one in found] == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert len(set(bills)) == 6, "all bills of a line have one id"
    assert document["status"] == "completed" and not (path / "input").exists()


def test_what_finds_no_room_at_its_end_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    batches, name = batch_on_disk(tmp_path, 1)
    shelf = batches.shelf
    before = sorted(tmp_path.glob("physics/alice/*/*"))
    (file,) = shelf.files(ALICE)
    assert "contents" not in file, "a list would take a hundred errors of each file"
    with monkeypatch.context() as patch:
        patch.setattr(shelf_module, "write_atomic", no_room)
        patch.setattr(batch_state, "write_atomic", no_room)
        incoming = shelf.begin(ALICE, MIB)
        incoming.write(lines(1))
        with pytest.raises(OSError, match="No space"):
            incoming.done("in", time.time() + 3600)
        incoming.drop()
        with pytest.raises(OSError, match="No space"):
            batches.create(ALICE, Asked(file["id"], "/v1/chat/completions", 3600, "1h", "m", None, "key", []))
    assert sorted(tmp_path.glob("physics/alice/*/*")) == before and batches.names(ALICE) == [name]


def test_the_same_batch_asked_for_at_once_is_one(tmp_path: Path) -> None:
    batches, _ = batch_on_disk(tmp_path, 1)
    (file,) = batches.shelf.files(ALICE)
    asked = Asked(file["id"], "/v1/chat/completions", 3600, "1h", "m", None, "key", [], "0" * 32)
    with ThreadPoolExecutor(20) as threads:
        made = list(threads.map(lambda _: batches.create(ALICE, asked)["id"], range(20)))
    assert len(set(made)) == 1 and len(batches.names(ALICE)) == 2


def test_twenty_uploads_at_once_pass_no_quota(tmp_path: Path) -> None:
    shelf, begin = Shelf(tmp_path, 5 * MIB, 86_400.0), threading.Barrier(20)

    def upload(number: int) -> bool:
        begin.wait(20)
        try:
            incoming = shelf.begin(Owner("physics", f"user{number}"), MIB)
        except RefusalError:
            return False
        incoming.write(b"x" * MIB)
        incoming.done("in", time.time() + 3600)
        incoming.drop()
        return True

    with ThreadPoolExecutor(20) as threads:
        kept = sum(threads.map(upload, range(20)))
    data = [path.stat().st_size for path in tmp_path.glob("physics/*/files/*.data")]
    assert len(data) == kept and sum(data) <= 5 * MIB


def test_a_batch_stays_until_it_was_kept_after_its_end(tmp_path: Path) -> None:
    batches, name = batch_on_disk(tmp_path, 1, window_s=7 * 86_400)
    files = tmp_path / "physics/alice/files"
    (files / f"file-{'0' * 40}.data").write_bytes(b"x")  # of a gateway that was killed there
    assert batches.shelf.prune(time.time() + 6 * 86_400) == 1 and list(files.iterdir()) == []
    say = {"results": [[1, "r1", 200, {}]]}
    assert batches.exchange(ALICE, name, say, lambda _: None, has_budget=True) == {"do": "stop"}
    assert batches.shelf.prune(time.time() + 2 * 86_400) == 2 and not batches.names(ALICE)


def test_what_is_old_is_removed(tmp_path: Path) -> None:
    batches, _ = batch_on_disk(tmp_path, 1)
    shelf = batches.shelf
    half = shelf.begin(ALICE, 10)
    assert shelf.prune(time.time()) == 0 and len(shelf.files(ALICE)) == 1
    assert shelf.prune(time.time() + 3 * 86_400) == 2
    assert not shelf.files(ALICE) and not batches.names(ALICE)
    assert [path.name for path in tmp_path.glob("physics/alice/*/*")] == []
    half.drop()
    with pytest.raises(RefusalError):
        shelf.of(Owner("../x", "alice"), "files")


def test_a_line_in_tiny_pieces_takes_its_own_room() -> None:
    tracemalloc.start()
    try:
        found = Lines()
        for number in range(MIB // 2):
            found.feed(bytes((120, number & 63 | 64)))
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_lines_are_found_wherever_pieces_end() -> None:
    data = lines(20) + b"\n" + line(3) + b"x"
    whole = Lines()
    whole.feed(data)
    expected = whole.end()
    assert [one["line"] for one in expected.errors] == [22, 23] and expected.requests == 22
    for size in (1, 7, 100):
        pieces = Lines()
        for begin in range(0, len(data), size):
            pieces.feed(data[begin : begin + size])
        assert pieces.end() == expected
