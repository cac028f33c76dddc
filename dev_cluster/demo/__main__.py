"""Runs the demonstration.

Each step checks that it showed what it says; a step that did not ends the demonstration with exit status 1. So does a
demonstration without Sluice's plugins, where Slurm's sources cannot be had, once it has shown what is left.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from dev_cluster.cluster import DevCluster
from dev_cluster.demo.discover import discover
from dev_cluster.demo.enforce import enforce
from dev_cluster.demo.failover import failover
from dev_cluster.demo.health import POLICY as HEALTH_POLICY
from dev_cluster.demo.health import health
from dev_cluster.demo.models import models
from dev_cluster.demo.moves import moves
from dev_cluster.demo.page import page
from dev_cluster.demo.profile import profile
from dev_cluster.demo.schedule import schedule
from dev_cluster.demo.stage import Stage
from dev_cluster.demo.submit import submit
from dev_cluster.demo.usage import usage
from dev_cluster.description import Sluice, load_description
from dev_cluster.handle import require_root
from policy.compiled import ClassRule, CompiledPolicy, Global, GpuClass, Tenant, Weights
from policy.document import parse
from policy.node import FILE_NAME, compile_node
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.plugin.sources import SourcesUnavailableError

_ROOM = 1 << 30  # bytes; containers often have 64 MiB in /dev/shm
POLICY = CompiledPolicy(
    settings=Global(
        weight=Weights(fair_share=1000),
        compaction_wait_s=1,
        compaction_move_cost_s=5,
        compaction_save_s=30,
    ),
    classes=[GpuClass(name="hopper", gpu_types=["h100"], gpu_memory_mib=81008)],
    tenants=[Tenant(account="physics", class_rules={"hopper": ClassRule(gpus_per_job=4)}), Tenant(account="biology")],
)


def main() -> int:
    """Run the whole demonstration; 0 when everything was shown, and as it should be. ``--keep``: with its page."""
    keep = sys.argv[1:] == ["--keep"]
    try:
        require_root("make demo")
        with tempfile.TemporaryDirectory(prefix="sluice-demo-", dir=_place()) as folder:
            stage = Stage(DevCluster(Path(folder) / "cluster"))
            _show(stage, keep=keep)
            models(stage, Path(folder))
            print("\nThe clusters are down; no process, mount or file of them is left. Try your own: sluice cluster up")
    except SluiceError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsluice: interrupted; the cluster is down", file=sys.stderr)
        return 130
    return 0


def _place() -> Path:
    """Where clusters keep their state: in memory, which /run is not in containers. There it took half a minute to
    remove ten thousand small files."""
    memory = Path("/dev/shm")  # noqa: S108 - in it, a folder of a random name
    return memory if memory.is_mount() and shutil.disk_usage(memory).free > _ROOM else Path("/run")


def _show(stage: Stage, *, keep: bool) -> None:
    cluster = stage.cluster
    missing: SourcesUnavailableError | None = None
    try:
        stage.step(
            "A Slurm cluster on this machine",
            "munge, MariaDB, slurmdbd, two slurmctld and a slurmd for each node: Slurm's own daemons. Only the "
            "hardware is simulated, below the vendors' C libraries.",
        )
        description = load_description("demo")
        description.agent = description.controllerd = description.explaind = True
        description.slurm_conf = "SlurmctldTimeout=6\nSchedulerParameters=nohold_on_prolog_fail\n"
        description.sluice = Sluice(level="place", policy=POLICY.render(), journal=True, supervise=True, lease=2.5)
        try:
            cluster.up(description, attached=True, progress=lambda line: print(f"   {line}", flush=True))
        except SourcesUnavailableError as error:
            print(f"   Without Sluice's plugins in slurmctld, whose build needs Slurm's sources: {error}", flush=True)
            missing, stage.plugins, description.sluice = error, False, None
            cluster.up(description, attached=True, progress=lambda line: print(f"   {line}", flush=True))
        write_atomic(cluster.layout.slurm / FILE_NAME, compile_node(parse(HEALTH_POLICY)).render())
        discover(stage)
        submit(stage)
        if stage.plugins:
            enforce(stage)
            profile(stage)
            schedule(stage)
            moves(stage)
            health(stage)
            failover(stage)
        usage(stage)
        page(stage, keep=keep)
    finally:
        cluster.down()
    if missing is not None:
        raise SluiceError(
            "not shown, as Sluice's plugins in slurmctld could not be built: how jobs are held to their memory, "
            f"scheduling, health and failover ({missing.what})",
            remedy=missing.remedy,
        )


if __name__ == "__main__":
    sys.exit(main())
