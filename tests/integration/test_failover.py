"""Two real controllers under the supervisor, with the journal: killed, stopped, cut off, without power or storage."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev_cluster.chaos.cluster import (
    CONTROLLERS,
    LEASE_S,
    SITE_CONF,
    TIMEOUT_S,
    Chaos,
    kill_series,
    sluice_description,
    usual_kinds,
)
from dev_cluster.chaos.judge import Outcome
from dev_cluster.configuration import ADDRESSES
from dev_cluster.layout import INSIDE
from sluice.plugin.sources import SourcesUnavailableError
from tests.integration.jobs import sbatch, submit
from tests.integration.settled import PATIENCE, fresh_status, lasts_until, start_again, until
from tests.integration.settled import status as plugins

pytestmark = pytest.mark.cluster

_SEED = 11


@pytest.fixture(scope="module")
def chaos() -> Iterator[Chaos]:
    """A cluster whose controllers can be hurt in every way."""
    try:
        made = Chaos(sluice_description(None), accounting=True, slurm_conf=SITE_CONF, power=True, agent=True)
    except SourcesUnavailableError as error:
        pytest.skip(f"no sources of Slurm: {error}")
    with made:
        yield made


def lease(chaos: Chaos) -> dict[str, str]:
    """The lease's file."""
    text = (chaos.cluster.layout.state / "sluice.lease").read_text()
    return dict(line.split(" ", 1) for line in text.splitlines())


