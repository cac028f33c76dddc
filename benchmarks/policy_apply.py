"""`sluice plan` and `sluice apply` of 1,000 tenants with 10,000 users, on real daemons.

Peer: the same changes by one sacctmgr command for each QOS, account and member list, as scripts do: measured with some
tenants, in the same cluster, and scaled.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.layout import INSIDE

OPTIONS = [
    click.Option(["--tenants"], type=click.IntRange(min=1), default=1000, show_default=True, help="How many tenants."),
    click.Option(["--members"], type=click.IntRange(min=1), default=10, show_default=True, help="Members of each."),
    click.Option(["--plans"], type=click.IntRange(min=1), default=3, show_default=True, help="Plans that are timed."),
    click.Option(["--peers"], type=click.IntRange(min=1), default=10, show_default=True, help="Tenants of the peer."),
]
MUST = {"plan_s": ("<=", 5.0), "first_apply_s": ("<=", 60.0), "changes_after": ("==", 0.0)}
_SIZES = ((2, 1), (4, 1), (8, 2), (16, 3), (32, 5), (64, 8))  # GPUs, shares


def policy(tenants: int, members: int) -> dict[str, Any]:
    """Organisations of up to 50 tenants each, in sizes S to XXL; every third may borrow."""
    found: dict[str, Any] = {}
    for number in range(tenants):
        if number % 50 == 0:
            parent = f"org{number // 50:03}"
            found[parent] = {"description": f"Organisation {number // 50}", "max_queued": 20000}
        else:
            gpus, shares = _SIZES[number % len(_SIZES)]
            found[f"t{number:04}"] = {"parent": parent, "limit": {"gpus": gpus}, "shares": shares}
            if number % 3 == 0:
                found[f"t{number:04}"] |= {"guarantee": {"gpus": gpus // 2}, "borrow": True}
        name = parent if number % 50 == 0 else f"t{number:04}"
        found[name]["members"] = [f"u{number:04}x{place}" for place in range(members)]
    return {"version": 1, "defaults": {"max_gpus_per_user": 8, "max_time": "48h"}, "tenants": found}


def run(tenants: int, members: int, plans: int, peers: int) -> Result:
    """Plan, apply and plan again."""
    description = parse_description(
        yaml.safe_dump(
            {
                "nodes": [{"names": "n1", "platform": "none"}],
                "controllers": 1,
                "slurm_conf": "PreemptType=preempt/qos\nPreemptMode=REQUEUE\n",
            }
        ),
        source="benchmark",
    )
    memory = Path("/dev/shm") if Path("/dev/shm").is_mount() else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="sluice-", dir=memory) as folder:
        cluster = DevCluster(Path(folder) / "cluster")
        cluster.up(description, attached=True)
        try:
            return _measure(cluster, tenants, members, plans, peers)
        finally:
            cluster.down()


def _measure(cluster: DevCluster, tenants: int, members: int, plans: int, peers: int) -> Result:
    scratch = cluster.layout.scratch
    (scratch / "sluice.yaml").write_text(yaml.safe_dump(policy(tenants, members), sort_keys=False))
    common = ["--state-dir", f"{INSIDE}/scratch/state"]
    file = ["--file", f"{INSIDE}/scratch/sluice.yaml"]

    def timed(*words: str) -> tuple[float, int]:
        start = time.perf_counter()
        sluice = [sys.executable, "-m", "sluice.main"]
        done = cluster.run([*sluice, *words, *common], timeout=1800, check=False, cwd=str(Path(__file__).parent.parent))
        if done.returncode not in (0, 3):
            raise RuntimeError(done.stderr)
        return time.perf_counter() - start, done.returncode

    before, _ = timed("plan", *file)
    apply_s, _ = timed("apply", *file, "--yes")
    after = [timed("plan", *file) for _ in range(plans)]
    again_s, _ = timed("apply", *file, "--yes")
    peer_s = _peer(cluster, peers, members) * tenants / peers
    version = cluster.run(["sinfo", "--version"]).stdout.strip()
    seconds = [one for one, _ in after]
    return Result(
        figures={
            "plan_s": statistics.median(seconds),
            "first_plan_s": before,
            "first_apply_s": apply_s,
            "apply_again_s": again_s,
            "changes_after": float(sum(code == 3 for _, code in after)),
        },
        peer={"first_apply_s": peer_s},
        spread={"plan_s": seconds},
        versions={"slurm": version},
    )


def _peer(cluster: DevCluster, count: int, members: int) -> float:
    """Seconds for `count` tenants by single commands."""
    lines = []
    for number in range(count):
        users = ",".join(f"p{number}x{place}" for place in range(members))
        lines += [
            f"sacctmgr -i -Q add qos peer{number} Priority=5 MaxTRESPA=gres/gpu=4",
            f"sacctmgr -i -Q add account peer{number} GrpTRES=gres/gpu=8 MaxWall=2880 qos=peer{number}",
            f"sacctmgr -i -Q add user {users} account=peer{number} GrpTRES=gres/gpu=8",
        ]
    script = cluster.layout.scratch / "peer.sh"
    script.write_text("set -e\n" + "\n".join(lines) + "\n")
    start = time.perf_counter()
    cluster.run(["sh", f"{INSIDE}/scratch/peer.sh"], timeout=600)
    return time.perf_counter() - start
