"""Gang groups when the primary controller dies and the backup takes over."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from dev_cluster.cluster import DevCluster
from tests.integration.settled import PATIENCE, let_it_save, until
from tests.integration.test_gang import GANG_LIMIT, Gangs, description, shows

pytestmark = pytest.mark.cluster


def test_a_backup_that_takes_over_goes_on_where_the_primary_was(make_cluster: Callable[..., DevCluster]) -> None:
    wanted = description() | {"controllers": 2, "slurm_conf": "DefMemPerCPU=100\nSlurmctldTimeout=5\n"}
    cluster = make_cluster(wanted)
    cluster.run(["sacctmgr", "-i", "modify", "account", "narrow", "set", "GrpJobs=3"])
    (cluster.folder / "trace").mkdir()
    (cluster.folder / "trace").chmod(0o777)
    gangs = Gangs(cluster)
    until(
        lambda: cluster.run(["scontrol", "-o", "show", "assoc_mgr", "accounts=narrow", "flags=assoc"]).stdout,
        lambda shown: "GrpJobs=3" in shown,
    )
    part = [gangs.member("part:4", gpus=1, user="carol") for _ in range(4)]
    early = [gangs.member("whole:3", gpus=1) for _ in range(2)]
    until(lambda: gangs.states(part), lambda seen: bool(seen.count("CONFIGURING") == 3))
    shows(gangs, early[0], "PENDING", "Gang whole: 2 of 3 members submitted")
    let_it_save(cluster)
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    until(lambda: gangs.states(part), lambda seen: bool(seen == ["PENDING"] * 4), timeout=GANG_LIMIT + PATIENCE)
    assert not any(gangs.ran("job", job) for job in part)
    early.append(gangs.member("whole:3", gpus=1))
    until(lambda: [gangs.ran("job", job) for job in early], all)
