"""The gateway of model services: what it costs a request, how it holds limits, and what clients see when things die.

Engines that do nothing (serve_load.c) stand for models where the gateway itself is measured; where text must be exact,
llama.cpp runs the tests' model whose words are known. Replicas are TLS servers with a secret, as in jobs; peers have
the same engine without TLS. `python -m benchmarks.serve_peers FOLDER` installs the peers that `--peers` names; nginx is
Debian's. CPU is that of a gateway's processes, all of them. Latencies are added ones: those of the engine itself, asked
in turns, are subtracted.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result
from benchmarks.serve_peers import NAMES, limited_litellm, peer, redis, version
from benchmarks.serve_site import GatewaySite, Load, cpu_s, engine, free_port, limit, memory_mib, quantile
from dev_cluster.handle import require_root
from sluice.base.errors import UsageError

OPTIONS = [
    click.Option(["--only"], default="", metavar="PART,...", help="Some of the parts (default: all)."),
    click.Option(["--peer/--no-peer"], default=True, show_default=True, help="nginx, LiteLLM, vllm-router, ..."),
    click.Option(["--peers"], type=click.Path(path_type=Path, exists=True), help="Where serve_peers installed them."),
    click.Option(
        ["--seconds"],
        type=click.FloatRange(1),
        default=5.0,
        show_default=True,
        help="Of each measurement; of life at least 90.",
    ),
    click.Option(["--rounds"], type=click.IntRange(1), default=3, show_default=True, help="Of those in turns."),
    click.Option(["--streams"], type=click.IntRange(10), default=1000, show_default=True, help="With replicas killed."),
    click.Option(["--kill-minutes"], type=click.FloatRange(0.2), default=1.0, show_default=True, help="Of gateways."),
    click.Option(["--starts"], type=click.IntRange(1), default=20, show_default=True, help="From zero replicas."),
]
MUST: dict[str, tuple[str, float]] = {}
_MUST = {
    "cpu_us": ("<=", 300.0),
    "added_p50_ms": ("<=", 0.5),
    "added_p99_ms": ("<=", 2.0),
    "added_first_token_ms": ("<=", 0.5),
    "held_back_p99_ms": ("<=", 1.0),
    "streams_broken": ("==", 0.0),
    "streams_not_exact": ("==", 0.0),
    "gateway_kills_failed": ("==", 0.0),
    "life_failed": ("==", 0.0),
    "life_not_exact": ("==", 0.0),
    "from_zero_p95_s": ("<=", 3.0),
    "broadcast_storage_read_times": ("<=", 1.5),
    "broadcast_ucx_storage_read_times": ("<=", 1.5),
    "over_admitted_requests": ("==", 0.0),
    "over_admitted_tokens": ("==", 0.0),
    "over_admitted_concurrent": ("==", 0.0),
    "requests_limit_use_percent": (">=", 99.0),
    "tokens_limit_use_percent": (">=", 99.0),
    "hosts_over_admitted_requests": ("==", 0.0),
    "hosts_over_admitted_tokens": ("==", 0.0),
    "hosts_over_admitted_concurrent": ("==", 0.0),
    "hosts_requests_limit_use_percent": (">=", 99.0),
    "hosts_tokens_limit_use_percent": (">=", 99.0),
    "neighbour_first_token_p99_percent": ("<=", 110.0),
    "embeddings_batched_ratio": (">=", 3.0),
    "overload_goodput_percent": (">=", 95.0),
    "overload_memory_percent": ("<=", 110.0),
}
_LAUNCH = "00000000000000a1"
_TOKENS = 50
"""Of a request where tokens are limited; nine are the prompt, as the engine says."""
_MUCH = {"requests_per_minute": 100_000_000, "tokens_per_minute": 1_000_000_000, "concurrent": 100_000}


@dataclass
class Bench:
    """What the parts share."""

    result: Result
    peers: Path | None
    names: tuple[str, ...]
    """Of the peers that are there."""
    seconds: float
    rounds: int
    streams: int
    kill_minutes: float
    starts: int
    figures: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.figures = self.result.figures


class Fast(ExitStack):
    """A site with one replica and, on `plain`, its engine without TLS."""

    def __init__(self, delay_us: int = 0, gap_us: int = 0, slots: int = 1024) -> None:
        super().__init__()
        self.site = self.enter_context(GatewaySite())
        self.port, self.plain = free_port(), free_port()
        program = self.site.program
        self.enter_context(engine(program, self.port, delay_us, gap_us, slots, *self.site.tls_engine()))
        self.enter_context(engine(program, self.plain, delay_us, gap_us, slots))
        self.site.add_replica(_LAUNCH, self.port, slots)

    def load(self, port: int, keys: list[str], connections: int, seconds: float, **words: Any) -> Load:
        """Start one."""
        return Load(self.site.program, self.site.folder, port, keys, connections, seconds, **words)

    def most(self) -> int:
        """How many requests the replica had at once."""
        return int(json.loads(self.site.ask_replica(self.port))["data"][0]["created"])

    def limited(self, users: int) -> list[str]:
        """Users with limits of every kind that hold nobody up; their keys."""
        names = [f"u{number}" for number in range(users)]
        kinds = [limit(kind, "*", **_MUCH) for kind in ("key", "user", "tenant", "service")]
        self.site.publish({name: f"t{name}" for name in names}, kinds)
        return self.site.keys(*names)


# ---- what a request costs ----


def cpu(bench: Bench) -> None:
    """CPU of one request, key, limits and accounting on, and of one that streams 64 tokens."""
    with Fast() as at:
        keys = at.limited(16)
        at.site.start(2)
        found: dict[str, list[float]] = {}

        def measure(name: str, port: int, pid: int, seconds: float, given: list[str]) -> None:
            for kind, words in (("", {"max_tokens": 16}), ("stream_", {"max_tokens": 64, "stream": True})):
                before = cpu_s(pid)
                good = len(at.load(port, given, 16, seconds, **words).wait().good)
                found.setdefault(f"{name}{kind}cpu_us", []).append(1e6 * (cpu_s(pid) - before) / max(good, 1))

        port = int(at.site.ports[-1])
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(peer(name, bench.peers, at.site.folder, [at.plain], "sk-1"))
                for name in bench.names
            }
            for _ in range(bench.rounds):
                measure("", port, at.site.gateway, bench.seconds, keys)
                for name, one in running.items():
                    measure(f"{name}_", one.port, one.pid, bench.seconds, ["sk-1"])
        logged = at.site.start(2, access_log=True)
        measure("access_log_", logged, at.site.gateway, bench.seconds, keys)
    for name, values in found.items():
        bench.figures[name] = median(values)
        bench.result.spread[name] = values
    for kind in ("", "stream_"):
        if f"vllm_router_{kind}cpu_us" in found:
            bench.result.peer[f"{kind}cpu_us"] = bench.figures[f"vllm_router_{kind}cpu_us"]


def latency(bench: Bench) -> None:
    """What a gateway adds to one connection's answers."""
    with Fast() as at, ExitStack() as stack:
        keys = at.limited(1)
        ports = {"": at.site.start(1), "direct_": at.plain}
        for name in bench.names:
            if name != "litellm":  # 30 ms of it say nothing in so short a time
                found = stack.enter_context(peer(name, bench.peers, at.site.folder, [at.plain], "sk-1"))
                ports[f"{name}_"] = found.port
        times: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(bench.rounds):
            for name, port in ports.items():
                good = at.load(port, keys, 1, bench.seconds, max_tokens=16).wait().good
                times[name] += [row[3] / 1000 for row in good[20:]]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        direct = quantile(times["direct_"], share)
        bench.figures[f"direct_{name}_ms"] = direct
        for who, values in times.items():
            if who != "direct_":
                bench.figures[f"{who}added_{name}_ms"] = quantile(values, share) - direct
        if "vllm_router_" in times:
            bench.result.peer[f"added_{name}_ms"] = bench.figures[f"vllm_router_added_{name}_ms"]


