"""How long a listing of jobs and of nodes takes through each backend of sluice/slurm, on real daemons.

The figures are the text backend's, the peer's those of pyslurm where it is installed: in turns, in one process of the
cluster's login host. Each backend starts a process for each listing; ``start_ms`` is that start alone: of `sinfo
--version`, and of a Python that imports pyslurm.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description

OPTIONS = [
    click.Option(["--jobs"], type=click.IntRange(1), multiple=True, default=(200, 2000), show_default=True),
    click.Option(["--nodes"], type=click.IntRange(1, 64), default=8, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--runs"], type=click.IntRange(1), default=9, show_default=True, help="Of each listing."),
    click.Option(["--slurm-prefix"], type=click.Path(path_type=Path), help="Another Slurm's prefix."),
    click.Option(["--pyslurm"], type=click.Path(exists=True, path_type=Path), help="Folder that holds pyslurm."),
]
MUST: dict[str, tuple[str, float]] = {}  # nothing was promised
_PATIENCE = 600.0
_SUBMIT = 'i=0; while [ $i -lt "$1" ]; do sbatch -Q -H -D / --gres=gpu:1 --wrap=true >/dev/null; i=$((i + 1)); done'
_MEASURE = """
import json, sys, time
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON, run_command
from sluice.slurm import connect

what, runs = sys.argv[1], int(sys.argv[2])
clients = {"text": connect()}
try:
    clients["pyslurm"] = connect(backend="pyslurm")
except SluiceError as error:
    print(error, file=sys.stderr)
starts = {"text": ["sinfo", "--version"], "pyslurm": [*PYTHON, "-c", "import pyslurm"]}
taken, records = {name: [] for name in clients}, set()
for _ in range(runs):
    for name, client in clients.items():
        begin = time.perf_counter()
        if what == "start":
            run_command(starts[name], env=client.commands.environment())
        else:
            records.add(len(getattr(client, what)()))
        taken[name].append(1000 * (time.perf_counter() - begin))
print(json.dumps([taken, sorted(records)]))
"""


def run(jobs: tuple[int, ...], nodes: int, runs: int, slurm_prefix: Path | None, pyslurm: Path | None) -> Result:
    """Medians of `runs` listings in milliseconds; of jobs once for each length of the queue."""
    description = parse_description(
        yaml.safe_dump(
            {
                "nodes": [{"names": f"g-[1-{nodes}]", "platform": "dgx-h100"}],
                "controllers": 1,
                "sluice": False,
                "slurm_conf": "MaxJobCount=100000\n",
            }
        ),
        source="benchmark",
    )
    result = Result({})
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir="/var/tmp") as folder:
        cluster = DevCluster(Path(folder) / "cluster")
        cluster.up(description, slurm_prefix=slurm_prefix, attached=True)
        try:
            _add(result, "start_ms", cluster, "start", runs, pyslurm)
            _add(result, f"nodes_{nodes}_ms", cluster, "nodes", runs, pyslurm, nodes)
            queued = 0
            for length in sorted(jobs):
                cluster.run(["sh", "-ec", _SUBMIT, "sh", str(length - queued)], timeout=_PATIENCE)
                queued = length
                _add(result, f"jobs_{length}_ms", cluster, "jobs", runs, pyslurm, length)
            result.versions["slurm"] = cluster.run(["sinfo", "--version"]).stdout.split()[-1]
        finally:
            cluster.down()
    return result


def _add(
    result: Result, figure: str, cluster: DevCluster, what: str, runs: int, pyslurm: Path | None, count: int = 0
) -> None:
    words = [sys.executable, "-c", _MEASURE, what, str(runs)]
    environment = {"PYTHONPATH": str(pyslurm.resolve())} if pyslurm else {}
    root = str(Path(__file__).parent.parent)
    taken: dict[str, Any]
    taken, records = json.loads(cluster.run(words, env=environment, cwd=root, timeout=_PATIENCE).stdout)
    if records != ([count] if count else []):
        raise RuntimeError(f"{what}: {count} expected, listed: {records}")
    result.figures[figure] = statistics.median(taken["text"])
    result.spread[figure] = [min(taken["text"]), max(taken["text"])]
    if "pyslurm" in taken:
        result.peer[figure] = statistics.median(taken["pyslurm"])
        result.spread[f"pyslurm_{figure}"] = [min(taken["pyslurm"]), max(taken["pyslurm"])]
