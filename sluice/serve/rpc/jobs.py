"""The service Jobs: batch inference as jobs of the caller, by the REST API with the caller's own token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import Any

import grpc
import httpx

from sluice.base.errors import UsageError
from sluice.client import ApiError, AsyncClient, models
from sluice.client.transport import import_httpx
from sluice.serve.batch.orders import ENGINES
from sluice.serve.rpc import serve_pb2 as pb
from sluice.serve.rpc.inference import answers, sampling_of, streams
from sluice.serve.rpc.status import CallError, Context, of_api
from sluice.slurm.job import ENDED

_MOST_INLINE = 3 << 20
_MOST_PATH = 4096
_END = "SLUICE_BATCH"


class Jobs:
    """Its methods. `program`: of the batch on the nodes."""

    def __init__(
        self, api: str, ca: str | None, program: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        import_httpx()
        self._api, self._ca, self._program = api, ca, program
        self._transport = _Kept(transport or httpx.AsyncHTTPTransport(verify=_trusted(ca)))

    async def close(self) -> None:
        """Close its connections."""
        await self._transport.inner.aclose()

    @answers
    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Context) -> pb.SubmitJobReply:  # noqa: N802
        """`POST /api/v1/jobs`."""
        need = request.gpu_requirements
        words = {
            "name": request.name or f"batch-{PurePosixPath(request.model_path).stem}"[:64],
            "gpus": need.gpus,
            "gpu_mem": need.gpu_mem,
            "gpu_share": need.gpu_share,
            "constraint": need.constraint,
            "account": request.account,
            "partition": request.partition,
            "qos": request.qos,
            "time_limit": request.time_limit,
            "work_dir": request.work_dir,
        }
        script = batch_script(request, self._program)
        given: dict[str, Any] = {name: value for name, value in words.items() if value}
        async with self._client(context) as client:
            done = await client.submit(script=script, key=request.key or _key_of(context), **given)
        return pb.SubmitJobReply(job_id=done.job_id, messages=done.messages)

    @answers
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.Job:  # noqa: N802
        """`GET /api/v1/jobs/JOB`."""
        async with self._client(context) as client:
            return as_message((await client.job(_number(request.job_id))).job)

    @streams
    async def WatchJob(self, request: pb.GetJobRequest, context: Context) -> AsyncIterator[pb.Job]:  # noqa: N802
        """From the API's stream of changes."""
        async with self._client(context) as client:
            async for job in client.watch(_number(request.job_id)):
                yield as_message(job)

    @answers
    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.CancelJobReply:  # noqa: N802
        """`POST /api/v1/jobs/JOB/cancel`."""
        async with self._client(context) as client:
            done = await client.cancel(_number(request.job_id), key=_key_of(context))
        return pb.CancelJobReply(messages=done.messages)

    @asynccontextmanager
    async def _client(self, context: Context) -> AsyncIterator[AsyncClient]:
        """As the caller. Raises CallError."""
        left = context.time_remaining()
        try:
            async with AsyncClient(
                self._api,
                token=_token(context),
                ca=self._ca,
                timeout=min(left or 30.0, 30.0),
                transport=self._transport,
            ) as client:
                yield client
        except ApiError as error:
            raise of_api(error) from error
        except UsageError as error:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


class _Kept(httpx.AsyncBaseTransport):
    """Connections that stay when a client of one call is closed."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Not now."""


def _trusted(ca: str | None) -> Any:
    import ssl

    return ssl.create_default_context(cafile=ca)


def _metadata(context: Context, name: str) -> str:
    found = [value for key, value in context.invocation_metadata() or () if key == name and isinstance(value, str)]
    if len(found) > 1:
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"metadata {name}: twice; send it once")
    return found[0] if found else ""


def _key_of(context: Context) -> str:
    return _metadata(context, "idempotency-key")


def _token(context: Context) -> str:
    scheme, _, token = _metadata(context, "authorization").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise CallError(
            grpc.StatusCode.UNAUTHENTICATED,
            "metadata authorization: no token; send `Bearer` and one of: sluice token create --scope write",
        )
    return token.strip()


def _number(job: int) -> int:
    if not 0 < job < 1 << 32:
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"job_id {job}: not a job's number; give that of SubmitJob")
    return job


def _invalid(text: str) -> CallError:
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, text)


def _path(field: str, text: str) -> str:
    if not text.startswith("/") or len(text) > _MOST_PATH or not text.isprintable():
        raise _invalid(f"{field} {text[:200]!r}: not an absolute path; give one that the nodes have")
    return text


def batch_script(request: pb.SubmitJobRequest, program: str) -> str:
    """The job: the batch's program with its orders, one line of JSON, as standard input. Raises CallError."""
    if request.engine and request.engine not in ENGINES:
        raise _invalid(f"engine {request.engine[:64]!r}: not known; leave it out, or give one of {', '.join(ENGINES)}")
    source = request.WhichOneof("input_data")
    if source is None:
        raise _invalid("input_data: missing; give prompts, or the path of a file of requests")
    orders: dict[str, Any] = {
        "version": 1,
        "model": _path("model_path", request.model_path),
        "engine": request.engine or None,
        "options": list(request.engine_options),
        "sampling": sampling_of(request.sampling),
        "output": _path("output_path", request.output_path) if request.output_path else None,
    }
    if source == "input_path":
        orders["input"] = _path("input_path", request.input_path)
    else:
        orders["prompts"] = list(request.prompts.prompts)
        if not orders["prompts"]:
            raise _invalid("prompts: empty; give at least one")
    text = json.dumps(orders, separators=(",", ":"))  # ASCII on one line: no line of it ends the script's input
    if len(text) > _MOST_INLINE:
        raise _invalid(f"input_data: {len(text)} bytes; above {_MOST_INLINE} write a file and give input_path")
    return f"#!/bin/sh\nexec {program} <<'{_END}'\n{text}\n{_END}\n"


def as_message(job: models.Job) -> pb.Job:
    """A job of the API."""
    return pb.Job(
        id=job.id, name=job.name, user=job.user, account=job.account, partition=job.partition, qos=job.qos,
        state=job.state, reason=job.reason, nodes=job.nodes, gpus=job.gpus, gpu_mem_mib=job.gpu_mem_mib,
        submit_time=job.submit_time or 0, start_time=job.start_time or 0, end_time=job.end_time or 0,
        ended=job.state in ENDED,
    )  # fmt: skip
