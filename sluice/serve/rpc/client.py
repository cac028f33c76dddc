"""The typed client of the gRPC services, for hosts of users: `pip install 'sluice-slurm[grpc]'`.

with ClusterClient("models.example:6826", token_file="~/.config/sluice/token") as cluster:
    for chunk in cluster.chat_stream("deepseek-7b", "Why is the sky blue?"):
        print(chunk.text, end="")
    job = cluster.submit_job(model_path="/models/deepseek-7b", input_data=["Hello"], gpu_requirements={"gpus": 1})
    print(cluster.wait(job).state)
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from sluice.base.errors import SluiceError, UsageError
from sluice.client.transport import read_token
from sluice.serve.rpc import serve_pb2 as pb
from sluice.serve.rpc.structs import to_struct
from sluice.serve.rpc.table import INFERENCE, JOBS, MOST_MESSAGE, methods

DEFAULT_ADDRESS = "127.0.0.1:6826"
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A user's message, or all of a conversation as OpenAI's API has them."""
Input: TypeAlias = str | Sequence[str] | os.PathLike[str]
"""A prompt, prompts, or (a Path) a file of requests on the cluster."""
Gpus: TypeAlias = int | str | Mapping[str, Any] | pb.GpuRequirements
_SAMPLING = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)
_NEEDS = frozenset(pb.GpuRequirements.DESCRIPTOR.fields_by_name)
# Calls that are safe to make again: they change nothing, or have a key by which they are done once.
_AGAIN = (
    (INFERENCE, "ListModels"), (INFERENCE, "Embed"), (JOBS, "GetJob"), (JOBS, "SubmitJob"), (JOBS, "CancelJob"),
)  # fmt: skip


class CallFailed(SluiceError):  # noqa: N818 - a name that users read
    """A call that failed. `code`: gRPC's; `retry_after`: seconds until it may succeed; `request_id`: as logged."""

    def __init__(self, error: grpc.RpcError, path: str) -> None:
        super().__init__(f"{path}: {error.details() or error.code().name}")
        found = {str(one[0]): str(one[1]) for one in error.trailing_metadata() or ()}  # type: ignore[index]
        self.code: grpc.StatusCode = error.code()
        self.request_id = found.get("x-request-id", "")
        self.retry_after = float(found["retry-after"]) if found.get("retry-after", "").isdecimal() else None


