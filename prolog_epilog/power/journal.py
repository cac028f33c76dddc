"""What outlives the agent: the limits from before ours, by which they are restored, and the controllers' order.

One file, written as a whole before a limit is first set. It is of one boot: hardware forgets limits with a reboot, and
what it has after one is the site's setting, whatever the file says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from sluice.base.clock import boot_id
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.power import PowerOrder


@dataclass
class Journal:
    """By UUID of the physical GPU. Not thread-safe."""

    path: Path
    before: dict[str, int] = field(default_factory=dict)
    """mW; a GPU is named for as long as anything of ours may be in force on it."""
    steps: dict[str, int] = field(default_factory=dict)
    """Down by heat."""
    order: PowerOrder = field(default_factory=PowerOrder)

    def load(self) -> None:
        """What an agent of this boot left. Raises SluiceError for a damaged file, OSError."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["boot"] != boot_id():
                return
            before = {str(uuid): int(mw) for uuid, mw in kept["before"].items()}
            steps = {str(uuid): int(count) for uuid, count in kept["steps"].items()}
            self.before, self.steps, self.order = before, steps, PowerOrder.from_dict(kept["order"])
        except FileNotFoundError:
            return
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise SluiceError(
                f"{self.path}: not the journal of power limits: {error}",
                remedy="look at the GPUs' limits with nvidia-smi -q -d POWER, amd-smi or xpu-smi",
            ) from error

    def save(self) -> None:
        """Raises OSError; the file on disk is then the one from before."""
        fields = {"boot": boot_id(), "before": self.before, "steps": self.steps, "order": self.order.to_dict()}
        write_atomic(self.path, json.dumps(fields) + "\n", mode=0o600, follow_links=False)

    def keep(self, uuid: str, mw: int) -> None:
        """Remember the limit from before, unless one is remembered. Raises OSError, and remembers nothing then."""
        if uuid in self.before:
            return
        self.before[uuid] = mw
        try:
            self.save()
        except OSError:
            del self.before[uuid]
            raise

    def keep_steps(self, steps: dict[str, int]) -> None:
        """Remember how far heat lowers caps. Raises OSError."""
        if self.steps != steps:
            self.steps = steps
            self.save()

    def forget(self, uuid: str) -> None:
        """It is restored. Raises OSError; a later agent then restores it again."""
        if self.before.pop(uuid, None) is not None:
            self.save()
