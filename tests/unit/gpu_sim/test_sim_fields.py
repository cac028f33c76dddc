from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_node import Node

from gpu_sim import read_state
from gpu_sim.fields import FIELDS, get_values, set_values
from sluice.base.errors import SluiceError, UsageError

GOOD = [
    ("dgx-h100", "temperature", "84", "84"),
    ("dgx-h100", "temperature_memory", "90", "90"),
    ("dgx-h100", "power", "698.5", "698.5"),
    ("dgx-h100", "power_limit", "500", "500"),
    ("dgx-h100", "power_limit", "default", "700"),
    ("dgx-h100", "driver_power_limits", "2", "2"),
    ("dgx-h100", "utilisation", "100", "100"),
    ("dgx-h100", "clock_graphics", "1980", "1980"),
    ("dgx-h100", "throttle", "sw_power_cap,hw_thermal", "sw_power_cap,hw_thermal"),
    ("dgx-h100", "throttle", "none", "none"),
    ("dgx-h100", "memory_used", "10G", "10240M"),
    ("dgx-h100", "process", "4242:2G:graphics:Xorg", "4242:2048M"),
    ("dgx-h100", "ecc_uncorrected", "1", "1"),
    ("dgx-h100", "remapped_uncorrectable", "3", "3"),
    ("dgx-h100", "remap_pending", "yes", "yes"),
    ("dgx-h100", "xid", "79,48", "79,48"),
    ("dgx-h100", "lost", "on", "yes"),
    ("dgx-h100", "pcie_width", "8", "8"),
    ("dgx-h100", "pcie_generation", "1", "1"),
    ("dgx-h100", "mig_layout", "3g.40gb,1g.10gb", "3g.40gb,1g.10gb"),
    ("dgx-h100", "mig", "on", "yes"),
    ("dgx-h100", "driver_delay", "20", "20"),
    ("dgx-h100", "driver_hang", "yes", "yes"),
    ("dgx-h100", "driver_generation", "470", "470"),
    ("mi300x-platform", "retired_double", "2", "2"),
    ("rtx4090x4", "fan", "80", "80"),
]


@pytest.mark.parametrize(("platform", "field", "text", "reads"), GOOD)
def test_a_field_reads_as_it_was_set(
    make_node: Callable[..., Node], platform: str, field: str, text: str, reads: str
) -> None:
    node = make_node(platform)
    before = get_values(node.folder, 0)
    node.set(1, **{field: text})
    assert node.get(1, field) == reads
    if not field.startswith("driver_"):
        assert get_values(node.folder, 0) == before  # the other GPU is as it was


BAD = [
    ("dgx-h100", "temperature", "900", "out of its range 0 to 97 C"),
    ("dgx-h100", "temperature", "-1", "out of its range"),
    ("dgx-h100", "temperature", "warm", "not a whole number"),
    ("dgx-h100", "power", "2000", "out of its range 0 to 875 W"),
    ("dgx-h100", "power", "-5", "out of its range"),
    ("dgx-h100", "power_drawn", "300", "cannot be changed"),
    ("dgx-h100", "power_limit", "100", "out of its range 200 to 700 W"),
    ("dgx-h100", "utilisation", "101", "out of its range 0 to 100"),
    ("dgx-h100", "clock_graphics", "1981", "out of its range"),
    ("dgx-h100", "memory_used", "81009M", "81009 MiB in use of 81008 usable"),
    ("dgx-h100", "process", "10:80G", "in use of 81008 usable"),
    ("dgx-h100", "process", "0:1G", "want PID:SIZE"),
    ("dgx-h100", "process", "10:1G:opera", "no kind of process 'opera'"),
    ("dgx-h100", "processes", "all", "only none"),
    ("dgx-h100", "ecc_corrected", "-1", "out of its range"),
    ("dgx-h100", "link18", "down", "it has links 0 to 17"),
    ("dgx-h100", "link0_dust", "1", "counters replays, recoveries, crc"),
    ("dgx-h100", "links", "sideways", "want yes or no"),
    ("dgx-h100", "retired_single", "1", "remaps rows instead"),
    ("dgx-h100", "fan", "50", "passively cooled"),
    ("dgx-h100", "mig_layout", "9g.90gb", "no MIG profile '9g.90gb'"),
    ("dgx-h100", "mig_layout", "4g.40gb,4g.40gb", "no room"),
    ("dgx-h100", "mig_layout", "3g.40gb,3g.40gb,1g.10gb", "no room"),
    ("dgx-h100", "pcie_width", "3", "1, 2, 4, 8 or 16"),
    ("dgx-h100", "pcie_width", "32", "out of its range"),
    ("dgx-h100", "pcie_generation", "6", "out of its range"),
    ("dgx-h100", "throttle", "lazy", "no throttle reason 'lazy'"),
    ("dgx-h100", "xid", "0", "out of its range"),
    ("dgx-h100", "uuid", "GPU-1", "cannot be changed"),
    ("dgx-h100", "voltage", "1", "none of that name"),
    ("rtx4090x4", "ecc_corrected", "1", "its ECC is off"),
    ("rtx4090x4", "link0", "down", "no NVLink, xGMI or Xe Link"),
    ("rtx4090x4", "links", "down", "no NVLink, xGMI or Xe Link"),
    ("rtx4090x4", "mig", "on", "has no MIG"),
    ("rtx4090x4", "temperature_memory", "50", "no memory temperature sensor"),
    ("arc-a770x2", "ecc_uncorrected", "1", "it has no ECC"),
    ("arc-a770x2", "ecc", "on", "it has no ECC"),
    ("mi300x-platform", "xid", "79", "only NVIDIA's driver"),
    ("mi300x-platform", "remap_pending", "yes", "no row remapping"),
]


