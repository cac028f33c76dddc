"""Dynamic batching of ``@serve.model``: the same embedding model with calls of one input, and of many put together.

The model is a stack of matrices as large as a small encoder's, in numpy on one core: a call with one input reads all
weights for it alone, as on a GPU. Clients send one text each and wait for its vector, over the socket of the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks import Result
from sluice.base.errors import SluiceError

OPTIONS = [
    click.Option(["--clients"], type=click.IntRange(1), default=32, show_default=True, help="At once."),
    click.Option(["--seconds"], type=click.FloatRange(1), default=6.0, show_default=True, help="Of each measurement."),
    click.Option(
        ["--delay-ms"], type=click.FloatRange(0), default=5.0, show_default=True, help="A text waits at most."
    ),
    click.Option(["--width"], type=click.IntRange(64), default=2048, show_default=True, help="Of the model."),
    click.Option(["--runs"], type=click.IntRange(1), default=3, show_default=True, help="Of each, in turns."),
]
MUST = {"throughput_ratio": (">=", 3.0)}
_BATCH = 32
_LAYERS = 6
_PROGRAM = """
import numpy, sys
from sluice import serve

width, layers, batch, delay = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
draw = numpy.random.default_rng(18)
words = draw.standard_normal((4096, width), dtype=numpy.float32)
weights = [draw.standard_normal((width, width), dtype=numpy.float32) / width**0.5 for _ in range(layers)]

@serve.model(max_batch=batch, max_delay=delay)
def embed(texts):
    hidden = numpy.stack([words[[hash(word) % 4096 for word in text.split()]].mean(axis=0) for text in texts])
    for matrix in weights:
        hidden = numpy.tanh(hidden @ matrix)
    return hidden[:, :64]

serve.run()
"""


def run(clients: int, seconds: float, delay_ms: float, width: int, runs: int) -> Result:
    """Both in turns; medians."""
    rates: dict[str, list[float]] = {"single": [], "batched": []}
    alone: dict[str, list[float]] = {"single": [], "batched": []}
    waits: list[float] = []
    for _ in range(runs):
        for name, batch in (("single", 1), ("batched", _BATCH)):
            with _server(width, batch, delay_ms / 1000) as socket:
                asyncio.run(_load(socket, 1, 0.5))
                alone[name] += asyncio.run(_load(socket, 1, max(1.0, seconds / 4)))
                waits = waits if name == "single" else [*waits, _longest_wait(socket)]
                began = time.perf_counter()
                taken = asyncio.run(_load(socket, clients, seconds))
                rates[name].append(len(taken) / (time.perf_counter() - began))
    single, batched = (statistics.median(rates[name]) for name in ("single", "batched"))
    first, second = (statistics.median(alone[name]) for name in ("single", "batched"))
    return Result(
        figures={
            "throughput_ratio": batched / single,
            "batched_per_s": batched,
            "alone_added_ms_p50": 1000 * (second - first),
            "alone_longest_wait_ms_p50": 1000 * statistics.median(waits),
            "delay_bound_ms": delay_ms,
        },
        peer={"batched_per_s": single, "alone_ms_p50": 1000 * first},
        spread={f"{name}_per_s": values for name, values in rates.items()},
        versions={"numpy": version("numpy")},
        must={"alone_added_ms_p50": ("<=", delay_ms + 2.0)},  # a request alone waits for others, but not longer
    )


@contextmanager
def _server(width: int, batch: int, delay: float) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        folder = Path(name)
        (folder / "embed.py").write_text(_PROGRAM)
        socket = folder / "e.sock"
        words = [sys.executable, str(folder / "embed.py"), str(width), str(_LAYERS), str(batch), str(delay)]
        environment = {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OPENBLAS_NUM_THREADS": "1",
            "SLUICE_ENGINE_SOCKET": str(socket), "PYTHONHASHSEED": "0",
        }  # fmt: skip
        process = subprocess.Popen(words, env=environment)
        try:
            end = time.monotonic() + 60
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise SluiceError("the model does not start", remedy="see its output above")
                time.sleep(0.05)
            time.sleep(0.1)
            yield socket
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def _load(socket: Path, clients: int, seconds: float) -> list[float]:
    """Seconds of each request, of clients that each wait for their answer."""
    taken: list[float] = []
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        body = b'{"input":"word %d of a short text that is embedded"}' % number
        request = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        while (began := time.perf_counter()) < until:
            writer.write(request)
            status, _ = await _answer(reader)
            if status != 200:
                raise SluiceError(f"the model answers with status {status}", remedy="see its output above")
            taken.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    return taken


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await reader.readexactly(length)


def _longest_wait(socket: Path) -> float:
    """What the model says of the waits until now."""

    async def ask() -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        _, body = await _answer(reader)
        writer.close()
        return body

    return float(asyncio.run(ask()).partition(b"longest_wait_seconds ")[2].split()[0])
