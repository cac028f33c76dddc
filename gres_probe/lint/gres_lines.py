"""gres.conf as each node's slurmd reads it: its lines one by one, then together, then merged with the node's Gres.

The order of the steps is that of gres_g_node_config_load (gres.c), gres_gpu.c and gres_c_s.c: what one step drops the
next one does not see.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gres_probe.cores import expand_ranges
from gres_probe.lint.rules import RULES, Finding, Site
from gres_probe.lint.slurm import SHARED, ConfiguredGres, parse_count, parse_node_gres
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import SlurmVersion
from sluice.slurm.slurm_conf import ConfigFile, Line, NodeDefinition, Place, slurm_hostlist

_ENVIRONMENT_FLAGS = ("nvidia_gpu_env", "amd_gpu_env", "intel_gpu_env", "opencl_env")
_FLAGS = (*_ENVIRONMENT_FLAGS, "countonly", "one_sharing", "all_sharing", "no_gpu_env")
_AUTODETECT: tuple[tuple[str, SlurmVersion], ...] = (
    ("nvml", (0, 0, 0)),
    ("rsmi", (0, 0, 0)),
    ("oneapi", (0, 0, 0)),
    ("nrt", (23, 11, 0)),
    ("nvidia", (24, 11, 0)),
    ("full", (25, 5, 0)),
)
_MULTIPLE_FILES_BESIDE_SHARDS: SlurmVersion = (23, 2, 7)
_UNTYPED_COUNTS_FOR_ALL: SlurmVersion = (23, 2, 0)  # Slurm's commit 073c6b90acf7, in no release of 22.05
_MOST_LINKS = 1023  # GRES_MAX_LINK


@dataclass(slots=True)
class GresLine:
    """One line of gres.conf for a node, as slurmd keeps it (its GRES record)."""

    name: str
    type: str | None
    count: int
    files: list[str]
    multiple: bool
    cores: str | None
    links: str | None
    line: Line | None  # None: made up from slurm.conf

    @property
    def has_file(self) -> bool:
        """Whether it names device files."""
        return bool(self.files)


@dataclass(slots=True)
class NodeGres:
    """The result in one node's slurmd."""

    definition: NodeDefinition
    configured: dict[str, ConfiguredGres]
    sent: list[GresLine] = field(default_factory=list)  # to slurmctld
    written: list[GresLine] = field(default_factory=list)  # as in gres.conf
    autodetect: str = ""

    @property
    def gres_place(self) -> Place:
        """The place of the node's Gres, or else of the node."""
        gres = self.definition.values.get("gres")
        return gres.place if gres else self.definition.place


def read_nodes(site: Site, found: list[Finding]) -> list[NodeGres]:
    """Every node of slurm.conf; mistakes go into `found`."""
    types = site.slurm.words("GresTypes")
    lines = _lines_by_node(site, found)
    cache: dict[tuple[object, ...], tuple[NodeGres, list[Finding]]] = {}
    nodes = []
    for definition in site.slurm.nodes.values():
        own = lines.get(definition.name, [])
        gres = definition.text("gres")
        local = definition.name in site.local_nodes
        key = (tuple(map(id, own)), gres, definition.place, definition.core_counts(), local)
        if key not in cache:  # equal nodes are read once
            mistakes: list[Finding] = []
            reader = _Reader(site, definition, types, mistakes, local)
            cache[key] = (reader.read(own), mistakes)
        node, mistakes = cache[key]
        found += [replace(mistake, nodes=(definition.name,)) for mistake in mistakes]
        nodes.append(replace(node, definition=definition))
    return nodes


def _lines_by_node(site: Site, found: list[Finding]) -> dict[str, list[Line]]:
    """The lines of gres.conf that concern each node, in the order of the file."""
    by_config: dict[int, dict[str, list[Line]]] = {}
    result: dict[str, list[Line]] = {}
    for name in site.slurm.nodes:
        config = site.gres_of(name)
        if config is None:
            continue
        if id(config) not in by_config:
            by_config[id(config)] = _index(config, site, found)
        result[name] = by_config[id(config)].get(name, by_config[id(config)][""])
    return result


