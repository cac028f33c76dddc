from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpu_sim import device_files, load_platform, platform_names, read_state, write_node_state
from gpu_sim.layout import Hop
from gpu_sim.platform import Platform
from gpu_sim.sysfs import cpu_list, hop
from sluice.base.errors import UsageError

EXPECTED = {
    # platform: GPUs, first GPU's name, memory MiB, links a GPU
    "arc-a770x2": (2, "Intel(R) Arc(TM) A770 Graphics", 16288, 0),
    "dgx-a100": (8, "NVIDIA A100-SXM4-40GB", 40960, 12),
    "dgx-h100": (8, "NVIDIA H100 80GB HBM3", 81559, 18),
    "dgx-h100-mig": (8, "NVIDIA H100 80GB HBM3", 81559, 18),
    "intel-max-1550x4": (4, "Intel(R) Data Center GPU Max 1550", 131072, 12),
    "h100x1": (1, "NVIDIA H100 80GB HBM3", 81559, 0),
    "l40s-x4": (4, "NVIDIA L40S", 46068, 0),
    "mi300x-platform": (8, "AMD Instinct MI300X", 196592, 7),
    "mixed": (5, "NVIDIA L40S", 46068, 0),
    "rtx4090x4": (4, "NVIDIA GeForce RTX 4090", 24564, 0),
}


def test_every_shipped_platform_is_expected() -> None:
    assert platform_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_platform_becomes_a_node(name: str, tmp_path: Path) -> None:
    platform = load_platform(name)
    write_node_state(tmp_path, platform, "n1")
    state = read_state(tmp_path)
    count, product, memory, links = EXPECTED[name]
    assert len(state.gpus) == count
    gpu = state.gpus[0]
    assert (gpu.name.decode(), gpu.memory_total_mib, gpu.link_count) == (product, memory, links)
    assert len({gpu.uuid for gpu in state.gpus}) == count
    files = device_files(tmp_path)
    assert len({(file.major, file.minor) for file in files}) == len(files)
    assert len({file.path for file in files}) == len(files)
    for index, place in enumerate(platform.gpus):
        device = tmp_path / "sys/bus/pci/devices" / place.pci
        assert device.resolve() == (tmp_path / "sys/devices" / place.under / place.pci).resolve()
        assert int((device / "numa_node").read_text()) == place.numa
        assert (device / "local_cpulist").read_text().strip() == cpu_list(platform.cpu.numa_cpus(place.numa))
        assert (device / "driver").resolve().name in ("nvidia", "amdgpu", "i915")
        assert state.gpus[index].hops[index] == Hop.INTERNAL
    for nic in platform.nics:
        link = tmp_path / "sys/class/infiniband" / nic.name / "device"
        assert link.resolve().name == nic.pci


def test_drm_nodes_in_sysfs_are_the_device_files(tmp_path: Path) -> None:
    write_node_state(tmp_path, load_platform("mixed"), "n1")
    numbers = {Path(file.path).name: f"{file.major}:{file.minor}" for file in device_files(tmp_path)}
    entries = {entry.name: (entry / "dev").read_text().strip() for entry in (tmp_path / "sys/class/drm").iterdir()}
    assert entries == {name: number for name, number in numbers.items() if name.startswith(("card", "renderD"))}
    assert len(entries) == 6


def test_nvidia_minors_may_differ_from_the_order(tmp_path: Path) -> None:
    write_node_state(tmp_path, load_platform("mixed"), "n1")
    assert [gpu.minor for gpu in read_state(tmp_path).gpus[:2]] == [1, 0]


def test_nearness_is_that_of_published_topologies() -> None:
    dgx = load_platform("dgx-h100")
    nics = {nic.name: nic for nic in dgx.nics}
    assert hop(dgx.gpus[0], nics["mlx5_0"]) == Hop.MULTIPLE  # PXB
    assert hop(dgx.gpus[0], nics["mlx5_3"]) == Hop.NODE
    assert hop(dgx.gpus[0], nics["mlx5_6"]) == Hop.SYSTEM
    l40s = load_platform("l40s-x4")
    assert hop(l40s.gpus[0], l40s.gpus[1]) == Hop.SINGLE  # PIX
    arc = load_platform("arc-a770x2")
    assert hop(arc.gpus[0], arc.gpus[1]) == Hop.HOSTBRIDGE  # PHB