def stream(bench: Bench) -> None:
    """What it adds to a stream: to the first token, and to each."""
    with Fast(delay_us=5000, gap_us=5000) as at, ExitStack() as stack:
        keys = at.limited(4)
        ports = {"": at.site.start(2), "direct_": at.plain}
        for name in bench.names:
            if name != "litellm":
                found = stack.enter_context(peer(name, bench.peers, at.site.folder, [at.plain], "sk-1"))
                ports[f"{name}_"] = found.port
        first: dict[str, list[float]] = {name: [] for name in ports}
        held: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(bench.rounds):
            for name, port in ports.items():
                answers = at.load(port, keys, 4, bench.seconds, max_tokens=32, stream=True).wait()
                first[name] += [row[2] / 1000 for row in answers.good[4:]]
                held[name] += [one / 1000 for one in answers.held]
    for who in ports:
        if who != "direct_":
            bench.figures[f"{who}added_first_token_ms"] = median(first[who]) - median(first["direct_"])
        bench.figures[f"{who}held_back_p50_ms"] = median(held[who])
        bench.figures[f"{who}held_back_p99_ms"] = quantile(held[who], 0.99)
    if "vllm_router_" in ports:
        for name in ("added_first_token_ms", "held_back_p99_ms"):
            bench.result.peer[name] = bench.figures[f"vllm_router_{name}"]


