"""What job_submit and the site factor add to a submission: real daemons, without and with the plugins.

Two clusters of the same nodes run side by side: one without any of our plugins, one at level place (or --level) with a
policy of many tenants. One client submits to them in turns, a few jobs at a time, through libslurm (no time of a
command's start is counted), so that both arms meet the same state of the machine. Stock's jobs name their shards; ours
come with --gpu-mem.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from policy.compiled import CompiledPolicy, Global, Tenant, Weights
from sluice.base.errors import SluiceError
from sluice.base.run import run_command

OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(1, 4096), default=128, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--rounds"], type=click.IntRange(2), default=60, show_default=True, help="Turns of each arm."),
    click.Option(["--batch"], type=click.IntRange(1), default=20, show_default=True, help="Jobs in a turn."),
    click.Option(["--tenants"], type=click.IntRange(1, 60000), default=1000, show_default=True, help="In the policy."),
    click.Option(
        ["--level"],
        type=click.Choice(["admit", "shadow", "place"]),
        default="place",
        show_default=True,
        help="Of our arm.",
    ),
    click.Option(["--plugins"], default="", help="Folder of built plugins; default: built for the installed Slurm."),
]
MUST = {"added_p50_percent": ("<=", 5.0), "job_submit_within_50_us_percent": (">=", 99.0)}
_PATIENCE = 900.0


def run(nodes: int, rounds: int, batch: int, tenants: int, level: str, plugins: str) -> Result:
    """Latency of both arms, and how much longer ours takes."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        client = _build(folder)
        arms = {arm: DevCluster(folder / arm) for arm in ("stock", "sluice")}
        try:
            for arm, cluster in arms.items():
                described = yaml.safe_dump(
                    _description(nodes, _sluice(tenants, level, plugins) if arm == "sluice" else None)
                )
                cluster.up(parse_description(described, source="benchmark"), timeout=_PATIENCE, attached=True)
            taken: dict[str, list[list[float]]] = {arm: [] for arm in arms}
            for turn in range(rounds + 1):
                for arm in sorted(arms, reverse=turn % 2 == 0):
                    taken[arm].append(_submit(arms[arm], client, batch, "option" if arm == "sluice" else "gres"))
            counters = _counters(arms["sluice"])
        finally:
            for cluster in arms.values():
                cluster.down()
    return _result({arm: values[1:] for arm, values in taken.items()}, counters)  # the first turn warms up


def _result(taken: dict[str, list[list[float]]], counters: dict[str, int]) -> Result:
    flat = {arm: sorted(value for values in turns for value in values) for arm, turns in taken.items()}
    medians = {arm: [statistics.median(values) for values in turns] for arm, turns in taken.items()}
    added = sorted(100 * (ours / stock - 1) for ours, stock in zip(medians["sluice"], medians["stock"], strict=True))
    p50 = {arm: statistics.median(values) for arm, values in flat.items()}
    figures = {
        "submit_p50_ms": p50["sluice"],
        "submit_p99_ms": flat["sluice"][int(0.99 * len(flat["sluice"]))],
        "added_p50_percent": 100 * (p50["sluice"] / p50["stock"] - 1),
        "job_submit_mean_us": counters["submit.total_ns"] / max(counters["submit.submitted"], 1) / 1000,
        "job_submit_slowest_us": counters["submit.slowest_ns"] / 1000,
        "job_submit_within_50_us_percent": 100
        * (1 - counters["submit.over_50_us"] / max(counters["submit.submitted"], 1)),
    }
    peer = {"submit_p50_ms": p50["stock"], "submit_p99_ms": flat["stock"][int(0.99 * len(flat["stock"]))]}
    quarter = len(added) // 4
    return Result(
        figures=figures,
        peer=peer,
        spread={"added_percent_of_a_turn": [added[quarter], added[-1 - quarter]]},
        versions={"slurm": run_command(["slurmctld", "-V"]).stdout.split()[-1]},
    )


def _description(nodes: int, sluice: dict[str, Any] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "nodes": [{"names": f"n[{1:0{len(str(nodes))}d}-{nodes}]", "platform": "dgx-h100"}],
        "accounts": [{"name": "tenant1"}],
        "users": [{"name": "alice", "accounts": ["tenant1"]}],
        "controllers": 1,
        "slurm_conf": "MessageTimeout=100\nMaxJobCount=100000\n",
    }
    return described | ({"sluice": sluice} if sluice else {})


def _sluice(tenants: int, level: str, plugins: str) -> dict[str, Any]:
    policy = CompiledPolicy(
        generated_s=int(time.time()),
        settings=Global(weight=Weights(fair_share=1000, age=100), age_full_s=86400),
        tenants=[
            Tenant(account=f"tenant{number}", gpus_per_job=64, run_time_s=86400, gpu_memory_mib_per_gpu=40960)
            for number in range(tenants)
        ],
    )
    return {"level": level, "policy": policy.render()} | ({"plugins": plugins} if plugins else {})


def _submit(cluster: DevCluster, client: Path, batch: int, option: str) -> list[float]:
    done = cluster.run([client, str(batch), "tenant1", option], user="alice", timeout=_PATIENCE)
    return [int(line) / 1e6 for line in done.stdout.split()]


def _counters(cluster: DevCluster) -> dict[str, int]:
    time.sleep(3)  # the status is written every second or two
    state = cluster.run(["scontrol", "show", "config"]).stdout.split("StateSaveLocation")[1].split()[1]
    shown = cluster.run(["bash", "-c", f"cat {state}/sluice.status.*"], node="ctl1").stdout
    counters: dict[str, int] = json.loads(shown)["counters"]
    return counters


def _build(folder: Path) -> Path:
    client = folder / "submit_latency"
    command = ["gcc", "-O2", "-o", str(client), str(Path(__file__).with_suffix(".c")), "-lslurm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SluiceError(
            f"submit_latency cannot be built: {done.stderr.strip()[-500:]}", remedy="install gcc and libslurm-dev"
        )
    return client
