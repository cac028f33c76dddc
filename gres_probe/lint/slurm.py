"""slurm.conf: GresTypes and the GRES of the node lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gres_probe.lint.rules import RULES, Finding, Site
from gres_probe.writer import TYPED_SHARDS
from sluice.slurm.slurm_conf import NodeDefinition, SlurmConf

SHARED = ("mps", "shard")  # GRES that share the gpu
_COUNTS_UNTYPED_ALONE = (23, 11, 5)  # of a job's GRES of one name (_set_type_tres_cnt); before, it counts all
_SUFFIX = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "p": 1024**5}
_NO_VALUE = 0xFFFFFFFFFFFFFFFE  # Slurm's NO_VAL64: the first number that is not a count


@dataclass(slots=True)
class ConfiguredGres:
    """One GRES of a node line: its count, and by type where it has types, in the line's order."""

    count: int = 0
    types: dict[str, int] = field(default_factory=dict)


def check(site: Site) -> Iterator[Finding]:
    """GresTypes against itself and against each node's Gres."""
    slurm = site.slurm
    types, place = slurm.words("GresTypes"), slurm.place("GresTypes")
    for name in sorted({name for name in types if types.count(name) > 1}):
        yield Finding(RULES["SL011"], f"GresTypes names {name} more than once", place)
    shared = [name for name in types if name in SHARED]
    if shared and "gpu" not in types:
        yield Finding(RULES["SL010"], f"GresTypes={','.join(types)}", place)
    select = slurm.option("SelectType", "select/cons_tres" if site.version >= (23, 11, 0) else "select/linear")
    if shared and select.lower() not in ("select/cons_tres", "cons_tres"):
        yield Finding(RULES["SL015"], f"GresTypes names {shared[0]}, SelectType is {select}", slurm.place("SelectType"))
    for value in slurm.unreadable:
        yield Finding(RULES["SL018"], f"{value.key}={value.text}", value.place)
    for name, first, second in slurm.repeated_nodes:
        yield Finding(RULES["SL017"], f"{name} is also defined at {first}", second)
    takeover_drains = site.version >= TYPED_SHARDS and slurm.controllers > 1
    for node in slurm.nodes.values():
        yield from _check_node(node, types, takeover_drains)
    if site.version >= _COUNTS_UNTYPED_ALONE:
        yield from _check_shard_types(slurm)


def _check_shard_types(slurm: SlurmConf) -> Iterator[Finding]:
    """All shards of a partition's nodes have a type, or none has: a job has nodes of one partition."""
    sides: dict[bool, list[NodeDefinition]] = {True: [], False: []}
    for node in slurm.nodes.values():
        if (shards := parse_node_gres(node.text("gres"), "shard")[0]).count:
            sides[bool(shards.types)].append(node)
    for name in slurm.partitions if all(sides.values()) else ():
        members = slurm.partition_nodes(name) if name.upper() != "DEFAULT" else set()
        typed, untyped = (next((node for node in side if node.name in members), None) for side in sides.values())
        if typed and untyped:
            what = f"{typed.name} Gres={typed.text('gres')} and {untyped.name} Gres={untyped.text('gres')}"
            yield Finding(RULES["SL056"], f"partition {name}: {what}", untyped.values["gres"].place)
            return


def _check_node(node: NodeDefinition, types: list[str], takeover_drains: bool) -> Iterator[Finding]:
    gres = node.values.get("gres")
    if gres is None or not gres.text:
        return
    if not types:
        yield Finding(RULES["SL019"], f"Gres={gres.text} has no effect", gres.place, (node.name,))
        return
    for token in gres.text.split(","):
        if token and token.partition(":")[0] not in types:
            yield Finding(RULES["SL012"], f"Gres={token}", gres.place, (node.name,))
    for name in types:
        configured, bad = parse_node_gres(gres.text, name)
        if bad:
            yield Finding(RULES["SL013"], f"Gres={bad}", gres.place, (node.name,))
        if configured.types and configured.count > sum(configured.types.values()):
            yield Finding(RULES["SL014"], f"Gres={gres.text}", gres.place, (node.name,))
    having = {name: parse_node_gres(gres.text, name)[0] for name in ("gpu", *SHARED) if name in types}
    gpu = having.get("gpu", ConfiguredGres())
    for name in SHARED:
        shared = having.get(name, ConfiguredGres())
        if shared.count and not gpu.count:
            yield Finding(RULES["SL016"], f"Gres={gres.text}", gres.place, (node.name,))
        if takeover_drains and shared.count and gpu.types and not shared.types:
            yield Finding(RULES["SL054"], f"Gres={gres.text}", gres.place, (node.name,))


def parse_node_gres(text: str, name: str) -> tuple[ConfiguredGres, str]:
    """One GRES of Gres=, and the token that cannot be read (or an empty string)."""
    configured = ConfiguredGres()
    for token in text.split(","):
        if token == name:
            configured.count = 1
            break
        if not token.startswith(f"{name}:"):
            continue
        bare = token.rpartition("(")[0] if "(" in token else token
        head, _, last = bare.rpartition(":")
        if last[:1].isdigit():
            count = parse_count(last)
            if count is None:
                return configured, token
            bare = head
        else:
            count = 1
        configured.count += count
        for kind in filter(None, bare.split(":")[1:]):
            configured.types[kind] = configured.types.get(kind, 0) + count
    return configured, ""


def parse_count(text: str) -> int | None:
    """A count with Slurm's suffixes; None where Slurm refuses it."""
    match = re.fullmatch(r"\s*([+-]?[0-9]{1,19})(?:([kmgtp])(i?b)?)?", text, re.IGNORECASE | re.ASCII)
    if match is None:
        return None
    suffix, tail = (match[2] or "").lower(), (match[3] or "").lower()
    factor = 1000 ** "kmgtp".find(suffix) * 1000 if suffix and tail == "b" else _SUFFIX[suffix]
    count = int(match[1]) * factor
    return count if 0 <= count < _NO_VALUE else None
