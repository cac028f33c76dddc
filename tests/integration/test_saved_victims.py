"""Who is preempted where jobs are saved as they run: one that is saved before it goes loses only that, and goes on.

`SLUICE_CRIU` as in test_system_checkpoint.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from sluice.base.files import write_atomic
from sluice.exchange.plugin_list import checksummed
from sluice.exchange.saves import TIMES_FILE
from tests.integration.gpu_saved_jobs import ONE, SAVING_PAIR
from tests.integration.jobs import LASTS, shown, submit
from tests.integration.saved_jobs import CRIU, GPU_COUNTER, Counter, can_save, set_policy
from tests.integration.settled import fresh_status, until
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

# Where jobs may be moved, what they really lose is compared; nobody is moved here, without a journal.
POLICY = CompiledPolicy(generated_s=0, source="test", settings=Global(checkpoint_system=True, compaction_wait_s=3600))


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def cluster(
    request: pytest.FixtureRequest,
    make_shared_cluster: Callable[..., DevCluster],
    tmp_path_factory: pytest.TempPathFactory,
) -> DevCluster:
    if not CRIU.exists():
        pytest.skip(f"{CRIU}: no CRIU; fetch it with: tools/criu build/criu")
    described = tmp_path_factory.mktemp("platform") / "platform.yaml"
    described.write_text(SAVING_PAIR)
    options: dict[str, Path] = {}
    if request.param == "trixie":
        options["root"] = request.getfixturevalue("trixie_root")
    made = make_shared_cluster(
        {
            "nodes": [{"names": "n1", "platform": str(described)}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "sluice": {"level": "place", "policy": POLICY.render()},
            "users": [{"name": "alice"}],
            "partitions": [
                {"name": "main", "options": "PriorityTier=1 GraceTime=60"},
                {"name": "high", "options": "PriorityTier=10"},
            ],
            "slurm_conf": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
            "SlurmctldParameters=preempt_send_user_signal\n"
            "SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0\n",
        },
        **options,
    )
    set_policy(made, {})
    until(lambda: can_save(made), timeout=60)
    return made


def test_who_is_saved_goes_before_who_would_lose_less_work(cluster: DevCluster) -> None:
    """Both jobs have a GPU; the one that CRIU saves has run for longer."""
    saved = Counter(cluster, "victim", *ONE, "-p", "main", script=GPU_COUNTER, last=300)
    saved.counts(20)
    lost = submit(cluster, *ONE, "-p", "main", wrap=LASTS, user="alice")
    until(lambda: shown(cluster, lost)["JobState"], "RUNNING".__eq__)
    # In place of the controllers' daemon.
    body = checksummed(f"sluice-save-times 1\n{saved.id} 1\n")
    write_atomic(cluster.layout.state / TIMES_FILE, body, mode=0o644)
    fresh_status(cluster)  # one thread of slurmctld writes it and looks at its files, at these twice as often
    time.sleep(3)  # the other job has more to lose than a save
    high = submit(cluster, *ONE, "-p", "high", wrap=LASTS, user="alice")
    until(lambda: shown(cluster, high)["JobState"], "RUNNING".__eq__, timeout=60, shows=saved.all_said)
    assert (shown(cluster, lost)["JobState"], shown(cluster, lost)["Restarts"]) == ("RUNNING", "0")
    said = f"job {saved.id} makes room for job {high} and loses 1 s, for which it saves before"
    assert cluster.log_tail("slurmctld@ctl1", 2000).count(said) == 1
    cluster.run(["scancel", high])
    saved.goes_on()
    assert saved.ended()["ExitCode"] == "7:0", saved.all_said()
    assert saved.is_exact(), saved.all_said()