@pytest.mark.parametrize(("platform", "field", "text", "complaint"), BAD)
def test_what_the_hardware_could_not_have_is_refused(
    make_node: Callable[..., Node], platform: str, field: str, text: str, complaint: str
) -> None:
    node = make_node(platform)
    before = node.state.read_bytes()
    with pytest.raises(UsageError) as caught:
        node.set(0, **{"pcie_replays": 5, field: text})
    assert complaint in str(caught.value)
    assert node.state.read_bytes() == before  # also the good half of the change was not made


def test_unknown_gpu_and_node(dgx: Node, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GPU '8'"):
        dgx.set(8, temperature=40)
    with pytest.raises(SluiceError, match="is the cluster up"):
        set_values(tmp_path / "nowhere", 0, {"temperature": "40"})


def test_a_gpu_is_found_by_uuid(dgx: Node) -> None:
    dgx.set(dgx.get(5, "uuid"), temperature=66)
    assert dgx.get(5, "temperature") == "66"


def test_errors_count_for_the_whole_life(dgx: Node) -> None:
    dgx.set(0, ecc_uncorrected=2)
    dgx.set(0, ecc_uncorrected=0)  # as after a reboot
    dgx.set(0, ecc_uncorrected=3)
    assert dgx.get(0, "ecc_uncorrected_total") == "5"


def test_a_link_goes_down_at_both_ends(make_node: Callable[..., Node]) -> None:
    node = make_node("mi300x-platform")
    node.set(0, link2="down")
    gpus = read_state(node.folder).gpus
    peer = gpus[0].links[2].peer_gpu
    far = [link for link in gpus[peer].links[: gpus[peer].link_count] if not link.up]
    assert [link.peer_gpu for link in far] == [0]


def test_mig_is_not_changed_under_processes(dgx: Node) -> None:
    dgx.set(0, process="77:1G")
    with pytest.raises(UsageError, match="processes use it"):
        dgx.set(0, mig="on")


def test_processes_within_an_instance(dgx: Node) -> None:
    dgx.set(0, mig_layout="1g.10gb,1g.10gb")
    with pytest.raises(UsageError, match="name its GPU instance"):
        dgx.set(0, process="77:1G")
    with pytest.raises(UsageError, match="12288 MiB in use of 9984"):
        dgx.set(0, process="77:12G:compute:python:7")
    dgx.set(0, process="77:9G:compute:python:8")
    dgx.set(0, process="77:0:compute:python:8")
    assert dgx.get(0, "processes") == ""


def test_instances_are_numbered_as_the_driver_does(dgx: Node) -> None:
    dgx.set(1, mig_layout="3g.40gb,2g.20gb,1g.10gb")
    used = [instance for instance in read_state(dgx.folder).gpus[1].instances if instance.used]
    assert [(i.gpu_instance, i.start, i.size) for i in used] == [(1, 0, 4), (5, 4, 2), (13, 6, 1)]
    minors = dict(
        line.rsplit(" ", 1) for line in (dgx.folder / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    for instance in used:
        assert minors[f"gpu1/gi{instance.gpu_instance}/access"] == str(instance.access_minor)
        assert minors[f"gpu1/gi{instance.gpu_instance}/ci0/access"] == str(instance.compute_minor)


def test_every_field_reads_on_every_kind_of_gpu(make_node: Callable[..., Node]) -> None:
    for platform in ("dgx-h100-mig", "mi300x-platform", "arc-a770x2"):
        values = get_values(make_node(platform, platform).folder, 0)
        assert set(FIELDS) <= set(values)
        assert all(isinstance(text, str) for text in values.values())


def test_changes_at_the_same_time_are_all_made(dgx: Node) -> None:
    threads = [threading.Thread(target=dgx.set, args=(gpu,), kwargs={"temperature": 40 + gpu}) for gpu in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [dgx.get(gpu, "temperature") for gpu in range(8)] == [str(40 + gpu) for gpu in range(8)]
    assert read_state(dgx.folder).head.generation == 9
