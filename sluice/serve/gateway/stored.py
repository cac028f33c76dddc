"""`/v1/files` and `/v1/batches`, and what the batches' jobs ask.

Nothing here needs a right: files are the gateway's own (shelf.py), and a batch's job is submitted, looked at and
cancelled by the REST API with the key that its caller has just sent. So a batch without a job gets one, or another one,
when its caller asks for it. Whatever blocks runs in a few threads.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs

from policy.service_jobs import BatchPolicy, ServicesFile, ServicesPolicy, batch_job
from sluice.base.errors import SluiceError, UsageError
from sluice.base.networks import network_of
from sluice.base.rates import Budgets, FewLines
from sluice.client import ApiError, AsyncClient
from sluice.exchange.batches import ENDPOINTS, BatchPlace
from sluice.exchange.requests import BATCHES, RequestLog, RequestRecord
from sluice.serve.gateway.batch_state import LIVING, Asked, Batches
from sluice.serve.gateway.bounds import FAILED_KEYS
from sluice.serve.gateway.client import Client, Handler, Request
from sluice.serve.gateway.directory import Directory
from sluice.serve.gateway.figures import Figures
from sluice.serve.gateway.heads import BATCH_JOB, FILES, ROUTES, idempotency_key
from sluice.serve.gateway.keys import Caller, Keys
from sluice.serve.gateway.refusals import RefusalError, failed_request
from sluice.serve.gateway.shelf import MOST_FILE, Owner, Shelf, full, shelf_of
from sluice.serve.gateway.upload import PURPOSE, Upload
from sluice.slurm.job import ENDED

_THREADS: Final = 8
_MOST_CALLS: Final = 128
_CALLS_OF_USER: Final = 16
_MOST_UPLOADS: Final = 32
_UPLOADS_OF_USER: Final = 4
_FORM: Final = 64 << 10  # bytes of an upload around its file
_PIECE: Final = 256 << 10
_API_S: Final = 20.0
_CURRENT_S: Final = 1.0
"""So long, the folder that the policy named is taken for the one that it names."""
_SILENT_S: Final = 30.0
"""Without a word of its job, Slurm is asked where that is."""
_STOP_S: Final = 90.0
"""In which a job that was told to has stopped."""
_LOOK_S: Final = 2.0
_MOST_LOOKED: Final = 10_000
_MOST_JOBS: Final = 4
"""Of a batch, one after the other."""
_AGAIN: Final = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "TIMEOUT", "")
"""Ends of a job after which the batch gets another one; empty: Slurm has forgotten it."""
_WINDOW: Final = re.compile(r"([1-9]\d{0,2})([hd])\Z")
_MOST_WINDOW_S: Final = 14 * 86_400
_MOST_METADATA: Final = 16
_PAGE: Final = (20, 100)
_FILES_PAGE: Final = (10_000, 10_000)
_TIMES: Final = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip

log = logging.getLogger("sluice.gateway")
log.addFilter(FewLines())
_WHOSE: ContextVar[str] = ContextVar("whose", default="")
"""The user for whom a task works."""


class Worker(Protocol):
    """What is needed of the worker."""

    directory: Directory
    keys: Keys
    loop: asyncio.AbstractEventLoop
    metrics: Figures

    def check_budget(self, tenant: str) -> None:
        """Raises RefusalError where a tenant has used what it may use."""

    def refuse(self, client: Client, request: Request, refusal: RefusalError) -> None:
        """Answer that there is no answer."""

    def log(self, request: Request, status: int, *, caller: Caller | None = None, tenant: str = "") -> None:
        """A line of the access log."""


class Stored:
    """All of it, of one worker. `services`: the file that `sluice apply` writes; `records`: folder of usage records."""

    def __init__(self, worker: Worker, services: Path, records: Path) -> None:
        self.worker = worker
        self.uploads: dict[Upload, str] = {}
        self._file = ServicesFile(services)
        self._threads = ThreadPoolExecutor(_THREADS, "stored")
        self.calls: Counter[str] = Counter()
        """That work or wait in threads, by user."""
        self._bills, self._billing = RequestLog(records), threading.Lock()
        self._batches: Batches | None = None
        self._shelved: BatchPolicy | None = None
        self._current = -_CURRENT_S  # when the policy was read
        self._reading: asyncio.Task[None] | None = None
        self._looked: dict[str, float] = {}
        self._failed = Budgets(*FAILED_KEYS)

    def begin(self, client: Client, request: Request, caller: Caller | None) -> None:
        """Answer a request."""
        client.handler = _Exchange(self, client, request, caller)

    def upload(self, client: Client, request: Request, length: int | None) -> Upload:
        """What takes the body of an upload. Raises RefusalError."""
        of_whom = request.caller.user if isinstance(request.caller, Caller) else str(request.caller)
        self._check_uploads(of_whom)
        most = MOST_FILE if length is None else min(length, MOST_FILE)
        kind = request.headers.get(b"content-type", b"")
        whose = partial(self._place_of_upload, request)
        made = Upload(client, kind, most, whose, self.in_thread, self.later)
        self.uploads[made] = of_whom
        made.task.add_done_callback(lambda _: self.uploads.pop(made, None))
        return made

    def _check_uploads(self, of_whom: str) -> None:
        mine = sum(1 for one in self.uploads.values() if one == of_whom)
        if len(self.uploads) >= _MOST_UPLOADS or mine >= _UPLOADS_OF_USER:
            raise RefusalError(
                429,
                "too many uploads at once",
                remedy=f"send {_UPLOADS_OF_USER} at a time",
                retry_after=1.0,
                close=True,
            )

    async def _place_of_upload(self, request: Request) -> tuple[Shelf, Owner]:
        caller = request.caller
        if isinstance(caller, str):
            caller = await self.worker.keys.check_later(caller, request.address)
            self._is_of(request, caller.user)
        if caller is None:
            raise failed_request()
        _WHOSE.set(caller.user)
        return (await self.batches()).shelf, self.owner(request, caller)

    def _is_of(self, request: Request, user: str) -> None:
        """An upload whose user was not known is one of his. Raises RefusalError."""
        if request.upload is not None:
            self.uploads.pop(request.upload, None)
            self._check_uploads(user)
            self.uploads[request.upload] = user

    # ---- what all need ----

    async def in_thread(self, what: Callable[..., Any], *words: Any, **named: Any) -> Any:
        """Do what blocks. Raises what it raises, and RefusalError where too much of it waits."""
        whose = _WHOSE.get()
        if self.calls[whose] >= _CALLS_OF_USER:
            raise RefusalError(
                429, "too many requests for files at once", remedy="send fewer at a time", retry_after=1.0
            )
        if self.calls.total() >= _MOST_CALLS:
            raise RefusalError(
                503, "too many requests for files at once", remedy="try again", retry_after=1.0, code="busy"
            )
        self.calls[whose] += 1
        work = self.worker.loop.run_in_executor(self._threads, partial(what, *words, **named))
        work.add_done_callback(partial(self._called, whose))
        return await asyncio.shield(work)

    def later(self, what: Callable[[], None]) -> None:
        """Do what blocks, and nobody waits for."""
        self._threads.submit(what)

    def _called(self, whose: str, work: asyncio.Future[Any]) -> None:
        self.calls[whose] -= 1
        if not self.calls[whose]:
            del self.calls[whose]
        if not work.cancelled():
            work.exception()  # whoever waited for it may have gone

    def owner(self, request: Request, caller: Caller) -> Owner:
        """Whose files a request is about. Raises RefusalError."""
        self.worker.directory.check_complete()
        return Owner(self.worker.directory.tenant(caller.user, request.headers.get(b"sluice-tenant")), caller.user)

    def policy(self) -> tuple[ServicesPolicy, BatchPolicy]:
        """What is in force. Blocks. Raises RefusalError where there are no batches."""
        policy = self._file.current()
        if policy.batches is None:
            raise RefusalError(
                404, "files and batches: not set up here", remedy="an admin adds serving.batches to the policy",
                code="not_set_up",
            )  # fmt: skip
        return policy, policy.batches

    async def batches(self) -> Batches:
        """The folder that the policy names. Raises RefusalError."""
        _, policy = await self.in_thread(self.policy)
        if self._batches is None or self._shelved != policy:
            made = Batches(shelf_of(policy))
            await self.in_thread(made.shelf.prepare)
            self._batches, self._shelved = made, policy
        self._current = time.monotonic()
        return self._batches

    def _bill(self, record: RequestRecord) -> None:
        with self._billing:
            self._bills.write(record)
        self.worker.loop.call_soon_threadsafe(self._count, record)

    def _count(self, record: RequestRecord) -> None:
        add, service = self.worker.metrics.add, record.service
        add("batch_requests", service, record.outcome)
        add("batch_prompt_tokens", service, "", record.prompt_tokens)
        add("batch_completion_tokens", service, "", record.completion_tokens)

    # ---- files ----

    async def files(self, request: Request, caller: Caller) -> Any:
        """What `/v1/files` answers. Raises RefusalError, OSError."""
        if request.upload is not None:
            return file_document(await request.upload.task)
        shelf, owner = (await self.batches()).shelf, self.owner(request, caller)
        name = request.named.decode()
        if not name:
            query = _query(request)
            found = await self.in_thread(shelf.files, owner)
            if (purpose := query.get("purpose")) is not None:
                found = [one for one in found if one["purpose"] == purpose]
            if query.get("order") == "asc":
                found.reverse()
            page, more = _page([one["id"] for one in found], query, _FILES_PAGE)
            return _listed([file_document(one) for one in found if one["id"] in set(page)], more)
        if request.method == b"DELETE":
            await self.in_thread(shelf.remove, owner, name)
            return {"id": name, "object": "file", "deleted": True}
        return file_document(await self.in_thread(shelf.file, owner, name))

    async def content(self, request: Request, caller: Caller) -> Path:
        """Where a file's bytes are. Raises RefusalError, OSError."""
        shelf = (await self.batches()).shelf
        found: Path = await self.in_thread(shelf.data, self.owner(request, caller), request.named.decode())
        return found

    # ---- batches ----

    async def batch(self, request: Request, caller: Caller) -> Any:
        """What `/v1/batches` answers. Raises RefusalError, OSError."""
        batches, owner, name = await self.batches(), self.owner(request, caller), request.named.decode()
        if request.method == b"POST":
            if name:
                await self._cancel(batches, owner, name)
            else:
                asked = await self._asked(request, caller, batches, owner)
                name = (await self.in_thread(batches.create, owner, asked))["id"]
        elif not name:
            page, more = _page(await self.in_thread(batches.names, owner), _query(request), _PAGE)
            return _listed([batch_document(await self.in_thread(batches.read, owner, one)) for one in page], more)
        return batch_document(await self._look(batches, owner, name, request, created=request.method == b"POST"))

    async def _asked(self, request: Request, caller: Caller, batches: Batches, owner: Owner) -> Asked:
        """What is to be created. Raises RefusalError."""
        self.worker.check_budget(owner.tenant)
        body = _object(request.body())
        if unknown := set(body) - {"input_file_id", "endpoint", "completion_window", "metadata"}:
            name = sorted(unknown)[0][:80]
            raise _wrong(name, "not known", "leave it out")
        endpoint, window = body.get("endpoint"), body.get("completion_window")
        if endpoint not in ENDPOINTS:
            raise _wrong("endpoint", f"not one of {', '.join(ENDPOINTS)}", "correct it")
        match = _WINDOW.match(window) if isinstance(window, str) else None
        seconds = int(match[1]) * {"h": 3600, "d": 86_400}[match[2]] if match is not None else 0
        if not 0 < seconds <= _MOST_WINDOW_S:
            raise _wrong("completion_window", "not hours or days, 14d at most", "send 24h")
        file = await self.in_thread(batches.shelf.file, owner, str(body.get("input_file_id")))
        if file["purpose"] != PURPOSE:
            raise _wrong("input_file_id", f"its purpose is {file['purpose']}", "upload the file with purpose `batch`")
        key = idempotency_key(request.headers)
        mark = ""
        if key is not None:
            words = f"{owner.tenant}/{owner.user}/{caller.key}/{key.decode()}"
            mark = (await self.in_thread(batches.shelf.token, words))[:32]
        policy, _ = await self.in_thread(self.policy)
        contents = file["contents"]
        errors = contents["errors"] or self._problems(policy, contents, str(endpoint), owner.tenant)
        return Asked(
            file["id"], str(endpoint), seconds, str(window), contents["model"], _metadata(body.get("metadata")),
            caller.key, errors, mark,
        )  # fmt: skip

    def _problems(
        self, policy: ServicesPolicy, contents: Mapping[str, Any], endpoint: str, tenant: str
    ) -> list[dict[str, Any]]:
        """Why a file that is right in itself cannot be a batch."""
        if contents["url"] != endpoint:
            said = f"url {contents['url']}: the batch's endpoint is {endpoint}"
            return [{"code": "mismatched_url", "message": said, "param": "url", "line": 1}]
        directory = self.worker.directory
        try:
            service = directory.service(contents["model"], tenant)
            if service.paused:
                raise UsageError(f"model {service.name}: paused", remedy="send the batch later")
            ability = ROUTES[endpoint.encode()][0].ability
            if ability is not None:
                directory.check_ability(service, ability, endpoint)
            batch_job(policy, service.name, BatchPlace((), None, "", ""))
        except SluiceError as error:
            code = (error.code if isinstance(error, RefusalError) else None) or "unusable_model"
            return [{"code": code, "message": str(error), "param": "body.model", "line": 1}]
        return []

    async def _cancel(self, batches: Batches, owner: Owner, name: str) -> None:
        def change() -> None:
            with batches.change(owner, name) as document:
                if document["status"] == "cancelling" or document["status"] == "cancelled":
                    return
                if document["status"] != "in_progress":
                    raise RefusalError(
                        409, f"batch {name}: is {document['status']}", remedy="nothing is left to cancel",
                        code="batch_is_over",
                    )  # fmt: skip
                document |= {"status": "cancelling", "cancelling_at": int(time.time())}

        await self.in_thread(change)
        self._looked.pop(name, None)

    # ---- its job ----

    async def _look(
        self, batches: Batches, owner: Owner, name: str, request: Request, *, created: bool
    ) -> dict[str, Any]:
        """A batch; what its job's end or absence makes necessary is done first. Raises RefusalError, OSError."""
        document: dict[str, Any] = await self.in_thread(batches.read, owner, name)
        now = time.monotonic()
        if document["status"] not in LIVING or now < self._looked.get(name, -_LOOK_S) + _LOOK_S:
            return document
        if len(self._looked) >= _MOST_LOOKED:
            self._looked.clear()
        self._looked[name] = now
        heard = max(document["submitted_at"], await self.in_thread(batches.heard, owner, name))
        over = document["status"] == "cancelling" or time.time() > document["expires_at"]
        if document["job"] is not None and not over and time.time() < heard + _SILENT_S:
            return document
        _, policy = await self.in_thread(self.policy)
        try:
            async with AsyncClient(
                policy.api, token=_token(request), ca=policy.api_ca, timeout=_API_S, retries=1
            ) as api:
                speaks = time.time() < heard + _SILENT_S
                await self._see_to(batches, owner, document, api, over=over, speaks=speaks)
        except ApiError as error:
            await self._without_job(batches, owner, document, error, created=created)
        return dict(await self.in_thread(batches.read, owner, name))

    async def _see_to(
        self, batches: Batches, owner: Owner, document: dict[str, Any], api: AsyncClient, *, over: bool, speaks: bool
    ) -> None:
        """`over`: it is to end; `speaks`: its job does. Raises ApiError, RefusalError, OSError."""
        job = document["job"]
        state = "" if job is None else await _state(api, job)
        living = job is not None and state not in ENDED and state != ""
        cancelling = document["status"] == "cancelling"
        if over and living:
            if cancelling and speaks and state == "RUNNING" and time.time() < document["cancelling_at"] + _STOP_S:
                return  # it is ending what it has
            with suppress(ApiError):
                await api.cancel(job)
            if cancelling:
                return
        finish = partial(self.in_thread, self._finish, batches, owner, document["id"])
        if over:
            await finish("cancelled" if cancelling else "expired")
        elif job is None or (not living and state in _AGAIN and document["tries"] < _MOST_JOBS):
            await self._submit(batches, owner, document, api)
        elif state == "CANCELLED":
            await finish("cancelled")
        elif not living:
            await finish("failed", "job_ended", f"job {job}: {state or 'ended'}, and has had {document['tries']} tries")

    @staticmethod
    def _finish(batches: Batches, owner: Owner, name: str, status: str, code: str = "", message: str = "") -> None:
        with batches.change(owner, name) as document:
            if document["status"] in LIVING:
                batches.finish(owner, document, status, code, message)

    async def _submit(self, batches: Batches, owner: Owner, document: dict[str, Any], api: AsyncClient) -> None:
        """The next job. Asked twice, it is one. Raises ApiError, OSError."""
        name, tries = document["id"], document["tries"] + 1
        words = f"{owner.tenant}/{owner.user}/{name}"
        secret = await self.in_thread(batches.shelf.token, words)
        policy, settings = await self.in_thread(self.policy)
        place = BatchPlace(settings.gateways, settings.ca, BATCH_JOB.format(batch=words), secret)
        try:
            fields = batch_job(policy, document["model"], place)
        except UsageError as error:
            raise ApiError(422, error.what, where="job", remedy=error.remedy) from error
        done = await api.submit(**fields, account=owner.tenant, comment=name, key=f"{name}-{tries}")

        def change() -> None:
            with batches.change(owner, name) as now:
                if now["tries"] < tries:
                    now |= {"job": done.job_id, "tries": tries, "submitted_at": int(time.time())}

        await self.in_thread(change)

    async def _without_job(
        self, batches: Batches, owner: Owner, document: dict[str, Any], error: ApiError, *, created: bool
    ) -> None:
        """The REST API has refused, or does not answer: the next look tries again. Raises RefusalError, OSError."""
        if error.status in (0, 409, 429) or error.status >= 500 or document["job"] is not None:
            log.warning("batch %s: its job cannot be seen to: %s", document["id"], error)
            return
        if created and document["status"] == "in_progress":
            folder = batches.folder(owner, document["id"])
            await self.in_thread(shutil.rmtree, folder, ignore_errors=True)
            if error.status in (401, 403):
                raise RefusalError(
                    403, "this key may not submit jobs, which batches are", code="insufficient_scope",
                    remedy="make one: sluice token create --scope serve --scope read --scope write",
                )  # fmt: skip
            raise RefusalError(400, error.what, remedy=error.remedy, code="job_refused")
        if error.status not in (401, 403):
            await self.in_thread(
                self._finish, batches, owner, document["id"], "failed", "job_refused", f"{error.what}; {error.remedy}"
            )

    # ---- what a job asks ----

    def check_job(self, request: Request) -> None:
        """Whether who asks is a batch's job, before a body is taken; does not block. Raises RefusalError."""
        now = time.monotonic()
        if self._batches is not None and _has_secret(self._batches.shelf, request):
            return  # whatever others have tried from its node
        if now > self._current + _CURRENT_S:  # it may be right: the policy is read first
            if self._reading is None or self._reading.done():
                self._reading = self.worker.loop.create_task(self._read())
            raise RefusalError(503, "batches: not read yet", remedy="try again", retry_after=1.0, code="busy")
        network = network_of(request.address)
        self._failed.forget(now)
        if (wait := self._failed.wait(network, now)) > 0:
            raise RefusalError(429, "too many wrong secrets", remedy="wait", retry_after=wait, close=True)
        self._failed.take(network, now)
        raise _not_its_secret()

    async def _read(self) -> None:
        try:
            await self.batches()
        except (RefusalError, OSError) as error:
            log.error("batches: %s", error)

    async def of_job(self, request: Request) -> Any:
        """Results of a job, and what it is to do. Raises RefusalError, OSError."""
        batches = await self.batches()
        if not _has_secret(batches.shelf, request):  # the folder is another one than a moment ago
            raise _not_its_secret()
        tenant, user, name = request.named.decode().split("/")
        limit = self.worker.directory.limit("tenant", tenant)
        has_budget = limit is None or limit.tokens_left is None or limit.tokens_left > 0
        raw = request.body()

        def exchange() -> dict[str, Any]:
            return batches.exchange(Owner(tenant, user), name, _object(raw), self._bill, has_budget=has_budget)

        return await self.in_thread(exchange)


