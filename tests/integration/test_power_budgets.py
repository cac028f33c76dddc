"""Budgets of watts on real daemons: what is kept for guarantees, caps that fall when one is lowered, and jobs that give
way then, no guaranteed one among them; their spans say so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import get_values, set_values
from sluice.controllerd.power import estimates, met
from sluice.controllerd.power.keeper import SETTLE_S
from tests.integration.jobs import LASTS, shown, submit
from tests.integration.policy_site import PolicySite
from tests.integration.settled import let_it_save, looping, start_again, status, until
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.cluster

FULL = pytest.mark.skipif(os.environ.get("SLUICE_TEST_SCALE") != "full", reason="long: SLUICE_TEST_SCALE=full")

NODES, GPUS, IDLE_W, MOST_W = ("p1", "p2"), 8, 72, 700
POLICY = """
level: place
classes: {hopper: {types: [h100]}}
tenants:
  physics: {members: [alice], guarantee: {gpus: 4}}
  guests: {members: [bob]}
scheduling: {backfill: {interval: 1s}}
power:
  price_kwh: 0.5
  lowest_cap: 50%
  gpus: {hopper: {idle: 72W, least: 200W, default: 700W, most: 700W}}
  lower_first: [guests]
  budgets: [{name: hall, nodes: "*", watts: 20kW}]
checkpoint: {before_requeue: 60s}
monitoring: {running: 5s}
"""
BORROWED = """
level: place
classes: {hopper: {types: [h100]}}
tenants:
  physics: {members: [alice], guarantee: {gpus: 4}}
  guests: {members: [bob], borrow: true}
scheduling: {backfill: {interval: 1s}, preemption: {grace: 2s}}
monitoring: {running: 5s}
"""
MOVES = """
level: place
classes: {hopper: {types: [h100]}}
tenants:
  physics: {members: [alice]}
  guests: {members: [bob]}
scheduling: {backfill: {interval: 1s}}
failover: {journal: true}
compaction: {wait: 1h, classes: {hopper: 2s}, move_cost: 1s, factor: 1, tenants: {physics: true}, default: false}
monitoring: {running: 5s}
"""
INSTEAD = """
level: place
classes: {{hopper: {{types: [h100]}}}}
tenants:
  physics: {{members: [alice], guarantee: {{gpus: 8}}}}
  guests: {{members: [bob], borrow: true}}
scheduling: {{backfill: {{interval: 1s}}, preemption: {{grace: 2s}}}}
failover: {{journal: true}}
compaction:
  {{wait: 1h, factor: {factor}, tenants: {{physics: true}}, default: false, move_cost: {move_cost}s,
    save_within: {save_within}s}}
