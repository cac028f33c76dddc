"""The vendors that the agent's parent knows, in C, are those of gres_probe."""

from __future__ import annotations

import re
from pathlib import Path

from gres_probe.vendor_names import vendor_names

GUARD = Path(__file__).parents[3] / "native/guard"


def _between(name: str, begin: str) -> str:
    found = re.search(rf"{begin} \{{(.*?)\}}", (GUARD / name).read_text(), re.DOTALL)
    assert found, f"{name}: no {begin}"
    return found[1]


def test_the_guard_knows_the_vendors_of_gres_probe() -> None:
    """A vendor that it does not know is a message that it ignores: jobs would go on while nothing samples them."""
    names = re.findall(r'"(\w+)"', _between("message.c", r"guard_vendor_names\[GUARD_VENDORS\] ="))
    numbers = re.findall(r"GUARD_(\w+)", _between("message.h", "enum guard_vendor"))
    assert sorted(names) == sorted(vendor_names())
    assert [name.upper() for name in names] == numbers[:-1]