class ClusterClient:
    """A connection to `sluice gateway-rpc`; use it in a `with`.

    `token`: else $SLUICE_TOKEN, else what is in `token_file`, which nobody else may read. `ca`: certificates that are
    trusted instead of the host's. `without_tls`: plain connections, to other hosts too. `tenant`: who pays, where it
    is not the caller's default. `timeout`: seconds of each call that names none; None: no bound.
    Each call raises CallFailed.
    """

    def __init__(
        self, address: str = "", *, token: str = "", token_file: str | Path = "", ca: str | Path | None = None,
        without_tls: bool = False, tenant: str = "", timeout: float | None = None,
    ) -> None:  # fmt: skip
        address = address or os.environ.get("SLUICE_GRPC", "") or DEFAULT_ADDRESS
        found = token or os.environ.get("SLUICE_TOKEN", "") or read_token(token_file)
        if not found.isascii() or not found.isprintable() or " " in found:
            raise UsageError("token: not one of Sluice or Slurm", remedy="make one with: sluice token create")
        self._metadata = [("authorization", f"Bearer {found}")]
        if tenant:
            self._metadata.append(("sluice-tenant", tenant))
        self._timeout = timeout
        options = (
            ("grpc.max_receive_message_length", MOST_MESSAGE),
            ("grpc.max_send_message_length", MOST_MESSAGE),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.service_config", _retries()),
        )
        if without_tls or (ca is None and _is_here(address)):
            self._channel = grpc.insecure_channel(address, options)
        else:
            trusted = None if ca is None else Path(ca).read_bytes()
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted), options)
        self._calls: dict[str, Any] = {}
        for service in (INFERENCE, JOBS):
            for method in methods(service):
                make = self._channel.unary_stream if method.streams else self._channel.unary_unary
                self._calls[method.name] = make(
                    method.path,
                    request_serializer=method.request.SerializeToString,
                    response_deserializer=method.reply.FromString,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its connection."""
        self._channel.close()

    # ---- inference ----

    def models(self, *, timeout: float | None = None) -> list[pb.Model]:
        """The models that the caller may ask."""
        reply: pb.ListModelsReply = self._one("ListModels", pb.ListModelsRequest(), timeout)
        return list(reply.models)

    def chat(self, model: str, messages: Messages, *, timeout: float | None = None, **options: Any) -> pb.ChatReply:
        """An answer. `options`: max_tokens, temperature, top_p, seed, stop, and all others of OpenAI's API."""
        reply: pb.ChatReply = self._one("Chat", _chat(model, messages, options), timeout)
        return reply

    def chat_stream(
        self, model: str, messages: Messages, *, timeout: float | None = None, **options: Any
    ) -> Iterator[pb.ChatChunk]:
        """An answer, in pieces. To end it before its end: `close()` of what this returns."""
        return self._many("ChatStream", _chat(model, messages, options), timeout)

    def complete(self, model: str, prompt: str, *, timeout: float | None = None, **options: Any) -> pb.CompleteReply:
        """How a text goes on."""
        reply: pb.CompleteReply = self._one("Complete", _complete(model, prompt, options), timeout)
        return reply

    def complete_stream(
        self, model: str, prompt: str, *, timeout: float | None = None, **options: Any
    ) -> Iterator[pb.CompleteChunk]:
        """The same, in pieces."""
        return self._many("CompleteStream", _complete(model, prompt, options), timeout)

    def embed(
        self, model: str, texts: str | Sequence[str], *, timeout: float | None = None, **options: Any
    ) -> list[list[float]]:
        """The embedding of each text."""
        given = [texts] if isinstance(texts, str) else list(texts)
        request = pb.EmbedRequest(model=model, input=given, options=to_struct(options) if options else None)
        reply: pb.EmbedReply = self._one("Embed", request, timeout)
        return [list(one.values) for one in reply.embeddings]

    # ---- jobs ----

    def submit_job(
        self, *, model_path: str | os.PathLike[str], input_data: Input, gpu_requirements: Gpus = 1, engine: str = "",
        engine_options: Sequence[str] = (), output_path: str | os.PathLike[str] = "", name: str = "", account: str = "",
        partition: str = "", qos: str = "", time_limit: str = "", work_dir: str = "", key: str = "",
        timeout: float | None = None, **sampling: Any,
    ) -> int:  # fmt: skip
        """Submit a job that runs the model over the input; its number. `gpu_requirements`: a number of GPUs, a size of
        GPU memory as "10G", or a mapping of gpus, gpu_mem, gpu_share and constraint. `sampling`: max_tokens, ...
        """
        if unknown := sorted(set(sampling) - _SAMPLING):
            raise UsageError(f"{unknown[0]}: not an option", remedy=f"give one of {', '.join(sorted(_SAMPLING))}")
        request = pb.SubmitJobRequest(
            model_path=os.fspath(model_path), gpu_requirements=_needs(gpu_requirements), engine=engine,
            engine_options=engine_options, sampling=_sampling(sampling), output_path=os.fspath(output_path), name=name,
            account=account, partition=partition, qos=qos, time_limit=time_limit, work_dir=work_dir,
            key=key or secrets.token_hex(16),
        )  # fmt: skip
        if isinstance(input_data, os.PathLike):
            request.input_path = os.fspath(input_data)
        else:
            request.prompts.prompts.extend([input_data] if isinstance(input_data, str) else input_data)
        reply: pb.SubmitJobReply = self._one("SubmitJob", request, timeout)
        return reply.job_id

    def job(self, job: int, *, timeout: float | None = None) -> pb.Job:
        """A job as it is now."""
        reply: pb.Job = self._one("GetJob", pb.GetJobRequest(job_id=job), timeout)
        return reply

    def watch_job(self, job: int, *, timeout: float | None = None) -> Iterator[pb.Job]:
        """The job now, and each time that it changes, until it has ended."""
        return self._many("WatchJob", pb.GetJobRequest(job_id=job), timeout)

    def wait(self, job: int, *, timeout: float | None = None) -> pb.Job:
        """The job when it has ended."""
        seen = list(self.watch_job(job, timeout=timeout))
        return seen[-1] if seen else self.job(job)

    def cancel_job(self, job: int, *, timeout: float | None = None) -> None:
        """Cancel a job."""
        self._one("CancelJob", pb.CancelJobRequest(job_id=job), timeout, ("idempotency-key", secrets.token_hex(16)))

    # ---- calls ----

    def _one(self, name: str, request: Any, timeout: float | None, *metadata: tuple[str, str]) -> Any:
        with _errors(name):
            left = self._timeout if timeout is None else timeout
            return self._calls[name](request, timeout=left, metadata=[*self._metadata, *metadata])

    def _many(self, name: str, request: Any, timeout: float | None) -> Iterator[Any]:
        with _errors(name):
            left = self._timeout if timeout is None else timeout
            call = self._calls[name](request, timeout=left, metadata=self._metadata)
            try:
                yield from call
            finally:
                call.cancel()


@contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise CallFailed(error, name) from error


def _retries() -> str:
    policy = {
        "maxAttempts": 4, "initialBackoff": "0.5s", "maxBackoff": "4s", "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }  # fmt: skip
    names = [{"service": service, "method": method} for service, method in _AGAIN]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": policy}]})


def _is_here(address: str) -> bool:
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")


def _sampling(options: Mapping[str, Any]) -> pb.Sampling:
    given = {name: value for name, value in options.items() if name in _SAMPLING and value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return pb.Sampling(**given)


def _others(options: Mapping[str, Any]) -> Any:
    left = {name: value for name, value in options.items() if name not in _SAMPLING}
    return to_struct(left) if left else None


def _chat(model: str, messages: Messages, options: Mapping[str, Any]) -> pb.ChatRequest:
    given: Sequence[Mapping[str, Any]] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    )
    return pb.ChatRequest(
        model=model, messages=[_message(one) for one in given], sampling=_sampling(options), options=_others(options)
    )


def _message(given: Mapping[str, Any]) -> pb.Message:
    content = given.get("content")
    taken = {"role"} | ({"content"} if isinstance(content, str) else set())
    fields = {name: value for name, value in given.items() if name not in taken}
    text = content if isinstance(content, str) else ""
    return pb.Message(role=str(given.get("role", "user")), content=text, fields=to_struct(fields) if fields else None)


def _complete(model: str, prompt: str, options: Mapping[str, Any]) -> pb.CompleteRequest:
    return pb.CompleteRequest(model=model, prompt=prompt, sampling=_sampling(options), options=_others(options))


def _needs(given: Gpus) -> pb.GpuRequirements:
    if isinstance(given, pb.GpuRequirements):
        return given
    if isinstance(given, int):
        return pb.GpuRequirements(gpus=str(given))
    if isinstance(given, str):
        return pb.GpuRequirements(gpu_mem=given)
    if unknown := sorted(set(given) - _NEEDS):
        raise UsageError(
            f"gpu_requirements: {unknown[0]} is not known", remedy=f"give some of {', '.join(sorted(_NEEDS))}"
        )
    return pb.GpuRequirements(**{name: str(value) for name, value in given.items()})