monitoring: {{running: 5s}}
"""
SAVES = "exec " + looping(
    "trap 'touch $SLUICE_CHECKPOINT_FILE' USR1; touch $SLUICE_CHECKPOINT_FILE; while :; do pause 0.2; done"
)

SAVES_LATER = "exec " + looping(
    f"trap 'while [ -e {INSIDE}/saves-later ]; do pause 0.2; done; touch $SLUICE_CHECKPOINT_FILE' USR1; "
    "touch $SLUICE_CHECKPOINT_FILE; while :; do pause 0.2; done"
)
SAVES_ONCE = "exec " + looping("trap '' USR1; touch $SLUICE_CHECKPOINT_FILE; while :; do pause 0.2; done")


TRACES = """
traces: {{endpoint: "{}", settle: 1s, headers_file: /etc/slurm/none}}
"""


@dataclass
class Site(PolicySite):
    """The cluster, its power, and where spans are sent to."""

    receiver: OtlpReceiver

    def write(self, text: str) -> None:
        super().write(text + TRACES.format(self.receiver.endpoint))

    def power(self, *words: str, user: str = "root", check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(["sluice", "power", *words], user=user, check=check)

    def shown(self, *words: str, user: str = "root") -> Any:
        return json.loads(self.power(*words, "--json", user=user).stdout)

    def budget(self) -> dict[str, Any]:
        (found,) = self.shown("show")["budgets"]
        return dict(found)

    def gpus(self) -> list[dict[str, Any]]:
        return list(self.shown("show", "--gpus")["gpus"])

    def saved(self, job: str) -> float:
        """When the job last saved, as the controllers' daemon knows; 0: never."""
        file = self.cluster.layout.state / "sluice.checkpoints.json"
        jobs = json.loads(file.read_text())["jobs"] if file.exists() else {}
        return float(jobs.get(job, {}).get("saved") or 0)

    def save(self, job: str) -> None:
        """Ask a job that saves to do so, until it has; its first save says that it catches the signal."""
        self.until(lambda: self.saved(job))
        began = time.time()
        self.run("scancel", "--signal=USR1", "--full", job)
        self.until(lambda: self.saved(job) > began)

    def all_draw(self, node: str, watts: int) -> None:
        """What its GPUs draw where no cap is lower."""
        for gpu in range(GPUS):
            set_values(self.cluster.layout.gpu_sim(node), gpu, {"power": str(watts)})

    def planned(self, host: str = "ctl1") -> None:
        """Wait until jobs are planned by what is in force now."""
        known = time.time() + 2  # slurmctld looks each second
        self.until(lambda: status(self.cluster, host)["counters"].get("plan.last_s", 0) >= known)

    def drawn(self) -> float:
        """As nodes measure it."""
        return sum(gpu["power_w"] or 0 for gpu in self.gpus())

    def until(self, what: Callable[[], object]) -> None:
        until(
            what,
            shows=lambda: (
                self.power("show", check=False).stdout,
                self.power("show", "--gpus", check=False).stdout,
                self.run("squeue").stdout,
                self.cluster.log_tail("controllerd@ctl1", 20),
                self.cluster.log_tail("controllerd@ctl2", 20),
            ),
        )


def power_site(make_shared_cluster: Callable[..., DevCluster], **root: Path) -> Iterator[Site]:
    """For a fixture. `root`: a tree with another Slurm."""
    made = make_shared_cluster(
        {
            "nodes": [{"names": "p[1-2]", "platform": "dgx-h100"}],
            "controllers": 2,
            "agent": True,
            "controllerd": True,
            "explaind": True,
            "sluice": {"level": "place", "policy": ""},
            "users": [{"name": name} for name in ("alice", "bob", "oper")],
            "slurm_conf": "AccountingStorageTRES=gres/gpu,gres/shard,gres/gpu:h100\nJobRequeue=1\n"
            "AccountingStorageEnforce=associations,limits,qos,safe\nKillWait=2\n"
            "PreemptType=preempt/qos\nPreemptMode=REQUEUE\nSlurmctldParameters=preempt_send_user_signal\n"
            "SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0\n",
        },
        **root,
    )
    with OtlpReceiver() as receiver:
        found = Site(made, receiver)
        found.apply(POLICY)
        found.in_force("place")
        yield found


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    yield from power_site(make_shared_cluster)


@pytest.fixture(autouse=True)
def _clear(site: Site) -> Iterator[None]:
    """No jobs, GPUs that draw what they draw idle, and the policy's budget: each test is independent."""
    yield
    for user in ("alice", "bob"):
        site.run("scancel", "-u", user)
    for node in NODES:
        site.all_draw(node, IDLE_W)
    site.power("budget", "hall", "--end", check=False)  # not in each policy
    site.until(lambda: not site.run("squeue", "-h").stdout.strip())


def busy(site: Site) -> tuple[str, list[str]]:
    """A guaranteed job and three of guests, of which the oldest saves, have all GPUs, which draw what they may."""
    own = submit(site.cluster, "-A", "physics", "--gres=gpu:4", "-w", "p1", user="alice")
    words = ("-A", "guests", "--gres=gpu:4")
    guests = [submit(site.cluster, *words, "--checkpoint=app", wrap=SAVES, user="bob")]
    site.until(lambda: shown(site.cluster, guests[0])["JobState"] == "RUNNING")
    guests += [submit(site.cluster, *words, user="bob") for _ in range(2)]
    site.until(lambda: all(shown(site.cluster, job)["JobState"] == "RUNNING" for job in (own, *guests)))
    for node in NODES:
        site.all_draw(node, MOST_W)
    site.until(lambda: site.drawn() > 0.98 * 16 * MOST_W)
    return own, guests


