#!/usr/bin/env python3
"""Writes docs/tested-on.md of what test runs have left in build/tested-on.json: ``tools/tested_on.py``, after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Tested on

Test runs count what they ran on; `tools/tested_on.py` wrote this page: the latest run of each module on the machine
where it was called, and earlier rows until all their modules have run there again. GPUs were simulated. Tests without
Slurm's daemons are not counted. *init*: `systemd` is a machine that boots, with the shipped units, in a container or
under QEMU; `sluice cluster` is [a cluster on one machine](dev-cluster.md).
(tag): a Slurm built from its tag by `tools/build-slurm`; those rows are of runs by hand.

| Slurm | cgroup | init | Debian | modules | passed | failed | when |
|---|---|---|---|---|---|---|---|
"""


def page(results: dict[str, dict[str, dict[str, Any]]], before: str = "") -> str:
    """The page's text: a row for each place where modules ran, and those of the page `before` that none covers."""
    rows = [_row(where, modules) for where, modules in results.items()]
    earlier = before.partition(HEAD.splitlines()[-1] + "\n")[2].splitlines(keepends=True)
    kept = [row for row in earlier if not any(_covers(newer, row) for newer in rows)]
    return HEAD + "".join(sorted([*rows, *kept]))


def _row(where: str, modules: dict[str, dict[str, Any]]) -> str:
    passed, failed = (sum(one.get(outcome, 0) for one in modules.values()) for outcome in ("passed", "failed"))
    days = sorted({one["day"] for one in modules.values()})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    names = ", ".join(sorted(modules))
    return f"| {' | '.join(where.split('|'))} | {names} | {passed} | {failed} | {when} |\n"


def _covers(newer: str, older: str) -> bool:
    """Whether all modules of an earlier row have run there again."""
    (*where, modules), (*place, before) = (row.strip("|\n").split("|")[:5] for row in (newer, older))
    return where == place and set(before.replace(" ", "").split(",")) <= set(modules.replace(" ", "").split(","))


if __name__ == "__main__":
    file = ROOT / "docs/tested-on.md"
    results = json.loads((ROOT / "build/tested-on.json").read_text(encoding="utf-8"))
    file.write_text(page(results, file.read_text(encoding="utf-8")), encoding="utf-8")