# ---- limits ----


def limits(bench: Bench) -> None:
    """How exactly 4 processes hold a tenant's limits before 64 clients, who want far more."""
    seconds, clients = 2 * bench.seconds, 64
    for what, most in (("requests", 1200), ("tokens", 60_000)):
        with Fast() as at:
            keys = _one_tenant(at, clients, **{f"{what}_per_minute": most})
            answers = at.load(at.site.start(4), keys, clients, seconds, max_tokens=_TOKENS - 9).wait()
            good = answers.good
            used = len(good) if what == "requests" else _TOKENS * len(good)
            # A bucket that is full at first, and refills: what it has until the last answer was asked for at most.
            began = min(row[0] for row in answers.rows)
            allowed = most + most * (max(row[0] + row[3] for row in good) - began) / 60e6
            bench.figures[f"over_admitted_{what}"] = max(0.0, math.floor(used - allowed))
            bench.figures[f"{what}_limit_use_percent"] = 100 * used / allowed
            bench.figures[f"{what}_refused_per_s"] = sum(row[1] == 429 for row in answers.rows) / seconds
            odd = sum(row[1] not in (200, 429) or not row[5] for row in answers.rows)
            bench.figures[f"{what}_limit_other_answers"] = odd
    with Fast(delay_us=20_000) as at:
        keys = _one_tenant(at, clients, concurrent=8, queued=0)
        answers = at.load(at.site.start(4), keys, clients, seconds, max_tokens=4).wait()
        bench.figures["over_admitted_concurrent"] = max(0.0, at.most() - 8)
        bench.figures["concurrent_answers_per_s"] = len(answers.good) / seconds

    if bench.peers is not None and "litellm" in bench.names and redis() is not None:
        _litellm_limits(bench, bench.peers, clients)


def _litellm_limits(bench: Bench, peers: Path, clients: int) -> None:
    """The same of LiteLLM with 4 workers and Redis; its minute begins with its first request, so that a shorter run may
    have a minute's worth. Of that, what it can answer on two processors within 20 s."""
    most, seconds = 300, 20.0
    for what, limits in (("requests", {"rpm_limit": most}), ("tokens", {"tpm_limit": most * _TOKENS})):
        with Fast() as at, limited_litellm(peers, at.site.folder, at.plain, 4, **limits) as found:
            answers = at.load(found.port, ["sk-1"], clients, seconds, max_tokens=_TOKENS - 9).wait()
        good = len(answers.good)
        unit = 1 if what == "requests" else _TOKENS
        bench.figures[f"litellm_over_admitted_{what}"] = bench.result.peer[f"over_admitted_{what}"] = float(
            max(0, good - most) * unit
        )
        bench.figures[f"litellm_{what}_limit_use_percent"] = 100 * good / most
        odd = sum(row[1] not in (200, 429) or not row[5] for row in answers.rows)
        bench.figures[f"litellm_{what}_limit_other_answers"] = odd
    with Fast(delay_us=20_000) as at:
        with limited_litellm(peers, at.site.folder, at.plain, 4, max_parallel_requests=8) as found:
            answers = at.load(found.port, ["sk-1"], clients, seconds, max_tokens=4).wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{at.plain}/v1/models", timeout=10) as shown:
            together = int(json.load(shown)["data"][0]["created"])
        bench.figures["litellm_over_admitted_concurrent"] = float(max(0, together - 8))
        bench.result.peer["over_admitted_concurrent"] = bench.figures["litellm_over_admitted_concurrent"]
        bench.figures["litellm_concurrent_answers_per_s"] = len(answers.good) / seconds