def test_names_decide_identities(tmp_path: Path) -> None:
    platform = load_platform("dgx-h100")
    for folder, node in (("a", "n1"), ("b", "n1"), ("c", "n2")):
        write_node_state(tmp_path / folder, platform, node)
    uuids = {folder: [gpu.uuid for gpu in read_state(tmp_path / folder).gpus] for folder in "abc"}
    assert uuids["a"] == uuids["b"]
    assert not set(uuids["a"]) & set(uuids["c"])


def test_shared_trees_are_written_once(tmp_path: Path) -> None:
    platform = load_platform("rtx4090x4")
    for node in ("n1", "n2"):
        write_node_state(tmp_path / node, platform, node, shared=tmp_path / "shared")
    assert (tmp_path / "n1/sys").resolve() == (tmp_path / "n2/sys").resolve()
    assert (tmp_path / "n1/sys/bus/pci/devices/0000:01:00.0/numa_node").read_text() == "0\n"


def test_own_platform_with_own_model(tmp_path: Path) -> None:
    document = yaml.safe_load(
        (Path(load_platform.__code__.co_filename).parent / "platforms/rtx4090x4.yaml").read_text()
    )
    models = yaml.safe_load((Path(load_platform.__code__.co_filename).parent / "models.yaml").read_text())
    document["models"] = {"mine": {**models["rtx-4090-24gb"], "name": "Mine"}}
    document["gpus"][0]["model"] = "mine"
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(document))
    platform = load_platform(path)
    assert [platform.model_of(i).name for i in range(2)] == ["Mine", "NVIDIA GeForce RTX 4090"]


BROKEN = {
    "numa": (["gpus", 0, "numa"], 5, "NUMA node 5 of 1"),
    "model": (["gpus", 0, "model"], "voodoo", "not in models.yaml"),
    "pci": (["gpus", 0, "pci"], "01:00", "pattern"),
    "twice": (["gpus", 0, "pci"], "0000:41:00.0", "used twice"),
    "driver": (["drivers"], {}, "no driver of nvidia"),
    "vendor": (["drivers"], {"matrox": {"version": "1"}}, "nvidia"),
    "cores": (["cpu", "numa_nodes"], 5, "must divide"),
    "key": (["colour"], "red", "not permitted"),
    "mig": (["gpus", 0, "mig"], {"instances": ["1g.5gb"]}, "has no MIG"),
    "links": (["links"], [{"kind": "nvlink", "version": 1, "speed_mbit": 1}], "exactly one of"),
    "far": (
        ["links"],
        [{"kind": "nvlink", "version": 1, "speed_mbit": 1, "pairs": [[0, 9, 1]]}],
        "GPU that is not there",
    ),
    "many": (["links"], [{"kind": "nvlink", "version": 1, "speed_mbit": 1, "pairs": [[0, 1, 19]]}], "at most 18"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_platform_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    place, value, complaint = BROKEN[case]
    document = yaml.safe_load(
        (Path(load_platform.__code__.co_filename).parent / "platforms/rtx4090x4.yaml").read_text()
    )
    node = document
    for key in place[:-1]:
        node = node[key]  # type: ignore[index]
    node[place[-1]] = value  # type: ignore[index]
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(UsageError) as caught:
        load_platform(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="known: arc-a770x2"):
        load_platform("dgx-h1000")
    with pytest.raises(UsageError, match="No such file"):
        load_platform(tmp_path / "none.yaml")
    (tmp_path / "text.yaml").write_text("just words")
    with pytest.raises(UsageError, match="Platform|mapping|dictionary"):
        load_platform(tmp_path / "text.yaml")


def test_figures_of_a_platform_fit_the_hardware() -> None:
    for name in platform_names():
        platform: Platform = load_platform(name)
        for index in range(len(platform.gpus)):
            model = platform.model_of(index)
            assert model.temperature.idle < model.temperature.slowdown <= model.temperature.shutdown
            assert sum(profile.memory_mib <= model.memory.total_mib for profile in model.mig_profiles) == len(
                model.mig_profiles
            )
