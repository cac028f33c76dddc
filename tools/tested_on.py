#!/usr/bin/env python3
"""Writes docs/tested-on.md of what test runs have left in build/tested-on.json: ``tools/tested_on.py``, after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Tested on

Test runs count what they ran on; `tools/tested_on.py` wrote this page: the latest run of each module on the machine
where it was called. GPUs were simulated. Tests without Slurm's daemons are not counted. *init*: `systemd` is a machine
that boots, with the shipped units, in a container or under QEMU; `sluice cluster` is
[a cluster on one machine](dev-cluster.md).
(tag): a Slurm built from its tag by `tools/build-slurm`; those rows are of runs by hand.

| Slurm | cgroup | init | Debian | modules | passed | failed | when |
|---|---|---|---|---|---|---|---|
"""


def page(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The page's text."""
    rows = []
    for where, modules in sorted(results.items()):
        passed, failed = (sum(one.get(outcome, 0) for one in modules.values()) for outcome in ("passed", "failed"))
        days = sorted({one["day"] for one in modules.values()})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        names = ", ".join(sorted(modules))
        rows.append(f"| {' | '.join(where.split('|'))} | {names} | {passed} | {failed} | {when} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    text = page(json.loads((ROOT / "build/tested-on.json").read_text(encoding="utf-8")))
    (ROOT / "docs/tested-on.md").write_text(text, encoding="utf-8")