def test_of_equal_jobs_the_one_that_has_saved_is_preempted(site: Site) -> None:
    cluster = site.cluster
    site.apply(BORROWED)
    site.in_force("place")
    jobs: list[str] = []
    for node, gpus, mode, script in (("p1", 4, "app", SAVES), ("p1", 4, "no", LASTS), ("p2", 8, "no", LASTS)):
        words = ("-A", "guests", f"--gres=gpu:{gpus}", "-w", node, f"--checkpoint={mode}")
        jobs.append(submit(cluster, *words, wrap=script, user="bob"))
        site.until(lambda: shown(cluster, jobs[-1])["JobState"] == "RUNNING")
    site.save(jobs[0])
    saves = cluster.layout.state / "sluice.saves"
    site.until(lambda: f"{jobs[0]} {int(site.saved(jobs[0]))}\n" in saves.read_text())
    time.sleep(1)  # slurmctld looks twice a second
    own = submit(cluster, "-A", "physics", "--gres=gpu:4", user="alice")
    site.until(lambda: shown(cluster, own)["JobState"] == "RUNNING")
    assert [shown(cluster, job)["Restarts"] for job in jobs] == ["1", "0", "0"]
    said = f"job {jobs[0]} makes room for job {own} and loses"
    assert cluster.log_tail("slurmctld@ctl1", 2000).count(said) == 1  # however long it takes to end
    site.apply(POLICY)
    site.in_force("place")


def test_jobs_are_moved_when_they_have_saved_and_their_tenant_allows_it(site: Site) -> None:
    """Each node has a job of each tenant; that of physics on the first one moves, though the others would do, too."""
    cluster = site.cluster
    site.apply(MOVES)
    site.in_force("place")
    jobs: dict[str, str] = {}
    for name, gpus, tenant, user in (
        ("moved", 2, "physics", "alice"),
        ("filler", 6, "physics", "alice"),
        ("stays", 2, "guests", "bob"),
    ):
        words = ("-A", tenant, f"--gres=gpu:{gpus}", "-t60", "--checkpoint=app")
        jobs[name] = submit(cluster, *words, wrap=SAVES, user=user)
        site.until(lambda name=name: shown(cluster, jobs[name])["JobState"] == "RUNNING")
    first, second = (shown(cluster, jobs[name])["NodeList"] for name in ("moved", "stays"))
    site.save(jobs["moved"])
    site.save(jobs["stays"])
    site.run("scancel", jobs["filler"])
    big = submit(cluster, "-A", "physics", "--gres=gpu:8", "-t60", user="alice")
    site.until(lambda: shown(cluster, big)["JobState"] == "RUNNING")
    assert shown(cluster, big)["NodeList"] == first
    site.until(lambda: shown(cluster, jobs["moved"])["JobState"] == "RUNNING")
    assert (shown(cluster, jobs["moved"])["NodeList"], shown(cluster, jobs["moved"])["Restarts"]) == (second, "1")
    assert shown(cluster, jobs["stays"])["Restarts"] == "0"
    site.until(lambda: "ran again after" in explained(site, jobs["moved"]))
    assert f"from {first} to make room for job {big}; saved " in explained(site, jobs["moved"])
    assert f"1 smaller job was moved to make room on {first}" in explained(site, big)
    site.run("scancel", big)
    site.until(lambda: site.receiver.jobs("slurm.job.id", big))
    number = [
        one for span in site.receiver.jobs("slurm.job.id", big) for one in span.attributes if one.key == "slurm.job.id"
    ]
    spans = [span for span in site.receiver.by_id().values() if number[0] in span.attributes]
    assert "slurm.job.journal" in {span.name for span in spans}  # its submission was durable
    site.apply(POLICY)
    site.in_force("place")


