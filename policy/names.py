"""Names that Slurm keeps as they are written.

sacctmgr lower-cases names, splits them at commas, expands brackets and turns quotes into backquotes (tried on 22.05);
other characters break its parsable output. A tenant with a name that Slurm changes would be created again by each
apply: such names are refused.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")
_TAKEN = frozenset({"root", "all", "none", "normal", "where", "set", "unlimited", "parent", "default"})
OVER_QOS = "sluice_over"
"""The QOS of over-quota work, of all tenants."""
OWN_PREFIX = "sluice_"
"""Begin of the names of what Sluice makes for itself: QOS and reservations."""


def check_tenant(name: str) -> str:
    """The name. Raises ValueError, saying what Slurm would make of it."""
    check_name(name)
    if name in _TAKEN or name.startswith(OWN_PREFIX):
        raise ValueError(f"{name!r} is a name that Slurm or Sluice reserves; choose another")
    if name.isdecimal():
        raise ValueError(f"{name!r} is a number, which Slurm's commands take for an id; put a letter in front")
    return name


def check_name(name: str) -> str:
    """The name of a QOS, partition or class. Raises ValueError."""
    if _NAME.fullmatch(name):
        return name
    if name != name.lower():
        raise ValueError(f"Slurm would make {name.lower()!r} of {name!r}; write it in lower case")
    if re.search(r"[\s,]", name):
        raise ValueError(f"Slurm would take {name!r} for several names; use letters, digits, '-', '_' and '.'")
    if len(name) > 40:
        raise ValueError(f"{name[:40]!r}... has {len(name)} characters, at most 40 fit Slurm's tables")
    raise ValueError(f"{name!r} is not kept by Slurm as written; use a-z, 0-9, '-', '_', '.', a letter or digit first")


def check_user(name: str) -> str:
    """A Unix user's name, as Slurm's accounting keeps it. Raises ValueError."""
    if not re.fullmatch(r"[a-z_][a-z0-9_.-]{0,31}", name):
        lower = f"; Slurm would make {name.lower()!r} of it" if name != name.lower() else ""
        raise ValueError(f"{name!r} is not a Unix user name that Slurm keeps as written{lower}")
    return name


def check_word(text: str) -> str:
    """Free text for Slurm's tables: what quotes or separators would break is refused."""
    if re.search(r"[\"'|:=,;\\`$%]|[^\x20-\x7e]", text) or text != text.strip():
        raise ValueError(f"{text!r}: Slurm would change it; use plain letters, digits, blanks and - . _ ( ) / + @")
    return text


TenantName = Annotated[str, AfterValidator(check_tenant)]
Name = Annotated[str, AfterValidator(check_name)]
UserName = Annotated[str, AfterValidator(check_user)]
Words = Annotated[str, AfterValidator(check_word)]
