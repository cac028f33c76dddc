"""Pools of nodes on real daemons: from a node's registration to its job, and from a stock-out to another type.

Two clusters of the same pool run side by side, without and with Sluice's plugins in slurmctld: without, a job waits for
slurmctld's own look at jobs whose nodes boot. Jobs of one node each come a second apart, so that they meet that look at
all its ages. A node's registration is what slurmctld logs of it, and a job runs when its script's first command does.
Then the provider has no machine of the first type any more, and a job of several nodes comes.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import run_command
from sluice.exchange.fleet import Event, read_status

OPTIONS = [
    click.Option(["--jobs"], type=click.IntRange(2, 200), default=40, show_default=True, help="Of each arm."),
    click.Option(
        ["--every"], type=click.FloatRange(0, 60), default=1.0, show_default=True, help="Seconds between two."
    ),
    click.Option(
        ["--stock-outs"], type=click.IntRange(1, 50), default=5, show_default=True, help="Nodes that meet one."
    ),
    click.Option(["--plugins"], default="", help="Folder of built plugins; default: built for the installed Slurm."),
]
MUST = {"registered_to_runs_p95_s": ("<=", 1.0), "stock_out_to_other_type_max_s": ("<=", 5.0)}
_PATIENCE_S = 180.0
_LOG = "state/slurmctld.log"
_RAN = "ran"
_REGISTERED = re.compile(r"^\[([^\]]+)\] Node (\S+) now responding", re.MULTILINE)


def run(jobs: int, every: float, stock_outs: int, plugins: str) -> Result:
    """Both arms at once, then the stock-outs of ours."""
    require_root("up")
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/run") as name:
        folder = Path(name)
        folder.chmod(0o755)
        arms = {arm: DevCluster(folder / arm) for arm in ("stock", "sluice")}
        try:
            for arm, cluster in arms.items():
                sluice = {"level": "admit"} | ({"plugins": plugins} if plugins else {}) if arm == "sluice" else None
                described = yaml.safe_dump(_description(jobs + stock_outs, sluice))
                cluster.up(parse_description(described, source="benchmark"), timeout=_PATIENCE_S, attached=True)
            for _ in range(jobs):
                for cluster in arms.values():
                    _submit(cluster)
                time.sleep(every)
            waits = {arm: _waits(cluster, jobs) for arm, cluster in arms.items()}
            switches = _stock_out(arms["sluice"], stock_outs)
        finally:
            for cluster in arms.values():
                cluster.down()
    figures = _figures(waits["sluice"])
    figures["stock_out_to_other_type_max_s"] = round(max(switches), 3)
    return Result(
        figures,
        peer=_figures(waits["stock"]),
        spread={"registered_to_runs_s": [round(min(waits["sluice"]), 3), round(max(waits["sluice"]), 3)]},
        versions={"slurm": run_command(["slurmctld", "-V"]).stdout.split()[-1]},
    )


def _figures(waits: list[float]) -> dict[str, float]:
    ordered = sorted(waits)
    return {
        "registered_to_runs_p50_s": round(statistics.median(ordered), 3),
        "registered_to_runs_p95_s": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 3),
    }


def _description(nodes: int, sluice: dict[str, Any] | None) -> dict[str, Any]:
    names = f"burst-[001-{nodes:03d}]"
    machine = {"cpus": 2, "memory": "4G"}
    pool = {
        "driver": "local", "settings": {"boot": "1", "stock": f"{INSIDE}/stock.json"}, "nodes": names, "idle": "1h",
        "shapes": [{"name": "big", "price": 2, **machine}, {"name": "old", "price": 1, **machine}],
    }  # fmt: skip
    policy = {
        "version": 1, "tenants": {"physics": {"members": ["alice"]}}, "fleet": {"programs": f"{INSIDE}/bin"},
        "pools": {"burst": pool},
    }  # fmt: skip
    described: dict[str, Any] = {
        "nodes": [
            {"names": "fixed-1", "platform": "none"},
            {"names": names, "platform": "none", "pool": True},
        ],
        "partitions": [{"name": "main", "nodes": "fixed-1"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "controllers": 1,
        "controllerd": True,
        "policy": json.dumps(policy, indent=1),
        "slurm_conf": f"SlurmctldLogFile={INSIDE}/{_LOG}\n",  # its times are to the millisecond
    }
    return described | ({"sluice": sluice} if sluice else {})


def _submit(cluster: DevCluster, nodes: int = 1) -> None:
    script = f'mkdir -p {INSIDE}/{_RAN}; date +%s.%N >"{INSIDE}/{_RAN}/$SLURMD_NODENAME"; exec sleep 1h'
    cluster.run(["sbatch", "-p", "burst", f"-N{nodes}", "--exclusive", "-o", "/dev/null", f"--wrap={script}"])


def _waits(cluster: DevCluster, jobs: int) -> list[float]:
    """Seconds from each node's registration to its job's first command."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(ran := _ran(cluster)) < jobs:
        if time.monotonic() > deadline:
            raise SluiceError(f"{len(ran)} of {jobs} jobs ran", remedy="see the logs of slurmctld and fleetd")
        time.sleep(0.5)
    registered = {
        node: datetime.fromisoformat(when).timestamp()
        for when, node in _REGISTERED.findall((cluster.folder / _LOG).read_text())
    }
    return [began - registered[node] for node, began in ran.items()]


def _ran(cluster: DevCluster) -> dict[str, float]:
    found = {path.name: path.read_text() for path in (cluster.folder / _RAN).glob("*")}
    return {node: float(began) for node, began in found.items() if began.endswith("\n")}


def _stock_out(cluster: DevCluster, nodes: int) -> list[float]:
    """Seconds from the question for the type of which there is none to the one for the other type, of each node of a
    job: later ones would not ask for a type of which there was none just before.
    """
    write_atomic(cluster.folder / "stock.json", json.dumps({"big": 0}))
    since = time.time()
    _submit(cluster, nodes)
    deadline = time.monotonic() + _PATIENCE_S
    while len(switches := _switches(cluster, since)) < nodes:
        if time.monotonic() > deadline:
            raise SluiceError(f"{len(switches)} of {nodes} nodes were asked for as another type")
        time.sleep(0.5)
    return switches


def _switches(cluster: DevCluster, since: float) -> list[float]:
    asked: dict[str, Event] = {}
    switches = []
    for event in read_status(cluster.folder / "fleet/status.json").history:
        if event.at < since or event.what != "asked":
            continue
        if event.shape == "big":
            asked.setdefault(event.node, event)
        elif event.node in asked:
            switches.append(event.at - asked.pop(event.node).at)
    return switches