def moved_after_a_kill(site: Site, small: str, own: str, gate: Path) -> None:
    """slurmctld is killed when the small job has been asked to save, which it does afterwards."""
    moves = site.cluster.layout.state / "sluice.moves"
    site.until(lambda: moves.exists() and f"\n{small} {own} asked " in moves.read_text())
    let_it_save(site.cluster, user="bob")
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    site.cluster.start_daemon("slurmctld@ctl1")
    gate.unlink()


@pytest.mark.parametrize(
    "case", ["move", "too dear", "fails", *(pytest.param(case, marks=FULL) for case in ("fails late", "killed"))]
)
def test_others_are_moved_or_preempted_by_what_that_costs(site: Site, case: str) -> None:
    """Each node has two free GPUs and a guest that cannot be saved; on one there is also a job that can be moved to the
    other. For a job of four GPUs that one moves; where that is too dear, or it does not save, a guest is preempted."""
    cluster = site.cluster
    gate = cluster.folder / "saves-later"
    gate.touch()
    factor = {"move": 1, "too dear": 1000}.get(case, 0.1)
    save_within = {"fails": 5, "fails late": 61}.get(case, 60)
    move_cost = 300 if case == "fails late" else 30  # of which it waits for nothing
    site.apply(INSTEAD.format(factor=factor, save_within=save_within, move_cost=move_cost))
    site.in_force("place")
    script = {"fails": SAVES_ONCE, "fails late": SAVES_ONCE, "killed": SAVES_LATER}.get(case, SAVES)
    small = submit(cluster, "-A", "physics", "--gres=gpu:2", "-t60", "--checkpoint=app", wrap=script, user="alice")
    site.until(lambda: shown(cluster, small)["JobState"] == "RUNNING")
    first = shown(cluster, small)["NodeList"]
    (second,) = {*NODES} - {first}
    others = [submit(cluster, "-A", "physics", "--gres=gpu:2", "-t60", "-w", second, user="alice")]
    others += [submit(cluster, "-A", "guests", "--gres=gpu:4", "-t60", "-w", node, user="bob") for node in NODES]
    site.until(lambda: all(shown(cluster, job)["JobState"] == "RUNNING" for job in others))
    if case in ("fails", "fails late", "killed"):
        site.until(lambda: site.saved(small))
    else:
        site.save(small)
    saves = cluster.layout.state / "sluice.save-times"
    site.until(lambda: f"\n{small} " in saves.read_text())
    time.sleep(1)  # slurmctld looks twice a second
    site.planned()
    before = status(cluster, "ctl1")["counters"]
    own = submit(cluster, "-A", "physics", "--gres=gpu:4", "-t60", user="alice")
    site.until(lambda: status(cluster, "ctl1")["counters"]["select.held_back"] > before["select.held_back"])
    if case == "killed":
        moved_after_a_kill(site, small, own, gate)
    site.until(lambda: shown(cluster, own)["JobState"] == "RUNNING")
    restarts = [shown(cluster, job)["Restarts"] for job in (small, *others)]
    if case in ("move", "killed"):
        assert restarts == ["1", "0", "0", "0"]
        assert shown(cluster, own)["NodeList"] == first
        site.until(lambda: "ran again after" in explained(site, small))
        assert "GPU-seconds (it would preempt others at one of " in explained(site, small)
        said = explained(site, own)
        assert f"1 smaller job was moved to make room on {first}" in said and "preempting others would lose" in said
    else:
        assert restarts[:2] == ["0", "0"] and sorted(restarts[2:]) == ["0", "1"]
    if case == "too dear":
        moves = cluster.layout.state / "sluice.moves"
        assert not moves.exists() or f" {own} " not in moves.read_text()
    if case in ("fails", "fails late"):
        assert f"room for job {own}, at a loss of " in explained(site, small)
        assert "not moved: it did not save in time" in explained(site, small)
    site.apply(POLICY)
    site.in_force("place")


