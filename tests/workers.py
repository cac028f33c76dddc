"""Workers of pytest-xdist as `tools/run-tests` wants them: ``-p tests.workers -n N --dist loadfile``.

Tests of daemons wait most of the time: three modules of them leave more than half of two processors idle. So the last
worker takes modules from the end, where those without daemons are, at a lower priority. When it has run all of them it
goes on with the shortest modules of daemons, at the same priority as the rest, which take them from the front, as
tests/conftest.py orders them.
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

DAEMONS = "tests/integration/"
LOWER = 5
"""Added to the last worker's niceness while it has no daemons: those have a processor when they want one."""
_BEGAN = os.nice(0)


def pytest_configure(config: pytest.Config) -> None:
    """Lower the last worker's priority."""
    about = getattr(config, "workerinput", None)
    if about is not None and _is_last(about):
        os.nice(LOWER)


def pytest_runtest_logstart(nodeid: str) -> None:
    """The last worker has come to daemons, which inherit its priority."""
    if nodeid.startswith(DAEMONS) and os.nice(0) != _BEGAN:
        with suppress(PermissionError):  # not root: then they are skipped
            os.setpriority(os.PRIO_PROCESS, 0, _BEGAN)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Share modules from both ends."""
    return _BothEnds(config, log)


class _BothEnds(LoadFileScheduling):
    def _assign_work_unit(self, node: WorkerController) -> None:
        if _is_last(node.workerinput):
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def _is_last(about: dict[str, object]) -> bool:
    """Of N workers, gw0 to gwN-1. One that replaces a worker that died has a higher number; a single one runs all."""
    count = int(str(about["workercount"]))
    return count > 1 and about["workerid"] == f"gw{count - 1}"