def _index(config: ConfigFile, site: Site, found: list[Finding]) -> dict[str, list[Line]]:
    """Lines by node; the entry "" holds the lines for every node that is not named."""
    named: dict[int, list[str]] = {}
    for line in config.lines:
        if line.head.key.lower() == "nodename":
            names = slurm_hostlist(line.head.text) or []
            named[id(line)] = names
            unknown = [name for name in names if name not in site.slurm.nodes]
            if unknown:
                found.append(Finding(RULES["SL052"], f"{', '.join(unknown[:3])}", line.head.place))
    mentioned = {name for names in named.values() for name in names if name in site.slurm.nodes}
    index: dict[str, list[Line]] = {name: [] for name in (*mentioned, "")}
    for line in config.lines:
        for name in named.get(id(line), index):
            if name in index:
                index[name].append(line)
    return index


class _Reader:
    """Reads the lines of one node."""

    def __init__(
        self, site: Site, node: NodeDefinition, types: Sequence[str], found: list[Finding], local: bool
    ) -> None:
        self.site = site
        self.node = node
        self.types = [name for name in dict.fromkeys(types) if name not in SHARED]
        self.types += [name for name in dict.fromkeys(types) if name in SHARED]
        self.found = found
        self.local = local
        sockets, cores, _ = node.core_counts()
        self.core_count = sockets * cores

    def note(self, code: str, what: str, line: Line | None = None) -> None:
        place = (
            line.place if line else self.node.values["gres"].place if "gres" in self.node.values else self.node.place
        )
        self.found.append(Finding(RULES[code], what, place))

    def read(self, lines: Sequence[Line]) -> NodeGres:
        text = self.node.text("gres")
        configured = {name: parse_node_gres(text, name)[0] for name in self.types}
        result = NodeGres(self.node, configured)
        if not self.types:
            return result
        result.written, result.autodetect = self._parse(lines)
        if result.autodetect not in ("", "off"):
            for gres in result.written:
                if gres.name == "gpu" and (gres.cores or gres.links):
                    self.note("SL025", f"AutoDetect={result.autodetect}", gres.line)
        remaining = list(result.written)
        for name in self.types:
            own = [gres for gres in remaining if gres.name.lower() == name.lower()]
            self._check_together(name, own)
            self._check_excess(name, own, configured[name])
        merged: list[GresLine] = []
        for name in self.types:
            merged += _merge(name, remaining, configured[name])
        self._check_devices(merged)
        result.sent = self._share(merged)
        return result

    # ---- one line at a time

    def _parse(self, lines: Sequence[Line]) -> tuple[list[GresLine], str]:
        general: list[GresLine] = []
        of_node: list[GresLine] = []
        local_auto, global_auto = "", ""
        flags: dict[str, tuple[frozenset[str], bool]] = {}  # the environment flags of each GRES so far
        for line in lines:
            head = line.head.key.lower()
            if head == "autodetect":
                global_auto = self._autodetect(line.head.text, line)
                continue
            auto = line.get("autodetect")
            if auto is not None and head == "name":
                self.note("SL024", f"AutoDetect={auto.text}", line)
            elif auto is not None:
                kind = self._autodetect(auto.text, line)
                if local_auto and kind != local_auto:
                    self.note("SL023", f"AutoDetect={auto.text} after AutoDetect={local_auto}", line)
                local_auto = kind
            name = line.head if head == "name" else line.get("name")
            if name is None:
                if auto is None:
                    self.note("SL020", " ".join(f"{pair.key}={pair.text}" for pair in line.pairs), line)
                continue
            if head not in ("name", "nodename"):
                continue
            gres = self._gres_line(name.text, line, flags)
            if not any(name.text.lower() == known.lower() for known in self.types):
                self.note("SL021", f"Name={name.text}", line)
            else:
                (general if head == "name" else of_node).append(gres)
        return general + of_node, local_auto or global_auto

    def _autodetect(self, text: str, line: Line) -> str:
        lower = text.lower()
        for kind, since in _AUTODETECT:
            if kind in lower and self.site.version >= since:
                return kind
        if lower != "off":
            self.note("SL022", f"AutoDetect={text}", line)
            return ""
        return "off"

    def _gres_line(self, name: str, line: Line, flags: dict[str, tuple[frozenset[str], bool]]) -> GresLine:
        kind = line.get("type")
        cores = line.get("cores", "cpus")
        if cores is not None:
            self._check_cores(cores.text, f"{cores.key}={cores.text}", line)
        file, several = line.get("file", "files"), line.get("multiplefiles")
        files: list[str] = []
        if file is not None:
            files = self._files(file.text, line)
        count = len(files)
        if several is not None:
            if file is not None:
                self.note("SL030", f"File={file.text} MultipleFiles={several.text}", line)
            files = self._files(several.text, line)
            count = 1
            if len(files) < 2:
                self.note("SL031", f"MultipleFiles={several.text}", line)
        self._check_flags(name, line, flags)
        links = line.get("links", "link")
        usable_links = links.text if links is not None and self._links_readable(links.text, line) else None
        wanted = line.get("count")
        if wanted is not None:
            number = parse_count(wanted.text)
            if number is None:
                self.note("SL036", f"Count={wanted.text}", line)
            elif count and number != count and name not in SHARED:
                self.note("SL037", f"Count={wanted.text}, but {count} file{'s' if count > 1 else ''}", line)
            else:
                count = number
        elif count == 0:
            count = 1
        if name in SHARED and files and several is None and count % len(files):
            self.note("SL048", f"Count={count} over {len(files)} files", line)
        return GresLine(
            name=name,
            type=kind.text if kind else None,
            count=count,
            files=files,
            multiple=several is not None,
            cores=cores.text if cores else None,
            links=usable_links,
            line=line,
        )

    def _files(self, text: str, line: Line) -> list[str]:
        files = slurm_hostlist(text)
        if files is None or not files:
            self.note("SL039", f"File={text}", line)
            return [text]
        if self.local:
            for file in files:
                if _mode(file) is None:
                    self.note("SL028", file, line)
        return files

    def _check_cores(self, text: str, shown: str, line: Line) -> None:
        try:
            cores = expand_ranges(text)
        except SluiceError:
            self.note("SL027", shown, line)
            return
        if cores and cores[-1] >= self.core_count:
            self.note("SL026", f"{shown}, the node has cores 0-{self.core_count - 1}", line)

    def _check_flags(self, name: str, line: Line, seen: dict[str, tuple[frozenset[str], bool]]) -> None:
        value = line.get("flags")
        if value is None:
            if name.lower() == "gpu" and name not in seen:
                seen[name] = (frozenset(_ENVIRONMENT_FLAGS) | {"default"}, False)
            return
        lower = value.text.lower()
        for word in lower.split(","):
            if not any(
                flag in word for flag in (*_FLAGS, *(("explicit",) if self.site.version >= (23, 11, 0) else ()))
            ):
                self.note("SL034", f"Flags={value.text}", line)
        environment = frozenset(flag for flag in _ENVIRONMENT_FLAGS if flag in lower)
        none = "no_gpu_env" in lower
        if environment and none:
            self.note("SL033", f"Flags={value.text}", line)
        elif environment or none:
            if name in seen and seen[name] != (environment, none):
                self.note("SL032", f"Flags={value.text}", line)
            seen[name] = (environment, none)
        elif name.lower() == "gpu" and name not in seen:
            seen[name] = (frozenset(_ENVIRONMENT_FLAGS) | {"default"}, False)

    def _links_readable(self, text: str, line: Line) -> bool:
        numbers = [part for part in text.split(",") if part]  # strtok skips empty parts
        valid = all(re.fullmatch(r"\s*[+-]?[0-9]{1,9}", part) for part in numbers)
        values = [int(part) for part in numbers] if valid else []
        if not valid or values.count(-1) != 1 or not all(-2 <= value <= _MOST_LINKS for value in values):
            self.note("SL035", f"Links={text}", line)
            return False
        return True

    # ---- the lines of one GRES together

    def _check_together(self, name: str, gres_lines: Sequence[GresLine]) -> None:
        for code, has in (
            ("SL040", [gres.has_file for gres in gres_lines]),
            ("SL041", [gres.type is not None for gres in gres_lines]),
        ):
            for position, flag in enumerate(has):
                if flag != has[0]:
                    self.note(code, f"Name={name}", gres_lines[position].line)
                    break
        plain = [gres for gres in gres_lines if not gres.has_file and gres.type is None]
        if len(plain) > 1 and len(plain) == len(gres_lines):
            self.note("SL042", f"Name={name}", plain[1].line)

    def _check_excess(self, name: str, gres_lines: Sequence[GresLine], configured: ConfiguredGres) -> None:
        left = [gres.count for gres in gres_lines]

        def use(count: int, kind: str | None) -> None:
            for position, gres in enumerate(gres_lines):
                untyped_counts_for_all = gres.type is None and self.site.version >= _UNTYPED_COUNTS_FOR_ALL
                if not untyped_counts_for_all and (gres.type or "").lower() != (kind or "").lower():
                    continue
                taken = min(left[position], count)
                left[position] -= taken
                count -= taken
                if left[position]:
                    return

        for kind, count in configured.types.items():
            use(count, kind)
        if not configured.types:
            use(configured.count, None)
        for gres, rest in zip(gres_lines, left, strict=True):
            if rest > 0:
                kind = f":{gres.type}" if gres.type else ""
                self.note("SL044", f"{rest} {name}{kind} more than in Gres={self.node.text('gres')}", gres.line)

    # ---- what the plugins do

    def _check_devices(self, merged: Iterable[GresLine]) -> None:
        for name in self.types:
            if name in SHARED:
                continue
            seen: set[str] = set()
            for gres in merged:
                if gres.name != name:
                    continue
                for file in gres.files:
                    mode = _mode(file) if self.local else None
                    if mode is not None and not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                        self.note("SL029", file, gres.line)
                    if not gres.multiple:
                        if file in seen:
                            self.note("SL043", file, gres.line)
                        seen.add(file)

    def _share(self, merged: Sequence[GresLine]) -> list[GresLine]:
        """The result of gres_c_s.c where GresTypes names shard or mps: one for each file."""
        shared_names = [name for name in self.types if name in SHARED]
        if not shared_names:
            return [gres for gres in merged if gres.name != "gpu" or gres.has_file]
        if any(gres.name == "gpu" and not gres.has_file for gres in merged):
            self.note("SL045", f"Gres={self.node.text('gres')}")
        gpus: list[GresLine] = []
        for gres in merged:
            if gres.name != "gpu":
                continue
            if gres.multiple and self.site.version < _MULTIPLE_FILES_BESIDE_SHARDS:
                self.note("SL049", f"MultipleFiles={','.join(gres.files)}", gres.line)
            if gres.multiple and self.site.version >= _MULTIPLE_FILES_BESIDE_SHARDS:
                gpus.append(gres)
            else:
                gpus += [replace(gres, files=[file], count=1) for file in gres.files]
        result = [gres for gres in merged if gres.name != "gpu" and gres.name not in SHARED]
        result += gpus
        for name in shared_names:
            result += self._attach(gpus, [gres for gres in merged if gres.name == name])
        return result

    def _attach(self, gpus: Sequence[GresLine], shares: Sequence[GresLine]) -> list[GresLine]:
        if not gpus:
            return []
        if len(shares) == 1 and not shares[0].has_file:
            base, extra = divmod(shares[0].count, len(gpus))
            return [
                replace(shares[0], files=gpu.files, count=base + (position >= len(gpus) - extra))
                for position, gpu in enumerate(gpus)
            ]
        if any(not gres.has_file for gres in shares):  # of gres.conf, or made up for a type that gres.conf has not
            self.note("SL055", f"Gres={self.node.text('gres')}", next(filter(None, (one.line for one in shares)), None))
            return []
        by_file: dict[str, list[GresLine]] = {}
        for gres in shares:
            for file in gres.files:
                one = replace(gres, files=[file], count=gres.count // len(gres.files))
                by_file.setdefault(file, []).append(one)
        attached = [by_file[gpu.files[0]].pop(0) for gpu in gpus if len(gpu.files) == 1 and by_file.get(gpu.files[0])]
        for file, left in by_file.items():
            for gres in left:
                self.note("SL047", file, gres.line)
        return attached


def _merge(name: str, remaining: list[GresLine], configured: ConfiguredGres) -> list[GresLine]:
    """The lines that slurm.conf has room for, type by type, and made-up ones for what gres.conf lacks."""
    merged: list[GresLine] = []
    wanted: list[tuple[str | None, int]] = [*configured.types.items()] or [(None, configured.count)]
    for kind, count in wanted:
        while count:
            match = next(
                (
                    gres
                    for gres in remaining
                    if gres.name.lower() == name.lower() and (kind is None or (gres.type or "").lower() == kind.lower())
                ),
                None,
            )
            if match is None:
                merged.append(GresLine(name, kind, count, [], False, None, None, None))
                break
            remaining.remove(match)
            taken = replace(match, name=match.name, type=None if kind is None else match.type)
            if taken.count > count:
                taken.count = count
                taken.files = taken.files[:count] if not taken.multiple and taken.name not in SHARED else taken.files
            count -= taken.count
            merged.append(taken)
    return merged


def _mode(file: str) -> int | None:
    """The mode of a file of this machine; None where there is no such file."""
    try:
        return Path(file).stat().st_mode
    except (OSError, ValueError):
        return None