def explained(site: Site, job: str) -> str:
    return site.run("sluice", "explain", job).stdout


def test_watts_are_kept_for_whom_gpus_are_guaranteed(site: Site) -> None:
    """Of 5 kW, 1152 W are drawn idle, 4 * 278 W kept, and 8 * 278 W a guest has at the least: 512 W are left."""
    cluster = site.cluster
    first = submit(cluster, "-A", "guests", "--gres=gpu:8", "-w", "p1", user="bob")
    site.until(lambda: shown(cluster, first)["JobState"] == "RUNNING")
    site.all_draw("p1", MOST_W)
    site.until(lambda: site.budget()["measured_w"] and site.drawn() > 0.98 * GPUS * MOST_W)
    site.power("budget", "hall", "--now", "5kW", "--for", "1h")
    site.planned()
    other = submit(cluster, "-A", "guests", "--gres=gpu:4", user="bob")
    own = submit(cluster, "-A", "physics", "--gres=gpu:4", user="alice")
    site.until(lambda: shown(cluster, own)["JobState"] == "RUNNING")
    time.sleep(3)
    assert [shown(cluster, job)["JobState"] for job in (first, other)] == ["RUNNING", "PENDING"]


OUTSIDE = {
    "contiguous": ("--contiguous", "--gres=gpu:1"),
    "of several switches": ("--switches=2", "--gres=gpu:1"),
    "by socket": ("--gpus-per-socket=1", "--sockets-per-node=1"),
    "of its user": ("--exclusive=user", "--gres=gpu:1"),
    "whole node without GPUs": ("--exclusive", "-w", "p2"),
    "on named nodes": ("-w", "p2", "--gres=gpu:1"),
    "in a reservation": ("--reservation=row", "--gres=gpu:1"),
    "heterogeneous": ("--gres=gpu:1", ":", "-A", "guests", "--gres=gpu:1"),
}


def test_jobs_that_only_slurm_finds_nodes_for_wait_for_watts_too(site: Site) -> None:
    """Of 4.7 kW, 1152 W are drawn idle, 4 * 278 W kept, and 8 * 278 W a guest has at the least: 212 W are left, and a
    GPU needs 278 W."""
    cluster = site.cluster
    first = submit(cluster, "-A", "guests", "--gres=gpu:8", "-w", "p1", user="bob")
    site.until(lambda: shown(cluster, first)["JobState"] == "RUNNING")
    site.all_draw("p1", MOST_W)
    site.until(lambda: site.budget()["measured_w"] and site.drawn() > 0.98 * GPUS * MOST_W)
    site.power("budget", "hall", "--now", "4700W", "--for", "1h")
    site.planned()

    def waits_for_watts(job: str) -> bool:
        """Its start was refused, or it is planned for when there are watts."""
        if status(cluster)["counters"]["select.kept_waiting"] > before:
            return True
        why = explained(site, job)
        return "its watts are not free in the power budget hall" in why or "or break a power budget; has to wait" in why

    for name, words in OUTSIDE.items():
        reserved = name == "in a reservation"
        if reserved:
            window = ("StartTime=now", "Duration=60", "Users=bob", "Flags=IGNORE_JOBS")
            site.run("scontrol", "create", "reservation", "ReservationName=row", "Nodes=p2", *window)
        before = status(cluster)["counters"]["select.kept_waiting"]
        job = submit(cluster, "-A", "guests", *words, user="bob")
        site.until(lambda job=job: waits_for_watts(job))
        assert shown(cluster, job)["JobState"] == "PENDING", name
        site.run("scancel", job)
        if reserved:
            site.run("scontrol", "delete", "reservation", "row")

    last = [submit(cluster, "-A", "guests", *OUTSIDE[name], user="bob") for name in ("contiguous", "heterogeneous")]
    site.until(lambda: "its watts are not free in the power budget hall" in explained(site, last[0]))
    site.power("budget", "hall", "--end")
    site.until(lambda: shown(cluster, last[0])["JobState"] == "RUNNING")
    site.run("scancel", first)  # sched/backfill starts components on different nodes
    site.until(lambda: shown(cluster, last[1])["JobState"] == "RUNNING")


