"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("sluice", deadline=None)  # by the clock, a busy machine's examples take longer
hypothesis.settings.load_profile("sluice")
# Every process that the tests start inherits it, so that those left behind can be distinguished from others' processes.
MARK = f"SLUICE_TEST_SESSION={os.getpid()}"
LEFT_BY_WORKERS: list[str] = []
RAN_ON: dict[tuple[str, str], Counter[str]] = {}
TOOK: defaultdict[str, float] = defaultdict(float)  # seconds, by module
LEFT_BEHIND = 70  # exit code; none of pytest's
LONG_S = 100
# One that is taken last would run alone, while the other workers have no work. A run names at its end those of more
# than LONG_S, with their times, which is the order here.
LONGEST_FIRST = (
    "test_placement_hook",
    "test_plan",
    "test_native",
    "test_policy",
    "test_report",
    "test_hostile",
    "test_power_budgets",
    "test_plugin_soak",
    "test_health",
    "test_tenants",
    "test_serve_takeover",
    "test_refused_jobs",
    "test_fleet",
    "test_failover",
    "test_agent",
    "test_replica",
    "test_serve",
    "test_boot",
    "test_gpu_roles",
    "test_order_explain",
    "test_fleet_newer",
    "test_examples",
    "test_gang",
    "test_plugin_frame",
    "test_fabric_discovery",
    "test_cgroup2",
    "test_system_checkpoint",
    "test_moved_checkpoint",
    "test_gpu_checkpoint",
    "test_checkpoint_newer",
    "test_node_faults",
    "test_guard",
    "test_web",
    "test_metrics",
    "test_slurm_features",
    "test_journal",
    "test_views",
    "test_rungs",
    "test_web_pages",
    "test_gateway_process",
    "test_gateway_forms",
    "test_submit",
    "test_cluster",
    "test_differential",
)


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist gets a folder with a path as short as that of a single process: sockets are in it."""
    if hasattr(config, "workerinput"):
        config.option.basetemp = f"{tempfile.gettempdir()}/pytest-{os.getpid()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of daemons from the longest module on, then the others up to the longest: with `tests.workers` they are
    begun from both ends, and workers meet at short modules, so that none ends long before the others.
    """
    place = {module: number for number, module in enumerate(LONGEST_FIRST)}

    def key(item: pytest.Item) -> tuple[bool, int]:
        others = "integration" not in item.path.parts
        number = place.get(item.path.stem, len(place))
        return others, -number if others else number

    items.sort(key=key)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Mark what will be started, and do not wait for it in a test that has failed: it may wait for the test."""
    name, value = MARK.split("=")
    os.environ[name] = value
    leave = subprocess.Popen.__exit__

    def end(process: subprocess.Popen[Any], kind: Any, *about: Any) -> None:
        if kind is not None:
            process.kill()
        leave(process, kind, *about)

    subprocess.Popen.__exit__ = end  # type: ignore[assignment, method-assign]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Tests leave no process behind: end and name those that they left, and fail."""
    if session.config.getoption("numprocesses", None):
        left = LEFT_BY_WORKERS
    else:
        left = [f"{pid} {command}" for pid, command in _end_marked().items()]
    if RAN_ON and not hasattr(session.config, "workeroutput"):
        from tests.integration.ran_on import keep

        keep(RAN_ON)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = left
        shutil.rmtree(session.config.option.basetemp, ignore_errors=True)
        return
    for process in left:
        print(f"\nleft behind by a test: {process}")
    if left:
        session.exitstatus = LEFT_BEHIND


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count tests of daemons by what they ran on, and time; with pytest-xdist, where the workers' reports arrive."""
    TOOK[Path(report.location[0]).stem] += report.duration  # with what its tests share
    where = dict(report.user_properties).get("ran_on")
    if report.when == "call" and where is not None:
        key = str(where), Path(report.location[0]).stem
        RAN_ON.setdefault(key, Counter())[report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went."""
    for module, seconds in sorted(TOOK.items(), key=lambda one: -one[1]):
        if seconds > LONG_S:
            known = "" if module in LONGEST_FIRST else ", not in LONGEST_FIRST"
            terminalreporter.write_line(f"{module}: {seconds:.0f} s{known}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """What a worker's tests left behind, with pytest-xdist."""
    LEFT_BY_WORKERS.extend(getattr(node, "workeroutput", {}).get("left", ["a worker that died did not report"]))


def _end_marked() -> dict[int, str]:
    left = _marked()
    for pid in left:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return left


def _marked() -> dict[int, str]:
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            if int(folder.name) != os.getpid() and MARK.encode() in environment:
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue
    return found


@pytest.fixture(scope="session")
def full_scale() -> bool:
    """True under `make soak`: the full counts instead of the reduced ones, through the same code."""
    return os.environ.get("SLUICE_TEST_SCALE") == "full"
