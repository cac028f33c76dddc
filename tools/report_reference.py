"""Every field of reports, from the table sluice/report/fields.py, for docs/report-fields.md."""

from __future__ import annotations

from sluice.report.fields import DEFAULTS, FIELDS, GROUPED_BY, fields_of

_UNITS = {
    "text": "text",
    "count": "number",
    "percent": "percent",
    "s": "[D-]HH:MM:SS; JSON: seconds",
    "at": "time; JSON: seconds since 1970",
    "gpu_s": "hours, or as `-t` says; JSON: seconds",
    "mib_s": "GiB times hours, or as `-t` says; JSON: MiB times seconds",
    "mib": "memory, as `--units` says; JSON: MiB",
    "j": "kWh; JSON: joules",
    "ratio": "number",
    "price": "number, in the site's currency",
    "ms": "milliseconds",
}


def reference() -> str:
    """All fields, and those that reports have by default."""
    lines = ["| field | JSON | unit | reports | |", "|---|---|---|---|---|"]
    for one in FIELDS:
        says = one.says.replace("|", "\\|")
        lines.append(f"| {one.name} | `{one.key}` | {_UNITS[one.unit]} | {'jobs' if one.jobs else 'all'} | {says} |")
    lines += ["", "## Fields of `sluice report services`", "", "| field | JSON | unit | |", "|---|---|---|---|"]
    lines += [f"| {one.name} | `{one.key}` | {_UNITS[one.unit]} | {one.says} |" for one in fields_of("services")]
    lines += ["", "## Fields without `-o`", "", "| report | lines for each | fields |", "|---|---|---|"]
    grouped = {**GROUPED_BY, "services": ("service", "account")}
    for kind, fields in DEFAULTS.items():
        lines.append(f"| {kind} | {', '.join(grouped.get(kind, ('job',)))} | {fields.replace(',', ', ')} |")
    return "\n".join(lines) + "\n"