def test_components_on_whole_nodes_wait_for_the_watts_of_all_their_gpus(site: Site) -> None:
    """Of 4.4 kW, 1152 W are drawn idle, 4 * 278 W kept, and 4 * 278 W a guest has at the least: 1024 W are left, which
    is enough for the two GPUs that it asks for, and not for the nine that it gets."""
    cluster = site.cluster
    first = submit(cluster, "-A", "guests", "--gres=gpu:4", "-w", "p1", user="bob")
    site.until(lambda: shown(cluster, first)["JobState"] == "RUNNING")
    site.all_draw("p1", MOST_W)
    site.until(lambda: site.budget()["measured_w"] and site.drawn() > 0.98 * GPUS * MOST_W)
    site.power("budget", "hall", "--now", "4400W", "--for", "1h")
    site.planned()
    words = ("--exclusive", "--gres=gpu:1", ":", "-A", "guests", "--gres=gpu:1")
    job = submit(cluster, "-A", "guests", *words, user="bob")
    site.until(lambda: "its watts are not free in the power budget hall" in explained(site, job))
    assert shown(cluster, job)["JobState"] == "PENDING"
    site.power("budget", "hall", "--end")
    site.until(lambda: shown(cluster, job)["JobState"] == "RUNNING")


def test_a_lowered_budget_lowers_caps_then_stops_jobs_and_never_a_guaranteed_one(site: Site) -> None:
    cluster = site.cluster
    own, guests = busy(site)
    assert {gpu["cap_w"] for gpu in site.gpus()} == {MOST_W}
    site.until(lambda: site.budget()["measured_w"])  # the daemon has looked for long enough

    site.power("budget", "hall", "--now", "8kW", "--for", "1h")
    site.until(lambda: site.drawn() <= 8000)
    assert all(shown(cluster, job)["JobState"] == "RUNNING" for job in (own, *guests))
    why = site.shown("why", guests[0], user="bob")
    assert why["gives_way"] == 1 and {gpu["why"] for gpu in why["gpus"]} == {"order"}
    site.save(guests[0])  # after the others began
    assert site.shown("why", own)["gives_way"] == "never stopped"
    assert "no running job of yours" in site.power("why", own, user="bob", check=False).stderr

    lowered = time.time()
    site.power("budget", "hall", "--now", "3500W", "--for", "1h")
    site.until(lambda: site.drawn() <= 3500)
    site.until(lambda: shown(cluster, guests[0])["Restarts"] == "1")  # the oldest one, which loses least
    assert site.saved(guests[0]) > lowered  # it was asked to save before it gave way
    assert (shown(cluster, own)["JobState"], shown(cluster, own)["Restarts"]) == ("RUNNING", "0")

    site.power("budget", "hall", "--end")
    site.until(lambda: {gpu["cap_w"] for gpu in site.gpus() if int(own) in gpu["jobs"]} == {MOST_W})
    site.run("scancel", guests[-1])
    site.until(lambda: site.receiver.jobs("slurm.job.id", guests[-1]))
    (job,) = site.receiver.jobs("slurm.job.id", guests[-1])
    assert "slurm.power.stopped" in [event.name for event in job.events]


def test_only_what_can_be_kept_and_only_by_administrators(site: Site) -> None:
    assert "draw without jobs" in site.power("budget", "hall", "--now", "500W", "--for", "1h", check=False).stderr
    assert "not in the policy" in site.power("budget", "x", "--now", "5kW", "--for", "1h", check=False).stderr
    assert site.power("budget", "hall", "--now", "15kW", "--for", "1h", user="bob", check=False).returncode == 1
    assert site.budget()["lowered_w"] is None