class _Exchange(Handler):
    """One request and its answer."""

    def __init__(self, stored: Stored, client: Client, request: Request, caller: Caller | None) -> None:
        self._stored, self._client, self._request, self._caller = stored, client, request, caller
        self._room = asyncio.Event()
        self._room.set()
        self._task = stored.worker.loop.create_task(self._run())

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""
        self._task.cancel()

    def client_full(self) -> None:
        """Send no more for now."""
        self._room.clear()

    def client_ready(self) -> None:
        """Go on."""
        self._room.set()

    async def _run(self) -> None:
        worker, client, request = self._stored.worker, self._client, self._request
        _WHOSE.set(request.named.decode().rpartition("/")[0] if self._caller is None else self._caller.user)
        try:
            await self._answer()
        except RefusalError as refusal:
            worker.refuse(client, request, refusal)
        except OSError as error:
            log.error("request %s: files: %s: %s", request.id, error.filename, error.strerror)
            worker.refuse(client, request, _no_disk(error))
        except Exception:  # nobody else would answer
            log.exception("request %s: unexpected", request.id)
            worker.refuse(client, request, failed_request())

    async def _answer(self) -> None:
        stored, request, caller = self._stored, self._request, self._caller
        path = "" if request.route is None else request.route.path
        if path == BATCH_JOB:
            found = await stored.of_job(request)
        elif caller is None:
            raise failed_request()
        elif path.endswith("/content"):
            await self._send(await stored.content(request, caller))
            return
        elif path.startswith(FILES):
            found = await stored.files(request, caller)
        else:
            assert path.startswith(BATCHES)  # noqa: S101 - there are no others
            found = await stored.batch(request, caller)
        stored.worker.log(request, 200, caller=caller)
        self._client.answer(200, "application/json", json.dumps(found, ensure_ascii=False).encode(errors="replace"))

    async def _send(self, path: Path) -> None:
        """A file's bytes, as fast as the client takes them. Raises OSError, before any is sent."""
        stored, client = self._stored, self._client
        file, left = await stored.in_thread(_open, path)
        try:
            piece = await stored.in_thread(file.read, _PIECE)
            stored.worker.log(self._request, 200, caller=self._caller)
            client.begin_answer(200, "application/octet-stream", str(left).encode())
            while piece:
                left -= len(piece)
                client.part(piece)
                await self._room.wait()
                piece = await stored.in_thread(file.read, min(_PIECE, left)) if left else b""
            client.end_answer(b"")
        except (OSError, RefusalError) as error:
            log.error("request %s: %s: %s", self._request.id, path.name, error)
            client.break_off()
        finally:
            stored.later(file.close)


