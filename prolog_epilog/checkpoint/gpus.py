"""What jobs have on their GPUs, when they are saved as they run: taken off before CRIU saves the processes, put back
when CRIU has resumed them. One class a vendor; each says beforehand whether it can."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prolog_epilog.checkpoint import cuda
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON
from sluice.base.text import one_line

_AMD_PLUGINS = ("/usr/lib/criu/amdgpu_plugin.so", "/usr/lib64/criu/amdgpu_plugin.so",
                "/usr/lib/x86_64-linux-gnu/criu/amdgpu_plugin.so")  # fmt: skip
_DRIVER_S = 20.0
_OFF_S = 600.0  # for all of a GPU's memory: 1.3 to 1.7 GiB/s were measured on an H200 with driver 580


class NeverError(SluiceError):
    """What a program does with its GPUs cannot be saved, now or later."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One that a job has or had."""

    uuid: str
    vendor: str
    model: str
    memory_mib: int
    driver: str
    part: str = ""
    """The profile of a partition; empty: a whole GPU."""


Pairs = list[tuple[str, str]]
"""UUIDs: of the GPU that a job had, and of the one that it has instead."""


class GpuState(Protocol):
    """One vendor's way. Processes are named by their numbers on the node; those that use no GPU are skipped.

    `lock`: a descriptor that is open for as long as the driver works, also without the agent that asked.
    """

    def problem(self) -> str:
        """Why this node cannot; empty: it can."""

    def remaps(self) -> bool:
        """Whether a process can have another GPU of the same model afterwards."""

    def suspend(self, init: int, pids: Iterable[int], seconds: float, lock: int) -> None:
        """They, below `init`, give up their GPUs, and go on without until they use one. Repeated it does nothing.

        Raises SluiceError with the reason, NeverError: none has, and all run on.
        """

    def resume(self, pids: Iterable[int], pairs: Pairs, lock: int) -> None:
        """The reverse, of processes that run or are stopped, which they remain. Repeated it does nothing.

        `pairs`: all GPUs where one is another. Raises SluiceError: those that could not are of no more use.
        """


