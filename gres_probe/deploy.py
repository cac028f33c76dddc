"""Puts what the writer generates where a site's Slurm reads it, without changing any of the site's own lines.

Sluice owns files in a folder of the site's choice: ``gres.sluice.conf``, which the site's gres.conf includes,
``nodes.sluice.conf``, which its slurm.conf includes, and where interfaces are offered ``nics.sluice.conf``, which the
plugins read next to slurm.conf. What the site sets for a node itself (NodeAddr, Port, State,
CoreSpecCount, its own features, ...) stays in its own NodeName lines: in slurm.conf until those are moved, then in
``nodes.site.conf``, which only Sluice reads. They override the hardware's figures, except Gres; features are
joined.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gres_probe.inventory import Inventory
from gres_probe.nic_groups import NICS_FILE, keep_planes, read
from gres_probe.writer import GRES_FILE, NODES_FILE, GresConfiguration, generate
from sluice.base.errors import SluiceError
from sluice.base.files import write_if_changed
from sluice.base.hostlist import fold
from sluice.base.slurm_version import SlurmVersion
from sluice.slurm.slurm_conf import ConfigFile, NodeDefinition, SlurmConf, interpret_slurm_conf, read_config

SITE_FILE = "nodes.site.conf"
_LAYOUT_KEYS = ("boards", "socketsperboard", "procs", "cpus", "sockets", "corespersocket", "threadspercore")
_CANONICAL = {
    "sockets": "Sockets",
    "corespersocket": "CoresPerSocket",
    "threadspercore": "ThreadsPerCore",
    "realmemory": "RealMemory",
    "weight": "Weight",
}


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file as it is (None: not there) and as it should be."""

    path: Path
    old: str | None
    new: str

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.old != self.new

    def diff(self) -> str:
        """The change as a unified diff."""
        return "".join(
            difflib.unified_diff(
                (self.old or "").splitlines(keepends=True),
                self.new.splitlines(keepends=True),
                "/dev/null" if self.old is None else str(self.path),
                str(self.path),
            )
        )


@dataclass(slots=True)
class GresChanges:
    """What would be written, with notes and steps for people."""

    files: list[FileChange]
    configuration: GresConfiguration
    notes: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)  # what is left for the admin
    foreign_shards: list[str] = field(default_factory=list)  # where the site itself defines shards

    def write(self) -> list[Path]:
        """Write what changed, each file in one step; returns the files written."""
        written = []
        for file in self.files:
            try:
                file.path.parent.mkdir(parents=True, exist_ok=True)
                if write_if_changed(file.path, file.new):
                    written.append(file.path)
            except OSError as error:
                raise SluiceError(
                    f"{file.path}: {error.strerror}", remedy="name a folder that you may write"
                ) from error
        return written


def gres_changes(
    inventories: Iterable[Inventory],
    folder: Path,
    *,
    slurm: SlurmConf | None,
    gres: ConfigFile | None,
    slurm_version: SlurmVersion,
    shards: bool = True,
    nics: bool = False,
    nic_types: bool = False,
    per_node: bool = False,
    features: Mapping[str, Sequence[str]] | None = None,
) -> GresChanges:
    """What `sluice gres write` would do in `folder`.

    `slurm` and `gres` are the site's configuration, where it is known. `per_node` gives every node its own
    gres.conf, ``folder/NODE/gres.sluice.conf``, for sites without shared files; `features` are further ones of each
    node. Raises SluiceError where an existing file cannot be read, also by Slurm, or an inventory contradicts itself.
    """
    for config in (slurm.config if slurm is not None else None, gres):
        for fault in config.faults if config is not None else ():
            if fault.kind == "syntax":  # the site's settings of its nodes may come after it
                raise SluiceError(f"{fault.place}: {fault.what}; nothing written", remedy="correct the line first")
    configuration = generate(
        inventories, slurm_version=slurm_version, shards=shards, nics=nics, nic_types=nic_types, features=features
    )
    overrides = _overrides(configuration, slurm, folder / SITE_FILE)
    texts = {folder / NODES_FILE: configuration.nodes_conf(overrides)}
    if per_node:
        texts |= {folder / name / GRES_FILE: configuration.node_gres_conf(name) for name in configuration.nodes}
    else:
        texts[folder / GRES_FILE] = configuration.gres_conf
    if nics:
        lost = _keep_planes(configuration, folder / NICS_FILE)
        if lost:
            configuration.notes.append(
                f"{fold(lost)}: other interfaces than before, their planes are left out; then run: "
                "sluice fabric discover --write"
            )
        texts[folder / NICS_FILE] = configuration.nics_conf()
    changes = GresChanges([FileChange(path, current_text(path), text) for path, text in texts.items()], configuration)
    changes.notes = list(configuration.notes)
    changes.foreign_shards = _foreign_shards(slurm, gres)
    changes.steps = _steps(
        configuration,
        slurm,
        gres,
        folder,
        ["gpu", *(["shard"] if shards else []), *(["nic"] if nics else [])],
        per_node,
    )
    if nics and slurm is not None and not _beside(folder / NICS_FILE, slurm):
        changes.steps.append(f"copy {folder / NICS_FILE} next to slurm.conf on each controller")
    return changes


