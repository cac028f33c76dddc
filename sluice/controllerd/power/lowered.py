"""Budgets that are lowered for a while, in StateSaveLocation: the backup controller's daemon keeps them, too."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from policy.control_power import ControlPower
from policy.power import show_watts
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.power_plan import LoweredBudget

FILE_NAME = "sluice.power-lowered.json"
MOST_S = 30 * 86_400
_MAX_BYTES = 1 << 20


def read(path: Path, now: float) -> dict[str, LoweredBudget]:
    """Those in force. Raises SluiceError for a damaged file, OSError."""
    try:
        with path.open("rb") as file:
            rows = json.loads(file.read(_MAX_BYTES))["budgets"]
        found = {str(name): LoweredBudget(**one) for name, one in rows.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "remove it, and lower the budget again: sluice power budget"
        raise SluiceError(f"{path}: damaged: {error}", remedy=remedy) from error
    return {name: one for name, one in found.items() if one.until > now}


def write(path: Path, lowered: dict[str, LoweredBudget]) -> None:
    """Raises OSError."""
    rows = {name: asdict(one) for name, one in lowered.items()}
    write_atomic(path, json.dumps({"version": 1, "budgets": rows}) + "\n", mode=0o600, follow_links=False)


def check(policy: ControlPower, name: object, watts: object, seconds: object, idle_w: float) -> tuple[str, int, int]:
    """What was asked for; `idle_w`: what the budget's GPUs draw without jobs. Raises SluiceError."""
    budget = next((one for one in policy.budgets if one.name == name), None)
    if budget is None:
        known = ", ".join(one.name for one in policy.budgets) or "none"
        raise SluiceError(
            f"budget {str(name)[:64]!r}: not in the policy (known: {known})", remedy="see: sluice power show"
        )
    if isinstance(watts, bool) or not isinstance(watts, int) or watts < 0:
        raise SluiceError(f"budget {budget.name!r}: {watts!r:.40} is not an amount of watts", remedy="write e.g. 60kW")
    most = max([budget.watts, *(one for _, _, one in budget.hours)])
    if watts >= most:
        raise SluiceError(
            f"budget {budget.name!r}: {show_watts(watts)} is not less than the policy's {show_watts(most)}",
            remedy="a budget is raised in the policy: sluice apply",
        )
    if watts < idle_w:
        raise SluiceError(
            f"budget {budget.name!r}: {show_watts(watts)} is less than the {show_watts(idle_w)} that its GPUs draw "
            "without jobs",
            remedy="take more, or switch nodes off",
        )
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 < seconds <= MOST_S:
        raise SluiceError(
            f"budget {budget.name!r}: {seconds!r:.40} is not a time of at most 30 days", remedy="write e.g. --for 2h"
        )
    return budget.name, watts, seconds