class Cuda:
    """NVIDIA's driver, asked in processes of their own (cuda.py)."""

    def __init__(self) -> None:
        self._version = 0

    def problem(self) -> str:
        """As in GpuState. A driver that can is asked once: it is not replaced while an agent has it open."""
        if not self._version:
            try:
                self._version = int(self._ask(_DRIVER_S, "problem")["version"])
            except SluiceError as error:
                return error.what
        return ""

    def remaps(self) -> bool:
        """As in GpuState."""
        return not self.problem() and self._version >= cuda.REMAPS_SINCE

    def suspend(self, init: int, pids: Iterable[int], seconds: float, lock: int) -> None:
        """As in GpuState."""
        self._ask(seconds + _OFF_S, "suspend", round(seconds * 1000), init, *pids, lock=lock)

    def resume(self, pids: Iterable[int], pairs: Pairs, lock: int) -> None:
        """As in GpuState."""
        self._ask(None, "resume", *pids, *(f"{old}={new}" for old, new in pairs), lock=lock)

    def _ask(self, seconds: float | None, *words: object, lock: int = -1) -> dict[str, Any]:
        """Raises SluiceError. Without a time: to be killed halfway would cost the job its state."""
        command = [*PYTHON, "-m", cuda.__name__, *map(str, words)]
        try:
            done = subprocess.run(
                command, timeout=seconds, check=False, stdin=subprocess.DEVNULL, capture_output=True,
                pass_fds=() if lock < 0 else (lock,),
            )  # fmt: skip
            answer: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise SluiceError(f"the NVIDIA driver gave no answer within {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise SluiceError(f"the NVIDIA driver was not asked: {one_line(str(error))}") from None
        if "error" in answer:
            kind = NeverError if answer.get("never") else SluiceError
            raise kind(one_line(str(answer["error"])))
        return answer


class Amd:
    """CRIU's plugin amdgpu, which works inside CRIU."""

    def problem(self) -> str:
        """As in GpuState."""
        if not any(Path(path).exists() for path in _AMD_PLUGINS):
            return f"CRIU's plugin amdgpu is missing ({_AMD_PLUGINS[0]})"
        return "what CRIU's plugin amdgpu writes is not checked yet, and not resumed"

    def remaps(self) -> bool:
        """As in GpuState."""
        return False

    def suspend(self, init: int, pids: Iterable[int], seconds: float, lock: int) -> None:
        """As in GpuState."""
        raise SluiceError(self.problem())

    def resume(self, pids: Iterable[int], pairs: Pairs, lock: int) -> None:
        """As in GpuState."""
        raise SluiceError(self.problem())


class Gpus:
    """Those of jobs on this node. `given`: which a job has now; `held`: the most that it had on them, in bytes."""

    def __init__(
        self, given: Callable[[int], list[Gpu]] = lambda _: [], held: Callable[[int], int] = lambda _: 0
    ) -> None:
        self.given, self.held = given, held
        self._vendors: dict[str, GpuState] = {"nvidia": Cuda(), "amd": Amd()}

    def problem(self, gpus: Sequence[Gpu]) -> str:
        """Why what a job has on these cannot be saved; empty: it can, as far as it is known before."""
        for gpu in gpus:
            if gpu.part:
                return "it has a part of a GPU, whose state cannot be saved"
            if gpu.vendor not in self._vendors:
                return f"the state of GPUs of {gpu.vendor} cannot be saved"
            if problem := self._vendors[gpu.vendor].problem():
                return problem
        return ""

    def pairs(self, had: Sequence[Gpu], has: Sequence[Gpu]) -> Pairs:
        """Which GPU takes the place of which; none where all are the same. Raises SluiceError where one cannot."""
        if len(had) != len(has):
            raise SluiceError(f"it had {len(had)} GPUs, and has {len(has)} here")
        by_uuid = {gpu.uuid: gpu for gpu in has}
        free = [gpu for gpu in has if gpu.uuid not in {one.uuid for one in had}]
        pairs = [(gpu, by_uuid.get(gpu.uuid) or free.pop(0)) for gpu in had]
        for old, new in pairs:
            _check_alike(old, new)
            if old.uuid != new.uuid and not self._vendors[old.vendor].remaps():
                raise SluiceError(f"it had GPU {old.uuid}, and this driver resumes it on no other; 580 or later does")
        same = all(old.uuid == new.uuid for old, new in pairs)
        return [] if same else [(old.uuid, new.uuid) for old, new in pairs]

    def suspend(self, gpus: Sequence[Gpu], init: int, pids: Sequence[int], seconds: float, lock: int) -> None:
        """As in GpuState, of a job with these. Raises SluiceError."""
        for vendor in _vendors(gpus):
            self._vendors[vendor].suspend(init, pids, seconds, lock)

    def resume(self, gpus: Sequence[Gpu], pids: Sequence[int], pairs: Pairs, lock: int) -> None:
        """As in GpuState, of a job with these. Raises SluiceError."""
        for vendor in _vendors(gpus):
            self._vendors[vendor].resume(pids, pairs, lock)


def _vendors(gpus: Iterable[Gpu]) -> list[str]:
    return sorted({gpu.vendor for gpu in gpus})


def why_unlike(had: Sequence[Gpu], node: Iterable[Gpu]) -> str:
    """Why a node with these GPUs has none for a job that had those; empty: it has."""
    free = list(node)
    for gpu in had:
        like = next((one for one in free if _unlike(gpu, one) is None), None)
        if like is None:
            return f"it has no other GPU {gpu.model} with {gpu.memory_mib} MiB and driver {gpu.driver}"
        free.remove(like)
    return ""


def _unlike(old: Gpu, new: Gpu) -> tuple[str, object, object] | None:
    for name, one, other in (
        ("model", old.model, new.model),
        ("memory in MiB", old.memory_mib, new.memory_mib),
        ("driver", old.driver, new.driver),
    ):
        if one != other:
            return name, one, other
    return None


def _check_alike(old: Gpu, new: Gpu) -> None:
    """Raises SluiceError for what would not run on the new one."""
    if (found := _unlike(old, new)) is not None:
        raise SluiceError("its GPU's {} was {}, and is {} here".format(*found))


def to_facts(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(gpu) for gpu in gpus]


def from_facts(facts: Iterable[dict[str, Any]]) -> list[Gpu]:
    """What `to_facts` gave."""
    return [Gpu(**one) for one in facts]
