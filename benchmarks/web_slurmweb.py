"""Slurm-web as the peer of `benchmarks web`: its page of jobs in Chromium, next to ours, of the same slurmctld.

`--peers DIR` names a folder with `venv` (slurm-web and its agent's packages), `conf` (its folder conf/vendor) and
`dist` (its built frontend); docs/benchmarks.md says how it is made. slurmrestd and redis-server are Debian's.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.web_browser import browser_at
from benchmarks.web_site import WebSite, total
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError

_USER = "u0"
_CLUSTER = "bench"
_WATCH_S = 60.0
_PATIENCE_S = 900.0
_LINK = f'a[href="/{_CLUSTER}/jobs"]'
_ROWS = 100  # of a page
_SIZES = "return performance.getEntriesByType('resource').map(one => [one.name, one.transferSize])"


def measure(site: WebSite, peers: Path) -> dict[str, float]:
    """Figures of its page of jobs; those of slurmctld are of the time in which one browser looks at it.

    The page is opened from its dashboard: its own address, opened first, says "Cluster not found".
    """
    site.cluster.stop_daemon("web")  # what is read for it is not the peer's
    site.port = 0
    with _slurm_web(site, peers) as url, browser_at() as browser:
        began = time.monotonic()
        browser.get(url)
        _until(lambda: browser.execute_script(f"return document.querySelector({_LINK!r}) !== null"))
        browser.execute_script(f"document.querySelector({_LINK!r}).click()")
        clicked = time.monotonic()
        _until(lambda: browser.execute_script("return document.querySelectorAll('table tbody tr').length") >= _ROWS)
        usable = time.monotonic()
        first = browser.execute_script(_SIZES)
        taken = site.take(_WATCH_S)
        later = browser.execute_script(_SIZES)[len(first) :]
        lists = [size for name, size in later if name.endswith("/jobs") and size]
        return {
            "page_usable_s": usable - began,
            "page_usable_after_dashboard_s": usable - clicked,
            "page_first_kib": sum(size for _, size in first) / 1024,
            "page_refresh_kib": statistics.median(lists or [0]) / 1024,
            "page_refreshes_a_minute": 60 * len(lists) / _WATCH_S,
            "slurmctld_cpu_percent": taken.percents["slurmctld"],
            "rpcs_a_minute": 60 * total(taken.rpcs) / taken.seconds,
        }


@contextmanager
def _slurm_web(site: WebSite, peers: Path) -> Iterator[str]:
    """slurmrestd, Redis, agent and gateway, without log-in; where the gateway is. Raises SluiceError."""
    folder = site.cluster.layout.scratch / "slurmweb"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    restd = f"{INSIDE}/scratch/slurmweb/restd"
    site.cluster.start_program("slurmrestd", ["slurmrestd", "-a", "rest_auth/local", f"unix:{restd}"], user=_USER)
    _until((folder / "restd").exists)
    agent, gateway, redis = (_free_port() for _ in range(3))
    (folder / "key").write_text("0" * 64)
    conf = peers / "conf"
    texts = {
        "agent": f"""[service]
cluster={_CLUSTER}
port={agent}
[slurmrestd]
uri=unix://{folder}/restd
auth=local
[policy]
definition={conf}/policy.yml
vendor_roles={conf}/policy.ini
[jwt]
key={folder}/key
[racksdb]
enabled=no
[cache]
enabled=yes
port={redis}
""",
        "gateway": f"""[service]
port={gateway}
[ui]
path={peers}/dist
templates={conf}/templates
[agents]
url=http://localhost:{agent}
[jwt]
key={folder}/key
""",
    }
    # slurmrestd answers its own user alone, and sees who asks only in its own namespace of processes.
    inside = next(word for word in site.cluster.command(["true"]) if word.startswith("--pid="))
    uid = site.cluster.run(["id", "-u", _USER]).stdout.strip()
    become = ["nsenter", inside, "setpriv", f"--reuid={uid}", "--regid=65534", "--clear-groups"]
    with ExitStack() as stack:

        def start(name: str, words: list[str]) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            program = stack.enter_context(subprocess.Popen(words, stdout=log, stderr=log, cwd="/"))
            stack.callback(program.kill)

        where = shutil.which("redis-server", path=f"{peers}:/usr/bin")
        if where is None:
            raise SluiceError("redis-server: not there", remedy=f"install it, or put it into {peers}")
        start("redis", [where, "--port", str(redis), "--save", "", "--dir", str(folder)])
        for name, text in texts.items():
            (folder / f"{name}.ini").write_text(text)
            words = [f"{peers}/venv/bin/slurm-web", name, "--conf-defs", f"{conf}/{name}.yml"]
            start(name, [*become, *words, "--conf", f"{folder}/{name}.ini", "--log-flags", "slurmweb"])
        for port, path in ((agent, "/info"), (gateway, "/")):
            _until(partial(_answers, f"http://localhost:{port}{path}"), lambda: _end_of(folder / "agent.log"))
        yield f"http://localhost:{gateway}"


def _end_of(path: Path) -> str:
    return path.read_text()[-2000:]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=600, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _until(seen: Callable[[], Any], said: Callable[[], str] = lambda: "see its log") -> None:
    end = time.monotonic() + _PATIENCE_S
    while not seen():
        if time.monotonic() > end:
            raise SluiceError("Slurm-web does not answer", remedy=said())
        time.sleep(0.1)
