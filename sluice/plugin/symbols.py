"""Which symbols a shared object or program has and needs, read from its ELF file, without other tools.

A plugin is bound lazily, as Slurm's own are: a function that the installed slurmctld lacks would end it at the first
call. And slurmctld's own functions go before those of what it loads: one of the same name would be called instead of
ours. Both are checked here. Format: System V ABI, chapters "Sections" and "Symbol Table".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError

_RELA, _DYNSYM = 4, 11  # SHT_RELA, SHT_DYNSYM
_WEAK = 2
_AT_ONCE = {1, 5, 6}  # R_X86_64_64, R_X86_64_COPY, R_X86_64_GLOB_DAT: bound when the file is loaded, not when called


@dataclass(frozen=True, slots=True)
class Symbols:
    """Names in a file's dynamic symbol table.

    `wanted` is without those that may be missing (weak); `at_once` are those of them that must be there when the file
    is loaded: variables, and functions whose address is taken.
    """

    defined: frozenset[str]
    wanted: frozenset[str]
    at_once: frozenset[str]


def read_symbols(path: Path) -> Symbols:
    """Read a 64-bit little-endian ELF file. Raises SluiceError for any other."""
    try:
        data = path.read_bytes()
        return _read(data)
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}") from error
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise SluiceError(f"{path}: not a readable shared object or program ({error})") from error


def _read(data: bytes) -> Symbols:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not 64-bit ELF")
    start, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * number) for number in range(count)]
    defined, wanted, at_once = set(), set(), set()
    names_of: dict[int, str] = {}
    for section in sections:
        if section[1] != _DYNSYM:
            continue
        names = sections[section[6]][4]
        for at in range(section[4] + 24, section[4] + section[5], 24):  # the first one is no symbol
            name, info, _, where = struct.unpack_from("<IBBH", data, at)
            text = data[names + name : data.index(b"\0", names + name)].decode("ascii", "replace")
            if where:
                defined.add(text)
            elif info >> 4 != _WEAK:
                wanted.add(text)
                names_of[(at - section[4]) // 24] = text
    for section in sections:
        if section[1] == _RELA:
            for at in range(section[4], section[4] + section[5], 24):
                _, info, _ = struct.unpack_from("<QQq", data, at)
                if info & 0xFFFFFFFF in _AT_ONCE and info >> 32 in names_of:
                    at_once.add(names_of[info >> 32])
    return Symbols(frozenset(defined), frozenset(wanted), frozenset(at_once))


def missing(plugin: Path, providers: Iterable[Path], *, at_once: bool = False) -> list[str]:
    """Symbols that a plugin needs (`at_once`: to be loaded at all) and that `providers` and the C library lack."""
    symbols = read_symbols(plugin)
    wanted = set(symbols.at_once if at_once else symbols.wanted)
    for provider in providers:
        wanted -= read_symbols(provider).defined
    system = ctypes.CDLL(None)
    return sorted(name for name in wanted if not hasattr(system, name))


def overridden(plugin: Path, program: Iterable[Path], *, meant: Iterable[str] = ()) -> list[str]:
    """Names of a plugin that the program also has and that would be used instead; except those `meant`."""
    defined = set(read_symbols(plugin).defined) - set(meant)
    return sorted(defined.intersection(*[set().union(*(read_symbols(path).defined for path in program))]))
