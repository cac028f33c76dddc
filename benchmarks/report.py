"""`sluice report tenants` of a month, with so many jobs in slurmdbd, and sacct and sreport in the same run.

The jobs are put right into the database. ``tenant_report_s`` is the report with the rolled-up days that `sluice
controllerd` keeps (and the last two days counted from sacct); ``first_report_s`` the same without any, and
``roll_up_s`` what rolling up all days took. Memory is that of the command and its children, the largest of each.
"""

from __future__ import annotations

import json
import statistics
import sys
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
from dev_cluster.history import History, fill, roll_up
from dev_cluster.layout import INSIDE

OPTIONS = [
    click.Option(["--jobs"], type=click.IntRange(min=1000), default=50_000, show_default=True, help="Jobs of a month."),
    click.Option(["--tenants"], type=click.IntRange(1, 500), default=50, show_default=True, help="Accounts."),
    click.Option(["--members"], type=click.IntRange(1, 100), default=20, show_default=True, help="Users of each."),
    click.Option(["--runs"], type=click.IntRange(min=1), default=3, show_default=True, help="Reports that are timed."),
    click.Option(["--sreport"], is_flag=True, help="sreport too; slurmdbd's own roll-up takes minutes for a million."),
]
MUST = {"tenant_report_s": ("<=", 10.0), "tenant_report_mib": ("<", 500.0), "differing_figures": ("==", 0.0)}
_DAYS = 30
# Runs a command and says how long it took and how large it and its children became.
_TIMER = """
import json, os, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[2:], stdout=open(sys.argv[1], "wb"), stderr=subprocess.PIPE)
took = time.perf_counter() - begin
print(json.dumps([took, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, done.returncode,
                  done.stderr.decode()[-300:]]))
"""


def run(jobs: int, tenants: int, members: int, runs: int, sreport: bool) -> Result:
    """Boot, fill, roll up, report."""
    names = [f"t{number:03}" for number in range(tenants)]
    description = parse_description(
        yaml.safe_dump(
            {
                "nodes": [{"names": "g-[1-2]", "platform": "dgx-h100"}],
                "controllers": 1,
                "slurm_conf": "AccountingStorageTRES=gres/gpu,gres/shard,gres/gpu:h100\n",
                "accounts": [{"name": name} for name in names],
                "users": [
                    {"name": f"{name}u{place}", "accounts": [name]} for name in names for place in range(members)
                ],
            }
        ),
        source="benchmark",
    )
    with tempfile.TemporaryDirectory(prefix="sluice-", dir="/var/tmp") as folder:
        cluster = DevCluster(Path(folder) / "cluster")
        cluster.up(description, attached=True)
        try:
            return _measure(cluster, jobs, runs, sreport)
        finally:
            cluster.down()


def _measure(cluster: DevCluster, jobs: int, runs: int, with_sreport: bool) -> Result:
    now = int(time.time())
    start = now - _DAYS * 86_400
    fill(cluster, History(jobs, start, now - 3600, nodes=("g-1", "g-2")))
    rolled = f"{INSIDE}/scratch/rolled"
    (cluster.layout.scratch / "rolled").mkdir()
    timer = cluster.layout.scratch / "timer.py"
    timer.write_text(_TIMER)

    def timed(*words: str) -> tuple[float, float, str]:
        line = [sys.executable, f"{INSIDE}/scratch/timer.py", f"{INSIDE}/scratch/output", *words]
        said: list[Any] = json.loads(cluster.run(line, timeout=1800, cwd=str(Path(__file__).parent.parent)).stdout)
        if said[2] != 0:
            raise RuntimeError(f"{words}: {said[3]}")
        return said[0], said[1], (cluster.layout.scratch / "output").read_text()

    sluice = [sys.executable, "-m", "sluice.main", "report"]
    report = [*sluice, "tenants", "-S", f"uts{start}", "-E", f"uts{now}", "--json"]
    roll_up_s, roll_up_mib, _ = timed(*sluice, "roll-up", "--days", "31", "--rolled", rolled)
    reports = [timed(*report, "--rolled", rolled) for _ in range(runs)]
    first_s, first_mib, fresh = timed(*report, "--fresh")
    window = ["-S", _local(start), "-E", _local(now)]
    sacct_s, sacct_mib, lines = timed(
        "sacct", "-X", "-a", "-n", "-P", "-T", *window, "-o", "Account,ElapsedRaw,AllocTRES,State"
    )
    peer = {"first_report_s": sacct_s, "first_report_mib": sacct_mib}
    if with_sreport:
        roll_up(cluster, _date(start - 86_400), _date(now + 86_400))
        peer["tenant_report_s"] = timed(
            "sreport", "-n", "-P", "-t", "seconds", "-T", "gres/gpu,cpu,mem", "cluster", "AccountUtilizationByUser",
            f"start={_date(start)}", f"end={_date(now + 86_400)}",
        )[0]  # fmt: skip
    return Result(
        figures={
            "jobs": float(jobs),
            "tenant_report_s": statistics.median(one for one, _, _ in reports),
            "tenant_report_mib": max(one for _, one, _ in reports),
            "first_report_s": first_s,
            "first_report_mib": first_mib,
            "roll_up_s": roll_up_s,
            "roll_up_mib": roll_up_mib,
            "differing_figures": float(_differing(reports[-1][2], fresh) + _differing_from_sacct(fresh, lines)),
        },
        peer=peer,
        spread={"tenant_report_s": [one for one, _, _ in reports]},
        versions={"slurm": cluster.run(["sinfo", "--version"]).stdout.strip()},
    )


def _differing(rolled: str, fresh: str) -> int:
    """Figures of single tenants that are not the same to the second by both ways."""
    one, other = ({row["account"]: row for row in json.loads(text)["rows"]} for text in (rolled, fresh))
    keys = ("jobs", "started", "ended", "failed", "gpu_s", "cpu_s", "mem_mib_s", "wall_s", "wait_p50_s", "wait_p95_s")
    return sum(one.get(name, {}).get(key) != row.get(key) for name, row in other.items() for key in keys)


def _differing_from_sacct(fresh: str, lines: str) -> int:
    """Tenants whose GPU-seconds are not those that sacct's own truncated times give."""
    seconds: dict[str, int] = {}
    for line in lines.splitlines():
        account, elapsed, tres, state = line.split("|")
        gpus = [word for word in tres.split(",") if word.startswith("gres/gpu=")]
        if gpus and state != "PENDING":
            seconds[account] = seconds.get(account, 0) + int(elapsed) * int(gpus[0].partition("=")[2])
    rows = {row["account"]: row["gpu_s"] for row in json.loads(fresh)["rows"]}
    return sum(rows.get(name) != value for name, value in seconds.items())


def _local(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%m/%d/%y")