# ---- documents ----


def file_document(found: Mapping[str, Any]) -> dict[str, Any]:
    """A file, as the API has it."""
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    return {"object": "file", **{name: found[name] for name in names}, "status": "processed", "status_details": None}


def batch_document(found: Mapping[str, Any]) -> dict[str, Any]:
    """A batch, as the API has it."""
    totals, errors = found["totals"], found["errors"]
    waits = found["status"] == "in_progress" and found["job"] is None
    tokens = totals["prompt_tokens"], totals["completion_tokens"]
    return {
        "id": found["id"], "object": "batch", "endpoint": found["endpoint"], "model": found["model"] or None,
        "errors": {"object": "list", "data": errors} if errors else None, "input_file_id": found["input_file_id"],
        "completion_window": found["completion_window"], "status": "validating" if waits else found["status"],
        "output_file_id": found.get("output_file_id"), "error_file_id": found.get("error_file_id"),
        "created_at": found["created_at"], **{name: found.get(name) for name in _TIMES},
        "request_counts": {
            "total": found["requests"], "completed": totals["completed"], "failed": totals["failed"],
        },
        "usage": {
            "input_tokens": tokens[0], "input_tokens_details": {"cached_tokens": 0}, "output_tokens": tokens[1],
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": sum(tokens),
        },
        "metadata": found["metadata"], "sluice": {"job": found["job"]},
    }  # fmt: skip


