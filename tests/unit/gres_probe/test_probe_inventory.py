"""Inventory JSON of any origin: it loads what it wrote, and refuses the rest with one clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gres_probe.inventory import (
    Ecc,
    Gpu,
    Health,
    Inventory,
    Link,
    LinkType,
    Nic,
    Partition,
    Problem,
    Vendor,
)
from sluice.base.errors import SluiceError
from sluice.base.text import one_line

SCALE = 50 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 1

texts = st.text(min_size=1, max_size=40).map(one_line).filter(bool)
counts = st.integers(0, 1 << 30)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def gpus(draw: st.DrawFn, position: int) -> Gpu:
    total = draw(st.integers(1, 1 << 22))
    minor = position + 128
    partitions = draw(st.integers(0, 3))
    return Gpu(
        vendor=draw(st.sampled_from([str(vendor) for vendor in Vendor])),
        index=position,
        uuid=f"GPU-{position}-{draw(st.uuids())}",
        model=draw(texts),
        device_file=f"/dev/dri/renderD{minor}",
        minor=draw(optional(st.just(minor))),
        pci_address=f"0000:{position:02x}:00.{draw(st.integers(0, 7))}",
        memory_total_mib=total,
        memory_usable_mib=draw(st.integers(0, total)),
        extra_device_files=draw(st.lists(st.just(f"/dev/dri/card{position}"), max_size=1)),
        memory_used_mib=draw(optional(st.integers(0, total))),
        utilisation_percent=draw(optional(st.integers(0, 100))),
        numa_node=draw(optional(st.integers(0, 7))),
        cores=draw(st.sampled_from(["", "0", "0-31,64-95"])),
        capability=draw(st.sampled_from(["", "9.0", "gfx942"])),
        ecc=Ecc(draw(optional(st.booleans())), draw(optional(counts)), draw(optional(counts))),
        health=draw(st.sampled_from(list(Health))),
        health_reasons=draw(st.lists(texts, max_size=2)),
        partitioned=partitions > 0,
        partitions=[
            Partition(part, f"MIG-{position}-{part}", draw(texts), draw(st.integers(1, total)), ["/dev/nvidia0"])
            for part in range(partitions)
        ],
        nics=draw(st.lists(st.just("mlx5_0"), max_size=1)),
    )


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    size = draw(st.integers(0, 4))
    links = st.builds(Link, st.sampled_from(list(LinkType)), st.integers(0, 18))
    rows = st.lists(st.lists(links, min_size=size, max_size=size), min_size=size, max_size=size)
    nics = draw(st.integers(0, 1))
    return Inventory(
        node=draw(st.from_regex(r"\A[a-z][a-z0-9-]{0,20}\Z")),
        gpus=[draw(gpus(position)) for position in range(size)],
        links=draw(rows),
        problems=draw(st.lists(st.builds(Problem, st.just("amd"), texts, texts, optional(counts)), max_size=2)),
        nics=[Nic(f"mlx5_{n}", "0000:ff:00.0", n, [Link(LinkType.NUMA_NODE)] * (size + nics)) for n in range(nics)],
        sockets=draw(optional(st.integers(1, 8))),
        cpu_cores=draw(st.lists(st.integers(-1, 200), max_size=8)),
        probed_at="2026-01-02T03:04:05Z",
    )


@settings(max_examples=100 * SCALE)
@given(inventories())
def test_what_it_wrote_it_reads(inventory: Inventory) -> None:
    assert Inventory.from_json(inventory.to_json(), source="x") == inventory


@settings(max_examples=200 * SCALE)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_end_in_one_line(data: bytes | str) -> None:
    refused(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300 * SCALE)
@given(st.data())
def test_any_change_is_read_or_refused(data: st.DataObject) -> None:
    """Replace, add or drop something anywhere in a valid document: never an exception of another kind."""
    document: Any = asdict(data.draw(inventories()))
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(json_values)
        else:
            del place[key]
        break
    try:
        inventory = Inventory.from_json(json.dumps(document), source="drop/n1.json")
    except SluiceError as error:
        one_clear_line(error)
    else:
        # What is read can be written and read again, and does not break a line of a configuration file.
        assert Inventory.from_json(inventory.to_json(), source="x") == inventory
        for gpu in inventory.gpus:
            assert "\n" not in gpu.device_file + gpu.uuid + gpu.model + gpu.cores + inventory.node


def refused(data: bytes | str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        Inventory.from_json(data, source="drop/n1.json")
    one_clear_line(caught.value)
    return caught.value


def one_clear_line(error: SluiceError) -> None:
    assert str(error).startswith("drop/n1.json: ") and error.remedy
    assert len(str(error).splitlines()) == 1 and len(str(error)) < 2000


def good() -> dict[str, Any]:
    gpu = Gpu("nvidia", 0, "GPU-0", "NVIDIA H100", "/dev/nvidia0", 0, "0000:1b:00.0", 81559, 81008)
    return asdict(Inventory("n1", [gpu], [[Link(LinkType.SELF)]]))


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema_version=2), "inventory schema 2"),
        (lambda d: d.update(schema_version=True), "inventory schema True"),
        (lambda d: d.pop("schema_version"), "inventory schema None"),
        (lambda d: d.update(node="../../etc/passwd"), "node: '../../etc/passwd'"),
        (lambda d: d.update(node="-oProxyCommand=x"), "node: '-oProxyCommand=x'"),
        (lambda d: d.update(links=[]), "not a 1 x 1 matrix"),
        (lambda d: d["gpus"][0].update(vendor="matrox"), "'matrox' is not one of amd, intel, nvidia"),
        (lambda d: d["gpus"][0].update(device_file="/etc/shadow"), "device_file: '/etc/shadow'"),
        (lambda d: d["gpus"][0].update(device_file="/dev/../etc/shadow"), "device_file"),
        (lambda d: d["gpus"][0].update(device_file="/dev/nvidia0\nName=gpu"), r"/dev/nvidia0\nName=gpu"),
        (lambda d: d["gpus"][0].update(model="H100\nCount=9"), "model"),
        (lambda d: d["gpus"][0].update(model="\x1b]0;x\x07"), "model"),
        (lambda d: d["gpus"][0].update(cores="0-3 Flags=x"), "cores"),
        (lambda d: d["gpus"][0].update(uuid="GPU 0"), "uuid"),
        (lambda d: d["gpus"][0].update(pci_address="0000:1B:00.0"), "pci_address"),
        (lambda d: d["gpus"][0].update(memory_usable_mib=90000), "memory_usable_mib: 90000 is not between 0 and 81559"),
        (lambda d: d["gpus"][0].update(memory_total_mib=0), "memory_total_mib"),
        (lambda d: d["gpus"][0].update(memory_total_mib="81559"), "gpus.0.memory_total_mib"),
        (lambda d: d["gpus"][0].update(health="fine"), "gpus.0.health"),
        (lambda d: (d["gpus"].append(dict(d["gpus"][0], index=1)), _square(d)), "occurs twice"),
        (lambda d: d.update(nics=[asdict(Nic("mlx5_0", "0000:18:00.0"))]), "not one link for each GPU and NIC"),
        (lambda d: d.update(cpu_cores=[-2]), "cpu_cores"),
        (lambda d: d.update(problems=[{"vendor": "x", "what": "y"}]), "problems.0.vendor: 'x'"),
    ],
)
def test_refusals_name_value_and_place(change: Change, words: str) -> None:
    document = good()
    Inventory.from_json(json.dumps(document), source="x")
    change(document)
    assert words in str(refused(json.dumps(document)))


def _square(document: dict[str, Any]) -> None:
    document["links"] = [[asdict(Link(LinkType.SELF))] * 2] * 2


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 100_000, '{"schema_version": 1' + "0" * 5000 + "}", "1" * 5000])
def test_deep_and_huge_documents(text: str) -> None:
    refused(text)


def test_fields_of_later_versions_are_ignored() -> None:
    document = good() | {"colour": "green"}
    assert Inventory.from_json(json.dumps(document), source="x").node == "n1"


def test_a_large_node_loads_fast_enough_to_be_bounded() -> None:
    """16 GPUs of 7 instances each, the most that a node has, are far below the size that is read of one file."""
    from gres_probe.collect import MOST_BYTES

    files = ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    parts = [Partition(n, f"MIG-{n}", "1g.10gb", 9984, files) for n in range(7)]
    gpu = [Gpu("nvidia", n, f"GPU-{n}", "m" * 90, f"/dev/nvidia{n}", n, f"0000:{n:02x}:00.0", 1, 1) for n in range(16)]
    for one in gpu:
        one.partitions, one.memory_total_mib = parts, 81559
    inventory = Inventory("n1", gpu, [[Link(LinkType.NVLINK, 18)] * 16] * 16, cpu_cores=list(range(1024)))
    text = inventory.to_json()
    assert len(text) * 4 < MOST_BYTES
    assert Inventory.from_json(text, source="x") == inventory