def sluice(chaos: Chaos, *words: str, host: str = "ctl2") -> tuple[int, str]:
    """`sluice failover` on a controller: its exit status, and what it printed."""
    done = chaos.cluster.run(["sluice", "failover", *words], node=host, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def return_to_ctl1(chaos: Chaos) -> None:
    """Both controllers up, the primary in charge; it is not started before the leader can hear it."""
    assert chaos.wait(lambda: chaos.cluster.run(["squeue", "-h"], check=False).returncode == 0, PATIENCE)
    for host in CONTROLLERS:
        if chaos.ended(host):
            chaos.start(host)
    assert chaos.wait(lambda: chaos.in_charge("ctl1") and lease(chaos)["state"] == "held", PATIENCE)
    up = "ctl1 is UP", "ctl2 is UP"
    ping = ["scontrol", "ping"]
    assert chaos.wait(lambda: all(word in chaos.cluster.run(ping, check=False).stdout for word in up), PATIENCE)


def assert_nothing_lost(outcome: Outcome, least: int) -> None:
    """What the journal promises."""
    assert outcome.acknowledged >= least
    counts = {name: getattr(outcome, name) for name in ("lost", "revived", "run_again", "id_twice", "at_once", "left")}
    assert not any(counts.values()), (counts, outcome.lost_jobs, outcome.others)


def test_nothing_acknowledged_is_lost(chaos: Chaos, full_scale: bool) -> None:
    """The leader is killed, and stopped, under load."""
    kinds = usual_kinds(30) + ["stop"] * 5 if full_scale else ["takeover"]
    kills = kill_series(chaos, kinds, 20.0 if full_scale else 8.0, _SEED)
    assert kills.no_service == 0
    assert_nothing_lost(kills.outcome, 20)


def test_power_cuts(chaos: Chaos, full_scale: bool) -> None:
    """Both controllers lose their power under load, and with it all that was not synced."""
    if not full_scale:
        pytest.skip("takes minutes: make soak")
    return_to_ctl1(chaos)
    kills = kill_series(chaos, ["power"] * 5, 10.0, _SEED + 2)
    assert kills.no_service == 0
    assert_nothing_lost(kills.outcome, 50)


def test_every_end_that_a_node_reports_is_durable_before_the_answer(chaos: Chaos) -> None:
    """As the node does not say it again. The ends of many jobs at once, on slow storage."""

    def not_waited() -> int:
        return int(fresh_status(chaos.cluster)["counters"].get("journal.not_waited", 0))

    assert chaos.faults is not None
    return_to_ctl1(chaos)
    chaos.cluster.run(["scancel", "-u", "alice"], user="alice")
    before = not_waited()
    numbers = [int(submit(chaos.cluster, wrap=lasts_until(INSIDE / "ends"))) for _ in range(16)]
    assert chaos.wait(lambda: {chaos.states()[number] for number in numbers} == {"RUNNING"}, PATIENCE)
    with chaos.faults.on("slow"):
        (chaos.cluster.folder / "ends").touch()
        assert chaos.wait(lambda: {chaos.states()[number] for number in numbers} == {"COMPLETED"}, PATIENCE)
    assert not_waited() == before


def test_status_drill_and_history(chaos: Chaos) -> None:
    return_to_ctl1(chaos)
    number = int(submit(chaos.cluster))
    assert chaos.wait(lambda: chaos.states().get(number) == "RUNNING", PATIENCE)
    until(lambda: plugins(chaos.cluster)["counters"].get("journal.open"))
    status, said = sluice(chaos, "status", "--json")
    found = json.loads(said)
    assert status == 0, said
    assert found["leader"] == "ctl1"
    assert found["lease"]["host"] == "ctl1"
    assert found["journal"]["open"] == 1
    argv = ["sluice", "failover", "drill", "--yes", "--start-command=", "--limit=120", "--json"]
    drill = chaos.cluster.command([*argv, "--reports=/run/sluice-cluster/drills"], node="ctl2")
    with subprocess.Popen(drill, stdout=subprocess.PIPE, text=True) as process:
        # Not before it serves: Slurm asks for the place once, and a primary that nobody heard waits for its supervisor.
        serves = ["squeue", "-h"]
        assert chaos.wait(
            lambda: chaos.in_charge("ctl2") and chaos.cluster.run(serves, check=False).returncode == 0, PATIENCE
        )
        chaos.start("ctl1")
        said, _ = process.communicate(timeout=3 * PATIENCE)
    report = json.loads(said)
    assert process.returncode == 0, said
    assert report["good"]
    assert [leg["to"] for leg in report["legs"]] == ["ctl2", "ctl1"]
    assert all(leg["before"] == leg["after"] for leg in report["legs"])
    chaos.cluster.run(["scancel", str(number)])
    status, said = sluice(chaos, "history", "-P", "--reports=/run/sluice-cluster/drills")
    kinds = [line.split("|")[2] for line in said.splitlines()[1:]]
    assert status == 0
    assert "lease.taken" in kinds
    assert kinds[-1] == "drill" or "drill" in kinds


def test_cut_off_from_the_primary_a_backup_does_not_lead(chaos: Chaos, full_scale: bool) -> None:
    """The storage is alive: the backup does not write next to the primary, even if it is asked to take over."""
    assert chaos.faults is not None
    return_to_ctl1(chaos)
    epoch = lease(chaos)["epoch"]
    log = chaos.cluster.log("slurmctld@ctl2")
    asked = log.read_text().count("waits for the lease")
    with chaos.faults.on("cut.ctl2", ADDRESSES["ctl1"] + "\n"):
        chaos.cluster.run(["scontrol", "takeover"], node="ctl2", check=False)
        assert chaos.wait(lambda: log.read_text().count("waits for the lease") > asked, PATIENCE)
        time.sleep(3 * TIMEOUT_S if full_scale else LEASE_S * 2)
        assert chaos.in_charge("ctl1")
        assert (lease(chaos)["host"], lease(chaos)["epoch"]) == ("ctl1", epoch)
        assert chaos.slurmctld("ctl1") is not None
    chaos.cluster.stop_daemon("slurmctld@ctl2", number=signal.SIGKILL)  # else its supervisor does, in a minute
    return_to_ctl1(chaos)


def test_a_primary_that_the_backup_did_not_hear_asks_again(chaos: Chaos) -> None:
    """Slurm asks once, as it starts: e.g. while the backup takes over, and does not listen yet."""
    assert chaos.faults is not None
    return_to_ctl1(chaos)
    log = chaos.cluster.log("slurmctld@ctl1")

    def count(words: str) -> int:
        return log.read_text().count(words)

    chaos.kill("ctl1")
    serves = ["squeue", "-h"]
    assert chaos.wait(lambda: chaos.in_charge("ctl2"), PATIENCE)
    assert chaos.wait(lambda: chaos.cluster.run(serves, check=False).returncode == 0, PATIENCE)
    waits, asked = count("waits for the lease"), count("for its place again")
    with chaos.faults.on("cut.ctl1", ADDRESSES["ctl2"] + "\n"):
        chaos.start("ctl1")
        assert chaos.wait(lambda: count("waits for the lease") > waits, PATIENCE)
        own = chaos.slurmctld("ctl1")
    assert chaos.wait(lambda: chaos.in_charge("ctl1"), PATIENCE)
    assert count("for its place again") > asked
    assert chaos.slurmctld("ctl1") == own  # its supervisor would have ended it after 30 s
    return_to_ctl1(chaos)


def launches_under_way(chaos: Chaos, address: str) -> int:
    """How many launches a node has that it has not read; other messages are smaller."""
    own = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    rows = [line.split() for line in chaos.cluster.run(["cat", "/proc/net/tcp"]).stdout.splitlines()]
    return sum(row[1].startswith(f"{own}:") and int(row[4].partition(":")[2], 16) > 1024 for row in rows[1:])


def test_a_controller_that_dies_while_it_launches_jobs(chaos: Chaos) -> None:
    """A node that cannot confirm a launch asks the next controller for a requeue: a job that was cancelled stays so. A
    job whose launch did not reach its node is requeued soon, and runs."""
    assert chaos.faults is not None
    return_to_ctl1(chaos)

    def idle() -> list[str]:
        return [one.name for one in chaos.cluster.node_states() if one.state == "idle"]

    assert chaos.wait(lambda: len(idle()) > 1, 180)  # others may be cleaning up
    other, node = idle()[-2:]
    address, unreached = (f"127.1.0.{one.removeprefix('n')}" for one in (node, other))
    pids = {one.name: one.pid for one in chaos.cluster.daemons()}
    slurmd = pids[f"slurmd@{node}"]
    script = f"--wrap=touch {INSIDE}/home/alice/launched-$SLURM_JOB_ID; exec sleep 600"

    def submit(*where: str) -> int:
        return int(sbatch(chaos.cluster, "--requeue", *where, script))

    def state(number: int) -> str:
        return chaos.states()[number]

    def ran(number: int) -> bool:
        return (chaos.cluster.folder / f"home/alice/launched-{number}").exists()

    def cancel(number: int) -> None:
        chaos.cluster.run(["scancel", str(number)], user="alice")

    with chaos.faults.on("cut.ctl2", f"{address}\n"):  # the node gets the cancellation later
        chaos.send(slurmd, signal.SIGSTOP)
        chaos.send(pids[f"slurmd@{other}"], signal.SIGSTOP)
        try:
            unsent = submit("-w", other)
            first, second = submit("-w", node), submit("-w", node)
            assert chaos.wait(lambda: launches_under_way(chaos, address) == 2, 20)
            assert chaos.wait(lambda: launches_under_way(chaos, unreached) == 1, 20)
            with chaos.faults.on("cut.ctl1", f"{address}\n"):
                cancel(first)
                chaos.kill("ctl1")
            chaos.cluster.stop_daemon(f"slurmd@{other}", number=signal.SIGKILL)  # what it has not read is lost
            chaos.cluster.start_daemon(f"slurmd@{other}")
            serves = ["squeue", "-h"]
            assert chaos.wait(lambda: chaos.cluster.run(serves, check=False).returncode == 0, 60)
            assert (state(second), state(unsent)) == ("RUNNING", "RUNNING")
            cancel(second)
        finally:
            chaos.send(slurmd, signal.SIGCONT)
        log = chaos.cluster.log(f"slurmd@{node}")
        told = [f"Could not launch job {number} and not able to requeue it" for number in (first, second)]
        assert chaos.wait(lambda: all(one in log.read_text() for one in told), 30), chaos.states()
    assert not ran(unsent)
    assert chaos.wait(lambda: state(unsent) == "PENDING", PATIENCE)
    start_again(chaos.cluster, str(unsent))
    assert chaos.wait(lambda: ran(unsent), PATIENCE)
    cancel(unsent)
    later = submit("-x", node)  # what this controller launches itself may be requeued as ever
    assert chaos.wait(lambda: ran(later), 180)
    cancel(later)
    assert chaos.wait(lambda: state(later) == "CANCELLED", 180)
    chaos.cluster.run(["scontrol", "requeue", str(later)])
    assert state(later) == "PENDING"
    cancel(later)
    return_to_ctl1(chaos)
    assert state(later) == "CANCELLED"
    assert {state(first), state(second)} <= {"CANCELLED", "COMPLETING"}
    assert not ran(first) and not ran(second)


def test_a_storage_that_hangs_ends_the_leader(chaos: Chaos) -> None:
    """Before the backup may lead; which does so when the storage is back."""
    assert chaos.faults is not None
    return_to_ctl1(chaos)
    begun = time.monotonic()
    with chaos.faults.on("hang"):
        assert chaos.wait(lambda: chaos.ended("ctl1"), PATIENCE)
        took = time.monotonic() - begun
    assert took < LEASE_S * 1.5 + 3  # the supervisor gives its own process for the storage two seconds
    assert "was not renewed" in chaos.cluster.log_tail("slurmctld@ctl1", 40)
    assert chaos.wait(lambda: chaos.in_charge("ctl2"), PATIENCE)
    return_to_ctl1(chaos)


def test_a_full_disk_is_said_and_recovers(chaos: Chaos) -> None:
    """Submissions are refused with the reason; afterwards all goes on by itself, with what was acknowledged before."""
    assert chaos.faults is not None
    return_to_ctl1(chaos)
    submit = ["sbatch", "--parsable", "-o/dev/null", "--hold", "--wrap=true"]
    before = int(chaos.cluster.run(submit, user="alice").stdout)
    with chaos.faults.on("full"):
        refused = chaos.cluster.run(submit, user="alice", check=False, timeout=60)
        assert refused.returncode != 0
        assert refused.stderr.strip()
    return_to_ctl1(chaos)
    assert chaos.wait(lambda: chaos.cluster.run(submit, user="alice", check=False).returncode == 0, PATIENCE)
    assert chaos.states()[before] == "PENDING"
    chaos.cluster.run(["scancel", "-u", "alice"])
    half = ["find", str(chaos.cluster.layout.state), "-name", "*.new"]  # there is one while Slurm writes
    assert chaos.wait(lambda: not subprocess.run(half, capture_output=True, check=False).stdout, PATIENCE)


def test_accounting_is_complete_after_slurmdbd_was_down(chaos: Chaos, full_scale: bool) -> None:
    """Killed under load, and with a database that hangs: jobs go on, and each is in the accounting once."""
    return_to_ctl1(chaos)
    chaos.cluster.stop_daemon("slurmdbd", number=signal.SIGKILL)
    chaos.start_load(5.0, _SEED + 1)
    time.sleep(600 if full_scale else 4)
    database = next(one.pid for one in chaos.cluster.daemons() if one.name == "mariadbd")
    chaos.send(database, signal.SIGSTOP)
    chaos.cluster.start_daemon("slurmdbd")
    time.sleep(2)
    chaos.send(database, signal.SIGCONT)
    outcome = chaos.stop_load()
    assert_nothing_lost(outcome, 10)
    numbers = {entry["id"] for entry in chaos.log() if entry["what"] == "accepted" and entry["tasks"] == 1}

    def accounted() -> list[tuple[int, str]]:
        window = ["-S", "now-1days", "-E", "now+1days"]  # those that were to begin in an hour, too
        shown = chaos.cluster.run(["sacct", "-anXDP", *window, "-o", "JobIDRaw,State"], timeout=60, check=False).stdout
        rows = [line.split("|") for line in shown.splitlines()]
        return [(int(number), state) for number, state in rows if int(number) in numbers]

    ended = ("COMPLETED", "CANCELLED")
    complete = chaos.wait(lambda: {n for n, state in accounted() if state.startswith(ended)} == numbers, 2 * PATIENCE)
    assert complete, (numbers - {number for number, _ in accounted()}, accounted())
    assert sorted(number for number, _ in accounted()) == sorted(numbers)


def test_events_of_what_happened_are_in_order(chaos: Chaos) -> None:
    """Epochs only grow, over all controllers and all of the above but the power cut, which may lose the last lines."""
    taken = []
    for host in CONTROLLERS:
        path = chaos.cluster.layout.state / f"sluice.failover.{host}.jsonl"
        taken += [json.loads(line) for line in path.read_text().splitlines() if line]
    epochs = [one["epoch"] for one in sorted(taken, key=lambda one: one["time"]) if one["kind"] == "lease.taken"]
    assert epochs == sorted(set(epochs))
    assert Path(chaos.cluster.layout.state / "sluice.lease").exists()