def test_a_daemon_that_starts_again_lifts_no_cap_and_knows_what_was_lowered(site: Site) -> None:
    busy(site)
    site.until(lambda: site.budget()["measured_w"])
    site.power("budget", "hall", "--now", "10kW", "--for", "1h")
    site.until(lambda: site.budget()["capped_gpus"])
    before: dict[str, float] = {}

    def none_was_raised() -> bool:
        """Lately: idle GPUs draw less by their new caps, which others get."""
        earlier = before.copy()
        time.sleep(SETTLE_S + 2)
        before.update({gpu["uuid"]: gpu["cap_w"] for gpu in site.gpus() if gpu["jobs"]})
        return bool(earlier) and all(cap <= earlier.get(uuid, 0) for uuid, cap in before.items())

    site.until(none_was_raised)
    site.cluster.stop_daemon("controllerd@ctl1")
    site.cluster.start_daemon("controllerd@ctl1")
    site.until(lambda: site.power("show", check=False).returncode == 0 and len(site.gpus()) == len(NODES) * GPUS)
    after = {gpu["uuid"]: gpu["cap_w"] for gpu in site.gpus()}
    assert all(after[uuid] <= cap + 1 for uuid, cap in before.items())
    assert site.budget()["lowered_w"] == 10_000


def test_a_controller_that_dies_as_a_budget_is_lowered_leaves_the_rest_to_the_other(site: Site) -> None:
    """It has written that 3 kW are left, and done nothing else; eight GPUs of a guest are 350 W each at the least."""
    cluster = site.cluster
    site.all_draw("p2", MOST_W)
    site.power("budget", "hall", "--now", "19kW", "--for", "1h")
    guest = submit(cluster, "-A", "guests", "--gres=gpu:8", "-w", "p2", user="bob")
    site.until(lambda: shown(cluster, guest)["JobState"] == "RUNNING" and site.drawn() > 0.98 * GPUS * MOST_W)
    kept = cluster.layout.state / met.FILE_NAME  # the next daemon stops jobs where a budget that was kept is less now
    site.until(lambda: met.read(kept).get("hall") == 19_000)
    let_it_save(cluster, user="bob")  # else the other controller would start it on its node a second time
    cluster.stop_daemon("controllerd@ctl1", number=signal.SIGKILL)
    lowered = cluster.layout.state / "sluice.power-lowered.json"
    lowered.write_text(lowered.read_text().replace("19000", "3000"))
    cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    cluster.run(["scontrol", "takeover"], node="ctl2", check=False)
    site.until(lambda: shown(cluster, guest)["Restarts"] == "1")


@pytest.fixture
def second_leads(site: Site) -> None:
    """The other controller's slurmctld and daemon are the only ones, as the test before leaves it."""
    lives = {one.name for one in site.cluster.daemons() if one.status is None}
    if "slurmctld@ctl1" in lives:
        site.cluster.stop_daemon("controllerd@ctl1")
        site.cluster.stop_daemon("slurmctld@ctl1")
        site.cluster.run(["scontrol", "takeover"], node="ctl2", check=False)
    if "controllerd@ctl2" not in lives:
        site.cluster.start_daemon("controllerd@ctl2")
    site.apply(POLICY)
    site.until(lambda: site.power("show", check=False).returncode == 0 and site.shown("show")["budgets"])
    site.until(lambda: site.budget()["lowered_w"] is None)


def limit(site: Site) -> str:
    """Of p1's first GPU."""
    return get_values(site.cluster.layout.gpu_sim("p1"), 0)["power_limit"]


def start_with_less(site: Site) -> str:
    """Ten GPUs of guests have 3736 W of 6 kW, without the daemon, which would let them expect less. Stock Slurm chooses
    how many of them each of the nodes has."""
    cluster = site.cluster
    site.until(lambda: {gpu["cap_w"] for gpu in site.gpus()} == {MOST_W})
    cluster.stop_daemon("controllerd@ctl2")
    (cluster.layout.state / "sluice.power").unlink(missing_ok=True)
    site.apply(POLICY.replace("20kW", "6kW"))
    site.in_force("place", "ctl2")
    site.planned("ctl2")
    job = submit(cluster, "-A", "guests", "--gpus=10", "-N2", "-w", "p1", user="bob")
    site.until(lambda: shown(cluster, job)["JobState"] == "RUNNING" and limit(site) == "445")
    return job


