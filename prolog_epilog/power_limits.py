"""Power limits of physical GPUs through the vendors' libraries: one small interface, in the vendor's process.

A limit is of the whole GPU, also where jobs have MIG instances or partitions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gres_probe.level_zero import UNSUPPORTED_FEATURE, LevelZeroError

_AMD_UNSUPPORTED = (2, 3)  # AMDSMI_STATUS_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED
_MOST_WATTS = 100_000  # what is more than that is in microwatts: AMD SMI's versions differ


class UnsupportedError(Exception):
    """The GPU or its driver has no power limit that can be set."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """A GPU's limit in force, the one that the vendor gave it, and the range that can be set; milliwatts."""

    cap_mw: int
    default_mw: int
    least_mw: int
    most_mw: int


class PowerLimits(Protocol):
    """A vendor's power limits. Both raise UnsupportedError, or what the vendor's wrapper raises."""

    def read(self, uuid: str) -> PowerLimit:
        """Of a physical GPU."""

    def set(self, uuid: str, mw: int) -> None:
        """Set the limit in force, until the next one or a reboot."""


class NvidiaLimits:
    """NVML. Without persistence mode the driver forgets a limit when nobody has the GPU open."""

    def __init__(self, library: Any) -> None:
        self._api = library.api

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._api, function)(*arguments)
        except (self._api.NVMLError_NotSupported, self._api.NVMLError_FunctionNotFound) as error:
            raise UnsupportedError(f"{function}: {error}") from error

    def read(self, uuid: str) -> PowerLimit:
        """See `PowerLimits`."""
        handle = self._api.nvmlDeviceGetHandleByUUID(uuid)
        least, most = self._ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        default = self._ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        return PowerLimit(self._ask("nvmlDeviceGetPowerManagementLimit", handle), default, least, most)

    def set(self, uuid: str, mw: int) -> None:
        """See `PowerLimits`."""
        self._ask("nvmlDeviceSetPowerManagementLimit", self._api.nvmlDeviceGetHandleByUUID(uuid), mw)


class AmdLimits:
    """AMD SMI: the first power sensor, by the handle of the first partition."""

    def __init__(self, library: Any) -> None:
        self._api = library.api
        self._handles = {uuid: devices[0][1] for uuid, devices in library.gpus}

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._api, function)(*arguments)
        except self._api.AmdSmiLibraryException as error:
            if error.get_error_code() in _AMD_UNSUPPORTED:
                raise UnsupportedError(f"{function}: not supported") from error
            raise

    def read(self, uuid: str) -> PowerLimit:
        """See `PowerLimits`."""
        found = self._ask("amdsmi_get_power_cap_info", self._handles[uuid])
        words = ("power_cap", "default_power_cap", "min_power_cap", "max_power_cap")
        in_watts = max(int(found[word]) for word in words) <= _MOST_WATTS
        return PowerLimit(*(int(found[word]) * 1000 if in_watts else int(found[word]) // 1000 for word in words))

    def set(self, uuid: str, mw: int) -> None:
        """See `PowerLimits`. The library takes microwatts in all versions."""
        self._ask("amdsmi_set_power_cap", self._handles[uuid], 0, mw * 1000)


class IntelLimits:
    """Level Zero's sysman: the sustained limit of the whole card's power domain."""

    def __init__(self, library: Any) -> None:
        self._sysman = library.sysman
        self._devices = dict(library.devices)

    def _domain(self, uuid: str) -> tuple[Any, Any]:
        try:
            for domain in self._sysman.handles("zesDeviceEnumPowerDomains", self._devices[uuid]):
                properties = self._sysman.get("zesPowerGetProperties", "zes_power_properties_t", domain)
                if not properties.onSubdevice:
                    return domain, properties
        except LevelZeroError as error:
            raise _unsupported(error) from error
        raise UnsupportedError("no power domain of the whole card")

    def read(self, uuid: str) -> PowerLimit:
        """See `PowerLimits`. Sysman reports -1 for what it does not know: then nothing above the default is set."""
        domain, properties = self._domain(uuid)
        default = int(properties.defaultLimit)
        try:
            cap = self._sysman.sustained_power_mw(domain)
        except LevelZeroError as error:
            raise _unsupported(error) from error
        cap = default if cap is None else cap
        if not properties.canControl or cap <= 0:
            raise UnsupportedError("the driver does not let the power limit be changed")
        most = int(properties.maxLimit) if properties.maxLimit > 0 else max(default, cap)
        return PowerLimit(cap, default if default > 0 else most, max(1, int(properties.minLimit)), most)

    def set(self, uuid: str, mw: int) -> None:
        """See `PowerLimits`."""
        domain, _ = self._domain(uuid)
        try:
            self._sysman.set_sustained_power_mw(domain, mw)
        except LevelZeroError as error:
            raise _unsupported(error) from error


def _unsupported(error: LevelZeroError) -> Exception:
    return UnsupportedError(str(error)) if error.result == UNSUPPORTED_FEATURE else error


LIMITS: dict[str, Callable[[Any], PowerLimits]] = {"nvidia": NvidiaLimits, "amd": AmdLimits, "intel": IntelLimits}


def read_limits(library: Any, vendor: str, uuids: Iterable[str]) -> dict[str, Any]:
    """``limits``: by GPU; ``unsupported``, ``failed``: why not, by GPU."""
    answer: dict[str, dict[str, Any]] = {"limits": {}, "unsupported": {}, "failed": {}}
    limits = LIMITS[vendor](library)
    for uuid in uuids:
        try:
            answer["limits"][uuid] = asdict(limits.read(uuid))
        except UnsupportedError as error:
            answer["unsupported"][uuid] = str(error)
        except Exception as error:  # of one GPU, e.g. a lost one; the others answer
            answer["failed"][uuid] = str(error) or type(error).__name__
    return answer


def set_limit(library: Any, vendor: str, uuid: str, mw: int) -> dict[str, Any]:
    """``cap_mw``: the limit that is then in force; ``failed``: why it was not set."""
    limits = LIMITS[vendor](library)
    try:
        limits.set(uuid, mw)
        return {"cap_mw": limits.read(uuid).cap_mw}
    except Exception as error:  # of one GPU
        return {"failed": str(error) or type(error).__name__}
