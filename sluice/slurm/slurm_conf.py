"""Reads slurm.conf, gres.conf and cgroup.conf as Slurm's own parser does, and keeps file and line of every value.

The grammar is Slurm's (src/common/parse_config.c, doc/man5/slurm.conf): ``key=value`` pairs, values quoted or
without white space, keys in any case, ``#`` comments, a backslash at the end of a line continues it, a backslash
elsewhere quotes the next character, ``Include file`` relative to the including file.

Nothing here raises for the content of a file: what Slurm would refuse becomes a `Fault`. Only a file that cannot be
read, is absurdly large, or includes itself raises SluiceError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.base.errors import SluiceError

_MOST_BYTES = 64 * 1024 * 1024
_DEEPEST_INCLUDE = 32
_MOST_NAMES = 1_000_000  # names in one hostlist

_KEY_VALUE = re.compile(
    r'\s*([A-Za-z0-9_.]+)\s*([-*+/]?)=\s*(?:"([^"]*)"|([^\s]+))(?=\s|$)',
    re.ASCII,
)


class _EndlessIncludeError(SluiceError):
    """Unlike other faults of an included file, this one ends the reading."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in a file; line 0 is the file as a whole."""

    file: Path
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else str(self.file)


@dataclass(frozen=True, slots=True)
class Value:
    """One value and its place; `key` as spelled in the file."""

    key: str
    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that Slurm's parser refuses or drops; `kind` is one of syntax, include, repeated."""

    kind: str
    what: str
    place: Place


@dataclass(slots=True)
class Line:
    """One logical line: its pairs in order. `rest` is what could not be parsed."""

    place: Place
    pairs: list[Value]
    rest: str = ""

    @property
    def head(self) -> Value:
        """The first pair, which says what the line defines."""
        return self.pairs[0]

    def get(self, *keys: str) -> Value | None:
        """The last value of the first of these keys that is there; keys in lower case."""
        for key in keys:
            for value in reversed(self.pairs):
                if value.key.lower() == key:
                    return value
        return None


