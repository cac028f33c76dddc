"""`python -m tests.fuzz [NAME|all [RUNS]]`: one target or all, with atheris (of PyPI), 100,000 runs each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["health", "prolog_epilog", "sluice_base", "slurm_client", "usage"]):
    from tests.fuzz.parsers import TARGETS


def fuzz(name: str, runs: int) -> None:
    """Does not return: atheris ends the process."""
    target = TARGETS[name]()
    folder = Path(tempfile.mkdtemp(prefix="sluice-corpus-"))
    for number, seed in enumerate(target.seeds):
        (folder / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-runs={runs}", "-max_len=8192", "-verbosity=0", str(folder)], target.run)
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