def hosts(bench: Bench) -> None:
    """How exactly two gateways without common memory hold a tenant's limits, first both with half of the clients each,
    then one with all of them, then the other."""
    seconds, clients = 2 * bench.seconds, 64
    for what, most in (("requests", 1200), ("tokens", 60_000)):
        with Fast() as at:
            keys = _one_tenant(at, clients, **{f"{what}_per_minute": most})
            ports = at.site.start(2), at.site.start(2)
            rows: list[tuple[int, int, int, int, int, bool]] = []
            for turn in (ports, ports[:1], ports[1:]):
                running = [at.load(port, keys, clients // len(turn), seconds, max_tokens=_TOKENS - 9) for port in turn]
                rows += [row for one in running for row in one.wait().rows]
            good = [row for row in rows if row[1] == 200]
            used = len(good) * (1 if what == "requests" else _TOKENS)
            allowed = most + most * (max(row[0] + row[3] for row in good) - min(row[0] for row in rows)) / 60e6
            bench.figures[f"hosts_over_admitted_{what}"] = max(0.0, math.floor(used - allowed))
            bench.figures[f"hosts_{what}_limit_use_percent"] = 100 * used / allowed
            odd = sum(row[1] not in (200, 429) or not row[5] for row in rows)
            bench.figures[f"hosts_{what}_other_answers"] = odd
    with Fast(delay_us=20_000) as at:
        keys = _one_tenant(at, clients, concurrent=8, queued=0)
        ports = at.site.start(2), at.site.start(2)
        running = [at.load(port, keys, clients // 2, seconds, max_tokens=4) for port in ports]
        good = [row for one in running for row in one.wait().good]
        bench.figures["hosts_over_admitted_concurrent"] = max(0.0, at.most() - 8)
        bench.figures["hosts_concurrent_answers_per_s"] = len(good) / seconds


def _one_tenant(at: Fast, clients: int, **words: int) -> list[str]:
    names = [f"u{number}" for number in range(clients)]
    at.site.publish(dict.fromkeys(names, "physics"), [limit("tenant", "physics", **words)])
    return at.site.keys(*names)


def tenants(bench: Bench) -> None:
    """First tokens of a tenant while another one sends ten times its limit."""
    alone: list[float] = []
    together: list[float] = []
    refused = 0
    with Fast(delay_us=20_000, gap_us=2000, slots=8) as at:
        at.site.publish(
            {"quiet": "quiet", "loud": "loud"},
            [
                limit("tenant", "loud", requests_per_minute=600, concurrent=4, queued=16),
                limit("tenant", "quiet", **_MUCH),
            ],
            slots=8,
        )
        quiet, loud = at.site.keys("quiet", "loud")
        port = at.site.start(2)
        body: Mapping[str, Any] = {"max_tokens": 8, "stream": True}
        at.load(port, [loud], 16, 3.0, rate=200, **body).wait()  # the minute's worth that its bucket has at first
        for _ in range(bench.rounds):
            answers = at.load(port, [quiet], 2, bench.seconds, rate=20, **body).wait()
            alone += [row[2] / 1000 for row in answers.good]
            other = at.load(port, [loud], 32, bench.seconds, rate=100, **body)
            answers = at.load(port, [quiet], 2, bench.seconds, rate=20, **body).wait()
            together += [row[2] / 1000 for row in answers.good]
            refused += sum(row[1] == 429 for row in other.wait().rows)
    bench.figures["alone_first_token_p99_ms"] = quantile(alone, 0.99)
    bench.figures["neighbour_first_token_p99_ms"] = quantile(together, 0.99)
    bench.figures["neighbour_first_token_p99_percent"] = 100 * quantile(together, 0.99) / quantile(alone, 0.99)
    bench.figures["neighbour_first_token_p50_percent"] = 100 * median(together) / median(alone)
    bench.figures["loud_refused"] = refused


def overload(bench: Bench) -> None:
    """Five times of what the replica can do."""
    slots, delay_s = 8, 0.08
    capacity = slots / delay_s
    with Fast(delay_us=int(1e6 * delay_s), slots=slots) as at:
        names = [f"u{number}" for number in range(8)]
        at.site.publish(
            {name: f"t{name}" for name in names},
            [*(limit(kind, "*", **_MUCH) for kind in ("key", "user")), limit("service", "*", queued=64)],
            slots=slots,
        )
        keys = at.site.keys(*names)
        port = at.site.start(2)
        at.load(port, keys, 8, 1.0, max_tokens=8).wait()
        seconds = 2 * bench.seconds
        peak = len(at.load(port, keys, 12, seconds, max_tokens=8).wait().good)
        before = memory_mib(at.site.gateway)
        answers = at.load(port, keys, 768, seconds, rate=5.1 * capacity, max_tokens=8).wait()
        after = memory_mib(at.site.gateway)
        began = min(row[0] for row in answers.rows)
        within = [row for row in answers.good if row[0] + row[3] <= began + 1e6 * seconds]
    bench.figures["overload_peak_per_s"] = peak / seconds
    bench.figures["overload_goodput_percent"] = 100 * len(within) / peak
    bench.figures["overload_offered_times"] = len(answers.rows) / (capacity * seconds)
    bench.figures["overload_memory_mib"] = after
    bench.figures["overload_memory_percent"] = 100 * after / before
    bench.figures["overload_other_answers"] = sum(row[1] not in (200, 429, 503, 504) for row in answers.rows)


def kills(bench: Bench) -> None:
    """Streams of a real engine, whose replicas are killed."""
    from benchmarks.serve_kills import peers, replicas

    replicas(bench.figures, bench.streams)
    peers(bench.figures, bench.streams, bench.peers, [name for name in bench.names if name.endswith("_router")])
    if "vllm_router_streams_broken" in bench.figures:
        bench.result.peer["streams_broken"] = bench.figures["vllm_router_streams_broken"]


def gateways(bench: Bench) -> None:
    """Requests to two gateways of one address, of which one after the other is killed."""
    from benchmarks.serve_kills import gateways as measure

    measure(bench.figures, bench.kill_minutes)


def embeddings(bench: Bench) -> None:
    """Short texts of many clients, put into batches by a real engine."""
    from benchmarks.serve_embeddings import measure

    measure(bench.figures, bench.seconds, bench.rounds)


def life(bench: Bench) -> None:
    """A service whose replicas' time is over again and again, and whose gateways are killed."""
    from benchmarks.serve_life import measure

    measure(bench.figures, max(90.0, bench.seconds))


def zero(bench: Bench) -> None:
    """From no replica to the first token, each time a job of Slurm."""
    from benchmarks.serve_zero import measure

    measure(bench.figures, bench.starts)


def broadcast(bench: Bench) -> None:
    """A model of 128 MiB for eight nodes at once, from a storage that gives 32 MiB a second in all; and from one node
    to another, over TCP and UCX in turns."""
    from benchmarks.serve_broadcast import measure

    measure(bench.figures, 8, 128, 32.0)


PARTS: Mapping[str, Callable[[Bench], None]] = {
    "cpu": cpu, "latency": latency, "stream": stream, "limits": limits, "hosts": hosts, "tenants": tenants,
    "overload": overload, "kills": kills, "gateways": gateways, "embeddings": embeddings, "life": life, "zero": zero,
    "broadcast": broadcast,
}  # fmt: skip


def run(
    only: str,
    peer: bool,
    peers: Path | None,
    seconds: float,
    rounds: int,
    streams: int,
    kill_minutes: float,
    starts: int,
) -> Result:  # fmt: skip
    """All parts, or some."""
    require_root("up")
    wanted = only.split(",") if only else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise UsageError(f"--only {unknown[0]}: no part", remedy=f"name some of {', '.join(PARTS)}")
    result = Result({})
    versions = {name: version(name, peers) for name in NAMES} if peer else {}
    result.versions = {name: found for name, found in versions.items() if found}
    bench = Bench(result, peers, tuple(result.versions), seconds, rounds, streams, kill_minutes, starts)
    for name in wanted:
        PARTS[name](bench)
    result.must = {name: bound for name, bound in _MUST.items() if name in result.figures}
    return result
