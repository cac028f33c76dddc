"""Fabrics for tests, as ibnetdiscover prints them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

Cable = tuple[str, int, str, int]
"""Name and port of both ends; a node's adapter is ``n1/mlx5_0``."""


def guid_of(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:16]


def ibnetdiscover(
    cables: Iterable[Cable], *, guids: dict[str, str] | None = None, speeds: dict[str, str] | None = None
) -> str:
    """Both ends of each cable; `guids` and `speeds` replace those of a device."""
    guids, speeds = guids or {}, speeds or {}
    ends: dict[str, list[tuple[int, str, int]]] = {}
    for one, port, other, far in cables:
        ends.setdefault(one, []).append((port, other, far))
        ends.setdefault(other, []).append((far, one, port))
    lines = ["#", "# Topology file: generated on Sat Nov 28 15:38:33 2026", "#", ""]

    def identity(name: str) -> str:
        return f"{'H' if '/' in name else 'S'}-{guids.get(name, guid_of(name))}"

    for name, ports in ends.items():
        lines += ["vendid=0x0", "devid=0x0", "sysimgguid=0x1f"]
        if "/" in name:
            lines.append(f'Ca\t1 "{identity(name)}"\t\t# "{name.replace("/", " ")}"')
        else:
            lines.append(f'Switch\t40 "{identity(name)}"\t\t# "{name}" base port 0 lid 0 lmc 0')
        for port, other, far in ports:
            speed = speeds.get(name, speeds.get(other, "4xNDR"))
            lines.append(f'[{port}](1f)\t"{identity(other)}"[{far}]\t\t# "{other}" lid 0 {speed}')
        lines.append("")
    return "\n".join(lines)


def rails(nodes: int, adapters: int, spines: int, first: int = 1, unit: str = "a") -> list[Cable]:
    """A unit of nodes, each of whose adapters is plugged into a leaf switch of its own, below common spines."""
    cables: list[Cable] = []
    for rail in range(adapters):
        leaf = f"{unit}-leaf{rail + 1}"
        cables += [(leaf, node + 1, f"n{first + node}/mlx5_{rail}", 1) for node in range(nodes)]
        cables += [(leaf, 100 + spine, f"spine{spine + 1}", 1 + 10 * rail + ord(unit)) for spine in range(spines)]
    return cables
