"""Resets a GPU between two jobs: compute mode and clocks, and memory where the policy asks for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from policy.node_limits import NodeLimits
from prolog_epilog.devices import NodeDevice
from prolog_epilog.state import State
from prolog_epilog.watching import Watcher
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.run import PYTHON
from sluice.exchange.record import Grant, JobRecord

_RESET_SECONDS = 10.0  # a sample that is being taken comes first
_VARIABLES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES"}


class GpuReset:
    """Resets the GPUs of a job that ended. A GPU that another job is on is reset when the last of them ends."""

    def __init__(self, state: State, watcher: Watcher, policy: Callable[[], NodeLimits]) -> None:
        self._state = state
        self._watcher = watcher
        self._policy = policy

    def reset(self, record: JobRecord, unclean: dict[str, str]) -> dict[str, str]:
        """Reset and clear what no other job is on, except what `unclean` names; by device, why it is not clean."""
        with self._state.lock:
            try:
                policy = self._policy()
            except SluiceError as error:
                return {
                    grant.uuid: f"GPU {grant.uuid}: the policy on clearing its memory cannot be read: {error}"
                    for grant in record.grants
                }
            others = [one for one in self._state.records.values() if one.job != record.job]
            shared = {grant.uuid for one in others for grant in one.grants}
        free = [grant for grant in record.grants if grant.uuid not in unclean and grant.uuid not in shared]
        found = self._reset_modes(record, free)
        for grant in free if policy.scrub else []:
            if grant.uuid not in found:
                why = self._scrub(record, self._state.devices[grant.index], policy.scrub_seconds)
                found |= {grant.uuid: why} if why else {}
        return {uuid: f"GPU {uuid}: {why}" for uuid, why in found.items()}

    def _reset_modes(self, record: JobRecord, grants: list[Grant]) -> dict[str, str]:
        """Modes and clocks are the whole GPU's, so that partitions have none. By device, why they were not reset."""
        found: dict[str, str] = {}
        by_vendor: dict[str, list[str]] = {}
        for grant in grants:
            if not self._state.devices[grant.index].partition:
                by_vendor.setdefault(grant.vendor, []).append(grant.uuid)
        for vendor, uuids in by_vendor.items():
            try:
                answer = self._watcher.watches[vendor].worker.ask(timeout=_RESET_SECONDS, do="reset", uuids=uuids)
            except SluiceError as error:
                found |= {uuid: f"modes and clocks were not reset: {error}" for uuid in uuids}
                continue
            found |= {uuid: f"modes and clocks were not reset: {why}" for uuid, why in answer["failed"].items()}
            for uuid, what in answer["reset"].items():
                if what:
                    record.note("reset", uuid=uuid, what=what)
        return found

    def _scrub(self, record: JobRecord, device: NodeDevice, seconds: int) -> str:
        """A separate program clears the memory, so that a driver that hangs blocks nothing else."""
        if device.vendor not in _VARIABLES:
            return f"its memory was not cleared: Sluice cannot clear {device.vendor} GPUs"
        place = device.uuid
        if device.vendor == "amd":
            place = str(device.ordinal)
        command = [*PYTHON, "-m", "prolog_epilog.scrub", device.vendor, place]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return f"its memory was not cleared within {seconds} s"
        words = done.stdout.split()
        if done.returncode != 0 or len(words) != 2 or words[0] != "cleared":
            return f"its memory was not cleared: {(done.stdout + done.stderr).strip()[:200] or 'no reason given'}"
        record.note("scrub", uuid=device.uuid, bytes=int(words[1]))
        log("scrub", gpu=device.uuid, bytes=words[1])
        return ""