def _listed(rows: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list", "data": rows, "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None, "has_more": more,
    }  # fmt: skip


def _page(names: list[str], query: Mapping[str, str], sizes: tuple[int, int]) -> tuple[list[str], bool]:
    """A part of a list, and whether there is more. Raises RefusalError."""
    usual, most = sizes
    text = query.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= most):
        raise _wrong("limit", f"not a number from 1 to {most}", "correct it")
    after = query.get("after")
    if after is not None and after not in names:
        raise _wrong("after", "not in the list", "send the last id of the page before")
    begin = 0 if after is None else names.index(after) + 1
    end = begin + int(text[:6])
    return names[begin:end], end < len(names)


def _query(request: Request) -> dict[str, str]:
    """The query of a path. Raises RefusalError."""
    text = request.target.partition(b"?")[2].decode("latin-1")
    try:
        found = parse_qs(text, max_num_fields=16)
    except ValueError as error:
        raise _wrong("query", "more than 16 fields", "send fewer") from error
    return {name: values[-1] for name, values in found.items()}


def _object(raw: bytes) -> dict[str, Any]:
    """A body. Raises RefusalError."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusalError(400, "body: not JSON", remedy="send one object of JSON, in UTF-8") from error
    if not isinstance(document, dict):
        raise RefusalError(400, "body: not an object of JSON", remedy="send one")
    return document


def _metadata(given: Any) -> dict[str, str] | None:
    """Raises RefusalError."""
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _MOST_METADATA:
        raise _wrong("metadata", f"not an object of at most {_MOST_METADATA} texts", "correct it")
    if not all(isinstance(value, str) and len(name) <= 64 and len(value) <= 512 for name, value in given.items()):
        raise _wrong("metadata", "has a name of more than 64, or a value of more than 512 characters", "shorten it")
    return given


def _wrong(param: str, what: str, remedy: str) -> RefusalError:
    return RefusalError(400, f"{param}: {what}", remedy=remedy, param=param)


def _no_disk(error: OSError) -> RefusalError:
    if full(error):
        return RefusalError(
            507, "files: the disk is full", remedy="try again later, and tell an admin", code="storage_full"
        )
    return RefusalError(503, "files: cannot be read or written now", remedy="try again", retry_after=5.0, code="busy")


def _open(path: Path) -> tuple[FileIO, int]:
    """A file, and its size."""
    file = FileIO(path)
    return file, os.fstat(file.fileno()).st_size


def _has_secret(shelf: Shelf, request: Request) -> bool:
    given = (request.proof or b"").removeprefix(b"Bearer ")
    return hmac.compare_digest(given, shelf.token(request.named.decode()).encode())


def _not_its_secret() -> RefusalError:
    return RefusalError(401, "batch: not its secret", remedy="only its own job may ask", close=True)


def _token(request: Request) -> str:
    return (request.proof or b"")[7:].strip().decode("latin-1")


async def _state(api: AsyncClient, job: int) -> str:
    """Of a job; empty where Slurm has forgotten it. Raises ApiError."""
    try:
        return (await api.job(job)).job.state
    except ApiError as error:
        if error.status == 404:
            return ""
        raise
