"""Jobs that are saved as they run, by CRIU itself: resumed exactly, whatever dies meanwhile, and by nobody else.

`SLUICE_CRIU` names CRIU, default build/criu/criu, which tools/criu fetches; without it there is nothing to test.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.slurm.control import SAVE_WORDS
from tests.integration.jobs import sbatch, shown
from tests.integration.platforms import SINGLE
from tests.integration.saved_jobs import (
    COUNTER,
    NODE,
    Counter,
    can_save,
    images,
    kill,
    killed_in,
    saving_cluster,
    set_policy,
)  # fmt: skip
from tests.integration.settled import start_again, until

pytestmark = pytest.mark.cluster

LEAVES_ZOMBIE = '(: & exec sleep 600) & until grep -qs ") Z " /proc/[0-9]*/stat; do sleep 0.1; done'
ROUNDS = 40 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 2


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> DevCluster:
    made = saving_cluster(make_shared_cluster, tmp_path_factory.mktemp("platform"), SINGLE, users=["alice", "bob"])
    set_policy(made, {})
    until(lambda: can_save(made), timeout=60)
    return made


def test_a_job_goes_on_where_it_was(cluster: DevCluster) -> None:
    job = Counter(cluster, "exact", script=COUNTER.replace("exec 5>>kept", f"{LEAVES_ZOMBIE}\nexec 5>>kept"))
    job.counts(15)
    job.save()
    job.start_again()
    job.counts(40)
    cluster.run(["scancel", "--signal=USR1", "--batch", job.id])
    ended = job.ended()
    assert ended["ExitCode"] == "7:0"
    assert job.is_exact(), job.all_said()
    assert "got USR1" in job.words() and "lock is taken" not in job.words()
    assert list(images(cluster).iterdir()) == []


def test_agent_and_criu_may_die_at_any_moment(cluster: DevCluster) -> None:
    """The job ends with all numbers in order, in one piece or from its start again: never with some lost or twice."""
    for round_ in range(ROUNDS):
        job = Counter(cluster, f"killed-{round_}")
        job.counts(5)
        job.save()
        time.sleep(random.uniform(0, 0.5))
        kill(cluster, "criu" if round_ % 2 else "agent")
        job.goes_on()
        assert job.ended()["ExitCode"] == "7:0", job.all_said()
        words = job.words()
        # Where CRIU was killed the job may have begun again from its start: then its last run is complete.
        last_run = len(words) - 1 - words[::-1].index("0")
        numbers = [int(word) for word in words[last_run:] if word.isdecimal()]
        assert numbers[:-1] == [*range(job.last)], job.all_said()
        assert job.is_exact() or round_ % 2, job.all_said()


@pytest.mark.parametrize("step", ["dump+--tree", f"{INSIDE}/nodes/{NODE}/checkpoints/images/.half-*/pages-1.img"])
def test_an_agent_that_dies_as_criu_writes_costs_no_work(cluster: DevCluster, step: str) -> None:
    """CRIU's pipes end, before the first file and while memory is in one: it lets the job go on, which is saved again
    by the next agent."""
    job = Counter(cluster, "early" if "+" in step else "in-memory", last=60)
    job.counts(5)
    with killed_in(cluster, NODE, "agent", *step.split("+")):
        job.save()
    job.goes_on()
    assert job.ended()["ExitCode"] == "7:0" and job.is_exact(), job.all_said()
    assert list(images(cluster).iterdir()) == []


def test_a_file_that_was_exchanged_is_not_opened(cluster: DevCluster) -> None:
    """Root opens a job's files by their names: a link in the place of one leads to nothing,
    not even to a file that the job had open itself, but to read it alone. The job begins again from its start.
    """
    shared = cluster.folder / "home/shared"
    shared.write_text("of root's\n")
    shared.chmod(0o644)
    folder = cluster.folder / "home/bob/exchange"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "mine").write_text("of bob's!\n")
    os.chown(folder / "mine", 2002, -1)
    (folder / "mine").chmod(0o644)
    (folder / "job").write_text(
        f"#!/bin/bash\nexec 7<>mine 8<{INSIDE}/home/shared\ntouch opened\n"
        "for i in {1..100}; do sleep 0.1; done\necho mine >&7\n"
    )
    inside = INSIDE / "home/bob/exchange"
    words = ["--checkpoint=system", "-D", str(inside), "-o", f"{inside}/out", f"{inside}/job"]
    job = sbatch(cluster, *words, user="bob")
    until((folder / "opened").exists)
    cluster.run(["scancel", *SAVE_WORDS, job])
    until(lambda: shown(cluster, job), lambda now: now["JobState"] == "PENDING")
    (folder / "mine").unlink()
    (folder / "mine").symlink_to(INSIDE / "home/shared")
    start_again(cluster, job)
    until(lambda: cluster.log_tail(f"agent@{NODE}", 5), lambda said: "is another file than it was" in said, timeout=60)
    cluster.run(["scancel", job])
    until(lambda: shown(cluster, job)["JobState"], lambda state: state not in ("RUNNING", "COMPLETING"))
    assert shared.read_text() == "of root's\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exec 9<>/dev/tcp/127.0.1.1/{port} && sleep 600", "it has a TCP connection"),
        ("sleep 600", "its memory, "),
    ],
)
def test_a_job_that_cannot_be_saved_goes_on_and_says_why(cluster: DevCluster, script: str, why: str) -> None:
    port = re.search(r"SlurmctldPort\s*=\s*(\d+)", cluster.run(["scontrol", "show", "config"]).stdout)
    assert port
    set_policy(cluster, {"most_bytes": 1 << 10} if "memory" in why else {})
    job = sbatch(cluster, "--checkpoint=system", "--wrap", f"exec bash -c '{script.format(port=port[1])}'")
    until(lambda: cluster.run(["pgrep", "-fx", "sleep 600"], node=NODE, check=False).stdout)  # what it does at last
    cluster.run(["scancel", *SAVE_WORDS, job])
    until(lambda: cluster.log_tail(f"agent@{NODE}", 5), lambda said: f"job={job}" in said and why in said, timeout=60)
    assert shown(cluster, job)["JobState"] == "RUNNING"
    set_policy(cluster, {})
    cluster.run(["scancel", job])


def test_a_job_of_which_a_file_is_not_taken_goes_on(cluster: DevCluster) -> None:
    """CRIU fails as it writes, with most of the job saved, and lets it go on unharmed."""
    job = Counter(cluster, "ghost", last=60, script=COUNTER.replace("exec 5>>kept", "exec 5>>kept 9>gone; rm gone"))
    job.counts(5)
    job.save()
    until(
        lambda: cluster.log_tail(f"agent@{NODE}", 5),
        lambda said: f"job={job.id}" in said and "it has a deleted file open" in said,
        timeout=60,
    )
    assert job.ended()["ExitCode"] == "7:0" and job.is_exact(), job.all_said()
    assert list(images(cluster).iterdir()) == []


def test_a_job_that_its_node_cannot_save_is_not_ended_by_the_signal(cluster: DevCluster) -> None:
    set_policy(cluster, None)
    until(lambda: not can_save(cluster), timeout=60)
    job = Counter(cluster, "plain", last=30)
    job.counts(5)
    job.save()
    assert job.ended()["ExitCode"] == "7:0" and job.is_exact(), job.all_said()
    set_policy(cluster, {})
    until(lambda: can_save(cluster), timeout=60)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-N2"], "several nodes"),
        (["--gres=shard:1024"], "the state of a part of a GPU"),
        (["--no-requeue"], "--no-requeue"),
        (["--open-mode=truncate"], "--open-mode=truncate"),
        (["--checkpoint-interval=20m"], "--checkpoint-interval"),
    ],
)
def test_what_cannot_be_saved_is_refused(cluster: DevCluster, words: list[str], why: str) -> None:
    done = cluster.run(["sbatch", "--checkpoint=system", *words, "--wrap=true"], user="alice", check=False)
    assert done.returncode != 0 and why in done.stderr
