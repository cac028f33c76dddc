"""`sluice web` on a real slurmctld with many records: how old what it shows is, what it costs, how fast it answers.

Held and running jobs of 100 users, of which some change all the time. Nodes beyond `--daemons` are records that do not
answer. Three times of the same length: without the web process, with one viewer, with many; a viewer has a stream and
reads 100 jobs every five seconds. The peer is Debian's slurmrestd where it is installed: it has no filters, so that the
same 100 jobs are a listing of all. In Chromium, if the web process has pages, a new profile opens the page of jobs.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import httpx

from benchmarks import Result
from benchmarks.web_site import OPERATOR, PROGRAMS, USERS, Taken, WebSite, percentile, total, web_site
from dev_cluster.handle import require_root
from sluice.base.errors import SluiceError

OPTIONS = [
    click.Option(["--jobs"], type=click.IntRange(100), default=100_000, show_default=True, help="Of slurmctld."),
    click.Option(["--nodes"], type=click.IntRange(2), default=1024, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--daemons"], type=click.IntRange(1, 128), default=16, show_default=True, help="With a real slurmd."),
    click.Option(["--held"], type=click.IntRange(0, 100), default=97, show_default=True, help="Percent that are held."),
    click.Option(["--changes"], type=click.IntRange(1), default=20, show_default=True, help="A second."),
    click.Option(["--viewers"], type=click.IntRange(1, USERS), default=100, show_default=True, help="At the end."),
    click.Option(["--seconds"], type=click.IntRange(5), default=60, show_default=True, help="Of each of three times."),
    click.Option(["--requests"], type=click.IntRange(10), default=1000, show_default=True, help="That are timed."),
    click.Option(["--peer/--no-peer"], default=True, show_default=True, help="slurmrestd, for minutes and with 8 GiB."),
    click.Option(["--peers"], type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
                 help="Folder with Slurm-web; it needs --root of a tree with Slurm 24.11."),
    click.Option(["--root"], type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
                 help="A tree with another Slurm (tools/debian-tree)."),
    click.Option(["--level"], type=click.Choice(["off", "place"]), default="place", show_default=True,
                 help="Sluice's plugins; `off`: none, and no decisions to explain."),
]  # fmt: skip
MUST = {
    "age_p99_s": ("<=", 2.0),
    "viewers_rpcs_percent_of_one": ("<=", 110.0),
    "snapshot_process_mib": ("<=", 300.0),
    "jobs_100_p99_ms": ("<=", 20.0),
    "explanation_p99_ms": ("<=", 50.0),
}
_PAGE_MUST = {
    "page_usable_s": ("<=", 1.0),
    "page_first_kib": ("<=", 200.0),
    "page_refresh_kib": ("<=", 5.0),
}
_REFRESH_S = 5.0
_PACE_S = 0.01
_FILTERS = [
    "", "state=PENDING", "state=RUNNING", "user=u7", "user=u7,u8,u9&state=PENDING", "account=a3", "partition=long",
    "account=a3&sort=gpus", "partition=main&state=PENDING&sort=submit_time", "qos=normal&sort=priority",
    "node={node}", "name=train-5", "name=train-96-&user=u96", "sort=submit_time&order=ascending", "sort=start_time",
    "sort=end_time", "sort=priority&account=a1,a2,a3,a4,a5,a6,a7", "sort=gpus&partition=long&order=ascending",
]  # fmt: skip


def run(
    jobs: int, nodes: int, daemons: int, held: int, changes: int, viewers: int, seconds: int, requests: int, peer: bool,
    peers: Path | None, root: Path | None, level: str,
) -> Result:  # fmt: skip
    """Boot, fill, and measure each."""
    require_root("up")
    with web_site(nodes, min(daemons, nodes), level, root) as site:
        result = Result({"jobs": float(jobs), "nodes": float(nodes)})
        figures = result.figures
        figures["submit_per_s"] = jobs / site.fill(jobs, held)
        with site.changing(changes, jobs):
            alone = site.take(seconds)
            figures["first_snapshot_s"] = site.start_web()
            looks: list[float] = []
            with site.http(OPERATOR) as http:

                def age() -> float:
                    looks.append(site.look_cpu_ms())
                    found = http.get("/overview")
                    return time.time() - float(found.raise_for_status().json()["parts"]["jobs"]["at"])

                with _viewers(site, 1):
                    one = site.take(seconds, age)
                with _viewers(site, viewers):
                    many = site.take(seconds, age)
            _add_times(figures, alone, one, many)
            figures["look_cpu_p50_ms"] = statistics.median(looks)
            result.spread["rpcs_a_minute"] = [60 * total(taken.rpcs) / taken.seconds for taken in (alone, one, many)]
            _add_answers(result, site, requests, nodes)
            pages = _add_pages(figures, site)
            _add_memory(figures, site)
            if peer:
                _add_slurmrestd(result, site)
            if peers is not None:
                from benchmarks.web_slurmweb import measure

                result.peer |= measure(site, peers)
        result.must = dict(_PAGE_MUST) if pages else {}
        result.versions["slurm"] = site.cluster.run(["sinfo", "--version"]).stdout.split()[-1]
        return result


def _add_times(figures: dict[str, float], alone: Taken, one: Taken, many: Taken) -> None:
    figures |= {
        "age_p50_s": statistics.median(one.ages),
        "age_p99_s": percentile(one.ages, 0.99),
        "viewers_age_p50_s": statistics.median(many.ages),
        "viewers_age_p99_s": percentile(many.ages, 0.99),
        **{
            f"{when}{name}_cpu_percent": percent
            for when, taken in (("", one), ("viewers_", many), ("no_viewer_", alone))
            for name, percent in taken.percents.items()
        },
        "rpcs_a_minute": 60 * total(one.rpcs) / one.seconds,
        "viewers_rpcs_a_minute": 60 * total(many.rpcs) / many.seconds,
        "viewers_rpcs_percent_of_one": 100 * total(many.rpcs) / many.seconds / (total(one.rpcs) / one.seconds),
    }


@contextmanager
def _viewers(site: WebSite, count: int) -> Iterator[None]:
    """So many of them, each another user."""
    words = [sys.executable, "-m", "benchmarks.web_viewers", site.url, str(_REFRESH_S)]
    with subprocess.Popen(
        words, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout
        try:
            json.dump([site.tokens[f"u{number}"] for number in range(count)], program.stdin)
            program.stdin.close()
            if program.stdout.readline() != "ready\n":
                raise SluiceError("the viewers have no streams", remedy="see what they wrote")
            yield
        finally:
            program.kill()


def _timed(clients: list[httpx.Client], paths: list[str]) -> list[float]:
    """Milliseconds of each request, by users in turn: one may ask 40 times a second."""
    taken = []
    for number, path in enumerate(paths):
        began = time.perf_counter()
        found = clients[number % len(clients)].get(path)
        taken.append(1000 * (time.perf_counter() - began))
        found.raise_for_status()
        time.sleep(_PACE_S)
    return taken


def _add_answers(result: Result, site: WebSite, requests: int, nodes: int) -> None:
    choose, width = random.Random(1), len(str(nodes))
    filters = [one.format(node=f"n{1:0{width}d}") for one in _FILTERS]
    clients = [site.http(user) for user in (OPERATOR, *(f"u{number}" for number in range(20)))]
    for client in clients:
        client.get("/whoami")
    pids = {"web": site.pid(PROGRAMS["web"])}
    before = site.cpu(pids)["web"]
    lists = _timed(clients, [f"/jobs?limit=100&{filters[number % len(filters)]}" for number in range(requests)])
    result.figures["jobs_100_web_cpu_ms"] = 1000 * (site.cpu(pids)["web"] - before) / requests
    running = [job["id"] for job in clients[0].get("/jobs?state=RUNNING&limit=1000").json()["jobs"]]
    asked = [f"/jobs/{choose.choice(running or site.jobs)}/explanation" for _ in range(requests // 2)]
    asked += [f"/jobs/{choose.choice(site.jobs)}/explanation" for _ in range(requests // 2)]
    explained = _timed(clients, asked)
    for name, taken in (("jobs_100", lists), ("explanation", explained)):
        result.figures[f"{name}_p50_ms"] = statistics.median(taken)
        result.figures[f"{name}_p99_ms"] = percentile(taken, 0.99)
    worst = [max(lists[number :: len(filters)]) for number in range(len(filters))]
    result.spread["jobs_100_ms"] = [min(lists), max(lists)]
    result.versions["slowest_filter"] = filters[worst.index(max(worst))] or "none"
    result.figures["jobs_100_kib"] = len(clients[0].get("/jobs?limit=100").content) / 1024
    for client in clients:
        client.close()


def _add_memory(figures: dict[str, float], site: WebSite) -> None:
    for name, program in (("snapshot_process", "controllerd"), ("web_process", "web")):
        now, most = site.memory_mib(site.pid(PROGRAMS[program]))
        figures |= {f"{name}_mib": now, f"{name}_most_mib": most}


def _add_pages(figures: dict[str, float], site: WebSite) -> bool:
    """Whether there are pages."""
    cookie = {"cookie": f"sluice=sluice:{site.tokens[OPERATOR]}"}
    if "text/html" not in httpx.get(f"{site.url}/jobs", headers=cookie, trust_env=False).headers["content-type"]:
        return False
    from benchmarks.web_browser import measure

    figures |= measure(site.url, site.tokens[OPERATOR])
    return True


def _add_slurmrestd(result: Result, site: WebSite) -> None:
    """The same 100 jobs from slurmrestd, which lists all of them."""
    from benchmarks.web_slurmrestd import measure

    result.peer |= measure(site)
