"""The commands of the admin guide, as it has them: what tests run is what an administrator reads."""

from __future__ import annotations

import re
from pathlib import Path

_GUIDE = Path(__file__).resolve().parents[2] / "docs/admin-guide.md"
_BLOCK = re.compile(r"^```sh\n# on (the controller|each node|all hosts)\b[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(heading: str) -> list[tuple[str, str]]:
    """The shell blocks of a section that say where to run them (`# on HOSTS ...`): hosts, and the script."""
    text = _GUIDE.read_text(encoding="utf-8")
    found = re.search(rf"^##+ {re.escape(heading)}$", text, re.MULTILINE)
    assert found is not None, f"{_GUIDE}: no section {heading}"
    section = re.split("^##+ ", text[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    scripts = _BLOCK.findall(section)
    assert scripts, f"{_GUIDE}: no commands in {heading}"
    assert len(scripts) == section.count("```sh\n# on "), f"{_GUIDE}: hosts that are not known in {heading}"
    return scripts
