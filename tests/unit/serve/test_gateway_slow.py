"""A replica of a real engine that is slow but not silent: it gets nothing for a while, is tried, and gets its part."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.core.gate import Standing, Time
from sluice.exchange.serve_status import replica_status
from sluice.exchange.serving import Abilities, Demand, Heartbeat, Load, State
from tests.serve_models import counted, make_model
from tests.unit.serve.gateway_bed import Bed, Replica, bed, certificate, plain, run, service_row, until
from tests.unit.serve.test_gateway_llama import LlamaReplica, asked, llama


@asynccontextmanager
async def burdened(replica: LlamaReplica) -> AsyncIterator[None]:
    """Its engine runs for a small part of the time."""
    process = replica.process
    assert process is not None

    async def stop_and_go() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.15)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.005)

    task = asyncio.get_running_loop().create_task(stop_and_go())
    try:
        yield
    finally:
        task.cancel()
        process.send_signal(signal.SIGCONT)


def standing(one: Bed, replica: LlamaReplica) -> Standing:
    (found,) = (row for row in one.worker.gate.replicas() if f"{row.name:016x}" == replica.launch)
    return found.standing


def slow_now(one: Bed) -> dict[str, int]:
    """What the worker last said of its service."""
    last = [told["demand"] for told in one.told if "demand" in told][-1]
    return next((Demand(**row).slow for row in last if row["service"] == "m"), {})


async def asks(one: Bed, times: int, number: int = 24) -> None:
    """Streams, two at a time, each of which must arrive whole and exact."""
    for at in range(10, 10 + times):
        request = asked("/v1/completions", at, number)
        answers = await asyncio.gather(*(one.ask(request, "/v1/completions") for _ in range(2)))
        for answer in answers:
            assert answer.status == 200 and answer.whole and answer.text == counted(at, number)


def test_a_slow_replica_is_left_out_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path / "counting.gguf", "counting", layers=2, feed=2048)

    async def work() -> None:
        async with llama(tmp_path, tmp_path / "counting.gguf") as (one, (first, second)):
            await asks(one, 12)
            assert standing(one, first) == standing(one, second) == Standing.IN
            async with burdened(first):
                async with asyncio.timeout(60):
                    while standing(one, first) is Standing.IN:
                        await asks(one, 1)
                assert standing(one, second) is Standing.IN
                await until(lambda: slow_now(one).get(first.launch, 0) >= 4)
                await asks(one, 5)  # nobody waits for it
                await one_out(one, first)
            async with asyncio.timeout(60):  # well again: tried after ten seconds at the earliest, and then in again
                while standing(one, first) is not Standing.IN:
                    await asks(one, 1)
                    await asyncio.sleep(0.1)
            await until(lambda: not slow_now(one))
            assert one.worker.metrics.counts["replica_slow", "m", ""] >= 1
            assert {record.outcome for record in one.records()} == {"ok"}

    run(work())
    said = [record.getMessage() for record in caplog.records if "slow" in record.getMessage()]
    assert any("00000000000000b1 of m: slow: " in line and "left out for" in line for line in said), said
    assert said[-1] == "replica 00000000000000b1 of m: no longer slow"


async def one_out(one: Bed, slow: LlamaReplica) -> None:
    """While it is out it gets nothing; on trial, one request at a time."""
    (found,) = (row for row in one.worker.gate.replicas() if f"{row.name:016x}" == slow.launch)
    if found.standing is Standing.OUT:
        assert found.in_flight == 0
    assert found.in_flight <= 1


def test_those_who_look_see_it() -> None:
    beat = Heartbeat("m", "b1", 7, "n1", 1, "f", "s", State.READY, Abilities(), 8, Load(), None)
    demands = [Demand("m", f"h:{number}", 0, 0.0, 0, 0, 0.0, slow) for number, slow in enumerate([{}, {"b1": 4}])]
    assert replica_status(beat, 5.0, demands).slow == 4
    assert replica_status(beat, 5.0, demands[:1]).slow is None


def test_what_a_request_asks_for_makes_no_replica_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken of those alone whose length says how long they take: else a user could have replicas left out."""
    took: list[Time] = []
    forms: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"response_format": {"type": "json_object"}},
        {"n": 2}, {"grammar": "root ::= [a-z]+"},
    ]  # fmt: skip

    async def work() -> None:
        context, fingerprint = certificate(tmp_path)
        async with bed(tmp_path, services={"m": service_row()}) as one:
            one.replicas.append(await Replica(plain, context, fingerprint, "00000000000000a1").start())
            one.publish()
            monkeypatch.setattr(one.worker, "took", lambda call, time, *words, **more: took.append(time))
            for stream in (True, False):
                asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}
                for form in forms:
                    assert (await one.ask({**asked, **form})).status == 200
                assert took == ([] if stream else [Time.FIRST])
                assert (await one.ask(asked)).status == 200

    run(work())
    assert took == [Time.FIRST, Time.WHOLE]
