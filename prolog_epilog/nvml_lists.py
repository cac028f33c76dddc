"""NVML's lists of processes and of field values, by one call each into memory that is kept.

pynvml asks for a list's length first and makes an object of each entry: twice the calls into the driver, and most of
what watching a node would cost. Structures: nvmlProcessInfo_t, nvmlProcessUtilizationSample_t and nvmlFieldValue_t of
NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_PROCESS = struct.Struct("I4xQII")  # pid, bytes, GPU instance, compute instance
_SAMPLE = struct.Struct("I4xQIIII")  # pid, time in us, then percent: SM, memory, encoder, decoder
_FIELD = struct.Struct("IIqqII8s")  # field, scope, time, latency, type of the value, the field's own code, value
_VALUES = {code: struct.Struct(form) for code, form in enumerate(("d", "I4x", "Q", "Q", "q", "i4x", "H6x"))}
_UNKNOWN = (1 << 64) - 1
_ROOM = 64  # entries at first


class _List:
    """One of NVML's functions that fill an array."""

    def __init__(self, api: Any, name: str, entry: struct.Struct) -> None:
        try:
            self._function = getattr(api.nvmlLib, name)
        except AttributeError:
            raise api.NVMLError(api.NVML_ERROR_FUNCTION_NOT_FOUND) from None
        self._api = api
        self._entry = entry
        self._make(_ROOM)

    def _make(self, room: int) -> None:
        self._room = room
        self._buffer = ctypes.create_string_buffer(room * self._entry.size)
        self._view = memoryview(self._buffer)
        self._count = ctypes.c_uint()
        self._at = ctypes.byref(self._count)

    def ask(self, call: Callable[[Any, Any, Any], int]) -> list[tuple[int, ...]]:
        """The entries; `call` gets the function, the count's address and the array. Raises NVMLError."""
        while True:
            self._count.value = self._room
            code = call(self._function, self._at, self._buffer)
            if code == 0:
                return list(self._entry.iter_unpack(self._view[: self._count.value * self._entry.size]))
            if code != self._api.NVML_ERROR_INSUFFICIENT_SIZE:
                raise self._api.NVMLError(code)
            self._make(2 * max(self._room, self._count.value))


class ProcessLists:
    """What runs on a GPU or instance. `api` is pynvml, initialised. Raises NVMLError."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._forms = ["_v3", "_v2"]  # the newest first; before R510 there is the second
        self._lists: list[_List] = []

    def held(self, handle: Any) -> list[tuple[int, int]]:
        """Process and bytes, of all that compute or draw there; one that does both is listed twice.

        Nothing is known of a lost GPU, and an instance draws nothing. Raises NVMLError.
        """
        while True:
            try:
                self._lists = self._lists or [
                    _List(self._api, f"nvmlDeviceGet{kind}RunningProcesses{self._forms[0]}", _PROCESS)
                    for kind in ("Compute", "Graphics")
                ]
                return self._held(handle)
            except self._api.NVMLError_FunctionNotFound:
                if len(self._forms) == 1:
                    raise
                self._lists, self._forms = [], self._forms[1:]

    def _held(self, handle: Any) -> list[tuple[int, int]]:
        found = []
        for one in self._lists:
            with suppress(self._api.NVMLError_NotSupported, self._api.NVMLError_GpuIsLost):
                entries = one.ask(lambda function, count, array: int(function(handle, count, array)))
                found += [(pid, 0 if size == _UNKNOWN else size) for pid, size, _, _ in entries]
        return found


class BusyLists:
    """The driver's samples of how much of a GPU's time each process had. `api` is pynvml, initialised."""

    def __init__(self, api: Any) -> None:
        self._list = _List(api, "nvmlDeviceGetProcessUtilization", _SAMPLE)

    def since(self, handle: Any, time_us: int) -> list[tuple[int, int, int]]:
        """Process, time of the sample in us since 1970, and percent; later than a time. Raises NVMLError."""
        after = ctypes.c_ulonglong(time_us)
        entries = self._list.ask(lambda function, count, array: int(function(handle, array, count, after)))
        return [(pid, when, percent) for pid, when, percent, *_ in entries if pid and when > time_us]


class FieldValues:
    """Always the same fields of a GPU, by number and scope. `api` is pynvml, initialised."""

    def __init__(self, api: Any, wanted: Sequence[tuple[int, int]]) -> None:
        self._api = api
        self._question = b"".join(_FIELD.pack(field, scope, 0, 0, 0, 0, bytes(8)) for field, scope in wanted)
        self._buffer = ctypes.create_string_buffer(len(self._question))
        self._count = len(wanted)

    def read(self, handle: Any) -> list[float | None]:
        """A value each; None for what is not reported. Raises NVMLError."""
        function = getattr(self._api.nvmlLib, "nvmlDeviceGetFieldValues", None)
        if function is None:
            raise self._api.NVMLError(self._api.NVML_ERROR_FUNCTION_NOT_FOUND)
        self._buffer.raw = self._question
        code = function(handle, self._count, self._buffer)
        if code != 0:
            raise self._api.NVMLError(code)
        return [
            _VALUES.get(kind, _VALUES[3]).unpack(value)[0] if result == 0 else None
            for *_, kind, result, value in _FIELD.iter_unpack(self._buffer.raw)
        ]