@pytest.mark.usefixtures("second_leads")
def test_a_cap_with_which_a_job_started_is_raised_when_there_is_room(site: Site) -> None:
    cluster = site.cluster
    job = start_with_less(site)
    cluster.start_daemon("controllerd@ctl2")
    site.apply(POLICY)
    site.until(lambda: site.power("show", "--gpus", check=False).returncode == 0)
    site.until(lambda: {gpu["cap_w"] for gpu in site.gpus() if int(job) in gpu["jobs"]} == {MOST_W})
    record = json.loads(site.run("cat", f"/run/sluice/agent/jobs/{job}.json", node="p1").stdout)
    assert {event["detail"]["watts"] for event in record["events"] if event["action"] == "power"} == {445}
    assert {grant["planned_mw"] for grant in record["grants"]} == {None}


@pytest.mark.usefixtures("second_leads")
def test_without_budgets_a_requeued_job_has_no_planned_cap(site: Site) -> None:
    cluster = site.cluster
    job = start_with_less(site)
    site.apply(POLICY[: POLICY.index("  budgets:")])
    site.in_force("place", "ctl2")
    site.run("scontrol", "requeue", job)
    # The end of the first run must not come to a node that has the second. Where it does, the agent has the job started
    # again, which Slurm does after two minutes.
    site.until(lambda: site.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.split() == ["PENDING"])
    site.until(lambda: not site.run("pgrep", "-x", "slurmstepd", check=False).stdout)
    start_again(cluster, job)
    until(lambda: shown(cluster, job), lambda job: job["JobState"] == "RUNNING" and job["Restarts"] != "0", timeout=300)
    assert limit(site) == str(MOST_W)


@pytest.mark.usefixtures("second_leads")
def test_who_takes_over_knows_budgets_caps_estimates_and_who_holds_what(site: Site) -> None:
    cluster, state = site.cluster, site.cluster.layout.state
    own, guests = busy(site)
    users = {site.run("id", "-u", name).stdout.strip() for name in ("alice", "bob")}
    learnt = state / estimates.FILE_NAME  # nothing is learnt from GPUs that caps hold back
    site.until(
        lambda: users
        <= {
            str(user)
            for user, _, _, seconds, _ in json.loads(learnt.read_text())["estimates"]
            if seconds >= estimates.LEAST_S
        }
    )
    site.power("budget", "hall", "--now", "10kW", "--for", "1h")
    site.until(lambda: site.budget()["capped_gpus"])
    time.sleep(SETTLE_S + 2)  # idle GPUs' watts are given to others by then
    before = {gpu["uuid"]: gpu["cap_w"] for gpu in site.gpus()}
    cluster.start_daemon("slurmctld@ctl1")  # the first controller takes over from the second when it is back
    if "controllerd@ctl1" not in {one.name for one in cluster.daemons() if one.status is None}:
        cluster.start_daemon("controllerd@ctl1")
    site.planned("ctl1")
    plan = state / "sluice.power"
    plan.unlink()
    site.until(lambda: plan.read_text())  # the daemon of the one that leads has decided
    site.until(lambda: site.power("show", check=False).returncode == 0 and len(site.gpus()) == len(NODES) * GPUS)
    after = {gpu["uuid"]: gpu["cap_w"] for gpu in site.gpus()}
    assert all(after[uuid] <= cap + 1 for uuid, cap in before.items())
    assert site.budget()["lowered_w"] == 10_000
    site.until(lambda: site.drawn() <= 10_000)
    published = plan.read_text()
    assert all(f"\njob {job} " in published for job in (own, *guests))
    assert all(f"\nestimate {user} hopper " in published for user in users)
    assert site.shown("why", own)["gives_way"] == "never stopped"
    assert {shown(cluster, job)["Restarts"] for job in (own, *guests)} == {"0"}
    assert {shown(cluster, job)["JobState"] for job in (own, *guests)} == {"RUNNING"}
