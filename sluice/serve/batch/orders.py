"""What a batch is to do, its requests, and what was done already."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.batches import BatchPlace
from sluice.exchange.serving import EngineName, ReplicaSpec

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
ENGINES: tuple[EngineName, ...] = ("llama.cpp", "vllm", "sglang", "tei")
MOST_LINE = 32 << 20
_FIELDS = {"messages": PATHS[0], "prompt": PATHS[1], "input": PATHS[2]}


@dataclass(frozen=True, slots=True)
class Orders:
    """What the job's script says."""

    model: Path
    engine: EngineName
    options: tuple[str, ...]
    sampling: dict[str, Any]
    output: Path
    source: Path | tuple[str, ...]
    """A file of requests, or prompts."""


@dataclass(frozen=True, slots=True)
class GatewayOrders:
    """What the script of a gateway's batch says."""

    spec: ReplicaSpec
    place: BatchPlace


@dataclass(frozen=True, slots=True)
class Request:
    """One of the engine."""

    custom_id: str
    path: str
    body: dict[str, Any]
    line: int = 0
    """Of a gateway's file."""


def parse_orders(text: str, job: str) -> Orders | GatewayOrders:
    """The script's line. Raises UsageError."""
    try:
        words = json.loads(text)
        if words["version"] != 1:
            raise UsageError(f"orders of version {words['version']}", remedy="run one version of Sluice everywhere")
        if "batch" in words:
            place, spec = words["batch"], {name: _tuple(one) for name, one in words["spec"].items()}
            return GatewayOrders(ReplicaSpec(**spec), BatchPlace(**{name: _tuple(one) for name, one in place.items()}))
        model = Path(words["model"])
        source = Path(words["input"]) if "input" in words else tuple(str(one) for one in words["prompts"])
        output = Path(words["output"] or f"sluice-batch-{job}.jsonl")
        engine = words["engine"] or engine_of_model(model)
        if engine not in ENGINES:
            raise UsageError(f"engine {engine!r}: not known", remedy=f"use one of {', '.join(ENGINES)}")
        return Orders(
            model, cast(EngineName, engine), tuple(map(str, words["options"])), dict(words["sampling"]), output, source
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the batch's orders: {type(error).__name__} {error}", remedy="submit batches by SubmitJob"
        ) from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def engine_of_model(model: Path) -> EngineName:
    """By what the model's files are. Raises UsageError."""
    if not model.exists():
        raise UsageError(f"model {model}: not there", remedy="give a path that this node has")
    if model.suffix == ".gguf" or (model.is_dir() and any(model.glob("*.gguf"))):
        return "llama.cpp"
    if model.is_dir() and (model / "config.json").exists():
        return "vllm"
    raise UsageError(f"model {model}: neither GGUF nor a folder with config.json", remedy="name the engine")


def requests(orders: Orders) -> Iterator[Request]:
    """All, one after the other. Raises UsageError, with the line."""
    if isinstance(orders.source, tuple):
        for number, prompt in enumerate(orders.source, 1):
            yield Request(f"request-{number}", PATHS[1], {**orders.sampling, "prompt": prompt})
        return
    try:
        with orders.source.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
                if line.strip():
                    yield _request(line, number, orders)
    except OSError as error:
        raise UsageError(f"{orders.source}: {error.strerror}", remedy="give a file that this node has") from error


def _request(line: bytes, number: int, orders: Orders) -> Request:
    place = f"{orders.source}:{number}"
    try:
        words = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON: {error}", remedy="write one request a line") from error
    if not isinstance(words, dict):
        raise UsageError(f"{place}: not an object", remedy='write {"prompt": "..."}')
    name = str(words.get("custom_id", f"request-{number}"))
    if isinstance(words.get("body"), dict):
        path, body = str(words.get("url", "")), words["body"]
        if path not in PATHS:
            raise UsageError(f"{place}: url {path[:80]!r}", remedy=f"use one of {', '.join(PATHS)}")
    else:
        found = [field for field in _FIELDS if field in words]
        if len(found) != 1:
            raise UsageError(f"{place}: no request", remedy='write {"prompt": ...} or {"messages": ...}')
        path, body = _FIELDS[found[0]], {name: one for name, one in words.items() if name != "custom_id"}
    if body.get("stream"):
        raise UsageError(f"{place}: stream is set", remedy="leave it out: answers are written whole")
    sampling = {} if path == PATHS[2] else orders.sampling
    return Request(name, path, {**sampling, **body})


class Output:
    """The file of answers. A batch that is requeued goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="give an output_path that can be written") from error
        whole = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # of an answer that was being written when the job was ended
                whole += len(line)
                self._see(line)
        os.ftruncate(self._descriptor, whole)
        self._size = whole

    def _see(self, line: bytes) -> None:
        try:
            words = json.loads(line)
            if words["response"]["status_code"] == 200:
                self.done.add(words["custom_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path}: has lines that are no answers", remedy="give an output_path that is new"
            ) from error

    def write(self, request: Request, status: int, body: Any, problem: str = "") -> None:
        """Add an answer, as OpenAI's batches have them: all of its line or nothing. Raises SluiceError."""
        error = {"code": str(status), "message": problem} if problem else None
        response = {"status_code": status, "body": body}
        words = {"custom_id": request.custom_id, "response": response, "error": error}
        line = json.dumps(words, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
        left = line
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            with suppress(OSError):  # a requeued batch cuts it off, unless more is written after it
                os.ftruncate(self._descriptor, self._size)
            raise SluiceError(
                f"{self.path}: {error.strerror}", remedy="make room there, and requeue the job"
            ) from error
        self._size += len(line)
