"""What GPUs of a class really draw under the jobs of a user: learnt from nodes' reports, kept in a file.

An estimate is a decayed maximum: it follows a higher draw at once, and comes down by half of the difference in
`HALF_LIFE_S` of GPU time. Kept are at most `MOST` pairs of user and class, those that were used last, and one estimate
a class for users without one: a user cannot make more than one entry a class, whatever he submits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.controllerd.power.caps import MARGIN

FILE_NAME = "sluice.power-estimates.json"
MOST = 20_000
HALF_LIFE_S = 3600.0
LEAST_S = 60.0
"""GPU time after which an estimate counts: before, jobs read their input."""
ANYBODY = -1
"""The user of the estimate of a class."""
_MAX_BYTES = 8 << 20
_MOST_W = 100_000.0


def booked(watts: float | None, lowest_w: float, default_w: float, *, binding: bool) -> float:
    """What the planner counts a GPU of a new job with. `watts`: what it is expected to draw; `binding`: not all can
    have what they want, and jobs start with the policy's lowest cap at most: more of them run."""
    most = lowest_w if binding else default_w
    return most if watts is None else min(most, MARGIN * watts)


@dataclass(slots=True)
class _Estimate:
    watts: float = 0.0
    seconds: float = 0.0
    used: float = 0.0

    def learn(self, watts: float, seconds: float, now: float) -> None:
        if watts >= self.watts:
            self.watts = watts
        else:
            self.watts += (watts - self.watts) * (1 - 0.5 ** (seconds / HALF_LIFE_S))
        self.seconds += seconds
        self.used = now


class Estimates:
    """All of them. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, str], _Estimate] = {}

    def learn(self, user: int, gpu_class: str, watts: float, seconds: float, now: float) -> None:
        """A GPU drew so much for so long under a job of this user."""
        for key in ((user, gpu_class), (ANYBODY, gpu_class)):
            found = self._of.get(key)
            if found is None:
                found = self._of[key] = _Estimate(used=now)
                self._prune()
            found.learn(min(max(watts, 0.0), _MOST_W), seconds, now)

    def _prune(self) -> None:
        while len(self._of) > MOST:
            del self._of[min((key for key in self._of if key[0] != ANYBODY), key=lambda key: self._of[key].used)]

    def watts(self, user: int, gpu_class: str) -> float | None:
        """What a GPU of this class draws under jobs of this user, or of any; None: not known."""
        for key in ((user, gpu_class), (ANYBODY, gpu_class)):
            found = self._of.get(key)
            if found is not None and found.seconds >= LEAST_S:
                return found.watts
        return None

    def known(self) -> Iterator[tuple[int, str, float]]:
        """User (ANYBODY: any), class, watts of all that count."""
        for (user, gpu_class), one in self._of.items():
            if one.seconds >= LEAST_S:
                yield user, gpu_class, one.watts

    def save(self, path: Path) -> None:
        """Raises OSError."""
        rows = [[user, name, round(one.watts, 1), round(one.seconds), round(one.used)] for (user, name), one in
                self._of.items()]  # fmt: skip
        write_atomic(path, json.dumps({"version": 1, "estimates": rows}) + "\n", mode=0o600, follow_links=False)

    @classmethod
    def load(cls, path: Path) -> Estimates:
        """None where there is no file. Raises SluiceError for one that is damaged, OSError."""
        found = cls()
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES)
            rows = json.loads(text)["estimates"]
            for user, name, watts, seconds, used in rows[:MOST]:
                found._of[int(user), str(name)] = _Estimate(float(watts), float(seconds), float(used))
        except FileNotFoundError:
            return found
        except (ValueError, KeyError, TypeError) as error:
            raise SluiceError(f"{path}: damaged: {error}", remedy="remove it: estimates are learnt again") from error
        return found
