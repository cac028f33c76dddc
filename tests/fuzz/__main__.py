"""`python -m tests.fuzz [NAME|all [RUNS]]`: one target or all, with atheris (of PyPI), 100,000 runs each."""

from __future__ import annotations

import gc
import inspect
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz.parsers import TARGETS

_PARTS = ("json", "policy", "prolog_epilog", "sluice", "tests")


def instrument() -> None:
    """Our packages, which atheris's own import hook does not see in an editable installation."""
    for one in gc.get_objects():
        if inspect.isfunction(one) and str(one.__module__).partition(".")[0] in _PARTS:
            atheris.instrument_func(one)


def fuzz(name: str, runs: int) -> None:
    """Does not return: atheris ends the process."""
    instrument()
    logging.disable()
    target = TARGETS[name]()
    folder = Path(tempfile.mkdtemp(prefix="sluice-corpus-"))
    for number, seed in enumerate(target.seeds):
        (folder / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-runs={runs}", "-max_len=8192", "-print_final_stats=1", str(folder)], target.run)
    atheris.Fuzz()


def main() -> int:
    """All targets, a process each."""
    words = sys.argv[1:]
    runs = int(words[1]) if len(words) > 1 else 100_000
    if words and words[0] != "all":
        fuzz(words[0], runs)
    codes = []
    for name in TARGETS:
        print(f"{name}: {runs} runs", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", "tests.fuzz", name, str(runs)], check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
