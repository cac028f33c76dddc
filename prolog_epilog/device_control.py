"""What the vendor's process changes for the agent: limits of cgroups and of power; modes and clocks, which it resets.

Requests name devices by UUID. Called in `prolog_epilog.sampling`'s process, which holds the library open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prolog_epilog.power_limits import read_limits, set_limit


def _handle(api: Any, uuid: str) -> Any:
    return api.nvmlDeviceGetHandleByUUID(uuid)


def cgroup_limit(api: Any, uuid: str, folder: str, hard: int | None) -> dict[str, Any]:
    """Set the hard limit, in bytes, of a cgroup's memory on a GPU; None: no limit."""
    limits = api.c_nvmlSetMemoryLimits_v1_t()
    limits.nameSpace = folder.encode()
    limits.softLimit = 0
    limits.hardLimit = api.NVML_DEVICE_MEMORY_LIMIT_MAX if hard is None else hard
    api.nvmlDeviceSetMemoryLimits_v1(_handle(api, uuid), limits)
    return {}


def cgroup_limit_of(api: Any, uuid: str, folder: str) -> dict[str, Any]:
    """``hard``: the limit in force, None without one; ``used``: bytes."""
    limits = api.c_nvmlGetMemoryLimits_v1_t()
    limits.nameSpace = folder.encode()
    try:
        api.nvmlDeviceGetMemoryLimits_v1(_handle(api, uuid), limits)
    except api.NVMLError_NotFound:
        return {"hard": None, "used": 0}
    none = limits.hardLimit == api.NVML_DEVICE_MEMORY_LIMIT_MAX
    return {"hard": None if none else int(limits.hardLimit), "used": int(limits.currentUsed)}


def reset(api: Any, uuids: list[str]) -> dict[str, Any]:
    """Reset compute mode and clocks of GPUs. By GPU, ``reset``: what had been changed; ``failed``: why not."""
    done: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    for uuid in uuids:
        try:
            done[uuid] = _reset(api, _handle(api, uuid))
        except api.NVMLError as error:
            failed[uuid] = str(error)
    return {"reset": done, "failed": failed}


def _reset(api: Any, handle: Any) -> list[str]:
    done = []
    try:
        if api.nvmlDeviceGetComputeMode(handle) != api.NVML_COMPUTEMODE_DEFAULT:
            api.nvmlDeviceSetComputeMode(handle, api.NVML_COMPUTEMODE_DEFAULT)
            done.append("compute_mode")
    except api.NVMLError_NotSupported:
        pass
    for name in ("GpuLocked", "MemoryLocked", "Applications"):
        try:
            getattr(api, f"nvmlDeviceReset{name}Clocks")(handle)
        except (api.NVMLError_NotSupported, api.NVMLError_FunctionNotFound):
            continue
    return done


def compute_units(library: Any, uuid: str) -> dict[str, Any]:
    """``units``: how many compute units an AMD GPU has."""
    handle = dict(library.handles)[uuid]
    return {"units": int(library.api.amdsmi_get_gpu_asic_info(handle)["num_compute_units"])}


NVIDIA: dict[str, Callable[..., dict[str, Any]]] = {
    "cgroup_limit": cgroup_limit,
    "cgroup_limit_of": cgroup_limit_of,
    "reset": reset,
}


def drive(library: Any, vendor: str, request: dict[str, Any]) -> dict[str, Any] | None:
    """Do a request; None when it is none of these. Raises what the vendor's wrapper raises."""
    if request["do"] == "power_limits":
        return read_limits(library, vendor, request["uuids"])
    if request["do"] == "set_power_limit":
        return set_limit(library, vendor, request["uuid"], request["mw"])
    if (vendor, request["do"]) == ("amd", "compute_units"):
        return compute_units(library, request["uuid"])
    function = NVIDIA.get(request["do"]) if vendor == "nvidia" else None
    if function is None:
        return {"reset": {}, "failed": {}} if request["do"] == "reset" else None
    return function(library.api, **{key: value for key, value in request.items() if key != "do"})
