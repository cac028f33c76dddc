"""A read-only look at a Slurm site: a list of small checks, each with a verdict and a remedy.

Nothing of Sluice needs to be switched on, nothing is changed, and what cannot be checked (not root, another host, a
controller that does not answer) is skipped with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gres_probe.doctor import accounting, control, hosts, nodes, plugins, services, traces, units
from gres_probe.doctor.check import REGISTERED, CannotCheckError, Check, Outcome, SiteView, Verdict, skip
from sluice.base.errors import SluiceError, UsageError

__all__ = ["CHECKS", "Answer", "Check", "Outcome", "SiteView", "Verdict", "examine"]

CHECKS: dict[str, Check] = {  # in the order of the report, which is not that of the imports
    name: check
    for module in (control, plugins, nodes, units, services, traces, accounting, hosts)
    for name, check in REGISTERED.items()
    if check.examine.__module__ == module.__name__
}
BUDGET = 50.0  # seconds for all checks together, so that the whole stays within a minute


@dataclass(frozen=True, slots=True)
class Answer:
    """An outcome and the check that it is of."""

    check: Check
    outcome: Outcome


def examine(
    site: SiteView,
    names: Iterable[str] = (),
    *,
    progress: Callable[[Check], None] = lambda check: None,
    budget: float = BUDGET,
) -> list[Answer]:
    """Run the named checks, or all; a check that fails to run is skipped with the reason. Raises UsageError."""
    wanted = list(names)
    for name in wanted:
        if name not in CHECKS:
            raise UsageError(f"check {name!r}: unknown", remedy=f"choose from {', '.join(CHECKS)}")
    answers: list[Answer] = []
    deadline = time.monotonic() + budget
    for name, check in CHECKS.items():
        if wanted and name not in wanted:
            continue
        progress(check)
        if time.monotonic() > deadline:
            answers.append(Answer(check, skip("no time left", f"run it alone: sluice doctor --only {name}")))
            continue
        try:
            outcomes = list(check.examine(site))
        except (CannotCheckError, SluiceError, ValueError) as error:  # ValueError: a path with a null byte
            outcomes = [skip(str(error))]
        except PermissionError as error:
            outcomes = [skip(f"{error.filename}: {error.strerror}", "run as root to see it")]
        except OSError as error:
            outcomes = [skip(f"{error.filename}: {error.strerror}")]
        if any(outcome.verdict is not Verdict.OK for outcome in outcomes):  # all else about it is not "ok"
            outcomes = [outcome for outcome in outcomes if outcome.verdict is not Verdict.OK]
        answers += [Answer(check, outcome) for outcome in outcomes]
    return answers
