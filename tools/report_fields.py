"""Writes docs/report-fields.md from the table of fields (usage/report/fields.py); --check compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "native"))

from usage.report.fields import DEFAULTS, FIELDS, GROUPED_BY  # noqa: E402

TARGET = ROOT / "docs/report-fields.md"
_UNITS = {
    "text": "text", "count": "number", "percent": "percent", "s": "[D-]HH:MM:SS; JSON: seconds", "at": "time; JSON: "
    "seconds since 1970", "gpu_s": "hours, or as `-t` says; JSON: seconds", "mib_s": "GiB times hours, or as `-t` "
    "says; JSON: MiB times seconds", "mib": "memory, as `--units` says; JSON: MiB", "j": "kWh; JSON: joules",
    "ratio": "number",
}  # fmt: skip


def render() -> str:
    """The page."""
    lines = [
        "# Fields of reports",
        "",
        "For `-o`, with `%WIDTH` where wanted (`User%-12`: 12 wide, to the left). Fields of single jobs are for "
        "`sluice report jobs` alone. What is not known prints as `-`, as nothing with `-P` and `--csv`, "
        "as null in JSON; it is never 0.",
        "",
        "Generated from usage/report/fields.py by `make docs`.",
        "",
        "| field | JSON | unit | |",
        "|---|---|---|---|",
    ]
    for one in FIELDS:
        says = one.says.replace("|", "\\|")
        lines.append(f"| {one.name} | `{one.key}` | {_UNITS[one.unit]} | {'Of a job: ' if one.jobs else ''}{says} |")
    lines += ["", "## What stands in a report without -o", "", "| report | lines for each | fields |", "|---|---|---|"]
    for kind, fields in DEFAULTS.items():
        lines.append(f"| {kind} | {', '.join(GROUPED_BY.get(kind, ('job',)))} | {fields.replace(',', ', ')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """0: written, or up to date."""
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            print(f"{TARGET}: not what the fields say; run make docs", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
