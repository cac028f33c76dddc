"""Streams of vLLM and SGLang themselves, whose replicas are killed: the text that arrives is exact.

With SLUICE_VLLM naming a program `vllm`, SLUICE_SGLANG the `python` that has SGLang, each of a build for CPUs, in an
environment with PyTorch and transformers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.base.ports import free_port
from sluice.exchange.serving import EngineName, Load, ReplicaSpec
from sluice.serve.engines.base import Place, samples
from sluice.serve.engines.known import engine_of
from sluice.serve.replica.asking import get
from tests.unit.serve.gateway_bed import SECRET, Bed, bed, certificate, run, service_row, until
from tests.unit.serve.replica_bed import spec_of
from tests.unit.serve.test_gateway_llama import LlamaReplica, unused, whole

SLOTS = 8
READY_S = 900.0

pytestmark = pytest.mark.timeout(2400)


@dataclass(frozen=True)
class Kind:
    """An engine, and what it needs to run without a GPU."""

    name: EngineName
    program: str
    options: tuple[str, ...]
    environment: Mapping[str, str]
    length: int
    """Of each stream, in tokens."""

    def spec(self, model: Path) -> ReplicaSpec:
        return spec_of(model, engine=self.name, service="m", slots=SLOTS, options=self.options)


KINDS = (
    Kind(
        "vllm", os.environ.get("SLUICE_VLLM", ""), ("--enforce-eager", "--dtype", "float32"),
        {"VLLM_CPU_KVCACHE_SPACE": "1"}, 400,
    ),
    Kind(
        "sglang", os.environ.get("SLUICE_SGLANG", ""),
        (
            "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
            "--mem-fraction-static", "0.1", "--max-total-tokens", "16384",
        ),
        {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}, 100,
    ),
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if not found.program:
        pytest.skip(f"no {found.name}: SLUICE_{found.name.upper()}")
    return found


@pytest.fixture(scope="module")
def model(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "counting"
    script = Path(__file__).with_name("counting_llama.py")
    subprocess.run([Path(kind.program).with_name("python"), "-P", script, folder], check=True)
    return folder


@dataclass
class EngineReplica(LlamaReplica):
    """The relay of a replica, before an engine that is started as its adapter says."""

    kind: Kind = KINDS[0]
    folder: Path = field(default_factory=Path)

    def engine(self, model: Path, slots: int = SLOTS) -> None:
        place = Place(folder=self.folder, port=free_port(), key=SECRET, model=model)
        place.socket.unlink(missing_ok=True)
        start = engine_of(self.kind.name).start(self.kind.spec(model), place)
        for name, text in start.files.items():
            (self.folder / name).write_text(text)
        self.address = start.address
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.kind.program, *start.arguments[1:]], cwd=self.folder, start_new_session=True, stdout=log,
                env={**os.environ, **start.environment, **self.kind.environment}, stderr=subprocess.STDOUT,
            )  # fmt: skip

    async def load(self) -> Load:
        engine = engine_of(self.kind.name)
        answer = await get(self.address, str(engine.figures), SECRET, 10)
        assert answer is not None and answer[0] == 200
        return engine.load(samples(answer[1].decode()))

    def kill_engine(self) -> None:
        """All its processes, as with the job's cgroup."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def test_streams_are_exact_while_a_replica_is_killed(tmp_path: Path, kind: Kind, model: Path) -> None:
    async def work() -> None:
        context, fingerprint = certificate(tmp_path)
        async with bed(tmp_path, services={"m": service_row(engine=kind.name, deadline_s=900.0)}) as one:
            replicas = []
            for number in range(2):
                folder = tmp_path / str(number)
                folder.mkdir()
                abilities = engine_of(kind.name).abilities(kind.spec(model))
                launch = f"{0xC1 + number:016x}"
                replica = EngineReplica(unused, context, fingerprint, launch, slots=SLOTS, abilities=abilities)
                replica.kind, replica.folder = kind, folder
                replica.engine(model)
                replicas.append(replica)
                one.replicas.append(await replica.start())
            for replica in replicas:
                await replica.ready(READY_S)
            one.publish()
            for victim, path in zip(replicas, ("/v1/completions", "/v1/chat/completions"), strict=True):
                await killed_in_the_middle(one, victim, path)
                victim.engine(model)
                await victim.ready(READY_S)
            bills = {
                (record.endpoint, record.outcome, record.prompt_tokens, record.completion_tokens)
                for record in one.records()
            }
            assert bills == {
                ("/v1/completions", "ok", 1, kind.length), ("/v1/chat/completions", "ok", 3, kind.length)
            }  # fmt: skip
            await ends_when_asked_to(one, replicas[0])

    run(work(), 2300)


async def killed_in_the_middle(one: Bed, victim: EngineReplica, path: str) -> None:
    chat, length = "chat" in path, victim.kind.length
    starts = range(10, 60, 10)
    asked = [request(path, at, length) for at in starts]
    tasks = [asyncio.create_task(one.ask(each, path)) for each in asked]
    await until(lambda: any(call._count > 20 for call in one.worker.calls.values()), 300)
    victim.kill_engine()
    for at, answer in zip(starts, await asyncio.gather(*tasks), strict=True):
        first = 0 if chat else at + 1
        text = "".join(f" w{number}" for number in range(first, first + length))
        whole(answer, 3 if chat else 1, length, text, chat)
    assert sum(record.resumed for record in one.records() if record.endpoint == path), "no stream was in the middle"


async def ends_when_asked_to(one: Bed, replica: EngineReplica) -> None:
    """It has counted its work, and answers to SIGTERM within the adapter's time."""
    answer = await one.ask({"model": "m", "prompt": "w1", "max_tokens": 8}, "/v1/completions")
    assert answer.status == 200
    load = await replica.load()
    assert (load.running, load.waiting) == (0, 0)
    process, begun = replica.process, time.monotonic()
    assert process is not None
    os.killpg(process.pid, signal.SIGTERM)
    await asyncio.to_thread(process.wait, 120)
    assert time.monotonic() - begun < engine_of(replica.kind.name).end_s


def request(path: str, at: int, length: int) -> dict[str, Any]:
    """Greedy, as only such streams continue exactly."""
    prompt = {"messages": [{"role": "user", "content": f"w{at}"}]} if "chat" in path else {"prompt": f"w{at}"}
    more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    return {"model": "m", "max_tokens": length, **prompt, **more}
