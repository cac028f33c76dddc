"""Waiting for what slurmctld does in its own time, not for a number of seconds: a loaded machine needs more."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from sluice.base.files import write_atomic
from tests.integration.jobs import state, submit

PATIENCE = 120.0
"""Seconds for what a quiet machine does in one or two."""
_PAUSES = "exec {quiet}<> <(:); pause() { read -rt $1 -u $quiet || :; }; "  # it always times out
_numbers = itertools.count(1)


def until(
    look: Callable[[], Any],
    good: Callable[[Any], Any] = bool,
    timeout: float = PATIENCE,
    *,
    shows: Callable[[], object] = lambda: None,
) -> Any:
    """Look until it is good; what was seen then. A file that is just being replaced is looked at again.

    At first ten times a second, later after a tenth of the time that has passed: most looks start a command, and took
    a sixth of a processor. What was seen last is in the error, with what `shows` returns.
    """
    began = time.monotonic()
    seen: Any = None
    while True:
        with suppress(FileNotFoundError):
            if good(seen := look()):
                return seen
        passed = time.monotonic() - began
        assert passed < timeout, (seen, shows())
        time.sleep(min(max(0.1, passed / 10), 0.5))


def _status_file(cluster: DevCluster, host: str) -> Path:
    return cluster.layout.state / f"sluice.status.{host}"


def status(cluster: DevCluster, host: str = "ctl1") -> dict[str, Any]:
    """What the plugins in a controller's slurmctld said of themselves last. Raises FileNotFoundError."""
    found: dict[str, Any] = json.loads(_status_file(cluster, host).read_text())
    return found


def fresh_status(cluster: DevCluster, host: str = "ctl1") -> dict[str, Any]:
    """The same, with all that was counted before this call. Not with the controllers' daemon, which reads that file.

    slurmctld writes its file again within a second where it is missing. It may have collected the first one before the
    file was removed, but not the second one.
    """
    for _ in range(2):
        _status_file(cluster, host).unlink(missing_ok=True)
        found: dict[str, Any] = until(lambda: status(cluster, host))
    return found


def set_level(cluster: DevCluster, level: str) -> None:
    """Write the level and wait until it is in force."""
    write_atomic(cluster.layout.slurm / "sluice.level", level + "\n")
    until(lambda: status(cluster)["level"], lambda now: now == level)


def await_policy(cluster: DevCluster, host: str = "ctl1") -> None:
    """Wait until the compiled policy that is in /etc/slurm is in force."""
    text = (cluster.layout.slurm / "sluice.policy").read_text()
    wanted = re.findall(r"^checksum = crc32:(\w+)$", text, re.MULTILINE)[-1]
    until(lambda: (status(cluster, host)["policy"] or {}).get("checksum"), lambda now: now == wanted)


def let_it_save(cluster: DevCluster, *words: str, user: str = "alice") -> str:
    """Wait until slurmctld has saved all that it has said so far; what it has not is forgotten when it is killed.

    What it saves holds the held job that is submitted now, with more `words` of sbatch, only if it also holds what was
    before it. The job's id.
    """
    name = f"saved-{next(_numbers)}-{time.time_ns()}"
    job = submit(cluster, "--hold", "-t1", f"--job-name={name}", *words, wrap="true", user=user)
    await_saved(cluster, name)
    return job


def await_saved(cluster: DevCluster, word: str) -> None:
    """Wait until the saved state of jobs holds a word, e.g. a job's name."""
    saved = cluster.layout.state / "job_state"
    until(saved.read_bytes, lambda state: word.encode() in state)


def await_health(cluster: DevCluster, host: str = "ctl1") -> None:
    """Wait until the controllers' daemon has looked at all nodes and jobs once more, which it does every five seconds:
    its duty of health runs once a second, and looks when they are over."""
    path = cluster.folder / "controllerd" / host / "status.json"

    def runs() -> int:
        duties = json.loads(path.read_text())["duties"]
        return next(int(one["runs"]) for one in duties if one["name"] == "health")

    before = until(runs)
    until(runs, lambda now: now >= before + 8)


def start_again(cluster: DevCluster, *jobs: str, user: str = "root", **options: Any) -> None:
    """Let requeued jobs start, for which Slurm waits two minutes, as soon as they have left their nodes.

    Not in the second in which a run ended: slurmd distinguishes runs by the seconds of their credentials, and fails one
    that begins in the same one.
    """
    for job in jobs:
        until(lambda job=job: state(cluster, job, **options), "PENDING".__eq__)  # type: ignore[misc]
        cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], user=user, **options)


def block_saving(cluster: DevCluster) -> bool:
    """Put a folder where slurmctld would write the state of jobs; false while it just writes there."""
    with suppress(FileExistsError):
        (cluster.layout.state / "job_state.new").mkdir()
        return True
    return False


def looping(script: str) -> str:
    """A command for a script of bash that loops with `pause SECONDS`, which starts no process as `sleep` would."""
    return f"bash -c {shlex.quote(_PAUSES + script)}"


def lasts_until(path: Path | str) -> str:
    """A job's shell script that ends when a file is there."""
    return looping(f"until [ -e {path} ]; do pause 0.1; done")
