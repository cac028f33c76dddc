"""The life of a service while clients ask: replicas with short walltimes, and gateways that are killed.

Two controllers have a gateway each, behind one address that goes to one that lives, as a load balancer does. Replicas
are jobs of Slurm whose time is over after one or two minutes. One of the gateways is killed again and again. Whole
answers are asked for by the `openai` package with its default retries, streams by Sluice's client.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from benchmarks.serve_cluster import SERVICE, ServeCluster, serve_cluster
from benchmarks.serve_kills import ask_all
from benchmarks.serve_site import free_port
from sluice.base.errors import SluiceError

_HOSTS = ("ctl1", "ctl2")
_WHOLE_S = 600.0  # from which on walltimes and times between kills are the whole ones
_CLIENTS, _PAUSE_S = 2, 1.5
_AWAY_S = 5.0  # of a gateway that was killed, until it is started again
_READY_S = 120.0


def measure(figures: dict[str, float], seconds: float) -> None:
    """Ask for so long. Raises SluiceError."""
    walltime, every = (120, 60.0) if seconds >= _WHOLE_S else (60, 20.0)
    service: dict[str, Any] = {
        "options": ["--ctx-size", "8192", "--threads", "1"], "replicas": {"least": 2, "most": 2, "slots": 8},
        "walltime": f"{walltime}s", "ready_within": "40s", "drain_within": "10s",
    }  # fmt: skip
    with serve_cluster(service, controllers=2, layers=6, feed=2048) as site:
        _wait_ready(site)
        over, killed = threading.Event(), [0]
        killer = threading.Thread(target=_kill, args=(site, every, over, killed))
        killer.start()
        try:
            asked, failed, wrong = asyncio.run(_ask(site, seconds))
        finally:
            over.set()
            killer.join()
        ended = _ended(site)
    figures |= {
        "life_seconds": seconds,
        "life_walltime_s": float(walltime),
        "life_replicas_ended": float(len(ended)),
        "life_replicas_timed_out": float(ended.count("TIMEOUT")),
        "life_gateway_kills": float(killed[0]),
        "life_requests": float(asked),
        "life_failed": float(failed),
        "life_not_exact": float(wrong),
    }


async def _ask(site: ServeCluster, seconds: float) -> tuple[int, int, int]:
    """Through one address."""
    turns = itertools.cycle(_HOSTS)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for host in itertools.islice(turns, len(_HOSTS)):
            with suppress(OSError):
                other_reader, other_writer = await asyncio.open_connection(*site.gateway(host))
                await asyncio.gather(_pass(reader, other_writer), _pass(other_reader, writer))
                return
        writer.close()

    port = free_port()
    async with await asyncio.start_server(relay, "127.0.0.1", port):
        base = f"http://127.0.0.1:{port}"
        return await ask_all(base, site.key, seconds, model=SERVICE, clients=_CLIENTS, pause_s=_PAUSE_S)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one of the two ends; then the other one does."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def _kill(site: ServeCluster, every: float, over: threading.Event, killed: list[int]) -> None:
    for host in itertools.cycle(_HOSTS):
        if over.wait(every - _AWAY_S):
            return
        site.cluster.stop_daemon(f"gateway@{host}", number=signal.SIGKILL)
        killed[0] += 1
        over.wait(_AWAY_S)
        site.cluster.start_daemon(f"gateway@{host}")


def _wait_ready(site: ServeCluster) -> None:
    """Until both replicas run."""
    end = time.monotonic() + _READY_S
    shown = ["squeue", "--noheader", "--all", "--states=RUNNING", "--format=%i"]
    while len(site.cluster.run(shown).stdout.split()) < 2:
        if time.monotonic() > end:
            raise SluiceError("the service's replicas do not start", remedy="see the log of replicad")
        time.sleep(0.2)


def _ended(site: ServeCluster) -> list[str]:
    """States of the replicas that have ended."""
    words = ["sacct", "--allusers", "--allocations", "--noheader", "--parsable2", "--starttime=now-1days"]
    states = site.cluster.run([*words, "--format=State"]).stdout.splitlines()
    return [state.partition(" ")[0] for state in states if state not in ("PENDING", "RUNNING")]
