"""What the drawing of a node's topology shows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gres_probe.inventory import Inventory, Link, LinkType
from sluice.web.pages.topology import Drawing, draw
from tests.unit.web.test_pages import fetch
from tests.web.demo_site import Demo, DemoSite


def drawn(inventory: Inventory) -> Drawing:
    found = draw(asdict(inventory))
    assert found is not None
    return found


def joined(inventory: Inventory, pairs: dict[tuple[int, int], Link]) -> Drawing:
    count = len(inventory.gpus)
    inventory.links = [
        [
            Link(LinkType.SELF) if a == b else pairs.get((min(a, b), max(a, b)), Link(LinkType.SYSTEM))
            for b in range(count)
        ]
        for a in range(count)
    ]
    return drawn(inventory)


def test_gpus_behind_a_switch_hang_on_one_bar_and_each_nic_is_below_its_gpu() -> None:
    found = drawn(Demo(40).inventory("gpu01"))
    assert [bar.label for bar in found.bars] == ["NVLink x18"]
    assert sum(line.kind == "fabric" for line in found.lines) == 8
    assert sum(line.kind == "pci" for line in found.lines) == 8
    assert [frame.label for frame in found.frames] == ["NUMA 0", "NUMA 1"]
    assert [nic.x for nic in found.nics] == [gpu.x for gpu in found.gpus]
    assert found.said == [("NVLink x18", [f"GPU {n}" for n in range(8)])]


def test_pairs_and_groups_of_links_are_told_apart() -> None:
    bridge, four = Link(LinkType.NVLINK, 4), {(a, b) for a in range(4) for b in range(4) if a < b}
    found = joined(Demo(40).inventory("gpu01"), {pair: bridge for pair in {*four, (4, 5), (6, 7)}})
    assert len(found.bars) == 1
    assert [line.label for line in found.lines if line.label.startswith("NV")] == ["NVLink x4"] * 2
    assert found.said[1:] == [("NVLink x4", ["GPU 4", "GPU 5"]), ("NVLink x4", ["GPU 6", "GPU 7"])]


def test_all_boxes_are_inside_and_none_covers_another() -> None:
    for name in ("gpu01", "gpu04", "gpu05"):
        found = drawn(Demo(40).inventory(name))
        boxes: list[Any] = [*found.gpus, *found.nics, *found.bars]
        for box in boxes:
            assert box.x >= 0 and box.x + box.width <= found.width and box.y >= 0 and box.end <= found.height
        for one in boxes:
            for other in boxes:
                apart = one.x + one.width <= other.x or other.x + other.width <= one.x
                assert one is other or apart or one.end <= other.y or other.end <= one.y


def test_a_node_without_gpus_or_with_too_many_is_not_drawn() -> None:
    inventory = asdict(Demo(40).inventory("gpu01"))
    assert draw({**inventory, "gpus": []}) is None
    assert draw({**inventory, "gpus": inventory["gpus"] * 9}) is None


def test_nothing_drawn_has_the_class_of_the_pages_frame_whose_width_it_would_take(tmp_path: Path) -> None:
    text = fetch(DemoSite(Demo(40), tmp_path), "/nodes/gpu01", "oper").text
    assert text.count('class="numa"') == 2 and text.count('class="frame"') == 1
