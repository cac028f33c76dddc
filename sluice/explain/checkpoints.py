"""Whether a job saves its state, how often it is asked to, and when it last did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.checkpoint import NodeCheckpoint
from policy.node import FILE_NAME, NodePolicyFile
from sluice.base.errors import SluiceError
from sluice.base.files import KeptFile
from sluice.base.text import one_line
from sluice.exchange.saves import SAVES_FILE, JobSaves, read_saves


class SiteCheckpoints:
    """By the site's policy, and by what the controllers' daemon has measured. `config`: slurmctld's."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._policy = NodePolicyFile(Path(config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name(FILE_NAME))
        self._saves = KeptFile(Path(config["StateSaveLocation"]) / SAVES_FILE, read_saves)

    def of(self, number: int, account: str, comment: str) -> dict[str, Any]:
        """Of the job with this number; with `problem` where what was measured cannot be read, which hides nothing else
        of the job."""
        problem = ""
        try:
            saves = self._saves.current().jobs.get(number, JobSaves())
        except SluiceError as error:
            saves, problem = JobSaves(), one_line(str(error))
        found = describe(account, comment, self._policy.current().checkpoint, saves)
        return found | {"problem": problem} if problem else found


def describe(account: str, comment: str, policy: NodeCheckpoint, saves: JobSaves) -> dict[str, Any]:
    """What is shown. Times are seconds since 1970."""
    if policy.system is not None and policy.is_system(comment):
        limit = policy.system.most_bytes >> 20
        return {
            "mode": "system",
            "saved": saves.saved,
            "limit_mib": limit,
            "cannot": saves.unsaved or None,
            "elsewhere": policy.system.shared is not None,
        }
    rhythm = policy.rhythm(account, comment)
    document: dict[str, Any] = {"mode": "no" if rhythm is None else "app", "saved": saves.saved}
    if rhythm is None:
        return document
    fixed = None if rhythm.interval_s == "daly" else rhythm.interval_s
    return document | {
        "signal": policy.signal,
        "daly": rhythm.interval_s == "daly",
        "interval_s": saves.interval_s if saves.started and saves.daly == (rhythm.interval_s == "daly") else fixed,
        "signals": saves.signals,
        "answers": saves.answers,
        "save_s": saves.save_s,
        "mttf_s": saves.mttf_s,
    }
