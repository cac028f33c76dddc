"""Batch jobs that end while no controller takes their end, on real daemons with the node agent."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dev_cluster.chaos.cluster import TIMEOUT_S, Chaos, sluice_description
from dev_cluster.layout import INSIDE
from sluice.plugin.sources import SourcesUnavailableError
from tests.integration.jobs import sbatch
from tests.integration.settled import PATIENCE, lasts_until, start_again
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def chaos(request: pytest.FixtureRequest) -> Iterator[Chaos]:
    """Two controllers with the journal, and agents on the nodes."""
    root = None if request.param == "native" else request.getfixturevalue("trixie_root")
    # sched/backfill starts heterogeneous jobs, and what was requeued: by itself it looks twice a minute.
    conf = f"SlurmctldTimeout={TIMEOUT_S}\nSchedulerParameters=bf_interval=1,sched_interval=2\n"
    try:
        made = Chaos(sluice_description(None), slurm_conf=conf, agent=True, root=root)
    except SourcesUnavailableError as error:
        pytest.skip(f"no sources of Slurm: {error}")
    with made:
        yield made


def ended_folder(chaos: Chaos, host: str) -> Path:
    """Where a node's agent keeps notes of jobs' ends."""
    return chaos.cluster.layout.folder / "nodes" / host / "ended"


def notes(chaos: Chaos) -> dict[int, str]:
    """The jobs whose ends some node has noted, and nobody has taken, each with its slurmstepd."""
    found = {}
    for path in (chaos.cluster.layout.folder / "nodes").glob("*/ended/*"):
        with suppress(FileNotFoundError):  # it is removed just now
            if path.name.isdecimal() and (words := path.read_text().split()):
                found[int(path.name)] = words[-1]
    return found


def ends(path: Path, status: int) -> str:
    """A job's script: it ends so when a file is there."""
    return f"{lasts_until(path)}; exit {status}"


def test_an_end_that_no_controller_takes_is_reported_again(chaos: Chaos) -> None:
    """Single jobs, an array, a heterogeneous and a requeued one end while nobody leads.

    Their slurmstepds are killed, as they give up of themselves some seconds sooner or later than a takeover takes.
    """
    assert chaos.wait(lambda: chaos.in_charge("ctl1"), PATIENCE)
    go, started = INSIDE / "go", "home/alice/started"

    def submit(status: int, *options: str, first: str = "") -> int:
        return int(sbatch(chaos.cluster, *options, f"--wrap={first}{ends(go, status)}"))

    inherits = "--export=ALL,SLURM_RESTART_COUNT=5"  # as of a job that a requeued one submits
    good, failed, again = submit(0), submit(3, inherits), submit(0, inherits, first=f"touch {INSIDE / started}; ")
    array = submit(0, "--array=1-2")
    script = chaos.cluster.folder / "het.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n1\n{ends(go, 0)}\n")
    het = int(sbatch(chaos.cluster, str(INSIDE / "het.sh")))
    lives = int(sbatch(chaos.cluster, "--wrap=exec sleep 600"))

    def states() -> list[tuple[int, str]]:
        return sorted((number, state) for number, state in chaos.states().items() if number >= good)

    def running() -> int:
        return sum(state == "RUNNING" for _, state in states())

    assert chaos.wait(lambda: running() == 8, PATIENCE), states()
    assert chaos.wait(lambda: (chaos.cluster.folder / started).exists(), PATIENCE)
    chaos.cluster.run(["scontrol", "requeue", str(again)])
    start_again(chaos.cluster, str(again))
    assert chaos.wait(lambda: running() == 8, PATIENCE), states()
    backup = chaos.slurmctld("ctl2")
    assert backup is not None
    chaos.send(backup, signal.SIGSTOP)  # nobody leads before all have ended, however long that takes
    try:
        chaos.kill("ctl1")
        chaos.cluster.run(["touch", str(go)])
        assert chaos.wait(lambda: len(notes(chaos)) == 6, PATIENCE), notes(chaos)
        batch = set(notes(chaos))
        chaos.cluster.run(["kill", "-9", *notes(chaos).values()], check=False)  # one may have given up already
    finally:
        chaos.send(backup, signal.SIGCONT)
    assert chaos.wait(lambda: chaos.in_charge("ctl2"), PATIENCE)
    wanted = {number: "COMPLETED" for number in (*batch, het + 1)} | {failed: "FAILED", lives: "RUNNING"}
    assert chaos.wait(lambda: dict(states()) == wanted and not notes(chaos), PATIENCE), (states(), notes(chaos))
    shown = chaos.cluster.run(["scontrol", "show", "job", str(failed)]).stdout
    assert "ExitCode=3:0" in shown
    assert "Restarts=1" in chaos.cluster.run(["scontrol", "show", "job", str(again)]).stdout
    assert array in batch

    # A late word about another run, user or node of a job that runs ends nothing.
    host = chaos.cluster.run(["squeue", "-h", "-j", str(lives), "-o", "%B"]).stdout.strip()
    uid = chaos.cluster.run(["id", "-u", "alice"]).stdout.strip()
    other = next(name for name in ("n1", "n2") if name != host)
    now = int(time.time())
    for where, restarts, owner, ended in (
        (host, 1, uid, now),
        (host, 0, "2", now),
        (other, 0, uid, now),
        (host, 0, uid, now - 86400),
    ):
        note = ended_folder(chaos, where) / str(lives)
        note.write_text(f"sluice-ended 1 {lives} {restarts} {owner} 0 {ended} 4000000\n")
    assert chaos.wait(lambda: not notes(chaos), PATIENCE)
    assert chaos.states()[lives] == "RUNNING"
    comment = chaos.cluster.run(["scontrol", "show", "job", str(lives)]).stdout
    assert "sluice-ended" not in comment