@dataclass(slots=True)
class ConfigFile:
    """A file with all that it includes."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)  # the file itself and every included one


def read_config(path: Path, *, cluster_name: str = "") -> ConfigFile:
    """Parse a file; `cluster_name` replaces ``%c`` in the names of included files."""
    config = ConfigFile(path)
    _read(config, path, cluster_name, ())
    return config


def parse_text(text: str, path: Path = Path("slurm.conf")) -> ConfigFile:
    """Parse text as the content of `path`, following no includes."""
    config = ConfigFile(path, files=[path])
    for line in _logical_lines(text, path):
        _parse_line(config, line, lambda *_: None)
    return config


def _read(config: ConfigFile, path: Path, cluster_name: str, parents: tuple[Path, ...]) -> None:
    if path in parents or len(parents) >= _DEEPEST_INCLUDE:
        chain = " -> ".join(map(str, (*parents[-3:], path)))
        raise _EndlessIncludeError(f"{path}: includes itself ({chain})", remedy="remove one of the Include lines")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SluiceError(f"{path}: larger than any configuration file", remedy="name a slurm.conf or gres.conf")
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="name a file that can be read") from error
    except ValueError as error:  # an embedded null byte in the name
        raise SluiceError(f"{str(path)!r}: {error}", remedy="name a file that can be read") from error
    config.files.append(path)
    if len(config.files) > 10_000:
        raise _EndlessIncludeError(
            f"{config.path}: includes more than 10,000 files", remedy="remove the repeated Include lines"
        )

    def include(name: str, place: Place) -> None:
        target = path.parent / name.replace("%c", cluster_name)
        try:
            _read(config, target, cluster_name, (*parents, path))
        except _EndlessIncludeError:
            raise
        except SluiceError as error:
            config.faults.append(Fault("include", error.what, place))

    for line in _logical_lines(text, path):
        _parse_line(config, line, include)


def _logical_lines(text: str, path: Path) -> Iterator[tuple[Place, str]]:
    """Comments stripped, continued lines joined, escapes resolved."""
    pending, start = "", 0
    for number, physical in enumerate(text.split("\n"), start=1):
        start = start or number
        bare = _strip_comment(physical)
        stripped = bare.rstrip(" \t\r\v\f")
        backslashes = len(stripped) - len(stripped.rstrip("\\"))
        if backslashes % 2 and len(bare) == len(physical):  # a comment after the backslash hides the line's end
            pending += stripped[:-1]
            continue
        yield Place(path, start), re.sub(r"\\(.?)", r"\1", pending + bare)
        pending, start = "", 0
    if pending:
        yield Place(path, start), re.sub(r"\\(.?)", r"\1", pending)


def _strip_comment(line: str) -> str:
    for match in re.finditer("#", line):
        before = line[: match.start()]
        if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return before
    return line


def _parse_line(config: ConfigFile, numbered: tuple[Place, str], include: Callable[[str, Place], None]) -> None:
    place, text = numbered
    if not text.strip():
        return
    directive = re.match(r"include\s+(\S*)(.*)$", text, re.IGNORECASE | re.DOTALL)
    if directive:
        include(directive[1], place)
        if directive[2].strip():
            config.faults.append(Fault("syntax", f"{_short(directive[2])} after Include", place))
        return
    pairs: list[Value] = []
    at = 0
    while match := _KEY_VALUE.match(text, at):
        quoted, plain = match[3], match[4]
        pairs.append(Value(match[1], plain if quoted is None else quoted, place))
        at = match.end()
    rest = text[at:].strip()
    if rest:
        config.faults.append(Fault("syntax", f"{_short(rest)} is not key=value", place))
    seen: set[str] = set()
    for pair in pairs:
        key = pair.key.lower()
        if key in seen:
            config.faults.append(Fault("repeated", f"{pair.key} is there more than once", place))
        seen.add(key)
    if pairs:
        config.lines.append(Line(place, pairs, rest))


def _short(text: str) -> str:
    shown = ascii(text.strip())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def slurm_hostlist(text: str) -> list[str] | None:
    """A hostlist in its own order, or None where Slurm cannot read it; device files may be written so as well."""
    names: list[str] = []
    for part in split_outside_brackets(text):
        if part:
            expanded = _expand(part)
            if expanded is None or len(names) + len(expanded) > _MOST_NAMES:
                return None
            names += expanded
    return names


def split_outside_brackets(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == separator and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return parts


def _expand(part: str) -> list[str] | None:
    names = [""]
    for piece in re.split(r"(\[[^\[\]]*\])", part):
        if piece.startswith("["):
            numbers = _bracket(piece[1:-1])
            if numbers is None or len(names) * len(numbers) > _MOST_NAMES:
                return None
            names = [name + number for name in names for number in numbers]
        elif "[" in piece or "]" in piece:
            return None
        else:
            names = [name + piece for name in names]
    return names


def _bracket(text: str) -> list[str] | None:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            return None
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low >= _MOST_NAMES:
            return None
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


@dataclass(slots=True)
class NodeDefinition:
    """One node of slurm.conf, with what it inherits from NodeName=DEFAULT lines."""

    name: str
    place: Place
    values: dict[str, Value]  # by key in lower case

    def text(self, *keys: str) -> str:
        """The value of the first of these keys that is set, or the empty string."""
        return next((self.values[key].text for key in keys if key in self.values), "")

    def number(self, *keys: str, default: int = 0) -> int:
        """The same as a number; `default` where unset or not a number."""
        text = self.text(*keys)
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else default

    def core_counts(self) -> tuple[int, int, int]:
        """(sockets, cores per socket, threads per core) as Slurm completes the node line."""
        threads = self.number("threadspercore", default=1) or 1
        cores = self.number("corespersocket", default=1) or 1
        sockets = self.number("sockets") or self.number("boards", default=1) * self.number("socketsperboard")
        return sockets or max(1, self.number("cpus", "procs") // (cores * threads)), cores, threads


@dataclass(slots=True)
class SlurmConf:
    """slurm.conf: global options (the last one counts), and the nodes by name in the order of the file."""

    config: ConfigFile
    options: dict[str, Value]
    nodes: dict[str, NodeDefinition]
    repeated_nodes: list[tuple[str, Place, Place]]  # name, first and second definition
    unreadable: list[Value]  # hostlists that Slurm cannot read
    node_sets: dict[str, Line]
    partitions: dict[str, Line]

    def option(self, key: str, default: str = "") -> str:
        """A global option, by its name in any case."""
        value = self.options.get(key.lower())
        return value.text if value else default

    def words(self, key: str) -> list[str]:
        """A comma-separated option."""
        return [word for word in self.option(key).split(",") if word]

    @property
    def controllers(self) -> int:
        """How many hosts have a slurmctld."""
        hosts = sum(line.head.key.lower() == "slurmctldhost" for line in self.config.lines)
        return max(hosts, 2 if self.option("BackupController") else 1)

    def partition_nodes(self, name: str) -> set[str]:
        """The nodes of a partition that have lines here; none of what cannot be read."""
        lines = [self.partitions[name], *(line for one, line in self.partitions.items() if one.upper() == "DEFAULT")]
        listed = next(filter(None, (line.get("nodes") for line in lines)), None)
        found: set[str] = set()
        for word in split_outside_brackets(listed.text) if listed else ():
            if word.upper() == "ALL":
                found |= self.nodes.keys()
            elif node_set := self.node_sets.get(word):
                found |= self._set_nodes(node_set)
            else:
                found |= self.nodes.keys() & set(slurm_hostlist(word) or ())
        return found

    def _set_nodes(self, node_set: Line) -> set[str]:
        names, feature = node_set.get("nodes"), node_set.get("feature")
        found = self.nodes.keys() & set((names and slurm_hostlist(names.text)) or ())
        if feature:
            for name, node in self.nodes.items():
                if feature.text in node.text("feature", "features").split(","):
                    found.add(name)
        return found

    def place(self, key: str) -> Place:
        """The place of an option; the file as a whole when it is unset."""
        value = self.options.get(key.lower())
        return value.place if value else Place(self.config.path)


_DEFINING = frozenset({"nodename", "partitionname", "nodeset", "downnodes", "frontendname"})


def read_slurm_conf(path: Path) -> SlurmConf:
    """Parse slurm.conf (or the one in a folder) with its includes."""
    file = path / "slurm.conf" if path.is_dir() else path
    first = read_config(file)
    cluster = next((line.head.text for line in first.lines if line.head.key.lower() == "clustername"), "")
    config = read_config(file, cluster_name=cluster) if any(f.kind == "include" for f in first.faults) else first
    return interpret_slurm_conf(config)


def _values_of_each(values: dict[str, Value], count: int) -> dict[str, list[Value]]:
    """Hostlists next to NodeName, one element for each node: ``NodeName=n[1-2] NodeAddr=10.0.0.[1-2]``."""
    each = {}
    for key in ("nodeaddr", "nodehostname", "bcastaddr", "port"):
        if key in values and ("[" in values[key].text or "," in values[key].text):
            texts = slurm_hostlist(values[key].text) or []
            if len(texts) == count:
                each[key] = [replace(values[key], text=text) for text in texts]
    return each


def interpret_slurm_conf(config: ConfigFile) -> SlurmConf:
    """What the lines of slurm.conf mean."""
    conf = SlurmConf(config, {}, {}, [], [], {}, {})
    defaults: dict[str, Value] = {}
    total = 0
    for line in config.lines:
        kind = line.head.key.lower()
        if kind == "nodename":
            given = {value.key.lower(): value for value in line.pairs[1:]}
            if line.head.text.upper() == "DEFAULT":
                defaults = defaults | given
                continue
            names = slurm_hostlist(line.head.text)
            total += len(names or ())
            if names is None or total > _MOST_NAMES:
                conf.unreadable.append(line.head)
                continue
            merged = defaults | given
            each = _values_of_each(merged, len(names))
            for position, name in enumerate(names):
                if name in conf.nodes:
                    conf.repeated_nodes.append((name, conf.nodes[name].place, line.place))
                else:
                    values = merged | {key: listed[position] for key, listed in each.items()} if each else merged
                    conf.nodes[name] = NodeDefinition(name, line.place, values)
        elif kind == "partitionname":
            conf.partitions[line.head.text] = line
        elif kind == "nodeset":
            conf.node_sets[line.head.text] = line
        elif kind not in _DEFINING:
            for value in line.pairs[:1]:
                conf.options[value.key.lower()] = value
    return conf