def _keep_planes(configuration: GresConfiguration, path: Path) -> list[str]:
    """Planes that `sluice fabric discover` has written; the nodes that lose theirs."""
    try:
        old = read(current_text(path) or "")
    except SluiceError:  # not there, or changed by hand
        return []
    configuration.nic_groups, lost = keep_planes(configuration.nic_groups, old)
    return lost


def current_text(path: Path) -> str | None:
    """What the file has, None where there is none. Raises SluiceError for one that cannot be read."""
    try:
        return path.read_text(errors="surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="name a folder with readable files") from error


def _overrides(configuration: GresConfiguration, slurm: SlurmConf | None, site_file: Path) -> dict[str, dict[str, str]]:
    """The site's own parameters of each node."""
    defined: dict[str, NodeDefinition] = {}
    if slurm is not None:
        defined |= {name: node for name, node in slurm.nodes.items() if node.place.file.name != NODES_FILE}
    if site_file.exists():
        defined |= interpret_slurm_conf(read_config(site_file)).nodes
    overrides: dict[str, dict[str, str]] = {}
    for name, attributes in configuration.nodes.items():
        if name not in defined:
            continue
        values = defined[name].values
        mine = {
            _CANONICAL.get(key, value.key): value.text
            for key, value in values.items()
            if key not in ("gres", "feature", "features")
        }
        if any(key in values for key in _LAYOUT_KEYS):  # the site's own view of the processors, as a whole
            mine = {_CANONICAL[key]: "" for key in _LAYOUT_KEYS if key in _CANONICAL and key not in values} | mine
        features = defined[name].text("feature", "features").split(",")
        joined = dict.fromkeys([*attributes.features, *(word for word in features if word)])
        overrides[name] = mine | {"Feature": ",".join(joined)}
    return overrides


def _foreign_shards(slurm: SlurmConf | None, gres: ConfigFile | None) -> list[str]:
    """Places outside Sluice's files that define shards."""
    places = []
    for node in slurm.nodes.values() if slurm else ():
        value = node.values.get("gres")
        if (
            value
            and value.place.file.name != NODES_FILE
            and any(token.partition(":")[0] == "shard" for token in value.text.split(","))
        ):
            places.append(f"{value.place}: {value.key}={value.text}")
    for line in gres.lines if gres else ():
        name = line.get("name")
        if name and name.text.lower() == "shard" and line.place.file.name != GRES_FILE:
            places.append(f"{line.place}: Name=shard")
    return list(dict.fromkeys(places))


def _steps(
    configuration: GresConfiguration,
    slurm: SlurmConf | None,
    gres: ConfigFile | None,
    folder: Path,
    wanted: Sequence[str],
    per_node: bool,
) -> list[str]:
    if slurm is None:
        return []
    steps = []
    have = slurm.words("GresTypes")
    if missing := [name for name in wanted if name not in have]:
        steps.append(f"in slurm.conf set GresTypes={','.join([*have, *missing])}")
    if not _read_by(slurm.config, folder / NODES_FILE):
        steps.append(f"in slurm.conf add: include {_include_name(folder / NODES_FILE, slurm)}")
    places = _by_place(slurm, configuration.nodes)
    if places:
        steps.append(f"move your NodeName lines to {folder / SITE_FILE}: {', '.join(places)}")
    if not per_node and (gres is None or not _read_by(gres, folder / GRES_FILE)):
        steps.append(f"in gres.conf add: include {_include_name(folder / GRES_FILE, slurm)}")
    if per_node:
        steps.append(f"copy {folder}/NODE/{GRES_FILE} to each node and include it in its gres.conf")
    return steps


def _read_by(config: ConfigFile, path: Path) -> bool:
    """Whether the configuration includes the file."""
    target = path.resolve()
    return any(file.resolve() == target for file in config.files)


def _by_place(slurm: SlurmConf, nodes: Mapping[str, object]) -> list[str]:
    places = (node.place for name, node in slurm.nodes.items() if name in nodes and node.place.file.name != NODES_FILE)
    return [str(place) for place in dict.fromkeys(places)]


def _include_name(path: Path, slurm: SlurmConf) -> str:
    """Without folder where it is next to slurm.conf: only such files reach configless nodes."""
    return path.name if _beside(path, slurm) else str(path)


def _beside(path: Path, slurm: SlurmConf) -> bool:
    return path.parent.resolve() == slurm.config.path.parent.resolve()
