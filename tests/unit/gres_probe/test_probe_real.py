"""The probe on this machine's own GPUs, compared with what nvidia-smi reports. Needs no Slurm and no root."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys

import pytest

from gres_probe.inventory import Health, Inventory, LinkType

pytestmark = pytest.mark.gpu

QUERY = "index,uuid,name,pci.bus_id,memory.total,driver_version,compute_cap,vbios_version,temperature.gpu"


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    """What nvidia-smi says, a dictionary a GPU."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi: this machine has no NVIDIA driver")
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"nvidia-smi: {done.stdout.strip() or done.stderr.strip()}")
    rows = csv.DictReader(io.StringIO(done.stdout), skipinitialspace=True)
    return [{key.split(" [")[0]: value for key, value in row.items()} for row in rows]


@pytest.fixture(scope="module")
def probed(told: list[dict[str, str]]) -> Inventory:
    """What the probe reports, through the command and its JSON; skips where there are no GPUs."""
    words = [sys.executable, "-m", "sluice.main", "probe", "--json", "--vendor", "nvidia", "--timeout", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    inventory = Inventory.from_json(done.stdout, source="sluice probe")
    assert done.returncode == (1 if inventory.problems else 0), done.stderr
    return inventory


def test_every_gpu_as_nvidia_smi_lists_it(told: list[dict[str, str]], probed: Inventory) -> None:
    assert probed.problems == []
    assert [str(gpu.index) for gpu in probed.gpus] == [row["index"] for row in told]
    for gpu, row in zip(probed.gpus, told, strict=True):
        assert gpu.uuid == row["uuid"]
        assert gpu.model == row["name"]
        assert row["pci.bus_id"].lower().endswith(gpu.pci_address)
        assert abs(gpu.memory_total_mib - int(row["memory.total"])) <= 1
        assert gpu.driver_version == row["driver_version"]
        assert gpu.capability == row["compute_cap"]
        assert gpu.firmware_version == row["vbios_version"]
        assert 0 < gpu.memory_usable_mib <= gpu.memory_total_mib
        assert gpu.temperature_c is not None and abs(gpu.temperature_c - int(row["temperature.gpu"])) <= 15
        assert gpu.health is not Health.UNKNOWN
        assert gpu.cores


def test_matrix_is_symmetric_and_known(probed: Inventory) -> None:
    for row in range(len(probed.gpus)):
        assert probed.links[row][row].type is LinkType.SELF
        for column in range(len(probed.gpus)):
            assert probed.links[row][column] == probed.links[column][row]
            assert probed.links[row][column].type is not LinkType.UNKNOWN


def test_topology_prints_a_row_for_each_gpu(probed: Inventory) -> None:
    words = [sys.executable, "-m", "sluice.main", "topo", "--json", "--vendor", "nvidia", "--timeout", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    document = json.loads(done.stdout)
    assert [gpu["uuid"] for gpu in document["gpus"]] == [gpu.uuid for gpu in probed.gpus]
    assert len(document["links"]) == len(probed.gpus)
