"""A cluster with many jobs and nodes, controllerd and `sluice web` on it, and what its processes take."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.layout import INSIDE, python_in_tree
from policy.wanted import BACKFILL
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON

USERS, ACCOUNTS = 100, 20
WEB, OPERATOR = "sluice-web", "oper"
GPUS_A_NODE = 8
_PATIENCE = 3600.0
PROGRAMS = {"slurmctld": "slurmctld", "controllerd": "main controllerd", "web": r"sluice(\.main)? web"}
"""Whose time is taken, with words of their command lines."""
_BACKFILL = ",".join(f"{name}={value}" if value else name for name, value in BACKFILL.items())
"""As `sluice apply` writes them at level place."""
_SUBMITTERS = 3
_TOKENS = """
import json, sys, time
from sluice.base.tokens import SCOPES, TokenStore
users = sys.argv[1:]
print(json.dumps({user: TokenStore().create(user, SCOPES, now=time.time(), seconds=86400)[1] for user in users}))
"""


@dataclass
class Taken:
    """What a time of the site took."""

    seconds: float
    percents: dict[str, float]
    """Of a processor, by program."""
    rpcs: dict[str, int]
    """Reads that slurmctld answered, by message type."""
    ages: list[float] = field(default_factory=list)


@dataclass
class WebSite:
    """The cluster, with its web process once it is started."""

    cluster: DevCluster
    jobs: list[int] = field(default_factory=list)
    """Those that are not held."""
    port: int = 0
    """Of the web process; 0: it does not run."""
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the web process."""
        return f"http://127.0.0.1:{self.port}"

    def fill(self, count: int, held_percent: int) -> float:
        """Submit jobs; the seconds that it took. Raises SluiceError."""
        program = self._program()
        began, share = time.monotonic(), -(-count // _SUBMITTERS)
        running = []
        for number in range(_SUBMITTERS):
            words = ["submit", number * share, min(share, count - number * share), held_percent, USERS, ACCOUNTS]
            line = self.cluster.command([program, *map(str, words)], cwd="/")
            running.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
        for one in running:
            said, _ = one.communicate(timeout=_PATIENCE)
            if one.returncode:
                raise SluiceError("a job of the benchmark was refused", remedy="see slurmctld's log")
            self.jobs += [int(line) for line in said.split()]
        return time.monotonic() - began

    @contextmanager
    def changing(self, per_second: int, last: int) -> Iterator[None]:
        """So many jobs a second get another comment."""
        line = self.cluster.command([self._program(), "change", *map(str, (per_second, 36_000, 1, last))], cwd="/")
        with subprocess.Popen(line, stderr=subprocess.DEVNULL) as program:
            try:
                yield
            finally:
                program.kill()

    def _program(self) -> Path:
        """Where the cluster has it, made with the libraries of its Slurm."""
        made, tree = self.cluster.layout.scratch / "web_load", self.cluster.facts["root"]
        if not made.exists():
            source = Path(__file__).with_name("web_load.c")
            words = ["gcc", "-O2", "-o", str(made), str(source), "-lslurm"]
            if tree is not None:
                library = f"{tree}/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
                words += [f"-I{tree}/usr/include", f"-L{library}", "-Wl,--allow-shlib-undefined"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SluiceError(f"{source.name}: {done.stderr.strip()[-300:]}", remedy="install libslurm-dev")
        return INSIDE / "scratch/web_load"

    def start_web(self) -> float:
        """Start the web process; seconds until it has a snapshot. Raises SluiceError."""
        words = ["-c", _TOKENS, OPERATOR, *(f"u{number}" for number in range(USERS))]
        words = [*PYTHON, *words] if self.cluster.facts["root"] is None else python_in_tree(words)
        root = str(Path(__file__).parent.parent)
        made = self.cluster.run(words, node="ctl1", cwd="/", env={"PYTHONPATH": root}, timeout=300)
        self.tokens = json.loads(made.stdout)
        self.cluster.run(["chgrp", WEB, "/etc/sluice/tokens.json"], node="ctl1", cwd="/")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.cluster.start_program("web", ["sluice", "web", "--port", str(self.port), "-v"], node="ctl1", user=WEB)
        began = time.monotonic()
        with self.http(OPERATOR) as http:
            while not self._complete(http):
                if time.monotonic() > began + 300:
                    raise SluiceError("sluice web has no snapshot", remedy=self.cluster.log_tail("web", 10))
                time.sleep(0.2)
        return time.monotonic() - began

    @staticmethod
    def _complete(http: httpx.Client) -> bool:
        try:
            found = http.get("/overview")
        except httpx.TransportError:
            return False
        parts = found.json().get("parts", {}) if found.status_code == 200 else {}
        return all(parts.get(name, {}).get("at") for name in ("jobs", "nodes", "users"))

    def http(self, user: str) -> httpx.Client:
        """A connection as a user."""
        headers = {"authorization": f"Bearer {self.tokens[user]}"}
        return httpx.Client(base_url=self.url + "/api/v1", headers=headers, timeout=60, trust_env=False)

    # ---- what it takes ----

    def pid(self, words: str) -> int:
        """The process on the controller whose command line has these words; the first one."""
        return int(self.cluster.run(["pgrep", "-o", "-f", words], node="ctl1", cwd="/").stdout.split()[0])

    def memory_mib(self, pid: int) -> tuple[float, float]:
        """What a process has in memory now, and had at most."""
        text = self.cluster.run(["cat", f"/proc/{pid}/status"], node="ctl1", cwd="/").stdout
        now, most = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
        return tuple(int(one[1]) / 1024 if one else 0.0 for one in (now, most))  # type: ignore[return-value]

    def take(self, seconds: float, look: Callable[[], float] | None = None) -> Taken:
        """What so many seconds take; `look` gives the age of the snapshot, a few times a second."""
        pids = {name: self.pid(words) for name, words in PROGRAMS.items() if name != "web" or self.port}
        self.cluster.run(["sdiag", "--reset"])
        before, began, ages = self.cpu(pids), time.monotonic(), []
        while time.monotonic() < began + seconds:
            if look is not None:
                ages.append(look())
            time.sleep(0.25)
        took, after = time.monotonic() - began, self.cpu(pids)
        percents = {name: 100 * (after[name] - before[name]) / took for name in pids}
        return Taken(took, percents, reads(self.cluster.run(["sdiag"]).stdout), ages)

    def look_cpu_ms(self) -> float:
        """What the last look of the plugins at all jobs took of a processor; 0 where none look."""
        path = self.cluster.layout.state / "sluice.status.ctl1"
        counters = json.loads(path.read_text())["counters"] if path.exists() else {}
        return float(counters.get("changes.look_cpu_us_last", 0)) / 1000

    def cpu(self, pids: Mapping[str, int]) -> dict[str, float]:
        """Seconds of processors that they have had."""
        paths = [f"/proc/{pid}/stat" for pid in pids.values()]
        lines = self.cluster.run(["cat", *paths], node="ctl1", cwd="/").stdout.splitlines()
        words = [line.rpartition(")")[2].split() for line in lines]
        ticks = os.sysconf("SC_CLK_TCK")
        return {name: (int(one[11]) + int(one[12])) / ticks for name, one in zip(pids, words, strict=True)}


def reads(text: str) -> dict[str, int]:
    """Of sdiag's report: requests that only read, by message type, without its own."""
    found = re.findall(r"^\s*(REQUEST_\w*INFO\w*)\s+\(\s*\d+\) count:(\d+)", text, re.MULTILINE)
    return {name: int(count) for name, count in found if "STATS" not in name}


@contextmanager
def web_site(nodes: int, daemons: int, level: str, root: Path | None = None) -> Iterator[WebSite]:
    """Boot it: `daemons` nodes have a real slurmd, the others are records that do not answer. `root`: a tree with
    another Slurm."""
    width = len(str(nodes))
    rest = f"m[{1:0{width}d}-{nodes - daemons:0{width}d}]"
    records = (
        f"NodeName={rest} NodeAddr=127.0.0.1 Port=9 CPUs=112 RealMemory=1000000 State=UNKNOWN "
        f"Gres=gpu:h100:{GPUS_A_NODE},shard:{80_000 * GPUS_A_NODE}\n"
        if nodes > daemons
        else ""
    )
    described: dict[str, Any] = {
        "nodes": [{"names": f"n[{1:0{width}d}-{daemons:0{width}d}]", "platform": "dgx-h100"}],
        "controllers": 1,
        "controllerd": True,
        "partitions": [{"name": "main"}, {"name": "long"}],
        "accounts": [{"name": f"a{number}"} for number in range(ACCOUNTS)],
        "users": [
            *({"name": f"u{number}", "accounts": [f"a{number % ACCOUNTS}"]} for number in range(USERS)),
            {"name": OPERATOR, "accounts": ["a0"]},
            {"name": WEB, "accounts": ["a0"]},
        ],
        "slurm_conf": "MaxJobCount=250000\nMessageTimeout=100\nMinJobAge=36000\nSlurmdTimeout=0\nMaxDBDMsgs=600000\n"
        f"SchedulerParameters=defer,default_queue_depth=500,{_BACKFILL}\n{records}",
        "sluice": {"level": level} if level != "off" else False,
    }
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = DevCluster(folder / "cluster")
        parsed = parse_description(yaml.safe_dump(described), source="benchmark")
        cluster.up(parsed, attached=True, timeout=900, root=root)
        try:
            cluster.run(["sacctmgr", "-i", "modify", "user", OPERATOR, "set", "AdminLevel=Operator"])
            yield WebSite(cluster)
        finally:
            cluster.down()


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def total(rpcs: Mapping[str, int]) -> int:
    """All of them."""
    return sum(rpcs.values())
