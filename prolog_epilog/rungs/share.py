"""Shares of a GPU's compute time (`--gpu-share=PERCENT`): by an instance's or partition's size, MPS, a CU mask.

A share that a node cannot give refuses the job; it is never run without.
"""

from __future__ import annotations

from policy.node_limits import NodeLimits
from prolog_epilog.devices import NodeDevice
from prolog_epilog.refusals import Refusal
from prolog_epilog.rungs.base import MIG, MPS
from prolog_epilog.rungs.mps import Mps
from prolog_epilog.state import RefusalError, State
from prolog_epilog.watching import Watcher
from sluice.base.errors import SluiceError
from sluice.exchange.record import Grant, JobRecord

CU_MASK = "cu-mask"
_SLICES = 7  # of compute on a GPU with MIG


def instance_percent(profile: str) -> int:
    """The part of a GPU's compute slices that a MIG profile has, e.g. 42 for ``3g.40gb``; 0 for another name."""
    slices = profile.split("g.")[0].rpartition(".")[0] or profile.split("g.")[0]
    return int(slices.rstrip("c")) * 100 // _SLICES if slices.rstrip("c").isdecimal() else 0


def partition_percent(device: NodeDevice) -> int:
    """The part of a GPU's compute that a MIG instance or AMD partition has; AMD's are all of one size."""
    return 100 // device.siblings if device.vendor == "amd" else instance_percent(device.partition)


def cu_mask(units: int, percent: int, before: int = 0) -> tuple[int, int]:
    """First and last compute unit of a share that begins after `before` percent."""
    first = units * before // 100
    return first, max(first, units * (before + percent) // 100 - 1)


class Shares:
    """Gives jobs their shares. The caller holds the state's lock."""

    def __init__(self, state: State, watcher: Watcher, mps: Mps) -> None:
        self._state = state
        self._watcher = watcher
        self._mps = mps
        self._compute_units: dict[str, int] = {}

    def choose(self, record: JobRecord, policy: NodeLimits) -> None:
        """Decide what gives the job its share. Raises RefusalError where a GPU cannot, or has too little left."""
        if record.share_percent is None or record.share_by:
            return
        kinds = {self._kind(record, grant, policy) for grant in record.grants}
        if len(kinds) != 1:
            raise RefusalError(
                f"--gpu-share={record.share_percent}: the job's GPUs of {', '.join(sorted(kinds))} differ",
                Refusal.SHARE_OF_UNLIKE_GPUS,
            )
        for grant in record.grants:
            left = 100 - self._given(record, grant)
            if kinds != {MIG} and record.share_percent > left:
                raise RefusalError(
                    f"--gpu-share={record.share_percent}: the jobs on GPU {grant.index} leave {left} % of it",
                    Refusal.SHARE_TAKEN,
                    remedy="ask for less, or wait until one of them ends",
                )
        record.share_by = kinds.pop()
        if record.share_by == CU_MASK:
            record.share_from = self._first_free(record)

    def _kind(self, record: JobRecord, grant: Grant, policy: NodeLimits) -> str:
        """What holds the share of a grant. Raises RefusalError with the reason when nothing does."""
        device, percent = self._state.devices[grant.index], record.share_percent or 0
        if device.partition:
            has = partition_percent(device)
            if has >= percent:
                return MIG
            raise self._refusal(
                percent, device, f"the {'partition' if device.vendor == 'amd' else 'instance'} has {has} % of its GPU"
            )
        if device.vendor == "nvidia":
            why = "the policy does not allow mps" if MPS not in policy.ladder else self._mps.unavailable(record, grant)
            if not why:
                return MPS
            raise self._refusal(percent, device, why)
        if device.vendor == "amd":
            if policy.cu_mask:
                return CU_MASK
            raise self._refusal(percent, device, "the policy does not allow cu_mask, which programs could remove")
        raise self._refusal(percent, device, f"nothing holds programs to a share of {device.vendor} GPUs")

    def _refusal(self, percent: int, device: NodeDevice, why: str) -> RefusalError:
        return RefusalError(
            f"--gpu-share={percent}: GPU {device.index} ({device.model}) cannot be held to a share: {why}",
            Refusal.SHARE_IMPOSSIBLE,
            remedy="ask for the whole GPU, or for nodes that can; docs/enforcement.md",
        )

    def _given(self, record: JobRecord, grant: Grant) -> int:
        """Percent of a device that other jobs were given. Jobs that asked for no share compete for what is left."""
        return sum(
            one.share_percent or 0
            for one in self._state.records.values()
            if one.job != record.job and one.grant_of(grant.uuid) is not None
        )

    def _first_free(self, record: JobRecord) -> int:
        """Where a mask of the job's share can begin, in percent, apart from other jobs' on all of its GPUs."""
        taken = [
            (one.share_from, one.share_from + (one.share_percent or 0))
            for one in self._state.records.values()
            if one.job != record.job and any(one.grant_of(grant.uuid) is not None for grant in record.grants)
        ]
        width = record.share_percent or 0
        for first in sorted({0, *(end for _, end in taken)}):
            if first + width <= 100 and all(end <= first or first + width <= begin for begin, end in taken):
                return first
        raise RefusalError(
            f"--gpu-share={width}: the job's GPUs have no {width} % of free compute units in one range",
            Refusal.SHARE_TAKEN,
            remedy="ask for less, or wait until a job there ends",
        )

    def apply(self, record: JobRecord) -> None:
        """Set it. Raises SluiceError when it is not in force."""
        if record.share_percent is None or record.share_by != MPS:
            return
        for grant in record.grants:
            if grant.rung == MPS:
                continue  # its limit was set with the share
            why = self._mps.verify(record, grant) if self._mps.apply(record, grant) else ""
            if why:
                raise RefusalError(
                    f"GPU {grant.index}: the share of {record.share_percent} % is not in force: {why}",
                    Refusal.NOT_IN_FORCE,
                )

    def check(self, record: JobRecord) -> None:
        """Give the share again where its daemon has ended."""
        if record.share_by == MPS and not self._mps.runs(record):
            record.note("share", again="its MPS daemon has ended")
            try:
                self.apply(record)
            except (SluiceError, OSError) as error:
                record.note("problem", what=str(error))

    def exports(self, record: JobRecord) -> dict[str, str]:
        """Variables by which tasks find their share."""
        if record.share_by == CU_MASK:
            percent = record.share_percent or 100
            masks = [cu_mask(self._units(grant.uuid), percent, record.share_from) for grant in record.grants]
            return {"HSA_CU_MASK": ";".join(f"{place}:{low}-{high}" for place, (low, high) in enumerate(masks))}
        return self._mps.exports(record)

    def _units(self, uuid: str) -> int:
        """Compute units of an AMD GPU, as its library reports; asked once."""
        if uuid not in self._compute_units:
            answer = self._watcher.watches["amd"].worker.ask(do="compute_units", uuid=uuid)
            self._compute_units[uuid] = int(answer["units"])
        return self._compute_units[uuid]
