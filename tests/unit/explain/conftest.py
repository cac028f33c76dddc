"""Decisions of a random churn, which several tests read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sluice.explain.decisions import list_files
from tests.unit.explain.decision_files import run_churn

_ROOT = Path(__file__).parents[3]
_PARTS = (
    "decisions/decisions",
    "decisions/encoding",
    "decisions/ring",
    "decisions/topology",
    "decisions/writer",
    "order/order",
    "order/factors",
    "order/files",
    "order/ranks",
    "order/tenants",
    "queue/queue",
    "runtime/controller",
    "runtime/log",
    "runtime/settings",
    "runtime/status",
    "runtime/ticker",
)


@pytest.fixture(scope="session")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins' recorder under a random churn, as a program."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    program = tmp_path_factory.mktemp("tool") / "tool_decisions"
    sources = [_ROOT / "slurm_plugin/tests/tool_decisions.c", _ROOT / "slurm_plugin/rules/policy.c"]
    sources += [_ROOT / f"slurm_plugin/{part}.c" for part in _PARTS]
    sources += sorted((_ROOT / "native/core").glob("*.c"))
    includes = [f"-I{_ROOT / folder}" for folder in ("slurm_plugin", "native/include", "native/core")]
    options = ["-std=gnu11", "-O1", "-march=x86-64-v2", "-mcx16", "-D_GNU_SOURCE", *includes]
    subprocess.run(["gcc", *options, "-o", program, *sources, "-lm", "-lpthread", "-ldl"], check=True, timeout=300)
    return program


@pytest.fixture(scope="session")
def sample(churn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of entries."""
    folder = tmp_path_factory.mktemp("sample") / "decisions"
    run_churn(churn, folder, 7, steps=300)
    (path,) = list_files(folder)
    return path
